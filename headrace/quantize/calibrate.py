"""What goes into every matrix of a model, layer by layer: the sums of x xᵀ that GPTQ and VPTQ round by. A
model is run as it is, through the place where execution.py lets something else run its layers, so that no
family knows of it."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from headrace.model_wrappers import classification_head as classifier
from headrace.errors import UserError
from headrace.nn.stack import Execution, depth
from headrace.nn.module import Array, dotted, module
from headrace.nn.linear import project


@dataclass
class Sums:
    """What is noted while a layer is traced. `counts` are the tokens that do, the others being padding."""

    counts: Array
    grams: dict[str, Array] = field(default_factory=dict)

    def __hash__(self) -> int:
        return id(self)


@partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["name", "sums"])
@dataclass(frozen=True)
class Watched:
    """A weight that notes what it is multiplied with."""

    w: Any
    name: str
    sums: Sums


@project.register
def _(w: Watched, x: Array, spec: str) -> Array:
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
class Text:
    """Rows as the model is given them, and which of their tokens count."""

    tokens: Array
    segments: Array | None
    positions: Array | None
    counts: Array


@dataclass
class Only:
    """Runs one layer in the place of all, on what is given and not on what the model comes with; with `layer`
    None, none. What comes out is kept in `out`; what the model makes of it nobody reads, and the compiler
    drops it."""

    layer: Any
    given: Any = None
    turn: int = 0
    out: Any = None
    seen: list[tuple[int, int]] = field(default_factory=list)  # layers, and kinds of them that take turns

    def run(self, how: Execution, bodies: Any, x: Array, blocks: Any) -> Array:
        self.seen.append((depth(blocks), len(bodies)))
        self.out = x
        if self.layer is not None:
            # An index beyond the end is the last: what is rounded already is a stack of this layer alone.
            cut = lambda w: jax.lax.dynamic_index_in_dim(w, self.layer, keepdims=False)
            self.out = bodies[self.turn](jax.tree.map(cut, blocks), self.given)
        return self.out


def through(cfg: Any, how: Execution, only: Only, model: Any, text: Text) -> Array:
    how = replace(how, loop=only)
    # A head for labels takes the place of the one for tokens, which some families apply themselves.
    run: Any = getattr(model, "states", model) if classifier.has_labels(cfg) else model
    run(cfg, text.tokens, how=how, segments=text.segments, positions=text.positions)
    return only.out


def period(cfg: Any, how: Execution, model: Any, text: Text) -> int:
    """How many kinds of layers follow each other in turn. UserError if they cannot be run one by one."""
    only = Only(None)
    jax.eval_shape(lambda model, text: through(cfg, how, only, model, text), model, text)
    if len(only.seen) != 1 or only.seen[0][0] != cfg.layers:
        raise UserError(
            f"quantize: the layers of this {cfg.use} do not follow each other one by one, which --method rtn "
            "alone does not ask for"
        )
    return only.seen[0][1]


@partial(jax.jit, static_argnames=("cfg", "how"))
def enter(cfg: Any, how: Execution, model: Any, text: Text) -> Array:
    """What the first layer is given."""
    return through(cfg, how, Only(None), model, text)


@partial(jax.jit, static_argnames=("cfg", "how", "turn"))
def layer(cfg: Any, how: Execution, turn: int, model: Any, text: Text, number: Array, x: Array) -> Array:
    """What a layer makes of x."""
    return through(cfg, how, Only(number, x, turn), model, text)


@partial(jax.jit, static_argnames=("cfg", "how", "turn", "names"))
def observe(
    cfg: Any,
    how: Execution,
    turn: int,
    names: frozenset[str],
    model: Any,
    text: Text,
    number: Array,
    x: Array,
) -> dict[str, Array]:
    """What goes into these weights of a layer, as sums over the batch by their names."""
    sums = Sums(text.counts)
    watch = lambda path, w: Watched(w, dotted(path), sums) if dotted(path) in names else w
    watched = jax.tree_util.tree_map_with_path(watch, model)
    through(cfg, how, Only(number, x, turn), watched, text)
    return sums.grams


@partial(
    jax.tree_util.register_dataclass, data_fields=["number", "params"], meta_fields=["cfg", "how", "turn"]
)
@dataclass(frozen=True)
class Layer:
    """One of a model's, of a kind that takes its turn. `params` are the model as it was."""

    cfg: Any
    how: Execution
    turn: int
    number: Array
    params: Any

    def out(self, model: Any, text: Text, x: Array) -> Array:
        return layer(self.cfg, self.how, self.turn, model, text, self.number, x)

    def observed(self, names: frozenset[str], text: Text, x: Array) -> dict[str, Array]:
        return observe(self.cfg, self.how, self.turn, names, self.params, text, self.number, x)
