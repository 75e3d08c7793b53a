"""Models whose matrices are held otherwise than as plain arrays: rounded to few bits (rounding.py), or frozen
with adapters that learn beside them (adapters.py). Each of the two says which matrices it `takes`, how one is
`declared`, `made` of a plain one, and `whole` again. Or whole models with a copy of what they were
(reference.py). For any family; its own file knows nothing of it."""

import dataclasses
import functools
import zlib
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from headrace.model_wrappers import lora as adapters, frozen_reference as reference, qat as rounding
from headrace.nn import module
from headrace.nn.module import Array, Axes
from headrace.nn.split_matrix import Declared


def kind(cfg: Any) -> ModuleType | None:
    """How the matrices of a model section are held; None where they are plain."""
    if reference.has_reference(cfg):
        return reference
    if rounding.has_bits(cfg):
        return rounding
    return adapters if adapters.has_adapters(cfg) else None


def is_frozen(cfg: Any) -> bool:
    """Whether weights of the model that it starts from are kept, beside those that learn."""
    return rounding.is_low_rank(cfg) or adapters.has_adapters(cfg) or reference.has_reference(cfg)


def plain(cfg: Any) -> Any:
    """The same model with matrices as they are."""
    its = kind(cfg)
    return cfg if its is None else replace(cfg, **its.PLAIN)


@functools.cache
def family(found: Any, its: ModuleType) -> Any:
    """A model file whose matrices are held so. What is built is the family's own model."""
    if its is reference:
        return reference.family(found)

    class Model:
        build = staticmethod(partial(build, found.Model))
        init = staticmethod(partial(init, found.Model))

    flops = lambda cfg, sequence: its.flops(found, cfg, sequence)
    return SimpleNamespace(**vars(found) | dict(Model=Model, flops=flops))


def build(model: Any, cfg: Any, leaf: Any) -> Any:
    """As module.build, with the parts of each matrix that is held otherwise."""
    its, taken = _kind(cfg), _taken(model, cfg)

    def one(path: str, axes: Axes, shape: tuple[int, ...], initialise: Any) -> Any:
        if path not in taken:
            return leaf(path, its.beside(cfg, axes), shape, initialise)
        return its.declared(cfg, Declared(path, axes, shape, leaf), initialise)

    return module.build(model, cfg, one)


def init(model: Any, cfg: Any, key: Array) -> Any:
    return of_plain(model, cfg, module.init(model, cfg, key), key)


def without_frozen(cfg: Any, params: Any) -> Any:
    """Fresh weights of which those that will come from another model are nothing, and need no memory to be
    drawn: the others are what learns and does not begin at 0."""
    if not is_frozen(cfg):
        return params
    return jax.tree_util.tree_map_with_path(
        lambda path, w: w if is_drawn(module.dotted(path)) else jnp.zeros(w.shape, w.dtype), params
    )


def is_drawn(path: str) -> bool:
    """Whether that part of a frozen model is drawn by the run's seed."""
    return path.endswith(".down")


def of_plain(model: Any, cfg: Any, params: Any, key: Array) -> Any:
    """The weights with which training begins, of those of the plain model."""
    if reference.has_reference(cfg):
        return reference.of_plain(params)
    axes = module.axes(model, plain(cfg))
    return jax.tree_util.tree_map_with_path(
        lambda path, _, w: held(model, cfg, module.dotted(path), w, key), axes, params, is_leaf=_is_axes
    )


def held(model: Any, cfg: Any, name: str, w: Array, key: Array) -> Any:
    """One weight of the plain model as this one holds it when training begins."""
    its, axes = _kind(cfg), dict(module.named(module.axes(model, plain(cfg))))[name]
    if name not in _taken(model, cfg):
        return w.astype(its.beside(cfg, axes).dtype or w.dtype)
    return its.made(cfg, axes, w, jax.random.fold_in(key, zlib.crc32(name.encode())))


def to_plain(model: Any, cfg: Any, params: Any) -> Any:
    """The weights of the plain model: its matrices are what training saw."""
    if reference.has_reference(cfg):
        return params.policy
    its, taken = _kind(cfg), _taken(model, cfg)

    def one(path: Any, axes: Axes, w: Any) -> Any:
        return its.whole(cfg, axes, w) if module.dotted(path) in taken else w.astype("float32")

    axes = module.axes(model, plain(cfg))
    return jax.tree_util.tree_map_with_path(one, axes, params, is_leaf=_is_axes)


def merged(run: Any, model: Any) -> Any:
    """An opened run whose model is a plain one, of this class."""
    cfg = run.cfg.model
    if kind(cfg) is None:
        return run
    bare = dataclasses.replace(run.cfg, model=plain(cfg))
    return dataclasses.replace(run, cfg=bare, params=jax.jit(partial(to_plain, model, cfg))(run.params))


def _kind(cfg: Any) -> ModuleType:
    its = kind(cfg)
    assert its is not None
    return its


@functools.cache
def _taken(model: Any, cfg: Any) -> frozenset[str]:
    return _kind(cfg).takes(cfg, dict(module.named(module.axes(model, plain(cfg)))))


def _is_axes(node: Any) -> bool:
    return isinstance(node, Axes)
