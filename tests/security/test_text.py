"""What scripts and nodes say is shown, and does nothing else."""

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from yarl import URL

from coordinator.kept_journal import kept_orders
from sidecar.api import UPLINK_PATH, AgentState, Hello, StatusReport
from sidecar.codec import encode
from sidecar.workers.files import LogFiles
from sidecar.workers.tee import Tee, harmless
from tests.security.test_doors import asked, hello_of, served

pytestmark = pytest.mark.component

ATTACKS = (
    b"\x1b]0;title\x07", b"\x1b[2J\x1b[H", b"\x1b]8;;http://evil.example\x1b\\here\x1b]8;;\x1b\\",
    b"\x1bP+q544e\x1b\\", b"\x9b31m", b"\xc2\x9b2J", b"\x08\x08\x08", b"\x7f", b"\x00", b"\x1b",
    b"\x1b[6n", b"\xe2\x80\xae", b"\xff\xfe",
)  # fmt: skip
"""Titles, cleared screens, links, queries that type an answer, both forms of CSI, and back."""


def acts(text: bytes) -> bool:
    """Return whether ``text`` holds anything that a terminal obeys, apart from lines and tabs."""
    decoded = text.decode()  # whatever is shown is UTF-8
    return any(
        (ord(char) < 32 and char not in "\n\t") or 127 <= ord(char) < 160 or char == "\u202e"
        for char in decoded
    )


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_output_of_a_worker_acts_on_the_terminal_that_shows_it(
    tmp_path: Path, attack: bytes
) -> None:
    """A line of a data set, printed by a script, would type into the shell of who is on call."""
    files = LogFiles(stdout=tmp_path / "out", stderr=tmp_path / "err", error=tmp_path / "e")
    files.stdout.write_bytes(b"before" + attack + b"after\n" + attack * 3 + b"\n")
    files.stderr.write_bytes(b"")
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as shown, os.fdopen(writer, "wb") as terminal:
        tee = Tee({None: 3}, targets=lambda: (terminal, terminal))
        tee.follow({0: (0, files)})
        tee.close()
        terminal.close()
        text = shown.read()
    assert text.startswith(b"[rank 0] before")
    assert b"after\n" in text
    assert not acts(text)


def test_a_worker_cannot_write_over_the_rank_before_its_line() -> None:
    """It would speak in another rank's name to whoever reads along."""
    assert harmless(b"x\r[rank 7] loss: nan") == b"[rank 7] loss: nan"  # behind its own prefix
    assert harmless(b" 99%\r100%\r") == b"100%"
    assert harmless("Verlust gr\u00f6\u00dfer: \u4e2d".encode()) == (
        "Verlust gr\u00f6\u00dfer: \u4e2d".encode()
    )


def test_an_order_with_sequences_in_it_is_shown_without_them(tmp_path: Path) -> None:
    """Whoever may order anything would own the terminal of everybody who looks."""
    hostile = "a\x1b]0;owned\x07b\x9b2Jc<script>alert(1)</script>"
    told: list[bytes] = []

    async def scene() -> None:
        async with served(tmp_path) as url:
            order = {"who": hostile[:90], "why": hostile}
            assert await asked(url, "POST", "/v1/job/restart", json=order) == 202
            for command in ("audit", "incidents", "status"):
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "coordinator.cli", command, "--coordinator", url),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
                output, _ = await process.communicate()
                assert process.returncode == 0, output
                told.append(output)

    asyncio.run(scene())
    assert b"owned" not in told[0]
    assert b"bc" in told[0] or b"b\\x9b2Jc" in told[0]
    assert not any(acts(output) for output in told)
    (kept,) = kept_orders(tmp_path)
    assert kept.why == hostile  # the journal keeps what was said
    assert kept.at_ns <= time.time_ns()


@pytest.mark.parametrize(
    "path",
    [
        "/incidents/..%2f..%2f..%2fetc%2fpasswd",
        "/v1/incidents/..%2f..%2fjournal.sqlite",
        "/v1/incidents/%2fetc%2fpasswd",
        "/v1/nodes/..%2f..%2fetc/exclude",
        "/..%2f..%2fetc/passwd",
    ],
)
def test_no_path_in_a_request_leads_to_a_file(tmp_path: Path, path: str) -> None:
    """The journal, and the host's own files, would be read through the door for pages."""
    (tmp_path / "etc").mkdir()

    async def scene() -> None:
        async with served(tmp_path / "state") as url:
            for method in ("GET", "POST"):
                order = {"who": "m", "why": "w"} if method == "POST" else None
                async with (
                    aiohttp.ClientSession() as session,
                    session.request(method, URL(url + path, encoded=True), json=order) as answer,
                ):
                    assert answer.status in {404, 405}
                    assert b"root:" not in await answer.read()

    asyncio.run(scene())


def test_what_a_node_says_of_itself_breaks_out_of_no_place_where_it_is_shown(
    tmp_path: Path,
) -> None:
    """A node would write other nodes' numbers, or run a script in the browser of who looks."""
    hostile = 'x"} 1\nevil_series{a="b"} 1\n# \x1b]0;owned\x07<script>alert(1)</script>'
    shown: list[bytes] = []

    async def join(url: str, session: aiohttp.ClientSession, hello: Hello) -> dict[str, Any]:
        link = await session.ws_connect(url + UPLINK_PATH)
        await link.send_bytes(encode(hello))
        return json.loads(await link.receive_str())

    async def scene() -> None:
        async with served(tmp_path) as url, aiohttp.ClientSession() as session:
            good = hello_of("n0")
            for wrong in (
                {"node": "../../etc"},
                {"node": hostile},
                {"host": hostile},
                {"labels": {hostile: "x"}},
                {"agent_version": hostile},
                {"incarnation": hostile},
            ):
                answer = await join(url, session, replace(good, **wrong))
                assert answer["type"] == "goodbye", wrong
                assert answer["reason"].isprintable()
            labelled = replace(good, labels={"rack": '7"} 1 <script>'})
            link = await session.ws_connect(url + UPLINK_PATH)
            await link.send_bytes(encode(labelled))
            if json.loads(await link.receive_str())["type"] == "welcome":
                report = StatusReport(
                    node="n0",
                    incarnation="n0-1",
                    state=AgentState.FAULTED,
                    generation=0,
                    stopped_generation=0,
                    topology_version=0,
                    rendezvous_port=0,
                    reason=hostile,
                    message=hostile,
                )
                await link.send_bytes(encode(report))
            for path in ("/metrics", "/incidents"):
                async with session.get(url + path) as answer:
                    shown.append(await answer.read())
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "coordinator.cli", "status", "--coordinator", url),
                stdout=subprocess.PIPE,
            )
            output, _ = await process.communicate()
            assert process.returncode == 0
            shown.append(output)

    asyncio.run(scene())
    families = {item.name for item in text_string_to_metric_families(shown[0].decode())}
    assert families
    assert all(name.startswith(("outrider", "python", "process")) for name in families)
    assert b"<script>" not in shown[1]
    assert not acts(shown[2])
