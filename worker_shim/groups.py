"""How far this rank got in each process group, counted by torch itself.

A group's sequence number grows with every collective, those that DDP's reducer or FSDP issue in
C++ included, and may be read while the training thread waits in one: that is what the background
thread does.  What the last collective was is known for those issued from Python; behind them the
number of others since is part of the fingerprint.  Torch's names for this are private: where one
is missing, the page says less.

Messages between two ranks have no sequence number of torch's, so they are counted here.
"""

import hashlib
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from scout.page_layout import GROUPS_MAX, OPERATION_CODES, PAIRS_MAX, GroupWords
from worker_shim.patching import imported

SAMPLE_TRIES_MAX: Final = 3
"""A count that moves while it is looked at is looked at again; one that stands still is what a
judgement is about."""
DIGEST_MASK: Final = (1 << 63) - 2
"""A digest fits the page's 63 bits with one to spare, and zero stays free for "not known"."""

_OUTSIDE_PYTHON: Final = OPERATION_CODES["issued outside Python"]
_UNREADABLE: Final = (AttributeError, KeyError, RuntimeError, TypeError, ValueError)


@dataclass(slots=True, eq=False)
class Position:
    """This rank in one group.  Written by the thread that communicates, read by the other.

    ``settled`` is the count when the last collective issued from Python had been issued.
    ``besides`` is what torch counts that is no collective of the whole group: messages between two
    of its members, and what a monitored barrier does inside.
    """

    group: int
    name: str
    ranks: tuple[int, ...]
    in_group_order: tuple[int, ...]
    calls: int = 0
    besides: int = 0
    settled: int | None = None
    fingerprint: int | None = None
    operation: int = 0
    inside: bool = False


class Groups:
    """The process groups that this process is a member of, and its pairs."""

    def __init__(self, recorded_counts: Callable[[int], Mapping[str, int]]) -> None:
        self._recorded_counts = recorded_counts
        self._positions: weakref.WeakKeyDictionary[Any, Position] = weakref.WeakKeyDictionary()
        self._pairs: weakref.WeakKeyDictionary[Any, dict[int, Position]] = (
            weakref.WeakKeyDictionary()
        )
        self._adding = threading.Lock()

    def of(self, group: Any) -> Position:
        """Return the position in a process group of torch's.  Raises what torch raises."""
        known = self._positions.get(group)
        if known is not None:
            return known
        distributed = imported("torch.distributed.distributed_c10d")
        assert distributed is not None, "a process group exists"
        members = tuple(int(it) for it in distributed.get_process_group_ranks(group))
        made = _position(str(group.group_name), members)
        with self._adding:
            return self._positions.setdefault(group, made)

    def pair(self, group: Any, peer: int) -> Position | None:
        """Return the position towards ``peer`` (its rank in ``group``); None beyond the bound."""
        pairs = self._pairs.get(group)
        if pairs is None:
            with self._adding:
                pairs = self._pairs.setdefault(group, {})
        known = pairs.get(peer)
        if known is None and len(pairs) < PAIRS_MAX:
            whole = self.of(group)
            both = (whole.in_group_order[peer], whole.in_group_order[int(group.rank())])
            name = f"{whole.name}:{min(both)}-{max(both)}"
            known = pairs.setdefault(peer, _position(name, both))
        return known

    def untold(self) -> Position:
        """Return a position that no page tells of: the peer is not known, or one too many."""
        return Position(group=0, name="", ranks=(), in_group_order=())

    def sample(
        self, now_ns: int, *, with_fingerprints: bool
    ) -> tuple[int | None, list[GroupWords]]:
        """Return the default group's count, and every group's words, the default group first.

        For the background thread.  No group of torch's is kept alive by this.
        """
        distributed = imported("torch.distributed.distributed_c10d")
        if distributed is None:
            return None, []
        try:
            if not distributed.is_initialized():
                return None, []
            default = distributed._get_default_group()  # noqa: SLF001 - there is no public name
            others = [it for it in list(distributed._world.pg_map) if it is not default]  # noqa: SLF001 - there is no public list
        except _UNREADABLE:
            return None, []
        words: list[GroupWords] = []
        for group in [default, *others][:GROUPS_MAX]:
            words += self._words(group, now_ns, with_fingerprints)
        count = self.entered(default)
        if count is None and words:
            count = self._recorded_counts(now_ns).get(words[0].name)
        return count, words[:GROUPS_MAX]

    def entered(self, group: Any) -> int | None:
        """Return how many collectives of the whole group this rank entered, or None.

        Gloo counts messages between two members as well, of which every member has its own number.
        """
        count, position = sequence_number(group), self._positions.get(group)
        return count if count is None or position is None else count - position.besides

    def _words(self, group: Any, now_ns: int, with_fingerprints: bool) -> Iterable[GroupWords]:
        try:
            position = self.of(group)
        except _UNREADABLE:
            return
        if self.entered(group) is None:
            # What the record says is as old as the last look at it: a count, and no fingerprint.
            recorded = self._recorded_counts(now_ns).get(position.name, 0)
            words = _group_words(position, None, with_fingerprints=False)
            yield replace(words, seq=max(recorded, words.seq))
            return
        for _ in range(SAMPLE_TRIES_MAX):
            count, calls = self.entered(group), position.calls
            words = _group_words(position, count, with_fingerprints)
            if calls == position.calls and count == self.entered(group):
                break
        else:
            # Count and fingerprint may be of two collectives: nobody is compared by such a pair.
            words = replace(words, fingerprint=None, operation=0)
        yield words
        for pair in list(self._pairs.get(group, {}).values()):
            yield _group_words(pair, None, with_fingerprints=False)


def _group_words(position: Position, count: int | None, with_fingerprints: bool) -> GroupWords:
    fingerprint, operation = position.fingerprint, position.operation
    since = 0 if count is None else count - (position.settled or 0)
    if since > 0:
        fingerprint = digest(f"{fingerprint}+{since}")
        operation = _OUTSIDE_PYTHON
    seq = position.calls if count is None else count
    if since < 0 and position.inside and position.settled is not None:
        seq = position.settled  # it is in one that torch has not counted yet, or does not count
    elif since < 0:
        fingerprint = None
    return GroupWords(
        group=position.group,
        name=position.name,
        ranks=position.ranks,
        seq=seq,
        fingerprint=fingerprint if with_fingerprints else None,
        operation=operation,
        inside=position.inside,
    )


def sequence_number(group: Any) -> int | None:
    """Return how many collectives this rank entered in ``group``, or None.

    A group of several backends has a number in each; their sum grows with every collective too.
    """
    try:
        number = group._get_sequence_number_for_group()  # noqa: SLF001 - there is no public name
    except _UNREADABLE:
        return _sum_of_backends(group)
    return number if isinstance(number, int) and number >= 0 else None


def _sum_of_backends(group: Any) -> int | None:
    try:
        backends: list[Any] = []
        for device in group._device_types:  # noqa: SLF001 - there is no public name
            backend = group._get_backend(device)  # noqa: SLF001 - same
            if not any(it is backend for it in backends):
                backends.append(backend)
        numbers = [int(it._get_sequence_number_for_group()) for it in backends]  # noqa: SLF001 - same
    except _UNREADABLE:
        return None
    return sum(numbers) if numbers and min(numbers) >= 0 else None


def digest(text: str) -> int:
    """Return a number from 1 up that every process computes alike."""
    whole = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
    return (whole & DIGEST_MASK) or 1


def _position(name: str, members: Sequence[int]) -> Position:
    ranks = tuple(sorted(members))
    return Position(
        group=digest(f"{name}|{ranks}"), name=name, ranks=ranks, in_group_order=tuple(members)
    )
