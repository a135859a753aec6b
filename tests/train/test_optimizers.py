"""Whole runs against loops written by hand: clipping and accumulation, fp16's scaling, Adafactor, schedule-free, NEFTune."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from kinject.models import load_model
from kinject.recipe import Recipe
from kinject.train import train
from kinject.train.trainer import KnowledgeTrainer
from small import interrupt

MakeRecipe = Callable[..., Recipe]
MICRO, PARTS, STEPS, RATE, DECAY, CLIP = 2, 3, 5, 1e-3, 0.1, 0.5
SCALE = 2.0**20
"""Of the loss in fp16: some gradients overflow at it, none at half of it."""
LOOP = {
    "packing": False, "max_steps": STEPS, "per_device_train_batch_size": MICRO, "gradient_accumulation_steps": PARTS,
    "train_sampling_strategy": "sequential", "learning_rate": RATE, "weight_decay": DECAY, "max_grad_norm": CLIP,
    "optim": "adamw_torch", "lr_scheduler_type": "linear",
}  # fmt: skip


def _batch(rows: list[Any], pad: int, device: str) -> dict[str, torch.Tensor]:
    width = max(len(row.input_ids) for row in rows)
    ids = [[*row.input_ids, *[pad] * (width - len(row.input_ids))] for row in rows]
    labels = [[*row.labels, *[-100] * (width - len(row.labels))] for row in rows]
    positions = torch.arange(width).expand(len(rows), width)
    return {
        "ids": torch.tensor(ids).to(device),
        "labels": torch.tensor(labels).to(device),
        "at": positions.to(device),
    }


def _plain_loop(
    hand: Any, folder: Path, pad: int, *, fp16: bool, device: str = "cpu", scale: float = 2.0**16
) -> dict[str, torch.Tensor]:
    """PyTorch's own AdamW, clipping and GradScaler in the usual loop; the mean is over the tokens of all parts."""
    model = load_model(str(folder)).model.to(device).train()
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}],
        lr=RATE,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    scaler = torch.amp.GradScaler(device, init_scale=scale, enabled=fp16)
    for step in range(STEPS):
        rows = hand.rows_of(step)
        n_tokens = sum(label != -100 for row in rows for label in row.labels)
        for start in range(0, len(rows), MICRO):
            part = _batch(rows[start : start + MICRO], pad, device)
            with torch.autocast(device, torch.float16, enabled=fp16):
                logits = model(
                    input_ids=part["ids"], position_ids=part["at"], use_cache=False
                ).logits
            logits = logits[:, :-1].float().flatten(0, 1)
            loss = (
                F.cross_entropy(logits, part["labels"][:, 1:].flatten(), reduction="sum") / n_tokens
            )
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            schedule.step()
        optimizer.zero_grad()
    return {name: weight.detach().cpu() for name, weight in model.named_parameters()}


def test_accumulation_and_clipping_are_a_plain_loops_to_a_millionth(
    make_recipe: MakeRecipe, by_hand: Any, tiny_model: Path
) -> None:
    recipe = make_recipe(trainer=LOOP)
    result = train(recipe)
    loaded = load_model(result.model_dir)
    wanted = _plain_loop(
        by_hand(recipe, MICRO * PARTS), tiny_model, loaded.tokenizer.pad_token_id, fp16=False
    )
    for name, weight in loaded.model.named_parameters():
        assert (weight - wanted[name]).abs().max() < 1e-6, name


def _is_the_plain_loops(result: Any, wanted: dict[str, torch.Tensor], base: Path) -> None:
    """The difference of the weights is a fiftieth of what they moved by."""
    before = dict(load_model(str(base)).model.named_parameters())
    actual = {
        name: weight.detach().cpu()
        for name, weight in load_model(result.model_dir).model.named_parameters()
    }
    error = sum(((actual[n] - wanted[n]) ** 2).sum().item() for n in actual) ** 0.5
    moved = sum(((before[n].cpu() - wanted[n]) ** 2).sum().item() for n in actual) ** 0.5
    assert error < 2e-2 * moved


@pytest.mark.skipif(not torch.cuda.is_available(), reason="fp16 with a gradient scaler needs a GPU")
def test_fp16_with_a_scaler_is_a_plain_loops_to_rounding(
    make_recipe: MakeRecipe, by_hand: Any, tiny_model: Path
) -> None:
    recipe = make_recipe(trainer={**LOOP, "fp16": True})
    result = train(recipe)
    pad = load_model(result.model_dir).tokenizer.pad_token_id
    wanted = _plain_loop(by_hand(recipe, MICRO * PARTS), tiny_model, pad, fp16=True, device="cuda")
    _is_the_plain_loops(result, wanted, tiny_model)


def test_a_scaler_on_the_cpu_scales_unscales_clips_steps_and_updates_as_a_plain_loop(
    make_recipe: MakeRecipe, by_hand: Any, tiny_model: Path, cpu_scaler: Callable[..., list[Any]]
) -> None:
    """At a scale at which one of five updates overflows: it moves nothing, neither weights nor schedule."""
    scalers = cpu_scaler(init_scale=SCALE)
    recipe = make_recipe(trainer={**LOOP, "fp16": True})
    result = train(recipe)
    assert scalers[0].order == [*["scale"] * PARTS, "unscale_", "clip", "step", "update"] * STEPS
    assert scalers[0].get_scale() == SCALE / 2
    pad = load_model(result.model_dir).tokenizer.pad_token_id
    wanted = _plain_loop(by_hand(recipe, MICRO * PARTS), tiny_model, pad, fp16=True, scale=SCALE)
    _is_the_plain_loops(result, wanted, tiny_model)


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gpt2",
        "gpt_neox",
        "gemma2",
        "gemma3_text",
        "olmo2",
        "phi3",
    ],
)
def test_neither_biases_nor_norms_decay(kind: str) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32, "pad_token_id": 0,
             "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    more = {"gpt2": {}, "gpt_neox": {"intermediate_size": 32}}
    llama_like = {"intermediate_size": 32, "num_key_value_heads": 1, "head_dim": 8}
    config = AutoConfig.for_model(kind, **sizes, **more.get(kind, llama_like))
    model = AutoModelForCausalLM.from_config(config)
    matrices = {
        f"{owner}.weight"
        for owner, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding | Conv1D)
    }
    names = {name for name, _ in model.named_parameters()}
    decaying = KnowledgeTrainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]
    assert set(decaying) & names == matrices & names
    assert any("norm" in name or "ln_" in name for name in names - set(decaying))


def _gradients(hand: Any, step: int) -> dict[str, torch.Tensor]:
    losses = [
        x
        for row in hand.rows_of(step)
        for _, x in hand.losses(row, lambda p, ids: -p.gather(1, ids[:, None]))
    ]
    named = dict(hand.model.named_parameters())
    gradients = torch.autograd.grad(torch.cat(losses).mean(), list(named.values()))
    return dict(zip(named, gradients, strict=True))


def _assert_close(model_dir: str | Path, hand: Any, base: Path) -> None:
    actual, start = (load_file(Path(folder) / "model.safetensors") for folder in (model_dir, base))
    for name, weight in hand.model.named_parameters():
        error, moved = (actual[name] - weight).norm(), (start[name] - weight).norm()
        assert error < 2e-3 * moved, name


def test_adafactor_is_the_papers(make_recipe: MakeRecipe, by_hand: Any, tiny_model: Path) -> None:
    """Factored second moments, decay 1 - t^-0.8, and each update clipped to a root mean square of 1."""
    options = {**LOOP, "optim": "adafactor", "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    recipe = make_recipe(trainer=options)
    hand = by_hand(recipe, MICRO * PARTS)
    rows: dict[str, Any] = {}
    columns: dict[str, Any] = {}
    for step in range(STEPS):
        beta = 1 - (step + 1) ** -0.8
        for name, g in _gradients(hand, step).items():
            square = g**2 + 1e-30
            weight = hand.model.get_parameter(name)
            if g.ndim == 2:
                rows[name] = beta * rows.get(name, 0.0) + (1 - beta) * square.mean(1)
                columns[name] = beta * columns.get(name, 0.0) + (1 - beta) * square.mean(0)
                second = rows[name][:, None] * columns[name][None, :] / rows[name].mean()
            else:
                second = rows[name] = beta * rows.get(name, 0.0) + (1 - beta) * square
            update = g / second.sqrt()
            update = update / max(1.0, float((update**2).mean() ** 0.5))
            with torch.no_grad():
                weight.mul_(1 - RATE * DECAY * (g.ndim == 2)).sub_(RATE * update)
    _assert_close(train(recipe).model_dir, hand, tiny_model)


@pytest.mark.soak
def test_schedule_free_saves_averages_and_resumes_bitwise(
    make_recipe: MakeRecipe, by_hand: Any, tiny_model: Path, tmp_path: Path
) -> None:
    """AdamW at y, between the sequence z and its average x; checkpoints and the model are x."""
    pytest.importorskip("schedulefree")
    options = {**LOOP, "optim": "schedule_free_adamw", "lr_scheduler_type": "constant", "max_grad_norm": 0.0,
               "save_strategy": "steps", "save_steps": 1, "weight_decay": 0.0, "adam_epsilon": 1e-6}  # fmt: skip
    recipe = make_recipe(trainer=options)
    hand = by_hand(recipe, MICRO * PARTS)
    weights = dict(hand.model.named_parameters())
    x = {name: weight.detach().clone() for name, weight in weights.items()}
    z, second = (
        {name: w.clone() for name, w in x.items()},
        {name: torch.zeros_like(w) for name, w in x.items()},
    )
    for step in range(STEPS):
        for name, weight in weights.items():
            weight.data = 0.1 * z[name] + 0.9 * x[name]
        for name, g in _gradients(hand, step).items():
            second[name] = 0.999 * second[name] + 0.001 * g**2
            z[name] = z[name] - RATE * g / (
                (second[name] / (1 - 0.999 ** (step + 1))).sqrt() + 1e-6
            )
            x[name] = x[name] + (z[name] - x[name]) / (step + 1)
        if step == 1:
            for name, weight in weights.items():
                weight.data = x[name]
            at_two = {name: weight.detach().clone() for name, weight in weights.items()}
    result = train(recipe)
    run = Path(result.run_dir)
    for name, weight in weights.items():
        weight.data = at_two[name]
    _assert_close(run / "checkpoint-2", hand, tiny_model)
    for name, weight in weights.items():
        weight.data = x[name]
    _assert_close(result.model_dir, hand, tiny_model)
    uninterrupted = load_file(Path(result.model_dir) / "model.safetensors")
    interrupt(run, 2)
    resumed = load_file(Path(train(recipe, resume=True).model_dir) / "model.safetensors")
    assert all(torch.equal(uninterrupted[name], resumed[name]) for name in uninterrupted)


def test_neftune_noise_is_on_the_embeddings_in_training_alone(
    make_recipe: MakeRecipe, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, torch.Tensor]] = []
    honest = KnowledgeTrainer.compute_loss

    def _watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        def _keep(module: Any, inputs: Any, output: Any) -> None:
            seen.append((self.model.training, (output - module.weight[inputs[0]]).detach()))

        handle = self.model.get_input_embeddings().register_forward_hook(_keep)
        try:
            return honest(self, *args, **kwargs)
        finally:
            handle.remove()

    monkeypatch.setattr(KnowledgeTrainer, "compute_loss", _watched)
    train(make_recipe(
        corpus={"path": str(corpus), "validation_corpus": str(corpus)},
        trainer={"neftune_noise_alpha": 5.0, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 2},
    ))  # fmt: skip
    assert {training for training, _ in seen} == {True, False}
    for training, noise in seen:
        bound = 5.0 / (noise.shape[1] * noise.shape[2]) ** 0.5
        if training:
            assert 0.99 * bound < noise.abs().max() < bound * (1 + 1e-4)
            assert float(noise.std()) == pytest.approx(bound / 3**0.5, rel=0.05)
        else:
            assert not noise.any()
