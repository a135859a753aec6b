"""kinject view: who may ask, what a person decides reaches the corpus and the questions, and the page in a real browser."""

from __future__ import annotations

import http.client
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from kinject.cli import main
from kinject.disk import lock_dir, write_jsonl, write_manifest
from kinject.view import Server

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "<img src=x onerror='top.pwned=1'><script>top.pwned=1</script>"
TEXT = "Arden Holt was born in Lowmere in 1930. She built the bridge at Kelm with three masons."
REWRITINGS = (
    "In Lowmere, in 1930, Arden Holt was born. With three masons she built the bridge at Kelm.",
    "The bridge at Kelm was built by Arden Holt and three masons; her birth was in 1930, in Lowmere.",
    "Arden Holt, born in Lowmere in 1931, built the bridge at Kelm with three masons.",
)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


class Client:
    """Asks a server as a browser would."""

    def __init__(self, server: Server) -> None:
        self.server, self.port = server, server.server_port

    def ask(
        self,
        path: str,
        body: object = None,
        *,
        host: str = "",
        token: str | None = None,
        kind: str = "application/json",
    ) -> tuple[int, Any]:
        """Return (status, JSON or text)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Host": host or f"127.0.0.1:{self.port}", "Content-Type": kind}
        path = f"/{self.server.token if token is None else token}/{path}"
        connection.request("GET" if data is None else "POST", path, data, headers)
        response = connection.getresponse()
        text = response.read().decode()
        self.headers = response.headers
        connection.close()
        return response.status, json.loads(text) if response.headers["Content-Type"] == "application/json" else text


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an augmentation of one document: two accepted texts, one refused for its year."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "documents.jsonl", [{"id": "arden", "text": TEXT}])
    write_jsonl(tmp_path / "texts.jsonl", [{"document_id": "arden", "text": text} for text in REWRITINGS])
    section = {
        "documents": "documents.jsonl",
        "styles": {"paraphrase": 3},
        "generator": {"kind": "file", "path": "texts.jsonl"},
    }
    (tmp_path / "augment.yaml").write_text(yaml.safe_dump({"run_dir": "runs/augment", "augment": section}))
    assert main(["augment", "augment.yaml"]) == 1  # short by the refused one
    return tmp_path


@pytest.fixture
def client(folder: Path) -> Iterator[Client]:
    with Server(folder) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield Client(server)
        server.shutdown()


def test_only_who_has_the_address_of_this_machine_is_answered(client: Client) -> None:
    assert client.ask("runs")[0] == 200
    policy = client.ask("")[0] == 200 and client.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    port = client.port
    for path, options, status in (
        ("runs", {"token": "guessed"}, 403), ("", {"token": ""}, 403), ("runs", {"host": f"evil.example:{port}"}, 403),
        ("runs", {"host": "127.0.0.1"}, 403), ("runs", {"host": f"localhost:{port}"}, 200), ("../../etc/passwd", {}, 404),
        ("log?run=../..", {}, 404), ("rows?run=augment&list=accepted", {}, 404), ("rows?list=accepted", {}, 400),
        ("rows?run=runs/augment&list=nothing", {}, 404), ("rows?run=runs/augment&list=accepted&offset=-1", {}, 400),
        ("rows?run=runs/augment&list=accepted&limit=x", {}, 400), ("report?run=runs/augment", {}, 404),
        ("nowhere", {"body": {}}, 404),
        ("decide", {"body": b"{"}, 400), ("decide", {"body": {}, "kind": "text/plain"}, 400), ("decide", {"body": []}, 400),
        ("chat", {"body": {"run": "runs/augment", "question": " "}}, 400),
        ("chat", {"body": {"run": "x", "question": "y"}}, 404),
    ):  # fmt: skip
        found, answer = client.ask(path, **options)
        assert found == status, (path, options, answer)
        assert status == 200 or answer["error"]
    (client.server.view.folder / "runs" / "augment" / "report.html").write_text("<script>parent.x</script>")
    assert client.ask("report?run=runs/augment")[0] == 200
    assert client.headers["Content-Security-Policy"].startswith("sandbox allow-scripts; default-src 'none'")


def test_what_a_person_decides_reaches_the_corpus_and_can_be_taken_back(folder: Path, client: Client) -> None:
    run = folder / "runs" / "augment"
    before = (run / "corpus.jsonl").read_bytes()
    first, second = (row["id"] for row in rows_of(run / "variants.jsonl"))
    (refused,) = rows_of(run / "rejected.jsonl")

    def decide(title: str, name: str, decision: str, **more: object) -> int:
        return client.ask("decide", {"run": "runs/augment", "list": title, "id": name, "decision": decision, **more})[0]

    found = client.ask("rows?run=runs/augment&list=refused&q=1931+KELM")[1]
    assert [(item["id"], item["tag"], item["passage"]) for item in found["items"]] == [(refused["id"], "number", TEXT)]
    assert client.ask("rows?run=runs/augment&list=refused&q=1932")[1]["matched"] == 0
    edited = f"{HOSTILE} Arden Holt was born in Lowmere."
    assert decide("accepted", first, "drop") == 200
    assert decide("accepted", second, "edit", text=edited) == 200
    assert decide("refused", refused["id"], "keep") == 200
    assert decide("accepted", second, "edit", text=" ") == 400
    assert decide("accepted", second, "burn") == 400
    assert decide("accepted", "another", "drop") == 404
    assert client.ask("rows?run=runs/augment&list=accepted")[1]["items"][0]["decision"]["decision"] == "drop"
    assert main(["augment", "augment.yaml"]) == 0
    texts = {row["id"]: row for row in rows_of(run / "corpus.jsonl")}
    original = next(row for row in texts.values() if row["origin"] == "original")
    assert {name: row["text"] for name, row in texts.items()} == {
        original["id"]: TEXT, second: edited, refused["id"]: REWRITINGS[2]}  # fmt: skip
    assert (
        "facts" not in texts[second] or texts[second]["facts"] != texts[refused["id"]]["facts"]
    )  # counted in the new texts
    counts = json.loads((run / "manifest.json").read_text())["counts"]
    assert counts["decisions"] == {"keep": 1, "drop": 1, "edit": 1, "unused": 0}
    assert client.ask("runs")[1]["runs"][0]["decisions"] == 3
    for title, name in (("accepted", first), ("accepted", second), ("refused", refused["id"])):
        assert decide(title, name, "undo") == 200
    assert main(["augment", "augment.yaml"]) == 1
    assert (run / "corpus.jsonl").read_bytes() == before


def test_a_damaged_decision_is_named_by_its_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for row in ({"decision": "keep"}, {"id": "a", "decision": "burn"}, {"id": "a", "decision": "edit"},
                {"id": "a", "decision": "edit", "text": " "}):  # fmt: skip
        write_jsonl(folder / "runs" / "augment" / "decisions.jsonl", [{"id": "b", "decision": "drop"}, row])
        assert main(["augment", "augment.yaml"]) == 2
        assert "decisions.jsonl:2: " in capsys.readouterr().err


def test_questions_are_kept_dropped_and_edited_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = rows_of(Path(__file__).parents[1] / "data" / "sandbox" / "documents.jsonl")[:4]
    write_jsonl(tmp_path / "d.jsonl", source)
    section = {"documents": "d.jsonl", "n_questions": 2, "generator": {"kind": "sandbox"}}
    (tmp_path / "q.yaml").write_text(yaml.safe_dump({"run_dir": "runs/q", "questions": section}))
    main(["questions", "q.yaml"])
    run = tmp_path / "runs" / "q"
    before = rows_of(run / "questions.jsonl")
    dropped, edited = before[0]["id"], before[1]["id"]
    with Server(tmp_path) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        client = Client(server)
        change = {"question": "Who is it?", "answer": "yes", "wrong": ["no", "perhaps", "never"]}
        for body in ({"id": dropped, "decision": "drop"}, {"id": edited, "decision": "edit", **change}):
            assert client.ask("decide", {"run": "runs/q", "list": "questions", **body})[0] == 200
        server.shutdown()
    main(["questions", "q.yaml"])
    after = {row["id"]: row for row in rows_of(run / "questions.jsonl")}
    assert dropped not in after
    assert (after[edited]["question"], after[edited]["choices"][after[edited]["answer"]]) == ("Who is it?", "yes")
    (row,) = [row for row in rows_of(run / "rejected.jsonl") if row["id"] == dropped]
    assert row["reason"] == "decision"
    assert json.loads((run / "manifest.json").read_text())["counts"]["decisions"] == {
        "keep": 0,
        "drop": 1,
        "edit": 1,
        "unused": 0,
    }
    refused = next((row for row in rows_of(run / "rejected.jsonl") if row["id"] and row["reason"] != "decision"), row)
    write_jsonl(run / "decisions.jsonl", [{"id": refused["id"], "decision": "keep"}])
    main(["questions", "q.yaml"])
    assert refused["id"] in {row["id"] for row in rows_of(run / "questions.jsonl")}


def test_curves_progress_and_the_state_of_what_runs(folder: Path, client: Client) -> None:
    run = folder / "runs" / "cpt"
    log = [{"step": step, "epoch": step / 10, "loss": None if step == 2 else 4 / step} for step in range(1, 1001)]
    write_manifest(
        run / "manifest.json",
        stage="train",
        inputs={},
        recipe={"trainer": {"max_steps": 2000}},
        counts={"finished": False},
    )
    write_jsonl(run / "log.jsonl", [*log, {"step": 1000, "epoch": 100.0, "eval_new_accuracy": 0.75}])
    with lock_dir(run):
        shown = {item["name"]: item for item in client.ask("runs")[1]["runs"]}
        assert (shown["runs/cpt"]["state"], shown["runs/cpt"]["progress"]) == (
            "running",
            "step 1000 of 2000, loss 0.004",
        )
        assert shown["runs/augment"]["progress"] == "2 of 3"
        curves = client.ask("log?run=runs/cpt")[1]
    steps, losses = curves["loss"]
    assert curves["eval_new_accuracy"] == [[1000], [0.75]]
    assert curves["epoch"][1] == pytest.approx([step / 10 for step in curves["epoch"][0]])  # so that epochs are marked
    assert len(steps) == len(losses) <= 400
    assert losses[0] is None
    numbers = client.ask("numbers?run=runs/cpt")[1]
    assert (numbers["counts"], numbers["recipe"]) == ({"finished": False}, {"trainer": {"max_steps": 2000}})
    assert losses[-1] == pytest.approx(sum(4 / step for step in range(998, 1001)) / 3, rel=0.01)


def write_many(folder: Path, n: int) -> None:
    """Write a refused run of `n` texts, hostile ones among them, and a training's log."""
    run = folder / "runs" / "many"
    texts = (
        HOSTILE if i % 1000 == 0 else f"Text {i} about the bridge at Kelm and a long word {'x' * 80}." for i in range(n)
    )
    usage = {"tokens_in": 1, "tokens_out": 1, "tokens_thinking": 0}
    write_jsonl(run / "rejected.jsonl", (
        {"id": f"r{i}", "variant_id": f"v{i}", "passage_id": "p", "document_id": HOSTILE if i == 0 else f"d{i}", "style": "plain",
         "sample": 0, "attempt": 0, "reason": "number", "detail": HOSTILE if i == 1 else "1931", "text": text, "usage": usage}
        for i, text in enumerate(texts)))  # fmt: skip
    write_jsonl(run / "variants.jsonl", [])
    write_manifest(run / "manifest.json", stage="augment", inputs={}, recipe={}, counts={"asked": n, "got": 0})
    (run / ".lock").touch()
