from tests.simulation.run import simulate


def test_a_run_without_faults_takes_no_action() -> None:
    """A tool that restarts a healthy job costs more than the faults it was bought for."""
    result = simulate(seed=1, nnodes=16, troubles=())
    assert (result.outcome, result.generations, result.incidents) == ("completed", 1, ())
    assert result.commands == {"Start", "Shutdown"}
