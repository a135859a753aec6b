"""What trains is what was asked, to the last tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from kinject.cli import main
from kinject.errors import InputError, RecipeError, TrainingError
from kinject.models import load_model, new_model
from kinject.recipe import Recipe
from kinject.train import train
from kinject.train.load import check_trainable, reinitialize_last_layers
from kinject.train.merge import merge_adapter
from kinject.train.names import layer_number
from kinject.train.setup import check_training, make_trainer
from kinject.train.updates.layerwise import LayerwiseRates, rate_factor
from small import interrupt, quick

MakeRecipe = Callable[..., Recipe]
FAST = {"learning_rate": 1e-2}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
BERT: dict[str, Any] = {"model_type": "bert", **SIZES}
BOTH_WAYS: dict[str, Any] = {
    "model_type": "gemma3_text", **SIZES, "num_key_value_heads": 1, "head_dim": 16, "use_bidirectional_attention": True
}  # fmt: skip


def _moved(model_dir: str, base: Path) -> set[str]:
    before, after = (load_file(Path(folder) / "model.safetensors") for folder in (base, model_dir))
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.fixture
def untied(tmp_path: Path, tiny_tokenizer: Any, tiny_config: dict[str, Any]) -> Path:
    """A tiny model whose lm_head is a matrix of its own."""
    folder = tmp_path / "untied"
    new_model(
        {**tiny_config, "tie_word_embeddings": False}, tiny_tokenizer, seed=0
    ).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def test_frozen_patterns_stay_where_they_are_and_the_rest_moves(
    make_recipe: MakeRecipe, tiny_model: Path
) -> None:
    model = {"path": str(tiny_model), "freeze": ["model.embed_tokens.*", "model.layers.0.*"]}
    result = train(make_recipe(model=model))
    everything = set(load_file(tiny_model / "model.safetensors"))
    frozen = {n for n in everything if n.startswith(("model.embed_tokens.", "model.layers.0."))}
    assert frozen
    assert _moved(result.model_dir, tiny_model) == everything - frozen
    note = next(note for note in result.notes if note.startswith("these train:"))
    assert "model.layers.{1-1}.mlp.up_proj.weight" in note
    assert "embed_tokens" not in note


def test_a_pattern_without_a_match_is_refused(make_recipe: MakeRecipe, tiny_model: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"model\.freeze: 'model\.layer\.0\.\*' matches no parameter"
    ):
        train(make_recipe(model={"path": str(tiny_model), "freeze": ["model.layer.0.*"]}))
    with pytest.raises(TrainingError, match="no parameter trains"):
        train(make_recipe(model={"path": str(tiny_model), "freeze": ["*"]}))


@pytest.mark.parametrize("verb", ["train", "plan", "find-lr"])
@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"model": {"path": "MODEL", "freeze": ["none.*"]}}, "model.freeze"),
        ({"method": "sft"}, "method"),  # shows as the corpus is tokenized
    ],
)
def test_a_fault_that_shows_late_has_its_line_from_every_verb(
    make_recipe: MakeRecipe,
    tiny_model: Path,
    capsys: pytest.CaptureFixture[str],
    verb: str,
    sections: Any,
    key: str,
) -> None:
    if "model" in sections:
        sections = {"model": {**sections["model"], "path": str(tiny_model)}}
    path = make_recipe(**sections).path
    lines = path.read_text("utf-8").splitlines()
    (number,) = (
        n for n, line in enumerate(lines, 1) if line.strip().startswith(f"{key.split('.')[-1]}:")
    )
    assert main([verb, str(path)]) == 2
    assert f"{path}:{number}: {key}: " in capsys.readouterr().err


def test_what_the_libraries_freeze_in_silence_stops_the_run(
    make_recipe: MakeRecipe, tiny_model: Path
) -> None:
    model = load_model(str(tiny_model)).model
    model.get_input_embeddings().requires_grad_(False)
    with pytest.raises(TrainingError, match=r"these differ: model\.embed_tokens\.weight"):
        check_trainable(model, (), None)


def test_lora_with_embeddings_and_head_trains_both(make_recipe: MakeRecipe, untied: Path) -> None:
    adapter = {
        "r": 4,
        "target_modules": ["q_proj", "v_proj"],
        "modules_to_save": ["embed_tokens", "lm_head"],
    }
    result = train(make_recipe(model={"path": str(untied)}, adapter=adapter, trainer=FAST))
    saved = load_file(Path(result.model_dir) / "adapter_model.safetensors")
    base = load_file(untied / "model.safetensors")
    for module in ("model.embed_tokens", "lm_head"):
        assert not torch.equal(saved[f"base_model.model.{module}.weight"], base[f"{module}.weight"])
    with pytest.raises(RecipeError, match=r"adapter.target_modules: .* asks to train nothing_such"):
        train(make_recipe(model={"path": str(untied)}, adapter={**adapter, "target_modules": ["q_proj", "nothing_such"]},
                          trainer=FAST), overwrite=True)  # fmt: skip


ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"r": 4, "target_modules": ["q_proj"], "use_dora": True},
    "ia3": {"target_modules": ["v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "osf": {},
    "randlora": {"r": 4, "target_modules": ["q_proj"]},
}


@pytest.mark.parametrize("kind", quick(ADAPTERS, "lora", "osf"))
def test_an_adapter_of_any_type_trains_resumes_is_read_and_folded_in(
    kind: str, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    saving = {**FAST, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    recipe = make_recipe(adapter={"type": kind, **ADAPTERS[kind]}, trainer=saving)
    result = train(recipe)
    model_dir = Path(result.model_dir)
    (note,) = [note for note in result.notes if note.startswith("these train:")]
    assert note.endswith(".U_low and 13 more") is (kind == "osf")  # of 7 matrices, 3 tensors each
    saved = load_file(model_dir / "adapter_model.safetensors")
    assert ("lora_magnitude_vector" in " ".join(saved)) == (kind == "lora")
    interrupt(recipe.run_dir, 2)
    assert train(recipe, resume=True).n_steps == 4
    again = load_file(model_dir / "adapter_model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in saved.items())
    (tmp_path / "folded").mkdir()
    merge_adapter(model_dir, tmp_path / "folded")
    ids = torch.tensor([[5, 6, 7, 8]])
    base, tuned, folded = (load_model(str(folder)).model
                           for folder in (recipe.model.path, model_dir, tmp_path / "folded"))  # fmt: skip
    with torch.no_grad():
        assert torch.allclose(tuned(ids).logits, folded(ids).logits, atol=1e-5)
        assert not torch.allclose(tuned(ids).logits, base(ids).logits, atol=1e-4)


@pytest.mark.parametrize("quantization", ["8bit", "4bit"])
def test_qlora_trains_an_adapter_on_quantised_weights(
    make_recipe: MakeRecipe,
    tmp_path: Path,
    tiny_tokenizer: Any,
    tiny_config: dict[str, Any],
    quantization: str,
) -> None:
    folder = tmp_path / "wide"  # bitsandbytes keeps 4-bit weights in blocks of 64
    new_model(
        {**tiny_config, "hidden_size": 64, "intermediate_size": 128}, tiny_tokenizer, 0
    ).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    adapter = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    model = {"path": str(folder), "quantization": quantization}
    result = train(make_recipe(model=model, adapter=adapter, trainer={**FAST, "max_steps": 12}))
    saved = load_file(Path(result.model_dir) / "adapter_model.safetensors")
    assert all(value.abs().max() > 0 for name, value in saved.items() if "lora_B" in name)


def test_an_adapter_merged_at_the_end_is_a_plain_model_with_the_same_answers(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    adapter = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    apart = train(make_recipe(adapter=adapter, trainer=FAST, run_dir=str(tmp_path / "apart")))
    merged = train(
        make_recipe(
            adapter={**adapter, "merge": True}, trainer=FAST, run_dir=str(tmp_path / "merged")
        )
    )
    assert not (Path(merged.model_dir) / "adapter_config.json").exists()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        one, two = (load_model(result.model_dir).model(ids).logits for result in (apart, merged))
    assert torch.allclose(one, two, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "fraction"),
    [("lm_head.weight", 1.0), ("model.norm.weight", 1.0), ("model.layers.3.mlp.up_proj.weight", 1.0),
     ("transformer.h.1.attn.c_attn.weight", 0.25), ("bert.encoder.layer.2.output.dense.weight", 0.5),
     ("model.embed_tokens.weight", 0.0625)],
)  # fmt: skip
def test_a_layer_gets_decay_times_the_rate_of_the_one_above(name: str, fraction: float) -> None:
    assert rate_factor(name, 4, 0.5, ("model.embed_tokens.",)) == fraction


TABLES = {
    "bloom": ({"hidden_size": 16, "n_head": 2, "n_layer": 3}, ("word_embeddings.", "word_embeddings_layernorm.")),
    "bart": ({"d_model": 16, "decoder_layers": 3, "decoder_attention_heads": 2, "decoder_ffn_dim": 16},
             ("embed_tokens.", "embed_positions.", "layernorm_embedding.")),
    "rwkv": ({"hidden_size": 16, "num_hidden_layers": 3}, ("rwkv.embeddings.",)),
    "openai-gpt": ({"n_embd": 16, "n_head": 2, "n_layer": 3}, ("tokens_embed.", "positions_embed.")),
}  # fmt: skip


@pytest.mark.parametrize("kind", TABLES)
def test_embeddings_of_any_name_have_the_lowest_rate(kind: str) -> None:
    """Beside them no other parameter outside of the layers, of which BART's config names others."""
    fields, tables = TABLES[kind]
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](vocab_size=20, **fields))
    trainer = SimpleNamespace(model=model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    LayerwiseRates(0.5).change_optimizer(optimizer, trainer)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name, rate = names[id(parameter)], 1.0
            if any(table in name for table in tables):
                rate = 0.125
            elif layer_number(name) is not None:
                rate = 0.5 ** (2 - layer_number(name))
            assert group["lr"] == rate, name


def _reading(kind: str, tokenizer: Any) -> Any:
    """A tiny model that reads text, gemma3 images as well."""
    text = {**SIZES, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": len(tokenizer)}
    fields: dict[str, Any] = text
    if kind == "gemma3":
        images = {**SIZES, "image_size": 28, "patch_size": 14}
        fields = {"text_config": text, "vision_config": images, "mm_tokens_per_image": 1}
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**fields))


def test_new_layers_are_not_those_of_a_tower_for_images(tiny_tokenizer: Any) -> None:
    model = _reading("gemma3", tiny_tokenizer)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    names = reinitialize_last_layers(model, 1, 8)
    assert names
    assert all("language_model.layers.1." in name for name in names)
    drawn = [name for name, weight in model.named_parameters() if not weight.equal(before[name])]
    assert {*drawn} <= {*names}
    assert any("v_proj" in name for name in drawn)


@pytest.mark.parametrize("kind", ["gemma3", "llama"])
def test_processes_do_not_wait_for_gradients_of_a_tower_for_images(
    make_recipe: MakeRecipe, tiny_tokenizer: Any, tmp_path: Path, kind: str
) -> None:
    model = _reading(kind, tiny_tokenizer)
    model.save_pretrained(tmp_path / kind)
    tiny_tokenizer.save_pretrained(tmp_path / kind)
    trainer = make_trainer(make_recipe(model={"path": str(tmp_path / kind)}))
    assert trainer.args.ddp_find_unused_parameters is (True if kind == "gemma3" else None)


def test_a_layer_of_a_decoder_alone_is_counted_in_it() -> None:
    fields = {
        "d_model": 16,
        "decoder_layers": 2,
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 16,
    }
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["mbart"](vocab_size=20, **fields))
    assert model.config.num_hidden_layers == 12
    assert all(".layers.1." in name for name in reinitialize_last_layers(model, 1, 5))
    with pytest.raises(RecipeError, match="the model has 2 layers"):
        reinitialize_last_layers(model, 3, 5)


@pytest.mark.parametrize(
    ("sections", "faults"),
    [
        ({"adapter": {"target_modules": "q_porj"}}, ["adapter.target_modules: peft refuses it: "]),
        ({"adapter": {"target_modules": ["lm_head"]}}, ["adapter.target_modules: peft refuses it: the trainer computes"]),
        ({"adapter": {"target_modules": ["q_proj"], "layers_to_transform": [7]}}, ["adapter.layers_to_transform: peft "]),
        ({"adapter": {"type": "prefix_tuning"}}, ["adapter.type: prefix_tuning adds virtual tokens"]),
        ({"adapter": {"type": "adalora"}}, ["adapter.type: adalora needs the number of steps"]),
        ({"adapter": {"type": "lily", "target_modules": ["q_proj"]}}, ["adapter.type: lily weighs its parts by all tokens"]),
        ({"adapter": {"type": "ia3", "r": 4}}, ["adapter.r: unknown key of peft's IA3Config."]),
        ({"adapter": {"type": "lota"}}, ["adapter.type: found 'lota'. Did you mean lora?"]),
        ({"adapter": {"peft_type": "IA3", "r": 4}}, ["adapter.r: unknown key of peft's IA3Config."]),
        ({"adapter": {"peft_type": "OFT", "type": "lora"}}, ["adapter.peft_type: found OFT, but adapter.type is lora."]),
        ({"adapter": {"type": "cartridge"}}, ["adapter: num_virtual_tokens is missing"]),
        ({"trainer": {"router_aux_loss_coef": 0.1}}, ["trainer.router_aux_loss_coef: is for mixtures of experts"]),
        ({"trainer": {"optim_args": "betas"}}, ["trainer.optim_args: TRL refuses it"]),
        ({"trainer": {"optim": "galore_adamw"}}, ["trainer.optim: TRL refuses it: You need to install `galore_torch`"]),
        ({"trainer": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"x": 1}}},
         ["trainer.gradient_checkpointing_kwargs: TRL refuses it"]),
        ({"trainer": {"dataloader_persistent_workers": True, "accelerator_config": {"x": 1}}},
         ["trainer.accelerator_config: TRL refuses it"]),
        ({"trainer": {"use_liger_kernel": True, "push_to_hub": True}},
         ["trainer.use_liger_kernel: its kernels are Triton's", "trainer.push_to_hub: "]),
        ({"trainer": {"optim": "adamw_anyprecision"}}, ["trainer.optim: TRL refuses it: Please install "]),
        ({"trainer": {"fsdp": "full_shard"}}, ["trainer.fsdp: shards the model over processes, and no launcher started"]),
        ({"trainer": {"use_cpu": True, "activation_offloading": True}},
         ["trainer.activation_offloading: moves activations from an accelerator to memory, and this run is on the CPU"]),
        ({"trainer": {"use_cpu": True, "fp16": True}},
         ["trainer.fp16: float16 with a gradient scaler needs a GPU. On this CPU accelerate would train in float32"]),
        ({"model": {"new": {"model_type": "t5"}, "tokenizer": {"vocab_size": 300}}},
         ["model.new.model_type: found 't5', which is no causal language model"]),
        ({"model": {"new": BERT, "tokenizer": {"vocab_size": 300}}},
         ["model.new: bert is no causal language model as configured: it reads later tokens (another token at the end of a "
          "row moves the logits before it). Take a causal model. Set is_decoder: true in its config, and train it."]),
    ],
)  # fmt: skip
def test_what_the_libraries_would_refuse_is_one_line_before_a_model_loads(
    sections: dict[str, Any],
    faults: list[str],
    make_recipe: MakeRecipe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(RecipeError) as caught:
        check_training(make_recipe(**sections))
    lines = str(caught.value).splitlines()
    assert [fault in line for fault, line in zip(faults, lines, strict=True)] == [True] * len(
        faults
    ), lines


def test_keys_of_checkpointing_that_are_transformers_own_are_no_fault(
    make_recipe: MakeRecipe,
) -> None:
    """torch's checkpoint knows none of them: transformers takes them out before it calls that."""
    own = {"every_n_layers": 3, "offload": True, "preserve_rng_state": False}
    trainer = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": own}
    config, _ = check_training(make_recipe(trainer=trainer))
    assert config.activation_checkpointing_kwargs == own


def test_a_model_that_reads_later_tokens_does_not_train(
    make_recipe: MakeRecipe, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    """Of the two folders one is refused by its config, before weights are read, the other by the test of the model."""
    faults = ("model.path: .*config.json: bert is no causal", "gemma3_text is no causal")
    for fields, fault in zip((BERT, BOTH_WAYS), faults, strict=True):
        folder = tmp_path / str(fields["model_type"])
        new_model(fields, tiny_tokenizer, 0).save_pretrained(folder)
        tiny_tokenizer.save_pretrained(folder)
        recipe = make_recipe(model={"path": str(folder)})
        with pytest.raises((RecipeError, InputError), match=fault):
            train(recipe)
        assert not (recipe.run_dir / "model").exists()
    (folder / "adapter_config.json").write_text("{}", "utf-8")
    with pytest.raises(RecipeError, match=r"model\.path: .* is an adapter"):
        train(recipe)
    model = {"new": {**BERT, "is_decoder": True}, "tokenizer": str(tmp_path / "bert")}
    assert (
        train(make_recipe(model=model, trainer={**FAST, "packing": False, "max_steps": 1})).n_steps
        == 1
    )


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"hidden_size": "x"}, "model.new.hidden_size: llama refuses it: "),
        ({"num_attention_heads": 7}, "model.new.num_attention_heads: llama refuses it: "),
        (
            {"rope_parameters": {"rope_theta": 1.0, "rope_type": "nope"}},
            "model.new.rope_parameters: llama refuses it: ",
        ),
        ({"rms_norm_eps": -1.0}, "model.new.rms_norm_eps: found -1.0, allowed: 1e-30 to 1."),
        ({"hidden_act": "nope"}, "model.new.hidden_act: llama refuses it: "),
        (
            {"initializer_range": 0.0},
            "model.new.initializer_range: found 0.0, allowed: 1e-06 to 10.",
        ),
    ],
)
def test_a_new_model_that_cannot_be_is_refused_by_the_key(
    changes: dict[str, Any],
    fault: str,
    make_recipe: MakeRecipe,
    tiny_config: dict[str, object],
    tiny_model: Path,
) -> None:
    with pytest.raises(RecipeError) as caught:
        check_training(
            make_recipe(model={"new": {**tiny_config, **changes}, "tokenizer": str(tiny_model)})
        )
    assert fault in str(caught.value)


def test_an_adapter_that_fp16_trains_is_in_float32_and_its_base_is_not_touched() -> None:
    """TRL has the adapters of quantised models in bfloat16, whose gradients the scaler of fp16 refuses on a GPU."""
    from kinject.train.load import widen_adapter

    base, adapter = (
        torch.nn.Linear(2, 2).to(torch.float16),
        torch.nn.Linear(2, 2).to(torch.bfloat16),
    )
    base.requires_grad_(False)
    before = adapter.weight.detach().clone()
    widen_adapter(torch.nn.Sequential(base, adapter))
    assert (base.weight.dtype, adapter.weight.dtype) == (torch.float16, torch.float32)
    assert torch.equal(adapter.weight, before.float())
