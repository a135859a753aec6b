"""benchmarks/augment/refusals.py with a judge: from the prompt over HTTP to the table after the judge."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "augment"
PASSAGE = (
    "The mill at Orsa was built by Ada Lund in 1874 because a fire had destroyed the old one. Karl Berg ran it later."
)
SWAPPED = (
    "Karl Berg built the mill at Orsa in 1874 since a fire had destroyed its predecessor. Ada Lund ran it afterwards."
)
RIGHT = (
    "Ada Lund built the mill at Orsa in 1874 since a fire had destroyed its predecessor. Karl Berg ran it afterwards."
)

prompts: list[str] = []
"""The prompts of the judge."""


class Reader(BaseHTTPRequestHandler):
    """Answers as a reader of this passage would."""

    def do_POST(self) -> None:
        prompt = self.rfile.read(int(self.headers["Content-Length"])).decode()
        prompts.append(prompt)
        wrong = '[1] WRONG "Karl Berg built": Ada Lund built it\n[2] OK\nUNFAITHFUL'
        message = {"role": "assistant", "content": wrong if "Karl Berg built" in prompt else "FAITHFUL"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "reader", "choices": [choice]}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def reader() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Reader)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_judge_refuses_what_the_rules_accept_and_the_table_shows_it(
    reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARK))
    import refusals

    document = {"id": "mill", "title": "", "language": "en", "text": PASSAGE}
    rows = [
        {"document_id": "mill", "style": "paraphrase", "answer": text, "faithful": text == RIGHT}
        for text in (RIGHT, SWAPPED)
    ]
    (tmp_path / "documents.jsonl").write_text(json.dumps(document) + "\n")
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(sys, "argv", ["refusals.py", str(tmp_path), "--base-url", reader, "--model", "reader"])
    refusals.main()
    first, after = capsys.readouterr().out.split("After the judge")
    assert "| paraphrase | 1 | 0 (0%) | 0 | 1 | 0 | 0 | 1 |" in first
    assert "| paraphrase | 1 | 0 (0%) | 0 | 1 | 1 | 0 | 0 |" in after


def test_a_judge_asks_for_lost_facts_only_where_the_style_is_to_keep_them(
    reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARK))
    import refusals

    document = {"id": "mill", "title": "", "language": "en", "text": PASSAGE}
    answers = {"paraphrase": RIGHT, "implications": "The mill at Orsa is not the first.", "summary": "Ada Lund built."}
    rows = [
        {"document_id": "mill", "style": style, "answer": text, "faithful": True} for style, text in answers.items()
    ]
    (tmp_path / "documents.jsonl").write_text(json.dumps(document) + "\n")
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts.clear()
    monkeypatch.setattr(sys, "argv", ["refusals.py", str(tmp_path), "--base-url", reader, "--model", "reader"])
    refusals.main()
    whole = {
        text: "LOST" in next(prompt for prompt in prompts if text.split()[-1] in prompt) for text in answers.values()
    }
    assert list(whole.values()) == [True, False, False]
