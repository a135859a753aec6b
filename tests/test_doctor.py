"""kinject doctor: the checks of recipes, their problems, and no key is ever shown."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from kinject.cli import main

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


def _train(model: Mapping[str, Any], corpus: str, **trainer: Any) -> dict[str, Any]:
    return {"model": model, "corpus": {"path": corpus}, "trainer": {"max_steps": 2, **trainer}}


def test_a_missing_input_is_a_problem_with_its_line(here: Path, tiny_model: Path) -> None:
    file = _write(
        "train.yaml", run_dir="runs/t", **_train({"path": str(tiny_model)}, "runs/a/corpus.jsonl")
    )
    (check,) = doctor.check_recipes([file])
    (problem,) = check.problems
    assert problem.startswith("train.yaml:5: corpus.path: found 'runs/a/corpus.jsonl'")
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/corpus.jsonl").write_text('{"text": "a"}\n')
    (check,) = doctor.check_recipes([file])
    assert not check.problems


def test_a_missing_input_is_a_problem_with_the_command_that_makes_it(
    here: Path, tiny_model: Path
) -> None:
    commands = {
        "runs/augment/corpus.jsonl": "kinject augment recipes/augment.yaml",
        "data/general.jsonl": "kinject recipes data get replay",
        "data/sandbox/first.jsonl": "kinject sandbox build",
    }
    for path, command in commands.items():
        recipe = _train({"path": str(tiny_model)}, path)
        (check,) = doctor.check_recipes([_write("train.yaml", run_dir="runs/t", **recipe)])
        (problem,) = check.problems
        assert problem.endswith(f"Make it first: {command}")
        assert "heck the path" not in problem


def test_what_this_machine_lacks_for_a_training_is_a_problem(here: Path, tiny_model: Path) -> None:
    Path("c.jsonl").write_text('{"text": "a"}\n')
    model = {"path": str(tiny_model), "device": "cpu", "attention": "flash_attention_2"}
    (check,) = doctor.check_recipes([_write("t.yaml", run_dir="r", **_train(model, "c.jsonl"))])
    (problem,) = check.problems
    assert "flash_attention_2" in problem
    assert "model.attention" in problem


def test_an_endpoint_without_key_is_a_problem(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("docs.jsonl").write_text('{"text": "a"}\n')
    generator = {"kind": "openai", "model": "m", "api_key_env": "OPENAI_API_KEY"}
    section = {"documents": "docs.jsonl", "styles": {"paraphrase": 1}, "generator": generator}
    file = _write("a.yaml", run_dir="r", augment=section)
    (check,) = doctor.check_recipes([file])
    assert [problem.rpartition(". ")[2] for problem in check.problems] == [
        "export OPENAI_API_KEY=..."
    ]
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    (check,) = doctor.check_recipes([file])
    assert not check.problems


def test_a_bad_recipe_is_reported_with_its_line(here: Path) -> None:
    Path("bad.yaml").write_text("run_dir: a\nsed: 1\n")
    (check,) = doctor.check_recipes([Path("bad.yaml")])
    assert check.problems[0].startswith("bad.yaml:2: ")


def test_the_command_ends_with_0_or_1_and_shows_no_key(
    here: Path,
    tiny_model: Path,
    canary_key: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", canary_key)
    monkeypatch.setattr(doctor, "_MIN_FREE_DISK", 0)
    Path("c.jsonl").write_text('{"text": "a"}\n')
    _write(
        "good.yaml", run_dir="r", **_train({"path": str(tiny_model), "device": "cpu"}, "c.jsonl")
    )
    code = main(["doctor", "good.yaml", "--offline"])
    out = capsys.readouterr().out
    assert "OPENAI_API_KEY set" in out
    assert "HF_TOKEN not set" in out
    assert "not tried (--offline)" in out
    assert "good.yaml" in out
    _write(
        "good.yaml", run_dir="r", **_train({"path": str(tiny_model), "device": "cpu"}, "gone.jsonl")
    )
    assert main(["doctor", "good.yaml", "--offline"]) == 1
    faulty = capsys.readouterr().out
    assert "found 'gone.jsonl'" in faulty
    # Several verbs find the same problem.
    assert "1 problem: " in faulty
    assert faulty.endswith("\n1 problem found.\n")
    Path("recipes/own").mkdir(parents=True)
    Path("good.yaml").rename("recipes/own/later.yaml")
    assert main(["doctor", "--offline"]) == 1  # every recipe below recipes/
    assert "recipes/own/later.yaml" in capsys.readouterr().out
    assert code == ("No problems found." not in out)
    assert main(["doctor", "nowhere.yaml"]) == 2


@pytest.mark.parametrize(
    ("cuda", "visible", "fix"),
    [
        (None, None, "Install a torch that is built for CUDA."),
        ("13.2", "", "CUDA_VISIBLE_DEVICES is '': unset it"),
        ("13.2", None, "This torch needs CUDA 13.2: "),
    ],
)
def test_a_gpu_that_torch_does_not_see_has_the_fix_of_its_cause(
    cuda: str | None, visible: str | None, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(doctor, "choose_device", lambda wanted: "cpu")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (problem,) = [text for text in doctor.examine([], offline=True).problems if "NVIDIA" in text]
    assert problem.startswith(f"this machine has an NVIDIA driver, but torch sees no GPU. {fix}")
