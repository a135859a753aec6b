"""PDFs whose letters are turned, run from right to left or stand apart, and PDFs with a fault in one place."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from kinject.documents.readers import UnreadPart, read_file
from kinject.heap import collect, read_documents
from kinject.types import Document
from made import as_shown, as_utf16, pdf_of

TURNS = {0: "1 0 0 1 0 0", 90: "0 1 -1 0 612 0", 180: "-1 0 0 -1 612 792", 270: "0 -1 1 0 0 792"}
"""Degrees -> the matrix that turns what is drawn to the left by them."""
HEBREW = [
    "המגדלור של קלם הוקם בשנת 1874 וגובהו 31.5 מטרים.", "המחשב Atlas 2.7 מודד רוח (כל שעה) מול Lowmere",
    "ב-1926 נוספו 14 מדרגות; הכרטיס התייקר ב-20% עד 5/8/1999",
]  # fmt: skip


def only(data: bytes) -> Document:
    ((_, document),) = read_file(Path("a.pdf"), io.BytesIO(data))
    assert isinstance(document, Document), document
    return document


def at(x: float, y: float, text: str, size: float = 10) -> str:
    return f"BT /F1 {size} Tf {x} {y} Td ({text}) Tj ET "


def as_seen(text: str) -> str:
    """Return a line of Hebrew as it is seen from left to right."""
    parts = re.findall(r"[A-Za-z0-9][A-Za-z0-9 ./:]*[A-Za-z0-9%]|.", text)
    mirrored = [part.translate(str.maketrans("()", ")(")) for part in parts]
    return "".join(reversed(mirrored))


def flush_right(letters: str, right: float, y: float, text: str) -> str:
    """Return the content that draws a line of Hebrew up to `right`."""
    return as_shown(letters, right - 6 * len(text), y, as_seen(text))


@pytest.mark.parametrize("degrees", [90, 180, 270])
@pytest.mark.parametrize("is_stated", [True, False])
def test_a_turned_page_reads_as_the_upright_one(degrees: int, is_stated: bool) -> None:
    """Its text, heading and ruled table: turned by /Rotate as well, so that a viewer shows it upright, or not."""
    page = at(60, 560, "The lighthouse of Kelm", 18)
    page += at(60, 530, "Seven keepers have lived there since it was built.")
    page += at(60, 516, "The last of them left in the autumn of 1968.")
    for row, cells in enumerate(
        (("Keeper", "From", "To"), ("Ada Holm", "1921", "1934"), ("Per Dahl", "1934", "1968"))
    ):
        page += "".join(
            at(70 + 130 * column, 476 - 20 * row, cell) for column, cell in enumerate(cells)
        )
    page += "".join(f"62 {490 - 20 * row} m 452 {490 - 20 * row} l S " for row in range(4))
    page += "".join(
        f"{62 + 130 * column} 490 m {62 + 130 * column} 430 l S " for column in range(4)
    )
    upright = only(pdf_of(page)).text
    assert "| Ada Holm | 1921 | 1934 |" in upright
    turned = pdf_of(f"{TURNS[degrees]} cm {page}", rotate=degrees if is_stated else 0)
    assert only(turned).text == upright


@pytest.mark.parametrize("matrix", ["0 1 -1 0 40 200", "0 -1 1 0 580 600", "-1 0 0 -1 400 60"])
def test_a_turned_label_is_a_paragraph_and_neither_heading_nor_title(matrix: str) -> None:
    page = "".join(
        at(72, 700 - 12 * row, line)
        for row, line in enumerate(
            (
                "The mill was rented to three families, who ground",
                "rye and oats until the river was led away.",
            )
        )
    )
    label = f"BT /F1 24 Tf {matrix} Tm (Archive of Kelm 1931) Tj ET "
    document = only(pdf_of(label + page))
    body = "The mill was rented to three families, who ground rye and oats until the river was led away."
    assert document.text == f"{body}\n\nArchive of Kelm 1931"
    assert document.title == "a"
    pages = [label + page.replace("three", number) for number in ("four", "five", "nine")]
    assert "Archive" not in only(pdf_of(*pages)).text


def test_upright_text_by_a_font_of_negative_size_is_upright() -> None:
    page = "BT /F1 -12 Tf -1 0 0 -1 72 700 Tm (The ferry of Arvika) Tj -1 0 0 -1 72 686 Tm (sails at noon.) Tj ET"
    assert only(pdf_of(page)).text == "The ferry of Arvika sails at noon."


@pytest.mark.parametrize("degrees", TURNS)
def test_lines_from_right_to_left_are_in_logical_order(degrees: int) -> None:
    """Names, numbers, dates and brackets in them as well."""
    letters = "".join(HEBREW)
    page = "".join(
        flush_right(letters, 560, 560 - 14 * row, line) for row, line in enumerate(HEBREW)
    )
    turned = f"q {TURNS[degrees]} cm {page} Q"
    assert only(pdf_of(turned, rotate=degrees, letters=letters)).text == " ".join(HEBREW)


def test_columns_and_tables_from_right_to_left_begin_at_the_right() -> None:
    left = [line.replace("1874", "1650") for line in HEBREW]
    letters = "".join([*HEBREW, *left])
    page = ""
    for row in range(6):
        for right, column in ((590, HEBREW), (260, left)):
            line = column[row % 3][:40].strip()
            page += flush_right(letters, right, 700 - 14 * row, line)
    text = only(pdf_of(page, letters=letters)).text
    assert text.count("1874") == text.count("1650") == 2
    assert text.rindex("1874") < text.index("1650")
    rows = [
        ["תחנה", "שעה", "מחיר"],
        ["קלם", "6:35", "12"],
        ["מגדל הים", "9:50", "37"],
        ["גשר", "11:20", "58"],
    ]
    letters = "".join("".join(row) for row in rows)
    page = "".join(
        flush_right(letters, 500 - 120 * column, 600 - 20 * row, cell)
        for row, cells in enumerate(rows)
        for column, cell in enumerate(cells)
    )
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    assert only(pdf_of(page, letters=letters)).text == "\n".join(
        [lines[0], "|" + " --- |" * 3, *lines[1:]]
    )


def test_words_from_right_to_left_within_an_english_sentence_are_in_order() -> None:
    letters = "".join(HEBREW)
    page = at(72, 700, "The plaque above the door says") + as_shown(
        letters, 222, 700, as_seen("המגדלור של קלם")
    )
    page += at(312, 700, "and has been read by many.")
    assert only(pdf_of(page, letters=letters)).text == (
        "The plaque above the door says המגדלור של קלם and has been read by many."
    )


def test_letters_of_an_arabic_ligature_are_in_order() -> None:
    """PDFium gives those of lam and alef backwards; forms of joined letters are plain letters."""
    glyphs = ["ا", "ل", "ب", "لا", "د", "ﺔ", "ج", "م", "ي"]
    words = [["ا", "ل", "ب", "لا", "د"], ["ج", "م", "ي", "ل", "ﺔ"]]
    seen = [*words[1][::-1], " ", *words[0][::-1]]
    assert only(pdf_of(as_shown(glyphs, 300, 700, seen), letters=glyphs)).text == "البلاد جميلة"


def test_a_page_whose_letters_stand_apart_takes_the_words_of_pdfium() -> None:
    apart = "BT /F1 10 Tf 5 Tc 14 TL 72 700 Td (Two ferries cross the sound) Tj T* (in every season.) Tj ET"
    pages = [apart, at(72, 700, "A third one is for winter.")]
    text = only(pdf_of(*pages)).text
    assert text == "Two ferries cross the sound in every season.\n\nA third one is for winter."


@pytest.mark.parametrize(
    ("stated", "title"),
    [("Har\0bour\x02 log", "Har bour log"), ("Harbour\ud83d log", "Harbour log"), ("\0\0", "a")],
)
def test_control_characters_in_what_a_pdf_states_cost_nothing(stated: str, title: str) -> None:
    info = (
        f"/Title <feff{as_utf16(stated)}> /Author <feff{as_utf16(stated)}> /CreationDate (D:\\0002)"
    )
    document = only(pdf_of(at(72, 700, "The harbour freezes late."), info=info))
    assert (document.text, document.title) == ("The harbour freezes late.", title)
    assert document.meta.get("author", "a") == title


def test_a_page_that_cannot_be_read_is_named_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    pages = [
        at(72, 700, f"Chapter {name} is about the harbour.") for name in ("one", "two", "three")
    ]
    pages[1] = ""
    data = pdf_of(*pages)
    (place, fault), (_, document) = read_file(Path("a.pdf"), io.BytesIO(data))
    assert isinstance(fault, UnreadPart)
    assert place == "a.pdf: page 2"
    assert str(fault).startswith("a.pdf: page 2: not a readable PDF (")
    assert isinstance(document, Document)
    assert [number for _, number in document.meta["pages"]] == [1, 3]
    assert "pages_without_text" not in document.meta
    Path("heap").mkdir()
    Path("heap/a.pdf").write_bytes(data)
    (skipped,) = collect([Path("heap")]).skipped()
    assert skipped["where"] == "a.pdf: page 2"
    (read,) = read_documents(Path("heap/a.pdf"))
    assert read.text == document.text
    assert "page 2: not a readable PDF" in caplog.text
