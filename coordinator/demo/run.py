"""Runs the demo: waits until training is healthy, breaks it, watches the recovery, next one."""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from coordinator.cli.errors import UserError
from coordinator.demo.cluster import Cluster, Layout
from coordinator.demo.ladder import run_ladder
from coordinator.demo.reference import find_digest, run_reference
from coordinator.demo.scenarios import SPARES, WORKERS, Scenario
from coordinator.demo.show import Result, Screen, named

STEPS_AT_REST: Final = 10
"""Steps at the beginning and at the end of which nothing is broken."""
STEPS_PER_FAULT: Final = 14
"""Steps granted to each fault: two checkpoint intervals before it and some after."""
CHECKPOINT_EVERY: Final = 5
HEALTHY_WITHIN_S: Final = 90.0
"""Longest wait for a healthy, stepping job; a loaded laptop takes 20 s to start four workers."""
RECOVERED_WITHIN_S: Final = 90.0
POLL_S: Final = 0.05

POLICY: Final = """\
runPolicy:
  jobMaxRetryCount: 20
  restartPolicy:
    evalPeriodSeconds: 3600
progressPolicy:
  stallTimeoutSeconds: 5
"""


COMPARING: Final = f"""\
scout:
  enabled: true
  checkInterval: {CHECKPOINT_EVERY}
"""
SABOTAGE: Final = Path(__file__).resolve().parent / "sabotage"


def run_demo(script: Path, scenarios: Sequence[Scenario], keep: Path | None) -> int:
    """Run ``scenarios`` in turn; return 0 when every culprit was right and the weights match."""
    if keep is not None:
        try:
            keep.mkdir(parents=True, exist_ok=False)
        except OSError as error:
            raise UserError(
                f"--keep {keep} cannot be made ({error.strerror}); name a new folder where you may"
                " write"
            ) from error
        return _run_all(keep.resolve(), script, scenarios)
    with tempfile.TemporaryDirectory(prefix="outrider-demo-") as folder:
        return _run_all(Path(folder), script, scenarios)


def _run_all(root: Path, script: Path, scenarios: Sequence[Scenario]) -> int:
    """Run what a job survives in one job, and what ends it in another."""
    survived = [scenario for scenario in scenarios if not scenario.ends]
    status = _run(_layout(root, script, survived), survived) if survived else 0
    if len(survived) == len(scenarios):
        return status
    (root / "escalation").mkdir()
    ended = run_ladder(root / "escalation", script, Screen())
    return status if ended else 1


def _layout(root: Path, script: Path, scenarios: Sequence[Scenario]) -> Layout:
    steps = 2 * STEPS_AT_REST + STEPS_PER_FAULT * len(scenarios)
    in_process = any(scenario.in_process for scenario in scenarios)
    return Layout(
        root=root,
        script=script,
        steps=steps,
        checkpoint_every=CHECKPOINT_EVERY,
        options=("--restart-in-process",) if in_process else (),
    )


def _run(layout: Layout, scenarios: Sequence[Scenario]) -> int:
    screen = Screen()
    screen.say(
        f"reference: {layout.steps} steps on {len(WORKERS)} ranks under torchrun, without Outrider"
    )
    expected = run_reference(layout, len(WORKERS))
    screen.say(f"reference: final weights sha256 {expected[:16]}...")
    screen.say(f"cluster: coordinator, {len(WORKERS)} nodes, {len(SPARES)} spare")
    compares = any(scenario.compares for scenario in scenarios)
    cluster = Cluster(
        layout=layout,
        workers=WORKERS,
        spares=SPARES,
        policy=POLICY + COMPARING if compares else POLICY,
        path=SABOTAGE if compares else None,
    )
    with cluster:
        results = []
        for number, scenario in enumerate(scenarios):
            _await_healthy(cluster, STEPS_AT_REST + STEPS_PER_FAULT * number)
            run = _break if scenario.stops else _slow
            results.append(run(cluster, scenario, screen))
        screen.say("no more faults: waiting for the run to end")
        _await_end(cluster)
    digest = find_digest(list(layout.root.glob("node-*/logs/**/stdout.log")))
    screen.results(results)
    same = digest == expected
    screen.say(
        "final weights are bit-identical to the run without faults"
        if same
        else f"final weights DIFFER from the run without faults: {digest} is not {expected}",
        "ok" if same else "bad",
    )
    right = sum(not result.wrong for result in results)
    screen.say(
        f"{right} of {len(results)} culprits right", "ok" if right == len(results) else "bad"
    )
    return 0 if same and right == len(results) else 1


def _break(cluster: Cluster, scenario: Scenario, screen: Screen) -> Result:
    before = set(cluster.incident_ids())
    pids = {name: cluster.worker_pid(name) for name in WORKERS} if scenario.in_process else {}
    injected_ns = time.time_ns()
    injected = scenario.inject(cluster)
    screen.say(f"{scenario.name}: {injected}", "inject")
    incident = _follow(cluster, before, screen)
    if scenario.expected.gives_up:  # the first of the two incidents names who broke
        number = next(item for item in cluster.incident_ids() if item not in before)
        first = cluster.incident(number)
        milestones = [*first["milestones"][:2], *incident["milestones"][2:]]
        incident = {**incident, "finding": first["finding"], "milestones": milestones}
    result = _result(scenario, injected, injected_ns, incident)
    for name in pids.keys() - {scenario.expected.node}:
        if cluster.worker_pid(name) != pids[name] and not result.wrong:
            result = replace(result, wrong=f"{name} did not keep its process")
    verdict = "right" if not result.wrong else f"WRONG ({result.wrong})"
    screen.say(
        f"{scenario.name}: named {result.named}: {verdict}", "ok" if not result.wrong else "bad"
    )
    return result


def _slow(cluster: Cluster, scenario: Scenario, screen: Screen) -> Result:
    """Inject what stops nothing, and wait until every rank names the same one for it."""
    before = set(cluster.incident_ids())
    injected_ns = time.time_ns()
    injected = scenario.inject(cluster)
    screen.say(f"{scenario.name}: {injected}", "inject")
    rank = scenario.expected.rank

    def told() -> list[list[int]]:
        ranks = [it for name in WORKERS for it in cluster.nodes()[name]["ranks"]]
        return [it["scout"]["straggler_ranks"] for it in ranks if it["scout"] is not None]

    def agreed() -> bool:
        said = told()
        return len(said) == len(WORKERS) and all(said) and all(it == said[0] for it in said)

    _await(agreed, RECOVERED_WITHIN_S, "a verdict about the slow rank", cluster)
    detect_s = (time.time_ns() - injected_ns) / 1e9
    named_ranks = told()[0]
    stopped = [item for item in cluster.incident_ids() if item not in before]
    wrong = "" if named_ranks == [rank] else f"ranks {named_ranks} were named, the truth is {rank}"
    wrong = f"the job was stopped: {stopped[0]}" if stopped else wrong
    screen.say(
        f"{scenario.name}: named rank {named_ranks}: {wrong or 'right'}", "bad" if wrong else "ok"
    )
    return Result(
        scenario=scenario.name,
        injected=injected,
        detect_s=detect_s,
        named=f"rank {', '.join(map(str, named_ranks))} on {scenario.expected.node}",
        kind="straggler",
        why="the same computation takes longer there than on every peer",
        decision="nothing is stopped: its values are right",
        checkpoint="none was needed",
        recover_s=None,
        steps_lost=0,
        wrong=wrong,
    )


def _follow(cluster: Cluster, before: set[str], screen: Screen) -> dict[str, Any]:
    """Print an incident's milestones as they come; return it once it is closed."""
    shown: set[tuple[str, str]] = set()
    found: dict[str, Any] = {}

    def closed() -> bool:
        fresh = [item for item in cluster.incident_ids() if item not in before]
        if not fresh:
            return False
        found.update(cluster.incident(fresh[-1]))
        for milestone in found["milestones"]:
            phase = milestone["phase"]
            if (found["id"], phase) not in shown:
                shown.add((found["id"], phase))
                _tell(phase, found, screen)
        return bool(found["outcome"] in ("recovered", "failed"))

    _await(closed, RECOVERED_WITHIN_S, "the recovery", cluster)
    return found


def _tell(phase: str, incident: dict[str, Any], screen: Screen) -> None:
    decision, choices = incident["decision"], incident["checkpoints"]
    match phase:
        case "detected":
            screen.say(f"  detected: {incident['trigger']}")
        case "localized":
            screen.say(f"  culprit: {incident['finding']['why']}")
        case "captured":
            for group in incident["stack_groups"]:
                if group["odd"]:
                    who = ", ".join(str(rank) for rank in group["ranks"])
                    screen.say(f"  apart from the others: rank {who} in {group['frames'][0]}")
        case "stopped":
            screen.say("  every node has stopped")
        case "decided":
            screen.say(f"  decided: {decision['reason']}")
            for choice in choices:
                screen.say(f"  checkpoint: {choice['reason']}")
        case "assigned":
            for move in incident["moves"]:
                screen.say(
                    f"  group rank {move['group_rank']}: {move['from_node']} -> {move['to_node']}"
                )
        case "first_step":
            screen.say("  first step on every rank")


def _result(
    scenario: Scenario, injected: str, injected_ns: int, incident: dict[str, Any]
) -> Result:
    at = {item["phase"]: (item["at_ns"] - injected_ns) / 1e9 for item in incident["milestones"]}
    finding, decision = incident["finding"] or {}, incident["decision"] or {}
    culprit = finding.get("culprit")
    choices = incident["checkpoints"]
    return Result(
        scenario=scenario.name,
        injected=injected,
        detect_s=at.get("detected"),
        named=named(culprit),
        kind=culprit["kind"] if culprit else "-",
        why=finding.get("why", "no verdict"),
        decision=decision.get("reason", "nothing was decided"),
        checkpoint="; ".join(choice["reason"] for choice in choices) or "none was confirmed yet",
        recover_s=at.get("first_step"),
        steps_lost=incident["steps_lost"],
        wrong=_mistake(scenario, incident, culprit),
    )


def _mistake(scenario: Scenario, incident: dict[str, Any], culprit: dict[str, Any] | None) -> str:
    truth = scenario.expected
    if incident["outcome"] != "recovered":
        return f"the incident ended as {incident['outcome']}"
    if truth.gives_up and "is given up" not in incident["decision"]["reason"]:
        return "no checkpoint was given up"
    if culprit is None:
        return "nobody was named"
    for name in ("kind", "node", "rank", "gpu"):
        if culprit[name] != getattr(truth, name):
            return f"{name} is {culprit[name]}, the truth is {getattr(truth, name)}"
    if truth.replaced_by is not None:
        moves = [(move["from_node"], move["to_node"]) for move in incident["moves"]]
        if moves != [(truth.node, truth.replaced_by)]:
            return f"ranks moved {moves}, expected {truth.node} -> {truth.replaced_by}"
    return ""


# --- waiting --------------------------------------------------------------------------------


def _await_healthy(cluster: Cluster, step: int) -> None:
    """Wait until the job runs without an open incident, past ``step``, with a checkpoint."""

    def healthy() -> bool:
        job = cluster.job()
        saved = [item["step"] for item in job["complete_checkpoints"]]
        return (
            job["phase"] == "running"
            and job["open_incident"] is None
            and (job["step"] or 0) >= step
            and bool(saved)
        )

    _await(healthy, HEALTHY_WITHIN_S, f"a healthy job at step {step}", cluster)


def _await_end(cluster: Cluster) -> None:
    def ended() -> bool:
        return all(process.poll() is not None for process in cluster.processes.values())

    deadline = time.monotonic() + RECOVERED_WITHIN_S
    while not ended():
        if time.monotonic() > deadline:
            raise UserError(f"the job did not end: {cluster.job()['phase']}")
        time.sleep(POLL_S)


def _await(done: Callable[[], bool], within_s: float, what: str, cluster: Cluster) -> None:
    deadline = time.monotonic() + within_s
    while not done():
        if (dead := cluster.dead()) is not None:
            raise UserError(f"waiting for {what}, but {dead} ended: {cluster.tail(dead)}")
        if time.monotonic() > deadline:
            job = cluster.job()
            waiting = job["waiting_for"] or f"the phase is {job['phase']}, step {job['step']}"
            raise UserError(f"{what} took over {within_s:g} s: {waiting}")
        time.sleep(POLL_S)
