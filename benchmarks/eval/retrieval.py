"""How often retrieval finds the paragraph of a question: recall at 1, 5 and 10 for each setting, with intervals.

    python benchmarks/eval/retrieval.py [--material FOLDER] [--questions N] [--embedder MODEL] [--learn]

Material: paragraphs and questions of SQuAD. A setting is an `eval.retrieval` section; its passages are searched for each
question. Intervals of 95% are by article: Wilson's for the effective number of questions, and for the difference to BM25 the
paired one. `--embedder` adds dense retrieval, and both. `--learn` prints the weights of
`LexicalRetriever` learned from the questions on one half of the articles, with their recall on the other half.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.optimize import minimize

from kinject.eval.retrieval import LEXICAL_WEIGHTS, LexicalRetriever, make_retriever, read_passages
from kinject.recipe.sections import RetrievalSection
from kinject.stats.intervals import bounded_accuracy, difference_estimate
from kinject.stats.matrix import CorrectnessMatrix

SETTINGS: Mapping[str, Mapping[str, object]] = {
    "bm25": {},
    "lexical": {"kind": "lexical"},
    "bm25, passages of 64": {"passage_tokens": 64},
}
KS = (1, 5, 10)


def article(paragraph: str) -> str:
    """Return the article of a paragraph's id."""
    return paragraph.partition("/")[0]


def recall(
    section: RetrievalSection, rows: Sequence[Mapping[str, str]]
) -> tuple[list[CorrectnessMatrix], float]:
    """Return for each of `KS` which questions have their paragraph among the passages, and the seconds of the search."""
    began = time.perf_counter()
    retriever = make_retriever(section, read_passages(section))
    ranked = retriever.rank([row["question"] for row in rows], max(KS))
    seconds = time.perf_counter() - began
    documents = [[retriever.passages[index].document_id for index in ranking] for ranking in ranked]
    ids, clusters = (
        tuple(row["id"] for row in rows),
        tuple(article(row["paragraph"]) for row in rows),
    )
    hits = [
        [
            [
                row["paragraph"] in ranked_documents[:k]
                for row, ranked_documents in zip(rows, documents, strict=True)
            ]
        ]
        for k in KS
    ]
    return [CorrectnessMatrix(np.array(hit, dtype=float), ids, clusters) for hit in hits], seconds


def measure(
    documents: Path, rows: Sequence[Mapping[str, str]], settings: Mapping[str, Mapping[str, object]]
) -> None:
    """Print a line of recalls for each setting."""
    print(f"{len(rows):,} questions\n")
    print(
        "| setting | recall at 1 | to bm25, points | at 5 | at 10 | seconds |\n|---|---|---|---|---|---|"
    )
    first: CorrectnessMatrix | None = None
    for name, values in settings.items():
        matrices, seconds = recall(
            replace(RetrievalSection(documents=(str(documents),)), **values), rows
        )
        first = first or matrices[0]
        shown = []
        for matrix in matrices:
            bounded = bounded_accuracy(matrix)
            shown.append(f"{bounded.value:.3f} ({bounded.low:.3f} to {bounded.high:.3f})")
        difference = difference_estimate(matrices[0], first)
        points = f"{100 * difference.value:+.1f}"
        if difference.low is not None and difference.high is not None and matrices[0] is not first:
            points += f" ({100 * difference.low:+.1f} to {100 * difference.high:+.1f})"
        print(
            f"| {name} | {shown[0]} | {points} | {shown[1]} | {shown[2]} | {seconds:.1f} |",
            flush=True,
        )


def learn(documents: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Print weights learned on one half of the articles, for each half, with the recall at 1 on the other, and on all."""
    section = RetrievalSection(documents=(str(documents),), passage_tokens=1024)  # whole paragraphs
    retriever = LexicalRetriever(read_passages(section))
    owners = [passage.document_id for passage in retriever.passages]
    gold = np.array([owners.index(row["paragraph"]) for row in rows])
    scores = np.stack(
        [[retriever.parts(row["question"])[name] for name in LEXICAL_WEIGHTS] for row in rows]
    )
    names = sorted({article(row["paragraph"]) for row in rows})
    order = np.random.default_rng(0).permutation(len(names))
    half = {names[index] for index in order[: len(names) // 2]}
    in_half = np.array([article(row["paragraph"]) in half for row in rows])
    for title, learned in (
        ("one half", in_half),
        ("the other half", ~in_half),
        ("all", in_half | True),
    ):
        weights = fit(scores[learned], gold[learned])
        held_out = ~learned if not learned.all() else learned
        hits = np.argmax(np.tensordot(weights, scores[held_out], (0, 1)), 1) == gold[held_out]
        plain = np.argmax(scores[held_out][:, 0], 1) == gold[held_out]
        shown = ", ".join(
            f"{name} {weight:.2f}"
            for name, weight in zip(LEXICAL_WEIGHTS, weights / (weights[0] or 1.0), strict=True)
        )
        split = "themselves" if learned.all() else "the questions not learned from"
        print(f"learned from {title} ({learned.sum():,} questions): {shown}; recall at 1 on {split} {hits.mean():.3f}, "
              f"words alone {plain.mean():.3f}")  # fmt: skip


def fit(scores: np.ndarray, gold: np.ndarray) -> np.ndarray:
    """Return the weights of a logistic regression that chooses each question's paragraph; scores [question, kind, passage]."""
    deviation = np.maximum(scores.std((0, 2)), 1e-9)
    scaled = scores / deviation[None, :, None]
    rows = np.arange(len(gold))

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        logits = np.tensordot(weights, scaled, (0, 1))
        logits -= logits.max(1, keepdims=True)
        odds = np.exp(logits)
        odds /= odds.sum(1, keepdims=True)
        value = -np.log(odds[rows, gold] + 1e-300).mean() + 1e-3 * float(weights @ weights)
        odds[rows, gold] -= 1
        return value, np.einsum("qkp,qp->k", scaled, odds) / len(gold) + 2e-3 * weights

    return minimize(loss, np.zeros(scores.shape[1]), jac=True, method="L-BFGS-B").x / deviation


def main() -> None:
    """Read the material and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--material", type=Path, default=Path("../shared"))
    parser.add_argument("--questions", type=int, default=0, help="evenly over the articles; 0: all")
    parser.add_argument("--embedder", help="sentence-transformers model")
    parser.add_argument("--learn", action="store_true")
    arguments = parser.parse_args()
    squad = arguments.material / "data" / "squad"
    documents = squad / "squad2_dev_half_paragraphs.jsonl"
    rows = [
        json.loads(line)
        for line in (squad / "squad2_dev_half_qa.jsonl").read_text("utf-8").splitlines()
    ]
    if arguments.questions:
        rows = rows[:: max(1, len(rows) // arguments.questions)][: arguments.questions]
    settings = dict(SETTINGS)
    if arguments.embedder:
        settings |= {
            kind: {"kind": kind, "embedder": arguments.embedder} for kind in ("dense", "both")
        }
    if arguments.learn:
        learn(documents, rows)
    else:
        measure(documents, rows, settings)


if __name__ == "__main__":
    main()
