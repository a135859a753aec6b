"""`kinject eval`: several models, question sets, formats, shots and context sizes in one report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kinject.disk import (
    FORMAT_VERSION,
    check_output,
    delete_file,
    file_name,
    lock_dir,
    write_checked_json,
    write_jsonl,
    write_manifest,
)
from kinject.eval.harness_files import Sample, write_harness_files
from kinject.eval.plan import Plan, QuestionSet, read_plan
from kinject.eval.prompts import render_prompt, scored_texts
from kinject.eval.results import Answers, chosen_k_notes, find_flips, is_scored, make_report, mass_notes
from kinject.eval.scoring.answers import AnswerStore
from kinject.eval.scoring.requests import (
    LoadedScorer,
    PendingPrompt,
    encode_arms,
    load_scorer,
    measure_perplexity,
    score_prompts,
)
from kinject.eval.scoring.resumable import ResumableScoring, join_processes, single_process_notes
from kinject.recipe import EvalRecipe
from kinject.recipe.sections import EvalSection
from kinject.results import Perplexity, Report, to_json
from kinject.types import Answer

_INPUT_FIX = (
    "Run the command that wrote it again (stored answers are kept). If you changed it yourself, give it another name."
)


@dataclass
class _Run:
    """A running evaluation and its results so far."""

    section: EvalSection
    plan: Plan
    scoring: ResumableScoring
    notes: list[str]
    inputs: dict[str, str]  # path or model -> hash
    results: Answers = field(default_factory=dict)
    perplexities: list[Perplexity] = field(default_factory=list)
    samples: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)  # by arm, then by task name
    n_scored: int = 0


def evaluate(recipe: EvalRecipe) -> Report:
    """Score every question set with every model of `recipe.eval` and return the results.

    Writes to the recipe's run folder: answers.jsonl as prompts are scored (a rerun scores none of them again),
    report.json, flips.jsonl, manifest.json, and harness/ARM/ in lm-evaluation-harness's layout. An arm is a model's
    name, with "+rag" for K > 0; every result but the base's is compared with the first model without context. Under
    `accelerate launch` the processes divide the questions, and the first one writes. Raises `RecipeError`,
    `InputError` or `DiskError` if an input cannot be used.
    """
    plan = read_plan(recipe)
    section = recipe.eval
    inputs = {str(path): check_output(path, _INPUT_FIX) for path in plan.inputs if path.is_file()}
    shard = join_processes(recipe.run_dir)
    with lock_dir(shard.folder), AnswerStore(shard.folder / "answers.jsonl") as answers:
        answers.read_others(shard.other_answers())
        notes = [*plan.notes, *single_process_notes()]
        run = _Run(section, plan, ResumableScoring(answers, shard), notes, inputs)
        for name, path in section.models.items():
            _evaluate_model(run, name, path)
        all_notes = (*run.notes, *mass_notes(run.results), *chosen_k_notes(plan, section, run.results))
        report = make_report(recipe.run_dir, plan, section, run.results, run.perplexities)
        report = replace(report, notes=tuple(dict.fromkeys(all_notes)))
        if shard.is_first:
            _write_files(recipe, run, report)
    shard.finish()
    return report


def show_prompts(recipe: EvalRecipe, n: int) -> Iterator[str]:
    """Yield a text for each of the first `n` questions of each set and arm; nothing is stored.

    Tokens are separated by bars, line breaks in a token are \\n; the gold choice has a star, the chosen one an arrow.
    """
    section = replace(recipe.eval, limit=n)
    plan = read_plan(replace(recipe, eval=section))
    for name, path in section.models.items():
        model = load_scorer(name, path, section)
        for question_set in plan.sets:
            if question_set.chooses_k_for:
                continue
            prompts = encode_arms(question_set, model, plan.template)
            scores = dict(model.scorer.score([prompt.encoded for prompt in prompts]))
            for index, prompt in enumerate(prompts):
                arm = prompt.arm
                title = f"{arm.name} on {question_set.name}: {arm.format}, {arm.shots} shots, K {arm.k}"
                text = _render_tokens(model.loaded.tokenizer, prompt, scores[index].log_probs)
                yield f"{title}, question {prompt.request.question.id}\n{text}"


def _evaluate_model(run: _Run, name: str, path: str) -> None:
    """Load one model and score every question of its arms."""
    model = load_scorer(name, path, run.section)
    run.inputs[path] = model.model_hash
    for question_set in run.plan.sets:
        prompts = encode_arms(question_set, model, run.plan.template)
        answers, n_new = score_prompts(run.scoring, question_set, model, prompts)
        run.n_scored += n_new
        for prompt, answer in zip(prompts, answers, strict=True):
            run.results.setdefault((question_set.name, prompt.arm), []).append(answer)
        _note_faults(run, question_set, prompts)
        if not question_set.chooses_k_for:
            _keep_samples(run, question_set, model, prompts, answers)
    if run.section.perplexity_corpus:
        run.perplexities.append(measure_perplexity(run.scoring, model, Path(run.section.perplexity_corpus)))
    run.notes.extend(model.notes())


def _keep_samples(
    run: _Run,
    question_set: QuestionSet,
    model: LoadedScorer,
    prompts: Sequence[PendingPrompt],
    answers: Sequence[Answer],
) -> None:
    """Keep the rows of lm-evaluation-harness's files; each rotation of the options is a task of its own there."""
    for prompt, answer in zip(prompts, answers, strict=True):
        arm = prompt.arm
        rotation = f"r{prompt.request.rotation}" if arm.format == "rotations" else ""
        parts = (question_set.name, arm.format, f"{arm.shots}shot", f"k{arm.k}" if arm.k else "", rotation)
        task = "_".join(part for part in parts if part).replace("/", "_").replace(" ", "_")
        text = model.encoder.apply_chat_template(render_prompt(prompt.request))
        sample = Sample(prompt.request.question, text, answer)
        run.samples.setdefault(arm.name, {}).setdefault(task, []).append(sample)


def _note_faults(run: _Run, question_set: QuestionSet, prompts: Sequence[PendingPrompt]) -> None:
    """Add notes on prompts that were cut to the window and on those that could not be scored."""
    for arm in dict.fromkeys(prompt.arm for prompt in prompts):
        answers = run.results[question_set.name, arm]
        where = f"{arm.name} on {question_set.name} ({arm.format}, {arm.shots} shots, K {arm.k})"
        n_cut = sum(answer.truncated > 0 for answer in answers)
        if n_cut:
            run.notes.append(f"{where}: {n_cut} of {len(answers)} prompts did not fit the model's window and were cut")
        n_unscored = sum(not is_scored(answer) for answer in answers)
        if n_unscored:
            run.notes.append(
                f"{where}: {n_unscored} of {len(answers)} questions could not be scored (log-probs that are not finite); "
                "they count as wrong"
            )


def _write_files(recipe: EvalRecipe, run: _Run, report: Report) -> None:
    write_jsonl(recipe.run_dir / "flips.jsonl", find_flips(run.plan, run.section, run.results))
    write_checked_json(recipe.run_dir / "report.json", {"format_version": FORMAT_VERSION, **to_json(report)})
    counts = {
        "answers": sum(map(len, run.results.values())),
        "scored_now": run.n_scored,
        "stored": run.scoring.answers.n_rows,
    }
    write_manifest(
        recipe.run_dir / "manifest.json", stage="eval", inputs=run.inputs, recipe=recipe.raw, counts=counts,
        outputs=["flips.jsonl"],
    )  # fmt: skip
    for arm, tasks in run.samples.items():
        folder = recipe.run_dir / "harness" / file_name(arm)
        for old in (*folder.glob("samples_*.jsonl"), *folder.glob("results_*.json")):
            delete_file(old)  # of an earlier run of this recipe: two dates would be read as two results
        shots = {task: samples[0].answer.shots for task, samples in tasks.items()}
        date = datetime.now(UTC).replace(tzinfo=None).isoformat(timespec="microseconds")
        write_harness_files(folder, tasks, {"model_name": arm, "date": date, "n_shot": shots})


def _render_tokens(tokenizer: Any, prompt: PendingPrompt, log_probs: tuple[float, ...]) -> str:
    """Return the tokens of a prompt and of its choices, with the choices' log-probs."""

    def separated(ids: Sequence[int]) -> str:
        return "|" + "|".join(tokenizer.decode([token]).replace("\n", "\\n") for token in ids) + "|"

    encoded, question = prompt.encoded, prompt.request.question
    context = max(encoded.contexts, key=len)
    cut = f", {encoded.truncated} cut to fit" if encoded.truncated else ""
    lines = [f"  {len(context)} tokens{cut}: {separated(context.tolist())}"]
    best = log_probs.index(max(log_probs))
    texts = scored_texts(question, prompt.arm.format)
    for index, (ids, value) in enumerate(zip(encoded.continuations, log_probs, strict=True)):
        marks = ("*" if index == question.answer else " ") + (">" if index == best else " ")
        lines.append(f"  {marks} {value:9.4f}  {separated(ids.tolist())}  ({texts[index]})")
    return "\n".join(lines)
