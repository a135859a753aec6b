"""What a text adds to its passage, and which facts of the passage it carries: numbers, dates,
units, names and quotations.

A changed fact is an added one, so set membership finds it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache, lru_cache
from itertools import combinations, product, starmap
from math import isclose
from operator import sub

from kinject.augment.answers import statements_of
from kinject.augment.checks.names import Reading, is_known, read
from kinject.language import detect_language, guess_language
from kinject.language.tables import language_of, plain
from kinject.language.values import MAX_COUNT, Values, read_values

_QUOTED = re.compile(
    r"“([^“”\n]{2,300})”|\"([^\"\n]{2,300})\"|«([^«»\n]{2,300})»|»([^«»\n]{2,300})«"
    r"|„([^„“”\n]{2,300})[“”]|「([^「」\n]{2,200})」|『([^『』\n]{2,200})』"
)
_WORDS = re.compile(r"\w+(?:['’]\w+)*")
_HAN = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")
_SPEECH = 5
"""A quotation of so many words is speech, and must be in the passage; a shorter one may be a term
or a title."""
_MOST_VALUES = 40
"""Numbers of a passage that are calculated with."""
_SIZES: Sequence[Mapping[str, float]] = (
    {"mm": 0.001, "cm": 0.01, "m": 1, "km": 1000},
    {"inch": 1, "foot": 12, "yard": 36, "mile": 63360},
    {"m2": 1, "hectare": 10**4, "km2": 10**6},
    {"ml": 1, "cl": 10, "dl": 100, "litre": 1000, "m3": 10**6},
    {"mg": 1, "g": 1000, "kg": 10**6, "tonne": 10**9, "ton": 10**9},
    {"millisecond": 1, "second": 1000, "minute": 60_000, "hour": 3_600_000},
    {"hour": 1, "day": 24, "week": 168},
    {"day": 1, "week": 7, "year": 365},
    {"week": 1, "year": 52},
    {"month": 1, "year": 12, "decade": 120, "century": 1200},
    {"hz": 1, "khz": 1000, "mhz": 10**6, "ghz": 10**9},
    {"w": 1, "kw": 1000, "mw": 10**6, "gw": 10**9},
    {"byte": 1, "kb": 1000, "mb": 10**6, "gb": 10**9, "tb": 10**12},
    {"byte": 1, "kb": 2**10, "mb": 2**20, "gb": 2**30, "tb": 2**40},
)
"""Units that are written for each other, each with its size: a year has 12 months, 52 weeks or 365
days."""
_MILLIONS_OF = re.compile(r"[$€£¥] ?[mM]\b|\b[mM][$€£¥]")
_TIMES = frozenset(
    ("millisecond", "second", "minute", "hour", "day", "week", "month", "year", "decade", "century")
)
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
    def scales(self) -> set[int]:
        """The millions or billions of which it has a word, perhaps apart from their numbers: 3.5 to
        4 million; in millions."""
        factors = language_of(self.code).digit_scales
        words = {word.removesuffix("s") for word in re.findall(r"[^\W\d_]+", self.text.lower())}
        found = {factors[word] for word in words & factors.keys()}
        if _MILLIONS_OF.search(self.text):
            found.add(10**6)
        return {factor for factor in found if factor >= 10**6}

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
    # Too few words have no detected language; ASCII is then read as English.
    code = detect_language(source) or guess_language(source) or ("en" if source.isascii() else "")
    facts = read_facts(source, code)
    # Of the whole source: `facts.values` lacks the numbers of headings and of list items, which are
    # no additions in a text either.
    return replace(facts, context=read_values(source, code))


@lru_cache(maxsize=256)
def read_facts(text: str, code: str) -> Facts:
    """Return the facts of a text of the language `code`."""
    quotations = {}
    for match in _QUOTED.finditer(text):
        quotation = next(group for group in match.groups() if group)
        form = _plain_form(quotation).strip()
        if form:
            quotations[form] = quotation
    names = read(text, code)
    return Facts(code, text, read_values(names.body, code), names, quotations, Values())


@lru_cache(maxsize=512)
def _plain_form(text: str) -> str:
    # Chinese and Japanese part no words: each character counts as one.
    if not text.isascii():
        text = _HAN.sub(r" \g<0> ", text)
    return f" {' '.join(map(plain, _WORDS.findall(text)))} "


def without_additions(source: Facts, text: str) -> tuple[str, list[Addition]]:
    """Return a list, or a text of several paragraphs, without the parts that add something, and
    what they add.

    Each item is a statement of its own. A text whose items mostly add is left whole, and so is one
    of a single paragraph.
    """
    if "\n" not in text:
        return text, []
    items = statements_of(text)
    added: dict[int, Addition] = {}
    for index, item in enumerate(items):
        addition = find_addition(source, item)
        if addition:
            added[index] = addition
    # A list that mostly adds is no list with faulty items; `find_addition` then refuses it whole.
    if not added or 2 * len(added) > len(items):
        return text, []
    for index in added:
        text = text.replace(items[index], "", 1)
    return text.strip(), list(added.values())


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
        is_speech = form.count(" ") + 1 >= _SPEECH
        has_gap = "__" in quotation  # the text of an exercise
        if is_speech and not has_gap and not _is_quoted(form, source.form):
            yield Addition("quotation", f"{quotation[:60]!r} is not in the source")
    for name in new.names.candidates:
        if not is_known(name, new.names, source.names):
            yield Addition("name", f"{new.names.spelling[name]} is not in the source")


def _is_quoted(form: str, source: str) -> bool:
    """Return whether most words of a quotation are in the source, with any endings."""
    if f" {form} " in source:
        return True
    words = form.split()
    n_found = sum(f" {word[: max(4, len(word) - 2)]}" in source for word in words)
    return 5 * n_found >= 4 * len(words)


def _added_numbers(source: Facts, new: Facts) -> Iterator[Addition]:
    known = {**source.context.numbers, **source.values.numbers}
    implied = source.values.implied | source.context.implied
    added = new.values.certain - known.keys() - implied
    for number in sorted(added, key=_longest_first):
        units = new.values.numbers[number]
        if number in new.values.counted and not units:
            allowed = _may_be_counted(number, source.values, new.values)
        else:
            allowed = is_rewritten(number, units, known)
            allowed = allowed or _is_derived(number, units, known, source.vague)
            allowed = allowed or _is_scaled(number, source, known, new)
        if not allowed:
            yield Addition("number", f"{number} is not in the source")


def _is_scaled(number: str, source: Facts, known: Collection[str], new: Facts) -> bool:
    """Return whether a number is a `known` one of a passage with its million, or without it where
    that is written apart: 3.5 to 4 million."""
    if ":" in number or number.endswith("s"):
        return False
    value = Decimal(number)
    # Where the passage has no such word, 5 people were 5 million.
    written = [value / factor for factor in source.scales]
    written += [value * factor for factor in new.scales]
    return any(f"{other.normalize():f}" in known for other in written)


def _longest_first(number: str) -> tuple[int, str]:
    return -len(number), number


def _may_be_counted(number: str, source: Values, new: Values) -> bool:
    """Return whether a small number in words is no change of one in the source: a writer may count,
    but not change what was counted."""
    following = new.counted[number]
    nouns = set[str]().union(*source.counted.values())
    if not following & nouns:
        return True
    return bool(following & source.counted.get(number, set()))


def is_rewritten(number: str, units: set[str], known: Mapping[str, set[str]]) -> bool:
    """Return whether one of the `known` numbers is `number` in another notation: 20:30, half past
    8; 1,200 m, 1.2 km; 1990s."""
    if ":" in number:
        return _is_time_in(number, known)
    if number.endswith("s"):
        return _is_decade_in(number, known)
    return any(_is_same(number, units, other, kind) for other, kind in known.items())


def _is_time_in(time: str, known: Collection[str]) -> bool:
    """Return whether one of the `known` numbers is a time on the clock of 12 hours, without its
    minutes, or with a point."""
    hour, _, minute = time.partition(":")
    other_half = str((int(hour) + 12) % 24)
    forms = {hour, other_half, f"{other_half}:{minute}", f"{hour}.{minute}".rstrip("0")}
    return not forms.isdisjoint(known)


def _is_decade_in(decade: str, known: Collection[str]) -> bool:
    """Return whether a decade (the 1990s, the 90s) has one of the `known` years; the 1800s may also
    be the 19th century."""
    tens, hundreds = decade[:-2], decade[:-3]
    # The 1900s alone: the 90s and 1990s are a tenth of a century.
    if hundreds and decade.endswith("00s") and str(int(hundreds) + 1) in known:
        return True
    years = (year.rstrip("s") for year in known if len(year) > 3)
    return any(year[-len(tens) - 1 : -1] == tens for year in years)


def _is_same(number: str, units: set[str], other: str, kind: set[str]) -> bool:
    """Return whether a number is another one in other units, rounded, or as a century, a decade or
    a part of a time."""
    value = float(number)
    if ":" in other:
        hours, minutes = (int(part) for part in other.split(":"))
        # 20:40 is half past 8 by a clock of 12 hours, or 20 minutes to the next. The 0 minutes of a
        # full hour are no number to tell.
        return value > 0 and value in (hours, hours % 12, (hours + 1) % 12, minutes, 60 - minutes)
    exact = float(other.rstrip("s"))
    if value == exact or _parts_thousands(number, other) or _parts_thousands(other, number):
        return True
    return (
        _is_converted(value, units, exact, kind)
        or _is_part_of_year(number, units, other)
        or _is_rounded(value, exact)
    )


def _parts_thousands(number: str, whole: str) -> bool:
    """Return whether the point of a number may part the thousands of a `whole` one, as a writer of
    another language has it: 1.216, 1216."""
    # By any point 1.5 was 15, and 2.5% were 25%.
    return re.fullmatch(r"\d{1,3}\.\d{3}", number) is not None and number.replace(".", "") == whole


def _is_converted(value: float, units: set[str], exact: float, kind: set[str]) -> bool:
    """Return whether two numbers are one amount in two units of one quantity."""
    # Any factor between any units let 15 km become 150 m, and 5 kg 50 g.
    for sizes in _SIZES:
        for unit, other in product(units & sizes.keys(), kind & sizes.keys()):
            if unit != other and isclose(value * sizes[unit], exact * sizes[other], rel_tol=1e-6):
                return True
    return False


def _is_part_of_year(number: str, units: set[str], year: str) -> bool:
    """Return whether a number is the century of a year (19, 1800) or its last two digits."""
    if len(year) != 4:
        return False
    if len(number) == 2 and year.endswith(number):
        return True
    if not year.isdecimal():
        return False
    value, hundreds = float(number), int(year) // 100
    if value not in (hundreds + 1, hundreds * 100):
        return False
    # A bare 19 is no century; 1800 may stand for one by itself.
    return "century" in units or value > 100


def _is_rounded(value: float, exact: float) -> bool:
    """Return whether a number is another one rounded: 13 for 12.7, 20,000 for 19,873."""
    distance = abs(value - exact)
    if exact % 1 > 0 and distance < 1 and value % 1 == 0:
        return True
    digits = f"{value:.0f}"
    n_zeros = len(digits) - len(digits.rstrip("0"))
    # All but two digits must be zeros: 20,000 is a rounded number, 19,900 is one of its own.
    is_round = n_zeros >= max(1, len(digits) - 2)
    return min(value, exact) >= 100 and is_round and distance <= 10**n_zeros / 2


def _is_derived(number: str, units: set[str], known: Mapping[str, set[str]], vague: bool) -> bool:
    """Return whether a number can be calculated from those of a passage.

    One of three or more digits is a sum or difference of two, a part or a multiple of one; a
    shorter one a sum or difference of numbers of its unit, or of years. Where the passage is
    `vague` (half, the next year), also a simple part of one.
    """
    if ":" in number or number.endswith("s"):
        return False
    decimals = len(number.partition(".")[2])
    # Quotients are off in their last digits.
    tolerance = 1e-6
    # By its digits, so that words such as "nearly" need not be known in every language.
    if decimals:
        tolerance += 0.5 * 10.0**-decimals  # as precise as it is written
    value = float(number)
    results = _derivations(number, units, known, vague)
    return any(abs(result - value) <= tolerance for result in results)


def _derivations(
    number: str, units: set[str], known: Mapping[str, set[str]], vague: bool
) -> Iterator[float]:
    """Yield what the numbers of a passage come to in the ways that are open to `number`."""
    value = float(number)
    # Times (20:30) and decades (1990s) are no numbers to calculate with.
    decimals = [other for other in known if other.replace(".", "", 1).isdecimal()][:_MOST_VALUES]
    every = list(map(float, decimals))
    same = [float(other) for other in decimals if known[other] & units or known[other] == units]
    years = [other for other in every if 1000 <= other <= 2100]
    if len(same) > 1:
        yield sum(same)
    if units <= {"year", "month"} and value < 1000:
        yield from starmap(sub, product(years, years))  # an age, or the time between two events
    if units and value > MAX_COUNT:
        yield from _sums_and_differences(same)
    if vague:
        yield from _simple_parts(value, units, same, years)
    is_year = len(number) == 4 and "1000" < number < "2100" and units <= {"year"}
    # Any number of two digits as derivable let "90 seats" pass in a passage without numbers.
    n_digits = len(number.replace(".", "").rstrip("0"))
    if n_digits > 2 and not is_year:  # a shorter one is nearly always some part of another
        for other, n in product(every, range(2, 13)):
            yield from (other * n, other / n)
        yield from _sums_and_differences(every)


def _sums_and_differences(numbers: Sequence[float]) -> Iterator[float]:
    for a, b in combinations(numbers, 2):
        yield a + b
        yield abs(a - b)


def _simple_parts(
    value: float, units: set[str], same: Sequence[float], years: Sequence[float]
) -> Iterator[float]:
    """Yield what words as "half", "a quarter" or "the next year" may come to."""
    if value > MAX_COUNT or units:
        for other in same:
            yield from (other / 2, other * 2, other * 1.5)
    if units <= {"year"}:
        for year in years:
            yield from (year - 1, year + 1)
    if "%" in units:
        yield from (25, 50, 75)


def _added_dates(source: Facts, new: Facts) -> Iterator[Addition]:
    # A word of the source that may be a month (May) counts as one: a text that names it adds
    # nothing.
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
        for group in _ALIKE:
            if not group.isdisjoint(known):
                added -= group
        # "one" is often a pronoun, so that its unit says nothing.
        if not added or not known or (number in ("0", "1") and number not in new.values.certain):
            continue
        if min(added) in _TIMES and min(known) not in _TIMES:
            continue  # a time beside what may count something else
        others = {
            other: kind
            for other, kind in source.values.numbers.items()
            if other != number and kind & added
        }
        if _is_derived(number, added, others, source.vague) or is_rewritten(number, added, others):
            continue
        evidence = f"the source has {number} with {', '.join(sorted(known))}"
        yield Addition("unit", f"{number} {min(added)}: {evidence}")


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
    facts = []
    for number, units in values.numbers.items():
        if number in values.certain and not number.endswith("s"):
            facts.append(Fact("number", number, " ".join([number, *sorted(units)[:1]])))
    for month, day in sorted(values.days):
        facts.append(Fact("date", f"{month:02d}-{day:02d}", f"{day} {titles[month]}"))
    named: list[tuple[str, ...]] = []
    for run in sorted(dict.fromkeys(source.names.runs), key=len, reverse=True):
        # Longest first, so that a surname alone is no fact beside the full name.
        if not any(set(run) <= set(longer) for longer in named):
            named.append(run)
            written = " ".join(source.names.spelling[word] for word in run)
            facts.append(Fact("name", " ".join(run), written))
    for form, text in source.quotations.items():
        # A word alone in quotation marks may be a term or a title.
        if " " in form:
            facts.append(Fact("quotation", form, text))
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
            or any(_is_scaled(number, source, {fact.form}, new) for number in values.numbers)
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
    for fact in facts:
        if fact not in kept:
            return Addition(fact.kind, f"{fact.text} is lost")
    return None
