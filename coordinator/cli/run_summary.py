"""What a run that stood alone says at its end: what stopped it, and where to read more."""

import logging
import shlex
from pathlib import Path
from typing import Final

from coordinator.incident_text import summary
from coordinator.journal_format import JournalError
from coordinator.kept_journal import KeptJournal

INCIDENTS_SAID_MAX: Final = 20
"""The newest ones; all are in the journal."""

log = logging.getLogger("outrider.run")


def say_what_happened(state_dir: Path) -> None:
    """Log one line an incident: who it was, what was done, and how it ended."""
    try:
        incidents = KeptJournal.read(state_dir).incidents
    except JournalError as error:
        log.warning("%s", error)
        return
    if not incidents:
        log.info("nothing stopped the job")
        return
    noun = "incident" if len(incidents) == 1 else "incidents"
    log.info("%d %s:", len(incidents), noun)
    for incident in incidents[-INCIDENTS_SAID_MAX:]:
        log.info("  %s", summary(incident))
    where = shlex.quote(str(state_dir))
    log.info("`outrider explain last --state-dir %s` tells the last one", where)
