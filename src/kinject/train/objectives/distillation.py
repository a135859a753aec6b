"""Context distillation: the loss, and its teacher, the model before training (arXiv 2209.15189, 2412.14964).

It is frozen, so each of its predictions is made once, before training, and kept in corpus.cache_dir by the content of
weights, head and text.

An entry of that cache is a folder: ``starts.bin`` (int64, the first prediction of each row, and their number),
``log_probs.bin`` (float32) and ``ids.bin`` (uint32), as in `Predictions`, and ``cost.json`` (the tokens that the teacher read
and the seconds of that, by `work_seconds`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from peft import PeftModel

from kinject import models
from kinject.corpus.tokenize import IGNORED, cached_entry, mapped
from kinject.disk import content_id, read_json, write_json
from kinject.process import work_seconds
from kinject.recipe import DistillationSection, TrainRecipe
from kinject.terminal import Progress
from kinject.train.contexts import NO_TEACHER, TeacherRows, section_of
from kinject.train.loss import Objective, Predictions, divergence, log_probs_of

_FORMAT = 2
"""Format of cache entries. It changes with their files."""
_COST = "cost.json"
_BATCH_TOKENS = 8192
"""Tokens of one pass of the teacher, padding included, at most."""
_BATCH_LOGITS = 1 << 26
"""Logits of one pass at most (256 MiB in float32)."""


class Distillation(Objective):
    """Where a teacher's predictions are given, the loss of a token is the divergence from them (arXiv 2209.15189).

    A fraction of it is cross-entropy.
    """

    needs_teacher = True

    def __init__(self, section: DistillationSection) -> None:
        self.section = section

    @classmethod
    def is_on(cls, name: str, recipe: TrainRecipe) -> bool:
        """Return whether the recipe distils."""
        return recipe.method == "distill"

    @classmethod
    def make(cls, name: str, recipe: TrainRecipe) -> Distillation:
        """Return the objective with the recipe's section."""
        return cls(section_of(recipe))

    def by_token(
        self, losses: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, teacher: Predictions | None
    ) -> torch.Tensor:
        """Return the divergences in place of the losses of tokens that the teacher predicts."""
        if teacher is None or not bool(teacher.has_target.any()):
            return losses
        section, indices = self.section, teacher.has_target.nonzero()[:, 0]
        distances = divergence(logits[indices], teacher.log_probs[indices], teacher.ids[indices])
        weight = 1 - section.cross_entropy
        return losses.index_copy(0, indices, weight * distances + section.cross_entropy * losses[indices])


class Teacher:
    """Predicts the tokens of rows, each by its number (`TeacherRows`), from an entry of the cache that is mapped from disk."""

    def __init__(self, folder: Path) -> None:
        """Map the entry in `folder`."""
        self.starts = mapped(folder / "starts.bin", np.int64)
        n = int(self.starts[-1])
        self._log_probs = mapped(folder / "log_probs.bin", np.float32).reshape(n, -1)
        self._ids = mapped(folder / "ids.bin", np.uint32).reshape(n, -1)

    def predictions(self, numbers: torch.Tensor) -> Predictions:
        """Return the predictions with these `numbers` [tokens], on their device; zeros for `NO_TEACHER`."""
        device, has_target = numbers.device, numbers != NO_TEACHER
        index = numbers.cpu().numpy()
        picked, positions = index[index != NO_TEACHER], has_target.nonzero()[:, 0]
        log_probs = torch.zeros(len(index), self._log_probs.shape[1], device=device)
        ids = torch.zeros(len(index), self._ids.shape[1], dtype=torch.long, device=device)
        log_probs[positions] = torch.from_numpy(self._log_probs[picked]).to(device)
        ids[positions] = torch.from_numpy(self._ids[picked].astype(np.int64)).to(device)
        return Predictions(has_target, log_probs, ids)

    def of_batch(self, batch: Mapping[str, torch.Tensor]) -> Predictions:
        """Return the predictions of the token after each one of `batch`, which holds labels and teacher [batch, length]."""
        numbers = batch["teacher"][:, 1:].masked_fill(batch["labels"][:, 1:] == IGNORED, NO_TEACHER)
        return self.predictions(F.pad(numbers, (0, 1), value=NO_TEACHER).flatten())


@contextlib.contextmanager
def as_frozen(model: Any) -> Iterator[None]:
    """Put `model` into evaluation mode, the adapter of a peft model switched off."""
    was_training = model.training
    model.eval()
    with model.disable_adapter() if isinstance(model, PeftModel) else contextlib.nullcontext():
        yield
    model.train(was_training)


def make_teacher(
    recipe: TrainRecipe, read: TeacherRows, model: Any, weights: str, *, bf16: bool
) -> tuple[Teacher, str, dict[str, float]]:  # fmt: skip
    """Return the teacher of a run, a note, and the cost of its predictions (teacher_tokens, teacher_seconds).

    The predictions are in the cache, which keeps their cost, or made by `model` and stored. `model`
    is the base as it was loaded, with or without an adapter; `weights` is its hash, "" to compute it. `bf16`: under autocast.
    """
    section = section_of(recipe)
    is_made = False

    def write(folder: Path) -> None:
        nonlocal is_made
        began, is_made = work_seconds(model.device.type), True
        with as_frozen(model):
            _write_predictions(folder, read, model, section, bf16=bf16)
        spent = {
            "teacher_tokens": read.count_read(),
            "teacher_seconds": round(work_seconds(model.device.type) - began, 2),
        }
        write_json(folder / _COST, spent)

    key = content_id(
        "predictions", _FORMAT, read.key, weights or _identity(recipe, model), str(model.dtype), bf16, section.top_k,
        recipe.model.quantization,
    )  # fmt: skip
    folder = cached_entry(Path(recipe.corpus.cache_dir), key, write)
    teacher = Teacher(folder)
    n, n_bytes = int(teacher.starts[-1]), sum(path.stat().st_size for path in folder.iterdir())
    cost = read_json(folder / _COST, "Delete it; the predictions are made again.")
    origin = f"made in {cost['teacher_seconds']:.1f} s" if is_made else "read from the cache"
    note = f"distillation: {n:,} predictions of the teacher {origin} ({n_bytes / 2**20:,.0f} MiB in {folder})"
    return teacher, note, cost


def _identity(recipe: TrainRecipe, model: Any) -> str:
    path = Path(str(recipe.model.path))
    return models.model_hash(path) if path.exists() else f"{path}@{getattr(model.config, '_commit_hash', '')}"


@torch.no_grad()
def _write_predictions(
    folder: Path, read: TeacherRows, model: Any, section: DistillationSection, *, bf16: bool
) -> None:
    """Write the predictions of all rows of `read` into `folder`."""
    n, vocabulary = int(read.starts[-1]), int(model.config.get_text_config().vocab_size)
    k = min(section.top_k, vocabulary)
    read.starts.tofile(folder / "starts.bin")
    shapes = {"ids": (np.uint32, k), "log_probs": (np.float32, k + (k < vocabulary))}
    files = {
        name: np.memmap(folder / f"{name}.bin", kind, "w+", shape=(n, width)) for name, (kind, width) in shapes.items()
    }
    autocast = torch.autocast(model.device.type, torch.bfloat16) if bf16 else contextlib.nullcontext()
    with autocast, Progress("teacher", n, "tokens") as progress:
        for indices, logits in read_rows(model, read):
            best = logits.topk(k).indices
            positions = np.concatenate([np.arange(*read.starts[index : index + 2]) for index in indices])
            files["ids"][positions] = best.cpu().numpy()
            files["log_probs"][positions] = log_probs_of(logits, best).cpu().numpy()
            progress.advance(len(best))
    for file in files.values():
        file.flush()


def read_rows(model: Any, read: TeacherRows) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Yield (numbers, logits of their learned tokens [tokens, vocabulary] in float32) of batches of rows with a teacher."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    most = max(1, min(_BATCH_TOKENS, _BATCH_LOGITS // vocabulary))
    lengths = [
        (len(read.heads[index].input_ids) + read.heads[index].n_left_out - 1, index)
        for index in range(len(read)) if read.has_teacher(index)
    ]  # fmt: skip
    for batch in _batches(lengths, most):
        yield batch, _read(model, read, batch)


def _batches(lengths: Iterable[tuple[int, int]], most: int) -> Iterator[list[int]]:
    """Yield row numbers of (tokens, row number), padded to the longest at most `most` tokens; the longest come first."""
    batch: list[int] = []
    width = 0
    for length, index in sorted(lengths, reverse=True):
        if batch and (len(batch) + 1) * width > most:
            yield batch
            batch = []
        width = width if batch else length
        batch.append(index)
    if batch:
        yield batch


def _read(model: Any, read: TeacherRows, batch: Sequence[int]) -> torch.Tensor:
    """Return the logits [tokens, vocabulary] in float32 of the learned tokens of rows behind their heads, row after row."""
    texts = [[*read.head(index), *read.tail(index)[:-1]] for index in batch]
    width = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts], device=model.device)
    positions = torch.arange(width, device=model.device).expand(len(texts), width)
    logits: torch.Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    places = [
        (number, len(read.head(index)) - 1 + place)
        for number, index in enumerate(batch) for place in read.learned_in_tail(index)
    ]  # fmt: skip
    rows, columns = zip(*places, strict=True)
    return logits[list(rows), list(columns)].float()
