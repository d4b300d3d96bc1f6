import threading

import pytest

from scout.hang import Phase
from scout.progress import PageReader, PageWriter, create_page
from worker_shim.phases import LIMIT_S_MAX, checkpoint_phase, declared_phase
from worker_shim.session import StepCounter
from worker_shim.track import DECLARED_MAX, Track


@pytest.fixture
def rank(tmp_path):
    """A track and how its page reads after a tick."""
    page = tmp_path / "page"
    create_page(page, 7)
    writer, reader = PageWriter.open(page, 7), PageReader.open(page, 7)
    track = Track(writer, StepCounter())

    def read(now_ns=1 << 62):
        track.note(now_ns, is_heard=False)
        writer.beat(now_ns, None, (), track.observe(now_ns))
        return reader.read()

    return track, read


def quiet(text):
    raise AssertionError(text)


def in_another_thread(act):
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def test_a_declared_phase_stands_whatever_hooks_see(rank):
    """Each forward pass of a declared evaluation would end the declaration."""
    track, read = rank
    with declared_phase(track, "evaluate", 600, quiet):
        track.mark(Phase.FORWARD)
        said = read()
        assert (said.phase, said.phase_limit_ns) == (Phase.EVALUATE, 600 * 10**9)
        assert said.progress_ns == 1 << 62
    track.mark(Phase.FORWARD)
    said = read(1 << 61)
    assert (said.phase, said.phase_limit_ns) == (Phase.FORWARD, None)


def test_nested_phases_end_one_by_one_and_inherit_what_is_left_of_a_limit(rank):
    """A checkpoint inside an evaluation would be judged as if nothing had been declared."""
    track, read = rank
    with declared_phase(track, "evaluate", 600, quiet):
        with checkpoint_phase(track, "write", None, quiet):
            said = read(1)
            assert (said.phase, said.detail) == (Phase.CHECKPOINT, "write")
            assert 0 < said.phase_limit_ns <= 600 * 10**9
        with checkpoint_phase(track, "read", 5, quiet):
            assert read(1).phase_limit_ns == 5 * 10**9
        said = read(1)
        assert (said.phase, said.detail, said.phase_limit_ns) == (Phase.EVALUATE, "", 600 * 10**9)
    assert read(1).phase is Phase.UNKNOWN


def test_a_phase_that_an_outer_one_ended_changes_nothing_when_it_ends(rank):
    """A generator that is closed late would bring an old phase back."""
    track, read = rank
    outer = track.declare(Phase.EVALUATE, None)
    inner = track.declare(Phase.CHECKPOINT, None)
    track.withdraw(outer)
    track.withdraw(inner)
    assert read(1).phase is Phase.UNKNOWN


def test_phases_that_are_never_left_do_not_pile_up(rank):
    """A script's mistake would grow until the rank runs out of memory."""
    track, _ = rank
    entered = [track.declare(Phase.EVALUATE, None) for _ in range(2 * DECLARED_MAX)]
    assert [it is not None for it in entered].count(True) == DECLARED_MAX


def test_only_the_thread_that_trains_is_heard(rank):
    """A checkpoint written in the background would hide that training stands still."""
    track, read = rank
    track.mark(Phase.BACKWARD)
    outcome = []
    in_another_thread(
        lambda: outcome.extend(
            (
                track.enter(Phase.DATA),
                track.declare(Phase.CHECKPOINT, None),
                track.enter_collective(3, 4, 5),
            )
        )
    )
    assert outcome == [None, None, None]
    assert read().phase is Phase.BACKWARD


def test_a_collective_inside_a_pass_goes_back_to_it(rank):
    """A rank of a tensor-parallel job would be in a collective for the rest of its step."""
    track, read = rank
    track.mark(Phase.FORWARD)
    before = track.enter_collective(3, 4, 5, 6)
    said = read(1)
    assert (said.phase, said.fingerprint) == (Phase.COLLECTIVE, 4)
    assert said.collective_since_ns is not None
    track.leave_collective(before)
    said = read(1)
    assert (said.phase, said.collective_since_ns) == (Phase.FORWARD, None)


def test_movement_between_publications_is_progress_and_silence_is_not(rank):
    """A forward pass of a minute would be a stall, or a stall would look alive."""
    track, read = rank
    track.stepped()
    published = read(1).progress_ns
    track.mark(Phase.FORWARD)
    first = read(published + 100)
    assert (first.phase, first.progress_ns) == (Phase.FORWARD, published + 100)
    assert read(published + 200).progress_ns == published + 100
    track.mark(Phase.FORWARD)
    last = read(published + 300)
    assert (last.progress_ns, last.phase_started_ns) == (published + 300, published + 100)


def test_a_page_that_cannot_be_written_is_let_go_of_once(rank, caplog):
    """Training would end because somebody removed a file."""
    track, _ = rank

    def closed(*_words):
        raise ValueError("mmap closed or invalid")

    track._write = closed
    for _ in range(3):
        track.stepped()
    assert caplog.text.count("progress is no longer published") == 1


@pytest.mark.parametrize("limit_s", [0, -1, float("nan"), LIMIT_S_MAX * 2, "soon"])
def test_a_limit_that_makes_no_sense_is_said_and_left_out(rank, limit_s):
    """A typing error would switch the watch off for ever, or end the script."""
    track, read = rank
    complaints = []
    with declared_phase(track, "evaluate", limit_s, complaints.append):
        said = read(1)
        assert (said.phase, said.phase_limit_ns) == (Phase.EVALUATE, None)
    assert len(complaints) == 1


def test_unknown_words_are_said_and_hurt_nothing(rank):
    """A word of a newer version would end a run of an older one."""
    track, read = rank
    complaints = []
    with declared_phase(track, "warmup", 5, complaints.append):
        assert (read(1).phase, read(1).phase_limit_ns) == (Phase.UNKNOWN, 5 * 10**9)
    with checkpoint_phase(track, "sideways", None, complaints.append):
        assert (read(1).phase, read(1).detail) == (Phase.CHECKPOINT, "")
    assert len(complaints) == 2
    with declared_phase(None, "evaluate", 5, quiet):
        assert read(1).phase is Phase.UNKNOWN
