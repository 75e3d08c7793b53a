"""Finetuning of VPTQ's codebooks, with fixed indices: of each layer to the output that it had before it was
quantized, and then of all layers together to the training loss."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from headrace.low_precision.cast import cast
from headrace.model_formats.quantized_folder import Linear, with_stored_layer, with_stored_stacks
from headrace.model_formats.vptq import VPTQMatrix
from headrace.nn.module import Array, PyTree
from headrace.objectives import Batch, TrainTask, load_objective, update_phases
from headrace.quantize.calibrate import CalibrationBatch, ModelLayer
from headrace.quantize.methods import Finetuning, QuantizedLayer, QuantizedMatrix

CODEBOOK_FIELDS = ("centroids", "residual", "outlier_centroids")
EVAL_BATCHES = 8

Codebooks: TypeAlias = dict[str, dict[str, Array]]  # by the names of linear layers, and by field


def finetune_layer(
    finetuning: Finetuning,
    layer: ModelLayer,
    linears: Sequence[Linear],
    matrices: QuantizedLayer,
    batches: Sequence[CalibrationBatch],
    inputs: Sequence[np.ndarray],
    to_devices: Callable[[np.ndarray], Array],
) -> dict[str, QuantizedMatrix]:
    """Finetune a layer's codebooks so that its output is closer to that of the matrices before quantization.

    Returns the matrices with the finetuned codebooks, or unchanged if the error over all batches is not
    smaller. `inputs` are the layer's inputs for each batch: like its outputs they are in host memory, and
    `to_devices` moves one batch at a time."""
    quantized, optimizer = tuple(linears), make_optimizer(finetuning)
    targets = [
        np.asarray(layer.run(layer.params, b, to_devices(x))) for b, x in zip(batches, inputs, strict=True)
    ]

    def load(index: int) -> tuple[CalibrationBatch, Array, Array]:
        return batches[index], to_devices(inputs[index]), to_devices(targets[index])

    def total_error(codebooks: Codebooks) -> float:
        errors = (
            layer_error(quantized, layer, matrices, codebooks, *load(index)) for index in range(len(batches))
        )
        return sum(map(float, errors))

    initial = get_codebooks(matrices)
    codebooks, state = initial, optimizer.init(initial)
    for step in range(finetuning.steps):
        # Without waiting, the batches of many steps would be on the devices at once.
        codebooks, state = jax.block_until_ready(
            finetune_step(
                finetuning, quantized, layer, matrices, codebooks, state, *load(step % len(batches))
            )
        )
    codebooks = round_codebooks(codebooks)
    is_better = total_error(codebooks) < total_error(initial)
    return with_codebooks(matrices, codebooks if is_better else initial, jnp.float16)


# Functions of the layer, and not closures over it: the layers of one kind share their compiled programs.
@partial(jax.jit, static_argnames="linears")
def layer_error(
    linears: tuple[Linear, ...],
    layer: ModelLayer,
    matrices: QuantizedLayer,
    codebooks: Codebooks,
    batch: CalibrationBatch,
    x: Array,
    target: Array,
) -> Array:
    """The squared distance of the layer's output from the target, summed over features, mean over tokens."""
    model = with_stored_layer(layer.params, linears, with_codebooks(matrices, codebooks))
    error = (layer.run(model, batch, x) - target).astype(jnp.float32) * batch.token_mask[..., None]
    return jnp.sum(error**2) / jnp.maximum(batch.token_mask.sum(), 1.0)


@partial(jax.jit, static_argnames=("finetuning", "linears"))
def finetune_step(
    finetuning: Finetuning,
    linears: tuple[Linear, ...],
    layer: ModelLayer,
    matrices: QuantizedLayer,
    codebooks: Codebooks,
    state: optax.OptState,
    batch: CalibrationBatch,
    x: Array,
    target: Array,
) -> tuple[Codebooks, optax.OptState]:
    """Update the codebooks of a layer by one step on the `layer_error`. Returns them and the optimizer's
    state."""
    grads = jax.grad(layer_error, argnums=3)(linears, layer, matrices, codebooks, batch, x, target)
    updates, state = make_optimizer(finetuning).update(grads, state)
    return optax.apply_updates(codebooks, updates), state


@dataclass(frozen=True)
class FinetuneResult:
    """The matrices of each layer after end-to-end finetuning, and the evaluation loss before and after.

    Without an improvement the matrices are those from before."""

    layers: list[dict[str, QuantizedMatrix]]
    loss_before: float
    loss_after: float

    @property
    def is_improved(self) -> bool:
        return self.loss_after < self.loss_before


def finetune_all(
    finetuning: Finetuning,
    task: TrainTask,
    axes: PyTree,
    params: PyTree,
    linears: Sequence[Linear],
    layers: Sequence[QuantizedLayer],
    load_batch: Callable[[int], Batch],
) -> FinetuneResult:
    """Finetune the codebooks of all layers together to the training loss, one batch per step.

    The loss before and after is that of the first batches, which are not trained on."""
    stacks: dict[str, QuantizedMatrix] = {
        linear.name: jax.tree.map(lambda *w: jnp.stack(w), *(layer[linear.name] for layer in layers))
        for linear in linears
    }
    optimizer = make_optimizer(finetuning)
    loss = partial(training_loss, task, axes, linears)
    compute_loss = jax.jit(loss)

    @jax.jit
    def update(
        codebooks: Codebooks,
        state: optax.OptState,
        params: PyTree,
        stacks: QuantizedLayer,
        batch: Batch,
        step: int,
    ) -> tuple[Codebooks, optax.OptState]:
        updates, state = optimizer.update(jax.grad(loss)(codebooks, params, stacks, batch, step), state)
        return optax.apply_updates(codebooks, updates), state

    def mean_loss(codebooks: Codebooks) -> float:
        return statistics.fmean(
            float(compute_loss(codebooks, params, stacks, load_batch(step), step))
            for step in range(EVAL_BATCHES)
        )

    initial = get_codebooks(stacks)
    codebooks, state = initial, optimizer.init(initial)
    for step in range(EVAL_BATCHES, EVAL_BATCHES + finetuning.steps):
        codebooks, state = jax.block_until_ready(
            update(codebooks, state, params, stacks, load_batch(step), step)
        )
    codebooks = round_codebooks(codebooks)
    before, after = mean_loss(initial), mean_loss(codebooks)
    finetuned = with_codebooks(stacks, codebooks if after < before else initial, jnp.float16)
    unstacked = [
        jax.tree.map(lambda w, index=index: np.asarray(w[index]), finetuned) for index in range(len(layers))
    ]
    return FinetuneResult(unstacked, before, after)


def training_loss(
    task: TrainTask,
    axes: PyTree,
    linears: Sequence[Linear],
    codebooks: Codebooks,
    params: PyTree,
    stacks: QuantizedLayer,
    batch: Batch,
    step: int,
) -> Array:
    """The training loss of a model with quantized matrices, the sum over the update phases. `stacks` are the
    matrices of all layers, `params` all weights."""
    model = cast(with_stored_stacks(params, linears, with_codebooks(stacks, codebooks)), axes, task.exec_opts)
    key = jax.random.fold_in(jax.random.key(0), step)
    examples = load_objective(task.objective).prepare(task, batch, key)
    total = jnp.zeros(())
    for phase in update_phases(task):
        output = phase.loss(task, model, examples)
        examples, total = output.carry, total + output.loss / jnp.maximum(output.sums["count"], 1.0)
    return total


def make_optimizer(finetuning: Finetuning) -> optax.GradientTransformation:
    """Make Adam with the learning rate of each step."""
    return optax.adam(optax.linear_schedule(finetuning.learning_rate, 0.0, finetuning.steps))


def get_codebooks(matrices: QuantizedLayer) -> Codebooks:
    """The codebooks of matrices, in float32."""
    return {name: _codebooks_of(matrix) for name, matrix in matrices.items()}


def _codebooks_of(matrix: QuantizedMatrix) -> dict[str, Array]:
    assert isinstance(matrix, VPTQMatrix), "only VPTQ has codebooks"
    codebooks = {field: getattr(matrix, field) for field in CODEBOOK_FIELDS}
    return {field: jnp.asarray(w, jnp.float32) for field, w in codebooks.items() if w is not None}


def with_codebooks(
    matrices: QuantizedLayer, codebooks: Codebooks, dtype: DTypeLike = jnp.float32
) -> dict[str, QuantizedMatrix]:
    """The matrices with other codebooks, in this dtype."""
    return {name: _with_codebooks(matrix, codebooks[name], dtype) for name, matrix in matrices.items()}


def _with_codebooks(
    matrix: QuantizedMatrix, codebooks: dict[str, Array], dtype: DTypeLike
) -> QuantizedMatrix:
    assert isinstance(matrix, VPTQMatrix), "only VPTQ has codebooks"
    fields: dict[str, Any] = {field: w.astype(dtype) for field, w in codebooks.items()}
    return replace(matrix, **fields)


def round_codebooks(codebooks: Codebooks) -> Codebooks:
    """Round codebooks to float16, in which they are stored."""
    return jax.tree.map(lambda w: w.astype(jnp.float16).astype(jnp.float32), codebooks)
