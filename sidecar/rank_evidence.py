"""What a rank looked like before it was stopped: vocabulary of `sidecar.api.EvidenceReport`."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadStack:
    """One thread of a worker.  ``frames`` are ``function (file:line)``, the innermost first."""

    name: str
    main: bool
    frames: tuple[str, ...]
    active: bool = False
    """It was running, not waiting."""
    holds_gil: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """What the kernel says of a worker's process.  None is "not known"."""

    state: str
    """The letter of ``/proc/<pid>/stat``."""
    waits_in: str | None = None
    """The kernel function in which the main thread sleeps."""
    threads: int | None = None
    resident_bytes: int | None = None
    open_files: int | None = None
    memory_used_bytes: int | None = None
    """Of its control group, as is the limit; a limit of None is none."""
    memory_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvidence:
    """What a rank looked like before it was stopped, bounded and without secrets.

    ``missing`` says for each part that could not be had why, in one sentence.
    """

    threads: tuple[ThreadStack, ...] = ()
    """The main thread first."""
    process: ProcessFacts | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    flight_record: tuple[str, ...] = ()
    """The last collectives as torch recorded them, oldest first."""
    missing: tuple[str, ...] = ()
