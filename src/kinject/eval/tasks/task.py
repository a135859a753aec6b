"""A lm-evaluation-harness task of type multiple_choice or generate_until over local files: its YAML, its rows, its questions."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kinject.corpus.grading import GoldIndex, plain_text
from kinject.corpus.questions import check_choices, choice_fault
from kinject.corpus.templates import compile_template, render
from kinject.errors import InputError
from kinject.eval.prompts import Generation, TaskStyle
from kinject.eval.scores import AnswerGrader
from kinject.eval.tasks.rows import Located, Row, files_of, read_config, read_split
from kinject.eval.texts import FILTERS, NEEDS_CHOICES, ChoiceGrader, task_grader
from kinject.types import Question

_KEYS = frozenset({
    "task", "task_alias", "tag", "include", "dataset_path", "dataset_name", "dataset_kwargs", "output_type",
    "training_split", "validation_split", "test_split", "fewshot_split", "fewshot_config", "description", "doc_to_text",
    "doc_to_choice", "doc_to_target", "target_delimiter", "fewshot_delimiter", "metric_list", "num_fewshot", "metadata",
    "should_decontaminate", "doc_to_decontamination_query", "repeats", "filter_list",
    "generation_kwargs", "gen_prefix",
})  # fmt: skip
_SAMPLERS = ("default", "first_n")
_METRICS = {"multiple_choice": ("acc", "acc_norm", "acc_bytes"), "generate_until": ("exact_match",)}
_MATCH_OPTIONS = {"ignore_case", "ignore_punctuation", "ignore_numbers", "regexes_to_ignore"}
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_MOST_TOKENS = 256
"""The harness's most tokens of an answer, where a task names none."""
_MOST_DIGITS = 10
_SEED = 1234
"""The harness's default seed for drawing examples."""


@dataclass(frozen=True)
class Task:
    """A task: its questions with rendered text and choices, the text around each, and its pool of examples.

    `styles` are those of `questions`, in their order. With `same_split` the examples come from the questions' own
    split, and a question is never an example for itself. `why_no_pool` is the reason for an empty pool, else "".
    Where the model writes its answers, `generation` bounds them, and `graders` has for each list of filters whether a text is
    correct, by the name of the harness's result: exact_match,NAME.
    """

    name: str
    questions: tuple[Question, ...]
    styles: tuple[TaskStyle, ...]
    pool: tuple[Question, ...]
    sampler: str
    same_split: bool
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()
    why_no_pool: str = ""
    generation: Generation | None = None
    graders: Mapping[str, AnswerGrader] = field(default_factory=dict)

    def examples(self, n: int) -> list[tuple[Question, ...]]:
        """Return the `n` examples before each question, as the harness chooses them.

        ``first_n``: the first of the pool. Otherwise they are drawn at random, question after question from one
        generator, so a question's examples depend on its position. Raises `InputError` if the pool is too small.
        """
        if not n:
            return [()] * len(self.questions)
        n_needed = n + (self.same_split and self.sampler == "default")
        if len(self.pool) < n_needed:
            why = self.why_no_pool or f"{len(self.pool)} are there"
            raise InputError(f"{self.files[0]}: eval.shots asks for {n} examples, but {why}. Ask for fewer.")
        if self.sampler == "first_n":
            pools = ([shot for shot in self.pool if not self._is_same(shot, each)] for each in self.questions)
            return [tuple(pool[:n]) for pool in pools]
        rng = random.Random(_SEED)
        return [self._draw(rng, question, n) for question in self.questions]

    def _draw(self, rng: random.Random, question: Question, n: int) -> tuple[Question, ...]:
        if not self.same_split:
            return tuple(rng.sample(self.pool, n))
        shots = [shot for shot in rng.sample(self.pool, n + 1) if not self._is_same(shot, question)][:n]
        if len(shots) < n:  # the pool contains the question several times
            shots = rng.sample([shot for shot in self.pool if not self._is_same(shot, question)], n)
        return tuple(shots)

    def _is_same(self, shot: Question, question: Question) -> bool:
        return self.same_split and (shot.question, shot.choices, shot.answer, shot.answers) == (
            question.question, question.choices, question.answer, question.answers,
        )  # fmt: skip


def read_task(path: Path) -> Task:
    """Return the task in the YAML file `path`.

    It may use the keys of the harness's MMLU, ARC, OpenBookQA, TriviaQA and GSM8K tasks, over local files (`files_of`).
    Templates are Jinja in a sandbox; a text that is the name of a column means that column. A row without an id gets the
    harness's own hash, so that the harness's sample files name the same questions. Raises `InputError` (file, key, question)
    for ``!function``, other output types, several inputs or targets, and data on the hub; `DiskError` if a file does
    not exist.
    """
    config = read_config(path)
    _check(path, config)
    split = str(config.get("test_split") or config.get("validation_split"))
    rows, files = read_split(path, config, split)
    golds = GoldIndex()
    questions = _questions(path, config, rows, golds)
    pool, more, why = _read_pool(path, config, golds)
    return Task(
        name=str(config.get("task", path.stem)),
        questions=questions,
        styles=tuple(_style(path, config, row, number) for number, (_, row) in enumerate(rows)),
        pool=pool,
        sampler=str((config.get("fewshot_config") or {}).get("sampler", "default")),
        same_split=_fewshot_split(config) == config.get("test_split"),
        files=(path, *files, *more),
        notes=tuple(_notes(path, config)),
        why_no_pool=why,
        generation=_generation(path, config) if _writes(config) else None,
        graders=_graders(path, config, questions, rows) if _writes(config) else {},
    )


def _check(path: Path, config: Mapping[str, Any]) -> None:
    """Raise `InputError` for features of the harness that kinject does not have."""

    def refuse(problem: str) -> None:
        raise InputError(f"{path}: {problem}")

    if "group" in config or isinstance(config.get("task"), list):
        refuse("a group of tasks. Name each task's own YAML under eval.questions.")
    unknown = sorted(set(config) - _KEYS)
    if unknown:
        refuse(f"{', '.join(map(str, unknown))}: not among the task keys that kinject reads.")
    if str(config.get("output_type")) not in _METRICS:
        refuse(f"output_type: found {config.get('output_type')!r}, kinject reads {' and '.join(_METRICS)}.")
    writes = _writes(config)
    if writes and config.get("doc_to_choice") is not None:
        refuse("doc_to_choice: not read for generate_until. Let doc_to_target write the text.")
    for key in ("doc_to_text", "doc_to_choice", "doc_to_target"):
        if key not in config and not (writes and key == "doc_to_choice"):
            refuse(f"{key}: missing.")
    if not (config.get("test_split") or config.get("validation_split")):
        refuse("names neither test_split nor validation_split.")
    if config.get("repeats", 1) != 1:
        refuse(f"repeats: found {config['repeats']!r}, kinject asks each question once.")
    if config.get("filter_list") and not writes:
        refuse("filter_list: kinject filters only what a model writes (generate_until). Remove it.")
    fewshot = config.get("fewshot_config") or {}
    if not isinstance(fewshot, Mapping) or set(fewshot) - {"sampler", "split"}:
        refuse(f"fewshot_config: found {fewshot!r:.80}, kinject reads sampler and split.")
    elif fewshot.get("sampler", "default") not in _SAMPLERS:
        refuse(f"fewshot_config.sampler: found {fewshot['sampler']!r}, kinject has {' and '.join(_SAMPLERS)}.")


def _notes(path: Path, config: Mapping[str, Any]) -> list[str]:
    """Return a note for each setting of the task that kinject does not follow."""
    notes = []
    listed = config.get("metric_list")
    metrics = [item.get("metric") for item in listed if isinstance(item, Mapping)] if isinstance(listed, list) else []
    known = _METRICS[str(config["output_type"])]
    others = [str(metric) for metric in metrics if metric not in known]
    if others:
        notes.append(f"{path}: {', '.join(others)}: not computed; kinject has {', '.join(known)} (eval.scores)")
    if config.get("num_fewshot"):
        notes.append(
            f"{path}: num_fewshot: {config['num_fewshot']} is not followed; eval.shots sets the number of examples"
        )
    return notes


def _writes(config: Mapping[str, Any]) -> bool:
    return config.get("output_type") == "generate_until"


def _generation(path: Path, config: Mapping[str, Any]) -> Generation:
    """Return the bounds of an answer; without `until` it ends at the text between examples, as in the harness."""
    options = config.get("generation_kwargs") or {}
    location = f"{path}: generation_kwargs"
    if not isinstance(options, Mapping) or set(options) - {
        "until",
        "do_sample",
        "temperature",
        "top_p",
        "num_beams",
        *_LIMITS,
    }:
        raise InputError(
            f"{location}: found {options!r:.80}, kinject reads until, do_sample, temperature and max_gen_toks."
        )
    if options.get("do_sample") or options.get("temperature", 0) not in (None, 0):
        raise InputError(f"{location}: asks for samples, kinject takes the likeliest tokens. Set do_sample: false.")
    if options.get("num_beams", 1) != 1:
        raise InputError(
            f"{location}: num_beams: found {options['num_beams']!r}, kinject searches with no beam. Set it to 1."
        )
    until = options.get("until", str(config.get("fewshot_delimiter", "\n\n")))
    stop = [until] if isinstance(until, str) else until
    most = next((options[name] for name in _LIMITS if options.get(name) is not None), _MOST_TOKENS)
    if not isinstance(stop, list) or not all(isinstance(text, str) for text in stop):
        raise InputError(f"{location}.until: found {until!r:.60}, expected texts.")
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise InputError(f"{location}.max_gen_toks: found {most!r:.60}, expected a number of tokens.")
    return Generation(most, tuple(filter(None, stop)))


def _graders(
    path: Path, config: Mapping[str, Any], questions: Sequence[Question], rows: Sequence[Located]
) -> dict[str, AnswerGrader]:
    """Return whether an answer is correct, for each list of filters of the task. Raises `InputError` for unknown ones."""
    listed = config.get("metric_list")
    metrics = [item for item in listed if isinstance(item, Mapping)] if isinstance(listed, list) else []
    options = next((item for item in metrics if item.get("metric") == "exact_match"), {"metric": "exact_match"})
    match_options: dict[str, Any] = {
        key: value for key, value in options.items() if key not in ("metric", "aggregation", "higher_is_better")
    }
    if set(match_options) - _MATCH_OPTIONS:
        raise InputError(
            f"{path}: metric_list: found {', '.join(sorted(set(match_options) - _MATCH_OPTIONS))}, not known here."
        )
    lists = config.get("filter_list") or [{"name": "none", "filter": [{"function": "take_first"}]}]
    graders: dict[str, AnswerGrader] = {}
    choices: dict[str, Sequence[str]] = {}
    for item in lists:
        steps = item.get("filter") if isinstance(item, Mapping) else None
        if not isinstance(steps, list) or not all(isinstance(step, Mapping) for step in steps):
            raise InputError(f"{path}: filter_list: found {item!r:.80}, expected name and filter, a list of functions.")
        unknown = [step.get("function") for step in steps if step.get("function") not in FILTERS]
        if unknown:
            raise InputError(f"{path}: filter_list: found {unknown[0]!r:.60}, kinject has {', '.join(FILTERS)}.")
        if any(step["function"] in NEEDS_CHOICES for step in steps) and not choices:
            choices = {
                question.id: _listed_choices(row, location, path)
                for question, (location, row) in zip(questions, rows, strict=True)
            }
        try:
            graders[f"exact_match,{item.get('name', 'none')}"] = _with_choices(
                task_grader(steps, **match_options), choices
            )
        except (re.error, TypeError) as error:
            raise InputError(f"{path}: filter_list: {item.get('name')}: {error}. Correct it.") from error
    return graders


def _with_choices(grade: ChoiceGrader, choices: Mapping[str, Sequence[str]]) -> AnswerGrader:
    """Return `grade` for answers; `choices` are those of each question, by id, where a filter reads them."""
    return lambda answer: grade(answer.text or "", answer.accepted, choices.get(answer.question_id, ()))


def _listed_choices(row: Row, location: str, path: Path) -> Sequence[str]:
    """Return the column that the filter multi_choice_regex reads."""
    choices = row.get("choices")
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise InputError(
            f"{location}: {path}: filter_list: multi_choice_regex reads the column choices, a list of texts; found "
            f"{choices!r:.60}."
        )
    return choices


def _fewshot_split(config: Mapping[str, Any]) -> str | None:
    split = (config.get("fewshot_config") or {}).get("split", config.get("fewshot_split"))
    return None if split is None else str(split)


def _read_pool(
    path: Path, config: Mapping[str, Any], golds: GoldIndex
) -> tuple[tuple[Question, ...], tuple[Path, ...], str]:
    """Return the examples, their files, and the reason if there are none."""
    split = _fewshot_split(config) or config.get("training_split") or config.get("validation_split")
    if not split:  # the harness then takes test questions, even the question itself
        return (), (), "the task names no split to take them from (fewshot_split)"
    if not files_of(path, config, str(split)):
        return (), (), f"the task names no local files for the split {split!r} to take them from"
    rows, files = read_split(path, config, str(split))
    return _questions(path, config, rows, golds), files, ""


def _names(rows: Sequence[Located]) -> list[str]:
    """Return an id for each row: its own, or the harness's `doc_hash`; a repeated row also gets its number."""
    names: list[str] = []
    seen: set[str] = set()
    for number, (_, row) in enumerate(rows):
        identity = row.get("id")
        text = json.dumps(row, indent=2, default=str, ensure_ascii=False)
        name = hashlib.sha256(text.encode()).hexdigest() if identity in (None, "") else str(identity)
        names.append(f"{name}#{number}" if name in seen else name)
        seen.add(name)
    return names


def _questions(
    path: Path, config: Mapping[str, Any], rows: Sequence[Located], golds: GoldIndex
) -> tuple[Question, ...]:
    """Return the question of each row. Raises `InputError` for one that has two golds, here or earlier in `golds`."""
    questions = []
    for number, ((location, row), name) in enumerate(zip(rows, _names(rows), strict=True)):
        question = _question(config, row, name, f"{location}: {path}: question {number}")
        conflict = golds.conflict(question, location)
        if conflict:
            raise InputError(f"{location}: {path}: question {number}: {conflict}")
        questions.append(question)
    return tuple(questions)


def _question(config: Mapping[str, Any], row: Row, name: str, location: str) -> Question:
    check_choices(row.get("choices"), location)
    text = _text(config["doc_to_text"], row, f"{location}: doc_to_text")
    prefix = (
        _prefix(config["gen_prefix"], row, f"{location}: gen_prefix") if config.get("gen_prefix") is not None else ""
    )
    subject, document = str(row.get("subject") or ""), str(row.get("document_id") or "")
    if _writes(config):
        answers = _targets(config["doc_to_target"], row, f"{location}: doc_to_target")
        return Question(name, text, (), 0, subject, document, answers=answers, prefix=prefix)
    choices = _choices(config["doc_to_choice"], row, f"{location}: doc_to_choice")
    answer = _target(config["doc_to_target"], row, choices, f"{location}: doc_to_target")
    return Question(name, text, tuple(choices), answer, subject, document, prefix=prefix)


def _style(path: Path, config: Mapping[str, Any], row: Row, number: int) -> TaskStyle:
    text = config.get("description") or ""
    return TaskStyle(
        description=str(_field(text, row, f"{path}: question {number}: description") or "") if text else "",
        target_delimiter=str(config.get("target_delimiter", " ")),
        fewshot_delimiter=str(config.get("fewshot_delimiter", "\n\n")),
        keeps_delimiter=not str(config.get("gen_prefix") or " ")[-1].isspace(),
    )


def _field(template: Any, row: Row, location: str) -> Any:
    """Return the value of a field as the harness reads it: a column, or a rendered template."""
    if not isinstance(template, str):
        raise InputError(f"{location}: found {template!r:.60}, expected a text.")
    if template in row:
        return row[template]
    try:
        return render(compile_template(template, keep_newline=True), row)
    except InputError as error:
        raise InputError(f"{location}: {template!r:.80} cannot be rendered: {error}") from error


def _text(template: Any, row: Row, location: str) -> str:
    if isinstance(template, str) and template.isidentifier() and template not in row:  # the same word for each row
        raise InputError(f"{location}: no column {template!r:.60}. Name one of {', '.join(map(repr, row)):.300}.")
    text = _field(template, row, location)
    if not isinstance(text, str) or (text.isdigit() and template not in row):
        # the harness takes a number as a sign that the choices are contexts
        raise InputError(f"{location}: gives {text!r:.60}, expected the question's text.")
    if "\0" in text or (template and not plain_text(text)):
        raise InputError(f"{location}: gives {text!r:.60}: empty, or with a NUL character. Repair the row.")
    return text


def _prefix(template: Any, row: Row, location: str) -> str:
    """Return the text with which the answer begins."""
    text = _field(template, row, location)
    if not isinstance(text, str) or not text or "\0" in text:
        raise InputError(f"{location}: gives {text!r:.60}, expected a text. Repair the row, or take gen_prefix out.")
    return text


def _choices(template: Any, row: Row, location: str) -> list[str]:
    choices: Any = template
    if isinstance(template, Mapping):
        choices = list(template.values())
    elif not isinstance(template, list):
        choices = _field(template, row, location)
        choices = _literal(choices, location) if isinstance(choices, str) and template not in row else choices
    if not isinstance(choices, Sequence) or isinstance(choices, str) or len(choices) < 2:
        raise InputError(f"{location}: found {choices!r:.80}, expected a list of at least two choices.")
    other = [item for item in choices if not isinstance(item, str) or not item]
    if other:
        raise InputError(
            f"{location}: found the choice {other[0]!r:.60}, expected texts. Numbers and words need quotes."
        )
    fault = choice_fault(choices)
    if fault:
        raise InputError(f"{location}: {fault}")
    return list(choices)


def _targets(template: Any, row: Row, location: str) -> tuple[str, ...]:
    """Return the accepted texts: a text, or a list of them (in a column, or as a template writes it)."""
    value = template if isinstance(template, list) else _field(template, row, location)
    if isinstance(value, str) and template not in row and value[:1] == "[" and value[-1:] == "]":
        value = _literal(value, location)
    texts = value if isinstance(value, list) else [value]
    if not texts or any(isinstance(text, bool) or not isinstance(text, str | int | float) for text in texts):
        raise InputError(f"{location}: found {value!r:.60}, expected a text or a list of them.")
    return tuple(map(str, texts))


def _literal(text: str, location: str) -> Any:
    import ast

    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError) as error:  # MemoryError: nested too deep
        raise InputError(
            f"{location}: rendered to {text!r:.80}, which is not a list. Let it write a list of texts."
        ) from error


def _target(template: Any, row: Row, choices: list[str], location: str) -> int:
    """Return the index of the gold choice: a number (in a column, or as a template renders it), or one of the choices."""
    value = template if isinstance(template, int) else _field(template, row, location)
    if isinstance(value, str) and value.isdecimal() and len(value) < _MOST_DIGITS and template not in row:
        value = int(value)  # even if that number is a choice, as in the harness
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InputError(f"{location}: found {value!r:.60}, which is neither an index nor one of the choices.")
    if isinstance(value, str):
        if value not in choices:
            raise InputError(f"{location}: found {value!r:.60}, which is neither an index nor one of the choices.")
        return choices.index(value)
    if not 0 <= value < len(choices):
        raise InputError(f"{location}: found {value}, but there are {len(choices)} choices. Count from 0.")
    return value
