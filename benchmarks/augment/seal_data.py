"""The data of recipes/studies/natural-seal.yaml: SEAL's passages, its four kinds of texts, and its questions asked in two ways.

    python benchmarks/augment/seal_data.py ../shared/data/seal runs/seal [--documents 36]

DATA holds documents.jsonl, questions.jsonl and one file of texts for each writer (arXiv 2506.10943). Into TARGET go

    documents.jsonl    the passages, every third of DATA, so that they come from many articles
    passages.jsonl     the passages as a corpus
    own.jsonl          the passages, and what Qwen2.5-7B wrote on each: five lists of implications
    gpt.jsonl          the same by GPT-4.1
    trained.jsonl      the same by Qwen2.5-7B after SEAL's training
    asked.jsonl        the questions with four choices: answers of other questions on the same passage
    written.jsonl      the questions with the accepted answers, to be answered in words

Texts are taken as they came, headings and numbers of lists included, as SEAL trains on them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from study_data import Row, asked, corpus_row

from kinject.disk import read_jsonl, write_jsonl

WRITERS = {
    "own": "qwen7b_implications.jsonl",
    "gpt": "gpt4_1_implications.jsonl",
    "trained": "qwen7b_trained_implications.jsonl",
}
EVERY = 3
"""The passages of one article follow each other: every third leaves few of the same article."""


def main() -> None:
    """Write the files and print the number of rows and words of each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--documents", type=int, default=36)
    arguments = parser.parse_args()
    rows = [row for _, row in read_jsonl(arguments.data / "documents.jsonl")]
    documents = {row["id"]: row for row in rows[::EVERY][: arguments.documents]}
    questions = [
        row
        for _, row in read_jsonl(arguments.data / "questions.jsonl")
        if row["document_id"] in documents
    ]
    passages = [corpus_row(document, document["text"]) for document in documents.values()]
    written: dict[str, list[Row]] = {
        "documents": list(documents.values()),
        "passages": passages,
        "asked": list(asked(questions, set(documents))),
        "written": questions,
    }
    for name, file in WRITERS.items():
        texts = [
            row for _, row in read_jsonl(arguments.data / file) if row["document_id"] in documents
        ]
        written[name] = [
            *passages,
            *(corpus_row(documents[row["document_id"]], row["text"]) for row in texts),
        ]
    for name, kept in written.items():
        write_jsonl(arguments.target / f"{name}.jsonl", kept)
        print(
            f"{name:10} {len(kept):4} rows {sum(len(row.get('text', '').split()) for row in kept):7,} words"
        )


if __name__ == "__main__":
    main()
