"""Weights of finished models, tensor by tensor: averaged with their base, with an adapter folded in, or in another dtype.

Averaging is WiSE-FT (arXiv 2109.01903): less learned, less forgotten.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, BinaryIO

from kinject.disk import lock_dir, verified_hashes, write_json, write_manifest, write_sha256sums
from kinject.errors import InputError
from kinject.hub import local_folder
from kinject.models import (
    ADAPTER_CONFIG,
    CONFIG,
    INDEX,
    base_of_adapter,
    check_complete,
    check_finite_in,
    check_model,
    first_line,
    load_config,
    model_files,
    model_hash,
    not_finite_in,
    read_header,
    read_headers,
    read_object,
    weight_files,
)

if TYPE_CHECKING:
    import torch

Change = Callable[[str, "torch.Tensor"], Mapping[str, "torch.Tensor"]]
"""The result for a tensor of a file: nothing, one or several tensors by name."""
_ALIGNMENT = 8
"""Bytes: the size of the largest value of a tensor."""
_DTYPES = {
    "bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    **{f"{sign}int{bits}": f"{sign.upper() or 'I'}{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}  # fmt: skip
"""Name of a dtype in torch -> in safetensors."""
TORCH_DTYPES = {stored: name for name, stored in _DTYPES.items()}
"""Name of a dtype in safetensors -> in torch."""


def merge(base: str, tuned: str, alphas: Sequence[float], out: Path) -> dict[float, Path]:
    """Write ``(1 - alpha) * base + alpha * tuned`` for each of `alphas` (0 to 1) below `out`; return alpha -> folder.

    Both are folders with safetensors; `tuned` may be a peft adapter, which is folded into its base first. One tensor of each
    is in memory at a time; the sum is made in float32 and kept in the tuned model's dtype. Raises `InputError` for a folder
    without weights, when the two do not hold the same tensors, or if a value of theirs or of the result is not finite.
    """
    invalid = [alpha for alpha in alphas if not 0 <= alpha <= 1]
    if invalid:
        raise InputError(f"--alpha: found {invalid[0]}, allowed: 0 (the base) to 1 (the tuned model).")
    written: dict[float, Path] = {}
    with TemporaryDirectory(prefix="kinject-merge-") as scratch:
        for folder in (Path(base), Path(tuned)):
            if not folder.is_dir():
                raise InputError(
                    f"{folder}: no *.safetensors: no such folder. Give folders that save_pretrained wrote."
                )
            check_model(folder)
            if not (folder / ADAPTER_CONFIG).exists():
                check_complete(folder)
            verified_hashes(folder)
        tuned_dir = _full_weights(Path(tuned), Path(scratch))
        _check_same_tensors(Path(base), tuned_dir)
        for folder in (Path(base), tuned_dir):
            check_finite_in(folder)
        for alpha in alphas:
            written[alpha] = out / f"alpha-{alpha:g}"
            with result_folder(written[alpha], {"base": base, "tuned": tuned}, {"alpha": alpha}) as part:
                _write(Path(base), tuned_dir, alpha, part)
                name = not_finite_in(part).rpartition(": ")[2]
                if name:
                    raise InputError(
                        f"{tuned}: {name} averaged with {base} at alpha {alpha:g} is out of its dtype's range. Save TUNED in "
                        "the dtype of BASE, or in float32."
                    )
    return written


@contextmanager
def result_folder(final: Path, inputs: Mapping[str, str], counts: dict[str, Any]) -> Iterator[Path]:
    """Yield a folder that becomes `final` once the block has written a model into it; its manifest comes last."""
    part = final.with_name(f".{final.name}.part")
    with lock_dir(final.parent):
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            yield part
            write_manifest(
                part / "merge.json", stage="merge", inputs=inputs, recipe={}, counts={"finished": True, **counts}
            )
            write_sha256sums(part)
        except BaseException:
            shutil.rmtree(part)
            raise
        if final.exists():
            shutil.rmtree(final)
        os.replace(part, final)


def _full_weights(tuned: Path, scratch: Path) -> Path:
    """Return the folder of full weights: `tuned` itself, or its adapter folded into the base that it names."""
    if not (tuned / "adapter_config.json").exists():
        return tuned
    merge_adapter(tuned, scratch, "float32")
    return scratch


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


def _check_same_tensors(base: Path, tuned: Path) -> None:
    with open_tensors(base) as ours, open_tensors(tuned) as theirs:
        different = sorted(ours.keys() ^ theirs.keys())
        if not different:
            different = [n for n in ours if ours[n].get_slice(n).get_shape() != theirs[n].get_slice(n).get_shape()]
    if different:
        raise InputError(
            f"{tuned}: {different[0]} differs from {base} in name or shape, so it was not trained from it. Give the base "
            "model of this run."
        )


def _write(base: Path, tuned: Path, alpha: float, part: Path) -> None:
    """Write every shard of `tuned` averaged, and the other files of a model folder."""
    import torch

    with open_tensors(base) as ours:

        def average(name: str, theirs: torch.Tensor) -> Mapping[str, torch.Tensor]:
            mixed = torch.lerp(ours[name].get_tensor(name).float(), theirs.float(), alpha)
            return {name: mixed.to(theirs.dtype)}

        rewrite(tuned, part, average)
    copy_others(tuned, part)


def rewrite(folder: Path, out: Path, change: Change) -> None:
    """Write the weights of `folder` to `out`, which may be the same, with each tensor changed; one tensor is in memory."""
    from safetensors import safe_open

    shards, n_bytes = weight_files(folder), 0
    files: dict[str, str] = {}
    for path in shards:
        part = out / f".{path.name}.part"
        with safe_open(str(path), framework="pt", backend="pread") as file, open(part, "wb") as target:
            begin = min((tensor.start for tensor in read_header(path).values()), default=0)
            writer = _TensorWriter(target, room=2 * begin + 4096)
            for name in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
                for key, tensor in change(name, file.get_tensor(name)).items():
                    writer.add(key, tensor)
                    files[key] = path.name
                    n_bytes += tensor.numel() * tensor.element_size()
            writer.finish()
        os.replace(part, out / path.name)
    if shards[0].name != "model.safetensors":
        write_json(out / INDEX, {"metadata": {"total_size": n_bytes}, "weight_map": dict(sorted(files.items()))})


class _TensorWriter:
    """Writes a safetensors file one tensor at a time, where the library's save_file takes them all.

    The header comes first in the file and is known last: `room` bytes are left for it, and the rest of them is filled with
    spaces, as the format allows.
    """

    def __init__(self, file: BinaryIO, room: int) -> None:
        self._file, self._room = file, room + -room % _ALIGNMENT
        self._header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._odd: list[tuple[str, torch.Tensor]] = []
        """Tensors whose bytes would put the next one off its alignment; they come last."""
        self._end = 0
        file.seek(8 + self._room)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor of any device, shape and dtype."""
        if tensor.numel() * tensor.element_size() % _ALIGNMENT:
            self._odd.append((name, tensor))
        else:
            self._write(name, tensor)

    def finish(self) -> None:
        """Write the remaining tensors, and the header."""
        for name, tensor in sorted(self._odd, key=lambda item: -item[1].element_size()):
            self._write(name, tensor)
        header = json.dumps(self._header, separators=(",", ":")).encode("utf-8")
        if len(header) > self._room:
            raise AssertionError(f"a header of {len(header)} bytes, and room for {self._room}")
        self._file.seek(0)
        self._file.write(self._room.to_bytes(8, "little") + header.ljust(self._room))

    def _write(self, name: str, tensor: torch.Tensor) -> None:
        import torch

        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        start, self._end = self._end, self._end + content.nbytes
        dtype = _DTYPES[str(tensor.dtype).removeprefix("torch.")]
        offsets = [start, self._end]
        self._header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        self._file.write(content.data)


def copy_others(folder: Path, out: Path) -> None:
    """Copy the configuration and the tokenizer of a model or an adapter."""
    for path in model_files(folder):
        if path.suffix != ".safetensors" and path.name not in (INDEX, ADAPTER_CONFIG):
            shutil.copy(path, out / path.name)


def save_as(folder: Path, dtype: str, base: str | None, revision: str | None = None) -> str:
    """Change the weights in `folder` to `dtype`; return its name, "" if they stay as they are.

    ``auto`` is bfloat16 for each tensor that the base, a folder or a name on the hub, stores so; others stay.
    """
    import torch

    if dtype == "auto" and (base is None or load_config(base, revision).dtype != torch.bfloat16):
        return ""
    target_dtype = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
    source = Path(base or "")
    stored = read_headers(source) if dtype == "auto" and source.is_dir() and (source / CONFIG).exists() else {}
    unchanged = {name for name, tensor in stored.items() if tensor.dtype != "BF16"}

    def cast(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {name: tensor.to(target_dtype) if tensor.is_floating_point() and name not in unchanged else tensor}

    name = str(target_dtype).removeprefix("torch.")
    if {tensor.dtype for tensor in read_headers(folder).values()} != {_DTYPES[name]}:
        rewrite(folder, folder, cast)
        set_config(folder, dtype=name)
    return name


def set_config(folder: Path, **values: object) -> None:
    """Set keys of config.json in `folder`."""
    write_json(folder / CONFIG, {**read_object(folder / CONFIG), **values})


def plain_model(name: str, role: str) -> Path:
    """Return the folder of a model with plain weights. Raises `InputError` for an adapter and for quantized weights."""
    folder = local_folder(name)
    check_model(folder)
    if (folder / ADAPTER_CONFIG).exists():
        raise InputError(
            f"{name}: an adapter, but {role} needs whole weights. An adapter goes onto another model by: "
            f"kinject export {name} --onto INSTRUCT"
        )
    if read_object(folder / CONFIG).get("quantization_config") is not None:
        raise InputError(f"{name}: its weights are quantized, so they cannot be added. Give the plain model.")
    return folder


def apply_adapter(adapter: str, onto: str, out: Path) -> Path:
    """Write the model `onto`, a folder or a name on the hub, with a peft adapter of another model folded in; return its folder.

    As `merge_adapter`, but tokenizer and chat template are those of `onto`. Raises `InputError` if the shapes differ.
    """
    folder = local_folder(adapter)
    if not (folder / ADAPTER_CONFIG).exists():
        raise InputError(
            f"{adapter}: no {ADAPTER_CONFIG}, so it is no adapter. Whole weights go onto an instruct model by: "
            f"kinject export {adapter} --add {onto} --minus BASE"
        )
    target = plain_model(onto, "--onto")
    inputs = {"adapter": model_hash(folder), "onto": model_hash(target)}
    with result_folder(out / "onto", inputs, {"models": {"adapter": adapter, "onto": onto}}) as part:
        merge_adapter(folder, part, onto=target)
    return out / "onto"


def merge_adapter(adapter: Path, out: Path, dtype: str = "auto", onto: Path | None = None) -> None:
    """Write the base of a peft adapter with the adapter folded in, tensor by tensor, to the model folder `out`.

    `onto` takes the place of the base that the adapter names. In memory are the adapter and one tensor of the base. peft makes
    the sum, in float32; each tensor is rounded once, to the dtype in which the base stores it, or to `dtype`. The tokenizer is
    the adapter's. Raises `InputError` if one of the two cannot be used, or peft cannot fold the adapter in.
    """
    settings = read_object(adapter / ADAPTER_CONFIG)
    check_model(adapter)
    base = onto or local_folder(base_of_adapter(adapter / ADAPTER_CONFIG), settings.get("revision"))
    verified_hashes(adapter)
    if read_object(base / CONFIG).get("quantization_config") is not None:
        raise InputError(
            f"{base}: its weights are quantised, so no adapter can be folded in. Give the plain base model."
        )
    if settings.get("lora_bias"):
        raise InputError(f"{adapter}: lora_bias: true is not folded in shard by shard. Train with adapter.merge: true.")
    fold = _AdapterFold(base, adapter, dtype)
    rewrite(base, out, fold)
    unmerged = fold.unmerged()
    if unmerged:
        raise InputError(
            f"{adapter}: adapts {unmerged}, which the files of {base} store under another name. Train with adapter.merge: true."
        )
    for folder in (base, adapter) if onto is None else (onto,):
        copy_others(folder, out)
    if fold.head:
        set_config(out, tie_word_embeddings=False)
    if dtype != "auto":
        set_config(out, dtype=dtype)


class _AdapterFold:
    """Folds an adapter into each tensor of a base. Weights of its model take no memory (see `_blank`)."""

    def __init__(self, base: Path, adapter: Path, dtype: str) -> None:
        import torch
        from peft import PeftConfig, get_peft_model
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils import ModulesToSaveWrapper, load_peft_weights, set_peft_model_state_dict
        from transformers import AutoModelForCausalLM

        self.dtype = None if dtype == "auto" else getattr(torch, dtype)
        with torch.device("meta"):
            config = load_config(str(base))
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        blank = _blank(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of tied weights: see `head`
            try:
                tuned = get_peft_model(model, PeftConfig.from_pretrained(str(adapter)), low_cpu_mem_usage=True)
                weights = load_peft_weights(str(adapter), device="cpu")
                extra = set_peft_model_state_dict(tuned, weights, low_cpu_mem_usage=True).unexpected_keys
            except Exception as error:  # peft raises anything for files that do not fit
                raise InputError(f"{adapter}: peft cannot load it on {base} ({first_line(error)}).") from error
        if extra:
            raise InputError(f"{adapter}: holds {extra[0]}, which {base} lacks. Give the base it was trained on.")
        modules = dict(model.named_modules())
        layers = {name: module for name, module in modules.items() if isinstance(module, BaseTunerLayer)}
        self.layers = {name.removesuffix(".token_adapter"): module for name, module in layers.items()}
        self.wrappers = {name: module for name, module in modules.items() if isinstance(module, ModulesToSaveWrapper)}
        self.brought = {name: value.data for name, value in model.named_parameters() if value.data_ptr() != blank}
        """Parameters that the adapter's file holds."""
        self.folded: set[str] = set()
        names = {id(module): name for name, module in modules.items()}
        self.embedding = names[id(model.get_input_embeddings())]
        head = names.get(id(model.get_output_embeddings()), "")
        is_tied = bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
        self.head = head if is_tied and {self.embedding, head} & {*self.layers, *self.wrappers} else ""
        """Name of an output layer that was the embedding in the base, and is not with the adapter."""

    def __call__(self, name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return the tensor with the adapter, under its name; for a head that is no longer the embedding, two."""
        module, _, leaf = name.rpartition(".")
        if self.head and module == self.head:
            return {}  # the embedding's copy of it counts
        tensors = {name: self._folded(module, leaf, tensor)}
        if self.head and module == self.embedding:
            tensors[f"{self.head}.{leaf}"] = self._folded(self.head, leaf, tensor)
        return tensors

    def _folded(self, module: str, leaf: str, tensor: torch.Tensor) -> torch.Tensor:
        import torch

        if not tensor.is_floating_point():
            return tensor
        self.folded.add(module)
        weight = tensor.to(torch.float32, copy=True)
        if module in self.wrappers:
            wrapper = self.wrappers[module]
            weight = wrapper.modules_to_save[wrapper.active_adapters[0]].get_parameter(leaf).data
        elif module in self.layers and leaf == "weight":
            layer = self.layers[module]
            base_layer = layer.get_base_layer()
            base_layer.weight, nothing = torch.nn.Parameter(weight, requires_grad=False), base_layer.weight
            layer.merge()
            weight, base_layer.weight = base_layer.weight.data, nothing
        else:
            for key in (f"{module}.{leaf}", f"{module}.base_layer.{leaf}"):
                weight = self.brought.get(key, weight)
        return weight.to(self.dtype or tensor.dtype)

    def unmerged(self) -> str:
        """Return the first module that the adapter changes and no file holds; "" if there is none."""
        return min({*self.layers, *self.wrappers} - self.folded, default="")


def _blank(model: Any) -> int:
    """Give each parameter of `model` its shape on the CPU without memory: one zero, repeated. Return its address.

    On the meta device peft would move the adapter there as well.
    """
    import torch

    zero = torch.zeros((), dtype=torch.float32)
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                blank = torch.nn.Parameter(zero.expand(value.shape), requires_grad=False)
                module._parameters[name] = made.setdefault(id(value), blank)
    return zero.data_ptr()
