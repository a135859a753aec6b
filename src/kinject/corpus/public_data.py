"""Public data sets by name: fetched at a pinned revision, and written as the recipes of the studies
read them."""

from __future__ import annotations

import csv
import io
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from kinject.disk import (
    Row,
    file_hash,
    lock_dir,
    refuse_existing,
    write_json,
    write_jsonl,
    write_text,
)
from kinject.errors import InputError
from kinject.hub import unreachable_reason
from kinject.recipe.check import suggestion
from kinject.recipe.makers import PUBLIC_FILES

RECORDS = "sources"
"""Folder, beside the data, of the records: NAME.json has revision, licence and the hash of every
file written."""
_PREFIX = ".fetched-"
_SPLITS = {"dev": "dev", "validation": "val", "test": "test"}
_PAGES = dict(zip(PUBLIC_FILES["replay"], (500, 20_000), strict=True))
"""File of general text -> pages in it."""


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
