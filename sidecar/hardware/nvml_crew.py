"""One NVML helper process, the devices it looks after, and where it stands with them.

Decides when a call counts as stuck, and in which device; when a helper that failed is tried again;
and nothing about what the answers mean.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, TypeAlias

from scout.clock import Duration, Instant, after, seconds, since
from sidecar.hardware.devices import MigSlice, same
from sidecar.hardware.nvml_process import NvmlProcess
from sidecar.hardware.pci import normalise_pci
from sidecar.hardware.readings import Device

RETRY_FIRST_S: Final = 10.0
RETRY_MAX_S: Final = 600.0
"""Between attempts on a driver that refuses or does not answer, doubling from the first."""
WHERE_S: Final = 0.3
"""A helper that is stuck in a call still says which one, at once or not at all."""
OTHERS_FROM: Final = 1000
"""Ids from here are devices found by index beside those that were named by address."""

ErrorEvent: TypeAlias = tuple[Device | None, int, int | None, int]
"""Device if known, Xid, MIG instance if any, and how often it came."""

START: Final = Instant(0)
_GPU_IS_LOST: Final = 15


class Standing(StrEnum):
    """Where a helper stands."""

    DOWN = "down"
    OPENING = "opening"
    IDLE = "idle"
    ASKED = "asked"


@dataclass(slots=True)
class Target:
    """One device: how it is found, and what was last heard of it.

    At most one of ``stuck_since``, ``gone`` and ``lost`` is set.
    """

    device: Device
    slices: tuple[MigSlice, ...] = ()
    answer: Mapping[str, Any] | None = None
    answered_at: Instant = START
    answering_since: Instant | None = None
    stuck_since: Instant | None = None
    stuck_in: str = ""
    gone: str = ""
    lost: str = ""

    def heard(self, answer: Mapping[str, Any], at: Instant) -> None:
        """Take one round's answer."""
        if self.answering_since is None:
            self.answering_since = at
        self.answer, self.answered_at = answer, at
        self.stuck_since, self.stuck_in, self.gone, self.lost = None, "", "", ""

    def refused(self, code: int, text: str) -> None:
        """Take that the device cannot be opened."""
        self.answer = self.answering_since = self.stuck_since = None
        self.lost, self.gone = (text, "") if code == _GPU_IS_LOST else ("", text)

    def stuck(self, since_when: Instant, where: str) -> None:
        """Take that a call about the device has not returned."""
        self.answer = self.answering_since = None
        self.gone = self.lost = ""
        self.stuck_since = self.stuck_since or since_when
        self.stuck_in = where or self.stuck_in


@dataclass(slots=True, kw_only=True)
class Crew:
    """``find`` returns the target for an identity; ``heard`` is told when the process speaks."""

    find: Callable[[Device], Target]
    heard: Callable[[bool], None]
    timeout: Duration
    alone: Target | None = None
    standing: Standing = Standing.DOWN
    members: dict[int, Target] = field(default_factory=dict)
    trouble: str = "not asked yet"
    failed_with: int | None = None
    stuck_since: Instant | None = None
    watch: str = "not started"
    watch_heard_s: float = 0.0
    finished_round: int = 0
    started_at: Instant = START
    _retry_at: Instant | None = None
    _retry_s: float = RETRY_FIRST_S
    _process: NvmlProcess | None = None
    _touching: int | None = None
    _events_left: list[ErrorEvent] = field(default_factory=list)

    @property
    def pid(self) -> int | None:
        """The helper's process id while it runs."""
        return None if self._process is None else self._process.pid

    def due(self, now: Instant) -> bool:
        """Whether a helper should be started now."""
        return self._process is None and (self._retry_at is None or now >= self._retry_at)

    def start(self, spec: Mapping[str, Any], members: Mapping[int, Target], now: Instant) -> None:
        """Start a helper that opens the devices of ``spec``."""
        self.members = dict(members)
        self.standing, self.started_at, self._touching = Standing.OPENING, now, None
        self.watch = "not started"
        self._process = NvmlProcess(dict(spec), self.heard)

    def advance(self, round_id: int) -> bool:
        """Take what was said and ask if there is nothing to wait for.  True when nothing is."""
        if self._process is None:
            return True
        ended = self._process.ended
        for message in self._process.take():
            self._take(message)
        if self._process is None:
            return True
        if ended:
            self._fail(f"the NVML helper {self._process.exit_text}")
            return True
        if self.standing is Standing.IDLE:
            if self.finished_round == round_id:
                return True
            if self._process.send({"round": round_id}):
                self.standing = Standing.ASKED
        return False

    @property
    def is_stuck(self) -> bool:
        """Whether the helper has been silent for longer than a call may take."""
        waiting = self.standing in (Standing.OPENING, Standing.ASKED)
        return (
            waiting
            and self._process is not None
            and since(self._process.heard_at, Instant(time.monotonic_ns())) >= self.timeout
        )

    def give_up(self) -> tuple[NvmlProcess, Target | None]:
        """End a stuck helper.  Returns the process, which may not die, and the device to blame."""
        process = self._process
        assert process is not None
        silent_since = process.heard_at
        where = self._where(process)
        target = None if self._touching is None else self.members.get(self._touching)
        if target is None and self._touching is not None:
            target = self.find(Device(index=self._touching % OTHERS_FROM))
        if target is not None:
            target.stuck(silent_since, where)
        else:
            self.stuck_since = self.stuck_since or silent_since
        self._fail(f"a query has not returned: {where or 'nobody knows which'}")
        return process, target

    def stop(self) -> None:
        """End the helper; it may be started again at once."""
        if self._process is not None:
            self._process.kill()
            self._events_left.extend(self._events_of(self._process))
        self._process, self.standing, self._retry_at = None, Standing.DOWN, None

    def events(self) -> list[ErrorEvent]:
        """Return the error events since the last call, also of a helper that was ended."""
        events, self._events_left = self._events_left, []
        return events if self._process is None else [*events, *self._events_of(self._process)]

    def _events_of(self, process: NvmlProcess) -> Iterator[ErrorEvent]:
        for (device_id, code, instance), count in process.take_events().items():
            member = None if device_id is None else self.members.get(device_id)
            yield None if member is None else member.device, code, instance, count

    # --- what the helper says -----------------------------------------------------------------

    def _take(self, message: Mapping[str, Any]) -> None:
        now = Instant(time.monotonic_ns())
        if "step" in message:
            self._touching = message["step"]
        elif "hello" in message:
            self._touching = None
            self.standing = Standing.IDLE
            for entry in message["hello"]:
                self._met(entry)
        elif "values" in message:
            self.members[message["id"]].heard(message, now)
        elif "done" in message:
            self._touching = None
            self.standing, self.finished_round = Standing.IDLE, message["round"]
            self.trouble, self.failed_with, self.stuck_since = "", None, None
            self._retry_s = RETRY_FIRST_S
            self.watch, self.watch_heard_s = message["watch"], message["heard_s"]
        elif "failed" in message:
            code, text = message["failed"]
            self._fail(text)
            self.failed_with = code

    def _met(self, entry: Mapping[str, Any]) -> None:
        known = self.members.get(entry["id"])
        if "error" in entry:
            target = known or self.find(Device(index=entry["id"] % OTHERS_FROM))
            target.refused(*entry["error"])
            return
        device = Device(index=entry["index"], uuid=entry["uuid"], pci=normalise_pci(entry["pci"]))
        target = known if known and same(known.device, device) else self.find(device)
        # The index of the first sight stays: others may have dropped out before this one.
        index = target.device.index if target.device.uuid else device.index
        target.device = Device(index=index, uuid=device.uuid, pci=device.pci)
        target.slices = tuple(
            MigSlice(uuid=uuid, gpu_instance=gpu, compute_instance=compute)
            for uuid, gpu, compute in entry["mig"]
        )
        self.members[entry["id"]] = target

    def _where(self, process: NvmlProcess) -> str:
        if not process.send({"where": True}):
            return ""
        deadline = after(Instant(time.monotonic_ns()), seconds(WHERE_S))
        while time.monotonic_ns() < deadline:
            for message in process.take():
                if "doing" in message:
                    return str(message["doing"])
            time.sleep(0.01)
        return ""

    def _fail(self, reason: str) -> None:
        self.stop()
        self.trouble = reason
        self._retry_at = after(Instant(time.monotonic_ns()), seconds(self._retry_s))
        self._retry_s = min(self._retry_s * 2, RETRY_MAX_S)

    def start_again_at_once(self) -> None:
        """Waive the back-off, because what it waited for is out of the way."""
        self._retry_at, self._retry_s = None, RETRY_FIRST_S
