"""Control plane: whether the tool itself can be trusted."""

from typing import Final

from dashboards import parts, shared
from dashboards.parts import BAD, CLUSTER, GOOD, IDLE, JOB, WARN, Builder, Frames

UID: Final = "outrider-control-plane"
COORDINATOR: Final = f'job="outrider-coordinator", {CLUSTER}'
SIDECAR: Final = f'job="outrider-sidecar", {CLUSTER}'
SEEN: Final = f"outrider_coordinator_agent_last_seen_timestamp_seconds{{{JOB}}}"


def control_plane() -> Builder:
    """Return the dashboard, unbuilt."""
    frames = Frames()
    page = parts.new_dashboard(
        UID, "Outrider / Control plane", "Can we trust the tool itself?"
    ).time("now-6h", "now")
    page.with_row(frames.row("Who is there?"))
    _who(page, frames)
    page.with_panel(_silent(frames))
    page.with_panel(_believed(frames))
    page.with_row(frames.row("Are commands obeyed in time?"))
    _commands(page, frames)
    page.with_row(frames.row("Is anything late or refused?"))
    _late(page, frames)
    page.with_row(frames.row("What does watching cost?"))
    _scrapes(page, frames)
    return page


def _who(page: Builder, frames: Frames) -> None:
    for title, why, expr, limits in (
        (
            "Coordinators",
            "Coordinators that answer Prometheus.",
            f"sum(up{{{COORDINATOR}}}) or vector(0)",
            parts.thresholds(BAD, (1, GOOD)),
        ),
        (
            "Sidecars down",
            "Sidecars that do not answer Prometheus.",
            f"count(up{{{SIDECAR}}} == 0) or vector(0)",
            parts.thresholds(GOOD, (1, BAD)),
        ),
        (
            "Links down",
            "Sidecars without a connection to their coordinator, by their own word.",
            f"count(outrider_uplink_connected{{{CLUSTER}}} == 0) or vector(0)",
            parts.thresholds(GOOD, (1, BAD)),
        ),
        (
            "Versions",
            "Different versions that run; more than one is a rollout.",
            f"count(count by (version) (outrider_build_info{{{CLUSTER}}})) or vector(0)",
            parts.thresholds(GOOD, (2, WARN)),
        ),
    ):
        page.with_panel(
            frames.number(title, why, "short", width=6)
            .thresholds(limits)
            .with_target(parts.right_now(expr))
        )


def _silent(frames: Frames) -> Builder:
    return (
        frames.rows(
            "Partitioned nodes",
            "Nodes that answer Prometheus and were not heard by the coordinator for 15 s.",
            "s",
            width=12,
        )
        .with_target(
            parts.right_now(
                f"(time() - {SEEN} > 15) and on (cluster, node) (up{{{SIDECAR}}} == 1)",
                as_table=True,
            )
        )
        .with_transformation(parts.table_columns(hide=shared.HIDDEN, rename={"Value": "unheard"}))
    )


def _believed(frames: Frames) -> Builder:
    return (
        frames.lines(
            "Agents, believed and reported",
            "States as the coordinator has them, and as the sidecars themselves say.",
            "short",
            width=12,
        )
        .with_target(
            parts.over_time(
                f"sum by (state) (outrider_coordinator_agents{{{JOB}}}) > 0", "{{state}}, believed"
            )
        )
        .with_target(
            parts.over_time(
                f"sum by (state) (outrider_agent_state{{{JOB}}}) > 0",
                "{{state}}, reported",
                ref="B",
            )
        )
    )


def _commands(page: Builder, frames: Frames) -> None:
    broadcast = "outrider_coordinator_broadcast_duration_seconds"
    page.with_panel(
        frames.lines(
            "Broadcasts",
            "From a command's first send to the last node's answer, over the shown range.",
            "s",
            width=8,
        )
        .no_value("no command was sent")
        .with_target(
            parts.over_time(parts.quantile(0.5, broadcast, JOB, "command"), "half, {{command}}")
        )
        .with_target(
            parts.over_time(
                parts.quantile(0.99, broadcast, JOB, "command"), "99 %, {{command}}", ref="B"
            )
        )
    )
    page.with_panel(
        frames.heat(
            "Answers of single nodes", "From a command's send to one node's answer.", width=8
        ).with_target(parts.buckets("outrider_coordinator_ack_duration_seconds", JOB))
    )
    page.with_panel(
        frames.columns(
            "Missing answers", "Commands whose node left before it answered.", "short", width=8
        ).with_target(
            parts.over_time(
                parts.increase(f"outrider_coordinator_acks_missing_total{{{JOB}}}", "command"),
                "{{command}}",
            )
        )
    )


def _late(page: Builder, frames: Frames) -> None:
    page.with_panel(
        frames.lines(
            "Loop lag",
            "How late the loop of the latest process of each kind woke up, at worst.",
            "s",
            width=8,
        )
        .thresholds(parts.thresholds(GOOD, (0.1, WARN), (0.5, BAD)))
        .with_target(
            parts.over_time(
                parts.quantile(0.99, "outrider_loop_lag_seconds", CLUSTER, "job", "5m"), "{{job}}"
            )
        )
    )
    page.with_panel(
        frames.columns(
            "Refused messages",
            "Messages of workers and sidecars that could not be accepted.",
            "short",
            width=8,
        )
        .with_target(
            parts.over_time(
                parts.increase(f"outrider_ipc_errors_total{{{JOB}}}", "reason") + " > 0",
                "worker: {{reason}}",
            )
        )
        .with_target(
            parts.over_time(
                "sum(increase(outrider_coordinator_messages_refused_total"
                f"{{{JOB}}}[$__rate_interval]))",
                "sidecar",
                ref="B",
            )
        )
    )
    page.with_panel(
        frames.columns(
            "Dropped links and events",
            "Connections ended because a sidecar took nothing, and events that found no room.",
            "short",
            width=8,
        )
        .with_target(
            parts.over_time(
                "sum(increase(outrider_coordinator_links_dropped_total"
                f"{{{JOB}}}[$__rate_interval]))",
                "links",
            )
        )
        .with_target(
            parts.over_time(
                f"sum(increase(outrider_events_dropped_total{{{JOB}}}[$__rate_interval]))",
                "events",
                ref="B",
            )
        )
    )


def _scrapes(page: Builder, frames: Frames) -> None:
    both = f'{CLUSTER}, job=~"outrider-.+"'
    for title, why, unit, metric in (
        ("Scrape duration", "How long the slowest scrape took.", "s", "scrape_duration_seconds"),
        (
            "Series per target",
            "Series of the largest target of each kind; a node is allowed 450.",
            "short",
            "scrape_samples_scraped",
        ),
    ):
        page.with_panel(
            frames.lines(title, why, unit, width=8)
            .thresholds(parts.thresholds(IDLE))
            .with_target(parts.over_time(f"max by (job) ({metric}{{{both}}})", "{{job}}"))
        )
    page.with_panel(
        frames.rows("Versions", "Which version runs where.", "short", width=8)
        .with_target(
            parts.right_now(
                f"count by (component, version) (outrider_build_info{{{CLUSTER}}})", as_table=True
            )
        )
        .with_transformation(parts.table_columns(hide=("Time",), rename={"Value": "processes"}))
    )
