"""The overview dashboard: reproducible, complete, and asking only for what is shown."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest

from coordinator.phases import JobPhase
from dashboards.build import DASHBOARDS, FOLDER, main, render
from dashboards.overview import AGENT_STATES, JOB_PHASES, overview
from sidecar.api import AgentState
from tests.unit.dashboards.reference import TARGET_LABELS, labels_by_metric, selectors

DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
GRAFANA_MACROS = {"$__rate_interval": "1m", "$__range": "1h", "$__interval": "15s"}
PAGE: dict[str, Any] = json.loads(render(overview))


def panels(page: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in page["panels"]:
        yield panel
        yield from panel.get("panels") or []


def expressions(page: dict[str, Any]) -> Iterator[str]:
    """Every PromQL of panels and annotations, Grafana's macros replaced."""
    found = [target["expr"] for panel in panels(page) for target in panel.get("targets") or []]
    found += [item["expr"] for item in page["annotations"]["list"]]
    for expression in found:
        for macro, value in GRAFANA_MACROS.items():
            expression = expression.replace(macro, value)  # noqa: PLW2901 - replaced in turn
        yield expression


@pytest.mark.parametrize("name", sorted(DASHBOARDS))
def test_the_committed_json_is_what_the_builder_prints(name: str) -> None:
    """An edit by hand is lost at the next build, and nobody learns why."""
    assert (FOLDER / name).read_text(encoding="utf-8") == render(DASHBOARDS[name])
    assert render(DASHBOARDS[name]) == render(DASHBOARDS[name])
    assert main(["--check"]) == 0


def test_no_dashboard_lies_beside_the_builders_that_none_of_them_makes() -> None:
    """An orphan keeps being provisioned and rots."""
    assert {path.name for path in Path(FOLDER).glob("*.json")} == set(DASHBOARDS)


def test_the_page_can_be_linked_to_for_years() -> None:
    """Alerts link here by uid."""
    assert PAGE["uid"] == "outrider-overview"
    assert PAGE["title"] == "Outrider / Overview"
    assert PAGE["editable"] is False


def test_every_panel_has_number_title_description_unit_and_source() -> None:
    """A number without a unit or a meaning is misread at three in the morning."""
    numbers = [panel["id"] for panel in panels(PAGE)]
    assert len(numbers) == len(set(numbers))
    assert all(numbers)
    for panel in panels(PAGE):
        assert panel["title"]
        if panel["type"] == "row":
            continue
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"] == DATA_SOURCE, panel["title"]
        assert panel["targets"], panel["title"]
        assert all(target["datasource"] == DATA_SOURCE for target in panel["targets"])


def test_panels_fill_the_grid_without_overlap() -> None:
    """Grafana moves overlapping panels around, differently in each version."""
    cells = [
        (column, line)
        for panel in PAGE["panels"]
        for column in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for line in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(column for column, _ in cells) == 23


def test_the_data_source_is_the_first_variable_and_the_only_one_of_its_kind() -> None:
    """Every later variable is a query against it."""
    kinds = [(item["name"], item["type"]) for item in PAGE["templating"]["list"]]
    assert kinds == [("datasource", "datasource"), ("training_job", "query"), ("node", "query")]


def test_every_expression_parses_and_asks_for_documented_series_and_labels() -> None:
    """A query for a series that nobody exports draws an empty panel, which reads as healthy."""
    known = labels_by_metric()
    asked = 0
    for expression in expressions(PAGE):
        promql_parser.parse(expression)
        for metric, labels in selectors(expression):
            asked += 1
            assert metric in known, expression
            assert labels <= known[metric] | TARGET_LABELS, f"{metric}: {labels} in {expression}"
    assert asked > 30


def test_variables_list_the_labels_of_documented_series() -> None:
    """An empty selector makes every panel below it empty."""
    known = labels_by_metric()
    for variable in PAGE["templating"]["list"][1:]:
        asked = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", variable["query"])
        assert asked is not None
        assert asked[2] in known[asked[1]]


def test_counters_are_only_read_as_increases() -> None:
    """A counter's own value says when the process started, not what happened."""
    for expression in expressions(PAGE):
        for match in re.finditer(r"outrider_\w+_(?:total|sum|count|bucket)\b", expression):
            assert expression[: match.start()].endswith("increase("), expression


def test_the_states_on_the_page_are_the_states_of_the_product() -> None:
    """A state the page does not know shows as a bare number."""
    assert tuple(JOB_PHASES) == tuple(JobPhase)
    assert tuple(AGENT_STATES) == tuple(AgentState)
