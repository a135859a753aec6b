"""Every kind of input that kinject reads: good ones to damage, and the function that a verb reads it with."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from mutations import as_json_line, as_yaml, damaged_bytes, damaged_tree, without_structure

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Kind:
    """`make(random)` is the bytes of one input, written to a file called `name` and read by `read`."""

    name: str
    file: str
    make: Callable[[Random], bytes]
    read: Callable[[Path], object]


def from_trees(
    trees: list[Any], write: Callable[[Any], bytes], share_of_bytes: float = 0.35
) -> Callable[[Random], bytes]:
    """Return a maker that damages `trees`, or what they are written as, or leaves structure aside."""
    good = [write(tree) for tree in trees]

    def make(random: Random) -> bytes:
        luck = random.random()
        if luck < 0.08:
            return without_structure(random)
        if luck < 0.08 + share_of_bytes:
            return damaged_bytes(random.choice(good), good, random)
        try:
            return write(damaged_tree(random.choice(trees), random))
        except Exception:  # noqa: BLE001 (what no file of the kind can hold)
            return damaged_bytes(random.choice(good), good, random)

    return make


def lines_of(rows: Iterable[Any]) -> bytes:
    """Return rows as JSON lines; what is no list of rows, as one line."""
    return b"".join(map(as_json_line, rows)) if isinstance(rows, list) else as_json_line(rows)


def everything(values: Iterable[object]) -> None:
    """Read to the end."""
    for _ in values:
        pass


DOCUMENTS: list[Any] = [
    [
        {"id": "a", "title": "One", "text": "First, \"quoted\".\nSecond line.", "source": "s", "year": 1931},
        {"text": "Ünïcode – 中文 \U0001f600.", "meta": {"a": [1, 2.5, None]}},
    ],
    [{"id": 7, "text": "Built in 1931. " * 20}, {"id": 8, "text": "It, \"too\",\nstands.", "title": "T"}],
]  # fmt: skip
QUESTIONS: list[Any] = [
    [{"question": "Where?", "choices": ["Farrow", "Kelm", "Lowmere", "Arden"], "answer": 1, "id": "q1", "subject": "born"},
     {"question": "Who?", "choices": ["x", "y"], "answer": 0, "document_id": "d", "fact_id": "f"}],
    [{"question": {"stem": "Why?", "choices": [{"text": "a", "label": "A"}, {"text": "b", "label": "B"}]}, "answerKey": "B"},
     {"question": "Why?", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "A", "id": "z"}],
    [{"question": "When?", "answers": {"text": ["1931"], "answer_start": [3]}, "title": "T", "id": "s1"},
     {"question": "How?", "answers": [{"text": "so"}], "title": "T"}, {"question": "Why?", "answers": ["no"], "title": "U"}],
]  # fmt: skip
CORPORA: list[Any] = [
    [{"text": "One text.", "id": "r1", "document_id": "d", "origin": "original"}, {"prompt": "Q", "completion": " A"}],
    [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho", "name": "x"}]}],
]
ANSWERS: list[Any] = [
    [
        {"key": f"{n}{arm}", "question_id": f"q{n}", "question_set": "set", "arm": arm, "format": "texts", "shots": 0, "k": 0,
         "context_ids": [], "gold": 0, "log_probs": [-1.0, -2.0 + n], "n_tokens": [1, 1], "n_bytes": [1, 1], "n_chars": [1, 1],
         "subject": "s", "document_id": "d", "truncated": 0, "rotation": 0, "greedy": [True, False]}
        for n in range(3) for arm in ("base", "tuned")
    ]
]  # fmt: skip


def read_verbs_recipe(path: Path) -> None:
    """Read a recipe as some verb does (the text says which), and check the sections that have checks of their own."""
    from kinject.augment.plan import check_sections
    from kinject.recipe import read_recipe
    from kinject.study.arms import check_names

    data = path.read_bytes()
    verbs = [verb for verb in ("augment", "questions", "eval", "study") if f"{verb}:".encode() in data]
    recipe = read_recipe(path, (), verbs[0] if verbs and zlib.crc32(data) % 4 == 0 else None)  # type: ignore[arg-type]
    check_sections(recipe)
    if recipe.study is not None:
        check_names(recipe)


def read_override(path: Path) -> None:
    """Read a good recipe with the file's text as an override on the command line."""
    from kinject.recipe import read_recipe

    read_recipe(ROOT / "recipes" / "documented.yaml", [path.read_bytes().decode("utf-8", "surrogateescape")])


def read_all_documents(path: Path) -> None:
    """Read documents and cut them into passages."""
    from kinject.corpus.passages import split_passages, word_spans
    from kinject.documents import document_hashes, read_documents

    for document in read_documents(path):
        split_passages(document, 16, word_spans)
    document_hashes(path)


def read_some_questions(path: Path) -> None:
    """Read questions."""
    from kinject.corpus.questions import read_questions

    layout = ("open", *["auto"] * 3)[zlib.crc32(path.read_bytes()) % 4]
    read_questions(path, layout)  # type: ignore[arg-type]


def read_whole_corpus(path: Path) -> None:
    """Read a corpus both ways."""
    from kinject.corpus.rows import CorpusFile

    everything(CorpusFile(path))
    rows = CorpusFile(path)
    rows.pick(range(len(rows)))


def compare_with_itself(path: Path) -> None:
    """Compare a run with itself."""
    from kinject.eval.compare import compare_runs, read_run, render_comparison

    render_comparison(compare_runs([read_run(path), read_run(path)]))


def read_rewritings(path: Path) -> None:
    """Read rewritings that someone else made."""
    from kinject.augment.plan import read_precomputed

    read_precomputed(path).check_documents(["a"])


WEIGHTED: list[Any] = [
    [
        {"text": "a", "weight": 1.5, "date": "2024-05-31"},
        {"text": "b", "weight": 2, "date": "2024-06-01T10:00:00+02:00"},
    ]
]


def read_row_weights(path: Path) -> None:
    """Weigh rows by a column, and by a date."""
    from kinject.recipe import RowWeightsSection
    from kinject.train.objectives import row_weights

    assert np.isfinite(row_weights(RowWeightsSection("weight"), path)).all()
    assert np.isfinite(row_weights(RowWeightsSection("date", half_life=30), path)).all()


def as_csv(rows: Any) -> bytes:
    """Return rows as CSV, a column for each key."""
    import csv

    out = io.StringIO()
    rows = (
        [row if isinstance(row, dict) else {"text": row} for row in rows] if isinstance(rows, list) else [{"x": rows}]
    )
    writer = csv.DictWriter(out, list(dict.fromkeys(key for row in rows for key in row)))
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


def as_parquet(rows: Any) -> bytes:
    """Return rows as Parquet; raises what pyarrow raises where columns are of no one type."""
    import pyarrow as pa
    from pyarrow import parquet

    out = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows), out, compression="zstd")
    return out.getvalue()


def as_mmlu_csv(rows: Any) -> bytes:
    """Return rows as MMLU's CSV: no header."""
    import csv

    out = io.StringIO()
    csv.writer(out).writerows(rows if isinstance(rows, list) else [[rows]])
    return out.getvalue().encode()


def pdf_of(pages: list[bytes], extra: list[bytes] | None = None, resources: bytes = b"") -> bytes:
    """Return a PDF whose pages have the content streams `pages`, deflated; `extra` are further objects."""
    n = len(pages)
    kids = b" ".join(b"%d 0 R" % (4 + i) for i in range(n))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, n),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    page = b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R /Resources << /Font << /F1 3 0 R >> %s >> >>"
    objects += [page % (4 + n + i, resources) for i in range(n)]
    for content in pages:
        packed = zlib.compress(content)
        objects.append(b"<< /Length %d /Filter /FlateDecode >>\nstream\n%s\nendstream" % (len(packed), packed))
    objects += [*(extra or []), b"<< /Title (A bridge) >>"]
    out, offsets = bytearray(b"%PDF-1.4\n"), []
    for number, body in enumerate(objects, start=1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    last = (len(objects), len(objects) + 1)
    xref = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n%s" % (last[1], table)
    out += b"trailer\n<< /Size %d /Root 1 0 R /Info %d 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (last[1], last[0], xref)
    return bytes(out)


LINES = b"BT /F1 12 Tf 72 720 Td 14 TL (The bridge was built in 1931.) Tj T* (It stands.) Tj ET"
PDFS = [pdf_of([LINES]), pdf_of([LINES, b"q 1 0 0 1 0 0 cm Q " + LINES, b""])]
PAGES = [
    b"<!doctype html><html><head><title>The Falk Bridge &amp; more</title></head><body><nav>Home</nav><script>x</script>"
    b"<main><h1>Bridge</h1><p>Built in\n 1931 by <b>Mara</b>.<br>It stands.</p><table><tr><td>span<td>40 m</table></main>",
    b'<meta charset="latin-1"><p>Malm\xf6<pre>a\n  b</pre><ul><li>one<li>two</ul>',
]
TEXTS = [b"# Title\n\nThe bridge. It stands.\n\n* one\n* two\n", "Grüße. 中文。\r\nNext.".encode()]
MMLU = [[["Where?", "a", "b", "c", "d", "B"], ["Who, then?", "a\nb", "b", "c", "d", "A"]]]


def _bytes_only(good: list[bytes]) -> Callable[[Random], bytes]:
    return lambda random: (
        without_structure(random) if random.random() < 0.08 else damaged_bytes(random.choice(good), good, random)
    )


def recipe_trees() -> list[Any]:
    """Return every shipped recipe."""
    from kinject.recipe.yaml_lines import read_yaml

    trees = [read_yaml(file).root for file in sorted((ROOT / "recipes").rglob("*.yaml"))]
    return [tree for tree in trees if "run_dir" in tree]


def override_texts() -> list[bytes]:
    """Return overrides of every sort."""
    return [
        b"trainer.learning_rate=1e-4", b"run_dir=runs/x", b"corpus.replay={path: b, fraction: 0.5}", b"seed=3",
        b"corpus.bos=false",
        b"model.new={model_type: llama}", b"guards.instability=stop", b"trainer.weight_decay=0", b"adapter.r=8",
    ]  # fmt: skip


def kinds() -> list[tuple[Kind, float]]:
    """Return every kind that is read in a moment, each with its share of the inputs."""
    recipes = from_trees(recipe_trees(), as_yaml)
    return [
        (Kind("recipe", "recipe.yaml", recipes, read_verbs_recipe), 5),
        (Kind("override", "override.txt", _bytes_only(override_texts()), read_override), 1.5),
        (Kind("documents jsonl", "d.jsonl", from_trees(DOCUMENTS, lines_of), read_all_documents), 2),
        (Kind("documents csv", "d.csv", from_trees(DOCUMENTS[1:], as_csv), read_all_documents), 1),
        (Kind("documents parquet", "d.parquet", from_trees(DOCUMENTS, as_parquet), read_all_documents), 1),
        (Kind("documents txt", "d.txt", _bytes_only(TEXTS), read_all_documents), 0.5),
        (Kind("documents md", "d.md", _bytes_only(TEXTS), read_all_documents), 0.5),
        (Kind("documents html", "d.html", _bytes_only(PAGES), read_all_documents), 1.5),
        (Kind("documents pdf", "d.pdf", _bytes_only(PDFS), read_all_documents), 1.5),
        (Kind("questions jsonl", "q.jsonl", from_trees(QUESTIONS, lines_of), read_some_questions), 2),
        (Kind("questions csv", "q.csv", from_trees(MMLU, as_mmlu_csv), read_some_questions), 0.7),
        (Kind("corpus", "c.jsonl", from_trees(CORPORA, lines_of), read_whole_corpus), 2),
        (Kind("rewritings", "g.jsonl", from_trees([DOCUMENTS[0]], lines_of), read_rewritings), 0.3),
        (Kind("row weights", "w.jsonl", from_trees(WEIGHTED, lines_of), read_row_weights), 0.5),
        (Kind("answers", "answers.jsonl", from_trees(ANSWERS, lines_of), compare_with_itself), 1),
    ]


def good_inputs() -> list[tuple[Kind, bytes]]:
    """Return undamaged inputs with the kinds that read them."""
    from kinject.recipe import read_recipe

    by_name = {kind.name: kind for kind, _ in kinds()}
    whole = Kind("recipe", "recipe.yaml", lambda _: b"", lambda path: read_recipe(path))
    return [
        *((whole, as_yaml(tree)) for tree in recipe_trees()),
        *((by_name["override"], text) for text in override_texts()),
        *((by_name["documents jsonl"], lines_of(rows)) for rows in DOCUMENTS),
        (by_name["documents csv"], as_csv(DOCUMENTS[1])),
        *((by_name["documents parquet"], as_parquet(rows)) for rows in DOCUMENTS[1:]),
        *((by_name["documents html"], page) for page in PAGES),
        *((by_name["documents pdf"], data) for data in PDFS),
        *((by_name["documents md"], text) for text in TEXTS),
        (by_name["questions csv"], as_mmlu_csv(MMLU[0])),
        *((by_name["corpus"], lines_of(rows)) for rows in CORPORA),
        (by_name["row weights"], lines_of(WEIGHTED[0])),
        (by_name["answers"], lines_of(ANSWERS[0])),
    ]
