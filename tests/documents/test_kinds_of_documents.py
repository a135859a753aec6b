"""Each kind of file is read from bytes that other libraries, or this file by hand, have written."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zipfile
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import openpyxl
import pypdf
import pytest

from kinject.documents.readers import ReadOptions, kind_of, read_file
from kinject.errors import InputError
from kinject.types import Document
from made import pdf_of

Read = list[tuple[str, Document | InputError]]


def read(name: str, data: bytes, **options: Any) -> Read:
    return list(read_file(Path(name), io.BytesIO(data), ReadOptions(**options)))


def only(name: str, data: bytes, **options: Any) -> Document:
    ((_, document),) = read(name, data, **options)
    assert isinstance(document, Document), document
    return document


def fault(name: str, data: bytes, **options: Any) -> str:
    ((_, document),) = read(name, data, **options)
    assert isinstance(document, InputError)
    return str(document)


def zipped(members: dict[str, bytes], **options: Any) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, **options) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


def test_text_has_any_suffix_and_front_matter_is_meta() -> None:
    for name in ("README.Debian", "ssh.1"):
        assert only(name, "Grüße aus Arvika.".encode()).text == "Grüße aus Arvika."
    leave = b"---\ntitle: Leave\nauthor: Mara\ndate: 2026-05-01\n---\n\n# Days\n\n30 days.\n"
    for name in ("a.md", "a.mdx", "a.qmd", "a.Rmd"):
        page = only(name, leave)
        assert (page.title, page.meta["author"]) == ("Leave", "Mara")
        assert page.text == "# Days\n\n30 days.\n"
    for text in ("---\nno mapping\n---\nText.", "---\n[: a\n---\nText.", "---\n\nText."):
        assert only("a.md", text.encode()).text == text


def test_markdown_has_no_comments_and_its_characters_are_not_their_names() -> None:
    page = "# Quay<!-- by Ada -->\n\nTolls &amp; fees: 5&nbsp;kr, caf&eacute;, <!-- no\nkey --> R&#x26;D &unknown;\n\n"
    code = "`<!-- a --> &lt;` ``b ` &gt;``\n\n```html\n<!-- c --> &amp;\n```\n\n| a &#124; b |\n"
    document = only("a.md", (page + code).encode())
    assert document.title == "Quay"
    assert document.text.rstrip() == (
        "# Quay\n\nTolls & fees: 5 kr, café,  R&D &unknown;\n\n" + code.rstrip()
    )
    cells = [
        {"cell_type": "markdown", "source": ["1&frac12; ", "<!-- x -->kr"]},
        {"cell_type": "raw", "source": "&amp;"},
    ]
    book = json.dumps({"metadata": {}, "cells": cells})
    assert only("a.ipynb", book.encode()).text == "1½ kr\n\n&amp;"


def test_markdown_has_no_tags_that_show_nothing() -> None:
    page = (
        '<a id="q"></a><p align="center"><img src="quay.png"></p>\n\n'
        '<span id="p2"></span>Deck of 40 m<sup>2</sup>, CO<sub>2</sub> <your name> List<Boat>\n\n'
        '| <a href="a.html">Pier</a> | North<br/>South |\n|---|---|\n\n`<br>` <3 < 5 <div class=x>in</div>\n'
    )
    assert only("a.md", page.encode()).text.strip() == (
        "Deck of 40 m², CO2 <your name> List<Boat>\n\n| Pier | North South |\n|---|---|\n\n`<br>` <3 < 5 in"
    )


def test_names_in_brackets_that_are_also_elements_stay_in_markdown() -> None:
    """What a command needs is written so; a tag has attributes, or its element an end."""
    page = (
        "Tow <source> to <target>:\n\n    tow <source>\n\n<type>: <summary>, if a <small and b> c."
    )
    assert only("a.md", page.encode()).text == page
    page = "<p>Moor at <small>pier</small> 3.</p> <details open><summary>Fee</summary>5 kr</details><source src=x>"
    assert only("a.md", page.encode()).text == "Moor at pier 3. Fee5 kr"


def test_markdown_has_no_bytes_of_pictures() -> None:
    uri = f"data:image/png;base64,{'iVBORw0KGgo+/4' * 50}=="
    page = f"The quay ![seen from above]({uri})<img alt=x src='{uri}'> is long.![][image2]\n\n![map](map.png)\n"
    text = only(
        "a.md", f"{page}\n[image2]: <{uri}>\n[site]: https://example.org\n`{uri}`".encode()
    ).text
    assert text.startswith("The quay seen from above is long.\n\n![map](map.png)\n\n[site]: https")
    assert text.endswith(f"`{uri}`")


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("```sh\n# fetch\nwget x\n```\n\n# Tides of May #\n\nHigh.\n", "Tides of May"),
        ("Tides of June\n=============\n\nLow.\n\n# Later\n", "Tides of June"),
        ("~~~\n# a\n```\n# b\n~~~\n#\n# Berths\n", "Berths"),
        ("| a |\n====\n\nx = 1\n== y\n\n```\n# open\n", "a"),
    ],
)
def test_the_title_of_markdown_is_its_first_heading(text: str, title: str) -> None:
    assert only("a.md", text.encode()).title == title


@pytest.mark.parametrize(
    ("name", "head", "kind"),
    [
        ("a.txt", b"%PDF-1.7\n", "pdf"), ("a.pdf", b"<!DOCTYPE html><html><p>x", "html"),
        ("a.xml", b'<?xml version="1.0"?>\n<!-- x -->\n<mediawiki xml:lang="en">', "mediawiki"), ("a.jpg", b"PAR1..", "parquet"),
        ("a.txt", b"{\\rtf1\\ansi", "rtf"), ("README", b"Read me.", "text"), ("a.tar.xz", b"\xfd7zXZ", "tar"),
        ("a.msg", b"\xd0\xcf\x11\xe0", "msg"), ("grep.info", b"This is grep.info\n\n\x1f\nFile: grep.info,  Node: Top\n", "text"),
        ("mail", b"From: a@b.c\nTo: d@e.f\nSubject: x\nDate: y\n\nText", "mail"), ("a.md", b"<html> is a tag", "markdown"),
        ("inbox", b"From a@b.c Mon Jun 01 10:00:00 2009\nFrom: a@b.c\n", "mailbox"), ("a.py", b"import os", "code"),
        ("a.txt", "\ufeffx".encode("utf-16-le"), "text"), ("a", b"\x1f\x8b\x08", "gzip"), ("b.txt", b"BM is a shop.", "text"),
        ("a.zip", b"PK\x03\x04" + b"\1" * 26 + b"[Content_Types].xml\5xl/ppt/PK\x03\x04" + b"\1" * 26 + b"word/a", "docx"),
    ],
)  # fmt: skip
def test_the_content_decides_what_a_file_is_and_then_its_name(
    name: str, head: bytes, kind: str
) -> None:
    assert kind_of(Path(name), head) == kind


@pytest.mark.parametrize(
    ("name", "head", "reason"),
    [
        ("a.docx", b"\xd0\xcf\x11\xe0", "before 2007, or one locked with a password"), ("a.txt", b"GIF89a\0", "an image"),
        ("a.xyz", b"hello\x01", "suffix '.xyz' and no text"), ("a.docx", b"hello", "not a readable DOCX: it holds plain text"),
        ("a.txt", b"\0\1\2\3" * 9, "bytes that are no text"), ("a.xml", b"<feed>", "XML whose root is <feed>"),
    ],
)  # fmt: skip
def test_what_no_reader_reads_has_its_reason(name: str, head: bytes, reason: str) -> None:
    with pytest.raises(InputError) as caught:
        kind_of(Path(name), head)
    assert reason in str(caught.value)
    assert str(caught.value).startswith(f"{name}: ")


def test_a_word_document_keeps_headings_lists_and_what_was_inserted() -> None:
    docx = pytest.importorskip("docx")
    made = docx.Document()
    made.core_properties.title, made.core_properties.author = "The Falk Bridge", "Mara Lind"
    made.add_heading("Bridge", 1)
    made.add_paragraph("Built in 1931.")
    for text, style in (
        ("stone", "List Bullet"),
        ("granite", "List Bullet 2"),
        ("iron", "List Bullet"),
    ):
        made.add_paragraph(text, style=style)
    for text in ("first", "second"):
        made.add_paragraph(text, style="List Number")
    out = io.BytesIO()
    made.save(out)
    document = only("a.docx", out.getvalue())
    assert document.title == "The Falk Bridge"
    assert document.meta["author"] == "Mara Lind"
    assert (
        document.text
        == "# Bridge\n\nBuilt in 1931.\n\n- stone\n  - granite\n- iron\n1. first\n2. second"
    )


def test_slides_have_their_titles_tables_notes_and_numbers() -> None:
    pptx = pytest.importorskip("pptx")
    deck = pptx.Presentation()
    for number in (1, 2):
        slide = deck.slides.add_slide(deck.slide_layouts[1])
        slide.shapes.title.text = f"Slide {number}"
        slide.placeholders[1].text = "one\ntwo"
    table = slide.shapes.add_table(2, 2, 0, 6_000_000, 9_000_000, 900_000).table
    for row, cells in enumerate((("City", "Year"), ("Kelm", "1931"))):
        for column, cell in enumerate(cells):
            table.cell(row, column).text = cell
    slide.notes_slide.notes_text_frame.text = "Say hello."
    out = io.BytesIO()
    deck.save(out)
    document = only("a.pptx", out.getvalue())
    second = "## Slide 2\n\n- one\n- two\n\n| City | Year |\n| --- | --- |\n| Kelm | 1931 |\n\nNotes: Say hello."
    assert document.text == f"## Slide 1\n\n- one\n- two\n\n{second}"
    assert document.meta["slides"] == [[0, 1], [document.text.index("## Slide 2"), 2]]


def test_a_workbook_shows_values_as_people_see_them_and_a_cell_far_away_costs_nothing() -> None:
    import datetime

    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    sheet = book.active
    sheet.title = "Costs"
    for row in (
        ["Item", "Date", "Share"],
        ["rope", datetime.date(2024, 5, 31), 0.25],
        ["nail", datetime.datetime(2024, 6, 1), 1.5],
    ):
        sheet.append(row)
    sheet["C2"].number_format = "0%"
    sheet["XFD1048576"] = "far"
    book.create_sheet("Lists").sheet_state = "hidden"
    book["Lists"]["A1"] = "secret"
    out = io.BytesIO()
    book.save(out)
    document = only("a.xlsx", out.getvalue())
    table = (
        "| Item | Date | Share |\n| --- | --- | --- |\n| rope | 2024-05-31 | 25% |\n"
        # The format of openpyxl for a date with a time shows the time at midnight, too.
        "| nail | 2024-06-01 00:00:00 | 1.5 |"
    )
    assert document.text == f"# Costs\n\n{table}\n\nfar"
    assert document.meta["sheets"] == [[0, "Costs"]]
    assert document.meta["hidden_sheets"] == ["Lists"]


def test_a_mail_gives_its_text_without_the_mail_it_quotes_and_its_attachments() -> None:
    mail = EmailMessage()
    mail["Subject"], mail["From"], mail["Date"] = (
        "Bridge",
        "Mara <m@example.org>",
        "Fri, 31 May 2024 10:00:00 +0200",
    )
    mail.set_content("It stands.\n\n> inline\n\nYes.\n\nOn Thu, Bo wrote:\n> When?\n> Bo\n")
    mail.add_attachment(b"Notes of Bo.", maintype="text", subtype="plain", filename="notes.txt")
    mail.add_attachment(
        zipped({"a.txt": b"In a zip."}), maintype="application", subtype="zip", filename="a.zip"
    )
    (location, first), (inner, second), (_, third) = read("b.eml", bytes(mail))
    assert isinstance(first, Document)
    assert (location, first.title, first.text) == (
        "b.eml",
        "Bridge",
        "# Bridge\n\nIt stands.\n\n> inline\n\nYes.",
    )
    assert first.meta == {"author": "Mara <m@example.org>", "date": "2024-05-31T10:00:00+02:00"}
    assert isinstance(second, Document)
    assert (inner, second.text) == ("b.eml/notes.txt", "Notes of Bo.")
    assert "an archive within an archive" in str(third)
    box = (
        b"From x Mon Jun 01 10:00:00 2009\n"
        + bytes(mail).replace(b"It stands", b">From it")
        + b"\n"
    )
    documents = read("b.mbox", box * 2)
    assert [location for location, one in documents if isinstance(one, Document)][::2] == [
        "b.mbox: message 1",
        "b.mbox: message 2",
    ]


def test_members_of_archives_are_read_and_bombs_and_locked_ones_are_reported() -> None:
    members = {
        "a/b.txt": b"One.",
        "a/.DS_Store": b"x",
        "../c.md": b"# Two",
        "d.png": b"\x89PNG",
        "e.zip": zipped({"x": b"y"}),
    }
    documents = dict(read("z.zip", zipped(members)))
    assert {location: one.text for location, one in documents.items() if isinstance(one, Document)} == {
        "z.zip/a/b.txt": "One.", "z.zip/c.md": "# Two",
    }  # fmt: skip
    assert "an image" in str(documents["z.zip/d.png"])
    assert "an archive within an archive" in str(documents["z.zip/e.zip"])
    assert only("n.txt.gz", gzip.compress(b"Packed.")).text == "Packed."
    bomb = b"0" * 2_000_000
    assert "unpacks to" in fault("z.zip", zipped({"a.txt": bomb}), largest=2**20)
    assert "unpacks to more than 1 MiB" in fault("a.txt.gz", gzip.compress(bomb), largest=2**20)
    book = zipped({"[Content_Types].xml": b"<x/>", "word/document.xml": bomb})
    assert "unpacks to" in fault("a.docx", book, largest=2**20)
    assert "damaged" in fault("z.zip", zipped({"a.txt": b"One."})[:40])
    locked = bytearray(zipped({"a.txt": b"One."}))
    locked[locked.index(b"PK\1\2") + 8] |= 1
    assert "locked with a password" in fault("z.zip", bytes(locked))


def test_a_book_is_read_along_its_spine() -> None:
    package = (
        b'<package xmlns="x" xmlns:dc="d"><metadata><dc:title>The Bridge</dc:title><dc:creator>Mara Lind</dc:creator></metadata>'
        b'<manifest><item id="b" href="b.xhtml"/><item id="a" href="sub/a%20b.xhtml"/></manifest>'
        b'<spine><itemref idref="a"/><itemref idref="b"/></spine></package>'
    )
    container = (
        b'<container xmlns="y"><rootfiles><rootfile full-path="OPS/p.opf"/></rootfiles></container>'
    )
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as book:
        book.writestr("mimetype", b"application/epub+zip")
        book.writestr("META-INF/container.xml", container)
        book.writestr("OPS/p.opf", package)
        book.writestr("OPS/sub/a b.xhtml", b"<html><body><h1>One</h1><p>First.</p></body></html>")
        book.writestr(
            "OPS/b.xhtml",
            b"<html><body><h1>Two</h1><p>Second.</p><aside>Box.</aside></body></html>",
        )
    document = only("a.epub", out.getvalue())
    assert (document.title, document.text) == (
        "The Bridge",
        "# One\n\nFirst.\n\n# Two\n\nSecond.\n\nBox.",
    )
    assert document.meta["author"] == "Mara Lind"
    assert document.meta["chapters"] == [[0, "sub/a%20b.xhtml"], [15, "b.xhtml"]]


def test_chapters_that_are_missing_or_locked_are_named_and_notes_follow_the_text() -> None:
    container = b'<container><rootfile full-path="p.opf"/></container>'
    items = "".join(
        f'<item id="{name}" href="{name}.xhtml"/>' for name in ("notes", "One", "gone", "bought")
    )
    items += '<item id="art" href="art.jpg" media-type="image/jpeg"/>'
    spine = '<itemref idref="notes" linear="no"/>'
    spine += "".join(f'<itemref idref="{name}"/>' for name in ("One", "gone", "bought", "art"))
    locked = b'<encryption><CipherReference URI="bought.xhtml"/><CipherReference URI="a.ttf"/></encryption>'
    members = {
        "mimetype": b"application/epub+zip",
        "META-INF/container.xml": container,
        "META-INF/encryption.xml": locked,
        "p.opf": f"<package><manifest>{items}</manifest><spine>{spine}</spine></package>".encode(),
        "one.xhtml": b"<html xmlns='x'><title/><body><p>The tide turns.</p></body></html>",
        "notes.xhtml": b"<html xmlns='x'><title/><body><p>At noon.</p></body></html>",
        "bought.xhtml": bytes(range(256)),
        "art.jpg": b"\xff\xd8",
    }
    (first, gone), (second, bought), (_, book) = read("a.epub", zipped(members))
    assert (first, second) == ("a.epub: gone.xhtml", "a.epub: bought.xhtml")
    assert "missing from the file" in str(gone)
    assert "locked" in str(bought)
    assert isinstance(book, Document)
    assert book.text == "The tide turns.\n\nAt noon."


def book_of(page: str, stated: str = "") -> Document:
    """The book of one page, whose package states what is given."""
    spaces = 'xmlns:dc="http://purl.org/dc/elements/1.1/" xmlns:opf="http://www.idpf.org/2007/opf"'
    package = (
        f"<package {spaces}><metadata>{stated}</metadata><manifest><item id='a' href='a.xhtml'/>"
        "</manifest><spine><itemref idref='a'/></spine></package>"
    )
    members = {
        "mimetype": b"application/epub+zip",
        "META-INF/container.xml": b'<container><rootfile full-path="p.opf"/></container>',
        "p.opf": package.encode(),
        "a.xhtml": f"<html><body>{page}</body></html>".encode(),
    }
    return only("a.epub", zipped(members))


@pytest.mark.parametrize("kind", ['epub:type="pagebreak"', 'role="doc-pagebreak"'])
def test_page_numbers_of_the_printed_book_are_no_part_of_its_sentences(kind: str) -> None:
    mark = f'<span {kind} id="p214">214</span>'
    page = f"<p>The ferry of 18{mark}74 sank in <b>{mark}June</b>.</p>"
    assert book_of(page).text == "The ferry of 1874 sank in June."
    assert book_of(f"<p>One <span {kind}>of the two boats.</p>").text == "One of the two boats."


@pytest.mark.parametrize(
    ("events", "date"),
    [
        (("modification", "publication"), "1996"),
        (("publication", "modification"), "2014-05-02"),
        (("", "modification"), "2014-05-02"),
    ],
)
def test_a_book_has_all_authors_and_the_date_of_its_publication(
    events: tuple[str, str], date: str
) -> None:
    stated = "<dc:creator>Ada Holm</dc:creator><dc:creator> Jo Brandt </dc:creator>"
    for event, text in zip(events, ("2014-05-02", "1996"), strict=True):
        stated += f'<dc:date opf:event="{event}">{text}</dc:date>'
    meta = book_of("<p>The tide turns.</p>", stated).meta
    assert (meta["author"], meta["date"]) == ("Ada Holm, Jo Brandt", date)


WIKI = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/"><page><title>Falk Bridge</title><ns>0</ns><revision>
<timestamp>2024-05-31T10:00:00Z</timestamp>
<text>{{Infobox|a=1}}The '''bridge'''&lt;ref&gt;no&lt;/ref&gt; at [[Kelm|the town of Kelm]].
== Data ==
{| class="wikitable"
! City !! Year
|-
| Kelm || 1931
|}
* one
** two
[[Category:Bridges]]</text></revision></page>
<page><title>Old</title><ns>0</ns><redirect title="x"/><revision><text>#REDIRECT</text></revision></page>
<page><title>Talk:Falk Bridge</title><ns>1</ns><revision><text>talk</text></revision></page></mediawiki>"""


@pytest.mark.parametrize(
    ("wiki", "text"),
    [
        ("{{convert|40|m|ft}} long", "40 m long"),
        ("{{Cvt|3|to|5|km2|sqmi|abbr=on}}, {{convert|6|ft|2|in|cm|0}}", "3 to 5 km², 6 ft 2 in"),
        ("{{circa|1931}}, {{birth date and age|df=y|1931|2|3}}, {{start date|1999|5}}", "c. 1931, 3 February 1931, May 1999"),
        ("{{nowrap|[[Falk Bridge|the {{lang-de|Brücke}}]] of 1931}}", "the Brücke of 1931"),
        ("{{lang|de|Mole}}, {{formatnum:12345}}, {{US$|5 million}}", "Mole, 12345, US$5 million"),
        ("{{frac|1|2}}, {{frac|3|1|4}}, {{val|3.5|0.1|e=6|u=kg}}", "1/2, 3 1/4, 3.5 ± 0.1 × 10^6 kg"),
        ("{{math|x {{=}} 2}}, {{chem|H|2|O}}, {{hlist|a|b|}}{{ndash}}{{As of|2019|5}}", "x = 2, H2O, a, b–As of May 2019"),
        ("One{{sfn|A|1990}}{{Infobox|span={{convert|40|m}}}} two{{convert}}{{}}{{unknown|{{nowrap|x}}}}", "One two"),
        ("One {{{1|two}}}{{quote|text= three|author=A}}, {{convert|some|km}}", "One twothree, some"),
        (f"{{{{start date|1999|{'7' * 5000}}}}}", f"{'7' * 5000} 1999"),
    ],
)  # fmt: skip
def test_templates_whose_text_is_in_their_arguments_are_read(wiki: str, text: str) -> None:
    """Bridges were "long", and people born on no day."""
    page = WIKI.replace("{{Infobox|a=1}}", f"START {wiki} END\n\n")
    assert f"START {text} END" in only("a.xml", page.encode()).text


def test_articles_of_a_mediawiki_export_have_headings_tables_and_lists() -> None:
    ((location, document),) = read("w.xml", WIKI.encode())
    assert isinstance(document, Document)
    assert (location, document.title, document.meta) == (
        "w.xml: page 1",
        "Falk Bridge",
        {"date": "2024-05-31"},
    )
    table = "| City | Year |\n| --- | --- |\n| Kelm | 1931 |"
    assert document.text == (
        f"# Falk Bridge\n\nThe bridge at the town of Kelm.\n\n## Data\n\n{table}\n\n- one\n  - two"
    )


def test_equations_powers_and_line_ends_of_an_article_are_kept() -> None:
    wiki = "It is <math display=block>\\frac{a}{b|c}</math>, 3·10<sup>-8</sup> m or 2<sup>nd</sup>.<br/>Then<br>east.\n"
    wiki += "{| class=x\n! Law !! Unit\n|-\n| <math>v^2</math> || m<sup>2</sup><br />each\n|}"
    page = WIKI.replace("{{Infobox|a=1}}", wiki.replace("<", "&lt;") + "\n")
    ((_, document),) = read("w.xml", page.encode())
    assert isinstance(document, Document)
    first = r"It is \(\frac{a}{b|c}\), 3·10⁻⁸ m or 2nd. Then east."
    table = "| Law | Unit |\n| --- | --- |\n| \\(v^2\\) | m² each |"
    assert document.text.startswith(f"# Falk Bridge\n\n{first}\n\n{table}\n\nThe bridge")


ODF = """<office:document-content xmlns:office="o" xmlns:text="t" xmlns:table="b"><office:body><office:text>
<text:h text:outline-level="1">Leave</text:h><text:p>Thirty<text:s/>days<text:note><text:note-citation>1</text:note-citation>
<text:note-body><text:p>a year</text:p></text:note-body></text:note>.</text:p><text:list><text:list-item><text:p>one</text:p>
<text:list><text:list-item><text:p>two</text:p></text:list-item></text:list></text:list-item></text:list><table:table><table:table-row>
<table:table-cell><text:p>City</text:p></table:table-cell><table:table-cell><text:p>Year</text:p></table:table-cell>
<table:table-cell table:number-columns-repeated="1000"/></table:table-row><table:table-row>
<table:table-cell table:number-columns-repeated="2"><text:p>7</text:p></table:table-cell></table:table-row></table:table>
</office:text></office:body></office:document-content>"""
RTF = r"{\rtf1\ansi{\fonttbl{\f0 Arial;}}\f0 The ferry of M\'e4la costs \u8364?3.\par "
RTF += r"Bring a coat.\par City\cell Year\cell\row Kelm\cell 1929\cell\row}"


def test_open_document_and_rich_text_keep_headings_lists_notes_and_tables() -> None:
    odt = only(
        "a.odt",
        zipped(
            {"mimetype": b"application/vnd.oasis.opendocument.text", "content.xml": ODF.encode()}
        ),
    )
    assert odt.title == "Leave"
    assert odt.text == (
        "# Leave\n\nThirty days (a year).\n\n- one\n  - two\n\n| City | Year |\n| --- | --- |\n| 7 | 7 |"
    )
    text = only("a.rtf", RTF.encode()).text
    assert (
        text
        == "The ferry of Mäla costs €3.\nBring a coat.\n| City | Year |\n| --- | --- |\n| Kelm | 1929 |"
    )


def test_a_cell_of_open_document_over_two_columns_keeps_the_others_in_theirs() -> None:
    def row(*cells: str) -> str:
        return f"<table:table-row>{''.join(cells)}</table:table-row>"

    def cell(text: str, attributes: str = "") -> str:
        return f"<table:table-cell{attributes}><text:p>{text}</text:p></table:table-cell>"

    wide = cell("Ferry", ' table:number-columns-spanned="2"') + "<table:covered-table-cell/>"
    rows = row(cell("Line"), cell("First"), cell("Last")) + row(wide, cell("22:10"))
    start, _, end = ODF.partition("<text:h")
    content = f"{start}<table:table>{rows}</table:table></office:text></office:body></office:document-content>"
    assert end
    files = {
        "mimetype": b"application/vnd.oasis.opendocument.text",
        "content.xml": content.encode(),
    }
    *_, last = only("a.odt", zipped(files)).text.splitlines()
    assert [part.strip() for part in last.strip("|").split("|")][2] == "22:10"


def open_document(kind: str, body: str, styles: str = "") -> str:
    return open_document_of(kind, body, styles).text


def open_document_of(kind: str, body: str, styles: str = "") -> Document:
    names = {
        "office": "office", "text": "text", "table": "table", "style": "style", "draw": "drawing",
        "svg": "svg-compatible", "presentation": "presentation",
    }  # fmt: skip
    spaces = " ".join(
        f'xmlns:{short}="urn:oasis:names:tc:opendocument:xmlns:{name}:1.0"'
        for short, name in names.items()
    )
    main = f"<office:body><office:{kind}>{body}</office:{kind}></office:body>"
    looks = f"<office:automatic-styles>{styles}</office:automatic-styles>"
    content = f"<office:document-content {spaces}>{looks}{main}</office:document-content>"
    mime = f"application/vnd.oasis.opendocument.{kind}".encode()
    return only("a.odt", zipped({"mimetype": mime, "content.xml": content.encode()}))


def test_headings_of_an_open_document_have_the_numbers_that_are_shown() -> None:
    def level(depth: int, kind: str, more: str) -> str:
        number = f'text:level="{depth}" style:num-format="{kind}" {more}'
        return f"<text:outline-level-style {number}/>"

    levels = level(1, "A", 'style:num-prefix="Part " style:num-suffix=":" text:start-value="3"')
    levels += level(2, "1", 'text:display-levels="2" style:num-suffix=")"') + level(3, "", "")
    styles = f"<text:outline-style>{levels}</text:outline-style>"
    styles += '<style:style style:name="own" style:parent-style-name="none"/>'
    styles += '<style:style style:name="none" style:list-style-name=""/>'
    body = ""
    for depth, style, text in (
        *((1, "", "Docks"), (2, "", "Tolls"), (2, "", "Hours"), (1, "own", "A word before")),
        *((1, "", "Crews"), (2, "", "Pay"), (3, "", "In May")),
    ):
        name = f'text:outline-level="{depth}" text:style-name="{style}"'
        body += f"<text:h {name}>{text}</text:h>"
    assert open_document("text", body, styles).split("\n\n") == [
        *("# Part C: Docks", "## C.1) Tolls", "## C.2) Hours", "# A word before"),
        *("# Part D: Crews", "## D.1) Pay", "### In May"),
    ]


def test_code_of_an_open_document_keeps_its_lines_and_their_indentation() -> None:
    lines = [("Preformatted_20_Text", "while rows():"), ("P3", "<text:s text:c='2'/>rest(  1)"), ("P3", ""),
             ("P3", "land()")]  # fmt: skip
    styles = '<style:style style:name="P3" style:parent-style-name="Preformatted_20_Text"/>'
    code = "\n".join(f'<text:p text:style-name="{style}">{line}</text:p>' for style, line in lines)
    body = f"<text:p>So:</text:p>{code}<text:p>Then <text:s/>rest.</text:p>"
    assert open_document("text", body, styles) == (
        "So:\n\n```\nwhile rows():\n  rest(  1)\n\nland()\n```\n\nThen rest."
    )


def test_hidden_sheets_of_an_open_document_are_left_out() -> None:
    styles = (
        '<style:style style:name="ta2"><style:table-properties table:display="{}"/></style:style>'
    )
    sheet = '<table:table table:name="{}" table:style-name="{}"><table:table-row>{}</table:table-row></table:table>'
    cell = "<table:table-cell><text:p>{}</text:p></table:table-cell>"
    body = sheet.format("Boats", "ta1", cell.format("Una"))
    body += sheet.format("Old", "ta2", cell.format("Vera"))
    assert open_document("spreadsheet", body, styles.format("false")) == "# Boats\n\nUna"
    assert "Vera" in open_document("spreadsheet", body, styles.format("true"))


def test_hidden_rows_and_columns_and_struck_cells_of_a_workbook_of_open_document_are_left_out() -> (
    None
):
    def row(*cells: str, looks: str = "") -> str:
        return f"<table:table-row {looks}>{''.join(cells)}</table:table-row>"

    def cell(text: str, looks: str = "") -> str:
        return f'<table:table-cell office:value-type="string" {looks}><text:p>{text}</text:p></table:table-cell>'

    def columns(n: int, looks: str = "") -> str:
        return f'<table:table-column table:number-columns-repeated="{n}" {looks}/>'

    hidden, filtered = (f'table:visibility="{how}"' for how in ("collapse", "filter"))
    twice = cell("16", 'table:number-columns-repeated="2"')
    body = "".join((
        f"{columns(2)}{columns(2, hidden)}{columns(1)}",
        row(cell("Boat"), cell("Berth"), cell("Debt"), cell("Note"), cell("Crew")),
        # One of the two repeated cells is in a hidden column.
        row(cell("Una"), twice, cell("late"), cell("4")),
        row(cell("Vera"), cell("17"), cell("90"), cell("x"), cell("5"), looks=hidden),
        row(cell("Wilma"), cell("18", 'table:style-name="gone"'), cell("0"), cell("y"), cell("6"), looks=filtered),
        f'<table:table-row-group table:display="false">{row(cell("Xenia"), looks=hidden)}</table:table-row-group>',
    ))  # fmt: skip
    gone = '<style:text-properties style:text-line-through-style="solid"/>'
    styles = f'<style:style style:name="gone">{gone}</style:style>'
    body = f'<table:table table:name="S">{body}</table:table>'
    assert open_document("spreadsheet", body, styles) == (
        "# S\n\n| Boat | Berth | Crew |\n| --- | --- | --- |\n| Una | 16 | 4 |\n| Wilma |  | 6 |\n| Xenia |  |  |"
    )
    meta = open_document_of("spreadsheet", body, styles).meta
    assert meta["hidden_cells"] == {"S": 10}


def test_hidden_slides_of_an_open_document_are_left_out_and_titles_are_headings() -> None:
    styles = '<style:style style:name="dp{}"><style:drawing-page-properties presentation:visibility="{}"/></style:style>'
    frame = '<draw:frame presentation:class="{}"><draw:text-box><text:p>{}</text:p></draw:text-box></draw:frame>'
    slide = '<draw:page draw:style-name="dp{}">{}</draw:page>'
    body = "<presentation:footer-decl>Tarn Yard</presentation:footer-decl>"
    body += slide.format(1, frame.format("title", "Keel") + frame.format("outline", "Elm"))
    body += slide.format(2, frame.format("title", "Spare"))
    looks = styles.format(1, "visible") + styles.format(2, "hidden")
    assert open_document("presentation", body, looks) == "## Keel\n\nElm"


def test_an_open_document_shows_numbers_and_raised_digits_and_no_names_of_pictures() -> None:
    styles = '<style:style style:name="U"><style:text-properties style:text-position="33% 58%"/></style:style>'
    styles += '<style:style style:name="D"><style:text-properties style:text-position="-33% 58%"/></style:style>'
    level = '<text:list-level-style-number text:level="{}" style:num-format="{}"/>'
    styles += f'<text:list-style style:name="L">{level.format(1, "1")}{level.format(2, "a")}</text:list-style>'

    def item(text: str, more: str = "") -> str:
        return f"<text:list-item><text:p>{text}</text:p>{more}</text:list-item>"

    span = '<text:span text:style-name="{}">{}</text:span>'
    ruby = "<text:ruby><text:ruby-base>港</text:ruby-base><text:ruby-text>みなと</text:ruby-text></text:ruby>"
    picture = "<draw:frame><draw:image/><svg:title>Picture 4</svg:title></draw:frame>"
    inner = f"<text:list>{item('oars')}{item('ropes')}</text:list>"
    body = (
        f"<text:p>4 km{span.format('U', '2')}, CO{span.format('D', '2')}, {ruby}{picture}</text:p>"
    )
    body += f'<text:list text:style-name="L">{item("Load", inner)}{item("Row")}</text:list>'
    body += (
        f'<text:list text:style-name="L" text:continue-numbering="true">{item("Land")}</text:list>'
    )
    assert open_document("text", body, styles) == (
        "4 km², CO2, 港\n\n1. Load\n  a. oars\n  b. ropes\n2. Row\n\n3. Land"
    )


def test_a_list_of_an_open_document_goes_on_from_the_number_that_it_had() -> None:
    level = (
        '<text:list-level-style-number text:level="1" style:num-format="1" text:start-value="4"/>'
    )
    styles = f'<text:list-style style:name="L">{level}</text:list-style>'
    item = "<text:list-item{}><text:p>Oar</text:p></text:list-item>"
    body = ""
    for look, items in (
        ("", ("", ' text:start-value="9"')),
        (' text:continue-numbering="true"', ("",)),
    ):
        body += (
            f'<text:list text:style-name="L"{look}>{"".join(map(item.format, items))}</text:list>'
        )
        body += "<text:p>So</text:p>"
    assert open_document("text", body, styles) == "4. Oar\n9. Oar\n\nSo\n\n10. Oar\n\nSo"


def test_cells_of_an_open_document_without_a_text_show_their_values_and_rows_are_repeated() -> None:
    def cell(kind: str, value: str) -> str:
        return f'<table:table-cell office:value-type="{kind}" office:{value}/>'

    def row(*cells: str, n: int = 1) -> str:
        repeated = f' table:number-rows-repeated="{n}"'
        return f"<table:table-row{repeated}>{''.join(cells)}</table:table-row>"

    head = [cell("string", 'string-value="Pier"'), cell("string", 'string-value="Full"')]
    rows = row(*head) + row(cell("float", 'value="4"'), cell("percentage", 'value="0.45"'), n=2)
    rows += row(
        cell("date", 'date-value="2021-05-07"'), cell("currency", 'value="3" office:currency="EUR"')
    )
    body = f'<table:table table:name="S">{rows}{row("<table:table-cell/>", n=9999)}</table:table>'
    assert open_document("spreadsheet", body) == (
        "# S\n\n| Pier | Full |\n| --- | --- |\n| 4 | 45% |\n| 4 | 45% |\n| 2021-05-07 | 3 EUR |"
    )


def test_styles_of_an_open_document_have_what_the_styles_above_them_have() -> None:
    def style(name: str, parent: str, properties: str) -> str:
        text = f"<style:text-properties {properties}/>"
        return f'<style:style style:name="{name}" style:parent-style-name="{parent}">{text}</style:style>'

    styles = style("Power", "", 'style:text-position="super 58%"') + style("T3", "Power", "")
    styles += style("T4", "Power", 'style:text-position="0% 100%"') + style("Loop", "Loop", "")
    styles += style("Inner", "", 'text:display="none"') + style("T5", "Inner", "")
    span = '<text:span text:style-name="{}">{}</text:span>'
    body = f"<text:p>2 \u00b7 10{span.format('T3', '7')} t, 10{span.format('T4', '8')}"
    body += f"{span.format('T5', ' (draft)')} kg{span.format('Loop', '!')}</text:p>"
    body += '<text:section text:display="none"><text:p>For the office.</text:p></text:section>'
    assert open_document("text", body, styles) == "2 \u00b7 10\u2077 t, 108 kg!"


def test_paragraphs_of_a_note_of_an_open_document_are_words_apart() -> None:
    note = (
        "<text:note-body><text:p>By Lind.</text:p><text:p>Rebuilt twice.</text:p></text:note-body>"
    )
    body = f"<text:p>A quay<text:note>{note}</text:note>, in use.</text:p>"
    assert open_document("text", body) == "A quay (By Lind. Rebuilt twice.), in use."


def test_blank_cells_of_an_open_document_keep_the_columns_of_those_behind_them() -> None:
    def cell(text: str) -> str:
        return f"<table:table-cell><text:p>{text}</text:p></table:table-cell>"

    def blank(n: int) -> str:
        return f'<table:table-cell table:number-columns-repeated="{n}"/>'

    rows = [
        cell("Quay") + cell("Draught") + cell("Crane") + cell("Shed") + blank(16_380),
        cell("North") + blank(2) + cell("C") + blank(16_000) + blank(380),
        blank(3) + cell("D"),
    ]
    table = "".join(f"<table:table-row>{row}</table:table-row>" for row in rows)
    body = f'<table:table table:name="S">{table}</table:table>'
    assert open_document("spreadsheet", body) == (
        "# S\n\n| Quay | Draught | Crane | Shed |\n| --- | --- | --- | --- |\n"
        "| North |  |  | C |\n|  |  |  | D |"
    )


def test_a_mail_of_outlook_gives_its_text_and_its_attachments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = {
        "__substg1.0_0037001F": "Ferry times", "__substg1.0_0C1A001F": "Mara Lind", "__substg1.0_1000001F": "It leaves at 7.\r\n",
        "__attach_version1.0_#0/__substg1.0_3707001F": "note.txt",
    }  # fmt: skip
    data = {name: text.encode("utf-16-le") for name, text in streams.items()}
    data["__attach_version1.0_#0/__substg1.0_37010102"] = b"No ferry on Sunday."

    class File:
        def __init__(self, _: Any) -> None: ...

        def exists(self, name: str) -> bool:
            return name in data

        def openstream(self, name: str) -> io.BytesIO:
            return io.BytesIO(data[name])

        def listdir(self) -> list[list[str]]:
            return [name.split("/") for name in data]

    monkeypatch.setattr("olefile.OleFileIO", File)
    (_, mail), (location, note) = read("a.msg", b"\xd0\xcf\x11\xe0" + b"0" * 600)
    assert isinstance(mail, Document)
    assert isinstance(note, Document)
    assert (mail.title, mail.text, mail.meta) == (
        "Ferry times",
        "# Ferry times\n\nIt leaves at 7.",
        {"author": "Mara Lind"},
    )
    assert (location, note.text) == ("a.msg/note.txt", "No ferry on Sunday.")


def test_formulas_without_values_are_reported_and_navigation_is_left_out() -> None:
    book = openpyxl.Workbook()
    book.active.append(["price", 3])
    book.active["B2"] = "=B1*2"
    out = io.BytesIO()
    book.save(out)
    (_, sheet), (_, told) = read("a.xlsx", out.getvalue())
    assert isinstance(sheet, Document)
    assert "price" in sheet.text
    assert "a.xlsx: formulas: 1 have no stored value" in str(told)
    info = "\x1f\nFile: a.info,  Node: Top,  Next: Rules,  Up: (dir)\n\n1 Leave\n*******\n\nThirty days.\n"
    info += "\x1f\nTag Table:\nNode: Top\x7f12\n"
    assert only("a.info", info.encode()).text.strip() == "1 Leave\n*******\n\nThirty days."
    page = "<html><title>T</title><body><div class='nav-panel'>Next: Rules</div><div class='titlepage'><h1>Leave</h1></div>"
    page += "<p>Thirty days.</p></body>"
    assert only("a.html", page.encode()).text == "# Leave\n\nThirty days."


def test_items_of_a_page_keep_their_numbers_and_a_summary_its_line() -> None:
    page = "<ol start=7><li>Row.<li>Sail.<li value=12>Land.<li>Rest.</ol><ol start=x><li>Eat.</ol>"
    page += "<details><summary>Fee</summary>pence</details>"
    text = only("a.html", f"<html><body>{page}</body></html>".encode()).text
    assert text == "7. Row.\n8. Sail.\n12. Land.\n13. Rest.\n\n1. Eat.\n\nFee\npence"
    page = "<ol reversed><li>Gold.<li>Silver.<li>Bronze.</ol><ol reversed start=9><li>Nine.<li>Eight.</ol>"
    assert only("a.html", page.encode()).text == (
        "3. Gold.\n2. Silver.\n1. Bronze.\n\n9. Nine.\n8. Eight."
    )
    styles = ("list-style-type:upper-latin", "list-style: inside Lower-Roman", "list-style: none")
    page = "".join(f'<p>So</p><ol start=4 style="{style}"><li>Oar.</ol>' for style in styles)
    assert only("a.html", page.encode()).text == "So\n\nD. Oar.\n\nSo\n\niv. Oar.\n\nSo\n\n- Oar."


def test_notes_and_what_stands_in_a_cell_or_quotation_are_content_of_a_page() -> None:
    page = '<p>Rye<sup>a</sup></p><aside role="doc-endnote">By hand.</aside><aside>Shop</aside>'
    page += "<blockquote>Dig.<footer>Ada</footer></blockquote><footer>Us</footer>"
    cell = "<td><aside>far</aside><footer>out</footer>"
    page += f"<table><tr><th>A<th>B<tr><td>1{cell}</table>"
    text = only("a.html", f"<html><body>{page}</body></html>".encode()).text
    assert text == "Ryea\n\nBy hand.\n\nDig.\n\nAda\n\n| A | B |\n| --- | --- |\n| 1 | far out |"


@pytest.mark.parametrize("place", [30, 20_000])
def test_a_nul_in_a_page_is_left_out(place: int) -> None:
    page = f"<html><body><p>{'The mill. ' * 3_000}</p></body></html>".encode()
    assert only("a.html", page[:place] + b"\0" + page[place:]).text == only("a.html", page).text


def test_elements_of_xhtml_that_end_where_they_begin_hold_nothing() -> None:
    head = '<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml"><head>'
    for empty in (
        "<title/>",
        '<style type="text/css"/>',
        '<script src="a>b.js"></script><script src="c"/>',
    ):
        page = f"{head}{empty}</head><body><h2 id='x'/><nav/><p>One<br/>two <![CDATA[< 3]]></p><pre/><p>Four</p>"
        assert only("a.xhtml", page.encode()).text == "One\ntwo < 3\n\nFour"


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<p><ruby>今日<rp>(</rp><rt>きょう</rt><rp>)</rp></ruby>は晴れ", "今日は晴れ"),
        ("<p hidden>No <b hidden>no</b></p><p>Yes<span style='display: none'>no", "Yes"),
        ("<a href='#z'>Fees</a><div id=z style='display:none'>Four marks.</div>", "Fees\nFour marks."),
        ("<h3><button type=button>Fees?</button></h3><p>Four marks.<button>Print</button>", "### Fees?\n\nFour marks."),
        ("<p>She said <q>no</q>.", "She said “no”."),
        ("<ul><li><input type=checkbox checked> Oars<li><label><input type=checkbox>Sail</label></ul><input type=checkbox>",
         "- ☒ Oars\n- ☐ Sail"),
        ("<ul><li><div class='checkbox checkbox-off'></div>Keel<li><div class='checkbox checkbox-on'></div>Mast</ul>",
         "- ☐ Keel\n- ☒ Mast"),
        ("<ul class=inline-task-list><li class=checked data-inline-task-id=4><span>Tow</span><li data-inline-task-id=7>Moor</ul>",
         "- ☒ Tow\n- ☐ Moor"),
        ("<center><b>The Mole</b></center>Closed<fieldset>in May</fieldset>and June", "The Mole\nClosed\nin May\nand June"),
        ("<p>7 &middot; 10<span style='vertical-align: super'>8</span> kg <span style='color:red'>9</span>", "7 · 10⁸ kg 9"),
        ("<p>Rebuilt in 1874<a epub:type=noteref href='#n3'>3</a>, lost in 1901<a role=doc-noteref href='#n4'>[4]</a>.",
         "Rebuilt in 1874³, lost in 1901[4]."),
        ("<video><source src=v>Your browser shows no video.</video><p>High water.</p><audio>None.</audio>", "High water."),
        ("<title>Ha&shy;fen</title><p>Hafen\u00admeister<table><tr><th>Hafen&#xAD;geld<th>Mai<tr><td>5<td>6</table>",
         "Hafenmeister\n\n| Hafengeld | Mai |\n| --- | --- |\n| 5 | 6 |"),
        ("<table><tfoot><tr><td>All<td>9</tfoot><tr><th>Pier<th>Boats<tr><td>East<td>9</table>",
         "| Pier | Boats |\n| --- | --- |\n| East | 9 |\n| All | 9 |"),
        ("<table><thead><tr><th rowspan=2>Pier<th>Boats<tbody><tr><td>East<td>7<tr><td rowspan=0>West<td>5<tr><td>6</table>",
         "| Pier | Boats |\n| --- | --- |\n| East | 7 |\n| West | 5 |\n| West | 6 |"),
        # A name of rows that do not come, alone and below another.
        ("<table><tr><td>Pier<td>Boats<tr><td rowspan=2>West</table>", "| Pier | Boats |\n| --- | --- |\n| West |  |"),
        ("<table><tr><td>Pier<td>Boats<tr><td rowspan=3>West<tr></tr></table>",
         "| Pier | Boats |\n| --- | --- |\n| West |  |"),
        ("<table><tr><td>Pier<td>Boats<td>Cranes<tr><td rowspan=2>West<tr><td rowspan=2>8<tr><td>North<td>5</table>",
         "| Pier | Boats | Cranes |\n| --- | --- | --- |\n| West | 8 |  |\n| North | 8 | 5 |"),
        ("<p>So <span><span><math><msup><mi>v</mi><mn>3</mn></msup></math></span><span aria-hidden=true>v3</span></span>.",
         r"So \(v^{3}\)."),
        ("<p>So <span><span style='display:none'><math><mi>k</mi></math></span><img src=k></span>.", "So k."),
        ("<p>Low water.</p><p style='visibility: hidden'>A draft.</p>", "Low water."),
        ("<noscript><div class=old></noscript><p>At noon.</p><noscript></div>Allow scripts.</noscript>", "At noon."),
    ],
)  # fmt: skip
def test_a_page_is_what_its_reader_sees(page: str, text: str) -> None:
    assert only("a.html", page.encode()).text == text


def test_short_items_of_a_list_in_a_page_stay_and_links_to_other_pages_go() -> None:
    prose = (
        f"<p>{'The bridge at Arvika was built in 1931 and carries the road to the north. ' * 8}</p>"
    )
    links = "<ul><li><a>Our shop</a></li></ul>"
    page = f"<nav></nav><article><h1>Bridge</h1>{prose}<ul><li>oak bolts</li></ul>{prose}{links}{prose}</article>"
    text = only("a.html", f"<html><body>{page}</body></html>".encode()).text
    assert "- oak bolts" in text
    assert "Our shop" not in text


@pytest.mark.parametrize(
    ("kind", "marks"),
    [("1", "1. 2. 3."), ("a", "a. b. c."), ("A", "A. B. C."), ("i", "i. ii. iii.")],
)
def test_short_items_stay_whatever_their_numbers_are(kind: str, marks: str) -> None:
    prose = f"<p>{'The lock at Falk lifts barges by four metres, day and night. ' * 8}</p>"
    steps = f"<ol type={kind}><li>Ring</li><li>Wait here</li><li>Enter the lock</li></ol>"
    rest = f"<ul><li><a href='map.html'>Our map</a></li></ul>{prose}"
    drawing = "<figure><figcaption>The lock in a drawing of 1874</figcaption></figure>"
    page = f"<nav></nav><article>{prose}<h2>How to pass</h2>{drawing}{steps}{rest}</article>"
    text = only("a.html", f"<html><body>{page}</body></html>".encode()).text
    first, second, third = marks.split()
    assert f"{first} Ring\n{second} Wait here\n{third} Enter the lock" in text
    assert "Our map" not in text


def site_text(article: str) -> str:
    """Return the text of a page of a site, of which `article` is in the middle of the main text."""
    prose = f"<p>{'The ferry to Tarn leaves at six and takes carts and cattle. ' * 8}</p>"
    page = f"<nav></nav><article><h1>Ferry</h1>{prose}{article}{prose}</article>"
    return only("a.html", f"<html><body>{page}</body></html>".encode()).text


def test_short_lines_of_a_paragraph_stay_where_their_neighbours_do() -> None:
    goods = [
        "* No hay or straw on the upper deck of the ferry",
        "* No lamps",
        "* No dogs",
        "* No tar",
    ]
    cell = f"<table><tr><td><p>{'<br>'.join(goods)}<br>* Carts are tied down by their own drivers</p></table>"
    assert "upper deck of the ferry\n* No lamps\n* No dogs\n* No tar\n* Carts" in site_text(cell)
    assert "Tickets" not in site_text("<div><a href=t.html>Tickets</a></div>")


def test_a_numbered_line_of_few_words_is_text() -> None:
    shop = "<ul><li><a href=shop.html>Our shop</a></li></ul>"
    assert "\n1. Ring twice.\n\n" in site_text(f"{shop}<p>1. Ring twice.</p>")


def test_the_text_of_a_page_may_be_in_a_script_or_shown_part_by_part() -> None:
    said = "The ferry to Tarn leaves at six and takes carts and cattle to the market. " * 12
    article = json.dumps(
        {"@context": "https://schema.org", "@type": "Article", "articleBody": said}
    )
    page = f"<script type='application/ld+json'>{article}</script><main><p>Loading.</p></main>"
    assert said.strip() in only("a.html", f"<html><body>{page}</body></html>".encode()).text
    parts = "".join(
        f"<div style='display: none'><p>{n} of 9. {said}</p></div>" for n in range(2, 10)
    )
    page = f"<nav></nav><div id=parts><h2>Ferries</h2><p>1 of 9. Read all nine.</p>{parts}</div>"
    text = only("a.html", f"<html><body>{page}</body></html>".encode()).text
    assert "9 of 9. The ferry to Tarn" in text
    menu = (
        f"<nav></nav><p>{said}</p><div style='display: none'><p>Our shop sells tickets.</p></div>"
    )
    assert "shop" not in only("a.html", f"<html><body>{menu}</body></html>".encode()).text


def test_links_below_an_item_of_words_stay_and_a_menu_of_links_goes() -> None:
    links = "<ul><li><a href=1.html>Pier 4 is too short</a><li><a href=2.html>Pier 7 leaks</a></ul>"
    planned = "<ul><li>We have the green light for another ferry next summer, with more room.<li>In repair:"
    text = site_text(f"{planned}{links}</ul>")
    assert "- In repair:\n  - Pier 4 is too short\n  - Pier 7 leaks" in text
    menu = f"<ul><li><a href=p.html>All our piers</a>{links}</ul>"
    assert "Pier" not in site_text(f"<ul><li>A ferry leaves for the islands every hour.</ul>{menu}")


def test_sentences_with_many_equations_belong_to_the_main_text() -> None:
    def math(name: str) -> str:
        equation = f"<msup><mi>{name}</mi><mi>H</mi></msup><mo>=</mo><mfrac><mi>{name}</mi><mn>2</mn></mfrac>"
        return f"<span style='display: none'><math>{equation}</math></span><img src={name}.svg>"

    text = site_text(
        f"<p>If {math('A')} holds, then {math('B')} as well, so {math('C')} as claimed.</p>"
    )
    assert r"as well, so \(C^{H}=\frac{C}{2}\) as claimed." in text


def test_restructured_text_includes_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    table = "=====  ====\nCity   Year\n=====  ====\nKelm   1931\n=====  ====\n"
    text = f"Title\n=====\n\nSee :ref:`here <x>` and ``code``.\n\n.. include:: {tmp_path}/secret.txt\n\n{table}"
    document = only("a.rst", text.encode())
    assert document.title == "Title"
    assert (
        document.text
        == "# Title\n\nSee here and code.\n\n| City | Year |\n| --- | --- |\n| Kelm | 1931 |"
    )


def test_directives_that_docutils_does_not_know_keep_their_text() -> None:
    text = """.. deprecated:: 1.4
   Use *tow*.

.. c:function:: int row(char *oar, int *n)

   Rows to the quay.

.. tip-box:: Winter

   .. versionadded:: 2
      Skates.

.. code-block:: c
   :emphasize-lines: 1
   :caption: row.c

   row();

.. toctree::

   other

.. raw:: html

   <b>raw</b>
"""
    assert only("a.rst", text.encode()).text == (
        "Deprecated since version 1.4: Use tow.\n\nint row(char *oar, int *n)\n\nRows to the quay.\n\n"
        "Winter\n\nAdded in version 2: Skates.\n\nrow.c\n\n```\nrow();\n```"
    )


def test_a_document_that_a_program_saved_as_a_page_is_read_whole() -> None:
    prose = f"<p>{'The lock at Falk lifts barges by four metres, day and night. ' * 8}</p>"
    notes = "<dl><dt>Sill</dt><dd><p>The floor.</p></dd></dl><div>Tolls are due<br>at noon.</div>"
    drawing = "<figure><figcaption>The lock, drawn by Ada Holm</figcaption></figure>"
    parts = f"<h2 id=t>Words</h2>{notes}<a href='#t'>Words</a> <a href='map.html'>The map</a>"
    document = f"<html><body><h1>Lock</h1>{prose}{drawing}{parts}</body></html>"
    script = "<script src='https://example.org/mathjax/tex.js'></script>"
    for page in (document, script + document):
        text = only("a.html", page.encode()).text
        assert text.startswith("# Lock\n\nThe lock at Falk")
        assert text.endswith(
            "The lock, drawn by Ada Holm\n\n## Words\n\nSill\n\nThe floor.\n\n"
            "Tolls are due\nat noon.\nWords The map"
        )
    for site in ("<nav></nav>", "<script src=a.js></script>", f"<a href=a.html>{'Home ' * 30}</a>"):
        assert "Ada Holm" not in only("a.html", (site + document).encode()).text


def test_roles_whose_text_docutils_changes_are_read_as_it_shows_them() -> None:
    text = (
        "A load of 10\\ :sup:`5` N, H\\ :sub:`2`\\ O, :math:`\\alpha_2 \\ge 0.4`, :code:`a\\b`.\n\n"
        "See :pep:`257`, :rfc:`5322`, :rfc:`the standard <9110>` and :func:`~os.path.join`.\n"
    )
    assert only("a.rst", text.encode()).text == (
        "A load of 10⁵ N, H2O, \\(α_{2}≥0.4\\), a\\b.\n\n"
        "See PEP 257, RFC 5322, the standard and join."
    )


def test_what_kind_a_term_is_stands_apart_from_it() -> None:
    text = "span : float, m\n    From pier to pier.\n\nkeeper : name : first\n    Who keeps it.\n"
    assert only("a.rst", text.encode()).text == (
        "span : float, m\n\nFrom pier to pier.\n\nkeeper : name : first\n\nWho keeps it."
    )


def test_a_table_that_docutils_cannot_parse_stays_as_it_is_written() -> None:
    table = "====  ====\nPier  Year\n====  ====\nthe northern  1931\n====  ===="
    text = only("a.rst", f"Before.\n\n{table}\n\nAfter.\n".encode()).text
    assert text == f"Before.\n\n```\n{table}\n```\n\nAfter."


def test_code_and_notebooks_are_fenced_with_their_language() -> None:
    assert only("a.py", b'x = "```"\n').text == '# a.py\n\n```python\nx = "```"\n```'
    cells = [
        {"cell_type": "markdown", "source": ["# T\n", "x"]},
        {"cell_type": "code", "source": "y = 1"},
    ]
    book = json.dumps({"cells": cells, "metadata": {}}).encode()
    document = only("a.ipynb", book)
    assert (document.title, document.text) == ("T", "# T\nx\n\n```python\ny = 1\n```")
    book = json.dumps({"cells": cells, "metadata": {"kernelspec": {"language": "julia"}}}).encode()
    assert only("a.ipynb", book).text.endswith("```julia\ny = 1\n```")


@pytest.mark.parametrize("delimiter", list(",;\t|"))
def test_the_delimiter_of_a_table_is_found(delimiter: str) -> None:
    rows = [["Title", "Body"], ["One", "First, and; so | on"], ["Two", "Second"]]
    data = "\n".join(delimiter.join(f'"{cell}"' for cell in row) for row in rows).encode()
    documents = [document for _, document in read("a.csv", data)]
    assert [(document.title, document.text) for document in documents if isinstance(document, Document)] == [
        ("One", "First, and; so | on"), ("Two", "Second"),
    ]  # fmt: skip
    table = only("prices.csv", data.replace(b"Body", b"Price"))
    assert table.title == "prices"
    assert table.text.startswith(
        "| Title | Price |\n| --- | --- |\n| One | First, and; so \\| on |\n"
    )
    named = [
        document
        for _, document in read("a.csv", data.replace(b"Body", b"Price"), text_field="Price")
    ]
    assert [document.text for document in named if isinstance(document, Document)] == [
        "First, and; so | on",
        "Second",
    ]


def test_a_column_of_labels_that_is_called_as_texts_are_leaves_the_table_whole() -> None:
    goods = only("goods.csv", b"product;content;price\nSyrup;500 ml;4,20\nPlum jam;0,3 kg;3,80\n")
    assert goods.text.endswith("| Syrup | 500 ml | 4,20 |\n| Plum jam | 0,3 kg | 3,80 |")
    texts = "title,content\n码头,北码头夜间关闭。\n"
    assert only("harbour.csv", texts.encode()).text == "北码头夜间关闭。"
    # A column whose name can mean nothing else holds texts, however short.
    assert only("short.csv", b"text,label\nGood boat,1\n").text == "Good boat"


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", b'{"text": "In short.", "story": "The ferry leaves at 7."}\n{"text": "So."}\n'),
        ("a.csv", b"text,Story\nIn short.,The ferry leaves at 7.\nSo.,It is late.\n"),
    ],
)
def test_where_the_named_key_is_missing_no_other_one_is_read(name: str, data: bytes) -> None:
    (*_, (_, fault)) = read(name, data, text_field="story")
    assert isinstance(fault, InputError)
    assert "no key 'story' (found 'text'" in str(fault)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        # Fewer and more cells than the header, a blank row, a short header.
        ("Tool,Price\nSaw\n\nAdze,8,B2\nAwl,\n",
         "| Tool | Price |  |\n| --- | --- | --- |\n| Saw |  |  |\n| Adze | 8 | B2 |\n| Awl |  |  |"),
        ("sep=;\nTon;Preis\nhell;1,5\n", "| Ton | Preis |\n| --- | --- |\n| hell | 1,5 |"),
        ('Pipe,Bore\n"Ball, brass","2"""\nElbow,3"\n"Tee\nlong",1\n"Nipple,4\n',
         '| Pipe | Bore |\n| --- | --- |\n| Ball, brass | 2" |\n| Elbow | 3" |\n| Tee long | 1 |\n| "Nipple | 4 |'),
        ('Cut\tSize\n"oak\tash"\t2"\n"5" board\t1\n', '| Cut | Size |\n| --- | --- |\n| oak ash | 2" |\n| "5" board | 1 |'),
        ('Quay\nNorth\n"Old mill"\n', "| Quay |\n| --- |\n| North |\n| Old mill |"),
        ("Minutes, 4 May\nThe dredger is late\nPresent: Ida, Jon, and two guests\n",
         "Minutes, 4 May\nThe dredger is late\nPresent: Ida, Jon, and two guests\n"),
        ("We met at noon, as planned.\nThe lock was shut, again.\n", "We met at noon, as planned.\nThe lock was shut, again.\n"),
        ("Call the pilot; he knows.\nWait for the tide.\n", "Call the pilot; he knows.\nWait for the tide.\n"),
    ],
)  # fmt: skip
def test_no_row_of_a_table_is_left_out_and_prose_is_a_text(data: str, expected: str) -> None:
    assert only("a.csv", data.encode()).text == expected


def test_quotes_behind_a_backslash_are_read_as_the_writer_meant_them() -> None:
    texts = ['The "Dove", a brig,\nran "aground".', '"No," he said', "A folder, C:\\tar\\", "Plain"]
    file = io.StringIO()
    writer = csv.writer(file, escapechar="\\", doublequote=False, quoting=csv.QUOTE_ALL)
    writer.writerows([["text", "id"], *([text, str(n)] for n, text in enumerate(texts))])
    # Of a path the writer doubles the backslashes, which many others do not.
    written = file.getvalue().replace("\\\\", "\\")
    documents = [document for _, document in read("a.csv", written.encode())]
    assert [item.text for item in documents if isinstance(item, Document)] == texts


def test_rows_of_texts_are_filled_up_and_keep_their_commas() -> None:
    data = 'id,text,year\n1,Low, slow and wide,1931\n2,"Quoted, whole"\n3,"open,1940\n'
    data += "4,Cells of nobody,1950,, \n"
    documents = [document for _, document in read("a.csv", data.encode())]
    assert [(item.text, item.meta) for item in documents if isinstance(item, Document)] == [
        ("Low, slow and wide", {"year": "1931"}),
        ("Quoted, whole", {}),
        ('"open', {"year": "1940"}),
        ("Cells of nobody", {"year": "1950"}),
    ]


def test_json_is_a_list_of_rows_or_one_on_each_line() -> None:
    rows = b'[{"body": "One.", "k": 1}, {"body": "Two."}, {"x": 1}]'
    for data in (rows, b'{"meta": 1, "items": ' + rows + b"}"):
        documents = read("a.json", data)
        assert [document.text for _, document in documents if isinstance(document, Document)] == [
            "One.",
            "Two.",
        ]
        assert "a.json: item 3: no key 'text'" in str(documents[2][1])
    assert len(read("a.json", b'{"text": "One."}\n{"text": "Two."}\n')) == 2
    assert "no key 'text' in 1 object (the first" in fault("a.json", b'{"name": "x"}')
    assert fault("a.json", b"[" * 100_000).startswith("a.json: ")
    assert only("a.json", b'{"q": "One.", "text": "no"}', text_field="q").text == "One."


@pytest.mark.parametrize("charset", ["utf-16", "utf-16-le", "utf-16-be"])
def test_json_in_utf_16_is_read_as_that_in_utf_8(charset: str) -> None:
    rows = '{"title": "Kai", "text": "Die Fähre fährt um 9."}\r\n{"text": "Größe: 4 €."}\r\n'
    texts = ["Die Fähre fährt um 9.", "Größe: 4 €."]
    for name, data in (("a.jsonl", rows), ("a.json", f"[{rows.strip().replace(chr(10), ',')}]")):
        documents = [document for _, document in read(name, data.encode(charset))]
        assert [document.text for document in documents] == texts


def test_xml_of_another_suffix_is_named_unless_it_may_be_a_text() -> None:
    book = b'<?xml version="1.0" encoding="utf-8"?>\n<FictionBook><binary>iVBORw0K</binary></FictionBook>'
    assert "found XML whose root is <fictionbook>" in fault("a.fb2", book)
    assert only("notes.draft", b"<b>Low tide</b> at nine.").text == "<b>Low tide</b> at nine."


def test_a_row_whose_title_source_or_meta_is_null_has_none() -> None:
    row = b'{"headline": null, "body": "Low tide.", "source": null, "meta": null, "year": null}'
    document = only("a.jsonl", row)
    assert (document.title, document.text, document.source) == ("", "Low tide.", "a.jsonl:1")
    assert document.meta == {"year": None}
    assert document.id == only("a.jsonl", b'{"text": "Low tide."}').id


def test_text_that_was_taken_out_of_a_page_is_not_read() -> None:
    page = "<p>Boats leave at <del>nine</del> <ins>ten</ins> <b> daily</b>.</p><del><p>Not in May.</p></del><p>Go!</p>"
    text = only("a.html", f"<html><body>{page}</body></html>".encode()).text
    assert text == "Boats leave at ten daily.\n\nGo!"
    page = "<p>Tea <s>3.10</s><strike>3</strike> <i style='text-decoration: line-through'>2.90</i> 2.50"
    assert only("a.html", f"<html><body>{page}</body></html>".encode()).text == "Tea 2.50"
    style = '<style:style style:name="T{}"><style:text-properties style:text-line-through-style="{}"/></style:style>'
    span = '<text:span text:style-name="T{}">{}</text:span>'
    body = f"<text:p>Tea {span.format(1, '3.10')}{span.format(2, '2.50')}</text:p>"
    looks = style.format(1, "solid") + style.format(2, "none")
    assert open_document("text", body, looks) == "Tea 2.50"


def test_subtitles_are_what_is_said() -> None:
    srt = "1\r\n00:00:01,000 --> 00:00:04,000\r\nThe <i>Una</i> was built\r\nin 1931.\r\n\r\n"
    srt += "2\r\n00:00:05,000 --> 00:00:08,500\r\n{\\an8}- Is she old?\r\n- Yes, she sails\r\n\r\n"
    srt += "3\r\n00:00:09,000 --> 00:00:11,000\r\non Sundays.\r\n"
    assert only("a.srt", srt.encode()).text == (
        "The Una was built in 1931.\n- Is she old?\n- Yes, she sails on Sundays."
    )
    vtt = "WEBVTT\n\nNOTE draft\n\nfirst\n00:01.000 --> 00:04.000 align:start\n<v Ann>Ready?\nPull &amp; row\n\n"
    vtt += "00:04.000 --> 00:06.000\nPull &amp; row\n<c.red>to land.</c>\n"
    assert only("a.vtt", vtt.encode()).text == "Ann: Ready?\nPull & row to land."
    assert only("b.srt", b"Only a note.").text == "Only a note."
    # An empty line within a subtitle, and a number that ends a file.
    srt = "1\n00:00:01,000 --> 00:00:04,000\n\nIn 1931.\n\n2\n00:00:05,000 --> 00:00:08,500\nIt rained.\n\n"
    assert (
        only("a.srt", f"{srt}It stopped.\n\n3\n".encode()).text
        == "In 1931.\nIt rained.\nIt stopped."
    )


def test_a_space_before_a_quoted_cell_of_a_table_is_no_part_of_it() -> None:
    rows = read("a.csv", b'title, text\nBoat, "Una, the boat."\nFerry, "It said ""go"", twice."\n')
    assert [document.text for _, document in rows] == ["Una, the boat.", 'It said "go", twice.']
    assert only("b.csv", b'x, y, z\n1, "a, b", 3\n').text == (
        "| x | y | z |\n| --- | --- | --- |\n| 1 | a, b | 3 |"
    )
    lines = b'id; text\n4; "Una:\n\n""old""; a boat"\n5; "Vera"\n'
    assert [document.text for _, document in read("d.csv", lines)] == [
        'Una:\n\n"old"; a boat',
        "Vera",
    ]
    inches = b'id, text\n6, A 3" pipe\n7, A 5" pipe\n'
    assert len(read("e.csv", inches)) == 2
    prose = b'We list the name, text, fee.\nShe said, "no", and left.\n'
    assert only("c.csv", prose).text == prose.decode()


def test_columns_of_one_name_are_joined_unless_they_hold_the_text() -> None:
    rows = b"Summary,Label,Label,body,,\nPump,urgent,sea,It drips.,,\nLight,,mole,It is out.,,\n"
    (_, pump), (_, light) = read("a.csv", rows)
    assert isinstance(pump, Document)
    assert isinstance(light, Document)
    assert (pump.text, pump.meta) == ("It drips.", {"Summary": "Pump", "Label": "urgent; sea"})
    assert (light.text, light.meta) == ("It is out.", {"Summary": "Light", "Label": "mole"})
    assert "two columns are called 'body'" in fault("b.csv", b"body,body\nIt drips.,no\n")


GREETING = (
    "Übergrößen, Straße und Äpfel: im Frühjahr wächst alles höher. „Schön“, sagte er – für 5 €. "
    * 3
)
RUSSIAN = "Старый мост через реку построили в тысяча девятьсот тридцать первом году. " * 4
POLISH = "Młyn był zamknięty w niedzielę, a prom płynie rzadko. Może potem dopłynie tu wieczorem, mówił młynarz. "
DANISH = (
    "Den gamle bro blev lukket i går, så færgen sejler hver time. Børn må rejse gratis på søndage. "
)
CZECH = "Starý most byl včera uzavřen, přívoz jezdí každou hodinu. Děti se v neděli vozí zdarma, řekl převozník. "
HUNGARIAN = "A régi híd tegnap lezárt, a komp óránként közlekedik. Vasárnap a gyerekek ingyen utaznak, erről szűkebb hír jött. "
UKRAINIAN = "Пором їздить щогодини, але її діти не люблять його. Є ще міст, і він відкритий щодня. "
HEBREW = "המעבורת יוצאת בכל שעה, והגשר פתוח כל יום. הילדים של המורה אוהבים את הנהר. "
JAPANESE = "古い橋は千九百三十一年に建てられました。町の人々は毎日この橋を渡ります。" * 4


@pytest.mark.parametrize(
    ("text", "charset"),
    [(GREETING, "cp1252"), (RUSSIAN, "cp1251"), (RUSSIAN, "koi8-r"), (JAPANESE, "shift_jis"), (JAPANESE, "euc_jp"),
     (RUSSIAN, "iso8859-5"), (RUSSIAN, "cp855"), (UKRAINIAN, "koi8-u"), (UKRAINIAN, "mac_cyrillic"), (HEBREW, "cp1255"),
     (POLISH, "cp1250"), (POLISH, "iso8859-2"), ("Ältere zahlen 4 €, Schüler die Hälfte: 2 €. ", "iso8859-15"),
     (DANISH, "cp850"), (DANISH, "mac-roman"), (GREETING[:50], "cp437"),
     (CZECH, "iso8859-2"), (CZECH, "cp852"), (HUNGARIAN, "cp1250"),
     (GREETING, "utf-16"), (GREETING, "utf-16-le"), (GREETING, "utf-8"), (GREETING, "utf-8-sig")],
)  # fmt: skip
def test_encodings_are_found_and_named_unless_utf_8(text: str, charset: str) -> None:
    document = only("a.txt", text.encode(charset))
    assert document.text == text
    assert ("encoding" in document.meta) == (not charset.startswith("utf-8"))
    rows = only("a.csv", f'text,title\n"{text}",x\n'.encode(charset))
    assert rows.text == text


ITALIAN = "La città è chiusa perché il ponte è già stato riparato. Più tardi si potrà passare. "
NORWEGIAN = "Båten går nå når været er godt, og så må vi gå på land. Prøv å få låne en åre. "
CROATIAN = "Čamac čeka na početku puta. Večer je kraća, a među kućama đaci čitaju. Inače šetaju. "
LITHUANIAN = "Keltas plaukia trečią valandą, o šeštą diena čia be keltų. Dėl vėjo ėjome pėsčiomis. "


@pytest.mark.parametrize(
    ("text", "charset"),
    [
        (ITALIAN, "cp1252"),
        (NORWEGIAN, "cp1252"),
        (CROATIAN, "cp1250"),
        (LITHUANIAN, "cp1257"),
    ],
)
def test_accents_that_would_be_common_letters_in_cyrillic_are_read_as_written(
    text: str, charset: str
) -> None:
    assert only("a.txt", (text * 3).encode(charset)).text == text * 3


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("Vårt skepp går från ön. ".encode() + b"\xc5r 1900.", "Vårt skepp går från ön. År 1900."),
        ("Šípková růže za Kč 5. ".encode() + b"\x9650 %", "Šípková růže za Kč 5. –50 %"),
        ("Größe: ".encode() + b"\xed\xa0\xbd\xed\xba\xa2" + b"!", "Größe: 🚢!"),
    ],
)
def test_some_bytes_of_another_encoding_leave_the_rest_of_a_text_as_it_is(
    data: bytes, text: str
) -> None:
    document = only("a.txt", data)
    assert document.text == text
    assert document.meta == {"encoding": "utf-8, in part cp1252"}


def test_a_binary_file_with_one_byte_above_ascii_is_no_table() -> None:
    record = b"LOG1\x01\x03speed=12\x00height=7" + "\u00e9".encode("cp850") + b"\x02end of record"
    ((_, fault),) = read("a.csv", record)
    assert "neither UTF-8 nor text in another known encoding" in str(fault)


def at(x: float, y: float, text: str, size: float = 10) -> str:
    return f"BT /F1 {size} Tf {x} {y} Td ({text}) Tj ET "


CELLS = [
    ["City", "Year", "Span"],
    ["Kelm", "1931", "40 m"],
    ["Farrow", "1950", "55 m"],
    ["Lowmere", "", "12 m"],
]
AS_MARKDOWN = """\
| City | Year | Span |
| --- | --- | --- |
| Kelm | 1931 | 40 m |
| Farrow | 1950 | 55 m |
| Lowmere |  | 12 m |"""
TEXT = [
    "The old bridge of the town was built by the engi-", "neer Mara Lind in the spring of the year, and it",
    "carries the road from the mill to the market over", "the river. Every morning the first cart crosses it",
    "before the sun is up. In winter the ice is broken.",
]  # fmt: skip


@pytest.mark.parametrize(
    ("user", "message"), [("", ""), ("secret", "locked: the PDF needs a password")]
)
@pytest.mark.parametrize(
    ("algorithm", "stated", "title"),
    [("RC4-128", "The Ferry", "The Ferry"), ("AES-256", "(anonymous)", "a")],
)
def test_an_encrypted_pdf_is_read_unless_it_needs_a_password(
    user: str, message: str, algorithm: str, stated: str, title: str
) -> None:
    plain = pdf_of("BT /F1 12 Tf 72 720 Td (The ferry of Arvika.) Tj ET")
    writer = pypdf.PdfWriter(io.BytesIO(plain))
    writer.add_metadata({"/Title": stated})
    writer.encrypt(user, "owner", algorithm=algorithm)
    data = io.BytesIO()
    writer.write(data)
    if message:
        assert message in fault("a.pdf", data.getvalue())
    else:
        document = only("a.pdf", data.getvalue())
        assert (document.text, document.title) == ("The ferry of Arvika.", title)


@pytest.mark.parametrize("ruled", [True, False])
def test_tables_of_a_pdf_are_found_with_and_without_rules(ruled: bool) -> None:
    page = at(72, 700, "A bridge", 18) + at(72, 670, "Three bridges were built there.")
    for row, cells in enumerate(CELLS):
        page += "".join(
            at(80 + 120 * column, 634 - 20 * row, cell) for column, cell in enumerate(cells)
        )
    if ruled:
        page += "".join(f"72 {648 - 20 * row} m 432 {648 - 20 * row} l S " for row in range(5))
        page += "".join(
            f"{72 + 120 * column} 648 m {72 + 120 * column} 568 l S " for column in range(4)
        )
    document = only("a.pdf", pdf_of(page + at(72, 540, "They still stand.")))
    assert (
        document.text
        == f"# A bridge\n\nThree bridges were built there.\n\n{AS_MARKDOWN}\n\nThey still stand."
    )
    assert document.title == "A bridge"


def test_cells_that_touch_are_parted_by_their_rules_and_a_table_parts_no_sentence() -> None:
    """Two columns: the table stands at the foot of the left one, and the sentence above it goes on in the right one."""
    lines = [*TEXT[1:4], "before the sun is up, at the"]
    page = "".join(
        at(72, 660 - 12 * row, one) + at(330, 660 - 12 * row, one) for row, one in enumerate(lines)
    )
    for row, cells in enumerate(
        (("Standort", "Tage", "Leiterin"), ("Arvika", "30", "Mara"), ("Kelm", "28", "Bo"))
    ):
        y = 592 - 14 * row
        page += "".join(at(x, y, cell) for x, cell in zip((72, 110.5, 134.5), cells, strict=True))
        page += f"71 {y + 10} m 174 {y + 10} l S "
    page += "71 550 m 174 550 l S " + "".join(
        f"{x} 602 m {x} 550 l S " for x in (71, 110, 134, 174)
    )
    text = only("a.pdf", pdf_of(page)).text
    table = "| Standort | Tage | Leiterin |\n| --- | --- | --- |\n| Arvika | 30 | Mara |\n| Kelm | 28 | Bo |"
    assert table in text
    assert "up, at the neer Mara" in text


def test_cells_that_span_rows_and_columns_of_a_ruled_table_are_repeated() -> None:
    page = (
        at(80, 634, "City")
        + at(200, 634, "Built")
        + at(200, 614, "from")
        + at(320, 614, "to")
        + at(80, 594, "Kelm")
    )
    page += (
        at(200, 594, "1929") + at(320, 594, "1931") + at(200, 574, "1949") + at(320, 574, "1950")
    )
    page += "72 648 m 432 648 l S 192 628 m 432 628 l S 72 608 m 432 608 l S 192 588 m 432 588 l S 72 568 m 432 568 l S "
    page += "72 648 m 72 568 l S 192 648 m 192 568 l S 312 628 m 312 568 l S 432 648 m 432 568 l S "
    table = "| City | Built from | Built to |\n| --- | --- | --- |\n| Kelm | 1929 | 1931 |\n| Kelm | 1949 | 1950 |"
    assert only("a.pdf", pdf_of(page)).text == table


def test_columns_are_read_one_after_the_other_and_hyphens_at_line_ends_are_joined() -> None:
    right = [line.replace("bridge", "school").replace("-", "-") for line in TEXT]
    page = at(72, 700, "Two columns below one title that goes over both of them, on one page", 16)
    for row, (one, other) in enumerate(zip(TEXT, right, strict=True)):
        page += at(72, 660 - 12 * row, one) + at(330, 660 - 12 * row, other)
    paragraph = " ".join(TEXT).replace("engi- neer", "engineer")
    title = "# Two columns below one title that goes over both of them, on one page"
    text = only("a.pdf", pdf_of(page)).text
    assert text == f"{title}\n\n{paragraph}\n\n{paragraph.replace('bridge', 'school')}"


def test_running_headers_and_page_numbers_are_left_out_and_pages_are_known() -> None:
    pages = []
    for number in range(1, 5):
        body = "".join(
            at(72, 600 - 12 * row, line.replace("bridge", f"bridge {number}"))
            for row, line in enumerate(TEXT)
        )
        pages.append(at(72, 750, "Handbook of Kelm") + body + at(300, 40, f"Page {number} of 4"))
    document = only("a.pdf", pdf_of(*pages))
    assert "Handbook" not in document.text
    assert "Page" not in document.text
    assert document.meta["pages"] == [
        [document.text.index(f"The old bridge {n} "), n] for n in range(1, 5)
    ]


def test_rows_of_numbers_at_the_edges_of_pages_are_no_running_headers() -> None:
    """Each page has three of them above and below, at the same heights; they were taken for page numbers, too."""
    pages, numbers = [], []
    for page in range(4):
        content = at(60, 775, f"Tides of Kelm {1970 + page}") + at(300, 30, f"{page + 7}")
        for row in range(38):
            values = [
                f"{37 * page + row + 1}.",
                f"{3 + row % 5}.{page}{row % 7}",
                f"{812 + 13 * row}",
            ]
            numbers.append(values)
            y = 750 - 18 * row
            content += "".join(at(60 + 100 * column, y, text) for column, text in enumerate(values))
        pages.append(content)
    text = only("a.pdf", pdf_of(*pages)).text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert [row for row in rows if row[:1] != ["---"]] == numbers
    assert "Tides" not in text


def test_what_differs_at_one_place_of_each_page_stays() -> None:
    """Invoices, one a page, have their numbers and sums where a book has its headers."""
    invoices = [(1041, "350.00"), (1077, "12.40"), (1090, "99.95"), (1112, "7.30")]
    pages = []
    for number, (invoice, total) in enumerate(invoices, start=1):
        # One number is missing: the pattern of the line is that of the others.
        label = "Invoice #" if number == 2 else f"Invoice {invoice}"
        page = at(72, 750, label) + at(72, 60, f"Total {total} marks")
        page += at(400, 30, f"Kelm Harbour, file 3, sheet {number}")
        page += "".join(at(72, 600 - 12 * row, line) for row, line in enumerate(TEXT))
        pages.append(page)
    text = only("a.pdf", pdf_of(*pages)).text
    assert re.findall(r"Invoice (\S+)", text) == ["1041", "#", "1090", "1112"]
    assert re.findall(r"Total (\S+) marks", text) == [total for _, total in invoices]
    assert "Harbour" not in text


def test_a_table_continues_over_the_page() -> None:
    pages = []
    for first in (0, 2):
        rows = (
            [CELLS[0], *CELLS[1:3]]
            if not first
            else [["Lowmere", "1970", "12 m"], ["Arden", "1980", "13 m"]]
        )
        page = "".join(
            at(80 + 120 * column, 634 - 20 * row, cell)
            for row, cells in enumerate(rows)
            for column, cell in enumerate(cells)
        )
        page += "".join(
            f"72 {648 - 20 * row} m 432 {648 - 20 * row} l S " for row in range(len(rows) + 1)
        )
        page += "".join(
            f"{72 + 120 * n} 648 m {72 + 120 * n} {648 - 20 * len(rows)} l S " for n in range(4)
        )
        pages.append(page)
    text = only("a.pdf", pdf_of(*pages)).text
    assert text == "\n".join(
        [*AS_MARKDOWN.split("\n")[:4], "| Lowmere | 1970 | 12 m |", "| Arden | 1980 | 13 m |"]
    )


def test_a_scan_names_the_program_that_reads_it() -> None:
    assert "run ocrmypdf on it" in fault("a.pdf", pdf_of("0 0 9 9 re f"))
    assert "found an image. ocrmypdf makes" in fault("a.png", b"\x89PNG")


def test_spans_and_lists_that_multiply_what_is_small_stay_small() -> None:
    wide = "<table>" + "<tr>" + "<td colspan=1000>x</td>" * 3000 + "<tr><td>y</table>"
    assert len(only("a.html", wide.encode()).text) < 20_000
    main = (
        "<div>around</div><main><h1>T</h1>"
        + "<div>" * 10_000
        + "deep"
        + "</div>" * 10_000
        + "</main><div>after</div>"
    )
    assert only("a.html", main.encode()).text == "# T\n\ndeep"
    deep = "<ul><li>x" * 1500
    assert len(only("a.html", deep.encode()).text) < 60_000
