"""`kinject eval`: several models, question sets, formats, shots and context sizes in one report.

At the end the requirements of a gate in CI (`eval.require`). The 95% interval decides, not the
number: a requirement is met where the whole interval is, not met where none of it is, and else
cannot be told from so few questions, which fails a gate, too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from string import ascii_uppercase
from time import monotonic
from typing import Any, Literal
from xml.etree import ElementTree as Xml

from kinject.disk import (
    FORMAT_VERSION,
    check_output,
    content_id,
    delete_file,
    lock_dir,
    read_journal,
    write_json,
    write_jsonl,
    write_manifest,
    write_text,
)
from kinject.documents import document_hashes
from kinject.errors import InputError
from kinject.eval.endpoint import EndpointScorer, money_spent, render_messages
from kinject.eval.judge import AnswerJudge, measured_judge, write_accuracy
from kinject.eval.plan import EvalArm, Plan, QuestionSet, read_plan
from kinject.eval.prompts import ChatStyle, PromptRequest
from kinject.eval.results import Answers, find_flips, make_report
from kinject.eval.scores import PromptScore
from kinject.eval.scoring.answers import GRADES_FILE, AnswerStore, ResumableScoring, join_processes
from kinject.eval.scoring.encode import Encoded, render_tokens
from kinject.eval.scoring.local import LoadedScorer, load_scorer, measure_perplexity
from kinject.eval.shortcuts import shortcuts_of
from kinject.models import check_model
from kinject.process import world_size
from kinject.question_formats import FORMATS
from kinject.recipe import EvalRecipe
from kinject.recipe.sections import EndpointModelSection, EvalSection, LocalModelSection
from kinject.results import ArmResult, Perplexity, Report, to_json
from kinject.terminal import Progress, show
from kinject.types import Answer, ArmName

_INPUT_FIX = "Run the command that wrote it again (stored answers are kept). If you changed it yourself, give it another name."


@dataclass(frozen=True, slots=True)
class PendingPrompt:
    """One prompt of one arm in tokens; `context_ids` are the ids of the passages in it."""

    arm: EvalArm
    request: PromptRequest
    encoded: Encoded
    context_ids: tuple[str, ...]


@dataclass
class _Run:
    """A running evaluation and its results so far."""

    recipe: EvalRecipe
    section: EvalSection
    plan: Plan
    scoring: ResumableScoring
    notes: list[str]
    inputs: dict[str, str]  # path or model -> hash
    results: Answers = field(default_factory=dict)
    prompt_tokens: dict[tuple[str, EvalArm], float] = field(
        default_factory=dict
    )  # of a question; 0: not counted
    perplexities: list[Perplexity] = field(default_factory=list)
    n_scored: int = 0
    endpoints: dict[str, dict[str, Any]] = field(default_factory=dict)  # usage and cost, by model


def evaluate(recipe: EvalRecipe, judged_in: Path | None = None) -> Report:
    """Score every question set with every model of `recipe.eval` and return the results.

    Writes to the recipe's run folder: answers.jsonl as prompts are scored (a rerun scores none of
    them again), report.json, flips.jsonl and manifest.json. An arm is a model's name, with "+rag"
    for K > 0; every result but the base's is compared with the first model without context. Under
    `accelerate launch` the processes divide the questions, and the first one writes. `judged_in` is
    the folder where the accuracy of the recipe's judge was measured before (`measure_judge`).
    Raises `RecipeError`, `InputError` or `DiskError` if an input cannot be used.
    """
    section = recipe.eval
    for model in section.local().values():
        check_model(model.path)
    if section.endpoints() and world_size() > 1:
        raise InputError(
            f"{world_size()} processes would ask eval.models.{next(iter(section.endpoints()))}. Start one."
        )
    plan = read_plan(recipe)
    requirements = read_requirements(section.require, list(section.questions))
    inputs = {str(path): check_output(path, _INPUT_FIX) for path in plan.inputs if path.is_file()}
    for source in map(Path, section.retrieval.documents if section.retrieval else ()):
        inputs |= {} if source.is_file() else document_hashes(source, recipe.documents)
    shard = join_processes(recipe.run_dir)
    with lock_dir(shard.folder), AnswerStore(shard.folder / "answers.jsonl") as answers:
        answers.read_others(shard.other_answers())
        notes = list(plan.notes)
        judge = measured_judge(recipe, plan.open_questions(), judged_in) if shard.is_first else None
        run = _Run(
            recipe,
            section,
            plan,
            ResumableScoring(answers, shard),
            notes,
            {**inputs, **plan.models},
        )
        for name, table in section.tables().items():
            _evaluate_model(run, name, table)
        if judge:
            judge.grade_answers(plan.open_questions(), run.results)
            run.notes.extend(judge.notes())
        report = make_report(recipe.run_dir, plan, section, run.results, run.perplexities)
        counted = [
            run.prompt_tokens[r.question_set, EvalArm(r.arm, r.format, r.shots, r.k)]
            for r in report.results
        ]
        report = replace(
            report, notes=tuple(dict.fromkeys(run.notes)), judge=judge.accuracy if judge else None,
            results=tuple(replace(r, prompt_tokens=n or None) for r, n in zip(report.results, counted, strict=True)),
        )  # fmt: skip
        if shard.is_first:
            report = replace(report, shortcuts=shortcuts_of(recipe, plan.sets))
            _write_files(recipe, run, report, judge)
            if requirements:
                write_checks(check_requirements(requirements, report), recipe.run_dir)
    shard.finish()
    return report


def measure_judge(recipe: EvalRecipe) -> float:
    """Measure the judge of `recipe` on its questions and write its accuracy to the run folder, for
    `evaluate`.

    Returns its cost, in the currency of the recipe's prices. Raises `InputError` if it is not
    accurate enough to grade answers.
    """
    with lock_dir(recipe.run_dir):
        judge = measured_judge(recipe, read_plan(recipe).open_questions(), None)
        if judge:
            write_accuracy(recipe.run_dir, judge.accuracy)
    return money_spent(recipe.eval, recipe.run_dir)


def show_prompts(recipe: EvalRecipe, n: int) -> Iterator[str]:
    """Yield a text for each of the first `n` questions of each set and arm; nothing is stored.

    Tokens are separated by bars, line breaks in a token are \\n; the gold choice has a star, the chosen one an arrow.
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
    path = recipe.run_dir / "answers.jsonl"
    stored = {row["key"] for _, row in read_journal(path)} if path.exists() else set()
    for name, table in recipe.eval.tables().items():
        if isinstance(table, EndpointModelSection):
            model = EndpointScorer(name, table, recipe.eval, recipe.run_dir, recipe.seed)
            prompts = [item.encoded for part in plan.sets for item in encode_arms(part, model)]
            yield model.preview(prompts, stored)
        else:
            arms = [(part, arm) for part in plan.sets for arm in part.arms if arm.model == name]
            n = sum(1 for part, arm in arms for _ in part.requests(arm))
            yield f"{name}: {table}: {n:,} prompts, scored here"


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
    run.inputs.update(model.hashes)
    for question_set in run.plan.sets:
        prompts = encode_arms(question_set, model)
        answers, n_new = score_prompts(run.scoring, question_set, model, prompts)
        run.n_scored += n_new
        for prompt, answer in zip(prompts, answers, strict=True):
            asked = (question_set.name, prompt.arm)
            run.results.setdefault(asked, []).append(answer)
            n_tokens = sum(map(len, prompt.encoded.contexts[:1])) / len(question_set.questions)
            run.prompt_tokens[asked] = run.prompt_tokens.get(asked, 0.0) + n_tokens
    if isinstance(model, EndpointScorer):
        run.endpoints[name] = model.counts()
        run.notes += (
            [f"{name}: no perplexity, which needs a local model"]
            if run.section.perplexity_corpus
            else []
        )
    elif run.section.perplexity_corpus:
        run.perplexities.append(
            measure_perplexity(run.scoring, model, Path(run.section.perplexity_corpus))
        )
    run.notes.extend(model.notes())


def encode_arms(
    question_set: QuestionSet, model: LoadedScorer | EndpointScorer
) -> list[PendingPrompt]:
    """Return the prompts of every arm of `model` on `question_set`, in the order of arms and
    questions."""
    arms = [arm for arm in question_set.arms if arm.model == model.name]
    rows = [(arm, *item) for arm in arms for item in question_set.requests(arm)]
    encoded = model.encode([request for _, request, _ in rows])
    return [
        PendingPrompt(arm, request, item, ids) for (arm, request, ids), item in zip(rows, encoded, strict=True)
    ]  # fmt: skip


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
        by_key.setdefault(key, []).append(prompt)
    stored = scoring.stored(by_key)
    mine = scoring.mine({key: same[0].request.question.id for key, same in by_key.items()})
    n_stored = sum(len(by_key[key]) for key in stored)
    n_new = sum(len(by_key[key]) for key in mine if key not in stored)
    with show_progress(
        f"{model.name} on {question_set.name}", n_stored + n_new, n_stored
    ) as progress:

        def store(key: str, score: PromptScore) -> None:
            for prompt in by_key[key]:
                scoring.answers.add(key, _make_answer(question_set, prompt, score))
                progress.advance()

        todo = {key: by_key[key][0].encoded for key in mine}
        if isinstance(model, EndpointScorer):
            new = model.score_missing(
                {key: encoded for key, encoded in todo.items() if key not in stored},
                store,
                progress.set_status,
            )
        else:
            new = model.score_missing(scoring, todo, stored, store)
    scores = {**stored, **scoring.shard.gather(new)}
    answers = [
        _make_answer(question_set, prompt, scores[key])
        for key, prompt in zip(keys, prompts, strict=True)
    ]
    for key, answer in zip(keys, answers, strict=True):
        scoring.answers.add(key, answer)
    return answers, sum(key not in stored for key in keys)


def _make_answer(question_set: QuestionSet, prompt: PendingPrompt, score: PromptScore) -> Answer:
    question = prompt.request.question
    written = score.text is not None
    form = FORMATS[prompt.arm.format]
    texts = () if written else form.answers(question)
    accepted = question.accepted
    if written and not form.is_open:
        letter, choice = ascii_uppercase[question.answer], question.choices[question.answer]
        accepted = (f"{letter}. {choice}", letter, choice)
    return Answer(
        question_id=question.id,
        question_set=question_set.name,
        arm=prompt.arm.name,
        format=prompt.arm.format,
        shots=prompt.arm.shots,
        k=prompt.arm.k,
        context_ids=prompt.context_ids,
        gold=form.gold(question),
        log_probs=score.log_probs,
        n_tokens=(score.n_tokens,)
        if written
        else score.lengths or tuple(map(len, prompt.encoded.continuations)),
        n_bytes=tuple(len(text.encode("utf-8")) for text in texts),
        truncated=prompt.encoded.truncated,
        n_chars=tuple(map(len, texts)),
        subject=question.subject,
        document_id=question.document_id,
        rotation=prompt.request.rotation,
        greedy=score.greedy,
        text=score.text,
        accepted=accepted if written else (),
        checks=question.checks if written else {},
        choices=question.choices if written and not form.is_open else (),
        n_thinking=score.n_thinking,
        thinking_cut=score.thinking_cut,
        choice_set="" if form.shows_question else content_id("choices", sorted(question.choices)),
    )


@contextmanager
def show_progress(title: str, n_total: int, n_stored: int) -> Iterator[Progress]:
    """Yield a counter for `n_total` prompts, `n_stored` of which need no model; print the rate when
    the block ends."""
    start = monotonic()
    with Progress(title, n_total - n_stored, "questions") as progress:
        yield progress
    seconds = monotonic() - start
    stored = f", {n_stored} found in answers.jsonl" if n_stored else ""
    rate = f", {progress.done / seconds:.1f} a second" if progress.done and seconds else ""
    show(
        f"{title}: {n_total} prompts{stored}, {progress.done} scored in {seconds:.1f} s{rate}",
        file=sys.stderr,
    )


def _write_files(recipe: EvalRecipe, run: _Run, report: Report, judge: AnswerJudge | None) -> None:
    if judge is None:
        delete_file(recipe.run_dir / GRADES_FILE)  # of an earlier run of this recipe
    write_jsonl(recipe.run_dir / "flips.jsonl", find_flips(run.plan, run.section, run.results))
    write_json(
        recipe.run_dir / "report.json", {"format_version": FORMAT_VERSION, **to_json(report)}
    )
    counts: dict[str, Any] = {
        "answers": sum(map(len, run.results.values())),
        "scored_now": run.n_scored,
        "stored": run.scoring.answers.n_rows,
        **({"endpoints": run.endpoints} if run.endpoints else {}),
        **({"judge": judge.counts()} if judge else {}),
    }
    write_manifest(
        recipe.run_dir / "manifest.json", stage="eval", inputs=run.inputs, recipe=recipe.raw, counts=counts,
        outputs=["flips.jsonl", *([GRADES_FILE] if judge else [])],
    )  # fmt: skip


Verdict = Literal["met", "not met", "cannot be told"]
_FORM = re.compile(
    r"\s*((?P<arm>[^:]+):)?(?P<questions>[^:]+?)\s*>=\s*(?P<sign>[+-]?)(?P<number>0|1|0?\.\d+|1\.0+)(?P<net>\s+net)?\s*"
)


@dataclass(frozen=True, slots=True)
class Requirement:
    """`questions` a set's name, `arm` an arm's ("": every model but the base, without retrieval).

    The accuracy must be at least `least`; with `change` its difference from the base's, with `net`
    what that has beyond the difference without the question (`eval.control`).
    """

    text: str
    arm: str
    questions: str
    least: float
    change: bool
    net: bool = False


@dataclass(frozen=True, slots=True)
class Check:
    """What became of a requirement for one arm in one prompt format: `low` and `high` bound the
    number at 95%."""

    requirement: str
    arm: str
    format: str
    verdict: Verdict
    number: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        """The check in one line."""
        return (
            f"{self.verdict}: {self.requirement} ({self.arm}, {self.format}: {self.number:+.3f}, 95% interval "
            f"{self.low:+.3f} to {self.high:+.3f}, {self.n} questions)"
        )


def read_requirements(texts: Sequence[str], sets: Sequence[str]) -> list[Requirement]:
    """Return the requirements that `texts` write, each on one of the question sets `sets`. Raises
    `InputError` for others."""
    requirements = []
    for text in texts:
        match = _FORM.fullmatch(text)
        if match is None or match["questions"] not in sets or (match["net"] and not match["sign"]):
            raise InputError(
                f"eval.require: found {text!r}, expected [ARM:]SET>=NUMBER with a SET of {', '.join(sets)}: 0.8 is an "
                "accuracy, -0.02 a change from the base, +0.1 net a change beyond that without the question."
            )
        number = float(match["sign"] + match["number"])
        requirements.append(
            Requirement(
                text.strip(),
                (match["arm"] or "").strip(),
                match["questions"],
                number,
                bool(match["sign"]),
                bool(match["net"]),
            )
        )
    return requirements


def check_requirements(requirements: Sequence[Requirement], report: Report) -> list[Check]:
    """Return a check of each requirement for each arm that it is about.

    Raises `InputError` if it is about none, or one of these has no score, or nothing to be compared
    with.
    """
    checks = []
    for requirement in requirements:
        results = list(_results(requirement, report))
        if not results:
            arms = ", ".join(
                dict.fromkeys(ArmName.asked(result.arm, result.k) for result in report.results)
            )
            raise InputError(
                f"eval.require: {requirement.text}: no arm has scores of these questions. Arms: {arms or 'none'}."
            )
        checks += [_check(requirement, result) for result in results]
    return checks


def _results(requirement: Requirement, report: Report) -> Iterator[ArmResult]:
    base = report.arms[0].name
    for result in report.results:
        name = ArmName.asked(result.arm, result.k)
        is_meant = requirement.arm == name or not (
            requirement.arm or result.k or result.arm == base
        )
        if is_meant and result.question_set == requirement.questions and not result.subject:
            yield result


def _check(requirement: Requirement, result: ArmResult) -> Check:
    number, low, high = result.accuracy, result.low, result.high
    if requirement.change:
        contrast = result.to_base
        if requirement.net and result.control is None:
            raise InputError(
                f"eval.require: {requirement.text}: {result.arm} was not asked without the question. Set eval.control: true "
                "and a format that compares choices."
            )
        if requirement.net and result.control is not None:
            contrast = result.control.net
        if contrast is None:
            raise InputError(
                f"eval.require: {requirement.text}: {result.arm} is not compared with a base."
            )
        number = contrast.delta
        low = -1.0 if contrast.low is None else contrast.low
        high = 1.0 if contrast.high is None else contrast.high
    least = requirement.least
    verdict: Verdict = "met" if low >= least else "not met" if high < least else "cannot be told"
    arm = ArmName.asked(result.arm, result.k)
    return Check(requirement.text, arm, result.format, verdict, number, low, high, result.n_scored)


def write_checks(checks: Sequence[Check], folder: Path) -> None:
    """Write requirements.json and, for CI, requirements.xml in JUnit's form, in which every check
    is a test."""
    write_json(folder / "requirements.json", [asdict(check) for check in checks])
    failed = [check for check in checks if check.verdict != "met"]
    suite = Xml.Element(
        "testsuite", name="kinject eval", tests=str(len(checks)), failures=str(len(failed))
    )
    for check in checks:
        case = Xml.SubElement(
            suite, "testcase", classname=check.arm, name=f"{check.requirement} ({check.format})"
        )
        if check in failed:
            Xml.SubElement(case, "failure", message=str(check))
    write_text(folder / "requirements.xml", Xml.tostring(suite, "unicode", xml_declaration=True))
