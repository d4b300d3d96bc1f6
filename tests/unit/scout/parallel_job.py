"""A training job of dp x tp x pp ranks in which one rank stops: what every rank shows then.

Ranks run programs of blocking operations until nobody can go on.  Numbered as the field does:
tensor-parallel peers next to each other, then data-parallel ones, then pipeline stages.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

from scout.clock import SECOND
from scout.snapshot import GroupPosition, Phase, RankSnapshot

LIMIT_NS = 10 * SECOND


@dataclass(frozen=True)
class Shape:
    dp: int
    tp: int
    pp: int
    layers: int = 1
    microbatches: int = 2
    steps: int = 2

    @property
    def size(self) -> int:
        return self.dp * self.tp * self.pp

    def rank(self, stage: int, replica: int, shard: int) -> int:
        return (stage * self.dp + replica) * self.tp + shard

    def tensor_group(self, rank: int) -> tuple[int, ...]:
        first = rank - rank % self.tp
        return tuple(range(first, first + self.tp))

    def data_group(self, rank: int) -> tuple[int, ...]:
        stage, shard = rank // (self.dp * self.tp), rank % self.tp
        return tuple(self.rank(stage, replica, shard) for replica in range(self.dp))

    def neighbour(self, rank: int, stages: int) -> int | None:
        other = rank + stages * self.dp * self.tp
        return other if 0 <= other < self.size else None


@dataclass(frozen=True)
class Op:
    """One thing a rank does next; ``kind`` is work, collective, send or recv."""

    kind: str
    phase: Phase
    group: tuple[str, tuple[int, ...]] = ("", ())
    name: str = ""
    step: int = 0


def program(shape: Shape, rank: int) -> Iterator[Op]:
    """Yield what a healthy rank does, step by step."""
    for step in range(shape.steps):
        yield Op("work", Phase.DATA, step=step)
        for _ in range(shape.microbatches):
            yield from _pass(shape, rank, step, Phase.FORWARD, came=-1)
        for _ in range(shape.microbatches):
            yield from _pass(shape, rank, step, Phase.BACKWARD, came=1)
        yield from _collective("dp", shape.data_group(rank), Phase.BACKWARD, step)
        yield Op("work", Phase.OPTIMIZER, step=step)
        yield from _collective("world", tuple(range(shape.size)), Phase.OPTIMIZER, step)
        if step % 2:
            yield Op("work", Phase.CHECKPOINT, step=step)
            yield from _collective("world", tuple(range(shape.size)), Phase.CHECKPOINT, step)


def _pass(shape: Shape, rank: int, step: int, phase: Phase, came: int) -> Iterator[Op]:
    before, after = shape.neighbour(rank, came), shape.neighbour(rank, -came)
    if before is not None:
        yield Op("recv", phase, _pair(before, rank), "recv", step)
    for _ in range(shape.layers):
        yield Op("work", phase, step=step)
        yield from _collective("tp", shape.tensor_group(rank), phase, step)
    if after is not None:
        yield Op("send", phase, _pair(rank, after), "send", step)


def _collective(name: str, ranks: tuple[int, ...], phase: Phase, step: int) -> Iterator[Op]:
    if len(ranks) > 1:
        yield Op("collective", phase, (name, ranks), "all_reduce", step)


def _pair(one: int, other: int) -> tuple[str, tuple[int, ...]]:
    """Both directions share a pair: each end counts what it sent and what it waited for."""
    return f"pp:{min(one, other)}-{max(one, other)}", tuple(sorted((one, other)))


@dataclass
class Trace:
    """The job as it stands when nobody can go on.

    ``culprit`` stops for good before its operation number ``stop_at``.
    """

    shape: Shape
    culprit: int
    stop_at: int
    at: dict[int, int] = field(default_factory=dict)
    counts: dict[int, dict[tuple[str, tuple[int, ...]], int]] = field(default_factory=dict)
    blocked: dict[int, Op] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.programs = [list(program(self.shape, rank)) for rank in range(self.shape.size)]
        self.stop_at %= len(self.programs[self.culprit])
        self.counts = {rank: defaultdict(int) for rank in range(self.shape.size)}
        self.at = dict.fromkeys(range(self.shape.size), 0)
        self._arrived: dict[tuple[str, tuple[int, ...]], set[int]] = defaultdict(set)
        self._mail: dict[tuple[tuple[int, ...], int], int] = defaultdict(int)
        """Pair and sender -> messages on their way."""
        front = list(range(self.shape.size))
        while front:
            front += self._run(front.pop())

    def _run(self, rank: int) -> list[int]:
        """Run a rank until it blocks; return whom that woke."""
        woken: list[int] = []
        steps = self.programs[rank]
        while self.at[rank] < len(steps) and not (
            rank == self.culprit and self.at[rank] == self.stop_at
        ):
            op = steps[self.at[rank]]
            entered = rank in self.blocked
            if op.kind != "work" and not entered:
                self.counts[rank][op.group] += 1
            if not self._passes(rank, op, woken):
                self.blocked[rank] = op
                break
            self.blocked.pop(rank, None)
            self.at[rank] += 1
        return woken

    def _passes(self, rank: int, op: Op, woken: list[int]) -> bool:
        if op.kind == "send":
            self._mail[op.group[1], rank] += 1
            woken += [other for other in op.group[1] if self.blocked.get(other, op).kind == "recv"]
        if op.kind == "recv":
            sender = next(other for other in op.group[1] if other != rank)
            if not self._mail[op.group[1], sender]:
                return False
            self._mail[op.group[1], sender] -= 1
        if op.kind == "collective":
            arrived = self._arrived[op.group]
            if rank not in arrived:
                arrived.add(rank)
                if len(arrived) == len(op.group[1]):
                    woken += [other for other in op.group[1] if other != rank]
                    arrived.clear()
                    for other in op.group[1]:
                        self.blocked.pop(other, None)
                        if other != rank:
                            self.at[other] += 1
                    return True
            return False
        return True

    def snapshots(self, random, *, tells_inside: bool) -> list[RankSnapshot]:
        """Return every rank as its node would see it, ages scattered by up to a second."""
        return [self._snapshot(rank, random, tells_inside) for rank in range(self.shape.size)]

    def _snapshot(self, rank: int, random, tells_inside: bool) -> RankSnapshot:
        steps, at = self.programs[rank], self.at[rank]
        op = steps[min(at, len(steps) - 1)]
        inside = self.blocked.get(rank)
        groups = {op.group: op.name for op in steps if op.kind != "work"}
        groups |= {op.group: op.name for op in steps[: at + 1] if op.kind != "work"}
        return RankSnapshot(
            rank=rank,
            node=f"node-{rank // 8}",
            local_rank=rank % 8,
            step=op.step,
            phase=op.phase,
            progress_age_ns=LIMIT_NS + random.randrange(SECOND),
            heartbeat_age_ns=random.randrange(SECOND // 5),
            process_state=random.choice("SR"),
            groups=tuple(
                GroupPosition(
                    name=name,
                    ranks=ranks,
                    seq=self.counts[rank][name, ranks],
                    op=op_name if op_name in ("send", "recv") or tells_inside else "",
                    inside=inside is not None
                    and inside.group == (name, ranks)
                    and (tells_inside or inside.kind == "recv"),
                )
                for (name, ranks), op_name in groups.items()
            ),
        )


SHAPES = [
    Shape(dp, tp, pp)
    for dp, tp, pp in product((1, 2, 3, 4, 8, 16, 64), (1, 2, 4, 8), (1, 2, 4, 8))
    if 2 <= dp * tp * pp <= 1024
]
