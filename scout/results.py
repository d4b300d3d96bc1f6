"""What SCOUT tells: the result of a check, a check that could not run, and a fault, as data.

Vocabulary only: frozen, one class for each case, and all of it becomes JSON by `plain`.  A check
that could not run is never spelled like a finding.  ``time_ns`` is wall clock, because a result
outlives its process.  Source: the SCOUT guide, "Reports and Manager Handoff".
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum, StrEnum
from typing import Any, Final

from scout.c3 import C3Result, C3Status, ranks_of
from scout.localize import CrossPGResult, NothingToLocalize

SCHEMA_VERSION: Final = 1
NOTHING_SLOW: Final = NothingToLocalize(why="no process group was slow")


class FaultKind(StrEnum):
    """What is wrong."""

    SDC = "sdc"
    """Values that should be equal differ."""
    STRAGGLER = "straggler"
    """Values agree and a rank is persistently slow."""


class Scope(StrEnum):
    """What a manager would have to replace."""

    RANK = "rank"
    NODE = "node"
    PEER_GROUP = "peer_group"
    """Somebody of these, and nobody knows who: no ground to replace any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What every message of SCOUT begins with."""

    id: str
    time_ns: int
    run: str
    step: int
    reporter: int
    """The global rank that says so; every peer says the same."""
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTiming:
    """One collective as this rank saw it.  ``slow`` by the group's own history and peers."""

    collective: str
    group_ranks: tuple[int, ...]
    message_bytes: int
    sequence: int
    latency_ms: float
    slow: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where peers' copies of one tensor differ: byte ranges of the tensor, rounded to rows."""

    tensor: str
    ranks: tuple[int, ...]
    byte_ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """A check that ran.  Bitmaps are in the order of ``peer_ranks``.

    ``job_sdc_ranks`` are those that any peer group of the job names for corruption, this one
    included; ``sdc_bitmap`` shows the ones among these peers.

    ``replay_times_ms`` are each recipe's times by peer.  ``missing_guarantees`` say what this
    check could not have seen.  ``swept`` tells that suspicion made it look at everything.
    """

    header: Header
    peer_ranks: tuple[int, ...]
    checked_recipe_ids: tuple[str, ...]
    c3_results: Mapping[str, C3Result]
    sdc_bitmap: tuple[int, ...]
    sdc_sources: tuple[str, ...]
    straggler_bitmap: tuple[int, ...]
    job_sdc_ranks: tuple[int, ...] = ()
    job_disagrees: bool = False
    """Some peer group of the job, this one or another, disagrees on an exact surface."""
    not_finite_ranks: tuple[int, ...] = ()
    """Peers that hold a parameter which is infinite or no number.  When all do, they agree."""
    straggler_sources: tuple[str, ...] = ()
    replay_times_ms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    differences: tuple[Difference, ...] = ()
    collective_timings: tuple[CollectiveTiming, ...] = ()
    cross_pg_result: CrossPGResult = NOTHING_SLOW
    completed_scheduled_cycle: bool = True
    missing_guarantees: tuple[str, ...] = ()
    swept: bool = False
    took_ms: float = 0.0
    check_interval: int = 0
    worst_case_steps: int = 0
    """In how many steps every layer, parameter and moment is looked at once; 0 for checks that
    are only made when asked for."""

    @property
    def sdc_ranks(self) -> tuple[int, ...]:
        """Global ranks named for corruption."""
        return ranks_of(self.sdc_bitmap, self.peer_ranks)

    @property
    def straggler_ranks(self) -> tuple[int, ...]:
        """Global ranks named for slowness."""
        return ranks_of(self.straggler_bitmap, self.peer_ranks)

    @property
    def has_sdc(self) -> bool:
        """Whether any exact surface disagreed, with or without somebody named."""
        return any(one.status is not C3Status.AGREE for one in self.c3_results.values())

    @property
    def is_attributed(self) -> bool:
        """Whether the corruption has a name."""
        return bool(self.job_sdc_ranks) or any(self.sdc_bitmap)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotReady:
    """The check could not run: no comparison was made, and nothing follows about anybody.

    The cycle stays incomplete and no checkpoint of this step is certified.
    """

    header: Header
    peer_ranks: tuple[int, ...]
    why: str


CheckResult = ReplayResult | NotReady


@dataclass(frozen=True, slots=True, kw_only=True)
class SCOUTFaultReport:
    """A fault for whoever manages the job.

    ``failed_ranks`` are those to act on, empty when nobody can be named; then ``suspects`` are
    the peers among whom the fault is.
    """

    header: Header
    kind: FaultKind
    scope: Scope
    failed_ranks: tuple[int, ...]
    suspects: tuple[int, ...]
    sources: tuple[str, ...]
    why: str
    evidence: tuple[str, ...] = ()
    host: str = ""


def fault_report(result: CheckResult) -> SCOUTFaultReport | None:
    """Return what ``result`` gives reason to report: corruption before slowness, or nothing."""
    if isinstance(result, NotReady):
        return None
    if result.has_sdc:
        wrong = [name for name, one in result.c3_results.items() if one.status != "agree"]
        first = next((name for name in wrong if name in result.sdc_sources), wrong[0])
        return SCOUTFaultReport(
            header=result.header,
            kind=FaultKind.SDC,
            scope=Scope.RANK if result.is_attributed else Scope.PEER_GROUP,
            failed_ranks=result.job_sdc_ranks or result.sdc_ranks,
            suspects=result.job_sdc_ranks or result.sdc_ranks or result.peer_ranks,
            sources=result.sdc_sources or tuple(wrong),
            why=result.c3_results[first].why,
            evidence=tuple(_told(one) for one in result.differences),
        )
    if any(result.straggler_bitmap):
        slow = result.straggler_ranks
        return SCOUTFaultReport(
            header=result.header,
            kind=FaultKind.STRAGGLER,
            scope=Scope.RANK,
            failed_ranks=slow,
            suspects=slow,
            sources=result.straggler_sources,
            why=f"the same computation is persistently slower there: {', '.join(_times(result))}",
        )
    return None


def _told(one: Difference) -> str:
    ranges = ", ".join(f"{start}-{stop}" for start, stop in one.byte_ranges[:4])
    more = f" and {len(one.byte_ranges) - 4} more" if len(one.byte_ranges) > 4 else ""  # noqa: PLR2004 - as many as are shown
    return f"{one.tensor} differs in bytes {ranges}{more}"


def _times(result: ReplayResult) -> list[str]:
    told = []
    for recipe in result.straggler_sources[:2]:
        times = result.replay_times_ms.get(recipe, ())
        by_rank = zip(result.peer_ranks, times, strict=False)
        told.append(f"{recipe} " + " ".join(f"{rank}: {ms:.1f} ms" for rank, ms in by_rank))
    return told


@dataclass(frozen=True, slots=True, kw_only=True)
class OrchestrationHooks:
    """What an external manager is told.  Each is called in every rank, after the step's check.

    ``report_trust`` hears of the step, the trust state's name and the reason.  An exception in
    one of them is logged once and goes no further.
    """

    report_fault: Callable[[SCOUTFaultReport], None]
    report_result: Callable[[CheckResult], None]
    report_trust: Callable[[int, str, str], None]


def plain(value: object) -> Any:
    """Return ``value`` as JSON's own types; every class of this vocabulary says what it is."""
    if is_dataclass(value) and not isinstance(value, type):
        told = {item.name: plain(getattr(value, item.name)) for item in fields(value)}
        return {"type": type(value).__name__, **told}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):  # a 128-bit digest is no JSON number everywhere
        return value if abs(value) < 1 << 63 else f"{value:#x}"
    raise TypeError(f"a {type(value).__name__} is not part of a report")
