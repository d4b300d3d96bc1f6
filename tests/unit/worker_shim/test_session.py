from hypothesis import given
from hypothesis import strategies as st

from worker_shim.framing import BadFrame
from worker_shim.messages import (
    Ack,
    CheckpointAnswer,
    CheckpointQuery,
    CheckpointSaved,
    JobFault,
    Refusal,
    reply_frame,
)
from worker_shim.session import OWED_MAX, Outbox, StepCounter, parse_reply


def outbox():
    return Outbox(client_id="c", generation=3, local_rank=1, pid=99)


def saved(step):
    return CheckpointSaved(local_rank=1, prefix="p", step=step, path=f"/c/{step}")


def said(box):
    """Return the types of what is sent now, with the step where there is one."""
    return [(it["type"], it.get("step")) for it in box.frames()]


def ack(seq):
    return reply_frame(Ack(reply_to=seq))


def test_a_connection_starts_by_saying_who_speaks():
    """The sidecar could not tie what follows to a rank."""
    box = outbox()
    box.owe(saved(1))
    box.opened()
    first, second = box.frames()
    assert (first["type"], first["local_rank"], first["pid"], first["seq"]) == ("init", 1, 99, 1)
    assert (second["type"], second["generation"], second["seq"]) == ("ckpt_info_update", 3, 2)


def test_a_report_is_sent_once_per_connection_until_it_is_answered():
    """A checkpoint would be forgotten with the sidecar that died before it answered."""
    box = outbox()
    box.opened()
    box.owe(saved(1))
    assert said(box) == [("init", None), ("ckpt_info_update", 1)]
    assert said(box) == []
    box.closed()
    box.opened()
    assert said(box) == [("init", None), ("ckpt_info_update", 1)]
    box.heard(ack(4))
    assert box.owed == 0
    box.opened()
    assert said(box) == [("init", None)]


def test_labels_and_series_are_told_again_to_a_sidecar_that_came_back():
    """A restarted sidecar would not know where its ranks stand."""
    box = outbox()
    box.opened()
    box.use_prefix("p")
    box.use_prefix("p")
    box.set_labels({"dp": "1"})
    box.set_labels({"dp": "2"})
    assert said(box) == [("init", None), ("ckpt_init", None), ("rank_labels", None)]
    box.opened()
    frames = list(box.frames())
    assert [it["type"] for it in frames] == ["init", "ckpt_init", "rank_labels"]
    assert frames[-1]["labels"] == {"dp": "2"}


def test_an_answer_to_an_older_connection_settles_nothing():
    """A report would be forgotten that the present sidecar never had."""
    box = outbox()
    box.owe(saved(1))
    box.opened()
    list(box.frames())
    box.opened()
    box.heard(ack(2))
    assert box.owed == 1


def test_the_queue_is_bounded_and_drops_the_oldest():
    """A job without a sidecar would fill its memory."""
    box = outbox()
    first = box.owe(saved(0))
    for step in range(1, OWED_MAX + 1):
        box.owe(saved(step))
    assert box.owed == OWED_MAX
    assert not box.is_owed(first)
    box.opened()
    assert said(box)[1] == ("ckpt_info_update", 1)


def test_a_question_is_settled_by_its_answer():
    """A rank would start from another checkpoint than its peers."""
    box = outbox()
    ticket = box.owe(CheckpointQuery(local_rank=1, prefix="p"))
    box.opened()
    list(box.frames())
    answer = CheckpointAnswer(prefix="p", step=5, path="/c/5", reply_to=2)
    heard = box.heard(reply_frame(answer))
    assert (heard.reply, heard.ticket) == (answer, ticket)
    assert not box.is_owed(ticket)


def test_a_refused_report_is_not_repeated_and_is_said_to_have_been():
    """The sidecar would be asked for ever, and nobody would know why nothing is recorded."""
    box = outbox()
    box.opened()
    box.owe(JobFault(local_rank=1, reason="x"))
    list(box.frames())
    heard = box.heard(reply_frame(Refusal(reply_to=2, reason="stale generation 3")))
    assert heard.note == "the sidecar refused: stale generation 3"
    assert box.owed == 0
    assert box.rejected is None


def test_a_refused_process_says_nothing_more():
    """A worker of an older generation would go on talking."""
    box = outbox()
    box.opened()
    list(box.frames())
    box.owe(saved(1))
    heard = box.heard(reply_frame(Refusal(reply_to=1, reason="not yours")))
    assert heard.note == "the sidecar refused this process: not yours"
    assert box.rejected == "not yours"
    assert said(box) == []


def test_an_unreadable_answer_is_noted_and_changes_nothing():
    """One bad frame would cost a report, or the training process."""
    box = outbox()
    box.owe(saved(1))
    assert box.heard(BadFrame(reason="frame is empty")).note is not None
    assert box.heard({"type": "news", "reply_to": 1}).reply is None
    assert box.owed == 1


@given(
    st.dictionaries(
        st.sampled_from(["type", "reply_to", "prefix", "path", "step", "reason"]),
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.sampled_from(["ack", "error", "ckpt_info_get", "p"]),
            st.lists(st.integers()),
        ),
    )
)
def test_no_answer_can_raise(frame):
    """A newer sidecar's answer would end training."""
    reply = parse_reply(frame)
    if isinstance(reply, CheckpointAnswer):
        assert reply.step is None or isinstance(reply.step, int)
    box = outbox()
    box.opened()
    list(box.frames())
    box.heard(frame)


@given(st.lists(st.sampled_from(["save", "open", "send", "close", "answer"]), max_size=60))
def test_every_report_arrives_or_is_owed_still(moves):
    """A checkpoint that is on disk would never be chosen."""
    box, made, arrived, unanswered = outbox(), 0, set(), []
    for move in moves:
        if move == "save":
            made += 1
            box.owe(saved(made))
        elif move == "open":
            box.opened()
            unanswered = []
        elif move == "close":
            box.closed()
            unanswered = []
        elif move == "send":
            unanswered += list(box.frames())
        elif unanswered:
            frame = unanswered.pop(0)
            if frame["type"] == "ckpt_info_update":
                arrived.add(frame["step"])
            box.heard(ack(frame["seq"]))
    box.opened()
    arrived |= {frame["step"] for frame in box.frames() if frame["type"] == "ckpt_info_update"}
    assert arrived == set(range(1, made + 1))


def test_steps_count_from_what_the_script_last_named():
    """Steps lost in a restart would be reported wrong by a whole run."""
    steps = StepCounter()
    assert [steps.advance(), steps.advance()] == [1, 2]
    steps.anchor(40)
    assert steps.step == 40
    assert steps.advance() == 41
    steps.anchor(0)
    assert steps.advance() == 1
