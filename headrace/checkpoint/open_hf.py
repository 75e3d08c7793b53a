"""Hugging Face model folders, opened for reading: config.json, the family that reads it, and its tensors.

A folder may have the head of another task, or none. `HF_IGNORED` in a family's file names the tensors that
may be in a folder without having a counterpart here, as transformers ignores them too."""

import json
import re
import shlex
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from headrace.config.source_model import find_hf_family
from headrace.config.wrappers import ClassifierKeys
from headrace.errors import UserError
from headrace.model_formats.hf_config import HFSettings
from headrace.model_formats.hf_tensors import (
    SafetensorsFolder,
    TensorTable,
    layer_name,
    matches_any,
    split_spec,
)
from headrace.model_formats.hf_ternary import TernaryFormat
from headrace.model_wrappers import classification_head, load_family
from headrace.models import Family, ModelConfig, load_base_family
from headrace.nn import module
from headrace.nn.module import PyTree


def find_family(settings: HFSettings) -> Family:
    """Load the family that reads config.json's `model_type`. Raises UserError if there is none."""
    return load_base_family(find_hf_family(settings))


def to_recipe_sections(settings: HFSettings) -> tuple[dict[str, Any], ClassifierKeys | None]:
    """Translate a config.json to the sections `model` and `classifier` of a recipe.

    The latter is None if the model predicts tokens."""
    family = find_family(settings)
    head = classification_head.section_from_hf_config(family, settings)
    return family.hf_naming.from_config(settings), head


def read_params(
    table: TensorTable,
    shapes: PyTree,
    folder: Path,
    ternary_format: TernaryFormat | None = None,
    ignored: tuple[str, ...] = (),
) -> PyTree:
    """Read all weights into host memory: an import needs no device.

    `ternary_format` is that of packed tensors (model_formats/hf_ternary.py). Tensors that match a pattern in
    `ignored` may be left unread."""
    names = [name for name, _ in module.named_leaves(shapes)]
    weights = [
        w for _, w in iter_weights(table, shapes, SafetensorsFolder(folder, ternary_format, ignored), names)
    ]
    return jax.tree.unflatten(jax.tree.structure(shapes), weights)


def iter_weights(
    table: TensorTable, shapes: PyTree, tensors: SafetensorsFolder, selected: Collection[str]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the selected weights one by one, with their paths. Raises UserError if tensors are left over."""
    for name, leaf in module.named_leaves(shapes):
        if name in selected:
            yield name, tensors.read_weight(*table[name], leaf.shape)
        else:
            tensors.skip_weight(table[name][0])
    tensors.check_all_read()


def check_head_tensors(cfg: ModelConfig, selected: Collection[str], folder: Path) -> None:
    """Check that a folder has the tensors of a head that is to be read, in .safetensors files.

    Raises UserError otherwise, with what the folder can be used for instead."""
    refuse_pickles(cfg, folder)
    family, in_folder = load_family(cfg), SafetensorsFolder(folder).files
    table, known_heads = family.tensor_table(cfg), family.hf_naming.ignored_tensors
    needed = [hf_name for name, (hf_name, _) in table.items() if name in selected]
    absent = [hf_name for hf_name in needed if matches_any(hf_name, known_heads) and hf_name not in in_folder]
    if not absent:
        return
    available: dict[str, None] = {}  # patterns for `init_weights`
    for name, (hf_name, _) in table.items():
        first = layer_name(split_spec(hf_name)[0], [0] * hf_name.count("{"))
        if first in in_folder and not matches_any(first, known_heads):
            available[name.split(".")[0] + ".*" * ("." in name)] = None
    inner = "".join(f"; {path.parent} is a separate model" for path in sorted(folder.glob("*/config.json")))
    raise UserError(
        f"{folder}: no tensor {absent[0]} in its .safetensors files, a part of the head that is needed here; "
        f"`init_from: {folder}` starts from the other weights, either with `objective: {{use: classify}}`, "
        f"whose head is initialized, or with `init_weights: {','.join(available)}`{inner}"
    )


def ignored_note(cfg: ModelConfig, selected: Collection[str], folder: Path) -> str:
    """Name the tensors of the folder that have no counterpart in the model. Empty if there are none."""
    family, tensors = load_family(cfg), SafetensorsFolder(folder)
    table, patterns = family.tensor_table(cfg), family.hf_naming.ignored_tensors
    for name in selected if patterns else ():
        tensors.skip_weight(table[name][0])
    unread = [pattern for pattern in patterns if any(matches_any(name, [pattern]) for name in tensors.unread)]
    return f"ignored {', '.join(unread)} in {folder}, which this model does not have" if unread else ""


def refuse_pickles(cfg: ModelConfig, folder: Path) -> None:
    """Raise UserError for a folder with pickles only, which can run any code when they are read.

    The message has the command that converts them."""
    pickles = sorted(folder.glob("pytorch_model*.bin"))
    if any(folder.glob("*.safetensors")) or not pickles:
        return
    raise UserError(
        f"{folder}: no .safetensors file in it, and {pickles[0].name} is a pickle, which is not read; "
        f"transformers converts it to a folder {folder}-safetensors, to be used instead: "
        f"python -c {shlex.quote(pickle_conversion_script(cfg, folder))}"
    )


def pickle_conversion_script(cfg: ModelConfig, folder: Path) -> str:
    """Python code that converts a folder's model and tokenizer to safetensors with transformers."""
    architectures = json.loads((folder / "config.json").read_text()).get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    arguments = ""
    if not re.fullmatch(r"\w+For\w+", name):  # a class without a head would save tensors under other names
        name = f"AutoModelFor{'CausalLM' if cfg.causal else 'MaskedLM'}"
        arguments = load_family(cfg).hf_naming.load_arguments
    old, new = json.dumps(str(folder)), json.dumps(f"{folder}-safetensors")
    lines = [f"t.{name}.from_pretrained({old}{arguments}).save_pretrained({new})"]
    if any(folder.glob("tokenizer*")) or any(folder.glob("*.model")):
        lines.append(f"t.AutoTokenizer.from_pretrained({old}).save_pretrained({new})")
    return "; ".join(["import transformers as t", *lines])


def weight_paths(cfg: ModelConfig) -> list[str]:
    """List the paths of all weights of a model."""
    return [name for name, _ in module.named_leaves(module.axes(load_family(cfg).Model, cfg))]
