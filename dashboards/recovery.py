"""Recovery: how fast, how deep, how often, and at what price."""

from typing import Final

from dashboards import parts, shared
from dashboards.parts import BAD, GOOD, IDLE, JOB, WARN, Builder, Frames

UID: Final = "outrider-recovery"
WHOLE: Final = "outrider_recovery_duration_seconds"
PHASE: Final = "outrider_recovery_phase_duration_seconds"
TIME: Final = "outrider_job_time_seconds_total"


def recovery() -> Builder:
    """Return the dashboard, unbuilt."""
    frames = Frames()
    page = parts.new_dashboard(
        UID, "Outrider / Recovery", "How fast do we recover, and what does it cost?"
    ).time("now-24h", "now")
    page.with_row(frames.row("What is it worth?"))
    _worth(page, frames)
    page.with_row(frames.row("How fast?"))
    page.with_panel(_phases(frames))
    page.with_panel(
        frames.heat(
            "Time to recover", "From the fault to the first step after it.", width=8
        ).with_target(parts.buckets(WHOLE, JOB))
    )
    page.with_panel(_quantiles(frames))
    page.with_row(frames.row("How deep, how often?"))
    page.with_panel(shared.job_phase(frames, width=12))
    page.with_panel(shared.recovery_level(frames, width=12))
    _events(page, frames)
    page.with_row(frames.row("Where did the time go?"))
    page.with_panel(_shares(frames))
    page.with_panel(_causes(frames))
    return page


def _worth(page: Builder, frames: Frames) -> None:
    page.with_panel(shared.goodput(frames, "Goodput, 24 h", "24h", width=5))
    kept = f'increase({TIME}{{{JOB}, account="productive"}}[30d])'
    whole = f'increase({TIME}{{{JOB}, account!="idle"}}[30d])'
    page.with_panel(
        frames.number(
            "ETTR, 30 d",
            "Effective training time ratio: share of all its time that the job keeps.",
            "percentunit",
            width=5,
        )
        .no_value("not known")
        .thresholds(parts.thresholds(BAD, (0.9, WARN), (0.95, GOOD)))
        .with_target(parts.right_now(f"sum({kept}) / sum({whole})"))
    )
    page.with_panel(
        frames.number("Lost steps", "Steps trained again, in the shown range.", "short", width=5)
        .thresholds(parts.thresholds(IDLE))
        .with_target(
            parts.right_now(f"sum(increase(outrider_lost_steps_total{{{JOB}}}[$__range]))")
        )
    )
    page.with_panel(
        frames.number(
            "Restarts left", "Restarts left before the job is given up.", "short", width=5
        )
        .thresholds(parts.thresholds(BAD, (1, WARN), (2, GOOD)))
        .with_target(parts.right_now(f"min(outrider_restart_budget_remaining{{{JOB}}})"))
    )
    page.with_panel(
        frames.number("Incidents", "Incidents that ended in the shown range.", "short", width=4)
        .thresholds(parts.thresholds(IDLE))
        .with_target(parts.right_now(f"sum(increase(outrider_incidents_total{{{JOB}}}[$__range]))"))
    )


def _phases(frames: Frames) -> Builder:
    return (
        frames.bars(
            "Mean time per recovery phase",
            "Where the seconds between a fault and the next step went, over the shown range.",
            "s",
            width=8,
        )
        .no_value("no recovery")
        .with_target(
            parts.right_now(
                f"{parts.increase(f'{PHASE}_sum{{{JOB}}}', 'phase', '$__range')} / "
                f"({parts.increase(f'{PHASE}_count{{{JOB}}}', 'phase', '$__range')} > 0)",
                "{{phase}}",
            )
        )
    )


def _quantiles(frames: Frames) -> Builder:
    return (
        frames.lines(
            "Time to recover by mode",
            "Below which half and 95 % of the recoveries of the shown range stayed.",
            "s",
            width=8,
        )
        .no_value("no recovery")
        .with_target(parts.over_time(parts.quantile(0.5, WHOLE, JOB, "mode"), "half, {{mode}}"))
        .with_target(
            parts.over_time(parts.quantile(0.95, WHOLE, JOB, "mode"), "95 %, {{mode}}", ref="B")
        )
    )


def _events(page: Builder, frames: Frames) -> None:
    for title, why, metric, label in (
        ("Restarts", "Restarts by mode.", "outrider_restarts_total", "mode"),
        ("Causes of restarts", "Restarts by what broke.", "outrider_restarts_total", "trigger"),
    ):
        page.with_panel(
            frames.columns(title, why, "short", width=8).with_target(
                parts.over_time(
                    parts.increase(f"{metric}{{{JOB}}}", label) + " > 0", f"{{{{{label}}}}}"
                )
            )
        )
    page.with_panel(
        frames.rows(
            "Escalations",
            "Restarts that had to go deeper, in the shown range.",
            "short",
            width=4,
        )
        .with_target(
            parts.right_now(
                parts.increase(f"outrider_escalations_total{{{JOB}}}", "from, to", "$__range")
                + " > 0",
                as_table=True,
            )
        )
        .with_transformation(parts.table_columns(hide=("Time",), rename={"Value": "times"}))
    )
    page.with_panel(
        frames.rows("Faults", "Faults by what broke, in the shown range.", "short", width=4)
        .with_target(
            parts.right_now(
                parts.increase(f"outrider_faults_total{{{JOB}}}", "kind", "$__range") + " > 0",
                as_table=True,
            )
        )
        .with_transformation(parts.table_columns(hide=("Time",), rename={"Value": "faults"}))
    )


def _shares(frames: Frames) -> Builder:
    return frames.columns(
        "Time by account",
        "Every second of the job in exactly one account.",
        "s",
        width=16,
    ).with_target(
        parts.over_time(
            parts.increase(f"{TIME}{{{JOB}}}", "account") + " > 0",
            "{{account}}",
        )
    )


def _causes(frames: Frames) -> Builder:
    return (
        frames.bars(
            "Device time lost by cause",
            "Time of devices that stood still or worked in vain, over the shown range.",
            "s",
            width=8,
        )
        .no_value("nothing was lost")
        .with_target(
            parts.right_now(
                parts.increase(f"outrider_lost_gpu_seconds_total{{{JOB}}}", "cause", "$__range")
                + " > 0",
                "{{cause}}",
            )
        )
    )
