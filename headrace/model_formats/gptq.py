"""A matrix of whole numbers and scales, in the tensors that GPTQ's files have (AutoGPTQ, GPTQModel, vLLM)."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from headrace.errors import UserError
from headrace.low_precision import bitpack, grid

Array = jax.Array

# Of each linear layer, in the place of `weight`.
TENSORS = {"qweight": "qweight", "qzeros": "qzeros", "scales": "scales", "g_idx": "g_idx"}


@partial(jax.tree_util.register_dataclass, data_fields=list(TENSORS), meta_fields=["bits"])
@dataclass(frozen=True)
class GPTQMatrix:
    """`qweight` has the numbers of an output, from 0 and packed along its inputs: [inputs x bits / 32,
    outputs]. `qzeros` [groups, outputs x bits / 32] says which of them is 0, less 1, as AutoGPTQ had it at
    first; `scales` are [groups outputs], and `g_idx` is the group of each input."""

    qweight: Array
    qzeros: Array
    scales: Array
    g_idx: Array
    bits: int

    def to_dense(self) -> Array:
        """The matrix as files of Hugging Face have it, [outputs inputs], in float32."""
        values = bitpack.unpack(_words(self.qweight).T, self.bits, self.g_idx.shape[0])
        zeros = bitpack.unpack(_words(self.qzeros), self.bits, self.scales.shape[1]) + 1
        numbers = values.astype(jnp.int32) - zeros.astype(jnp.int32)[self.g_idx].T
        return numbers.astype(jnp.float32) * self.scales.astype(jnp.float32)[self.g_idx].T


def store(numbers: Array, scales: Array, bits: int, group: int) -> GPTQMatrix:
    """Of numbers [inputs outputs] of the grid and scales [groups outputs]."""
    inputs, outputs = numbers.shape
    for name, size in (("inputs", inputs), ("outputs", outputs)):
        if size * bits % bitpack.WORD_BITS:
            raise UserError(
                f"quantize: found a matrix of {size} {name}, expected a multiple of "
                f"{bitpack.numbers_per_period(bits)}, since in GPTQ's files {bits} bits of each fill whole words; vptq has no such bound"
            )
    zero = -grid.limits(bits)[0]
    zeros = jnp.full((scales.shape[0], outputs), zero - 1, jnp.uint32)
    return GPTQMatrix(
        qweight=_int32(bitpack.pack((numbers.astype(jnp.int32) + zero).T, bits)).T,
        qzeros=_int32(bitpack.pack(zeros, bits)),
        scales=scales.astype(jnp.float16),
        g_idx=(jnp.arange(inputs) // (group or inputs)).astype(jnp.int32),
        bits=bits,
    )


def settings(bits: int, group: int) -> dict[str, Any]:
    """What config.json says of it. Groups are of inputs in their own order, whatever order they were rounded
    in: `desc_act` is about the former."""
    return {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": bits,
        "group_size": group or -1,
        "sym": True,
        "desc_act": False,
        "static_groups": True,
        "lm_head": False,
    }


def read(tensors: dict[str, Any], bits: int) -> GPTQMatrix:
    return GPTQMatrix(**{name: tensors[name] for name in TENSORS}, bits=bits)


def size(inputs: int, outputs: int, *, bits: int, group: int) -> int:
    """Bits of a file that such a matrix takes: each weight's, a scale and a zero for each group, and to which
    an input belongs."""
    groups = grid.num_groups(inputs, group)
    return bits * inputs * outputs + groups * outputs * (16 + bits) + 32 * inputs


def _words(stored: Array) -> Array:
    return jax.lax.bitcast_convert_type(stored, jnp.uint32)


def _int32(words: Array) -> Array:
    return jax.lax.bitcast_convert_type(words, jnp.int32)
