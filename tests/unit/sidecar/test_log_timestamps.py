"""When a line was printed, by the line itself."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.logs.timestamps import Clock


def utc(*parts: int, micro: int = 0) -> float:
    return datetime(*parts, micro, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("line", "at"),
    [
        (
            b" [2026-08-22 10:11:12.345678] iteration 1/ 2",
            utc(2026, 8, 22, 10, 11, 12, micro=345678),
        ),
        (b"[titan] 2026-05-18 16:04:46,338 - root", utc(2026, 5, 18, 16, 4, 46, micro=338000)),
        (b"2026-05-18T16:04:46.338000001Z stderr F x", utc(2026, 5, 18, 16, 4, 46, micro=338000)),
        (b"[INFO|2024-11-02 10:11:12] x >> y", utc(2024, 11, 2, 10, 11, 12)),
        (b"2026/01/02 03:04:05 x", utc(2026, 1, 2, 3, 4, 5)),
        (b"20260102 03:04:05 x", utc(2026, 1, 2, 3, 4, 5)),
        (b"[rank0]:[E321 02:07:08.408271257 Pro", utc(2000, 3, 21, 2, 7, 8, micro=408271)),
        (b"E0325 20:57:27.620000 2606 site", utc(2000, 3, 25, 20, 57, 27, micro=620000)),
        (b"Feb 23 16:24:18 node-3 x", utc(2000, 2, 23, 16, 24, 18)),
        (b"[10:11:12] x", 10 * 3600 + 11 * 60 + 12),
    ],
)
def test_the_usual_forms_are_read(line, at):
    """Silence in a replayed log would not be seen, or seen where there was none."""
    assert Clock().read(line) == pytest.approx(at, abs=1e-6)


@pytest.mark.parametrize(
    "line",
    [
        b"iter 12: loss 2.31, time 39.71ms",
        b"10%|# | 100/1000 [00:41<06:09,  2.44it/s]",
        b"2026-13-31 10:11:12 no such day",
        b"[rank0]: x 99:99:99",
        b"",
    ],
)
def test_what_is_no_time_is_not_taken_for_one(line):
    """A progress bar's remaining time would move the log's clock."""
    assert Clock().read(line) is None


def test_a_line_without_a_year_has_that_of_the_lines_before():
    """The watchdog's lines would lie decades before the training's."""
    clock = Clock()
    first = clock.read(b"[2026-03-21 02:00:00] x")
    assert clock.read(b"[E321 02:00:10.5 Pro") == first + 10.5


def test_a_time_of_day_goes_on_past_midnight():
    """A night's training would run backwards."""
    clock = Clock()
    late = clock.read(b"[23:59:50] x")
    assert clock.read(b"[00:00:10] y") == late + 20


@given(st.lists(st.binary(max_size=60), max_size=20))
def test_no_bytes_break_it(lines):
    """One odd line would end a replay."""
    clock = Clock()
    for line in lines:
        at = clock.read(line)
        assert at is None or at == at  # noqa: PLR0124 - a number
