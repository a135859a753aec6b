"""The hostile inputs that everyone thinks of, each by name: what it comes to, and where the message points."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kinject.corpus.questions import read_questions
from kinject.corpus.rows import CorpusFile
from kinject.disk import files
from kinject.documents import pdf
from kinject.errors import InputError, KinjectError, RecipeError
from kinject.eval.compare import read_run
from kinject.heap import document_hashes, read_documents
from kinject.language.sentences import sentence_ends
from kinject.recipe import read_recipe
from kinject.report.files import read_report
from made import as_parquet, lines_of, pdf_of
from small import quick

Reader = Callable[[Path], object]

ROWS: dict[str, Reader] = {
    "documents": lambda path: list(read_documents(path)),
    "corpus": lambda path: list(CorpusFile(path)),
    "questions": read_questions,
    "samples": read_run,
}
"""Readers of JSON lines."""
FILES: dict[str, tuple[str, Reader]] = {
    **{name: ("x.jsonl", read) for name, read in ROWS.items()},
    "documents csv": ("x.csv", ROWS["documents"]),
    "documents parquet": ("x.parquet", ROWS["documents"]),
    "documents txt": ("x.txt", ROWS["documents"]),
    "documents pdf": ("x.pdf", ROWS["documents"]),
    "documents html": ("x.html", ROWS["documents"]),
    "document hashes": ("x.txt", document_hashes),
    "questions csv": ("x.csv", read_questions),
    "recipe": ("x.yaml", read_recipe),
    "report": ("report.json", read_report),
    "run": ("answers.jsonl", read_run),
}
"""Every reader of a file, and what it is called."""


def refusal(read: Reader, path: Path) -> str:
    with pytest.raises(KinjectError) as caught:
        read(path)
    message = str(caught.value)
    assert str(path) in message
    return message


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("kind", FILES)
def test_what_is_no_file_is_refused_before_it_is_opened(tmp_path: Path, kind: str) -> None:
    name, read = FILES[kind]
    folder, pipe, device = (tmp_path / part / name for part in "abc")
    for path in (folder, pipe, device):
        path.parent.mkdir()
    folder.mkdir()
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    for path, file_type in ((pipe, "a pipe"), (device, "a device")):
        assert f"found {file_type}, expected a file" in refusal(read, path)
    refusal(read, folder)


@pytest.mark.parametrize("kind", FILES)
def test_what_is_empty_absent_unreadable_or_a_circle_of_links_is_refused(
    tmp_path: Path, kind: str
) -> None:
    name, read = FILES[kind]
    path = tmp_path / name
    refusal(read, path)
    path.symlink_to(path)
    refusal(read, path)
    path.unlink()
    if kind != "document hashes":  # an empty file has a hash
        refusal(read, written(path, b""))
    if os.geteuid():  # root reads everything
        path.write_bytes(b"x")
        path.chmod(0)
        assert "Permission denied" in refusal(read, path)


@pytest.mark.parametrize(
    "kind",
    [
        *sorted(
            kind
            for kind in FILES
            if not kind.startswith("document") and kind not in ("report", "questions csv")
        ),
        "documents",
    ],
)
@pytest.mark.parametrize(
    "data", [b"\xff\xfe\x00", b'{"text": "Malm\xf6"}\n', "a\n".encode("utf-16")]
)
def test_other_encodings_than_utf_8_are_reported(tmp_path: Path, kind: str, data: bytes) -> None:
    pytest.importorskip("selectolax")
    name, read = FILES[kind]
    message = refusal(read, written(tmp_path / name, data))
    if kind == "documents" and data == "a\n".encode("utf-16"):
        assert "x.jsonl:1: not JSON" in message  # rows of documents may be in UTF-16
    else:
        assert "UTF-8" in message or "utf-8" in message


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (b'{"text": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"text": ' + b"[" * 100_000, "levels deep"),
        (b'{"text": ' + b'{"a":' * 100_000, "levels deep"),
        (b'{"text": ' + b"[" * 80 + b"]" * 80 + b"}", "levels deep"),
        (b'{"text": "\\ud800"}', "half a surrogate pair"),
        (b'{"text": "a"} {}', "not JSON"),
        (b"NaN", "found float"),
        (b"[]", "found list"),
        (b'"' + b"a" * 100_000 + b'"', "found str"),
        (b"\0", "not JSON"),
    ],
)
def test_a_line_that_is_no_plain_object_is_refused_by_its_number(
    tmp_path: Path, kind: str, row: bytes, expected: str
) -> None:
    path = written(tmp_path / "x.jsonl", b"\n\n" + row + b"\n")
    message = refusal(ROWS[kind], path)
    assert f"{path}:3: " in message
    assert expected in message
    assert len(message) < 5000


def test_a_line_longer_than_the_limit_is_refused_wherever_lines_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LONGEST_LINE", 2000)
    for kind in (*ROWS, "run"):
        name, read = FILES[kind]
        path = written(tmp_path / name, b'{"text": "' + b"a" * 3000 + b'"}\n')
        assert f"{path}:1: a line longer than 1.95312 KiB. Split" in refusal(read, path), kind


def test_a_file_that_is_held_whole_has_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("selectolax")
    monkeypatch.setattr(files, "LARGEST_FILE", 2**20)
    for kind in ("documents txt", "documents pdf", "documents html", "report", "recipe"):
        name, read = FILES[kind]
        data = b"%PDF-" if kind == "documents pdf" else b""
        message = refusal(read, written(tmp_path / name, data + b" " * (2**20 + 1)))
        assert "the most that is read whole" in message, kind


LONG_LINES = [
    *((kind, b'{"text": "') for kind in (*ROWS, "run", "report")), ("documents csv", b'text\n"'), ("questions csv", b'"'),
    ("documents txt", b"a"), ("documents html", b"<p>"), ("documents pdf", b"%PDF-1.4\n"), ("recipe", b"run_dir: "),
]  # fmt: skip
ONE_OF_EACH_READER = [
    line
    for line in LONG_LINES
    if line[0] not in (*list(ROWS)[1:], "questions csv", "documents html")
]


@pytest.mark.parametrize(("kind", "head"), quick(LONG_LINES, *ONE_OF_EACH_READER))
def test_two_gibibytes_on_one_line_are_refused_in_half_of_that(
    tmp_path: Path, kind: str, head: bytes
) -> None:
    """The line is of zeros that take no room on the disk; what asks for all of it gets a `MemoryError`."""
    name, read = FILES[kind]
    path = written(tmp_path / name, head)
    os.truncate(path, 2**31)
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**30, hard))
    try:
        message = refusal(read, path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert "longer than" in message or "the most that is read whole" in message


LAUGHS = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))
YAML: list[tuple[str, str]] = [
    ("a0: &a0 [x]\n" + LAUGHS, "more than 100,000 values"),
    ("a: &a [*a]\n", "levels deep"),
    ("a: " + "[" * 600, "levels deep"),
    ("a: " + "[" * 40 + "]" * 40, "levels deep"),
    ("- " * 130_000, "levels deep"),  # libyaml would overflow the stack
    ("".join(f"{' ' * i}a:\n" for i in range(300)), "levels deep"),
    ("a: &a {b: 1}\nc:\n  <<: *a\n", "merge key"),
    ("run_dir: !!python/name:os.getcwd\n", "is not read"),
    ("seed: !!bool x\n", "expected true or false to match its tag"),
    ("seed: !!int ''\n", "expected a whole number to match its tag"),
    ("seed: !!timestamp x\n", "is not read"),
    ("seed: !!binary =\n", "is not read"),
    ("corpus: !!set {a}\n", "is not read"),
    ("seed: " + "9" * 5000 + "\n", "a number of 5000 characters"),
    ("seed: 0x" + "f" * 5000 + "\n", "a number of 5002 characters"),
    ("seed: 1e999\n", "found inf"),
    ('run_dir: "a\\0b"\n', "a NUL"),
    ('run_dir: "\\ud800"\n', "half a surrogate pair"),
    ("run_dir: a\0b\n", "bad YAML"),
    ("run_dir: ''\n", "is empty"),
    ("? [a]\n: b\n", "a key must be a plain word"),
    ("a: 1\n---\nb: 2\n", "bad YAML"),
    ("%YAML 9.9\n---\na: 1\n", "bad YAML"),
    (" " * (2**18 + 1), "longer than 256 KiB"),
    ("run_dir: a\nadapter: {r: .nan, lora_alpha: [1, -.inf]}\n", "adapter.lora_alpha.1: found -inf, expected a finite number"),
    ("run_dir: a\nadapter: {r: .nan}\n", "adapter.r: found nan, expected a finite number"),
    ("run_dir: a\ntrainer: {learning_rate: .inf}\n", "learning_rate: found inf, expected a finite number"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), YAML)
def test_yaml_that_explodes_or_means_something_else_is_refused(
    tmp_path: Path, text: str, expected: str
) -> None:
    message = refusal(
        read_recipe, written(tmp_path / "r.yaml", text.encode("utf-8", "surrogatepass"))
    )
    assert expected in message
    assert len(message) < 20_000


@pytest.mark.parametrize(("text", "expected"), YAML[:5])
def test_an_override_that_explodes_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = written(tmp_path / "r.yaml", b"run_dir: a\n")
    value = "{" + text.replace("\n", ", ") + "}" if "&a0" in text else text.removeprefix("a: ")
    with pytest.raises(RecipeError, match=r"command line: adapter\.r: the value .* cannot be read"):
        read_recipe(path, [f"adapter.r={value}"])


@pytest.mark.parametrize(
    ("text", "value"),
    [("010", 10), ("0o17", 15), ("0x1f", 31), ("1_000", 1000), ("+3", 3), ("-0", 0), ("7", 7)],
)
def test_whole_numbers_are_those_of_yaml_1_2(tmp_path: Path, text: str, value: int) -> None:
    assert (
        read_recipe(written(tmp_path / "r.yaml", f"run_dir: a\nseed: {text}\n".encode())).seed
        == value
    )


@pytest.mark.parametrize(
    "text", ["1:30:00", "2026-01-01", "2026-13-45", "0b11", "no", "=", "1e", "\u202eabc", "\u0663"]
)
def test_times_dates_and_switches_of_yaml_1_1_are_words(tmp_path: Path, text: str) -> None:
    assert (
        str(read_recipe(written(tmp_path / "r.yaml", f"run_dir: {text}\n".encode())).run_dir)
        == text
    )


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
def test_line_ends_and_byte_order_marks_change_nothing(
    tmp_path: Path, ends: str, mark: bytes
) -> None:
    recipe = ends.join(["run_dir: a", "seed: 3", ""]).encode()
    assert read_recipe(written(tmp_path / "r.yaml", mark + recipe)).seed == 3
    if ends != "\r":  # JSON lines end in \n; what follows a lone \r stands on the same line
        rows = ends.join(['{"text": "One."}', "", '{"text": "Two."}', ""]).encode()
        path = written(tmp_path / "d.jsonl", mark + rows)
        assert [document.text for document in read_documents(path)] == ["One.", "Two."]
        assert len(CorpusFile(path)) == len(list(CorpusFile(path))) == 2
    text = ends.join(["# Title", "", "One."]).encode()
    (document,) = read_documents(written(tmp_path / "d.md", mark + text))
    assert document.title == "Title"
    assert document.text == "# Title\n\nOne."


def test_text_from_right_to_left_and_outside_the_basic_plane_is_kept_as_it_is(
    tmp_path: Path,
) -> None:
    text = "\u202eabc\u202c שלום مرحبا \U0001f600 e\u0301 \u2028 \x85 end"
    row = json.dumps({"text": text}).encode() + b"\n"
    (document,) = read_documents(written(tmp_path / "d.jsonl", row))
    assert document.text == text
    (corpus_row,) = CorpusFile(tmp_path / "d.jsonl")
    assert corpus_row.text == text


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("d.jsonl", lines_of([{"text": "a"}, {"text": "a"}]), "is already the id of"),
        ("d.jsonl", lines_of([{"text": "a", "id": [1]}]), "id: found [1]"),
        ("d.csv", b"text,text\na,b\n", "two columns are called 'text'"),
    ],
)  # fmt: skip
def test_documents_that_cannot_be_told_apart_or_read_are_refused(
    tmp_path: Path, name: str, data: bytes, expected: str
) -> None:
    pytest.importorskip("selectolax")
    assert expected in refusal(ROWS["documents"], written(tmp_path / name, data))


def test_a_column_of_parquet_that_is_not_utf_8_is_reported(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    broken = pa.array([b"Malm\xf6"]).view(pa.string())
    parquet.write_table(pa.table({"text": broken}), tmp_path / "d.parquet")
    assert ":1: not readable as Parquet" in refusal(ROWS["documents"], tmp_path / "d.parquet")


def test_a_pdf_that_asks_for_more_work_than_a_page_can_be_worth_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pdf, "_MOST_OPERATIONS", 3000)
    many = pdf_of("BT /F1 12 Tf " + "(a) Tj " * 4000 + "ET")
    assert "more than 3,000 drawing operations" in refusal(
        ROWS["documents"], written(tmp_path / "a.pdf", many)
    )


@pytest.mark.parametrize(
    "text",
    [
        "# a" + " " * 200_000 + "b",
        "." * 200_000 + "x",
        "a" + "\n" * 200_000 + "b",
        "One.\n\n" * 50_000,
        "! " * 100_000,
        "#" * 200_000,
        "e.g. " * 50_000,
        "\"'" * 100_000 + ".",
    ],
)
def test_texts_that_make_patterns_go_back_and_forth_are_cut_in_linear_time(
    tmp_path: Path, text: str
) -> None:
    """Quadratic patterns need minutes for these; the test ends in a moment or not at all."""
    (document,) = read_documents(written(tmp_path / "a.md", text.encode()))
    ends = sentence_ends(document.text)
    assert ends == sorted(set(ends))
    assert ends[-1] == len(document.text.rstrip())


def test_preformatted_space_is_taken_from_line_ends_in_linear_time(tmp_path: Path) -> None:
    pytest.importorskip("selectolax")
    page = "<pre>a" + " " * 300_000 + "b  \nc</pre>"
    (document,) = read_documents(written(tmp_path / "a.html", page.encode()))
    assert document.text == "```\na" + " " * 300_000 + "b\nc\n```"


@pytest.mark.parametrize(
    ("change", "expected"), [({"answer": float("nan")}, "answer: found nan"), ({"choices": ["a"] * 300_000}, "'a' occurs twice")]
)  # fmt: skip
def test_questions_that_cannot_be_meant_are_refused(
    tmp_path: Path, change: dict[str, object], expected: str
) -> None:
    row = {"question": "Who?", "choices": ["a", "b"], "answer": 0, **change}
    message = refusal(read_questions, written(tmp_path / "x.jsonl", lines_of([row])))
    assert expected in message
    assert len(message) < 5000


def test_a_conversation_with_numbers_that_json_lacks_is_refused_by_line(tmp_path: Path) -> None:
    call = {"function": {"name": "add", "arguments": {"to": float("nan")}}}
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho", "tool_calls": [call]},
    ]
    with pytest.raises(InputError, match=r"c\.jsonl:1: found NaN or Infinity in tools"):
        list(CorpusFile(written(tmp_path / "c.jsonl", lines_of([{"messages": turns}]))))


def test_an_adapter_that_names_itself_as_its_base_is_refused(tmp_path: Path) -> None:
    from kinject.models import base_of_adapter

    for base in (str(tmp_path), "", None, "a\0b"):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
        refusal(base_of_adapter, tmp_path / "adapter_config.json")


def test_messages_of_megabytes_keep_their_place_and_their_cure(tmp_path: Path) -> None:
    path = written(tmp_path / "r.yaml", b"run_dir: a\nseed: " + b"x" * 200_000 + b"\n")
    message = refusal(read_recipe, path)
    assert message.startswith(f"{path}:2: seed: found 'xxx")
    assert message.endswith("expected a whole number, as 1000.")
    assert len(message) < 2200


def test_a_thousand_faults_are_counted_and_not_all_kept(tmp_path: Path) -> None:
    for read in (ROWS["corpus"], read_questions):
        message = refusal(read, written(tmp_path / "x.jsonl", b"{}\n" * 1000))
        assert message.count("\n") == 20
        assert message.endswith(("... and 980 more faulty lines.", "... and 2980 more."))


@pytest.mark.usefixtures("forked")
def test_parquet_with_a_damaged_column_does_not_end_the_process(tmp_path: Path) -> None:
    """Of some damage to a column's description pyarrow makes an abort, where it is asked for that column's sizes."""
    pytest.importorskip("pyarrow")
    data = as_parquet([{"text": "One."}])
    path = tmp_path / "d.parquet"
    script = "import sys; sys.path[:0] = sys.argv[2:]; from test_named import every_damage; every_damage(sys.argv[1])"
    path.write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-c", script, str(path), *map(str, Path(__file__).parents[:2])],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def every_damage(name: str) -> None:
    """Read the Parquet file with each byte of its footer changed in turn."""
    path = Path(name)
    data = path.read_bytes()
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    for position in range(start, len(data)):
        path.write_bytes(
            data[:position]
            + bytes([data[position] ^ (1, 0x10)[position % 2]])
            + data[position + 1 :]
        )
        with contextlib.suppress(KinjectError):
            list(read_documents(path))
