"""kinject view: one local page over a folder of runs, served by the standard library's server.

It listens on 127.0.0.1 alone, and every path begins with a random token. A request that names
another host is refused, so that no name of the web can be led here (DNS rebinding). page.html shows
everything as text.
"""

from __future__ import annotations

import json
import math
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from kinject.augment.store import read_decisions, text_id, write_decision
from kinject.disk import FoundRun, Row, find_runs, read_jsonl
from kinject.errors import InputError, KinjectError
from kinject.eval.chat import Chat, ChatSetup, find_models, open_chat
from kinject.manifests import (
    MANIFEST,
    AugmentManifest,
    QuestionsManifest,
    TrainManifest,
    manifest_beside,
)
from kinject.report.page import policy_of

if TYPE_CHECKING:
    from kinject.models import LoadedModel

LISTS: Mapping[str, Mapping[str, str]] = {
    "documents": {
        "documents": "documents.jsonl",
        "skipped": "skipped.jsonl",
        "copies": "duplicates.jsonl",
    },
    "augment": {
        "accepted": "variants.jsonl",
        "refused": "rejected.jsonl",
        "passages": "corpus.jsonl",
    },
    "questions": {"questions": "questions.jsonl", "refused": "rejected.jsonl"},
    "eval": {"changed answers": "flips.jsonl"},
}
"""Verb -> what its run lists, and the file of it."""
_WORK = {"augment": ("variants.jsonl", "accepted"), "questions": ("outcomes.jsonl", "passages"),
         "eval": ("answers.jsonl", "answers")}  # fmt: skip
"""Verb -> the file that grows while it runs, and what its rows are."""
_MOST_ROWS = 200
_MOST_BYTES = 2**20  # of a request
_LONGEST = 20_000  # characters of a text on the page
_LOGGED = ("loss", "learning_rate", "grad_norm", "epoch")
_MOST_POINTS = 400  # of a curve
_MOST_NEW_TOKENS = 128

Item = dict[str, Any]
"""One row of a list: text, tag, about, pairs (label, text) and, where a person can decide, id and
edit (field -> texts)."""


class _RefusedError(Exception):
    """A request that gets no answer but `status` and a message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class View:
    """The runs of a folder. Chat models are loaded at the first question, those of one run at a
    time."""

    folder: Path
    _deciding: threading.Lock = field(default_factory=threading.Lock)
    _chatting: threading.Lock = field(default_factory=threading.Lock)
    _chat: tuple[str, Chat, list[tuple[str, LoadedModel, bool]]] | None = None

    def found(self) -> dict[str, FoundRun]:
        """Return the runs by name."""
        below = "runs" if (self.folder / "runs").is_dir() else ""
        runs = {run.run_dir.as_posix(): run for run in find_runs(self.folder, below)}
        return {name: run for name, run in runs.items() if run.state != "not started"}

    def find(self, name: str) -> FoundRun:
        """Return a run by its name. Raises `_RefusedError` if there is none."""
        run = self.found().get(name)
        if run is None:
            raise _RefusedError(404, f"no such run: {name}")
        return run

    def runs(self) -> list[Item]:
        """Return what the overview shows of each run: state, progress, pages, lists."""
        shown = []
        for name, run in self.found().items():
            path = self.folder / run.run_dir
            lists = [
                title for title, file in LISTS.get(run.verb, {}).items() if (path / file).is_file()
            ]
            shown.append({
                "name": name, "verb": run.verb, "state": run.state, "command": run.command, "lists": lists,
                "progress": _progress(path, run), "page": (path / "report.html").is_file(),
                "log": (path / "log.jsonl").is_file(), "chat": run.verb == "train" and (path / "model").is_dir(),
                "decisions": len(read_decisions(path)) if run.verb in ("augment", "questions") else 0,
            })  # fmt: skip
        return shown

    def log(self, name: str) -> Item:
        """Return the curves of a training: name -> [steps, values], null where a value is not
        finite.

        Of rows with one step the last counts, as after a resume; of many steps, the means of
        equally many neighbours.
        """
        values: dict[str, dict[float, float]] = {}
        for _, row in read_jsonl(self.folder / self.find(name).run_dir / "log.jsonl"):
            for key in (key for key in row if key in _LOGGED or key.startswith("eval_")):
                values.setdefault(key, {})[row["step"]] = math.nan if row[key] is None else row[key]
        return {key: _thinned(sorted(curve.items())) for key, curve in values.items()}

    def numbers(self, name: str) -> Item:
        """Return the numbers of a finished run, as its manifest has them."""
        manifest = manifest_beside(self.folder / self.find(name).run_dir / MANIFEST)
        keys = ("counts", "recipe", "versions")
        if manifest is None:
            return dict.fromkeys(keys)
        return {key: manifest.as_written[key] for key in keys}

    def rows(self, name: str, title: str, query: str, tag: str, offset: int, limit: int) -> Item:
        """Return the items of a list that hold all words of `query`, from `offset` on, and how many
        there are by tag."""
        run = self.find(name)
        file = LISTS.get(run.verb, {}).get(title)
        path = self.folder / run.run_dir
        if file is None or not (path / file).is_file():
            raise _RefusedError(404, f"{name} has no list {title}")
        items = _items(path / file, run.verb, title, _stamp(path / file))
        words = query.casefold().split()
        matching = [item for item, text in items if all(word in text for word in words)]
        tags = Counter(item["tag"] for item in matching if item["tag"])
        matching = [item for item in matching if not tag or item["tag"] == tag]
        decisions, page = read_decisions(path), matching[offset : offset + min(limit, _MOST_ROWS)]
        passages = (
            _passages(path / "corpus.jsonl", _stamp(path / "corpus.jsonl"))
            if run.verb == "augment"
            else {}
        )
        shown = [
            item
            | {
                "decision": decisions.get(item.get("id", "")),
                "passage": passages.get(item.get("passage", ""), ""),
            }
            for item in page
        ]
        return {
            "items": shown,
            "matched": len(matching),
            "total": len(items),
            "tags": dict(tags.most_common()),
        }

    def decide(self, name: str, title: str, row: Row) -> None:
        """Write a decision on a text or question of a list; its run honours it when it starts
        again."""
        run = self.find(name)
        path = self.folder / run.run_dir / LISTS.get(run.verb, {}).get(title, "")
        if run.verb not in ("augment", "questions") or not path.is_file():
            raise _RefusedError(
                400, "decisions are for the texts of kinject augment and kinject questions"
            )
        if row.get("decision") not in ("keep", "drop", "edit", "undo"):
            raise _RefusedError(400, "decision: keep, drop, edit or undo")
        items = (item for item, _ in _items(path, run.verb, title, _stamp(path)) if item.get("id"))
        item = next((item for item in items if item["id"] == row.get("id")), None)
        if item is None:
            raise _RefusedError(404, "no such text")
        edited = {key: row.get(key) for key in item["edit"]} if row["decision"] == "edit" else {}
        for key, value in edited.items():
            texts = value if isinstance(item["edit"][key], list) else [value]
            if (
                not isinstance(texts, list)
                or not texts
                or not all(isinstance(t, str) and t.strip() for t in texts)
            ):
                raise _RefusedError(400, f"{key}: a text that is not empty")
        at = datetime.now(UTC).isoformat(timespec="seconds")
        with self._deciding:
            write_decision(
                path.parent, {"id": item["id"], "decision": row["decision"], **edited, "at": at}
            )

    def ask(
        self, name: str, question: str, write: Callable[[Item], None], *, again: bool = False
    ) -> None:
        """Write the answers of base, trained, and trained model with passages, word by word, as
        events.

        Asked `again`, they have forgotten the turns before.
        """
        run = self.find(name)
        with self._chatting:
            if self._chat is None or self._chat[0] != name:
                write({"status": "loading the models"})
                self._chat = None  # the memory of one run's models
                self._chat = (name, *_open_chat(self.folder / run.run_dir))
            _, chat, columns = self._chat
            if again:
                chat.reset()
            write({"columns": [label for label, *_ in columns]})
            passages = chat.passages(question)
            write({"passages": passages})
            for label, loaded, sees in columns:

                def part(text: str, label: str = label) -> None:
                    write({"label": label, "text": text})

                chat.reply(label, loaded, question, passages if sees else [], part)
        write({"status": ""})


def _open_chat(run_dir: Path) -> tuple[Chat, list[tuple[str, LoadedModel, bool]]]:
    """Return the chat of a training run, and its columns: label, model, whether it sees passages."""
    documents = _documents_of(run_dir)
    chat = open_chat(
        ChatSetup(find_models(str(run_dir), None), documents, max_new_tokens=_MOST_NEW_TOKENS)
    )
    columns = [
        ("base" if label == "base" else "trained", loaded, False)
        for label, loaded in chat.loaded.items()
    ]
    return chat, [
        *columns,
        *([("trained with passages", columns[-1][1], True)] if documents else []),
    ]


def _documents_of(run_dir: Path) -> tuple[str, ...]:
    """Return the file of documents that the corpus of a training was made from; () if it was made
    otherwise, or from a folder."""
    training = manifest_beside(run_dir / MANIFEST)
    if not isinstance(training, TrainManifest):
        return ()
    augmented = manifest_beside(Path(training.recipe.corpus.path))
    if not isinstance(augmented, AugmentManifest):
        return ()
    documents = augmented.recipe.augment.documents
    return (documents,) if Path(documents).is_file() else ()


def _thinned(points: list[tuple[float, float]]) -> list[list[float | None]]:
    size = math.ceil(len(points) / _MOST_POINTS)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    steps, values = (
        [sum(point[axis] for point in part) / len(part) for part in parts] for axis in (0, 1)
    )
    return [list(steps), [None if math.isnan(value) else value for value in values]]


def _stamp(path: Path) -> tuple[int, int]:
    """Return what changes when a file does."""
    status = path.stat() if path.is_file() else None
    return (0, 0) if status is None else (status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=256)
def _last_values(path: Path, stamp: tuple[int, int]) -> Row:
    """Return the last value of each key of a log; the page asks for it every few seconds, of every
    run."""
    last: Row = {}
    for _, row in read_jsonl(path):
        last |= row
    return last


def _progress(path: Path, run: FoundRun) -> str:
    """Return in words how far a run is."""
    manifest = manifest_beside(path / MANIFEST)
    if run.verb == "train" and (path / "log.jsonl").is_file():
        last = _last_values(path / "log.jsonl", _stamp(path / "log.jsonl"))
        max_steps = -1  # of the Trainer: as many as its epochs take
        if isinstance(manifest, TrainManifest):
            max_steps = manifest.recipe.trainer.get("max_steps", max_steps)
        of = f" of {max_steps}" if max_steps > 0 else ""
        loss = f", loss {last['loss']:.3f}" if isinstance(last.get("loss"), float) else ""
        return f"step {last.get('step', 0)}{of}{loss}"
    if run.state == "running" and run.verb in _WORK:
        file, what = _WORK[run.verb]
        n = (path / file).read_bytes().count(b"\n") if (path / file).is_file() else 0
        return f"{n:,} {what} so far"
    if isinstance(manifest, AugmentManifest | QuestionsManifest):
        return f"{manifest.counts.got:,} of {manifest.counts.asked:,}"
    return ""


@lru_cache(maxsize=8)
def _items(path: Path, verb: str, title: str, stamp: tuple[int, int]) -> list[tuple[Item, str]]:
    """Return the items of a file, each with the text that is searched. `stamp` tells whether the
    file has changed."""
    items = []
    rows = (
        {row["id"]: row for _, row in read_jsonl(path)} if title == "accepted" else {}
    )  # of two with one id the last
    for row in rows.values() or (row for _, row in read_jsonl(path)):
        for item in _items_of(verb, title, row):
            texts = [
                item["text"],
                item["tag"],
                *item["about"],
                *(text for pair in item["pairs"] for text in pair),
            ]
            items.append((item, "\n".join(texts).casefold()))
    return items


def _items_of(verb: str, title: str, row: Row) -> Iterator[Item]:
    """Yield the items of a row of a list."""

    def item(text: object, tag: object = "", about: Sequence[object] = (), **more: Any) -> Item:
        pairs = [
            (label, str(value)[:_LONGEST])
            for label, value in more.pop("pairs", ())
            if value not in (None, "")
        ]
        return {"text": str(text)[:_LONGEST], "tag": str(tag), "about": [str(part) for part in about if part],
                "pairs": pairs, **more}  # fmt: skip

    if title == "accepted":
        texts = (row["text"], *row.get("more", ())) if row["text"] else ()
        for index, text in enumerate(texts):
            yield item(text, row["style"], (row["document_id"],), id=text_id(row["id"], index), passage=row["passage_id"],
                       edit={"text": text})  # fmt: skip
    elif title == "refused" and verb == "augment":
        about, why = (row["style"], row["document_id"]), [("why", row["detail"])]
        yield item(row["text"], row["reason"], about, id=row["id"], passage=row["passage_id"], pairs=why,
                   edit={"text": row["text"]})  # fmt: skip
    elif title == "passages":
        if row.get("origin") == "original":
            yield item(row["text"], "", (row["document_id"],))
    elif title == "changed answers":

        def choice(key: str) -> object:
            return row["choices"][row[key]] if isinstance(row.get(key), int) else row.get(key)

        pairs = [
            ("correct", choice("gold")),
            ("base answered", choice("base_chosen")),
            ("now", choice("chosen")),
        ]
        pairs += [("passage", passage["text"]) for passage in row.get("passages", ())]
        yield item(
            row["question"],
            row["change"],
            (row["arm"], row["question_set"], row.get("document_id")),
            pairs=pairs,
        )
    elif verb == "questions":
        choices = row.get("choices") or []
        answer = (
            choices[row["answer"]]
            if choices
            else row["answers"][0]
            if row.get("answers")
            else row.get("answer", "")
        )
        wrong = [choice for choice in choices if choice != answer] or row.get("wrong", [])
        pairs = [("answer", answer), *(("wrong", text) for text in wrong), ("sentence", row.get("sentence")),
                 ("why", row.get("detail"))]  # fmt: skip
        edit = {"question": row.get("question", ""), "answer": answer, "wrong": wrong}
        yield item(row.get("question", "no question"), row.get("reason", ""), (row.get("document_id"),), pairs=pairs,
                   edit=edit, id=row.get("id", ""))  # fmt: skip
    elif title == "documents":
        yield item(
            row.get("text", ""),
            row.get("language", ""),
            (row.get("title"), row.get("source"), row.get("id")),
        )
    elif title == "skipped":
        yield item(row.get("detail", ""), row.get("reason", ""), (row.get("where"),))
    else:
        pairs = [
            (key.replace("_", " "), row.get(key))
            for key in ("kept", "version", "words_only_here", "words_only_there")
        ]
        yield item(row.get("dropped", ""), row.get("how", ""), pairs=pairs)


@lru_cache(maxsize=2)
def _passages(path: Path, stamp: tuple[int, int]) -> dict[str, str]:
    """Return the passages of a corpus by id; {} where it does not hold the originals."""
    rows = (row for _, row in read_jsonl(path)) if path.is_file() else ()
    return {row["id"]: row["text"][:_LONGEST] for row in rows if row.get("origin") == "original"}


class Server(ThreadingHTTPServer):
    """Serves a view at `url`, whose token nobody can guess."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        """Raise `InputError` if the port is taken."""
        self.view, self.token = View(folder), secrets.token_urlsafe(24)
        html = (files("kinject.view") / "page.html").read_text("utf-8")
        self.page, self.policy = (
            html.encode(),
            f"{policy_of(html)}; connect-src 'self'; frame-ancestors 'none'",
        )
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise InputError(
                f"--port {port}: {error.strerror or error}. Choose another, or 0 for any."
            ) from error
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}
        self.url = f"http://127.0.0.1:{self.server_port}/{self.token}/"


_SANDBOX = "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
"""The policy of a run's own page: it reaches nothing, not even this server."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 60

    def do_GET(self) -> None:
        """Answer the page, a run's page, or JSON."""
        self._answer(self._get)

    def do_POST(self) -> None:
        """Answer a decision or a question."""
        self._answer(self._post)

    def _answer(self, method: Callable[[str, dict[str, str]], None]) -> None:
        try:
            parts = urlsplit(self.path)
            token, _, route = parts.path.removeprefix("/").partition("/")
            if self.headers.get("Host") not in self.server.hosts:
                raise _RefusedError(403, "another host")
            if not secrets.compare_digest(token.encode(), self.server.token.encode()):
                raise _RefusedError(
                    403, "the address lacks its token: take the one that kinject view printed"
                )
            method(route, {key: values[-1] for key, values in parse_qs(parts.query).items()})
        except _RefusedError as error:
            self._json({"error": str(error)}, error.status)
        except KinjectError as error:
            self._json({"error": str(error)}, 400)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            self._json({"error": f"a request or a file of another shape ({error!r:.200})"}, 400)
        except ConnectionError:
            pass  # the browser has left

    def _get(self, route: str, query: dict[str, str]) -> None:
        view = self.server.view
        if route == "":
            self._send(self.server.page, "text/html; charset=utf-8", self.server.policy)
        elif route == "runs":
            self._json({"folder": str(view.folder.resolve()), "runs": view.runs()})
        elif route == "log":
            self._json(view.log(query["run"]))
        elif route == "numbers":
            self._json(view.numbers(query["run"]))
        elif route == "rows":
            offset, limit = (
                int(query.get(key, default)) for key, default in (("offset", "0"), ("limit", "50"))
            )
            if offset < 0 or limit < 1:
                raise _RefusedError(400, "offset from 0, limit from 1")
            self._json(
                view.rows(
                    query["run"],
                    query["list"],
                    query.get("q", ""),
                    query.get("tag", ""),
                    offset,
                    limit,
                )
            )
        elif route == "report":
            path = view.folder / view.find(query["run"]).run_dir / "report.html"
            if not path.is_file():
                raise _RefusedError(404, "this run has no report.html")
            self._send(path.read_bytes(), "text/html; charset=utf-8", _SANDBOX)
        else:
            raise _RefusedError(404, "no such address")

    def _post(self, route: str, query: dict[str, str]) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if self.headers.get_content_type() != "application/json" or length > _MOST_BYTES:
            raise _RefusedError(400, f"JSON of at most {_MOST_BYTES} bytes is needed")
        value = json.loads(self.rfile.read(length))
        if route == "decide":
            self.server.view.decide(value["run"], value["list"], value)
            self._json({})
        elif route == "chat":
            if not isinstance(value["question"], str) or not value["question"].strip():
                raise _RefusedError(400, "question: a text that is not empty")
            self.server.view.find(value["run"])
            self._head("application/x-ndjson", "default-src 'none'")
            try:
                self.server.view.ask(
                    value["run"], value["question"], self._event, again=bool(value.get("again"))
                )
            except KinjectError as error:
                self._event({"error": str(error)})
        else:
            raise _RefusedError(404, "no such address")

    def _event(self, value: Item) -> None:
        self.wfile.write(json.dumps(value).encode() + b"\n")
        self.wfile.flush()

    def _json(self, value: object, status: int = 200) -> None:
        self._send(json.dumps(value).encode(), "application/json", "default-src 'none'", status)

    def _send(self, body: bytes, kind: str, policy: str, status: int = 200) -> None:
        self._head(kind, policy, status, len(body))
        self.wfile.write(body)

    def _head(self, kind: str, policy: str, status: int = 200, length: int | None = None) -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff",
                   "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
                   "Cross-Origin-Resource-Policy": "same-origin"}  # fmt: skip
        for name, text in (
            headers | ({} if length is None else {"Content-Length": str(length)})
        ).items():
            self.send_header(name, text)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing for a request."""
