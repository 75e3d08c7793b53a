"""`headrace quantize`: a trained model to one whose matrices take a few bits a weight, layer by layer. Each
layer is calibrated on what the rounded layers before it give. What is done lies in a folder beside the
target, a file for each layer, so that the command goes on where it was stopped."""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors import safe_open
from safetensors.numpy import save_file

from headrace import model_wrappers
from headrace.checkpoint.open_run import LoadedRun
from headrace.config import reader
from headrace.convert import to_huggingface
from headrace.convert.output import new_folder
from headrace.data import shards
from headrace.data.dataset import Dataset
from headrace.errors import UserError
from headrace.model_formats import gptq, quantized_folder
from headrace.model_formats.hf_tensors import layer_name, split_spec, to_hf_layout, to_tensors
from headrace.model_formats.quantized_folder import Linear, linears, load, tensors_of, with_layer
from headrace.model_wrappers import load_family, qat
from headrace.models import fixed_matmul
from headrace.nn import module, sharding
from headrace.nn.module import path_name
from headrace.nn.stack import Execution
from headrace.objectives import check_dataset_kind, load_objective
from headrace.quantize import calibrate, finetune
from headrace.quantize.calibrate import CalibrationBatch, Layer
from headrace.quantize.methods import load_method
from headrace.storage import files
from headrace.training.evaluate import device_batch, special_tokens
from headrace.training.task import make_task

Say = Callable[[str], None]


@dataclass(frozen=True)
class QuantizeRequest:
    """What is asked for. `method` is a Config of headrace/quantize/methods; `samples` rows calibrate."""

    target: str
    method: Any
    samples: int
    dtype: str
    data: str


def quantize(run: LoadedRun, request: QuantizeRequest, say: Say) -> list[Path]:
    """Writes the quantised model and returns its files."""
    if not qat.applies(run.recipe.model):
        run = run.merged()
    cfg, method = run.recipe.model, load_method(request.method)
    check(run, request)
    found = linears(load_family(model_wrappers.without_wrapper(cfg)), model_wrappers.without_wrapper(cfg))
    if not found:
        raise UserError(f"quantize: found no matrix of {cfg.use} that is a linear layer at Hugging Face")
    reads = method.CALIBRATED and not qat.applies(cfg)
    dataset = open_data(run, request) if reads else None
    with jax.set_mesh(run.mesh):
        work = LayerCache(run, request, found, dataset)
        if qat.applies(cfg):
            for number in range(cfg.layers):
                work.keep(number, {one.name: from_qat(run, one, number) for one in found})
            run = run.merged()
        elif dataset is not None:
            calibrated(run, request, dataset, found, work, say)
            if getattr(request.method, "finetune_steps", 0):
                finish(run, request, dataset, found, work, say)
        else:
            for number in range(cfg.layers):
                if not work.has(number):
                    work.keep(
                        number, {one.name: quantize_matrix(run, request, one, number, None) for one in found}
                    )
                    say(f"layer {number + 1} of {cfg.layers}")
    files = write(run, request, found, work)
    shutil.rmtree(work.folder)
    return files


def check(run: LoadedRun, request: QuantizeRequest) -> None:
    cfg = run.recipe
    if quantized_folder.read_quant_config(cfg.run_dir) is not None:
        raise UserError(f"quantize: {cfg.run_dir} is quantised already")
    if fixed_matmul(cfg.model) != "compute":
        raise UserError(f"quantize: the matrices of {cfg.model.use} are {fixed_matmul(cfg.model)} already")
    if cfg.model.recurrence is not None:
        raise UserError(
            "quantize: found a model with recurrent depth (recurrence.rounds), expected one without"
        )
    if len(load_family(cfg.model).split_for_export(cfg.model, run.params)) > 1:
        raise UserError(
            f"quantize: found two models, trained together by {cfg.objective.use}, expected one; "
            "train another run with `init_from`, on labels say, and quantise that"
        )
    if request.samples < 1:
        raise UserError(f"--samples: found {request.samples}, expected 1 or more")
    if files.is_url(request.target):
        target = files.redacted(request.target)
        raise UserError(f"--to: found {target}, expected a folder on this machine; copy it there after")
    if Path(request.target).exists():
        raise UserError(f"{request.target}: already exists; name a new folder, or remove it")


def calibrated(
    run: LoadedRun,
    request: QuantizeRequest,
    dataset: Dataset,
    found: list[Linear],
    work: "LayerCache",
    say: Say,
) -> None:
    """Layer by layer: what goes into its matrices, the matrices rounded by it, and what the rounded layer
    gives to the next. Of the text, what one layer is given is held, in the host's memory."""
    cfg = run.recipe.model
    exec_opts = Execution(run.recipe.attention, run.recipe.compute.dtype)
    texts = list(
        texts_of(
            run, request, dataset, make_task(calibration_config(run.recipe, dataset), special_tokens(dataset))
        )
    )
    turns = calibrate.period(cfg, exec_opts, run.params, texts[0])
    given = [np.asarray(calibrate.embed_inputs(cfg, exec_opts, run.params, text)) for text in texts]
    for number in range(cfg.layers):
        layer = Layer(cfg, exec_opts, number % turns, jnp.asarray(number), run.params)
        rows = lambda given=given: ((text, spread(run.mesh, x)) for text, x in zip(texts, given, strict=True))
        if not work.has(number):
            sums = hessians(layer, found, rows())
            made = {one.name: quantize_matrix(run, request, one, number, sums[one.name]) for one in found}
            if getattr(request.method, "tune_steps", 0):
                held = list(zip(texts, given, strict=True))
                made = finetune.finetune_layer(
                    layer, request.method, found, made, held, partial(spread, run.mesh)
                )
            work.keep(number, made)
        if number + 1 < cfg.layers:
            model = with_layer(run.params, found, work.layer(number))
            given = [np.asarray(layer.out(model, text, x)) for text, x in rows()]
        say(f"layer {number + 1} of {cfg.layers}")


def finish(
    run: LoadedRun,
    request: QuantizeRequest,
    dataset: Dataset,
    found: list[Linear],
    work: "LayerCache",
    say: Say,
) -> None:
    """The codebooks of all layers together. What comes of it lies beside the layers that it began with."""
    cfg, numbers = calibration_config(run.recipe, dataset), range(run.recipe.model.layers)
    layers = [work.layer(number) for number in numbers]
    work.stage = "finished"
    if all(work.has(number) for number in numbers):
        return
    task, axes = (
        make_task(cfg, special_tokens(dataset)),
        module.axes(load_family(cfg.model).Model, cfg.model),
    )
    order = dataset.train_order(rows_of(run, request), seed=cfg.seed)
    batch = lambda number: device_batch(dataset, order, run.mesh, number)
    made, said = finetune.finetune_all(task, axes, run.params, request.method, found, layers, batch)
    for number in numbers:
        work.keep(number, made[number])
    say(f"all layers, {request.method.finetune_steps} steps: {said}")


def without_preference(cfg: Any) -> Any:
    """DPO needs a model to measure against, and none is left."""
    if cfg.objective.use != "dpo":
        return cfg
    return dataclasses.replace(cfg, objective=reader.part_class("objectives", "causal")())


def calibration_config(cfg: Any, dataset: Dataset) -> Any:
    """The run's settings with the objective that shows this data to the model: of pairs, its own."""
    return cfg if dataset.index.pairs else without_preference(cfg)


def hessians(
    layer: Layer, found: list[Linear], rows: Iterable[tuple[CalibrationBatch, jax.Array]]
) -> dict[str, jax.Array]:
    """Of the matrices of a layer by their names, with a mean of 1 along the diagonal."""
    grams: dict[str, Any] = {}
    for text, x in rows:
        seen = layer.observed(frozenset(one.paths[0] for one in found), text, x)
        grams = {name: grams.get(name, 0) + gram for name, gram in seen.items()}
    for one in found:
        if one.paths[0] not in grams:
            raise UserError(f"quantize: {one.name} is multiplied in a way that calibration does not see")
    mean = {name: jnp.mean(jnp.diag(gram)) for name, gram in grams.items()}
    scaled = {name: gram / jnp.where(mean[name] > 0, mean[name], 1.0) for name, gram in grams.items()}
    return {one.name: scaled[one.paths[0]] for one in found}


def spread(devices: Mesh, x: np.ndarray) -> jax.Array:
    """Rows [b s d] over the devices, as a batch is."""
    spec = sharding.partition_spec(("batch", "sequence", None), x.shape, devices)
    return jax.device_put(x, NamedSharding(devices, spec))


def quantize_matrix(run: LoadedRun, request: QuantizeRequest, one: Linear, number: int, hessian: Any) -> Any:
    """A matrix of a layer, its outputs spread over all devices where they can be."""
    params = dict(module.named_leaves(run.params))
    parts = [
        to_hf_layout(params[path][number].astype(jnp.float32), spot.pattern)
        for path, spot in zip(one.paths, one.places, strict=True)
    ]
    axes = tuple(run.mesh.shape)
    spread = P(None, axes if one.outputs % run.mesh.size == 0 else None)
    w = jax.device_put(jnp.concatenate(parts).T, NamedSharding(run.mesh, spread))
    return run_method(request.method, w, hessian, jax.random.fold_in(jax.random.key(run.recipe.seed), number))


@partial(jax.jit, static_argnames="method")
def run_method(method: Any, w: Any, hessian: Any, key: Any) -> Any:
    return load_method(method).quantize(method, w, hessian, key)


def from_qat(run: LoadedRun, one: Linear, number: int) -> Any:
    """A matrix of a layer that training saw in whole numbers: these, and its scales."""
    cfg = run.recipe.model
    axes = dict(
        module.named_leaves(
            module.axes(
                load_family(model_wrappers.without_wrapper(cfg)).Model,
                model_wrappers.without_wrapper(cfg),
            )
        )
    )
    leaves = {path: module.get_path(run.params, path) for path in one.paths}
    layer = lambda path: jax.tree.map(lambda w: w[number], leaves[path])
    made = [qat.to_integers(layer(path), qat.make_grid(cfg, axes[path])) for path in one.paths]
    numbers, scales = (jnp.concatenate(parts, axis=1) for parts in zip(*made, strict=True))
    return gptq.store(numbers, scales, cfg.qat.bits, cfg.qat.group_size)


def open_data(run: LoadedRun, request: QuantizeRequest) -> Dataset:
    length = run.recipe.data.sequence_length
    dataset = Dataset.open(request.data, sequence_length=length, tokenizer_sha256=run.tokenizer_sha256)
    check_dataset_kind(
        calibration_config(run.recipe, dataset).objective, request.data, dataset.index, "--data"
    )
    if getattr(request.method, "finetune_steps", 0) and dataset.index.pairs:
        raise UserError(
            f"finetune_steps: {request.data} holds pairs of answers, and codebooks would learn those that "
            "were rejected, too; name other data with --data"
        )
    return dataset


def rows_of(run: LoadedRun, request: QuantizeRequest) -> int:
    """That are on the devices at a time."""
    rows = max(
        run.mesh.size, min(request.samples, run.recipe.batch.sequences // run.recipe.batch.microbatches)
    )
    return rows - rows % run.mesh.size


def texts_of(
    run: LoadedRun, request: QuantizeRequest, dataset: Dataset, task: Any
) -> Iterator[CalibrationBatch]:
    """Rows of the training split, a few at a time, as the objective would show them to the model."""
    rows = rows_of(run, request)
    prepare = jax.jit(lambda batch, key: load_objective(task.objective).prepare(task, batch, key))
    order = dataset.train_order(rows, seed=run.recipe.seed)
    for number in range(max(1, request.samples // rows)):
        batch = device_batch(dataset, order, run.mesh, number)
        examples = prepare(batch, jax.random.fold_in(jax.random.key(run.recipe.seed), number))
        counts = (batch.segments > 0).astype(jnp.float32)
        yield CalibrationBatch(examples.inputs, examples.segments, examples.positions, counts)


class LayerCache:
    """The layers that are done, in a folder beside the target, at the stage that they have come to. A folder
    that was begun for something else is refused."""

    stage = "layer"

    def __init__(
        self, run: LoadedRun, request: QuantizeRequest, found: list[Linear], dataset: Dataset | None
    ):
        self.folder, self.found = Path(f"{request.target}.unfinished"), found
        asked = dataclasses.asdict(request) | {"method": reader.to_dict(request.method)}
        asked |= {"run": run.recipe.run_dir, "step": run.step, "weights": fingerprint(run.params)}
        asked |= {"rows": None if dataset is None else dataset.fingerprint}
        self.method, self.asked, self.about = request.method, asked, self.folder / "request.json"
        if self.about.is_file():
            try:
                before = json.loads(self.about.read_text())
            except ValueError:
                raise UserError(f"{self.about}: not valid JSON; remove that folder to begin anew") from None
            other = sorted(key for key in {**asked, **before} if asked.get(key) != before.get(key))
            if other:
                raise UserError(
                    f"{self.folder}: found work with {other[0]} {before.get(other[0])}, expected "
                    f"{asked.get(other[0])}; remove that folder to begin anew"
                )

    def path(self, number: int) -> Path:
        return self.folder / f"{self.stage}-{number:05}.safetensors"

    def has(self, number: int) -> bool:
        return self.path(number).is_file()

    def keep(self, number: int, made: dict[str, Any]) -> None:
        """Under another name first: a file that is there is whole."""
        if not self.about.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            shards.write_json(self.about, self.asked)
        tensors: dict[str, np.ndarray] = {}
        for name, one in made.items():
            tensors |= tensors_of(name.format(number), one)
        scratch = self.path(number).with_suffix(".part")
        save_file(tensors, scratch, metadata={"settings": json.dumps(self.settings(number, made))})
        scratch.rename(self.path(number))

    def layer(self, number: int) -> dict[str, Any]:
        """The matrices of a layer by their names, as they are stored."""
        with safe_open(self.path(number), framework="np") as file:
            settings, names = json.loads(file.metadata()["settings"]), set(file.keys())
            take = lambda name: file.get_tensor(name) if name in names else None
            return {one.name: load(settings, one.name.format(number), take) for one in self.found}

    def settings(self, number: int, made: dict[str, Any]) -> dict[str, Any]:
        layers = {name.format(number): one for name, one in made.items()}
        return load_method(self.method).settings(self.method, layers)


def fingerprint(params: Any) -> str:
    """By which weights are told from others: sums of their bits, which come out alike in any order."""

    @jax.jit
    def sums(params: Any) -> list[jax.Array]:
        as_bits = lambda w: jax.lax.bitcast_convert_type(w.astype(jnp.float32), jnp.uint32)
        leaves = map(as_bits, jax.tree.leaves(params))
        return [jnp.sum(one, dtype=jnp.uint32) for bits in leaves for one in (bits, bits * bits)]

    return hashlib.sha256(np.asarray(jax.device_get(sums(params))).tobytes()).hexdigest()[:16]


def write(run: LoadedRun, request: QuantizeRequest, found: list[Linear], work: LayerCache) -> list[Path]:
    """The folder of Hugging Face, and with the recipe in it a run folder."""
    cfg = run.recipe
    settings = to_huggingface.make_hf_config(run, cfg.model, request.dtype)
    about: dict[str, Any] = {}
    for number in range(cfg.model.layers):
        about = deep_merge(about, work.settings(number, work.layer(number)))
    if about["quant_method"] == "vptq":
        theirs = {
            split_spec(place)[0] for place, *_ in load_family(cfg.model).tensor_table(cfg.model).values()
        }
        for one in (one for one in found if f"{one.name}.bias" in theirs):
            for number in range(cfg.model.layers):
                about["config_for_layers"][layer_name(one.name, (number,))]["bias"] = True
    settings |= {"quantization_config": about}
    recipe = dataclasses.replace(without_preference(cfg), run_dir=request.target)
    with new_folder(request.target) as made:
        weights = tensors(run, request, found, work)
        to_huggingface.write_model_folder(
            run, settings, weights, made, quantized_by=method_text(request.method)
        )
        (made / "recipe.yaml").write_text(reader.to_yaml(recipe))
    return sorted(path for path in Path(request.target).rglob("*") if path.is_file())


def method_text(method: Any) -> str:
    """As the model card says it."""
    steps = getattr(method, "finetune_steps", 0)
    return method.use + (f", with codebooks that then learnt from text for {steps} steps," if steps else "")


def tensors(
    run: LoadedRun, request: QuantizeRequest, found: list[Linear], work: LayerCache
) -> Iterator[tuple[str, np.ndarray]]:
    packed = {path for one in found for path in one.paths}
    rest = jax.tree_util.tree_map_with_path(
        lambda path, w: None if path_name(path) in packed else w, run.params
    )
    yield from to_tensors(load_family(run.recipe.model).tensor_table(run.recipe.model), rest, request.dtype)
    for number in range(run.recipe.model.layers):
        for name, one in work.layer(number).items():
            yield from tensors_of(name.format(number), one).items()


def deep_merge(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What two layers' settings say together: they differ in what is told by layer."""
    both = {key: one.get(key, {}) | value for key, value in other.items() if isinstance(value, dict)}
    return one | other | both
