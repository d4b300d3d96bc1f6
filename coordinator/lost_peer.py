"""Does a dying rank only say that another one left it?  Such a rank is a victim.

When one rank dies, every rank that talked to it dies a moment later with a broken connection.
This module tells the two apart by their last words.  It knows phrases, not who died.
"""

import re
from typing import Final

from coordinator.incidents import NodeFault

ABORT_SIGNAL: Final = 6
"""SIGABRT: how a communication library's watchdog ends a process that waits for a lost peer."""

_LOST_PEER: Final = re.compile(
    r"connection (?:was )?(?:closed|reset|aborted|refused|lost|timed out)"
    r"|socket (?:is )?closed|broken pipe"
    r"|failed to recv, got 0 bytes|client socket has timed out"
    r"|gloo\b.*\b(?:connection|connect|timed out|application timeout)|gloo/transport"
    r"|nccl ?remote ?error|remote process exited|DistBackendError|DistNetworkError"
    r"|collective operation timeout|timed out waiting \d+ ?ms for (?:recv|send)",
    re.IGNORECASE,
)

_WAITED: Final = re.compile(
    r"timed out waiting|collective operation timeout|client socket has timed out", re.IGNORECASE
)

_OWN_FAULT: Final = re.compile(
    r"cuda error|cuda failure|unhandled ?cuda ?error|out of memory|illegal memory access"
    r"|uncorrectable|segmentation fault|bus error",
    re.IGNORECASE,
)
"""A rank that says this broke by itself, whatever its connections did afterwards."""


def is_victim(fault: NodeFault) -> bool:
    """Return whether the report tells of a lost peer and of no trouble of its own.

    A death by any signal other than the watchdog's abort is never a lost peer's work.
    """
    report = fault.report
    if report.exit is not None and report.exit.signal not in (None, ABORT_SIGNAL):
        return False
    words = (*report.evidence, report.message, report.reason)
    return any(_LOST_PEER.search(line) for line in words) and not any(
        _OWN_FAULT.search(line) for line in words
    )


def only_waited(fault: NodeFault) -> bool:
    """Return whether a victim gave up waiting for a peer instead of losing its connection.

    Which rank's time ran out first says nothing at all about who did not come.
    """
    return any(_WAITED.search(line) for line in (*fault.report.evidence, fault.report.message))
