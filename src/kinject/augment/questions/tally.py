"""What came of a run that makes questions: the rows of its files, the counts, and the table at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinject.augment.checks import normal_form
from kinject.augment.questions.drafts import REASONS, Candidate, Draft, fault_of
from kinject.augment.questions.examine import Outcome
from kinject.disk import Row, content_id
from kinject.types import Document, Passage


@dataclass(frozen=True)
class QuestionsResult:
    """What `make_questions` made. `asked` and `got` count questions, `refused` drafts by reason, `failed` passages by error.

    `spare` counts questions that held but were not among the most specific ones. Tokens are those of every passage that
    is done; `cost` is that of everything ever answered into the run folder, in the currency of the prices; `unsure` says
    what of it is not known for certain.
    """

    run_dir: Path
    questions_path: Path
    rejected_path: Path
    manifest_path: Path
    n_documents: int
    n_passages: int
    asked: int
    got: int
    n_validation: int
    n_test: int
    spare: int
    refused: Mapping[str, int]
    failed: Mapping[str, int]
    tokens_in: int
    tokens_out: int
    n_sent: int
    n_cached: int
    cost: float
    out_of_budget: bool
    unsure: str = ""

    @property
    def short(self) -> bool:
        """Whether fewer questions came out than were asked for."""
        return self.got < self.asked


def outcome_row(identity: str, passage: Passage, outcome: Outcome) -> Row:
    """Return what is stored of a passage that is done."""
    return {
        "id": identity,
        "passage_id": passage.id,
        "document_id": passage.document_id,
        "candidates": [{**_draft_row(found.draft), "specificity": found.specificity} for found in outcome.candidates],
        "refused": [
            {**(_draft_row(draft) if draft else {}), "reason": reason, "detail": detail}
            for draft, reason, detail in outcome.refused
        ],
        "usage": {"tokens_in": outcome.tokens_in, "tokens_out": outcome.tokens_out},
    }


def _draft_row(draft: Draft) -> dict[str, Any]:
    return {
        "question": draft.question, "answer": draft.answer, "wrong": list(draft.wrong), "sentence": draft.sentence,
    }  # fmt: skip


def _draft_of(row: Mapping[str, Any]) -> Draft:
    return Draft(row["question"], row["answer"], tuple(row["wrong"]), row["sentence"])


class Picking:
    """Picks the questions of a document's passages, one document after the other, and counts."""

    def __init__(self, n_questions: int) -> None:
        self._n_questions = n_questions
        self._document = ""
        self._picked: list[Draft] = []
        self.counts = Counter[str]()
        self.refused = Counter[str]()

    def pick(self, document: Document, stored: Row) -> tuple[list[Row], list[Row]]:
        """Return (rows of the questions picked from a stored outcome, rows of what was refused).

        They are the most specific ones that ask for nothing that an earlier passage of the document was asked.
        """
        if document.id != self._document:
            self._document, self._picked = document.id, []
        rows: list[Row] = []
        refused = list(stored["refused"])
        for found in stored["candidates"]:
            candidate = Candidate(_draft_of(found), found["specificity"])
            # The passage is not at hand, and all else held before: only what it repeats is asked for.
            reason, detail = fault_of(candidate.draft, candidate.draft.sentence, self._picked)
            if reason:
                refused.append({**found, "reason": reason, "detail": detail})
            elif len(rows) < self._n_questions:
                rows.append(question_row(document, stored["passage_id"], candidate))
                self._picked.append(candidate.draft)
            else:
                self.counts["spare"] += 1
        self.counts.update(got=len(rows), **stored["usage"])
        self.refused.update(row["reason"] for row in refused)
        place = {"document_id": document.id, "passage_id": stored["passage_id"]}
        return rows, [place | row for row in refused]


def question_row(document: Document, passage_id: str, candidate: Candidate) -> Row:
    """Return a question in the question format, with what it goes by beside."""
    draft = candidate.draft
    choices = list(draft.choices)
    answer = choices.index(draft.answer)
    return {
        "id": content_id("question", document.id, draft.question, choices, answer),
        "document_id": document.id,
        "fact_id": content_id("fact", document.id, normal_form(draft.sentence), normal_form(draft.answer)),
        "subject": document.title,
        "question": draft.question,
        "choices": choices,
        "answer": answer,
        "passage_id": passage_id,
        "sentence": draft.sentence,
        "specificity": candidate.specificity,
    }


def is_validation(document_id: str, share: float) -> bool:
    """Return whether the questions on a document are for validation: by its id alone, so that it stays where it is."""
    return int(content_id("split", document_id), 16) < share * 2**64


def questions_of(rows: Iterator[Row], share: float, *, validation: bool) -> Iterator[Row]:
    """Yield the rows of one of the two sets."""
    return (row for row in rows if is_validation(row["document_id"], share) is validation)


def render_questions(result: QuestionsResult) -> str:
    """Return the table that ends a run: what was kept, in which set, what was refused and why, and what it cost."""
    lines = [
        f"{result.n_documents} documents, {result.n_passages} passages -> {result.got} of {result.asked} questions "
        f"in {result.questions_path}",
        f"validation.jsonl {result.n_validation}, test.jsonl {result.n_test} (by document); "
        f"{result.spare} more held, but were less specific",
    ]
    if result.refused:
        lines += ["", f"questions refused (each in {result.rejected_path}):"]
        lines += [f"{number:>8}  {reason}: {REASONS[reason]}" for reason, number in result.refused.items()]
    if result.failed:
        lines += ["", "passages that no answer came for:"]
        lines += [f"{number:>8}  {error}" for error, number in result.failed.items()]
    lines += [
        "",
        f"{result.n_sent} requests sent in this run, {result.n_cached} answered from the cache; "
        f"{result.tokens_in:,} tokens in, {result.tokens_out:,} out",
    ]
    if result.cost:
        lines.append(f"cost {result.cost:.4f}, everything answered into {result.run_dir} included")
    if result.unsure:
        lines.append(result.unsure)
    if result.out_of_budget:
        lines.append("Stopped before the budget was crossed.")
    if result.short:
        cure = "run again for what failed; " if result.failed else ""
        lines.append(
            f"Short by {result.asked - result.got}: {cure}raise questions.max_attempts or n_proposed for more."
        )
    return "\n".join(lines)
