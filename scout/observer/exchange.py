"""How observers hear of one another, without ever waiting for one that is gone.

A collective over the observers would stand still with the first of them that dies, and a store
would be lost with its master.  So every observer puts its own word where the others find it and
takes theirs as they are, each with a deadline: in files of one folder, or at the observer of the
lowest rank that answers.  Every observer listens and can take that place: when the present host
is gone, the others turn to the next rank they have heard of.
"""

import asyncio
import contextlib
import hmac
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from scout.observer.config import ObserverConfig
from scout.observer.words import WORD_BYTES_MAX, BadWordError, Word, from_plain, to_plain

ANSWER_S_MAX: Final = 1.0
"""Wait for the host's answer; a round is four times a second and must not pile up."""
AVOID_S: Final = 10.0
"""A host that did not answer is not asked again for so long, where there is another."""
ANSWER_BYTES_MAX: Final = 64 * WORD_BYTES_MAX
CONNECTIONS_MAX: Final = 4096
_BROKEN: Final = (OSError, EOFError, ValueError, BadWordError, asyncio.LimitOverrunError)
"""What a peer that died or that is none of ours makes of a connection."""


class ExchangeError(Exception):
    """Nobody could be reached.  The text says why."""


class Exchange(Protocol):
    """Where words are left and found."""

    port: int

    async def open(self) -> None:
        """Get ready.  Raises `ExchangeError`."""

    async def trade(self, mine: Word, known: Mapping[int, Word]) -> list[Word]:
        """Leave ``mine`` and return what the others left.  Raises `ExchangeError`."""

    async def close(self) -> None:
        """Let go of everything."""


class FolderExchange:
    """One file for each rank, replaced as a whole."""

    def __init__(self, config: ObserverConfig) -> None:
        self._rank = config.rank
        self._folder = Path(config.folder or ".") / f"observer-{config.key[:16]}"
        self.port = 0

    async def open(self) -> None:
        """Make the folder of this run and generation."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ExchangeError(f"{self._folder} cannot be used: {error.strerror}") from error

    async def trade(self, mine: Word, known: Mapping[int, Word]) -> list[Word]:  # noqa: ARG002 - files tell it
        """Write our file and read the others'."""
        return await asyncio.to_thread(self._trade, mine)

    def _trade(self, mine: Word) -> list[Word]:
        partial = self._folder / f".{self._rank}"
        try:
            partial.write_text(json.dumps(to_plain(mine)), encoding="utf-8")
            partial.replace(self._folder / f"{self._rank}.json")
            files = list(self._folder.glob("*.json"))
        except OSError as error:
            raise ExchangeError(f"{self._folder} cannot be written: {error.strerror}") from error
        found: list[Word] = []
        for file in files:
            # A file that is gone or half a word is as good as one that says nothing.
            with contextlib.suppress(OSError, ValueError, BadWordError):
                found.append(from_plain(json.loads(file.read_text(encoding="utf-8"))))
        return found

    async def close(self) -> None:
        """Take our file away."""
        (self._folder / f"{self._rank}.json").unlink(missing_ok=True)


class TcpExchange:
    """A listener of our own, and the connection to the host of the moment."""

    def __init__(self, config: ObserverConfig) -> None:
        self._config = config
        self._words: dict[int, dict[str, Any]] = {}
        self._server: asyncio.Server | None = None
        self._stream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._host = -1
        self._avoid: dict[int, float] = {}
        self._members: set[asyncio.StreamWriter] = set()
        self.port = 0

    async def open(self) -> None:
        """Listen: rank 0 where the others look for it, every other rank anywhere."""
        wanted = self._config.ports if self._config.rank == 0 else (0,)
        errors: list[str] = []
        for port in wanted:
            try:
                listener = _listener(port)
            except OSError as error:
                errors.append(f"port {port}: {error.strerror}")
                continue
            self.port = int(listener.getsockname()[1])
            self._server = await asyncio.start_server(
                self._serve, sock=listener, limit=WORD_BYTES_MAX
            )
            return
        raise ExchangeError(f"cannot listen ({'; '.join(errors)})")

    async def trade(self, mine: Word, known: Mapping[int, Word]) -> list[Word]:
        """Give our word to the host and take everybody's; turn to the next one when it is gone."""
        self._words[self._config.rank] = to_plain(mine)
        now = asyncio.get_running_loop().time()
        reasons: list[str] = []
        for rank in self._hosts(known):
            if self._avoid.get(rank, 0.0) > now:
                continue
            if rank == self._config.rank:
                self._host = rank
                return self._all()
            try:
                async with asyncio.timeout(ANSWER_S_MAX):
                    return await self._ask(rank, mine, known)
            except _BROKEN as error:
                reasons.append(f"rank {rank}: {error or type(error).__name__}")
                self._avoid[rank] = now + AVOID_S if len(known) > 1 else 0.0
                self._drop()
        raise ExchangeError(f"no host of the exchange answers ({'; '.join(reasons)})")

    def _hosts(self, known: Mapping[int, Word]) -> list[int]:
        """Return who may be the host, from the lowest rank up, so that all come to the same one.

        Before anybody was heard of, only rank 0 can be it: a host of our own would be alone.
        """
        others = known.keys() - {self._config.rank}
        return sorted({0, self._config.rank, *others}) if others else [0]

    async def _ask(self, rank: int, mine: Word, known: Mapping[int, Word]) -> list[Word]:
        if self._stream is None or self._host != rank:
            self._drop()
            self._stream = await self._dial(rank, known)
            self._host = rank
        reader, writer = self._stream
        writer.write(json.dumps({"key": self._config.key, "word": to_plain(mine)}).encode() + b"\n")
        await writer.drain()
        line = await reader.readuntil(b"\n")
        return [from_plain(it) for it in json.loads(line)]

    async def _dial(
        self, rank: int, known: Mapping[int, Word]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address, ports = self._config.address or "127.0.0.1", self._config.ports
        if rank in known and known[rank].port:
            ports = (known[rank].port,)
            address = address if rank == 0 else known[rank].place.host
        refused: OSError | None = None
        for port in ports:
            try:
                return await asyncio.open_connection(address, port, limit=ANSWER_BYTES_MAX)
            except OSError as error:
                refused = error
        raise refused or ConnectionError("no port to dial")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take a member's words and answer with everybody's, until it goes or says nonsense."""
        self._members.add(writer)
        try:
            while line := await reader.readline():
                body = json.loads(line)
                if not hmac.compare_digest(str(body["key"]), self._config.key):
                    break
                word = from_plain(body["word"])
                self._words[word.seen.rank] = body["word"]
                writer.write(json.dumps(list(self._words.values())).encode() + b"\n")
                await writer.drain()
        except (*_BROKEN, KeyError, TypeError):
            pass  # a stranger, or a member that died in the middle of a word
        finally:
            self._members.discard(writer)
            writer.close()

    def _all(self) -> list[Word]:
        return [from_plain(it) for it in self._words.values()]

    def _drop(self) -> None:
        if self._stream is not None:
            self._stream[1].close()
            self._stream = None

    async def close(self) -> None:
        """Hang up and stop listening."""
        self._drop()
        for writer in self._members:
            writer.close()
        if self._server is not None:
            self._server.close()
        await asyncio.sleep(0)  # let those who serve see that it is over


def _listener(port: int) -> socket.socket:
    """Listen on every address of the machine, on one port.  Raises `OSError`."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=CONNECTIONS_MAX, dualstack_ipv6=True
        )
    return socket.create_server(("", port), backlog=CONNECTIONS_MAX)


def exchange_for(config: ObserverConfig) -> Exchange:
    """Return the exchange that the configuration asks for."""
    return TcpExchange(config) if config.folder is None else FolderExchange(config)


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once, so that a reader never sees half of it.  Raises `OSError`."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
