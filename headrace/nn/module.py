"""Models as frozen dataclasses of arrays.

A weight is declared once, by the names of its axes and its initialization. The config has the size of each
axis, nn/sharding.py the mesh axes that split it."""

import dataclasses
import difflib
import fnmatch
import functools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, dataclass_transform, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from headrace.errors import UserError

Array = jax.Array
PyTree = Any  # a tree of arrays: weights, gradients, a cache
Condition: TypeAlias = Callable[[Any], bool]  # config -> whether the model has a weight
WeightInit = Callable[[Array, "Axes", tuple[int, ...], Any], Array]  # (key, axes, shape, config) -> weight
Initializer = Callable[[Array], Array]  # key -> weight
MakeLeaf = Callable[[str, "Axes", tuple[int, ...], Initializer], Any]  # (path, axes, shape, initializer)
T = TypeVar("T")


class WeightRounding(Protocol):
    """A quantization grid that a weight is rounded to (model_wrappers/qat.py)."""

    def round(self, w: Array) -> Array:
        """Round a weight [layers ...], with straight-through gradients."""


@runtime_checkable
class CustomModel(Protocol):
    """A model whose weights are not the fields of a module class: wrapped matrices, torch modules."""

    def __hash__(self) -> int: ...

    def build(self, cfg: Any, leaf: MakeLeaf) -> PyTree:
        """Like `build` of this module."""

    def init(self, cfg: Any, key: Array) -> PyTree:
        """Like `init` of this module."""


ModelClass = type | CustomModel


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axis names of one weight, and how it is used and updated."""

    names: tuple[str, ...]
    stacked: int = 0  # leading axes that count layers; the others are the weight's own
    num_input_axes: int = 1  # own axes that a product with an activation sums over; 0 for a bias
    keep_float32: bool = False  # multiplies activations in float32
    update_rule: "UpdateRule | None" = None  # replaces the optimizer
    unstacked: bool = False  # of a layer that is not in a stack
    frozen: bool = False  # never updated
    lr_scale: float = 1.0  # factor of the learning rate
    qat_grid: WeightRounding | None = None  # grid that every use of the weight rounds it to
    dtype: Any = None  # None: float32

    @property
    def weight_axes(self) -> tuple[str, ...]:
        """The names without those of stacked axes."""
        return self.names[self.stacked :]

    @property
    def is_matrix(self) -> bool:
        """Whether a product with an activation sums over some of the weight's axes, but not over all."""
        return 0 < self.num_input_axes < len(self.weight_axes)

    @property
    def is_hidden_matrix(self) -> bool:
        """Whether it is a matrix inside the layers, such as Muon orthogonalizes; embeddings and heads are
        not. Where a layer has a stack of its own, of experts, all matrices of the stack are."""
        return self.is_matrix and (self.stacked > 0 or self.unstacked)


@dataclasses.dataclass(frozen=True)
class UpdateRule:
    """The update of a weight that is not trained by gradients, such as an MoE router's bias."""

    name: str  # of the logged metric
    move: Callable[[Any, Array, Array], Array]  # (model config, weight, "gradient") -> updated weight
    measure: Callable[[Array], Array]  # "gradient" -> the logged metric


def normal(std: float) -> WeightInit:
    """Initialize from a normal distribution."""
    return lambda key, axes, shape, cfg: std * jax.random.normal(key, shape, jnp.float32)


def residual_normal(std: float) -> WeightInit:
    """Initialize a matrix that writes to the residual stream: normal, with std / sqrt(2 * layers), since two
    matrices per layer do."""
    return lambda key, axes, shape, cfg: (
        std / math.sqrt(2 * cfg.layers) * jax.random.normal(key, shape, jnp.float32)
    )


def truncated(std: float) -> WeightInit:
    """Initialize from a normal distribution truncated at two standard deviations."""
    return lambda key, axes, shape, cfg: std * jax.random.truncated_normal(key, -2, 2, shape, jnp.float32)


def residual_truncated(std: float) -> WeightInit:
    """Like `truncated`, with std / sqrt(2 * layers)."""
    return lambda key, axes, shape, cfg: truncated(std / math.sqrt(2 * cfg.layers))(key, axes, shape, cfg)


def ones(key: Array, axes: Axes, shape: tuple[int, ...], cfg: object) -> Array:
    """Initialize with ones."""
    return jnp.ones(shape, jnp.float32)


def zeros(key: Array, axes: Axes, shape: tuple[int, ...], cfg: object) -> Array:
    """Initialize with zeros."""
    return jnp.zeros(shape, jnp.float32)


NORMAL = normal(0.02)


def weight(
    *axes: str,
    init: WeightInit = NORMAL,
    num_input_axes: int = 1,
    keep_float32: bool = False,
    update_rule: UpdateRule | None = None,
    when: Condition = lambda cfg: True,
) -> Any:
    """Declare a weight of a module.

    An axis has the size that the config has under its name; `state:embed` is an axis `state` of the size of
    `embed`. If `when(cfg)` is false the field is None, as for a tied head."""
    return dataclasses.field(
        metadata=dict(axes=axes, init=init, when=when, more=(num_input_axes, keep_float32, update_rule))
    )


def stack(cls: type[T], axis: str = "layers", when: Condition = lambda cfg: True) -> Any:
    """Declare `cfg.<axis>` copies of a module, whose weights are stacked along a leading axis."""
    return dataclasses.field(metadata=dict(stack=cls, axis=axis, when=when))


def nested(cls: Callable[[], type], sized: Callable[[Any], Any], when: Condition) -> Any:
    """Declare a module inside another. Its config is `sized(cfg)`."""
    return dataclasses.field(metadata=dict(nested=cls, sized=sized, when=when))


@dataclass_transform(frozen_default=True)
def module(cls: type[T]) -> type[T]:
    """Make the class a frozen dataclass and a pytree."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


def build(cls: ModelClass, cfg: object, leaf: MakeLeaf) -> PyTree:
    """Make an instance of `cls` with `leaf(path, axes, shape, initializer)` in place of every weight."""
    if isinstance(cls, CustomModel):
        return cls.build(cfg, leaf)
    return _build_module(cls, cfg, leaf, "", ())


def _build_module(
    cls: Any, cfg: object, leaf: MakeLeaf, prefix: str, stacked_axes: tuple[str, ...]
) -> PyTree:
    values: dict[str, PyTree] = {}
    for field in dataclasses.fields(cls):
        meta, path = field.metadata, prefix + field.name
        if not meta["when"](cfg):
            values[field.name] = None
        elif "stack" in meta:
            axes = (*stacked_axes, meta["axis"])
            values[field.name] = _build_module(meta["stack"], cfg, leaf, path + ".", axes)
        elif "nested" in meta:
            values[field.name] = _build_module(
                meta["nested"](), meta["sized"](cfg), leaf, path + ".", stacked_axes
            )
        else:
            values[field.name] = _build_weight(meta, cfg, leaf, path, stacked_axes)
    return cls(**values)


def _build_weight(
    meta: Mapping[str, Any], cfg: object, leaf: MakeLeaf, path: str, stacked_axes: tuple[str, ...]
) -> PyTree:
    names = stacked_axes + meta["axes"]
    axes = Axes(tuple(name.split(":")[0] for name in names), len(stacked_axes), *meta["more"])
    shape = tuple(getattr(cfg, name.split(":")[-1]) for name in names)
    return leaf(path, axes, shape, functools.partial(meta["init"], axes=axes, shape=shape, cfg=cfg))


def axes(cls: ModelClass, cfg: object) -> PyTree:
    """The `Axes` of every weight, in the tree of the model."""
    return build(cls, cfg, lambda path, axes, shape, init: axes)


def shapes(cls: ModelClass, cfg: object, dtype: DTypeLike = jnp.float32) -> PyTree:
    """The shape and dtype of every weight, in the tree of the model."""
    return build(cls, cfg, lambda path, axes, shape, init: jax.ShapeDtypeStruct(shape, axes.dtype or dtype))


def init(cls: ModelClass, cfg: object, key: Array) -> PyTree:
    """Initialize all weights in float32.

    Each depends only on the key and its own path, so that adding a weight does not change the others."""
    if isinstance(cls, CustomModel):
        return cls.init(cfg, key)

    def leaf(path: str, axes: Axes, shape: tuple[int, ...], init: Initializer) -> Array:
        # A checksum of the path, not Python's hash, which changes with every process.
        return init(jax.random.fold_in(key, zlib.crc32(path.encode())))

    return build(cls, cfg, leaf)


def trainable_mask(axes: PyTree, frozen: frozenset[str] = frozenset()) -> PyTree:
    """A tree of bools: True for weights that gradients update, i.e. that are neither frozen nor have an
    update rule."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: path_name(path) not in frozen and leaf.update_rule is None and not leaf.frozen,
        axes,
    )


@functools.cache
def count(cls: ModelClass, cfg: object) -> int:
    """The number of parameters, from shapes only."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes(cls, cfg)))


def named_leaves(tree: PyTree) -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its dotted path, e.g. ("blocks.w_q", array)."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield path_name(path), leaf


def path_name(path: Sequence[object]) -> str:
    """The dotted path of a leaf, from the path that JAX gives for it."""
    return ".".join(_key_name(key) for key in path)


def _key_name(key: object) -> str:
    match key:
        case jax.tree_util.GetAttrKey(name):
            return name
        case jax.tree_util.DictKey(name) | jax.tree_util.FlattenedIndexKey(name):
            return str(name)
        case jax.tree_util.SequenceKey(index):
            return str(index)
    return str(key)


def get_path(params: PyTree, path: str) -> PyTree:
    """The subtree at a dotted path: an array or several."""
    return functools.reduce(getattr, path.split("."), params)


def select_weights(key: str, patterns: str, names: Iterable[str]) -> frozenset[str]:
    """The names that match one of the comma-separated patterns at the recipe's `key`.

    Raises UserError for a pattern that matches none."""
    valid, selected = sorted(names), set()
    for pattern in (part.strip() for part in patterns.split(",")):
        matches = fnmatch.filter(valid, pattern)
        if not matches:
            similar = difflib.get_close_matches(pattern, valid, n=3, cutoff=0.4) or valid[:3]
            raise UserError(
                f"{key}: found {pattern}, which matches no weight of this model; expected "
                f"{', '.join(similar)} or another of its {len(valid)}"
            )
        selected |= set(matches)
    return frozenset(selected)
