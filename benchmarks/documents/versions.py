"""Two versions of a document that differ in one fact: are both kept, or at least the newest?

    python benchmarks/documents/versions.py [FOLDER ...]      default: ../shared/data and /usr/share/doc

Of each text one number, date or name is changed in place, to one that the text holds elsewhere where it has one. The copy
has a later date, in its name, inside, or by its time of change; an odd pair has it on the file that sorts first.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import sys
import tempfile
from pathlib import Path

from kinject.heap import read_documents
from kinject.heap.collect import collect

N_PAIRS = 200
FACTS = {
    "number": re.compile(r"(?<![\w.,/:-])\d{1,5}(?![\w/:-]|[.,]\d)"),
    "year": re.compile(r"\b(?:19|20)\d\d\b"),
    "name": re.compile(r"(?<=[a-z,] )[A-Z][a-z]{3,}\b"),
}


def changed(text: str, rng: random.Random) -> tuple[str, str] | None:
    """Return the text with one fact changed, and the kind of the fact."""
    kinds = list(FACTS)
    rng.shuffle(kinds)
    for kind in kinds:
        matches = list(FACTS[kind].finditer(text))
        if not matches:
            continue
        match = rng.choice(matches)
        others = sorted({other[0] for other in matches} - {match[0]})
        new = (
            rng.choice(others)
            if others
            else {"name": "Lindqvist"}.get(kind, str(int(match[0]) + 2) if kind != "name" else "")
        )
        return text[: match.start()] + new + text[match.end() :], kind
    return None


def texts(folders: list[Path], rng: random.Random) -> list[str]:
    """Return texts of 60 to 3,000 words of the folders' files."""
    found = []
    for folder in folders:
        names = ("*.jsonl", "*.txt", "*.md", "README*")
        paths = sorted(
            {
                path
                for name in names
                for path in folder.rglob(name)
                if path.is_file() and path.stat().st_size < 4e6
            }
        )
        rng.shuffle(paths)
        for path in paths[:400]:
            try:
                found += [document.text for document in read_documents(path)][:60]
            except Exception:  # noqa: BLE001, S112 (a file that is no document)
                continue
    return [text for text in dict.fromkeys(found) if 60 <= len(text.split()) <= 3_000]


def main() -> None:
    """Write the pairs, collect them, and print how many are kept."""
    rng = random.Random(7)
    folders = [Path(word) for word in sys.argv[1:]] or [
        Path("../shared/data"),
        Path("/usr/share/doc"),
    ]
    sources = texts(folders, rng)
    rng.shuffle(sources)
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        heap = Path("heap")
        heap.mkdir()
        kinds, pairs = {}, []
        for text in sources:
            pair = changed(text, rng)
            if pair is None or len(pairs) == N_PAIRS:
                continue
            number, way = len(pairs), len(pairs) % 3
            old_year, new_year = (2025, 2026) if way == 0 else (0, 0)
            stem = f"d{number:03d}"
            old = heap / (
                f"{stem}-{old_year}.txt" if way == 0 else f"{stem}-{'b' if number % 2 else 'a'}.txt"
            )
            new = heap / (
                f"{stem}-{new_year}.txt" if way == 0 else f"{stem}-{'a' if number % 2 else 'b'}.txt"
            )
            if way == 1:
                old, new = old.with_suffix(".md"), new.with_suffix(".md")
            for path, content, date in ((old, text, "2024-03-01"), (new, pair[0], "2025-03-01")):
                path.write_text(f"---\ndate: {date}\n---\n{content}" if way == 1 else content)
            os.utime(old, (1.6e9, 1.6e9)), os.utime(new, (1.7e9, 1.7e9))
            kinds[number] = pair[1]
            pairs.append((old.name, new.name))
        result = collect([heap])
        kept = {row["file"] for row in result.files() if row["documents"]}
        n_new, n_both = (
            sum(new in kept for _, new in pairs),
            sum(old in kept and new in kept for old, new in pairs),
        )
        print(
            f"{len(pairs)} pairs: the newest kept {n_new}, both kept {n_both}; {result.counts['duplicates']}"
        )
        for number, (old, new) in enumerate(pairs):
            if not (old in kept and new in kept):
                print(f"  {kinds[number]}: {old} {old in kept}, {new} {new in kept}")


if __name__ == "__main__":
    main()
