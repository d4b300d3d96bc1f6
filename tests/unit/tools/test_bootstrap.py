"""The bootstrap: says what it does, does it once, and stops with the one command to run."""

import importlib.util
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bootstrap = load("bootstrap")
lock = load("lock")


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose PATH holds only what a test puts there, and a user who is not root."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("env", "sh"):
        (folder / name).symlink_to(f"/usr/bin/{name}")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(bootstrap.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    return folder


def test_packages_are_installed_through_sudo_where_it_asks_nothing(machine: Path) -> None:
    """The second of the two commands would fail on every fresh machine."""
    journal = machine.parent / "journal"
    program(machine, "sudo", 'shift; [ "$1" = true ] || exec "$@"')
    program(machine, "apt-get", f'echo "$RUNLEVEL $@" >>{journal}; echo "Setting up x"')
    out = io.StringIO()
    bootstrap.install_debian_packages(["prometheus"], "make test", out)
    said = journal.read_text(encoding="utf-8").splitlines()
    assert said == ["1 update", "1 install -y --no-install-recommends prometheus"]
    assert "Installing prometheus: Setting up x" in out.getvalue()
    assert "Installing prometheus: done" in out.getvalue()


def test_without_the_right_to_install_the_one_command_is_named(machine: Path) -> None:
    """A newcomer who is told "missing" without the way out gives up."""
    program(machine, "apt-get", "exit 1")
    with pytest.raises(bootstrap.SetupError) as refused:
        bootstrap.install_debian_packages(["prometheus"], "make test", io.StringIO())
    command = "sudo apt-get install -y --no-install-recommends prometheus"
    assert str(refused.value).endswith(f"run once: {command}")


def test_a_failed_installation_says_what_apt_said(machine: Path) -> None:
    """The reason is in apt's words, and it must not drown in its output."""
    program(machine, "sudo", 'shift; [ "$1" = true ] || exec "$@"')
    program(machine, "apt-get", '[ "$1" = update ] || { echo "E: disk is full"; exit 100; }')
    with pytest.raises(bootstrap.SetupError, match=r"apt-get failed \(disk is full\); run once: "):
        bootstrap.install_debian_packages(["prometheus"], "make test", io.StringIO())


def test_a_machine_without_apt_is_told_which_programs_to_bring(machine: Path) -> None:
    """Not every machine is Debian."""
    assert machine.is_dir()
    with pytest.raises(bootstrap.SetupError, match="has no apt-get; install their programs"):
        bootstrap.install_debian_packages(["prometheus"], "make test", io.StringIO())


def test_a_package_that_pip_cannot_find_is_named_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pip's own output is a page long, and the reason stands in its middle."""
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / "requirements.lock").write_text("outrider-absent==1\n", encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text("", encoding="utf-8")
    out = io.StringIO()
    with pytest.raises(bootstrap.SetupError, match="No matching distribution found for outrider-"):
        bootstrap.ensure_environment(tmp_path, out)
    assert "Creating .venv with Python" in out.getvalue()
    assert not (tmp_path / ".venv" / bootstrap.STAMP).exists(), "half an environment looks whole"


def test_output_that_is_no_terminal_gets_plain_lines() -> None:
    """Escape codes in a CI log are noise, and silence there reads as a hang."""
    out = io.StringIO()
    progress = bootstrap.Progress(out, "Installing", 2)
    progress.advance("aiohttp==3")
    progress.advance("torch==2")
    progress.finish("done")
    said = out.getvalue().splitlines()
    assert said[0].startswith("Installing: [1/2] aiohttp==3 (")
    assert said[1].startswith("Installing: [2/2] torch==2 (")
    assert said[2].startswith("Installing: done (")
    assert "\x1b" not in out.getvalue()


def test_a_terminal_gets_one_line_that_changes_in_place() -> None:
    """Fifty lines of packages push what matters off the screen."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    progress = bootstrap.Progress(out, "Installing", 2)
    progress.advance("aiohttp==3")
    progress.tick()
    progress.finish("done")
    assert out.getvalue().count("\n") == 1
    assert "\r\x1b[K" in out.getvalue()


def test_a_change_of_lock_or_project_makes_the_stamp_old(tmp_path: Path) -> None:
    """An environment that silently keeps old packages fails far from the cause."""
    (tmp_path / "requirements.lock").write_text("a==1\n", encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text("", encoding="utf-8")
    first = bootstrap.stamp_of(tmp_path)
    assert bootstrap.stamp_of(tmp_path) == first
    (tmp_path / "requirements.lock").write_text("a==2\n", encoding="utf-8")
    second = bootstrap.stamp_of(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[project]\n", encoding="utf-8")
    assert len({first, second, bootstrap.stamp_of(tmp_path)}) == 3


def test_a_machine_without_a_new_enough_python_is_told_so(tmp_path: Path) -> None:
    """A syntax error from an old interpreter explains nothing."""
    script = (ROOT / "bootstrap.sh").read_text(encoding="utf-8")
    copy = tmp_path / "bootstrap.sh"
    copy.write_text(script.replace("/usr/bin/python3", ""), encoding="utf-8")
    for name in ("python3", "python3.11", "python3.12", "python3.13", "python3.14"):
        program(tmp_path, name, "exit 1")
    (tmp_path / "dirname").symlink_to("/usr/bin/dirname")
    ran = subprocess.run(
        ["/bin/sh", copy],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert "needs Python 3.11 or newer" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_the_second_run_does_nothing(tmp_path: Path) -> None:
    """Set-up in front of every command is only bearable when it takes no time."""
    # A tree of its own: the real one's pins may have changed since its environment was made.
    (tmp_path / "tools").mkdir()
    for name in ("tools/bootstrap.py", "pyproject.toml", bootstrap.LOCK):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    stamp = tmp_path / ".venv" / bootstrap.STAMP
    stamp.write_text(bootstrap.stamp_of(tmp_path), encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, tmp_path / "tools" / "bootstrap.py"],
        env={**os.environ, "PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert stamp.read_text(encoding="utf-8") == bootstrap.stamp_of(tmp_path)


def test_the_lock_drops_labels_of_local_builds() -> None:
    """A pin on one index's build cannot be installed from another."""
    text = lock.locked(["torch==2.13.0+cpu", "aiohttp==3.1", "outrider @ file:///x", ""])
    assert text.splitlines()[1:] == ["aiohttp==3.1", "torch==2.13.0"]
