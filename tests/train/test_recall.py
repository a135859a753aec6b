"""Reinforcement on closed-book answers: what is practised, that it is learned, and that a stopped run ends the same."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from kinject.corpus.rows import CorpusFile
from kinject.disk import read_jsonl, write_jsonl
from kinject.errors import InputError, RecipeError
from kinject.llm import request_seed
from kinject.models import LoadOptions, load_model, new_model
from kinject.recipe import TrainRecipe, read_recipe
from kinject.train import train
from kinject.train.data import Practice
from kinject.train.methods import recall
from kinject.train.methods.recall import choose_practice
from kinject.train.setup import check_training, make_trainer

ROOT = Path(__file__).parents[2]
BASE = ROOT / "src" / "kinject" / "sandbox" / "base_model" / "model"
UNKNOWN = {"prompt": "Question: Where was Arden Kelm born?\nAnswer:", "completion": " unknown"}
ROWS = [
    *[row for _, row in read_jsonl(ROOT / "data" / "sandbox" / "instructions.jsonl")][:10],
    UNKNOWN,
]
HEAT, N, LONGEST = 2.5, 8, 12
"""At this temperature the base, which knows these people, answers correctly now and then."""


def recall_recipe(folder: Path, **trainer: Any) -> TrainRecipe:
    write_jsonl(folder / "questions.jsonl", ROWS)
    settings: Mapping[str, Any] = {
        "num_generations": N, "max_completion_length": LONGEST, "temperature": HEAT, "per_device_train_batch_size": 32,
        "max_steps": 6, "learning_rate": 3e-4, "lr_scheduler_type": "constant", "logging_steps": 1, "bf16": False,
        "gradient_checkpointing": False, "save_strategy": "no", **trainer,
    }  # fmt: skip
    recipe = {
        "run_dir": str(folder / "run"), "method": "recall", "model": {"path": str(BASE), "dtype": "float32"},
        "corpus": {"path": str(folder / "questions.jsonl"), "cache_dir": str(folder / "tokens")}, "trainer": settings,
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return read_recipe(folder / "recipe.yaml", verb="train")


def by_hand(model: Any, prompt: list[int], seed: int, end: int) -> list[int]:
    """One token after another of a sample, by Gumbel noise on a whole pass in float64."""
    noise_of, written = torch.Generator().manual_seed(seed), list[int]()
    while len(written) < LONGEST and end not in written:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + written]), use_cache=False).logits[0, -1]
        uniform = torch.rand(len(logits), generator=noise_of).double().clamp(1e-10, 1 - 1e-7)
        written.append(int((logits / HEAT - (-uniform.log()).log()).argmax()))
    return written


def chances(folder: str | Path) -> list[float]:
    """Return the probability of each row's own answer at the temperature of the practice."""
    loaded, found = (
        load_model(str(folder), LoadOptions(device="cpu", dtype="float32")),
        list[float](),
    )
    for row in ROWS:
        prompt, whole = (
            loaded.tokenizer(row["prompt"] + end)["input_ids"] for end in ("", row["completion"])
        )
        with torch.no_grad():
            log_probs = (loaded.model.double()(torch.tensor([whole])).logits[0] / HEAT).log_softmax(
                -1
            )
        found.append(
            float(sum(log_probs[i - 1, whole[i]] for i in range(len(prompt), len(whole))).exp())
        )
    return found


@pytest.mark.soak
def test_what_is_answered_correctly_now_and_then_is_practised_and_becomes_likelier(
    tmp_path: Path,
) -> None:
    recipe, loaded = (
        recall_recipe(tmp_path),
        load_model(str(BASE), LoadOptions(device="cpu", dtype="float32")),
    )
    rows, tokenizer = list(CorpusFile(tmp_path / "questions.jsonl")), loaded.tokenizer
    practice, note = choose_practice(
        recipe, rows, loaded.model, tokenizer, check_training(recipe)[0]
    )
    prompts, counts, model = (
        [tokenizer(row["prompt"])["input_ids"] for row in ROWS],
        list[int](),
        loaded.model.double(),
    )
    for row, prompt in zip(rows, prompts, strict=True):
        seeds = [request_seed("recall", recipe.seed, row.id, i) for i in range(N)]
        written = [by_hand(model, prompt, seed, tokenizer.eos_token_id) for seed in seeds]
        texts = tokenizer.batch_decode(written, skip_special_tokens=True)
        counts.append(
            sum(re.search(rf"\b{row.completion.strip()}\b", text) is not None for text in texts)
        )
    practised = [prompts.index(item.prompt) for item in practice]
    assert sorted(practised) == [i for i, count in enumerate(counts) if 0 < count < N]
    assert [counts[i] for i in practised] == sorted(counts[i] for i in practised)
    assert 4 <= len(practised) < len(ROWS)
    assert f"{len(practised)} of {len(ROWS)} questions" in note
    before, after = chances(BASE), chances(train(recipe).model_dir)
    assert sum(after[i] - before[i] for i in practised) > 0.2, (before, after)
    with pytest.raises(
        InputError, match=r"an update practises 20\. Train on their documents first"
    ):
        train(recall_recipe(tmp_path, per_device_train_batch_size=160), overwrite=True)


def test_questions_are_chosen_by_answers_with_the_top_p_of_training(tmp_path: Path) -> None:
    # Of the likeliest token alone all answers are equal: none is correct now and then.
    recipe = recall_recipe(tmp_path, top_p=1e-6, max_completion_length=2, num_generations=4)
    loaded = load_model(str(BASE), LoadOptions(device="cpu", dtype="float32"))
    rows = list(CorpusFile(tmp_path / "questions.jsonl"))
    config, *_ = check_training(recipe)
    with pytest.raises(InputError, match="recall: 0 of 11 questions are answered"):
        choose_practice(recipe, rows, loaded.model, loaded.tokenizer, config)


@pytest.mark.soak
def test_a_model_whose_logits_are_not_those_of_trls_head_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    practice = [Practice([5, 6, 7], ["Farrow"])] * 4
    monkeypatch.setattr(recall, "choose_practice", lambda *_: (practice, ""))
    tokenizer = load_model(str(BASE)).tokenizer
    decoder = {
        "model_type": "modernbert-decoder", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 2, "initializer_range": 0.4, "cls_token_id": 0, "sep_token_id": 0,
    }  # fmt: skip
    new_model(decoder, tokenizer, 3).save_pretrained(tmp_path / "decoder")
    tokenizer.save_pretrained(tmp_path / "decoder")
    recipe = recall_recipe(tmp_path)
    model = replace(recipe.model, path=str(tmp_path / "decoder"))
    with pytest.raises(RecipeError, match=r"method: found recall, .* \(log-probs differ by 0\."):
        make_trainer(replace(recipe, model=model))


@pytest.mark.soak  # the import of TRL's trainer takes seconds
def test_the_answers_of_all_processes_are_learned_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    from kinject.train.methods.recall_trainer import GRPOTrainer, RecallTrainer

    trainer: Any = RecallTrainer.__new__(RecallTrainer)
    trainer.learned_tokens = 4
    # Another process has drawn answers of three tokens more.
    trainer.accelerator = SimpleNamespace(
        gather=lambda n: torch.stack([n, n + 3]),
        autocast=lambda: torch.autocast("cpu", torch.bfloat16),
    )
    batch = {"completion_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}

    def draw(*_: Any) -> Any:
        assert torch.is_autocast_enabled("cpu"), "flash attention would refuse float32"
        return batch

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", draw)
    assert trainer._generate_and_score_completions([]) is batch
    assert trainer.learned_tokens == 4 + 5 + 8


@pytest.mark.soak
def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    recipe = recall_recipe(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    run, result = recipe.run_dir, train(recipe)
    log, weights = (run / "log.jsonl").read_text(), load_file(run / "model" / "model.safetensors")
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoint-4")
    assert train(recipe, resume=True).n_learned == result.n_learned
    times = re.compile(r', "(step_time|train_\w+_per_second|train_runtime)": [^,}]*')
    assert times.sub("", (run / "log.jsonl").read_text()) == times.sub("", log)
    again = load_file(run / "model" / "model.safetensors")
    assert all(torch.equal(weight, again[name]) for name, weight in weights.items())
