"""Panels that stand on more than one dashboard, and the names and colours of states."""

from typing import Final

from dashboards import parts
from dashboards.parts import BAD, BUSY, GOOD, IDLE, JOB, LOST, NODE, WARN, Builder, Frames

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
LEVELS: Final = {
    "none": GOOD,
    "undecided": WARN,
    "in_process_restart": BUSY,
    "local_process_level_restart": BUSY,
    "process_level_restart": WARN,
    "job_level_restart": BAD,
    "failed": LOST,
}
RECOVERY_PHASES: Final = {
    "none": GOOD,
    "localizing": WARN,
    "capturing": WARN,
    "stopping": WARN,
    "waiting_for_nodes": BAD,
    "starting": BUSY,
    "loading": BUSY,
}
SEVERITIES: Final = {"healthy": GOOD, "unknown": IDLE, "warning": WARN, "fatal": BAD}
RANK_PHASES: Final = {
    "unknown": IDLE,
    "data": "super-light-blue",
    "forward": "light-blue",
    "backward": "blue",
    "optimizer": "semi-dark-blue",
    "collective": "purple",
    "checkpoint": "yellow",
    "evaluate": "light-green",
    "compile": "light-purple",
}
LOG_STATES: Final = {
    "waiting": IDLE,
    "healthy": GOOD,
    "slow": WARN,
    "hanging": BAD,
    "faulted": LOST,
}
COMPARISONS: Final = {
    "none": IDLE,
    "not_run": BUSY,
    "healthy": GOOD,
    "straggler": WARN,
    "inconclusive": WARN,
    "corrupt": BAD,
}
SUSPECT: Final = ("node", "gpu", "rank", "kind", "reason", "action", "incident", "Value")
"""Columns of the suspects, in the order in which one asks."""
INCIDENT: Final = ("Value", "incident", "node", "gpu", "rank", "kind", "reason", "mode", "outcome")
"""Columns of the newest incidents, in the order in which one asks."""
HIDDEN: Final = ("Time", "__name__", "instance", "job", "cluster", "training_job")
"""Columns that every table leaves out: what is chosen above, and where it was scraped."""


def suspects(frames: Frames, *, width: int) -> Builder:
    """Return the table of open faults: who, what, why, and what is done about it."""
    return (
        frames.rows(
            "Suspects",
            "Who every open fault is attributed to, why, and what is being done. Empty again once"
            " it is mended: the newest incidents keep it.",
            "none",
            width=width,
            height=6,
        )
        .no_value("no open fault")
        .with_target(
            parts.right_now(
                f"outrider_fault_active_since_timestamp_seconds{{{JOB}}} * 1000", as_table=True
            )
        )
        .with_transformation(
            parts.table_columns(hide=HIDDEN, rename={"Value": "since", "gpu": "GPU"}, order=SUSPECT)
        )
        .override_by_name("since", [parts.column("unit", "dateTimeFromNow")])
        .override_by_name("node", [_opens("outrider-node", "The node", "node")])
        .override_by_name("incident", [_opens("outrider-incident", "The incident", "incident")])
    )


def newest_incidents(frames: Frames, *, width: int) -> Builder:
    """Return the table of the newest incidents, for whoever comes after the recovery."""
    begun = (
        "min by (cluster, training_job, incident)"
        f" (outrider_incident_milestone_timestamp_seconds{{{JOB}}})"
    )
    return (
        frames.rows(
            "Newest incidents",
            "The open incident and the newest closed ones: who it was, what for, and how it ended.",
            "none",
            width=width,
            height=6,
        )
        .no_value("no incident so far")
        .with_target(
            parts.right_now(
                f"{begun} * 1000 * on (cluster, training_job, incident) group_right ()"
                f" outrider_incident_info{{{JOB}}}",
                as_table=True,
            )
        )
        .with_transformation(
            parts.table_columns(
                hide=HIDDEN, rename={"Value": "began", "gpu": "GPU"}, order=INCIDENT
            )
        )
        .override_by_name("began", [parts.column("unit", "dateTimeFromNow")])
        .override_by_name("node", [_opens("outrider-node", "The node", "node")])
        .override_by_name("incident", [_opens("outrider-incident", "The incident", "incident")])
    )


def _opens(uid: str, title: str, variable: str) -> Builder:
    """Return the link of a column that opens a dashboard about the clicked value."""
    return parts.column("links", [parts.link_to(uid, title, parts.clicked(variable))])


def agents(frames: Frames, *, width: int, height: int = 8) -> Builder:
    """Return the state of every node's agent over time."""
    return (
        frames.states(
            "Agents", "What the sidecar of each node said of itself.", width=width, height=height
        )
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


def job_phase(frames: Frames, *, width: int, height: int = 6) -> Builder:
    """Return the job's phase over time."""
    return (
        frames.states(
            "Job phase over time",
            "What the coordinator did, and for how long.",
            width=width,
            height=height,
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


def recovery_level(frames: Frames, *, width: int, height: int = 6) -> Builder:
    """Return how deep recoveries went over time."""
    return (
        frames.states("Recovery level", "How deep a recovery went.", width=width, height=height)
        .mappings([parts.state_names(LEVELS)])
        .with_target(
            parts.over_time(
                parts.state_number(
                    f"outrider_recovery_level{{{JOB}}}", "level", LEVELS, "training_job"
                ),
                "{{training_job}}",
            )
        )
    )


def silence(frames: Frames, *, width: int) -> Builder:
    """Return how long ago each rank moved."""
    return frames.lines(
        "Silence by rank",
        "How long ago each rank last moved; the culprit rises first.",
        "s",
        width=width,
    ).with_target(
        parts.over_time(
            f"max by (node, rank) (outrider_rank_progress_age_seconds{{{NODE}}})",
            "rank {{rank}} on {{node}}",
        )
    )


def gpu_matrix(frames: Frames, *, width: int, height: int) -> Builder:
    """Return a table of nodes and GPUs coloured by how bad each is."""
    panel = (
        frames.rows(
            "GPU health",
            "Worst of what is known of every GPU: 0 healthy, 1 unknown, 2 warning, 3 fatal.",
            "none",
            width=width,
            height=height,
        )
        .no_value("no GPU is known")
        .mappings([parts.state_names(SEVERITIES)])
        .with_target(
            parts.right_now(
                f"max by (node, gpu) (outrider_gpu_health_severity{{{NODE}}})", as_table=True
            )
        )
        .override_by_regexp(
            "/^[0-9]+$/",
            [
                parts.column("custom.cellOptions", {"type": "color-background"}),
                parts.column("custom.width", 72),
            ],
        )
        .override_by_name(
            "node",
            [
                parts.column(
                    "links",
                    [parts.link_to("outrider-node", "The node", parts.clicked("node", "node"))],
                )
            ],
        )
    )
    for step in parts.matrix("node", "gpu"):
        panel.with_transformation(step)
    return panel


def goodput(frames: Frames, title: str, window: str, *, width: int) -> Builder:
    """Return the share of time in which the job had its machines that went into new steps."""
    time = "increase(outrider_job_time_seconds_total{{{job}, account{what}}}[{window}])"
    kept = time.format(job=JOB, what='="productive"', window=window)
    whole = time.format(job=JOB, what='!~"idle|waiting_for_node"', window=window)
    return (
        frames.number(
            title,
            "Share of the time with all machines that went into steps which the job keeps.",
            "percentunit",
            width=width,
        )
        .no_value("not known")
        .thresholds(parts.thresholds(BAD, (0.9, WARN), (0.95, GOOD)))
        .with_target(parts.right_now(f"sum({kept}) / sum({whole})"))
    )
