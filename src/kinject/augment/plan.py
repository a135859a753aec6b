"""What a run of augment is to request, as values, and the recipe that they come from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kinject.augment.styles import Style, read_styles
from kinject.disk import read_jsonl
from kinject.errors import InputError
from kinject.llm.sender import generator_identity
from kinject.recipe import AugmentRecipe, DocumentsSection, Recipe
from kinject.recipe.conflicts import find_problems
from kinject.recipe.sections import MAX_SAMPLES
from kinject.shards import WHOLE, Shard


@dataclass(frozen=True, slots=True)
class Precomputed:
    """Variants read from a file, by document in file order. `lines` maps each document id to its
    first line."""

    path: Path
    texts: Mapping[str, tuple[str, ...]]
    lines: Mapping[str, int]

    def check_documents(self, known: Iterable[str]) -> None:
        """Raise `InputError` (file:line) if a text belongs to no document."""
        unknown = self.texts.keys() - set(known)
        if unknown:
            first = min(unknown, key=self.lines.__getitem__)
            raise InputError(
                f"{self.path}:{self.lines[first]}: document_id {first!r} is the id of no document. "
                f"{len(unknown)} such ids in all; they must be those of augment.documents."
            )


def read_precomputed(path: Path) -> Precomputed:
    """Read rows of ``document_id`` and ``text``, all into memory. Raises `InputError` (file:line)
    on any other row."""
    texts: dict[str, list[str]] = {}
    lines: dict[str, int] = {}
    for number, row in read_jsonl(path):
        for key in ("document_id", "text"):
            if not isinstance(row.get(key), str) or not row[key].strip():
                found = f"{path}:{number}: {key}: found {row.get(key)!r}"
                raise InputError(f"{found}, expected a string that is not empty.")
        texts.setdefault(row["document_id"], []).append(row["text"])
        lines.setdefault(row["document_id"], number)
    if not texts:
        raise InputError(f"{path}: holds no rewritings. Expected rows with document_id and text.")
    return Precomputed(path, {name: tuple(rewritings) for name, rewritings in texts.items()}, lines)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that decides which variants a run requests.

    `styles` maps a style's name to samples of a passage, `targets` to tokens; `catalog` holds the
    styles themselves. `shard` decides of which documents.
    """

    documents_path: Path
    passage_tokens: int
    styles: Mapping[str, int]
    seed: int
    identity: dict[str, Any]
    catalog: Mapping[str, Style]
    precomputed: Precomputed | None = None
    targets: Mapping[str, int] = field(default_factory=dict)
    documents: DocumentsSection = DocumentsSection()
    judge: dict[str, Any] | None = None
    shard: Shard = WHOLE

    def styles_of(self, scope: str) -> list[Style]:
        """Return the styles whose prompts show a ``passage``, a whole ``document`` or a
        ``pair``."""
        styles = (self.catalog[name] for name in self.styles)
        return [style for style in styles if style.scope == scope]


def check_sections(recipe: Recipe) -> None:
    """Raise `RecipeError` with every problem of the augment and questions sections, if the recipe
    has them."""
    problems = []
    if recipe.questions is not None:
        problems += find_problems("questions", recipe)
    if recipe.augment is not None:
        problems += find_problems("augment", recipe, read_styles(recipe.augment.style_files))
    recipe.raise_any(problems)


def make_plan(recipe: AugmentRecipe, shard: Shard = WHOLE) -> Plan:
    """Return the plan of a recipe. Raises `RecipeError` as `check_sections`, and as
    `read_precomputed`."""
    check_sections(recipe)
    section = recipe.augment
    generator = section.generator
    precomputed = judge = None
    if generator.kind == "file" and generator.path:
        precomputed = read_precomputed(Path(generator.path))
    if section.judge is not None:
        judge = generator_identity(section.judge)
    styles, targets = dict[str, int](), dict[str, int]()
    for name, wanted in section.styles.items():
        if isinstance(wanted, int):
            styles[name] = wanted
        else:
            # As many samples as there may be: the target ends them.
            styles[name], targets[name] = MAX_SAMPLES, wanted.tokens
    return Plan(
        documents_path=Path(section.documents),
        passage_tokens=section.passage_tokens,
        styles=styles,
        seed=recipe.seed,
        identity=generator_identity(generator),
        catalog=read_styles(section.style_files),
        precomputed=precomputed,
        targets=targets,
        documents=recipe.documents,
        judge=judge,
        shard=shard,
    )
