"""The coordinator's machine: the real job core, a journal and the order of effects.

Effects wait in a queue as in the real outbox: a `Persist` takes a moment, and nothing behind it
is done before.  A crash drops the queue and the core at any instant; what starts again knows the
bytes that were committed last and nothing else.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from coordinator.events import (
    Accept,
    Dismiss,
    Effect,
    Event,
    Finished,
    LinkClosed,
    LinkOpened,
    LinkSpoke,
    OperatorAsked,
    Persist,
    Say,
    Send,
)
from coordinator.incidents import Incident
from coordinator.job import JobCore
from coordinator.journal_format import (
    DurableState,
    decode_incident,
    decode_state,
    encode_incident,
    encode_state,
)
from coordinator.settings import JobSettings
from scout.clock import Instant
from sidecar.api import Command, Goodbye, Hello, Upward, Welcome
from tests.simulation.network import Link, Network
from tests.simulation.world import Timer, World

WALL_NS: Final = 1_700_000_000_000_000_000
"""The wall clock when the simulation begins."""


class CoordinatorHost:
    """One coordinator, over all of its starts."""

    def __init__(self, world: World, settings: JobSettings) -> None:
        self.life = 0
        self.core: JobCore | None = None
        self.finished: Finished | None = None
        self.incidents: dict[str, bytes] = {}
        """The journal's rows of incidents."""
        self.asked_by_people = 0
        self.commands_sent: list[Command] = []
        self.state = DurableState(job=settings.job)
        """What the journal holds: the state that a start would go on from."""
        self.on_commit: list[Callable[[DurableState], None]] = []
        self.on_told: list[Callable[[Upward], None]] = []
        self.on_send: list[Callable[[str, Command], None]] = []
        self.network: Network | None = None
        self._world, self._settings = world, settings
        self._dice = world.dice("coordinator")
        self._clock_ns = 0
        self._links: dict[int, Link] = {}
        self._numbers = 0
        self._queue: deque[Effect] = deque()
        self._committing = False
        self._timer: Timer | None = None

    # --- power ------------------------------------------------------------------------------

    def boot(self) -> None:
        """Start the process from what the journal holds."""
        assert self.core is None, "one coordinator a job"
        self.life += 1
        self._clock_ns = self._dice.randrange(10**12, 10**15)
        state = self.state
        self._world.note(f"coordinator starts: {state.phase}, generation {state.generation}")
        self.core = JobCore(self._settings, state, WALL_NS - self._clock_ns, self.now())
        self._arm()

    def crash(self) -> None:
        """Lose the process, with everything that was not committed or sent."""
        if self.core is None:
            return
        self.core = None
        self.life += 1
        self._numbers = 0
        self._links.clear()
        self._queue.clear()
        self._committing = False
        self._world.note("coordinator crashes")
        assert self.network is not None
        self.network.drop_all()

    def now(self) -> Instant:
        """Return this machine's own clock, which begins anew with each start."""
        return Instant(self._world.now + self._clock_ns)

    def closed_incidents(self) -> list[Incident]:
        """Return every incident of the journal, oldest first."""
        return [decode_incident(self.incidents[key]) for key in sorted(self.incidents)]

    def ask(self, action: str, node: str | None = None) -> None:
        """Let a person ask for something."""
        self.asked_by_people += 1
        self._handle(OperatorAsked(action=action, who="operator", why="a drill", node=node))

    # --- the network's end ------------------------------------------------------------------

    def accept(self) -> int | None:
        """Return a number for a new connection, or None while the process does not run."""
        if self.core is None:
            return None
        self._numbers += 1
        return self._numbers

    def opened(self, link: Link, hello: Hello) -> None:
        """Take in a sidecar."""
        if link.life == self.life:
            self._links[link.number] = link
            self._handle(LinkOpened(link=link.number, hello=hello))

    def spoke(self, link: Link, message: Upward) -> None:
        """Take in what it says."""
        assert not isinstance(message, Hello), "hello is said once a link"
        if link.life == self.life:
            for listener in self.on_told:
                listener(message)
            self._handle(LinkSpoke(link=link.number, message=message))

    def closed(self, link: Link) -> None:
        """Take in that it is gone."""
        if self._links.pop(link.number, None) is not None:
            self._handle(LinkClosed(link=link.number))

    # --- the core ---------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        if self.core is None:
            return
        self._queue.extend(self.core.handle(event, self.now()))
        self._carry_on()
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = None if self.core is None else self.core.next_deadline()
        if due is not None:
            life = self.life
            delay_s = max(0, due - self.now()) / 1e9
            self._timer = self._world.later(delay_s, lambda: self._time_passed(life))

    def _time_passed(self, life: int) -> None:
        if self.core is None or life != self.life:
            return
        self._timer = None
        self._queue.extend(self.core.handle_timer(self.now()))
        self._carry_on()
        self._arm()

    # --- effects, in order ------------------------------------------------------------------

    def _carry_on(self) -> None:
        while self._queue and not self._committing:
            if isinstance(self._queue[0], Persist):
                self._begin_commit()
            else:
                self._execute(self._queue.popleft())

    def _begin_commit(self) -> None:
        batch: list[Persist] = []
        while self._queue and isinstance(self._queue[0], Persist):
            head = self._queue.popleft()
            assert isinstance(head, Persist)
            batch.append(head)
        self._committing = True
        life = self.life
        self._world.later(self._dice.uniform(0.0005, 0.01), lambda: self._commit(batch, life))

    def _commit(self, batch: list[Persist], life: int) -> None:
        if life != self.life:
            return  # the process died during the commit
        self._committing = False
        self.state = state = decode_state(encode_state(batch[-1].state))
        for persist in batch:
            if persist.incident is not None:
                self.incidents[persist.incident.id] = encode_incident(persist.incident)
        self._world.note(f"committed {state.phase}, generation {state.generation}")
        for listener in self.on_commit:
            listener(state)
        self._carry_on()

    def _execute(self, effect: Effect) -> None:
        assert self.network is not None
        match effect:
            case Accept():
                link = self._links.get(effect.link)
                if link is not None:
                    heartbeat_s = self._settings.heartbeat_s
                    self.network.down(
                        link, Welcome(job=self._settings.job, heartbeat_s=heartbeat_s)
                    )
            case Dismiss():
                link = self._links.get(effect.link)
                if link is not None:
                    self.network.down(link, Goodbye(reason=effect.reason, retry=effect.retry))
                    self.network.hang_up(link)
            case Send():
                link = self._links.get(effect.link)
                if link is not None:
                    self.commands_sent.append(effect.command)
                    for listener in self.on_send:
                        listener(link.dialler.name, effect.command)
                    self.network.down(link, effect.command)
            case Finished():
                self.finished = effect
                self._world.note(f"the job {effect.outcome}: {effect.reason}")
            case Say():
                self._world.note(f"coordinator says {effect.text}")
            case Persist():
                raise AssertionError("commits are begun elsewhere")
