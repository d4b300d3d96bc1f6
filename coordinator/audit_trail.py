"""Writes down every order in the journal and in the log, before it is obeyed."""

import logging
import time
from typing import Final

from aiohttp import web

from coordinator.audit import AuditRecord
from coordinator.journal import Journal
from sidecar.roles import ANYBODY, Caller

CALLER: Final = web.RequestKey("caller", Caller)
"""Where the door leaves who asks, on the request."""
SAID: Final = web.RequestKey("said", tuple[str, str])
"""Where a handler leaves who its sender says to be, and why they ask."""

log = logging.getLogger("outrider.audit")


class AuditTrail:
    """The orders of one job."""

    def __init__(self, journal: Journal, job: str) -> None:
        self._journal = journal
        self._job = job

    async def note(self, request: web.Request, order: str, outcome: str, *, accepted: bool) -> None:
        """Write an order down.  Raises `JournalError`: what cannot be kept is not obeyed."""
        caller = request.get(CALLER, ANYBODY)
        who, why = request.get(SAID, (None, None))
        record = AuditRecord(
            at_ns=time.time_ns(),
            order=order,
            node=request.match_info.get("node"),
            who=who,
            why=why,
            proof=caller.proof,
            name=caller.name,
            address=request.remote or "nowhere",
            accepted=accepted,
            outcome=outcome,
        )
        log.log(logging.INFO if accepted else logging.WARNING, "%s", record.sentence())
        await self._journal.note_order(self._job, record)

    async def newest(self, limit: int) -> list[AuditRecord]:
        """Return the newest ``limit`` orders, oldest first.  Raises `JournalError`."""
        return await self._journal.orders(self._job, limit)
