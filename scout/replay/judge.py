"""From a check's answers to its result: verdicts, blame, sweep, stragglers, in that order.

Every peer sees the same answers and so reaches the same result; what differs between peer groups
is settled by one more word to everybody.
"""

import time
from dataclasses import dataclass, field, replace
from typing import Any

from scout.c3 import C3Result
from scout.localize import CrossPGResult, GroupObservation, localize
from scout.replay import exchange
from scout.replay.check import Check
from scout.replay.modules import Catalogue
from scout.replay.peers import Peers, Regime
from scout.replay.state import StateWalk
from scout.results import (
    NOTHING_SLOW,
    CollectiveTiming,
    Difference,
    Header,
    ReplayResult,
)
from scout.settings import ReplayHarnessConfig
from scout.straggler import Confirmations, History, spatial
from scout.surfaces import blame, disagreements, is_owned, named


@dataclass(slots=True)
class Memory:
    """What is known from earlier checks."""

    config: ReplayHarnessConfig
    confirmations: Confirmations = field(init=False)
    history: History = field(init=False)
    network: Confirmations = field(init=False)

    def __post_init__(self) -> None:
        self.confirmations = Confirmations(self.config.stragglers)
        self.history = History(self.config.stragglers)
        self.network = Confirmations(self.config.stragglers)


@dataclass(slots=True)
class Judge:
    """Turns one check into a result."""

    peers: Peers
    config: ReplayHarnessConfig
    memory: Memory
    hosts: dict[int, str]

    def conclude(
        self, check: Check, walk: StateWalk, catalogue: Catalogue, header: Header, started: float
    ) -> ReplayResult:
        """Return the result.  A collective of the job."""
        results = check.found.answers(self.peers).results()
        swept = False
        alarm = exchange.maximum([int(bool(disagreements(results)))], self.peers.world)[0]
        job_owned: list[int] = []
        job_computed: list[int] = []
        if alarm:
            if self.config.sweep_on_suspicion:
                check.sweep(catalogue, walk)
                swept = True
            results = check.referee(check.found.answers(self.peers).results())
            check.locate(walk, [it for it in disagreements(results) if is_owned(it)])
            job_owned, job_computed = self._job_wide(results)
        found = blame(results, self.peers.ranks, job_owned=job_owned, job_computed=job_computed)
        slow, sources = ((), ()) if alarm else self._stragglers(check)
        timings, crossed = self._network(check, slow)
        return ReplayResult(
            header=header,
            peer_ranks=self.peers.ranks,
            checked_recipe_ids=check.recipe_ids,
            c3_results=results,
            sdc_bitmap=found.bitmap,
            sdc_sources=found.sources,
            job_sdc_ranks=found.job_ranks,
            job_disagrees=bool(alarm),
            not_finite_ranks=tuple(sorted(check.found.not_finite)),
            straggler_bitmap=tuple(int(rank in slow) for rank in self.peers.ranks),
            straggler_sources=sources,
            replay_times_ms={
                name: tuple(times.get(rank, float("inf")) for rank in self.peers.ranks)
                for name, times in check.found.times.items()
            },
            differences=tuple(
                Difference(tensor=tensor, ranks=ranks, byte_ranges=ranges)
                for tensor, ranks, ranges in check.found.differences
            ),
            collective_timings=timings,
            cross_pg_result=crossed,
            missing_guarantees=self.peers.missing_guarantees,
            swept=swept,
            took_ms=(time.perf_counter() - started) * 1000,
        )

    def _job_wide(self, results: dict[str, C3Result]) -> tuple[list[int], list[int]]:
        """Return whom all groups of the job name by what is owned, and by what was computed."""
        ranks = self.peers.ranks
        told = exchange.gather_texts(
            [sorted(named(results, ranks, owned=owned)) for owned in (True, False)],
            self.peers.world,
        )
        both = [sorted({rank for one in told for rank in one[at]}) for at in (0, 1)]
        return both[0], both[1]

    def _stragglers(self, check: Check) -> tuple[tuple[int, ...], tuple[str, ...]]:
        if not self.config.compare_stragglers:
            return (), ()
        slow: set[int] = set()
        sources: list[str] = []
        for recipe, times in check.found.times.items():
            candidates = self._confirmed_now(check, recipe, times)
            history = self.memory.history.slow(recipe, times)
            past = history if 2 * len(history) < len(times) else ()
            if not candidates and not history:
                self.memory.history.add(recipe, times)
            both = sorted({*candidates, *(past if candidates else ())})
            persistent = self.memory.confirmations.note(recipe, both)
            if persistent:
                slow |= set(persistent)
                sources.append(recipe)
        return tuple(sorted(slow)), tuple(sources)

    def _confirmed_now(self, check: Check, recipe: str, times: dict[int, float]) -> set[int]:
        """Return the candidates that stay candidates when the replay is repeated at once."""
        candidates = set(spatial(times, self.config.stragglers))
        rounds = 1
        while candidates and rounds < self.config.stragglers.rounds and check.can_repeat(recipe):
            candidates &= set(spatial(check.again(recipe), self.config.stragglers))
            rounds += 1
        return candidates

    def _network(
        self, check: Check, slow: tuple[int, ...]
    ) -> tuple[tuple[CollectiveTiming, ...], CrossPGResult]:
        """Compare what collectives took in every group of the job.  Needs groups that cross."""
        timings = check.found.collectives
        if self.peers.regime is Regime.REPLICATED:
            return tuple(timings), NOTHING_SLOW
        told = exchange.gather_texts(
            [[it.collective, list(it.group_ranks), it.latency_ms, slow] for it in timings],
            self.peers.world,
        )
        observed = _observations(told, self)
        compute_slow = {rank for one in told for it in one for rank in it[3]}
        crossed = localize(observed, self.hosts, compute_stragglers=sorted(compute_slow))
        slow_groups = {one.members for one in observed if one.is_slow}
        return (
            tuple(replace(it, slow=it.group_ranks in slow_groups) for it in timings),
            crossed,
        )


def _observations(told: list[Any], judge: Judge) -> list[GroupObservation]:
    """Return every group of the job, and whether it was slow beside its like for several checks."""
    latest: dict[tuple[str, tuple[int, ...]], dict[int, float]] = {}
    for rank, one in enumerate(told):
        for kind, members, ms, _ in one:
            latest.setdefault((kind, tuple(members)), {})[rank] = ms
    observed = []
    for kind in sorted({key[0] for key in latest}):
        groups = {key[1]: times for key, times in latest.items() if key[0] == kind}
        # A group is as fast as its fastest member saw it: the others also waited for each other.
        fastest = {at: min(times.values()) for at, times in enumerate(groups.values())}
        candidates = spatial(fastest, judge.config.stragglers)
        persistent = judge.memory.network.note(kind, candidates)
        for at, (members, times) in enumerate(groups.items()):
            observed.append(
                GroupObservation(
                    group=f"{kind}{list(members)}",
                    members=members,
                    reports=dict.fromkeys(times, at in persistent),
                )
            )
    return observed
