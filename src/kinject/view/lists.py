"""What the page lists of a run: of each file of its verb, the rows as items."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kinject.augment.store import text_id
from kinject.disk import Row
from kinject.view.rows import Latest, read_rows

_LONGEST = 20_000  # characters of a text on the page

Item = dict[str, Any]
"""A row of a list: text, tag, about, pairs (label, text); to decide on: id, edit (key -> texts)."""
Json = str | int | float | list[Any] | dict[str, Any] | None
"""A value of a row. Rows come from files that others may have written, so each is shown as text."""


@dataclass(frozen=True)
class Listed:
    """A list of a run: its `file`, and the items of a row of it.

    With `last_of_id` the last of several rows with one id replaces the others.
    """

    file: str
    items: Callable[[Row], Iterable[Item]]
    last_of_id: bool = False


def _items(path: Path, listed: Listed) -> list[tuple[Item, str]]:
    """Return the items of a file, each with the text that is searched."""
    rows: Iterable[Row] = read_rows(path)
    if listed.last_of_id:
        rows = {row["id"]: row for row in rows}.values()
    items: list[Item] = []
    for row in rows:
        items += listed.items(row)
    return [(item, _searched_text(item)) for item in items]


def _searched_text(item: Item) -> str:
    pairs = ["\n".join(pair) for pair in item["pairs"]]
    return "\n".join([item["text"], item["tag"], *item["about"], *pairs]).casefold()


def _item(
    text: Json,
    tag: Json = "",
    about: Sequence[Json] = (),
    pairs: Sequence[tuple[str, Json]] = (),
    **more: Json,
) -> Item:
    """Return an item, without the parts that are empty."""
    filled = [(label, value) for label, value in pairs if value not in (None, "")]
    return {
        "text": str(text)[:_LONGEST],
        "tag": str(tag),
        "about": [str(part) for part in about if part],
        "pairs": [(label, str(value)[:_LONGEST]) for label, value in filled],
        **more,
    }


def _accepted(row: Row) -> Iterator[Item]:
    texts = (row["text"], *row.get("more", ())) if row["text"] else ()
    for index, text in enumerate(texts):
        yield _item(
            text,
            row["style"],
            (row["document_id"],),
            id=text_id(row["id"], index),
            passage=row["passage_id"],
            edit={"text": text},
        )


def _refused(row: Row) -> Iterator[Item]:
    yield _item(
        row["text"],
        row["reason"],
        (row["style"], row["document_id"]),
        [("why", row["detail"])],
        id=row["id"],
        passage=row["passage_id"],
        edit={"text": row["text"]},
    )


def _passage(row: Row) -> Iterator[Item]:
    if row.get("origin") == "original":
        yield _item(row["text"], "", (row["document_id"],))


def _changed_answer(row: Row) -> Iterator[Item]:
    about = (row["arm"], row["question_set"], row.get("document_id"))
    pairs = [
        ("correct", _choice(row, "gold")),
        ("base answered", _choice(row, "base_chosen")),
        ("now", _choice(row, "chosen")),
    ]
    pairs += [("passage", passage["text"]) for passage in row.get("passages", ())]
    yield _item(row["question"], row["change"], about, pairs)


def _choice(row: Row, key: str) -> Json:
    """Return the choice whose index is at `key`, or what stands there instead of one."""
    value: Json = row.get(key)
    if isinstance(value, int):
        value = row["choices"][value]
    return value


def _question(row: Row) -> Iterator[Item]:
    choices = row.get("choices") or []
    answer = _answer(row, choices)
    wrong = [choice for choice in choices if choice != answer] or row.get("wrong", [])
    pairs = [
        ("answer", answer),
        *(("wrong", text) for text in wrong),
        ("sentence", row.get("sentence")),
        ("why", row.get("detail")),
    ]
    yield _item(
        row.get("question", "no question"),
        row.get("reason", ""),
        (row.get("document_id"),),
        pairs,
        edit={"question": row.get("question", ""), "answer": answer, "wrong": wrong},
        id=row.get("id", ""),
    )


def _answer(row: Row, choices: Sequence[Json]) -> Json:
    """Return the correct choice, the first of the answers, or the answer of a refused question."""
    if choices:
        return choices[row["answer"]]
    answers: list[Json] = row.get("answers") or [row.get("answer", "")]
    return answers[0]


def _document(row: Row) -> Iterator[Item]:
    about = (row.get("title"), row.get("source"), row.get("id"))
    yield _item(row.get("text", ""), row.get("meta", {}).get("language", ""), about)


def _skipped(row: Row) -> Iterator[Item]:
    yield _item(row.get("detail", ""), row.get("reason", ""), (row.get("where"),))


def _copy(row: Row) -> Iterator[Item]:
    keys = ("kept", "version", "words_only_here", "words_only_there")
    pairs = [(key.replace("_", " "), row.get(key)) for key in keys]
    yield _item(row.get("dropped", ""), row.get("how", ""), pairs=pairs)


LISTS: Mapping[str, Mapping[str, Listed]] = {
    "documents": {
        "documents": Listed("documents.jsonl", _document),
        "skipped": Listed("skipped.jsonl", _skipped),
        "copies": Listed("duplicates.jsonl", _copy),
    },
    "augment": {
        "accepted": Listed("variants.jsonl", _accepted, last_of_id=True),
        "refused": Listed("rejected.jsonl", _refused),
        "passages": Listed("corpus.jsonl", _passage),
    },
    "questions": {
        "questions": Listed("questions.jsonl", _question),
        "refused": Listed("rejected.jsonl", _question),
    },
    "eval": {"changed answers": Listed("flips.jsonl", _changed_answer)},
}
"""Verb -> title -> what a run of it lists."""


ITEMS: dict[tuple[str, str], Latest[list[tuple[Item, str]]]] = {}
"""(verb, title) -> the items of the runs that were looked at last."""
for _verb, _lists in LISTS.items():
    for _title, _listed in _lists.items():
        ITEMS[_verb, _title] = Latest(partial(_items, listed=_listed), most=2)


def _passages(path: Path) -> dict[str, str]:
    """Return the passages of a corpus by id; {} where it does not hold the originals."""
    if not path.is_file():
        return {}
    rows = read_rows(path)
    return {row["id"]: row["text"][:_LONGEST] for row in rows if row.get("origin") == "original"}


PASSAGES = Latest(_passages, most=2)
