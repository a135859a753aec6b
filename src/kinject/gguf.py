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
from pathlib import Path
from typing import TYPE_CHECKING

from kinject.disk import file_hash, unwritable
from kinject.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFWriter
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import (
        GenerationConfig,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )

KINDS = {"f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
"""Kind of a file that is written -> gguf's name of its weights."""
_SUFFIX = ".gguf"
_LEFT_OUT = ("quantization_config", "_name_or_path", "transformers_version")
"""Of the config that transformers makes: with the first, a model refuses to be saved."""


def gguf_file(path: str | Path) -> Path | None:
    """Return the GGUF file that `path` is, or the one in a folder without a config.json; None for
    any other path.

    Raises `InputError` if the folder holds several.
    """
    place = Path(path)
    if place.suffix == _SUFFIX and place.is_file():
        return place
    if not place.is_dir() or (place / "config.json").exists():
        return None
    files = sorted(place.glob(f"*{_SUFFIX}"))
    if len(files) > 1:
        raise InputError(
            f"{place}: holds {len(files)} GGUF files. Give the path of one, such as {files[0]}."
        )
    return files[0] if files else None


def converted_folder(file: Path) -> Path:
    """Return the folder with the dequantised model and tokenizer of a GGUF file; convert it if it
    is not in the cache.

    Raises `InputError` if the package gguf is missing or transformers cannot convert the file,
    `DiskError` if the folder cannot be written.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kinject" / "gguf"
    folder = root / f"{file.stem}-{file_hash(file)[:16]}"
    if folder.is_dir():
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=root))
        try:
            _convert(file, part)
            part.chmod(0o755)
            if not folder.is_dir():  # another process may have been faster
                part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise unwritable(root, error) from error
    return folder


def _convert(file: Path, folder: Path) -> None:
    """Write the model, tokenizer and generation settings of a GGUF file to `folder`."""
    import torch

    model, tokenizer = _load(file)
    values = {k: v for k, v in model.config.to_dict().items() if k not in _LEFT_OUT}
    config = type(model.config).from_dict(values)
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    _complete_special_tokens(file, tokenizer, plain.generation_config)
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _load(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model and the tokenizer of a GGUF file, as transformers converts them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        # transformers would read other files that lie beside it.
        with tempfile.TemporaryDirectory() as alone:
            (Path(alone) / file.name).symlink_to(file.resolve())
            tokenizer = AutoTokenizer.from_pretrained(
                alone, gguf_file=file.name, trust_remote_code=False
            )
            model = AutoModelForCausalLM.from_pretrained(
                alone, gguf_file=file.name, trust_remote_code=False, dtype=torch.float32
            )
    except ImportError as error:
        raise InputError(
            f"{file}: needs the package gguf. Install it: pip install 'kinject[gguf]'."
        ) from error
    # A damaged file, or an architecture that it cannot convert, raises any exception.
    except Exception as error:
        reason = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
        raise InputError(
            f"{file}: transformers cannot convert this GGUF file ({reason}). Take the model's "
            "safetensors instead."
        ) from error
    return model, tokenizer


def _complete_special_tokens(
    file: Path, tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig
) -> None:
    """Take over what transformers leaves in the file: whether a text begins with BOS, and the end
    of a chat turn."""
    from gguf import GGUFReader

    fields = GGUFReader(file).fields
    adds_bos = fields.get("tokenizer.ggml.add_bos_token")
    begins_with_bos = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    if adds_bos is not None and adds_bos.contents() and not begins_with_bos:
        tokenizer.add_bos_token = True
    turn_end = fields.get("tokenizer.ggml.eot_token_id")
    if turn_end is not None:
        ends = [tokenizer.eos_token_id, int(turn_end.contents())]
        generation_config.eos_token_id = list(dict.fromkeys(ends))
    splits = fields.get("tokenizer.ggml.pre")
    if splits is not None and splits.contents() == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = _splits()["smollm"]


def write_gguf(folder: Path, file: Path, kind: str) -> None:
    """Write the model in `folder` to `file`, its matrices in one of `KINDS`, whole or not at all.

    llama.cpp's converter does it where convert_hf_to_gguf.py is on the PATH; else models of
    `_ARCHITECTURES` with byte-level BPE are written here. Raises `InputError` for another model and
    without the package gguf.
    """
    part = file.with_name(f".{file.name}.part")
    converter = shutil.which("convert_hf_to_gguf.py")
    try:
        if converter:
            _run_converter(converter, folder, part, kind)
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


def _run_converter(converter: str, folder: Path, file: Path, kind: str) -> None:
    command = [sys.executable, converter, str(folder), "--outfile", str(file), "--outtype", kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"{converter}: {' '.join(done.stderr.split())[-300:] or 'failed'}")


_ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}
"""model_type, which is llama.cpp's name too -> whether its files have the rows of q and k permuted.
"""
_HARD_TEXT = "It's 12,345.67 or  x1; don't\n\n  WE'LL Ünï 你好 9999 \t(a_b)"


_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Llama 3's rule: contractions, words, numbers of up to three digits, punctuation, white space."""


def _splits() -> dict[str, PreTokenizer]:
    """Return llama.cpp's name of a rule that splits texts before BPE -> the same rule of
    tokenizers."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    whole = ByteLevel(add_prefix_space=False)
    return {
        "smollm": Sequence([Digits(individual_digits=True), whole]),
        "gpt-2": whole,
        "llama-bpe": _split_by(_WORDS),
        "qwen2": _split_by(_WORDS.replace("{1,3}", "")),
    }


def _split_by(words: str) -> PreTokenizer:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    to_bytes = ByteLevel(add_prefix_space=False, use_regex=False)
    return Sequence([Split(Regex(words), "isolated"), to_bytes])


def _write(folder: Path, file: Path, kind: str) -> None:
    import gguf
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    _check_architecture(folder, config)
    writer = gguf.GGUFWriter(file, config.model_type, use_temp_file=True)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{KINDS[kind]}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_config(writer, config)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    _add_tokenizer(writer, tokenizer, config.vocab_size, folder)
    for path in sorted(folder.glob("*.safetensors")):
        _add_tensors(writer, path, config, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _check_architecture(folder: Path, config: PreTrainedConfig) -> None:
    """Raise `InputError` for an architecture or a scaling of positions that is not written here."""
    rope = config.rope_parameters if config.model_type in _ARCHITECTURES else {}
    if rope.get("rope_type", "other") != "default":
        raise InputError(
            f"{folder}: a GGUF file of this model ({config.model_type}) needs llama.cpp's "
            "converter: put convert_hf_to_gguf.py on the PATH."
        )


def _add_config(writer: GGUFWriter, config: PreTrainedConfig) -> None:
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
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _add_tensors(writer: GGUFWriter, path: Path, config: PreTrainedConfig, kind: str) -> None:
    """Write the weights of one safetensors file."""
    import gguf
    from gguf.quants import quantize
    from safetensors import safe_open

    architecture = gguf.MODEL_ARCH[config.model_type.upper()]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    with safe_open(str(path), framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - a safetensors file is no mapping
            weight = _permuted(tensors.get_tensor(name).float().numpy(), name, config)
            stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if stored_name is None:
                raise InputError(f"{path}: llama.cpp has no name for {name}.")
            stored = gguf.GGMLQuantizationType[_stored_type(weight, kind)]
            writer.add_tensor(stored_name, quantize(weight, stored), raw_dtype=stored)


def _permuted(weight: np.ndarray, name: str, config: PreTrainedConfig) -> np.ndarray:
    """Return a weight with the rows of q and k in llama.cpp's order for Llama.

    The two halves of a head, which transformers rotates against each other, become neighbours.
    """
    if not _ARCHITECTURES[config.model_type]:
        return weight
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    n_heads = heads.get(name.split(".")[-2])
    if n_heads is None:
        return weight
    by_head = weight.reshape(n_heads, 2, -1, *weight.shape[1:])
    return by_head.swapaxes(1, 2).reshape(weight.shape)


def _stored_type(weight: np.ndarray, kind: str) -> str:
    """Return gguf's name of the type in which a weight is stored; vectors stay in float32."""
    if weight.ndim < 2:
        return "F32"
    # Q8_0 stores blocks of 32 weights of a row; a narrower row does not fit.
    if kind == "q8_0" and weight.shape[-1] % 32:
        return "F16"
    return KINDS[kind]


def _add_tokenizer(
    writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, n_rows: int, folder: Path
) -> None:
    """Write a byte-level BPE tokenizer and its chat template. Raises `InputError` for one that
    llama.cpp splits otherwise."""
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    rule = _rule(tokenizer)
    if data["model"]["type"] != "BPE" or rule is None:
        raise InputError(
            f"{folder}: its tokenizer needs llama.cpp's converter: put convert_hf_to_gguf.py on "
            "the PATH."
        )
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    _add_tokens(writer, tokenizer, n_rows)
    merges = data["model"]["merges"]
    # tokenizers wrote a merge as one text before it wrote it as a pair.
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    _add_special_tokens(writer, tokenizer)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _rule(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return llama.cpp's name of the rule that splits a hard text as this tokenizer does; None if
    there is none."""
    own = tokenizer.backend_tokenizer.pre_tokenizer
    if own is None:
        return None
    expected = own.pre_tokenize_str(_HARD_TEXT)
    for name, rule in _splits().items():
        if rule.pre_tokenize_str(_HARD_TEXT) == expected:
            return name
    return None


def _add_tokens(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, n_rows: int) -> None:
    """Write a token and its type for each of the `n_rows` of the embedding, which may have more
    rows than there are tokens."""
    from gguf import TokenType

    tokens = {number: token for token, number in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    texts, types = [], []
    for number in range(n_rows):
        texts.append(tokens.get(number, f"[PAD{number}]"))
        if number not in added:
            types.append(TokenType.NORMAL if number in tokens else TokenType.UNUSED)
        elif added[number].special:
            types.append(TokenType.CONTROL)
        else:
            types.append(TokenType.USER_DEFINED)
    writer.add_token_list(texts)
    writer.add_token_types(types)


def _add_special_tokens(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    if tokenizer.eos_token_id is not None:
        writer.add_eos_token_id(tokenizer.eos_token_id)
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(tokenizer("a").input_ids[0] == tokenizer.bos_token_id)
