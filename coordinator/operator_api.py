"""The HTTP API for people and programs: what the job is, what happened, and what to do.

One table of endpoints makes both the routes and the OpenAPI document, so they cannot differ.
Requests become events for the core; nothing is decided here.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec
import orjson
from aiohttp import web

from coordinator.answers import Problem, answered
from coordinator.audit import RECORDS_KEPT_MAX, AuditRecord
from coordinator.audit_trail import SAID, AuditTrail
from coordinator.events import Event, HealthTold, OperatorAsked
from coordinator.health_events import (
    HealthRequest,
    HealthRequestError,
    HealthSeverity,
    read,
)
from coordinator.incident_list import IncidentSummary, summary
from coordinator.incident_lookup import find
from coordinator.incident_page import HEADERS, listing, page
from coordinator.incident_text import markdown
from coordinator.incidents import Incident
from coordinator.journal import Journal
from coordinator.ledger import LedgerReport
from coordinator.metrics import AcceptError, Exposition
from coordinator.openapi import HTML, JSON, METRICS_TEXT, Endpoint, Parameter, document
from coordinator.request_bodies import read_body
from coordinator.view import JobView, NodeStatus
from sidecar.codec import to_plain
from sidecar.roles import Role
from sidecar.whole_numbers import whole_number

T = TypeVar("T")

BODY_BYTES_MAX: Final = 65_536
"""Largest request body: a name and a sentence."""
WHY_CHARS_MAX: Final = 500
WHO_CHARS_MAX: Final = 100
INCIDENTS_LISTED_MAX: Final = 1_000
"""Incidents in one list: as many as the journal keeps."""
INCIDENTS_LISTED_DEFAULT: Final = 100

Who: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=WHO_CHARS_MAX)]
Why: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=WHY_CHARS_MAX)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRequest:
    """Who asks, and why: both are kept in the incident."""

    who: Who
    why: Why


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The request was handed to the coordinator; its result shows in the job."""

    accepted: bool
    action: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthAccepted:
    """What was understood.  ``known`` is false for a node that was never heard of.

    ``severity`` is the worst of what was said, ``healthy`` when it takes something back.
    """

    accepted: bool
    node: str
    known: bool
    severity: HealthSeverity


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The coordinator runs."""

    status: str
    job: str
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeList:
    """Every node that was ever heard of."""

    nodes: tuple[NodeStatus, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentList:
    """Incidents, oldest first."""

    incidents: tuple[IncidentSummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditList:
    """Orders, oldest first."""

    orders: tuple[AuditRecord, ...]


_ID: Final = Parameter(
    name="incident",
    place="path",
    text="An incident's id, any unique beginning of it, or `last`.",
    schema={"type": "string"},
)
_NODE: Final = Parameter(
    name="node", place="path", text="A node's name.", schema={"type": "string"}
)
_LIMIT: Final = Parameter(
    name="limit",
    place="query",
    text="How many of the newest incidents to list.",
    schema={
        "type": "integer",
        "minimum": 1,
        "maximum": INCIDENTS_LISTED_MAX,
        "default": INCIDENTS_LISTED_DEFAULT,
    },
)
_ORDERS: Final = Parameter(
    name="limit",
    place="query",
    text="How many of the newest orders to list.",
    schema={
        "type": "integer",
        "minimum": 1,
        "maximum": RECORDS_KEPT_MAX,
        "default": INCIDENTS_LISTED_DEFAULT,
    },
)
_FORMAT: Final = Parameter(
    name="format",
    place="query",
    text="`markdown` answers a page for people, as text/markdown.",
    schema={"type": "string", "enum": ["json", "markdown"], "default": "json"},
)

ENDPOINTS: Final = (
    Endpoint("GET", "/healthz", "health", "Is the coordinator running?", Health,
             public=True),
    Endpoint("GET", "/metrics", "metrics", "Metrics for Prometheus.", METRICS_TEXT,
             refusals=(406,)),
    Endpoint("GET", "/v1/job", "job", "The job as a whole, without its nodes.", JobView,
             without=("nodes",)),
    Endpoint("GET", "/v1/ledger", "ledger", "Where the job's time went.", LedgerReport),
    Endpoint("GET", "/v1/nodes", "nodes", "Every node with its ranks.", NodeList),
    Endpoint("GET", "/v1/incidents", "incidents", "What stopped the job so far.", IncidentList,
             parameters=(_LIMIT,), refusals=(400,)),
    Endpoint("GET", "/v1/incidents/{incident}", "incident", "Everything about one stop.", Incident,
             parameters=(_ID, _FORMAT), refusals=(400, 404, 409)),
    Endpoint("GET", "/incidents", "incident_pages", "Every incident, as a page.", HTML),
    Endpoint("GET", "/incidents/{incident}", "incident_page", "One incident, as a page.", HTML,
             parameters=(_ID,), refusals=(404, 409)),
    Endpoint("POST", "/v1/job/restart", "restart", "Restart the job's processes.", Accepted,
             body=OperatorRequest, status=202, role=Role.OPERATOR, refusals=(400, 409, 415, 422)),
    Endpoint("POST", "/v1/job/stop", "stop", "End the job for good.", Accepted,
             body=OperatorRequest, status=202, role=Role.OPERATOR, refusals=(400, 409, 415, 422)),
    Endpoint("POST", "/v1/nodes/{node}/exclude", "exclude", "Give this node no rank any more.",
             Accepted, parameters=(_NODE,), body=OperatorRequest, status=202, role=Role.OPERATOR,
             refusals=(400, 404, 409, 415, 422)),
    Endpoint("POST", "/v1/nodes/{node}/include", "include", "Let this node be given ranks again.",
             Accepted, parameters=(_NODE,), body=OperatorRequest, status=202, role=Role.OPERATOR,
             refusals=(400, 404, 409, 415, 422)),
    Endpoint("POST", "/v1/health-events", "health_event",
             "Tell what another agent, a scheduler or a provider knows of a node's health.",
             HealthAccepted, body=HealthRequest, status=202, role=Role.OPERATOR,
             refusals=(400, 409, 415, 422)),
    Endpoint("GET", "/v1/audit", "audit", "Who ordered what, and what came of it.", AuditList,
             parameters=(_ORDERS,), refusals=(400,)),
    Endpoint("GET", "/v1/openapi.json", "openapi", "This description.", JSON),
)  # fmt: skip


class OperatorApi:
    """Handlers over one job's picture, journal and inbox; each is named like its endpoint."""

    def __init__(
        self,
        *,
        view: Callable[[], JobView],
        inbox: "asyncio.Queue[Event]",
        journal: Journal,
        exposition: Exposition,
        ledger: Callable[[], LedgerReport],
        trail: AuditTrail,
    ) -> None:
        self._view = view
        self._inbox = inbox
        self._journal = journal
        self._exposition = exposition
        self._ledger = ledger
        self._trail = trail
        self._document = orjson.dumps(document(ENDPOINTS, Problem))

    def routes(self) -> Iterable[web.RouteDef]:
        """Return one route for every row of `ENDPOINTS`."""
        return [
            web.route(item.method, item.path, getattr(self, item.operation)) for item in ENDPOINTS
        ]

    async def health(self, _: web.Request) -> web.Response:
        """Answer probes."""
        view = self._view()
        return answered(Health(status="ok", job=view.job, phase=view.phase))

    async def metrics(self, request: web.Request) -> web.Response:
        """Render the scrape page."""
        try:
            body, content_type = await self._exposition.render(request.headers.get("Accept", ""))
        except AcceptError as error:
            raise web.HTTPNotAcceptable(text=str(error)) from None
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def ledger(self, _: web.Request) -> web.Response:
        """Show where the job's time went."""
        return answered(self._ledger())

    async def job(self, _: web.Request) -> web.Response:
        """Show the job."""
        plain = to_plain(self._view())
        del plain["nodes"]
        return answered(plain)

    async def nodes(self, _: web.Request) -> web.Response:
        """Show the nodes."""
        return answered(NodeList(nodes=self._view().nodes))

    async def incidents(self, request: web.Request) -> web.Response:
        """List incidents."""
        limit = _limit(request, INCIDENTS_LISTED_MAX)
        found = await self._journal.incidents(self._view().job, limit)
        return answered(IncidentList(incidents=tuple(map(summary, found))))

    async def incident(self, request: web.Request) -> web.Response:
        """Show one incident."""
        wanted, form = request.match_info["incident"], request.query.get("format", "json")
        if form not in ("json", "markdown"):
            raise web.HTTPBadRequest(text="format must be json or markdown")
        incident = await find(self._journal, self._view().job, wanted)
        if form == "markdown":
            return web.Response(text=markdown(incident), content_type="text/markdown")
        return answered(incident)

    async def incident_pages(self, _: web.Request) -> web.Response:
        """Show the page that leads to every incident."""
        job = self._view().job
        return _page(listing(job, await self._journal.incidents(job, INCIDENTS_LISTED_DEFAULT)))

    async def incident_page(self, request: web.Request) -> web.Response:
        """Show one incident as a page."""
        wanted = request.match_info["incident"]
        return _page(page(await find(self._journal, self._view().job, wanted)))

    async def restart(self, request: web.Request) -> web.Response:
        """Ask the core for a restart."""
        return await self._ask(request, "restart")

    async def stop(self, request: web.Request) -> web.Response:
        """Ask the core to end the job."""
        return await self._ask(request, "stop")

    async def exclude(self, request: web.Request) -> web.Response:
        """Ask the core to leave a node out."""
        node = request.match_info["node"]
        if node not in {item.node for item in self._view().nodes}:
            raise web.HTTPNotFound(text=f"no node {node!r}; `outrider status` lists them")
        return await self._ask(request, "exclude", node)

    async def include(self, request: web.Request) -> web.Response:
        """Ask the core to take an exclusion back."""
        name = request.match_info["node"]
        node = next((item for item in self._view().nodes if item.node == name), None)
        if node is None:
            raise web.HTTPNotFound(text=f"no node {name!r}; `outrider status` lists them")
        if node.excluded is None:
            raise web.HTTPConflict(text=f"node {name!r} is not excluded")
        if node.unfit is not None:
            raise web.HTTPConflict(text=f"node {name!r} stays excluded: {node.unfit}")
        return await self._ask(request, "include", name)

    async def health_event(self, request: web.Request) -> web.Response:
        """Hand the core what somebody else says of a node's health."""
        asked = await read_body(request, HealthRequest)
        view = self._view()
        if view.phase.terminal:
            raise web.HTTPConflict(text=f"the job has already {view.phase}")
        node = _named(view, asked.node)
        try:
            word = read(asked, node or asked.node, time.time_ns())
        except HealthRequestError as error:
            raise web.HTTPUnprocessableEntity(text=f"body refused: {error}") from None
        await self._inbox.put(HealthTold(word=word))
        severities = [notice.severity for notice in word.notices]
        worst = min(severities, key=tuple(HealthSeverity).index, default=HealthSeverity.HEALTHY)
        accepted = HealthAccepted(
            accepted=True, node=word.node, known=node is not None, severity=worst
        )
        return answered(accepted, status=202)

    async def audit(self, request: web.Request) -> web.Response:
        """List orders."""
        found = await self._trail.newest(_limit(request, RECORDS_KEPT_MAX))
        return answered(AuditList(orders=tuple(found)))

    async def openapi(self, _: web.Request) -> web.Response:
        """Describe this API."""
        return web.Response(body=self._document, content_type="application/json")

    async def _ask(
        self, request: web.Request, action: str, node: str | None = None
    ) -> web.Response:
        asked = await read_body(request, OperatorRequest)
        request[SAID] = asked.who, asked.why
        view = self._view()
        if view.phase.terminal:
            raise web.HTTPConflict(text=f"the job has already {view.phase}")
        await self._trail.note(request, action, "accepted", accepted=True)
        await self._inbox.put(OperatorAsked(action=action, who=asked.who, why=asked.why, node=node))
        return answered(Accepted(accepted=True, action=action), status=202)


def _named(view: JobView, name: str) -> str | None:
    """Return the node of that name, or the only one on the host of that name."""
    if any(item.node == name for item in view.nodes):
        return name
    hosted = [item.node for item in view.nodes if item.host == name]
    return hosted[0] if len(hosted) == 1 else None


def _limit(request: web.Request, most: int) -> int:
    limit = whole_number(request.query.get("limit", str(INCIDENTS_LISTED_DEFAULT)))
    if limit is None or not 1 <= limit <= most:
        raise web.HTTPBadRequest(text=f"limit must be 1 to {most}")
    return limit


def _page(markup: str) -> web.Response:
    return web.Response(text=markup, content_type=HTML, headers=HEADERS)
