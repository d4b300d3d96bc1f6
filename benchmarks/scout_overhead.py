"""What checks cost, and who is named: SCOUT's figures in one run.

Cost: three ranks of DDP on CPU, with and without protection in turn, at the default settings.  The
interval follows from the budget; what a check took over interval and step is the amortized
overhead, and steps without a check are compared with those of unprotected runs.
Detection: see `scout_detection`.

Prints tables, and last one line of JSON.

    make bench-scout [HEALTHY=2000] [LARGE=1]
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from benchmarks import scout_detection
from benchmarks.scout_faults import Orders
from benchmarks.scout_world import run_world

RANKS: Final = 3
MODELS: Final[dict[str, Orders]] = {
    "1 M parameters": {"width": 128, "layers": 6, "batch": 16, "length": 64, "steps": 40},
    "100 M parameters": {"width": 1024, "layers": 12, "batch": 4, "length": 64, "steps": 7},
}
ROUNDS: Final = {"1 M parameters": 3, "100 M parameters": 1}


def overhead(name: str) -> dict[str, float]:
    """Return what protection costs a model; times are medians in milliseconds."""
    orders = {**MODELS[name], "watched": False, "config": {"first_check": 4}, "stragglers": {}}
    bare = {**orders, "protected": False}
    with tempfile.TemporaryDirectory(prefix="scout-bench-") as folder:
        told = run_world(RANKS, [bare, orders] * ROUNDS[name], Path(folder))
    steps: dict[bool, list[float]] = {False: [], True: []}
    checks: list[float] = []
    intervals: list[float] = []
    bounds: list[float] = []
    for at, ranks in enumerate(told):
        protected = bool(at % 2)
        checked = {it["header"]["step"] for it in ranks[0]["results"]}
        times = enumerate(ranks[0]["step_ms"], 1)
        steps[protected] += [ms for step, ms in times if step > 2 and step not in checked]  # noqa: PLR2004 - the first ones warm up
        if protected:
            checks += _agreed_check_ms(ranks)
            intervals.append(ranks[0]["interval"])
            bounds.append(ranks[0]["worst_case_steps"])
    step_ms, bare_ms = statistics.median(steps[True]), statistics.median(steps[False])
    check_ms, interval = statistics.median(checks), statistics.median(intervals)
    return {
        "bare_ms": bare_ms,
        "step_ms": step_ms,
        "check_ms": check_ms,
        "interval": interval,
        "worst_case_steps": statistics.median(bounds),
        "amortized": check_ms / (interval * step_ms),
        "between_checks": step_ms / bare_ms - 1,
    }


def _agreed_check_ms(ranks: list[dict[str, Any]]) -> list[float]:
    """Return for each check what the slowest rank took."""
    by_check = zip(*(one["results"] for one in ranks), strict=True)
    return [max(it.get("took_ms", 0.0) for it in one) for one in by_check]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--healthy", type=int, default=2000, help="healthy checks")
    parser.add_argument("--large", type=int, default=1, help="0 leaves the large model out")
    args = parser.parse_args()
    names = [name for name in MODELS if args.large or not name.startswith("100")]
    costs = {name: overhead(name) for name in names}
    print(f"{'':<18}{'step':>10}{'check':>10}{'interval':>10}{'all seen in':>13}{'amortized':>11}")
    for name, cost in costs.items():
        print(
            f"{name:<18}{cost['step_ms']:>7.1f} ms{cost['check_ms']:>7.1f} ms"
            f"{cost['interval']:>10.0f}{cost['worst_case_steps']:>7.0f} steps"
            f"{cost['amortized']:>10.2%}   between checks {cost['between_checks']:+.1%}"
        )
    score = scout_detection.Score()
    scout_detection.corruption(score)
    scout_detection.slowness(score)
    scout_detection.health(score, args.healthy)
    print()
    for surface, (right, total) in score.by_surface.items():
        print(f"{surface:<18}{right:>5} of {total} attributed to the right rank")
    print(f"{'stragglers':<18}{score.straggler_right:>5} of {score.straggler_total}")
    print(f"{'healthy checks':<18}{score.healthy_checks:>5}, {score.false_verdicts} false verdicts")
    for miss in score.misses[:20]:
        print(f"  {miss[:200]}")
    told = asdict(score)
    results = {
        "amortized_overhead_fraction": round(max(it["amortized"] for it in costs.values()), 5),
        "check_ms": round(next(iter(costs.values()))["check_ms"], 2),
        **{key: told[key] for key in told if key not in ("by_surface", "misses")},
    }
    print(json.dumps({"benchmark": "scout", "results": results}))


if __name__ == "__main__":
    main()
