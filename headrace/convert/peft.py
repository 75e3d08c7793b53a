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

from headrace.model_wrappers import lora as adapters, split_weights as matrices
from headrace.nn import module
from headrace.training import init_from as start
from headrace.model_wrappers.lora import Adapted
from headrace.model_formats.quantized_folder import Linear, linears
from headrace.errors import UserError
from headrace.convert.to_huggingface import whole_or_nothing
from headrace.model_formats.hf_tensors import in_place
from headrace.checkpoint.open_run import Opened
from headrace.objectives import file


def export(run: Opened, folder: str) -> list[Path]:
    """Writes the adapters alone. Returns the files."""
    cfg = run.cfg.model
    if not adapters.has_adapters(cfg):
        raise UserError(
            f"--adapter: {run.cfg.run} has no adapters (model.lora_rank); without it the model is written"
        )
    bare = matrices.plain(cfg)
    family = file("models", bare)
    if not family.HF_TYPES or getattr(cfg, "generator", 0) > 0:
        raise UserError(
            f"--adapter: {cfg.use} is not one model at Hugging Face; without it adapters are merged"
        )
    family.to_hf(bare, run.cfg.data.sequence_length)  # says what transformers has not
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
                name = in_place(one.name, (number,))
                for part, tensor in of_layer(run.params, one, number).items():
                    tensors[f"base_model.model.{name}.{part}"] = tensor
        save_file(tensors, made / "adapter_model.safetensors", metadata={"format": "pt"})
        settings = settings_of(run, found, weights)
        (made / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


def check_start(run: Opened, model: Any) -> None:
    """Adapters are of use beside the very model that they were trained beside."""
    path = run.cfg.start
    if path is None or not (start.is_run(path) or Path(path).is_dir()):  # it may lie elsewhere by now
        return
    old = matrices.plain(start.model_of(path, model))
    other = start.changed(old, model)
    rows, said = start.rows_of(path, run.cfg.run, old.vocab, model.vocab)
    if rows is not None:
        other.append(f"of its vocabulary were taken {said}")
    if other:
        raise UserError(
            f"--adapter: {path}, over which they would be loaded, is not the model they were trained beside: "
            f"{other[0]}; without it adapters are merged"
        )


def adapted(params: Any) -> dict[str, Adapted]:
    """The matrices with adapters by their paths."""
    is_one = lambda node: isinstance(node, Adapted)
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_one)
    return {module.dotted(path): leaf for path, leaf in leaves if is_one(leaf)}


def of_layer(params: Any, one: Linear, number: int) -> dict[str, np.ndarray]:
    """The tensors beside one linear layer of theirs. Its outputs are those of our matrices one after the
    other; each of these has columns of its own in the second thin matrix, where it has an adapter."""
    ours = [jax.device_get(jax.tree.map(lambda w: w[number], module.at(params, path))) for path in one.paths]
    thin = [w for w in ours if isinstance(w, Adapted)]
    rank, first, column = thin[0].sizes.rank, 0, 0
    up = np.zeros((one.outputs, rank * len(thin)), np.float32)
    for w, place in zip(ours, one.places, strict=True):
        last = first + math.prod(place.shape) // one.inputs
        if isinstance(w, Adapted):
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
    if isinstance(w, Adapted):
        return np.asarray(w.magnitude).reshape(-1)
    return np.linalg.norm(np.asarray(w, np.float32).reshape(inputs, -1), axis=0)


def settings_of(run: Opened, found: list[Linear], weights: dict[str, Adapted]) -> dict[str, Any]:
    """adapter_config.json. Where thin matrices are side by side, their rank is a multiple of ours; what they
    add is multiplied by the same number."""
    cfg, base = run.cfg.model, run.cfg.start
    scale = next(iter(weights.values())).sizes.scale
    names = {one.name.partition("{}.")[2]: sum(path in weights for path in one.paths) for one in found}
    ranks = {name: count * cfg.lora_rank for name, count in names.items()}
    other = {name: rank for name, rank in ranks.items() if rank != cfg.lora_rank}
    is_theirs = base is not None and (Path(base) / "config.json").is_file()
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if cfg.causal else None,
        "base_model_name_or_path": base if is_theirs else None,
        "r": cfg.lora_rank,
        "lora_alpha": scale * cfg.lora_rank,
        "rank_pattern": other,
        "alpha_pattern": {name: scale * rank for name, rank in other.items()},
        "target_modules": sorted(names),
        "use_dora": cfg.lora_dora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
