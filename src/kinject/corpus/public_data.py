"""Public data sets by name: fetched at a pinned revision, checked, and written as the recipes of the studies read them."""

from __future__ import annotations

import csv
import io
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from kinject.disk import file_hash, lock_dir, read_jsonl, refuse_existing, write_json, write_jsonl, write_text
from kinject.documents import read_documents
from kinject.errors import InputError
from kinject.hub import unreachable_reason
from kinject.recipe.check import suggestion

RECORDS = "sources"
"""Folder, beside the data, of the records: NAME.json has revision, licence and the hash of every file written."""
GENERAL_TEXT = "HuggingFaceFW/fineweb-edu@87f09149ef4734204d70ed1d046ddc9ca3f2b8f9:sample-10BT"
"""General text on the hub: web pages on many subjects (English, ODC-By 1.0)."""
_SPLITS = {"dev": "dev", "validation": "val", "test": "test"}


@dataclass(frozen=True)
class DataSet:
    """A public data set. `outputs` are below the folder of the data.

    `files` maps a file at the source to its SHA-256.
    """

    name: str
    about: str
    licence: str
    size: str
    source: str
    revision: str
    outputs: tuple[str, ...]
    write: Callable[[DataSet, Path], None]
    files: Mapping[str, str] = field(default_factory=dict)


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


def get_data(data: DataSet, folder: Path) -> Fetched:
    """Fetch a data set into `folder`, unless its record is there. Files are written completely or not at all.

    Raises `InputError` if other files are in the way, the hub cannot be reached or a checksum differs, and `DiskError`.
    """
    record, outputs = folder / RECORDS / f"{data.name}.json", [folder / name for name in data.outputs]
    with lock_dir(folder / RECORDS):
        if record.exists():
            return Fetched(data, tuple(path for output in outputs for path in _files_below(output)), was_there=True)
        refuse_existing(outputs)
        with TemporaryDirectory(prefix=".fetched-", dir=folder) as made:
            data.write(data, Path(made))
            for path in outputs:
                if (Path(made) / path.name).exists():
                    os.replace(Path(made) / path.name, path)
        written = [path for output in outputs for path in _files_below(output)]
        hashes = {str(path.relative_to(folder)): file_hash(path) for path in written}
        about = {"name": data.name, "source": data.source, "revision": data.revision, "licence": data.licence}
        write_json(record, {**about, "files": hashes})
    return Fetched(data, tuple(written), was_there=False)


def _files_below(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


def _fetch_files(data: DataSet) -> dict[str, Path]:
    """Return the files of a data set, from the hub or its local cache, checked.

    Raises `InputError` if the hub cannot be reached or a checksum differs.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    paths = {}
    for name, expected in data.files.items():
        try:
            path = Path(hf_hub_download(data.source, name, repo_type="dataset", revision=data.revision))
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            reason = unreachable_reason() or " ".join(str(error).split())[:200]
            raise InputError(
                f"{data.source}: {reason}. Fetch it where there is a network, or copy the hub's cache (HF_HOME) from there."
            ) from error
        if file_hash(path) != expected:
            raise InputError(
                f"{path}: SHA-256 is not {expected} (revision {data.revision}). Delete it, and fetch it again."
            )
        paths[name] = path
    return paths


def _write_mmlu(data: DataSet, folder: Path) -> None:
    """Write MMLU in its authors' layout: dev/, val/ and test/ with a CSV without header for each subject."""
    from pandas import read_parquet  # type: ignore[import-untyped]

    for name, path in _fetch_files(data).items():
        split = _SPLITS[Path(name).name.partition("-")[0]]
        by_subject = defaultdict[str, list[list[str]]](list)
        for row in read_parquet(path).to_dict("records"):
            by_subject[row["subject"]].append([row["question"], *row["choices"], "ABCD"[row["answer"]]])
        for subject, rows in sorted(by_subject.items()):
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows(rows)
            write_text(folder / "mmlu" / split / f"{subject}_{split}.csv", text.getvalue())


def _write_instructions(data: DataSet, folder: Path) -> None:
    """Write rows of prompt and completion: an instruction, the text that it is about, and its answer."""
    (path,) = _fetch_files(data).values()
    rows = (
        {"prompt": "\n\n".join(filter(None, (row["instruction"].strip(), row["context"].strip()))) + "\n\n",
         "completion": row["response"].strip()}
        for _, row in read_jsonl(path) if row["instruction"].strip() and row["response"].strip()
    )  # fmt: skip
    write_jsonl(folder / "instructions.jsonl", rows)


def _write_replay(data: DataSet, folder: Path) -> None:
    """Write general text: documents to replay, and others to watch."""
    documents = read_documents(Path(GENERAL_TEXT))
    for name, n in (("general-held-out.jsonl", 500), ("general.jsonl", 20_000)):
        first = islice(documents, n)
        write_jsonl(folder / name, ({"id": one.id, "text": one.text, "source": one.source} for one in first))


_MMLU = {
    "all/dev-00000-of-00001.parquet": "2b19bde1ed8ca6b482fb283abc90e8e0d9d228947029c0b91795d64b28b3bc3f",
    "all/validation-00000-of-00001.parquet": "66cdf0b090ccb657d18d13cd81e31fdc55c3467da9642ffb178653268a97c8ef",
    "all/test-00000-of-00001.parquet": "74a41822ce7d3def56e1682f958469c04642a5336a5ce912fa375fdb90fb25d7",
}
_DOLLY = {"databricks-dolly-15k.jsonl": "2df9083338b4abd6bceb5635764dab5d833b393b55759dffb0959b6fcbf794ec"}
DATA_SETS: Mapping[str, DataSet] = {
    data.name: data
    for data in (
        DataSet(
            "mmlu", "four-choice questions on 57 subjects: five examples, validation and test of each", "MIT",
            "4 MB from the hub, 8 MB written", "cais/mmlu", "c30699e8356da336a370243923dbaf21066bb9fe",
            ("mmlu",), _write_mmlu, _MMLU,
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
        f"  source    {data.source}, revision {data.revision}",
    ]  # fmt: skip
    lines += [f"  SHA-256   {digest}  {name}" for name, digest in data.files.items()]
    state = "is there" if (folder / RECORDS / f"{data.name}.json").exists() else "writes"
    return [*lines, f"  {state:<9} {', '.join(str(folder / name) for name in data.outputs)}"]
