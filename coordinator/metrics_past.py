"""The series that add up: incidents, restarts, durations, the job's time, commands."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client.metrics_core import Metric

from coordinator.command_times import COMMANDS, CommandTimes
from coordinator.history import ESCALATIONS, UNKNOWN, History
from coordinator.incidents import Outcome
from coordinator.ledger import CAUSES, Account, Ledger
from coordinator.metric_parts import JOB, gauge, histogram, total
from sidecar.api import FaultKind
from worker_shim.messages import RestartMode

CLOSED: Final = tuple(outcome for outcome in Outcome if outcome is not Outcome.OPEN)
VERDICTS: Final = ("attributed", "inconclusive", "agree")
TRIGGERS: Final = (*(kind.value for kind in FaultKind), UNKNOWN)


def past_families(
    job: str,
    *,
    history: History,
    ledger: Ledger,
    commands: CommandTimes,
    refused: int,
    dropped: int,
) -> Iterator[Metric]:
    """Yield every counter and histogram of a job."""
    yield from _incidents(job, history)
    yield from _durations(job, history)
    yield from _time(job, ledger)
    yield from _commands(job, commands)
    for name, text, value in (
        (
            "outrider_coordinator_messages_refused",
            "Messages of sidecars that could not be read.",
            refused,
        ),
        (
            "outrider_coordinator_links_dropped",
            "Connections that were ended because the sidecar took nothing.",
            dropped,
        ),
    ):
        yield total(name, text, (JOB,), [((job,), value)])


def _incidents(job: str, history: History) -> Iterator[Metric]:
    tables: tuple[tuple[str, str, str, Iterable[str], Counter[str]], ...] = (
        (
            "faults",
            "Faults that led to an incident, by what broke.",
            "kind",
            FaultKind,
            history.faults,
        ),
        ("incidents", "Incidents that ended, by how.", "outcome", CLOSED, history.outcomes),
        (
            "verdicts",
            "Judgements over closed incidents: attributed, inconclusive, agree.",
            "outcome",
            VERDICTS,
            history.verdicts,
        ),
    )
    for name, text, label, values, counts in tables:
        samples = [((job, value), counts[value]) for value in values]
        yield total(f"outrider_{name}", text, (JOB, label), samples)
    yield total(
        "outrider_restarts",
        "Restarts by mode, mildest `in_process_restart`, deepest `job_level_restart`, and by"
        " what broke.",
        (JOB, "mode", "trigger"),
        [
            ((job, mode, trigger), history.restarts[mode, trigger])
            for mode in RestartMode
            for trigger in TRIGGERS
        ],
    )
    yield total(
        "outrider_escalations",
        "Decisions that went deeper than the one before, from how deep to how deep.",
        (JOB, "from", "to"),
        [((job, *step), history.escalations[step]) for step in ESCALATIONS],
    )
    yield total(
        "outrider_lost_steps",
        "Steps that had to be trained again.",
        (JOB,),
        [((job,), history.lost_steps)],
    )


def _durations(job: str, history: History) -> Iterator[Metric]:
    yield histogram(
        "outrider_recovery_phase_duration_seconds",
        "Time spent in each phase of a recovery, named after the milestone that ends it.",
        (JOB, "phase"),
        {(job, phase): one for phase, one in history.phases.items()},
    )
    yield histogram(
        "outrider_recovery_duration_seconds",
        "From the fault to the first step after it, by restart mode.",
        (JOB, "mode"),
        {(job, mode): one for mode, one in history.recoveries.items()},
    )


def _time(job: str, ledger: Ledger) -> Iterator[Metric]:
    yield total(
        "outrider_job_time_seconds",
        "Wall clock of the job by what it was spent on; every second is in exactly one account.",
        (JOB, "account"),
        [((job, account), ledger.booked_ns[account] / 1e9) for account in Account],
    )
    yield gauge(
        "outrider_job_time_held_seconds",
        "Time since the last step or verdict, not booked to any account yet.",
        (JOB,),
        [((job,), ledger.held_ns / 1e9)],
    )
    yield total(
        "outrider_lost_gpu_seconds",
        "Seconds of devices that stood still or worked in vain, by what broke; `start` is the"
        " time before the first step.",
        (JOB, "cause"),
        [((job, cause), ledger.lost_rank_ns[cause] / 1e9) for cause in CAUSES],
    )


def _commands(job: str, commands: CommandTimes) -> Iterator[Metric]:
    yield histogram(
        "outrider_coordinator_broadcast_duration_seconds",
        "From the first send of a command to the answer of its last node.",
        (JOB, "command"),
        {(job, name): commands.broadcasts[name] for name in COMMANDS},
    )
    yield histogram(
        "outrider_coordinator_ack_duration_seconds",
        "From a command's send to one node to its answer.",
        (JOB, "command"),
        {(job, name): commands.acks[name] for name in COMMANDS},
    )
    yield total(
        "outrider_coordinator_acks_missing",
        "Commands whose node left before it answered.",
        (JOB, "command"),
        [((job, name), commands.missing[name]) for name in COMMANDS],
    )
