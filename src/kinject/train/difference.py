"""The difference of two models added to a third (task arithmetic, arXiv 2212.04089), tensor by tensor.

That of an instruct model and its base gives chat to a model trained from that base (chat vector, 2310.04799).
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinject.errors import InputError
from kinject.models import (
    CONFIG,
    check_finite_in,
    load_config,
    load_tokenizer,
    model_hash,
    not_finite,
    read_headers,
    weight_files,
)
from kinject.train.merge import TORCH_DTYPES, copy_others, plain_model, result_folder, rewrite, set_config

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_SAME_BASE = "All three must be one architecture and size: a model, and an instruct model with its base."
_DTYPES = {"BF16": "bfloat16", "F16": "float16"}
_BLOCK = 1 << 20
"""Values of a tensor that are computed in float32 at a time."""
_OWN_KEYS = frozenset(("_name_or_path", "architectures", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings",
                       "transformers_version", "use_cache", "vocab_size"))  # fmt: skip
"""Keys of config.json by which an instruct model may differ from its base; the log names others."""
_STRANGE = 0.5
"""A model that is farther from its base than this fraction of the base's norm was hardly trained from it."""


def add_difference(model: str, plus: str, minus: str, scales: Sequence[float], out: Path) -> dict[float, Path]:
    """Write ``model + scale * (plus - minus)`` for each of `scales` below `out`; return scale -> folder.

    All three are folders with safetensors, or names on the hub. In memory are one tensor of `model` (two of a vocabulary that
    grows) and blocks of the others; the sum is made in float32 and kept in the dtype of `model`. config.json, tokenizer, chat
    template and generation_config.json are those of `plus`, and so are rows of the vocabulary that `model` or `minus` lacks. A
    head that is the embedding in one of the three and not in another becomes a tensor of its own. Raises `InputError` for
    models of different shapes or tokens, and if a value of theirs or of the result is not finite.
    """
    for scale in scales:
        if not math.isfinite(scale) or scale == 0:
            raise InputError(
                f"--scale: found {scale:g}, a number that is not 0 is needed: 1 adds the whole difference."
            )
    names = {"model": model, "add": plus, "minus": minus}
    folders = {role: plain_model(name, role) for role, name in names.items()}
    inputs = {role: model_hash(folder) for role, folder in folders.items()}
    written: dict[float, Path] = {}
    with ExitStack() as stack:
        ours, theirs, base = (stack.enter_context(_Weights(folder)) for folder in folders.values())
        ours.check_fits(theirs, base)
        for scale in scales:
            written[scale] = out / f"scale-{scale:g}"
            change = _Difference(ours, theirs, base, scale)
            counts: dict[str, Any] = {"scale": scale, "models": names}
            with result_folder(written[scale], inputs, counts) as part:
                rewrite(ours.folder, part, change)
                copy_others(theirs.folder, part)
                set_config(part, dtype=ours.dtype, tie_word_embeddings=change.is_tied)
                change.check_finite()
                counts["norms"] = change.report()
    return written


class _Weights:
    """The tensors of a model folder; a head that is the embedding reads the embedding's."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.folder, self._stack = folder, ExitStack()
        self._files: dict[Path, int] = {}
        self.config = load_config(str(folder))
        with torch.device("meta"):
            blank = AutoModelForCausalLM.from_config(self.config, trust_remote_code=False)
        names = {id(value): name for name, value in blank.named_parameters(remove_duplicate=False)}
        names |= {id(value): name for name, value in blank.named_parameters()}
        self.embedding = names[id(blank.get_input_embeddings().weight)]
        head = blank.get_output_embeddings()
        tied: Mapping[str, str] = blank.all_tied_weights_keys
        self.head = next((key for key, source in tied.items() if source == self.embedding), "")
        self.is_tied = bool(self.head)
        if head is not None and not self.is_tied:
            self.head = names[id(head.weight)]
        self.header = read_headers(folder)
        if self.is_tied:
            self.header.pop(self.head, None)  # the embedding counts
        if self.embedding not in self.header:
            raise InputError(
                f"{folder}: holds no {self.embedding}: its tensors have other names than transformers gives them. Load it and "
                "save it again with save_pretrained."
            )
        self.dtype = _DTYPES.get(self.header[self.embedding].dtype, "float32")

    def __enter__(self) -> _Weights:
        for path in weight_files(self.folder):
            self._files[path] = self._stack.enter_context(open(path, "rb")).fileno()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def shape(self, name: str) -> list[int]:
        """Return the shape of a tensor, for a head that is the embedding that of the embedding."""
        return self.header[self._stored(name)].shape

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return the values `start` to `stop` of a flattened tensor, read from disk."""
        import torch

        stored = self.header[self._stored(name)]
        dtype = getattr(torch, TORCH_DTYPES[stored.dtype])
        n_bytes, begin = (stop - start) * dtype.itemsize, stored.start + start * dtype.itemsize
        return torch.frombuffer(bytearray(os.pread(self._files[stored.path], n_bytes, begin)), dtype=dtype)

    def _stored(self, name: str) -> str:
        return self.embedding if self.is_tied and name == self.head else name

    def check_fits(self, plus: _Weights, minus: _Weights) -> None:
        """Raise `InputError` unless the difference of `plus` and `minus` can be added to these weights."""
        for other in (plus, minus):
            names = self.header.keys() ^ other.header.keys()
            if (self.embedding, self.head) != (other.embedding, other.head) or names - {self.head}:
                name = min(names - {self.head}, default=other.embedding)
                raise InputError(f"{other.folder}: {name} is not in both it and {self.folder}. {_SAME_BASE}")
            for name in self.header.keys() & other.header.keys():
                ours, theirs = self.shape(name), other.shape(name)
                if ours != theirs and (name not in (self.embedding, self.head) or ours[1:] != theirs[1:]):
                    raise InputError(f"{other.folder}: {name} is {theirs}, in {self.folder} {ours}. {_SAME_BASE}")
        n_ours, n_theirs = (side.shape(self.embedding)[0] for side in (self, plus))
        if n_ours > n_theirs:
            raise InputError(
                f"{self.folder}: its vocabulary has {n_ours} rows, that of {plus.folder} {n_theirs}, whose tokenizer the result "
                "gets. Train the model without further tokens."
            )
        self._check_tokens(plus)
        ours, theirs = self.config.to_dict(), plus.config.to_dict()
        for key in sorted((ours.keys() | theirs.keys()) - _OWN_KEYS - {"dtype", "torch_dtype"}):
            if ours.get(key) != theirs.get(key):
                log.warning(
                    f"{CONFIG}: {key}: {ours.get(key)!r:.80} in {self.folder}, {theirs.get(key)!r:.80} in {plus.folder}, "
                    "which the result gets"
                )

    def _check_tokens(self, plus: _Weights) -> None:
        """Raise `InputError` if a token that is not special has another id in the other tokenizer."""
        ours, theirs = (load_tokenizer(str(side.folder)) for side in (self, plus))
        special = {str(token) for side in (ours, theirs) for token in side.added_tokens_decoder.values()}
        their_ids, our_ids = theirs.get_vocab(), ours.get_vocab()
        other = next(
            (token for token in our_ids if their_ids.get(token) != our_ids[token] and token not in special), None
        )
        if other is not None:
            raise InputError(
                f"{plus.folder}: the token {other!r} is number {their_ids.get(other)} there and {our_ids[other]} in "
                f"{self.folder}, so their embeddings cannot be added. Both must be trained from one base."
            )


class _Difference:
    """Changes a tensor of `model` to ``model + scale * (plus - minus)``, and measures how far apart the three are."""

    def __init__(self, model: _Weights, plus: _Weights, minus: _Weights, scale: float) -> None:
        self.model, self.plus, self.minus, self.scale = model, plus, minus, scale
        self.is_tied = model.is_tied and plus.is_tied and minus.is_tied
        self.squares = [0.0, 0.0, 0.0]
        """Of the matrices of the base, of `plus` - base, of `model` - base."""
        self.not_finite: list[str] = []

    def __call__(self, name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return the tensor changed, with the head beside the embedding if the head becomes a tensor of its own."""
        if name == self.model.head and self.model.is_tied:
            return {}  # the embedding's copy of it counts
        if name == self.model.embedding and self.model.is_tied and not self.is_tied:
            return {self.model.head: self._changed(self.model.head, tensor.clone()), name: self._changed(name, tensor)}
        return {name: self._changed(name, tensor)}

    def _changed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        import torch

        if not tensor.is_floating_point():
            return tensor
        result = tensor  # its memory is this call's
        n_all = math.prod(self.plus.shape(name))
        n = min(tensor.numel(), math.prod(self.minus.shape(name)))
        if n < max(n_all, tensor.numel()):
            result = torch.empty(self.plus.shape(name), dtype=tensor.dtype)
            result.view(-1)[:n] = tensor.flatten()[:n]
        flat = result.view(-1)
        for start in range(n, n_all, _BLOCK):  # rows of the vocabulary that only `plus` has
            block = slice(start, min(start + _BLOCK, n_all))
            flat[block] = self.plus.read(name, block.start, block.stop).to(flat.dtype)
        for start in range(0, n, _BLOCK):
            block = slice(start, min(start + _BLOCK, n))
            ours = flat[block].float()
            plus, minus = (side.read(name, block.start, block.stop).float() for side in (self.plus, self.minus))
            for index, part in enumerate((minus, plus - minus, ours - minus) if tensor.ndim > 1 else ()):
                self.squares[index] += float(part.dot(part))
            flat[block] = plus.sub_(minus).mul_(self.scale).add_(ours).to(flat.dtype)
        if not_finite([(name, result)]):
            self.not_finite.append(name)
        return result

    def check_finite(self) -> None:
        """Raise `InputError` if a value of the result is not finite, with the input that is at fault if there is one."""
        if self.not_finite:
            for side in (self.model, self.plus, self.minus):
                check_finite_in(side.folder)
            raise InputError(
                f"{self.model.folder}: {self.not_finite[0]} plus {self.scale:g} times the difference is out of its dtype's "
                "range. Lower --scale, or give the model in float32."
            )

    def report(self) -> dict[str, float]:
        """Return how far `plus` and `model` are from the base, as fractions of the norm of its matrices, and log it."""
        base, *others = (math.sqrt(square) for square in self.squares)
        moved = {role: round(value / (base or 1.0), 4) for role, value in zip(("add", "model"), others, strict=True)}
        folders = {"add": self.plus.folder, "model": self.model.folder}
        for role, folder in folders.items():
            log.info(f"{folder} is {100 * moved[role]:.1f}% of the norm of {self.minus.folder} away from it")
            if moved[role] > _STRANGE:
                log.warning(f"{folder} is so far from {self.minus.folder} that it was hardly trained from it")
        n_rows = [side.shape(side.embedding)[0] for side in (self.model, self.plus, self.minus)]
        if min(n_rows) < n_rows[1]:
            log.info(f"rows {min(n_rows)} to {n_rows[1] - 1} of the vocabulary are those of {self.plus.folder}")
        return moved
