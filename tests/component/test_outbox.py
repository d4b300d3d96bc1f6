import asyncio
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest

from coordinator import outbox as outbox_module
from coordinator.events import Accept, Effect, Finished, Persist, Say, Send
from coordinator.incidents import Incident, Outcome
from coordinator.journal import Journal
from coordinator.journal_format import DurableState, JournalError, decode_state
from coordinator.outbox import Outbox
from sidecar.api import Stop
from worker_shim.messages import RestartMode

pytestmark = pytest.mark.component

DEADLINE_S = 30.0


def persist(generation: int, incident: str | None = None) -> Persist:
    """Return a persist of ``generation``, with a closed incident if one is named."""
    return Persist(
        state=DurableState(job="job", generation=generation),
        incident=None
        if incident is None
        else Incident(
            id=incident,
            job="job",
            generation=generation,
            topology_version=0,
            trigger="crash",
            outcome=Outcome.RECOVERED,
        ),
    )


def stop(generation: int) -> Send:
    """Return a command that is only right once ``generation`` is durable."""
    return Send(
        link=1,
        command=Stop(generation=generation, restart_mode=RestartMode.PROCESS, reason="crash"),
    )


async def carry_out(
    effects: Sequence[Effect], path: Path
) -> tuple[list[tuple[Effect, int]], list[int]]:
    """Run ``effects`` against a real journal.

    Returns each executed effect with the generation that another reader of the file saw at that
    moment, and the number of incidents of each transaction.
    """
    journal = Journal.open(path)
    seen: list[tuple[Effect, int]] = []
    transactions: list[int] = []

    def execute(effect: Effect) -> None:
        seen.append((effect, durable_generation(path)))

    async def commit(state: DurableState, incidents: Sequence[Incident]) -> None:
        transactions.append(len(incidents))
        await journal.commit(state, *incidents)

    outbox = Outbox(commit=commit, execute=execute)
    running = asyncio.create_task(outbox.run())
    expected = sum(not isinstance(effect, Persist) for effect in effects)
    for effect in effects:
        outbox.put(effect)
        if isinstance(effect, Accept):
            await asyncio.sleep(0)  # let the queue be worked on between some effects
    async with asyncio.timeout(DEADLINE_S):
        while len(seen) < expected:
            assert not running.done()
            await asyncio.sleep(0.001)
    running.cancel()
    await journal.close()
    return seen, transactions


def durable_generation(path: Path) -> int:
    """Return the generation that a second connection to the journal reads."""
    connection = sqlite3.connect(path)
    try:
        row = connection.execute("SELECT json FROM state WHERE job = 'job'").fetchone()
    finally:
        connection.close()
    return 0 if row is None else decode_state(row[0]).generation


def test_no_command_overtakes_its_commit(tmp_path: Path) -> None:
    """A stop that was sent but not remembered is sent again under a generation already used."""
    effects: list[Effect] = []
    for generation in range(1, 40):
        effects += [persist(generation), Accept(link=1), stop(generation)]
        effects += [Say(level="info", text=str(generation))] * (generation % 3)
    seen, _ = asyncio.run(carry_out(effects, tmp_path / "j"))
    assert [item for item, _ in seen] == [e for e in effects if not isinstance(e, Persist)]
    for effect, durable in seen:
        if isinstance(effect, Send) and isinstance(effect.command, Stop):
            assert durable >= effect.command.generation


def test_adjacent_commits_become_one_with_every_incident(tmp_path: Path) -> None:
    """A burst of reports must not cost a disk flush each, nor lose the incident before the last."""
    effects = [
        persist(1, "i1"),
        persist(2, "i1"),
        Say(level="info", text="between"),
        persist(3, "i2"),
        stop(3),
    ]
    seen, transactions = asyncio.run(carry_out(effects, tmp_path / "j"))
    assert transactions == [2]
    assert [effect for effect, _ in seen] == [Say(level="info", text="between"), stop(3)]

    async def kept() -> list[tuple[str, int]]:
        journal = Journal.open(tmp_path / "j")
        found = await journal.incidents("job")
        await journal.close()
        return [(incident.id, incident.generation) for incident in found]

    assert asyncio.run(kept()) == [("i1", 2), ("i2", 3)]


def test_nothing_is_done_after_a_commit_that_failed() -> None:
    """Commands given from memory alone are forgotten by the next coordinator."""
    executed: list[Effect] = []

    async def commit(state: DurableState, incidents: Sequence[Incident]) -> None:
        raise JournalError("no room")

    async def scene() -> None:
        outbox = Outbox(commit=commit, execute=executed.append)
        for effect in (Accept(link=1), persist(1), stop(1), Finished(outcome="failed", reason="")):
            outbox.put(effect)
        await outbox.run()

    with pytest.raises(JournalError, match="no room"):
        asyncio.run(scene())
    assert executed == [Accept(link=1)]


def test_a_journal_that_stands_still_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting effects must not grow until the machine runs out of memory."""
    monkeypatch.setattr(outbox_module, "EFFECTS_MAX", 3)

    async def never(state: DurableState, incidents: Sequence[Incident]) -> None:
        await asyncio.Event().wait()

    async def scene() -> None:
        outbox = Outbox(commit=never, execute=lambda _: None)
        for generation in range(4):
            outbox.put(persist(generation))

    with pytest.raises(JournalError, match="does not keep up"):
        asyncio.run(scene())
