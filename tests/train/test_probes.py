"""Questions asked while a model trains: the numbers of kinject eval, and what they decide."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kinject.corpus.questions import read_questions
from kinject.corpus.rows import CorpusRow
from kinject.corpus.tokenize import Tokenization, tokenize_rows
from kinject.disk import read_jsonl
from kinject.errors import InputError
from kinject.eval.prompts import PromptRequest, render_prompt
from kinject.eval.scoring.encode import Encoder
from kinject.models import load_model
from kinject.recipe import Recipe, read_recipe
from kinject.recipe.sections import ProbesSection
from kinject.train import train
from kinject.train.probes import Probes, log_probs
from kinject.types import Question

MakeRecipe = Callable[..., Recipe]
WriteRows = Callable[[str, Sequence[Mapping[str, Any]]], Path]
TOWNS = ["Lowmere", "Stonegate", "Farrow", "Kelm"]
EVERY = {"eval_strategy": "steps", "eval_steps": 2}


@pytest.fixture
def questions(write_rows: WriteRows) -> Path:
    """Forty questions with options of many kinds, so that a random model does not always prefer the same one."""
    rng = random.Random(0)
    words = [
        *TOWNS,
        "the mill",
        "school",
        "1987",
        "she",
        "Answer",
        "a town",
        "Arden",
        "Bryn",
        "born",
        "taught her",
    ]
    rows = [
        {
            "question": f"Where was Person {i} born?",
            "choices": rng.sample(words, 4),
            "answer": i % 4,
        }
        for i in range(40)
    ]
    return write_rows("questions.jsonl", rows)


def _accuracies(run_dir: str | Path, name: str) -> dict[int, float]:
    rows = read_jsonl(Path(run_dir) / "log.jsonl")
    return {
        row["step"]: row[f"eval_{name}_accuracy"]
        for _, row in rows
        if f"eval_{name}_accuracy" in row
    }


@pytest.mark.parametrize("batch_tokens", [64, 4096])
def test_an_option_scores_what_it_scores_alone_in_the_tokens_of_kinject_eval(
    tiny_model: Path, batch_tokens: int
) -> None:
    loaded = load_model(str(tiny_model))
    questions = [
        Question(str(i), f"Where does {'she ' * i}live?", ("Farrow", "in the town of Kelm"), 0)
        for i in range(9)
    ]
    rows = [
        CorpusRow(q.id, "", "", "completion", prompt=f"Question: {q.question}\nAnswer:", completion=f" {text}")
        for q in questions for text in q.choices
    ]  # fmt: skip
    tokens = list(tokenize_rows(rows, loaded.tokenizer, Tokenization(bos=True, eos=False)))
    wanted, encoded = (
        [],
        Encoder(loaded.tokenizer).encode(
            [render_prompt(PromptRequest(q, "texts")) for q in questions]
        ),
    )
    exact = load_model(str(tiny_model)).model.double()
    for prompt in encoded:
        for context, continuation in zip(prompt.contexts, prompt.continuations, strict=True):
            ids = torch.tensor(np.concatenate([context, continuation]).astype(np.int64))[None]
            scores = exact(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
            wanted.append(
                sum(
                    scores[index - 1, ids[0, index]].item()
                    for index in range(len(context), ids.shape[1])
                )
            )
    assert log_probs(loaded.model, tokens, 0, batch_tokens) == pytest.approx(wanted, rel=1e-5)


def test_the_log_holds_the_accuracy_of_kinject_eval_before_during_and_after(
    make_recipe: MakeRecipe, tiny_model: Path, questions: Path, corpus: Path, tmp_path: Path
) -> None:
    from kinject.eval import evaluate

    sets = {"new": str(questions), "again": {"path": str(questions), "role": "retention"}}
    probes = {"questions": sets, "limit": 30}
    result = train(make_recipe(
        probes=probes, corpus={"path": str(corpus), "validation_corpus": str(corpus)},
        trainer={**EVERY, "max_steps": 8, "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 4},
    ))  # fmt: skip
    logged = _accuracies(result.run_dir, "new")
    assert list(logged) == [0, 2, 4, 6, 8]
    assert logged == _accuracies(result.run_dir, "again")
    models = {
        "base": str(tiny_model),
        "half": f"{result.run_dir}/checkpoint-4",
        "tuned": result.model_dir,
    }
    recipe = tmp_path / "eval.yaml"
    recipe.write_text(json.dumps({"run_dir": str(tmp_path / "eval"), "eval": {
        "models": models, "questions": {"new": str(questions)}, "limit": 30}}))  # fmt: skip
    results = [
        result
        for result in evaluate(read_recipe(recipe, verb="eval")).results
        if result.control is not None
    ]
    accuracies = {result.arm: result.accuracy for result in results}
    assert accuracies == {"base": logged[0], "half": logged[4], "tuned": logged[8]}
    controls = [row["eval_new_without_question"] for _, row in read_jsonl(Path(result.run_dir) / "log.jsonl")
                if "eval_new_without_question" in row]  # fmt: skip
    assert [result.control.accuracy for result in results] == pytest.approx(
        [controls[0], controls[2], controls[4]]
    )
    assert len(set(accuracies.values())) > 1
    losses = [
        row["eval_loss"]
        for _, row in read_jsonl(Path(result.run_dir) / "log.jsonl")
        if "eval_loss" in row
    ]
    assert losses[-1] < losses[0]


def test_the_checkpoint_with_the_best_probe_is_the_model(
    make_recipe: MakeRecipe, questions: Path
) -> None:
    trainer = {**EVERY, "eval_steps": 1, "max_steps": 8, "learning_rate": 2e-2, "save_strategy": "steps", "save_steps": 1,
               "load_best_model_at_end": True, "metric_for_best_model": "new_accuracy"}  # fmt: skip
    result = train(make_recipe(probes={"questions": {"new": str(questions)}}, trainer=trainer))
    logged = {step: value for step, value in _accuracies(result.run_dir, "new").items() if step}
    best = max(logged, key=lambda step: (logged[step], -step))
    assert logged[best] > min(logged.values())
    kept, chosen = (
        load_file(Path(result.run_dir) / name / "model.safetensors")
        for name in ("model", f"checkpoint-{best}")
    )
    assert all(torch.equal(kept[name], chosen[name]) for name in kept)


def test_a_run_that_forgets_too_much_stops(
    make_recipe: MakeRecipe, tiny_model: Path, questions: Path, write_rows: WriteRows
) -> None:
    loaded = load_model(str(tiny_model))
    items = [row for _, row in read_jsonl(questions)]
    probes = Probes(
        ProbesSection({"known": str(questions)}),
        {"known": read_questions(questions)},
        loaded.tokenizer,
        None,
    )
    sums = iter(log_probs(loaded.model, probes.sets[0].rows, 0, 4096))
    for item in items:  # what the base answers counts as right
        options = [next(sums) for _ in item["choices"]]
        item["answer"] = options.index(max(options))
    known = {"path": str(write_rows("known.jsonl", items)), "role": "retention"}
    result = train(make_recipe(
        probes={"questions": {"known": known}, "max_forgetting": 0.05},
        trainer={**EVERY, "eval_steps": 1, "max_steps": 30, "learning_rate": 0.05, "max_grad_norm": 0.0},
    ))  # fmt: skip
    logged = list(_accuracies(result.run_dir, "known").values())
    assert logged[0] == 1.0
    assert logged[-1] < 0.95 <= logged[-2]
    assert result.n_steps == len(logged) - 1 < 30


@pytest.mark.soak
def test_a_resumed_run_asks_and_decides_as_an_uninterrupted_one(
    make_recipe: MakeRecipe, questions: Path, tmp_path: Path
) -> None:
    trainer = {**EVERY, "max_steps": 8, "save_strategy": "steps", "save_steps": 3, "learning_rate": 1e-2,
               "metric_for_best_model": "new_accuracy"}  # fmt: skip
    probes = {"questions": {"new": str(questions)}}
    rows = []
    for name in ("straight", "broken"):
        recipe = make_recipe(run_dir=str(tmp_path / name), probes=probes, trainer=trainer)
        run_dir = Path(train(recipe).run_dir)
        if name == "broken":
            manifest = json.loads((run_dir / "manifest.json").read_text())
            (run_dir / "manifest.json").write_text(
                json.dumps({**manifest, "counts": {"finished": False}})
            )
            (run_dir / "checkpoint-8" / "complete.json").unlink(missing_ok=True)
            train(recipe, resume=True)
        kept = [{k: v for k, v in row.items() if "runtime" not in k and "per_second" not in k}
                for _, row in read_jsonl(run_dir / "log.jsonl") if "train_runtime" not in row]  # fmt: skip
        rows.append(kept)
    assert rows[0] == rows[1]


def test_long_questions_are_cut_from_the_left_to_the_window(
    tiny_model: Path, write_rows: WriteRows
) -> None:
    loaded = load_model(str(tiny_model))
    path = write_rows(
        "q.jsonl", [{"question": "where " * 99, "choices": ["Farrow", "Kelm"], "answer": 0}]
    )
    section, sets = ProbesSection({"q": str(path)}), {"q": read_questions(path)}
    rows = Probes(section, sets, loaded.tokenizer, 32).sets[0].rows
    assert [len(row.input_ids) for row in rows] == [33, 33]
    whole = Probes(section, sets, loaded.tokenizer, None).sets[0].rows
    assert rows[1].input_ids == whole[1].input_ids[-33:]
    with pytest.raises(InputError, match="option longer than the model's 1 tokens"):
        Probes(section, sets, loaded.tokenizer, 1)


def test_a_question_without_choices_is_refused(tiny_model: Path, write_rows: WriteRows) -> None:
    path = write_rows("open.jsonl", [{"question": "Where was Person 1 born?", "answers": ["Kelm"]}])
    with pytest.raises(InputError, match="choices: found 1, expected at least two"):
        Probes(
            ProbesSection({"q": str(path)}),
            {"q": read_questions(path)},
            load_model(str(tiny_model)).tokenizer,
            None,
        )
