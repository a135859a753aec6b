"""Passages: slices of a document of at most N tokens, cut at sentence ends where there are any."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from kinject.disk import check_regular, content_id, path_exists
from kinject.errors import InputError
from kinject.hub import find_source
from kinject.types import Document, Passage

TokenSpans = Callable[[str], Sequence[tuple[int, int]]]
"""text -> (start, end) in characters of each token, in order."""

_CJK = "\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff"
# A run of letters without spaces (an encoded blob, a language that writes none) must not count as one token.
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]{{1,32}}|[^\w\s]")
_HEADING = re.compile(r"^(?:(```|~~~)(?s:.*?)^\1|(#{1,6})[ \t]+(\S.*)$)", re.MULTILINE)
"""Fenced code (which may hold lines that look like headings), or a Markdown heading."""
_LINE_END = re.compile(r"\n")
_END = re.compile(r"""(?<![.!?…])[.!?…]++["'”’»)\]]*+(?=\s)|[。！？]+[”’」』）]*|\n\s*\n""")
_ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|Gen|Col|Lt|Capt|Rev|Hon|No|vs|etc|cf|ca|approx|est|Mt|Ltd|Inc|Bros|Jan|Feb|Aug|Sept|Oct|Nov|Dec|fig|eq|vol|pp|e\.g|i\.e|al)|\b[A-Z](?:\.[A-Z])*)\.$"
)


def split_passages(document: Document, n_tokens: int, spans: TokenSpans) -> list[Passage]:
    """Return the passages of `document`: in order, without overlap, together all its text except the space between them.

    None holds more than `n_tokens` (at least 1) tokens of `spans`, unless one character alone does. A cut falls at the
    last sentence end that fits, else at a line's end, else between words, else between tokens, and never just after a
    Markdown heading if it can fall elsewhere. Cuts depend on the text before them only, so a change of the text does
    not change earlier passages.
    """
    text = document.text
    tokens = spans(text)
    if len(tokens) <= n_tokens:
        start, end = _trim(text, 0, len(text))
        return [_passage(document, start, end)] if end > start else []
    boundaries = _boundaries(tokens, len(text))
    indices = [index for index, _ in boundaries]
    starts = [start for _, start in boundaries]
    headings = {end for _, _, _, end in _headings(text)}
    ends = [end for end in sentence_ends(text) if end not in headings]
    lines = [match.start() for match in _LINE_END.finditer(text) if match.start() not in headings]
    cuts, first = [0], 0
    while first + 1 < len(boundaries) and len(tokens) - indices[first] > n_tokens:
        beyond = max(bisect_right(indices, indices[first] + n_tokens), first + 2)
        first = _best_cut(text, starts, first + 1, beyond, (ends, lines))
        cuts.append(starts[first])
    trimmed = (_trim(text, start, end) for start, end in pairwise([*cuts, len(text)]))
    return [_passage(document, start, end) for start, end in trimmed if end > start]


def _boundaries(tokens: Sequence[tuple[int, int]], n_characters: int) -> list[tuple[int, int]]:
    """Return (token index, start) of tokens that start at or after the end of all earlier ones: a cut may fall there.

    Byte-level tokens may share one character.
    """
    boundaries: list[tuple[int, int]] = []
    reach = 0
    for index, (start, end) in enumerate(tokens):
        if reach <= start < n_characters and (not boundaries or start > boundaries[-1][1]):
            boundaries.append((index, start))
        reach = max(reach, end)
    return boundaries


def _best_cut(text: str, starts: Sequence[int], low: int, high: int, endings: Sequence[Sequence[int]]) -> int:
    """Return an index in [low, high): the last whose start follows one of the first `endings`, of the next, a space."""
    for ends in endings:
        i = bisect_right(ends, starts[high - 1]) - 1
        while i >= 0 and ends[i] > starts[low - 1]:
            cut = bisect_left(starts, ends[i], low, high)
            if cut < high and not text[ends[i] : starts[cut]].strip():
                return cut
            i -= 1
    for cut in range(high - 1, low - 1, -1):
        if text[starts[cut]].isspace() or text[starts[cut] - 1].isspace():
            return cut
    return high - 1


def _trim(text: str, start: int, end: int) -> tuple[int, int]:
    body = text[start:end]
    return start + len(body) - len(body.lstrip()), end - len(body) + len(body.rstrip())


def _passage(document: Document, start: int, end: int) -> Passage:
    text = document.text[start:end]
    return Passage(content_id("passage", document.id, start, end, text), document.id, start, end, text)


def heading_path(text: str, start: int) -> tuple[str, ...]:
    """Return the Markdown headings that stand above the position `start` of a text, from the topmost down.

    A heading at `start` itself belongs to what follows; it ends the sections of its own level and below.
    """
    path: list[tuple[int, str]] = []
    for level, name, position, _ in _headings(text):
        if position > start:
            break
        path = [(other, above) for other, above in path if other < level]
        if position < start:
            path.append((level, name))
    return tuple(name for _, name in path)


@lru_cache(maxsize=8)
def _headings(text: str) -> tuple[tuple[int, str, int, int], ...]:
    """Return (level, text, start, end) of each Markdown heading outside fenced code."""
    return tuple(
        (len(match[2]), match[3].rstrip().rstrip("#").rstrip(), match.start(), match.start() + len(match[0].rstrip()))
        for match in _HEADING.finditer(text)
        if match[2]
    )


def sentence_ends(text: str) -> list[int]:
    """Return, in ascending order, the positions just after each sentence or paragraph of `text` (space not included).

    A rule, not a model: a full stop ends a sentence unless it follows an abbreviation or an initial, or a small letter
    follows it.
    """
    ends: list[int] = []
    for match in _END.finditer(text):
        if match[0].isspace():
            end = match.start()
            while end and text[end - 1].isspace():
                end -= 1
        else:
            end = match.end()
            following = text[end : end + 40].lstrip()
            if following[:1].islower() or (match[0] == "." and _ABBREVIATION.search(text[max(0, end - 12) : end])):
                continue
        if end and (not ends or end > ends[-1]):
            ends.append(end)
    whole = len(text.rstrip())
    if whole and (not ends or ends[-1] < whole):
        ends.append(whole)
    return ends


def sentences(text: str) -> list[str]:
    """Return the sentences of `text`, without the space around them."""
    ends = sentence_ends(text)
    texts = (text[start:end].strip() for start, end in zip([0, *ends], ends, strict=False))
    return [sentence for sentence in texts if sentence]


def word_spans(text: str) -> list[tuple[int, int]]:
    """Return the (start, end) of each word and punctuation mark; a word of over 32 letters counts as several."""
    return [match.span() for match in _WORD.finditer(text)]


def token_spans(tokenizer: str | None) -> TokenSpans:
    """Return the tokens of a tokenizer folder or hub name as spans; words and punctuation marks if it is None.

    Raises `InputError` when the tokenizer cannot be loaded or is not a fast one (no tokenizer.json).
    """
    if tokenizer is None:
        return word_spans
    from tokenizers import Tokenizer

    source = find_source(tokenizer, "tokenizer")
    path = Path(source)
    file = path / "tokenizer.json" if path.is_dir() else path
    if path_exists(file):
        check_regular(file)
    try:
        loaded = Tokenizer.from_file(str(file)) if path_exists(path) else Tokenizer.from_pretrained(source)
        loaded.no_truncation()
        loaded.no_padding()
        loaded.encode("a b", add_special_tokens=False)  # a broken file may fail only here
    except BaseException as error:
        # the library raises bare Exception, and for a failed assertion of its Rust a BaseException
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError(
            f"{tokenizer}: no tokenizer can be loaded ({' '.join(str(error).split())[:200] or type(error).__name__}). "
            "Name a folder that holds tokenizer.json, or leave the tokenizer out to count words and punctuation marks."
        ) from error

    def spans(text: str) -> list[tuple[int, int]]:
        return list(loaded.encode(text, add_special_tokens=False).offsets)

    return spans
