"""kinject view: one local page over a folder of runs, served by the standard library's server.

It listens on 127.0.0.1 alone, and every path begins with a random token. A request that names
another host is refused, so that no name of the web can be led here (DNS rebinding). page.html shows
everything as text.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlencode, urlsplit

from pydantic_core import to_jsonable_python

from kinject.augment.store import read_decisions, write_decision
from kinject.disk import LOCK, FoundRun, Row, find_runs, fix_for, listed_runs, next_command
from kinject.errors import InputError, KinjectError
from kinject.eval.chat import Chat, ChatSetup, base_revision, find_models, open_chat
from kinject.manifests import (
    MANIFEST,
    AugmentManifest,
    Manifest,
    QuestionsManifest,
    TrainManifest,
    documents_behind,
    manifest_beside,
)
from kinject.report.figures import thinned
from kinject.report.files import read_report, read_view
from kinject.report.formatting import arm_label
from kinject.report.page import policy_of
from kinject.report.words import write_opening
from kinject.view.board import POSTS, Board, RefusedError
from kinject.view.lists import ITEMS, LISTS, PASSAGES, Item, Json
from kinject.view.rows import Latest, read_rows

if TYPE_CHECKING:
    from kinject.models import LoadedModel

_WORK = {
    "augment": ("variants.jsonl", "accepted"),
    "questions": ("outcomes.jsonl", "passages"),
    "eval": ("answers.jsonl", "answers"),
}
"""Verb -> the file that grows while it runs, and what its rows are."""
_DECIDED = ("augment", "questions")
"""Verbs whose texts a person keeps, drops or edits."""
_NOT_DECIDED = "decisions are for the texts of kinject augment and kinject questions"
_DECISIONS = ("keep", "drop", "edit", "undo")
_MARKS = (LOCK, MANIFEST, "report.json")
"""Files that are written when a run starts and when it ends."""
_MOST_BARS = 24  # of a study's many arms; the report has all
_MOST_ROWS = 200
_MOST_BYTES = 2**20  # of a request
_LOGGED = ("loss", "learning_rate", "grad_norm", "epoch")
_MOST_NEW_TOKENS = 128
_OTHER_SHAPE = (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError)
"""What a row or a request of another shape raises: others may have written them."""


@dataclass
class View:
    """The runs of a folder. Chat models are loaded at the first question, those of one run at a
    time."""

    folder: Path
    _deciding: threading.Lock = field(default_factory=threading.Lock)
    _chatting: threading.Lock = field(default_factory=threading.Lock)
    _chat: tuple[tuple[str, float], Chat, list[tuple[str, LoadedModel, bool]]] | None = None

    def found(self) -> dict[str, FoundRun]:
        """Return the runs by name."""
        below = "runs" if (self.folder / "runs").is_dir() else ""
        runs = {run.run_dir.as_posix(): run for run in find_runs(self.folder, below)}
        return {name: run for name, run in runs.items() if run.state != "not started"}

    def find(self, name: str) -> FoundRun:
        """Return a run by its name. Raises `RefusedError` if there is none."""
        run = self.found().get(name)
        if run is None:
            raise RefusedError(404, f"no such run: {name}")
        return run

    def runs(self) -> list[Item]:
        """Return what the overview shows of each run, the newest first: state, progress, pages,
        lists."""
        items = [self._overview(name, run) for name, run in self.found().items()]
        return sorted(items, key=itemgetter("at"), reverse=True)

    def headline(self, name: str) -> Item:
        """Return the first sentences of a report, and the bars of its headline figure: question
        set, arm, accuracy with its interval, accuracy of guessing."""
        path = self.folder / self.find(name).run_dir / "report.json"
        if not path.is_file():
            return {"text": "", "bars": []}
        return _HEADLINES.get(path)

    def _overview(self, name: str, run: FoundRun) -> Item:
        path = self.folder / run.run_dir
        lists = LISTS.get(run.verb, {})
        n_decisions = 0
        try:
            progress = _progress(path, run)
            if run.verb in _DECIDED:
                n_decisions = len(read_decisions(path))
        # One damaged file must not hide the other runs.
        except (KinjectError, *_OTHER_SHAPE, OSError) as error:
            progress = f"damaged: {error}"
        return {
            "name": name,
            "verb": run.verb,
            "state": run.state,
            "command": run.command,
            "lists": [title for title, listed in lists.items() if (path / listed.file).is_file()],
            "progress": progress,
            "page": (path / "report.html").is_file(),
            "log": (path / "log.jsonl").is_file(),
            "chat": run.verb == "train" and (path / "model").is_dir(),
            "decisions": n_decisions,
            "at": max(0.0, *(_written(path / file) for file in _MARKS)),
        }

    def log(self, name: str) -> Item:
        """Return the curves of a training: name -> [steps, values], null where a value is not
        finite.

        Of rows with one step the last counts, as after a resume; of many steps, the means of
        equally many neighbours.
        """
        values: dict[str, dict[float, float]] = {}
        for row in read_rows(self.folder / self.find(name).run_dir / "log.jsonl"):
            for key, value in row.items():
                if key in _LOGGED or key.startswith("eval_"):
                    values.setdefault(key, {})[row["step"]] = math.nan if value is None else value
        return {key: thinned(sorted(curve.items())) for key, curve in values.items()}

    def numbers(self, name: str) -> Item:
        """Return the numbers of a finished run, as its manifest has them."""
        manifest = manifest_beside(self.folder / self.find(name).run_dir / MANIFEST)
        keys = ("counts", "recipe", "versions")
        if manifest is None:
            return dict.fromkeys(keys)
        return {key: manifest.as_written[key] for key in keys}

    def rows(self, name: str, title: str, query: Query) -> Item:
        """Return the items of a list that answer `query`, and how many there are by tag."""
        run = self.find(name)
        path = self.folder / run.run_dir
        listed = LISTS.get(run.verb, {}).get(title)
        if listed is None or not (path / listed.file).is_file():
            raise RefusedError(404, f"{name} has no list {title}")
        items = ITEMS[run.verb, title].get(path / listed.file)
        matching = [item for item, text in items if query.matches(text)]
        tags = Counter(item["tag"] for item in matching if item["tag"])
        if query.tag:
            matching = [item for item in matching if item["tag"] == query.tag]
        decisions, shown = read_decisions(path), []
        passages: Mapping[str, str] = {}
        if run.verb == "augment":
            passages = PASSAGES.get(path / "corpus.jsonl")
        for item in matching[query.offset : query.offset + min(query.limit, _MOST_ROWS)]:
            decision = decisions.get(item.get("id", ""))
            passage = passages.get(item.get("passage", ""), "")
            shown.append(item | {"decision": decision, "passage": passage})
        counts = {"matched": len(matching), "total": len(items)}
        return {"items": shown, **counts, "tags": dict(tags.most_common())}

    def decide(self, name: str, title: str, row: Row) -> None:
        """Write a decision on a text or question of a list; its run honours it when it starts
        again."""
        run = self.find(name)
        path = self.folder / run.run_dir
        listed = LISTS.get(run.verb, {}).get(title)
        if run.verb not in _DECIDED or listed is None or not (path / listed.file).is_file():
            raise RefusedError(400, _NOT_DECIDED)
        if row.get("decision") not in _DECISIONS:
            raise RefusedError(400, "decision: keep, drop, edit or undo")
        items = ITEMS[run.verb, title].get(path / listed.file)
        edits = [
            item["edit"] for item, _ in items if item.get("id") and item["id"] == row.get("id")
        ]
        if not edits:
            raise RefusedError(404, "no such text")
        edited = _edited(row, edits[0]) if row["decision"] == "edit" else {}
        at = datetime.now(UTC).isoformat(timespec="seconds")
        decision = {"id": row["id"], "decision": row["decision"], **edited, "at": at}
        # Each request has a thread of its own.
        with self._deciding:
            write_decision(path, decision)

    def ask(
        self, name: str, question: str, write: Callable[[Item], None], *, again: bool = False
    ) -> None:
        """Write the answers of base, trained, and trained model with passages, word by word, as
        events.

        Asked `again`, they have forgotten the turns before.
        """
        path = self.folder / self.find(name).run_dir
        # With the time: the run may have been trained again since its models were loaded.
        training = (name, _written(path / MANIFEST))
        with self._chatting:
            if self._chat is None or self._chat[0] != training:
                write({"status": "loading the models"})
                self._chat = None  # the memory of one run's models
                self._chat = (training, *_open_chat(path))
            _, chat, columns = self._chat
            if again:
                chat.reset()
            write({"columns": [label for label, *_ in columns]})
            passages = chat.passages(question)
            write({"passages": passages})
            for label, loaded, sees in columns:
                # Bound by the default: the loop changes `label`.
                def part(text: str, label: str = label) -> None:
                    write({"label": label, "text": text})

                chat.reply(label, loaded, question, passages if sees else [], part)
        write({"status": ""})


def _edited(row: Row, edit: Mapping[str, str | list[str]]) -> Row:
    """Return the texts of an edit, by the fields of the item. Raises `RefusedError` for an empty
    one."""
    edited = {key: row.get(key) for key in edit}
    for key, value in edited.items():
        texts = value if isinstance(edit[key], list) else [value]
        if not isinstance(texts, list) or not texts or not all(map(_is_text, texts)):
            raise RefusedError(400, f"{key}: a text that is not empty")
    return edited


def _is_text(value: Json) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _open_chat(run_dir: Path) -> tuple[Chat, list[tuple[str, LoadedModel, bool]]]:
    """Return the chat of a training run, and its columns: label, model, whether it sees
    passages."""
    documents = documents_behind(run_dir)
    chat = open_chat(
        ChatSetup(
            find_models(str(run_dir), None),
            documents,
            max_new_tokens=_MOST_NEW_TOKENS,
            base_revision=base_revision(str(run_dir), None),
        )
    )
    columns = [
        ("base" if label == "base" else "trained", loaded, False)
        for label, loaded in chat.loaded.items()
    ]
    if documents:
        # The same model as in the column before: it is loaded once.
        columns.append(("trained with passages", columns[-1][1], True))
    return chat, columns


def _written(path: Path) -> float:
    """Return when a file was written, 0 where there is none."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _headline(path: Path) -> Item:
    report = read_report(path)
    view = read_view(path.parent, report)
    bars = []
    for result in view.headline_results():
        arm = view.with_model(arm_label(result), result.model)
        interval = [result.low, result.accuracy, result.high]
        bars.append([result.question_set, arm, *interval, result.chance])
    return {"text": write_opening(view).effect, "bars": bars[:_MOST_BARS]}


_HEADLINES = Latest(_headline, most=8)


def _last_values(path: Path) -> Row:
    """Return the last value of each key of a log."""
    last: Row = {}
    for row in read_rows(path):
        last |= row
    return last


_LAST_VALUES = Latest(_last_values, most=256)
"""The page asks for them every few seconds, of every run."""


def _progress(path: Path, run: FoundRun) -> str:
    """Return in words how far a run is."""
    manifest = manifest_beside(path / MANIFEST)
    log = path / "log.jsonl"
    if run.verb == "train" and log.is_file():
        return _training_progress(_LAST_VALUES.get(log), manifest)
    if run.state == "running" and run.verb in _WORK:
        file, what = _WORK[run.verb]
        # Lines are counted, not read: the page asks for it every few seconds.
        n = (path / file).read_bytes().count(b"\n") if (path / file).is_file() else 0
        return f"{n:,} {what} so far"
    if isinstance(manifest, AugmentManifest | QuestionsManifest):
        return f"{manifest.counts.got:,} of {manifest.counts.asked:,}"
    return ""


def _training_progress(last: Row, manifest: Manifest | None) -> str:
    """Return ``step 60 of 100, loss 1.234``."""
    max_steps = -1  # of the Trainer: as many as its epochs take
    if isinstance(manifest, TrainManifest):
        max_steps = manifest.recipe.trainer.get("max_steps", max_steps)
    progress = f"step {last.get('step', 0)}"
    if isinstance(max_steps, int) and max_steps > 0:
        progress += f" of {max_steps}"
    if isinstance(last.get("loss"), float):
        progress += f", loss {last['loss']:.3f}"
    return progress


@dataclass(frozen=True)
class Query:
    """Which items of a list are shown: those with all words of `words` and with `tag`, from
    `offset` on."""

    words: tuple[str, ...] = ()
    tag: str = ""
    offset: int = 0
    limit: int = 50

    def matches(self, text: str) -> bool:
        """Return whether `text`, in lower case, holds all words."""
        return all(word in text for word in self.words)


class Server(ThreadingHTTPServer):
    """Serves a view at `url`, whose token nobody can guess."""

    # Ctrl-C does not wait for an answer that is being written.
    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0, board: Board | None = None) -> None:
        """Raise `InputError` if the port is taken. Without a `board` no step can be started."""
        self.view, self.token = View(folder), secrets.token_urlsafe(24)
        self._board = board
        html = (files("kinject.view") / "page.html").read_text("utf-8")
        self.page = html.encode()
        # The page gets its rows from this server, and no other page may show it in a frame.
        self.policy = f"{policy_of(html)}; connect-src 'self'; frame-ancestors 'none'"
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise InputError(
                f"--port {port}: {error.strerror or error}. Choose another, or 0 for any."
            ) from error
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}
        self.url = f"http://127.0.0.1:{self.server_port}/{self.token}/"

    @property
    def board(self) -> Board:
        """The board of the folder. Raises `RefusedError` if there is none."""
        if self._board is None:
            raise RefusedError(404, "steps start where recipes/ and runs/ lie: kinject view there")
        return self._board

    def server_close(self) -> None:
        """Stop the step that runs, then close the socket."""
        if self._board is not None:
            self._board.close()
        super().server_close()

    def page_key(self, name: str) -> str:
        """Return the token in the address of a run's own page, which opens nothing else: no policy
        keeps its script from leading the browser, with that address, to another site."""
        return hashlib.blake2b(name.encode(), key=self.token.encode(), digest_size=24).hexdigest()


_PAGE_OF_RUN = "page"
_SANDBOX = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data:"
)
"""The policy of a run's own page: it reaches nothing, not even this server."""


_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the address holds the token
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def _read_query(query: Mapping[str, str]) -> Query:
    """Return which items a request asks for. Raises `RefusedError` for numbers out of range."""
    offset, limit = int(query.get("offset", "0")), int(query.get("limit", "50"))
    if offset < 0 or limit < 1:
        raise RefusedError(400, "offset from 0, limit from 1")
    words = query.get("q", "").casefold().split()
    return Query(tuple(words), query.get("tag", ""), offset, limit)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 60

    def do_GET(self) -> None:
        """Answer the page, a run's page, or JSON."""
        self._answer_connected(self._get)

    def do_POST(self) -> None:
        """Answer a decision or a question."""
        self._answer_connected(self._post)

    def _answer_connected(self, method: Callable[[str, dict[str, str]], None]) -> None:
        try:
            self._answer(method)
        except (ConnectionError, TimeoutError):
            self.close_connection = True  # the browser has left, or sends less than it announced

    def _answer(self, method: Callable[[str, dict[str, str]], None]) -> None:
        try:
            parts = urlsplit(self.path)
            token, _, route = parts.path.removeprefix("/").partition("/")
            query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
            if self.headers.get("Host") not in self.server.hosts:
                raise RefusedError(403, "another host")
            needed = self.server.token
            if route == _PAGE_OF_RUN:
                needed = self.server.page_key(query["run"])
            # In constant time; as bytes, because `compare_digest` takes no other text than ASCII.
            if not secrets.compare_digest(token.encode(), needed.encode()):
                raise RefusedError(
                    403, "the address lacks its token: take the one that kinject view printed"
                )
            method(route, query)
        except RefusedError as error:
            self._json({"error": str(error)}, error.status)
        except KinjectError as error:
            self._json({"error": str(error)}, 400)
        except _OTHER_SHAPE as error:
            self._json({"error": f"a request or a file of another shape ({error!r:.200})"}, 400)
        except FileNotFoundError as error:  # its run deleted it meanwhile
            self._json({"error": f"{error.filename}: is not there any more"}, 404)
        except (ConnectionError, TimeoutError):
            raise
        except OSError as error:  # a full disk, no more open files, a path that is too long
            self._json({"error": f"{error.strerror}. {fix_for(error)}"}, 500)

    def _get(self, route: str, query: dict[str, str]) -> None:
        view = self.server.view
        if route == "":
            self._send(self.server.page, "text/html; charset=utf-8", self.server.policy)
        elif route == "runs":
            found = {"folder": str(view.folder.resolve()), "runs": view.runs()}
            self._json(found | {"next": next_command(listed_runs(view.folder))})
        elif route == "headline":
            self._json(view.headline(query["run"]))
        elif route == "board":
            self._json(self.server.board.state())
        elif route == "form":
            self._json(self.server.board.form(query["recipe"]))
        elif route == "log":
            self._json(view.log(query["run"]))
        elif route == "numbers":
            self._json(view.numbers(query["run"]))
        elif route == "rows":
            self._json(view.rows(query["run"], query["list"], _read_query(query)))
        elif route in ("report", _PAGE_OF_RUN):
            path = view.folder / view.find(query["run"]).run_dir / "report.html"
            if not path.is_file():
                raise RefusedError(404, "this run has no report.html")
            if route == "report":
                address = f"/{self.server.page_key(query['run'])}/{_PAGE_OF_RUN}"
                self._redirect(f"{address}?{urlencode({'run': query['run']})}")
            else:
                self._send(path.read_bytes(), "text/html; charset=utf-8", _SANDBOX)
        else:
            raise RefusedError(404, "no such address")

    def _post(self, route: str, query: dict[str, str]) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        # A form of another site cannot send JSON.
        is_json = self.headers.get_content_type() == "application/json"
        # A negative length would read until the browser leaves.
        if not is_json or not 0 <= length <= _MOST_BYTES:
            raise RefusedError(400, f"JSON of at most {_MOST_BYTES} bytes is needed")
        # Browsers name the page that sends; the sandboxed report of a run is "null".
        origin = self.headers.get("Origin", "")
        if origin and origin.removeprefix("http://") not in self.server.hosts:
            raise RefusedError(403, "another page")
        value = json.loads(self.rfile.read(length))
        if route == "decide":
            self.server.view.decide(value["run"], value["list"], value)
            self._json({})
        elif route in POSTS:
            self.server.board.post(route, value)
            self._json({})
        elif route == "chat":
            if not _is_text(value["question"]):
                raise RefusedError(400, "question: a text that is not empty")
            # Before the head is sent: an unknown run still gets its status.
            self.server.view.find(value["run"])
            self._head("application/x-ndjson", "default-src 'none'")
            try:
                self.server.view.ask(
                    value["run"], value["question"], self._event, again=bool(value.get("again"))
                )
            # The head has been sent, so the error is one more event.
            except (KinjectError, *_OTHER_SHAPE) as error:
                self._event({"error": str(error)})
        else:
            raise RefusedError(404, "no such address")

    def _redirect(self, address: str) -> None:
        self.send_response(303)
        self.send_header("Location", address)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _event(self, value: Item) -> None:
        self.wfile.write(json.dumps(value).encode() + b"\n")
        self.wfile.flush()

    def _json(self, value: Json, status: int = 200) -> None:
        # JSON, and so a browser, has neither NaN nor infinities, which a file may hold.
        plain = to_jsonable_python(value, inf_nan_mode="null")
        self._send(json.dumps(plain).encode(), "application/json", "default-src 'none'", status)

    def _send(self, body: bytes, kind: str, policy: str, status: int = 200) -> None:
        self._head(kind, policy, status, len(body))
        self.wfile.write(body)

    def _head(self, kind: str, policy: str, status: int = 200, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", policy)
        for name, text in _HEADERS.items():
            self.send_header(name, text)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, format: str, *arguments: str) -> None:
        """Print nothing for a request."""
