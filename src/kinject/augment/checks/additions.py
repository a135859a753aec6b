"""What a text adds to its passage, and which facts of the passage it carries: numbers, dates,
units, names and quotations.

A changed fact is an added one, so set membership finds it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import combinations

from kinject.augment.answers import statements_of
from kinject.augment.checks.names import Reading, is_known, read
from kinject.language import detect_language, guess_language
from kinject.language.tables import language_of, plain
from kinject.language.values import MAX_COUNT, Values, read_values

_QUOTED = re.compile(
    r"“([^“”\n]{2,300})”|\"([^\"\n]{2,300})\"|«([^«»\n]{2,300})»|»([^«»\n]{2,300})«|„([^„“”\n]{2,300})[“”]"
    r"|「([^「」\n]{2,200})」|『([^『』\n]{2,200})』"
)
_WORDS = re.compile(r"\w+(?:['’]\w+)*")
_HAN = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")
_SPEECH = 5
"""A quotation of so many words is speech, and must be in the passage; a shorter one may be a term
or a title."""
_MOST_VALUES = 40
"""Numbers of a passage that are calculated with."""
_FACTORS = frozenset((7, 10, 12, 24, 52, 60, 100, 365, 1000, 3600, 10**6, 10**9))
"""Between the units of one quantity, and a number and its millions."""
_TIMES = frozenset("millisecond second minute hour day week month year decade century".split())  # noqa: SIM905
_ALIKE = ({"lb", "sterling"}, {"degree", "celsius", "fahrenheit"}, {"ton", "tonne"}, {"bc", "year"})
"""Units that one word may mean: pounds, degrees."""


@dataclass(frozen=True, slots=True)
class Addition:
    """A fact that a text has and its passage lacks: `reason` is a key of `REASONS`, `detail` the
    evidence."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Facts:
    """What can be read from a text without understanding it: its `values`, its words and `names`,
    and its quotations.

    `quotations` maps the normal form of a quotation to its text. `context` are the values of its
    title and headings, which are no additions.
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
    """Return the facts of a passage in its own language, kept for its other texts. `context`, as
    its title, is no addition."""
    if context:
        facts = source_facts(source)
        about, names = read(context, facts.code), facts.names
        names = replace(names, words=names.words | about.words, body=f"{names.body}\n{about.body}")
        return replace(facts, names=names, context=read_values(f"{source}\n{context}", facts.code))
    code = detect_language(source) or guess_language(source) or ("en" if source.isascii() else "")
    facts = read_facts(source, code)
    return replace(facts, context=read_values(source, code))


@lru_cache(maxsize=256)
def read_facts(text: str, code: str) -> Facts:
    """Return the facts of a text of the language `code`."""
    quotations = {}
    for match in _QUOTED.finditer(text):
        quotation = next(group for group in match.groups() if group)
        if form := _plain_form(quotation).strip():
            quotations[form] = quotation
    names = read(text, code)
    return Facts(code, text, read_values(names.body, code), names, quotations, Values())


@lru_cache(maxsize=512)
def _plain_form(text: str) -> str:
    spaced = text if text.isascii() else _HAN.sub(r" \g<0> ", text)
    return f" {' '.join(plain(word) for word in _WORDS.findall(spaced))} "


def without_additions(source: Facts, text: str) -> tuple[str, list[Addition]]:
    """Return a list, or a text of several paragraphs, without the parts that add something, and
    what they add.

    Each item is a statement of its own. A text whose items mostly add is left whole, and so is one
    of a single paragraph.
    """
    items = statements_of(text) if "\n" in text else []
    added = [(item, addition) for item in items if (addition := find_addition(source, item))]
    if not added or 2 * len(added) > len(items):
        return text, []
    for item, _ in added:
        text = text.replace(item, "", 1)
    return text.strip(), [addition for _, addition in added]


def find_addition(source: Facts, text: str) -> Addition | None:
    """Return the first fact that `text` adds to a passage, None if it adds none.

    A name in another role ("A beat B" for "B beat A"), a negation and a changed common word are not
    found: those are relations of facts, which a judge can read.
    """
    new = read_facts(text, source.code)
    return next(_additions(source, new), None)


def _additions(source: Facts, new: Facts) -> Iterator[Addition]:
    yield from _added_numbers(source, new)
    yield from _added_dates(source, new)
    yield from _added_units(source, new)
    for form, quotation in new.quotations.items():
        if (
            form.count(" ") + 1 >= _SPEECH
            and "__" not in quotation
            and not _is_quoted(form, source.form)
        ):
            yield Addition("quotation", f"{quotation[:60]!r} is not in the source")
    for name in new.names.candidates:
        if not is_known(name, new.names, source.names):
            yield Addition("name", f"{new.names.spelling[name]} is not in the source")


def _is_quoted(form: str, source: str) -> bool:
    """Return whether most words of a quotation are in the source, with any endings."""
    words = form.split()
    stems = [f" {word[: max(4, len(word) - 2)]}" for word in words]
    return f" {form} " in source or 5 * sum(stem in source for stem in stems) >= 4 * len(words)


def _added_numbers(source: Facts, new: Facts) -> Iterator[Addition]:
    known = {**source.context.numbers, **source.values.numbers}
    implied = source.values.implied | source.context.implied
    for number in sorted(
        new.values.certain - known.keys(), key=lambda number: (-len(number), number)
    ):
        units = new.values.numbers[number]
        if number in implied:
            continue
        if (
            number in new.values.counted and not units
        ):  # a writer may count, but not change what was counted
            following = new.values.counted[number]
            nouns = set().union(*(source.values.counted[other] for other in source.values.counted))
            if not following & nouns or following & source.values.counted.get(number, set()):
                continue
        elif is_rewritten(number, units, known) or _is_derived(number, units, known, source.vague):
            continue
        yield Addition("number", f"{number} is not in the source")


def is_rewritten(number: str, units: set[str], known: Mapping[str, set[str]]) -> bool:
    """Return whether one of the `known` numbers is `number` in another notation: 20:30, half past
    8; 1,200 m, 1.2 km; 1990s."""
    if ":" in number:
        hour, _, minute = number.partition(":")
        other = str((int(hour) + 12) % 24)
        return not {hour, other, f"{other}:{minute}", f"{hour}.{minute}".rstrip("0")}.isdisjoint(
            known
        )
    if number.endswith("s"):  # the 1990s, the 90s, and the 1800s of the 19th century
        tens, century = number[:-2], str(int(number[:-3] or 0) + 1)
        return century in known or any(
            year.rstrip("s")[-len(tens) - 1 : -1] == tens for year in known if len(year) > 3
        )
    return any(_is_same(number, units, other, kind) for other, kind in known.items())


def _is_same(number: str, units: set[str], other: str, kind: set[str]) -> bool:
    """Return whether a number is another one in other units, rounded, or as a century, a decade or
    a part of a time."""
    value = float(number)
    if ":" in other:
        hours, minutes = (int(part) for part in other.split(":"))
        return value > 0 and value in (hours, hours % 12, (hours + 1) % 12, minutes, 60 - minutes)
    exact = float(other.rstrip("s"))
    ratio = round(max(value, exact) / min(value, exact), 6) if value and exact else 0
    is_year = len(other) == 4 and other.isdecimal()
    is_century = value in (exact // 100 + 1, exact // 100 * 100) and (
        "century" in units or value > 100
    )
    zeros = len(f"{value:.0f}") - len(f"{value:.0f}".rstrip("0"))
    return (
        value == exact or number.replace(".", "") == other.replace(".", "") or ratio in (10**6, 10**9)
        or bool(ratio in _FACTORS and kind and units and kind != units)
        or (is_year and is_century) or (len(other) == 4 and len(number) == 2 and other.endswith(number))
        or (exact % 1 > 0 and abs(value - exact) < 1 and value % 1 == 0)  # rounded: 13 for 12.7; 20,000 for 19,873
        or (min(value, exact) >= 100 and zeros >= max(1, len(f"{value:.0f}") - 2) and abs(value - exact) <= 10**zeros)
    )  # fmt: skip


def _is_derived(number: str, units: set[str], known: Mapping[str, set[str]], vague: bool) -> bool:
    """Return whether a number can be calculated from those of a passage.

    One of three or more digits is a sum or difference of two, a part or a multiple of one; a
    shorter one a sum or difference of numbers of its unit, or of years. Where the passage is
    `vague` (half, the next year), also a simple part of one.
    """
    if ":" in number or number.endswith("s"):
        return False
    value = float(number)
    numbers = [
        (float(other), kind)
        for other, kind in known.items()
        if other.replace(".", "", 1).isdecimal()
    ]
    every = [other for other, _ in numbers[:_MOST_VALUES]]
    years = [other for other in every if 1000 <= other <= 2100]
    same = [other for other, kind in numbers[:_MOST_VALUES] if (kind & units) or kind == units]
    results = [sum(same)] if len(same) > 1 else []
    if units <= {"year", "month"} and value < 1000:
        results += [a - b for a in years for b in years]
    if units and value > MAX_COUNT:
        results += [result for a, b in combinations(same, 2) for result in (a + b, abs(a - b))]
    if vague:
        results += [
            result for a in same if value > MAX_COUNT or units for result in (a / 2, a * 2, a * 1.5)
        ]
        results += [year + step for year in years for step in (-1, 1)] if units <= {"year"} else []
        results += [25, 50, 75] if "%" in units else []
    is_year = len(number) == 4 and "1000" < number < "2100" and units <= {"year"}
    if len(number.replace(".", "").rstrip("0")) > 2 and not is_year:
        results += [result for a in every for n in range(2, 13) for result in (a * n, a / n)]
        results += [result for a, b in combinations(every, 2) for result in (a + b, abs(a - b))]
    decimals = len(number.partition(".")[2])
    return any(
        abs(result - value) <= 0.5 * 10.0**-decimals * ("." in number) + 1e-6 for result in results
    )


def _added_dates(source: Facts, new: Facts) -> Iterator[Addition]:
    known = source.values.months | source.values.possible_months | source.context.months
    for month in sorted(new.values.months - known):
        yield Addition("date", f"{_month_titles()[month]} is not in the source")
    for month, day in sorted(new.values.days - source.values.days - source.context.days):
        yield Addition("date", f"{day} {_month_titles()[month]} is not in the source")


@cache
def _month_titles() -> dict[int, str]:
    return {number: name.title() for name, number in language_of("en").month_names.items()}


def _added_units(source: Facts, new: Facts) -> Iterator[Addition]:
    for number, units in new.values.numbers.items():
        known = source.values.numbers.get(number, set())
        added = units - known - source.context.numbers.get(number, set())
        added -= set().union(*(group for group in _ALIKE if not group.isdisjoint(known)))
        if not added or not known or (number in ("0", "1") and number not in new.values.certain):
            continue
        if (
            min(added) in _TIMES and min(known) not in _TIMES
        ):  # a time beside what may count something else
            continue
        others = {
            other: kind
            for other, kind in source.values.numbers.items()
            if other != number and kind & added
        }
        if _is_derived(number, added, others, source.vague) or is_rewritten(number, added, others):
            continue
        yield Addition(
            "unit",
            f"{number} {min(added)}: the source has {number} with {', '.join(sorted(known))}",
        )


@dataclass(frozen=True, slots=True)
class Fact:
    """A number, date, name or quotation of a passage, or a statement that a judge lists of it.

    `form` is its normal form, and `text` how the passage writes it.
    """

    kind: str
    form: str
    text: str

    @property
    def id(self) -> str:
        """Its id within the passage, such as ``number:1206``."""
        return f"{self.kind}:{self.form}"


def facts_of(source: Facts) -> tuple[Fact, ...]:
    """Return the facts of a passage by kind: numbers, dates, names, quotations."""
    values, titles = source.values, _month_titles()
    facts = [
        Fact("number", number, " ".join([number, *sorted(values.numbers[number])[:1]]))
        for number in values.numbers if number in values.certain and not number.endswith("s")
    ]  # fmt: skip
    facts += [
        Fact("date", f"{month:02d}-{day:02d}", f"{day} {titles[month]}")
        for month, day in sorted(values.days)
    ]
    runs = sorted(dict.fromkeys(source.names.runs), key=len, reverse=True)
    named: list[tuple[str, ...]] = []
    for run in runs:
        if not any(set(run) <= set(longer) for longer in named):
            named.append(run)
            facts.append(
                Fact("name", " ".join(run), " ".join(source.names.spelling[word] for word in run))
            )
    facts += [
        Fact("quotation", form, text) for form, text in source.quotations.items() if " " in form
    ]
    return tuple(facts)


def carried(facts: tuple[Fact, ...], source: Facts, text: str) -> tuple[Fact, ...]:
    """Return those of a passage's `facts` that `text` carries."""
    new = read_facts(text, source.code)
    return tuple(fact for fact in facts if _is_carried(fact, source, new))


def _is_carried(fact: Fact, source: Facts, new: Facts) -> bool:
    values = new.values
    if fact.kind == "number":
        return (
            fact.form in values.numbers
            or fact.form in values.implied
            or is_rewritten(fact.form, source.values.numbers[fact.form], values.numbers)
        )
    if fact.kind == "date":
        return tuple(map(int, fact.form.split("-"))) in values.days
    if fact.kind == "statement":
        return False
    if fact.kind == "quotation":
        return f" {fact.form} " in new.form
    words = source.names.spelling.keys() & fact.form.split(" ") or {fact.form}
    return 2 * sum(is_known(word, source.names, new.names) for word in words) >= len(words)


def find_missing(source: Facts, text: str) -> Addition | None:
    """Return the first fact of a passage that `text` lost, None if it carries all."""
    facts = facts_of(source)
    kept = carried(facts, source, text)
    lost = next((fact for fact in facts if fact not in kept), None)
    return Addition(lost.kind, f"{lost.text} is lost") if lost else None
