"""Kernel logs as they were seen, each with what must come of it."""

from pathlib import Path

import pytest
import yaml

from scout.clock import Instant
from sidecar.hardware.kernel_judge import KernelJudge
from sidecar.hardware.kernel_line import KernelLine, read_log
from sidecar.hardware.kernel_rules import read_note
from sidecar.hardware.xid import (
    Containment,
    NvlinkReport,
    RecoveryAdvice,
    XidEvent,
    read_sxid,
    read_xid,
)

FOLDER = Path(__file__).parents[2] / "fixtures/kernel_cases"
CASES = [
    pytest.param(case, id=f"{case['id']}-{case['claim'].replace(' ', '-')}")
    for path in sorted(FOLDER.glob("*.yaml"))
    for case in yaml.safe_load(path.read_text(encoding="utf-8"))
]


def seen(event: XidEvent) -> dict[str, object]:
    """Return everything that an expectation may name."""
    said: dict[str, object] = {
        "xid": event.code,
        "pci": event.pci,
        "pid": event.pid,
        "severity": event.severity,
        "step": event.meaning.step,
        "gpu_instance": event.gpu_instance,
        "compute_instance": event.compute_instance,
        "previous": event.previous,
        "link": event.link,
        "injected": event.injected,
    }
    match event.detail:
        case Containment() as detail:
            said["reset"] = detail.reset
        case NvlinkReport() as detail:
            said |= {"unit": detail.unit, "fatal": detail.fatal, "subcode": detail.subcode}
        case RecoveryAdvice() as detail:
            said |= {"before": detail.before, "now": detail.now, "advice": detail.step}
    return said


@pytest.mark.parametrize("case", CASES)
def test_each_line_means_what_it_says(case):
    """A line read wrongly convicts the wrong device, or none."""
    lines = [line for line in read_log(case["lines"]) if isinstance(line, KernelLine)]
    events = [event for line in lines if (event := read_xid(line.text)) is not None]
    if "events" in case:
        assert len(events) == len(case["events"])
    for event, wanted in zip(events, case.get("events", []), strict=False):
        assert {name: seen(event)[name] for name in wanted} == wanted
    switches = [one for line in lines if (one := read_sxid(line.text)) and not one.data]
    for one, wanted in zip(switches, case.get("sxids", []), strict="sxids" in case):
        found = {"sxid": one.code, "switch": one.switch, "link": one.link}
        assert found | {"severity": one.severity} == wanted
    notes = [note for line in lines if (note := read_note(line.text)) is not None]
    if "notes" in case:
        kinds = [note.kind for note in notes]
        assert kinds[: len(case["notes"])] == case["notes"]
        assert bool(kinds) == bool(case["notes"])
    if "severities" in case:
        severities = [note.severity for note in notes]
        assert severities[: len(case["severities"])] == case["severities"]
    for line, wanted in zip(lines, case.get("records", []), strict="records" in case):
        assert line.uptime_us == wanted["us"]
        assert line.seq == wanted.get("seq")
        assert line.fields == wanted["fields"]


@pytest.mark.parametrize("case", CASES)
def test_a_log_adds_up_to_one_judgement(case):
    """A device that is not convicted gets work again; one convicted for nothing is lost."""
    judge = KernelJudge(case.get("gpus", {}))
    found = judge.take_log(case["lines"], Instant(0))
    convicted = [one for one in found if one.convicts]
    assert [one.reason for one in convicted] == case["convicts"]
    if "gpu" in case:
        assert [one.gpu for one in convicted] == [case["gpu"]]
    for name, wanted in case.get("subjects", {}).items():
        subject = judge.subjects.get(name)
        assert subject is not None, name
        sums = {
            "severity": subject.severity,
            "codes": list(subject.codes),
            "action": subject.action,
            "count": subject.count,
        }
        assert {key: sums[key] for key in wanted} == wanted
    named = [one.pid for one in found if one.pid is not None]
    assert sorted(set(named)) == sorted(case.get("pids", set(named)))
    if "process" in case:
        assert found[0].process == case["process"]
    if "constraint" in case:
        limit = "its container" if case["constraint"] == "MEMCG" else "of the node"
        assert limit in found[0].message
    if "cleared" in case:
        subject = judge.subjects.get(case["cleared"])
        assert subject is not None
        assert subject.cleared
    assert judge.uuids == case.get("uuids", {})
    assert judge.counters.gaps == case.get("gaps", 0)
    assert judge.flaps == case.get("flaps", judge.flaps)
    assert list(judge.roots) == case.get("roots", list(judge.roots))


def test_every_line_a_person_reads_is_one_sentence():
    """A finding that cannot be read at three in the morning helps nobody."""
    for case in CASES:
        judge = KernelJudge({"0000:3b:00": 0})
        for found in judge.take_log(case.values[0]["lines"], Instant(0)):
            assert found.message
            assert "\n" not in found.message
            assert len(found.message) < 600
