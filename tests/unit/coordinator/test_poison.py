"""Which of checkpoint, node and script is given up when a failure repeats."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.incidents import Culprit, Finding, Incident, NodeFault
from coordinator.poison import Sighting, judge, sighting_of
from scout.hang import RankSnapshot
from sidecar.api import CheckpointPointer, ExitCause, FaultKind, FaultReport, Scope


def ckpt(step: int) -> tuple[CheckpointPointer, ...]:
    return (CheckpointPointer(prefix="model", step=step, path=f"/ckpt/{step}.pt"),)


def seen(step=100, *, node="node-1", position=105, signature="crash:x", **more) -> Sighting:
    fields = {"at_ns": 0, "checkpoint": ckpt(step), "nodes": (node,), "script": "s"}
    return Sighting(signature=signature, position=position, **(fields | more))


def ruled(history, new, *, older=True, nodes_at_hand=1):
    return judge(history, new, older=older, nodes_at_hand=nodes_at_hand)


def an_incident(*reports, node="node-1", kind=FaultKind.CRASH, reason="exit code 1", step=105):
    faults = tuple(
        NodeFault(
            node=where,
            at_ns=0,
            report=FaultReport(
                fault_id=1,
                kind=kind,
                scope=Scope.RANK,
                reason="WorkerCrash",
                message="",
                age_ns=0,
                exit=ExitCause(code=1),
                evidence=(line,),
            ),
        )
        for where, line in reports
    )
    culprit = Culprit(kind=kind, node=node, rank=1, local_rank=0, gpu=None, reason=reason)
    finding = Finding(outcome="attributed", basis="direct", why="it died", culprit=culprit)
    snapshots = () if step is None else (RankSnapshot(rank=0, node="n", local_rank=0, step=step),)
    return Incident(
        id="j-1",
        job="j",
        generation=2,
        topology_version=1,
        trigger="",
        faults=faults,
        snapshots=snapshots,
        finding=finding,
    )


def test_once_is_an_accident():
    """Going back for every crash would lose an interval of work each time."""
    assert ruled([], seen()).reason == ""
    assert ruled([seen(90, position=95)], seen()).reason == ""
    assert ruled([seen(signature="crash:other")], seen()).reason == ""
    assert ruled([seen(script="before the fix")], seen()).reason == ""


def test_twice_from_one_checkpoint_gives_the_checkpoint_up():
    """Forty-four restarts into the same poisoned checkpoint are forty-three too many."""
    ruling = ruled([seen()], seen(position=107))
    assert ruling.demoted == ckpt(100)
    assert "the checkpoint of step 100 is given up: the same failure came from it twice" in (
        ruling.reason
    )


def test_on_two_disjoint_sets_of_nodes_it_is_the_script():
    """Burning through the spares for a bug of the script leaves none for the next broken node."""
    ruling = ruled([seen(), seen(), seen(90, node="node-3")], seen(90, node="node-3"))
    assert ruling.stop
    assert "nodes that have nothing in common (node-1, node-3)" in ruling.reason
    # Without an older checkpoint to try there is nothing to wait for.
    assert ruled([seen()], seen(node="node-3"), older=False).stop


def test_on_one_node_from_two_checkpoints_it_is_that_node():
    """A node whose memory flips bits fails the same way whatever it loads."""
    ruling = ruled([seen(), seen()], seen(90))
    assert (ruling.blamed, ruling.demoted, ruling.stop) == (("node-1",), (), False)
    assert ruled([seen(), seen()], seen(90), nodes_at_hand=0).blamed == ()


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central",
        "_pickle.UnpicklingError: invalid load key, '\\x00'.",
        "EOFError: Ran out of input",
        "FileNotFoundError: [Errno 2] No such file or directory: '/ckpt/100.pt'",
        "train.py: cannot resume: /ckpt/100.pt is not a whole checkpoint; remove it",
        "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
    ],
)
def test_a_checkpoint_that_cannot_be_loaded_is_given_up_at_once(line):
    """A torn file does not mend itself; the second and third try cost minutes of a whole fleet."""
    incident = an_incident(("node-1", line), ("node-2", line), step=None)
    sighting = sighting_of(incident, ckpt(100), "s", 0)
    assert sighting.torn
    ruling = ruled([], sighting)
    assert ruling.demoted == ckpt(100)
    again = replace(sighting, checkpoint=ckpt(90))
    assert ruled([sighting], again).demoted == ckpt(90)  # step by step


def test_what_only_one_node_cannot_load_is_that_nodes_matter():
    """A node whose mount is gone would have every checkpoint of the job given up in turn."""
    line = "FileNotFoundError: [Errno 2] No such file or directory: '/ckpt/100.pt'"
    sighting = sighting_of(an_incident(("node-1", line), step=None), ckpt(100), "s", 0)
    ruling = ruled([sighting], replace(sighting, checkpoint=ckpt(90)))
    assert (ruling.blamed, ruling.demoted) == (("node-1",), ())


def test_a_load_error_in_the_middle_of_training_is_no_torn_checkpoint():
    """A data file that cannot be read at step 105 says nothing of what the run began from."""
    line = "EOFError: Ran out of input"
    assert not sighting_of(an_incident(("node-1", line)), ckpt(100), "s", 0).torn
    nothing_loaded = an_incident(("node-1", line), step=None)
    assert not sighting_of(nothing_loaded, (), "s", 0).torn


def test_causes_that_are_known_leave_no_sighting():
    """A broken GPU or a kill from outside must not cost the newest checkpoint."""
    for kind in (FaultKind.GPU_FATAL, FaultKind.NODE_LOST, FaultKind.OPERATOR):
        assert sighting_of(an_incident(("node-1", ""), kind=kind), ckpt(1), "s", 0) is None
    for reason in ("SIGKILL (signal 9)", "SIGTERM (signal 15)", "the process is stopped"):
        assert sighting_of(an_incident(("node-1", ""), reason=reason), ckpt(1), "s", 0) is None
    for reason in ("SIGSEGV (signal 11)", "SIGKILL (signal 9) from the OOM killer"):
        assert sighting_of(an_incident(("node-1", ""), reason=reason), ckpt(1), "s", 0) is not None


def test_the_same_failure_is_known_although_it_prints_other_numbers():
    """Addresses and counters differ from run to run; a registry of exact lines matches nothing."""
    one = an_incident(("node-1", "IndexError: index 7201 at 0x7f3a out of 5000"))
    two = an_incident(("node-1", "IndexError: index 7202 at 0x55ab out of 5000"))
    first, second = (sighting_of(it, ckpt(100), "s", 0) for it in (one, two))
    assert first.signature == second.signature
    other = sighting_of(an_incident(("node-1", "ValueError: bad")), ckpt(100), "s", 0)
    assert other.signature != first.signature


@st.composite
def stories(draw):
    """Return a history of sightings and a new one."""
    one = st.builds(
        Sighting,
        at_ns=st.just(0),
        signature=st.sampled_from(["a", "b"]),
        checkpoint=st.sampled_from([(), ckpt(90), ckpt(100)]),
        position=st.sampled_from([None, 95, 105]),
        nodes=st.sampled_from([(), ("n1",), ("n2",), ("n1", "n2")]),
        script=st.sampled_from(["s", "t"]),
        torn=st.booleans(),
    )
    return draw(st.lists(one, max_size=6)), draw(one)


@given(story=stories(), older=st.booleans(), at_hand=st.integers(0, 2))
def test_a_ruling_is_one_thing_with_a_reason_and_never_without_repetition(story, older, at_hand):
    """A ruling that blames at random loses nodes, checkpoints or the whole job."""
    history, new = story
    ruling = judge(history, new, older=older, nodes_at_hand=at_hand)
    said = [bool(ruling.demoted), bool(ruling.blamed), ruling.stop]
    assert sum(said) <= 1
    assert any(said) == bool(ruling.reason)
    same = [it for it in history if (it.signature, it.script) == (new.signature, new.script)]
    if not new.torn:
        assert same or not any(said)
        assert not ruling.demoted or older
    if ruling.blamed:
        assert at_hand > 0
        assert ruling.blamed == new.nodes
    if ruling.stop:
        assert any(set(it.nodes).isdisjoint(new.nodes) or len(same) > 1 for it in same)
    if ruling.demoted:
        assert ruling.demoted == new.checkpoint
