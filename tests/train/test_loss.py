"""Smoothed labels, the hardest share and weighted rows move the weights as hand-written losses in float64 do."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from kinject.disk import read_jsonl
from kinject.errors import InputError
from kinject.models import load_model, new_model
from kinject.recipe import Recipe, RowWeightsSection
from kinject.recipe.sections import HardExampleMiningSection
from kinject.train import checkpoints, train
from kinject.train.objectives import HardExamples, TrainingLoss, row_weights
from kinject.train.setup import make_trainer
from kinject.train.trainer import KnowledgeTrainer
from small import quick

MakeRecipe = Callable[..., Recipe]
RATE, STEPS, MICRO, BATCH = 0.5, 3, 2, 4
SGD = {"optim": "sgd", "lr_scheduler_type": "constant", "learning_rate": RATE, "max_grad_norm": 0.0, "max_steps": STEPS,
       "train_sampling_strategy": "sequential", "per_device_train_batch_size": MICRO,
       "gradient_accumulation_steps": BATCH // MICRO}  # fmt: skip


def _hardest(fraction: float, unit: Any = "tokens") -> tuple[HardExamples]:
    return (HardExamples(HardExampleMiningSection(fraction, unit)),)


def _nll(logp: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return -logp.gather(1, target[:, None])[:, 0]


def _smoothed(logp: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    soft = torch.full_like(logp, 0.2 / logp.shape[1])
    soft.scatter_(1, target[:, None], 0.8 + 0.2 / logp.shape[1])
    return -(soft * logp).sum(1)


def _loss_by_hand(hand: Any, step: int, kind: str, weight_of: dict[str, float]) -> torch.Tensor:
    """The loss of one update, written out: each batch of MICRO rows chooses by itself, all together are divided."""
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    rows = hand.rows_of(step)
    for start in range(0, len(rows), MICRO):
        texts = [
            (row, positions, losses)
            for row in rows[start : start + MICRO]
            for positions, losses in hand.losses(row, _smoothed if kind == "smoothed" else _nll)
        ]
        if kind == "smoothed":
            total, count = (
                total + sum(x.sum() for *_, x in texts),
                count + sum(len(x) for *_, x in texts),
            )
        elif kind == "tokens":
            ranked = sorted(
                (x for *_, losses in texts for x in losses), key=torch.Tensor.item, reverse=True
            )
            kept = math.ceil(len(ranked) * 0.3)
            total, count = total + sum(ranked[:kept]), count + kept
        elif kind == "rows":
            ranked = sorted(
                (losses.mean() for *_, losses in texts), key=torch.Tensor.item, reverse=True
            )
            kept = math.ceil(len(ranked) * 0.3)
            total, count = total + sum(ranked[:kept]), count + kept
        else:
            for row, positions, losses in texts:
                weight = weight_of[
                    " ".join(map(str, row.input_ids[positions[0] : positions[-1] + 1]))
                ]
                total, count = total + weight * losses.sum(), count + weight * len(losses)
    return total / count


@pytest.fixture
def weighted_corpus(tmp_path: Path) -> Path:
    """Texts that each have a weight of their own."""
    path = tmp_path / "weighted.jsonl"
    rows = [
        {"text": f"Person {i} works at the mill of Kelm in {1800 + 7 * i}.", "weight": (i % 5) / 2}
        for i in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    """Eleven texts with a weight each, some of a few words and some of many."""
    path = tmp_path / "uneven.jsonl"
    rows = [
        {
            "text": " ".join(
                f"The mill of Kelm sold {7 * i + n} sacks." for n in range(1, 4, i + 1)
            ),
            "document_id": f"d{i}",
            "weight": (i % 5) / 2,
        }
        for i in range(11)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "smoothed": ({}, {"label_smoothing_factor": 0.2}),
    "tokens": ({"techniques": {"hard_example_mining": {"fraction": 0.3}}}, {}),
    "rows": ({"techniques": {"hard_example_mining": {"fraction": 0.3, "unit": "rows"}}}, {}),
    "weighted": ({"techniques": {"row_weights": {"column": "weight"}}}, {}),
}


@pytest.mark.parametrize("kind", quick(CASES, "tokens", "weighted"))
def test_an_update_is_that_of_the_loss_written_out(
    make_recipe: MakeRecipe, by_hand: Any, weighted_corpus: Path, tmp_path: Path, kind: str
) -> None:
    sections, options = CASES[kind]
    corpus = {"path": str(weighted_corpus)}
    plain = train(
        make_recipe(corpus=corpus, trainer=SGD, run_dir=str(tmp_path / "plain"))
    ).model_dir
    recipe = make_recipe(corpus=corpus, trainer={**SGD, **options}, **sections)
    hand = by_hand(recipe, BATCH)
    base = {name: weight.detach().clone() for name, weight in hand.model.named_parameters()}
    tokenizer = load_model(plain).tokenizer
    weight_of = {}
    for _, row in read_jsonl(weighted_corpus):
        ids = [*tokenizer(row["text"], add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        weight_of[" ".join(map(str, ids))] = row["weight"]
    optimizer = torch.optim.SGD(hand.model.parameters(), lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        _loss_by_hand(hand, step, kind, weight_of).backward()
        optimizer.step()
    actual, other = (
        dict(load_model(folder).model.named_parameters())
        for folder in (train(recipe).model_dir, plain)
    )
    wanted = dict(hand.model.named_parameters())
    error = sum(((actual[n].double() - wanted[n]) ** 2).sum().item() for n in actual) ** 0.5
    moved = sum(((wanted[n] - base[n]) ** 2).sum().item() for n in actual) ** 0.5
    effect = sum(((actual[n] - other[n]) ** 2).sum().item() for n in actual) ** 0.5
    assert error < 1e-5 * moved
    assert effect > 100 * error


def test_smoothing_is_torchs_own_and_masked_tokens_have_no_part() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 11, generator=generator)
    labels = torch.randint(11, (2, 6), generator=generator)
    labels[0, 3], labels[1, 1] = -100, -100
    batch = {"labels": labels, "position_ids": torch.arange(6).expand(2, 6)}
    objective = TrainingLoss(smoothing=0.1)
    wanted = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)
    assert torch.allclose(
        objective.total(F.pad(logits, (0, 0, 0, 1)), batch) / objective.count(batch), wanted
    )


def test_the_hardest_rows_are_texts_wherever_they_stand() -> None:
    """Three texts in two packed rows; the second of the first row is the hardest by its mean, not by its sum."""
    labels = torch.tensor([[-100, 0, 0, 0, -100, 0], [-100, 0, 0, 0, 0, 0]])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5]])
    losses = torch.tensor([[1.0, 1, 1, 0, 2.0], [0.5] * 5])
    logits = torch.stack(
        [-losses.expm1().log(), torch.zeros(2, 5)], -1
    )  # -log sigmoid(-log(e^l - 1)) = l
    logits[0, 3] = 0.0  # the first token of a text is no one's to foretell
    batch = {"labels": labels, "position_ids": positions}
    objective = TrainingLoss(objectives=_hardest(0.3, "rows"))
    assert int(objective.count(batch)) == 1
    assert float(objective.total(F.pad(logits, (0, 0, 0, 1)), batch)) == pytest.approx(2.0)


def test_the_held_out_loss_stays_the_plain_one(
    make_recipe: MakeRecipe, corpus: Path, tmp_path: Path
) -> None:
    losses = []
    for options, sections in (
        ({}, {}),
        (
            {"label_smoothing_factor": 0.3},
            {"techniques": {"hard_example_mining": {"fraction": 0.2}}},
        ),
        ({"loss_type": "dft"}, {}),
    ):
        recipe = make_recipe(
            corpus={"path": str(corpus), "validation_corpus": str(corpus)}, **sections,
            trainer={**options, "eval_strategy": "steps", "eval_on_start": True, "eval_steps": 9, "max_steps": 1},
        )  # fmt: skip
        result = train(recipe, overwrite=True)
        log = [row for _, row in read_jsonl(Path(result.run_dir) / "log.jsonl")]
        losses.append(next(row["eval_loss"] for row in log if "eval_loss" in row))
    assert losses[0] == losses[1] == losses[2]


def _held_out_by_hand(hand: Any) -> float:
    """The mean of the losses of all tokens, each text alone, in float64."""
    with torch.no_grad():
        texts = [losses for row in hand.rows for _, losses in hand.losses(row, _nll)]
    return float(torch.cat(texts).mean())


@pytest.mark.parametrize("computes_loss", [True, False])
def test_accumulated_batches_count_by_their_tokens_whatever_the_models_own_loss_is(
    make_recipe: MakeRecipe,
    uneven: Path,
    by_hand: Any,
    monkeypatch: pytest.MonkeyPatch,
    computes_loss: bool,
) -> None:
    """Also of a model that takes no divisor, as Gemma 4, here or by TRL as on a GPU."""
    monkeypatch.setattr(LlamaForCausalLM, "accepts_loss_kwargs", False, raising=False)
    if not computes_loss:
        monkeypatch.setattr(KnowledgeTrainer, "_computes_loss", lambda self: False)
    trainer = {
        "max_steps": 1, "packing": False, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 6,
    }  # fmt: skip
    recipe = make_recipe(corpus={"path": str(uneven)}, trainer=trainer)
    right = _held_out_by_hand(by_hand(recipe, 11))
    train(recipe)
    log = [row for _, row in read_jsonl(recipe.run_dir / "log.jsonl")]
    assert log[0]["loss"] == pytest.approx(right, rel=1e-6)


DECODER = {
    "model_type": "modernbert-decoder", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "local_attention": 32, "initializer_range": 0.3,
    "cls_token_id": 0, "sep_token_id": 0,
}  # fmt: skip


def test_a_model_that_trls_head_does_not_fit_is_trained_on_its_own_logits(
    make_recipe: MakeRecipe,
    uneven: Path,
    tiny_tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU. ModernBERT's decoder has a layer behind the states that TRL's head takes."""
    monkeypatch.setattr(
        KnowledgeTrainer, "computes_training_loss", lambda self: not self.fused_head_fits
    )
    new_model(DECODER, tiny_tokenizer, 4).save_pretrained(tmp_path / "decoder")
    tiny_tokenizer.save_pretrained(tmp_path / "decoder")
    recipe = make_recipe(
        model={"path": str(tmp_path / "decoder")},
        corpus={"path": str(uneven)},
        trainer={"packing": False},
    )
    trainer = make_trainer(recipe)
    _assert_loss_is_of_own_logits(trainer)
    assert sum("TRL's head" in note for note in trainer.notes) == 1


def _assert_loss_is_of_own_logits(trainer: Any) -> None:
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model.train(), dict(batch))
    with torch.no_grad():
        logits = trainer.model.eval()(input_ids=batch["input_ids"], use_cache=False).logits
    right = F.cross_entropy(logits[:, :-1].double().flatten(0, 1), batch["labels"][:, 1:].flatten())
    assert float(loss.detach()) == pytest.approx(float(right), rel=1e-5)


@pytest.mark.parametrize("tokens", [[9, 40, 41], {"lm_head": [7, 30]}])
def test_tokens_that_an_adapter_trains_of_the_head_learn_by_trls_head(
    make_recipe: MakeRecipe, uneven: Path, monkeypatch: pytest.MonkeyPatch, tokens: Any
) -> None:
    """As on a GPU. The tiny model's head is its embedding."""
    monkeypatch.setattr(KnowledgeTrainer, "computes_training_loss", lambda self: False)
    adapter = {"r": 2, "target_modules": ["v_proj"], "trainable_token_indices": tokens}
    recipe = make_recipe(adapter=adapter, corpus={"path": str(uneven)}, trainer={"packing": False})
    trainer = make_trainer(recipe)
    (rows,) = [
        weight
        for name, weight in trainer.model.named_parameters()
        if "trainable_tokens_delta" in name
    ]
    with torch.no_grad():
        rows += 0.5
    _assert_loss_is_of_own_logits(trainer)
    gradients = []
    batch = next(iter(trainer.get_train_dataloader()))
    for computes in (False, True):
        monkeypatch.setattr(KnowledgeTrainer, "_computes_loss", lambda self, own=computes: own)
        loss = trainer.compute_loss(trainer.model.train(), dict(batch))
        gradients += torch.autograd.grad(loss, rows)
    assert gradients[1].abs().max() > 0
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-7)


def test_the_loss_of_a_run_is_the_mean_over_processes(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the updates since the last logged loss, too, of which each process has its own part."""
    trainer: Any = make_trainer(make_recipe())
    monkeypatch.setattr(
        checkpoints, "nested_gather", lambda loss, mode: torch.stack([loss, loss + 3])
    )
    trainer._tr_loss, trainer.losses.made = torch.tensor(5.0), 2
    logs = {"train_loss": 0.0}
    trainer.log(logs)
    assert logs["train_loss"] == (5 + 8) / 2 / 2
    seen: list[float] = []
    monkeypatch.setattr(trainer.guard, "check_progress", lambda loss, norm, step: seen.append(loss))
    trainer.losses.begin_update(trainer._tr_loss)
    trainer._tr_loss += 7
    trainer._get_grad_norm(trainer.model, torch.tensor(0.5))
    assert seen == [(7 + 10) / 2], "so that no process stops alone"


@pytest.mark.parametrize(
    ("computes_loss", "packing"),
    quick(
        [(True, False), (False, True), (True, True), (False, False)], (True, False), (False, True)
    ),
)
def test_the_held_out_loss_is_the_mean_over_tokens_whatever_the_batch(
    make_recipe: MakeRecipe,
    uneven: Path,
    by_hand: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    packing: bool,
    computes_loss: bool,
) -> None:
    """Of rows of odd lengths, here or by TRL as on a GPU, and for updates of one size alone."""
    if not computes_loss:
        monkeypatch.setattr(KnowledgeTrainer, "_computes_loss", lambda self: False)
    corpus = {"path": str(uneven), "validation_corpus": str(uneven)}
    trainer = {"eval_strategy": "epoch", "eval_on_start": True, "max_steps": 1, "packing": packing}
    right = None
    for batch, drop_last in ((1, False), (4, False), (11, False), (4, True)):
        recipe = make_recipe(
            run_dir=str(tmp_path / f"run-{batch}-{drop_last}"),
            corpus=corpus,
            trainer={
                **trainer,
                "per_device_train_batch_size": 1,
                "per_device_eval_batch_size": batch,
                "dataloader_drop_last": drop_last,
            },
        )
        if right is None:
            right = _held_out_by_hand(by_hand(recipe, 1))
        train(recipe)
        log = [row for _, row in read_jsonl(recipe.run_dir / "log.jsonl")]
        first = next(row["eval_loss"] for row in log if "eval_loss" in row)
        assert first == pytest.approx(right, rel=1e-6), (batch, drop_last)


def _entropy(logp: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return -(logp.exp() * logp).sum(1)


def _is_likeliest(logp: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (logp.argmax(1) == target).double()


@pytest.mark.parametrize("batch", quick([1, 4, 11], 4))
def test_what_trl_logs_beside_the_loss_is_of_all_tokens_whatever_the_batch(
    make_recipe: MakeRecipe, uneven: Path, by_hand: Any, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """Its entropy and accuracy were means of batches, and of a padded batch it counted one row."""
    monkeypatch.setattr(KnowledgeTrainer, "_computes_loss", lambda self: False)  # as on a GPU
    trainer = {
        "max_steps": 1, "packing": False, "learning_rate": 1e-9, "per_device_eval_batch_size": batch, "eval_on_start": True,
        "per_device_train_batch_size": batch, "gradient_accumulation_steps": -(-11 // batch), "eval_strategy": "epoch",
        "train_sampling_strategy": "sequential",
    }  # fmt: skip
    recipe = make_recipe(
        corpus={"path": str(uneven), "validation_corpus": str(uneven)},
        trainer=trainer,
        guards={"instability": "ignore"},
    )
    hand = by_hand(recipe, 11)
    right = {}
    with torch.no_grad():
        for name, of_token in (("entropy", _entropy), ("mean_token_accuracy", _is_likeliest)):
            values = [of for row in hand.rows for _, of in hand.losses(row, of_token)]
            right[name] = float(torch.cat(values).mean())
    train(recipe)
    log = [row for _, row in read_jsonl(recipe.run_dir / "log.jsonl")]
    held_out = next(row for row in log if "eval_entropy" in row)
    trained = next(row for row in log if "entropy" in row)
    for name, value in right.items():
        assert held_out[f"eval_{name}"] == pytest.approx(value, rel=1e-5)
        assert trained[name] == pytest.approx(value, rel=1e-5)
    lengths = [len(row.input_ids) for row in hand.rows]
    batches = [lengths[start : start + batch] for start in range(0, 11, batch)]
    assert trained["num_tokens"] == sum(len(rows) * max(rows) for rows in batches)


@pytest.mark.parametrize("kind", quick([*CASES, "distill"], "weighted", "distill"))
def test_the_held_out_loss_of_every_objective_is_that_mean(
    make_recipe: MakeRecipe,
    uneven: Path,
    by_hand: Any,
    tiny_model: Path,
    tmp_path: Path,
    kind: str,
) -> None:
    sections, options = CASES.get(kind, ({}, {}))
    if kind == "distill":
        loaded = load_model(str(tiny_model))
        for parameter in loaded.model.parameters():
            parameter.data *= 2
        loaded.model.save_pretrained(tmp_path / "teacher")
        loaded.tokenizer.save_pretrained(tmp_path / "teacher")
        teacher = {"context": "none", "teacher": str(tmp_path / "teacher")}
        sections = {"method": "distill", "distillation": teacher}
    recipe = make_recipe(
        corpus={"path": str(uneven), "validation_corpus": str(uneven)},
        trainer={
            **options,
            "eval_strategy": "epoch",
            "eval_on_start": True,
            "max_steps": 1,
            "packing": False,
            "per_device_eval_batch_size": 4,
        },
        **sections,
    )
    right = _held_out_by_hand(by_hand(recipe, 1))
    train(recipe)
    log = [row for _, row in read_jsonl(recipe.run_dir / "log.jsonl")]
    first = next(row["eval_loss"] for row in log if "eval_loss" in row)
    assert first == pytest.approx(right, rel=1e-6)


def test_a_cpu_logs_the_losses_and_tokens_of_trls_own_head(
    make_recipe: MakeRecipe, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = {}
    for computes_loss in (True, False):  # here, or by TRL as on a GPU
        recipe = make_recipe(
            corpus={"path": str(corpus), "validation_corpus": str(corpus)},
            trainer={"max_steps": 3, "per_device_train_batch_size": 1, "eval_strategy": "epoch", "logging_steps": 1,
                     "per_device_eval_batch_size": 1, "num_train_epochs": 1},
        )  # fmt: skip
        if not computes_loss:
            monkeypatch.setattr(KnowledgeTrainer, "_computes_loss", lambda self: False)
        train(recipe, overwrite=True)
        logs[computes_loss] = [row for _, row in read_jsonl(recipe.run_dir / "log.jsonl")]
    ours, theirs = logs[True], logs[False]
    for row, other in zip(ours, theirs, strict=True):
        for key in ("loss", "eval_loss", "num_tokens", "eval_num_tokens"):
            assert row.get(key, 0) == pytest.approx(other.get(key, 0), rel=1e-4)


def test_age_halves_a_row_by_its_half_life_and_the_newest_counts_one(write_rows: Any) -> None:
    dates = ["2024-01-01", "2023-01-01T00:00:00", "2023-12-31T22:00:00-02:00"]
    path = write_rows("aged.jsonl", [{"text": "x", "meta": {"date": date}} for date in dates])
    weights = row_weights(RowWeightsSection("meta.date", half_life=365.0), path)
    assert weights.tolist() == pytest.approx([1.0, 0.5, 1.0])


def test_columns_that_are_no_weights_are_reported_by_line(write_rows: Any) -> None:
    path = write_rows(
        "odd.jsonl",
        [{"text": "a", "w": 1}, {"text": "b"}, {"text": "c", "w": -2}, {"text": "d", "w": "2"}],
    )
    with pytest.raises(InputError) as caught:
        row_weights(RowWeightsSection("w"), path)
    message = str(caught.value)
    assert "odd.jsonl:2: w: found None, expected a number" in message
    assert "odd.jsonl:3: w: found -2, expected a number of 0 or more" in message
    assert "odd.jsonl:4: w: found '2'" in message
    with pytest.raises(InputError, match="found 1, expected a date such as"):
        row_weights(RowWeightsSection("w", half_life=3.0), path)
    with pytest.raises(InputError, match="every row weighs 0"):
        row_weights(RowWeightsSection("w"), write_rows("none.jsonl", [{"text": "a", "w": 0}]))
