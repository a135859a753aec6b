"""A causal language model and its tokenizer: loaded from a folder or the hub, or created with random weights."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from kinject.disk import parse_json, read_bytes
from kinject.errors import InputError
from kinject.models.hardware import choose_attention, choose_device, choose_dtype
from kinject.recipe.check import suggestion

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
_ADAPTER_CONFIG = "adapter_config.json"
_MAX_LAYERS = 2_000


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, its tokenizer, and the values that `auto` resolved to; `notes` state them in words."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype
    attention: str
    device: str
    notes: tuple[str, ...]


def load_tokenizer(path: str, *, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or the hub. Raises `InputError` when that fails."""
    from transformers import AutoTokenizer

    with _raising_input_error(path, "tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=False
        )
        # A damaged file may load and then fail, or return no tokens, on the first text.
        ids = tokenizer("a b", add_special_tokens=False)["input_ids"]
    if not ids:
        raise InputError(f"{path}: no usable tokenizer (it makes no tokens of 'a b'). {_fix(path, 'tokenizer')}")
    return tokenizer


def load_model(
    path: str,
    *,
    dtype: str = "auto",
    attention: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    quantization: str = "none",
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> LoadedModel:
    """Load a causal language model and its tokenizer from a folder or the hub.

    A folder with a peft adapter is loaded on top of the base model that the adapter names. Weights are read from
    safetensors only and no remote code is run. `tokenizer` is the folder's own if it is loaded already. Raises
    `InputError` when the folder cannot be used.
    """
    device = choose_device(device)
    torch_dtype = choose_dtype(dtype, device)
    implementation = choose_attention(attention, device)
    folder = Path(path)
    options: dict[str, Any] = {"dtype": torch_dtype, "revision": revision}
    if implementation == "varlen":
        from kinject.models.varlen import register

        register()
    if implementation is not None:
        options["attn_implementation"] = implementation
    if quantization != "none":
        options["quantization_config"] = _quantization_config(quantization, torch_dtype)
    model = _load_adapter(folder, options) if (folder / _ADAPTER_CONFIG).exists() else _load_full_model(path, options)
    if quantization == "none":
        model = model.to(device)
    model.eval()
    _check_finite(folder, model, quantized=quantization != "none")
    implementation = str(model.config._attn_implementation)
    dtype_name = str(torch_dtype).removeprefix("torch.")
    note = f"{path}: {_parameter_count(model)} parameters, {dtype_name}, {implementation} attention, on {device}"
    if tokenizer is None:
        tokenizer = load_tokenizer(path, revision=revision)
    _check_vocabulary(path, model, tokenizer)
    return LoadedModel(model, tokenizer, torch_dtype, implementation, device, (note,))


def base_of_adapter(adapter: Path) -> str:
    """Return the base model that an adapter_config.json names. Raises `InputError` when it names none."""
    try:
        base = parse_json(read_bytes(adapter))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{adapter}: names no base model ({first_line(error)}). Train the adapter again.") from error
    if not isinstance(base, str) or not base or "\0" in base or Path(base).resolve() == adapter.parent.resolve():
        raise InputError(f"{adapter}: names {base!r:.80} as its base model. Train the adapter again.")
    return base


def _load_full_model(path: str, options: dict[str, Any]) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # its bars count shards in memory; one line of our own describes the loaded model

    folder = Path(path)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        raise InputError(f"{path}: no *.safetensors in this folder. {_pickle_fix(folder) or _fix(path, 'model')}")
    with _raising_input_error(path, "model"):
        _check_layers(folder)
        model, info = AutoModelForCausalLM.from_pretrained(
            path, **options, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    missing = sorted({*info["missing_keys"], *(str(key) for key in info.get("mismatched_keys", ()))})
    if missing:
        raise InputError(f"{path}: weights missing for {', '.join(missing[:3])}. {_fix(path, 'model')}")
    return model


def _load_adapter(folder: Path, options: dict[str, Any]) -> PreTrainedModel:
    from peft import PeftModel

    base = base_of_adapter(folder / _ADAPTER_CONFIG)
    if not (folder / "adapter_model.safetensors").is_file():  # peft would load adapter_model.bin, a pickle, instead
        fix = _pickle_fix(folder) or _fix(str(folder), "adapter")
        raise InputError(f"{folder}: no adapter_model.safetensors in this folder. {fix}")
    model = _load_full_model(base, {**options, "revision": None})
    with _raising_input_error(str(folder), "adapter"):
        tuned: PreTrainedModel = PeftModel.from_pretrained(model, str(folder))
    return tuned


def not_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the name of the first floating-point tensor that holds a NaN or an infinity, "" if all are finite.

    A tensor is read once: its sum is not finite if a value is not. Of a sharded tensor this process's part is checked.
    """
    import torch

    for name, tensor in tensors:
        values = tensor.detach()
        values = values.to_local() if hasattr(values, "to_local") else values
        if not values.is_floating_point() or values.is_meta or not values.numel():
            continue
        values = values.to(torch.float16) if values.element_size() == 1 else values  # float8 cannot be summed
        if bool(values.sum().isfinite()):
            continue
        if not all(bool(value.isfinite()) for value in torch.aminmax(values)):  # finite values may overflow in a sum
            return name
    return ""


def not_finite_in(folder: Path) -> str:
    """Return ``FILE: TENSOR`` of the first tensor in a folder's safetensors that is not finite; "" if all are finite.

    Raises `InputError` if a file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                name = not_finite((key, file.get_tensor(key)) for key in file.keys())  # noqa: SIM118 - no mapping
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: cannot be read ({first_line(error)}). Make the model again.") from error
        if name:
            return f"{path}: {name}"
    return ""


def check_finite_in(folder: Path) -> None:
    """Raise `InputError` with the file and the tensor if the safetensors of a model folder are not all finite."""
    found = not_finite_in(folder)
    if found:
        raise InputError(
            f"{found} holds a value that is not finite (NaN or an infinity), so no output of this model is a number. "
            "Make the model again, or take another copy."
        )


def saved_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and the saved buffers of `model` with their names, tied ones once."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _check_finite(folder: Path, model: PreTrainedModel, *, quantized: bool) -> None:
    """Raise `InputError` if a weight is not finite. Quantized weights hide it, so their files are read instead."""
    adapter = folder / _ADAPTER_CONFIG
    folders = [folder, *([Path(base_of_adapter(adapter))] if adapter.is_file() else [])]
    name = not_finite(saved_tensors(model))
    for weights in folders if name or quantized else ():
        check_finite_in(weights)
    if name:
        dtype = str(model.dtype).removeprefix("torch.")
        raise InputError(
            f"{folder}: {name} holds a value that is not finite in {dtype}. If its file holds a number, that is out of "
            f"{dtype}'s range: load it as float32 (model.dtype). If not, make the model again."
        )


def _quantization_config(kind: str, dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    if kind == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def _check_layers(folder: Path) -> None:
    """Raise `ValueError` when config.json declares more layers than there are weights: all of them would be allocated."""
    from safetensors import safe_open

    config = folder / "config.json"
    if not config.is_file():
        return
    n_layers = json.loads(read_bytes(config)).get("num_hidden_layers")
    n_weights = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as weights:
            n_weights += len(weights.keys())
    if isinstance(n_layers, int) and n_layers > n_weights:
        raise ValueError(f"config.json declares {n_layers:.3g} layers, the files hold {n_weights} weights")


def _check_vocabulary(path: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `InputError` when an ordinary token has no row in the embedding: reading it would end the run."""
    added = tokenizer.get_added_vocab()
    highest = max((number for token, number in tokenizer.get_vocab().items() if token not in added), default=0)
    n_rows = int(model.get_input_embeddings().weight.shape[0])
    if highest >= n_rows:
        raise InputError(
            f"{path}: the tokenizer has token ids up to {highest:,}, the model's embedding has {n_rows:,} rows. They "
            "belong to different models; make the folder again."
        )


def _parameter_count(model: PreTrainedModel) -> str:
    n = sum(parameter.numel() for parameter in model.parameters())
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if n >= size:
            return f"{n / size:.1f}{unit}"
    return str(n)


@contextlib.contextmanager
def _raising_input_error(path: str, kind: str) -> Iterator[None]:
    """Turn any exception that the libraries raise while they load the `kind` in `path` into `InputError`."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # damaged files make transformers, tokenizers and safetensors raise any exception
        raise InputError(f"{path}: no usable {kind} ({_reason(error)}). {_fix(path, kind)}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # a failed assertion of tokenizers, which is written in Rust
            raise
        raise InputError(f"{path}: no usable {kind} ({first_line(error)}). {_fix(path, kind)}") from error


def _reason(error: Exception) -> str:
    """Return why a library could not load a folder; names kinject's rule if the folder needs its own code or pickles."""
    if "trust_remote_code" in str(error):
        return "it comes with Python code of its own (auto_map), and kinject runs no code that comes with a model"
    if isinstance(error, UnpicklingError):
        return "some of its weights are pickles, which can run code as they load; kinject reads safetensors only"
    return first_line(error)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without its full stop, its class if the message is empty."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200].rstrip(".")


def _fix(path: str, kind: str) -> str:
    if Path(path).is_dir():
        return f"It must be a folder that save_pretrained wrote; make the {kind} again."
    return f"Give a folder, or the name of a {kind} on the hub that this machine can reach."


def _pickle_fix(folder: Path) -> str:
    """Return how to replace pickled weights in `folder`, or "" if there are none."""
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt"))
    if not pickles:
        return ""
    return (
        f"It has {pickles[0]}, a pickle, which can run code as it loads: kinject reads safetensors only. Ask its author "
        "for safetensors, or convert it on a machine where nothing is at stake."
    )


def check_config(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (key, fault) for each key of `config` that its `model_type` does not know, and for too many layers.

    Building the model shows what else is wrong (`kinject.train.trainable.check_model`).
    """
    from transformers import CONFIG_MAPPING

    model_type = config.get("model_type")
    if model_type not in CONFIG_MAPPING:
        return [("model_type", f"found {model_type!r}.{suggestion(model_type, CONFIG_MAPPING.keys())}")]
    known = set(CONFIG_MAPPING[model_type]().to_dict()) - {"bos_token_id", "eos_token_id", "pad_token_id"}
    faults = [(key, f"unknown key.{suggestion(key, known)}") for key in config if key not in known]
    n_layers = config.get("num_hidden_layers")
    if isinstance(n_layers, int) and n_layers > _MAX_LAYERS:
        faults.append(("num_hidden_layers", f"found {n_layers}, allowed: up to {_MAX_LAYERS:,}."))
    return faults


def new_model(
    config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, seed: int, attention: str | None = None
) -> PreTrainedModel:
    """Return a float32 model of `config` with random weights drawn from `seed`, for the vocabulary of `tokenizer`.

    `vocab_size` in `config` may exceed the tokenizer's (the shape of a larger model, a round number): the extra rows
    belong to no token. Raises `InputError` if it is smaller.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(seed)
    vocab_size = config.get("vocab_size", len(tokenizer))
    if vocab_size < len(tokenizer):
        raise InputError(
            f"model.new.vocab_size: found {vocab_size}, but the tokenizer has {len(tokenizer)} tokens. "
            "Set at least as many."
        )
    options = {key: value for key, value in config.items() if key not in ("model_type", "vocab_size")}
    model_config = CONFIG_MAPPING[config["model_type"]](
        **options,
        vocab_size=vocab_size,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        model_config, dtype=torch.float32, attn_implementation=attention
    )
    return model


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Return a byte-level BPE tokenizer of `vocab_size` tokens; each digit is a token, and a text begins with BOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bpe.token_to_id(BOS))]
            ),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=BOS, eos_token=EOS, pad_token=PAD)
