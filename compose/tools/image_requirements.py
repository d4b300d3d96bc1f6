"""Prints what the container image installs, one requirement a line.

Decides that the image holds the product's run-time dependencies, torch for the training script,
and what builds the product itself, and leaves out the tools of development.  Knows no versions:
requirements.lock pins them as a constraint.
"""
# ruff: noqa: INP001, T201 - a script that prints, not a package

import tomllib
from pathlib import Path

EXTRAS = ("torch",)
TRAINING = ("numpy",)
"""torch warns at every start without it."""
BUILDING = ("setuptools>=70.1",)
"""From there on it makes wheels by itself."""


def image_requirements(pyproject: Path) -> list[str]:
    """Return the requirements of the image, from the project's own declaration."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"]]
    for extra in EXTRAS:
        wanted += project["optional-dependencies"][extra]
    return [*wanted, *TRAINING, *BUILDING]


if __name__ == "__main__":
    print(*image_requirements(Path("pyproject.toml")), sep="\n")
