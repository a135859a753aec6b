"""What must hold of an answer before it counts: deterministic checks, each refusal with its reason."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kinject.augment.checks.facts import compare_languages, compare_with, source_facts
from kinject.augment.checks.prompt_injection import has_injection, split_injection
from kinject.augment.prompts import INSTRUCTIONS
from kinject.types import Completion

_WORDS = re.compile(r"\w+")
_REFUSAL = re.compile(
    r"\A\W*(?:(?:I['’]?m |I am )?(?:very |really )?sorry\b"
    r"|(?:unfortunately,? )?I (?:can(?:no|['’])t|(?:am|['’]m) (?:unable|not able)|won['’]t|will not|must decline)"
    r"|I['’]m (?:unable|not able)|as an (?:AI|artificial|assistant|language model)|I do(?: not|n['’]t) have)",
    re.IGNORECASE,
)
_OPENING = re.compile(
    r"\A\W*(?:(?:sure|certainly|of course|absolutely|okay|ok|great|gladly|understood|no problem)\b[^\n]{0,120}?[!:.\n]"
    r"|here(?:['’]s| is| are)\b[^\n]{0,120}?(?:[:\n]|paraphras|rewrit|version)"
    r"|(?:the )?(?:paraphrased?|rewritten|rephrased|reworded|revised)(?: (?:text|passage|version))?\W{0,4}[:\n]"
    r"|(?:paraphrase|version|rewrite)\s*\d*\W{0,3}[:\n])",
    re.IGNORECASE,
)
_CLOSING = re.compile(
    r"(?:\n|\.\s)\W{0,12}(?:I hope (?:this|that)|(?:please )?let me know|feel free to|would you like"
    r"|if you(?:['’]d| would)? (?:like|need|want)|is there anything else"
    r"|note(?: that|:)[^\n]{0,300}(?:paraphras|rewr[io]t|original|passage)|this (?:paraphrase|version|rewrite|rewritten))"
    r"[^\n]{0,500}\Z",
    re.IGNORECASE,
)
_TAGS = (
    "a|abbr|article|audio|b|base|blockquote|body|br|button|canvas|code|dd|div|dl|dt|em|embed|font|footer|form|frame|h[1-6]|head"
    "|header|hr|html|i|iframe|img|input|li|link|main|math|meta|nav|object|ol|option|p|picture|pre|script|section|select|small"
    "|source|span|strong|style|sub|sup|svg|table|tbody|td|template|textarea|th|thead|title|tr|u|ul|video"
)
_TAG = re.compile(rf"<[/!]?({_TAGS}|doctype)\b[^<>]{{0,300}}>|\bjavascript:", re.IGNORECASE)
_MARKUP = re.compile(r"[<‹]/?(?:passage|rewriting)>|<\|[^|>\n]{1,40}\|>|\[/?INST\]|</?think>", re.IGNORECASE)


_RUN = 6
"""Words in a row that are nobody's by chance."""
_CHARACTERS, _ANY_LENGTH = 3, 10_000
"""A text is not read beyond so many characters for each of the source's, times the most words for each; nor below these."""

Shingles = frozenset[tuple[str, ...]]
NEAR = 0.7
"""Share of word triples that two texts may have in common (Jaccard) before one counts as a copy of the other."""
_MOST_ORDERED = 2
"""Word triples that a rewriting may have in common with an order in its source."""
_LEAST_TOLD = 0.25
"""Share of the words of a rewriting that stand in its source, where that gives an order."""
REASONS: Mapping[str, str] = {
    "truncated": "the answer was cut at max_tokens, or ended for a reason unknown",
    "filtered": "the endpoint's content filter stopped the answer",
    "no answer": "the endpoint answered with no text",
    "empty": "nothing is left after parsing",
    "refusal": "the model declined",
    "prompt": "words of the request itself",
    "markup": "HTML that the source has not",
    "wrapper": "words to the user stand around the text",
    "inconsistent": "the model, asked again, does not stand by it",
    "order": "it follows, or hands on, an order that the source gives to a model",
    "judge": "the judge found a fact changed, lost or invented",
    "language": "another language than the source",
    "echo": "the source itself, or nearly",
    "duplicate": "the same as another paraphrase of the passage, or nearly",
    "length": "far shorter or longer than the source",
    "number": "a number of the source is lost, or one is new",
    "date": "a date of the source is lost, or one is new",
    "unit": "a number bears another unit than in the source",
    "quotation": "a quoted string of the source is lost, or one is new",
    "name": "a proper name of the source is lost, or one is new",
}
"""Reason of a refusal -> what it means."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What a style's texts must hold.

    `complete`: every checkable fact of the source survives (always: none is new). `echo`: not (nearly) the source.
    `near`: not nearly another accepted one (always: not the very same words in the same order).
    `shortest` and `longest` bound words over words of the source; a difference of up to 8 words is always allowed.
    """

    complete: bool = True
    echo: bool = True
    near: bool = True
    shortest: float = 0.35
    longest: float = 2.5


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a text may be kept: `reason` is "" where it may, else a key of `REASONS`; `detail` says what was seen."""

    reason: str = ""
    detail: str = ""
    measures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def accepted(self) -> bool:
        """Whether the text may be kept."""
        return not self.reason


def check_completion(completion: Completion) -> Verdict:
    """Return whether the endpoint gave a whole answer."""
    if completion.finish_reason == "length":
        return Verdict("truncated", "finish_reason is length")
    if completion.finish_reason == "content_filter":
        return Verdict("filtered", "finish_reason is content_filter")
    if not completion.text.strip():
        return Verdict("no answer", f"finish_reason is {completion.finish_reason or 'missing'}")
    if completion.finish_reason not in ("stop", "eos", "end_turn", ""):
        return Verdict("truncated", f"finish_reason is {completion.finish_reason}")
    return Verdict()


class Checker:
    """The checks of one passage's rewritings: knows the passage and what was accepted so far."""

    def __init__(self, source: str, rules: Rules | None = None) -> None:
        self._source = source
        self._most = max(_ANY_LENGTH, int(_CHARACTERS * len(source) * (rules or Rules()).longest))
        self._rules = rules or Rules()
        told, self._orders = split_injection(source) if self._rules.echo else (source, "")
        self._facts = source_facts(told)
        self._form = normal_form(told)
        self._shingles = _shingles(self._form)
        self._accepted: list[Shingles] = []
        self._forms: set[str] = set()
        self._seen: tuple[str, str, Shingles] = ("", "", frozenset())

    def accept(self, text: str) -> None:
        """Count `text` among the accepted: what follows must differ from it."""
        form, shingles = self._seen[1:] if self._seen[0] == text else _formed(text)
        self._forms.add(form)
        self._accepted.append(shingles)

    def check(self, text: str) -> Verdict:
        """Return whether `text` may stand as a rewriting of the passage beside the accepted ones. The first fault counts."""
        if not text.strip():
            return Verdict("empty")
        if len(text) > self._most:
            return Verdict("length", f"{len(text):,} characters for {len(self._source):,}")
        for reason, pattern in (
            ("refusal", _REFUSAL),
            ("wrapper", _OPENING),
            ("wrapper", _CLOSING),
            ("wrapper", _MARKUP),
        ):
            found = pattern.search(text)
            # What the source says itself ("I cannot ...") is no refusal.
            if found and not pattern.search(self._source):
                return Verdict(reason, f"found {found[0].strip()[:60]!r}")
        tag = new_markup(text, self._source)
        if tag:
            return Verdict("markup", f"found {tag!r}")
        changed = compare_languages(self._source, text)
        if changed:
            return Verdict("language", changed)
        form, shingles = _formed(text)
        self._seen = (text, form, shingles)
        asked = next((run for run in _runs(form) if run in _ASKED and run not in self._form), None)
        if asked is not None:
            return Verdict("prompt", f"found {asked!r}")
        echo = 1.0 if form == self._form else overlap(shingles, self._shingles)
        if echo > NEAR and self._rules.echo:
            return Verdict("echo", f"shares {echo:.0%} of its word triples with the source")
        compared = self._accepted if self._rules.near else ()
        nearest = 1.0 if form in self._forms else max((overlap(shingles, other) for other in compared), default=0.0)
        if nearest > NEAR:
            return Verdict("duplicate", f"shares {nearest:.0%} of its word triples with an accepted paraphrase")
        here, there = form.count(" ") + 1, self._form.count(" ") + 1
        if abs(here - there) > 8 and not self._rules.shortest <= here / there <= self._rules.longest:
            return Verdict("length", f"{here} words for {there}")
        reason, detail = compare_with(self._facts, text, complete=self._rules.complete)
        if reason:
            return Verdict(reason, detail)
        if self._orders:
            ordered = self._obeyed(text, form, shingles)
            if ordered:
                return Verdict("order", ordered)
        measures = {"length_ratio": here / there, "source_overlap": echo, "sibling_overlap": nearest}
        return Verdict(measures={name: round(value, 3) for name, value in measures.items()})

    def _obeyed(self, text: str, form: str, shingles: Shingles) -> str:
        """Return what in a rewriting comes of an order in the source, "" where nothing does."""
        if has_injection(text):
            return "it gives the order on"
        ordered = _shingles(normal_form(self._orders)) - self._shingles
        if len(shingles & ordered) > _MOST_ORDERED:
            return "its words are those of the order"
        words = form.split(" ")
        shared = len(set(words) & set(self._form.split(" ")))
        return (
            ""
            if shared >= _LEAST_TOLD * len(set(words))
            else f"{shared} of its words stand in what else the source tells"
        )


def new_markup(text: str, source: str) -> str:
    """Return the first HTML tag (or ``javascript:``) in `text` whose like is not in `source`, "" where there is none."""
    for found in _TAG.finditer(text):
        if (found[1] or "").lower() not in {(own[1] or "").lower() for own in _TAG.finditer(source)}:
            return found[0][:60]
    return ""


def normal_form(text: str) -> str:
    """Return the words of `text` in lower case with single spaces: what two texts share that differ in dress only."""
    return " ".join(_WORDS.findall(text.casefold()))


def _formed(text: str) -> tuple[str, Shingles]:
    form = normal_form(text)
    return form, _shingles(form)


def _shingles(form: str) -> Shingles:
    """Return the word triples of a text; of a shorter one all its words."""
    words = form.split(" ")
    return frozenset(zip(words, words[1:], words[2:], strict=False)) or frozenset([tuple(words)])


def _runs(form: str) -> Iterator[str]:
    """Yield every `_RUN` words in a row of a text."""
    words = form.split(" ")
    return (" ".join(words[start : start + _RUN]) for start in range(len(words) - _RUN + 1))


def overlap(one: Shingles, other: Shingles) -> float:
    """Return the Jaccard similarity of two sets, exactly."""
    shared = len(one & other)
    return shared / max(1, len(one) + len(other) - shared)


_ASKED = frozenset(
    run for text in INSTRUCTIONS for part in re.split(r"\{\w+\}", text) for run in _runs(normal_form(part))
)
