"""Messages between sidecar and coordinator, whatever words they carry."""

import orjson

from sidecar.api import UPWARD, AgentState, CheckpointConfirmation, StatusReport
from sidecar.codec import decode, encode


def status(**changes):
    fields = {
        "node": "n",
        "incarnation": "i",
        "state": AgentState.RUNNING,
        "generation": 1,
        "stopped_generation": 0,
        "topology_version": 1,
        "rendezvous_port": 2,
    }
    return StatusReport(**{**fields, **changes})


def test_a_message_comes_back_as_it_was_sent():
    """The two ends would otherwise act on different facts."""
    sent = status(message="ünïcode")
    assert decode(encode(sent), UPWARD) == sent
    assert orjson.loads(encode(sent))["type"] == "status"


def test_a_word_without_utf8_form_does_not_mute_a_node():
    """One odd file name would make a healthy node count as lost."""
    odd = CheckpointConfirmation(prefix="p\udcff", step=2**70, ranks=(0,), paths=("/c/\udcff.pt",))
    heard = decode(encode(status(message="a\udc80b", checkpoints=(odd,))), UPWARD)
    assert heard.message == "a?b"
    assert heard.checkpoints[0].paths == ("/c/?.pt",)
    assert heard.checkpoints[0].step == 2**63 - 1
