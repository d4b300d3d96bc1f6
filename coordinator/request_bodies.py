"""Bodies of requests to the operator API: read, checked, and refused in one sentence."""

from typing import TypeVar

import msgspec
from aiohttp import web

from sidecar.field_errors import explained
from sidecar.http_faults import read_bytes

T = TypeVar("T")


async def read_body(request: web.Request, cls: type[T]) -> T:
    """Return the body as a ``cls``.

    Raises 415 for another content type, 400 for what is no JSON, and 422 naming the field, what
    stands there and what may stand there.
    """
    if request.content_type != "application/json":  # a web page cannot send this unasked
        raise web.HTTPUnsupportedMediaType(text="the body must be sent as application/json")
    data = await read_bytes(request)
    try:
        plain = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise web.HTTPBadRequest(text=f"the body is not JSON: {error}") from None
    try:
        return msgspec.convert(plain, cls)
    except msgspec.ValidationError as error:
        field, reason = explained(str(error), plain, cls)
        told = f"{field}: {reason}" if field else f"it {reason}"
        raise web.HTTPUnprocessableEntity(text=f"body refused: {told}") from None
