"""The 130 fictional passages of github.com/kaistAI/factual-knowledge-acquisition (Apache-2.0) in kinject's formats.

    python benchmarks/fictional.py ../shared/data/fictional runs/fictional

writes documents.jsonl, paraphrases.jsonl, and three question sets: the dataset's cloze probes (taken from the text,
reworded, and one inference away), each with its own answer and three answers of other probes of the same level.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kinject.disk import content_id, write_jsonl

LEVELS = {"memorised": "mem", "reworded": "gen", "inferred": "hard_gen"}
Row = dict[str, Any]


def documents(passages: list[Row]) -> Iterator[Row]:
    """Yield each passage as a document."""
    for index, passage in enumerate(passages):
        yield {"id": f"fictional-{index:03}", "text": passage["train_context"].strip()}


def paraphrases(passages: list[Row]) -> Iterator[Row]:
    """Yield the paraphrases that the dataset gives for some of its passages."""
    for index, passage in enumerate(passages):
        for text in passage.get("paraphrases", ()):
            yield {"document_id": f"fictional-{index:03}", "text": text.strip()}


def questions(passages: list[Row], level: str) -> Iterator[Row]:
    """Yield one four-choice question a probe; distractors are other probes' answers, none of them in the passage."""
    probes = [
        (index, cloze.strip(), answer.strip())
        for index, passage in enumerate(passages)
        for cloze, answer in zip(passage[f"{level}_input"], passage[f"{level}_target"], strict=True)
    ]
    answers = sorted({answer for _, _, answer in probes})
    rng = random.Random(0)
    for index, cloze, answer in probes:
        text = passages[index]["train_context"].lower()
        others = [other for other in answers if other.lower() not in text and other.lower() != answer.lower()]
        choices = [answer, *rng.sample(others, 3)]
        rng.shuffle(choices)
        document = f"fictional-{index:03}"
        yield {
            "id": content_id(level, document, cloze, answer), "question": f"{cloze} ...", "choices": choices,
            "answer": choices.index(answer), "document_id": document, "fact_id": content_id(document, answer),
        }  # fmt: skip


def unique(rows: Iterator[Row]) -> Iterator[Row]:
    """Yield rows whose id did not come before: the dataset repeats a few probes."""
    seen = set()
    for row in rows:
        if row["id"] not in seen:
            seen.add(row["id"])
            yield row


def main() -> None:
    """Write the files and say how many rows each has."""
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    passages = json.loads((source / "fictional_knowledge_paraphrased.json").read_text("utf-8"))
    written = {"documents": documents(passages), "paraphrases": paraphrases(passages)}
    written |= {name: unique(questions(passages, level)) for name, level in LEVELS.items()}
    for name, rows in written.items():
        path = target / f"{name}.jsonl"
        print(f"{path}: {write_jsonl(path, rows)} rows")


if __name__ == "__main__":
    main()
