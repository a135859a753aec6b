"""A causal language model and its tokenizer: loaded from a folder or the hub, or created with
random weights."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from kinject.disk import path_exists, verified_hashes
from kinject.errors import InputError
from kinject.gguf import converted_folder, gguf_file
from kinject.hub import find_source, local_folder
from kinject.models import hardware
from kinject.models.attention import CARTRIDGE, attend_to_cartridge
from kinject.models.folder import (
    ADAPTER_CONFIG,
    CONFIG,
    Header,
    base_of_adapter,
    check_buffers,
    check_cost,
    check_files,
    check_finite_in,
    first_line,
    not_finite,
    pickle_fix,
    read_header,
    read_headers,
    read_object,
    saved_tensors,
    weight_files,
)
from kinject.recipe.check import suggestion

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
_MAX_LAYERS = 2_000
_OWN_CODE = "it comes with Python code of its own (auto_map), and kinject runs no code that comes with a model"
_HASHED = 2**30
"""Bytes of weights that `check_model` hashes."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, its tokenizer, and the values that `auto` resolved to; `notes`
    state them in words."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype
    attention: str
    device: str
    notes: tuple[str, ...]


def check_model(path: str | Path) -> None:
    """Raise `InputError` or `DiskError` unless `path` is a model folder that loads: the one check
    of every verb that reads one.

    Checked are the kinds of its files, config.json, the tokenizer, the names and shapes of all
    weights, and whether these three belong together. transformers reads the weights for it without
    their values, so an 8B model takes half a second and no memory; of an adapter, its base is
    checked. Up to 1 GiB of weights are compared with SHA256SUMS, too, where the folder has that
    file; train, eval, export and merge compare all, since they read all. A name on the hub is not
    checked.
    """
    if not path_exists(Path(path)):
        return
    file = gguf_file(path)
    folder = Path(path) if file is None else converted_folder(file)
    check_files(folder)
    if (folder / ADAPTER_CONFIG).exists():
        read_header(_adapter_weights(folder))
        check_model(base_of_adapter(folder / ADAPTER_CONFIG))
        return
    if not (folder / CONFIG).exists():
        raise InputError(
            f"{folder}: no {CONFIG} in this folder, so it is no model. {_fix(str(folder), 'model')}"
        )
    config = read_object(folder / CONFIG)
    if config.get("auto_map"):
        raise InputError(
            f"{folder / CONFIG}: auto_map: {_OWN_CODE}. Take the key out if transformers has this type."
        )
    read_headers(folder)
    if sum(weights.stat().st_size for weights in weight_files(folder)) <= _HASHED:
        verified_hashes(folder)
    load_config(str(folder))  # its fields, before the tokenizer reads them too
    has_tokenizer = any(
        (folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")
    )
    tokenizer = load_tokenizer(str(folder)) if has_tokenizer else None
    if (
        config.get("quantization_config") is None and hardware.zero3_dtype() is None
    ):  # DeepSpeed takes no device_map
        model = _load_full_model(str(folder), {"device_map": "meta"})
        if tokenizer is not None:
            _check_vocabulary(str(folder), model, tokenizer)


def load_tokenizer(path: str, *, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or the hub. Raises `InputError` when that fails."""
    from transformers import AutoTokenizer

    source = find_source(path, "tokenizer", revision)
    location = path
    if Path(source).exists():
        check_files(Path(source))
        location = next(
            (str(file) for file in (Path(source) / "tokenizer.json",) if file.exists()), path
        )
    with _raising_input_error(location, "tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, revision=revision, trust_remote_code=False
        )
        # A damaged file may load and then fail, or return no tokens, on the first text.
        ids = tokenizer("a b", add_special_tokens=False)["input_ids"]
    if not ids:
        raise InputError(
            f"{location}: no usable tokenizer (it makes no tokens of 'a b'). {_fix(location, 'tokenizer')}"
        )
    _check_template(path, tokenizer)
    return tokenizer


def _check_template(path: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `InputError` if a chat template is no Jinja, or costs too much (`check_cost`)."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    templates = tokenizer.chat_template
    for template in templates.values() if isinstance(templates, dict) else [templates]:
        if template is None:
            continue
        try:
            check_cost(str(template))  # before it is compiled: Jinja computes constants then
        except InputError as error:
            raise InputError(f"{path}: chat_template: {error}") from error
        try:
            _compile_jinja_template(template)
        except (
            Exception
        ) as error:  # jinja2's own errors, and any other for a template that is no text
            raise InputError(
                f"{path}: chat_template (chat_template.jinja or tokenizer_config.json): not a Jinja template "
                f"({first_line(error)}). Repair it, or take it out."
            ) from error


def load_config(path: str, revision: str | None = None) -> PretrainedConfig:
    """Return the config of the model in a folder (config.json is enough) or on the hub; for an
    adapter, that of its base.

    Raises `InputError` if there is none.
    """
    from transformers import AutoConfig

    source = find_source(path, "model", revision)
    if Path(source).exists():
        check_files(Path(source))
    adapter = Path(source) / ADAPTER_CONFIG
    if adapter.exists():
        return load_config(base_of_adapter(adapter))
    with _raising_input_error(source, "model"):
        return AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)


def load_model(
    path: str,
    *,
    dtype: str = "auto",
    attention: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    quantization: str = "none",
    tokenizer: PreTrainedTokenizerBase | None = None,
    move: bool = True,
    sharding: hardware.Sharding | None = None,
    adapter: str | None = None,
    device_map: str = "none",
    section: str = "model",
) -> LoadedModel:
    """Load a causal language model and its tokenizer from a folder or the hub.

    A folder with a peft adapter is loaded on top of the base model that the adapter names;
    `adapter`, a folder or a name on the hub, on top of the model in `path`. Weights are read from
    safetensors only and no remote code is run. `tokenizer` is the folder's own if it is loaded
    already. With `sharding` each process reads its part of the weights; with `device_map`
    accelerate spreads the layers over the GPUs. Without `move` they stay in memory, for accelerate
    to shard. `section` is the recipe's, for messages. Raises `InputError` when the folder cannot be
    used.
    """
    device = hardware.choose_device(device)
    torch_dtype = (
        hardware.zero3_dtype() if quantization == "none" else None
    ) or hardware.choose_dtype(dtype, device, section)
    implementation = hardware.choose_attention(attention, device, section)
    source = find_source(path, "model", revision)
    check_model(source)
    on_top, base = _find_adapter(source, adapter)
    options = _options(torch_dtype, implementation, quantization, device_map, section)
    options["revision"] = revision if base == source else None
    if sharding is not None:
        options["distributed_config"] = sharding.of(load_config(path, revision))
    model = (
        _load_full_model(base, options) if on_top is None else _load_adapter(on_top, base, options)
    )
    if sharding is not None:
        hardware.release_whole(model if on_top is None else model.base_model.model)
    elif quantization == "none" and device_map == "none" and move:
        model = model.to(device)
    model.eval()
    if gguf_file(path) is not None:
        model.name_or_path = model.config._name_or_path = (
            path  # the base that an adapter names: the cache may be emptied
        )
    _check_finite([on_top or Path(base), Path(base)], model, quantized=quantization != "none")
    implementation = str(model.config._attn_implementation)
    name = f"{path}{f'@{revision}' if revision else ''}{f' with {adapter}' if adapter else ''}"
    used = sorted({str(parameter.device) for parameter in model.parameters()})
    location = ", ".join(used) if device_map != "none" else device
    if sharding is not None or not move:
        location += f", {sharding.describe()}" if sharding is not None else " once it is sharded"
    arithmetic = f"{str(torch_dtype).removeprefix('torch.')}{f' in {quantization}' if quantization != 'none' else ''}"
    note = f"{name}: {_parameter_count(model)} parameters, {arithmetic}, {implementation} attention, on {location}"
    if tokenizer is None:
        has_own = on_top is not None and (on_top / "tokenizer_config.json").exists()
        tokenizer = (
            load_tokenizer(str(on_top))
            if has_own and adapter
            else load_tokenizer(path, revision=revision)
        )
    older = hardware.emulated_bf16(device) if dtype == "auto" else ""
    notes = (f"{note}; {older}" if older else note, *_check_vocabulary(path, model, tokenizer))
    return LoadedModel(model, tokenizer, torch_dtype, implementation, device, notes)


def _options(
    dtype: torch.dtype, attention: str | None, quantization: str, device_map: str, section: str
) -> dict[str, Any]:
    """Return the arguments of from_pretrained. Raises `InputError` if a package for them is
    missing."""
    options: dict[str, Any] = {"dtype": dtype}
    if device_map != "none":
        options["device_map"] = device_map
    if attention is not None:
        options["attn_implementation"] = attention
    if quantization != "none":
        options["quantization_config"] = hardware.quantization_config(quantization, dtype, section)
    return options


def _load_full_model(path: str, options: dict[str, Any]) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # its bars count shards in memory; one line of our own describes the loaded model

    header = read_headers(Path(path)) if Path(path).is_dir() else None
    with _raising_input_error(path, "model"):
        model, info = AutoModelForCausalLM.from_pretrained(
            path, **options, use_safetensors=True, trust_remote_code=False, output_loading_info=True,
            ignore_mismatched_sizes=True, return_dict=True, output_hidden_states=False, output_attentions=False,
        )  # fmt: skip
    for name, stored, needed in sorted(info["mismatched_keys"]):
        raise InputError(
            f"{path}: {name} has the shape {list(stored)}, but {CONFIG} asks for {list(needed)}. {_fix(path, 'model')}"
        )
    if model.config.is_encoder_decoder:
        raise InputError(
            f"{path}: is_encoder_decoder: {CONFIG} declares an encoder. {_fix(path, 'model')}"
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise InputError(
            f"{path}: weights missing for {', '.join(missing[:3])}. {_fix(path, 'model')}"
        )
    if header is not None and getattr(model.config, "quantization_config", None) is None:
        extra = _unread_weights(model, info["unexpected_keys"], header)
        if extra:
            raise InputError(
                f"{path}: the files hold {', '.join(extra[:3])}, which {CONFIG} leaves out of the model. {_fix(path, 'model')}"
            )
    return model


def _unread_weights(model: PreTrainedModel, unexpected: Iterable[str], header: Header) -> list[str]:
    """Return the tensors that belong inside a module of `model` but were not read: layers that its
    config leaves out.

    Other towers of a larger model lie beside its modules. Masks and frequencies of older
    checkpoints are computed now.
    """
    modules = {name for name, _ in model.named_modules()} - {"", model.base_model_prefix}
    unread = []
    for name in sorted(unexpected):
        parts = name.split(".")
        is_inside = any(".".join(parts[:end]) in modules for end in range(1, len(parts)))
        is_computed = parts[-1] in ("inv_freq", "masked_bias") or (
            name in header and len(header[name].shape) > 3
        )
        if is_inside and not is_computed:
            unread.append(name)
    return unread


def _find_adapter(source: str, adapter: str | None) -> tuple[Path | None, str]:
    """Return the folder of the adapter to load, if any, and its base: `source` is one of the two.

    Raises `InputError` if `adapter` is none, or `source` is an adapter too.
    """
    is_adapter = (Path(source) / ADAPTER_CONFIG).exists()
    if adapter is None:
        if is_adapter:
            return Path(source), find_source(
                base_of_adapter(Path(source) / ADAPTER_CONFIG), "model"
            )
        return None, source
    folder = local_folder(adapter)
    check_files(folder)
    if not (folder / ADAPTER_CONFIG).exists():
        raise InputError(
            f"{folder}: no {ADAPTER_CONFIG} in this folder, so it is no adapter. Give it as path instead."
        )
    if is_adapter:
        raise InputError(
            f"{source}: an adapter itself, so no other goes on top. Give its base as path, or merge."
        )
    return folder, source


def _adapter_weights(folder: Path) -> Path:
    """Return the weights of an adapter. Raises `InputError` without them: peft would load
    adapter_model.bin, a pickle."""
    weights = folder / "adapter_model.safetensors"
    if not weights.is_file():
        fix = pickle_fix(folder) or _fix(str(folder), "adapter")
        raise InputError(f"{folder}: no {weights.name} in this folder. {fix}")
    return weights


def _load_adapter(folder: Path, base: str, options: dict[str, Any]) -> PreTrainedModel:
    """Return the adapter in `folder` on top of the model in `base`, a folder or a name on the hub."""
    from peft import PeftModel, get_peft_model_state_dict

    weights = _adapter_weights(folder)
    stored = read_header(weights).keys()
    model = _load_full_model(base, options)
    with _raising_input_error(str(folder), "adapter"), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # of missing weights, which the next lines refuse
        tuned: PreTrainedModel = PeftModel.from_pretrained(model, str(folder))
        needed = get_peft_model_state_dict(tuned, save_embedding_layers=False).keys()
        if tuned.active_peft_config.peft_type.value.lower() == CARTRIDGE:
            attend_to_cartridge(tuned)
    lacking = sorted(needed - stored) or sorted(name for name in stored - needed if "lora_" in name)
    if lacking:
        raise InputError(f"{weights}: {lacking[0]} is not both here and in {base} as {ADAPTER_CONFIG} adapts it. "
                         f"{_fix(str(folder), 'adapter')}")  # fmt: skip
    return tuned


def _check_finite(folders: Sequence[Path], model: PreTrainedModel, *, quantized: bool) -> None:
    """Raise `InputError` if a weight is not finite. Quantized weights hide it, so their files are
    read instead."""
    folder = folders[0]
    name = not_finite(saved_tensors(model))
    for weights in folders if name or quantized else ():
        check_finite_in(weights)
    if name:
        dtype = str(model.dtype).removeprefix("torch.")
        raise InputError(
            f"{folder}: {name} holds a value that is not finite in {dtype}. If its file holds a number, that is out of "
            f"{dtype}'s range: load it as float32 (model.dtype). If not, make the model again."
        )
    check_buffers(model, str(folder), CONFIG)


def _check_vocabulary(
    path: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, ...]:
    """Raise `InputError` when a token has no row in the embedding: reading it would end the run.

    Added tokens that no text needs may lack one: Gemma 3 1B's tokenizer has a token for images,
    transformers' Qwen2Tokenizer one for what is unknown. Then a note is returned, and the embedding
    refuses a text that holds one.
    """
    embedding = model.get_input_embeddings()
    n_rows = hardware.shape_of(embedding.weight)[0]
    missing = {number: token for token, number in tokenizer.get_vocab().items() if number >= n_rows}
    roles = {
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    }
    refused = {
        n: token
        for n, token in missing.items()
        if n in roles or n not in tokenizer.added_tokens_decoder
    }
    if refused:
        highest = max(refused)
        raise InputError(
            f"{path}: the tokenizer has token ids up to {highest:,} ({refused[highest][:40]!r}), the model's embedding has "
            f"{n_rows:,} rows. They belong to different models, or tokens were added to one alone (resize_token_embeddings): "
            "make the folder again."
        )
    if not missing:
        return ()

    def refuse(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        number = int(inputs[0].max()) if inputs and inputs[0].numel() else 0
        if number >= n_rows:
            raise InputError(
                f"{path}: a text holds {missing.get(number, '')[:40]!r}, an added token (id {number:,}) without a row in the "
                f"model's embedding ({n_rows:,} rows). Take it out of the text, or resize the embedding."
            )

    embedding.register_forward_pre_hook(refuse)
    names = ", ".join(repr(missing[number][:40]) for number in sorted(missing)[:3])
    return (
        f"{path}: {len(missing):,} added tokens have no row in the embedding and are refused in texts: {names}",
    )


def _parameter_count(model: PreTrainedModel) -> str:
    n = sum(hardware.size_of(parameter) for parameter in model.parameters())
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if n >= size:
            return f"{n / size:.1f}{unit}"
    return str(n)


@contextlib.contextmanager
def _raising_input_error(path: str, kind: str) -> Iterator[None]:
    """Turn any exception that the libraries raise while they load the `kind` in `path` into
    `InputError`."""
    try:
        yield
    except InputError:
        raise
    except (
        Exception
    ) as error:  # damaged files make transformers, tokenizers and safetensors raise any exception
        raise InputError(
            f"{path}: no usable {kind} ({_reason(error)}). {_fix(path, kind)}"
        ) from error
    except BaseException as error:
        if (
            type(error).__name__ != "PanicException"
        ):  # a failed assertion of tokenizers, which is written in Rust
            raise
        raise InputError(
            f"{path}: no usable {kind} ({first_line(error)}). {_fix(path, kind)}"
        ) from error


def _reason(error: Exception) -> str:
    """Return why a library could not load a model; names kinject's rule if it needs its own code or
    pickles."""
    if "trust_remote_code" in str(error):
        return _OWN_CODE
    if isinstance(error, UnpicklingError):
        return "some of its weights are pickles, which can run code as they load; kinject reads safetensors only"
    return first_line(error)


def _fix(path: str, kind: str) -> str:
    if path_exists(Path(path)):
        return f"It must be a folder that save_pretrained wrote; make the {kind} again."
    return f"Give a folder, or the name of a {kind} on the hub that this machine can reach."


def check_config(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (key, fault) for each key of `config` that its `model_type` does not know, and for too
    many layers.

    Building the model shows what else is wrong (`kinject.train.load.check_model`).
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = config.get("model_type")
    if model_type not in CONFIG_MAPPING:
        return [
            ("model_type", f"found {model_type!r}.{suggestion(model_type, CONFIG_MAPPING.keys())}")
        ]
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return [
            (
                "model_type",
                f"found {model_type!r}, which is no causal language model. Take llama, for example.",
            )
        ]
    known = set(CONFIG_MAPPING[model_type]().to_dict()) - {
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    }
    faults = [(key, f"unknown key.{suggestion(key, known)}") for key in config if key not in known]
    n_layers = config.get("num_hidden_layers")
    if isinstance(n_layers, int) and n_layers > _MAX_LAYERS:
        faults.append(("num_hidden_layers", f"found {n_layers}, allowed: up to {_MAX_LAYERS:,}."))
    return faults


def new_config(values: Mapping[str, Any], vocab_size: int = 300) -> PretrainedConfig:
    """Return transformers' config of `model.new`, for a tokenizer with `vocab_size` entries unless
    the values name more."""
    from transformers import CONFIG_MAPPING

    options = {key: value for key, value in values.items() if key != "model_type"}
    return CONFIG_MAPPING[values["model_type"]](**{"vocab_size": vocab_size, **options})


def new_model(
    config: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    attention: str | None = None,
    dtype: str = "float32",
) -> PreTrainedModel:
    """Return a model of `config` with random weights drawn from `seed`, for the vocabulary of
    `tokenizer`.

    `vocab_size` in `config` may exceed the tokenizer's (the shape of a larger model, a round
    number): the extra rows belong to no token. Raises `InputError` if it is smaller.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    vocab_size = config.get("vocab_size", len(tokenizer))
    if vocab_size < len(tokenizer):
        raise InputError(
            f"model.new.vocab_size: found {vocab_size}, but the tokenizer has {len(tokenizer)} tokens. "
            "Set at least as many."
        )
    tokens = {
        name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        new_config({**config, **tokens}, len(tokenizer)),
        dtype=getattr(torch, dtype),
        attn_implementation=attention,
    )
    check_buffers(model, "model.new", "this section")
    return model


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Return a byte-level BPE tokenizer of `vocab_size` tokens; each digit is a token, and a text
    begins with BOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
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
                single=f"{BOS} $A",
                pair=f"{BOS} $A $B",
                special_tokens=[(BOS, bpe.token_to_id(BOS))],
            ),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=BOS, eos_token=EOS, pad_token=PAD
    )
