"""Wrappers around the models of any family, and `load_family`, which applies those that a config asks for.

Recurrent depth (recurrent_depth.py) and a head for labels (classification_head.py) derive another model class
from the family's. LoRA (lora.py), quantization-aware training (qat.py) and a frozen copy for DPO
(frozen_reference.py) replace its weights by other pytrees, which act like them. Families know nothing of
either. The functions in here convert between a plain model's weights and the wrapped ones."""

import functools
import zlib
from dataclasses import dataclass, replace
from typing import Protocol

import jax
import jax.numpy as jnp

from headrace.model_wrappers import classification_head, frozen_reference, lora, qat, recurrent_depth
from headrace.models import Family, ModelConfig, load_base_family
from headrace.nn import module
from headrace.nn.module import Array, Axes, Initializer, MakeLeaf, ModelClass, PyTree
from headrace.nn.split_matrix import MatrixSpec


class WeightWrapper(Protocol):
    """A module that replaces matrices of the layers, one by one: lora.py and qat.py."""

    def __hash__(self) -> int: ...

    def applies(self, cfg: ModelConfig) -> bool:
        """Whether the config asks for this wrapper."""

    def unwrapped(self, cfg: ModelConfig) -> ModelConfig:
        """The config without this wrapper's keys."""

    def selected_weights(self, cfg: ModelConfig, axes: dict[str, Axes]) -> frozenset[str]:
        """Paths of the matrices that are wrapped, out of all weights."""

    def other_axes(self, cfg: ModelConfig, axes: Axes) -> Axes:
        """The axes of a weight that is not wrapped, e.g. frozen."""

    def declare(self, cfg: ModelConfig, matrix: MatrixSpec, init: Initializer) -> PyTree:
        """Make the leaves that a matrix is replaced by."""

    def from_dense(self, cfg: ModelConfig, axes: Axes, w: Array, key: Array) -> PyTree:
        """Wrap a matrix [layers ...], as it is before the first step."""

    def to_dense(self, cfg: ModelConfig, axes: Axes, w: PyTree) -> Array:
        """Merge a wrapped matrix [layers ...] back into one array."""

    def flops_per_token(self, family: Family, cfg: ModelConfig, sequence_length: int) -> float:
        """Forward and backward FLOPs of the wrapped model."""


MATRIX_WRAPPERS: tuple[WeightWrapper, ...] = (qat, lora)


def load_family(cfg: ModelConfig) -> Family:
    """Load the family that `model.use` names, wrapped as the config asks for."""
    family = load_base_family(cfg.use)
    if recurrent_depth.is_recurrent(cfg):
        family = recurrent_depth.wrap(family)
    if classification_head.has_labels(cfg):
        family = classification_head.wrap(family)
    if frozen_reference.has_reference(cfg):
        return frozen_reference.wrap(family)
    wrapper = matrix_wrapper(cfg)
    return family if wrapper is None else _wrap_matrices(family, wrapper)


def matrix_wrapper(cfg: ModelConfig) -> WeightWrapper | None:
    """The wrapper of the config's matrices; None if they are plain arrays."""
    return next((wrapper for wrapper in MATRIX_WRAPPERS if wrapper.applies(cfg)), None)


def has_wrapped_weights(cfg: ModelConfig) -> bool:
    """Whether the model's weights are another pytree than its family's."""
    return frozen_reference.has_reference(cfg) or matrix_wrapper(cfg) is not None


def has_frozen_base(cfg: ModelConfig) -> bool:
    """Whether the model keeps frozen weights of the model that it starts from."""
    return qat.is_low_rank(cfg) or lora.applies(cfg) or frozen_reference.has_reference(cfg)


def without_wrapper(cfg: ModelConfig) -> ModelConfig:
    """The config of the same model with plain weights."""
    if frozen_reference.has_reference(cfg):
        return frozen_reference.unwrapped(cfg)
    wrapper = matrix_wrapper(cfg)
    return cfg if wrapper is None else wrapper.unwrapped(cfg)


@dataclass(frozen=True, eq=False)
class WrappedModel:
    """The `Family.Model` of a model with wrapped matrices: `nn.module` declares and initializes by
    it."""

    plain: ModelClass
    wrapper: WeightWrapper

    def build(self, cfg: ModelConfig, leaf: MakeLeaf) -> PyTree:
        """Make the model with `leaf(...)` in place of every part of a weight (`nn.module.build`)."""
        selected = _selected_weights(self.plain, cfg)

        def make_leaf(path: str, axes: Axes, shape: tuple[int, ...], init: Initializer) -> PyTree:
            if path not in selected:
                return leaf(path, self.wrapper.other_axes(cfg, axes), shape, init)
            return self.wrapper.declare(cfg, MatrixSpec(path, axes, shape, leaf), init)

        return module.build(self.plain, cfg, make_leaf)

    def init(self, cfg: ModelConfig, key: Array) -> PyTree:
        """Initialize the weights (`nn.module.init`)."""
        return wrap_params(self.plain, cfg, module.init(self.plain, cfg, key), key)


@functools.cache
def _wrap_matrices(family: Family, wrapper: WeightWrapper) -> Family:
    flops = lambda cfg, sequence_length: wrapper.flops_per_token(family, cfg, sequence_length)
    model = WrappedModel(family.Model, wrapper)
    return replace(family, Model=model, flops_per_token=flops, init_on_host=None)


def drop_frozen_init(cfg: ModelConfig, params: PyTree) -> PyTree:
    """Replace initialized weights that `init_from` will overwrite by zeros, which need no memory to compute.

    Only weights that stay random (LoRA's `down`) are drawn."""
    if not has_frozen_base(cfg):
        return params
    return jax.tree_util.tree_map_with_path(
        lambda path, w: w if is_randomly_initialized(module.path_name(path)) else jnp.zeros(w.shape, w.dtype),
        params,
    )


def is_randomly_initialized(path: str) -> bool:
    """Whether this part of a wrapped weight is drawn by the run's seed and not made of the source's
    weights."""
    return path.endswith(".down")


def wrap_params(model: ModelClass, cfg: ModelConfig, params: PyTree, key: Array) -> PyTree:
    """Wrap the weights of a plain model, as they are before the first step."""
    if frozen_reference.has_reference(cfg):
        return frozen_reference.wrap_params(params)
    axes = module.axes(model, without_wrapper(cfg))
    return jax.tree_util.tree_map_with_path(
        lambda path, _, w: wrap_weight(model, cfg, module.path_name(path), w, key),
        axes,
        params,
        is_leaf=_is_axes,
    )


def wrap_weight(model: ModelClass, cfg: ModelConfig, name: str, w: Array, key: Array) -> PyTree:
    """Wrap one weight of a plain model, as it is before the first step."""
    wrapper = _require_wrapper(cfg)
    axes = dict(module.named_leaves(module.axes(model, without_wrapper(cfg))))[name]
    if name not in _selected_weights(model, cfg):
        return w.astype(wrapper.other_axes(cfg, axes).dtype or w.dtype)
    return wrapper.from_dense(cfg, axes, w, jax.random.fold_in(key, zlib.crc32(name.encode())))


def unwrap_params(model: ModelClass, cfg: ModelConfig, params: PyTree) -> PyTree:
    """The weights of the plain model that computes what the wrapped one does."""
    if frozen_reference.has_reference(cfg):
        return params.policy
    wrapper, selected = _require_wrapper(cfg), _selected_weights(model, cfg)

    def unwrap(path: tuple[object, ...], axes: Axes, w: PyTree) -> Array:
        is_wrapped = module.path_name(path) in selected
        return wrapper.to_dense(cfg, axes, w) if is_wrapped else w.astype("float32")

    axes = module.axes(model, without_wrapper(cfg))
    return jax.tree_util.tree_map_with_path(unwrap, axes, params, is_leaf=_is_axes)


def _require_wrapper(cfg: ModelConfig) -> WeightWrapper:
    wrapper = matrix_wrapper(cfg)
    assert wrapper is not None
    return wrapper


@functools.cache
def _selected_weights(model: ModelClass, cfg: ModelConfig) -> frozenset[str]:
    plain_axes = dict(module.named_leaves(module.axes(model, without_wrapper(cfg))))
    return _require_wrapper(cfg).selected_weights(cfg, plain_axes)


def _is_axes(node: object) -> bool:
    return isinstance(node, Axes)
