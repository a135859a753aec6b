"""Jinja templates of recipes and tasks, in a sandbox, and the YAML of tasks: both within limits of size."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kinject.disk import read_bytes
from kinject.errors import InputError

if TYPE_CHECKING:
    from jinja2 import Template

_LONGEST = 2**24
"""Most characters that a template may write, or that one of its multiplications may give: 16 Mi."""
_MOST_BITS = 2**16
"""Most bits of a number in a template."""


@lru_cache(maxsize=64)
def compile_template(source: str, *, keep_newline: bool = False) -> Template:
    """Return `source` as a Jinja template in a sandbox; an unknown name is an error.

    With `keep_newline` a line break at the end is part of the text, as in lm-evaluation-harness. Raises `InputError`
    with the line if `source` is not a template.
    """
    from jinja2 import StrictUndefined, TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Bounded(ImmutableSandboxedEnvironment):
        """The sandbox, with a limit for products and powers, so that they cannot fill the memory."""

        intercepted_binops = frozenset(["*", "**"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_size(operator, left, right)
            return super().call_binop(context, operator, left, right)

    environment = Bounded(undefined=StrictUndefined, keep_trailing_newline=keep_newline)
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise InputError(f"template, line {error.lineno}: {error.message}. Source: {source[:120]!r}") from error
    except (SyntaxError, RecursionError, MemoryError, ValueError, OverflowError) as error:
        # Python refuses the code that Jinja writes: loops or brackets nested too deep, numbers of too many digits
        raise InputError(f"template: too deep or too long ({error}). Source: {source[:120]!r}") from error


def render(template: Template, values: Mapping[str, Any]) -> str:
    """Return the text that `template` writes with the variables `values`.

    Raises `InputError` if an expression of it raises anything, and if it writes more than `_LONGEST` characters.
    """
    parts: list[str] = []
    n = 0
    try:
        for part in template.generate(dict(values)):
            n += len(part)
            if n > _LONGEST:
                raise InputError(f"it writes more than {_LONGEST:,} characters. Shorten its loops.")
            parts.append(part)
    except InputError:
        raise
    except Exception as error:  # a template is a program: its expressions may raise anything
        raise InputError(f"{str(error) or type(error).__name__}. Correct the template or the row.") from error
    return "".join(parts)


def _check_size(operator: str, left: Any, right: Any) -> None:
    """Raise `InputError` if a product or power of the two would be too large."""
    if operator == "**":
        too_large = isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MOST_BITS
    else:
        sized = [item for item in (left, right) if isinstance(item, str | list | tuple)]
        times = [item for item in (left, right) if isinstance(item, int)]
        too_large = bool(sized and times) and len(sized[0]) * times[0] > _LONGEST
        too_large |= len(times) == 2 and sum(item.bit_length() for item in times) > _MOST_BITS
    if too_large:
        raise InputError(f"{operator} makes a value that is too large.")


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
