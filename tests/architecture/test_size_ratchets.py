"""A function fits a screen and a module one subject; what grows past that is split, not excused."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "coordinator",
    "sidecar",
    "worker_shim",
    "scout",
    "alerts",
    "dashboards",
    "tools",
    "examples",
    "benchmarks",
)
FUNCTION_LINES_MAX = 60
MODULE_LINES_MAX = 400


def modules() -> Iterator[Path]:
    for folder in SOURCES:
        yield from sorted((ROOT / folder).rglob("*.py"))


def test_no_function_is_longer_than_a_screen() -> None:
    """A longer one hides a decision in the middle of its plumbing."""
    long = []
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES_MAX:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {length}")
    assert not long, "\n".join(long)


def test_no_module_is_longer_than_one_subject() -> None:
    """Long modules are where cores and shells grow together."""
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in modules()}
    assert lengths, "no modules were found"
    long = [
        f"{path.relative_to(ROOT)}: {length}"
        for path, length in lengths.items()
        if length > MODULE_LINES_MAX
    ]
    assert not long, "\n".join(long)


def test_every_product_module_opens_with_what_it_decides() -> None:
    """A reader who has to guess what a module refuses to know will teach it that."""
    silent = [
        str(path.relative_to(ROOT))
        for path in modules()
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        and path.read_text(encoding="utf-8").strip()
    ]
    assert not silent, "\n".join(silent)
