"""Text that is there more than once: documents alike, lines that many documents share, repeats
within one document.

Two texts are compared by their words (letters and digits, in lower case; Chinese, Japanese and
Korean by character), of which 32 bits of a hash are kept. Their overlap is the words that they have
in common over those of the longer one. Near-copies also share half of their pairs of neighbouring
words. Candidates come from MinHash (rensa: Fast Similarity Sketching, arXiv 1704.04370) over these
pairs in 32 bands of 4; each is compared exactly before it counts.
"""

from __future__ import annotations

import re
import zlib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kinject.disk import content_id

if TYPE_CHECKING:
    import numpy as np

    Words = np.ndarray[tuple[int], np.dtype[np.uint32]]
    """Hashes of a text's words, in order."""
    Pairs = np.ndarray[tuple[int], np.dtype[np.uint64]]

Span = tuple[int, int]
Edit = tuple[int, int, str]
"""Start and end in a text, and the text that replaces it."""

N_HASHES, _ROWS = 128, 4
"""Values of a MinHash, and values of a band: pairs of texts that share 60% of their pairs of words
(Jaccard) are found with 98.8%, those with 67% (every tenth word another) with 99.9%."""
_LEAST_PAIRS = 0.5
_LEAST_ESTIMATE = 0.36
"""Fraction of equal values below which two texts are not compared: three deviations below
`_LEAST_PAIRS`."""
FEWEST_WORDS = 30
"""A shorter text has no near-copies: a few words are alike by chance."""
_FEWEST_REPEATED = 20
_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
_WORD = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")
_SPACE = re.compile(r"\s+")
_LINE = re.compile(r"[^\n]+")
_PARAGRAPH = re.compile(r"\S[^\n]*(?:\n[^\S\n]*\S[^\n]*)*")
_FENCE = re.compile(r"^[ \t]*(```|~~~)", re.MULTILINE)
_STRUCTURE = re.compile(r"\s*(?:#{1,6}\s|\||[-*+]\s|\d+[.)]\s|>|[^:\n]{1,40}:\s)")
"""A line that belongs to its document alone, or its structure: heading, table, list, quotation,
``key: value``."""
_LONGEST_WORD = 100
_LONGEST_LINE = 2_000
_FEWEST_LINE_WORDS = 3
_MOST_REPEATS = 20
"""Times that a line of a log may be there."""
_WORD_WITH_DIGIT = re.compile(r"(?<![^\W_])[^\W\d_]*+\d[\w.:-]*")


def word_hashes(text: str) -> Words:
    """Return the hashes of the words of `text`, in order."""
    import numpy as np

    words = _WORD.findall(text.lower())
    return np.fromiter(
        (zlib.crc32(word.encode("utf-8", "surrogatepass")) for word in words), np.uint32, len(words)
    )


def count_words(text: str) -> int:
    """Return the number of words of `text`, as `word_hashes` finds them."""
    return len(_WORD.findall(text.lower()))


def pairs_of(words: Words) -> Pairs:
    """Return the different pairs of neighbouring words, as sorted 64-bit numbers."""
    import numpy as np

    wide = words.astype(np.uint64)
    pairs: Pairs = np.unique((wide[:-1] << np.uint64(32)) | wide[1:])
    return pairs


def min_hash(words: Words) -> bytes:
    """Return the MinHash of a text (`N_HASHES` 32-bit numbers), b"" if it is too short for
    near-copies."""
    import numpy as np
    from rensa import RMinHash

    if len(words) < FEWEST_WORDS:
        return b""
    pairs = pairs_of(words).tolist()
    rows = RMinHash.digest_matrix_from_token_hash_sets([pairs], num_perm=N_HASHES, seed=1).to_rows()
    return np.array(rows[0], np.uint32).tobytes()


def overlap(words: Words, other_words: Words) -> float:
    """Return the words in common over the words of the longer text; 0 if they share under half of
    their pairs of words."""
    import numpy as np

    # Not Jaccard of word triples, which no one threshold fits: every tenth word changed gives 0.57,
    # a tenth of the words in a row 0.82.
    first, second = pairs_of(words), pairs_of(other_words)
    n_common = len(np.intersect1d(first, second, assume_unique=True))
    if n_common < _LEAST_PAIRS * (len(first) + len(second) - n_common):
        return 0.0
    a, n_a = np.unique(words, return_counts=True)
    b, n_b = np.unique(other_words, return_counts=True)
    _, at_a, at_b = np.intersect1d(a, b, assume_unique=True, return_indices=True)
    return float(np.minimum(n_a[at_a], n_b[at_b]).sum() / max(len(words), len(other_words)))


def only_words(text: str, other: str, most: int = 20) -> list[str]:
    """Return the first words of `text` that `other` does not have (or not so often), in order."""
    remaining = Counter(_WORD.findall(other.lower()))
    new_words: list[str] = []
    for word in _WORD.findall(text):
        if remaining[word.lower()]:
            remaining[word.lower()] -= 1
        elif len(new_words) < most:
            new_words.append(word[:_LONGEST_WORD])
    return new_words


def text_hash(text: str) -> str:
    """Return a hash that texts share if they differ in nothing but case and white space."""
    return content_id(_SPACE.sub(" ", text).strip().lower())


class Copy(NamedTuple):
    """The number of the text that is kept, the overlap with it, and exact or near."""

    kept: int
    overlap: float
    kind: str


class Version(NamedTuple):
    """The numbers of two texts that would be copies but for a fact, and the first fact that
    differs, of each."""

    number: int
    other: int
    fact: str
    other_fact: str


class CopyFinder:
    """Finds for each text, in order, the first one before it of which it is a copy, and `versions`.
    Kept texts are compared.

    `text_of` returns a kept text by its number. Memory: about 4 KiB for each.
    """

    def __init__(self, threshold: float | None, text_of: Callable[[int], str]) -> None:
        """`threshold`: the overlap from which a text is a near-copy; None: exact copies only."""
        self._threshold, self._text_of = threshold, text_of
        self._exact: dict[str, int] = {}
        self._bands: defaultdict[int, list[int]] = defaultdict(list)
        self._hashes: dict[int, bytes] = {}
        self.versions: list[Version] = []

    def find(self, number: int, exact: str, sketch: bytes) -> Copy | None:
        """Return the kept text of which the text (by `text_hash`, `min_hash`) is a copy; None, and
        keep it, if it is new."""
        if exact in self._exact:
            return Copy(self._exact[exact], 1.0, "exact")
        near = None
        # A short text has no sketch.
        if self._threshold is not None and sketch:
            near = self._near(number, sketch)
        if near is None:
            self._exact[exact] = number
            self._hashes[number] = sketch
            for band in _bands(sketch):
                self._bands[band].append(number)
        return near

    def _near(self, number: int, sketch: bytes) -> Copy | None:
        candidates = self._candidates(sketch)
        if not candidates:
            return None
        text = self._text_of(number)
        words = word_hashes(text)
        best: Copy | None = None
        versions: list[Version] = []
        for other in candidates:
            other_text = self._text_of(other)
            share = overlap(words, word_hashes(other_text))
            if share >= (self._threshold or 1) and (best is None or share > best.overlap):
                # 28 euros that became 30 leave texts alike, but each is to be kept, as a version.
                facts = differing_facts(text, other_text)
                if facts is None:
                    best = Copy(other, share, "near")
                else:
                    versions.append(Version(number, other, *facts))
        # A text that is a copy of one may be a version of others: it is left out all the same.
        if best is None:
            self.versions += versions[:1]
        return best

    def _candidates(self, sketch: bytes) -> list[int]:
        import numpy as np

        numbers = set[int]()
        for band in _bands(sketch):
            numbers.update(self._bands.get(band, ()))
        mine = np.frombuffer(sketch, np.uint32)
        alike = []
        for number in sorted(numbers):
            other = np.frombuffer(self._hashes[number], np.uint32)
            if np.count_nonzero(mine == other) >= _LEAST_ESTIMATE * N_HASHES:
                alike.append(number)
        return alike


def _bands(sketch: bytes) -> Iterator[int]:
    size = 4 * _ROWS  # bytes of its 32-bit numbers
    return (hash((start, sketch[start : start + size])) for start in range(0, len(sketch), size))


def differing_facts(text: str, other: str) -> tuple[str, str] | None:
    """Return the numbers, dates or names that a place of two texts holds, if they differ, as in two
    versions of a rule.

    Facts are numbers, in digits or words, and words with a capital; several in a row are one. Two
    of them have one place if the words before and after are the same. What only one of the texts
    has in addition makes no difference.
    """
    # Not before two texts are alike: it reads the tables of a language.
    from kinject.language import detect_language
    from kinject.language.values import grammar_of

    is_number = grammar_of(detect_language(text) or "en").is_number
    places, other_places = _facts(text, is_number), _facts(other, is_number)
    for place, facts in places.items():
        other_facts = other_places.get(place, Counter())
        here, there = facts - other_facts, other_facts - facts
        if here and there:
            return next(iter(here)), next(iter(there))
    return None


def _facts(text: str, is_number: Callable[[str], bool]) -> dict[tuple[str, str], Counter[str]]:
    """Return (word before, word after) -> the runs of facts between them."""
    places: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    before, run = "", list[str]()
    for word in [*_WORD.findall(text), ""]:
        # Chinese characters of numbers are numeric, and no digits.
        has_number = any(map(str.isnumeric, word)) or is_number(word.lower())
        if has_number or word[:1].isupper():
            run.append(word.lower())
            continue
        if run:
            places[before, word.lower()][" ".join(run)] += 1
        before, run = word.lower(), []
    return places


# Lines.


def _code_spans(text: str) -> list[Span]:
    """Return the spans of fenced code."""
    fences = [match.start() for match in _FENCE.finditer(text)]
    # A fence that is never closed ends with the text.
    if len(fences) % 2:
        fences.append(len(text))
    return list(zip(fences[::2], fences[1::2], strict=True))


def shared_lines(text: str) -> Iterator[tuple[str, Span]]:
    """Yield (line, span) of each line that may be boilerplate: prose of three words or more,
    outside code.

    Headings, tables, lists and ``key: value`` lines are content of a document, even if others have
    the same.
    """
    code = _code_spans(text)
    for match in _LINE.finditer(text):
        line = match[0]
        if len(line) > _LONGEST_LINE or _STRUCTURE.match(line):
            continue
        if len(_WORD.findall(line)) < _FEWEST_LINE_WORDS:
            continue
        if not any(start <= match.start() < end for start, end in code):
            # Digits count: without them "Length: 120 m" and "Length: 140 m" would be one line.
            yield " ".join(line.lower().split()), match.span()


# Within one document.


def repeats(text: str) -> tuple[list[Edit], bool]:
    """Return the edits that take out what the text has twice, and whether it is a log or a
    generated list.

    These are paragraphs of 20 words or more that an earlier one equals; in a log each line that
    differs from another in its keys only.
    """
    lines = _log_lines(text)
    if lines:
        return lines, True
    code = _code_spans(text)
    known, repeated = set[str](), list[Edit]()
    for match in _PARAGRAPH.finditer(text):
        passage, start = match[0], match.start()
        if passage.startswith(("|", "#")) or len(_WORD.findall(passage)) < _FEWEST_REPEATED:
            continue
        if any(first <= start < last for first, last in code):
            continue
        exact = text_hash(passage)
        if exact in known:
            repeated.append((start, match.end(), ""))
        known.add(exact)
    return repeated, False


def _log_lines(text: str) -> list[Edit]:
    """Return the edits that take the repeated lines out of a log or a generated list, [] for any
    other text.

    It is one if half of its lines are like more than 20 others but for the words with digits.
    """
    lines = [line for line in _LINE.finditer(text) if line[0].strip()]
    # Rows of a table may be alike and each a fact of its own.
    lines = [line for line in lines if not line[0].startswith("|")]
    if len(lines) < 10 * _MOST_REPEATS:
        return []
    shapes = [_WORD_WITH_DIGIT.sub("0", line[0]) for line in lines]
    often = {shape for shape, n in Counter(shapes).items() if n > _MOST_REPEATS}
    if 2 * sum(shape in often for shape in shapes) < len(lines):
        return []
    seen, repeated = set[str](), list[Edit]()
    for line, shape in zip(lines, shapes, strict=True):
        if shape in often and shape in seen:
            repeated.append((line.start(), min(line.end() + 1, len(text)), ""))
        seen.add(shape)
    return repeated


# Changes of a text.


def edited(text: str, edits: Sequence[Edit], meta: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return `text` after `edits` (in order, not overlapping), and `meta` with its offsets (of
    pages, sheets, ...) moved.

    Where a whole line went, no more than one empty line stays.
    """
    if not edits:
        return text, dict(meta)
    parts, end, shift = [], 0, 0
    # (start and end of what went, how far what follows moves)
    moves: list[tuple[int, int, int]] = [(0, 0, 0)]
    for start, stop, new in edits:
        if start < end:
            continue
        # A line or a passage that goes takes the empty lines behind it.
        is_whole_line = not start or text[start - 1] == "\n"
        if not new and is_whole_line:
            while text[stop : stop + 1] == "\n":
                stop += 1
        parts += [text[end:start], new]
        end = stop
        shift += len(new) - (stop - start)
        moves.append((start, stop, shift))
    parts.append(text[end:])
    starts = [start for start, _, _ in moves]

    def moved(position: int) -> int:
        number = bisect_right(starts, position) - 1
        start, stop, shift = moves[number]
        if position >= stop:
            return position + shift
        # What begins in a part that went begins where it was.
        return start + moves[number - 1][2]

    changed = dict(meta)
    for key in ("pages", "sheets", "slides", "chapters"):
        marks = meta.get(key)
        if isinstance(marks, list | tuple):
            changed[key] = [[moved(int(mark[0])), *mark[1:]] for mark in marks]
    return "".join(parts), changed
