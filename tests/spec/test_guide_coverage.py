"""The guide's coverage table: for each failure that peers can show, the evidence that names it.

Health telemetry's rows stand where hardware is judged.  What the rows look like in live training
is tested with real ranks; here it is the rule of each.
"""

import pytest

from scout.localize import GroupObservation, LocalizedEndpoint, NothingToLocalize, localize
from scout.settings import Recipe, ReplayHarnessConfig
from scout.stages import StageWatch
from scout.straggler import Confirmations, StragglerThresholds, spatial
from scout.surfaces import Answers, blame, is_owned, named


def judged(surface, votes):
    """What three peers' answers on one surface come to."""
    results = Answers(peer_ranks=(0, 1, 2), votes={surface: votes}).results()
    owned = sorted(named(results, (0, 1, 2), owned=True))
    computed = sorted(named(results, (0, 1, 2), owned=False))
    return blame(results, (0, 1, 2), job_owned=owned, job_computed=computed)


@pytest.mark.parametrize(
    "surface", ["hidden.output", "hidden.input_gradient", "hidden.parameter_gradient"]
)
def test_compute_corruption_shows_in_replayed_outputs_and_gradients(surface):
    """Row 1."""
    found = judged(surface, {0: 7, 1: 9, 2: 7})
    assert found.bitmap == (0, 1, 0)
    assert found.sources == (surface,)


@pytest.mark.parametrize(
    "surface",
    ["hidden.parameter_state", "state.parameters", "state.moments", "sweep.state.moments"],
)
def test_parameter_or_optimizer_corruption_shows_in_owned_state(surface):
    """Row 2, and its localization requirement: the peers own corresponding state."""
    assert is_owned(surface)
    assert judged(surface, {0: 7, 1: 7, 2: 9}).bitmap == (0, 0, 1)


def test_updated_weights_are_a_surface_of_their_own():
    """Row 2: a wrong optimizer kernel is computation, not state that somebody owns."""
    assert not is_owned("optimizer.updated_weight")
    assert judged("optimizer.updated_weight", {0: 9, 1: 7, 2: 7}).bitmap == (1, 0, 0)


def test_what_follows_from_a_wrong_shard_accuses_nobody_else():
    """Row 2: everybody who gathered the wrong shard computes something else."""
    results = Answers(peer_ranks=(0, 2, 4), votes={"hidden.output": {0: 7, 2: 9, 4: 7}}).results()
    found = blame(results, (0, 2, 4), job_owned=(3,), job_computed=(2, 3))
    assert found.job_ranks == (3,)
    assert found.bitmap == (0, 0, 0)
    assert found.sources == ()


def test_a_compute_straggler_is_a_deviation_that_stays():
    """Row 3: slow across confirmation rounds, by a ratio and by an absolute time."""
    thresholds = StragglerThresholds(ratio=1.2, ms=2.0, rounds=2)
    slow = {0: 10.0, 1: 10.1, 2: 15.0}
    assert spatial(slow, thresholds) == (2,)
    rounds = Confirmations(thresholds)
    assert rounds.note("hidden", spatial(slow, thresholds)) == ()
    assert rounds.note("hidden", spatial(slow, thresholds)) == (2,)


def test_a_communication_straggler_needs_groups_that_implicate_one_endpoint():
    """Row 4: independent slow groups, and no healthy contradiction."""
    pair = [
        GroupObservation(group="a", members=(0, 1), reports={0: True, 1: True}),
        GroupObservation(group="b", members=(1, 2), reports={1: True, 2: True}),
    ]
    found = localize(pair, {0: "h0", 1: "h1", 2: "h2"})
    assert isinstance(found, LocalizedEndpoint)
    assert (found.rank, found.host) == (1, "h1")
    healthy = GroupObservation(group="c", members=(1, 3), reports={1: False, 3: False})
    assert isinstance(localize([*pair, healthy], {}), NothingToLocalize)


def test_stalls_in_stages_need_an_absolute_a_relative_and_a_lasting_excess():
    """Rows 7 and 8: data loader and checkpoint I/O."""
    thresholds = StageWatch().thresholds
    assert thresholds.data_ns > 0
    assert thresholds.checkpoint_ns > 0
    assert thresholds.ratio > 1
    assert thresholds.rounds >= 2


def test_four_recipe_classes_have_intervals_of_their_own_and_zero_switches_off():
    """The guide's configuration: explicit intervals override the base, zero disables."""
    config = ReplayHarnessConfig(
        check_interval=10,
        embedding_check_interval=0,
        hidden_check_interval=20,
        output_check_interval=30,
        optimizer_check_interval=40,
    )
    found = [config.interval_of(recipe) for recipe in tuple(Recipe)[:4]]
    assert found == [0, 20, 30, 40]
