"""A ratchet: every test says in its own words what must be true."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILES = sorted(path for path in TESTS.rglob("test_*.py"))


def is_claim(node: ast.AST) -> bool:
    """Return whether ``node`` is an assertion or expects an error or a warning."""
    if isinstance(node, ast.Assert):
        return True
    if isinstance(node, ast.With | ast.AsyncWith):
        return any(
            ast.unparse(item.context_expr).startswith(("pytest.raises", "pytest.warns"))
            for item in node.items
        )
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.fail"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_test_asserts_in_its_own_body(path: Path) -> None:
    """A claim that only a helper makes is gone, unseen, with the helper's next change."""
    silent = [
        f"{path.relative_to(TESTS)}:{test.lineno} {test.name}"
        for test in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef)
        and test.name.startswith("test_")
        and not any(map(is_claim, ast.walk(test)))
    ]
    assert silent == []
