"""Checkpoints of a job that goes wrong: what is saved, what is verified, what is loaded again."""

import json

import pytest

torch = pytest.importorskip("torch")

from benchmarks.scout_world import run_world  # noqa: E402
from scout.manifest import Manifest, RecordStatus  # noqa: E402

pytestmark = [pytest.mark.component, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certify")
    base = {"config": {"check_interval": 0}, "every": 2, "steps": 6}
    fault = {"kind": "weight", "rank": 1, "step": 5, "bit": 22}
    ddp, fsdp, nan = (str(folder / name) for name in ("ddp", "fsdp", "nan"))
    orders = [
        {**base, "checkpoints": ddp, "fault": fault},
        {**base, "checkpoints": ddp, "restore": True, "steps": 2},
        {**base, "checkpoints": fsdp, "regime": "fsdp", "steps": 2},
        {**base, "checkpoints": fsdp, "regime": "fsdp", "restore": True, "steps": 1},
        {**base, "checkpoints": "/proc/nowhere", "steps": 2},
        {**base, "fault": {**fault, "step": 1, "bit": 30}, "checkpoints": nan, "steps": 2},
    ]
    return folder, run_world(3, orders, folder / "run")


def test_only_steps_that_were_checked_are_saved_and_verified(run):
    """A checkpoint with a flipped bit in it is the one that the job recovers from."""
    folder, told = run
    for rank in told[0]:
        assert [it[:2] for it in rank["trust"]] == [
            [2, "recovery_verified"],
            [4, "recovery_verified"],
            [6, "rejected"],
        ]
        assert rank["faults"][0]["failed_ranks"] == [1]
    manifest = Manifest(folder / "ddp" / "manifest")
    assert manifest.verified().step in (2, 4)  # the restored run saved step 2 once more
    assert manifest.pending() is None
    assert sorted(it.name for it in (folder / "ddp").glob("*.pt")) == [
        "step-0000000002.pt",
        "step-0000000004.pt",
    ]


def test_every_rank_restores_the_newest_verified_step(run):
    """Ranks resume from different steps, or from one that was rejected."""
    _, told = run
    assert [it["restored"]["step"] for it in told[1]] == [4, 4, 4]
    assert [it["restored"]["type"] for it in told[3]] == ["Loaded"] * 3
    assert [it["restored"]["step"] for it in told[3]] == [2, 2, 2]


def test_a_checkpoint_that_cannot_be_written_is_rejected_and_training_goes_on(run):
    """A full disk ends the job, or leaves half a checkpoint that is called verified."""
    _, told = run
    for rank in told[4]:
        assert [it[:2] for it in rank["trust"]] == [[2, "rejected"]]
        assert len(rank["step_ms"]) == 2


def test_weights_that_are_no_numbers_are_never_certified(run):
    """One rank's overflow spreads through the gradients, and all peers agree on NaN."""
    _, told = run
    for rank in told[5]:
        assert rank["results"][0]["not_finite_ranks"] == [0, 1, 2]
        assert [it[:2] for it in rank["trust"]] == [[2, "rejected"]]


def test_the_manifest_is_json_with_a_version(run):
    """Nobody but this release can read what may be trusted."""
    folder, _ = run
    record = json.loads(
        (folder / "ddp" / "manifest" / "records" / "step-0000000004.json").read_text()
    )
    assert record["schema_version"] == 1
    assert record["status"] == RecordStatus.RECOVERY_VERIFIED
