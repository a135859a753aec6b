"""The stage `questions`: documents in, a validation and a test set of questions out."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from time import monotonic
from typing import Any

from kinject.augment import sandbox
from kinject.augment.checks.checker import check_completion
from kinject.augment.drafts import REASONS, Candidate, Draft, find_fault, read_drafts
from kinject.augment.passage_file import PassageFile, passages_of
from kinject.augment.plan import check_sections
from kinject.augment.prompts import Source, source_of
from kinject.augment.question_outcomes import OUTCOME_FIELDS, Outcome, QuestionSelector, outcome_row
from kinject.augment.question_prompts import (
    LETTERS,
    closed_book_messages,
    parse_letter,
    parse_specificity,
    propose_messages,
    verify_messages,
)
from kinject.augment.store import (
    WritingResult,
    common_fields,
    count_decisions,
    merge_decisions,
    read_decisions,
    render_decisions,
)
from kinject.augment.stored_rows import IndexedRows
from kinject.corpus.choices import measure_shortcuts, with_shared_choices
from kinject.corpus.passages import cut_note, split_passages, word_spans
from kinject.disk import Row, content_id, lock_dir, open_jsonl, write_manifest
from kinject.errors import EndpointError, InputError
from kinject.heap import document_hashes, read_numbered
from kinject.llm import request_seed
from kinject.llm.cache import CACHES, merge_caches
from kinject.llm.limits import limits_of
from kinject.llm.prompt_injection import has_injection, split_injection
from kinject.llm.sender import (
    Opener,
    Sender,
    gather_answers,
    generator_identity,
    open_cached,
    open_sender,
    run_event_loop,
    run_workers,
)
from kinject.recipe import QuestionsRecipe, QuestionsSection
from kinject.results import Shortcuts
from kinject.shards import (
    WHOLE,
    FinishedShard,
    Shard,
    finished_shards,
    merged_counts,
    refuse_changed,
    refuse_unmerged,
    shard_counts,
)
from kinject.terminal import Progress, format_count
from kinject.types import Completion, Document, Message, Passage, Question

_Request = tuple[list[Message], int]


@dataclass(frozen=True, kw_only=True)
class QuestionsResult(WritingResult):
    """The result of `make_questions`: `asked` and `got` count questions, `refused` drafts, `failed`
    passages.

    `spare` counts questions without a fault that are not among the most specific ones, `decisions`
    those of a person (decisions.jsonl) by kind. `shortcuts` tell what the choices give away, None
    without any.
    """

    questions_path: Path
    n_validation: int
    n_test: int
    spare: int
    decisions: Mapping[str, int]
    shortcuts: Shortcuts | None = None

    @property
    def short(self) -> bool:
        """Whether there are fewer questions than requested."""
        return self.got < self.asked

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a row for each outcome, with its number of questions (of passages, where no answer
        came)."""
        outcomes = {"validation": self.n_validation, "test": self.n_test, "spare": self.spare}
        outcomes |= {f"refused: {reason}": n for reason, n in self.refused.items()}
        outcomes |= {f"no answer: {error}": n for error, n in self.failed.items()}
        return [{"outcome": outcome, "number": n} for outcome, n in outcomes.items()]


def make_questions(
    recipe: QuestionsRecipe, *, retry: bool = False, shard: Shard = WHOLE
) -> QuestionsResult:
    """Write the questions of `recipe`; a rerun sends requests only for passages that are not done.

    Passages with too few questions are asked about again with `retry`, and where endpoint or model
    have changed since. A run whose budget is spent ends short, with the questions that it has.
    With a `shard` it writes those on its documents, in its own folder, for `merge_questions`.

    Raises `RecipeError`, `InputError` (documents), `EndpointError` and `DiskError`;
    `KeyboardInterrupt` after Ctrl-C. Every answer before that stays stored.
    """
    check_sections(recipe)
    if shard.total:
        recipe = replace(recipe, run_dir=shard.folder(recipe.run_dir))
    else:
        refuse_unmerged(recipe.run_dir, _OUTCOMES)
    with lock_dir(recipe.run_dir, stage="questions"):
        return run_event_loop(_make_questions(recipe, retry, shard))


def merge_questions(recipe: QuestionsRecipe) -> QuestionsResult:
    """Make of the finished shards of `recipe` what one run makes. No model is asked.

    Raises as `make_questions`, and `InputError` as `finished_shards`.
    """
    check_sections(recipe)
    run_dir, command = recipe.run_dir, f"kinject questions {recipe.command_line}"
    with (
        lock_dir(run_dir, stage="questions"),
        finished_shards(run_dir, command, recipe.raw, _input_hashes(recipe)) as shards,
    ):
        refuse_changed(shards, [_OUTCOMES])
        with _open_outcomes(run_dir) as outcomes:
            for one in shards:
                with _open_outcomes(one.folder) as others:
                    outcomes.add_all(others)
        merge_decisions(run_dir, [one.folder for one in shards])
        merge_caches(run_dir / CACHES[0], [one.folder / CACHES[0] for one in shards])
        return run_event_loop(_make_questions(recipe, retry=False, shard=WHOLE, shards=shards))


_OUTCOMES = "outcomes.jsonl"


def _open_outcomes(run_dir: Path) -> IndexedRows:
    return IndexedRows(run_dir / _OUTCOMES, "id", OUTCOME_FIELDS)


async def _make_questions(
    recipe: QuestionsRecipe, retry: bool, shard: Shard, shards: Sequence[FinishedShard] = ()
) -> QuestionsResult:
    """Write the questions; with `shards`, whose outcomes are stored, request none."""
    run_dir, section = recipe.run_dir, recipe.questions
    limits = limits_of(section.generator, section.budget, shard)
    opener: Opener = sandbox.open_generator
    if shards:
        opener = open_cached
    decisions = read_decisions(run_dir)
    selector = QuestionSelector(section, decisions)
    with PassageFile(run_dir, shard) as passages:
        # Every document is read before the first request: a fault on the last line must not cost
        # money.
        for _, document in read_numbered(Path(section.documents), recipe.documents, shard):
            passages.add(document, split_passages(document, section.passage_tokens, word_spans))
        n_passages = passages.counts["passages"]
        with (
            _open_outcomes(run_dir) as outcomes,
            Progress("questions", n_passages, "passages") as progress,
        ):
            async with open_sender(section.generator, run_dir, limits, opener=opener) as sender:
                writer = QuestionWriter(sender, section, recipe.seed)
                failed = Counter[str]()
                for one in shards:
                    failed.update(one.counts["failed"])
                if not shards:
                    failed = await _request_questions(
                        writer, limits.concurrency, passages, outcomes, progress, retry
                    )
            more_counts = {"this_run": sender.traffic.counts(), **shard_counts(shard)}
            if shards:
                progress.advance(n_passages, earlier=True)
                sender.budget.empty = any(one.counts["out_of_budget"] for one in shards)
                more_counts |= merged_counts(shards)
            shortcuts = _write_files(run_dir, writer, passages, outcomes, selector)
    counts = selector.counts
    result = QuestionsResult(
        **common_fields(sender, passages.counts, counts),
        run_dir=run_dir,
        questions_path=run_dir / "questions.jsonl",
        rejected_path=run_dir / "rejected.jsonl",
        manifest_path=run_dir / "manifest.json",
        asked=n_passages * section.n_questions,
        got=counts["got"],
        n_validation=counts["validation"],
        n_test=counts["test"],
        spare=counts["spare"],
        refused=dict(selector.refused.most_common()),
        failed=dict(failed.most_common()),
        decisions=count_decisions(decisions, selector.applied),
        shortcuts=shortcuts,
    )
    _write_manifest(recipe, result, more_counts)
    return result


async def _request_questions(
    writer: QuestionWriter,
    n_workers: int,
    passages: PassageFile,
    outcomes: IndexedRows,
    progress: Progress,
    retry: bool,
) -> Counter[str]:
    """Write the questions of every passage that is not done; return the failed passages by
    error."""
    section, sender = writer.section, writer.sender
    endpoint = content_id(section.generator.base_url)  # another model has other ids
    failed = Counter[str]()

    async def process(item: tuple[Document, Passage]) -> None:
        document, passage = item
        outcome_id = writer.outcome_id(document, passage)
        outcome, tries, is_open = Outcome(), 0, True
        stored = outcomes.get(outcome_id)
        if stored:
            row = stored[-1]
            outcome, tries = Outcome.of_row(row), row.get("tries", 1)
            may_add = retry or row.get("endpoint") != endpoint
            is_open = may_add and outcome.is_short(section)
        if is_open:
            # Another seed for each try: with the same one, the model would answer the same.
            again = replace(writer, seed=writer.seed + (tries << 32))
            try:
                await again.write(document, passage, outcome)
            except InputError as error:
                raise InputError(f"{document.source}: {error}") from error
            except EndpointError as error:
                if error.fatal:
                    raise
                failed[str(error)] += 1
            else:
                new_row = outcome_row(outcome_id, passage, outcome, tries + 1, endpoint)
                outcomes.add(outcome_id, new_row)
        progress.set_status(sender.status())
        progress.advance()

    start = monotonic()
    try:
        await run_workers(passages_of(passages), process, sender, n_workers)
    except EndpointError as error:
        raise EndpointError(
            f"{error} Every answer is stored; the same command resumes.", fatal=True
        ) from error
    sender.traffic.seconds = monotonic() - start
    return failed


@dataclass(frozen=True)
class QuestionWriter:
    """Writes questions with the model behind `sender`. `seed` is the recipe's."""

    sender: Sender
    section: QuestionsSection
    seed: int

    def outcome_id(self, document: Document, passage: Passage) -> str:
        """Return an id that depends on everything that shapes the questions on a passage."""
        # All three prompts, two of them without a question: a changed template makes other
        # questions.
        section, blank = self.section, ("",) * len(LETTERS)
        arguments = (source_of(document, passage), section.n_proposed, (), section.kinds)
        messages = [
            propose_messages(*arguments, retention=section.retention),
            verify_messages(Source("", ""), "", blank),
            closed_book_messages("", blank),
        ]
        numbers = [
            section.n_questions,
            section.n_proposed,
            section.closed_book,
            section.max_attempts,
            self.seed,
        ]
        return content_id(
            "questions", passage.id, messages, numbers, generator_identity(section.generator)
        )

    async def write(self, document: Document, passage: Passage, outcome: Outcome) -> None:
        """Put the questions on a passage into `outcome`. While they are too few, the model is asked
        again, for other facts.

        Raises `EndpointError` for a request without an answer, and `Stopped` at the end of the run.
        """
        known: list[Draft] | None = None
        for attempt in range(self.section.max_attempts):
            before, known = known, outcome.known()
            # The same prompt has the same answer at temperature 0.
            is_same = known == before and self.section.generator.sampling_temperature == 0
            if is_same or not outcome.is_short(self.section):
                break
            drafts = await self._propose(document, passage, attempt, outcome, known)
            if self.section.retention:
                candidates = [Candidate(draft, 1) for draft in drafts]
            else:
                candidates = await self._verify(document, passage, drafts, outcome)
            outcome.candidates += await self._asked_without_passage(candidates, outcome)
            # A stable sort: of equally specific questions the one proposed first comes first.
            outcome.candidates.sort(key=attrgetter("specificity"), reverse=True)

    async def _propose(
        self,
        document: Document,
        passage: Passage,
        attempt: int,
        outcome: Outcome,
        known: Sequence[Draft],
    ) -> list[Draft]:
        """Return the proposed drafts, on other facts than those of `known`, that have no fault."""
        earlier = [draft.question for draft in known]
        arguments = (
            source_of(document, passage),
            self.section.n_proposed,
            earlier,
            self.section.kinds,
        )
        messages = propose_messages(*arguments, retention=self.section.retention)
        (completion,) = await self._send([(messages, self._seed_of(messages, attempt))], outcome)
        verdict = check_completion(completion)
        drafts: list[Draft] = []
        if verdict.accepted:
            drafts = read_drafts(completion.text)
        if not drafts:
            outcome.refused.append((None, "no answer", verdict.detail or completion.text[:80]))
        accepted: list[Draft] = []
        # Without its injection, on which no question may be.
        is_open, text = "open" in self.section.kinds, split_injection(passage.shown)[0]
        for draft in drafts[: self.section.n_proposed]:
            others, retention = [*known, *accepted], self.section.retention
            reason, detail = find_fault(
                draft, text, others, open_answer=is_open, retention=retention
            )
            if reason:
                outcome.refused.append((draft, reason, detail))
            else:
                accepted.append(draft)
        return accepted

    async def _verify(
        self, document: Document, passage: Passage, drafts: Sequence[Draft], outcome: Outcome
    ) -> list[Candidate]:
        """Return the drafts for which the model, given the passage, chooses the correct answer."""
        rotations = [0]
        if has_injection(passage.shown, *(draft.question for draft in drafts)):
            # Prompt injection may name a letter. With the choices in two orders, it is correct in
            # one of them at most.
            rotations = [0, 1]
        replies = [
            await self._answers_with_passage(document, passage, drafts, by, outcome)
            for by in rotations
        ]
        verified: list[Candidate] = []
        for draft, *answers in zip(drafts, *replies, strict=True):
            correct = [LETTERS[_rotate(draft.choices, by).index(draft.answer)] for by in rotations]
            if list(map(parse_letter, answers)) == correct:
                verified.append(Candidate(draft, min(map(parse_specificity, answers))))
            else:
                detail = f"the model answers {answers[-1][:60]!r}"
                outcome.refused.append((draft, "not verified", detail))
        return verified

    async def _answers_with_passage(
        self,
        document: Document,
        passage: Passage,
        drafts: Sequence[Draft],
        rotation: int,
        outcome: Outcome,
    ) -> list[str]:
        """Return the model's answers, given the passage and the choices rotated; "" for an
        incomplete answer."""
        requests: list[_Request] = []
        for draft in drafts:
            choices = _rotate(draft.choices, rotation)
            messages = verify_messages(source_of(document, passage), draft.question, choices)
            requests.append((messages, self._seed_of(messages, 0)))
        return list(map(_complete_text, await self._send(requests, outcome)))

    async def _asked_without_passage(
        self, candidates: Sequence[Candidate], outcome: Outcome
    ) -> list[Candidate]:
        """Return the candidates that the model does not answer correctly every time without the
        passage (retention: does).

        The choices are rotated each time, so a preference for one letter is correct one time in
        four at most.
        """
        n_times = self.section.closed_book
        requests: list[_Request] = []
        correct: list[str] = []
        for candidate in candidates:
            for rotation in range(n_times):
                choices = _rotate(candidate.draft.choices, rotation + 1)
                messages = closed_book_messages(candidate.draft.question, choices)
                requests.append((messages, self._seed_of(messages, rotation)))
                correct.append(LETTERS[choices.index(candidate.draft.answer)])
        answers = await self._send(requests, outcome)
        hits = [
            parse_letter(answer.text) == letter
            for answer, letter in zip(answers, correct, strict=True)
        ]
        kept: list[Candidate] = []
        for index, candidate in enumerate(candidates):
            times = slice(index * n_times, (index + 1) * n_times)
            # An empty answer does not show whether the model knows the fact.
            empty = next((answer for answer in answers[times] if not answer.text.strip()), None)
            if empty is not None:
                detail = check_completion(empty).detail
                outcome.refused.append((candidate.draft, "no answer", detail))
            # closed_book: 0 asks nothing, and all() of nothing is true.
            elif n_times and all(hits[times]) != self.section.retention:
                reason = "not known" if self.section.retention else "closed-book"
                detail = f"correct {sum(hits[times])} times of {n_times}"
                outcome.refused.append((candidate.draft, reason, detail))
            else:
                kept.append(candidate)
        return kept

    async def _send(self, requests: Sequence[_Request], outcome: Outcome) -> list[Completion]:
        """Return an answer for each request, in order. Raises an error that ends the run before one
        of a single request."""
        answers = await gather_answers(self.sender.send(*request) for request in requests)
        completions: list[Completion] = []
        for answer in answers:
            if isinstance(answer, EndpointError):
                raise answer
            completions.append(answer)
        for completion in completions:
            outcome.usage.update(asdict(completion.usage))
        return completions

    def _seed_of(self, messages: list[Message], attempt: int) -> int:
        """Return the seed (31 bits) of a request; it depends on the words alone."""
        return request_seed("question seed", self.seed, messages, attempt)


def _complete_text(completion: Completion) -> str:
    """Return the text of a complete answer, "" of another."""
    if not check_completion(completion).accepted:
        return ""
    return completion.text.strip()


def _rotate(choices: tuple[str, ...], by: int) -> tuple[str, ...]:
    start = by % len(choices)
    return choices[start:] + choices[:start]


def _write_files(
    run_dir: Path,
    writer: QuestionWriter,
    passages: PassageFile,
    outcomes: IndexedRows,
    selector: QuestionSelector,
) -> Shortcuts | None:
    """Write questions.jsonl, its two parts validation.jsonl and test.jsonl, and rejected.jsonl, in
    order of passages.

    Returns what the choices give away, None without any.
    """
    selected: list[tuple[str, Row]] = []
    with open_jsonl(run_dir / "rejected.jsonl") as write_rejected:
        for document, passage in passages_of(passages):
            found = outcomes.get(writer.outcome_id(document, passage))
            if not found:
                continue
            *earlier, last = found
            split, rows, refused = selector.select(document, last, earlier)
            selected += [(split, row) for row in rows]
            for row in refused:
                write_rejected(row)
    shared = _share_choices(selected, selector.with_own_choices)
    with contextlib.ExitStack() as stack:
        write = {
            name: stack.enter_context(open_jsonl(run_dir / f"{name}.jsonl"))
            for name in ("questions", "validation", "test")
        }
        for split, row in shared:
            write["questions"](row)
            write[split](row)
    questions = [_question_of(row) for _, row in shared]
    measured = measure_shortcuts({"questions": questions}, (d.text for d, _ in passages))
    return next(iter(measured), None)


def _share_choices(
    selected: Sequence[tuple[str, Row]], with_own_choices: Collection[str]
) -> list[tuple[str, Row]]:
    """Return the rows with wrong choices that are right answers to others of the same split; those
    of the questions `with_own_choices` stay.

    Choices that a model wrote for one question stand in no document: a trained model picks the one
    that does.
    """
    shared = dict[int, Row]()
    for split in ("validation", "test"):
        indices = []
        for index, (of, row) in enumerate(selected):
            if of == split and "choices" in row and row["id"] not in with_own_choices:
                indices.append(index)
        rows = [selected[index][1] for index in indices]
        contexts = [row["sentence"] for row in rows]
        shared |= zip(indices, with_shared_choices(rows, contexts), strict=True)
    return [(split, shared.get(index, row)) for index, (split, row) in enumerate(selected)]


def _question_of(row: Row) -> Question:
    return Question(row["id"], row["question"], tuple(row.get("choices", ())), row.get("answer", 0))


def _input_hashes(recipe: QuestionsRecipe) -> dict[str, str]:
    return document_hashes(Path(recipe.questions.documents), recipe.documents)


def _write_manifest(
    recipe: QuestionsRecipe, result: QuestionsResult, more_counts: Mapping[str, Any]
) -> None:
    """Write the manifest; `more_counts` are those of requests and shards."""
    counts = result.counts("n_validation", "n_test", "spare", "decisions")
    write_manifest(
        result.manifest_path,
        stage="questions",
        inputs=_input_hashes(recipe),
        recipe=recipe.raw,
        counts={**counts, **more_counts},
        # A merge of shards makes the others of the outcomes.
        outputs=["questions.jsonl", "validation.jsonl", "test.jsonl", _OUTCOMES],
    )


def render_questions(result: QuestionsResult) -> str:
    """Return the summary of a run: questions by set, refused drafts by reason, requests and
    cost."""
    cut = cut_note(result.n_cut, result.n_passages, "questions.passage_tokens")
    lines = [
        f"{format_count(result.n_documents, 'document')}, "
        f"{format_count(result.n_passages, 'passage')} -> "
        f"{result.got} of {format_count(result.asked, 'question')} in {result.questions_path}",
        f"validation.jsonl {result.n_validation}, test.jsonl {result.n_test} (by document); "
        f"{result.spare} more are valid but less specific",
        *filter(None, [cut]),
    ]
    if result.shortcuts is not None:
        lines.append(result.shortcuts.warning() or result.shortcuts.summary())
    if result.refused:
        lines += ["", f"questions refused (each in {result.rejected_path}):"]
        for reason, number in result.refused.items():
            lines.append(f"{number:>8}  {reason}: {REASONS[reason]}")
    lines += [
        *render_decisions(result.decisions),
        *result.render_failed("passages without an answer:"),
        "",
        *result.render_requests(),
        *result.render_cost(),
    ]
    if result.short:
        fix = "--retry asks again about passages with too few questions."
        if result.failed:
            fix = f"run again for the failed passages; {fix}"
        lines.append(f"Short by {result.asked - result.got}: {fix}")
    return "\n".join(lines)
