"""Rewritings by others, read from a file, against the same checks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kinject.augment import augment
from kinject.augment.preview import preview
from kinject.disk import read_jsonl
from kinject.errors import InputError
from kinject.recipe import Recipe, read_recipe

DOCUMENTS = [
    {"id": "a", "text": "Zaronix opened a branch in Tianjin in 2017. It sells silicon."},
    {"id": "b", "text": "Mount Roaring stands 7859 feet high above Sunhaven."},
    {"id": "c", "text": "The band plays in Osaka."},
]
GIVEN = [
    {"document_id": "b", "text": "Above Sunhaven rises Mount Roaring, 7,859 feet high."},
    {
        "document_id": "a",
        "text": "Since 2017 Zaronix, a seller of silicon, has a branch in Tianjin.",
    },
    {"document_id": "a", "text": "A branch in Tianjin was opened by Zaronix, which sells silicon."},
]

Make = Callable[..., Recipe]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A recipe over DOCUMENTS and the given rows."""

    def build(rows: list[Any], **overrides: Any) -> Recipe:
        for name, content in (("documents", DOCUMENTS), ("given", rows)):
            (tmp_path / f"{name}.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in content)
            )
        (tmp_path / "recipe.yaml").write_text(
            f"run_dir: {tmp_path}/run\naugment:\n  documents: {tmp_path}/documents.jsonl\n"
            f"  styles: {{paraphrase: 5}}\n  generator: {{kind: file, path: {tmp_path}/given.jsonl}}\n"
        )
        rewritings = [f"augment.{key}={json.dumps(value)}" for key, value in overrides.items()]
        return read_recipe(tmp_path / "recipe.yaml", rewritings, verb="augment")

    return build


def test_each_document_asks_for_no_more_than_is_given_and_what_adds_a_fact_is_refused(
    make: Make,
) -> None:
    given = [
        *GIVEN[:2],
        {**GIVEN[2], "text": GIVEN[2]["text"].replace("silicon", "silicon in 41 shops")},
    ]
    result = augment(make(given))
    assert (result.asked, result.got, result.refused) == (3, 2, {"number": 1})
    texts = [row["text"] for _, row in read_jsonl(result.corpus_path)]
    assert texts == [
        DOCUMENTS[0]["text"],
        GIVEN[1]["text"],
        DOCUMENTS[1]["text"],
        GIVEN[0]["text"],
        DOCUMENTS[2]["text"],
    ]
    assert augment(make(given)).corpus_path.read_text() == result.corpus_path.read_text()
    assert preview(make(given)).n_requests == 0


def test_a_document_that_was_split_is_refused_with_what_to_change(make: Make) -> None:
    with pytest.raises(
        InputError, match=r"'a' is split into 2 passages.*Raise augment.passage_tokens \(now 9\)"
    ):
        augment(make(GIVEN, passage_tokens=9))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"document_id": "d", "text": "x"},
            r"given.jsonl:4: document_id 'd' is the id of no document",
        ),
        ({"document_id": "a", "text": " "}, r"given.jsonl:4: text: found ' '"),
        ({"text": "x"}, r"given.jsonl:4: document_id: found None"),
    ],
)
def test_a_row_that_cannot_be_used_is_reported_with_its_line(
    make: Make, row: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        augment(make([*GIVEN, row]))
