"""A matrix as integers and scales, in the tensors of GPTQ's files (AutoGPTQ, GPTQModel, vLLM)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.errors import UserError
from headrace.low_precision import bitpack, grid

Array = jax.Array

# Fields of `GPTQMatrix` -> the tensors of a linear layer that replace its `weight`.
TENSORS = {"qweight": "qweight", "qzeros": "qzeros", "scales": "scales", "g_idx": "g_idx"}


@partial(jax.tree_util.register_dataclass, data_fields=list(TENSORS), meta_fields=["bits"])
@dataclass(frozen=True)
class GPTQMatrix:
    """A linear layer's matrix [outputs inputs] as GPTQ stores it."""

    qweight: Array  # [inputs x bits / 32, outputs]: integers from 0, packed along the inputs of an output
    qzeros: Array  # [groups, outputs x bits / 32]: the integer that is 0, less 1, as AutoGPTQ had it at first
    scales: Array  # [groups outputs]
    g_idx: Array  # [inputs]: the group of each input
    bits: int

    def to_dense(self) -> Array:
        """Make the dense matrix, [outputs inputs] as in Hugging Face's files, in float32."""
        values = bitpack.unpack(_to_words(self.qweight).T, self.bits, self.g_idx.shape[0])
        zeros = bitpack.unpack(_to_words(self.qzeros), self.bits, self.scales.shape[1]) + 1
        integers = values.astype(jnp.int32) - zeros.astype(jnp.int32)[self.g_idx].T
        return integers.astype(jnp.float32) * self.scales.astype(jnp.float32)[self.g_idx].T


@partial(jax.jit, static_argnames=("bits", "group_size"))
def pack_matrix(integers: Array, scales: Array, bits: int, group_size: int) -> GPTQMatrix:
    """Pack integers of the grid [inputs outputs] and their scales [groups outputs].

    Raises UserError if the matrix has a size that files of this format cannot have."""
    inputs, outputs = integers.shape
    for name, size in (("inputs", inputs), ("outputs", outputs)):
        if size * bits % bitpack.WORD_BITS:
            raise UserError(
                f"quantize: found a matrix of {size} {name}, expected a multiple of "
                f"{bitpack.numbers_per_period(bits)}, since in GPTQ's files {bits} bits of each fill whole "
                "words; vptq has no such limit"
            )
    zero = -grid.limits(bits)[0]
    zeros = jnp.full((scales.shape[0], outputs), zero - 1, jnp.uint32)
    return GPTQMatrix(
        qweight=_to_int32(bitpack.pack((integers.astype(jnp.int32) + zero).T, bits)).T,
        qzeros=_to_int32(bitpack.pack(zeros, bits)),
        scales=scales.astype(jnp.float16),
        g_idx=(jnp.arange(inputs) // (group_size or inputs)).astype(jnp.int32),
        bits=bits,
    )


def quantization_config(bits: int, group_size: int) -> dict[str, Any]:
    """The `quantization_config` of config.json.

    Groups are of inputs in their stored order, whatever order they were rounded in: `desc_act` is about the
    former."""
    return {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": bits,
        "group_size": group_size or -1,
        "sym": True,
        "desc_act": False,
        "static_groups": True,
        "lm_head": False,
    }


def from_tensors(tensors: Mapping[str, np.ndarray], bits: int) -> GPTQMatrix:
    """Make a matrix, in host memory, of the tensors of a file by the names in TENSORS."""
    fields: dict[str, Any] = {name: tensors[hf_name] for name, hf_name in TENSORS.items()}
    return GPTQMatrix(**fields, bits=bits)


def _to_words(integers: Array) -> Array:
    return jax.lax.bitcast_convert_type(integers, jnp.uint32)


def _to_int32(words: Array) -> Array:
    return jax.lax.bitcast_convert_type(words, jnp.int32)
