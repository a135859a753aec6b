"""Deterministic checks of an answer. Each refusal has a reason of `REASONS`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any

from kinject.augment.answers import quoted_of
from kinject.augment.checks.additions import (
    carried,
    facts_of,
    find_addition,
    find_missing,
    source_facts,
    without_additions,
)
from kinject.language import compare_languages
from kinject.llm.prompt_injection import has_injection, split_injection
from kinject.terminal import format_count
from kinject.types import Completion

_WORDS, _ASCII_WORDS = re.compile(r"\w+"), re.compile("[a-z0-9_]+")
REFUSAL = re.compile(
    r"\A\W*(?:(?:I['’]?m |I am )?(?:very |really )?sorry\b"
    r"|(?:unfortunately,? )?I "
    r"(?:can(?:no|['’])t|(?:am|['’]m) (?:unable|not able)|won['’]t|will not|must decline)"
    r"|I['’]m (?:unable|not able)|as an (?:AI|artificial|assistant|language model)"
    r"|I do(?: not|n['’]t) have)",
    re.IGNORECASE,
)
"""The beginning of an answer that declines."""
_TAG = re.compile(
    r"<[/!]?(a|b|body|br|button|code|div|doctype|em|form|h[1-6]|head|hr|html|i|iframe|img|input|li"
    r"|link|meta|object|ol|p|pre|script|span|strong|style|sub|sup"
    r"|svg|table|tbody|td|th|thead|tr|u|ul|video)\b[^<>]{0,300}>|\bjavascript:",
    re.IGNORECASE,
)
_MARKUP = re.compile(
    r"[<‹]/?(?:passage|rewriting)>|<\|[^|>\n]{1,40}\|>|\[/?INST\]|</?think>", re.IGNORECASE
)

# 0.8 misses one changed word in some 22; 0.7 refuses 3 to 8 in a thousand of the sandbox's own
# paraphrases, which are written again.
MAX_OVERLAP = 0.7
"""Two texts that share more of their word triples (Jaccard similarity) count as copies of each
other."""
_NGRAM = 6
"""Words in a row that two texts do not share by chance."""
_LONGEST, _ALWAYS_READ = 20, 10_000
"""A text is read up to so many characters per character of its passage, but at least these."""
_ABOUT = re.compile(
    r"\b(?:(?:the|this|that|your) (?:\w+ )?(?:passage|text|article|paraphrase|version|rewriting)"
    r"|(?:paraphras|rephras|reword|rewr(?:itt|ot))\w*)\b",
    re.IGNORECASE,
)
"""Words by which a text speaks of the passage or of itself."""
# Of 523 faithful texts of real writers that are so long none is without a fact; from 3 on, one of
# 554 (benchmarks/augment/refusals.py --facts).
EXPECTED_FACTS = 5
"""A text as dense in facts as its passage would have so many; one that has none is about something
else."""
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
    "wrapper": "words to the user surround the text, "
    "or it speaks of the passage and has none of its facts",
    "inconsistent": "asked again, "
    "the model does not confirm that the text follows from the passage",
    "injection": "the text follows or repeats prompt injection in the source",
    "judge": "the judge found a changed or invented fact",
    "language": "the text is in another language than the source",
    "echo": "the text is (nearly) the source itself",
    "duplicate": "the text is (nearly) the same as another paraphrase of the passage",
    "length": "the text has under a few words, "
    "or over 10,000 characters and twenty times the source's",
    "number": "a number that the source lacks; with rules.complete, also a lost one",
    "date": "a date that the source lacks; with rules.complete, also a lost one",
    "unit": "a number has another unit than in the source",
    "quotation": "a quotation that the source lacks; with rules.complete, also a lost one",
    "name": "a proper name that the source lacks; with rules.complete, also a lost one",
    "no facts": "none of the source's facts, where a text so long would have five or more",
}
"""Reason of a refusal -> its meaning."""

Shingles = frozenset[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Rules:
    """Requirements of a style's texts, beside that no checkable fact may be new.

    `complete`: no checkable fact of the source is lost. `refuse_echo`: the text must not be
    (nearly) the source. `refuse_near`: it must not be nearly another accepted text (the same words
    in the same order are always refused). `explains`: it may add explanations of words; the judge's
    prompt mentions it. `quotes`: each of its quotations (``QUOTE:``) is in the source word for
    word. `factless`: it may have none of the source's facts.
    """

    complete: bool = False
    refuse_echo: bool = True
    refuse_near: bool = True
    explains: bool = False
    quotes: bool = False
    factless: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a check: `reason` is "" for an accepted text, else a key of `REASONS`; `detail` is
    the evidence."""

    reason: str = ""
    detail: str = ""
    measures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def accepted(self) -> bool:
        """Whether the text may be kept."""
        return not self.reason


_ENDS: Mapping[str, tuple[str, str]] = {
    "length": ("truncated", "finish_reason is length"),
    "content_filter": ("filtered", "finish_reason is content_filter"),
    "secret": ("secret", "the answer holds a part of a key of this machine, shown as (key)"),
}


def check_completion(completion: Completion) -> Verdict:
    """Return whether the endpoint gave a complete answer."""
    reason = completion.finish_reason
    if reason in _ENDS:
        return Verdict(*_ENDS[reason])
    if not completion.text.strip():
        return Verdict("no answer", f"finish_reason is {reason or 'missing'}")
    # Other servers than OpenAI's have their own words for a whole answer, or none; an unknown one
    # may be a cut.
    if reason not in ("stop", "eos", "end_turn", ""):
        return Verdict("truncated", f"finish_reason is {reason}")
    return Verdict()


class Checker:
    """Checks the rewritings of one passage against the passage and against the rewritings accepted
    so far."""

    def __init__(
        self,
        source: str,
        rules: Rules | None = None,
        instructions: tuple[str, ...] = (),
        context: str = "",
    ) -> None:
        """`instructions` are the texts of the style's prompts, which no rewriting may repeat.

        `context` is the text that the writer sees besides the source, such as its title: it is not
        new.
        """
        self._prompts = _ngrams_of(instructions)
        self._source = source
        self._rules = rules or Rules()
        self._max_characters = max(_ALWAYS_READ, _LONGEST * len(source))
        clean, self._injection = source, ""
        # Only a model writes under these rules; the function of a mechanical style obeys no text.
        if self._rules.refuse_echo or self._rules.quotes:
            clean, self._injection = split_injection(source)
        # Without its injection, whose words a quotation would carry on. Writers break lines
        # elsewhere, so that white space is folded.
        self._quotable = " ".join(clean.split())
        # Without it, too: with its names in the source, texts that obeyed it passed in free styles.
        self.facts = source_facts(clean, context)
        self.countable = facts_of(self.facts)
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
        """Return a list, or a text of several paragraphs, without the parts that add a fact, and
        the number of these."""
        if len(text) > self._max_characters:
            return text, 0
        kept, added = without_additions(self.facts, text)
        return kept, len(added)

    def check(self, text: str) -> Verdict:
        """Return whether `text` is a valid rewriting of the passage, different from the accepted
        ones. The first fault counts."""
        fault = next(self._faults(text), None)
        if fault is not None:
            return Verdict(*fault)
        facts = [fact.id for fact in carried(self.countable, self.facts, text)]
        # Without a fact a text may still be a good one; if it speaks of the passage, it is about
        # the task.
        if self.countable and not facts:
            about = _ABOUT.search(text)
            if about and not _ABOUT.search(self._source):
                n_facts = len(self.countable)
                detail = f"speaks of {about[0]!r}, and has none of its {n_facts} facts"
                return Verdict("wrapper", detail)
            # Mechanical texts, and answers put among distractors, may be a part of the passage.
            if self._rules.refuse_echo and not self._rules.factless:
                expected = self.expected_facts(text)
                if expected >= EXPECTED_FACTS:
                    detail = f"none of {len(self.countable)}; {expected:.0f} in a text so long"
                    return Verdict("no facts", detail)
        return Verdict(measures={"language": self.facts.code, "facts": facts})

    def expected_facts(self, text: str) -> float:
        """Return how many of the source's facts a text of this length would have, as dense as the
        source."""
        part = len(text) / max(1, len(self._source))
        # A longer text has no more of them than there are.
        return len(self.countable) * min(1.0, part)

    def _faults(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield (reason, evidence) of the faults, in order. A phrase that the source contains
        itself is none."""
        if not text.strip():
            yield "empty", ""
        if len(text) > self._max_characters:
            yield "length", f"{format_count(len(text), 'character')} for {len(self._source):,}"
        # The order decides what is counted: the first fault is the reason of a refusal.
        yield from self._foreign_parts(text)
        form, shingles = _form_and_shingles(text)
        yield from self._copies(text, form, shingles)
        addition = find_addition(self.facts, text)
        if addition is None and self._rules.complete:
            addition = find_missing(self.facts, text)
        if addition is not None:
            yield addition.reason, addition.detail
        if self._injection:
            injected = self._find_injected(text, form, shingles)
            if injected:
                yield "injection", injected

    def _foreign_parts(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield the faults of what does not come from the source: words to the user, markup,
        changed quotations, another language."""
        source = self._source
        for reason, pattern in (("refusal", REFUSAL), ("wrapper", _MARKUP)):
            match = pattern.search(text)
            # "I cannot come" is no refusal where the passage says so itself.
            if match and not pattern.search(source):
                yield reason, f"found {match[0].strip()[:60]!r}"
        tag = new_markup(text, source)
        if tag:
            yield "markup", f"found {tag!r}"
        if self._rules.quotes:
            for _, quotation, _ in quoted_of(text):
                if " ".join(quotation.split()) not in self._quotable:
                    yield "quotation", f"{quotation[:60]!r} is not in the passage word for word"
        change = compare_languages(source, text)
        if change:
            yield "language", change

    def _copies(self, text: str, form: str, shingles: Shingles) -> Iterator[tuple[str, str]]:
        """Yield the faults of a text that repeats its prompt, its source or an accepted text, or
        has few words."""
        for words in filter(self._prompts.__contains__, _ngrams(form)):
            ngram = " ".join(words)
            if ngram not in self._form:
                yield "prompt", f"found {ngram!r}"
        echo = overlap(shingles, self._shingles)
        if echo > MAX_OVERLAP and self._rules.refuse_echo:
            yield "echo", f"shares {echo:.0%} of its word triples with the source"
        duplicate = self.duplicate(text)
        if duplicate:
            yield "duplicate", duplicate
        is_short = form.count(" ") < _FEWEST_WORDS < self._form.count(" ")
        if is_short and self._rules.refuse_echo:
            yield "length", f"{form.count(' ') + 1} words"

    def duplicate(self, text: str) -> str:
        """Return the likeness to an accepted rewriting, "" to none. The same words in the same
        order are always too alike."""
        form, shingles = _form_and_shingles(text)
        nearest = 0.0
        if form in self._accepted_forms:
            nearest = 1.0
        elif self._rules.refuse_near:
            nearest = max((overlap(shingles, other) for other in self._accepted), default=0.0)
        if nearest <= MAX_OVERLAP:
            return ""
        return f"shares {nearest:.0%} of its word triples with an accepted paraphrase"

    def _find_injected(self, text: str, form: str, shingles: Shingles) -> str:
        """Return the sign that a rewriting follows or repeats the source's prompt injection, ""
        without one."""
        if has_injection(text):
            return "it repeats the injection"
        # Words that the rest of the passage has too are no sign that the injection was repeated.
        injected = _shingles(normal_form(self._injection)) - self._shingles
        if len(shingles & injected) > _MAX_INJECTED_TRIPLES:
            return "its words are those of the injection"
        words = set(form.split(" "))
        shared = len(words & set(self._form.split(" ")))
        if shared >= _MIN_SOURCE_WORDS * len(words):
            return ""
        return f"only {shared} of its words are in the rest of the source"


def new_markup(text: str, source: str) -> str:
    """Return the first HTML tag (or ``javascript:``) in `text` that `source` does not use, ""
    without one."""
    tags = list(_TAG.finditer(text))
    if not tags:
        return ""
    known = {(tag[1] or "").lower() for tag in _TAG.finditer(source)}
    return next((tag[0][:60] for tag in tags if (tag[1] or "").lower() not in known), "")


def normal_form(text: str) -> str:
    """Return the words of `text` in lower case with single spaces: equal for texts that differ in
    formatting only."""
    if text.isascii():  # a faster pattern with the same words
        return " ".join(_ASCII_WORDS.findall(text.lower()))
    return " ".join(_WORDS.findall(text.casefold()))


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
    # Exact, without MinHash: a passage has tens of texts, not millions, and a pair takes 1 us.
    shared = len(shingles & others)
    return shared / max(1, len(shingles) + len(others) - shared)


def _ngrams(form: str) -> Iterator[tuple[str, ...]]:
    words = form.split(" ")
    return zip(*(words[start:] for start in range(_NGRAM)), strict=False)


@lru_cache(maxsize=64)
def _ngrams_of(instructions: tuple[str, ...]) -> frozenset[tuple[str, ...]]:
    return frozenset(chain.from_iterable(_ngrams(normal_form(text)) for text in instructions))
