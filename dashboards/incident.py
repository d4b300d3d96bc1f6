"""Incident: one stop of the job, from the fault to the first step after it."""

from typing import Final

from dashboards import parts, shared
from dashboards.parts import BAD, IDLE, JOB, WARN, Builder, Frames

UID: Final = "outrider-incident"
IT: Final = f'{JOB}, incident=~"$incident"'
STONES: Final = f"outrider_incident_milestone_timestamp_seconds{{{IT}}}"
GONE: Final = "not among the newest incidents: open its page"


def incident() -> Builder:
    """Return the dashboard, unbuilt."""
    frames = Frames()
    page = (
        parts.new_dashboard(
            UID, "Outrider / Incident", "What happened, who was it, and why was it mended so?"
        )
        .time("now-6h", "now")
        .with_variable(
            parts.label_variable(
                "incident",
                "Incident",
                f"label_values(outrider_incident_info{{{JOB}}}, incident)",
                many=False,
            )
        )
        .with_variable(parts.coordinator_variable())
        .link(
            parts.page_link(
                "All of this incident", "${coordinator}/incidents/${incident:percentencode}"
            )
        )
    )
    page.with_row(frames.row("What happened, and what was done?"))
    page.with_panel(_facts(frames))
    page.with_panel(_decision(frames))
    page.with_row(frames.row("How did it go?"))
    page.with_panel(_timeline(frames))
    page.with_panel(_spans(frames))
    page.with_row(frames.row("What speaks for it?"))
    page.with_panel(_evidence(frames))
    page.with_panel(_positions(frames))
    page.with_panel(_stacks(frames))
    page.with_row(frames.row("Around it"))
    page.with_panel(shared.job_phase(frames, width=12))
    page.with_panel(shared.recovery_level(frames, width=12))
    return page


def _facts(frames: Frames) -> Builder:
    return _table(
        frames,
        "Incident",
        "Who is named, for what, and how it ended.",
        f"outrider_incident_info{{{IT}}}",
        width=24,
        height=5,
        hide=("Value",),
    )


def _decision(frames: Frames) -> Builder:
    return _table(
        frames,
        "Decision",
        "How it was mended, and why so.",
        f"outrider_incident_decision_info{{{IT}}}",
        width=24,
        height=4,
        hide=("Value", "incident"),
    ).no_value("not decided yet")


def _timeline(frames: Frames) -> Builder:
    return (
        _table(
            frames,
            "Timeline",
            "When each milestone was reached.",
            f"sort({STONES}) * 1000",
            width=10,
            height=9,
            hide=("incident",),
            rename={"Value": "at"},
        )
        .override_by_name("at", [parts.column("unit", "dateTimeAsIso")])
        .sort_by([parts.ascending("at")])
    )


def _spans(frames: Frames) -> Builder:
    begun = f"min by (cluster, training_job, incident) ({STONES})"
    return (
        frames.bars(
            "Seconds after the fault",
            "How long after the fault each milestone was reached.",
            "s",
            width=14,
            height=9,
        )
        .no_value(GONE)
        .with_target(
            parts.right_now(
                f"sort({STONES} - on (cluster, training_job, incident) group_left () {begun})",
                "{{milestone}}",
            )
        )
    )


def _evidence(frames: Frames) -> Builder:
    return _table(
        frames,
        "Evidence",
        "What speaks for the verdict, and what for somebody else.",
        f"outrider_incident_evidence_info{{{IT}}}",
        width=24,
        height=8,
        hide=("Value", "incident"),
    )


def _positions(frames: Frames) -> Builder:
    return _table(
        frames,
        "Where every rank stood",
        "Step, collective and phase of each rank when the job stopped; the odd ones are marked.",
        f"outrider_incident_rank_position{{{IT}}}",
        width=12,
        height=10,
        hide=("incident",),
        rename={"Value": "step"},
    ).override_by_name(
        "mark",
        [
            parts.column("custom.cellOptions", {"type": "color-text"}),
            parts.column("mappings", [parts.words_colored({"culprit": BAD, "apart": WARN})]),
        ],
    )


def _stacks(frames: Frames) -> Builder:
    return _table(
        frames,
        "Grouped stacks",
        "Ranks whose main threads stood at the same frame, the odd ones marked.",
        f"outrider_incident_stack_ranks{{{IT}}}",
        width=12,
        height=10,
        hide=("incident",),
        rename={"Value": "count"},
    ).no_value("no stack was captured")


def _table(
    frames: Frames,
    title: str,
    why: str,
    expr: str,
    *,
    width: int,
    height: int,
    hide: tuple[str, ...] = (),
    rename: dict[str, str] | None = None,
) -> Builder:
    return (
        frames.rows(title, why, "none", width=width, height=height)
        .no_value(GONE)
        .thresholds(parts.thresholds(IDLE))
        .with_target(parts.right_now(expr, as_table=True))
        .with_transformation(parts.table_columns(hide=(*shared.HIDDEN, *hide), rename=rename or {}))
    )
