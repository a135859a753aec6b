"""Public data sets, from a local server with the layout of the hub."""

from __future__ import annotations

import csv
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kinject.cli import main
from kinject.corpus import public_data
from kinject.corpus.public_data import DATA_SETS, describe, find_data, get_data
from kinject.corpus.questions import read_questions
from kinject.disk import read_jsonl
from kinject.errors import EndpointError, InputError
from kinject.recipe.shipped import read_shipped

QUESTIONS = {
    "anatomy": [("Which bone, \"the hyoid\"?", ["a, b", "c", "d", "e"], 1), ("Line\nbreak?", ["1", "2", "3", "4"], 3)],
    "miscellaneous": [("What?", ["w", "x", "y", "z"], 0)],
}  # fmt: skip


class Source(ThreadingHTTPServer):
    """Files with ranges, as the hub sends them; `asked` keeps the paths, `cut` ends so many answers half way."""

    def __init__(self, files: dict[str, bytes]) -> None:
        outer = self
        self.files, self.asked, self.cut = files, list[str](), 0

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                outer.asked.append(f"{parts.path} {self.headers['Range'] or ''}".strip())
                if parts.path not in outer.files:
                    self._send(404, b"no such file")
                else:
                    self._send_file(outer.files[parts.path])

            def _send_file(self, data: bytes) -> None:
                start = int((self.headers["Range"] or "bytes=0-").partition("=")[2].rstrip("-"))
                self.send_response(206 if start else 200)
                self.send_header("Content-Length", str(len(data) - start))
                self.end_headers()
                if outer.cut:
                    outer.cut -= 1
                    self.wfile.write(data[start : start + (len(data) - start) // 2])
                    self.close_connection = True
                else:
                    self.wfile.write(data[start:])

            def _send(self, status: int, data: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Retry-After", "0")
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Source]:
    """A local source in place of the hub."""
    server = Source({})
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("kinject.web.time.sleep", lambda _: None)
    monkeypatch.chdir(tmp_path)
    yield server
    server.shutdown()
    server.server_close()


def parquet(folder: Path, rows: list[dict[str, Any]]) -> bytes:
    import pandas

    path = folder / "rows.parquet"
    pandas.DataFrame(rows).to_parquet(path)
    return path.read_bytes()


@pytest.fixture
def mmlu(tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> Any:
    """MMLU with a few questions, in the layout of its repository, as `source` has it."""
    rows = [
        {"question": question, "subject": subject, "choices": choices, "answer": answer}
        for subject, questions in QUESTIONS.items() for question, choices, answer in questions
    ]  # fmt: skip
    return _on_hub(monkeypatch, source, "mmlu", {name: parquet(tmp_path, rows) for name in DATA_SETS["mmlu"].files})


def _on_hub(monkeypatch: pytest.MonkeyPatch, source: Source, name: str, files: dict[str, bytes]) -> Any:
    data = replace(
        DATA_SETS[name], files={file: hashlib.sha256(content).hexdigest() for file, content in files.items()}
    )
    for file, content in files.items():
        source.files[f"/datasets/{data.source}/resolve/{data.revision}/{file}"] = content
    monkeypatch.setattr(public_data, "DATA_SETS", {**public_data.DATA_SETS, name: data})
    return data


def test_mmlu_is_written_as_its_authors_give_it_and_read_by_the_recipes(
    mmlu: Any, source: Source, tmp_path: Path
) -> None:
    source.cut = 2  # two answers end half way: the rest is fetched, not all again
    paths = get_data(mmlu, tmp_path / "data")
    ranges = [path for path in source.asked if " bytes=" in path]
    assert len(source.asked) == 5
    assert len(ranges) == 2
    assert {path.relative_to(tmp_path / "data/mmlu").as_posix() for path in paths.paths} == {
        f"{split}/{subject}_{split}.csv" for split in ("dev", "val", "test") for subject in QUESTIONS
    }
    for subject, expected in QUESTIONS.items():
        path = tmp_path / f"data/mmlu/test/{subject}_test.csv"
        with path.open(newline="") as file:
            assert [row[5] for row in csv.reader(file)] == ["ABCD"[answer] for _, _, answer in expected]
        questions = read_questions(path)
        assert [(question.question, list(question.choices), question.answer) for question in questions] == expected
    n_asked = len(source.asked)
    assert get_data(mmlu, tmp_path / "data").was_there
    assert len(source.asked) == n_asked


def test_what_was_fetched_and_then_changed_is_told(mmlu: Any, tmp_path: Path) -> None:
    get_data(mmlu, tmp_path)
    path = tmp_path / "mmlu/test/anatomy_test.csv"
    path.write_text("other")
    with pytest.raises(InputError, match=r"anatomy_test\.csv: was changed since it was fetched"):
        get_data(mmlu, tmp_path)
    path.unlink()
    with pytest.raises(InputError, match=r"anatomy_test\.csv: is gone"):
        get_data(mmlu, tmp_path)
    with pytest.raises(InputError, match="revision c30699e8"):
        get_data(replace(mmlu, revision="other"), tmp_path)


def test_nothing_of_the_users_is_written_over(mmlu: Any, tmp_path: Path) -> None:
    (tmp_path / "mmlu").mkdir()
    with pytest.raises(InputError, match="is there already, and nothing is written over"):
        get_data(mmlu, tmp_path)


def test_a_fetch_that_was_interrupted_can_be_repeated(
    mmlu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = get_data(mmlu, tmp_path / "whole")

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for step in ("file_hash", "write_json"):  # while it is checked, and after the files were moved into their place
        folder = tmp_path / step
        with monkeypatch.context() as interrupted:
            interrupted.setattr(public_data, step, stop)
            with pytest.raises(KeyboardInterrupt):
                get_data(mmlu, folder)
        again = get_data(mmlu, folder)
        assert [path.relative_to(folder) for path in again.paths] == [
            path.relative_to(tmp_path / "whole") for path in whole.paths
        ]
        assert not list(folder.rglob("*.parts"))


def test_missing_public_data_has_its_command() -> None:
    assert public_data.command_for("data/general.jsonl") == "kinject recipes data get replay"
    assert public_data.command_for("data/mmlu/test") == "kinject recipes data get mmlu"
    assert public_data.command_for("data/mine.jsonl") == ""


def test_a_file_with_another_checksum_is_refused(mmlu: Any, source: Source, tmp_path: Path) -> None:
    name = next(iter(mmlu.files))
    source.files[f"/datasets/cais/mmlu/resolve/{mmlu.revision}/{name}"] += b"x"
    with pytest.raises(InputError, match=r"SHA-256 [0-9a-f]{64}, expected [0-9a-f]{64}"):
        get_data(mmlu, tmp_path)
    assert not (tmp_path / "mmlu").exists()
    source.files.clear()
    with pytest.raises((InputError, EndpointError), match=r"SHA-256|nothing is there"):
        get_data(mmlu, tmp_path)


def test_a_copy_serves_where_there_is_no_network(
    mmlu: Any, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, content in source.files.items():
        copy = tmp_path / "copy" / path.partition(f"{mmlu.revision}/")[2]
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"the hub is switched off .* name it with --from"):
        get_data(mmlu, tmp_path / "data")
    get_data(mmlu, tmp_path / "data", tmp_path / "copy")
    assert read_questions(tmp_path / "data/mmlu/dev/anatomy_dev.csv")
    assert source.asked == []


def test_instructions_become_rows_of_prompt_and_completion(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"instruction": "Say it.", "context": "", "response": "It.", "category": "x"},
        {"instruction": "Sum up.", "context": "A text.", "response": " Short. ", "category": "x"},
        {"instruction": "Empty.", "context": "", "response": "", "category": "x"},
    ]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    data = _on_hub(monkeypatch, source, "instructions", {"databricks-dolly-15k.jsonl": content})
    (path,) = get_data(data, tmp_path).paths
    assert [row for _, row in read_jsonl(path)] == [
        {"prompt": "Say it.\n\n", "completion": "It."}, {"prompt": "Sum up.\n\nA text.\n\n", "completion": "Short."},
    ]  # fmt: skip


def test_the_command_says_licence_size_and_revision_first(
    mmlu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "data", "get", "mmlu", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert not (tmp_path / "data").exists()
    assert "licence   MIT" in output
    assert f"revision {mmlu.revision}" in output
    assert main(["recipes", "data", "get", "mmlu"]) == 0
    assert capsys.readouterr().out == f"{output}mmlu: 6 files written and recorded\n"
    assert main(["recipes", "data", "get", "mmlu"]) == 0
    assert "mmlu: 6 files were there, unchanged" in capsys.readouterr().out
    assert main(["recipes", "data", "get", "mmlo"]) == 2
    assert "found 'mmlo'. Did you mean mmlu?" in capsys.readouterr().err
    assert main(["recipes", "data"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{name}: " in listed for name in DATA_SETS)


def test_the_recipes_of_the_paper_name_what_is_written() -> None:
    texts = "\n".join(recipe.text for recipe in read_shipped().values() if "studies/paper" in recipe.name)
    for name in ("mmlu", "instructions"):
        for output in DATA_SETS[name].outputs:
            assert f"data/{output}" in texts
    assert find_data(["mmlu", "mmlu"]) == [DATA_SETS["mmlu"]]
    assert "is there" not in "\n".join(describe(DATA_SETS["mmlu"], Path("nowhere")))
