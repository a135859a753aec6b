"""The file of passages: what a run reads, splits and hashes once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kinject.augment.passage_file import PassageFile, PlannedDocuments
from kinject.augment.plan import make_plan
from kinject.recipe import AugmentRecipe
from kinject.types import Document, Passage

Make = Callable[..., AugmentRecipe]


def test_the_file_of_passages_holds_what_was_read_and_is_gone_afterwards(
    make_recipe: Make, tmp_path: Path
) -> None:
    plan = make_plan(make_recipe(passage_tokens=40))
    odd = Document("d", 'a "title"', "One.\u2028Two.\r\nThree.\U0001f600", "name\udcff.txt")
    read = [*PlannedDocuments(plan), (odd, [Passage("0" * 16, "d", 5, 9, "Two.")])]
    assert max(len(passages) for _, passages in read) > 1
    with PassageFile(tmp_path) as file:
        for document, passages in read:
            file.add(document, passages)
        for _ in range(2):
            assert [(replace(document, meta={}), passages) for document, passages in read] == list(
                file
            )
        assert next(iter(file)) == next(iter(file))  # one pass does not disturb another
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".passages")]
