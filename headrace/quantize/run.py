"""Quantization of a trained model, layer by layer. Each layer is calibrated on the outputs of the quantized
layers before it."""

import dataclasses
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from headrace import model_wrappers
from headrace.checkpoint.open_run import LoadedRun
from headrace.config import reader
from headrace.data.dataset import Dataset
from headrace.errors import InvalidArgument, UserError
from headrace.model_formats import gptq, quantized_folder
from headrace.model_formats.gptq import GPTQMatrix
from headrace.model_formats.hf_tensors import to_hf_layout
from headrace.model_formats.quantized_folder import Linear, with_stored_layer
from headrace.model_wrappers import load_family, qat
from headrace.models import ModelConfig, fixed_matmul
from headrace.nn import module
from headrace.nn.module import Array
from headrace.nn.stack import Execution
from headrace.quantize import calibrate, finetune
from headrace.quantize.calibrate import CalibrationBatch, ModelLayer
from headrace.quantize.calibration_data import (
    calibration_recipe,
    choose_batch_size,
    load_calibration_batches,
    open_calibration_data,
    shard_rows,
)
from headrace.quantize.layer_cache import LayerCache, fingerprint
from headrace.quantize.methods import Finetuning, MethodConfig, QuantizedMatrix, QuantizeMethod, load_method
from headrace.quantize.write_folder import write_quantized_folder
from headrace.storage import files
from headrace.training.batch import device_batch, special_tokens
from headrace.training.task import make_task


@dataclass(frozen=True)
class QuantizeRequest:
    """A request to quantize a run. Its fields are keys of request.json in the folder of unfinished work."""

    target: str  # folder to write, which must not exist
    method: MethodConfig
    samples: int  # rows to calibrate on
    dtype: str  # of the weights that are not quantized
    data: str  # packed data to calibrate on


@dataclass(frozen=True)
class QuantizeJob:
    """A request and what it takes to carry it out."""

    run: LoadedRun
    request: QuantizeRequest
    method: QuantizeMethod
    cache: LayerCache
    report: Callable[[str], None]


def quantize(run: LoadedRun, request: QuantizeRequest, report: Callable[[str], None]) -> list[Path]:
    """Quantize a run's model and write it to the request's target. Returns the files that were written.

    `report` is called with a line after each layer. If interrupted, the same call resumes after the last
    finished layer. Raises UserError if the model cannot be quantized."""
    if not qat.applies(run.recipe.model):
        run = run.merged()
    check_quantizable(run, request)
    cfg, method = run.recipe.model, load_method(request.method)
    linears = require_linears(cfg)
    is_trained_on = method.end_to_end_finetuning(request.method) is not None
    dataset = None
    if method.is_calibrated and not qat.applies(cfg):
        dataset = open_calibration_data(run, request.data, is_trained_on=is_trained_on)
    with jax.set_mesh(run.mesh):
        cache = open_cache(run, request, linears, dataset)
        job = QuantizeJob(run, request, method, cache, report)
        if qat.applies(cfg):
            for index in range(cfg.layers):
                cache.save(index, {linear.name: from_qat(run, linear, index) for linear in linears})
            run = run.merged()
        elif dataset is None:
            quantize_layers(job)
        else:
            quantize_calibrated_layers(job, dataset)
            if finetuning := method.end_to_end_finetuning(request.method):
                cache = finetune_codebooks(job, dataset, finetuning)
    paths = write_quantized_folder(run, request.target, request.dtype, cache)
    shutil.rmtree(cache.folder)
    return paths


def check_quantizable(run: LoadedRun, request: QuantizeRequest) -> None:
    """Raise UserError if the run's model cannot be quantized, or its target cannot be written."""
    recipe = run.recipe
    if quantized_folder.read_quant_config(recipe.run_dir) is not None:
        raise UserError(f"quantize: {recipe.run_dir} is quantized already")
    if fixed_matmul(recipe.model) != "compute":
        raise UserError(
            f"quantize: the matrices of {recipe.model.use} are {fixed_matmul(recipe.model)} already"
        )
    if recipe.model.recurrence is not None:
        raise UserError(
            "quantize: found a model with recurrent depth (recurrence.rounds), expected one without"
        )
    if len(load_family(recipe.model).split_for_export(recipe.model, run.params)) > 1:
        raise UserError(
            f"quantize: found two models, trained together by {recipe.objective.use}, expected one; train "
            "another run from it (init_from), for example on labels, and quantize that"
        )
    if request.samples < 1:
        raise InvalidArgument("samples", f"found {request.samples}, expected 1 or more")
    if files.is_url(request.target):
        target = files.redacted(request.target)
        raise UserError(
            f"quantize: found target {target}, expected a folder on this machine; upload it later"
        )
    if Path(request.target).exists():
        raise UserError(f"{request.target}: already exists; name a new folder, or remove it")


def require_linears(cfg: ModelConfig) -> list[Linear]:
    """The matrices of a model that are linear layers in transformers. Raises UserError if there are none."""
    plain = model_wrappers.without_wrapper(cfg)
    found = quantized_folder.find_linears(load_family(plain), plain)
    if not found:
        raise UserError(f"quantize: no matrix of {cfg.use} is a linear layer in transformers")
    return found


def open_cache(
    run: LoadedRun, request: QuantizeRequest, linears: Sequence[Linear], dataset: Dataset | None
) -> LayerCache:
    """Open the folder of finished layers. Raises UserError if it is of another request."""
    record = dataclasses.asdict(request) | {
        "method": reader.to_dict(request.method),
        "run": run.recipe.run_dir,
        "step": run.step,
        "weights": fingerprint(run.params),
        "rows": None if dataset is None else dataset.fingerprint,
    }
    cache = LayerCache(Path(f"{request.target}.unfinished"), linears, request.method, record)
    cache.check_record()
    return cache


def quantize_layers(job: QuantizeJob) -> None:
    """Quantize all layers by a method without calibration, and store them in the cache."""
    for index in range(job.run.recipe.model.layers):
        if not job.cache.has(index):
            job.cache.save(index, quantize_layer(job, index, {}))
            report_layer(job, index)


def quantize_calibrated_layers(job: QuantizeJob, dataset: Dataset) -> None:
    """Quantize layer after layer, and store them in the cache.

    For each: compute the Hessians of its matrices, quantize these, finetune them if the method does, and
    compute what the quantized layer outputs to the next. The inputs of one layer are in host memory."""
    run = job.run
    cfg, exec_opts = run.recipe.model, Execution(run.recipe.attention, run.recipe.compute.dtype)
    batches = list(load_calibration_batches(run, dataset, job.request.samples))
    kinds = calibrate.count_layer_kinds(cfg, exec_opts, run.params, batches[0])
    to_devices = partial(shard_rows, run.mesh)
    inputs = [np.asarray(calibrate.embed_inputs(cfg, exec_opts, run.params, batch)) for batch in batches]
    for index in range(cfg.layers):
        layer = ModelLayer(cfg, exec_opts, index % kinds, jnp.asarray(index), run.params)
        if not job.cache.has(index):
            rows = ((batch, to_devices(x)) for batch, x in zip(batches, inputs, strict=True))
            matrices = quantize_layer(job, index, compute_hessians(layer, job.cache.linears, rows))
            if finetuning := job.method.layer_finetuning(job.request.method):
                matrices = finetune.finetune_layer(
                    finetuning, layer, job.cache.linears, matrices, batches, inputs, to_devices
                )
            job.cache.save(index, matrices)
        if index + 1 < cfg.layers:
            model = with_stored_layer(run.params, job.cache.linears, job.cache.load(index))
            inputs = [
                np.asarray(layer.run(model, batch, to_devices(x)))
                for batch, x in zip(batches, inputs, strict=True)
            ]
        report_layer(job, index)


def report_layer(job: QuantizeJob, layer: int) -> None:
    """Report that a layer is finished."""
    job.report(f"layer {layer + 1} of {job.run.recipe.model.layers}")


def compute_hessians(
    layer: ModelLayer, linears: Sequence[Linear], rows: Iterable[tuple[CalibrationBatch, Array]]
) -> dict[str, Array]:
    """Compute the Hessians of a layer's matrices by the names of linear layers, each divided by the mean of
    its diagonal. `rows` are batches with the layer's inputs for them."""
    observed_paths = frozenset(linear.paths[0] for linear in linears)
    grams: dict[str, Array] = {}
    for batch, x in rows:
        sums = layer.hessians(observed_paths, batch, x)
        grams = {path: grams.get(path, 0) + gram for path, gram in sums.items()}
    for linear in linears:
        if linear.paths[0] not in grams:
            raise UserError(f"quantize: calibration cannot observe how the model uses {linear.name}")
    means = {path: jnp.mean(jnp.diag(gram)) for path, gram in grams.items()}
    scaled = {path: gram / jnp.where(means[path] > 0, means[path], 1.0) for path, gram in grams.items()}
    return {linear.name: scaled[linear.paths[0]] for linear in linears}


def quantize_layer(job: QuantizeJob, layer: int, hessians: dict[str, Array]) -> dict[str, QuantizedMatrix]:
    """Quantize the matrices of a layer, by the names of linear layers."""
    return {
        linear.name: quantize_matrix(job.run, job.request.method, linear, layer, hessians.get(linear.name))
        for linear in job.cache.linears
    }


def quantize_matrix(
    run: LoadedRun, method: MethodConfig, linear: Linear, layer: int, hessian: Array | None
) -> QuantizedMatrix:
    """Quantize a matrix of a layer. Its outputs are sharded over all devices if they are divisible."""
    params = dict(module.named_leaves(run.params))
    parts = [
        to_hf_layout(params[path][layer].astype(jnp.float32), place.pattern)
        for path, place in zip(linear.paths, linear.sub_matrices, strict=True)
    ]
    mesh_axes = tuple(run.mesh.shape)
    spec = P(None, mesh_axes if linear.outputs % run.mesh.size == 0 else None)
    w = jax.device_put(jnp.concatenate(parts).T, NamedSharding(run.mesh, spec))
    return run_method(method, w, hessian, jax.random.fold_in(jax.random.key(run.recipe.seed), layer))


@partial(jax.jit, static_argnames="method")
def run_method(method: MethodConfig, w: Array, hessian: Array | None, key: Array) -> QuantizedMatrix:
    """Quantize a matrix [inputs outputs] by a method, which may need its Hessian [inputs inputs]."""
    return load_method(method).quantize(method, w, hessian, key)


def from_qat(run: LoadedRun, linear: Linear, layer: int) -> GPTQMatrix:
    """Store a matrix of a layer with the integers and scales that quantization-aware training computed
    with."""
    cfg = run.recipe.model
    plain = model_wrappers.without_wrapper(cfg)
    axes = dict(module.named_leaves(module.axes(load_family(plain).Model, plain)))
    parts = []
    for path in linear.paths:
        w = jax.tree.map(lambda leaf: leaf[layer], module.get_path(run.params, path))
        parts.append(qat.to_integers(w, qat.make_grid(cfg, axes[path])))
    integers, scales = (jnp.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True))
    return gptq.pack_matrix(integers, scales, cfg.qat.bits, cfg.qat.group_size)


def finetune_codebooks(job: QuantizeJob, dataset: Dataset, finetuning: Finetuning) -> LayerCache:
    """Finetune the codebooks of all layers together. Returns the cache of the finetuned layers, which are
    stored beside those that it starts from."""
    run, indices = job.run, range(job.run.recipe.model.layers)
    cache = job.cache.with_stage("finished")
    if all(cache.has(index) for index in indices):
        return cache
    recipe = calibration_recipe(run.recipe, dataset)
    task = make_task(recipe, special_tokens(dataset))
    axes = module.axes(load_family(recipe.model).Model, recipe.model)
    rows = choose_batch_size(run, job.request.samples)
    order = dataset.train_order(rows, seed=recipe.seed)
    result = finetune.finetune_all(
        finetuning,
        task,
        axes,
        run.params,
        job.cache.linears,
        [job.cache.load(index) for index in indices],
        lambda step: device_batch(dataset, order, run.mesh, step),
    )
    for index in indices:
        cache.save(index, result.layers[index])
    losses = f"loss {result.loss_before:.4f} to {result.loss_after:.4f}"
    note = "" if result.is_improved else ", discarded since it is not lower"
    job.report(f"all layers, {finetuning.steps} steps: {losses}{note}")
    return cache
