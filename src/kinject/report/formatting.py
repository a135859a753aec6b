"""How names and numbers are written on the page, in the tables and in the figures."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

from kinject.types import Cell, Difference

_LINE_ENDS = re.compile("[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]+")
_DIRECTION_MARKS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
ROLES = {"learning": "to be learned", "retention": "to be kept"}
"""What the role of a question set is called on the page."""

_FORMATS = {
    "texts": "option texts", "letters": "letters", "hybrid": "option texts with the options shown",
    "rotations": "letters, options rotated", "letters-no-question": "letters without the question",
    "texts-no-question": "option texts without the question", "task": "as its task says",
}  # fmt: skip
_SCORES = {"chars": "per character", "bytes": "per byte", "tokens": "per token", "pmi": "by PMI"}
_SIGNIFICANT = 0.05


def format_name(text: str, longest: int | None = None) -> str:
    """Return `text` on one line, control and direction characters replaced; past `longest`, cut in the middle."""
    flat = " ".join(text.split())
    clean = "".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cs") or c in _DIRECTION_MARKS else c for c in flat)
    if longest is None or len(clean) <= longest:
        return clean
    head = longest // 2
    return f"{clean[:head]}…{clean[len(clean) - (longest - head - 1) :]}"


def format_percent(share: float) -> str:
    """Return a share of 1 as a percentage with one decimal: 0.845 gives ``84.5%``."""
    return f"{100 * share:.1f}%"


def format_points(difference: float) -> str:
    """Return a difference of shares in percentage points, signed: 0.012 gives ``+1.2``, none gives ``0.0``."""
    text = f"{100 * difference:+.1f}".replace("-", "−")
    return "0.0" if text[1:] == "0.0" else text


def format_relative(share: float) -> str:
    """Return a share of another accuracy, signed, in whole percent: 0.104 gives ``+10%``, none gives ``0%``."""
    text = f"{100 * share:+.0f}%".replace("-", "−")
    return "0%" if text[1:] == "0%" else text


def format_p(p: float) -> str:
    """Return ``p = 0.012``; below a thousandth ``p < 0.001``. Near 0.05 the digits show on which side it lies."""
    if p < 0.001:
        return "p < 0.001"
    if p != _SIGNIFICANT and f"{p:.3f}" == f"{_SIGNIFICANT:.3f}":
        return f"p {'<' if p < _SIGNIFICANT else '>'} 0.05"
    return f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def deciding_p(difference: Difference) -> float:
    """Return the p that a difference is judged by: Holm's, where the report corrected for its comparisons."""
    return difference.p if difference.p_holm is None else difference.p_holm


def is_significant(p: float) -> bool:
    """Return whether `p` is below 0.05."""
    return p < _SIGNIFICANT


def format_text(text: str) -> str:
    """Return `text` with its line breaks, each line as `format_name` has it."""
    return "\n".join(format_name(line) for line in text.strip().splitlines())


def format_way(cell: Cell) -> str:
    """Return how the question was asked: ``option texts, 0 shots``."""
    return format_asked(cell.format, cell.shots, cell.score)


def format_asked(format: str, shots: int, score: str = "sum") -> str:
    """Return how questions of a format, number of shots and score were asked: ``letters, 5 shots``."""
    scored = f" {_SCORES.get(score, score)}" if score != "sum" else ""
    return f"{_FORMATS.get(format, format_name(format))}{scored}, {shots} shot{'' if shots == 1 else 's'}"


def arm_names(cells: Iterable[Cell], longest: int | None = None) -> dict[tuple[str, int], str]:
    """Return the name of each arm (its `arm` and `k`) in order of appearance.

    K is part of the name only where the cells hold several, for then one `arm` stands for several arms.
    """
    keys = list(dict.fromkeys((cell.arm, cell.k) for cell in cells))
    several = len({k for _, k in keys if k}) > 1
    return {(arm, k): format_name(arm, longest) + (f", K = {k}" if several and k else "") for arm, k in keys}


def join_words(words: Sequence[str]) -> str:
    """Return ``a``, ``a and b``, or ``a, b and c``."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def escape_markdown(text: str) -> str:
    """Return `text` so that Markdown shows it as it is, on one line: no tags, links, emphasis, headings or table borders."""
    escaped = _LINE_ENDS.sub(" ", text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#~!$])", r"\\\1", escaped).replace("://", ":&#47;/")
