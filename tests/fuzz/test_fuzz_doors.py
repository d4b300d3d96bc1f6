"""Arbitrary requests, WebSocket messages and journals against a real coordinator."""

import asyncio
import json
import os
import tempfile
import unicodedata
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
from hypothesis import strategies as st
from yarl import URL

from coordinator.answers import Problem
from coordinator.audit import decode_record
from coordinator.journal import JOURNAL_NAME, Journal
from coordinator.journal_format import (
    DurableState,
    JournalError,
    decode_incident,
    decode_ledger,
    decode_state,
    encode_state,
)
from coordinator.kept_journal import kept_orders
from coordinator.openapi import document
from coordinator.operator_api import ENDPOINTS
from sidecar.api import UPLINK_PATH
from sidecar.codec import encode
from sidecar.roles import TokenFileError, Tokens
from tests.fuzz.budget import fuzz
from tests.fuzz.test_fuzz_messages import JSON
from tests.security.test_doors import hello_of, served

OPENAPI = document(ENDPOINTS, Problem)


def against(scene: Callable[[str, Callable[..., Any]], None]) -> None:
    """Serve a coordinator, and run ``scene`` with its URL and a way to await things."""

    async def main() -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with served(Path(folder), limit_s=None, linger_s=3600) as url:
                loop = asyncio.get_running_loop()

                def wait(work: Coroutine[Any, Any, Any]) -> Any:
                    return asyncio.run_coroutine_threadsafe(work, loop).result(60)

                await asyncio.to_thread(scene, url, wait)

    asyncio.run(main())


def named(path: str, words: list[str]) -> str:
    """Return ``path`` with ``words`` for what stands in braces."""
    for name in ("node", "incident"):
        path = path.replace(f"{{{name}}}", URL.build(path=f"/{words[0]}").raw_path[1:] or "x")
    return path


def test_every_answer_to_any_request_is_one_that_the_openapi_document_tells() -> None:
    """A program that trusts the description would break, or the coordinator would."""
    rows = [row for row in ENDPOINTS if row.path != "/metrics"]
    orders = st.fixed_dictionaries({"who": st.text(max_size=120), "why": st.text(max_size=600)})
    bodies = st.one_of(
        st.binary(max_size=200),
        JSON.map(lambda value: json.dumps(value).encode()),
        orders.map(lambda value: json.dumps(value).encode()),
        st.just(b"[" * 5000),
        st.just(b'{"who":' * 3000),
    )
    kinds = st.sampled_from(["application/json", "text/plain", "application/json; charset=x"])
    words = st.lists(st.text(max_size=20), min_size=1, max_size=1)
    query = st.dictionaries(st.sampled_from(["limit", "format", "x"]), st.text(max_size=12))

    def scene(url: str, wait: Callable[..., Any]) -> None:
        async def ask(given: Any) -> None:
            row, body, kind, word, asked = given
            target = URL(url + named(row.path, word), encoded=True).with_query(asked)
            async with (
                aiohttp.ClientSession() as session,
                session.request(
                    row.method,
                    target,
                    data=body if row.method == "POST" else None,
                    headers={"Content-Type": kind} if row.method == "POST" else {},
                ) as answer,
            ):
                text = await answer.text()
                known = OPENAPI["paths"][row.path][row.method.lower()]["responses"]
                # A word may make another path of it, which is not found.
                assert str(answer.status) in {*known, "404", "405"}, (target, body, text)
                if answer.status >= 400:
                    kinds_of = set(map(unicodedata.category, json.loads(text)["error"]))
                    # Letters that Python's tables do not know yet act on nobody's terminal.
                    assert kinds_of.isdisjoint({"Cc", "Cs", "Zl", "Zp"}), text

        inputs = st.tuples(st.sampled_from(rows), bodies, kinds, words, query)
        fuzz(inputs, lambda given: wait(ask(given)))

    against(scene)
    assert OPENAPI["openapi"] == "3.1.0"


def test_no_message_on_the_uplink_ends_the_coordinator() -> None:
    """One mad sidecar would end the whole job's memory."""
    hellos = st.sampled_from([hello_of("n0"), hello_of("n1")]).map(encode)
    cut = st.tuples(hellos, st.integers(0, 60)).map(lambda given: given[0][: given[1]])
    frames = st.one_of(
        st.binary(max_size=100),
        JSON.map(lambda value: json.dumps(value).encode()),
        st.tuples(JSON, st.sampled_from(["hello", "status", "progress", "evidence"])).map(
            lambda given: json.dumps({"type": given[1], "x": given[0]}).encode()
        ),
        hellos,
        cut,
        st.just(b"[" * 100_000),
    )

    def scene(url: str, wait: Callable[..., Any]) -> None:
        async def say(given: list[bytes]) -> None:
            async with aiohttp.ClientSession() as session:
                async with session.ws_connect(url + UPLINK_PATH) as socket:
                    with suppress(ConnectionError):  # it hangs up on the mad, soon or later
                        for frame in given:
                            await socket.send_bytes(frame)
                async with session.get(f"{url}/healthz") as answer:
                    assert (await answer.json())["status"] == "ok"

        fuzz(st.lists(frames, min_size=1, max_size=4), lambda given: wait(say(given)), share=0.5)

    against(scene)
    assert UPLINK_PATH.startswith("/")


def test_a_damaged_journal_is_refused_in_a_sentence_or_read() -> None:
    """A coordinator that half understands what it decided gives ranks out twice."""
    # In memory where there is some: a disk that syncs slowly would make hours of this.
    memory = Path("/dev/shm")
    where = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=where) as folder:
        path = Path(folder) / JOURNAL_NAME
        asyncio.run(Journal.open(path).close())
        whole = path.read_bytes()

    def check(given: tuple[bytes, int, bytes]) -> None:
        row, place, noise = given
        good = encode_state(DurableState(job="job"))
        broken = good[: place % len(good)] + noise + good[place % len(good) :]
        for decode in (decode_state, decode_incident, decode_ledger, decode_record):
            for data in (row, broken, good[: place % len(good)]):
                try:
                    decode(data)
                except JournalError as error:
                    assert len(str(error).splitlines()) == 1
        with tempfile.TemporaryDirectory(dir=where) as folder:
            path = Path(folder) / JOURNAL_NAME
            at = place % len(whole)
            path.write_bytes(whole[:at] + noise + whole[at + len(noise) :])
            try:
                journal = Journal.open(path)
            except JournalError as error:
                assert len(str(error).splitlines()) == 1
            else:
                with suppress(JournalError):
                    journal.load("job")
                asyncio.run(journal.close())
            try:
                kept_orders(Path(folder))
            except JournalError as error:
                assert len(str(error).splitlines()) == 1

    for place in range(3000, 4000, 7):  # in the schema, which SQLite quotes when it is damaged
        check((b"", place, b"["))
    rows = st.one_of(st.binary(max_size=60), JSON.map(lambda value: json.dumps(value).encode()))
    fuzz(st.tuples(rows, st.integers(0, 1 << 16), st.binary(max_size=40)), check, share=0.5)


def test_a_token_file_is_taken_or_refused() -> None:
    """A file that is half understood would give a viewer's word to operators."""
    lines = st.tuples(
        st.sampled_from(["viewer", "operator", "sidecar", "root", "#", ""]), st.text(max_size=6)
    ).map(" ".join)

    def check(given: list[str]) -> None:
        try:
            tokens = Tokens.parse("\n".join(given))
        except TokenFileError:
            return
        for word, roles in tokens.words:
            caller = tokens.caller(word)
            assert caller is not None
            assert caller.roles == roles
        assert tokens.caller("") is None

    fuzz(st.lists(lines, max_size=5), check, share=0.3)
