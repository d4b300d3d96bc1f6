"""HTML out of trees: whatever is not an element is foreign text, and is escaped.

There is no way to put a text into a page unescaped but to make an element of it, and elements are
made here only.
"""

from html import escape
from typing import Final, TypeAlias

from coordinator.wording import one_line

TEXT_CHARS_MAX: Final = 4_000
"""Longest single text on a page; the JSON has the whole."""
VOID: Final = frozenset({"meta", "br", "rect", "line", "circle"})
"""Elements without content; those of SVG close themselves."""


class Element(str):
    """Finished markup.  Made by `element`, `style` and `join` only."""

    __slots__ = ()


Child: TypeAlias = "Element | str | int | None"


def element(name: str, /, *children: Child, **attributes: str | float | None) -> Element:
    """Return ``<name attributes>children</name>``.

    A trailing underscore of an attribute's name is dropped (``class_``), other underscores become
    hyphens.  None leaves a child or an attribute out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Element(f"<{name}{given}/>")
    return Element(f"<{name}{given}>{join(*children)}</{name}>")


def join(*children: Child) -> Element:
    """Return the children one after another, texts escaped."""
    return Element(
        "".join(
            child if isinstance(child, Element) else text(str(child))
            for child in children
            if child is not None
        )
    )


def text(foreign: str) -> Element:
    """Return foreign text as one harmless line; a space at its ends stays one."""
    line = escape(one_line(foreign, TEXT_CHARS_MAX), quote=True)
    before = " " if foreign[:1].isspace() else ""
    after = " " if line and foreign[-1:].isspace() else ""
    return Element(before + line + after)


def style(sheet: str) -> Element:
    """Return a style sheet of our own; foreign text never comes here."""
    assert "<" not in sheet, "a style sheet holds no markup"
    return Element(f"<style>{sheet}</style>")


def document(title: str, sheet: str, *body: Child) -> str:
    """Return a whole page that needs nothing but itself."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        style(sheet),
    )
    page = element("html", head, element("body", *body), lang="en")
    return f"<!DOCTYPE html>\n{page}\n"
