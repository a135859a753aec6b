"""Separates the statements of a text from its frame: headings, table headers, labels, list numbers, greetings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass

_MAX_HEADING_WORDS, _MAX_HEADING_LETTERS = 12, 60
_MAX_LABEL_WORDS = 4
_RULE = re.compile(r"[\s|:=_*~\-–—─━═│┃║┌┐└┘├┤┬┴┼╔╗╚╝╠╣▲▼△▽↓↑→←<>^vV+/\\.]+")
_TABLE_RULE = re.compile(r"\|?\s*:?-{2,}:?\s*(?:\|\s*:?-{2,}:?\s*)*\|?")
_BOX = "│┃║|▲▼↓↑→←►▶ \t"
_ITEM = re.compile(
    r"(?:>\s*)*(?:(?:[-*+•●○▪◦‣☐☑☒✓✔□■◆→▶►–—·・]|\[[ xX]?\]|[①-⑳❶-❿])\s*"
    r"|\(?(?:\d{1,3}|[a-zA-Z]|[ivxIVX]{1,4})[.)](?=\s|\Z)\s*|[（(]?(?:\d{1,3}|[一二三四五六七八九十]{1,3})[、．）)](?!\d)\s*)+"
)
_NUMBER_ITEM = re.compile(r"\d{1,3}\.\s+(\w+)")
_LABEL = re.compile(
    r"[*_]{0,3}(?P<label>[^\n:：|!?。！？「」“”„«»\"]{1,50}?)[*_]{0,3}\s?(?P<colon>[:：])[*_]{0,3}(?P<space>\s+|\Z)?"
)
_DASH_LABEL = re.compile(r"[*_]{0,3}(?P<label>[^\n:：|!?。！？–—\"]{1,40}?)[*_]{0,3}\s+(?:[–—]|-{1,3}|=|→)\s+")
_ENDS = tuple(".!?:;,。！？；：，、…।؟")
_REFERENCE = re.compile(r"\[\d{1,3}\]")
_CJK = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]")
_LONG_NUMBER = re.compile(r"\d{3}|\d[.,]\d")


@dataclass(frozen=True, slots=True)
class Parts:
    """A text in two parts.

    `body` has the statements, `frame` the headings, table headers, labels and greetings, `speakers` the words of labels that
    occur more than once and of greetings: a letter or a dialogue may invent them.
    """

    body: str
    frame: str = ""
    speakers: str = ""


def split_parts(text: str, months: Container[str] = ()) -> Parts:
    """Return the body and the frame of `text`. `months` are words after which a number at a line's start is a day."""
    if "[" in text:
        text = _REFERENCE.sub("", text)
    if "\n" not in text:
        return Parts(_without_item(text, months)[0] if text[:1] in "0123456789([-*#>•" else text)
    raw = [line.strip() for line in text.split("\n")]
    body: list[str] = []
    frame: list[str] = []
    lines: list[tuple[str, bool]] = []  # (text without its item mark, whether it had one)
    for index, line in enumerate(raw):
        if _TABLE_RULE.fullmatch(line) and "-" in line and index and "|" in raw[index - 1] and lines:
            frame.append(lines.pop()[0].replace("|", "\n"))
        elif not line or not _RULE.fullmatch(line):
            lines.append(_without_item(line, months))
    labels = [_label_of(line, item) for line, item in lines]
    counts = Counter(label for label, _ in labels if label)
    speakers = [label for label, n in counts.items() if n > 1]
    n_labels = sum(counts.values())
    for index, (line, _) in enumerate(lines):
        label, rest = labels[index]
        if line.startswith("#"):
            frame.append(line.lstrip("# "))
        elif _is_greeting(line):
            frame.append(line)
            speakers.append(line)
        elif _is_heading(lines, index):
            frame.append(line)
        elif label and (n_labels > 1 or not rest) and not _LONG_NUMBER.search(label):
            frame.append(label)
            body.append(rest)
        else:
            body.append(line)
    return Parts("\n".join(body), "\n".join(frame), "\n".join(speakers))


def _without_item(line: str, months: Container[str]) -> tuple[str, bool]:
    """Return a line without the mark or number of a list item or the frame of a box, and whether it had a mark."""
    if line[:1] in _BOX and not line.startswith("|"):
        line = line.strip(_BOX)
    dated = _NUMBER_ITEM.match(line)
    item = _ITEM.match(line) if not (dated and dated[1].lower() in months) else None
    return (line[item.end() :], True) if item else (line, False)


def _label_of(line: str, item: bool) -> tuple[str, str]:
    """Return the label at the beginning of a line and the rest, ("", line) without one."""
    match = _LABEL.match(line)
    if match and match["space"] is None and match["colon"] == ":" and not line.endswith(match[0]):
        match = None  # 12:30, https://
    if match is None and item:
        match = _DASH_LABEL.match(line)
    if match is None or not _is_short(match["label"], _MAX_LABEL_WORDS, 14):
        return "", line
    return match["label"], line[match.end() :]


def _is_short(line: str, n_words: int, n_letters: int) -> bool:
    return line.count(" ") < n_words and len(_CJK.findall(line)) <= n_letters


def _is_greeting(line: str) -> bool:
    """Return whether a line is a greeting such as "Dear Sam,"."""
    return line.endswith((",", "，", "、")) and _is_short(line, 4, 10)


def _is_heading(lines: list[tuple[str, bool]], index: int) -> bool:
    """Return whether a line is a heading: short, without a mark at its end, before other text."""
    line, item = lines[index]
    if not line or "|" in line or line.rstrip("*_ ").endswith(_ENDS) or len(line) > 2 * _MAX_HEADING_LETTERS:
        return False
    if not _is_short(line, _MAX_HEADING_WORDS + 1, 30):
        return False
    bold = line.startswith("**") and line.endswith("**")
    before = index == 0 or not lines[index - 1][0]
    after = next((text for text, _ in lines[index + 1 :] if text), "")
    if not after:
        return False
    follows = index + 1 < len(lines) and not lines[index + 1][0]
    return bold or (not item and (before or follows) and not (follows and not before))
