"""The board of kinject view: steps start, stop and continue as on the command line; recipes change by their own check alone."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from faulty_server import FaultySandbox
from kinject.cli import main
from kinject.cli.eval import find_faults
from kinject.disk import lock_dir, write_jsonl
from kinject.errors import InputError
from kinject.view import Server
from kinject.view.board import Board, RefusedError
from view_client import Client

AUGMENT = """\
# Purpose: ferries
run_dir: runs/ferry/augment
augment:
  documents: ferries.jsonl # all of them
  styles: {paraphrase: 2} # two suffice
  passage_tokens: 200
  generator:
    kind: openai
    base_url: URL
    model: sandbox
"""
RECIPE = "recipes/ferry/augment.yaml"
FERRIES = [
    {"id": "kelm", "text": "The ferry to Kelm leaves at 7 in the morning. Tolo Brand steers it."},
    {"id": "arvik", "text": "The ferry to Arvik takes nine cars. Mina Osk sells the tickets."},
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one recipe, of an augmentation."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "ferries.jsonl", FERRIES)
    (tmp_path / RECIPE).parent.mkdir(parents=True)
    (tmp_path / RECIPE).write_text(AUGMENT.replace("URL", "http://127.0.0.1:9/v1"))
    (tmp_path / "leaflets").mkdir()
    return tmp_path


@pytest.fixture
def board(folder: Path) -> Iterator[Board]:
    made = Board(Path(), find_faults)
    yield made
    made.close()


def wait_for(true: Callable[[], Any]) -> None:
    """Wait, however slow the machine is: a hang ends by the suite's own limit."""
    while not true():
        time.sleep(0.02)


def end_of(board: Board) -> dict[str, Any]:
    """Return the step once it has ended."""
    wait_for(lambda: not board.state()["step"]["running"])
    return board.state()["step"]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let a shell script take the place of kinject's processes."""

    def use(script: str) -> None:
        path = tmp_path / "stand-in"
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return use


def test_a_step_starts_stops_as_by_ctrl_c_and_continues(
    folder: Path,
    board: Board,
    serving: Callable[..., FaultySandbox],
    canary_key: str,
) -> None:
    endpoint = serving(faults={"hang": 1.0})
    (folder / RECIPE).write_text(AUGMENT.replace("URL", endpoint.url))
    board.start(RECIPE)
    (row,) = board.state()["steps"]
    assert row["command"] == board.state()["step"]["command"] == f"kinject augment {RECIPE}"
    wait_for(lambda: endpoint.n_requests or not board.state()["step"]["running"])
    assert board.state()["steps"][0]["state"] == "running"
    with pytest.raises(RefusedError, match="Stop it, or wait"):
        board.start(RECIPE)
    board.stop()
    assert board.state()["step"]["state"] == "stopping"
    # It waits for the answers under way, which hang; a second signal, a second later, does not.
    while board.state()["step"]["running"]:
        time.sleep(1.1)
        with contextlib.suppress(RefusedError):
            board.stop()
    step = end_of(board)
    assert step["state"].startswith("stopped")
    assert f"Resume with: kinject augment {RECIPE}" in step["output"]
    assert canary_key not in step["output"]
    endpoint.faults = {}
    board.start(RECIPE)
    step = end_of(board)
    assert step["state"].split(":")[0] in (
        "done",
        "finished, but incomplete or not as it should",
    ), step["output"]
    assert (folder / "runs" / "ferry" / "augment" / "corpus.jsonl").is_file()
    with pytest.raises(RefusedError, match="no step runs"):
        board.stop()


def test_output_is_text_without_control_characters_and_keys(
    board: Board, stand_in: Callable[[str], None], canary_key: str
) -> None:
    stand_in(
        r"""printf 'first\rsecond \033[2J %s <b>\n' "$OPENAI_API_KEY"; echo "$@" >&2; exit 1"""
    )
    board.start(RECIPE)
    step = end_of(board)
    assert step["state"].startswith("finished, but incomplete")
    first, words, _ = step["output"].split("\n")
    assert first == "second \ufffd[2J (key) <b>"
    assert words == f"-P -m kinject.cli augment {RECIPE}"


@pytest.mark.parametrize(
    ("code", "state"),
    [(2, "ended by a fault: "), (3, "finished: too few questions"), (9, "ended with exit code 9")],
)
def test_a_step_that_ran_for_hours_is_not_called_not_started(
    board: Board, stand_in: Callable[[str], None], code: int, state: str
) -> None:
    stand_in(f"echo 'step 900: the loss is not finite'; exit {code}")
    board.start(RECIPE)
    assert end_of(board)["state"].startswith(state)


def test_the_step_ends_with_the_server(folder: Path, stand_in: Callable[[str], None]) -> None:
    stand_in(
        "trap 'echo saved > saved; exit 130' INT\necho ready > ready\nwhile sleep 0.02; do :; done"
    )
    board = Board(Path(), find_faults)
    with Server(Path(), board=board):
        board.start(RECIPE)
        wait_for((folder / "ready").exists)
    assert (folder / "saved").exists()
    assert board.state()["step"] == {}


def test_where_ctrl_c_is_ignored_a_step_stops_by_sigterm(
    folder: Path, board: Board, stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in("trap 'exit 143' TERM\necho ready > ready\nwhile sleep 0.02; do :; done")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        board.start(RECIPE)
        wait_for((folder / "ready").exists)
        board.stop()
        assert end_of(board)["state"].startswith("stopped")
    finally:
        signal.signal(signal.SIGINT, before)


def values(board: Board, **changes: str) -> list[tuple[Any, str]]:
    """Return the values of the form, some of them changed by the last part of their key."""
    fields = board.form(RECIPE)["fields"]
    assert changes.keys() <= {item["key"][-1] for item in fields}
    return [(tuple(item["key"]), changes.get(item["key"][-1], item["value"])) for item in fields]


def test_a_form_changes_its_values_and_nothing_else(folder: Path, board: Board) -> None:
    before = (folder / RECIPE).read_text()
    text_id = board.form(RECIPE)["id"]
    board.save(RECIPE, text_id, values(board, model="no", passage_tokens="120", faq="3"))
    after = (folder / RECIPE).read_text()
    expected = before.replace("model: sandbox", 'model: "no"')
    expected = expected.replace("passage_tokens: 200", "passage_tokens: 120")
    expected = expected.replace("{paraphrase: 2}", "{faq: 3, paraphrase: 2}")
    assert after == expected or after == expected.replace('"no"', "no")
    # What was read before the last change is not written over it.
    with pytest.raises(RefusedError, match="has changed"):
        board.save(RECIPE, text_id, values(board))


def test_a_field_that_was_emptied_can_be_filled_again(folder: Path, board: Board) -> None:
    path = folder / RECIPE
    text = path.read_text().replace("  passage_tokens: 200\n", "  budget: 3.5\n")
    path.write_text(text + "    price: [0.2, 0.7]\n")
    for typed in ("", "7.5"):
        board.save(RECIPE, str(board.form(RECIPE)["id"]), [(("augment", "budget"), typed)])
    assert "  budget: 7.5\n" in path.read_text()
    keys = [field["key"] for field in board.form(RECIPE)["fields"]]
    assert ["augment", "passage_tokens"] not in keys


def test_a_recipe_with_faults_stays_as_it_is_and_each_fault_has_its_line(
    folder: Path, board: Board
) -> None:
    before = (folder / RECIPE).read_text()
    changed = values(board, passage_tokens="many", paraphrase="several")
    with pytest.raises(InputError) as raised:
        board.save(RECIPE, board.form(RECIPE)["id"], changed)
    lines = str(raised.value).splitlines()
    assert [line.split(": ")[0] for line in sorted(lines)] == [f"{RECIPE}:5", f"{RECIPE}:6"]
    assert (folder / RECIPE).read_text() == before
    for key, value in (
        (("run_dir",), "elsewhere"), (("augment", "generator", "base_url"), "http://b.example"),
        (("augment", "passage_tokens"), "1\nseed: 2"), (("augment", "passage_tokens"), "9" * 600),
    ):  # fmt: skip
        with pytest.raises(RefusedError):
            board.save(RECIPE, board.form(RECIPE)["id"], [(key, value)])
    assert (folder / RECIPE).read_text() == before


def test_a_training_is_checked_in_a_process_that_ends(
    folder: Path, board: Board, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The check of a training imports torch, which the server would hold to its end."""
    recipe = "recipes/ferry/train.yaml"
    text = "run_dir: runs/ferry/train\nmodel: {path: m}\ncorpus:\n  path: c.jsonl\n"
    (folder / recipe).write_text(text + "trainer:\n  learning_rate: 1e-4\n  max_steps: 7\n")
    commands = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        code = main(command[4:])
        return subprocess.CompletedProcess(command, code, "", capsys.readouterr().err)

    monkeypatch.setattr("kinject.cli.eval.subprocess.run", run)
    form = board.form(recipe)
    typed = [(tuple(item["key"]), item["value"]) for item in form["fields"]]
    assert (("trainer", "max_steps"), "7") in typed
    faulty = [(key, "soon") if key[-1] == "max_steps" else (key, value) for key, value in typed]
    with pytest.raises(InputError, match=rf"\A{recipe}:7: trainer.max_steps: .*'soon'"):
        board.save(recipe, form["id"], faulty)
    assert "soon" not in (folder / recipe).read_text()
    assert [command[1:6] for command in commands] == [
        ["-P", "-m", "kinject.cli", "recipes", "check"]
    ]


def test_nothing_outside_of_the_folder_is_a_step(
    folder: Path, board: Board, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "linked.yaml").write_text(AUGMENT.replace("runs/ferry", "runs/linked"))
    (folder / "recipes" / "linked.yaml").symlink_to(other / "linked.yaml")
    (folder / "recipes" / "far.yaml").write_text(AUGMENT.replace("runs/ferry", str(other)))
    (folder / "recipes" / "up.yaml").write_text(AUGMENT.replace("runs/ferry", "runs/../../up"))
    (folder / "linked").symlink_to(other)
    state = board.state()
    assert [row["recipe"] for row in state["steps"]] == [RECIPE]
    assert state["folders"] == ["leaflets", "."]
    for recipe in ("recipes/linked.yaml", "recipes/far.yaml", "recipes/up.yaml", "../x.yaml"):
        with pytest.raises(RefusedError, match="no such recipe"):
            board.start(recipe)
    for documents in ("linked", "..", "/", str(other), "recipes", "", "--gpu"):
        with pytest.raises(RefusedError, match="choose a folder"):
            board.try_documents({"documents": documents})


def test_what_is_typed_beside_documents_is_no_option_of_its_own(
    board: Board, stand_in: Callable[[str], None]
) -> None:
    stand_in('printf "%s\n" "$@"')
    board.try_documents({"documents": "leaflets", "model": "--help me", "memory": "24"})
    words = ["kinject", "try", "leaflets", "--model=--help me", "--memory=24"]
    assert shlex.split(end_of(board)["command"]) == words
    with pytest.raises(RefusedError, match="memory"):
        board.try_documents({"documents": "leaflets", "memory": 24})


def test_a_run_of_another_process_and_a_foreign_command_are_left_alone(
    folder: Path, board: Board
) -> None:
    run = folder / "runs" / "ferry" / "augment"
    with lock_dir(run), pytest.raises(RefusedError, match="in use by another process"):
        board.start(RECIPE)
    for words, kept in (
        (["augment", RECIPE, "augment.styles.paraphrase=3"], True),
        (["augment", RECIPE, "--dry-run"], False),
        (["augment", "/etc/other.yaml"], False),
    ):
        manifest = {
            "stage": "augment",
            "command": ["kinject", *words],
            "counts": {"finished": False},
        }
        (run / "manifest.json").write_text(json.dumps(manifest))
        expected = words if kept else ["augment", RECIPE]
        assert board.state()["steps"][0]["command"] == shlex.join(["kinject", *expected])


def test_the_server_starts_nothing_for_another_page(folder: Path, board: Board) -> None:
    with Server(Path(), board=board) as server, Server(Path()) as without:
        for each in (server, without):
            Thread(target=each.serve_forever, args=(0.01,), daemon=True).start()
        client, body = Client(server), {"recipe": RECIPE}
        here = server.url.rpartition("/")[0].rpartition("/")[0]
        for options, status in (
            ({"token": "guessed"}, 403), ({"host": "evil.example"}, 403), ({"kind": "text/plain"}, 400),
            ({"origin": "null"}, 403), ({"origin": "http://evil.example"}, 403),
            ({"origin": f"https://127.0.0.1:{client.port}"}, 403),
        ):  # fmt: skip
            for route in ("start", "stop", "try", "save"):
                assert client.ask(route, body, **options)[0] == status, (route, options)
        assert client.ask("start", {"recipe": "x"}, origin=here)[0] == 404
        assert client.ask("stop", {}, origin=here)[0] == 409
        assert client.ask("save", {"recipe": RECIPE, "id": "x", "values": 3})[0] == 400
        assert client.ask(f"form?recipe={RECIPE}")[0] == 200
        assert client.ask("board")[1]["step"] == {}
        assert Client(without).ask("board")[0] == Client(without).ask("start", body)[0] == 404
        server.shutdown()
        without.shutdown()
