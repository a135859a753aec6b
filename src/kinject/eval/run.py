"""`kinject eval`: several models, question sets, formats, shots and context sizes in one report."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, compress
from pathlib import Path
from string import ascii_uppercase
from time import monotonic
from typing import Any

from kinject.corpus.choices import measure_shortcuts
from kinject.disk import (
    FORMAT_VERSION,
    changed_versions,
    check_output,
    content_id,
    delete_file,
    lock_dir,
    read_journal,
    read_json,
    read_jsonl,
    write_json,
    write_jsonl,
    write_manifest,
)
from kinject.errors import InputError
from kinject.eval.endpoint import EndpointScorer, cache_of, money_spent, render_messages
from kinject.eval.flips import find_flips
from kinject.eval.judge import AnswerJudge, measured_judge, write_accuracy
from kinject.eval.plan import EvalArm, Plan, QuestionSet, read_plan
from kinject.eval.prompts import ChatStyle, PromptRequest
from kinject.eval.require import check_requirements, read_requirements, write_checks
from kinject.eval.results import Evaluation, make_report
from kinject.eval.scores import PromptScore
from kinject.eval.scoring.answers import (
    GRADES_FILE,
    VERSIONS_FILE,
    ResumableScoring,
    join_processes,
    open_answers,
)
from kinject.eval.scoring.encode import Encoded, render_tokens
from kinject.eval.scoring.local import LoadedScorer, load_scorer, measure_perplexity
from kinject.heap import document_hashes, read_documents
from kinject.llm.cache import merge_caches
from kinject.manifests import MANIFEST, EvalCounts, read_eval_manifest, read_train_manifest
from kinject.models import check_model
from kinject.process import world_size
from kinject.question_formats import FORMATS
from kinject.recipe import EvalRecipe
from kinject.recipe.sections import EndpointModelSection, EvalSection, LocalModelSection
from kinject.results import Perplexity, Report, Shortcuts, to_json
from kinject.shards import (
    FinishedShard,
    Shard,
    finished_shards,
    merged_counts,
    refuse_changed,
    refuse_unmerged,
    shard_counts,
)
from kinject.terminal import Progress, format_count, show
from kinject.types import Answer

_ANSWERS = "answers.jsonl"
_INPUT_FIX = (
    "Run the command that wrote it again (stored answers are kept). "
    "If you changed it yourself, give it another name."
)


@dataclass(frozen=True, slots=True)
class PendingPrompt:
    """One prompt of one arm in tokens; `context_ids` are the ids of the passages in it."""

    arm: EvalArm
    request: PromptRequest
    encoded: Encoded
    context_ids: tuple[str, ...]


@dataclass
class _Run:
    """A running evaluation and its results so far.

    `inputs` are path or model -> hash, `endpoints` model -> usage and cost, `more_counts` those of
    merged shards, `other_versions` as in `EvalCounts`.
    """

    recipe: EvalRecipe
    evaluation: Evaluation
    scoring: ResumableScoring
    inputs: dict[str, str]
    notes: list[str]
    perplexities: list[Perplexity] = field(default_factory=list)
    n_scored: int = 0
    endpoints: dict[str, dict[str, Any]] = field(default_factory=dict)
    more_counts: dict[str, Any] = field(default_factory=dict)
    other_versions: str = ""


def evaluate_shard(recipe: EvalRecipe, shard: Shard) -> int:
    """Score the questions of a shard and store their answers in its folder, for `merge_answers`;
    return the number of its answers. The judge is left to the merge.

    Raises as `evaluate`.
    """
    _refuse_processes("--shard")
    inputs, plan = _check_inputs(recipe)
    recipe = _part_of(recipe, shard)
    plan = replace(plan, sets=tuple(_questions_of(item, shard) for item in plan.sets))
    with lock_dir(recipe.run_dir, stage="eval"), open_answers(recipe.run_dir / _ANSWERS) as answers:
        evaluation = Evaluation(plan, recipe.eval)
        scoring = ResumableScoring(answers, join_processes(recipe.run_dir))
        run = _Run(recipe, evaluation, scoring, dict(inputs), [])
        if answers.n_rows:
            run.other_versions = _other_versions(recipe.run_dir)
        for name, table in recipe.eval.tables().items():
            _evaluate_model(run, name, table)
        n_answers = sum(map(len, evaluation.answers.values()))
        of_all = EvalCounts(
            answers=n_answers,
            scored_now=run.n_scored,
            stored=answers.n_rows,
            other_versions=run.other_versions,
        )
        write_manifest(
            recipe.run_dir / MANIFEST,
            stage="eval",
            # Without the hashes of the weights: the merge finds no answers of others.
            inputs=inputs,
            recipe=recipe.raw,
            counts={**asdict(of_all), **shard_counts(shard)},
            outputs=[_ANSWERS],
        )
    return n_answers


def _refuse_processes(option: str) -> None:
    if world_size() > 1:
        raise InputError(f"{option}: {world_size()} processes were started. Start one.")


def _part_of(recipe: EvalRecipe, shard: Shard) -> EvalRecipe:
    """Return the recipe with the folder of a shard, and its part of budget and requests."""
    section, models = recipe.eval, dict(recipe.eval.models)
    for name, table in section.endpoints().items():
        concurrency = shard.share_of(table.endpoint.concurrency)
        endpoint = replace(table.endpoint, concurrency=concurrency)
        models[name] = replace(table, endpoint=endpoint)
    budget = section.budget
    if budget is not None:
        budget /= shard.total
    corpus = section.perplexity_corpus
    if not shard.is_first:  # its texts are few, and no questions
        corpus = None
    section = replace(section, models=models, budget=budget, perplexity_corpus=corpus)
    return replace(recipe, run_dir=shard.folder(recipe.run_dir), eval=section)


def _questions_of(item: QuestionSet, shard: Shard) -> QuestionSet:
    """Return a question set with the questions of a shard alone; its examples stay."""
    own = [shard.has(question.id) for question in item.questions]
    return replace(
        item,
        questions=tuple(compress(item.questions, own)),
        contexts=tuple(compress(item.contexts, own)),
    )


_Draw = Callable[[Path, Report], Path]
"""Draws the page of a report in a run folder."""


def merge_answers(recipe: EvalRecipe, draw: _Draw | None = None) -> Report:
    """Make of the finished shards of `recipe` the report of one run. The models are loaded, since
    answers are found by their weights, and asked nothing; the judge grades written answers.

    Raises as `evaluate`, and `InputError` as `finished_shards` and for an answer that no shard has.
    """
    _refuse_processes("--merge")
    inputs, plan = _check_inputs(recipe)
    command = f"kinject eval {recipe.command_line}"
    with finished_shards(recipe.run_dir, command, recipe.raw, inputs) as shards:
        refuse_changed(shards, [_ANSWERS])
        for name in recipe.eval.endpoints():
            cache = cache_of(name)
            merge_caches(recipe.run_dir / cache, [one.folder / cache for one in shards])
        return _evaluate(recipe, inputs, plan, draw=draw, shards=shards)


def _check_inputs(recipe: EvalRecipe) -> tuple[dict[str, str], Plan]:
    """Return the hashes of the files and models that `recipe` reads, and its plan. Raises as
    `evaluate`."""
    section = recipe.eval
    for model in section.local().values():
        check_model(model.path)
    plan = read_plan(recipe)
    inputs = {str(path): check_output(path, _INPUT_FIX) for path in plan.inputs if path.is_file()}
    if section.retrieval:
        for source in map(Path, section.retrieval.documents):
            if not source.is_file():
                inputs |= document_hashes(source, recipe.documents)
    return {**inputs, **plan.models}, plan


def evaluate(
    recipe: EvalRecipe, judged_in: Path | None = None, draw: _Draw | None = None
) -> Report:
    """Score every question set with every model of `recipe.eval` and return the results.

    Writes to the recipe's run folder: versions.json, answers.jsonl as prompts are scored (a rerun
    scores none of them again), report.json, flips.jsonl and manifest.json. An arm is a model's
    name, with "+rag" for K > 0; every result but the base's is compared with the first model
    without context. Under `accelerate launch` the processes divide the questions, and the first one
    writes. `judged_in` is the folder where the accuracy of the recipe's judge was measured before
    (`measure_judge`); `draw` draws the page of the report in the folder, which is held until then.
    Raises `RecipeError`, `InputError` or `DiskError` if an input cannot be used.
    """
    section = recipe.eval
    if section.endpoints() and world_size() > 1:
        raise InputError(
            f"{world_size()} processes would ask eval.models.{next(iter(section.endpoints()))}. "
            "Start one."
        )
    inputs, plan = _check_inputs(recipe)
    return _evaluate(recipe, inputs, plan, judged_in, draw)


def _evaluate(
    recipe: EvalRecipe,
    inputs: Mapping[str, str],
    plan: Plan,
    judged_in: Path | None = None,
    draw: _Draw | None = None,
    shards: Sequence[FinishedShard] = (),
) -> Report:
    """Do what `evaluate` does with inputs that are checked. With `shards` their answers are all
    that there are."""
    section = recipe.eval
    requirements = read_requirements(section.require, list(section.questions))
    if not shards:
        refuse_unmerged(recipe.run_dir, _ANSWERS)
    shard = join_processes(recipe.run_dir)
    with lock_dir(shard.folder, stage="eval"), open_answers(shard.folder / _ANSWERS) as answers:
        answers.read_others(shard.other_answers())
        answers.read_others([one.folder / _ANSWERS for one in shards])
        # Before a model is loaded: a judge that is not accurate enough ends the run.
        judge = measured_judge(recipe, plan.open_questions(), judged_in) if shard.is_first else None
        evaluation = Evaluation(plan, section)
        scoring = ResumableScoring(answers, shard, is_complete=bool(shards))
        run = _Run(recipe, evaluation, scoring, dict(inputs), list(plan.notes))
        stored_in = recipe.run_dir / _ANSWERS
        if shards:
            run.more_counts = merged_counts(shards)
            stored_in = shards[0].folder.parent
            of_shards = (one.counts.get("other_versions") for one in shards)
            run.other_versions = "; ".join(dict.fromkeys(filter(None, of_shards)))
        elif answers.n_rows:
            run.other_versions = _other_versions(recipe.run_dir)
        if run.other_versions:
            run.notes.append(
                f"warning: stored answers were scored with other versions ({run.other_versions}), "
                f"and are not scored again. Delete {stored_in} to score all anew"
            )
        for name, table in section.tables().items():
            _evaluate_model(run, name, table)
        if judge:
            judge.grade_answers(plan.open_questions(), evaluation.answers)
            run.notes.extend(judge.notes())
        report = make_report(recipe.run_dir, evaluation, run.perplexities)
        # Models that were loaded alike have the same notes.
        report = replace(report, notes=tuple(dict.fromkeys(run.notes)))
        if judge:
            report = replace(report, judge=judge.accuracy)
        if shard.is_first:
            # Not in the plan: it reads every document, and a plan is read for each dry run as well.
            report = replace(report, shortcuts=_shortcuts_of(recipe, plan.sets))
            answers.leave_out_others()
            _write_files(run, report, judge)
            if draw:
                draw(recipe.run_dir, report)
            if requirements:
                # A gate that is about no arm is an error, which must not cost the report.
                write_checks(check_requirements(requirements, report), recipe.run_dir)
        # Under the lock: the folders of processes may else be those of the next evaluation here.
        shard.finish()
    return report


def _other_versions(run_dir: Path) -> str:
    """Return the packages that had another version when the answers in `run_dir` were scored."""
    earlier = read_eval_manifest(run_dir)
    if earlier is not None:
        # Where nothing changed since, the run before may have read answers of other versions.
        return changed_versions(earlier.versions) or earlier.counts.other_versions
    first = run_dir / VERSIONS_FILE
    if not first.is_file():
        return ""
    return changed_versions(read_json(first, "Delete it."))


def measure_judge(recipe: EvalRecipe) -> float:
    """Measure the judge of `recipe` on its questions and write its accuracy to the run folder, for
    `evaluate`.

    Returns its cost, in the currency of the recipe's prices. Raises `InputError` if it is not
    accurate enough to grade answers.
    """
    with lock_dir(recipe.run_dir, stage="eval"):
        judge = measured_judge(recipe, read_plan(recipe).open_questions(), None)
        if judge:
            write_accuracy(recipe.run_dir, judge.accuracy)
    return money_spent(recipe.eval, recipe.run_dir)


def show_prompts(recipe: EvalRecipe, n: int) -> Iterator[str]:
    """Yield a text for each of the first `n` questions of each set and arm; nothing is stored.

    Tokens are separated by bars, line breaks in a token are \\n; the gold choice has a star, the
    chosen one an arrow.
    """
    section = replace(recipe.eval, limit=n)
    plan = read_plan(replace(recipe, eval=section))
    for name, table in section.tables().items():
        model = _open_model(name, table, recipe)
        for question_set in plan.sets:
            prompts = encode_arms(question_set, model)
            encoded = [prompt.encoded for prompt in prompts]
            scores = model.score(encoded) if isinstance(model, LoadedScorer) else {}
            for index, prompt in enumerate(prompts):
                arm = prompt.arm
                title = (
                    f"{arm.name} on {question_set.name}: {arm.format}, {arm.shots} shots, K {arm.k}"
                )
                if isinstance(model, LoadedScorer):
                    text = render_tokens(
                        model.loaded.tokenizer, prompt.encoded, prompt.request, scores[index]
                    )
                else:  # it may cost
                    text = render_messages(prompt.encoded)
                yield f"{title}, question {prompt.request.question.id}\n{text}"


def preview(recipe: EvalRecipe) -> Iterator[str]:
    """Yield a line for each model: its prompts, and for an endpoint the missing answers and their
    greatest cost."""
    for local in recipe.eval.local().values():
        check_model(local.path)
    plan = read_plan(recipe)
    path = recipe.run_dir / _ANSWERS
    # A row without a key is refused by the run itself.
    stored = {str(row.get("key")) for _, row in read_journal(path)} if path.exists() else set()
    for name, table in recipe.eval.tables().items():
        if isinstance(table, EndpointModelSection):
            model = EndpointScorer(name, table, recipe.eval, recipe.run_dir, recipe.seed)
            prompts = [item.encoded for part in plan.sets for item in encode_arms(part, model)]
            yield model.preview(prompts, stored)
        else:
            arms = [(part, arm) for part in plan.sets for arm in part.arms if arm.model == name]
            n = sum(1 for part, arm in arms for _ in part.requests(arm))
            yield f"{name}: {table}: {format_count(n, 'prompt')}, scored here"


def _open_model(
    name: str, table: LocalModelSection | EndpointModelSection, recipe: EvalRecipe
) -> LoadedScorer | EndpointScorer:
    """Load one model, or prepare for its endpoint."""
    if isinstance(table, EndpointModelSection):
        return EndpointScorer(name, table, recipe.eval, recipe.run_dir, recipe.seed)
    return load_scorer(name, table, recipe.eval.batch_tokens, _chat_style(table, recipe.eval))


def _chat_style(table: LocalModelSection, section: EvalSection) -> ChatStyle | None:
    if not table.chat:
        return None
    chat = table.chat_settings
    return ChatStyle(chat.system, chat.chat_template_kwargs or {})


def _evaluate_model(run: _Run, name: str, table: LocalModelSection | EndpointModelSection) -> None:
    """Score every question of one model's arms."""
    model = _open_model(name, table, run.recipe)
    evaluation = run.evaluation
    run.inputs.update(model.hashes)
    for question_set in evaluation.plan.sets:
        prompts = encode_arms(question_set, model)
        answers, n_new = score_prompts(run.scoring, question_set, model, prompts)
        run.n_scored += n_new
        for prompt, answer in zip(prompts, answers, strict=True):
            asked = (question_set.name, prompt.arm)
            evaluation.answers.setdefault(asked, []).append(answer)
            counted = evaluation.prompt_tokens.setdefault(asked, Counter())
            # The choices share their context, so the first one is counted; an endpoint's has none.
            counted[answer.question_id] += sum(map(len, prompt.encoded.contexts[:1]))
    corpus = evaluation.section.perplexity_corpus
    if isinstance(model, EndpointScorer):
        run.endpoints[name] = model.counts()
        if corpus:
            run.notes.append(f"{name}: no perplexity, which needs a local model")
    elif corpus:
        run.perplexities.append(measure_perplexity(run.scoring, model, Path(corpus)))
    run.notes.extend(model.notes())


def encode_arms(
    question_set: QuestionSet, model: LoadedScorer | EndpointScorer
) -> list[PendingPrompt]:
    """Return the prompts of every arm of `model` on `question_set`, in the order of arms and
    questions."""
    arms = [arm for arm in question_set.arms if arm.model == model.name]
    rows: list[tuple[EvalArm, PromptRequest, tuple[str, ...]]] = []
    for arm in arms:
        rows += [(arm, request, ids) for request, ids in question_set.requests(arm)]
    encoded = model.encode([request for _, request, _ in rows])
    prompts = []
    for (arm, request, context_ids), item in zip(rows, encoded, strict=True):
        prompts.append(PendingPrompt(arm, request, item, context_ids))
    return prompts


def score_prompts(
    scoring: ResumableScoring,
    question_set: QuestionSet,
    model: LoadedScorer | EndpointScorer,
    prompts: Sequence[PendingPrompt],
) -> tuple[list[Answer], int]:
    """Return the answer of each of `prompts` and the number of those that were not stored before;
    all are stored now."""
    keys = [model.key(prompt.encoded) for prompt in prompts]
    by_key: dict[str, list[PendingPrompt]] = {}
    for key, prompt in zip(keys, prompts, strict=True):
        # Arms may have prompts in common, which are scored once.
        by_key.setdefault(key, []).append(prompt)
    stored = scoring.stored(by_key)
    # By question: its choices and rotations share a beginning.
    mine = scoring.mine({key: same[0].request.question.id for key, same in by_key.items()})
    missing = [key for key in mine if key not in stored]
    scoring.refuse_missing(model.name, len(missing))
    n_stored, n_missing = (sum(len(by_key[key]) for key in part) for part in (stored, missing))
    title = f"{model.name} on {question_set.name}"
    with show_progress(title, n_stored + n_missing, n_stored) as progress:

        def store(key: str, score: PromptScore) -> None:
            for prompt in by_key[key]:
                scoring.answers.add(key, _make_answer(question_set, prompt, score))
                progress.advance()

        if isinstance(model, EndpointScorer):
            todo = {key: by_key[key][0].encoded for key in missing}
            new = model.score_missing(todo, store, progress.set_status)
        else:
            todo = {key: by_key[key][0].encoded for key in mine}
            new = model.score_missing(scoring, todo, stored, store)
    scores = {**stored, **scoring.shard.gather(new)}
    answers = []
    for key, prompt in zip(keys, prompts, strict=True):
        answer = _make_answer(question_set, prompt, scores[key])
        scoring.answers.add(key, answer)
        answers.append(answer)
    return answers, sum(key not in stored for key in keys)


def _make_answer(question_set: QuestionSet, prompt: PendingPrompt, score: PromptScore) -> Answer:
    question, form = prompt.request.question, FORMATS[prompt.arm.format]
    answer = Answer(
        question_id=question.id,
        question_set=question_set.name,
        arm=prompt.arm.name,
        format=prompt.arm.format,
        shots=prompt.arm.shots,
        k=prompt.arm.k,
        context_ids=prompt.context_ids,
        gold=form.gold(question),
        log_probs=score.log_probs,
        n_tokens=(),
        n_bytes=(),
        truncated=prompt.encoded.truncated,
        subject=question.subject,
        document_id=question.document_id,
        rotation=prompt.request.rotation,
        greedy=score.greedy,
    )
    if not form.shows_question:
        # Sorted: in another order they are the same choices to who reads no question.
        answer = replace(answer, choice_set=content_id("choices", sorted(question.choices)))
    if score.text is None:
        texts = form.answers(question)
        return replace(
            answer,
            # Of a prompt that went as text only the endpoint knows the lengths.
            n_tokens=score.lengths or tuple(map(len, prompt.encoded.continuations)),
            n_bytes=tuple(len(text.encode("utf-8")) for text in texts),
            n_chars=tuple(map(len, texts)),
        )
    answer = replace(
        answer,
        n_tokens=(score.n_tokens,),
        text=score.text,
        accepted=question.accepted,
        checks=question.checks,
        n_thinking=score.n_thinking,
        thinking_cut=score.thinking_cut,
    )
    if form.is_open:
        return answer
    letter, choice = ascii_uppercase[question.answer], question.choices[question.answer]
    accepted = (f"{letter}. {choice}", letter, choice)
    return replace(answer, accepted=accepted, choices=question.choices)


@contextmanager
def show_progress(title: str, n_total: int, n_stored: int) -> Iterator[Progress]:
    """Yield a counter for `n_total` prompts, `n_stored` of which need no model; print the rate when
    the block ends."""
    start = monotonic()
    with Progress(title, n_total - n_stored, "questions") as progress:
        yield progress
    seconds = monotonic() - start
    stored = f", {n_stored} found in answers.jsonl" if n_stored else ""
    rate = ""
    if progress.done and seconds:
        rate = f", {progress.done / seconds:.1f} a second"
    show(
        f"{title}: {format_count(n_total, 'prompt')}{stored}, {progress.done} scored in "
        f"{seconds:.1f} s{rate}",
        file=sys.stderr,
    )


def _write_files(run: _Run, report: Report, judge: AnswerJudge | None) -> None:
    folder, outputs = run.recipe.run_dir, [_ANSWERS, "flips.jsonl"]
    write_jsonl(folder / "flips.jsonl", find_flips(run.evaluation))
    write_json(folder / "report.json", {"format_version": FORMAT_VERSION, **to_json(report)})
    of_all = EvalCounts(
        answers=sum(map(len, run.evaluation.answers.values())),
        scored_now=run.n_scored,
        stored=run.scoring.answers.n_rows,
        other_versions=run.other_versions,
    )
    counts: dict[str, Any] = asdict(of_all) | run.more_counts
    if run.endpoints:
        counts["endpoints"] = run.endpoints
    if judge is None:
        delete_file(folder / GRADES_FILE)  # of an earlier run of this recipe
    else:
        counts["judge"] = judge.counts()
        outputs.append(GRADES_FILE)
    # Last, because it holds the hashes of the other files.
    write_manifest(
        folder / MANIFEST,
        stage="eval",
        inputs=run.inputs,
        recipe=run.recipe.raw,
        counts=counts,
        outputs=outputs,
    )


def _shortcuts_of(recipe: EvalRecipe, sets: Sequence[QuestionSet]) -> tuple[Shortcuts, ...]:
    """Return what the choices of the sets to be learned give away to who knows the documents'
    strings.

    () where no documents are known. Raises as `read_documents` and `read_jsonl`.
    """
    chosen = {}
    for item in sets:
        compares_choices = any(not FORMATS[arm.format].generates for arm in item.arms)
        if compares_choices and item.role == "learning":
            chosen[item.name] = item.questions
    texts = _document_texts(recipe)
    first = next(texts, None)
    if first is None:
        return ()
    # The first text was taken to see whether there is any.
    return tuple(measure_shortcuts(chosen, chain([first], texts)))


def _document_texts(recipe: EvalRecipe) -> Iterator[str]:
    """Yield the texts of the documents that are searched; without retrieval, of those trained
    on."""
    section = recipe.eval
    if section.retrieval is not None:
        for path in section.retrieval.documents:
            for document in read_documents(Path(path), recipe.documents):
                yield f"{document.title} {document.text}"
        return
    corpora = [_corpus_of(Path(table.adapter or table.path)) for table in section.local().values()]
    # Models that were trained on one corpus have it read once.
    for corpus in dict.fromkeys(path for path in corpora if path is not None):
        for _, row in read_jsonl(corpus):
            if isinstance(row.get("text"), str):
                yield row["text"]


def _corpus_of(model: Path) -> Path | None:
    """Return the JSONL corpus that the model of a training was trained on; None where it is not
    known or gone."""
    training = read_train_manifest(model.parent)
    if training is None:
        return None
    path = Path(training.recipe.corpus.path)
    return path if path.suffix == ".jsonl" and path.is_file() else None
