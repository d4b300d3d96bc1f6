"""The operator API's door: who may pass, what is written down of it, how refusals are worded."""

import asyncio
import logging
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from coordinator.admission import Admission, challenge
from coordinator.answers import Problem, answered
from coordinator.audit_trail import CALLER, AuditTrail
from coordinator.openapi import Endpoint
from coordinator.operator_api import ENDPOINTS, OperatorRequest
from coordinator.wording import one_line
from sidecar.api import UPLINK_PATH
from sidecar.roles import Role

PROBLEM_CHARS_MAX: Final = 2_000
"""Longest sentence about a request: some of it is the request's own words."""
SAY_AGAIN_S: Final = 10.0
"""Between two log lines about strangers: somebody who guesses words must not fill a disk."""

_ENDPOINTS: Final = {(item.method, item.path): item for item in ENDPOINTS}
log = logging.getLogger("outrider.audit")


class _Strangers:
    """Says now and then who was turned away, and how many since."""

    def __init__(self) -> None:
        self._silent_until = 0.0
        self._unsaid = 0

    def note(self, request: web.Request, reason: str) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._silent_until:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} more since the last such line)" if self._unsaid else ""
        what = one_line(f"{request.method} {request.path} from {request.remote}: {reason}")
        log.warning("turned away: %s%s", what, more)
        self._silent_until, self._unsaid = now + SAY_AGAIN_S, 0


def guard(admission: Admission, trail: AuditTrail) -> Middleware:
    """Return the middleware that asks who somebody is, lets pass who may, and words errors."""
    strangers = _Strangers()

    async def refusal(request: web.Request, endpoint: Endpoint | None) -> web.Response | None:
        needed = _needed(request, endpoint)
        reason = admission.problem(request, needed)
        if reason is not None:
            strangers.note(request, reason)
            return answered(Problem(error=reason), 403)
        caller = admission.caller(request, needed)
        if caller is None:
            strangers.note(request, "no valid token or certificate")
            headers = {"WWW-Authenticate": challenge(request)}
            return answered(Problem(error="a valid bearer token is needed"), 401, headers)
        request[CALLER] = caller
        if needed in caller.roles:
            return None
        sentence = f"this needs the role {needed}; what was shown gives {_listed(caller.roles)}"
        if (order := _order(endpoint)) is not None:
            await trail.note(request, order, sentence, accepted=False)
        else:
            strangers.note(request, sentence)
        return answered(Problem(error=sentence), 403)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        endpoint = _endpoint(request)
        if endpoint is None or not endpoint.public:
            refused = await refusal(request, endpoint)
            if refused is not None:
                return refused
        try:
            return await handler(request)
        except web.HTTPException as error:
            if error.status < web.HTTPBadRequest.status_code:
                raise
            sentence = one_line(_sentence(request, error), PROBLEM_CHARS_MAX)
            if (order := _order(endpoint)) is not None:
                await trail.note(request, order, sentence, accepted=False)
            return answered(Problem(error=sentence), error.status)

    return middleware


def _endpoint(request: web.Request) -> Endpoint | None:
    resource = request.match_info.route.resource
    method = "GET" if request.method == "HEAD" else request.method
    return None if resource is None else _ENDPOINTS.get((method, resource.canonical))


def _order(endpoint: Endpoint | None) -> str | None:
    """Return the order that an endpoint takes: a person's, which says who and why."""
    return endpoint.operation if endpoint and endpoint.body is OperatorRequest else None


def _needed(request: web.Request, endpoint: Endpoint | None) -> Role:
    if endpoint is not None:
        return endpoint.role
    return Role.SIDECAR if request.path == UPLINK_PATH else Role.VIEWER


def _listed(roles: frozenset[Role]) -> str:
    return ", ".join(sorted(roles)) or "none"


def _sentence(request: web.Request, error: web.HTTPException) -> str:
    if isinstance(error, web.HTTPMethodNotAllowed):
        return f"{request.path} takes {', '.join(sorted(error.allowed_methods))}"
    if error.text and error.text != f"{error.status}: {error.reason}":
        return error.text
    known = ", ".join([*(item.path for item in ENDPOINTS), UPLINK_PATH])
    return f"{error.reason}: {request.path}; known paths: {known}"
