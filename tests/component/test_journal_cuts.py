"""The journal cut at every byte at which a kill, a lost power supply or a copy can leave it.

SQLite hands a commit to the kernel page by page, so a machine that dies leaves the write-ahead
log at any length, or the main file with any share of a checkpoint.
"""

import asyncio
import os
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from coordinator.incidents import Incident, IncidentPhase, Outcome
from coordinator.journal import Journal
from coordinator.journal_format import DurableState, JournalError

pytestmark = pytest.mark.component

LAST = 5
"""Commits of the story; the last but one has an incident, the last has none."""

FINE_PAGE_BYTES = 512
FRAME_HEADER_BYTES = 24


@dataclass(frozen=True)
class Story:
    """The bytes of a journal in use, and from which length of the log each commit was told."""

    main: bytes
    log: bytes
    folded: bytes
    """The main file once the log was folded into it."""
    acknowledged: tuple[int, ...]
    """Length of the log when the commit of that number, from 1, was acknowledged."""

    def told(self, cut: int) -> int:
        """Return the last commit that was acknowledged when the log had ``cut`` bytes."""
        return sum(length <= cut for length in self.acknowledged)


def incident(number: int) -> Incident:
    """Return the incident of commit ``number``."""
    return Incident(
        id=f"i{number}",
        job="job",
        generation=number,
        topology_version=1,
        trigger="crash",
        outcome=Outcome.RECOVERED,
    ).reached(IncidentPhase.FAULT, number)


async def commit(journal: Journal, number: int) -> None:
    """Make generation ``number`` durable, and its incident unless it is the last."""
    incidents = [] if number == LAST else [incident(number)]
    await journal.commit(DurableState(job="job", generation=number), *incidents)


def written(path: Path) -> Story:
    """Return what the real store writes for five commits at ``path``."""
    journal, log, lengths = Journal.open(path), Path(f"{path}-wal"), []
    with asyncio.Runner() as runner:
        for number in range(1, LAST + 1):
            runner.run(commit(journal, number))
            lengths.append(log.stat().st_size)
        main, data = path.read_bytes(), log.read_bytes()
        runner.run(journal.close())
    return Story(main, data, path.read_bytes(), tuple(lengths))


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Return a journal as every coordinator writes it."""
    return written(tmp_path_factory.mktemp("story") / "j")


@pytest.fixture(scope="module")
def fine_story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Return the same in SQLite's smallest pages: as many torn places in an eighth of the bytes."""
    path = tmp_path_factory.mktemp("fine-story") / "j"
    with closing(sqlite3.connect(path)) as empty:
        empty.execute(f"PRAGMA page_size = {FINE_PAGE_BYTES}")
        empty.execute("VACUUM")
    return written(path)


class Scene:
    """One folder, in which a journal is laid down as a dead machine left it and opened again."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "j"
        self._folder = folder
        self._loop = asyncio.new_event_loop()

    def close(self) -> None:
        """Let go of the loop."""
        self._loop.close()

    def lay(self, main: bytes, log: bytes) -> None:
        """Put the files there, beside the lock file of a journal that was in use."""
        for file in self._folder.iterdir():
            file.unlink()
        self.path.write_bytes(main)
        Path(f"{self.path}.lock").write_bytes(b"1")
        if log:
            Path(f"{self.path}-wal").write_bytes(log)

    def known(self, *, goes_on: bool = False) -> int:
        """Return the generation that the coordinator would go on from; 0 when none is known.

        ``goes_on`` commits one more and reads everything back.  Raises `JournalError`.
        """
        journal = Journal.open(self.path)
        try:
            state = journal.load("job")
            known = 0 if state is None else state.generation
            kept = self._do(journal.incidents("job"))
            expected = [number for number in range(1, known + 1) if number != LAST]
            assert [item.generation for item in kept] == expected
            if goes_on:
                self._do(journal.commit(DurableState(job="job", generation=known + 10)))
        finally:
            self._do(journal.close())
        if goes_on:
            journal = Journal.open(self.path)
            again = journal.load("job")
            self._do(journal.close())
            assert again is not None
            assert again.generation == known + 10
        return known

    def _do(self, work):
        return self._loop.run_until_complete(work)


def cut_and_known(story: Story, scene: Scene, cuts: Iterable[int]) -> set[int]:
    """Return what was known after each cut of the log, each being all that had been told."""
    seen = set()
    for cut in cuts:
        scene.lay(story.main, story.log[:cut])
        seen.add(known := scene.known(goes_on=cut % 257 == 0))
        assert known == story.told(cut), f"the log was cut at byte {cut}"
    return seen


@pytest.fixture
def scene() -> Iterator[Scene]:
    """Yield a folder in memory where there is one: what is measured is the file, not the disk."""
    memory = Path("/dev/shm")
    where = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="outrider-cuts-", dir=where) as folder:
        found = Scene(Path(folder))
        yield found
        found.close()


def test_a_log_cut_at_every_byte_of_its_last_records_loses_nothing_that_was_told(
    fine_story: Story, scene: Scene
) -> None:
    """A coordinator that forgets a generation it acted upon lets two worlds run at once."""
    assert int.from_bytes(fine_story.folded[16:18]) == FINE_PAGE_BYTES
    cuts = range(fine_story.acknowledged[LAST - 3], len(fine_story.log) + 1)
    assert cut_and_known(fine_story, scene, cuts) == {LAST - 2, LAST - 1, LAST}


def test_pages_of_the_common_size_are_torn_no_worse(story: Story, scene: Scene) -> None:
    """Every byte of what SQLite writes between two pages, and a sample of the pages themselves."""
    begin = story.acknowledged[LAST - 3]
    edges = range(begin, len(story.log) + 1, FRAME_HEADER_BYTES + 4096)
    cuts = {edge + near for edge in edges for near in range(-3, FRAME_HEADER_BYTES + 3)}
    cuts |= set(range(begin, len(story.log), 101))
    cuts = {cut for cut in cuts if begin <= cut <= len(story.log)}
    assert cut_and_known(story, scene, sorted(cuts)) == {LAST - 2, LAST - 1, LAST}


def test_a_log_that_ends_in_rubbish_loses_nothing_that_was_told(story: Story, scene: Scene) -> None:
    """A disk may keep a page's place and not its bytes: zeros or old data stand in its stead."""
    begin = story.acknowledged[LAST - 2]
    for filler in (b"\0", b"\xff", story.log[:1]):
        for cut in range(begin, len(story.log), 97):
            torn = story.log[:cut] + filler * (len(story.log) - cut)
            if torn == story.log:
                continue
            scene.lay(story.main, torn)
            assert scene.known(goes_on=True) == LAST - 1, f"byte {cut}, {filler!r}"


def test_a_checkpoint_cut_anywhere_loses_nothing(story: Story, scene: Scene) -> None:
    """The log is folded into the main file now and then, and a kill may come in the middle."""
    for cut in range(len(story.main), len(story.folded) + 1, 31):
        scene.lay(story.folded[:cut], story.log)
        assert scene.known(goes_on=cut % 1009 == 0) == LAST, f"the file was cut at byte {cut}"


def test_a_main_file_cut_short_is_whole_or_refused_and_never_forgets(
    story: Story, scene: Scene
) -> None:
    """No kill does this, but a copy may: the coordinator must not begin afresh as if new."""
    refused = 0
    first, last = range(120), range(len(story.folded) - 64, len(story.folded))
    between = range(120, len(story.folded) - 64, 211)
    for log in (b"", story.log):
        for cut in (*first, *between, *last):
            scene.lay(story.folded[:cut], log)
            try:
                known = scene.known()
            except JournalError as error:
                refused += 1
                assert "\n" not in str(error)
                assert "move it away" in str(error)
            else:
                assert known == LAST, f"the file was cut at byte {cut}"
    assert refused > 100
    assert scene.path.exists()


def test_a_journal_whose_first_start_was_killed_begins(tmp_path: Path) -> None:
    """An empty file that never held a decision is no damage."""
    path = tmp_path / "j"
    path.touch()
    Path(f"{path}.lock").touch()
    scene = Scene(tmp_path)
    assert scene.known(goes_on=True) == 0
    scene.close()
