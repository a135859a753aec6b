"""Mails as they are: code pages, bodies as web pages and rich text, parts that follow one another."""

from __future__ import annotations

import base64
import io
from email.message import EmailMessage
from email.mime.multipart import MIMEMultipart
from email.mime.text import MIMEText
from pathlib import Path

import compressed_rtf
import pytest

from kinject.documents.readers import read_file
from kinject.types import Document
from outlook import mail_streams, ole_file

INTERNET, MESSAGE = 0x3FDE, 0x3FFD
ENCAPSULATED = (
    rb"{\rtf1\ansi\ansicpg1251\fromhtml1{\fonttbl{\f0\fcharset204 Arial;}}{\*\htmltag64 <p>}"
    rb"\htmlrtf {\htmlrtf0 {\*\htmltag84 <b>}\htmlrtf \b\htmlrtf0 \'cc\'ee\'f1\'f2{\*\htmltag92 </b>} "
    rb"{\*\htmltag84 &lt;}\htmlrtf <\htmlrtf0 9 \u8364?\htmlrtf\par}\htmlrtf0{\*\htmltag72 </p>}}"
)


def _read(name: str, data: bytes) -> list[tuple[str, Document]]:
    documents = []
    for location, document in read_file(Path(name), io.BytesIO(data)):
        assert isinstance(document, Document), document
        documents.append((location, document))
    return documents


def _text(name: str, data: bytes) -> str:
    ((_, document),) = _read(name, data)
    return document.text


@pytest.mark.parametrize(
    ("page", "codec", "text"),
    [
        (950, "big5", "橋在星期二關閉。請走渡輪。"),
        (932, "cp932", "橋は火曜日に閉まります①。"),
        (1255, "cp1255", "הגשר סגור ביום שלישי בבוקר"),
        (54936, "gb18030", "大桥星期二关闭，请乘渡轮。"),
        (20866, "koi8-r", "Мост закрыт во вторник до полудня"),
        (28592, "iso8859-2", "Most będzie zamknięty we wtorek, proszę płynąć łodzią."),
        (949, "cp949", "다리는 화요일에 닫힙니다. 똠방각하"),
        (50220, "iso2022_jp", "橋は火曜日に閉まります"),
        (65001, "utf-8", "Die Brücke ist am Dienstag gesperrt. 橋"),
    ],
)
@pytest.mark.parametrize("stated_by", [(MESSAGE,), (INTERNET,), (MESSAGE, INTERNET)])
def test_a_mail_of_outlook_is_read_in_its_code_page(
    page: int, codec: str, text: str, stated_by: tuple[int, ...]
) -> None:
    texts = {"0037001E": text[:4].encode(codec), "1000001E": f"{text}\r\n".encode(codec)}
    data = ole_file(mail_streams(texts, dict.fromkeys(stated_by, page)))
    assert _text("a.msg", data) == f"# {text[:4].strip()}\n\n{text}"


def test_a_mail_of_outlook_with_a_web_page_or_rich_text_only_is_read() -> None:
    page = "<p>Мост <b>закрыт</b>.</p>".encode("cp1251")
    assert (
        _text("a.msg", ole_file(mail_streams({"10130102": page}, {INTERNET: 1251})))
        == "Мост закрыт."
    )
    wide = "<p>Brücke &amp; Fähre</p>".encode("utf-16-le")
    assert _text("a.msg", ole_file(mail_streams({"1013001F": wide}, {}))) == "Brücke & Fähre"
    rich = compressed_rtf.compress(rb"{\rtf1\ansi The bridge\u8212?closed.\par On Tuesday.\par}")
    assert (
        _text("a.msg", ole_file(mail_streams({"10090102": rich}, {})))
        == "The bridge—closed.\nOn Tuesday."
    )
    packed = compressed_rtf.compress(ENCAPSULATED)
    assert _text("a.msg", ole_file(mail_streams({"10090102": packed}, {}))) == "Мост <9 €"


def test_a_mail_within_a_mail_of_outlook_is_read_in_its_own_code_page() -> None:
    folder = "__attach_version1.0_#00000000/"
    inner = f"{folder}__substg1.0_3701000D/"
    streams = {
        **mail_streams({"1000001F": "Siehe unten.".encode("utf-16-le")}, {}),
        f"{folder}__substg1.0_3704001E": b"old.msg",
        **mail_streams({"1000001E": "Γέφυρα κλειστή".encode("cp1253")}, {MESSAGE: 1253}, inner),
        f"{inner}__attach_version1.0_#00000000/__substg1.0_3704001E": b"n.txt",
        f"{inner}__attach_version1.0_#00000000/__substg1.0_37010102": b"Tolls.",
    }
    found = [(location, document.text) for location, document in _read("a.msg", ole_file(streams))]
    assert found == [
        ("a.msg", "Siehe unten."),
        ("a.msg/old.msg", "Γέφυρα κλειστή"),
        ("a.msg/old.msg/n.txt", "Tolls."),
    ]


def _multipart(kind: str, *parts: tuple[str, str]) -> bytes:
    mail = MIMEMultipart(kind)
    mail["From"], mail["Subject"] = "a@example.org", "Tolls"
    for subtype, text in parts:
        mail.attach(MIMEText(text, subtype, "utf-8"))
    return bytes(mail)


def test_parts_that_follow_one_another_are_all_read_and_of_alternatives_one() -> None:
    page, footer = "<p>The toll is <b>3</b> crowns.</p>", "--\nScanned by Kelm Shield."
    text = "# Tolls\n\nThe toll is 3 crowns."
    assert (
        _text("a.eml", _multipart("mixed", ("html", page), ("plain", footer)))
        == f"{text}\n\n{footer}"
    )
    plain = ("plain", "The toll is 3 crowns.")
    assert _text("a.eml", _multipart("alternative", plain, ("html", page))) == text
    assert _text("a.eml", _multipart("mixed", plain, ("html", page))) == text
    long_page = f"<p>{'The toll of the bridge is three crowns. ' * 9}</p>"
    stub = ("plain", "This mail is a web page.")
    assert "three crowns" in _text("a.eml", _multipart("alternative", stub, ("html", long_page)))


def test_parts_of_one_kind_that_differ_in_a_word_are_both_read_and_other_texts_attached() -> None:
    page = "<p>From May the ferry to Arvika sails at six, at noon and at nine, but not on {}.</p>"
    days = [("html", page.format(day)) for day in ("Monday", "Friday", "Monday")]
    found = _read("a.eml", _multipart("mixed", *days, ("x-diff", "+toll 4"), ("calendar", "DAY:1")))
    assert found[0][1].text.count("Monday") == found[0][1].text.count("Friday") == 1
    assert [document.text for _, document in found[1:]] == ["+toll 4", "DAY:1"]
    both = _multipart("alternative", ("plain", "At six."), ("calendar", "DAY:1"))
    assert _text("a.eml", both) == "# Tolls\n\nAt six."
    alone = b"From: a@example.org\nSubject: Tolls\nContent-Type: text/markdown\n\n*Four* pence.\n"
    assert _text("a.eml", alone) == "# Tolls\n\n*Four* pence."


def test_a_signature_is_no_text_of_a_mail() -> None:
    sealed = "-----BEGIN PGP SIGNATURE-----\n\niQEzBAABCAAd\n-----END PGP SIGNATURE-----\n"
    mail = MIMEMultipart("signed", protocol="application/pgp-signature")
    mail["From"], mail["Subject"] = "a@example.org", "Dredging"
    inner = MIMEMultipart("mixed")
    inner.attach(MIMEText("The basin is dredged."))
    plan = MIMEText("From Monday on.")
    plan.add_header("Content-Disposition", "attachment", filename="plan.txt")
    inner.attach(plan)
    mail.attach(inner)
    signature = MIMEText(sealed)
    signature.replace_header("Content-Type", 'application/pgp-signature; name="signature.asc"')
    mail.attach(signature)
    found = [document.text for _, document in _read("a.eml", bytes(mail))]
    assert found == ["# Dredging\n\nThe basin is dredged.", "From Monday on."]


def test_the_styles_of_a_saved_page_are_no_documents() -> None:
    page = MIMEMultipart("related")
    page["From"], page["Subject"] = "<Saved by a browser>", "Tides"
    page.attach(MIMEText("<p>High water at <b>five</b>.</p>", "html"))
    page.attach(MIMEText("p { margin: 0 }", "css"))
    page.attach(MIMEText("let x = 1", "javascript"))
    ((_, document),) = _read("a.mhtml", bytes(page))
    assert document.text == "# Tides\n\nHigh water at five."


def test_a_nul_in_a_mail_costs_nothing_else() -> None:
    mail = (
        "From: a@example.org\nSubject: =?utf-8?q?Tolls=00_and=00?=\n\nThree crowns, \0if by day.\n"
    )
    ((_, document),) = _read("a.eml", mail.encode())
    assert (document.title, document.text) == (
        "Tolls and",
        "# Tolls and\n\nThree crowns, if by day.",
    )
    wide = {"0037001F": "To\0lls\0".encode("utf-16-le"), "1000001F": "Day".encode("utf-16-le")}
    assert _text("a.msg", ole_file(mail_streams(wide, {}))) == "# To lls\n\nDay"


def test_the_name_of_an_attachment_is_in_the_code_page_of_its_mail() -> None:
    folder = "__attach_version1.0_#00000000/__substg1.0_"
    streams = {
        **mail_streams({"1000001E": "다리는 화요일에 닫힙니다.".encode("cp949")}, {MESSAGE: 949}),
        f"{folder}3707001E": "요금.txt".encode("cp949"),
        f"{folder}37010102": b"Four.",
    }
    assert [document.title for _, document in _read("a.msg", ole_file(streams))] == ["a", "요금"]


def test_a_list_footer_beside_alternatives_follows_them() -> None:
    outer = MIMEMultipart("mixed")
    outer["From"], outer["Subject"] = "a@example.org", "Tolls"
    inner = MIMEMultipart("alternative")
    inner.attach(MIMEText("Three crowns.", "plain"))
    inner.attach(MIMEText("<p>Three <i>crowns</i>.</p>", "html"))
    outer.attach(inner)
    outer.attach(MIMEText("You get this as a member of tolls@.", "plain"))
    expected = "# Tolls\n\nThree crowns.\n\nYou get this as a member of tolls@."
    assert _text("a.eml", bytes(outer)) == expected


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig"])
def test_mails_kept_as_unicode_text_are_read(encoding: str) -> None:
    mail = "From: a@example.org\nSubject: Zölle\nContent-Type: text/plain; charset=utf-16\n\nDrei Kronen – ab Mai.\n"
    assert _text("a.eml", mail.encode(encoding)) == "# Zölle\n\nDrei Kronen – ab Mai."
    box = f"From a Mon Jun 01 10:00:00 2009\n{mail}\nFrom b Mon Jun 01 11:00:00 2009\n{mail}"
    found = [document.text for _, document in _read("a.mbox", box.encode(encoding))]
    assert found == ["# Zölle\n\nDrei Kronen – ab Mai."] * 2


RUSSIAN = "Мост закрыт во вторник до полудня, паром ходит каждый час."


@pytest.mark.parametrize(
    ("declared", "codec", "text"),
    [
        ("us-ascii", "cp1251", RUSSIAN),
        ("iso-8859-1", "koi8-r", RUSSIAN),
        ("x-unknown", "cp1251", RUSSIAN),
        ("windows-1252", "utf-8", RUSSIAN),
        ("iso-2022-jp", "iso2022_jp", "橋は火曜日に閉まります"),
        ("", "iso2022_jp", "橋は火曜日に閉まります"),
        ("gb2312", "gbk", "大橋星期二關閉"),
        ("utf-16le", "utf-16-le", RUSSIAN),
        ("us-ascii", "cp1252", "Die Brücke über den Fluß ist am Dienstag gesperrt."),
    ],
)
def test_a_mail_whose_charset_is_wrong_or_unknown_is_read(
    declared: str, codec: str, text: str
) -> None:
    charset = f'; charset="{declared}"' if declared else ""
    head = "From: a@example.org\nSubject: x\nContent-Transfer-Encoding: base64\n"
    head += f"Content-Type: text/plain{charset}\n\n"
    assert (
        _text("a.eml", head.encode() + base64.encodebytes(text.encode(codec))) == f"# x\n\n{text}"
    )


@pytest.mark.parametrize(
    ("declared", "codec", "text"),
    [
        ("windows-874", "cp874", "ประตูน้ำปิดวันศุกร์"),
        ("ISO-8859-8-I", "iso8859-8", "הסכר נסגר ביום שישי"),
        ("x-cp1251", "cp1251", "Шлюз закрыт в пятницу"),
        ("x-sjis", "cp932", "水門は金曜日に閉まります"),
        ("x-mac-cyrillic", "mac_cyrillic", "Шлюз"),
        ("windows-949", "cp949", "수문은 금요일에"),
    ],
)
def test_charsets_have_the_names_that_browsers_know(declared: str, codec: str, text: str) -> None:
    word = f"=?{declared}?B?{base64.b64encode(text.encode(codec)).decode()}?="
    head = f"From: a@example.org\nSubject: {word}\nContent-Type: text/plain; charset={declared}"
    mail = f"{head}\n\n".encode() + text.encode(codec)
    assert _text("a.eml", mail) == f"# {text}\n\n{text}"
    page = f"<meta charset={declared}><p>{text}</p>".encode(codec)
    assert _text("a.html", page) == text


def test_a_subject_of_raw_bytes_is_read() -> None:
    mail = f"From: a@example.org\nSubject: {RUSSIAN}\n\nText".encode("cp1251")
    assert _read("a.eml", mail)[0][1].title == RUSSIAN


def test_flowed_lines_are_one_paragraph_and_forwarded_mails_documents() -> None:
    inner = EmailMessage()
    inner["Subject"] = "Old"
    inner.set_content("Grüße.", cte="quoted-printable")
    body = "The toll of \nthe bridge \nis 3.\n\n>> Who \n>> asks?\n\n From Kelm.\n-- \nBo"
    outer = MIMEMultipart("mixed")
    outer["From"] = "a@example.org"
    flowed = MIMEText(body, "plain")
    flowed.set_param("format", "flowed")
    outer.attach(flowed)
    middle = EmailMessage()
    middle["Subject"] = "Middle"
    middle.set_content("See below.")
    middle.add_attachment(inner)
    part = EmailMessage()
    part["Content-Type"] = "message/rfc822"
    part.set_payload([middle])
    outer.attach(part)
    found = [(location, document.text) for location, document in _read("a.eml", bytes(outer))]
    assert found == [
        ("a.eml", "The toll of the bridge is 3.\n\n>> Who asks?\n\nFrom Kelm.\n--\nBo"),
        ("a.eml/attachment-1", "# Middle\n\nSee below."),
        ("a.eml/attachment-1/attachment-1", "# Old\n\nGrüße."),
    ]


@pytest.mark.parametrize(
    ("page", "text"),
    [
        (
            '<p>At nine.</p><div class="gmail_quote"><div>On Monday Bo wrote:</div>'
            "<blockquote>When?</blockquote></div>",
            "At nine.",
        ),
        (
            '<p>At ten.</p><div class="moz-cite-prefix">On 3 May Bo wrote:</div>'
            '<blockquote type="cite"><p>When?</p><blockquote type="cite">Tell me.</blockquote>'
            "</blockquote>",
            "At ten.",
        ),
        (
            '<blockquote type="cite"><p>When?</p></blockquote><p>At one.</p>',
            "When?\n\nAt one.",
        ),
        (
            '<p>See below.</p><div class="gmail_quote">---------- Forwarded message ---------'
            "<p>It sails at two.</p></div>",
            "See below.\n\n---------- Forwarded message ---------\n\nIt sails at two.",
        ),
    ],
)
def test_the_quoted_mail_that_ends_a_web_page_is_left_out(page: str, text: str) -> None:
    mail = EmailMessage()
    mail["Subject"] = "Ferry"
    mail.set_content(f"<html><body>{page}</body></html>", subtype="html")
    assert _text("a.eml", bytes(mail)) == f"# Ferry\n\n{text}"


_ORIGINAL = "{}Von: Bo\nGesendet: Montag, 3. Mai 2021\nAn: Mara\nCc: Ed\nBetreff: Fähre\n\nWann?"


@pytest.mark.parametrize(
    ("subject", "own", "is_left_out"),
    [
        ("AW: Fähre", "Um neun.", True),
        ("WG: Fähre", "Zur Kenntnis.", False),
        ("AW: Fähre", "Siehe unten.", False),
        ("AW: Fähre", "", False),
    ],
)
@pytest.mark.parametrize("line", ["", "-----Ursprüngliche Nachricht-----\n", "_______\n"])
def test_the_mail_that_outlook_quotes_below_a_reply_is_left_out(
    subject: str, own: str, is_left_out: bool, line: str
) -> None:
    quoted = _ORIGINAL.format(line)
    mail = EmailMessage()
    mail["Subject"] = subject
    mail.set_content(f"{own}\n\n{quoted}")
    body = own
    if not is_left_out:
        body = f"{own}\n\n{quoted}".strip()
    assert _text("a.eml", bytes(mail)) == f"# {subject}\n\n{body}"


@pytest.mark.parametrize(
    "head",
    ["Op di 4 mei 2021 schreef Bo Lind <b@example.org>:", "Bo 于2021年5月4日周二 写道：", "Вт, 4 мая, Бо написал:"],
)  # fmt: skip
def test_the_line_above_a_quoted_mail_goes_with_it_in_any_language(head: str) -> None:
    mail = EmailMessage()
    mail["Subject"] = "Ferry"
    mail.set_content(f"At nine.\n\n{head}\n> When?\n> Bo\n")
    assert _text("a.eml", bytes(mail)) == "# Ferry\n\nAt nine."
