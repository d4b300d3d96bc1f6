"""Every query of every dashboard on one hour of history, and whether it answers right."""

import json
import re
import shutil
from collections.abc import Iterator
from typing import Any, Final

import pytest

from dashboards.build import DASHBOARDS, render
from tests.history.past import Past, filled, served
from tests.history.story import (
    BAD_GPU,
    BAD_NODE,
    BAD_RANK,
    BEGIN_S,
    CLUSTER,
    HOUR_S,
    HUNG_NODE,
    HUNG_RANK,
    JOB,
    SDC_NODE,
    SDC_RANK,
    SLOW_NODE,
    SLOW_RANK,
    Story,
)

pytestmark = [
    pytest.mark.component,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed"),
]
PAGES: Final = {name: json.loads(render(builder)) for name, builder in DASHBOARDS.items()}
QUIET: Final = {
    "Suspects": "no fault is open at the end of the hour",
    "Nodes not running": "the spare took the place of the broken one, which was left out",
    "Firing alerts": "alerts are not part of an imported history",
    "Partitioned nodes": "the network was well",
    "Named by comparison": "the slow rank had recovered",
    "Ranks behind": "every rank confirmed the same checkpoint",
    "Other kernel records": "the kernel told Xids only",
    "Refused messages": "nothing was refused",
}
"""Panels that are rightly empty at the end of this hour; each says so by its no-value text."""


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Past]:
    """The hour, told, imported and served by a real Prometheus."""
    with served(tmp_path_factory.mktemp("history")) as found:
        yield found


def panels(page: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in page["panels"]:
        if panel["type"] not in ("row", "text"):
            yield panel


def panel(title: str, page: str) -> str:
    """Return the first query of a panel."""
    found = next(it for it in panels(PAGES[f"outrider-{page}.json"]) if it["title"] == title)
    return str(found["targets"][0]["expr"])


@pytest.mark.parametrize("name", PAGES)
def test_every_panel_answers(past: Past, name: str) -> None:
    """A panel that nobody ever saw filled may be unable to."""
    node = BAD_NODE if name == "outrider-node.json" else ".+"
    empty = []
    for it in panels(PAGES[name]):
        found = 0
        for target in it["targets"]:
            if target.get("instant"):
                found += len(past.at(60, target["expr"], node=node))
            else:
                found += len(past.over(target["expr"], node=node))
        if not found:
            empty.append(it["title"])
    assert set(empty) <= set(QUIET), f"empty: {set(empty) - set(QUIET)}"


@pytest.mark.parametrize("name", PAGES)
def test_every_variable_lists_something(past: Past, name: str) -> None:
    """An empty selector makes every panel below it empty."""
    for variable in PAGES[name]["templating"]["list"]:
        if variable["type"] != "query":
            continue
        asked = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
        assert asked is not None
        values = past.get(f"label/{asked[2]}/values", **{"match[]": filled(asked[1], {})})
        expected = {
            "cluster": {CLUSTER},
            "training_job": {JOB},
            "node": {f"node-{place:02d}" for place in range(17)},
            "gpu": {str(gpu) for gpu in range(8)},
            "incident": {f"llama-{number:04d}" for number in (1, 2, 3, 4)},
        }[variable["name"]]
        assert set(values) == expected, variable["name"]


def test_annotations_mark_the_incidents_and_nothing_else(past: Past) -> None:
    """A mark beside every step is a mark nobody sees."""
    for mark in PAGES["outrider-overview.json"]["annotations"]["list"]:
        assert past.over(mark["expr"], 0, 26) == [], mark["name"]
        assert past.over(mark["expr"], 32, 45) == [], mark["name"]
        assert past.over(mark["expr"], 26, 32), mark["name"]
        assert past.over(mark["expr"], 52, 56), mark["name"]


# --- thirty seconds: state, suspects, confirmation, action ------------------------------------


def test_half_a_minute_into_the_fault_the_suspect_has_a_name(past: Past) -> None:
    """Whoever is woken looks here first; a second row, or none, costs the night."""
    (suspect,) = past.at(27.5, panel("Suspects", "overview"))
    assert {key: suspect[key] for key in ("node", "gpu", "rank", "kind", "reason", "action")} == {
        "node": BAD_NODE,
        "gpu": str(BAD_GPU),
        "rank": str(BAD_RANK),
        "kind": "gpu_fatal",
        "reason": "Xid79",
        "action": "process_level_restart",
    }
    assert suspect["value"] / 1000 == pytest.approx(BEGIN_S + 27 * 60, abs=1)
    assert [it["value"] for it in past.at(27.5, panel("Open faults", "overview"))] == [1]
    assert past.at(26.5, panel("Suspects", "overview")) == []
    assert [it["value"] for it in past.at(26.5, panel("Open faults", "overview"))] == [0]


def test_who_comes_after_the_recovery_still_learns_who_it_was(past: Past) -> None:
    """A page takes a minute to be read; a recovery that went well is over by then."""
    minute = 36
    assert past.at(minute, panel("Suspects", "overview")) == []
    for page in ("overview", "localize"):
        (row,) = past.at(minute, panel("Newest incidents", page))
        assert (row["node"], row["gpu"], row["rank"]) == (BAD_NODE, str(BAD_GPU), str(BAD_RANK))
        assert (row["kind"], row["outcome"]) == ("gpu_fatal", "recovered")
        assert row["value"] / 1000 == pytest.approx(BEGIN_S + 27 * 60, abs=1)
    assert len(past.at(60, panel("Newest incidents", "overview"))) == 4


def test_the_matrix_has_one_red_cell_and_it_is_the_right_one(past: Past) -> None:
    """A wall of colours tells nobody where to go."""
    cells = past.at(28, panel("GPU health", "overview"))
    assert len(cells) == 17 * 8
    fatal = [(it["node"], it["gpu"]) for it in cells if it["value"] == 3]
    assert fatal == [(BAD_NODE, str(BAD_GPU))]


def test_the_node_s_page_shows_what_led_up_to_it(past: Past) -> None:
    """Corrected errors that grew for three minutes were the warning."""
    corrected = past.over(panel("Memory errors", "node"), 22, 26.5, node=BAD_NODE)
    grew = [
        (it["metric"]["gpu"], it["metric"]["type"])
        for it in corrected
        if any(float(value) > 0 for _, value in it["values"])
    ]
    assert grew == [(str(BAD_GPU), "corrected")]
    (margin,) = [
        it
        for it in past.at(26, panel("Temperature margin", "node"), node=BAD_NODE)
        if it["gpu"] == str(BAD_GPU)
    ]
    assert margin["value"] == 10
    xids = past.at(28, panel("Xid errors", "node"), node=BAD_NODE)
    assert [(it["gpu"], it["xid"], it["value"]) for it in xids] == [(str(BAD_GPU), "79", 1)]
    excluded = past.at(30, panel("Excluded nodes", "overview"))
    assert [it["node"] for it in excluded] == [BAD_NODE]


def test_the_slow_rank_stands_at_the_top_of_the_slow_ones(past: Past) -> None:
    """Everybody is slow when one is; only the ratio says who."""
    first = max(past.at(41, panel("Slowest ranks", "localize")), key=lambda it: it["value"])
    assert (first["node"], first["rank"]) == (SLOW_NODE, str(SLOW_RANK))
    assert first["value"] == pytest.approx(1.42)
    rules = past.over(panel("Log rules", "localize"), 39, 42)
    assert [(it["metric"]["node"], it["metric"]["rule"]) for it in rules] == [
        (SLOW_NODE, "StepTime")
    ]
    assert past.over(panel("Log rules", "localize"), 30, 37) == []
    (named,) = past.at(41, panel("Named by comparison", "localize"))
    assert (named["node"], named["rank"]) == (SLOW_NODE, str(SLOW_RANK))
    assert named["kind"] == "straggler"
    assert past.at(36, panel("Named by comparison", "localize")) == []


def test_in_a_hang_all_are_silent_and_one_is_named(past: Past) -> None:
    """The first rank to go silent is one of a hundred and twenty-eight."""
    (silence,) = past.at(47, panel("Longest silence", "overview"))
    assert silence["value"] > 50
    (suspect,) = past.at(47.5, panel("Suspects", "localize"))
    assert (suspect["node"], suspect["rank"]) == (HUNG_NODE, str(HUNG_RANK))
    assert suspect["kind"] == "process_stall"
    assert "stopped" in suspect["reason"]


def test_a_rank_that_computes_something_else_is_named(past: Past) -> None:
    """Silent corruption is silent everywhere else: only the ranks' comparison tells of it."""
    (suspect,) = past.at(52.5, panel("Suspects", "overview"))
    assert (suspect["node"], suspect["rank"]) == (SDC_NODE, str(SDC_RANK))
    assert (suspect["kind"], suspect["reason"]) == ("sdc", "SilentDataCorruption")
    outcomes = panel("Comparisons by outcome", "localize")
    corrupt = {
        it["metric"]["outcome"]: max(float(value) for _, value in it["values"])
        for it in past.over(outcomes, 50, 56)
    }
    assert corrupt["corrupt"] > 0, "its ranks stop before the next scrape: only a count stays"
    assert {it["outcome"]: it["value"] for it in past.at(51, outcomes)}["corrupt"] == 0
    evidence = past.at(60, panel("Evidence", "incident"), incident="llama-0003")
    (one,) = evidence  # a hundred and twenty-eight ranks say the same, and none of them against
    assert (one["side"], one["surface"]) == ("for", "replay")
    assert str(SDC_RANK) in one["ranks"]


def test_the_recovery_page_adds_the_hour_up(past: Past) -> None:
    """A report to whoever pays must agree with what happened."""
    (escalation,) = past.at(60, panel("Escalations", "recovery"))
    assert (escalation["from"], escalation["to"]) == ("process_level_restart", "job_level_restart")
    faults = {it["kind"]: round(it["value"]) for it in past.at(60, panel("Faults", "recovery"))}
    assert faults == {"gpu_fatal": 1, "process_stall": 1, "sdc": 1, "worker_reported": 1}
    phases = past.at(60, panel("Mean time per recovery phase", "recovery"))
    slowest = max(phases, key=lambda it: it["value"])
    assert slowest["phase"] == "first_step"
    accounts = past.at(60, f'outrider_job_time_seconds_total{{training_job="{JOB}"}}')
    held = past.at(60, f'outrider_job_time_held_seconds{{training_job="{JOB}"}}')
    whole = sum(it["value"] for it in accounts) + held[0]["value"]
    assert whole == pytest.approx(HOUR_S, abs=1)
    causes = {it["cause"] for it in past.at(60, panel("Device time lost by cause", "recovery"))}
    assert causes - {"start"} == {"gpu_fatal", "process_stall", "sdc", "worker_reported"}
    goodput = past.at(60, panel("Goodput, 1 h", "overview"))
    assert 0.6 < goodput[0]["value"] < 0.95


def test_the_incident_s_page_tells_it_from_beginning_to_end(past: Past) -> None:
    """Who comes to it in the morning has only this."""
    (facts,) = past.at(60, panel("Incident", "incident"))
    assert (facts["node"], facts["gpu"], facts["outcome"]) == (BAD_NODE, str(BAD_GPU), "recovered")
    spans = past.at(60, panel("Seconds after the fault", "incident"))
    assert len(spans) == 9
    last = max(spans, key=lambda it: it["value"])
    assert last["milestone"] == "first_step"
    assert 60 < last["value"] < 180
    evidence = past.at(60, panel("Evidence", "incident"))
    assert any(it["side"] == "for" and it["surface"] == "gpu" for it in evidence)
    (hung,) = [
        it
        for it in past.at(60, panel("Where every rank stood", "incident"), incident="llama-0002")
        if it.get("mark") == "culprit"
    ]
    assert (hung["rank"], hung["node"]) == (str(HUNG_RANK), HUNG_NODE)
    assert len(past.at(60, panel("Grouped stacks", "incident"))) >= 1


def test_the_history_is_the_same_every_time() -> None:
    """A test that passes on a lucky hour proves nothing."""
    first, second = Story().tell(until_s=120), Story().tell(until_s=120)
    assert first.series == second.series
    assert first.samples > 10_000
