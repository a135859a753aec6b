"""A heap of some forty kinds of files whose text is known: what is lost, glued, or out of its place without a word?

    python benchmarks/documents/heap.py [FOLDER]      keeps the files in FOLDER

Each file that can hold them has a heading, two sentences, a list within a list, a table and a last sentence, of words
that no other file has. A sentence or a cell counts as lost if the documents of its file lack it, as glued if a word there
is two of them, as out of place if the table or the list stands before or behind what surrounds it. Files that nobody
can read (locked, scanned, old) have to be in the list of skipped files. Chromium prints the PDFs; without it they are left out.
"""

from __future__ import annotations

import gzip
import html
import io
import json
import random
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.message import EmailMessage
from itertools import pairwise
from pathlib import Path

from kinject.heap.collect import collect
from kinject.heap.write import read_rows

SYLLABLES = re.findall(
    r"\w+", "ka lu mer tin vos dra pel sho gri ban ostu fen quo hal rid zem wyn arl"
)
TEXINFO = "\x1f\nFile: a.info,  Node: Top,  Next: Rules,  Up: (dir)\n\n{}\n\n\x1f\nTag Table:\nNode: Top\x7f12\n"
NAVIGATION = '<div class="nav-panel"><p>Next: <a href="b.html">Rules</a>, Up: <a>Top</a> [<a>Index</a>]</p></div>'


@dataclass
class Truth:
    """What a file says: its words are no other file's."""

    title: str
    before: str
    items: list[str]
    rows: list[list[str]]
    after: str

    @classmethod
    def of(cls, rng: random.Random) -> Truth:
        def name() -> str:
            return "".join(rng.choices(SYLLABLES, k=3))

        def sentence(n: int) -> str:
            return " ".join([name().capitalize(), *(name() for _ in range(n))]) + "."

        rows = [["Standort", "Tage", "Ansprechpartnerin"]]
        rows += [
            [
                name().capitalize(),
                str(rng.randint(2, 99)),
                f"{name().capitalize()} {name().capitalize()}",
            ]
            for _ in range(4)
        ]
        return cls(f"{name()} {name()}".capitalize(), " ".join(sentence(11) for _ in range(6)),
                   [f"{name()} {name()}" for _ in range(4)], rows, " ".join(sentence(11) for _ in range(6)))  # fmt: skip

    def parts(self) -> list[str]:
        """Return all that has to be found, in its order."""
        sentences = [
            *re.findall(r"[^.]+\.", self.before),
            *self.items,
            *(cell for row in self.rows for cell in row),
        ]
        return [
            part.strip() for part in (self.title, *sentences, *re.findall(r"[^.]+\.", self.after))
        ]

    def markdown(self) -> str:
        depth = ("- ", "  - ", "    - ", "- ")
        items = "\n".join(mark + item for mark, item in zip(depth, self.items, strict=True))
        table = "\n".join(
            f"| {' | '.join(row)} |" for row in [self.rows[0], ["---"] * 3, *self.rows[1:]]
        )
        return f"# {self.title}\n\n{self.before}\n\n{items}\n\n{table}\n\n{self.after}\n"

    def body(self) -> str:
        one, two, three, four = map(html.escape, self.items)
        items = f"<ul><li>{one}<ul><li>{two}<ul><li>{three}</li></ul></li></ul></li><li>{four}</li></ul>"
        tag = "th"
        rows = []
        for row in self.rows:
            rows.append("<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in row) + "</tr>")
            tag = "td"
        return f"<p>{self.before}</p>{items}<table>{''.join(rows)}</table><p>{self.after}</p>"

    def page(self, style: str = "", around: str = "") -> bytes:
        head = (
            f"<!doctype html><meta charset=utf-8><title>{self.title}</title><style>{style}</style>"
        )
        return f"{head}{around}<h1>{self.title}</h1>{self.body()}".encode()

    def csv(self, mark: str) -> bytes:
        return "\n".join(mark.join(row) for row in self.rows).encode()


def word(truth: Truth) -> bytes:
    import docx

    made = docx.Document()
    made.add_heading(truth.title, 1)
    made.add_paragraph(truth.before)
    for item, style in zip(
        truth.items, ("List Bullet", "List Bullet 2", "List Bullet 3", "List Bullet"), strict=True
    ):
        made.add_paragraph(item, style=style)
    table = made.add_table(0, 3)
    for row in truth.rows:
        for cell, text in zip(table.add_row().cells, row, strict=True):
            cell.text = text
    made.add_paragraph(truth.after)
    return _saved(made)


def word_numbered(truth: Truth) -> bytes:
    """As Word writes lists: a number and a level in each paragraph."""
    import docx
    from docx.oxml.ns import qn

    made = docx.Document(io.BytesIO(word(truth)))
    number = made.styles["List Number"].element.find(f".//{qn('w:numId')}").get(qn("w:val"))
    for paragraph in made.paragraphs:
        if paragraph.style.name.startswith("List"):
            level = int(paragraph.style.name[-1]) - 1 if paragraph.style.name[-1].isdigit() else 0
            paragraph.style = made.styles["List Paragraph"]
            properties = paragraph._p.get_or_add_pPr().get_or_add_numPr()
            properties.get_or_add_ilvl().val, properties.get_or_add_numId().val = level, int(number)
    return _saved(made)


def slides(truth: Truth) -> bytes:
    import pptx

    deck = pptx.Presentation()
    for texts in ([truth.before], truth.items, [truth.after]):
        slide = deck.slides.add_slide(deck.slide_layouts[1])
        slide.shapes.title.text, slide.placeholders[1].text = truth.title, "\n".join(texts)
        if texts is truth.items:
            table = slide.shapes.add_table(5, 3, 0, 6_000_000, 9_000_000, 900_000).table
            for index, row in enumerate(truth.rows):
                for column, cell in enumerate(row):
                    table.cell(index, column).text = cell
    return _saved(deck)


def workbook(truth: Truth) -> bytes:
    import openpyxl

    book = openpyxl.Workbook()
    book.active.title = truth.title[:30]
    for row in (
        [truth.before],
        *([item] for item in truth.items),
        [],
        *truth.rows,
        [],
        [truth.after],
    ):
        book.active.append(row)
    return _saved(book)


def _saved(made: object) -> bytes:
    out = io.BytesIO()
    made.save(out)  # type: ignore[attr-defined]
    return out.getvalue()


def open_document(truth: Truth, kind: str) -> bytes:
    one, two, three, four = (f"<text:p>{item}</text:p>" for item in truth.items)

    def item(*parts: str) -> str:
        return f"<text:list-item>{''.join(parts)}</text:list-item>"

    def nested(*parts: str) -> str:
        return f"<text:list>{''.join(parts)}</text:list>"

    cells = (
        "".join(f"<table:table-cell><text:p>{cell}</text:p></table:table-cell>" for cell in row)
        for row in truth.rows
    )
    table = "".join(f"<table:table-row>{row}</table:table-row>" for row in cells)
    table = f'<table:table table:name="{truth.title}">{table}</table:table>'
    prose = f'<text:h text:outline-level="1">{truth.title}</text:h><text:p>{truth.before}</text:p>'
    prose += nested(item(one, nested(item(two, nested(item(three))))), item(four))
    inner = table if kind == "spreadsheet" else f"{prose}{table}<text:p>{truth.after}</text:p>"
    inner = f"<draw:page>{inner}</draw:page>" if kind == "presentation" else inner
    names = "xmlns:office='o' xmlns:text='t' xmlns:table='b' xmlns:draw='d'"
    content = f"<office:body><office:{kind}>{inner}</office:{kind}></office:body>"
    content = f"<office:document-content {names}>{content}</office:document-content>"
    return zipped(
        {
            "mimetype": f"application/vnd.oasis.opendocument.{kind}".encode(),
            "content.xml": content.encode(),
        }
    )


def rtf(truth: Truth) -> bytes:
    rows = "".join(
        "".join(rf"\pard\intbl {cell}\cell" for cell in row) + r"\row " for row in truth.rows
    )
    items = "".join(
        rf"\pard\li{360 * n} \bullet  {item}\par " for n, item in enumerate(truth.items)
    )
    return rf"{{\rtf1\ansi \b {truth.title}\b0\par {truth.before}\par {items}{rows}\pard {truth.after}\par}}".encode()


def mail(truth: Truth, kind: str) -> bytes:
    made = EmailMessage()
    made["Subject"], made["From"], made["Date"] = (
        truth.title,
        "a@example.org",
        "Fri, 31 May 2024 10:00:00 +0200",
    )
    made.set_content(truth.markdown())
    if kind == "html":
        made.set_content(truth.page().decode(), subtype="html")
    if kind == "attachment":
        made.set_content("See the attachment.")
        made.add_attachment(
            word(truth), maintype="application", subtype="octet-stream", filename="a.docx"
        )
    return (b"From a Mon Jun 01 10:00:00 2009\n" if kind == "box" else b"") + made.as_bytes()


def wiki(truth: Truth) -> bytes:
    items = "\n".join(
        "*" * depth + f" {item}" for depth, item in zip((1, 2, 3, 1), truth.items, strict=True)
    )
    rows = "\n|-\n".join(
        "\n".join(("! " if row is truth.rows[0] else "| ") + cell for cell in row)
        for row in truth.rows
    )
    text = f"{truth.before}\n\n{items}\n\n{{|\n{rows}\n|}}\n\n{truth.after}"
    page = f"<page><title>{truth.title}</title><ns>0</ns><revision><text>{html.escape(text)}</text></revision></page>"
    return (
        f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/">{page}</mediawiki>'.encode()
    )


def epub(truth: Truth) -> bytes:
    items = '<manifest><item id="a" href="a.xhtml"/></manifest><spine><itemref idref="a"/></spine>'
    package = f'<package xmlns="x">{items}</package>'.encode()
    return zipped({
        "mimetype": b"application/epub+zip", "a.xhtml": truth.page(), "p.opf": package,
        "META-INF/container.xml": b'<container xmlns="y"><rootfiles><rootfile full-path="p.opf"/></rootfiles></container>',
    })  # fmt: skip


def rst(truth: Truth) -> bytes:
    items = "\n\n".join(
        "  " * depth + f"- {item}" for depth, item in zip((0, 1, 2, 0), truth.items, strict=True)
    )
    rule = "  ".join(["=" * 30] * 3)
    rows = ["  ".join(cell.ljust(30) for cell in row) for row in truth.rows]
    table = "\n".join([rule, rows[0], rule, *rows[1:], rule])
    return f"{truth.title}\n{'=' * 40}\n\n{truth.before}\n\n{items}\n\n{table}\n\n{truth.after}\n".encode()


def parquet(truth: Truth) -> bytes:
    import pyarrow
    from pyarrow import parquet

    out = io.BytesIO()
    parquet.write_table(pyarrow.table({"title": [truth.title], "text": [truth.markdown()]}), out)
    return out.getvalue()


def zipped(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


def tarred(name: str, data: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def pdf(page: bytes, password: str | None = None) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "a.html"), Path(folder, "a.pdf")
        source.write_bytes(page)
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer"]
        subprocess.run(
            [*command, f"--print-to-pdf={target}", str(source)], check=True, capture_output=True
        )
        data = target.read_bytes()
    if password is None:
        return data
    import pypdf

    writer = pypdf.PdfWriter(io.BytesIO(data))
    writer.encrypt(password, "owner", algorithm="AES-256")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


RULED = (
    "table{border-collapse:collapse}td,th{border:1px solid black;padding:3px 6px;text-align:left}"
)
BARE = "td,th{padding:2px 12px;text-align:left}th{border-bottom:1px solid black}table{border-collapse:collapse}"
COLUMNS = "body{columns:2;font-size:9pt}h1{column-span:all}"
NARROW = COLUMNS + "table{width:100%;border-spacing:0}td,th{padding:1px 2px;text-align:left}"
TIGHT = COLUMNS + "table{border-spacing:0}td,th{padding:0 1px;text-align:left}th{font-weight:400}"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or ""
DOCBOOK = '<title>x</title><div class="article"><div class="titlepage"><h2 class="title">{}</h2></div>{}</div>'
CONFLUENCE = '<title>x</title><div id="main-content" class="wiki-content"><h1>{}</h1>{}</div>'
ROW = {"title": "x"}
WRITERS: dict[str, Callable[[Truth], bytes]] = {
    "a.txt": lambda t: t.markdown().encode(), "README.Debian": lambda t: t.markdown().encode(),
    "NOTES": lambda t: t.markdown().encode(), "windows.txt": lambda t: ("Größe für 5 €\n\n" + t.markdown()).encode("cp1252"),
    "utf16.txt": lambda t: t.markdown().encode("utf-16"), "a.md": lambda t: t.markdown().encode(),
    "front.md": lambda t: f"---\ntitle: {t.title}\nauthor: Mara\n---\n\n{t.markdown()}".encode(), "a.rst": rst,
    "a.info": lambda t: TEXINFO.format(t.markdown()).encode(),
    "a.html": Truth.page, "menu.html": lambda t: t.page(around="<nav><a>Home</a></nav><script>x</script>"),
    "texinfo.html": lambda t: t.page(around=NAVIGATION),
    "docbook.html": lambda t: DOCBOOK.format(t.title, t.body()).encode(),
    "confluence.html": lambda t: CONFLUENCE.format(t.title, t.body()).encode(),
    "a.docx": word, "numbered.docx": word_numbered, "a.pptx": slides, "a.xlsx": workbook,
    "a.odt": lambda t: open_document(t, "text"), "a.ods": lambda t: open_document(t, "spreadsheet"),
    "a.odp": lambda t: open_document(t, "presentation"), "a.rtf": rtf, "a.epub": epub,
    "a.eml": lambda t: mail(t, "plain"), "html.eml": lambda t: mail(t, "html"), "attached.eml": lambda t: mail(t, "attachment"),
    "a.mbox": lambda t: mail(t, "box"), "wiki.xml": wiki,
    "a.ipynb": lambda t: json.dumps({"cells": [{"cell_type": "markdown", "source": t.markdown()}], "metadata": {}}).encode(),
    "a.py": lambda t: f'"""{t.markdown()}"""\n'.encode(), "a.zip": lambda t: zipped({"in/a.docx": word(t)}),
    "a.tar.gz": lambda t: tarred("a.md", t.markdown().encode()), "a.txt.gz": lambda t: gzip.compress(t.markdown().encode()),
    "a.csv": lambda t: t.csv(","), "semicolon.csv": lambda t: t.csv(";"), "a.tsv": lambda t: t.csv("\t"),
    "a.jsonl": lambda t: json.dumps({**ROW, "text": t.markdown()}).encode(),
    "a.json": lambda t: json.dumps([{**ROW, "text": t.markdown()}]).encode(), "a.parquet": parquet,
    "plain.pdf": lambda t: pdf(t.page(RULED)), "bare.pdf": lambda t: pdf(t.page(BARE)),
    "columns.pdf": lambda t: pdf(t.page(RULED + COLUMNS)), "bare-columns.pdf": lambda t: pdf(t.page(BARE + COLUMNS)),
    "narrow-columns.pdf": lambda t: pdf(t.page(NARROW)),
    "tight-columns.pdf": lambda t: pdf(t.page(TIGHT)),
    "tight-rules.pdf": lambda t: pdf(t.page(TIGHT + RULED.replace("3px 6px", "0"))),
    "aes.pdf": lambda t: pdf(t.page(RULED), ""),
}  # fmt: skip
UNREADABLE: dict[str, bytes] = {
    "scan.png": b"\x89PNG\r\n", "old.doc": b"\xd0\xcf\x11\xe0" + b"0" * 600, "feed.xml": b"<feed><title>x</title></feed>",
    "a.7z": b"7z\xbc\xaf'\x1c", "program": b"\x7fELF\0", "empty.txt": b"",
}  # fmt: skip


def faults(truth: Truth, text: str, *, table_only: bool = False) -> Iterator[str]:
    """Yield what is lost, glued, or out of its place."""
    flat = " ".join(re.sub(r"[|#]", " ", text).split())
    parts = [cell for row in truth.rows for cell in row] if table_only else truth.parts()
    yield from (
        f"lost: {part}" for part in parts if not re.search(rf"(?<!\w){re.escape(part)}(?!\w)", flat)
    )
    known = {word for part in parts for word in re.findall(r"[^\W\d_]{4,}", part)}
    for word in set(re.findall(r"\w+", flat)) - known:
        if sum(other in word for other in known) > 1:
            yield f"glued: {word}"
    places = [flat.find(part) for part in parts if len(part) > 6]
    yield from ("out of place" for a, b in pairwise(places) if 0 <= b < a)


def main(folder: Path) -> None:
    """Print a line for each file with a fault, and the counts."""
    rng = random.Random(7)
    truths = {name: Truth.of(rng) for name in WRITERS if BROWSER or not name.endswith("pdf")}
    (folder / "heap").mkdir(parents=True)
    for name, truth in truths.items():
        (folder / "heap" / name).write_bytes(WRITERS[name](truth))
    unreadable = {**UNREADABLE, **({"locked.pdf": pdf(b"<p>x", "secret")} if BROWSER else {})}
    for name, data in unreadable.items():
        (folder / "heap" / name).write_bytes(data)
    result = collect([folder / "heap"], folder=folder / "run")
    texts: dict[str, str] = {}
    for document in read_rows(result.documents_path):
        name = re.split("[:/]", document.source)[0]
        texts[name] = f"{texts.get(name, '')}\n\n{document.text}"
    told = {row["file"] for row in result.skipped()}
    n_faulty = 0
    for name, truth in truths.items():
        wrong = [
            *faults(truth, texts.get(name, ""), table_only=name.endswith((".csv", ".tsv", ".ods")))
        ]
        wrong = [] if name in told else wrong
        n_faulty += bool(wrong)
        print(*(f"{name}: {fault}" for fault in wrong[:6]), sep="\n", end="\n" * bool(wrong))
    untold = sorted(unreadable.keys() - told)
    print(*(f"{name}: not told" for name in untold), sep="\n", end="\n" * bool(untold))
    print(
        f"{len(truths)} kinds of files, {n_faulty} with text lost, glued or out of place; {len(untold)} unreadable ones untold"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as made:
            main(Path(made))
