"""Writes a quantized model as a folder that transformers or vptq loads, and that is a run folder too."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from headrace.checkpoint.open_run import LoadedRun
from headrace.config import reader
from headrace.convert import to_huggingface
from headrace.convert.output import new_folder
from headrace.model_formats.hf_config import HFSettings
from headrace.model_formats.hf_tensors import layer_name, split_spec, to_tensors
from headrace.model_formats.quantized_folder import matrix_tensors
from headrace.model_wrappers import load_family
from headrace.nn.module import path_name
from headrace.quantize.calibration_data import without_preference
from headrace.quantize.layer_cache import LayerCache
from headrace.quantize.methods import MethodConfig, load_method


def write_quantized_folder(run: LoadedRun, target: str, dtype: str, cache: LayerCache) -> list[Path]:
    """Write the quantized matrices in `cache` and the other weights of the run, in this dtype. Returns the
    files."""
    settings = to_huggingface.make_hf_config(run, run.recipe.model, dtype)
    settings |= {"quantization_config": make_quantization_config(run, cache)}
    with new_folder(target) as folder:
        to_huggingface.write_model_folder(
            run,
            settings,
            iter_tensors(run, dtype, cache),
            folder,
            quantized_by=describe_method(cache.method),
        )
        recipe = dataclasses.replace(without_preference(run.recipe), run_dir=target)
        (folder / "recipe.yaml").write_text(reader.to_yaml(recipe))
    return sorted(path for path in Path(target).rglob("*") if path.is_file())


def make_quantization_config(run: LoadedRun, cache: LayerCache) -> HFSettings:
    """Make the `quantization_config` of config.json, of all layers."""
    cfg, config = run.recipe.model, HFSettings()
    for index in range(cfg.layers):
        config = deep_merge(config, cache.load_config(index))
    if config["quant_method"] == "vptq":
        hf_names = {split_spec(spec)[0] for spec, *_ in load_family(cfg).tensor_table(cfg).values()}
        for linear in cache.linears:
            if f"{linear.name}.bias" in hf_names:
                for index in range(cfg.layers):
                    config["config_for_layers"][layer_name(linear.name, (index,))]["bias"] = True
    return config


def describe_method(method: MethodConfig) -> str:
    """The method in words, for the model card."""
    finetuning = load_method(method).end_to_end_finetuning(method)
    return method.use + (f", with {finetuning.steps} steps of end-to-end finetuning" if finetuning else "")


def iter_tensors(run: LoadedRun, dtype: str, cache: LayerCache) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of the folder with their names, one at a time."""
    quantized = {path for linear in cache.linears for path in linear.paths}
    other_weights = jax.tree_util.tree_map_with_path(
        lambda path, w: None if path_name(path) in quantized else w, run.params
    )
    cfg = run.recipe.model
    yield from to_tensors(load_family(cfg).tensor_table(cfg), other_weights, dtype)
    for index in range(cfg.layers):
        for name, matrix in cache.load(index).items():
            yield from matrix_tensors(name.format(index), matrix).items()


def deep_merge(config: HFSettings, other: HFSettings) -> HFSettings:
    """Merge two layers' configs, which differ only in sections by layer."""
    sections = {key: config.get(key, {}) | value for key, value in other.items() if isinstance(value, dict)}
    return config | other | sections
