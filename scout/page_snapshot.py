"""What a progress page adds to what is known of a rank otherwise, as of one instant."""

from dataclasses import replace

from scout.clock import Duration, Instant, since
from scout.hang import RankSnapshot
from scout.progress import Progress


def with_progress(known: RankSnapshot, progress: Progress, now: Instant) -> RankSnapshot:
    """Return ``known`` with what the rank's page said; its instants become ages at ``now``."""
    return replace(
        known,
        step=progress.step,
        phase=progress.phase,
        collective_seq=progress.collective_seq,
        progress_age_ns=_age(progress.progress_ns, now),
        heartbeat_age_ns=_age(progress.beat_ns, now),
        phase_limit_ns=progress.phase_limit_ns,
        phase_started_age_ns=_age(progress.phase_started_ns, now),
        groups=progress.groups,
    )


def _age(then_ns: int | None, now: Instant) -> Duration | None:
    return None if then_ns is None else since(Instant(then_ns), now)
