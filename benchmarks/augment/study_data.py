"""The data of recipes/studies/natural-facts.yaml: a writer's texts, kept by four rules; probes that know the planted errors.

    python benchmarks/augment/study_data.py ../shared/data/seal runs/facts [--documents 16] [--answers 2]

DATA holds documents.jsonl, questions.jsonl and qwen7b_rewrites.jsonl (SEAL's). Into TARGET go

    documents.jsonl    the passages
    old.jsonl          answers that the rule of commit 3cd59ddb would keep: as they come, of the passage's length, no fact lost
    new.jsonl          the texts that the checks accept, repaired
    unchecked.jsonl    every answer as it comes
    planted.jsonl      every answer, with an error planted in each paragraph that has room for one: a number, a date or a name
    facts.jsonl        probes: a sentence of the passage up to a fact; choices: the fact, what was planted for it, two others
    asked.jsonl        SEAL's questions with four choices: the answers of other questions on the same passage

All four corpora come from the same answers: the writer's tokens are equal. An epoch of each is equal in these, and a number
of steps is equal in the tokens that the model reads.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from planted_facts import find_names, plant_error

from kinject.augment.checks.additions import find_addition, find_missing, source_facts
from kinject.augment.checks.checker import Checker
from kinject.augment.styles import STYLES
from kinject.disk import content_id, read_jsonl, write_jsonl
from kinject.language.sentences import sentences

STYLE = STYLES["paraphrase"]
KINDS = ("number", "date", "name")
SHORTEST, LONGEST = 0.35, 2.5
"""Words of a text for each word of its passage that the old rule allowed."""
Row = dict[str, Any]


def kept_by_old_rule(document: Row, answer: str) -> list[str]:
    """Return the answer if the rule of commit 3cd59ddb would keep it."""
    facts = source_facts(document["text"], document["title"])
    ratio = len(answer.split()) / len(document["text"].split())
    wrapped = STYLE.read(answer, document["title"], document["text"]).repairs
    fault = find_addition(facts, answer) or find_missing(facts, answer)
    return [] if wrapped or fault or not SHORTEST <= ratio <= LONGEST else [answer]


def kept_by_new_rule(document: Row, answer: str, checker: Checker) -> list[str]:
    """Return the texts of an answer that the checks accept."""
    kept = []
    for text in STYLE.read(answer, document["title"], document["text"]).texts:
        text, _ = checker.without_additions(text)
        if checker.check(text).accepted:
            checker.accept(text)
            kept.append(text)
    return kept


def with_errors(answer: str, names: list[str], rng: Random) -> tuple[str, str, str]:
    """Return an answer with an error, the words that were changed, and those in their place; ("", "") without room."""
    for kind in rng.sample(KINDS, len(KINDS)):
        wrong = plant_error(kind, answer, rng, [name for name in names if name not in answer])
        if wrong is not None:
            before, after = answer.split(), wrong.split()
            if len(before) == len(after):
                changed = [
                    index
                    for index, pair in enumerate(zip(before, after, strict=True))
                    if pair[0] != pair[1]
                ]
                if len(changed) == 1:
                    return (
                        wrong,
                        before[changed[0]].strip(".,;:\"'()"),
                        after[changed[0]].strip(".,;:\"'()"),
                    )
    return answer, "", ""


def probe(document: Row, right: str, wrong: str, others: list[str], rng: Random) -> Row | None:
    """Return a question on the sentence of the passage that has the fact `right`, with the planted one as a choice."""
    for sentence in sentences(document["text"]):
        start = sentence.find(right)
        if start > 20 and wrong not in document["text"]:
            same = [
                other
                for other in others
                if other[:1].isdigit() == right[:1].isdigit() and other not in (right, wrong)
            ]
            if len(same) < 2:
                return None
            choices = [right, wrong, *rng.sample(sorted(set(same)), 2)]
            if len(set(choices)) < 4:
                return None
            rng.shuffle(choices)
            return {
                "id": content_id("facts", document["id"], right), "question": f"{sentence[:start].strip()} ...",
                "choices": choices, "answer": choices.index(right), "document_id": document["id"],
            }  # fmt: skip
    return None


def asked(questions: list[Row], documents: set[str]) -> Iterator[Row]:
    """Yield the questions with short answers as questions with four choices, others' answers on the same passage first."""
    rng = Random(0)
    chosen = [row for row in questions if row["document_id"] in documents]
    for row in chosen:
        right = row["answers"][0]
        own = [
            other["answers"][0] for other in chosen if other["document_id"] == row["document_id"]
        ]
        every = [other["answers"][0] for other in chosen]
        wrong = [
            text
            for text in dict.fromkeys([*own, *rng.sample(every, len(every))])
            if text not in row["answers"]
        ][:3]
        choices = [right, *wrong]
        rng.shuffle(choices)
        yield {
            **{key: row[key] for key in ("id", "question", "document_id")},
            "choices": choices,
            "answer": choices.index(right),
        }


def corpus_row(document: Row, text: str) -> Row:
    """Return a row of a corpus."""
    return {
        "id": content_id("corpus", document["id"], text),
        "document_id": document["id"],
        "text": text,
    }


def main() -> None:
    """Write the files and print the number of rows of each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument(
        "--answers", type=int, default=2, help="of each document; each has several paraphrases"
    )
    arguments = parser.parse_args()
    rows = [row for _, row in read_jsonl(arguments.data / "documents.jsonl")][: arguments.documents]
    answers: dict[str, list[str]] = {row["id"]: [] for row in rows}
    for _, row in read_jsonl(arguments.data / "qwen7b_rewrites.jsonl"):
        if (
            len(kept := answers.get(row["document_id"], [""] * arguments.answers))
            < arguments.answers
        ):
            kept.append(row["text"])
    names = [name for row in rows for name in find_names(row["text"])]
    rng = Random(0)
    written: dict[str, list[Row]] = {
        name: [] for name in ("old", "new", "unchecked", "planted", "facts")
    }
    planted: list[tuple[Row, str, str]] = []
    for document in rows:
        checker = Checker(document["text"], STYLE.rules, STYLE.literals, document["title"])
        for answer in answers[document["id"]]:
            paragraphs = [with_errors(paragraph, names, rng) for paragraph in answer.split("\n")]
            planted += [(document, before, after) for _, before, after in paragraphs if before]
            wrong = "\n".join(paragraph for paragraph, _, _ in paragraphs)
            kept = {
                "old": kept_by_old_rule(document, answer), "new": kept_by_new_rule(document, answer, checker),
                "unchecked": [answer], "planted": [wrong],
            }  # fmt: skip
            for name, texts in kept.items():
                written[name] += [corpus_row(document, text) for text in texts]
    facts = [right for _, right, _ in planted]
    probes = (probe(document, right, wrong, facts, rng) for document, right, wrong in planted)
    written["facts"] = list({row["id"]: row for row in probes if row}.values())
    written["documents"] = rows
    written["asked"] = list(
        asked([row for _, row in read_jsonl(arguments.data / "questions.jsonl")], set(answers))
    )
    for name in ("old", "new", "unchecked", "planted"):
        written[name] += [corpus_row(document, document["text"]) for document in rows]
    for name, content in written.items():
        words = sum(len(row.get("text", "").split()) for row in content)
        path = arguments.target / f"{name}.jsonl"
        print(
            f"{path}: {write_jsonl(path, content)} rows" + (f", {words:,} words" if words else "")
        )
    print(json.dumps({"planted": len(planted)}))


if __name__ == "__main__":
    main()
