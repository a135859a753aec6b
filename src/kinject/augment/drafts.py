"""Drafts of questions: the parser of the answers and the checks (a hint at the correct choice)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kinject.augment.answers import plain_text
from kinject.augment.checks.checker import new_markup
from kinject.corpus.choices import word_form
from kinject.disk import content_id
from kinject.language import compare_languages
from kinject.llm.prompt_injection import has_injection
from kinject.terminal import format_count

# Possessive (`*+`): a line of many equal marks is not tried again at each length.
_LINE = re.compile(
    r"[\s>*#-]*+(?:\d{1,2}[.)]\s*+)?\**(?:right |correct )?"
    r"(?P<key>question|answer|wrong|sentence)(?: answer)?"
    # The bold of "**Answer**:" ends in front of the colon, which Chinese models write wide.
    r"\s{0,3}\(?\d{0,3}\)?\s{0,3}\**[:.：]\**\s*+(?P<value>.*)\Z",
    re.IGNORECASE,
)
_CATCH_ALL = re.compile(
    r"\b(?:all|none|any|both|neither|each) of (?:the )?(?:above|these|them|others?)\b"
    r"|\bboth [A-D] and [A-D]\b",
    re.IGNORECASE,
)
_MENTIONS_TEXT = re.compile(
    r"\b(?:the|this|that|these) "
    r"(?:passage|text|article|paragraph|excerpt|author|document|sentence)\b|\bmentioned above\b",
    re.IGNORECASE,
)
_SHAPES: Mapping[str, re.Pattern[str]] = {
    "a number": re.compile(r"\d"),
    "a name": re.compile(r"(?<=\w )[A-Z]"),
    "a quotation": re.compile(r"[\"“«]"),
    "brackets": re.compile(r"[()\[\]]"),
}
_MAX_LENGTH_RATIO, _MIN_LENGTH_DIFFERENCE = 1.6, 3
"""A correct choice is too long with more than this ratio to the longest wrong one in words, and
this many words more."""
_MOST_WORDS = 12
"""Words of an open question's answer."""
_MAX_OVERLAP = 0.8
"""Two questions with one answer that share more of their words (Jaccard similarity) are duplicates.
"""

REASONS: Mapping[str, str] = {
    "malformed": "the correct choice, three wrong ones or the sentence is missing",
    "options": "the four choices are not four different ones",
    "catch-all": "a choice refers to the other choices",
    "answer in question": "the correct choice is in the question",
    "longest": "the correct choice is far longer than the others",
    "odd one out": "only the correct choice has, or lacks, "
    "a number, a name, a quotation or brackets",
    "points at the text": "the question cannot be understood without the passage",
    "injection": "the question or a choice has prompt injection",
    "sentence": "the sentence with the answer is not in the passage",
    "in the passage": "the passage has the answer, so the question is on no neighbour",
    "markup": "HTML that the passage does not have",
    "language": "another language than the passage",
    "duplicate": "the same question or fact as another on the document",
    "long answer": "the answer of an open question has more than 12 words",
    "no answer": "the model gave no complete answer, or none in the form of questions",
    "not verified": "asked with the passage, the model gives another answer, or none",
    "decision": "a person dropped it",
    "closed-book": "asked without the passage, the model is correct every time",
    "not known": "asked without the passage, the model is not correct every time",
}
"""Reason of a refusal -> its meaning."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposed question. `answer` is the correct choice, `sentence` the sentence of the passage
    with the answer."""

    question: str
    answer: str
    wrong: tuple[str, ...]
    sentence: str

    @property
    def choices(self) -> tuple[str, ...]:
        """The four choices, in an order that depends only on the words: each position is equally
        likely for the answer."""
        choices = (self.answer, *self.wrong)
        return tuple(sorted(choices, key=partial(content_id, self.question)))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A draft without a fault, and the model's rating of its specificity (1 to 10)."""

    draft: Draft
    specificity: int


def read_drafts(answer: str) -> list[Draft]:
    """Return the drafts in a model's answer. A missing line is an empty field."""
    drafts: list[Draft] = []
    lines: list[tuple[str, str]] = []
    # The last one begins a draft that is never read: it closes the draft before it.
    for line in [*plain_text(answer).splitlines(), "Question: -"]:
        match = _LINE.match(line.strip())
        if match is None:
            # The key was alone on the line before.
            if line.strip() and lines and not lines[-1][1]:
                lines[-1] = (lines[-1][0], line.strip())
            continue
        key = match["key"].lower()
        if key == "question" and lines:
            # "Question 1:" may be a heading above the question.
            if lines != [("question", "")]:
                drafts.append(_parse_draft(lines))
            lines = []
        lines.append((key, match["value"]))
    return drafts


def _parse_draft(lines: Sequence[tuple[str, str]]) -> Draft:
    # Reversed, so that of two lines with one key the first counts.
    first = dict(reversed(lines))
    wrong = tuple(value for key, value in lines if key == "wrong")
    sentence = first.get("sentence", "").strip('"“”')
    return Draft(first.get("question", ""), first.get("answer", ""), wrong, sentence)


def find_fault(
    draft: Draft,
    passage: str,
    others: Iterable[Draft],
    *,
    open_answer: bool = False,
    retention: bool = False,
) -> tuple[str, str]:
    """Return (reason of `REASONS`, evidence) of the first fault, ("", "") without one.

    The draft must differ from `others`; the answer of an open question (`open_answer`) is short.
    One that measures `retention` is on what the passage does not state.
    """
    fault = _find_fault_of_form(draft, open_answer) or _find_fault_of_choices(draft)
    fault = fault or _find_fault_in_passage(draft, passage, retention)
    return fault or _find_hint(draft) or find_duplicate(draft, others) or ("", "")


_Fault = tuple[str, str]
"""(reason of `REASONS`, evidence)"""


def _find_fault_of_form(draft: Draft, open_answer: bool) -> _Fault | None:
    if not (draft.question and draft.answer and draft.sentence and len(draft.wrong) == 3):
        found = f"{format_count(len(draft.wrong), 'wrong answer')}, answer {draft.answer!r}"
        return "malformed", f"{found}, sentence {draft.sentence[:40]!r}"
    if open_answer and len(draft.answer.split()) > _MOST_WORDS:
        return "long answer", draft.answer[:80]
    return None


def _find_fault_of_choices(draft: Draft) -> _Fault | None:
    choices = (draft.answer, *draft.wrong)
    forms = list(map(word_form, choices))
    if len(set(forms)) < 4 or "" in forms:
        return "options", " / ".join(choices)
    for choice in choices:
        if _CATCH_ALL.search(choice):
            return "catch-all", choice
    if f" {forms[0]} " in f" {word_form(draft.question)} ":
        return "answer in question", draft.answer
    if has_injection(draft.question, *choices):
        return "injection", draft.question[:80]
    return None


def _find_fault_in_passage(draft: Draft, passage: str, retention: bool) -> _Fault | None:
    mention = _MENTIONS_TEXT.search(draft.question)
    if mention:
        return "points at the text", mention[0]
    # Spaces around both, so that whole words are found.
    form = f" {word_form(passage)} "
    is_stated = f" {word_form(draft.sentence)} " in form
    if retention and (is_stated or f" {word_form(draft.answer)} " in form):
        return "in the passage", draft.answer
    if not retention and not is_stated:
        return "sentence", draft.sentence[:80]
    full_text = " ".join((draft.question, draft.answer, *draft.wrong))
    tag = new_markup(full_text, passage)
    if tag:
        return "markup", tag
    change = compare_languages(passage, full_text)
    if change:
        return "language", change
    return None


def _find_hint(draft: Draft) -> _Fault | None:
    """Return the difference in form between the correct choice and the other three, None without
    one."""
    choices = (draft.answer, *draft.wrong)
    n_correct, *others = (word_form(choice).count(" ") + 1 for choice in choices)
    longest = max(others)
    is_longer = n_correct - longest >= _MIN_LENGTH_DIFFERENCE
    if is_longer and n_correct > _MAX_LENGTH_RATIO * longest:
        return "longest", f"{format_count(n_correct, 'word')}, the others at most {longest}"
    for name, shape in _SHAPES.items():
        correct, *wrong = (bool(shape.search(choice)) for choice in choices)
        if correct and not any(wrong):
            return "odd one out", f"{name} in the correct choice alone"
        if not correct and all(wrong):
            return "odd one out", f"{name} in all but the correct choice"
    return None


def find_duplicate(draft: Draft, others: Iterable[Draft]) -> _Fault | None:
    """Return the question of `others` that asks the same, None without one."""
    question, answer, sentence = (
        word_form(text) for text in (draft.question, draft.answer, draft.sentence)
    )
    words = set(question.split())
    for other in others:
        other_question = word_form(other.question)
        other_words = set(other_question.split())
        overlap = len(words & other_words) / max(1, len(words | other_words))
        same_answer = answer == word_form(other.answer)
        # Like words alone let two questions on one fact through.
        same_fact = overlap > _MAX_OVERLAP or sentence == word_form(other.sentence)
        if question == other_question or (same_answer and same_fact):
            return "duplicate", other.question
    return None
