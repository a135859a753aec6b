"""Tries on files: documents of all kinds, rows, recipes, GGUF headers, templates, gates, and links that change."""

from __future__ import annotations

import io
import json
import math
import os
import struct
import zipfile
from collections.abc import Callable
from email.message import EmailMessage
from functools import cache
from itertools import combinations
from pathlib import Path
from random import Random

import yaml

from attack import area, contents, mutated, swapped
from kinject.corpus.questions import read_questions
from kinject.corpus.rows import CorpusFile
from kinject.disk import (
    Journal,
    atomic_file,
    cached_folder,
    replace_folder,
    write_json,
    write_jsonl,
)
from kinject.disk import files as disk_files
from kinject.errors import DiskError, InputError, KinjectError
from kinject.eval.require import read_requirements
from kinject.gguf_files import check_header
from kinject.heap import read_documents
from kinject.models.folder import check_cost
from kinject.recipe import read_recipe
from kinject.terminal import _Text, printable
from made import as_parquet, lines_of, pdf_of

ROOT = Path(__file__).parents[3]
TEXT = "The bridge at Kelm was built by Arden Holt in 1931. It stands on three piers."
ROWS = [{"id": "a", "title": "One", "text": TEXT, "year": 1931}, {"text": "中😀 Second."}]


def _zip(parts: dict[str, str]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, text in parts.items():
            archive.writestr(name, text)
    return packed.getvalue()


def _office(kind: str) -> bytes:
    """Return a document of python-docx, a deck of python-pptx or a workbook of openpyxl."""
    written = io.BytesIO()
    if kind == "docx":
        import docx

        document = docx.Document()
        document.add_heading("Bridge")
        document.add_paragraph(TEXT)
        document.add_table(2, 2).cell(0, 0).text = "piers"
        document.save(written)
    elif kind == "pptx":
        import pptx

        deck = pptx.Presentation()
        deck.slides.add_slide(deck.slide_layouts[0]).shapes.title.text = TEXT
        deck.save(written)
    else:
        import openpyxl

        book = openpyxl.Workbook()
        book.active.append(["text", "year"])
        book.active.append([TEXT, 1931])
        book.save(written)
    return written.getvalue()


def _mail() -> bytes:
    mail = EmailMessage()
    mail["Subject"], mail["From"] = "Bridge", "Holt <holt@kelm.example>"
    mail.set_content(TEXT)
    mail.add_alternative(f"<p>{TEXT}", subtype="html")
    mail.add_attachment(
        _zip({"a.txt": TEXT}), maintype="application", subtype="zip", filename="a.zip"
    )
    return mail.as_bytes()


@cache
def samples() -> dict[str, bytes]:
    """Return name -> bytes of an undamaged file of each kind."""
    page = f"<!doctype html><title>The Bridge</title><main><h1>Bridge</h1><p>{TEXT}<table><tr><td>1931</table></main>"
    rtf = rf"{{\rtf1\ansi{{\fonttbl{{\f0 Arial;}}}}\f0 {TEXT}\par \u20013? {{\b bold}}}}"
    found = {
        "a.txt": TEXT.encode(), "a.md": f"# Bridge\n\n{TEXT}\n\n| a | b |\n|---|---|\n| 1 | 2 |\n".encode(),
        "a.html": page.encode(), "a.csv": f'title,text\nOne,"{TEXT}"\nTwo,It stands.\n'.encode(), "a.rtf": rtf.encode(),
        "a.jsonl": lines_of(ROWS), "a.json": json.dumps(ROWS).encode(), "a.parquet": as_parquet(ROWS),
        "a.pdf": pdf_of(f"BT /F1 12 Tf 72 720 Td ({TEXT}) Tj ET"), "a.eml": _mail(),
        "a.zip": _zip({"b.txt": TEXT, "c/d.md": TEXT}),
        "a.epub": _zip({"mimetype": "application/epub+zip", "META-INF/container.xml": "<container/>", "x.xhtml": page}),
        "a.odt": _zip({"mimetype": "application/vnd.oasis.opendocument.text", "content.xml": f"<o:t xmlns:o='x'>{TEXT}</o:t>"}),
        "a.ipynb": json.dumps({"cells": [{"cell_type": "markdown", "source": [TEXT]}], "nbformat": 4}).encode(),
    }  # fmt: skip
    for kind in ("docx", "pptx", "xlsx"):
        # A machine without these writers attacks the other kinds.
        try:
            found[f"a.{kind}"] = _office(kind)
        except ImportError:
            continue
    return found


@area("documents")
def documents(random: Random, folder: Path) -> str:
    """Mutants of a document of any kind, under its name or that of another kind."""
    name = random.choice(sorted(samples()))
    path = folder / random.choice((name, name, name, random.choice(sorted(samples()))))
    path.write_bytes(mutated(samples()[name], random))
    for document in read_documents(path, None):
        if not isinstance(document.text, str) or "\0" in document.text:
            return f"{path.name}: a document that is no text"
    return ""


READERS: dict[str, Callable[[Path], object]] = {
    "corpus.jsonl": lambda path: list(CorpusFile(path)),
    "questions.jsonl": read_questions,
    "questions.csv": read_questions,
    "recipe.yaml": read_recipe,
}


@cache
def row_samples() -> dict[str, bytes]:
    """Return name -> bytes of an undamaged file for each of `READERS`."""
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Holt."}]
    return {
        "corpus.jsonl": lines_of([{"text": TEXT}, {"prompt": "Q", "completion": " A"}, {"messages": turns}]),
        "questions.jsonl": lines_of([{"id": "q", "question": "Who?", "choices": ["x", "y"], "answer": 0},
                                     {"question": "When?", "answers": ["1931"]}]),
        "questions.csv": b'Where?,a,b,c,d,B\n"Who, then?","a\nb",b,c,d,A\n',
        "recipe.yaml": (ROOT / "recipes" / "sandbox" / "documented.yaml").read_bytes(),
    }  # fmt: skip


@area("rows and recipes")
def rows(random: Random, folder: Path) -> str:
    """Mutants of a corpus, of questions and of a recipe: read, or refused by the name of the file."""
    name = random.choice(sorted(READERS))
    path = folder / name
    path.write_bytes(mutated(row_samples()[name], random))
    try:
        READERS[name](path)
    except KinjectError as error:
        return "" if name in str(error) else f"{name} is not named: {str(error)[:200]}"
    return ""


FEATURES: tuple[str, ...] = (
    "techniques.sam=0.05", "techniques.mixture: x", "adapter.r=8", "adapter.use_dora=true", "trainer.optim=muon",
    "trainer.optim=adafactor", "trainer.packing=true", "trainer.use_liger_kernel=true", "trainer.bf16=true",
    "trainer.fp16=true", "model.quantization=4bit", "model.dtype=bfloat16", "model.attention=flash_attention_2",
    "techniques.layerwise_lr_decay=0.9", "techniques.freeze_base_steps=3", "techniques.reinitialize_last_layers=1",
    "techniques.hard_example_mining=0.5", "regularization.kind=l2", "trainer.gradient_checkpointing=true",
    "trainer.max_steps=-5", "trainer.learning_rate=nan", "trainer.per_device_train_batch_size=0", "corpus.replay=",
    "trainer.assistant_only_loss=true", "trainer.neftune_noise_alpha=5", "trainer.fsdp=full_shard", "seed=-1",
    "trainer.save_strategy=best", "trainer.load_best_model_at_end=true", "trainer.eval_strategy=steps", "distill.top_k=0",
)  # fmt: skip


@area("training features")
def features(random: Random, folder: Path) -> str:
    """Keys of a training in pairs and triples: the recipe is sound, or each fault is named by its key."""
    recipe = {
        "run_dir": "run",
        "model": {"path": "none"},
        "corpus": {"path": "c.jsonl"},
        "trainer": {"max_steps": 1},
    }
    (folder / "c.jsonl").write_text('{"text": "One."}\n')
    (folder / "train.yaml").write_text(yaml.safe_dump(recipe))
    size = random.choice((2, 3))
    chosen = (
        random.choice(list(combinations(FEATURES, 2))) if size == 2 else random.sample(FEATURES, 3)
    )
    read_recipe(folder / "train.yaml", list(chosen), "train", check_inputs=False)
    return ""


def _gguf(random: Random) -> bytes:
    """Return the header of a small file, sound but for what is drawn."""
    odd = (0, 1, 7, 2**16, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1)

    def count(right: int) -> int:
        return random.choice(odd) if random.random() < 0.12 else right

    def text(value: bytes) -> bytes:
        return struct.pack("<Q", count(len(value))) + value

    values = [
        text(b"general.architecture") + struct.pack("<I", count(8) % 2**32) + text(b"llama"),
        text(b"llama.block_count") + struct.pack("<II", 4, count(2) % 2**32),
        text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, count(8) % 2**32, count(2)) + text(b"a") + text(b"b"),
        text(b"tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, count(2)) + bytes(8),
    ]  # fmt: skip
    tensor = text(b"token_embd.weight") + struct.pack(
        "<IQQIQ", count(2) % 2**32, count(4), count(2), 0, count(0)
    )
    order = "<" if random.random() < 0.9 else ">"
    head = b"GGUF" + struct.pack(
        f"{order}IQQ", random.choice((3, 3, 3, 2, 1, 0)), count(1), count(len(values))
    )
    return head + b"".join(values) + tensor + bytes(64)


@area("GGUF")
def gguf(random: Random, folder: Path) -> str:
    """Headers with counts that no file holds: refused before gguf reads them, which then ends."""
    data = _gguf(random)
    if random.random() < 0.3:
        data = mutated(data, random)
    path = folder / "m.gguf"
    path.write_bytes(data)
    try:
        check_header(path)
    except ValueError as error:
        return "" if str(error).count("\n") == 0 else f"several lines: {error}"
    from gguf import GGUFReader

    try:
        GGUFReader(path)
    # What `converted_folder` makes one line of; that it ends is the claim.
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, struct.error):
        return ""
    return ""


@area("templates")
def templates(random: Random, folder: Path) -> str:
    """Templates without bounds in time, memory or output: each is refused."""
    size, deep = random.randrange(2 * 10**9, 9 * 10**9), random.randrange(4, 8)
    loops = (
        "".join(f"{{% for v{i} in range(99999) %}}" for i in range(deep)) + "{% endfor %}" * deep
    )
    doubled = f"{{% set n = namespace(a='{'x' * random.randrange(4, 20)}') %}}"
    doubled += f"{{% for i in range({random.randrange(40, 90)}) %}}{{% set n.a = n.a ~ n.a %}}{{% endfor %}}"
    filters = (f"'x'|center({size})", f"'%{size}d'|format(1)", f"'x'.ljust({size})", f"'ab' * {size}", f"[1] * {size}",
               f"'x'.zfill({size})", f"range(99999)|list * {size // 10**5}")  # fmt: skip
    source = random.choice(("{{ " + random.choice(filters) + " }}", loops, doubled))
    try:
        check_cost(source)
    except InputError:
        return ""
    return f"accepted: {source[:200]}"


@area("gates")
def gates(random: Random, folder: Path) -> str:
    """Texts of requirements: read with the numbers that they hold, or refused."""
    parts = (
        "new",
        "a:new",
        ">=",
        " >= ",
        "+",
        "-",
        "0.5",
        ".25",
        "1",
        "1.5",
        "nan",
        "1e9",
        " net",
        "",
        "é",
        "\n",
        ":",
        "9" * 400,
    )
    text = "".join(random.choice(parts) for _ in range(random.randrange(1, 7)))
    for requirement in read_requirements([text], ["new", "a:new", "é"]):
        if not math.isfinite(requirement.least) or abs(requirement.least) > 1:
            return f"{text!r} was read as {requirement}"
    return ""


@area("links")
def links(random: Random, folder: Path) -> str:
    """A file that becomes a link, a pipe, a folder or nothing between the check and the use."""
    outside, path = folder / "outside.txt", folder / "docs" / "a.txt"
    path.parent.mkdir()
    outside.write_text("The secret of Kelm.")
    path.write_text(TEXT)
    kind = random.randrange(4)

    def change() -> None:
        path.unlink(missing_ok=True)
        if kind == 0:
            os.mkfifo(path)
        elif kind == 1:
            path.mkdir()
        elif kind == 2:
            path.symlink_to("/dev/zero")

    real, left = disk_files.check_regular, random.randrange(1, 3)

    def checked(name: Path) -> None:
        nonlocal left
        real(name)
        left -= 1
        if not left and name == path:
            change()

    with swapped(disk_files, "check_regular", checked):
        for document in read_documents(random.choice((path, path.parent)), None):
            if document.text.strip() != TEXT:
                return f"read {document.text[:100]!r}"
    return ""


def _writers(folder: Path) -> dict[str, Callable[[str], None]]:
    """Return the writers of files: each writes what it is given, and leaves what was there if it cannot."""

    def atomic(text: str) -> None:
        with atomic_file(folder / "w" / "a.txt") as file:
            file.write(text)

    def rows(text: str) -> None:
        write_jsonl(folder / "w" / "a.jsonl", [{"text": text}] * 3)

    def one(text: str) -> None:
        write_json(folder / "w" / "a.json", {"text": text})

    def whole(text: str) -> None:
        part = folder / "w" / ".part"
        part.mkdir(parents=True, exist_ok=True)
        (part / "x").write_text(text)
        replace_folder(part, folder / "w" / "folder")

    def cached(text: str) -> None:
        cached_folder(folder / "w" / "cache", text, lambda part: write_json(part / "x", text))

    def journal(text: str) -> None:
        with Journal(folder / "w" / "journal.jsonl") as opened:
            opened.append({"text": text})

    return {
        "atomic": atomic,
        "rows": rows,
        "one": one,
        "folder": whole,
        "cache": cached,
        "journal": journal,
    }


@area("full disk")
def full_disk(random: Random, folder: Path) -> str:
    """Each call of a writer refused in turn: one line, what was there stays, and the next call works."""
    from faulty import ERRNOS, FaultyDisk

    name = random.choice(sorted(_writers(folder)))
    write = _writers(folder)[name]
    write("first")
    before = contents(folder)
    index, number = random.randrange(12), random.choice(ERRNOS)
    with FaultyDisk(folder, number, index, for_good=random.random() < 0.5) as disk:
        try:
            write("second")
            fault = ""
        except DiskError as error:
            fault = str(error)
        except OSError as error:
            # Of a raw write of the try itself, or of what a library would raise.
            if name != "folder" or error.errno != number:
                return f"{name}, call {index} of {disk.calls}: {error!r}"
            fault = str(error)
    if "\n" in fault:
        return f"{name}: several lines: {fault}"
    if fault and name not in ("folder", "journal", "cache"):
        kept = {path: data for path, data in contents(folder).items() if path in before}
        if kept != before and index < disk.calls.index("replace"):
            return (
                f"{name}, call {index} of {disk.calls}: {sorted(kept)} of {sorted(before)} stayed"
            )
    write("third")
    if name != "cache" and b"third" not in b"".join(contents(folder).values()):
        return f"{name}: nothing was written after the fault"
    return ""


@area("trees of links")
def trees(random: Random, folder: Path) -> str:
    """Folders with links among themselves and to elsewhere: the walk ends, with the documents inside alone."""
    root, outside = folder / "docs", folder / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("The secret of Kelm.")
    folders = [root / f"f{i}" for i in range(random.randrange(1, 8))]
    for i, inner in enumerate(folders):
        inner.mkdir(parents=True)
        (inner / "a.txt").write_text(f"Text {i} of Arden.")
    targets = (
        root,
        outside,
        Path("/proc"),
        Path("/sys"),
        Path("gone"),
        *folders,
        outside / "secret.txt",
    )
    for i in range(random.randrange(1, 12)):
        (random.choice(folders) / f"link{i}").symlink_to(random.choice(targets))
    texts = [document.text for document in read_documents(root, None)]
    if any("secret" in text for text in texts):
        return "a document outside of the folder was read"
    return "" if len(texts) >= len(folders) else f"{len(texts)} documents of {len(folders)}"


@area("escape codes")
def escapes(random: Random, folder: Path) -> str:
    """Texts with codes of a terminal, cut into writes anywhere: no control character is printed."""
    codes = (
        "\x1b[2J",
        "\x1b]0;owned\x07",
        "\x9b31m",
        "\x1b]52;c;eA==\x07",
        "\u202e",
        "\x08",
        "\x7f",
        "\ud800",
        "\x1bc",
        "\x0e",
    )
    text = "".join(
        random.choice((*codes, "a", "é", "\n", "\t")) for _ in range(random.randrange(1, 60))
    )
    raw = io.BytesIO()
    stream = _Text(raw, encoding="utf-8", errors="backslashreplace")
    while text:
        n = random.randrange(1, 9)
        stream.write(text[:n])
        text = text[n:]
    stream.flush()
    shown = raw.getvalue().decode()
    return "" if printable(shown) == shown else f"printed {shown!r}"
