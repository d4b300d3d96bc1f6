"""The judge of hardware health: readings in, faults out, and a state for everything in between.

Decides which device is fatally broken, says so once per device and metric, and takes it back when
the device has recovered.  What bad means stands in `sidecar.hardware.severity`, the limits in
`HealthConfig`.  It reads no clock and asks no device: the same readings give the same verdicts.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from scout.clock import Duration, Instant, seconds, since
from sidecar.hardware.devices import NODE_PLACE, Roster
from sidecar.hardware.occurrences import Evidence, Occurrences
from sidecar.hardware.power import PowerHistory
from sidecar.hardware.readings import (
    METRICS,
    Device,
    Kind,
    Known,
    Metric,
    NotSupported,
    Reading,
    Severity,
)
from sidecar.hardware.severity import Facts, Judgement, judge
from sidecar.hardware.snapshot import DeviceHealth, HealthSnapshot, MetricHealth, roll_up
from sidecar.hardware.thresholds import HealthConfig
from sidecar.hardware.tracks import Track
from sidecar.hardware.trend import Growth
from sidecar.hardware.views import SUMMED, Seen, View, facts_of, value_of

SOURCES_MAX: Final = 64
"""Sources that are told apart; a node has a handful."""

_ENDS_WITH_RESET: Final = {Metric.ECC_UNCORRECTABLE_VOLATILE, Metric.ECC_CORRECTABLE_VOLATILE}
_SAYS: Final = (Severity.UNKNOWN, Severity.HEALTHY, Severity.WARNING, Severity.FATAL)
"""Between sources: whoever sees something outweighs whoever sees nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthEvent:
    """A device and metric turned bad.  Fatal ones convict, warnings record a precursor."""

    device: Device
    metric: Metric
    value: float | None
    severity: Severity
    message: str
    source: str
    at: Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCleared:
    """A device and metric that were fatal are so no longer."""

    device: Device
    metric: Metric
    severity: Severity
    message: str
    at: Instant


Outcome: TypeAlias = HealthEvent | HealthCleared


class HardwareHealth:
    """Every device of one node.  Give readings to `evaluate`, in any order and any rhythm."""

    def __init__(self, config: HealthConfig | None = None) -> None:
        self.config = config or HealthConfig()
        self._stale = seconds(self.config.unknown_after_s)
        self._clear = seconds(self.config.clear_after_s)
        self._roster = Roster()
        self._views: dict[tuple[str, int], View] = {}
        self._known: dict[int, dict[Metric, tuple[float, Instant]]] = {}
        self._reset_at: dict[int, Instant] = {}
        self._said: dict[tuple[int, Metric], Severity] = {}
        self._power: dict[int, PowerHistory] = {}
        self.readings_dropped = 0

    # --- in -----------------------------------------------------------------------------------

    def evaluate(self, readings: Iterable[Reading], now: Instant) -> tuple[Outcome, ...]:
        """Take readings and return what changed.  With none, only time has passed."""
        for reading in readings:
            self._take(reading)
        facts = {key: facts_of(view, self.config, now) for key, view in self._views.items()}
        for (source, place), view in self._views.items():
            self._judge_view(place, view, facts[source, place], now)
        self._judge_node_wide(facts, now)
        return tuple(self._changes(now))

    def next_deadline(self) -> Instant | None:
        """Return when a reading would confirm a verdict that is being held."""
        due = [
            track.rises_at
            for view in self._views.values()
            for track in view.tracks.values()
            if track.rises_at is not None
        ]
        return min(due, default=None)

    def _take(self, reading: Reading) -> None:
        place = self._roster.resolve(reading.device)
        key = (reading.source, place or NODE_PLACE)
        if place is None or (key not in self._views and len(self._views) >= _VIEWS_MAX):
            self.readings_dropped += 1
            return
        view = self._views.setdefault(key, View())
        kind = METRICS[reading.metric].kind
        if kind is Kind.EVENT and isinstance(reading.value, Known):
            self._take_event(view, reading)
            return
        by_link = view.seen.setdefault(reading.metric, {})
        before = by_link.get(reading.link)
        known = isinstance(reading.value, Known)
        if reading.link is None and not known:
            by_link.clear()  # said of the whole device, so of each of its links
        elif reading.link is not None:
            by_link.pop(None, None)
        by_link[reading.link] = Seen(
            value=reading.value,
            at=reading.at,
            detail=reading.detail,
            claim=reading.claim,
            unknown_since=None
            if known
            else (before.unknown_since if before and before.unknown_since else reading.at),
        )
        if isinstance(reading.value, Known):
            self._take_known(view, place, reading, reading.value.value, kind)

    def _take_event(self, view: View, reading: Reading) -> None:
        assert isinstance(reading.value, Known)
        code = int(reading.value.value)
        severity = (
            self.config.xid_severity(code, reading.claim)
            if reading.metric is Metric.XID
            else reading.claim or Severity.WARNING
        )
        events = view.events.setdefault(reading.metric, Occurrences())
        events.add(code, severity, reading.detail, reading.at, reading.count)

    def _take_known(
        self, view: View, place: int, reading: Reading, value: float, kind: Kind
    ) -> None:
        known = self._known.setdefault(place, {})
        before = known.get(reading.metric)
        known[reading.metric] = (value, reading.at)
        if reading.metric is Metric.POWER_W:
            self._power.setdefault(place, PowerHistory()).add(value)
        elif reading.metric in (Metric.DEVICE_LOST, Metric.DEVICE_MISSING):
            convicted = self._said.get((place, reading.metric)) is Severity.FATAL
            if convicted and before is not None and before[0] and not value:
                self._reset(place, reading.at)
        elif kind is Kind.COUNTER:
            growth = view.growth.setdefault((reading.metric, reading.link), Growth())
            if growth.add(value, reading.at) and reading.metric in _ENDS_WITH_RESET:
                self._reset(place, reading.at)

    def _reset(self, place: int, at: Instant) -> None:
        """The device came back from a reset: what its counters say of the time before is over."""
        self._reset_at[place] = at
        for (_source, owner), view in self._views.items():
            if owner == place:
                for growth in view.growth.values():
                    growth.rebase(at)

    # --- judging ------------------------------------------------------------------------------

    def _judge_view(self, place: int, view: View, facts: Facts, now: Instant) -> None:
        evidence = Evidence(known=self._known.get(place, {}), reset_at=self._reset_at.get(place))
        for metric, by_link in view.seen.items():
            if METRICS[metric].node_wide and place != NODE_PLACE:
                continue
            self._step(view, metric, *self._verdict(facts, metric, by_link, now))
        if Metric.NVLINK_ERRORS in facts.known and Metric.NVLINK_ERRORS not in view.seen:
            at = max(seen.at for metric in SUMMED for seen in view.seen.get(metric, {}).values())
            self._step(view, Metric.NVLINK_ERRORS, judge(facts, Metric.NVLINK_ERRORS), at)
        for metric, events in view.events.items():
            verdict = events.judge(metric, self.config, evidence, now)
            # Time itself is the evidence here, so taking back needs no second look.
            self._step(view, metric, verdict, now, clear=seconds(0))

    def _step(
        self,
        view: View,
        metric: Metric,
        verdict: Judgement,
        at: Instant,
        *,
        clear: Duration | None = None,
    ) -> None:
        view.tracks.setdefault(metric, Track()).step(
            verdict.severity,
            verdict.reason,
            at=at,
            hold=seconds(verdict.hold_s),
            clear=self._clear if clear is None else clear,
        )

    def _verdict(
        self, facts: Facts, metric: Metric, by_link: dict[int | None, Seen], now: Instant
    ) -> tuple[Judgement, Instant]:
        newest = max(by_link.values(), key=lambda seen: seen.at)
        if newest.claim is not None:
            # Somebody's standing word holds until they say otherwise, so it is news of now.
            return Judgement(newest.claim, newest.detail), now
        if metric in facts.known:
            return judge(facts, metric), newest.at
        if not isinstance(newest.value, Known):
            return Judgement(Severity.UNKNOWN, newest.value.reason), now
        age_s = since(newest.at, now) // seconds(1)
        return Judgement(Severity.UNKNOWN, f"last read {age_s} s ago"), now

    def _judge_node_wide(self, facts: Mapping[tuple[str, int], Facts], now: Instant) -> None:
        """Judge for the node what is read per device and blames none of them."""
        sources = {source for source, _ in self._views}
        for source in sources:
            for metric in _NODE_WIDE:
                parts = list(self._parts(source, metric, facts, now))
                if not parts:
                    continue
                worst, at, _ = max(parts, key=lambda part: _SAYS.index(part[0].severity))
                if worst.severity in (Severity.WARNING, Severity.FATAL):
                    who = [str(i) for v, _, i in parts if v.severity is worst.severity]
                    seen_by = f" (seen by GPU {', '.join(who)})"
                    worst = Judgement(worst.severity, worst.reason + seen_by, worst.hold_s)
                node = self._views.setdefault((source, NODE_PLACE), View())
                self._step(node, metric, worst, at)

    def _parts(
        self,
        source: str,
        metric: Metric,
        facts: Mapping[tuple[str, int], Facts],
        now: Instant,
    ) -> Iterator[tuple[Judgement, Instant, int]]:
        for (owner, place), view in self._views.items():
            by_link = view.seen.get(metric)
            if owner != source or place == NODE_PLACE or by_link is None:
                continue
            if all(isinstance(seen.value, NotSupported) for seen in by_link.values()):
                continue
            verdict, at = self._verdict(facts[owner, place], metric, by_link, now)
            index = self._roster[place].index
            yield verdict, at, place - 1 if index is None else index

    # --- out ----------------------------------------------------------------------------------

    def _changes(self, now: Instant) -> Iterator[Outcome]:
        for place, metric, source, track, view in self._worst_tracks():
            key = (place, metric)
            before = self._said.get(key, Severity.HEALTHY)
            if track.state is Severity.UNKNOWN or track.state is before:
                continue
            self._said[key] = track.state
            device = self._roster[place]
            if before is Severity.FATAL:
                yield HealthCleared(
                    device=device,
                    metric=metric,
                    severity=track.state,
                    message=f"{device}: {metric.value} has recovered",
                    at=now,
                )
            elif track.state is not Severity.HEALTHY:
                yield HealthEvent(
                    device=device,
                    metric=metric,
                    value=value_of(view, metric),
                    severity=track.state,
                    message=f"{device}: {track.reason}",
                    source=source,
                    at=now,
                )

    def _worst_tracks(self) -> Iterator[tuple[int, Metric, str, Track, View]]:
        """Yield one track per device and metric: the one that says most."""
        worst: dict[tuple[int, Metric], tuple[str, Track, View]] = {}
        for (source, place), view in self._views.items():
            for metric, track in view.tracks.items():
                held = worst.get((place, metric))
                if held is None or _SAYS.index(track.state) > _SAYS.index(held[1].state):
                    worst[place, metric] = (source, track, view)
        for (place, metric), (source, track, view) in worst.items():
            yield place, metric, source, track, view

    def snapshot(self, now: Instant) -> HealthSnapshot:
        """Return every device's state with the age of everything that it rests on."""
        rows: dict[int, list[MetricHealth]] = {place: [] for place in self._roster.places()}
        for place, metric, source, track, view in self._worst_tracks():
            rows[place].append(self._row(metric, source, track, view, now))
        return HealthSnapshot(
            devices=tuple(
                DeviceHealth(
                    device=self._roster[place],
                    severity=roll_up(metrics),
                    metrics=tuple(metrics),
                )
                for place, metrics in rows.items()
            ),
            remarks=tuple(self._remarks(now)),
        )

    def _remarks(self, now: Instant) -> Iterator[str]:
        for place, history in self._power.items():
            _, at = self._known[place][Metric.POWER_W]
            remark = history.remark() if since(at, now) <= self._stale else None
            if remark is not None:
                yield f"{self._roster[place]} {remark}"

    def _row(
        self, metric: Metric, source: str, track: Track, view: View, now: Instant
    ) -> MetricHealth:
        by_link = view.seen.get(metric, {})
        newest = max(by_link.values(), key=lambda seen: seen.at, default=None)
        stale = newest is not None and newest.claim is None and since(newest.at, now) > self._stale
        hidden = stale and track.state in (Severity.HEALTHY, Severity.WARNING)
        events = view.events.get(metric)
        counts = {} if events is None else {c: o.count for c, o in events.by_code.items()}
        unknown_since = None if newest is None else newest.unknown_since
        if unknown_since is None and stale and newest is not None:
            unknown_since = newest.at
        return MetricHealth(
            metric=metric,
            source=source,
            severity=Severity.UNKNOWN if hidden else track.state,
            reason=track.reason,
            value=value_of(view, metric),
            supported=newest is None or not isinstance(newest.value, NotSupported),
            age_s=None if newest is None else since(newest.at, now) / 1e9,
            state_age_s=0.0 if track.since is None else since(track.since, now) / 1e9,
            unknown_age_s=None if unknown_since is None else since(unknown_since, now) / 1e9,
            links={
                link: seen.value.value
                for link, seen in by_link.items()
                if link is not None and isinstance(seen.value, Known)
            },
            counts=counts,
        )


_VIEWS_MAX: Final = SOURCES_MAX * 17
_NODE_WIDE: Final = tuple(metric for metric, info in METRICS.items() if info.node_wide)


__all__ = ["HardwareHealth", "HealthCleared", "HealthConfig", "HealthEvent", "Outcome"]
