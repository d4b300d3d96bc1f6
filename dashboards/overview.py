"""The overview: whether training is healthy, and if not, who broke and how it is being mended.

Rows follow the question a person on call asks next.  Colour means good, warn or bad; blue is work
in progress.
"""

from typing import Final

from dashboards import parts, shared
from dashboards.parts import BAD, GOOD, IDLE, JOB, NODE, WARN, Builder, Frames

UID: Final = "outrider-overview"


def overview() -> Builder:
    """Return the dashboard, unbuilt."""
    frames = Frames()
    page = (
        parts.new_dashboard(
            UID,
            "Outrider / Overview",
            "Is training healthy, and if not, who broke and is it being mended?",
        )
        .refresh("10s")
        .time("now-1h", "now")
        .with_variable(parts.node_variable())
        .with_variable(parts.coordinator_variable())
        .link(parts.page_link("Last incident", "${coordinator}/incidents/last"))
    )
    page.with_row(frames.row("Is training healthy?"))
    _health(page, frames)
    _counts(page, frames)
    page.with_row(frames.row("Where is the fault?"))
    page.with_panel(shared.suspects(frames, width=16))
    page.with_panel(_excluded(frames))
    page.with_panel(shared.newest_incidents(frames, width=24))
    page.with_panel(shared.gpu_matrix(frames, width=16, height=9))
    page.with_panel(_not_running(frames))
    page.with_row(frames.row("Does it move?"))
    page.with_panel(shared.job_phase(frames, width=12))
    page.with_panel(_recovery_phase(frames))
    page.with_panel(_steps(frames))
    page.with_panel(shared.silence(frames, width=12))
    page.with_row(frames.row("What else is wrong?"))
    page.with_panel(_alerts(frames))
    page.with_panel(_verdicts(frames))
    return page


def _health(page: Builder, frames: Frames) -> None:
    page.with_panel(
        frames.number("Job phase", "What the coordinator is doing for the job.", "none", width=4)
        .mappings([parts.state_names(shared.JOB_PHASES)])
        .with_target(
            parts.right_now(
                parts.state_number(
                    f"outrider_job_phase{{{JOB}}}", "phase", shared.JOB_PHASES, "training_job"
                )
            )
        )
    )
    page.with_panel(
        frames.number("Recovery", "How deep the present recovery goes.", "none", width=4)
        .mappings([parts.state_names(shared.LEVELS)])
        .with_target(
            parts.right_now(
                parts.state_number(
                    f"outrider_recovery_level{{{JOB}}}", "level", shared.LEVELS, "training_job"
                )
            )
        )
    )
    page.with_panel(
        frames.number("Open faults", "Faults whose incident is not over.", "short", width=3)
        .thresholds(parts.thresholds(GOOD, (1, BAD)))
        .with_target(
            parts.right_now(
                f"count(outrider_fault_active_since_timestamp_seconds{{{JOB}}}) or vector(0)"
            )
        )
    )
    page.with_panel(
        frames.number("Longest silence", "How long ago the slowest rank last moved.", "s", width=3)
        .decimals(0)
        .no_value("not known")
        .thresholds(parts.thresholds(GOOD, (60, WARN), (120, BAD)))
        .with_target(parts.right_now(f"max(outrider_rank_progress_age_seconds{{{NODE}}})"))
    )


def _counts(page: Builder, frames: Frames) -> None:
    page.with_panel(
        frames.number(
            "Steps at risk",
            "Steps since the newest checkpoint that every rank confirmed: lost if it broke now.",
            "short",
            width=3,
        )
        .no_value("none yet")
        .thresholds(parts.thresholds(IDLE))
        .with_target(
            parts.right_now(
                f"outrider_job_step{{{JOB}}} - on (cluster, training_job) min by (cluster,"
                f" training_job) (outrider_checkpoint_consistent_step{{{JOB}}})"
            )
        )
    )
    page.with_panel(shared.goodput(frames, "Goodput, 1 h", "1h", width=3))
    page.with_panel(
        frames.number(
            "Nodes missing", "Nodes that should hold ranks and do not run.", "short", width=2
        )
        .thresholds(parts.thresholds(GOOD, (1, BAD)))
        .with_target(
            parts.right_now(
                f"sum(outrider_job_nodes_expected{{{JOB}}}) - sum(outrider_coordinator_agents"
                f'{{{JOB}, state=~"running|completed"}})'
            )
        )
    )
    page.with_panel(
        frames.number(
            "Restarts left",
            "Restarts left in the sliding window before the job is given up.",
            "short",
            width=2,
        )
        .thresholds(parts.thresholds(BAD, (1, WARN), (2, GOOD)))
        .with_target(parts.right_now(f"min(outrider_restart_budget_remaining{{{JOB}}})"))
    )


def _excluded(frames: Frames) -> Builder:
    return (
        frames.rows(
            "Excluded nodes",
            "Nodes that get no ranks any more, and why.",
            "none",
            width=8,
            height=6,
        )
        .with_target(
            parts.right_now(f"outrider_nodes_excluded{{{JOB}}} == 1", as_table=True),
        )
        .with_transformation(parts.table_columns(hide=(*shared.HIDDEN, "Value"), rename={}))
    )


def _not_running(frames: Frames) -> Builder:
    return (
        frames.rows(
            "Nodes not running",
            "Nodes whose agent is in another state than running.",
            "none",
            width=8,
            height=9,
        )
        .no_value("all run")
        .with_target(
            parts.right_now(
                f'max by (node, state) (outrider_agent_state{{{NODE}, state!="running"}}) == 1',
                as_table=True,
            )
        )
        .with_transformation(parts.table_columns(hide=(*shared.HIDDEN, "Value"), rename={}))
    )


def _recovery_phase(frames: Frames) -> Builder:
    return (
        frames.states("Recovery", "Where a recovery stood.", width=12, height=6)
        .mappings([parts.state_names(shared.RECOVERY_PHASES)])
        .with_target(
            parts.over_time(
                parts.state_number(
                    f"outrider_recovery_phase{{{JOB}}}",
                    "phase",
                    shared.RECOVERY_PHASES,
                    "training_job",
                ),
                "{{training_job}}",
            )
        )
    )


def _steps(frames: Frames) -> Builder:
    return (
        frames.lines(
            "Steps",
            "Completed step and newest checkpoint of every rank. Flat is standing still; a drop is "
            "work done twice.",
            "short",
            width=12,
        )
        .with_target(parts.over_time(f"outrider_job_step{{{JOB}}}", "completed"))
        .with_target(
            parts.over_time(
                f"outrider_checkpoint_consistent_step{{{JOB}}}", "checkpoint {{prefix}}", ref="B"
            )
        )
    )


def _alerts(frames: Frames) -> Builder:
    return (
        frames.rows(
            "Firing alerts",
            "What Prometheus is telling Alertmanager now.",
            "none",
            width=12,
        )
        .with_target(
            parts.right_now('ALERTS{alertstate="firing", alertname=~"Outrider.*"}', as_table=True)
        )
        .with_transformation(
            parts.table_columns(
                hide=(*shared.HIDDEN, "Value", "alertstate", "component", "scope"), rename={}
            )
        )
    )


def _verdicts(frames: Frames) -> Builder:
    return frames.columns(
        "Verdicts",
        "Attributed names somebody; inconclusive names nobody and says why.",
        "short",
        width=12,
    ).with_target(
        parts.over_time(
            parts.increase(f"outrider_verdicts_total{{{JOB}}}", "outcome"), "{{outcome}}"
        )
    )
