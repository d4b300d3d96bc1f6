import os
import signal
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout.hang import Phase
from scout.page_layout import GROUPS_MAX, GroupWords, pack_what, ranks_of, runs_of
from scout.progress import (
    PageHeldError,
    PageReader,
    PageWriter,
    ProgressPageError,
    WrongTokenError,
    create_page,
)

ROOT = Path(__file__).parents[3]
DEADLINE_S = 60

CRAZY_WRITER = """
import sys
from scout.progress import PageWriter
writer = PageWriter.open(sys.argv[1], 7)
number = 0
print("writing", flush=True)
while True:
    number += 1
    writer.publish(number, collective_seq=number, now_ns=number, fingerprint=number,
                   phase_limit_ns=number)
    writer.beat(number, number)
"""


def in_a_child(code, *arguments):
    """Start Python code in a process of its own that can import the packages."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def page(tmp_path):
    """A fresh page that token 7 opens."""
    create_page(tmp_path / "page", 7)
    return tmp_path / "page"


def test_nothing_was_published_is_its_own_answer(page):
    """A rank that never started would read as one at step zero."""
    assert PageReader.open(page, 7).read() is None


def test_what_is_published_is_read(page):
    """The node would judge ranks by something they never said."""
    reader, writer = PageReader.open(page, 7), PageWriter.open(page, 7)
    writer.publish(
        3,
        Phase.CHECKPOINT,
        9,
        now_ns=50,
        phase_started_ns=40,
        fingerprint=(1 << 63) - 1,
        phase_limit_ns=600,
    )
    said = reader.read()
    assert said is not None
    assert (said.step, said.phase, said.collective_seq) == (3, Phase.CHECKPOINT, 9)
    assert (said.progress_ns, said.phase_started_ns, said.phase_limit_ns) == (50, 40, 600)
    assert (said.fingerprint, said.beat_ns, said.stable) == ((1 << 63) - 1, None, True)


def test_a_beat_alone_is_no_progress(page):
    """A rank stuck before its first step would look as if it had made one."""
    reader, writer = PageReader.open(page, 7), PageWriter.open(page, 7)
    writer.beat(10, 4)
    said = reader.read()
    assert said is not None
    assert (said.step, said.progress_ns, said.beat_ns, said.collective_seq) == (None, None, 10, 4)


def test_the_later_word_on_collectives_counts(page):
    """A laggard would be named from a number that is seconds old."""
    reader, writer = PageReader.open(page, 7), PageWriter.open(page, 7)
    writer.beat(10, 4)
    writer.publish(1, collective_seq=6, now_ns=20)
    assert reader.read().collective_seq == 6
    writer.beat(30, 8)
    assert reader.read().collective_seq == 8
    writer.beat(40, None)
    assert reader.read().collective_seq == 6


def test_the_page_is_private(page):
    """Another user of the machine would steer the job's restarts."""
    assert stat.S_IMODE(page.stat().st_mode) == 0o600


def test_a_wrong_token_is_refused_in_words(page):
    """A worker of an older generation would publish as if it belonged to this one."""
    for end in (PageReader, PageWriter):
        with pytest.raises(WrongTokenError, match="belongs to another run"):
            end.open(page, 8)


def test_a_live_owner_keeps_its_page(page):
    """Two sidecars would overwrite each other's page."""
    with pytest.raises(PageHeldError, match=f"process {os.getpid()}, which is running"):
        create_page(page, 9)
    PageReader.open(page, 7)


def test_a_dead_owners_page_is_taken_over(tmp_path):
    """A sidecar killed once could never start again."""
    page = tmp_path / "page"
    code = "import sys; from scout.progress import create_page; create_page(sys.argv[1], 5)"
    assert in_a_child(code, page).wait(DEADLINE_S) == 0
    create_page(page, 7)
    assert PageReader.open(page, 7).read() is None
    assert list(tmp_path.iterdir()) == [page]


def test_a_foreign_file_is_left_alone(tmp_path):
    """A mistyped path would cost somebody a file."""
    precious = tmp_path / "precious"
    precious.write_text("data")
    with pytest.raises(ProgressPageError, match="is not a progress page"):
        create_page(precious, 1)
    with pytest.raises(ProgressPageError, match="is not a progress page"):
        PageReader.open(precious, 1)
    assert precious.read_text() == "data"


def test_another_layout_is_refused_in_words(page):
    """Fields of another version would be read as numbers of this one."""
    with page.open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("=Q", 99))
    with pytest.raises(ProgressPageError, match="has layout 99"):
        PageReader.open(page, 7)


def test_a_second_live_writer_is_refused(page):
    """A data loader that re-runs the script would publish in its rank's name."""
    child = in_a_child(CRAZY_WRITER, page)
    try:
        assert child.stdout.readline() == "writing\n"
        with pytest.raises(PageHeldError, match=f"written by process {child.pid}"):
            PageWriter.open(page, 7)
    finally:
        child.kill()
        child.communicate()
    PageWriter.open(page, 7).publish(1)


def test_a_number_outside_its_field_is_refused(page):
    """A negative step would read as a gigantic one."""
    with pytest.raises(struct.error):
        PageWriter.open(page, 7).publish(-1)


def test_a_reader_never_sees_half_a_publication_and_survives_the_writers_kill(tmp_path):
    """A torn read would move a rank by years, and a killed rank would lose its last words."""
    reads = 0
    for attempt in range(12):
        page = tmp_path / f"page-{attempt}"
        create_page(page, 7)
        reader = PageReader.open(page, 7)
        child = in_a_child(CRAZY_WRITER, page)
        try:
            assert child.stdout.readline() == "writing\n"
            last, deadline = 0, time.monotonic() + DEADLINE_S
            while last < 2000 and time.monotonic() < deadline:
                said = reader.read()
                if said is None or said.step is None or not said.stable:
                    continue
                assert said.step == said.progress_ns == said.fingerprint == said.phase_limit_ns
                assert said.step >= last
                last, reads = said.step, reads + 1
        finally:
            child.send_signal(signal.SIGKILL)
            child.communicate()
        after = reader.read()
        assert after is not None
        assert after.stable
        assert after.step >= last
        assert after.step == after.progress_ns == after.fingerprint
    assert reads > 0


@given(st.data())
def test_a_slot_left_half_written_shows_the_words_before(tmp_path_factory, data):
    """The one publication that matters most, the last before a crash, would read as noise."""
    page = tmp_path_factory.mktemp("torn") / "page"
    create_page(page, 7)
    writer, reader = PageWriter.open(page, 7), PageReader.open(page, 7)
    count = data.draw(st.integers(1, 4))
    for step in range(1, count + 1):
        writer.publish(step, now_ns=step)
    before = page.read_bytes()
    writer.publish(count + 1, now_ns=count + 1)
    after = page.read_bytes()
    changed = [at for at in range(len(before)) if before[at] != after[at]]
    cut = data.draw(st.sampled_from(changed))
    with page.open("r+b") as file:
        file.seek(cut)
        file.write(before[cut:])
    said = reader.read()
    assert (said.step, said.stable) == (count, True)
    again = PageWriter.open(page, 7)
    again.publish(77)
    assert reader.read().step == 77


def test_a_page_with_nothing_but_a_half_written_word_is_unstable(page):
    """Noise would read as progress, or as a rank that never spoke."""
    PageWriter.open(page, 7).publish(5)
    with page.open("r+b") as file:
        file.seek(256 + 8)
        file.write(b"\1")
    said = PageReader.open(page, 7).read()
    assert said is not None
    assert (said.step, said.stable) == (None, False)


def test_a_reader_falls_back_on_what_it_saw_whole(page):
    """A rank whose page is overwritten would lose its last position."""
    PageWriter.open(page, 7).publish(5)
    reader = PageReader.open(page, 7)
    assert reader.read().step == 5
    with page.open("r+b") as file:
        file.seek(256 + 8)
        file.write(b"\1")
    said = reader.read()
    assert (said.step, said.stable) == (5, False)


def words(group, ranks, *, seq=3, fingerprint=None, operation=0, inside=False):
    return GroupWords(
        group=group,
        name=f"group-{group}",
        ranks=tuple(ranks),
        seq=seq,
        fingerprint=fingerprint,
        operation=operation,
        inside=inside,
    )


def test_groups_are_read_with_their_members(page):
    """Nobody could say which of twenty groups a rank is late for."""
    reader, writer = PageReader.open(page, 7), PageWriter.open(page, 7)
    dp, tp = words(5, range(0, 1024, 8), fingerprint=77, operation=2), words(6, [0, 1, 5])
    writer.beat(10, 4, [dp, tp])
    groups = reader.read().groups
    assert [(it.name, it.seq, it.op, it.fingerprint) for it in groups] == [
        ("group-5", 3, "all_reduce", 77),
        ("group-6", 3, "", 0),
    ]
    assert [it.ranks for it in groups] == [tuple(range(0, 1024, 8)), (0, 1, 5)]
    writer.beat(11, 4, [words(7, [0])])
    assert [it.ranks for it in reader.read().groups] == [(0,)]


def test_a_thread_that_came_out_of_a_collective_is_not_inside_it(page):
    """A rank that went on would be taken for one that waits, until the next sample."""
    reader, writer = PageReader.open(page, 7), PageWriter.open(page, 7)
    writer.write(3, Phase.COLLECTIVE, 20, 0, 9 + 1, 20, 0, 5, pack_what(4, inside=True), 20)
    own = words(5, [0, 1], fingerprint=9, operation=4, inside=True)
    writer.beat(25, 4, [own, words(6, [0, 2])])
    said = reader.read()
    assert (said.collective_since_ns, said.phase, said.fingerprint) == (20, Phase.COLLECTIVE, 9)
    assert [(it.inside, it.op) for it in said.groups] == [(True, "broadcast"), (False, "")]
    writer.write(3, Phase.FORWARD, 30, 0, 9 + 1, 30, 0, 5, pack_what(4, inside=False), 0)
    assert [it.inside for it in reader.read().groups] == [False, False]


def test_groups_without_bound_do_not_break_the_page(page):
    """One script that makes a group per layer would silence its rank."""
    reader, writer = PageReader.open(page, 7), PageWriter.open(page, 7)
    odd = [words(it, [2**k for k in range(16)]) for it in range(1, 200)]
    writer.beat(10, 4, odd)
    assert 0 < len(reader.read().groups) <= GROUPS_MAX


@given(st.sets(st.integers(0, 100_000)))
def test_ranks_survive_being_written_as_runs(ranks):
    """A wait would lead to a rank that is no member."""
    assert ranks_of(runs_of(sorted(ranks))) == tuple(sorted(ranks))


def test_half_written_names_show_the_names_before(page):
    """A kill in the wrong moment would leave counts of groups that nobody can name."""
    writer = PageWriter.open(page, 7)
    writer.beat(10, 4, [words(5, [0, 1])])
    writer.beat(11, 4, [words(5, [0, 1]), words(6, [0, 2])])
    text = page.read_bytes()
    at = text.rindex(b'"group-6"')
    with page.open("r+b") as file:
        file.seek(at)
        file.write(b"noise")
    assert [it.name for it in PageReader.open(page, 7).read().groups] == ["group-5"]
    PageWriter.open(page, 7).beat(12, 4, [words(6, [0, 2])])
    assert [it.name for it in PageReader.open(page, 7).read().groups] == ["group-6"]


def test_a_checkpoint_phase_says_which_way_the_bytes_go(page):
    """A storage that cannot be read and one that is full are mended differently."""
    PageWriter.open(page, 7).write(1, Phase.CHECKPOINT, 5, 0, 0, 5, 9, 0, pack_what(0, False, 2))
    said = PageReader.open(page, 7).read()
    assert (said.phase, said.detail, said.phase_limit_ns) == (Phase.CHECKPOINT, "write", 9)


@pytest.mark.parametrize("since_ns", [0, 60])
def test_a_collective_entered_since_the_last_sample_is_shown(page, since_ns):
    """A process that dies of a collective is never sampled in it, and its vote would be missing."""
    reader, writer = PageReader.open(page, 7), PageWriter.open(page, 7)
    writer.beat(50, 8, [words(1, (0, 1), seq=8, fingerprint=70, operation=1)])
    what = pack_what(2, inside=since_ns != 0)
    writer.write(3, Phase.COLLECTIVE, 60, 0, 91, 60, 0, 1, what, since_ns, 10)
    (shown,) = reader.read().groups
    assert (shown.seq, shown.fingerprint, shown.op) == (9, 90, "all_reduce")
    assert shown.inside is (since_ns != 0)
    writer.beat(70, 12, [words(1, (0, 1), seq=12, fingerprint=71, operation=1)])
    (shown,) = reader.read().groups
    assert (shown.seq, shown.fingerprint, shown.inside) == (12, 71, False)


@pytest.mark.parametrize("left", [0, 1, 200, 4096, 16383])
def test_a_page_that_is_cut_short_under_its_reader_is_an_error_and_no_signal(page, left):
    """SIGBUS would end the sidecar, and every worker of the node with it."""
    code = """
import os, sys
from scout.progress import PageReader, PageWriter, ProgressPageError
PageWriter.open(sys.argv[1], 7).publish(3)
reader = PageReader.open(sys.argv[1], 7)
assert reader.read().step == 3
os.truncate(sys.argv[1], int(sys.argv[2]))
try:
    reader.read()
except ProgressPageError as error:
    print(error)
"""
    child = in_a_child(code, page, left)
    said, _ = child.communicate(timeout=DEADLINE_S)
    assert child.returncode == 0
    assert said == f"progress page {page} was cut short\n"


def test_a_page_whose_file_was_removed_still_tells_its_last_words(page):
    """A tidy-up of /dev/shm must not blind the node to ranks that run."""
    reader, writer = PageReader.open(page, 7), PageWriter.open(page, 7)
    writer.publish(3)
    page.unlink()
    assert reader.read().step == 3
    writer.publish(4)
    assert reader.read().step == 4
