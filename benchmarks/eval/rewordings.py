"""How reliable a probe is whose items were asked in two wordings, by an evaluation that asked both sets.

    kinject eval RECIPE eval.questions='{first: {path: eval/chat/instructions.jsonl, formats: [generate]},
        second: {path: eval/chat/instructions_reworded.jsonl, formats: [generate]}}' eval.chat=true
    python benchmarks/eval/rewordings.py RUN first second

For each arm: how many items are right in each wording, in both, and in one alone; phi, the correlation of the two answers
to an item (1: the item decides, 0: its wording does); the difference of the two wordings with its 95% interval, over the
kinds of items, their `document_id`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kinject.eval.scores import is_correct, is_scored, rescored
from kinject.eval.scoring.answers import read_answers
from kinject.stats.intervals import difference_estimate
from kinject.stats.matrix import CorrectnessMatrix
from kinject.types import Answer


def answers_of(run: Path, name: str) -> dict[str, dict[str, Answer]]:
    """Return the answers to a set: arm -> item -> answer."""
    found: dict[str, dict[str, Answer]] = {}
    for answer in read_answers(run / "answers.jsonl"):
        if answer.question_set == name:
            (scored,) = rescored([answer], "match")
            if is_scored(scored):
                found.setdefault(answer.arm, {})[answer.question_id] = scored
    return found


def row_of(arm: str, first: Mapping[str, Answer], second: Mapping[str, Answer]) -> str:
    """Return the row of an arm."""
    ids = tuple(name for name in first if name in second)
    rights = [np.array([is_correct(of[name]) for name in ids], float) for of in (first, second)]
    kinds = tuple(first[name].document_id or "" for name in ids)
    a, b = (CorrectnessMatrix(right[None], ids, kinds) for right in rights)
    found = difference_estimate(b, a)
    n_both, n_one = int((rights[0] * rights[1]).sum()), int(np.abs(rights[0] - rights[1]).sum())
    phi = float("nan")
    if rights[0].std() and rights[1].std():
        phi = float(np.corrcoef(rights[0], rights[1])[0, 1])
    interval = "no interval"
    if found.low is not None and found.high is not None:
        interval = f"{100 * found.low:+.1f} to {100 * found.high:+.1f}"
    return (
        f"| {arm} | {len(ids)} | {100 * a.mean():.1f}% | {100 * b.mean():.1f}% | {n_both} | {n_one} | {phi:.2f} "
        f"| {100 * found.value:+.1f} ({interval}) |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("first")
    parser.add_argument("second")
    arguments = parser.parse_args()
    first, second = (
        answers_of(arguments.run, name) for name in (arguments.first, arguments.second)
    )
    print(
        f"| arm | items | {arguments.first} | {arguments.second} | right in both | in one | phi | difference, points |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for arm in first:
        if arm in second:
            print(row_of(arm, first[arm], second[arm]))


if __name__ == "__main__":
    main()
