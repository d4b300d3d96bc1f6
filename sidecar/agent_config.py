"""What a node's agent is told about itself once."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """What the agent is told about itself once."""

    job: str
    node: str
    incarnation: str
    nproc_per_node: int
