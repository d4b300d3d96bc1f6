"""SCOUT in one training process: counts steps, captures when a check is due, runs it, tells.

Nothing of ours is in the model on steps without a check.  Nothing raises into training: what
cannot be done is said once, in the rank's log, and the check counts as not run.
"""

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from scout.replay import exchange
from scout.replay.capture import Capture
from scout.replay.check import CannotCheckError, Check, Plan, Subject
from scout.replay.judge import Judge, Memory
from scout.replay.modules import Catalogue, Discovery
from scout.replay.optimizer import OptimizerWatch, is_partitioned
from scout.replay.peers import Peers
from scout.replay.state import StateWalk
from scout.results import CheckResult, Header, NotReady, ReplayResult
from scout.schedule import Coverage, Schedule
from scout.settings import Recipe, ReplayHarnessConfig

STEPS_REMEMBERED: Final = 32
"""Step times of which the median is a step's time."""

_log: Final = logging.getLogger("outrider")


@dataclass(slots=True)
class Pace:
    """How long steps take, those with a check left out."""

    _times: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_REMEMBERED))
    _last: float | None = None

    def stepped(self, now: float) -> None:
        """A step ended at ``now`` (seconds)."""
        if self._last is not None:
            self._times.append((now - self._last) * 1000)
        self._last = now

    def resumed(self, now: float) -> None:
        """A check ended; the next step begins."""
        self._last = now

    @property
    def step_ms(self) -> float:
        """A step's usual time, 0 while it is unknown."""
        return statistics.median(self._times) if self._times else 0.0


class Harness:
    """The checks of one model and its optimizers.

    ``completed`` steps came before.  ``told`` hears every result, on every rank, before the script
    goes on after its optimizer step.
    """

    def __init__(
        self,
        model: Any,
        optimizers: Sequence[Any],
        peers: Peers,
        config: ReplayHarnessConfig,
        *,
        run: str,
        hosts: dict[int, str],
        completed: int,
        checkpoint_every: int,
        told: Callable[[CheckResult], None],
    ) -> None:
        self.peers = peers
        self.config = config
        self.step = completed
        self.last_result: CheckResult | None = None
        self.checks = 0
        self._model = model
        self._run = run
        self._checkpoint_every = checkpoint_every
        self._told = told
        self._alive = True
        self._said: set[str] = set()
        self._catalogue: Catalogue | None = None
        self._schedule: Schedule | None = None
        self._captures: list[tuple[Recipe, str, Any, Capture]] = []
        self._armed: tuple[Recipe, ...] = ()
        self._requested = False
        self._turn = 0
        self._pace = Pace()
        self._judge = Judge(peers=peers, config=config, memory=Memory(config), hosts=hosts)
        self._walk = StateWalk(model, optimizers, config.state_bytes_per_check)
        stepping = [it for it in optimizers if not is_partitioned(it)]
        if len(stepping) < len(optimizers):
            self._say("a partitioned optimizer has one owner for each moment: not compared")
        self._optimizers = OptimizerWatch(stepping, config.optimizer_slice_elements)
        self._discovery = Discovery(model, self._discovered)
        self._discovery.start()
        self._handle = optimizers[-1].register_step_post_hook(self._after_step)

    # --- what a person may ask --------------------------------------------------------------

    @property
    def interval(self) -> int:
        """Steps between checks; 0 while it is not known, or when checks are asked for."""
        return self._schedule.interval if self._schedule is not None else 0

    @property
    def worst_case_steps(self) -> int:
        """In how many steps every layer, parameter and moment is looked at once."""
        if self._schedule is None or self._catalogue is None:
            return 0
        return self._schedule.worst_case_steps(self._coverage(self._catalogue))

    @property
    def captures(self) -> Sequence[object]:
        """What is captured at this moment, by hooks that are in place."""
        return tuple(self._captures)

    def request(self) -> None:
        """Check everything at the end of the next step.  Every rank calls it at the same step."""
        self._requested = True
        self._arm()

    def close(self) -> None:
        """Take everything of ours away."""
        self._alive = False
        self._handle.remove()
        self._discovery.stop()
        self._disarm()

    # --- every step -------------------------------------------------------------------------

    def _after_step(self, *_: Any) -> None:
        if not self._alive or torch.compiler.is_compiling():
            return
        now = time.perf_counter()
        self.step += 1
        self._pace.stepped(now)
        try:
            if self._armed:
                self._check(self._armed, now)
                self._pace.resumed(time.perf_counter())
            self._arm()
        except Exception as error:  # noqa: BLE001 - training must not see it, whatever it is
            self.close()
            self._say(f"checks end here: {type(error).__name__}: {error}")

    def _discovered(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        if catalogue.missing:
            names = ", ".join(catalogue.missing)
            self._say(f"the model shows no module for {names}; the other recipes are checked")
        has = [it for it in Recipe if catalogue.modules.get(it)]
        has += [Recipe.OPTIMIZER] if self._optimizers.optimizers else []
        has += [Recipe.STATE] if self.peers.state_is_replicated else []
        self._schedule = Schedule(
            config=self.config,
            recipes=tuple(has),
            completed=self.step,
            checkpoint_every=self._checkpoint_every,
        )

    def _arm(self) -> None:
        """Put hooks in place if the step that begins now ends with a check."""
        if self._schedule is None or self._catalogue is None or self._armed:
            return
        recipes = self._schedule.recipes
        due = recipes if self._requested else self._schedule.due(self.step + 1)
        self._armed = due
        self._requested = False
        for recipe in due:
            modules = self._catalogue.modules.get(recipe, ())
            if modules:
                name, module = modules[self._turn % len(modules)]
                capture = Capture(module, self.peers.device)
                self._captures.append((recipe, name, module, capture))
        if Recipe.OPTIMIZER in due:
            self._optimizers.arm()

    def _disarm(self) -> list[Subject]:
        subjects = [
            Subject(recipe, name, module, capture.close())
            for recipe, name, module, capture in self._captures
        ]
        self._captures, self._armed = [], ()
        return subjects

    # --- a check ----------------------------------------------------------------------------

    def _check(self, due: tuple[Recipe, ...], started: float) -> None:
        assert self._schedule is not None and self._catalogue is not None  # noqa: PT018
        subjects = self._disarm()
        plan = Plan(
            step=self.step,
            due=due,
            subjects=subjects,
            slice=self._optimizers.close(),
            slice_missing=self._optimizers.why_not,
            pieces=self._walk.turn() if Recipe.STATE in due else [],
        )
        check = Check(self.peers, self.config, plan)
        header = self._header()
        try:
            check.require_readiness()
            check.replay()
            self.last_result = self._judge.conclude(
                check, self._walk, self._catalogue, header, started
            )
            self._turn += int(Recipe.HIDDEN in due)
        except CannotCheckError as error:
            why = str(error)
            self.last_result = NotReady(header=header, peer_ranks=self.peers.ranks, why=why)
            self._say(f"the check of step {self.step} could not run: {why}")
        self.checks += 1
        self._pace_checks(started)
        if isinstance(self.last_result, ReplayResult):
            self.last_result = replace(
                self.last_result,
                check_interval=self.interval,
                worst_case_steps=self.worst_case_steps,
            )
        self._told(self.last_result)

    def _pace_checks(self, started: float) -> None:
        """Agree with all ranks on what a check and a step take, and plan the next check."""
        assert self._schedule is not None
        before = self._schedule.interval
        took_us = int((time.perf_counter() - started) * 1e6)
        words = [took_us, -int(self._pace.step_ms * 1000)]
        check_us, step_us = exchange.maximum(words, self.peers.world)
        self._schedule.checked(self.step, check_ms=check_us / 1000, step_ms=-step_us / 1000)
        if self._schedule.interval != before and self.peers.rank == self.peers.ranks[0]:
            _log.info(
                "outrider: a check every %d steps (%.1f ms beside steps of %.1f ms); every layer, "
                "parameter and moment is looked at once in %d steps",
                self._schedule.interval,
                check_us / 1000,
                -step_us / 1000,
                self.worst_case_steps,
            )

    def _coverage(self, catalogue: Catalogue) -> Coverage:
        return Coverage(
            hidden_layers=len(catalogue.modules.get(Recipe.HIDDEN, ())),
            state_bytes=self._walk.total_bytes(),
            state_bytes_per_check=self.config.state_bytes_per_check,
        )

    def _header(self) -> Header:
        return Header(
            id=f"{self._run}-check-{self.step}-{self.peers.ranks[0]}",
            time_ns=time.time_ns(),
            run=self._run,
            step=self.step,
            reporter=self.peers.rank,
        )

    def _say(self, text: str) -> None:
        if text not in self._said and len(self._said) < STEPS_REMEMBERED:
            self._said.add(text)
            _log.warning("outrider: scout: %s", text)
