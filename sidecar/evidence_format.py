"""What is kept of a worker that is about to be stopped: parsed, made harmless, without secrets.

Decides how a stack is written, which variables may be seen, and what is left out when there is
too much.  It refuses to know where the bytes come from.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from sidecar.rank_evidence import ProcessFacts, RankEvidence, ThreadStack

T = TypeVar("T", ThreadStack, tuple[str, str], str)

RANK_BYTES_MAX: Final = 64 << 10
"""JSON bytes of one rank's evidence: 64 ranks of a node fit into one message with room to spare."""
FRAMES_MAX: Final = 60
"""Frames kept of a thread; torch's deepest stacks in training have some forty."""
THREADS_MAX: Final = 64
"""Threads kept of a process: more only repeat one another."""
FRAME_CHARS_MAX: Final = 160
NAME_CHARS_MAX: Final = 64
VARIABLES_MAX: Final = 96
VALUE_CHARS_MAX: Final = 160
FLIGHT_LINES_MAX: Final = 48
"""Newest collectives kept: the last few steps of a rank."""
REASON_CHARS_MAX: Final = 300
REASONS_MAX: Final = 8
MASK: Final = "***"

_FACTS_BYTES: Final = 512
"""Room for the process's facts and the keys of the rest."""
_THREAD_KEYS: Final = "name main frames active holds_gil".ljust(96)
"""As long as what stands around the texts of a thread."""
_STATE: Final = re.compile(r"^State:\s+(\S)", re.MULTILINE)
_THREADS: Final = re.compile(r"^Threads:\s+(\d+)", re.MULTILINE)
_RESIDENT: Final = re.compile(r"^VmRSS:\s+(\d+) kB", re.MULTILINE)
_RELATED: Final = re.compile(
    r"(?:PYTORCH|TORCH|TORCHELASTIC|NCCL|GLOO|NVSHMEM|UCX|UCC|FI|CUDA|NVIDIA|NVTE|TRITON|OUTRIDER"
    r"|OMP|MKL|MASTER|GROUP|LOCAL|ROLE)_\w+|RANK|WORLD_SIZE|JOB_RESTART_COUNT"
)
"""What decides how torch, its collectives and we behave; anything else is none of our business."""
_SECRET: Final = re.compile(
    r"pass|secret|token|credential|cookie|private|auth|signature|mark|(?:^|_)key(?:$|_|s$)|apikey",
    re.IGNORECASE,
)
_LOGIN: Final = re.compile(r"(?<=://)[^/@\s]+@")
_STARTERS: Final = ("<frozen runpy>", "/runpy.py", "sidecar/workers/zygote.py")
_DENIED: Final = re.compile(r"permission denied|operation not permitted", re.IGNORECASE)
_CAUSE: Final = re.compile(r"^\s*(?:\d+:\s*)?(?P<text>.*\(os error \d+\))\s*$", re.MULTILINE)


class StackError(ValueError):
    """There are no stacks; the text says why in one sentence."""


# --- stacks ---------------------------------------------------------------------------------


def stacks(dump: bytes, pid: int) -> tuple[ThreadStack, ...]:
    """Return the threads in py-spy's JSON ``dump``, the main one first.  Raises `StackError`."""
    try:
        told = json.loads(dump)
        threads = [_thread(item, pid) for item in told if item["pid"] == pid]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StackError(f"py-spy's answer cannot be read: {printable(str(error))}") from error
    if not threads:
        raise StackError("py-spy saw no Python thread")
    threads.sort(key=lambda it: (not it.main, not it.holds_gil, not it.active, it.name))
    return tuple(threads)


def no_stacks(said: bytes) -> str:
    """Return the reason in what py-spy ``said`` on standard error before it failed."""
    text = said.decode(errors="replace")
    head = text.strip().splitlines()[0] if text.strip() else "it said nothing"
    cause = _CAUSE.search(text)
    reason = head.removeprefix("Error: ") + (f" {cause['text'].strip()}" if cause else "")
    if _DENIED.search(text):
        reason += "; let the sidecar trace its workers (CAP_SYS_PTRACE)"
    return printable(f"no stacks, py-spy failed: {reason}", REASON_CHARS_MAX)


def _thread(item: Mapping[str, Any], pid: int) -> ThreadStack:
    name = str(item.get("thread_name") or "")
    number = item.get("os_thread_id")
    frames = [_frame(frame) for frame in _own(item["frames"])]
    if len(frames) > FRAMES_MAX:  # where it is, and how it came there
        half = FRAMES_MAX // 2
        left_out = f"... {len(frames) - 2 * half + 1} frames left out"
        frames = [*frames[:half], left_out, *frames[-half + 1 :]]
    return ThreadStack(
        name=printable(name, NAME_CHARS_MAX),
        main=name == "MainThread" if number is None else number == pid,
        frames=tuple(frames),
        active=item.get("active") is True,
        holds_gil=item.get("owns_gil") is True,
    )


def _own(frames: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Leave out how a script was started, so that warm and cold workers stand in one place."""
    end = len(frames)
    while end > 1 and str(frames[end - 1].get("short_filename")).endswith(_STARTERS):
        end -= 1
    return frames[:end]


def _frame(frame: Mapping[str, Any]) -> str:
    # The short name is relative to the import path: equal on nodes that install elsewhere.
    file = frame.get("short_filename") or str(frame.get("filename", "")).rpartition("/")[2]
    return printable(f"{frame['name']} ({file}:{int(frame.get('line') or 0)})", FRAME_CHARS_MAX)


# --- process, environment, collectives ------------------------------------------------------


def process_facts(
    status: str,
    *,
    wchan: str | None = None,
    open_files: int | None = None,
    memory_used: str | None = None,
    memory_limit: str | None = None,
) -> ProcessFacts | None:
    """Return the facts in the text of ``/proc/<pid>/status`` and of the other files, or None."""
    state = _STATE.search(status)
    if state is None:
        return None
    threads, resident = _THREADS.search(status), _RESIDENT.search(status)
    asleep = None if wchan is None or wchan.strip() in ("", "0") else wchan.strip()
    return ProcessFacts(
        state=state[1],
        waits_in=None if asleep is None else printable(asleep, NAME_CHARS_MAX),
        threads=int(threads[1]) if threads else None,
        resident_bytes=int(resident[1]) << 10 if resident else None,
        open_files=open_files,
        memory_used_bytes=_count(memory_used),
        memory_limit_bytes=_count(memory_limit),
    )


def redacted(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that concern training; what may be a secret is masked."""
    names = sorted(name for name in environment if _RELATED.fullmatch(name))[:VARIABLES_MAX]
    return {
        printable(name, NAME_CHARS_MAX): MASK
        if _SECRET.search(name)
        else printable(_LOGIN.sub(f"{MASK}@", environment[name]), VALUE_CHARS_MAX)
        for name in names
    }


def flight_lines(record: bytes) -> tuple[str, ...]:
    """Return the newest collectives in torch's Flight Recorder JSON, oldest first.

    Raises `ValueError` when it is none.
    """
    told = json.loads(record)
    entries = told.get("entries") if isinstance(told, dict) else None
    if not isinstance(entries, list):
        raise ValueError("it has no entries")  # noqa: TRY004 - the content is wrong, not our type
    kept = [item for item in entries if isinstance(item, dict)][-FLIGHT_LINES_MAX:]
    return tuple(_collective(item) for item in kept)


def _collective(entry: Mapping[str, Any]) -> str:
    group = entry.get("process_group")
    name = group[0] if isinstance(group, list) and group else entry.get("pg_id", "?")
    number, doing = entry.get("collective_seq_id", "?"), entry.get("profiling_name", "?")
    text = f"group {name} #{number} {doing} {entry.get('state', '?')} {entry.get('input_sizes')}"
    return printable(text, FRAME_CHARS_MAX)


def _count(text: str | None) -> int | None:
    """Return the number in a control group's file; ``max`` and version 1's largest are none."""
    if text is None or not text.strip().isdecimal():
        return None
    number = int(text)
    return number if number < 1 << 62 else None


# --- bounds ---------------------------------------------------------------------------------


def printable(text: str, chars_max: int = REASON_CHARS_MAX) -> str:
    """Return foreign ``text`` as one line that acts on no terminal, at most ``chars_max`` long."""
    if not text.isprintable():
        text = "".join(it if it.isprintable() else "?" for it in text[: chars_max + 1])
    return text if len(text) <= chars_max else f"{text[: chars_max - 1]}\u2026"


def bounded(evidence: RankEvidence, bytes_max: int = RANK_BYTES_MAX) -> RankEvidence:
    """Return ``evidence`` in at most ``bytes_max`` bytes of JSON; it says what was left out.

    What is worth most comes first: the main thread, the variables, the newest collectives, and
    then the other threads.
    """
    missing = [printable(it) for it in evidence.missing[: REASONS_MAX - 1]]
    room = bytes_max - _FACTS_BYTES - _cost(missing) - 4 * REASON_CHARS_MAX
    main = [it for it in evidence.threads if it.main]
    others = [it for it in evidence.threads if not it.main]
    kept_main, room = _fitting(main, room)
    variables, room = _fitting(list(evidence.environment.items()), room)
    collectives, room = _fitting(list(reversed(evidence.flight_record)), room)
    kept_others, room = _fitting(others[: THREADS_MAX - len(kept_main)], room)
    threads = (*kept_main, *kept_others)
    left_out = len(evidence.threads) - len(threads)
    if left_out:
        missing.append(f"{left_out} of {len(evidence.threads)} threads are left out: too much")
    return replace(
        evidence,
        threads=threads,
        environment=dict(variables),
        flight_record=tuple(reversed(collectives)),
        missing=tuple(missing),
    )


def _fitting(items: Sequence[T], room: int) -> tuple[list[T], int]:
    """Return as many of the first ``items`` as fit, and the room that is left."""
    kept: list[T] = []
    for item in items:
        room_after = room - _cost(_texts(item))
        if room_after < 0:
            break
        room = room_after
        kept.append(item)
    return kept, room


def _texts(item: ThreadStack | tuple[str, str] | str) -> tuple[str, ...]:
    match item:
        case ThreadStack():
            return (item.name, *item.frames, _THREAD_KEYS)
        case tuple():
            return item
        case _:
            return (item,)


def _cost(texts: Iterable[str]) -> int:
    """Return an upper bound of the JSON bytes of ``texts``, quotes and commas included."""
    return sum(len(json.dumps(text, ensure_ascii=False).encode()) + 1 for text in texts)
