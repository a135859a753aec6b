"""Do written answers answer their own question, or name something of its kind that the documents name? How often the
texts of a study hold an answer to another question of the same kind (a year, a person, ...): on the same document, and
on other documents.

    python benchmarks/study/other_answers.py recipes/studies/real-written.yaml    # a finished study; some minutes

Questions need a `kind` and a `document_id`, as those in eval/company have them. One whose accepted answers the
question itself accepts is no other question.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from kinject.corpus.grading import matches
from kinject.eval.scoring.answers import read_answers
from kinject.recipe import StudyRecipe, read_recipe
from kinject.study.scheduler import open_study

WRITTEN = "generate"
"""The format of answers that a model writes as it likes."""
MOST_OTHERS = 5
"""Questions on other documents that each text is compared with: those of its kind that follow it in the files."""


@dataclass
class Counts:
    """Of the texts of an arm on one set, asked in one way: whether each holds its own answer, and the shares of other
    questions whose answers it holds."""

    own: list[bool] = field(default_factory=list)
    same_document: list[float] = field(default_factory=list)
    other_documents: list[float] = field(default_factory=list)


class Questions:
    """The questions of all sets of a study by their ids, and which others each is compared with."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        self.by_id: dict[str, dict[str, Any]] = {}
        for path in paths.values():
            with Path(path).open(encoding="utf-8") as lines:
                self.by_id |= {row["id"]: row for row in map(json.loads, lines)}
        self.by_kind = defaultdict(list)
        for row in self.by_id.values():
            self.by_kind[row["kind"]].append(row)

    def others(self, question: dict[str, Any]) -> tuple[list[list[str]], list[list[str]]]:
        """Return the accepted answers of other questions of the same kind: on its document, and on others."""
        alike = self.by_kind[question["kind"]]
        start = alike.index(question)
        rows = [*alike[start + 1 :], *alike[:start]]
        document = question["document_id"]
        same = [row for row in rows if row["document_id"] == document]
        elsewhere = (row for row in rows if row["document_id"] != document)
        some = islice((row for row in elsewhere if is_other(row, question)), MOST_OTHERS)
        return (
            [row["answers"] for row in same if is_other(row, question)],
            [row["answers"] for row in some],
        )


def is_other(row: dict[str, Any], question: dict[str, Any]) -> bool:
    """Return whether `question` accepts none of the answers to the question in `row`."""
    return not any(matches(answer, question["answers"]) for answer in row["answers"])


def texts_of(recipe: StudyRecipe) -> Iterator[tuple[str, Path]]:
    """Yield (arm, folder of an evaluation) of each arm and seed of a study that has run."""
    study = open_study(recipe)
    asked = {item.name: item.test for item in study.question_sets}
    for stages in study.planner.setup_stages():
        study.run_stages(stages, "")
    for arm in study.arms:
        for seed in arm.seeds:
            run = study.evaluated(study.plan_run(arm, seed), "test", asked)
            yield arm.name, run.evaluations[-1].folder


def count(recipe: StudyRecipe, questions: Questions) -> dict[tuple[str, str], Counts]:
    """Return the counts by arm, with passages or without, and question set."""
    counts: dict[tuple[str, str], Counts] = defaultdict(Counts)
    others: dict[str, tuple[list[list[str]], list[list[str]]]] = {}
    for arm, folder in texts_of(recipe):
        for answer in read_answers(folder / "answers.jsonl"):
            if answer.format != WRITTEN:
                continue
            name, text = answer.question_id, answer.text or ""
            question = questions.by_id[name]
            if name not in others:
                others[name] = questions.others(question)
            label = f"{arm}, with passages" if answer.k else arm
            found = counts[label, answer.question_set]
            found.own.append(matches(text, question["answers"]))
            for alike, shares in zip(
                others[name], (found.same_document, found.other_documents), strict=True
            ):
                if alike:
                    shares.append(fmean(matches(text, answers) for answers in alike))
    return counts


def share(values: list[Any]) -> str:
    """Return the mean as a percentage, with the number of texts."""
    return f"{100 * fmean(values):5.1f} ({len(values):,})" if values else "-"


def main() -> None:
    """Print the table of a study."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    arguments = parser.parse_args()
    recipe = read_recipe(arguments.recipe, verb="study")
    asked = {item.name: item.test["path"] for item in open_study(recipe).question_sets}
    counts = count(recipe, Questions(asked))
    print(
        "| arm | set | own answer, % (texts) | another's, same document | others', other documents |"
    )
    print("|---|---|---|---|---|")
    for (arm, name), found in counts.items():
        cells = [share(found.own), share(found.same_document), share(found.other_documents)]
        print(f"| {arm} | {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    sys.exit(main())
