"""What the choices of every question set give away to who knows only which strings the documents hold.

    python benchmarks/eval/shortcuts.py

measures the sets of this checkout; the sandbox's where `kinject recipes copy sandbox studies` has written them, and the
real data's where docs/real-data.md has put them (runs/natural, runs/seal, runs/facts). A set that is not there is left
out by name. Each column but the first four is an accuracy; fair sets have that of guessing in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kinject.corpus.choices import measure_shortcuts
from kinject.corpus.questions import read_questions
from kinject.disk import read_jsonl


@dataclass(frozen=True)
class Source:
    """Question sets that are asked about the same documents."""

    name: str
    documents: tuple[str, ...]
    folder: str
    sets: tuple[str, ...]


SOURCES = (
    Source("company", ("data/company/documents.jsonl",), "eval/company", ("words", "reworded", "inferred", "combined")),
    Source(
        "handbook", ("data/handbook/documents.jsonl",), "eval/handbook",
        ("reworded", "reversed", "outdated"),
    ),
    Source(
        "sandbox", ("data/sandbox/documents.jsonl", "data/sandbox/known_documents.jsonl"), "eval/sandbox",
        ("new", "known", "reverse", "inferred", "inferred_known", "first", "second", "third"),
    ),
    Source(
        "fictional", ("runs/natural/documents.jsonl",), "runs/natural",
        ("memorised", "reworded", "inferred", "statements"),
    ),
    Source("SEAL", ("runs/seal/documents.jsonl",), "runs/seal", ("asked",)),
    Source("facts", ("runs/facts/documents.jsonl",), "runs/facts", ("facts", "asked")),
)  # fmt: skip
HEAD = (
    "set",
    "questions",
    "right stand",
    "wrong stand",
    "picker",
    "most frequent",
    "longest",
    "shortest",
    "guessing",
)


def rows_of(source: Source) -> list[tuple[str, ...]]:
    """Return a row of the table for each set of `source` that is there, and print the names of the others."""
    needed = [Path(path) for path in source.documents]
    paths = {name: Path(source.folder, f"{name}.jsonl") for name in source.sets}
    missing = [str(path) for path in [*needed, *paths.values()] if not path.exists()]
    if missing:
        print(f"{source.name}: left out, not there: {', '.join(missing)}")
        return []
    texts = [
        f"{row.get('title', '')} {row['text']}" for path in needed for _, row in read_jsonl(path)
    ]
    sets = {name: list(read_questions(path)) for name, path in paths.items()}
    rows = []
    for found in measure_shortcuts(sets, texts):
        shares = (
            found.right_known, found.wrong_known, found.picker, found.most_frequent, found.longest, found.shortest,
            found.guessing,
        )  # fmt: skip
        rows.append(
            (
                f"{source.name} {found.question_set}",
                str(found.n),
                *(f"{100 * share:.0f}" for share in shares),
            )
        )
    return rows


def main() -> None:
    """Print one table, in percent."""
    table = [HEAD]
    for source in SOURCES:
        table += rows_of(source)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)))


if __name__ == "__main__":
    main()
