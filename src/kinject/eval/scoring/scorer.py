"""Log-probabilities of continuations: a token tree where the model can read one, plain rows elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from kinject.errors import InputError
from kinject.eval.scoring.encode import Encoded
from kinject.eval.scoring.forward import Passes, Prefix, Read, Scores
from kinject.eval.scoring.tree import Leaf, Limits, Node, Row, Tree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MOST_LOGITS = 2**27  # elements of one logits tensor: 512 MB in float32
_LEAST_BATCH = 64
_HEAD_ROWS = 128  # positions that the head waits for: fewer cost it nearly as much
_REFUSALS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Reading:
    """What a model said of one prompt: for each continuation its log-prob, and whether it would have written it.

    `greedy` is lm-evaluation-harness's is_greedy: every token of the continuation was the likeliest.
    """

    log_probs: tuple[float, ...]
    greedy: tuple[bool, ...]


@dataclass(slots=True)
class _Place:
    """A node on its way: `prefix` is read when rows first need it, on top of that of `above`."""

    node: Node
    above: _Place | None
    prefix: Prefix | None = None


class Scorer:
    """A model ready to score. `notes` say what was decided on the way; `n_pushed` and `n_least` count tokens.

    `n_pushed` is what went through the model, padding included; `n_least` is the token trees' minimum.
    """

    def __init__(self, model: PreTrainedModel, batch_tokens: int, limits: Limits | None = None) -> None:
        """Take `model`; nothing is run yet."""
        self.passes = Passes(model)
        self.batch_tokens = batch_tokens
        self.n_pushed = self.n_least = 0
        hidden = int(getattr(self.passes.config, "hidden_size", 0) or 1024)
        overhead = 64 if self.passes.device.type == "cpu" else 512
        self.limits = limits or Limits(width=max(2048, 4 * hidden), overhead=overhead)
        self.notes = self.passes.notes

    @cached_property
    def shares(self) -> bool:
        """Whether the model reads a tree as it reads plain rows: by its configuration, and tried on a small example.

        First with the head apart from the layers, then, where that comes out otherwise, with both in one pass.
        """
        reason = self.passes.why_not_tree()
        for split in () if reason else (True, False):
            reason = self._try_tree(split=split)
            self.passes.split = split and not reason
            if not reason:
                break
        if reason:
            self.notes.append(f"plain rows, nothing shared between prompts: {reason}")
        return not reason

    def score(self, prompts: Sequence[Encoded]) -> Iterator[tuple[int, tuple[float, ...]]]:
        """Yield (index, log-prob of each continuation) for every prompt; see `read`."""
        for index, reading in self.read(prompts):
            yield index, reading.log_probs

    def read(self, prompts: Sequence[Encoded], known: Collection[int] = frozenset()) -> Iterator[tuple[int, Reading]]:
        """Yield (index, what the model said) for every prompt that is not `known`, in the order in which they are done.

        Known prompts keep their places in the tree and its batches, of which those with nothing else are left out: an
        interrupted reading that goes on comes to the last digit of an undisturbed one. Log-probs are natural logarithms,
        summed over the continuation's tokens; NaN for an empty continuation. Raises `InputError` when one sequence alone
        does not fit into memory.
        """
        leaves, owners = _leaves(prompts)
        sums = [np.zeros(len(prompt.continuations)) for prompt in prompts]
        greedy = [[len(ids) > 0 for ids in prompt.continuations] for prompt in prompts]
        open_leaves = [0] * len(prompts)
        for owner, _ in owners:
            open_leaves[owner] += 1
        for index, prompt in enumerate(prompts):
            for choice, continuation in enumerate(prompt.continuations):
                if not len(continuation):
                    sums[index][choice] = np.nan
            if not open_leaves[index] and index not in known:
                yield index, Reading(tuple(sums[index].tolist()), tuple(greedy[index]))
        wanted = np.array([owner not in known for owner, _ in owners], dtype=np.bool_)
        if not wanted.any():
            return
        for rows, scores in self._read(leaves, wanted, share=self.shares):
            at = 0
            for row in rows:
                part = slice(at, at + len(row.targets))
                at += len(row.targets)
                found = zip(
                    row.owners.tolist(), scores.log_probs[part].tolist(), scores.greedy[part].tolist(), strict=True
                )
                for leaf, score, is_likeliest in found:
                    index, choice = owners[leaf]
                    sums[index][choice] += score
                    greedy[index][choice] &= is_likeliest
                for leaf in sorted(set(row.owners.tolist())):
                    index = owners[leaf][0]
                    open_leaves[index] -= 1
                    if not open_leaves[index] and index not in known:
                        yield index, Reading(tuple(sums[index].tolist()), tuple(greedy[index]))

    def _read(
        self, leaves: Sequence[Leaf], wanted: npt.NDArray[np.bool_], *, share: bool
    ) -> Iterator[tuple[list[Row], Scores]]:
        """Yield rows with their scores, until every leaf that is `wanted` is read."""
        tree = Tree(leaves)
        self.n_least += tree.n_tokens
        limits = replace(self.limits, longest=min(self.limits.longest, self.batch_tokens))
        waiting = [_Place(tree.plan(limits) if share else tree.plan_lines(), None)]
        together: deque[tuple[_Place, list[Row]]] = deque()  # what one pass of the head answers
        n_asked = 0
        while waiting:
            place = waiting.pop()
            rows = sorted(place.node.rows, key=lambda row: len(row.tokens), reverse=True)
            while rows:
                batch, rows = self._next_batch(rows)
                together.append((place, batch))
                n_asked += sum(len(np.unique(row.places)) for row in batch)
                if not self.passes.split or n_asked >= _HEAD_ROWS:
                    yield from self._read_together(tree, together, wanted, share=share)
                    n_asked = 0
            waiting.extend(_Place(child, place) for child in reversed(place.node.children))
        yield from self._read_together(tree, together, wanted, share=share)

    def _read_together(
        self, tree: Tree, batches: deque[tuple[_Place, list[Row]]], wanted: npt.NDArray[np.bool_], *, share: bool
    ) -> Iterator[tuple[list[Row], Scores]]:
        """Empty `batches`, and yield their rows with scores where any leaf in them is `wanted`."""
        if not any(wanted[row.owners].any() for _, rows in batches for row in rows):
            batches.clear()
        asked: list[tuple[list[Row], Read]] = []
        while batches:
            place, rows = batches.popleft()
            asked.extend(self._read_batch(tree, rows, self._prefix(place), share=share))
        yield from self._answered(asked)

    def _prefix(self, place: _Place) -> Prefix:
        """Return the keys and values down to `place`, reading those of nodes above it that nothing has needed yet."""
        path = [place]
        while (above := path[-1].above) is not None:
            path.append(above)
        for step in reversed(path):
            if step.prefix is None:
                step.prefix = self._extend(step.node, step.above.prefix if step.above else None)
                step.above = None  # a beginning is held while something below it is still to be read
        assert place.prefix is not None
        return place.prefix

    def _answered(self, asked: Sequence[tuple[list[Row], Read]]) -> Iterator[tuple[list[Row], Scores]]:
        """Yield the scores of rows that went through the layers; out of memory, in halves."""
        if not asked:
            return
        try:
            found = self.passes.scores([read for _, read in asked])
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            if len(asked) == 1:
                raise InputError(_too_long(len(asked[0][1].states))) from error
            middle = len(asked) // 2
            yield from self._answered(asked[:middle])
            yield from self._answered(asked[middle:])
        else:
            yield from ((rows, scores) for (rows, _), scores in zip(asked, found, strict=True))

    def _next_batch(self, rows: list[Row]) -> tuple[list[Row], list[Row]]:
        """Return the first rows that fit into one pass, at least one, and the rest. `rows` come longest first."""
        longest = len(rows[0].tokens)
        n_most = max(1, self.batch_tokens // longest)
        room, waste = _MOST_LOGITS // self.passes.vocab_size, self.limits.overhead
        n_rows = 0
        for row in rows[:n_most]:
            room -= len(np.unique(row.places))
            waste -= longest - len(row.tokens)  # past what one more pass costs, padding is dearer than that pass
            if min(room, waste) < 0 and n_rows:
                break
            n_rows += 1
        return rows[:n_rows], rows[n_rows:]

    def _extend(self, node: Node, above: Prefix | None) -> Prefix:
        self.n_pushed += len(node.tokens)
        try:
            return self.passes.extend(node, Prefix() if above is None else above)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            raise InputError(_too_long(len(node.tokens))) from error

    def _read_batch(
        self, tree: Tree, rows: list[Row], prefix: Prefix, *, share: bool
    ) -> Iterator[tuple[list[Row], Read]]:
        """Yield `rows` after the layers; out of memory, in halves, and with half the budget from then on."""
        try:
            read = self.passes.read_tree(rows, prefix) if share else self.passes.read_lines(rows)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            halves = _halves(tree, rows)
            if not halves:
                raise InputError(_too_long(len(rows[0].tokens))) from error
        else:
            self.n_pushed += len(rows) * max(len(row.tokens) for row in rows)
            yield rows, read
            return
        self._shrink(len(rows) * max(len(row.tokens) for row in rows))
        for half in halves:
            yield from self._read_batch(tree, half, prefix, share=share)

    def _shrink(self, n_tokens: int) -> None:
        """Lower the token budget to half of what did not fit, and say so."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        smaller = max(_LEAST_BATCH, n_tokens // 2)
        if smaller < self.batch_tokens:
            self.batch_tokens = smaller
            self.notes.append(f"out of memory with {n_tokens} tokens in one pass; went on with at most {smaller}")

    def _try_tree(self, *, split: bool) -> str:
        """Return why the tree must not be used: the model refuses it, or reads it otherwise than plain rows."""
        leaves = _example(self.passes.vocab_size)
        self.passes.split = False
        plain = self._example_scores(leaves, share=False)
        self.passes.split = split
        try:
            shared = self._example_scores(leaves, share=True)
        except _REFUSALS as error:
            if _is_out_of_memory(error):
                raise
            return f"this architecture refuses a tree ({str(error).splitlines()[0][:120] if str(error) else error!r})"
        off = float(np.abs(plain - shared).max())
        tolerance = 1e-3 if self.passes.model.dtype in (torch.float32, torch.float64) else 0.5
        # NaN is the model's own fault and shows in the answers
        return f"this architecture reads a tree differently (by {off:.2g} in an example)" if off > tolerance else ""

    def _example_scores(self, leaves: Sequence[Leaf], *, share: bool) -> npt.NDArray[np.float64]:
        tree = Tree(leaves)
        node = tree.plan(Limits(row=16, longest=16, overhead=0)) if share else tree.plan_lines()
        sums = np.zeros(len(leaves))
        waiting = [(node, Prefix())]
        while waiting:
            node, above = waiting.pop()
            prefix = self.passes.extend(node, above)
            if node.rows:
                read = self.passes.read_tree(node.rows, prefix) if share else self.passes.read_lines(node.rows)
                (scores,) = self.passes.scores([read])
                np.add.at(sums, np.concatenate([row.owners for row in node.rows]), scores.log_probs)
            waiting.extend((child, prefix) for child in node.children)
        return sums


def _leaves(prompts: Sequence[Encoded]) -> tuple[list[Leaf], list[tuple[int, int]]]:
    """Return one leaf for each continuation that has tokens, and (prompt, choice) of each leaf."""
    leaves: list[Leaf] = []
    owners: list[tuple[int, int]] = []
    for index, prompt in enumerate(prompts):
        for choice, (context, target) in enumerate(zip(prompt.contexts, prompt.continuations, strict=True)):
            if len(target):
                read = np.concatenate([context, target[:-1]]) if len(target) > 1 else context
                leaves.append(Leaf(read, len(context) - 1, target))
                owners.append((index, choice))
    return leaves, owners


def _halves(tree: Tree, rows: list[Row]) -> list[list[Row]]:
    """Return `rows` in two batches; a single row as two rows with half its leaves each; [] for a single leaf."""
    if len(rows) > 1:
        middle = len(rows) // 2
        return [rows[:middle], rows[middle:]]
    members, base = rows[0].members, rows[0].base
    middle = len(members) // 2
    return [[tree.row(members[:middle], base)], [tree.row(members[middle:], base)]] if middle else []


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _too_long(n_tokens: int) -> str:
    return f"Out of memory with {n_tokens} tokens in one pass. Use shorter passages, fewer examples or a smaller dtype."


def _example(vocab_size: int) -> list[Leaf]:
    """Return a few sequences that branch twice, below a beginning long enough to be kept."""
    random = np.random.default_rng(0)
    start = random.integers(0, vocab_size, 12, dtype=np.int32)
    leaves = []
    for _ in range(2):
        middle = random.integers(0, vocab_size, 4, dtype=np.int32)
        for _ in range(2):
            tail = random.integers(0, vocab_size, 5, dtype=np.int32)
            leaves.append(Leaf(np.concatenate([start, middle, tail[:-1]]), 15, tail))
    return leaves
