"""The teacher of context distillation: its predictions, made once and cached (arXiv 2209.15189, 2412.14964).

The teacher is the model before training. Since its weights are frozen, each prediction is made once, before training, and
kept in corpus.cache_dir by the content of weights, head and text. Rows with one head (the paraphrases of a document) share its
pass.

An entry of that cache is a folder: ``starts.bin`` (int64, the first prediction of each row, and their number),
``log_probs.bin`` (float32) and ``ids.bin`` (uint32), as in `Predictions`.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from kinject import models
from kinject.corpus.tokenize import IGNORED, cached_entry, mapped
from kinject.disk import content_id
from kinject.recipe import DistillationSection, TrainRecipe
from kinject.signals import running_time
from kinject.terminal import Progress
from kinject.train.contexts import NO_TEACHER, TeacherRows, section_of
from kinject.train.loss import Predictions, log_probs_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FORMAT = 1
"""Format of cache entries. It changes with their files."""
_BATCH_TOKENS = 8192
"""Tokens of one pass of the teacher, padding included, at most."""
_BATCH_LOGITS = 1 << 26
"""Logits of one pass at most (256 MiB in float32)."""
_TOLERANCE, _COARSE = {torch.float32: 1e-3}, 0.1
"""Most difference of a log-prob between a pass that shares its head and one over the whole; in half precision."""


class Teacher:
    """The stored predictions of a teacher, mapped from disk."""

    def __init__(self, folder: Path) -> None:
        """Map the entry in `folder`."""
        self.starts = mapped(folder / "starts.bin", np.int64)
        n = int(self.starts[-1])
        self._log_probs = mapped(folder / "log_probs.bin", np.float32).reshape(n, -1)
        self._ids = mapped(folder / "ids.bin", np.uint32).reshape(n, -1)

    def of_batch(self, batch: Mapping[str, torch.Tensor], learned: torch.Tensor | None = None) -> Predictions:
        """Return the predictions of the token after each one of `batch`, or only of those that `learned` marks.

        `batch` holds labels and teacher [batch, length]; `learned` is [batch, length - 1].
        """
        numbers = batch["teacher"][:, 1:].masked_fill(batch["labels"][:, 1:] == IGNORED, NO_TEACHER)
        return self.predictions(
            F.pad(numbers, (0, 1), value=NO_TEACHER).flatten() if learned is None else numbers[learned]
        )

    def predictions(self, numbers: torch.Tensor) -> Predictions:
        """Return the predictions with these `numbers` [tokens], on their device; zeros for `NO_TEACHER`."""
        device, given = numbers.device, numbers != NO_TEACHER
        index = numbers.cpu().numpy()
        picked, place = index[index != NO_TEACHER], given.nonzero()[:, 0]
        log_probs = torch.zeros(len(index), self._log_probs.shape[1], device=device)
        ids = torch.zeros(len(index), self._ids.shape[1], dtype=torch.long, device=device)
        log_probs[place] = torch.from_numpy(self._log_probs[picked]).to(device)
        ids[place] = torch.from_numpy(self._ids[picked].astype(np.int64)).to(device)
        return Predictions(given, log_probs, ids)


def load_teacher(
    recipe: TrainRecipe, read: TeacherRows, model: PreTrainedModel, weights: str, *, bf16: bool
) -> tuple[Teacher, str]:
    """Return the teacher of a run, and a note: its predictions are read from the cache, or made by `model` and stored.

    `model` is the base as it was loaded; `weights` is its hash, "" to compute it. `bf16`: under autocast.
    """
    section = section_of(recipe)
    made = 0.0

    def write(folder: Path) -> None:
        nonlocal made
        began = running_time()
        _write_predictions(folder, read, model, section, bf16=bf16)
        made = running_time() - began

    identity = weights or _identity(recipe, model)
    key = content_id(
        "predictions", _FORMAT, read.key, identity, str(model.dtype), bf16,
        section.top_k, section.temperature, recipe.model.quantization,
    )  # fmt: skip
    folder = cached_entry(Path(recipe.corpus.cache_dir), key, write)
    teacher = Teacher(folder)
    n, n_bytes = int(teacher.starts[-1]), sum(path.stat().st_size for path in folder.iterdir())
    where = f"made in {made:.1f} s" if made else "read from the cache"
    return teacher, f"distillation: {n:,} predictions of the teacher {where} ({n_bytes / 2**20:,.0f} MiB in {folder})"


def _identity(recipe: TrainRecipe, model: PreTrainedModel) -> str:
    path = Path(str(recipe.model.path))
    return models.model_hash(path) if path.is_dir() else f"{path}@{getattr(model.config, '_commit_hash', '')}"


@torch.no_grad()
def _write_predictions(
    folder: Path, read: TeacherRows, model: PreTrainedModel, section: DistillationSection, *, bf16: bool
) -> None:
    """Write the predictions of all rows of `read` into `folder`."""
    n, vocabulary = int(read.starts[-1]), int(model.config.get_text_config().vocab_size)
    k = min(section.top_k, vocabulary)
    read.starts.tofile(folder / "starts.bin")
    shapes = {"ids": (np.uint32, k), "log_probs": (np.float32, k + (k < vocabulary))}
    files = {
        name: np.memmap(folder / f"{name}.bin", kind, "w+", shape=(n, width)) for name, (kind, width) in shapes.items()
    }
    was_training = model.training
    model.eval()
    autocast = torch.autocast(model.device.type, torch.bfloat16) if bf16 else contextlib.nullcontext()
    with autocast, Progress("teacher", n, "tokens") as progress:
        for index, logits in read_rows(model, read, range(len(read))):
            scaled = logits / section.temperature
            best = scaled.topk(k).indices
            start, end = read.starts[index : index + 2]
            files["ids"][start:end] = best.cpu().numpy()
            files["log_probs"][start:end] = log_probs_of(scaled, best).cpu().numpy()
            progress.advance(len(best))
    model.train(was_training)
    for file in files.values():
        file.flush()


def read_rows(model: Any, read: TeacherRows, indices: Iterable[int]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (number, logits of its learned tokens [tokens, vocabulary] in float32) of each of the rows that has a teacher.

    Rows with the same head share a pass over it, if the model's cache of keys and values gives the same log-probs as a pass
    over the whole; otherwise each is read whole.
    """
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index in indices:
        if read.has_teacher(index):
            groups[tuple(np.asarray(read.heads[index].input_ids).tolist())].append(index)
    alone = [(head, index) for head, members in groups.items() if len(members) == 1 for index in members]
    shared = {head: members for head, members in groups.items() if len(members) > 1}
    if shared and not _can_share(model, read, *next(iter(shared.items()))):
        alone += [(head, index) for head, members in shared.items() for index in members]
        shared = {}
    vocabulary = int(model.config.get_text_config().vocab_size)
    most = max(1, min(_BATCH_TOKENS, _BATCH_LOGITS // vocabulary))
    for head, members in shared.items():
        cache = _cache_of(model, head)
        for batch in _batches([(read.tail(index), index) for index in members], most):
            yield from _read_tails(model, read, batch, head, cache)
    for batch in _batches([((*head[1:], *read.tail(index)), index) for head, index in alone], most):
        yield from _read_whole(model, read, batch)


def _batches(texts: Iterable[tuple[Sequence[int], int]], most: int) -> Iterator[list[int]]:
    """Yield row numbers whose texts, padded to the longest, have at most `most` tokens; the longest come first."""
    batch: list[int] = []
    width = 0
    for text, index in sorted(texts, key=lambda item: -len(item[0])):
        if batch and (len(batch) + 1) * width > most:
            yield batch
            batch = []
        width = width if batch else len(text)
        batch.append(index)
    if batch:
        yield batch


def _cache_of(model: Any, head: Sequence[int]) -> Any:
    """Return the keys and values of all tokens of a head but the last."""
    return model(input_ids=torch.tensor([head[:-1]], device=model.device), use_cache=True).past_key_values


def _read_tails(
    model: Any, read: TeacherRows, batch: Sequence[int], head: Sequence[int], cache: Any
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the logits of rows with one head, whose keys and values are `cache`."""
    past = copy.deepcopy(cache)
    past.batch_repeat_interleave(len(batch))
    texts = [[head[-1], *read.tail(index)[:-1]] for index in batch]
    logits = _logits(model, texts, len(head) - 1, past_key_values=past, use_cache=True)
    for number, index in enumerate(batch):
        yield index, logits[number, read.learned_in_tail(index)].float()


def _read_whole(model: Any, read: TeacherRows, batch: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the logits of rows that are read with their heads."""
    heads = [np.asarray(read.heads[index].input_ids).tolist() for index in batch]
    texts = [[*head, *read.tail(index)[:-1]] for head, index in zip(heads, batch, strict=True)]
    logits = _logits(model, texts, 0, use_cache=False)
    for number, (head, index) in enumerate(zip(heads, batch, strict=True)):
        places = torch.tensor(read.learned_in_tail(index)) + len(head) - 1
        yield index, logits[number, places].float()


def _logits(model: Any, texts: Sequence[Sequence[int]], start: int, **options: Any) -> torch.Tensor:
    """Return the logits [texts, longest, vocabulary] after each token of `texts`, whose positions begin at `start`."""
    width = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts], device=model.device)
    positions = torch.arange(start, start + width, device=model.device).expand(len(texts), width)
    logits: torch.Tensor = model(input_ids=ids, position_ids=positions, **options).logits
    return logits


def _can_share(model: Any, read: TeacherRows, head: Sequence[int], members: Sequence[int]) -> bool:
    """Return whether rows behind a shared head get the predictions that they get behind a head of their own."""
    if len(head) < 2:
        return False
    some = members[:2]
    try:
        shared = dict(_read_tails(model, read, some, head, _cache_of(model, head)))
    except (AttributeError, TypeError, ValueError, NotImplementedError):  # a model without such a cache
        return False
    whole = dict(_read_whole(model, read, some))
    tolerance = _TOLERANCE.get(model.dtype, _COARSE) if not torch.is_autocast_enabled(model.device.type) else _COARSE
    return all(
        bool((shared[index].log_softmax(-1) - whole[index].log_softmax(-1)).abs().max() < tolerance) for index in some
    )
