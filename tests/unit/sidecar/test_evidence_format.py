import json
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.api import UPWARD, EvidenceReport
from sidecar.codec import decode, encode
from sidecar.evidence_format import (
    FRAMES_MAX,
    RANK_BYTES_MAX,
    StackError,
    bounded,
    flight_lines,
    no_stacks,
    process_facts,
    redacted,
    stacks,
)
from sidecar.rank_evidence import RankEvidence, ThreadStack

PID = 4711


def a_thread(name="MainThread", number=PID, depth=2, pid=PID, **more):
    """Return a thread as py-spy writes it."""
    frames = [
        {
            "name": f"f{index}",
            "filename": f"/venv/lib/torch/f{index}.py",
            "short_filename": f"torch/f{index}.py",
            "line": index + 1,
        }
        for index in range(depth)
    ]
    thread = {"pid": pid, "thread_name": name, "os_thread_id": number, "frames": frames}
    return thread | {"active": False, "owns_gil": False} | more


def dumped(*threads):
    """Return py-spy's output."""
    return json.dumps(threads).encode()


def size(evidence: RankEvidence) -> int:
    """Return the bytes that one rank takes in a message."""
    full = EvidenceReport(round_id=1, node="n", evidence={"0": evidence})
    empty = EvidenceReport(round_id=1, node="n", evidence={})
    return len(encode(full)) - len(encode(empty))


def test_the_main_thread_stands_first_whatever_it_is_called():
    """The position of a rank is its main thread's; a pool thread in its place groups nothing."""
    dump = dumped(a_thread("aux", PID + 1, active=True, owns_gil=True), a_thread("trainer"))
    main, other = stacks(dump, PID)
    assert (main.name, main.main, main.frames) == (
        "trainer",
        True,
        ("f0 (torch/f0.py:1)", "f1 (torch/f1.py:2)"),
    )
    assert (other.main, other.active, other.holds_gil) == (False, True, True)


def test_the_same_code_installed_elsewhere_gives_the_same_frame():
    """Nodes with their own environment folders would all look odd."""
    one, two = a_thread(depth=1), a_thread(depth=1)
    two["frames"][0]["filename"] = "/opt/other/site-packages/torch/f0.py"
    assert stacks(dumped(one), PID) == stacks(dumped(two), PID)


def test_a_warm_worker_stands_where_a_cold_one_does():
    """After a spare stepped in, half of the ranks would look odd for how they were forked."""
    warm, cold = a_thread(), a_thread()
    for file in ("sidecar/workers/zygote.py", "<frozen runpy>"):
        warm["frames"].append(
            {"name": "main", "filename": file, "short_filename": file, "line": 49}
        )
    assert stacks(dumped(warm), PID) == stacks(dumped(cold), PID)
    warm["frames"] = warm["frames"][-1:]
    assert stacks(dumped(warm), PID)[0].frames == ("main (<frozen runpy>:49)",)


def test_a_deep_stack_keeps_both_of_its_ends():
    """Where a rank is says nothing without how it came there."""
    (main,) = stacks(dumped(a_thread(depth=500)), PID)
    assert len(main.frames) == FRAMES_MAX
    assert (main.frames[0], main.frames[-1]) == ("f0 (torch/f0.py:1)", "f499 (torch/f499.py:500)")
    assert "441 frames left out" in " ".join(main.frames)


@pytest.mark.parametrize(
    "dump",
    [b"", b"{}", b"[]", b"[1]", b'[{"pid": 4711}]', b"\xff", dumped(a_thread(pid=1))],
)
def test_an_answer_that_cannot_be_read_is_a_reason_not_a_crash(dump):
    """A py-spy of another version must not cost the sidecar, and its workers with it."""
    with pytest.raises(StackError):
        stacks(dump, PID)


def test_a_refused_look_says_what_to_allow():
    """'no stacks' without the way out is how it stays for years."""
    said = (
        b"Error: Failed to get process executable name.\n\nCaused by:\n"
        b"    0: Permission denied (os error 13)\n\nStack backtrace:\n   0: anyhow\n"
    )
    assert no_stacks(said) == (
        "no stacks, py-spy failed: Failed to get process executable name. Permission denied "
        "(os error 13); let the sidecar trace its workers (CAP_SYS_PTRACE)"
    )
    assert "said nothing" in no_stacks(b"")


def test_a_terminal_sequence_in_a_name_is_made_harmless():
    """A function may be called anything, and its name is shown on somebody's terminal."""
    thread = a_thread("\x1b[2J\u202e", depth=1)
    thread["frames"][0]["name"] = "a\nb\x07\ud800"
    (main,) = stacks(dumped(thread), PID)
    assert (main.name, main.frames) == ("?[2J?", ("a?b?? (torch/f0.py:1)",))


def test_secrets_are_masked_and_other_peoples_variables_are_not_taken():
    """An incident is mailed around; a token in it has to be changed everywhere."""
    shown = redacted(
        {
            "NCCL_DEBUG": "INFO",
            "RANK": "3",
            "WORLD_SIZE": "8",
            "OUTRIDER_PROGRESS_TOKEN": "123",
            "TORCH_HUB_PASSWORD": "p",
            "CUDA_API_KEY": "k",
            "TORCH_STORE_URL": "tcp://user:secret@host:1",
            "AWS_SECRET_ACCESS_KEY": "a",
            "HOME": "/root",
            "PATH": "/bin",
        }
    )
    assert shown == {
        "CUDA_API_KEY": "***",
        "NCCL_DEBUG": "INFO",
        "OUTRIDER_PROGRESS_TOKEN": "***",
        "RANK": "3",
        "TORCH_HUB_PASSWORD": "***",
        "TORCH_STORE_URL": "tcp://***@host:1",
        "WORLD_SIZE": "8",
    }


def test_the_kernels_words_become_numbers_and_what_is_not_known_stays_so():
    """An unknown limit read as 0 says that every rank is out of memory."""
    status = "Name:\tpython\nState:\tT (stopped)\nVmRSS:\t  2048 kB\nThreads:\t7\n"
    facts = process_facts(
        status, wchan="do_signal_stop", open_files=9, memory_used="4096\n", memory_limit="max\n"
    )
    assert facts is not None
    assert [getattr(facts, item.name) for item in fields(facts)] == [
        *("T", "do_signal_stop", 7),
        *(2048 << 10, 9, 4096, None),
    ]
    bare = process_facts("State:\tZ (zombie)\n", wchan="0", memory_limit="9223372036854771712")
    assert bare is not None
    assert (bare.waits_in, bare.resident_bytes, bare.memory_limit_bytes) == (None, None, None)
    assert process_facts("") is None


def test_the_newest_collectives_are_kept_oldest_first():
    """The one that hangs is the last one entered."""
    entries = [
        {
            "process_group": ["0", "default_pg"],
            "collective_seq_id": number,
            "profiling_name": "gloo:all_reduce",
            "state": "scheduled",
            "input_sizes": [[4, 4]],
        }
        for number in range(100)
    ]
    lines = flight_lines(json.dumps({"version": "2.10", "entries": entries}).encode())
    assert len(lines) == 48
    assert lines[-1] == "group 0 #99 gloo:all_reduce scheduled [[4, 4]]"
    for broken in (b"", b"[]", b'{"entries": 1}'):
        with pytest.raises(ValueError, match=r"."):
            flight_lines(broken)


TEXT = st.text(max_size=300)


@given(
    threads=st.lists(
        st.builds(
            ThreadStack,
            name=TEXT,
            main=st.booleans(),
            frames=st.lists(TEXT, max_size=80).map(tuple),
        ),
        max_size=6,
    ).map(lambda few: tuple(few) * 12),
    environment=st.dictionaries(TEXT, TEXT, max_size=20),
    flight_record=st.lists(TEXT, max_size=20).map(lambda few: tuple(few) * 5),
    missing=st.lists(TEXT, max_size=12).map(tuple),
)
def test_a_rank_never_says_more_than_its_share(threads, environment, flight_record, missing):
    """A message above the limit ends the connection in the middle of a recovery."""
    evidence = RankEvidence(
        threads=threads, environment=environment, flight_record=flight_record, missing=missing
    )
    kept = bounded(evidence, 20_000)
    assert size(kept) <= 20_000
    assert set(kept.threads) <= set(threads)
    assert len(kept.threads) == len(threads) or "left out" in kept.missing[-1]


def test_what_is_most_worth_is_kept_when_there_is_too_much():
    """Sixty idle pool threads must not push out the one that hangs."""
    frames = tuple(f"f{index} {'x' * 150}" for index in range(60))
    main = ThreadStack(name="MainThread", main=True, frames=frames)
    others = tuple(ThreadStack(name=f"t{index}", main=False, frames=frames) for index in range(60))
    evidence = RankEvidence(threads=(main, *others), environment={"RANK": "0"})
    kept = bounded(evidence)
    assert kept.threads[0] == main
    assert kept.environment == {"RANK": "0"}
    assert size(kept) <= RANK_BYTES_MAX
    assert kept.missing == (f"{61 - len(kept.threads)} of 61 threads are left out: too much",)


def test_evidence_arrives_as_it_was_sent():
    """A field that one side spells otherwise is evidence that nobody sees."""
    facts = process_facts("State:\tS (sleeping)\n", wchan="futex_wait")
    (main,) = stacks(dumped(a_thread()), PID)
    seen = RankEvidence(threads=(main,), process=facts, environment={"RANK": "0"}, missing=("a",))
    report = EvidenceReport(round_id=7, node="node-0", evidence={"0": seen})
    assert decode(encode(report), UPWARD) == report
