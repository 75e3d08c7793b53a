"""YAML in, frozen dataclasses out, every key checked before JAX is imported.

`use: muon` in a section means the file headrace/optim/muon.py. Its `Config` class is read out of the source
and executed alone, so that a recipe can be checked without importing the file (docs/decisions/0002)."""

import ast
import dataclasses
import difflib
import functools
import json
import math
import os
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from headrace.errors import UserError

PACKAGE = Path(__file__).parent.parent
COMMAND_LINE = "command line"  # the place of an override
BAD_VALUES = (ValueError, KeyError, IndexError, AttributeError)  # what PyYAML may raise at `!!int x`
LISTED = 12  # valid names told at most when a key is unknown
PROBLEMS = {  # what the YAML parser says, and what it means to the reader
    "'\\t'": "found a tab, expected spaces",
    "mapping values are not allowed": "found a `:` too many or too deep an indent, expected `key: value`",
    "could not find expected ':'": "found a line without `:`, expected `key: value`",
    "found another document": "found a second document after `---`, expected one",
}


class Settings(dict):
    """Keys that are not ours and that nobody here checks, such as those of a class outside of Headrace. What
    is compiled is known by its config, which must be hashable, and with it these."""

    def __init__(self, values: dict[str, Any]):
        super().__init__(values)
        self.text = json.dumps(values, sort_keys=True, default=list)

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self.text)


def to_dict(cfg: Any) -> dict[str, Any]:
    """A recipe as plain data, `use` included: what recipe.yaml in a run folder holds."""
    out: dict[str, Any] = {"use": cfg.use} if isinstance(getattr(cfg, "use", None), str) else {}
    for f in dataclasses.fields(cfg):
        value = getattr(cfg, f.name)
        if isinstance(value, Settings):
            out[f.name] = json.loads(value.text)
        elif isinstance(value, dict):
            out[f.name] = {name: to_dict(part) for name, part in value.items()}
        else:
            out[f.name] = to_dict(value) if dataclasses.is_dataclass(value) else value
    return out


def flat(tree: dict[str, Any]) -> dict[str, Any]:
    """Every value of a recipe under its dotted key."""
    sections = {key: value for key, value in tree.items() if isinstance(value, dict)}
    nested = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    return {key: value for key, value in tree.items() if key not in sections} | nested


def to_yaml(cfg: Any) -> str:
    return dump(to_dict(cfg))


def dump(tree: dict[str, Any]) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(tree))


def names(folder: str) -> list[str]:
    """What `use` can be in a section: the files of its folder."""
    found = sorted(p.stem for p in (PACKAGE / folder).glob("*.py") if not p.stem.startswith("_"))
    return ["auto", *found] if folder == "attention" else found


def keys(cls: type) -> dict[str, list[tuple[str, Any]]]:
    """Every key a recipe can have, by dotted path, with the field behind it in each file that has it."""
    out: dict[str, list[tuple[str, Any]]] = {}
    for f in dataclasses.fields(cls):
        if "folder" in f.metadata:
            section = f"{f.name}.NAME" if f.metadata["many"] else f.name
            out[f"{section}.use"] = [("str", f)]
            for name in names(f.metadata["folder"]):
                for inner in dataclasses.fields(part_class(f.metadata["folder"], name, f.metadata["common"])):
                    out.setdefault(f"{section}.{inner.name}", []).append((name, inner))
        elif dataclasses.is_dataclass(f.type):
            for inner in dataclasses.fields(typing.cast(Any, f.type)):
                out[f"{f.name}.{inner.name}"] = [("", inner)]
        else:
            out[f.name] = [("", f)]
    return out


@functools.cache
def part_class(folder: str, name: str, common: type | None = None) -> type:
    """The Config of one part: the class in its file, `use`, and the keys its section always has, which the
    class may declare itself to give them another default."""
    own: Any = _source_class(folder, name)
    fields = dataclasses.fields(common) if common else ()

    def checks(self: Any) -> None:
        for name, value in vars(self).items():
            if isinstance(value, dict):
                object.__setattr__(self, name, Settings(value))
        for cls in (own, common):
            getattr(cls, "__post_init__", lambda self: None)(self)

    return dataclasses.make_dataclass(
        "Config",
        [(f.name, f.type, _copy(f)) for f in fields if f.name not in own.__dataclass_fields__],
        bases=(own,),
        frozen=True,
        kw_only=True,
        namespace={
            "use": name,
            "__post_init__": checks,
            "__module__": own.__module__,
            # A pickle of it, for another process, names the part: the class itself is found nowhere.
            "__reduce__": lambda self: (_remake, (folder, name, common, dict(vars(self)))),
        },
    )


def _remake(folder: str, name: str, common: type | None, values: dict[str, Any]) -> Any:
    return part_class(folder, name, common)(**values)


def _copy(f: Any) -> Any:
    return field(default=f.default, metadata=f.metadata)


def _source_class(folder: str, name: str) -> type:
    if name == "auto":  # the platform chooses: nothing to set
        return dataclasses.make_dataclass("Config", [], frozen=True)
    path = PACKAGE / folder / f"{name}.py"
    body = ast.parse(path.read_text()).body
    node = next(n for n in body if isinstance(n, ast.ClassDef) and n.name == "Config")
    scope: dict[str, Any] = dict(dataclass=dataclass, field=field, Literal=Literal, math=math)
    scope["__name__"] = f"headrace.{folder.replace('/', '.')}.{name}"
    exec(compile(ast.Module([node], []), str(path), "exec"), scope)
    return scope["Config"]


class Reader:
    """A recipe file, the sections it takes from others, and the overrides; knows where each key stands."""

    def __init__(self, path: str | Path | None, overrides: typing.Sequence[str] = ()):
        """With no path, of the overrides alone."""
        self.path, self.overrides = COMMAND_LINE if path is None else str(path), tuple(overrides)
        self.places: dict[str, str] = {}
        self.texts: dict[str, str] = {}  # values as they were written
        self.cls: Any = None  # of the recipe
        self.cfg: Any = None  # once it is read
        self.tree = {} if path is None else self._file(Path(path), "")

    def read(self, cls: type[Any], check: typing.Callable[[Any, "Reader"], None]) -> Any:
        self.cls, fields = cls, {f.name: f for f in dataclasses.fields(cls)}
        for key in fields:
            self._include(key, Path(self.path).parent)
        for item in self.overrides:
            self._override(item)
        try:  # only now are the values known that ${other.key} stands for
            self.tree = typing.cast(Any, OmegaConf.to_container(OmegaConf.create(self.tree), resolve=True))
        except OmegaConfBaseException as error:
            self._bad_reference(error)
        for key in self.tree:
            if key not in fields:
                self.unknown(key, list(fields))
        scalars = tuple(n for n, f in fields.items() if not _is_section(f))
        plain = {n: self.tree[n] for n in scalars if n in self.tree}
        top = self._make(_scalars_class(typing.cast(Any, cls), scalars), plain, "")
        sections = {n: self._section(f) for n, f in fields.items() if n not in scalars}
        self.cfg = cls(**dataclasses.asdict(top), **sections)
        check(self.cfg, self)
        return self.cfg

    def fail(self, key: str, expected: str, *, found: str | None = None, hint: str = "") -> typing.NoReturn:
        said = f"found {self.found(key) if found is None else found}, {expected}"
        raise UserError(f"{self.place(key)}: {key}: {said}" + (f"; {hint}" if hint else ""))

    def unknown(self, key: str, valid: list[str]) -> typing.NoReturn:
        parent, _, name = key.rpartition(".")
        known = {
            other.replace(".NAME.", f".{key.split('.')[1]}." if key.count(".") == 2 else ".NAME."): parts
            for other, parts in keys(self.cls).items()
        }
        alike = [other for other in known if other.rpartition(".")[2] == name]
        if key in known:
            hint = f"it belongs to {parent}.use: {_listed([part for part, _ in known[key]])}"
        elif alike:  # first what most parts have: schedule.steps before Muon's
            hint = _did_you_mean(_listed(sorted(alike, key=lambda other: -len(known[other]))[:3]))
        else:
            hint = _did_you_mean(nearest(name, valid), parent + "." * bool(parent))
        rest = f" and {len(valid) - LISTED} more" if len(valid) > LISTED else ""
        expected = f"expected {'one of' if valid[1:] else 'only'} {', '.join(valid[:LISTED])}{rest}"
        self.fail(key, expected, found="an unknown key", hint=hint)

    def found(self, key: str) -> str:
        """What stands at a key, as it was written, in few words."""
        if key not in self.places and self.cfg is not None:
            value = self.cfg
            for name in key.split("."):
                value = value[name] if isinstance(value, dict) else getattr(value, name)
            return f"{_short(value)}, the default"
        value, text = typing.cast(Any, self.tree), self.texts.get(key, "")
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value is None and not text:
            return "nothing"
        is_written = text and "${" not in text and not isinstance(value, str | dict | list)
        return _cut(text) if is_written else _short(value)

    def place(self, key: str) -> str:
        """file:line of a key, or of the nearest thing above it that is written down."""
        while key and key not in self.places:
            key = key.rpartition(".")[0]
        return self.places.get(key, self.path if self.path == COMMAND_LINE else f"{self.path}:1")

    def _file(self, path: Path, prefix: str) -> dict[str, Any]:
        try:
            text = path.read_text(encoding="utf-8-sig")
            root = yaml.compose(text, Loader=yaml.SafeLoader)
            if not isinstance(root, yaml.MappingNode):
                found = "an empty file" if root is None else "a list or plain text"
                raise UserError(f"{path}:1: found {found}, expected `key: value` lines")
            self._mark(root, str(path), prefix)
            return typing.cast(Any, OmegaConf.to_container(OmegaConf.create(text)))
        except UserError:
            raise
        except (OSError, UnicodeDecodeError, yaml.reader.ReaderError) as error:
            raise UserError(f"{path}: found {_unreadable(path, error)}") from None
        except yaml.MarkedYAMLError as error:
            raise UserError(f"{path}:{_problem(error)}") from None
        except RecursionError:
            raise UserError(f"{path}:1: found brackets in brackets without end, expected sections") from None
        except OmegaConfBaseException as error:
            self._bad_reference(error)
        except BAD_VALUES as error:
            raise UserError(f"{path}: not YAML: {error}") from None

    def _mark(self, node: Any, file: str, prefix: str) -> None:
        """Notes the line and the text of every key, and refuses those that stand there twice."""
        lines: dict[str, int] = {}
        for key, value in node.value:
            name, place = key.value, f"{file}:{key.start_mark.line + 1}"
            if not key.tag.endswith(":str"):
                found = name if isinstance(name, str) else "a list"
                raise UserError(f"{place}: found {found} for a key, expected a name")
            if "." in name:
                section, _, rest = name.partition(".")
                expected = f"{_cut(section)}: {{{_cut(rest)}: ...}}"
                raise UserError(f"{place}: {_cut(name)}: found a dotted key, expected {expected}")
            if name in lines:
                again = f"found a second time, expected once; it first stands in line {lines[name]}"
                raise UserError(f"{place}: {prefix}{_cut(name)}: {again}")
            lines[name], self.places[prefix + name] = key.start_mark.line + 1, place
            if isinstance(value, yaml.MappingNode) and prefix.count(".") < 2:
                self._mark(value, file, f"{prefix}{name}.")
            self.texts[prefix + name] = value.value if isinstance(value, yaml.ScalarNode) else "..."

    def _include(self, key: str, folder: Path) -> None:
        """A section given as a path is read from that file, seen from the recipe that names it."""
        value, sections = self.tree.get(key), [f.name for f in dataclasses.fields(self.cls) if _is_section(f)]
        if key in sections and isinstance(value, str) and value.endswith((".yaml", ".yml")):
            path = Path(os.path.normpath(folder / value))
            if not path.exists():
                self.fail(key, f"expected a file, and there is no {path}{_nearest_file(path)}")
            self.tree[key] = self._file(path, f"{key}.")

    def _override(self, item: str) -> None:
        key, _, text = item.partition("=")
        *parents, last = key.split(".")
        if "=" not in item or not all((*parents, last)):
            raise UserError(
                f"{COMMAND_LINE}: found {_cut(item)}, expected key=value, e.g. schedule.steps=100"
            )
        if self.places.get(key) == COMMAND_LINE:
            raise UserError(f"{COMMAND_LINE}: {key}: found a second time, expected once")
        try:
            value = OmegaConf.to_container(OmegaConf.from_dotlist([f"x={text}"]))["x"]  # type: ignore[call-overload,index]
        except (yaml.YAMLError, OmegaConfBaseException, RecursionError, *BAD_VALUES):
            raise UserError(f"{COMMAND_LINE}: {key}: found {_cut(text)}, expected a value in YAML") from None
        node = self.tree
        for depth, name in enumerate(parents, 1):
            if not isinstance(node.get(name), dict):
                node[name] = {}
                self._replaced(".".join(parents[:depth]), "...")
            node = node[name]
        node[last] = value
        self._replaced(key, text)
        self._include(key, Path("."))

    def _replaced(self, key: str, text: str) -> None:
        for old in [place for place in self.places if place.startswith(key + ".")]:
            del self.places[old]
        self.places[key], self.texts[key] = COMMAND_LINE, text

    def _bad_reference(self, error: OmegaConfBaseException) -> typing.NoReturn:
        suspect = next((key for key, text in self.texts.items() if "${" in text), "")
        key, reason = error.full_key or suspect, str(error).splitlines()[0]
        found = _short(self.texts.get(key))
        self.fail(key, f"expected ${{...}} to name another key ({reason})", found=found)

    def _section(self, f: Any) -> Any:
        if not f.metadata.get("many"):
            return self._one(f, f.name, self.tree.get(f.name, {}))
        nodes = self.tree.get(f.name)
        if not isinstance(nodes, dict) or not nodes:
            self.fail(f.name, f"expected one or more by name: {f.name}: {{NAME: {{...}}}}")
        return {str(name): self._one(f, f"{f.name}.{name}", node) for name, node in nodes.items()}

    def _one(self, f: Any, key: str, node: Any) -> Any:
        folder = f.metadata.get("folder")
        if not isinstance(node, dict):
            spelt = f"{key}.use={node}" if self.place(key) == COMMAND_LINE else f"{key}: {{use: {node}}}"
            hint = _did_you_mean(spelt) if folder and node in names(folder) else ""
            self.fail(key, "expected `key: value` pairs or the path of a .yaml file", hint=hint)
        cls = self._part(f, key, node) if folder else f.type
        return self._make(cls, {k: v for k, v in node.items() if k != "use" or not folder}, key + ".")

    def _part(self, f: Any, key: str, node: dict[str, Any]) -> type:
        folder, use = f.metadata["folder"], node.get("use", f.metadata["use"])
        valid = names(folder)
        if use not in valid:
            hint = _did_you_mean(nearest(str(use), valid))
            self.fail(f"{key}.use", f"expected one of {', '.join(valid)}", hint=hint * isinstance(use, str))
        return part_class(folder, use, f.metadata["common"])

    def _make(self, cls: type[Any], node: dict[str, Any], prefix: str) -> Any:
        """One section, its values of the types its dataclass declares, as OmegaConf sees them."""
        fields = {f.name: f.type for f in dataclasses.fields(cls)}
        for key in node:
            if key not in fields:
                self.unknown(prefix + key, ["use"] * hasattr(cls, "use") + [n for n in fields if n != "use"])
        schema = OmegaConf.structured(cls)
        OmegaConf.set_readonly(schema, False)
        for key, value in node.items():
            try:
                # Not schema[key] = ..., which converts `nan` and `1` as well, but warns the user of it.
                OmegaConf.update(schema, key, self._fitting(prefix + key, value, fields[key]))
            except (OmegaConfBaseException, TypeError, OverflowError):
                self._wrong_type(prefix + key, value, fields[key])
        missing = [key for key in fields if OmegaConf.is_missing(schema, key)]
        if missing:
            hint = f"required here: {', '.join(missing)}" if missing[1:] else "it is required"
            expected = f"expected {_plain(fields[missing[0]])}"
            self.fail(prefix + missing[0], expected, found="nothing", hint=hint)
        values = typing.cast(dict[str, Any], OmegaConf.to_container(schema))
        for key, value in values.items():
            if value == "" or isinstance(value, float) and not math.isfinite(value):
                self.fail(prefix + key, f"expected {'text' if value == '' else 'a finite number'}")
        try:
            return cls(**values)
        except ValueError as error:
            key, _, message = str(error).partition(": ")
            message = message if message.startswith("expected") else f"which {message}"
            default = "nothing" if values.get(key) is None else f"{_short(values[key])}, the default"
            self.fail(prefix + key, message, found=None if key in node else default)

    def _fitting(self, key: str, value: Any, hint: Any) -> Any:
        options = typing.get_args(hint) or (hint,)
        if isinstance(value, dict) and hint is dict:
            return value
        if isinstance(value, dict | list):
            raise TypeError
        if float in options and type(value) is int:
            return float(value)
        if str in options and type(value) not in options and (value is not None or int in options):
            # Text as written: YAML makes a number of 1.10, and true of yes. A part that takes numbers or
            # text says best itself what it expects.
            text = self.texts.get(key, "")
            return text if text and "${" not in text else str(value)
        return value

    def _wrong_type(self, key: str, value: Any, hint: Any) -> typing.NoReturn:
        better = ""
        if hint is int and isinstance(value, float) and value.is_integer():
            better = f"write {int(value)}"
        elif typing.get_origin(hint) is Literal:
            better = _did_you_mean(nearest(str(value), typing.get_args(hint)))
        self.fail(key, f"expected {_plain(hint)}", hint=better)


@functools.cache
def _scalars_class(cls: type, keep: tuple[str, ...]) -> type:
    chosen = [(f.name, f.type, _copy(f)) for f in dataclasses.fields(cls) if f.name in keep]
    return dataclasses.make_dataclass(cls.__name__, chosen, frozen=True, kw_only=True)


def _is_section(f: Any) -> bool:
    return "folder" in f.metadata or dataclasses.is_dataclass(f.type)


def nearest(name: str, valid: typing.Sequence[str]) -> str | None:
    """The likeliest of the valid names for a mistyped one: alike in letters, or its initials (lr)."""
    initials = [other for other in valid if name == "".join(word[:1] for word in other.split("_"))]
    return next(iter(initials + difflib.get_close_matches(name, valid, n=1, cutoff=0.5)), None)


def _did_you_mean(name: str | None, prefix: str = "") -> str:
    return f"did you mean {prefix}{name}?" if name else ""


def _listed(words: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _short(value: Any) -> str:
    return _cut(json.dumps(value, ensure_ascii=False, default=str))


def _cut(text: str) -> str:
    """In one line, and not a long one."""
    text = "\\n".join(text.splitlines())
    return text if len(text) <= 60 else text[:57] + "..."


def _plain(hint: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    words |= {dict: "`key: value` pairs"}
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_plain(option) for option in typing.get_args(hint))
    return words.get(hint, str(hint))


def _problem(error: Any) -> str:
    """What is wrong with the YAML, and in which line, without the parser's own words where they puzzle."""
    began, mark, problem = error.context_mark, error.problem_mark, error.problem
    if error.context == "while scanning a simple key":  # noticed a line late
        mark = began
    said = next((plain for words, plain in PROBLEMS.items() if words in problem), f"not YAML: {problem}")
    is_long = began and str(error.context).startswith("while") and began.line != mark.line
    return f"{mark.line + 1}: {said}" + (f" in what began in line {began.line + 1}" if is_long else "")


def _unreadable(path: Path, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"no file, expected a recipe{_nearest_file(path)}"
    reason = getattr(error, "strerror", None) or "a file that is not text"
    return f"{'a folder' if path.is_dir() else reason}, expected a .yaml file"


def _nearest_file(path: Path) -> str:
    files = {p.stem: p for p in path.parent.glob("*.y*ml")}
    near = difflib.get_close_matches(path.stem, files, n=1)
    return f"; did you mean {files[near[0]]}?" if near else ""
