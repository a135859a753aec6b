"""A model and its tokenizer into memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise InputError(f"{path}: no usable tokenizer ({_first_line(error)}). {_cure(path, 'tokenizer')}") from error
    return tokenizer


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
    return LoadedModel(model, tokenizer, chosen_dtype, used_attention, chosen_device, notes)


def _load_whole(path: str, options: dict[str, Any]) -> PreTrainedModel:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, PreTrainedModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # its bars are about shards in memory; what was loaded is told in one line

    folder = Path(path)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        raise InputError(f"{path}: no *.safetensors in this folder. {_cure(path, 'model')}")
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path, **options, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise InputError(f"{path}: no usable model ({_first_line(error)}). {_cure(path, 'model')}") from error
    broken = sorted({*info["missing_keys"], *(str(key) for key in info.get("mismatched_keys", ()))})
    if broken:
        raise InputError(f"{path}: weights missing for {', '.join(broken[:3])}. {_cure(path, 'model')}")
    assert isinstance(model, PreTrainedModel)
    return model


def _load_adapter(folder: Path, base: str, options: dict[str, Any]) -> PreTrainedModel:
    from peft import PeftModel

    model = _load_whole(base, {**options, "revision": None})
    try:
        tuned: PreTrainedModel = PeftModel.from_pretrained(model, str(folder))
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise InputError(
            f"{folder}: no usable adapter ({_first_line(error)}). {_cure(str(folder), 'adapter')}"
        ) from error
    return tuned


def base_of_adapter(adapter: Path) -> str:
    """Return the base model that an adapter_config.json names. Raises `InputError` when it names none."""
    try:
        base = json.loads(adapter.read_text("utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{adapter}: names no base model ({_first_line(error)}). Train the adapter again.") from error
    return str(base)


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


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200].rstrip(".")


def _cure(path: str, what: str) -> str:
    if Path(path).is_dir():
        return f"It must be a folder that save_pretrained wrote; make the {what} again."
    return f"Give a folder, or the name of a {what} on the hub that this machine can reach."
