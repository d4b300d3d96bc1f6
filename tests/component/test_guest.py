"""A real training process, a real socket and a real page; the sidecar's part is played here."""

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from scout.progress import PageReader, create_page
from worker_shim.framing import Decoder, encode
from worker_shim.messages import (
    GENERATION_ENV,
    PROGRESS_PAGE_ENV,
    PROGRESS_TOKEN_ENV,
    SOCKET_ENV,
    Ack,
    CheckpointAnswer,
    Refusal,
    reply_frame,
)

pytestmark = pytest.mark.component

ROOT = Path(__file__).parents[2]
DEADLINE_S = 90


class Sidecar:
    """The least that a guest needs at the other end, and a record of all it said."""

    def __init__(self, path, *, answer=(None, None), refuse=False):
        self.path, self.answer, self.refuse = str(path), answer, refuse
        self.heard, self.connections, self.changed = [], [], threading.Condition()
        self.open()

    def open(self):
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen()
        threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    def close(self):
        """Go away as a killed sidecar does, and leave no path behind."""
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        Path(self.path).unlink(missing_ok=True)
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.connections.clear()

    def wait_for(self, kind, **fields):
        """Return the first message of this kind and these fields."""

        def found():
            return [it for it in self.heard if it["type"] == kind and fields.items() <= it.items()]

        with self.changed:
            assert self.changed.wait_for(found, DEADLINE_S), (kind, fields, self.heard)
            return found()[0]

    def _accept(self, listener):
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        decoder = Decoder()
        # The guest ends, or the test cuts the connection, whenever it likes.
        with suppress(OSError):
            while data := connection.recv(65536):
                for message in decoder.feed(data):
                    with self.changed:
                        self.heard.append(message)
                        self.changed.notify_all()
                    connection.sendall(encode(reply_frame(self._reply(message))))
        connection.close()

    def _reply(self, message):
        if self.refuse:
            return Refusal(reply_to=message["seq"], reason="stale generation")
        if message["type"] == "ckpt_info_get":
            step, path = self.answer
            return CheckpointAnswer(
                prefix=message["prefix"], step=step, path=path, reply_to=message["seq"]
            )
        return Ack(reply_to=message["seq"])


class Guest:
    """A training process; ``go`` lets it past its next ``wait()``."""

    def __init__(self, code, environment):
        prelude = "import sys\ndef wait(word):\n    print(word, flush=True)\n    input()\n"
        self.process = subprocess.Popen(
            [sys.executable, "-c", prelude + code],
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def reaches(self, word):
        line = self.process.stdout.readline()
        assert line == f"{word}\n", (line, self.process.poll())

    def go(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def ends(self):
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out, err


@pytest.fixture
def place(tmp_path):
    """Where a rank's things are: the environment of one worker."""
    create_page(tmp_path / "page", 7)
    return {
        SOCKET_ENV: str(tmp_path / "socket"),
        PROGRESS_PAGE_ENV: str(tmp_path / "page"),
        PROGRESS_TOKEN_ENV: "7",
        GENERATION_ENV: "3",
        "LOCAL_RANK": "2",
    }


@pytest.fixture
def played():
    """Starts the sidecar's part and ends it."""
    parts = []

    def start(environment, **how):
        parts.append(Sidecar(environment[SOCKET_ENV], **how))
        return parts[-1]

    yield start
    for part in parts:
        part.close()


@pytest.fixture
def guests():
    """Starts guests and leaves none behind."""
    started = []

    def start(code, environment):
        started.append(Guest(code, environment))
        return started[-1]

    yield start
    for guest in started:
        guest.process.kill()
        guest.process.communicate()


def page_shows(place, condition):
    """Wait until the page satisfies the condition, and return what it says."""
    reader = PageReader.open(place[PROGRESS_PAGE_ENV], 7)
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        said = reader.read()
        if said is not None and condition(said):
            return said
        time.sleep(0.01)
    raise AssertionError(reader.read())


TRAINING = """
import worker_shim
worker_shim.attach()
{before}
import torch
def optimizer():
    return torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
main, other = optimizer(), optimizer()
wait("ready")
for _ in range(3):
    main.step()
    other.step()
wait("stepped")
{after}
"""


def test_steps_are_published_without_a_change_in_the_script(place, played, guests):
    """A hang of a script that was not edited for us would not be seen."""
    played(place)
    guest = guests(TRAINING.format(before="", after=""), place)
    guest.reaches("ready")
    beating = page_shows(place, lambda said: said.beat_ns is not None)
    assert beating.step is None
    page_shows(place, lambda said: said.beat_ns > beating.beat_ns)
    guest.go()
    guest.reaches("stepped")
    assert page_shows(place, lambda said: said.step is not None).step == 3
    guest.go()
    assert guest.ends() == (0, "", "")


def test_steps_are_the_jobs_own_after_a_checkpoint_was_loaded_or_saved(place, played, guests):
    """Steps lost in a restart would be off by all the steps before it."""
    sidecar = played(place, answer=(40, "/c/40"))
    code = TRAINING.format(
        before="print(worker_shim.latest_checkpoint(default='/c/1'), flush=True)",
        after="worker_shim.checkpoint_saved(torch.tensor(50), '/c/50')\nmain.step()\nwait('saved')",
    )
    guest = guests(code, place)
    guest.reaches("/c/40")
    guest.reaches("ready")
    guest.go()
    guest.reaches("stepped")
    assert page_shows(place, lambda said: said.step is not None).step == 43
    guest.go()
    guest.reaches("saved")
    assert page_shows(place, lambda said: said.step != 43).step == 51
    said = sidecar.wait_for("ckpt_info_update", step=50)
    assert (said["path"], said["prefix"], said["local_rank"]) == ("/c/50", "checkpoint", 2)
    guest.go()
    assert guest.ends() == (0, "", "")


def test_the_first_message_says_which_process_of_which_generation_speaks(place, played, guests):
    """The sidecar could not refuse a process that it did not start."""
    sidecar = played(place)
    guest = guests("import worker_shim\nworker_shim.attach()\nwait('ready')", place)
    guest.reaches("ready")
    init = sidecar.wait_for("init")
    assert (init["pid"], init["generation"], init["local_rank"]) == (guest.process.pid, 3, 2)
    sidecar.wait_for("heartbeat")


def test_the_last_report_of_a_process_that_ends_is_delivered(place, played, guests):
    """The final checkpoint would be lost in a queue."""
    sidecar = played(place)
    code = "import worker_shim\nworker_shim.attach()\nworker_shim.checkpoint_saved(9, b'relative')"
    assert guests(code, place).ends() == (0, "", "")
    assert sidecar.wait_for("ckpt_info_update", step=9)["path"] == str(ROOT / "relative")


def test_a_report_made_while_the_sidecar_is_away_arrives_when_it_is_back(place, played, guests):
    """A sidecar's restart would cost the job its newest checkpoint."""
    sidecar = played(place)
    code = (
        "import worker_shim\nworker_shim.attach()\nworker_shim.notify_labels({'dp': 1})\n"
        "wait('ready')\nworker_shim.checkpoint_saved(4, '/c/4')\nwait('saved')"
    )
    guest = guests(code, place)
    guest.reaches("ready")
    sidecar.wait_for("rank_labels", labels={"dp": "1"})
    sidecar.close()
    guest.go()
    guest.reaches("saved")
    sidecar.heard.clear()
    sidecar.open()
    sidecar.wait_for("ckpt_info_update", step=4)
    assert [it["type"] for it in sidecar.heard[:3]] == ["init", "ckpt_init", "rank_labels"]


def test_a_fault_is_delivered_before_the_script_dies_of_it(place, played, guests):
    """The reason would be lost and the lightest restart would be tried in vain."""
    sidecar = played(place)
    code = (
        "import os, worker_shim\nworker_shim.attach()\n"
        "worker_shim.report_fault('bad batch', 'job_level_restart', 'shard 3')\nos._exit(3)"
    )
    assert guests(code, place).ends()[0] == 3
    fault = sidecar.wait_for("job_fault")
    assert (fault["reason"], fault["message"]) == ("bad batch", "shard 3")
    assert fault["restart_mode"] == "job_level_restart"


CALLS = """
import worker_shim
session = worker_shim.attach()
assert worker_shim.attach() is session
worker_shim.notify_labels({'dp': 1})
worker_shim.checkpoint_saved(1, '/c/1')
worker_shim.report_fault('x')
print(worker_shim.latest_checkpoint(default='mine'), flush=True)
"""


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {SOCKET_ENV: "", PROGRESS_PAGE_ENV: ""},
            f"not attached, {SOCKET_ENV} is not set; training goes on without it",
        ),
        ({"LOCAL_RANK": "two"}, "invalid literal for int() with base 10: 'two'"),
        ({}, "(No such file or directory); training goes on without it"),
    ],
)
def test_without_a_sidecar_there_is_one_warning_and_training_goes_on(place, guests, change, line):
    """Taking Outrider away would break every script that names it."""
    code, out, err = guests(CALLS, place | change).ends()
    assert (code, out) == (0, "mine\n")
    assert err.startswith("outrider: ")
    assert err.endswith(f"{line}\n")
    assert err.count("\n") == 1


def test_a_refused_process_warns_once_and_goes_on(place, played, guests):
    """A worker left over from another generation would crash instead of being stopped."""
    played(place, refuse=True)
    expected = "outrider: the sidecar refused this process: stale generation\n"
    assert guests(CALLS, place).ends() == (0, "mine\n", expected)


def test_a_foreign_page_is_not_written(place, played, guests):
    """A worker of an older generation would move its successor's progress."""
    played(place)
    code, _, err = guests(
        "import worker_shim\nworker_shim.attach()", place | {PROGRESS_TOKEN_ENV: "8"}
    ).ends()
    assert code == 0
    assert "progress is not published: the token does not open" in err
    assert PageReader.open(place[PROGRESS_PAGE_ENV], 7).read() is None


def test_wrong_arguments_never_raise_into_training(place, played, guests):
    """A typing error in a report would end a run of weeks."""
    played(place)
    code = (
        "import worker_shim\nworker_shim.attach()\nworker_shim.checkpoint_saved('x', '/c')\n"
        "worker_shim.checkpoint_saved(-1, '/c')\nworker_shim.checkpoint_saved(1, None)\n"
        "worker_shim.notify_labels(3)\nworker_shim.report_fault('x', 'no_such_mode')\n"
        r"worker_shim.checkpoint_saved(1, b'/c/\xff')"
        "\nworker_shim.latest_checkpoint(default=3)"
    )
    exit_code, _, err = guests(code, place).ends()
    assert exit_code == 0
    assert err.count("\n") == err.count("outrider: ") == 7
    assert "is not UTF-8" in err


def test_a_forked_child_neither_speaks_nor_holds_the_socket(place, played, guests):
    """A data loader that outlives its rank would make it look alive."""
    sidecar = played(place)
    code = TRAINING.format(
        before="",
        after=(
            "import os\nif os.fork() == 0:\n"
            "    main.step()\n    worker_shim.checkpoint_saved(99, '/c/99')\n"
            "    print(worker_shim.attach().attached, flush=True)\n"
            "    sockets = [os.readlink(f'/proc/self/fd/{it}') for it in range(3, 20)\n"
            "        if os.path.islink(f'/proc/self/fd/{it}')]\n"
            "    print([it for it in sockets if 'socket' in it], flush=True)\n    os._exit(0)\n"
            "os.wait()\nworker_shim.checkpoint_saved(5, '/c/5')\nwait('forked')"
        ),
    )
    guest = guests(code, place)
    guest.reaches("ready")
    guest.go()
    guest.reaches("stepped")
    guest.go()
    guest.reaches("False")
    guest.reaches("[]")
    guest.reaches("forked")
    sidecar.wait_for("ckpt_info_update", step=5)
    assert not [it for it in sidecar.heard if it.get("step") == 99]
    assert page_shows(place, lambda said: said.step is not None).step == 3


BLOCKED = """
import worker_shim
worker_shim.attach()
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]),
                        world_size=2)
ones = torch.ones(1)
dist.all_reduce(ones)
if sys.argv[2] == "1":
    print("late", flush=True)
    sys.stdin.readline()
dist.all_reduce(ones)
dist.destroy_process_group()
"""


def test_a_rank_late_for_a_collective_is_behind_on_its_page(place, played, tmp_path):
    """Everybody waits, and nothing would tell the rank that is waited for."""
    played(place)
    create_page(tmp_path / "page-0", 7)
    places = [place | {PROGRESS_PAGE_ENV: str(tmp_path / "page-0")}, place]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", BLOCKED, str(tmp_path / "store"), str(rank)],
            cwd=ROOT,
            env=os.environ | places[rank],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert ranks[1].stdout.readline() == "late\n"
        late = page_shows(places[1], lambda said: said.collective_seq == 1)
        waits = page_shows(places[0], lambda said: said.collective_seq == 2)
        page_shows(places[1], lambda said: said.beat_ns > max(late.beat_ns, waits.beat_ns))
        assert page_shows(places[1], lambda said: True).collective_seq == 1
        ranks[1].stdin.write("\n")
        ranks[1].stdin.flush()
        assert [rank.wait(DEADLINE_S) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_what_a_job_began_from_is_told_and_is_gone_back_to(place, played, guests):
    """A fault before the first checkpoint would restart from whatever file lies newest."""
    code = (
        "import worker_shim\nworker_shim.attach()\n"
        "print(worker_shim.latest_checkpoint(default='/old/checkpoint'))"
    )
    sidecar = played(place)
    assert guests(code, place).ends() == (0, "/old/checkpoint\n", "")
    assert sidecar.wait_for("ckpt_info_update", step=0)["path"] == "/old/checkpoint"
    sidecar.answer = (0, "")
    assert guests(code, place).ends() == (0, "None\n", "")
    sidecar.answer = (20, "/new/checkpoint")
    assert guests(code, place).ends() == (0, "/new/checkpoint\n", "")


def test_a_busy_sidecar_changes_no_ranks_checkpoint(place, played, guests):
    """One rank that loads its own newest while its peers load the chosen one trains two models."""
    played(place, refuse=True)
    chosen = '{"checkpoint": {"step": 7, "model_checkpoint": "/c/7", "data_checkpoint": "/d/7"}}'
    code = (
        "import worker_shim\n"
        "worker_shim.attach()\n"
        "print(worker_shim.latest_checkpoint(default='/mine'))\n"
        "print(worker_shim.latest_checkpoint(default='/mine', kind='data'))\n"
    )
    status, out, _ = guests(code, place | {"OUTRIDER_CHECKPOINTS": chosen}).ends()
    assert (status, out.split()) == (0, ["/c/7", "/d/7"])


def test_a_chosen_checkpoint_of_no_bytes_is_reported_before_it_is_loaded(
    place, played, guests, tmp_path
):
    """The save that was killed leaves a name without content, and every rank would try it."""
    shards = tmp_path / "step_200"
    shards.mkdir()
    (shards / "rank_0.pt").write_bytes(b"whole")
    (shards / "rank_3.pt").touch()
    sidecar = played(place, answer=(200, str(shards)))
    code = (
        "import worker_shim\n"
        "worker_shim.attach()\n"
        "worker_shim.checkpoint_saved(210, 's3://bucket/210')\n"
        "worker_shim.checkpoint_saved(210, '/d/210', kind='data')\n"
        "worker_shim.latest_checkpoint()\n"
    )
    status, _, err = guests(code, place).ends()
    assert (status, err) == (0, "")
    fault = sidecar.wait_for("job_fault", reason="CheckpointUnusable")
    assert "rank_3.pt of the chosen checkpoint" in fault["message"]
    sidecar.wait_for("ckpt_info_update", path="s3://bucket/210")
    sidecar.wait_for("ckpt_info_update", path="/d/210", checkpoint_type="data_checkpoint")
