"""The mark of a sidecar: read as it was written, and nothing else is read as one."""

import os
from dataclasses import replace

import pytest

from sidecar.workers.guardian import draw_mark
from sidecar.workers.marks import SidecarMark
from sidecar.workers.processes import read_process


def test_a_mark_is_read_as_it_was_written():
    """A mark that changes on the way would protect what should be ended, or end a stranger."""
    mark = draw_mark("job", "node")
    assert SidecarMark.parse(mark.text) == mark
    assert (mark.pid, mark.started) == (os.getpid(), read_process(os.getpid()).started)
    assert mark.environment == {"OUTRIDER_SIDECAR_MARK": mark.text}


def test_two_sidecars_of_one_node_differ_in_their_token_alone():
    """A sidecar could not tell its own workers from those of the one before."""
    one, other = (draw_mark("job", "node") for _ in range(2))
    assert one.token != other.token
    assert replace(one, token=other.token) == other
    assert draw_mark("jo", "bnode").node != one.node


@pytest.mark.parametrize(
    "change",
    ["", "x", "{} ", " {}", "{}\n", "-{}", "{}.1", "0{}"],
)
def test_what_is_not_a_mark_to_the_letter_is_none(change):
    """A process would be killed for a variable that somebody else happened to set."""
    assert SidecarMark.parse(change.format(draw_mark("job", "node").text)) is None


def test_a_predecessor_is_of_the_same_node_and_certainly_gone():
    """Ending the children of a sidecar that lives, or of another node, breaks a healthy job."""
    ours = draw_mark("job", "node")
    gone = replace(ours, token="0" * 32, started=ours.started - 1)  # our number was another's
    assert ours.is_dead_predecessor(gone)
    assert not ours.is_dead_predecessor(ours)
    assert not ours.is_dead_predecessor(replace(gone, started=ours.started))
    assert not ours.is_dead_predecessor(replace(gone, node="0" * 32))
    assert not ours.is_dead_predecessor(replace(gone, counted_in="1-1"))
