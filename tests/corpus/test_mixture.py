"""Parts of a mixture hold their share of the tokens, and draw no more than they need."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kinject.corpus.tokenize import TokenRow, sample_tokens, wanted_tokens
from kinject.errors import InputError


def _token_rows(n: int, length: int, origin: str) -> list[TokenRow]:
    return [
        TokenRow(
            f"{origin}{i}", "", origin, tuple(range(length)), (False,) + (True,) * (length - 1)
        )
        for i in range(n)
    ]


def _drawn(rows: list[TokenRow], wanted: float, seed: int = 0) -> list[TokenRow]:
    return list(sample_tokens(rows, list, wanted, seed))


def _size(rows: list[TokenRow]) -> int:
    return sum(len(row.input_ids) for row in rows)


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.25, 0.5, 0.9])
def test_one_part_holds_its_share_of_the_tokens(fraction: float) -> None:
    n_main = 20_000
    drawn = _drawn(_token_rows(50, 13, "replay"), wanted_tokens(n_main, fraction, [fraction]))
    assert _size(drawn) / (n_main + _size(drawn)) == pytest.approx(fraction, abs=1e-3)


def test_two_parts_hold_their_shares_and_the_corpus_the_rest() -> None:
    n_main, fractions = 50_000, [0.25, 0.1]
    sizes = [
        _size(_drawn(_token_rows(500, 17, "x"), wanted_tokens(n_main, f, fractions)))
        for f in fractions
    ]
    total = n_main + sum(sizes)
    assert [size / total for size in sizes] == pytest.approx(fractions, abs=1e-3)


def test_a_part_tokenises_no_more_than_a_chunk_beyond_what_it_draws() -> None:
    seen: list[TokenRow] = []

    def tokenize(rows: Sequence[TokenRow]) -> Sequence[TokenRow]:
        seen.extend(rows)
        return rows

    assert len(list(sample_tokens(_token_rows(5000, 10, "replay"), tokenize, 100, 0))) == 10
    assert len(seen) <= 256


def test_every_row_is_drawn_before_any_is_drawn_twice() -> None:
    drawn = [row.row_id for row in _drawn(_token_rows(7, 10, "replay"), 100)]
    assert len(drawn) == 10
    assert len(set(drawn[:7])) == 7


def test_a_part_of_which_a_tokenizer_leaves_nothing_is_refused() -> None:
    empty = [TokenRow(str(i), "", "replay", (), ()) for i in range(4)]
    with pytest.raises(InputError, match="leaves no token of a part"):
        _drawn(empty, 30)
    assert _size(_drawn([*empty, *_token_rows(1, 10, "replay")], 30)) == 30
