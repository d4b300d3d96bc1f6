"""The node's HTTP API: a thin shell around the core.

Requests become commands, the core's `Reply` becomes the answer.  Loopback by default; a token or
certificates where they are configured.  It decides nothing but whether a request can be read, and
writes down who sent it.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping
from ssl import SSLContext
from typing import Any, Final, Protocol

import orjson
from aiohttp import web

from sidecar.access import Access
from sidecar.api import AgentState, Command, Shutdown, StatusReport
from sidecar.events import CommandReceived, Reply
from sidecar.http_bodies import (
    BodyError,
    start_command,
    status_body,
    stop_command,
    update_command,
)
from sidecar.http_faults import read_bytes, server_log
from sidecar.rank_table import RankTable
from sidecar.roles import Role
from sidecar.web_pages import is_loopback, page_problem

BODY_BYTES_MAX: Final = 8 << 20
"""A start for 100,000 nodes names as many addresses."""
REPLY_S_MAX: Final = 10.0
"""The core answers at once; this is the limit for a core that does not."""
WAITING_MAX: Final = 256
"""Requests that wait for the core; more are told to come back."""
END_S_MAX: Final = 1.0
"""Longest wait for open requests at the end."""
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_UNGUARDED: Final = frozenset({"/healthz"})
_READING: Final = frozenset({"GET", "HEAD"})
NOTHING: Final = Access()
_AUDIT: Final = logging.getLogger("outrider.audit")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class NodeView(Protocol):
    """What the API shows of the node."""

    def snapshot(self) -> StatusReport:
        """Return the node's state."""

    def transitions(self) -> Mapping[AgentState, float]:
        """Return when each state was last entered, in seconds since the epoch."""

    def rank_table(self) -> RankTable:
        """Return which host the node of each group rank has."""

    def worker_data(self) -> Mapping[str, str]:
        """Return what waiting ranks have to say to an operator, by global rank."""

    def metrics(self) -> bytes:
        """Return the exposition for Prometheus."""

    def is_alive(self) -> bool:
        """Return whether the loop that runs the core still does."""


class ApiServer:
    """Serves one node.  ``put`` receives the commands; `answer` takes the core's replies."""

    def __init__(
        self,
        view: NodeView,
        put: Callable[[CommandReceived], None],
        *,
        agent_version: str,
        spare: bool,
        access: Access = NOTHING,
    ) -> None:
        self._view = view
        self._put = put
        self._agent_version = agent_version
        self._spare = spare
        self._access = access
        self._own_machine = True
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._numbers = itertools.count(1)
        self._runners: list[web.AppRunner] = []

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port.  Raises `OSError`."""
        self._own_machine = is_loopback(host)
        app = web.Application(middlewares=[self._guard], client_max_size=BODY_BYTES_MAX)
        app.add_routes(
            [
                web.post("/start", self._start),
                web.post("/stop", self._stop),
                web.post("/update", self._update),
                web.post("/shutdown", self._shutdown),
                web.get("/status", self._status),
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._healthz),
            ]
        )
        return await self._serve(app, host, port, self._access.server())

    async def start_scrapes(self, host: str, port: int) -> int:
        """Tell numbers, and no more, to anybody at a second address.  Raises `OSError`."""
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        routes = [web.get("/metrics", self._metrics), web.get("/healthz", self._healthz)]
        app.add_routes(routes)
        return await self._serve(app, host, port, None)

    async def _serve(
        self, app: web.Application, host: str, port: int, context: SSLContext | None
    ) -> int:
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=server_log(),
            handle_signals=False,
            shutdown_timeout=END_S_MAX,
        )
        self._runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, host, port, ssl_context=context).start()
        return int(runner.addresses[0][1])

    async def close(self) -> None:
        """Answer those who still wait, and stop listening."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(TimeoutError())
        for runner in self._runners:
            await runner.cleanup()

    def answer(self, reply: Reply) -> None:
        """Answer the request that waits for ``reply``; nobody may wait any more."""
        waiting = self._waiting.get(reply.request_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    # --- requests -------------------------------------------------------------------------

    async def _start(self, request: web.Request) -> web.Response:
        body = await _json(request, required=True)
        view = self._view
        return await self._command(start_command(body, view.snapshot(), view.rank_table()))

    async def _stop(self, request: web.Request) -> web.Response:
        body = await _json(request, required=False)
        return await self._command(stop_command(body, self._view.snapshot()))

    async def _update(self, request: web.Request) -> web.Response:
        body = await _json(request, required=True)
        return await self._command(update_command(body, self._view.rank_table()))

    async def _shutdown(self, _: web.Request) -> web.Response:
        return await self._command(Shutdown(reason="asked for over the node's HTTP API"))

    async def _status(self, _: web.Request) -> web.Response:
        return self._status_response()

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._view.metrics(), headers={"Content-Type": METRICS_TYPE})

    async def _healthz(self, _: web.Request) -> web.Response:
        if self._view.is_alive():
            return _response(200, {"status": "ok"})
        return _problem(503, "the sidecar's core does not run")

    # --- helpers --------------------------------------------------------------------------

    async def _command(self, command: Command) -> web.Response:
        if len(self._waiting) >= WAITING_MAX:
            return _problem(503, f"{WAITING_MAX} requests wait already; try again")
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._put(CommandReceived(command=command, request_id=number))
        try:
            async with asyncio.timeout(REPLY_S_MAX):
                reply = await waiting
        except TimeoutError:
            return _problem(503, "the sidecar is ending, or its core does not answer")
        finally:
            del self._waiting[number]
        if reply.status != web.HTTPOk.status_code:
            return _problem(reply.status, reply.reason)
        return self._status_response()

    def _status_response(self) -> web.Response:
        body = status_body(
            self._view.snapshot(),
            self._view.transitions(),
            agent_version=self._agent_version,
            spare=self._spare,
            table=self._view.rank_table(),
            worker_data=self._view.worker_data(),
        )
        return _response(200, body)

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        if request.path not in _UNGUARDED:
            refused = self._refusal(request)
            if refused is not None:
                return refused
        try:
            return await handler(request)
        except BodyError as error:
            location = ["body", *(error.field.split(".") if error.field else [])]
            detail = [{"loc": location, "msg": error.reason, "type": "value_error"}]
            return _response(422, {"detail": detail})
        except web.HTTPException as error:
            own_words = error.text if error.status == web.HTTPBadRequest.status_code else None
            return _problem(error.status, own_words or error.reason)

    def _refusal(self, request: web.Request) -> web.Response | None:
        """Return the answer to a request that is not served; write down who orders what."""
        names_checked = self._own_machine and not self._access.asked
        problem = page_problem(request.headers, names_checked=names_checked)
        if problem is not None:
            return _problem(403, problem)
        transport = request.transport
        certificate = None if transport is None else transport.get_extra_info("peercert")
        caller = self._access.caller(request.headers.get("Authorization", ""), certificate)
        if caller is None:
            response = _problem(401, "give the node's token as `Authorization: Bearer ...`")
            response.headers["WWW-Authenticate"] = "Bearer"
            return response
        needed = Role.VIEWER if request.method in _READING else Role.OPERATOR
        if needed not in caller.roles:
            return _problem(403, f"this needs the role {needed}")
        if needed is Role.OPERATOR:
            shown = caller.proof if caller.name is None else f"{caller.proof} {caller.name}"
            _AUDIT.info("order: %a (by %s from %s)", request.path, ascii(shown), request.remote)
        return None


async def _json(request: web.Request, *, required: bool) -> Any:
    """Return the body's JSON value, whatever content type it claims; None when it is empty."""
    data = await read_bytes(request)
    if not data.strip():
        if required:
            raise BodyError("", "a JSON object is required")
        return None
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BodyError("", f"not JSON: {error}") from None


def _response(status: int, body: Any) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(body), content_type="application/json")


def _problem(status: int, reason: str) -> web.Response:
    return _response(status, {"detail": reason})
