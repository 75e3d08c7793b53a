"""Descriptions of recipe keys, read from the comments in the code.

A key is described where it is declared: beside the field or in the lines above it. A unit may follow, in
brackets: `every: int = 10  # interval between rows of metrics [steps]`. Comments are read from the source, so
that the code, `headrace recipe explain`, the JSON schema and the reference page cannot disagree."""

import ast
import functools
import inspect
import io
import re
import tokenize
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

PACKAGE = Path(__file__).parent.parent
UNIT = re.compile(r"\s*\[([^\]]+)\]$")


@dataclass(frozen=True)
class Description:
    text: str
    unit: str = ""


def of_class(cls: type) -> dict[str, Description]:
    """Describe the fields of a dataclass and of its bases, by name."""
    out: dict[str, Description] = {}
    for base in reversed(cls.__mro__):
        path = inspect.getsourcefile(base) if "__dataclass_fields__" in vars(base) else None
        if path is not None:
            out |= of_file(Path(path), base.__name__)
    return out


def of_part(folder: str, name: str, common: type | None = None) -> dict[str, Description]:
    """Describe the keys of the part headrace/FOLDER/NAME.py, and the keys of `common`."""
    texts = {} if common is None else of_class(common)
    path = PACKAGE / folder / f"{name}.py"
    return texts | of_file(path, "Config") if path.exists() else texts


@functools.cache
def of_file(path: Path, class_name: str) -> dict[str, Description]:
    """Describe the fields of a class in a file, without running it. Those without a comment are omitted."""
    source = path.read_text()
    comments = _comments(source)
    lines = source.splitlines()
    out = {}
    for node in _fields(source, class_name):
        if node.end_lineno in comments and lines[node.end_lineno - 1].lstrip()[0] != "#":
            text = comments[node.end_lineno]
        else:
            text = _comment_above(node.lineno, comments, lines)
        if text:
            unit = UNIT.search(text)
            out[ast.unparse(node.target)] = Description(UNIT.sub("", text), unit[1] if unit else "")
    return out


def _fields(source: str, class_name: str) -> Iterator[ast.AnnAssign]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            yield from (item for item in node.body if isinstance(item, ast.AnnAssign))


def _comments(source: str) -> dict[int, str]:
    """The comment of each line that has one."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        token.start[0]: token.string.lstrip("#").strip() for token in tokens if token.type == tokenize.COMMENT
    }


def _comment_above(line: int, comments: dict[int, str], lines: list[str]) -> str:
    """Join the comment lines that end just above `line`."""
    first = line
    while first - 1 in comments and lines[first - 2].lstrip().startswith("#"):
        first -= 1
    return " ".join(comments[number] for number in range(first, line))


def type_text(hint: Any) -> str:
    """Describe a type in words: "a whole number or null"."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    words |= {dict: "`key: value` pairs"}
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(type_text(option) for option in typing.get_args(hint))
    return words.get(hint, str(hint))
