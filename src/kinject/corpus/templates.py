"""Jinja templates of recipes, in a sandbox and within limits of size, and the variables of a prompt's template."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

from kinject.bounds import check_cost
from kinject.disk import read_bytes
from kinject.errors import InputError
from kinject.types import Question

if TYPE_CHECKING:
    from jinja2 import Template

_LONGEST = 2**24
"""Most characters that a template may write, or that one of its multiplications may give: 16 Mi."""
_MOST_BITS = 2**16
"""Most bits of a number in a template."""


@lru_cache(maxsize=64)
def compile_template(source: str) -> Template:
    """Return `source` as a Jinja template in a sandbox; an unknown name is an error.

    Raises `InputError` with the line if `source` is not a template.
    """
    from jinja2 import StrictUndefined, TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Bounded(ImmutableSandboxedEnvironment):
        """The sandbox, with a limit for products and powers, so that they cannot fill the memory."""

        intercepted_binops = frozenset(["*", "**"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_size(operator, left, right)
            return super().call_binop(context, operator, left, right)

    environment = Bounded(undefined=StrictUndefined)
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise InputError(f"template, line {error.lineno}: {error.message}. Source: {source[:120]!r}") from error
    except (SyntaxError, RecursionError, MemoryError, ValueError, OverflowError) as error:
        # Python refuses the code that Jinja writes: loops or brackets nested too deep, numbers of too many digits
        raise InputError(f"template: too deep or too long ({error}). Source: {source[:120]!r}") from error


def read_template(path: Path) -> str:
    """Return the source of the template in the file `path`. Raises `InputError` if it is not UTF-8 or no template."""
    try:
        source = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 (byte {error.start}). Save the file as UTF-8.") from error
    try:
        check_cost(source)  # before it is compiled: Jinja computes constants then
        compile_template(source)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    return source


def question_variables(question: Question) -> dict[str, Any]:
    """Return the variables of a prompt's template from `question`: question, choices, letters, subject."""
    choices = list(question.choices)
    letters = list(ascii_uppercase[: len(choices)])
    return {"question": question.question, "choices": choices, "letters": letters, "subject": question.subject}


def render_question(source: str, question: Question, key: str, values: Mapping[str, Any]) -> str:
    """Return the prompt of `question` that the template `source` writes, with `question_variables` and `values`.

    Raises `InputError` that names the recipe's `key` and the question if it cannot be rendered.
    """
    try:
        return render(compile_template(source), {**question_variables(question), **values})
    except InputError as error:
        raise InputError(f"{key}: cannot be rendered for question {question.id!r}: {error}") from error


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
