"""A model and its tokenizer into memory."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from kinject.disk import read_bytes
from kinject.errors import InputError
from kinject.models.hardware import choose_attention, choose_device, choose_dtype

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode with its tokenizer, and what `auto` became; `notes` say it in words."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype
    attention: str
    device: str
    notes: tuple[str, ...]


def load_tokenizer(path: str, *, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or the hub. Raises `InputError` when it cannot be."""
    from transformers import AutoTokenizer

    with _told(path, "tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=False
        )
        # A broken file may load and fail, or say nothing at all, at the first text.
        whole = bool(tokenizer("a b", add_special_tokens=False)["input_ids"])
    if not whole:
        raise InputError(f"{path}: no usable tokenizer (it makes no tokens of 'a b'). {_cure(path, 'tokenizer')}")
    return tokenizer


@contextlib.contextmanager
def _told(path: str, what: str) -> Iterator[None]:
    """Raise `InputError` for whatever the libraries raise while they load the `what` in `path`."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # what damaged files make of transformers, tokenizers, safetensors: any exception
        raise InputError(f"{path}: no usable {what} ({_reason(error)}). {_cure(path, what)}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # a failed assertion of tokenizers, which is written in Rust
            raise
        raise InputError(f"{path}: no usable {what} ({_first_line(error)}). {_cure(path, what)}") from error


def load_model(
    path: str,
    *,
    dtype: str = "auto",
    attention: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    quantization: str = "none",
) -> LoadedModel:
    """Load a causal language model and its tokenizer from a folder or the hub.

    A folder that holds a peft adapter is loaded on top of the base model that it names. Weights are read from
    safetensors only and no remote code is run. Raises `InputError` when the folder cannot be used.
    """
    chosen_device = choose_device(device)
    chosen_dtype = choose_dtype(dtype, chosen_device)
    chosen_attention = choose_attention(attention, chosen_device)
    folder = Path(path)
    adapter = folder / "adapter_config.json"
    options: dict[str, Any] = {"dtype": chosen_dtype, "revision": revision}
    if chosen_attention == "varlen":
        from kinject.models.varlen import register

        register()
    if chosen_attention is not None:
        options["attn_implementation"] = chosen_attention
    if quantization != "none":
        options["quantization_config"] = _quantization(quantization, chosen_dtype)
    model = _load_adapter(folder, base_of_adapter(adapter), options) if adapter.exists() else _load_whole(path, options)
    if quantization == "none":
        model = model.to(chosen_device)
    model.eval()
    used_attention = str(model.config._attn_implementation)
    dtype_name = str(chosen_dtype).removeprefix("torch.")
    notes = (f"{path}: {_count(model)} parameters, {dtype_name}, {used_attention} attention, on {chosen_device}",)
    tokenizer = load_tokenizer(path, revision=revision)
    _check_rows(path, model, tokenizer)
    return LoadedModel(model, tokenizer, chosen_dtype, used_attention, chosen_device, notes)


def _check_rows(path: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `InputError` where an ordinary token has no row in the model's embedding: reading it would end the run."""
    added = tokenizer.get_added_vocab()
    highest = max((number for token, number in tokenizer.get_vocab().items() if token not in added), default=0)
    n_rows = int(model.get_input_embeddings().weight.shape[0])
    if highest >= n_rows:
        raise InputError(
            f"{path}: the tokenizer has token ids up to {highest:,}, the model rows for {n_rows:,}. They are not of one "
            "model; make the folder again."
        )


def _load_whole(path: str, options: dict[str, Any]) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM, PreTrainedModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # its bars are about shards in memory; what was loaded is told in one line

    folder = Path(path)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        raise InputError(f"{path}: no *.safetensors in this folder. {_pickles(folder) or _cure(path, 'model')}")
    with _told(path, "model"):
        _check_layers(folder)
        model, info = AutoModelForCausalLM.from_pretrained(
            path, **options, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    broken = sorted({*info["missing_keys"], *(str(key) for key in info.get("mismatched_keys", ()))})
    if broken:
        raise InputError(f"{path}: weights missing for {', '.join(broken[:3])}. {_cure(path, 'model')}")
    assert isinstance(model, PreTrainedModel)
    return model


def _check_layers(folder: Path) -> None:
    """Raise `ValueError` where a folder's config.json asks for more layers than there are weights: they would all be built."""
    from safetensors import safe_open

    config = folder / "config.json"
    if not config.is_file():
        return
    asked = json.loads(read_bytes(config)).get("num_hidden_layers")
    n_weights = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as weights:
            n_weights += len(weights.keys())
    if isinstance(asked, int) and asked > n_weights:
        raise ValueError(f"config.json asks for {asked:.3g} layers, there are {n_weights} weights")


def _load_adapter(folder: Path, base: str, options: dict[str, Any]) -> PreTrainedModel:
    from peft import PeftModel

    if not (
        folder / "adapter_model.safetensors"
    ).is_file():  # peft would take adapter_model.bin, a pickle, in its stead
        cure = _pickles(folder) or _cure(str(folder), "adapter")
        raise InputError(f"{folder}: no adapter_model.safetensors in this folder. {cure}")
    model = _load_whole(base, {**options, "revision": None})
    with _told(str(folder), "adapter"):
        tuned: PreTrainedModel = PeftModel.from_pretrained(model, str(folder))
    return tuned


def base_of_adapter(adapter: Path) -> str:
    """Return the base model that an adapter_config.json names. Raises `InputError` when it names none."""
    try:
        base = json.loads(read_bytes(adapter))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{adapter}: names no base model ({_first_line(error)}). Train the adapter again.") from error
    if not isinstance(base, str) or not base or "\0" in base or Path(base).resolve() == adapter.parent.resolve():
        raise InputError(f"{adapter}: names {base!r:.80} as its base model. Train the adapter again.")
    return base


def _quantization(kind: str, dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    if kind == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def _count(model: PreTrainedModel) -> str:
    n = sum(parameter.numel() for parameter in model.parameters())
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if n >= size:
            return f"{n / size:.1f}{unit}"
    return str(n)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200].rstrip(".")


def _reason(error: Exception) -> str:
    """Return why a library would not load a folder; where it wants to run code of the folder's, what kinject says to that."""
    if "trust_remote_code" in str(error):
        return "it comes with Python code of its own (auto_map), and kinject runs no code that comes with a model"
    if isinstance(error, UnpicklingError):
        return "some of its weights are pickles, which can run code as they load; kinject reads safetensors only"
    return _first_line(error)


def _pickles(folder: Path) -> str:
    """Return what to do about a folder whose weights are pickles; "" where there are none."""
    found = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt"))
    if not found:
        return ""
    return (
        f"It has {found[0]}, a pickle, which can run code as it loads: kinject reads safetensors only. Ask whoever made "
        "it for safetensors, or convert it where nothing is at stake."
    )


def _cure(path: str, what: str) -> str:
    if Path(path).is_dir():
        return f"It must be a folder that save_pretrained wrote; make the {what} again."
    return f"Give a folder, or the name of a {what} on the hub that this machine can reach."
