"""A style on one passage: its prompts, or one answer with the verdict of the checks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from kinject.augment.plan import LONGEST_DOCUMENT, Group
from kinject.augment.run import augment
from kinject.augment.styles import SKIPPED, STYLES, Item, Style, read_style, read_styles
from kinject.corpus.passages import split_passages, token_spans
from kinject.disk import read_jsonl
from kinject.documents import read_documents
from kinject.errors import InputError
from kinject.recipe import AugmentRecipe, AugmentSection
from kinject.recipe.check import suggestion
from kinject.recipe.sections import TokenTarget
from kinject.types import Document, Message

_EXAMPLE = Document(
    "example", "The Falk Bridge",
    "# The Falk Bridge\n\nMara Lind was born in Arvika. She built the Falk Bridge with Karin Ekberg in 1931. It is 120 m "
    "long.",
    "the built-in example",
)  # fmt: skip


@dataclass(frozen=True)
class StyleTrial:
    """The outcome of one request of a style: the texts that were accepted, and those refused, each with its reason."""

    accepted: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]
    nothing: bool
    n_requests: int
    cost: float


def known_styles(recipe: AugmentRecipe | None) -> Mapping[str, Style]:
    """Return the shipped styles and those that a recipe names. Raises `RecipeError` for faults in their files."""
    return read_styles(recipe.augment.style_files) if recipe else STYLES


def find_style(name: str, recipe: AugmentRecipe | None) -> Style:
    """Return a style by its name, or the one in a YAML file. Raises `InputError` if there is none."""
    if Path(name).suffix in (".yaml", ".yml"):
        return read_style(Path(name))
    styles = known_styles(recipe)
    if name not in styles:
        raise InputError(f"{name}: unknown style.{suggestion(name, styles)}")
    return styles[name]


def find_passage(style: Style, recipe: AugmentRecipe | None, documents: Path | None, number: int) -> Group:
    """Return the group of a style on passage `number` (from 1) of the documents, the recipe's, or a built-in example.

    Raises as `read_documents`, and `InputError` if there are fewer passages.
    """
    if style.scope == "pair":
        raise InputError(f"style {style.name}: needs passages of two documents; kinject augment --dry-run counts them.")
    section = recipe.augment if recipe else None
    shown: AugmentSection | type[AugmentSection] = section or AugmentSection  # the class has the defaults
    n_tokens = LONGEST_DOCUMENT if style.scope == "document" else shown.passage_tokens
    spans = token_spans(section.tokenizer if section else None)
    path = documents or (Path(section.documents) if section else None)
    groups = (
        Group(document, passage, style, 1)
        for document in (read_documents(path) if path else [_EXAMPLE])
        for passage in split_passages(document, n_tokens, spans)
    )
    group = next(islice(groups, number - 1, None), None)
    if group is None:
        raise InputError(f"{path or _EXAMPLE.source}: has no passage {number}. Give --passage a smaller number.")
    return group


def render_prompts(group: Group) -> str:
    """Return all prompts of a style on a passage; items that a model must name first are shown as (fact)."""
    style, source = group.style, group.source
    if style.mechanical:
        return style.mechanical(group.document.title, group.passage.text, 0)
    missing = style.missing_need(source)
    note = f"Such passages are skipped: {SKIPPED[missing]}.\n\n" if missing else ""
    return note + "\n\n".join(f"######## {title}\n{_render(messages)}" for title, messages in _prompts(group))


def _prompts(group: Group) -> Iterator[tuple[str, list[Message]]]:
    style, item = group.style, dict[str, object]()
    for step in style.prepare:
        frequency = f"once for each {step.for_each}" if step.for_each else f"once for each {style.scope}"
        yield f"preparation: {step.name}, {frequency}", style.preparation(step, group.source, item)
        item[step.name] = (f"({step.name} 1)", f"({step.name} 2)") if style.combine else f"({step.name})"
    known: Item = item
    yield "text", style.messages(group.source, 0, known)
    if style.verify:
        yield "verification", style.verification(group.source, known, "(the text)")


def _render(messages: list[Message]) -> str:
    return "\n".join(f"---- {message['role']}\n{message['content']}" for message in messages)


def try_style(group: Group, recipe: AugmentRecipe) -> StyleTrial:
    """Request one text in the group's style from the recipe's generator, preparations included, without the judge.

    Nothing is stored. Raises as `augment`.
    """
    with TemporaryDirectory(prefix="kinject-style-") as folder:
        path = Path(folder) / "documents.jsonl"
        heading = "".join(f"{'#' * (level + 1)} {name}\n\n" for level, name in enumerate(group.source.headings))
        row = {"id": group.document.id, "title": group.document.title, "text": heading + group.passage.text}
        path.write_text(json.dumps(row, ensure_ascii=False), encoding="utf-8", errors="surrogatepass")
        section = replace(
            recipe.augment, documents=str(path), styles={group.style.name: 1 if group.style.mechanical else TokenTarget(1)},
            include_originals=False, judge=None, contamination_check=(), passage_tokens=10**9,
        )  # fmt: skip
        result = augment(replace(recipe, run_dir=Path(folder) / "run", augment=section))
        texts = [row["text"] for _, row in read_jsonl(result.variants_path)]
        refused = [
            (f"{row['reason']}: {row['detail']}".rstrip(": "), row["text"])
            for _, row in read_jsonl(result.rejected_path)
        ]
        for error in result.failed:
            raise InputError(f"style {group.style.name}: {error}.")
    return StyleTrial(tuple(filter(None, texts)), tuple(refused), "" in texts, result.n_sent, result.cost)
