"""Draws model folders with one fault each: config, tokenizer, weights, index, quantization, kinds of files."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from mutations import VALUES, damaged_bytes

Fault = tuple[str, Callable[[Path], None]]
"""(what is broken, the function that breaks a folder)."""

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_NEVER_A_NUMBER = (
    None, "x", "", "256", [], {}, [1], {"a": 1}, -1, 0, -1.5, float("nan"), float("inf"), float("-inf"), -(10**30),
)  # fmt: skip
_VALID_IN_OTHER_MODELS = (
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
    "hidden_act",
    "attention_dropout",
)
"""Keys that another number makes another good model: these get only values that none has."""
_QUANTIZATIONS = (
    {"quant_method": "bitsandbytes", "load_in_4bit": True}, {"quant_method": "bitsandbytes", "load_in_8bit": True},
    {"quant_method": "gptq", "bits": 4}, {"quant_method": "awq", "bits": 4}, {"quant_method": "fp8"}, {"quant_method": "mxfp4"},
    {"quant_method": "nope"}, {"quant_method": 3}, {}, "x", [1], 7, {"load_in_4bit": True}, {"quant_method": "torchao"},
    {"quant_method": "compressed-tensors"}, {"quant_method": "hqq"}, {"quant_method": "quanto"}, {"bits": None},
)  # fmt: skip
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
          "head_dim", "max_position_embeddings")  # fmt: skip
_OBJECTS = ("config.json", "generation_config.json", "tokenizer_config.json")
_NO_OBJECT = (
    b"",
    b"[]",
    b"null",
    b"NaN",
    b'"x"',
    b"3",
    b'{"a": 1',
    b"\xff\xfe",
    b'{"a": 1, "a": 2}',
    b"[" * 100_000,
    b"\0" * 50,
)


def draw(random: Random) -> Fault:
    """Return one fault."""
    makers = (
        _config,
        _config,
        _size,
        _whole_file,
        _kind,
        _quantization,
        _tokenizer,
        _special,
        _weights,
        _weights,
        _index,
        _dtype,
        _changed,
    )
    return random.choice(makers)(random)


def edit(path: Path, change: Callable[[Any], None]) -> None:
    """Change a JSON file in place."""
    value = json.loads(path.read_text("utf-8"))
    change(value)
    path.write_text(json.dumps(value), "utf-8")


def _set(file: str, key: str, value: object) -> Fault:
    return f"{file}: {key}={value!r:.60}", lambda folder: edit(folder / file, lambda tree: tree.update({key: value}))


def _config(random: Random) -> Fault:
    keys = (
        "architectures", "attention_bias", "auto_map", "bos_token_id", "eos_token_id", "pad_token_id", "hidden_act",
        "initializer_range", "mlp_bias", "model_type", "rms_norm_eps", "rope_parameters", "rope_scaling", "tie_word_embeddings",
        "use_cache", "return_dict", "output_hidden_states", "output_attentions", "layer_types", "text_config", "id2label",
        "transformers_version", "attn_implementation", "_attn_implementation", "is_encoder_decoder", "unknown",
        "attention_dropout", "max_position_embeddings", "problem_type", "torchscript",
        "chunk_size_feed_forward", "pretraining_tp", "num_labels",
    )  # fmt: skip
    key = random.choice(keys)
    if key == "model_type":
        return _set(
            "config.json",
            key,
            random.choice(("x", "", None, 3, ["llama"], "t5", "clip", "gpt2", "bert", "Llama")),
        )
    if key == "auto_map":
        return _set(
            "config.json", key, random.choice(({"AutoModelForCausalLM": "x.Y"}, {"AutoConfig": "a/b--c.D"}, 3, []))
        )
    if key == "rope_scaling":
        value: Any = {"rope_type": random.choice(("nope", None, 3)), "factor": 2.0}
        return _set(
            "config.json",
            key,
            random.choice((value, "x", 7, {"rope_type": "linear", "factor": random.choice(_NEVER_A_NUMBER)})),
        )
    if key == "rope_parameters":
        value = {
            "rope_type": "default",
            "rope_theta": random.choice([item for item in _NEVER_A_NUMBER if item is not None]),
        }
        return _set(
            "config.json",
            key,
            random.choice((value, {"rope_type": "nope", "rope_theta": 1e4}, "x", 3, {"rope_type": "yarn"})),
        )
    values = _NEVER_A_NUMBER if key in _VALID_IN_OTHER_MODELS else VALUES
    return _set("config.json", key, random.choice([item for item in values if _is_json(item)]))


def _is_json(value: object) -> bool:
    try:
        json.dumps(value).encode()
    except (ValueError, UnicodeEncodeError):
        return False
    return True


def _size(random: Random) -> Fault:
    key = random.choice(_SIZES)
    values: tuple[object, ...] = (*_NEVER_A_NUMBER, True)
    if key != "max_position_embeddings":
        values += (1, 3, 7, 33, 10**6, 10**12, 2**63, 2**70)
    return _set("config.json", key, random.choice(values))


def _dtype(random: Random) -> Fault:
    wrong = ("nope", 3, ["float32"], {"": "x"}, "int8", "bool", "torch.nope", "nn", "Tensor", -1, "", "float33", 1e9)
    return _set("config.json", random.choice(("dtype", "torch_dtype")), random.choice(wrong))


def _whole_file(random: Random) -> Fault:
    name, data = random.choice((*_OBJECTS, "tokenizer.json", WEIGHTS)), random.choice(_NO_OBJECT)
    return f"{name} holds {data[:20]!r}", lambda folder: _put(folder / name, data)


def _put(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _kind(random: Random) -> Fault:
    name = random.choice(
        (*_OBJECTS, "tokenizer.json", WEIGHTS, "chat_template.jinja", "special_tokens_map.json", "added_tokens.json")
    )
    kind = random.choice(("pipe", "folder", "device", "nowhere", "circle", "link to a pipe", "kernel", "endless"))

    def put(folder: Path) -> None:
        path = folder / name
        path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "link to a pipe":
            os.mkfifo(folder / "pipe")
            path.symlink_to("pipe")
        else:
            targets = {"device": "/dev/zero", "nowhere": "gone", "circle": name, "kernel": "/proc/self/status"}
            path.symlink_to(targets.get(kind, "/dev/urandom"))

    return f"{name} is a {kind}", put


def _quantization(random: Random) -> Fault:
    return _set("config.json", "quantization_config", random.choice(_QUANTIZATIONS))


def _tokenizer(random: Random) -> Fault:
    beyond = random.choice((320, 321, 5000, 2**31 - 1))

    def added(tree: Any) -> None:
        token = {"id": beyond, "content": "<new>", "special": random.random() < 0.5, "normalized": False, "lstrip": False,
                 "rstrip": False, "single_word": False}  # fmt: skip
        tree["added_tokens"].append(token)

    faults: tuple[tuple[str, Callable[[Any], Any]], ...] = (
        (f"vocab id {beyond}", lambda tree: tree["model"]["vocab"].update({"Arden": beyond})),
        (f"added id {beyond}", added),
        ("type nope", lambda tree: tree["model"].update(type="nope")),
        ("type Unigram", lambda tree: tree["model"].update(type="Unigram")),
        ("no model", lambda tree: tree.pop("model")),
        ("vocab a list", lambda tree: tree["model"].update(vocab=[1, 2])),
        ("merges of nothing", lambda tree: tree["model"].update(merges=[["§", "§"]])),
        ("pre_tokenizer nope", lambda tree: tree.update(pre_tokenizer={"type": "nope"})),
        (
            "post_processor of no token",
            lambda tree: tree.update(post_processor={"type": "BertProcessing", "sep": ["x", -1]}),
        ),
        ("negative id", lambda tree: tree["model"]["vocab"].update({"Arden": -1})),
    )
    fault, change = random.choice(faults)
    return f"tokenizer.json: {fault}", lambda folder: edit(folder / "tokenizer.json", change)


def _special(random: Random) -> Fault:
    if random.random() < 0.4:
        source = random.choice(
            ("{% for x in", "{{ x", "{% nope %}", "{% endfor %}", "{{ messages | nope }}", "{% if %}")
        )
        if random.random() < 0.5:
            return f"chat_template.jinja: {source}", lambda folder: _put(
                folder / "chat_template.jinja", source.encode()
            )
        return _set("tokenizer_config.json", "chat_template", source)
    key = random.choice(
        ("chat_template", "tokenizer_class", "added_tokens_decoder", "extra_special_tokens", "model_max_length")
    )
    wrong = (3, [1], {"a": 1}, "nope", -1, 1.5, {"a": {"b": 2}}, [[]], True)
    return _set("tokenizer_config.json", key, random.choice(wrong))


def _weights(random: Random) -> Fault:
    fault = random.choice(
        ("cut", "bytes", "header", "offsets", "dtype", "missing", "extra", "shape", "gone", "renamed", "beside")
    )

    def put(folder: Path) -> None:
        path = folder / WEIGHTS
        data = path.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + size])
        names = sorted(name for name in header if name != "__metadata__")
        name = random.choice(names)
        if fault == "cut":
            return _put(path, data[: random.randrange(len(data) - 1)])
        if fault == "bytes":  # of the header: other bytes of a weight are another weight
            return _put(path, damaged_bytes(data[: 8 + size], [data[:500]], random) + data[8 + size :])
        if fault == "header":
            return _put(
                path, struct.pack("<Q", random.choice((2**63, 2**64 - 1, 0, 1, len(data), size - 1, 10**8))) + data[8:]
            )
        if fault == "gone":
            return path.unlink()
        if fault == "beside":
            return path.rename(folder / random.choice(("weights.safetensors", "model.bin", "pytorch_model.bin")))
        if fault == "offsets":
            start, end = header[name]["data_offsets"]
            header[name]["data_offsets"] = random.choice(
                ([start, end + 8], [start + 4, end + 4], [end, start], [0, end - start], [-1, end])
            )
        elif fault == "dtype":
            header[name]["dtype"] = random.choice(("I32", "U32", "I64", "F16", "BOOL", "X", "F64", "F8_E4M3"))
        elif fault == "missing":
            return _save(path, {key: value for key, value in _load(path).items() if key != name})
        elif fault == "extra":
            return _save(
                path,
                {**_load(path), f"model.layers.{random.choice((0, 1, 2))}.self_attn.new.weight": _load(path)[name]},
            )
        elif fault == "shape":
            tensors = _load(path)
            tensors[name] = random.choice(
                (tensors[name][:1], tensors[name].flatten()[:0], tensors[name][None].contiguous())
            )
            return _save(path, tensors)
        else:
            return _save(path, {key + "x" if key == name else key: value for key, value in _load(path).items()})
        text = json.dumps(header).encode()
        return _put(path, struct.pack("<Q", len(text)) + text + data[8 + size :])

    return f"{WEIGHTS}: {fault}", put


def _changed(random: Random) -> Fault:
    name, bit = random.choice((*_OBJECTS, "tokenizer.json", WEIGHTS)), random.randrange(8)

    def put(folder: Path) -> None:
        from kinject.disk import write_sha256sums

        write_sha256sums(folder)
        data = bytearray((folder / name).read_bytes())
        data[random.randrange(len(data))] ^= 1 << bit
        _put(folder / name, bytes(data))

    return f"{name}: one bit is another than in SHA256SUMS", put


def _load(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(path)


def _save(path: Path, tensors: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def _index(random: Random) -> Fault:
    fault = random.choice(
        ("gone", "out", "absolute", "list", "empty", "numbers", "lacks", "no map", "pipe", "good", "twice")
    )

    def put(folder: Path) -> None:
        tensors = _load(folder / WEIGHTS)
        (folder / WEIGHTS).rename(folder.parent / "outside.safetensors")
        names = sorted(tensors)
        shards = {"a.safetensors": names[:7], "b.safetensors": names[7 if fault != "twice" else 6 :]}
        for file, shard_names in shards.items():
            _save(folder / file, {name: tensors[name] for name in shard_names})
        owner: dict[str, Any] = {name: file for file, shard_names in shards.items() for name in shard_names}
        if fault in ("gone", "out", "absolute", "numbers"):
            bad = {"gone": "c.safetensors", "out": "../outside.safetensors", "numbers": 3}
            owner[names[0]] = bad.get(fault, str(folder.parent / "outside.safetensors"))
        elif fault == "lacks":
            owner["model.layers.9.x.weight"] = "a.safetensors"
        elif fault == "pipe":
            (folder / "a.safetensors").unlink()
            os.mkfifo(folder / "a.safetensors")
        index: Any = {"metadata": {}, "weight_map": owner}
        index = {"list": [], "empty": {"weight_map": {}}, "no map": {"metadata": {}}}.get(fault, index)
        (folder / INDEX).write_text(json.dumps(index))

    return f"{INDEX}: {fault}", put
