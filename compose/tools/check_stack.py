"""Asks a running compose stack whether it does what it is for, breaking a worker on the way.

Decides from the outside only: the coordinator's operator API, the HTTP APIs of Prometheus,
Alertmanager and Grafana, and one SIGKILL sent inside a node's container.  Needs nothing but the
standard library.  Each claim is waited for with a generous deadline; the first that does not come
true ends the check with status 1.
"""
# ruff: noqa: INP001, T201 - a script that talks to a person, not a package

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

CLAIM_S_MAX: Final = 180.0
"""Longest wait for one claim: a cold start of torch on a busy machine with two cores."""
PAUSE_S: Final = 0.5
REQUEST_S_MAX: Final = 10.0
STEPS_ON: Final = 5
"""Steps that count as going on."""
NODES: Final = ("node-0", "node-1", "node-2", "node-3")
CULPRIT: Final = "node-1"
"""Whose worker is killed."""
BROKEN: Final = "node-2"
BROKEN_GPU: Final = "0"
XID: Final = "79"
OF_OBSERVERS: Final = "outrider_observer_"
"""Series of jobs that run without a coordinator, of which the stack has none."""
ROOT: Final = Path(__file__).resolve().parents[2]
FAMILY: Final = re.compile("_(total|bucket|sum|count|info)$")
"""What a metric's samples may have behind the name of their family."""


class NotYetError(Exception):
    """What was asked for is not so at the moment; the text says what is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Where the parts of the stack answer.  ``grafana`` is None when it is not running."""

    coordinator: str
    prometheus: str
    alertmanager: str
    grafana: str | None
    compose: tuple[str, ...]
    """The command that stands before ``exec``, with project and file."""

    def metric(self, query: str) -> float:
        """Return the value of an instant query that has exactly one series."""
        result = get(self.prometheus, "/api/v1/query", query=query)["data"]["result"]
        if len(result) != 1:
            raise NotYetError(f"{query} has {len(result)} series")
        return float(result[0]["value"][1])

    def job(self) -> Any:
        """Return the job as the coordinator shows it."""
        return get(self.coordinator, "/v1/job")


def get(base: str, path: str, **query: str) -> Any:
    """Return the JSON answer of a GET request.  Raises `NotYetError` when there is none."""
    url = base + path + (f"?{urllib.parse.urlencode(query)}" if query else "")
    try:
        with urllib.request.urlopen(url, timeout=REQUEST_S_MAX) as answer:  # noqa: S310 - http
            return json.load(answer)
    except (OSError, ValueError) as error:
        raise NotYetError(f"{url}: {error}") from error


def require(condition: bool, otherwise: str) -> None:
    """Raise `NotYetError` with ``otherwise`` unless ``condition`` holds."""
    if not condition:
        raise NotYetError(otherwise)


def claim(text: str, probe: Callable[[], str]) -> None:
    """Wait until ``probe`` raises no `NotYetError`, and print what it said."""
    started = time.monotonic()
    while True:
        try:
            said = probe()
        except NotYetError as error:
            if time.monotonic() - started > CLAIM_S_MAX:
                print(f"FAILED  {text}: {error}", flush=True)
                raise SystemExit(1) from error
            time.sleep(PAUSE_S)
        else:
            waited = time.monotonic() - started
            print(f"ok      {text}: {said} ({waited:.1f} s)", flush=True)
            return


def check_training(stack: Stack) -> None:
    """The job runs on both nodes, and its steps advance."""

    def running() -> str:
        job = stack.job()
        require(job["phase"] == "running", f"phase {job['phase']}, {job['waiting_for']}")
        return f"{job['job']} on {' and '.join(job['world'])}"

    def stepping(beyond: int) -> str:
        step = stack.job()["step"]
        require(step is not None and step >= beyond, f"step {step}, waiting for {beyond}")
        return f"step {step}"

    claim("the job runs", running)
    claim("workers make steps", lambda: stepping(1))
    beyond = stack.job()["step"] + STEPS_ON
    claim("steps advance", lambda: stepping(beyond))


def check_watchers(stack: Stack) -> None:
    """Prometheus scrapes everybody, has the rules, and reaches Alertmanager."""

    def targets() -> str:
        active = get(stack.prometheus, "/api/v1/targets", state="active")["data"]["activeTargets"]
        down = [f"{item['scrapeUrl']} {item['lastError']}" for item in active
                if item["health"] != "up"]  # fmt: skip
        require(bool(active) and not down, f"not up: {down}")
        nodes = sorted(item["labels"]["node"] for item in active if "node" in item["labels"])
        require(nodes == list(NODES), f"nodes {nodes}")
        return f"{len(active)} targets up"

    def step() -> str:
        value = stack.metric("outrider_job_step")
        require(value > 0, f"step {value}")
        return f"outrider_job_step {value:.0f}"

    def rules() -> str:
        groups = get(stack.prometheus, "/api/v1/rules", type="alert")["data"]["groups"]
        found = {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}
        require(bool(found), "no alerting rule")
        require(set(found.values()) == {"ok"}, f"rules not evaluated: {found}")
        return f"{len(found)} alerting rules"

    def alertmanager() -> str:
        known = get(stack.prometheus, "/api/v1/alertmanagers")["data"]["activeAlertmanagers"]
        require(bool(known), "Prometheus knows no Alertmanager")
        status = get(stack.alertmanager, "/api/v2/status")
        return f"version {status['versionInfo']['version']}"

    claim("Prometheus scrapes every target", targets)
    claim("Prometheus has the job's step", step)
    claim("Prometheus evaluates the rules", rules)
    claim("Alertmanager answers", alertmanager)


def check_vocabulary(stack: Stack) -> None:
    """Everything exports what the dashboards and alerts ask for."""

    def metrics() -> str:
        known = get(stack.prometheus, "/api/v1/metadata")["data"]
        missing = [name for name in asked_for() if not {name, FAMILY.sub("", name)} & set(known)]
        require(not missing, f"nobody exports {', '.join(missing)}")
        return f"{len(asked_for())} metrics"

    claim("every metric that dashboards and alerts ask for is exported", metrics)


def asked_for() -> list[str]:
    """Return the product's metrics that stand in a dashboard or an alert of this repository."""
    files = [*(ROOT / "dashboards").glob("*.json"), ROOT / "alerts/outrider.rules.yaml"]
    texts = [file.read_text(encoding="utf-8") for file in files]
    found = {name for text in texts for name in re.findall(r"\boutrider_[a-z_]+", text)}
    return sorted(name for name in found if not name.startswith(OF_OBSERVERS))


def check_grafana(base: str) -> None:
    """Grafana shows the dashboards to somebody who has not logged in."""

    def dashboard() -> str:
        found = get(base, "/api/dashboards/uid/outrider-overview")["dashboard"]
        return str(found["title"])

    def source() -> str:
        answer = get(
            base,
            "/api/datasources/proxy/uid/prometheus/api/v1/query",
            query="max(outrider_job_step)",
        )
        require(len(answer["data"]["result"]) == 1, "no job step through Grafana")
        return "outrider_job_step through Grafana"

    claim("Grafana has the overview", dashboard)
    claim("Grafana reaches Prometheus", source)


def check_recovery(stack: Stack) -> None:
    """A killed worker is named as the culprit, and training goes on."""
    before = stack.job()
    killed = kill_worker(stack)

    def recovered() -> str:
        incidents = get(stack.coordinator, "/v1/incidents")["incidents"]
        require(bool(incidents), "no incident")
        last = incidents[-1]
        require(last["generation"] >= before["generation"], f"newest incident is {last['id']}")
        require(last["outcome"] != "open", f"incident {last['id']} is open")
        wrong = f"incident {last['id']} is {last['outcome']}, {last['kind']} on {last['node']}"
        if (last["outcome"], last["kind"], last["node"]) != ("recovered", "crash", CULPRIT):
            print(f"FAILED  {wrong}", flush=True)
            raise SystemExit(1)
        took = last["recovery_s"]
        span = "before its first step" if took is None else f"in {took:.1f} s"
        return f"{last['reason']}; {last['mode']} {span}"

    def beyond() -> str:
        job = stack.job()
        require(job["generation"] > before["generation"], f"generation {job['generation']}")
        require((job["step"] or 0) > before["step"], f"step {job['step']}")
        return f"step {job['step']}"

    def counted() -> str:
        restarts = stack.metric("sum(outrider_restarts_total)")
        faults = stack.metric('sum(outrider_faults_total{job="outrider-coordinator",kind="crash"})')
        require(restarts >= 1 and faults >= 1, f"{restarts:.0f} restarts, {faults:.0f} crashes")
        return f"{restarts:.0f} restart, {faults:.0f} crash"

    print(f"        kill -9 {killed} on {CULPRIT}", flush=True)
    claim("the killed worker is named and replaced", recovered)
    claim("training passes the step it was killed at", beyond)
    claim("Prometheus counted the restart", counted)


def check_hardware_fault(stack: Stack, inject: Path) -> None:
    """A GPU that falls off the bus is named by Prometheus and told by Alertmanager."""
    broken = f'{{node="{BROKEN}",gpu="{BROKEN_GPU}"}}'
    before = stack.job()

    def series() -> str:
        fatal = stack.metric(f"outrider_gpu_fatal_xid_errors_total{broken}")
        severity = stack.metric(f"outrider_gpu_health_severity{broken}")
        require(fatal >= 1, f"{fatal:.0f} fatal Xids")
        require(severity == 3, f"severity {severity:.0f}")  # noqa: PLR2004 - fatal
        others = f"sum(outrider_gpu_fatal_xid_errors_total) - {fatal:.0f} or vector(0)"
        require(stack.metric(others) == 0, "another GPU is blamed as well")
        return f"{BROKEN}, GPU {BROKEN_GPU}, {fatal:.0f} fatal Xid"

    def fault() -> str:
        # A recovery that is over between two scrapes leaves the incident's own series.
        query = (
            'max_over_time(outrider_fault_active_since_timestamp_seconds{kind="gpu_fatal"}[5m])'
            ' or outrider_incident_info{kind="gpu_fatal"}'
        )
        found = get(stack.prometheus, "/api/v1/query", query=query)["data"]["result"]
        named = {(it["metric"]["node"], it["metric"]["gpu"]) for it in found}
        require((BROKEN, BROKEN_GPU) in named, f"the fault series names {sorted(named)}")
        require(len(named) == 1, f"somebody else is named as well: {sorted(named)}")
        return f"node {BROKEN}, GPU {BROKEN_GPU}"

    def told() -> str:
        alerts = get(stack.alertmanager, "/api/v2/alerts")
        firing = [it["labels"] for it in alerts if it["status"]["state"] == "active"]
        fitting = [
            it for it in firing
            if it["alertname"] == "OutriderGpuXidFatal"
            and (it.get("node"), it.get("gpu")) == (BROKEN, BROKEN_GPU)
        ]  # fmt: skip
        require(bool(fitting), f"active: {sorted({it['alertname'] for it in firing})}")
        return f"OutriderGpuXidFatal for {BROKEN}, severity {fitting[0]['severity']}"

    def replaced() -> str:
        job = stack.job()
        require(job["phase"] == "running", f"phase {job['phase']}, {job['waiting_for']}")
        require(BROKEN not in job["world"], f"{BROKEN} still holds ranks")
        require((job["step"] or 0) > (before["step"] or 0), f"step {job['step']}")
        return f"{' and '.join(job['world'])}, step {job['step']}"

    command = [str(inject), "xid", BROKEN, BROKEN_GPU, XID]
    environment = os.environ | {"COMPOSE": shlex.join(stack.compose)}
    subprocess.run(command, check=True, env=environment)  # noqa: S603 - of this repository
    claim("Prometheus names the GPU", series)
    claim("the fault series names node and GPU", fault)
    claim("the alert fires in Alertmanager", told)
    claim("the spare takes the broken node's place", replaced)


def check_page(stack: Stack) -> None:
    """The incident's page is served."""

    def served() -> str:
        with urllib.request.urlopen(f"{stack.coordinator}/incidents/last") as answer:  # noqa: S310
            text = answer.read().decode()
        require(BROKEN in text and "<svg" in text, "the page does not name the node")
        return f"{len(text)} bytes"

    claim("the incident has a page", served)


def kill_worker(stack: Stack) -> int:
    """Send SIGKILL to the worker of `CULPRIT` and return its pid inside the container."""
    nodes = get(stack.coordinator, "/v1/nodes")["nodes"]
    ranks = next(node["ranks"] for node in nodes if node["node"] == CULPRIT)
    pid = int(ranks[0]["pid"])
    command = [*stack.compose, "exec", "-T", CULPRIT, "sh", "-c", f"kill -9 {pid}"]
    subprocess.run(command, check=True)  # noqa: S603 - the caller's own compose command
    return pid


def main() -> None:
    """Run every check in order."""
    parser = argparse.ArgumentParser(description="Check a running compose stack.")
    parser.add_argument("--coordinator", default="http://127.0.0.1:8081")
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--alertmanager", default="http://127.0.0.1:9093")
    parser.add_argument("--grafana", help="its address; left out, Grafana is not checked")
    parser.add_argument(
        "--compose",
        default="docker compose -f compose/docker-compose.yml",
        help="the command that stands before `exec`",
    )
    asked = parser.parse_args()
    stack = Stack(
        coordinator=asked.coordinator,
        prometheus=asked.prometheus,
        alertmanager=asked.alertmanager,
        grafana=asked.grafana,
        compose=tuple(shlex.split(asked.compose)),
    )
    check_training(stack)
    check_watchers(stack)
    if stack.grafana is not None:
        check_grafana(stack.grafana)
    check_recovery(stack)
    check_hardware_fault(stack, ROOT / "compose/inject.sh")
    check_page(stack)
    check_vocabulary(stack)


if __name__ == "__main__":
    try:
        main()
    except (subprocess.CalledProcessError, NotYetError) as error:
        print(f"FAILED  {error}", file=sys.stderr)
        raise SystemExit(1) from error
