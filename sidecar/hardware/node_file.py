"""The ``health`` section of a node's file: limits of the judgement, and further sources.

Decides which of them can be used; every refusal names the field and the reason.  It opens no
source: an exporter that is not up yet is no mistake of the file.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

from sidecar.field_errors import explained
from sidecar.hardware.dcgm import DcgmExporterSource
from sidecar.hardware.sources import FileSource, HealthSource
from sidecar.hardware.thresholds import HealthConfig

FILES_MAX: Final = 16
"""Files of other health agents on one node; each is read by a thread of its own."""
_ELSEWHERE: Final[Mapping[str, str]] = {
    "fatalXids": "say it under `xids`, code by code",
    "ignoredXids": "say it under `xids`, code by code",
}


class HealthSectionError(ValueError):
    """The section cannot be used; the text is ``field: reason``."""


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


THRESHOLDS: Final[Mapping[str, str]] = {
    _camel(field.name): field.name
    for field in dataclasses.fields(HealthConfig)
    if _camel(field.name) not in _ELSEWHERE
}
"""How a limit is spelled in a file, and the field of `HealthConfig` that it sets."""


class HealthSection(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"
):
    """What a node's file says about its hardware.

    ``thresholds`` holds fields of `HealthConfig` in camel case.  ``dcgmExporter`` is the URL of a
    dcgm-exporter's metrics page, scraped beside NVML.  ``files`` are followed for readings, and for
    a Kubernetes node's labels and conditions, one JSON object a line.
    """

    thresholds: dict[str, Any] = {}
    dcgm_exporter: str | None = None
    files: Annotated[tuple[str, ...], msgspec.Meta(max_length=FILES_MAX)] = ()

    def config(self, fatal_xids: frozenset[int]) -> HealthConfig:
        """Return the limits, with the codes that the catalogue calls fatal.

        Raises `HealthSectionError` for a limit that is none.
        """
        given: dict[str, Any] = {}
        for name, value in self.thresholds.items():
            given[_known(name)] = value
        try:
            config = msgspec.convert(given, HealthConfig)
        except msgspec.ValidationError as error:
            raise HealthSectionError(_worded(str(error), given)) from None
        if config.unknown_after_s <= config.poll_interval_s:
            raise HealthSectionError(
                f"thresholds.unknownAfterS ({config.unknown_after_s:g}) must be above "
                f"pollIntervalS ({config.poll_interval_s:g}), or nothing is known between readings"
            )
        return dataclasses.replace(config, fatal_xids=fatal_xids)

    def sources(self) -> list[HealthSource]:
        """Return the further sources.  Raises `HealthSectionError` for an address that is none."""
        found: list[HealthSource] = []
        if self.dcgm_exporter is not None:
            try:
                found.append(DcgmExporterSource(self.dcgm_exporter))
            except ValueError as error:
                raise HealthSectionError(f"dcgmExporter: {error}") from None
        if len(set(self.files)) != len(self.files):
            raise HealthSectionError("files: one of them stands there twice")
        for number, path in enumerate(self.files):
            if not path:
                raise HealthSectionError(f"files[{number}]: a path must not be empty")
            found.append(FileSource(path, name=f"file:{path}"))
        return found


def _known(name: str) -> str:
    if name in THRESHOLDS:
        return THRESHOLDS[name]
    hint = _ELSEWHERE.get(name)
    if hint is None:
        close = difflib.get_close_matches(name, THRESHOLDS, n=1)
        hint = (
            f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(THRESHOLDS))}"
        )
    raise HealthSectionError(f"thresholds.{name}: no such threshold; {hint}")


def _worded(text: str, given: Mapping[str, Any]) -> str:
    """Turn msgspec's words, or those of `HealthConfig` itself, into ``field: reason``."""
    field, reason = explained(text, given, HealthConfig)
    told = f"thresholds.{field}: {reason}" if field else f"thresholds: {reason}"
    for camel, name in sorted(THRESHOLDS.items(), key=lambda pair: -len(pair[1])):
        told = told.replace(name, camel)
    return told
