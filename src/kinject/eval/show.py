"""Prompts exactly as they are tokenised, with the log-prob of each choice: for a person who wants to see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kinject.eval.asks import arms_of, asks_of
from kinject.eval.encode import Encoded, Encoder, encode_asks
from kinject.eval.plan import read_plan
from kinject.eval.prompts import Ask, scored_texts
from kinject.eval.scorer import Scorer
from kinject.models import load_model
from kinject.recipe import Recipe


def show_prompts(recipe: Recipe, n: int) -> Iterator[str]:
    """Yield a text for each of the first `n` questions of each set and arm; nothing is stored.

    Tokens stand between bars, line breaks in a token as \\n; the gold choice has a star, the chosen one an arrow.
    """
    assert recipe.eval is not None
    small = replace(recipe, eval=replace(recipe.eval, limit=n))
    plan, section = read_plan(small), small.eval
    assert section is not None
    for name, path in section.models.items():
        loaded = load_model(path)
        scorer, encoder = Scorer(loaded.model, section.batch_tokens), Encoder(loaded.tokenizer, chat=section.chat)
        for question_set in plan.sets:
            for arm in arms_of(section, question_set.task):
                if arm.model != name or question_set.chooses_k_for:
                    continue
                asks = [ask for ask, _ in asks_of(question_set, arm, plan.template)]
                encoded = encode_asks(encoder, asks, scorer.passes.window())
                scores = dict(scorer.score(encoded))
                for index, (ask, item) in enumerate(zip(asks, encoded, strict=True)):
                    head = f"{arm.name} on {question_set.name}: {arm.format}, {arm.shots} shots, K {arm.k}"
                    yield f"{head}, question {ask.question.id}\n{_shown(loaded.tokenizer, ask, item, scores[index])}"


def _shown(tokenizer: Any, ask: Ask, item: Encoded, log_probs: tuple[float, ...]) -> str:
    context = max(item.contexts, key=len)
    cut = f", {item.truncated} cut to fit" if item.truncated else ""
    lines = [f"  {len(context)} tokens{cut}: {_pieces(tokenizer, context.tolist())}"]
    best = log_probs.index(max(log_probs))
    texts = scored_texts(ask.question, ask.format)
    for place, (ids, value) in enumerate(zip(item.continuations, log_probs, strict=True)):
        marks = ("*" if place == ask.question.answer else " ") + (">" if place == best else " ")
        lines.append(f"  {marks} {value:9.4f}  {_pieces(tokenizer, ids.tolist())}  ({texts[place]})")
    return "\n".join(lines)


def _pieces(tokenizer: Any, ids: list[int]) -> str:
    """Return each token's own text between bars."""
    return "|" + "|".join(tokenizer.decode([token]).replace("\n", "\\n") for token in ids) + "|"
