"""Word documents, slides and workbooks: each is packed here by hand, part by part."""

from __future__ import annotations

import io
import re
import zipfile
from pathlib import Path

import openpyxl
import pytest

from kinject.documents.numbering import item_number
from kinject.documents.readers import ReadOptions, read_file
from kinject.errors import InputError
from kinject.types import Document

_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006"
_WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_SHEET = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_SLIDE = "http://schemas.openxmlformats.org/presentationml/2006/main"
_ART = "http://schemas.openxmlformats.org/drawingml/2006"
_NAMES = (
    f'xmlns:w="{_WORD}" xmlns:m="{_OFFICE}/math" xmlns:r="{_OFFICE}/relationships" xmlns:a="{_ART}/main" '
    f'xmlns:c="{_ART}/chart" xmlns:p="{_SLIDE}" xmlns:o="urn:schemas-microsoft-com:office:office" '
    'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006" '
    'xmlns:dc="http://purl.org/dc/elements/1.1/"'
)
_MAIN = {"docx": "word/document.xml", "xlsx": "xl/workbook.xml", "pptx": "ppt/presentation.xml"}


def named(tag: str, content: str) -> str:
    return f"<{tag} {_NAMES}>{content}</{tag}>"


def relations(*targets: tuple[str, str]) -> str:
    """(kind, target) of each relation; its id is rId and its number."""
    entries = [
        f'<Relationship Id="rId{number}" Type="{_OFFICE}/relationships/{kind}" Target="{target}"/>'
        for number, (kind, target) in enumerate(targets, start=1)
    ]
    start = '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
    return f"{start}{''.join(entries)}</Relationships>"


def packed(kind: str, main: str, targets: tuple[tuple[str, str], ...], **parts: str) -> bytes:
    """The file of a kind: its main part, what that refers to, and other parts by their names."""
    folder, name = _MAIN[kind].split("/")
    members = {
        "[Content_Types].xml": "<Types/>",
        "_rels/.rels": relations(("officeDocument", _MAIN[kind])),
        _MAIN[kind]: main,
        f"{folder}/_rels/{name}.rels": relations(*targets),
        **{f"{folder}/{part}": content for part, content in parts.items()},
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return out.getvalue()


def word(body: str, *targets: tuple[str, str], **parts: str) -> bytes:
    return packed("docx", named("w:document", f"<w:body>{body}</w:body>"), targets, **parts)


def paragraph(content: str) -> str:
    return f"<w:p>{content}</w:p>"


def run(text: str) -> str:
    return f"<w:r><w:t>{text}</w:t></w:r>"


def cell(content: str) -> str:
    return f"<w:tc>{content}</w:tc>"


def row(*texts: str) -> str:
    return f"<w:tr>{''.join(cell(paragraph(run(text))) for text in texts)}</w:tr>"


def read(name: str, data: bytes) -> tuple[str, list[str]]:
    """The text of a file, and what of it is named as not read."""
    text, faults = "", []
    for location, document in read_file(Path(name), io.BytesIO(data), ReadOptions()):
        if isinstance(document, InputError):
            faults.append(str(document))
            assert str(document).startswith(location)
        else:
            assert isinstance(document, Document)
            text = document.text
    return text, faults


def test_notes_and_comments_stand_below_the_text_as_footnotes_do() -> None:
    mark = '<w:r><w:{}Reference w:id="{}"/></w:r>'
    body = paragraph(run("The mill ground rye") + mark.format("endnote", 7) + run(" until 1884."))
    body += paragraph(run("It burned.") + mark.format("footnote", 2) + mark.format("comment", 0))
    body += paragraph("<w:del>" + mark.format("comment", 5) + "</w:del>" + run("Rebuilt in brick."))
    notes = {
        "endnotes": '<w:endnote w:id="0"><w:p/></w:endnote><w:endnote w:id="7">'
        + paragraph(run("Ledger, folio 12."))
        + "</w:endnote>",
        "footnotes": f'<w:footnote w:id="2">{paragraph(run("At night."))}</w:footnote>',
        "comments": f'<w:comment w:id="0" w:author="Ines Falk">{paragraph(run("Which year?"))}</w:comment>'
        f'<w:comment w:id="5" w:author="Ines Falk">{paragraph(run("Unseen."))}</w:comment>',
    }
    parts = {f"{kind}.xml": named(f"w:{kind}", content) for kind, content in notes.items()}
    text, faults = read("a.docx", word(body, *((kind, f"{kind}.xml") for kind in notes), **parts))
    assert text == (
        "The mill ground rye[^e1] until 1884.\n\nIt burned.[^1][^c1]\n\nRebuilt in brick.\n\n"
        "[^e1]: Ledger, folio 12.\n\n[^1]: At night.\n\n[^c1]: Comment by Ines Falk: Which year?"
    )
    assert faults == []


def test_notes_that_are_missing_are_named() -> None:
    body = paragraph(run("Cast in 1790.") + '<w:r><w:footnoteReference w:id="3"/></w:r>')
    for targets, parts in (((), {}), ((("footnotes", "notes.xml"),), {"notes.xml": "<w:footnot"})):
        text, faults = read("a.docx", word(body, *targets, **parts))
        assert text == "Cast in 1790.[^1]"
        assert faults == [
            "a.docx: footnotes: missing from the file, or damaged. Save the file again."
        ]


def test_a_table_in_a_text_box_and_in_a_frame_is_a_table() -> None:
    table = f"<w:tbl>{row('Lock', 'Fall')}{row('Arvid', '3.4 m')}</w:tbl>"
    box = f"<w:txbxContent>{paragraph(run('Locks'))}{table}</w:txbxContent>"
    drawn = "<mc:Choice><w:drawing>{0}</w:drawing></mc:Choice><mc:Fallback>{0}</mc:Fallback>"
    shape = f"<w:r><mc:AlternateContent>{drawn}</mc:AlternateContent></w:r>"
    markdown = "| Lock | Fall |\n| --- | --- |\n| Arvid | 3.4 m |"
    text, _ = read("a.docx", word(paragraph(run("Canal") + shape.format(box))))
    assert text == f"Canal\n\nLocks\n\n{markdown}"
    frame = f"<w:tbl><w:tr>{cell(table + paragraph(''))}</w:tr></w:tbl>"
    text, _ = read("a.docx", word(frame))
    assert text == markdown
    cells = cell(paragraph(run("North"))) + cell(paragraph(shape.format(box)))
    boxed = f"<w:tbl>{row('Gate', 'Note')}<w:tr>{cells}</w:tr></w:tbl>"
    text, _ = read("a.docx", word(boxed))
    assert text.endswith("| North | Locks Lock Fall Arvid 3.4 m |")


def test_a_table_in_a_cell_stands_below_under_the_name_of_its_row() -> None:
    inner = f"<w:tbl>{row('Month', 'Height')}{row('May', '2.1 m')}</w:tbl>"
    holder = cell(paragraph(run("Arvid"))) + cell(paragraph(run("open")) + inner)
    document = word(f"<w:tbl>{row('Lock', 'Heights')}<w:tr>{holder}</w:tr></w:tbl>")
    page = (
        "<table><tr><th>Lock</th><th>Heights</th></tr><tr><td>Arvid</td><td>open<table>"
        "<tr><td>Month</td><td>Height</td></tr><tr><td>May</td><td>2.1 m</td></tr>"
        "</table></td></tr></table>"
    )
    expected = (
        "| Lock | Heights |\n| --- | --- |\n| Arvid | open |\n\nArvid:\n\n"
        "| Month | Height |\n| --- | --- |\n| May | 2.1 m |"
    )
    for name, data in (("a.docx", document), ("a.html", page.encode())):
        assert read(name, data)[0] == expected


def test_paragraphs_and_rows_with_a_fallback_are_read_once() -> None:
    def newer(content: str, older: str) -> str:
        choice = f'<mc:Choice Requires="w16">{content}</mc:Choice>'
        return (
            f"<mc:AlternateContent>{choice}<mc:Fallback>{older}</mc:Fallback></mc:AlternateContent>"
        )

    body = newer(paragraph(run("Low water")) + paragraph(run("at five.")), paragraph(run("Low.")))
    body += f"<w:tbl>{row('Day', 'Tide')}{newer(row('Friday', '2 m'), row('Fri', '2'))}</w:tbl>"
    assert read("a.docx", word(body))[0] == (
        "Low water\n\nat five.\n\n| Day | Tide |\n| --- | --- |\n| Friday | 2 m |"
    )


def test_a_column_of_names_is_a_table_and_a_column_of_sentences_is_text() -> None:
    names = f"<w:tbl>{row('Tools in the shed')}{row('long saw')}{row('hoe')}</w:tbl>"
    text, _ = read("a.docx", word(names))
    assert text == "| Tools in the shed |\n| --- |\n| long saw |\n| hoe |"
    box = f"<w:tbl>{row('Warning')}{row('The shed is locked at nine.')}</w:tbl>"
    text, _ = read("a.docx", word(box))
    assert text == "Warning\nThe shed is locked at nine."


def test_a_table_without_a_text_costs_nothing_but_itself() -> None:
    empty = f"<w:tbl>{row('', '', '')}{row('', '', '')}</w:tbl>"
    assert read("a.docx", word(empty + paragraph(run("Below."))))[0] == "Below."
    page = b"<table><tr><td></td><td></td></tr><tr><td></td><td></td></tr></table><p>Below.</p>"
    assert read("a.html", page)[0] == "Below."


def test_a_header_goes_on_in_a_row_that_parts_its_merged_cells() -> None:
    wide = "<w:tcPr><w:gridSpan w:val='2'/></w:tcPr>"
    header = f"<w:tr>{cell(paragraph(run('Lock')))}{cell(wide + paragraph(run('Gate')))}</w:tr>"
    parted = f"<w:tbl>{header}{row('', 'old', 'new')}{row('Arvid', '2', '3')}</w:tbl>"
    text, _ = read("a.docx", word(parted))
    assert text == "| Lock | Gate old | Gate new |\n| --- | --- | --- |\n| Arvid | 2 | 3 |"
    same = f"<w:tr>{cell(paragraph(run('Kelm')))}{cell(wide + paragraph(run('shut')))}</w:tr>"
    text, _ = read("a.docx", word(f"<w:tbl>{header}{same}{row('Arvid', '2', '3')}</w:tbl>"))
    assert text.startswith("| Lock | Gate | Gate |\n| --- | --- | --- |\n| Kelm | shut | shut |")


@pytest.mark.parametrize(
    ("header", "values", "first"),
    [
        ((("Skipper", 2), ("Age", 1)), ("Ada", "Holm", "51"), "| Ada | Holm | 51 |"),
        ((("Pier", 1), ("Boats", 2)), ("north", "few", "none"), "| north | few | none |"),
        ((("Sea", 2), ("Depth", 1)), ("Kelm Bay", "max", "-8.5 m"), "| Kelm Bay | max | -8.5 m |"),
    ],
)
def test_values_below_a_header_with_merged_cells_are_no_header(
    header: tuple[tuple[str, int], ...], values: tuple[str, ...], first: str
) -> None:
    cells = [
        cell(f"<w:tcPr><w:gridSpan w:val='{n}'/></w:tcPr>{paragraph(run(name))}")
        for name, n in header
    ]
    body = row(*values) + row("oak", "ash", "7")
    names = [name for name, n in header for _ in range(n)]
    book = openpyxl.Workbook()
    book.active.append(
        [name if name not in names[:index] else None for index, name in enumerate(names)]
    )
    book.active.append(values)
    book.active.append(["oak", "ash", "7"])
    merged = next(index for index, name in enumerate(names) if names.count(name) > 1) + 1
    book.active.merge_cells(start_row=1, end_row=1, start_column=merged, end_column=merged + 1)
    sheet = io.BytesIO()
    book.save(sheet)
    table = f"| {' | '.join(names)} |\n| --- | --- | --- |\n{first}\n| oak | ash | 7 |"
    assert read("a.docx", word(f"<w:tbl><w:tr>{''.join(cells)}</w:tr>{body}</w:tbl>"))[0] == table
    assert read("a.xlsx", sheet.getvalue())[0].endswith(table)


def test_a_group_of_one_column_in_a_header_goes_on_below() -> None:
    wide = "<w:tcPr><w:gridSpan w:val='2'/></w:tcPr>" + paragraph(run("2022"))
    header = f"<w:tr>{cell(paragraph(''))}{cell(wide)}{cell(paragraph(run('2023')))}</w:tr>"
    names = row("Pier", "May", "June", "May")
    text, _ = read("a.docx", word(f"<w:tbl>{header}{names}{row('west', '4', '5', '6')}</w:tbl>"))
    assert text.startswith("| Pier | 2022 May | 2022 June | 2023 May |\n| --- ")


def test_cells_that_older_programs_merge_are_one() -> None:
    def merged(value: str, text: str) -> str:
        kind = f'<w:tcPr><w:hMerge w:val="{value}"/></w:tcPr>'
        return cell(kind + paragraph(run(text)))

    top = cell(paragraph(run("Lock"))) + merged("restart", "Opens")
    top += merged("continue", "") + "<w:tc><w:tcPr><w:hMerge/></w:tcPr><w:p/></w:tc>"
    table = f"<w:tr>{top}</w:tr>" + row("", "May", "June", "July") + row("Kelm", "5", "6", "8")
    assert read("a.docx", word(f"<w:tbl>{table}</w:tbl>"))[0] == (
        "| Lock | Opens May | Opens June | Opens July |\n| --- | --- | --- | --- |\n"
        "| Kelm | 5 | 6 | 8 |"
    )


def test_items_have_the_numbers_that_word_shows() -> None:
    level = '<w:lvl w:ilvl="0"><w:start w:val="{}"/><w:numFmt w:val="decimal"/></w:lvl>'
    lists = ""
    for name, start in (("7", 1), ("8", 5)):
        lists += f'<w:abstractNum w:abstractNumId="{name}">{level.format(start)}</w:abstractNum>'
    again = '<w:lvlOverride w:ilvl="0"><w:startOverride w:val="1"/></w:lvlOverride>'
    for name, list_id, override in (
        ("1", "7", ""),
        ("2", "7", ""),
        ("3", "7", again),
        ("4", "8", ""),
    ):
        link = f'<w:abstractNumId w:val="{list_id}"/>{override}'
        lists += f'<w:num w:numId="{name}">{link}</w:num>'
    body = ""
    # The second numbering of the list goes on, the third begins again, the other list at five.
    for name in "1122" + "331" + "44":
        numbering = f'<w:numPr><w:ilvl w:val="0"/><w:numId w:val="{name}"/></w:numPr>'
        body += paragraph(f"<w:pPr>{numbering}</w:pPr>" + run("oar"))
    part = {"numbering.xml": named("w:numbering", lists)}
    text, _ = read("a.docx", word(body, ("numbering", "numbering.xml"), **part))
    assert re.findall(r"\d+", text) == ["1", "2", "3", "4", "1", "2", "3", "5", "6"]


def test_numbers_of_headings_and_clauses_are_those_that_word_shows() -> None:
    def level(depth: int, kind: str, template: str) -> str:
        content = f'<w:numFmt w:val="{kind}"/><w:lvlText w:val="{template}"/>'
        return f'<w:lvl w:ilvl="{depth}">{content}</w:lvl>'

    def item(name: int, depth: int, text: str, more: str = "") -> str:
        numbering = f'<w:numPr><w:ilvl w:val="{depth}"/><w:numId w:val="{name}"/></w:numPr>'
        return paragraph(f"<w:pPr>{numbering}{more}</w:pPr>{run(text)}")

    clauses = (
        level(0, "decimal", "§ %1") + level(1, "decimal", "%1.%2") + level(2, "lowerLetter", "(%3)")
    )
    lists = f'<w:abstractNum w:abstractNumId="0">{clauses}</w:abstractNum>'
    lists += f'<w:abstractNum w:abstractNumId="1"><w:styleLink w:val="S"/>{level(0, "upperRoman", "%1.")}</w:abstractNum>'
    lists += '<w:abstractNum w:abstractNumId="2"><w:numStyleLink w:val="S"/></w:abstractNum>'
    for name in (0, 2):
        lists += f'<w:num w:numId="{name + 1}"><w:abstractNumId w:val="{name}"/></w:num>'
    outline = '<w:outlineLvl w:val="{}"/>'
    body = item(1, 0, "Piers", outline.format(0)) + item(1, 0, "Fees", outline.format(0))
    body += item(1, 1, "Boats", outline.format(1)) + item(1, 2, "rowed") + item(1, 2, "sailed")
    body += "".join(item(3, 0, text) for text in ("oar", "rope", "sail", "keel"))
    part = {"numbering.xml": named("w:numbering", lists)}
    text, _ = read("a.docx", word(body, ("numbering", "numbering.xml"), **part))
    assert text == (
        "# § 1 Piers\n\n# § 2 Fees\n\n## 2.1 Boats\n\n    (a) rowed\n    (b) sailed\n"
        "I. oar\nII. rope\nIII. sail\nIV. keel"
    )


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        # A second level that no item above restarts, and one in decimal numbers of the law.
        ((("upperRoman", "%1.", ""), ("decimal", "(%2)", '<w:lvlRestart w:val="0"/>')), "I. (1) (2) II. (3)"),
        ((("upperRoman", "Art. %1", ""), ("decimalZero", "%1.%2", "<w:isLgl/>")), "Art. I 1.01 1.02 Art. II 2.01"),
        ((("upperRoman", "%1", ""), ("decimal", "%1.%2", '<w:isLgl w:val="0"/>')), "I I.1 I.2 II II.1"),
        ((("chineseCounting", "第%1章", ""), ("decimal", "%2", "")), "第一章 1 2 第二章 1"),
    ],
)  # fmt: skip
def test_numbers_of_laws_and_contracts_are_those_that_word_shows(
    levels: tuple[tuple[str, str, str], ...], expected: str
) -> None:
    content = ""
    for depth, (kind, template, more) in enumerate(levels):
        content += f'<w:lvl w:ilvl="{depth}"><w:numFmt w:val="{kind}"/>{more}<w:lvlText w:val="{template}"/></w:lvl>'
    lists = f'<w:abstractNum w:abstractNumId="4">{content}</w:abstractNum>'
    lists += '<w:num w:numId="9"><w:abstractNumId w:val="4"/></w:num>'
    body = ""
    for depth in (0, 1, 1, 0, 1):
        numbering = f'<w:numPr><w:ilvl w:val="{depth}"/><w:numId w:val="9"/></w:numPr>'
        body += paragraph(f"<w:pPr>{numbering}</w:pPr>{run('x')}")
    part = {"numbering.xml": named("w:numbering", lists)}
    text, _ = read("a.docx", word(body, ("numbering", "numbering.xml"), **part))
    assert text.replace("x", "").split() == expected.split()


def test_numbers_below_a_hundred_in_chinese() -> None:
    shown = [item_number(n, "一") for n in (7, 10, 13, 30, 84, 100)]
    assert shown == ["七", "十", "十三", "三十", "八十四", "100"]


def test_a_paragraph_whose_end_was_deleted_goes_on_in_the_next_one() -> None:
    lists = '<w:abstractNum w:abstractNumId="0"><w:lvl w:ilvl="0"><w:numFmt w:val="decimal"/>'
    lists += '</w:lvl></w:abstractNum><w:num w:numId="1"><w:abstractNumId w:val="0"/></w:num>'
    gone = "<w:rPr><w:del/></w:rPr>"
    numbered = '<w:numPr><w:numId w:val="1"/></w:numPr>'
    deleted = "<w:del><w:r><w:delText>Reef the sail.</w:delText></w:r></w:del>"
    body = paragraph(f"<w:pPr>{gone}</w:pPr>" + run("The lock was shut "))
    body += paragraph(run("until May."))
    body += paragraph(f"<w:pPr>{numbered}</w:pPr>" + run("Row."))
    body += paragraph(f"<w:pPr>{numbered}{gone}</w:pPr>" + deleted)
    body += paragraph(f"<w:pPr>{numbered}</w:pPr>" + run("Land."))
    part = {"numbering.xml": named("w:numbering", lists)}
    text, _ = read("a.docx", word(body, ("numbering", "numbering.xml"), **part))
    assert text == "The lock was shut until May.\n\n1. Row.\n2. Land."


def style(name: str, above: str, properties: str) -> str:
    head = f'<w:name w:val="{name}"/><w:basedOn w:val="{above}"/>'
    return f'<w:style w:styleId="{name}">{head}{properties}</w:style>'


def test_items_of_a_style_that_extends_a_list_are_items() -> None:
    lists = '<w:abstractNum w:abstractNumId="0"><w:lvl w:ilvl="0"><w:numFmt w:val="lowerRoman"/>'
    lists += '<w:lvlText w:val="%1)"/></w:lvl></w:abstractNum>'
    lists += '<w:num w:numId="6"><w:abstractNumId w:val="0"/></w:num>'
    number, none = (f'<w:pPr><w:numPr><w:numId w:val="{n}"/></w:numPr></w:pPr>' for n in (6, 0))
    styles = style("Steps", "Body", number) + style("Duties", "Steps", "")
    styles += style("Night duties", "Duties", "") + style("Remark", "Duties", none)
    styles += style("Round", "Round", "") + style("Dots", "List Bullet", "")
    styles += '<w:style w:styleId="List Bullet"><w:name w:val="List Bullet"/></w:style>'
    body = ""
    for name, text in (
        ("Duties", "lamp"),
        ("Remark", "Oil is in the shed."),
        ("Night duties", "horn"),
        ("Round", "Ask the keeper."),
        ("Dots", "wick"),
    ):
        body += paragraph(f'<w:pPr><w:pStyle w:val="{name}"/></w:pPr>{run(text)}')
    parts = {"numbering.xml": named("w:numbering", lists), "s.xml": named("w:styles", styles)}
    data = word(body, ("numbering", "numbering.xml"), ("styles", "s.xml"), **parts)
    assert read("a.docx", data) == (
        "i) lamp\n\nOil is in the shed.\n\nii) horn\n\nAsk the keeper.\n\n- wick",
        [],
    )


def field(kind: str, settings: str = "") -> str:
    return f'<w:r><w:fldChar w:fldCharType="{kind}">{settings}</w:fldChar></w:r>'


def test_only_the_result_of_a_field_is_text_and_a_form_shows_what_was_chosen() -> None:
    code = "<w:r><w:instrText> {} </w:instrText></w:r>"
    inner = (
        field("begin") + code.format("REF day") + field("separate") + run("Sunday") + field("end")
    )
    whole = field("begin") + code.format("IF") + inner + code.format("= Sunday") + field("separate")
    box = '<w:ffData><w:checkBox><w:default w:val="0"/>{}</w:checkBox></w:ffData>'
    choices = "".join(f'<w:listEntry w:val="{name}"/>' for name in ("East", "West", "North"))
    chosen = f'<w:ffData><w:ddList><w:result w:val="2"/>{choices}</w:ddList></w:ffData>'
    body = paragraph(run("The ferry is ") + whole + run("closed") + field("end") + run(" today."))
    for settings in (box.format(""), box.format("<w:checked/>"), chosen):
        body += paragraph(
            field("begin", settings) + code.format("FORM") + field("end") + run(" pier")
        )
    assert read("a.docx", word(body)) == (
        "The ferry is closed today.\n\n☐ pier\n\n☒ pier\n\nNorth pier",
        [],
    )


def test_hidden_text_large_first_letters_and_inserted_files_of_word() -> None:
    hidden = "<w:r><w:rPr><w:vanish/></w:rPr><w:t> (draft)</w:t></w:r>"
    shown = '<w:r><w:rPr><w:vanish w:val="0"/></w:rPr><w:t> now</w:t></w:r>'
    frame = '<w:pPr><w:framePr w:dropCap="margin" w:lines="2"/></w:pPr>'
    body = paragraph(run("Open") + hidden + shown) + paragraph(frame + run("B"))
    body += paragraph(run("oats wait.")) + '<w:altChunk r:id="rId1"/><w:altChunk r:id="rId2"/>'
    web = "MIME-Version: 1.0\nContent-Type: multipart/related; boundary=b\n\n--b\n"
    web += "Content-Type: text/html\n\n<p>Tides and <b>moons</b>.</p>\n--b--\n"
    text, faults = read(
        "a.docx", word(body, ("aFChunk", "t.mht"), ("aFChunk", "gone.htm"), **{"t.mht": web})
    )
    assert text == "Open now\n\nBoats wait.\n\nTides and moons."
    assert [fault.partition(": ")[2] for fault in faults] == [
        "inserted file: missing from the file, or damaged. Insert it again."
    ]


def test_text_is_hidden_by_the_style_of_its_run_or_paragraph() -> None:
    vanish = "<w:rPr><w:vanish/></w:rPr>"
    styles = style("Form", "", vanish) + style("Form end", "Form", "")
    styles += style("Aside", "", vanish) + style("Late aside", "Aside", "")
    styles += style("Open aside", "Aside", '<w:rPr><w:vanish w:val="false"/></w:rPr>')

    def styled(name: str, text: str) -> str:
        return f'<w:r><w:rPr><w:rStyle w:val="{name}"/></w:rPr><w:t>{text}</w:t></w:r>'

    body = paragraph('<w:pPr><w:pStyle w:val="Form end"/></w:pPr>' + run("Bottom of form"))
    body += paragraph(run("Low") + styled("Late aside", " (ask)") + styled("Open aside", " tide"))
    data = word(body, ("styles", "s.xml"), **{"s.xml": named("w:styles", styles)})
    assert read("a.docx", data) == ("Low tide", [])


def test_text_that_is_struck_through_is_not_read() -> None:
    struck = "<w:r><w:rPr><w:{}/></w:rPr><w:t>six</w:t></w:r>"
    body = struck.format("strike") + struck.format("dstrike") + struck.format('strike w:val="0"')
    assert read("a.docx", word(paragraph(run("At ") + body))) == ("At six", [])
    runs = "<a:p><a:r><a:rPr strike='{}'/><a:t>Oak</a:t></a:r><a:r><a:t> elm</a:t></a:r></a:p>"
    lines = runs.format("sngStrike") + runs.format("noStrike")
    text, _ = read("a.pptx", deck(slide("Hull", shape(0, 0, lines))))
    assert text == "## Hull\n\n- elm\n- Oak elm"
    cell = '<row r="1"><c r="A1" t="inlineStr"><is><r><rPr><strike/></rPr><t>7</t></r><r><t>8</t></r></is></c></row>'
    assert read("a.xlsx", workbook(cell))[0].endswith("\n\n8")


def test_signs_of_fonts_are_those_that_a_reader_sees() -> None:
    font = '<w:rPr><w:rFonts w:ascii="Symbol" w:hAnsi="Symbol"/></w:rPr>'
    sign = '<w:r><w:sym w:font="{}" w:char="{}"/></w:r>'
    body = paragraph(
        run("40 ") + sign.format("Symbol", "F057") + run(", t ") + f"<w:r>{font}<w:t>³</w:t></w:r>"
    )
    body += paragraph(
        sign.format("Wingdings", "F0FC") + run(" paid ") + sign.format("Wingdings 2", "00A3")
    )
    assert read("a.docx", word(body))[0] == "40 Ω, t ≥\n\n✔ paid ☐"


@pytest.mark.parametrize(
    ("instruction", "shown"),
    [
        ('SYMBOL 87 \\f "Symbol" \\s 11', "Ω"),
        ('symbol 0xF0FC \\f "Wingdings"', "✔"),
        ("SYMBOL 176 \\f Symbol", "°"),
        ("SYMBOL 128", "€"),
        ("SYMBOL 0x3A9 \\u", "Ω"),
        ('SYMBOL 52 \\f "Webdings"', ""),
        ("PAGE", ""),
    ],
)
def test_a_field_for_a_sign_shows_the_sign(instruction: str, shown: str) -> None:
    # Word may part an instruction into runs.
    runs = [f"<w:r><w:instrText> {instruction[:10]}</w:instrText></w:r>"]
    runs.append(f"<w:r><w:instrText>{instruction[10:]} </w:instrText></w:r>")
    for middle in ("", field("separate")):
        body = run("5 ") + field("begin") + "".join(runs) + middle + field("end") + run("/h")
        assert read("a.docx", word(paragraph(body)))[0] == f"5 {shown}/h"


def r(text: str) -> str:
    return f"<m:r><m:t>{text}</m:t></m:r>"


def part(name: str, content: str) -> str:
    return f"<m:{name}>{content}</m:{name}>"


def form(name: str, settings: str = "", **parts: str) -> str:
    properties = f"<m:{name}Pr>{settings}</m:{name}Pr>" if settings else ""
    return part(name, properties + "".join(part(key, value) for key, value in parts.items()))


@pytest.mark.parametrize(
    ("math", "expected"),
    [
        (r("x=7"), "x=7"),
        (form("sSup", e=r("v"), sup=r("3")), r"\(v^{3}\)"),
        (form("sSup", e=r("10"), sup=r("-6")), r"\({10}^{-6}\)"),
        (form("sSub", e=r("k"), sub=r("0")) + r("T"), r"\(k_{0}T\)"),
        (form("sSubSup", e=r("N"), sub=r("i"), sup=r("2")), r"\(N_{i}^{2}\)"),
        (form("sPre", sub=r("6"), sup=r("14"), e=r("C")), r"\({}_{6}^{14}C\)"),
        (form("f", num=r("p+1"), den=r("q")), r"\(\frac{p+1}{q}\)"),
        (form("f", '<m:type m:val="lin"/>', num=r("1"), den=r("2")), r"\(\frac{1}{2}\)"),
        (form("f", '<m:type m:val="noBar"/>', num=r("n"), den=r("k")), r"\(\genfrac{}{}{0pt}{}{n}{k}\)"),
        (form("rad", '<m:degHide m:val="1"/>', deg="", e=r("5")), r"\(\sqrt{5}\)"),
        (form("rad", deg=r("3"), e=form("f", num=r("a"), den=r("c"))), r"\(\sqrt[3]{\frac{a}{c}}\)"),
        (form("nary", '<m:chr m:val="∑"/>', sub=r("j=1"), sup=r("m"), e=r("j")), r"\(\sum_{j=1}^{m}{j}\)"),
        (form("nary", '<m:supHide m:val="1"/>', sub=r("C"), sup="", e=r("dz")), r"\(\int_{C}{dz}\)"),
        (form("sSup", e=form("d", e=r("y+2")), sup=r("4")), r"\({(y+2)}^{4}\)"),
        (form("d", '<m:begChr m:val="{"/><m:endChr m:val=""/>', e=form("sSup", e=r("z"), sup=r("2"))), r"\(\{z^{2}\)"),
        (form("func", fName=r("cos"), e=form("d", e=r("ωt"))), r"\(\cos(ωt)\)"),
        (form("func", fName=form("limLow", e=r("lim"), lim=r("h→0")), e=r("h")), r"\(\lim_{h→0}{h}\)"),
        (form("acc", '<m:chr m:val="&#x0304;"/>', e=r("u")), r"\(\bar{u}\)"),
        (form("bar", '<m:pos m:val="top"/>', e=r("AB")), r"\(\overline{AB}\)"),
        (part("m", part("mr", part("e", r("1")) + part("e", r("0"))) + part("mr", part("e", r("0")) + part("e", r("8")))),
         r"\(\begin{matrix} 1 & 0 \\ 0 & 8 \end{matrix}\)"),
    ],
)  # fmt: skip
def test_equations_keep_their_powers_fractions_roots_and_sums(math: str, expected: str) -> None:
    body = paragraph(run("So ") + part("oMath", math) + run(" holds."))
    text, faults = read("a.docx", word(body))
    assert (text, faults) == (f"So {expected} holds.", [])


def test_an_equation_that_cannot_be_written_leaves_its_paragraph_out_and_names_it() -> None:
    unknown = part("oMath", "<m:spiral><m:e/></m:spiral>" + r("2"))
    embedded = '<w:r><w:object><o:OLEObject ProgID="Equation.3"/></w:object></w:r>'
    field = r"<w:r><w:instrText> EQ \f(3,8) </w:instrText></w:r>"
    simple = r'<w:fldSimple w:instr="EQ \r(2)"/>'
    for faulty in (unknown, embedded, field, simple):
        body = paragraph(run("Kept.")) + paragraph(run("The pitch is ") + faulty + run(" mm."))
        text, (fault,) = read("a.docx", word(body))
        assert text == "Kept."
        assert fault.startswith("a.docx: paragraph 2: its equation (")


def test_raised_digits_stay_raised() -> None:
    raised = '<w:r><w:rPr><w:vertAlign w:val="superscript"/></w:rPr><w:t>{}</w:t></w:r>'
    body = paragraph(run("8.2 · 10") + raised.format("-4") + run(" m") + raised.format("3"))
    body += paragraph(run("The 19") + raised.format("th") + run(" century"))
    body += paragraph(run("a") + raised.format("m−2") + run(" or b") + raised.format("4x"))
    expected = "8.2 · 10⁻⁴ m³\n\nThe 19th century\n\na^(m−2) or b^(4x)"
    assert read("a.docx", word(body))[0] == expected


def test_digits_that_a_style_raises_are_raised() -> None:
    styles = style("Power", "", '<w:rPr><w:vertAlign w:val="superscript"/></w:rPr>')
    styles += style("Small power", "Power", "")
    styles += style("Lowered", "Power", '<w:rPr><w:vertAlign w:val="subscript"/></w:rPr>')

    def styled(name: str, text: str) -> str:
        return f'<w:r><w:rPr><w:rStyle w:val="{name}"/></w:rPr><w:t>{text}</w:t></w:r>'

    body = paragraph(run("3 · 10") + styled("Small power", "9") + run(" kg"))
    body += paragraph(run("SO") + styled("Lowered", "4") + run(", 7 m") + styled("Power", "2"))
    data = word(body, ("styles", "s.xml"), **{"s.xml": named("w:styles", styles)})
    assert read("a.docx", data)[0] == "3 · 10⁹ kg\n\nSO4, 7 m²"


_POINTS = '<c:pt idx="0"><c:v>May</c:v></c:pt><c:pt idx="1"><c:v>June</c:v></c:pt>'
_SERIES = f"""<c:ser>
<c:tx><c:strRef><c:strCache><c:pt idx="0"><c:v>Herring</c:v></c:pt></c:strCache></c:strRef></c:tx>
<c:cat><c:strRef><c:strCache>{_POINTS}</c:strCache></c:strRef></c:cat>
<c:val><c:numRef><c:f>Data!$B$2:$B$3</c:f><c:numCache><c:formatCode>0%</c:formatCode>
<c:pt idx="1"><c:v>0.55</c:v></c:pt></c:numCache></c:numRef></c:val>
</c:ser>"""
_TITLE = "<c:title><c:tx><c:rich><a:p><a:r><a:t>Catch</a:t></a:r></a:p></c:rich></c:tx></c:title>"
_PLOT = f"<c:plotArea><c:barChart>{_SERIES}</c:barChart></c:plotArea>"
_CHART = named("c:chartSpace", f"<c:chart>{_TITLE}{_PLOT}</c:chart>")
_CHART_TEXT = "Catch\n\n|  | Herring |\n| --- | --- |\n| May |  |\n| June | 55% |"


def test_charts_give_their_title_and_values() -> None:
    drawing = '<w:r><w:drawing><c:chart r:id="rId1"/></w:drawing></w:r>'
    data = word(paragraph(drawing), ("chart", "charts/c.xml"), **{"charts/c.xml": _CHART})
    assert read("a.docx", data) == (_CHART_TEXT, [])


def test_a_chart_may_show_one_value_without_a_category() -> None:
    value = '<c:val><c:numRef><c:numCache><c:pt idx="0"><c:v>7</c:v></c:pt></c:numCache></c:numRef></c:val>'
    chart = named("c:chartSpace", f"<c:chart><c:ser>{value}</c:ser></c:chart>")
    drawing = '<w:r><w:drawing><c:chart r:id="rId1"/></w:drawing></w:r>'
    data = word(paragraph(drawing), ("chart", "charts/c.xml"), **{"charts/c.xml": chart})
    assert read("a.docx", data) == ("1 | 7", [])


def workbook(*sheets: str, targets: tuple[tuple[str, str], ...] = (), **parts: str) -> bytes:
    """A workbook of sheets: the content of each but for its root."""
    contents = {
        f"worksheets/s{number}.xml": f'<worksheet xmlns="{_SHEET}" xmlns:r="{_OFFICE}/relationships">{content}</worksheet>'
        for number, content in enumerate(sheets, start=1)
    }
    entries = [f'<sheet name="Sheet {n}" r:id="rId{n}"/>' for n in range(1, len(sheets) + 1)]
    main = f'<workbook xmlns="{_SHEET}" xmlns:r="{_OFFICE}/relationships"><sheets>{"".join(entries)}</sheets></workbook>'
    kinds = tuple(("worksheet", name) for name in contents)
    return packed("xlsx", main, (*kinds, *targets), **{**contents, **parts})


def inline(place: str, text: str) -> str:
    return f'<c r="{place}" t="inlineStr"><is><t>{text}</t></is></c>'


_FIRST_ROW = f'<row r="1">{inline("A1", "Quay")}{inline("B1", "Depth")}</row>'
_SECOND_ROW = f'<row r="2">{inline("A2", "North")}<c r="B2"><v>4.5</v></c></row>'
_ROWS = f"<sheetData>{_FIRST_ROW}{_SECOND_ROW}</sheetData>"
_ROWS_TEXT = "| Quay | Depth |\n| --- | --- |\n| North | 4.5 |"


@pytest.mark.parametrize("before", ["", '<sheetPr filterMode="1"/>'])
def test_hidden_rows_and_columns_are_left_out_and_counted_and_filtered_rows_stay(
    before: str,
) -> None:
    columns = '<cols><col min="2" max="3" hidden="1"/><col min="4" max="4" outlineLevel="1" hidden="1"/></cols>'
    rows = ""
    for number, look in enumerate(("", 'hidden="1"', 'hidden="1" outlineLevel="1"', ""), 1):
        cells = "".join(inline(f"{column}{number}", f"{column}{number}") for column in "ABCDE")
        rows += f'<row r="{number}" {look}>{cells}</row>'
    data = workbook(f"{before}{columns}<sheetData>{rows}</sheetData>")
    ((_, document),) = read_file(Path("a.xlsx"), io.BytesIO(data))
    assert isinstance(document, Document)
    shown = [1, 2, 3, 4] if before else [1, 3, 4]
    lines = [f"| A{number} | D{number} | E{number} |" for number in shown]
    lines.insert(1, "| --- | --- | --- |")
    assert document.text == "# Sheet 1\n\n" + "\n".join(lines)
    assert document.meta["hidden_cells"] == {"Sheet 1": 8 if before else 11}


def test_a_cell_that_its_style_strikes_through_is_not_read() -> None:
    fonts = '<fonts><font/><font><strike/></font><font><strike val="0"/></font></fonts>'
    looks = "<cellXfs>" + "".join(f'<xf fontId="{n}"/>' for n in range(3)) + "</cellXfs>"
    styles = f'<styleSheet xmlns="{_SHEET}">{fonts}{looks}</styleSheet>'
    cells = "".join(f'<c r="{"ABC"[n]}1" s="{n}"><v>{n + 5}</v></c>' for n in range(3))
    sheet = f'<sheetData><row r="1">{cells}</row></sheetData>'
    data = workbook(sheet, targets=(("styles", "s.xml"),), **{"s.xml": styles})
    text, faults = read("a.xlsx", data)
    assert ("6" in text, "5" in text, "7" in text, faults) == (False, True, True, [])


def test_a_part_that_the_text_does_not_need_may_be_missing_or_damaged() -> None:
    broken = (("theme", "theme/t.xml"), ("image", "media/gone.png"), ("image", "NULL"), ("styles", "styles.xml"),
              ("settings", "settings.xml"), ("font", ""))  # fmt: skip
    damaged = {"theme/t.xml": "<a:theme", "styles.xml": "\0\1"}
    style = '<w:pPr><w:pStyle w:val="Heading2"/></w:pPr>'
    data = word(paragraph(style + run("Berths")) + paragraph(run("Six.")), *broken, **damaged)
    assert read("a.docx", data) == ("## Berths\n\nSix.", [])
    # Rules that no program knows, and a picture that is gone.
    rules = '<conditionalFormatting sqref="A1"><cfRule type="no such"/></conditionalFormatting><drawing r:id="rId9"/>'
    data = workbook(_ROWS + rules, targets=broken, **damaged)
    assert read("a.xlsx", data) == (f"# Sheet 1\n\n{_ROWS_TEXT}", [])
    assert read("a.pptx", deck(slide("Piers"), targets=broken, **damaged)) == ("## Piers", [])


def test_numbers_whose_formats_are_lost_are_named() -> None:
    styles = f'<styleSheet xmlns="{_SHEET}"><cellXfs><xf numFmtId="0"/><xf numFmtId="14"/></cellXfs></styleSheet>'
    rows = _ROWS.replace('"B2"><v>4.5', '"B2" s="{}"><v>45000')
    target = (("styles", "styles.xml"),)
    for style, expected in ((1, "2023-03-15"), (7, "45000")):  # a style that is not defined
        data = workbook(rows.format(style), targets=target, **{"styles.xml": styles})
        text, faults = read("a.xlsx", data)
        assert text.endswith(f"| North | {expected} |")
        assert faults == []
    data = workbook(rows.format(1), targets=target, **{"styles.xml": "<styleSheet"})
    assert read("a.xlsx", data)[1] == [
        "a.xlsx: formats of numbers: missing from the file, or damaged: 1 numbers are read as they are "
        "stored, dates among them. Save the file again."
    ]


def test_texts_of_cells_that_are_lost_are_named() -> None:
    rows = _ROWS.replace('<c r="B2"><v>4.5', '<c r="B2" t="s"><v>1')
    texts = f'<sst xmlns="{_SHEET}"><si><t>shoal</t></si><si><t>deep</t></si></sst>'
    target = (("sharedStrings", "texts.xml"),)
    data = workbook(rows, targets=target, **{"texts.xml": texts})
    assert read("a.xlsx", data) == (f"# Sheet 1\n\n{_ROWS_TEXT.replace('4.5', 'deep')}", [])
    assert read("a.xlsx", workbook(_ROWS, targets=target)) == (f"# Sheet 1\n\n{_ROWS_TEXT}", [])
    text, faults = read("a.xlsx", workbook(rows, targets=target))
    assert text == "# Sheet 1\n\n| Quay | Depth |\n| --- | --- |\n| North |  |"
    assert faults == [
        "a.xlsx: texts of cells: missing from the file, or damaged: 1 cells are left out. Save the file again."
    ]


def slide(title: str, *shapes: str) -> str:
    mark = '<p:nvSpPr><p:nvPr><p:ph type="title"/></p:nvPr></p:nvSpPr>'
    title_shape = f"<p:sp>{mark}<p:spPr/><p:txBody>{line(title)}</p:txBody></p:sp>"
    return named("p:sld", f"<p:cSld><p:spTree>{title_shape}{''.join(shapes)}</p:spTree></p:cSld>")


def line(text: str) -> str:
    return f"<a:p><a:r><a:t>{text}</a:t></a:r></a:p>"


def shape(left: int, top: int, paragraphs: str) -> str:
    return f'<p:sp><p:spPr><a:xfrm><a:off x="{left}" y="{top}"/></a:xfrm></p:spPr><p:txBody>{paragraphs}</p:txBody></p:sp>'


def deck(*slides: str, targets: tuple[tuple[str, str], ...] = (), **parts: str) -> bytes:
    contents = {f"slides/s{n}.xml": content for n, content in enumerate(slides, start=1) if content}
    entries = [f'<p:sldId id="{255 + n}" r:id="rId{n}"/>' for n in range(1, len(slides) + 1)]
    main = named("p:presentation", f"<p:sldIdLst>{''.join(entries)}</p:sldIdLst>")
    kinds = tuple(("slide", f"slides/s{n}.xml") for n in range(1, len(slides) + 1))
    return packed("pptx", main, (*kinds, *targets), **{**contents, **parts})


def test_a_slide_or_a_sheet_that_is_gone_is_named_and_the_others_are_read() -> None:
    text, (fault,) = read("a.pptx", deck(slide("Bow"), "", slide("Stern")))
    assert text == "## Bow\n\n## Stern"
    assert fault == "a.pptx: slide 2: missing from the file, or damaged. Save the file again."
    text, (fault,) = read("a.xlsx", workbook(_ROWS, "<sheetData><row></sheetData>"))
    assert text == f"# Sheet 1\n\n{_ROWS_TEXT}"
    assert fault.startswith("a.xlsx: sheet Sheet 2: missing from the file, or damaged.")


@pytest.mark.parametrize(("show", "is_hidden"), [("0", True), ("false", True), ("1", False)])
def test_hidden_slides_are_left_out_and_named(show: str, is_hidden: bool) -> None:
    draft = slide("Draft").replace("<p:sld ", f'<p:sld show="{show}" ')
    data = deck(draft, slide("Hull"), draft, slide("Keel"))
    ((_, document),) = read_file(Path("a.pptx"), io.BytesIO(data))
    assert isinstance(document, Document)
    numbers = [number for _, number in document.meta["slides"]]
    assert document.meta.get("hidden_slides", []) == ([1, 3] if is_hidden else [])
    assert numbers == ([2, 4] if is_hidden else [1, 2, 3, 4])
    assert document.title == ("Hull" if is_hidden else "Draft")
    assert ("Draft" in document.text) is not is_hidden


def test_shapes_are_read_from_the_top_with_their_equations_and_comments() -> None:
    power = part("oMath", form("sSup", e=r("r"), sup=r("2")))
    fallback = "<mc:Fallback><a:r><a:t>?</a:t></a:r></mc:Fallback>"
    choice = f"<mc:Choice>{power}</mc:Choice>"
    math = f"<a:p><mc:AlternateContent>{choice}{fallback}</mc:AlternateContent></a:p>"
    comments = named("p:cmLst", '<p:cm authorId="3"><p:text>Check the draught.</p:text></p:cm>')
    authors = named("p:cmAuthorLst", '<p:cmAuthor id="3" name="Jo Brandt"/>')
    rels = relations(("comments", "../comments/c.xml"))
    data = deck(
        slide("Hull", shape(0, 900_000, line("low")), shape(50, 100_000, math)),
        targets=(("commentAuthors", "authors.xml"),),
        **{"authors.xml": authors, "slides/_rels/s1.xml.rels": rels, "comments/c.xml": comments},
    )
    assert read("a.pptx", data) == (
        "## Hull\n\n\\(r^{2}\\)\n\nlow\n\nComment by Jo Brandt: Check the draught.",
        [],
    )


def test_shapes_of_a_group_are_where_the_group_is() -> None:
    def group(x: int, y: int, inner_y: int, size: int, content: str) -> str:
        place = f'<a:off x="{x}" y="{y}"/><a:ext cx="90" cy="{size}"/>'
        place += f'<a:chOff x="0" y="{inner_y}"/><a:chExt cx="90" cy="50"/>'
        return f"<p:grpSp><p:grpSpPr><a:xfrm>{place}</a:xfrm></p:grpSpPr>{content}</p:grpSp>"

    # A group is moved below the middle and doubled; one within it is moved to its end.
    inner = group(0, 40, 700, 50, shape(0, 700, line("fourth")))
    moved = group(0, 500, 0, 100, inner + shape(0, 30, line("third")))
    data = deck(slide("Order", moved, shape(0, 400, line("second")), shape(0, 20, line("first"))))
    assert read("a.pptx", data)[0].split() == ["##", "Order", "first", "second", "third", "fourth"]


def test_boxes_beside_each_other_are_read_from_the_left_though_one_is_a_hair_higher() -> None:
    inch = 914_400
    boxes = [
        (6 * inch, inch, "third"),
        (3 * inch, inch + 9_000, "second"),
        (0, inch + 30_000, "first"),
    ]
    boxes += [(0, 2 * inch, "fourth"), (6 * inch, 2 * inch - 60_000, "before it, for it is higher")]
    data = deck(slide("Row", *(shape(left, top, line(text)) for left, top, text in boxes)))
    assert read("a.pptx", data)[0].split("\n\n") == [
        "## Row", "first", "second", "third", "before it, for it is higher", "fourth"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("hidden", "text"), [("1", "## Bow\n\nOar"), ("0", "## Bow\n\nOar\n\nOld\n\nOlder")]
)
def test_hidden_shapes_of_a_slide_are_left_out_but_for_its_title(hidden: str, text: str) -> None:
    look = f'<p:cNvPr id="4" name="x" hidden="{hidden}"/>'
    mark = f"<p:nvSpPr>{look}<p:nvPr/></p:nvSpPr>"
    old = shape(0, 20, line("Old")).replace("<p:sp>", f"<p:sp>{mark}")
    group = f"<p:grpSp><p:nvGrpSpPr>{look}</p:nvGrpSpPr>{shape(0, 30, line('Older'))}</p:grpSp>"
    content = slide("Bow", shape(0, 10, line("Oar")), old, group)
    titled = content.replace("<p:nvSpPr><p:nvPr><p:ph", f"<p:nvSpPr>{look}<p:nvPr><p:ph")
    assert read("a.pptx", deck(titled)) == (text, [])


def test_items_signs_and_parted_words_of_a_slide_are_those_shown() -> None:
    def item(text: str, form: str, level: int = 0) -> str:
        numbering = f'<a:pPr lvl="{level}"><a:buAutoNum type="{form}"/></a:pPr>'
        return f"<a:p>{numbering}<a:r><a:t>{text}</a:t></a:r></a:p>"

    arrow = '<a:r><a:rPr><a:sym typeface="Wingdings"/></a:rPr><a:t> Ebb à quay</a:t></a:r>'
    items = item("Load", "romanUcPeriod") + item("oars", "alphaLcParenBoth", 1)
    items += item("ropes", "alphaLcParenBoth", 1) + item("Row", "romanUcPeriod")
    point = "<a:p><a:r><a:t>Har</a:t></a:r><a:r><a:t>bour</a:t></a:r></a:p><a:p><a:r><a:t>West</a:t></a:r></a:p>"
    diagram = f'<dgm:dataModel xmlns:dgm="{_ART}/diagram"><dgm:pt><dgm:t>{point}</dgm:t></dgm:pt></dgm:dataModel>'
    frame = f'<p:graphicFrame><a:graphic><dgm:relIds xmlns:dgm="{_ART}/diagram" r:dm="rId1"/></a:graphic></p:graphicFrame>'
    data = deck(
        slide("Day", frame, shape(0, 10, items), shape(0, 20, f"<a:p>{arrow}</a:p>")),
        **{
            "slides/_rels/s1.xml.rels": relations(("diagramData", "../d.xml")),
            "d.xml": diagram.replace(">", f" {_NAMES}>", 1),
        },
    )
    assert read("a.pptx", data) == (
        "## Day\n\n- Harbour West\n\nI. Load\n  (a) oars\n  (b) ropes\nII. Row\n\nEbb → quay",
        [],
    )


@pytest.mark.parametrize(
    ("number_format", "value", "shown"),
    [
        ('0.0"%"', "3.5", "3.5%"),
        ("0.00\\%", "7.25", "7.25%"),
        ("0.0%", "0.035", "3.5%"),
        ('#,##0.00\\ "kn"', "1250.5", "1250.5 kn"),
        ("[$€-407] #,##0", "-80", "€ -80"),
        ('#,##0.0,,"m"', "2500000", "2.5m"),
        ("000000", "4711", "004711"),
        ("00\\-00\\-00", "10499", "01-04-99"),
        ('"open";;"shut"', "0", "shut"),
        (";;;", "6", "6"),
        ('[>9]0.0,"k";0', "12000", "12000"),
        ('_(* #,##0_);_(* \\(#,##0\\);_(* "-"??_)', "-9", "-9"),
        ("0\\ \\d", "4", "4 d"),
        ("[h]:mm", "1.6875", "40:30"),
        ("[hh]:mm:ss", "0.0625", "1:30:00"),
        ("[mm]:ss", "0.0625", "90:00"),
        ("[h]:mm", "-0.25", "-6:00"),
        ("mmm\\-yy", "44713", "2022-06"),
        ("[$-407]yyyy", "44713", "2022"),
        ('"Q2" yyyy', "44713", "2022-06-01"),
        ("d.m.yy", "44713", "2022-06-01"),
    ],
)
def test_numbers_have_the_units_and_zeros_of_their_formats(
    number_format: str, value: str, shown: str
) -> None:
    code = number_format.replace("&", "&amp;").replace('"', "&quot;").replace(">", "&gt;")
    formats = f'<numFmts><numFmt numFmtId="170" formatCode="{code}"/></numFmts>'
    styles = f'<styleSheet xmlns="{_SHEET}">{formats}<cellXfs><xf numFmtId="170"/></cellXfs></styleSheet>'
    rows = f'<row r="1"><c r="A1" s="0"><v>{value}</v></c></row>'
    data = workbook(rows, targets=(("styles", "styles.xml"),), **{"styles.xml": styles})
    assert read("a.xlsx", data)[0].endswith(f"\n\n{shown}")


def test_raised_digits_of_a_cell_and_days_of_a_chart() -> None:
    run_of = '<r><rPr><vertAlign val="superscript"/></rPr><t>3</t></r>'
    rows = f'<row r="1"><c r="A1" t="inlineStr"><is><r><t>9 m</t></r>{run_of}</is></c></row>'
    assert read("a.xlsx", workbook(rows))[0].endswith("\n\n9 m³")
    points = '<c:formatCode>d/m/yyyy</c:formatCode><c:pt idx="0"><c:v>43831</c:v></c:pt>'
    chart = _CHART.replace(_POINTS, points).replace("0.55", "0.25").replace('idx="1"', 'idx="0"')
    drawing = '<w:r><w:drawing><c:chart r:id="rId1"/></w:drawing></w:r>'
    data = word(paragraph(drawing), ("chart", "charts/c.xml"), **{"charts/c.xml": chart})
    assert "| 2020-01-01 | 25% |" in read("a.docx", data)[0]


def strict(data: bytes) -> bytes:
    """The file with the names of Strict Open XML."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(out, "w") as target:
        for member in source.namelist():
            content = source.read(member)
            pattern = rb"http://schemas\.openxmlformats\.org/(officeDocument|\w+ml)/2006"
            target.writestr(member, re.sub(pattern, rb"http://purl.oclc.org/ooxml/\1", content))
    return out.getvalue()


def test_strict_open_xml_is_read() -> None:
    for name, data in (
        ("a.docx", word(paragraph(run("Strict.") + part("oMath", form("sSup", e=r("g"), sup=r("5")))))),
        ("a.pptx", deck(slide("Keel", shape(9, 9, line("oak"))))),
        ("a.xlsx", workbook(_ROWS)),
    ):  # fmt: skip
        assert b"purl.oclc.org" in strict(data)
        assert read(name, strict(data)) == read(name, data)
        assert read(name, data)[1] == []


def test_names_of_strict_open_xml_in_a_text_stay() -> None:
    sentence = "It begins with http://purl.oclc.org/ooxml/drawingml/main."
    assert read("a.docx", strict(word(paragraph(run(sentence)))))[0] == sentence


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("1912-04-10T12:15:00.000", "1912-04-10 12:15:00"),
        ("1912-04-10T12:15:00Z", "1912-04-10 12:15:00"),
        ("1912-04-10T00:00:00", "1912-04-10"),
        ("1912-04-10", "1912-04-10"),
        ("1899-12-30T23:40:00", "23:40:00"),
        ("in spring", "in spring"),
    ],
)
def test_dates_of_strict_workbooks_are_those_of_others(value: str, shown: str) -> None:
    rows = f'<row r="1"><c r="A1" t="d"><v>{value}</v></c></row>'
    assert read("a.xlsx", workbook(rows))[0].endswith(f"\n\n{shown}")


def test_a_workbook_names_comments_text_boxes_and_the_charts_of_other_sheets() -> None:
    drawing = named("c:drawing", f"<a:txBody>{line('Winter figures')}</a:txBody>")
    comment = '<comment ref="B2" authorId="0"><text><t>At low tide.</t></text></comment>'
    content = f"<authors><author>Lea</author></authors><commentList>{comment}</commentList>"
    comments = f'<comments xmlns="{_SHEET}">{content}</comments>'
    parts = {
        "worksheets/_rels/s1.xml.rels": relations(("comments", "../c.xml"), ("drawing", "../d.xml")),
        "c.xml": comments,
        "d.xml": drawing,
        "_rels/d.xml.rels": relations(("chart", "chart.xml")),
        "chart.xml": _CHART,
    }  # fmt: skip
    text, faults = read("a.xlsx", workbook(_ROWS, **parts))
    assert text == (
        f"# Sheet 1\n\n{_ROWS_TEXT}\n\nWinter figures\n\n{_CHART_TEXT}\n\nComment on B2 by Lea: At low tide."
    )
    assert faults == []
    points = "".join(f"<dgm:pt><dgm:t>{line(text)}</dgm:t></dgm:pt>" for text in ("Tow", "Moor"))
    both = relations(("diagramData", "steps.xml"), ("chart", "chart.xml"))
    diagram = (
        f'<dgm:dataModel xmlns:dgm="{_ART}/diagram" xmlns:a="{_ART}/main">{points}</dgm:dataModel>'
    )
    steps = {**parts, "_rels/d.xml.rels": both, "steps.xml": diagram}
    assert "figures\n\n- Tow\n- Moor\n\nCatch" in read("a.xlsx", workbook(_ROWS, **steps))[0]
    own = {**parts, "chart.xml": _CHART.replace("Data!", "'Sheet 1'!")}
    assert "Herring" not in read("a.xlsx", workbook(_ROWS, **own))[0]


def test_properties_may_be_missing_and_a_package_may_have_lost_its_relations() -> None:
    data = word(paragraph(run("Alone.")))
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(out, "w") as target:
        target.writestr("word\\document.xml", source.read("word/document.xml"))
    assert read("a.docx", out.getvalue()) == ("Alone.", [])
    empty = io.BytesIO()
    with zipfile.ZipFile(empty, "w") as target:
        target.writestr("word/styles.xml", "<styles/>")
    _, (fault,) = read("a.docx", empty.getvalue())
    assert fault == "a.docx: not a readable Office file: it has no main part. Save it again."


_OPEN = "urn:oasis:names:tc:opendocument:xmlns"
_OPEN_NAMES = (
    f'xmlns:office="{_OPEN}:office:1.0" xmlns:text="{_OPEN}:text:1.0" xmlns:table="{_OPEN}:table:1.0" '
    f'xmlns:draw="{_OPEN}:drawing:1.0" xmlns:chart="{_OPEN}:chart:1.0" xmlns:xlink="http://www.w3.org/1999/xlink" '
    'xmlns:dc="http://purl.org/dc/elements/1.1/"'
)


def open_document(text: str, **parts: str) -> bytes:
    body = f"<office:body><office:text>{text}</office:text></office:body>"
    content = f"<office:document-content {_OPEN_NAMES}>{body}</office:document-content>"
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("mimetype", "application/vnd.oasis.opendocument.text")
        for name, data in {"content.xml": content, **parts}.items():
            archive.writestr(name, data)
    return out.getvalue()


def test_an_open_document_shows_its_equations_charts_and_comments() -> None:
    rows = [("", "Tugs"), ("May", "4"), ("June", "6")]
    cells = "<table:table-cell><text:p>{}</text:p></table:table-cell>"
    table = "".join(
        f"<table:table-row>{cells.format(first)}{cells.format(second)}</table:table-row>"
        for first, second in rows
    )
    chart = (
        f"<office:document-content {_OPEN_NAMES}><chart:chart><chart:title><text:p>Afloat</text:p></chart:title>"
        f"<table:table>{table}</table:table></chart:chart></office:document-content>"
    )
    math = '<math xmlns="http://www.w3.org/1998/Math/MathML"><msqrt><mi>w</mi></msqrt></math>'
    shown = '<draw:frame><draw:object xlink:href="./Object {}"/></draw:frame>'
    note = (
        "<office:annotation><dc:creator>Una</dc:creator><text:p>Sure?</text:p></office:annotation>"
    )
    text = f"<text:p>Root {shown.format(1)}{note}.</text:p>{shown.format(2)}"
    parts = {"Object 1/content.xml": math, "Object 2/content.xml": chart, "meta.xml": "<office:"}
    assert read("a.odt", open_document(text, **parts)) == (
        "Root \\(\\sqrt{w}\\) (Comment by Una: Sure?).\n\nAfloat\n\n"
        "|  | Tugs |\n| --- | --- |\n| May | 4 |\n| June | 6 |",
        [],
    )


def test_a_locked_open_document_says_so() -> None:
    entry = '<file-entry full-path="content.xml"><encryption-data checksum="x"/></file-entry>'
    parts = {"META-INF/manifest.xml": f"<manifest>{entry}</manifest>", "content.xml": "?K8#"}
    assert read("a.odt", open_document("", **parts)) == (
        "", ["a.odt: locked with a password. Save a copy without one."]
    )  # fmt: skip
