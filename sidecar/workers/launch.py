"""What a node's workers have in common over generations, and what each start makes of it.

Pure but for the names of folders: it starts nothing and opens nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sidecar.api import Start
from sidecar.workers.environment import WorkerPlace, worker_environment
from sidecar.workers.files import LogFiles
from sidecar.workers.pages import Page


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """What stays the same from generation to generation.

    ``sole_parent`` says that this process starts nothing but workers, so that any other child
    it has is an orphan of theirs; where it is False, only marked children are.
    """

    job: str
    node: str
    nproc: int
    command: tuple[str, ...]
    output: Path
    """The folder of this run: nothing of an earlier one stands in it."""
    socket_path: str
    inherited: Mapping[str, str]
    sole_parent: bool = False
    resource_config: Path | None = None
    """The folder of ``pod_resourceconfig.json``; None where no script asks for it."""
    tee: Mapping[int | None, int] = field(default_factory=dict)
    """Which output is shown on the terminal as well: see `sidecar.workers.tee.read_tee`."""

    def rank(self, start: Start, local_rank: int) -> int:
        """Return the global rank of a worker of ``start``."""
        return start.group_rank * self.nproc + local_rank

    def folder(self, start: Start, local_rank: int) -> Path:
        """Return where its output goes."""
        return self.output / f"gen_{start.generation}" / f"rank_{self.rank(start, local_rank)}"

    def environment(
        self, start: Start, local_rank: int, page: Page, files: LogFiles, mark: str
    ) -> dict[str, str]:
        """Return its whole environment."""
        place = WorkerPlace(
            local_rank=local_rank,
            nproc=self.nproc,
            job=self.job,
            socket_path=self.socket_path,
            page_path=str(page.path),
            page_token=page.token,
            error_file=str(files.error),
            launch_mark=mark,
        )
        return worker_environment(start, place, self.inherited)
