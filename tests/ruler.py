"""What makes Python slow to read, counted in a folder: the ruler that tests/test_layers.py holds.

Lines are not counted for themselves: a house that is paid for lines becomes dense.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_BRANCHES = (
    ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.comprehension, ast.BoolOp, ast.Match,
)  # fmt: skip
_MOST_BRANCHES = 15
_MOST_COLUMNS = 100
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def count_rows(folder: Path) -> Counter[str]:
    """Return the count of each row over the Python files of `folder`."""
    total: Counter[str] = Counter()
    for path in sorted(folder.rglob("*.py")):
        source = path.read_text("utf-8")
        total.update(_in_syntax(ast.parse(source)))
        total.update(_in_comments(source))
        total["lines over 100 columns"] += sum(
            len(line) > _MOST_COLUMNS for line in source.splitlines()
        )
        total["characters without white space"] += len("".join(source.split()))
    return total


def _in_syntax(tree: ast.AST) -> Iterator[str]:
    """Yield the name of a row for each place of the tree that counts in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            yield "conditional expressions"
        elif isinstance(node, ast.Lambda):
            yield "lambdas"
        elif isinstance(node, _COMPREHENSIONS) and _is_nested(node):
            yield "nested comprehensions"
        elif (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Mult)
            and (_is_flag(node.left) or _is_flag(node.right))
        ):
            yield "flags as factors"
        elif isinstance(node, _FUNCTIONS):
            yield from _in_function(node)


def _in_function(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    if sum(isinstance(node, _BRANCHES) for node in ast.walk(function)) > _MOST_BRANCHES:
        yield "functions with over 15 branches"
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    for argument in arguments:
        if isinstance(argument.annotation, ast.Name) and argument.annotation.id in (
            "Any",
            "object",
        ):
            yield "parameters typed Any or object"


def _is_nested(node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> bool:
    if len(node.generators) > 1:
        return True
    return any(isinstance(inner, _COMPREHENSIONS) for inner in ast.walk(node) if inner is not node)


def _is_flag(node: ast.expr) -> bool:
    """Return whether a factor is true or false, so that the product is an `if` in disguise."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "bool"
    return isinstance(node, ast.Compare) or (
        isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    )


def _in_comments(source: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if "fmt:" in token.string:
            yield "fmt: skip"
        elif not token.string.startswith(("# type:", "# noqa", "#!")):
            yield "comments"
