"""What goes into every matrix of a model, layer by layer: the sums of x xᵀ that GPTQ and VPTQ round by. A
model is run as it is, through the place where nn/stack.py lets something else run its layers, so that no
family knows of it."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from headrace.errors import UserError
from headrace.model_wrappers import classification_head
from headrace.nn.linear import project
from headrace.nn.module import Array, module, path_name
from headrace.nn.stack import Execution, num_layers


@dataclass
class HessianSums:
    """What is noted while a layer is traced. `counts` are the tokens that do, the others being padding."""

    counts: Array
    grams: dict[str, Array] = field(default_factory=dict)

    def __hash__(self) -> int:
        return id(self)


@partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["name", "sums"])
@dataclass(frozen=True)
class ObservedWeight:
    """A weight that notes what it is multiplied with."""

    w: Any
    name: str
    sums: HessianSums


@project.register
def _(w: ObservedWeight, x: Array, spec: str) -> Array:
    inputs, counts = spec.split(",")[0], w.sums.counts
    summed = [letter for letter in inputs if letter in spec.split(",")[1].split("->")[0]]
    flat = x.reshape(*x.shape[: x.ndim - len(summed)], -1).astype(jnp.float32)
    if flat.shape[:-1] == counts.shape:
        flat = flat * counts[..., None]
    flat = flat.reshape(-1, flat.shape[-1])
    gram = jnp.matmul(flat.T, flat, precision="highest")
    w.sums.grams[w.name] = w.sums.grams.get(w.name, 0) + gram
    return project(w.w, x, spec)


@module
class CalibrationBatch:
    """Rows as the model is given them, and which of their tokens count."""

    tokens: Array
    segments: Array | None
    positions: Array | None
    counts: Array


@dataclass
class SingleLayerRunner:
    """Runs one layer in the place of all, on what is given and not on what the model comes with; with
    `run_layer` None, none. What comes out is kept in `out`; what the model makes of it nobody reads, and the
    compiler drops it."""

    layer: Any
    inputs: Any = None
    turn: int = 0
    out: Any = None
    seen: list[tuple[int, int]] = field(default_factory=list)  # layers, and kinds of them that take turns

    def run(self, exec_opts: Execution, bodies: Any, x: Array, blocks: Any) -> Array:
        self.seen.append((num_layers(blocks), len(bodies)))
        self.out = x
        if self.layer is not None:
            # An index beyond the end is the last: what is rounded already is a stack of this layer alone.
            cut = lambda w: jax.lax.dynamic_index_in_dim(w, self.layer, keepdims=False)
            self.out = bodies[self.turn](jax.tree.map(cut, blocks), self.inputs)
        return self.out

    def run_cached(self, exec_opts: Execution, bodies: Any, x: Array, layers: Any, cache: Any) -> Any:
        raise NotImplementedError("calibration runs whole rows, without a cache")


def run_model(
    cfg: Any, exec_opts: Execution, only: SingleLayerRunner, model: Any, text: CalibrationBatch
) -> Array:
    exec_opts = replace(exec_opts, layer_runner=only)
    # A head for labels takes the place of the one for tokens, which some families apply themselves.
    run: Any = classification_head.body(model) if classification_head.has_labels(cfg) else model
    run(cfg, text.tokens, exec_opts=exec_opts, segments=text.segments, positions=text.positions)
    return only.out


def period(cfg: Any, exec_opts: Execution, model: Any, text: CalibrationBatch) -> int:
    """How many kinds of layers follow each other in turn. UserError if they cannot be run one by one."""
    only = SingleLayerRunner(None)
    jax.eval_shape(lambda model, text: run_model(cfg, exec_opts, only, model, text), model, text)
    if len(only.seen) != 1 or only.seen[0][0] != cfg.layers:
        raise UserError(
            f"quantize: the layers of this {cfg.use} do not follow each other one by one, which --method rtn "
            "alone does not ask for"
        )
    return only.seen[0][1]


@partial(jax.jit, static_argnames=("cfg", "exec_opts"))
def embed_inputs(cfg: Any, exec_opts: Execution, model: Any, text: CalibrationBatch) -> Array:
    """What the first layer is given."""
    return run_model(cfg, exec_opts, SingleLayerRunner(None), model, text)


@partial(jax.jit, static_argnames=("cfg", "exec_opts", "turn"))
def run_layer(
    cfg: Any, exec_opts: Execution, turn: int, model: Any, text: CalibrationBatch, number: Array, x: Array
) -> Array:
    """What a layer makes of x."""
    return run_model(cfg, exec_opts, SingleLayerRunner(number, x, turn), model, text)


@partial(jax.jit, static_argnames=("cfg", "exec_opts", "turn", "names"))
def layer_hessians(
    cfg: Any,
    exec_opts: Execution,
    turn: int,
    names: frozenset[str],
    model: Any,
    text: CalibrationBatch,
    number: Array,
    x: Array,
) -> dict[str, Array]:
    """What goes into these weights of a layer, as sums over the batch by their names."""
    sums = HessianSums(text.counts)
    watch = lambda path, w: ObservedWeight(w, path_name(path), sums) if path_name(path) in names else w
    watched = jax.tree_util.tree_map_with_path(watch, model)
    run_model(cfg, exec_opts, SingleLayerRunner(number, x, turn), watched, text)
    return sums.grams


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["number", "params"],
    meta_fields=["cfg", "exec_opts", "turn"],
)
@dataclass(frozen=True)
class Layer:
    """One of a model's, of a kind that takes its turn. `params` are the model as it was."""

    cfg: Any
    exec_opts: Execution
    turn: int
    number: Array
    params: Any

    def out(self, model: Any, text: CalibrationBatch, x: Array) -> Array:
        return run_layer(self.cfg, self.exec_opts, self.turn, model, text, self.number, x)

    def observed(self, names: frozenset[str], text: CalibrationBatch, x: Array) -> dict[str, Array]:
        return layer_hessians(self.cfg, self.exec_opts, self.turn, names, self.params, text, self.number, x)
