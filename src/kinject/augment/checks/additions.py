"""What a text adds to its passage: numbers, dates, units, names and quotations that the passage lacks.

A changed fact is an added one, so set membership finds it. The facts of a passage, and which of them a text carries, are in
`facts`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from kinject.augment.checks.names import Reading, is_known, read
from kinject.augment.repair import statements_of
from kinject.language.detect import detect_language, find_script, guess_language
from kinject.language.tables import language_of
from kinject.language.values import MAX_COUNT, Values, read_values

_QUOTED = re.compile(
    r"“([^“”\n]{2,300})”|\"([^\"\n]{2,300})\"|«([^«»\n]{2,300})»|»([^«»\n]{2,300})«|„([^„“”\n]{2,300})[“”]"
    r"|「([^「」\n]{2,200})」|『([^『』\n]{2,200})』"
)
_WORDS = re.compile(r"\w+(?:['’]\w+)*")
_HAN = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")
_SPEECH = 5
"""A quotation of so many words is speech, and must be in the passage; a shorter one may be a term or a title."""
_MOST_VALUES = 40
"""Numbers of a passage that are calculated with."""
_FEW_VALUES = 8
"""Numbers of a passage, of which any two may be multiplied or divided to give one of three digits."""
_FACTORS = frozenset((7, 10, 12, 24, 52, 60, 100, 365, 1000, 3600, 10**6, 10**9))
"""Between the units of one quantity, and a number and its millions."""
_TIMES = frozenset("millisecond second minute hour day week month year decade century".split())  # noqa: SIM905
_MONEY = frozenset("dollar sterling euro yen yuan franc livre rupee".split())  # noqa: SIM905 - a line of words
_ALIKE = ({"lb", "sterling"}, {"degree", "celsius", "fahrenheit"}, {"ton", "tonne"}, {"bc", "year"})
"""Units that one word may mean: pounds, degrees."""


@dataclass(frozen=True, slots=True)
class Addition:
    """A fact that a text has and its passage lacks: `reason` is a key of `REASONS`, `detail` the evidence."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Facts:
    """What can be read from a text without understanding it: its `values`, its words and `names`, and its quotations.

    `quotations` maps the normal form of a quotation to its text. `context` are the values of its title and
    headings, which are no additions.
    """

    code: str
    text: str
    values: Values
    names: Reading
    quotations: dict[str, str]
    context: Values

    @property
    def vague(self) -> bool:
        """Whether it has a word for a quantity without a number."""
        return language_of(self.code).vague.search(self.text) is not None

    @property
    def form(self) -> str:
        """Its words in their plain forms, with a space before and after each."""
        return _plain_form(self.text)


@lru_cache(maxsize=256)
def source_facts(source: str, context: str = "") -> Facts:
    """Return the facts of a passage in its own language, kept for its other texts. `context`, as its title, is no addition."""
    code = detect_language(source) or guess_language(source) or _only_language(source)
    facts = read_facts(source, code, context)
    return replace(facts, context=read_values(f"{source}\n{context}", code))  # the numbers of its headings, too


@lru_cache(maxsize=256)
def read_facts(text: str, code: str, context: str = "") -> Facts:
    """Return the facts of a text of the language `code`."""
    quotations = {}
    for match in _QUOTED.finditer(text):
        quotation = next(group for group in match.groups() if group)
        if form := _plain_form(quotation).strip():
            quotations[form] = quotation
    names = read(text, code)
    if context:
        names = names.with_words_of(read(context, code))
    return Facts(code, text, read_values(names.body, code), names, quotations, read_values(context, code))


def _only_language(text: str) -> str:
    """Return the language that is assumed for a script, for a text whose language is not clear: "en" for ASCII."""
    scripts = {"Japanese": "ja", "Chinese": "zh", "Korean": "ko", "Arabic": "ar", "Hebrew": "he", "Thai": "th"}
    return scripts.get(find_script(text), "" if not text.isascii() else "en")


@lru_cache(maxsize=512)
def _plain_form(text: str) -> str:
    from kinject.language.tables import plain

    spaced = text if text.isascii() else _HAN.sub(r" \g<0> ", text)
    return f" {' '.join(plain(word) for word in _WORDS.findall(spaced))} "


def without_additions(source: Facts, text: str) -> tuple[str, list[Addition]]:
    """Return a list, or a text of several paragraphs, without the parts that add something, and what they add.

    Each item is a statement of its own. A text whose items mostly add is left whole, and so is one of a single paragraph.
    """
    items = statements_of(text)
    added = [(item, addition) for item in items if (addition := find_addition(source, item))]
    if not added or 2 * len(added) > len(items):
        return text, []
    for item, _ in added:
        text = text.replace(item, "", 1)
    return text.strip(), [addition for _, addition in added]


def find_addition(source: Facts, text: str) -> Addition | None:
    """Return the first fact that `text` adds to a passage, None if it adds none.

    A name in another role ("A beat B" for "B beat A"), a negation and a changed common word are not found: those are
    relations of facts, which a judge can read.
    """
    new = read_facts(text, source.code)
    return next(_additions(source, new), None)


def _additions(source: Facts, new: Facts) -> Iterator[Addition]:
    yield from _added_numbers(source, new)
    yield from _added_dates(source, new)
    yield from _added_units(source, new)
    for form, quotation in new.quotations.items():
        if form.count(" ") + 1 >= _SPEECH and "__" not in quotation and not _is_quoted(form, source.form):
            yield Addition("quotation", f"{quotation[:60]!r} is not in the source")
    for name in new.names.candidates:
        if not is_known(name, new.names, source.names):
            yield Addition("name", f"{new.names.spelling[name]} is not in the source")


_IMPLIED_UNIT = {"10": "year", "100": "year", "1000": "year", "14": "day", "7": "day", "24": "hour", "60": "minute"}
"""A number that a word implies -> its unit: a decade is ten years."""


def _is_quoted(form: str, source: str) -> bool:
    """Return whether most words of a quotation are in the source, with any endings."""
    words = form.split()
    stems = [f" {word[: max(4, len(word) - 2)]}" for word in words]
    return f" {form} " in source or 5 * sum(stem in source for stem in stems) >= 4 * len(words)


def _added_numbers(source: Facts, new: Facts) -> Iterator[Addition]:
    known = {**source.context.numbers, **source.values.numbers}
    implied = source.values.implied | source.context.implied
    for number in sorted(new.values.certain - known.keys(), key=lambda number: (-len(number), number)):
        units = new.values.numbers[number]
        if number in implied and (number not in _IMPLIED_UNIT or units <= {_IMPLIED_UNIT[number]}):
            continue
        if number in new.values.counted and not units:  # a writer may count, but not change what was counted
            following = new.values.counted[number]
            nouns = set().union(*(source.values.counted[other] for other in source.values.counted))
            if not following & nouns or following & source.values.counted.get(number, set()):
                continue
        elif is_rewritten(number, units, known) or _is_derived(number, units, known, source.vague):
            continue
        yield Addition("number", f"{number} is not in the source")


def is_rewritten(number: str, units: set[str], known: dict[str, set[str]]) -> bool:
    """Return whether one of the `known` numbers is `number` in another notation: 20:30, half past 8; 1,200 m, 1.2 km; 1990s."""
    if ":" in number:
        hour, _, minute = number.partition(":")
        same = {f"{(int(hour) + 12) % 24}:{minute}", hour, f"{hour}.{minute}", str((int(hour) + 12) % 24)}
        return not same.isdisjoint(known)
    if number.endswith("00s") and str(int(number[:-3]) + 1) in known:  # the 1800s, the 19th century
        return True
    if number.endswith("s"):  # 1990s, 90s
        return any(other.rstrip("s")[-len(number[:-1]) : -1] == number[:-2] for other in known if len(other) > 3)
    value = float(number)
    for other, kind in known.items():
        if ":" in other:
            hours, minutes = (int(part) for part in other.split(":"))
            if value in (hours, hours % 12, (hours + 1) % 12, minutes, 60 - minutes) and value:
                return True
            continue
        other_value = float(other.rstrip("s"))
        if value == other_value or number == other.replace(".", "") or other == number.replace(".", ""):
            return True
        low, high = sorted((value, other_value))
        ratio = round(high / low, 6) if low else 0
        if ratio in _FACTORS and kind and units and kind != units:
            return True
        if ratio in (10**6, 10**9) or _is_rounded(value, other_value):
            return True
        if other.isdecimal() and len(other) == 4 and value in (int(other) // 100 + 1, int(other) // 100 * 100):
            return "century" in units or value > 100
        if number.isdecimal() and len(number) == 2 and len(other) == 4 and other.endswith(number):
            return True
    return False


def _is_rounded(value: float, exact: float) -> bool:
    """Return whether a number is another one, rounded to one or two digits: 20,000 for 19,873; 13 for 12.7."""
    if exact != int(exact) and abs(value - exact) < 1 and value == int(value):
        return True
    if value < 100 or exact < 100:
        return False
    digits = f"{value:.0f}"
    zeros = len(digits) - len(digits.rstrip("0"))
    return zeros >= len(digits) - 2 and zeros > 0 and abs(value - exact) <= 10**zeros


def _is_derived(number: str, units: set[str], known: dict[str, set[str]], vague: bool) -> bool:
    """Return whether a number can be calculated from those of a passage.

    One of three or more digits is a sum, difference, product, ratio or change by percent of two, a part or a multiple of
    one; a shorter one a sum or difference of numbers of its unit, or of years. Where the passage is `vague` (half, the
    next year), it may also be a simple part or multiple of one, or the year beside it.
    """
    if ":" in number or number.endswith("s"):
        return False
    value = float(number)
    numbers = [(float(other), kind) for other, kind in known.items() if other.replace(".", "", 1).isdecimal()][
        :_MOST_VALUES
    ]
    years = [other for other, _ in numbers if 1000 <= other <= 2100]
    if units <= {"year", "month"} and value < 1000 and any(a - b == value for a in years for b in years):
        return True
    same = [other for other, kind in numbers if (kind & units) or kind == units]
    results = [sum(same)] if len(same) > 1 else []
    pairs = [(a, b) for index, a in enumerate(same) for b in same[index + 1 :]]
    if units and value > MAX_COUNT:
        results += [result for a, b in pairs for result in (a + b, abs(a - b))]
    if vague:
        results += [result for a in same if value > MAX_COUNT or units for result in (a / 2, a * 2, a * 1.5)]
        results += [year + step for year in years for step in (-1, 1)] if units <= {"year"} else []
        results += [25, 50, 75] if "%" in units else []
    if is_precise(number, units):
        results += [a * n for a, _ in numbers for n in range(2, 13)] + [a / n for a, _ in numbers for n in range(2, 11)]
        every = [other for other, _ in numbers]
        pairs = [(a, b) for index, a in enumerate(every) for b in every[index + 1 :]]
        results += [result for a, b in pairs for result in (a + b, abs(a - b))]
        if len(number.replace(".", "").rstrip("0")) > 3 or len(every) <= _FEW_VALUES:
            results += [result for pair in pairs for result in _results(*pair)]
    decimals = len(number.partition(".")[2])
    return any(abs(result - value) <= 0.5 * 10.0**-decimals * ("." in number) + 1e-6 for result in results)


def is_precise(number: str, units: set[str]) -> bool:
    """Return whether a number has three or more digits besides zeros at its end, and is no year."""
    is_year = len(number) == 4 and "1000" < number < "2100" and units <= {"year"}
    return len(number.replace(".", "").rstrip("0")) > 2 and not is_year


def _results(a: float, b: float) -> Iterator[float]:
    """Yield the results that may be calculated from two numbers."""
    yield a * b
    for base, part in ((a, b), (b, a)):
        if part:
            yield from (base / part, 100 * base / part)
        if part < 100:
            yield from (base * part / 100, base * (1 + part / 100), base * (1 - part / 100))


def _added_dates(source: Facts, new: Facts) -> Iterator[Addition]:
    names = language_of("en").month_names
    titles = {number: name.title() for name, number in names.items()}
    known = source.values.months | source.values.possible_months | source.context.months
    for month in sorted(new.values.months - known):
        yield Addition("date", f"{titles[month]} is not in the source")
    for month, day in sorted(new.values.days - source.values.days - source.context.days):
        yield Addition("date", f"{day} {titles[month]} is not in the source")


def _added_units(source: Facts, new: Facts) -> Iterator[Addition]:
    for number, units in new.values.numbers.items():
        known = source.values.numbers.get(number, set())
        added = units - known - source.context.numbers.get(number, set())
        added -= set().union(*(group for group in _ALIKE if not group.isdisjoint(known)))
        if not added or not known or (number in ("0", "1") and number not in new.values.certain):
            continue
        if _kind(min(added)) == "time" != _kind(min(known)):
            continue
        others = {other: kind for other, kind in source.values.numbers.items() if other != number and kind & added}
        if _is_derived(number, added, others, source.vague) or is_rewritten(number, added, others):
            continue
        yield Addition("unit", f"{number} {min(added)}: the source has {number} with {', '.join(sorted(known))}")


def _kind(unit: str) -> str:
    return "time" if unit in _TIMES else "money" if unit in _MONEY else "percent" if unit == "%" else "measure"
