"""How much of the main text of saved web pages is read, and nothing else: python benchmarks/documents/web_pages.py FOLDER.

FOLDER is a checkout of github.com/scrapinghub/article-extraction-benchmark (MIT): ``ground-truth.json`` holds the text of
each article, written down by hand, ``html/`` the pages. Or it is ``test/test-pages`` of a checkout of
github.com/mozilla/readability (Apache-2.0): of each page a folder with ``source.html`` and ``expected.html``. A page's
token F1 is that of the bags of words of both texts; the table gives the mean over pages, for kinject and (if it is
installed) for trafilatura alone.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from selectolax.lexbor import LexborHTMLParser

from kinject.documents.readers import read_file
from kinject.types import Document


def kinject_text(data: bytes) -> str:
    """Return the text that kinject reads."""
    documents = [document for _, document in read_file(Path("page.html"), io.BytesIO(data))]
    return "\n".join(document.text for document in documents if isinstance(document, Document))


def trafilatura_text(data: bytes) -> str:
    """Return the text that trafilatura extracts."""
    import trafilatura

    return trafilatura.extract(data, include_comments=False) or ""


def score(truth: str, extracted: str) -> tuple[float, float, float]:
    """Return precision, recall and F1 of the words of `extracted`."""
    wanted, got = (Counter(re.findall(r"\w+", text.lower())) for text in (truth, extracted))
    shared = (wanted & got).total()
    precision = shared / got.total() if got else float(not wanted)
    recall = shared / wanted.total() if wanted else 1.0
    return (
        precision,
        recall,
        2 * precision * recall / (precision + recall) if precision + recall else 0.0,
    )


def pages_of(folder: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield the name, the true text and the HTML of each page."""
    by_hand = folder / "ground-truth.json"
    if by_hand.is_file():
        for name, page in json.loads(by_hand.read_text("utf-8")).items():
            compressed = (folder / "html" / f"{name}.html.gz").read_bytes()
            yield name, page["articleBody"], gzip.decompress(compressed)
        return
    for expected in sorted(folder.glob("*/expected.html")):
        tree = LexborHTMLParser(expected.read_text("utf-8"))
        truth = tree.body.text(separator=" ") if tree.body is not None else ""
        yield expected.parent.name, truth, expected.with_name("source.html").read_bytes()


def measure(pages: list[tuple[str, str, bytes]], read: Callable[[bytes], str], shown: int) -> None:
    """Print the mean scores of a reader, and its worst pages."""
    began = time.process_time()
    scores = {name: score(truth, read(data)) for name, truth, data in pages}
    seconds = time.process_time() - began
    precision, recall, f1 = (
        sum(values) / len(scores) for values in zip(*scores.values(), strict=True)
    )
    print(
        f"| {read.__name__} | {len(scores)} | {precision:.3f} | {recall:.3f} | {f1:.3f} | {seconds:.1f} |"
    )
    for name in sorted(scores, key=lambda name: scores[name][2])[:shown]:
        print(f"  {name} " + " ".join(f"{value:.2f}" for value in scores[name]), file=sys.stderr)


if __name__ == "__main__":
    print("| reader | pages | precision | recall | token F1 | CPU s |\n|---|---|---|---|---|---|")
    pages = list(pages_of(Path(sys.argv[1])))
    measure(pages, kinject_text, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    try:
        measure(pages, trafilatura_text, 0)
    except ImportError:
        print("trafilatura is not installed", file=sys.stderr)
