"""The token tree: shared prefixes of sequences are in it once; a plan lists the forward passes that
read it.

Sorted by their tokens, sequences that share a prefix are neighbours. The length of the prefix that
each shares with the one before it (`lcp`) defines the whole tree. A plan shares tokens in two ways:
a *node* is a prefix that is read once, and its keys and values are kept for its descendants; a
*row* is a part of the tree in one sequence, in which each token attends to its own ancestors only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]

_OPEN_ROWS = 16  # last rows that may still get a part of the tree


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Row lengths and costs, in tokens: the usual length `row`, the greatest length `longest`.

    `width` is the number of attended tokens whose attention costs as much as the rest of the layer,
    and `overhead` the fixed cost of a forward pass.
    """

    row: int = 256
    longest: int = 2048
    width: int = 2048
    overhead: int = 64


@dataclass(frozen=True, slots=True)
class Leaf:
    """One sequence to score: the model reads `tokens`; the token at depth ``first + i`` predicts
    `targets[i]`."""

    tokens: Ids
    first: int
    targets: Ids


@dataclass(frozen=True, slots=True)
class Row:
    """A part of the tree in one sequence, below a node of depth `base`.

    `tokens` and `depths` have shape [L]. Each segment (start, end, parent) is a run of consecutive
    tokens below the token at index `parent` (-1: the node). Score i is that of token `targets[i]`
    after the token at `indices[i]`, for leaf `owners[i]`. `members` are the leaves in the row.
    """

    base: int
    tokens: Ids
    depths: Ids
    segments: tuple[tuple[int, int, int], ...]
    indices: Ids
    targets: Ids
    owners: Ids
    members: tuple[int, ...]

    def ancestors(self) -> npt.NDArray[np.bool_]:
        """Return the attention mask of the row, shape [L, L]: each token attends to itself and its
        ancestors."""
        n = len(self.tokens)
        mask = np.zeros((n, n), dtype=np.bool_)
        for start, end, parent in self.segments:
            if parent >= 0:
                mask[start:end] = mask[parent]
            mask[start:end, start:end] = np.tri(end - start, dtype=np.bool_)
        return mask


@dataclass(slots=True)
class Node:
    """A prefix whose keys and values are kept: `tokens` follow the parent node and end at
    `depth`."""

    tokens: Ids
    depth: int
    rows: list[Row] = field(default_factory=list)
    children: list[Node] = field(default_factory=list)

    def n_tokens(self) -> int:
        """Return the number of tokens that the plan reads, without padding."""
        return (
            len(self.tokens)
            + sum(len(row.tokens) for row in self.rows)
            + sum(child.n_tokens() for child in self.children)
        )


# Letters with five examples: 14.2 times the questions of lm-evaluation-harness (docs/figures.md).
class Tree:
    """Leaves in sorted order with their shared prefixes. `n_tokens` is the minimum to read: each
    token once."""

    def __init__(self, leaves: Sequence[Leaf], chosen: Sequence[int] | None = None) -> None:
        """Sort those of `leaves` that are `chosen` by their indices (None: all); rows refer to them
        by these."""
        if chosen is None:
            chosen = range(len(leaves))
        # Big-endian, so that bytes have the order of the numbers.
        keys = {index: leaves[index].tokens.astype(">i4").tobytes() for index in chosen}
        self.order = sorted(chosen, key=keys.__getitem__)
        self.leaves = [leaves[index] for index in self.order]
        self.lengths = np.array([len(leaf.tokens) for leaf in self.leaves], dtype=np.int64)
        self.lcp = np.zeros(len(self.leaves) + 1, dtype=np.int64)
        for i in range(1, len(self.leaves)):
            self.lcp[i] = _common_length(self.leaves[i - 1].tokens, self.leaves[i].tokens)
        self.firsts = np.array([leaf.first for leaf in self.leaves], dtype=np.int64)
        self._sums = np.concatenate([[0], np.cumsum(self.lengths - self.lcp[:-1])])
        self.n_tokens = int(self._sums[-1])

    def size(self, low: int, high: int, base: int) -> int:
        """Return the number of tokens of leaves [low, high) below their shared depth `base`."""
        return int(self._sums[high] - self._sums[low] + self.lcp[low]) - base

    def shared_depth(self, low: int, high: int) -> int:
        """Return the depth down to which leaves [low, high) are equal and nothing is scored."""
        deepest = int(self.lcp[low + 1 : high].min()) if high - low > 1 else int(self.lengths[low])
        return min(deepest, int(self.firsts[low:high].min()))

    def make_row(self, members: Sequence[int], base: int) -> Row:
        """Return sorted leaves `members` as one row below a node of depth `base`."""
        tokens: list[Ids] = []
        depths: list[Ids] = []
        indices: list[Ids] = []
        segments: list[tuple[int, int, int]] = []
        path = np.zeros(int(self.lengths[list(members)].max(initial=0)), dtype=np.int32)
        n, before = 0, -1
        for member in members:
            leaf = self.leaves[member]
            # Members need not be neighbours: the shortest prefix between two of them is common.
            start = base if before < 0 else max(base, int(self.lcp[before + 1 : member + 1].min()))
            n_new = len(leaf.tokens) - start
            if n_new > 0:
                segments.append((n, n + n_new, int(path[start - 1]) if start > base else -1))
                path[start : len(leaf.tokens)] = np.arange(n, n + n_new)
                tokens.append(leaf.tokens[start:])
                depths.append(np.arange(start, len(leaf.tokens), dtype=np.int32))
                n += n_new
            indices.append(path[leaf.first : leaf.first + len(leaf.targets)].copy())
            before = member
        return Row(
            base=base,
            tokens=np.concatenate(tokens),
            depths=np.concatenate(depths),
            segments=tuple(segments),
            indices=np.concatenate(indices),
            targets=np.concatenate([self.leaves[member].targets for member in members]),
            owners=np.concatenate(
                [
                    np.full(len(self.leaves[m].targets), self.order[m], dtype=np.int32)
                    for m in members
                ]
            ),
            members=tuple(members),
        )

    def plan(self, limits: RowLimits) -> Node:
        """Return the forward passes that read the whole tree: nodes within nodes, each with its
        rows."""
        root = Node(np.zeros(0, dtype=np.int32), 0)
        waiting = [(root, 0, len(self.leaves))]
        while waiting:
            node, low, high = waiting.pop()
            in_rows, in_nodes = self._divide(low, high, node.depth, limits)
            node.rows = self._fill_rows(in_rows, node.depth, limits)
            for first, last in in_nodes:
                depth = self.shared_depth(first, last)
                child = Node(self.leaves[first].tokens[node.depth : depth], depth)
                node.children.append(child)
                waiting.append((child, first, last))
        return root

    def plan_unshared(self) -> Node:
        """Return a plan without sharing: one row for each sequence, except for those that are a
        prefix of another."""
        root = Node(np.zeros(0, dtype=np.int32), 0)
        members: list[int] = []
        for i in range(len(self.leaves)):
            members.append(i)
            # A sequence that is a prefix of the next one is scored in the row of that one.
            if self.lcp[i + 1] < self.lengths[i]:
                root.rows.append(self.make_row(members, 0))
                members = []
        return root

    def _divide(
        self, low: int, high: int, base: int, limits: RowLimits
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return the ranges of leaves in [low, high) that go into rows, and those that become
        nodes."""
        in_rows: list[tuple[int, int]] = []
        in_nodes: list[tuple[int, int]] = []
        waiting = [(low, high)]
        while waiting:
            first, last = waiting.pop()
            if last <= first:
                continue
            size = self.size(first, last, base)
            # A single sequence cannot be divided, however long it is.
            if size <= limits.row or last - first == 1:
                in_rows.append((first, last))
                continue
            depth = self.shared_depth(first, last)
            branching = max(depth, int(self.lcp[first + 1 : last].min()))
            cuts = [i for i in range(first + 1, last) if self.lcp[i] <= branching]
            match _cheapest(size, max(0, depth - base), len(cuts) + 1, base, limits):
                case "row":
                    in_rows.append((first, last))
                case "node":
                    in_nodes.append((first, last))
                case "split":
                    # `waiting` is a stack: reversed, the ranges come out in order.
                    edges = [first, *cuts, last]
                    waiting.extend(reversed(list(pairwise(edges))))
        return in_rows, in_nodes

    def _fill_rows(
        self, ranges: Sequence[tuple[int, int]], base: int, limits: RowLimits
    ) -> list[Row]:
        """Return ranges of leaves in rows of about the usual length: each in the first of the last
        few with room."""
        rows: list[list[int]] = []
        filled: list[int] = []
        for low, high in ranges:
            size = self.size(low, high, base)
            first = self.leaves[low].tokens
            for index in range(max(0, len(rows) - _OPEN_ROWS), len(rows)):
                in_row = _common_length(self.leaves[rows[index][-1]].tokens, first)
                if filled[index] + size - (in_row - base) <= limits.row:
                    rows[index].extend(range(low, high))
                    filled[index] += size - (in_row - base)
                    break
            else:
                rows.append(list(range(low, high)))
                filled.append(size)
        return [self.make_row(members, base) for members in rows]


def _cheapest(size: int, shared: int, n_parts: int, base: int, limits: RowLimits) -> str:
    """Return the cheapest way to read `size` tokens with a common prefix of `shared`: row, node or
    split.

    Costs are in tokens: each token costs one, and one more for each `limits.width` tokens that it
    attends to.
    """
    width, row = limits.width, limits.row
    costs = {}
    if size <= limits.longest:
        costs["row"] = size * (1 + (base + size) / width)
    if shared:
        suffixes = (size - shared) * (1 + (base + shared + row) / width)
        costs["node"] = limits.overhead + shared * (1 + (base + shared) / width) + suffixes
    n_rows = n_parts if shared >= row else min(n_parts, -(-(size - shared) // (row - shared)))
    costs["split"] = (size + shared * (n_rows - 1)) * (1 + (base + row) / width)
    return min(costs, key=costs.__getitem__)


def _common_length(a: Ids, b: Ids) -> int:
    """Return the length of the common prefix of `a` and `b`."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
