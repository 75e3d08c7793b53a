"""Export of LoRA adapters for the `peft` package, which loads them on top of the base model.

peft has an adapter per linear layer of transformers: `lora_A`, `lora_B` and, with DoRA, a magnitude vector.
If several of our matrices are parts of one such layer, their adapters become one: `lora_A` stacks theirs, and
`lora_B` has a block for each."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from headrace import model_wrappers
from headrace.checkpoint.open_run import LoadedRun
from headrace.convert.output import new_folder
from headrace.errors import InvalidArgument
from headrace.model_formats.hf_tensors import layer_name
from headrace.model_formats.quantized_folder import Linear, find_linears
from headrace.model_wrappers import load_family, lora
from headrace.model_wrappers.lora import LoRAWeight
from headrace.models import ModelConfig
from headrace.nn import module
from headrace.nn.module import PyTree
from headrace.training.init_from.check import changed_settings, is_run, read_model_config
from headrace.training.init_from.vocab_rows import vocab_row_map

INSTEAD = "without --adapter, adapters are merged into the model"


def export(run: LoadedRun, folder: str) -> list[Path]:
    """Write the adapters of a run, without its base model, to a new folder. Returns the files."""
    cfg = run.recipe.model
    if not lora.applies(cfg):
        raise InvalidArgument(
            "adapter", f"{run.recipe.run_dir} has no adapters (lora.rank); without it, the model is exported"
        )
    base_model = model_wrappers.without_wrapper(cfg)
    family = load_family(base_model)
    if not family.hf_naming.types or getattr(cfg, "generator_layers", 0) > 0:
        raise InvalidArgument("adapter", f"{cfg.use} is not a single model in transformers; {INSTEAD}")
    family.hf_naming.to_config(base_model, run.recipe.data.sequence_length)  # refuses what transformers lacks
    check_base_model(run, base_model)
    adapters = find_adapters(run.params)
    adapted = [
        linear for linear in find_linears(family, base_model) if not adapters.keys().isdisjoint(linear.paths)
    ]
    unnamed = sorted(adapters.keys() - {path for linear in adapted for path in linear.paths})
    if unnamed:
        raise InvalidArgument("adapter", f"{unnamed[0]} is not a linear layer in transformers; {INSTEAD}")
    with new_folder(folder) as target:
        tensors: dict[str, np.ndarray] = {}
        for linear in adapted:
            for layer in range(cfg.layers):
                prefix = f"base_model.model.{layer_name(linear.name, (layer,))}"
                for name, tensor in make_layer_tensors(run.params, linear, layer).items():
                    tensors[f"{prefix}.{name}"] = tensor
        save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})
        settings = make_adapter_config(run, adapted, adapters)
        (target / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


def check_base_model(run: LoadedRun, base_model: ModelConfig) -> None:
    """Raise UserError unless the adapters were trained on exactly the model that `init_from` names.

    Not checked if that model is no longer there."""
    path = run.recipe.init_from
    if path is None or not (is_run(path) or Path(path).is_dir()):
        return
    source = model_wrappers.without_wrapper(read_model_config(path, base_model))
    differences = changed_settings(source, base_model)
    rows, summary = vocab_row_map(path, run.recipe.run_dir, source.vocab, base_model.vocab)
    if rows is not None:
        differences.append(f"its vocabulary was changed: {summary}")
    if differences:
        raise InvalidArgument(
            "adapter",
            f"{path}, on top of which the adapters would be loaded, is not the model that they "
            f"were trained on: {differences[0]}; {INSTEAD}",
        )


def find_adapters(params: PyTree) -> dict[str, LoRAWeight]:
    """Find all matrices that have an adapter, by path."""
    is_adapter = lambda node: isinstance(node, LoRAWeight)
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_adapter)
    return {module.path_name(path): leaf for path, leaf in leaves if is_adapter(leaf)}


def make_layer_tensors(params: PyTree, linear: Linear, layer: int) -> dict[str, np.ndarray]:
    """Make the adapter of one linear layer of transformers in peft's format, by name.

    Its outputs are those of our matrices one after the other. Each of these that has an adapter has its own
    rows in `lora_A`, and columns in `lora_B`."""
    matrices = [
        jax.device_get(jax.tree.map(lambda w: w[layer], module.get_path(params, path)))
        for path in linear.paths
    ]
    adapters = [w for w in matrices if isinstance(w, LoRAWeight)]
    rank, row, column = adapters[0].sizes.rank, 0, 0
    lora_b = np.zeros((linear.outputs, rank * len(adapters)), np.float32)
    for w, place in zip(matrices, linear.sub_matrices, strict=True):
        outputs = math.prod(place.shape) // linear.inputs
        if isinstance(w, LoRAWeight):
            lora_b[row : row + outputs, column : column + rank] = w.up.reshape(rank, -1).T
            column += rank
        row += outputs
    lora_a = np.concatenate([w.down.reshape(-1, rank).T for w in adapters])
    tensors = {"lora_A.weight": np.ascontiguousarray(lora_a), "lora_B.weight": lora_b}
    if adapters[0].magnitude is not None:
        tensors["lora_magnitude_vector"] = np.concatenate([output_norms(w, linear.inputs) for w in matrices])
    return tensors


def output_norms(w: LoRAWeight | np.ndarray, inputs: int) -> np.ndarray:
    """The norm of each output's weights: DoRA's magnitudes, or of a matrix without adapter its own norms."""
    if isinstance(w, LoRAWeight):
        return np.asarray(w.magnitude).reshape(-1)
    return np.linalg.norm(np.asarray(w, np.float32).reshape(inputs, -1), axis=0)


def make_adapter_config(
    run: LoadedRun, adapted: list[Linear], adapters: dict[str, LoRAWeight]
) -> dict[str, Any]:
    """Make the content of adapter_config.json.

    A layer whose adapter stacks several of ours has a multiple of our rank, and an alpha that is larger by
    the same factor, so that the scale stays the same."""
    cfg, base = run.recipe.model, run.recipe.init_from
    scale = next(iter(adapters.values())).sizes.scale
    counts = {
        linear.name.partition("{}.")[2]: sum(path in adapters for path in linear.paths) for linear in adapted
    }
    ranks = {name: count * cfg.lora.rank for name, count in counts.items()}
    larger_ranks = {name: rank for name, rank in ranks.items() if rank != cfg.lora.rank}
    is_hf_base = base is not None and (Path(base) / "config.json").is_file()
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if cfg.causal else None,
        "base_model_name_or_path": base if is_hf_base else None,
        "r": cfg.lora.rank,
        "lora_alpha": scale * cfg.lora.rank,
        "rank_pattern": larger_ranks,
        "alpha_pattern": {name: scale * rank for name, rank in larger_ranks.items()},
        "target_modules": sorted(ranks),
        "use_dora": cfg.lora.dora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
