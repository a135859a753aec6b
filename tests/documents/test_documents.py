import json
from pathlib import Path

import datasets
import pytest

from kinject.disk import content_id
from kinject.documents.text import markdown_table
from kinject.errors import DiskError, InputError
from kinject.heap import collect, document_hashes, read_documents
from kinject.recipe import DocumentsSection


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a folder of documents was parsed to goes to runs/parsed."""
    monkeypatch.chdir(tmp_path)


def write(path: Path, *rows: object) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


def test_fields_are_read_and_other_keys_go_to_meta(tmp_path: Path) -> None:
    path = write(
        tmp_path / "d.jsonl",
        {"id": "a", "title": "T", "text": "Some text.", "url": "u", "meta": {"k": 1}},
    )
    (document,) = read_documents(path)
    assert (document.id, document.title, document.text) == ("a", "T", "Some text.")
    assert document.meta == {"url": "u", "k": 1}
    assert document.source == f"{path}:1"


def test_columns_that_a_recipe_names_are_those_of_a_single_file_as_well(tmp_path: Path) -> None:
    rows = [{"nr": "k7", "text": "How late?", "answer": "At six."}]
    path = write(tmp_path / "faq.jsonl", *rows)
    section = DocumentsSection(fields={"text": "answer", "id": "nr"})
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    for source in (path, tmp_path / "saved"):
        (document,) = read_documents(source, section)
        assert (document.id, document.text) == ("k7", "At six.")
        others = DocumentsSection(fields={"text": "text"})
        hashes = [document_hashes(source, each) for each in (section, others, None)]
        assert len({str(each) for each in hashes}) == 3
    # What is collected has kinject's own names, whatever the columns were.
    (collected,) = read_documents(collect([path], section).documents_path, section)
    assert (collected.id, collected.text) == ("k7", "At six.")


def test_a_missing_id_is_the_hash_of_title_and_text(tmp_path: Path) -> None:
    (document,) = read_documents(write(tmp_path / "d.jsonl", {"title": "T", "text": "x"}))
    assert document.id == content_id("T", "x")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": " \n"}, "empty document"),
        ({"title": "T"}, "no key 'text' (found 'title')"),
        ({}, "no key 'text' (found none)"),
        ({"text": 3}, "text: found int"),
        ({"text": None}, "text: found NoneType"),
        ({"text": "x", "title": 3}, "title: found int"),
        ({"text": "x", "id": ""}, "id: found ''"),
        ({"text": "x", "id": True}, "id: found True"),
        ({"text": "x", "meta": []}, "meta: found list"),
        ({"text": "a\0b"}, "NUL character at position 1"),
    ],
)
def test_a_bad_row_is_reported_with_file_and_line(
    tmp_path: Path, row: object, expected: str
) -> None:
    path = write(tmp_path / "d.jsonl", {"text": "fine"}, row)
    with pytest.raises(InputError) as caught:
        list(read_documents(path))
    assert str(caught.value).startswith(f"{path}:2: ")
    assert expected in str(caught.value)


def test_two_documents_with_one_id_are_reported_with_both_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", {"id": 7, "text": "x"}, {"id": "7", "text": "y"})
    with pytest.raises(InputError, match=r"d\.jsonl:2: id '7' is already the id of .*d\.jsonl:1\."):
        list(read_documents(path))


def test_no_documents_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no documents"):
        list(read_documents(write(tmp_path / "d.jsonl")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="an empty folder"):
        list(read_documents(tmp_path / "empty"))
    with pytest.raises(DiskError, match="nothing is there"):
        list(read_documents(tmp_path / "absent.jsonl"))


def test_a_row_of_equal_values_keeps_each_and_a_heading_in_a_table_stands_once() -> None:
    rows = [["a", "b", "c"], ["3", "3", "3"], ["yes", "yes", "yes"], ["Prices of May"] * 3]
    assert markdown_table(rows).splitlines()[2:] == [
        "| 3 | 3 | 3 |",
        "| yes | yes | yes |",
        "| Prices of May |  |  |",
    ]
