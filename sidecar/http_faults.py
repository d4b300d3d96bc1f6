"""What HTTP clients do wrong before a handler is asked: one line of log, one sentence back.

The library says of bytes that are no HTTP, and of a body that cannot be unpacked, what it says of
a bug: a page of its own calls.  Neither is one; both come from whoever can reach the port.
"""

import logging
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError

THEIR_FAULTS: Final = (HttpProcessingError, RequestPayloadError)


def server_log() -> logging.Logger:
    """Return the logger to give an `aiohttp.web.AppRunner`."""
    log = logging.getLogger("outrider.http")
    log.addFilter(_one_line)  # a filter that is there already is not added again
    return log


async def read_bytes(request: web.Request) -> bytes:
    """Return the body of ``request``.  Raises 400 where it cannot be read as it was announced."""
    try:
        return await request.read()
    except THEIR_FAULTS as error:
        raise web.HTTPBadRequest(text=f"the body cannot be read: {_reason(error)}") from None


def _one_line(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    if isinstance(error, THEIR_FAULTS):
        record.msg = f"{record.getMessage()}: {_reason(error)}"
        record.args, record.exc_info = (), None
        record.levelno, record.levelname = logging.WARNING, "WARNING"
    return True


def _reason(error: BaseException) -> str:
    text = error.message if isinstance(error, HttpProcessingError) else str(error)
    return " ".join(text.split()) or type(error).__name__
