"""YAML in, frozen dataclasses out, every key checked before JAX is imported.

`use: muon` in a section names the file headrace/optim/muon.py. Its `Config` class is cut out of the source
and executed by itself, so that a recipe can be checked without importing the file (docs/decisions/0002)."""

import ast
import dataclasses
import functools
import importlib
import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from headrace.config import synonyms
from headrace.config.descriptions import type_text
from headrace.config.wrappers import ModelWrappers, at_least
from headrace.config.yaml_tree import OVERRIDE, RecipeTree, Tree, did_you_mean, nearest, short
from headrace.errors import UserError

PACKAGE = Path(__file__).parent.parent
MAX_LISTED = 12  # valid names in the message about an unknown key
Field = dataclasses.Field[Any]


class FrozenDict(dict[str, Any]):
    """A mapping whose keys are not checked here, such as the settings of a class outside of Headrace.

    Hashable, as every config must be: a compiled step is identified by its config."""

    def __init__(self, values: Tree):
        super().__init__(values)
        self.text = json.dumps(values, sort_keys=True, default=list)

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self.text)


def to_dict(cfg: Any) -> Tree:
    """Convert a recipe or a section to plain data, `use` included. Wrappers of the model become sections.

    This is what recipe.yaml in a run folder holds. Sections that the recipe does not have are omitted."""
    out: Tree = {"use": cfg.use} if isinstance(getattr(cfg, "use", None), str) else {}
    for name in own_keys(cfg):
        value = getattr(cfg, name)
        if isinstance(value, FrozenDict):
            out[name] = json.loads(value.text)
        elif isinstance(value, dict):
            out[name] = {key: to_dict(source) for key, source in value.items()}
        else:
            out[name] = to_dict(value) if dataclasses.is_dataclass(value) else value
        if isinstance(value, ModelWrappers):
            wrappers = {key: getattr(value, key) for key in wrapper_sections()}
            out |= {key: to_dict(wrapper) for key, wrapper in wrappers.items() if wrapper is not None}
    return out


def flatten(tree: Tree) -> Tree:
    """Map the dotted key of every value to the value."""
    sections = {key: value for key, value in tree.items() if isinstance(value, dict)}
    nested = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    return {key: value for key, value in tree.items() if key not in sections} | nested


def to_yaml(cfg: Any) -> str:
    return dump(to_dict(cfg))


def dump(tree: Tree) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(tree))


def part_names(folder: str) -> list[str]:
    """List the values that `use` can have in a section: the files of its folder."""
    files = sorted(p.stem for p in (PACKAGE / folder).glob("*.py") if not p.stem.startswith("_"))
    return ["auto", *files] if folder == "attention" else files


def own_keys(cfg: Any) -> list[str]:
    """List the keys of a section or recipe, without the wrappers that a model's config carries."""
    return [f.name for f in dataclasses.fields(cfg) if not f.metadata.get("wrapper")]


def optional_key(section: Any, key: str, default: Any) -> Any:
    """Read a key that not every part of this section has, such as `experts` of a model."""
    return getattr(section, key, default)


def wrapper_sections() -> dict[str, Field]:
    """Sections that are attributes of the model's config, by name."""
    return {f.name: f for f in dataclasses.fields(ModelWrappers) if "section" in f.metadata}


def recipe_fields(cls: type) -> dict[str, Field]:
    """Top-level keys and sections of a recipe, in order. Wrappers follow the model."""
    out: dict[str, Field] = {}
    for f in dataclasses.fields(cls):
        out[f.name] = f
        if f.metadata.get("common") is ModelWrappers:
            out |= wrapper_sections()
    return out


def all_keys(cls: type) -> dict[str, list[tuple[str, Field]]]:
    """Map each key that a recipe can have to its declarations: the file (or "") and the field."""
    out: dict[str, list[tuple[str, Field]]] = {}
    for name, f in recipe_fields(cls).items():
        if "folder" in f.metadata:
            prefix = f"{name}.NAME" if f.metadata["many"] else name
            out[f"{prefix}.use"] = [("str", f)]
            for use in part_names(f.metadata["folder"]):
                part = part_class(f.metadata["folder"], use, f.metadata["common"])
                for inner in dataclasses.fields(part):
                    if not inner.metadata.get("wrapper"):
                        out.setdefault(f"{prefix}.{inner.name}", []).append((use, inner))
        elif "section" in f.metadata:
            for inner in dataclasses.fields(f.metadata["section"]):
                out[f"{name}.{inner.name}"] = [("", inner)]
        else:
            out[name] = [("", f)]
    return out


def part_module(folder: str, name: str) -> types.ModuleType:
    """Import the file that `use: NAME` means. Slow: models import JAX."""
    return importlib.import_module(f"headrace.{folder.replace('/', '.')}.{name}")


def part_class(folder: str, name: str, common: type[Any] | None = None) -> type[Any]:
    """Make the class of one part: the keys of its file's `Config`, those of `common`, and `use`.

    A `Config` may declare a common key itself, for another default. Models always have `ModelWrappers`."""
    declared: Any = ModelWrappers if folder == "models" else common
    return _part_class(folder, name, declared)


@functools.cache
def _part_class(folder: str, name: str, common: Any) -> type[Any]:
    config: Any = _source_class(folder, name)
    is_model = common is ModelWrappers
    fields = dataclasses.fields(common) if common and not is_model else ()

    def check(self: Any) -> None:
        for key, value in vars(self).items():
            if isinstance(value, dict):
                object.__setattr__(self, key, FrozenDict(value))
        for cls in (config, common):
            getattr(cls, "__post_init__", lambda self: None)(self)

    return dataclasses.make_dataclass(
        "Config",
        [(f.name, f.type, _copy_field(f)) for f in fields if f.name not in config.__dataclass_fields__],
        bases=(config, ModelWrappers) if is_model else (config,),
        frozen=True,
        kw_only=True,
        namespace={
            "use": name,
            "__post_init__": check,
            "__module__": config.__module__,
            # A pickle, sent to another process, names the part: the class itself cannot be imported.
            "__reduce__": lambda self: (_rebuild, (folder, name, common, dict(vars(self)))),
        },
    )


def _rebuild(folder: str, name: str, common: type | None, values: Tree) -> Any:
    return part_class(folder, name, common)(**values)


def _copy_field(f: Field) -> Any:
    return field(default=f.default, metadata=f.metadata)


def _source_class(folder: str, name: str) -> type:
    if name == "auto":  # chosen by platform, so there is nothing to set
        return dataclasses.make_dataclass("Config", [], frozen=True)
    path = PACKAGE / folder / f"{name}.py"
    body = ast.parse(path.read_text()).body
    node = next(n for n in body if isinstance(n, ast.ClassDef) and n.name == "Config")
    scope: Tree = dict(dataclass=dataclass, field=field, Literal=Literal, math=math, at_least=at_least)
    scope["__name__"] = f"headrace.{folder.replace('/', '.')}.{name}"
    exec(compile(ast.Module([node], []), str(path), "exec"), scope)
    return scope["Config"]


class RecipeReader:
    """Makes a recipe of a YAML file, the files it includes and the overrides. Errors name the line."""

    def __init__(self, path: str | Path | None, overrides: Sequence[str] = ()):
        """Without a path, the recipe consists of the overrides."""
        self.source = RecipeTree(path, overrides)
        self.recipe_class: Any = None
        self.recipe: Any = None  # once it is complete
        self.inherited: dict[
            str, str
        ] = {}  # keys that the recipe does not have, and where their values are from

    @property
    def tree(self) -> Tree:
        return self.source.tree

    @property
    def path(self) -> str:
        return self.source.path

    def read(
        self,
        cls: type[Any],
        check: Callable[[Any, "RecipeReader"], None],
        complete: Callable[["RecipeReader"], None] | None = None,
    ) -> Any:
        """Make a recipe of class `cls`. `complete` may add to the tree; `check` is given the recipe."""
        self.recipe_class, fields = cls, recipe_fields(cls)
        sections = {name for name, f in fields.items() if _is_section(f)}
        self.source.resolve(sections)
        for key in self.tree:
            if key not in fields:
                self.unknown_key(key, list(fields))
        if complete is not None:
            complete(self)
        scalars = tuple(name for name in fields if name not in sections)
        scalar_values = {name: self.tree[name] for name in scalars if name in self.tree}
        top = self._make(_subset_class(cls, scalars), scalar_values, "")
        values = {name: self._section(f) for name, f in fields.items() if name in sections}
        for f in dataclasses.fields(cls):
            if f.metadata.get("common") is ModelWrappers:
                wrappers = {name: values.pop(name) for name in wrapper_sections()}
                values[f.name] = dataclasses.replace(values[f.name], **wrappers)
        self.recipe = cls(**dataclasses.asdict(top), **values)
        check(self.recipe, self)
        return self.recipe

    def error(self, key: str, expected: str, *, found: str | None = None, hint: str = "") -> NoReturn:
        """Raise UserError about the value of a key: where it is, what was found and what is expected."""
        message = f"found {self.shown_value(key) if found is None else found}, {expected}"
        raise UserError(f"{self.location(key)}: {key}: {message}" + (f"; {hint}" if hint else ""))

    def unknown_key(self, key: str, valid: list[str]) -> NoReturn:
        """Raise UserError about a key that does not exist, with the one that was probably meant."""
        raise UserError(f"{self.location(key)}: {key}: unknown key{self._suggestion(key, valid)}")

    def _suggestion(self, key: str, valid: list[str]) -> str:
        parent, _, name = key.rpartition(".")
        declared = {
            other.replace(".NAME.", f".{key.split('.')[1]}." if key.count(".") == 2 else ".NAME."): parts
            for other, parts in all_keys(self.recipe_class).items()
        }
        same_name = [other for other in declared if other.rpartition(".")[2] == name]
        if key in declared:
            return f"; it belongs to {parent}.use: {_any_of([part for part, _ in declared[key]])}"
        if (synonym := synonyms.suggestion(key, declared)) is not None:
            return f"; {synonym}"
        if same_name:  # first the one that most parts have: schedule.steps rather than another's
            same_name.sort(key=lambda other: -len(declared[other]))
            return f"; {did_you_mean(_any_of(same_name[:3]))}"
        if (similar := nearest(name, valid)) is not None:
            return f"; {did_you_mean(similar, parent + '.' * bool(parent))}"
        more = f" and {len(valid) - MAX_LISTED} more" if len(valid) > MAX_LISTED else ""
        return f", expected {'one of' if valid[1:] else 'only'} {', '.join(valid[:MAX_LISTED])}{more}"

    def shown_value(self, key: str) -> str:
        """The value of a key as it was written, shortened. If it was not, say where it is from."""
        if key not in self.source.locations and self.recipe is not None:
            value = self.recipe
            for name in key.split("."):
                value = value[name] if isinstance(value, dict) else getattr(value, name)
            origin = f"from {self.inherited[key]}" if key in self.inherited else "the default"
            return f"{short(value)}, {origin}"
        return self.source.shown_value(key)

    def location(self, key: str) -> str:
        return self.source.location(key)

    def _section(self, f: Field) -> Any:
        if not f.metadata.get("many"):
            if f.metadata.get("wrapper") and self.tree.get(f.name) is None:
                return None
            return self._part(f, f.name, self.tree.get(f.name, {}))
        nodes = self.tree.get(f.name)
        if not isinstance(nodes, dict) or not nodes:
            self.error(f.name, f"expected one or more by name: {f.name}: {{NAME: {{...}}}}")
        return {str(name): self._part(f, f"{f.name}.{name}", node) for name, node in nodes.items()}

    def _part(self, f: Field, key: str, node: Any) -> Any:
        folder = f.metadata.get("folder")
        if not isinstance(node, dict):
            written = f"{key}.use={node}" if self.location(key) == OVERRIDE else f"{key}: {{use: {node}}}"
            hint = did_you_mean(written) if folder and node in part_names(folder) else ""
            self.error(key, "expected `key: value` pairs or the path of a .yaml file", hint=hint)
        cls = self._class_of_part(f, key, node) if folder else f.metadata["section"]
        return self._make(cls, {k: v for k, v in node.items() if k != "use" or not folder}, key + ".")

    def _class_of_part(self, f: Field, key: str, node: Tree) -> type:
        folder, use = f.metadata["folder"], node.get("use", f.metadata["use"])
        valid = part_names(folder)
        if use not in valid:
            hint = ""
            if isinstance(use, str):
                hint = synonyms.value_suggestion(f"{key}.use", use) or did_you_mean(nearest(use, valid))
            self.error(f"{key}.use", f"expected one of {', '.join(valid)}", hint=hint)
        return part_class(folder, use, f.metadata["common"])

    def _make(self, cls: type[Any], node: Tree, prefix: str) -> Any:
        """Make one section, with values converted to the types that its dataclass declares."""
        fields = {name: f.type for name, f in cls.__dataclass_fields__.items() if name in own_keys(cls)}
        for key in node:
            if key not in fields:
                self.unknown_key(
                    prefix + key, ["use"] * hasattr(cls, "use") + [n for n in fields if n != "use"]
                )
        schema = OmegaConf.structured(_plain_class(cls))
        OmegaConf.set_readonly(schema, False)
        for key, value in node.items():
            try:
                # Not schema[key] = ..., which converts `nan` and `1` as well, but warns the user of it.
                OmegaConf.update(schema, key, self._fit(prefix + key, value, fields[key]))
            except (OmegaConfBaseException, TypeError, OverflowError):
                self._wrong_type(prefix + key, value, fields[key])
        missing = [key for key in fields if OmegaConf.is_missing(schema, key)]
        if missing:
            hint = f"required here: {', '.join(missing)}" if missing[1:] else "it is required"
            expected = f"expected {type_text(fields[missing[0]])}"
            self.error(prefix + missing[0], expected, found="nothing", hint=hint)
        values = typing.cast(Tree, OmegaConf.to_container(schema))
        for key, value in values.items():
            if value == "" or (isinstance(value, float) and not math.isfinite(value)):
                self.error(prefix + key, f"expected {'text' if value == '' else 'a finite number'}")
        try:
            return cls(**values)
        except ValueError as error:
            key, _, message = str(error).partition(": ")
            message = message if message.startswith("expected") else f"which {message}"
            default = "nothing" if values.get(key) is None else f"{short(values[key])}, the default"
            self.error(prefix + key, message, found=None if key in node else default)

    def _fit(self, key: str, value: Any, hint: Any) -> Any:
        """Convert a value to the type `hint`, where YAML has read it as another one."""
        options = typing.get_args(hint) or (hint,)
        if isinstance(value, dict) and hint is dict:
            return value
        if isinstance(value, dict | list):
            raise TypeError
        if float in options and type(value) is int:
            return float(value)
        if str in options and type(value) not in options and (value is not None or int in options):
            # Text as it was written: YAML reads 1.10 as a number, and yes as true. Keys that may be numbers
            # or text explain best themselves what they expect.
            text = self.source.texts.get(key, "")
            return text if text and "${" not in text else str(value)
        return value

    def _wrong_type(self, key: str, value: Any, hint: Any) -> NoReturn:
        suggestion = ""
        if hint is int and isinstance(value, float) and value.is_integer():
            suggestion = f"write {int(value)}"
        elif typing.get_origin(hint) is Literal:
            valid = [str(option) for option in typing.get_args(hint)]
            suggestion = synonyms.value_suggestion(key, str(value)) or did_you_mean(
                nearest(str(value), valid)
            )
        self.error(key, f"expected {type_text(hint)}", hint=suggestion)


def _subset_class(cls: Any, names: tuple[str, ...]) -> type[Any]:
    """A dataclass with these fields of `cls`."""
    return _make_subset(cls, names)


@functools.cache
def _make_subset(cls: Any, names: tuple[str, ...]) -> type[Any]:
    chosen = [(f.name, f.type, _copy_field(f)) for f in dataclasses.fields(cls) if f.name in names]
    return dataclasses.make_dataclass(cls.__name__, chosen, frozen=True, kw_only=True)


def _plain_class(cls: type[Any]) -> type[Any]:
    """A class with the keys of a section alone: OmegaConf must not see the wrappers of a model."""
    return _subset_class(cls, tuple(own_keys(cls))) if hasattr(cls, "lora") else cls


def _is_section(f: Field) -> bool:
    return "folder" in f.metadata or "section" in f.metadata


def _any_of(words: Iterable[str]) -> str:
    words = list(words)
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
