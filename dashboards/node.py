"""Node: what is wrong on this machine."""

from typing import Final

from dashboards import parts, shared
from dashboards.parts import BAD, GOOD, IDLE, JOB, NODE, WARN, Builder, Frames

UID: Final = "outrider-node"
GPU: Final = f'{NODE}, gpu=~"$gpu"'


def node() -> Builder:
    """Return the dashboard, unbuilt."""
    frames = Frames()
    page = (
        parts.new_dashboard(UID, "Outrider / Node", "What is wrong on this machine?")
        .time("now-1h", "now")
        .with_variable(parts.node_variable(many=False))
        .with_variable(
            parts.label_variable(
                "gpu",
                "GPU",
                f"label_values(outrider_gpu_health_severity{{{NODE}}}, gpu)",
                many=True,
            )
        )
    )
    page.with_row(frames.row("What does it say of itself, and who hears it?"))
    _state(page, frames)
    page.with_panel(_kernel_log(frames))
    page.with_row(frames.row("Is its hardware well?"))
    page.with_panel(_inventory(frames))
    page.with_panel(_severity(frames))
    _hardware(page, frames)
    page.with_panel(_xids(frames))
    page.with_panel(_kernel(frames))
    page.with_row(frames.row("What do its ranks do?"))
    page.with_panel(_phases(frames))
    page.with_panel(shared.silence(frames, width=12))
    page.with_panel(_rules(frames))
    page.with_panel(_printed(frames))
    page.with_row(frames.row("Is its sidecar well?"))
    _sidecar(page, frames)
    return page


def _state(page: Builder, frames: Frames) -> None:
    page.with_panel(
        frames.number("Agent", "The state of the node's agent.", "none", width=5)
        .mappings([parts.state_names(shared.AGENT_STATES)])
        .no_value("not scraped")
        .with_target(
            parts.right_now(
                parts.state_number(
                    f"outrider_agent_state{{{NODE}}}", "state", shared.AGENT_STATES, "node"
                )
            )
        )
    )
    page.with_panel(
        frames.number(
            "Topology versions behind",
            "How far its last start lies behind the coordinator's topology.",
            "short",
            width=5,
        )
        .thresholds(parts.thresholds(GOOD, (1, WARN)))
        .with_target(
            parts.right_now(
                f"max(outrider_job_topology_version{{{JOB}}})"
                f" - max(outrider_agent_topology_version{{{NODE}}})"
            )
        )
    )
    page.with_panel(
        frames.number(
            "Unheard by the coordinator",
            "How long ago the coordinator heard it last.",
            "s",
            width=5,
        )
        .no_value("never heard")
        .thresholds(parts.thresholds(GOOD, (15, WARN), (30, BAD)))
        .with_target(
            parts.right_now(
                "time() - max(outrider_coordinator_agent_last_seen_timestamp_seconds"
                f"{{{JOB}, {NODE}}})"
            )
        )
    )
    page.with_panel(
        frames.number(
            "Reached by Prometheus",
            "1 while the last scrape worked; with the panel before this tells a partition.",
            "none",
            width=5,
        )
        .no_value("no target")
        .thresholds(parts.thresholds(BAD, (1, GOOD)))
        .with_target(parts.right_now(f'min(up{{job="outrider-sidecar", {NODE}}})'))
    )


def _kernel_log(frames: Frames) -> Builder:
    return (
        frames.number("Kernel log", "1 while the kernel's log can be read.", "none", width=4)
        .no_value("not scraped")
        .thresholds(parts.thresholds(WARN, (1, GOOD)))
        .with_target(parts.right_now(f"min(outrider_kernel_log_available{{{NODE}}})"))
    )


def _inventory(frames: Frames) -> Builder:
    return (
        frames.rows("GPUs", "Which device has which index, and how bad it is.", "none", width=12)
        .no_value("no GPU is known")
        .with_target(
            parts.right_now(
                f"outrider_gpu_health_severity{{{GPU}}} * on (cluster, training_job, node, gpu)"
                f" group_left (uuid, pci_bus_id) outrider_gpu_info{{{GPU}}}",
                as_table=True,
            )
        )
        .with_transformation(parts.table_columns(hide=shared.HIDDEN, rename={"Value": "health"}))
        .override_by_name(
            "health", [parts.column("mappings", [parts.state_names(shared.SEVERITIES)])]
        )
    )


def _severity(frames: Frames) -> Builder:
    return (
        frames.states("GPU health", "Worst of what is known of each GPU.", width=12)
        .mappings([parts.state_names(shared.SEVERITIES)])
        .no_value("no GPU is known")
        .with_target(
            parts.over_time(f"max by (gpu) (outrider_gpu_health_severity{{{GPU}}})", "GPU {{gpu}}")
        )
    )


def _hardware(page: Builder, frames: Frames) -> None:
    for title, why, unit, expr, legend in (
        (
            "Temperature margin",
            "Degrees left until a GPU switches itself off; low is bad.",
            "celsius",
            f"min by (gpu) (outrider_gpu_temperature_margin_celsius{{{GPU}}})",
            "GPU {{gpu}}",
        ),
        (
            "Memory errors",
            "ECC errors as they are counted.",
            "short",
            parts.increase(f"outrider_gpu_ecc_errors_total{{{GPU}}}", "gpu, type"),
            "GPU {{gpu}} {{type}}",
        ),
        (
            "NVLink errors",
            "Errors on all NVLinks of a GPU.",
            "short",
            parts.increase(f"outrider_gpu_nvlink_errors_total{{{GPU}}}", "gpu, type"),
            "GPU {{gpu}} {{type}}",
        ),
        (
            "PCI Express replays",
            "Transfers that had to be repeated.",
            "short",
            parts.increase(f"outrider_gpu_pcie_replays_total{{{GPU}}}", "gpu"),
            "GPU {{gpu}}",
        ),
    ):
        page.with_panel(
            frames.lines(title, why, unit, width=12)
            .no_value("no GPU is known")
            .with_target(parts.over_time(expr, legend))
        )
    page.with_panel(
        frames.number(
            "Rows that wait for a reset", "Memory rows to be replaced.", "short", width=3, height=8
        )
        .no_value("not known")
        .thresholds(parts.thresholds(GOOD, (1, WARN)))
        .with_target(parts.right_now(f"sum(outrider_gpu_row_remap_pending{{{GPU}}})"))
    )
    page.with_panel(
        frames.number(
            "Rows beyond replacement",
            "GPUs without spare memory rows.",
            "short",
            width=3,
            height=8,
        )
        .no_value("not known")
        .thresholds(parts.thresholds(GOOD, (1, BAD)))
        .with_target(parts.right_now(f"sum(outrider_gpu_row_remap_failed{{{GPU}}})"))
    )


def _xids(frames: Frames) -> Builder:
    return (
        frames.rows(
            "Xid errors", "Errors that the driver told, by device and code.", "short", width=6
        )
        .with_target(
            parts.right_now(
                f"sum by (gpu, xid) (outrider_gpu_xid_errors_total{{{GPU}}}) > 0", as_table=True
            )
        )
        .with_transformation(parts.table_columns(hide=shared.HIDDEN, rename={"Value": "count"}))
    )


def _kernel(frames: Frames) -> Builder:
    return frames.columns(
        "Other kernel records", "Kernel lines that speak of trouble.", "short", width=12
    ).with_target(
        parts.over_time(
            parts.increase(f"outrider_kernel_log_records_total{{{NODE}}}", "kind") + " > 0",
            "{{kind}}",
        )
    )


def _phases(frames: Frames) -> Builder:
    return (
        frames.states("Rank phases", "What each rank was doing.", width=12)
        .mappings([parts.state_names(shared.RANK_PHASES)])
        .no_value("no rank runs here")
        .with_target(
            parts.over_time(f"max by (rank) (outrider_rank_phase{{{NODE}}})", "rank {{rank}}")
        )
    )


def _rules(frames: Frames) -> Builder:
    return (
        frames.states("Log rules", "What each rule finds of the node's ranks.", width=12)
        .mappings([parts.state_names(shared.LOG_STATES)])
        .no_value("no rule")
        .with_target(
            parts.over_time(f"max by (rule) (outrider_log_rule_severity{{{NODE}}})", "{{rule}}")
        )
    )


def _printed(frames: Frames) -> Builder:
    return (
        frames.lines("Printed numbers", "What the ranks' newest lines print.", "short", width=12)
        .no_value("the ranks print none")
        .with_target(
            parts.over_time(
                f"max by (rank, metric) (outrider_log_metric{{{NODE}}})",
                "{{metric}} of rank {{rank}}",
            )
        )
    )


def _sidecar(page: Builder, frames: Frames) -> None:
    page.with_panel(
        frames.heat("Loop lag", "How late the sidecar's loop woke up.", width=8).with_target(
            parts.buckets("outrider_loop_lag_seconds", f'job="outrider-sidecar", {NODE}')
        )
    )
    page.with_panel(
        frames.lines("Memory", "Memory of the sidecar itself.", "bytes", width=8)
        .thresholds(parts.thresholds(IDLE))
        .with_target(
            parts.over_time(
                f'process_resident_memory_bytes{{job="outrider-sidecar", {NODE}}}', "{{node}}"
            )
        )
    )
    page.with_panel(
        frames.columns(
            "Worker exits", "Worker processes that ended, by cause.", "short", width=8
        ).with_target(
            parts.over_time(
                parts.increase(f"outrider_worker_exits_total{{{NODE}}}", "reason"), "{{reason}}"
            )
        )
    )
