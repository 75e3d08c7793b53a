"""Calibration: the inputs of every matrix of a layer, as sums of x xᵀ, by which GPTQ and VPTQ round.

Layers are quantized one by one, each calibrated on what the quantized layers before it output. But a model
is called as a whole, and its family has no hooks. Three objects reach into the model as it is:

- `SingleLayerRunner` takes the place of the loop over layers (`Execution.layer_runner`). It runs one layer on
  inputs of its own, not on those that the model passes, and keeps the output. The embeddings, the
  other layers and the head do not affect that output, so XLA removes them.
- `ObservedWeight` takes the place of a matrix in the weights. Models multiply weights by `project`, which
  dispatches on their type: an observed weight adds x xᵀ to a `HessianSums`, and then multiplies as usual.
- `HessianSums` gathers these sums, by the names of the weights, while the layer is traced. `layer_hessians`
  returns them from the compiled function."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp

from headrace.errors import UserError
from headrace.model_wrappers import classification_head
from headrace.models import ModelConfig
from headrace.nn.linear import project
from headrace.nn.module import Array, PyTree, module, path_name
from headrace.nn.stack import CachedLayerBody, Execution, LayerBody, num_layers


@dataclass(eq=False)
class HessianSums:
    """Sums of x xᵀ, by the names of weights, gathered while a layer is traced."""

    token_mask: Array  # float32 [b s]: 1 for tokens that count, 0 for padding
    grams: dict[str, Array] = field(default_factory=dict)


@partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["name", "sums"])
@dataclass(frozen=True)
class ObservedWeight:
    """A weight that adds the inputs it is multiplied with to `sums`."""

    w: PyTree
    name: str
    sums: HessianSums


@project.register
def _(w: ObservedWeight, x: Array, spec: str) -> Array:
    x_axes, w_axes = spec.split("->")[0].split(",")
    input_axes = [axis for axis in x_axes if axis in w_axes]
    flat = x.reshape(*x.shape[: x.ndim - len(input_axes)], -1).astype(jnp.float32)
    if flat.shape[:-1] == w.sums.token_mask.shape:
        flat = flat * w.sums.token_mask[..., None]
    flat = flat.reshape(-1, flat.shape[-1])
    gram = jnp.matmul(flat.T, flat, precision="highest")
    w.sums.grams[w.name] = w.sums.grams.get(w.name, 0) + gram
    return project(w.w, x, spec)


@module
class CalibrationBatch:
    """Rows of calibration data, [b s] each, as the model reads them."""

    tokens: Array
    segments: Array | None
    positions: Array | None
    token_mask: Array  # float32: 1 for tokens that count, 0 for padding


@dataclass
class SingleLayerRunner:
    """A `LayerRunner` that runs layer `layer` alone, on `inputs` instead of what the model feeds it.

    The result is kept in `output`; what the model computes from it is dead code that XLA removes. With
    `layer` None no layer runs, and `output` are the inputs of the first one."""

    layer: Array | None
    inputs: Array | None = None
    kind: int = 0  # of the layer: which of the bodies runs it
    output: Array | None = None
    stacks: list[tuple[int, int]] = field(default_factory=list)  # (layers, kinds of layers) of each call

    def run(self, exec_opts: Execution, bodies: Sequence[LayerBody], x: Array, layers: PyTree) -> Array:
        """Take the place of `nn.stack.run_layers`."""
        self.stacks.append((num_layers(layers), len(bodies)))
        self.output = x
        if self.layer is not None:
            # A quantized weight is a stack of this layer only: an index beyond the end takes the last.
            select = lambda w: jax.lax.dynamic_index_in_dim(w, self.layer, keepdims=False)
            assert self.inputs is not None
            self.output = bodies[self.kind](jax.tree.map(select, layers), self.inputs)
        return self.output

    def run_cached(
        self,
        exec_opts: Execution,
        bodies: Sequence[CachedLayerBody],
        x: Array,
        layers: PyTree,
        cache: PyTree,
    ) -> tuple[Array, PyTree]:
        """Not needed: calibration runs whole rows."""
        raise NotImplementedError("calibration runs whole rows, without a cache")


def run_model(
    cfg: ModelConfig, exec_opts: Execution, runner: SingleLayerRunner, model: PyTree, batch: CalibrationBatch
) -> Array:
    """Call a model whose layers are run by `runner`. Returns the runner's output [b s d]."""
    exec_opts = replace(exec_opts, layer_runner=runner)
    # A head for labels replaces the head for tokens, which some families apply to their output themselves.
    call = classification_head.body(model) if classification_head.has_labels(cfg) else model
    call(cfg, batch.tokens, exec_opts=exec_opts, segments=batch.segments, positions=batch.positions)
    assert runner.output is not None
    return runner.output


def count_layer_kinds(cfg: ModelConfig, exec_opts: Execution, model: PyTree, batch: CalibrationBatch) -> int:
    """The number of kinds of layers: layer i is of kind i modulo this number.

    Raises UserError if the model does not run its layers once each and in order."""
    runner = SingleLayerRunner(None)
    jax.eval_shape(lambda model, batch: run_model(cfg, exec_opts, runner, model, batch), model, batch)
    if len(runner.stacks) != 1 or runner.stacks[0][0] != cfg.layers:
        raise UserError(
            f"quantize: the layers of this {cfg.use} model do not run one after the other; only --method rtn "
            "can quantize it"
        )
    return runner.stacks[0][1]


@partial(jax.jit, static_argnames=("cfg", "exec_opts"))
def embed_inputs(cfg: ModelConfig, exec_opts: Execution, model: PyTree, batch: CalibrationBatch) -> Array:
    """Compute the inputs [b s d] of the first layer."""
    return run_model(cfg, exec_opts, SingleLayerRunner(None), model, batch)


@partial(jax.jit, static_argnames=("cfg", "exec_opts", "kind"))
def run_layer(
    cfg: ModelConfig,
    exec_opts: Execution,
    kind: int,
    model: PyTree,
    batch: CalibrationBatch,
    index: Array,
    x: Array,
) -> Array:
    """Compute the output of layer `index`, of this kind, for inputs x [b s d]."""
    return run_model(cfg, exec_opts, SingleLayerRunner(index, x, kind), model, batch)


@partial(jax.jit, static_argnames=("cfg", "exec_opts", "kind", "names"))
def layer_hessians(
    cfg: ModelConfig,
    exec_opts: Execution,
    kind: int,
    names: frozenset[str],
    model: PyTree,
    batch: CalibrationBatch,
    index: Array,
    x: Array,
) -> dict[str, Array]:
    """Compute the sums of x xᵀ over a batch, by name, for the inputs of these weights of layer `index`."""
    sums = HessianSums(batch.token_mask)
    observe = lambda path, w: ObservedWeight(w, path_name(path), sums) if path_name(path) in names else w
    observed = jax.tree_util.tree_map_with_path(observe, model)
    run_model(cfg, exec_opts, SingleLayerRunner(index, x, kind), observed, batch)
    return sums.grams


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["index", "params"],
    meta_fields=["cfg", "exec_opts", "kind"],
)
@dataclass(frozen=True)
class ModelLayer:
    """One layer of a model, to be run by itself. `params` are all weights of the model, not quantized.

    A pytree, so that the layers of one kind share compiled programs."""

    cfg: ModelConfig
    exec_opts: Execution
    kind: int
    index: Array
    params: PyTree

    def run(self, model: PyTree, batch: CalibrationBatch, x: Array) -> Array:
        """Compute the layer's output for inputs x [b s d], with the weights of `model`."""
        return run_layer(self.cfg, self.exec_opts, self.kind, model, batch, self.index, x)

    def hessians(self, names: frozenset[str], batch: CalibrationBatch, x: Array) -> dict[str, Array]:
        """Compute the sums of x xᵀ over a batch for the inputs of these weights."""
        return layer_hessians(self.cfg, self.exec_opts, self.kind, names, self.params, batch, self.index, x)
