"""The process that talks to NVIDIA's management library, so that it can be killed when stuck.

Decides nothing: it answers one request with one round of readings, says which device it is about
to touch before it touches it, and passes on the driver's error events.  It ends when its parent
does.  Line protocol: a JSON object per line; requests come on standard input, answers go out on
standard output.
"""

import ctypes
import json
import os
import queue
import sys
import threading
import time
from typing import Any, Final

import pynvml

from sidecar.hardware.nvml_queries import Target, ask

EVENT_WAIT_MS: Final = 2000
EVENT_RETRY_S: Final = 5.0
MIG_DEVICES_MAX: Final = 8
NO_INSTANCE: Final = 0xFFFFFFFF


class Helper:
    """The devices that this process looks after, and the one pipe that it speaks on."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self._targets: list[tuple[int, Target]] = []
        self._requests: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._doing = "nvmlInit"
        self._watch = "not started"
        self._heard_at = time.monotonic()
        # The library may print; what it prints must not end up between our lines.
        self._out = os.dup(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def run(self) -> None:
        """Open the devices, say which they are, and answer until the parent is gone."""
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            pynvml.nvmlInit()
            devices = self._open()
        except pynvml.NVMLError as error:
            self._say(failed=[error.value, str(error)])
            return
        self._say(hello=devices)
        while True:
            round_id = self._requests.get()
            for device_id, target in self._targets:
                self._say(step=device_id)
                found = ask(target, self._now_doing)
                self._say(
                    round=round_id,
                    id=device_id,
                    values=found.values,
                    unsupported=found.unsupported,
                    errors=found.errors,
                    links=found.links,
                    lost=found.lost,
                )
            self._now_doing("nothing")
            if self._watch == "not started":
                self._watch = "starting"
                threading.Thread(target=self._watch_events, daemon=True).start()
            heard_s = time.monotonic() - self._heard_at
            self._say(round=round_id, done=True, watch=self._watch, heard_s=heard_s)

    # --- devices ------------------------------------------------------------------------------

    def _open(self) -> list[dict[str, Any]]:
        """Open what the spec names: by address, by index, or whatever else there is."""
        devices = []
        known = set()
        wanted: list[tuple[int, Any, Any]] = [
            (place, self._by_pci, pci) for place, pci in enumerate(self._spec.get("pci", ()))
        ]
        wanted += [(index, self._by_index, index) for index in self._spec.get("index", ())]
        for device_id, find, name in wanted:
            self._say(step=device_id)
            entry = self._identity(device_id, find, name)
            known.add(entry.get("uuid"))
            devices.append(entry)
        others_from = self._spec.get("others")
        if others_from is None:
            return devices
        for index in range(pynvml.nvmlDeviceGetCount()):
            if index in self._spec.get("skip", ()):
                continue
            device_id = others_from + index
            self._say(step=device_id)
            entry = self._identity(device_id, self._by_index, index)
            if "error" in entry or entry["uuid"] not in known:
                devices.append(entry)
            else:
                self._targets.pop()
        return devices

    def _identity(self, device_id: int, find: Any, name: Any) -> dict[str, Any]:
        try:
            handle = find(name)
            self._now_doing("identity")
            entry = {
                "id": device_id,
                "index": pynvml.nvmlDeviceGetIndex(handle),
                "uuid": _text(pynvml.nvmlDeviceGetUUID(handle)),
                "pci": _text(pynvml.nvmlDeviceGetPciInfo(handle).busId),
                "mig": _mig_devices(handle),
            }
            self._targets.append((device_id, Target(handle=handle)))
        except pynvml.NVMLError as error:
            return {"id": device_id, "error": [error.value, str(error)]}
        return entry

    def _by_index(self, index: int) -> Any:
        self._now_doing("nvmlDeviceGetHandleByIndex")
        return pynvml.nvmlDeviceGetHandleByIndex(index)

    def _by_pci(self, pci: str) -> Any:
        self._now_doing("nvmlDeviceGetHandleByPciBusId")
        return pynvml.nvmlDeviceGetHandleByPciBusId(pci.encode())

    # --- error events -------------------------------------------------------------------------

    def _watch_events(self) -> None:
        """Wait for Xids for ever.  A wait that never returns blinds this thread alone."""
        while True:
            try:
                self._wait_events()
            except pynvml.NVMLError as error:
                self._watch = str(error)
            time.sleep(EVENT_RETRY_S)

    def _wait_events(self) -> None:
        ids: dict[int | None, int] = {}
        events = pynvml.nvmlEventSetCreate()
        try:
            refused = ""
            for device_id, target in self._targets:
                try:
                    pynvml.nvmlDeviceRegisterEvents(
                        target.handle, pynvml.nvmlEventTypeXidCriticalError, events
                    )
                    ids[_address(target.handle)] = device_id
                except pynvml.NVMLError as error:
                    refused = str(error)
            if not ids:
                self._watch = refused or "no device has error events"
                return
            self._watch = "on"
            while True:
                self._heard_at = time.monotonic()
                try:
                    event = pynvml.nvmlEventSetWait_v2(events, EVENT_WAIT_MS)
                except pynvml.NVMLError_Timeout:
                    continue
                gone = event.eventType != pynvml.nvmlEventTypeXidCriticalError
                if not gone:
                    instance = event.gpuInstanceId
                    self._say(
                        xid=event.eventData,
                        id=ids.get(_address(event.device)),
                        instance=None if instance == NO_INSTANCE else instance,
                    )
        finally:
            pynvml.nvmlEventSetFree(events)

    # --- the pipe -----------------------------------------------------------------------------

    def _listen(self) -> None:
        for line in sys.stdin:
            request = json.loads(line)
            if "where" in request:
                # NVML calls run without the interpreter's lock, so this answers even now.
                self._say(doing=self._doing)
            else:
                self._requests.put(request["round"])
        # The parent is gone; a call that never returns must not keep this process.
        os._exit(0)

    def _say(self, **message: Any) -> None:
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            while line:
                line = line[os.write(self._out, line) :]

    def _now_doing(self, name: str) -> None:
        self._doing = name


def _mig_devices(handle: Any) -> list[list[Any]]:
    try:
        count = min(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle), MIG_DEVICES_MAX)
    except (pynvml.NVMLError, AttributeError):
        return []
    found = []
    for number in range(count):
        try:
            piece = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            found.append(
                [
                    _text(pynvml.nvmlDeviceGetUUID(piece)),
                    pynvml.nvmlDeviceGetGpuInstanceId(piece),
                    pynvml.nvmlDeviceGetComputeInstanceId(piece),
                ]
            )
        except pynvml.NVMLError:
            continue
    return found


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def main() -> None:
    """Serve one parent.  The first argument says which devices, as JSON."""
    try:
        Helper(json.loads(sys.argv[1])).run()
    except BrokenPipeError:
        return  # the parent went away between two lines
