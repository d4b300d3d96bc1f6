"""SCOUT for a script that says nothing about it, and its results on their way to the sidecar.

Where the launcher asks for it, the ranks' comparison begins at the first optimizer step: the model
is the outermost module that holds the optimizer's parameters.  Everybody who is attached tells
the sidecar what checks find, whoever began them.
"""

import gc
import json
import logging
from collections import deque
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final

from scout import hooks
from scout.results import CheckResult, NotReady, OrchestrationHooks, SCOUTFaultReport, fault_report
from scout.settings import ReplayHarnessConfig
from scout.trust import TrustState, outcome_of
from worker_shim.client import Client
from worker_shim.messages import SCOUT_ENV, ScoutStatus
from worker_shim.session import Outbox, StepCounter

STEPS_TOLD_MAX: Final = 64
"""Verified and rejected steps that are repeated with each status; no job keeps more checkpoints."""

_log: Final = logging.getLogger("outrider")


class ScoutTeller:
    """Turns results into what the sidecar is owed."""

    def __init__(self, client: Client, local_rank: int) -> None:
        self._client = client
        self._local_rank = local_rank
        self._verified: deque[int] = deque(maxlen=STEPS_TOLD_MAX)
        self._rejected: deque[int] = deque(maxlen=STEPS_TOLD_MAX)
        self._checks = 0
        self._not_run = 0

    def hooks(self) -> OrchestrationHooks:
        """Return the hooks that tell the sidecar."""
        return OrchestrationHooks(
            report_fault=self._fault, report_result=self._result, report_trust=self._trust
        )

    def _trust(self, step: int, state: str, _reason: str) -> None:
        if state == TrustState.RECOVERY_VERIFIED:
            self._verified.append(step)
        elif state == TrustState.REJECTED:
            self._rejected.append(step)

    def _fault(self, _report: SCOUTFaultReport) -> None:
        """What a fault report says stands in the status that went before it."""

    def _result(self, result: CheckResult) -> None:
        self._checks += 1
        status = self._status(result)

        def owe(outbox: Outbox) -> None:
            outbox.owe(status)

        self._client.update(owe)

    def _status(self, result: CheckResult) -> ScoutStatus:
        told: dict[str, Any] = {
            "local_rank": self._local_rank,
            "step": result.header.step,
            "outcome": str(outcome_of(result)),
            "verified": tuple(self._verified),
            "rejected": tuple(self._rejected),
            "checks": self._checks,
        }
        if isinstance(result, NotReady):
            self._not_run += 1
            return ScoutStatus(**told, why=result.why, checks_not_run=self._not_run)
        report = fault_report(result)
        return ScoutStatus(
            **told,
            why=report.why if report is not None else "",
            evidence=report.evidence if report is not None else (),
            corrupt_ranks=result.job_sdc_ranks or result.sdc_ranks,
            straggler_ranks=result.straggler_ranks,
            checks_not_run=self._not_run,
            check_ms=round(result.took_ms, 3),
            interval=result.check_interval,
            worst_case_steps=result.worst_case_steps,
        )


class ScoutGuard:
    """Begins the comparison at the first optimizer step, where the environment asks for it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._asked = environment.get(SCOUT_ENV, "")
        self._handle: Any = None
        self._begun = False
        self.protection: Any = None

    @property
    def is_asked(self) -> bool:
        """Whether the launcher asks for it."""
        return bool(self._asked)

    def watch(self, _torch: ModuleType, optimizer: ModuleType) -> None:
        """Wait for the first step; ``optimizer`` is ``torch.optim.optimizer``."""
        self._handle = optimizer.register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        if self._begun:  # a hook must not be taken away while hooks are gone through
            return
        self._begun = True
        try:
            from scout.protection import protect  # noqa: PLC0415 - torch, which is loaded by now

            config = ReplayHarnessConfig(**json.loads(self._asked))
            model = model_of(optimizer)
            if model is None:
                _log.warning("outrider: scout compares nothing: no module holds the parameters")
                return
            self.protection = protect(model, optimizer, config=config)
        except Exception as error:  # noqa: BLE001 - inside somebody's optimizer.step
            _log.warning("outrider: scout does not begin: %s: %s", type(error).__name__, error)

    def renew(self) -> None:
        """End every comparison over process groups that are gone, and begin at the next step.

        Ranks whose processes were started anew begin at their first step too.
        """
        hooks.end_all()
        self.protection = None
        self._begun = False

    def close(self) -> None:
        """Take everything away again."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if self.protection is not None:
            self.protection.close()


def model_of(optimizer: Any) -> Any:
    """Return the outermost module that holds all of the optimizer's parameters, or None."""
    import torch  # noqa: PLC0415 - called by torch itself

    wanted = {id(it) for group in optimizer.param_groups for it in group["params"]}
    # Not isinstance: it asks the object itself, and a weak proxy of something gone raises.
    modules = [it for it in gc.get_objects() if issubclass(type(it), torch.nn.Module)]
    inner = {id(child) for it in modules for child in it.children()}
    roots = [
        it
        for it in modules
        if id(it) not in inner and wanted <= {id(parameter) for parameter in it.parameters()}
    ]
    return max(roots, key=lambda it: sum(1 for _ in it.modules()), default=None)


def begin(client: Client, steps: StepCounter, local_rank: int) -> None:
    """Let the sidecar hear of every result in this process from now on."""
    hooks.listen(ScoutTeller(client, local_rank).hooks(), lambda: steps.step)
