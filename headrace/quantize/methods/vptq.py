"""VPTQ (arXiv 2409.17066): several outputs of one input form a vector, which is stored as an index into a
codebook.

The codebook is fitted by k-means, in which a vector weighs as much as the activations of its input in
calibration data. Inputs are rounded one by one, those with the largest activations first, and the later ones
compensate for the error, as in GPTQ. A second codebook is then fitted to the errors of the first, and all
inputs are rounded again with both. The first inputs, the outliers, can have a finer codebook."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from headrace.model_formats import vptq
from headrace.model_formats.hf_config import HFSettings
from headrace.model_formats.vptq import VPTQMatrix, VPTQShape
from headrace.nn.module import Array
from headrace.quantize.hessian import cholesky_inverse, gptq_sweep, regularize
from headrace.quantize.kmeans import find_nearest, fit_centroids
from headrace.quantize.methods import Finetuning

IS_CALIBRATED = True

FIRST_BITS = 2  # of a weight, for the first codebook; the others are for the second
MAX_CODEBOOK_SHARE = 0.05  # of the indices' size, up to which longer vectors are chosen
OUTLIER_VECTOR, OUTLIER_INDEX_BITS = 4, 12  # as published for 1 % of outliers


@dataclass(frozen=True)
class Config:
    """The settings of `--method vptq`."""

    bits: int = 2  # size of a weight's index: 2, 3 or 4; codebooks come on top [bits]
    vector_length: int = 0  # outputs that form one vector: 2, 4, 6 or 8; 0: chosen by the size of the matrix
    outlier_share: float = 0.0  # share of the inputs that have a codebook of their own; 0.01 is usual
    tune_steps: int = 100  # number of steps that fit the codebooks of a layer to its output; 0: none [steps]
    tune_learning_rate: float = 1e-3  # learning rate of those steps
    # number of steps that then train the codebooks of all layers together; 0: none [steps]
    finetune_steps: int = 0
    finetune_learning_rate: float = 3e-4  # learning rate of those training steps

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4):
            raise ValueError("bits: expected 2, 3 or 4")
        if self.vector_length not in (0, 2, 4, 6, 8):
            raise ValueError("vector_length: expected 2, 4, 6 or 8, or 0")
        if not 0 <= self.outlier_share < 1:
            raise ValueError("outlier_share: expected a share from 0 up to, but not including, 1")
        for name in ("tune", "finetune"):
            steps, learning_rate = f"{name}_steps", f"{name}_learning_rate"
            if getattr(self, steps) < 0:
                raise ValueError(f"{steps}: expected 0 or more")
            if getattr(self, learning_rate) <= 0:
                raise ValueError(f"{learning_rate}: expected a number above 0")
            is_default = getattr(self, learning_rate) == getattr(type(self), learning_rate)
            if not getattr(self, steps) and not is_default:
                raise ValueError(f"{learning_rate}: expected {steps} above 0, or it has no effect")


def quantize(cfg: Config, w: Array, hessian: Array | None, key: Array) -> VPTQMatrix:
    """Round a matrix [inputs outputs] to vectors of codebooks, given the Hessian [inputs inputs]. The key
    chooses the vectors that k-means starts from."""
    assert hessian is not None
    w, hessian = regularize(w.astype(jnp.float32), hessian)
    shape = choose_shape(cfg, *w.shape)
    order = jnp.argsort(-jnp.diag(hessian))
    w, hessian = w[order], hessian[order][:, order]
    upper, input_weights = cholesky_inverse(hessian), jnp.diag(hessian)
    outliers, count = None, shape.outliers
    if count:
        w, outliers = _round_outliers(shape, key, w, upper, input_weights)
    w, upper = pad_outputs(w[count:], shape.vector_length), upper[count:, count:]
    input_weights = input_weights[count:]
    codebooks: tuple[Array, ...] = (
        fit_codebook(key, w, input_weights, shape.vector_length, shape.index_bits),
    )
    sweep = gptq_sweep(w, upper, round_to_codebooks, codebooks)
    if shape.residual_bits:
        errors = sweep.compensated - sweep.rounded
        residual = fit_codebook(key, errors, input_weights, shape.vector_length, shape.residual_bits)
        codebooks = (*codebooks, residual)
        sweep = gptq_sweep(w, upper, round_to_codebooks, codebooks)
    indices = [sweep.codes[:, number] for number in range(len(codebooks))]
    return vptq.pack_matrix(indices, codebooks, outliers, order, shape)


def _round_outliers(
    shape: VPTQShape, key: Array, w: Array, upper: Array, input_weights: Array
) -> tuple[Array, tuple[Array, Array]]:
    """Round the outliers, the first inputs of w.

    Returns w, in which the other inputs compensate for them, and the outliers' indices and codebook."""
    count = shape.outliers
    outliers = pad_outputs(w, shape.outlier_vector_length)[:count]
    codebook = fit_codebook(
        key, outliers, input_weights[:count], shape.outlier_vector_length, shape.outlier_index_bits
    )
    sweep = gptq_sweep(outliers, upper[:count, :count], round_to_codebooks, (codebook,))
    # As `gptq_sweep` does for the inputs after a block.
    errors = (sweep.compensated - sweep.rounded) / jnp.diag(upper)[:count, None]
    compensation = jnp.matmul(upper[:count, count:].T, errors, precision="highest")[:, : w.shape[1]]
    return w.at[count:].add(-compensation), (sweep.codes[:, 0], codebook)


def pad_outputs(w: Array, vector_length: int) -> Array:
    """Pad a matrix [inputs outputs] with zeros to a multiple of `vector_length` outputs."""
    return jnp.pad(w, [(0, 0), (0, -w.shape[1] % vector_length)])


def fit_codebook(key: Array, w: Array, input_weights: Array, vector_length: int, index_bits: int) -> Array:
    """Fit a codebook [2^index_bits vector_length] to a matrix, rounded to float16 as it is stored."""
    centroids = fit_centroids(key, w.reshape(w.shape[0], -1, vector_length), input_weights, 2**index_bits)
    return centroids.astype(jnp.float16).astype(jnp.float32)


def round_to_codebooks(codebooks: tuple[Array, ...], _: None, weights: Array) -> tuple[Array, Array]:
    """Round the weights [outputs] of one input to vectors of the first codebook, the error to the second.
    Returns the rounded weights, and the indices [codebooks vectors]."""
    remainder = weights.reshape(-1, codebooks[0].shape[1])
    indices = []
    for codebook in codebooks:
        indices.append(find_nearest(codebook, remainder))
        remainder = remainder - codebook[indices[-1]]
    return weights - remainder.reshape(-1), jnp.stack(indices)


def choose_shape(cfg: Config, num_inputs: int, num_outputs: int) -> VPTQShape:
    """Choose the vector length and the codebook sizes of a matrix."""
    outliers = min(round(cfg.outlier_share * num_inputs), num_inputs - 1)
    weights = num_inputs * num_outputs
    vector = cfg.vector_length or next((v for v in (8, 6) if has_small_codebooks(cfg, v, weights)), 4)
    # Few outliers get a smaller codebook: at most one entry for four of their vectors.
    outlier_vectors = outliers * num_outputs // OUTLIER_VECTOR
    max_index_bits = max(4, (outlier_vectors // 4).bit_length() - 1)
    return VPTQShape(
        inputs=num_inputs,
        outputs=num_outputs,
        vector_length=vector,
        index_bits=min(FIRST_BITS, cfg.bits) * vector,
        residual_bits=(cfg.bits - FIRST_BITS) * vector,
        outliers=outliers,
        outlier_vector_length=OUTLIER_VECTOR if outliers else 0,
        outlier_index_bits=min(OUTLIER_INDEX_BITS, max_index_bits) if outliers else 0,
    )


def has_small_codebooks(cfg: Config, vector_length: int, num_weights: int) -> bool:
    """Whether the codebooks for vectors of this length are small compared to the indices of a matrix with
    this many weights."""
    second_bits = cfg.bits - FIRST_BITS
    entries = 2 ** (FIRST_BITS * vector_length)
    entries += 2 ** (second_bits * vector_length) if second_bits > 0 else 0
    return 16 * vector_length * entries <= MAX_CODEBOOK_SHARE * cfg.bits * num_weights


def quantization_config(cfg: Config, matrices: Mapping[str, VPTQMatrix]) -> HFSettings:
    """The `quantization_config` of config.json."""
    return vptq.quantization_config({name: matrix.shape for name, matrix in matrices.items()})


def layer_finetuning(cfg: Config) -> Finetuning | None:
    """The finetuning of each layer's codebooks to its output; None if there is none."""
    return Finetuning(cfg.tune_steps, cfg.tune_learning_rate) if cfg.tune_steps else None


def end_to_end_finetuning(cfg: Config) -> Finetuning | None:
    """The finetuning of all codebooks to the training loss; None if there is none."""
    return Finetuning(cfg.finetune_steps, cfg.finetune_learning_rate) if cfg.finetune_steps else None
