"""Public data sets by name: fetched at a pinned revision, checked, and written as the recipes of the studies read them."""

from __future__ import annotations

import csv
import hashlib
import io
import os
import shutil
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from kinject.disk import (
    Journal,
    file_hash,
    lock_dir,
    parse_json,
    read_bytes,
    read_jsonl,
    refuse_existing,
    write_json,
    write_jsonl,
    write_text,
)
from kinject.documents import write_general_text
from kinject.documents.readers import ReadOptions, read_file
from kinject.documents.text import import_extra
from kinject.errors import EndpointError, InputError
from kinject.hub import unreachable_reason
from kinject.recipe.check import suggestion
from kinject.terminal import Progress
from kinject.types import Document
from kinject.web import download, get_json

WIKIPEDIA = "https://en.wikipedia.org/w/api.php"
RECORDS = "sources"
"""Folder, beside the data, of the records: NAME.json has revision, licence and the hash of every file written."""
GENERAL_TEXT = "HuggingFaceFW/fineweb-edu@87f09149ef4734204d70ed1d046ddc9ca3f2b8f9:sample-10BT"
"""General text on the hub: web pages on many subjects (English, ODC-By 1.0)."""
_SPLITS = {"dev": "dev", "validation": "val", "test": "test"}
_LONGEST_LIST = 500  # titles of one answer
_ATTEMPTS = 20
_LAG = 5.0  # seconds, as the API's manual wants
_MOST_OF_CATEGORY = 400  # articles of one subject or month, in the order of the API


@dataclass(frozen=True)
class DataSet:
    """A public data set. `outputs` are below the folder of the data.

    `files` maps a file at the source to its SHA-256. `categories` of Wikipedia belong to a topic; then `revision` is a date.
    """

    name: str
    about: str
    licence: str
    size: str
    source: str
    revision: str
    outputs: tuple[str, ...]
    write: Callable[[DataSet, Path, Path, Path | None], None]
    files: Mapping[str, str] = field(default_factory=dict)
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Fetched:
    """A data set that is there. `was_there`: nothing had to be fetched."""

    data: DataSet
    paths: tuple[Path, ...]
    was_there: bool


def find_data(names: Sequence[str]) -> list[DataSet]:
    """Return the data sets with these names. Raises `InputError` for one that is not known."""
    for name in names:
        if name not in DATA_SETS:
            raise InputError(f"found {name!r}.{suggestion(name, DATA_SETS)}")
    return [DATA_SETS[name] for name in dict.fromkeys(names)]


def command_for(path: str) -> str:
    """Return the command that fetches the public data at `path`, "" if it is none that a shipped recipe names."""
    names = [
        name
        for name, data in DATA_SETS.items()
        for output in data.outputs
        if Path(path).is_relative_to(f"data/{output}")
    ]
    return f"kinject recipes data get {names[0]}" if names else ""


def get_data(data: DataSet, folder: Path, copy: Path | None = None) -> Fetched:
    """Fetch a data set into `folder`, or read a `copy` of its files as they are at the source.

    A set that agrees with its record is kept. A stopped download continues; files are written completely or not at all.
    Raises `InputError` if other files are in the way or a checksum differs, `EndpointError` and `DiskError`.
    """
    record = folder / RECORDS / f"{data.name}.json"
    with lock_dir(folder / RECORDS):
        if record.exists():
            return Fetched(data, _check_there(data, folder, record), was_there=True)
        parts = folder / RECORDS / f"{data.name}.parts"
        made, begun = parts / "made", parts / "moving"
        if not begun.exists():  # else the files in the way are those of a run that was interrupted while it moved them
            refuse_existing(folder / name for name in data.outputs)
            shutil.rmtree(made, ignore_errors=True)
            data.write(data, made, parts, copy)
            write_text(begun, "")
        for name in data.outputs:
            if (made / name).exists():
                os.replace(made / name, folder / name)
        written = sorted(path for name in data.outputs for path in _files_below(folder / name))
        hashes = {str(path.relative_to(folder)): file_hash(path) for path in written}
        write_json(
            record,
            {
                "name": data.name,
                "source": data.source,
                "revision": data.revision,
                "licence": data.licence,
                "files": hashes,
            },
        )
        shutil.rmtree(parts)
    return Fetched(data, tuple(written), was_there=False)


def _check_there(data: DataSet, folder: Path, record: Path) -> tuple[Path, ...]:
    """Return the files of a data set. Raises `InputError` if they differ from its record."""
    try:
        recorded = parse_json(read_bytes(record))
        revision, hashes = recorded["revision"], dict(recorded["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{record}: damaged ({error}). Delete it and the files of {data.name}, and fetch it again."
        ) from error
    if revision != data.revision:
        raise InputError(
            f"{record}: revision {revision} is there, and this version of kinject fetches {data.revision}. Move its files away, "
            "or give another --into."
        )
    for name, expected in hashes.items():
        path = folder / name
        if not path.is_file() or file_hash(path) != expected:
            state = "was changed" if path.is_file() else "is gone"
            raise InputError(
                f"{path}: {state} since it was fetched. Delete {record} and the files of {data.name}, and fetch it again."
            )
    return tuple(folder / name for name in hashes)


def _files_below(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


def _fetch_files(data: DataSet, parts: Path, copy: Path | None) -> dict[str, Path]:
    """Return the files of a data set on the hub, checked: those of a `copy`, or downloaded into `parts`.

    Raises `InputError` if the hub cannot be reached or a checksum differs.
    """
    from huggingface_hub import constants

    paths = {}
    for name, expected in data.files.items():
        path = (copy or parts) / name
        if copy is None and not path.exists():
            reason = unreachable_reason()
            if reason:
                raise InputError(
                    f"{data.source}: {reason}. Fetch it where there is a network, or copy {', '.join(data.files)} into a "
                    "folder and name it with --from."
                )
            download(f"{constants.ENDPOINT}/datasets/{data.source}/resolve/{data.revision}/{name}", path)
        digest = file_hash(path)
        if digest != expected:
            raise InputError(
                f"{path}: SHA-256 {digest}, expected {expected} (revision {data.revision}). Delete the file and fetch it again."
            )
        paths[name] = path
    return paths


def _write_mmlu(data: DataSet, folder: Path, parts: Path, copy: Path | None) -> None:
    """Write MMLU in its authors' layout: dev/, val/ and test/ with a CSV without header for each subject."""
    from datasets import Dataset

    for name, path in _fetch_files(data, parts, copy).items():
        split = _SPLITS[Path(name).name.partition("-")[0]]
        by_subject = defaultdict[str, list[list[str]]](list)
        for row in Dataset.from_parquet(str(path), cache_dir=str(parts / "cache")):
            by_subject[row["subject"]].append([row["question"], *row["choices"], "ABCD"[row["answer"]]])
        for subject, rows in sorted(by_subject.items()):
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows(rows)
            write_text(folder / "mmlu" / split / f"{subject}_{split}.csv", text.getvalue())


def _write_instructions(data: DataSet, folder: Path, parts: Path, copy: Path | None) -> None:
    """Write rows of prompt and completion: an instruction, the text that it is about, and its answer."""
    (path,) = _fetch_files(data, parts, copy).values()
    rows = (
        {"prompt": "\n\n".join(filter(None, (row["instruction"].strip(), row["context"].strip()))) + "\n\n",
         "completion": row["response"].strip()}
        for _, row in read_jsonl(path) if row["instruction"].strip() and row["response"].strip()
    )  # fmt: skip
    write_jsonl(folder / "instructions.jsonl", rows)


def _write_replay(data: DataSet, folder: Path, parts: Path, copy: Path | None) -> None:
    """Write general text: documents to replay, and others to watch."""
    write_general_text(GENERAL_TEXT if copy is None else str(copy), folder, 20_000, 500)


def _write_wikipedia(data: DataSet, folder: Path, parts: Path, copy: Path | None) -> None:
    """Write the articles of the categories as documents, each in its version of the revision's date."""
    if copy is not None:
        raise InputError(f"--from: {data.name} comes from the API of Wikipedia, article by article. Leave it out.")
    import_extra("mwparserfromhell", Path(data.name))  # reported before anything is fetched
    path = parts / "articles.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with Journal(path) as journal:
        rows = {row["title"]: row for row in journal.rows if "wikitext" in row or "missing" in row}
        listed = {row["topic"]: row["titles"] for row in journal.rows if "titles" in row}
        for topic, categories in data.categories.items():
            if topic not in listed:
                listed[topic] = _titles_of(categories)
                journal.append({"topic": topic, "titles": listed[topic]})
        topics = defaultdict[str, list[str]](list)
        for topic, titles in listed.items():
            for title in titles:
                topics[title].append(topic)
        with Progress(data.name, len(topics), "articles", done=len(rows.keys() & topics.keys())) as progress:
            for title in topics:
                if title not in rows:
                    rows[title] = _article(title, data.revision)
                    journal.append(rows[title])
                    progress.advance()
    documents = [_document(rows[title], names) for title, names in topics.items() if "wikitext" in rows[title]]
    with_text = [document for document in documents if document["text"]]
    if not with_text:
        raise InputError(f"{data.source}: no article was found in the categories of {data.name}.")
    write_jsonl(folder / data.outputs[0] / "articles.jsonl", with_text)


def _titles_of(categories: Sequence[str]) -> list[str]:
    """Return titles of the articles in `categories` and in the categories directly below them, one of each in turn."""
    below = [title.partition(":")[2] for name in categories for title in _members(name, "subcat")]
    titles: dict[str, None] = {}
    waiting = [_members(name, "page") for name in dict.fromkeys([*categories, *below])]
    while waiting and len(titles) < _MOST_OF_CATEGORY:
        members = waiting.pop(0)
        title = next(members, None)
        if title is not None:
            titles[title] = None
            waiting.append(members)
    return list(titles)


def _members(category: str, kind: str) -> Iterator[str]:
    """Yield the titles of the pages, or of the categories, in a category."""
    parameters: dict[str, Any] = {
        "action": "query", "format": "json", "formatversion": 2, "maxlag": 5, "list": "categorymembers",
        "cmtitle": f"Category:{category}", "cmtype": kind, "cmlimit": _LONGEST_LIST,
        "cmnamespace": 0 if kind == "page" else 14,
    }  # fmt: skip
    more: Mapping[str, Any] = {}
    while True:
        answer = _ask_wikipedia({**parameters, **more})
        yield from (member["title"] for member in answer["query"]["categorymembers"])
        if "continue" not in answer:
            return
        more = answer["continue"]


def _article(title: str, date: str) -> dict[str, Any]:
    """Return the row of an article as it stood at `date`; ``missing`` if there was none, or only a redirect."""
    answer = _ask_wikipedia({
        "action": "query", "format": "json", "formatversion": 2, "maxlag": 5, "prop": "revisions", "titles": title,
        "rvprop": "ids|timestamp|slotsha1|content", "rvslots": "main", "rvlimit": 1, "rvstart": f"{date}T00:00:00Z",
        "rvdir": "older",
    })  # fmt: skip
    revisions = answer["query"]["pages"][0].get("revisions", [])
    slot = revisions[0]["slots"]["main"] if revisions else {}
    text = slot.get("content", "")
    if not text or text.lstrip().upper().startswith("#REDIRECT"):
        return {"title": title, "missing": True}
    digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    if slot.get("sha1") != digest:
        raise InputError(f"{title}: the text has SHA-1 {digest}, and Wikipedia has {slot.get('sha1')}. Fetch it again.")
    revision, timestamp = revisions[0]["revid"], revisions[0]["timestamp"]
    return {"title": title, "revision": revision, "date": timestamp[:10], "sha1": digest, "wikitext": text}


def _ask_wikipedia(parameters: Mapping[str, Any]) -> Any:
    """Return the answer of the API, asked again while its databases lag behind."""
    answer: Any = None
    for _ in range(_ATTEMPTS):
        answer = get_json(WIKIPEDIA, parameters)
        if isinstance(answer, dict) and "query" in answer:
            return answer
        fault = answer.get("error", {}) if isinstance(answer, dict) else {}
        if fault.get("code") != "maxlag":
            break
        time.sleep(_LAG)
    raise EndpointError(f"{WIKIPEDIA}: {str(answer)[:200]}. The articles so far are kept; the same command resumes.")


def _document(row: Mapping[str, Any], topics: Sequence[str]) -> dict[str, Any]:
    """Return the document of an article, read as the page of a MediaWiki export."""
    title, text = escape(row["title"]), escape(row["wikitext"])
    page = f"<page><title>{title}</title><ns>0</ns><revision><text>{text}</text></revision></page>"
    export = f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/">{page}</mediawiki>'
    parsed = [
        document for _, document in read_file(Path(f"{row['title']}.xml"), io.BytesIO(export.encode()), ReadOptions())
    ]
    faults = [fault for fault in parsed if isinstance(fault, InputError)]
    if faults:
        raise faults[0]
    body = "".join(document.text for document in parsed if isinstance(document, Document))
    return {
        "id": row["title"], "title": row["title"], "text": body,
        "source": f"https://en.wikipedia.org/w/index.php?oldid={row['revision']}",
        "licence": "CC BY-SA 4.0", "date": row["date"], "topics": list(topics),
    }  # fmt: skip


_MMLU = {
    "all/dev-00000-of-00001.parquet": "2b19bde1ed8ca6b482fb283abc90e8e0d9d228947029c0b91795d64b28b3bc3f",
    "all/validation-00000-of-00001.parquet": "66cdf0b090ccb657d18d13cd81e31fdc55c3467da9642ffb178653268a97c8ef",
    "all/test-00000-of-00001.parquet": "74a41822ce7d3def56e1682f958469c04642a5336a5ce912fa375fdb90fb25d7",
}
_DOLLY = {"databricks-dolly-15k.jsonl": "2df9083338b4abd6bceb5635764dab5d833b393b55759dffb0959b6fcbf794ec"}
_SUBJECTS = {
    "anatomy": ("Anatomy", "Human anatomy", "Anatomical terminology", "Embryology"),
    "astronomy": ("Astronomy", "Concepts in astronomy", "Planetary science", "Stellar astronomy", "Astrophysics"),
    "college_biology": ("Biology", "Cell biology", "Genetics", "Molecular biology", "Evolutionary biology", "Ecology"),
    "college_chemistry": (
        "Chemistry",
        "Physical chemistry",
        "Analytical chemistry",
        "Inorganic chemistry",
        "Spectroscopy",
    ),
    "prehistory": ("Prehistory", "Archaeology", "Paleolithic", "Neolithic", "Human evolution", "Bronze Age"),
}
_MONTHS = ("August 2023", "September 2023", "October 2023", "November 2023")
_SHARE_ALIKE = "CC BY-SA 4.0 (name Wikipedia and its authors, share alike)"

DATA_SETS: Mapping[str, DataSet] = {
    data.name: data
    for data in (
        DataSet(
            "mmlu", "four-choice questions on 57 subjects: five examples, validation and test of each", "MIT",
            "4 MB from the hub, 8 MB written", "cais/mmlu", "c30699e8356da336a370243923dbaf21066bb9fe",
            ("mmlu",), _write_mmlu, _MMLU,
        ),
        DataSet(
            "wikipedia-subjects", "articles on the five MMLU subjects of the paper, at most 400 of each", _SHARE_ALIKE,
            "some 2,000 requests and 50 MB", "en.wikipedia.org", "2023-09-01", ("mmlu-wikipedia",), _write_wikipedia,
            categories=_SUBJECTS,
        ),
        DataSet(
            "current-events", "articles on events in the United States from August to November 2023", _SHARE_ALIKE,
            "some 1,000 requests and 20 MB", "en.wikipedia.org", "2024-02-01", ("current-events",), _write_wikipedia,
            categories={month: (f"{month} events in the United States",) for month in _MONTHS},
        ),
        DataSet(
            "instructions", "15,000 instructions with answers by people, for the arm of instruction tuning",
            "CC BY-SA 3.0 (name Databricks, share alike)", "13 MB from the hub", "databricks/databricks-dolly-15k",
            "bdd27f4d94b9c1f951818a7da7fd7aeea5dbff1a", ("instructions.jsonl",), _write_instructions, _DOLLY,
        ),
        DataSet(
            "replay", "general text: 20,000 web pages to replay, 500 others to measure forgetting",
            "ODC-By 1.0 (name the source)",
            "100 MB from the hub", "HuggingFaceFW/fineweb-edu", "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9",
            ("general.jsonl", "general-held-out.jsonl"), _write_replay,
        ),
    )
}  # fmt: skip
"""Public data that the shipped recipes name, by name."""


def describe(data: DataSet, folder: Path) -> list[str]:
    """Return the description of a data set before it is fetched: source, size, licence, revision, checksums, files."""
    lines = [
        f"{data.name}: {data.about}", f"  licence   {data.licence}", f"  size      {data.size}",
        f"  source    {data.source}, {'as of' if data.categories else 'revision'} {data.revision}",
    ]  # fmt: skip
    lines += [f"  SHA-256   {digest}  {name}" for name, digest in data.files.items()]
    if data.categories:
        names = dict.fromkeys(name for names in data.categories.values() for name in names)
        text = f"of the categories {', '.join(names)} and those directly below them, each checked by its SHA-1"
        lines += textwrap.wrap(text, 100, initial_indent="  articles  ", subsequent_indent=" " * 12)
        lines.append("  contact   set KINJECT_CONTACT to your e-mail or web address: Wikipedia asks who sends requests")
    state = "is there" if (folder / RECORDS / f"{data.name}.json").exists() else "writes"
    return [*lines, f"  {state:<9} {', '.join(str(folder / name) for name in data.outputs)}"]
