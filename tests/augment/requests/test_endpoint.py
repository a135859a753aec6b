import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kinject.augment import augment
from kinject.errors import EndpointError
from kinject.llm import Transient
from kinject.llm.replies import parse_completion
from kinject.recipe import Recipe
from kinject.web import is_loopback

Make = Callable[..., Recipe]
Answer = tuple[int, dict[str, str], bytes]


def body(content: object = "text", reason: object = "stop", **rest: Any) -> bytes:
    choice = {"message": {"role": "assistant", "content": content}, "finish_reason": reason}
    return json.dumps({"choices": [choice], **rest}).encode()


@pytest.fixture
def scripted() -> Iterator[Callable[[list[Answer]], Any]]:
    """A server, not ours, that gives the scripted answers in order and the last one ever after."""
    servers = []

    def start(answers: list[Answer]) -> Any:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.server.seen.append((self.headers, self.rfile.read(int(self.headers["content-length"]))))  # type: ignore[attr-defined]
                status, headers, content = answers.pop(0) if len(answers) > 1 else answers[0]
                self.send_response(status)
                for name, value in {"content-length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def do_GET(self) -> None:
                self.send_error(404)

            def log_message(self, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.seen = []  # type: ignore[attr-defined]
        server.url = f"http://127.0.0.1:{server.server_address[1]}/v1"  # type: ignore[attr-defined]
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_request_carries_what_the_recipe_says_and_the_key_in_its_header_alone(
    make_recipe: Make, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-abc")
    server = scripted([(200, {}, body("I'm sorry, I can't."))])
    augment(
        make_recipe(
            server.url, styles={"paraphrase": 1}, max_attempts=1, generator__temperature=0.5, generator__max_tokens=77
        )
    )
    headers, sent = server.seen[0]
    assert headers["authorization"] == "Bearer sk-abc"
    request = json.loads(sent)
    assert b"sk-abc" not in sent
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("sandbox", 0.5, 77)
    assert isinstance(request["seed"], int)
    assert [message["role"] for message in request["messages"]] == ["system", "user"]


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (
            401,
            b'{"error": {"message": "Incorrect API key: sk-abc"}}',
            r"refused \(401: Incorrect API key: \(key\)\).*OPENAI_API_KEY",
        ),
        (403, b"no", "the key is refused .403: no."),
        (402, b"{}", "out of credit"),
        (429, b'{"error": {"message": "quota", "code": "insufficient_quota"}}', "out of credit"),
        (404, b'{"detail": "Not Found"}', "answered 404"),
    ],
)
def test_what_no_request_can_mend_stops_the_run_at_once(
    make_recipe: Make, scripted: Any, monkeypatch: pytest.MonkeyPatch, status: int, content: bytes, message: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-abc")
    server = scripted([(status, {}, content)])
    with pytest.raises(EndpointError, match=message) as caught:
        augment(make_recipe(server.url, generator__concurrency=2))
    assert caught.value.fatal
    assert len(server.seen) <= 2
    assert "sk-abc" not in str(caught.value)


def test_a_bad_request_counts_as_failed_and_is_told_in_one_printable_line(make_recipe: Make, scripted: Any) -> None:
    server = scripted([(400, {}, b'{"error": {"message": "context too long\\n\\u001b[31m' + b"x" * 500 + b'"}}')])
    result = augment(make_recipe(server.url, styles={"paraphrase": 1}))
    (error,) = result.failed
    assert result.failed[error] == 12
    assert "answered 400 (context too long [31mxxx" in error
    assert len(error) < 300


def test_a_pause_that_the_endpoint_asks_for_is_kept(make_recipe: Make, scripted: Any) -> None:
    import time

    good = (200, {}, body("I'm sorry."))
    server = scripted([(429, {"retry-after": "0.4"}, b"{}"), good])
    began = time.monotonic()
    augment(make_recipe(server.url, styles={"paraphrase": 1}, max_attempts=1, generator__concurrency=1))
    assert time.monotonic() - began >= 0.4


def test_an_answer_that_does_not_come_in_time_is_asked_for_again(make_recipe: Make, serving: Any) -> None:
    server = serving(faults={"hang": 0.5})
    assert augment(make_recipe(server.url, styles={"paraphrase": 1}, generator__timeout=0.3)).got == 12
    assert server.state.met["hang"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b'{"choices": 5}',
        b'{"choices": [5]}',
        body(["parts"]),
        b'{"choices": [{"message": {"con',
        b"\xff",
    ],
)
def test_a_body_that_is_no_completion_is_malformed(content: bytes) -> None:
    with pytest.raises(Transient, match="not a chat completion") as caught:
        parse_completion(content, "http://x/v1", 100)
    assert caught.value.kind == "malformed"


def test_what_a_completion_lacks_is_told_by_its_finish_reason() -> None:
    assert parse_completion(b'{"choices": []}', "u", 100).finish_reason == "no choices"
    assert parse_completion(body(None, "length"), "u", 100) == parse_completion(body("", "length"), "u", 100)
    refused = {"choices": [{"message": {"content": None, "refusal": "no"}, "finish_reason": "stop"}]}
    assert parse_completion(json.dumps(refused).encode(), "u", 100).finish_reason == "content_filter"
    counted = parse_completion(body("a\x00b \ud83d", usage={"prompt_tokens": 3, "completion_tokens": 4}), "u", 100)
    assert counted.text == "a\ufffdb ?"
    assert (counted.usage.tokens_in, counted.usage.tokens_out) == (3, 4)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000/v1", True), ("http://localhost/v1", True), ("http://[::1]:80/v1", True),
        ("http://127.0.0.1.example.org/v1", False), ("https://api.openai.com/v1", False), ("http://10.0.0.1/v1", False),
    ],
)  # fmt: skip
def test_only_this_machine_is_loopback(url: str, expected: bool) -> None:
    assert is_loopback(url) is expected
