"""The dashboards against JSON schemas made from Grafana's own TypeScript types."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools/grafana_schema"
pytestmark = [
    pytest.mark.component,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        shutil.which("node") is None or not (TOOL / "node_modules/@grafana/schema").is_dir(),
        reason="Grafana's types are not here: `make check-dashboards` fetches them (needs npm)",
    ),
]


def check(*files: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["node", TOOL / "check.mjs", *files],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_every_dashboard_fits_grafana_s_types_and_planted_faults_do_not(tmp_path: Path) -> None:
    """An option that is misspelt is ignored by Grafana without a word."""
    files = sorted((ROOT / "dashboards").glob("*.json"))
    page: dict[str, Any] = json.loads((ROOT / "dashboards/outrider-overview.json").read_text())
    page["uid"] = "planted"
    stat, state = (
        next(it for it in page["panels"] if it["type"] == kind)
        for kind in ("stat", "state-timeline")
    )
    stat["options"]["colourMode"] = "background"
    stat["options"]["graphMode"] = 7
    state["options"]["showValue"] = "sometimes"
    page["refresh"] = {"every": "10s"}
    planted = tmp_path / "planted.json"
    planted.write_text(json.dumps(page), encoding="utf-8")
    run = check(*files, planted)
    found = [line for line in run.stderr.splitlines() if line.strip()]
    assert all(line.startswith("planted") for line in found), run.stderr
    for fault in ("colourMode", "/graphMode", "/showValue", "/refresh"):
        assert any(fault in line for line in found), fault
    assert run.returncode == 1
