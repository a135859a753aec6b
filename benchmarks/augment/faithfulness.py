"""Planted errors and paraphrases by others against the faithfulness checks.

    python benchmarks/augment/faithfulness.py DATA [--errors 1000] [--missed 1]

DATA holds fictional/fictional_knowledge_paraphrased.json and squad/squad2_dev_half_paragraphs.jsonl. Errors are planted
in paraphrases that the checks accept and in the paragraphs themselves, so that nothing but the planted error differs;
only the faithfulness checks run (no echo, duplicate or length check). `--missed` errors of each kind are printed.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from pathlib import Path
from random import Random

from kinject.augment.checks.facts import compare_facts
from kinject.augment.checks.planted_errors import PLANTS


def read_pairs(data: Path) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return (source, paraphrase) of the fictional texts, and (paragraph, paragraph)."""
    fictional = json.loads((data / "fictional/fictional_knowledge_paraphrased.json").read_text())
    pairs = [(entry["train_context"], text) for entry in fictional for text in entry.get("paraphrases", [])]
    lines = (data / "squad/squad2_dev_half_paragraphs.jsonl").read_text().splitlines()
    paragraphs = [json.loads(line)["text"] for line in lines]
    return pairs, [(text, text) for text in paragraphs]


def main() -> None:
    """Print acceptance, detection by kind of error, and speed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--errors", type=int, default=1000, help="planted errors of each kind")
    parser.add_argument("--missed", type=int, default=1, help="missed errors to print, of each kind and source")
    arguments = parser.parse_args()
    pairs, paragraphs = read_pairs(arguments.data)
    verdicts = [compare_facts(source, text)[0] for source, text in pairs]
    print(
        f"paraphrases by others: {verdicts.count('')} of {len(pairs)} accepted; refused {dict(Counter(filter(None, verdicts)))}"
    )
    accepted = [pair for pair, verdict in zip(pairs, verdicts, strict=True) if not verdict]
    names = sorted({name for source, _ in paragraphs for name in re.findall(r"(?<=[a-z] )[A-Z][a-z]{3,}", source)})
    for kind, plant in PLANTS.items():
        for label, base in (("fictional", accepted), ("squad", paragraphs)):
            rng, caught, missed = Random(kind + label), 0, []
            n = n_tries = 0
            while n < arguments.errors // 2:
                n_tries += 1
                if n_tries > 100 * arguments.errors:
                    raise SystemExit(f"{label}: too few texts in {arguments.data} hold a {kind} to change.")
                source, text = rng.choice(base)
                wrong = plant(text, rng, names)
                if wrong is None or wrong == text:
                    continue
                n += 1
                if compare_facts(source, wrong)[0]:
                    caught += 1
                else:
                    missed.append((text, wrong))
            print(f"{kind:7} {label:10} {caught / n:7.1%} of {n}")
            for text, wrong in missed[: arguments.missed]:
                at = next(i for i, (a, b) in enumerate(zip(text, wrong, strict=False)) if a != b)
                print(
                    f"        missed: ...{text[max(0, at - 40) : at + 40]!r} -> ...{wrong[max(0, at - 10) : at + 40]!r}"
                )
    began = time.process_time()
    for source, text in pairs:
        compare_facts(source, text)
    seconds = time.process_time() - began
    n_words = sum(len(text.split()) for _, text in pairs)
    print(f"speed: {n_words / 250 / seconds:.0f} variants of 250 words a second and core")


if __name__ == "__main__":
    main()
