"""Real ranks, real faults: who is named on the first check, and what training notices of it."""

import pytest

torch = pytest.importorskip("torch")

from benchmarks.scout_world import run_world  # noqa: E402

pytestmark = [pytest.mark.component, pytest.mark.timeout(400)]

DDP = {
    "healthy": {},
    "headless": {"headless": True},
    "weight": {"fault": {"kind": "weight", "rank": 1, "step": 4, "bit": 30}},
    "sign": {"fault": {"kind": "embedding", "rank": 0, "step": 4, "bit": 15}, "dtype": "bfloat16"},
    "moment": {"fault": {"kind": "moment", "rank": 2, "step": 4, "bit": 3}},
    "output": {"fault": {"kind": "output", "rank": 2, "bit": 20}},
    "gradient": {"fault": {"kind": "gradient", "rank": 0, "bit": 20}},
    "optimizer": {"fault": {"kind": "optimizer", "rank": 1, "bit": 20}},
    "raise": {"fault": {"kind": "raise", "rank": 1}},
    "uncalled": {"fault": {"kind": "uncalled", "rank": 1}},
    "slower": {
        "fault": {"kind": "slower", "rank": 1, "step": 2, "factor": 3.0},
        "steps": 6,
        "width": 128,
        "batch": 16,
        "config": {"check_interval": 1},
        "stragglers": {"ms": 1.0, "ratio": 1.3},
    },
    "bare": {"protected": False},
    "sgd": {"optimizer": "SGD", "config": {"check_interval": 0}},
    "fsdp": {"regime": "fsdp"},
    "fsdp output": {"regime": "fsdp", "fault": {"kind": "output", "rank": 2, "bit": 20}},
}
HSDP = {
    "weight": {"fault": {"kind": "weight", "rank": 3, "step": 4}},
    "output": {"fault": {"kind": "output", "rank": 4, "bit": 20}},
}
CPU = {"check_interval": 2, "referee": "cpu"}
PAIR = {
    "tie": {"fault": {"kind": "output", "rank": 1, "bit": 25}},
    "broken tie": {"fault": {"kind": "output", "rank": 1, "bit": 25}, "config": CPU},
    "no second copy": {"fault": {"kind": "weight", "rank": 1, "step": 4}, "config": CPU},
}


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    return dict(
        zip(DDP, run_world(3, list(DDP.values()), tmp_path_factory.mktemp("ddp")), strict=True)
    )


@pytest.fixture(scope="module")
def hsdp(tmp_path_factory):
    orders = [{"regime": "hsdp", "shards": 2, "layers": 2, **it} for it in HSDP.values()]
    return dict(zip(HSDP, run_world(6, orders, tmp_path_factory.mktemp("hsdp")), strict=True))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    return dict(zip(PAIR, run_world(2, list(PAIR.values()), folder), strict=True))


def last(told):
    return [one["results"][-1] for one in told]


def surfaces(result, status="attributed"):
    return {name for name, it in result["c3_results"].items() if it["status"] == status}


def test_healthy_ranks_agree_on_every_surface(ddp):
    """A healthy job is stopped, or a check that looked at nothing calls it healthy."""
    for told in ddp["healthy"]:
        assert [it["type"] for it in told["results"]] == ["ReplayResult", "ReplayResult"]
        for result in told["results"]:
            assert surfaces(result) == surfaces(result, "inconclusive") == set()
            assert {"embedding.output", "hidden.input_gradient", "output.parameter_gradient"} <= (
                surfaces(result, "agree")
            )
            assert {"optimizer.updated_weight", "state.parameters", "state.moments"} <= surfaces(
                result, "agree"
            )
        assert told["results"][0]["checked_recipe_ids"][1] == "hidden[stack.0]"
        assert told["results"][1]["checked_recipe_ids"][1] == "hidden[stack.1]"
        assert told["faults"] == []


def test_training_does_not_notice_its_protection(ddp):
    """Gradients, random numbers or weights differ from those of the same run without checks."""
    bare = ddp["bare"][0]["weights"]
    for told in ddp["healthy"]:
        assert told["untouched"]
        assert told["weights"] == bare
        assert told["hooks_left"] == 0


def test_nothing_is_held_on_steps_without_a_check(ddp):
    """Activations and logits gradients stay alive on every step, and memory runs out."""
    assert [told["held"] for told in ddp["healthy"]] == [[0, 3, 0, 3]] * 3


def test_a_model_without_an_output_module_has_a_recipe_less(ddp):
    """A naming convention that is not met looks like corruption on every rank."""
    for told in ddp["headless"]:
        assert told["faults"] == []
        recipes = told["results"][-1]["checked_recipe_ids"]
        assert [it.partition("[")[0] for it in recipes] == [
            "embedding",
            "hidden",
            "optimizer",
            "state",
        ]


@pytest.mark.parametrize(
    ("name", "rank", "source"),
    [
        ("weight", 1, "hidden.parameter_state"),
        ("sign", 0, "embedding.parameter_state"),
        ("moment", 2, "state.moments"),
        ("output", 2, "hidden.output"),
        ("gradient", 0, "hidden.input_gradient"),
        ("optimizer", 1, "optimizer.updated_weight"),
    ],
)
def test_the_first_check_that_covers_a_fault_names_its_rank(ddp, name, rank, source):
    """A silent corruption goes on into the next checkpoint, or a healthy rank is replaced."""
    for told, result in zip(ddp[name], last(ddp[name]), strict=True):
        assert result["job_sdc_ranks"] == [rank]
        assert result["sdc_bitmap"] == [int(at == rank) for at in range(3)]
        assert source in result["sdc_sources"]
        assert [it["failed_ranks"] for it in told["faults"]] == [[rank]]
        assert result["swept"]


def test_a_report_says_where_the_tensors_differ(ddp):
    """Whoever looks into it has gigabytes to compare."""
    result = last(ddp["weight"])[0]
    assert result["differences"][0]["tensor"] == "parameters stack.1.up.weight"
    assert result["differences"][0]["ranks"] == [1]
    start, stop = result["differences"][0]["byte_ranges"][0]
    assert start <= 7 * 4 < stop <= 16_384


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("raise", "rank 1: hidden raised RuntimeError"),
        ("uncalled", "rank 1: hidden was not captur"),
    ],
)
def test_a_check_that_cannot_run_accuses_nobody(ddp, name, why):
    """A missing capture or an unsupported kernel on one rank is called corruption, or hangs all."""
    for told, result in zip(ddp[name], last(ddp[name]), strict=True):
        assert result["type"] == "NotReady"
        assert why in result["why"]
        assert told["faults"] == []


def test_a_rank_that_computes_slowly_is_named_and_its_values_are_trusted(ddp):
    """A throttled processor slows the whole job down, and nobody knows whose it is."""
    for told in ddp["slower"]:
        result = told["results"][-1]
        assert result["straggler_bitmap"] == [0, 1, 0]
        assert not result["job_disagrees"]
        assert told["trust"][-1][1] == "recovery_verified"
        assert {it["kind"] for it in told["faults"]} == {"straggler"}


def test_an_interval_of_zero_checks_nothing_by_itself(ddp):
    """Whoever wants to ask himself pays for checks that he did not ask for."""
    assert [told["results"] for told in ddp["sgd"]] == [[], [], []]


def test_pure_fsdp_compares_computation_and_says_what_it_cannot(ddp):
    """A shard with one owner is taken for protected."""
    for result in last(ddp["fsdp"]):
        assert result["job_disagrees"] is False
        assert "one owner" in result["missing_guarantees"][0]
        assert not any(name.startswith("state.") for name in result["c3_results"])
        assert "hidden.output" in surfaces(result, "agree")
        kinds = {it["collective"] for it in result["collective_timings"]}
        assert "fsdp_parameter_all_gather" in kinds
    for told, result in zip(ddp["fsdp output"], last(ddp["fsdp output"]), strict=True):
        assert result["job_sdc_ranks"] == [2]
        assert told["untouched"]


def test_hsdp_names_the_owner_of_a_wrong_shard_and_nobody_else(hsdp):
    """Everybody who gathered the wrong shard computes something else, and is replaced for it."""
    for rank, result in enumerate(last(hsdp["weight"])):
        assert result["job_sdc_ranks"] == [3]
        assert result["peer_ranks"] == [rank % 2, rank % 2 + 2, rank % 2 + 4]
    assert last(hsdp["weight"])[3]["sdc_bitmap"] == [0, 1, 0]
    assert last(hsdp["weight"])[2]["sdc_bitmap"] == [0, 0, 0]


def test_hsdp_names_who_computed_wrongly(hsdp):
    """The fault is in one peer group, and the other certifies the checkpoint."""
    for result in last(hsdp["output"]):
        assert result["job_sdc_ranks"] == [4]
        assert result["job_disagrees"]


def test_two_peers_disagree_without_convicting_each_other(pair):
    """The healthy one of two is replaced half of the time."""
    for told, result in zip(pair["tie"], last(pair["tie"]), strict=True):
        assert result["sdc_bitmap"] == [0, 0]
        assert "hidden.output" in surfaces(result, "inconclusive")
        assert told["faults"][0]["failed_ranks"] == []
        assert told["faults"][0]["scope"] == "peer_group"


def test_a_recomputation_breaks_the_tie_where_it_can(pair):
    """Two replicas, the smallest job there is, can never say who is wrong."""
    for result in last(pair["broken tie"]):
        assert result["job_sdc_ranks"] == [1]
    for result in last(pair["no second copy"]):
        assert result["job_sdc_ranks"] == []
