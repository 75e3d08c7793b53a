"""Cast of a model's weights for one step: to the compute dtype, to 8 bits, or to a quantization grid."""

from dataclasses import replace

import jax

from headrace.low_precision.weight import LowPrecisionWeight, round_weight
from headrace.nn.module import Axes, PyTree
from headrace.nn.stack import Execution


def cast(params: PyTree, axes: PyTree, exec_opts: Execution) -> PyTree:
    """Cast the layers' matrices to the compute dtype, or round them to `exec_opts.matmul`'s format.

    Done once a step, however many microbatches it has, and before any weight is gathered from other devices,
    so that half or a quarter of the bytes are sent. Norms and embeddings keep their dtype: their gradients
    are sums over all tokens, and a sum must not be computed in bfloat16."""

    def cast_weight(axes: Axes, w: PyTree) -> PyTree:
        if axes.qat_grid is not None:
            return axes.qat_grid.round(w).astype(exec_opts.dtype)
        is_wrapped = not isinstance(w, jax.Array)  # rounded already
        if axes.keep_float32 or not axes.is_hidden_matrix or is_wrapped:
            return w
        if exec_opts.matmul == "compute":
            return w.astype(exec_opts.dtype)
        return round_weight(
            w, axes, dtype=exec_opts.dtype, format=exec_opts.matmul, native=exec_opts.native_matmul
        )

    return jax.tree.map(cast_weight, axes, params, is_leaf=lambda node: isinstance(node, Axes))


def stop_frozen_gradients(model: PyTree, axes: PyTree, is_frozen: PyTree) -> PyTree:
    """Stop the gradients of a cast model's frozen weights, and those of 8-bit values.

    A trained weight in 8 bits gets its gradient through the copy in the compute dtype that it was made of."""

    def stop_gradient(axes: Axes, frozen: bool, w: PyTree) -> PyTree:
        if frozen:
            return jax.lax.stop_gradient(w)
        if isinstance(w, LowPrecisionWeight):
            return replace(w, values=jax.lax.stop_gradient(w.values), scale=jax.lax.stop_gradient(w.scale))
        return w

    return jax.tree.map(stop_gradient, axes, is_frozen, model, is_leaf=lambda node: isinstance(node, Axes))
