"""Which nodes the job knows, over which connection each speaks, and when it last did.

Decides whom to accept and who counts as lost.  It refuses to know what follows from a loss, and
it never opens or closes a connection: links are the shell's numbers.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from coordinator.wording import natural_key, one_line
from scout.clock import Duration, Instant, after, since
from sidecar.api import PROTOCOL_VERSION, Hello, StatusReport
from sidecar.names import hello_problem

NODES_MAX: Final = 4096
"""Nodes one coordinator keeps in its table; beyond it a relay tier is the answer."""

HEARTBEATS_PER_LEASE: Final = 5
"""A node says something this often per lease, so that a few lost messages cost it nothing."""

SILENT_HEARTBEATS: Final = 2
"""An open connection is taken for dead after so many missed heartbeats when a rival dials in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node.  ``link`` is None while it is not connected, ``hello`` until it first was.

    ``last_heard`` is when it last said anything (or when we began to wait for it), ``lost_at``
    when its connection went away.
    """

    node: str
    link: int | None
    hello: Hello | None
    last_heard: Instant
    status: StatusReport | None = None
    lost_at: Instant | None = None
    excluded: str | None = None

    @property
    def spare(self) -> bool:
        """True when the node was brought up as a spare."""
        return self.hello is not None and self.hello.spare


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The sidecar is in.  ``replaced`` is an older link of the same node, to be dismissed.

    ``restarted`` is true when another incarnation of this node's sidecar was known before: its
    workers are gone.
    """

    view: NodeView
    replaced: int | None = None
    restarted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """The sidecar is not wanted; ``retry`` says whether dialling again can help."""

    reason: str
    retry: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignored:
    """A message changed nothing, and why."""

    reason: str


Admission: TypeAlias = Accepted | Rejected


@dataclass(slots=True, kw_only=True)
class Membership:
    """The table of nodes of one job.  ``lease_ns`` is the silence after which a node is lost."""

    job: str
    nproc_per_node: int
    lease_ns: Duration
    _nodes: dict[str, NodeView] = field(default_factory=dict)
    _links: dict[int, str] = field(default_factory=dict)
    _excluded: dict[str, str] = field(default_factory=dict)
    _declared: set[str] = field(default_factory=set)
    """Nodes that `lost` already returned; they have no deadline any more."""

    @property
    def heartbeat(self) -> Duration:
        """How often a node must speak without news."""
        return Duration(self.lease_ns // HEARTBEATS_PER_LEASE)

    # --- connections ----------------------------------------------------------------------------

    def open(self, link: int, hello: Hello, now: Instant) -> Admission:
        """Take in a sidecar that presents itself on ``link``."""
        misfit = self._misfit(link, hello)
        if misfit is not None:
            return Rejected(reason=misfit, retry=False)
        known = self._nodes.get(hello.node)
        rival = self._rival(link, hello, known, now)
        if rival is not None:
            return Rejected(reason=rival, retry=True)
        before = known.hello if known is not None else None
        restarted = before is not None and before.incarnation != hello.incarnation
        replaced = known.link if known is not None and known.link != link else None
        if replaced is not None:
            self._links.pop(replaced, None)
        view = NodeView(
            node=hello.node,
            link=link,
            hello=hello,
            last_heard=now,
            status=None if known is None or restarted else known.status,
            excluded=self._excluded.get(hello.node),
        )
        self._nodes[hello.node] = view
        self._links[link] = hello.node
        self._declared.discard(hello.node)
        return Accepted(view=view, replaced=replaced, restarted=restarted)

    def close(self, link: int, now: Instant) -> NodeView | Ignored:
        """Note that ``link`` is gone.  Only the present link of a node takes the node with it."""
        node = self._links.pop(link, None)
        if node is None:
            return Ignored(reason=f"link {link} speaks for no node")
        self._nodes[node] = replace(self._nodes[node], link=None, lost_at=now)
        return self._nodes[node]

    def status(self, link: int, report: StatusReport, now: Instant) -> NodeView | Ignored:
        """Keep a node's report as its newest state."""
        view = self.by_link(link)
        if view is None or view.hello is None:
            return Ignored(reason=f"link {link} speaks for no node")
        if report.node != view.node or report.incarnation != view.hello.incarnation:
            return Ignored(
                reason=f"link {link} belongs to {view.node} and sent a report of "
                f"{one_line(report.node)} or of another start of its sidecar"
            )
        return self._put(replace(view, status=report, last_heard=now))

    def heard(self, link: int, now: Instant) -> NodeView | Ignored:
        """Note that ``link`` said something that is no status."""
        view = self.by_link(link)
        if view is None:
            return Ignored(reason=f"link {link} speaks for no node")
        return self._put(replace(view, last_heard=now))

    # --- loss -----------------------------------------------------------------------------------

    def lost(self, now: Instant) -> tuple[NodeView, ...]:
        """Return every node gone or silent for a whole lease: a level, not an edge."""
        gone = tuple(view for view in self.views() if now >= self._due(view))
        self._declared = {view.node for view in gone}
        return gone

    def next_deadline(self) -> Instant | None:
        """Return when the next node will be lost if nothing is heard, or None."""
        waited = (view for node, view in self._nodes.items() if node not in self._declared)
        return min((self._due(view) for view in waited), default=None)

    def expect(self, nodes: Iterable[str], now: Instant) -> None:
        """Wait for nodes that hold ranks but have not dialled in: a restarted coordinator's."""
        for node in nodes:
            if node not in self._nodes:
                self._nodes[node] = NodeView(
                    node=node,
                    link=None,
                    hello=None,
                    last_heard=now,
                    lost_at=now,
                    excluded=self._excluded.get(node),
                )

    def forget(self, node: str) -> None:
        """Drop a node that is not connected and no longer needed."""
        view = self._nodes.get(node)
        if view is not None and view.link is None:
            del self._nodes[node]
            self._declared.discard(node)

    # --- exclusion ------------------------------------------------------------------------------

    def exclude(self, node: str, reason: str) -> None:
        """Give ``node`` no rank from now on.  It stays connected, so that it can be stopped."""
        self._excluded[node] = reason
        if node in self._nodes:
            self._nodes[node] = replace(self._nodes[node], excluded=reason)

    def readmit(self, node: str) -> None:
        """Take an exclusion back."""
        self._excluded.pop(node, None)
        if node in self._nodes:
            self._nodes[node] = replace(self._nodes[node], excluded=None)

    # --- reading --------------------------------------------------------------------------------

    def view(self, node: str) -> NodeView | None:
        """Return what is known of ``node``."""
        return self._nodes.get(node)

    def by_link(self, link: int) -> NodeView | None:
        """Return the node that ``link`` speaks for at present."""
        node = self._links.get(link)
        return None if node is None else self._nodes[node]

    def views(self) -> tuple[NodeView, ...]:
        """Return every known node in natural order."""
        return tuple(self._nodes[node] for node in sorted(self._nodes, key=natural_key))

    def usable(self, now: Instant) -> tuple[NodeView, ...]:
        """Return the nodes that may be given ranks: connected, heard of, not excluded."""
        return tuple(
            view
            for view in self.views()
            if view.link is not None and view.excluded is None and now < self._due(view)
        )

    # --- leaves ---------------------------------------------------------------------------------

    def _due(self, view: NodeView) -> Instant:
        return after(view.last_heard if view.lost_at is None else view.lost_at, self.lease_ns)

    def _put(self, view: NodeView) -> NodeView:
        self._nodes[view.node] = view
        self._declared.discard(view.node)
        return view

    def _misfit(self, link: int, hello: Hello) -> str | None:
        """Say why this sidecar can never serve this job, or None."""
        unusable = hello_problem(hello)
        if unusable is not None:
            return unusable
        node = hello.node
        if hello.protocol != PROTOCOL_VERSION:
            return (
                f"{node} speaks protocol {hello.protocol} and the coordinator "
                f"{PROTOCOL_VERSION}; install the same outrider on both"
            )
        if hello.job != self.job:
            return (
                f"{node} serves job {one_line(hello.job)!r} and this coordinator {self.job!r}; "
                f"check the coordinator's address or the job's name"
            )
        if hello.nproc_per_node != self.nproc_per_node:
            return (
                f"{node} runs {hello.nproc_per_node} workers and the job asks for "
                f"{self.nproc_per_node} on every node; start it with the job's number"
            )
        bound = self._links.get(link)
        if bound is not None and bound != hello.node:
            return f"this connection already speaks for {bound}"
        if hello.node not in self._nodes and len(self._nodes) >= NODES_MAX:
            return f"the coordinator's table is full at its limit of {NODES_MAX} nodes"
        return None

    def _rival(self, link: int, hello: Hello, known: NodeView | None, now: Instant) -> str | None:
        """Say why a second sidecar of a name must wait, or None when it may take over."""
        if known is None or known.hello is None or known.link in (None, link):
            return None
        if known.hello.incarnation == hello.incarnation:
            return None  # one and the same sidecar dialled again: its old connection is dead
        if since(known.last_heard, now) > SILENT_HEARTBEATS * self.heartbeat:
            return None
        return (
            f"another sidecar already speaks for {known.node} (on {one_line(known.hello.host)}); "
            f"stop it, or give this one another --node-name"
        )
