"""The notebooks: one is run in a process with a running event loop, as Jupyter has one; of the other the recipes are checked."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import kinject
from kinject.cli import main
from kinject.recipe import read_recipe
from kinject.train.setup import check_training

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
SMALL = {
    "trainer.max_steps=220": "trainer.max_steps=6",
    "trainer.warmup_steps=30": "trainer.warmup_steps=0",
    "[models]": '[models, "eval.limit=8"]',
    '("recipes/augment.yaml")': '(kinject.read_recipe("recipes/augment.yaml", ["augment.styles.paraphrase=1"], "augment"))',
    'command(["sandbox", "corpus"])': "shutil.copy(KNOWN, 'runs/sandbox/base-corpus.jsonl')",
}
"""What makes the notebook small: words of its cells -> others."""


def _cells(name: str) -> list[str]:
    cells = json.loads((FOLDER / name).read_text("utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


async def _run(cells: list[str], names: dict[str, Any]) -> list[str]:
    """Run the cells as a notebook does; return how it would show their last lines."""
    shown = []
    for cell in cells:
        *lines, last = ast.parse(cell).body
        exec(compile(ast.Module(lines, []), "<cell>", "exec"), names)  # noqa: S102
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)  # noqa: S307
            shown.append(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))
        else:
            exec(compile(ast.Module([last], []), "<cell>", "exec"), names)  # noqa: S102
    return shown


@pytest.mark.usefixtures("blank_figures")
def test_the_notebook_runs_from_documents_to_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = _cells("from-documents-to-report.ipynb")
    for words, small in SMALL.items():
        assert any(words in cell for cell in cells), words
        cells = [cell.replace(words, small) for cell in cells]
    shown = asyncio.run(
        _run(cells, {"shutil": shutil, "KNOWN": "data/sandbox/known_documents.jsonl"})
    )
    assert (tmp_path / "runs/eval/report.html").stat().st_size > 10_000
    assert "file://" in capsys.readouterr().out
    tables = [text for text in shown if "<table" in text]
    assert any("documents.jsonl" in table for table in tables)
    assert any("<td>paraphrase</td><td>120</td><td>120</td>" in table for table in tables)
    assert any("tokens learned" in table for table in tables)
    assert "kinject train" in shown[-1]
    frame = kinject.read_report("runs/eval/report.json").to_frame()
    assert set(frame["arm"]) == {"base", "cpt"}
    assert len(frame) == len(kinject.read_report("runs/eval/report.json").results)


def test_the_other_notebook_has_code_that_parses_and_recipes_that_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = _cells("qlora-16gb.ipynb")
    calls = [
        node for cell in cells for node in ast.walk(ast.parse(cell)) if isinstance(node, ast.Call)
    ]
    (tmp_path / "handbook").mkdir()
    (tmp_path / "handbook" / "a.txt").write_text("The bridge at Arvika was built in 1931.")
    kinject.try_("handbook")
    checked = []
    for call in calls:
        name = ast.unparse(call.func)
        owner, _, function = name.partition(".")
        if name == "command" and "copy" in ast.unparse(call):
            assert main(ast.literal_eval(call.args[0])) == 0
        if owner != "kinject":
            continue
        assert function in kinject.__all__
        if function == "read_recipe":
            path, overrides, verb = map(ast.literal_eval, call.args)
            recipe = read_recipe(path, overrides, verb, check_inputs=False)
            checked.append(verb)
            if verb == "train":
                check_training(recipe)
        elif function in ("augment", "questions"):
            assert (
                getattr(read_recipe(ast.literal_eval(call.args[0]), verb=function), function)
                is not None
            )
            checked.append(function)
    assert sorted(checked) == ["augment", "eval", "questions", "train"]


def test_a_table_of_a_notebook_escapes_what_it_shows() -> None:
    from kinject.types import TrainResult

    html = TrainResult("<script>alert(1)</script>", "a&b", 1, 1.0, None, {}, 2.0)._repr_html_()
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert re.search(r"<td>a&amp;b</td>", html)
    assert "<td></td>" in html  # no loss
