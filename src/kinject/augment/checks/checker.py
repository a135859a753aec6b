"""Deterministic checks of an answer. Each refusal has a reason of `REASONS`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from kinject.augment.answers import quoted_of
from kinject.augment.checks.additions import find_addition, source_facts, without_additions
from kinject.augment.checks.coverage import carried, facts_of, find_missing
from kinject.language.detect import compare_languages
from kinject.llm.prompt_injection import has_injection, split_injection
from kinject.types import Completion

_WORDS, _ASCII_WORDS = re.compile(r"\w+"), re.compile("[a-z0-9_]+")
_REFUSAL = re.compile(
    r"\A\W*(?:(?:I['’]?m |I am )?(?:very |really )?sorry\b"
    r"|(?:unfortunately,? )?I (?:can(?:no|['’])t|(?:am|['’]m) (?:unable|not able)|won['’]t|will not|must decline)"
    r"|I['’]m (?:unable|not able)|as an (?:AI|artificial|assistant|language model)|I do(?: not|n['’]t) have)",
    re.IGNORECASE,
)
_TAGS = (
    "a|abbr|article|audio|b|base|blockquote|body|br|button|canvas|code|dd|div|dl|dt|em|embed|font|footer|form|frame|h[1-6]|head"
    "|header|hr|html|i|iframe|img|input|li|link|main|math|meta|nav|object|ol|option|p|picture|pre|script|section|select|small"
    "|source|span|strong|style|sub|sup|svg|table|tbody|td|template|textarea|th|thead|title|tr|u|ul|video"
)
_TAG = re.compile(rf"<[/!]?({_TAGS}|doctype)\b[^<>]{{0,300}}>|\bjavascript:", re.IGNORECASE)
_MARKUP = re.compile(r"[<‹]/?(?:passage|rewriting)>|<\|[^|>\n]{1,40}\|>|\[/?INST\]|</?think>", re.IGNORECASE)

_SURROUNDINGS = (("refusal", _REFUSAL), ("wrapper", _MARKUP))

MAX_OVERLAP = 0.7
"""Two texts that share more of their word triples (Jaccard similarity) count as copies of each other."""
_NGRAM = 6
"""Words in a row that two texts do not share by chance."""
_LONGEST, _ALWAYS_READ = 20, 10_000
"""A text is read up to so many characters per character of its passage, but at least these."""
_FEWEST_WORDS = 3
_MAX_INJECTED_TRIPLES = 2
"""Word triples that a rewriting may share with the prompt injection in its source."""
_MIN_SOURCE_WORDS = 0.25
"""Fraction of a rewriting's words that must be in its source, if that contains prompt injection."""

REASONS: Mapping[str, str] = {
    "truncated": "the answer was cut at max_tokens, or ended for an unknown reason",
    "filtered": "the endpoint's content filter stopped the answer",
    "no answer": "the endpoint answered without text",
    "secret": "the answer repeats a part of a key or another secret of this machine",
    "empty": "nothing is left after parsing",
    "refusal": "the model declined",
    "prompt": "the text repeats the request",
    "markup": "the text has HTML that the source does not have",
    "wrapper": "the text is surrounded by words to the user",
    "inconsistent": "asked again, the model does not confirm that the text follows from the passage",
    "injection": "the text follows or repeats prompt injection in the source",
    "judge": "the judge found a changed or invented fact",
    "language": "the text is in another language than the source",
    "echo": "the text is (nearly) the source itself",
    "duplicate": "the text is (nearly) the same as another paraphrase of the passage",
    "length": "the text has under a few words, or twenty times the characters of the source",
    "number": "a number that the source lacks; with rules.complete, also a lost one",
    "date": "a date that the source lacks; with rules.complete, also a lost one",
    "unit": "a number has another unit than in the source",
    "quotation": "a quotation that the source lacks; with rules.complete, also a lost one",
    "name": "a proper name that the source lacks; with rules.complete, also a lost one",
}
"""Reason of a refusal -> its meaning."""

Shingles = frozenset[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Rules:
    """Requirements of a style's texts, beside that no checkable fact may be new.

    `complete`: no checkable fact of the source is lost. `refuse_echo`: the text must not be (nearly) the source.
    `refuse_near`: it must not be nearly another accepted text (the same words in the same order are always refused).
    `explains`: it may add explanations of words; the judge's prompt mentions it. `quotes`: each of its quotations
    (``QUOTE:``) is in the source word for word.
    """

    complete: bool = False
    refuse_echo: bool = True
    refuse_near: bool = True
    explains: bool = False
    quotes: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a check: `reason` is "" for an accepted text, else a key of `REASONS`; `detail` is the evidence."""

    reason: str = ""
    detail: str = ""
    measures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def accepted(self) -> bool:
        """Whether the text may be kept."""
        return not self.reason


_MOST_EQUAL = 3
"""Answers in a row that are refused at the same point before a style pauses for a passage."""


def declines(text: str) -> bool:
    """Return whether an answer begins with the words of a refusal."""
    return _REFUSAL.match(text) is not None


def check_completion(completion: Completion) -> Verdict:
    """Return whether the endpoint gave a complete answer."""
    if completion.finish_reason == "length":
        return Verdict("truncated", "finish_reason is length")
    if completion.finish_reason == "content_filter":
        return Verdict("filtered", "finish_reason is content_filter")
    if completion.finish_reason == "secret":
        return Verdict("secret", "the answer holds a part of a key of this machine, shown as (key)")
    if not completion.text.strip():
        return Verdict("no answer", f"finish_reason is {completion.finish_reason or 'missing'}")
    if completion.finish_reason not in ("stop", "eos", "end_turn", ""):
        return Verdict("truncated", f"finish_reason is {completion.finish_reason}")
    return Verdict()


@dataclass
class Refusals:
    """The refusals in a row of one group that got nothing yet. `stuck` is the reason of `_MOST_EQUAL` equal ones."""

    stuck: str = ""
    _point: tuple[str, str] = ("", "")
    _n_equal: int = 0
    _accepted: bool = False

    def accept(self) -> None:
        """Count an accepted answer: the group is not stuck, whatever comes."""
        self._accepted, self.stuck = True, ""

    def refuse(self, verdict: Verdict) -> None:
        """Count a refused answer."""
        point = (verdict.reason, verdict.detail)
        self._n_equal = self._n_equal + 1 if point == self._point else 1
        self._point = point
        if self._n_equal >= _MOST_EQUAL and not self._accepted:
            self.stuck = verdict.reason


class Checker:
    """Checks the rewritings of one passage against the passage and against the rewritings accepted so far."""

    def __init__(
        self, source: str, rules: Rules | None = None, instructions: tuple[str, ...] = (), context: str = ""
    ) -> None:
        """`instructions` are the texts of the style's prompts, which no rewriting may repeat.

        `context` is the text that the writer sees besides the source, such as its title: it is not new.
        """
        self._prompt_ngrams, self._prompt_triples = _ngrams_of(instructions)
        self._source = source
        self._rules = rules or Rules()
        self._max_characters = max(_ALWAYS_READ, _LONGEST * len(source))
        is_written = (
            self._rules.refuse_echo or self._rules.quotes
        )  # by a model; else by a function, which obeys no text
        clean, self._injection = split_injection(source) if is_written else (source, "")
        self._quotable = " ".join(clean.split()) if self._rules.quotes else ""
        self.facts = source_facts(clean, context)
        self._countable = facts_of(self.facts)
        self._form = normal_form(clean)
        self._shingles = _shingles(self._form)
        self._accepted: list[Shingles] = []
        self._accepted_forms: set[str] = set()

    def accept(self, text: str) -> None:
        """Add `text` to the accepted rewritings: later ones must differ from it."""
        form, shingles = _form_and_shingles(text)
        self._accepted_forms.add(form)
        self._accepted.append(shingles)

    def without_additions(self, text: str) -> tuple[str, int]:
        """Return a list, or a text of several paragraphs, without the parts that add a fact, and the number of these."""
        if len(text) > self._max_characters:
            return text, 0
        kept, added = without_additions(self.facts, text)
        return kept, len(added)

    def check(self, text: str) -> Verdict:
        """Return whether `text` is a valid rewriting of the passage, different from the accepted ones. The first fault counts."""
        if not text.strip():
            return Verdict("empty")
        if len(text) > self._max_characters:
            return Verdict("length", f"{len(text):,} characters for {len(self._source):,}")
        verdict = self._check_surroundings(text)
        if verdict is not None:
            return verdict
        if self._rules.quotes:
            for _, quotation, _ in quoted_of(text):
                if " ".join(quotation.split()) not in self._quotable:
                    return Verdict("quotation", f"{quotation[:60]!r} is not in the passage word for word")
        change = compare_languages(self._source, text)
        if change:
            return Verdict("language", change)
        form, shingles = _form_and_shingles(text)
        from_prompt = "" if self._prompt_triples.isdisjoint(shingles) else self._find_prompt(form)
        if from_prompt:
            return Verdict("prompt", f"found {from_prompt!r}")
        echo = 1.0 if form == self._form else overlap(shingles, self._shingles)
        if echo > MAX_OVERLAP and self._rules.refuse_echo:
            return Verdict("echo", f"shares {echo:.0%} of its word triples with the source")
        nearest = self._nearest_accepted(form, shingles)
        if nearest > MAX_OVERLAP:
            return _duplicate(nearest)
        n_words = form.count(" ") + 1
        if n_words <= _FEWEST_WORDS < self._form.count(" ") and self._rules.refuse_echo:
            return Verdict("length", f"{n_words} words")
        addition = find_addition(self.facts, text)
        if addition is None and self._rules.complete:
            addition = find_missing(self.facts, text)
        if addition is not None:
            return Verdict(addition.reason, addition.detail)
        injected = self._find_injected(text, form, shingles) if self._injection else ""
        if injected:
            return Verdict("injection", injected)
        ratio = n_words / (self._form.count(" ") + 1)
        measures = {"length_ratio": ratio, "source_overlap": echo, "sibling_overlap": nearest}
        rounded: dict[str, Any] = {name: round(value, 3) for name, value in measures.items()}
        facts = [fact.id for fact in carried(self._countable, self.facts, text)]
        return Verdict(measures=rounded | {"language": self.facts.code, "facts": facts})

    def _find_prompt(self, form: str) -> str:
        """Return words of the prompts in a row that a text has and its source has not, "" without any."""
        words = form.split(" ")
        for start, triple in enumerate(zip(words, words[1:], words[2:], strict=False)):
            if triple in self._prompt_triples:
                ngram = " ".join(words[start : start + _NGRAM])
                if ngram in self._prompt_ngrams and ngram not in self._form:
                    return ngram
        return ""

    def compare_accepted(self, text: str, verdict: Verdict) -> Verdict:
        """Return the `verdict` of an accepted text, or its refusal if rewritings accepted since then resemble it."""
        nearest = self._nearest_accepted(*_form_and_shingles(text))
        if nearest > MAX_OVERLAP:
            return _duplicate(nearest)
        return replace(verdict, measures={**verdict.measures, "sibling_overlap": round(nearest, 3)})

    def _nearest_accepted(self, form: str, shingles: Shingles) -> float:
        """Return the largest overlap with an accepted rewriting, 1 for the same words in the same order."""
        if form in self._accepted_forms:
            return 1.0
        compared = self._accepted if self._rules.refuse_near else ()
        return max((overlap(shingles, other) for other in compared), default=0.0)

    def _check_surroundings(self, text: str) -> Verdict | None:
        """Return the refusal of a text that declines, addresses the user or has markup, None for other texts.

        A phrase that the source contains itself ("I cannot ...") is allowed.
        """
        for reason, pattern in _SURROUNDINGS:
            match = pattern.search(text) if pattern is not _MARKUP or _may_have_markup(text) else None
            if match and not pattern.search(self._source):
                return Verdict(reason, f"found {match[0].strip()[:60]!r}")
        tag = new_markup(text, self._source)
        return Verdict("markup", f"found {tag!r}") if tag else None

    def _find_injected(self, text: str, form: str, shingles: Shingles) -> str:
        """Return the sign that a rewriting follows or repeats the source's prompt injection, "" without one."""
        if has_injection(text):
            return "it repeats the injection"
        injected = _shingles(normal_form(self._injection)) - self._shingles
        if len(shingles & injected) > _MAX_INJECTED_TRIPLES:
            return "its words are those of the injection"
        words = set(form.split(" "))
        shared = len(words & set(self._form.split(" ")))
        return (
            ""
            if shared >= _MIN_SOURCE_WORDS * len(words)
            else f"only {shared} of its words are in the rest of the source"
        )


def _may_have_markup(text: str) -> bool:
    """Return False for a text in which `_MARKUP` finds nothing."""
    return "<" in text or "‹" in text or "[" in text


def new_markup(text: str, source: str) -> str:
    """Return the first HTML tag (or ``javascript:``) in `text` that `source` does not use, "" without one."""
    if "<" not in text and ":" not in text:  # what each match of `_TAG` contains
        return ""
    for match in _TAG.finditer(text):
        if (match[1] or "").lower() not in {(tag[1] or "").lower() for tag in _TAG.finditer(source)}:
            return match[0][:60]
    return ""


def normal_form(text: str) -> str:
    """Return the words of `text` in lower case with single spaces: equal for texts that differ in formatting only."""
    return " ".join(_ASCII_WORDS.findall(text.lower()) if text.isascii() else _WORDS.findall(text.casefold()))


def _duplicate(similarity: float) -> Verdict:
    return Verdict("duplicate", f"shares {similarity:.0%} of its word triples with an accepted paraphrase")


@lru_cache(maxsize=64)
def _form_and_shingles(text: str) -> tuple[str, Shingles]:
    form = normal_form(text)
    return form, _shingles(form)


def _shingles(form: str) -> Shingles:
    """Return the word triples of a text, or all its words where it has fewer than three."""
    words = form.split(" ")
    return frozenset(zip(words, words[1:], words[2:], strict=False)) or frozenset([tuple(words)])


def overlap(shingles: Shingles, others: Shingles) -> float:
    """Return the Jaccard similarity of two sets, exactly."""
    shared = len(shingles & others)
    return shared / max(1, len(shingles) + len(others) - shared)


@lru_cache(maxsize=64)
def _ngrams_of(instructions: tuple[str, ...]) -> tuple[frozenset[str], Shingles]:
    """Return every `_NGRAM` words in a row of the prompts, and the first three of these."""
    rows = [normal_form(text).split(" ") for text in instructions]
    ngrams = [words[start : start + _NGRAM] for words in rows for start in range(len(words) - _NGRAM + 1)]
    return frozenset(map(" ".join, ngrams)), frozenset((first, second, third) for first, second, third, *_ in ngrams)
