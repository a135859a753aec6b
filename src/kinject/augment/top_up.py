"""Coverage: how many accepted texts carry each fact of a passage, and the requests for those that too few carry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from kinject.augment.checks.additions import Fact, carried, facts_of, source_facts
from kinject.augment.plan import Group, Plan, VariantRequest
from kinject.disk import content_id
from kinject.llm.prompt_injection import escape_tags
from kinject.types import Message, Passage

QUOTA = 5
"""Accepted texts in which each fact should stand, where a recipe gives no `augment.coverage`."""
_MOST_NAMED = 12
"""Facts that one request names."""
_TASK = "Other versions of this passage left some of its facts out. Above all, tell these, as the passage tells them:"


@dataclass
class PassageCoverage:
    """The facts of one passage, each with the number of its texts that carry it."""

    passage: Passage
    facts: tuple[Fact, ...]
    counts: list[int] = field(init=False)
    n_texts: int = 0
    _index: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = [0] * len(self.facts)
        self._index = {fact.id: index for index, fact in enumerate(self.facts)}

    def add(self, facts: Iterable[str]) -> None:
        """Count one accepted text by the ids of the facts that it carries."""
        self.n_texts += 1
        for fact in facts:
            if fact in self._index:
                self.counts[self._index[fact]] += 1

    def carried(self, text: str) -> list[str]:
        """Return the ids of the facts that a text carries, without statements, which a judge alone finds."""
        return [fact.id for fact in carried(self.facts, source_facts(self.passage.shown), text)]

    def quota(self, wanted: int | None) -> int:
        """Return the texts in which each fact should stand: `wanted`, else 5, or half of the texts where these are fewer."""
        return wanted if wanted is not None else min(QUOTA, -(-self.n_texts // 2))

    def short(self, quota: int) -> list[Fact]:
        """Return the facts that fewer than `quota` texts carry, the rarest first."""
        pairs = sorted((n, index) for index, n in enumerate(self.counts) if n < quota)
        return [self.facts[index] for _, index in pairs]


def coverage_of(passage: Passage, statements: Iterable[str] = ()) -> PassageCoverage:
    """Return the coverage of a passage before its first text; `statements` are those that a judge listed."""
    listed = (Fact("statement", str(number), text) for number, text in enumerate(statements, 1))
    return PassageCoverage(passage, (*facts_of(source_facts(passage.shown)), *listed))


def top_up_group(groups: Iterable[Group]) -> Group | None:
    """Return the group of a passage whose style can be asked for facts by name: a model writes it from the passage alone."""
    return next(
        (
            group for group in groups
            if group.texts is None and not (group.skipped or group.style.mechanical or group.style.prepare)
            and group.style.rows == "text"
        ), None,
    )  # fmt: skip


def requests_for(plan: Plan, group: Group, coverage: PassageCoverage, quota: int) -> Iterator[VariantRequest]:
    """Yield one request after the other for the facts that are still short, at most `quota` of them.

    Count the texts of each in `coverage` before the next. The requests depend on the texts alone, so that a rerun finds them.
    """
    for number in count():
        missing = coverage.short(quota)[:_MOST_NAMED]
        if not missing or number == quota:
            return
        messages = _messages(group, missing, number)
        prompt_hash = content_id(messages, group.style.identity)
        identity = content_id(
            "top up", group.passage.id, group.style.name, prompt_hash, plan.identity, plan.seed, number
        )
        yield VariantRequest(identity, group.n_samples + number, prompt_hash, number, messages=messages)


def _messages(group: Group, missing: Sequence[Fact], number: int) -> list[Message]:
    messages = group.style.messages(group.source, number, {})
    facts = "\n".join(f"- {escape_tags(fact.text)}" for fact in missing)
    return [*messages[:-1], {"role": "user", "content": f"{messages[-1]['content']}\n\n{_TASK}\n{facts}"}]
