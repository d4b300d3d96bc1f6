"""The job spec: what a person writes about a job, under the HyperPod resource's field names.

Decides what is a valid spec, before anything starts, and says what of it is not acted on.  Both
a bare spec and the whole Kubernetes resource (``apiVersion``, ``kind``, ``metadata``, ``spec``)
are read.  It knows nothing of nodes; `coordinator.settings` is what the core gets of it.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from coordinator.backoff import BackoffPolicy
from coordinator.escalation import RestartPolicy
from coordinator.exit_causes import ExitPolicy, exit_number
from coordinator.membership import NODES_MAX
from coordinator.observing import NEVER_OBSERVED
from coordinator.offenders import OffenderPolicy
from coordinator.settings import STOP_TIMEOUT_S, JobSettings
from coordinator.spec_errors import SpecError, convert, parse_yaml, refusal
from coordinator.spec_scout import ScoutPolicy
from coordinator.wording import one_line
from sidecar.api import FaultKind
from sidecar.given_files import GivenFileError, read_given_text
from sidecar.logs.rules import RuleError, parse_rules

SPEC_BYTES_MAX: Final = 1 << 20
"""Largest spec file; etcd takes no larger object either."""

KINDS: Final = ("HyperPodPyTorchJob", "HyperPodPytorchJob")
"""Both spellings are in use."""

NPROC_MAX: Final = 1024
"""Workers of one node; far above any machine, and below a slip of the finger."""

OBSERVABLE: Final = tuple(kind.value for kind in FaultKind if kind not in NEVER_OBSERVED)
"""Detectors that may be wrong: all but those that tell of an end or of a person's wish."""

_FIXED: Final = "the number of a job's nodes does not change while it runs"
_ALL_END: Final = "no worker and no sidecar outlives its job"

Name = Annotated[
    str, Meta(min_length=1, max_length=63, pattern="^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")
]
"""A name that fits a label, a file name and a store key."""

Pattern = Annotated[str, Meta(min_length=1, max_length=4096)]
Count = Annotated[int, Meta(ge=0, le=1_000_000)]
Seconds = Annotated[float, Meta(gt=0, le=31_536_000)]
"""At most a year: what is longer is a unit gone wrong."""


class ReplicaSpec(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"
):
    """A group of equal nodes.

    ``spares`` is how many more are wanted to stand by.  ``template`` is the resource's pod
    template: the cluster makes pods of it, in which each node starts its own workers.
    """

    name: Name
    replicas: Annotated[int, Meta(ge=0, le=NODES_MAX)]
    spares: Annotated[int, Meta(ge=0, le=NODES_MAX)] = 0
    max_replicas: Annotated[int, Meta(ge=0, le=NODES_MAX)] | None = None
    template: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.max_replicas not in (None, self.replicas):
            raise refusal("maxReplicas", f"is not {self.replicas}, as replicas is: {_FIXED}")


class RestartPolicySpec(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"
):
    """How restarts are counted; ``evalPeriodSeconds`` is the width of the sliding window."""

    eval_period_seconds: Seconds = RestartPolicy().window_s
    num_restart_before_full_job_restart: Count | None = None
    max_full_job_restarts: Count | None = None
    max_num_repeat_offenders_to_avoid: Count | None = None
    scale_up_snooze_time_in_seconds: Count = 0

    def __post_init__(self) -> None:
        if self.scale_up_snooze_time_in_seconds:
            raise refusal("scaleUpSnoozeTimeInSeconds", f"must be 0: {_FIXED}")


class RunPolicy(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"
):
    """Budgets, deadlines and log rules.  ``jobMaxRetryCount`` counts within the window.

    ``barrierDeadlineSeconds`` is a rank's time to leave its restartable block.
    """

    job_max_retry_count: Count = RestartPolicy().retries_max
    restart_policy: RestartPolicySpec = RestartPolicySpec()
    clean_pod_policy: Literal["All", "OnlyComplete", "None"] = "All"
    active_deadline_seconds: Seconds | None = None
    startup_deadline_seconds: Seconds = 1800.0
    barrier_deadline_seconds: Annotated[float, Meta(ge=0.1, le=600)] = 10.0
    fault_deadline_seconds: Seconds | None = None
    ttl_seconds_after_finished: Annotated[int, Meta(ge=-1)] | None = None
    suspend: bool = False
    workload_mode: str | None = None
    log_monitoring_configuration: tuple[dict[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.suspend:
            raise refusal("suspend", "a job cannot be held back here; start it later instead")
        if self.clean_pod_policy != "All":
            reason = f"{self.clean_pod_policy} is not possible: {_ALL_END}; write All"
            raise refusal("cleanPodPolicy", reason)
        if self.workload_mode is not None:
            raise refusal("workloadMode", f"is not possible: {_FIXED}; take it out")
        try:
            parse_rules(self.log_monitoring_configuration)
        except RuleError as error:
            index = _place(self.log_monitoring_configuration, error.rule)
            field = f"logMonitoringConfiguration[{index}].{error.field}"
            raise refusal(field, error.reason) from error


class ProgressPolicy(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"
):
    """When a job without progress is looked at, and how long the look may take.

    ``stallTimeoutSeconds`` is the longest silence of a rank; 0 switches the judgement of stalls
    off.  A rank's own history may make it shorter for a phase that it knows well: to
    ``stallFactor`` times the 99th percentile of the silences of that phase, never to less than
    ``stallTimeoutMinSeconds``.  A minimum that is not below the longest silence switches learning
    off.  ``evidenceBudgetSeconds`` is the longest wait for a last look at ranks that are about to
    be stopped; 0 stops them without one.
    """

    stall_timeout_seconds: Annotated[float, Meta(ge=0, le=31_536_000)] = 300.0
    stall_timeout_min_seconds: Seconds = 60.0
    stall_factor: Annotated[float, Meta(ge=1, le=1000)] = 10.0
    settle_milliseconds: Annotated[int, Meta(ge=0, le=60_000)] = 300
    inspect_timeout_milliseconds: Annotated[int, Meta(ge=1, le=60_000)] = 1000
    evidence_budget_seconds: Annotated[float, Meta(ge=0, le=60)] = 5.0


class ExitPolicySpec(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"
):
    """What exit statuses decide, and how long a restart that repeats waits.

    A status is an exit code from 0 to 255 or a signal's name.
    """

    never_restart: tuple[int | str, ...] = ()
    always_restart: tuple[int | str, ...] = ()
    preempted: tuple[int | str, ...] = ("SIGTERM",)
    backoff_seconds: Annotated[float, Meta(ge=0, le=3600)] = BackoffPolicy().first_s
    backoff_max_seconds: Annotated[float, Meta(ge=0, le=86_400)] = BackoffPolicy().most_s

    def __post_init__(self) -> None:
        owners: dict[int, str] = {}
        for field in ("never_restart", "always_restart", "preempted"):
            head, *tail = field.split("_")
            name = head + "".join(part.title() for part in tail)
            for index, value in enumerate(getattr(self, field)):
                try:
                    number = exit_number(value)
                except ValueError as error:
                    raise refusal(f"{name}[{index}]", str(error)) from None
                if owners.setdefault(number, name) != name:
                    raise refusal(f"{name}[{index}]", f"{value} stands in {owners[number]} too")

    def exits(self) -> ExitPolicy:
        """Return what exit statuses decide."""
        return ExitPolicy(
            never=frozenset(map(exit_number, self.never_restart)),
            always=frozenset(map(exit_number, self.always_restart)),
            preempted=frozenset(map(exit_number, self.preempted)),
        )


class NodePolicy(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"
):
    """When a silent node is lost, and how long the job waits for enough nodes."""

    lease_seconds: Annotated[float, Meta(ge=1, le=86_400)] = 15.0
    wait_for_nodes_seconds: Seconds = 600.0
    stop_grace_seconds: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    offender_half_life_seconds: Seconds = OffenderPolicy().half_life_s
    excluded_share_max: Annotated[float, Meta(ge=0, le=1)] = OffenderPolicy().excluded_share_max


class DetectorPolicy(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"
):
    """Which detectors are on probation: what they say is noted and stops nothing."""

    observe: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for index, name in enumerate(self.observe):
            if name not in OBSERVABLE:
                known = ", ".join(OBSERVABLE)
                raise refusal(f"observe[{index}]", f"{name!r} is no detector; there are {known}")


class JobSpec(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"
):
    """A whole job.

    ``nprocPerNode`` is the number of workers of each node.  "auto" stands for one: the
    coordinator sees no device, and all nodes must have the same number, so it is not guessed
    from whichever machine asks first.
    """

    name: Name
    nproc_per_node: int | str = "auto"
    replica_specs: Annotated[tuple[ReplicaSpec, ...], Meta(min_length=1)]
    run_policy: RunPolicy = RunPolicy()
    progress_policy: ProgressPolicy = ProgressPolicy()
    node_policy: NodePolicy = NodePolicy()
    scout: ScoutPolicy = ScoutPolicy()
    exit_policy: ExitPolicySpec = ExitPolicySpec()
    detector_policy: DetectorPolicy = DetectorPolicy()
    elastic_policy: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.elastic_policy is not None:
            raise refusal("elasticPolicy", f"is not possible: {_FIXED}; take it out")
        if _workers(self.nproc_per_node) is None:
            raise refusal(
                "nprocPerNode",
                f"must be a whole number from 1 to {NPROC_MAX} or auto, but is "
                f"{one_line(repr(self.nproc_per_node), 40)}; write the number of workers of a node",
            )
        names = [replica.name for replica in self.replica_specs]
        if len(set(names)) < len(names):
            raise refusal("replicaSpecs", "two have the same name; give each its own")
        if not 1 <= self.nnodes <= NODES_MAX:
            raise refusal(
                "replicaSpecs",
                f"the replicas add up to {self.nnodes} nodes; a job has 1 to {NODES_MAX}",
            )

    @property
    def nnodes(self) -> int:
        """Nodes that hold ranks, spares not counted."""
        return sum(replica.replicas for replica in self.replica_specs)

    @property
    def spares(self) -> int:
        """Nodes that stand by."""
        return sum(replica.spares for replica in self.replica_specs)

    def nproc(self, given: int | None = None) -> int:
        """Return the workers of a node; ``given`` is the command line's and wins."""
        return given or _workers(self.nproc_per_node) or 1

    def log_rules(self) -> tuple[dict[str, Any], ...]:
        """Return the log rules under their written names, without what was left out."""
        return self.run_policy.log_monitoring_configuration

    def settings(self, nproc: int | None = None) -> JobSettings:
        """Return what the core needs; ``nproc`` is the command line's number of workers."""
        run, progress, nodes = self.run_policy, self.progress_policy, self.node_policy
        return JobSettings(
            job=self.name,
            nnodes=self.nnodes,
            nproc_per_node=self.nproc(nproc),
            spares=self.spares,
            log_rules=self.log_rules(),
            scout=self.scout.config(),
            restart=RestartPolicy(
                retries_max=run.job_max_retry_count,
                window_s=run.restart_policy.eval_period_seconds,
                exits=self.exit_policy.exits(),
                backoff=BackoffPolicy(
                    first_s=self.exit_policy.backoff_seconds,
                    most_s=self.exit_policy.backoff_max_seconds,
                ),
                before_job_max=run.restart_policy.num_restart_before_full_job_restart,
                job_max=run.restart_policy.max_full_job_restarts,
            ),
            stall_timeout_s=progress.stall_timeout_seconds,
            stall_timeout_min_s=progress.stall_timeout_min_seconds,
            stall_factor=progress.stall_factor,
            settle_s=progress.settle_milliseconds / 1e3,
            inspect_timeout_s=progress.inspect_timeout_milliseconds / 1e3,
            evidence_budget_s=progress.evidence_budget_seconds,
            lease_s=nodes.lease_seconds,
            stop_grace_s=nodes.stop_grace_seconds,
            stop_timeout_s=nodes.stop_grace_seconds + STOP_TIMEOUT_S,
            wait_for_nodes_s=nodes.wait_for_nodes_seconds,
            startup_deadline_s=run.startup_deadline_seconds,
            offenders=OffenderPolicy(
                half_life_s=nodes.offender_half_life_seconds,
                avoid_max=run.restart_policy.max_num_repeat_offenders_to_avoid or 0,
                excluded_share_max=nodes.excluded_share_max,
            ),
            observed=frozenset(map(FaultKind, self.detector_policy.observe)),
            active_deadline_s=run.active_deadline_seconds,
            fault_deadline_s=run.fault_deadline_seconds,
            ttl_s=run.ttl_seconds_after_finished,
            barrier_s=run.barrier_deadline_seconds,
        )

    def remarks(self) -> tuple[str, ...]:
        """Return a sentence for every field that may mean less than its writer thinks."""
        auto = "nprocPerNode auto stands for one worker a node; write the number if it is another"
        pods = "is the cluster's: it makes the pods, and each node starts its own workers in them"
        return (
            *((auto,) if self.nproc_per_node == "auto" else ()),
            *(
                f"replicaSpecs[{index}].template {pods}"
                for index, replica in enumerate(self.replica_specs)
                if replica.template is not None
            ),
        )


class _Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a resource's metadata that is read; the rest is the cluster's."""

    name: Name


class _Resource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Kubernetes envelope.  ``status`` is the cluster's word and is not read."""

    api_version: str = msgspec.field(name="apiVersion")
    kind: Literal["HyperPodPyTorchJob", "HyperPodPytorchJob"]
    metadata: _Metadata
    spec: dict[str, Any]
    status: dict[str, Any] | None = None


def load_job_spec(path: Path) -> JobSpec:
    """Return the spec in the file at ``path``.  Raises `SpecError`."""
    try:
        text = read_given_text(path, SPEC_BYTES_MAX)
    except GivenFileError as error:
        raise SpecError(str(path), "", f"the job spec cannot be read: {error}") from error
    return parse_job_spec(text, str(path))


def parse_job_spec(text: str, filename: str) -> JobSpec:
    """Return the spec in ``text``; ``filename`` stands in errors.  Raises `SpecError`."""
    return check_job_spec(parse_yaml(text, filename), filename)


def check_job_spec(data: dict[str, Any], filename: str) -> JobSpec:
    """Return the spec in plain ``data``.  Raises `SpecError`."""
    prefix = ""
    if "kind" in data or "apiVersion" in data:
        resource: _Resource = convert(data, _Resource, filename)
        name = resource.spec.get("name", resource.metadata.name)
        if name != resource.metadata.name:
            reason = f"metadata.name says {resource.metadata.name!r}; keep one of the two"
            raise SpecError(filename, "spec.name", reason)
        data, prefix = {**resource.spec, "name": name}, "spec"
    spec: JobSpec = convert(data, JobSpec, filename, prefix)
    return spec


def _workers(value: int | str) -> int | None:
    """Return the number of workers that ``nprocPerNode`` stands for, or None when it is none."""
    if value == "auto":
        return 1
    if isinstance(value, str):
        if not re.fullmatch(r"[0-9]{1,9}", value):
            return None
        value = int(value)
    return value if 1 <= value <= NPROC_MAX else None


def _place(rules: Sequence[Mapping[str, Any]], name: str) -> int:
    """Return where the refused rule stands; one without a name is told by its place."""
    places = [index for index, rule in enumerate(rules) if rule.get("name") == name]
    return places[-1] if places else int(name.removeprefix("#")) - 1
