"""Every argument that fine-tuning guides document reaches the trainer and changes what it should."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trl import SFTConfig

from kinject.disk import read_jsonl
from kinject.errors import RecipeError
from kinject.models import load_model
from kinject.recipe import Recipe, read_recipe
from kinject.recipe.library_fields import REFUSED, RENAMED
from kinject.recipe.yaml_lines import read_yaml
from kinject.train import train
from kinject.train.config import make_configs
from kinject.train.trainer import KnowledgeTrainer

MakeRecipe = Callable[..., Recipe]
RunTrainer = Callable[..., KnowledgeTrainer]
RECIPES = Path(__file__).parents[2] / "recipes"
RECIPE = RECIPES / "sandbox" / "documented.yaml"

DOCUMENTED = {
    "gradient_accumulation_steps", "weight_decay", "max_grad_norm", "gradient_checkpointing", "torch_compile", "optim",
    "gradient_checkpointing_kwargs", "save_safetensors", "jit_mode_eval", "bf16", "fp16", "fp16_opt_level", "tf32",
    "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_ratio", "warmup_steps", "learning_rate", "adam_beta1", "adam_beta2",
    "adam_epsilon", "num_train_epochs", "max_steps", "evaluation_strategy", "per_device_train_batch_size", "seed",
    "logging_strategy", "logging_steps", "save_strategy", "save_steps", "dataloader_num_workers", "run_name", "optim_args",
    "group_by_length", "report_to", "push_to_hub", "load_best_model_at_end",
}  # fmt: skip
EXAMPLE = {
    "logging_steps": 10, "num_train_epochs": 2, "save_strategy": "epoch", "per_device_train_batch_size": 4,
    "save_safetensors": True, "torch_compile": False, "gradient_accumulation_steps": 1, "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False}, "fp16": False, "bf16": False, "tf32": False,
    "max_grad_norm": 0.3, "learning_rate": 5e-5, "optim": "adamw_8bit", "lr_scheduler_type": "constant",
    "warmup_ratio": 0.03, "run_name": "mine", "group_by_length": False, "report_to": "wandb", "push_to_hub": False,
}  # fmt: skip
"""The guides' TrainingArguments, but for output_dir and seed, which are run_dir and seed of a recipe."""


@pytest.fixture
def run_trainer(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> RunTrainer:
    """Train a recipe of these trainer options and return the trainer that did it."""

    def _run(sections: dict[str, Any] | None = None, **options: Any) -> KnowledgeTrainer:
        kept: list[KnowledgeTrainer] = []
        start = KnowledgeTrainer.train

        def _record(self: KnowledgeTrainer, *args: Any, **kwargs: Any) -> Any:
            kept.append(self)
            return start(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(KnowledgeTrainer, "train", _record)
            train(make_recipe(**(sections or {}), trainer=options), overwrite=True)
        return kept[0]

    return _run


def _logged(trainer: KnowledgeTrainer, key: str) -> list[float]:
    rows = read_jsonl(Path(trainer.args.output_dir) / "log.jsonl")
    return [row[key] for _, row in rows if key in row and "train_runtime" not in row]


def test_every_documented_argument_is_accepted_mapped_or_refused_with_a_reason() -> None:
    fields = SFTConfig.__dataclass_fields__.keys()
    for name in DOCUMENTED:
        assert name in fields or name in RENAMED or name in REFUSED, name
    for name in ("jit_mode_eval", "fp16_opt_level"):
        assert "Remove the line" in REFUSED[name]


def test_the_guides_recipe_names_every_argument_that_still_means_something() -> None:
    recipe = read_yaml(RECIPE).root
    named = {*recipe["trainer"], "seed"}
    # chosen by the hardware, given by another option's presence, or without meaning today
    absent = {"jit_mode_eval", "fp16_opt_level", "lr_scheduler_kwargs", "warmup_steps", "optim_args",
              "save_steps"}  # fmt: skip
    assert DOCUMENTED - named == absent
    own = {"bf16": None, "tf32": None, "run_name": "documented", "report_to": "none"}
    assert {key: recipe["trainer"][key] for key in EXAMPLE} == {**EXAMPLE, **own}
    assert recipe["seed"] == 42
    assert "run_dir: runs/documented # the guides' output_dir\n" in RECIPE.read_text("utf-8")
    assert "Set run_dir" in REFUSED["output_dir"]
    assert recipe["trainer"]["gradient_checkpointing_kwargs"] == {"use_reentrant": False}


def test_the_guides_recipe_runs_as_it_stands(
    tmp_path: Path, tiny_model: Path, corpus: Path
) -> None:
    recipe = read_recipe(
        RECIPE,
        [
            f"run_dir={tmp_path / 'run'}",
            f"model.path={tiny_model}",
            f"corpus.path={corpus}",
            f"corpus.cache_dir={tmp_path}",
        ],
        "train",
    )
    result = train(recipe)
    notes = " ".join(result.notes)
    for word in ("warmup_ratio is called warmup_steps", "evaluation_strategy is called eval_strategy",
                 "read as constant_with_warmup", "save_safetensors has no effect"):  # fmt: skip
        assert word in notes
    saved = sorted(path.name for path in Path(result.run_dir).glob("checkpoint-*"))
    assert saved == [f"checkpoint-{result.n_steps // 2}", f"checkpoint-{result.n_steps}"]
    assert result.n_epochs == 2


def test_a_shipped_recipe_of_8b_writes_the_four_options_of_one_card() -> None:
    path = RECIPES / "llama-3.1-8b" / "cpt.yaml"
    header = path.read_text("utf-8").partition("run_dir:")[0]
    for option in ("bf16", "flash", "gradient checkpointing", "adamw_8bit", "On a CPU"):
        assert option in header
    with pytest.raises(RecipeError) as caught:
        make_configs(read_recipe(path, (), "train", check_inputs=False))
    (problem,) = caught.value.problems
    assert problem.key == "model.attention"
    assert problem.message.endswith("Set model.attention: auto.")
    on_a_cpu = read_recipe(path, ["model.attention=auto"], "train", check_inputs=False)
    config, _ = make_configs(on_a_cpu)
    assert (config.bf16, config.gradient_checkpointing) == (True, True)
    assert config.optim == "adamw_8bit"


def test_optimizer_options_are_the_optimizers_own(run_trainer: RunTrainer) -> None:
    trainer = run_trainer(
        optim="adamw_torch", learning_rate=2e-3, weight_decay=0.05, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6,
        lr_scheduler_type="constant",
    )  # fmt: skip
    decayed, plain = trainer.optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.05, 0.0)
    assert (decayed["lr"], decayed["betas"], decayed["eps"]) == (2e-3, (0.8, 0.95), 1e-6)
    assert all(weight.ndim == 1 for weight in plain["params"])
    assert all(weight.ndim == 2 for weight in decayed["params"])


def test_lines_that_a_recipe_leaves_out_have_the_documented_defaults(
    run_trainer: RunTrainer,
) -> None:
    trainer = run_trainer(max_steps=3)
    (decayed, plain), options = trainer.optimizer.param_groups, trainer.args
    assert type(trainer.optimizer.optimizer) is torch.optim.AdamW
    assert decayed["fused"]  # adamw_torch_fused, for the guides' adamw_hf
    assert (decayed["weight_decay"], plain["weight_decay"], decayed["betas"], decayed["eps"]) == (
        0,
        0,
        (0.9, 0.999),
        1e-8,
    )
    assert (options.max_grad_norm, options.warmup_steps, options.num_train_epochs) == (1.0, 0, 3.0)
    assert _logged(trainer, "learning_rate") == pytest.approx(
        [1e-3, 1e-3 * 2 / 3, 1e-3 / 3]
    )  # linear, no warm-up


@pytest.mark.soak
def test_fractions_of_a_run_and_ends_of_epochs_are_where_they_say(
    run_trainer: RunTrainer, corpus: Path, tmp_path: Path
) -> None:
    def _run(**options: Any) -> list[list[int]]:
        sections = {"corpus": {"path": str(corpus), "validation_corpus": str(corpus)}}
        trainer = run_trainer(
            sections, max_steps=-1, packing=False, per_device_train_batch_size=8, **options
        )
        rows = [
            row
            for _, row in read_jsonl(tmp_path / "run" / "log.jsonl")
            if "train_runtime" not in row
        ]
        steps = [[row["step"] for row in rows if key in row] for key in ("loss", "eval_loss")]
        saved = sorted(
            int(path.name.partition("-")[2]) for path in tmp_path.glob("run/checkpoint-*")
        )
        return [[trainer.state.global_step], *steps, saved]

    fractions = {
        "logging_steps": 0.25,
        "eval_strategy": "steps",
        "eval_steps": 0.5,
        "save_strategy": "steps",
    }
    assert _run(num_train_epochs=1.6, save_steps=0.5, **fractions) == [
        [8],
        [2, 4, 6, 8],
        [4, 8],
        [4, 8],
    ]
    ends = dict.fromkeys(("logging_strategy", "eval_strategy", "save_strategy"), "epoch")
    assert _run(num_train_epochs=2, **ends) == [
        [10],
        [5, 10],
        [5, 10],
        [5, 10],
    ]  # 40 rows are 5 steps


def test_optim_and_optim_args_choose_the_optimizer_and_its_state(
    run_trainer: RunTrainer, tiny_config: dict[str, Any]
) -> None:
    wide = {**tiny_config, "hidden_size": 64, "intermediate_size": 128}
    model = {"new": wide, "tokenizer": {"vocab_size": 300}}
    trainer = run_trainer({"model": model}, optim="adamw_8bit", max_steps=2)
    assert type(trainer.optimizer.optimizer).__name__ == "AdamW"
    assert type(trainer.optimizer.optimizer).__module__.startswith("bitsandbytes")
    # bitsandbytes leaves tensors below 4,096 numbers in float32, and transformers leaves the embeddings there
    states = {
        name: trainer.optimizer.state[p]["state1"] for name, p in trainer.model.named_parameters()
    }
    kinds = {
        state.dtype
        for name, state in states.items()
        if state.numel() >= 4096 and "embed" not in name
    }
    assert kinds == {torch.uint8}
    assert states["model.embed_tokens.weight"].dtype == torch.float32
    trainer = run_trainer(optim="sgd", optim_args="momentum=0.7", max_steps=2)
    assert trainer.optimizer.param_groups[0]["momentum"] == 0.7


def test_max_grad_norm_scales_the_update(run_trainer: RunTrainer, tiny_model: Path) -> None:
    def _update(limit: float) -> tuple[float, float]:
        trainer = run_trainer(
            optim="sgd",
            lr_scheduler_type="constant",
            learning_rate=1.0,
            max_steps=1,
            max_grad_norm=limit,
        )
        moved = sum(
            ((p.detach() - before[n]) ** 2).sum().item()
            for n, p in trainer.model.named_parameters()
        )
        return moved**0.5, _logged(trainer, "grad_norm")[0]

    before = dict(load_model(str(tiny_model)).model.named_parameters())
    free, norm = _update(0.0)
    clipped, same_norm = _update(0.3)
    assert norm == same_norm
    assert free == pytest.approx(norm, rel=1e-4)  # SGD at rate 1 moves by the gradient
    assert clipped == pytest.approx(0.3, rel=1e-4)


def test_decay_shrinks_matrices_by_rate_times_decay_and_no_norm(
    run_trainer: RunTrainer, tiny_model: Path
) -> None:
    decay = 1e-2
    options = {
        "optim": "adamw_torch",
        "lr_scheduler_type": "constant",
        "learning_rate": 0.1,
        "max_steps": 1,
    }
    before = dict(load_model(str(tiny_model)).model.named_parameters())
    plain, decayed = (
        {
            name: weight.detach()
            for name, weight in run_trainer(weight_decay=value, **options).model.named_parameters()
        }
        for value in (0.0, decay)
    )
    for name, weight in plain.items():
        shrunk = (
            0.1 * decay * before[name].detach() if weight.ndim == 2 else torch.zeros_like(weight)
        )
        assert (weight - decayed[name]).numpy() == pytest.approx(shrunk.numpy(), abs=3e-8)


def test_processes_exchange_gradients_once_an_update(
    run_trainer: RunTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import Accelerator

    kept_back: list[Any] = []
    no_sync = Accelerator.no_sync
    monkeypatch.setattr(
        Accelerator, "no_sync", lambda self, model: kept_back.append(model) or no_sync(self, model)
    )
    run_trainer(max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert len(kept_back) == 2 * 3  # of four backward passes all but the last
    kept_back.clear()
    run_trainer(max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=1)
    assert kept_back == []


def test_length_batches_and_accumulation_count_as_they_say(run_trainer: RunTrainer) -> None:
    trainer = run_trainer(max_steps=-1, num_train_epochs=2, packing=False, per_device_train_batch_size=4,
                          gradient_accumulation_steps=2)  # fmt: skip
    assert trainer.state.global_step == 2 * 40 / (4 * 2)
    assert trainer.state.epoch == 2.0
    assert run_trainer(max_steps=3, num_train_epochs=2).state.global_step == 3


@pytest.mark.soak
def test_logging_saving_and_evaluating_happen_when_asked(
    run_trainer: RunTrainer, corpus: Path, tmp_path: Path
) -> None:
    held_out = {"corpus": {"path": str(corpus), "validation_corpus": str(corpus)}}
    trainer = run_trainer(held_out, logging_strategy="steps", logging_steps=3, save_strategy="steps", save_steps=2,
                          evaluation_strategy="steps", eval_steps=2, load_best_model_at_end=True, learning_rate=0.3,
                          max_grad_norm=0.0, run_name="named", packing=False, per_device_eval_batch_size=16)  # fmt: skip
    assert len(trainer.get_eval_dataloader()) == 3  # 40 rows
    assert len(_logged(trainer, "loss")) == 2
    losses = _logged(trainer, "eval_loss")
    assert len(losses) == 3
    assert sorted(p.name for p in tmp_path.joinpath("run").glob("checkpoint-*")) == [
        f"checkpoint-{n}" for n in (2, 4, 6)
    ]
    best = 2 * (losses.index(min(losses)) + 1)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "run" / f"checkpoint-{best}")
    from safetensors.torch import load_file

    kept, chosen = (
        load_file(tmp_path / "run" / name / "model.safetensors")
        for name in ("model", f"checkpoint-{best}")
    )
    assert all(torch.equal(kept[name], chosen[name]) for name in kept)
    assert trainer.args.run_name == "named"
    assert not run_trainer(logging_strategy="no").state.log_history[:-1]


def test_seed_decides_the_order_and_workers_do_not(run_trainer: RunTrainer) -> None:
    def _first_losses(seed: int, **options: Any) -> list[float]:
        return _logged(run_trainer({"seed": seed}, max_steps=3, packing=False, **options), "loss")

    assert _first_losses(1) == _first_losses(1, dataloader_num_workers=1)
    assert _first_losses(1) != _first_losses(2)


@pytest.mark.soak
def test_group_by_length_puts_rows_of_a_length_together(
    run_trainer: RunTrainer, tmp_path: Path
) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text(
        "".join(json.dumps({"text": "Farrow " * (1 + i % 13)}) + "\n" for i in range(64))
    )

    def _spread(by_length: bool) -> float:
        trainer = run_trainer({"corpus": {"path": str(path)}}, packing=False, group_by_length=by_length, max_steps=1,
                              max_length=128)  # fmt: skip
        widths = [batch["input_ids"].ne(trainer.processing_class.pad_token_id).sum(1) for batch in
                  trainer.get_train_dataloader()]  # fmt: skip
        return float(sum(width.max() - width.min() for width in widths))

    assert _spread(True) < _spread(False) / 2


def test_gradient_checkpointing_recomputes_and_changes_no_loss(
    run_trainer: RunTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    computed: list[bool] = []
    forward = LlamaMLP.forward
    monkeypatch.setattr(
        LlamaMLP, "forward", lambda self, x: computed.append(self.training) or forward(self, x)
    )
    plain = run_trainer(max_steps=3)
    n_layers = plain.model.config.num_hidden_layers
    assert sum(computed) == 3 * n_layers
    computed.clear()
    saving = run_trainer(
        max_steps=3,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )
    assert sum(computed) == 2 * 3 * n_layers  # each layer once more, in the backward pass
    assert saving.args.gradient_checkpointing_kwargs == {"use_reentrant": False}
    assert _logged(saving, "loss") == pytest.approx(_logged(plain, "loss"), rel=1e-6)


def test_bf16_runs_the_arithmetic_in_bf16_and_keeps_weights_in_float32(
    run_trainer: RunTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    seen: set[torch.dtype] = set()
    forward = LlamaMLP.forward

    def _watched(self: Any, x: torch.Tensor) -> torch.Tensor:
        out = forward(self, x)
        if self.training:
            seen.add(out.dtype)
        return out

    monkeypatch.setattr(LlamaMLP, "forward", _watched)
    trainer = run_trainer(bf16=True, max_steps=1)
    assert seen == {torch.bfloat16}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    seen.clear()
    run_trainer(bf16=False, max_steps=1)
    assert seen == {torch.float32}


@pytest.mark.parametrize("fast", [True, False])
def test_bf16_is_on_by_itself_only_if_the_hardware_multiplies_it(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    monkeypatch.setattr("kinject.models.choose_precision", lambda device: "bf16" if fast else "no")
    assert make_configs(make_recipe(trainer={"bf16": None}))[0].bf16 is fast
    assert make_configs(make_recipe(trainer={"bf16": not fast}))[0].bf16 is not fast


@pytest.mark.parametrize(
    ("trainer", "model", "dtype"),
    [
        ({"bf16": False}, {}, torch.float32),
        ({"bf16": False}, {"dtype": "float32"}, torch.float32),
        ({"bf16": False}, {"dtype": "bfloat16"}, None),
        ({"bf16": True}, {}, None),
        ({"bf16": True}, {"dtype": "float32"}, None),
    ],
)
def test_flash_attention_is_asked_whether_it_reads_the_arithmetic_of_the_training(
    make_recipe: MakeRecipe,
    monkeypatch: pytest.MonkeyPatch,
    trainer: dict[str, Any],
    model: dict[str, Any],
    dtype: torch.dtype | None,
) -> None:
    asked = []
    monkeypatch.setattr(
        "kinject.models.attention_fault", lambda *arguments: asked.append(arguments) or ""
    )
    recipe = make_recipe(trainer=trainer)
    section = dataclasses.replace(recipe.model, attention="flash_attention_2", **model)
    make_configs(dataclasses.replace(recipe, model=section))
    assert asked == [("flash_attention_2", "cpu", dtype)]


def test_torch_compile_wraps_the_model(
    run_trainer: RunTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[dict[str, Any]] = []
    monkeypatch.setattr(
        torch, "compile", lambda model, **options: compiled.append(options) or model
    )
    run_trainer(torch_compile=True, torch_compile_backend="eager", max_steps=1)
    assert [options["backend"] for options in compiled] == ["eager"]
    run_trainer(torch_compile=False, max_steps=1)
    assert len(compiled) == 1


def test_without_a_compiler_a_compiled_run_is_refused_before_it_loads_a_model(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import config, cpp_builder

    cpp_builder.cpp_compiler_search.cache_clear()
    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    with pytest.raises(RecipeError, match=r"trainer.torch_compile: .* Install g\+\+"):
        make_configs(make_recipe(trainer={"torch_compile": True}))
    make_configs(make_recipe(trainer={"torch_compile_backend": "aot_eager"}))
    cpp_builder.cpp_compiler_search.cache_clear()


@pytest.mark.soak  # a minute: a compiler's time
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_run_has_the_losses_of_a_plain_one(
    run_trainer: RunTrainer, backend: str
) -> None:
    plain = _logged(run_trainer(max_steps=3), "loss")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    trainer = run_trainer(max_steps=3, torch_compile=True, torch_compile_backend=backend)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert _logged(trainer, "loss") == pytest.approx(plain, rel=1e-5)


def test_tf32_reaches_transformers_switch(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU of NVIDIA from Ampere on; its products themselves only such a GPU shows."""
    switched: list[bool] = []
    monkeypatch.setattr("transformers.training_args.is_torch_tf32_available", lambda: True)
    monkeypatch.setattr("transformers.training_args.enable_tf32", switched.append)
    for wanted in (True, False):
        switched.clear()
        assert make_configs(make_recipe(trainer={"tf32": wanted}))[0].tf32 is wanted
        assert set(switched) == {wanted}


@pytest.mark.parametrize("optim", ["adamw_hf", "adamw_apex_fused"])
def test_an_older_optimizers_name_is_torchs_adamw(run_trainer: RunTrainer, optim: str) -> None:
    trainer = run_trainer(optim=optim, max_steps=1)
    assert type(trainer.optimizer.optimizer) is torch.optim.AdamW
    assert bool(trainer.optimizer.param_groups[0]["fused"]) == (optim == "adamw_apex_fused")


@pytest.mark.parametrize("options", [{"tf32": True}, {"fp16": True, "bf16": True}])
def test_what_the_machine_cannot_do_is_refused_and_said(
    make_recipe: MakeRecipe, options: dict[str, Any]
) -> None:
    if "tf32" in options and torch.cuda.is_available():
        pytest.skip("this machine has tf32")
    with pytest.raises(RecipeError, match="TRL refuses it"):
        train(make_recipe(trainer=options))
