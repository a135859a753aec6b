"""A heap of mixed files with some broken ones: time, memory and what becomes of each file, first and second pass.

    python benchmarks/documents/heap.py                      # 1,000 and 10,000 files of embedded text
    python benchmarks/documents/heap.py 1000 --text FOLDER   # paragraphs of the .jsonl and .txt files of a folder
    python benchmarks/documents/heap.py 10000 --processes 2 --keep heap/

Each file is some paragraphs of real text in one of ten formats (txt, md, rst, html, csv, jsonl, docx, xlsx, pdf, zip). Every
twentieth is broken in one of twelve ways. All must be read or in skipped.jsonl; a file that is neither, or a traceback, ends
the program with code 1. An audit hook on `open` counts how often each file is opened, in every process.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

PARAGRAPHS_IN_FILE = 4
HOOK = """\
import atexit, os, sys
_names = []
def _count(event, arguments, _folder=os.environ["HEAP"], _log=os.environ["HEAP_LOG"]):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        name = os.fsdecode(arguments[0])
        if name.startswith(_folder) and not os.path.isdir(name):
            descriptor = os.open(_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(descriptor, os.fsencode(name) + (b"\\t0\\n" if arguments[1] is None else b"\\t1\\n"))
            os.close(descriptor)
sys.addaudithook(_count)
"""
"""As sitecustomize.py, it runs in every Python process that is started. `open` with an opener is two events: one of `open`,

one of `os.open` (without a mode). So a file was opened as often as the more frequent of the two.
"""


def paragraphs_of(folder: Path | None, rng: random.Random) -> Iterator[str]:
    """Yield paragraphs of real text without end: of the files in a folder, or of the embedded country's encyclopedia."""
    texts: list[str] = []
    for path in sorted(folder.rglob("*")) if folder else ():
        if path.suffix == ".jsonl":
            rows = (json.loads(line) for line in path.read_text("utf-8").splitlines())
            texts += [str(row.get("text") or row.get("context") or "") for row in rows]
        elif path.suffix == ".txt":
            texts += path.read_text("utf-8").split("\n\n")
    if not folder:
        from kinject.sandbox.grammar import render_entry
        from kinject.sandbox.people import create_country

        country = create_country()
        texts = [render_entry(person, number) for person in (*country.known, *country.new) for number in range(3)]
    texts = [text for text in texts if len(text) > 100]
    if not texts:
        raise SystemExit(f"{folder}: no .jsonl with `text`, no .txt")
    sentences = [sentence for text in texts for sentence in text.split(". ") if len(sentence) > 30]
    while True:  # other sentences together each time, so that files are no copies of each other
        yield ". ".join(rng.sample(sentences, min(5, len(sentences)))) + "."


def as_docx(title: str, text: list[str]) -> bytes:
    """Return a Word file with a heading and paragraphs."""
    names = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    body = "".join(f"<w:p><w:r><w:t>{escape(paragraph)}</w:t></w:r></w:p>" for paragraph in text)
    heading = f'<w:p><w:pPr><w:pStyle w:val="Heading1"/></w:pPr><w:r><w:t>{escape(title)}</w:t></w:r></w:p>'
    return packed({
        "[Content_Types].xml": '<?xml version="1.0"?><Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
        '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        '<Default Extension="xml" ContentType="application/xml"/><Override PartName="/word/document.xml" '
        'ContentType="application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"/></Types>',
        "_rels/.rels": '<?xml version="1.0"?><Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
        '<Relationship Id="r1" Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument" '
        'Target="word/document.xml"/></Relationships>',
        "word/document.xml": f'<?xml version="1.0"?><w:document xmlns:w="{names}"><w:body>{heading}{body}</w:body></w:document>',
    })  # fmt: skip


def as_xlsx(title: str, text: list[str]) -> bytes:
    """Return a workbook with a sheet of two columns, number and text."""
    names = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    links = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    cells = [("number", "text"), *((str(number), paragraph) for number, paragraph in enumerate(text))]
    rows = ""
    for number, row in enumerate(cells, 1):
        texts = (
            f'<c r="{c}{number}" t="inlineStr"><is><t>{escape(cell)}</t></is></c>'
            for c, cell in zip("AB", row, strict=True)
        )
        rows += f'<row r="{number}">{"".join(texts)}</row>'
    kind = "application/vnd.openxmlformats-officedocument.spreadsheetml"
    return packed({
        "[Content_Types].xml": '<?xml version="1.0"?><Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
        '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        f'<Override PartName="/xl/workbook.xml" ContentType="{kind}.sheet.main+xml"/>'
        f'<Override PartName="/xl/worksheets/sheet1.xml" ContentType="{kind}.worksheet+xml"/></Types>',
        "_rels/.rels": '<?xml version="1.0"?><Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
        f'<Relationship Id="r1" Type="{links}/officeDocument" Target="xl/workbook.xml"/></Relationships>',
        "xl/workbook.xml": f'<?xml version="1.0"?><workbook xmlns="{names}" xmlns:r="{links}"><sheets>'
        f'<sheet name="{escape(title)[:30]}" sheetId="1" r:id="r1"/></sheets></workbook>',
        "xl/_rels/workbook.xml.rels": '<?xml version="1.0"?><Relationships '
        'xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
        f'<Relationship Id="r1" Type="{links}/worksheet" Target="worksheets/sheet1.xml"/></Relationships>',
        "xl/worksheets/sheet1.xml": f'<?xml version="1.0"?><worksheet xmlns="{names}"><sheetData>{rows}</sheetData></worksheet>',
    })  # fmt: skip


def as_pdf(title: str, text: list[str]) -> bytes:
    """Return a PDF of one page."""
    lines = [title, ""]
    for paragraph in text:
        words = paragraph.encode("latin-1", "replace").decode("latin-1").split()
        while words:
            line = words.pop(0)
            while words and len(line) + len(words[0]) < 90:
                line += " " + words.pop(0)
            lines.append(line)
        lines.append("")
    shown = (line.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)") for line in lines)
    content = ("BT /F1 9 Tf 12 TL 50 780 Td " + " ".join(f"({line}) Tj T*" for line in shown) + " ET").encode(
        "latin-1", "replace"
    )
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Contents 4 0 R /Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%b\nendstream" % (len(content), content),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]  # fmt: skip
    data, offsets = b"%PDF-1.4\n", []
    for number, item in enumerate(objects, 1):
        offsets.append(len(data))
        data += b"%d 0 obj\n%b\nendobj\n" % (number, item)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    return data + b"xref\n0 6\n0000000000 65535 f \n%btrailer << /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % (
        table,
        len(data),
    )


def packed(members: dict[str, str]) -> bytes:
    """Return a zip archive."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(zipfile.ZipInfo(name), text)
    return out.getvalue()


def as_csv(title: str, text: list[str]) -> bytes:
    """Return a table with a title and a text column."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerows([("title", "text"), *((f"{title} {number}", cell) for number, cell in enumerate(text))])
    return out.getvalue().encode()


FORMATS: dict[str, Callable[[str, list[str]], bytes]] = {
    "txt": lambda title, text: "\n\n".join(text).encode(),
    "md": lambda title, text: f"# {title}\n\n".encode() + "\n\n".join(text).encode(),
    "rst": lambda title, text: f"{title}\n{'=' * len(title)}\n\n".encode() + "\n\n".join(text).encode(),
    "html": lambda title, text: (
        f"<html><head><title>{escape(title)}</title></head><body><nav><a href='/'>Home</a></nav><main><h1>{escape(title)}</h1>"
        + "".join(f"<p>{escape(block)}</p>" for block in text) + "</main><footer>All rights reserved.</footer></body></html>"
    ).encode(),
    "csv": as_csv,
    "jsonl": lambda title, text: "".join(json.dumps({"title": title, "text": block}) + "\n" for block in text).encode(),
    "docx": as_docx,
    "xlsx": as_xlsx,
    "pdf": as_pdf,
    "zip": lambda title, text: packed({f"{number}.txt": block for number, block in enumerate(text)}),
}  # fmt: skip
NESTED = packed({"inner.zip": "PK\x03\x04 not an archive", "note.txt": "One note that can be read, beside an archive."})
BROKEN: dict[str, Callable[[bytes], tuple[str, bytes]]] = {
    "empty": lambda data: ("txt", b""),
    "cut off": lambda data: ("pdf", data[: len(data) // 3]),
    "cut off archive": lambda data: ("docx", packed({"a": "b" * 99})[:-20]),
    "blank": lambda data: ("md", b" \n\t\n"),
    "image": lambda data: ("jpg", b"\xff\xd8\xff\xe0" + bytes(range(256))),
    "image called text": lambda data: ("txt", b"\x89PNG\r\n\x1a\n" + bytes(range(256))),
    "binary": lambda data: ("html", bytes(random.Random(len(data)).randbytes(4000))),
    "bad rows": lambda data: ("jsonl", b'{"text": 1}\n{"text"\n[]\n'),
    "bad table": lambda data: ("csv", b'title,text\n"never closed,x\n'),
    "archive in an archive": lambda data: ("zip", NESTED),
    "system": lambda data: ("DS_Store", b"\0\0\0\1Bud1"),
    "program": lambda data: ("exe", b"MZ" + bytes(2000)),
}


def write_heap(folder: Path, n: int, text: Path | None) -> Counter[str]:
    """Write `n` files, every twentieth broken; return how many of each format."""
    rng = random.Random(n)
    paragraphs, counts = paragraphs_of(text, rng), Counter[str]()
    formats, broken = list(FORMATS), list(BROKEN)
    for number in range(n):
        parent = folder / f"{number // 100:03d}"
        parent.mkdir(parents=True, exist_ok=True)
        name = formats[number % len(formats)]
        data = FORMATS[name](f"Entry {number}", [next(paragraphs) for _ in range(PARAGRAPHS_IN_FILE)])
        if number % 20 == 7:
            name, data = BROKEN[broken[number // 20 % len(broken)]](data)
            counts["broken"] += 1
        path = parent / (f"file {number}.{name}" if name != "DS_Store" else ".DS_Store")
        path.write_bytes(data)
        os.utime(path, (1e9, 1e9))  # a file that has just changed is opened again by a second run
        counts[name] += 1
    return counts


@dataclass(frozen=True)
class Pass:
    """One run: wall-clock and processor seconds, peak MiB of the largest process, files opened and most often one was."""

    seconds: float
    cpu: float
    peak: float
    opened: int
    most: int
    output: str


def run_pass(heap: Path, work: Path, processes: int | None) -> Pass:
    """Run kinject documents in a process of its own."""
    hook, record = work / "hook", work / "opened"
    hook.mkdir(exist_ok=True)
    (hook / "sitecustomize.py").write_text(HOOK)
    record.unlink(missing_ok=True)
    source = str(Path(__file__).parents[2] / "src")
    environment = {
        **os.environ, "HEAP": f"{heap}/", "HEAP_LOG": str(record), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(hook), source, os.environ.get("PYTHONPATH")))),
    }  # fmt: skip
    words = [sys.executable, "-m", "kinject.cli", "documents", str(heap), "run_dir=run"]
    words += [f"documents.processes={processes}"] if processes else []
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(words, cwd=work, env=environment, capture_output=True, text=True, check=False)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1) or "Traceback" in done.stderr + done.stdout:
        raise SystemExit(f"code {done.returncode}\n{done.stdout}\n{done.stderr}")
    events = Counter(record.read_bytes().splitlines() if record.exists() else ())
    names = Counter[bytes]()
    for event, n in events.items():
        names[event[:-2]] = max(n, names[event[:-2]])
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Pass(seconds, cpu, after.ru_maxrss / 1024, len(names), max(names.values(), default=0), done.stdout)


def untold(heap: Path, run: Path) -> list[str]:
    """Return the files that are neither read, nor copies, nor skipped (a hidden folder is one line)."""
    rows = [json.loads(line) for line in (run / "files.jsonl").read_text("utf-8").splitlines()]
    named = {row["file"] for row in rows if row["documents"] + row["copies"] + row["skipped"]}
    files = (path.relative_to(heap).as_posix() for path in heap.rglob("*") if path.is_file())
    return [name for name in files if name not in named]


def measure(n: int, text: Path | None, processes: int | None, keep: Path | None) -> bool:
    """Print the figures of a heap of `n` files; return whether every file is read or told."""
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary).resolve()
        heap = work / "heap"
        write_heap(heap, n, text)
        first, second = run_pass(heap, work, processes), run_pass(heap, work, processes)
        counts = json.loads((work / "run/manifest.json").read_text("utf-8"))["counts"]
        missing = untold(heap, work / "run")
        skipped = sum(counts["skipped"].values()) + counts["left_out"]
        cells = (
            f"{n:,}", f"{counts['n_documents']:,}", f"{counts['n_read']:,}", f"{skipped:,}", f"{len(missing)}",
            f"{first.seconds:.1f}, {first.cpu:.1f}", f"{first.peak:.0f}", f"{first.opened:,}, {first.most}",
            f"{second.seconds:.2f}, {second.cpu:.2f}",
            f"{second.seconds / first.seconds:.1%}, {second.cpu / first.cpu:.1%}", f"{second.opened}",
        )  # fmt: skip
        print(f"| {' | '.join(cells)} |", flush=True)
        for name in missing[:10]:
            print(f"neither read nor listed: {name}")
        if keep:
            print(first.output)
            shutil.copytree(work, keep, symlinks=True)
    return not missing and first.most == 1


def main() -> int:
    """Measure the sizes that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", type=int, default=[1000, 10_000], metavar="N")
    parser.add_argument("--text", type=Path, help="folder with .jsonl or .txt files of real text")
    parser.add_argument("--processes", type=int, help="processes that parse (default: one for each core)")
    parser.add_argument("--keep", type=Path, help="copy the heap and the run here")
    arguments = parser.parse_args()
    columns = ("files", "documents", "files read", "skipped", "untold", "first pass: s, processor s", "largest process, MiB",
               "opened, most often", "second pass: s, processor s", "of the first", "opened")  # fmt: skip
    print(f"| {' | '.join(columns)} |\n|{'---:|' * len(columns)}")
    fine = [measure(n, arguments.text, arguments.processes, arguments.keep) for n in arguments.sizes]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
