"""Foreign text in Markdown: shown as it is, whatever it holds."""

import re
from collections.abc import Iterable
from typing import Final

from coordinator.wording import one_line

_MARKUP: Final = re.compile(r"([\\`*_{}\[\]<>|#~!])")


def safe(text: str) -> str:
    """Return foreign ``text`` as one line that Markdown shows as it is."""
    return _MARKUP.sub(r"\\\1", one_line(text))


def code(lines: Iterable[str]) -> list[str]:
    """Return lines as an indented block, which no content can end."""
    return [f"    {one_line(line)}" for line in lines]
