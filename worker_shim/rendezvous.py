"""``torchrun --rdzv-backend=outrider``: torchrun is told its place instead of electing one.

Run torchrun as the one worker of each node; its sidecar knows from the coordinator which group
rank it has, how many nodes there are and where rank 0 listens, and answers at once.  No store is
asked who is there: the store that torch's agents need is opened where the answer says, under a
name that holds the generation.  Restarts are the coordinator's, so a second rendezvous of one
process is refused.

Found by torch 2.6 and newer through the entry point group ``torchrun.handlers``.
"""

import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from typing import Any, Final

from worker_shim.framing import BadFrame, Decoder, encode
from worker_shim.messages import (
    GENERATION_ENV,
    SOCKET_ENV,
    Envelope,
    Init,
    Refusal,
    RendezvousAnswer,
    RendezvousQuery,
    WorkerMessage,
    worker_frame,
)

BACKEND: Final = "outrider"
SCHEME: Final = "unix:"
ANSWER_S_MAX: Final = 30.0
"""Longest wait for the sidecar, which answers from memory."""
STORE_S_MAX: Final = 600.0
"""Longest wait for rank 0's store: its node may still be starting its processes."""
_RECEIVE_BYTES: Final = 65_536


class SidecarSilentError(Exception):
    """The sidecar could not be asked; the text says why and what to do."""


def get_handler() -> Callable[[Any], Any]:
    """Return what torch calls with its `RendezvousParameters`: the entry point's object."""
    return create_handler


def create_handler(params: Any) -> Any:
    """Return the rendezvous handler for torchrun's ``params`` (`RendezvousParameters`)."""
    from torch.distributed.elastic.rendezvous import RendezvousHandler  # noqa: PLC0415

    class Handler(_Told, RendezvousHandler):  # type: ignore[misc]
        """`_Told` under the type that torch asks for."""

    return Handler(params)


def ask(path: str) -> RendezvousAnswer:
    """Ask the sidecar at ``path`` for this node's place.  Raises `SidecarSilentError`."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_S_MAX)
            connection.connect(path)
            local_rank = int(os.environ.get("LOCAL_RANK", "0"))
            generation = int(os.environ.get(GENERATION_ENV, "0"))
            client = f"rendezvous-{os.getpid()}-{secrets.token_hex(4)}"
            said: tuple[WorkerMessage, ...] = (
                Init(local_rank=local_rank, pid=os.getpid()),
                RendezvousQuery(local_rank=local_rank),
            )
            for seq, message in enumerate(said, start=1):
                envelope = Envelope(client_id=client, seq=seq, generation=generation)
                connection.sendall(encode(worker_frame(message, envelope)))
            return _answer(connection)
    except (OSError, ValueError) as error:
        raise SidecarSilentError(
            f"the sidecar at {path} does not answer ({error}); start torchrun as a worker of "
            "`outrider run`, one per node, and give --rdzv-endpoint=unix: and nothing else"
        ) from None


def _answer(connection: socket.socket) -> RendezvousAnswer:
    decoder = Decoder()
    while data := connection.recv(_RECEIVE_BYTES):
        for frame in decoder.feed(data):
            if isinstance(frame, BadFrame):
                raise SidecarSilentError(f"the sidecar's answer is unreadable: {frame.reason}")
            if frame.get("type") == Refusal.TYPE:
                raise SidecarSilentError(f"the sidecar refused: {frame.get('reason')}")
            if frame.get("type") == RendezvousAnswer.TYPE:
                names = [field.name for field in fields(RendezvousAnswer)]
                return RendezvousAnswer(**{name: frame[name] for name in names})
    raise ConnectionError("it closed the connection")


class _Told:
    """A rendezvous that is told."""

    use_agent_store = True
    """Workers use the store that their agents opened, at the address that was told."""

    def __init__(self, params: Any) -> None:
        self._params = params
        self._closed = False
        self._answer: RendezvousAnswer | None = None
        self._store: Any = None

    def get_backend(self) -> str:
        """Return the name on torchrun's command line."""
        return BACKEND

    def next_rendezvous(self) -> Any:
        """Return rank, size and store as the sidecar tells them.

        Raises torch's `RendezvousClosedError` for a second one, `RendezvousError` when the sidecar
        cannot be asked or torchrun was started for another number of nodes.
        """
        from torch.distributed import PrefixStore, TCPStore  # noqa: PLC0415
        from torch.distributed.elastic.rendezvous import (  # noqa: PLC0415
            RendezvousClosedError,
            RendezvousError,
            RendezvousInfo,
            RendezvousStoreInfo,
        )

        if self._closed or self._answer is not None:
            raise RendezvousClosedError(
                "Outrider's coordinator decides about restarts; give torchrun --max-restarts=0"
            )
        try:
            answer = self._answer = ask(_path(self._params.endpoint))
        except SidecarSilentError as error:
            raise RendezvousError(str(error)) from None
        if not self._params.min_nodes <= answer.nnodes <= self._params.max_nodes:
            raise RendezvousError(
                f"the job runs on {answer.nnodes} nodes; give torchrun --nnodes={answer.nnodes}"
            )
        self._store = TCPStore(
            answer.master_addr,
            answer.master_port,
            is_master=answer.rank == 0,
            wait_for_workers=False,
            timeout=timedelta(seconds=STORE_S_MAX),
        )
        return RendezvousInfo(
            PrefixStore(f"outrider/{answer.generation}", self._store),
            answer.rank,
            answer.nnodes,
            RendezvousStoreInfo(answer.master_addr, answer.master_port),
        )

    def is_closed(self) -> bool:
        """Return whether `set_closed` was called."""
        return self._closed

    def set_closed(self) -> None:
        """Take no rendezvous any more."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Return 0: nodes wait at the coordinator, never here."""
        return 0

    def get_run_id(self) -> str:
        """Return torchrun's id of the job."""
        return str(self._params.run_id)

    def shutdown(self) -> bool:
        """Let go of the store."""
        self._closed, self._store = True, None
        return True


def _path(endpoint: str) -> str:
    path = endpoint.removeprefix(SCHEME).removeprefix("//") or os.environ.get(SOCKET_ENV, "")
    if not path:
        raise SidecarSilentError(
            f"{SOCKET_ENV} is not set: start torchrun as a worker of `outrider run`, one per node"
        )
    return path
