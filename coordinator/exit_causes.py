"""What an exit status alone decides: a user's error, a listed code, or a preemption.

An exit status is believed only as the kernel told it (`sidecar.api.ExitCause`).  It knows nothing
of budgets and checkpoints; a status that decides nothing is left to them.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.incidents import Finding, NodeFault
from coordinator.wording import SIGNAL_NAMES, one_line, output_line
from sidecar.api import ExitCause, FaultKind

SIGTERM: Final = 15

USAGE_EXIT_CODES: Final = (2, 126, 127)
"""What Python exits with for a missing script and argparse for arguments it does not know; what a
shell exits with for a command that it may not or cannot run."""

PREEMPTED: Final = "preempted"
"""Outcome of a finding, and the beginning of a restart's cause, that no budget is charged for."""

NODE_LEFT: Final = "NodeLeft"
"""Reason of a loss that was announced: the node's sidecar was told to end."""

_NUMBERS: Final = {name: number for number, name in SIGNAL_NAMES.items()}

_STARTUP_ERROR: Final = re.compile(
    r"^\s*(?:\w+\.)*(?:ModuleNotFoundError|ImportError|SyntaxError|IndentationError|TabError)\b"
    r"|^\S+: error: |can't open file",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitPolicy:
    """Exit statuses that decide: codes from 0 to 255, and signals as negative numbers.

    A signal in a list stands for its shell code (128 and its number) too.
    """

    never: frozenset[int] = frozenset()
    always: frozenset[int] = frozenset()
    preempted: frozenset[int] = frozenset({-SIGTERM})
    """How a scheduler ends what it wants to have out of the way.  Nobody here sends SIGTERM to a
    worker before the coordinator has ordered a stop, and then its end is no fault."""


def exit_number(value: int | str) -> int:
    """Return ``143`` or ``SIGTERM`` as `ExitPolicy` keeps it.  Raises `ValueError`."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 255:  # noqa: PLR2004
        return value
    number = _NUMBERS.get(value) if isinstance(value, str) else None
    if number is None:
        raise ValueError(f"{value!r} is neither an exit code from 0 to 255 nor a signal's name")
    return -number


def listed(cause: ExitCause | None, numbers: frozenset[int]) -> bool:
    """Return True when ``numbers`` names this end of a process."""
    if cause is None:
        return False
    if cause.signal is not None:
        return -cause.signal in numbers and not cause.by
    code = cause.code or 0
    return code in numbers or (code > 128 and 128 - code in numbers)  # noqa: PLR2004 - a shell's


def is_preempted(fault: NodeFault, policy: ExitPolicy) -> bool:
    """Return True when somebody outside took the worker, or the whole node, away."""
    report = fault.report
    if report.kind is FaultKind.NODE_LOST:
        return report.reason == NODE_LEFT
    return report.kind is FaultKind.CRASH and listed(report.exit, policy.preempted)


def refusal(
    policy: ExitPolicy, finding: Finding, faults: Sequence[NodeFault], *, stepped: bool
) -> str | None:
    """Say why the way in which the job ended is not to be repeated, or None.

    ``stepped`` is true once any rank completed a step in this or an earlier generation: the
    script is then known to start, and a start-up error is no longer the user's.
    """
    crashes = sorted(_meant(finding, faults), key=lambda crash: crash.at_ns)
    for fault in crashes:
        if listed(fault.report.exit, policy.never):
            return (
                f"a worker on {fault.node} ended with {fault.report.exit}, which this job never "
                f"restarts (exitPolicy.neverRestart): {finding.why}"
            )
    if stepped or any(listed(fault.report.exit, policy.always) for fault in crashes):
        return None
    for fault in crashes:
        line = _startup_line(fault)
        if line is not None:
            return (
                f"the script failed on {fault.node} before its first step, and starting it again "
                f"would fail the same way: {line}"
            )
    return None


def _meant(finding: Finding, faults: Iterable[NodeFault]) -> list[NodeFault]:
    """Return the crashes that the finding is about."""
    crashes = [fault for fault in faults if fault.report.kind is FaultKind.CRASH]
    culprit = finding.culprit
    if culprit is None:
        return crashes
    if culprit.kind is not FaultKind.CRASH:
        return []
    return [
        fault
        for fault in crashes
        if fault.node == culprit.node
        and (culprit.rank is None or fault.report.rank in (None, culprit.rank))
    ]


def _startup_line(fault: NodeFault) -> str | None:
    """Return the line that tells the start-up error, or None when the crash is of another kind."""
    report = fault.report
    lines = [output_line(line) for line in report.evidence if line.strip()]
    telling = next((line for line in reversed(lines) if _STARTUP_ERROR.search(line)), None)
    by_code = report.exit is not None and report.exit.code in USAGE_EXIT_CODES
    if telling is None and not by_code:
        return None
    return telling or (lines[-1] if lines else one_line(report.message) or str(report.exit))
