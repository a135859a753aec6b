"""Keys: in no file, output, log or error, also where an endpoint, a proxy or a user's slip would put them there.

What is searched after each test stands in `canary_key` (tests/conftest.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from faulty_server import Hostile, Talk
from kinject.augment import augment, render_summary
from kinject.cli import main
from kinject.errors import EndpointError, RecipeError
from kinject.llm.endpoint import Endpoint
from kinject.recipe import Recipe, read_recipe

Make = Callable[..., Recipe]
Start = Callable[[Callable[[Talk, int], bool | None]], Hostile]

ECHOES = {
    "plain": lambda key: key,
    "header": lambda key: f"Bearer {key}",
    "url": lambda key: f"https://host/v1?api_key={quote(key, safe='')}",
    "twice": lambda key: f"{key}{key} {key}",
    "cut": lambda key: key[:-3],
    "behind": lambda key: "x" * 390 + key,
}


def echoing(
    status: int, echo: Callable[[str], str], form: str = "json"
) -> Callable[[Talk, int], bool]:
    """Return the script of an endpoint that says the key of each request back."""

    def script(talk: Talk, number: int) -> bool:
        echoed = echo(str(talk.headers["authorization"]).removeprefix("Bearer "))
        value: Any = {"error": {"message": f"bad key: {echoed}", "code": echoed}}
        if status == 200:
            message = {
                "role": "assistant",
                "content": f"The key of Arden is {echoed}, and that is all.",
            }
            value = {
                "choices": [
                    {"message": message, "finish_reason": echoed if form == "reason" else "stop"}
                ]
            }
        return talk.say(status, echoed.encode() if form == "text" else json.dumps(value).encode())

    return script


@pytest.mark.parametrize(
    ("status", "form", "echo"),
    [(401, "json", "plain"), (403, "text", "header"), (404, "json", "url"), (400, "json", "twice"), (400, "json", "behind")],
)  # fmt: skip
def test_an_error_that_repeats_the_key_is_reported_without_it(
    make_recipe: Make, hostile: Start, canary_key: str, status: int, form: str, echo: str
) -> None:
    url = hostile(echoing(status, ECHOES[echo], form)).url
    recipe = make_recipe(url, styles={"paraphrase": 1}, generator__concurrency=2)
    try:
        output = render_summary(augment(recipe))
    except EndpointError as error:
        output = str(error)
    assert "(key)" in output or echo == "behind"
    assert canary_key[:-3] not in output


@pytest.mark.parametrize(("form", "echo"), [("json", "url"), ("json", "cut"), ("reason", "header")])
def test_an_answer_that_repeats_the_key_is_kept_without_it(
    make_recipe: Make, hostile: Start, echo: str, form: str
) -> None:
    url = hostile(echoing(200, ECHOES[echo], form)).url
    result = augment(make_recipe(url, styles={"paraphrase": 1}, max_attempts=1))
    assert result.got == 0
    assert b"(key)" in result.rejected_path.read_bytes()


def test_a_key_that_would_travel_unencrypted_is_warned_of(
    make_recipe: Make, caplog: pytest.LogCaptureFixture, serving: Callable[..., Any]
) -> None:
    for url, warned in (
        ("http://gpu-7.example/v1", True),
        ("https://gpu-7.example/v1", False),
        (serving().url, False),
    ):
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
    make_recipe: Make,
    canary_key: str,
    key: str,
    value: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
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


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # of aiohttp, for how the openai package names a proxy
def test_a_proxy_with_a_password_is_reported_without_it(
    make_recipe: Make, monkeypatch: pytest.MonkeyPatch, canary_key: str
) -> None:
    monkeypatch.setattr("kinject.llm.sender.N_TRIES", 2)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://user:{quote(canary_key, safe='')}@127.0.0.1:9")
    result = augment(
        make_recipe("http://endpoint.invalid/v1", styles={"paraphrase": 1}, generator__timeout=5)
    )
    assert sum(result.failed.values()) == 12
