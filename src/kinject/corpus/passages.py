"""Passages: slices of a document of at most N tokens that end at sentences, list items and table
rows.

In front of a question they are found by BM25, rendered, and quoted.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING

from kinject.disk import content_id
from kinject.language.sentences import sentence_ends
from kinject.language.spelling import MARKS
from kinject.terminal import format_count
from kinject.types import Document, Passage

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

TokenSpans = Callable[[str], Sequence[tuple[int, int]]]
"""text -> (start, end) in characters of each token, in order."""

_CJK = "\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff"
# A run of letters without spaces (an encoded blob, a language that writes none) must not count as
# one token.
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]{{1,32}}|[^\w\s]")
_ASCII_WORD = re.compile(r"[A-Za-z0-9_]{1,32}|[^\w\s]")
"""`_WORD` for a text of ASCII characters, where it finds the same faster."""
_MARKUP = re.compile(
    r"^(?:(?P<level>#{1,6})[ \t]+(?P<name>\S.*)"
    r"|[ \t]*(?:(?P<fence>`{3,}|~{3,})(?P<info>.*)|(?P<row>\|.*)"
    r"|(?P<item>(?:[-*+•]|\d{1,3}[.)])(?=[ \t]+\S)).*))$",
    re.MULTILINE,
)
"""A line of Markdown that is a heading, the fence of a code block, a row of a table, or the first
of a list item."""
_DELIMITERS = re.compile(r"[\s:|-]*-[\s:|-]*")
"""The second row of a table, which makes the first its head."""
_LINE_END = re.compile(r"(?<=\S)[ \t]*\n")


def split_passages(document: Document, n_tokens: int, spans: TokenSpans) -> list[Passage]:
    """Return the passages of `document`: in order, together all its text except the space between
    them.

    None shows more than `n_tokens` (at least 1) tokens of `spans`, unless one character alone does.
    A passage ends at the last end of a sentence, list item, table row or code block that fits, else
    at a line's end, and just after a heading only if what follows does not fit. A sentence, row or
    block that is longer than a passage is cut, between words if possible, and `Passage.cut` is set.

    A cut depends on the text before it and on the line that it falls into, so that a change of the
    text does not change earlier passages.
    """
    return _Splitter(document, spans).passages(n_tokens)


class _Splitter:
    """Splits one document, whose text is tokenized and searched for ends once."""

    def __init__(self, document: Document, spans: TokenSpans) -> None:
        self._document, self._text = document, document.text
        self._tokens = spans(document.text)

    @cached_property
    def _layout(self) -> _Layout:
        # Only where it is needed: most documents are one passage and have no cut.
        return _read_layout(self._text)

    def passages(self, n_tokens: int) -> list[Passage]:
        """Return the passages of the document."""
        text = self._text
        if not text.strip():
            return []
        if len(self._tokens) <= n_tokens:  # most documents of a corpus of short texts
            return [self._passage((*_trim(text, 0, len(text)), False), (), "")]
        self._indices, self._starts = _boundaries(self._tokens, len(text))
        cuts, is_cut = self._cuts(0, len(self._starts), n_tokens)
        starts = [0, *(self._starts[cut] for cut in cuts[1:])]
        spans = [
            (*_trim(text, start, stop), cut)
            for start, stop, cut in zip(starts, [*starts[1:], len(text)], is_cut, strict=True)
            if text[start:stop].strip()
        ]
        if len(cuts) == 1:
            return [self._passage(span, (), "") for span in spans]
        paths = self._layout.paths(start for start, _, _ in spans)
        headers = (self._header(start, n_tokens)[1] for start, _, _ in spans)
        return [self._passage(*item) for item in zip(spans, paths, headers, strict=True)]

    def _cuts(self, first: int, last: int, n_tokens: int) -> tuple[list[int], list[bool]]:
        """Return the boundaries in [first, last) at which passages begin, and whether each passage
        ends inside a unit."""
        cuts: list[int] = [first]
        is_cut: list[bool] = []
        end = len(self._tokens)
        if last < len(self._indices):
            end = self._indices[last]
        while first + 1 < last:
            budget = self._budget(first, n_tokens)
            if end - self._indices[first] <= budget:
                break
            beyond = bisect_right(self._indices, self._indices[first] + budget)
            # At least one boundary: a character alone may have more tokens than fit.
            beyond = min(last, max(beyond, first + 2))
            first, cut = self._best_cut(first + 1, beyond)
            cuts.append(first)
            is_cut.append(cut)
        return cuts, [*is_cut, False]

    def _budget(self, first: int, n_tokens: int) -> int:
        """Return the most tokens of its own for the passage that begins at the boundary `first`."""
        if first == 0:
            return n_tokens
        # The head of a table is repeated in front of the passage, and counts.
        return max(1, n_tokens - self._header(self._starts[first], n_tokens)[0])

    def _best_cut(self, low: int, high: int) -> tuple[int, bool]:
        """Return an index in [low, high), after the last of the best ends that fit, and whether it
        cuts a unit in two."""
        text, starts = self._text, self._starts
        for ends, cuts_unit in self._layout.endings:
            i = bisect_right(ends, starts[high - 1]) - 1
            while i >= 0 and ends[i] > starts[low - 1]:
                cut = bisect_left(starts, ends[i], low, high)
                # A token may reach beyond an end, and the next boundary is then inside the next
                # sentence.
                if cut < high and not text[ends[i] : starts[cut]].strip():
                    if cuts_unit is None:
                        return cut, _goes_on(text, starts[cut])
                    return cut, cuts_unit
                i -= 1
        for cut in range(high - 1, low - 1, -1):
            if text[starts[cut]].isspace() or text[starts[cut] - 1].isspace():
                return cut, True
        return high - 1, True

    def _header(self, start: int, n_tokens: int) -> tuple[int, str]:
        """Return (tokens, text) of the table head that a passage from `start` repeats; one of over
        half a passage is left out."""
        if not self._layout.tables:
            return 0, ""
        head = self._layout.table_head(_skip_space(self._text, start))
        if head is None:
            return 0, ""
        low, high = (bisect_left(self._tokens, index, key=itemgetter(0)) for index in head)
        if 2 * (high - low) > n_tokens:
            return 0, ""
        return high - low, self._text[slice(*head)].rstrip()

    def _passage(self, span: tuple[int, int, bool], path: tuple[str, ...], header: str) -> Passage:
        document, (start, end, cut) = self._document, span
        text, title = self._text[start:end], document.title.strip()
        # A document that begins with its title as a heading has it once.
        if title and path[:1] != (title,):
            path = (title, *path)
        return Passage(
            id=content_id("passage", document.id, start, end, text),
            document_id=document.id,
            start=start,
            end=end,
            text=text,
            path=path,
            header=header,
            cut=cut,
        )


def _boundaries(
    tokens: Sequence[tuple[int, int]], n_characters: int
) -> tuple[list[int], list[int]]:
    """Return the indices, and the starts, of tokens that start at or after the end of all earlier
    ones: a cut may fall there.

    Byte-level tokens may share one character.
    """
    indices, starts, reach = list[int](), list[int](), 0
    for index, (start, end) in enumerate(tokens):
        if reach <= start < n_characters and (not starts or start > starts[-1]):
            indices.append(index)
            starts.append(start)
        reach = max(reach, end)
    return indices, starts


@dataclass(frozen=True)
class _Layout:
    """Where the text of a document may be cut, its headings (level, name, start), and its tables
    (head, body, end).

    `endings` are lists of ends, the best first, each with whether a passage that ends there ends
    inside a unit (None: if a small letter follows). `blocks` are the spans of code, of table rows
    and of headings.
    """

    text: str
    endings: tuple[tuple[Sequence[int], bool | None], ...]
    headings: Sequence[tuple[int, str, int]]
    tables: Sequence[tuple[int, int, int]]
    blocks: Sequence[tuple[int, int]]

    def paths(self, starts: Iterable[int]) -> Iterator[tuple[str, ...]]:
        """Yield for each of `starts` (ascending) the headings above it, from the topmost down.

        A heading at the start itself belongs to the text below it; it ends the sections of its own
        level and below.
        """
        above: list[tuple[int, str]] = []
        n = 0
        for start in starts:
            while n < len(self.headings) and self.headings[n][2] < start:
                level, name, _ = self.headings[n]
                above = [*(item for item in above if item[0] < level), (level, name)]
                n += 1
            begins = n < len(self.headings) and self.headings[n][2] == start
            yield tuple(name for level, name in above if not begins or level < self.headings[n][0])

    def table_head(self, start: int) -> tuple[int, int] | None:
        """Return the span of the head of the table in whose body `start` is."""
        i = bisect_right(self.tables, start, key=itemgetter(1)) - 1
        if i < 0 or start >= self.tables[i][2]:
            return None
        return self.tables[i][:2]


@dataclass
class _Markup:
    """The Markdown of a text. `never` holds positions after which no passage ends, if it can end
    elsewhere.

    `ends` are those of headings.
    """

    headings: list[tuple[int, str, int]] = field(default_factory=list)
    code: list[tuple[int, int]] = field(default_factory=list)
    rows: list[tuple[int, int]] = field(default_factory=list)
    blocks: list[tuple[int, int]] = field(default_factory=list)
    items: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    never: set[int] = field(default_factory=set)


def _read_layout(text: str) -> _Layout:
    """Return the layout of a text."""
    markup = _read_markup(text)
    groups = _group_rows(text, markup.rows)
    tables, in_heads = _tables(text, groups)
    markup.never |= in_heads
    begins = [begin for begin, _ in markup.code] + [rows[0][0] for rows in groups]
    opens = sorted(_trim_end(text, begin) for begin in begins)
    every, blocks = sentence_ends(text), markup.blocks

    def outside(ends: Iterable[int]) -> list[int]:
        return [end for end in ends if not _is_inside(blocks, end)]

    def in_code(ends: Iterable[int]) -> list[int]:
        return [end for end in ends if _is_inside(markup.code, end)]

    ends = {*outside(every), *opens, *(end for _, end in blocks)}
    ends.update(_trim_end(text, begin) for begin in markup.items)
    # A text that ends with a colon announces what follows.
    best = sorted(end for end in ends - markup.never if end and text[end - 1] not in ":：")
    lines = [match.start() for match in _LINE_END.finditer(text)]
    outer_lines = [end for end in outside(lines) if end not in markup.never]
    endings: list[tuple[list[int], bool | None]] = [(best, False), (outer_lines, None)]
    if blocks:
        endings.append((sorted([*opens, *markup.ends]), False))
    if markup.code:
        blank = [end for end in every if text[end : end + 1] == "\n"]
        endings += [(in_code(blank), True), (in_code(lines), True)]
    return _Layout(text, tuple(endings), markup.headings, tables, blocks)


def _tables(
    text: str, groups: Iterable[Sequence[tuple[int, int]]]
) -> tuple[list[tuple[int, int, int]], set[int]]:
    """Return the tables among `groups` of rows, (begin, begin of the first row below the head,
    end), and the positions in their heads: no passage ends between a head and its first row."""
    tables, in_heads = [], set[int]()
    for rows in groups:
        if len(rows) < 2 or not _DELIMITERS.fullmatch(text[slice(*rows[1])]):
            continue
        in_heads |= {rows[0][1], rows[1][1]}
        if len(rows) > 2:
            tables.append((rows[0][0], rows[2][0], rows[-1][1]))
    return tables, in_heads


def _read_markup(text: str) -> _Markup:
    """Return the Markdown of a text. A code block without its second fence reaches to the end."""
    markup = _Markup()
    fence, opened = "", 0
    for match in _MARKUP.finditer(text):
        end = _trim_end(text, match.end())
        marks = match["fence"] or ""
        if fence:
            # CommonMark: a closing fence is at least as long as the opening one, and has no text.
            if marks.startswith(fence) and not match["info"].strip():
                markup.code.append((opened, end))
                markup.blocks.append((opened, end))
                fence = ""
        elif match["level"]:
            markup.headings.append(
                (len(match["level"]), match["name"].rstrip().rstrip("#").rstrip(), match.start())
            )
            markup.never.add(end)
            markup.blocks.append((match.start(), end))
            markup.ends.append(end)
        # CommonMark: a line of backticks with another one behind them is inline code.
        elif marks and not (marks[0] == "`" and "`" in match["info"]):
            fence, opened = marks, match.start("fence")
        elif match["row"]:
            markup.rows.append((match.start("row"), end))
            markup.blocks.append((match.start("row"), end))
        elif match["item"]:
            markup.items.append(match.start())
            markup.never.add(match.end("item"))
    if fence:
        markup.code.append((opened, len(text)))
        markup.blocks.append((opened, len(text)))
    return markup


def _group_rows(text: str, rows: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Return the rows of each table: those on lines without another between them."""
    groups: list[list[tuple[int, int]]] = []
    for start, end in rows:
        if groups:
            between = text[groups[-1][-1][1] : start]
            if not between.strip() and between.count("\n") == 1:
                groups[-1].append((start, end))
                continue
        groups.append([(start, end)])
    return groups


def _is_inside(blocks: Sequence[tuple[int, int]], index: int) -> bool:
    """Return whether `index` is within one of `blocks` (ascending), its borders not included."""
    i = bisect_left(blocks, index, key=itemgetter(0)) - 1
    return i >= 0 and index < blocks[i][1]


def _skip_space(text: str, start: int) -> int:
    while start < len(text) and text[start].isspace():
        start += 1
    return start


def _trim_end(text: str, end: int) -> int:
    while end and text[end - 1].isspace():
        end -= 1
    return end


def _goes_on(text: str, start: int) -> bool:
    """Return whether the text at `start` continues a sentence: it begins with a small letter."""
    return text[start : start + 40].lstrip()[:1].islower()


def _trim(text: str, start: int, end: int) -> tuple[int, int]:
    body = text[start:end]
    return start + len(body) - len(body.lstrip()), end - len(body) + len(body.rstrip())


def cut_note(n_cut: int, n_passages: int, key: str) -> str:
    """Return the line on passages that end inside a unit, with the recipe's `key` to raise; "" if
    there are none."""
    if not n_cut:
        return ""
    unit = "inside a sentence, a table row or a code block that is longer than a passage"
    end = "end"
    if n_cut == 1:
        end = "ends"
    of_all = format_count(n_passages, "passage")
    return f"{n_cut:,} of {of_all} {end} {unit}. Raise {key} to keep it whole."


def word_spans(text: str) -> list[tuple[int, int]]:
    """Return the (start, end) of each word and punctuation mark; a word of over 32 letters counts
    as several."""
    pattern = _ASCII_WORD if text.isascii() else _WORD
    return [match.span() for match in pattern.finditer(text)]


# Passages in front of a question, the same for training rows and for evaluation.

BEGIN_QUOTE, END_QUOTE = "##begin_quote##", "##end_quote##"
"""The marks around an answer's quotation, as RAFT writes them (arXiv 2403.10131)."""


def with_passages(passages: Iterable[str], prompt: str) -> str:
    """Return `prompt` behind its passages, each followed by a blank line."""
    return "".join(f"{passage}\n\n" for passage in passages) + prompt


def quoting_answer(quotation: str, answer: str) -> str:
    """Return an answer behind the words of a passage that show it."""
    return f"{BEGIN_QUOTE} {quotation} {END_QUOTE} {answer}"


def final_answer(text: str) -> str:
    """Return the text after the last quotation in `text`, all of it without one."""
    return text.rpartition(END_QUOTE)[2]


UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7af\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003134f"
)
"""Chinese, kana, Hangul, Thai, Lao, Burmese and Khmer, as the inside of a pattern's brackets."""
_UNUSUAL = re.compile(rf"[{UNSPACED}{MARKS}]")
_SEARCHED = re.compile(rf"(?P<run>[{UNSPACED}]+)|(?:(?![{UNSPACED}])[\w{MARKS}])+")


def words_of(text: str) -> list[str]:
    """Return the words of `text` in lower case, as they are searched.

    Where a script has no spaces between words, or endings at each (Korean), they are the pairs of
    letters in a row, as in Lucene's CJKAnalyzer: a whole clause as one word is found by none.
    """
    text = text.lower()
    # Three times as fast, and the same for what most texts are written in.
    if text.isascii() or not _UNUSUAL.search(text):
        return re.findall(r"\w+", text)
    words: list[str] = []
    for match in _SEARCHED.finditer(unicodedata.normalize("NFC", text)):
        run = match["run"]
        if run is None or len(run) == 1:
            words.append(match[0])
        else:
            words += map("".join, pairwise(run))
    return words


def best_of(scores: npt.NDArray[np.float64], k: int, least: float | None = None) -> list[int]:
    """Return the indices of the `k` highest scores that reach `least`, the best first; equal scores
    keep their order."""
    import numpy as np

    indices: list[int] = np.argsort(-scores, kind="stable")[:k].tolist()
    if least is None:
        return indices
    return [index for index in indices if scores[index] >= least]


class Bm25:
    """BM25 (Lucene's variant, k1 = 1.5, b = 0.75, through bm25s) over texts, each split into
    terms."""

    def __init__(self, texts: Sequence[str], terms: Callable[[str], list[str]] = words_of) -> None:
        import bm25s

        self._terms, self._n = terms, len(texts)
        split = [terms(text) for text in texts]
        self._vocabulary = set[str]().union(*split)
        self._index = bm25s.BM25() if self._vocabulary else None
        if self._index is not None:
            self._index.index(split, show_progress=False)

    def scores(self, query: str) -> npt.NDArray[np.float64]:
        """Return the score of each text."""
        import numpy as np

        known = [term for term in self._terms(query) if term in self._vocabulary]
        # bm25s fails on a query without terms.
        if self._index is None or not known:
            return np.zeros(self._n)
        return np.asarray(self._index.get_scores(known), dtype=np.float64)
