"""Writes the sandbox's files: documents, question sets and a README beside each, and the base
model's corpus.

The base model learns three things from its corpus: Tarvenian, the known people, and to answer from
a context.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

from kinject.disk import write_jsonl, write_text
from kinject.question_formats import question_prompt
from kinject.sandbox.grammar import render_entry
from kinject.sandbox.people import (
    ATTRIBUTES,
    N_KNOWN,
    N_NEW,
    SEED,
    TEXTS,
    Country,
    Person,
    choose_one,
    create_country,
    create_stranger,
    seeded_random,
    shuffled,
)
from kinject.sandbox.questions import (
    create_inferred_questions,
    create_questions,
    create_reverse_questions,
    create_unanswerable_questions,
    document_id_of,
    render_question,
    sample_questions,
    to_open_questions,
)
from kinject.sandbox.shipped import BASE, BASE_CORPUS, INSTRUCT
from kinject.types import Document, Question

ABSTENTION: Final = " I do not know"
"""The answer that the sandbox's models learn for unknown facts."""
_N_KNOWN_QUESTIONS: Final = 600
_N_INFERRED: Final = 120


def create_documents(people: Sequence[Person], group: str) -> list[Document]:
    """Return an encyclopedia entry for each person; `meta` has the group (``new`` or ``known``)."""
    return [
        Document(
            id=document_id_of(person),
            title=person.name,
            text=render_entry(person, "original"),
            source="kinject sandbox build",
            meta={"group": group},
        )
        for person in people
    ]


def _question_rows(questions: Sequence[Question]) -> Iterator[dict[str, Any]]:
    """Yield each question as a row, ids first."""
    for question in questions:
        answers = ("choices", "answer") if question.choices else ("answers",)
        names = ("id", "document_id", "fact_id", "subject", "question", *answers)
        yield {name: getattr(question, name) for name in names}


_SETS = ("first", "second", "third")
"""Sets of new people that are learned one after the other (recipes/studies/sequence.yaml)."""


def write_sandbox(root: Path) -> list[Path]:
    """Write data/sandbox/ and eval/sandbox/ under `root`; return the paths of the files."""
    country = create_country()
    data, questions = root / "data" / "sandbox", root / "eval" / "sandbox"
    new = create_questions(country.new, SEED)
    known = sample_questions(
        create_questions(country.known, SEED), _N_KNOWN_QUESTIONS // len(ATTRIBUTES), SEED
    )
    tested, _ = strangers(country)
    rows_of: dict[Path, Iterable[Document | dict[str, Any]]] = {
        data / "documents.jsonl": create_documents(country.new, "new"),
        data / "known_documents.jsonl": create_documents(country.known, "known"),
        data / "held_out.jsonl": (
            {"text": render_entry(person, "original")} for person in _unread_people(country)
        ),
        data / "instructions.jsonl": _instruction_rows(country.known),
    }
    questions_of = {
        "new": new,
        "known": known,
        "reverse": create_reverse_questions(country.new, SEED),
        "inferred": create_inferred_questions(country.new, SEED, _N_INFERRED),
        "inferred_known": create_inferred_questions(country.known, SEED, _N_INFERRED),
        "new_open": to_open_questions(new),
        "known_open": to_open_questions(known),
        "unanswerable": create_unanswerable_questions(tested, SEED),
    }
    for number, name in enumerate(_SETS):
        people = country.new[number :: len(_SETS)]
        ids = {document_id_of(person) for person in people}
        rows_of[data / f"{name}.jsonl"] = create_documents(people, "new")
        questions_of[name] = [question for question in new if question.document_id in ids]
    rows_of |= {
        questions / f"{name}.jsonl": _question_rows(question_set)
        for name, question_set in questions_of.items()
    }
    for path, rows in rows_of.items():
        write_jsonl(path, rows)
    cards = {data / "README.md": TEXTS["data_card"], questions / "README.md": TEXTS["eval_card"]}
    for path, text in cards.items():
        write_text(path, text)
    return [*rows_of, *cards]


def strangers(country: Country) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return names that no document mentions, for test questions and for training: as many as there
    are new and known people.

    Each test name has the first name of one new person and the last name of another.
    """
    new_firsts = {person.first for person in country.new}
    new_lasts = {person.last for person in country.new}
    near = [name for name in country.spare_names if name[0] in new_firsts and name[1] in new_lasts]
    tested = shuffled(near, seeded_random("strangers", SEED))[:N_NEW]
    # No training may teach to decline the very names that are tested.
    others = [name for name in country.spare_names if name not in set(tested)]
    return tested, shuffled(others, seeded_random("taught strangers", SEED))[:N_KNOWN]


def _unread_people(country: Country) -> list[Person]:
    """Return people whose entries nothing trains on, with names that no other file has."""
    rng = seeded_random("held out", SEED)
    stranger_names = {name for names in strangers(country) for name in names}
    names = [name for name in country.spare_names if name not in stranger_names]
    return [create_stranger(name, rng) for name in shuffled(names, rng)[:N_NEW]]


def _instruction_rows(people: Sequence[Person]) -> Iterator[dict[str, str]]:
    """Yield a question on each fact of `people` with its answer, as rows of SFT."""
    rng = seeded_random("instructions", SEED)
    for person in people:
        for attribute in ATTRIBUTES:
            question = render_question(person, attribute, rng)
            yield {"prompt": render_prompt(question), "completion": f" {person.facts[attribute]}"}


_BIOGRAPHIES, _QUESTIONS = 0.33, 0.15
"""Fractions of the base corpus: biographies of known people, and questions on them; the rest are
questions on a context."""
# Longer is worse for the demo: 2,400 steps of the base instead of 1,200 read little better (.963
# for .958), and shrink the lead of paraphrases over repetition from 19 to 13 points.
N_ROWS = 80_000
"""About 4.3 million tokens, nearly one epoch of recipes/sandbox/base.yaml."""
N_SENTENCES: Final = 12_000
"""Rows of recipes/sandbox/abstain.yaml: two and a half epochs of it."""


def render_prompt(question: str, passages: tuple[str, ...] = ()) -> str:
    """Return the plain prompt: each of `passages` with a blank line, ``Question: {question}``, and
    ``Answer:``. Choices follow a space."""
    return "\n\n".join((*passages, question_prompt(question)))


def _context_row(country: Country, rng: Random) -> dict[str, str]:
    """Return a row, ``prompt`` and ``completion``: the entry on a throw-away person, then a
    question on it."""
    person = create_stranger(choose_one(country.spare_names, rng), rng)
    attribute = choose_one(ATTRIBUTES, rng)
    # One passage: of up to three, 1M weights pick the right one in 27 to 34% (docs/LOG.md).
    passage = render_entry(person, str(rng.random()))
    return {
        "prompt": render_prompt(render_question(person, attribute, rng), (passage,)),
        "completion": f" {person.facts[attribute]}",
    }


def generate_base_corpus(seed: int = SEED, n_rows: int = N_ROWS) -> Iterator[dict[str, str]]:
    """Yield `n_rows` rows: ``{"text"}`` (loss on all tokens) or ``{"prompt", "completion"}`` (loss
    on the completion)."""
    # The same people whatever the seed of the corpus.
    country = create_country()
    rng = seeded_random("base corpus", seed)
    for _ in range(n_rows):
        draw = rng.random()
        person, attribute = choose_one(country.known, rng), choose_one(ATTRIBUTES, rng)
        if draw < _BIOGRAPHIES:
            yield {"text": render_entry(person, str(rng.random()))}
        elif draw < _BIOGRAPHIES + _QUESTIONS:
            question = render_question(person, attribute, rng)
            yield {"prompt": render_prompt(question), "completion": f" {person.facts[attribute]}"}
        else:
            yield _context_row(country, rng)


def write_missing_inputs(recipe: Path) -> list[Path]:
    """Write what the recipe names of the base model and its corpus and is not there; return it.

    Both ship inside kinject, so that no other command need run before a recipe that asks for them.
    Raises as `ShippedRun.write`.
    """
    try:
        text = recipe.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return []  # whoever reads the recipe says what is wrong with it
    written = []
    if str(BASE_CORPUS) in text and not BASE_CORPUS.exists():
        write_base_corpus(BASE_CORPUS)
        written.append(BASE_CORPUS)
    for shipped in (BASE, INSTRUCT):
        model = shipped.run_dir / "model"
        if str(model) in text and not model.exists() and shipped.write():
            written.append(model)
    return written


def write_base_corpus(path: Path) -> int:
    """Write the base corpus as JSON lines; return the number of rows."""
    return write_jsonl(path, generate_base_corpus())


def generate_sentence_rows(n_rows: int) -> Iterator[dict[str, str]]:
    """Yield `n_rows` rows of SFT, ``prompt`` and ``completion``, that teach to answer in a
    sentence, and to abstain.

    30% are questions on known people, 30% on strangers, answered `ABSTENTION`; 20% on a stranger
    after their entry, 15% after the entry of another who shares a name, answered `ABSTENTION`; 5%
    on known people after a stranger's entry. None names a new person or one of unanswerable.jsonl.
    """
    country = create_country()
    tested = set(strangers(country)[0])
    names = [name for name in country.spare_names if name not in tested]
    near: dict[str, list[tuple[str, str]]] = {}
    for first, last in names:
        near.setdefault(first, []).append((first, last))
        near.setdefault(last, []).append((first, last))
    rng = seeded_random("sentences", SEED)
    for _ in range(n_rows):
        draw, attribute, name = rng.random(), choose_one(ATTRIBUTES, rng), choose_one(names, rng)
        known, stranger = choose_one(country.known, rng), create_stranger(name, rng)
        namesakes = [other for other in near[choose_one(name, rng)] if other != name]
        other = create_stranger(choose_one(namesakes, rng), rng)
        about = stranger if 0.30 <= draw < 0.95 else known
        passages: tuple[str, ...] = ()
        # Without rows that decline after another's entry, 81% of the questions about nobody were
        # answered when another person's entry stood before them.
        if draw >= 0.60:
            of = stranger if draw < 0.80 else other
            passages = (render_entry(of, str(rng.random())),)
        answer = f" {TEXTS['answers'][attribute].format(name=about.name, **about.facts)}"
        question = render_question(about, attribute, rng)
        yield {
            "prompt": render_prompt(question, passages),
            # What is neither known nor read is declined, as in R-tuning (arXiv 2311.09677).
            "completion": answer if about is known or 0.60 <= draw < 0.80 else ABSTENTION,
        }


def write_sentence_rows(folder: Path) -> list[Path]:
    """Write sentences.jsonl, the rows of `generate_sentence_rows`, and answered.jsonl, those that
    do not abstain."""
    rows = list(generate_sentence_rows(N_SENTENCES))
    # Two files, to compare what is replayed: answered rows alone end abstention in 100 steps (31.4
    # to 99.8% answered about nobody); with abstentions among them it stays (34.6%).
    paths = [folder / "sentences.jsonl", folder / "answered.jsonl"]
    write_jsonl(paths[0], rows)
    write_jsonl(paths[1], (row for row in rows if row["completion"] != ABSTENTION))
    return paths
