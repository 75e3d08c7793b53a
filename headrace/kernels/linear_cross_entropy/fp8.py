"""The three matmuls of the head in fp8: hidden states and vocabulary matrix in e4m3, gradients of logits in
e5m2, whose range holds probabilities down to 2^-32 of the largest.

Hidden states and matrix have one scale each, from their largest number. The scale of the gradients follows
from those of the statistics, without a pass over the gradients, since a probability is at most 1."""

import jax.numpy as jnp

from headrace.kernels.linear_cross_entropy.stats import Array, LogitMatmul, LogitStats
from headrace.low_precision.dot import MatmulSpec, dot
from headrace.low_precision.fp8 import FORWARD, GRADIENT, round_tensor, round_up_to_power_of_two
from headrace.low_precision.support import has_fast_matmul
from headrace.nn.compile_target import device


class Fp8Logits(LogitMatmul):
    """Matmuls of the head with inputs in fp8."""

    def __init__(self, hidden: Array, unembed: Array) -> None:
        """Round hidden states [b s d] and the vocabulary's matrix [v d]."""
        self.hidden, hidden_scale = round_tensor(hidden, FORWARD, axis=(0, 1, 2))
        self.unembed, unembed_scale = round_tensor(unembed, FORWARD, axis=(0, 1))
        self.hidden_scale, self.unembed_scale = hidden_scale.reshape(()), unembed_scale.reshape(())
        self.dtype = hidden.dtype
        self.spec = MatmulSpec("fp8", has_fast_matmul(device(), "fp8"), num_input_axes=1)

    def raw_logits(self, x: Array) -> Array:
        """Multiply a chunk [c d] of `self.hidden` by the matrix."""
        # In the dtype of the hidden states: more bits would not undo the rounding to 8, and half the bytes
        # are written and read.
        logits = dot(self.spec, x, self.unembed, ((1,), (1,)), self.dtype)
        return logits.astype(jnp.float32) * (self.hidden_scale * self.unembed_scale)

    def gradients(self, x: Array, d_raw: Array, d_stats: LogitStats) -> tuple[Array, Array]:
        """Compute the gradients of a chunk of hidden states [c d] and of the matrix [v d]."""
        bound = jnp.max(abs(d_stats.lse) + abs(d_stats.target) + abs(d_stats.mean))
        scale = round_up_to_power_of_two(bound / float(jnp.finfo(GRADIENT).max))
        narrow = (d_raw * (1 / scale)).astype(GRADIENT)
        # `precise`, as for the layers' gradients (low_precision/fp8.py).
        d_x = dot(self.spec, narrow, self.unembed, ((1,), (0,)), self.dtype, precise=True)
        d_unembed = dot(self.spec, narrow, x, ((0,), (0,)), self.dtype, precise=True)
        d_x = d_x.astype(jnp.float32) * (scale * self.unembed_scale)
        return d_x, d_unembed.astype(jnp.float32) * (scale * self.hidden_scale)
