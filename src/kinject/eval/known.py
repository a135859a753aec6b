"""The questions of an evaluation, parted by whether its base knows them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kinject.corpus.questions import read_questions
from kinject.disk import file_hash, read_manifest, write_jsonl
from kinject.errors import InputError
from kinject.eval.plan import layout_of
from kinject.eval.prompts import GENERATED, WITHOUT_QUESTION
from kinject.eval.scores import is_correct, is_scored, rescored
from kinject.eval.scoring.answers import PERPLEXITY_FORMAT, read_answers
from kinject.types import Answer


@dataclass(frozen=True, slots=True)
class KnownSplit:
    """The questions of a set, parted by whether the base answers them: in `known` and `unknown`, both files of questions.

    `chosen_by` and `measure_with` are the prompt formats (with shots) that chose, and those that did not: with these the
    base answers `kept` of the known questions.
    """

    question_set: str
    n_known: int
    n_unknown: int
    chosen_by: tuple[str, ...]
    measure_with: tuple[str, ...]
    kept: float
    known: Path
    unknown: Path


def split_known(run_dir: Path) -> list[KnownSplit]:
    """Write the questions of a finished evaluation that its base knows, and those that it does not, as files of questions.

    As in Fine-Tuning or Retrieval? (arXiv 2312.05934, section 3): the model knows a fact if the fraction of prompts that it
    answers correctly exceeds the accuracy of guessing. The prompts are every second way of asking without context (a format
    with a number of examples; every rotation of its options is one): a question that was chosen because its answer came out
    right by luck would be lost by any other model, so what the model keeps is to be measured with the other half. A question
    without a score is unknown. Raises `InputError` if the run, or a file of its questions, cannot be used.
    """
    manifest = read_manifest(run_dir / "manifest.json") or {}
    section = manifest.get("recipe", {}).get("eval")
    if manifest.get("stage") != "eval" or not isinstance(section, dict):
        raise InputError(
            f"{run_dir}: no finished evaluation. Run kinject eval there first, with the base as its first model."
        )
    base = next(iter(section["models"]))
    by_set: dict[str, list[Answer]] = {}
    for answer in read_answers(run_dir / "answers.jsonl"):
        if answer.arm == base and not answer.k and answer.format not in (*WITHOUT_QUESTION, PERPLEXITY_FORMAT):
            graded = rescored([answer], "match")[0] if answer.format in GENERATED else answer
            by_set.setdefault(answer.question_set, []).append(graded)
    return [_split_set(run_dir, manifest, name, by_set[name]) for name in section["questions"]]


def _split_set(run_dir: Path, manifest: dict[str, Any], name: str, answers: Sequence[Answer]) -> KnownSplit:
    section = manifest["recipe"]["eval"]
    item = section["questions"][name]
    item = item if isinstance(item, dict) else {"path": item}
    path = Path(item["path"])
    if manifest.get("inputs", {}).get(str(path)) != file_hash(path):
        raise InputError(f"{path}: is not the file that {run_dir} asked. Run kinject eval again.")
    formats = item.get("formats") or section.get("formats", ["texts"])
    asked_ways = {(answer.format, answer.shots) for answer in answers}
    ways = sorted(asked_ways, key=lambda way: (formats.index(way[0]) if way[0] in formats else len(formats), *way))
    if len(ways) < 2:
        raise InputError(
            f"{run_dir}: {name} was asked in one way ({ways[0][0]}, {ways[0][1]} shots), by which luck looks like knowledge. "
            "Ask in two, as eval.formats=[rotations,texts]: one chooses, the other measures."
        )
    halves: tuple[dict[str, list[Answer]], ...] = ({}, {})
    for answer in filter(is_scored, answers):
        halves[ways.index((answer.format, answer.shots)) % 2].setdefault(answer.question_id, []).append(answer)
    asked, parts, kept = {answer.question_id for answer in answers}, {True: [], False: []}, []  # type: ignore[var-annotated]
    layout = layout_of(item.get("layout", "auto"), formats)
    for question in read_questions(path, layout):
        if question.id in asked:  # else eval.limit left it out
            chosen = halves[0].get(question.id, [])
            knows = sum(map(is_correct, chosen)) > math.fsum(answer.chance for answer in chosen)
            kept += [is_correct(answer) for answer in halves[1].get(question.id, ()) if knows]
            needed = "answer" if question.choices else "answers"
            row = {
                key: value for key, value in asdict(question).items() if key == needed or (value and key != "answer")
            }
            parts[knows].append(row)
    files = {known: run_dir / ("known" if known else "unknown") / f"{name}.jsonl" for known in (True, False)}
    for known, rows in parts.items():
        write_jsonl(files[known], rows)
    labels = [f"{form} ({shots} shots)" if shots else form for form, shots in ways]
    rate = sum(kept) / len(kept) if kept else 0.0
    return KnownSplit(
        name,
        len(parts[True]),
        len(parts[False]),
        tuple(labels[::2]),
        tuple(labels[1::2]),
        rate,
        files[True],
        files[False],
    )
