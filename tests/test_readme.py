"""README's --help blocks are what the commands print. Run this file as a script to write them anew."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

import kinject.cli

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"(<!-- help: kinject((?: [\w-]+)*?) -->\n```text\n)(.*?)(```\n)", re.DOTALL)


def _help(verb: str) -> str:
    os.environ["COLUMNS"] = "110"
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        kinject.cli.main([*verb.split(), "--help"])
    return out.getvalue()


def _renew(text: str) -> str:
    return BLOCK.sub(lambda match: match[1] + _help(match[2]) + match[4], text)


def test_help_blocks_are_up_to_date() -> None:
    text = README.read_text("utf-8")
    assert {match[2].strip() for match in BLOCK.finditer(text)} >= {"", "augment", "train", "eval"}
    assert _renew(text) == text, "stale: run python tests/test_readme.py"


def test_every_file_that_the_readme_links_to_is_there() -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", README.read_text("utf-8")):
        assert (README.parent / target).exists(), target


if __name__ == "__main__":
    README.write_text(_renew(README.read_text("utf-8")), encoding="utf-8")
