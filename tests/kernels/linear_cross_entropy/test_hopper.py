"""The kernels for Hopper GPUs, as far as a CPU can tell: that they are lowered for one, and that what lies
between them is right, with plain JAX in the place of each. On a GPU: python -m benchmarks.loss_gpu"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from headrace.errors import UserError
from headrace.kernels.linear_cross_entropy import by_tokens, hopper
from headrace.kernels.linear_cross_entropy.dispatch import collect_warnings, fused_cross_entropy, with_z_loss
from headrace.kernels.linear_cross_entropy.hopper import TOKENS, VOCAB, TileSchedule
from headrace.kernels.linear_cross_entropy.stats import HeadSharding, HeadSpec
from headrace.losses import cross_entropy

PLAIN = with_z_loss(cross_entropy.per_token, SimpleNamespace(label_smoothing=0.0, z_loss=1e-3))
SMOOTHED = with_z_loss(cross_entropy.per_token, SimpleNamespace(label_smoothing=0.1, z_loss=0.0))


def arrays(tokens: int = 512, vocab: int = 2048, width: int = 256, dtype: Any = jnp.float32) -> list[Any]:
    keys = jax.random.split(jax.random.key(0), 4)
    return [
        jax.random.normal(keys[0], (1, tokens, width)).astype(dtype),
        (0.3 * jax.random.normal(keys[1], (vocab, width))).astype(dtype),
        jax.random.randint(keys[2], (1, tokens), 0, vocab),
        jnp.where(jax.random.uniform(keys[3], (1, tokens)) < 0.2, 0.0, 1.0),
    ]


def tile(x: Any, w: Any, number: Any, cap: float | None) -> Any:
    i, j = number % (len(x) // TOKENS), number // (len(x) // TOKENS)
    rows, words = (
        jax.lax.dynamic_slice_in_dim(x, i * TOKENS, TOKENS),
        jax.lax.dynamic_slice_in_dim(w, j * VOCAB, VOCAB),
    )
    return i, j, hopper._capped(product(rows, words.T), cap)


def product(a: Any, b: Any) -> Any:
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each kernel as its docstring has it, rounding what it rounds. Slots that are not used hold what must
    never be read. The list counts the tiles that are made again."""
    made: list[int] = []

    def logsumexp(x: Any, w: Any, cap: Any) -> Any:
        scores = hopper._capped(product(x, w.T), cap).reshape(len(x), -1, VOCAB)
        return scores.max(2).T, jax.nn.logsumexp(scores, axis=2).T

    def d_logits(x: Any, w: Any, rows: Any, work: TileSchedule, cap: Any) -> Any:
        jax.debug.callback(lambda used: made.append(int(used)), work.used)
        out = jnp.full((len(work.tiles), TOKENS, VOCAB), jnp.nan, x.dtype)

        def one(slot: Any, out: Any) -> Any:
            i, j, scores = tile(x, w, work.tiles[slot], cap)
            lse, d_lse, target, d_target = jax.lax.dynamic_slice_in_dim(rows, i * TOKENS, TOKENS, 1)[
                ..., None
            ]
            hit = jnp.arange(VOCAB) + j * VOCAB == target
            d = d_lse * jnp.exp(scores - lse) + jnp.where(hit, d_target, 0)
            d = d if cap is None else d * (1 - (scores / cap) ** 2)
            return out.at[slot].set(d.astype(out.dtype))

        return jax.lax.fori_loop(0, work.used, one, out).reshape(-1, VOCAB)

    def write_unembed(d_ref: Any, d: Any, x: Any, work: TileSchedule) -> None:
        d, blocks = d.reshape(-1, TOKENS, VOCAB), len(x) // TOKENS

        def row(j: Any, out: Any) -> Any:
            def add(slot: Any, total: Any) -> Any:
                i = work.tiles[slot] % blocks
                return total + product(d[slot].T, jax.lax.dynamic_slice_in_dim(x, i * TOKENS, TOKENS))

            low, high = work.ends[j] - work.ends[work.span[0]], work.ends[j + 1] - work.ends[work.span[0]]
            total = jax.lax.fori_loop(low, high, add, jnp.zeros((VOCAB, x.shape[1])))
            return jax.lax.dynamic_update_slice_in_dim(out, total.astype(out.dtype), j * VOCAB, 0)

        d_ref[...] = jax.lax.fori_loop(work.span[0], work.span[1], row, d_ref[...])

    def add_to_hidden(high_ref: Any, low_ref: Any, d: Any, w: Any, work: TileSchedule) -> None:
        d, blocks = d.reshape(-1, TOKENS, VOCAB), len(work.first) - 1

        def block(i: Any, out: Any) -> Any:
            def add(n: Any, total: Any) -> Any:
                slot = work.mine[n]
                j = work.tiles[slot] // blocks
                return total + product(d[slot], jax.lax.dynamic_slice_in_dim(w, j * VOCAB, VOCAB))

            high, low = (jax.lax.dynamic_slice_in_dim(x, i * TOKENS, TOKENS) for x in out)
            total = jnp.zeros(high.shape, jnp.float32)
            total = jax.lax.fori_loop(work.first[i], work.first[i + 1], add, total) + high + low
            kept = total.astype(high.dtype)
            new = kept, (total - kept).astype(high.dtype)
            return tuple(
                jax.lax.dynamic_update_slice_in_dim(x, part, i * TOKENS, 0)
                for x, part in zip(out, new, strict=True)
            )

        high_ref[...], low_ref[...] = jax.lax.fori_loop(0, blocks, block, (high_ref[...], low_ref[...]))

    for function in (logsumexp, d_logits, write_unembed, add_to_hidden):
        monkeypatch.setattr(hopper, function.__name__, function)
    monkeypatch.setattr(hopper, "SLOTS", 4)
    monkeypatch.setattr(hopper, "LIST", 4)
    return made


@pytest.mark.parametrize(("loss", "soft_cap"), [(PLAIN, None), (PLAIN, 20.0), (SMOOTHED, None)])
def test_rounds_of_tiles_make_the_gradients_of_all(
    plain: list[int], loss: Any, soft_cap: float | None
) -> None:
    p, head = arrays(), HeadSpec(loss, soft_cap)
    ours = jax.jit(lambda *p: hopper.totals_and_gradients(head, HeadSharding(), *p))(*p)
    theirs = jax.jit(lambda *p: by_tokens.totals_and_gradients(head, HeadSharding(), *p))(*p)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5 * np.abs(other).max())
    jax.effects_barrier()
    assert plain == [4] * 8
    totals = jax.jit(lambda *p: hopper.totals(head, HeadSharding(), *p))(*p)
    assert float(totals.loss) == pytest.approx(float(theirs[0].loss), rel=1e-5)


@pytest.mark.parametrize("loss", [PLAIN, SMOOTHED])
def test_a_vocabulary_in_two_parts_has_the_gradients_of_the_whole(plain: list[int], loss: Any) -> None:
    p, head, split = arrays(), HeadSpec(loss), HeadSharding(vocab=("tensor",))
    devices = jax.sharding.Mesh(jax.devices()[:2], ("tensor",))
    parts = jax.shard_map(
        lambda *p: hopper.totals_and_gradients(head, split, *p),
        mesh=devices,
        in_specs=(P(), P("tensor"), P(), P()),
        out_specs=(P(), P(), P("tensor")),
        check_vma=False,
    )
    whole = jax.jit(lambda *p: by_tokens.totals_and_gradients(head, HeadSharding(), *p))(*p)
    for one, other in zip(jax.tree.leaves(jax.jit(parts)(*p)), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5 * np.abs(other).max())


def test_smoothing_reaches_the_words_that_a_filter_leaves_out(plain: list[int]) -> None:
    p = arrays()
    p[1] = p[1].at[512:].multiply(1e-3).at[:512].multiply(4.0)
    p[2] = p[2] % 512
    head = HeadSpec(SMOOTHED, filter=2.0**-12)
    ours = jax.jit(lambda *p: hopper.totals_and_gradients(head, HeadSharding(), *p))(*p)
    theirs = jax.jit(lambda *p: by_tokens.totals_and_gradients(head, HeadSharding(), *p))(*p)
    jax.effects_barrier()
    assert sum(plain) == 2 * 4 + 6
    # Rows whose tiles were left out get what smoothing gives them, which is all that they get.
    one, other = ours[2][1024:], theirs[2][1024:]
    assert np.linalg.norm(other) > 0 and np.linalg.norm(one - other) <= 1e-3 * np.linalg.norm(other)


def test_a_filter_leaves_out_what_lies_below_it_and_no_target(plain: list[int]) -> None:
    p = arrays()
    p[1] = p[1].at[512:].multiply(1e-3).at[:512].multiply(4.0)  # all the probability in the first two tiles
    p[2] = jnp.where(jnp.arange(512) < 128, p[2] % 512, 1800)  # and few targets elsewhere
    head = HeadSpec(PLAIN, filter=2.0**-12)
    ours = jax.jit(lambda *p: hopper.totals_and_gradients(head, HeadSharding(), *p))(*p)
    theirs = jax.jit(lambda *p: by_tokens.totals_and_gradients(head, HeadSharding(), *p))(*p)
    jax.effects_barrier()
    # Of 8 x 4 tiles: the first two rows of four, the first of each other, and three with the target 1,800.
    assert sum(plain) == 2 * 4 + 6 + 3
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.linalg.norm(one - other) <= 2e-3 * np.linalg.norm(other)


@pytest.mark.parametrize("filter", [0.0, 2.0**-12])
@pytest.mark.parametrize("soft_cap", [None, 20.0])
def test_gradients_in_bf16_are_nearer_to_the_truth_than_those_of_full_logits_in_bf16(
    plain: list[int], soft_cap: float | None, filter: float
) -> None:
    p = arrays(dtype=jnp.bfloat16)
    p[1] = p[1].at[512:].multiply(0.25)  # words of which few tokens make anything
    p[2] = p[2] % 512
    p[3] = p[3] / p[3].sum()
    head = HeadSpec(lambda stats: stats.lse - stats.target, soft_cap, filter=filter)
    ours = jax.jit(lambda *p: hopper.totals_and_gradients(head, HeadSharding(), *p))(*p)[1:]
    naive = jax.jit(partial(by_full_logits, soft_cap=soft_cap))(*p)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in p[:2]]
        truth = [np.asarray(x) for x in by_full_logits(*wide, *p[2:], soft_cap=soft_cap)]
    for one, other, right in zip(ours, naive, truth, strict=True):
        error, theirs = (np.abs(np.asarray(x, np.float64) - right) for x in (one, other))
        assert (error <= theirs + 1e-2).all()  # the rule of cut cross entropy's own tests
        assert np.linalg.norm(error) <= min(np.linalg.norm(theirs), 2.7e-3 * np.linalg.norm(right))
    jax.effects_barrier()
    assert (sum(plain) < 8 * 4) == (filter > 0)


def by_full_logits(x: Any, w: Any, targets: Any, weights: Any, *, soft_cap: float | None) -> Any:
    """The gradients of both by logits of their own dtype."""

    def loss(x: Any, w: Any) -> Any:
        logits = hopper._capped(x @ w.T, soft_cap)
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return (weights * (jax.nn.logsumexp(logits, axis=-1) - target)).sum()

    return jax.grad(loss, argnums=(0, 1))(x, w)


def test_ignored_tokens_make_no_tile_necessary(plain: list[int]) -> None:
    p = arrays()
    p[3] = jnp.zeros_like(p[3])
    out = jax.jit(lambda *p: hopper.totals_and_gradients(HeadSpec(PLAIN, filter=1e-4), HeadSharding(), *p))(
        *p
    )
    jax.effects_barrier()
    assert sum(plain) == 8 and not any(np.asarray(x).any() for x in jax.tree.leaves(out))


def test_the_kernels_are_lowered_for_a_gpu() -> None:
    p = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays(256, 512, 256, jnp.bfloat16)]
    for soft_cap, unembed in ((None, p[1]), (30.0, jax.ShapeDtypeStruct(p[1].shape, jnp.float32))):
        head = HeadSpec(PLAIN, soft_cap, filter=2.0**-12)
        step = jax.jit(lambda *p, head=head: hopper.totals_and_gradients(head, HeadSharding(), *p))
        text = step.trace(p[0], unembed, *p[2:]).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("mosaic_gpu") >= 4


def test_what_the_kernels_cannot_do_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    p = arrays(dtype=jnp.bfloat16)
    with pytest.raises(
        UserError, match=r"loss.backend: kernels cannot be used here: they are for Hopper GPUs"
    ):
        fused_cross_entropy(PLAIN, *p, split="kernel")
    # Where they are not, a filter asks for nothing that must be done.
    assert float(fused_cross_entropy(PLAIN, *p, filter=1e-3).loss) == float(
        fused_cross_entropy(PLAIN, *p).loss
    )
    here = SimpleNamespace(platform="gpu", compute_capability="9.0")
    monkeypatch.setattr(hopper.jax, "devices", lambda: [here])
    monkeypatch.setattr(hopper, "_try", lambda *_: None)
    assert hopper.unsupported_reason(HeadSpec(PLAIN), HeadSharding(), *p[:2]) is None
    assert hopper.unsupported_reason(HeadSpec(SMOOTHED), HeadSharding(), *p[:2]) is None
    for head, hidden, unembed, why in (
        (HeadSpec(SMOOTHED, 30.0), p[0], p[1], "mean of capped logits"),
        (HeadSpec(PLAIN), p[0].astype(jnp.float32), p[1], "bfloat16"),
        (HeadSpec(PLAIN), p[0][:, :500], p[1], "500 tokens are not a multiple of 128"),
        (HeadSpec(PLAIN), p[0], p[1][:2000], "2000 rows are not a multiple of 256"),
        (HeadSpec(PLAIN), p[0], p[1][:, :128], "128 columns are not a multiple of 256"),
    ):
        assert why in str(hopper.unsupported_reason(head, HeadSharding(), hidden, unembed))
    assert "mesh.fsdp" in str(
        hopper.unsupported_reason(HeadSpec(PLAIN), HeadSharding(width=("fsdp",)), *p[:2])
    )


def test_a_filter_that_no_kernel_uses_is_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    here = SimpleNamespace(platform="gpu", compute_capability="9.0")
    monkeypatch.setattr(hopper.jax, "devices", lambda: [here])
    monkeypatch.setattr(hopper, "_try", lambda *_: None)

    def told(tokens: int, filter: float) -> list[str]:
        p = arrays(tokens, 512, 256, jnp.bfloat16)
        trained = jax.grad(lambda x: fused_cross_entropy(PLAIN, x, *p[1:], filter=filter).loss)
        with collect_warnings() as lines:
            jax.make_jaxpr(trained)(p[0])
            jax.make_jaxpr(lambda x: fused_cross_entropy(PLAIN, x, *p[1:], filter=filter).loss)(p[0])
        return lines

    assert told(256, 1e-3) == told(250, 0.0) == []
    (line,) = told(250, 1e-3)
    assert line.startswith("loss.filter_eps: 0.001 has no effect here")
    assert "since 250 tokens are not a multiple of 128" in line
