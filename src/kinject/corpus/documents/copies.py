"""Text that is there more than once: documents alike, lines that many documents share, repeats within one document.

Two texts are compared by their words (letters and digits, in lower case; Chinese, Japanese and Korean by character), of
which 32 bits of a hash are kept. Their overlap is the words that they have in common over those of the longer one. Near-copies
also share half of their pairs of neighbouring words. Candidates come from MinHash (rensa: Fast Similarity Sketching,
arXiv 1704.04370) over these pairs in 32 bands of 4; each is compared exactly before it counts.
"""

from __future__ import annotations

import re
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from kinject.disk import content_id

if TYPE_CHECKING:
    import numpy as np

    Words = np.ndarray[tuple[int], np.dtype[np.uint32]]
    """Hashes of a text's words, in order."""

Span = tuple[int, int]
Edit = tuple[int, int, str]
"""Start and end in a text, and the text that replaces it."""

N_HASHES, _ROWS = 128, 4
"""Values of a MinHash, and values of a band: pairs of texts that share 60% of their pairs of words (Jaccard) are found with
98.8%, those with 67% (every tenth word another) with 99.9%."""
_LEAST_PAIRS = 0.5
_LEAST_ESTIMATE = 0.36
"""Fraction of equal values below which two texts are not compared: three deviations below `_LEAST_PAIRS`."""
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
"""A line that belongs to its document alone, or its structure: heading, table, list, quotation, ``key: value``."""
_LONGEST_WORD = 100
_LONGEST_LINE = 2_000
_FEWEST_LINE_WORDS = 3
_MOST_REPEATS = 20
"""Times that a line of a log may be there."""
_DIGITS = re.compile(r"\d+")


def word_hashes(text: str) -> Words:
    """Return the hashes of the words of `text`, in order."""
    import numpy as np

    words = _WORD.findall(text.lower())
    return np.fromiter((zlib.crc32(word.encode("utf-8", "surrogatepass")) for word in words), np.uint32, len(words))


def pairs_of(words: Words) -> Any:
    """Return the different pairs of neighbouring words, as sorted 64-bit numbers."""
    import numpy as np

    wide = words.astype(np.uint64)
    return np.unique((wide[:-1] << np.uint64(32)) | wide[1:])


def min_hash(words: Words) -> bytes:
    """Return the MinHash of a text (`N_HASHES` 32-bit numbers), b"" if it is too short for near-copies."""
    import numpy as np
    from rensa import RMinHash

    if len(words) < FEWEST_WORDS:
        return b""
    pairs = pairs_of(words).tolist()
    rows = RMinHash.digest_matrix_from_token_hash_sets([pairs], num_perm=N_HASHES, seed=1).to_rows()
    return np.array(rows[0], np.uint32).tobytes()


def overlap(words: Words, other_words: Words) -> float:
    """Return the words in common over the words of the longer text; 0 if they share under half of their pairs of words."""
    import numpy as np

    first, second = pairs_of(words), pairs_of(other_words)
    n_common = len(np.intersect1d(first, second, assume_unique=True))
    if n_common < _LEAST_PAIRS * (len(first) + len(second) - n_common):
        return 0.0
    (a, n_a), (b, n_b) = np.unique(words, return_counts=True), np.unique(other_words, return_counts=True)
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
    """The number of the original, the overlap with it, and exact or near."""

    original: int
    overlap: float
    kind: str


class CopyFinder:
    """Finds for each text, in order, the first one before it of which it is a copy. Only originals are kept for comparison.

    `words_of` returns the words of an original by its number. Memory: about 4 KiB for an original.
    """

    def __init__(self, threshold: float | None, words_of: Callable[[int], Words]) -> None:
        """`threshold` is the overlap from which a text is a near-copy, None for exact copies only."""
        self._threshold, self._words_of = threshold, words_of
        self._exact: dict[str, int] = {}
        self._bands: dict[int, int | list[int]] = {}
        self._hashes: dict[int, bytes] = {}

    def find(self, exact: str, sketch: bytes, words: Callable[[], Words]) -> Copy | None:
        """Return the original of which the text (by `text_hash`, `min_hash`) is a copy; None if it is new."""
        if exact in self._exact:
            return Copy(self._exact[exact], 1.0, "exact")
        if self._threshold is None or not sketch:
            return None
        overlaps = [(number, overlap(words(), self._words_of(number))) for number in self._candidates(sketch)]
        best = max(overlaps, key=lambda candidate: (candidate[1], -candidate[0]), default=(0, 0.0))
        return Copy(*best, "near") if best[1] >= self._threshold else None

    def add(self, number: int, exact: str, sketch: bytes) -> None:
        """Keep an original under `number`."""
        self._exact[exact] = number
        if self._threshold is None or not sketch:
            return
        self._hashes[number] = sketch
        for band in _bands(sketch):
            entries = self._bands.setdefault(band, number)
            if isinstance(entries, list):
                entries.append(number)
            elif entries != number:
                self._bands[band] = [entries, number]

    def _candidates(self, sketch: bytes) -> list[int]:
        import numpy as np

        numbers = set[int]()
        for band in _bands(sketch):
            entries = self._bands.get(band, ())
            numbers.update(entries if isinstance(entries, list | tuple) else (entries,))
        mine = np.frombuffer(sketch, np.uint32)
        alike = {n: np.count_nonzero(mine == np.frombuffer(self._hashes[n], np.uint32)) for n in numbers}
        return sorted(n for n in numbers if alike[n] >= _LEAST_ESTIMATE * N_HASHES)


def _bands(sketch: bytes) -> Iterator[int]:
    size = 4 * _ROWS
    return (hash((start, sketch[start : start + size])) for start in range(0, len(sketch), size))


# Lines.


def _code_spans(text: str) -> list[Span]:
    """Return the spans of fenced code."""
    fences = [match.start() for match in _FENCE.finditer(text)]
    ends = [*fences[1::2], *([len(text)] if len(fences) % 2 else [])]
    return list(zip(fences[::2], ends, strict=True))


def shared_lines(text: str) -> Iterator[tuple[int, Span]]:
    """Yield (hash, span) of each line that may be boilerplate: prose of three words or more, outside code.

    Headings, tables, lists and ``key: value`` lines are content of a document, even if others have the same.
    """
    code = _code_spans(text)
    for match in _LINE.finditer(text):
        line = match[0]
        if len(line) > _LONGEST_LINE or _STRUCTURE.match(line):
            continue
        if any(start <= match.start() < end for start, end in code) or len(_WORD.findall(line)) < _FEWEST_LINE_WORDS:
            continue
        plain = " ".join(line.lower().split()).encode("utf-8", "surrogatepass")
        yield zlib.crc32(plain) | zlib.adler32(plain) << 32, match.span()


@dataclass
class Boilerplate:
    """Lines that many documents share. The first document keeps each; `lines` maps a hash to (line, documents that lost it)."""

    counts: Mapping[int, int]
    least: int
    lines: dict[int, tuple[str, list[str]]] = field(default_factory=dict)

    def cuts(self, name: str, text: str) -> list[Edit]:
        """Return the edits that take the lines out of the document `name`."""
        edits = []
        for number, (start, end) in shared_lines(text):
            if self.counts.get(number, 0) < self.least:
                continue
            first_use = self.lines.get(number)
            if first_use is None:
                self.lines[number] = (text[start:end].strip(), [name])
            elif first_use[1][0] != name:
                first_use[1].append(name)
                edits.append((start, min(end + 1, len(text)), ""))
        return edits


def count_lines(documents: Sequence[Any], fraction: float | None, fewest: int = 10) -> Boilerplate:
    """Return the boilerplate of documents, each given as an array of the hashes of its lines (`shared_lines`), each once."""
    import numpy as np

    least = max(fewest, round((fraction or 2.0) * len(documents)))
    if fraction is None or len(documents) < least:
        return Boilerplate({}, least)
    numbers, counts = np.unique(np.concatenate(documents), return_counts=True)
    common = counts >= least
    return Boilerplate(dict(zip(numbers[common].tolist(), counts[common].tolist(), strict=True)), least)


# Within one document.


def repeats(text: str, threshold: float | None) -> list[tuple[Span, float]]:
    """Return the passages (paragraphs of 20 words or more) that an earlier one of the same text equals, with the overlap.

    Of a log (most of its lines differ from others in digits only), each such line after the first is a repeat.
    """
    log = _log_lines(text)
    if log:
        return [(span, 1.0) for span in log]
    spans = [match.span() for match in _PARAGRAPH.finditer(text)]
    if len(spans) < 2:
        return []
    code = _code_spans(text)
    known: dict[int, Words] = {}
    finder = CopyFinder(threshold, known.__getitem__)
    repeated = []
    for number, (start, end) in enumerate(spans):
        passage = text[start:end]
        if passage.startswith(("|", "#")) or any(first <= start < last for first, last in code):
            continue
        words = word_hashes(passage)
        if len(words) < _FEWEST_REPEATED:
            continue
        exact, sketch = text_hash(passage), min_hash(words)
        copy = finder.find(exact, sketch, lambda words=words: words)  # type: ignore[misc]
        if copy is not None:
            repeated.append(((start, end), copy.overlap))
        else:
            finder.add(number, exact, sketch)
            known[number] = words
    return repeated


def _log_lines(text: str) -> list[Span]:
    """Return the repeated lines of a text that is a log, [] for any other."""
    if text.count("\n") < 10 * _MOST_REPEATS:
        return []
    shapes: list[tuple[str, Span]] = []
    for match in _LINE.finditer(text):
        line = match[0].strip()
        if line and not line.startswith("|"):
            shapes.append((_DIGITS.sub("0", line), match.span()))
    counts = Counter(shape for shape, _ in shapes)
    often = {shape for shape, n in counts.items() if n > _MOST_REPEATS}
    if 2 * sum(counts[shape] for shape in often) < len(shapes):
        return []
    seen = set[str]()
    repeated = []
    for shape, (start, end) in shapes:
        if shape in often and shape in seen:
            repeated.append((start, min(end + 1, len(text))))
        seen.add(shape)
    return repeated


# Changes of a text.


def edited(text: str, edits: Sequence[Edit], meta: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return `text` after `edits` (in order, not overlapping), and `meta` with its offsets (pages, sheets, slides) moved.

    Where a whole line went, no more than one empty line stays.
    """
    if not edits:
        return text, dict(meta)
    parts, end, shift = [], 0, 0
    moves: list[tuple[int, int, int]] = [(0, 0, 0)]  # (start and end of what went, how far what follows moves)
    for start, stop, new in edits:
        if start < end:
            continue
        if not new:  # a line or a passage: with the empty lines behind it
            while stop < len(text) and text[stop] == "\n" and (not start or text[start - 1] == "\n"):
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
        return position + shift if position >= stop else start + moves[number - 1][2]

    changed = dict(meta)
    for key in ("pages", "sheets", "slides"):
        if isinstance(marks := meta.get(key), list | tuple):
            changed[key] = [[moved(int(mark[0])), *mark[1:]] for mark in marks]
    return "".join(parts), changed
