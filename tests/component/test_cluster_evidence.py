"""A real job with a rank that stands still: what its incident says of every rank."""

import os
import signal
from pathlib import Path

import pytest

from coordinator.demo.cluster import Cluster, Layout
from tests.component.waiting import await_that

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parents[2] / "examples" / "pytorch_ddp" / "train.py"
POLICY = """\
progressPolicy:
  stallTimeoutSeconds: 4
  evidenceBudgetSeconds: 30  # a busy machine is no claim of this test
"""


def test_a_stopped_rank_is_shown_in_its_line_beside_the_others(tmp_path):
    """A person on call asks 'where does it hang', and the stop has destroyed the answer."""
    layout = Layout(root=tmp_path, script=SCRIPT, steps=100_000, checkpoint_every=5)
    with Cluster(layout=layout, workers=("node-0", "node-1"), spares=(), policy=POLICY) as cluster:
        await_that("ten steps", lambda: (cluster.job()["step"] or 0) >= 10)
        os.kill(cluster.worker_pid("node-1"), signal.SIGSTOP)

        def closed():
            found = [cluster.incident(number) for number in cluster.incident_ids()]
            return next((it for it in found if it["outcome"] != "open"), None)

        incident = await_that("the recovery", closed)
    assert incident["finding"]["culprit"]["rank"] == 1
    groups = incident["stack_groups"]
    assert sorted(rank for group in groups for rank in group["ranks"]) == [0, 1]
    assert 1 in groups[0]["ranks"]  # both, where the signal came inside of the same call
    assert all("train.py" in " ".join(group["frames"]) for group in groups)
    whole = incident["evidence"]["1"]
    assert whole["process"]["state"] == "T"
    assert whole["environment"]["RANK"] == "1"
    assert whole["environment"]["OUTRIDER_PROGRESS_TOKEN"] == "***"
    assert incident["evidence_missing"] == []
