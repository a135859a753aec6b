"""The cards that `kinject sandbox build` writes beside the data."""

from __future__ import annotations

from typing import Final

from kinject.sandbox.facts import N_KNOWN, N_NEW
from kinject.sandbox.pools import ATTRIBUTES, POOLS

N_KNOWN_QUESTIONS: Final = 600
_POOLS: Final = "\n".join(
    f"| {attribute} | {len(POOLS[attribute])} | {POOLS[attribute][0]} |" for attribute in ATTRIBUTES
)

DATA_CARD: Final = f"""\
# The sandbox: people of Tarvenia

Short encyclopedia entries about people of a country that does not exist. No model has read about them, so what a model
knows of them it learnt here. `kinject sandbox build` writes these files; they are the same on every machine.

| file | rows | what |
|---|---|---|
| documents.jsonl | {N_NEW} | entries on new people: what continued pretraining should teach |
| known_documents.jsonl | {N_KNOWN} | entries on known people, whom the sandbox's base model has learnt: for replay |

Each row has `id`, `title` (the person's full name), `text`, `source` and `meta`. Each entry states five facts once:

| attribute | values | for instance |
|---|---|---|
{_POOLS}

Values are dealt evenly and independently of each other and of the names: every value belongs to about as many people as
any other, known and new people share first and last names but no full name. So nothing can be guessed; a reader
without the entries scores chance.

All names are invented; any likeness to a person, place or firm is chance. Licence: Apache-2.0, as the project.
"""

EVAL_CARD: Final = f"""\
# Questions on the sandbox

Four choices each, one right, chance 0.25. Rows: `id`, `document_id`, `fact_id`, `subject` (the attribute), `question`,
`choices`, `answer` (index of the right choice). `kinject sandbox build` writes these files.

| file | rows | asks |
|---|---|---|
| new.jsonl | {N_NEW * len(ATTRIBUTES)} | each fact of data/sandbox/documents.jsonl: learning |
| known.jsonl | {N_KNOWN_QUESTIONS} | facts of data/sandbox/known_documents.jsonl: forgetting |
| reverse.jsonl | {N_NEW * len(ATTRIBUTES)} | for the person, given a fact of documents.jsonl ("Who was born in ...?") |

Distractors are values of the same attribute. In new.jsonl each value is wrong exactly three times as often as it is
right and each position is right equally often, so that preferring some values or positions earns chance. In
reverse.jsonl the wrong choices are new people whose fact differs. A forward and a reverse question on one fact
share its `fact_id`.

Two questions on one document are not independent: intervals should cluster by `document_id`.
"""
