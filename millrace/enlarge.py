"""The first weights of a model from those of a smaller one of its family: along every axis they are repeated
to both sides of their middle, and layers are repeated in place, as ModernBERT-large was begun (arXiv
2412.13663, after Phi and Gopher, arXiv 2112.11446)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from millrace import mesh, module, recipe
from millrace.checkpoint import Checkpoints
from millrace.errors import UserError
from millrace.module import Array, Axes
from millrace.objective import file


def check(run: str, model: Any) -> Any:
    """The model section of a run folder that `model` can start from; UserError where it cannot."""
    small, family = recipe.load_run(run).model, file("models", model)
    if small.use != model.use:
        raise UserError(f"start: {run} holds a {small.use}, expected a {model.use}")
    shapes, larger = (dict(module.named(module.shapes(family.Model, cfg))) for cfg in (small, model))
    other = sorted(shapes.keys() ^ larger.keys())
    if other:
        raise UserError(f"start: {other[0]} is in one alone of {run} and this recipe's model")
    for path, axes in module.named(module.axes(family.Model, small)):
        for name, old, new in zip(axes.names, shapes[path].shape, larger[path].shape, strict=True):
            if name == "vocab" and old != new:
                raise UserError(f"start: {run} has a vocabulary of {old}, expected one of {new}")
            if new < old:
                raise UserError(f"start: {path} is {old} along {name} in {run}, expected at most {new}")
    return small


def start(run: str, model: Any, target: Any, devices: Mesh) -> Any:
    """Weights for `model`, laid out as `target` says, from the newest checkpoint of a run folder."""
    small, family = check(run, model), file("models", model)
    shapes, axes = module.shapes(family.Model, small), module.axes(family.Model, small)
    checkpoints = Checkpoints(run)
    try:
        step = checkpoints.latest()
        if step is None:
            raise UserError(f"start: {run}: no checkpoint in it yet")
        homes = mesh.shardings(axes, shapes, devices)
        wanted = jax.tree.map(
            lambda leaf, home: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=home), shapes, homes
        )
        params = checkpoints.restore_params(step, wanted)
    finally:
        checkpoints.close()
    depths = small.layers, model.layers

    def all_of_them(params: Any) -> Any:
        one = lambda its, weight, large: tiled(weight, its, large.shape, depths)
        return jax.tree.map(one, axes, params, target, is_leaf=lambda node: isinstance(node, Axes))

    return jax.jit(all_of_them, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, target))(params)


def tiled(weight: Array, axes: Axes, shape: tuple[int, ...], depths: tuple[int, int]) -> Array:
    """One weight at its larger shape; `depths` are the layers of both models."""
    for axis, (old, new) in enumerate(zip(weight.shape, shape, strict=True)):
        if axis < axes.stacked:
            # A stack may lack the first layers, which have no such weight.
            layers = np.arange(depths[1] - new, depths[1])
            found = np.rint(layers * depths[0] / depths[1]).astype(int) - (depths[0] - old)
            source = np.clip(found, 0, old - 1)
        else:
            source = (np.arange(new) - (new - old) // 2) % old
        if old != new:
            weight = jnp.take(weight, source, axis=axis)
    return weight
