"""What importing a package brings along, seen from a fresh interpreter."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120


def modules_of(package):
    """Return the dotted name of every module in a package that is there."""
    paths = sorted((ROOT / package).rglob("*.py"))
    names = [path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in paths]
    return [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]


def loaded_by(*modules):
    """Return what is in ``sys.modules`` after importing these, and was not before.

    Without the handlers that installed distributions offer to torch: torch would import ours.
    """
    code = (
        "import importlib, importlib.metadata, json, sys\n"
        "importlib.metadata.entry_points = lambda **_: importlib.metadata.EntryPoints()\n"
        "before = set(sys.modules)\n"
        "for name in json.loads(sys.argv[1]): importlib.import_module(name)\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(modules)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


def test_a_module_list_is_not_empty():
    """A moved package would pass every test below by having nothing to import."""
    assert "scout.verdict" in modules_of("scout")
    assert "worker_shim.messages" in modules_of("worker_shim")
    assert "sidecar.api" in modules_of("sidecar")


def test_importing_scout_loads_no_torch():
    """A sidecar would spend a second and 270 MiB on a library it never calls."""
    assert "torch" not in loaded_by("scout")


def test_the_pure_modules_of_scout_load_the_standard_library_only():
    """The coordinator could not judge where torch is not installed."""
    pure = ("verdict", "consensus", "hang", "clock", "progress")
    loaded = loaded_by(*(f"scout.{name}" for name in pure))
    assert loaded <= {"scout"} | sys.stdlib_module_names


def test_the_shim_loads_nothing_but_the_standard_library_and_scout():
    """A training image would need, or clash with, the daemon's libraries."""
    loaded = loaded_by(*modules_of("worker_shim"))
    assert loaded <= {"worker_shim", "scout"} | sys.stdlib_module_names


@pytest.mark.parametrize("package", ["sidecar", "coordinator"])
def test_no_daemon_loads_torch(package):
    """Every node would pay for it beside the job, and could not start without it."""
    assert "torch" not in loaded_by(*modules_of(package))


@pytest.mark.parametrize(
    ("package", "outer"),
    [
        ("scout", {"worker_shim", "sidecar", "coordinator"}),
        ("worker_shim", {"sidecar", "coordinator"}),
        ("sidecar", {"coordinator"}),
    ],
)
def test_packages_look_one_way_only(package, outer):
    """A part could not be used, or understood, without the parts above it."""
    assert not loaded_by(*modules_of(package)) & outer
