"""The alerts: each tested both ways, each with a way to act, each on a documented series."""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import promql_parser
import pytest
import yaml

from alerts import build
from alerts.thresholds import Thresholds
from tests.unit.dashboards.reference import TARGET_LABELS, labels_by_metric, selectors

ROOT = Path(__file__).resolve().parents[3]
ALL_RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((ROOT / "alerts/outrider.rules.yaml").read_text("utf-8"))["groups"]
    for rule in group["rules"]
]
RULES = [rule for rule in ALL_RULES if "alert" in rule]
CASES = yaml.safe_load((ROOT / "alerts/outrider.rules.test.yaml").read_text("utf-8"))["tests"]
RUNBOOKS = (ROOT / "docs/runbooks/README.md").read_text("utf-8")
PARTS = ("Means", "Confirm", "Outrider", "Do", "Silence")


def anchors() -> set[str]:
    """The anchors of the runbooks, made as GitHub makes them."""
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.+)$", RUNBOOKS, re.MULTILINE)
    }


def test_the_committed_rules_are_what_the_code_says() -> None:
    """An edit by hand is lost at the next build, and nobody learns why."""
    assert (ROOT / "alerts/outrider.rules.yaml").read_text("utf-8") == build.text(Thresholds())
    assert build.main(["--check"]) == 0


def test_every_threshold_reaches_a_rule() -> None:
    """A number that is changed and changes nothing gives false comfort."""
    plain = build.text(Thresholds())
    for name, value in vars_of(Thresholds()).items():
        other = "7m" if isinstance(value, str) else value + 7
        assert build.text(replace(Thresholds(), **{name: other})) != plain, name


def vars_of(limits: Thresholds) -> dict[str, Any]:
    """Field -> value of a slotted dataclass."""
    return {name: getattr(limits, name) for name in limits.__dataclass_fields__}


def test_prometheus_accepts_the_rules_and_they_fire_as_promised() -> None:
    """A rule that does not parse takes all the others with it."""
    for command in (["check", "rules", "outrider.rules.yaml"],
                    ["test", "rules", "outrider.rules.test.yaml"]):  # fmt: skip
        run = subprocess.run(
            ["promtool", *command],
            cwd=ROOT / "alerts",
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert run.returncode == 0, run.stdout + run.stderr


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


def test_every_alert_leads_to_a_whole_runbook() -> None:
    """Whoever is woken must find the next step without searching."""
    for rule in RULES:
        notes = rule["annotations"]
        path, _, anchor = notes["runbook_url"].partition("#")
        assert path == "docs/runbooks/README.md"
        assert anchor == rule["alert"].lower()
        assert anchor in anchors()
        section = RUNBOOKS.split(f"## {rule['alert']}\n")[1].split("\n## ")[0]
        assert re.findall(r"^\*\*(\w+)\*\*: ", section, re.MULTILINE) == list(PARTS), rule["alert"]
        assert f"alertname={rule['alert']}" in section
        assert notes["summary"].endswith(".")
        assert "{{" not in notes["summary"], "a summary groups; values belong in the description"
        assert notes["description"].endswith(".")


def test_no_runbook_is_left_of_an_alert_that_is_gone() -> None:
    """A page that describes what nothing tells sends people after ghosts."""
    titles = set(re.findall(r"^## (\w+)$", RUNBOOKS, re.MULTILINE))
    assert titles == {rule["alert"] for rule in RULES}


def test_every_alert_opens_a_dashboard_with_its_variables_filled_in() -> None:
    """A link that opens the whole fleet costs the thirty seconds it was to save."""
    pages = [json.loads(path.read_text("utf-8")) for path in (ROOT / "dashboards").glob("*.json")]
    variables = {
        page["uid"]: {item["name"] for item in page["templating"]["list"]} for page in pages
    }
    for rule in RULES:
        url = urlsplit(rule["annotations"]["dashboard_url"])
        uid = url.path.removeprefix("/d/")
        assert uid in variables, rule["alert"]
        asked = parse_qs(url.query)
        assert {name.removeprefix("var-") for name in asked} <= variables[uid], rule["alert"]
        for name, (value,) in asked.items():
            label = name.removeprefix("var-")
            assert value == f"{{{{ $labels.{label} | urlquery }}}}"


def test_a_link_s_labels_are_labels_that_the_alert_has() -> None:
    """An empty variable opens a page about nothing."""
    for case in CASES:
        for check in case["alert_rule_test"]:
            for alert in check.get("exp_alerts", ()):
                url = urlsplit(alert["exp_annotations"]["dashboard_url"])
                for name, (value,) in parse_qs(url.query, keep_blank_values=True).items():
                    assert alert["exp_labels"][name.removeprefix("var-")] == value


def test_every_alert_says_how_urgent_it_is_and_about_what() -> None:
    """Routing and inhibition go by these labels."""
    for rule in RULES:
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert set(rule["labels"]) == {"severity", "component", "scope"}
        assert rule["labels"]["scope"] in {"rank", "gpu", "node", "job", "cluster"}
        assert rule["alert"].startswith("Outrider")


def test_alerts_ask_for_documented_series_and_labels() -> None:
    """An alert on a series that nobody exports never fires."""
    known = labels_by_metric()
    for rule in ALL_RULES:
        promql_parser.parse(rule["expr"])
        for metric, labels in selectors(rule["expr"]):
            assert metric in known, rule
            assert labels <= known[metric] | TARGET_LABELS, rule


def test_counters_are_read_over_windows_of_four_scrapes_or_more() -> None:
    """Prometheus 2 and 3 count a window's edges differently: a short one is empty in one."""
    for rule in RULES:
        for window in re.findall(r"\[(\w+)\]", rule["expr"]):
            number, unit = re.fullmatch(r"(\d+)([smh])", window).groups()
            assert int(number) * {"s": 1, "m": 60, "h": 3600}[unit] >= 60, rule["alert"]


@pytest.mark.parametrize("name", ["source_matchers", "target_matchers"])
def test_inhibition_names_alerts_that_exist(name: str) -> None:
    """A misspelt source never mutes anything."""
    config = yaml.safe_load((ROOT / "alerts/alertmanager.yaml").read_text("utf-8"))
    named = {
        found
        for rule in config["inhibit_rules"]
        for matcher in rule[name]
        for found in re.findall(r"Outrider\w+", matcher)
    }
    assert named
    assert named <= {rule["alert"] for rule in RULES}
