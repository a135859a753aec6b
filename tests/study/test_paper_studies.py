"""The paper's two studies as they are shipped, with tiny models of their architectures and a few documents."""

from __future__ import annotations

import copy
import csv
import json
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from in_process import InProcess

from kinject.augment.questions import make_questions
from kinject.disk import write_jsonl
from kinject.models import new_model, train_tokenizer
from kinject.recipe import read_recipe
from kinject.recipe.yaml_lines import read_yaml
from kinject.results import Report
from kinject.sandbox.build import create_documents
from kinject.sandbox.people import create_country
from kinject.sandbox.questions import create_questions
from kinject.study.run import run_study
from kinject.types import Question

pytestmark = pytest.mark.usefixtures("blank_figures")

ROOT = Path(__file__).parents[2]
PEOPLE = create_country().new[:6]
SUBJECTS = ("anatomy", "astronomy", "college_biology", "college_chemistry", "prehistory")
TINY = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 2048,
}  # fmt: skip
FOR_A_CPU = {
    "augment.generator.kind": "sandbox", "eval.retrieval.kind": "bm25", "eval.retrieval.k": [1, 2],
    "trainer.per_device_train_batch_size": 4, "trainer.gradient_accumulation_steps": 1, "trainer.num_train_epochs": 2,
}  # fmt: skip

Go = Callable[..., tuple[Report, InProcess]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the shipped recipes, documents where they look for them, and tiny models."""
    root = tmp_path_factory.mktemp("paper")
    shutil.copytree(ROOT / "recipes", root / "recipes")
    documents = create_documents(PEOPLE, "new")
    for name in ("current-events", "mmlu-wikipedia"):
        write_jsonl(root / "data" / name / "documents.jsonl", documents)
    shutil.copytree(ROOT / "data" / "subjects", root / "data" / "subjects")
    rows = [
        {"prompt": f"Question: What is {i} and {i}?\nAnswer:", "completion": f" {2 * i}"}
        for i in range(20)
    ]
    write_jsonl(root / "data" / "instructions.jsonl", rows)
    general = create_questions(PEOPLE, 1)
    for split, part in (("dev", general[4:10]), ("test", general[:4])):
        _write_csv(root / "data" / "mmlu" / split / f"miscellaneous_{split}.csv", part)
    tokenizer = train_tokenizer([document.text for document in documents], 400)
    for seed, (name, kind) in enumerate(
        (("mistral", "mistral"), ("llama2", "llama"), ("orca2", "llama"))
    ):
        new_model({"model_type": kind, **TINY}, tokenizer, seed=seed).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root


@pytest.fixture
def go(root: Path, monkeypatch: pytest.MonkeyPatch) -> Go:
    """Run a shipped study with the named arms and models: go(name, models, arms, grid)."""
    monkeypatch.chdir(root)

    def run(name: str, models: Sequence[str], arms: Sequence[str], grid: Sequence[float]) -> Any:
        path = Path("recipes/studies") / f"{name}.yaml"
        section = copy.deepcopy(read_yaml(path).root["study"])
        claims = {
            key: claim
            for key, claim in section["claims"].items()
            if {"base", *arms} >= _arms_of(claim)
        }
        chosen = {key: choice for key, choice in section["tune"].items() if choice["arm"] in arms}
        for choice in chosen.values():
            choice["values"] = list(grid)
            choice["arms"] = [arm for arm in choice["arms"] if arm in arms]
        changed = {
            "models": {model: model for model in models},
            "arms": {arm: section["arms"][arm] for arm in arms}, "claims": claims, "tune": chosen,
            "overrides": section["overrides"] | FOR_A_CPU, "sweeps": None, "seeds": [0],
        }  # fmt: skip
        overrides = [f"study.{key}={json.dumps(value)}" for key, value in changed.items()]
        executor = InProcess()
        result, page = run_study(read_recipe(path, overrides, "study"), lambda: executor)
        assert page.is_file()
        assert result.failures == ()
        return result, executor

    return run


def _arms_of(claim: dict[str, str]) -> set[str]:
    return {claim[key].removesuffix("+rag") for key in ("arm", "baseline") if key in claim} or {
        "a curve"
    }


def _write_csv(path: Path, questions: Sequence[Question]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        for question in questions:
            csv.writer(file).writerow(
                [question.question, *question.choices, "ABCD"[question.answer]]
            )


@pytest.mark.soak
def test_the_study_of_current_events_compares_both_corpora_with_every_control(
    root: Path, go: Go
) -> None:
    recipe = read_recipe(
        Path("recipes/studies/paper/questions.yaml"),
        ["questions.generator.kind=sandbox", "questions.validation=0.4"],
    )
    questions_result = make_questions(recipe)
    assert questions_result.got == questions_result.asked == 12
    arms = ("ft-reg", "ft-par", "repeat steps", "instruction tuning")
    result, executor = go("paper-current-events", ("mistral",), arms, [1e-5])
    assert {s.arm for s in result.results} == {"base", *arms}
    assert {s.k for s in result.results if s.arm == "ft-par"} == {0, 1, 2}
    assert {s.format for s in result.results} == {
        "letters",
        "texts",
        "letters-no-question",
        "texts-no-question",
    }
    assert {choice.arm for choice in result.choices if choice.key == "trainer.learning_rate"} == {
        "ft-reg",
        "ft-par",
    }
    steps = {
        stage.label.split(",")[0]: _steps(stage.folder)
        for stage in executor.submitted
        if stage.kind == "train"
    }
    assert steps["repeat steps"] == steps["ft-par"] > steps["ft-reg"] == steps["instruction tuning"]
    assert {
        s.role for s in result.results if (s.question_set, s.format) == ("general", "texts")
    } == {"retention"}
    assert {claim.name for claim in result.claims} == {
        "retrieval beats fine-tuning", "paraphrases teach more", "fine-tuning teaches", "instructions add little",
        "fine-tuning forgets",
    }  # fmt: skip


def _steps(folder: Path) -> int:
    return int(json.loads((folder / "manifest.json").read_text("utf-8"))["counts"]["steps"])


def _write_mmlu(root: Path) -> None:
    questions = create_questions(PEOPLE, 0)
    for index, subject in enumerate(SUBJECTS):
        subject_rows = questions[6 * index : 6 * index + 6]
        others = questions[6 * (index + 1) % 30 :][:6]
        for split, part in (
            ("dev", others),
            ("val", subject_rows[:2]),
            ("test", subject_rows[2:4]),
        ):
            _write_csv(root / "data" / "mmlu" / split / f"{subject}_{split}.csv", part)


@pytest.mark.soak
def test_the_study_of_mmlu_asks_five_subjects_with_examples_and_chooses_on_their_validation_files(
    root: Path, go: Go
) -> None:
    _write_mmlu(root)
    result, _ = go("paper-mmlu", ("llama2",), ("ft-reg",), [1e-5])
    assert {(s.model, s.arm) for s in result.results} == {
        (m, arm) for m in result.models for arm in ("base", "ft-reg")
    }
    assert {s.question_set for s in result.results} == {*SUBJECTS, "general"}
    assert {(s.format, s.shots) for s in result.results if s.role != "baseline"} == {
        (format, shots) for format in ("letters", "texts") for shots in (0, 5)
    }
    rate = next(choice for choice in result.choices if choice.key == "trainer.learning_rate")
    assert rate.question_set == ", ".join(SUBJECTS)
    assert rate.candidates[0][2] == 10, "two validation questions of each subject"
    assert {s.n for s in result.results if s.question_set != "general"} == {2}
    assert len(result.claims) == len(SUBJECTS), "the other claims are on arms that are not run here"


def test_mmlus_own_questions_are_asked_of_the_models_of_the_laptops_study(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    _write_mmlu(root)
    own, other = (
        read_recipe(f"recipes/studies/paper-laptop{name}.yaml", verb="study", check_inputs=False)
        for name in ("", "-mmlu")
    )
    shared = ("models", "augment", "train", "arms", "sweeps", "seeds", "cache_dir", "keep_models")
    for key in shared:  # so that both studies have the same stages of training
        assert getattr(own.study, key) == getattr(other.study, key), key
    assert own.study.keep_models
    overrides = [
        'study.models={smollm2: llama2}', "study.sweeps=null", "study.cache_dir=runs/laptop",
        "study.overrides={augment.styles: {paraphrase: 1}, trainer.max_steps: 1, trainer.warmup_steps: 0, "
        "trainer.per_device_train_batch_size: 1, trainer.max_length: 64, eval.chat: false, "
        "augment.documents: data/subjects/anatomy.jsonl, "
        "augment.generator: {kind: file, path: data/subjects/anatomy-paraphrases.jsonl}}",
        "study.arms={ft-par: {}}", "study.claims=null",
    ]  # fmt: skip
    recipe = read_recipe("recipes/studies/paper-laptop-mmlu.yaml", overrides, "study")
    result, _ = run_study(recipe, InProcess)
    assert result.failures == ()
    asked = {(s.question_set, s.shots, s.arm, s.k) for s in result.results if s.role != "baseline"}
    assert asked == {
        (subject, shots, arm, k) for subject in SUBJECTS for shots in (0, 5) for arm in ("base", "ft-par") for k in (0, 1)
    }  # fmt: skip


@pytest.mark.parametrize("name", ["paper-mmlu", "paper-current-events"])
def test_the_variant_for_small_gpus_trains_adapters_on_4_bits_and_scores_in_them(
    name: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the command in the comment of the study has it; tests/plan/test_recipes.py plans the memory of its training."""
    monkeypatch.chdir(root)
    path = Path("recipes/studies") / f"{name}.yaml"
    lines = [
        line.removeprefix("#").strip()
        for line in path.read_text("utf-8").splitlines()
        if line.startswith("#")
    ]
    start = next(
        number for number, line in enumerate(lines) if line.startswith(f"kinject study {path}")
    )
    end = next(number for number in range(start, len(lines)) if not lines[number].endswith("\\"))
    words = shlex.split(" ".join(line.removesuffix("\\") for line in lines[start : end + 1]))
    plain, small = read_recipe(path, verb="study"), read_recipe(path, words[3:], "study")
    assert small.run_dir != plain.run_dir
    assert small.study.arms == plain.study.arms
    training = read_recipe(Path(small.study.train), verb="train", check_inputs=False)
    assert (training.model.quantization, training.adapter is not None) == ("4bit", True)
    (scored,) = [
        value
        for key, value in small.study.overrides.items()
        if key == "eval.model_defaults.quantization"
    ]
    assert scored == "4bit"
    assert small.study.overrides["augment.documents"] == plain.study.overrides["augment.documents"]
    for key, choice in plain.study.tune.items():
        assert min(small.study.tune[key].values) >= 10 * min(
            choice.values
        )  # an adapter has a rate of its own
