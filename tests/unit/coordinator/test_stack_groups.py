from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from coordinator.evidence import MISSING_MAX, WHOLE_RANKS_MAX, with_evidence
from coordinator.incidents import Culprit, Finding, Incident
from coordinator.journal_format import decode_incident, encode_incident
from coordinator.positions import APART, CULPRIT, marks
from coordinator.stack_groups import FRAMES_MAX, GROUPS_MAX, group_stacks
from scout.hang import RankSnapshot
from sidecar.api import EvidenceReport, FaultKind
from sidecar.rank_evidence import ProcessFacts, RankEvidence, ThreadStack

WAITING = ("all_reduce (torch/distributed.py:1)", "step (train.py:40)")
LOADING = ("read (data.py:7)", "step (train.py:31)")


def at(*frames: str, missing: tuple[str, ...] = ()) -> RankEvidence:
    """Return a rank whose main thread stands at ``frames``."""
    pool = ThreadStack(name="pool", main=False, frames=("wait (threading.py:1)",))
    main = ThreadStack(name="MainThread", main=True, frames=frames)
    return RankEvidence(threads=(main, pool), missing=missing)


def an_incident(culprit: int | None = None, snapshots: tuple[RankSnapshot, ...] = ()) -> Incident:
    who = None
    if culprit is not None:
        who = Culprit(
            kind=FaultKind.PROCESS_STALL, node="n", rank=culprit, local_rank=0, gpu=None, reason="r"
        )
    finding = Finding(outcome="attributed", basis="causal", why="w", culprit=who)
    return Incident(
        id="j-1",
        job="j",
        generation=1,
        topology_version=1,
        trigger="t",
        finding=finding,
        snapshots=snapshots,
    )


def reports(seen: dict[str, RankEvidence]) -> dict[str, EvidenceReport]:
    return {"n": EvidenceReport(round_id=1, node="n", evidence=seen)}


def test_the_one_who_stands_apart_comes_first():
    """Among a thousand equal stacks nobody finds the other one."""
    seen = {str(rank): at(*WAITING) for rank in range(7)} | {"7": at(*LOADING)}
    odd, rest = group_stacks(seen)
    assert (odd.ranks, odd.frames, odd.odd) == ((7,), LOADING, True)
    assert (rest.ranks, rest.odd) == (tuple(range(7)), False)


def test_of_two_ranks_only_the_named_one_is_odd():
    """Two can differ, but which of them is wrong no stack says."""
    seen = {"0": at(*WAITING), "1": at(*LOADING)}
    assert [group.odd for group in group_stacks(seen)] == [False, False]
    first, second = group_stacks(seen, named=[1])
    assert (first.ranks, first.odd, second.odd) == ((1,), True, False)


def test_ranks_that_stand_together_are_one_group_without_an_odd_one():
    """When everybody waits in one collective the network is to be looked at, not a rank."""
    (group,) = group_stacks({"0": at(*WAITING), "1": at(*WAITING)}, named=[0])
    assert (group.ranks, group.odd) == ((0, 1), False)


def test_another_line_of_the_same_function_is_another_place():
    """The line is what tells a send from the receive behind it."""
    seen = {"0": at("step (train.py:40)"), "1": at("step (train.py:41)")}
    assert len(group_stacks(seen)) == 2


def test_a_rank_without_a_stack_is_in_no_group():
    """A dead rank is not one that stands nowhere together with others."""
    seen = {"0": at(*WAITING), "1": RankEvidence(), "2": at(), "x": at(*WAITING)}
    assert [group.ranks for group in group_stacks(seen)] == [(0,)]


@given(
    st.dictionaries(
        st.integers(0, 10**6).map(str),
        st.lists(st.text(max_size=300), max_size=60).map(lambda frames: at(*frames)),
        max_size=40,
    ),
    st.sets(st.integers(0, 50)),
)
def test_groups_have_limits_and_no_rank_stands_twice(seen, named):
    """An incident is written to the journal at every change."""
    groups = group_stacks(seen, named)
    assert len(groups) <= GROUPS_MAX
    assert all(len(group.frames) <= FRAMES_MAX + 1 for group in groups)
    ranks = [rank for group in groups for rank in group.ranks]
    assert len(ranks) == len(set(ranks))
    if groups:
        largest = max(len({str(r) for r in group.ranks}) for group in group_stacks(seen))
        assert max(len(group.ranks) for group in groups) == largest


def test_the_largest_group_is_kept_when_there_are_too_many():
    """Without the place where most ranks wait the odd ones mean nothing."""
    seen = {str(rank): at(f"f (x.py:{rank})") for rank in range(40)}
    seen |= {str(rank): at(*WAITING) for rank in range(100, 140)}
    groups = group_stacks(seen)
    assert len(groups) == GROUPS_MAX
    assert groups[-1].ranks == tuple(range(100, 140))


def test_the_culprit_and_those_apart_are_kept_whole_and_everybody_in_groups():
    """The one that broke is looked at closely, the others for how they differ from it."""
    seen = {str(rank): at(*WAITING) for rank in range(20)}
    seen |= {"20": at(*LOADING), "21": RankEvidence(process=ProcessFacts(state="T"))}
    incident = with_evidence(an_incident(culprit=21), reports(seen), ())
    assert list(incident.evidence) == ["21", "20"]
    assert [len(group.ranks) for group in incident.stack_groups] == [1, 20]
    assert decode_incident(encode_incident(incident)) == incident


def test_one_rank_speaks_for_all_when_nobody_stands_apart():
    """A job that hangs as one still has an environment and a kernel to look at."""
    seen = {str(rank): at(*WAITING) for rank in range(4)}
    assert list(with_evidence(an_incident(), reports(seen), ()).evidence) == ["0"]


def test_what_is_missing_is_said_once_for_all_whom_it_concerns():
    """A thousand equal sentences hide the one that differs."""
    refused = "no stacks, ptrace is not allowed"
    seen = {str(rank): RankEvidence(missing=(refused,)) for rank in range(3)}
    incident = with_evidence(an_incident(), reports(seen), ["node-7"])
    assert incident.evidence_missing == (
        "node-7: nothing came in time",
        f"ranks 0, 1, 2: {refused}",
    )
    many = {str(rank): RankEvidence(missing=(f"why {rank}",)) for rank in range(100)}
    kept = with_evidence(an_incident(culprit=1), reports(many), ())
    assert len(kept.evidence_missing) == MISSING_MAX
    assert len(kept.evidence) <= WHOLE_RANKS_MAX


def test_the_odd_position_is_marked_and_the_culprit_above_all():
    """A row of equal numbers with one that differs is read by the eye, not by a person."""
    ranks = tuple(
        RankSnapshot(rank=rank, node="n", local_rank=rank, step=5, collective_seq=9)
        for rank in range(5)
    )
    behind = replace(ranks[3], collective_seq=8)
    vector = (*ranks[:3], behind, ranks[4])
    assert marks(an_incident(snapshots=vector)) == {3: APART}
    assert marks(an_incident(culprit=3, snapshots=vector)) == {3: CULPRIT}
    assert marks(an_incident(culprit=0, snapshots=vector)) == {0: CULPRIT, 3: APART}
    assert marks(an_incident(snapshots=vector[2:4])) == {}
    assert marks(an_incident()) == {}
