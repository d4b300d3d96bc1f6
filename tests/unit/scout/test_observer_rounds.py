"""What an observer makes of the words that it hears, and of those that it does not."""

import json
from dataclasses import replace

import pytest

from scout.clock import SECOND, Instant
from scout.observer.config import ObserverConfig, derived_ports, meeting
from scout.observer.rounds import Rounds
from scout.observer.words import BadWordError, Word, from_plain, to_plain
from scout.report import Place
from scout.snapshot import GroupPosition, Phase, RankSnapshot
from scout.verdict import Attributed

TICK = SECOND // 4
CONFIG = ObserverConfig(
    rank=0,
    world_size=3,
    local_rank=0,
    host="h0",
    run="run-1",
    generation=2,
    pid=1,
    page="/p",
    token=1,
    status="/s",
    stall_timeout_s=10.0,
)


def seen(rank, *, seq=9, age_ns=0, inside=True, **more):
    return RankSnapshot(
        rank=rank,
        node=f"h{rank}",
        local_rank=0,
        step=4,
        phase=Phase.BACKWARD,
        progress_age_ns=age_ns,
        heartbeat_age_ns=0,
        groups=(GroupPosition(name="w", ranks=(0, 1, 2), seq=seq, op="all_reduce", inside=inside),),
        **more,
    )


class Watch:
    """An observer that is told things by hand."""

    def __init__(self):
        self.now = Instant(100 * SECOND)
        self.rounds = Rounds(config=CONFIG, began=self.now)
        self.count = 0

    def hear(self, *words):
        self.count += 1
        for it in words:
            place = Place(rank=it.rank, host=it.node, local_rank=0)
            self.rounds.take(Word(count=self.count, seen=it, place=place), self.now)

    def look(self, *words, ticks=1):
        changed = False
        for _ in range(ticks):
            self.now = Instant(self.now + TICK)
            self.hear(*words)
            changed |= self.rounds.look(self.now)
        return changed

    @property
    def named(self):
        verdict = self.rounds.verdict
        return verdict.ranks if isinstance(verdict, Attributed) else verdict


LATE = seen(1, seq=8, inside=False, age_ns=11 * SECOND)
WAITING = [seen(rank, age_ns=11 * SECOND) for rank in (0, 2)]
MOVING = [seen(rank, age_ns=SECOND, inside=False) for rank in range(3)]


def test_a_stall_is_reported_once_two_looks_agree_and_withdrawn_when_it_ends():
    """One look at a bad moment would raise an alarm, and one that is over would stay for good."""
    watch = Watch()
    watch.look(*MOVING, ticks=4)
    assert not watch.look(LATE, *WAITING)
    assert watch.look(LATE, *WAITING)
    assert watch.named == (1,)
    assert not watch.look(LATE, *WAITING, ticks=4)
    assert watch.look(*MOVING, ticks=2)
    assert watch.named is None


def test_words_from_before_the_stall_build_no_verdict():
    """The last word of a rank that entered the collective since would convict it."""
    watch = Watch()
    old = seen(2, seq=8, inside=False, age_ns=7 * SECOND)
    watch.look(old, seen(0, age_ns=9 * SECOND), seen(1, age_ns=9 * SECOND))
    watch.look(seen(0, age_ns=10 * SECOND), seen(1, age_ns=10 * SECOND), ticks=8)
    assert watch.named is None


def test_a_rank_that_fell_silent_is_named_with_its_last_place():
    """The dead send nothing, and their silence must not hide them."""
    watch = Watch()
    watch.look(*MOVING, ticks=4)
    for age in range(1, 60):
        watch.look(*(seen(rank, age_ns=age * TICK) for rank in (0, 2)))
    assert watch.named == (1,)
    assert "last seen" in watch.rounds.verdict.why


def test_nobody_is_judged_before_everybody_was_heard_of():
    """A rank that starts late would be called dead at every start."""
    watch = Watch()
    watch.look(*WAITING, ticks=20)
    assert watch.named is None
    assert watch.rounds.missing(watch.now) == (1,)


def test_a_rank_that_never_joins_is_named_in_the_end():
    """A rank that died at its start would be waited for without end."""
    watch = Watch()
    watch.look(*WAITING, ticks=4 * 121)
    assert watch.named == (1,)


def test_a_word_survives_its_way_over_the_wire():
    """What a rank says would arrive as something else, or not at all."""
    word = Word(
        count=3,
        seen=replace(LATE, process_state="D", phase_limit_ns=5, stall_limit_ns=7),
        place=Place(rank=1, host="h", local_rank=0, gpu=3),
        port=99,
    )
    assert from_plain(json.loads(json.dumps(to_plain(word)))) == word


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        {},
        {"count": 1},
        {
            **to_plain(Word(count=1, seen=LATE, place=Place(rank=1, host="h", local_rank=0))),
            "count": "x",
        },
        {
            **to_plain(Word(count=1, seen=LATE, place=Place(rank=1, host="h", local_rank=0))),
            "seen": {},
        },
    ],
)
def test_a_strangers_word_is_refused(body):
    """Whoever finds the port would end the observer."""
    with pytest.raises(BadWordError):
        from_plain(body)


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"address": "a", "port": 5, "folder": "/f"}, ("a", 5, None)),
        ({"address": None, "port": 5, "folder": "/f"}, ("master", 5, None)),
        ({"address": "a", "port": None, "folder": None}, ("a", None, None)),
        ({"address": None, "port": None, "folder": "/f"}, (None, None, "/f")),
        ({"address": None, "port": None, "folder": None}, ("master", None, None)),
    ],
)
def test_where_observers_meet_follows_from_what_is_given(given, where):
    """Observers that look in different places never find one another."""
    assert meeting(**given, fallback="master") == where


def test_a_port_belongs_to_one_run_and_generation():
    """The observers of a restarted job would talk to those that are just ending."""
    assert derived_ports("a", 1) == derived_ports("a", 1)
    assert len({derived_ports("a", 1), derived_ports("a", 2), derived_ports("b", 1)}) == 3
    assert all(1024 < port < 32768 for port in derived_ports("a", 1))


def test_only_members_of_the_run_know_its_key():
    """The observers of another job on the same port would be believed."""
    keys = {
        replace(CONFIG, **more).key
        for more in ({}, {"run": "x"}, {"generation": 3}, {"secret": "s"}, {"world_size": 4})
    }
    assert len(keys) == 5
    assert replace(CONFIG, rank=2, host="other").key == CONFIG.key
