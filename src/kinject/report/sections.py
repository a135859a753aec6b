"""The sections of a report's page. A study has a sentence for missing data; an evaluation leaves the section out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kinject.report.details import (
    arms_table,
    choices_table,
    claims_table,
    cost_table,
    failures_table,
    format_seconds,
    legend_tables,
    question_tables,
    scaling_tables,
)
from kinject.report.flips import Flips
from kinject.report.formatting import format_name, format_percent, format_prompt, join_words
from kinject.report.limitations import render_limitations
from kinject.report.page import (
    Block,
    Bullets,
    Code,
    FigureBlock,
    FlipsBlock,
    Heading,
    Section,
    TableBlock,
    Text,
    line,
    with_common_heads,
)
from kinject.report.tables import (
    exposures_table,
    judge_tables,
    k_tables,
    numbers_tables,
    outcome_tables,
    paper_tables,
    perplexity_tables,
    published_notes,
    recall_tables,
    subjects_tables,
    sweep_table,
    written_tables,
)
from kinject.report.training import TrainingLog
from kinject.report.view import View, unscored_text

_MOST_UNFOLDED = 8  # training runs
_CAPTIONS = {
    "accuracy": "Fraction of questions answered correctly, with its 95% interval. The number in the margin is the accuracy in "
                "percent. Ticks below a mark: single seeds. Dashed: chance. Thin line: base without context.",
    "outcomes": "Outcomes of the written answers: right, abstained, wrong; the first number is the share that is right, the "
                "last the share that is wrong. Where a question has no answer, to abstain is right, and every answer is wrong.",
    "gains": "Difference to base as a fraction of what base answers above chance (the paper's Figure 2 divides by all of its "
             "accuracy); paler bars have retrieved context. The line is the 95% interval (Fieller), base's uncertainty included. "
             "No bar where base is not above chance: any gain is possible there.",
    "k": "Accuracy by number of retrieved passages; bands are 95% intervals. The ringed K was chosen on validation "
         "questions, not on these.",
    "scaling": (
    "Small marks: single seeds. Lines: least squares over the logarithm, the slopes in the table. Dashed: chance. Where a line "
    "nears 100% or chance the points bend away from it. Bits per parameter: means with 95% intervals."
    ),
    "frontier": "Up: more learned. Right: more kept. A value better than another lies above and to the right of it. "
    "Thin lines: 95% intervals.",
    "flips": "Questions whose answer (the majority over seeds) changed against base.",
    "questions": "One column a question, dark where every seed was correct, paler where some were. Sorted by the answers of "
                 "base, then of the arms from top to bottom.",
    "directions": "Questions in the direction of the documents and in the reverse one; the number in the margin is the "
                  "difference in points. Lines are 95% intervals.",
    "exposures": "Accuracy by how often training read the document that answers a question, in any paraphrase. Bins double in "
                 "width.",
    "loss": "Loss on the training text; in grey the other arms (of many, some twenty) over the same steps. A light line ends "
            "an epoch. A loss that steps down at those lines is memorisation: it falls because the same text comes again.",
    "choices": "Rate of right answers (or of the outcome in the title, whose fewest is best) on validation questions, by value.",
    "costs": "Seconds of each arm, all seeds together; the cost of shared stages is divided among the arms.",
}  # fmt: skip
_LABELS = {
    "scaling": "Accuracy by parameters and by exposures; the numbers are in the tables below",
    "accuracy": "Accuracy by arm; the numbers are in the tables below",
    "outcomes": "Right, abstained and wrong answers by arm; the numbers are in the table below",
    "gains": "Relative gain over base by arm",
    "k": "Accuracy by number of retrieved passages; the numbers are in the table above",
    "frontier": "Learning against forgetting; the numbers are in the tables of the sweeps",
    "flips": "Questions that became right and wrong by arm",
    "questions": "Every question by arm",
    "directions": "Forward and reverse questions by arm",
    "exposures": "Accuracy by exposures of the document",
    "loss": "Training loss by step",
    "choices": "Validation accuracy by value tried",
    "costs": "Seconds by arm and stage; the numbers are in the table below",
}
_SWEEP_LABEL = "Accuracy along a sweep; its numbers are below"
_SWEEP_CAPTION = (
    "Bands and bars: 95% intervals over documents and seeds; short ticks: seeds. Thin line: base on the first set."
)
_DEFINITION = (
    "Bits: facts × mean over questions of log2(values) × (right − chance) / (1 − chance). This is what a "
    "reader has stored who knows some of the facts and guesses evenly at the others, each value being equally likely.",
    "Under that assumption it is a lower bound on what the weights hold: the people's names, the language, how to answer and how "
    "to read a passage are not counted, nor is a fact that a question of four choices fails to bring out.",
    "arXiv 2404.05405 reads bits off the loss and counts names too; its 2 bits per parameter are for 1,000 exposures and a data "
    "set larger than the model can hold. A set whose facts are few beside the parameters can only show a small number.",
    "Parameters: all of them, embeddings included, tied ones once. Exposures: readings of the document behind a "
    "question, in any paraphrase. Slopes: 95% intervals of Student's t over all runs. Seeds of one size share its "
    "base model, so along parameters "
    "they are too narrow.",
)
_METHODS = {
    "Wilson": "Intervals of accuracy: Wilson, 95%.",
    "Wilson over documents and seeds": (
        "Accuracy: mean over seeds. Its 95% interval is Wilson's for the effective number of questions: the variance "
        "between source documents and between seeds counts."
    ),
    "McNemar": (
        "Differences are paired, question by question. Intervals: 95%, Bonett and Price (2012). p: exact two-sided McNemar "
        "test."
    ),
    "sign flips": (
        "Differences are paired, question by question. Intervals: 95%, with the variance between source documents. p: exact "
        "two-sided test that flips the sign of each document's difference."
    ),
    "t over documents and seeds": (
        "Differences are paired, question by question. Intervals (95%) and p (two-sided t test, or exact sign flips by "
        "document if their p is larger) hold the variance between source documents and between each arm's seeds."
    ),
}
"""Interval or test of a result -> the sentence that explains it."""

_ABOUT = (
    "“p, Holm”: corrected by Holm for all comparisons of a family: the first prompt format without context and with the "
    "chosen K is one, everything else another. Bold or coloured with ▲ or ▼: differs from base, corrected p below 0.05.",
    "“gain”: the change over what base answers above chance, with its 95% interval (Fieller); none where base is not above "
    "chance. “became right” counts questions that base had wrong (with several seeds, by the "
    "majority answer).",
    "Chance: the mean of one over the number of choices; a written answer has none. Questions without a score are left out.",
)
_RERUN = {
    "study": "A finished stage is found again by its content, so that a second run does only what is missing. A change of the "
             "recipe repeats the changed stages and those that depend on them.",
    "evaluation": "Each stage resumes: results that exist are not computed again. manifest.json in each run folder holds the "
                  "whole recipe, the hashes of the inputs, the seed and the versions.",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Beside:
    """The parts of a page that are not in the report: the drawn figures, training logs, answers that changed.

    `drawn` maps the stem of a figure's files to the sweep that it shows, "" for other figures. `logs` are those of the
    report's own arms, `missing_logs` the names of those that are missing. `flips` is None without flips.jsonl.
    """

    drawn: Mapping[str, str]
    logs: tuple[TrainingLog, ...]
    missing_logs: tuple[str, ...] = ()
    flips: Flips | None = None


def make_sections(view: View, beside: Beside) -> tuple[Section, ...]:
    """Return the sections of the page, in order."""
    report, drawn = view.report, beside.drawn
    changed = (FlipsBlock(beside.flips),) if beside.flips is not None else ()
    commands = tuple(format_name(command) for command in report.commands)
    unscored = (Bullets(tuple(map(unscored_text, report.unscored))),) if report.unscored else ()
    numbers: tuple[Block, ...] = (
        *unscored, *numbers_tables(view), *outcome_tables(view),
        *subjects_tables(view), *recall_tables(view), *perplexity_tables(view),
        Bullets((*_method_sentences(view), *_ABOUT), small=True),
    )  # fmt: skip
    sections = [
        Section("What the names mean", tuple(legend_tables(view))),
        Section("What these data cannot tell", (Bullets(render_limitations(view)), *_guessing(view))),
        _claims(view),
        Section("Accuracy by arm", _figure("accuracy", view, drawn, "No arm has a result.")),
        Section("Right, wrong and abstained", (
            *_figure("outcomes", view, drawn, ""), *written_tables(view), *judge_tables(view))),
        _paper(view),
        Section("Relative gain by method", _figure("gains", view, drawn, "No arm can be compared with base on learning sets.")),
        Section("Retrieved passages", _figure("k", view, drawn, _no_context(view))),
        _sweeps(view, drawn),
        _scaling(view, drawn),
        Section("Learning against forgetting", _figure("frontier", view, drawn, _no_frontier(view))),
        _questions(view, drawn),
        Section("Answers that changed", changed),
        Section("Forward and reverse", _figure("directions", view, drawn, (
            "This study has no set of reverse questions beside forward ones (its name would contain “reverse”)."))),
        _exposures(view, drawn),
        _losses(view, beside),
        _choices(view, drawn),
        _costs(view, drawn),
        Section("Every number", numbers),
        Section("The arms", (arms_table(view),)),
        Section("Failures", (failures_table(view),) if report.failures else ()),
        Section(f"Notes of the {report.kind}", (Bullets(tuple(map(format_name, report.notes))),) if report.notes else ()),
        Section("Run it again", (Text(_RERUN[report.kind]), *((Code(commands),) if commands else ()))),
    ]  # fmt: skip
    return tuple(section for section in sections if section.blocks)


def _method_sentences(view: View) -> Iterable[str]:
    """Return the sentences on the intervals and tests that the report has."""
    contrasts = (c for r in view.report.results for c in (r.to_base, r.to_rag, r.to_plain) if c is not None)
    methods = dict.fromkeys([*(result.interval for result in view.report.results), *(c.test for c in contrasts)])
    return (sentence for method, sentence in _METHODS.items() if method in methods)


def _absent(view: View, sentence: str) -> tuple[Block, ...]:
    """Return the sentence on the missing part of a study, () for an evaluation."""
    return (Text(sentence),) if view.is_study and sentence else ()


def figure_label(name: str) -> str:
    """Return the label of a figure for screen readers, by the stem of its files."""
    return _LABELS.get(name, _SWEEP_LABEL)


def _figure(name: str, view: View, drawn: Mapping[str, str], otherwise: str) -> tuple[Block, ...]:
    if name in drawn:
        return (FigureBlock(name, _LABELS[name], _CAPTIONS[name]),)
    return _absent(view, otherwise)


def _guessing(view: View) -> tuple[Block, ...]:
    """Return a table of the accuracy of the base without the question."""
    base = {(arm.model, arm.name) for arm in view.report.arms if not arm.trained}
    guesses = [
        result for result in view.report.results
        if result.role == "baseline" and not result.subject and (result.model, result.arm) in base
    ]  # fmt: skip
    lines = tuple(
        line(format_name(s.question_set), format_name(s.model), format_name(s.arm), format_prompt(s.prompt_format),
             format_percent(s.accuracy), f"{100 * s.low:.1f} – {100 * s.high:.1f}%", format_percent(s.chance))
        for s in guesses
    )  # fmt: skip
    columns = ("set", "model", "arm", "asked", "accuracy", "95% interval", "chance")
    title = "What the options alone give away"
    table = TableBlock(title, "accuracy without the question", columns, lines, heads=4)
    return (with_common_heads(table),) if lines else ()


def _claims(view: View) -> Section:
    if not view.report.claims:
        return Section("Claims", _absent(view, "This study's recipe declares no claims, so none was tested."))
    late = any(claim.declared_late for claim in view.report.claims)
    about = (
        f"Declared in the recipe before test questions were answered{', unless marked' if late else ''}; p is corrected by "
        "Holm over all of them. ✓ shown: p < 0.05 that way."
    )
    return Section("Claims", (claims_table(view.report.claims), Bullets((about,), small=True)))


def _paper(view: View) -> Section:
    tables = [*paper_tables(view), *k_tables(view)]
    notes = ("Below each accuracy its 95% interval. ▲ above base, ▼ below base (p < 0.05 after Holm's correction).",)
    bullets = Bullets((*notes, *published_notes(view, tables)), small=True)
    title = "The paper's tables" if view.is_study else "Accuracy by method"
    return Section(title, (*tables, bullets) if tables else ())


def _no_context(view: View) -> str:
    if any(result.k for result in view.set_results):
        return "No arm was asked with several numbers of retrieved passages."
    return "No arm was asked with retrieved passages."


def _sweeps(view: View, drawn: Mapping[str, str]) -> Section:
    blocks: list[Block] = []
    for name in dict.fromkeys(sweep.name for sweep in view.report.sweeps):
        sweeps = [sweep for sweep in view.report.sweeps if sweep.name == name]
        stem = next((stem for stem, sweep in drawn.items() if sweep == name), "")
        description = format_name(sweeps[0].description)
        blocks.append(Heading(format_name(name)[:1].upper() + format_name(name)[1:]))
        blocks += [Text(description)] if description else []
        if stem:
            controlled = any(point.control for sweep in sweeps for point in sweep.points)
            caption = _SWEEP_CAPTION + (" Dotted: the control on the first set." if controlled else "")
            blocks.append(FigureBlock(stem, _SWEEP_LABEL, caption))
        else:
            blocks.append(Text("None of its points has a result."))
        blocks += [sweep_table(view, sweep) for sweep in sweeps]
    return Section("Sweeps", tuple(blocks) or _absent(view, "This study varies nothing along a sweep."))


def _no_frontier(view: View) -> str:
    if not view.sets("retention"):
        return "This study has no question set to be kept, so it cannot show what learning costs."
    return "No sweep of this study is marked for this plot, or none of its points has a result."


def _questions(view: View, drawn: Mapping[str, str]) -> Section:
    blocks = [*_figure("flips", view, drawn, "No arm can be compared with base.")]
    if "questions" in drawn:
        blocks += _figure("questions", view, drawn, "")
    return Section("Question by question", (*blocks, *question_tables(view)))


def _exposures(view: View, drawn: Mapping[str, str]) -> Section:
    figure = _figure("exposures", view, drawn, "No training run counted how often it read each document.")
    return Section("Exposures", (*figure, exposures_table(view)) if "exposures" in drawn else figure)


def _losses(view: View, beside: Beside) -> Section:
    blocks: list[Block] = [*_figure("loss", view, beside.drawn, "")]
    if "loss" not in beside.drawn:
        blocks.append(Text("No training log was given, or none holds a loss."))
    columns = ("run", "steps", "epochs", "first loss", "last loss", "highest learning rate")
    if beside.logs:
        lines = tuple(line(*_run_texts(log)) for log in beside.logs)
        about = "points of sweeps left out" if view.report.sweeps else ""
        blocks.append(TableBlock("Training runs", about, columns, lines, folded=len(lines) > _MOST_UNFOLDED))
    if beside.missing_logs:
        names = join_words(beside.missing_logs)
        blocks.append(Text(f"The logs of {names} are missing: their files were moved or deleted."))
    return Section("Training loss", tuple(blocks))


def _run_texts(log: TrainingLog) -> tuple[str, ...]:
    if not log.steps:
        return (format_name(log.name), "no loss logged", "", "", "", "")
    epochs = f"{log.epochs[-1]:.3g}" if log.epochs else ""
    rate = f"{max(log.learning_rates):.2g}" if log.learning_rates else ""
    losses = [f"{loss:.3f}" if math.isfinite(loss) else "not finite" for loss in (log.losses[0], log.losses[-1])]
    return (format_name(log.name), f"{log.steps[-1]:,.0f}", epochs, *losses, rate)


def _choices(view: View, drawn: Mapping[str, str]) -> Section:
    if not view.report.choices:
        return Section("Choices", _absent(view, "The study chose nothing itself: every value is in its recipe."))
    about = (
        "Chosen on validation questions before any test question was answered. “best on test” is what the test questions would "
        "have chosen; it was not used."
    )
    drawing = _figure("choices", view, drawn, "") if "choices" in drawn else ()
    return Section("Choices", (*drawing, choices_table(view), Bullets((about,), small=True)))


def _costs(view: View, drawn: Mapping[str, str]) -> Section:
    if not view.report.costs:
        return Section("Time, tokens, memory, money", _absent(view, "No stage of this study recorded its cost."))
    total = sum(cost.seconds / cost.shared_by for cost in view.report.costs)
    money = sum(cost.money / cost.shared_by for cost in view.report.costs)
    spent = f" and {money:,.2f} in the currency of the prices given" if money else ""
    run = format_seconds(view.report.seconds)
    text = f"All stages together took {format_seconds(total)}{spent}; this run of the study {run}."
    return Section("Time, tokens, memory, money", (Text(text), *_figure("costs", view, drawn, ""), cost_table(view)))


def _scaling(view: View, drawn: Mapping[str, str]) -> Section:
    scaling = view.report.scaling
    if scaling is None:
        return Section("Size, repetition, and bits per parameter", ())
    blocks: list[Block] = [*_figure("scaling", view, drawn, "No base model has a result."), *scaling_tables(scaling)]
    blocks += [Bullets(_DEFINITION, small=True)] if scaling.points else []
    return Section("Size, repetition, and bits per parameter", tuple(blocks))
