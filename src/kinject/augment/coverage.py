"""The facts of a passage that too few of its texts carry, and the requests that name them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kinject.augment.checks.additions import Fact, carried, facts_of, source_facts
from kinject.augment.groups import Group
from kinject.augment.plan import Plan
from kinject.augment.variant_requests import VariantRequest
from kinject.disk import content_id
from kinject.llm.prompt_injection import escape_tags
from kinject.types import Message, Passage

QUOTA = 5
"""Accepted texts in which each fact should stand, where a recipe gives no `augment.coverage`."""
_MOST_NAMED = 12
"""Facts that one request names."""
_TOP_UP_TASK = (
    "Other versions of this passage left some of its facts out. "
    "Above all, tell these, as the passage tells them:"
)


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

    def add(self, text: str, facts: Iterable[str] | None = None) -> None:
        """Count one accepted text by the ids of the facts that it carries; without these they are
        looked for in the text."""
        self.n_texts += 1
        if facts is None:
            facts = self.carried(text)
        for fact in facts:
            if fact in self._index:
                self.counts[self._index[fact]] += 1

    def carried(self, text: str) -> list[str]:
        """Return the ids of the facts that a text carries, without statements, which a judge alone
        finds."""
        return [fact.id for fact in carried(self.facts, source_facts(self.passage.shown), text)]

    def quota(self, wanted: int | None) -> int:
        """Return the texts in which each fact should stand: `wanted`, else 5, or half of the texts
        where these are fewer."""
        if wanted is not None:
            return wanted
        return max(1, min(QUOTA, -(-self.n_texts // 2)))

    def short(self, quota: int) -> list[Fact]:
        """Return the facts that fewer than `quota` texts carry, the rarest first."""
        # By index where counts are equal: a rerun must name the same facts to find its texts.
        pairs = sorted((n, index) for index, n in enumerate(self.counts) if n < quota)
        return [self.facts[index] for _, index in pairs]


def coverage_of(passage: Passage, statements: Iterable[str] = ()) -> PassageCoverage:
    """Return the coverage of a passage before its first text; `statements` are those that a judge
    listed."""
    listed = (Fact("statement", str(number), text) for number, text in enumerate(statements, 1))
    return PassageCoverage(passage, (*facts_of(source_facts(passage.shown)), *listed))


def top_up_group(groups: Iterable[Group]) -> Group | None:
    """Return the group of a passage whose style can be asked for facts by name; None without
    one."""
    return next(filter(_can_name_facts, groups), None)


def _can_name_facts(group: Group) -> bool:
    return group.style.can_name_facts and group.texts is None and not group.skipped


def top_up_requests(
    plan: Plan, group: Group, coverage: PassageCoverage, quota: int
) -> Iterator[VariantRequest]:
    """Yield one request after the other for the facts that are still short, at most `quota` of
    them.

    Count the texts of each in `coverage` before the next. The requests depend on the texts alone,
    so that a rerun finds them.
    """
    style = group.style
    for number in range(quota):
        missing = coverage.short(quota)[:_MOST_NAMED]
        if not missing:
            return
        messages = _top_up_messages(group, missing, number)
        prompt_hash = content_id(messages, style.identity)
        request_id = content_id(
            "top up", group.passage.id, style.name, prompt_hash, plan.identity, plan.seed, number
        )
        # After the group's own samples, which begin at 0.
        sample = group.n_samples + number
        yield VariantRequest(request_id, sample, prompt_hash, number, messages=messages)


def _top_up_messages(group: Group, missing: Sequence[Fact], number: int) -> list[Message]:
    messages = group.style.messages(group.source, number, {})
    facts = "\n".join(f"- {escape_tags(fact.text)}" for fact in missing)
    content = f"{messages[-1]['content']}\n\n{_TOP_UP_TASK}\n{facts}"
    return [*messages[:-1], {"role": "user", "content": content}]
