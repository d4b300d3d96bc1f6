"""Checkpoints: which one may be trusted, and what would be lost."""

from typing import Final

from dashboards import parts, shared
from dashboards.parts import BAD, GOOD, IDLE, JOB, WARN, Builder, Frames

UID: Final = "outrider-checkpoints"
SAVED: Final = f"outrider_rank_checkpoint_step{{{JOB}}}"


def checkpoints() -> Builder:
    """Return the dashboard, unbuilt."""
    frames = Frames()
    page = parts.new_dashboard(
        UID, "Outrider / Checkpoints", "Which checkpoint may we trust, and what would we lose?"
    ).time("now-6h", "now")
    page.with_row(frames.row("What would a fault cost now?"))
    _numbers(page, frames)
    page.with_panel(_steps(frames))
    page.with_row(frames.row("Do the ranks agree?"))
    page.with_panel(_behind(frames))
    page.with_panel(_spread(frames))
    page.with_row(frames.row("Which may be trusted?"))
    page.with_panel(_age(frames))
    page.with_panel(_turns(frames))
    page.with_row(frames.row("What did checkpoints cost?"))
    page.with_panel(_lost(frames))
    page.with_panel(_stalled(frames))
    page.with_panel(_confirming(frames))
    return page


def _numbers(page: Builder, frames: Frames) -> None:
    newest = f"outrider_checkpoint_consistent_step{{{JOB}}}"
    page.with_panel(
        frames.number(
            "Steps at risk",
            "Steps since the newest checkpoint of each kind that every rank confirmed.",
            "short",
            width=8,
        )
        .no_value("no step, or no checkpoint")
        .thresholds(parts.thresholds(IDLE))
        .with_target(
            parts.right_now(
                f"max by (cluster, training_job) (outrider_job_step{{{JOB}}})"
                f" - on (cluster, training_job) group_right () {newest}",
                "{{prefix}}",
            )
        )
    )
    page.with_panel(
        frames.number(
            "Newest confirmed", "Newest step that every rank confirmed.", "short", width=8
        )
        .no_value("no checkpoint")
        .thresholds(parts.thresholds(IDLE))
        .with_target(parts.right_now(newest, "{{prefix}}"))
    )
    page.with_panel(
        frames.number(
            "Resumed from", "The checkpoint that the present run began with.", "short", width=8
        )
        .no_value("from the beginning")
        .thresholds(parts.thresholds(IDLE))
        .with_target(
            parts.right_now(
                f'outrider_checkpoint_step{{{JOB}, trust="resumed_from"}}', "{{prefix}}"
            )
        )
    )


def _steps(frames: Frames) -> Builder:
    return (
        frames.lines(
            "Steps by trust",
            "The job's step and the newest checkpoints; the gap is what a fault costs.",
            "short",
            width=24,
        )
        .with_target(parts.over_time(f"outrider_job_step{{{JOB}}}", "completed"))
        .with_target(
            parts.over_time(f"outrider_checkpoint_step{{{JOB}}}", "{{prefix}}, {{trust}}", ref="B")
        )
    )


def _behind(frames: Frames) -> Builder:
    newest = f"max by (cluster, training_job, prefix) ({SAVED})"
    return (
        frames.rows(
            "Ranks behind",
            "Ranks whose newest checkpoint is older than another rank's.",
            "short",
            width=12,
        )
        .no_value("all ranks confirmed the same")
        .with_target(
            parts.right_now(
                f"{SAVED} < on (cluster, training_job, prefix) group_left () {newest}",
                as_table=True,
            )
        )
        .with_transformation(parts.table_columns(hide=shared.HIDDEN, rename={"Value": "step"}))
    )


def _spread(frames: Frames) -> Builder:
    by = "(prefix)"
    return (
        frames.lines(
            "Spread between ranks",
            "Difference between the ranks' newest checkpoints; 0 when they agree.",
            "short",
            width=12,
        )
        .no_value("no checkpoint")
        .thresholds(parts.thresholds(GOOD, (1, WARN), (1000, BAD)))
        .with_target(
            parts.over_time(f"max by {by} ({SAVED}) - min by {by} ({SAVED})", "{{prefix}}")
        )
    )


def _lost(frames: Frames) -> Builder:
    return frames.columns(
        "Lost steps", "Steps that had to be trained again.", "short", width=12
    ).with_target(
        parts.over_time(
            f"sum(increase(outrider_lost_steps_total{{{JOB}}}[$__rate_interval]))", "lost"
        )
    )


def _stalled(frames: Frames) -> Builder:
    accounts = f'outrider_job_time_seconds_total{{{JOB}, account=~"checkpoint_stall|recompute"}}'
    return frames.columns(
        "Time lost to checkpoints",
        "Seconds spent in stalled saves and in steps that were trained again.",
        "s",
        width=12,
    ).with_target(parts.over_time(parts.increase(accounts, "account"), "{{account}}"))


def _age(frames: Frames) -> Builder:
    return (
        frames.number(
            "Age by trust",
            "How long ago the newest checkpoint became confirmed by every rank, verified by a"
            " comparison of peers, or rejected by one.",
            "s",
            width=10,
            height=8,
        )
        .no_value("none since the coordinator started")
        .thresholds(parts.thresholds(IDLE))
        .with_target(
            parts.right_now(
                f"time() - max by (prefix, trust) (outrider_checkpoint_timestamp_seconds{{{JOB}}})",
                "{{prefix}} {{trust}}",
            )
        )
    )


def _turns(frames: Frames) -> Builder:
    return frames.columns(
        "Changes of trust",
        "Checkpoints that every rank confirmed, that peers found sound, and that they found bad.",
        "short",
        width=14,
    ).with_target(
        parts.over_time(
            parts.increase(f"outrider_checkpoint_transitions_total{{{JOB}}}", "from, to"),
            "{{from}} to {{to}}",
        )
    )


def _confirming(frames: Frames) -> Builder:
    return frames.heat(
        "First rank to last",
        "How long after the first rank the last one confirmed a checkpoint; one slow disk shows"
        " here.",
        width=24,
    ).with_target(parts.buckets("outrider_checkpoint_confirm_duration_seconds", JOB))
