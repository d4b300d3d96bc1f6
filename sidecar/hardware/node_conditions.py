"""What another health agent wrote on a node's labels and conditions, as readings.

Understands the labels and conditions of the HyperPod health agent as Kubernetes shows them.
Decides which of them speak against the node; a condition that blames the program alone does not.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from scout.clock import Instant
from sidecar.hardware.readings import NODE, Known, Metric, Reading, Severity

PREFIX: Final = "sagemaker.amazonaws.com/"
_HEALTH: Final = PREFIX + "node-health-status"
_DEEP_CHECK: Final = PREFIX + "deep-health-check-status"
_DETAILS: Final = tuple(PREFIX + name for name in ("fault-types", "fault-reasons"))
_CONDITIONS: Final = frozenset({"NvidiaErrorReboot", "NvidiaErrorTerminate"})
_PROGRAM_ALONE: Final = "XidUserAppError"
_DETAIL_CHARS_MAX: Final = 500


def from_labels(labels: Mapping[str, Any], source: str, at: Instant) -> list[Reading]:
    """Return what a node's labels say.  Labels of others are passed over."""
    status = labels.get(_HEALTH)
    check = labels.get(_DEEP_CHECK)
    if status is None and check is None:
        return []
    words = [f"node-health-status is {status}"] if status is not None else []
    severity = Severity.HEALTHY
    if status is not None and status != "Schedulable":
        severity = Severity.FATAL
    if check is not None and check != "Passed":
        words.append(f"deep-health-check-status is {check}")
        failed = Severity.FATAL if check == "Failed" else Severity.WARNING
        severity = severity if severity is Severity.FATAL else failed
    words += [f"{name.removeprefix(PREFIX)}: {labels[name]}" for name in _DETAILS if name in labels]
    return [_word(severity, ", ".join(words), source, at)]


def from_conditions(
    conditions: Iterable[Mapping[str, Any]], source: str, at: Instant
) -> list[Reading]:
    """Return what a node's conditions say; conditions of others are passed over."""
    ours = [condition for condition in conditions if condition.get("type") in _CONDITIONS]
    if not ours:
        return []
    bad = [
        condition
        for condition in ours
        if condition.get("status") == "True" and condition.get("reason") != _PROGRAM_ALONE
    ]
    shown = bad or ours
    words = "; ".join(
        f"{condition['type']} is {condition.get('status')}: {condition.get('reason', '')} "
        f"{condition.get('message', '')}".strip()
        for condition in shown
    )
    return [_word(Severity.FATAL if bad else Severity.HEALTHY, words, source, at)]


def _word(severity: Severity, words: str, source: str, at: Instant) -> Reading:
    return Reading(
        source=source,
        device=NODE,
        metric=Metric.EXTERNAL,
        value=Known(1),
        at=at,
        detail=words[:_DETAIL_CHARS_MAX],
        claim=severity,
    )
