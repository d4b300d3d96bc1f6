"""Which host the node of each group rank has, under which version, and what an update makes of it.

Compare-and-set: an update is made from a table of a known version and changes only what it names,
so that two of them made from the same table never both win, in whatever order they come.  It
refuses to know workers, files and the shape of a request.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b

from sidecar.api import Start, Update


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTable:
    """``version`` is the topology version, ``ip_version`` an HTTP client's own token for it."""

    hosts: tuple[str, ...] = ()
    version: int = 0
    ip_version: str = ""

    @property
    def digest(self) -> str:
        """What tells this list of hosts from any other, whoever numbered it; empty for none."""
        return digest_of(self.hosts)

    @property
    def token(self) -> str:
        """What the table is known by to those who read it as the HyperPod agent's."""
        return self.ip_version or str(self.version)

    def started(self, start: Start) -> "RankTable":
        """Return the table after a start that was obeyed."""
        return RankTable(
            hosts=start.node_hosts or self.hosts,
            version=start.topology_version,
            ip_version=start.ip_version or self.ip_version,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stale:
    """A command that was made from another table than the one that stands here."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Incomplete:
    """A table that lacks the host of ``rank``."""

    rank: int


def digest_of(hosts: tuple[str, ...]) -> str:
    """Return the digest of a list of hosts, which have no line breaks; empty for none."""
    return blake2b("\n".join(hosts).encode(), digest_size=16).hexdigest() if hosts else ""


def merged(
    known: tuple[str, ...], changed: Mapping[int, str], nnodes: int
) -> tuple[str, ...] | Incomplete:
    """Return the hosts of all ``nnodes``: ``known`` and what changed; empty where none is named."""
    table = {**dict(enumerate(known[:nnodes])), **changed}
    if not table:
        return ()
    missing = next((rank for rank in range(nnodes) if rank not in table), None)
    if missing is not None:
        return Incomplete(rank=missing)
    return tuple(table[rank] for rank in range(nnodes))


def updated(table: RankTable, update: Update, *, generation: int) -> RankTable | Stale:
    """Return the table after ``update``, or why it changes nothing.

    ``generation`` is that of the last start that was obeyed here.
    """
    if update.generation is not None and update.generation < generation:
        reason = f"generation {update.generation} is over, {generation} runs here"
        return Stale(reason=reason)
    known = table.version
    base, version = update.base_topology_version, update.topology_version
    if version is not None and version < known:
        return Stale(reason=f"topology version {version} is older than {known}")
    hosts = merged(table.hosts, {it.rank: it.host for it in update.changed}, update.nnodes)
    if isinstance(hosts, Incomplete):
        return Stale(reason=f"the table is incomplete: rank {hosts.rank} has no address")
    if version == table.version and hosts == table.hosts:
        return replace(table, ip_version=update.ip_version or table.ip_version)  # told twice
    if base is not None and base != known:
        return Stale(reason=f"it was made from topology version {base}, {known} stands here")
    if version == table.version:
        return Stale(reason=f"topology version {version} stands here with other addresses")
    fresh = known + (hosts != table.hosts) if version is None else version
    return RankTable(hosts=hosts, version=fresh, ip_version=update.ip_version or table.ip_version)


def filled(table: RankTable, start: Start) -> Start | Stale:
    """Return ``start`` with the hosts that it leaves to the table that stands here."""
    start = replace(start, ip_version=start.ip_version or table.ip_version)
    if not start.hosts_known:
        return start
    if table.version != start.topology_version or len(table.hosts) != start.nnodes:
        reason = (
            f"start refused: it needs the hosts of topology version {start.topology_version}, "
            f"{table.version} stands here"
        )
        return Stale(reason=reason)
    return replace(start, node_hosts=table.hosts, hosts_known=False)
