"""Every fault of an endpoint, one request at a time: what is done about it once, and when it stays.

The server is no client of ours: it writes bytes.
"""

from __future__ import annotations

import gzip
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from faulty_server import Hostile, Talk
from kinject.augment import augment
from kinject.cli import main
from kinject.disk import read_jsonl, read_manifest_fields
from kinject.errors import EndpointError
from kinject.recipe import Recipe
from small import quick

N = 4
"""Documents, with a paraphrase each."""


Act = Callable[[Talk], bool]


@dataclass(frozen=True)
class Fault:
    """What the server does; `met` says how it is sorted: stop, failed, kept, refused as X, or a kind of `Transient`.

    `message` is in the message when it stays, `lost` whether it counts as an answer that may have been charged.
    """

    act: Act
    met: str
    message: str
    exit: int = 2
    lost: bool = False
    settings: dict[str, float] = field(default_factory=dict)


def status(
    code: int, content: bytes = b'{"error": {"message": "as ordered"}}', **headers: str
) -> Act:
    return lambda talk: talk.say(code, content, **headers)


def changed(change: Callable[[dict[str, Any]], None]) -> Act:
    return lambda talk: talk.say(200, talk.completion(change))


def message(**fields: Any) -> Act:
    return changed(lambda value: value["choices"][0].update(fields))


def whole(content: bytes, **headers: str) -> Act:
    return lambda talk: talk.say(200, content, **headers)


def cut(talk: Talk) -> bool:
    """Announce more than is sent."""
    content = talk.completion()
    talk.raw(f"HTTP/1.1 200 OK\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content[:40])
    talk.close_connection = True
    return True


def cut_by_reset(talk: Talk) -> bool:
    cut(talk)
    time.sleep(0.05)  # else the reset overtakes what was sent
    return talk.reset()


def never(talk: Talk) -> bool:
    talk.server.ended.wait(60)
    talk.close_connection = True
    return True


def flood(talk: Talk) -> bool:
    talk.raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    return talk.until_left(b"10000\r\n" + b" " * 0x10000 + b"\r\n", 0)


def bomb(talk: Talk) -> bool:
    return talk.say(200, gzip.compress(b" " * 3_000_000), content_encoding="gzip")


def no_http(talk: Talk) -> bool:
    talk.raw(b"220 mail.example ESMTP\r\n\r\n")
    talk.close_connection = True
    return True


def refused_prompt(talk: Talk) -> bool:
    return talk.say(
        400, b'{"error": {"code": "content_filter", "message": "The prompt was filtered."}}'
    )


SHORT = {"timeout": 0.5, "tries": 60}
"""A time that is soon over, and so many tries that a good answer that is late on a slow machine changes nothing."""

FAULTS: dict[str, Fault] = {
    "400": Fault(status(400), "failed", r"answered 400 \(as ordered\)"),
    "422 of FastAPI": Fault(status(422, b'{"detail": "no such model"}'), "failed", r"answered 422 \(no such model\)"),
    "400 content filter": Fault(refused_prompt, "refused as filtered", "filtered", exit=1),
    "403 of a moderation": Fault(
        status(403, b'{"error": {"code": 403, "message": "as ordered", "metadata": {"flagged_input": "War"}}}'),
        "refused as filtered", "filtered", exit=1,
    ),
    "200 content filter": Fault(
        whole(b'{"error": {"code": "content_policy_violation", "message": "as ordered"}}'),
        "refused as filtered", "filtered", exit=1,
    ),
    "401": Fault(status(401), "stop", r"the key is refused \(401: as ordered\).*OPENAI_API_KEY"),
    "400 of a key": Fault(
        status(400, b'[{"error": {"code": 400, "message": "API key expired. Please renew the API key."}}]'),
        "stop", r"the key is refused \(400: API key expired.*OPENAI_API_KEY",
    ),
    "403 of a country": Fault(
        status(403, b'{"error": {"code": "request_forbidden", "message": "not in this territory"}}'),
        "stop", r"the request is refused \(403: not in this territory\).*country.*OPENAI_API_KEY",
    ),
    "402": Fault(status(402), "stop", "out of credit"),
    "404": Fault(status(404), "stop", r"lists the model 'sandbox'. It may not serve it by the route /chat/completions"),
    "429": Fault(status(429), "overload", "answered 429.*Nothing else came"),
    "429 of a large request": Fault(
        status(429, b'{"error": {"code": "rate_limit_exceeded", "message": "Request too large for m: 9 of 5 tokens."}}'),
        "failed", r"answered 429 \(Request too large for m",
    ),
    "429 quota": Fault(status(429, b'{"error": {"code": "insufficient_quota"}}'), "stop", "out of credit"),
    "403 without credit": Fault(
        status(403, b'{"error": {"message": "Insufficient account balance", "type": "denied"}}'),
        "stop", r"out of credit \(403: Insufficient account balance\)",
    ),
    "429 with all credits used": Fault(
        status(429, b'{"code": "busy", "error": "Your team has used all available credits or its limit."}'),
        "stop", r"out of credit \(429: Your team has used",
    ),
    "403 without any credits": Fault(
        status(403, b'{"code": "denied", "error": "This team does not have any credits yet."}'),
        "stop", r"out of credit \(403: This team",
    ),
    "200 quota": Fault(
        whole(b'{"error": {"message": "as ordered", "type": "insufficient_quota", "code": null}}'),
        "stop", r"out of credit \(200: as ordered\)",
    ),
    "200 quota without an error object": Fault(
        whole(b'{"code": "insufficient_user_quota", "message": "as ordered", "data": null}'), "stop", "out of credit",
    ),
    "200 quota of a choice": Fault(
        whole(b'{"choices": [{"message": {"content": ""}, "error": {"code": 402, "message": "as ordered"}}]}'), "stop",
        r"out of credit \(402: as ordered\)",
    ),
    "200 quota beside no choices": Fault(
        whole(b'{"choices": [], "message": "Sorry: insufficient credits."}'), "stop", "out of credit",
    ),
    "200 key": Fault(whole(b'{"error": {"message": "as ordered", "code": "401"}}'), "stop", r"the key is refused \(401"),
    "200 overload": Fault(
        whole(b'[{"error": {"message": "as ordered", "code": 429}}]'), "overload", r"answered 429 \(as ordered\)",
    ),
    "500": Fault(status(500), "server error", "answered 500"),
    "502": Fault(status(502), "connection", "answered 502"),
    "503": Fault(status(503), "overload", "answered 503"),
    "redirect": Fault(
        status(301, location="https://elsewhere.example/v1"), "stop", "301: it redirects requests to https://elsewhere"
    ),
    "error inside a 200": Fault(
        whole(b'{"choices": [], "error": {"message": "as ordered"}}'), "malformed",
        r"answered 200 with an error \(as ordered\)",
    ),
    "reset before the answer": Fault(Talk.reset, "connection", "no connection"),
    "reset in the body": Fault(cut_by_reset, "connection", "broke during the answer", lost=True),
    "body shorter than announced": Fault(cut, "connection", "broke during the answer", lost=True),
    "headers that never come": Fault(never, "timeout", "no whole answer within 0.5 s", lost=True, settings=SHORT),
    "body that never ends": Fault(flood, "malformed", "longer than 1,000,000 bytes", lost=True),
    "body that unpacks to far more": Fault(bomb, "malformed", "longer than 1,000,000 bytes", lost=True),
    "not HTTP": Fault(no_http, "connection", "no connection"),
    "wrong content type": Fault(
        whole(b"<html>Log in", content_type="text/html"), "malformed", "not a chat completion.*<html>Log in"
    ),
    "invalid JSON": Fault(whole(b'{"choices": [{"mess'), "malformed", "not a chat completion", lost=True),
    "null content": Fault(message(message={"content": None}), "refused as no answer", "no answer", exit=1),
    "refusal field": Fault(message(message={"content": None, "refusal": "No."}), "refused as filtered", "", exit=1),
    "finish length": Fault(message(finish_reason="length"), "refused as truncated", "truncated", exit=1),
    "finish abort": Fault(message(finish_reason="abort"), "server error", "broke off its answer", lost=True),
    "finish unknown": Fault(message(finish_reason="brought down\ud800\x1b[31m"), "refused as truncated", "", exit=1),
    "half characters and NUL": Fault(changed(lambda value: value["choices"][0]["message"].update(
        content=value["choices"][0]["message"]["content"] + " \ud83d\x00")), "kept", "", exit=0),
}  # fmt: skip
"""Fault -> what is done to it."""
ONE_OF_EACH = {fault.met: name for name, fault in FAULTS.items()}.values()
"""A fault of each kind that is told apart; the test of faults that stay has how each is told."""


def _settle(fault: Fault, monkeypatch: pytest.MonkeyPatch, *, stays: bool) -> dict[str, Any]:
    """Apply a fault's settings; return the fields of the recipe."""
    if stays:
        monkeypatch.setattr("kinject.llm.sender.N_TRIES", 2)
        monkeypatch.setattr("kinject.llm.sender.N_FAILURES_IN_A_ROW", 2)
        monkeypatch.setattr("kinject.llm.sender.MAX_SILENCE", 0.0)
    elif "tries" in fault.settings:
        monkeypatch.setattr("kinject.llm.sender.N_TRIES", fault.settings["tries"])
    return {"generator__timeout": fault.settings["timeout"]} if "timeout" in fault.settings else {}


def _texts(path: Path) -> list[str]:
    return [row["text"] for _, row in read_jsonl(path)]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("name", quick(FAULTS, *ONE_OF_EACH))
def test_a_fault_met_once_costs_no_answer_and_nothing_of_it_is_stored(
    name: str,
    few: Callable[..., Recipe],
    hostile: Callable[..., Hostile],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault = FAULTS[name]
    fields = _settle(fault, monkeypatch, stays=False)
    # The second request meets it, so that there is an answer to keep.
    server = hostile(lambda talk, number: fault.act(talk) if number == 1 else None)
    recipe = few(server.url, **fields)
    if fault.met == "stop":
        with pytest.raises(
            EndpointError, match=r"1 rewritings are stored; the same command resumes"
        ) as caught:
            augment(recipe)
        assert caught.value.fatal
        assert len(server.seen) == 2
    if fault.met == "failed":
        first = augment(recipe)
        assert (first.got, sum(first.failed.values()), len(server.seen)) == (N - 1, 1, N)
    result = augment(recipe)
    assert (result.got, result.failed) == (N, {})
    assert max(server.good.count(body) for body in server.good) == 1 or fault.lost, (
        "an answer was paid for twice"
    )
    counts = read_manifest_fields(result.manifest_path)["counts"]["this_run"]  # type: ignore[index]
    if fault.met.startswith("refused as "):
        assert result.refused == {fault.met.removeprefix("refused as "): 1}
    else:
        assert result.refused == {}
    if fault.met in ("overload", "server error", "connection", "timeout", "malformed"):
        if "timeout" in fault.settings:
            assert counts["retried"][fault.met] >= 1
        else:
            assert (counts["retried"], counts["lost"]) == ({fault.met: 1}, int(fault.lost))
    assert len(set(_texts(result.corpus_path))) == 2 * N


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_stays_ends_in_one_clear_line_and_its_exit_code(
    name: str, few: Callable[..., Recipe], hostile: Callable[..., Hostile], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    fault = FAULTS[name]
    fields = _settle(fault, monkeypatch, stays=True)
    server = hostile(lambda talk, number: fault.act(talk))
    recipe = few(server.url, **fields)
    settings = [f"augment.{key.replace('__', '.')}={value}" for key, value in fields.items()]
    settings += [
        "augment.styles={paraphrase: 1}",
        "augment.generator.concurrency=1",
        "augment.max_attempts=2",
    ]
    assert main(["augment", str(recipe.path), *settings]) == fault.exit
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    if fault.exit == 2:
        *told, line = err.strip().splitlines()
        assert ["sent again, up to" in each for each in told] == [True] * (fault.met == "timeout")
        assert re.search(fault.message, line), line
        assert len(line) < 700
    assert fault.exit != 1 or fault.message in out
    variants = recipe.run_dir / "variants.jsonl"
    assert len(_texts(variants)) == (N if fault.exit == 0 else 0)
    assert len(server.seen) <= 3 * N
