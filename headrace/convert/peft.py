"""Adapters as the `peft` package loads them over the model that they were trained beside: its names, two thin
matrices for each linear layer, and with DoRA the lengths. Where several matrices of ours are one there, its
thin matrices hold ours side by side."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from headrace import model_wrappers
from headrace.checkpoint.open_run import LoadedRun
from headrace.convert.to_huggingface import whole_or_nothing
from headrace.errors import UserError
from headrace.model_formats.hf_tensors import layer_name
from headrace.model_formats.quantized_folder import Linear, linears
from headrace.model_wrappers import load_family, lora
from headrace.model_wrappers.lora import LoRAWeight
from headrace.nn import module
from headrace.training import init_from


def export(run: LoadedRun, folder: str) -> list[Path]:
    """Writes the adapters alone. Returns the files."""
    cfg = run.recipe.model
    if not lora.applies(cfg):
        raise UserError(
            f"--adapter: {run.recipe.run_dir} has no adapters (lora.rank); without it the model is written"
        )
    bare = model_wrappers.without_wrapper(cfg)
    family = load_family(bare)
    if not family.hf_naming.types or getattr(cfg, "generator_layers", 0) > 0:
        raise UserError(
            f"--adapter: {cfg.use} is not one model at Hugging Face; without it adapters are merged"
        )
    family.hf_naming.to_config(bare, run.recipe.data.sequence_length)  # says what transformers has not
    check_start(run, bare)
    weights = adapted(run.params)
    found = [one for one in linears(family, bare) if not weights.keys().isdisjoint(one.paths)]
    left = sorted(weights.keys() - {path for one in found for path in one.paths})
    if left:
        raise UserError(
            f"--adapter: {left[0]} is no linear layer at Hugging Face; without it adapters are merged"
        )
    with whole_or_nothing(folder) as made:
        tensors: dict[str, np.ndarray] = {}
        for one in found:
            for number in range(cfg.layers):
                name = layer_name(one.name, (number,))
                for part, tensor in of_layer(run.params, one, number).items():
                    tensors[f"base_model.model.{name}.{part}"] = tensor
        save_file(tensors, made / "adapter_model.safetensors", metadata={"format": "pt"})
        settings = settings_of(run, found, weights)
        (made / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


def check_start(run: LoadedRun, model: Any) -> None:
    """Adapters are of use beside the very model that they were trained beside."""
    path = run.recipe.init_from
    if path is None or not (init_from.is_run(path) or Path(path).is_dir()):  # it may lie elsewhere by now
        return
    old = model_wrappers.without_wrapper(init_from.model_of(path, model))
    other = init_from.changed_settings(old, model)
    rows, said = init_from.vocab_row_map(path, run.recipe.run_dir, old.vocab, model.vocab)
    if rows is not None:
        other.append(f"of its vocabulary were taken {said}")
    if other:
        raise UserError(
            f"--adapter: {path}, over which they would be loaded, is not the model they were trained beside: "
            f"{other[0]}; without it adapters are merged"
        )


def adapted(params: Any) -> dict[str, LoRAWeight]:
    """The matrices with adapters by their paths."""
    is_one = lambda node: isinstance(node, LoRAWeight)
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_one)
    return {module.path_name(path): leaf for path, leaf in leaves if is_one(leaf)}


def of_layer(params: Any, one: Linear, number: int) -> dict[str, np.ndarray]:
    """The tensors beside one linear layer of theirs. Its outputs are those of our matrices one after the
    other; each of these has columns of its own in the second thin matrix, where it has an adapter."""
    ours = [
        jax.device_get(jax.tree.map(lambda w: w[number], module.get_path(params, path))) for path in one.paths
    ]
    thin = [w for w in ours if isinstance(w, LoRAWeight)]
    rank, first, column = thin[0].sizes.rank, 0, 0
    up = np.zeros((one.outputs, rank * len(thin)), np.float32)
    for w, place in zip(ours, one.places, strict=True):
        last = first + math.prod(place.shape) // one.inputs
        if isinstance(w, LoRAWeight):
            up[first:last, column : column + rank] = w.up.reshape(rank, -1).T
            column += rank
        first = last
    down = np.concatenate([w.down.reshape(-1, rank).T for w in thin])
    made = {"lora_A.weight": np.ascontiguousarray(down), "lora_B.weight": up}
    if thin[0].magnitude is not None:
        made["lora_magnitude_vector"] = np.concatenate([length(w, one.inputs) for w in ours])
    return made


def length(w: Any, inputs: int) -> np.ndarray:
    """Of each output's weights. Those without an adapter stay as long as they are."""
    if isinstance(w, LoRAWeight):
        return np.asarray(w.magnitude).reshape(-1)
    return np.linalg.norm(np.asarray(w, np.float32).reshape(inputs, -1), axis=0)


def settings_of(run: LoadedRun, found: list[Linear], weights: dict[str, LoRAWeight]) -> dict[str, Any]:
    """adapter_config.json. Where thin matrices are side by side, their rank is a multiple of ours; what they
    add is multiplied by the same number."""
    cfg, base = run.recipe.model, run.recipe.init_from
    scale = next(iter(weights.values())).sizes.scale
    names = {one.name.partition("{}.")[2]: sum(path in weights for path in one.paths) for one in found}
    ranks = {name: count * cfg.lora.rank for name, count in names.items()}
    other = {name: rank for name, rank in ranks.items() if rank != cfg.lora.rank}
    is_theirs = base is not None and (Path(base) / "config.json").is_file()
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if cfg.causal else None,
        "base_model_name_or_path": base if is_theirs else None,
        "r": cfg.lora.rank,
        "lora_alpha": scale * cfg.lora.rank,
        "rank_pattern": other,
        "alpha_pattern": {name: scale * rank for name, rank in other.items()},
        "target_modules": sorted(names),
        "use_dora": cfg.lora.dora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
