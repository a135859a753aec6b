"""Packing keeps every token, learns each once, and the account says so."""

from __future__ import annotations

import random
from collections import Counter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinject.corpus.packing import PackingConfig, pack
from kinject.corpus.tokenize import IGNORED, TokenRow

ROWS = st.lists(
    st.tuples(
        st.integers(1, 40), st.integers(0, 10)
    ),  # length, length of the prompt that is read only
    min_size=1,
    max_size=30,
)


def _rows(shapes: list[tuple[int, int]]) -> list[TokenRow]:
    """Rows whose tokens are all different, so that each can be found again."""
    rows, token = [], 0
    for index, (length, n_prompt) in enumerate(shapes):
        ids = tuple(range(token, token + length))
        token += length
        learned = tuple(position > 0 and position >= n_prompt for position in range(length))
        rows.append(TokenRow(str(index), str(index), "original", ids, learned))
    return rows


@given(ROWS, st.integers(2, 24))
def test_bfd_split_learns_every_token_exactly_once(
    shapes: list[tuple[int, int]], block: int
) -> None:
    rows = _rows(shapes)
    packed, account = pack(rows, PackingConfig(block, "bfd_split"), seed=0)
    learned = Counter(label for row in packed for label in row.labels if label != IGNORED)
    wanted = {
        token
        for row in rows
        for token, bears in zip(row.input_ids, row.learned, strict=True)
        if bears
    }
    assert learned == dict.fromkeys(wanted, 1)
    assert all(len(row.input_ids) <= block for row in packed)
    assert account.truncated == 0
    assert account.source == account.trained + account.masked + account.dropped
    assert account.trained == len(wanted)


@given(ROWS, st.integers(2, 24), st.sampled_from(["bfd", "bfd_split", "wrapped", None]))
def test_the_account_adds_up_and_agrees_with_the_rows(
    shapes: list[tuple[int, int]], block: int, strategy: str | None
) -> None:
    rows = _rows(shapes)
    packed, account = pack(rows, PackingConfig(block, strategy), seed=1)
    assert account.source == sum(len(row.input_ids) for row in rows)
    assert account.source == account.trained + account.masked + account.truncated + account.dropped
    seen = {token for row in packed for token in row.input_ids}
    assert len(seen) == account.source - account.lost
    assert all(
        len(row.input_ids) == len(row.labels) == len(row.position_ids) <= block for row in packed
    )


@given(ROWS, st.integers(2, 24))
def test_positions_restart_exactly_where_another_piece_begins(
    shapes: list[tuple[int, int]], block: int
) -> None:
    for row in pack(_rows(shapes), PackingConfig(block, "bfd_split"), seed=2)[0]:
        for index in range(1, len(row.input_ids)):
            follows = row.input_ids[index] == row.input_ids[index - 1] + 1
            if row.position_ids[index] == 0:
                assert row.labels[index] == IGNORED
            else:
                assert follows
                assert row.position_ids[index] == row.position_ids[index - 1] + 1


def test_wrapped_joins_documents_and_learns_across_them() -> None:
    rows = _rows([(5, 0), (6, 0)])
    packed, account = pack(rows, PackingConfig(4, "wrapped"), seed=0)
    assert [row.position_ids for row in packed] == [[0, 1, 2, 3]] * 3 + [[0, 1]]
    assert account.trained == 9  # 11 tokens, less the first of each document
    assert account.lost == 0


def test_without_packing_each_document_is_a_row_and_the_rest_is_counted_as_truncated() -> None:
    packed, account = pack(_rows([(10, 0), (3, 0)]), PackingConfig(4), seed=0)
    assert sorted(len(row.input_ids) for row in packed) == [3, 4]
    assert account.truncated == 6
    assert pack(_rows([(10, 0)]), PackingConfig(None), seed=0)[1].lost == 0


def test_a_prompt_that_fills_the_block_leaves_nothing_to_learn_and_is_counted_as_dropped() -> None:
    packed, account = pack(_rows([(10, 8), (3, 0)]), PackingConfig(4), seed=0)
    assert len(packed) == 1
    assert (account.truncated, account.dropped) == (6, 4)


@pytest.mark.parametrize("named", [False, True])
def test_best_fit_fills_rows_as_the_textbook_example(named: bool) -> None:
    # best-fit decreasing of 7 5 5 4 3 2 2 2 into bins of 10: [7 3] [5 5] [4 2 2 2]
    rows = _rows([(n, 0) for n in (2, 5, 4, 7, 2, 5, 3, 2)])
    if not named:
        rows = [TokenRow(row.row_id, "", row.origin, row.input_ids, row.learned) for row in rows]
    packed, _ = pack(rows, PackingConfig(10, "bfd_split"), seed=0)
    sizes = [[b - a for a, b in zip(starts, [*starts[1:], len(row.input_ids)], strict=True)]
              for row in packed if (starts := [i for i, p in enumerate(row.position_ids) if p == 0])]  # fmt: skip
    assert sorted(map(sorted, sizes)) == [[2, 2, 2, 4], [3, 7], [5, 5]]


def test_a_draw_next_to_one_is_in_the_last_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random.Random, "random", lambda self: 1 - 2**-53)
    packed, account = pack(_paraphrases(5, 8), PackingConfig(5, "bfd_split"), seed=0)
    assert (len(packed), account.lost) == (40, 0)
    assert max(packed.rounds) > 0


def test_the_order_depends_on_the_seed_only() -> None:
    named, nameless = _paraphrases(6, 9), _rows([(5, 0)] * 9)
    rows = [*named, *(TokenRow("", "", "", row.input_ids, row.learned) for row in nameless)]
    first, again, other = (
        list(pack(rows, PackingConfig(8, "bfd_split"), seed)[0]) for seed in (3, 3, 4)
    )
    assert first == again
    assert first != other


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=20),
    st.integers(2, 12),
)
def test_wrapped_is_one_text_cut_every_block_in_whatever_order(
    shapes: list[tuple[int, int]], block: int
) -> None:
    rows = _rows(shapes)
    order = list(range(len(rows)))
    random.Random(5).shuffle(order)
    text = [
        pair
        for index in order
        for pair in zip(rows[index].input_ids, rows[index].learned, strict=True)
    ]
    wanted = []
    for start in range(0, max(1, len(text) - 1), block - 1):
        ids = [token for token, _ in text[start : start + block]]
        labels = [
            token if bears and index else IGNORED
            for index, (token, bears) in enumerate(text[start : start + block])
        ]
        if set(labels) - {IGNORED}:
            wanted.append((ids, labels))
    packed, account = pack(rows, PackingConfig(block, "wrapped"), seed=5)
    assert [(row.input_ids, row.labels) for row in packed] == wanted
    assert set(packed.rounds) <= {0}
    assert account.source == len(text)
    assert account.trained == sum(label != IGNORED for _, labels in wanted for label in labels)
    assert account.dropped == len(text) - len({token for ids, _ in wanted for token in ids})


def _paraphrases(n_documents: int, n_each: int, length: int = 5) -> list[TokenRow]:
    """`n_each` rows of `length` different tokens for each document; token // 1000 is the document."""
    return [
        TokenRow(f"{d}-{k}", str(d), "original", tuple(range(1000 * d + 10 * k, 1000 * d + 10 * k + length)),
                 (False, *(True,) * (length - 1)))
        for d in range(n_documents) for k in range(n_each)
    ]  # fmt: skip


@given(st.integers(2, 8), st.integers(1, 9), st.integers(10, 40), st.integers(0, 3))
def test_interleaved_rows_never_hold_two_texts_of_one_document_and_lose_nothing(
    n_documents: int, n_each: int, block: int, seed: int
) -> None:
    rows = _paraphrases(n_documents, n_each)
    packed, account = pack(rows, PackingConfig(block, "bfd_split"), seed)
    for row in packed:
        texts = [
            token // 1000
            for token, position in zip(row.input_ids, row.position_ids, strict=True)
            if position == 0
        ]
        assert len(texts) == len(set(texts))
        assert len(row.input_ids) <= block
    assert Counter(token for row in packed for token in row.input_ids) == Counter(
        t for r in rows for t in r.input_ids
    )
    assert (account.lost, account.trained) == (0, 4 * len(rows))


def test_each_round_of_the_epoch_holds_its_share_of_every_document() -> None:
    packed, _ = pack(_paraphrases(40, 8), PackingConfig(20, "bfd_split"), 1)
    n_rounds = 1 + max(packed.rounds)
    assert n_rounds == 8
    assert [*packed.rounds] == sorted(packed.rounds)
    for number in range(n_rounds):
        rows = [row for row, of_row in zip(packed, packed.rounds, strict=True) if of_row == number]
        texts = ({token // 1000 for token in row.input_ids} for row in rows)
        assert Counter(chain.from_iterable(texts)) == dict.fromkeys(range(40), 1)


def test_replayed_tokens_are_marked_where_they_are_learned() -> None:
    rows = [
        TokenRow("a", "a", "replay", (1, 2, 3), (False, True, True)),
        TokenRow("b", "b", "original", (4, 5), (False, True)),
    ]
    row = pack(rows, PackingConfig(8, "bfd_split"), 0)[0][0]
    assert dict(zip(row.input_ids, row.replayed, strict=True)) == {
        1: False,
        2: True,
        3: True,
        4: False,
        5: False,
    }
