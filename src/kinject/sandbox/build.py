"""Writes the sandbox's files: documents, question sets and a README beside each, and the base model's corpus.

The base model learns three things from its corpus: Tarvenian, the known people, and to answer from a context.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from kinject.corpus.questions import question_prompt
from kinject.disk import write_jsonl, write_text
from kinject.sandbox.grammar import DEFAULT_STYLE, EntryStyle, render_entry
from kinject.sandbox.people import (
    ATTRIBUTES,
    N_KNOWN,
    N_NEW,
    POOLS,
    SEED,
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
    create_probe_questions,
    create_questions,
    create_reverse_questions,
    create_unanswerable_questions,
    document_id_of,
    render_question,
    sample_questions,
    to_open_questions,
)
from kinject.sandbox.templates import ANSWERS
from kinject.types import Document, Question

ABSTENTION: Final = " I do not know"
"""The answer that the sandbox's models learn for unknown facts."""
_N_KNOWN_QUESTIONS: Final = 600
_N_INFERRED: Final = 120


def create_documents(people: Sequence[Person], group: str) -> list[Document]:
    """Return one encyclopedia entry for each person; `meta` holds the group (``new`` or ``known``)."""
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
        yield {
            "id": question.id,
            "document_id": question.document_id,
            "fact_id": question.fact_id,
            "subject": question.subject,
            "question": question.question,
            **(
                {"choices": list(question.choices), "answer": question.answer}
                if question.choices
                else {"answers": list(question.answers)}
            ),
        }


def write_sandbox(root: Path) -> list[Path]:
    """Write data/sandbox/ and eval/sandbox/ under `root`; return the paths of the files."""
    country = create_country()
    data, questions = root / "data" / "sandbox", root / "eval" / "sandbox"
    new = create_questions(country.new, SEED)
    known = sample_questions(create_questions(country.known, SEED), _N_KNOWN_QUESTIONS // len(ATTRIBUTES), SEED)
    tested, taught = strangers(country)
    rows_of: dict[Path, Iterable[Document | dict[str, Any]]] = {
        data / "documents.jsonl": create_documents(country.new, "new"),
        data / "known_documents.jsonl": create_documents(country.known, "known"),
        data / "held_out.jsonl": ({"text": render_entry(person, "original")} for person in _unread_people(country)),
        data / "instructions.jsonl": _instruction_rows(country.known),
        data / "abstentions.jsonl": _abstention_rows(taught),
    }
    questions_of = {
        "new": new,
        "known": known,
        "new_probes": create_probe_questions(country.new, new, SEED + 1),
        "known_probes": _known_probes(country.known, known),
        "reverse": create_reverse_questions(country.new, SEED),
        "inferred": create_inferred_questions(country.new, SEED, _N_INFERRED),
        "inferred_known": create_inferred_questions(country.known, SEED, _N_INFERRED),
        "new_open": to_open_questions(new),
        "known_open": to_open_questions(known),
        "unanswerable": create_unanswerable_questions(tested, SEED),
    }
    rows_of |= {
        questions / f"{name}.jsonl": _question_rows(question_set) for name, question_set in questions_of.items()
    }
    for path, rows in rows_of.items():
        write_jsonl(path, rows)
    cards = {data / "README.md": _DATA_CARD, questions / "README.md": _EVAL_CARD}
    for path, text in cards.items():
        write_text(path, text)
    return [*rows_of, *cards]


def _known_probes(people: Sequence[Person], tested: Sequence[Question]) -> list[Question]:
    """Return as many questions as `tested` on facts of the known people that `tested` does not ask about."""
    facts = {question.fact_id for question in tested}
    others = [q for q in create_probe_questions(people, tested, SEED + 1) if q.fact_id not in facts]
    return sample_questions(others, _N_KNOWN_QUESTIONS // len(ATTRIBUTES), SEED)


def strangers(country: Country) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return names that no document mentions, for test questions and for training: as many as there are new and known people.

    Each test name has the first name of one new person and the last name of another.
    """
    new_firsts, new_lasts = ({getattr(person, part) for person in country.new} for part in ("first", "last"))
    near = [name for name in country.spare_names if name[0] in new_firsts and name[1] in new_lasts]
    tested = shuffled(near, seeded_random("strangers", SEED))[:N_NEW]
    others = [name for name in country.spare_names if name not in set(tested)]
    return tested, shuffled(others, seeded_random("taught strangers", SEED))[:N_KNOWN]


def _unread_people(country: Country) -> list[Person]:
    """Return people whose entries nothing trains on, with names that no other file has."""
    rng = seeded_random("held out", SEED)
    stranger_names = {name for names in strangers(country) for name in names}
    names = [name for name in country.spare_names if name not in stranger_names]
    return [create_stranger(name, rng) for name in shuffled(names, rng)[:N_NEW]]


def _abstention_rows(names: Sequence[tuple[str, str]]) -> Iterator[dict[str, str]]:
    """Yield questions on people without an entry, whose answer is to abstain, as rows of SFT."""
    rng = seeded_random("abstentions", SEED)
    for first, last in names:
        for attribute in ATTRIBUTES:
            question = render_question(Person(first, last, {}), attribute, rng)
            yield {"prompt": render_prompt(question), "completion": ABSTENTION}


def _instruction_rows(people: Sequence[Person]) -> Iterator[dict[str, str]]:
    """Yield a question on each fact of `people` with its answer, as rows of SFT."""
    rng = seeded_random("instructions", SEED)
    for person in people:
        for attribute in ATTRIBUTES:
            question = render_question(person, attribute, rng)
            yield {"prompt": render_prompt(question), "completion": f" {person.facts[attribute]}"}


@dataclass(frozen=True, slots=True)
class Mixture:
    """Fractions of the rows: biographies of known people and questions on them; the others are questions on a context."""

    biographies: float = 0.33
    questions: float = 0.15


DEFAULT_MIXTURE = Mixture()
N_ROWS = 80_000
"""About 4.3 million tokens, nearly one epoch of recipes/sandbox/base.yaml."""
N_REPLAY: Final = 20_000
"""About 1.1 million tokens, ten times the replay of recipes/cpt.yaml."""
N_SENTENCES: Final = 12_000
"""Rows of recipes/sandbox/abstain.yaml: two and a half epochs of it."""


def render_prompt(question: str, passages: tuple[str, ...] = ()) -> str:
    """Return the plain prompt, ``{passage}\\n\\n{passage}\\n\\nQuestion: {question}\\nAnswer:``; choices follow a space."""
    return "\n\n".join((*passages, question_prompt(question)))


def _context_row(country: Country, style: EntryStyle, rng: Random) -> dict[str, str]:
    """Return a row, ``prompt`` and ``completion``: the entry on a throw-away person, then a question on it."""
    person, attribute = create_stranger(choose_one(country.spare_names, rng), rng), choose_one(ATTRIBUTES, rng)
    passage = render_entry(person, str(rng.random()), style)
    return {
        "prompt": render_prompt(render_question(person, attribute, rng), (passage,)),
        "completion": f" {person.facts[attribute]}",
    }


def generate_base_corpus(
    seed: int = SEED, n_rows: int = N_ROWS, mixture: Mixture = DEFAULT_MIXTURE, style: EntryStyle = DEFAULT_STYLE,
    *, with_documents: bool = False,
) -> Iterator[dict[str, str]]:  # fmt: skip
    """Yield `n_rows` rows: ``{"text"}`` (loss on all tokens) or ``{"prompt", "completion"}`` (loss on the completion).

    `with_documents`: rows on known people have the ``document_id`` of their entry.
    """
    country = create_country(seed=SEED)
    rng = seeded_random("base corpus", seed)
    for _ in range(n_rows):
        draw = rng.random()
        person, attribute = choose_one(country.known, rng), choose_one(ATTRIBUTES, rng)
        about = {"document_id": document_id_of(person)} if with_documents else {}
        if draw < mixture.biographies:
            yield {**about, "text": render_entry(person, str(rng.random()), style)}
        elif draw < mixture.biographies + mixture.questions:
            question = render_question(person, attribute, rng)
            yield {**about, "prompt": render_prompt(question), "completion": f" {person.facts[attribute]}"}
        else:
            yield _context_row(country, style, rng)


def write_base_corpus(path: Path, n_rows: int = N_ROWS, seed: int = SEED) -> int:
    """Write the base corpus as JSON lines; return the number of rows."""
    return write_jsonl(path, generate_base_corpus(seed, n_rows))


def write_replay_corpus(path: Path, n_rows: int = N_REPLAY, seed: int = SEED) -> int:
    """Write the first `n_rows` of the base corpus, those on known people with their ``document_id``; return the number."""
    return write_jsonl(path, generate_base_corpus(seed, n_rows, with_documents=True))


def generate_sentence_rows(n_rows: int = N_SENTENCES, seed: int = SEED) -> Iterator[dict[str, str]]:
    """Yield `n_rows` rows of SFT, ``prompt`` and ``completion``, that teach to answer in a sentence, and to abstain.

    30% are questions on known people, 30% on strangers, answered `ABSTENTION`; 20% on a stranger after their entry, 15%
    after the entry of another who shares a name, answered `ABSTENTION`; 5% on known people after a stranger's entry. None
    names a new person or one of unanswerable.jsonl.
    """
    country = create_country()
    tested = set(strangers(country)[0])
    names = [name for name in country.spare_names if name not in tested]
    near = {part: [name for name in names if part in name] for part in {part for name in names for part in name}}
    rng = seeded_random("sentences", seed)
    for _ in range(n_rows):
        draw, attribute, name = rng.random(), choose_one(ATTRIBUTES, rng), choose_one(names, rng)
        known, stranger = choose_one(country.known, rng), create_stranger(name, rng)
        namesakes = [other for other in near[choose_one(name, rng)] if other != name]
        other = create_stranger(choose_one(namesakes, rng), rng)
        about = stranger if 0.30 <= draw < 0.95 else known
        of = None if draw < 0.60 else stranger if draw < 0.80 else other
        passages = () if of is None else (render_entry(of, str(rng.random())),)
        answer = f" {ANSWERS[attribute].format(name=about.name, **about.facts)}"
        question = render_question(about, attribute, rng)
        yield {
            "prompt": render_prompt(question, passages),
            "completion": answer if about is known or of is stranger else ABSTENTION,
        }


def write_sentence_rows(folder: Path, n_rows: int = N_SENTENCES) -> list[Path]:
    """Write sentences.jsonl, the rows of `generate_sentence_rows`, and answered.jsonl, those that do not abstain."""
    rows = list(generate_sentence_rows(n_rows))
    paths = [folder / "sentences.jsonl", folder / "answered.jsonl"]
    write_jsonl(paths[0], rows)
    write_jsonl(paths[1], (row for row in rows if row["completion"] != ABSTENTION))
    return paths


_POOL_ROWS: Final = "\n".join(
    f"| {attribute} | {len(POOLS[attribute])} | {POOLS[attribute][0]} |" for attribute in ATTRIBUTES
)

_DATA_CARD: Final = f"""\
# The sandbox: people of Tarvenia

Short encyclopedia entries about people of a country that does not exist. No model has read about them before, so it
learns every fact from these files. `kinject sandbox build` writes them; they are the same on every machine.

| file | rows | content |
|---|---|---|
| documents.jsonl | {N_NEW} | entries on new people: the facts that continued pretraining should teach |
| known_documents.jsonl | {N_KNOWN} | entries on known people, learned already by the sandbox's base model: for replay |
| held_out.jsonl | {N_NEW} | entries on other people that nothing trains on: the perplexity of held-out text |
| instructions.jsonl | {N_KNOWN * len(ATTRIBUTES)} | questions on the known people, each with its answer: SFT without a new fact |
| abstentions.jsonl | {N_KNOWN * len(ATTRIBUTES)} | on people without an entry, answered "I do not know": SFT on abstaining |

A document has `id`, `title` (the person's full name), `text`, `source` and `meta`. Each entry states five facts once:

| attribute | values | for instance |
|---|---|---|
{_POOL_ROWS}

Values are dealt evenly, independently of each other and of the names: each value belongs to about as many people as any
other. Known and new people share first and last names, but no full name. So no fact can be guessed: a reader without
the entries scores chance.

All names are invented; any resemblance to a person, place or firm is a coincidence. Licence: Apache-2.0, as the
project.
"""

_EVAL_CARD: Final = f"""\
# Questions on the sandbox

Rows: `id`, `document_id`, `fact_id`, `subject` (the attribute), `question`, and either four `choices` (three for a
decade) with `answer`, the index of the correct one, or `answers`, the accepted texts, for `eval.formats: [generate]`.
`kinject sandbox build` writes these files.

| file | rows | questions |
|---|---|---|
| new.jsonl | {N_NEW * len(ATTRIBUTES)} | on each fact of data/sandbox/documents.jsonl: learning |
| known.jsonl | {_N_KNOWN_QUESTIONS} | on facts of data/sandbox/known_documents.jsonl: forgetting |
| new_probes.jsonl | {N_NEW * len(ATTRIBUTES)} | facts of new.jsonl in other words, with other distractors: decide in training |
| known_probes.jsonl | {_N_KNOWN_QUESTIONS} | facts of known people that known.jsonl does not ask about: decide in training |
| reverse.jsonl | {N_NEW * len(ATTRIBUTES)} | that ask for the person, given a fact of documents.jsonl ("Who was born in ...?") |
| inferred.jsonl | 298 | whose answer follows from a fact of documents.jsonl: decade of birth, kind of school or firm |
| inferred_known.jsonl | 360 | the same on known people: what the base model itself can infer |
| new_open.jsonl | {N_NEW * len(ATTRIBUTES)} | those of new.jsonl, open |
| known_open.jsonl | {_N_KNOWN_QUESTIONS} | those of known.jsonl, open |
| unanswerable.jsonl | {N_NEW * len(ATTRIBUTES)} | on {N_NEW} people without an entry: to abstain is correct (`answers: []`) |
| chat.jsonl | 200 | instructions in a chat, graded by `checks` without a model; none is in a dialogue of training |
| chat_new.jsonl, chat_known.jsonl | 100 each | in a chat, on facts of documents.jsonl and of known_documents.jsonl |

Distractors are values of the same attribute. In new.jsonl each value is wrong exactly three times as often as it is
correct, and each position is correct equally often, so preferring some values or positions scores chance. In
reverse.jsonl the wrong choices are new people with another value. A forward and a reverse question on one fact share
its `fact_id`. In the inferred sets, whose answers no training text states, each answer to a kind of question is correct
equally often, too.

Each person of unanswerable.jsonl has the first name of one new person and the last name of another. No document and no
row of data/sandbox mentions them; the base model's corpus has such names in throw-away contexts, each time with other
facts. The people of abstentions.jsonl are others.

Two questions on one document are not independent: intervals should cluster by `document_id`.
"""
