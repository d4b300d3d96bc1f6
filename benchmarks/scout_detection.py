"""Who is named for which corruption, and whether anybody is named in health or for slowness.

A grid of persistent faults: bit position, dtype, surface, rank, three and four peers; the first
check that covers the surface must name that rank and no other.  Then healthy checks, of which
none may name anybody, and ranks that take 1.3, 1.5 and 2 times as long.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.scout_faults import Orders
from benchmarks.scout_world import run_world

SURFACES: Final = ("output", "gradient", "weight", "embedding", "moment", "optimizer")
BITS: Final = {"float32": (31, 26, 22, 0), "bfloat16": (15, 10, 6, 0)}
"""Sign, exponent, highest and lowest bit of the mantissa; the exponent's highest would make
numbers that are none, which is another finding."""
PEERS: Final = (3, 4)
FACTORS: Final = (1.3, 1.5, 2.0)
HEALTHY_AT_ONCE: Final = 250


@dataclass(slots=True)
class Score:
    """What came of the runs."""

    attributed_right: int = 0
    attributed_total: int = 0
    false_verdicts: int = 0
    healthy_checks: int = 0
    straggler_right: int = 0
    straggler_total: int = 0
    by_surface: dict[str, list[int]] = field(default_factory=dict)
    misses: list[str] = field(default_factory=list)


def grid(peers: int) -> Iterator[Orders]:
    """Yield every fault of the grid."""
    for dtype, bits in BITS.items():
        for surface in SURFACES:
            for bit in bits:
                for rank in range(peers):
                    fault = {"kind": surface, "rank": rank, "step": 2, "bit": bit, "element": 7}
                    yield {
                        "fault": fault,
                        "dtype": dtype,
                        "steps": 2,
                        "layers": 2,
                        "config": {"check_interval": 2},
                        "watched": False,
                    }


def corruption(score: Score) -> None:
    """Inject the grid."""
    for peers in PEERS:
        orders = list(grid(peers))
        for one, told in zip(orders, _run(peers, orders), strict=True):
            fault = one["fault"]
            named = [it["results"][0].get("job_sdc_ranks") for it in told]
            is_right = named == [[fault["rank"]]] * peers
            counts = score.by_surface.setdefault(fault["kind"], [0, 0])
            counts[0] += is_right
            counts[1] += 1
            if not is_right:
                score.misses.append(f"{one['dtype']} {fault} of {peers}: {named}")
    score.attributed_right = sum(counts[0] for counts in score.by_surface.values())
    score.attributed_total = sum(counts[1] for counts in score.by_surface.values())


def health(score: Score, checks: int) -> None:
    """Check healthy ranks, times too, on every step."""
    while score.healthy_checks < checks:
        steps = min(HEALTHY_AT_ONCE, checks - score.healthy_checks) + 1
        orders = {
            "steps": steps,
            "config": {"check_interval": 1},
            "stragglers": {},
            "watched": False,
        }
        (told,) = _run(3, [orders])
        results = told[0]["results"]
        score.healthy_checks += len(results)
        for result in results:
            if result["type"] != "ReplayResult" or result["job_disagrees"]:
                score.false_verdicts += 1
                score.misses.append(f"healthy: {result.get('why') or result['sdc_sources']}")
            elif any(result["straggler_bitmap"]):
                score.false_verdicts += 1
                score.misses.append(f"healthy, called slow: {result['replay_times_ms']}")


def slowness(score: Score) -> None:
    """Slow each rank down by each factor."""
    orders = [
        {
            "fault": {"kind": "slower", "rank": rank, "step": 3, "factor": factor},
            "steps": 16,
            "width": 256,
            "batch": 16,
            "length": 64,
            "config": {"check_interval": 1, "state_check_interval": 0},
            "stragglers": {},
            "watched": False,
        }
        for factor in FACTORS
        for rank in range(3)
    ]
    for one, told in zip(orders, _run(3, orders), strict=True):
        named = [
            [at for at, bit in enumerate(it["straggler_bitmap"]) if bit]
            for it in told[0]["results"]
            if it["type"] == "ReplayResult" and any(it["straggler_bitmap"])
        ]
        score.straggler_total += 1
        is_right = bool(named) and all(it == [one["fault"]["rank"]] for it in named)
        score.straggler_right += is_right
        if not is_right:
            score.misses.append(f"slower {one['fault']}: {named[:4]}")


def _run(peers: int, orders: list[Orders]) -> list[list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory(prefix="scout-bench-") as folder:
        return run_world(peers, orders, Path(folder))
