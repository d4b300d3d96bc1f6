"""The catalogue of NVIDIA's Xid codes: what each stands for, how bad it is, what to do.

Decides nothing but how a code is looked up and how a site's own opinion replaces the shipped one.
The entries are data (``xid_catalogue.yaml``), each with the document it was made after.  A code
that is not in it is its own answer: worth a look, never fatal.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from typing import Any, Final

import msgspec
import yaml

CODE_MAX: Final = 999_999
"""Largest number taken for a code; the driver's have three digits, a switch's five."""


class XidSeverity(StrEnum):
    """How much a kernel line says about the device."""

    FATAL = "fatal"
    """The device cannot be trusted with another worker until somebody acts."""
    APP = "app"
    """The process on it ends; the device itself is well."""
    FOLLOW_UP = "follow_up"
    """The echo of another error: it convicts nobody."""
    WARNING = "warning"
    """Work goes on; the device wants attention."""
    INFO = "info"
    """A note."""


class XidScope(StrEnum):
    """How much an error takes with it."""

    PROCESS = "process"
    GPU = "gpu"
    LINK = "link"
    NODE = "node"


class XidAction(StrEnum):
    """The first step.  `action_words` says it to a person."""

    NONE = "none"
    WATCH = "watch"
    SEE_CAUSE = "see_cause"
    RESTART_APP = "restart_app"
    RESTART_VM = "restart_vm"
    RESET_GPU = "reset_gpu"
    RESET_GPU_LATER = "reset_gpu_later"
    CHECK_NVLINK = "check_nvlink"
    CHECK_HARDWARE = "check_hardware"
    REPLACE_GPU = "replace_gpu"
    REBOOT_NODE = "reboot_node"
    UPDATE_SOFTWARE = "update_software"
    BY_DETAIL = "by_detail"
    FOLLOW_DRIVER = "follow_driver"


@dataclass(frozen=True, slots=True, kw_only=True)
class XidMeaning:
    """What a code stands for and what to do about it.

    ``action`` is worded, ``step`` is the same as a name.  ``chips`` are the data centre chips that
    report it, ``advice`` the first driver branch that adds an Xid 154 to it.
    """

    code: int
    meaning: str
    severity: XidSeverity
    action: str
    known: bool = True
    step: XidAction = XidAction.NONE
    scope: XidScope = XidScope.GPU
    source: str = ""
    chips: tuple[str, ...] = ()
    advice: str = ""
    overridden: bool = False
    """This site says itself how bad it is; what a line adds changes nothing."""


class NvlinkRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one unit's report means, if bit of ``status`` and ``reason`` fit (empty: any)."""

    xid: int
    units: tuple[str, ...]
    severity: XidSeverity
    action: XidAction
    status: tuple[int, ...] = ()
    reason: tuple[int, ...] = ()
    promoted: XidSeverity | None = None


class XidOverride(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A site's own opinion of one code."""

    severity: XidSeverity | None = None
    action: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """Every known code.  `with_overrides` gives another one, nothing changes in place."""

    codes: Mapping[int, XidMeaning]
    nvlink5: tuple[NvlinkRow, ...] = ()

    def meaning_of(self, code: int) -> XidMeaning:
        """Return what ``code`` stands for; one that is not known is a warning and says so."""
        known = self.codes.get(code)
        if known is not None:
            return known
        return XidMeaning(
            code=code,
            meaning="not in the catalogue",
            severity=XidSeverity.WARNING,
            action="look the code up",
            known=False,
        )

    def nvlink(self, xid: int, unit: str, status: int | None, reason: int) -> NvlinkRow | None:
        """Return the first row that fits a report of ``unit``, or None."""
        for row in self.nvlink5:
            if row.xid != xid or unit not in row.units:
                continue
            if row.status and (status is None or not any(status & bit for bit in row.status)):
                continue
            if not row.reason or reason in row.reason:
                return row
        return None

    def with_overrides(self, overrides: Mapping[int, XidOverride]) -> "Catalogue":
        """Return the catalogue with these opinions in place of the shipped ones."""
        codes = dict(self.codes)
        for code, own in overrides.items():
            before = self.meaning_of(code)
            codes[code] = XidMeaning(
                code=code,
                meaning=before.meaning if before.known else "described by this site",
                severity=own.severity or before.severity,
                action=own.action or before.action,
                step=before.step,
                scope=before.scope,
                source="this site's configuration",
                chips=before.chips,
                advice=before.advice,
                overridden=own.severity is not None,
            )
        return Catalogue(codes=codes, nvlink5=self.nvlink5)

    def fatal_codes(self) -> frozenset[int]:
        """Return the codes that are fatal by their number alone."""
        return frozenset(
            code for code, meaning in self.codes.items() if meaning.severity is XidSeverity.FATAL
        )


def action_words(step: XidAction) -> str:
    """Return an action as a person reads it."""
    return _shipped().actions[step]


@functools.cache
def shipped() -> Catalogue:
    """Return the catalogue that comes with the package."""
    body = _shipped()
    codes = {
        code: XidMeaning(
            code=code,
            meaning=entry.meaning,
            severity=entry.severity,
            action=body.actions[entry.action],
            step=entry.action,
            scope=entry.scope,
            source=body.sources[entry.source],
            chips=entry.chips,
            advice=entry.advice,
        )
        for code, entry in body.codes.items()
    }
    return Catalogue(codes=codes, nvlink5=body.nvlink5)


_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    meaning: str
    severity: XidSeverity
    scope: XidScope
    action: XidAction
    source: str
    chips: tuple[str, ...]
    advice: str = ""


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sources: dict[str, str]
    actions: dict[XidAction, str]
    codes: dict[int, _Entry]
    nvlink5: tuple[NvlinkRow, ...]


@functools.cache
def _shipped() -> _File:
    path = resources.files("sidecar.hardware") / "xid_catalogue.yaml"
    text = path.read_text(encoding="utf-8")
    body: Any = yaml.load(text, Loader=_LOADER)  # noqa: S506 - safe, and in C where it can be
    return msgspec.convert(body, _File)
