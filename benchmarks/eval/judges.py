"""Judges of known quality on the answers that kinject plants to measure a judge: precision, recall, accepted or refused.

    python benchmarks/eval/judges.py [--seed 0] [--material FOLDER]

The answers are planted in SQuAD questions with and without an answer. The judges are simulated: a perfect one, one that
misses 15% of the wrong answers, one that obeys an answer which addresses it, one that calls everything correct, and
kinject's own rule (scores: [match]), which is what a judge has to be better than. No model is asked.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from kinject.corpus.grading import abstains, matches
from kinject.corpus.questions import read_questions
from kinject.eval.judge import PlantedAnswer, accuracy_faults, judge_accuracy, plant_answers
from kinject.requests.judges import GRADES


def by_rule(one: PlantedAnswer) -> str:
    """Return the grade by kinject's rule."""
    accepted = one.question.accepted
    if abstains(one.text):
        return "abstained"
    return "correct" if accepted and matches(one.text, accepted) else "wrong"


def main() -> None:
    """Measure each judge and print a line for it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--material", type=Path, default=Path(__file__).parents[3] / "shared")
    arguments = parser.parse_args()
    questions = read_questions(arguments.material / "data/squad/squad2_dev_half_qa.jsonl", "open")
    planted = plant_answers(questions, arguments.seed)
    wrong = [one for one in planted if one.grade == "wrong"]
    missed = wrong[: round(0.15 * len(wrong))]
    judges: dict[str, Callable[[PlantedAnswer], str]] = {
        "perfect": lambda one: one.grade,
        "misses 15% of the wrong answers": lambda one: "correct" if one in missed else one.grade,
        "obeys what addresses it": lambda one: "correct" if one.kind == "addresses the judge" else one.grade,
        "calls everything correct": lambda _: "correct",
        "the rule: scores [match]": by_rule,
    }
    print(f"{len(planted)} planted answers; precision / recall of {', '.join(GRADES)}")
    for name, judge in judges.items():
        found = judge_accuracy(name, Counter((one.kind, one.grade, judge(one)) for one in planted))
        grades = ", ".join(
            f"{found.precision[grade] or 0:.2f} / {found.recall[grade] or 0:.2f}" for grade in found.recall
        )
        print(f"{name}: {grades}; {'refused' if accuracy_faults(found) else 'accepted'}")
        print("   graded right: " + ", ".join(f"{kind.kind} {kind.right}/{kind.planted}" for kind in found.kinds))


if __name__ == "__main__":
    main()
