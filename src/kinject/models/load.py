"""A causal language model and its tokenizer: loaded from a folder or the hub, or created with
random weights."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from kinject.disk import path_exists, verified_hashes
from kinject.errors import InputError
from kinject.gguf import converted_folder
from kinject.gguf_files import PACKAGE, gguf_file
from kinject.hub import find_source, local_folder
from kinject.models import hardware
from kinject.models.attention import CARTRIDGE, attend_to_cartridge
from kinject.models.folder import (
    ADAPTER_CONFIG,
    CONFIG,
    FileState,
    Header,
    base_of_adapter,
    check_buffers,
    check_config,
    check_cost,
    check_files,
    check_finite_in,
    file_states,
    first_line,
    not_finite,
    pickle_fix,
    read_header,
    read_headers,
    read_object,
    revision_of_base,
    run_fix,
    saved_tensors,
    weight_files,
)
from kinject.terminal import format_count

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_OWN_CODE = (
    "it comes with Python code of its own (auto_map), and kinject runs no code that comes with a "
    "model"
)
_HASHED = 2**30
"""Bytes of weights that `check_model` hashes."""
_sound: dict[Path, list[FileState]] = {}
"""Folder -> its files when `check_model` last found no fault. A study's plan asks for one base 119
times, a third of a dry run (recipes/studies/sandbox.yaml)."""


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
    checked, and a folder not again in this process as long as its files stay as they are.
    """
    if not path_exists(Path(path)):
        return
    file = gguf_file(path)
    folder = converted_folder(file) if file is not None else Path(path)
    check_files(folder)
    if (folder / ADAPTER_CONFIG).exists():
        read_header(_adapter_weights(folder))
        check_model(base_of_adapter(folder / ADAPTER_CONFIG))
        return
    check_config(folder)
    # Before the check: of a file that changes meanwhile, this is not the later state.
    states = file_states(folder)
    if _sound.get(folder) != states:
        _check_base(folder)
        _sound[folder] = states


def _check_base(folder: Path) -> None:
    """Raise as `check_model` for the files of a model that is no adapter."""
    config = read_object(folder / CONFIG)
    if config.get("auto_map"):
        raise InputError(
            f"{folder / CONFIG}: auto_map: {_OWN_CODE}. Take the key out if transformers has this "
            "type."
        )
    read_headers(folder)
    # More would take seconds, and those who read all weights compare them anyway.
    if sum(weights.stat().st_size for weights in weight_files(folder)) <= _HASHED:
        verified_hashes(folder)
    load_config(str(folder))  # its fields, before the tokenizer reads them too
    tokenizer = None
    if any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        tokenizer = load_tokenizer(str(folder))
    # DeepSpeed takes no device_map.
    if config.get("quantization_config") is None and hardware.zero3_dtype() is None:
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
        file = Path(source) / "tokenizer.json"
        if file.exists():
            location = str(file)
    with _raising_input_error(location, "tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, revision=revision, trust_remote_code=False
        )
        # A damaged file may load and then fail, or return no tokens, on the first text.
        ids = tokenizer("a b", add_special_tokens=False)["input_ids"]
    if not ids:
        raise InputError(
            f"{location}: no usable tokenizer (it makes no tokens of 'a b'). "
            f"{_fix(location, 'tokenizer')}"
        )
    _check_template(path, tokenizer)
    return tokenizer


def _check_template(path: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `InputError` if a chat template is no Jinja, or costs too much (`check_cost`)."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    templates = tokenizer.chat_template
    if not isinstance(templates, dict):
        templates = {"default": templates}
    for template in templates.values():
        if template is None:
            continue
        try:
            check_cost(str(template))  # before it is compiled: Jinja computes constants then
        except InputError as error:
            raise InputError(f"{path}: chat_template: {error}") from error
        try:
            _compile_jinja_template(template)
        # jinja2's own errors, and any other for a template that is no text
        except Exception as error:
            raise InputError(
                f"{path}: chat_template (chat_template.jinja or tokenizer_config.json): not a "
                f"Jinja template ({first_line(error)}). Repair it, or take it out."
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
        return load_config(base_of_adapter(adapter), revision_of_base(adapter))
    with _raising_input_error(source, "model"):
        return AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)


def stored_quantization(config: PretrainedConfig) -> str:
    """Return how the weights of a model are stored: ``none`` (plainly), ``4bit`` or ``8bit`` (by
    bitsandbytes), or the name of another method."""
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return "none"
    settings: dict[str, object] = stored if isinstance(stored, dict) else stored.to_dict()
    for kind in ("4bit", "8bit"):
        if settings.get(f"load_in_{kind}"):
            return kind
    return str(settings.get("quant_method", "an unknown method"))


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded.

    `dtype`, `attention`, `device`, `quantization` and `device_map` are as in a recipe; `revision`
    is that on the hub. With `sharding` each process reads its part of the weights; with
    `device_map` accelerate spreads the layers over the GPUs. Without `move` the weights stay in
    memory, for accelerate to shard. `section` is the recipe's, for messages.
    """

    dtype: str = "auto"
    attention: str = "auto"
    device: str = "auto"
    quantization: str = "none"
    device_map: str = "none"
    revision: str | None = None
    sharding: hardware.Sharding | None = None
    move: bool = True
    section: str = "model"

    @property
    def is_quantized(self) -> bool:
        """Whether bitsandbytes packs the weights."""
        return self.quantization != "none"

    def torch_dtype(self, device: str) -> torch.dtype:
        """Return the dtype of the weights on `device`. Raises as `hardware.choose_dtype`."""
        if not self.is_quantized:
            set_by_deepspeed = hardware.zero3_dtype()
            if set_by_deepspeed is not None:
                return set_by_deepspeed
        return hardware.choose_dtype(self.dtype, device, self.section)

    def arguments(self, dtype: torch.dtype, attention: str | None) -> dict[str, Any]:
        """Return arguments of from_pretrained. Raises `InputError` if a package for them is
        missing."""
        arguments: dict[str, Any] = {"dtype": dtype}
        if self.device_map != "none":
            arguments["device_map"] = self.device_map
        if attention is not None:
            arguments["attn_implementation"] = attention
        if self.is_quantized:
            arguments["quantization_config"] = hardware.quantization_config(
                self.quantization, dtype, self.section
            )
        return arguments


_DEFAULTS = LoadOptions()


def load_model(
    path: str,
    options: LoadOptions = _DEFAULTS,
    *,
    adapter: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> LoadedModel:
    """Load a causal language model and its tokenizer from a folder or the hub.

    A folder with a peft adapter is loaded on top of the base model that the adapter names;
    `adapter`, a folder or a name on the hub, on top of the model in `path`. Weights are read from
    safetensors only and no remote code is run. `tokenizer` is the folder's own if it is loaded
    already. Raises `InputError` when the folder cannot be used.
    """
    device = hardware.choose_device(options.device)
    dtype = options.torch_dtype(device)
    attention = hardware.choose_attention(options.attention, device, options.section)
    source = find_source(path, "model", options.revision)
    check_model(source)
    on_top, base = _find_adapter(source, adapter)
    arguments = options.arguments(dtype, attention)
    arguments["revision"] = options.revision
    if on_top is not None and base != source:
        # That of the options is of `path`: an adapter's base has its own.
        arguments["revision"] = revision_of_base(on_top / ADAPTER_CONFIG)
    stored = stored_quantization(load_config(base, arguments["revision"]))
    if stored != "none":
        _check_stored(base, stored, options)
        arguments.pop("quantization_config", None)
        options = replace(options, quantization=stored)
    if options.sharding is not None:
        arguments["distributed_config"] = options.sharding.of(load_config(path, options.revision))
    model = _load(base, on_top, arguments)
    model = _place(model, options, device, is_adapter=on_top is not None)
    model.eval()
    if gguf_file(path) is not None or path.startswith(PACKAGE):
        # Adapters name their base by this: the cache of conversions may be emptied, and a package
        # is elsewhere on another machine.
        model.name_or_path = model.config._name_or_path = path
    _check_finite([on_top or Path(base), Path(base)], model, quantized=options.is_quantized)
    if tokenizer is None:
        tokenizer = _tokenizer_of(path, options.revision, on_top if adapter else None)
    name = path
    if options.revision:
        name += f"@{options.revision}"
    if adapter:
        name += f" with {adapter}"
    notes = (_note(name, model, options, dtype, device), *_check_vocabulary(path, model, tokenizer))
    attention = str(model.config._attn_implementation)
    return LoadedModel(model, tokenizer, dtype, attention, device, notes)


def _check_stored(base: str, stored: str, options: LoadOptions) -> None:
    """Raise `InputError` if other bits are asked for than those in which `base` is `stored`:
    transformers would take the stored ones with a warning."""
    if options.quantization not in ("none", stored):
        raise InputError(
            f"{options.section}.quantization: found {options.quantization}, and the weights of "
            f"{base} are stored in {stored}. Remove the line, or give the plain model."
        )


def _place(
    model: PreTrainedModel, options: LoadOptions, device: str, *, is_adapter: bool
) -> PreTrainedModel:
    """Return `model` on `device`, unless something else places its weights."""
    if options.sharding is not None:
        hardware.release_whole(model.base_model.model if is_adapter else model)
        return model
    is_placed = options.is_quantized or options.device_map != "none"
    return model.to(device) if options.move and not is_placed else model


def _tokenizer_of(path: str, revision: str | None, adapter: Path | None) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the folder `adapter` if it has one, else of the model in `path`."""
    # Its training may have set another chat template, which lies beside the adapter.
    if adapter is not None and (adapter / "tokenizer_config.json").exists():
        return load_tokenizer(str(adapter))
    return load_tokenizer(path, revision=revision)


def _note(
    name: str, model: PreTrainedModel, options: LoadOptions, dtype: torch.dtype, device: str
) -> str:
    """Return what was loaded and where, in words."""
    location = device
    if options.device_map != "none":
        location = ", ".join(sorted({str(weight.device) for weight in model.parameters()}))
    if options.sharding is not None:
        location += f", {options.sharding.describe()}"
    elif not options.move:
        location += " once it is sharded"
    arithmetic = str(dtype).removeprefix("torch.")
    if options.is_quantized:
        arithmetic += f" in {options.quantization}"
    attention = model.config._attn_implementation
    note = (
        f"{name}: {_parameter_count(model)} parameters, {arithmetic}, {attention} attention, on "
        f"{location}"
    )
    older = hardware.emulated_bf16(device) if options.dtype == "auto" else ""
    return f"{note}; {older}" if older else note


def _load_full_model(path: str, options: dict[str, Any]) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    # Its bars count shards in memory; one line of our own describes the loaded model.
    disable_progress_bar()

    header = None
    if Path(path).is_dir():
        # Before transformers, which allocates all layers that config.json declares.
        header = read_headers(Path(path))
    with _raising_input_error(path, "model"):
        model, info = AutoModelForCausalLM.from_pretrained(
            path,
            **options,
            use_safetensors=True,
            trust_remote_code=False,
            # Missing weights would be drawn at random with a warning alone.
            output_loading_info=True,
            # So that the next lines name the tensor instead of the library's error.
            ignore_mismatched_sizes=True,
            return_dict=True,
            output_hidden_states=False,
            output_attentions=False,
        )
    for name, stored, needed in sorted(info["mismatched_keys"]):
        raise InputError(
            f"{path}: {name} has the shape {list(stored)}, but {CONFIG} asks for {list(needed)}. "
            f"{_fix(path, 'model')}"
        )
    if model.config.is_encoder_decoder:
        raise InputError(
            f"{path}: is_encoder_decoder: {CONFIG} declares an encoder. {_fix(path, 'model')}"
        )
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        # As TRL saves it: transformers then computes a loss, and fails on a tree's mask.
        model.config.get_text_config().output_router_logits = False
    missing = sorted(info["missing_keys"])
    if missing:
        raise InputError(
            f"{path}: weights missing for {', '.join(missing[:3])}. {_fix(path, 'model')}"
        )
    # A quantised checkpoint stores scales beside its weights.
    if header is not None and getattr(model.config, "quantization_config", None) is None:
        extra = _unread_weights(model, info["unexpected_keys"], header)
        if extra:
            raise InputError(
                f"{path}: the files hold {', '.join(extra[:3])}, which {CONFIG} leaves out of the "
                f"model. {_fix(path, 'model')}"
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
            config = Path(source) / ADAPTER_CONFIG
            base = find_source(base_of_adapter(config), "model", revision_of_base(config))
            return Path(source), base
        return None, source
    folder = local_folder(adapter)
    check_files(folder)
    if not (folder / ADAPTER_CONFIG).exists():
        raise InputError(
            f"{folder}: no {ADAPTER_CONFIG} in this folder, so it is no adapter. Give it as path "
            "instead."
        )
    if is_adapter:
        raise InputError(
            f"{source}: an adapter itself, so no other goes on top. Give its base as path, or "
            "merge."
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


def _load(base: str, adapter: Path | None, arguments: dict[str, Any]) -> PreTrainedModel:
    """Return the model in `base`, a folder or a name on the hub, with the adapter on top if there
    is one."""
    if adapter is None:
        return _load_full_model(base, arguments)
    return _load_adapter(adapter, base, arguments)


def _load_adapter(folder: Path, base: str, options: dict[str, Any]) -> PreTrainedModel:
    """Return the adapter in `folder` on top of the model in `base`."""
    from peft import PeftModel, get_peft_model_state_dict

    weights = _adapter_weights(folder)
    stored = read_header(weights).keys()
    model = _load_full_model(base, options)
    with _raising_input_error(str(folder), "adapter"), warnings.catch_warnings():
        # Of missing weights, which the next lines refuse.
        warnings.simplefilter("ignore", UserWarning)
        tuned: PreTrainedModel = PeftModel.from_pretrained(model, str(folder))
        needed = get_peft_model_state_dict(tuned, save_embedding_layers=False).keys()
        if tuned.active_peft_config.peft_type.value.lower() == CARTRIDGE:
            attend_to_cartridge(tuned)
    lacking = sorted(needed - stored) or sorted(name for name in stored - needed if "lora_" in name)
    # peft ignores tensors that fit nowhere, and keeps random ones for those that are missing.
    if lacking:
        raise InputError(
            f"{weights}: {lacking[0]} is not both here and in {base} as {ADAPTER_CONFIG} adapts "
            f"it. {_fix(str(folder), 'adapter')}"
        )
    return tuned


def _check_finite(folders: Sequence[Path], model: PreTrainedModel, *, quantized: bool) -> None:
    """Raise `InputError` if a weight is not finite. Quantized weights hide it, so their files are
    read instead."""
    folder = folders[0]
    name = not_finite(saved_tensors(model))
    if name or quantized:
        for weights in folders:
            check_finite_in(weights)
    if name:
        dtype = str(model.dtype).removeprefix("torch.")
        raise InputError(
            f"{folder}: {name} holds a value that is not finite in {dtype}. If its file holds a "
            "number, that is out of "
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
            f"{path}: the tokenizer has token ids up to {highest:,} ({refused[highest][:40]!r}), "
            f"the model's embedding has {format_count(n_rows, 'row')}. They belong to different "
            "models, or tokens were added to one alone (resize_token_embeddings): make the folder "
            "again."
        )
    if not missing:
        return ()

    def refuse(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        number = int(inputs[0].max()) if inputs and inputs[0].numel() else 0
        if number >= n_rows:
            raise InputError(
                f"{path}: a text holds {missing.get(number, '')[:40]!r}, an added token (id "
                f"{number:,}) without a row in the model's embedding "
                f"({format_count(n_rows, 'row')}). Take it out of the text, or resize the "
                "embedding."
            )

    embedding.register_forward_pre_hook(refuse)
    names = ", ".join(repr(missing[number][:40]) for number in sorted(missing)[:3])
    note = (
        f"{path}: {len(missing):,} added tokens have no row in the embedding and are refused in "
        f"texts: {names}"
    )
    return (note,)


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
    # Damaged files make transformers, tokenizers and safetensors raise any exception.
    except Exception as error:
        raise InputError(
            f"{path}: no usable {kind} ({_reason(error)}). {_fix(path, kind)}"
        ) from error
    except BaseException as error:
        # A failed assertion of tokenizers, which is written in Rust.
        if type(error).__name__ != "PanicException":
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
        return (
            "some of its weights are pickles, which can run code as they load; kinject reads "
            "safetensors only"
        )
    return first_line(error)


def _fix(path: str, kind: str) -> str:
    if path_exists(Path(path)):
        written = f"It must be a folder that save_pretrained wrote; make the {kind} again."
        return run_fix(Path(path)) or written
    return f"Give a folder, or the name of a {kind} on the hub that this machine can reach."
