"""Where the commands about incidents get them from: a coordinator, or a journal on disk."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from coordinator.cli.arguments import add_target, given_path
from coordinator.cli.client import Client
from coordinator.cli.errors import UserError
from coordinator.incident_list import NotOneIncidentError, pick, summary
from coordinator.incident_text import markdown
from coordinator.incidents import Incident
from coordinator.journal_format import JournalError
from coordinator.kept_journal import KeptJournal
from sidecar.codec import to_plain


class IncidentSource(Protocol):
    """What the commands ask for; each method raises `UserError`."""

    def listed(self, limit: int) -> list[dict[str, Any]]:
        """Return the newest ``limit`` incidents as rows, oldest first."""

    def whole(self, wanted: str) -> Any:
        """Return the JSON of the incident that ``wanted`` names."""

    def page(self, wanted: str) -> str:
        """Return its Markdown page."""


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add which coordinator to ask, or which journal to read instead."""
    add_target(parser)
    parser.add_argument(
        "--state-dir",
        type=given_path,
        metavar="DIR",
        help="read the journal in DIR instead, with no coordinator running",
    )


def source_of(args: argparse.Namespace) -> IncidentSource:
    """Return the source that the command line names.  Raises `UserError`."""
    if args.state_dir is None:
        return _Asked(client=Client.of(args))
    try:
        return _Kept(incidents=KeptJournal.read(args.state_dir).incidents)
    except (JournalError, OSError) as error:
        raise UserError(str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    client: Client

    def listed(self, limit: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.client.get("v1", "incidents", limit=limit)["incidents"]
        return found

    def whole(self, wanted: str) -> Any:
        return self.client.get("v1", "incidents", wanted)

    def page(self, wanted: str) -> str:
        text = self.client.fetch("v1", "incidents", wanted, format="markdown")
        return text.decode(errors="backslashreplace")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    incidents: Sequence[Incident]

    def listed(self, limit: int) -> list[dict[str, Any]]:
        return [to_plain(summary(incident)) for incident in self.incidents[-limit:]]

    def whole(self, wanted: str) -> Any:
        return to_plain(self._one(wanted))

    def page(self, wanted: str) -> str:
        return markdown(self._one(wanted))

    def _one(self, wanted: str) -> Incident:
        try:
            name = pick(wanted, [incident.id for incident in self.incidents])
        except NotOneIncidentError as error:
            raise UserError(str(error)) from error
        return next(incident for incident in reversed(self.incidents) if incident.id == name)
