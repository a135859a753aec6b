"""Drafts of questions: the prompts, the parser of the answers, the checks (a hint at the correct
choice), the store."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kinject.augment.answers import plain_text
from kinject.augment.checks.checker import new_markup, normal_form
from kinject.augment.prompts import Source, language_line, task_messages
from kinject.augment.store import DECISIONS
from kinject.augment.stored_rows import Fields, is_count, is_text, is_texts, is_usage
from kinject.corpus.choices import word_form
from kinject.disk import Row, content_id
from kinject.errors import InputError
from kinject.language import compare_languages
from kinject.llm import JsonValue
from kinject.llm.prompt_injection import has_injection
from kinject.recipe import QuestionsSection
from kinject.recipe.yaml_lines import read_yaml
from kinject.terminal import format_count
from kinject.types import Document, Message, Passage

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
    return fault or _find_hint(draft) or _find_duplicate(draft, others) or ("", "")


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


def _find_duplicate(draft: Draft, others: Iterable[Draft]) -> _Fault | None:
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


# "A lot of people", "D'après" and "C'est" name no choice.
_LETTER = re.compile(
    r"\W*(?:(?:the |my )?(?:(?:correct|right|best) )?(?:answer|option|choice)(?: is)?\W*)?"
    r"([A-D])\b(?!['’])"
    r"(?!(?<=a)\s+(?!because|since|as|is|for)[^\W\d_])",
    re.IGNORECASE,
)


def parse_letter(answer: str) -> str:
    """Return the letter (A to D) at the beginning of an answer, "" without one."""
    match = _LETTER.match(answer)
    if match is None:
        return ""
    return match[1].upper()


def parse_specificity(answer: str) -> int:
    """Return the first number from 1 to 10 in an answer, 1 without one."""
    match = re.search(r"\b(10|[1-9])\b", answer)
    if match is None:
        return 1
    return int(match[1])


LETTERS = "ABCD"

_TEXTS: Mapping[str, str] = read_yaml(Path(__file__).with_name("questions.yaml")).root
"""The prompts, by name."""


def propose_messages(
    source: Source,
    n: int,
    earlier: Sequence[str],
    kinds: Collection[str] = ("choices",),
    *,
    retention: bool = False,
) -> list[Message]:
    """Return the prompt for `n` questions of `kinds` on a passage, about other facts than the
    `earlier` questions.

    Those on `retention` are about its neighbours.
    """
    rule = language_line(source.text) + "\n"
    if "open" in kinds:
        rule = _TEXTS["open"] + rule
    task, sentence = _TEXTS["propose"], _TEXTS["stated"]
    if retention:
        task, sentence = _TEXTS["retention"], _TEXTS["known"]
    task = task.format(n=n, language=rule)
    lines = _TEXTS["as_lines"].replace("{sentence}", sentence)
    return _about(source, task + lines + _earlier(earlier))


def _earlier(questions: Sequence[str]) -> str:
    if not questions:
        return ""
    return _TEXTS["earlier"] + "\n".join(f"- {question}" for question in questions)


def verify_messages(source: Source, question: str, choices: Sequence[str]) -> list[Message]:
    """Return the prompt for the correct choice according to the passage, and for the question's
    specificity."""
    return _about(
        source, _TEXTS["verify"].replace("{question}", _render_question(question, choices))
    )


def closed_book_messages(question: str, choices: Sequence[str]) -> list[Message]:
    """Return the prompt with the question alone, without the passage."""
    task = _TEXTS["closed_book"].replace("{question}", _render_question(question, choices))
    return [
        {"role": "system", "content": _TEXTS["closed_book_system"]},
        {"role": "user", "content": task},
    ]


def is_question_prompt(messages: Sequence[Message]) -> bool:
    """Return whether `messages` are a prompt of this module."""
    return bool(messages) and messages[0]["content"] in (
        _TEXTS["system"],
        _TEXTS["closed_book_system"],
    )


def _render_question(question: str, choices: Sequence[str]) -> str:
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True)]
    return "\n".join([question, *lines])


def _about(source: Source, task: str) -> list[Message]:
    _, user = task_messages(source.title, source.text, task, source.headings)
    return [{"role": "system", "content": _TEXTS["system"]}, user]


@dataclass
class Outcome:
    """The questions of one passage: candidates, the most specific first, and refused drafts as
    (draft, reason, detail)."""

    candidates: list[Candidate] = field(default_factory=list)
    refused: list[tuple[Draft | None, str, str]] = field(default_factory=list)
    usage: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of_row(cls, row: Row) -> Outcome:
        """Return a stored outcome that is to have more questions: without what was refused."""
        candidates = [Candidate(_draft_of(one), one["specificity"]) for one in row["candidates"]]
        return cls(candidates, [], Counter(row["usage"]))

    def known(self) -> list[Draft]:
        """Return the drafts on whose facts no more questions are asked for."""
        known = [candidate.draft for candidate in self.candidates]
        # What the model knows without the passage makes no question, however it is asked; a fact
        # whose draft had a fault of form may be asked about again.
        return known + [
            draft for draft, reason, _ in self.refused if draft and reason == "closed-book"
        ]

    def is_short(self, section: QuestionsSection) -> bool:
        """Return whether there are fewer questions than `section` asks for."""
        return len(self.candidates) < section.n_questions


def outcome_row(
    outcome_id: str, passage: Passage, outcome: Outcome, tries: int, endpoint: str
) -> Row:
    """Return the row of an outcome; `tries` counts the times that its endpoint, or another, was
    asked for it."""
    return {
        "id": outcome_id,
        "tries": tries,
        "endpoint": endpoint,
        "passage_id": passage.id,
        "document_id": passage.document_id,
        "candidates": [
            {**_draft_row(candidate.draft), "specificity": candidate.specificity}
            for candidate in outcome.candidates
        ],
        "refused": [
            {**_draft_row(draft), "reason": reason, "detail": detail}
            for draft, reason, detail in outcome.refused
        ],
        "usage": dict(outcome.usage),
    }


def _is_draft(value: JsonValue) -> bool:
    """Return whether a stored value is a draft, of which any field may be missing."""
    if not isinstance(value, Mapping):
        return False
    texts = [value.get(name, "") for name in ("question", "answer", "sentence")]
    return is_texts(texts) and is_texts(value.get("wrong", []))


def _is_candidate(value: JsonValue) -> bool:
    return _is_draft(value) and isinstance(value, Mapping) and is_count(value.get("specificity"))


def _is_refused(value: JsonValue) -> bool:
    # The summary has a sentence for each reason.
    return _is_draft(value) and isinstance(value, Mapping) and value.get("reason") in [*REASONS]


def _are_candidates(value: JsonValue) -> bool:
    return isinstance(value, list) and all(map(_is_candidate, value))


def _are_refused(value: JsonValue) -> bool:
    return isinstance(value, list) and all(map(_is_refused, value))


OUTCOME_FIELDS: Fields = {
    "id": is_text,
    "tries": is_count,
    "endpoint": is_text,
    "passage_id": is_text,
    "document_id": is_text,
    "candidates": _are_candidates,
    "refused": _are_refused,
    "usage": is_usage,
}
"""What `outcome_row` writes."""


def _draft_of(row: Row) -> Draft:
    """Return the draft in a row; the fields of an answer without one are empty."""
    return Draft(
        row.get("question", ""),
        row.get("answer", ""),
        tuple(row.get("wrong", ())),
        row.get("sentence", ""),
    )


def _draft_row(draft: Draft | None) -> dict[str, Any]:
    if draft is None:  # an answer without any
        return {}
    return {
        "question": draft.question,
        "answer": draft.answer,
        "wrong": list(draft.wrong),
        "sentence": draft.sentence,
    }


_EDITABLE = ("question", "answer", "wrong")
"""Fields that a person's decision may replace."""


class QuestionSelector:
    """Selects the questions of one document after the other, and counts them. `decisions` are a
    person's, by question id."""

    def __init__(self, section: QuestionsSection, decisions: Mapping[str, Row]) -> None:
        self._n_questions = section.n_questions
        self._validation = section.validation
        self._kinds = frozenset(section.kinds)
        self._decisions = decisions
        self._document = ""
        self._selected: list[Draft] = []
        self.counts = Counter[str]()
        self.refused = Counter[str]()
        self.applied: list[str] = []
        self.with_own_choices = set[str]()
        """The ids of questions whose wrong choices a person wrote."""

    def select(
        self, document: Document, outcome: Row, earlier: Sequence[Row] = ()
    ) -> tuple[str, list[Row], list[Row]]:
        """Return (``validation`` or ``test``, rows of selected questions, rows of refused drafts)
        of a stored outcome, and of the outcomes of `earlier` tries what a person kept of them.

        Those that a person kept or edited are selected, then the most specific ones, without
        duplicates of questions on earlier passages of the document.
        """
        if document.id != self._document:
            self._document, self._selected = document.id, []
        selected: list[Row] = []
        refused: list[Row] = []
        taken = set[str]()
        for name, stored in self._named(document.id, outcome, earlier):
            decision = self._decisions.get(name, {})
            if name in taken and decision.get("decision") != "drop":
                decision = {}  # proposed twice: the first is kept
            row = stored | {key: decision[key] for key in _EDITABLE if key in decision}
            # The page sends all fields of an edited question, so most are as they were.
            if row.get("wrong") != stored.get("wrong"):
                self.with_own_choices.add(name)
            draft = _draft_of(row)
            reason, detail = self._reason(stored, draft, decision)
            if decision:
                self.applied.append(name)
                if not reason and "choices" in self._kinds:
                    _check_choices(name, draft)
            if reason:
                refused.append({"id": name, **stored, "reason": reason, "detail": detail})
            elif decision or len(selected) < self._n_questions:
                candidate = Candidate(draft, row.get("specificity", 1))
                question = question_row(document, outcome["passage_id"], candidate, self._kinds)
                selected.append(question | {"id": name})
                taken.add(name)
                self._selected.append(draft)
            else:
                self.counts["spare"] += 1
        split = "test"
        if is_validation(document.id, self._validation):
            split = "validation"
        self.counts.update({split: len(selected), "got": len(selected)}, **outcome["usage"])
        self.refused.update(row["reason"] for row in refused)
        source = {"document_id": document.id, "passage_id": outcome["passage_id"]}
        return split, selected, [source | row for row in refused]

    def _named(
        self, document_id: str, outcome: Row, earlier: Sequence[Row]
    ) -> list[tuple[str, Row]]:
        """Return (id, draft) of an outcome and of what a person kept of `earlier` ones, that of a
        person first."""
        named = [
            (question_id(document_id, row), row)
            for row in (*outcome["refused"], *outcome["candidates"])
        ]
        named += self._kept_of(earlier, document_id, {name for name, _ in named})
        named.sort(key=self._is_left_to_us)  # stable: the order of the outcome stays
        return named

    def _kept_of(
        self, outcomes: Sequence[Row], document_id: str, known: set[str]
    ) -> Iterator[tuple[str, Row]]:
        """Yield (id, draft) of those that a person kept or edited and that are not `known`: a later
        try stores the drafts that it refused itself."""
        for outcome in outcomes:
            for row in (*outcome["refused"], *outcome["candidates"]):
                name = question_id(document_id, row)
                if name not in known and not self._is_left_to_us((name, row)):
                    known.add(name)
                    yield name, row

    def _is_left_to_us(self, named: tuple[str, Row]) -> bool:
        """Return whether no person kept or edited a question."""
        decision = self._decisions.get(named[0], {})
        return decision.get("decision") not in ("keep", "edit")

    def _reason(self, stored: Row, draft: Draft, decision: Row) -> _Fault:
        """Return why a stored draft is refused, ("", "") if it is not."""
        if decision:
            if decision["decision"] == "drop":
                return "decision", ""
            return "", ""
        if stored.get("reason"):
            return stored["reason"], stored.get("detail", "")
        # The other faults were looked for in the passage, of which this has one sentence: the
        # others may have the same tag, or words of the same language.
        return _find_duplicate(draft, self._selected) or ("", "")


def _check_choices(name: str, draft: Draft) -> None:
    """Raise `InputError` where a person kept or edited a draft whose choices make no question: a
    file with it could not be asked."""
    choices = {" ".join(choice.split()) for choice in draft.choices}
    if len(choices) < 2 or len(choices) < len(draft.choices):
        raise InputError(
            f"{DECISIONS}: {name}: found the answer {draft.answer!r:.60} and the wrong ones "
            f"{list(draft.wrong)!r:.160}, expected at least two choices, all different. Edit it "
            "(question, answer and wrong), or drop it."
        )


def question_id(document_id: str, row: Row) -> str:
    """Return the id of a stored draft, "" where it is not whole; an edited question keeps that of
    its first words."""
    draft = _draft_of(row)
    if not (draft.question and draft.answer and draft.wrong):
        return ""
    choices = list(draft.choices)
    return content_id("question", document_id, draft.question, choices, choices.index(draft.answer))


def question_row(
    document: Document, passage_id: str, candidate: Candidate, kinds: Collection[str]
) -> Row:
    """Return a question in the question format, with its passage, sentence and specificity."""
    draft = candidate.draft
    choices = list(draft.choices)
    answer = choices.index(draft.answer)
    answer_fields: Row = {}
    if "choices" in kinds:
        answer_fields |= {"choices": choices, "answer": answer}
    if "open" in kinds:
        answer_fields |= {"answers": [draft.answer]}
    return {
        "id": question_id(document.id, _draft_row(draft)),
        "document_id": document.id,
        # Not of the question: several on one fact are joined by it.
        "fact_id": content_id(
            "fact", document.id, normal_form(draft.sentence), normal_form(draft.answer)
        ),
        "subject": document.title,
        "question": draft.question,
        **answer_fields,
        "passage_id": passage_id,
        "sentence": draft.sentence,
        "specificity": candidate.specificity,
    }


def is_validation(document_id: str, fraction: float) -> bool:
    """Return whether the questions on a document are for validation. It depends on the id alone, so
    it never changes."""
    # A content id has 64 bits. Validation texts of a training have another hash: with this one
    # these questions would be on documents that nobody trained on.
    return int(content_id("split", document_id), 16) < fraction * 2**64
