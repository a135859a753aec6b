"""What a run of augment is to request, as values, and the recipe that they come from."""

from __future__ import annotations

import codecs
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kinject.augment.styles import Style, read_styles
from kinject.disk import Row, open_to_read, parse_row, read_lines
from kinject.disk.offsets import OffsetIndex
from kinject.errors import InputError
from kinject.llm.sender import generator_identity
from kinject.recipe import AugmentRecipe, DocumentsSection, Recipe
from kinject.recipe.conflicts import find_problems
from kinject.recipe.sections import MAX_SAMPLES
from kinject.shards import WHOLE, Shard


class Precomputed:
    """Variants in a file of rows with ``document_id`` and ``text``, found by document, none in
    memory."""

    def __init__(self, path: Path) -> None:
        """Read the file once. Raises `InputError` (file:line) on any other row."""
        self.path, self._index = path, OffsetIndex()
        offset = 0
        for number, line in read_lines(path):
            if line.strip():
                self._index.add(_parse_precomputed(path, number, line)["document_id"], offset)
            offset += len(line)
        self.n_documents = len(self._index)
        if not self.n_documents:
            raise InputError(
                f"{path}: holds no rewritings. Expected rows with document_id and text."
            )
        self._file = open_to_read(path)
        weakref.finalize(self, self._file.close)  # a plan has no end of its own

    def texts_of(self, document_id: str) -> tuple[str, ...]:
        """Return the variants of a document, in the order of the file."""
        texts = []
        for offset in self._index.get(document_id):
            self._file.seek(offset)
            row = _parse_precomputed(self.path, 0, self._file.readline())
            if row["document_id"] == document_id:
                texts.append(row["text"])
        return tuple(texts)

    def refuse_unknown(self, known: Collection[str]) -> None:
        """Raise `InputError` (file:line) if a text belongs to none of the documents `known`."""
        unknown = dict[str, int]()
        for number, line in read_lines(self.path):
            if line.strip():
                name = _parse_precomputed(self.path, number, line)["document_id"]
                if name not in known:
                    unknown.setdefault(name, number)
        for name, number in unknown.items():
            raise InputError(
                f"{self.path}:{number}: document_id {name!r} is the id of no document. "
                f"{len(unknown)} such ids in all; they must be those of augment.documents."
            )


def _parse_precomputed(path: Path, number: int, line: bytes) -> Row:
    # As `read_jsonl`, which takes a mark of the byte order at the beginning of a file.
    row = parse_row(line.removeprefix(codecs.BOM_UTF8).rstrip(b"\r\n"), f"{path}:{number}")
    for key in ("document_id", "text"):
        if not isinstance(row.get(key), str) or not row[key].strip():
            found = f"{path}:{number}: {key}: found {row.get(key)!r}"
            raise InputError(f"{found}, expected a string that is not empty.")
    return row


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
    `Precomputed`."""
    check_sections(recipe)
    section = recipe.augment
    generator = section.generator
    precomputed = judge = None
    if generator.kind == "file" and generator.path:
        precomputed = Precomputed(Path(generator.path))
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
