"""Keys: in no file, output, log or error, also where an endpoint, a proxy or a user's slip would put them there.

What is searched after each test stands in `canary_key` (tests/conftest.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import quote

import pytest

from kinject.augment import augment, render_summary
from kinject.cli import main
from kinject.errors import EndpointError, RecipeError
from kinject.llm.endpoint import Endpoint
from kinject.recipe import Recipe, read_recipe

Make = Callable[..., Recipe]

ECHOES = {
    "plain": lambda key: key,
    "header": lambda key: f"Bearer {key}",
    "url": lambda key: f"https://host/v1?api_key={quote(key, safe='')}",
    "twice": lambda key: f"{key}{key} {key}",
    "cut": lambda key: key[:-3],
    "behind": lambda key: "x" * 390 + key,
}


@pytest.fixture
def echoing() -> Iterator[Callable[..., str]]:
    """An endpoint that says the key of each request back: echoing(status, how) -> its URL."""
    servers = []

    def start(
        status: int, echo: Callable[[str], str], form: str = "json", headers: dict[str, str] | None = None
    ) -> str:
        class Handler(BaseHTTPRequestHandler):
            wbufsize = -1  # head and body in one packet

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self._answer()

            def do_GET(self) -> None:
                self._answer()

            def _answer(self) -> None:
                echoed = echo(self.headers["authorization"].removeprefix("Bearer "))
                if status == 200:
                    message = {"role": "assistant", "content": f"The key of Arden is {echoed}, and that is all."}
                    value: Any = {
                        "choices": [{"message": message, "finish_reason": echoed if form == "reason" else "stop"}]
                    }
                else:
                    value = {"error": {"message": f"bad key: {echoed}", "code": echoed}}
                content = echoed.encode() if form == "text" else json.dumps(value).encode()
                self.send_response(status)
                for name, text in {"content-length": str(len(content)), **(headers or {})}.items():
                    self.send_header(name, text)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        Thread(target=server.serve_forever, args=(0.01,)).start()
        return f"http://127.0.0.1:{server.server_address[1]}/v1"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "form", "echo"),
    [(401, "json", "plain"), (403, "text", "header"), (404, "json", "url"), (400, "json", "twice"), (400, "json", "behind")],
)  # fmt: skip
def test_an_error_that_repeats_the_key_is_told_without_it(
    make_recipe: Make, echoing: Callable[..., str], canary_key: str, status: int, form: str, echo: str
) -> None:
    recipe = make_recipe(echoing(status, ECHOES[echo], form), styles={"paraphrase": 1}, generator__concurrency=2)
    try:
        output = render_summary(augment(recipe))
    except EndpointError as error:
        output = str(error)
    assert "(key)" in output or echo == "behind"
    assert canary_key[:-3] not in output


@pytest.mark.parametrize(("form", "echo"), [("json", "url"), ("json", "cut"), ("reason", "header")])
def test_an_answer_that_repeats_the_key_is_kept_without_it(
    make_recipe: Make, echoing: Callable[..., str], echo: str, form: str
) -> None:
    result = augment(make_recipe(echoing(200, ECHOES[echo], form), styles={"paraphrase": 1}, max_attempts=1))
    assert result.got == 0
    assert b"(key)" in result.rejected_path.read_bytes()


def test_a_key_that_would_travel_unencrypted_is_warned_of(
    make_recipe: Make, caplog: pytest.LogCaptureFixture, serving: Callable[..., Any]
) -> None:
    for url, warned in (("http://gpu-7.example/v1", True), ("https://gpu-7.example/v1", False), (serving().url, False)):
        caplog.clear()
        section = make_recipe(url).augment
        assert section is not None
        Endpoint(section.generator)
        assert ("travels unencrypted" in caplog.text) == warned


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("base_url", "https://user:CANARY@host/v1"),
        ("base_url", "https://host/v1?api_key=CANARY"),
        ("base_url", "https://host/v1#CANARY"),
        ("base_url", "CANARY"),
        ("api_key_env", "CANARY"),
        ("model", "gpt CANARY"),
    ],
)
def test_a_key_that_got_into_a_recipe_is_refused_and_not_repeated(
    make_recipe: Make, canary_key: str, key: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe("http://127.0.0.1:9/v1").path
    setting = f"augment.generator.{key}={value.replace('CANARY', canary_key)}"
    with pytest.raises(RecipeError, match="command line") as caught:
        read_recipe(recipe, [setting], verb="augment")
    assert canary_key not in str(caught.value)
    assert main(["augment", str(recipe), setting]) == 2
    assert not (tmp_path / "run").exists()


def test_any_secret_of_the_environment_is_known_when_it_stands_in_a_recipe(
    make_recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe().path
    for name in ("HF_TOKEN", "WANDB_API_KEY", "DB_PASSWORD", "CLIENT_SECRET"):
        monkeypatch.setenv(name, f"0123456789-{name[:3]}-sesame")
        with pytest.raises(RecipeError, match=f"variable {name} is written here") as caught:
            read_recipe(recipe, [f"run_dir=runs/0123456789-{name[:3]}-se"], verb="augment")
        assert "0123456789" not in str(caught.value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of aiohttp, for how the openai package names a proxy
def test_a_proxy_with_a_password_is_told_without_it(
    make_recipe: Make, monkeypatch: pytest.MonkeyPatch, canary_key: str
) -> None:
    monkeypatch.setattr("kinject.llm.sender.N_TRIES", 2)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://user:{quote(canary_key, safe='')}@127.0.0.1:9")
    result = augment(make_recipe("http://endpoint.invalid/v1", styles={"paraphrase": 1}, generator__timeout=5))
    assert sum(result.failed.values()) == 12
