"""Linear cross entropy by tiles of tokens and vocabulary (arXiv 2411.09009), in kernels for Hopper GPUs
(hopper_kernels.py): logits exist only in registers.

The first kernel computes each token's logsumexp, and the largest logit of every tile. The others run in
rounds of as many tiles as there are slots for their gradients: the second computes a tile's logits again and
writes their gradient to its slot, the third sums slots into rows of the gradient of the vocabulary's matrix,
the fourth into that of the hidden states. With a filter, tiles that have no target, and no probability that
reaches the filter, are not computed again."""

import math
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from jax import lax

from headrace.kernels.linear_cross_entropy.hopper_kernels import (
    LIST,
    TOKENS,
    VOCAB,
    WIDTH_MULTIPLE,
    TileSchedule,
    add_hidden_gradient,
    compute_tile_d_logits,
    compute_tile_max_and_logsumexp,
    write_unembed_gradient,
)
from headrace.kernels.linear_cross_entropy.stats import (
    Array,
    HeadInputs,
    HeadSharding,
    HeadSpec,
    LogitStats,
    LossAndGradients,
    LossTotals,
    add_losses,
    negative_log_likelihood,
    psum,
    vocab_offset,
    zero_totals,
)
from headrace.nn.compile_target import ArrayShape, compile_error
from headrace.nn.soft_cap import apply_soft_cap

MIN_SLOTS = 384  # tiles of gradients in memory: 24 MiB


def compute_loss(head: HeadSpec, sharding: HeadSharding, inputs: HeadInputs) -> LossTotals:
    """Compute the totals over the tokens of all devices."""
    x, matrix, targets, weights = _flatten(inputs)
    _, tile_lse = compute_tile_max_and_logsumexp(x, matrix, head.soft_cap)
    stats, _ = _compute_stats(head, sharding, x, matrix, targets, tile_lse)
    totals = add_losses(zero_totals(), stats, head.per_token_loss(stats), weights)
    return psum(totals, sharding.token_axes)


def compute_loss_and_gradients(
    head: HeadSpec, sharding: HeadSharding, inputs: HeadInputs
) -> LossAndGradients:
    """Compute the totals, and the gradients of this device's hidden states and matrix."""
    x, matrix, targets, weights = _flatten(inputs)
    tile_max, tile_lse = compute_tile_max_and_logsumexp(x, matrix, head.soft_cap)
    stats, local_targets = _compute_stats(head, sharding, x, matrix, targets, tile_lse)
    losses, pull = jax.vjp(head.per_token_loss, stats)
    d_stats = pull(weights)[0]
    per_token = jnp.stack([stats.lse, d_stats.lse, local_targets.astype(jnp.float32), d_stats.target])
    is_selected = _select_tiles(head, tile_max, stats, d_stats, local_targets)
    rows, blocks = is_selected.shape
    row_ends = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(is_selected.sum(1, dtype=jnp.int32))])
    slots = max(MIN_SLOTS, -(-blocks // LIST) * LIST)
    numbers = jnp.nonzero(is_selected.ravel(), size=is_selected.size + slots, fill_value=0)[0]
    numbers = numbers.astype(jnp.int32)

    def run_round(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        first_row, *sums = carry
        schedule = _schedule_round(numbers, row_ends, first_row, slots, blocks)
        d_logits = compute_tile_d_logits(x, matrix, per_token, schedule, head.soft_cap)
        d_unembed, high, low = (jax.new_ref(array) for array in sums)
        write_unembed_gradient(d_unembed, d_logits, x, schedule)
        add_hidden_gradient(high, low, d_logits, matrix, schedule)
        return schedule.row_span[1], jax.freeze(d_unembed), jax.freeze(high), jax.freeze(low)

    start = jnp.int32(0), jnp.zeros_like(inputs.unembed), jnp.zeros_like(x), jnp.zeros_like(x)
    _, d_unembed, d_x, d_x_low = lax.while_loop(lambda carry: carry[0] < rows, run_round, start)
    uses_mean = _uses_mean(head)
    if sharding.vocab_axes or uses_mean:
        d_x = psum(d_x.astype(jnp.float32) + d_x_low, sharding.vocab_axes)
        if uses_mean:
            mean_row, vocab = _mean_row(matrix, sharding)
            d_x += d_stats.mean[:, None] * mean_row
            d_row = (d_stats.mean[:, None] * x).sum(0) / vocab
            d_unembed = (d_unembed + d_row).astype(d_unembed.dtype)
        d_x = d_x.astype(x.dtype)
    totals = psum(add_losses(zero_totals(), stats, losses, weights), sharding.token_axes)
    return LossAndGradients(totals, d_x.reshape(inputs.hidden.shape), psum(d_unembed, sharding.token_axes))


def is_faster_than_plain(head: HeadSpec, sharding: HeadSharding, width: int) -> bool:
    """Whether the kernels are faster than plain JAX: if they may skip gradients
    (docs/performance/loss.md)."""
    return head.filter_eps > 0


def unsupported_reason(
    head: HeadSpec, sharding: HeadSharding, hidden: ArrayShape, unembed: ArrayShape
) -> str | None:
    """Return why these kernels cannot run on one device's arrays; None if they can."""
    device, (rows, width) = jax.devices()[0], unembed.shape
    if device.platform != "gpu" or not str(getattr(device, "compute_capability", "")).startswith("9."):
        return "they are for Hopper GPUs"
    if hidden.dtype != jnp.bfloat16:
        return f"they are for bfloat16, and the activations are {hidden.dtype}"
    if head.excluded_token is not None:
        return "they cannot exclude a token"
    if sharding.width_axes:
        return "mesh.fsdp splits the vocabulary's matrix"
    tokens = math.prod(hidden.shape[:-1])
    multiples = (tokens, "tokens", TOKENS), (rows, "rows", VOCAB), (width, "columns", WIDTH_MULTIPLE)
    for size, name, multiple in multiples:
        if size % multiple:
            return f"{size} {name} are not a multiple of {multiple}"
    if head.soft_cap is not None and _uses_mean(head):
        return "they do not compute the mean of capped logits, which label smoothing needs"
    return _try_to_compile(head.soft_cap, width, unembed.dtype)


@lru_cache
def _try_to_compile(soft_cap: float | None, width: int, unembed_dtype: jnp.dtype) -> str | None:
    """Compile the kernels for a single tile. Returns the compiler's message if it fails, or None."""
    shapes = (
        jax.ShapeDtypeStruct((1, TOKENS, width), jnp.bfloat16),
        jax.ShapeDtypeStruct((VOCAB, width), unembed_dtype),
        jax.ShapeDtypeStruct((1, TOKENS), jnp.int32),
        jax.ShapeDtypeStruct((1, TOKENS), jnp.float32),
    )
    head = HeadSpec(negative_log_likelihood, soft_cap)
    compute = partial(compute_loss_and_gradients, head, HeadSharding())
    return compile_error("gpu", lambda *arrays: compute(HeadInputs(*arrays)), *shapes)


def _flatten(inputs: HeadInputs) -> tuple[Array, Array, Array, Array]:
    """Flatten inputs to hidden states [c d], matrix [v d] in their dtype, targets [c] and weights [c]."""
    rows = inputs.hidden, inputs.targets, inputs.weights
    x, targets, weights = (array.reshape(-1, *array.shape[2:]) for array in rows)
    return x, inputs.unembed.astype(x.dtype), targets, weights


def _uses_mean(head: HeadSpec) -> bool:
    """Whether the loss depends on the mean of the logits."""
    number = jnp.zeros((), jnp.float32)
    jaxpr = jax.make_jaxpr(head.per_token_loss)(LogitStats(number, number, number)).jaxpr
    mean = jaxpr.invars[2]
    return any(mean in equation.invars for equation in jaxpr.eqns) or mean in jaxpr.outvars


def _compute_stats(
    head: HeadSpec, sharding: HeadSharding, x: Array, matrix: Array, targets: Array, tile_lse: Array
) -> tuple[LogitStats, Array]:
    """Compute the statistics of all tokens from the logsumexp of each tile. Also returns the targets as
    numbers of this device's rows of the matrix.

    The mean of logits without a soft cap is the product with the matrix's mean row, so that no kernel needs
    to compute it."""
    lse = jax.nn.logsumexp(tile_lse, axis=0)
    local_targets = targets - vocab_offset(len(matrix), sharding)
    is_local = (local_targets >= 0) & (local_targets < len(matrix))
    target_rows = matrix[jnp.where(is_local, local_targets, 0)]
    target = jnp.einsum("cd,cd->c", x, target_rows, preferred_element_type=jnp.float32)
    target = jnp.where(is_local, apply_soft_cap(target, head.soft_cap), 0)
    if sharding.vocab_axes:
        largest = lax.pmax(lse, sharding.vocab_axes)
        lse = largest + jnp.log(psum(jnp.exp(lse - largest), sharding.vocab_axes))
        target = psum(target, sharding.vocab_axes)
    mean = (x * _mean_row(matrix, sharding)[0]).sum(1) if _uses_mean(head) else jnp.zeros_like(lse)
    return LogitStats(lse, target, mean), local_targets


def _mean_row(matrix: Array, sharding: HeadSharding) -> tuple[Array, int]:
    """The mean of all rows of the vocabulary's matrix, and their number."""
    vocab = len(matrix) * psum(1, sharding.vocab_axes)
    return psum(matrix.sum(0, dtype=jnp.float32), sharding.vocab_axes) / vocab, vocab


def _select_tiles(
    head: HeadSpec, tile_max: Array, stats: LogitStats, d_stats: LogitStats, local_targets: Array
) -> Array:
    """Mask [rows, blocks of tokens] of the tiles whose gradients are computed.

    The first tile of each row always is, so that all rows of the gradient are written."""
    rows, tokens = tile_max.shape
    shape = rows, tokens // TOKENS, TOKENS
    if not head.filter_eps:
        return jnp.ones(shape[:2], bool)
    is_likely = (jnp.exp(tile_max - stats.lse) >= head.filter_eps) & (d_stats.lse != 0)
    has_target = (local_targets // VOCAB == jnp.arange(rows)[:, None]) & (d_stats.target != 0)
    return (is_likely | has_target).reshape(shape).any(2).at[:, 0].set(True)


def _schedule_round(
    numbers: Array, row_ends: Array, first_row: Array, slots: int, blocks: int
) -> TileSchedule:
    """Schedule as many full rows of tiles from `first_row` on as there are slots for.

    `numbers` are those of the selected tiles, `row_ends` where each row ends in them, `blocks` the number of
    blocks of tokens."""
    end_row = (row_ends <= row_ends[first_row] + slots).sum(dtype=jnp.int32) - 1
    used = row_ends[end_row] - row_ends[first_row]
    tiles = lax.dynamic_slice(numbers, (row_ends[first_row],), (slots,))
    block = jnp.where(jnp.arange(slots) < used, tiles % blocks, blocks)
    slots_by_block = jnp.argsort(block, stable=True).astype(jnp.int32)
    block_starts = (block[None] < jnp.arange(blocks + 1)[:, None]).sum(1, dtype=jnp.int32)
    return TileSchedule(tiles, used, jnp.stack([first_row, end_row]), row_ends, slots_by_block, block_starts)
