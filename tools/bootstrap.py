"""Sets a fresh checkout up: virtual environment, pinned packages, and what the tests need.

Runs under the system's Python before anything is installed, so it uses the standard library only.
A second run finds the stamp of the first and does nothing.  It decides what is missing; pip, venv
and apt-get do the work, and what they cannot do is said in one sentence with the way out.
"""

import argparse
import hashlib
import importlib.util
import os
import queue
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TextIO

ROOT: Final = Path(__file__).resolve().parent.parent
LOCK: Final = "requirements.lock"
STAMP: Final = "outrider-bootstrap.stamp"
LOG: Final = "outrider-bootstrap.log"

TEST_TOOLS: Final[Mapping[str, str]] = {
    "promtool": "prometheus",
    "amtool": "prometheus-alertmanager",
    "chromium": "chromium",
}
"""Program that the tests call -> Debian package that brings it."""

TICK_S: Final = 0.1
"""How often the spinner turns on a terminal."""
QUIET_LINE_S: Final = 10.0
"""Longest silence when the output is not a terminal, so that nobody takes it for a hang."""
NOTE_CHARS_MAX: Final = 100
"""Longest note; the log has the rest."""


class SetupError(Exception):
    """Something a person has to do first; the text says what."""


class Progress:
    """One line that changes in place on a terminal, plain lines anywhere else."""

    _FRAMES: Final = "|/-\\"

    def __init__(self, out: TextIO, title: str, total: int) -> None:
        self._out = out
        self._live = out.isatty()
        self._title = title
        self._total = total
        self._done = 0
        self._text = "starting"
        self._started = time.monotonic()
        self._last_line = self._started
        self._turn = 0

    def advance(self, text: str) -> None:
        """One more package is on its way."""
        self._done += 1
        self.note(text)

    def note(self, text: str, *, passing: bool = False) -> None:
        """Say what is happening now; what is ``passing`` is not worth a line of a log."""
        self._text = text
        if self._live:
            self.tick()
        elif not passing:
            self._line(self._status())

    def tick(self) -> None:
        """Show that work goes on although nothing new happened."""
        if self._live:
            self._turn += 1
            frame = self._FRAMES[self._turn % len(self._FRAMES)]
            width = shutil.get_terminal_size().columns - 1
            self._out.write(f"\r\x1b[K{f'{frame} {self._status()}'[:width]}")
            self._out.flush()
        elif time.monotonic() - self._last_line >= QUIET_LINE_S:
            self._line(f"{self._status()} ...")

    def finish(self, text: str) -> None:
        """Leave one final line standing."""
        if self._live:
            self._out.write("\r\x1b[K")
        self._line(f"{self._title}: {text} ({self._elapsed_s():.0f} s)")

    def _status(self) -> str:
        # Packages beyond the pins are what an index's build of a pinned one asks for.
        count = f"[{self._done}/{max(self._done, self._total)}] " if self._total else ""
        return f"{self._title}: {count}{self._text} ({self._elapsed_s():.0f} s)"

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def _line(self, text: str) -> None:
        self._last_line = time.monotonic()
        print(text, file=self._out, flush=True)


def run_quietly(
    command: Sequence[str],
    progress: Progress,
    log: Path,
    *,
    env: Mapping[str, str] | None = None,
    total_prefixes: tuple[str, ...] = (),
    note_prefixes: tuple[str, ...] = (),
    passing_prefixes: tuple[str, ...] = (),
) -> tuple[int, list[str]]:
    """Run ``command``, append its output to ``log``, and return its status and all its lines.

    A line that opens with one of ``total_prefixes`` counts one package, one that opens with one
    of ``note_prefixes`` is shown, and with one of ``passing_prefixes`` on a terminal only.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_pump, args=(process.stdout, lines), daemon=True).start()
    seen: list[str] = []
    try:
        with log.open("a", encoding="utf-8") as book:
            book.write(f"$ {shlex.join(command)}\n")
            while True:
                try:
                    line = lines.get(timeout=TICK_S)
                except queue.Empty:
                    progress.tick()
                    continue
                if line is None:
                    break
                seen.append(line)
                book.write(f"{line}\n")
                text = line.strip()
                if text.startswith(total_prefixes):
                    progress.advance(_subject(text))
                elif text.startswith((*note_prefixes, *passing_prefixes)):
                    passing = text.startswith(passing_prefixes)
                    progress.note(text.partition(": ")[0][:NOTE_CHARS_MAX], passing=passing)
    except BaseException:
        process.terminate()
        raise
    finally:
        process.wait()
    return process.returncode, seen


def _pump(stream: TextIO, lines: "queue.Queue[str | None]") -> None:
    for line in stream:
        lines.put(line.rstrip("\n"))
    lines.put(None)


def _subject(line: str) -> str:
    """``Collecting aiohttp==3.14.5 (from -r ...)`` is about ``aiohttp==3.14.5``."""
    for opening in ("Requirement already satisfied: ", "Collecting ", "Processing "):
        line = line.removeprefix(opening)
    return line.split()[0].rpartition("/")[2] if line else line


def pins(lock: str) -> list[str]:
    """Return the requirement lines of a lock file."""
    return [line for line in lock.splitlines() if line.strip() and not line.startswith("#")]


def stamp_of(root: Path) -> str:
    """Return what an environment made from this tree is stamped with."""
    digest = hashlib.sha256(f"{root}\n{sys.version_info[:2]}\n".encode())
    for name in (LOCK, "pyproject.toml"):
        digest.update((root / name).read_bytes())
    return digest.hexdigest()


def ensure_environment(root: Path, out: TextIO) -> None:
    """Make ``.venv`` hold exactly the pinned packages and the ``outrider`` command."""
    venv = root / ".venv"
    stamp = venv / STAMP
    wanted = stamp_of(root)
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted and _runs(venv):
        return
    stamp.unlink(missing_ok=True)
    if not _runs(venv):
        _create_venv(venv, out)
    log = venv / LOG
    log.write_text("", encoding="utf-8")
    requirements = pins((root / LOCK).read_text(encoding="utf-8"))
    progress = Progress(out, "Installing pinned packages", len(requirements))
    pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    install = [*pip, "install", "--progress-bar", "off"]
    status, lines = run_quietly(
        [*install, "-r", LOCK],
        progress,
        log,
        total_prefixes=("Collecting ", "Processing ", "Requirement already satisfied: "),
        note_prefixes=("Installing collected packages",),
        passing_prefixes=("Downloading ", "Using cached "),
    )
    _check_pip(status, lines, log)
    progress.note("outrider itself")
    editable = [*install, "--no-deps", "--no-build-isolation", "--editable", "."]
    status, lines = run_quietly(editable, progress, log)
    _check_pip(status, lines, log)
    stamp.write_text(wanted, encoding="utf-8")
    progress.finish("done")


def _runs(venv: Path) -> bool:
    """Say whether the environment has a Python that starts and a pip that loads."""
    python = venv / "bin" / "python"
    if not python.exists():
        return False
    asked = subprocess.run([python, "-c", "import pip"], capture_output=True, check=False)
    return asked.returncode == 0


def _create_venv(venv: Path, out: TextIO) -> None:
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        package = f"python3.{sys.version_info.minor}-venv"
        install_debian_packages([package], "a virtual environment", out)
    print(f"Creating {venv.name} with Python {sys.version.split()[0]}", file=out, flush=True)
    command = [sys.executable, "-m", "venv", "--clear", str(venv)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        said = (made.stderr or made.stdout).strip().splitlines()
        raise SetupError(f"could not create {venv}: {said[-1] if said else 'no reason given'}")


def _check_pip(status: int, lines: Sequence[str], log: Path) -> None:
    if status == 0:
        return
    errors = [line for line in lines if line.startswith("ERROR")] or list(lines[-1:])
    why = errors[-1].removeprefix("ERROR:").strip() if errors else f"exit status {status}"
    raise SetupError(
        f"pip could not install the pinned packages: {why} "
        f"(whole output: {log}); check the network or pip's index and run the command again"
    )


def missing_test_packages() -> list[str]:
    """Return the Debian packages whose program the tests would not find."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/bin", "/usr/local/bin"])
    return [package for tool, package in TEST_TOOLS.items() if not shutil.which(tool, path=path)]


def install_debian_packages(packages: Sequence[str], purpose: str, out: TextIO) -> None:
    """Install ``packages`` as root or through sudo without a password; else say what to run."""
    by_hand = f"sudo apt-get install -y --no-install-recommends {' '.join(packages)}"
    if shutil.which("apt-get") is None:
        raise SetupError(
            f"{purpose} needs {' and '.join(packages)} (Debian's names), and this machine has no "
            "apt-get; install their programs by hand and run the command again"
        )
    become = _become_root()
    if become is None:
        raise SetupError(f"{purpose} needs Debian packages; run once: {by_hand}")
    # RUNLEVEL=1 keeps the packages' init scripts from starting their services.
    root_env = ["env", "DEBIAN_FRONTEND=noninteractive", "RUNLEVEL=1"]
    apt = [*become, *root_env, "apt-get"]
    log = ROOT / ".venv" / LOG
    log.parent.mkdir(exist_ok=True)
    progress = Progress(out, f"Installing {' '.join(packages)}", 0)
    shown = ("Unpacking ", "Setting up ")
    passing = ("Get:", "Hit:", "Selecting ", "Preparing ")
    # A failed refresh is no reason to stop: the lists that are here may be good enough.
    run_quietly([*apt, "update"], progress, log, passing_prefixes=passing)
    install = [*apt, "install", "-y", "--no-install-recommends", *packages]
    status, lines = run_quietly(
        install, progress, log, note_prefixes=shown, passing_prefixes=passing
    )
    if status != 0:
        errors = [line for line in lines if line.startswith("E:")] or ["E: no reason given"]
        raise SetupError(f"apt-get failed ({errors[-1][2:].strip()}); run once: {by_hand}")
    if Path("/run/systemd/system").is_dir():
        services = [package for package in packages if package in TEST_TOOLS.values()]
        stop = [*become, "systemctl", "disable", "--now", *services]
        if services:
            run_quietly(stop, progress, log)
    progress.finish("done")


def _become_root() -> list[str] | None:
    if os.geteuid() == 0:
        return []
    if shutil.which("sudo") is None:
        return None
    asked = subprocess.run(["sudo", "-n", "true"], capture_output=True, check=False)
    return ["sudo", "-n"] if asked.returncode == 0 else None


def main(argv: Sequence[str] | None = None) -> int:
    """Set up what is missing; return the exit status."""
    parser = argparse.ArgumentParser(prog="bootstrap.sh", description=__doc__)
    parser.add_argument(
        "--tests", action="store_true", help="also bring the Debian packages that the tests use"
    )
    arguments = parser.parse_args(argv)
    try:
        ensure_environment(ROOT, sys.stdout)
        if arguments.tests and (packages := missing_test_packages()):
            install_debian_packages(packages, "make test", sys.stdout)
    except SetupError as error:
        print(f"\nbootstrap: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nbootstrap: interrupted; run the command again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
