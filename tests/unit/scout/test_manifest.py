"""The manifest on disk: what survives, what is refused, and in which words."""

import dataclasses

import pytest

from scout.manifest import Manifest, ManifestError, Record, RecordStatus


def record(step, status=RecordStatus.WRITING, **changes):
    made = Record(
        checkpoint_id=f"step-{step}",
        step=step,
        environment_id="e",
        topology="t",
        status=status,
        time_ns=1,
        reason="",
    )
    return dataclasses.replace(made, **changes)


def test_a_checkpoint_waits_until_it_is_verified(tmp_path):
    """One that was only begun is loaded after a crash."""
    manifest = Manifest(tmp_path / "made when needed")
    assert manifest.verified() is None
    manifest.put(record(1))
    assert manifest.verified() is None
    assert manifest.pending().step == 1
    manifest.put(record(1, RecordStatus.RECOVERY_VERIFIED))
    assert manifest.verified().step == 1
    assert manifest.pending() is None
    manifest.put(record(2, RecordStatus.CANDIDATE))
    manifest.put(record(2, RecordStatus.REJECTED))
    assert manifest.verified().step == 1
    assert manifest.pending() is None
    assert manifest.record("step-2").status is RecordStatus.REJECTED


def test_nothing_half_written_is_ever_read(tmp_path):
    """A crash in the middle of a write loses the pointer to the last good checkpoint."""
    manifest = Manifest(tmp_path)
    manifest.put(record(1, RecordStatus.RECOVERY_VERIFIED))
    (tmp_path / ".VERIFIED.4711").write_text('{"checkpoint')
    assert manifest.verified().step == 1
    assert not list(tmp_path.glob("records/.*"))


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("VERIFIED", "{", "cannot be read"),
        ("VERIFIED", "[]", "no JSON object"),
        ("VERIFIED", "{}", "names no checkpoint"),
        ("VERIFIED", '{"checkpoint_id": "step-9"}', "has no record"),
        ("VERIFIED", '{"checkpoint_id": "../x"}', "no name for a checkpoint"),
        ("records/step-1.json", '{"schema_version": 2}', "has schema 2"),
        ("records/step-1.json", '{"schema_version": 1, "status": "x"}', "no checkpoint record"),
        (
            "records/step-1.json",
            '{"schema_version": 1, "status": "candidate"}',
            "no checkpoint rec",
        ),
    ],
)
def test_what_cannot_be_trusted_is_refused_with_the_file_s_name(tmp_path, name, text, why):
    """A broken manifest reads as an empty one, and the job begins from nothing."""
    manifest = Manifest(tmp_path)
    manifest.put(record(1, RecordStatus.RECOVERY_VERIFIED))
    (tmp_path / name).write_text(text)
    with pytest.raises(ManifestError, match=why):
        manifest.verified()


def test_a_folder_that_cannot_be_written_says_so(tmp_path):
    """The writer goes on as if the record were there."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ManifestError, match="cannot be written"):
        Manifest(tmp_path / "file").put(record(1))
