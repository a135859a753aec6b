"""Planted errors and paraphrases by others against the faithfulness checks.

    python benchmarks/augment/faithfulness.py [DATA] [--passages LANGUAGE=FILE ...] [--errors 1000] [--missed 1]

DATA holds fictional/fictional_knowledge_paraphrased.json and squad/squad2_dev_half_paragraphs.jsonl. A FILE of `--passages`
is JSON as of SQuAD (XQuAD, FQuAD, JSQuAD) or JSONL with `text`; without it the passages of passages.jsonl, in six
languages, are taken. Errors are planted in paraphrases that the checks accept and in the passages themselves, so that
nothing but the planted error differs; only the faithfulness checks run (no echo, duplicate or length check). Each planted
text counts once. `--missed` errors of each kind are printed.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from pathlib import Path
from random import Random

from planted_facts import ALL_KINDS, LANGUAGES, find_names, plant_error

from kinject.augment.checks.additions import find_addition, source_facts

_SMALL = re.compile(r"\b[^\W\d_A-Z]+\b")
_GERMAN_NOUN = re.compile(
    r"(?i:\b(?:d(?:er|ie|as|en|em|es)|(?:k?ein|[ms]ein|ihr|dies|jed|all)(?:e[rnms]?)?|zu[rm]|i[mn]s?|vom|am|beim|und|oder|"
    r"als|für|\w+(?:e|en|er|es|em)))\s([A-ZÄÖÜ]\w+)"
)
Pair = tuple[str, str]
"""A source and a faithful text."""


def read_pairs(data: Path) -> tuple[list[Pair], list[Pair]]:
    """Return (source, paraphrase) of the fictional texts, and (paragraph, paragraph)."""
    fictional = json.loads((data / "fictional/fictional_knowledge_paraphrased.json").read_text())
    pairs = [
        (entry["train_context"], text)
        for entry in fictional
        for text in entry.get("paraphrases", [])
    ]
    lines = (data / "squad/squad2_dev_half_paragraphs.jsonl").read_text().splitlines()
    paragraphs = [json.loads(line)["text"] for line in lines]
    return pairs, [(text, text) for text in paragraphs]


def read_passages(path: Path, language: str = "") -> list[Pair]:
    """Return (passage, passage) of a file: SQuAD's JSON, or JSONL, there of one `language` where rows name it."""
    text = path.read_text("utf-8")
    if path.suffix == ".json":
        articles = json.loads(text)["data"]
        passages = [
            paragraph["context"] for article in articles for paragraph in article["paragraphs"]
        ]
        passages = [
            passage.rpartition("[SEP]")[2].strip() for passage in passages
        ]  # JSQuAD puts the title before it
    else:
        rows = map(json.loads, text.splitlines())
        passages = [row["text"] for row in rows if row.get("language", language) == language]
    return [(passage, passage) for passage in dict.fromkeys(passages)]


def find_fault(source: str, text: str) -> str:
    """Return the reason for which the rules refuse `text`, "" if they do not."""
    addition = find_addition(source_facts(source), text)
    return addition.reason if addition else ""


def real_names(base: list[Pair], language: str) -> list[str]:
    """Return the names of the passages that no passage has in small letters or, in German, behind an article."""
    texts = [source for source, _ in base]
    names = {name for text in texts for name in find_names(text, language)}
    words = {word for text in texts for word in _SMALL.findall(text)}
    nouns = (
        {match[1] for text in texts for match in _GERMAN_NOUN.finditer(text)}
        if language == "de"
        else set()
    )
    return sorted(name for name in names if name.lower() not in words and name not in nouns)


def plant(kind: str, base: list[Pair], language: str, n: int) -> list[tuple[str, str, str]]:
    """Return up to `n` different (source, text, text with an error)."""
    names = real_names(base, language)
    rng, planted, left = (
        Random(f"{kind} {language}"),
        dict[tuple[str, str, str], None](),
        list(base),
    )
    for _ in range(len(base) + 3 * n):
        if not left or len(planted) == n:
            break
        index = rng.randrange(len(left))
        source, text = left[index]
        others = [name for name in rng.sample(names, min(len(names), 20)) if name not in source]
        wrong = plant_error(kind, text, rng, others, language)
        if wrong is None:
            left.pop(index)
        else:
            planted[source, text, wrong] = None
    return list(planted)


def print_caught(label: str, base: list[Pair], language: str, n: int, n_missed: int) -> None:
    """Print for each kind of error the fraction that the checks refuse."""
    for kind in ALL_KINDS:
        planted = plant(kind, base, language, n)
        if not planted:
            print(f"{kind:11} {label:10} no room")
            continue
        missed = [(text, wrong) for source, text, wrong in planted if not find_fault(source, wrong)]
        print(
            f"{kind:11} {label:10} {1 - len(missed) / len(planted):7.1%} refused, of {len(planted)}"
        )
        for text, wrong in missed[:n_missed]:
            index = next(
                (i for i, (a, b) in enumerate(zip(text, wrong, strict=False)) if a != b), len(text)
            )
            print(
                f"        missed: ...{text[max(0, index - 40) : index + 40]!r} -> ...{wrong[max(0, index - 10) : index + 40]!r}"
            )


def print_data(data: Path, n: int, n_missed: int) -> None:
    """Print acceptance, detection by kind of error, and speed on the English data."""
    pairs, paragraphs = read_pairs(data)
    verdicts = [find_fault(source, text) for source, text in pairs]
    print(
        f"paraphrases by others: {verdicts.count('')} of {len(pairs)} accepted; refused {dict(Counter(filter(None, verdicts)))}"
    )
    accepted = [pair for pair, verdict in zip(pairs, verdicts, strict=True) if not verdict]
    print_caught("fictional", accepted, "en", n, n_missed)
    print_caught("squad", paragraphs, "en", n, n_missed)
    began = time.process_time()
    for source, text in pairs:
        find_fault(source, text)
    seconds = time.process_time() - began
    n_words = sum(len(text.split()) for _, text in pairs)
    print(f"speed: {n_words / 250 / seconds:.0f} variants of 250 words a second and core")


def main() -> None:
    """Print acceptance, detection by kind of error and language, and speed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--passages", action="append", default=[], metavar="LANGUAGE=FILE")
    parser.add_argument(
        "--errors", type=int, default=1000, help="planted errors of each kind and language"
    )
    parser.add_argument(
        "--missed", type=int, default=1, help="missed errors to print, of each kind and source"
    )
    arguments = parser.parse_args()
    if arguments.data:
        print_data(arguments.data, arguments.errors // 2, arguments.missed)
    default = Path(__file__).with_name("passages.jsonl")
    files = [entry.partition("=")[::2] for entry in arguments.passages] or [
        (name, str(default)) for name in LANGUAGES
    ]
    for language, file in files:
        print_caught(
            language,
            read_passages(Path(file), language),
            language,
            arguments.errors // 2,
            arguments.missed,
        )


if __name__ == "__main__":
    main()
