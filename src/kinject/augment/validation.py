"""Validation of the augment and questions sections: every fault that only this stage can find, all at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from urllib.parse import urlsplit

from kinject.augment.styles import read_styles
from kinject.errors import RecipeError
from kinject.recipe import AugmentRecipe, AugmentSection, GeneratorSection, QuestionsRecipe, QuestionsSection, Recipe
from kinject.recipe.check import suggestion
from kinject.recipe.sections import GENERATOR_REQUIRES, MAX_SAMPLES
from kinject.requests.chat import RESERVED
from kinject.requests.limits import Limits

_BATCH_IN_FLIGHT = 20_000


def augment_section(recipe: AugmentRecipe) -> AugmentSection:
    """Return the augment section. Raises `RecipeError` with every fault: missing fields, unknown styles."""
    _raise_faults(recipe, _augment_faults(recipe.augment))
    return recipe.augment


def questions_section(recipe: QuestionsRecipe) -> QuestionsSection:
    """Return the questions section. Raises `RecipeError` with every fault: missing fields or prices."""
    _raise_faults(recipe, _questions_faults(recipe.questions))
    return recipe.questions


def check_sections(recipe: Recipe) -> None:
    """Raise `RecipeError` with every fault in the recipe's augment and questions sections."""
    faults = _augment_faults(recipe.augment) if recipe.augment is not None else []
    _raise_faults(recipe, faults + (_questions_faults(recipe.questions) if recipe.questions is not None else []))


def _raise_faults(recipe: Recipe, faults: list[tuple[str, str]]) -> None:
    if faults:
        raise RecipeError([recipe.fault(key, what) for key, what in faults])


def _augment_faults(section: AugmentSection) -> list[tuple[str, str]]:
    faults = [*_style_faults(section), *_generator_faults("augment.generator", section.generator)]
    faults += _file_faults(section)
    if section.judge is not None:
        faults += _generator_faults("augment.judge", section.judge)
        if section.judge.kind == "file" or section.judge.batch:
            faults.append(("augment.judge", "must answer at once: kind: file and batch: true do not."))
    if section.budget is not None and not _has_prices(section.generator):
        faults.append(("augment.budget", "needs augment.generator.price_in and price_out: without prices all is free."))
    return faults


def _style_faults(section: AugmentSection) -> Iterator[tuple[str, str]]:
    styles = read_styles(section.style_files)
    for name, target in section.styles.items():
        if name not in styles:
            yield f"augment.styles.{name}", f"unknown style.{suggestion(name, styles)}"
        elif isinstance(target, int) and not 0 <= target <= MAX_SAMPLES:
            yield f"augment.styles.{name}", f"found {target}, allowed: 0 to {MAX_SAMPLES:,}."
        elif not isinstance(target, int) and (styles[name].mechanical or section.generator.kind == "file"):
            yield f"augment.styles.{name}", "needs a number: a target of tokens is for styles that a model writes."


def _generator_faults(key: str, generator: GeneratorSection) -> Iterator[tuple[str, str]]:
    if generator.endpoints and (generator.base_url is not None or generator.batch):
        other = "base_url" if generator.base_url is not None else "batch"
        yield f"{key}.{other}", "is for one endpoint, but endpoints lists several. Remove one of the two."
    for name, part in generator.parts().items():
        yield from _endpoint_faults(f"{key}.endpoints.{name}" if generator.endpoints else key, part)
    for name in _OPENAI_ONLY + (() if generator.kind == "transformers" else _OF_MODELS):
        if generator.kind != "openai" and getattr(generator, name) != _DEFAULTS[name]:
            yield f"{key}.{name}", f"is not for kind: {generator.kind}. Remove it."
    for name in generator.extra_body or {}:
        if name in RESERVED:
            other = f"the generator's own key {name}" if name in _DEFAULTS else "nothing: kinject sets it"
            yield f"{key}.extra_body.{name}", f"is not read here. Use {other}."
    for name in ("extra_body", "chat_template_kwargs"):
        try:
            json.dumps(getattr(generator, name), allow_nan=False)
        except (TypeError, ValueError) as error:
            yield f"{key}.{name}", f"cannot be sent as JSON ({error})."
    if generator.batch and generator.kind != "openai":
        yield f"{key}.batch", f"is only for kind: openai, not for {generator.kind}."


def _endpoint_faults(key: str, generator: GeneratorSection) -> Iterator[tuple[str, str]]:
    name, description = GENERATOR_REQUIRES.get(generator.kind, ("kind", ""))
    if not getattr(generator, name):
        yield key, f"{name} is missing. kind: {generator.kind} needs {description}."
    if generator.base_url is not None and not _is_url(generator.base_url):
        yield f"{key}.base_url", f"found {generator.base_url!r}, expected a URL such as http://127.0.0.1:8000/v1."
    tokens = generator.tokens_per_minute
    if tokens is not None and generator.kind in ("openai", "transformers") and tokens <= generator.max_tokens:
        fault = f"found {tokens:,}, but one answer may have {generator.max_tokens:,} (max_tokens): no request could be sent."
        yield f"{key}.tokens_per_minute", fault


def _has_prices(generator: GeneratorSection) -> bool:
    return any(part.price_in or part.price_out for part in generator.parts().values())


def _is_url(text: str) -> bool:
    """Return whether `text` is a web URL with a possible host name and port."""
    try:
        parts = urlsplit(text)
        host = (parts.hostname or "").encode("idna").decode()
        _ = parts.port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(host) and text.isprintable() and " " not in text


def _file_faults(section: AugmentSection) -> Iterator[tuple[str, str]]:
    """Yield a fault for each style whose variants a file cannot provide."""
    if section.generator.kind != "file":
        return
    known = read_styles(section.style_files)
    styles = [known[name] for name in section.styles if name in known and not known[name].mechanical]
    if len(styles) > 1:
        yield "augment.styles", f"found {len(styles)} styles, but the texts of kind: file are all of one style."
    for style in styles:
        if style.prepare or style.verify or style.scope == "document":
            yield f"augment.styles.{style.name}", "needs a model to ask; kind: file has none."


def _questions_faults(section: QuestionsSection) -> list[tuple[str, str]]:
    faults = [*_generator_faults("questions.generator", section.generator)]
    if section.generator.kind == "file":
        faults.append(("questions.generator.kind", "questions need a model to ask; kind: file has none."))
    if section.budget is not None and not _has_prices(section.generator):
        fault = "needs questions.generator.price_in and price_out: without prices all is free."
        faults.append(("questions.budget", fault))
    return faults


_OF_MODELS = ("top_p", "top_k", "min_p", "chat_template_kwargs")
_OPENAI_ONLY = ("stop", "reasoning_effort", "extra_body", "send_seed", "structured_output", "endpoints")
"""Options of a generator that only kind: openai reads; those of `_OF_MODELS` are read by kind: transformers, too."""
_DEFAULTS = {field.name: field.default for field in fields(GeneratorSection)}


def limits_of(section: AugmentSection | QuestionsSection) -> Limits:
    """Return the limits of a section: requests at once, in a minute, and the budget.

    Of several endpoints they are the sums, and the prices the highest.
    """
    parts = list(section.generator.parts().values())

    def total(name: str) -> int | None:
        limits = [getattr(part, name) for part in parts]
        return None if None in limits else sum(limits)

    return Limits(
        # All requests of a batch are in flight at once.
        concurrency=_BATCH_IN_FLIGHT if section.generator.batch else sum(part.concurrency for part in parts),
        requests_per_minute=total("requests_per_minute"), tokens_per_minute=total("tokens_per_minute"),
        price_in=max(part.price_in for part in parts), price_out=max(part.price_out for part in parts),
        budget=section.budget,
    )  # fmt: skip
