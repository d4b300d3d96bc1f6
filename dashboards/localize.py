"""Localize: which evidence speaks against whom."""

from typing import Final

from dashboards import parts, shared
from dashboards.parts import BAD, GOOD, JOB, NODE, WARN, Builder, Frames

UID: Final = "outrider-localize"

HOW_TO_READ: Final = """\
- **Attributed** names somebody: its machine says so (*direct*), everybody waits for it (*causal*),
  or a strict majority of equals differs from it (*majority*).
- **Inconclusive** names nobody and says why; whoever it was still holds a rank.
- Two peers can tell that they differ, never which of them is wrong.
- In a hang the one that matters is *behind*, or in another collective; the others wait for it.
"""


def localize() -> Builder:
    """Return the dashboard, unbuilt."""
    frames = Frames()
    page = (
        parts.new_dashboard(UID, "Outrider / Localize", "Which evidence speaks against which rank?")
        .time("now-1h", "now")
        .with_variable(parts.node_variable())
        .with_variable(parts.coordinator_variable())
        .link(parts.page_link("Last incident", "${coordinator}/incidents/last"))
    )
    page.with_row(frames.row("Who?"))
    page.with_panel(shared.suspects(frames, width=24))
    page.with_panel(shared.newest_incidents(frames, width=24))
    page.with_row(frames.row("Who is behind?"))
    page.with_panel(_laggards(frames))
    page.with_panel(shared.silence(frames, width=14))
    page.with_panel(_phases(frames))
    page.with_panel(_spread(frames))
    page.with_row(frames.row("Who is slow?"))
    page.with_panel(_step_time(frames))
    page.with_panel(_slowest(frames))
    page.with_panel(_log_rules(frames))
    page.with_panel(shared.agents(frames, width=12))
    page.with_row(frames.row("Do peers compute the same?"))
    page.with_panel(_comparison(frames))
    page.with_panel(_named(frames))
    page.with_panel(_outcomes(frames))
    page.with_row(frames.row("How sure are the verdicts?"))
    page.with_panel(_verdicts(frames))
    page.with_panel(_inconclusive(frames))
    page.with_panel(
        frames.words("How to read this", "What the words mean.", HOW_TO_READ, width=10, height=8)
    )
    return page


def _laggards(frames: Frames) -> Builder:
    return (
        frames.rows(
            "Progress laggards",
            "The ten ranks with the fewest completed steps, and where they stand in the layout.",
            "none",
            width=10,
        )
        .with_target(
            parts.right_now(
                f"bottomk(10, max by (cluster, training_job, node, rank)"
                f" (outrider_rank_step{{{NODE}}})) * on (cluster, training_job, node, rank)"
                f" group_left (gpu, dp, tp, pp) outrider_rank_info{{{NODE}}}",
                as_table=True,
            )
        )
        .with_transformation(parts.table_columns(hide=shared.HIDDEN, rename={"Value": "step"}))
    )


def _phases(frames: Frames) -> Builder:
    return (
        frames.states("Rank phases", "What each rank of the chosen nodes was doing.", width=14)
        .mappings([parts.state_names(shared.RANK_PHASES)])
        .with_target(
            parts.over_time(f"max by (rank) (outrider_rank_phase{{{NODE}}})", "rank {{rank}}")
        )
    )


def _spread(frames: Frames) -> Builder:
    staged = (
        f"outrider_rank_step{{{NODE}}} * on (cluster, training_job, node, rank)"
        f" group_left (pp) outrider_rank_info{{{NODE}}}"
    )
    return frames.lines(
        "Step spread by pipeline stage",
        "Difference between the first and the last rank of each stage; apart means hung.",
        "short",
        width=10,
    ).with_target(
        parts.over_time(f"max by (pp) ({staged}) - min by (pp) ({staged})", "stage {{pp}}")
    )


def _ratio() -> str:
    series = f'outrider_log_metric{{{NODE}, metric="step_time"}}'
    return f"max by (node, rank) ({series}) / scalar(quantile(0.5, {series}))"


def _step_time(frames: Frames) -> Builder:
    return (
        frames.lines(
            "Step time against the median",
            "Each node's slowest rank divided by the median of all ranks, as their logs print it.",
            "short",
            width=14,
        )
        .thresholds(parts.thresholds(GOOD, (1.2, WARN), (1.35, BAD)))
        .no_value("no rank prints its step time")
        .with_target(parts.over_time(f"max by (node) ({_ratio()})", "{{node}}"))
    )


def _slowest(frames: Frames) -> Builder:
    return (
        frames.rows(
            "Slowest ranks",
            "The ten ranks whose step time is farthest above the median.",
            "none",
            width=10,
        )
        .no_value("no rank prints its step time")
        .with_target(parts.right_now(f"topk(10, {_ratio()})", as_table=True))
        .with_transformation(parts.table_columns(hide=shared.HIDDEN, rename={"Value": "ratio"}))
    )


def _log_rules(frames: Frames) -> Builder:
    return (
        frames.states(
            "Log rules", "Rules that find a node's ranks slow, hanging or faulted.", width=12
        )
        .mappings([parts.state_names(shared.LOG_STATES)])
        .no_value("every rule is content")
        .with_target(
            parts.over_time(
                f"max by (node, rule) (outrider_log_rule_severity{{{NODE}}}) > 1",
                "{{rule}} on {{node}}",
            )
        )
    )


def _comparison(frames: Frames) -> Builder:
    return (
        frames.states("Comparison of peers", "What the newest comparison found.", width=14)
        .mappings([parts.state_names(shared.COMPARISONS)])
        .with_target(
            parts.over_time(
                parts.state_number(
                    f"outrider_scout_outcome{{{JOB}}}",
                    "outcome",
                    shared.COMPARISONS,
                    "training_job",
                ),
                "{{training_job}}",
            )
        )
    )


def _named(frames: Frames) -> Builder:
    return (
        frames.rows(
            "Named by comparison",
            "Ranks that the newest comparison of peers names, as long as they run; a corrupt one is"
            " stopped at once and stands among the suspects.",
            "none",
            width=10,
        )
        .with_target(parts.right_now(f"outrider_scout_rank_named{{{JOB}}}", as_table=True))
        .with_transformation(parts.table_columns(hide=(*shared.HIDDEN, "Value"), rename={}))
    )


def _outcomes(frames: Frames) -> Builder:
    return frames.columns(
        "Comparisons by outcome",
        "How many comparisons found what. Corruption stays here when the ranks that told it are"
        " already stopped; no column means that nobody compares.",
        "short",
        width=24,
        height=6,
    ).with_target(
        parts.over_time(
            parts.increase(f"outrider_scout_outcomes_total{{{JOB}}}", "outcome"), "{{outcome}}"
        )
    )


def _verdicts(frames: Frames) -> Builder:
    return frames.columns(
        "Verdicts", "Judgements over closed incidents.", "short", width=10
    ).with_target(
        parts.over_time(
            parts.increase(f"outrider_verdicts_total{{{JOB}}}", "outcome"), "{{outcome}}"
        )
    )


def _inconclusive(frames: Frames) -> Builder:
    counted = "sum(increase(outrider_verdicts_total{{{}}}[$__range]))"
    nobody = counted.format(f'{JOB}, outcome="inconclusive"')
    return (
        frames.number(
            "Nobody named",
            "Share of the judgements in the shown range that named nobody.",
            "percentunit",
            width=4,
            height=8,
        )
        .no_value("no judgement")
        .thresholds(parts.thresholds(GOOD, (0.05, WARN), (0.5, BAD)))
        .with_target(parts.right_now(f"{nobody} / ({counted.format(JOB)} > 0)"))
    )
