"""Which tokens are learned: those that overlap the spans of a text that are to be learned.

A token belongs to an answer if it holds any character of it. To count the tokens of the text before
it, or to ask where a token begins, goes wrong where a tokenizer joins the space before a word with
it: the first word of the answer would not be learned.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Union

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.normalizers import Normalizer
    from transformers import PreTrainedTokenizerBase

Part = TypeVar("Part")
Span = tuple[int, int]
"""First character, and the first behind."""
# With | the alias could not refer to itself.
Json = Union[dict[str, "Json"], list["Json"], str, int, float, bool, None]  # noqa: UP007


class Tokens(NamedTuple):
    """The tokens of a text; `offsets` are their spans in it, None where the tokenizer does not know
    them."""

    ids: list[int]
    offsets: Sequence[Span] | None


def tokens_of(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, offsets: bool = True
) -> list[Tokens]:
    """Return the tokens of each text, without special tokens around it.

    Offsets hold the white space of a token: a tokenizer that trims it is asked without trimming.
    Where all of a text is learned they are not needed, and cost a third more time.
    """
    if not texts:
        return []
    if not offsets or not tokenizer.is_fast:
        rows = tokenizer([*texts], add_special_tokens=False, verbose=False)["input_ids"]
        return [Tokens(ids, None) for ids in rows]
    whole = _without_trimming(tokenizer.backend_tokenizer.to_str())
    if whole is not None:
        encoded = whole.encode_batch([*texts], add_special_tokens=False)
        pairs = [(item.ids, item.offsets) for item in encoded]
    else:
        batch: Any = tokenizer(
            [*texts], add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        pairs = list(zip(batch["input_ids"], batch["offset_mapping"], strict=True))
    normalizer = tokenizer.backend_tokenizer.normalizer
    return [
        Tokens(ids, _with_accents(spans, text, normalizer))
        for text, (ids, spans) in zip(texts, pairs, strict=True)
    ]


def _with_accents(
    spans: Sequence[Span], text: str, normalizer: Normalizer | None
) -> Sequence[Span]:
    """Return the spans of tokens with the accents that their letters were composed with.

    A tokenizer that composes e and an accent (NFC) gives the letter the place of the e alone, so
    an answer that begins with the accent would not be learned.
    """
    if normalizer is None or text.isascii():
        return spans
    starts = {start for start, _ in spans}
    widened = []
    for start, end in spans:
        is_accent = start < end < len(text) and unicodedata.combining(text[end])
        if is_accent and end not in starts:
            letter = text[end - 1]
            # One that strips accents has none of it.
            if normalizer.normalize_str(letter + text[end]) != normalizer.normalize_str(letter):
                end += 1
        widened.append((start, end))
    return widened


# The rules of a tokenizer are megabytes of JSON, and each batch needs them.
@lru_cache(maxsize=4)
def _without_trimming(rules: str) -> Tokenizer | None:
    """Return the tokenizer of these rules with offsets that keep white space; None if they do
    anyway."""
    from tokenizers import Tokenizer

    parsed = json.loads(rules)
    if not _stop_trimming(parsed.get("post_processor")):
        return None
    # transformers switches both off at each call; as the file has them, rows would be cut or
    # filled up.
    parsed |= {"truncation": None, "padding": None}
    return Tokenizer.from_str(json.dumps(parsed))


def _stop_trimming(rules: Json) -> bool:
    """Switch trimming off in the rules of a post-processor; return whether it was on."""
    found = False
    if isinstance(rules, dict):
        if rules.get("trim_offsets"):
            rules["trim_offsets"] = False
            found = True
        for value in rules.values():
            found = _stop_trimming(value) or found
    elif isinstance(rules, list):
        for value in rules:
            found = _stop_trimming(value) or found
    return found


def overlapping(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Return for each token whether it holds a character of one of `spans`, which are in order.

    A token without a character, as some tokenizers put before a word, belongs to the span in which
    it stands.
    """
    marks = []
    first = 0  # of the spans that may still be ahead
    for start, end in offsets:
        while first < len(spans) and spans[first][1] <= start:
            first += 1
        last = max(end, start + 1)
        marks.append(first < len(spans) and spans[first][0] < last)
    return marks


def common_beginning(whole: Sequence[Part], beginning: Sequence[Part]) -> int:
    """Return how many tokens, or characters, of a whole text are those of its `beginning`.

    Of the tokens of a prompt it is TRL's rule, for where offsets are not known.
    """
    for index, (part, other) in enumerate(zip(whole, beginning, strict=False)):
        if part != other:
            return index
    return min(len(whole), len(beginning))
