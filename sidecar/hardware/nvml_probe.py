"""NVML of one node, read through helper processes that can be killed.

One helper looks after all devices.  When a call about one device does not return, that helper is
killed, the device gets a helper of its own and the others go on in a fresh one: one stuck call
blinds one device.  A device whose helper answers again for a while goes back to the others.

Decides who is asked by whom and when to stop waiting; what the answers mean is for others.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from scout.clock import Duration, Instant, after, seconds, since
from sidecar.hardware.devices import Gpu, same
from sidecar.hardware.nvml_answers import (
    LIBRARY_MISMATCH,
    answered,
    blind,
    lost,
    missing,
    reading,
    xid,
)
from sidecar.hardware.nvml_crew import OTHERS_FROM, Crew, Target
from sidecar.hardware.nvml_process import NvmlProcess
from sidecar.hardware.readings import NODE, Device, Metric, Reading, Unknown

QUERY_TIMEOUT_S: Final = 10.0
"""A healthy query takes microseconds, one of a device under reset up to a few seconds."""
LOOK_AGAIN_S: Final = 60.0
"""While a device is gone, the devices are opened afresh this often."""
REJOIN_S: Final = 60.0
"""How long a device must answer in its own helper before it goes back to the others."""
WATCH_SILENT_S: Final = 30.0
"""The driver returns from waiting for error events every few seconds, or it is stuck."""
CLOSE_S_MAX: Final = 2.0
"""How long `close` waits for a read, which does not begin anything new by then."""
STUCK_HELPERS_MAX: Final = 32
"""Killed helpers that the driver does not let go; beyond this no new one is started."""


class NvmlProbe:
    """All devices of this node, or the one with physical index ``device_index``.

    `read` waits for as long as two calls may take at most, and only when one has just got stuck.
    ``wake`` is called, on another thread, when an error event has come.
    """

    def __init__(
        self,
        device_index: int | None = None,
        *,
        query_timeout_s: float = QUERY_TIMEOUT_S,
        look_again_s: float = LOOK_AGAIN_S,
        rejoin_s: float = REJOIN_S,
    ) -> None:
        self._index = device_index
        self._timeout = seconds(query_timeout_s)
        self._look_again = seconds(look_again_s)
        self._rejoin = seconds(rejoin_s)
        self.wake: Callable[[], None] | None = None
        self._targets: list[Target] = []
        self._spoken = threading.Condition()
        self._reading = threading.Lock()
        self._closed = False
        self._main = self._crew()
        self._solos: list[Crew] = []
        self._undead: list[tuple[NvmlProcess, Target | None]] = []
        self._events: list[Reading] = []
        self._round = 0

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """Every device found so far, with its MIG devices, in the order of addresses."""
        found = [Gpu(device=seen.device, slices=seen.slices) for seen in self._targets]
        return tuple(sorted(found, key=lambda gpu: gpu.device.pci or ""))

    @property
    def helpers(self) -> tuple[int, ...]:
        """The process ids of the helpers that run."""
        pids = (crew.pid for crew in (self._main, *self._solos))
        return tuple(pid for pid in pids if pid is not None)

    def read(self) -> list[Reading]:
        """Ask every device once and return what is known now; nothing once it was closed."""
        with self._reading:
            return [] if self._closed else self._read()

    def _read(self) -> list[Reading]:
        self._round += 1
        self._undead = [(gone, whose) for gone, whose in self._undead if not gone.reap()]
        for solo in self._solos:
            self._start(solo)
            self._advance(solo)
        self._ask_main()
        for solo in tuple(self._solos):
            self._advance(solo)
        now = _now()
        readings = [*self._of_node(now), *self._of_devices(now), *self._events]
        self._events = []
        self._regroup(now)
        return readings

    def close(self) -> None:
        """End every helper process.  A read that is under way gives up."""
        with self._spoken:
            self._closed = True
            self._spoken.notify_all()
        ended = self._reading.acquire(timeout=CLOSE_S_MAX)
        try:
            self._stop_helpers()
        finally:
            if ended:
                self._reading.release()

    def _stop_helpers(self) -> None:
        for crew in (self._main, *self._solos):
            crew.stop()
        self._solos.clear()

    # --- asking -------------------------------------------------------------------------------

    def _crew(self, alone: Target | None = None) -> Crew:
        return Crew(find=self._find, heard=self._heard, timeout=self._timeout, alone=alone)

    def _ask_main(self) -> None:
        deadline = after(_now(), Duration(2 * self._timeout))
        while True:
            self._start(self._main)
            with self._spoken:
                if self._closed or self._advance(self._main) or _now() >= deadline:
                    return
                self._spoken.wait(0.05)

    def _start(self, crew: Crew) -> None:
        now = _now()
        if self._closed:
            return
        held = crew.alone is not None and any(whose is crew.alone for _, whose in self._undead)
        if held or len(self._undead) >= STUCK_HELPERS_MAX or not crew.due(now):
            return
        spec, members = self._spec(crew)
        if spec is not None:
            crew.start(spec, members, now)

    def _spec(self, crew: Crew) -> tuple[dict[str, Any] | None, dict[int, Target]]:
        """Say which devices a helper opens: by address where known, because indices may move."""
        apart = [solo.alone for solo in self._solos if solo.alone is not None]
        mine = [crew.alone] if crew.alone else [seen for seen in self._targets if seen not in apart]
        by_pci = [target for target in mine if target.device.pci]
        members = dict(enumerate(by_pci))
        spec: dict[str, Any] = {"pci": [target.device.pci for target in by_pci]}
        if crew.alone is not None:
            return (spec, members) if by_pci else ({"index": [crew.alone.device.index]}, {})
        if self._index is not None:
            if self._targets:
                return (spec, members) if by_pci else ({"index": [self._index]}, {})
            return {"index": [self._index]}, {}
        if not apart:
            spec["others"] = OTHERS_FROM
        elif not by_pci:
            skip = [target.device.index for target in apart]
            return {"others": OTHERS_FROM, "skip": skip}, {}
        return spec, members

    def _advance(self, crew: Crew) -> bool:
        """Move a helper on.  True when there is nothing to wait for."""
        self._events.extend(
            xid(device or NODE, code, instance, count, _now())
            for device, code, instance, count in crew.events()
        )
        if crew.advance(self._round):
            return True
        if not crew.is_stuck:
            return False
        process, target = crew.give_up()
        if not process.reap():
            self._undead.append((process, target))
        if crew is self._main and target is not None:
            self._solos.append(self._crew(alone=target))
            self._main.start_again_at_once()
            return False
        return True

    def _heard(self, urgent: bool) -> None:
        with self._spoken:
            self._spoken.notify_all()
        if urgent and self.wake is not None:
            self.wake()

    def _find(self, device: Device) -> Target:
        for target in self._targets:
            if same(target.device, device):
                return target
        target = Target(device=device)
        self._targets.append(target)
        return target

    def _regroup(self, now: Instant) -> None:
        """Take devices back that answer again, and look again for those that are gone."""
        for solo in tuple(self._solos):
            answering_since = solo.alone.answering_since if solo.alone else None
            if answering_since is not None and since(answering_since, now) >= self._rejoin:
                solo.stop()
                self._solos.remove(solo)
                self._main.stop()
        gone = any(seen.gone or seen.lost for seen in self._targets) or any(
            seen.answer is not None and seen.answer["lost"] for seen in self._targets
        )
        if gone and since(self._main.started_at, now) >= self._look_again:
            self._main.stop()

    # --- telling ------------------------------------------------------------------------------

    def _of_node(self, now: Instant) -> Iterator[Reading]:
        crew = self._main
        if crew.failed_with == LIBRARY_MISMATCH:
            yield reading(NODE, Metric.DRIVER_MISMATCH, 1, now, detail=crew.trouble)
        elif crew.trouble:
            yield reading(NODE, Metric.DRIVER_MISMATCH, Unknown(crew.trouble), now)
        else:
            yield reading(NODE, Metric.DRIVER_MISMATCH, 0, now)
        yield reading(NODE, Metric.NVML, Unknown(crew.trouble) if crew.trouble else 1, now)
        if crew.stuck_since is not None:
            waited_s = since(crew.stuck_since, now) / 1e9
            yield reading(NODE, Metric.QUERY_STUCK_S, waited_s, now, detail="starting NVML")
        elif not crew.trouble:
            yield reading(NODE, Metric.QUERY_STUCK_S, 0, now)

    def _of_devices(self, now: Instant) -> Iterator[Reading]:
        owners = {id(solo.alone): solo for solo in self._solos}
        for target in self._targets:
            crew = owners.get(id(target), self._main)
            yield from self._of_device(target, crew, now)
            heard = crew.watch == "on" and crew.watch_heard_s < WATCH_SILENT_S
            why = "the driver does not return" if crew.watch == "on" else crew.watch
            state = 1 if heard and not crew.trouble else Unknown(crew.trouble or why)
            yield reading(target.device, Metric.XID_WATCH, state, now)

    def _of_device(self, target: Target, crew: Crew, now: Instant) -> Iterator[Reading]:
        device = target.device
        if target.stuck_since is not None:
            waited_s = since(target.stuck_since, now) / 1e9
            yield reading(device, Metric.QUERY_STUCK_S, waited_s, now, detail=target.stuck_in)
            yield from blind(device, f"a query has not returned: {target.stuck_in}", now)
        elif target.gone:
            yield from missing(device, f"the device is not there: {target.gone}", now)
        elif target.lost:
            yield from lost(device, target.lost, now)
        elif crew.trouble:
            yield from blind(device, crew.trouble, now)
        elif target.answer is not None:
            yield from answered(device, target.answer, target.answered_at)


def _now() -> Instant:
    return Instant(time.monotonic_ns())
