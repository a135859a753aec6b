"""The errors of kinject, as one tree::

    KinjectError         an error of the input or the system, reported in one line; exit code 2
    ├── RecipeError      problems of a recipe, all of them at once, each with file:line
    ├── InputError       a document, corpus, question or model folder that cannot be used
    ├── DiskError        a file that cannot be read or written, or that another process holds
    ├── EndpointError    a language-model endpoint that refuses or fails
    └── TrainingError    a run that must not continue (lost text, a loss that is not finite, ...)

    KeyboardInterrupt    Ctrl-C (SIGINT); exit code 130
    └── Terminated       the system ends the process (SIGTERM, SIGHUP, SIGQUIT, SIGUSR1);
                         exit code 143, 129, 131, 138

Each message names the place, the value found, the values allowed, and a fix. Any other exception is
a bug in kinject: it keeps its traceback, and its exit code is 70.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from signal import SIGTERM

from kinject.secrets import without_secrets

_LONGEST_LINE = 2_000
_MOST_LINES = 200
_LONGEST_REASON = 200


class KinjectError(Exception):
    """Base of every error that a user can cause and fix. No message holds a part of a secret.

    A message that quotes megabytes of its input keeps the beginning and the end of each line: the
    place and the fix.
    """

    def __init__(self, message: str) -> None:
        # No further: a message may quote megabytes of its input.
        lines = without_secrets(message).split("\n", _MOST_LINES)
        if len(lines) > _MOST_LINES:
            lines[_MOST_LINES:] = [f"... and {lines[_MOST_LINES].count(chr(10)) + 1} more lines."]
        super().__init__("\n".join(map(_shortened, lines)))


def one_line(error: BaseException) -> str:
    """Return the message of a library's error as a part of one line: it may have several, and
    quote its input."""
    return " ".join(str(error).split())[:_LONGEST_REASON].rstrip(".") or type(error).__name__


def _shortened(line: str) -> str:
    half = _LONGEST_LINE // 2
    if len(line) <= _LONGEST_LINE:
        return line
    left_out = f" ... ({len(line) - _LONGEST_LINE:,} characters left out) ... "
    return line[:half] + left_out + line[-half:]


class InputError(KinjectError):
    """A document, corpus, question set or model folder cannot be used."""


class DiskError(KinjectError):
    """A file cannot be read or written, or another process holds it."""


class EndpointError(KinjectError):
    """A language-model endpoint refused or failed.

    `fatal` means that every further request would fail the same way (a wrong key, an unknown
    model).
    """

    def __init__(self, message: str, *, fatal: bool = False) -> None:
        super().__init__(message)
        self.fatal = fatal


class TrainingError(KinjectError):
    """A training run must not start or continue."""


class Terminated(KeyboardInterrupt):
    """A signal ends the process: SIGTERM or SIGUSR1, as from a batch system before it kills, SIGHUP
    or SIGQUIT."""

    def __init__(self, number: int = SIGTERM) -> None:
        super().__init__()
        self.number = number


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a recipe: its key (dotted, or part by part), a message, and ``file:line`` or
    ``command line``.

    Checks give key and message; `kinject.recipe.Recipe.locating` adds the place.
    """

    key: str | tuple[str | int, ...]
    message: str
    location: str = ""

    @property
    def dotted(self) -> str:
        """The key with dots between its parts."""
        return self.key if isinstance(self.key, str) else ".".join(map(str, self.key))

    def __str__(self) -> str:
        return ": ".join(part for part in (self.location, self.dotted, self.message) if part)


class RecipeError(KinjectError):
    """A recipe has problems; `problems` holds all of them, and the message has one line for
    each."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


def fault(key: str, message: str) -> RecipeError:
    """Return a `RecipeError` with one problem; where the verb starts,
    `kinject.recipe.Recipe.locating` adds its place."""
    return RecipeError([Problem(key, message)])
