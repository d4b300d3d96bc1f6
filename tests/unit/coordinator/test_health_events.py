"""What others say of a node's health, and what follows for the job."""

import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.events import Effect, HealthTold, LinkOpened, LinkSpoke, Say, Send
from coordinator.health_events import (
    NOTICES_MAX,
    NOTICES_PER_NODE_MAX,
    HealthNotice,
    HealthRequest,
    HealthRequestError,
    HealthSeverity,
    HealthWord,
    against,
    expired,
    read,
    told,
)
from coordinator.job import JobCore
from coordinator.journal_format import DurableState, decode_state, encode_state
from coordinator.phases import JobPhase
from coordinator.settings import JobSettings
from scout.clock import Instant, seconds
from sidecar.api import PROTOCOL_VERSION, AgentState, Hello, ProgressReport, Start, StatusReport

WALL = 1_700_000_000 * 10**9
FATAL, WARNING, HEALTHY = HealthSeverity
STATUS = "sagemaker.amazonaws.com/node-health-status"
CHECK = "sagemaker.amazonaws.com/deep-health-check-status"


def request(**fields) -> HealthRequest:
    return HealthRequest(**{"node": "n1", "source": "agent", **fields})


def word(now_ns=WALL, **fields) -> HealthWord:
    asked = request(**fields)
    return read(asked, asked.node, now_ns)


def standing(*words: HealthWord) -> tuple[HealthNotice, ...]:
    found: tuple[HealthNotice, ...] = ()
    for one in words:
        found = told(found, one)
    return found


# --- reading ----------------------------------------------------------------------------------


def test_an_event_stands_until_its_source_takes_it_back():
    """A repaired node would stay out of the job for ever."""
    bad = word(severity=FATAL, reason="disk  is\nbroken")
    (notice,) = standing(bad)
    assert (notice.severity, notice.words) == (FATAL, "agent says: disk is broken")
    assert standing(bad, word(clears=True, reason="disk is broken")) == ()
    assert standing(bad, word(clears=True)) == ()
    assert standing(bad, word(severity=HEALTHY)) == ()
    assert standing(bad, word(clears=True, reason="another")) == (notice,)
    assert standing(bad, word(clears=True, source="somebody else")) == (notice,)
    assert standing(bad, word(clears=True, node="n2")) == (notice,)


def test_an_event_may_end_by_itself():
    """After maintenance somebody would have to remember the node."""
    until = dt.datetime.fromtimestamp(WALL / 1e9 + 60, dt.UTC)
    found = standing(word(severity=FATAL, reason="maintenance", until=until))
    assert expired(found, WALL + 59 * 10**9) == (found, ())
    assert expired(found, WALL + 60 * 10**9) == ((), found)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "severity is missing"),
        ({"severity": FATAL}, "reason is missing"),
        ({"severity": FATAL, "reason": "x", "source": " "}, "source is empty"),
        ({"severity": FATAL, "reason": " \n"}, "reason is missing"),
        ({"severity": FATAL, "reason": "x", "clears": True}, "clears takes a word back"),
        ({"severity": FATAL, "reason": "x", "labels": {}}, "not both"),
        (
            {
                "severity": FATAL,
                "reason": "x",
                "until": dt.datetime(2001, 1, 1, tzinfo=dt.UTC),
            },
            "in the past",
        ),
    ],
)
def test_a_request_that_says_nothing_is_refused_with_the_way_out(fields, words):
    """Its sender would believe that the node is out."""
    with pytest.raises(HealthRequestError, match=words):
        word(**fields)


@pytest.mark.parametrize(
    ("labels", "severity"),
    [
        ({STATUS: "Schedulable", CHECK: "Passed"}, None),
        ({STATUS: "Unschedulable"}, FATAL),
        ({STATUS: "UnschedulablePendingReplacement"}, FATAL),
        ({STATUS: "UnschedulablePendingReboot"}, FATAL),
        ({STATUS: "Schedulable", CHECK: "Failed"}, FATAL),
        ({STATUS: "Schedulable", CHECK: "InProgress"}, WARNING),
        ({"kubernetes.io/hostname": "n1"}, None),
    ],
)
def test_the_labels_of_a_health_agent_are_understood(labels, severity):
    """The node would be given ranks although its cluster is about to replace it."""
    found = standing(word(labels=labels))
    assert [notice.severity for notice in found] == ([] if severity is None else [severity])
    bad, well = word(labels={STATUS: "Unschedulable"}), word(labels={STATUS: "Schedulable"})
    assert standing(bad, well) == ()


@pytest.mark.parametrize(
    ("condition", "severity"),
    [
        ({"type": "NvidiaErrorReboot", "status": "True", "reason": "XidHardwareFailure"}, FATAL),
        ({"type": "NvidiaErrorTerminate", "status": "True", "reason": "XidHardware"}, FATAL),
        ({"type": "NvidiaErrorReboot", "status": "True", "reason": "XidUserAppError"}, WARNING),
        ({"type": "NvidiaErrorReboot", "status": "False", "reason": "None"}, None),
        ({"type": "Ready", "status": "True"}, None),
        ({"type": 7, "status": None}, None),
    ],
)
def test_the_conditions_of_a_health_agent_are_understood(condition, severity):
    """A program's own error would drain a node, or a broken node would stay."""
    found = standing(word(conditions=[condition]))
    assert [notice.severity for notice in found] == ([] if severity is None else [severity])


def test_labels_and_conditions_take_back_only_their_own():
    """A label that is well would hide the condition that is not."""
    bad = [{"type": "NvidiaErrorReboot", "status": "True", "reason": "XidHardwareFailure"}]
    found = standing(word(conditions=bad), word(labels={STATUS: "Schedulable"}))
    assert [notice.severity for notice in found] == [FATAL]


def test_a_word_said_again_is_no_news():
    """An agent that polls would fill the log and the journal."""
    again = word(labels={STATUS: "Unschedulable"})
    later = word(WALL + 10**9, labels={STATUS: "Unschedulable"})
    assert standing(again, later) == standing(again)


def test_what_is_kept_is_bounded_and_warnings_make_room_first():
    """A broken agent would fill the journal, or push out the word that takes a node."""
    words = [word(severity=FATAL, reason="broken")]
    words += [word(severity=WARNING, reason=f"hot {number}") for number in range(40)]
    found = standing(*words)
    assert len(found) == NOTICES_PER_NODE_MAX
    assert against(found, "n1") is not None
    many = tuple(
        HealthNotice(node=f"m{number}", source="s", severity=WARNING, reason="r", at_ns=0)
        for number in range(NOTICES_MAX + 5)
    )
    assert len(told(many, words[0])) == NOTICES_MAX


@given(st.dictionaries(st.text(max_size=20), st.text(max_size=20), max_size=5), st.text())
def test_no_text_breaks_the_reading(labels, text):
    """One odd label would cost the coordinator its life."""
    odd = {**labels, STATUS: text, CHECK: text}
    conditions = [{"type": "NvidiaErrorReboot", "status": "True", "reason": text, "message": text}]
    for notice in standing(word(source=f"x{text}", labels=odd, conditions=conditions)):
        assert "\n" not in notice.words
        assert len(notice.words) < 300


# --- what follows -------------------------------------------------------------------------------


class Job:
    """One job core whose nodes do as they are told."""

    def __init__(self, *, nodes=("n1", "n2", "n3"), nnodes=2) -> None:
        settings = JobSettings(job="job", nnodes=nnodes, nproc_per_node=1)
        self.clock = 0.0
        self.core = JobCore(settings, DurableState(job="job"), WALL, self.now)
        self.links = dict(enumerate(nodes, start=1))
        self.generations = dict.fromkeys(nodes, (0, 0))
        self.said: list[str] = []
        for link, node in self.links.items():
            hello = Hello(
                protocol=PROTOCOL_VERSION,
                agent_version="1",
                job="job",
                node=node,
                incarnation="a",
                host=f"host-{node}",
                http_port=1,
                nproc_per_node=1,
                spare=link > nnodes,
            )
            self.do(self.core.handle(LinkOpened(link=link, hello=hello), self.now))
        self.settle()

    @property
    def now(self) -> Instant:
        return Instant(seconds(self.clock))

    @property
    def state(self) -> DurableState:
        return self.core.state

    def tell(self, **fields) -> None:
        event = HealthTold(word=word(WALL + self.now, **fields))
        self.do(self.core.handle(event, self.now))
        self.settle()

    def settle(self) -> None:
        for _ in range(12):
            self.clock += 1
            for link, node in self.links.items():
                started, stopped = self.generations[node]
                report = StatusReport(
                    node=node,
                    incarnation="a",
                    state=AgentState.RUNNING if started > stopped else AgentState.READY,
                    generation=started,
                    stopped_generation=stopped,
                    topology_version=1,
                    rendezvous_port=1,
                )
                self.do(self.core.handle(LinkSpoke(link=link, message=report), self.now))
            self.do(self.core.handle_timer(self.now))

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Say):
                self.said.append(effect.text)
            if isinstance(effect, Send):
                self.obey(effect)

    def obey(self, effect: Send) -> None:
        node, command = self.links[effect.link], effect.command
        started, stopped = self.generations[node]
        if isinstance(command, Start):
            self.generations[node] = (command.generation, stopped)
        elif command.TYPE == "stop":
            self.generations[node] = (started, max(stopped, command.generation))
        elif command.TYPE == "inspect":
            report = ProgressReport(round_id=command.round_id, node=node, ranks=())
            self.do(self.core.handle(LinkSpoke(link=effect.link, message=report), self.now))


@pytest.mark.parametrize("_case", ["C101"])
def test_a_fatal_word_stops_the_job_once_and_moves_its_ranks(_case):
    """Two agents that see one fault would each cost a restart and a spare."""
    job = Job()
    assert job.state.world == ("n1", "n2")
    job.tell(severity=FATAL, reason="will be retired")
    assert job.state.world == ("n3", "n2")
    assert job.state.phase is JobPhase.RUNNING
    assert "agent says: will be retired" in job.state.excluded["n1"]
    assert job.state.generation == 2
    assert len(job.state.restarts) == 1
    job.tell(severity=FATAL, reason="will be retired")
    job.tell(source="another", severity=FATAL, reason="Xid 79")
    assert job.state.generation == 2
    assert job.state.health_counts == {"fatal": 2}


def test_a_fatal_word_about_a_node_without_ranks_only_leaves_it_out():
    """A healthy job would be stopped for a spare."""
    job = Job()
    job.tell(node="n3", severity=FATAL, reason="broken")
    job.tell(node="never-seen", severity=FATAL, reason="broken")
    assert job.state.generation == 1
    assert set(job.state.excluded) == {"n3", "never-seen"}


def test_a_warning_is_shown_and_nothing_else():
    """Every warm node would be drained."""
    job = Job()
    job.tell(severity=WARNING, reason="runs hot")
    assert (job.state.generation, job.state.excluded) == (1, {})
    view = job.core.view(job.now)
    assert [notice.words for notice in view.health] == ["agent says: runs hot"]
    assert view.health_counts == {"warning": 1}
    assert "n1: agent says: runs hot" in job.said


def test_a_node_comes_back_when_its_source_takes_the_word_back():
    """Spares would run out although nothing is broken."""
    job = Job()
    job.tell(node="n3", labels={STATUS: "UnschedulablePendingReboot"})
    assert set(job.state.excluded) == {"n3"}
    job.tell(node="n3", severity=FATAL, source="other", reason="cable")
    job.tell(node="n3", labels={STATUS: "Schedulable"})
    assert "other says: cable" in job.state.excluded["n3"]
    job.tell(node="n3", source="other", clears=True)
    assert job.state.excluded == {}
    assert any("may be given ranks again" in text for text in job.said)


def test_a_node_that_held_ranks_comes_back_too():
    """The incident's own reason must not outlive the word that it was about."""
    job = Job()
    job.tell(severity=FATAL, reason="maintenance")
    assert "n1" in job.state.excluded
    job.tell(clears=True)
    assert job.state.excluded == {}


def test_the_end_of_maintenance_needs_nobody():
    """A node would be forgotten outside."""
    job = Job()
    until = dt.datetime.fromtimestamp((WALL + seconds(job.clock + 30)) / 1e9, dt.UTC)
    job.tell(node="n3", severity=FATAL, reason="maintenance", until=until)
    assert set(job.state.excluded) == {"n3"}
    for _ in range(3):
        job.settle()
    assert job.state.excluded == {}
    assert job.state.health == ()


def test_what_a_person_excluded_stays_out():
    """An agent that says healthy would overrule the person on call."""
    job = Job()
    job.tell(node="n3", severity=FATAL, reason="broken")
    excluded = {"n3": "operator asked to exclude: no"}
    kept = DurableState(job="job", excluded=excluded, health=job.state.health, generation=1)
    core = JobCore(JobSettings(job="job", nnodes=2, nproc_per_node=1), kept, WALL, job.now)
    core.handle(HealthTold(word=word(node="n3", clears=True)), job.now)
    assert core.state.excluded == excluded
    assert core.state.health == ()


def test_words_outlive_a_restart_of_the_coordinator():
    """A node that is being retired would be given ranks by the next coordinator."""
    job = Job()
    job.tell(severity=WARNING, reason="will be retired on Friday")
    again = decode_state(encode_state(job.state))
    assert again.health == job.state.health
    assert again.health_counts == {"warning": 1}
