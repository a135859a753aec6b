"""Names and numbers as the pages, tables and figures write them."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kinject.results import Perplexity, PromptFormat

_LINE_ENDS = re.compile("[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]+")
_DIRECTION_MARKS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
ROLES = {"learning": "to be learned", "retention": "to be kept", "unanswerable": "without an answer"}
"""Role of a question set -> its words on the page."""

_FORMATS = {
    "texts": "option texts", "letters": "letters", "hybrid": "option texts with the options shown",
    "rotations": "letters, options rotated", "letters-no-question": "letters without the question",
    "texts-no-question": "option texts without the question",
    "letters-written": "letters, written", "generate": "written answers",
}  # fmt: skip
_SCORES = {"chars": "per character", "bytes": "per byte", "tokens": "per token",
           "match": "by match", "exact": "by exact match", "contains": "by containment",
           "judge": "by the judge"}  # fmt: skip


def format_name(text: str, longest: int | None = None) -> str:
    """Return `text` on one line, control and direction characters replaced; past `longest`, cut in the middle."""
    flat = " ".join(text.split())
    clean = "".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cs") or c in _DIRECTION_MARKS else c for c in flat)
    if longest is None or len(clean) <= longest:
        return clean
    head = longest // 2
    return f"{clean[:head]}…{clean[len(clean) - (longest - head - 1) :]}"


def quoted(name: str) -> str:
    """Return the name of a question set so that no sentence runs into it: ``“new”``."""
    return f"“{format_name(name)}”"


def format_count(n: int, noun: str) -> str:
    """Return ``1 question`` or ``1,200 questions``."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def format_date(text: str) -> str:
    """Return an ISO 8601 date in words: ``22 November 2026``; other text as it is."""
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        return format_name(text)
    return f"{date.day} {date:%B %Y}"


def format_percent(fraction: float) -> str:
    """Return a fraction as a percentage with one decimal: 0.845 gives ``84.5%``."""
    return f"{100 * fraction:.1f}%"


def format_finite(value: float | None, digits: int) -> str:
    """Return a number with so many decimals, ``not finite`` for None."""
    return "not finite" if value is None else f"{value:.{digits}f}"


def perplexity_change(item: Perplexity, base: Perplexity) -> str:
    """Return the change of a perplexity from the base's: ``+12.0%``, from ten times on ``x 23``; "" for the base.

    Perplexities of different tokens cannot be compared; bits per byte can.
    """
    if item.n_tokens != base.n_tokens:
        return "other tokens"
    if item is base or item.per_token is None or base.per_token is None:
        return ""
    ratio = item.per_token / base.per_token
    return f"x {ratio:,.0f}" if ratio >= 10 else f"{ratio - 1:+.1%}"


def format_points(difference: float) -> str:
    """Return a difference of fractions in percentage points, signed: 0.012 gives ``+1.2``, none gives ``0.0``."""
    text = f"{100 * difference:+.1f}".replace("-", "−")
    return "0.0" if text[1:] == "0.0" else text


def format_p(p: float) -> str:
    """Return ``p = 0.012``; below a thousandth ``p < 0.001``. Near 0.05: ``p < 0.05`` or ``p > 0.05``."""
    from kinject.results import ALPHA

    if p < 0.001:
        return "p < 0.001"
    if p != ALPHA and f"{p:.3f}" == f"{ALPHA:.3f}":
        return f"p {'<' if p < ALPHA else '>'} 0.05"
    return f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def bare_p(p: float) -> str:
    """Return p as `format_p` does, without ``p =``, for a column with the heading p."""
    return format_p(p).removeprefix("p ").removeprefix("= ")


def format_text(text: str) -> str:
    """Return `text` with its line breaks, each line formatted by `format_name`."""
    return "\n".join(format_name(line) for line in text.strip().splitlines())


def format_prompt(form: PromptFormat) -> str:
    """Return a prompt format in words: ``option texts per byte, 5 shots``."""
    scored = f" {_SCORES.get(form.score, form.score)}" if form.score != "sum" else ""
    name = _FORMATS.get(form.format, format_name(form.format))
    return f"{name}{scored}, {format_count(form.shots, 'shot')}"


def join_words(words: Sequence[str]) -> str:
    """Return ``a``, ``a and b``, or ``a, b and c``."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def escape_markdown(text: str) -> str:
    """Return `text` so that Markdown shows it as it is, on one line: no tags, links, emphasis, headings or table borders."""
    escaped = _LINE_ENDS.sub(" ", text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#~!$])", r"\\\1", escaped).replace("://", ":&#47;/")
