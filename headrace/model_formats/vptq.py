"""A matrix as vectors from codebooks, in the tensors of VPTQ's files (arXiv 2409.17066).

A vector is of several outputs of one input. Inputs lie in the order in which they were rounded; the first of
them, the outliers, may have a codebook of their own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.low_precision import bitpack

Array = jax.Array

# Fields of `VPTQMatrix` -> the tensors of a linear layer that replace its `weight`.
TENSORS = {
    "indices": "indices",
    "centroids": "centroids.weight",
    "residual": "res_centroids.weight",
    "outlier_indices": "outlier_indices",
    "outlier_centroids": "outlier_centroids.weight",
    "order": "perm",
}


@dataclass(frozen=True)
class VPTQShape:
    """The sizes of a matrix, its vectors and its codebooks."""

    inputs: int
    outputs: int
    vector_length: int  # outputs
    index_bits: int  # of an index into the codebook, which has 2 ** index_bits vectors
    residual_bits: int = 0  # of an index into the codebook for what the first leaves; 0: none
    outliers: int = 0  # inputs
    outlier_vector_length: int = 0
    outlier_index_bits: int = 0

    @property
    def stored_bits(self) -> int:
        """The bits that a matrix takes in a file: indices, in whole words for each row of vectors, codebooks
        of 16 bits, and the order of the inputs."""
        rows = -(-self.outputs // self.vector_length)
        words = bitpack.num_words(self.inputs - self.outliers, self.index_bits + self.residual_bits)
        total = 32 * rows * words + 16 * self.vector_length * 2**self.index_bits + 16 * self.inputs
        total += 16 * self.vector_length * 2**self.residual_bits if self.residual_bits else 0
        if self.outliers:
            total += 16 * -(-self.outputs // self.outlier_vector_length) * self.outliers
            total += 16 * self.outlier_vector_length * 2**self.outlier_index_bits
        return total


@partial(jax.tree_util.register_dataclass, data_fields=list(TENSORS), meta_fields=["shape"])
@dataclass(frozen=True)
class VPTQMatrix:
    """A linear layer's matrix [outputs inputs] as VPTQ stores it."""

    indices: Array  # [1, vectors of an input, words], packed along the inputs, of both codebooks
    centroids: Array  # [1, vectors x vector_length]
    residual: Array | None  # the codebook for what the first leaves
    outlier_indices: Array | None  # [1, vectors of an input, outliers]
    outlier_centroids: Array | None
    order: Array  # [inputs]: the input that each column belongs to
    shape: VPTQShape

    def to_dense(self) -> Array:
        """Make the dense matrix, [outputs inputs] as in Hugging Face's files, in float32."""
        shape = self.shape
        words = jax.lax.bitcast_convert_type(self.indices[0], jnp.uint32)
        indices = bitpack.unpack(words, shape.index_bits + shape.residual_bits, shape.inputs - shape.outliers)
        dense = _look_up(self.centroids, indices & jnp.uint32(2**shape.index_bits - 1), shape.vector_length)
        if self.residual is not None:
            residual_indices = indices >> jnp.uint32(shape.index_bits)
            dense = dense + _look_up(self.residual, residual_indices, shape.vector_length)
        dense = dense[: shape.outputs]
        if self.outlier_indices is not None and self.outlier_centroids is not None:
            outlier_indices = jax.lax.bitcast_convert_type(self.outlier_indices[0], jnp.uint16)
            outliers = _look_up(self.outlier_centroids, outlier_indices, shape.outlier_vector_length)
            dense = jnp.concatenate([outliers[: shape.outputs], dense], axis=1)
        order = jax.lax.bitcast_convert_type(self.order, jnp.uint16).astype(jnp.int32)
        return jnp.zeros_like(dense).at[:, order].set(dense, unique_indices=True)


def _look_up(codebook: Array, indices: Array, vector_length: int) -> Array:
    """Replace indices [vectors of an input, inputs] by their vectors: [outputs inputs]."""
    vectors = codebook.reshape(-1, vector_length).astype(jnp.float32)[indices.astype(jnp.int32)]
    return vectors.transpose(0, 2, 1).reshape(-1, indices.shape[1])


def pack_matrix(
    indices: Sequence[Array],
    codebooks: Sequence[Array],
    outliers: tuple[Array, Array] | None,
    order: Array,
    shape: VPTQShape,
) -> VPTQMatrix:
    """Pack a matrix that was quantized to vectors.

    `indices` [inputs, vectors of an input] and `codebooks` are those of the vectors, and, if there is a
    second codebook, of what the first leaves. `outliers` has the indices and the codebook of the outliers."""
    packed = indices[0].astype(jnp.uint32)
    for residual_indices in indices[1:]:
        packed = packed | residual_indices.astype(jnp.uint32) << jnp.uint32(shape.index_bits)
    stored_codebooks = [codebook.astype(jnp.float16).reshape(1, -1) for codebook in codebooks]
    words = bitpack.pack(packed.T, shape.index_bits + shape.residual_bits)
    return VPTQMatrix(
        indices=jax.lax.bitcast_convert_type(words, jnp.int32)[None],
        centroids=stored_codebooks[0],
        residual=stored_codebooks[1] if stored_codebooks[1:] else None,
        outlier_indices=None if outliers is None else _to_int16(outliers[0].T)[None],
        outlier_centroids=None if outliers is None else outliers[1].astype(jnp.float16).reshape(1, -1),
        order=_to_int16(order),
        shape=shape,
    )


def quantization_config(layers: Mapping[str, VPTQShape]) -> dict[str, Any]:
    """The `quantization_config` of config.json, from the shapes of linear layers by their names."""
    return {
        "quant_method": "vptq",
        "config_for_layers": {name: _layer_config(shape) for name, shape in layers.items()},
    }


def _layer_config(shape: VPTQShape) -> dict[str, Any]:
    none = -1
    return {
        "bias": False,  # unless the model has one
        "enable_norm": False,
        "enable_perm": True,
        "group_num": 1,
        "group_size": shape.inputs - shape.outliers,
        "in_features": shape.inputs,
        "out_features": shape.outputs,
        "indices_as_float": False,
        "is_indice_packed": True,
        "vector_lens": [shape.outlier_vector_length or none, shape.vector_length],
        "num_centroids": [2**shape.outlier_index_bits if shape.outliers else none, 2**shape.index_bits],
        "num_res_centroids": [none, 2**shape.residual_bits if shape.residual_bits else none],
        "outlier_size": shape.outliers,
    }


def read_shape(layer_config: Mapping[str, Any]) -> VPTQShape:
    """Read the shape of a matrix from the entry of its layer in `config_for_layers`."""
    to_bits = lambda count: max(int(count), 1).bit_length() - 1
    outliers = int(layer_config["outlier_size"])
    return VPTQShape(
        inputs=layer_config["in_features"],
        outputs=layer_config["out_features"],
        vector_length=layer_config["vector_lens"][1],
        index_bits=to_bits(layer_config["num_centroids"][1]),
        residual_bits=to_bits(layer_config["num_res_centroids"][1]),
        outliers=outliers,
        outlier_vector_length=layer_config["vector_lens"][0] if outliers else 0,
        outlier_index_bits=to_bits(layer_config["num_centroids"][0]) if outliers else 0,
    )


def from_tensors(tensors: Mapping[str, np.ndarray], shape: VPTQShape) -> VPTQMatrix:
    """Make a matrix, in host memory, of the tensors of a file by the names in TENSORS."""
    fields: dict[str, Any] = {name: tensors.get(hf_name) for name, hf_name in TENSORS.items()}
    return VPTQMatrix(**fields, shape=shape)


def _to_int16(integers: Array) -> Array:
    return jax.lax.bitcast_convert_type(integers.astype(jnp.uint16), jnp.int16)
