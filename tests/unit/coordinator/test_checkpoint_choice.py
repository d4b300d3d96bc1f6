from hypothesis import given
from hypothesis import strategies as st

from coordinator.checkpoint_choice import PREFIXES_MAX, STEPS_KEPT_MAX, CheckpointLedger
from sidecar.api import CheckpointPointer

WORLD = 4


def a_ledger(*confirmed) -> CheckpointLedger:
    """Return a ledger with (step, ranks) pairs confirmed under their usual paths."""
    ledger = CheckpointLedger()
    for step, ranks in confirmed:
        assert ledger.confirm("model", step, ranks, [f"/ckpt/{step}"]) is None
    return ledger


def chosen(ledger, **more):
    """Return the choice of the only prefix."""
    (choice,) = ledger.choose(WORLD, **more)
    return choice


def test_the_newest_step_of_every_rank_is_chosen_and_newer_ones_are_explained():
    """Resuming from a step that one rank lacks kills the job at load time."""
    ledger = a_ledger((40, range(WORLD)), (60, [0, 1, 3]), (80, [0]))
    choice = chosen(ledger)
    assert (choice.step, choice.path) == (40, "/ckpt/40")
    assert "step 60 skipped: rank 2 has not confirmed it" in choice.reason
    assert "step 80 skipped: ranks 1, 2, 3 have not confirmed it" in choice.reason


def test_nothing_complete_means_the_beginning_and_says_so():
    """Half a checkpoint must not be preferred to none."""
    choice = chosen(a_ledger((20, [0, 1])))
    assert (choice.step, choice.path) == (None, None)
    assert choice.reason.startswith("no step is confirmed by every rank")
    assert CheckpointLedger().choose(WORLD) == ()


def test_paths_that_differ_between_ranks_make_a_step_unusable():
    """Nobody can say which of two paths holds the checkpoint that all ranks wrote."""
    ledger = a_ledger((40, range(WORLD)))
    ledger.confirm("model", 60, [0, 1], ["/a/60"])
    ledger.confirm("model", 60, [2, 3], ["/b/60"])
    choice = chosen(ledger)
    assert choice.step == 40
    assert "step 60 skipped: its ranks saved it to different paths (/a/60, /b/60)" in choice.reason


def test_c91_a_save_that_one_rank_never_finished_is_passed_over_for_an_older_whole_one():
    """A marker says "latest is 200" while one shard of it is empty; going back finds 100."""
    ledger = a_ledger((100, range(WORLD)), (200, [0, 1, 2]))
    ledger.complete(WORLD)
    choice = chosen(ledger)
    assert (choice.step, choice.path) == (100, "/ckpt/100")
    assert "step 200 skipped: rank 3 has not confirmed it" in choice.reason
    # Even when every newer one is torn, and after a restart of the coordinator.
    for step in (300, 400):
        ledger.confirm("model", step, [0], [f"/ckpt/{step}"])
    again = CheckpointLedger.restored(ledger.pointers())
    again.confirm("model", 400, [0], ["/ckpt/400"])
    assert (chosen(ledger).step, chosen(again).step) == (100, 100)


def test_c92_a_checkpoint_that_a_later_save_was_written_over_is_none():
    """The save that was killed half way took the only copy with it, under its trusted name."""
    ledger = CheckpointLedger()
    ledger.confirm("model", 10, range(WORLD), ["/ckpt/last"])
    ledger.complete(WORLD)
    assert chosen(ledger).step == 10
    ledger.confirm("model", 20, [0], ["/ckpt/last"])
    choice = chosen(ledger)
    assert (choice.step, choice.path) == (None, None)
    assert "step 10 skipped: step 20 was written over it at /ckpt/last" in choice.reason
    ledger.confirm("model", 20, range(WORLD), ["/ckpt/last"])
    assert chosen(ledger).step == 20
    ledger.complete(WORLD)
    # What is too new for a damaged run is not found under its older name.
    assert chosen(ledger, not_after=20).step is None
    # Nothing can be written over the empty beginning, nor over a name of its own.
    apart = CheckpointLedger()
    apart.confirm("model", 0, range(WORLD), [""])
    apart.confirm("model", 10, range(WORLD), ["/ckpt/10"])
    apart.confirm("model", 20, [0], ["/ckpt/20"])
    assert (chosen(apart).step, chosen(apart, not_after=10).step) == (10, 0)


def test_c95_stages_that_are_at_different_steps_resume_from_the_one_that_all_have():
    """The newest files on the disk are of two different models."""
    ledger = CheckpointLedger()
    for step, ranks in ((200, range(8)), (300, range(4)), (300, range(4, 7))):
        ledger.confirm("model", step, ranks, [f"/ckpt/{step}"])
    (choice,) = ledger.choose(8)
    assert choice.step == 200
    assert "step 300 skipped: rank 7 has not confirmed it" in choice.reason


def test_c97_the_newest_whole_checkpoint_is_never_forgotten_for_newer_torn_ones():
    """A rotation that keeps the newest two would keep two that nobody can load."""
    ledger = a_ledger((100, range(WORLD)))
    ledger.complete(WORLD)
    for step in range(101, 101 + 3 * STEPS_KEPT_MAX):
        ledger.confirm("model", step, range(WORLD - 1), [f"/ckpt/{step}"])
        assert ledger.complete(WORLD) == ()
        assert chosen(ledger).step == 100
    assert [pointer.step for pointer in ledger.pointers()] == [100]


def test_completion_is_announced_once():
    """The journal would be written at every heartbeat otherwise."""
    ledger = a_ledger((20, [0, 1, 2]))
    assert ledger.complete(WORLD) == ()
    ledger.confirm("model", 20, [3], ["/ckpt/20"])
    pointer = CheckpointPointer(prefix="model", step=20, path="/ckpt/20")
    assert ledger.complete(WORLD) == (pointer,)
    ledger.confirm("model", 20, [3], ["/ckpt/20"])
    assert ledger.complete(WORLD) == ()
    assert ledger.pointers() == (pointer,)


def test_choosing_does_not_swallow_the_announcement():
    """The newest checkpoint would be chosen once and be missing from the journal afterwards."""
    ledger = a_ledger((20, range(WORLD)))
    assert chosen(ledger).step == 20
    assert [pointer.step for pointer in ledger.complete(WORLD)] == [20]


def test_a_complete_checkpoint_survives_a_restart_of_the_coordinator():
    """The node that confirmed it may be gone; the checkpoint is still there."""
    ledger = a_ledger((20, range(WORLD)))
    ledger.complete(WORLD)
    again = CheckpointLedger.restored(ledger.pointers())
    again.confirm("model", 40, [0, 1, 3], ["/ckpt/40"])
    assert chosen(again).step == 20


def test_steps_at_and_after_the_damage_are_passed_over():
    """A checkpoint written after the loss became NaN resumes into NaN."""
    ledger = a_ledger((20, range(WORLD)), (30, range(WORLD)), (31, range(WORLD)))
    choice = chosen(ledger, not_after=30)
    assert choice.step == 20
    assert "step 31 skipped: the run was already broken at step 30" in choice.reason
    assert "step 30 skipped" in choice.reason


def test_a_given_up_run_leaves_nothing_behind_that_could_be_completed_later():
    """Rank 0's step 60 of the old run plus rank 1's of the new one are no checkpoint."""
    ledger = a_ledger((40, range(WORLD)), (60, [0, 1]))
    ledger.complete(WORLD)
    ledger.begin(2, ledger.choose(WORLD))
    assert ledger.confirm("model", 60, [0, 1], ["/ckpt/60"], generation=1) is not None
    ledger.confirm("model", 60, [2, 3], ["/ckpt/60"], generation=2)
    assert ledger.complete(WORLD) == ()
    assert chosen(ledger).step == 40
    ledger.confirm("model", 60, [0, 1], ["/ckpt/60"], generation=2)
    assert chosen(ledger).step == 60


def test_a_damaged_checkpoint_is_not_found_again_after_the_restart():
    """The next fault would otherwise resume from the poison that was just avoided."""
    ledger = a_ledger((20, range(WORLD)), (30, range(WORLD)))
    ledger.begin(2, ledger.choose(WORLD, not_after=30))
    assert chosen(ledger).step == 20


def test_a_rank_that_never_confirms_cannot_push_out_the_last_complete_checkpoint():
    """Bounded memory must not forget the only thing the job can resume from."""
    ledger = a_ledger((1, range(WORLD)))
    ledger.complete(WORLD)
    for step in range(2, 3 * STEPS_KEPT_MAX):
        ledger.confirm("model", step, [0, 1, 2], [f"/ckpt/{step}"])
    choice = chosen(ledger)
    assert choice.step == 1
    assert "more skipped" in choice.reason
    assert "older than" in (ledger.confirm("model", 3, [3], ["/ckpt/3"]) or "")


def test_a_worker_that_invents_prefixes_is_stopped_at_the_limit():
    """One broken script must not fill the coordinator's memory."""
    ledger = CheckpointLedger()
    answers = [ledger.confirm(f"p{n}", 1, [0], ["/x"]) for n in range(PREFIXES_MAX + 2)]
    assert sum(answer is None for answer in answers) == PREFIXES_MAX
    assert "beyond the limit" in (answers[-1] or "")
    assert ledger.confirm("p0", -1, [0], ["/x"]) is not None


def test_a_step_without_a_path_is_not_complete():
    """A checkpoint that nobody can load is none."""
    ledger = CheckpointLedger()
    ledger.confirm("model", 5, range(WORLD), [])
    assert ledger.complete(WORLD) == ()
    assert "no rank told its path" in chosen(ledger).reason


confirmations = st.lists(
    st.tuples(
        st.sampled_from(["model", "optim"]),
        st.integers(0, 5),
        st.sets(st.integers(0, WORLD - 1), max_size=WORLD),
    )
)


@given(confirmations, st.randoms(use_true_random=False))
def test_order_and_doubles_do_not_change_the_choice(messages, rng):
    """Reports are lost, doubled and late; the choice must depend on what is true only."""
    first, second = CheckpointLedger(), CheckpointLedger()
    mixed = messages * 2
    rng.shuffle(mixed)
    for ledger, sequence in ((first, messages), (second, mixed)):
        for prefix, step, ranks in sequence:
            ledger.confirm(prefix, step, ranks, [f"/{prefix}/{step}"])
            if rng.random() < 0.5:
                ledger.complete(WORLD)
    assert first.choose(WORLD) == second.choose(WORLD)
    first.complete(WORLD)
    second.complete(WORLD)
    assert first.pointers() == second.pointers()


@given(confirmations, st.one_of(st.none(), st.integers(0, 6)))
def test_the_chosen_step_was_confirmed_by_every_rank_and_is_the_newest(messages, not_after):
    """This is the sentence that recovery rests on."""
    ledger = CheckpointLedger()
    told: dict[tuple[str, int], set[int]] = {}
    for prefix, step, ranks in messages:
        ledger.confirm(prefix, step, ranks, [f"/{prefix}/{step}"])
        told.setdefault((prefix, step), set()).update(ranks)
    for choice in ledger.choose(WORLD, not_after=not_after):
        good = [
            step
            for (prefix, step), ranks in told.items()
            if prefix == choice.prefix
            and len(ranks) == WORLD
            and (not_after is None or step < not_after)
        ]
        assert choice.step == max(good, default=None)


def test_an_abandoned_step_never_becomes_whole_by_late_words():
    """A node that comes back with its old half would complete a checkpoint that nobody holds."""
    ledger = a_ledger((10, range(WORLD - 1)), (20, range(WORLD)))
    ledger.begin(2, ledger.choose(WORLD))
    refused = ledger.confirm("model", 10, (WORLD - 1,), ("/ckpt/10",), generation=2)
    assert refused is not None
    assert ledger.complete(WORLD) == ()
    assert chosen(ledger).step == 20


def test_a_step_is_whole_when_each_of_its_types_is():
    """A model without the place in its data trains twice on the same, or skips some."""
    ledger = CheckpointLedger()
    for step in (10, 20):
        ledger.confirm("run", step, range(WORLD), [f"/m/{step}"])
        ledger.confirm("run", step, range(WORLD - (step == 20)), ["/d"], kind="data_checkpoint")
    choice = chosen(ledger)
    assert (choice.step, choice.path, choice.others) == (10, "/m/10", (("data_checkpoint", "/d"),))
    assert "step 20 skipped: rank 3 has not confirmed its data_checkpoint" in choice.reason
    ledger.complete(WORLD)
    again = CheckpointLedger.restored(ledger.pointers())
    assert chosen(again).others == (("data_checkpoint", "/d"),)
    # It still knows, after a restart, what a step consists of.
    again.confirm("run", 30, range(WORLD), ["/m/30"])
    assert chosen(again).step == 10


def test_a_late_declaration_erases_nothing_and_counts_from_then_on():
    """A rank that opens its client late must not cost the job its only valid checkpoint."""
    ledger = a_ledger((10, range(WORLD)))
    ledger.complete(WORLD)
    for ranks in ((0, 1), (2, 3)):
        ledger.declare("model", "data_checkpoint", ranks, 1)
    assert chosen(ledger).step == 10
    ledger.confirm("model", 20, range(WORLD), ["/ckpt/20"])
    assert chosen(ledger).step == 10
    ledger.confirm("model", 20, [0], ["/d/20"], kind="data_checkpoint")
    assert "ranks 2, 3 have not confirmed its data_checkpoint" in chosen(ledger).reason
    ledger.confirm("model", 20, [3], ["/d/20"], kind="data_checkpoint")
    assert chosen(ledger).step == 20  # one rank of each node was declared, and one told


def test_pending_steps_tell_whom_they_lack_and_differing_paths_are_told_once():
    """Being told "not complete" without a rank sends a person to read a thousand logs."""
    ledger = a_ledger((10, range(WORLD)), (20, [0, 2]))
    ledger.complete(WORLD)
    (pending,) = ledger.pending(WORLD)
    assert (pending.step, pending.missing_ranks) == (20, (1, 3))
    assert ledger.conflicts() == ()
    ledger.confirm("model", 20, [1], ["/elsewhere/20"])
    (told,) = ledger.conflicts()
    assert "ranks 0, 2 to /ckpt/20; rank 1 to /elsewhere/20" in told
    assert ledger.conflicts() == ()


def test_what_is_demoted_is_passed_over_for_the_next_older_one():
    """A checkpoint that was given up must not come back at the next restart."""
    ledger = a_ledger((10, range(WORLD)), (20, range(WORLD)), (30, range(WORLD)))
    demoted = {("model", 30): "it is given up", ("model", 20): "it is given up"}
    choice = chosen(ledger, demoted=demoted)
    assert choice.step == 10
    assert "step 30 skipped: it is given up" in choice.reason


@given(
    st.lists(
        st.tuples(
            st.integers(1, 4),
            st.sampled_from(["model_checkpoint", "data_checkpoint"]),
            st.integers(0, WORLD - 1),
        ),
        max_size=60,
    ),
    st.randoms(),
)
def test_the_order_of_confirmations_changes_no_choice(told, dice):
    """Statuses are late and doubled: the intersection over all ranks must not depend on it."""

    def heard(confirmations):
        ledger = CheckpointLedger()
        for kind in ("model_checkpoint", "data_checkpoint"):
            ledger.declare("run", kind, tuple(range(WORLD)), WORLD)
        for step, kind, rank in confirmations:
            ledger.confirm("run", step, [rank], [f"/{kind}/{step}"], kind=kind)
        ledger.complete(WORLD)
        return [choice.step for choice in ledger.choose(WORLD)]

    shuffled = [*told, *told[:5]]
    dice.shuffle(shuffled)
    whole = [
        step
        for step in range(1, 5)
        if len({(kind, rank) for at, kind, rank in told if at == step}) == 2 * WORLD
    ]
    assert heard(shuffled) == heard(told) == ([] if not told else [max(whole, default=None)])
