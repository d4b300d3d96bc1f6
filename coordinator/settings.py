"""The numbers one job is run by, as the core uses them: plain values with units.

The job spec (`coordinator.spec`) is what people write; this is what is left of it once every
default is filled in.  Each default says why it has its value.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from coordinator.escalation import RestartPolicy
from coordinator.offenders import OffenderPolicy
from sidecar.api import FaultKind

STOP_TIMEOUT_S: Final = 20.0
"""What a node has, beyond the grace, to end processes that do not want to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """Everything that steers a job's recovery."""

    job: str
    nnodes: int
    nproc_per_node: int
    spares: int = 0
    """Nodes that are wanted to stand by; fewer are told, and nobody waits for them."""
    log_rules: tuple[Mapping[str, Any], ...] = ()
    scout: Mapping[str, Any] | None = None
    """How ranks compare one another without a line in the script; None when they are not to."""
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    stall_timeout_s: float = 300.0
    """Silence of progress that asks for a judgement: longer than any healthy pause between
    steps that was not declared, shorter than a collective's own ten-minute time-out."""
    stall_timeout_min_s: float = 60.0
    """Least limit that is learned from a rank's own history: an undeclared pause of a minute, a
    recompilation or a full disk cache, happens in healthy jobs."""
    stall_factor: float = 10.0
    """How many times the 99th percentile of a phase's silences its learned limit is."""
    settle_s: float = 0.3
    """Wait for further reports when the first ones do not name a culprit by themselves: log lines
    are read every 50 ms, and a lost peer's traceback takes some 100 ms to appear."""
    inspect_timeout_s: float = 1.0
    """Longest wait for every node's look at its ranks; whoever is silent then is evidence."""
    evidence_budget_s: float = 5.0
    """Longest wait for a last look at every rank before they are stopped.  It takes some 50 ms;
    five seconds are for a node that is busy with what broke.  0 stops without a look."""
    lease_s: float = 15.0
    """Silence of a sidecar after which its node counts as lost: several missed heartbeats, so
    that a restarted coordinator or a switch that reboots its link costs no restart."""
    heartbeat_s: float = 1.0
    wait_for_nodes_s: float = 600.0
    """Longest wait for enough nodes before the job fails."""
    startup_deadline_s: float = 1800.0
    """Longest wait for the first step of a rank that attached: reading a large model and compiling
    it takes minutes, and a start that hangs must not hang for ever."""
    offenders: OffenderPolicy = field(default_factory=OffenderPolicy)
    observed: frozenset[FaultKind] = frozenset()
    """Detectors that stop nothing: what they would have done is noted and judged."""
    active_deadline_s: float | None = None
    """Longest time from the job's first start to its end; None is none."""
    fault_deadline_s: float | None = None
    """Longest time from a fault to the first step after it; None is none."""
    ttl_s: float | None = None
    """How long the finished job can still be looked at; None leaves it to the command line."""
    stop_grace_s: float = 0.0
    """Between a polite signal and SIGKILL.  After a fault nothing is gained by politeness."""
    barrier_s: float = 10.0
    """Longest wait for a rank to come back to its barrier before it gets a new process instead:
    ten times what a script's own clean-up takes."""
    stop_timeout_s: float = STOP_TIMEOUT_S
    """A node that has not confirmed the stop by then is treated as lost."""

    @property
    def world_size(self) -> int:
        """Number of global ranks."""
        return self.nnodes * self.nproc_per_node
