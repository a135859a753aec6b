"""The JSON schema of recipes, written from the recipe grammar itself: what editors complete and check by.

Draft 7, which every version of the YAML language server reads. It reads YAML as version 1.2, as kinject does.
"""

from __future__ import annotations

import dataclasses
import json
import os
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from kinject.disk import write_text
from kinject.recipe.adapter_fields import MERGE
from kinject.recipe.read import Sections
from kinject.recipe.schedule_fields import schedule_names
from kinject.recipe.trainer_fields import REFUSED, RENAMED, plain_hint

Schema = dict[str, Any]

FILE = Path("recipes/recipe.schema.json")
_SCALARS: Mapping[object, str] = {
    str: "string",
    Path: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}
_LONGEST_HELP = 240
_SWITCH = "# yaml-language-server: $schema="


def recipe_schema() -> Schema:
    """Return the schema of a recipe. Imports trl and peft (some seconds), whose fields are part of it."""
    definitions: dict[str, Schema] = {}
    root = _section(Sections, definitions)
    root["properties"]["trainer"] |= _trainer()
    root["properties"]["adapter"] |= _adapter()
    _know_styles(definitions["AugmentSection"]["properties"]["styles"])
    _know_generators(definitions["GeneratorSection"])
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "kinject recipe",
        **root,
        "definitions": dict(sorted(definitions.items())),
    }


def header(recipe: Path, schema: Path = FILE) -> str:
    """Return the line that switches the schema on in `recipe`, for editors that run the YAML language server."""
    return f"{_SWITCH}{Path(os.path.relpath(schema.resolve(), recipe.resolve().parent)).as_posix()}"


def switch_on(recipe: Path, schema: Path = FILE) -> bool:
    """Put the line that names `schema` first in `recipe`, in place of another such line; return whether it was written."""
    text = recipe.read_text("utf-8")
    line = header(recipe, schema)
    lines = [line, *(other for other in text.splitlines() if not other.startswith(_SWITCH))]
    changed = "\n".join(lines) + "\n"
    if changed != text:
        write_text(recipe, changed)
    return changed != text


def write_schema(path: Path = FILE) -> None:
    """Write the schema as JSON."""
    write_text(path, json.dumps(recipe_schema(), indent=1, ensure_ascii=False) + "\n")


def _section(cls: type, definitions: dict[str, Schema]) -> Schema:
    """Return the schema of a section's mapping, putting the sections below it into `definitions`."""
    hints = typing.get_type_hints(cls)
    properties: dict[str, Schema] = {}
    required = []
    for field in dataclasses.fields(cls):
        schema = _bounded(_value(hints[field.name], definitions), field.metadata)
        if text := field.metadata.get("help"):
            schema = {"description": text, **schema}
        elif "$ref" in schema:  # draft 7 ignores what stands beside a reference
            schema = {"description": definitions[schema["$ref"].rpartition("/")[2]]["description"], "allOf": [schema]}
        properties[field.name] = schema | _default(field)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            required.append(field.name)
    return {
        "description": " ".join((cls.__doc__ or "").split("\n\n")[0].split()),
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        **({"required": required} if required else {}),
    }


def _value(hint: Any, definitions: dict[str, Schema]) -> Schema:
    """Return the schema of a value, by the annotations that `kinject.recipe.check` knows."""
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
    """Return one schema for several; scalars that are nothing but a type share one list of types."""
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
    """Return `schema` with the field's bounds on its numbers and its emptiness, wherever in it they apply."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [_bounded(option, metadata) for option in schema["anyOf"]]}
    schema = dict(schema)
    kinds = schema.get("type", [])
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    if kinds & {"integer", "number"}:
        for key, keyword in (("min", "minimum"), ("max", "maximum")):
            if key in metadata:
                schema[keyword] = metadata[key]
    if "array" in kinds:
        schema["items"] = _bounded(schema["items"], {key: metadata[key] for key in ("min", "max") if key in metadata})
    if metadata.get("nonempty"):
        for kind, keyword in (("array", "minItems"), ("object", "minProperties"), ("string", "minLength")):
            if kind in kinds:
                schema[keyword] = 1
    return schema


def _default(field: dataclasses.Field[Any]) -> Schema:
    """Return ``{"default": ...}`` where the field has one that says something in YAML."""
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    if isinstance(value, list | str | int | float):
        return {"default": value}
    return {}


def _trainer() -> Schema:
    """Return the schema of SFTConfig's fields, the names that older guides use and those that are refused."""
    from trl import SFTConfig

    properties = _fields_of(SFTConfig, plain_hint)
    properties["lr_scheduler_type"]["enum"] = schedule_names()
    older = {}
    for name, replacement in RENAMED.items():
        fields, note = replacement(None)
        today = next(iter(fields), "")
        shape: Schema = {
            key: properties[today][key] for key in ("type", "enum", "anyOf") if key in properties.get(today, {})
        }
        if name == "group_by_length":
            shape = {}
        if name == "save_safetensors":
            shape = {"not": {"const": False}}
        if name == "warmup_ratio":
            shape |= {"minimum": 0, "exclusiveMaximum": 1}
        older[name] = {"deprecationMessage": f"{name} {note.partition(':')[0]}.", "doNotSuggest": True, **shape}
    for name, why in REFUSED.items():
        older[name] = {"not": {}, "deprecationMessage": f"{name} {why}", "doNotSuggest": True}
    return {"properties": {**properties, **older}, "additionalProperties": False}


def _adapter() -> Schema:
    """Return the schema of LoraConfig's fields by name; their values are left to peft, as `kinject check` leaves them."""
    from peft import LoraConfig

    properties = _fields_of(LoraConfig, lambda hint: Any)
    properties[MERGE] = {"description": "Fold the adapter into the base weights when training ends.", "default": False}
    return {"properties": properties, "additionalProperties": False}


def _fields_of(cls: type, hint_of: Any) -> dict[str, Schema]:
    """Return the schemas of a library's configuration fields, with the first sentence of what it says of each."""
    hints = typing.get_type_hints(cls)
    properties: dict[str, Schema] = {}
    for field in dataclasses.fields(cls):
        if not field.init or field.name in REFUSED:
            continue
        text = " ".join(str(field.metadata.get("help") or "").split())
        first = text.partition(". ")[0].rstrip(".")
        about = {"description": first[:_LONGEST_HELP] + "."} if first else {}
        properties[field.name] = {**about, **_value(hint_of(hints[field.name]), {}), **_default(field)}
    return properties


def _know_styles(schema: Schema) -> None:
    """Name the styles of rewriting, each with what it is."""
    from kinject.augment.styles import STYLES
    from kinject.augment.validation import MOST_SAMPLES

    count = {"type": "integer", "minimum": 0, "maximum": MOST_SAMPLES}
    schema["properties"] = {name: {"description": style.about, **count} for name, style in STYLES.items()}
    schema["additionalProperties"] = False


def _know_generators(schema: Schema) -> None:
    """Say what each kind of generator cannot do without."""
    from kinject.augment.validation import REQUIRED

    schema["allOf"] = [
        {
            "if": {"properties": {"kind": {"const": kind}}, "required": ["kind"]},
            "then": {"required": [name], "properties": {name: {"type": "string", "minLength": 1}}},
        }
        for kind, (name, _) in REQUIRED.items()
    ]
    only_openai = {"properties": {"batch": {"const": False}}}
    schema["allOf"].append({"if": {"properties": {"kind": {"const": "openai"}}}, "else": only_openai})
