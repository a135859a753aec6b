"""The requests of a group: one for each variant, and those of its preparations, each with its
id."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kinject.augment.checks.checker import normal_form
from kinject.augment.groups import Group
from kinject.augment.plan import Plan
from kinject.augment.styles import Item, Preparation
from kinject.corpus.passages import word_spans
from kinject.disk import content_id
from kinject.llm import request_seed
from kinject.types import Message, Passage, Variant

MOST_AT_ONCE = 64
"""Requests of one group that are sent at once."""
# With one block as the end, a target stopped at the first NONE near it.
_BARREN = 24
"""Requests in a row without a text after which a target of tokens is given up."""
Notes = Callable[[str], tuple[str, ...] | None]
"""Id of `notes_id` -> the stored items, None if there are none yet."""
Stored = Callable[[Sequence["VariantRequest"]], Mapping[str, Variant]]
"""Requests -> their stored variants by id."""


@dataclass(frozen=True, slots=True)
class VariantRequest:
    """A request for one variant, about `item` of the preparations. `id` is the id that the variant
    will have.

    `turn` counts the requests about the same item. `messages` is empty where no model is asked.
    """

    id: str
    sample: int
    prompt_hash: str
    turn: int = 0
    item: Item = field(default_factory=dict)
    messages: Sequence[Message] = ()


def stored_items(plan: Plan, group: Group, notes: Notes) -> list[Item] | None:
    """Return the items of a group's prompts, from stored `notes`; None if a preparation is not
    answered yet."""
    items: list[Item] = [group.item]
    for step in group.style.prepare:
        answers: list[tuple[str, ...]] = []
        for item in items:
            answer = notes(notes_id(plan, group, step, item))
            if answer is None:
                return None
            answers.append(answer)
        items = new_items(group, step, items, answers)
    return items


def new_items(
    group: Group, step: Preparation, items: Sequence[Item], answers: Sequence[Sequence[str]]
) -> list[Item]:
    """Return the items of a preparation: each of `items` with each line of its answer, none twice.

    With `in_passage`, lines that are not in the passage are left out.
    """
    text = group.passage.shown
    passage = f" {normal_form(text)} "
    no_spaces = passage.count(" ") < len(passage) / 20  # Chinese and Japanese part no words
    items_by_form: dict[str, Item] = {}
    for item, answer in zip(items, answers, strict=True):
        for line in answer:
            form = normal_form(line)
            if form and (
                not step.in_passage or f" {form} " in passage or (no_spaces and line in text)
            ):
                items_by_form.setdefault(form, {**item, step.name: line})
    return list(items_by_form.values())


def variant_requests(plan: Plan, group: Group, items: Sequence[Item]) -> Iterator[VariantRequest]:
    """Yield the requests of `group` in order: its samples; for styles with preparations, samples of
    each item.

    A style that combines items has `n_samples` of all combinations, each once.
    """
    if group.skipped:
        return
    for sample, (turn, item) in enumerate(_turns(plan, group, items)):
        yield _variant_request(plan, group, sample, turn, item)


def _turns(plan: Plan, group: Group, items: Sequence[Item]) -> Iterator[tuple[int, Item]]:
    """Yield (requests before it about the same item, item) of each request of a group."""
    style, n = group.style, group.n_samples
    if style.combine:
        # Drawn: in the document's order a target that ends early would favour the first entity.
        schedule = style.schedule(items, content_id("schedule", plan.seed, group.passage.id))
        for item in islice(schedule, n):
            yield 0, item
        return
    for turn in range(n):
        for item in items:
            yield turn, item


def request_blocks(
    plan: Plan, group: Group, items: Sequence[Item], stored: Stored
) -> Iterator[list[VariantRequest]]:
    """Yield the `variant_requests` of a group in blocks, each of which is judged before the next is
    sent.

    With a target of tokens they end once the texts that are `stored` have as many, or `_BARREN`
    requests brought none.
    """
    requests = variant_requests(plan, group, items)
    if group.target is None:
        block = list(islice(requests, MOST_AT_ONCE))
        while block:
            yield block
            block = list(islice(requests, MOST_AT_ONCE))
        return
    n_texts = n_tokens = n_barren = 0
    mean = float(
        len(word_spans(group.passage.text))
    )  # until there are texts: as long as the passage
    while n_barren < _BARREN:
        n_missing = max(0, group.target - n_tokens)
        n_needed = -int(-n_missing // max(1.0, mean))  # rounded up
        # Each text is paid for: no more are requested than the target needs by the mean so far.
        block = list(islice(requests, min(MOST_AT_ONCE, n_needed)))
        if not block:
            return
        yield block
        texts = [text for variant in stored(block).values() for text in variant.texts]
        n_texts += len(texts)
        n_tokens += sum(len(word_spans(text)) for text in texts)
        if n_texts:
            mean = n_tokens / n_texts
        if texts:
            n_barren = 0
        else:
            n_barren += len(block)


def unprepared_requests(group: Group) -> list[VariantRequest]:
    """Return the requests that replace those of a group whose preparation has no answer."""
    n_requests = group.n_samples
    if group.target or group.style.combine:
        n_requests = 1  # how many there would be depends on the items
    requests = []
    for turn in range(n_requests):
        name = content_id("unprepared", group.passage.id, group.style.name, turn)
        requests.append(VariantRequest(name, turn, ""))
    return requests


def _variant_request(
    plan: Plan, group: Group, sample: int, turn: int, item: Item
) -> VariantRequest:
    style = group.style
    identity = plan.identity
    messages: list[Message] = []
    if group.texts is not None:
        prompt_hash = content_id(group.texts[sample], style.identity)
    elif style.mechanical:
        prompt_hash = content_id(group.document.title, group.passage.text, style.name)
        identity = {}  # no model writes it
    else:
        messages = style.messages(group.source, turn, item)
        prompt_hash = content_id(messages, style.identity)
    # By turn, not by sample: an item more before it changes no id.
    variant_id = content_id(
        "variant", group.passage.id, style.name, prompt_hash, identity, plan.seed, turn
    )
    return VariantRequest(variant_id, sample, prompt_hash, turn, item, messages)


def notes_id(plan: Plan, group: Group, step: Preparation, item: Item) -> str:
    """Return the id of the items that a preparation of `group` makes of `item`."""
    style = group.style
    messages = style.preparation(step, group.source, item)
    return content_id(
        "notes", group.passage.id, style.name, step.name, messages, plan.identity, plan.seed
    )


def statements_id(plan: Plan, passage: Passage) -> str:
    """Return the id of the statements that the judge lists of a passage."""
    return content_id("statements", passage.id, plan.judge)


def sample_seed(plan: Plan, prompt_hash: str, sample: int, attempt: int) -> int:
    """Return the seed (31 bits) of one attempt. It depends on the prompt, not on order or time."""
    return request_seed("seed", plan.seed, prompt_hash, sample, attempt)
