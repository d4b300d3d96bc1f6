"""Waiting for torch's store in Python: real sockets, and torch's own rendezvous."""

import datetime as dt
import socket
import subprocess
import sys
import threading

import pytest

from worker_shim import store_wait
from worker_shim.store_wait import StoreWait

pytestmark = [pytest.mark.component, pytest.mark.timeout(120)]

HOUR = dt.timedelta(hours=1)


class CalledOffError(Exception):
    """Stands for what leaves the block."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_it_waits_until_somebody_listens():
    """A rank that goes on too early sits in torch's own wait, which hears nothing."""
    asked, wait, port = threading.Event(), StoreWait(), free_port()
    wait.leave_if_called_off = asked.set
    with socket.socket() as store:

        def open_late() -> None:
            asked.wait()
            store.bind(("127.0.0.1", port))
            store.listen()

        opens = threading.Thread(target=open_late)
        opens.start()
        wait.wait("127.0.0.1", port, HOUR)
        opens.join()
        connection, _ = store.accept()
        with connection:
            assert connection.recv(1) == b"", "it dialled, said nothing and went on"


def test_a_wait_that_is_called_off_ends():
    """The peer is dead: nobody will ever listen."""
    looks, wait = [], StoreWait()

    def leave() -> None:
        looks.append(1)
        if len(looks) > 3:
            raise CalledOffError

    wait.leave_if_called_off = leave
    with pytest.raises(CalledOffError):
        wait.wait("127.0.0.1", free_port(), HOUR)


def test_it_ends_with_the_timeout_that_torch_has_and_lets_torch_say_so():
    """Another error than torch's own would break scripts that handle it."""
    looks, wait = [], StoreWait()
    wait.leave_if_called_off = lambda: looks.append(1)
    wait.wait("127.0.0.1", free_port(), dt.timedelta(milliseconds=50))
    assert looks


def test_outside_of_a_block_torch_has_the_last_word(monkeypatch):
    """Nothing calls such a wait off: it must not be longer than it helps."""
    monkeypatch.setattr(store_wait, "OUTSIDE_S_MAX", 0.05)
    wait = StoreWait()
    wait.wait("127.0.0.1", free_port(), HOUR)
    assert wait.leave_if_called_off is None


def test_outside_of_a_block_it_goes_on_once_somebody_listens():
    """A warm worker that is faster than rank 0 would sleep half a second in torch's own wait."""
    wait = StoreWait()
    with socket.create_server(("127.0.0.1", 0)) as store:
        wait.wait("127.0.0.1", store.getsockname()[1], HOUR)
        connection, _ = store.accept()
        with connection:
            assert connection.recv(1) == b""


SCRIPT = """
import sys
import torch.distributed as dist
rendezvous = sys.modules["torch.distributed.rendezvous"]
from worker_shim.patching import Patches
from worker_shim.store_wait import STORE_WAIT
looks, patches = [], Patches()
STORE_WAIT.leave_if_called_off = lambda: looks.append(1)
STORE_WAIT.install(patches, rendezvous)
dist.init_process_group("gloo")
print(f"rank {dist.get_rank()} of {dist.get_world_size()}, looked: {bool(looks)}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_torchs_own_rendezvous_goes_through_it_on_every_rank_but_the_host():
    """Torch may rename what we stand before, and a probe may disturb its store."""
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={
                "PATH": "/usr/bin:/bin",
                "PYTHONPATH": ":".join(filter(None, sys.path)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": "2",
                "RANK": str(rank),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=100) for process in ranks]
    assert [out for out, _ in said] == [
        "rank 0 of 2, looked: False\n",
        "rank 1 of 2, looked: True\n",
    ], said
    assert "sendBytes" not in said[0][1], said[0][1]
