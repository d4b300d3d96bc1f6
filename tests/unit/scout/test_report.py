"""The observers' report holds to its schema, whatever was found and whoever tells it."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout.report import SCHEMA_VERSION, Place, report
from scout.verdict import Attributed, Basis, Evidence, Inconclusive
from tests.unit.scout.report_schema import read_report

RANKS = st.sets(st.integers(0, 1023), min_size=1, max_size=4)
WORDS = st.text(min_size=1, max_size=40)
EVIDENCE = st.lists(
    st.builds(Evidence, surface=WORDS, ranks=st.lists(st.integers(0, 9)).map(tuple), detail=WORDS),
    max_size=3,
).map(tuple)
VERDICTS = st.one_of(
    st.builds(
        Attributed,
        ranks=RANKS.map(lambda it: tuple(sorted(it))),
        basis=st.sampled_from(Basis),
        why=WORDS,
        evidence=EVIDENCE,
    ),
    st.builds(Inconclusive, why=WORDS, evidence=EVIDENCE),
)
PLACES = st.lists(
    st.builds(
        Place,
        rank=st.integers(0, 1023),
        host=WORDS,
        local_rank=st.integers(0, 15),
        gpu=st.none() | st.integers(0, 15),
    ),
    max_size=6,
)


def told(verdict, places=(), **changes):
    fields = {"run": "r", "generation": 3, "at_ns": 10**18, "reporter": 2} | changes
    return json.dumps(report(verdict, places=places, **fields))


@given(verdict=VERDICTS, places=PLACES, reporter=st.integers(0, 1023))
def test_every_report_holds_to_the_schema(verdict, places, reporter):
    """A reader that fails on one kind of verdict fails on the night when it is told."""
    read = read_report(told(verdict, places, reporter=reporter))
    assert (read.schema_version, read.run, read.generation) == (SCHEMA_VERSION, "r", 3)
    assert (read.reporter, read.time_ns, read.why) == (reporter, 10**18, verdict.why)
    named = verdict.ranks if isinstance(verdict, Attributed) else ()
    assert tuple(it.rank for it in read.ranks) == named
    assert len(read.evidence) == len(verdict.evidence)
    where = {it.rank: it for it in places}
    for it in read.ranks:
        place = where.get(it.rank)
        assert it.host == (place.host if place else None)
        assert it.gpu == (place.gpu if place else None)


def test_a_rank_of_which_nobody_knows_the_place_has_the_same_fields():
    """A reader of hosts would stumble over the one rank that never came up."""
    verdict = Attributed(ranks=(1,), basis=Basis.DIRECT, why="it never answered", evidence=())
    (named,) = json.loads(told(verdict, [Place(rank=0, host="a", local_rank=0)]))["ranks"]
    assert named == {"rank": 1, "host": None, "local_rank": None, "gpu": None}


@pytest.mark.parametrize(
    ("basis", "ranks", "said"),
    [
        (Basis.DIRECT, (1,), "high"),
        (Basis.CAUSAL, (1,), "high"),
        (Basis.MAJORITY, (1,), "medium"),
        (Basis.DIRECT, (1, 2), "medium"),
    ],
)
def test_confidence_follows_from_the_kind_of_evidence(basis, ranks, said):
    """Whoever drains a node for it has to know whether to look first."""
    assert (
        read_report(told(Attributed(ranks=ranks, basis=basis, why="w", evidence=()))).confidence
        == said
    )
    assert read_report(told(Inconclusive(why="w"))).confidence == "none"


def test_the_same_finding_has_the_same_id_whoever_tells_it():
    """A thousand observers would open a thousand tickets."""
    verdict = Attributed(ranks=(7,), basis=Basis.CAUSAL, why="w", evidence=())
    ids = {read_report(told(verdict, reporter=rank, at_ns=10**18 + rank)).id for rank in range(4)}
    others = {
        read_report(told(verdict, generation=4)).id,
        read_report(told(verdict, run="s")).id,
        read_report(told(Inconclusive(why="w"))).id,
    }
    assert len(ids) == 1
    assert len(others | ids) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": 2},
        {"generation": -1},
        {"outcome": "guilty"},
        {"surprise": 1},
        {"ranks": [{"rank": 1}]},
        {"confidence": None},
    ],
)
def test_the_schema_tells_what_is_no_report(change):
    """A schema that takes everything proves nothing of what it took."""
    verdict = Attributed(ranks=(1,), basis=Basis.CAUSAL, why="w", evidence=())
    body = json.loads(told(verdict)) | change
    with pytest.raises(msgspec.ValidationError):
        read_report(json.dumps(body))
