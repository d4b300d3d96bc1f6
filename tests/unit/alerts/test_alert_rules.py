"""The alerts: each tested both ways, each with a way to act, each on a documented series."""

import re
from pathlib import Path
from typing import Any

import yaml

from tests.unit.dashboards.reference import TARGET_LABELS, labels_by_metric, selectors

ROOT = Path(__file__).resolve().parents[3]
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((ROOT / "alerts/outrider.rules.yaml").read_text("utf-8"))["groups"]
    for rule in group["rules"]
]
CASES = yaml.safe_load((ROOT / "alerts/outrider.rules.test.yaml").read_text("utf-8"))["tests"]


def anchors() -> set[str]:
    """The anchors of the runbooks, made as GitHub makes them."""
    text = (ROOT / "docs/runbooks/README.md").read_text(encoding="utf-8")
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }


def test_every_alert_has_a_firing_and_a_quiet_case() -> None:
    """An alert that was never seen firing may be unable to; one never seen quiet may always be."""
    for rule in RULES:
        cases = [
            bool(check.get("exp_alerts"))
            for case in CASES
            for check in case["alert_rule_test"]
            if check["alertname"] == rule["alert"]
        ]
        assert True in cases, rule["alert"]
        assert False in cases, rule["alert"]


def test_every_alert_leads_to_its_runbook_and_to_the_overview() -> None:
    """Whoever is woken must find the next step without searching."""
    for rule in RULES:
        notes = rule["annotations"]
        path, _, anchor = notes["runbook_url"].partition("#")
        assert path == "docs/runbooks/README.md"
        assert anchor == rule["alert"].lower()
        assert anchor in anchors()
        assert notes["dashboard_url"].startswith("/d/outrider-overview")
        assert notes["summary"].endswith(".")
        assert "{{" not in notes["summary"], "a summary groups; values belong in the description"
        assert notes["description"].endswith(".")


def test_every_alert_says_how_urgent_it_is_and_about_what() -> None:
    """Routing and inhibition go by these labels."""
    for rule in RULES:
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert set(rule["labels"]) == {"severity", "component", "scope"}
        assert rule["alert"].startswith("Outrider")


def test_alerts_ask_for_documented_series_and_labels() -> None:
    """An alert on a series that nobody exports never fires."""
    known = labels_by_metric()
    for rule in RULES:
        found = list(selectors(rule["expr"]))
        assert found
        for metric, labels in found:
            assert metric in known, rule["alert"]
            assert labels <= known[metric] | TARGET_LABELS, rule["alert"]


def test_inhibition_names_alerts_that_exist() -> None:
    """A misspelt source never mutes anything."""
    config = yaml.safe_load((ROOT / "alerts/alertmanager.yaml").read_text("utf-8"))
    named = {
        name
        for rule in config["inhibit_rules"]
        for matcher in rule["source_matchers"] + rule["target_matchers"]
        for name in re.findall(r"Outrider\w+", matcher)
    }
    assert named
    assert named <= {rule["alert"] for rule in RULES}
