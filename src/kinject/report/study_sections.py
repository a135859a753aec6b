"""What stands under each heading of a study's page; where the study has nothing to say, a sentence that says so."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kinject.report.formatting import format_asked, format_name, format_percent, join_words
from kinject.report.study_blocks import (
    Block,
    Bullets,
    Code,
    FigureBlock,
    Heading,
    Section,
    TableBlock,
    Text,
    line,
    with_common_heads,
)
from kinject.report.study_details import (
    arms_table,
    choices_table,
    claims_table,
    cost_table,
    failures_table,
    format_seconds,
    question_tables,
)
from kinject.report.study_limits import render_limits
from kinject.report.study_scaling import LABEL, scaling_section
from kinject.report.study_tables import (
    curve_table,
    exposures_table,
    k_tables,
    numbers_tables,
    paper_tables,
    published_notes,
    subjects_tables,
)
from kinject.report.study_view import View
from kinject.report.training_log import TrainingLog

Drawn = Mapping[str, str]
"""Stem of a figure's files -> the curve that it shows, "" for the figures of every study."""

_CAPTIONS = {
    "accuracy": "Share of questions answered rightly, with its 95% interval over documents and seeds. Ticks below a mark: "
                "single seeds. Dashed: chance. Thin line: base.",
    "gains": "Difference to base as a share of base's accuracy, as in the paper's Figure 2; paler bars have retrieved context. "
             "The line is the 95% interval of the difference, over the same accuracy.",
    "k": "Accuracy by number of retrieved passages; bands are 95% intervals. K was chosen on validation questions, not on these.",
    "frontier": "Up: more learned. Right: more kept. A value better than another lies above and to the right of it.",
    "flips": "Questions whose majority answer over seeds changed against base.",
    "questions": "One column a question, dark where every seed was right, paler where some were. Sorted by what base had right, "
                 "then the arms from top to bottom.",
    "directions": "Questions asked as the documents tell it and the other way round; the figure in the margin is the "
                  "difference in points. Lines are 95% intervals.",
    "exposures": "Accuracy by how often training read the document that answers a question, in any wording. Bins double in "
                 "width.",
    "loss": "Loss on the training text; in grey the other arms (of many, some twenty) over the same steps. A light line ends "
            "an epoch. A loss that steps down at those lines is memorisation: it falls because the same text comes again.",
    "choices": "Accuracy on validation questions for each value tried.",
    "costs": "Seconds of each arm, all seeds together; what several arms used is shared out among them.",
}  # fmt: skip
_LABELS = {
    "scaling": LABEL,
    "accuracy": "Accuracy by arm; the numbers stand in the tables below",
    "gains": "Relative gain over base by arm",
    "k": "Accuracy by number of retrieved passages; the numbers stand in the table above",
    "frontier": "Learning against forgetting; the numbers stand in the tables of the curves",
    "flips": "Questions that became right and wrong by arm",
    "questions": "Every question by arm",
    "directions": "Forward and reverse questions by arm",
    "exposures": "Accuracy by exposures of the document",
    "loss": "Training loss by step",
    "choices": "Validation accuracy by value tried",
    "costs": "Seconds by arm and stage; the numbers stand in the table below",
}
_CURVE_LABEL = "Accuracy along a curve; its numbers stand below"
_CURVE_CAPTION = (
    "Bands and bars: 95% intervals over documents and seeds; short ticks are single seeds. Thin line: base on the first "
    "set."
)
_ABOUT = (
    "Accuracy: mean over seeds. Intervals: 95%, bootstrap over source documents and seeds together. Differences are paired by "
    "question.",
    "p: two-sided sign-flip permutation over source documents, corrected by Holm for all comparisons of a family. ▲ and ▼ with "
    "colour: differs from base, p < 0.05 after the correction.",
    "“became right / wrong” counts questions whose majority answer over seeds changed. “smallest seen”: the difference in "
    "points that as many questions show with 80% power.",
)
_RERUN = (
    "A finished stage is found again by its content, so that a second run does only what is missing. What changed in the recipe "
    "is done anew, and what hangs on it."
)


@dataclass(frozen=True, slots=True)
class Logs:
    """The training logs of a study's own arms: those that were read, and the names of those that are not there (any more)."""

    read: tuple[TrainingLog, ...]
    gone: tuple[str, ...] = ()


def make_sections(view: View, drawn: Drawn, logs: Logs) -> tuple[Section, ...]:
    """Return the sections of the page, in order."""
    sections = [
        Section("What these data cannot tell", (Bullets(render_limits(view)), *_guessing(view))),
        _claims(view),
        Section("Accuracy by arm", _figure("accuracy", drawn, "No arm has a result.")),
        _paper(view),
        Section("Relative gain by method", _figure("gains", drawn, "No arm stands beside base on what was to be learned.")),
        _context(view, drawn),
        _curves(view, drawn),
        scaling_section(view, drawn="scaling" in drawn),
        Section("Learning against forgetting", _figure("frontier", drawn, _no_frontier(view))),
        _questions(view, drawn),
        Section("Forward and reverse", _figure("directions", drawn, (
            "This study has no set of reverse questions beside forward ones (its name would contain “reverse”)."))),
        _exposures(view, drawn),
        _losses(view, drawn, logs),
        _choices(view, drawn),
        _costs(view, drawn),
        Section("Every number", (*numbers_tables(view), *subjects_tables(view), Bullets(_ABOUT, small=True))),
        Section("The arms", (arms_table(view),)),
    ]  # fmt: skip
    if view.result.failures:
        sections.append(Section("What failed", (failures_table(view),)))
    if view.result.notes:
        sections.append(Section("Notes of the study", (Bullets(tuple(map(format_name, view.result.notes))),)))
    commands = tuple(format_name(command) for command in view.result.commands)
    sections.append(Section("Run it again", (Text(_RERUN), *((Code(commands),) if commands else ()))))
    return tuple(section for section in sections if section.blocks)


def figure_label(name: str) -> str:
    """Return what a screen reader says of a figure, by the stem of its files."""
    return _LABELS.get(name, _CURVE_LABEL)


def _figure(name: str, drawn: Drawn, otherwise: str) -> tuple[Block, ...]:
    if name in drawn:
        return (FigureBlock(name, _LABELS[name], _CAPTIONS[name]),)
    return (Text(otherwise),)


def _guessing(view: View) -> tuple[Block, ...]:
    """Return what the base answers without the question: what a set gives away."""
    base = {(arm.model, arm.name) for arm in view.result.arms if not arm.trained}
    found = [
        score for score in view.result.scores
        if score.role == "baseline" and not score.subject and (score.model, score.arm) in base
    ]  # fmt: skip
    lines = tuple(
        line(format_name(s.question_set), format_name(s.model), format_name(s.arm), format_asked(s.format, s.shots),
             format_percent(s.accuracy), f"{100 * s.low:.1f} – {100 * s.high:.1f}%", format_percent(s.chance))
        for s in found
    )  # fmt: skip
    columns = ("set", "model", "arm", "asked", "accuracy", "95% interval", "chance")
    title = "What the options alone give away"
    table = TableBlock(title, "accuracy without the question", columns, lines, heads=4)
    return (with_common_heads(table),) if lines else ()


def _claims(view: View) -> Section:
    if not view.result.claims:
        return Section("Claims", (Text("This study's recipe declares no claims, so none was tested."),))
    about = "Declared in the recipe before the study ran; p is corrected by Holm over all of them. ✓ shown: p < 0.05 that way."
    return Section("Claims", (claims_table(view.result.claims), Bullets((about,), small=True)))


def _paper(view: View) -> Section:
    tables = [*paper_tables(view), *k_tables(view)]
    notes = ("Below each accuracy its 95% interval. ▲ above base, ▼ below base (p < 0.05 after Holm's correction).",)
    return Section("The paper's tables", (*tables, Bullets((*notes, *published_notes(tables)), small=True)))


def _context(view: View, drawn: Drawn) -> Section:
    without = "No arm was asked with several numbers of retrieved passages."
    if not any(score.k for score in view.whole):
        without = "No arm was asked with retrieved passages."
    return Section("Retrieved passages", _figure("k", drawn, without))


def _curves(view: View, drawn: Drawn) -> Section:
    blocks: list[Block] = []
    for name in dict.fromkeys(curve.name for curve in view.result.curves):
        curves = [curve for curve in view.result.curves if curve.name == name]
        stem = next((stem for stem, own in drawn.items() if own == name), "")
        about = format_name(curves[0].about)
        blocks += [Heading(format_name(name)[:1].upper() + format_name(name)[1:]), *((Text(about),) if about else ())]
        if stem:
            control = (
                "" if not any(p.control for c in curves for p in c.points) else " Dotted: the control on the first set."
            )
            blocks.append(FigureBlock(stem, _CURVE_LABEL, _CURVE_CAPTION + control))
        else:
            blocks.append(Text("None of its points has a result."))
        blocks += [curve_table(view, curve) for curve in curves]
    return Section("Curves", tuple(blocks) or (Text("This study varies nothing along a curve."),))


def _no_frontier(view: View) -> str:
    if not view.sets("retention"):
        return "This study has no question set to be kept, so it cannot show what learning costs."
    return "No curve of this study is marked for this plot, or none of its points has a result."


def _questions(view: View, drawn: Drawn) -> Section:
    blocks = [*_figure("flips", drawn, "No arm stands beside base.")]
    if "questions" in drawn:
        blocks += _figure("questions", drawn, "")
    return Section("Question by question", (*blocks, *question_tables(view)))


def _exposures(view: View, drawn: Drawn) -> Section:
    figure = _figure("exposures", drawn, "No training run counted how often it read each document.")
    return Section("Exposures", (*figure, exposures_table(view)) if "exposures" in drawn else figure)


def _losses(view: View, drawn: Drawn, logs: Logs) -> Section:
    blocks: list[Block] = [*_figure("loss", drawn, "No training log was given, or none holds a loss.")]
    lines = [
        line(format_name(log.name), f"{log.steps[-1]:,.0f}", f"{log.epochs[-1]:.3g}" if log.epochs else "",
             *(f"{loss:.3f}" if math.isfinite(loss) else "not finite" for loss in (log.losses[0], log.losses[-1])),
             f"{max(log.learning_rates):.2g}" if log.learning_rates else "")
        for log in logs.read if log.steps
    ]  # fmt: skip
    columns = ("run", "steps", "epochs", "first loss", "last loss", "highest learning rate")
    if lines:
        blocks.append(TableBlock("Training runs", "points of curves left out", columns, tuple(lines), folded=True))
    if logs.gone:
        blocks.append(Text(f"The logs of {join_words(logs.gone)} are no longer where the study left them."))
    return Section("Training loss", tuple(blocks))


def _choices(view: View, drawn: Drawn) -> Section:
    if not view.result.choices:
        return Section("Choices", (Text("The study chose nothing itself: every value stands in its recipe."),))
    about = (
        "Chosen on validation questions before any test question was read. “best on test” is what the test questions would have "
        "chosen; it was not used."
    )
    drawing = _figure("choices", drawn, "") if "choices" in drawn else ()
    return Section("Choices", (*drawing, choices_table(view), Bullets((about,), small=True)))


def _costs(view: View, drawn: Drawn) -> Section:
    if not view.result.costs:
        return Section("Time, tokens, memory, money", (Text("No stage of this study recorded what it took."),))
    total = sum(cost.seconds / cost.shared_by for cost in view.result.costs)
    money = sum(cost.money / cost.shared_by for cost in view.result.costs)
    spent = f" and {money:,.2f} in the currency of the prices given" if money else ""
    run = format_seconds(view.result.seconds)
    text = f"All stages together took {format_seconds(total)}{spent}; this run of the study {run}."
    return Section("Time, tokens, memory, money", (Text(text), *_figure("costs", drawn, ""), cost_table(view)))
