"""What a rank's checks become on their way to the sidecar, and when they begin by themselves."""

import json

import pytest

from scout import hooks
from scout.c3 import C3Result, C3Status
from scout.results import Header, NotReady, ReplayResult
from scout.trust import TrustState
from sidecar.codec import from_plain
from worker_shim.messages import SCOUT_ENV, Envelope, ScoutStatus, worker_frame
from worker_shim.scout_guard import ScoutGuard, ScoutTeller, model_of
from worker_shim.session import Outbox

HEADER = Header(id="r-1", time_ns=1, run="r", step=5, reporter=0)


class Link:
    """An outbox without a socket behind it."""

    def __init__(self):
        self.outbox = Outbox(client_id="c", generation=1, local_rank=0, pid=1)

    def update(self, change):
        change(self.outbox)

    def told(self):
        return [it for it in self.outbox.frames() if it["type"] == ScoutStatus.TYPE]


def test_a_result_reaches_the_sidecar_with_what_is_trusted():
    """The coordinator loads a checkpoint that the ranks know to be corrupt."""
    link = Link()
    tell = ScoutTeller(link, 0).hooks()
    tell.report_trust(3, TrustState.RECOVERY_VERIFIED, "")
    tell.report_trust(5, TrustState.REJECTED, "")
    wrong = C3Result(status=C3Status.ATTRIBUTED, bitmap=(0, 1), evidence=(1, 2), why="differs")
    tell.report_result(
        ReplayResult(
            header=HEADER,
            peer_ranks=(4, 6),
            checked_recipe_ids=("state",),
            c3_results={"state.parameters": wrong},
            sdc_bitmap=(0, 1),
            sdc_sources=("state.parameters",),
            straggler_bitmap=(0, 0),
        )
    )
    tell.report_result(NotReady(header=HEADER, peer_ranks=(4, 6), why="not captured"))
    first, second = link.told()
    assert (first["outcome"], first["corrupt_ranks"]) == ("corrupt", (6,))
    assert (first["verified"], first["rejected"]) == ((3,), (5,))
    assert first["why"] == "differs"
    assert (second["outcome"], second["checks"], second["checks_not_run"]) == ("not_run", 2, 1)


def test_the_message_survives_the_wire():
    """The sidecar refuses what its own guest says."""
    message = ScoutStatus(local_rank=1, step=5, outcome="corrupt", corrupt_ranks=(1, 2))
    frame = json.loads(
        json.dumps(worker_frame(message, Envelope(client_id="c", seq=1, generation=1)))
    )
    body = {
        key: it
        for key, it in frame.items()
        if key not in ("type", "client_id", "seq", "generation")
    }
    assert from_plain(body, ScoutStatus) == message


def test_nothing_begins_that_was_not_asked_for():
    """Every job pays for checks."""
    assert not ScoutGuard({}).is_asked
    assert ScoutGuard({SCOUT_ENV: "{}"}).is_asked


def test_the_model_is_found_from_its_optimizer():
    """A check of the wrong module compares what nobody trains."""
    torch = pytest.importorskip("torch")
    inner = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    outer = torch.nn.Sequential(inner)
    other = torch.nn.Linear(3, 3)
    assert model_of(torch.optim.SGD(inner.parameters(), lr=1)) is outer
    assert model_of(torch.optim.SGD(other.parameters(), lr=1)) is other
    loose = torch.nn.Parameter(torch.zeros(1))
    assert model_of(torch.optim.SGD([loose], lr=1)) is None


def test_another_generation_in_the_same_process_begins_anew():
    """The next check waits for ever in a process group that is gone, or new ranks for old ones."""
    ended = []
    hooks.running(lambda: ended.append(1))
    guard = ScoutGuard({SCOUT_ENV: "{}"})
    guard._begun, guard.protection = True, object()
    guard.renew()
    assert ended == [1]
    assert guard.protection is None
    assert not guard._begun
    guard.renew()
    assert ended == [1]
