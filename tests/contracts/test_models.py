"""What holds of every model file, found by looking into the folder: a new one needs no line in here."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.config import reader
from headrace.model_wrappers import load_family
from headrace.models import fixed_matmul
from headrace.nn import module
from headrace.nn.remat import REMAT_POLICIES
from headrace.nn.stack import Execution

# Of layers that differ by turns, the third sees all of the text, and a fourth is left over.
SIZES: dict[str, Any] = dict(
    layers=4, embed=32, heads=4, kv_heads=2, mlp=48, vocab=64, window=8, global_every=3
)
SIZES |= dict(
    module="transformers:LlamaForCausalLM",
    config=dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
)
LENGTH = 24


class Case:
    """A small model of one family with weights large enough to tell inputs apart."""

    def __init__(self, name: str):
        cls = reader.part_class("models", name)
        known = {f.name for f in dataclasses.fields(cls)}
        if "module" in known:
            pytest.importorskip("torchax", reason="needs torchax: pip install 'headrace[torch]'")
        self.cfg = cls(**{key: value for key, value in SIZES.items() if key in known})
        self.family = load_family(self.cfg)
        fresh = module.init(self.family.Model, self.cfg, jax.random.key(0))
        self.params = jax.tree.map(lambda w: w * 4 if w.ndim > 1 and w.std() > 0 else w, fresh)
        self.tokens = jnp.asarray(np.random.default_rng(0).integers(4, 64, (2, LENGTH)))

    def compiled(self, how: dict[str, Any] | None = None, **seen: Any) -> Callable[[Any], np.ndarray]:
        """Hidden states of tokens."""
        execution = Execution(reader.part_class("attention", "xla")(), "float32", **how or {})
        run = jax.jit(lambda p, t: p(self.cfg, t, exec_opts=execution, **seen))
        return lambda tokens: np.asarray(run(self.params, tokens))

    def hidden(self, tokens: Any, how: dict[str, Any] | None = None) -> np.ndarray:
        return self.compiled(how)(tokens)


@pytest.fixture(scope="module", params=reader.part_names("models"))
def case(request) -> Case:
    return Case(request.param)


def test_a_decoder_never_sees_the_future_and_an_encoder_does(case):
    changed = case.tokens.at[:, 15].set((case.tokens[:, 15] + 7) % 60 + 4)
    run = case.compiled()
    before, after = run(case.tokens), run(changed)
    assert np.abs(before[:, 15:] - after[:, 15:]).max() > 1e-3
    if case.cfg.causal:
        np.testing.assert_array_equal(before[:, :15], after[:, :15])
    else:
        assert np.abs(before[:, :15] - after[:, :15]).max() > 1e-5


def test_packed_documents_do_not_see_each_other(case):
    segments = jnp.where(jnp.arange(LENGTH) < 10, 1, 2) * jnp.ones((2, 1), jnp.int32)
    positions = jnp.where(jnp.arange(LENGTH) < 10, jnp.arange(LENGTH), jnp.arange(LENGTH) - 10)
    run = case.compiled(segments=segments, positions=jnp.broadcast_to(positions, segments.shape))
    whole = run(case.tokens)
    for part in (slice(0, 10), slice(10, LENGTH)):
        changed = case.tokens.at[:, part].set(5)
        other = slice(10, LENGTH) if part.start == 0 else slice(0, 10)
        np.testing.assert_array_equal(run(changed)[:, other], whole[:, other])


def test_decoding_from_a_cache_gives_what_the_whole_text_does(case):
    if not case.cfg.causal:
        pytest.skip("an encoder continues nothing")
    exec_opts = Execution(reader.part_class("attention", "xla")(), "float32")
    step = jax.jit(lambda p, tokens, cache: p.decode(case.cfg, tokens, cache, exec_opts=exec_opts))
    cache, parts = case.params.init_cache(case.cfg, 2, 32, jnp.float32), []
    for first in range(0, LENGTH, 8):
        hidden, cache = step(case.params, case.tokens[:, first : first + 8], cache)
        parts.append(hidden)
    wanted = case.hidden(case.tokens)
    # To 8 bits, which may tip either way: 2e-7 more of the embedding moves BitNet's states by 1e-2.
    rounding = 1e-4 if fixed_matmul(case.cfg) == "compute" else 3e-2
    np.testing.assert_allclose(np.concatenate(parts, 1), wanted, atol=rounding * np.abs(wanted).max())


@pytest.mark.thin(5)
@pytest.mark.parametrize(
    "how",
    [{"remat": name} for name in REMAT_POLICIES] + [{"unroll": 2}, {"unroll": 4, "remat": "attention"}],
    ids=str,
)
def test_how_a_model_is_run_does_not_change_what_it_computes(case, how):
    np.testing.assert_allclose(case.hidden(case.tokens, how), case.hidden(case.tokens), atol=2e-6)


def test_every_weight_has_a_name_at_hugging_face(case):
    assert {path for path, _ in module.named_leaves(case.params)} <= set(case.family.tensor_table(case.cfg))


def test_flops_are_at_least_six_a_weight_that_multiplies(case):
    if not hasattr(case.cfg, "tie_embeddings"):
        pytest.skip("what is in a torch module only it knows: tests/models/test_torch.py")
    looked_up = 0 if case.cfg.tie_embeddings else case.params.embedding.size
    weights = sum(leaf.size for leaf in jax.tree.leaves(case.params)) - looked_up
    # All that a model has is to multiply: whole texts, and every expert.
    whole = {"window": 10_000, "top_k": getattr(case.cfg, "experts", 0)}
    known = {f.name for f in dataclasses.fields(case.cfg)}
    cfg = dataclasses.replace(case.cfg, **{name: value for name, value in whole.items() if name in known})
    short, long = (case.family.flops_per_token(cfg, length) for length in (1, 1025))
    assert 6 * weights <= short < 6.5 * weights
    if case.family.flops_per_token(cfg, 2**20) == case.family.flops_per_token(
        cfg, 2**14
    ):  # no attention, no growth
        caches = [case.params.init_cache(cfg, 1, length, jnp.float32) for length in (8, 64)]
        jax.tree.map(lambda short, long: np.testing.assert_equal(short.shape, long.shape), *caches)
        return
    scores = (6 if cfg.causal else 12) * cfg.layers * cfg.heads * cfg.head_dim * 1024
    if "rope_theta" in {f.name for f in dataclasses.fields(cfg)}:
        assert long - short == pytest.approx(scores)
    else:  # positions take products of their own
        assert scores < long - short <= 2 * scores
