"""Near-copies with a known truth: how many are found at which overlap, and how many documents are wrongly left out.

    python benchmarks/documents/duplicates.py                    # embedded text
    python benchmarks/documents/duplicates.py --text FOLDER      # paragraphs of the .jsonl and .txt files of a folder
    python benchmarks/documents/duplicates.py --text FOLDER --lengths 60 400 --pairs 500

For each length and way of changing, documents of so many words are written with one copy each, of which a known fraction of
the words is other: single words anywhere replaced, a part in a row replaced, or a part at the end left out. Each set runs
through the collecting run as it ships. `found` are the copies that are left out, of those whose original is kept: sentences
are drawn, so that some documents are copies of others by chance. `wrongly left out` counts the documents that share less than
85% of their words, by plain counting, with the one that is kept for them.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from heap import paragraphs_of

from kinject.corpus.documents.collect import collect
from kinject.recipe import DocumentsSection

OVERLAPS = (0.97, 0.93, 0.9, 0.8, 0.7, 0.5)
WAYS = ("words", "part", "cut")


def documents_of(text: Path | None, length: int, rng: random.Random) -> Iterator[list[str]]:
    """Yield documents of `length` words without end, from different sentences."""
    words: list[str] = []
    for paragraph in paragraphs_of(text, rng):
        words += paragraph.split()
        if len(words) >= length:
            yield words[:length]
            words = []


def changed(words: list[str], other: list[str], overlap: float, kind: str, rng: random.Random) -> list[str]:
    """Return `words` with so large a part in common: the rest is of `other`, a document of words that are numbered."""
    n = len(words) - round(overlap * len(words))
    if kind == "cut":
        return words[: len(words) - n]
    if kind == "part":
        start = rng.randrange(len(words) - n + 1)
        return [*words[:start], *other[:n], *words[start + n :]]
    indices = set(rng.sample(range(len(words)), n))
    return [other[i] if i in indices else word for i, word in enumerate(words)]


def main() -> int:
    """Measure each way of changing at each length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="folder with .jsonl or .txt files of real text")
    parser.add_argument("--lengths", nargs="+", type=int, default=[60, 200, 1000], help="words of a document")
    parser.add_argument("--pairs", type=int, default=500, help="pairs of each overlap")
    arguments = parser.parse_args()
    print(f"| words | changed | {' | '.join(f'found at {overlap:.0%}' for overlap in OVERLAPS)} | wrongly left out |")
    print(f"|---:|---|{'---:|' * (len(OVERLAPS) + 1)}")
    n_wrong = n_all = 0
    for length in arguments.lengths:
        for kind in WAYS:
            rng = random.Random(f"{length} {kind}")
            pool = islice(documents_of(arguments.text, length, rng), arguments.pairs * len(OVERLAPS))
            rows = []
            for number, words in enumerate(pool):
                overlap = OVERLAPS[number % len(OVERLAPS)]
                other = [f"{word}{rng.randrange(1000)}" for word in reversed(words)]
                copy = changed(words, other, overlap, kind, rng)
                rows += [(f"{number} original", words), (f"{number} {overlap} copy", copy)]
            n_found, n_pairs, wrong = left_out(rows)
            n_wrong, n_all = n_wrong + wrong, n_all + len(rows)
            fractions = " | ".join(f"{n_found[overlap] / n_pairs[overlap]:.1%}" for overlap in OVERLAPS)
            print(f"| {length:,} | {kind} | {fractions} | {wrong} of {len(rows):,} |", flush=True)
    print(f"\nwrongly left out: {n_wrong} of {n_all:,} documents ({n_wrong / n_all:.2%})")
    return 0


def left_out(rows: list[tuple[str, list[str]]]) -> tuple[Counter[float], Counter[float], int]:
    """Return how many copies of each overlap are left out, of how many whose original is kept, and what is left out wrongly."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        lines = (json.dumps({"id": name, "text": " ".join(words)}) for name, words in rows)
        (folder / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        section = DocumentsSection(cache_dir=str(folder / "cache"), boilerplate=None, processes=1)
        result = collect([folder / "rows.jsonl"], section, folder / "run")
        kept = {json.loads(line)["id"] for line in result.documents_path.read_text("utf-8").splitlines()}
        listed = (folder / "run/duplicates.jsonl").read_text("utf-8").splitlines()
        copies = {row["dropped"]: row["kept"] for row in map(json.loads, listed)}
    n_found, n_pairs = Counter[float](), Counter[float]()
    n_wrong = 0
    for number, (name, words) in enumerate(rows, 1):
        if name not in kept:
            other = rows[int(copies[f"rows.jsonl:{number}"].rpartition(":")[2]) - 1][1]
            n_wrong += (Counter(words) & Counter(other)).total() < 0.85 * max(len(words), len(other)) - 1e-9
        if name.endswith("copy") and rows[number - 2][0] in kept:
            overlap = float(name.split()[1])
            n_pairs[overlap] += 1
            n_found[overlap] += name not in kept
    return n_found, n_pairs, n_wrong


if __name__ == "__main__":
    sys.exit(main())
