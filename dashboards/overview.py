"""The overview: whether training is healthy, and if not, who broke and how it is being mended.

Rows follow the question a person on call asks next.  Colour means good, warn or bad; blue is work
in progress.
"""

from typing import Final

from dashboards import parts
from dashboards.parts import BAD, BUSY, GOOD, IDLE, JOB, LOST, NODE, WARN, Builder, Frames

UID: Final = "outrider-overview"

JOB_PHASES: Final = {
    "waiting_for_nodes": WARN,
    "starting": BUSY,
    "running": GOOD,
    "localizing": WARN,
    "stopping": WARN,
    "completed": IDLE,
    "failed": LOST,
    "stopped": IDLE,
}
AGENT_STATES: Final = {
    "init": IDLE,
    "ready": BUSY,
    "running": GOOD,
    "completed": IDLE,
    "faulted": BAD,
    "stopping": WARN,
    "shutdown": LOST,
}


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
        .with_variable(
            parts.label_variable(
                "training_job", "Job", "label_values(outrider_job_info, training_job)", many=False
            )
        )
        .with_variable(
            parts.label_variable(
                "node",
                "Node",
                "label_values(outrider_coordinator_agent_last_seen_timestamp_seconds"
                f"{{{JOB}}}, node)",
                many=True,
            )
        )
        .annotation(
            parts.mark(
                "Restarts",
                f"sum by (mode) (increase(outrider_restarts_total{{{JOB}}}[$__rate_interval])) > 0",
                WARN,
            )
        )
        .annotation(
            parts.mark(
                "Faults",
                f"sum by (kind) (increase(outrider_faults_total{{{JOB}}}[$__rate_interval])) > 0",
                BAD,
            )
        )
    )
    _health(page, frames)
    _suspects(page, frames)
    _progress(page, frames)
    _recovery(page, frames)
    _events(page, frames)
    _self(page, frames)
    return page


def _health(page: Builder, frames: Frames) -> None:
    page.with_row(frames.row("Is training healthy?"))
    page.with_panel(
        frames.number("Job phase", "What the coordinator is doing for the job.", "none", width=5)
        .mappings([parts.state_names(JOB_PHASES)])
        .with_target(
            parts.right_now(
                parts.state_number(
                    f"outrider_job_phase{{{JOB}}}", "phase", JOB_PHASES, "training_job"
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
        frames.number("Longest silence", "How long ago the slowest rank last moved.", "s", width=4)
        .decimals(0)
        .no_value("not known")
        .thresholds(parts.thresholds(GOOD, (60, WARN), (120, BAD)))
        .with_target(parts.right_now(f"max(outrider_rank_progress_age_seconds{{{NODE}}})"))
    )
    page.with_panel(
        frames.number(
            "Steps at risk",
            "Steps since the newest checkpoint that every rank confirmed: lost if it broke now.",
            "short",
            width=4,
        )
        .no_value("no checkpoint")
        .thresholds(parts.thresholds(IDLE))
        .with_target(
            parts.right_now(
                f"outrider_job_step{{{JOB}}} - on (training_job) min by (training_job) "
                f"(outrider_checkpoint_consistent_step{{{JOB}}})"
            )
        )
    )
    page.with_panel(
        frames.number(
            "Restarts left",
            "Restarts left in the sliding window before the job is given up.",
            "short",
            width=4,
        )
        .thresholds(parts.thresholds(BAD, (1, WARN), (2, GOOD)))
        .with_target(parts.right_now(f"min(outrider_restart_budget_remaining{{{JOB}}})"))
    )
    page.with_panel(
        frames.number("Spare nodes", "Nodes that stand by without a rank.", "short", width=4)
        .thresholds(parts.thresholds(IDLE))
        .with_target(parts.right_now(f"sum(outrider_spare_nodes{{{JOB}}})"))
    )


def _suspects(page: Builder, frames: Frames) -> None:
    here = f"/d/{UID}?var-node=${{__value.text}}&${{training_job:queryparam}}&${{__url_time_range}}"
    page.with_row(frames.row("Where is the fault?"))
    page.with_panel(
        frames.rows(
            "Suspects",
            "Every open fault with the one it is attributed to. Empty means none is open.",
            "none",
            width=16,
            height=6,
        )
        .no_value("no open fault")
        .with_target(
            parts.right_now(
                f"outrider_fault_active_since_timestamp_seconds{{{JOB}}} * 1000", as_table=True
            )
        )
        .with_transformation(
            parts.table_columns(
                hide=("Time", "__name__", "instance", "job"),
                rename={"Value": "since", "training_job": "training job", "gpu": "GPU"},
            )
        )
        .override_by_name("since", [parts.column("unit", "dateTimeFromNow")])
        .override_by_name(
            "node", [parts.column("links", [{"title": "Only this node", "url": here}])]
        )
    )
    page.with_panel(
        frames.rows(
            "Excluded nodes",
            "Nodes that get no ranks any more, and why.",
            "none",
            width=8,
            height=6,
        )
        .no_value("none")
        .with_target(
            parts.right_now(f"outrider_nodes_excluded{{{JOB}}} == 1", as_table=True),
        )
        .with_transformation(
            parts.table_columns(
                hide=("Time", "Value", "__name__", "instance", "job", "training_job"), rename={}
            )
        )
    )


def _progress(page: Builder, frames: Frames) -> None:
    page.with_row(frames.row("Does it move?"))
    page.with_panel(
        frames.states(
            "Job phase over time", "What the coordinator did, and for how long.", width=12
        )
        .mappings([parts.state_names(JOB_PHASES)])
        .with_target(
            parts.over_time(
                parts.state_number(
                    f"outrider_job_phase{{{JOB}}}", "phase", JOB_PHASES, "training_job"
                ),
                "{{training_job}}",
            )
        )
    )
    page.with_panel(
        frames.states("Agents", "What the sidecar of each node said of itself.", width=12)
        .mappings([parts.state_names(AGENT_STATES)])
        .with_target(
            parts.over_time(
                parts.state_number(
                    f"outrider_agent_state{{{NODE}}}", "state", AGENT_STATES, "node"
                ),
                "{{node}}",
            )
        )
    )
    page.with_panel(
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
    page.with_panel(
        frames.lines(
            "Silence by rank",
            "How long ago each rank last moved; the culprit rises first.",
            "s",
            width=12,
        ).with_target(
            parts.over_time(
                f"max by (node, rank) (outrider_rank_progress_age_seconds{{{NODE}}})",
                "rank {{rank}} on {{node}}",
            )
        )
    )


def _recovery(page: Builder, frames: Frames) -> None:
    page.with_row(frames.row("How well does it recover?"))
    page.with_panel(
        frames.bars(
            "Mean time per recovery phase",
            "Where the seconds between a fault and the next step went, over the shown range.",
            "s",
            width=8,
        ).with_target(
            parts.right_now(
                "sum by (phase) (increase("
                f"outrider_recovery_phase_duration_seconds_sum{{{JOB}}}[$__range])) / "
                "sum by (phase) (increase("
                f"outrider_recovery_phase_duration_seconds_count{{{JOB}}}[$__range])) > 0",
                "{{phase}}",
            )
        )
    )
    quantile = (
        "histogram_quantile({share}, sum by (le) (increase("
        f"outrider_recovery_duration_seconds_bucket{{{{{JOB}}}}}[$__range])))"
    )
    page.with_panel(
        frames.lines("Time to recover", "From the fault to the first step after it.", "s", width=8)
        .with_target(parts.over_time(quantile.format(share="0.5"), "half below"))
        .with_target(parts.over_time(quantile.format(share="0.95"), "95 % below", ref="B"))
    )


def _events(page: Builder, frames: Frames) -> None:
    page.with_panel(
        frames.columns("Restarts", "Restarts by mode.", "short", width=8).with_target(
            parts.over_time(
                f"sum by (mode) (increase(outrider_restarts_total{{{JOB}}}[$__rate_interval]))",
                "{{mode}}",
            )
        )
    )
    page.with_panel(
        frames.columns("Faults", "Faults by what broke.", "short", width=8).with_target(
            parts.over_time(
                f"sum by (kind) (increase(outrider_faults_total{{{JOB}}}[$__rate_interval]))",
                "{{kind}}",
            )
        )
    )
    page.with_panel(
        frames.columns(
            "Verdicts",
            "Attributed names somebody; inconclusive names nobody and says why.",
            "short",
            width=8,
        ).with_target(
            parts.over_time(
                f"sum by (outcome) (increase(outrider_verdicts_total{{{JOB}}}[$__rate_interval]))",
                "{{outcome}}",
            )
        )
    )
    page.with_panel(
        frames.columns(
            "Lost steps", "Steps that had to be trained again.", "short", width=8
        ).with_target(
            parts.over_time(
                f"sum(increase(outrider_lost_steps_total{{{JOB}}}[$__rate_interval]))", "lost"
            )
        )
    )


def _self(page: Builder, frames: Frames) -> None:
    page.with_row(frames.row("Can Outrider itself be trusted?"))
    page.with_panel(
        frames.lines(
            "Last word from each node",
            "How long ago the coordinator heard from each sidecar.",
            "s",
            width=8,
        ).with_target(
            parts.over_time(
                "time() - max by (node) (outrider_coordinator_agent_last_seen_timestamp_seconds"
                f"{{{JOB},{NODE}}})",
                "{{node}}",
            )
        )
    )
    page.with_panel(
        frames.columns(
            "Refused worker messages",
            "Frames and messages from workers that could not be accepted.",
            "short",
            width=8,
        ).with_target(
            parts.over_time(
                "sum by (reason) "
                f"(increase(outrider_ipc_errors_total{{{NODE}}}[$__rate_interval]))",
                "{{reason}}",
            )
        )
    )
    page.with_panel(
        frames.rows(
            "Versions", "Which version runs where; more than one is a rollout.", "short", width=8
        )
        .with_target(
            parts.right_now("count by (component, version) (outrider_build_info)", as_table=True)
        )
        .with_transformation(parts.table_columns(hide=("Time",), rename={"Value": "processes"}))
    )
