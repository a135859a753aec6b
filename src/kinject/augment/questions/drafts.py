"""Drafts of questions: read from what a model wrote, and checked for what gives the answer away."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kinject.augment.checks.checker import new_markup, normal_form
from kinject.augment.checks.facts import compare_languages
from kinject.augment.checks.prompt_injection import has_injection
from kinject.augment.styles import plain_text
from kinject.disk import content_id

_LINE = re.compile(
    r"[\s>*#-]*+(?:\d{1,2}[.)]\s*+)?\**(?P<key>question|answer|wrong|sentence)\s{0,3}\d{0,3}\s{0,3}[:.]\**\s*+(?P<value>.+)\Z",
    re.IGNORECASE,
)
_CATCH_ALL = re.compile(
    r"\b(?:all|none|any|both|neither|each) of (?:the )?(?:above|these|them|others?)\b|\bboth [A-D] and [A-D]\b",
    re.IGNORECASE,
)
_POINTING = re.compile(
    r"\b(?:the|this|that|these) (?:passage|text|article|paragraph|excerpt|author|document|sentence)\b|\bmentioned above\b",
    re.IGNORECASE,
)
_SHAPES: Mapping[str, re.Pattern[str]] = {
    "a number": re.compile(r"\d"),
    "a name": re.compile(r"(?<=\w )[A-Z]"),
    "a quotation": re.compile(r"[\"“«]"),
    "brackets": re.compile(r"[()\[\]]"),
}
_LONGER, _LONGER_BY = 1.6, 3
"""How much longer than the longest wrong answer a right one may be: times its words, if also by so many words."""
_SAME = 0.8
"""Share of words (Jaccard) from which two questions with one answer are the same."""

REASONS: Mapping[str, str] = {
    "malformed": "a question without an answer, three wrong ones and its sentence",
    "options": "the four answers are not four different ones",
    "catch-all": "an answer that is about the other answers",
    "answer in question": "the right answer stands in the question",
    "longest": "the right answer is far longer than the others",
    "odd one out": "the right answer alone holds, or lacks, a number, a name, a quotation or brackets",
    "points at the text": "it cannot be understood without the passage",
    "injection": "the question or an answer has prompt injection",
    "sentence": "the sentence that it goes by is not in the passage",
    "markup": "HTML that the passage has not",
    "language": "another language than the passage",
    "duplicate": "the same question or fact as another on the document",
    "no answer": "the model gave no whole answer",
    "not verified": "asked with the passage, the model gives another answer, or none",
    "known without": "asked without the passage, the model is right every time",
}
"""Reason of a refusal -> what it means."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposed question; `sentence` is the one of the passage that answers it."""

    question: str
    answer: str
    wrong: tuple[str, ...]
    sentence: str

    @property
    def choices(self) -> tuple[str, ...]:
        """All answers, in an order that depends on the words alone and favours none."""
        return tuple(sorted((self.answer, *self.wrong), key=lambda choice: content_id(self.question, choice)))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A draft that held, and how specific it was called (1 to 10)."""

    draft: Draft
    specificity: int


def read_drafts(answer: str) -> list[Draft]:
    """Return the drafts in what a model wrote; one that lacks a line has an empty place in its stead."""
    drafts: list[Draft] = []
    lines: list[tuple[str, str]] = []
    for line in [*plain_text(answer).splitlines(), "Question: -"]:
        match = _LINE.match(line.strip())
        if match is None:
            continue
        key = match["key"].lower()
        if key == "question" and lines:
            drafts.append(_draft(lines))
            lines = []
        lines.append((key, match["value"]))
    return drafts


def _draft(lines: Sequence[tuple[str, str]]) -> Draft:
    first = dict(reversed(lines))
    wrong = tuple(value for key, value in lines if key == "wrong")
    return Draft(first.get("question", ""), first.get("answer", ""), wrong, first.get("sentence", "").strip('"“”'))


def fault_of(draft: Draft, passage: str, others: Iterable[Draft]) -> tuple[str, str]:
    """Return (reason of `REASONS`, what was seen) of the first fault; ("", "") where there is none.

    `others` are the questions that the draft must differ from.
    """
    if not (draft.question and draft.answer and draft.sentence and len(draft.wrong) == 3):
        return (
            "malformed",
            f"{len(draft.wrong)} wrong answers, answer {draft.answer!r}, sentence {draft.sentence[:40]!r}",
        )
    forms = [normal_form(choice) for choice in (draft.answer, *draft.wrong)]
    if len(set(forms)) < 4 or "" in forms:
        return "options", " / ".join((draft.answer, *draft.wrong))
    for choice in (draft.answer, *draft.wrong):
        if _CATCH_ALL.search(choice):
            return "catch-all", choice
    if f" {forms[0]} " in f" {normal_form(draft.question)} ":
        return "answer in question", draft.answer
    if has_injection(draft.question, draft.answer, *draft.wrong):
        return "injection", draft.question[:80]
    pointing = _POINTING.search(draft.question)
    if pointing:
        return "points at the text", pointing[0]
    if f" {normal_form(draft.sentence)} " not in f" {normal_form(passage)} ":
        return "sentence", draft.sentence[:80]
    whole = " ".join((draft.question, draft.answer, *draft.wrong))
    tag = new_markup(whole, passage)
    if tag:
        return "markup", tag
    changed = compare_languages(passage, whole)
    if changed:
        return "language", changed
    return _giveaway(draft, forms) or _repeat(draft, others) or ("", "")


def _giveaway(draft: Draft, forms: Sequence[str]) -> tuple[str, str] | None:
    """Return how the right answer stands out among the four by its dress, None where it does not."""
    n_words = [form.count(" ") + 1 for form in forms]
    if n_words[0] > _LONGER * max(n_words[1:]) and n_words[0] - max(n_words[1:]) >= _LONGER_BY:
        return "longest", f"{n_words[0]} words, the others at most {max(n_words[1:])}"
    for name, shape in _SHAPES.items():
        right, *wrong = (bool(shape.search(choice)) for choice in (draft.answer, *draft.wrong))
        if all(other != right for other in wrong):
            return "odd one out", f"{name} in {'the right answer alone' if right else 'all but the right answer'}"
    return None


def _repeat(draft: Draft, others: Iterable[Draft]) -> tuple[str, str] | None:
    form, fact = normal_form(draft.question), (normal_form(draft.answer), normal_form(draft.sentence))
    words = set(form.split())
    for other in others:
        known = normal_form(other.question)
        shared = len(words & set(known.split())) / max(1, len(words | set(known.split())))
        same_answer = fact[0] == normal_form(other.answer)
        if form == known or (same_answer and (shared > _SAME or fact[1] == normal_form(other.sentence))):
            return "duplicate", other.question
    return None


def letter_of(answer: str) -> str:
    """Return the letter that an answer begins with, "" where it begins with none of A to D."""
    match = re.match(r"\W*(?:(?:the )?answer(?: is)?\W*)?([A-D])\b", answer, re.IGNORECASE)
    return match[1].upper() if match else ""


def specificity_of(answer: str) -> int:
    """Return the number from 1 to 10 behind the letter of an answer, 1 where there is none."""
    match = re.search(r"\b(10|[1-9])\b", answer)
    return int(match[1]) if match else 1
