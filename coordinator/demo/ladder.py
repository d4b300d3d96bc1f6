"""A fault that no restart cures: the demo's worker dies again and again, and the job must end.

Runs a cluster of its own, because the job is not to survive.
"""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any, Final

from coordinator.cli.errors import UserError
from coordinator.demo.cluster import Cluster, Layout
from coordinator.demo.show import Screen
from worker_shim.messages import RestartMode

VICTIM: Final = "node-1"
WORKERS: Final = ("node-0", VICTIM)
WITHIN_S: Final = 120.0
"""Longest wait for the end: a first start, three restarts of which two are cold, under load."""
STEPS_AT_REST: Final = 8
"""Steps before the first kill: a checkpoint is there then."""
POLL_S: Final = 0.02

LADDER: Final = (RestartMode.LOCAL_PROCESS, RestartMode.PROCESS, RestartMode.JOB, None)
"""What is tried, mildest first, before the job is given up."""

POLICY: Final = """\
runPolicy:
  jobMaxRetryCount: 20
  restartPolicy:
    maxFullJobRestarts: 1
"""


def run_ladder(root: Path, script: Path, screen: Screen) -> bool:
    """Kill rank 1 whenever it lives until the job ends; return whether it ended as it must."""
    layout = Layout(
        root=root,
        script=script,
        steps=100_000,
        checkpoint_every=5,
        options=("--restart-in-process",),
    )
    screen.say(f"escalation: a job of its own; rank 1 on {VICTIM} is killed whenever it lives")
    with Cluster(layout=layout, workers=WORKERS, spares=(), policy=POLICY) as cluster:
        _await_steps(cluster)
        incidents = _kill_until_the_end(cluster, screen)
    modes = [incident["decision"]["mode"] for incident in incidents]
    right = modes == [None if mode is None else str(mode) for mode in LADDER]
    last = incidents[-1]["decision"]["reason"]
    screen.say(
        f"escalation: {' -> '.join(mode or 'FAILED' for mode in modes)}: {last}",
        "ok" if right else "bad",
    )
    return right


def _await_steps(cluster: Cluster) -> None:
    deadline = time.monotonic() + WITHIN_S
    while (cluster.job()["step"] or 0) < STEPS_AT_REST:
        if time.monotonic() > deadline:
            raise UserError(f"the job for the escalation did not start: {cluster.job()['phase']}")
        time.sleep(POLL_S)


def _kill_until_the_end(cluster: Cluster, screen: Screen) -> list[dict[str, Any]]:
    killed: set[int] = set()
    told = 0
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:
        pids = [rank["pid"] for rank in cluster.nodes()[VICTIM]["ranks"]]
        for pid in set(filter(None, pids)) - killed:
            killed.add(pid)
            screen.say(f"  SIGKILL to pid {pid}, rank 1 on {VICTIM}", "inject")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        decided = [it for it in map(cluster.incident, cluster.incident_ids()) if it["decision"]]
        for incident in decided[told:]:
            screen.say(f"  decided: {incident['decision']['reason']}")
        told = len(decided)
        if decided and decided[-1]["decision"]["mode"] is None:
            return decided
        time.sleep(POLL_S)
    raise UserError(f"the job did not give up: {cluster.job()['phase']}")
