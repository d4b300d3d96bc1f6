"""``outrider status``: the job and its nodes at this moment."""

import argparse
from collections.abc import Iterable, Mapping
from typing import Any, Final

from rich.text import Text

from coordinator.cli.arguments import add_json, add_target
from coordinator.cli.client import Client
from coordinator.cli.console import cell, console, many, print_json, span, table

PHASE_STYLES: Final[Mapping[str, str]] = {
    "running": "green",
    "completed": "green",
    "failed": "bold red",
    "stopped": "cyan",
    "localizing": "yellow",
    "stopping": "yellow",
    "starting": "cyan",
    "waiting_for_nodes": "cyan",
}

PENDING_SHOWN: Final = 3
"""Newest checkpoints that are not complete and whom they lack."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``outrider status``."""
    add_target(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the job and its nodes."""
    client = Client.of(args)
    job, nodes = client.get("v1", "job"), client.get("v1", "nodes")["nodes"]
    if args.json:
        print_json({"job": job, "nodes": nodes})
        return 0
    _print_job(job, nodes)
    _print_nodes(nodes)
    return 0


def _print_job(job: Mapping[str, Any], nodes: list[Mapping[str, Any]]) -> None:
    out = console()
    phase = job["phase"]
    title = cell(job["job"], "bold").append(": ").append(cell(phase, PHASE_STYLES.get(phase, "")))
    out.print(title.append(f" for {span(job['phase_age_s'])}"))
    ranks = job["nnodes"] * job["nproc_per_node"]
    step = "none yet" if job["step"] is None else job["step"]
    idle = sum(
        node["connected"] and node["group_rank"] is None and node["excluded"] is None
        for node in nodes
    )
    for name, text in (
        ("generation", f"{job['generation']} (topology version {job['topology_version']})"),
        ("world", f"{many(ranks, 'rank')} on {many(job['nnodes'], 'node')}; {idle} standing by"),
        ("step", step),
        ("checkpoints", _checkpoints(job)),
        *(("not yet", _pending(item)) for item in job["pending_checkpoints"][-PENDING_SHOWN:]),
        (
            "restarts",
            f"{job['restarts_total']}; {job['restart_budget_remaining']} left in the window",
        ),
        ("stall limits", stall_limits(nodes)),
        ("waiting for", job["waiting_for"]),
        ("offenders", _offenders(job["offenders"])),
        ("outcome", job["outcome_reason"]),
        ("incident", _incident(job["open_incident"])),
    ):
        if text != "":
            out.print(Text(f"{name + ':':<14}", "dim").append(cell(text)))


def _checkpoints(job: Mapping[str, Any]) -> str:
    newest: dict[str, int] = {}
    for pointer in job["complete_checkpoints"]:
        newest[pointer["prefix"]] = max(pointer["step"], newest.get(pointer["prefix"], 0))
    if not newest:
        return "none that every rank confirmed"
    found = ", ".join(f"{prefix} at step {step}" for prefix, step in sorted(newest.items()))
    return f"{found}, confirmed by every rank"


def _offenders(records: list[Mapping[str, Any]]) -> str:
    worst = sorted(records, key=lambda record: -float(record["score"]))[:PENDING_SHOWN]
    return "; ".join(
        f"{record['node']} {record['score']:.1f} ({many(record['strikes'], 'strike')}, the last: "
        f"{record['last_cause']})"
        for record in worst
    )


def _pending(item: Mapping[str, Any]) -> str:
    return f"{item['prefix']} at step {item['step']}: {item['why']}"


def _incident(incident: Mapping[str, Any] | None) -> str:
    if incident is None:
        return ""
    return f"{incident['id']} is open: {incident['trigger']} (`outrider explain last`)"


def stall_limits(nodes: Iterable[Mapping[str, Any]]) -> str:
    """Return for how many ranks the silence allowed now was learned or declared."""
    limits = [rank for node in nodes for rank in node["ranks"] if rank["stall_limit_ns"]]
    armed = sum(rank["stall_armed"] for rank in limits)
    if not limits:
        return ""
    text = f"learned or declared for {armed} of {many(len(limits), 'rank')}"
    return text if armed == len(limits) else f"{text}, the job's own for the others"


def _print_nodes(nodes: list[Mapping[str, Any]]) -> None:
    shown = table("", ("node", "state", "ranks", "generation#", "step#", "last heard#", "note"))
    for node in nodes:
        steps = [rank["step"] for rank in node["ranks"] if rank["step"] is not None]
        state = "unreachable" if not node["connected"] else node["state"] or "unknown"
        shown.add_row(
            cell(node["node"]),
            cell(state, "red" if state in ("faulted", "unreachable") else ""),
            cell(_ranks(node)),
            cell(node["generation"]),
            cell(max(steps, default=None)),
            cell("never" if (age := node["last_heard_age_s"]) is None else f"{span(age)} ago"),
            cell(_note(node)),
        )
    out = console()
    out.print(shown if nodes else cell("no node has joined yet", "yellow"))


def _ranks(node: Mapping[str, Any]) -> str:
    ranks = sorted(rank["rank"] for rank in node["ranks"])
    if not ranks:
        return "spare" if node["spare"] else "-"
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _note(node: Mapping[str, Any]) -> str:
    if node["excluded"] is not None:
        return f"excluded: {node['excluded']}"
    return str(node["reason"])
