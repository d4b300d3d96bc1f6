"""Run simulations: ``python -m tests.simulation.run --seeds 1-20 --nodes 16``.

One line a seed; with ``--trace SEED`` the whole story of one.  The exit status is 1 when an
invariant broke or a job neither went on nor failed for a reason.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.incidents import Incident
from scout.clock import Instant, seconds
from tests.simulation.checkers import BrokenInvariantError, Checkers
from tests.simulation.cluster import Cluster
from tests.simulation.faults import HARMLESS, OF_A_NODE, Injected, Trouble, heal, inject, plan

FIRST_FAULT_STEP: Final = 25
"""The faults begin once two checkpoints were saved."""
HEALED_MAX_S: Final = 400.0
"""From the end of the faults to the end of the job: every step again, a few more recoveries, and
the wait for nodes that never come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One simulation."""

    seed: int
    outcome: str
    reason: str
    faults: tuple[Injected, ...]
    incidents: tuple[Incident, ...]
    generations: int
    commands: frozenset[str]
    """The kinds of command that were ever sent."""
    steps: int
    second: float
    actions: int
    looked: Counter[str]
    digest: str
    transcript: tuple[str, ...]


def simulate(
    seed: int, nnodes: int, troubles: Sequence[Trouble] | None = None, *, transcript: bool = False
) -> Result:
    """Run one job through faults and out of them.

    ``troubles`` happen one after the other once the job runs; None draws them from the seed, and
    an empty sequence is a run without faults.  Raises `BrokenInvariantError`.
    """
    cluster = Cluster(seed, nnodes)
    if transcript:
        cluster.world.transcript = []
    checkers = Checkers(cluster)
    dice = cluster.world.dice("faults")
    cluster.power_on()
    _expect(cluster, cluster.run_until_stepping(FIRST_FAULT_STEP), "the job did not start")
    drawn = plan(cluster, dice) if troubles is None else [(0.0, item) for item in troubles]
    begin = cluster.world.now
    faults: list[Injected] = []
    for at_s, trouble in drawn:
        cluster.world.run(Instant(begin + seconds(at_s)), lambda: cluster.over)
        done = None if cluster.over else inject(cluster, trouble, dice)
        faults += [] if done is None else [done]
    if troubles is None:
        cluster.run_for(5.0)
        heal(cluster)
    _expect(cluster, cluster.run_until_over(HEALED_MAX_S), "the job neither went on nor failed")
    finished = cluster.coordinator.finished
    assert finished is not None, "the job is over"
    _expect(cluster, bool(finished.reason), "the job ended without a reason")
    return Result(
        seed=seed,
        outcome=finished.outcome,
        reason=finished.reason,
        faults=tuple(faults),
        incidents=tuple(cluster.coordinator.closed_incidents()),
        generations=cluster.coordinator.state.generation,
        commands=frozenset(type(it).__name__ for it in cluster.coordinator.commands_sent),
        steps=cluster.training.furthest,
        second=cluster.world.now / 1e9,
        actions=cluster.world.actions,
        looked=checkers.looked,
        digest=cluster.world.digest(),
        transcript=tuple(cluster.world.transcript or ()),
    )


def convicted_rightly(incident: Incident, fault: Injected) -> bool | None:
    """Return whether the incident names the one whom ``fault`` happened to; None: it names nobody.

    For a fault of a whole node the node is enough.
    """
    culprit = incident.finding.culprit if incident.finding else None
    if culprit is None:
        return None
    if fault.trouble in HARMLESS or culprit.node != fault.node:
        return False
    return fault.trouble in OF_A_NODE or culprit.rank == fault.rank


def _expect(cluster: Cluster, held: bool, what: str) -> None:
    if not held:
        state = cluster.coordinator.state
        core = cluster.coordinator.core
        waiting = "" if core is None else core.view(cluster.coordinator.now()).waiting_for
        raise BrokenInvariantError(
            f"seed {cluster.world.seed}, second {cluster.world.now / 1e9:.0f}: {what}: "
            f"{state.phase}, generation {state.generation}, {waiting or 'waiting for nothing'}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="1-5", help="one seed, or a range like 1-100")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--trace", action="store_true", help="print everything that happened")
    parser.add_argument("--only", type=Trouble, nargs="*", help="these faults, not the seed's")
    options = parser.parse_args(arguments)
    first, _, last = options.seeds.partition("-")
    failed = 0
    for seed in range(int(first), int(last or first) + 1):
        try:
            result = simulate(seed, options.nodes, options.only, transcript=options.trace)
        except BrokenInvariantError as error:
            failed += 1
            sys.stdout.write(f"BROKEN {error}\n")
            continue
        for line in result.transcript:
            sys.stdout.write(f"{line}\n")
        sys.stdout.write(_line(result))
    return int(failed > 0)


def _line(result: Result) -> str:
    troubles = ", ".join(fault.trouble for fault in result.faults) or "none"
    return (
        f"seed {result.seed}: {result.outcome} after {result.second:.0f} s and "
        f"{result.generations} generations ({result.digest[:12]}); faults: {troubles}"
        + (f"; {result.reason}" if result.outcome == "failed" else "")
        + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
