"""Weights of finished models, shard by shard: averaged, with a difference added, with an adapter
folded in, in another dtype.

Averaging with the base is WiSE-FT (arXiv 2109.01903): less learned, less forgotten. The difference
of an instruct model and its base gives chat to a model that was trained from that base (chat
vector, 2310.04799; task arithmetic, 2212.04089).
"""

from __future__ import annotations

import functools
import math
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from kinject.disk import (
    lock_dir,
    replace_folder,
    verified_hashes,
    write_json,
    write_manifest,
    write_sha256sums,
)
from kinject.errors import InputError
from kinject.hub import local_folder
from kinject.models import (
    ADAPTER_CONFIG,
    CARTRIDGE,
    CONFIG,
    INDEX,
    LoadOptions,
    base_of_adapter,
    check_finite_in,
    check_model,
    check_trained_base,
    copy_model_file,
    load_config,
    load_model,
    load_tokenizer,
    model_files,
    model_hash,
    not_finite_in,
    read_headers,
    read_object,
    weight_files,
)
from kinject.process import is_shortage
from kinject.terminal import exact_number

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from torch import nn
    from transformers import PreTrainedModel

Change = Callable[[str, "torch.Tensor"], "torch.Tensor"]
"""The new values of a tensor of this name."""
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""Name of a dtype in torch -> in safetensors."""


def merge(base: str, tuned: str, alphas: Sequence[float], out: Path) -> dict[float, Path]:
    """Write ``(1 - alpha) * base + alpha * tuned`` for each of `alphas` (0 to 1) below `out`;
    return alpha -> folder.

    Both are folders with safetensors; `tuned` may be a peft adapter, which is folded into its base
    first. One shard is in memory at a time; the sum is made in float32 and kept in the tuned
    model's dtype. Raises `InputError` for a folder without weights, when the two do not hold the
    same tensors, or if a value of theirs or of the result is not finite.
    """
    import torch

    invalid = [alpha for alpha in alphas if not 0 <= alpha <= 1]
    if invalid:
        raise InputError(
            f"--alpha: found {invalid[0]}, allowed: 0 (the base) to 1 (the tuned model)."
        )
    with TemporaryDirectory(prefix="kinject-merge-") as scratch:
        for folder in (Path(base), Path(tuned)):
            if not folder.is_dir():
                raise InputError(
                    f"{folder}: no such folder. Give folders that save_pretrained wrote."
                )
            check_model(folder)
            # check_model compares the hashes of up to 1 GiB only.
            verified_hashes(folder)
        tuned_dir = Path(tuned)
        if (tuned_dir / ADAPTER_CONFIG).exists():
            merge_adapter(tuned_dir, Path(scratch), "float32")
            tuned_dir = Path(scratch)
        tied = _tied_weights(Path(base))
        _check_same_tensors(Path(base), tuned_dir, tied, Path(tuned))
        # Same shapes do not suffice: with another rope or epsilon no average fits both models.
        _check_same_calculation(Path(base), tuned_dir, Path(tuned))
        with open_tensors(Path(base)) as ours:

            def average(name: str, theirs: torch.Tensor, alpha: float) -> torch.Tensor:
                # A head that an adapter has made a tensor of its own began as the embedding.
                stored = name if name in ours else tied[name]
                start: torch.Tensor = ours[stored].get_tensor(stored)
                return torch.lerp(start.float(), theirs.float(), alpha).to(theirs.dtype)

            sources = _Sources((Path(base), tuned_dir), tuned_dir, tuned_dir)
            inputs = {"base": base, "tuned": tuned}
            return _write_each("alpha", alphas, out, sources, average, inputs)


def add_difference(
    model: str, plus: str, minus: str, scales: Sequence[float], out: Path
) -> dict[float, Path]:
    """Write ``model + scale * (plus - minus)`` for each of `scales` below `out`; return scale ->
    folder.

    All three are folders with safetensors, or names on the hub. One shard is in memory at a time;
    the sum is made in float32 and kept in the dtype of `model`. config.json, tokenizer, chat
    template and generation_config.json are those of `plus`, and so are rows of the vocabulary that
    `model` or `minus` lacks. Raises `InputError` for models of different shapes or tokens, and if a
    value of theirs or of the result is not finite.
    """
    for scale in scales:
        if not math.isfinite(scale) or scale == 0:
            raise InputError(
                f"--scale: found {scale:g}, a number that is not 0 is needed: 1 adds the whole "
                "difference."
            )
    names = {"model": model, "add": plus, "minus": minus}
    ours, theirs, base = (plain_model(name, role) for role, name in names.items())
    _check_addable(ours, theirs, base)
    folders = zip(names, (ours, theirs, base), strict=True)
    inputs = {role: model_hash(folder) for role, folder in folders}
    heads = _shared_heads(theirs, read_headers(ours))
    with open_tensors(theirs) as added, open_tensors(base) as subtracted:

        def change(name: str, tensor: torch.Tensor, scale: float) -> torch.Tensor:
            stored = heads.get(name, name)
            result: torch.Tensor = added[stored].get_tensor(stored)
            start: torch.Tensor = subtracted[stored].get_tensor(stored)
            if not tensor.is_floating_point():
                return result
            result, n = result.float(), min(len(tensor), len(start))
            result[:n] = (result[:n] - start[:n].float()) * scale + tensor[:n].float()
            return result.to(tensor.dtype)

        # The configuration is that of `plus`, which ties what is two matrices in the result.
        sources = _Sources((ours, theirs, base), ours, theirs, unties=bool(heads))
        return _write_each("scale", scales, out, sources, change, inputs)


@dataclass(frozen=True)
class _Sources:
    """The folders that a result is made from: all that are read, that of the weights that are
    changed, and that of its tokenizer and configuration, whose tied head the result `unties`."""

    read: Sequence[Path]
    weights: Path
    files: Path
    unties: bool = False


def _write_each(
    kind: str,
    factors: Sequence[float],
    out: Path,
    sources: _Sources,
    change: Callable[[str, torch.Tensor, float], torch.Tensor],
    inputs: Mapping[str, str],
) -> dict[float, Path]:
    """Write the model of each factor to ``out/KIND-FACTOR``, its weights as `change` has them;
    return the folders.

    Raises `InputError` if a value of the sources or of a result is not finite.
    """
    weights = sources.weights
    for folder in sources.read:
        check_finite_in(folder)
    written: dict[float, Path] = {}
    with lock_dir(out):  # held until all are written
        for factor in factors:
            written[factor] = out / f"{kind}-{exact_number(factor)}"
            with result_folder(written[factor], inputs, {kind: factor}) as part:

                def changed(name: str, tensor: torch.Tensor, of: float = factor) -> torch.Tensor:
                    return change(name, tensor, of)

                rewrite(weights, part, changed)
                copy_others(sources.files, part)
                set_config(part, dtype=_dtype_of(weights))
                if sources.unties:
                    set_config(part, tie_word_embeddings=False)
                name = not_finite_in(part).rpartition(": ")[2]
                if name:
                    raise InputError(
                        f"{weights}: {name} at {kind} {exact_number(factor)} is out of its dtype's "
                        "range. Give the model in float32."
                    )
    return written


def _dtype_of(model: str | Path, revision: str | None = None) -> str:
    """Return the dtype in which a model, a folder or a name on the hub, is stored.

    It is that of its config.json; where this names none, that of most weights in the folder, and
    float32 on the hub.
    """
    named, stored = load_config(str(model), revision).dtype, _stored_dtypes(Path(model))
    if named is None and stored:
        return max(stored, key=stored.__getitem__)
    return str(named or "float32").removeprefix("torch.")


def _stored_dtypes(folder: Path) -> Counter[str]:
    """Return how many weights of a model folder have each dtype; empty for another path."""
    if not (folder / CONFIG).exists():
        return Counter()
    names = {stored: name for name, stored in _DTYPES.items()}
    dtypes = (tensor.dtype for tensor in read_headers(folder).values())
    return Counter(names[dtype] for dtype in dtypes if dtype in names)


def _shared_heads(folder: Path, wanted: Collection[str]) -> dict[str, str]:
    """Return head -> embedding of those `wanted` tensors that a model does not store, because its
    head is its embedding."""
    stored = read_headers(folder)
    if all(name in stored for name in wanted):
        return {}
    tied = _tied_weights(folder)
    return {name: tied[name] for name in wanted if name not in stored and name in tied}


def _check_addable(ours: Path, plus: Path, minus: Path) -> None:
    """Raise `InputError` unless the difference of `plus` and `minus` can be added to `ours`.

    Their tensors have the same names and shapes, but for the rows of vocabularies, and their tokens
    the same numbers.
    """
    configs = [load_config(str(folder)) for folder in (ours, plus, minus)]
    n_vocabulary = [config.get_text_config().vocab_size for config in configs]
    _check_tensors(ours, plus, minus, n_vocabulary)
    # not of `plus`: the sum is that model with what `ours` has learned, and has its configuration
    _check_same_calculation(minus, ours)
    if n_vocabulary[0] > n_vocabulary[1]:
        raise InputError(
            f"{ours}: its vocabulary has {n_vocabulary[0]} rows, that of {plus} {n_vocabulary[1]}, "
            "whose tokenizer the result gets. Train the model without further tokens."
        )
    _check_token_numbers(ours, plus)


def _check_tensors(ours: Path, plus: Path, minus: Path, n_vocabulary: Sequence[int]) -> None:
    """Raise `InputError` unless the three models have tensors of the same names and shapes, but for
    the rows of tables of their vocabularies, `n_vocabulary` in each."""
    headers = [dict(read_headers(folder)) for folder in (ours, plus, minus)]
    heads = _shared_heads(plus, headers[0])
    # A difference of two that tie them, for a model that its training has untied.
    if heads == _shared_heads(minus, headers[0]):
        for header in headers[1:]:
            header |= {head: header[table] for head, table in heads.items()}
    fix = (
        "All three must be one architecture and size: a model, and an instruct model with its base."
    )
    for name in sorted(set().union(*headers)):
        if not all(name in header for header in headers):
            raise InputError(f"{plus}: {name} is not in both it and {ours}, or {minus}. {fix}")
        shapes = [tuple(header[name].shape) for header in headers]
        compared = shapes
        if [shape[:1] for shape in shapes] == [(n,) for n in n_vocabulary]:
            compared = [shape[1:] for shape in shapes]  # vocabularies may differ in length
        if len(set(compared)) > 1:
            raise InputError(
                f"{plus}: {name} is {shapes[1]}, in {ours} {shapes[0]}, in {minus} {shapes[2]}. "
                f"{fix}"
            )


def _check_token_numbers(ours: Path, plus: Path) -> None:
    """Raise `InputError` if a token, other than an added one, has another number in `plus`."""
    tokenizers = [load_tokenizer(str(folder)) for folder in (ours, plus)]
    added: set[str] = set()
    for tokenizer in tokenizers:
        added.update(map(str, tokenizer.added_tokens_decoder.values()))
    our_ids, their_ids = (tokenizer.get_vocab() for tokenizer in tokenizers)
    for token, number in our_ids.items():
        if their_ids.get(token) != number and token not in added:
            raise InputError(
                f"{plus}: the token {token!r} is number {their_ids.get(token)} there and {number} "
                f"in {ours}, so their embeddings cannot be added. Both must be trained from one "
                "base."
            )


@contextmanager
def result_folder(final: Path, inputs: Mapping[str, str], counts: dict[str, Any]) -> Iterator[Path]:
    """Yield a folder that becomes `final` once the block has written a model into it; its manifest
    comes last.

    The caller holds the lock of the folder around it.
    """
    part = final.with_name(f".{final.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        write_manifest(
            part / "merge.json",
            stage="merge",
            inputs=inputs,
            recipe={},
            counts={"finished": True, **counts},
        )
        write_sha256sums(part)
    # Signals too: half a model must not stay.
    except BaseException:
        shutil.rmtree(part)
        raise
    replace_folder(part, final)


@contextmanager
def open_tensors(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield tensor name -> the open file that holds it."""
    from safetensors import safe_open

    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for shard in weight_files(folder):
            file = stack.enter_context(safe_open(str(shard), framework="pt", backend="pread"))
            files.update(dict.fromkeys(file.keys(), file))
        yield files


_CALCULATION = (
    "rope_parameters", "hidden_act", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon",
    "sliding_window", "layer_types", "logits_scaling", "residual_multiplier",
    "embedding_multiplier", "attention_multiplier", "attn_logit_softcapping",
    "final_logit_softcapping", "num_attention_heads", "num_key_value_heads", "head_dim",
)  # fmt: skip
"""Fields of config.json that say what is calculated with weights of the same shapes."""


def _check_same_calculation(base: Path, tuned: Path, name: Path | None = None) -> None:
    """Raise `InputError` if two models calculate otherwise with their weights: no sum fits both.

    `name` is the folder to name for `tuned`, where that is an adapter folded in for the moment.
    """
    ours, theirs = (load_config(str(folder)).get_text_config() for folder in (base, tuned))
    for key in ("model_type", *_CALCULATION):
        values = [getattr(config, key, None) for config in (ours, theirs)]
        if values[0] != values[1]:
            raise InputError(
                f"{(name or tuned) / CONFIG}: {key} is {values[1]!r:.90}, in {base} "
                f"{values[0]!r:.90}, so it was not trained from it. Give the base model of this "
                "run."
            )


def _check_same_tensors(base: Path, tuned: Path, tied: Mapping[str, str], name: Path) -> None:
    """Raise `InputError`, which names `name`, unless two models have the same tensors; a head that
    is `tied` in the base may be one of its own."""
    ours, theirs = dict(read_headers(base)), read_headers(tuned)
    for head, table in tied.items():
        if head in theirs and head not in ours and table in ours:
            ours[head] = ours[table]
    different = sorted(ours.keys() ^ theirs.keys())
    if not different:
        different = [name for name in ours if ours[name].shape != theirs[name].shape]
    if different:
        raise InputError(
            f"{name}: {different[0]} differs from {base} in name or shape, so it was not trained "
            "from it. Give the base model of this run."
        )


def rewrite(folder: Path, out: Path, change: Change) -> None:
    """Write the weights of `folder` to `out`, which may be the same, with each tensor changed; one
    shard is in memory."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    shards, n_bytes = weight_files(folder), 0
    files: dict[str, str] = {}
    for path in shards:
        tensors: dict[str, torch.Tensor] = {}
        # Read, not mapped: one shard at a time is in memory (tests/train/test_merge.py).
        with safe_open(str(path), framework="pt", backend="pread") as file:
            for name in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
                tensors[name] = change(name, file.get_tensor(name))
        # `out` may be `folder`: a shard is replaced only once its successor is whole.
        part = out / f".{path.name}.part"
        # Without a name of their own: that would hold this shard while the next one is read.
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            part,
            metadata={"format": "pt"},
        )
        os.replace(part, out / path.name)
        files.update(dict.fromkeys(tensors, path.name))
        n_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    # A model in one file has no index.
    if shards[0].name != "model.safetensors":
        write_json(
            out / INDEX,
            {"metadata": {"total_size": n_bytes}, "weight_map": dict(sorted(files.items()))},
        )


def copy_others(folder: Path, out: Path) -> None:
    """Copy the configuration and the tokenizer of a model or an adapter."""
    for path in model_files(folder):
        if path.suffix != ".safetensors" and path.name not in (INDEX, ADAPTER_CONFIG):
            copy_model_file(path, folder, out)


def save_as(folder: Path, dtype: str, base: str | None, revision: str | None = None) -> str:
    """Change the weights in `folder` to `dtype`; return its name, "" if they stay as they are.

    ``auto`` is bfloat16 for each tensor that the base, a folder or a name on the hub, stores so;
    others stay.
    """
    import torch

    if dtype == "auto" and (base is None or _dtype_of(base, revision) != "bfloat16"):
        return ""
    target_dtype = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
    source = Path(base or "")
    unchanged: set[str] = set()
    if dtype == "auto" and source.is_dir() and (source / CONFIG).exists():
        stored = read_headers(source)
        unchanged = {name for name, tensor in stored.items() if tensor.dtype != "BF16"}

    def cast(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name in unchanged or not tensor.is_floating_point():
            return tensor
        return tensor.to(target_dtype)

    name = str(target_dtype).removeprefix("torch.")
    if {tensor.dtype for tensor in read_headers(folder).values()} != {_DTYPES[name]}:
        rewrite(folder, folder, cast)
        set_config(folder, dtype=name)
    return name


def set_config(folder: Path, **values: object) -> None:
    """Set keys of config.json in `folder`."""
    write_json(folder / CONFIG, {**read_object(folder / CONFIG), **values})


def untie_own_head(folder: Path) -> None:
    """Let config.json say that the head is no copy of the embedding, where the files hold another.

    transformers goes by the files, and so does every number that kinject has of the model; vLLM
    goes by the config, and would serve the embedding as the head.
    """
    import torch

    config, headers = load_config(str(folder)), read_headers(folder)
    n_tokens = config.get_text_config().vocab_size
    # Before a model is built: one that is tied has a single matrix with a row for each token.
    if sum(tensor.shape[0] == n_tokens for tensor in headers.values() if tensor.shape) < 2:
        return
    with open_tensors(folder) as files:
        for head, table in _tied_weights(folder).items():
            if head not in files or table not in files:
                continue
            if not torch.equal(files[head].get_tensor(head), files[table].get_tensor(table)):
                set_config(folder, tie_word_embeddings=False)


def _tied_weights(folder: Path) -> dict[str, str]:
    """Return head -> embedding of a model whose config ties them."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(str(folder)), trust_remote_code=False)
    return dict(model.all_tied_weights_keys)


def plain_model(name: str, role: str) -> Path:
    """Return the folder of a model with plain weights. Raises `InputError` for an adapter and for
    quantized weights."""
    folder = local_folder(name)
    check_model(folder)
    if (folder / ADAPTER_CONFIG).exists():
        raise InputError(
            f"{name}: an adapter, but {role} needs whole weights. Fold it in first: kinject export "
            f"{name}."
        )
    if read_object(folder / CONFIG).get("quantization_config") is not None:
        raise InputError(
            f"{name}: its weights are quantized, so they cannot be added. Give the plain model."
        )
    return folder


def merge_adapter(adapter: Path, out: Path, dtype: str = "auto") -> None:
    """Write the base of a peft adapter with the adapter folded in to the model folder `out`; the
    base is in memory.

    The dtype is that in which the base is stored, tensor by tensor, or `dtype`; the tokenizer is
    the adapter's. Raises `InputError` if one of the two, or both together, cannot be used.
    """
    settings = read_object(adapter / ADAPTER_CONFIG)
    check_model(adapter)
    base = local_folder(base_of_adapter(adapter / ADAPTER_CONFIG), settings.get("revision"))
    verified_hashes(adapter)
    check_trained_base(adapter)
    if read_object(base / CONFIG).get("quantization_config") is not None:
        raise InputError(
            f"{base}: its weights are quantised, so no adapter can be folded in. Give the plain "
            "base model."
        )
    # The adapter second: its tokenizer replaces the base's, and may have more tokens.
    for folder in (base, adapter):
        copy_others(folder, out)
    loaded_as = _dtype_of(base)
    # Rounding to one dtype would lose weights that are kept in float32, as routers' and norms'; to
    # another than the base's, it would round weights before the adapter is in them, and again.
    is_mixed = len(_stored_dtypes(base)) > 1
    if is_mixed or dtype not in ("auto", loaded_as):
        loaded_as = "float32"
    loaded = load_model(str(base), LoadOptions(dtype=loaded_as, device="cpu"), adapter=str(adapter))
    fold(loaded.model).save_pretrained(out)
    if dtype != "auto":
        save_as(out, dtype, None)
    elif is_mixed:
        save_as(out, "auto", str(base))


def fold(tuned: PeftModel) -> PreTrainedModel:
    """Return the base of a peft model with its adapter folded in, by peft; sums are made in float32
    and rounded once.

    A head that is the embedding becomes a tensor of its own where the adapter changes only one of
    them. Raises `InputError` if peft cannot fold this kind of adapter in.
    """
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer

    model, dtype = tuned.get_base_model(), tuned.dtype
    head = _unwrapped(model.get_output_embeddings())
    embedding = _unwrapped(model.get_input_embeddings())
    is_tied = False
    if head is not None and embedding is not None and head.weight is embedding.weight:
        # peft would change both, but the adapter of an embedding has no effect on the head
        is_tied = True
        head.weight = torch.nn.Parameter(embedding.weight.detach().clone(), requires_grad=False)
    settings = tuned.peft_config[tuned.active_adapter]
    if getattr(settings, "layer_replication", None):
        _copy_shared_weights(model)
    for layer in tuned.modules():
        if isinstance(layer, BaseTunerLayer):
            layer.merge = functools.partial(_merge_in_float32, layer, layer.merge, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of embeddings that are no longer the head
        try:
            merged = tuned.merge_and_unload().to(dtype)
        except Exception as error:
            if is_shortage(error):
                raise
            kind = str(settings.peft_type.value).lower()
            reason = " ".join(str(error).split()).rstrip(".")
            fix = "Serve it with peft."
            if kind == CARTRIDGE:  # peft 0.21 leaves it out when it generates with 5.24
                fix = "Ask it by kinject chat, or serve it with peft and transformers before 5.24."
            raise InputError(
                f"an adapter of type {kind} cannot be folded into its base ({reason}). {fix}"
            ) from error
    if is_tied:
        head, embedding = merged.get_output_embeddings(), merged.get_input_embeddings()
        merged.config.tie_word_embeddings = torch.equal(head.weight, embedding.weight)
        merged.tie_weights()
    return merged


def _copy_shared_weights(model: torch.nn.Module) -> None:
    """Give each layer weights of its own.

    Layers that an adapter replicates share those of one layer, which would get the changes of all.
    """
    import torch

    seen = set[int]()
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.data_ptr() in seen:
                setattr(module, name, torch.nn.Parameter(weight.detach().clone(), False))
            seen.add(weight.data_ptr())


def _merge_in_float32(
    layer: BaseTunerLayer,
    merge: Callable[..., None],
    dtype: torch.dtype,
    *args: Any,
    **options: Any,
) -> None:
    # Experts in one tensor are a parameter with a name of its own (target_parameters, all-linear).
    name = getattr(layer, "parameter_name", "weight")
    weight = getattr(layer.get_base_layer(), name)
    weight.data = weight.data.float()
    merge(*args, **options)
    weight.data = weight.data.to(dtype)


def _unwrapped(layer: BaseTunerLayer | None) -> nn.Linear | nn.Embedding | None:
    """Return a layer of the base without peft's wrappers."""
    inner: Any = layer
    while hasattr(inner, "base_layer") or hasattr(inner, "original_module"):
        inner = getattr(inner, "base_layer", None) or inner.original_module
    plain: nn.Linear | nn.Embedding | None = inner
    return plain
