"""Public data sets by name: fetched at a pinned revision, and written as the recipes of the studies
read them."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from importlib.resources import files
from itertools import islice, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import Request, urlopen
from xml.sax.saxutils import escape

import yaml

from kinject.corpus.spans import Json
from kinject.disk import (
    Journal,
    Row,
    file_hash,
    lock_dir,
    read_jsonl,
    refuse_existing,
    write_json,
    write_jsonl,
    write_text,
)
from kinject.errors import InputError
from kinject.hub import unreachable_reason
from kinject.recipe.check import suggestion
from kinject.recipe.makers import PUBLIC_FILES
from kinject.terminal import Progress, show
from kinject.version import package_version

RECORDS = "sources"
"""Folder, beside the data, of the records: NAME.json has revision, licence and the hash of every
file written."""
_PREFIX = ".fetched-"
_SPLITS = {"dev": "dev", "validation": "val", "test": "test"}
_PAGES = dict(zip(PUBLIC_FILES["replay"], (500, 20_000), strict=True))
"""File of general text -> pages in it."""
API = "https://en.wikipedia.org/w/api.php"
CONTACT = "KINJECT_CONTACT"
"""Variable of the environment with an e-mail or web address: Wikipedia asks who sends requests."""
_PAUSE = 1.0
"""Seconds between requests: its manual wants one at a time, and no more is needed for 250
articles."""
_MAX_LAG, _ATTEMPTS, _LONGEST_WAIT = 5, 6, 120.0
"""Seconds by which its databases may lag before a request waits; how often a request is sent, and
the longest wait that a server can ask for."""
_TIMEOUT = 60.0
_BUSY = (429, 500, 502, 503, 504)
_HEAD = (
    '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="en">\n'
)


@dataclass(frozen=True)
class DataSet:
    """A public data set: its `source` and `config` on the hub, at `revision`. `write` makes its
    `outputs` in a folder."""

    name: str
    about: str
    licence: str
    size: str
    source: str
    config: str | None
    revision: str
    outputs: tuple[str, ...]
    write: Callable[[DataSet, Path], None]


def find_data(names: Sequence[str]) -> list[DataSet]:
    """Return the data sets with these names. Raises `InputError` for one that is not known."""
    for name in names:
        if name not in DATA_SETS:
            raise InputError(f"found {name!r}.{suggestion(name, DATA_SETS)}")
    return [DATA_SETS[name] for name in dict.fromkeys(names)]


def get_data(data: DataSet, folder: Path) -> list[Path]:
    """Fetch a data set into `folder` and return its files, [] if its record is there. Files are
    written whole or not at all.

    Raises `InputError` if other files are in the way or the hub does not give it, and `DiskError`.
    """
    record = folder / RECORDS / f"{data.name}.json"
    outputs = [folder / name for name in data.outputs]
    with lock_dir(folder / RECORDS):
        missing = [path for path in outputs if not path.exists()]
        if _is_there(data, folder):
            return []
        if not record.exists():
            refuse_existing(outputs)
        for left in folder.glob(f"{_PREFIX}*"):  # of a fetch that was killed
            shutil.rmtree(left)
        # In the same folder, since a rename does not leave a file system.
        with TemporaryDirectory(prefix=_PREFIX, dir=folder) as made:
            data.write(data, Path(made))
            written: list[Path] = []
            for path in outputs:
                copy = Path(made) / path.name
                written += filter(Path.is_file, sorted([copy, *copy.rglob("*")]))
            hashes = {str(path.relative_to(made)): file_hash(path) for path in written}
            about = {
                "name": data.name,
                "source": data.source,
                "revision": data.revision,
                "licence": data.licence,
            }
            # First: after a kill between two files, the next fetch knows the one as its own, and
            # makes the other again.
            write_json(record, {**about, "files": hashes})
            for path in missing:
                os.replace(Path(made) / path.name, path)
    return [folder / name for name in hashes]


def _is_there(data: DataSet, folder: Path) -> bool:
    """Return whether a data set was fetched into `folder`, with each of its files."""
    if not (folder / RECORDS / f"{data.name}.json").exists():
        return False
    return all((folder / name).exists() for name in data.outputs)


def _rows(data: DataSet, split: str, *, streaming: bool = False) -> Iterator[Row]:
    """Yield the rows of a split, from the hub or its local cache. Raises `InputError` if neither
    has them."""
    import datasets

    try:
        yield from datasets.load_dataset(
            data.source, data.config, split=split, revision=data.revision, streaming=streaming
        )
    except Exception as error:  # the library raises whatever its readers and the network raise
        reason = unreachable_reason() or " ".join(str(error).split())[:200]
        raise InputError(
            f"{data.source}: {reason}. Fetch it where there is a network, "
            "or copy the hub's cache (HF_HOME) from there."
        ) from error


def _write_mmlu(data: DataSet, folder: Path) -> None:
    """Write MMLU in its authors' layout: dev/, val/ and test/ with a CSV without header for each
    subject."""
    for split, name in _SPLITS.items():
        by_subject = defaultdict[str, list[list[str]]](list)
        for row in _rows(data, split):
            by_subject[row["subject"]].append(
                [row["question"], *row["choices"], "ABCD"[row["answer"]]]
            )
        for subject, rows in sorted(by_subject.items()):
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows(rows)
            write_text(folder / "mmlu" / name / f"{subject}_{name}.csv", text.getvalue())


def _write_instructions(data: DataSet, folder: Path) -> None:
    """Write rows of prompt and completion: an instruction, the text that it is about, and its
    answer."""
    write_jsonl(folder / "instructions.jsonl", _instructions(data))


def _instructions(data: DataSet) -> Iterator[Row]:
    for row in _rows(data, "train"):
        task, context = row["instruction"].strip(), row["context"].strip()
        answer = row["response"].strip()
        if task and answer:
            prompt = "\n\n".join(filter(None, (task, context)))
            yield {"prompt": f"{prompt}\n\n", "completion": answer}


def _write_replay(data: DataSet, folder: Path) -> None:
    """Write general text: documents to replay, and others to watch."""
    # One stream for both files, so that no page to watch is among those to replay.
    rows = _rows(data, "train", streaming=True)
    for name, n in _PAGES.items():
        pages = (
            {"id": row["id"], "text": row["text"], "source": row["url"]} for row in islice(rows, n)
        )
        write_jsonl(folder / name, pages)


# Articles of Wikipedia by title and date, as one file of its export format, which the readers of
# documents read. A list of titles ships (wikipedia.yaml), no text. Which revision an article had on
# the date is known once it is fetched: the numbers stand beside the data, and a later fetch takes
# these.


@dataclass(frozen=True)
class ArticleList:
    """A list of titles: `date` is the day on which each article is wanted, `topics` has the titles
    by topic and category."""

    date: str
    topics: Mapping[str, Mapping[str, Sequence[str]]]

    def titles(self) -> list[str]:
        """Return every title once: the first of each category of each topic, then the second ones,
        so that an interrupted fetch has something of each."""
        categories: list[Sequence[str]] = []
        for by_category in self.topics.values():
            categories += by_category.values()
        found: dict[str, None] = {}
        for row in zip_longest(*categories):
            for title in row:
                # A category may be shorter than others.
                if title is not None:
                    found[title] = None
        return list(found)


def read_list(name: str) -> ArticleList:
    """Return the list `name` that ships."""
    values = yaml.safe_load(files("kinject.corpus").joinpath("wikipedia.yaml").read_text("utf-8"))
    entry = values[name]
    return ArticleList(str(entry["date"]), entry["topics"])


def write_articles(articles: ArticleList, path: Path, revisions: Path, journal: Path) -> None:
    """Write the articles to `path`, an export of MediaWiki, and their revisions to `revisions`.

    If `revisions` is there, its revisions are fetched, else those of the list's date. What is
    fetched is kept in `journal` with the date or revision that was wanted, so that an interrupted
    fetch resumes. Raises `InputError` if no contact is set, if Wikipedia does not answer, or if its
    list and the revisions differ.
    """
    contact = os.environ.get(CONTACT, "").strip()
    if contact and not (contact.isascii() and contact.isprintable()):
        raise InputError(
            f"{CONTACT}: found {contact!r:.80}, expected letters and signs of ASCII alone, as a "
            "header of a request holds them. Set it to your e-mail or web address."
        )
    if not contact:
        raise InputError(
            f"{CONTACT} is not set, and Wikipedia asks who sends requests. Set it to your e-mail "
            f"or web address: export {CONTACT}=name@example.org"
        )
    known: dict[str, int | None] = {}
    if revisions.is_file():
        known = {str(row["title"]): row["revision"] for _, row in read_jsonl(revisions)}
    client = _Client(contact)
    titles = articles.titles()
    # The list's date or the record may have changed since an interrupted fetch.
    wanted = {title: str(known.get(title, articles.date)) for title in titles}
    with Journal(journal) as kept:
        rows = {
            row["title"]: row for row in kept.rows if row.get("wanted") == wanted.get(row["title"])
        }
        n_done = len(rows.keys() & set(titles))
        with Progress("articles", len(titles), "articles", done=n_done) as progress:
            for title in titles:
                if title not in rows:
                    rows[title] = client.article(title, articles.date, known)
                    kept.append({**rows[title], "wanted": wanted[title]})
                    progress.advance()
    with_text = [rows[title] for title in titles if rows[title].get("wikitext")]
    if not with_text:
        raise InputError(f"{API}: none of the {len(titles)} articles was found.")
    write_text(path, f"{_HEAD}{''.join(map(_page, with_text))}</mediawiki>\n")
    # Of a missing one as well, so that a later fetch has the same articles.
    of_titles = [
        {"title": title, "revision": rows[title].get("revision"), "date": rows[title].get("date")}
        for title in titles
    ]
    write_jsonl(revisions, of_titles)


def missing_titles(revisions: Path) -> list[str]:
    """Return the titles of which there was no article, by the file of the revisions."""
    return [str(row["title"]) for _, row in read_jsonl(revisions) if row["revision"] is None]


@dataclass
class _Client:
    """Sends one request at a time, with pauses; `contact` is in its user agent."""

    contact: str
    _sent: float = 0.0

    def article(self, title: str, date: str, known: Mapping[str, int | None]) -> Row:
        """Return the row of an article in its known revision, else in that of the date; without
        text if there was none."""
        wanted: dict[str, str | int] = {
            "titles": title,
            "redirects": 1,  # an article that was moved since then
            "rvlimit": 1,
            "rvdir": "older",
            "rvstart": f"{date}T00:00:00Z",
        }
        if title in known:
            revision = known[title]
            if revision is None:
                return {"title": title, "revision": None}
            wanted = {"revids": revision}
        fixed: dict[str, str | int] = {
            "action": "query",
            "format": "json",
            "formatversion": 2,
            "maxlag": _MAX_LAG,
            "prop": "revisions",
            "rvprop": "ids|timestamp|sha1|content",
            "rvslots": "main",
        }
        answer = self._ask(fixed | wanted)
        try:
            pages = answer["query"].get("pages", [])
            if not pages or not pages[0].get("revisions"):
                if title in known:
                    raise _gone(title, known[title])
                return {"title": title, "revision": None}
            return _row(title, pages[0]["revisions"][0])
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise _unexpected(answer) from error

    def _ask(self, parameters: Mapping[str, str | int]) -> Any:
        """Return the answer of the API, asked again while it is busy."""
        reason = ""
        for attempt in range(_ATTEMPTS):
            self._pause(_PAUSE)
            wait = min(5.0 * 2**attempt, _LONGEST_WAIT)
            try:
                answer = self._get(parameters)
            except HTTPError as error:
                reason = f"HTTP {error.code}"
                if error.code not in _BUSY:
                    break
                wait = _retry_after(error, wait)
            except (URLError, HTTPException, OSError, ValueError) as error:
                # Of an answer that was cut: HTTPException where its length is known, else it is no
                # JSON (ValueError).
                reason = " ".join(str(error).split())[:200]
            else:
                if not isinstance(answer, dict) or "error" not in answer:
                    return answer
                fault = answer["error"]
                if not isinstance(fault, dict) or fault.get("code") != "maxlag":
                    raise _unexpected(answer)
                reason = "its databases lag behind"
            if attempt + 1 < _ATTEMPTS:
                time.sleep(wait)
        raise InputError(
            f"{API}: {reason}. The articles so far are kept; the same command resumes."
        )

    def _get(self, parameters: Mapping[str, str | int]) -> Any:
        agent = f"kinject/{package_version()} ({self.contact})"
        headers = {"User-Agent": agent, "Accept": "application/json"}
        request = Request(f"{API}?{urlencode(parameters)}", headers=headers)  # noqa: S310
        with urlopen(request, timeout=_TIMEOUT) as response:  # noqa: S310
            return json.loads(response.read())

    def _pause(self, seconds: float) -> None:
        """Wait until `seconds` have passed since the last request began."""
        time.sleep(max(0.0, self._sent + seconds - time.monotonic()))
        self._sent = time.monotonic()


def _retry_after(error: HTTPError, otherwise: float) -> float:
    """Return the seconds that the server wants to be left alone."""
    wanted = error.headers.get("Retry-After", "")
    if wanted.isdecimal():
        return min(float(wanted), _LONGEST_WAIT)
    return otherwise


def _row(title: str, revision: Mapping[str, Any]) -> Row:
    """Return the row of an article's revision; without text if it was a redirect then. Raises
    `InputError` for a text that is not the one of its checksum."""
    text = str(revision["slots"]["main"]["content"])
    # MediaWiki's own checksum of the text.
    digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    if revision.get("sha1", digest) != digest:
        raise InputError(
            f"{title}: the text has SHA-1 {digest}, and Wikipedia has {revision['sha1']}. Run the "
            "command again."
        )
    if text.lstrip().upper().startswith("#REDIRECT"):
        return {"title": title, "revision": None}
    return {
        "title": title,
        "revision": int(revision["revid"]),
        "date": str(revision["timestamp"]),
        "wikitext": text,
    }


def _gone(title: str, revision: int | None) -> InputError:
    """Return the error of a recorded revision that Wikipedia has deleted: without its text the data
    would be others than those of the record."""
    return InputError(
        f"{title}: Wikipedia no longer has its revision {revision}, which the record names. The "
        "articles so far are kept. Take the line of this title out of "
        f"{RECORDS}/NAME.revisions.jsonl to fetch the revision of the date, or set its revision to "
        "null to leave it out."
    )


def _unexpected(answer: Json) -> InputError:
    return InputError(
        f"{API}: an answer that is none of MediaWiki's query API: {str(answer)[:200]}. The "
        "articles so far are kept."
    )


def _page(row: Row) -> str:
    """Return an article as a page of the export format."""
    return (
        f"<page><title>{escape(row['title'])}</title><ns>0</ns><revision><id>{row['revision']}</id>"
        f"<timestamp>{row['date']}</timestamp>"
        f'<text xml:space="preserve">{escape(row["wikitext"])}</text></revision></page>\n'
    )


def _wikipedia_sets() -> Iterator[DataSet]:
    for name, about in (
        ("wikipedia-subjects", "articles on the five MMLU subjects of the paper"),
        ("current-events", "articles on events in the United States, August to November 2023"),
    ):
        articles = read_list(name)
        n_articles = len(articles.titles())
        yield DataSet(
            name=name,
            about=about,
            licence="CC BY-SA 4.0 (name Wikipedia and its authors, share alike)",
            size=f"{n_articles} articles, one request a second; {CONTACT} names who asks",
            source="en.wikipedia.org",
            config=None,
            revision=f"of {articles.date}",
            outputs=PUBLIC_FILES[name],
            write=_write_wikipedia,
        )


def _write_wikipedia(data: DataSet, folder: Path) -> None:
    """Write the articles of the list with the name of the data set, in the revisions that are
    recorded beside the data, if there is such a record."""
    records = folder.parent / RECORDS
    revisions = records / f"{data.name}.revisions.jsonl"
    journal = records / f".{data.name}.articles.jsonl"
    path = folder / data.outputs[0] / "articles.xml"
    path.parent.mkdir(parents=True)
    write_articles(read_list(data.name), path, revisions, journal)
    missing = missing_titles(revisions)
    if missing:
        show(f"{data.name}: no article on that date: {', '.join(missing)}")
    # The export holds them now.
    journal.unlink()


# Each at a commit, so that a study reads the same bytes wherever it is repeated.
_DATA_SETS = (
    DataSet(
        name="mmlu",
        about="four-choice questions on 57 subjects: five examples, validation and test of each",
        licence="MIT",
        size="4 MB from the hub, 8 MB written",
        source="cais/mmlu",
        config="all",
        revision="c30699e8356da336a370243923dbaf21066bb9fe",
        outputs=PUBLIC_FILES["mmlu"],
        write=_write_mmlu,
    ),
    DataSet(
        name="instructions",
        about="15,000 instructions with answers by people, for the arm of instruction tuning",
        licence="CC BY-SA 3.0 (name Databricks, share alike)",
        size="13 MB from the hub",
        source="databricks/databricks-dolly-15k",
        config=None,
        revision="bdd27f4d94b9c1f951818a7da7fd7aeea5dbff1a",
        outputs=PUBLIC_FILES["instructions"],
        write=_write_instructions,
    ),
    DataSet(
        name="replay",
        about="general text: 20,000 web pages to replay, 500 others to measure forgetting",
        licence="ODC-By 1.0 (name the source)",
        size="100 MB from the hub",
        source="HuggingFaceFW/fineweb-edu",
        config="sample-10BT",
        revision="87f09149ef4734204d70ed1d046ddc9ca3f2b8f9",
        outputs=PUBLIC_FILES["replay"],
        write=_write_replay,
    ),
    *_wikipedia_sets(),
)
DATA_SETS: Mapping[str, DataSet] = {data.name: data for data in _DATA_SETS}
"""Public data that the shipped recipes name, by name."""


def describe(data: DataSet, folder: Path) -> list[str]:
    """Return the description of a data set before it is fetched: source, size, licence, revision,
    files."""
    state = "writes"
    if _is_there(data, folder):
        state = "is there"
    files = ", ".join(str(folder / name) for name in data.outputs)
    return [
        f"{data.name}: {data.about}",
        f"  licence   {data.licence}",
        f"  size      {data.size}",
        f"  source    {data.source}, revision {data.revision}",
        f"  {state:<9} {files}",
    ]
