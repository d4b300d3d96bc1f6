from coordinator.command_times import ROUNDS_MAX, CommandTimes
from scout.clock import Instant, seconds
from sidecar.api import AgentState, Inspect, StatusReport, Stop
from worker_shim.messages import RestartMode


def at(second: float) -> Instant:
    return Instant(seconds(second))


def stop(generation: int) -> Stop:
    return Stop(generation=generation, restart_mode=RestartMode.PROCESS, reason="r")


def status(stopped: int) -> StatusReport:
    return StatusReport(
        node="n",
        incarnation="i",
        state=AgentState.READY,
        generation=1,
        stopped_generation=stopped,
        topology_version=1,
        rendezvous_port=1,
    )


def test_a_broadcast_lasts_from_its_first_send_to_its_last_answer() -> None:
    """A fast median hides the one node that everybody waits for."""
    times = CommandTimes()
    for link in (1, 2):
        times.sent(link, stop(4), at(10))
    times.sent(2, stop(4), at(11))
    times.sent(3, Inspect(round_id=1), at(10))
    times.heard(1, status(3), at(11))
    times.heard(1, status(4), at(12))
    assert times.broadcasts["stop"].count == 0
    times.heard(2, status(4), at(17), "job-0001")
    assert (times.acks["stop"].count, times.acks["stop"].sum_s) == (2, 2 + 7)
    assert (times.broadcasts["stop"].count, times.broadcasts["stop"].sum_s) == (1, 7)
    (example,) = times.broadcasts["stop"].examples.values()
    assert example.incident == "job-0001"
    assert times.acks["start"].count == 0


def test_who_leaves_before_it_answered_is_missing_and_holds_nobody_up() -> None:
    """A lost node would keep the broadcast open for ever, or end it as if it had obeyed."""
    times = CommandTimes()
    for link in (1, 2):
        times.sent(link, stop(4), at(10))
    times.closed(2, at(11))
    assert times.missing == {"start": 0, "stop": 1}
    times.heard(1, status(4), at(12))
    assert times.broadcasts["stop"].sum_s == 2
    times.sent(1, stop(5), at(20))
    times.closed(1, at(21))
    assert times.broadcasts["stop"].count == 1, "nobody obeyed it"


def test_broadcasts_that_nobody_answers_are_given_up() -> None:
    """A stray that never answers would make the coordinator grow for ever."""
    times = CommandTimes()
    for generation in range(ROUNDS_MAX + 3):
        times.sent(1, stop(generation), at(generation))
    assert times.missing["stop"] == 3
    times.heard(1, status(ROUNDS_MAX + 3), at(50))
    assert times.acks["stop"].count == ROUNDS_MAX
