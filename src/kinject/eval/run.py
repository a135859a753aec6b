"""`kinject eval`: several models, question sets, formats, shots and context sizes to one report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kinject.disk import (
    FORMAT_VERSION,
    check_output,
    file_name,
    lock_dir,
    remove,
    write_jsonl,
    write_manifest,
    write_sealed,
)
from kinject.eval.harness_files import Sample, write_harness_files
from kinject.eval.plan import Arm, Plan, QuestionSet, arms_of, asks_of, read_plan
from kinject.eval.prompts import Ask, render_prompt, scored_texts
from kinject.eval.results import Answers, chosen_k_notes, find_flips, is_scored, make_report, mass_notes
from kinject.eval.scoring.answers import AnswerBook, Scored, hash_model, prompt_key
from kinject.eval.scoring.encode import Encoded, Encoder, encode_asks
from kinject.eval.scoring.requests import measure_perplexity, show_progress
from kinject.eval.scoring.resumable import Desk, join_processes, lone_process_notes
from kinject.eval.scoring.scorer import Reading, Scorer
from kinject.models import load_model
from kinject.recipe import EvalRecipe
from kinject.recipe.sections import EvalSection
from kinject.results import Perplexity, Report, to_json
from kinject.types import Answer

_INPUT_CURE = "Run what wrote it again (nothing is asked twice). If you changed it yourself, give it another name."


@dataclass
class _Asked:
    """One prompt of one arm, on its way to an answer."""

    arm: Arm
    ask: Ask
    encoded: Encoded
    context_ids: tuple[str, ...]
    key: str


@dataclass
class _Run:
    """What a run has found so far."""

    section: EvalSection
    plan: Plan
    desk: Desk
    results: Answers = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    hashes: dict[str, str] = field(default_factory=dict)  # of files that are read, then of models
    perplexities: list[Perplexity] = field(default_factory=list)
    samples: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)
    n_scored: int = 0


@dataclass
class _Asker:
    """One model, loaded and ready."""

    name: str
    scorer: Scorer
    encoder: Encoder
    model_hash: str
    dtype: str


def evaluate(recipe: EvalRecipe) -> Report:
    """Ask each model of `recipe.eval` each question set and return the results.

    Writes to the recipe's run folder: answers.jsonl as answers come (a rerun asks nothing twice), report.json,
    flips.jsonl, manifest.json, and harness/ARM/ in lm-evaluation-harness's layout. An arm is a model's name, with "+rag"
    for K > 0; every result but the base's is compared with the first model without context. Under `accelerate launch` the
    processes share the questions, and the first one writes. Raises `RecipeError`, `InputError` or `DiskError` when
    something cannot be used.
    """
    plan = read_plan(recipe)
    section = recipe.eval
    hashes = {str(path): check_output(path, _INPUT_CURE) for path in plan.inputs if path.is_file()}
    share = join_processes(recipe.run_dir)
    with lock_dir(share.folder), AnswerBook(share.folder / "answers.jsonl") as book:
        book.take_parts(share.parts())
        run = _Run(section, plan, Desk(book, share), notes=[*plan.notes, *lone_process_notes()], hashes=hashes)
        for name, path in section.models.items():
            _ask_model(run, name, path)
        notes = (*run.notes, *mass_notes(run.results), *chosen_k_notes(plan, section, run.results))
        report = make_report(recipe.run_dir, plan, section, run.results, run.perplexities)
        report = replace(report, notes=tuple(dict.fromkeys(notes)))
        if share.is_first:
            _write(recipe, run, report)
    share.finish()
    return report


def _write(recipe: EvalRecipe, run: _Run, report: Report) -> None:
    write_jsonl(recipe.run_dir / "flips.jsonl", find_flips(run.plan, run.section, run.results))
    write_sealed(recipe.run_dir / "report.json", {"format_version": FORMAT_VERSION, **to_json(report)})
    counts = {
        "answers": sum(map(len, run.results.values())), "scored_now": run.n_scored, "stored": run.desk.book.n_rows,
    }  # fmt: skip
    write_manifest(
        recipe.run_dir / "manifest.json", stage="eval", inputs=run.hashes, recipe=recipe.raw, counts=counts,
        outputs=["flips.jsonl"],
    )  # fmt: skip
    for arm, tasks in run.samples.items():
        folder = recipe.run_dir / "harness" / file_name(arm)
        for old in (*folder.glob("samples_*.jsonl"), *folder.glob("results_*.json")):
            remove(old)  # of an earlier run of this recipe: two dates would be read as two results
        shots = {task: own[0].answer.shots for task, own in tasks.items()}
        date = datetime.now(UTC).replace(tzinfo=None).isoformat(timespec="microseconds")
        write_harness_files(folder, tasks, {"model_name": arm, "date": date, "n_shot": shots})


def _ask_model(run: _Run, name: str, path: str) -> None:
    """Load one model and put every question of its arms to it."""
    loaded = load_model(path)
    model_hash = hash_model(path, getattr(loaded.model.config, "_commit_hash", None))
    run.hashes[path] = model_hash
    scorer = Scorer(loaded.model, run.section.batch_tokens)
    encoder = Encoder(loaded.tokenizer, chat=run.section.chat)
    asker = _Asker(name, scorer, encoder, model_hash, str(loaded.dtype))
    for question_set in run.plan.sets:
        asked = _encode_set(run, question_set, asker)
        _score_set(run, question_set, asker, asked)
        _keep_samples(run, question_set, asker, asked)
    if run.section.perplexity_corpus:
        key = (model_hash, str(loaded.dtype))
        found = measure_perplexity(name, Path(run.section.perplexity_corpus), scorer, loaded.tokenizer, run.desk, key)
        run.perplexities.append(found)
    run.notes.extend((*loaded.notes, *(f"{name}: {note}" for note in (*encoder.notes, *scorer.notes))))


def _encode_set(run: _Run, question_set: QuestionSet, asker: _Asker) -> list[_Asked]:
    """Return the prompts of every arm of one model on one question set, in tokens."""
    arms = [arm for arm in arms_of(run.section, question_set.task) if arm.model == asker.name]
    rows = [(arm, *item) for arm in arms for item in asks_of(question_set, arm, run.plan.template)]
    encoded = encode_asks(asker.encoder, [ask for _, ask, _ in rows], asker.scorer.passes.window())
    return [
        _Asked(arm, ask, item, ids, prompt_key(asker.model_hash, asker.dtype, item))
        for (arm, ask, ids), item in zip(rows, encoded, strict=True)
    ]


def _score_set(run: _Run, question_set: QuestionSet, asker: _Asker, asked: Sequence[_Asked]) -> None:
    """Find or score every prompt, store its answer, and keep it for the report."""
    by_key: dict[str, list[_Asked]] = {}
    for item in asked:
        by_key.setdefault(item.key, []).append(item)
    stored = run.desk.stored(by_key)
    own = run.desk.own({key: items[0].ask.question.id for key, items in by_key.items()})
    n_stored, n_asked = (
        sum(len(by_key[key]) for key in keys) for keys in (stored, [key for key in own if key not in stored])
    )
    with show_progress(f"{asker.name} on {question_set.name}", n_stored + n_asked, n_stored) as progress:

        def keep(key: str, reading: Reading) -> None:
            for item in by_key[key]:
                run.desk.book.add(key, _answer(question_set, item, reading))
                progress.advance()

        said = run.desk.ask(asker.scorer, {key: by_key[key][0].encoded for key in own}, stored, keep)
    everyone = run.desk.share.gather(said)
    for item in asked:
        known = run.desk.book.find(item.key)
        scored = everyone[item.key] if item.key in everyone else known or run.desk.share.missing()
        answer = _answer(question_set, item, scored)
        run.desk.book.add(item.key, answer)
        run.results.setdefault((question_set.name, item.arm), []).append(answer)
    run.n_scored += sum(len(items) for key, items in by_key.items() if key not in stored)
    _note_faults(run, question_set, asked)


def _answer(question_set: QuestionSet, item: _Asked, said: Reading | Scored) -> Answer:
    question = item.ask.question
    texts = scored_texts(question, item.arm.format)
    return Answer(
        question_id=question.id,
        question_set=question_set.name,
        arm=item.arm.name,
        format=item.arm.format,
        shots=item.arm.shots,
        k=item.arm.k,
        context_ids=item.context_ids,
        gold=question.answer,
        log_probs=said.log_probs,
        n_tokens=tuple(len(ids) for ids in item.encoded.continuations),
        n_bytes=tuple(len(text.encode("utf-8")) for text in texts),
        truncated=item.encoded.truncated,
        n_chars=tuple(map(len, texts)),
        subject=question.subject,
        document_id=question.document_id,
        rotation=item.ask.rotation,
        greedy=said.greedy,
    )


def _keep_samples(run: _Run, question_set: QuestionSet, asker: _Asker, asked: Sequence[_Asked]) -> None:
    """Keep what the files in the harness's layout need; each rotation of the options is a task of its own there."""
    if question_set.chooses_k_for:
        return
    arms: dict[Arm, list[_Asked]] = {}
    for item in asked:
        arms.setdefault(item.arm, []).append(item)
    for arm, items in arms.items():
        for item, answer in zip(items, run.results[question_set.name, arm], strict=True):
            rotation = f"r{item.ask.rotation}" if arm.format == "rotations" else ""
            ways = (arm.format, f"{arm.shots}shot", f"k{arm.k}" if arm.k else "", rotation)
            task = "_".join([question_set.name, *(way for way in ways if way)]).replace("/", "_").replace(" ", "_")
            sample = Sample(item.ask.question, asker.encoder.as_asked(render_prompt(item.ask)), answer)
            run.samples.setdefault(arm.name, {}).setdefault(task, []).append(sample)


def _note_faults(run: _Run, question_set: QuestionSet, asked: Sequence[_Asked]) -> None:
    """Say aloud which prompts were cut to the window and which could not be scored."""
    for arm in dict.fromkeys(item.arm for item in asked):
        own = run.results[question_set.name, arm]
        where = f"{arm.name} on {question_set.name} ({arm.format}, {arm.shots} shots, K {arm.k})"
        n_cut = sum(answer.truncated > 0 for answer in own)
        if n_cut:
            run.notes.append(f"{where}: {n_cut} of {len(own)} prompts did not fit the model's window and were cut")
        n_unscored = sum(not is_scored(answer) for answer in own)
        if n_unscored:
            run.notes.append(
                f"{where}: {n_unscored} of {len(own)} questions could not be scored (log-probs that are not finite); "
                "they count as wrong"
            )


def show_prompts(recipe: EvalRecipe, n: int) -> Iterator[str]:
    """Yield a text for each of the first `n` questions of each set and arm; nothing is stored.

    Tokens stand between bars, line breaks in a token as \\n; the gold choice has a star, the chosen one an arrow.
    """
    small = replace(recipe, eval=replace(recipe.eval, limit=n))
    plan, section = read_plan(small), small.eval
    for name, path in section.models.items():
        loaded = load_model(path)
        scorer, encoder = Scorer(loaded.model, section.batch_tokens), Encoder(loaded.tokenizer, chat=section.chat)
        for question_set in plan.sets:
            for arm in arms_of(section, question_set.task):
                if arm.model != name or question_set.chooses_k_for:
                    continue
                asks = [ask for ask, _ in asks_of(question_set, arm, plan.template)]
                encoded = encode_asks(encoder, asks, scorer.passes.window())
                scores = dict(scorer.score(encoded))
                for index, (ask, item) in enumerate(zip(asks, encoded, strict=True)):
                    head = f"{arm.name} on {question_set.name}: {arm.format}, {arm.shots} shots, K {arm.k}"
                    yield f"{head}, question {ask.question.id}\n{_shown(loaded.tokenizer, ask, item, scores[index])}"


def _shown(tokenizer: Any, ask: Ask, item: Encoded, log_probs: tuple[float, ...]) -> str:
    context = max(item.contexts, key=len)
    cut = f", {item.truncated} cut to fit" if item.truncated else ""
    lines = [f"  {len(context)} tokens{cut}: {_pieces(tokenizer, context.tolist())}"]
    best = log_probs.index(max(log_probs))
    texts = scored_texts(ask.question, ask.format)
    for place, (ids, value) in enumerate(zip(item.continuations, log_probs, strict=True)):
        marks = ("*" if place == ask.question.answer else " ") + (">" if place == best else " ")
        lines.append(f"  {marks} {value:9.4f}  {_pieces(tokenizer, ids.tolist())}  ({texts[place]})")
    return "\n".join(lines)


def _pieces(tokenizer: Any, ids: list[int]) -> str:
    """Return each token's own text between bars."""
    return "|" + "|".join(tokenizer.decode([token]).replace("\n", "\\n") for token in ids) + "|"
