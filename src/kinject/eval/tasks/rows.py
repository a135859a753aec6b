"""The rows of a lm-evaluation-harness task from local files: JSON lines, CSV or Parquet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kinject.corpus.documents.rows import check_parquet, csv_records
from kinject.disk import open_to_read, path_exists, read_jsonl
from kinject.errors import InputError

_LONGEST_NUMBER = 30
Row = Mapping[str, Any]
Located = tuple[str, Row]
"""A row and its place, ``file:line``."""

_KINDS = ("json", "csv", "parquet")
_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


def files_of(path: Path, config: Mapping[str, Any], split: str) -> list[Path]:
    """Return the local files of `split` of the task in `path`, [] if it names none.

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
        existing = sorted(folder.iterdir()) if path_exists(folder) and folder.is_dir() else []
        matching = [item for item in existing if item.name.startswith(f"{split}.")]
        matching = matching or [item for item in existing if item.name.startswith(f"{split}-")]
        return [item for item in matching if item.suffix in _SUFFIXES]
    value = files.get(split) if isinstance(files, Mapping) else files
    names = [value] if isinstance(value, str) else value or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(
            f"{path}: dataset_kwargs.data_files: found {value!r:.60}, expected the name of a file, or a list."
        )
    return [path.parent / name for name in names]


def read_split(path: Path, config: Mapping[str, Any], split: str) -> tuple[list[Located], tuple[Path, ...]]:
    """Return the rows of `split`, each with its place, and their files.

    Every row has every column, None if its file had no value.

    Raises `InputError` if the task names no local files for the split or they are empty, `DiskError` if one cannot be
    read.
    """
    files = files_of(path, config, split)
    if not files:
        raise InputError(
            f"{path}: no local files for the split {split!r} of {config.get('dataset_path')!r}. Download the data set and "
            f"name its files: dataset_path: json, dataset_kwargs: {{data_files: {{{split}: FILE.jsonl}}}}."
        )
    rows = [row for file in files for row in _read_rows(file)]
    if not rows:
        raise InputError(f"{files[0]}: holds no questions. Each row is one.")
    columns = list(dict.fromkeys(key for _, row in rows for key in row))
    return [(place, {column: row.get(column) for column in columns}) for place, row in rows], tuple(files)


def _read_rows(file: Path) -> Iterator[Located]:
    numbered: Iterable[tuple[int, Row]]
    match file.suffix:
        case ".csv":
            numbered = _csv_rows(file)
        case ".parquet":
            numbered = enumerate(_parquet_rows(file), start=1)
        case _:
            numbered = read_jsonl(file)
    return ((f"{file}:{number}", row) for number, row in numbered)


def _csv_rows(file: Path) -> list[tuple[int, Row]]:
    """Return (line, row) with numbers as numbers, as `datasets` has them, and empty cells as None.

    A column is numbers if all its cells are, written as Python writes them: no text changes (1.50, 007, NA).
    """
    records = list(csv_records(file))
    kinds = {
        column: next(
            (kind for kind in (int, float, bool) if all(_is_written(kind, row[column]) for _, row in records)), str
        )
        for column in (records[0][1] if records else ())
    }
    return [
        (number, {column: _READ[kinds[column]](cell) if cell else None for column, cell in row.items()})
        for number, row in records
    ]


_READ: Mapping[type, Callable[[str], Any]] = {int: int, float: float, bool: lambda cell: cell == "True", str: str}


def _is_written(kind: type, cell: str) -> bool:
    """Return whether `cell` is empty or a finite value of `kind` as Python writes it."""
    try:
        return not cell or (len(cell) < _LONGEST_NUMBER and cell[-1] not in "nf" and str(_READ[kind](cell)) == cell)
    except ValueError:
        return False


def _parquet_rows(file: Path) -> list[Row]:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    with open_to_read(file) as opened:
        try:
            with parquet.ParquetFile(opened) as table:
                check_parquet(file, table, file.stat().st_size)
                rows: list[Row] = table.read(use_threads=False).to_pylist()
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # also text that is not UTF-8
            raise InputError(f"{file}: not a Parquet file ({_one_line(error)}). Write it again.") from error
    return rows


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
