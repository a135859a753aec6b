"""Text and progress on the terminal."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import json
import logging
import re
import shutil
import sys
import traceback
import types
import unicodedata
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kinject.cli import main, program
from kinject.terminal import (
    _NOISE,
    Progress,
    duration,
    format_count,
    format_number,
    printable,
    rate_text,
    show,
)

SOURCE = Path(__file__).parents[1] / "src" / "kinject"
STEERING = (
    "\x1b[2J\x1b]0;owned\x07\x1b]52;c;ZXZpbA==\x07\r\x08\x9b31m\x7f\u202egnp.exe\u2066\ud800\x00"
)


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


@pytest.fixture
def run_program(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """A function that runs a command line as the program does, with its protected streams, and returns all that it prints."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    # as in a program, where the library is imported after the streams are protected
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [logging.lastResort])

    def run(*words: object) -> str:
        monkeypatch.setattr(sys, "argv", ["kinject", *map(str, words)])
        program()
        sys.stdout.flush()
        sys.stderr.flush()
        captured = capfd.readouterr()
        return captured.out + captured.err

    return run


def test_what_is_printed_logged_warned_or_raised_is_printable(
    run_program: Callable[..., str],
) -> None:
    run_program("--version")
    show(f"a{STEERING}b")
    sys.stdout.write(f"a{STEERING}b\n")
    handler = logging.StreamHandler()
    handler.emit(logging.LogRecord("x", logging.ERROR, "f", 1, "%s", (f"a{STEERING}b",), None))
    traceback.print_exception(ValueError(f"a{STEERING}b"))
    printed = run_program("--version").replace("\r", "")
    assert printed.count("\ufffd") > 4 * 8
    assert printable(printed) == printed


def test_what_is_logged_after_a_command_is_on_the_standard_error_of_then(
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        with contextlib.redirect_stderr(io.StringIO()) as stream:
            assert main(["eval", "no-such.yaml"]) == 2
        assert "no-such.yaml" in stream.getvalue()
        stream.close()
        capsys.readouterr()
        logging.getLogger("kinject.test").warning(f"a slow a{STEERING}b")
        assert capsys.readouterr().err == f"a slow a{printable(STEERING)}b\n"
        # What cannot be formatted is reported, and ends nothing.
        logging.getLogger("kinject.test").warning("%d rows", "many")
        assert "Logging error" in capsys.readouterr().err
    finally:
        root.handlers[:] = before
        root.setLevel(level)


def test_only_the_terminal_module_prints() -> None:
    printing = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called == "print" or called in ("sys.stdout.write", "sys.stderr.write"):
                printing.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert {location.partition(":")[0] for location in printing} == {"terminal.py"}


def test_documents_recipes_and_models_cannot_steer_the_terminal(
    tmp_path: Path, run_program: Callable[..., str], write_rows: Callable[..., Path], tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    hostile = STEERING.replace("\x00", "").replace("\ud800", "")
    row = {"id": hostile, "title": hostile, "text": f"Arden was born in Lowmere. {hostile}"}
    documents = write_rows("documents.jsonl", [row])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"run_dir: {tmp_path}/run\naugment:\n  documents: {documents}\n  styles: {{paraphrase: 2}}\n"
        "  generator: {kind: sandbox}\n"
    )
    question = {"id": hostile, "question": hostile, "choices": [hostile], "answer": hostile}
    questions = write_rows("questions.jsonl", [question])
    (tmp_path / "eval.yaml").write_text(
        f"run_dir: {tmp_path}/eval\neval: {{models: {{base: {tmp_path}}}, questions: {{s: {questions}}}}}\n"
    )
    style = f"augment.styles={{{json.dumps(hostile)}: 1}}"
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / f"{hostile.replace('/', '')}.md").write_text(
        f"# {hostile}\n\nArden was born in Lowmere. {hostile}"
    )
    corpus = write_rows("corpus.jsonl", [{"text": f"Arden {hostile}"}] * 4)
    (tmp_path / "train.yaml").write_text(
        f"run_dir: {tmp_path}/t\nmodel: {{path: {tiny_model}}}\ncorpus: {{path: {corpus}, cache_dir: {tmp_path}/c}}\n"
        "trainer: {max_steps: 1, max_length: 32}\n"
    )
    commands = [["augment", recipe, "--dry-run"], ["augment", recipe], ["augment", recipe, style]]
    commands += [
        ["eval", tmp_path / "eval.yaml"],
        ["recipes", "check", tmp_path],
        ["try", folder],
        ["try", hostile],
    ]
    printed = "".join(run_program(*command) for command in commands)
    n_marks = printed.count("\ufffd")
    assert n_marks
    for change in ({"model_type": hostile}, {"dtype": hostile}):
        broken = tmp_path / "broken"
        shutil.copytree(tiny_model, broken, dirs_exist_ok=True)
        config = json.loads((tiny_model / "config.json").read_text())
        (broken / "config.json").write_text(json.dumps(config | change))
        for words in (["chat", broken], ["train", tmp_path / "train.yaml", f"model.path={broken}"],
                      ["eval", tmp_path / "eval.yaml", f"eval.models.base={broken}"]):  # fmt: skip
            printed += run_program(*words)
    for name in ("x.weight", "model.layers.0.input_layernorm.weight"):
        tensors = load_file(tiny_model / "model.safetensors")
        tensors[hostile + name] = tensors.pop(name, torch.ones(2))
        save_file(tensors, broken / "model.safetensors", {"format": "pt"})
        (broken / "config.json").write_text(json.dumps(config))
        printed += run_program("chat", broken)
    (broken / "chat_template.jinja").write_text(
        "{{ raise_exception(" + json.dumps(hostile) + ") }}"
    )
    shutil.copy(tiny_model / "model.safetensors", broken)
    printed += run_program("chat", broken) + run_program(
        "train", tmp_path / "train.yaml", f"model.path={broken}"
    )
    printed = printed.replace("\r", "")
    assert printable(printed) == printed


def test_odd_bytes_temperatures_settings_and_suffixes_are_one_line_or_harmless(
    tmp_path: Path,
    run_program: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: Path,
) -> None:
    def chat(*words: object) -> str:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n/quit\n")))
        return run_program("chat", tiny_model, "--max-new-tokens", 4, *words)

    chat()  # with the bar of the fixture, which saves the model
    plain = chat()
    assert "> \ufffd\ufffd" in plain
    assert chat("--temperature", "1e-38") == plain
    settings = json.loads((tiny_model / "generation_config.json").read_text())
    for key in ("top_k", "temperature"):
        (tiny_model / "generation_config.json").write_text(
            json.dumps(settings | {key: "many", "do_sample": True})
        )
        assert f"generation_config.json: {key}: found 'many', a number is needed" in chat()
    (tiny_model / "generation_config.json").write_text(json.dumps(settings))
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"text": "Arden"}\n')
    (tmp_path / "train.yaml").write_text(
        f"run_dir: {tmp_path}/t\nmodel: {{path: {tiny_model}}}\ncorpus: {{path: {corpus}, cache_dir: {tmp_path}/c}}\n"
        "trainer: {max_steps: 1, max_length: 32}\n"
    )
    said = run_program(
        "plan", tmp_path / "train.yaml", "--no-calibration", "--figure", tmp_path / "f.exe"
    )
    assert "allowed: a name that ends with .png, .svg or .pdf" in said
    assert "Traceback" not in plain + said


def test_without_a_terminal_lines_come_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10_000, 4))
    monkeypatch.setattr("kinject.terminal.monotonic", lambda: float(next(clock)))
    with Progress("training", 100, "steps", done=40) as progress:
        for _ in range(4):
            progress.advance(10)
            progress.set_status("loss 1.5")
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert 2 <= len(lines) <= 6
    assert lines[0].startswith(("training: 50/100 steps  ", "training: 60/100 steps  "))
    assert "loss 1.5" in lines[-1]
    assert "ETA" in lines[-1]


def test_the_rate_leaves_out_what_was_done_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("kinject.terminal.monotonic", lambda: now)
    progress = Progress("training", 100, "steps", done=40)
    now = 5.0
    progress.advance(10)
    assert progress.rate == pytest.approx(2.0)
    now = 15.0  # 50 are left, 25 s of work, of which 10 s have passed
    assert "2.0 steps/s  ETA 15 s" in progress.line(80)


@pytest.mark.parametrize(("total", "earlier"), [(7, 7), (7, 9), (0, 0)])
def test_where_an_earlier_run_did_all_the_line_has_neither_rate_nor_time_left(
    total: int, earlier: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("kinject.terminal.monotonic", lambda: now)
    progress = Progress("augment", total, "rewritings")
    progress.advance(earlier, earlier=True)
    now = 61.0  # the corpus is written meanwhile
    assert progress.line(60).endswith(f"{earlier}/{total} rewritings  61 s so far")


def test_step_rate_and_eta_stay_where_the_line_is_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("kinject.terminal.monotonic", lambda: now)
    progress = Progress("training", 12_345, "steps")
    assert progress.line(80) == "training: " + "-" * 40 + "  0/12,345 steps  0 s so far"
    now = 100.0
    progress.advance(6172)
    progress.set_status("loss 1.234  123,456 tokens/s  12.3 GiB GPU")
    core = "6,172/12,345 steps  61.7 steps/s  ETA 100 s"
    name, bar, *rest = progress.line(120).split()
    assert (name, rest) == ("training:", [*core.split(), *progress._status_text.split()])
    assert bar.count("#") + bar.count("-") == len(bar)
    assert abs(bar.count("#") - bar.count("-")) <= 1
    assert len(progress.line(120)) == 120
    assert progress.line(80) == f"training: {core}  loss 1.234  123,456 to..."
    assert progress.line(60) == f"training: {core}"
    for width in range(10, 200):
        assert len(progress.line(width)) <= width


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.5, "2.0 stages/s"),
        (20, "20.0 s/stage"),
        (1200, "20 min/stage"),
        (43_200, "12 h 0 min/stage"),
    ],
)
def test_slow_work_has_a_rate_and_a_time_left(
    seconds: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("kinject.terminal.monotonic", lambda: now)
    progress = Progress("training arms", 8, "stages")
    now = seconds
    progress.advance()
    assert f"{words}  {duration(seconds)} so far" in progress.line(
        80
    )  # the first is no measure of the others
    now = 4 * seconds
    progress.advance(3)
    assert f"{words}  ETA {duration(4 * seconds)}" in progress.line(80)


@pytest.mark.parametrize(
    ("unit", "one"), [("searches", "search"), ("slices", "slice"), ("epochs", "epoch")]
)
def test_a_slow_rate_names_one_unit(unit: str, one: str) -> None:
    assert rate_text(0.25, unit) == f"4.0 s/{one}"


def test_in_a_notebook_one_line_is_drawn_again_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, shown, n_cells = 0.0, list[str](), 0

    class Handle:
        def update(self, line: dict[str, str], *, raw: bool) -> None:
            shown.append(line["text/plain"])

    def display(line: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        nonlocal n_cells
        n_cells += 1
        shown.append(line["text/plain"])
        return Handle()

    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    monkeypatch.setattr("kinject.terminal.monotonic", lambda: now)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    with Progress("training", 3, "steps") as progress:
        for _ in range(3):
            now += 0.6
            progress.advance()
    assert [line.partition("  ")[2].split("  ")[0] for line in shown] == ["2/3 steps", "3/3 steps"]
    assert (n_cells, stream.getvalue()) == (1, "")


def test_progress_is_a_bar_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with Progress("training", 4, "steps") as progress:
        progress.advance(4)
    assert "4/4" in capsys.readouterr().err


def test_what_libraries_print_above_a_bar_is_printable_and_has_no_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "hf_" + "Kq7vT2xY9cLmA4" * 2
    monkeypatch.setenv("HF_TOKEN", key)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(getattr(sys, name), "isatty", lambda: True, raising=False)
    before = sys.stdout, sys.stderr
    with Progress("training", 4, "steps"):
        sys.stderr.write(f"refused {key}, \x9b31m\x1b]52;c;ZXZpbA==\x07 by a server\n")
        sys.stdout.write(f"its header: {key}\n")
        traceback.print_exception(ValueError(key))
    assert (sys.stdout, sys.stderr) == before
    printed = "".join(capsys.readouterr())
    assert printed.count("(key)") == 3
    assert "by a server" in printed
    assert all(found not in printed for found in (key, "\x9b", "\x1b]"))


def test_names_in_progress_lines_are_neither_markup_nor_terminal_codes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "300")
    with Progress("[/red] \x1b]0;owned\x07", 4, "steps") as progress:
        progress.set_status("[link=file:///etc]arm[/link] \x1b[2J")
        progress.advance(4)
    err = capsys.readouterr().err
    assert "[/red]" in err
    assert "[link=file:///etc]arm[/link]" in err
    assert "\x1b]0;" not in err
    assert "\x1b[2J" not in err


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59, "59 s"), (150, "150 s"), (240, "4 min"), (12_000, "3 h 20 min")],
)
def test_durations_read_well(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(("library", "beginning"), _NOISE.items())
def test_messages_of_libraries_that_help_nobody_are_dropped_and_no_others(
    library: str, beginning: str
) -> None:
    spec = importlib.util.find_spec(library)
    assert spec is not None
    assert spec.origin is not None
    sources = (Path(spec.origin), Path(spec.origin).with_name("utils") / "loading_report.py")
    texts = [path.read_text("utf-8") for path in sources if path.exists()]
    assert any(beginning in text for text in texts), "the library no longer says so"
    shown: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(library)
    logger.addHandler(handler)
    try:
        logger.error(f"{beginning}: and its reason")
        logger.error("the file is damaged: %s", beginning)
    finally:
        logger.removeHandler(handler)
    assert shown == [f"the file is damaged: {beginning}"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.00012, "0.00012"), (3.14159, "3.14"), (999.4, "999"), (999.7, "1,000"), (-45_678.9, "-45,679"), (2e7, "20,000,000"),
     (float("inf"), "inf"), (float("nan"), "nan")],
)  # fmt: skip
def test_a_large_number_is_written_so_that_it_can_be_read_aloud(value: float, text: str) -> None:
    assert format_number(value) == text


def test_no_text_counts_one_of_a_thing_in_the_plural() -> None:
    assert format_count(1, "passage") == "1 passage"
    assert format_count(1_200, "passage") == "1,200 passages"
    # A count in a text goes through format_count; tables have their nouns in a heading.
    nouns = "documents|questions|passages|texts|rows|prompts|requests|recipes"
    written = re.compile(rf"\{{(len\([^{{}}]*\)|[\w.]*n_[a-z]+|[\w.]+count)(:,)?\}} (?:{nouns})\b")
    found = [
        f"{path.name}: {match[0]}"
        for path in sorted(SOURCE.rglob("*.py"))
        for match in written.finditer(path.read_text("utf-8"))
    ]
    assert found == []
