"""Articles by title and date, from a stand-in of MediaWiki's API on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from kinject.corpus import public_data
from kinject.corpus.public_data import (
    DATA_SETS,
    ArticleList,
    get_data,
    read_list,
    write_articles,
)
from kinject.disk import read_jsonl
from kinject.errors import InputError
from kinject.heap import read_documents

ARTICLES = ArticleList(
    "2021-05-01",
    {"rivers": {"north": ("Elbe", "Oder"), "south": ("Po", "Atlantis", "Old name")}, "towns": {"all": ("Ulm",)}},
)  # fmt: skip
HISTORY = {
    "Elbe": [(11, "2020-01-01T00:00:00Z", "The '''Elbe''' is a river & long."), (12, "2022-01-01T00:00:00Z", "Later.")],
    "Oder": [(21, "2021-04-30T23:00:00Z", "The ''Oder'' < the Elbe.")],
    "Po": [(31, "2019-01-01T00:00:00Z", "The [[Po (river)|Po]] is in Italy.")],
    "Atlantis": [(41, "2023-01-01T00:00:00Z", "Not yet.")],
    "Old name": [(51, "2020-06-01T00:00:00Z", "#REDIRECT [[New name]]")],
    "Ulm": [(61, "2018-01-01T00:00:00Z", "'''Ulm''' has a minster.")],
}  # fmt: skip


@dataclass
class StandIn:
    """Answers as MediaWiki does; `failures` come first, each (status, headers, body)."""

    requests: list[dict[str, str]] = field(default_factory=list)
    agents: list[str] = field(default_factory=list)
    failures: list[tuple[int, dict[str, str], str]] = field(default_factory=list)

    def answer(self, asked: dict[str, str]) -> dict[str, Any]:
        found = []
        for title, revisions in HISTORY.items():
            for number, timestamp, text in revisions:
                if "revids" in asked:
                    matches = asked["revids"] == str(number)
                else:
                    matches = asked["titles"] == title and timestamp <= asked["rvstart"]
                if matches:
                    sha1 = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
                    slots = {"main": {"content": text}}
                    found.append(
                        {"revid": number, "timestamp": timestamp, "sha1": sha1, "slots": slots}
                    )
        page: dict[str, Any] = {"title": asked.get("titles", "")}
        if found:
            page["revisions"] = found[-1:]  # the newest that is wanted
        return {"query": {"pages": [page]}}


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    stand_in = StandIn()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = {key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()}
            stand_in.requests.append(asked)
            stand_in.agents.append(self.headers["User-Agent"])
            status, headers, body = 200, dict[str, str](), json.dumps(stand_in.answer(asked))
            if stand_in.failures:
                status, headers, body = stand_in.failures.pop(0)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *arguments: object) -> None:
            """Keep the test's output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(public_data, "API", f"http://127.0.0.1:{server.server_port}/w/api.php")
    monkeypatch.setenv("KINJECT_CONTACT", "ann@example.net")
    yield stand_in
    server.shutdown()
    server.server_close()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses, which are not slept."""
    slept: list[float] = []
    monkeypatch.setattr(public_data.time, "sleep", slept.append)
    return slept


def fetch(folder: Path) -> Path:
    path = folder / "articles.xml"
    write_articles(ARTICLES, path, folder / "revisions.jsonl", folder / "journal.jsonl")
    return path


def revisions(folder: Path) -> dict[str, int | None]:
    return {row["title"]: row["revision"] for _, row in read_jsonl(folder / "revisions.jsonl")}


def test_each_article_is_the_one_of_the_date_and_is_read_as_an_export(api, waits, tmp_path):
    path = fetch(tmp_path)
    texts = {"Elbe": "The Elbe is a river & long.", "Oder": "The Oder < the Elbe.", "Po": "The Po is in Italy.",
             "Ulm": "Ulm has a minster."}  # fmt: skip
    assert {document.title: document.text for document in read_documents(path)} == {
        title: f"# {title}\n\n{text}" for title, text in texts.items()
    }
    assert revisions(tmp_path) == {
        "Elbe": 11,
        "Po": 31,
        "Ulm": 61,
        "Oder": 21,
        "Atlantis": None,
        "Old name": None,
    }
    assert [asked["titles"] for asked in api.requests] == [
        "Elbe",
        "Po",
        "Ulm",
        "Oder",
        "Atlantis",
        "Old name",
    ], "one of each category in turn"


def test_requests_are_polite(api, waits, tmp_path, monkeypatch):
    monkeypatch.setattr(public_data, "_PAUSE", 1_000.0)  # beside which no request takes long
    fetch(tmp_path)
    assert all("ann@example.net" in agent and agent.startswith("kinject/") for agent in api.agents)
    assert all(asked["maxlag"] == "5" for asked in api.requests)
    assert len(waits) == len(api.requests)
    assert all(wait > 900.0 for wait in waits[1:]), "a pause between two requests"
    monkeypatch.delenv("KINJECT_CONTACT")
    with pytest.raises(InputError, match=r"export KINJECT_CONTACT=name@example\.org"):
        fetch(tmp_path)


def test_a_second_fetch_takes_the_recorded_revisions_whatever_was_written_since(
    api, waits, tmp_path, monkeypatch
):
    text = fetch(tmp_path).read_bytes()
    (tmp_path / "journal.jsonl").unlink()
    late = {**HISTORY, "Elbe": [*HISTORY["Elbe"], (13, "2020-12-31T00:00:00Z", "Rewritten.")],
            "Atlantis": [(42, "2020-01-01T00:00:00Z", "There after all.")]}  # fmt: skip
    monkeypatch.setitem(globals(), "HISTORY", late)
    api.requests.clear()
    assert fetch(tmp_path).read_bytes() == text
    assert [asked["revids"] for asked in api.requests] == ["11", "31", "61", "21"]


def test_an_interrupted_fetch_resumes(api, waits, tmp_path):
    api.failures = [(200, {}, json.dumps(api.answer({"titles": "Elbe", "rvstart": "2021-05-01T00:00:00Z"}))),
                    (404, {}, "gone")]  # fmt: skip
    with pytest.raises(InputError, match=r"HTTP 404.*the same command resumes"):
        fetch(tmp_path)
    assert not (tmp_path / "articles.xml").exists()
    api.requests.clear()
    fetch(tmp_path)
    assert [asked["titles"] for asked in api.requests] == [
        "Po",
        "Ulm",
        "Oder",
        "Atlantis",
        "Old name",
    ]


def test_articles_of_an_interrupted_fetch_are_not_those_of_a_later_date(
    api, waits, tmp_path, monkeypatch
):
    elbe = api.answer({"titles": "Elbe", "rvstart": "2021-05-01T00:00:00Z"})
    api.failures = [(200, {}, json.dumps(elbe)), (404, {}, "gone")]
    with pytest.raises(InputError, match="HTTP 404"):
        fetch(tmp_path)
    monkeypatch.setitem(globals(), "ARTICLES", replace(ARTICLES, date="2022-06-30"))
    fetch(tmp_path)
    assert revisions(tmp_path)["Elbe"] == 12


def test_a_cut_answer_is_asked_for_again(api, waits, tmp_path):
    api.failures = [
        (200, {"Content-Length": "9000"}, '{"query":'),
        (200, {"Transfer-Encoding": "chunked"}, "no number"),
    ]
    fetch(tmp_path)
    assert [asked["titles"] for asked in api.requests][:4] == ["Elbe"] * 3 + ["Po"]


def test_a_recorded_revision_that_is_gone_is_named_and_stays_in_the_record(api, waits, tmp_path):
    (tmp_path / "revisions.jsonl").write_text('{"title": "Ulm", "revision": 60}\n')
    with pytest.raises(InputError, match=r"^Ulm: .* no longer has its revision 60"):
        fetch(tmp_path)
    assert revisions(tmp_path) == {"Ulm": 60}


def test_a_contact_that_no_header_holds_is_named_at_once(api, waits, tmp_path, monkeypatch):
    monkeypatch.setenv("KINJECT_CONTACT", "łukasz@example.net")
    with pytest.raises(InputError, match=r"KINJECT_CONTACT: found 'łukasz@example.net'"):
        fetch(tmp_path)
    assert waits == []


def test_a_busy_server_is_left_alone_for_as_long_as_it_wants(api, waits, tmp_path):
    lag = json.dumps({"error": {"code": "maxlag", "info": "Waiting for a database"}})
    api.failures = [
        (429, {"Retry-After": "17"}, ""),
        (200, {}, lag),
        (503, {"Retry-After": "9000"}, ""),
    ]
    fetch(tmp_path)
    assert 17.0 in waits
    assert 10.0 in waits, "the second time"
    assert max(waits) == 120.0
    assert [asked["titles"] for asked in api.requests][:4] == ["Elbe"] * 4


@pytest.mark.parametrize(
    ("body", "words"),
    [('{"error": {"code": "badvalue", "info": "no such module"}}', "none of MediaWiki's query API.*badvalue"),
     ("[1, 2]", r"none of MediaWiki's query API: \[1, 2\]"),
     (json.dumps({"query": {"pages": [{"revisions": [{"revid": 1, "timestamp": "2020-01-01T00:00:00Z", "sha1": "00",
                                                       "slots": {"main": {"content": "x"}}}]}]}}), "SHA-1")],
)  # fmt: skip
def test_an_answer_of_another_kind_is_one_line(api, waits, tmp_path, body, words):
    api.failures = [(200, {}, body)]
    with pytest.raises(InputError, match=words):
        fetch(tmp_path)


def test_the_command_keeps_revisions_and_hashes_beside_the_data(api, waits, tmp_path, monkeypatch):
    monkeypatch.setattr("kinject.corpus.public_data.read_list", lambda name: ARTICLES)
    (path,) = get_data(DATA_SETS["current-events"], tmp_path)
    assert path == tmp_path / "current-events" / "articles.xml"
    sources = {
        item.name for item in (tmp_path / "sources").iterdir() if item.suffix in (".json", ".jsonl")
    }
    assert sources == {"current-events.json", "current-events.revisions.jsonl"}
    assert get_data(DATA_SETS["current-events"], tmp_path) == []


def test_the_shipped_lists_have_titles_of_every_subject_and_month_and_no_text():
    subjects = read_list("wikipedia-subjects")
    assert set(subjects.topics) == {
        "anatomy",
        "astronomy",
        "college_biology",
        "college_chemistry",
        "prehistory",
    }
    assert subjects.date.startswith("2023-11")
    events = read_list("current-events")
    assert set(events.topics) == {
        f"{month} 2023" for month in ("August", "September", "October", "November")
    }
    for articles, fewest in ((subjects, 40), (events, 10)):
        titles = articles.titles()
        assert len(titles) == len(set(titles))
        assert all(title == title.strip() and len(title) < 90 for title in titles)
        for topic, categories in articles.topics.items():
            assert sum(map(len, categories.values())) >= fewest, topic
