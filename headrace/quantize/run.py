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

from headrace.config import reader as config
from headrace.model_wrappers import split_weights as matrices, qat as rounding
from headrace.nn import sharding as mesh, module
from headrace.storage import files as store
from headrace.quantize import calibrate, finetune as tune
from headrace.model_formats import gptq as integers, quantized_folder as stored
from headrace.quantize.calibrate import Layer, Text
from headrace.model_formats.quantized_folder import Linear, linears, load, tensors_of, with_layer
from headrace.data import shards
from headrace.data.dataset import Dataset
from headrace.errors import UserError
from headrace.training.evaluate import place, vocabulary
from headrace.nn.stack import Execution, own_products
from headrace.convert import to_huggingface as huggingface
from headrace.model_formats.hf_tensors import in_place, part_of, table_of, theirs_of, to_tensors
from headrace.checkpoint.open_run import Opened
from headrace.nn.module import dotted
from headrace.objectives import check_data, file, make_task

Say = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What is asked for. `method` is a Config of headrace/quantize; `samples` rows calibrate."""

    target: str
    method: Any
    samples: int
    dtype: str
    data: str


def quantize(run: Opened, request: Request, say: Say) -> list[Path]:
    """Writes the quantised model and returns its files."""
    if not rounding.has_bits(run.cfg.model):
        run = huggingface.plain_run(run)
    cfg, method = run.cfg.model, file("quantize/methods", request.method)
    check(run, request)
    found = linears(file("models", matrices.plain(cfg)), matrices.plain(cfg))
    if not found:
        raise UserError(f"quantize: found no matrix of {cfg.use} that is a linear layer at Hugging Face")
    reads = method.CALIBRATED and not rounding.has_bits(cfg)
    dataset = open_data(run, request) if reads else None
    with jax.set_mesh(run.devices):
        work = Work(run, request, found, dataset)
        if rounding.has_bits(cfg):
            for number in range(cfg.layers):
                work.keep(number, {one.name: learnt(run, one, number) for one in found})
            run = huggingface.plain_run(run)
        elif dataset is not None:
            calibrated(run, request, dataset, found, work, say)
            if getattr(request.method, "finish", 0):
                finish(run, request, dataset, found, work, say)
        else:
            for number in range(cfg.layers):
                if not work.has(number):
                    work.keep(number, {one.name: rounded(run, request, one, number, None) for one in found})
                    say(f"layer {number + 1} of {cfg.layers}")
    files = write(run, request, found, work)
    shutil.rmtree(work.folder)
    return files


def check(run: Opened, request: Request) -> None:
    cfg = run.cfg
    if stored.settings_of(cfg.run) is not None:
        raise UserError(f"quantize: {cfg.run} is quantised already")
    if own_products(cfg.model) != "compute":
        raise UserError(f"quantize: the matrices of {cfg.model.use} are {own_products(cfg.model)} already")
    if cfg.model.recurrence:
        raise UserError(
            "quantize: found a model with recurrent depth (model.recurrence), expected one without"
        )
    if len(huggingface.exports_of(file("models", cfg.model), cfg.model, run.params)) > 1:
        raise UserError(
            f"quantize: found two models, trained together by {cfg.objective.use}, expected one; `start` "
            "another run from them, on labels say, and quantise that"
        )
    if request.samples < 1:
        raise UserError(f"--samples: found {request.samples}, expected 1 or more")
    if store.is_url(request.target):
        target = store.shown(request.target)
        raise UserError(f"--to: found {target}, expected a folder on this machine; copy it there after")
    if Path(request.target).exists():
        raise UserError(f"{request.target}: there is something already; name a new folder, or remove it")


def calibrated(
    run: Opened, request: Request, dataset: Dataset, found: list[Linear], work: "Work", say: Say
) -> None:
    """Layer by layer: what goes into its matrices, the matrices rounded by it, and what the rounded layer
    gives to the next. Of the text, what one layer is given is held, in the host's memory."""
    cfg = run.cfg.model
    how = Execution(run.cfg.attention, run.cfg.memory.compute)
    texts = list(texts_of(run, request, dataset, make_task(shown_by(run.cfg, dataset), vocabulary(dataset))))
    turns = calibrate.period(cfg, how, run.params, texts[0])
    given = [np.asarray(calibrate.enter(cfg, how, run.params, text)) for text in texts]
    for number in range(cfg.layers):
        layer = Layer(cfg, how, number % turns, jnp.asarray(number), run.params)
        rows = lambda given=given: (
            (text, spread(run.devices, x)) for text, x in zip(texts, given, strict=True)
        )
        if not work.has(number):
            sums = hessians(layer, found, rows())
            made = {one.name: rounded(run, request, one, number, sums[one.name]) for one in found}
            if getattr(request.method, "tune", 0):
                held = list(zip(texts, given, strict=True))
                made = tune.tuned(layer, request.method, found, made, held, partial(spread, run.devices))
            work.keep(number, made)
        if number + 1 < cfg.layers:
            model = with_layer(run.params, found, work.layer(number))
            given = [np.asarray(layer.out(model, text, x)) for text, x in rows()]
        say(f"layer {number + 1} of {cfg.layers}")


def finish(
    run: Opened, request: Request, dataset: Dataset, found: list[Linear], work: "Work", say: Say
) -> None:
    """The codebooks of all layers together. What comes of it lies beside the layers that it began with."""
    cfg, numbers = shown_by(run.cfg, dataset), range(run.cfg.model.layers)
    layers = [work.layer(number) for number in numbers]
    work.stage = "finished"
    if all(work.has(number) for number in numbers):
        return
    task, axes = make_task(cfg, vocabulary(dataset)), module.axes(file("models", cfg.model).Model, cfg.model)
    rows = rows_of(run, request)
    batch = lambda number: place(dataset, run.devices, number, split="train", sequences=rows, seed=cfg.seed)
    made, said = tune.together(task, axes, run.params, request.method, found, layers, batch)
    for number in numbers:
        work.keep(number, made[number])
    say(f"all layers, {request.method.finish} steps: {said}")


def without_preference(cfg: Any) -> Any:
    """DPO needs a model to measure against, and none is left."""
    if cfg.objective.use != "dpo":
        return cfg
    return dataclasses.replace(cfg, objective=config.part_class("objectives", "causal")())


def shown_by(cfg: Any, dataset: Dataset) -> Any:
    """The run's settings with the objective that shows this data to the model: of pairs, its own."""
    return cfg if dataset.index.pairs else without_preference(cfg)


def hessians(
    layer: Layer, found: list[Linear], rows: Iterable[tuple[Text, jax.Array]]
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
    spec = mesh.spec(("batch", "sequence", None), x.shape, devices)
    return jax.device_put(x, NamedSharding(devices, spec))


def rounded(run: Opened, request: Request, one: Linear, number: int, hessian: Any) -> Any:
    """A matrix of a layer, its outputs spread over all devices where they can be."""
    params = dict(module.named(run.params))
    parts = [
        theirs_of(params[path][number].astype(jnp.float32), spot.pattern)
        for path, spot in zip(one.paths, one.places, strict=True)
    ]
    axes = tuple(run.devices.shape)
    spread = P(None, axes if one.outputs % run.devices.size == 0 else None)
    w = jax.device_put(jnp.concatenate(parts).T, NamedSharding(run.devices, spread))
    return by_method(request.method, w, hessian, jax.random.fold_in(jax.random.key(run.cfg.seed), number))


@partial(jax.jit, static_argnames="method")
def by_method(method: Any, w: Any, hessian: Any, key: Any) -> Any:
    return file("quantize/methods", method).quantize(method, w, hessian, key)


def learnt(run: Opened, one: Linear, number: int) -> Any:
    """A matrix of a layer that training saw in whole numbers: these, and its scales."""
    cfg = run.cfg.model
    axes = dict(module.named(module.axes(file("models", matrices.plain(cfg)).Model, matrices.plain(cfg))))
    leaves = {path: module.at(run.params, path) for path in one.paths}
    layer = lambda path: jax.tree.map(lambda w: w[number], leaves[path])
    made = [rounding.numbers_of(layer(path), rounding.grid_of(cfg, axes[path])) for path in one.paths]
    numbers, scales = (jnp.concatenate(parts, axis=1) for parts in zip(*made, strict=True))
    return integers.store(numbers, scales, cfg.bits, cfg.bits_group)


def open_data(run: Opened, request: Request) -> Dataset:
    length = run.cfg.data.sequence_length
    dataset = Dataset.open(request.data, sequence_length=length, tokenizer_sha256=run.tokenizer_sha256)
    check_data(shown_by(run.cfg, dataset).objective, request.data, dataset.index, "--data")
    if getattr(request.method, "finish", 0) and dataset.index.pairs:
        raise UserError(
            f"finish: {request.data} holds pairs of answers, and codebooks would learn those that were "
            "rejected, too; name other data with --data"
        )
    return dataset


def rows_of(run: Opened, request: Request) -> int:
    """That are on the devices at a time."""
    rows = max(run.devices.size, min(request.samples, run.cfg.batch.sequences // run.cfg.batch.accumulate))
    return rows - rows % run.devices.size


def texts_of(run: Opened, request: Request, dataset: Dataset, task: Any) -> Iterator[Text]:
    """Rows of the training split, a few at a time, as the objective would show them to the model."""
    rows = rows_of(run, request)
    prepare = jax.jit(lambda batch, key: file("objectives", task.objective).prepare(task, batch, key))
    for number in range(max(1, request.samples // rows)):
        batch = place(dataset, run.devices, number, split="train", sequences=rows, seed=run.cfg.seed)
        examples = prepare(batch, jax.random.fold_in(jax.random.key(run.cfg.seed), number))
        counts = (batch.segments > 0).astype(jnp.float32)
        yield Text(examples.inputs, examples.segments, examples.positions, counts)


class Work:
    """The layers that are done, in a folder beside the target, at the stage that they have come to. A folder
    that was begun for something else is refused."""

    stage = "layer"

    def __init__(self, run: Opened, request: Request, found: list[Linear], dataset: Dataset | None):
        self.folder, self.found = Path(f"{request.target}.unfinished"), found
        asked = dataclasses.asdict(request) | {"method": config.to_dict(request.method)}
        asked |= {"run": run.cfg.run, "step": run.step, "weights": fingerprint(run.params)}
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
        return file("quantize/methods", self.method).settings(self.method, layers)


def fingerprint(params: Any) -> str:
    """By which weights are told from others: sums of their bits, which come out alike in any order."""

    @jax.jit
    def sums(params: Any) -> list[jax.Array]:
        as_bits = lambda w: jax.lax.bitcast_convert_type(w.astype(jnp.float32), jnp.uint32)
        leaves = map(as_bits, jax.tree.leaves(params))
        return [jnp.sum(one, dtype=jnp.uint32) for bits in leaves for one in (bits, bits * bits)]

    return hashlib.sha256(np.asarray(jax.device_get(sums(params))).tobytes()).hexdigest()[:16]


def write(run: Opened, request: Request, found: list[Linear], work: Work) -> list[Path]:
    """The folder of Hugging Face, and with the recipe in it a run folder."""
    cfg = run.cfg
    settings = huggingface.settings_of(run, cfg.model, request.dtype)
    about: dict[str, Any] = {}
    for number in range(cfg.model.layers):
        about = joined(about, work.settings(number, work.layer(number)))
    if about["quant_method"] == "vptq":
        theirs = {part_of(place)[0] for place, *_ in table_of(file("models", cfg.model), cfg.model).values()}
        for one in (one for one in found if f"{one.name}.bias" in theirs):
            for number in range(cfg.model.layers):
                about["config_for_layers"][in_place(one.name, (number,))]["bias"] = True
    settings |= {"quantization_config": about}
    recipe = dataclasses.replace(without_preference(cfg), run=request.target)
    with huggingface.whole_or_nothing(request.target) as made:
        weights = tensors(run, request, found, work)
        huggingface.write(run, settings, weights, made, method=by_what(request.method))
        (made / "recipe.yaml").write_text(config.to_yaml(recipe))
    return sorted(path for path in Path(request.target).rglob("*") if path.is_file())


def by_what(method: Any) -> str:
    """As the model card says it."""
    steps = getattr(method, "finish", 0)
    return method.use + (f", with codebooks that then learnt from text for {steps} steps," if steps else "")


def tensors(
    run: Opened, request: Request, found: list[Linear], work: Work
) -> Iterator[tuple[str, np.ndarray]]:
    packed = {path for one in found for path in one.paths}
    rest = jax.tree_util.tree_map_with_path(lambda path, w: None if dotted(path) in packed else w, run.params)
    yield from to_tensors(table_of(file("models", run.cfg.model), run.cfg.model), rest, request.dtype)
    for number in range(run.cfg.model.layers):
        for name, one in work.layer(number).items():
            yield from tensors_of(name.format(number), one).items()


def joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What two layers' settings say together: they differ in what is told by layer."""
    both = {key: one.get(key, {}) | value for key, value in other.items() if isinstance(value, dict)}
    return one | other | both
