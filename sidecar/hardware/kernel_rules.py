"""Kernel lines that are no Xid: which there are, and how bad each is.

A table of patterns, each anchored at the start of what the kernel said.  Decides what one line
means and nothing about several.  Where a line names its device or process, so does the note.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from sidecar.hardware.catalogue import XidSeverity
from sidecar.hardware.kernel_events import KernelKind, KernelNote
from sidecar.hardware.pci import normalise_pci

_FATAL, _APP, _WARNING, _INFO = (
    XidSeverity.FATAL,
    XidSeverity.APP,
    XidSeverity.WARNING,
    XidSeverity.INFO,
)
_ADDRESS: Final = r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]"
_SPEAKER: Final = rf"(?P<driver>[\w-]{{2,32}}) (?P<pci>{_ADDRESS})"
_TEXT_CHARS_MAX: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One kind of line.  ``needs`` is a word without which the pattern is not tried.

    ``subject`` may use the pattern's groups.  ``judge`` decides where the words do.
    """

    kind: KernelKind
    severity: XidSeverity
    needs: str
    pattern: re.Pattern[str]
    meaning: str
    subject: str = "node"
    judge: Callable[[re.Match[str]], XidSeverity] | None = field(default=None, repr=False)


def _rule(  # noqa: PLR0917 - the rows of a table
    kind: KernelKind,
    severity: XidSeverity,
    needs: str,
    pattern: str,
    meaning: str,
    subject: str = "node",
    judge: Callable[[re.Match[str]], XidSeverity] | None = None,
) -> Rule:
    return Rule(
        kind=kind,
        severity=severity,
        needs=needs,
        pattern=re.compile(pattern, re.DOTALL),
        meaning=meaning,
        subject=subject,
        judge=judge,
    )


def _pcie(found: re.Match[str]) -> XidSeverity:
    """Fatal where the link itself is not to be trusted any more; the rest was handled."""
    return _FATAL if found["how"] == "Fatal" else _WARNING


def _machine_check(found: re.Match[str]) -> XidSeverity:
    return _FATAL if found["word"] in ("fatal", "panic", "UE") else _WARNING


_GPU: Final = (
    _rule(KernelKind.GPU_LOST, _FATAL, "fallen off the bus",
          rf"NVRM: GPU (?:at )?(?:PCI:)?(?P<pci>{_ADDRESS}|[0-9a-fA-F:]{{7,16}}): "
          r"GPU has fallen off the bus", "the GPU has fallen off the bus", "gpu {pci}"),
    _rule(KernelKind.GPU_LOST, _FATAL, "off the bus",
          r"NVRM: (?:\(PCI ID: [^)]{1,32}\) )?(?:installed in this system has )?"
          r"fallen off the bus", "the GPU has fallen off the bus", "gpu"),
    _rule(KernelKind.GPU_INIT, _FATAL, "RmInitAdapter failed",
          rf"NVRM: GPU (?P<pci>{_ADDRESS}): RmInitAdapter failed",
          "the driver could not initialise the GPU", "gpu {pci}"),
    _rule(KernelKind.DRIVER_MISMATCH, _WARNING, "API mismatch", r"NVRM: API mismatch",
          "driver library and kernel module differ; running jobs go on, the next start here fails "
          "until the machine is restarted", "driver"),
)  # fmt: skip
_NET: Final = (
    _rule(KernelKind.LINK_DOWN, _WARNING, "Port:",
          rf"{_SPEAKER}:? (?P<port>[\w-]{{1,32}}): Port: (?P<number>\d{{1,3}}) "
          r"Link (?:DOWN|INIT|ARMED)", "the link went down", "port {port}:{number}"),
    _rule(KernelKind.LINK_UP, _INFO, "Port:",
          rf"{_SPEAKER}:? (?P<port>[\w-]{{1,32}}): Port: (?P<number>\d{{1,3}}) Link ACTIVE",
          "the link came up", "port {port}:{number}"),
    _rule(KernelKind.LINK_DOWN, _WARNING, "ink",
          rf"{_SPEAKER}:? (?P<port>[\w.@-]{{1,32}}): (?:NIC )?[Ll]ink (?:is )?[Dd]own",
          "the link went down", "port {port}"),
    _rule(KernelKind.LINK_UP, _INFO, "ink",
          rf"{_SPEAKER}:? (?P<port>[\w.@-]{{1,32}}): (?:NIC )?[Ll]ink (?:is )?[Uu]p",
          "the link came up", "port {port}"),
    _rule(KernelKind.NIC, _INFO, "insufficient power",
          rf"{_SPEAKER}.{{0,80}}?Detected insufficient power",
          "little power on the slot, as is common while the machine starts", "nic {pci}"),
    _rule(KernelKind.NIC, _WARNING, "Port module event",
          rf"{_SPEAKER}.{{0,80}}?Port module event\[error\]",
          "the cable or its module reports an error", "nic {pci}"),
    _rule(KernelKind.NIC, _WARNING, "Port module event",
          rf"{_SPEAKER}.{{0,80}}?Port module event: module \d{{1,3}}, Cable unplugged",
          "a cable was pulled", "nic {pci}"),
    _rule(KernelKind.NIC, _FATAL, "mlx5",
          rf"{_SPEAKER}.{{0,120}}?(?:device's health compromised|Fatal error \d{{1,5}} detected"
          r"|handling bad device here|health recovery failed|failed reclaiming pages"
          r"|device is in an? (?:internal )?error state)",
          "the network card has lost its health", "nic {pci}"),
    _rule(KernelKind.NIC, _WARNING, "mlx5",
          rf"{_SPEAKER}.{{0,120}}?(?:[Hh]igh [Tt]emperature|\btimeout\b.{{0,40}}leak of a command"
          r"|firmware internal error|synd 0x[1-9a-f])",
          "the network card reports trouble", "nic {pci}"),
    _rule(KernelKind.NIC, _WARNING, "NETDEV WATCHDOG",
          r"NETDEV WATCHDOG: (?:CPU: \d{1,5}: )?(?P<port>[\w.@-]{1,32})[ :(]",
          "a send queue of the network card does not empty", "port {port}"),
    _rule(KernelKind.NIC, _WARNING, "ena ",
          rf"{_SPEAKER}.{{0,80}}?(?:Keep alive watchdog timeout|Trigger reset is on)",
          "the network card is being reset", "nic {pci}"),
)  # fmt: skip
_OOM: Final = (
    _rule(KernelKind.OOM_KILL, _APP, "oom-kill:",
          r"oom-kill:constraint=CONSTRAINT_(?P<constraint>\w{1,32}),.{0,3000}?"
          r"task=(?P<name>.{0,32}),pid=(?P<pid>\d{1,10}),uid=", "the kernel's OOM killer chose it",
          "pid {pid}"),
    _rule(KernelKind.OOM_KILL, _APP, "Kill",
          r"(?:(?P<group>Memory cgroup out of memory): |Out of memory(?: \([^)]{1,64}\))?: )?"
          r"Kill(?:ed)? process (?P<pid>\d{1,10}),? (?:UID \d{1,10}, )?\((?P<name>.{0,64}?)\),?"
          r"(?: (?:UID[: ]|total-vm|score)|$)", "the kernel's OOM killer ended it", "pid {pid}"),
    _rule(KernelKind.OOM_KILL, _APP, "oom_reaper: reaped",
          r"oom_reaper: reaped process (?P<pid>\d{1,10}) \((?P<name>.{0,64})\),",
          "the kernel's OOM killer took its memory", "pid {pid}"),
)  # fmt: skip
_STORAGE: Final = (
    _rule(KernelKind.READ_ONLY, _FATAL, "ead-only",
          r"(?:EXT[234]|F2FS|JBD2)-fs \((?P<fs>[\w.:/-]{1,64})\): (?:error|)?.{0,80}?"
          r"Remounting filesystem read-only",
          "the file system can only be read any more: no checkpoint can be written", "fs {fs}"),
    _rule(KernelKind.READ_ONLY, _FATAL, "readonly",
          r"BTRFS\b.{0,40}\(device (?P<fs>[\w.:/-]{1,64})(?: state \w{1,8})?\).{0,80}"
          r"forced readonly",
          "the file system can only be read any more: no checkpoint can be written", "fs {fs}"),
    _rule(KernelKind.READ_ONLY, _FATAL, "XFS",
          r"XFS \((?P<fs>[\w.:/-]{1,64})\): .{0,200}?(?:[Ss]hutting down filesystem"
          r"|[Ff]ilesystem has been shut down|xfs_do_force_shutdown)",
          "the file system shut itself down: no checkpoint can be written", "fs {fs}"),
    _rule(KernelKind.DISK, _WARNING, "EXT4-fs error",
          r"EXT4-fs error \(device (?P<fs>[\w.:/-]{1,64})\)", "the file system has an error",
          "fs {fs}"),
    _rule(KernelKind.DISK, _WARNING, "Aborting journal",
          r"Aborting journal on device (?P<fs>[\w.:/-]{1,64}?)[.]?$",
          "the file system gave up its journal", "fs {fs}"),
    _rule(KernelKind.DISK, _FATAL, "nvme",
          r"nvme (?P<disk>nvme\d{1,4}): (?:Removing after probe failure"
          r"|Device not ready; aborting|Disabling device after reset failure"
          r"|Remove after probe failure)", "the disk is gone", "disk {disk}"),
    _rule(KernelKind.DISK, _WARNING, "nvme",
          r"nvme (?P<disk>nvme\d{1,4}): (?:I/O (?:tag )?\d{1,6}.{0,40}timeout"
          r"|controller is down; will reset|Abort status|failed to|Identify .{0,40}failed)",
          "the disk does not answer in time", "disk {disk}"),
    _rule(KernelKind.DISK, _WARNING, "rror",
          r"(?:blk_update_request: |print_req_error: )?(?:Buffer )?"
          r"(?:[Cc]ritical (?:medium|target) error|I/O error|protection error)(?: on)?,? "
          r"(?:logical block \d{1,20} on )?"
          r"dev(?:ice)? (?P<disk>[\w.:/-]{1,64}?)(?:,|$)", "the disk has an error", "disk {disk}"),
    _rule(KernelKind.STORAGE_STALL, _WARNING, "not respond",
          r"nfs4?: server (?P<server>\S{1,255}) not responding",
          "storage does not answer", "storage {server}"),
    _rule(KernelKind.STORAGE_BACK, _INFO, "nfs", r"nfs4?: server (?P<server>\S{1,255}) OK",
          "storage answers again", "storage {server}"),
    _rule(KernelKind.STORAGE_STALL, _WARNING, "ustre",
          r"Lustre(?:Error)?: .{0,300}?(?P<server>[\w-]{1,64}): Connection to .{0,300}? was lost",
          "storage does not answer", "storage {server}"),
    _rule(KernelKind.STORAGE_BACK, _INFO, "ustre",
          r"Lustre: .{0,300}?(?P<server>[\w-]{1,64}): Connection restored to",
          "storage answers again", "storage {server}"),
    _rule(KernelKind.STORAGE_STALL, _WARNING, "ustre",
          r"LustreError: .{0,300}?(?P<server>[\w-]{1,64}): This client was evicted by",
          "storage shut this client out", "storage {server}"),
    _rule(KernelKind.STORAGE_STALL, _WARNING, "CIFS",
          r"CIFS: (?:VFS: )?(?P<server>\\\\\S{1,255}) has not responded",
          "storage does not answer", "storage {server}"),
    _rule(KernelKind.STORAGE_STALL, _WARNING, "ceph",
          r"(?:lib)?ceph: .{0,64}?(?P<server>(?:mds|osd|mon)\d{1,6}) .{0,120}?"
          r"(?:hung|down|socket closed|session lost|caps stale)",
          "storage does not answer", "storage {server}"),
    _rule(KernelKind.STORAGE_BACK, _INFO, "ceph",
          r"(?:lib)?ceph: .{0,64}?(?P<server>(?:mds|osd|mon)\d{1,6}) .{0,120}?"
          r"(?:came back|recovery completed|reconnect success|session established| up$)",
          "storage answers again", "storage {server}"),
)  # fmt: skip
_HARDWARE: Final = (
    _rule(KernelKind.PCIE, _WARNING, "AER:",
          rf"(?P<driver>[\w-]{{2,32}}) {_ADDRESS}: AER: (?:Multiple )?"
          r"(?P<what>Uncorrect\w{2,4}|Correct\w{2,4}) (?:\((?P<how>Fatal|Non-Fatal)\) )?error "
          rf"(?:message )?received(?::| from) (?P<pci>{_ADDRESS})",
          "PCI Express error", "pcie {pci}", _pcie),
    _rule(KernelKind.PCIE, _WARNING, "PCIe Bus Error",
          rf"{_SPEAKER}: (?:AER: )?PCIe Bus Error: severity="
          r"(?P<what>Uncorrect\w{2,4}|Correct\w{2,4})(?: \((?P<how>Fatal|Non-Fatal)\))?",
          "PCI Express error", "pcie {pci}", _pcie),
    _rule(KernelKind.PCIE, _WARNING, "recover",
          rf"{_SPEAKER}: AER: (?:can't recover|device recovery failed)",
          "a PCI Express error could not be recovered from", "pcie {pci}"),
    _rule(KernelKind.PCIE, _WARNING, "DPC:",
          rf"{_SPEAKER}: DPC: (?:containment event|unmasked uncorrectable error)",
          "a port was shut to contain a PCI Express error", "pcie {pci}"),
    _rule(KernelKind.PCIE, _WARNING, "pciehp",
          rf"(?:pcieport )?(?P<pci>{_ADDRESS}): pciehp: Slot\([^)]{{1,16}}\): "
          r"(?:Link Down|Card not present)", "a PCI Express device went away", "pcie {pci}"),
    _rule(KernelKind.MACHINE_CHECK, _WARNING, "Hardware Error",
          r"mce: \[Hardware Error\]: Machine check events logged",
          "the processor logged an error that it corrected", "processor"),
    _rule(KernelKind.MACHINE_CHECK, _FATAL, "Machine Check",
          r"mce: \[Hardware Error\]: CPU \d{1,5}: Machine Check Exception",
          "the processor has an error that it could not correct", "processor"),
    _rule(KernelKind.MACHINE_CHECK, _WARNING, "event severity",
          r"(?:\{\d{1,9}\})?\[Hardware Error\]: event severity: (?P<word>\w{1,16})",
          "the firmware reports a hardware error", "firmware", _machine_check),
    _rule(KernelKind.MACHINE_CHECK, _WARNING, "EDAC",
          r"EDAC \S{1,16}: \d{1,9} (?P<word>CE|UE) ", "error in the machine's memory", "memory",
          _machine_check),
    _rule(KernelKind.MACHINE_CHECK, _FATAL, "ncorrected hardware memory error",
          r"(?:mce: )?Uncorrected hardware memory error", "error in the machine's memory",
          "memory"),
    _rule(KernelKind.MEMORY_FAILURE, _FATAL, "hardware memory corruption",
          r"(?:Memory failure|MCE) ?:? ?0x[0-9a-f]{1,16}: (?:Killing|Sending SIGBUS to) "
          r"(?P<name>.{1,64}):(?P<pid>\d{1,10}) due to hardware memory corruption",
          "the process held a page that the machine's memory lost", "memory"),
    _rule(KernelKind.MACHINE_CHECK, _FATAL, "critical temperature reached",
          r"thermal thermal_zone\d{1,4}: .{0,60}?critical temperature reached",
          "the machine is so hot that it switches itself off", "machine"),
    _rule(KernelKind.MACHINE_CHECK, _WARNING, "temperature above threshold",
          r"(?:mce: )?CPU ?\d{1,5}: (?:Core|Package) temperature above threshold",
          "the processor is too hot and slows down", "processor"),
)  # fmt: skip
_HANG: Final = (
    _rule(KernelKind.HUNG_TASK, _WARNING, "blocked for more than",
          r"INFO: task (?P<name>.{1,64}):(?P<pid>\d{1,10}) blocked for more than "
          r"(?P<seconds>\d{1,9}) seconds",
          "the process waits in the kernel and cannot even be killed", "pid {pid}"),
    _rule(KernelKind.LOCKUP, _WARNING, "soft lockup",
          r"(?:NMI )?(?:watchdog: )?BUG: soft lockup - CPU#(?P<cpu>\d{1,5}) stuck for "
          r"(?P<seconds>\d{1,9})s! \[(?P<name>.{1,64}):(?P<pid>\d{1,10})\]",
          "a processor does not leave the kernel", "cpu {cpu}"),
    _rule(KernelKind.LOCKUP, _FATAL, "ard LOCKUP",
          r"(?:NMI )?watchdog: .{0,40}?[Hh]ard LOCKUP on cpu (?P<cpu>\d{1,5})",
          "a processor answers no interrupts", "cpu {cpu}"),
    _rule(KernelKind.RCU_STALL, _WARNING, "stall",
          r"(?:rcu: )?INFO: rcu_\w{1,16} (?:self-)?detected (?:expedited )?stalls?\b",
          "a processor holds up the kernel's housekeeping", "kernel"),
    _rule(KernelKind.KERNEL_BUG, _FATAL, "Kernel panic", r"Kernel panic - not syncing",
          "the kernel gave up", "kernel"),
    _rule(KernelKind.KERNEL_BUG, _WARNING, "BUG:",
          r"BUG: (?:unable to handle|kernel NULL pointer)", "the kernel made an error", "kernel"),
    _rule(KernelKind.KERNEL_BUG, _WARNING, "kernel BUG at", r"kernel BUG at ",
          "the kernel made an error", "kernel"),
    _rule(KernelKind.PROCESS_FAULT, _APP, "segfault at",
          r"(?P<name>.{1,64})\[(?P<pid>\d{1,10})\]: segfault at ",
          "the process reached for memory that is not its own", "pid {pid}"),
    _rule(KernelKind.PROCESS_FAULT, _APP, "traps:",
          r"traps: (?P<name>.{1,64})\[(?P<pid>\d{1,10})\] (?:general protection|trap )",
          "the process did something invalid", "pid {pid}"),
)  # fmt: skip


RULES: Final = (*_GPU, *_NET, *_OOM, *_STORAGE, *_HARDWARE, *_HANG)

_KEPT: Final[tuple[str, ...]] = (
    "constraint",
    "group",
    "how",
    "what",
    "seconds",
    "cpu",
    "port",
    "number",
    "server",
)


def read_note(text: str) -> KernelNote | None:
    """Return what a line says that is no Xid, or None when it is about nothing we know."""
    for rule in RULES:
        if rule.needs not in text:
            continue
        found = rule.pattern.match(text)
        if found is not None:
            return _note(rule, found, text)
    return None


def _note(rule: Rule, found: re.Match[str], text: str) -> KernelNote:
    groups = {name: value for name, value in found.groupdict().items() if value is not None}
    pci = normalise_pci(groups["pci"]) if "pci" in groups else None
    if pci is not None:
        groups["pci"] = pci
    detail: dict[str, str] = {name: groups[name] for name in _KEPT if name in groups}
    if detail.pop("group", None) is not None:
        detail["constraint"] = "MEMCG"
    return KernelNote(
        kind=rule.kind,
        severity=rule.severity if rule.judge is None else rule.judge(found),
        meaning=rule.meaning,
        subject=rule.subject.format_map(groups),
        text=text[:_TEXT_CHARS_MAX],
        pci=pci,
        driver=groups.get("driver", ""),
        pid=int(groups["pid"]) if "pid" in groups else None,
        process=groups.get("name"),
        detail=detail,
    )
