"""Every key of every recipe with its meaning: what `headrace recipe explain` prints."""

import ast
import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from headrace.config import descriptions, synonyms
from headrace.config.descriptions import PACKAGE, Description, type_text
from headrace.config.reader import Field, all_keys, part_names, recipe_fields
from headrace.config.sections import DataRecipe, QuantizeRecipe, TrainRecipe
from headrace.config.yaml_tree import did_you_mean, nearest
from headrace.errors import UserError

RECIPES: dict[str, type[Any]] = {  # kind of recipe -> its class
    "training recipe": TrainRecipe,
    "data recipe": DataRecipe,
    "`headrace quantize`": QuantizeRecipe,
}
REQUIRED = "required"


@dataclass(frozen=True)
class Meaning:
    """Description, type and default of a key, and the parts that declare it so (none without `use`)."""

    description: Description
    type: str
    default: str
    uses: tuple[str, ...] = ()


def meanings(cls: type[Any]) -> dict[str, list[Meaning]]:
    """Map every dotted key of a recipe class to its meanings: one, unless parts declare it differently."""
    fields = recipe_fields(cls)
    return {
        key: list(_group(_meaning(cls, fields, key, use, f) for use, f in declared))
        for key, declared in all_keys(cls).items()
    }


def part_summary(folder: str, name: str) -> str:
    """The first sentence of the docstring of the file that a value of `use` names."""
    path = PACKAGE / folder / f"{name}.py"
    if not path.exists():
        return "chosen for the platform"
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
    return (
        text.partition(". ")[0]
        .partition(": ")[2 if text.partition(": ")[0].count(" ") < 2 else 0]
        .rstrip(".")
    )


def explain(name: str) -> str:
    """Explain a key or a section, e.g. `optimizer.learning_rate` or `optimizer`. Raises UserError."""
    parts = []
    for kind, cls in RECIPES.items():
        keys = meanings(cls)
        if name in keys:
            parts.append("\n".join(_explain_key(name, keys[name], kind, cls)))
        if name in recipe_fields(cls) and name not in keys:
            parts.append("\n".join(_explain_section(name, keys, kind, cls)))
    if not parts:
        raise UserError(f"{name}: unknown key{_suggestion(name)}")
    return "\n\n".join(parts)


def _meaning(cls: type[Any], fields: dict[str, Field], key: str, use: str, f: Field) -> Meaning:
    section, _, name = key.rpartition(".")
    declared = fields[section.partition(".")[0] or name]
    folder, default = declared.metadata.get("folder"), _default_text(f)
    if folder is None:
        owner = declared.metadata["section"] if section else cls
        return Meaning(descriptions.of_class(owner)[name], type_text(f.type), default)
    if name == "use":
        text = descriptions.of_class(cls)[f.name]
        start = declared.metadata["use"]
        return Meaning(text, "one of " + ", ".join(part_names(folder)), f"{start}" if start else REQUIRED)
    text = descriptions.of_part(folder, use, declared.metadata["common"])[name]
    return Meaning(text, type_text(f.type), default, (use,))


def _group(found: Iterable[Meaning]) -> Iterator[Meaning]:
    """Join meanings that are equal but for `uses`."""
    uses: dict[Meaning, tuple[str, ...]] = {}
    for meaning in found:
        bare = dataclasses.replace(meaning, uses=())
        uses[bare] = uses.get(bare, ()) + meaning.uses
    by_uses = sorted(uses.items(), key=lambda item: -len(item[1]))  # the commonest first
    return (dataclasses.replace(meaning, uses=names) for meaning, names in by_uses)


def _default_text(f: Field) -> str:
    if f.default_factory is not dataclasses.MISSING:
        return "{}"
    if f.default is dataclasses.MISSING:
        return REQUIRED
    return f.default if isinstance(f.default, str) else json.dumps(f.default)


def scope(uses: Iterable[str], every: Iterable[str]) -> str:
    """Say which parts have a key: "" if all have it, or "moe", or "all but torch"."""
    uses, missing = list(uses), sorted(set(every) - set(uses))
    if not uses or not missing:
        return ""
    return f"all but {', '.join(missing)}" if len(missing) < len(uses) else ", ".join(sorted(uses))


def _explain_key(key: str, found: list[Meaning], kind: str, cls: type[Any]) -> Iterator[str]:
    section, _, name = key.rpartition(".")
    section = section.partition(".")[0]
    yield f"{key}  ({kind})"
    descriptions_of = list(dict.fromkeys(meaning.description for meaning in found))
    for text in descriptions_of:
        same = [meaning for meaning in found if meaning.description == text]
        yield from [""] * (text != descriptions_of[0])
        yield f"  {text.text}"
        if uses := scope(_uses(same), _all_uses(section, cls) if found[0].uses else ()):
            yield f"  only with  {section}.use: {uses}"
        yield from (f"  type       {value}" for value in dict.fromkeys(meaning.type for meaning in same))
        yield f"  default    {_defaults(same)}"
        if text.unit:
            yield f"  unit       {text.unit}"
    if names := synonyms.names_of(key):
        yield f"  elsewhere  {', '.join(names)}"
    if name == "use" and section in recipe_fields(cls) and "folder" in recipe_fields(cls)[section].metadata:
        folder = recipe_fields(cls)[section].metadata["folder"]
        width = max(map(len, part_names(folder)))
        yield "  values"
        for use in part_names(folder):
            yield f"    {use:{width}}  {part_summary(folder, use)}"


def _defaults(found: list[Meaning]) -> str:
    """The defaults of a key, with the parts that have each if they differ."""
    texts = list(dict.fromkeys(meaning.default for meaning in found))
    if len(texts) == 1:
        return texts[0]
    uses = {text: [use for m in found if m.default == text for use in m.uses] for text in texts}
    return ", ".join(f"{text} ({', '.join(names)})" for text, names in uses.items())


def _uses(found: list[Meaning]) -> list[str]:
    return [use for meaning in found for use in meaning.uses]


def _all_uses(section: str, cls: Any) -> list[str]:
    return part_names(recipe_fields(cls)[section].metadata["folder"])


def _explain_section(name: str, keys: dict[str, list[Meaning]], kind: str, cls: type[Any]) -> Iterator[str]:
    f = recipe_fields(cls)[name]
    yield f"{name}  ({kind})"
    if "section" in f.metadata:
        yield f"  {' '.join((f.metadata['section'].__doc__ or '').split())}"
    if f.metadata.get("wrapper"):
        yield "  Absent unless the recipe has it."
    inside = {key: found for key, found in keys.items() if key.startswith(name + ".")}
    width = max(map(len, inside))
    for key, found in inside.items():
        uses = scope(_uses(found), _all_uses(name, cls) if found[0].uses else ())
        yield f"  {key:{width}}  {found[0].description.text}" + (f" ({uses})" if uses else "")


def _suggestion(name: str) -> str:
    keys = [key for cls in RECIPES.values() for key in all_keys(cls)]
    sections = [section for cls in RECIPES.values() for section in recipe_fields(cls)]
    if (synonym := synonyms.suggestion(name, keys)) is not None:
        return f"; {synonym}"
    same_name = [key for key in keys if key.rpartition(".")[2] == name.rpartition(".")[2]]
    similar = ", ".join(same_name[:3]) if same_name else nearest(name, list(dict.fromkeys(keys + sections)))
    return (
        f"; {did_you_mean(similar)}"
        if similar
        else "; `headrace recipe show RECIPE` lists the keys of a recipe"
    )
