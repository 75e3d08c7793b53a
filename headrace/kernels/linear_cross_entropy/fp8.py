"""The head's three products in fp8: hidden states and the vocabulary's matrix in e4m3, gradients of logits in
e5m2, whose range holds probabilities down to 2^-32 of the largest. Hidden states and matrix have one scale
each, by their largest number; that of the gradients is known without looking for it, since a probability is
at most 1."""

import jax.numpy as jnp

from headrace.kernels.linear_cross_entropy.stats import Array, LogitMatmul, Stats
from headrace.low_precision.dot import MatmulSpec, dot
from headrace.low_precision.fp8 import FORWARD, GRADIENT, power_of_two, round_tensor
from headrace.low_precision.support import has_fast_matmul
from headrace.nn.compile_target import device


class Fp8Logits(LogitMatmul):
    def __init__(self, hidden: Array, matrix: Array) -> None:
        self.rows, scale = round_tensor(hidden, FORWARD, axis=(0, 1, 2))
        self.matrix, matrix_scale = round_tensor(matrix, FORWARD, axis=(0, 1))
        self.scale, self.matrix_scale = scale.reshape(()), matrix_scale.reshape(())
        self.dtype = hidden.dtype
        self.how = MatmulSpec("fp8", has_fast_matmul(device(), "fp8"), num_input_axes=1)

    def scores(self, x: Array) -> Array:
        # In the hidden states' dtype: what was rounded to 8 bits is not made better by more of them, and half
        # the bytes are written and read.
        made = dot(self.how, x, self.matrix, ((1,), (1,)), self.dtype)
        return made.astype(jnp.float32) * (self.scale * self.matrix_scale)

    def gradients(self, x: Array, d: Array, d_stats: Stats) -> tuple[Array, Array]:
        most = jnp.max(abs(d_stats.lse) + abs(d_stats.target) + abs(d_stats.mean))
        scale = power_of_two(most / float(jnp.finfo(GRADIENT).max))
        narrow = (d * (1 / scale)).astype(GRADIENT)
        # `precise`, as for the layers' gradients (low_precision/fp8.py).
        d_x = dot(self.how, narrow, self.matrix, ((1,), (0,)), self.dtype, precise=True)
        d_matrix = dot(self.how, narrow, x, ((0,), (0,)), self.dtype, precise=True)
        widened = d_x.astype(jnp.float32) * (scale * self.matrix_scale)
        return widened, d_matrix.astype(jnp.float32) * (scale * self.scale)
