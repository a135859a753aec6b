"""Subtitles (.srt, .vtt): what is said, without times and marks of their looks."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from kinject.disk import read_bytes
from kinject.documents.readers import LocatedDocument, ReadOptions
from kinject.documents.text import decode, one_line, whole_file

_TIMES = re.compile(r"^(?:\d+:)?\d\d:\d\d[.,]\d+[ \t]+-->.*\n?", re.MULTILINE)
_UNSPOKEN = re.compile(r"\s*(?:WEBVTT|NOTE|STYLE|REGION)\b|\s*\d*\s*\Z")
"""A block without times that is no text: a note, a style, a number alone."""
_VOICE = re.compile(r"<v(?:\.[^\s>]*)?\s+([^>]+)>")
_TAG = re.compile(r"</?[a-z\d][^>]*>|\{\\[^}]*\}", re.IGNORECASE)
_BEGINS = re.compile(r"- |[^.:!?]{1,30}: ")
"""What a new speaker begins with."""
_ENDS = (".", "!", "?", "…", '"', "”", "。", "！", "？")


def read_subtitles(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield subtitles as one document; a sentence over several of them is on one line."""
    text, meta = decode(path, read_bytes(path, options.largest, stream))
    lines: list[str] = []
    last = ""
    has_begun = False
    for block in re.split(r"\n[ \t]*\n", text):
        times = _TIMES.search(block)
        has_begun = has_begun or times is not None
        # A subtitle may have an empty line in it.
        if times is None and (not has_begun or _UNSPOKEN.match(block)):
            continue
        if times is not None:
            block = block[times.end() :]
        for written in block.split("\n"):
            line = one_line(html.unescape(_TAG.sub("", _VOICE.sub(r"\1: ", written))))
            # Live captions repeat the line before.
            if not line or line == last:
                continue
            if lines and not last.endswith(_ENDS) and not _BEGINS.match(line):
                lines[-1] += f" {line}"
            else:
                lines.append(line)
            last = line
    yield whole_file(path, "", "\n".join(lines) or text, meta)
