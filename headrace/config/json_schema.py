"""Every key a recipe can have as a JSON schema: editors complete and check recipes with it as one types."""

import dataclasses
import types
import typing
from typing import Any

from headrace.config import reader as config

FILE = {"type": "string", "pattern": "[.]ya?ml$"}  # a section may be taken from another file
NAMES = {int: "integer", float: "number", bool: "boolean", str: "string", type(None): "null", dict: "object"}


def schema(cls: type) -> dict[str, Any]:
    """The schema of a whole recipe, `recipe.Run` or `recipe.DataRun`."""
    properties = {f.name: _field(f) for f in dataclasses.fields(cls)}
    required = [f.name for f in dataclasses.fields(cls) if _must_be_written(f)]
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": cls.__doc__}
    return head | _object(properties, required)


def _field(f: Any) -> dict[str, Any]:
    if "folder" in f.metadata:
        folder, common, default = (f.metadata[name] for name in ("folder", "common", "use"))
        parts = [_part(config.part_class(folder, name, common), default) for name in config.names(folder)]
        if f.metadata["many"]:
            parts = [{"type": "object", "additionalProperties": {"anyOf": parts}, "minProperties": 1}]
        return {"anyOf": [*parts, FILE]}
    if dataclasses.is_dataclass(f.type):
        return {"anyOf": [_section(f.type), FILE]}
    return _typed(f)


def _part(cls: Any, default: str | None) -> dict[str, Any]:
    one = _section(cls)
    required = [] if cls.use == default else ["use"]
    return _object({"use": {"const": cls.use}} | one["properties"], required + one.get("required", []))


def _section(cls: Any) -> dict[str, Any]:
    fields = dataclasses.fields(cls)
    return _object({f.name: _typed(f) for f in fields}, [f.name for f in fields if _is_required(f)])


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    out: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    return out | ({"required": required} if required else {})


def _typed(f: Any) -> dict[str, Any]:
    out = _type(f.type)
    return out if f.default is dataclasses.MISSING else out | {"default": f.default}


def _type(hint: Any) -> dict[str, Any]:
    if typing.get_origin(hint) is typing.Literal:
        return {"enum": list(typing.get_args(hint))}
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return {"type": [NAMES[option] for option in typing.get_args(hint)]}
    return {"type": NAMES[hint]}


def _must_be_written(f: Any) -> bool:
    """Whether a recipe without this key cannot be: a section is needed when one of its own keys is."""
    if "folder" in f.metadata:
        folder, common, default = (f.metadata[name] for name in ("folder", "common", "use"))
        return (
            f.metadata["many"]
            or default is None
            or "required" in _section(config.part_class(folder, default, common))
        )
    return "required" in _section(f.type) if dataclasses.is_dataclass(f.type) else _is_required(f)


def _is_required(f: Any) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
