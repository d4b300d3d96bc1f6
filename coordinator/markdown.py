"""Foreign text in Markdown: shown as it is, whatever it holds."""

import re
from collections.abc import Iterable, Sequence
from typing import Final

from coordinator.wording import one_line

_MARKUP: Final = re.compile(r"([\\`*_{}\[\]<>|#~!])")


def safe(text: str) -> str:
    """Return foreign ``text`` as one line that Markdown shows as it is."""
    return _MARKUP.sub(r"\\\1", one_line(text))


def code(lines: Iterable[str]) -> list[str]:
    """Return lines as an indented block, which no content can end."""
    return [f"    {one_line(line)}" for line in lines]


def table(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """Return a table's lines; a column whose name ends with a colon is flush right.

    What is foreign in a cell has to be made `safe` by the caller.
    """
    names = [name.removesuffix(":") for name in columns]
    rules = ["---:" if name.endswith(":") else "---" for name in columns]
    return [_row(names), f"|{'|'.join(rules)}|", *(_row(row) for row in rows)]


def _row(cells: Iterable[object]) -> str:
    return "|" + "|".join(f" {cell} " if cell != "" else " " for cell in cells) + "|"
