"""Writes alerts/outrider.rules.yaml from rules.in.yaml and thresholds.py, or compares them.

python -m alerts.build            write
python -m alerts.build --check    compare
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import yaml

from alerts.thresholds import Thresholds

FOLDER: Final = Path(__file__).resolve().parent
SOURCE: Final = FOLDER / "rules.in.yaml"
RULES: Final = FOLDER / "outrider.rules.yaml"
RUNBOOKS: Final = "docs/runbooks/README.md"
"""Where a runbook stands; your Alertmanager's templates put the address of your copy before it."""
HEAD: Final = "# Written by `make alerts` from rules.in.yaml and thresholds.py: change those.\n"
WIDTH: Final = 100
LABELS: Final = ("severity", "component", "scope")


def text(limits: Thresholds) -> str:
    """Return the rule file.  Raises `KeyError` for a threshold that does not exist."""
    values = asdict(limits)
    source = re.sub(r"<<(\w+)>>", lambda it: str(values[it[1]]), SOURCE.read_text(encoding="utf-8"))
    groups = [
        {"name": name, "rules": [_rule(rule) for rule in rules]}
        for name, rules in yaml.safe_load(source).items()
    ]
    body = yaml.safe_dump({"groups": groups}, sort_keys=False, width=WIDTH, allow_unicode=True)
    return HEAD + body


def _rule(rule: Mapping[str, Any]) -> dict[str, Any]:
    if "record" in rule:
        return {"record": rule["record"], "expr": rule["expr"]}
    query = "&".join(
        f"var-{name}={{{{ $labels.{name} | urlquery }}}}" for name in rule.get("variables", ())
    )
    return {
        "alert": rule["alert"],
        "expr": rule["expr"],
        **({"for": rule["for"]} if "for" in rule else {}),
        "labels": {name: rule[name] for name in LABELS},
        "annotations": {
            "summary": rule["summary"],
            "description": rule["description"],
            "runbook_url": f"{RUNBOOKS}#{rule['alert'].lower()}",
            "dashboard_url": f"/d/{rule['dashboard']}" + (f"?{query}" if query else ""),
        },
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Write or compare; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m alerts.build")
    parser.add_argument("--check", action="store_true", help="compare only")
    new = text(Thresholds())
    if parser.parse_args(argv).check:
        if RULES.is_file() and RULES.read_text(encoding="utf-8") == new:
            return 0
        print("alerts/outrider.rules.yaml is not what rules.in.yaml says; run `make alerts`")
        return 1
    RULES.write_text(new, encoding="utf-8")
    print("wrote alerts/outrider.rules.yaml")
    return 0


if __name__ == "__main__":
    sys.exit(main())
