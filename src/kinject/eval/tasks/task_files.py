"""The YAML of lm-evaluation-harness tasks: read within limits of size, without code, merged over what it includes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from kinject.disk import read_bytes
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
    whole: dict[str, Any] = {}
    included = config.pop("include", None) or ()
    names = [included] if isinstance(included, str) else included
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise InputError(f"{path}: include: found {included!r:.60}, expected the names of files.")
    for name in names:
        whole |= _with_includes(path.parent / name, (*above, real_path), n_files)
    return whole | config


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
