"""What the stage `questions` stores of each passage, and the questions that it selects from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kinject.augment.checks.checker import normal_form
from kinject.augment.drafts import REASONS, Candidate, Draft, find_duplicate
from kinject.augment.store import DECISIONS
from kinject.augment.stored_rows import Fields, is_count, is_text, is_texts, is_usage
from kinject.disk import Row, content_id
from kinject.errors import InputError
from kinject.llm import JsonValue
from kinject.recipe import QuestionsSection
from kinject.types import Document, Passage


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

    def _reason(self, stored: Row, draft: Draft, decision: Row) -> tuple[str, str]:
        """Return why a stored draft is refused, ("", "") if it is not."""
        if decision:
            if decision["decision"] == "drop":
                return "decision", ""
            return "", ""
        if stored.get("reason"):
            return stored["reason"], stored.get("detail", "")
        # The other faults were looked for in the passage, of which this has one sentence: the
        # others may have the same tag, or words of the same language.
        return find_duplicate(draft, self._selected) or ("", "")


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
