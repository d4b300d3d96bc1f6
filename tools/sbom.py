"""Writes the software bill of materials: what `requirements.lock` pins, in CycloneDX JSON.

Versions are those of the lock, licences what the installed packages say of themselves.
"""

import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Final

from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

ROOT: Final = Path(__file__).resolve().parent.parent
LICENCE_CHARS_MAX: Final = 100
"""Longer ones are the whole text of a licence."""


def bill(lock: str, name: str) -> Bom:
    """Return the bill of the packages in a lock file, for the project ``name``."""
    bom = Bom()
    bom.metadata.component = Component(name=name, type=ComponentType.APPLICATION)
    for line in lock.splitlines():
        package, _, version = line.partition("==")
        if not version or line.startswith("#"):
            continue
        component = Component(
            name=package,
            version=version,
            type=ComponentType.LIBRARY,
            purl=PackageURL("pypi", name=package.lower().replace("_", "-"), version=version),
        )
        for licence in _licences(package):
            component.licenses.add(licence)
        bom.components.add(component)
        bom.register_dependency(bom.metadata.component, [component])
    return bom


def main(arguments: list[str]) -> int:
    """Write the bill to the file that the command line names."""
    if len(arguments) != 1:
        print("usage: python -m tools.sbom FILE", file=sys.stderr)
        return 2
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    bom = bill(lock, project["name"])
    target = Path(arguments[0])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(JsonV1Dot6(bom).output_as_string(indent=2) + "\n", encoding="utf-8")
    print(f"{target}: {len(bom.components)} packages")
    return 0


def _licences(package: str) -> list[DisjunctiveLicense | LicenseExpression]:
    try:
        known = metadata.metadata(package)
    except metadata.PackageNotFoundError:
        return []
    if expressions := known.get_all("License-Expression"):
        return [LicenseExpression(expressions[0])]
    text = "".join(known.get_all("License") or [])
    if text and len(text) <= LICENCE_CHARS_MAX:
        return [DisjunctiveLicense(name=text)]
    named = [item for item in known.get_all("Classifier") or [] if item.startswith("License ::")]
    return [DisjunctiveLicense(name=item.rpartition(":: ")[2]) for item in named]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
