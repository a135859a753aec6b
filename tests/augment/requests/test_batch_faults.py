"""Every fault of the batch API, once and for good."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kinject.augment import augment
from kinject.cli import main
from kinject.disk import read_jsonl
from kinject.errors import EndpointError
from kinject.recipe import Recipe

Reply = tuple[int, Any, dict[str, str]]
Change = Callable[[Reply, "Seen"], Reply | None]
"""(the good reply, what was asked) -> what is sent instead, None for a reset."""
ERROR: Reply = (500, {"error": {"message": "as ordered"}}, {})
PAGE: Reply = (200, b"<html>Log in", {"content-type": "text/html"})


@dataclass(frozen=True)
class Seen:
    """One call of the batch API: upload, list, make, look or read (a file)."""

    call: str
    path: str
    state: Any


@dataclass(frozen=True)
class Fault:
    """`call` is the one that `change` spoils; `unmade`: the endpoint does not do what was asked.

    `once` is again (the run ends complete), another (a second batch takes the rest) or stop; `message` is in the message of
    what stops, at once or when it stays.
    """

    call: str
    change: Change
    once: str
    message: str
    unmade: bool = False


def says(reply: Reply | None) -> Change:
    return lambda good, seen: reply


def batch(**fields: Any) -> Change:
    def change(good: Reply, seen: Seen) -> Reply:
        return good[0], {**good[1], **fields}, good[2]

    return change


def results(make: Callable[[list[bytes]], list[bytes]]) -> Change:
    """Change the lines of the file of good answers."""

    def change(good: Reply, seen: Seen) -> Reply:
        lines = [line for line in good[1].splitlines() if b'"status_code": 200' in line]
        return (200, b"".join(line + b"\n" for line in make(lines)), {}) if lines else good

    return change


def ends(status: str) -> Change:
    """End the batch half way: the last two requests are not answered."""

    def change(good: Reply, seen: Seen) -> Reply:
        batch = good[1]
        name = batch.get("output_file_id")
        if name and batch["status"] == "completed":
            files = seen.state.batches.files
            files[f"{name}-half"] = b"".join(line + b"\n" for line in files[name].splitlines()[:-2])
            return 200, {**batch, "status": status, "output_file_id": f"{name}-half"}, {}
        return good

    return change


def _without_status(good: Reply, seen: Seen) -> Reply:
    return good[0], {key: value for key, value in good[1].items() if key != "status"}, good[2]


def _also_as_an_error(good: Reply, seen: Seen) -> Reply:
    """Put an error for every request into the file of errors, which is read last."""
    if good[1]:
        return good
    keys = [json.loads(line)["custom_id"] for line in seen.state.batches.files["file-0"].splitlines()]
    rows = [{"custom_id": key, "response": {"status_code": 500, "body": {}}} for key in keys]
    return 200, "".join(json.dumps(row) + "\n" for row in rows).encode(), {}


def _strangers(lines: list[bytes]) -> list[bytes]:
    return [*lines, *(line.replace(json.loads(line)["custom_id"].encode(), b"somebody else's") for line in lines)]


def _twice(lines: list[bytes]) -> list[bytes]:
    return [*lines, *(line.replace(b'"content": "', b'"content": "Later: ') for line in lines)]


GONE = (404, {"error": {"message": "No such batch"}}, {})
FAULTS: dict[str, Fault] = {
    "upload fails": Fault("upload", says(ERROR), "again", "answered 500", unmade=True),
    "upload answered with a page": Fault("upload", says(PAGE), "again", "cannot be read", unmade=True),
    "upload refused": Fault(
        "upload", says((400, {"error": {"message": "no"}}, {})), "stop", "answered 400", unmade=True
    ),
    "no batch API": Fault("upload", says((404, {}, {})), "stop", "answered 404.*batch=false", unmade=True),
    "making fails": Fault("make", says(ERROR), "again", "answered 500", unmade=True),
    "making refused": Fault(
        "make",
        says((400, {"error": {"message": "no such window"}}, {})),
        "stop",
        "no such window.*Without batches: augment.generator.batch=false",
        unmade=True,
    ),
    "answer to making lost": Fault("make", says(None), "again", "no connection"),
    "answer to making with a part of a key": Fault(
        "make",
        lambda good, seen: (good[0], {**good[1], "id": os.environ["OPENAI_API_KEY"][:16]}, good[2]),
        "again",
        "cannot be read",
    ),
    "answer to making unreadable": Fault("make", says(PAGE), "again", "cannot be read"),
    "look fails": Fault("look", says(ERROR), "again", "answered 500.*submitted batches continue"),
    "look resets": Fault("look", says(None), "again", "no connection"),
    "look answered with a page": Fault("look", says(PAGE), "again", "cannot be read"),
    "look that never ends": Fault("look", batch(status="finalizing"), "again", "has not ended in"),
    "look without a status": Fault("look", _without_status, "again", "cannot be read"),
    "key revoked meanwhile": Fault("look", says((401, {}, {})), "stop", "the key is refused"),
    "batch failed": Fault(
        "look",
        batch(status="failed", errors={"data": [{"message": "bad\n\x1b[31mfile"}, 5]}, output_file_id=None),
        "stop",
        r"was refused \(bad \[31mfile\)",
    ),
    "batch failed without a reason": Fault(
        "look", batch(status="failed", errors="?", output_file_id=None), "stop", "without a reason"
    ),
    "batch expired": Fault("look", ends("expired"), "another", "ended expired without an answer"),
    "batch cancelled": Fault("look", ends("cancelled"), "stop", "was cancelled"),
    "batch unknown": Fault("look", says(GONE), "stop", "not known there any more"),
    "results fail": Fault("read", says(ERROR), "again", "answered 500"),
    "results answered with a page": Fault("read", says(PAGE), "again", "cannot be read"),
    "results empty": Fault("read", says((200, b"", {})), "another", "ended completed without an answer"),
    "line missing": Fault("read", results(lambda lines: lines[:-1]), "another", "without an answer"),
    "line broken": Fault(
        "read", results(lambda lines: [*lines[:-1], lines[-1][:40], b"[]", b"5"]), "another", "3 lines of its results"
    ),
    "line twice": Fault("read", results(_twice), "again", ""),
    "line of a stranger": Fault("read", results(_strangers), "again", ""),
    "answer also among the errors": Fault("read", _also_as_an_error, "again", ""),
}
"""Fault -> what the endpoint does. The same rows stand in the documentation."""


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_POLL", "LONGEST_POLL"):
        monkeypatch.setattr(f"kinject.llm.batch.{name}", 0.005)
    monkeypatch.setattr("kinject.llm.batch.SECONDS_TO_FILL", 0.05)
    monkeypatch.setattr("kinject.llm.limits._BATCH_IN_FLIGHT", 100)


@pytest.fixture
def spoiled(serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """An endpoint whose batch API meets a fault: spoiled(fault, stays=False) -> it, and the calls that it saw."""

    def start(fault: Fault, *, stays: bool) -> tuple[Any, Counter[str]]:
        server = serving()
        calls: Counter[str] = Counter()
        good = server.state._answer

        async def answer(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Reply | None:
            parts = path.partition("?")[0].removeprefix("/v1/").split("/")
            call = {("POST", "files"): "upload", ("POST", "batches"): "make", ("GET", "files"): "read"}.get(
                (method, parts[0]), "look" if len(parts) == 2 else "list"
            )
            calls[call] += 1
            spoils = call == fault.call and (stays or calls[call] == 1)
            if spoils and fault.unmade:
                return fault.change((200, {}, {}), Seen(call, path, server.state))
            reply: Reply | None = await good(method, path, headers, body)
            if call == "look" and reply and reply[1].get("status") == "in_progress":
                calls[call] -= 1
                return reply
            return fault.change(reply, Seen(call, path, server.state)) if spoils and reply else reply

        monkeypatch.setattr(server.state, "_answer", answer)
        return server, calls

    return start


def _n_asked(server: Any) -> Counter[str]:
    """Return how often each request was handed in, by key."""
    made = [batch["input_file_id"] for batch in server.state.batches.batches.values()]
    return Counter(
        json.loads(line)["custom_id"] for name in made for line in server.state.batches.files[name].splitlines()
    )


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_batch_met_once_pays_for_nothing_twice(
    name: str, few: Callable[..., Recipe], spoiled: Callable[..., Any]
) -> None:
    fault = FAULTS[name]
    server, _ = spoiled(fault, stays=False)
    recipe = few(server.url, generator__batch=True, styles={"paraphrase": 3})
    if fault.once == "stop":
        with pytest.raises(EndpointError, match=fault.message) as caught:
            augment(recipe)
        assert caught.value.fatal
    result = augment(recipe)
    assert (result.got, result.failed, result.refused) == (12, {}, {})
    texts = [row["text"] for _, row in read_jsonl(result.corpus_path)]
    assert not [text for text in texts if "Later" in text]
    n_asked = _n_asked(server)
    assert len(n_asked) == 12
    lost = 12 if name in ("batch unknown", "results empty", "batch failed", "batch failed without a reason") else 2
    again = sum(n_asked.values()) - 12
    if fault.once == "again" or name == "key revoked meanwhile":
        assert again == 0
    else:
        assert again <= lost


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.message])
def test_a_fault_of_a_batch_that_stays_ends_in_one_clear_line(
    name: str, few: Callable[..., Recipe], spoiled: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("kinject.llm.batch.MAX_SILENCE", 0.0)
    monkeypatch.setattr("kinject.llm.sender.N_TRIES", 2)
    monkeypatch.setattr("kinject.llm.sender.N_FAILURES_IN_A_ROW", 1)
    if name == "look that never ends":
        monkeypatch.setattr("kinject.llm.batch.LONGEST_BATCH", 0.1)
    server, _ = spoiled(FAULTS[name], stays=True)
    recipe = few(server.url, generator__batch=True)
    settings = ["augment.generator.batch=true", "augment.styles={paraphrase: 1}"]
    assert main(["augment", str(recipe.path), *settings]) == 2
    err = capsys.readouterr().err
    (line,) = err.strip().splitlines()
    assert re.search(FAULTS[name].message, line), line


def test_a_batch_that_is_out_of_sight_for_a_while_is_not_handed_in_again(
    few: Callable[..., Recipe], serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serving()
    good = server.state._answer
    looks = 0

    async def answer(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Reply | None:
        nonlocal looks
        looks += method == "GET" and "/batches/" in path
        await asyncio.sleep(0)
        return None if looks < 30 and method == "GET" else await good(method, path, headers, body)

    monkeypatch.setattr(server.state, "_answer", answer)
    assert augment(few(server.url, generator__batch=True)).got == 4
    assert len(server.state.batches.batches) == 1


def test_a_damaged_log_of_batches_is_told(few: Callable[..., Recipe], serving: Callable[..., Any]) -> None:
    from kinject.errors import DiskError

    recipe = few(serving().url, generator__batch=True)
    Path(recipe.run_dir).mkdir(parents=True, exist_ok=True)
    (recipe.run_dir / "batches.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(DiskError, match="cannot be opened as the log of batches"):
        augment(recipe)
