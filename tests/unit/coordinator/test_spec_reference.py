"""docs/job-spec.md names every field that is acted on, with its true default."""

import re
from pathlib import Path

from coordinator.spec import NodePolicy, ProgressPolicy, RunPolicy, parse_job_spec

PAGE = (Path(__file__).parents[3] / "docs" / "job-spec.md").read_text(encoding="utf-8")


def test_the_example_of_the_page_is_a_valid_spec():
    """People begin by copying it."""
    example = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert example is not None
    assert parse_job_spec(example[1], "page").remarks() == ()


def test_the_page_tells_each_default_as_it_is():
    """A default that is written wrong is believed until the night it matters."""
    for section, spec in (
        ("progressPolicy", ProgressPolicy()),
        ("nodePolicy", NodePolicy()),
    ):
        for name, field in zip(
            type(spec).__struct_encode_fields__, type(spec).__struct_fields__, strict=True
        ):
            row = re.search(rf"\| `{section}\.{name}` \| ([\d.]+) \|", PAGE)
            assert row is not None, f"{section}.{name} is not on the page"
            assert float(row[1]) == getattr(spec, field)
    run = RunPolicy()
    assert f"| `runPolicy.jobMaxRetryCount` | {run.job_max_retry_count} |" in PAGE
    assert f"| `runPolicy.barrierDeadlineSeconds` | {run.barrier_deadline_seconds:g} |" in PAGE
    assert f"| `runPolicy.startupDeadlineSeconds` | {run.startup_deadline_seconds:g} |" in PAGE
    window = run.restart_policy.eval_period_seconds
    assert f"| `runPolicy.restartPolicy.evalPeriodSeconds` | {window:g} |" in PAGE
