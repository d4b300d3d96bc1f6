"""The shipped rules as the table that the documentation holds.

Decides how a rule is told in one row.  A test keeps the documentation equal to it.
"""

from typing import Final

from sidecar.logs.library.catalogue import Entry, Topic, topics

HEAD: Final = "| Rule | Role | Class | A match means |\n|---|---|---|---|\n"


def markdown() -> str:
    """Return every shipped rule, grouped by the file that holds it."""
    return "\n".join(_topic(topic) for topic in topics())


def _topic(topic: Topic) -> str:
    kind = "Step lines: " if topic.steps else ""
    rows = "".join(_row(entry) for entry in topic.entries)
    return f"### {kind}{topic.title}\n\n{HEAD}{rows}"


def _row(entry: Entry) -> str:
    cells = (
        f"`{entry.name}`",
        str(entry.role),
        f"`{entry.fault_class}`",
        f"{_sentence(entry.means)}",
    )
    return f"| {' | '.join(cells)} |\n"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}.".replace("|", "\\|")
