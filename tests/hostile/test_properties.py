"""What holds of every input: rows and recipes are read or refused, what is read means what another reader reads."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_named import FILES, ROWS

from kinject.errors import KinjectError
from kinject.language import sentences
from kinject.language.sentences import sentence_ends
from kinject.recipe import read_recipe
from kinject.recipe.read import Sections
from kinject.recipe.yaml_lines import read_yaml
from made import as_parquet, lines_of, pdf_of

LETTERS = st.characters(
    min_codepoint=32,
    exclude_categories=["Cs", "Cc", "Cn", "Co"],
    exclude_characters="\u2028\u2029\ufeff",
)
NUMBERS = st.integers(-(10**40), 10**40) | st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.none() | st.booleans() | NUMBERS | st.text(LETTERS, max_size=12)
TREES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(LETTERS, max_size=8), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
ANYTHING = st.recursive(
    PLAIN | st.floats() | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
KEYS = st.sampled_from((
    "id", "text", "title", "source", "meta", "question", "choices", "answer", "answers", "answerKey", "subject",
    "document_id", "messages", "role", "content", "prompt", "completion", "doc", "target", "filtered_resps", "arguments",
    "question_id", "passages",
))  # fmt: skip


def in_a_file(data: bytes, name: str, read: Any) -> Any:
    """Return what `read` makes of a file that holds `data`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        return read(path)


def refusal_of(data: bytes, name: str, read: Any) -> str:
    """Return what `read` says of a file that holds `data`, "" where it reads it."""
    try:
        in_a_file(data, name, read)
    except KinjectError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ROWS)
@settings(max_examples=10)
@given(rows=st.lists(st.dictionaries(KEYS, ANYTHING, max_size=6), min_size=1, max_size=3))
def test_rows_of_anything_under_the_keys_that_are_read_are_read_or_refused(
    kind: str, rows: list[dict[str, Any]]
) -> None:
    refusal = refusal_of(lines_of(rows), "x.jsonl", ROWS[kind])
    assert not refusal or "x.jsonl" in refusal


DOCUMENTS = [
    {"id": "a", "title": "One", "text": 'Built in 1931.\nIt "stands".', "year": 1931},
    {"text": "\u4e2d\U0001f600"},
]
GOOD = {
    "documents": lines_of(DOCUMENTS),
    "documents csv": b'text,title\n"First, ""quoted"".\nSecond.",One\nIt stands.,\n',
    "documents parquet": as_parquet(DOCUMENTS),
    "documents html": b"<!doctype html><html><head><title>The Falk Bridge &amp; more</title></head><body><nav>Home</nav><main>"
    b"<h1>Bridge</h1><p>Built in\n 1931 by <b>Mara</b>.<table><tr><td>span<td>40 m</table></main>",
    "documents pdf": pdf_of("BT /F1 12 Tf 72 720 Td 14 TL (The bridge was built in 1931.) Tj T* (It stands.) Tj ET"),
    "corpus": lines_of([{"text": "One.", "id": "r"}, {"prompt": "Q", "completion": " A"}]),
    "questions": lines_of([{"question": "Who?", "choices": ["x", "y"], "answer": 0, "id": "q"}]),
    "questions csv": b"Where?,a,b,c,d,B\n\"Who, then?\",\"a\nb\",b,c,d,A\n",
    "recipe": (Path(__file__).parents[2] / "recipes" / "sandbox" / "documented.yaml").read_bytes(),
}  # fmt: skip
"""Undamaged files that the readers of `FILES` read."""
PIECES = st.binary(max_size=4) | st.sampled_from((
    b"\0", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\r", b"\n\n", b"NaN", b"1e999", b"9" * 5000, b"[" * 20_000, b'{"a":' * 300,
    b"\\ud800", b'"', b"'", b",", b": ", b"- ", b"}", b"&a [*a]", b"<<: *a\n", b"!!int x", b"2026-13-45", b"010", b"---\n",
    b"<!--", b"<![CDATA[", b'<meta charset="punycode">', b"&#xd800;", b"<svg><p>", b"endobj", b"/Kids [1 0 R]",
    b"/Length 99999999", b"-1", b"65536",
))  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # what libraries say of broken files is not the claim
@pytest.mark.parametrize("kind", GOOD)
@settings(max_examples=30, derandomize=True)
@example(cuts=[])
@given(
    cuts=st.lists(
        st.tuples(st.integers(0, 2**16), st.integers(0, 60), PIECES), min_size=1, max_size=4
    )
)
def test_a_good_file_with_bytes_cut_out_and_put_in_is_read_or_refused(
    kind: str, cuts: list[tuple[int, int, bytes]]
) -> None:
    name, read = FILES[kind]
    data = GOOD[kind]
    for start, length, piece in cuts:
        start %= len(data) + 1
        data = data[:start] + piece + data[start + length :]
    refusal = refusal_of(data, name, read)
    assert not refusal or (cuts and name in refusal)


@settings(max_examples=40)
@given(
    recipe=st.dictionaries(
        st.sampled_from(sorted(Sections.__dataclass_fields__)), ANYTHING, min_size=1, max_size=5
    )
)
def test_a_recipe_of_anything_under_the_names_of_sections_is_read_or_refused(
    recipe: dict[str, Any],
) -> None:
    try:
        data = yaml.safe_dump(recipe).encode()
    except UnicodeEncodeError:
        return
    refusal = refusal_of(data, "r.yaml", read_recipe)
    assert not refusal or "r.yaml:" in refusal


@settings(max_examples=40)
@given(
    tree=st.dictionaries(
        st.text(LETTERS, max_size=8).filter(lambda key: key != "<<"), TREES, max_size=4
    )
)
def test_json_is_yaml_and_means_the_same(tree: dict[str, Any]) -> None:
    """JSON is a subset of YAML 1.2, so that the standard library's reader is the reference."""
    data = json.dumps(tree, ensure_ascii=False)
    if re.search(r'"<<"\s*:', data) or any(
        len(number) > 60 for number in re.findall(r"[\d.e+-]+", data)
    ):
        return
    parsed = in_a_file(data.encode(), "r.yaml", lambda path: read_yaml(path).root)
    assert parsed == json.loads(data)
    assert repr(parsed) == repr(json.loads(data))  # 1, 1.0 and True are equal, but not the same


@settings(max_examples=100)
@given(text=st.text(alphabet="ab.!?…\"' )]\n。”A", max_size=30))
def test_sentences_end_where_the_plain_pattern_ends_them(text: str) -> None:
    """The pattern in use cannot go back and forth; the one that says what is meant, and may, is the reference."""
    stops, full, closers = sentences.STOPS, sentences.FULL_STOPS, sentences._CLOSERS
    quotes = sentences._OPEN_OR_CLOSE
    plain = re.compile(
        rf"[{stops}]+[{closers}{quotes}]*(?=\s)"
        rf"|[{full}]+(?![{full}\d])[{closers}]*(?:[{quotes}](?=\s))?|\n\s*\n"
    )
    fast = [match.span() for match in sentences._END.finditer(text)]
    assert fast == [match.span() for match in plain.finditer(text)]
    ends = sentence_ends(text)
    assert ends == sorted(set(ends))
    assert all(0 < end <= len(text) for end in ends)
