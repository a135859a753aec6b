"""Cells of tables that are read under their header: python benchmarks/documents/readers.py [TABLES].

Writes TABLES (60) documents in each format with tables of known cells between paragraphs, and reads them. A cell counts as
found if a Markdown table has its text in the row of its first cell, under a header that holds all words of its own. A tenth
of the tables have a header of two rows, a tenth cells over two rows, a fifth empty cells, a fifth cells of two lines.
PDFs are printed by Chromium, where it is installed: with and without rules, on pages of one column and of two.
"""

from __future__ import annotations

import html
import io
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from kinject.documents.readers import read_file
from kinject.types import Document

_TEXT = """bridge river harbour timber mill granite market lantern orchard winter copper valley school ledger ferry quarry
station garden workshop council archive museum library tower engine"""
WORDS = _TEXT.split()


@dataclass
class Table:
    """Rows of cells; a header of one or two levels; `merged` are (row, column) whose cell covers the row below as well."""

    header: list[str]
    groups: list[tuple[str, int]]
    rows: list[list[str]]
    merged: set[tuple[int, int]] = field(default_factory=set)

    def truth(self) -> list[tuple[str, str, str]]:
        """Return (first cell of the row, words of the header, cell) of each cell that holds text."""
        above = [name for name, width in self.groups for _ in range(width)] or [""] * len(
            self.header
        )
        cells = []
        for index, row in enumerate(self.rows):
            for column, name in enumerate(self.header):
                cell = (
                    self.rows[index - 1][column]
                    if (index - 1, column) in self.merged
                    else row[column]
                )
                if cell:
                    cells.append((row[0], f"{above[column]} {name}".strip(), cell))
        return cells


def make_table(rng: random.Random, number: int, columns: int | None = None) -> Table:
    """Return a table of the kind that its number asks for."""
    width = columns or rng.randint(3, 6)
    names = rng.sample(WORDS, width + 2)
    height = rng.randint(3, 9)
    rows = [
        [f"{rng.choice(WORDS)} {number}-{row}", *(_value(rng, number) for _ in range(width - 1))]
        for row in range(height)
    ]
    table = Table([name.capitalize() for name in names[:width]], [], rows)
    if number % 10 == 3 and width > 3:
        table.groups = [("", 1), (names[-1].capitalize(), 2), (names[-2].capitalize(), width - 3)]
    if number % 10 == 6:
        table.merged = {(1, 1)}
    return table


def _value(rng: random.Random, number: int) -> str:
    kind = rng.random()
    if number % 5 == 1 and kind < 0.15:
        return ""
    if kind < 0.6:
        return f"{rng.uniform(1, 9000):,.1f}"
    words = rng.sample(WORDS, 4 if number % 5 == 2 and kind > 0.8 else 1)
    return f"{' '.join(words)} {rng.randint(10, 99)}"


def sentences(rng: random.Random, n: int) -> str:
    """Return a paragraph of n sentences."""
    return " ".join(
        " ".join(rng.choices(WORDS, k=rng.randint(8, 14))).capitalize() + "." for _ in range(n)
    )


def as_html(table: Table) -> str:
    """Return a table of HTML."""
    out = ["<table>"]
    if table.groups:
        out.append(
            "<tr>"
            + "".join(f"<th colspan={width}>{name}</th>" for name, width in table.groups)
            + "</tr>"
        )
    out.append("<tr>" + "".join(f"<th>{name}</th>" for name in table.header) + "</tr>")
    for index, row in enumerate(table.rows):
        cells = []
        for column, cell in enumerate(row):
            if (index - 1, column) not in table.merged:
                span = " rowspan=2" if (index, column) in table.merged else ""
                cells.append(f"<td{span}>{html.escape(cell)}</td>")
        out.append(f"<tr>{''.join(cells)}</tr>")
    return "".join(out) + "</table>"


def page(rng: random.Random, tables: list[Table], style: str = "") -> bytes:
    """Return a web page with tables between paragraphs."""
    parts = "".join(
        f"<h2>{rng.choice(WORDS)}</h2><p>{sentences(rng, 5)}</p>{as_html(table)}"
        for table in tables
    )
    head = f"<!doctype html><meta charset=utf-8><title>T</title><style>{style}</style>"
    return (
        f"{head}<h1>Report</h1><p>{sentences(rng, 6)}</p>{parts}<p>{sentences(rng, 6)}</p>".encode()
    )


def docx(rng: random.Random, tables: list[Table]) -> bytes:
    """Return a Word document."""
    import docx

    document = docx.Document()
    for table in tables:
        document.add_heading(rng.choice(WORDS), 2)
        document.add_paragraph(sentences(rng, 4))
        first = 2 if table.groups else 1
        made = document.add_table(first + len(table.rows), len(table.header))
        column = 0
        for name, width in table.groups:
            made.cell(0, column).merge(made.cell(0, column + width - 1)).text = name
            column += width
        for row, cells in enumerate([table.header, *table.rows], start=first - 1):
            for column, cell in enumerate(cells):
                if (row - first - 1, column) not in table.merged:
                    made.cell(row, column).text = cell
        for row, column in table.merged:
            made.cell(first + row, column).merge(made.cell(first + row + 1, column))
    out = io.BytesIO()
    document.save(out)
    return out.getvalue()


def xlsx(rng: random.Random, tables: list[Table]) -> bytes:
    """Return a workbook: the tables one below the other, titles above them, on two sheets."""
    import openpyxl

    book = openpyxl.Workbook()
    sheets = [book.active, book.create_sheet("Second")]
    for number, table in enumerate(tables):
        sheet = sheets[number % 2]
        start = sheet.max_row + 2 if sheet.max_row > 1 else 1
        left = rng.choice([1, 1, 3])
        sheet.cell(start, left, f"Table of {rng.choice(WORDS)}")
        row, column = start + 1, left
        for name, width in table.groups:
            sheet.cell(row, column, name)
            if width > 1:
                sheet.merge_cells(
                    start_row=row, start_column=column, end_row=row, end_column=column + width - 1
                )
            column += width
        row += bool(table.groups)
        for index, cells in enumerate([table.header, *table.rows]):
            for offset, cell in enumerate(cells):
                if (index - 2, offset) not in table.merged:
                    sheet.cell(row + index, left + offset, cell or None)
        for index, offset in table.merged:
            first = row + 1 + index
            sheet.merge_cells(
                start_row=first,
                end_row=first + 1,
                start_column=left + offset,
                end_column=left + offset,
            )
    out = io.BytesIO()
    book.save(out)
    return out.getvalue()


RULED = (
    "table{border-collapse:collapse}td,th{border:1px solid black;padding:3px 6px;text-align:left}"
)
PLAIN = "td,th{padding:3px 12px;text-align:left}th{border-bottom:1px solid black}table{border-collapse:collapse}"
BARE = "td,th{padding:2px 14px;text-align:left}td+td{text-align:right}th+th{text-align:right}"
COLUMNS = "body{columns:2;font-size:8pt}h1{column-span:all}table{break-inside:avoid}"


def pdf(rng: random.Random, tables: list[Table], style: str) -> bytes:
    """Return the PDF that Chromium prints of a page."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit(
            "no chromium or google-chrome on the PATH: one of them prints the PDFs. Install chromium."
        )
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "a.html"), Path(folder, "a.pdf")
        source.write_bytes(page(rng, tables, style))
        command = [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--print-to-pdf={target}",
            str(source),
        ]
        subprocess.run(command, check=True, capture_output=True)
        return target.read_bytes()


def found_cells(text: str, tables: list[Table]) -> tuple[int, int]:
    """Return how many cells of the tables the Markdown `text` has under their header, and how many there are."""
    seen: list[tuple[list[str], list[str]]] = []
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        lines = [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            for line in block.strip().split("\n")
        ]
        seen += [(lines[0], line) for line in lines[2:]]
    cells = {
        (line[0], word, cell)
        for header, line in seen
        for name, cell in zip(header, line, strict=False)
        for word in name.split()
    }
    truth = [true_cell for table in tables for true_cell in table.truth()]
    return sum(
        all((key, word, cell) in cells for word in name.split()) for key, name, cell in truth
    ), len(truth)


def text_of(name: str, data: bytes) -> str:
    """Return what kinject reads from the bytes of a file."""
    documents = [item for _, item in read_file(Path(name), io.BytesIO(data))]
    return "\n\n".join(
        item.text if isinstance(item, Document) else f"# {item}" for item in documents
    )


def main(n_tables: int, per_file: int = 10) -> None:
    """Print the table of formats."""
    formats = {
        "a.docx": docx, "a.xlsx": xlsx, "a.html": lambda rng, tables: page(rng, tables),
        "ruled a.pdf": lambda rng, tables: pdf(rng, tables, RULED),
        "header ruled a.pdf": lambda rng, tables: pdf(rng, tables, PLAIN),
        "unruled a.pdf": lambda rng, tables: pdf(rng, tables, BARE),
        "ruled two columns a.pdf": lambda rng, tables: pdf(rng, tables, RULED + COLUMNS),
        "unruled two columns a.pdf": lambda rng, tables: pdf(rng, tables, PLAIN + COLUMNS),
    }  # fmt: skip
    print("| format | tables | cells | found with their header | CPU s |\n|---|---|---|---|---|")
    for name, write in formats.items():
        rng = random.Random(7)
        n_found = total = 0
        seconds = 0.0
        for first in range(0, n_tables, per_file):
            width = 3 + first // per_file % 2 if "two columns" in name else None
            tables = [
                make_table(rng, number, width)
                for number in range(first, min(first + per_file, n_tables))
            ]
            data = write(rng, tables)
            began = time.process_time()
            text = text_of(name.split()[-1], data)
            seconds += time.process_time() - began
            n_right, n_cells = found_cells(text, tables)
            n_found, total = n_found + n_right, total + n_cells
        print(
            f"| {name} | {n_tables} | {total} | {n_found / total:.1%} | {seconds:.2f} |", flush=True
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
