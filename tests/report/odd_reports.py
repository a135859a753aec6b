"""Reports of odd shape, whose first sentences tests/goldens/openings holds: run this file to write them again.

    PYTHONPATH=tests/report python tests/report/odd_reports.py

Read the sentences by eye after a change: whoever knows nothing of kinject must be able to repeat them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from study_results import make_paper_study, make_study
from study_samples import first, make_evaluation, make_report, make_result

from kinject.report.formatting import Training, View
from kinject.report.words import write_opening
from kinject.results import ArmResult, Contrast, Failure, Perplexity, Report, UnscoredResult

OPENINGS = Path(__file__).parents[1] / "goldens" / "openings"
KEPT = {"question_set": "known", "role": "retention"}


def few_documents(result: ArmResult, n: int) -> ArmResult:
    """Return `result` with all its questions on `n` documents."""

    def fewer(contrast: Contrast | None) -> Contrast | None:
        return contrast and replace(
            contrast, n_clusters=n, n_effective=n, p=0.0078, test="sign flips", scope="these models"
        )

    return replace(
        result,
        n_documents=n,
        to_base=fewer(result.to_base),
        to_rag=fewer(result.to_rag),
        to_closest=None,
    )


def _arms(
    names: Sequence[str], n_right: Sequence[int], n: int = 100, **changes: object
) -> list[ArmResult]:
    base = first(n_right[0], n)
    return [make_result("base", base, None, **changes)] + [
        make_result(name, first(right, n), base, **changes)
        for name, right in zip(names, n_right[1:], strict=True)
    ]


def odd_reports() -> dict[str, View]:
    """Return name -> report."""
    one, kept = _arms(["cpt"], [22, 91]), _arms(["cpt"], [98, 97], **KEPT)
    chinese = [
        replace(result, question_set="员工手册") for result in _arms(["继续预训练"], [40, 85])
    ]
    markup = [
        replace(r, question_set='"><b>x</b>')
        for r in _arms(["<script>alert(1)</script>"], [40, 85])
    ]
    few = [
        few_documents(result, 8)
        for result in _arms(["plain", "own", "best", "lora", "sft"], [55, 61, 70, 84, 90, 66])
    ]
    seeds = make_study()
    diverged = UnscoredResult("sandbox", "ft-par", "new", "learning", "texts", 0, 0, 300, seed=2)
    twenty = _arms([f"arm {i}" for i in range(1, 21)], [30, *range(31, 91, 3)])
    perplexities = (
        Perplexity("base", "general", 9, 900, 20.0, 1.5),
        Perplexity("cpt", "general", 9, 900, 17.0, 1.4),
    )
    letters = [replace(result, format="letters", mass=0.31) for result in one]
    sixty = {"n_clusters": 60, "n_effective": 60, "p": 0.31, "low": -0.06, "high": 0.14}
    low = [
        replace(r, n_documents=60, to_base=r.to_base and replace(r.to_base, **sixty))
        for r in _arms(["cpt"], [30, 34])
    ]
    both = make_report()
    reports: dict[str, Report] = {
        "one arm": make_evaluation([*one, *kept]),
        "no trained arm": make_evaluation(one[:1]),
        "own documents, too few": make_evaluation([few_documents(replace(r, question_set="documents"), 8) for r in one]),
        "five arms, eight documents": make_evaluation(few),
        "nothing shown": make_evaluation(low),
        "two arms with retrieval": both,
        "two arms, none the best": replace(both, results=tuple(replace(r, to_closest=None) for r in both.results)),
        "a diverged seed of three": replace(seeds, unscored=(diverged,)),
        "nothing has a score": make_evaluation([], unscored=(
            UnscoredResult("base", "base", "new", "learning", "texts", 0, 0, 40),), arms=()),
        "twenty arms": make_evaluation(twenty),
        "names with markup": make_evaluation(markup),
        "Chinese names": make_evaluation(chinese),
        "a training that read a part, letters that fail, perplexity": make_evaluation(letters, perplexities=perplexities),
        "several base models": make_paper_study(),
        "a failed arm": replace(make_evaluation([*one, *kept]), failures=(
            Failure("lora", "base", 1, "train", "out of memory", "runs/lora/stage.log"),)),
    }  # fmt: skip
    part = Training("paraphrases of the documents", 4, 4 / 11, True)
    views = {name: View(report) for name, report in reports.items()}
    name = "a training that read a part, letters that fail, perplexity"
    return views | {name: View(reports[name], {("base", "cpt"): part})}


def opening_text(view: View) -> str:
    """Return the first sentences of a report as the terminal has them."""
    return "\n\n".join(textwrap.fill(text, 100) for text in write_opening(view).paragraphs()) + "\n"


if __name__ == "__main__":
    for title, report_view in odd_reports().items():
        (OPENINGS / f"{title.replace(', ', '-').replace(' ', '-').lower()}.txt").write_text(
            opening_text(report_view), "utf-8"
        )
