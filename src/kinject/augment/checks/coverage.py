"""The facts of a passage that can be read without understanding it, and those that a text carries."""

from __future__ import annotations

from dataclasses import dataclass

from kinject.augment.checks.additions import Addition, Facts, is_rewritten, read_facts
from kinject.augment.checks.names import is_known
from kinject.language.tables import language_of

_FEWEST_QUOTED = 2
"""Words of a quotation that counts as a fact."""


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
    values, titles = source.values, {number: name.title() for name, number in language_of("en").month_names.items()}
    facts = [
        Fact("number", number, " ".join([number, *sorted(values.numbers[number])[:1]]))
        for number in values.numbers if number in values.certain and not number.endswith("s")
    ]  # fmt: skip
    facts += [Fact("date", f"{month:02d}-{day:02d}", f"{day} {titles[month]}") for month, day in sorted(values.days)]
    runs = sorted(dict.fromkeys(source.names.runs), key=len, reverse=True)
    named: list[tuple[str, ...]] = []
    for run in runs:
        if not any(set(run) <= set(longer) for longer in named):
            named.append(run)
            facts.append(Fact("name", " ".join(run), " ".join(source.names.spelling[word] for word in run)))
    facts += [
        Fact("quotation", form, text)
        for form, text in source.quotations.items()
        if form.count(" ") + 1 >= _FEWEST_QUOTED
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
    words = [word for word in source.names.spelling if word in fact.form.split(" ")] or [fact.form]
    return 2 * sum(is_known(word, source.names, new.names) for word in words) >= len(words)


def find_missing(source: Facts, text: str) -> Addition | None:
    """Return the first fact of a passage that `text` lost, None if it carries all."""
    facts = facts_of(source)
    kept = carried(facts, source, text)
    lost = next((fact for fact in facts if fact not in kept), None)
    return Addition(lost.kind, f"{lost.text} is lost") if lost else None
