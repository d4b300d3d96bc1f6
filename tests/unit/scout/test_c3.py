"""Statistical comparison, bitmaps and reports: who is named, in whose numbering, as what."""

import json
import math

import pytest

from scout import consensus
from scout.c3 import C3Result, C3Status, c3_result, ranks_of, union
from scout.results import Header, NotReady, ReplayResult, Scope, fault_report, plain
from scout.verdict import Agree, Attributed, Inconclusive


def test_a_slow_value_is_named_and_ordinary_noise_is_not():
    """A healthy rank is replaced for a millisecond, or a slow one is not."""
    noisy = {0: 10.0, 1: 10.2, 2: 9.9, 3: 10.1}
    assert isinstance(consensus.statistical(noisy, range(4), "t", slack=0.5), Agree)
    slow = consensus.statistical({**noisy, 3: 20.0}, range(4), "t", slack=0.5)
    assert isinstance(slow, Attributed)
    assert slow.ranks == (3,)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_time_that_is_no_number_is_never_ordinary(value):
    """NaN compares with nothing and so passes for healthy."""
    found = consensus.statistical({0: 1.0, 1: 1.0, 2: value}, range(3), "t", slack=0.5)
    assert isinstance(found, Attributed)
    assert found.ranks == (2,)


def test_a_silent_member_stays_in_the_electorate():
    """Two who answer convict the rest of a group of five by majority of two."""
    found = consensus.statistical({0: 1.0, 1: 1.0}, range(5), "t", slack=0.5)
    assert isinstance(found, Inconclusive)
    found = consensus.statistical({0: 1.0, 1: 1.0, 2: 1.0}, range(5), "t", slack=0.5)
    assert isinstance(found, Attributed)
    assert found.ranks == (3, 4)
    nobody = consensus.statistical({}, range(3), "t")
    assert isinstance(nobody, Inconclusive)


def test_two_peers_cannot_convict_each_other():
    """The healthy one of two is named half of the time."""
    found = consensus.statistical({0: 1.0, 1: 9.0}, range(2), "t", slack=0.5)
    assert isinstance(found, Inconclusive)


def test_bitmaps_speak_of_positions_and_evidence_keeps_the_order():
    """Position 1 of a group is replaced as if it were global rank 1."""
    peers = (3, 7, 11)
    votes = {3: 5, 7: 6, 11: 5}
    result = c3_result(consensus.exact(votes, peers, "weights"), votes, peers)
    assert result.status is C3Status.ATTRIBUTED
    assert result.bitmap == (0, 1, 0)
    assert result.evidence == (5, 6, 5)
    assert ranks_of(result.bitmap, peers) == (7,)
    silent = c3_result(consensus.exact({3: 5, 11: 5}, peers, "w"), {3: 5, 11: 5}, peers)
    assert silent.evidence == (5, None, 5)
    assert silent.bitmap == (0, 1, 0)
    assert union([(0, 1, 0), (1, 0, 0)], 3) == (1, 1, 0)


def result_with(**results):
    header = Header(id="r-1", time_ns=1, run="r", step=5, reporter=0)
    bits = union([one.bitmap for one in results.values()], 3)
    return ReplayResult(
        header=header,
        peer_ranks=(0, 1, 2),
        checked_recipe_ids=("hidden",),
        c3_results=results,
        sdc_bitmap=bits,
        sdc_sources=tuple(k for k, it in results.items() if it.status is C3Status.ATTRIBUTED),
        straggler_bitmap=(0, 0, 0),
    )


def test_an_inconclusive_disagreement_fails_nobody():
    """A manager that reads only the failed ranks replaces the whole job."""
    split = {0: 1, 1: 2, 2: 3}
    verdict = consensus.exact(split, range(3), "output")
    report = fault_report(result_with(output=c3_result(verdict, split, range(3))))
    assert report is not None
    assert report.failed_ranks == ()
    assert report.suspects == (0, 1, 2)
    assert report.scope is Scope.PEER_GROUP


def test_reports_are_json_and_a_check_that_could_not_run_is_its_own_type():
    """A manager in another language cannot read them, or takes a missing capture for corruption."""
    votes = {0: 1 << 127, 1: 5, 2: 1 << 127}
    result = result_with(w=c3_result(consensus.exact(votes, range(3), "w"), votes, range(3)))
    told = json.loads(json.dumps(plain(result)))
    assert told["type"] == "ReplayResult"
    assert told["header"]["schema_version"] == 1
    assert told["c3_results"]["w"]["evidence"][0] == f"{1 << 127:#x}"
    missing = NotReady(header=result.header, peer_ranks=(0, 1), why="rank 1 has no capture")
    assert json.loads(json.dumps(plain(missing)))["type"] == "NotReady"
    assert fault_report(result_with()) is None
    agree = C3Result(status=C3Status.AGREE, bitmap=(0, 0, 0), evidence=(1, 1, 1))
    assert fault_report(result_with(w=agree)) is None
