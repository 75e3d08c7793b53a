"""The `model` section of a recipe that starts from another model and does not describe its own.

With `init_from`, a recipe may omit the section or write only the keys that differ: the others are those of
the source, a run folder or a Hugging Face folder. A section that has all required keys stands for itself."""

import ast
import dataclasses
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.config.reader import (
    PACKAGE,
    RecipeReader,
    own_keys,
    part_class,
    part_module,
    part_names,
    to_dict,
)
from headrace.config.sections import TrainRecipe
from headrace.config.yaml_tree import Tree, short
from headrace.errors import UserError
from headrace.storage import files

# Sizes of weights. A model can start from a smaller one (training/grow.py), not from a larger one.
GROWABLE = (
    "layers",
    "embed",
    "heads",
    "kv_heads",
    "head_dim",
    "mlp",
    "experts",
    "expert_mlp",
    "shared_experts",
    "key_dim",
)
FIXED = ("tie_embeddings", "qk_norm", "value_projection")  # decide which weights there are
# Sizes that follow from others unless the recipe has them, and from which.
DERIVED = {
    "head_dim": ("embed", "heads"),
    "key_dim": ("embed", "heads"),
    "query_scale": ("head_dim",),
    "expert_mlp": ("mlp", "dense_layers"),
}
NOT_INHERITED = {"vocab"}  # as many tokens as the new data's tokenizer has
# Keys of the generator that is trained together with a discriminator; other objectives use the latter alone.
GENERATOR = {"generator_layers", "embedding_sharing", "mask_decoder"}


def complete_model(reader: RecipeReader, load_run: Callable[[str], TrainRecipe]) -> None:
    """Add what the recipe's `model` lacks, and `recurrence`, from the model that `init_from` names."""
    tree, path = reader.tree, reader.tree.get("init_from")
    section = {} if tree.get("model") is None else tree["model"]
    if not isinstance(path, str) or not isinstance(section, dict) or _is_complete(section):
        return
    source = _read_source(reader, path, section, load_run)
    if section.get("use", source["model"]["use"]) != source["model"]["use"]:
        reader.error(
            "model.use",
            f"expected {source['model']['use']}, as in {path}, or all required keys of this model",
        )
    _check_written(reader, path, section, source["model"])
    skipped = set(NOT_INHERITED)
    skipped |= {key for key, basis in DERIVED.items() if any(_differs(section, source, b) for b in basis)}
    objective = tree.get("objective")
    if source["model"].get("generator_layers") and not (
        isinstance(objective, dict) and objective.get("use") == "rtd"
    ):
        skipped |= GENERATOR
    inherited = {key: value for key, value in source["model"].items() if key not in skipped | section.keys()}
    tree["model"] = inherited | section
    reader.inherited |= {f"model.{key}": path for key in inherited}
    if "recurrence" not in tree and "recurrence" in source:
        tree["recurrence"] = source["recurrence"]
        reader.inherited |= {f"recurrence.{key}": path for key in source["recurrence"]}


def _is_complete(section: Tree) -> bool:
    """Whether the section has all required keys. One that is wrong in another way is left to the reader."""
    use = section.get("use")
    if use is None:
        return False
    if use not in part_names("models"):
        return True
    cls: Any = part_class("models", use)
    required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
    return all(
        key in section
        for key in required
        if cls.__dataclass_fields__[key].default_factory is dataclasses.MISSING
    )


def _differs(section: Tree, source: Tree, key: str) -> bool:
    return key in section and section[key] != source["model"].get(key)


def _check_written(reader: RecipeReader, path: str, section: Tree, source: Tree) -> None:
    """Refuse keys of the recipe that the weights of the source do not fit."""
    if reader.tree.get("init_weights") is not None:  # only those that fit are taken
        return
    for key, value in section.items():
        if key in GROWABLE and isinstance(value, int) and 0 < value < source.get(key, 0):
            expected = f"expected at least {source[key]}, as in {path}: weights can grow and not shrink"
            reader.error(f"model.{key}", expected)
        if key in FIXED and value != source.get(key, value):
            expected = (
                f"expected {short(source[key])}, as in {path}, since it decides which weights there are"
            )
            reader.error(f"model.{key}", expected)


def _read_source(  # noqa: RET503 (RecipeReader.error raises)
    reader: RecipeReader, path: str, section: Tree, load_run: Callable[[str], TrainRecipe]
) -> Tree:
    """The sections `model` and `recurrence` of the source, or of the run itself if the source is gone."""
    if files.exists(files.join(path, "recipe.yaml")):
        return _sections_of_run(load_run(path))
    if not files.is_url(path) and (Path(path) / "config.json").is_file():
        return {"model": read_hf_model(path, section.get("use"))}
    run_dir = reader.tree.get("run_dir")
    if isinstance(run_dir, str) and files.list_names(files.join(run_dir, "checkpoints")):
        return _sections_of_run(load_run(run_dir))
    found = "a model section without all required keys" if section else "no model section"
    place = "" if files.is_url(path) else ", or a Hugging Face folder"
    reader.error(
        "init_from",
        f"expected a run folder{place}, since this recipe has {found} and its shape is that of the source",
        found=f"{files.redacted(path)}, where there is no recipe.yaml"
        + ("" if files.is_url(path) else " or config.json"),
        hint=download_hint(path),
    )


def _sections_of_run(recipe: TrainRecipe) -> Tree:
    tree = to_dict(recipe)
    return {name: tree[name] for name in ("model", "recurrence") if name in tree}


def read_hf_model(folder: str, use: Any = None) -> Tree:
    """Translate the config.json of a Hugging Face folder to a `model` section.

    `use` may name a family that reads models of any type, which is `torch`."""
    settings = read_hf_config(Path(folder))
    if use not in part_names("models") or hf_types(use):
        use = find_hf_family(settings)
    section = part_module("models", use).from_hf_config(settings)
    cls: Any = part_class("models", section.pop("use"))
    model = cls(**section)
    return {"use": model.use} | {key: getattr(model, key) for key in own_keys(model)}


def download_hint(path: str) -> str:
    """A hint for a path that looks like the name of a model on the Hugging Face Hub; empty for others."""
    if not re.fullmatch(r"[\w-]+/[\w.-]+", path) or Path(path).parent.is_dir():
        return ""
    target = f"models/{Path(path).name}"
    return (
        f"if {path} is a model on the Hugging Face Hub, download it with `hf download {path} --local-dir "
        f"{target}` and use {target}"
    )


def read_hf_config(folder: Path) -> Tree:
    """Read config.json of a Hugging Face folder."""
    path = folder / "config.json"
    if not path.is_file():
        hint = download_hint(str(folder))
        problem = "not a Hugging Face model folder: no config.json in it"
        raise UserError(f"{folder}: {problem}" + (f"; {hint}" if hint else ""))
    try:
        settings = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(settings, dict):
        raise UserError(f"{path}: expected names and values in braces")
    return settings


def find_hf_family(settings: Tree) -> str:
    """Name the model family that reads this `model_type`. Imports none of them."""
    kind, families = settings.get("model_type"), part_names("models")
    for family in families:
        if kind in hf_types(family):
            return family
    types = ", ".join(sorted(kind for family in families for kind in hf_types(family)))
    raise UserError(f"config.json: model_type: found {short(kind)}, expected one of {types}")


@functools.cache
def hf_types(family: str) -> tuple[str, ...]:
    """The values of `model_type` that a family reads: `HF_TYPES` of its file."""
    for node in ast.parse((PACKAGE / "models" / f"{family}.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "HF_TYPES":
            return ast.literal_eval(node.value)
    return ()
