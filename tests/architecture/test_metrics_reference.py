"""docs/metrics.md is what the collectors say, and they say what a person can use."""

from pathlib import Path

from tools import metrics_reference
from tools.metrics_reference import coordinator_families, sidecar_families

ROOT = Path(__file__).resolve().parents[2]


def test_the_reference_is_what_the_collectors_say() -> None:
    """Whoever builds an alert reads the reference, not the code."""
    text = (ROOT / "docs/metrics.md").read_text("utf-8")
    assert text == metrics_reference.page(text)
    assert metrics_reference.main(["--check"]) == 0


def test_every_family_is_named_once_and_explained_in_a_sentence() -> None:
    """Two families of one name make Prometheus drop the whole scrape."""
    for families in (coordinator_families(), sidecar_families()):
        names = [family.name for family in families]
        assert len(names) == len(set(names))
        for family in families:
            assert family.name.startswith("outrider_")
            assert family.documentation.endswith("."), family.name
            assert "\n" not in family.documentation


def test_the_known_operator_s_names_have_their_counterparts() -> None:
    """Dashboards of people who come from there would have to be guessed anew."""
    text = (ROOT / "docs/metrics.md").read_text("utf-8")
    for name in ("created", "deleted", "successful", "failed", "restarted"):
        assert f"`{name}_total`" in text
    for name in ("restart_latency", "fault_detection_latency"):
        assert f"`{name}`" in text
