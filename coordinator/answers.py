"""JSON answers of the operator API, and the one shape of its refusals."""

from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from sidecar.codec import to_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why a request was not served."""

    error: str


def answered(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Return ``body`` as JSON."""
    data = orjson.dumps(to_plain(body))
    return web.Response(body=data, status=status, headers=headers, content_type="application/json")
