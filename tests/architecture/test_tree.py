"""The tree is the one that the documents promise, and it speaks of itself alone."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PROMISED = {
    ".ci",
    ".gitignore",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "SECURITY.md",
    "alerts",
    "bootstrap.sh",
    "compose",
    "coordinator",
    "dashboards",
    "docs",
    "examples",
    "pyproject.toml",
    "requirements.lock",
    "scout",
    "sidecar",
    "tests",
    "tools",
    "worker_shim",
}
ALLOWED_LATER = {".dockerignore", ".gitattributes", "benchmarks"}

UNFINISHED = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b|Not" r"ImplementedError")
MACHINE_PATH = re.compile(r"(?<![\w/.}])/(?:ro" r"ot|ho" r"me/\w+|wo" r"rk|Us" r"ers/\w+)/")
OUTSIDE = re.compile(
    r"\b(?:issue #?\d+|see #\d+|this ses" r"sion)\b",
    re.IGNORECASE,
)


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [Path(line) for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def lines() -> Iterator[tuple[str, str]]:
    """Every line of every text file of ours, with where it stands."""
    for path in tracked():
        if path.name in {"LICENSE", "requirements.lock"}:
            continue
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            yield f"{path}:{number}", line


def matches(pattern: re.Pattern[str]) -> list[str]:
    return [f"{where}: {line.strip()[:100]}" for where, line in lines() if pattern.search(line)]


def test_the_top_level_is_what_the_readme_promises() -> None:
    """A stray folder at the top is a second place for something that already has one."""
    present = {path.parts[0] for path in tracked()}
    assert present - ALLOWED_LATER == PROMISED


def test_nothing_is_left_for_later_in_the_code() -> None:
    """A note to oneself in shipped code is a feature that only looks finished."""
    assert not matches(UNFINISHED)


def test_no_path_of_one_machine_is_written_down() -> None:
    """It works there and nowhere else."""
    assert not matches(MACHINE_PATH)


def test_the_project_speaks_of_itself_alone() -> None:
    """A tracker's number means nothing to whoever reads this next."""
    assert not matches(OUTSIDE)


def test_every_test_file_has_a_name_of_its_own() -> None:
    """Two of one name cannot be told apart in a report."""
    names = [path.name for path in tracked() if path.match("tests/**/test_*.py")]
    assert names
    assert sorted(names) == sorted(set(names))
