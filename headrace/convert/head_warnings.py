"""Folders of Hugging Face with heads of other tasks, or without one: what is passed over, and what is told.
A family's `HF_ASIDE` has the names of what may lie beside its weights, as transformers passes over it too."""

import json
import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

from headrace.nn import module
from headrace.errors import UserError
from headrace.model_formats.hf_tensors import Tensors, in_place, is_like, part_of, table_of
from headrace.objectives import file


def aside(family: Any) -> tuple[str, ...]:
    return getattr(family, "HF_ASIDE", ())


def check(model: Any, taken: Collection[str], folder: Path) -> None:
    """UserError where a folder lacks a head that is to be read, or has its weights in pickles alone."""
    check_format(model, folder)
    family, there = file("models", model), Tensors(folder).places
    table, known = table_of(family, model), aside(family)
    wanted = [theirs for name, (theirs, _) in table.items() if name in taken]
    lost = [name for name in wanted if is_like(name, known) and name not in there]
    if not lost:
        return
    rest: dict[str, None] = {}
    for name, (theirs, _) in table.items():
        one = in_place(part_of(theirs)[0], [0] * theirs.count("{"))
        if one in there and not is_like(one, known):
            rest[name.split(".")[0] + ".*" * ("." in name)] = None
    inner = "".join(f"; {path.parent} is a model of its own" for path in sorted(folder.glob("*/config.json")))
    raise UserError(
        f"{folder}: no tensor {lost[0]} in its .safetensors files, a part of the head that is needed here; "
        f"`start: {folder}` begins with the rest, either with `objective: {{use: classify}}`, whose head is "
        f"drawn, or with `take: {','.join(rest)}`{inner}"
    )


def passed_over(model: Any, taken: Collection[str], folder: Path) -> str:
    """What is to be said of tensors that are known and not read."""
    family, tensors = file("models", model), Tensors(folder)
    table = table_of(family, model)
    for name in taken if aside(family) else ():
        tensors.pass_over(table[name][0])
    left = [known for known in aside(family) if any(is_like(name, [known]) for name in tensors.unread)]
    return f"passed over {', '.join(left)} in {folder}, which this model has not" if left else ""


def check_format(model: Any, folder: Path) -> None:
    """Pickles run what they please when they are read, so we do not; transformers makes others of them."""
    pickles = sorted(folder.glob("pytorch_model*.bin"))
    if any(folder.glob("*.safetensors")) or not pickles:
        return
    raise UserError(
        f"{folder}: no .safetensors file in it, and {pickles[0].name} is a pickle, which is not read; "
        f"transformers makes a folder {folder}-safetensors of it, to be given instead: "
        f"python -c {shlex.quote(conversion(model, folder))}"
    )


def conversion(model: Any, folder: Path) -> str:
    """The two lines of Python: the model, by the class that config.json names or by the one whose head is in
    published files, and its tokenizer."""
    named = json.loads((folder / "config.json").read_text()).get("architectures")
    name, more = str(named[0]) if isinstance(named, list) and named else "", ""
    if not re.fullmatch(r"\w+For\w+", name):  # a model without any head would be saved under other names
        name = f"AutoModelFor{'CausalLM' if model.causal else 'MaskedLM'}"
        more = getattr(file("models", model), "HF_LOAD", "")
    old, new = json.dumps(str(folder)), json.dumps(f"{folder}-safetensors")
    lines = [f"t.{name}.from_pretrained({old}{more}).save_pretrained({new})"]
    if any(folder.glob("tokenizer*")) or any(folder.glob("*.model")):
        lines.append(f"t.AutoTokenizer.from_pretrained({old}).save_pretrained({new})")
    return "; ".join(["import transformers as t", *lines])


def names(model: Any) -> list[str]:
    """All weights of a model."""
    return [name for name, _ in module.named(module.axes(file("models", model).Model, model))]
