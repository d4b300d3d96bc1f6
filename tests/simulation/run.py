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
from sidecar.api import FaultKind
from tests.simulation.checkers import BrokenInvariantError, Checkers
from tests.simulation.cluster import Cluster
from tests.simulation.faults import HARMLESS, OF_A_NODE, Injected, Trouble, heal, inject, plan

FIRST_FAULT_STEPS: Final = (1, 8, 11, 25)
"""The faults begin at one of these: before the first checkpoint, during it, and after the second.
Scripted ones begin at the last."""
STEPS_DRAWN: Final = 300
"""Two minutes of training when nothing goes wrong: most drawn faults find the job running."""
STEPS_SCRIPTED: Final = 80
HEALED_MAX_S: Final = 400.0
"""From the end of the faults to the end of the job: every step again, a few more recoveries, and
the wait for nodes that never come."""
SETTLED_S: Final = 30.0
"""From the end of the faults to the moment when nothing of an old generation runs any more."""
SHUTDOWN_MAX_S: Final = 30.0
"""From the end of the job to the moment when every sidecar has left."""


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
    seed: int,
    nnodes: int,
    troubles: Sequence[Trouble] | None = None,
    *,
    transcript: bool = False,
    restartable: bool = False,
) -> Result:
    """Run one job through faults and out of them.

    ``troubles`` happen one after the other once the job runs; None draws them from the seed, and
    an empty sequence is a run without faults.  Raises `BrokenInvariantError`.
    """
    steps = STEPS_DRAWN if troubles is None else STEPS_SCRIPTED
    cluster = Cluster(seed, nnodes, steps=steps, restartable=restartable)
    if transcript:
        cluster.world.transcript = []
    checkers = Checkers(cluster)
    dice = cluster.world.dice("faults")
    cluster.power_on()
    first = FIRST_FAULT_STEPS[-1] if troubles is not None else dice.choice(FIRST_FAULT_STEPS)
    _expect(cluster, cluster.run_until_stepping(first), "the job did not start")
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
        if not cluster.run_until_over(SETTLED_S):
            checkers.long_after_healing()
    _expect(cluster, cluster.run_until_over(HEALED_MAX_S), "the job neither went on nor failed")
    finished = cluster.coordinator.finished
    assert finished is not None, "the job is over"
    _expect(cluster, bool(finished.reason), "the job ended without a reason")
    cluster.run_for(SHUTDOWN_MAX_S)
    checkers.at_the_end()
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


def convicted_rightly(incident: Incident, faults: Sequence[Injected]) -> bool | None:
    """Return whether the incident names one whom a fault happened to; None: it names nobody.

    For a fault of a whole node the node is enough.  A person who asks is nobody's conviction.
    """
    culprit = incident.finding.culprit if incident.finding else None
    if culprit is None or culprit.kind is FaultKind.OPERATOR:
        return None
    return any(
        fault.trouble not in HARMLESS
        and culprit.node == fault.node
        and (fault.trouble in OF_A_NODE or culprit.rank == fault.rank)
        for fault in faults
    )


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
    verdicts: Counter[bool | None] = Counter()
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
        verdicts.update(convicted_rightly(it, result.faults) for it in result.incidents)
    sys.stdout.write(
        f"{verdicts.total()} incidents: {verdicts[True]} named who broke, {verdicts[False]} named "
        f"somebody else, {verdicts[None]} nobody; {failed} runs broke an invariant\n"
    )
    return int(failed > 0)


def _line(result: Result) -> str:
    troubles = ", ".join(fault.trouble for fault in result.faults) or "none"
    return (
        f"seed {result.seed}: {result.outcome} after {result.second:.0f} s and "
        f"{result.generations} generations ({result.digest}); faults: {troubles}"
        + (f"; {result.reason}" if result.outcome == "failed" else "")
        + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
