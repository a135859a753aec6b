"""Validation of the augment and questions sections: every fault that only this stage can find, all at once."""

from __future__ import annotations

from collections.abc import Iterator

from kinject.augment.styles import read_styles
from kinject.errors import RecipeError
from kinject.llm.chat import generator_faults, has_prices, judge_faults
from kinject.recipe import AugmentRecipe, AugmentSection, QuestionsRecipe, QuestionsSection, Recipe
from kinject.recipe.check import suggestion
from kinject.recipe.sections import MAX_SAMPLES


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
        raise RecipeError([recipe.problem(key, fault) for key, fault in faults])


def _augment_faults(section: AugmentSection) -> list[tuple[str, str]]:
    faults = [*_style_faults(section), *generator_faults("augment.generator", section.generator)]
    faults += _file_faults(section)
    if section.judge is not None:
        faults += judge_faults("augment.judge", section.judge)
    if section.budget is not None and not has_prices(section.generator):
        faults.append(("augment.budget", "needs augment.generator.price_in and price_out: without prices all is free."))
    return faults


def _style_faults(section: AugmentSection) -> Iterator[tuple[str, str]]:
    styles, mix = read_styles(section.style_files), section.mix or {}
    for name, target in section.styles.items():
        if name not in styles:
            yield f"augment.styles.{name}", f"unknown style.{suggestion(name, styles)}"
        elif isinstance(target, int) and not 0 <= target <= MAX_SAMPLES:
            yield f"augment.styles.{name}", f"found {target}, allowed: 0 to {MAX_SAMPLES:,}."
        elif not isinstance(target, int) and (styles[name].mechanical or section.generator.kind == "file"):
            yield f"augment.styles.{name}", "needs a number: a target of tokens is for styles that a model writes."

    for name, fraction in mix.items():
        if name not in styles or styles[name].mechanical:
            yield f"augment.mix.{name}", f"no style that a model writes.{suggestion(name, styles)}"
        elif not 0 < fraction <= 1 or name in section.styles:
            yield (
                f"augment.mix.{name}",
                f"found {fraction}, allowed: above 0, up to 1, for a style that augment.styles lacks.",
            )
    if mix and abs(sum(mix.values()) - 1) > 0.001:
        yield "augment.mix", f"the fractions add up to {sum(mix.values()):g}; they must add up to 1."
    chosen = [styles[name] for name in (*section.styles, *mix) if name in styles]
    if section.messages and not any(style.writes_chat for style in chosen):
        names = ", ".join(name for name, style in styles.items() if style.writes_chat)
        yield "augment.messages", f"none of the styles writes conversations. Those that do: {names}."
    if section.one_corpus and not any(s.makes_instructions or (section.messages and s.writes_chat) for s in chosen):
        yield "augment.one_corpus", "none of the styles writes other rows than text. Remove the line."
    if section.raft is not None and all(style.rows != "quoted" for style in chosen):
        yield "augment.raft", "is for the style raft, which augment.styles lacks. Add it, or remove the section."


def _file_faults(section: AugmentSection) -> Iterator[tuple[str, str]]:
    """Yield a fault for each style whose variants a file cannot provide."""
    if section.generator.kind != "file":
        return
    known = read_styles(section.style_files)
    styles = [known[name] for name in section.styles if name in known and not known[name].mechanical]
    if len(styles) > 1:
        yield "augment.styles", f"found {len(styles)} styles, but the texts of kind: file are all of one style."
    for style in styles:
        if style.prepare or style.verify or style.scope != "passage":
            yield f"augment.styles.{style.name}", "needs a model to ask; kind: file has none."


def _questions_faults(section: QuestionsSection) -> list[tuple[str, str]]:
    faults = [*generator_faults("questions.generator", section.generator)]
    if section.generator.kind == "file":
        faults.append(("questions.generator.kind", "questions need a model to ask; kind: file has none."))
    if set(section.kinds) == {"unanswerable"}:
        message = "found unanswerable alone; such questions are near others on the passage. Add choices or open."
        faults.append(("questions.kinds", message))
    if section.budget is not None and not has_prices(section.generator):
        fault = "needs questions.generator.price_in and price_out: without prices all is free."
        faults.append(("questions.budget", fault))
    return faults
