"""The two recurrences of xLSTM (arXiv 2405.04517), with exponential gates kept in range by a running maximum.
mLSTM has a matrix for its memory, which is decayed and added to: a chunk of positions is computed at once,
and only its last state goes on to the next. sLSTM mixes its own output into its gates, so that it must go
position by position. Both forget at the start of a document. Letters: a is a feature of a query or key."""

from typing import Any

import jax
import jax.numpy as jnp

from headrace.nn.module import Array, module

CHUNK = 256  # positions at once: as wide as the matrix units of TPUs
UNROLL = 4  # chunks whose states are added up side by side
EPS = 1e-6
NEVER = -1e30  # the logarithm of nothing, such that no difference of two is NaN


@module
class Matrix:
    """mLSTM's state, in float32: memory [b n a h], normaliser [b n a], and the maximum [b n] by whose
    exponential both are divided."""

    c: Array
    n: Array
    m: Array


def empty_matrix(shape: tuple[int, ...], keys: int, values: int) -> Matrix:
    """For leading dimensions such as (rows, heads)."""
    return Matrix(jnp.zeros((*shape, keys, values)), jnp.zeros((*shape, keys)), jnp.zeros(shape))


def mlstm(
    qkv: tuple[Array, Array, Array],
    gates: tuple[Array, Array],
    state: Matrix,
    segments: Array | None = None,
    chunk: int = CHUNK,
    merges: bool = True,
) -> tuple[Array, Matrix]:
    """Outputs [b s n h] and the state after them, for queries and keys [b s n a], values [b s n h] and the
    input and forget gates before their exponential and sigmoid [b s n]. The state belongs to the document of
    the first position. A chunk of 1 is the recurrence as it is written. `merges`: see Execution.merges."""
    rows, length = gates[0].shape[:2]
    chunk = min(chunk, length)
    more = -length % chunk
    decay = jax.nn.log_sigmoid(gates[1].astype(jnp.float32))
    documents = jnp.zeros((rows, length), jnp.int32) if segments is None else segments
    # What fills the last chunk is neither written nor forgets.
    parts = [_widen(x, more) for x in (*qkv, gates[0].astype(jnp.float32), decay, documents)]
    parts[3] = parts[3].at[:, length:].set(NEVER)
    parts[5] = parts[5].at[:, length:].set(documents[:, -1:])
    chunks = [jnp.moveaxis(x.reshape(rows, -1, chunk, *x.shape[2:]), 1, 0) for x in parts]
    chunks[:5] = [jnp.moveaxis(x, 3, 2) for x in chunks[:5]]
    # The backward pass keeps the inputs alone: what lies between is many times as large.
    out, state = jax.checkpoint(_chunks, prevent_cse=merges)(state, *chunks)
    out = jnp.moveaxis(out, (0, 2), (1, 3)).reshape(rows, -1, *out.shape[2:3], out.shape[-1])
    return out[:, :length], state


def _widen(x: Array, more: int) -> Array:
    return jnp.pad(x, [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2))


def _chunks(
    state: Matrix, q: Array, k: Array, v: Array, write: Array, decay: Array, documents: Array
) -> tuple[Array, Matrix]:
    """For [c b n i ...], c chunks of i positions, and documents [c b i]. All chunks are computed side by side
    but for the states between them, each of which takes one sum."""
    sees = (documents[..., :, None] == documents[..., None, :]) & jnp.tril(
        jnp.ones((decay.shape[-1],) * 2, bool)
    )
    before = jnp.concatenate([documents[:1, :, 0], documents[:-1, :, -1]])  # [c b]
    continues = (documents == before[..., None])[:, :, None]
    # Sums over a document's own positions, so that not even their rounding knows of another's: [c b n i].
    total = jnp.einsum("cbij,cbnj->cbni", sees.astype(jnp.float32), decay, precision="highest")
    # How much of position j is left at position i, and of the state, as logarithms: [c b n i j], [c b n i].
    left = jnp.where(sees[:, :, None], total[..., None] + (write - total)[..., None, :], NEVER)
    most = left.max(axis=-1)
    # The maximum divides everything alike, so nothing depends on it, and no gradient need go through it.
    last = jax.lax.stop_gradient((total[..., -1], continues[..., -1], most[..., -1]))
    end, starts = jax.lax.scan(_peak, jax.lax.stop_gradient(state.m), last)
    carried = total + jnp.where(continues, starts[..., None], 0.0)
    m = jax.lax.stop_gradient(jnp.maximum(carried, most))
    left, carried = jnp.exp(left - m[..., None]), jnp.where(continues, jnp.exp(carried - m), 0.0)

    # Products are of the inputs' dtype, sums over chunks of float32: its products, which the backward pass
    # would have for each of these, are several times as slow.
    keys = k * left[..., -1, :, None].astype(k.dtype)
    written = jnp.einsum("cbnja,cbnjh->cbnah", keys, v), keys.astype(jnp.float32).sum(axis=-2)
    (c, n), (cs, ns) = jax.lax.scan(_remember, (state.c, state.n), (carried[..., -1], written), unroll=UNROLL)

    q = q * q.shape[-1] ** -0.5
    scores = jnp.einsum("cbnia,cbnja->cbnij", q, k) * left.astype(q.dtype)
    values = jnp.einsum("cbnij,cbnjh->cbnih", scores, v).astype(jnp.float32)
    values += carried[..., None] * jnp.einsum("cbnia,cbnah->cbnih", q, cs)
    norms = jnp.einsum("cbnia,cbna->cbni", q, ns).astype(jnp.float32)
    norms = scores.astype(jnp.float32).sum(axis=-1) + carried * norms
    out = values / (jnp.maximum(jnp.abs(norms), jnp.exp(-m)) + EPS)[..., None]
    return out.astype(v.dtype), Matrix(c, n, end)


def _peak(m: Array, last: tuple[Array, Array, Array]) -> tuple[Array, Array]:
    """The maximum [b n] after a chunk, and the one before it."""
    total, continues, most = last
    return jnp.maximum(total + jnp.where(continues, m, 0.0), most), m


def _remember(memory: Any, given: Any) -> tuple[Any, Any]:
    """The memory [b n a h] and its normaliser after a chunk, and, rounded, those before it."""
    (c, n), (kept, (c_more, n_more)) = memory, given
    after = kept[..., None, None] * c + c_more, kept[..., None] * n + n_more
    return after, (c.astype(c_more.dtype), n.astype(c_more.dtype))


@module
class Scalar:
    """sLSTM's state, in float32, [b n h] each: memory, normaliser, maximum, and the last output."""

    c: Array
    n: Array
    m: Array
    h: Array


def empty_scalar(shape: tuple[int, ...]) -> Scalar:
    c, n, h = (jnp.zeros(shape) for _ in range(3))  # three, since each may be donated to a step
    return Scalar(c, n, jnp.full(shape, NEVER), h)


def slstm(
    gates: Array, recurrent: Array, state: Scalar, segments: Array | None = None
) -> tuple[Array, Scalar]:
    """Outputs [b s n h] and the state after them. Gates are what the input gives to z, i, f and o,
    [b s 4 n h]; `recurrent` [4 n h h] is what each head makes of its last output for them."""
    rows, length = gates.shape[:2]
    starts = jnp.zeros((rows, length), bool)
    if segments is not None:
        starts = starts.at[:, 1:].set(segments[:, 1:] != segments[:, :-1])
    fresh = empty_scalar(state.c.shape)
    recurrent = recurrent.astype(jnp.float32)

    def one(state: Scalar, given: tuple[Array, Array]) -> tuple[Scalar, Array]:
        gates, start = given
        state = jax.tree.map(lambda new, old: jnp.where(start[:, None, None], new, old), fresh, state)
        z, i, f, o = jnp.moveaxis(
            gates.astype(jnp.float32) + jnp.einsum("bnh,gnhi->bgni", state.h, recurrent), 1, 0
        )
        decayed = jax.nn.log_sigmoid(f) + state.m
        m = jax.lax.stop_gradient(jnp.maximum(decayed, i))
        kept, written = jnp.exp(decayed - m), jnp.exp(i - m)
        c, n = kept * state.c + written * jnp.tanh(z), kept * state.n + written
        h = jax.nn.sigmoid(o) * c / n
        return Scalar(c, n, m, h), h

    state, out = jax.lax.scan(one, state, (gates.swapaxes(0, 1), starts.swapaxes(0, 1)))
    return out.swapaxes(0, 1), state


def convolve(x: Array, kernel: Array, before: Array, segments: Array | None = None) -> Array:
    """A causal convolution of each feature on its own: [b s d] by [w d], after the w - 1 inputs `before` that
    belong to the first document. No document sees the one before it."""
    width, length = kernel.shape[0], x.shape[1]
    seen = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    out = jnp.zeros_like(x)
    documents = None if segments is None else jnp.pad(segments, [(0, 0), (width - 1, 0)], mode="edge")
    for back in range(width):
        first = width - 1 - back
        part = seen[:, first : first + length]
        if documents is not None and segments is not None:
            same = documents[:, first : first + length] == segments
            part = jnp.where(same[..., None], part, 0)
        out = out + part * kernel[back].astype(x.dtype)
    return out
