"""docs/commands.md holds what `kinject COMMAND --help` prints, but for -h. Run this file as a script to write it again."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

from kinject.cli import _VERBS, main

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
FIRST_HEADING = "## kinject\n"


def _help(words: list[str]) -> str:
    os.environ["COLUMNS"] = "110"
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    text = re.sub(
        r"^  -h, --help +show this help message and exit\n", "", out.getvalue(), flags=re.MULTILINE
    )
    return text.removesuffix("\noptions:\n").rstrip()


def _render_page(text: str) -> str:
    """Return `text` with everything from the first help heading on replaced by today's help texts."""
    introduction = text.partition(FIRST_HEADING)[0]
    blocks = [
        f"## {' '.join(['kinject', *words])}\n\n```text\n{_help(words)}\n```\n"
        for words in ([], *([verb] for verb in _VERBS))
    ]
    return introduction + "\n".join(blocks)


def test_the_page_of_commands_is_up_to_date() -> None:
    text = PAGE.read_text("utf-8")
    assert _render_page(text) == text, "stale: run python tests/test_commands.py"


def test_the_table_of_commands_names_each_command() -> None:
    introduction = PAGE.read_text("utf-8").partition(FIRST_HEADING)[0]
    assert set(re.findall(r"`kinject ([\w-]+)", introduction)) >= set(_VERBS)


if __name__ == "__main__":
    PAGE.write_text(_render_page(PAGE.read_text("utf-8")), encoding="utf-8")
