"""Models as frozen dataclasses of arrays. A weight is declared once, by its axis names: the config
gives each axis its size, mesh.py its sharding, and the initialiser stands beside it."""

import dataclasses
import difflib
import fnmatch
import functools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp

from headrace.errors import UserError

Array = jax.Array
Initialiser = Callable[[Array, "Axes", tuple[int, ...], Any], Array]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axis names of one weight. The first `stacked` of them count layers; of the weight's own axes the
    first `inputs` are summed over when it meets an activation (0 for a bias). One that is `exact` meets
    activations in float32. One with a `rule` is moved by it, and not by gradients. One that is `alone`
    belongs to a layer that is not in a stack. One that is `still` is never moved, one with a `rate` by that
    share of the learning rate; one with a `grid` is rounded to it wherever it is used (rounding.py)."""

    names: tuple[str, ...]
    stacked: int = 0
    inputs: int = 1
    exact: bool = False
    rule: "Rule | None" = None
    alone: bool = False
    still: bool = False
    rate: float = 1.0
    grid: Any = None
    dtype: Any = None  # where it is not float32

    @property
    def own(self) -> tuple[str, ...]:
        return self.names[self.stacked :]

    @property
    def is_matrix(self) -> bool:
        return 0 < self.inputs < len(self.own)

    @property
    def is_hidden_matrix(self) -> bool:
        """A matrix inside the layers: what Muon orthogonalises; embeddings and heads are not. Where
        each layer has a stack of its own, as of experts, all of them are."""
        return self.is_matrix and (self.stacked > 0 or self.alone)


@dataclasses.dataclass(frozen=True)
class Rule:
    """How a weight is moved that gradients do not train: after a step it is `move(cfg, weight, gradient)`.
    `measure(gradient)` is written down as `name`."""

    name: str
    move: Callable[[Any, Array, Array], Array]
    measure: Callable[[Array], Array]


def normal(std: float) -> Initialiser:
    return lambda key, axes, shape, cfg: std * jax.random.normal(key, shape, jnp.float32)


def residual_normal(std: float) -> Initialiser:
    """For the matrices that write to the residual stream: two of them a layer, so 1/sqrt(2 layers)."""
    return lambda key, axes, shape, cfg: (
        std / math.sqrt(2 * cfg.layers) * jax.random.normal(key, shape, jnp.float32)
    )


def truncated(std: float) -> Initialiser:
    """Normal, and drawn again beyond two standard deviations."""
    return lambda key, axes, shape, cfg: std * jax.random.truncated_normal(key, -2, 2, shape, jnp.float32)


def residual_truncated(std: float) -> Initialiser:
    return lambda key, axes, shape, cfg: truncated(std / math.sqrt(2 * cfg.layers))(key, axes, shape, cfg)


def ones(key: Array, axes: Axes, shape: tuple[int, ...], cfg: Any) -> Array:
    return jnp.ones(shape, jnp.float32)


def zeros(key: Array, axes: Axes, shape: tuple[int, ...], cfg: Any) -> Array:
    return jnp.zeros(shape, jnp.float32)


NORMAL = normal(0.02)


def weight(
    *axes: str,
    init: Initialiser = NORMAL,
    inputs: int = 1,
    exact: bool = False,
    rule: Rule | None = None,
    when: Callable[[Any], bool] = lambda cfg: True,
) -> Any:
    """Declares a weight. `when(cfg)` false leaves the field None (a tied head, an absent norm). An axis has
    the size that the config gives its name, or in `state:embed` the size of another one."""
    return dataclasses.field(metadata=dict(axes=axes, init=init, when=when, more=(inputs, exact, rule)))


def stack(cls: type[T], axis: str = "layers", when: Callable[[Any], bool] = lambda cfg: True) -> Any:
    """Declares `getattr(cfg, axis)` copies of a module, held as one module with a leading axis."""
    return dataclasses.field(metadata=dict(stack=cls, axis=axis, when=when))


def nested(cls: Callable[[], type], sized: Callable[[Any], Any], when: Callable[[Any], bool]) -> Any:
    """Declares a module inside another, of the sizes in the config that `sized` makes of the other's."""
    return dataclasses.field(metadata=dict(nested=cls, sized=sized, when=when))


@dataclass_transform(frozen_default=True)
def module(cls: type[T]) -> type[T]:
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


def build(
    cls: type[T], cfg: Any, leaf: Callable[[str, Axes, tuple[int, ...], Callable[[Array], Array]], Any]
) -> T:
    """Builds `cls` with `leaf(path, axes, shape, init)` in the place of every weight; init(key) draws it. A
    class whose weights are declared elsewhere has a `build` of its own, and an `init`."""
    if own := getattr(cls, "build", None):
        return own(cfg, leaf)

    def walk(cls: Any, cfg: Any, prefix: str, lead: tuple[str, ...]) -> Any:
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            meta, path = field.metadata, prefix + field.name
            if not meta["when"](cfg):
                values[field.name] = None
            elif "stack" in meta:
                values[field.name] = walk(meta["stack"], cfg, path + ".", (*lead, meta["axis"]))
            elif "nested" in meta:
                values[field.name] = walk(meta["nested"](), meta["sized"](cfg), path + ".", lead)
            else:
                names = lead + meta["axes"]
                axes = Axes(tuple(name.split(":")[0] for name in names), len(lead), *meta["more"])
                shape = tuple(getattr(cfg, name.split(":")[-1]) for name in names)
                init = functools.partial(meta["init"], axes=axes, shape=shape, cfg=cfg)
                values[field.name] = leaf(path, axes, shape, init)
        return cls(**values)

    return walk(cls, cfg, "", ())


def axes(cls: type[T], cfg: Any) -> T:
    return build(cls, cfg, lambda path, axes, shape, init: axes)


def shapes(cls: type[T], cfg: Any, dtype: Any = jnp.float32) -> T:
    return build(cls, cfg, lambda path, axes, shape, init: jax.ShapeDtypeStruct(shape, axes.dtype or dtype))


def init(cls: type[T], cfg: Any, key: Array) -> T:
    """Fresh weights in float32. Each depends only on the key and its own path, so that adding a weight
    leaves the others as they were."""
    if own := getattr(cls, "init", None):
        return own(cfg, key)

    def leaf(path: str, axes: Axes, shape: tuple[int, ...], initialise: Callable[[Array], Array]) -> Array:
        # A checksum of the path, not Python's hash, which changes with every process.
        return initialise(jax.random.fold_in(key, zlib.crc32(path.encode())))

    return build(cls, cfg, leaf)


def trained(axes: Any, frozen: frozenset[str] = frozenset()) -> Any:
    """For every weight, whether gradients move it: not if it is frozen, or moved by a rule of its own."""
    return jax.tree_util.tree_map_with_path(
        lambda path, its: dotted(path) not in frozen and its.rule is None and not its.still, axes
    )


@functools.cache
def count(cls: type, cfg: Any) -> int:
    """The number of parameters, from shapes alone."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes(cls, cfg)))


def named(tree: Any) -> Iterator[tuple[str, Any]]:
    """Every leaf with its dotted path, e.g. ("blocks.w_q", array)."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield dotted(path), leaf


def dotted(path: Any) -> str:
    return ".".join(str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path)


def at(params: Any, path: str) -> Any:
    """What stands at a dotted path, be it an array or several."""
    return functools.reduce(getattr, path.split("."), params)


def matching(key: str, patterns: str, names: Iterable[str]) -> frozenset[str]:
    """Those of the names that the patterns at a recipe's key, with commas between them, choose."""
    valid, found = sorted(names), set()
    for pattern in (part.strip() for part in patterns.split(",")):
        chosen = fnmatch.filter(valid, pattern)
        if not chosen:
            alike = difflib.get_close_matches(pattern, valid, n=3, cutoff=0.4) or valid[:3]
            raise UserError(
                f"{key}: found {pattern}, which is no weight of this model; expected {', '.join(alike)} or "
                f"another of its {len(valid)}"
            )
        found |= set(chosen)
    return frozenset(found)
