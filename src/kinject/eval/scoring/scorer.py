"""Log-probabilities of continuations: by a token tree if the model can read one, else one sequence
per row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from kinject.errors import InputError
from kinject.eval.scores import PromptScore
from kinject.eval.scoring.encode import Encoded
from kinject.eval.scoring.forward import HiddenStates, Prefix, TokenScores, TreeForward
from kinject.eval.scoring.tree import Leaf, Node, Row, RowLimits, Tree
from kinject.terminal import format_count

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MOST_LOGITS = 2**27  # elements of one logits tensor: 512 MB in float32
_HEAD_ROWS = 128  # positions collected for one pass of the head: fewer cost nearly as much
# What models raise that cannot take a mask, positions or a cache of ours.
_REFUSALS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


class Scorer:
    """Scores prompts with one model. `notes` record its decisions; `n_pushed` and `n_least` count
    tokens.

    `n_pushed` counts the tokens that went through the model, padding included; `n_least` is the
    token trees' minimum.
    """

    def __init__(
        self, model: PreTrainedModel, batch_tokens: int, limits: RowLimits | None = None
    ) -> None:
        """Take `model`; nothing is run yet."""
        self.forward = TreeForward(model)
        self.batch_tokens = batch_tokens
        self.n_pushed = self.n_least = 0
        hidden = int(getattr(self.forward.config, "hidden_size", 0) or 1024)
        overhead = 64 if self.forward.device.type == "cpu" else 512
        self.limits = limits or RowLimits(width=max(2048, 4 * hidden), overhead=overhead)
        self.notes = self.forward.notes

    @cached_property
    def uses_tree(self) -> bool:
        """Whether the model reads a tree as it reads plain rows, by its configuration and by a
        small test.

        The test runs first with the head apart from the layers; if that fails, with both in one
        pass.
        """
        reason = self.forward.why_not_tree()
        if not reason:
            reason = self._test_tree(split=True)
            self.forward.split = not reason
            if reason:
                reason = self._test_tree(split=False)
                self.forward.split = False
        if reason:
            self.notes.append(f"plain rows, nothing shared between prompts: {reason}")
        return not reason

    def score(self, prompts: Sequence[Encoded]) -> Iterator[tuple[int, PromptScore]]:
        """Yield (index, score) of every prompt, in the order in which they are finished.

        Log-probs are natural logarithms, summed over the continuation's tokens; NaN for an empty
        continuation. Raises `InputError` if a pass does not fit into memory.
        """
        leaves, owners = _make_leaves(prompts)
        sums = [np.zeros(len(prompt.continuations)) for prompt in prompts]
        greedy = [[len(ids) > 0 for ids in prompt.continuations] for prompt in prompts]
        open_leaves = [0] * len(prompts)
        for owner, _ in owners:
            open_leaves[owner] += 1
        for index, prompt in enumerate(prompts):
            for choice, continuation in enumerate(prompt.continuations):
                if not len(continuation):
                    sums[index][choice] = np.nan
            # None of its continuations can be scored, so no row will finish it.
            if not open_leaves[index]:
                yield index, PromptScore(tuple(sums[index].tolist()), tuple(greedy[index]))
        for rows, scores in self._score_leaves(leaves):
            start = 0
            for row in rows:
                part = slice(start, start + len(row.targets))
                start += len(row.targets)
                tokens = zip(
                    row.owners.tolist(),
                    scores.log_probs[part].tolist(),
                    scores.greedy[part].tolist(),
                    strict=True,
                )
                for leaf, log_prob, is_likeliest in tokens:
                    index, choice = owners[leaf]
                    sums[index][choice] += log_prob
                    greedy[index][choice] &= is_likeliest
                for leaf in sorted(set(row.owners.tolist())):
                    index = owners[leaf][0]
                    open_leaves[index] -= 1
                    if not open_leaves[index]:
                        yield index, PromptScore(tuple(sums[index].tolist()), tuple(greedy[index]))

    def _score_leaves(self, leaves: Sequence[Leaf]) -> Iterator[tuple[list[Row], TokenScores]]:
        """Yield rows with their scores, until every leaf is scored."""
        limit = self.forward.longrope_window
        long = [
            i for i, leaf in enumerate(leaves) if limit is not None and len(leaf.tokens) > limit
        ]
        short = sorted(set(range(len(leaves))) - set(long))
        if short:
            yield from self._score_rows(leaves, short, use_tree=self.uses_tree)
        if long:
            # Not beside short ones, whose frequencies a long one would change, and in no tree: the
            # keys of a beginning that is read by itself are those of a short one.
            note = (
                f"plain rows for sequences of over {limit:,} tokens, which longrope reads otherwise"
            )
            if note not in self.notes:
                self.notes.append(note)
            yield from self._score_rows(leaves, long, use_tree=False)

    def _score_rows(
        self, leaves: Sequence[Leaf], chosen: Sequence[int], *, use_tree: bool
    ) -> Iterator[tuple[list[Row], TokenScores]]:
        """Yield rows of the `chosen` leaves (their indices) with their scores."""
        tree = Tree(leaves, chosen)
        self.n_least += tree.n_tokens
        # No row may be longer than a pass.
        limits = replace(self.limits, longest=min(self.limits.longest, self.batch_tokens))
        pending = [(tree.plan(limits) if use_tree else tree.plan_unshared(), Prefix())]
        for_head: list[tuple[list[Row], HiddenStates]] = []  # batches of one pass of the head
        n_positions = 0
        while pending:
            node, parent = pending.pop()
            prefix = self._extend(node, parent)
            rows = sorted(node.rows, key=lambda row: len(row.tokens), reverse=True)
            while rows:
                batch, rows = self._next_batch(rows)
                for_head.append((batch, self._read_batch(batch, prefix, use_tree=use_tree)))
                n_positions += sum(len(np.unique(row.indices)) for row in batch)
                # One call of the head for 128 positions, none for shared beginnings: 0.44 of the
                # time of six runs.
                if not self.forward.split or n_positions >= _HEAD_ROWS:
                    yield from self._apply_head(for_head)
                    for_head, n_positions = [], 0
            # Depth first: the keys and values of one branch are in memory at a time.
            pending.extend((child, prefix) for child in reversed(node.children))
        yield from self._apply_head(for_head)

    def _apply_head(
        self, parts: Sequence[tuple[list[Row], HiddenStates]]
    ) -> Iterator[tuple[list[Row], TokenScores]]:
        """Yield the scores of rows that went through the layers."""
        if parts:
            with self._memory(sum(len(states.states) for _, states in parts)):
                scores = self.forward.scores([states for _, states in parts])
            yield from ((rows, part) for (rows, _), part in zip(parts, scores, strict=True))

    def _next_batch(self, rows: list[Row]) -> tuple[list[Row], list[Row]]:
        """Return the first rows that fit into one pass, at least one, and the rest. `rows` are
        longest first."""
        longest = len(rows[0].tokens)
        n_most = max(1, self.batch_tokens // longest)
        room, waste = _MOST_LOGITS // self.forward.vocab_size, self.limits.overhead
        n_rows = 0
        for row in rows[:n_most]:
            room -= len(np.unique(row.indices))
            # More padding than the overhead costs more than one more pass.
            waste -= longest - len(row.tokens)
            if min(room, waste) < 0 and n_rows:
                break
            n_rows += 1
        return rows[:n_rows], rows[n_rows:]

    def _extend(self, node: Node, parent: Prefix) -> Prefix:
        self.n_pushed += len(node.tokens)
        with self._memory(len(node.tokens)):
            return self.forward.extend(node, parent)

    def _read_batch(self, rows: list[Row], prefix: Prefix, *, use_tree: bool) -> HiddenStates:
        n_tokens = len(rows) * max(len(row.tokens) for row in rows)
        self.n_pushed += n_tokens
        with self._memory(n_tokens):
            return self._read(rows, prefix, use_tree=use_tree)

    def _read(self, rows: list[Row], prefix: Prefix, *, use_tree: bool) -> HiddenStates:
        if use_tree:
            return self.forward.read_tree(rows, prefix)
        return self.forward.read_unshared(rows)

    @contextmanager
    def _memory(self, n_tokens: int) -> Iterator[None]:
        """Raise `InputError` where the block runs out of memory with `n_tokens` in one pass."""
        try:
            yield
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise InputError(
                f"Out of memory with {format_count(n_tokens, 'token')} in one pass. Lower "
                f"eval.batch_tokens ({self.batch_tokens}), or use shorter passages, fewer examples "
                "or a smaller dtype."
            ) from error

    def _test_tree(self, *, split: bool) -> str:
        """Return why the tree must not be used (the model fails, or its scores differ from plain
        rows); "" if it may."""
        leaves = _test_leaves(self.forward.vocab_size)
        self.forward.split = False
        plain = self._test_scores(leaves, use_tree=False)
        self.forward.split = split
        try:
            shared = self._test_scores(leaves, use_tree=True)
        except _REFUSALS as error:
            # Too little memory is no fault of the architecture.
            if is_out_of_memory(error):
                raise
            # Some errors have no text.
            fault = repr(error)
            if str(error):
                fault = str(error).splitlines()[0][:120]
            return f"this architecture refuses a tree ({fault})"
        gap = float(np.abs(plain - shared).max())
        tolerance = 1e-3 if self.forward.model.dtype in (torch.float32, torch.float64) else 0.5
        # NaN comes from the model itself and shows in the answers: it is no gap.
        if gap > tolerance:
            return f"this architecture reads a tree differently (by {gap:.2g} in a test)"
        return ""

    def _test_scores(self, leaves: Sequence[Leaf], *, use_tree: bool) -> npt.NDArray[np.float64]:
        tree = Tree(leaves)
        root = tree.plan_unshared()
        if use_tree:
            # So short that the common tokens become a node and the rest branches within rows.
            root = tree.plan(RowLimits(row=16, longest=16, overhead=0))
        sums = np.zeros(len(leaves))
        pending = [(root, Prefix())]
        while pending:
            node, parent = pending.pop()
            prefix = self.forward.extend(node, parent)
            if node.rows:
                states = self._read(node.rows, prefix, use_tree=use_tree)
                (scores,) = self.forward.scores([states])
                # A leaf has an entry for each of its tokens, of which `+=` would count one.
                np.add.at(sums, np.concatenate([row.owners for row in node.rows]), scores.log_probs)
            pending.extend((child, prefix) for child in node.children)
        return sums


def _make_leaves(prompts: Sequence[Encoded]) -> tuple[list[Leaf], list[tuple[int, int]]]:
    """Return one leaf for each continuation that has tokens, and (prompt, choice) of each leaf."""
    leaves: list[Leaf] = []
    owners: list[tuple[int, int]] = []
    for index, prompt in enumerate(prompts):
        for choice, (context, target) in enumerate(
            zip(prompt.contexts, prompt.continuations, strict=True)
        ):
            if len(target):
                tokens = np.concatenate([context, target[:-1]]) if len(target) > 1 else context
                leaves.append(Leaf(tokens, len(context) - 1, target))
                owners.append((index, choice))
    return leaves, owners


def is_out_of_memory(error: Exception) -> bool:
    """Return whether `error` means that memory is full."""
    # torch's allocator of the CPU raises a plain RuntimeError with these words.
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _test_leaves(vocab_size: int) -> list[Leaf]:
    """Return a few sequences that branch twice, below a prefix long enough to become a node."""
    random = np.random.default_rng(0)
    start = random.integers(0, vocab_size, 12, dtype=np.int32)
    leaves = []
    for _ in range(2):
        middle = random.integers(0, vocab_size, 4, dtype=np.int32)
        for _ in range(2):
            tail = random.integers(0, vocab_size, 5, dtype=np.int32)
            leaves.append(Leaf(np.concatenate([start, middle, tail[:-1]]), 15, tail))
    return leaves
