"""`protect`: one call after which a rank is compared with its peers, step after step.

Puts the parts together: peers, harness, and whoever is to hear of results.  Nothing raises into
training; where there is nobody to compare with, the protection is inactive and says why.
"""

import logging
import os
import socket
from collections.abc import Sequence
from typing import Any, Final

import torch.distributed as dist

from scout import hooks as listening
from scout.durable import DurableCheckpointConfig, DurableCheckpoints, NothingLoaded, Restored
from scout.replay import exchange
from scout.replay.harness import Harness
from scout.replay.peers import NoPeersError, Peers, form_peers
from scout.results import CheckResult, OrchestrationHooks, fault_report
from scout.settings import ReplayHarnessConfig
from scout.trust import (
    Certified,
    Certifier,
    Rejected,
    TrustState,
    completes_cycle,
    outcome_of,
)

RUN_ENV: Final = "OUTRIDER_RUN"
"""The job's name for this run, where a launcher gave one."""

_log: Final = logging.getLogger("outrider")


class Protection:
    """What `protect` returns.  ``why_not`` is empty while it is active."""

    def __init__(self, hooks: OrchestrationHooks) -> None:
        self.why_not = ""
        self._safely = listening.Safely(hooks)
        self._harness: Harness | None = None
        self._certifier = Certifier()
        self._checkpoints: DurableCheckpoints | None = None

    @property
    def verified_step(self) -> int | None:
        """The newest step whose state a check found good; None before the first."""
        return self._certifier.verified

    def restore(self) -> Restored:
        """Load the newest verified checkpoint on every rank.  Every rank calls it."""
        if self._checkpoints is None:
            return NothingLoaded(why="no checkpoints were configured")
        return self._checkpoints.load()

    @property
    def last_result(self) -> CheckResult | None:
        """The newest check's result; None before the first."""
        return self._harness.last_result if self._harness is not None else None

    @property
    def interval(self) -> int:
        """Steps between checks, 0 while it is not known."""
        return self._harness.interval if self._harness is not None else 0

    @property
    def worst_case_steps(self) -> int:
        """In how many steps every layer, parameter and moment is looked at once."""
        return self._harness.worst_case_steps if self._harness is not None else 0

    def check_next_step(self) -> None:
        """Check everything at the end of the next step, whatever the schedule says.

        Every rank calls it between the same two steps.
        """
        if self._harness is not None:
            self._harness.request()

    def captures_held(self) -> Sequence[object]:
        """Return what is captured at this moment: nothing, on steps without a check."""
        return self._harness.captures if self._harness is not None else ()

    def close(self) -> None:
        """Take everything away again."""
        if self._harness is not None:
            self._harness.close()

    def _begin(
        self,
        model: Any,
        optimizers: Sequence[Any],
        config: ReplayHarnessConfig,
        checkpoints: DurableCheckpointConfig | None,
        run: str,
    ) -> None:
        peers = form_peers(model)
        hosts = _hosts(peers)
        if checkpoints is not None:
            topology = f"{peers.regime} {peers.ranks[0]} of {dist.get_world_size()}"
            self._checkpoints = DurableCheckpoints(
                checkpoints, topology=topology, world=peers.world
            )
        self._harness = Harness(
            model,
            optimizers,
            peers,
            config,
            run=run,
            hosts=hosts,
            completed=listening.completed_steps(),
            checkpoint_every=checkpoints.every_steps if checkpoints is not None else 0,
            told=self._heard,
        )
        listening.running(self.close)
        for guarantee in peers.missing_guarantees:
            if peers.rank == peers.ranks[0]:
                _log.warning("outrider: scout: %s", guarantee)

    def _heard(self, result: CheckResult) -> None:
        boundary = self._certifier.boundary(
            result.header.step, outcome_of(result), cycle_complete=completes_cycle(result)
        )
        saved = self._checkpoints is None or self._checkpoints.settle(boundary)
        match boundary:
            case Certified():
                state = boundary.state if saved else TrustState.REJECTED
                self._safely.trust(boundary.step, state, boundary.reason)
                for step in boundary.promoted:
                    self._safely.trust(step, TrustState.RECOVERY_VERIFIED, boundary.reason)
            case Rejected():
                for step in (boundary.step, *boundary.withdrawn):
                    self._safely.trust(step, TrustState.REJECTED, boundary.reason)
            case _:
                pass  # nothing became known
        self._safely.result(result)
        report = fault_report(result)
        if report is not None:
            self._safely.fault(report)


def protect(
    model: Any,
    optimizer: Any,
    *,
    config: ReplayHarnessConfig | None = None,
    hooks: OrchestrationHooks | None = None,
    checkpoints: DurableCheckpointConfig | None = None,
    run: str | None = None,
) -> Protection:
    """Compare this rank with its equivalent peers from now on.

    Every rank calls it at the same point: after the process group exists, after FSDP's
    ``fully_shard``; for DDP the model may be given with its wrapper or without.  ``optimizer`` is
    one or a sequence; a step ends with the last one's.  Without ``hooks`` Outrider hears of results
    where it is around.  ``checkpoints`` are saved at checked steps only; see `scout.adapters`.
    Whatever goes wrong makes the protection inactive and is said once.
    """
    protection = Protection(hooks or listening.listener())
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    try:
        settled = config or ReplayHarnessConfig()
        name = run or os.environ.get(RUN_ENV, "run")
        protection._begin(model, optimizers, settled, checkpoints, name)  # noqa: SLF001 - same module
    except NoPeersError as error:
        protection.why_not = str(error)
    except Exception as error:  # noqa: BLE001 - training must not see it, whatever it is
        protection.why_not = f"{type(error).__name__}: {error}"
    if protection.why_not:
        _log.warning("outrider: scout compares nothing: %s", protection.why_not)
    return protection


def _hosts(peers: Peers) -> dict[int, str]:
    told = exchange.gather_texts(socket.gethostname(), peers.world)
    return {rank: str(host) for rank, host in zip(range(dist.get_world_size()), told, strict=True)}
