"""The stage: documents in, two question sets out, everything counted."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from kinject.augment.checks.checker import normal_form
from kinject.augment.questions.drafts import REASONS, Candidate, Draft, find_fault
from kinject.augment.questions.prompts import LETTERS, closed_book, propose, verify
from kinject.augment.questions.writer import Outcome, QuestionWriter
from kinject.augment.requests import generator_identity, open_generator
from kinject.augment.requests.cache import AnswerCache
from kinject.augment.requests.sender import Sender, Traffic, run_workers
from kinject.augment.validation import limits_of, questions_of_recipe
from kinject.corpus.documents import document_hashes, read_documents
from kinject.corpus.passages import split_passages, token_spans
from kinject.disk import Journal, Places, Row, content_id, lock_dir, read_jsonl, write_jsonl, write_manifest
from kinject.errors import EndpointError, InputError
from kinject.recipe import QuestionsRecipe, QuestionsSection
from kinject.terminal import Progress
from kinject.types import Document, Passage, Usage


def make_questions(recipe: QuestionsRecipe) -> QuestionsResult:
    """Write the questions that `recipe` asks for; a rerun asks only about passages that are not done.

    A run that comes to the end of its budget ends short, with the questions that it has.

    Raises `RecipeError`, `InputError` (documents), `EndpointError` and `DiskError`; `KeyboardInterrupt` after Ctrl-C.
    Whatever was answered before stays stored.
    """
    section = questions_of_recipe(recipe)
    with lock_dir(recipe.run_dir):
        return asyncio.run(_make(recipe, section))


@dataclass(frozen=True)
class _Work:
    """The passages of a recipe, read anew on each pass so that they never lie in memory."""

    recipe: QuestionsRecipe
    section: QuestionsSection

    def passages(self) -> Iterator[tuple[Document, Passage]]:
        """Yield every passage with its document. Raises as `read_documents` and `token_spans`."""
        spans = token_spans(self.section.tokenizer)
        for document in read_documents(Path(self.section.documents)):
            for passage in split_passages(document, self.section.passage_tokens, spans):
                yield document, passage

    def identity(self, document: Document, passage: Passage) -> str:
        """Return an id that depends on everything that shapes the questions on a passage."""
        section, blank = self.section, ("",) * len(LETTERS)
        asked = [
            propose(document.title, passage.text, section.n_proposed, ()),
            verify("", "", "", blank),
            closed_book("", blank),
        ]
        numbers = [section.n_questions, section.n_proposed, section.closed_book, section.max_attempts, self.recipe.seed]
        return content_id("questions", passage.id, asked, numbers, generator_identity(section.generator))


class _Outcomes:
    """outcomes.jsonl of a run folder: what came of each passage, found by its id, not kept in memory."""

    def __init__(self, run_dir: Path) -> None:
        with contextlib.ExitStack() as stack:
            self._places = stack.enter_context(Places())
            self._journal = stack.enter_context(Journal(run_dir / "outcomes.jsonl", sync=False, each=self._note))
            self._open = stack.pop_all()

    def _note(self, place: int, row: Row) -> None:
        try:
            self._places.add(str(row.get("id")), place)
        except InputError as error:
            raise InputError(f"outcomes.jsonl: {error}. The file was changed by hand; move it away.") from error

    def get(self, identity: str) -> Row | None:
        """Return the row of a passage that is done, None of another."""
        places = self._places.of(identity)
        return self._journal.row_at(places[-1]) if places else None

    def add(self, row: Row) -> None:
        """Store the row of a passage that is done."""
        self._places.add(row["id"], self._journal.append(row))

    def __enter__(self) -> _Outcomes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()


@dataclass
class _Run:
    """One run: `failed` counts passages without an answer by error."""

    work: _Work
    outcomes: _Outcomes
    writer: QuestionWriter
    progress: Progress
    failed: Counter[str] = field(default_factory=Counter)

    async def do(self, item: tuple[Document, Passage]) -> None:
        """Examine one passage, if it is not done, and store what came of it."""
        document, passage = item
        identity = self.work.identity(document, passage)
        if self.outcomes.get(identity) is None:
            try:
                outcome = await self.writer.write(document, passage)
            except InputError as error:
                raise InputError(f"{document.source}: {error}") from error
            except EndpointError as error:
                if error.fatal:
                    raise
                self.failed[str(error)] += 1
            else:
                self.outcomes.add(outcome_row(identity, passage, outcome))
        self.progress.set_status(self.writer.sender.status())
        self.progress.advance()


async def _make(recipe: QuestionsRecipe, section: QuestionsSection) -> QuestionsResult:
    work = _Work(recipe, section)
    counts = Counter[str]()
    last = ""
    # Reads every document before the first request: a fault on the last line must not cost money.
    for document, _ in work.passages():
        counts["passages"] += 1
        counts["documents"] += document.id != last
        last = document.id
    with _Outcomes(recipe.run_dir) as outcomes, Progress("questions", counts["passages"], "passages") as progress:
        run = await _ask(recipe, section, work, outcomes, progress)
        picking = Picking(section.n_questions)
        paths = [recipe.run_dir / f"{name}.jsonl" for name in ("questions", "rejected", "validation", "test")]
        questions_path, rejected_path, validation_path, test_path = paths
        write_jsonl(questions_path, _picked(work, outcomes, picking, 0))
        write_jsonl(rejected_path, _picked(work, outcomes, Picking(section.n_questions), 1))
    n_by_set = [
        write_jsonl(path, questions_of(_rows(questions_path), section.validation, validation=path is validation_path))
        for path in (validation_path, test_path)
    ]
    sender = run.writer.sender
    result = QuestionsResult(
        run_dir=recipe.run_dir, questions_path=questions_path, rejected_path=rejected_path,
        manifest_path=recipe.run_dir / "manifest.json", n_documents=counts["documents"], n_passages=counts["passages"],
        asked=counts["passages"] * section.n_questions, got=picking.counts["got"], n_validation=n_by_set[0],
        n_test=n_by_set[1], spare=picking.counts["spare"], refused=dict(picking.refused.most_common()),
        failed=dict(run.failed.most_common()), tokens_in=picking.counts["tokens_in"],
        tokens_out=picking.counts["tokens_out"], n_sent=sender.traffic.n_sent, n_cached=sender.traffic.n_cached,
        cost=sender.budget.spent, out_of_budget=sender.out_of_budget, unsure=sender.traffic.unsure(),
    )  # fmt: skip
    _write_manifest(recipe, section, result, sender.traffic)
    return result


async def _ask(
    recipe: QuestionsRecipe, section: QuestionsSection, work: _Work, outcomes: _Outcomes, progress: Progress
) -> _Run:
    limits = limits_of(section)
    async with contextlib.AsyncExitStack() as stack:
        writer = await stack.enter_async_context(open_generator(recipe, section.generator))
        cache = stack.enter_context(AnswerCache(recipe.run_dir / "cache.sqlite")) if writer.remote else None
        sender = Sender(writer, cache, limits, cache.usage() if cache else Usage())
        run = _Run(work, outcomes, QuestionWriter(sender, section, recipe.seed), progress)
        began = time.monotonic()
        try:
            await run_workers(work.passages(), run.do, sender, limits.concurrency)
        except EndpointError as error:
            raise EndpointError(
                f"{error} What was answered is stored; the same command goes on.", fatal=True
            ) from error
        sender.traffic.seconds = time.monotonic() - began
    return run


def _picked(work: _Work, outcomes: _Outcomes, picking: Picking, part: int) -> Iterator[Row]:
    """Yield the questions (part 0) or the refused drafts (part 1) of all passages that are done, in order."""
    for document, passage in work.passages():
        stored = outcomes.get(work.identity(document, passage))
        if stored is not None:
            yield from picking.pick(document, stored)[part]


def _rows(path: Path) -> Iterator[Row]:
    return (row for _, row in read_jsonl(path))


def _write_manifest(
    recipe: QuestionsRecipe, section: QuestionsSection, result: QuestionsResult, traffic: Traffic
) -> None:
    names = (
        "n_documents", "n_passages", "asked", "got", "n_validation", "n_test", "spare", "refused", "failed", "tokens_in",
        "tokens_out", "cost", "out_of_budget",
    )  # fmt: skip
    counts = {name: getattr(result, name) for name in names}
    counts["this_run"] = traffic.counts()
    inputs = document_hashes(Path(section.documents))
    write_manifest(
        result.manifest_path, stage="questions", inputs=inputs, recipe=recipe.raw, counts=counts,
        outputs=["questions.jsonl", "validation.jsonl", "test.jsonl"],
    )  # fmt: skip


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
            reason, detail = find_fault(candidate.draft, candidate.draft.sentence, self._picked)
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
