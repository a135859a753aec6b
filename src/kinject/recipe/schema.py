"""Writes the JSON schema of recipes, by which editors complete and check them, from the sections
and the libraries' fields.

Draft 7, which every version of the YAML language server reads. It reads YAML as version 1.2, as
kinject does.
"""

from __future__ import annotations

import dataclasses
import json
import os
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from kinject.disk import write_text
from kinject.recipe.adapter_fields import ADAPTER_REFUSED, adapter_types
from kinject.recipe.check import SHORT_NAMES, is_required
from kinject.recipe.library_fields import (
    RANGES,
    REFUSED,
    RENAMED,
    RENAMED_OPTIMIZERS,
    Fields,
    field_hint,
    fields_of,
    renamed,
    schedule_names,
    trainer_fields,
)
from kinject.recipe.read import NOT_NULL, Sections
from kinject.recipe.sections import GENERATOR_REQUIRES, MAX_SAMPLES
from kinject.recipe.shipped import FOLDER, SCHEMA

Schema = dict[str, Any]

FILE = Path("recipes/recipe.schema.json")
# JSON schema takes 1.0 for an integer, `kinject check` does not: their one difference when every
# value and key of seven recipes was replaced by nine others.
_SCALARS: Mapping[object, str] = {
    str: "string",
    Path: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}
_KEYWORDS = {
    "min": "minimum",
    "above": "exclusiveMinimum",
    "max": "maximum",
    "below": "exclusiveMaximum",
}
_LONGEST_HELP = 240
_PREFIX = "# yaml-language-server: $schema="


def recipe_schema(styles: Mapping[str, str]) -> Schema:
    """Return the schema of a recipe; `styles` are the styles of augment with their descriptions.

    Imports trl and peft (some seconds), whose fields are part of it.
    """
    definitions: dict[str, Schema] = {}
    root = _section(Sections, definitions)
    for name in NOT_NULL:
        section = root["properties"][name]
        section["anyOf"] = [option for option in section["anyOf"] if option != {"type": "null"}]
    root["properties"]["trainer"] |= _trainer()
    root["properties"]["adapter"] |= _adapter()
    _add_styles(definitions["AugmentSection"], styles)
    _add_requirements(definitions["GeneratorSection"])
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "kinject recipe",
        **root,
        "definitions": dict(sorted(definitions.items())),
    }


def schema_line(recipe: Path, schema: Path = FILE) -> str:
    """Return the first line of `recipe` that names `schema`, for editors that run the YAML language
    server."""
    return f"{_PREFIX}{Path(os.path.relpath(schema.resolve(), recipe.resolve().parent)).as_posix()}"


def write_schema(styles: Mapping[str, str], path: Path = FILE) -> None:
    """Write the schema as JSON; `styles` as for `recipe_schema`."""
    write_text(path, json.dumps(recipe_schema(styles), indent=1, ensure_ascii=False) + "\n")


def _section(cls: type, definitions: dict[str, Schema]) -> Schema:
    """Return the schema of a section, and put the sections below it into `definitions`."""
    hints = typing.get_type_hints(cls)
    properties: dict[str, Schema] = {}
    required = []
    for field in dataclasses.fields(cls):
        schema = _bounded(_value(hints[field.name], definitions), field.metadata)
        text = field.metadata.get("help")
        if text:
            schema = {"description": text, **schema}
        elif "$ref" in schema:  # draft 7 ignores the keys beside a reference
            schema = {
                "description": definitions[schema["$ref"].rpartition("/")[2]]["description"],
                "allOf": [schema],
            }
        properties[field.name] = schema | _default(field)
        if is_required(field):
            required.append(field.name)
    schema = {
        "description": " ".join((cls.__doc__ or "").split("\n\n")[0].split()),
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }
    if required:
        schema["required"] = required
    return schema


def _value(hint: Any, definitions: dict[str, Schema]) -> Schema:
    """Return the schema of a value, for the annotations that `kinject.recipe.check` reads."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    if origin in (Union, types.UnionType):
        return _any_of([_value(argument, definitions) for argument in arguments])
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return {"type": "array", "items": _value(arguments[0], definitions)}
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _value(arguments[1], definitions)}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if hint.__name__ not in definitions:
            definitions[hint.__name__] = _section(hint, definitions)
        return {"$ref": f"#/definitions/{hint.__name__}"}
    raise TypeError(f"no schema for {hint}")


def _any_of(options: list[Schema]) -> Schema:
    """Return one schema for several; plain scalars are merged into one list of types."""
    if {} in options:
        return {}
    plain = [option["type"] for option in options if option.keys() == {"type"}]
    enums = [value for option in options if option.keys() == {"enum"} for value in option["enum"]]
    others = [option for option in options if option.keys() not in ({"type"}, {"enum"})]
    if enums and plain == ["null"]:
        enums, plain = [*enums, None], []
    if plain:
        others.append({"type": plain[0] if len(plain) == 1 else plain})
    if enums:
        others.append({"enum": enums})
    return others[0] if len(others) == 1 else {"anyOf": others}


def _bounded(schema: Schema, metadata: Mapping[str, Any]) -> Schema:
    """Return `schema` with the field's bounds, words and `nonempty` wherever they apply."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [_bounded(option, metadata) for option in schema["anyOf"]]}
    if "words" in metadata and schema == {"type": "string"}:
        return {"enum": list(metadata["words"])}
    schema = dict(schema)
    kinds = schema.get("type", [])
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    if kinds & {"integer", "number"}:
        schema |= {keyword: metadata[key] for key, keyword in _KEYWORDS.items() if key in metadata}
        if "or" in metadata:  # the one value below the others
            schema["minimum"] = metadata["or"]
    limits = {key: metadata[key] for key in (*_KEYWORDS, "or", "words") if key in metadata}
    for keyword in ("items", "additionalProperties"):
        if isinstance(schema.get(keyword), dict):
            schema[keyword] = _bounded(schema[keyword], limits)
    if metadata.get("nonempty"):
        for kind, keyword in (
            ("array", "minItems"),
            ("object", "minProperties"),
            ("string", "minLength"),
        ):
            if kind in kinds:
                schema[keyword] = 1
    return schema


def _default(field: dataclasses.Field[Any]) -> Schema:
    """Return ``{"default": ...}`` if the field has one that can be written in YAML."""
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    if isinstance(value, list | str | int | float):
        return {"default": value}
    return {}


def _trainer() -> Schema:
    """Return the schema of the trainer's fields, with their older names and the refused ones."""
    properties = _schemas(trainer_fields())
    properties["lr_scheduler_type"]["enum"] = schedule_names()
    # Read as today's, so that an editor must not mark them.
    properties["optim"]["enum"] += RENAMED_OPTIMIZERS
    older = {}
    for name, today in RENAMED.items():
        shape: Schema = {
            key: properties[today][key]
            for key in ("type", "enum", "anyOf")
            if key in properties.get(today, {})
        }
        if name == "group_by_length":
            shape = {}
        if name == "save_safetensors":
            shape = {"not": {"const": False}}
        if name == "warmup_ratio":
            shape |= {"minimum": 0, "exclusiveMaximum": 1}
        older[name] = {
            "deprecationMessage": f"{name} {renamed(name)}.",
            "doNotSuggest": True,
            **shape,
        }
    for name, why in REFUSED.items():
        # yaml-language-server 1.25 shows no errorMessage beside `not`, and takes no schema with an
        # empty enum.
        older[name] = {"not": {}, "deprecationMessage": f"{name} {why}", "doNotSuggest": True}
    return {"properties": {**properties, **older}, "additionalProperties": False}


def _adapter() -> Schema:
    """Return the schema of an adapter: LoraConfig's fields by name; those of another type are
    checked when they are read."""
    types = adapter_types()
    properties = {
        key: value
        for key, value in _schemas(fields_of(types["lora"])).items()
        if key not in ADAPTER_REFUSED
    }
    for shape in properties.values():
        for option in (shape, *shape.get("anyOf", ())):
            if "array" in (option.get("type") or ()):  # a list names at least one
                option["minItems"] = 1
    properties["type"] = {
        "description": "The type of adapter, of peft's.",
        "enum": sorted(types),
        "default": "lora",
    }
    properties["merge"] = {
        "description": "Fold the adapter into the base weights when training ends.",
        "default": False,
    }
    only = {
        "if": {"properties": {"type": {"const": "lora"}}},
        "then": {"propertyNames": {"enum": sorted(properties)}},
    }
    return {"properties": properties, **only}


def _schemas(fields: Fields) -> dict[str, Schema]:
    """Return the schemas of a library's configuration fields, each with the first sentence of the
    library's help."""
    properties: dict[str, Schema] = {}
    for field, hint in fields.values():
        if field.name in REFUSED:
            continue
        text = " ".join(str(field.metadata.get("help") or "").split())
        first = text.partition(". ")[0].rstrip(".")
        about = {"description": first[:_LONGEST_HELP] + "."} if first else {}
        schema = _bounded(_value(field_hint(field, hint), {}), RANGES.get(field.name, {}))
        properties[field.name] = {**about, **schema, **_default(field)}
    return properties


def _add_styles(section: Schema, styles: Mapping[str, str]) -> None:
    """Name the styles in the schema of `augment.styles`, each with its description; others need
    `style_files`."""
    schema = section["properties"]["styles"]
    count = schema["additionalProperties"]
    count["anyOf"] = [
        {**option, "minimum": 0, "maximum": MAX_SAMPLES}
        if option.get("type") == "integer"
        else option
        for option in count["anyOf"]
    ]
    schema["properties"] = {name: {"description": text, **count} for name, text in styles.items()}
    section["if"] = {"not": {"required": ["style_files"]}}
    section["then"] = {"properties": {"styles": {"propertyNames": {"enum": list(styles)}}}}


def _add_requirements(schema: Schema) -> None:
    """Add the field that each kind of generator requires to the schema of a generator."""
    schema["allOf"] = [
        {
            "if": {
                "properties": {"kind": {"const": kind}},
                **({} if kind == "openai" else {"required": ["kind"]}),
            },
            "then": {"required": [name], "properties": {name: {"type": "string", "minLength": 1}}},
        }
        for kind, (name, _) in GENERATOR_REQUIRES.items()
    ]


def as_override(words: Sequence[str], unknown: Sequence[str], verb: str) -> str:
    """Return how to write the first `unknown` option of a command's `words` as a key of a recipe,
    "" if no key has its name: for ``--learning_rate 1e-4``, ``trainer.learning_rate=1e-4``."""
    for index, word in enumerate(words):
        if not word.startswith("--") or word not in unknown:
            continue
        name, _, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        # The next word is the option's value where none stands behind "=".
        if not value and index + 1 < len(words) and not words[index + 1].startswith("-"):
            value = words[index + 1]
        section, dot, key_name = name.rpartition(".")
        for key in keys_named(SHORT_NAMES.get(key_name, key_name), verb):
            # A section that is written out is meant.
            if key.startswith(section + dot):
                return f"{key}={value or 'VALUE'}"
    return ""


def keys_named(name: str, verb: str) -> Iterator[str]:
    """Yield the dotted keys of a recipe that end in `name`, those of the verb's own section first,
    then the trainer's."""
    schema = json.loads((FOLDER / SCHEMA).read_text("utf-8"))
    sections: Mapping[str, Any] = schema["properties"]
    for section in dict.fromkeys((verb, "trainer", *sections)):
        if section in sections and name in _keys_of(sections[section], schema["definitions"]):
            yield f"{section}.{name}"


def _keys_of(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of a section, which the schema describes in place or by reference."""
    for part in (node, *node.get("allOf", ()), *node.get("anyOf", ())):
        reference = part.get("$ref", "").rpartition("/")[2]
        properties: Mapping[str, Any] = definitions.get(reference, part).get("properties", {})
        if properties:
            return properties
    return {}
