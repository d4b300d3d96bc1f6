"""The README's commands are the ones that are run, and they leave nothing out."""

import os
import re
import subprocess
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def commands_of_readme() -> list[str]:
    blocks = re.findall(r"```(?:sh|bash|console)\n(.*?)```", read("README.md"), re.DOTALL)
    return [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))


def test_the_readme_names_the_two_commands_and_the_compose_door() -> None:
    """A newcomer types what stands there and nothing else."""
    commands = commands_of_readme()
    assert "make demo" in commands
    assert "make test" in commands
    assert any(command.startswith("docker compose -f compose/") for command in commands)


def test_every_make_command_of_the_readme_exists() -> None:
    """A target that was renamed leaves the reader with an error as the first impression."""
    named = {command.split()[1] for command in commands_of_readme() if command.startswith("make ")}
    assert named <= targets()


def test_the_list_of_targets_stands_in_two_columns() -> None:
    """A name that is longer than its column pushes its own explanation out of line."""
    shown = subprocess.run(
        ["make", "--no-print-directory", "help"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout.splitlines()
    told = [re.fullmatch(r"([a-z-]+)(  +)(\S.*)", line) for line in shown]
    assert len(told) > 10
    assert all(told), shown
    assert len({line.start(3) for line in told if line}) == 1


def test_ci_runs_exactly_the_readmes_test_command() -> None:
    """CI that runs something else proves something else."""
    script = [line for line in read(".ci/run").splitlines() if line and not line.startswith("#")]
    assert script[0] == "set -euo pipefail"
    assert script[-1] == "exec make test"
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_make_test_runs_every_folder_of_tests() -> None:
    """A folder that no tier names is never run, and nobody notices."""
    folders = {
        path.parent.relative_to(ROOT / "tests").parts[0]
        for path in (ROOT / "tests").rglob("test_*.py")
    }
    tiers = set(re.findall(r"tests/(\w+)", read("Makefile")))
    assert folders
    assert folders <= tiers


def test_the_lock_pins_every_requirement_exactly() -> None:
    """An open requirement makes today's green build tomorrow's riddle."""
    pins = [line for line in read("requirements.lock").splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", pin) for pin in pins), pins
    pinned = {normal(pin.split("==")[0]) for pin in pins}
    project = tomllib.loads(read("pyproject.toml"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    assert {normal(re.split(r"[=<>\s]", item)[0]) for item in wanted} <= pinned


def test_guests_are_forbidden_every_requirement_of_the_base() -> None:
    """A new base requirement must not slip into the training process unnoticed."""
    document = tomllib.loads(read("pyproject.toml"))
    contracts = {item["id"]: item for item in document["tool"]["importlinter"]["contracts"]}
    forbidden = set(contracts["guests-bring-nothing"]["forbidden_modules"])
    base = {normal(re.split(r"[=<>]", item)[0]) for item in document["project"]["dependencies"]}
    modules = {
        module
        for module, names in packages_distributions().items()
        if base & {normal(name) for name in names}
        and not module.startswith("_")
        and module.isidentifier()
    }
    assert {"aiohttp", "yaml"} <= modules
    assert modules - {"example"} <= forbidden


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
