import pytest

from worker_shim.messages import (
    Ack,
    CheckpointAnswer,
    CheckpointInit,
    CheckpointQuery,
    CheckpointSaved,
    Envelope,
    Heartbeat,
    Init,
    JobFault,
    RankLabels,
    Refusal,
    RendezvousQuery,
    RestartMode,
    most_severe,
    reply_frame,
    worker_frame,
)

ENVELOPE = Envelope(client_id="c", seq=4, generation=2)
AROUND = {"client_id": "c", "seq": 4, "generation": 2, "local_rank": 1}


@pytest.mark.parametrize(
    ("message", "frame"),
    [
        (Init(local_rank=1, pid=9), {"type": "init", "pid": 9, "protocol": 1}),
        (
            JobFault(local_rank=1, reason="oom", restart_mode=RestartMode.JOB),
            {
                "type": "job_fault",
                "reason": "oom",
                "message": "",
                "restart_mode": "job_level_restart",
            },
        ),
        (
            JobFault(local_rank=1, reason="oom", message="m"),
            {"type": "job_fault", "reason": "oom", "message": "m"},
        ),
        (
            RankLabels(local_rank=1, labels={"dp": "0"}),
            {"type": "rank_labels", "labels": {"dp": "0"}},
        ),
        (
            CheckpointInit(local_rank=1, prefix="p", checkpoint_types={"model_checkpoint": 2}),
            {"type": "ckpt_init", "prefix": "p", "checkpoint_types": {"model_checkpoint": 2}},
        ),
        (
            CheckpointSaved(local_rank=1, prefix="p", step=7, path="/c/7"),
            {
                "type": "ckpt_info_update",
                "prefix": "p",
                "step": 7,
                "path": "/c/7",
                "checkpoint_type": "model_checkpoint",
            },
        ),
        (
            CheckpointQuery(local_rank=1, prefix="p", checkpoint_type="data_checkpoint"),
            {"type": "ckpt_info_get", "prefix": "p", "checkpoint_type": "data_checkpoint"},
        ),
        (RendezvousQuery(local_rank=1), {"type": "rdzv_get"}),
        (Heartbeat(local_rank=1), {"type": "heartbeat"}),
    ],
)
def test_worker_messages_have_these_frames(message, frame):
    """Worker and sidecar of two versions would stop understanding each other."""
    assert worker_frame(message, ENVELOPE) == AROUND | frame


@pytest.mark.parametrize(
    ("reply", "frame"),
    [
        (Ack(reply_to=4), {"type": "ack", "reply_to": 4}),
        (Refusal(reply_to=None, reason="no"), {"type": "error", "reason": "no"}),
        (
            CheckpointAnswer(prefix="p", step=7, path="/c/7", reply_to=4),
            {"type": "ckpt_info_get", "prefix": "p", "step": 7, "path": "/c/7", "reply_to": 4},
        ),
        (
            CheckpointAnswer(prefix="p", step=None, path=None, reply_to=4),
            {"type": "ckpt_info_get", "prefix": "p", "reply_to": 4},
        ),
    ],
)
def test_replies_have_these_frames(reply, frame):
    """A worker would wait for an answer that it has already had."""
    assert reply_frame(reply) == frame


def test_the_most_severe_restart_wins():
    """A job that needs new processes would be restarted inside the broken ones."""
    assert most_severe(RestartMode.IN_PROCESS, None, RestartMode.JOB, RestartMode.PROCESS) is (
        RestartMode.JOB
    )
    assert most_severe(None) is None
