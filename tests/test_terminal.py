"""Text on the terminal."""

from __future__ import annotations

import ast
import json
import logging
import unicodedata
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from kinject.cli import main
from kinject.terminal import Formatter, printable, show

SOURCE = Path(__file__).parents[1] / "src" / "kinject"
STEERING = "\x1b[2J\x1b]0;owned\x07\x1b]52;c;ZXZpbA==\x07\r\x08\x9b31m\x7f\u202egnp.exe\u2066\ud800\x00"

TURNING = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


@hypothesis.given(st.text(st.characters(), max_size=200))
def test_nothing_that_steers_a_terminal_is_printable_and_all_else_stays(text: str) -> None:
    shown = printable(text)
    assert len(shown) == len(text)
    shown.encode()
    for before, after in zip(text, shown, strict=True):
        steers = (
            unicodedata.category(before) in ("Cc", "Cs") and before not in "\n\t"
        ) or before in "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
        assert after == ("\ufffd" if steers else before)


def test_what_is_shown_and_logged_is_printable(capsys: pytest.CaptureFixture[str]) -> None:
    show(f"a{STEERING}b")
    record = logging.LogRecord("x", logging.INFO, "f", 1, "%s", (f"a{STEERING}b",), None)
    for line in (capsys.readouterr().out.rstrip("\n"), Formatter().format(record)):
        assert line == f"a{printable(STEERING)}b"
        assert "\x1b" not in line


def test_only_the_terminal_module_prints() -> None:
    printing = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called == "print" or called in ("sys.stdout.write", "sys.stderr.write"):
                printing.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert [place.partition(":")[0] for place in printing] == ["terminal.py"]


def test_documents_and_recipes_cannot_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], write_rows: Callable[..., Path]
) -> None:
    hostile = STEERING.replace("\x00", "").replace("\ud800", "")
    row = {"id": hostile, "title": hostile, "text": f"Arden was born in Lowmere. {hostile}"}
    documents = write_rows("documents.jsonl", [row])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"run_dir: {tmp_path}/run\naugment:\n  documents: {documents}\n  styles: {{paraphrase: 2}}\n"
        "  generator: {kind: sandbox}\n"
    )
    asked = {"id": hostile, "question": hostile, "choices": [hostile], "answer": hostile}
    questions = write_rows("questions.jsonl", [asked])
    (tmp_path / "eval.yaml").write_text(
        f"run_dir: {tmp_path}/eval\neval: {{models: {{base: {tmp_path}}}, questions: {{s: {questions}}}}}\n"
    )
    style = f"augment.styles={{{json.dumps(hostile)}: 1}}"
    commands = [["augment", str(recipe), "--dry-run"], ["augment", str(recipe)], ["augment", str(recipe), style]]
    commands += [["eval", str(tmp_path / "eval.yaml")], ["check", str(tmp_path)]]
    said = ""
    for command in commands:
        main(command)
        found = capsys.readouterr()
        said += found.out + found.err
    assert "\ufffd" in said
    assert printable(said) == said
