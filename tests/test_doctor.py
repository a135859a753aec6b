"""kinject doctor: the checks of recipes, a fix for each problem, and no key is ever shown."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from kinject.cli import main
from kinject.doctor import Check

doctor: Any = import_module("kinject.doctor")  # kinject.doctor is its function


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of one's own, with no keys in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in ("OPENAI_API_KEY", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def _write(name: str, **values: Any) -> Path:
    path = Path(name)
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def _check(*files: Path, answers: bool = True, hub: bool = True, offline: bool = False) -> list[Check]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "answers", lambda url: answers)
        return list(doctor.check_recipes(files, hub_reachable=hub, offline=offline))


def _train(model: Mapping[str, Any], corpus: str, **trainer: Any) -> dict[str, Any]:
    return {"model": model, "corpus": {"path": corpus}, "trainer": {"max_steps": 2, **trainer}}


def test_a_missing_input_is_to_be_made_by_the_recipe_that_makes_it(here: Path, tiny_model: Path) -> None:
    Path("docs.jsonl").write_text('{"text": "a"}\n')
    styles = {"documents": "docs.jsonl", "styles": {"paraphrase": 1}, "generator": {"kind": "sandbox"}}
    maker = _write("augment.yaml", run_dir="runs/a", augment=styles)
    reader = _write("train.yaml", run_dir="runs/t", **_train({"path": str(tiny_model)}, "runs/a/corpus.jsonl"))
    first, second = _check(maker, reader)
    assert not first.problems
    (problem,) = second.problems
    assert problem.message == "runs/a/corpus.jsonl does not exist"
    assert problem.location == "train.yaml:5"
    assert problem.fix == "Run kinject augment augment.yaml first."
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/corpus.jsonl").write_text('{"text": "a"}\n')
    assert not _check(maker, reader)[1].problems


def test_what_training_would_run_on_is_reported(here: Path, tiny_model: Path) -> None:
    Path("c.jsonl").write_text('{"text": "a"}\n')
    model = {"path": str(tiny_model), "device": "cpu", "attention": "eager"}
    (check,) = _check(_write("t.yaml", run_dir="r", **_train(model, "c.jsonl", bf16=False)))
    assert check.value == "trains on cpu in float32, eager"
    (check,) = _check(_write("t.yaml", run_dir="r", **_train({**model, "attention": "flash_attention_2"}, "c.jsonl")))
    (problem,) = check.problems
    assert "flash_attention_2" in problem.message
    assert "model.attention" in problem.message


def test_an_endpoint_without_key_or_answer_has_a_fix_for_each(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("docs.jsonl").write_text('{"text": "a"}\n')
    generator = {"kind": "openai", "model": "m", "api_key_env": "OPENAI_API_KEY"}
    section = {"documents": "docs.jsonl", "styles": {"paraphrase": 1}, "generator": generator}
    file = _write("a.yaml", run_dir="r", augment=section)
    (check,) = _check(file, answers=False)
    assert [item.fix.split()[0] for item in check.problems] == ["export", "Start"]
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    assert not _check(file)[0].problems
    assert not _check(file, answers=False, offline=True)[0].problems


def test_a_model_of_the_hub_that_is_out_of_reach_is_a_problem(here: Path) -> None:
    Path("c.jsonl").write_text('{"text": "a"}\n')
    file = _write("t.yaml", run_dir="r", **_train({"path": "nobody-anywhere/no-model-at-all"}, "c.jsonl"))
    assert not _check(file, hub=True)[0].problems
    (problem,) = _check(file, hub=False)[0].problems
    assert "nobody-anywhere/no-model-at-all is not cached" in problem.message


def test_a_bad_recipe_is_reported_with_its_line(here: Path) -> None:
    Path("bad.yaml").write_text("run_dir: a\nsed: 1\n")
    (check,) = _check(Path("bad.yaml"))
    assert check.problems[0].location == "bad.yaml:2"


def test_the_command_ends_with_0_or_1_and_shows_no_key(
    here: Path, tiny_model: Path, canary_key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", canary_key)
    monkeypatch.setattr(doctor, "_MIN_FREE_DISK", 0)
    Path("c.jsonl").write_text('{"text": "a"}\n')
    _write("good.yaml", run_dir="r", **_train({"path": str(tiny_model), "device": "cpu"}, "c.jsonl"))
    code = main(["doctor", "good.yaml", "--offline"])
    out = capsys.readouterr().out
    assert "OPENAI_API_KEY set" in out
    assert "HF_TOKEN not set" in out
    assert "not tried (--offline)" in out or "HF_HUB_OFFLINE" in out
    assert "good.yaml" in out
    assert "ok: trains on cpu" in out
    _write("good.yaml", run_dir="r", **_train({"path": str(tiny_model), "device": "cpu"}, "gone.jsonl"))
    assert main(["doctor", "good.yaml", "--offline"]) == 1
    assert "gone.jsonl does not exist" in capsys.readouterr().out
    assert code == ("No problems found." not in out)
    assert main(["doctor", "nowhere.yaml"]) == 2


def test_a_port_that_nothing_listens_on_does_not_answer() -> None:
    import socket

    with socket.socket() as free_port:
        free_port.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free_port.getsockname()[1]}/v1"
        assert not doctor.answers(url)
        free_port.listen()
        assert doctor.answers(url)
