"""Writes alerts/outrider.rules.yaml from rules.in.yaml and thresholds.py, or compares them.

python -m alerts.build            write
python -m alerts.build --check    compare
"""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import yaml

from alerts.thresholds import Thresholds
from tools.generated import write_or_compare

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
    return write_or_compare(argv, "alerts.build", "alerts", {RULES: text(Thresholds())})


if __name__ == "__main__":
    sys.exit(main())
