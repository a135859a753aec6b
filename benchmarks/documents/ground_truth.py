"""Words and table cells that are read, beside other tools, against docling's ground truth.

    python benchmarks/documents/ground_truth.py FOLDER [--other-python PATH] [--kinds docx ...]

FOLDER is tests/data of a checkout of github.com/docling-project/docling (MIT): ``KIND/sources`` holds files, and
``KIND/groundtruth`` the Markdown (FILE.md) and the structure (FILE.json) of each. The truth of a kind that docling reads
without a model was written by docling and read by its authors. F1 is that of the bags of words of both Markdown texts,
without marks, recall that of the bag of filled table cells; the table gives their means over files. The Python of
--other-python has kreuzberg, markitdown, or both; a tool that it lacks has no columns.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
from collections import Counter
from pathlib import Path
from statistics import fmean

from kinject.documents.readers import read_file
from kinject.types import Document

KINDS = ("docx", "html", "pptx", "xlsx", "csv", "pdf", "odf", "epub", "email")
TOOLS = ("kreuzberg", "markitdown")
OTHER_SIDE = """
import json, sys
tool = sys.argv[1]
try:
    if tool == "kreuzberg":
        import kreuzberg
        config = kreuzberg.ExtractionConfig(output_format="markdown")
        read = lambda path: kreuzberg.extract_file_sync(path, config=config).content
    else:
        from markitdown import MarkItDown
        converter = MarkItDown()
        read = lambda path: converter.convert(path).text_content
except ImportError:
    sys.exit(3)
for line in sys.stdin:
    try:
        text = read(json.loads(line))
    except Exception as error:
        text = ""
        print(json.loads(line), repr(error)[:200], file=sys.stderr)
    print(json.dumps(text))
"""
"""What the other Python runs: paths in, texts out, a line of JSON each; 3 if the tool is not installed."""
NOT_INSTALLED = 3


def kinject_text(path: Path) -> str:
    """Return the text that kinject reads."""
    read = read_file(Path(path.name), io.BytesIO(path.read_bytes()))
    documents = [document for _, document in read if isinstance(document, Document)]
    return "\n\n".join(document.text for document in documents)


def other_texts(python: str, tool: str, paths: list[Path]) -> list[str] | None:
    """Return the texts that another tool reads, None where it is not installed."""
    lines = "".join(json.dumps(str(path)) + "\n" for path in paths)
    command = [python, "-c", OTHER_SIDE, tool]
    done = subprocess.run(command, input=lines, stdout=subprocess.PIPE, text=True)
    if done.returncode == NOT_INSTALLED:
        return None
    done.check_returncode()
    # A library may print: the last lines are the texts.
    return [json.loads(line) for line in done.stdout.splitlines()[-len(paths) :]]


def words_of(markdown: str) -> Counter[str]:
    """Return the words of Markdown, without pictures, tags and the addresses of links."""
    text = re.sub(r"<!--.*?-->|!\[[^\]]*\]\([^)]*\)|<[^<>]+>", " ", markdown, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return Counter(re.findall(r"[^\W_]+", text.lower()))


def f1_of(truth: Counter[str], found: Counter[str]) -> float:
    """Return the F1 of two bags of words."""
    n = truth.total() + found.total()
    return 2 * (truth & found).total() / n if n else 1.0


def plain(cell: str) -> str:
    """Return the words of a cell."""
    return " ".join(words_of(cell.replace("\\", "")).elements())


def true_cells(truth: Path) -> Counter[str]:
    """Return the filled cells of the tables in the structure of a file, each once."""
    structure = json.loads(truth.read_text("utf-8"))
    cells: Counter[str] = Counter()
    for table in structure.get("tables", []):
        texts = [plain(cell["text"]) for cell in table["data"]["table_cells"]]
        cells.update(filter(None, texts))
    return cells


def found_cells(markdown: str) -> Counter[str]:
    """Return the filled cells of the tables of Markdown, or of HTML in it."""
    cells: Counter[str] = Counter()
    for line in markdown.splitlines():
        if line.lstrip().startswith("|"):
            texts = [plain(cell) for cell in re.split(r"(?<!\\)\|", line)]
            cells.update(filter(None, texts))
    for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", markdown, re.DOTALL):
        cells.update(filter(None, [plain(cell)]))
    return cells


def scores(paths: list[Path], texts: list[str]) -> tuple[float, float | None]:
    """Return the mean F1 of words, and the mean recall of cells over the files that have tables."""
    f1s: list[float] = []
    recalls: list[float] = []
    for path, text in zip(paths, texts, strict=True):
        truth = truth_of(path)
        f1s.append(f1_of(words_of(truth.read_text("utf-8")), words_of(text)))
        structure = truth.with_suffix(".json")
        cells = true_cells(structure) if structure.is_file() else Counter()
        if cells:
            recalls.append((cells & found_cells(text)).total() / cells.total())
    return fmean(f1s), fmean(recalls) if recalls else None


def truth_of(path: Path) -> Path:
    """Return the Markdown of the truth of a file."""
    folder = path.parents[1] / "groundtruth"
    named = folder / f"{path.name}.md"
    return named if named.is_file() else folder / f"{path.stem}.md"


def main() -> None:
    """Print the table of kinds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--other-python", help="the Python that has kreuzberg or markitdown")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, metavar="KIND")
    arguments = parser.parse_args()
    python = arguments.other_python
    tools: list[str] = []
    if python:
        tools = [tool for tool in TOOLS if other_texts(python, tool, []) is not None]
    print(f"| {' | '.join(['kind', 'files', 'kinject', *tools])} |")
    print("|" + " --- |" * (3 + len(tools)))
    for kind in arguments.kinds:
        files = sorted((arguments.folder / kind / "sources").glob("*"))
        paths = [path for path in files if path.is_file() and truth_of(path).is_file()]
        if not paths:
            continue
        row = [kind, str(len(paths)), shown(scores(paths, list(map(kinject_text, paths))))]
        row += [shown(scores(paths, other_texts(python, tool, paths) or [])) for tool in tools]
        print(f"| {' | '.join(row)} |", flush=True)


def shown(pair: tuple[float, float | None]) -> str:
    """Return the F1 and the recall of a cell of the table."""
    f1, recall = pair
    return f"{f1:.3f}; -" if recall is None else f"{f1:.3f}; {recall:.3f}"


if __name__ == "__main__":
    main()
