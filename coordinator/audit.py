"""What is written down of every order: who gave it, why, how they proved it, what came of it.

Pure: a record and its words.
"""

from dataclasses import dataclass
from typing import Final

import msgspec

from coordinator.journal_format import JournalError
from coordinator.wording import one_line

RECORDS_KEPT_MAX: Final = 10_000
"""Per job, of those obeyed and of those refused: whoever may not order anything can fill the
second, and never push anything out of the first."""
TEXT_CHARS_MAX: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """One order, obeyed or not.

    ``who`` and ``why`` are what the sender said, None where it was not heard; ``proof`` and
    ``name`` are what they showed: see `sidecar.roles.Caller`.  ``at_ns`` is wall-clock time.
    """

    at_ns: int
    order: str
    node: str | None
    who: str | None
    why: str | None
    proof: str
    name: str | None
    address: str
    accepted: bool
    outcome: str

    def sentence(self) -> str:
        """Return it as one line of a log."""
        what = self.order if self.node is None else f"{self.order} {self.node}"
        shown = self.proof if self.name is None else f"{self.proof} {self.name}"
        said = "" if self.who is None else f" for {self.who}: {self.why}"
        text = f"order: {what}{said} (by {shown} from {self.address}): {self.outcome}"
        return one_line(text, 2 * TEXT_CHARS_MAX)


def encode_record(record: AuditRecord) -> bytes:
    """Return the JSON bytes of ``record``."""
    return msgspec.json.encode(record)


def decode_record(data: bytes) -> AuditRecord:
    """Return the record in ``data``.  Raises `JournalError`."""
    try:
        return msgspec.json.decode(data, type=AuditRecord)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise JournalError(f"the journal's audit is damaged: {error}") from error
