"""What is asked of NVIDIA's management library about one device, and how its answers are named.

Runs in the helper process: the standard library and the library's own bindings only.  Decides
which error means "this device does not have that"; never whether a number is good or bad.  The
names are those of `sidecar.hardware.readings.Metric`.  No dataclass here: that module alone, with
all that it imports, is a seventh of the helper's memory.
"""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import pynvml

Handle: TypeAlias = Any

ABSENT: Final = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,  # an older driver's word for a field it does not know
        25,  # argument version mismatch: a structure newer than the driver
    }
)
GPU_IS_LOST: Final = pynvml.NVML_ERROR_GPU_IS_LOST
LINKS_MAX: Final = 36
ASK_AGAIN_POLLS: Final = 120
"""What a device does not have is asked for again now and then: a driver may be updated."""

FIELD_SHUTDOWN_MARGIN: Final = 193
FIELD_RECOVERY_ACTION: Final = 230
FIELD_LINK_RECOVERIES: Final = 215
FIELD_LINK_ERRORS: Final = 219
"""Errors that were left after forward error correction, of links that no longer count CRCs."""


class Answers:
    """One round of queries.  ``lost`` is set when the driver says that the device is gone."""

    __slots__ = ("errors", "links", "lost", "unsupported", "values")

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.unsupported: list[str] = []
        self.errors: dict[str, tuple[int, str]] = {}
        self.links: dict[str, dict[int, int]] = {}
        self.lost = ""


class Target:
    """One device of this process, with what was learned about what it does not have."""

    __slots__ = ("handle", "links", "links_are_counted", "rounds", "skipped")

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.rounds = 0
        self.skipped: dict[str, int] = {}
        self.links: tuple[int, ...] = ()
        self.links_are_counted = True


Query: TypeAlias = Callable[[Handle], dict[str, float]]


def _ecc(kind: int, counter: int) -> Query:
    name = ("ecc_correctable", "ecc_uncorrectable")[kind] + ("_volatile", "_aggregate")[counter]

    def query(handle: Handle) -> dict[str, float]:
        return {name: pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, counter)}

    return query


def _remapped(handle: Handle) -> dict[str, float]:
    correctable, uncorrectable, pending, failure = pynvml.nvmlDeviceGetRemappedRows(handle)
    return {
        "remapped_correctable": correctable,
        "remapped_uncorrectable": uncorrectable,
        "remap_pending": pending,
        "remap_failure": failure,
    }


def _sram(handle: Handle) -> dict[str, float]:
    status = pynvml.c_nvmlEccSramErrorStatus_v1_t()
    pynvml.nvmlDeviceGetSramEccErrorStatus(handle, ctypes.byref(status))
    return {"sram_threshold_exceeded": status.bThresholdExceeded}


def _pcie(handle: Handle) -> dict[str, float]:
    return {"pcie_replay": pynvml.nvmlDeviceGetPcieReplayCounter(handle)}


def _temperature(handle: Handle) -> dict[str, float]:
    try:
        return {"temperature_c": pynvml.nvmlDeviceGetTemperatureV(handle, 0)}
    except AttributeError:
        return {"temperature_c": pynvml.nvmlDeviceGetTemperature(handle, 0)}
    except pynvml.NVMLError as error:
        if error.value not in ABSENT:
            raise
        return {"temperature_c": pynvml.nvmlDeviceGetTemperature(handle, 0)}


def _shutdown(handle: Handle) -> dict[str, float]:
    limit = pynvml.nvmlDeviceGetTemperatureThreshold(
        handle, pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN
    )
    return {"temperature_shutdown_c": limit}


def _margin(handle: Handle) -> dict[str, float]:
    # Newer devices count down to a limit; shutdown lies a fixed number of degrees beyond it.
    left = pynvml.nvmlDeviceGetMarginTemperature(handle)
    return {"temperature_margin_c": left - one_field(handle, FIELD_SHUTDOWN_MARGIN)}


def _power(handle: Handle) -> dict[str, float]:
    return {"power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000}  # it says milliwatts


def _throttle(handle: Handle) -> dict[str, float]:
    try:
        return {"throttle_reasons": pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)}
    except AttributeError:
        return {"throttle_reasons": pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)}
    except pynvml.NVMLError as error:
        if error.value != pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
        return {"throttle_reasons": pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)}


def _fabric(handle: Handle) -> dict[str, float]:
    summary = 0
    try:
        info = pynvml.c_nvmlGpuFabricInfo_v3_t()
        pynvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
        summary = info.healthSummary
    except AttributeError:
        info = _older_fabric(handle)
    except pynvml.NVMLError as error:
        if error.value not in ABSENT:
            raise
        info = _older_fabric(handle)
    if info.state == pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    unhealthy = 2
    finished_badly = info.state == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED and info.status != 0
    answers: dict[str, float] = {"fabric_state": info.state}
    if finished_badly or summary:
        answers["fabric_health"] = unhealthy if finished_badly else summary
    return answers


def _older_fabric(handle: Handle) -> Any:
    info = pynvml.c_nvmlGpuFabricInfo_v2_t()
    pynvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    return info


def _recovery(handle: Handle) -> dict[str, float]:
    return {"recovery_action": one_field(handle, FIELD_RECOVERY_ACTION)}


QUERIES: Final[tuple[tuple[tuple[str, ...], Query], ...]] = (
    (("temperature_c",), _temperature),
    (("temperature_shutdown_c",), _shutdown),
    (("temperature_margin_c",), _margin),
    (("ecc_uncorrectable_volatile",), _ecc(1, 0)),
    (("ecc_uncorrectable_aggregate",), _ecc(1, 1)),
    (("ecc_correctable_volatile",), _ecc(0, 0)),
    (("ecc_correctable_aggregate",), _ecc(0, 1)),
    (("sram_threshold_exceeded",), _sram),
    (
        ("remapped_correctable", "remapped_uncorrectable", "remap_pending", "remap_failure"),
        _remapped,
    ),
    (("recovery_action",), _recovery),
    (("pcie_replay",), _pcie),
    (("power_w",), _power),
    (("throttle_reasons",), _throttle),
    (("fabric_state", "fabric_health"), _fabric),
)
LINK_COUNTERS: Final = (
    ("nvlink_replay", 0),
    ("nvlink_recovery", 1),
    ("nvlink_crc_flit", 2),
    ("nvlink_crc_data", 3),
)
LINK_FIELDS: Final = (
    ("nvlink_recovery", FIELD_LINK_RECOVERIES),
    ("nvlink_crc_data", FIELD_LINK_ERRORS),
)
METRIC_NAMES: Final = tuple(name for names, _ in QUERIES for name in names) + tuple(
    name for name, _ in LINK_COUNTERS
)


def ask(target: Target, doing: Callable[[str], None]) -> Answers:
    """Ask everything about one device.  ``doing`` hears the name of each query before it starts."""
    target.rounds += 1
    answers = Answers()
    for names, query in QUERIES:
        if target.rounds < target.skipped.get(names[0], 0):
            answers.unsupported.extend(names)
            continue
        doing(names[0])
        try:
            got = query(target.handle)
        except AttributeError:
            _absent(target, answers, names)
        except pynvml.NVMLError as error:
            if error.value == GPU_IS_LOST:
                answers.lost = str(error)
                return answers
            if error.value in ABSENT:
                _absent(target, answers, names)
            else:
                answers.errors.update(dict.fromkeys(names, (error.value, str(error))))
        else:
            answers.values.update(got)
            answers.unsupported.extend(name for name in names if name not in got)
    doing("nvlink")
    try:
        _ask_links(target, answers)
    except pynvml.NVMLError as error:
        if error.value == GPU_IS_LOST:
            answers.lost = str(error)
        for name, _ in LINK_COUNTERS:
            answers.links.pop(name, None)
            answers.errors[name] = (error.value, str(error))
    return answers


def _absent(target: Target, answers: Answers, names: tuple[str, ...]) -> None:
    target.skipped[names[0]] = target.rounds + ASK_AGAIN_POLLS
    answers.unsupported.extend(names)


def _ask_links(target: Target, answers: Answers) -> None:
    if target.rounds % ASK_AGAIN_POLLS == 1:
        target.links = tuple(_active_links(target.handle))
        target.links_are_counted = True
    for link in target.links:
        for name, value in _link_values(target, link):
            answers.links.setdefault(name, {})[link] = value
    missing = [name for name, _ in LINK_COUNTERS if name not in answers.links]
    answers.unsupported.extend(missing)


def _active_links(handle: Handle) -> Iterator[int]:
    for link in range(LINKS_MAX):
        try:
            if pynvml.nvmlDeviceGetNvLinkState(handle, link):
                yield link
        except pynvml.NVMLError as error:
            if error.value in ABSENT:
                return
            raise


def _link_values(target: Target, link: int) -> Iterator[tuple[str, int]]:
    if target.links_are_counted:
        found = False
        for name, counter in LINK_COUNTERS:
            try:
                yield name, pynvml.nvmlDeviceGetNvLinkErrorCounter(target.handle, link, counter)
                found = True
            except pynvml.NVMLError as error:
                if error.value not in ABSENT:
                    raise
        if found:
            return
        target.links_are_counted = False
    values = pynvml.nvmlDeviceGetFieldValues(
        target.handle, [(field_id, link) for _, field_id in LINK_FIELDS]
    )
    for (name, _), value in zip(LINK_FIELDS, values, strict=True):
        if value.nvmlReturn == pynvml.NVML_SUCCESS:
            yield name, field_number(value)


def one_field(handle: Handle, field_id: int) -> int:
    """Return one field's value, or raise what NVML says about it."""
    value = pynvml.nvmlDeviceGetFieldValues(handle, [field_id])[0]
    if value.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(value.nvmlReturn)
    return field_number(value)


def field_number(value: Any) -> int:
    """Return a field's number by the type that the driver says it has."""
    by_type = {
        pynvml.NVML_VALUE_TYPE_DOUBLE: value.value.dVal,
        pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: value.value.uiVal,
        pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: value.value.ulVal,
        pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: value.value.ullVal,
        4: value.value.sllVal,
        5: value.value.siVal if hasattr(value.value, "siVal") else value.value.sllVal,
    }
    return int(by_type.get(value.valueType, value.value.ullVal))
