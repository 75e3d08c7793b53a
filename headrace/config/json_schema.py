"""JSON schemas of recipes, with which editors complete and check keys, and show what they mean."""

import dataclasses
import types
import typing
from typing import Any

from headrace.config import descriptions
from headrace.config.descriptions import Description
from headrace.config.reader import Field, own_keys, part_class, part_names, recipe_fields
from headrace.config.wrappers import ModelWrappers

Schema = dict[str, Any]
FILE: Schema = {"type": "string", "pattern": "[.]ya?ml$"}  # a section may be in a file of its own
NAMES = {int: "integer", float: "number", bool: "boolean", str: "string", type(None): "null", dict: "object"}


def schema(cls: type) -> Schema:
    """The schema of a whole recipe, `TrainRecipe` or `DataRecipe`."""
    fields, texts = recipe_fields(cls), descriptions.of_class(cls)
    properties = {name: _property(f, texts.get(name)) for name, f in fields.items()}
    required = [name for name, f in fields.items() if _must_be_written(f)]
    head: Schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": cls.__doc__}
    if any(_is_model(f) for f in fields.values()):
        head["anyOf"] = [{"required": ["init_from"]}, {"required": ["model"]}]
    return head | _object(properties, required)


def _is_model(f: Field) -> bool:
    """Whether this is the section that may be incomplete, since `init_from` provides what is missing."""
    return f.metadata.get("common") is ModelWrappers


def _property(f: Field, description: Description | None) -> Schema:
    if "folder" in f.metadata:
        folder, common, default = (f.metadata[name] for name in ("folder", "common", "use"))
        parts = [_part(folder, name, common, default) for name in part_names(folder)]
        if _is_model(f):
            parts = [{key: value for key, value in part.items() if key != "required"} for part in parts]
        if f.metadata["many"]:
            parts = [{"type": "object", "additionalProperties": {"anyOf": parts}, "minProperties": 1}]
        return {"anyOf": [*parts, FILE]}
    if "section" in f.metadata:
        cls = f.metadata["section"]
        options = [_section(cls, descriptions.of_class(cls)), FILE]
        if f.metadata.get("wrapper"):
            options.append({"type": "null"})
        return {"description": " ".join((cls.__doc__ or "").split()), "anyOf": options}
    return _typed(f, description)


def _part(folder: str, name: str, common: type | None, default: str | None) -> Schema:
    section = _section(part_class(folder, name, common), descriptions.of_part(folder, name, common))
    required = [] if name == default else ["use"]
    return _object({"use": {"const": name}} | section["properties"], required + section.get("required", []))


def _section(cls: type[Any], texts: dict[str, Description]) -> Schema:

    fields = [f for f in dataclasses.fields(cls) if f.name in own_keys(cls)]
    properties = {f.name: _typed(f, texts.get(f.name)) for f in fields}
    return _object(properties, [f.name for f in fields if _is_required(f)])


def _object(properties: Schema, required: list[str]) -> Schema:
    out: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return out | ({"required": required} if required else {})


def _typed(f: Field, description: Description | None) -> Schema:
    out = _type(f.type)
    if description is not None:
        out["description"] = description.text + (f" [{description.unit}]" if description.unit else "")
    return out if f.default is dataclasses.MISSING else out | {"default": f.default}


def _type(hint: Any) -> Schema:
    if typing.get_origin(hint) is typing.Literal:
        return {"enum": list(typing.get_args(hint))}
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return {"type": [NAMES[option] for option in typing.get_args(hint)]}
    return {"type": NAMES[hint]}


def _must_be_written(f: Field) -> bool:
    """Whether every recipe has this key. A section is required if one of its own keys is."""
    if f.metadata.get("wrapper") or _is_model(f):
        return False
    if "folder" in f.metadata:
        folder, common, default = (f.metadata[name] for name in ("folder", "common", "use"))
        return f.metadata["many"] or default is None or _has_required(part_class(folder, default, common))
    return _has_required(f.metadata["section"]) if "section" in f.metadata else _is_required(f)


def _has_required(cls: type) -> bool:
    return any(_is_required(f) for f in dataclasses.fields(cls))


def _is_required(f: Field) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
