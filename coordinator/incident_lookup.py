"""The incident that a request means, read from the journal."""

from aiohttp import web

from coordinator.incident_list import NotOneIncidentError, pick
from coordinator.incidents import Incident
from coordinator.journal import Journal


async def find(journal: Journal, job: str, wanted: str) -> Incident:
    """Return the incident, or raise what the HTTP API answers instead."""
    try:
        name = pick(wanted, await journal.incident_ids(job))
    except NotOneIncidentError as error:
        refusal = web.HTTPConflict if error.several else web.HTTPNotFound
        raise refusal(text=str(error)) from None
    incident = await journal.incident(job, name)
    if incident is None:
        raise web.HTTPNotFound(text=f"incident {name!r} has just been dropped")
    return incident
