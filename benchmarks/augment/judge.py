"""A judge on texts with planted errors of relation, and on correct ones: rules alone, the judge alone, both together.

    python benchmarks/augment/judge.py make OUT [--data DATA] [--passages LANGUAGE=FILE ...] [--rewritings FOLDER]
    python benchmarks/augment/judge.py score OUT ANSWERS

`make` writes OUT/prompts.jsonl (id and prompt, nothing that tells which text is wrong), OUT/key.jsonl, and prints what the
forms of the prompt cost. Answer the prompts with any model, or by hand, into rows of `id` and `answer`; `score` reads
them with the judge's own parser, and counts the texts without an answer apart.

DATA and FILE are as for faithfulness.py; without them the passages of passages.jsonl are
taken. Paraphrases by others are taken as correct where the rules accept them; all other texts are passages in which words
were replaced by others of the same meaning. FOLDER has the answers of a writer (documents.jsonl with id, language, text;
answers.jsonl with document_id, answer, faithful, complete) as a reader found them. No text is in the set twice.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from random import Random

from faithfulness import find_fault, read_pairs, read_passages
from planted_facts import LANGUAGES

from kinject.augment.checks.judge import RELATION_KINDS, plant_error, read_verdict, reword
from kinject.augment.prompts import judge_messages
from kinject.corpus.passages import word_spans
from kinject.disk import content_id, read_jsonl
from kinject.language.sentences import sentences

_TOKENS_PER_WORD = 1.35


def pool(arguments: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Return (language, passage, correct text), a passage once."""
    by_text: dict[str, tuple[str, str, str]] = {}
    if arguments.data:
        pairs, paragraphs = read_pairs(arguments.data)
        for source, text in pairs:
            if not find_fault(source, text):
                by_text.setdefault(source, ("en", source, text))
        for source, _ in paragraphs:
            by_text.setdefault(source, ("en", source, reword(source)))
    default = str(Path(__file__).with_name("passages.jsonl"))
    files = [entry.partition("=")[::2] for entry in arguments.passages]
    if arguments.rewritings:
        return read_rewritings(arguments.rewritings)
    for language, file in files or [(language, default) for language in LANGUAGES]:
        for source, _ in read_passages(Path(file), language):
            by_text.setdefault(source, (language, source, reword(source, language)))
    sizes = {
        source: len(word_spans(source)) * (0.6 if language in ("zh", "ja") else 1)
        for language, source, _ in by_text.values()
    }
    return [item for item in by_text.values() if 30 <= sizes[item[1]] <= arguments.words]


def read_rewritings(folder: Path) -> list[tuple[str, str, str]]:
    """Return (language, document, rewriting) of the rewritings that a reader found faithful and complete."""
    documents = {row["id"]: row for _, row in read_jsonl(folder / "documents.jsonl")}
    rows = [
        row
        for _, row in read_jsonl(folder / "answers.jsonl")
        if row["faithful"] and row["complete"]
    ]
    sources = [documents[row["document_id"]] for row in rows]
    return [
        (source["language"], source["text"], row["answer"])
        for source, row in zip(sources, rows, strict=True)
    ]


def choose(arguments: argparse.Namespace) -> list[dict[str, str]]:
    """Return rows of `kind` ("" for a correct text), language, passage and text; kinds and languages in turn."""
    rng, rows = Random(arguments.seed), list[dict[str, str]]()
    by_language: dict[str, list[tuple[str, str, str]]] = {}
    for item in pool(arguments):
        by_language.setdefault(item[0], []).append(item)
    for items in by_language.values():
        rng.shuffle(items)
    kinds = [kind for kind in RELATION_KINDS for _ in range(2)]
    turn = [language for language in by_language for _ in range(5 if language == "en" else 1)]
    for n in range(arguments.texts):
        kind = "" if n % 2 else kinds[n // 2 % len(kinds)]
        for language in (turn[(n + shift) % len(turn)] for shift in range(len(turn))):
            choice = next(
                (
                    (item, text)
                    for item in by_language[language]
                    if (text := plant_error(kind, item[2], rng, language) if kind else item[2])
                ),
                None,
            )
            if choice:
                item, text = choice
                by_language[language].remove(item)
                rows.append({"kind": kind, "language": language, "passage": item[1], "text": text})
                break
    rng.shuffle(rows)
    return rows


def make(arguments: argparse.Namespace) -> None:
    """Write the prompts and the key; print the tokens of the forms of the prompt."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = choose(arguments)
    with (
        (arguments.out / "prompts.jsonl").open("w") as prompts,
        (arguments.out / "key.jsonl").open("w") as key,
    ):
        for row in rows:
            name = content_id(row["passage"], row["text"])[:12]
            prompt = judge_messages("", row["passage"], row["text"])[-1]["content"]
            prompts.write(json.dumps({"id": name, "prompt": prompt}, ensure_ascii=False) + "\n")
            key.write(json.dumps({"id": name, **row}, ensure_ascii=False) + "\n")
    print(
        f"{len(rows)} texts, {sum(bool(row['kind']) for row in rows)} of them wrong: {arguments.out}/prompts.jsonl"
    )

    def tokens(texts: list[str]) -> float:
        return sum(len(word_spans(text)) for text in texts) * _TOKENS_PER_WORD / len(rows)

    plain = tokens(
        [
            message["content"]
            for row in rows
            for message in judge_messages("", row["passage"], row["text"])
        ]
    )
    lines = tokens(
        ["".join(f"[{n}] OK " for n, _ in enumerate(sentences(row["text"]))) for row in rows]
    )
    print(
        f"tokens of a verdict, in and out: one word {plain:.0f} + 2; a line for each sentence {plain:.0f} + {lines + 2:.0f}"
    )


def score(arguments: argparse.Namespace) -> None:
    """Print what rules and judge caught, by kind and together, and the correct texts that they refused."""
    key = {row["id"]: row for _, row in read_jsonl(arguments.out / "key.jsonl")}
    answers = {row["id"]: row["answer"] for _, row in read_jsonl(arguments.answers)}
    planted, caught, unclear = (
        Counter[str](),
        {name: Counter[str]() for name in ("rules", "judge", "both")},
        0,
    )
    answered = [(name, row) for name, row in key.items() if name in answers]
    if not answered:
        raise SystemExit(
            f"{arguments.answers} answers none of the {len(key)} prompts of {arguments.out}."
        )
    if len(answered) < len(key):
        print(f"{len(key) - len(answered)} of {len(key)} texts have no answer and are left out")
    for name, row in answered:
        verdict = read_verdict(answers[name])
        unclear += verdict.detail == "it gave no verdict"
        by_judge = not verdict.accepted
        by_rules = bool(find_fault(row["passage"], row["text"]))
        planted[row["kind"]] += 1
        for judge_name, refused in (
            ("rules", by_rules),
            ("judge", by_judge),
            ("both", by_rules or by_judge),
        ):
            caught[judge_name][row["kind"]] += refused
        if by_judge != bool(row["kind"]):
            print(
                f"  {name} {row['language']} {row['kind'] or 'correct'}: {'refused' if by_judge else 'accepted'}"
            )
    n_good = planted.pop("", 0)
    n_wrong = sum(planted.values())
    for judge_name, counts in caught.items():
        false = counts.pop("", 0)
        kinds = ", ".join(f"{kind} {counts[kind]}/{n}" for kind, n in sorted(planted.items()))
        print(
            f"{judge_name:6} caught {sum(counts.values())} of {n_wrong} ({kinds}); refused {false} of {n_good} correct texts"
        )
    print(f"answers without a clear verdict: {unclear}")


def main() -> None:
    """Make the prompts, or score the answers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    making = commands.add_parser("make")
    making.add_argument("out", type=Path)
    making.add_argument("--data", type=Path)
    making.add_argument("--passages", action="append", default=[], metavar="LANGUAGE=FILE")
    making.add_argument(
        "--rewritings",
        type=Path,
        help="folder of documents.jsonl and answers.jsonl of a writer, instead",
    )
    making.add_argument("--texts", type=int, default=60)
    making.add_argument("--words", type=int, default=110, help="longest passage")
    making.add_argument("--seed", type=int, default=0)
    making.set_defaults(run=make)
    scoring = commands.add_parser("score")
    scoring.add_argument("out", type=Path)
    scoring.add_argument("answers", type=Path)
    scoring.set_defaults(run=score)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
