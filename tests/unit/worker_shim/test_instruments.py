"""What is put around torch, in this process and with a group of one."""

import copy
import io
import itertools
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from scout.hang import Phase
from scout.progress import PageWriter, create_page
from worker_shim import groups
from worker_shim.instrument import Instruments
from worker_shim.layers import repeated_layers
from worker_shim.session import StepCounter

torch = pytest.importorskip("torch")
distributed = pytest.importorskip("torch.distributed")

ROOT = Path(__file__).parents[3]


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(self.linear(x))


@pytest.fixture
def inside(tmp_path):
    """Instruments in this process, and out of it again."""
    page = tmp_path / "page"
    create_page(page, 7)
    instruments = Instruments(StepCounter(), PageWriter.open(page, 7))
    instruments.install()
    yield instruments
    instruments.remove()


@pytest.fixture
def group():
    """The default process group, of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.distributed_c10d._get_default_group()
    distributed.destroy_process_group()


class Looks:
    """What a tick notes at chosen places of a step."""

    def __init__(self, inside):
        self.seen = []
        self._inside, self._now_ns = inside, 1 << 60

    def look(self, *_):
        self._now_ns += 1
        heard = self._inside._layers.take_heard()
        self._inside.track.note(self._now_ns, is_heard=heard)
        movement = self._inside._observe(self._now_ns)
        phase = Phase.UNKNOWN if movement is None else Phase(movement.phase)
        moved = movement is not None and movement.moved_ns == self._now_ns
        self.seen.append((phase.name.lower(), moved))

    @property
    def phases(self):
        return [phase for phase, _ in self.seen]


@pytest.fixture
def looks(inside):
    return Looks(inside)


def model_and_optimizer(blocks=4):
    model = torch.nn.Sequential(*[Block() for _ in range(blocks)], torch.nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


class Looking(torch.nn.Module):
    """A block inside which a tick falls, once in forward and once in backward."""

    def __init__(self, looks):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.looks = [looks]

    def forward(self, x):
        x = self.linear(x)
        self.looks[0].look()
        if x.requires_grad:
            x.register_hook(self.looks[0].look)
        return x


def looking_model(looks, blocks=4):
    model = torch.nn.Sequential(*[Looking(looks) for _ in range(blocks)])
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_step_is_noted_from_its_forward_pass_to_its_end(inside, looks):
    """A rank that stands still would not say where, or would seem to although it moves."""
    model, optimizer = looking_model(looks)
    optimizer.register_step_pre_hook(looks.look)
    step(model, optimizer)
    looks.look()
    assert looks.phases == ["forward"] * 4 + ["backward"] * 4 + ["optimizer", "unknown"]
    assert all(moved for _, moved in looks.seen[:5])
    assert any(moved for _, moved in looks.seen[5:8])
    assert inside.track.steps.step == 1
    for _ in range(2):
        looks.look()
    assert looks.seen[-2:] == [("unknown", False)] * 2


def test_a_rank_that_stands_in_a_pass_does_not_seem_to_move(inside, looks):
    """A hang would look like a slow pass for ever."""
    model, optimizer = looking_model(looks, blocks=2)
    stand = [model[1].register_forward_hook(lambda *_: [looks.look() for _ in range(3)] and None)]
    step(model, optimizer)
    stand[0].remove()
    assert looks.seen[2:5] == [("forward", False)] * 3


def test_what_follows_a_pass_is_told_by_the_pass(inside, looks):
    """A rank that stands in its loss function would be nowhere."""
    model, _ = looking_model(looks)
    model(torch.ones(2, 4))
    looks.look()
    assert looks.seen[-1] == ("forward", True)
    looks.look()
    assert looks.seen[-1] == ("forward", False)


def test_an_optimizer_that_runs_the_passes_itself_is_seen_through(inside, looks):
    """A trainer that steps with a closure would be in its optimizer all the time."""
    model, optimizer = looking_model(looks, blocks=2)

    def closure():
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert looks.phases == ["forward"] * 2 + ["backward"] * 2


def test_another_model_is_looked_for_when_nothing_is_heard(inside, looks):
    """A script that makes its model anew would be watched where it is not any more."""
    _model, optimizer = looking_model(looks)
    other, _ = model_and_optimizer()
    inside._layers.remove()
    optimizer.param_groups[0]["params"] = list(other.parameters())
    for _ in range(2):
        step(other, optimizer)
        looks.look()
    step(other, optimizer)
    assert inside._layers.is_watched(other[2])


def gradient_hooks(model):
    return sum(len(it._post_accumulate_grad_hooks or ()) for it in model.parameters())


def test_the_repeated_block_is_found(inside):
    """Hooks on every leaf would cost more than the stall that they find."""
    model, _ = model_and_optimizer()
    assert list(repeated_layers(model)) == list(model)[:4]
    assert list(repeated_layers(torch.nn.Linear(2, 2))) == []
    nested = torch.nn.ModuleDict({"a": model, "b": torch.nn.ModuleList([Block()])})
    assert len(repeated_layers(nested)) == 5
    assert gradient_hooks(model) == 1
    plain = torch.nn.Linear(2, 2)
    torch.optim.SGD(plain.parameters())
    assert gradient_hooks(plain) == 1


def test_gradients_are_the_same_bits_and_views_may_change_in_place(inside):
    """A hook that wraps what a layer returns would change the graph and forbid this."""

    class Plain(Block):
        def forward(self, x):
            return self.linear(x)

    class InPlace(torch.nn.Module):
        def __init__(self, blocks):
            super().__init__()
            self.blocks = torch.nn.ModuleList(blocks)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)[:, :4]
                x += 1
            return x

    torch.manual_seed(3)
    model = InPlace([Plain() for _ in range(4)])
    bare = copy.deepcopy(model)
    torch.optim.SGD(model.parameters(), lr=0.1)
    assert (gradient_hooks(model), gradient_hooks(bare)) == (1, 0)
    for each in (model, bare):
        each(torch.ones(2, 4)).sum().backward()
    pairs = zip(model.parameters(), bare.parameters(), strict=True)
    assert all(torch.equal(left.grad, right.grad) for left, right in pairs)


def test_recomputed_activations_are_part_of_backward(inside, looks):
    """Backward with checkpointed activations would look like a second forward pass."""
    model, _ = looking_model(looks)
    x = torch.ones(2, 4, requires_grad=True)
    kept = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum()
    looks.seen.clear()
    kept.backward()
    assert len(looks.phases) > 4  # both passes, the first one's last block perhaps left out
    assert set(looks.phases) == {"backward"}


def test_an_evaluation_shows_without_a_word_of_the_script(inside, looks):
    """Ten minutes of validation on one rank would be a stall of all the others."""
    model, _ = looking_model(looks)
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert looks.phases == ["evaluate"] * 4
    model.train()
    model(torch.ones(2, 4))
    assert looks.phases[4:] == ["forward"] * 4


def hooks_on(model):
    return sum(len(it._forward_pre_hooks) + len(it._forward_hooks) for it in model.modules())


def test_passes_too_short_to_be_seen_show_while_a_model_is_evaluated(inside, looks):
    """A rank whose evaluation is mostly its script's own arithmetic would be named for it."""
    model, optimizer = model_and_optimizer()
    wrapper = torch.nn.ModuleDict({"module": model})
    inside._layers.look(optimizer)
    step(model, optimizer)
    assert hooks_on(wrapper) == 0
    wrapper.eval()
    with torch.no_grad():
        for _ in range(2):
            model(torch.ones(2, 4))
            looks.look()
    assert looks.seen == [("evaluate", True)] * 2
    looks.look()
    assert looks.seen[-1] == ("evaluate", False)
    wrapper.train()
    looks.look()
    assert looks.seen[-1] == ("unknown", True)
    assert hooks_on(wrapper) == 0


def test_training_in_evaluation_s_mode_is_training(inside, looks):
    """A model whose statistics are frozen would be evaluating for ever."""
    model, optimizer = model_and_optimizer()
    model.eval()
    for _ in range(2):
        step(model, optimizer)
        looks.look()
    assert looks.phases == ["unknown"] * 2


@pytest.mark.parametrize("is_training", [True, False])
def test_a_hooked_model_can_be_copied_and_pickled(inside, is_training):
    """Averaging weights in a copy, or saving a model whole, would fail under us."""
    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    model.train(is_training)
    assert hooks_on(model) == (not is_training)
    copy.deepcopy(model)(torch.ones(2, 4))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(torch.ones(2, 4)), model(torch.ones(2, 4)))
    assert gradient_hooks(loaded) == 0


def test_a_hooked_model_is_compiled_whole_and_once(inside):
    """A hook would break the graph, or compile for minutes again."""
    counter = pytest.importorskip("torch._dynamo.testing").CompileCounter()
    inside.install()
    model, optimizer = model_and_optimizer()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(4):
        compiled(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert counter.frame_count == 1
    for _ in range(2):
        compiled.eval()
        with torch.no_grad():
            compiled(torch.ones(2, 4))
        compiled.train()
        compiled(torch.ones(2, 4)).sum().backward()
    assert counter.frame_count == 2  # evaluation is another graph, with or without us


def test_a_model_is_scripted_as_if_it_had_no_hooks(inside):
    """An export at the end of a training would fail under us."""
    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer torch would rather export
        torch.jit.script(model)
    assert hooks_on(model) == 0
    model.train()
    step(model, optimizer)
    assert gradient_hooks(model) == 1


def words(inside, name="0"):
    _, found = inside._groups.sample(0, with_fingerprints=inside._collectives.alive)
    return next(it for it in found if it.name == name)


def test_a_fingerprint_is_of_what_all_must_have_alike(inside, group):
    """Two ranks that disagree would look alike, or two that agree would not."""

    def fingerprint(call):
        call()
        position = inside._groups.of(group)
        return position.fingerprint ^ position.settled * 0x9E3779B97F4A7C15

    ones = torch.ones
    same = [
        lambda: distributed.all_reduce(ones(2)),
        lambda: distributed.all_reduce(ones(2), async_op=True).wait(),
        lambda: distributed.all_reduce(ones(2) * 5, op=distributed.ReduceOp.SUM, group=group),
    ]
    different = [
        lambda: distributed.all_reduce(ones(3)),
        lambda: distributed.all_reduce(ones(2), op=distributed.ReduceOp.MAX),
        lambda: distributed.all_reduce(ones(2, dtype=torch.float64)),
        lambda: distributed.broadcast(ones(2), 0),
        lambda: distributed.reduce(ones(2), 0),
        lambda: distributed.all_gather_into_tensor(ones(2), ones(2)),
        distributed.barrier,
    ]
    mask = (1 << 63) - 2
    prints = {fingerprint(call) & mask for call in same}
    assert len(prints) == 1
    assert len(prints | {fingerprint(call) & mask for call in different}) == 1 + len(different)


def test_the_pieces_of_an_all_to_all_do_not_count(inside, group):
    """Routing is different on every rank: each exchange of experts would be a fault."""
    prints = []
    for size in (2, 3):
        inside._groups.of(group).settled = 0
        distributed.all_to_all_single(torch.ones(size), torch.ones(size))
        position = inside._groups.of(group)
        prints.append(
            (position.fingerprint ^ position.settled * 0x9E3779B97F4A7C15) & (1 << 63) - 2
        )
    assert prints[0] == prints[1]


def test_what_is_issued_outside_python_changes_the_fingerprint(inside, group):
    """A rank inside DDP's reducer and one inside a barrier would seem to be in the same."""
    distributed.all_reduce(torch.ones(2))
    before = words(inside)
    assert (before.operation, before.seq) == (2, 1)
    native = torch.ops._c10d_functional
    native.wait_tensor(native.all_reduce(torch.ones(2), "sum", group.group_name))
    after = words(inside)
    assert (after.seq, after.operation) == (2, 1)
    assert after.fingerprint != before.fingerprint


def test_a_group_that_moves_while_it_is_looked_at_tells_no_fingerprint(inside, group, monkeypatch):
    """Its count is of one collective, its fingerprint of another: it would be the odd one out."""
    distributed.barrier()
    assert words(inside).fingerprint
    numbers = itertools.count(1000)
    monkeypatch.setattr(groups, "sequence_number", lambda _group: next(numbers))
    torn = words(inside)
    assert (torn.fingerprint, torn.operation) == (None, 0)
    assert torn.seq >= 1000


def test_a_watch_that_fails_ends_and_the_call_goes_on(inside, group, caplog, monkeypatch):
    """A change in torch would end every training that we sit in."""

    def broken(_group):
        raise LookupError("another torch")

    monkeypatch.setattr(inside._groups, "of", broken)
    value = torch.ones(2)
    for _ in range(3):
        distributed.all_reduce(value)
    assert value.tolist() == [1, 1]
    assert caplog.text.count("collectives are no longer watched: LookupError") == 1
    monkeypatch.undo()
    assert words(inside).fingerprint is None


def test_an_error_of_the_collective_reaches_the_script(inside, group):
    """A script that handles a broken collective would never hear of it."""
    with pytest.raises(RuntimeError):
        distributed.all_gather([torch.ones(1)], torch.ones(2))
    assert inside.track.phase != Phase.COLLECTIVE
    assert words(inside).inside is False


def test_everything_is_as_it_was_after_the_removal(inside):
    """Detached, we would still stand in every traceback."""
    group_class, work_class = distributed.ProcessGroup, distributed.distributed_c10d.Work
    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    inside.remove()
    for method in (group_class.allreduce, work_class.wait):
        assert getattr(method, "__module__", None) != "worker_shim.collectives"
    for function in (torch.save, torch.load):
        assert not hasattr(function, "__wrapped__") or "worker_shim" not in str(function.__code__)
        assert function.__globals__["__name__"].startswith("torch")
    assert torch.optim.Optimizer.__init__.__globals__["__name__"].startswith("torch")
    assert torch.nn.Module.train.__globals__["__name__"].startswith("torch")
    assert gradient_hooks(model) == 0
    steps = inside.track.steps.step
    step(model, optimizer)
    assert inside.track.steps.step == steps


def test_names_imported_before_us_are_watched_too():
    """A script that imports a function by name would write its checkpoints unseen."""
    code = (
        "from torch import save\nimport sys, io, torch\nsys.path.insert(0, sys.argv[2])\n"
        "from scout.progress import PageWriter, create_page\n"
        "from worker_shim.instrument import Instruments\n"
        "from worker_shim.session import StepCounter\n"
        "create_page(sys.argv[1], 7)\n"
        "inside = Instruments(StepCounter(), PageWriter.open(sys.argv[1], 7))\n"
        "inside.install()\nassert save is torch.save\nold = torch.serialization.save\n"
        "inside.remove()\nassert save is torch.save is not old\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, f"/dev/shm/outrider-test-{id(code)}", str(ROOT)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    Path(f"/dev/shm/outrider-test-{id(code)}").unlink(missing_ok=True)
    assert done.returncode == 0, done.stderr
