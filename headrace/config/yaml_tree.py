"""A recipe as plain data: the YAML file, the files it includes and the overrides, with lines of keys."""

import difflib
import json
import os
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from headrace.errors import UserError

OVERRIDE = "override"  # location of a key=value setting
BAD_VALUES = (
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
)  # raised by PyYAML for values such as `!!int x`
PROBLEMS = {  # messages of the YAML parser, and what they mean
    "'\\t'": "found a tab, expected spaces",
    "mapping values are not allowed": "found a `:` too many or too deep an indent, expected `key: value`",
    "could not find expected ':'": "found a line without `:`, expected `key: value`",
    "found another document": "found a second document after `---`, expected one",
}
Tree = dict[str, Any]  # a recipe, or a part of one


class RecipeTree:
    """Contents of a recipe before its keys are checked."""

    def __init__(self, path: str | Path | None, overrides: Sequence[str] = ()):
        if isinstance(overrides, str):
            raise UserError(f"{OVERRIDE}: found a text, expected a list of settings: [{overrides!r}]")
        self.path, self.overrides = OVERRIDE if path is None else str(path), tuple(overrides)
        self.locations: dict[str, str] = {}  # file:line of each key
        self.texts: dict[str, str] = {}  # values as they were written
        self.tree: Tree = {} if path is None else self._read_file(Path(path), "")

    def resolve(self, sections: Iterable[str]) -> None:
        """Read the files that sections name, apply the overrides and replace references such as `${seed}`."""
        sections = set(sections)
        for key in list(self.tree):
            self._include(key, Path(self.path).parent, sections)
        for item in self.overrides:
            self._override(item, sections)
        try:  # only now are the values known that ${other.key} stands for
            self.tree = typing.cast(Tree, OmegaConf.to_container(OmegaConf.create(self.tree), resolve=True))
        except OmegaConfBaseException as error:
            self._bad_reference(error)

    def error(self, key: str, expected: str, *, found: str | None = None) -> NoReturn:
        found = self.shown_value(key) if found is None else found
        raise UserError(f"{self.location(key)}: {key}: found {found}, {expected}")

    def shown_value(self, key: str) -> str:
        """The value of a key as it was written, shortened."""
        value, text = typing.cast(Any, self.tree), self.texts.get(key, "")
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value is None and not text:
            return "nothing"
        is_written = text and "${" not in text and not isinstance(value, str | dict | list)
        return cut(text) if is_written else short(value)

    def location(self, key: str) -> str:
        """file:line of a key, or of the nearest section above it that was written."""
        while key and key not in self.locations:
            key = key.rpartition(".")[0]
        return self.locations.get(key, self.path if self.path == OVERRIDE else f"{self.path}:1")

    def _read_file(self, path: Path, prefix: str) -> Tree:
        try:
            text = path.read_text(encoding="utf-8-sig")
            root = yaml.compose(text, Loader=yaml.SafeLoader)
            if not isinstance(root, yaml.MappingNode):
                found = "an empty file" if root is None else "a list or plain text"
                raise UserError(f"{path}:1: found {found}, expected `key: value` lines")
            self._mark(root, str(path), prefix)
            return typing.cast(Tree, OmegaConf.to_container(OmegaConf.create(text)))
        except UserError:
            raise
        except (OSError, UnicodeDecodeError, yaml.reader.ReaderError) as error:
            raise UserError(f"{path}: found {_unreadable(path, error)}") from None
        except yaml.MarkedYAMLError as error:
            raise UserError(f"{path}:{_problem(error)}") from None
        except RecursionError:
            raise UserError(f"{path}:1: found brackets nested too deeply, expected sections") from None
        except OmegaConfBaseException as error:
            self._bad_reference(error)
        except BAD_VALUES as error:
            raise UserError(f"{path}: not YAML: {error}") from None

    def _mark(self, node: yaml.MappingNode, file: str, prefix: str) -> None:
        """Record the line and the text of every key. A key that is there twice is an error."""
        lines: dict[str, int] = {}
        for key, value in node.value:
            name, location = key.value, f"{file}:{key.start_mark.line + 1}"
            if not key.tag.endswith(":str"):
                found = name if isinstance(name, str) else "a list"
                raise UserError(f"{location}: found {found} for a key, expected a name")
            if "." in name:
                section, _, inner = name.partition(".")
                expected = f"{cut(section)}: {{{cut(inner)}: ...}}"
                raise UserError(f"{location}: {cut(name)}: found a dotted key, expected {expected}")
            if name in lines:
                message = f"found a second time, expected once; it is also in line {lines[name]}"
                raise UserError(f"{location}: {prefix}{cut(name)}: {message}")
            lines[name], self.locations[prefix + name] = key.start_mark.line + 1, location
            if isinstance(value, yaml.MappingNode) and prefix.count(".") < 2:
                self._mark(value, file, f"{prefix}{name}.")
            self.texts[prefix + name] = value.value if isinstance(value, yaml.ScalarNode) else "..."

    def _include(self, key: str, folder: Path, sections: set[str]) -> None:
        """Read a section whose value is the path of a file, relative to the recipe that names it."""
        value = self.tree.get(key)
        if key in sections and isinstance(value, str) and value.endswith((".yaml", ".yml")):
            path = Path(os.path.normpath(folder / value))
            if not path.exists():
                self.error(key, f"expected a file, and there is no {path}{_nearest_file(path)}")
            self.tree[key] = self._read_file(path, f"{key}.")

    def _override(self, item: str, sections: set[str]) -> None:
        key, _, text = item.partition("=")
        *parents, last = key.split(".")
        if "=" not in item or not all((*parents, last)):
            raise UserError(f"{OVERRIDE}: found {cut(item)}, expected key=value, e.g. schedule.steps=100")
        if self.locations.get(key) == OVERRIDE:
            raise UserError(f"{OVERRIDE}: {key}: found a second time, expected once")
        try:
            value = OmegaConf.to_container(OmegaConf.from_dotlist([f"x={text}"]))["x"]  # type: ignore[call-overload,index]
        except (yaml.YAMLError, OmegaConfBaseException, RecursionError, *BAD_VALUES):
            raise UserError(f"{OVERRIDE}: {key}: found {cut(text)}, expected a value in YAML") from None
        node = self.tree
        for depth, name in enumerate(parents, 1):
            if not isinstance(node.get(name), dict):
                node[name] = {}
                self._replaced(".".join(parents[:depth]), "...")
            node = node[name]
        node[last] = value
        self._replaced(key, text)
        self._include(key, Path("."), sections)

    def _replaced(self, key: str, text: str) -> None:
        for old in [other for other in self.locations if other.startswith(key + ".")]:
            del self.locations[old]
        self.locations[key], self.texts[key] = OVERRIDE, text

    def _bad_reference(self, error: OmegaConfBaseException) -> NoReturn:
        suspect = next((key for key, text in self.texts.items() if "${" in text), "")
        key, reason = error.full_key or suspect, str(error).splitlines()[0]
        found = short(self.texts.get(key))
        self.error(key, f"expected ${{...}} to name another key ({reason})", found=found)


def nearest(name: str, valid: Sequence[str]) -> str | None:
    """The valid name most similar to a mistyped one, in its letters or as its initials."""
    initials = [other for other in valid if name == "".join(word[:1] for word in other.split("_"))]
    return next(iter(initials + difflib.get_close_matches(name, valid, n=1, cutoff=0.5)), None)


def did_you_mean(name: str | None, prefix: str = "") -> str:
    return f"did you mean {prefix}{name}?" if name else ""


def short(value: Any) -> str:
    """A value as JSON, in one line of at most 60 characters."""
    return cut(json.dumps(value, ensure_ascii=False, default=str))


def cut(text: str) -> str:
    """Shorten text to one line of at most 60 characters."""
    text = "\\n".join(text.splitlines())
    return text if len(text) <= 60 else text[:57] + "..."


def _problem(error: yaml.MarkedYAMLError) -> str:
    """Line and cause of a syntax error, in plainer words than the parser's where we have some."""
    start, mark, problem = error.context_mark, error.problem_mark, str(error.problem)
    if error.context == "while scanning a simple key":  # noticed a line late
        mark = start
    assert mark is not None
    text = next((plain for words, plain in PROBLEMS.items() if words in problem), f"not YAML: {problem}")
    if start is not None and str(error.context).startswith("while") and start.line != mark.line:
        text += f" in what starts in line {start.line + 1}"
    return f"{mark.line + 1}: {text}"


def _unreadable(path: Path, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"no file, expected a recipe{_nearest_file(path)}"
    reason = getattr(error, "strerror", None) or "a file that is not text"
    return f"{'a folder' if path.is_dir() else reason}, expected a .yaml file"


def _nearest_file(path: Path) -> str:
    files = {p.stem: p for p in path.parent.glob("*.y*ml")}
    near = difflib.get_close_matches(path.stem, files, n=1)
    return f"; did you mean {files[near[0]]}?" if near else ""
