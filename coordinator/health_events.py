"""What others say of a node's health: read from their form, kept as long as it stands.

Decides how bad a word is, what replaces what, and when it is over.  Understands plain events and
the labels and conditions that HyperPod's health agent writes on a Kubernetes node.  Refuses to
know what follows for the job (`coordinator.node_health`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Final

import msgspec

from coordinator.wording import one_line

NOTICES_MAX: Final = 4096
"""Words kept of all nodes; the oldest ones that take no node make room."""
NOTICES_PER_NODE_MAX: Final = 16
REASON_CHARS_MAX: Final = 200
SOURCE_CHARS_MAX: Final = 64
NODE_CHARS_MAX: Final = 253
LABELS_MAX: Final = 256

_PREFIX: Final = "sagemaker.amazonaws.com/"
_STATUS: Final = f"{_PREFIX}node-health-status"
_CHECK: Final = f"{_PREFIX}deep-health-check-status"
_DETAILS: Final = (f"{_PREFIX}fault-types", f"{_PREFIX}fault-reasons")
_CONDITIONS: Final = frozenset({"NvidiaErrorReboot", "NvidiaErrorTerminate"})
_PROGRAM_ALONE: Final = "XidUserAppError"
"""A condition with this reason blames the program, not the node."""
_LABELS: Final = "labels"
_CONDITION: Final = "conditions"
"""What the two are kept under: a source's labels are one word, which the next one replaces."""


class HealthSeverity(StrEnum):
    """How bad a word is."""

    FATAL = "fatal"
    """The node gets no rank while it stands; one that holds ranks is stopped."""
    WARNING = "warning"
    """Shown, and nothing else."""
    HEALTHY = "healthy"
    """Takes back what the same source said before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthNotice:
    """One standing word about a node.  Times are wall clock, nanoseconds since the epoch.

    ``until_ns`` None: it stands until its source takes it back.
    """

    node: str
    source: str
    severity: HealthSeverity
    reason: str
    at_ns: int
    until_ns: int | None = None
    topic: str = ""
    """What it replaces: an earlier word of the same source about the same topic."""

    def repeats(self, other: "HealthNotice") -> bool:
        """Whether ``other`` says the same; agents that poll say everything again and again."""
        return replace(other, at_ns=self.at_ns) == self

    @property
    def words(self) -> str:
        """It as a person reads it, and as an exclusion carries it."""
        return f"{self.source} says: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthRequest:
    """Body of ``POST /v1/health-events``.

    Either ``severity`` and ``reason`` (``clears`` takes them back; without a reason everything of
    this source on this node), or ``labels`` and ``conditions`` as Kubernetes shows them.
    ``until``: when it is over by itself, as at the end of maintenance.
    """

    node: Annotated[str, msgspec.Meta(min_length=1, max_length=NODE_CHARS_MAX)]
    source: Annotated[str, msgspec.Meta(min_length=1, max_length=SOURCE_CHARS_MAX)]
    severity: HealthSeverity | None = None
    reason: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    until: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    clears: bool = False
    labels: Annotated[dict[str, str], msgspec.Meta(max_length=LABELS_MAX)] | None = None
    conditions: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=LABELS_MAX)] | None = None


class HealthRequestError(ValueError):
    """The request says nothing that can be used; the text is for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthWord:
    """What one request says: notices that stand now, and topics of the source that are over.

    ``over`` None means every topic of that source on that node.
    """

    node: str
    source: str
    notices: tuple[HealthNotice, ...] = ()
    over: tuple[str, ...] | None = ()


def read(request: HealthRequest, node: str, now_ns: int) -> HealthWord:
    """Return what a request says about ``node``.  Raises `HealthRequestError`."""
    source = one_line(request.source, SOURCE_CHARS_MAX)
    if not source:
        raise HealthRequestError("source is empty: name who says so, such as health-agent")
    if request.labels is not None or request.conditions is not None:
        if request.severity is not None or request.clears:
            raise HealthRequestError("give labels and conditions, or severity and reason, not both")
        return _of_node(request, node, source, now_ns)
    reason = one_line(request.reason, REASON_CHARS_MAX)
    healthy = request.severity is HealthSeverity.HEALTHY
    if request.clears or healthy:
        if request.clears and request.severity not in (None, HealthSeverity.HEALTHY):
            raise HealthRequestError("clears takes a word back; leave severity out beside it")
        over = (_topic(reason),) if reason and not healthy else None
        return HealthWord(node=node, source=source, over=over)
    if request.severity is None:
        raise HealthRequestError("severity is missing: fatal, warning, or clears to take one back")
    if not reason:
        raise HealthRequestError("reason is missing: one sentence for whoever is on call")
    until_ns = None if request.until is None else round(request.until.timestamp() * 1e9)
    if until_ns is not None and until_ns <= now_ns:
        raise HealthRequestError("until lies in the past, so the event is over already")
    notice = HealthNotice(
        node=node,
        source=source,
        severity=request.severity,
        reason=reason,
        at_ns=now_ns,
        until_ns=until_ns,
        topic=_topic(reason),
    )
    return HealthWord(node=node, source=source, notices=(notice,))


def _topic(reason: str) -> str:
    return f"event {reason}"


def _of_node(request: HealthRequest, node: str, source: str, now_ns: int) -> HealthWord:
    found: list[tuple[str, HealthSeverity, str]] = []
    topics: list[str] = []
    if request.labels is not None:
        topics.append(_LABELS)
        severity, words = _read_labels(request.labels)
        found.append((_LABELS, severity, words))
    if request.conditions is not None:
        topics.append(_CONDITION)
        severity, words = _read_conditions(request.conditions)
        found.append((_CONDITION, severity, words))
    return HealthWord(
        node=node,
        source=source,
        over=tuple(topics),
        notices=tuple(
            HealthNotice(
                node=node,
                source=source,
                severity=severity,
                reason=one_line(words, REASON_CHARS_MAX),
                at_ns=now_ns,
                topic=topic,
            )
            for topic, severity, words in found
            if severity is not HealthSeverity.HEALTHY
        ),
    )


def _read_labels(labels: Mapping[str, str]) -> tuple[HealthSeverity, str]:
    status, check = labels.get(_STATUS), labels.get(_CHECK)
    words = [
        f"{name.removeprefix(_PREFIX)} is {labels[name]}"
        for name in (_STATUS, _CHECK, *_DETAILS)
        if name in labels
    ]
    if status not in (None, "Schedulable") or check == "Failed":
        return HealthSeverity.FATAL, ", ".join(words)
    if check not in (None, "Passed"):
        return HealthSeverity.WARNING, ", ".join(words)
    return HealthSeverity.HEALTHY, ""


def _read_conditions(conditions: Iterable[Mapping[str, Any]]) -> tuple[HealthSeverity, str]:
    bad = [
        condition
        for condition in conditions
        if condition.get("type") in _CONDITIONS and str(condition.get("status")) == "True"
    ]
    fatal = [condition for condition in bad if condition.get("reason") != _PROGRAM_ALONE]
    if not bad:
        return HealthSeverity.HEALTHY, ""
    words = "; ".join(
        " ".join(str(condition.get(name) or "") for name in ("type", "reason", "message")).strip()
        for condition in (fatal or bad)
    )
    return (HealthSeverity.FATAL if fatal else HealthSeverity.WARNING), words


# --- what stands ------------------------------------------------------------------------------


def told(standing: Sequence[HealthNotice], word: HealthWord) -> tuple[HealthNotice, ...]:
    """Return what stands after ``word``, newest last and bounded."""
    said = {notice.topic: notice for notice in word.notices}

    def stays(notice: HealthNotice) -> bool:
        if (notice.node, notice.source) != (word.node, word.source):
            return True
        again = said.get(notice.topic)
        if again is not None:
            return notice.repeats(again)
        return word.over is not None and notice.topic not in word.over

    kept = [notice for notice in standing if stays(notice)]
    kept += news(standing, word)
    mine = [notice for notice in kept if notice.node == word.node]
    return tuple(
        _without_spare(_without_spare(kept, mine, NOTICES_PER_NODE_MAX), None, NOTICES_MAX)
    )


def news(standing: Iterable[HealthNotice], word: HealthWord) -> list[HealthNotice]:
    """Return what ``word`` says that was not said before in the same words."""
    return [one for one in word.notices if not any(before.repeats(one) for before in standing)]


def _without_spare(
    kept: Sequence[HealthNotice], among: Sequence[HealthNotice] | None, limit: int
) -> list[HealthNotice]:
    """Drop the oldest ones beyond ``limit``, warnings before what takes a node."""
    counted = list(kept if among is None else among)
    surplus = len(counted) - limit
    if surplus <= 0:
        return list(kept)
    order = sorted(counted, key=lambda notice: notice.severity is HealthSeverity.FATAL)
    gone = {id(notice) for notice in order[:surplus]}
    return [notice for notice in kept if id(notice) not in gone]


def expired(
    standing: Sequence[HealthNotice], now_ns: int
) -> tuple[tuple[HealthNotice, ...], tuple[HealthNotice, ...]]:
    """Return what still stands, and what has just ended by itself."""
    over = tuple(one for one in standing if one.until_ns is not None and one.until_ns <= now_ns)
    return tuple(one for one in standing if one not in over), over


def against(standing: Iterable[HealthNotice], node: str) -> HealthNotice | None:
    """Return the oldest word that takes ``node``, or None."""
    return next(
        (
            notice
            for notice in standing
            if notice.node == node and notice.severity is HealthSeverity.FATAL
        ),
        None,
    )
