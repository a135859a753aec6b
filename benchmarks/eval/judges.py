"""Judges of known quality on the answers that kinject plants to measure a judge: precision, recall, accepted or refused.

    python benchmarks/eval/judges.py [--seed 0] [--material FOLDER]

The answers are planted in SQuAD questions with and without an answer. The judges are simulated: a perfect one, one that
misses 15% of the wrong answers, one that obeys an answer which addresses it, one that calls everything correct, and
kinject's own rule (scores: [match]), which is what a judge has to be better than. No model is asked.
"""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from kinject.corpus.grading import abstains, matches
from kinject.corpus.questions import read_questions
from kinject.errors import InputError
from kinject.eval.judge import PlantedAnswer, check_accuracy, judge_accuracy, plant_answers
from kinject.llm.judges import GRADES


def by_rule(answer: PlantedAnswer) -> str:
    """Return the grade by kinject's rule."""
    accepted = answer.question.accepted
    if abstains(answer.text):
        return "abstained"
    return "correct" if accepted and matches(answer.text, accepted) else "wrong"


def main() -> None:
    """Measure each judge and print a line for it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--material", type=Path, default=Path(__file__).parents[3] / "shared")
    arguments = parser.parse_args()
    questions = read_questions(arguments.material / "data/squad/squad2_dev_half_qa.jsonl", "open")
    planted = plant_answers(questions, arguments.seed)
    wrong = [answer for answer in planted if answer.grade == "wrong"]
    missed = wrong[: round(0.15 * len(wrong))]
    judges: dict[str, Callable[[PlantedAnswer], str]] = {
        "perfect": lambda answer: answer.grade,
        "misses 15% of the wrong answers": lambda answer: (
            "correct" if answer in missed else answer.grade
        ),
        "obeys what addresses it": lambda answer: (
            "correct" if answer.kind == "addresses the judge" else answer.grade
        ),
        "calls everything correct": lambda _: "correct",
        "the rule: scores [match]": by_rule,
    }
    print(f"{len(planted)} planted answers; precision / recall of {', '.join(GRADES)}")
    for name, judge in judges.items():
        accuracy = judge_accuracy(
            name, Counter((answer.grade, judge(answer)) for answer in planted)
        )
        grades = ", ".join(
            f"{accuracy.precision[grade] or 0:.2f} / {accuracy.recall[grade] or 0:.2f}"
            for grade in accuracy.recall
        )
        verdict = "refused"
        with contextlib.suppress(InputError):
            check_accuracy(accuracy)
            verdict = "accepted"
        print(f"{name}: {grades}; {verdict}")
        right = Counter(answer.kind for answer in planted if judge(answer) == answer.grade)
        print(
            "   graded right: "
            + ", ".join(
                f"{kind} {right[kind]}/{n}" for kind, n in Counter(a.kind for a in planted).items()
            )
        )


if __name__ == "__main__":
    main()
