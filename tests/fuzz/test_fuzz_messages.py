"""Arbitrary bytes on sockets and in the files that people write."""

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from coordinator.spec import parse_job_spec
from coordinator.spec_errors import SpecError
from sidecar.api import DOWNWARD, UPWARD
from sidecar.codec import InvalidMessageError, decode
from sidecar.config import ConfigError, NodeConfig, load_node_config
from tests.fuzz.budget import fuzz
from worker_shim.framing import FRAME_BYTES_MAX, BadFrame, Decoder, encode
from worker_shim.messages import WORKER_MESSAGES

JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12),
        st.sampled_from([-1, 1 << 63, 1 << 200, "", "\ud800", "NaN"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)  # fmt: skip


def frames(data: bytes, places: list[int]) -> list[dict[str, Any] | BadFrame]:
    """Return what a decoder makes of ``data`` in pieces."""
    decoder, found = Decoder(), []
    ends = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    for start, end in itertools.pairwise(ends):
        found += decoder.feed(data[start:end])
        assert len(decoder._buffer) <= FRAME_BYTES_MAX + 4
    return found


def test_frames_do_not_depend_on_how_the_bytes_came() -> None:
    """A worker whose message was split would be refused, or another one's be believed."""
    good = st.dictionaries(st.text(max_size=6), st.integers(), max_size=3).map(encode)
    framed = st.binary(max_size=30).map(lambda body: len(body).to_bytes(4, "big") + body)
    loose = st.one_of(st.binary(max_size=20), st.just(b"\xff\xff\xff\xff"), st.just(b"\0\0\0\0"))

    def check(given: tuple[list[bytes], list[int]]) -> None:
        parts, places = given
        data = b"".join(parts)
        assert frames(data, places) == frames(data, [])

    streams = st.lists(st.one_of(good, framed, loose), max_size=6)
    fuzz(st.tuples(streams, st.lists(st.integers(0, 1 << 12), max_size=6)), check)


def test_a_message_is_understood_or_refused_with_a_reason() -> None:
    """A coordinator of another version would end every sidecar, or be half obeyed."""
    tables = (UPWARD, DOWNWARD)
    kinds = st.sampled_from([*UPWARD, *DOWNWARD, *WORKER_MESSAGES, "no_such_kind"])
    names = sorted({name for table in tables for cls in table.values() for name in cls.__slots__})
    bodies = st.dictionaries(st.sampled_from(names), JSON, max_size=10)
    messages = st.tuples(kinds, bodies).map(
        lambda it: json.dumps({"type": it[0], **it[1]}).encode()
    )

    def check(data: bytes) -> None:
        for table in tables:
            try:
                decode(data, table)
            except InvalidMessageError as error:
                assert str(error)

    fuzz(
        st.one_of(st.binary(max_size=40), JSON.map(lambda it: json.dumps(it).encode()), messages),
        check,
    )


SPECS = (
    "name: job\nreplicaSpecs:\n- {name: workers, replicas: 2}\n",
    """\
name: job
nprocPerNode: 8
replicaSpecs: [{name: w, replicas: 4, spares: 1}]
runPolicy:
  jobMaxRetryCount: 3
  restartPolicy: {evalPeriodSeconds: 60}
  logMonitoringConfiguration: [{name: a, logPattern: 'x (.*)', faultOnMatch: true}]
""",
    "apiVersion: v1\nkind: HyperPodPyTorchJob\nmetadata: {name: j}\nspec:\n  nprocPerNode: '8'\n",
)


def test_a_job_is_taken_or_refused_in_one_line() -> None:
    """A person with a typing error in the file would get a traceback."""

    def check(text: str) -> None:
        try:
            parse_job_spec(text, "job.yaml").settings()
        except SpecError as error:
            assert str(error)
            assert "\n" not in str(error)

    mangled = st.tuples(
        st.sampled_from(SPECS), st.integers(0, 400), st.integers(0, 8), st.text(max_size=6)
    ).map(lambda it: it[0][: it[1]] + it[3] + it[0][it[1] + it[2] :])
    top = ("name", "nprocPerNode", "replicaSpecs", "runPolicy", "progressPolicy", "nodePolicy")
    built = st.dictionaries(st.sampled_from(top), JSON, max_size=6).map(
        lambda it: yaml.safe_dump(it, allow_unicode=True)
    )
    fuzz(st.one_of(st.text(max_size=60), mangled, built), check)


NODE = "nodeName: n0\njob: j\ncoordinator: http://h:1\ncommand: [/bin/true]\nnprocPerNode: 2\n"


def test_a_nodes_file_is_taken_or_refused_in_one_line() -> None:
    """A node that a typing error keeps out would say so in a traceback that nobody reads."""

    def check(text: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "node.yaml")
            path.write_bytes(text)
            try:
                load_node_config(path)
            except ConfigError as error:
                assert str(error)
                assert "\n" not in str(error)

    mangled = st.tuples(st.integers(0, 110), st.integers(0, 8), st.text(max_size=6)).map(
        lambda it: NODE[: it[0]] + it[2] + NODE[it[0] + it[1] :]
    )
    fields = st.sampled_from(sorted(NodeConfig.__struct_encode_fields__))
    built = st.dictionaries(fields, JSON, max_size=8).map(yaml.safe_dump)
    texts = st.one_of(mangled, built).map(lambda text: text.encode(errors="replace"))
    fuzz(st.one_of(st.binary(max_size=60), texts), check)
