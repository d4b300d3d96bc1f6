"""What of the workers' output is shown: torchrun's spelling, read without guessing."""

import io
import time

import pytest

from sidecar.workers.files import LogFiles
from sidecar.workers.tee import LINE_BYTES_MAX, Tee, read_tee


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("0", {None: 0}), ("3", {None: 3}), ("0:1,1:2", {0: 1, 1: 2}), ("7:3", {7: 3})],
)
def test_a_choice_is_for_every_rank_or_for_each(text, wanted):
    """A command line that worked with torchrun would show something else here."""
    assert read_tee(text) == wanted


@pytest.mark.parametrize("text", ["", "4", "-1", "x", "0:", ":1", "0:4", "1,2:1", "0:1;1:2", "³"])
def test_another_choice_is_refused(text):
    """A typo would hide the output that was asked for."""
    with pytest.raises(ValueError, match=r"neither 0|one thing of all"):
        read_tee(text)


def test_whole_lines_are_shown_in_order_and_the_rest_at_the_end(tmp_path):
    """Halves of two ranks' lines on one line are read by nobody."""
    files = LogFiles(
        stdout=tmp_path / "out", stderr=tmp_path / "err", error=tmp_path / "error.json"
    )
    files.stdout.write_bytes(b"")
    files.stderr.write_bytes(b"warning\n")
    out, err = io.BytesIO(), io.BytesIO()
    tee = Tee({None: 3}, targets=lambda: (out, err))
    tee.follow({0: (5, files)})
    long = b"x" * (LINE_BYTES_MAX + 10)
    with files.stdout.open("ab", buffering=0) as writer:
        for text in (b"on", b"e\ntw", b"o\n\n", long):
            writer.write(text)
            time.sleep(0.15)
    tee.forget(keep=frozenset())
    tee.close()
    assert err.getvalue() == b"[rank 5] warning\n"
    shown = out.getvalue()
    assert shown.startswith(b"[rank 5] one\n[rank 5] two\n[rank 5] \n[rank 5] xxx")
    assert shown.replace(b"[rank 5] ", b"").replace(b"\n", b"").count(b"x") == len(long)
