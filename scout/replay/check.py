"""One check, from captured calls to a result: every collective of it, in a fixed order.

Contract first: where not all peers are ready alike, nothing else is entered.  Then inputs go round,
everybody computes, and one gather carries the digests of all surfaces.  Only a disagreement
anywhere in the job leads to more: a sweep over all layers and all state, and the search for where
tensors differ.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from scout.c3 import C3Result, C3Status
from scout.replay import exchange, optimizer, recipes, state
from scout.replay.capture import Invocation
from scout.replay.device import spent_s
from scout.replay.modules import Catalogue
from scout.replay.peers import Peers
from scout.replay.tree import tensors_of
from scout.results import CollectiveTiming
from scout.settings import Recipe, Referee, ReplayHarnessConfig
from scout.signature import differing_bytes, sign_tensors
from scout.surfaces import Answers, is_owned

LOCATED_MAX: Final = 4
"""Tensors in which a check looks for the place of a difference."""
_MASK: Final = (1 << 64) - 1


class CannotCheckError(Exception):
    """The check could not run; the text says why, the same on every rank."""


@dataclass(slots=True)
class Subject:
    """One module recipe of a check, and which of the recipe's modules it is."""

    recipe: Recipe
    name: str
    module: Any
    invocation: Invocation | None

    def contract(self) -> str:
        """Return what all peers must have alike; empty where nothing was captured."""
        if self.invocation is None:
            return ""
        return f"{self.recipe} {self.name} {self.invocation.contract()}"


@dataclass(slots=True)
class Plan:
    """What a check is to do on this rank."""

    step: int
    due: tuple[Recipe, ...]
    subjects: list[Subject]
    slice: optimizer.Slice | None
    slice_missing: str
    pieces: list[state.Piece]

    def contracts(self) -> dict[str, str]:
        """Return each recipe's contract, empty where this rank is not ready for it."""
        found = {it.recipe.value: it.contract() for it in self.subjects}
        if Recipe.OPTIMIZER in self.due:
            found[Recipe.OPTIMIZER] = "" if self.slice is None else self.slice.contract
        if Recipe.STATE in self.due:
            found[Recipe.STATE] = state.contract(self.pieces) or "nothing"
        return found


@dataclass(slots=True)
class Found:
    """What the gathers brought: every peer's digests and times, surface by surface."""

    votes: dict[str, dict[int, int]] = field(default_factory=dict)
    times: dict[str, dict[int, float]] = field(default_factory=dict)
    not_finite: set[int] = field(default_factory=set)
    """Ranks that hold a parameter which is infinite or no number."""
    collectives: list[CollectiveTiming] = field(default_factory=list)
    differences: list[tuple[str, tuple[int, ...], tuple[tuple[int, int], ...]]] = field(
        default_factory=list
    )

    def answers(self, peers: Peers) -> Answers:
        """Return the votes as something to be judged."""
        return Answers(peer_ranks=peers.ranks, votes=self.votes)


class Check:
    """The collectives of one check."""

    def __init__(self, peers: Peers, config: ReplayHarnessConfig, plan: Plan) -> None:
        self._peers = peers
        self._config = config
        self._plan = plan
        self._prepared: dict[str, recipes.Prepared] = {}
        self._surfaces: dict[str, list[Any]] = {}
        self._times: dict[str, float] = {}
        self._errors: list[str] = []
        self._sums: list[Any] = []
        """Of parameters: a sum that is not finite has something in it that is not."""
        self.found = Found()

    @property
    def recipe_ids(self) -> tuple[str, ...]:
        """What was checked, a rotating layer with its name."""
        layers = {it.recipe: it.name for it in self._plan.subjects}
        return tuple(
            f"{recipe}[{layers[recipe]}]" if recipe in layers else recipe.value
            for recipe in self._plan.due
        )

    def can_repeat(self, recipe: str) -> bool:
        """Whether `again` can run a recipe: a module's, not the optimizer's."""
        return recipe in self._prepared

    def require_readiness(self) -> None:
        """Compare the contracts.  Raises `CannotCheckError` on every rank of the job alike."""
        contracts = self._plan.contracts()
        whole = f"step {self._plan.step} {sorted(self._plan.due)} {sorted(contracts.items())}"
        digest = hashlib.blake2b(whole.encode(), digest_size=8).digest()
        ready = all(contracts.values())
        words = [int(ready), int.from_bytes(digest, "little", signed=True)]
        answers = exchange.gather(words, self._peers.control)
        is_alike = all(one == answers[0] for one in answers) and all(one[0] for one in answers)
        if not exchange.maximum([int(not is_alike)], self._peers.world)[0]:
            return
        told = exchange.gather_texts(self._told(contracts), self._peers.world)
        raise CannotCheckError(_why_not_ready(told))

    def _told(self, contracts: Mapping[str, str]) -> dict[str, Any]:
        missing = [
            f"{recipe} ({self._plan.slice_missing})"
            if recipe == Recipe.OPTIMIZER
            else f"{recipe} was not captured"
            for recipe, contract in contracts.items()
            if not contract
        ]
        short = {
            recipe: hashlib.blake2b(contract.encode(), digest_size=8).hexdigest()
            for recipe, contract in contracts.items()
        }
        step, due = self._plan.step, sorted(self._plan.due)
        rank, peers = self._peers.rank, list(self._peers.ranks)
        found = {"rank": rank, "peers": peers, "step": step, "due": due}
        return {**found, "missing": missing, "contracts": short}

    def replay(self) -> None:
        """Hand the calls round, run them, and sign what is due."""
        for subject in self._plan.subjects:
            assert subject.invocation is not None, "readiness was required"
            prepared = recipes.prepare(subject.module, subject.invocation, self._peers)
            self._prepared[subject.recipe.value] = prepared
        taken = self._plan.slice if Recipe.OPTIMIZER in self._plan.due else None
        if taken is not None:
            taken = optimizer.exchange_slice(taken, self._peers)
        for recipe, prepared in self._prepared.items():
            self._run(recipe, prepared)
        if taken is not None:
            self._step(taken)
        self._sign_state(self._plan.pieces)
        self._gather()

    def sweep(self, catalogue: Catalogue, walk: state.StateWalk) -> None:
        """Look at every hidden layer, with the captured layer's call, and at all state."""
        hidden = self._prepared.get(Recipe.HIDDEN.value)
        checked = next((it.name for it in self._plan.subjects if it.recipe is Recipe.HIDDEN), "")
        if hidden is not None:
            for name, module in catalogue.modules[Recipe.HIDDEN]:
                if name != checked:
                    other = recipes.elsewhere(hidden, module, self._peers)
                    self._run(f"hidden[{name}]", other)
        if self._peers.state_is_replicated:
            self._sign_state(walk.pieces(), prefix="sweep.")
        self._gather()

    def again(self, recipe: str) -> dict[int, float]:
        """Run a recipe once more and return everybody's time, without comparing results."""
        took = self._replayed(self._prepared[recipe]).took_ms
        gathered = exchange.gather([exchange.bits_of(took)], self._peers.control)
        return {
            rank: exchange.float_of(one[0])
            for rank, one in zip(self._peers.ranks, gathered, strict=True)
        }

    def referee(self, results: dict[str, C3Result]) -> dict[str, C3Result]:
        """Return ``results`` with ties on computed surfaces broken by a trusted recomputation.

        Every peer of the group calls it; only what is inconclusive changes.
        """
        if self._config.referee is Referee.NOBODY:
            return results
        judged = dict(results)
        for recipe, prepared in self._prepared.items():
            tied = [
                name
                for name, one in results.items()
                if name.startswith(f"{recipe}.") and one.status is C3Status.INCONCLUSIVE
            ]
            causes = [it for it in tied if is_owned(it) or it.endswith(("_input", "rng_state"))]
            if not tied or causes:
                continue
            is_right = recipes.matches_reference(
                prepared, self._replayed(prepared), self._peers, seed=self._plan.step
            )
            answers = exchange.gather([int(is_right)], self._peers.control)
            wrong = tuple(int(not one[0]) for one in answers)
            if 0 < sum(wrong) < len(wrong):
                for name in tied:
                    judged[name] = C3Result(
                        status=C3Status.ATTRIBUTED,
                        bitmap=wrong,
                        evidence=results[name].evidence,
                        why=f"{name} disagrees, and is far from its own recomputation in double "
                        "precision on the CPU there, near to it elsewhere",
                    )
        return judged

    def locate(self, walk: state.StateWalk, surfaces: Sequence[str]) -> None:
        """Find where peers differ in what they own.  Every peer of the group calls it."""
        if not self._peers.state_is_replicated or not surfaces:
            return
        pieces = walk.pieces()
        everybody = exchange.gather_rows(state.digests(pieces), self._peers.control)
        wrong = [
            at for at in range(len(pieces)) if len({tuple(it[at].tolist()) for it in everybody}) > 1
        ]
        for at in wrong[:LOCATED_MAX]:
            rows = exchange.gather_rows(state.rows(pieces[at]), self._peers.control)
            counts = [sum(torch.equal(it, other) for other in rows) for it in rows]
            usual = rows[counts.index(max(counts))]
            odd = [at for at, it in enumerate(rows) if not torch.equal(it, usual)]
            self.found.differences.append(_difference(pieces[at], self._peers, rows, usual, odd))

    # --- on this rank ---------------------------------------------------------------------

    def _replayed(self, prepared: recipes.Prepared) -> recipes.Replayed:
        return recipes.replay(
            prepared, self._peers, deterministic=self._config.deterministic, seed=self._plan.step
        )

    def _run(self, label: str, prepared: recipes.Prepared) -> None:
        result = self._replayed(prepared)
        if result.error:
            self._errors.append(f"{label} raised {result.error}")
        inputs = [*tensors_of((prepared.args, prepared.kwargs)), *prepared.gradients]
        surfaces = {
            "replay_input": inputs,
            "rng_state": prepared.random_states,
            "output": result.output,
            "input_gradient": result.input_gradient,
            "parameter_gradient": result.parameter_gradient,
        }
        if self._config.compare_parameter_state:
            whole = list(prepared.parameters.values())
            own = prepared.own_state if self._peers.state_is_replicated else whole
            surfaces = {"parameter_state": own, **surfaces}
        self._surfaces |= {f"{label}.{name}": it for name, it in surfaces.items() if it}
        self._times[label] = result.took_ms
        for kind, members, size, took_ms in prepared.collectives:
            self.found.collectives.append(
                CollectiveTiming(
                    collective=kind,
                    group_ranks=members,
                    message_bytes=size,
                    sequence=len(self.found.collectives),
                    latency_ms=took_ms,
                    slow=False,
                )
            )

    def _step(self, taken: optimizer.Slice) -> None:
        self._surfaces["optimizer.replay_input"] = taken.tensors
        try:
            started = spent_s(self._peers.device)
            self._surfaces["optimizer.updated_weight"] = optimizer.step_slice(taken)
            took_s = spent_s(self._peers.device) - started
            self._times[Recipe.OPTIMIZER] = took_s * 1000
        except Exception as error:  # noqa: BLE001 - an optimizer may raise anything
            self._errors.append(f"optimizer raised {type(error).__name__}: {error}")

    def _sign_state(self, pieces: Sequence[state.Piece], prefix: str = "") -> None:
        for surface in (state.PARAMETERS, state.MOMENTS):
            chosen = [piece.values() for piece in pieces if piece.surface == surface]
            if chosen:
                self._surfaces[f"{prefix}{surface}"] = chosen
            if surface == state.PARAMETERS:
                self._sums += [it.sum() for it in chosen if it.is_floating_point()]

    def _gather(self) -> None:
        """Send this rank's digests and times round, and take in everybody's."""
        failed = exchange.maximum([int(bool(self._errors))], self._peers.world)[0]
        if failed:
            told = exchange.gather_texts(
                [f"rank {self._peers.rank}: {it}" for it in self._errors], self._peers.world
            )
            raise CannotCheckError("; ".join(it for one in told for it in one))
        names = list(self._surfaces)
        digests = _fold([self._surfaces[name] for name in names])
        timed = list(self._times)
        words = [word for pair in digests for word in pair]
        words += [exchange.bits_of(self._times[name]) for name in timed]
        words.append(int(not all(bool(it.isfinite()) for it in self._sums)))
        for rank, answer in zip(
            self._peers.ranks, exchange.gather(words, self._peers.control), strict=True
        ):
            for at, name in enumerate(names):
                first, second = answer[2 * at : 2 * at + 2]
                vote = (first & _MASK) << 64 | (second & _MASK)
                self.found.votes.setdefault(name, {})[rank] = vote
            for at, name in enumerate(timed, 2 * len(names)):
                self.found.times.setdefault(name, {})[rank] = exchange.float_of(answer[at])
            if answer[-1]:
                self.found.not_finite.add(rank)
        self._surfaces, self._times, self._sums = {}, {}, []


def _fold(surfaces: Sequence[Sequence[Any]]) -> list[list[int]]:
    """Return one digest for each list of tensors; the device is waited for once."""
    if not surfaces:
        return []
    ends: list[Any] = []
    flat: list[Any] = []
    for tensors in surfaces:
        begin = len(flat)
        flat += tensors
        ends.append((begin, len(flat)))
    home = flat[0].device
    each = torch.cat([sign_tensors(flat[begin:end]).to(home) for begin, end in ends])
    whole = sign_tensors([each[begin:end] for begin, end in ends])
    return [[int(word) for word in pair] for pair in whole.tolist()]


def _difference(
    piece: state.Piece, peers: Peers, rows: Sequence[Any], usual: Any, odd: Sequence[int]
) -> tuple[str, tuple[int, ...], tuple[tuple[int, int], ...]]:
    offset = piece.start * piece.tensor.element_size()
    last = piece.size_bytes
    ranges = differing_bytes(usual, rows[odd[0]])
    placed = tuple((offset + start, offset + min(stop, last)) for start, stop in ranges)
    label = f"{piece.surface.removeprefix('state.')} {piece.name}"
    return label, tuple(peers.ranks[at] for at in odd), placed


def _why_not_ready(told: Sequence[Mapping[str, Any]]) -> str:
    """Return one sentence from what every rank told; the same on all, as all have the same."""
    missing = [f"rank {it['rank']}: {', '.join(it['missing'])}" for it in told if it["missing"]]
    if missing:
        more = f" and {len(missing) - 4} more ranks" if len(missing) > 4 else ""  # noqa: PLR2004
        return "; ".join(missing[:4]) + more
    by_rank = {it["rank"]: it for it in told}
    for one in told:
        first = by_rank[one["peers"][0]]
        for key in ("step", "due"):
            if one[key] != first[key]:
                here = f"rank {one['rank']} is at {key} {one[key]}"
                return f"{here}, rank {first['rank']} at {first[key]}"
        for recipe, digest in one["contracts"].items():
            if digest != first["contracts"].get(recipe):
                return f"ranks {first['rank']} and {one['rank']} captured {recipe} in other shapes"
    return "the peers are not ready alike"
