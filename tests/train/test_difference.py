"""kinject export --add --minus: a model plus the difference of two others, against the sum in float64; adapters put elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from kinject.cli import main
from kinject.errors import InputError
from kinject.models import model_hash
from kinject.train.difference import add_difference
from kinject.train.merge import apply_adapter

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def _save(folder: Path, tokenizer: Any, seed: int, *, near: Path | None = None, **options: Any) -> Path:
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


CASES: Mapping[str, tuple[torch.dtype, dict[str, Any], dict[str, Any]]] = {
    "bfloat16, further tokens, untied": (torch.bfloat16, {}, {}),
    "float32, tied heads": (torch.float32, {"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
    "a head of its own in the instruct model only": (torch.float32, {"tie_word_embeddings": True}, {}),
    "a tied instruct model": (torch.float32, {}, {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_sum_is_that_of_float64_and_chat_comes_from_the_instruct_model(
    case: str, tiny_tokenizer: Any, instruct_tokenizer: Any, tmp_path: Path
) -> None:
    dtype, tied, instruct_tied = CASES[case]
    base = _save(tmp_path / "base", tiny_tokenizer, 1, dtype=dtype, **tied)
    model = _save(tmp_path / "cpt", tiny_tokenizer, 2, near=base, dtype=dtype, **tied)
    instruct = _save(tmp_path / "chat", instruct_tokenizer, 3, near=base, dtype=dtype, **instruct_tied)
    (instruct / "generation_config.json").write_text('{"temperature": 0.25, "do_sample": true}')
    out = add_difference(str(model), str(instruct), str(base), [0.5, 1.0], tmp_path / "merged")
    ours, theirs, start = map(_weights, (model, instruct, base))
    for scale, folder in out.items():
        got = _weights(folder)
        assert got.keys() == ours.keys() | theirs.keys() | start.keys()
        for name, value in got.items():
            a, b, c = (side.get(name, side[EMBEDDING]).double() for side in (ours, theirs, start))
            wanted = b.clone()
            wanted[: len(a)] = a + scale * (b[: len(a)] - c)
            assert value.dtype == dtype
            assert torch.allclose(value.double(), wanted, atol=1e-6, rtol=torch.finfo(dtype).eps), name
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
    moved = sum(float((value - start[name]).double().square().sum()) for name, value in ours.items() if value.ndim > 1)
    norm = sum(float(value.double().square().sum()) for value in start.values() if value.ndim > 1)
    if ours.keys() == theirs.keys():
        assert manifest["counts"]["norms"]["model"] == pytest.approx((moved / norm) ** 0.5, rel=0.01)


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
        ((base, shifted, base), f"the token '({first}|{second})' is number"),
        ((base, tmp_path / "nowhere", base), "nowhere"),
    ):
        with pytest.raises(InputError, match=fault):
            add_difference(str(model), str(plus), str(minus), [1.0], out)
    with pytest.raises(InputError, match="--scale: found 0"):
        add_difference(str(base), str(chat), str(base), [0.0], out)
    assert not out.exists()
    stranger = _save(tmp_path / "stranger", instruct_tokenizer, 9, rope_theta=1e6)
    add_difference(str(base), str(stranger), str(base), [1.0], out)
    assert "hardly trained from it" in caplog.text
    assert "rope_parameters" in caplog.text
    broken = sorted(chat.glob("*.safetensors"))[0]
    data = bytearray(broken.read_bytes())
    data[-2:] = b"\xc0\x7f"  # a NaN
    broken.write_bytes(data)
    with pytest.raises(InputError, match=f"{broken.name}: .* is not finite"):
        add_difference(str(base), str(chat), str(base), [1.0], tmp_path / "nan")
    assert list((tmp_path / "nan").glob("[!.]*")) == []


def test_a_head_lies_beside_the_embedding_in_one_shard_of_a_sum(tiny_tokenizer: Any, tmp_path: Path) -> None:
    whole = _save(tmp_path / "whole", tiny_tokenizer, 1, tie_word_embeddings=True)
    chat = _save(tmp_path / "chat", tiny_tokenizer, 2, near=whole)
    folder = add_difference(str(whole), str(chat), str(whole), [1.0], tmp_path / "out")[1.0]
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert files[HEAD] == files[EMBEDDING]
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False


def test_an_adapter_goes_onto_the_instruct_model_as_peft_would_put_it(
    tiny_tokenizer: Any, instruct_tokenizer: Any, tmp_path: Path
) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    base = _save(tmp_path / "base", tiny_tokenizer, 1)
    chat = _save(tmp_path / "chat", instruct_tokenizer, 2, near=base)
    wider = _save(tmp_path / "wider", tiny_tokenizer, 2, num_key_value_heads=1)
    adapter = tmp_path / "adapter"
    tuned = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"),
    )
    with torch.no_grad():
        for value in tuned.parameters():
            if value.requires_grad:
                value += 0.2 * torch.randn_like(value)
    tuned.save_pretrained(adapter)
    tiny_tokenizer.save_pretrained(adapter)
    folder = apply_adapter(str(adapter), str(chat), tmp_path / "out")
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        wanted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(chat), adapter)(ids).logits
        assert torch.allclose(AutoModelForCausalLM.from_pretrained(folder)(ids).logits, wanted, atol=1e-5)
    assert AutoTokenizer.from_pretrained(folder).chat_template == TEMPLATE
    with pytest.raises(InputError, match=r"peft cannot load it on .*wider"):
        apply_adapter(str(adapter), str(wider), tmp_path / "no")
    with pytest.raises(InputError, match=r"no adapter_config\.json, so it is no adapter"):
        apply_adapter(str(base), str(chat), tmp_path / "no")
    with pytest.raises(InputError, match="an adapter, but add needs whole weights"):
        add_difference(str(base), str(adapter), str(base), [1.0], tmp_path / "no")
    assert not any((tmp_path / "no").glob("[!.]*"))


def test_the_command_takes_one_of_three_ways(
    tiny_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)  # it would outlive this test
    base = str(_save(tmp_path / "base", tiny_tokenizer, 1))
    assert main(["export", base, "--add", base, "--minus", base, "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == f"scale 1: {tmp_path / 'out' / 'scale-1'}\n"
    for arguments, fault in (
        ([base, "--average-with", base, "--add", base], "found --average-with and --add"),
        ([base, "--add", base], "belong together"),
        ([base, "--onto", base, "--alpha", "0.5"], "--alpha: is for --average-with only"),
        ([base, "--average-with", base, "--scale", "0.5"], "--scale: is for --add only"),
    ):
        assert main(["export", *arguments]) == 2
        assert fault in capsys.readouterr().err
