"""The rows of a lm-evaluation-harness task's splits, from local files, as `datasets` gives them to the harness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kinject.corpus.readers_rows import check_parquet
from kinject.disk import is_there, open_to_read, read_jsonl
from kinject.errors import InputError

Row = Mapping[str, Any]

_KINDS = ("json", "csv", "parquet")
_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


def files_of(path: Path, config: Mapping[str, Any], split: str) -> list[Path]:
    """Return the local files of `split` of the task in `path`, [] where it names none.

    `dataset_path` is ``json``, ``csv`` or ``parquet`` with files in `dataset_kwargs.data_files`, or a folder with files
    named by split. Raises `InputError` for other `dataset_kwargs`.
    """
    options = config.get("dataset_kwargs") or {}
    others = sorted(set(options) - {"data_files", "trust_remote_code"}) if isinstance(options, Mapping) else ["it"]
    if others:
        raise InputError(f"{path}: dataset_kwargs: {', '.join(others)}: not read. Only data_files is.")
    files = options.get("data_files")
    source = str(config.get("dataset_path", ""))
    if files is None and source not in _KINDS:
        folder = path.parent / source / str(config.get("dataset_name") or "")
        there = sorted(folder.iterdir()) if is_there(folder) and folder.is_dir() else []
        found = [item for item in there if item.name.startswith(f"{split}.")]
        found = found or [item for item in there if item.name.startswith(f"{split}-")]
        return [item for item in found if item.suffix in _SUFFIXES]
    named = files.get(split) if isinstance(files, Mapping) else files
    names = [named] if isinstance(named, str) else named or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(
            f"{path}: dataset_kwargs.data_files: found {named!r:.60}, expected the name of a file, or a list."
        )
    return [path.parent / name for name in names]


def read_split(path: Path, config: Mapping[str, Any], split: str) -> tuple[list[Row], tuple[Path, ...]]:
    """Return the rows of `split` and the files they came from; every row has every column, None where it lacked it.

    Raises `InputError` when the task names no local files for the split or they hold nothing, `DiskError` when one
    cannot be read.
    """
    files = files_of(path, config, split)
    if not files:
        raise InputError(
            f"{path}: no local files for the split {split!r} of {config.get('dataset_path')!r}. Download the data set and "
            f"name its files: dataset_path: json, dataset_kwargs: {{data_files: {{{split}: FILE.jsonl}}}}."
        )
    rows = [row for file in files for row in _read(file)]
    if not rows:
        raise InputError(f"{files[0]}: holds no questions. Each row is one.")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return [{column: row.get(column) for column in columns} for row in rows], tuple(files)


def _read(file: Path) -> Sequence[Row]:
    match file.suffix:
        case ".csv":
            return _csv_rows(file)
        case ".parquet":
            return _parquet_rows(file)
        case _:
            return [row for _, row in read_jsonl(file)]


def _csv_rows(file: Path) -> list[Row]:
    """Return the rows with numbers as numbers and empty cells as None, as pandas reads them for `datasets`."""
    import pandas as pd  # type: ignore[import-untyped]

    with open_to_read(file) as opened:
        try:
            frame = pd.read_csv(opened)
        except (ValueError, OverflowError, MemoryError) as error:  # pandas' own errors and wrong encodings among them
            raise InputError(f"{file}: not a CSV file in UTF-8 ({_said(error)}). Save it anew.") from error
    plain = frame.astype(object).where(frame.notna(), None)
    return [{str(key): value for key, value in row.items()} for row in plain.to_dict("records")]


def _parquet_rows(file: Path) -> list[Row]:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    with open_to_read(file) as opened:
        try:
            with parquet.ParquetFile(opened) as table:
                check_parquet(file, table)
                found: list[Row] = table.read(use_threads=False).to_pylist()
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # also text that is not UTF-8
            raise InputError(f"{file}: not a Parquet file ({_said(error)}). Write it anew.") from error
    return found


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
