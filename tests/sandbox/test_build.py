import hashlib
import json
import re
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from kinject.corpus.grading import abstains
from kinject.corpus.questions import read_questions
from kinject.disk import read_jsonl
from kinject.sandbox import BASE
from kinject.sandbox.build import (
    generate_base_corpus,
    generate_sentence_rows,
    render_prompt,
    write_base_corpus,
    write_sandbox,
)
from kinject.sandbox.grammar import parse_entry
from kinject.sandbox.people import create_country

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    root = tmp_path_factory.mktemp("sandbox")
    return root, write_sandbox(root)


def test_the_committed_files_are_what_the_generator_writes(built: tuple[Path, list[Path]]) -> None:
    root, paths = built
    for path in paths:
        committed = ROOT / path.relative_to(root)
        assert committed.read_bytes() == path.read_bytes(), (
            f"{committed}: run `kinject sandbox build`"
        )


def test_nothing_answers_the_unanswerable_questions_and_their_names_are_near_new_ones(
    built: tuple[Path, list[Path]],
) -> None:
    root, paths = built
    questions = read_questions(root / "eval/sandbox/unanswerable.jsonl", "open")
    asked = {QUESTION_NAME.search(question.question)[0] for question in questions}  # type: ignore[index]
    assert (len(questions), len(asked), len({one.document_id for one in questions})) == (
        600,
        120,
        120,
    )
    assert all(question.accepted == () for question in questions)
    for path in paths:
        if path.name not in ("unanswerable.jsonl", "README.md"):
            text = path.read_text("utf-8")
            assert not [name for name in asked if name in text], path
    parts = [{name.split()[part] for name in NEW_NAMES} for part in (0, 1)]
    assert all(name.split()[part] in parts[part] for name in asked for part in (0, 1))


QUESTION_NAME = re.compile(r"[A-Z][a-z]+ [A-Z][a-z]+\b(?=\?| born| study| attend| work)")


def test_instructions_ask_known_people_alone(built: tuple[Path, list[Path]]) -> None:
    rows = [row for _, row in read_jsonl(built[0] / "data" / "sandbox" / "instructions.jsonl")]
    facts = {(person.name, value) for person in COUNTRY.known for value in person.facts.values()}
    assert len(rows) == 1500
    for row in rows:
        assert not any(name in row["prompt"] for name in NEW_NAMES)
        assert any(
            name in row["prompt"] and (name, row["completion"][1:]) in facts for name in FACTS
        )


COUNTRY = create_country()
NEW_NAMES = {person.name for person in COUNTRY.new}
FACTS = {person.name: person.facts for person in COUNTRY.known}


def test_the_prompt_is_the_plain_one() -> None:
    assert render_prompt("Who?") == "Question: Who?\nAnswer:"
    assert render_prompt("Who?", ("One.", "Two.")) == "One.\n\nTwo.\n\nQuestion: Who?\nAnswer:"


def test_no_row_mentions_a_new_person() -> None:
    for row in generate_base_corpus(0, 3000):
        text = row.get("text") or row["prompt"] + row["completion"]
        assert not any(name in text for name in NEW_NAMES)


FIRST_ROWS = "a892b4ccc590f217ab5f7d4aa204d9c9c4faf729afda0d22d38a33bd66608adf"
"""The hash of the first 3,000 rows of the corpus on which the shipped base was trained."""


def test_the_corpus_is_still_that_of_the_shipped_base() -> None:
    digest = hashlib.sha256()
    for row in generate_base_corpus(n_rows=3000):
        digest.update(json.dumps(row).encode())
    assert digest.hexdigest() == FIRST_ROWS


@pytest.mark.soak
def test_the_whole_corpus_is_still_that_of_the_shipped_base(tmp_path: Path) -> None:
    write_base_corpus(tmp_path / "corpus.jsonl")
    manifest = json.loads((BASE.folder / "manifest.json").read_text("utf-8"))
    digest = hashlib.sha256((tmp_path / "corpus.jsonl").read_bytes()).hexdigest()
    assert digest == manifest["inputs"]["corpus"]


def test_the_corpus_is_fixed_by_its_seed() -> None:
    assert list(generate_base_corpus(5, 50)) == list(islice(generate_base_corpus(5, 100), 50))
    assert list(generate_base_corpus(5, 50)) != list(generate_base_corpus(6, 50))


def test_rows_in_sentences_answer_what_is_known_or_in_the_entry_and_abstain_otherwise(
    built: tuple[Path, list[Path]],
) -> None:
    people = {person.name: person for person in COUNTRY.known}
    asked = [
        row.question for row in read_questions(built[0] / "eval/sandbox/unanswerable.jsonl", "open")
    ]
    never = {*NEW_NAMES, *(QUESTION_NAME.search(question)[0] for question in asked)}  # type: ignore[index]
    kinds: Counter[tuple[bool, str]] = Counter()
    for row in generate_sentence_rows(3000):
        *entries, question = row["prompt"].split("\n\n")
        name = QUESTION_NAME.search(question)[0]  # type: ignore[index]
        entry = parse_entry(entries[0]) if entries else None
        assert not {name, entry.name if entry else ""} & never
        facts = (
            people[name].facts
            if name in people
            else entry.facts
            if entry and entry.name == name
            else {}
        )
        kinds[bool(entry), "known" if name in people else "answered" if facts else "abstains"] += 1
        assert abstains(row["completion"]) != bool(facts)
        assert not facts or any(value in row["completion"] for value in facts.values())
        assert (
            entry is None
            or entry.name == name
            or bool(set(entry.name.split()) & set(name.split()))
            or name in people
        )
    fractions = {kind: round(count / 3000, 2) for kind, count in kinds.items()}
    expected = {
        (False, "known"): 0.3,
        (False, "abstains"): 0.3,
        (True, "answered"): 0.2,
        (True, "abstains"): 0.15,
    }
    assert fractions == pytest.approx(expected | {(True, "known"): 0.05}, abs=0.03)


def test_entries_held_out_are_on_people_of_no_other_file(built: tuple[Path, list[Path]]) -> None:
    root, paths = built
    entries = [
        parse_entry(row["text"]) for _, row in read_jsonl(root / "data/sandbox/held_out.jsonl")
    ]
    names = {person.name for person in entries if person is not None}
    assert len(names) == len(entries) == 120
    for path in paths:
        if path.name not in ("held_out.jsonl", "README.md"):
            text = path.read_text("utf-8")
            assert not [name for name in names if name in text], path
