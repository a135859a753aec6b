"""Parsers of the command line: what they say of a word that is wrong."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kinject.terminal import show

NO_PATH = "found nothing, a path is needed (this folder: .)"


def _named_path(word: str) -> Path:
    """Return the path that a word names; "" may be a variable of the shell that is not set."""
    if not word:
        raise argparse.ArgumentTypeError(NO_PATH)
    return Path(word)


class UsageError(SystemExit):
    """A command line that cannot be parsed."""

    def __init__(self, message: str) -> None:
        super().__init__(2)
        self.message = message


class VerbParser(argparse.ArgumentParser):
    """Prints descriptions as they are written."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})
        self.register("type", Path, _named_path)

    def nearest_option(self, unknown: Sequence[str]) -> str:
        """Return a sentence on the option that the first of `unknown` resembles, "" without one."""
        word = unknown[0].partition("=")[0]
        # --json is an option of kinject itself, and may follow any verb.
        options = (*self._option_string_actions, "--json")
        near = difflib.get_close_matches(word, options, 1, cutoff=0.7)
        if not near:
            return ""
        return f" Did you mean {near[0]}?"

    def error(self, message: str) -> NoReturn:
        """Print usage and message, with the action that an unknown one resembles, and raise
        `UsageError`."""
        wrong = re.search(r"argument ACTION: invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if wrong:
            near = difflib.get_close_matches(wrong[1], re.findall(r"[\w-]+", wrong[2]), 1)
            message += "".join(f" Did you mean {action}?" for action in near)
        self.print_usage(sys.stderr)
        show(f"{self.prog}: error: {message}", file=sys.stderr)
        raise UsageError(message)


class Parser(VerbParser):
    """Suggests the verb of `verbs` that an unknown one resembles."""

    verbs: Collection[str] = ()

    def error(self, message: str) -> NoReturn:
        """Exit with 2 and the message."""
        wrong = re.search(r"argument VERB: invalid choice: '(.*?)'", message)
        if wrong:
            near = difflib.get_close_matches(wrong[1], self.verbs, 1)
            meant = f" Did you mean {near[0]}?" if near else ""
            message = f"{wrong[1]}: no such command.{meant} All: kinject --help"
        super().error(message)
