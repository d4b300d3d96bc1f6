import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator import journal as journal_module
from coordinator.audit import AuditRecord
from coordinator.incidents import Incident, IncidentPhase, Outcome
from coordinator.journal import JOURNAL_NAME, Journal
from coordinator.journal_format import DurableState, JournalError
from coordinator.kept_journal import KeptJournal, kept_orders
from coordinator.phases import JobPhase

pytestmark = pytest.mark.component

COMMIT_LOOP = """
import asyncio, sys
from pathlib import Path
from coordinator.incidents import Incident
from coordinator.audit import AuditRecord
from coordinator.journal import JOURNAL_NAME, Journal
from coordinator.journal_format import DurableState

async def main():
    journal = Journal.open(Path(sys.argv[1]))
    before = journal.load("job")
    generation = 0 if before is None else before.generation
    while True:
        generation += 1
        incident = Incident(id=f"i{generation}", job="job", generation=generation,
                            topology_version=0, trigger="t" * 2000, outcome="recovered")
        await journal.commit(DurableState(job="job", generation=generation), incident)
        print(generation, flush=True)

asyncio.run(main())
"""


@contextmanager
def opened(path: Path) -> Iterator[Journal]:
    """Yield the journal at ``path`` and close it."""
    journal = Journal.open(path)
    try:
        yield journal
    finally:
        asyncio.run(journal.close())


def incident(number: int, outcome: Outcome = Outcome.RECOVERED) -> Incident:
    """Return an incident that began at instant ``number``."""
    return Incident(
        id=f"i{number}",
        job="job",
        generation=number,
        topology_version=1,
        trigger="crash",
        outcome=outcome,
    ).reached(IncidentPhase.FAULT, number)


def test_everything_acknowledged_survives_a_sigkill(tmp_path: Path) -> None:
    """A coordinator that forgets a generation it acted upon lets two worlds run at once."""
    path = tmp_path / "journal.sqlite"
    acknowledged = 0
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", COMMIT_LOOP, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(40):
            acknowledged = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
        rest = process.stdout.read().split()
        process.stdout.close()
        assert process.wait() == -signal.SIGKILL
        acknowledged = int(rest[-1]) if rest else acknowledged
        with opened(path) as journal:
            state = journal.load("job")
            assert state is not None
            assert acknowledged <= state.generation <= acknowledged + 1
            kept = asyncio.run(journal.incidents("job"))
            assert [item.generation for item in kept] == list(range(1, state.generation + 1))


def test_state_and_incident_come_back_as_they_were(tmp_path: Path) -> None:
    """A field lost on the way is a restart budget or an exclusion that is silently forgiven."""
    state = DurableState(
        job="job",
        phase=JobPhase.LOCALIZING,
        generation=7,
        world=("a", "b"),
        excluded={"c": "gpu fell off the bus"},
        open_incident=incident(3, Outcome.OPEN),
    )
    with opened(tmp_path / "j") as journal:
        assert journal.load("job") is None
        asyncio.run(journal.commit(state, incident(3, Outcome.OPEN)))
    with opened(tmp_path / "j") as journal:
        assert journal.load("job") == state
        assert journal.load("another") is None
        assert asyncio.run(journal.incident("job", "i3")) == incident(3, Outcome.OPEN)
        assert asyncio.run(journal.incident("job", "i4")) is None


def test_an_incident_is_updated_in_place_and_listed_oldest_first(tmp_path: Path) -> None:
    """Two rows for one stop would count one restart twice."""
    state = DurableState(job="job")
    with opened(tmp_path / "j") as journal:
        for number in (1, 2, 3):
            begun = incident(number, Outcome.OPEN)
            asyncio.run(journal.commit(replace(state, open_incident=begun), begun))
            asyncio.run(journal.commit(state, incident(number, Outcome.FAILED)))
        begun = incident(4, Outcome.OPEN)
        asyncio.run(journal.commit(replace(state, open_incident=begun), begun))
        kept = asyncio.run(journal.incidents("job"))
        assert [(item.id, item.outcome.value) for item in kept] == [
            ("i1", "failed"),
            ("i2", "failed"),
            ("i3", "failed"),
            ("i4", "open"),
        ]
        assert [item.id for item in asyncio.run(journal.incidents("job", 2))] == ["i3", "i4"]


def test_an_incident_that_was_dropped_is_forgotten(tmp_path: Path) -> None:
    """A stall that was none would be shown as an open incident for ever."""
    begun = incident(1, Outcome.OPEN)
    state = DurableState(job="job")
    with opened(tmp_path / "j") as journal:
        asyncio.run(journal.commit(replace(state, open_incident=begun), begun))
        assert asyncio.run(journal.incidents("job")) == [begun]
        asyncio.run(journal.commit(state))
        assert asyncio.run(journal.incidents("job")) == []


def test_the_number_of_incidents_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash loop over a week-end must not fill the disk."""
    monkeypatch.setattr(journal_module, "INCIDENTS_KEPT_MAX", 4)
    with opened(tmp_path / "j") as journal:
        for number in range(9):
            asyncio.run(journal.commit(DurableState(job="job"), incident(number)))
        kept = asyncio.run(journal.incidents("job"))
        assert [item.id for item in kept] == ["i5", "i6", "i7", "i8"]


def test_a_second_coordinator_on_one_journal_is_refused(tmp_path: Path) -> None:
    """Two coordinators of one job give out the same ranks twice."""
    with (
        opened(tmp_path / "j"),
        pytest.raises(JournalError, match="in use by another coordinator"),
    ):
        Journal.open(tmp_path / "j")
    with opened(tmp_path / "j"):
        pass


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    """A mistyped --state-dir must not destroy somebody's file."""
    path = tmp_path / "j"
    path.write_bytes(b"these are my notes, not a database at all\n" * 100)
    before = path.read_bytes()
    with pytest.raises(JournalError, match=r"damaged or not ours.*move it away"):
        Journal.open(path)
    assert path.read_bytes() == before


def test_another_programs_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    """The same, for a database."""
    path = tmp_path / "j"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(JournalError, match="database of another program"):
        Journal.open(path)
    assert path.read_bytes() == before


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    """An older coordinator that writes into newer tables damages both versions' view."""
    path = tmp_path / "j"
    with opened(path):
        pass
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(JournalError, match="schema 99"):
        Journal.open(path)


def test_a_damaged_journal_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """Acting upon a half-readable state is worse than not starting."""
    path = tmp_path / "j"
    with opened(path) as journal:
        for number in range(50):
            asyncio.run(journal.commit(DurableState(job="job"), incident(number)))
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(size - 4096))
    with pytest.raises(JournalError) as caught:
        Journal.open(path)
    assert "\n" not in str(caught.value)
    assert "move it away" in str(caught.value)


def test_an_unwritable_state_directory_is_refused(tmp_path: Path) -> None:
    """The way out belongs into the message."""
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(JournalError, match="give another --state-dir"):
        Journal.open(file / "journal")


def test_a_commit_that_fails_says_so(tmp_path: Path) -> None:
    """An effect must never follow a commit that did not happen."""
    with opened(tmp_path / "j") as journal:
        journal._connection.execute("PRAGMA max_page_count = 12")
        huge = replace(incident(1), trigger="x" * 1_000_000)
        with pytest.raises(JournalError, match="free the disk"):
            asyncio.run(journal.commit(DurableState(job="job", generation=5), huge))
        assert journal.load("job") is None
        assert asyncio.run(journal.incidents("job")) == []


@pytest.mark.parametrize("gone", ["the folder", "the file"])
@pytest.mark.parametrize("name", [b"state", b"state-\xff"], ids=["UTF-8", "no UTF-8"])
def test_a_journal_that_is_deleted_while_in_use_is_written_anew(
    tmp_path: Path, gone: str, name: bytes
) -> None:
    """A cleaner of old files takes it away; a restart would then forget every generation."""
    path = tmp_path / os.fsdecode(name) / "journal.sqlite"

    async def scene() -> None:
        journal = Journal.open(path)
        await journal.commit(DurableState(job="job", generation=1), incident(1))
        if gone == "the folder":
            shutil.rmtree(path.parent)
        else:
            path.unlink()
        await journal.commit(DurableState(job="job", generation=2), incident(2))
        with pytest.raises(JournalError, match="in use by another coordinator"):
            Journal.open(path)
        await journal.commit(DurableState(job="job", generation=3), incident(3))
        await journal.close()

    asyncio.run(scene())
    with opened(path) as journal:
        state = journal.load("job")
        assert state is not None
        assert state.generation == 3
        assert [one.id for one in asyncio.run(journal.incidents("job"))] == ["i1", "i2", "i3"]
    assert [one.id for one in KeptJournal.read(path.parent).incidents] == ["i1", "i2", "i3"]
    assert not Path(f"{path}.new").exists()


def test_a_journal_whose_place_was_taken_meanwhile_is_left_to_its_new_owner(tmp_path: Path) -> None:
    """Two coordinators of one job would both give out ranks."""
    path = tmp_path / "state" / "journal.sqlite"

    async def scene() -> None:
        journal = Journal.open(path)
        await journal.commit(DurableState(job="job", generation=7))
        shutil.rmtree(path.parent)
        second = Journal.open(path)
        with pytest.raises(JournalError, match="another file was put in place of the journal"):
            await journal.commit(DurableState(job="job", generation=8))
        assert second.load("job") is None
        path.unlink()  # not even then: its lock stands
        with pytest.raises(JournalError, match="in use by another coordinator"):
            await journal.commit(DurableState(job="job", generation=8))
        await second.close()
        await journal.close()

    asyncio.run(scene())


def test_a_journal_whose_tables_have_no_readable_names_is_refused_in_a_sentence(
    tmp_path: Path,
) -> None:
    """SQLite's message about such a file is no text itself, and would end in a traceback."""
    path = tmp_path / JOURNAL_NAME
    asyncio.run(Journal.open(path).close())
    whole = path.read_bytes()
    at = whole.index(b"CREATE TABLE")
    path.write_bytes(whole[:at] + b"\x80" + whole[at + 1 :])
    with pytest.raises(JournalError, match="damaged"):
        Journal.open(path)
    with pytest.raises(JournalError, match="cannot be read"):
        KeptJournal.read(tmp_path)


def test_orders_are_kept_and_refused_ones_push_none_of_them_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may not order anything could make the proof of what others did disappear."""
    monkeypatch.setattr("coordinator.journal.RECORDS_KEPT_MAX", 3)
    order = AuditRecord(
        at_ns=1, order="stop", node=None, who="a", why="b", proof="token", name=None,
        address="127.0.0.1", accepted=True, outcome="accepted",
    )  # fmt: skip

    async def scene() -> list[AuditRecord]:
        journal = Journal.open(tmp_path / JOURNAL_NAME)
        await journal.note_order("job", order)
        for number in range(10):
            refused = replace(order, accepted=False, at_ns=number)
            await journal.note_order("job", refused)
        found = await journal.orders("job", 100)
        await journal.close()
        return found

    found = asyncio.run(scene())
    assert found[0] == order
    assert [record.at_ns for record in found[1:]] == [7, 8, 9]
    assert list(kept_orders(tmp_path)) == found
