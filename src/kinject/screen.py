"""Text on the terminal: names and texts from data are shown, and cannot steer it."""

from __future__ import annotations

import logging
import re
import sys
from typing import TextIO

_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab and line feed, marks that turn the direction of what follows, and half characters."""


def printable(text: str) -> str:
    """Return `text` with every character that a terminal would obey as U+FFFD."""
    return _STEERING.sub("\ufffd", text)


def show(text: object = "", *, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """Print `text` on standard output, or on `file`, as `printable` has it."""
    print(printable(str(text)), end=end, file=sys.stdout if file is None else file, flush=flush)


class Formatter(logging.Formatter):
    """Writes messages of the log as `printable` has them."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the message alone."""
        return printable(super().format(record))
