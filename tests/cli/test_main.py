"""The command line as a user meets it: exit codes, one clear line for each mistake, and the whole loop."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kinject import cli
from kinject.cli import main
from kinject.process import SIGNALS


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of one's own to run commands in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _recipe(folder: Path, **sections: Any) -> str:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"run_dir": "runs/x", **sections}, sort_keys=False))
    return "recipe.yaml"


def _rows(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path.name


def _fails(capsys: pytest.CaptureFixture[str], command: list[str]) -> list[str]:
    """Return what a command that must end with code 2 printed to stderr, by line."""
    assert main(command) == 2
    return capsys.readouterr().err.strip().splitlines()


@pytest.mark.parametrize(
    "words",
    [
        ["documents", ""],
        ["documents", "texts", "run_dir="],
        ["try", ""],
        ["export", "run", "--out", ""],
        ["doctor", "--offline", ""],
    ],
)
def test_a_path_of_an_unset_variable_is_not_this_folder(
    words: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _rows(here / "texts", {"text": "Mina Osk sells the tickets."})
    try:
        code = main(words)
    except SystemExit as end:  # argparse
        code = end.code
    assert code == 2
    assert "found nothing, a path is needed" in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == ["texts"]


def test_a_missing_recipe_is_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _fails(capsys, ["train", "no.yaml"]) == [
        "kinject train: no.yaml: no recipe is there. Check the path; kinject try FOLDER writes recipes "
        "for your documents, and kinject recipes lists those that ship."
    ]
    for verb in ("train", "plan", "find-lr"):
        (line,) = _fails(capsys, [verb])
        assert "no recipe given. For your documents: kinject try FOLDER." in line
        assert line.endswith(f"recipes copy cpt, then kinject {verb} recipes/cpt.yaml")
    assert _fails(capsys, ["study"])[0].endswith(
        " kinject study recipes/studies/sandbox-quick.yaml"
    )
    (here / "runs" / "ponds" / "documents").mkdir(parents=True)
    (here / "runs" / "ponds" / "documents" / "documents.jsonl").touch()
    (line,) = _fails(capsys, ["find-lr"])
    assert line.endswith("(ponds). Name the recipe: kinject find-lr recipes/ponds/train.yaml")
    assert "found 2 recipes" in _fails(capsys, ["train", "a.yaml", "b.yaml"])[0]


def test_debug_lines_of_a_library_are_not_shown(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["augment", "missing.yaml"]) == 2
    library = logging.getLogger("bm25s")
    library.setLevel(logging.DEBUG)  # as its import does, after the program set it to errors
    library.debug("building")
    logging.getLogger("kinject").info("shown")
    assert "building" not in (err := capsys.readouterr().err)
    assert "shown" in err


def test_check_tells_every_bad_recipe(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "good.yaml").write_text("run_dir: a\n")
    (here / "bad.yaml").write_text("run_dir: a\nsed: 1\n")
    assert main(["recipes", "check", "."]) == 2
    out = capsys.readouterr()
    assert out.out == "valid: 1 of 2 recipes\n"
    assert out.err == "bad.yaml:2: sed: unknown key. Did you mean seed?\n"
    assert main(["recipes", "check", "good.yaml"]) == 0
    (here / "style.yaml").write_text(
        "run_dir: a\naugment:\n  documents: d.jsonl\n  styles:\n    paraphrse: 2\n  generator: {kind: sandbox}\n"
        "questions:\n  documents: d.jsonl\n  generator: {kind: openai}\n"
    )
    lines = _fails(capsys, ["recipes", "check", "style.yaml"])
    assert lines[0].startswith("style.yaml:9: questions.generator: model is missing.")
    assert (
        lines[1]
        == "style.yaml:5: augment.styles.paraphrse: unknown style. Did you mean paraphrase?"
    )
    assert "none-here: no recipe is there" in _fails(capsys, ["recipes", "check", "none-here"])[0]
    (here / "empty").mkdir()
    assert "no recipes (*.yaml) there" in _fails(capsys, ["recipes", "check", "empty"])[0]


def test_the_bare_command_says_what_comes_next(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([]) == 0
    assert "kinject recipes copy sandbox/demo" in capsys.readouterr().out


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[str], Any], int]]:
    """Return what runs a command as a program, with a `main` of the test's own, and streams left alone."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    monkeypatch.setattr(cli, "protect_streams", lambda: None)
    monkeypatch.setattr(cli, "lost_output", lambda: None)

    def _run(words: list[str], run: Any) -> int:
        monkeypatch.setattr("sys.argv", ["kinject", *words])
        monkeypatch.setattr(cli, "_run", run)
        return cli.program()

    yield _run
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--require", "a>=0.7", "--shard", "2/3"], "a shard has a part of the answers"),
        (["--require-evidence", "--shard", "1/3"], "a shard has a part of the answers"),
        (["--require-evidence"], "--require-evidence: there is no requirement. Add --require."),
    ],
)
def test_a_gate_that_would_check_nothing_is_refused(
    here: Path, words: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    question = {"id": "q", "question": "Who steers?", "choices": ["Tolo", "Mina"], "answer": 0}
    questions = {"a": _rows(here / "a.jsonl", question)}
    (here / "m").mkdir()
    recipe = _recipe(here, eval={"models": {"base": "m"}, "questions": questions})
    assert fault in " ".join(_fails(capsys, ["eval", recipe, *words]))


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["view", "--draw", "--open"], "--draw: it stops then"),
        (["view", "--port", "8123", "--draw"], "--draw: it stops then"),
        (["recipes", "styles", "--documents", "."], "--documents: is for the prompts of a style"),
    ],
)
def test_an_option_that_nothing_would_obey_is_refused(
    here: Path, words: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fault in " ".join(_fails(capsys, words))


@pytest.mark.parametrize("verb", ["find-lr", "train"])
def test_a_bug_keeps_its_traceback_and_has_a_code_of_its_own(
    verb: str, program: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(words: list[str]) -> int:
        raise KeyError("the bug")

    assert program([verb], fail) == 70
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "KeyError: 'the bug'" in err
    assert (
        f"kinject {verb}: this KeyError is a bug in kinject, not in your input."
        in err.splitlines()[-2]
    )


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("again", [False, True])
def test_a_signal_ends_a_verb_with_its_code_and_the_command_to_resume(
    number: signal.Signals, again: bool, program: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def work(words: list[str]) -> int:
        try:
            signal.raise_signal(number)
        finally:
            if again:
                signal.raise_signal(number)
        return 0

    assert program(["train", "r.yaml"], work) == 128 + number
    assert capsys.readouterr().err.endswith(" Resume with: kinject train r.yaml --resume\n")
    assert signal.getsignal(number) is signal.SIG_DFL


@pytest.mark.parametrize(
    "words",
    [
        ["train", "r.yaml", "--dry-run"],
        ["study", "s.yaml", "--dry-run"],
        ["find-lr", "r.yaml", "--batch"],
        ["chat", "runs/a"],
    ],
)
def test_what_keeps_no_work_is_started_again_by_the_same_command(
    words: list[str], program: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(words: list[str]) -> int:
        raise KeyboardInterrupt

    assert program(words, stop) == 130
    last = f"kinject {words[0]}: interrupted. Start again with: kinject {' '.join(words)}\n"
    assert capsys.readouterr().err.endswith(last)


@pytest.mark.parametrize("code", [0, 1, 2])
def test_text_that_a_full_disk_lost_is_reported_and_only_a_success_changes(
    code: int, program: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "lost_output", lambda: OSError(28, "No space left on device"))
    assert program(["recipes", "check"], lambda words: code) == (code or 1)
    lost = "kinject recipes: standard output: No space left on device. Its text is lost.\n"
    assert capsys.readouterr().err == ("" if code else lost)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate 2 GiB.\nMore."), OSError(24, "Too many open files"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory: you tried ..."),
        ImportError("libx.so: failed to map segment from shared object"), RuntimeError("can't start new thread"),
        OSError(12, "Cannot allocate memory"), RuntimeError("std::bad_alloc"),
    ],
)  # fmt: skip
def test_memory_threads_and_files_that_ran_out_are_one_line(
    error: Exception, program: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill(words: list[str]) -> int:
        raise error

    assert program(["train"], fill) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kinject train: ")
    assert (str(error).partition("\n")[0] or "out of memory").rpartition("] ")[
        2
    ] in line or "open files" in line


def _over(error: Exception) -> Exception:
    """Return an error of a library that was raised over another one."""
    above = RuntimeError("the writer failed")
    above.__cause__ = error
    return above


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            OSError(28, "No space left on device", "/dev/full"),
            "/dev/full: No space left on device.",
        ),
        (
            NotADirectoryError(20, "Not a directory", "a/file/x"),
            "a/file/x: Not a directory. Something moved",
        ),
        (
            FileNotFoundError(2, "No such file or directory", "gone/x"),
            "gone/x: No such file or directory. Something moved",
        ),
        (_over(OSError(28, "No space left on device")), "No space left on device."),
        (
            OSError(122, "Disk quota exceeded", "base/vocab.txt", None, "out/vocab.txt"),
            "kinject export: out/vocab.txt: Disk quota exceeded. Free space there",
        ),
        (OSError(36, "File name too long", "x" * 270), "File name too long. Check the path."),
        (OSError(40, "Too many levels of symbolic links", "a/b"), "a/b: Too many levels"),
        (
            RuntimeError(
                "[enforce fail at inline_container.cc:603] PytorchStreamWriter failed writing"
            ),
            "the disk is full",
        ),
        (
            RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 448 vs 342"),
            "the disk is full",
        ),
        (RuntimeError("basic_ios::clear: iostream error"), "the disk is full"),
    ],
)
def test_faults_of_disks_and_paths_are_one_line(
    error: Exception, words: str, program: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: list[str]) -> int:
        raise error

    assert program(["export", "runs/x"], fail) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kinject export: ")
    assert words in line


def test_an_unknown_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["trai"])
    assert stop.value.code == 2
    assert "trai: no such command. Did you mean train?" in capsys.readouterr().err
    for words, action in (("recipes chek", "check"), ("recipes data gte qa", "get")):
        with pytest.raises(SystemExit, match="2"):
            main(words.split())
        assert capsys.readouterr().err.endswith(f" Did you mean {action}?\n")


def test_a_recipe_with_an_equals_sign_in_its_name_is_read(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "seed=7.yaml").write_text("run_dir: a\nsed: 1\n")
    assert _fails(capsys, ["eval", "seed=7.yaml", "seed=x"])[:2] == [
        "seed=7.yaml:2: sed: unknown key. Did you mean seed?",
        "command line: seed: found 'x' (text), expected a whole number, as 1000.",
    ]


class Panic(BaseException):
    """As Rust's libraries raise."""


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("train a.yaml --weight_decay 0.1", "trainer.weight_decay=0.1"),
        ("train --lr=2e-5", "trainer.learning_rate=2e-5"),
        ("train --batch-size 8", "trainer.per_device_train_batch_size=8"),
        ("eval --limit 5", "eval.limit=5"),
        ("augment --budget", "augment.budget=VALUE"),
        ("train --trainer.weight-decay=0.2", "trainer.weight_decay=0.2"),
        ("study --eval.limit 9", "eval.limit=9"),
    ],
)
def test_an_option_that_is_a_key_of_the_recipe_is_written_as_one(
    capsys: pytest.CaptureFixture[str], words: str, key: str
) -> None:
    with pytest.raises(SystemExit):
        main(words.split())
    assert capsys.readouterr().err.endswith(f"with their section: {key}\n")


@pytest.mark.parametrize(
    ("words", "name", "hint"),
    [
        ("eval --merg-e", "kinject eval", " Did you mean --merge?"),
        ("train a.yaml --jsom", "kinject train", " Did you mean --json?"),
        ("sandbox serve --prt 4", "kinject sandbox serve", " Did you mean --port?"),
        ("export m --zzz", "kinject export", ""),
    ],
)
def test_an_unknown_option_is_refused_with_the_usage_of_its_verb(
    capsys: pytest.CaptureFixture[str], words: str, name: str, hint: str
) -> None:
    with pytest.raises(SystemExit):
        main(words.split())
    usage, *_, message = capsys.readouterr().err.splitlines()
    assert usage.startswith(f"usage: {name} ")
    assert message.startswith(f"{name}: error: unrecognized arguments: --")
    assert message.partition(".")[2] == hint


def test_a_panic_of_a_library_is_no_success(
    program: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(words: list[str]) -> int:
        raise Panic("called `Option::unwrap()` on a `None` value")

    assert program(["train"], fail) == 70
    assert "Panic" in capsys.readouterr().err


def test_missing_public_data_is_refused_with_the_command_that_fetches_it(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _recipe(
        here, eval={"models": {"base": "m"}, "questions": {"q": "data/mmlu/test/anatomy_test.csv"}}
    )
    assert main(["eval", path]) == 2
    assert capsys.readouterr().err.endswith(
        "The folder data/mmlu/test does not exist. Make it first: kinject recipes data get mmlu\n"
    )


@pytest.mark.parametrize("kinds", [["choices"], ["open", "choices"]])
def test_questions_are_counted_before_the_model_is_asked(
    kinds: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = _rows(
        here / "d.jsonl", {"text": "Arden was born in Lowmere."}, {"text": "Kelm has a school."}
    )
    generator = {"kind": "openai", "model": "dear", "base_url": "http://127.0.0.1:9/v1"}
    section = {"documents": documents, "n_questions": 3, "generator": generator, "kinds": kinds}
    assert main(["questions", _recipe(here, questions=section), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "2 documents, 2 passages: 6 questions, 2 requests or more go to dear for them"
    )


def test_the_sandbox_is_announced_once_for_questions_of_retention(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = _rows(here / "d.jsonl", {"text": "Bryn was born in Kelm."})
    section = {"documents": documents, "generator": {"kind": "sandbox"}}
    (here / "recipes").mkdir()
    (here / _recipe(here, questions=section)).rename("recipes/questions.yaml")
    assert main(["questions", "--retention", "--dry-run", "questions.n_questions=2"]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("recipes/questions.yaml: the sandbox")
    assert [line.partition(",")[0] for line in others] == ["1 document"]
