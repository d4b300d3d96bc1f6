"""Strikes on a real disk, shared by several coordinators."""

import asyncio
import logging
import sqlite3

import pytest

from coordinator.offender_store import OffenderStore
from coordinator.offenders import Strike

pytestmark = pytest.mark.component


def a_strike(job="j", number=1, node="n1") -> Strike:
    return Strike(
        node=node, cause="crash: x", at_ns=number, weight=0.5, job=job, incident=f"{job}-{number}"
    )


def test_what_one_job_saw_the_next_one_knows(tmp_path):
    """Three nodes of sixty-three were half of all exclusions of a published run."""

    async def story():
        path = tmp_path / "new" / "offenders.sqlite"
        first, second = OffenderStore(path), OffenderStore(path)
        await asyncio.gather(
            *(first.add([a_strike("a", number)]) for number in range(1, 20)),
            *(second.add([a_strike("b", number)]) for number in range(1, 20)),
        )
        await first.add([a_strike("a", 1)])  # the same incident again is the same strike
        return await OffenderStore(path).read()

    found = asyncio.run(story())
    assert len(found) == 38
    assert found[0].at_ns == 1
    assert a_strike("b", 7) in found


def test_strikes_of_several_incidents_at_once_are_all_on_disk_at_the_end(tmp_path):
    """The end of a job waited for the newest write alone, and the ones before it were lost."""

    async def story():
        store = OffenderStore(tmp_path / "offenders.sqlite")
        for number in range(1, 9):
            store.remember([a_strike(number=number)])
        await store.flush()
        return await store.read()

    assert [found.at_ns for found in asyncio.run(story())] == list(range(1, 9))


def test_a_file_that_cannot_be_used_costs_the_memory_and_not_the_job(tmp_path, caplog):
    """A full or foreign disk file must not stop a recovery."""
    foreign = tmp_path / "foreign.sqlite"
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    garbage = tmp_path / "garbage.sqlite"
    garbage.write_bytes(b"no database at all" * 100)
    with caplog.at_level(logging.ERROR, "outrider.offenders"):
        for path in (foreign, garbage, tmp_path):
            store = OffenderStore(path)
            assert asyncio.run(store.read()) == ()
            asyncio.run(store.add([a_strike()]))
    assert caplog.text.count("cannot be used") == 6
    assert "another --offenders FILE" in caplog.text
    with sqlite3.connect(foreign) as connection:
        tables = connection.execute("SELECT name FROM sqlite_schema").fetchall()
    assert tables == [("theirs",)]
