"""What `outrider status` says of the limits by which silence is judged."""

from coordinator.cli.status import stall_limits


def ranks(*armed):
    return [{"stall_limit_ns": 10**9, "stall_armed": it} for it in armed]


def test_until_limits_are_armed_the_status_says_so():
    """A job that hangs in its first minutes is found after the job's own limit."""
    assert stall_limits([{"ranks": [{"stall_limit_ns": None, "stall_armed": False}]}]) == ""
    told = stall_limits([{"ranks": ranks(False, True)}, {"ranks": ranks(False)}])
    assert told == "learned or declared for 1 of 3 ranks, the job's own for the others"
    assert stall_limits([{"ranks": ranks(True)}]) == "learned or declared for 1 of 1 rank"
