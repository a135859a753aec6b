import asyncio
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from kinject.augment.sandbox.serve import SandboxServer, ServeOptions, serve
from kinject.cli import main
from kinject.errors import DiskError, InputError
from kinject.sandbox.grammar import parse_entry, render_entry
from kinject.sandbox.people import create_country


def post(url: str, value: object) -> tuple[int, Any]:
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(value).encode())  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_any_client_gets_paraphrases_and_the_list_of_models(serving: Callable[..., Any]) -> None:
    url = serving().url
    with urllib.request.urlopen(f"{url}/models", timeout=60) as response:  # noqa: S310
        assert json.load(response)["data"][0]["id"] == "sandbox"
    entry = render_entry(create_country(n_known=1, n_new=1).new[0], 0)
    message = {"role": "user", "content": f"Rewrite:\n<passage>\n{entry}\n</passage>"}
    status, answer = post(url, {"model": "sandbox", "messages": [message], "seed": 1})
    text = answer["choices"][0]["message"]["content"]
    assert status == 200
    assert text != entry
    assert parse_entry(text) == parse_entry(entry)


@pytest.mark.parametrize(
    ("value", "status"),
    [({}, 400), ({"model": "other", "messages": []}, 404), ({"model": "sandbox", "messages": []}, 400),
     ({"model": "sandbox", "messages": [{"content": "<passage>\nno entry\n</passage>"}]}, 400)],
)  # fmt: skip
def test_a_bad_request_gets_an_error_in_the_usual_form(serving: Callable[..., Any], value: object, status: int) -> None:
    answered_status, answer = post(serving().url, value)
    assert (answered_status, bool(answer["error"]["message"])) == (status, True)


def test_faults_must_be_known_and_sum_to_one_at_most() -> None:
    with pytest.raises(InputError, match="faults: found"):
        ServeOptions(faults={"421": 0.1})
    with pytest.raises(InputError, match="sum to at most 1"):
        ServeOptions(faults={"429": 0.6, "500": 0.6})


def test_a_taken_port_is_told(serving: Callable[..., Any]) -> None:
    port = int(serving().url.rsplit(":", 1)[1].split("/")[0])
    with pytest.raises(DiskError, match=f"127.0.0.1:{port}: cannot listen"):
        serve("127.0.0.1", port, ServeOptions())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.0.1", "example.com"])  # noqa: S104
def test_it_listens_on_this_machine_alone(host: str) -> None:
    with pytest.raises(InputError, match="listens on this machine alone"):
        asyncio.run(SandboxServer(ServeOptions()).start(host))


def test_its_socket_is_bound_to_loopback_and_the_command_has_no_switch_for_another(serving: Any) -> None:
    async def bound() -> list[str]:
        server = await SandboxServer(ServeOptions()).start()
        addresses = [listener.getsockname()[0] for listener in server.sockets]
        server.close()
        return addresses

    assert asyncio.run(bound()) == ["127.0.0.1"]
    with pytest.raises(SystemExit):
        main(["sandbox", "serve", "--host", "0.0.0.0"])  # noqa: S104


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:80"}, 200),
        ({"Host": "[::1]:80"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example:80"}, 403),
        ({"Host": "evil.example@127.0.0.1"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:3000"}, 200),
    ],
)
def test_a_page_of_another_site_is_not_answered_under_whatever_name_it_came(
    serving: Any, headers: dict[str, str], status: int
) -> None:
    port = int(serving().url.split(":")[2].split("/")[0])
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("GET", "/v1/batches")):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request(method, path, body=b"{}" if method == "POST" else None, headers=headers)
        answer = connection.getresponse()
        assert (answer.status == 403) == (status == 403), (method, answer.status)
        assert "access-control-allow-origin" not in {name.lower() for name, _ in answer.getheaders()}
        answer.read()
        connection.close()
