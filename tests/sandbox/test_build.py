from pathlib import Path

import pytest

from kinject.disk import read_jsonl
from kinject.sandbox.build import write_sandbox
from kinject.sandbox.grammar import parse_entry

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    root = tmp_path_factory.mktemp("sandbox")
    return root, write_sandbox(root)


def test_the_committed_files_are_what_the_generator_writes(built: tuple[Path, list[Path]]) -> None:
    root, paths = built
    for path in paths:
        committed = ROOT / path.relative_to(root)
        assert committed.read_bytes() == path.read_bytes(), f"{committed}: run `kinject sandbox build`"


def test_the_files_are_small(built: tuple[Path, list[Path]]) -> None:
    assert sum(path.stat().st_size for path in built[1]) < 2_000_000


def test_every_question_has_its_document(built: tuple[Path, list[Path]]) -> None:
    root, _ = built
    documents = {
        row["id"]: row
        for name in ("documents", "known_documents")
        for _, row in read_jsonl(root / "data" / "sandbox" / f"{name}.jsonl")
    }
    for name, n_questions in (("new", 600), ("known", 600), ("reverse", 600)):
        rows = [row for _, row in read_jsonl(root / "eval" / "sandbox" / f"{name}.jsonl")]
        assert len(rows) == n_questions
        for row in rows:
            person = parse_entry(documents[row["document_id"]]["text"])
            assert person is not None
            gold = row["choices"][row["answer"]]
            assert gold == (person.name if name == "reverse" else person.facts[row["subject"]])


def test_known_and_new_documents_share_no_person(built: tuple[Path, list[Path]]) -> None:
    folder = built[0] / "data" / "sandbox"
    titles = [
        {row["title"] for _, row in read_jsonl(folder / f"{name}.jsonl")} for name in ("documents", "known_documents")
    ]
    assert (len(titles[0]), len(titles[1])) == (120, 300)
    assert not titles[0] & titles[1]
