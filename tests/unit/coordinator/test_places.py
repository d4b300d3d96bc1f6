"""Rank -> node, host and GPU, as every report tells it."""

from coordinator.membership import Membership
from coordinator.picture import places
from scout.clock import SECOND, Instant
from sidecar.api import PROTOCOL_VERSION, Hello


def test_every_rank_has_its_node_its_host_and_its_device():
    """The person on call would look for rank 11 on a machine that they must guess."""
    members = Membership(job="j", nproc_per_node=2, lease_ns=SECOND)
    for link, (node, host, gpus) in enumerate(
        (("a", "10.0.0.1", (0, 1)), ("b", "10.0.0.2", (4, 7)), ("c", "10.0.0.3", ()))
    ):
        hello = Hello(
            protocol=PROTOCOL_VERSION,
            agent_version="1",
            job="j",
            node=node,
            incarnation=node,
            host=host,
            http_port=1,
            nproc_per_node=2,
            spare=False,
            gpus=gpus,
        )
        members.open(link, hello, Instant(0))
    found = places(("b", "c", "gone"), 2, members)
    assert [(it.rank, it.node, it.host, it.local_rank, it.gpu) for it in found] == [
        (0, "b", "10.0.0.2", 0, 4),
        (1, "b", "10.0.0.2", 1, 7),
        (2, "c", "10.0.0.3", 0, None),
        (3, "c", "10.0.0.3", 1, None),
        (4, "gone", "", 0, None),
        (5, "gone", "", 1, None),
    ]
