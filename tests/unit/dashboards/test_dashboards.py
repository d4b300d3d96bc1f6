"""Every dashboard: reproducible, complete, linked, and asking only for what is shown.

The rules are those of Grafana's dashboard linter.  Left out, each with its reason:

- ``template-job-rule``, ``template-instance-rule``, ``target-job-rule``, ``target-instance-rule``:
  people look for a node, and a node's name is a label of its own.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest

from coordinator.metrics_job import LEVELS, RECOVERY_PHASES
from coordinator.metrics_scout import OUTCOMES
from coordinator.phases import JobPhase
from dashboards import shared
from dashboards.build import DASHBOARDS, FOLDER, main, render
from scout.snapshot import Phase
from sidecar.api import AgentState
from sidecar.hardware_metrics import SEVERITIES
from sidecar.logs.verdicts import SEVERITY
from tests.unit.dashboards.reference import TARGET_LABELS, labels_by_metric, selectors

DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
GRAFANA_MACROS = {"$__rate_interval": "1m", "$__range": "1h", "$__interval": "15s"}
PAGES: dict[str, dict[str, Any]] = {
    name: json.loads(render(builder)) for name, builder in DASHBOARDS.items()
}
OF_PROMETHEUS = {
    "ALERTS": frozenset({"alertname", "alertstate"}),
    "up": frozenset(),
    "process_resident_memory_bytes": frozenset(),
    "scrape_duration_seconds": frozenset(),
    "scrape_samples_scraped": frozenset(),
}
each_page = pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)


def panels(page: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in page["panels"]:
        yield panel
        yield from panel.get("panels") or []


def graphs(page: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every panel that asks for something."""
    return (panel for panel in panels(page) if panel["type"] not in ("row", "text"))


def raw(page: dict[str, Any]) -> Iterator[str]:
    """Every PromQL of panels and annotations as it is written."""
    for panel in graphs(page):
        yield from (target["expr"] for target in panel["targets"])
    yield from (item["expr"] for item in page["annotations"]["list"])


def expressions(page: dict[str, Any]) -> Iterator[str]:
    """Every PromQL, Grafana's macros replaced."""
    for expression in raw(page):
        for macro, value in GRAFANA_MACROS.items():
            expression = expression.replace(macro, value)  # noqa: PLW2901 - replaced in turn
        yield expression


@pytest.mark.parametrize("name", sorted(DASHBOARDS))
def test_the_committed_json_is_what_the_builder_prints(name: str) -> None:
    """An edit by hand is lost at the next build, and nobody learns why."""
    assert (FOLDER / name).read_text(encoding="utf-8") == render(DASHBOARDS[name])
    assert render(DASHBOARDS[name]) == render(DASHBOARDS[name])


def test_the_check_compares_all_of_them() -> None:
    """A check that forgets a file passes while it rots."""
    assert main(["--check"]) == 0
    assert {path.name for path in Path(FOLDER).glob("*.json")} == set(DASHBOARDS)
    assert len(DASHBOARDS) == 7


@each_page
def test_the_page_can_be_linked_to_for_years(page: dict[str, Any]) -> None:
    """Alerts link here by uid."""
    assert f"{page['uid']}.json" in DASHBOARDS
    assert len(page["uid"]) <= 40
    assert page["title"].startswith("Outrider / ")
    assert page["description"].endswith("?"), "a dashboard answers one question"
    assert page["editable"] is False
    assert page["tags"] == ["outrider"]
    assert page["schemaVersion"] >= 36, "Grafana 11 and 12 read it without a migration by hand"


@each_page
def test_every_page_leads_to_all_others_and_keeps_what_was_chosen(page: dict[str, Any]) -> None:
    """At the third page somebody looks at another job without noticing."""
    (link,) = [item for item in page["links"] if item["type"] == "dashboards"]
    assert link["tags"] == ["outrider"]
    assert link["includeVars"] is True
    assert link["keepTime"] is True
    uids = {other["uid"] for other in PAGES.values()}
    for found in re.findall(r"/d/([\w-]+)\?([^\"]*)", json.dumps(page)):
        assert found[0] in uids
        names = {item["name"] for item in by_uid(found[0])["templating"]["list"]}
        for variable in re.findall(r"var-(\w+)=", found[1]):
            assert variable in names
        assert "${__url_time_range}" in found[1]


@each_page
def test_what_is_handed_on_in_a_link_is_encoded(page: dict[str, Any]) -> None:
    """A node called ``a&var-job=b`` would open another job's page, and a ``#`` cuts an address."""
    links = [it["url"] for it in page["links"] if it["type"] == "link"]
    links += re.findall(r"/d/[\w-]+\?[^\"]*", json.dumps(page))
    for link in links:
        for value in re.findall(r"\$\{([^}]+)\}", link):
            encoded = value.endswith((":percentencode", ":queryparam"))
            assert encoded or value in ("coordinator", "__url_time_range"), link


def by_uid(uid: str) -> dict[str, Any]:
    return next(page for page in PAGES.values() if page["uid"] == uid)


@each_page
def test_every_panel_has_number_title_description_unit_and_source(page: dict[str, Any]) -> None:
    """A number without a unit or a meaning is misread at three in the morning."""
    numbers = [panel["id"] for panel in panels(page)]
    assert len(numbers) == len(set(numbers))
    assert all(numbers)
    for panel in panels(page):
        assert panel["title"]
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
    for panel in graphs(page):
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"] == DATA_SOURCE, panel["title"]
        assert panel["targets"], panel["title"]
        assert all(target["datasource"] == DATA_SOURCE for target in panel["targets"])
        references = [target["refId"] for target in panel["targets"]]
        assert len(references) == len(set(references)), panel["title"]


@each_page
def test_a_panel_that_is_rightly_empty_says_so(page: dict[str, Any]) -> None:
    """The words "No data" read like a fault of the monitoring, and are ignored as such."""
    for panel in graphs(page):
        assert panel["fieldConfig"]["defaults"]["noValue"], panel["title"]


@each_page
def test_numbers_and_tables_ask_for_one_moment_only(page: dict[str, Any]) -> None:
    """A range query under a single number costs a thousand times as much."""
    for panel in graphs(page):
        instant = panel["type"] in ("stat", "table", "bargauge", "gauge")
        for target in panel["targets"]:
            assert bool(target.get("instant")) is instant, panel["title"]
            assert bool(target.get("range")) is not instant, panel["title"]


@each_page
def test_panels_fill_the_grid_without_overlap(page: dict[str, Any]) -> None:
    """Grafana moves overlapping panels around, differently in each version."""
    cells = [
        (column, line)
        for panel in page["panels"]
        for column in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for line in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(column for column, _ in cells) == 23


@each_page
def test_variables_are_chained_and_follow_the_time_range(page: dict[str, Any]) -> None:
    """A list of nodes of another job, or of last week, leads to empty panels."""
    variables = page["templating"]["list"]
    assert [item["name"] for item in variables][:3] == ["datasource", "cluster", "training_job"]
    assert [item["type"] for item in variables].count("datasource") == 1
    assert variables[0]["query"] == "prometheus"
    known = labels_by_metric()
    seen: set[str] = set()
    for item in variables:
        if item["type"] == "query":
            assert item["refresh"] == 2
            assert item["datasource"] == DATA_SOURCE
            asked = re.fullmatch(r"label_values\((\w+)(\{.*\})?, (\w+)\)", item["query"])
            assert asked is not None
            assert asked[3] in known[asked[1]] | TARGET_LABELS
            used = set(re.findall(r"\$(\w+)", asked[2] or ""))
            assert used <= seen
            assert item["name"] == "cluster" or used, item["name"]
        seen.add(item["name"])
    assert variables[1]["allValue"] == ".*", "jobs without a cluster label are matched as well"


@each_page
def test_every_expression_parses_and_asks_for_documented_series(page: dict[str, Any]) -> None:
    """A query for a series that nobody exports draws an empty panel, which reads as healthy."""
    known = labels_by_metric() | OF_PROMETHEUS
    names = {item["name"] for item in page["templating"]["list"]}
    for expression in raw(page):
        used = set(re.findall(r"\$(\w+)", expression))
        assert {name for name in used if not name.startswith("__")} <= names, expression
    for expression in expressions(page):
        promql_parser.parse(expression)
        for metric, labels in selectors(expression):
            assert metric in known, expression
            assert labels <= known[metric] | TARGET_LABELS, f"{metric}: {labels} in {expression}"


@each_page
def test_counters_are_only_read_as_increases(page: dict[str, Any]) -> None:
    """A counter's own value says when the process started, not what happened."""
    for expression in expressions(page):
        for match in re.finditer(r"outrider_\w+_(?:total|sum|count|bucket)\b", expression):
            before = expression[: match.start()]
            assert before.endswith("increase(") or "outrider_gpu_xid_errors" in match[0], expression


@each_page
def test_windows_are_grafana_s_own_unless_the_title_names_them(page: dict[str, Any]) -> None:
    """A fixed window lies as soon as somebody zooms out."""
    for panel in graphs(page):
        for target in panel["targets"]:
            for window in re.findall(r"\[([^\]]+)\]", target["expr"]):
                told = {"1h": "1 h", "24h": "24 h", "30d": "30 d"}.get(window, "")
                fixed_on_purpose = window == "5m" and panel["title"] == "Loop lag"
                assert (
                    window in ("$__rate_interval", "$__range")
                    or fixed_on_purpose
                    or (told and told in panel["title"])
                ), panel["title"]


def test_every_selector_is_bound_to_the_chosen_cluster() -> None:
    """Two clusters with a job of one name are added up without a word."""
    free = ("ALERTS",)
    for page in PAGES.values():
        for expression in expressions(page):
            for match in re.finditer(r"\b(outrider_\w+|up|ALERTS)\b(\{[^}]*\})?", expression):
                before = expression[: match.start()]
                if match[1] in free or before.endswith(("by (", "on (")):
                    continue
                assert "cluster=~" in (match[2] or ""), expression


def test_the_states_on_the_pages_are_the_states_of_the_product() -> None:
    """A state the page does not know shows as a bare number."""
    assert tuple(shared.JOB_PHASES) == tuple(JobPhase)
    assert tuple(shared.AGENT_STATES) == tuple(AgentState)
    assert tuple(shared.LEVELS) == LEVELS
    assert tuple(shared.RECOVERY_PHASES) == RECOVERY_PHASES
    assert tuple(shared.COMPARISONS) == OUTCOMES
    assert list(shared.SEVERITIES) == [str(it) for it in sorted(SEVERITIES, key=SEVERITIES.get)]
    assert list(shared.LOG_STATES) == [str(it) for it in sorted(SEVERITY, key=SEVERITY.get)]
    assert list(shared.RANK_PHASES) == [phase.name.lower() for phase in sorted(Phase)]
