"""Quantization methods on single matrices: against plain references, and their files read independently."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.config import reader, recipe
from headrace.errors import UserError
from headrace.model_formats import gptq as gptq_format
from headrace.model_formats import quantized_folder
from headrace.model_formats import vptq as vptq_format
from headrace.quantize.hessian import cholesky_inverse, gptq_sweep, proxy_error
from headrace.quantize.kmeans import find_nearest, fit_centroids
from headrace.quantize.methods import gptq, rtn, vptq
from tests.quantize.matrices import KEY, gptq_bits, random_matrix


def make_config(name: str, **settings: Any) -> Any:
    return reader.part_class("quantize/methods", name)(**settings)


def test_gptq_beats_rounding_and_equals_it_if_inputs_are_independent():
    w, hessian = random_matrix()
    cfg = make_config("gptq", bits=3, group_size=32)
    rounded, quantized = (method.quantize(cfg, w, hessian, KEY).to_dense().T for method in (rtn, gptq))
    assert proxy_error(w, quantized, hessian) < 0.5 * proxy_error(w, rounded, hessian)
    independent = gptq.quantize(cfg, w, jnp.eye(64), KEY).to_dense().T
    np.testing.assert_array_equal(independent, rounded)


def read_gptq_number_by_number(tensors: dict[str, np.ndarray], bits: int, inputs: int, outputs: int):
    """GPTQ's files as AutoGPTQ first read them."""
    qweight, qzeros, scales, g_idx = (tensors[name] for name in ("qweight", "qzeros", "scales", "g_idx"))
    assert {name: tensor.dtype.name for name, tensor in tensors.items()} == {
        "qweight": "int32",
        "qzeros": "int32",
        "scales": "float16",
        "g_idx": "int32",
    }
    assert qweight.shape == (inputs * bits // 32, outputs) and g_idx.shape == (inputs,)
    assert qzeros.shape == (scales.shape[0], outputs * bits // 32) and scales.shape[1] == outputs
    number = lambda words, n: sum(
        ((int(words[bit // 32]) & 0xFFFFFFFF) >> bit % 32 & 1) << bit - n * bits
        for bit in range(n * bits, (n + 1) * bits)
    )
    w = np.empty((outputs, inputs), np.float32)
    for o in range(outputs):
        for i in range(inputs):
            zero = number(qzeros[g_idx[i]], o) + 1
            w[o, i] = np.float32(number(qweight[:, o], i) - zero) * np.float32(scales[g_idx[i], o])
    return w


@pytest.mark.parametrize("bits, group_size", [(2, 0), (3, 32), (4, 24), (8, 64)])
def test_gptq_files_read_number_by_number_are_the_matrix(bits, group_size):
    w, hessian = random_matrix()
    matrix = gptq.quantize(make_config("gptq", bits=bits, group_size=group_size), w, hessian, KEY)
    tensors = {name: np.asarray(getattr(matrix, name)) for name in gptq_format.TENSORS}
    np.testing.assert_array_equal(read_gptq_number_by_number(tensors, bits, 64, 32), matrix.to_dense())
    size = sum(8 * tensor.nbytes for tensor in tensors.values())
    assert size == gptq_bits(64, 32, bits=bits, group_size=group_size)


def unequal_matrix() -> tuple[jax.Array, jax.Array]:
    """Weights [256 512] with outputs of unequal size, and a Hessian of inputs in 160 directions, of unequal
    size.

    Chosen such that the errors tested below come out, which were published without their matrix. What is
    shown is their order, and that they can be reached."""
    rng = np.random.default_rng(5)
    w = rng.standard_normal((512, 256)) * np.exp(0.45 * rng.standard_normal(512))[:, None]
    directions, size = rng.standard_normal((160, 256)), np.exp(1.05 * rng.standard_normal(256))
    hessian = (np.eye(256) + 10 * directions.T @ directions / 160) * np.outer(size, size)
    return jnp.asarray(w.T, jnp.float32), jnp.asarray(hessian / np.mean(np.diag(hessian)), jnp.float32)


@pytest.mark.slow
def test_each_part_of_vptq_makes_the_error_smaller():
    w, hessian = unequal_matrix()
    error = lambda rounded: float(proxy_error(w, rounded, hessian))
    to_vectors = lambda w: w.reshape(w.shape[0], -1, 4)
    round_to = lambda centroids: centroids[find_nearest(centroids, to_vectors(w))].reshape(w.shape)
    scale = jnp.max(jnp.abs(w), axis=0)
    plain, weighted = (
        fit_centroids(KEY, to_vectors(w), input_weights, 256)
        for input_weights in (jnp.ones(256), jnp.diag(hessian))
    )
    upper = cholesky_inverse(hessian)
    sweep = lambda *codebooks: gptq_sweep(w, upper, vptq.round_to_codebooks, codebooks)
    result = sweep(weighted)
    residual = fit_centroids(KEY, to_vectors(result.compensated - result.rounded), jnp.diag(hessian), 256)
    cfg = make_config("vptq", bits=2, vector_length=4)
    errors = {
        "rounding": error(scale * jnp.clip(jnp.round(w / scale), -2, 1)),
        "k-means": error(round_to(plain)),
        "weighted k-means": error(round_to(weighted)),
        "vptq from k-means": error(sweep(plain).rounded),
        "vptq from weighted k-means": error(result.rounded),
        "in descending order": error(vptq.quantize(cfg, w, hessian, KEY).to_dense().T),
        "with a residual codebook": error(sweep(weighted, residual).rounded),
    }
    assert list(errors.values()) == sorted(errors.values(), reverse=True)
    expected = [0.624, 0.1004, 0.0808, 0.0636, 0.0530, 0.0340, 0.0056]
    np.testing.assert_allclose(list(errors.values()), expected, rtol=0.05)


def test_with_a_centroid_for_every_vector_vptq_is_exact():
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((12, 4)).astype(np.float16).astype(np.float32)
    w = jnp.asarray(vectors[rng.integers(0, 12, (24, 8))].reshape(24, 32))
    matrix = vptq.quantize(make_config("vptq", vector_length=4), w, random_matrix(24)[1], KEY)
    np.testing.assert_allclose(matrix.to_dense().T, w, atol=1e-6)


def test_with_independent_inputs_vptq_takes_the_nearest_centroid():
    w = random_matrix(24, 30)[0]  # 30 is no multiple of the vector length
    matrix = vptq.quantize(make_config("vptq", vector_length=4), w, jnp.diag(jnp.linspace(2, 1, 24)), KEY)
    centroids = jnp.asarray(matrix.centroids, jnp.float32).reshape(-1, 4)
    vectors = jnp.pad(w, [(0, 0), (0, 2)]).reshape(24, -1, 4)
    expected = centroids[find_nearest(centroids, vectors)].reshape(24, -1)[:, :30]
    np.testing.assert_array_equal(matrix.to_dense().T, expected)


def test_the_order_of_the_inputs_does_not_matter():
    w, hessian = random_matrix()
    order = jnp.asarray(np.random.default_rng(3).permutation(64))
    cfg = make_config("vptq", vector_length=4)
    matrix = vptq.quantize(cfg, w, hessian, KEY).to_dense().T
    reordered = vptq.quantize(cfg, w[order], hessian[order][:, order], KEY).to_dense().T
    np.testing.assert_allclose(reordered, matrix[order], atol=2e-3)


@pytest.mark.parametrize(
    "settings", [dict(bits=2), dict(bits=3), dict(bits=4, outlier_share=0.1), dict(bits=2, vector_length=6)]
)
def test_vptq_files_read_number_by_number_are_the_matrix(settings):
    """As the package vptq reads them: an index and that of the residual are one number, lowest bits first."""
    w, hessian = random_matrix()
    matrix = vptq.quantize(make_config("vptq", **settings), w, hessian, KEY)
    layer = vptq_format.quantization_config({"x": matrix.shape})["config_for_layers"]["x"]
    assert vptq_format.read_shape(json.loads(json.dumps(layer))) == matrix.shape
    named = quantized_folder.matrix_tensors("x", matrix)
    tensors = {name.split(".")[1]: tensor for name, tensor in named.items()}
    vector, (k_outlier, k) = layer["vector_lens"][1], layer["num_centroids"]
    k_residual = layer["num_res_centroids"][1]
    index_bits, residual_bits = int(np.log2(k)), int(np.log2(k_residual)) if k_residual > 0 else 0
    assert tensors["indices"].dtype == np.int32 and tensors["perm"].dtype == np.int16
    columns = []
    if layer["outlier_size"]:
        codebook = tensors["outlier_centroids"].reshape(k_outlier, -1)
        indices = tensors["outlier_indices"][0].view(np.uint16)
        columns += [
            np.concatenate([codebook[n] for n in indices[:, column]])[:32]
            for column in range(layer["outlier_size"])
        ]
        assert codebook.shape[1] == layer["vector_lens"][0]
    first = tensors["centroids"].reshape(k, vector).astype(np.float32)
    second = np.zeros((1, vector), np.float32)
    if residual_bits:
        second = tensors["res_centroids"].reshape(k_residual, vector).astype(np.float32)
    width = index_bits + residual_bits
    for column in range(layer["group_size"]):
        vectors = []
        for words in tensors["indices"][0].view(np.uint32):
            bits = sum(int(word) << 32 * n for n, word in enumerate(words))
            number = bits >> column * width & 2**width - 1
            vectors.append(first[number % k] + second[number >> index_bits])
        columns.append(np.concatenate(vectors)[:32])
    dense = np.stack(columns, axis=1)[:, np.argsort(tensors["perm"].view(np.uint16))]
    np.testing.assert_allclose(dense, matrix.to_dense(), atol=1e-6)
    assert sum(8 * tensor.nbytes for tensor in tensors.values()) == matrix.shape.stored_bits


def test_invalid_methods_and_settings_are_refused():
    with pytest.raises(UserError, match=r"method\.bits: found 5, expected 2, 3, 4 or 8"):
        recipe.load_method("gptq", ["bits=5"])
    with pytest.raises(UserError, match=r"expected one of gptq, rtn, vptq; did you mean gptq\?"):
        recipe.load_method("gtpq", [])
    with pytest.raises(UserError, match=r"method\.grup: unknown key; did you mean method\.group_size\?$"):
        recipe.load_method("rtn", ["grup=3"])
    with pytest.raises(UserError, match=r"method\.x: unknown key, expected one of use, bits, group_size"):
        recipe.load_method("rtn", ["x=3"])
    with pytest.raises(UserError, match=r"tune_learning_rate: found 0\.1, expected tune_steps above 0"):
        recipe.load_method("vptq", ["tune_steps=0", "tune_learning_rate=0.1"])
    with pytest.raises(UserError, match="finetune_steps: found -1, expected 0 or more"):
        recipe.load_method("vptq", ["finetune_steps=-1"])
