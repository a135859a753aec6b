from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kinject.eval.scoring.tree import Leaf, Node, RowLimits, Tree


def leaf(context: list[int], targets: list[int]) -> Leaf:
    return Leaf(
        np.array(context + targets[:-1], dtype=np.int32),
        len(context) - 1,
        np.array(targets, dtype=np.int32),
    )


def read_back(
    node: Node, above: list[int], targets: dict[int, list[tuple[list[int], int]]]
) -> None:
    """Collect, for each leaf, every (tokens attended to in order of depth, target) that the plan asks for."""
    beginning = above + node.tokens.tolist()
    assert len(beginning) == node.depth
    for row in node.rows:
        assert row.base == node.depth
        mask = row.ancestors()
        for index, target, owner in zip(row.indices, row.targets, row.owners, strict=True):
            seen = np.flatnonzero(mask[index])
            assert sorted(row.depths[seen].tolist()) == list(
                range(node.depth, row.depths[index] + 1)
            )
            path = seen[np.argsort(row.depths[seen])]
            targets.setdefault(int(owner), []).append(
                (beginning + row.tokens[path].tolist(), int(target))
            )
    for child in node.children:
        read_back(child, beginning, targets)


tokens = st.integers(0, 2)  # few symbols: many shared beginnings
leaves = st.lists(
    st.builds(
        leaf, st.lists(tokens, min_size=1, max_size=12), st.lists(tokens, min_size=1, max_size=4)
    ),
    min_size=1,
    max_size=25,
)
limits = st.builds(
    RowLimits,
    row=st.integers(1, 12),
    longest=st.integers(1, 40),
    width=st.just(64),
    overhead=st.sampled_from([0, 5, 99]),
)


@settings(max_examples=300, deadline=None)
@given(leaves, limits, st.booleans())
def test_every_target_is_asked_once_with_its_own_tokens_before_it(items, bounds, lines):
    tree = Tree(items)
    plan = tree.plan_unshared() if lines else tree.plan(bounds)
    targets: dict[int, list[tuple[list[int], int]]] = {}
    read_back(plan, [], targets)
    for index, item in enumerate(items):
        read = item.tokens.tolist()
        expected = [
            (read[: item.first + 1 + i], target) for i, target in enumerate(item.targets.tolist())
        ]
        assert sorted(targets[index]) == sorted(expected)


@settings(max_examples=100, deadline=None)
@given(leaves)
def test_the_least_is_the_number_of_different_beginnings(items):
    beginnings = {
        tuple(item.tokens[: n + 1].tolist()) for item in items for n in range(len(item.tokens))
    }
    assert Tree(items).n_tokens == len(beginnings)


@settings(max_examples=100, deadline=None)
@given(leaves, limits)
def test_a_plan_reads_at_least_the_least(items, bounds):
    tree = Tree(items)
    assert tree.n_tokens <= tree.plan(bounds).n_tokens() <= sum(len(item.tokens) for item in items)


def test_a_header_that_many_share_is_read_once():
    random = np.random.default_rng(0)
    header = random.integers(0, 50, 300).tolist()
    items = [leaf(header + random.integers(0, 50, 60).tolist(), [1, 2]) for _ in range(40)]
    tree = Tree(items)
    plan = tree.plan(RowLimits())
    separate = sum(len(item.tokens) - len(header) for item in items)
    assert tree.n_tokens <= len(header) + separate
    assert plan.n_tokens() < 1.01 * (len(header) + separate)
    assert len(plan.children) == 1


@pytest.mark.parametrize("n", [1, 3])
def test_equal_prompts_are_read_once(n):
    items = [leaf([1, 2, 3], [4]) for _ in range(n)]
    assert Tree(items).plan(RowLimits()).n_tokens() == 3
