"""Pages of the site that are generated from the program itself: its recipes, and the keys of a recipe."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from kinject.recipe.shipped import FOLDER, SCHEMA, read_shipped

_SECTIONS = (
    "model",
    "adapter",
    "corpus",
    "trainer",
    "regularization",
    "guards",
    "techniques",
    "probes",
    "augment",
    "questions",
    "eval",
    "study",
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put pages that the nav does not name at the end of Use: a new guide is found without a change here."""
    assert config.nav is not None
    named = json.dumps(config.nav)
    use = next(section["Use"] for section in config.nav if "Use" in section)
    use += [
        page.name
        for page in sorted(Path(config.docs_dir).glob("*.md"))
        if f'"{page.name}"' not in named
    ]
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turn links to files of recipes/, which work on the repository's pages, into links to the written pages."""
    markdown = re.sub(
        r"\]\(\.\./recipes/([\w./-]+)\.yaml\)",
        lambda link: f"](recipes.md#{_anchor(link[1])})",
        markdown,
    )
    return markdown.replace(f"](../recipes/{SCHEMA})", "](keys.md)").replace(
        "](../recipes)", "](recipes.md)"
    )


def _anchor(title: str) -> str:
    """Return the anchor of a heading, as Markdown makes it."""
    return re.sub(r"[^\w-]", "", title.lower())


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the written pages to those of docs/."""
    pages = {"recipes.md": _recipes(), "keys.md": _keys()}
    for name, lines in pages.items():
        files.append(File.generated(config, name, content="\n".join(lines) + "\n"))
    return files


def _recipes() -> Iterator[str]:
    yield "# Shipped recipes\n"
    yield "`kinject recipes` lists them, `kinject recipes copy NAME` puts one into your folder with what it includes.\n"
    for recipe in read_shipped().values():
        yield f"## {recipe.name}\n\n{_sentence(recipe.purpose)}\n"
        for label, text in (("Needs", recipe.needs), ("Gives", recipe.expect)):
            if text:
                yield f"**{label}**: {_escape(text)}\n"
        yield f'??? note "{recipe.path}"\n\n    ```yaml'
        yield "\n".join(f"    {line}".rstrip() for line in recipe.text.splitlines())
        yield "    ```\n"


def _keys() -> Iterator[str]:
    schema = json.loads((FOLDER / SCHEMA).read_text("utf-8"))
    yield "# Keys of a recipe\n"
    yield "Written from the grammar that `kinject recipes check` reads by, as the schema for editors is.\n"
    yield from _table(schema, schema, skip=_SECTIONS)
    written: set[str] = set()
    for name in _SECTIONS:
        section = schema["properties"][name]
        yield f"\n## {name}\n\n{_sentence(section.get('description', ''))}\n"
        definition = _definition(section, schema)
        yield from _table(definition or section, schema)
        yield from _below(definition, schema, name, written)


def _below(definition: Any, schema: Any, place: str, written: set[str]) -> Iterator[str]:
    """Write the tables of the sections inside a section, each once."""
    for key, value in (definition or {}).get("properties", {}).items():
        inner = _definition(value, schema)
        if inner is None:
            continue
        several = "additionalProperties" in json.dumps(value)
        title = f"{place}.{key}" + (".NAME" if several else "")
        name = inner["description"]
        if name in written:
            continue
        written.add(name)
        yield f"\n### {title}\n\n{_sentence(inner['description'])}\n"
        yield from _table(inner, schema)
        yield from _below(inner, schema, title, written)


def _definition(value: Any, schema: Any) -> Any:
    """Return the section that a value may be, wherever in its schema the reference stands; None without one."""
    text = json.dumps(value)
    if '"$ref"' not in text:
        return None
    name = text.partition("#/definitions/")[2].partition('"')[0]
    return schema["definitions"][name]


def _table(section: Any, schema: Any, skip: tuple[str, ...] = ()) -> Iterator[str]:
    yield "| key | value | default | what for |\n|---|---|---|---|"
    for key, value in section.get("properties", {}).items():
        if key in skip or value.get("doNotSuggest"):
            continue
        default = (
            f"`{json.dumps(value['default'], ensure_ascii=False)}`" if "default" in value else ""
        )
        must = " (must)" if key in section.get("required", ()) else ""
        yield f"| `{key}`{must} | {_kind(value)} | {default} | {_escape(value.get('description', ''))} |"
    yield ""


def _kind(value: Any) -> str:
    """Return in words what may stand there."""
    if "enum" in value:
        words = [
            item if isinstance(item, str) else json.dumps(item)
            for item in value["enum"]
            if item is not None
        ]
        shown = ", ".join(f"`{word}`" for word in words[:9])
        return shown + (f", and {len(words) - 9} more" if len(words) > 9 else "")
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(filter(None, map(_kind, value["anyOf"]))))
    if "$ref" in value or "allOf" in value:
        return "a section"
    kinds = value.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    names = {
        "string": "text", "integer": "whole number", "number": "number", "boolean": "true or false",
        "array": "list", "object": "mapping", "null": "",
    }  # fmt: skip
    words = " or ".join(filter(None, (names[kind] for kind in kinds)))
    low, high = value.get("minimum"), value.get("maximum")
    if low is not None:
        words += f", {low:,} to {high:,}" if high is not None else f", {low:,} or more"
    return words


def _sentence(text: str) -> str:
    return _escape(text[:1].upper() + text[1:])


def _escape(text: str) -> str:
    """Return text that Markdown and HTML leave as it is, in a table too."""
    for character in "\\`*_{}[]<>#|":
        text = text.replace(
            character,
            f"\\{character}" if character not in "<>" else {"<": "&lt;", ">": "&gt;"}[character],
        )
    return text
