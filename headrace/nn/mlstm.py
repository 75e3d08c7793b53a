"""The two recurrences of xLSTM (arXiv 2405.04517). Both have exponential gates, kept in range by a running
maximum, and reset their state at the start of a document.

mLSTM has a matrix as its memory. It is computed by chunks of positions, in parallel, and only the last state
of a chunk is passed to the next. sLSTM feeds its output back into its gates, so it runs position by position.
In einsums, a is a feature of a query or key."""

import jax
import jax.numpy as jnp

from headrace.nn.module import Array, module

CHUNK = 256  # positions computed in parallel: the width of a TPU's matrix units
UNROLL = 4  # chunks whose states are computed per iteration
EPS = 1e-6
LOG_ZERO = -1e30  # the logarithm of 0, finite so that no difference of two is NaN


@module
class MatrixState:
    """mLSTM's state, in float32: memory [b n a h], normalizer [b n a], and the maximum [b n], by whose
    exponential both are divided."""

    c: Array
    n: Array
    m: Array


def empty_matrix_state(shape: tuple[int, ...], key_dim: int, head_dim: int) -> MatrixState:
    """The state before the first position, with leading axes such as (rows, heads)."""
    return MatrixState(jnp.zeros((*shape, key_dim, head_dim)), jnp.zeros((*shape, key_dim)), jnp.zeros(shape))


def mlstm(
    qkv: tuple[Array, Array, Array],
    gates: tuple[Array, Array],
    state: MatrixState,
    segments: Array | None = None,
    chunk: int = CHUNK,
    prevent_cse: bool = True,
) -> tuple[Array, MatrixState]:
    """Run mLSTM. Returns its outputs [b s n h] and the state after the last position.

    Queries and keys are [b s n a], values [b s n h]; input and forget gates [b s n] are before exponential
    and sigmoid. `state` belongs to the document of the first position. With `chunk` 1 it is the recurrence
    as the paper writes it. For `prevent_cse` see `Execution.needs_cse_barrier`."""
    rows, length = gates[0].shape[:2]
    chunk = min(chunk, length)
    padding = -length % chunk
    decay = jax.nn.log_sigmoid(gates[1].astype(jnp.float32))
    documents = jnp.zeros((rows, length), jnp.int32) if segments is None else segments
    # Padding of the last chunk neither writes nor forgets.
    inputs = [_pad_sequence(x, padding) for x in (*qkv, gates[0].astype(jnp.float32), decay, documents)]
    inputs[3] = inputs[3].at[:, length:].set(LOG_ZERO)
    inputs[5] = inputs[5].at[:, length:].set(documents[:, -1:])
    chunks = [jnp.moveaxis(x.reshape(rows, -1, chunk, *x.shape[2:]), 1, 0) for x in inputs]
    chunks[:5] = [jnp.moveaxis(x, 3, 2) for x in chunks[:5]]
    # The backward pass only saves the inputs: what is between is many times as large.
    out, state = jax.checkpoint(_run_chunks, prevent_cse=prevent_cse)(state, *chunks)
    out = jnp.moveaxis(out, (0, 2), (1, 3)).reshape(rows, -1, *out.shape[2:3], out.shape[-1])
    return out[:, :length], state


def _pad_sequence(x: Array, padding: int) -> Array:
    return jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))


def _run_chunks(
    state: MatrixState, q: Array, k: Array, v: Array, write: Array, decay: Array, documents: Array
) -> tuple[Array, MatrixState]:
    """Run mLSTM on [c b n i ...], c chunks of i positions, and documents [c b i].

    All chunks are computed in parallel, except for the states between them, which are a scan of sums."""
    is_visible = (documents[..., :, None] == documents[..., None, :]) & jnp.tril(
        jnp.ones((decay.shape[-1],) * 2, bool)
    )
    previous = jnp.concatenate([documents[:1, :, 0], documents[:-1, :, -1]])  # [c b]
    continues = (documents == previous[..., None])[:, :, None]
    # Sums over a document's own positions, so that even rounding does not depend on others: [c b n i].
    total = jnp.einsum("cbij,cbnj->cbni", is_visible.astype(jnp.float32), decay, precision="highest")
    # Logarithms of how much of position j, and of the state, remains at position i: [c b n i j], [c b n i].
    weights = jnp.where(is_visible[:, :, None], total[..., None] + (write - total)[..., None, :], LOG_ZERO)
    largest = weights.max(axis=-1)
    # Everything is divided by the maximum, so the result does not depend on it, and it needs no gradient.
    last = jax.lax.stop_gradient((total[..., -1], continues[..., -1], largest[..., -1]))
    end, starts = jax.lax.scan(_next_maximum, jax.lax.stop_gradient(state.m), last)
    carried = total + jnp.where(continues, starts[..., None], 0.0)
    m = jax.lax.stop_gradient(jnp.maximum(carried, largest))
    weights, carried = jnp.exp(weights - m[..., None]), jnp.where(continues, jnp.exp(carried - m), 0.0)

    # Products have the inputs' dtype, sums over chunks float32. Products in float32, which the backward pass
    # would have for each of these, are several times as slow.
    keys = k * weights[..., -1, :, None].astype(k.dtype)
    written = jnp.einsum("cbnja,cbnjh->cbnah", keys, v), keys.astype(jnp.float32).sum(axis=-2)
    (c, n), (cs, ns) = jax.lax.scan(
        _next_memory, (state.c, state.n), (carried[..., -1], written), unroll=UNROLL
    )

    q = q * q.shape[-1] ** -0.5
    scores = jnp.einsum("cbnia,cbnja->cbnij", q, k) * weights.astype(q.dtype)
    values = jnp.einsum("cbnij,cbnjh->cbnih", scores, v).astype(jnp.float32)
    values += carried[..., None] * jnp.einsum("cbnia,cbnah->cbnih", q, cs)
    norms = jnp.einsum("cbnia,cbna->cbni", q, ns).astype(jnp.float32)
    norms = scores.astype(jnp.float32).sum(axis=-1) + carried * norms
    out = values / (jnp.maximum(jnp.abs(norms), jnp.exp(-m)) + EPS)[..., None]
    return out.astype(v.dtype), MatrixState(c, n, end)


def _next_maximum(m: Array, last: tuple[Array, Array, Array]) -> tuple[Array, Array]:
    """The maximum [b n] after a chunk, and the one before it."""
    total, continues, largest = last
    return jnp.maximum(total + jnp.where(continues, m, 0.0), largest), m


Memory = tuple[Array, Array]  # memory [b n a h] and normalizer [b n a]


def _next_memory(memory: Memory, chunk: tuple[Array, Memory]) -> tuple[Memory, Memory]:
    """The memory after a chunk, and the one before it, rounded."""
    (c, n), (decay, (written_c, written_n)) = memory, chunk
    after = decay[..., None, None] * c + written_c, decay[..., None] * n + written_n
    return after, (c.astype(written_c.dtype), n.astype(written_c.dtype))


@module
class ScalarState:
    """sLSTM's state, in float32, [b n h] each: memory, normalizer, maximum, and the last output."""

    c: Array
    n: Array
    m: Array
    h: Array


def empty_scalar_state(shape: tuple[int, ...]) -> ScalarState:
    """The state before the first position."""
    c, n, h = (jnp.zeros(shape) for _ in range(3))  # three arrays, since each may be donated to a step
    return ScalarState(c, n, jnp.full(shape, LOG_ZERO), h)


def slstm(
    gates: Array, recurrent: Array, state: ScalarState, segments: Array | None = None
) -> tuple[Array, ScalarState]:
    """Run sLSTM. Returns its outputs [b s n h] and the state after the last position.

    `gates` [b s 4 n h] are the input's contributions to z, i, f and o; `recurrent` [4 n h h] maps each head's
    last output to its own."""
    rows, length = gates.shape[:2]
    is_start = jnp.zeros((rows, length), bool)
    if segments is not None:
        is_start = is_start.at[:, 1:].set(segments[:, 1:] != segments[:, :-1])
    empty = empty_scalar_state(state.c.shape)
    recurrent = recurrent.astype(jnp.float32)

    def step(state: ScalarState, inputs: tuple[Array, Array]) -> tuple[ScalarState, Array]:
        gates, is_start = inputs
        state = jax.tree.map(lambda new, old: jnp.where(is_start[:, None, None], new, old), empty, state)
        z, i, f, o = jnp.moveaxis(
            gates.astype(jnp.float32) + jnp.einsum("bnh,gnhi->bgni", state.h, recurrent), 1, 0
        )
        decayed = jax.nn.log_sigmoid(f) + state.m
        m = jax.lax.stop_gradient(jnp.maximum(decayed, i))
        remains, written = jnp.exp(decayed - m), jnp.exp(i - m)
        c, n = remains * state.c + written * jnp.tanh(z), remains * state.n + written
        h = jax.nn.sigmoid(o) * c / n
        return ScalarState(c, n, m, h), h

    state, out = jax.lax.scan(step, state, (gates.swapaxes(0, 1), is_start.swapaxes(0, 1)))
    return out.swapaxes(0, 1), state


def convolve(x: Array, kernel: Array, last_inputs: Array, segments: Array | None = None) -> Array:
    """Compute a causal convolution of each feature: [b s d] with [w d].

    The w - 1 `last_inputs` before x belong to its first document; no document sees the one before it."""
    width, length = kernel.shape[0], x.shape[1]
    inputs = jnp.concatenate([last_inputs.astype(x.dtype), x], axis=1)
    out = jnp.zeros_like(x)
    documents = None if segments is None else jnp.pad(segments, [(0, 0), (width - 1, 0)], mode="edge")
    for back in range(width):
        first = width - 1 - back
        shifted = inputs[:, first : first + length]
        if documents is not None and segments is not None:
            is_same = documents[:, first : first + length] == segments
            shifted = jnp.where(is_same[..., None], shifted, 0)
        out = out + shifted * kernel[back].astype(x.dtype)
    return out
