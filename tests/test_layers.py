"""The house's rules about its own rooms."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "kinject"

LAYER = {
    "types": 0, "results": 0, "errors": 0, "terminal": 0, "process": 1, "signals": 1, "disk": 1, "recipe": 1,
    "models": 2, "corpus": 2, "sandbox": 2,
    "augment": 3, "train": 3, "eval": 3, "report": 4, "study": 5, "bench": 5, "plan": 5, "tune": 5, "doctor": 5,
    "cli": 6,
}  # fmt: skip
SIDEWAYS = {
    ("recipe", "disk"), ("models", "corpus"), ("sandbox", "corpus"), ("bench", "study"), ("doctor", "plan"), ("tune", "plan"),
    ("recipe", "augment"), ("recipe", "sandbox"),
}  # fmt: skip
"""Neighbours on one layer that may be imported, one way only."""


def _room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [node.module or ""]
        for name in names:
            if name.startswith("kinject."):
                yield name.split(".")[1], node.lineno


def test_imports_point_down() -> None:
    upward = []
    for path in SOURCE.rglob("*.py"):
        room = _room(path)
        if room == "__init__":
            continue
        for target, line in _imports(path):
            down = LAYER[target] < LAYER[room] or target == room or (room, target) in SIDEWAYS
            if not down:
                upward.append(f"{path.relative_to(SOURCE)}:{line} imports {target}")
    assert upward == []


def test_every_room_is_in_the_plan() -> None:
    rooms = {_room(path) for path in SOURCE.rglob("*.py")} - {"__init__"}
    assert rooms == LAYER.keys()


def test_files_and_functions_keep_to_their_size() -> None:
    too_long = []
    for path in SOURCE.rglob("*.py"):
        text = path.read_text("utf-8")
        if text.count("\n") > 320:
            too_long.append(f"{path.name}: {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                n_lines = (node.end_lineno or 0) - node.lineno + 1
                if n_lines > 60:
                    too_long.append(f"{path.name}:{node.lineno} {node.name}: {n_lines} lines")
    assert too_long == []


def test_help_is_quick_and_imports_no_torch() -> None:
    code = (
        "import sys, kinject.cli\n"
        "try: kinject.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'trl', 'datasets', 'numpy', 'yaml', 'openai'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    best = 9.0
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert best < 0.3  # processor time: what else the machine does is not --help's
