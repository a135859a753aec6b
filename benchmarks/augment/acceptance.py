"""Texts of real writers against the checks: what is accepted, repaired and refused, and what a covered fact costs.

    python benchmarks/augment/acceptance.py DATA [--half first|second] [--show 20]

DATA holds documents.jsonl (id, title, text) and files with rows of document_id and text, as ../shared/data/seal does: a 7B
model's rewritings (read as the style paraphrase), and the notes of two models (read as plain). An answer is accepted if one
of its texts is. Tokens are words and marks times 1.35. `--half` takes every second document, so that one half can be looked
at and the other reported. `--show` prints refused texts.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kinject.augment.checks.checker import Checker
from kinject.augment.coverage import QUOTA, coverage_of
from kinject.augment.preview import TOKENS_PER_WORD
from kinject.augment.styles import STYLES
from kinject.corpus.passages import word_spans
from kinject.types import Passage

FILES = {
    "qwen7b_rewrites": "paraphrase", "qwen7b_implications": "plain", "qwen7b_trained_implications": "plain",
    "gpt4_1_implications": "plain",
}  # fmt: skip
"""File -> the style as which its answers are read."""


@dataclass
class Outcome:
    """The counts of one file. `facts` are those of its documents, `covered` those in five accepted texts or more.

    `carried` counts each fact once for each accepted text that has it.
    """

    answers: int = 0
    accepted_answers: int = 0
    texts: int = 0
    accepted_texts: int = 0
    items_off: int = 0
    tokens: float = 0.0
    kept: float = 0.0
    facts: int = 0
    covered: int = 0
    carried: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    repairs: Counter[str] = field(default_factory=Counter)
    refused: list[str] = field(default_factory=list)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def measure(
    documents: list[dict[str, Any]], answers: list[dict[str, Any]], style_name: str
) -> Outcome:
    """Return the outcome of the answers about `documents`."""
    style, outcome = STYLES[style_name], Outcome()
    by_document: dict[str, list[str]] = {document["id"]: [] for document in documents}
    for row in answers:
        if row["document_id"] in by_document:
            by_document[row["document_id"]].append(row["text"])
    for document in documents:
        text = document["text"]
        checker = Checker(text, style.rules, style.literals, document["title"])
        coverage = coverage_of(Passage(document["id"], document["id"], 0, len(text), text))
        for answer in by_document[document["id"]]:
            _check(answer, document, style_name, checker, coverage, outcome)
        outcome.facts += len(coverage.facts)
        outcome.covered += sum(n >= QUOTA for n in coverage.counts)
        outcome.carried += sum(coverage.counts)
    return outcome


def _check(
    answer: str,
    document: dict[str, Any],
    style: str,
    checker: Checker,
    coverage: Any,
    outcome: Outcome,
) -> None:
    repaired = STYLES[style].read(answer, document["title"], document["text"])
    outcome.answers += 1
    outcome.tokens += len(word_spans(answer)) * TOKENS_PER_WORD
    outcome.repairs.update(repaired.repairs)
    n_accepted = 0
    for text in repaired.texts:
        text, n_off = checker.without_additions(text)
        verdict = checker.check(text)
        outcome.texts += 1
        if verdict.accepted:
            n_accepted += 1
            outcome.items_off += n_off
            outcome.kept += len(word_spans(text)) * TOKENS_PER_WORD
            checker.accept(text)
            coverage.add(text, verdict.measures["facts"])
        else:
            outcome.reasons[verdict.reason] += 1
            outcome.refused.append(
                f"{document['id']} {verdict.reason}: {verdict.detail} | {text[:300]!r}"
            )
    outcome.accepted_texts += n_accepted
    outcome.accepted_answers += n_accepted > 0


def main() -> None:
    """Print a row for each file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--half", choices=("first", "second"), help="only every second document")
    parser.add_argument("--show", type=int, default=0, help="refused texts to print, of each file")
    arguments = parser.parse_args()
    documents = sorted(
        read_rows(arguments.data / "documents.jsonl"), key=lambda row: str(row["id"])
    )
    if arguments.half:
        documents = documents[arguments.half == "second" :: 2]
    columns = (
        "answers", "accepted", "texts in them", "accepted", "items taken off", "tokens kept", "tokens for a fact in five texts",
        "refused",
    )  # fmt: skip
    print(f"| {' | '.join(columns)} |")
    print("|---|---|---|---|---|---|---|---|")
    for name, style in FILES.items():
        if not (arguments.data / f"{name}.jsonl").exists():
            continue
        outcome = measure(documents, read_rows(arguments.data / f"{name}.jsonl"), style)
        per_fact = QUOTA * outcome.tokens / outcome.carried if outcome.carried else float("inf")
        reasons = ", ".join(f"{reason} {n}" for reason, n in outcome.reasons.most_common(5))
        print(
            f"| {name} as {style}: {outcome.answers} | {outcome.accepted_answers / outcome.answers:.1%} | {outcome.texts} "
            f"| {outcome.accepted_texts / outcome.texts:.1%} | {outcome.items_off} | {outcome.kept / outcome.tokens:.0%} "
            f"| {per_fact:,.0f} ({outcome.covered} of {outcome.facts}) | {reasons} |"
        )
        print(f"  repairs: {dict(outcome.repairs)}")
        for line in outcome.refused[: arguments.show]:
            print("  ", line)


if __name__ == "__main__":
    main()
