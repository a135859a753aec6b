"""PDFs whose letters are turned, run from right to left or stand apart, and PDFs with a fault in one place."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pypdf
import pytest
from pypdf.generic import ArrayObject, DictionaryObject, NameObject, StreamObject, read_object

from kinject.documents.boxes import in_logical_order
from kinject.documents.letters import Letter
from kinject.documents.readers import UnreadPart, read_file
from kinject.errors import InputError
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


def turned(degrees: float, content: str) -> str:
    """Return content that is drawn after a turn to the left around the middle of the page."""
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    x, y = 306 - 306 * cosine + 396 * sine, 396 - 306 * sine - 396 * cosine
    return f"q {cosine:.5f} {sine:.5f} {-sine:.5f} {cosine:.5f} {x:.3f} {y:.3f} cm {content} Q "


@pytest.mark.parametrize("degrees", [0.7, -4, 12, 86, 182.5, 25, 52, 231])
def test_lines_that_are_not_level_are_read_one_after_the_other(degrees: float) -> None:
    lines = [
        "The ice took the bridge of Arvika in March, and",
        "for two years a ferry went across the sound.",
    ]
    page = "".join(at(72, 600 - 12 * row, line) for row, line in enumerate(lines))
    assert only(pdf_of(turned(degrees, page))).text == " ".join(lines)


def test_raised_digits_of_a_pdf_stay_raised() -> None:
    page = (
        "BT /F1 10 Tf 72 700 Td (Over 3 x 10) Tj /F1 7 Tf 4 Ts (-8) Tj 0 Ts /F1 10 Tf ( m of H) Tj"
    )
    page += " /F1 7 Tf -2 Ts (2) Tj 0 Ts /F1 10 Tf (O by mill) Tj /F1 6.5 Tf 4 Ts (14) Tj ET"
    assert only(pdf_of(page)).text == "Over 3 x 10⁻⁸ m of H2O by mill¹⁴"


@pytest.mark.parametrize(
    ("raised", "text"),
    [("k-1", "^(k-1)"), ("-3t", "^(-3t)"), ("3/2", "^(3/2)"), ("th", "th"), ("b,2", "b,²")],
)
def test_an_exponent_with_letters_stays_one(raised: str, text: str) -> None:
    page = f"BT /F1 10 Tf 72 700 Td (It grows as v) Tj /F1 7 Tf 4 Ts ({raised}) Tj 0 Ts "
    assert only(pdf_of(f"{page}/F1 10 Tf (, they wrote.) Tj ET")).text == (
        f"It grows as v{text}, they wrote."
    )


@pytest.mark.parametrize("degrees", [0, 90, 270])
@pytest.mark.parametrize("upwards", [True, False])
def test_names_of_columns_that_stand_on_their_side_are_the_header(
    degrees: int, upwards: bool
) -> None:
    rules = [(60, y, 360, y) for y in (550, 450, 430, 410)]
    rules += [(x, 410, x, 550) for x in (60, 160, 260, 360)]
    page = "".join(f"{x0} {y0} m {x1} {y1} l S " for x0, y0, x1, y1 in rules)
    for column, name in enumerate(("Name of mill", "Pairs of stones", "Sacks")):
        matrix = f"0 -1 1 0 {110 + 100 * column} 540"
        if upwards:
            matrix = f"0 1 -1 0 {110 + 100 * column} 460"
        page += f"BT /F1 10 Tf {matrix} Tm ({name}) Tj ET "
    for row, cells in enumerate((("Kelm upper mill", "2", "31"), ("Arvika lower mill", "3", "47"))):
        page += "".join(at(70 + 100 * n, 436 - 20 * row, cell) for n, cell in enumerate(cells))
    page += at(60, 350, "The table is of the year in which the river was led away from all mills.")
    page += "BT /F1 8 Tf 0 1 -1 0 40 150 Tm (Archive 7) Tj ET"
    table = "| Name of mill | Pairs of stones | Sacks |\n| --- | --- | --- |\n"
    table += "| Kelm upper mill | 2 | 31 |\n| Arvika lower mill | 3 | 47 |"
    text = only(pdf_of(f"{TURNS[degrees]} cm {page}", rotate=degrees)).text
    assert text.startswith(f"{table}\n\nThe table is of")
    assert text.endswith("Archive 7")


def test_a_watermark_is_no_part_of_the_lines_that_it_crosses() -> None:
    lines = [f"Clause {row} of the lease of the mill is as it was in May and" for row in range(30)]
    page = "".join(at(72, 700 - 14 * row, line) for row, line in enumerate(lines))
    mark = turned(52, at(150, 390, "NOT SIGNED", 64))
    assert only(pdf_of(mark + page)).text == f"{' '.join(lines)}\n\nNOT SIGNED"


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_a_kerned_word_of_a_page_shown_turned_is_one_word(degrees: int) -> None:
    """PDFium puts its parts in another order, with white space between them."""
    word = "BT /F1 10 Tf 1 0 0 1 72 700 Tm (T) Tj 1 0 0 1 77 700 Tm (own hall) Tj ET"
    assert only(pdf_of(word, rotate=degrees)).text == "Town hall"


@pytest.mark.parametrize("degrees", [0, 90])
def test_columns_of_japanese_are_read_from_above(degrees: int) -> None:
    columns = ["山の駅は朝五時に開く。", "切符は窓口で買える。"]
    letters = "".join(columns)
    page = ""
    for number, column in enumerate(columns):
        for row, letter in enumerate(column):
            page += as_shown(letters, 400 - 20 * number, 700 - 10 * row, letter)
    assert only(pdf_of(page, letters=letters, rotate=degrees)).text == "".join(columns)


def test_a_hyphen_at_the_end_of_a_line_stays_where_it_parts_two_words() -> None:
    lines = ["The keeper, well-", "read and of fifty-", "four, had a half-", "brother in the light-",
             "house; both loved high-", "land winds, short-", "and long ones."]  # fmt: skip
    page = "".join(at(60, 700 - 14 * number, line) for number, line in enumerate(lines))
    assert only(pdf_of(page)).text == (
        "The keeper, well-read and of fifty-four, had a half-brother in the lighthouse; "
        "both loved highland winds, short- and long ones."
    )


def test_the_hyphen_that_browsers_draw_parts_a_word_as_any_other() -> None:
    lines = ["the harbour was en\u2010", "larged by the well\u2010", "known keeper"]
    letters = "".join(sorted(set("".join(lines))))
    page = "".join(
        as_shown(letters, 60, 700 - 14 * number, line) for number, line in enumerate(lines)
    )
    text = only(pdf_of(page, letters=letters)).text
    assert text == "the harbour was enlarged by the well-known keeper"


def test_lines_below_a_heading_over_two_columns_are_one_paragraph() -> None:
    page = at(60, 740, "The keepers of the lighthouse of Kelm", 20)
    for number in range(12):
        page += at(60, 700 - 12 * number, f"Keeper {number} of many that have lived")
        page += at(320, 700 - 12 * number, f"on the rock {number} for years and years")
    assert only(pdf_of(page)).text.count("\n\n") == 1


def two_columns(x: float) -> str:
    """Return the content of two columns of prose, the right one from `x` on."""
    page = ""
    for number in range(9):
        page += at(60, 760 - 15 * number, f"pilot {number} of the harbour steers", 12)
        page += at(x, 760 - 15 * number, f"the barge {number} past the mole and", 12)
    return page


@pytest.mark.parametrize("scale", [1, 0.8, 0.5])
def test_columns_of_a_page_that_is_scaled_are_those_of_the_page_as_seen(scale: float) -> None:
    page = f"q {scale} 0 0 {scale} 0 0 cm {two_columns(217)} Q"
    text = only(pdf_of(page)).text
    assert text.startswith("pilot 0 of the harbour steers pilot 1 of the harbour steers pilot 2")
    assert text.endswith("the barge 7 past the mole and the barge 8 past the mole and")


def test_a_heading_of_one_column_is_none_of_the_line_beside_it() -> None:
    page = at(60, 778, "Pilots of 1874", 22) + at(240, 778, "who had sailed in May", 12)
    text = only(pdf_of(page + two_columns(240))).text
    assert text.startswith("# Pilots of 1874\n\npilot 0 of the harbour steers pilot 1")
    assert "who had sailed in May the barge 0 past" in text


def rows_of(rows: Sequence[Sequence[str]], xs: Sequence[float] = (60, 200, 320, 440)) -> list[str]:
    """Return the lines of the table that is read where these rows stand on a page without rules."""
    page = ""
    for number, row in enumerate(rows):
        for x, cell in zip(xs, row, strict=False):
            page += at(x, 700 - 20 * number, cell)
    lines = only(pdf_of(page)).text.splitlines()
    del lines[1]
    return lines


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (["", "2019", "2020"], ["Kelm", "12", "30"]),
        (["", "Tall", "Old"], ["Oak", "yes", "no"]),
        (["Kelm", "", "30"], ["Torv", "14", "31"]),
        (["Kelm", "", "yes"], ["Torv", "east", "no"]),
        (["Year", "Price in marks", ""], ["1931", "14", "31"]),
    ],
)
def test_a_first_row_with_an_empty_cell_is_no_header_of_two_rows(
    first: list[str], second: list[str]
) -> None:
    """The values of the next row became a part of the header: "2019 12"."""
    rows = [first, second, ["Elm", "18", "35"], ["Ash", "20", "37"]]
    assert rows_of(rows) == [f"| {' | '.join(row)} |" for row in rows]


@pytest.mark.parametrize(
    "places",
    [
        {"Boats": 200, "Cranes": 440},  # where their columns begin
        {"Boats": 240, "Cranes": 430},  # over the middle, of the space between two columns as well
        {"Boats in port": 245, "Cranes": 432},
        {"Boats": 314, "Cranes": 426},  # where they end
    ],
)
def test_names_over_several_columns_are_a_header_with_the_names_below_them(
    places: dict[str, float],
) -> None:
    rows = [["Pier", "east", "west", "all"], ["A", "14", "31", "4"], ["B", "15", "33", "5"]]
    page = "".join(at(x, 720, name) for name, x in places.items())
    for number, row in enumerate(rows):
        for x, cell in zip((60, 200, 320, 440), row, strict=True):
            page += at(x, 700 - 20 * number, cell)
    header, _, *body = only(pdf_of(page)).text.splitlines()
    boats, cranes = places
    assert header == f"| Pier | {boats} east | {boats} west | {cranes} all |"
    assert body == ["| A | 14 | 31 | 4 |", "| B | 15 | 33 | 5 |"]


def test_texts_apart_over_one_column_of_a_table_without_rules_are_all_kept() -> None:
    """The second was written over the first."""
    page = at(160, 720, "Read") + at(215, 720, "aloud")
    rows = (
        ("name", "what", "year"),
        ("Ada Holm", "the tides of Kelm and Torv", "1934"),
        ("Per Dahl", "the lamps of Lowmere", "1968"),
    )
    for number, row in enumerate(rows):
        page += "".join(
            at(x, 700 - 20 * number, text) for x, text in zip((60, 160, 400), row, strict=True)
        )
    header, _, *body = only(pdf_of(page)).text.splitlines()
    assert header == "|  | Read aloud |  |"
    assert body == [f"| {' | '.join(row)} |" for row in rows]


def test_letters_that_a_pdf_names_itself_are_lines_and_no_table() -> None:
    """Of these PDFium gives the ink as the box, as in what Chromium prints of Arabic."""
    text = "تصل السفينة مساء إلى الجسر"
    letters = [*map(chr, range(0xE000, 0xE00B)), *text]
    codes = {letter: code for code, letter in enumerate(dict.fromkeys(letters), start=33)}
    page = ""
    for place, letter in enumerate(text):
        name = f"/Span << /ActualText <feff{as_utf16(letter)}> >> BDC"
        shown = f"BT /F2 10 Tf {500 - 4.2 * place:.2f} 700 Td <{codes[letter]:02x}> Tj ET"
        page += "" if letter == " " else f"{name} {shown} EMC "
    found = only(pdf_of(page, letters=letters)).text
    assert found.replace(" ", "") == text.replace(" ", "")


def test_marks_within_the_drawing_of_their_letter_belong_to_it() -> None:
    """As PDFium gives a letter and its vowels that a font draws as one: parts of one box."""
    places = [
        ("ב", 60, 66),
        ("ָ", 54, 60),
        ("ר", 46, 53),
        ("ו", 43, 46),
        ("ּ", 40, 43),
        ("ךְ", 30, 38),
    ]
    letters = [
        Letter(x0, 0, x1, 12, text, 12, number, 0) for number, (text, x0, x1) in enumerate(places)
    ]
    assert "".join(letter.text for letter in in_logical_order(letters, False)) == "בָרוּךְ"


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


def with_form(
    page: str, *notes: DictionaryObject, form: str = "", is_dynamic: bool = False
) -> bytes:
    """Return a PDF of one page with `notes` above it, which are the fields of its form."""
    writer = pypdf.PdfWriter(clone_from=pypdf.PdfReader(io.BytesIO(pdf_of(page))))
    for note in notes:
        if "/AP" in note:
            note["/AP"][NameObject("/N")] = writer._add_object(note["/AP"]["/N"])
    references = ArrayObject(writer._add_object(note) for note in notes)
    writer.pages[0][NameObject("/Annots")] = references
    stated = parsed(f"/DA (/Helv 10 Tf) {form}")
    stated[NameObject("/Fields")] = references
    writer.root_object.update(parsed(f"/NeedsRendering {str(is_dynamic).lower()}"))
    writer.root_object[NameObject("/AcroForm")] = stated
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def parsed(entries: str) -> DictionaryObject:
    return read_object(io.BytesIO(f"<< {entries} >>".encode()), None)


def above(x: float, y: float, text: str, entries: str) -> DictionaryObject:
    """Return an annotation that shows `text`, or nothing of its own."""
    note = parsed(f"/Type /Annot /Rect [{x} {y - 4} {x + 160} {y + 10}] /F 4 {entries}")
    if text:
        font = "<< /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >>"
        look = StreamObject()
        look.update(parsed(f"/Subtype /Form /BBox [0 0 160 14] /Resources << /Font {font} >>"))
        look.set_data(at(2, 4, text).encode())
        note[NameObject("/AP")] = DictionaryObject({NameObject("/N"): look})
    return note


def test_what_was_typed_into_a_form_or_onto_a_page_is_read_and_buttons_are_not() -> None:
    page = at(72, 700, "Name of the boat:") + at(72, 670, "Home port:")
    page += at(72, 640, "Berth:") + at(72, 610, "Seal of the harbour:")
    field = "/Subtype /Widget /FT /Tx /T (f{0}) /V ({0})"
    data = with_form(
        page,
        above(156, 700, "Una", field.format("Una")),
        above(124, 670, "", field.format("Arvika")),
        above(104, 640, "14 west", "/Subtype /FreeText /Contents (14 west)"),
        above(170, 610, "Send", "/Subtype /Widget /FT /Btn /T (send) /Ff 65536"),
        above(72, 560, "Why west?", "/Subtype /Text /Contents (Why\nwest?) /T (Mara)"),
        above(72, 540, "PAID", "/Subtype /Stamp /Contents (Paid in May)"),
        above(72, 520, "", "/Subtype /Text /Contents ()"),
    )
    text = "Name of the boat: Una\n\nHome port: Arvika\n\nBerth: 14 west\n\nSeal of the harbour:"
    text += "\n\nComment on page 1 by Mara: Why west?\n\nComment on page 1: Paid in May"
    assert only(data).text == text


def test_a_form_that_only_adobe_shows_is_no_document() -> None:
    """Its one page says that it is not the form."""
    page, form = at(72, 700, "Please wait..."), "/XFA [(template) (<a/>)]"
    assert only(with_form(page, form=form)).text == "Please wait..."
    data = with_form(page, form=form, is_dynamic=True)
    ((_, fault),) = read_file(Path("a.pdf"), io.BytesIO(data))
    assert isinstance(fault, InputError)
    assert "only Adobe's programs show" in str(fault)
