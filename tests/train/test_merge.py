"""kinject export --average-with writes the average of two models, exactly, and refuses two that do not belong together."""

from __future__ import annotations

import json
import re
import shutil
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from kinject.cli import main
from kinject.errors import InputError
from kinject.models import LoadOptions, load_model, model_hash, new_model, read_headers
from kinject.recipe import Recipe
from kinject.train import train
from kinject.train.merge import add_difference, merge, merge_adapter, rewrite
from small import TINY, quick

MakeRecipe = Callable[..., Recipe]


def test_a_merged_weight_is_the_average_and_the_ends_are_the_models_themselves(
    make_recipe: MakeRecipe, tiny_model: Path, tmp_path: Path
) -> None:
    tuned = train(make_recipe()).model_dir
    done = merge(str(tiny_model), tuned, [0.0, 0.25, 0.24999997, 1.0], tmp_path / "merged")
    names = [folder.name for folder in done.values()]
    assert names == ["alpha-0", "alpha-0.25", "alpha-0.24999997", "alpha-1"]
    ours, theirs = (
        load_file(tiny_model / "model.safetensors"),
        load_file(Path(tuned) / "model.safetensors"),
    )
    got = {alpha: load_file(folder / "model.safetensors") for alpha, folder in done.items()}
    for name in ours:
        assert torch.equal(got[0.0][name], ours[name])
        assert torch.equal(got[1.0][name], theirs[name])
        wanted = 0.75 * ours[name].double() + 0.25 * theirs[name].double()
        assert torch.allclose(got[0.25][name].double(), wanted, atol=1e-8)
    loaded = load_model(str(done[0.25]))
    assert loaded.tokenizer.bos_token_id is not None


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
def test_a_head_that_an_adapter_has_untied_is_averaged_with_the_embedding(
    make_recipe: MakeRecipe, tiny_model: Path, tmp_path: Path
) -> None:
    adapter = {"r": 2, "target_modules": ["up_proj"], "modules_to_save": ["lm_head"], "merge": True}
    tuned = Path(train(make_recipe(adapter=adapter, trainer={"max_steps": 2})).model_dir)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tiny_model, tuned))
    assert theirs.keys() - ours.keys() == {"lm_head.weight"}
    done = merge(str(tiny_model), str(tuned), [0.0, 0.6], tmp_path / "merged")
    got = load_file(done[0.6] / "model.safetensors")
    table = ours["model.embed_tokens.weight"].double()
    wanted = 0.4 * table + 0.6 * theirs["lm_head.weight"].double()
    assert torch.allclose(got["lm_head.weight"].double(), wanted, atol=1e-7)
    ids = torch.tensor([[7, 5, 6]])
    logits = [load_model(str(folder)).model(ids).logits for folder in (done[0.0], tiny_model)]
    assert torch.equal(*logits)


ADAPTERS: Mapping[str, tuple[Mapping[str, Any], bool]] = {
    "all layers, with DoRA": ({"target_modules": "all-linear", "use_dora": True}, False),
    "a whole head beside it, untied": (
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        True,
    ),
    "embeddings that were the head": (
        {"target_modules": ["embed_tokens"], "rank_pattern": {"embed_tokens": 2}},
        True,
    ),
    "a bias and some tokens": (
        {"target_modules": ["v_proj"], "trainable_token_indices": [1, 5], "bias": "all"},
        False,
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")  # on tied embeddings
@pytest.mark.parametrize("case", ADAPTERS)
def test_an_adapter_folded_in_gives_the_logits_of_peft_and_is_rounded_once(
    case: str, tiny_model: Path, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    options, tied = ADAPTERS[case]
    base, adapter, out = tmp_path / "base", tmp_path / "adapter", tmp_path / "out"
    config = load_model(str(tiny_model)).model.config
    config.tie_word_embeddings, config.attention_bias = tied, True
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(
        base, max_shard_size="20KB"
    )
    assert len(list(base.glob("*.safetensors"))) > 2
    tiny_tokenizer.save_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tuned = get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **options)
    ).eval()
    with torch.no_grad():
        for value in tuned.parameters():
            if value.requires_grad:
                value += 0.2 * torch.randn_like(value)
    tuned.save_pretrained(adapter)
    tiny_tokenizer.save_pretrained(adapter)
    for folder, kept in (out, "auto"), (tmp_path / "whole", "float32"):
        folder.mkdir()
        merge_adapter(adapter, folder, kept)
    whole = load_model(str(tmp_path / "whole")).model
    ids = torch.tensor([[5, 6, 7, 8]])
    with (
        torch.no_grad()
    ):  # peft's own merge changes the head with the embedding where they are tied
        assert torch.allclose(whole(ids).logits, tuned(ids).logits, atol=1e-5)
    folded = AutoModelForCausalLM.from_pretrained(out)
    assert folded.dtype == torch.bfloat16
    ours, theirs = folded.state_dict(), whole.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(
        torch.equal(ours[name], value.to(torch.bfloat16)) for name, value in theirs.items()
    )  # rounded once


def test_an_adapter_is_in_the_weights_before_they_are_rounded_to_another_dtype(
    tiny_model: Path, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    config = LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["gate_proj", "k_proj"])
    tuned = get_peft_model(load_model(str(tiny_model)).model, config)
    torch.manual_seed(6)
    _save_moved(tuned, 0.01, tiny_tokenizer, tmp_path / "adapter")
    folded = {}
    for dtype in ("float32", "float16"):
        (tmp_path / dtype).mkdir()
        merge_adapter(tmp_path / "adapter", tmp_path / dtype, dtype)
        folded[dtype] = load_file(tmp_path / dtype / "model.safetensors")
    assert json.loads((tmp_path / "float16/config.json").read_text())["dtype"] == "float16"
    for name, value in folded["float32"].items():
        assert torch.equal(folded["float16"][name], value.half()), name


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
@pytest.mark.filterwarnings("ignore::RuntimeWarning:peft.*")
@pytest.mark.parametrize(
    "targets",
    [
        {"target_modules": "all-linear"},
        {"target_modules": ["k_proj"], "target_parameters": ["experts.down_proj"]},
    ],
)
def test_experts_in_one_tensor_are_folded_as_other_layers(
    targets: dict[str, Any], tiny_tokenizer: Any, tmp_path: Path
) -> None:
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "model_type": "mixtral"}
    base = new_model({**TINY, **experts}, tiny_tokenizer, 4).to(torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    tiny_tokenizer.save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    config = LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=6, **targets)
    tuned = get_peft_model(model, config).eval()
    _save_moved(tuned, 0.2, tiny_tokenizer, tmp_path / "adapter")
    assert any(
        "experts" in name and value.requires_grad for name, value in tuned.named_parameters()
    )
    folded = {}
    for kept in ("float32", "auto"):
        (tmp_path / kept).mkdir()
        merge_adapter(tmp_path / "adapter", tmp_path / kept, kept)
        folded[kept] = load_model(str(tmp_path / kept), LoadOptions(dtype="auto")).model
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.allclose(folded["float32"](ids).logits, tuned(ids).logits, atol=1e-5)
    rounded = folded["auto"].state_dict()
    for name, value in folded["float32"].state_dict().items():
        assert torch.equal(rounded[name], value.to(torch.bfloat16)), name


def test_a_model_from_a_base_in_bfloat16_is_saved_so_and_from_others_as_it_was_trained(
    make_recipe: MakeRecipe, tiny_model: Path, tmp_path: Path
) -> None:
    for name, dtype in ("plain", torch.float32), ("base", torch.bfloat16):
        load_model(str(tiny_model)).model.to(torch.bfloat16).to(dtype).save_pretrained(tiny_model)
        train(make_recipe(run_dir=str(tmp_path / name), trainer={"max_steps": 2}))
    rounded, whole = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("base", "plain")
    )
    assert all(
        torch.equal(rounded[name], value.to(torch.bfloat16)) for name, value in whole.items()
    )
    assert {value.dtype for value in whole.values()} == {torch.float32}
    configs = [
        json.loads((tmp_path / name / "model" / "config.json").read_text())["dtype"]
        for name in ("base", "plain")
    ]
    assert configs == ["bfloat16", "float32"]


@pytest.mark.parametrize("is_named", quick([True, False], False))
def test_weights_keep_the_dtypes_of_a_base_that_has_two(
    make_recipe: MakeRecipe, tiny_model: Path, tmp_path: Path, is_named: bool
) -> None:
    """Norms in float32 beside bfloat16, as routers have them; config.json names bfloat16 or nothing."""
    weights = load_file(tiny_model / "model.safetensors")
    for name, weight in weights.items():
        weights[name] = weight * 1.2345 if "norm" in name else weight.bfloat16()
    save_file(weights, tiny_model / "model.safetensors", {"format": "pt"})
    config = json.loads((tiny_model / "config.json").read_text())
    del config["dtype"]
    named = {"dtype": "bfloat16"} if is_named else {}
    (tiny_model / "config.json").write_text(json.dumps({**config, **named}))
    adapter = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
    sections: dict[str, dict[str, Any]] = {
        "whole": {}, "adapter": {"adapter": adapter}, "merged": {"adapter": {**adapter, "merge": True}},
    }  # fmt: skip
    for name, section in sections.items():
        train(make_recipe(run_dir=str(tmp_path / name), trainer={"max_steps": 2}, **section))
    merge_adapter(tmp_path / "adapter" / "model", tmp_path / "adapter")
    folders = [tmp_path / "whole" / "model", tmp_path / "merged" / "model", tmp_path / "adapter"]
    saved = [load_file(folder / "model.safetensors") for folder in folders]
    for name, weight in weights.items():
        assert [tensors[name].dtype for tensors in saved] == [weight.dtype] * 3, name
        if "q_proj" not in name and "down_proj" not in name:
            assert torch.equal(saved[1][name], weight)
            assert torch.equal(saved[2][name], weight)
    assert all(torch.equal(saved[1][name], saved[2][name]) for name in weights)
    for folder in folders:
        assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_no_more_than_one_shard_is_held_while_weights_are_rewritten(
    tiny_model: Path, tmp_path: Path
) -> None:
    load_model(str(tiny_model)).model.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    shards = sorted((tmp_path / "parts").glob("*.safetensors"))
    assert len(shards) > 4
    most = max(len(load_file(shard)) for shard in shards)
    assert most < len(read_headers(tmp_path / "parts")) / 2
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    held = []

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor + 1
        alive.add(changed)
        held.append(len(alive))
        return changed

    (tmp_path / "out").mkdir()
    rewrite(tmp_path / "parts", tmp_path / "out", change)
    assert 0 < max(held) <= most


def test_strangers_are_not_averaged(tiny_model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    config = AutoConfig.from_pretrained(tiny_model)
    config.intermediate_size += 8
    AutoModelForCausalLM.from_config(config).save_pretrained(other)
    for file in tiny_model.glob("tokenizer*"):
        shutil.copy(file, other)
    with pytest.raises(InputError, match=r"mlp\.\w+\.weight differs .* in name or shape"):
        merge(str(tiny_model), str(other), [0.5], tmp_path / "merged")
    # an adapter by its own name, not by that of the folder in which it is folded in
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tuned = get_peft_model(model, LoraConfig(r=2, target_modules=["k_proj"]))
    tuned.save_pretrained(tmp_path / "adapter")
    with pytest.raises(InputError, match=r"^\S*/adapter: .* differs from \S*/other in name"):
        merge(str(other), str(tmp_path / "adapter"), [0.5], tmp_path / "merged")
    with pytest.raises(InputError, match=r"no config\.json in this folder"):
        merge(str(tiny_model), str(tmp_path), [0.5], tmp_path / "merged")
    with pytest.raises(InputError, match=r"--alpha: found 1\.5"):
        merge(str(tiny_model), str(other), [1.5], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        {"hidden_act": "gelu"},
        {"rms_norm_eps": 1e-3},
    ],
)
def test_weights_of_one_shape_that_are_calculated_with_otherwise_are_not_added(
    tiny_model: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    """The average had the configuration of the tuned model, which fits half of its weights."""
    other, chat = tmp_path / "other", tmp_path / "chat"
    for folder in (other, chat):
        shutil.copytree(tiny_model, folder)
    config = json.loads((other / "config.json").read_text()) | change
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=rf"other/config\.json: {next(iter(change))} is "):
        merge(str(tiny_model), str(other), [0.5], tmp_path / "merged")
    with pytest.raises(InputError, match=rf"{next(iter(change))} is "):
        add_difference(str(other), str(chat), str(tiny_model), [1.0], tmp_path / "merged")
    done = add_difference(str(tiny_model), str(other), str(chat), [1.0], tmp_path / "merged")
    kept = json.loads((done[1.0] / "config.json").read_text())  # of the model with the chat
    assert {key: kept[key] for key in change} == change


def test_weights_that_are_not_finite_are_not_averaged(tiny_model: Path, tmp_path: Path) -> None:
    tuned = tmp_path / "tuned"
    shutil.copytree(tiny_model, tuned)
    weights = load_file(tuned / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name][3, 3] = float("inf")
    save_file(weights, tuned / "model.safetensors", {"format": "pt"})
    for pair in ((tiny_model, tuned), (tuned, tiny_model)):
        with pytest.raises(
            InputError,
            match=rf"tuned/model\.safetensors: {re.escape(name)} holds a value that is not",
        ):
            merge(str(pair[0]), str(pair[1]), [0.5], tmp_path / "merged")
    large = load_file(tiny_model / "model.safetensors")
    large[name][3, 3] = 1e38
    save_file(large, tiny_model / "model.safetensors", {"format": "pt"})
    weights[name][3, 3] = 0.0
    save_file(
        {key: value.half() for key, value in weights.items()},
        tuned / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(InputError, match=r"at alpha 0\.5 is out of its dtype's range"):
        merge(str(tiny_model), str(tuned), [0.5], tmp_path / "merged")
    assert not any((tmp_path / "merged").glob("[!.]*"))


TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
)


def _save_moved(tuned: Any, by: float, tokenizer: Any, folder: Path) -> None:
    """Save an adapter as a training leaves it: its matrices B begin at zero, and are moved by random numbers of that size."""
    with torch.no_grad():
        for name, value in tuned.named_parameters():
            if "lora_B" in name:
                value += by * torch.randn_like(value)
    tuned.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def _save(
    folder: Path, tokenizer: Any, seed: int, *, near: Path | None = None, **options: Any
) -> Path:
    """Save a Llama in several shards: random, or the weights of `near` a little moved."""
    dtype, rows = options.pop("dtype", torch.float32), options.pop("rows", len(tokenizer))
    config = LlamaConfig(
        vocab_size=rows, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, **options,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    state, start = model.state_dict(), {} if near is None else _weights(near)
    with torch.no_grad():
        for name, value in start.items():
            head = state[name][: len(value)]
            head.copy_(value.float() + 0.1 * head)
    model.to(dtype).save_pretrained(folder, max_shard_size="8KB")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def instruct_tokenizer(tiny_tokenizer: Any, tmp_path: Path) -> Any:
    """The tiny tokenizer with two tokens more and a chat template."""
    tiny_tokenizer.save_pretrained(tmp_path / "words")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "words")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


SUMS: Mapping[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bfloat16, further tokens, untied": (torch.bfloat16, {}),
    "float32, tied heads": (torch.float32, {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("case", SUMS)
def test_the_sum_is_that_of_float64_and_chat_comes_from_the_instruct_model(
    case: str, tiny_tokenizer: Any, instruct_tokenizer: Any, tmp_path: Path
) -> None:
    dtype, tied = SUMS[case]
    base = _save(tmp_path / "base", tiny_tokenizer, 1, dtype=dtype, **tied)
    model = _save(tmp_path / "cpt", tiny_tokenizer, 2, near=base, dtype=dtype, **tied)
    instruct = _save(tmp_path / "chat", instruct_tokenizer, 3, near=base, dtype=dtype, **tied)
    (instruct / "generation_config.json").write_text('{"temperature": 0.25, "do_sample": true}')
    out = add_difference(str(model), str(instruct), str(base), [0.5, 1.0], tmp_path / "merged")
    ours, theirs, start = map(_weights, (model, instruct, base))
    for scale, folder in out.items():
        got = _weights(folder)
        assert got.keys() == ours.keys()
        for name, value in got.items():
            a, b, c = (side[name].double() for side in (ours, theirs, start))
            wanted = b.clone()
            wanted[: len(a)] = a + scale * (b[: len(a)] - c)
            assert value.dtype == dtype
            assert torch.allclose(value.double(), wanted, atol=1e-6, rtol=torch.finfo(dtype).eps), (
                name
            )
        assert len(list(folder.glob("*.safetensors"))) == len(list(model.glob("*.safetensors"))) > 2
        loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"] | info["unexpected_keys"]
        assert loaded.dtype == dtype
        assert loaded.lm_head.weight.shape[0] == len(instruct_tokenizer)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert (tokenizer.chat_template, len(tokenizer)) == (TEMPLATE, len(instruct_tokenizer))
        assert json.loads((folder / "generation_config.json").read_text())["temperature"] == 0.25
    manifest = json.loads((out[1.0] / "merge.json").read_text())
    assert manifest["inputs"] == {
        "model": model_hash(model),
        "add": model_hash(instruct),
        "minus": model_hash(base),
    }


def test_a_difference_is_added_to_a_head_that_the_training_has_untied(
    tiny_tokenizer: Any, tmp_path: Path
) -> None:
    base = _save(tmp_path / "base", tiny_tokenizer, 4, tie_word_embeddings=True)
    chat = _save(tmp_path / "chat", tiny_tokenizer, 5, near=base, tie_word_embeddings=True)
    model = _save(tmp_path / "own", tiny_tokenizer, 6, near=base)
    out = add_difference(str(model), str(chat), str(base), [0.7], tmp_path / "merged")[0.7]
    ours, theirs, start, got = map(_weights, (model, chat, base, out))
    assert ours.keys() - theirs.keys() == {"lm_head.weight"}
    table = "model.embed_tokens.weight"
    for name in (table, "lm_head.weight"):
        wanted = ours[name].double() + 0.7 * (theirs[table].double() - start[table].double())
        assert torch.allclose(got[name].double(), wanted, atol=1e-6)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(loaded.lm_head.weight, got["lm_head.weight"])
    assert not loaded.config.tie_word_embeddings
    with pytest.raises(InputError, match=r"lm_head\.weight is not in both"):
        add_difference(str(base), str(model), str(base), [0.7], tmp_path / "none")


def test_three_that_do_not_belong_together_are_refused(
    tiny_tokenizer: Any, instruct_tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = _save(tmp_path / "base", tiny_tokenizer, 1)
    chat = _save(tmp_path / "chat", instruct_tokenizer, 2, near=base)
    longer = _save(tmp_path / "longer", instruct_tokenizer, 2, near=base)
    deeper = _save(tmp_path / "deeper", tiny_tokenizer, 1, attention_bias=True)
    shifted = _save(tmp_path / "shifted", instruct_tokenizer, 2, near=base)
    words = json.loads((shifted / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    first, second = [word for word in vocabulary if word.isalpha()][-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (shifted / "tokenizer.json").write_text(json.dumps(words))
    out = tmp_path / "out"
    for (model, plus, minus), fault in (
        ((longer, base, base), "its vocabulary has .* rows, that of .*base"),
        ((base, chat, deeper), "self_attn.k_proj.bias is not in both"),
        (
            (base, _save(tmp_path / "tied", tiny_tokenizer, 1, tie_word_embeddings=True), base),
            "All three must be one architecture",
        ),
        ((base, shifted, base), f"the token '({first}|{second})' is number"),
        ((base, tmp_path / "nowhere", base), "nowhere"),
    ):
        with pytest.raises(InputError, match=fault):
            add_difference(str(model), str(plus), str(minus), [1.0], out)
    with pytest.raises(InputError, match="--scale: found 0"):
        add_difference(str(base), str(chat), str(base), [0.0], out)
    assert not out.exists()
    broken = sorted(chat.glob("*.safetensors"))[0]
    data = bytearray(broken.read_bytes())
    data[-2:] = b"\xc0\x7f"  # a NaN
    broken.write_bytes(data)
    with pytest.raises(InputError, match=f"{broken.name}: .* is not finite"):
        add_difference(str(base), str(chat), str(base), [1.0], tmp_path / "nan")
    assert list((tmp_path / "nan").glob("[!.]*")) == []


def test_the_command_takes_one_of_two_ways(
    tiny_tokenizer: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)  # it would outlive this test
    base = str(_save(tmp_path / "base", tiny_tokenizer, 1))
    assert (
        main(["export", base, "--add", base, "--minus", base, "--out", str(tmp_path / "out")]) == 0
    )
    assert capsys.readouterr().out == f"scale 1: {tmp_path / 'out' / 'scale-1'}\n"
    for arguments, fault in (
        ([base, "--average-with", base, "--add", base], "found --average-with and --add"),
        ([base, "--add", base], "belong together"),
        (
            [base, "--add", base, "--minus", base, "--alpha", "0.5"],
            "--alpha: is for --average-with only",
        ),
        ([base, "--average-with", base, "--scale", "0.5"], "--scale: is for --add only"),
    ):
        assert main(["export", *arguments]) == 2
        assert fault in capsys.readouterr().err


def test_a_run_is_merged_as_the_model_in_it(
    tiny_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = str(_save(tmp_path / "base", tiny_tokenizer, 1))
    _save(tmp_path / "run" / "model", tiny_tokenizer, 2)
    words = ["export", str(tmp_path / "run"), "--average-with", base, "--alpha", "0.25"]
    assert main(words) == 0
    merged = tmp_path / "run" / "merged" / "alpha-0.25"
    assert capsys.readouterr().out == f"alpha 0.25: {merged}\n"
    assert list(merged.glob("*.safetensors"))
