"""The page docs/reference/recipe-keys.md, made from the comments in the code.

`python -m headrace.config.reference docs/reference/recipe-keys.md` writes it."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.config.explain import REQUIRED, Meaning, meanings, part_summary, scope
from headrace.config.reader import Field, part_names, recipe_fields
from headrace.config.sections import DataRecipe, QuantizeRecipe, TrainRecipe

INTRO = """# Recipe keys

<!-- Made from the code by `make reference`; edit the comments there. -->

A training recipe describes a run, a data recipe the data to prepare. Both are YAML files.
`headrace recipe show RECIPE` prints a recipe with all its keys, and `headrace recipe explain KEY` what this
page says about one of them.
Any key can be set on the command line: `schedule.steps=1000`.

`null` stands for no value. A section may be in a file of its own: `attention: attention/splash.yaml`.
"""
RECIPES: tuple[tuple[str, str, type[Any]], ...] = (
    ("Training recipes", "Read by `headrace train` and `headrace plan`.", TrainRecipe),
    ("Data recipes", "Read by `headrace data prepare`.", DataRecipe),
    ("Quantization", "Settings of `headrace quantize`, without `method.`: `group_size=64`.", QuantizeRecipe),
)


def page() -> str:
    """The whole page as Markdown."""
    lines = [INTRO]
    for title, text, cls in RECIPES:
        lines += [f"## {title}", "", text, ""]
        lines += _recipe(cls)
    return "\n".join(lines).rstrip() + "\n"


def _recipe(cls: type[Any]) -> Iterator[str]:
    keys = meanings(cls)
    top = {key: found for key, found in keys.items() if "." not in key}
    if top:
        yield from ("### Top level", "", *_table(top, []), "")
    for name, f in recipe_fields(cls).items():
        inside = {key: found for key, found in keys.items() if key.startswith(name + ".")}
        if inside:
            yield from (f"### {name}", "", *_about(f), *_table(inside, _parts(f)), "")


def _about(f: Field) -> Iterator[str]:
    if "section" in f.metadata:
        text = " ".join((f.metadata["section"].__doc__ or "").split())
        yield from (text + (" Absent unless the recipe has it." if f.metadata.get("wrapper") else ""), "")
    if "folder" in f.metadata:
        folder = f.metadata["folder"]
        yield from ("| use | |", "|---|---|")
        yield from (f"| `{name}` | {_cell(part_summary(folder, name))} |" for name in part_names(folder))
        yield ""


def _parts(f: Field) -> list[str]:
    return part_names(f.metadata["folder"]) if "folder" in f.metadata else []


def _table(keys: dict[str, list[Meaning]], parts: list[str]) -> Iterator[str]:
    yield from ("| key | meaning | type | default |", "|---|---|---|---|")
    for key, found in keys.items():
        for meaning in found:
            unit = f" [{meaning.description.unit}]" if meaning.description.unit else ""
            uses = scope(meaning.uses, parts)
            text = _cell(meaning.description.text + unit) + (f"<br>*{uses}*" if uses else "")
            default = meaning.default if meaning.default == REQUIRED else f"`{meaning.default}`"
            yield f"| `{key}` | {text} | {_cell(meaning.type)} | {_cell(default)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
