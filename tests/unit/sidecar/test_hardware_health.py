"""The judge of hardware health, by readings and instants alone."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scout.clock import SECOND, Instant
from sidecar.hardware.health import HardwareHealth, HealthCleared, HealthConfig, HealthEvent
from sidecar.hardware.readings import (
    METRICS,
    NODE,
    Device,
    Kind,
    Known,
    Metric,
    NotSupported,
    Reading,
    Severity,
    Unknown,
    Value,
)
from sidecar.hardware.tracks import MOVES

GPU3 = Device(index=3, uuid="GPU-33", pci="0000:3b:00")


class Bench:
    """One judge, and a clock that moves by the seconds a test says."""

    def __init__(self, config: HealthConfig | None = None, device: Device = GPU3) -> None:
        self.health = HardwareHealth(config)
        self.device = device
        self.now_s = 100.0

    @property
    def now(self) -> Instant:
        return Instant(round(self.now_s * SECOND))

    def reading(
        self,
        metric: Metric,
        value: float | Value,
        *,
        source: str = "nvml",
        device: Device | None = None,
        **more: object,
    ) -> Reading:
        value = Known(value) if isinstance(value, int | float) else value
        return Reading(
            source=source,
            device=device or self.device,
            metric=metric,
            value=value,
            at=self.now,
            **more,
        )

    def read(self, after_s: float = 5, /, **values: float | Value) -> tuple[object, ...]:
        self.now_s += after_s
        return self.give(self.reading(Metric(name), value) for name, value in values.items())

    def give(self, readings: Iterable[Reading]) -> tuple[object, ...]:
        return self.health.evaluate(list(readings), self.now)

    def state(self, metric: Metric, index: int = 3) -> Severity:
        device = self.health.snapshot(self.now).gpu(index)
        assert device is not None
        row = device.metric(metric)
        assert row is not None
        return row.severity


def fatal(outcomes: Iterable[object]) -> list[Metric]:
    return [
        outcome.metric
        for outcome in outcomes
        if isinstance(outcome, HealthEvent) and outcome.severity is Severity.FATAL
    ]


def cleared(outcomes: Iterable[object]) -> list[Metric]:
    return [outcome.metric for outcome in outcomes if isinstance(outcome, HealthCleared)]


def test_a_standing_word_that_is_taken_back_once_is_over() -> None:
    """An agent writes each change once; its node would be spoken against for ever."""
    bench = Bench(device=NODE)
    bad = bench.reading(Metric.EXTERNAL, 1, source="file", claim=Severity.FATAL)
    assert fatal(bench.give([bad])) == [Metric.EXTERNAL]
    bench.now_s += 600
    assert bench.give([]) == ()
    bench.give([bench.reading(Metric.EXTERNAL, 1, source="file", claim=Severity.HEALTHY)])
    bench.now_s += 60
    assert cleared(bench.give([])) == [Metric.EXTERNAL]


def test_c26_power_far_below_the_usual_is_remarked_and_convicts_nobody() -> None:
    """Utilization stays at its top in a hang; the one witness that knows better went unheard."""
    bench = Bench()
    assert all(bench.read(power_w=watts) == () for watts in (690, 710, 400) * 8)
    assert bench.health.snapshot(bench.now).remarks == (), "pauses are usual"
    outcomes = [*bench.read(power_w=290), *bench.read(power_w=280)]
    (remark,) = bench.health.snapshot(bench.now).remarks
    assert "GPU 3" in remark
    assert "draws 290 W, 41% of its usual 710 W" in remark
    assert outcomes == []
    assert bench.state(Metric.POWER_W) is Severity.HEALTHY
    bench.now_s += 600
    assert bench.health.snapshot(bench.now).remarks == (), "too old to speak of now"


def test_c26_a_device_that_never_computed_is_not_remarked() -> None:
    """Every idle spare would stand in every incident."""
    bench = Bench()
    for watts in [90] * 20 + [30] * 3:
        bench.read(power_w=watts)
    assert bench.health.snapshot(bench.now).remarks == ()


def test_every_pair_of_states_has_a_row() -> None:
    """A pair without one would end the monitor in the middle of an incident."""
    assert set(MOVES) == {(one, other) for one in Severity for other in Severity}


def test_every_metric_is_described() -> None:
    """A metric without a kind could not be judged or shown."""
    assert set(METRICS) == set(Metric)


@pytest.mark.parametrize(
    ("metric", "well", "bad"),
    [
        (Metric.ECC_UNCORRECTABLE_VOLATILE, 0, 1),
        (Metric.ECC_UNCORRECTABLE_VOLATILE, 7, 8),
        (Metric.ECC_UNCORRECTABLE_AGGREGATE, 4, 5),
        (Metric.REMAP_FAILURE, 0, 1),
        (Metric.SRAM_THRESHOLD_EXCEEDED, 0, 1),
        (Metric.NVLINK_RECOVERY, 0, 10_000),
        (Metric.NVLINK_CRC_DATA, 5, 10_005),
        (Metric.RECOVERY_ACTION, 0, 1),
        (Metric.RECOVERY_ACTION, 0, 2),
        (Metric.QUERY_STUCK_S, 0, 90),
    ],
)
def test_a_fatal_fact_convicts_at_its_first_sight(metric: Metric, well: int, bad: int) -> None:
    """Waiting for a second look at an error that was counted only costs time."""
    bench = Bench()
    first = bench.read(
        **{metric.value: well, "remap_pending": 0, "remap_failure": 0}
        if well
        else {metric.value: well}
    )
    assert fatal(first) == []
    found = fatal(bench.read(**{metric.value: bad}))
    judged = Metric.NVLINK_ERRORS if metric.value.startswith("nvlink") else metric
    assert found == [judged]


@pytest.mark.parametrize(
    ("metric", "well", "precursor"),
    [
        (Metric.ECC_CORRECTABLE_VOLATILE, 0, 150),
        (Metric.REMAP_PENDING, 0, 1),
        (Metric.NVLINK_REPLAY, 0, 150),
        (Metric.NVLINK_CRC_FLIT, 0, 1_000_000),
        (Metric.PCIE_REPLAY, 0, 20),
        (Metric.RECOVERY_ACTION, 0, 4),
        (Metric.QUERY_STUCK_S, 0, 12),
        (Metric.TEMPERATURE_C, 60, 88),
    ],
)
def test_a_precursor_warns_and_convicts_nobody(metric: Metric, well: int, precursor: int) -> None:
    """A job would be stopped for a device that computes correctly."""
    bench = Bench()
    bench.read(**{metric.value: well})
    outcomes = [*bench.read(**{metric.value: precursor}), *bench.read(**{metric.value: precursor})]
    outcomes += bench.read(**{metric.value: precursor})
    assert fatal(outcomes) == []
    assert [outcome.severity for outcome in outcomes] == [Severity.WARNING]


def test_a_fatal_metric_is_said_once_and_taken_back_when_it_recovers() -> None:
    """Said at every poll it hides what is new; never taken back it costs a good node."""
    bench = Bench()
    bench.read(remap_failure=0)
    assert fatal(bench.read(remap_failure=1)) == [Metric.REMAP_FAILURE]
    assert bench.read(remap_failure=1) == ()
    assert bench.read(remap_failure=0) == (), "one good reading is not a recovery"
    outcomes = [outcome for _ in range(8) for outcome in bench.read(remap_failure=0)]
    assert cleared(outcomes) == [Metric.REMAP_FAILURE]
    assert fatal(bench.read(remap_failure=1)) == [Metric.REMAP_FAILURE], "a relapse is news"


def test_a_reset_takes_back_errors_that_were_counted_before_it() -> None:
    """A device that was reset and is well again would stay convicted for ever."""
    bench = Bench()
    bench.read(ecc_uncorrectable_volatile=0, ecc_uncorrectable_aggregate=3)
    found = bench.read(ecc_uncorrectable_volatile=2, ecc_uncorrectable_aggregate=5)
    assert fatal(found) == [Metric.ECC_UNCORRECTABLE_VOLATILE], "one error is one verdict"
    outcomes = [
        outcome
        for _ in range(8)
        for outcome in bench.read(ecc_uncorrectable_volatile=0, ecc_uncorrectable_aggregate=5)
    ]
    assert cleared(outcomes) == [Metric.ECC_UNCORRECTABLE_VOLATILE]


def test_uncorrectable_errors_found_at_the_start_are_fatal_unless_remapping_dealt_with_them() -> (
    None
):
    """Either a broken device serves the next job, or a mended one never does."""
    assert fatal(Bench().read(ecc_uncorrectable_volatile=1))
    assert fatal(Bench().read(ecc_uncorrectable_volatile=1, remap_pending=0, remap_failure=1))
    handled = Bench()
    outcomes = handled.read(ecc_uncorrectable_volatile=1, remap_pending=0, remap_failure=0)
    assert [outcome.severity for outcome in outcomes] == [Severity.WARNING]


@pytest.mark.parametrize("value", [NotSupported(), Unknown("the driver gave no answer")])
@pytest.mark.parametrize(
    "metric",
    [m for m, info in METRICS.items() if info.kind is not Kind.EVENT and not info.node_wide],
)
def test_what_is_not_read_is_neither_well_nor_fatal(metric: Metric, value: Value) -> None:
    """Blindness taken for health misses the fault; taken for a fault it costs every node."""
    bench = Bench()
    for _ in range(40):
        assert bench.read(**{metric.value: value}) == ()
    device = bench.health.snapshot(bench.now).gpu(3)
    assert device is not None
    row = device.metric(metric)
    assert row is not None
    assert row.severity is Severity.UNKNOWN
    assert row.unknown_age_s == 39 * 5
    assert row.reason == value.reason
    assert device.severity is Severity.UNKNOWN


def test_not_seeing_a_broken_device_does_not_mend_it() -> None:
    """The worst faults also silence the telemetry."""
    bench = Bench()
    bench.read(remap_failure=1)
    for _ in range(40):
        assert bench.read(remap_failure=Unknown("no answer")) == ()
    assert bench.state(Metric.REMAP_FAILURE) is Severity.FATAL


def test_a_reading_that_nobody_renews_becomes_unknown_and_shows_its_age() -> None:
    """A source that died would report the health of an hour ago."""
    bench = Bench()
    bench.read(temperature_c=60)
    assert bench.state(Metric.TEMPERATURE_C) is Severity.HEALTHY
    bench.now_s += 600
    device = bench.health.snapshot(bench.now).gpu(3)
    assert device is not None
    assert device.severity is Severity.UNKNOWN, "even before anybody judged again"
    row = device.metric(Metric.TEMPERATURE_C)
    assert row is not None
    assert (row.severity, row.value, row.age_s) == (Severity.UNKNOWN, 60, 600)
    bench.give([])
    assert bench.state(Metric.TEMPERATURE_C) is Severity.UNKNOWN


@pytest.mark.parametrize("period_s", [0.25, 1, 5, 20])
def test_growth_is_judged_per_time_and_not_per_poll(period_s: float) -> None:
    """The same link would be fatal on a node that polls rarely and well on one that polls often."""
    for rate_per_min, expected in ((6_000, Severity.WARNING), (12_000, Severity.FATAL)):
        bench = Bench()
        count = 0.0
        for _ in range(round(180 / period_s)):
            bench.read(period_s, nvlink_recovery=count)
            count += rate_per_min * period_s / 60
        assert bench.state(Metric.NVLINK_ERRORS) is expected


def test_growth_over_a_long_gap_is_averaged() -> None:
    """A sidecar that was stopped for an hour would convict a link for an hour's errors."""
    bench = Bench()
    bench.read(nvlink_crc_data=0)
    bench.read(3600, nvlink_crc_data=30_000)
    assert bench.state(Metric.NVLINK_ERRORS) is Severity.WARNING


def test_links_are_counted_apart_and_judged_together() -> None:
    """A link that cannot be read for a moment would look like a reset and then like growth."""
    bench = Bench()

    def links(counts: dict[int, Value]) -> tuple[object, ...]:
        bench.now_s += 5
        return bench.give(
            bench.reading(Metric.NVLINK_RECOVERY, value, link=link)
            for link, value in counts.items()
        )

    links({0: Known(50_000), 4: Known(90_000)})
    links({0: Known(50_000), 4: Unknown("no answer")})
    assert links({0: Known(50_000), 4: Known(90_000)}) == ()
    outcomes = links({0: Known(55_000), 4: Known(96_000)})
    assert fatal(outcomes) == [Metric.NVLINK_ERRORS]
    assert "link 4" in outcomes[0].message
    device = bench.health.snapshot(bench.now).gpu(3)
    assert device is not None
    row = device.metric(Metric.NVLINK_RECOVERY)
    assert row is not None
    assert (row.value, dict(row.links)) == (151_000, {0: 55_000, 4: 96_000})


def test_a_hot_device_is_convicted_only_when_it_stays_within_the_margin() -> None:
    """One wrong sensor value would stop the job; waiting longer loses the node anyway."""
    bench = Bench()
    assert bench.read(temperature_c=94, temperature_shutdown_c=95) == ()
    assert fatal(bench.read(temperature_c=60, temperature_shutdown_c=95)) == []
    assert fatal(bench.read(temperature_c=93, temperature_shutdown_c=95)) == []
    assert fatal(bench.read(temperature_c=93, temperature_shutdown_c=95)) == [Metric.TEMPERATURE_C]


def test_a_margin_reported_by_the_device_outweighs_a_computed_one() -> None:
    """Newer devices give no shutdown temperature, only what is left."""
    bench = Bench()
    bench.read(temperature_c=70, temperature_margin_c=1)
    assert fatal(bench.read(temperature_c=70, temperature_margin_c=1)) == [Metric.TEMPERATURE_C]
    alone = Bench()
    alone.read(temperature_margin_c=1)
    assert fatal(alone.read(temperature_margin_c=1)) == [Metric.TEMPERATURE_MARGIN_C]


def test_a_held_verdict_says_when_it_wants_the_next_look() -> None:
    """A debounce would take a whole poll interval longer than it must."""
    bench = Bench()
    assert bench.health.next_deadline() is None
    bench.read(device_lost=1)
    assert bench.health.next_deadline() == bench.now + 2 * SECOND
    assert fatal(bench.read(2, device_lost=1)) == [Metric.DEVICE_LOST]
    assert bench.health.next_deadline() is None


def test_a_device_that_comes_back_is_taken_for_reset() -> None:
    """Its Xid and its old error counts would convict it for ever."""
    bench = Bench()
    bench.give([bench.reading(Metric.XID, 79, detail="fallen off the bus")])
    assert bench.state(Metric.XID) is Severity.FATAL
    bench.read(device_lost=1)
    assert fatal(bench.read(device_lost=1)) == [Metric.DEVICE_LOST]
    outcomes = [outcome for _ in range(8) for outcome in bench.read(device_lost=0)]
    assert sorted(cleared(outcomes)) == [Metric.DEVICE_LOST, Metric.XID]


def test_two_sources_of_one_fault_make_one_event() -> None:
    """The kernel log and NVML would be counted as two incidents."""
    bench = Bench()
    nvml = bench.give([bench.reading(Metric.XID, 79)])
    kernel = bench.give(
        [bench.reading(Metric.XID, 79, source="kernel-log", device=Device(pci="00000000:3B:00.0"))]
    )
    assert (fatal(nvml), kernel) == ([Metric.XID], ())


def test_a_source_that_sees_outweighs_one_that_does_not() -> None:
    """A second, blind source would hide what the first one reads."""
    bench = Bench()
    bench.read(temperature_c=60)
    bench.give([bench.reading(Metric.TEMPERATURE_C, Unknown("scrape failed"), source="dcgm")])
    assert bench.state(Metric.TEMPERATURE_C) is Severity.HEALTHY


def test_another_agents_word_holds_until_it_is_taken_back() -> None:
    """A maintenance notice would lapse because it is not repeated."""
    bench = Bench(device=NODE)

    def word(claim: Severity) -> tuple[object, ...]:
        return bench.give([bench.reading(Metric.EXTERNAL, 1, claim=claim, detail="retire by noon")])

    assert fatal(word(Severity.FATAL)) == [Metric.EXTERNAL]
    bench.now_s += 86_400
    assert bench.give([]) == ()
    word(Severity.HEALTHY)
    bench.now_s += 60
    assert cleared(word(Severity.HEALTHY)) == [Metric.EXTERNAL]


def test_limits_that_make_no_sense_are_refused_in_one_sentence() -> None:
    """A mistyped limit would switch a check off without a word."""
    with pytest.raises(ValueError, match="poll_interval_s"):
        HealthConfig(poll_interval_s=0)
    with pytest.raises(ValueError, match="debounce_s must not be negative"):
        HealthConfig(debounce_s=-1)
    with pytest.raises(ValueError, match="nvlink_errors_warn_per_min"):
        HealthConfig(nvlink_errors_warn_per_min=20_000)


def test_names_without_end_do_not_fill_the_memory() -> None:
    """A source that invents devices would grow the daemon until the kernel kills it."""
    bench = Bench()
    for number in range(2000):
        bench.give([bench.reading(Metric.TEMPERATURE_C, 50, device=Device(uuid=f"GPU-{number}"))])
    assert len(bench.health.snapshot(bench.now).devices) <= 257
    assert bench.health.readings_dropped > 1000


_VALUES = st.one_of(
    st.integers(0, 200_000).map(Known),
    st.floats(0, 200, allow_nan=False).map(Known),
    st.just(NotSupported()),
    st.just(Unknown("no answer")),
)
_READINGS = st.tuples(
    st.sampled_from(list(Metric)),
    _VALUES,
    st.sampled_from([NODE, GPU3, Device(index=1), Device(pci="0000:3b:00")]),
    st.sampled_from(["nvml", "dcgm"]),
    st.sampled_from([None, 0, 1]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 100), st.lists(_READINGS, max_size=6)), max_size=25))
def test_any_readings_alternate_between_convicting_and_taking_back(
    polls: list[tuple[float, list[tuple[Metric, Value, Device, str, int | None]]]],
) -> None:
    """A fault said twice, or taken back without having been said, confuses whoever acts on it."""
    bench = Bench()
    standing: set[tuple[str, Metric]] = set()
    for wait_s, readings in polls:
        bench.now_s += wait_s
        outcomes = bench.give(
            bench.reading(metric, value, device=device, source=source, link=link)
            for metric, value, device, source, link in readings
        )
        for outcome in outcomes:
            key = (f"{outcome.device.pci or outcome.device.index}", outcome.metric)
            if isinstance(outcome, HealthCleared):
                standing.remove(key)
            elif outcome.severity is Severity.FATAL:
                assert key not in standing
                standing.add(key)
        for device in bench.health.snapshot(bench.now).devices:
            for row in device.metrics:
                convicted = (f"{device.device.pci or device.device.index}", row.metric) in standing
                assert convicted == (row.severity is Severity.FATAL)
