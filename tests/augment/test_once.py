"""A run reads, splits and hashes each document once, and parses and checks each answer once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kinject.augment import augment
from kinject.augment.answers import Repaired
from kinject.augment.checks.checker import Checker, Verdict
from kinject.augment.plan import PassageFile, make_plan
from kinject.augment.styles import Style
from kinject.disk import read_jsonl
from kinject.documents import rows
from kinject.recipe import AugmentRecipe
from kinject.types import Document, Passage

Make = Callable[..., AugmentRecipe]
EVERYTHING: dict[str, Any] = {
    "styles": {"paraphrase": 3, "implications": 1, "atomic_facts": 1, "questions": 1, "permuted": 1, "dialogue": 1},
    "judge": {"kind": "sandbox"},
    "max_attempts": 2,
}
"""Every reader of the documents and of the answers: SFT rows, coverage, a preparation, a verification, a judge."""


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count documents read, documents split, answers parsed and answers checked."""
    counts = Counter[str]()
    read, split, check = rows.read_json_rows, _split(), Checker.check

    def count_read(*arguments: Any) -> Iterator[Any]:
        for document in read(*arguments):
            counts["read"] += 1
            yield document

    def count_split(*arguments: Any) -> list[Passage]:
        counts["split"] += 1
        return split(*arguments)

    def count_check(self: Checker, text: str) -> Verdict:
        counts["checked"] += 1
        return check(self, text)

    monkeypatch.setattr(rows, "read_json_rows", count_read)
    monkeypatch.setattr("kinject.augment.plan.split_passages", count_split)
    monkeypatch.setattr(Checker, "check", count_check)
    parse = Style.read

    def count_parse(self: Style, answer: str, title: str, passage: str) -> Repaired:
        counts["parsed"] += 1
        return parse(self, answer, title, passage)

    monkeypatch.setattr(Style, "read", count_parse)
    return counts


def _split() -> Callable[..., list[Passage]]:
    from kinject.corpus.passages import split_passages

    return split_passages


def test_each_document_is_read_and_split_once_and_each_answer_parsed_and_checked_once(
    make_recipe: Make, documents: Path, counts: Counter[str], exact_copies_only: None
) -> None:
    probes = Path("eval/sandbox/new.jsonl")
    assert probes.exists()
    result = augment(make_recipe(contamination_check=[str(probes)], **EVERYTHING))
    assert (result.n_documents, result.sft_path is not None, result.coverage is not None) == (12, True, True)
    assert result.contamination is not None
    assert result.judge is not None
    n_answers = sum(1 for path in (result.variants_path, result.rejected_path) for _ in read_jsonl(path))
    assert n_answers > result.got > 0
    assert counts == {"read": 12, "split": 12, "parsed": n_answers, "checked": n_answers}


def test_a_rerun_reads_each_document_once_and_parses_no_answer(
    make_recipe: Make, counts: Counter[str], exact_copies_only: None
) -> None:
    augment(make_recipe())
    counts.clear()
    augment(make_recipe())
    assert counts == {"read": 12, "split": 12}


def test_the_file_of_passages_holds_what_was_read_and_is_gone_afterwards(make_recipe: Make, tmp_path: Path) -> None:
    plan = make_plan(make_recipe(passage_tokens=40))
    odd = Document("d", 'a "title"', "One.\u2028Two.\r\nThree.\U0001f600", "name\udcff.txt")
    read = [*plan.read_passages(), (odd, [Passage("0" * 16, "d", 5, 9, "Two.")])]
    assert max(len(passages) for _, passages in read) > 1
    with PassageFile(tmp_path) as file:
        for document, passages in read:
            file.add(document, passages)
        for _ in range(2):
            assert [(replace(document, meta={}), passages) for document, passages in read] == list(file)
        assert next(iter(file)) == next(iter(file))  # one pass does not disturb another
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".passages")]


def test_a_run_leaves_no_file_of_passages_whether_it_ends_well_or_not(make_recipe: Make, documents: Path) -> None:
    folder = augment(make_recipe()).run_dir
    documents.write_text(documents.read_text() + '{"text": ""}\n')
    with pytest.raises(Exception, match="empty document"):
        augment(make_recipe())
    assert not [path for path in folder.iterdir() if path.suffix == ".part"]
