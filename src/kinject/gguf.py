"""Models in GGUF, llama.cpp's file format: written from a folder, and dequantised once into one for
transformers.

That folder lies in the user's cache under the hash of the file, so the same file is converted once
on a machine. Weights are stored in float32, which loses nothing; the dtype of a run is chosen when
the folder is loaded.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinject.disk import (
    cached_folder,
    file_hash,
    file_name,
    file_stamp,
    part_path,
    read_json,
    system_failure,
    unwritable,
    write_json,
)
from kinject.errors import InputError, KinjectError, one_line
from kinject.gguf_files import check_header

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from gguf import GGUFWriter
    from transformers import (
        PretrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        PreTrainedTokenizerFast,
    )

KINDS = {"f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
"""Kind of a file that is written -> gguf's name of its weights."""
_ENDS = ("eot", "eom")
"""llama.cpp's names of tokens beside EOS at which a text ends: of a turn, of a message."""
_LEFT_OUT = ("quantization_config", "_name_or_path", "transformers_version")
"""Of the config that transformers makes: with the first, a model refuses to be saved."""


def converted_folder(file: Path) -> Path:
    """Return the folder with the dequantised model and tokenizer of a GGUF file; convert it if it
    is not in the cache.

    Raises `InputError` if the package gguf is missing or transformers cannot convert the file,
    `DiskError` if the folder cannot be written.
    """
    stamp, digest = file_stamp(file), file_hash(file)[:16]

    def write(folder: Path) -> None:
        _convert(file, folder)
        # The name of the entry is the hash of the bytes that were there before.
        if file_stamp(file) != stamp:
            raise InputError(f"{file}: changed while it was read. Run the same command again.")

    return cached_folder(_cache(), f"{file_name(file.stem)}-{digest}", write)


def _cache() -> Path:
    """Return the folder of what was converted: in the user's cache, or that of the system's
    temporary files for a user without a home, as in many containers."""
    cache = os.environ.get("XDG_CACHE_HOME")
    if not cache:
        try:
            cache = str(Path.home() / ".cache")
        except RuntimeError:
            cache = tempfile.gettempdir()
    return Path(cache) / "kinject" / "gguf"


def _convert(file: Path, folder: Path) -> None:
    """Write the model, tokenizer and generation settings of a GGUF file to `folder`.

    Raises `InputError` for whatever is wrong with the file, and `OSError` if the disk refuses the
    folder.
    """
    try:
        check_header(file)
        _convert_checked(file, folder)
    except (KinjectError, MemoryError):
        raise
    except ImportError as error:
        raise InputError(
            f"{file}: needs the package gguf. Install it: pip install 'kinject[gguf]'."
        ) from error
    except (
        Exception
    ) as error:  # a damaged file, or an architecture that it cannot convert, raises any exception
        failure = system_failure(error)
        if failure is not None:
            raise failure from error
        raise InputError(
            f"{file}: transformers cannot convert this GGUF file ({one_line(error)}). "
            "Take the model's safetensors instead."
        ) from error


def _convert_checked(file: Path, folder: Path) -> None:
    """Convert a file whose header is sound. A value of another shape raises any exception."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    # Alone: transformers would read other files that lie beside it.
    with tempfile.TemporaryDirectory() as alone:
        (Path(alone) / file.name).symlink_to(file.resolve())
        name = file.name
        config = AutoConfig.from_pretrained(alone, gguf_file=name, trust_remote_code=False)
        _check_size(file, config)
        tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file=name, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            alone, gguf_file=name, trust_remote_code=False, dtype=torch.float32
        )
    config = type(model.config).from_dict(
        {k: v for k, v in model.config.to_dict().items() if k not in _LEFT_OUT}
    )
    _read_positions(file, config)
    # A model of the cleaned config takes the weights over as they are, without a copy.
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    _check_read(file, plain)
    _restore_added_tokens(file, tokenizer)
    plain.generation_config = model.generation_config
    _complete_special_tokens(file, tokenizer, plain.generation_config)
    plain.save_pretrained(folder)
    _save_tokenizer(file, tokenizer, folder)


def _check_size(file: Path, config: PretrainedConfig) -> None:
    """Raise `InputError` if the model that a file describes has more weights than the file holds:
    transformers would draw them at random, and a model of any size fits into a header."""
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM

    tensors = GGUFReader(file).tensors
    n_layers, n_stored = config.num_hidden_layers, sum(int(item.n_elements) for item in tensors)
    fault = f"{n_layers:,} layers, which {len(tensors):,} tensors cannot be"
    # First: layers without weights take their time, too.
    if n_layers <= len(tensors):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()
        n_weights = sum(parameter.numel() for parameter in model.parameters())
        if n_weights <= n_stored:
            return
        fault = f"{n_weights:,} weights, and it holds {n_stored:,}"
    raise InputError(
        f"{file}: its header describes a model of {fault}. Take the model's safetensors instead."
    )


_DIVISORS = "rope_freqs.weight"
_LLAMA_3_1 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What Llama 3.1, 3.2 and 3.3 have in common; a file has divisors of the frequencies instead."""


def _read_positions(file: Path, config: PretrainedConfig) -> None:
    """Take over the scaled positions of Llama 3.1, which transformers leaves in the file.

    Raises `InputError` for positions that are scaled otherwise.
    """
    from gguf import GGUFReader

    reader = GGUFReader(file)
    fault = ""
    for name, field in reader.fields.items():
        # Of gpt_oss alone transformers (5.23) reads the scaling.
        if name.endswith("rope.scaling.type") and config.model_type != "gpt_oss":
            fault = str(field.contents()).replace("none", "")
    for tensor in reader.tensors:
        if tensor.name == _DIVISORS and not _take_divisors(tensor.data, config):
            fault = _DIVISORS
        if tensor.name.startswith("rope_factors_"):
            fault = tensor.name
    if fault:
        raise InputError(
            f"{file}: its positions are scaled ({fault}), which transformers does not read. "
            "Take the model's safetensors instead."
        )


def _take_divisors(divisors: npt.NDArray[np.float32], config: PretrainedConfig) -> bool:
    """Set the scaling that divides the frequencies so; return whether it is Llama 3.1's."""
    import numpy as np
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    plain, width = config.rope_parameters, 2 * len(divisors)
    config.rope_parameters = {**plain, **_LLAMA_3_1, "factor": float(divisors.max())}
    frequencies = plain["rope_theta"] ** (-np.arange(0, width, 2) / width) / divisors
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    return bool(np.allclose(scaled.numpy(), frequencies, rtol=1e-4))


def _check_read(file: Path, model: PreTrainedModel) -> None:
    """Raise `InputError` if the file holds more weights than the model that was made of it."""
    from gguf import GGUFReader

    n_read = sum(parameter.numel() for parameter in model.parameters())
    stored = {tensor.name: int(tensor.n_elements) for tensor in GGUFReader(file).tensors}
    # _read_positions has taken them over; they are no weights of the model.
    stored.pop(_DIVISORS, None)
    n_left = sum(stored.values()) - n_read
    if n_left > 0:
        biases = [name for name in stored if name.endswith(".bias")]
        names = ", ".join(biases[:1]) or "unknown ones"
        raise InputError(
            f"{file}: {n_left:,} of its weights ({names}?) have no place in transformers' "
            f"{model.config.model_type}. Take the model's safetensors instead."
        )


def _restore_added_tokens(file: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Give added tokens beyond the byte alphabet (<｜User｜>, or one with a space) their number.

    transformers 5.23 spells them as text is spelled, and then adds BOS and EOS among them anew.
    """
    from gguf import GGUFReader, TokenType
    from tokenizers import Tokenizer

    fields = GGUFReader(file).fields
    if "tokenizer.ggml.token_type" not in fields or not tokenizer.is_fast:
        return
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    wanted = {
        number: token
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
        and tokenizer.convert_ids_to_tokens(number) != token
    }
    if not wanted:
        return
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = rules["model"]["vocab"]
    spelled = {number: text for text, number in vocabulary.items()}
    for number, token in wanted.items():
        vocabulary.pop(spelled[number], None)
        vocabulary[token] = number
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [row for row in rules["added_tokens"] if row["content"] not in wanted.values()]
    for number, token in wanted.items():
        is_special = types[number] == TokenType.CONTROL
        added.append({"id": number, "content": token, **flags, "special": is_special})
    rules["added_tokens"] = sorted(added, key=itemgetter("id"))
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(rules))


def _complete_special_tokens(file: Path, tokenizer: Any, generation_config: Any) -> None:
    """Take over what transformers leaves in the file: whether a text begins with BOS and ends with
    EOS, and the end of a chat turn."""
    from gguf import GGUFReader

    fields = GGUFReader(file).fields
    for name, there in zip(("bos", "eos"), _added_around(tokenizer), strict=True):
        wanted = fields.get(f"tokenizer.ggml.add_{name}_token")
        if wanted is not None and wanted.contents() and not there:
            setattr(tokenizer, f"add_{name}_token", True)
    names = [f"tokenizer.ggml.{name}_token_id" for name in _ENDS]
    others = [int(fields[name].contents()) for name in names if name in fields]
    if others:
        ends = [tokenizer.eos_token_id, *others]
        generation_config.eos_token_id = list(dict.fromkeys(ends))


def _save_tokenizer(file: Path, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save a tokenizer that splits texts by the rule that the file names, if it is known here.

    transformers 5.23 goes by the architecture: by it any tokenizer of a Qwen3 is Qwen's.
    """
    from gguf import GGUFReader

    named = GGUFReader(file).fields.get("tokenizer.ggml.pre")
    rule = None if named is None else _splits().get(named.contents())
    # Qwen's own class has Qwen's rule and normalizer.
    if named is None or rule is None or named.contents() == "qwen2":
        tokenizer.save_pretrained(folder)
        return
    tokenizer.backend_tokenizer.pre_tokenizer = rule
    tokenizer.backend_tokenizer.normalizer = None
    tokenizer.backend_tokenizer.model.ignore_merges = named.contents() == _OF_WHOLE_WORDS
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    # A class with a rule of its own would take no other when it is loaded.
    write_json(path, {**read_json(path, ""), "tokenizer_class": "PreTrainedTokenizerFast"})


def write_gguf(folder: Path, file: Path, kind: str) -> None:
    """Write the model in `folder` to `file`, its matrices in one of `KINDS`, whole or not at all.

    llama.cpp's converter does it where convert_hf_to_gguf.py is on the PATH; else models of
    `_ARCHITECTURES` with byte-level BPE are written here. Raises `InputError` for another model and
    without the package gguf.
    """
    # A name of its own: two processes may write one file, and each deletes its part.
    part = part_path(file)
    converter = shutil.which("convert_hf_to_gguf.py")
    try:
        if converter:
            command = [
                sys.executable,
                converter,
                str(folder),
                "--outfile",
                str(part),
                "--outtype",
                kind,
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise InputError(f"{converter}: {' '.join(done.stderr.split())[-300:] or 'failed'}")
        else:
            _write(folder, part, kind)
        os.replace(part, file)
    except ImportError as error:
        raise InputError(
            "--gguf: needs the package gguf. Install it: pip install 'kinject[gguf]'."
        ) from error
    except OSError as error:
        raise unwritable(file, error) from error
    finally:
        part.unlink(missing_ok=True)


_ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}
"""model_type, which is llama.cpp's name too -> whether its files have the rows of q and k permuted.
"""
# Patterns cannot be compared, but how they split this text: each rule does it differently.
_HARD_TEXT = "It's 12,345.67 or  x1; don't\n\n  WE'LL Ünï 你好 9999 \t(a_b)"


_OF_WHOLE_WORDS = "llama-bpe"
"""The rule with which llama.cpp takes a word of the vocabulary whole, whether or not merges lead to
it (ignore_merges of tokenizers): a file has no key for that."""


def _splits() -> dict[str, Any]:
    """Return llama.cpp's name of a rule that splits texts before BPE -> the same rule of
    tokenizers."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    by_words = {"llama-bpe": words, "qwen2": words.replace("{1,3}", "")}
    whole = ByteLevel(add_prefix_space=False)
    return {"smollm": Sequence([Digits(individual_digits=True), whole]), "gpt-2": whole} | {
        name: Sequence(
            [Split(Regex(text), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        for name, text in by_words.items()
    }


def _write(folder: Path, file: Path, kind: str) -> None:
    import gguf
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    architecture = config.model_type
    rope = config.rope_parameters if architecture in _ARCHITECTURES else {}
    if rope.get("rope_type", "other") != "default":
        raise InputError(
            f"{folder}: a GGUF file of this model ({architecture}) needs llama.cpp's converter: "
            "put convert_hf_to_gguf.py on the PATH."
        )
    _check_calculation(folder, config)
    # Beyond 256 MiB tensors wait in a temporary file, not in memory.
    writer = gguf.GGUFWriter(file, architecture, use_temp_file=True)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{KINDS[kind]}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    n_heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // n_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(n_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    _add_tokenizer(writer, tokenizer, config.vocab_size, folder)
    try:
        _add_tensors(writer, folder, config, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    finally:
        if writer.temp_file is not None:  # gguf leaves it open behind an error
            writer.temp_file.close()


def _add_tensors(writer: GGUFWriter, folder: Path, config: PretrainedConfig, kind: str) -> None:
    """Add the weights in `folder`. Raises `InputError` for those that a file cannot hold."""
    import gguf
    from gguf.quants import quantize
    from safetensors import safe_open

    architecture = config.model_type
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers
    )
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - a safetensors file is no mapping
                weight = tensors.get_tensor(name).float().numpy()
                n_heads = heads.get(name.split(".")[-2]) if _ARCHITECTURES[architecture] else None
                if n_heads:
                    weight = (
                        # llama.cpp rotates pairs of neighbours, transformers halves of a head.
                        weight.reshape(n_heads, 2, -1, *weight.shape[1:])
                        .swapaxes(1, 2)
                        .reshape(weight.shape)
                    )
                # Q8_0 has blocks of 32 weights; llama.cpp's converter keeps vectors in float32.
                fits = weight.ndim > 1 and (kind != "q8_0" or weight.shape[-1] % 32 == 0)
                stored = gguf.GGMLQuantizationType[
                    KINDS[kind] if fits else "F16" if weight.ndim > 1 else "F32"
                ]
                stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
                if stored_name is None:
                    raise InputError(f"{path}: llama.cpp has no name for {name}.")
                if stored == gguf.GGMLQuantizationType.F16:
                    _check_range(path, name, weight)
                writer.add_tensor(stored_name, quantize(weight, stored), raw_dtype=stored)


def _check_range(path: Path, name: str, weight: npt.NDArray[np.float32]) -> None:
    """Raise `InputError` if a weight would be infinite in float16."""
    import numpy as np

    if max(weight.max(), -weight.min()) > np.finfo(np.float16).max:
        raise InputError(
            f"{path}: {name} has weights beyond float16's largest, 65,504, so in a GGUF file they "
            "would be infinite. Write --gguf bf16."
        )


def _check_calculation(folder: Path, config: PretrainedConfig) -> None:
    """Raise `InputError` if llama.cpp, which reads none of these settings, would differ."""
    faults = {
        f"hidden_act: {config.hidden_act}": config.hidden_act != "silu",
        "sliding_window": bool(
            set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
        ),
        "attention_bias": config.model_type == "qwen3" and config.attention_bias,
    }
    for setting, is_other in faults.items():
        if is_other:
            raise InputError(
                f"{folder}: {setting}: llama.cpp calculates {config.model_type} without it, so a "
                "GGUF file would be another model. Serve the folder."
            )


def _check_tokens(folder: Path, rules: Mapping[str, Any], split: str) -> None:
    """Raise `InputError` if llama.cpp would make other tokens than a tokenizer of these rules, of
    which `split` is the one by which it splits texts."""
    normalizer = (rules["normalizer"] or {}).get("type", "NFC")  # llama.cpp leaves NFC out, too
    faults = [f"its normalizer {normalizer}"] if normalizer != "NFC" else []
    faults += [
        f"that {row['content']!r} takes or needs the white space beside it"
        for row in rules["added_tokens"]
        if row["single_word"] or row["lstrip"] or row["rstrip"]
    ]
    takes_whole = rules["model"].get("ignore_merges", False)
    if takes_whole != (split == _OF_WHOLE_WORDS) and _has_unmerged(rules):
        faults.append(f"its ignore_merges: {str(takes_whole).lower()} with the rule {split}")
    if faults:
        raise InputError(
            f"{folder}: tokenizer.json: llama.cpp does not know {faults[0]}, so a GGUF file would "
            "have other tokens. Serve the folder."
        )


def _has_unmerged(rules: Mapping[str, Any]) -> bool:
    """Return whether merges do not lead to some token of the vocabulary."""
    from tokenizers.models import BPE

    pairs = [(first, second) for first, second in map(str.split, _merges(rules))]
    plain = BPE(rules["model"]["vocab"], pairs)
    added = {row["content"] for row in rules["added_tokens"]}
    words = rules["model"]["vocab"].keys() - added
    return any(len(plain.tokenize(word)) != 1 for word in words)


def _merges(rules: Mapping[str, Any]) -> list[str]:
    """Return the merges; tokenizers writes them as pairs since 0.20, and as texts before."""
    merges = rules["model"]["merges"]
    return [" ".join(pair) if isinstance(pair, list) else pair for pair in merges]


def _add_ends(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write whether a text gets BOS and EOS. Raises `InputError` for a tokenizer that adds other
    tokens."""
    for name, added in zip(("bos", "eos"), _added_around(tokenizer), strict=True):
        if added not in ([], [getattr(tokenizer, f"{name}_token_id")]):
            raise InputError(
                f"{folder}: tokenizer.json: it adds {tokenizer.convert_ids_to_tokens(added)} to a "
                f"text, and llama.cpp adds no more than {name.upper()} there, so a GGUF file would "
                "have other tokens. Serve the folder."
            )
        getattr(writer, f"add_add_{name}_token")(bool(added))


def _added_around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the tokens that a tokenizer adds before a text, and those that it adds behind it."""
    ids = list(tokenizer("a").input_ids)
    plain = list(tokenizer("a", add_special_tokens=False).input_ids)
    start = next(n for n in range(len(ids)) if ids[n : n + len(plain)] == plain)
    return ids[:start], ids[start + len(plain) :]


def _other_ends(folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens beside EOS at which the model in `folder` ends a text.

    Raises `InputError` for more than a GGUF file has keys for.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return []
    ends = read_json(path, "").get("eos_token_id") or []
    if isinstance(ends, int):
        ends = [ends]
    others = [number for number in ends if number != tokenizer.eos_token_id]
    if len(others) > len(_ENDS):
        raise InputError(
            f"{path}: eos_token_id: {len(others)} tokens beside EOS end a text, and a GGUF file "
            f"has keys for {len(_ENDS)}, so its model would write on at the others. Serve the "
            "folder, or remove tokens that the model does not write."
        )
    return others


def _add_tokenizer(writer: Any, tokenizer: Any, n_rows: int, folder: Path) -> None:
    """Write a byte-level BPE tokenizer and its chat template. Raises `InputError` for one that
    llama.cpp splits otherwise."""
    import gguf

    data = json.loads(tokenizer.backend_tokenizer.to_str())
    own = tokenizer.backend_tokenizer.pre_tokenizer
    expected = own.pre_tokenize_str(_HARD_TEXT) if own else None
    rule = next(
        (name for name, rule in _splits().items() if rule.pre_tokenize_str(_HARD_TEXT) == expected),
        None,
    )
    if data["model"]["type"] != "BPE" or rule is None:
        raise InputError(
            f"{folder}: its tokenizer needs llama.cpp's converter: put convert_hf_to_gguf.py on "
            "the PATH."
        )
    _check_tokens(folder, data, rule)
    tokens = {number: token for token, number in tokenizer.get_vocab().items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    # Rows without a token are named as llama.cpp's converter names them.
    writer.add_token_list([tokens.get(number, f"[PAD{number}]") for number in range(n_rows)])
    types = dict.fromkeys(tokens, gguf.TokenType.NORMAL)
    for number, token in tokenizer.added_tokens_decoder.items():
        types[number] = gguf.TokenType.USER_DEFINED
        if token.special:
            types[number] = gguf.TokenType.CONTROL
    unused = gguf.TokenType.UNUSED
    writer.add_token_types([types.get(number, unused) for number in range(n_rows)])
    writer.add_token_merges(_merges(data))
    special = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "pad": tokenizer.pad_token_id,
        **dict(zip(_ENDS, _other_ends(folder, tokenizer), strict=False)),
    }
    for name, number in special.items():
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    _add_ends(writer, tokenizer, folder)
    _add_chat_templates(writer, tokenizer)


def _add_chat_templates(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase) -> None:
    template = tokenizer.chat_template
    if isinstance(template, dict):  # of several gguf wants a list
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template is not None:
        writer.add_chat_template(template)
