"""kinject view: who may ask, what a person decides reaches the corpus and the questions, and the page in a real browser."""

from __future__ import annotations

import errno
import http.client
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from kinject import view
from kinject.cli import main
from kinject.disk import lock_dir, write_jsonl, write_manifest
from kinject.eval.chat import ChatSetup, open_chat
from kinject.view import Server
from kinject.view.rows import Latest, read_rows
from small import write_training
from view_client import Client

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
HOSTILE = "<img src=x onerror='top.pwned=1'><script>top.pwned=1</script>"
TEXT = "Arden Holt was born in Lowmere in 1930. She built the bridge at Kelm with three masons."
REWRITINGS = (
    "In Lowmere, in 1930, Arden Holt was born. With three masons she built the bridge at Kelm.",
    "The bridge at Kelm was built by Arden Holt and three masons; her birth was in 1930, in Lowmere.",
    "Arden Holt, born in Lowmere in 1931, built the bridge at Kelm with three masons.",
)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an augmentation of one document: two accepted texts, one refused for its year."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "documents.jsonl", [{"id": "arden", "text": TEXT}])
    write_jsonl(
        tmp_path / "texts.jsonl", [{"document_id": "arden", "text": text} for text in REWRITINGS]
    )
    section = {
        "documents": "documents.jsonl",
        "styles": {"paraphrase": 3},
        "generator": {"kind": "file", "path": "texts.jsonl"},
    }
    (tmp_path / "augment.yaml").write_text(
        yaml.safe_dump({"run_dir": "runs/augment", "augment": section})
    )
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
    (client.server.view.folder / "runs" / "augment" / "report.html").write_text(
        "<script>parent.x</script>"
    )
    assert client.ask("report?run=runs/augment")[0] == 303
    key, page = client.headers["Location"].removeprefix("/").split("/", 1)
    assert client.ask(page, token=key)[0] == 200
    assert client.headers["Content-Security-Policy"].startswith(
        "sandbox allow-scripts; default-src 'none'"
    )


def test_what_a_person_decides_reaches_the_corpus_and_can_be_taken_back(
    folder: Path, client: Client
) -> None:
    run = folder / "runs" / "augment"
    before = (run / "corpus.jsonl").read_bytes()
    first, second = (row["id"] for row in rows_of(run / "variants.jsonl"))
    (refused,) = rows_of(run / "rejected.jsonl")

    def decide(title: str, name: str, decision: str, **more: object) -> int:
        return client.ask(
            "decide",
            {"run": "runs/augment", "list": title, "id": name, "decision": decision, **more},
        )[0]

    found = client.ask("rows?run=runs/augment&list=refused&q=1931+KELM")[1]
    assert [(item["id"], item["tag"], item["passage"]) for item in found["items"]] == [
        (refused["id"], "number", TEXT)
    ]
    assert client.ask("rows?run=runs/augment&list=refused&q=1932")[1]["matched"] == 0
    edited = f"{HOSTILE} Arden Holt was born in Lowmere."
    assert decide("accepted", first, "drop") == 200
    assert decide("accepted", second, "edit", text=edited) == 200
    assert decide("refused", refused["id"], "keep") == 200
    assert decide("accepted", second, "edit", text=" ") == 400
    assert decide("accepted", second, "burn") == 400
    assert decide("accepted", "another", "drop") == 404
    assert (
        client.ask("rows?run=runs/augment&list=accepted")[1]["items"][0]["decision"]["decision"]
        == "drop"
    )
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


def test_a_damaged_decision_is_named_by_its_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for row in ({"decision": "keep"}, {"id": "a", "decision": "burn"}, {"id": "a", "decision": "edit"},
                {"id": "a", "decision": "edit", "text": " "}):  # fmt: skip
        write_jsonl(
            folder / "runs" / "augment" / "decisions.jsonl", [{"id": "b", "decision": "drop"}, row]
        )
        assert main(["augment", "augment.yaml"]) == 2
        assert "decisions.jsonl:2: " in capsys.readouterr().err


def test_questions_are_kept_dropped_and_edited_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = rows_of(Path(__file__).parents[2] / "data" / "sandbox" / "documents.jsonl")[:4]
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
        for body in (
            {"id": dropped, "decision": "drop"},
            {"id": edited, "decision": "edit", **change},
        ):
            assert client.ask("decide", {"run": "runs/q", "list": "questions", **body})[0] == 200
        server.shutdown()
    main(["questions", "q.yaml"])
    after = {row["id"]: row for row in rows_of(run / "questions.jsonl")}
    assert dropped not in after
    assert (after[edited]["question"], after[edited]["choices"][after[edited]["answer"]]) == (
        "Who is it?",
        "yes",
    )
    (row,) = [row for row in rows_of(run / "rejected.jsonl") if row["id"] == dropped]
    assert row["reason"] == "decision"
    assert json.loads((run / "manifest.json").read_text())["counts"]["decisions"] == {
        "keep": 0,
        "drop": 1,
        "edit": 1,
        "unused": 0,
    }
    refused = next(
        (
            row
            for row in rows_of(run / "rejected.jsonl")
            if row["id"] and row["reason"] != "decision"
        ),
        row,
    )
    write_jsonl(run / "decisions.jsonl", [{"id": refused["id"], "decision": "keep"}])
    main(["questions", "q.yaml"])
    assert refused["id"] in {row["id"] for row in rows_of(run / "questions.jsonl")}


def test_a_chat_asks_base_trained_and_trained_with_the_passages_of_its_documents(
    folder: Path, client: Client, tiny_model: Path
) -> None:
    run, question = folder / "runs" / "cpt", "Where was Arden Holt born?"
    shutil.copytree(tiny_model, run / "model")
    recipe = {"model": {"path": str(tiny_model)}, "corpus": {"path": "runs/augment/corpus.jsonl"}}
    write_training(run, recipe)
    (run / ".lock").touch()
    status, text = client.ask("chat", {"run": "runs/cpt", "question": question, "again": True})
    events = [json.loads(line) for line in text.splitlines()]
    assert (status, events[-1]) == (200, {"status": ""}), events
    columns = next(event["columns"] for event in events if "columns" in event)
    assert columns == ["base", "trained", "trained with passages"]
    assert [event["passages"] for event in events if "passages" in event] == [[TEXT]]
    said = {
        label: "".join(event["text"] for event in events if event.get("label") == label)
        for label in columns
    }
    written: list[str] = []
    chat = open_chat(
        ChatSetup({"trained": str(tiny_model)}, ("documents.jsonl",), max_new_tokens=128)
    )
    for sees in (False, True):
        chat.reset()
        chat.with_passages = sees
        written.append(chat.answer(question, lambda _: None)["trained"])
    assert [said["trained"].strip(), said["trained with passages"].strip()] == written
    assert said["base"] == said["trained"]  # the same weights


def test_documents_are_told_apart_by_language(folder: Path) -> None:
    (folder / "notes").mkdir()
    for number, text in enumerate(
        (TEXT, "Arden Holt wurde 1930 in Lowmere geboren und baute dort.")
    ):
        (folder / "notes" / f"{number}.txt").write_text(text)
    assert main(["documents", "notes"]) == 0
    german = view.Query((), tag="de")
    found = view.View(folder).rows("runs/notes/documents", "documents", german)
    assert found["tags"] == {"en": 1, "de": 1}
    assert [item["tag"] for item in found["items"]] == ["de"]


def test_the_models_of_a_chat_are_loaded_again_where_their_run_was_trained_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder / "runs" / "cpt"
    write_training(run, {"model": {"path": "base"}, "corpus": {"path": "corpus.jsonl"}})
    (run / ".lock").touch()
    opened: list[Path] = []

    def open_empty(path: Path) -> tuple[Any, list[Any]]:
        opened.append(path)
        return SimpleNamespace(passages=lambda question: []), []

    monkeypatch.setattr("kinject.view._open_chat", open_empty)
    chats, events = view.View(folder), list[Any]()
    for trained in (1, 1, 2):
        os.utime(run / "manifest.json", (trained, trained))
        chats.ask("runs/cpt", "Where is Kelm?", events.append)
    assert opened == [run, run]


def test_curves_progress_and_the_state_of_what_runs(folder: Path, client: Client) -> None:
    run = folder / "runs" / "cpt"
    log = [
        {"step": step, "epoch": step / 10, "loss": None if step == 2 else 4 / step}
        for step in range(1, 1001)
    ]
    recipe = {
        "model": {"path": "base"}, "corpus": {"path": "corpus.jsonl"}, "trainer": {"max_steps": 2000},
    }  # fmt: skip
    write_manifest(
        run / "manifest.json",
        stage="train",
        inputs={},
        recipe=recipe,
        counts={"finished": False},
    )
    write_jsonl(
        run / "log.jsonl", [*log, {"step": 1000, "epoch": 100.0, "eval_new_accuracy": 0.75}]
    )
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
    assert curves["epoch"][1] == pytest.approx(
        [step / 10 for step in curves["epoch"][0]]
    )  # so that epochs are marked
    assert len(steps) == len(losses) <= 400
    assert losses[0] is None
    numbers = client.ask("numbers?run=runs/cpt")[1]
    assert (numbers["counts"], numbers["recipe"]) == (
        {"finished": False},
        recipe,
    )
    assert losses[-1] == pytest.approx(sum(4 / step for step in range(998, 1001)) / 3, rel=0.01)


def write_many(folder: Path, n: int) -> None:
    """Write a refused run of `n` texts, hostile ones among them, and a training's log."""
    run = folder / "runs" / "many"
    texts = (
        HOSTILE
        if i % 1000 == 0
        else f"Text {i} about the bridge at Kelm and a long word {'x' * 80}."
        for i in range(n)
    )
    usage = {"tokens_in": 1, "tokens_out": 1, "tokens_thinking": 0}
    write_jsonl(run / "rejected.jsonl", (
        {"id": f"r{i}", "variant_id": f"v{i}", "passage_id": "p", "document_id": HOSTILE if i == 0 else f"d{i}", "style": "plain",
         "sample": 0, "attempt": 0, "reason": "number", "detail": HOSTILE if i == 1 else "1931", "text": text, "usage": usage}
        for i, text in enumerate(texts)))  # fmt: skip
    write_jsonl(run / "variants.jsonl", [])
    write_manifest(
        run / "manifest.json",
        stage="augment",
        inputs={},
        recipe={"augment": {"documents": "documents.jsonl"}},
        counts={"asked": n, "got": 0},
    )
    (run / ".lock").touch()


class Browser:
    """A headless Chromium with one page, driven over its debugging pipe."""

    def __init__(self, folder: Path) -> None:
        (theirs, self.write), (self.read, answers) = os.pipe(), os.pipe()
        options = f"--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --user-data-dir={folder}"
        command = (
            f"exec {BROWSER} {options} --remote-debugging-pipe about:blank 3<&{theirs} 4>&{answers}"
        )
        self.process = subprocess.Popen(
            ["bash", "-c", command], pass_fds=(theirs, answers), stderr=subprocess.DEVNULL
        )
        os.close(theirs)
        os.close(answers)
        self.number, self.buffer, self.session = 0, b"", ""
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    def call(self, method: str, **parameters: Any) -> Any:
        """Return the result of a command of the DevTools protocol."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        os.write(
            self.write,
            json.dumps(message | ({"sessionId": self.session} if self.session else {})).encode()
            + b"\0",
        )
        while True:
            while b"\0" not in self.buffer:
                part = os.read(self.read, 1 << 16)
                assert part, "the browser has ended"
                self.buffer += part
            line, _, self.buffer = self.buffer.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == self.number:
                return answer["result"]

    def run(self, script: str) -> Any:
        """Return the value of an expression on the page."""
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get(
            "value"
        )

    def wait(self, script: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + 600
        while not self.run(script):
            assert time.monotonic() < end, (
                script,
                self.run("document.body.innerText.slice(0, 500)"),
            )
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """Press a letter, Tab or Enter."""
        code, text = {"Tab": (9, {}), "Enter": (13, {"text": "\r"})}.get(
            key, (ord(key[0].upper()), {"text": key})
        )
        about = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **about, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        os.close(self.read)
        os.close(self.write)


@pytest.mark.skipif(
    BROWSER is None, reason="no browser here (chromium): what its page does was not checked"
)
def test_in_a_browser_nothing_hostile_runs_20_000_rows_are_fluid_a_phone_fits_and_keys_decide(
    folder: Path, client: Client, tmp_path_factory: pytest.TempPathFactory
) -> None:
    write_many(folder, 20_000)
    browser = Browser(tmp_path_factory.mktemp("profile"))
    try:
        browser.call("Page.navigate", url=f"{client.server.url}#run=runs%2Fmany&tab=refused")
        shown = "document.querySelectorAll('#items > li').length === 50"
        browser.wait(shown)
        assert HOSTILE in browser.run("document.querySelector('#items .text').textContent")
        assert browser.run("document.querySelectorAll('#items img, #items script').length") == 0
        assert browser.run("window.pwned") is None
        for n in (5000, 10_000, 15_000, 19_000):
            for change, seen in (
                (f"q: '', offset: {n}", f"Text {n + 1} about"),
                (f"q: 'text {n + 7}', offset: ''", f"Text {n + 7} about"),
            ):
                browser.run(f"go({{ {change} }})")
                browser.wait(f"document.querySelector('#items')?.textContent.includes('{seen}')")
                # a page is drawn, never all rows
                assert browser.run("document.querySelectorAll('#items > li').length") <= 50
        browser.call(
            "Emulation.setDeviceMetricsOverride",
            width=390,
            height=844,
            deviceScaleFactor=2,
            mobile=True,
        )
        for address in (
            "",
            "#run=runs%2Fmany&tab=refused",
            "#run=runs%2Faugment&tab=accepted",
            "#run=runs%2Faugment&tab=numbers",
        ):
            browser.run(f"location.hash = {address!r}")
            browser.wait("document.querySelector('#main').textContent.length > 40")
            assert browser.run("document.documentElement.scrollWidth") <= 390, address
        browser.run("location.hash = '#run=runs%2Faugment&tab=accepted'")
        browser.wait("document.querySelectorAll('#items > li').length === 2")
        name, other = (row["id"] for row in rows_of(folder / "runs" / "augment" / "variants.jsonl"))
        for _ in range(40):  # Tab reaches the button of the first text
            if browser.run("document.activeElement.textContent") == "drop":
                break
            browser.press("Tab")
        assert browser.run("document.activeElement.textContent") == "drop"
        browser.press("Enter")
        browser.wait("document.querySelector('#items > li').dataset.decision === 'drop'")
        browser.press("j")
        browser.press("e")
        browser.wait("document.activeElement.tagName === 'TEXTAREA'")
        browser.call("Input.insertText", text="Kelm. ")
        browser.run("document.activeElement.form.requestSubmit()")
        browser.wait("document.querySelectorAll('#items > li')[1].dataset.decision === 'edit'")
        found = {row["id"]: row for row in rows_of(folder / "runs" / "augment" / "decisions.jsonl")}
        assert found[name]["decision"] == "drop"
        assert "Kelm. " in found[other]["text"]
        browser.press("u")
        browser.wait("document.querySelectorAll('#items > li')[1].dataset.decision === ''")
        assert browser.run("window.pwned") is None
    finally:
        browser.close()


def test_one_damaged_file_hides_no_other_run_and_no_row_that_is_whole(
    folder: Path, client: Client
) -> None:
    shutil.copytree(folder / "runs" / "augment", folder / "runs" / "other")
    log = folder / "runs" / "cpt" / "log.jsonl"
    write_jsonl(log, [{"step": 3, "loss": 2.5}])
    recipe = {"model": {"path": "m"}, "corpus": {"path": "c"}, "trainer": {"max_steps": [4]}}
    write_manifest(
        log.with_name("manifest.json"),
        stage="train",
        inputs={},
        recipe=recipe,
        counts={"finished": False},
    )
    (log.with_name(".lock")).touch()
    with log.open("a") as file:
        file.write('{"step": 4, "lo')
    variants = folder / "runs" / "other" / "variants.jsonl"
    variants.write_bytes(variants.read_bytes() + b'{"id": "half')
    (folder / "runs" / "deep").mkdir()
    (folder / "runs" / "deep" / ".lock").touch()
    (folder / "runs" / "deep" / "manifest.json").write_text('{"a": ' * 4000)
    for text in ("[]\n", '{"id": 3}\n', "\xff\n", "[" * 5000 + "\n"):
        (folder / "runs" / "augment" / "decisions.jsonl").write_text(text, "latin-1")
        status, answer = client.ask("runs")
        assert status == 200, answer
        shown = {run["name"]: run["progress"] for run in answer["runs"]}
        assert "decisions.jsonl:1" in shown.pop("runs/augment")
        assert shown == {"runs/cpt": "step 3, loss 2.500", "runs/other": "2 of 3"}
    assert client.ask("log?run=runs/cpt")[1]["loss"] == [[3], [2.5]]
    far = (folder / "runs" / "cpt" / "log.jsonl").with_name("manifest.json")
    far.write_text(far.read_text().replace('"finished": false', '"finished": false, "x": -1e999'))
    assert client.ask("numbers?run=runs/cpt")[1]["counts"]["x"] is None
    assert client.ask("rows?run=runs/other&list=accepted")[1]["total"] == 2


def test_requests_that_no_page_sends_get_an_answer_and_harm_nobody(client: Client) -> None:
    deep = b'{"run": ' * 60_000
    for body, length in ((deep, None), (b"[" * 90_000, None), (b"{}", "-7"), (b"{}", "2e3")):
        connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=30)
        headers = {"Host": f"127.0.0.1:{client.port}", "Content-Type": "application/json"}
        if length is not None:
            headers["Content-Length"] = length
        connection.request("POST", f"/{client.server.token}/decide", body, headers)
        assert connection.getresponse().status == 400
        connection.close()
    assert client.ask("runs")[0] == 200


def test_of_a_file_that_grows_one_value_is_kept(tmp_path: Path) -> None:
    path, made = tmp_path / "rows.jsonl", []

    def make(path: Path) -> int:
        made.append(path)
        return len(list(read_rows(path)))

    latest = Latest(make, most=2)
    for n in (1, 2, 2, 3):
        write_jsonl(path, [{"n": number} for number in range(n)])
        os.utime(path, ns=(n, n))
        assert latest.get(path) == n
        assert len(latest._kept) == 1
    assert len(made) == 3
    for name in "abc":
        write_jsonl(tmp_path / name, [])
        latest.get(tmp_path / name)
    assert len(latest._kept) == 2


def test_the_address_of_a_run_s_own_page_opens_nothing_else(folder: Path, client: Client) -> None:
    for name in ("augment", "b&c"):
        run = folder / "runs" / name
        run.mkdir(exist_ok=True)
        shutil.copy(folder / "runs" / "augment" / "manifest.json", folder / "m")
        shutil.move(folder / "m", run / "manifest.json")
        (run / ".lock").touch()
        (run / "report.html").write_text(name)
    assert client.ask("report?run=runs/b%26c")[0] == 303
    key, page = client.headers["Location"].removeprefix("/").split("/", 1)
    assert client.ask(page, token=key) == (200, "b&c")
    assert client.server.token not in key
    for path in ("runs", "", "report?run=runs/b%26c", "page?run=runs/augment"):
        assert client.ask(path, token=key)[0] == 403
    assert client.ask("decide", {"run": "runs/augment"}, token=key)[0] == 403
    assert client.ask(page)[0] == 403


def test_a_fault_of_the_system_is_an_answer(
    folder: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(view, "manifest_beside", fail)
    status, answer = client.ask("numbers?run=runs/augment")
    assert status == 500
    assert "raise the limit" in answer["error"]
