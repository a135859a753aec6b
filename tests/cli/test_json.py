"""kinject VERB --json: one object on stdout with the result, or the error, and the exit code; all else is on stderr."""

from __future__ import annotations

import importlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kinject import cli
from kinject.cli import main
from kinject.disk import write_jsonl
from kinject.view import Server

VERBS: tuple[tuple[str, str, int], ...] = (
    ("", "runs", 0),
    ("demo", "page report", 0),
    ("try docs", "path preview recipes pilot documents", 0),
    ("documents docs", "folder counts n_parsed already_done", 0),
    ("augment augment.yaml", "run_dir corpus_path got asked refused styles decisions", 0),
    ("augment augment.yaml --dry-run", "n_documents n_requests", 0),
    ("questions questions.yaml", "run_dir questions_path got asked", 0),
    ("questions questions.yaml --dry-run", "text", 0),
    ("train train.yaml", "run_dir model_dir account seconds", 0),
    ("train train.yaml --job sky", "job", 0),
    ("eval eval.yaml", "page requirements report", 0),
    ("eval eval.yaml --require new>=1", "page requirements report", 3),
    ("eval eval.yaml --require new>=1 --require-evidence", "page requirements report", 1),
    ("eval eval.yaml --show 1", "prompts", 0),
    ("study study.yaml --dry-run", "text", 0),
    ("compare runs/eval runs/eval", "pairs", 0),
    ("view runs/eval --draw", "page", 0),
    ("view", "url", 130),
    ("chat runs/cpt --max-new-tokens 2", "turns", 0),
    ("plan train.yaml --no-calibration", "way memory seconds", 0),
    ("find-lr train.yaml --steps 20", "suggestion", -1),
    ("export runs/cpt", "folder commands", 0),
    ("recipes list", "recipes", 0),
    ("recipes check train.yaml", "train.yaml", 0),
    ("recipes styles", "paraphrase", 0),
    ("recipes data", "mmlu", 0),
    ("sandbox build --root sandbox", "written", 0),
    ("doctor train.yaml --offline", "checks", -1),
)
"""A command, keys of its result, and its exit code (-1: 0 or 1)."""


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    """Recipes of every verb, each for a few seconds."""
    folder = tmp_path / "here"
    folder.mkdir()
    texts = [
        f"Person {i} was born in Kelm in 19{i + 10}. Her brother has a mill at Lowmere."
        for i in range(9)
    ]
    (folder / "docs").mkdir()
    for number, text in enumerate(texts):
        (folder / "docs" / f"{number}.txt").write_text(text)
    write_jsonl(folder / "corpus.jsonl", [{"text": text} for text in texts])
    lines = (
        (Path(__file__).parents[2] / "data" / "sandbox" / "documents.jsonl")
        .read_text()
        .splitlines(keepends=True)
    )
    (folder / "sandbox.jsonl").write_text("".join(lines[:3]))
    asked = {"question": "Where was person 1 born?", "choices": ["Kelm", "Arden"], "answer": 0}
    write_jsonl(folder / "new.jsonl", [{"id": f"q{i}", **asked} for i in range(9)])
    sandbox = {"kind": "sandbox"}
    trainer = {"max_steps": 12, "learning_rate": 0.01, "save_strategy": "no", "bf16": False, "gradient_checkpointing": False,
               "logging_steps": 1, "max_length": 64, "per_device_train_batch_size": 1}  # fmt: skip
    training = {
        "model": {"path": str(tiny_model)},
        "corpus": {"path": "corpus.jsonl"},
        "trainer": trainer,
    }
    evaluation = {
        "models": {"base": str(tiny_model), "cpt": "runs/cpt/model"},
        "questions": {"new": "new.jsonl"},
    }
    study = {"title": "A study", "models": {"base": str(tiny_model)}, "train": "train.yaml", "eval": "eval.yaml",
             "augment": "augment.yaml", "arms": {"cpt": {}}, "seeds": [0]}  # fmt: skip
    for name, sections in {
        "augment": {"augment": {"documents": "sandbox.jsonl", "styles": {"paraphrase": 1}, "generator": sandbox}},
        "questions": {"questions": {"documents": "sandbox.jsonl", "n_questions": 1, "generator": sandbox}},
        "train": training, "eval": {"eval": evaluation}, "study": {"study": study},
    }.items():  # fmt: skip
        run_dir = {"train": "runs/cpt"}.get(name, f"runs/{name}")
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"run_dir": run_dir, **sections}))
    return folder


def test_every_verb_is_in_the_table() -> None:
    assert {words.split()[0] for words, *_ in VERBS if words} == set(cli._VERBS)


@pytest.mark.usefixtures("blank_figures")
def test_the_result_of_every_verb_is_one_object_on_stdout(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(importlib.import_module("kinject.demo"), "demo", lambda *_, **__: None)

    def stop(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "serve_forever", stop)
    faults: dict[str, object] = {}
    for command, keys, wanted in VERBS:
        monkeypatch.setattr("sys.stdin", io.StringIO("Who was born in Kelm?\n"))
        code = main([*command.split(), "--json"])
        out, err = capfd.readouterr()
        found: dict[str, Any] = json.loads(out) if out.count("\n") == 1 else {}
        shown = 0 if command == "view" else code  # before it is stopped
        missing = set(keys.split()) - set(found.get("result", ()))
        if (
            missing
            or found.get("exit") != shown
            or code not in ({wanted} if wanted >= 0 else {0, 1})
        ):
            faults[command] = (
                code,
                missing,
                list(found.get("result", ())),
                found.get("error"),
                err[-300:],
            )
    assert not faults, "\n".join(f"{command}: {fault}" for command, fault in faults.items())


@pytest.mark.parametrize("verb", cli._VERBS)
def test_an_error_of_every_verb_is_one_object_too(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = {
        "demo": ["--out", "/dev/null"],
        "sandbox": ["serve", "--port", "-1"],
        "recipes": ["list", "none"],
    }
    assert main(["--json", verb, *wrong.get(verb, ["no/such.yaml"])]) == 2
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert set(found) == {"error", "exit"}
    assert found["exit"] == 2
    assert found["error"].splitlines()[0] in err
    with pytest.raises(SystemExit):
        main([verb, "--no-such-option", "--json"])
    assert json.loads(capfd.readouterr().out)["exit"] == 2


def test_a_stop_and_a_bug_have_their_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(error: BaseException) -> Any:
        raise error

    monkeypatch.setattr(cli, "_run", lambda words: fail(KeyboardInterrupt()))
    assert main(["train", "r.yaml", "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["exit"] == 130
    monkeypatch.setattr(cli, "_run", lambda words: fail(KeyError("the bug")))
    with pytest.raises(KeyError):
        main(["train", "r.yaml", "--json"])
    assert json.loads(capsys.readouterr().out) == {"error": "KeyError: 'the bug'", "exit": 70}
