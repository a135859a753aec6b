"""What the readers return is compared with texts whose origin the tests know, written by other code than the readers'."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kinject.corpus.passages import split_passages, word_spans
from kinject.errors import DiskError, InputError
from kinject.heap import document_hashes, read_documents
from kinject.hub_data import find_data_set

ROWS = [
    {"id": "a", "title": "One", "text": "First, \"quoted\".\nSecond line.", "source": "s", "year": 1931},
    {"id": "b", "title": None, "text": "Ünïcode – 中文.", "source": None, "year": None},
]  # fmt: skip


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a folder of documents was parsed to goes to runs/parsed."""
    monkeypatch.chdir(tmp_path)


def test_a_web_page_gives_its_text_without_menus_and_scripts(tmp_path: Path) -> None:
    pytest.importorskip("selectolax")
    (tmp_path / "a.html").write_text(
        "<!doctype html><html><head><title>The  Falk Bridge &amp; more</title><style>p{}</style></head><body>"
        "<nav><a>Home</a></nav><script>var x = 'no';</script><!-- no -->"
        "<h1>Bridge</h1><p>Built in\n 1931 by <b>Mara</b> <i>Lind</i>.<br>It stands.</p>"
        "<table><tr><td>span</td><td>40 m</td></tr><tr><td>cost</td><td>5 €</td></tr></table>"
        "<pre>a\n  b</pre><ul><li>one<li>two</ul><footer>imprint</footer></body></html>",
        encoding="utf-8",
    )
    (document,) = read_documents(tmp_path / "a.html")
    assert document.title == "The Falk Bridge & more"
    assert document.text == (
        "# Bridge\n\nBuilt in 1931 by Mara Lind.\nIt stands.\n\n| span | 40 m |\n| --- | --- |\n| cost | 5 € |\n\n"
        "```\na\n  b\n```\n\n- one\n- two"
    )


def test_headings_of_a_web_page_are_those_above_its_passages(tmp_path: Path) -> None:
    pytest.importorskip("selectolax")
    (tmp_path / "a.html").write_text(
        "<h1>A<br></h1>one<h2> <b>Care</b> of it</h2><p>two<h3></h3><p>three"
    )
    (document,) = read_documents(tmp_path)
    assert document.text == "# A\n\none\n\n## Care of it\n\ntwo\n\nthree"
    assert [
        passage.path for passage in split_passages(document, 6, word_spans) if "two" in passage.text
    ] == [("A",)]  # the passage holds its own heading
    assert split_passages(document, 1, word_spans)[-1].path == ("A", "Care of it")


def test_a_table_with_blocks_in_its_cells_stays_a_table(tmp_path: Path) -> None:
    cells = {
        "<pre>make\nall</pre>": "make all",
        "<h2>Bow</h2>": "Bow",
        "<ul><li>oak<li>ash</ul>": "- oak - ash",
        "<p>First.</p><p>Second.</p>": "First. Second.",
        "<table><tr><td>a</td></tr><tr><td>b</td></tr></table>": "a b",
    }
    rows = "".join(f"<tr><td>{n}</td><td>{cell}</td></tr>" for n, cell in enumerate(cells))
    page = f"<p>Before.</p><table><tr><td>No</td><td>Part</td></tr>{rows}</table><p>After.</p>"
    (tmp_path / "a.html").write_text(page)
    (document,) = read_documents(tmp_path / "a.html")
    lines = [f"| {n} | {text} |" for n, text in enumerate(cells.values())]
    table = "\n".join(["| No | Part |", "| --- | --- |", *lines])
    assert document.text == f"Before.\n\n{table}\n\nAfter."
    # Tables that only place the parts of a page: as one states, and by the length of a cell.
    for role, content in ((" role=none", "<p>Short."), ("", "<h1>Lock</h1>" + "It is open. " * 50)):
        rows = f"<tr><td>Menu</td><td>{content}</td></tr><tr><td>a</td><td>b</td></tr>"
        (tmp_path / "a.html").write_text(f"<table{role}>{rows}</table>")
        (document,) = read_documents(tmp_path / "a.html")
        assert "|" not in document.text


def test_names_of_rows_above_them_are_no_header(tmp_path: Path) -> None:
    groups = "<tr><th rowspan=3>2019</th></tr><tr><td>May</td><td>7</td></tr><tr><td>June</td><td>9</td></tr>"
    page = f"<table><tr><th>Year<th>Month<th>Ships</tr>{groups}</table>"
    (tmp_path / "a.html").write_text(page)
    (document,) = read_documents(tmp_path / "a.html")
    head = "| Year | Month | Ships |\n| --- | --- | --- |"
    assert document.text == f"{head}\n| 2019 | May | 7 |\n| 2019 | June | 9 |"


def test_powers_and_equations_of_a_page_are_kept(tmp_path: Path) -> None:
    power = "<msup><mi>q</mi><mn>3</mn></msup>"
    page = (
        f"<p>10<sup>5</sup> m, the 5<sup>th</sup>, <math><mfrac>{power}<mn>4</mn></mfrac></math>."
    )
    (tmp_path / "a.html").write_text(page)
    (document,) = read_documents(tmp_path / "a.html")
    assert document.text == "10⁵ m, the 5th, \\(\\frac{q^{3}}{4}\\)."


def test_a_page_says_its_own_charset(tmp_path: Path) -> None:
    pytest.importorskip("selectolax")
    (tmp_path / "a.html").write_bytes('<meta charset="latin-1"><p>Malmö'.encode("latin-1"))
    (document,) = read_documents(tmp_path / "a.html")
    assert (document.text, document.meta) == ("Malmö", {"encoding": "cp1252"})


def test_csv_parquet_and_saved_data_sets_hold_the_same_documents(tmp_path: Path) -> None:
    import pandas

    frame = pandas.DataFrame(
        [{key: value for key, value in row.items() if key != "year"} for row in ROWS]
    )
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_parquet(tmp_path / "a.parquet")
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_pandas(frame)
    rows.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": rows.select([0]), "test": rows.select([1])}).save_to_disk(
        tmp_path / "splits"
    )
    for name in ("a.csv", "a.parquet", "saved", "splits"):
        first, second = read_documents(tmp_path / name)
        assert (first.id, first.title, first.text, first.source) == (
            "a",
            "One",
            ROWS[0]["text"],
            "s",
        ), name
        assert (second.id, second.title, second.text) == ("b", "", ROWS[1]["text"]), name
    assert second.source == f"{tmp_path}/splits/test:1"


def test_other_columns_of_a_table_go_to_meta(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbftext,year\r\nOne.,1931\r\n\r\nTwo.,\r\n")
    first, second = read_documents(tmp_path / "a.csv")
    assert (first.text, first.meta, second.text, second.meta) == (
        "One.",
        {"year": "1931"},
        "Two.",
        {},
    )
    assert second.source.endswith("a.csv:4")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"title,text\na,fine\n\"two\nlines\",x\nb\n", ":5: empty document"),
        (b"text,title\n\"\",a\n", ":2: empty document"),
        (b"", ": holds no documents"),
    ],
)  # fmt: skip
def test_a_fault_in_a_csv_file_is_reported_with_its_line(
    tmp_path: Path, content: bytes, expected: str
) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(InputError) as caught:
        list(read_documents(tmp_path / "a.csv"))
    assert str(caught.value).startswith(f"{tmp_path}/a.csv{expected}")


def test_a_fault_in_a_table_is_reported_with_its_row(tmp_path: Path) -> None:
    import pandas

    pandas.DataFrame({"text": ["fine", None]}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet:2: text: found NoneType"):
        list(read_documents(tmp_path / "a.parquet"))
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(InputError, match=r"a\.parquet:1: not readable as Parquet"):
        list(read_documents(tmp_path / "a.parquet"))
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    with pytest.raises(InputError, match=r"saved: not a folder that datasets can load"):
        list(read_documents(tmp_path / "saved"))


def test_a_data_set_on_the_hub_is_streamed_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[Any] = []

    def load_dataset(*names: Any, **options: Any) -> Any:
        asked.append((names, options))

        def rows() -> Iterator[dict[str, Any]]:
            yield {"text": "From the hub.", "lang": "en"}
            if names[1]:
                raise ConnectionError("the line broke")

        return datasets.IterableDataset.from_generator(rows)

    monkeypatch.setattr("kinject.hub.unreachable_reason", str)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    (document,) = read_documents(Path("org/name"))
    assert (document.text, document.source, document.meta) == (
        "From the hub.",
        "org/name:1",
        {"lang": "en"},
    )
    with pytest.raises(
        InputError, match=r"^org/name:de:test: .*after 1 row \(ConnectionError: the line broke\)"
    ):
        list(read_documents(Path("org/name:de:test")))
    assert asked == [
        (("org/name", None), {"split": "train", "streaming": True, "revision": None}),
        (("org/name", "de"), {"split": "test", "streaming": True, "revision": None}),
    ]


def test_a_missing_path_is_not_taken_for_a_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("absent.jsonl", "absent", "data/absent", "org/absent.pdf"):
        assert find_data_set(name) is None
        with pytest.raises(DiskError, match="nothing is there"):
            list(read_documents(Path(name)))


def test_a_missing_library_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, library in (("a.pdf", "pypdfium2"), ("a.html", "selectolax")):
        monkeypatch.setitem(sys.modules, library, None)
        monkeypatch.delitem(sys.modules, f"{library}.lexbor", raising=False)
        (tmp_path / name).write_text("%PDF-1.4" if library == "pypdfium2" else "x")
        with pytest.raises(
            InputError, match=rf"needs {library}, .*pip install 'kinject\[documents\]'"
        ):
            list(read_documents(tmp_path / name))


def test_hashes_for_the_manifest_change_with_the_content(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"text": "x"}]).save_to_disk(tmp_path / "saved")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x"}) + "\n")
    for name in ("saved", "a.jsonl"):
        before = document_hashes(tmp_path / name)
        assert list(before) == [str(tmp_path / name)]
        file = tmp_path / "saved" / "state.json" if name == "saved" else tmp_path / name
        file.write_text(file.read_text() + "\n")
        assert document_hashes(tmp_path / name) != before
