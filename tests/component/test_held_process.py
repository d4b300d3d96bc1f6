"""Real processes that are stopped, traced or asleep in the kernel, as the watch sees them."""

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from scout.clock import SECOND, Instant
from scout.held import ASLEEP, HeldWatch
from scout.kernel_sleep import is_frozen, sleeps
from sidecar.workers.processes import process_state
from tests.component.freezing import VERSIONS, FreezingGroup

pytestmark = [
    pytest.mark.component,
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler on this machine"),
]
WITHIN_S = 30.0

# A parent waits for its vfork child in the kernel, where no signal wakes it.
ASLEEP_C = """
#include <unistd.h>
#include <stdlib.h>
int main(int argc, char **argv) {
  for (;;) {
    if (vfork() == 0) { usleep(atoi(argv[1])); _exit(0); }
  }
}
"""
TRACED_C = """
#include <signal.h>
#include <stdio.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>
int main(void) {
  pid_t child = fork();
  if (child == 0) { for (;;) pause(); }
  ptrace(PTRACE_ATTACH, child, 0, 0);
  waitpid(child, 0, 0);
  printf("%d\\n", child);
  fflush(stdout);
  pause();
}
"""

TIMED_C = """
#include <unistd.h>
int main(void) { for (;;) sleep(1000); }
"""


@pytest.fixture
def run(tmp_path):
    """Return what compiles and starts a program; everything is ended afterwards."""
    started = []

    def start(source, *args):
        file = tmp_path / f"{len(started)}.c"
        file.write_text(source)
        program = file.with_suffix("")
        subprocess.run(["cc", "-w", "-o", program, file], check=True)
        started.append(
            subprocess.Popen(
                [program, *args], stdout=subprocess.PIPE, text=True, start_new_session=True
            )
        )
        return started[-1]

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def until(condition):
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


class Looks:
    """One watch over one process."""

    def __init__(self, pid):
        self.pid, self.watch, self.longest = pid, HeldWatch(), 0

    def look(self):
        state = process_state(self.pid)
        slept = sleeps(self.pid) if state == ASLEEP else None
        held = self.watch.observe(state, slept, Instant(time.monotonic_ns()))
        self.longest = max(self.longest, held or 0)
        return held


def test_a_stopped_process_is_held_until_it_is_continued(run):
    """The plainest of all causes is worth no minutes of waiting."""
    process = run(ASLEEP_C.replace("vfork() == 0", "0"), "1")
    looks = Looks(process.pid)
    assert looks.look() is None
    process.send_signal(signal.SIGSTOP)
    until(lambda: (looks.look() or 0) > SECOND // 2)
    process.send_signal(signal.SIGCONT)
    until(lambda: looks.look() is None)


def test_one_long_sleep_in_the_kernel_is_held(run):
    """A driver or a file server that does not answer holds its process like this."""
    looks = Looks(run(ASLEEP_C, "60000000").pid)
    until(lambda: (looks.look() or 0) > SECOND // 2)
    assert looks.longest > SECOND // 2


def test_many_short_sleeps_in_the_kernel_hold_nobody(run):
    """A process that reads from a slow disk is found asleep at every look, and gets on."""
    looks = Looks(run(ASLEEP_C, "20000").pid)
    seen = []

    def looked():
        seen.append(looks.look())
        return len(seen) >= 200

    until(looked)
    assert len([it for it in seen if it is not None]) > 100, "it was hardly ever asleep"
    assert seen.count(0) > 20, "its sleeps were not told apart"


def test_a_process_under_a_debugger_is_not_held(run):
    """Whoever looks at a rank with a debugger does not want the job restarted under the hands."""
    tracer = run(TRACED_C)
    pid = int(tracer.stdout.readline())
    assert process_state(pid) == "t"
    assert Looks(pid).look() is None
    assert Path(f"/proc/{pid}").exists()


@pytest.fixture(params=VERSIONS)
def group(request):
    """Return a control group that freezes, of each version that the machine has."""
    try:
        made = FreezingGroup(request.param)
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield made
    made.thaw()
    for pid in (made.folder / "cgroup.procs").read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    made.remove()


@pytest.mark.parametrize("program", [ASLEEP_C.replace("vfork() == 0", "0"), TIMED_C])
def test_a_process_frozen_with_its_control_group_is_not_held(run, group, program):
    """A snapshot of a container freezes it on purpose, and the job would be restarted for it."""
    process = run(program, "1")
    until(lambda: process_state(process.pid) in ("R", "S"))
    assert not is_frozen(process.pid)
    group.freeze(process.pid)
    until(group.is_frozen)
    until(lambda: is_frozen(process.pid))
    looks = Looks(process.pid)
    seen = [looks.look() for _ in range(20)]
    assert seen == [None] * 20
    group.thaw()
    until(lambda: not is_frozen(process.pid))


def test_a_process_that_is_gone_is_not_called_frozen(run):
    """A look that raises would end the watch over all the others."""
    process = run(TIMED_C)
    process.kill()
    process.wait()
    assert not is_frozen(process.pid)
    assert sleeps(process.pid) is None
