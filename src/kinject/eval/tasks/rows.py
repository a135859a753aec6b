"""The files of a lm-evaluation-harness task: its YAML with what it includes, and its rows (JSON lines, CSV or Parquet)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from kinject.corpus.documents.rows import check_parquet, csv_records
from kinject.disk import open_to_read, path_exists, read_bytes, read_jsonl
from kinject.errors import InputError

_MOST_BYTES = 2**20
_MOST_VALUES = 100_000
"""Most values of a file, each alias counted with everything that it refers to."""
_DEEPEST = 32
_MOST_FILES = 64


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses ``!function`` with a message of its own."""


def _refuse_function(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    raise InputError(
        f"{loader.name}:{node.start_mark.line + 1}: !function names Python code, which kinject does not run. "
        "Write the field as a Jinja template, or convert the questions to JSONL."
    )


_Loader.add_constructor("!function", _refuse_function)


def read_config(path: Path) -> dict[str, Any]:
    """Return the mapping in the YAML file `path`, merged over the files that it includes, as in the harness.

    Raises `InputError` if it is not a mapping, names code, includes itself or too many files, and `DiskError` if a file
    cannot be read.
    """
    return _with_includes(path, (), [0])


def _with_includes(path: Path, above: tuple[Path, ...], n_files: list[int]) -> dict[str, Any]:
    config = _read_mapping(path)
    real_path = Path(os.path.realpath(path))
    if real_path in above:
        raise InputError(f"{path}: includes itself through {above[-1]}. Remove the include.")
    n_files[0] += 1
    if n_files[0] > _MOST_FILES:
        raise InputError(f"{path}: more than {_MOST_FILES} files are included. Put them together.")
    merged: dict[str, Any] = {}
    included = config.pop("include", None) or ()
    names = [included] if isinstance(included, str) else included
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise InputError(f"{path}: include: found {included!r:.60}, expected the names of files.")
    for name in names:
        merged |= _with_includes(path.parent / name, (*above, real_path), n_files)
    return merged | config


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        text = read_bytes(path, _MOST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 (byte {error.start}). Save the file as UTF-8.") from error
    try:
        loader = _Loader(text)
        loader.name = str(path)
        node = loader.get_single_node()
        n_values = _n_values(node, 0, _MOST_VALUES) if node is not None else 0
        config = loader.construct_document(node) if 0 < n_values <= _MOST_VALUES else None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not YAML: {' '.join(str(error).split())}. Repair it.") from error
    except RecursionError as error:
        raise InputError(f"{path}: not YAML: nested more than {_DEEPEST} levels deep. Write it flat.") from error
    except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError) as error:
        # PyYAML's constructors raise these for invalid dates, numbers of thousands of digits, tags on other text
        raise InputError(f"{path}: not YAML: a value that cannot be read ({error}). Put it in quotes.") from error
    if n_values > _MOST_VALUES:
        raise InputError(f"{path}: more than {_MOST_VALUES:,} values (aliases that multiply?). Write them out.")
    if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
        raise InputError(f"{path}: holds no task: expected a mapping with words as keys.")
    return config


def _n_values(node: yaml.Node, depth: int, most: int) -> int:
    """Return the number of values in `node`, or more than `most`; raises `RecursionError` beyond `_DEEPEST` levels."""
    if depth > _DEEPEST:
        raise RecursionError
    n = 1
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        repeated = next((key for key in keys if keys.count(key) > 1), None)
        if repeated is not None:
            mark = node.start_mark
            raise InputError(f"{mark.name}:{mark.line + 1}: the key {repeated!r:.80} is there twice. Keep one.")
    if isinstance(node, yaml.SequenceNode | yaml.MappingNode):
        for item in node.value:
            for inner in item if isinstance(item, tuple) else (item,):
                n += _n_values(inner, depth + 1, most - n)
                if n > most:
                    return n
    return n


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
    """Return the rows of `split`, each with its location, and their files.

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
    return [(location, {column: row.get(column) for column in columns}) for location, row in rows], tuple(files)


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
