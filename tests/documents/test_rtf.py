"""Rich text as programs write it: groups, notes, tables, characters of any code page."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from kinject.documents.readers import read_file
from kinject.types import Document


def _document(
    body: bytes, head: bytes = rb"\ansi\ansicpg1252\deff0{\fonttbl{\f0 Arial;}}"
) -> Document:
    data = rb"{\rtf1" + head + body + b"}"
    ((_, document),) = read_file(Path("a.rtf"), io.BytesIO(data))
    assert isinstance(document, Document), document
    return document


def _text(body: bytes) -> str:
    return _document(body).text


def test_footnotes_endnotes_and_comments_are_below_the_text() -> None:
    body = (
        rb"\pard Built in 1904{\super\chftn{\footnote\pard\plain\chftn  By Lind.\par Twice.}}, lost "
        rb"in 1931.{\super\chftn{\*\footnote\ftnalt\chftn  In May.}} Rebuilt.{\*\annotation When?}\par"
    )
    assert _text(body) == (
        "Built in 1904[^1], lost in 1931.[^2] Rebuilt.[^3]\n\n"
        "[^1]: By Lind.\nTwice.\n\n[^2]: In May.\n\n[^3]: When?"
    )


def test_groups_without_a_document_around_them_are_all_read() -> None:
    data = rb"{\pard Tides of May:\par}{\trowd\cellx900\cellx1800\intbl High\cell 4 m\cell\row}{\pard End.\par}"
    ((_, document),) = read_file(Path("a.rtf"), io.BytesIO(data))
    assert isinstance(document, Document)
    assert document.text == "Tides of May:\nHigh | 4 m\n\nEnd."


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (rb"Ferry \u-10179?\u-8544? leaves", "Ferry \U0001f6a0 leaves"),
        (rb"\uc2 A \u-10187\'d8\'31\u-9214\'dc\'02 B", "A \U0001d402 B"),
        (rb"\uc0 G\u-10240\u-8371 !", "G\U0001034d!"),
        (rb"{\uc1\u8364 x}{\u8364\'80}5", "€€5"),
        (rb"a\u128674?b", "a\U0001f6a2b"),
        (rb"so\u8230\'85 \u8222\ldblquote x\u8209\_y\u8239\~z\rquote", "so… „x‑y\u202fz’"),
        (rb"half \u-10179? pair", "half \ufffd pair"),
        (rb"{\pict\bin5 {{{\}}A{\*\x\bin3 }}}}B", "AB"),
        (rb"{\upr{Kelm?}{\*\ud{Kelm\u8217?}}} bridge", "Kelm’ bridge"),
        (rb"shown {\v hidden }{\v0 too}\v  gone\v0 .", "shown too."),
        (rb"{\deleted old}{\revised new}", "new"),
        (rb"{\i0\b0\*\cs7 by the mole}{\*\cs7 nothing}", "by the mole"),
        (rb"Low tide\column High tide\lbr0 Slack", "Low tide\nHigh tide\nSlack"),
        (rb"soft\-ly non\_stop a\~b", "softly non-stop a\xa0b"),
        (rb"{\field{\*\fldinst HYPERLINK \"x\"}{\fldrslt the page}}", "the page"),
        (rb'4 {\field{\*\fldinst {SYMBOL 87 \\f "Symbol"}}{\fldrslt {\b }}}m', "4 Ωm"),
        (rb'4 {\field{\*\fldinst SYMBOL 87 \\f "Symbol"}{\fldrslt{\b O}}}m', "4 Om"),
        (rb"{\field{\fldinst PAGE}{\fldrslt}}x", "x"),
        (rb"x{\mmath{\*\moMath{\msSup{\msSupPr{\mtype a}}{\me b}{\msup 2}}}}", "xb^(2)"),
        (rb"{\header top}A{\footer \'80}", "A"),
        (
            rb"7 \'d7 10{\super\endash 3} m\super 2\nosupersub , 21{\super st} H{\sub 2}",
            "7 × 10⁻³ m², 21st H2",
        ),
        (rb"{\fonttbl{\f7\fcharset2 Symbol;}{\f8 Arial;}}{\f7 W\'b3\u-3996?} \f8 W", "Ω≥δ W"),
    ],
)
def test_characters_and_groups(body: bytes, text: str) -> None:
    assert _text(body) == text


@pytest.mark.parametrize(
    ("head", "body", "text"),
    [
        (rb"\ansi\ansicpg1253", "Γέφυρα".encode("cp1253"), "Γέφυρα"),
        (rb"\ansi\ansicpg949", "다리".encode("cp949"), "다리"),
        (rb"\ansi\ansicpg932", rb"\'83e\'83X\'83g", "テスト"),
        (rb"\ansi\ansicpg932", rb"\'94\\\'83\{\'83\} \{a\}\\", "能ボマ {a}\\"),
        (rb"\ansi\ansicpg1252{\fonttbl{\f3\fcharset204 A;}{\f4\fcharset161 B;}}",
         rb"\f3\'cc\'ee\'f1\'f2 {\f4\'c3} \plain\'e4", "Мост Γ ä"),
        (rb"\mac", rb"\'8a", "ä"),
        (rb"\ansi\ansicpg65001", "Brücke".encode(), "Brücke"),
    ],
)  # fmt: skip
def test_code_pages_of_the_file_and_of_fonts(head: bytes, body: bytes, text: str) -> None:
    assert _document(b" " + body, head).text == text


TABLE = "| Stop | Hour |\n| --- | --- |\n| Kelm | 7 |"


@pytest.mark.parametrize(
    "body",
    [
        rb"\trowd\cellx900\cellx1800\intbl Stop\cell Hour\cell\row\intbl Kelm\cell 7\cell\row",
        rb"{\trowd\cellx900\cellx1800{\pard\intbl{\b Stop}\par\cell}{{\pard\intbl Hour}\cell}\row}"
        rb"{\trowd\cellx900\cellx1800{{\intbl Kelm}\cell}{{{\intbl 7\par}}\cell}{\row}}",
        rb"Stop\cell Hour\cell\row Kelm\cell 7\cell\row",
        rb"\trowd\cellx900\cellx1800\pard\intbl{Stop\cell Hour\cell }\pard\intbl{\trowd\cellx900"
        rb"\cellx1803\row}\pard\intbl{Kelm\cell 7\cell }{\trowd\cellx900\cellx1803\row}",
    ],
)
def test_tables_of_any_groups(body: bytes) -> None:
    assert (
        _text(rb"{\pard Before.\par}" + body + rb"\pard After.\par")
        == f"Before.\n{TABLE}\n\nAfter."
    )


def test_cells_over_columns_and_rows_and_tables_in_cells() -> None:
    body = (
        rb"\trowd\cellx900\cellx2700\intbl Stop\cell Hours\cell\row"
        rb"\trowd\clvmgf\cellx900\cellx1800\cellx2700\intbl Kelm\cell 7\cell 9\cell\row"
        rb"\trowd\clvmrg\cellx900\cellx1800\cellx2700\intbl\cell 8\cell"
        rb"\pard\intbl\itap2 a\nestcell b\nestcell{\*\nesttableprops\trowd\cellx5\cellx9\nestrow}"
        rb"{\nonesttables\par}\pard\intbl c\cell\trowd\clvmrg\cellx900\cellx1800\cellx2700\row"
    )
    assert _text(body).splitlines()[2:] == ["| Kelm | 7 | 9 |", "| Kelm | 8 | a: b c |"]


def test_headings_lists_text_boxes_and_the_title() -> None:
    body = (
        rb"{\info{\title The {\b Mill}}{\author Bo}}\pard\outlinelevel1 Tolls\par\pard{\listtext\f0 \'b7\tab}"
        rb"one\par{\pntext 2.\tab}two\par{\shp{\*\shpinst{\sp{\sn a}{\sv b}}{\shptxt\pard Box.\par}}"
        rb"{\shprslt{\*\do{\dptxbxtext Box.}}}}End.\par"
    )
    document = _document(body)
    assert document.title == "The Mill"
    assert document.text == "## Tolls\n\n- one\n2. two\nEnd.\nBox."


def test_a_bullet_that_is_an_o_is_a_bullet() -> None:
    body = rb"{\listtext\f1 o\tab}oars\par{\listtext o)\tab}ropes\par"
    assert _text(body) == "- oars\no) ropes"


def test_text_that_is_struck_through_is_not_read() -> None:
    body = (
        rb"Fare: {\strike 4\u8364? }5 marks\striked1 , or 6\striked0 .\par\strike Old.\plain New."
    )
    assert _text(body) == "Fare: 5 marks.\nNew."


def test_a_file_that_is_cut_off_or_damaged_gives_what_it_has() -> None:
    assert _text(rb"\pard The toll is 3.\par {\b Kelm\'")
