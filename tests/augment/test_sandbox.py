import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from kinject.augment.sandbox import SandboxServer
from kinject.cli import main
from kinject.errors import DiskError
from kinject.sandbox.grammar import parse_entry, render_entry
from kinject.sandbox.people import create_country


def post(url: str, value: object) -> tuple[int, Any]:
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(value).encode())  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=600) as response:  # noqa: S310
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_any_client_gets_paraphrases_and_the_list_of_models(serving: Callable[..., Any]) -> None:
    url = serving().url
    with urllib.request.urlopen(f"{url}/models", timeout=600) as response:  # noqa: S310
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
def test_a_bad_request_gets_an_error_in_the_usual_form(
    serving: Callable[..., Any], value: object, status: int
) -> None:
    answered_status, answer = post(serving().url, value)
    assert (answered_status, bool(answer["error"]["message"])) == (status, True)


def test_the_served_sandbox_listens_on_loopback_alone_and_a_taken_port_is_reported(
    serving: Callable[..., Any],
) -> None:
    server = serving()
    assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(DiskError, match=f"127.0.0.1:{server.server_address[1]}: cannot listen"):
        SandboxServer(server.server_address[1])
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
    port = serving().server_address[1]
    for method, path in (
        ("GET", "/v1/models"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/batches"),
    ):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        connection.request(method, path, body=b"{}" if method == "POST" else None, headers=headers)
        answer = connection.getresponse()
        assert (answer.status == 403) == (status == 403), (method, answer.status)
        assert "access-control-allow-origin" not in {
            name.lower() for name, _ in answer.getheaders()
        }
        answer.read()
        connection.close()
