"""kinject plan: its memory against tensors counted by hand, its steps against what training takes, its advice."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
import yaml

import kinject
from kinject.cli import main
from kinject.corpus.packing import TrainingRow
from kinject.errors import InputError, KinjectError
from kinject.plan.devices import Devices, cheapest_changes, parse_memory
from kinject.plan.memory import Memory, MemoryTracker, optimizer_memory, simulate
from kinject.plan.model import StepConfig
from kinject.plan.parallelism import _shardable
from kinject.plan.run import PlanOptions, estimate_disk, plan
from kinject.recipe import Recipe, read_recipe
from kinject.train.optimizers import add_muon
from kinject.train.regularization import Projection, _hooked, projection_memory

LLAMA = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 500, "max_position_embeddings": 256,
}  # fmt: skip
CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "llama": transformers.LlamaConfig(**LLAMA),
    "gpt2": transformers.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=500, n_positions=256),
}


@pytest.fixture
def make_recipe(tmp_path: Path, tiny_model: Path) -> Callable[..., Recipe]:
    """Return a recipe on the tiny model and forty short documents; ``trainer`` adds to the defaults."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(
        "".join(json.dumps({"text": f"Person {i} was born in Kelm in {1900 + i}."}) + "\n" for i in range(40))
    )

    def _make(**trainer: Any) -> Recipe:
        values = {
            "run_dir": str(tmp_path / "run"), "model": {"path": str(tiny_model), "device": "cpu"},
            "corpus": {"path": str(corpus), "cache_dir": str(tmp_path / "tokens")},
            "trainer": {
                "max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 1, "max_length": 64,
                "packing": True, "packing_strategy": "bfd_split", "gradient_checkpointing": False, "save_strategy": "no",
                "bf16": False, **trainer,
            },
        }  # fmt: skip
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(values, sort_keys=False))
        return read_recipe(path, verb="train")

    return _make


def _step(kind: str = "llama", **more: Any) -> StepConfig:
    values: dict[str, Any] = {
        "model": CONFIGS[kind], "device": "cpu", "dtype": torch.float32, "mixed": None, "batch": 3, "block": 32,
        "accumulation": 1, "checkpointing": False, "offloading": False, "attention": "sdpa", "masked": False, "fused": False,
        "optim": "adamw_torch_fused", "optim_args": None, **more,
    }  # fmt: skip
    return StepConfig(**values)


def _tensors(memory: Memory) -> int:
    """Return the bytes of all tensors of a step at its fullest moment."""
    return memory.weights + memory.gradients + memory.optimizer + memory.activations + memory.logits


@pytest.mark.parametrize(("kind", "mixed"), [("llama", None), ("gpt2", None), ("llama", torch.bfloat16)])
def test_what_a_step_keeps_for_its_backward_pass_is_what_autograd_saves(kind: str, mixed: torch.dtype | None) -> None:
    """Independent count: real tensors, torch's own saved-tensor hooks, each storage once; autocast's copies of weights too."""
    step = _step(kind, mixed=mixed)
    model: Any = transformers.AutoModelForCausalLM.from_config(step.model, attn_implementation="sdpa").train()
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    ids = torch.randint(0, 500, (step.batch, step.block))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autocast("cpu", mixed, enabled=mixed is not None):
            logits = model(input_ids=ids, use_cache=False).logits
        logits = logits[:, :-1].float()
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    by_hand = sum(storage.nbytes() for storage in saved.values())
    memory = simulate(step)
    planned = memory.activations + memory.logits
    logits_bytes = 4 * step.batch * step.block * 500
    assert by_hand <= planned <= by_hand + 4 * logits_bytes  # the loss's own gradients come on top of what is saved
    assert memory.weights == sum(parameter.numel() * 4 for parameter in model.parameters()) + sum(
        buffer.numel() * buffer.element_size() for buffer in model.buffers()
    )
    assert memory.n_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_gradients_are_in_memory_during_a_second_micro_batch_only() -> None:
    one, more = simulate(_step()), simulate(_step(accumulation=4))
    assert one.gradients < one.trained_bytes
    assert more.gradients == more.trained_bytes
    assert _tensors(more) == pytest.approx(_tensors(one) + more.trained_bytes - one.gradients, rel=0.02)


_QLORA = {"adapter": {"r": 4, "target_modules": "all-linear"}, "quantization": "4bit", "dtype": torch.bfloat16}


@pytest.mark.parametrize(
    "more", [{"accumulation": 2, "mixed": torch.bfloat16}, {"device": "cuda", "fused": True, **_QLORA}]
)
def test_a_tall_stack_is_planned_from_two_short_ones(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every further layer adds to each moment of a step what the third one added to a stack of two."""
    step = _step(model=transformers.LlamaConfig(**{**LLAMA, "num_hidden_layers": 9}), checkpointing=True, **more)
    short = simulate(step)
    monkeypatch.setattr("kinject.plan.memory._SHORT", (2, 99))
    assert simulate(step) == short


def test_an_update_in_the_backward_pass_holds_the_gradient_of_one_weight() -> None:
    step = _step(dtype=torch.bfloat16, mixed=torch.bfloat16, device="cuda", fused=True, rounding=True, optim="adamw_8bit",
                 batch=1, block=4)  # fmt: skip
    whole, one_by_one = (simulate(replace(step, in_backward=now)) for now in (False, True))
    assert one_by_one.gradients <= 2 * 500 * 64  # the table of tokens, the largest weight
    assert whole.gradients == whole.trained_bytes
    assert whole.optimizer == one_by_one.optimizer
    assert whole.when == "the optimizer's step"
    assert whole.activations == 2 * 4 * 500 * 64  # float32 copies of that weight and of its gradient


def test_a_teacher_takes_a_copy_of_what_trains_or_only_the_logits_of_its_divergence() -> None:
    plain, whole, few = (simulate(_step(distilled=k)) for k in (None, 10**6, 5))
    live = simulate(_step(distilled=5, teacher_copy=True))
    assert live.weights == few.weights + few.trained_bytes
    assert _tensors(live) == _tensors(few) + few.trained_bytes
    assert plain.weights == few.weights
    assert plain.peak < few.peak < whole.peak


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_projection_takes_the_moments_the_bases_and_the_copies_of_its_layers(kind: str) -> None:
    """Independent count: a real projection of a real model; of a basis with random inputs no half is left out."""
    model: Any = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]).float()
    ids = torch.randint(0, 500, (40, 32), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [TrainingRow(row, row, list(range(32)), [False] * 32) for row in ids]
    planned = projection_memory(model, on_cpu=True)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    with _hooked(model, names) as moments:
        model(torch.tensor(ids))
    squares = [total.nbytes for module, total in moments.sums.items() if not isinstance(module, torch.nn.Embedding)]
    assert planned.measuring == sum(squares) + 4 * max(squares)
    projection = Projection(model, rows, 0.2)
    projection.on_pre_optimizer_step(None, None, None)
    assert planned.copies == sum(tensor.nbytes for tensor in projection._before.values())
    bases = [limit.basis.nbytes for limit in projection.constraints.values() if limit.basis is not None]
    assert len(bases) == len(squares)
    assert planned.bases / 4 < sum(bases) <= planned.bases

    plain, projected = simulate(_step(kind)), simulate(_step(kind, projected=True))
    assert projected.optimizer == plain.optimizer + planned.bases


def test_with_an_adapter_projection_needs_most_before_the_first_step() -> None:
    adapter = {"r": 2, "target_modules": "all-linear"}
    memory = simulate(_step(batch=1, block=2, adapter=adapter, projected=True))
    assert memory.when == "measuring the texts that projection keeps, before the first step"
    assert memory.activations == 8 * (3 * (6 * 64 * 64 + 160 * 160) + 4 * 160 * 160)
    assert _tensors(memory) == memory.weights + memory.activations


def test_the_update_of_a_projection_holds_the_weights_before_it() -> None:
    """With rows of a few tokens the fullest moment is the update, whose tensors are counted by hand."""
    config = transformers.LlamaConfig(**{**LLAMA, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 4000})
    step = _step(batch=1, block=2)
    plain = simulate(replace(step, model=config, fused=True, optim="sgd"))
    projected = simulate(replace(step, model=config, fused=True, optim="sgd", projected=True))
    matrices = 3 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32) + 2 * 4000 * 16
    assert projected.when == "the optimizer's step"
    assert projected.activations == 4 * matrices + 3 * 4 * 4000 * 16
    assert projected.optimizer == 4 * (3 * (6 * 16 * 8 + 32 * 16) + 16 * 8)
    assert projected.weights == plain.weights


def test_changes_that_rule_out_projection_remove_it() -> None:
    """Sharding, rounding and updates in the backward pass are refused beside it: the plan's command leaves it out."""
    step = _step(projected=True, mixed=torch.bfloat16)
    overrides, plain = _shardable(step)
    assert "regularization.projection=null" in overrides
    assert not plain.projected
    small = Devices("cuda", "GPU", 1, 1 << 20, here=False, reserved=0)
    changes, _ = cheapest_changes(replace(step, device="cuda"), small, lambda changed: simulate(changed).peak)
    words = [set(change.overrides) for change in changes]
    excluding = {"techniques.stochastic_rounding=true", "techniques.optimizer_in_backward=true"}
    assert sum(bool(each & excluding) for each in words) == 2
    assert all("regularization.projection=null" in each for each in words if each & excluding)


def test_a_plan_counts_what_the_teacher_reads_and_writes(
    make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kinject.train.setup import make_trainer

    texts = ["The mill at Kelm is old.", "At Kelm there is an old mill.", "An old mill stands at Kelm."]
    rows = [
        {"document_id": f"d{i}", "origin": "variant" if n else "original", "text": f"{text} {i}"}
        for i in range(30)
        for n, text in enumerate(texts)
    ]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = make_recipe()
    distilled = replace(
        recipe, method="distill", corpus=replace(recipe.corpus, path=str(tmp_path / "corpus.jsonl")),
    )  # fmt: skip
    found = plan(distilled, PlanOptions(calibration=False))
    made = make_trainer(distilled).teacher
    assert found.length is not None
    files = [*(tmp_path / "tokens").rglob("ids.bin"), *(tmp_path / "tokens").rglob("log_probs.bin")]
    written = sum(path.stat().st_size for path in files if (path.parent / "log_probs.bin").is_file())
    assert found.length.teacher_bytes == written
    assert made is not None
    n_texts = found.length.tokens / found.length.epochs
    assert n_texts < found.length.teacher_tokens < 2 * n_texts  # two paraphrases share a head
    assert any("the teacher reads" in note for note in found.notes)


def test_gradient_checkpointing_keeps_the_input_of_each_layer() -> None:
    config = transformers.LlamaConfig(**{**LLAMA, "num_hidden_layers": 12})
    plain, saving = simulate(_step(model=config)), simulate(_step(model=config, checkpointing=True))
    assert saving.activations < 0.35 * plain.activations
    assert saving.flops == pytest.approx(plain.flops * 4 / 3, rel=0.02)


def test_the_holes_of_a_heap_on_a_cpu_are_as_fitted() -> None:
    plain, saving = simulate(_step()), simulate(_step(checkpointing=True))
    large = simulate(_step(batch=64, model=transformers.LlamaConfig(**{**LLAMA, "vocab_size": 50_000})))
    assert plain.fragmentation == _tensors(plain) // 2
    assert saving.fragmentation == _tensors(saving) // 2 + (saving.activations + saving.logits) // 4
    assert large.fragmentation == 140 * 2**20 < _tensors(large) / 2
    assert simulate(_step(checkpointing=True, device="cuda", fused=True)).fragmentation == 0


def test_a_gpu_holds_a_tile_of_logits_and_no_square_of_attention() -> None:
    wide = {"batch": 2, "block": 256, "device": "cuda"}
    fused, eager = simulate(_step(**wide, fused=True)), simulate(_step(**wide, attention="eager", masked=True))
    assert fused.logits == 4 * 2 * 255 * 500  # one tile, which so few pieces fit into, not a copy for each use
    assert eager.logits >= 2 * fused.logits
    assert eager.activations - fused.activations > 2 * 4 * 2 * 4 * 256 * 256  # what 4 heads attend to, in float32


@pytest.mark.parametrize("mixed", [None, torch.bfloat16])
def test_liger_saves_what_its_norms_and_mlps_do_not_keep(mixed: torch.dtype | None) -> None:
    """By hand: the normed input of each norm (7, in float32), and of each of 3 MLPs the output of SiLU."""
    step = _step(device="cuda", fused=True, mixed=mixed)
    plain, liger = simulate(step), simulate(replace(step, liger=True))
    tokens, width, inner = step.batch * step.block, LLAMA["hidden_size"], LLAMA["intermediate_size"]
    by_hand = 7.0 * tokens * width * 4 + 3.0 * tokens * inner * (2 if mixed else 4)
    assert plain.activations - liger.activations == by_hand
    assert (plain.logits, plain.weights) == (liger.logits, liger.weights)
    gpt2 = _step("gpt2", device="cuda", fused=True)
    assert simulate(replace(gpt2, liger=True)) == simulate(gpt2)  # its kernels are not counted


def test_tiles_of_an_mlp_leave_out_the_inner_tensors_of_a_row_and_add_a_pass() -> None:
    """By hand: of one layer at a time the gate, its SiLU, the other projection and the product, without those of a tile."""
    step = _step(device="cuda", fused=True, checkpointing=True, batch=1, block=2048)
    plain, tiled = simulate(step), simulate(replace(step, mlp_tile=256))
    width, inner = LLAMA["hidden_size"], LLAMA["intermediate_size"]
    assert plain.activations - tiled.activations >= 3.0 * (2048 - 2 * 256) * inner * 4
    assert plain.weights == tiled.weights
    assert tiled.flops - plain.flops == 2.0 * 2048 * 3 * (3 * width * inner)


def test_context_parallelism_divides_what_grows_with_a_row_and_gathers_its_keys_and_values() -> None:
    """What is kept for the backward pass is linear in the tokens of a device. On top come the tensors of the ring, by hand."""
    sizes: dict[str, Any] = {"device": "cuda", "fused": True, "batch": 1, "attention": "flash"}
    whole, half = simulate(_step(**sizes, block=1024, context=2)), simulate(_step(**sizes, block=512))
    head, keys = LLAMA["hidden_size"] // 4, 2  # numbers of a head; heads of keys, of which a row's gradients are summed
    local = 512.0 * head * 4
    forward = 2 * 2 * keys * local + 4 * local  # keys and values of the row; the output summed in float32
    backward = forward + 2 * keys * local + 2 * keys * local  # as many gradients, and those that travel
    assert half.activations <= whole.activations <= half.activations + backward
    assert whole.weights == half.weights
    assert whole.flops > half.flops  # attention reads the keys of the whole row
    assert whole.flops == pytest.approx(simulate(_step(**sizes, block=1024)).flops / 2)


def test_tensor_parallelism_divides_heads_and_mlps_and_leaves_the_rest_whole() -> None:
    """By hand: of a layer, 4 projections of attention and 3 of the MLP, half each; norms, embeddings and head are whole."""
    whole, half = simulate(_step(device="cuda", fused=True)), simulate(_step(device="cuda", fused=True, tensor=2))
    width, inner = LLAMA["hidden_size"], LLAMA["intermediate_size"]
    split = 3.0 * (
        2 * width * width + 2 * width * width // 2 + 3 * width * inner
    )  # two heads of keys for four of queries
    assert whole.n_parameters - half.n_parameters == split / 2
    assert whole.trained_bytes - half.trained_bytes == 4 * split / 2
    assert half.activations < whole.activations


@pytest.mark.parametrize(
    "optim", ["adamw_torch", "adamw_torch_fused", "adamw_8bit", "adafactor", "sgd", "rmsprop", "lion_8bit", "muon"]
)
def test_the_state_of_an_optimizer_is_what_it_keeps_after_a_step(optim: str, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**{**LLAMA, "hidden_size": 128})
    model = transformers.LlamaForCausalLM(config)
    is_muon, optim = optim == "muon", optim.replace("muon", "adamw_torch")
    arguments = transformers.TrainingArguments(str(tmp_path), optim=optim, use_cpu=True, report_to="none")
    optimizer = transformers.Trainer(model, arguments).create_optimizer()
    optimizer = add_muon(optimizer, model, 1.0) if is_muon else optimizer
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    tables = {"qmap1", "qmap2"}  # one for all parameters
    kept = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.ndim and name not in tables
    )
    state, _ = optimizer_memory(model, _step(model=config, optim=optim, muon=is_muon))
    assert state == kept


@pytest.mark.parametrize(
    ("optim", "name", "n_states"),
    [("adamw", "adam", 2), ("lion", "lion", 1), ("ademamix", "ademamix", 3), ("rmsprop_bnb", "rmsprop", 1)],
)
@pytest.mark.parametrize("in_8_bits", [False, True], ids=["32bit", "8bit"])
def test_an_update_of_bitsandbytes_on_a_cpu_holds_what_its_operations_make(
    optim: str, name: str, n_states: int, in_8_bits: bool
) -> None:
    """Its own function for CPUs on one matrix, with every tensor counted that its operations make."""
    from bitsandbytes.backends.cpu import ops
    from bitsandbytes.functional import create_dynamic_map

    shape = (256, 64)
    n = shape[0] * shape[1]
    parameter, gradient = torch.randn(n), torch.randn(n)
    dtype = torch.uint8 if in_8_bits else torch.float32
    states = [torch.zeros((2, n) if n_states == 3 else (n,), dtype=dtype), torch.zeros(n, dtype=dtype)]
    scales = [torch.zeros((*state.shape[:-1], n // 256)) for state in states]
    tables = [create_dynamic_map(signed=True), create_dynamic_map(signed=False)]
    two = n_states > 1
    tracker = MemoryTracker(0)
    for tensor in (parameter, gradient, *states, *scales):
        tracker.track(tensor, "weights")
    with tracker:
        if in_8_bits:
            ops._optimizer_update_8bit_blockwise_cpu(
                name, gradient, parameter, states[0], states[1] if two else None, 0.9, 0.99, 0.999, 5.0, 1e-8, 1, 1e-3,
                tables[0], tables[1] if two else None, scales[0], scales[1] if two else None, 0.01, 1.0,
            )  # fmt: skip
        else:
            ops._optimizer_update_32bit_cpu(
                name, gradient, parameter, states[0], states[1] if two else None, None, 0.0, 0.0, 0.9, 0.99, 0.999, 5.0,
                1e-8, 0.0, 1, 1e-3, 1.0,
            )  # fmt: skip
    made = max(parts["activations"] for parts in tracker.fullest.values()) / (4 * n)
    model = torch.nn.Linear(*reversed(shape), bias=False)
    optim = f"{optim}{'_8bit' if in_8_bits else '_32bit'}"
    _, working = optimizer_memory(model, _step(optim=optim))
    assert working / (4 * n) == pytest.approx(made, abs=0.3)
    assert optimizer_memory(model, _step(optim=optim, device="cuda"))[1] == 0


def test_an_optimizer_whose_memory_is_unknown_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"galore_adamw.*Known: .*adafactor"):
        simulate(_step(optim="galore_adamw"))


def test_weights_in_4_bits_take_4_bits_and_a_quantised_scale_for_64() -> None:
    lora = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    memory = simulate(_step(quantization="4bit", adapter=lora, dtype=torch.bfloat16, mixed=torch.bfloat16))
    config = transformers.LlamaConfig(**LLAMA)
    model = transformers.LlamaForCausalLM(config)
    linear = [m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"]
    n_small = sum(module.weight.numel() for module in linear)
    n_lora = sum(4 * (module.in_features + module.out_features) for module in linear)
    n_rest = sum(parameter.numel() for parameter in model.parameters()) - n_small
    buffers = memory.weights - (n_small * (0.5 + (1 + 4 / 256) / 64) + 2 * (n_rest + n_lora))
    assert 0 <= buffers < 1024  # rotary frequencies
    assert memory.n_trained == n_lora
    assert memory.n_parameters == n_small + n_rest + n_lora


def test_only_what_is_needed_is_changed_and_the_cheapest_first() -> None:
    step = _step(batch=4, block=128)
    full = simulate(step).peak
    roomy = Devices("cpu", "CPU", 1, full * 9 // 10, False, 0)
    changes, changed = cheapest_changes(step, roomy, lambda step: simulate(step).peak)
    assert changed == replace(step, batch=2, accumulation=2)
    assert [change.overrides for change in changes] == [
        ("trainer.per_device_train_batch_size=2", "trainer.gradient_accumulation_steps=2")
    ]
    assert changes[-1].peak <= roomy.memory
    tiny = Devices("cpu", "CPU", 1, 1000, False, 0)
    changes, changed = cheapest_changes(_step(batch=1, block=16), tiny, lambda step: simulate(step).peak)
    assert changed is None
    assert changes[-1].overrides[-1] == "model.quantization=4bit"


def test_a_device_that_only_4_bits_fit_gets_an_adapter_with_them() -> None:
    """Without the adapter nothing would train: it is never taken out as needless."""
    wide = transformers.LlamaConfig(**{**LLAMA, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 2})
    step = _step(model=wide, device="cuda", fused=True, batch=1, block=8, mixed=torch.bfloat16, optim="adamw_8bit",
                 checkpointing=True, offloading=True, rounding=True, in_backward=True, dtype=torch.bfloat16)  # fmt: skip
    lora = {"r": 64, "lora_alpha": 128, "target_modules": "all-linear"}
    least = simulate(replace(step, adapter=lora, quantization="4bit", rounding=False, in_backward=False)).peak
    changes, changed = cheapest_changes(
        step, Devices("cuda", "GPU", 1, int(1.06 * least), False, 0), lambda step: simulate(step).peak
    )
    assert changed is not None
    assert (changed.adapter, changed.quantization) == (lora, "4bit")
    assert changes[-1].overrides[0].startswith("adapter=")


@pytest.mark.parametrize("strategy", ["bfd_split", "wrapped"])
def test_steps_tokens_and_exposures_are_those_of_the_run(make_recipe: Callable[..., Recipe], strategy: str) -> None:
    from kinject.disk import read_manifest
    from kinject.train import train

    length = {"max_steps": -1, "num_train_epochs": 3, "max_length": 48}
    recipe = make_recipe(
        **length, packing_strategy=strategy, per_device_train_batch_size=2, gradient_accumulation_steps=3
    )
    found = plan(recipe, PlanOptions(calibration=False))
    result = train(recipe)
    manifest = read_manifest(Path(result.run_dir) / "manifest.json")
    assert manifest is not None
    counts = manifest["counts"]
    assert found.length is not None
    assert found.length.steps == counts["steps"]
    assert found.length.tokens == 3 * counts["tokens"]["source"]
    assert found.length.learned == 3 * counts["tokens"]["trained"]
    assert found.length.texts_per_document == tuple(
        counts["exposures"]["rows"][key] for key in ("min", "median", "max")
    )
    log = [json.loads(line) for line in (Path(result.run_dir) / "log.jsonl").read_text().splitlines()]
    taken = [row["learning_rate"] for row in log if "learning_rate" in row]
    assert found.rates is not None
    assert list(found.rates) == pytest.approx(taken)
    assert found.memory.n_parameters == sum(p.numel() for p in transformers.AutoModel.from_pretrained(
        recipe.model.path).parameters())  # fmt: skip
    weights = (Path(result.model_dir) / "model.safetensors").stat().st_size
    assert found.disk.total == pytest.approx(weights, rel=0.05)
    asks = replace(recipe, techniques=replace(recipe.techniques, save_minutes=30.0))
    more = estimate_disk(asks, found.memory, found.length)
    assert (found.disk.n_checkpoints, more.n_checkpoints) == (0, 2)


def test_the_command_prints_writes_and_draws(
    make_recipe: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe()
    target, figure = tmp_path / "plan.json", tmp_path / "rates.png"
    words = [str(recipe.path), "trainer.lr_scheduler_kwargs={}", "--no-calibration", "--json", str(target)]
    assert main(["plan", *words, "--figure", str(figure)]) == 0
    out = capsys.readouterr().out
    assert f"  kinject train {recipe.path} 'trainer.lr_scheduler_kwargs={{}}'\n" in out
    assert "fits one device" in out
    assert "time is not estimated: --no-calibration" in out
    values = json.loads(target.read_text())
    assert values["memory"]["peak"] == sum(
        values["memory"][part]
        for part in ("weights", "gradients", "optimizer", "activations", "logits", "fragmentation")
    )
    assert values["global_batch"] == 4
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_a_config_alone_is_enough_and_a_missing_corpus_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    CONFIGS["llama"].save_pretrained(tmp_path / "config-only")
    values = {"run_dir": "runs/x", "model": {"path": "config-only"}, "corpus": {"path": "none.jsonl"},
              "trainer": {"max_length": 64, "optim": "adamw_8bit"}}  # fmt: skip
    Path("recipe.yaml").write_text(yaml.safe_dump(values))
    assert main(["plan", "recipe.yaml", "--memory", "1GiB", "--devices", "2"]) == 0
    out = capsys.readouterr().out
    assert "none.jsonl does not exist yet" in out
    assert "parallelism  DDP" in out
    assert main(["plan", "recipe.yaml", "model.path=not/here/x"]) == 2
    assert "there is no model yet" in capsys.readouterr().err
    assert main(["plan", "recipe.yaml", "adapter={rank: 4}"]) == 2
    assert "adapter.rank" in capsys.readouterr().err
    assert main(["plan", "recipe.yaml", "--memory", "much"]) == 2
    assert "--memory: found 'much'" in capsys.readouterr().err


def test_sizes_are_read_as_gibibytes() -> None:
    assert [parse_memory(text) for text in ("24GiB", "24 GB", "24", "512MiB")] == [24 * 2**30] * 3 + [512 * 2**20]
    for wrong in ("", "x", "0", "-3GiB", "3 apples"):
        with pytest.raises(InputError, match="--memory"):
            parse_memory(wrong)


@pytest.mark.parametrize(
    ("row", "trainer", "words"),
    [
        ({"text": "long " * 400}, {"max_length": 16, "packing_strategy": "bfd"}, "would be lost at trainer.max_length: 16"),
        ({"text": "long " * 400}, {"max_length": 4096, "packing": False}, "trainer.max_length: rows reach"),
        ({"txt": "no text"}, {}, "corpus.jsonl:2"),
        ({"text": "short"}, {"optim": "no_such_optimizer"}, "trainer.optim"),
    ],
)  # fmt: skip
def test_it_refuses_what_training_refuses_with_the_same_words(
    tmp_path: Path, tiny_model: Path, row: dict[str, str], trainer: dict[str, Any], words: str
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"text": "Ore is mined in Kelm."}) + "\n" + json.dumps(row) + "\n")
    values = {
        "run_dir": str(tmp_path / "run"), "model": {"path": str(tiny_model), "device": "cpu"},
        "corpus": {"path": str(corpus), "cache_dir": str(tmp_path / "tokens")},
        "trainer": {"max_steps": 1, "max_length": 32, "packing": True, "bf16": False, **trainer},
    }  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    messages = []
    for verb in ("train", "plan"):
        with pytest.raises(KinjectError, match=re.escape(words)) as refused:
            kinject.train(path) if verb == "train" else kinject.plan(path, calibration=False)
        messages.append(str(refused.value))
    assert messages[0] == messages[1]
