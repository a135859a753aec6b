"""The stage: documents in, two question sets out, everything counted."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from kinject.augment.cache import AnswerCache
from kinject.augment.demands import limits_of, questions_of_recipe
from kinject.augment.generators import open_writer, writer_identity
from kinject.augment.questions.examine import Examiner
from kinject.augment.questions.prompts import LETTERS, closed_book, propose, verify
from kinject.augment.questions.tally import Picking, QuestionsResult, outcome_row, questions_of
from kinject.augment.sender import Sender, Traffic
from kinject.augment.workers import work_through
from kinject.corpus.documents import document_hashes, read_documents
from kinject.corpus.passages import split_passages, token_spans
from kinject.disk import Journal, Places, Row, content_id, lock_dir, read_jsonl, write_jsonl, write_manifest
from kinject.errors import EndpointError, InputError
from kinject.recipe import QuestionsSection, Recipe
from kinject.terminal import Progress
from kinject.types import Document, Passage, Usage


def make_questions(recipe: Recipe) -> QuestionsResult:
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

    recipe: Recipe
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
        return content_id("questions", passage.id, asked, numbers, writer_identity(section.generator))


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
    examiner: Examiner
    progress: Progress
    failed: Counter[str] = field(default_factory=Counter)

    async def do(self, item: tuple[Document, Passage]) -> None:
        """Examine one passage, if it is not done, and store what came of it."""
        document, passage = item
        identity = self.work.identity(document, passage)
        if self.outcomes.get(identity) is None:
            try:
                outcome = await self.examiner.examine(document, passage)
            except InputError as error:
                raise InputError(f"{document.source}: {error}") from error
            except EndpointError as error:
                if error.fatal:
                    raise
                self.failed[str(error)] += 1
            else:
                self.outcomes.add(outcome_row(identity, passage, outcome))
        self.progress.tell(self.examiner.sender.status())
        self.progress.advance()


async def _make(recipe: Recipe, section: QuestionsSection) -> QuestionsResult:
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
    sender = run.examiner.sender
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


async def _ask(recipe: Recipe, section: QuestionsSection, work: _Work, outcomes: _Outcomes, progress: Progress) -> _Run:
    limits = limits_of(section)
    async with contextlib.AsyncExitStack() as stack:
        writer = await stack.enter_async_context(open_writer(recipe, section.generator))
        cache = stack.enter_context(AnswerCache(recipe.run_dir / "cache.sqlite")) if writer.remote else None
        sender = Sender(writer, cache, limits, cache.usage() if cache else Usage())
        run = _Run(work, outcomes, Examiner(sender, section, recipe.seed), progress)
        began = time.monotonic()
        try:
            await work_through(work.passages(), run.do, sender, limits.concurrency)
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


def _write_manifest(recipe: Recipe, section: QuestionsSection, result: QuestionsResult, traffic: Traffic) -> None:
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
