"""Numbers and marks of the items of lists, as their reader sees them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kinject.documents.office import OFF, attribute_at, whole_number
from kinject.documents.text import XmlElement, one_line

_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_VAL = f"{_W}val"
_ROMAN = (
    *((1000, "m"), (900, "cm"), (500, "d"), (400, "cd"), (100, "c"), (90, "xc"), (50, "l")),
    *((40, "xl"), (10, "x"), (9, "ix"), (5, "v"), (4, "iv"), (1, "i")),
)

_HAN_DIGITS = "〇一二三四五六七八九"


def item_number(n: int, kind: str) -> str:
    """Return the number of an item as its reader sees it, of the kind 1, 01, a, A, i, I or 一: texts
    refer to (b) and to IV."""
    number = str(n)
    if kind == "01":
        return f"{n:02}"
    if kind == "一" and 0 < n < 100:
        return _in_han(n)
    if kind in ("a", "A") and 0 < n <= 780:
        number = chr(ord("a") + (n - 1) % 26) * ((n - 1) // 26 + 1)
    elif kind in ("i", "I") and 0 < n < 4000:
        number = ""
        for value, letters in _ROMAN:
            number += letters * (n // value)
            n %= value
    if kind.isupper():
        return number.upper()
    return number


def _in_han(n: int) -> str:
    """Return a number below 100 in Chinese characters: 12 is 十二, 20 二十."""
    tens, ones = divmod(n, 10)
    number = ""
    if tens > 1:
        number = _HAN_DIGITS[tens]
    if tens:
        number += "十"
    if ones:
        number += _HAN_DIGITS[ones]
    return number


class _Level(NamedTuple):
    """A depth of a numbering: the list whose numbers it counts, and where it begins. An item above,
    of a depth below `restarts_below`, lets it begin again. `is_legal`: all its numbers are
    decimal."""

    list_id: str
    is_bullet: bool = True
    start: int = 1
    restarts: bool = False
    kind: str = "1"
    template: str = ""
    restarts_below: int = 0
    is_legal: bool = False


_KINDS = {
    **{"lowerLetter": "a", "upperLetter": "A", "lowerRoman": "i", "upperRoman": "I"},
    "decimalZero": "01",
    **dict.fromkeys(("chineseCounting", "chineseCountingThousand"), "一"),
    **dict.fromkeys(("taiwaneseCounting", "taiwaneseCountingThousand", "japaneseCounting"), "一"),
}
"""The numbers of Word's lists -> their kind, where they are not decimal."""


class WordLists:
    """The lists of a Word document, whose items are counted as they come; `roots` are those of the
    parts that define them."""

    def __init__(self, roots: Iterable[XmlElement]) -> None:
        self._levels: dict[tuple[str, int], _Level] = {}
        """(numbering, depth) -> how its items are marked."""
        for root in roots:
            self._add_numberings(root)
        self._restarted: set[tuple[str, int]] = set()
        self._counts: Counter[tuple[str, int]] = Counter()

    def _add_numberings(self, root: XmlElement) -> None:
        lists = {}
        styles = {}
        for element in root.iter(f"{_W}abstractNum"):
            list_id = element.get(f"{_W}abstractNumId", "")
            lists[list_id] = element
            styles[_value(element, "styleLink")] = list_id
        for number in root.iter(f"{_W}num"):
            list_id = _value(number, "abstractNumId")
            # A list may be that of a style, which is another entry.
            if list_id in lists:
                list_id = styles.get(_value(lists[list_id], "numStyleLink") or "-", list_id)
            for depth, level in _levels_of(number, list_id, lists.get(list_id)):
                self._levels[number.get(f"{_W}numId", ""), depth] = level

    def next_mark(self, numbering: str, depth: int) -> str:
        """Return the mark of the next item of a numbering at a depth."""
        level = self._levels.get((numbering, depth), _Level(numbering))
        n = self._count_item(numbering, depth, level)
        if level.is_bullet:
            return "- "
        return self._number(numbering, depth, n)

    def _count_item(self, numbering: str, depth: int, level: _Level) -> int:
        """Return the number of the next item of a list; lists within it begin again."""
        for other in list(self._counts):
            within = self._levels.get((numbering, other[1]))
            restarts = within is None or depth < within.restarts_below
            if other[0] == level.list_id and other[1] > depth and restarts:
                del self._counts[other]
        # Numberings of one list go on from one another, but for one that restarts it, once.
        is_restarted = level.restarts and (numbering, depth) not in self._restarted
        self._restarted.add((numbering, depth))
        place = level.list_id, depth
        if place not in self._counts or is_restarted:
            self._counts[place] = level.start - 1
        self._counts[place] += 1
        return self._counts[place]

    def _number(self, numbering: str, depth: int, n: int) -> str:
        """Return the mark of a numbered item as Word shows it: 3., (b), § 2.1."""
        own = self._levels[numbering, depth]
        if not own.template:
            return f"{n}. "
        mark = own.template
        for index in range(depth + 1):
            level = self._levels.get((numbering, index), own)
            number = self._counts.get((level.list_id, index), level.start)
            kind = level.kind
            if own.is_legal and kind != "01":
                kind = "1"
            mark = mark.replace(f"%{index + 1}", item_number(number, kind))
        return f"{one_line(mark)} "


def _levels_of(
    number: XmlElement, list_id: str, abstract: XmlElement | None
) -> Iterator[tuple[int, _Level]]:
    """Yield the depths of a numbering, and how their items are marked: as in its list, but for what
    it changes."""
    levels: dict[int, XmlElement] = {}
    starts: dict[int, str] = {}
    if abstract is not None:
        for level in abstract.iter(f"{_W}lvl"):
            levels[whole_number(level.get(f"{_W}ilvl"))] = level
    for override in number.iterchildren(f"{_W}lvlOverride"):
        depth = whole_number(override.get(f"{_W}ilvl"))
        starts[depth] = _value(override, "startOverride")
        for level in override.iterchildren(f"{_W}lvl"):
            levels[depth] = level
    for depth, level in levels.items():
        form = _value(level, "numFmt")
        text = level.find(f"{_W}lvlText")
        template = _value(level, "lvlText")
        is_bullet = form in ("", "bullet", "none") or (text is not None and not template)
        restart = starts.get(depth, "")
        start = whole_number(restart or _value(level, "start"), 1)
        kind = _KINDS.get(form, "1")
        # Word counts depths from 1 here; 0 is never.
        above = whole_number(_value(level, "lvlRestart"), depth)
        is_legal = _is_on(level.find(f"{_W}isLgl"))
        yield (
            depth,
            _Level(list_id, is_bullet, start, bool(restart), kind, template, above, is_legal),
        )


def _is_on(element: XmlElement | None) -> bool:
    return element is not None and element.get(_VAL, "1") not in OFF


def _value(parent: XmlElement, name: str) -> str:
    """Return the value of a property, "" without one."""
    return attribute_at(parent, f"{_W}{name}", _VAL)
