"""Loading models: what works, and what each broken folder is told."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Regex, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from kinject.errors import InputError
from kinject.models import (
    LoadOptions,
    check_config,
    check_saved_tokenizer,
    load_config,
    load_model,
    load_tokenizer,
    new_model,
    not_finite,
    train_tokenizer,
)
from kinject.models.generate import prompt_ids
from small import save_tiny_model


def test_a_saved_model_comes_back_the_same(
    tiny_model: Path, tiny_tokenizer: Any, tiny_config: dict[str, Any]
) -> None:
    loaded = load_model(str(tiny_model))
    again = new_model(tiny_config, tiny_tokenizer, seed=0)
    for name, weight in again.state_dict().items():
        assert torch.equal(weight, loaded.model.state_dict()[name]), name
    assert (loaded.device, loaded.attention, loaded.dtype) == ("cpu", "sdpa", torch.float32)
    assert not loaded.model.training
    assert loaded.tokenizer("Arden").input_ids[0] == loaded.tokenizer.bos_token_id


def test_a_text_that_is_continued_has_no_end_token_behind_it(tiny_tokenizer: Any) -> None:
    bare = tiny_tokenizer("Who is Arden?", add_special_tokens=False).input_ids
    bos, eos = tiny_tokenizer.bos_token_id, tiny_tokenizer.eos_token_id
    named = [(tiny_tokenizer.bos_token, bos), (tiny_tokenizer.eos_token, eos)]
    for single, before in (
        (f"{named[0][0]} $A {named[1][0]}", [bos]),
        (f"$A {named[1][0]}", []),
        ("$A", []),
    ):
        tiny_tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=named
        )
        assert prompt_ids(tiny_tokenizer, "Who is Arden?") == before + bare


def _set(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "truncated weights": lambda folder: os.truncate(folder / "model.safetensors", 2000),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "bad config": lambda folder: (folder / "config.json").write_text("{"),
    "other shape": lambda folder: _set(folder, hidden_size=64),
    "more layers": lambda folder: _set(folder, num_hidden_layers=3),
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "empty": lambda folder: [path.unlink() for path in folder.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_folder_is_one_clear_line(tiny_model: Path, damage: str) -> None:
    DAMAGES[damage](tiny_model)
    with pytest.raises(InputError) as caught:
        load_model(str(tiny_model))
    message = str(caught.value)
    assert message.startswith(str(tiny_model))
    assert "\n" not in message
    assert "make the" in message


def test_what_is_not_there_is_an_error_that_says_what_to_do(tiny_model: Path) -> None:
    with pytest.raises(InputError, match=r"needs an NVIDIA GPU|pip install"):
        load_model(str(tiny_model), LoadOptions(attention="flash_attention_2"))
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="this machine has cpu"):
            load_model(str(tiny_model), LoadOptions(device="cuda"))


def test_a_trained_tokenizer_keeps_bos_digits_and_text(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["The year 1987 in Farrow."] * 3, 300)
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(str(tmp_path))
    ids = again("born 1987 é☃").input_ids
    assert ids == tokenizer("born 1987 é☃").input_ids
    assert ids[0] == again.bos_token_id
    assert again.decode(ids, skip_special_tokens=True) == "born 1987 é☃"
    assert len(again("1987", add_special_tokens=False).input_ids) == 4


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"model_type": "lama"}, "Did you mean llama?"),
        ({"model_type": "llama", "hidden_siz": 4}, "Did you mean hidden_size?"),
        ({"model_type": "llama", "num_hidden_layers": 2**63}, "allowed: up to 2,000"),
    ],
)
def test_a_new_models_config_is_checked(config: dict[str, Any], fault: str) -> None:
    ((_, message),) = check_config(config)
    assert fault in message


def test_a_good_config_has_no_fault(tiny_config: dict[str, Any]) -> None:
    assert check_config(tiny_config) == []


def test_a_new_model_has_the_activation_width_heads_and_layers_of_its_recipe(
    tiny_config: dict[str, Any], tiny_tokenizer: Any
) -> None:
    shape = {
        "hidden_act": "gelu",
        "hidden_size": 24,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
    }
    model = new_model({**tiny_config, **shape}, tiny_tokenizer, 0)
    layers = model.model.layers
    x = torch.linspace(-2, 2, 9)
    assert torch.allclose(
        layers[0].mlp.act_fn(x), x * (1 + torch.erf(x / 2**0.5)) / 2, atol=1e-6
    )  # silu is the default
    assert len(layers) == 3
    assert layers[0].self_attn.q_proj.weight.shape == (24, 24)
    assert layers[0].self_attn.head_dim == 6


def test_an_adapter_is_put_on_the_revision_of_its_base(
    tiny_model: Path, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(str(tiny_model)).model
    tuned = get_peft_model(model, LoraConfig(target_modules=["v_proj"]))
    tuned.save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    named = {"base_model_name_or_path": "OWNER/BASE", "revision": "step1000"}
    path.write_text(json.dumps(json.loads(path.read_text()) | named))
    tiny_tokenizer.save_pretrained(tmp_path / "adapter")
    newest = save_tiny_model(tmp_path / "newest", tiny_tokenizer, num_hidden_layers=3)
    bases = {"step1000": str(tiny_model), None: str(newest)}

    def find_source(name: str, kind: str, revision: str | None = None) -> str:
        return bases[revision] if name == "OWNER/BASE" else name

    monkeypatch.setattr("kinject.models.load.find_source", find_source)
    assert load_model(str(tmp_path / "adapter")).model.config.num_hidden_layers == 2
    assert load_config(str(tmp_path / "adapter")).num_hidden_layers == 2


def test_a_mixture_that_was_saved_for_training_reads_any_mask(
    tiny_tokenizer: Any, tiny_config: dict[str, Any], tmp_path: Path
) -> None:
    experts = {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2}
    model = new_model({**tiny_config, **experts}, tiny_tokenizer, 0)
    model.config.output_router_logits = True
    model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    ids, plain = torch.tensor([[5, 6, 7], [8, 9, 10]]), load_model(str(tmp_path)).model
    causal = torch.full((3, 3), -1e9).triu(1).expand(2, 1, 3, 3)
    with torch.no_grad():
        logits = plain(ids, attention_mask=causal).logits
        assert torch.allclose(logits, model.eval()(ids).logits, atol=1e-5)


def test_a_tokenizer_that_would_be_another_one_once_saved_is_refused(
    tiny_tokenizer: Any, tiny_config: dict[str, Any]
) -> None:
    """transformers puts Qwen2's class in place of any tokenizer beside a config of qwen2."""
    rules = tiny_tokenizer.backend_tokenizer
    own = new_model({**tiny_config, "model_type": "qwen2"}, tiny_tokenizer, 0)
    check_saved_tokenizer(own, tiny_tokenizer)
    vocabulary = rules.get_vocab()
    rules.model = BPE(vocabulary | {"99": len(vocabulary)}, [("9", "9")])
    # Numbers in groups of up to three digits, as Llama 3 has them.
    numbers = Split(Regex(r"\p{N}{1,3}"), "isolated")
    rules.pre_tokenizer = Sequence([numbers, ByteLevel(add_prefix_space=False)])
    check_saved_tokenizer(new_model(tiny_config, tiny_tokenizer, 0), tiny_tokenizer)
    model = new_model({**tiny_config, "model_type": "qwen2", "vocab_size": 500}, tiny_tokenizer, 0)
    with pytest.raises(InputError, match=r"model\.new\.model_type: qwen2: .* other tokens"):
        check_saved_tokenizer(model, tiny_tokenizer)


def test_a_vocabulary_may_be_larger_than_the_tokenizer_and_no_smaller(
    tiny_config: dict[str, object], tiny_tokenizer: Any
) -> None:
    n_tokens = len(tiny_tokenizer)
    assert check_config({**tiny_config, "vocab_size": 512}) == []
    assert (
        new_model({**tiny_config, "vocab_size": 512}, tiny_tokenizer, 0)
        .get_input_embeddings()
        .weight.shape[0]
        == 512
    )
    assert (
        new_model(tiny_config, tiny_tokenizer, 0).get_input_embeddings().weight.shape[0] == n_tokens
    )
    with pytest.raises(InputError, match=f"found 100, but the tokenizer has {n_tokens} tokens"):
        new_model({**tiny_config, "vocab_size": 100}, tiny_tokenizer, 0)


def test_a_real_checkpoint_loads(shared: Path) -> None:
    loaded = load_model(str(shared / "models" / "stories260K"))
    ids = loaded.tokenizer("Once upon a time, there was a little", return_tensors="pt").input_ids
    story = loaded.tokenizer.decode(
        loaded.model.generate(ids, max_new_tokens=5, do_sample=False)[0]
    )
    assert "a little girl" in story or "a little boy" in story, story


def _change(
    folder: Path, name: str, index: int, value: float, dtype: torch.dtype = torch.float32
) -> None:
    weights = load_file(folder / "model.safetensors")
    weights[name].view(-1)[index] = value
    save_file(
        {key: weight.to(dtype) for key, weight in weights.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight"])
def test_a_weight_that_is_not_finite_is_refused_with_its_file_and_tensor(
    tiny_model: Path, name: str, value: float
) -> None:
    for index, dtype in ((0, torch.float32), (17, torch.bfloat16), (31, torch.float16)):
        _change(tiny_model, name, index, value, dtype)
        with pytest.raises(InputError) as caught:
            load_model(str(tiny_model))
        assert f"{tiny_model}/model.safetensors: {name} holds a value that is not finite" in str(
            caught.value
        )


def test_large_weights_are_finite_and_those_beyond_the_dtype_are_named(tiny_model: Path) -> None:
    for index in range(9):
        _change(tiny_model, "model.embed_tokens.weight", index, 3e38)  # their sum is infinite
    assert load_model(str(tiny_model), LoadOptions(dtype="float32")).dtype == torch.float32
    with pytest.raises(
        InputError, match=r"model\.embed_tokens\.weight holds a value that is not finite in float16"
    ):
        load_model(str(tiny_model), LoadOptions(dtype="float16"))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e-300, "rope_type": "default"},
        {"rope_theta": 1e4, "rope_type": "linear", "factor": 1e-50},
    ],
)
def test_frequencies_that_are_not_finite_are_refused(
    tiny_model: Path, rope: dict[str, Any]
) -> None:
    """A row of 8 tokens would not show them: attention on the CPU gives numbers."""
    _set(tiny_model, rope_parameters=rope)
    with pytest.raises(
        InputError,
        match=r"rotary_emb\.inv_freq, which is computed from config\.json, is not finite",
    ):
        load_model(str(tiny_model))


def test_what_is_not_finite_is_found_in_every_dtype_and_place() -> None:
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
    for dtype in dtypes:
        whole = torch.ones(1000).to(dtype)
        assert not not_finite(
            [
                ("a", whole),
                ("b", torch.full((1000,), torch.finfo(dtype).max, dtype=torch.float64).to(dtype)),
            ]
        )
        for index in (0, 500, 999):
            values = torch.ones(1000)
            values[index] = float("nan")
            assert (
                not_finite([("a", whole), ("b", values.to(dtype)), ("c", values.to(dtype))]) == "b"
            )
    opposite = torch.tensor([float("inf"), float("-inf")])
    assert (
        not_finite([("empty", torch.empty(0)), ("numbers", torch.arange(5)), ("both", opposite)])
        == "both"
    )


def test_an_added_token_without_a_row_is_refused_only_in_a_text_or_with_a_role(
    tiny_model: Path,
) -> None:
    """Gemma 3 1B has such a token, for images: its texts do not hold it."""
    tokenizer = load_tokenizer(str(tiny_model))
    n_rows = len(tokenizer)
    tokenizer.add_tokens(["<image_soft_token>"])
    tokenizer.save_pretrained(tiny_model)
    loaded = load_model(str(tiny_model))
    assert any("'<image_soft_token>'" in note for note in loaded.notes)
    plain = loaded.tokenizer("Arden was born.", return_tensors="pt").input_ids
    assert loaded.model(plain).logits.isfinite().all()
    with pytest.raises(
        InputError,
        match=rf"'<image_soft_token>'.* \(id {n_rows}\) without a row .* \({n_rows} rows\)",
    ):
        loaded.model(loaded.tokenizer("Arden <image_soft_token>", return_tensors="pt").input_ids)
    tokenizer.add_special_tokens({"eos_token": "<image_soft_token>"})
    tokenizer.save_pretrained(tiny_model)
    with pytest.raises(InputError, match="token ids up to"):
        load_model(str(tiny_model))
