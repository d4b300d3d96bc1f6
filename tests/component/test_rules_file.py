"""A node's own file of log rules, edited as people and orchestrators edit files."""

import asyncio
import errno
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import watchdog.observers.inotify

from sidecar.config import ConfigError
from sidecar.drive import monotonic
from sidecar.events import LogFinding
from sidecar.folder_watch import FolderWatch
from sidecar.logs import rules_file
from sidecar.logs.evaluator import LogState
from sidecar.logs.rules_file import RulesFile, RulesFileError, read_rules_file
from sidecar.logs.tail import READS_MAX, LogWatcher

pytestmark = pytest.mark.component

PATIENCE_S = 30.0
NEVER_S = 3600.0
FIRST = "- {name: Own, logPattern: first words, faultOnMatch: true}\n"
SECOND = "- {name: Own, logPattern: second words, faultOnMatch: true}\n"
BAD = "- {name: Own, logPattern: '(?=x)', faultOnMatch: true}\n- {name: Other, operator: gt}\n"


class Node:
    """One rank, the file of its node's rules, and what was found."""

    def __init__(self, folder: Path) -> None:
        self.rules = folder / "rules.yaml"
        self.rules.write_text(FIRST)
        self.out = folder / "out"
        self.findings: list[LogFinding] = []
        self.watcher = LogWatcher(
            self.findings.append, monotonic, node_rules=read_rules_file(self.rules)
        )
        self.file = RulesFile(self.rules, self.watcher.set_node_rules)

    def watch(self, *rules: object, generation: int = 1) -> None:
        self.watcher.watch(generation, rules, {0: (self.out, self.out.with_name("err"))})

    def say(self, line: str) -> None:
        with self.out.open("a") as file:
            file.write(f"{line}\n")

    async def found(self, count: int) -> LogFinding:
        await until(lambda: len(self.findings) >= count)
        assert len(self.findings) == count
        return self.findings[-1]

    async def saying_until(self, line: str, count: int) -> LogFinding:
        """Print a line again and again, until it is one that a rule looks for."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self.findings) < count:
            assert time.monotonic() < deadline, "waited too long"
            self.say(line)
            await asyncio.sleep(0.05)
        return self.findings[count - 1]


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        await asyncio.sleep(0.01)


def play(folder: Path, scenario: Callable[[Node], Awaitable[None]]) -> None:
    async def run() -> None:
        node = Node(folder)
        watching = asyncio.create_task(node.file.run())
        try:
            await scenario(node)
            assert not watching.done()
        finally:
            watching.cancel()
            node.watcher.close()

    asyncio.run(run())


def replace_by_name(path: Path, text: str) -> None:
    """As editors do it."""
    path.with_name("new").write_text(text)
    path.with_name("new").replace(path)


@pytest.mark.parametrize("edit", [Path.write_text, replace_by_name], ids=["in-place", "by-name"])
@pytest.mark.parametrize("silent", [False, True], ids=["events", "no-events"])
def test_an_edit_holds_from_the_next_line_on(tmp_path, monkeypatch, edit, silent):
    """A rule that is wrong for this job could be mended by a restart of the job only."""
    if silent:  # as on a network file system
        monkeypatch.setattr(FolderWatch, "on_any_event", lambda *_: None)
        monkeypatch.setattr(rules_file, "POLL_S", 0.1)
    else:
        monkeypatch.setattr(rules_file, "POLL_S", NEVER_S)

    async def scenario(node: Node) -> None:
        node.watch()
        node.say("second words")
        node.say("first words")
        assert (await node.found(1)).line == "first words"
        edit(node.rules, SECOND)
        assert (await node.saying_until("second words", 2)).line == "second words"

    play(tmp_path, scenario)


def test_a_mounted_configuration_that_is_swapped_behind_its_link_is_an_edit(tmp_path, monkeypatch):
    """Kubernetes changes no file and no name that a person sees."""
    monkeypatch.setattr(rules_file, "POLL_S", NEVER_S)
    for number, text in enumerate((FIRST, SECOND)):
        (tmp_path / f"v{number}").mkdir()
        (tmp_path / f"v{number}" / "rules.yaml").write_text(text)
    (tmp_path / "data").symlink_to("v0")

    async def scenario(node: Node) -> None:
        node.rules.unlink()
        node.rules.symlink_to("data/rules.yaml")
        (tmp_path / "data.new").symlink_to("v1")
        (tmp_path / "data.new").replace(tmp_path / "data")
        node.watch()
        assert (await node.saying_until("second words", 1)).line == "second words"

    play(tmp_path, scenario)


@pytest.mark.parametrize("bad", [BAD, "", "just words", "- [", None], ids=lambda one: repr(one)[:9])
def test_a_bad_edit_changes_nothing_and_is_told(tmp_path, monkeypatch, caplog, bad):
    """One slip in an editor would leave the job unwatched."""
    monkeypatch.setattr(rules_file, "POLL_S", 0.1)
    caplog.set_level(logging.WARNING, "sidecar.logs.rules_file")

    async def scenario(node: Node) -> None:
        node.watch()
        if bad is None:
            node.rules.unlink()
        else:
            node.rules.write_text(bad)
        await until(lambda: caplog.messages)
        await asyncio.sleep(0.3)
        (said,) = caplog.messages
        assert str(node.rules) in said
        assert said.endswith("; the rules that held before go on")
        assert "\n" not in said
        node.say("first words")
        await node.found(1)
        node.rules.write_text(SECOND)
        await node.saying_until("second words", 2)

    play(tmp_path, scenario)


def test_rules_that_read_as_before_go_on_with_what_they_have_seen(tmp_path, monkeypatch):
    """An edit would convict a second time, or forget how long a rank has been silent."""
    monkeypatch.setattr(rules_file, "POLL_S", 0.1)
    step = {"name": "Step", "logPattern": "step", "expectedRecurringFrequencyInSeconds": 2.0}
    late = "- {name: Late, logPattern: never, expectedStartCutOffInSeconds: 600}\n"

    async def scenario(node: Node) -> None:
        node.watch(step, {"name": "Own", "logPattern": "the job's own words"})
        node.say("step 1")
        node.say("first words")
        await node.found(1)
        node.rules.write_text(FIRST + late)
        await until(lambda: "Late" in node.watcher.states()[0])
        states = node.watcher.states()[0]
        assert states["Own"] is LogState.FAULTED, "the node's rule holds, and said so before"
        assert states["Late"] is LogState.WAITING
        hang = await node.found(2)
        assert hang.rule == "Step"
        node.rules.write_text(late)
        await until(lambda: node.watcher.states()[0]["Own"] is LogState.WAITING)
        node.say("the job's own words")
        await until(lambda: node.watcher.states()[0]["Own"] is LogState.HEALTHY)
        node.rules.write_text("[]\n")
        await until(lambda: "Late" not in node.watcher.states()[0])

    play(tmp_path, scenario)


def test_a_file_without_usable_rules_is_refused_with_the_first_reason(tmp_path):
    """A sidecar that starts without its rules looks like one that has them."""
    path = tmp_path / "rules.yaml"
    path.write_text(BAD)
    with pytest.raises(RulesFileError, match=r"rules.yaml: rule Own: logPattern: .*, and 1 more$"):
        read_rules_file(path)
    path.write_bytes(b"x" * (1 << 20) + b"y")
    with pytest.raises(RulesFileError, match="it is larger than"):
        read_rules_file(path)
    assert not issubclass(RulesFileError, ConfigError)


# --- folders --------------------------------------------------------------------------------


def test_a_file_that_appears_is_read_at_once_however_seldom_files_are_polled(tmp_path):
    """Of thousands of files most are looked at by turns; a fault would wait for its turn."""

    async def scenario() -> None:
        findings: list[LogFinding] = []
        watcher = LogWatcher(findings.append, monotonic, poll_s=NEVER_S)
        files = {n: (tmp_path / f"{n}.out", tmp_path / f"{n}.err") for n in range(READS_MAX)}
        rule = {"name": "Fatal", "logPattern": "FATAL", "faultOnMatch": True}
        watcher.watch(1, [rule], files)
        try:
            await until(watcher.states)
            await asyncio.sleep(0.5)
            (tmp_path / "new").write_text("FATAL\n")
            (tmp_path / "new").replace(files[READS_MAX - 1][1])
            await until(lambda: findings)
            assert findings[0].local_rank == READS_MAX - 1
        finally:
            watcher.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSPC], ids=errno.errorcode.get)
def test_c7_a_machine_without_watches_left_is_polled(tmp_path, monkeypatch, caplog, number):
    """Every rank of the node would be called hung for a limit of the machine."""
    caplog.set_level(logging.WARNING, "sidecar.folder_watch")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(watchdog.observers.inotify.InotifyEmitter, "on_thread_start", refuse)

    async def scenario(node: Node) -> None:
        node.watch()
        node.say("first words")
        await node.found(1)
        assert any(os.strerror(number) in said for said in caplog.messages)

    play(tmp_path, scenario)
