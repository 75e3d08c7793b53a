"""A matrix of vectors from codebooks, in the tensors that VPTQ's files have and the package vptq reads (arXiv
2409.17066). A vector is of some outputs of one input; inputs lie in the order in which they were rounded; the
first of them, the outliers, may have a codebook of their own."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from headrace.low_precision import bitpack

Array = jax.Array

# Of each linear layer, in the place of `weight`.
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
    """`index` bits of an index are of the codebook, `residual` of the one for what that leaves."""

    inputs: int
    outputs: int
    vector: int
    index: int
    residual: int = 0
    outliers: int = 0  # inputs
    outlier_vector: int = 0
    outlier_index: int = 0

    @property
    def bits(self) -> int:
        """Of a file that such a matrix takes: indices, in whole words for each row of vectors, codebooks of
        16 bits, and the order of the inputs."""
        rows = -(-self.outputs // self.vector)
        words = bitpack.num_words(self.inputs - self.outliers, self.index + self.residual)
        total = 32 * rows * words + 16 * self.vector * 2**self.index + 16 * self.inputs
        total += 16 * self.vector * 2**self.residual if self.residual else 0
        if self.outliers:
            total += 16 * -(-self.outputs // self.outlier_vector) * self.outliers
            total += 16 * self.outlier_vector * 2**self.outlier_index
        return total


@partial(jax.tree_util.register_dataclass, data_fields=list(TENSORS), meta_fields=["sizes"])
@dataclass(frozen=True)
class VPTQMatrix:
    """`indices` are [1, vectors of an input, words], packed along the inputs; what is not there is None."""

    indices: Array
    centroids: Array
    residual: Array | None
    outlier_indices: Array | None
    outlier_centroids: Array | None
    order: Array
    sizes: VPTQShape

    def to_dense(self) -> Array:
        """The matrix as files of Hugging Face have it, [outputs inputs], in float32."""
        sizes = self.sizes
        words = jax.lax.bitcast_convert_type(self.indices[0], jnp.uint32)
        both = bitpack.unpack(words, sizes.index + sizes.residual, sizes.inputs - sizes.outliers)
        made = _gathered(self.centroids, both & jnp.uint32(2**sizes.index - 1), sizes.vector)
        if self.residual is not None:
            made = made + _gathered(self.residual, both >> jnp.uint32(sizes.index), sizes.vector)
        made = made[: sizes.outputs]
        if self.outlier_indices is not None and self.outlier_centroids is not None:
            places = jax.lax.bitcast_convert_type(self.outlier_indices[0], jnp.uint16)
            first = _gathered(self.outlier_centroids, places, sizes.outlier_vector)
            made = jnp.concatenate([first[: sizes.outputs], made], axis=1)
        order = jax.lax.bitcast_convert_type(self.order, jnp.uint16).astype(jnp.int32)
        return jnp.zeros_like(made).at[:, order].set(made, unique_indices=True)


def _gathered(codebook: Array, indices: Array, vector: int) -> Array:
    """[vectors of an input, inputs] of indices to [outputs inputs]."""
    found = codebook.reshape(-1, vector).astype(jnp.float32)[indices.astype(jnp.int32)]
    return found.transpose(0, 2, 1).reshape(-1, indices.shape[1])


def store(
    indices: list[Array],
    codebooks: list[Array],
    outlier: tuple[Array, Array] | None,
    order: Array,
    sizes: VPTQShape,
) -> VPTQMatrix:
    """Of indices [inputs, vectors of an input] into the codebook, and into that of what it leaves if there is
    one; and the outliers' indices and codebook."""
    both = indices[0].astype(jnp.uint32)
    for more in indices[1:]:
        both = both | more.astype(jnp.uint32) << jnp.uint32(sizes.index)
    halves = [book.astype(jnp.float16).reshape(1, -1) for book in codebooks]
    return VPTQMatrix(
        indices=jax.lax.bitcast_convert_type(bitpack.pack(both.T, sizes.index + sizes.residual), jnp.int32)[
            None
        ],
        centroids=halves[0],
        residual=halves[1] if halves[1:] else None,
        outlier_indices=None if outlier is None else _int16(outlier[0].T)[None],
        outlier_centroids=None if outlier is None else outlier[1].astype(jnp.float16).reshape(1, -1),
        order=_int16(order),
        sizes=sizes,
    )


def settings(layers: dict[str, VPTQShape]) -> dict[str, Any]:
    """What config.json says of it, by the names of linear layers."""
    return {
        "quant_method": "vptq",
        "config_for_layers": {name: _layer(sizes) for name, sizes in layers.items()},
    }


def _layer(sizes: VPTQShape) -> dict[str, Any]:
    none = -1
    return {
        "bias": False,  # unless the model has one
        "enable_norm": False,
        "enable_perm": True,
        "group_num": 1,
        "group_size": sizes.inputs - sizes.outliers,
        "in_features": sizes.inputs,
        "out_features": sizes.outputs,
        "indices_as_float": False,
        "is_indice_packed": True,
        "vector_lens": [sizes.outlier_vector or none, sizes.vector],
        "num_centroids": [2**sizes.outlier_index if sizes.outliers else none, 2**sizes.index],
        "num_res_centroids": [none, 2**sizes.residual if sizes.residual else none],
        "outlier_size": sizes.outliers,
    }


def read_sizes(layer: dict[str, Any]) -> VPTQShape:
    index = lambda count: max(int(count), 1).bit_length() - 1
    outliers = int(layer["outlier_size"])
    return VPTQShape(
        inputs=layer["in_features"],
        outputs=layer["out_features"],
        vector=layer["vector_lens"][1],
        index=index(layer["num_centroids"][1]),
        residual=index(layer["num_res_centroids"][1]),
        outliers=outliers,
        outlier_vector=layer["vector_lens"][0] if outliers else 0,
        outlier_index=index(layer["num_centroids"][0]) if outliers else 0,
    )


def read(tensors: dict[str, Any], sizes: VPTQShape) -> VPTQMatrix:
    return VPTQMatrix(**{name: tensors.get(theirs) for name, theirs in TENSORS.items()}, sizes=sizes)  # type: ignore[arg-type]


def _int16(numbers: Array) -> Array:
    return jax.lax.bitcast_convert_type(numbers.astype(jnp.uint16), jnp.int16)
