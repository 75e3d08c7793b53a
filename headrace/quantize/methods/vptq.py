"""VPTQ (arXiv 2409.17066): some outputs of an input are one vector of a codebook. The codebook is made by
k-means, in which a vector counts as much as its input does in calibration; inputs are rounded one by one, the
largest activations first, and those that are left make up for it, as in GPTQ; what is left of each vector
then has a second codebook, and all is rounded again with both. The first inputs, the outliers, can have a
finer codebook."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from headrace.model_formats import vptq
from headrace.quantize import hessian as quantize_hessian
from headrace.quantize import kmeans

Array = jax.Array

CALIBRATED = True

FIRST = 2  # bits of a weight that are the first codebook's; the others are the second's
CODEBOOK = 0.05  # a longer vector is taken if its codebooks take less than this share of the indices
OUTLIER_VECTOR, OUTLIER_INDEX = 4, 12  # of outliers, as published for 1 % of the inputs


@dataclass(frozen=True)
class Config:
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
        if self.tune_steps < 0:
            raise ValueError("tune_steps: expected 0 or more")
        if self.finetune_steps < 0:
            raise ValueError("finetune_steps: expected 0 or more")
        for name in ("tune", "finetune"):
            name, rate = f"{name}_steps", f"{name}_learning_rate"
            if getattr(self, rate) <= 0:
                raise ValueError(f"{rate}: expected a number above 0")
            if not getattr(self, name) and getattr(self, rate) != getattr(type(self), rate):
                raise ValueError(f"{rate}: expected {name} above 0, or it has no effect")


def quantize(cfg: Any, w: Array, hessian: Array | None, key: Array) -> vptq.VPTQMatrix:
    """A matrix [inputs outputs], by the Hessian [inputs inputs] of its inputs."""
    assert hessian is not None
    w, hessian = quantize_hessian.regularize(w.astype(jnp.float32), hessian)
    sizes = sizes_of(cfg, *w.shape)
    order = jnp.argsort(-jnp.diag(hessian))
    w, hessian = w[order], hessian[order][:, order]
    upper, weights, count = quantize_hessian.cholesky_inverse(hessian), jnp.diag(hessian), sizes.outliers
    outlier = None
    if count:
        first = padded(w, sizes.outlier_vector)
        book = codebook(key, first[:count], weights[:count], sizes.outlier_vector, sizes.outlier_index)
        indices, rounded, now = quantize_hessian.gptq_sweep(
            first[:count], upper[:count, :count], nearest, (book,)
        )
        # As the loop would have it: the inputs that follow make up for these.
        errors = (now - rounded) / jnp.diag(upper)[:count, None]
        w = w.at[count:].add(
            -jnp.matmul(upper[:count, count:].T, errors, precision="highest")[:, : w.shape[1]]
        )
        outlier = indices[:, 0], book
    rest, upper = padded(w[count:], sizes.vector), upper[count:, count:]
    books: tuple[Array, ...] = (codebook(key, rest, weights[count:], sizes.vector, sizes.index),)
    indices, rounded, now = quantize_hessian.gptq_sweep(rest, upper, nearest, books)
    if sizes.residual:
        left = codebook(key, now - rounded, weights[count:], sizes.vector, sizes.residual)
        books = (*books, left)
        indices, *_ = quantize_hessian.gptq_sweep(rest, upper, nearest, books)
    return vptq.store([indices[:, n] for n in range(len(books))], list(books), outlier, order, sizes)


def padded(w: Array, vector: int) -> Array:
    """With as many outputs as make whole vectors."""
    return jnp.pad(w, [(0, 0), (0, -w.shape[1] % vector)])


def codebook(key: Array, w: Array, weights: Array, vector: int, index: int) -> Array:
    """In float16, as it is stored, so that all that is rounded to it knows."""
    book = kmeans.cluster(key, w.reshape(w.shape[0], -1, vector), weights, 2**index)
    return book.astype(jnp.float16).astype(jnp.float32)


def nearest(books: tuple[Array, ...], row: None, w: Array) -> tuple[Array, Array]:
    """The outputs of one input as vectors of the books, each of what those before it left; and the
    indices."""
    left = w.reshape(-1, books[0].shape[1])
    indices = []
    for book in books:
        indices.append(kmeans.nearest(book, left))
        left = left - book[indices[-1]]
    return w - left.reshape(-1), jnp.stack(indices)


def sizes_of(cfg: Any, inputs: int, outputs: int) -> vptq.VPTQShape:
    outliers = min(round(cfg.outlier_share * inputs), inputs - 1)
    vector = cfg.vector_length or next((v for v in (8, 6) if pays(cfg, v, inputs * outputs)), 4)
    # Of few outliers no more vectors than a quarter of theirs.
    most = max(4, (outliers * outputs // OUTLIER_VECTOR // 4).bit_length() - 1)
    return vptq.VPTQShape(
        inputs=inputs,
        outputs=outputs,
        vector=vector,
        index=min(FIRST, cfg.bits) * vector,
        residual=(cfg.bits - FIRST) * vector,
        outliers=outliers,
        outlier_vector=OUTLIER_VECTOR if outliers else 0,
        outlier_index=min(OUTLIER_INDEX, most) if outliers else 0,
    )


def pays(cfg: Any, vector: int, weights: int) -> bool:
    """Whether the codebooks for longer vectors are small beside the indices of a matrix."""
    entries = 2 ** (FIRST * vector) + (2 ** ((cfg.bits - FIRST) * vector) if cfg.bits > FIRST else 0)
    return 16 * vector * entries <= CODEBOOK * cfg.bits * weights


def settings(cfg: Any, layers: dict[str, Any]) -> dict[str, Any]:
    return vptq.settings({name: stored.sizes for name, stored in layers.items()})


def size(cfg: Any, inputs: int, outputs: int) -> int:
    """Bits of a file that a matrix takes."""
    return sizes_of(cfg, inputs, outputs).bits
