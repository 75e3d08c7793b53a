"""Mixtures of experts: transformers' models, the routing, the balance, and the experts over a mesh."""

import importlib
import math
from pathlib import Path
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from hypothesis import strategies as st

from headrace.config import reader, recipe
from headrace.errors import UserError
from headrace.hardware.slices import parse_slice
from headrace.nn import experts, sharding
from headrace.nn.mlp import activate
from headrace.plan import estimate
from tests.support import parity
from tests.training.test_step import Bench, assert_close


@st.composite
def sizes(draw: Any) -> dict[str, Any]:
    """Settings of transformers; the first of each list is what the first example has."""
    heads, experts = draw(st.sampled_from([4, 2, 1])), draw(st.sampled_from([8, 5, 3]))
    return dict(
        vocab_size=96,
        hidden_size=heads * draw(st.sampled_from([16, 8])),
        intermediate_size=draw(st.integers(20, 60)),
        num_hidden_layers=draw(st.sampled_from([3, 2])),
        num_attention_heads=heads,
        num_key_value_heads=draw(st.sampled_from([n for n in (2, 1, 4) if heads % n == 0])),
        head_dim=draw(st.sampled_from([8, 16])),
        rms_norm_eps=draw(st.sampled_from([1e-5, 1e-2])),
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": draw(st.sampled_from([1000.0, 100.0]))},
        num_experts_per_tok=draw(st.integers(1, experts)),
        num_local_experts=experts,
        router_aux_loss_coef=0.0,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        attn_implementation="eager",
        experts_implementation="eager",
    )


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe", "Glm4Moe"])
@parity.ANEW
@hypothesis.given(
    settings=sizes(),
    dense=st.sampled_from([1, 0]),
    normalise=st.booleans(),
    qk_norm=st.booleans(),
    shared=st.sampled_from([1, 2]),
    scale=st.sampled_from([1.5, 1.0]),
)
def test_parity_of_mixtures(kind, settings, dense, normalise, qk_norm, shared, scale, tmp_path_factory):
    if kind == "Qwen3Moe":
        settings |= {"mlp_only_layers": [*range(dense)], "num_experts": settings.pop("num_local_experts")}
        settings |= {"norm_topk_prob": normalise, "moe_intermediate_size": 24}
    if kind == "Glm4Moe":
        settings |= {"n_routed_experts": settings.pop("num_local_experts"), "n_shared_experts": shared}
        settings |= {"norm_topk_prob": normalise, "moe_intermediate_size": 24, "use_qk_norm": qk_norm}
        settings |= {"routed_scaling_factor": scale, "first_k_dense_replace": dense}
        settings["rope_parameters"] |= {"partial_rotary_factor": 1.0}
    theirs = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**settings))
    parity.fill(theirs, norm=1.0)
    with torch.no_grad():
        for name, bias in theirs.named_buffers():
            if name.endswith("correction_bias"):
                bias.normal_(0, 0.3)
    # One expert with a weight of 1 has no gradient for its router but what rounding leaves.
    parity.check(theirs, tmp_path_factory.mktemp(kind), length=20, least=1e-4, fused=True)


def by_hand(kind: str, x: Any, choice: experts.Routing, w: experts.ExpertWeights) -> Any:
    """Every token through every expert, those that it did not choose weighing nothing."""
    much = jnp.sum(jax.nn.one_hot(choice.experts, len(w.gate)) * choice.weights[..., None], axis=-2)
    gate, up = (jnp.einsum("bsd,edf->bsef", x, one) for one in (w.gate, w.up))
    return jnp.einsum("bsef,efd,bse->bsd", activate(kind, gate) * up, w.down, much)


def drawn(count: int, k: int, rows: int = 8, crowd: bool = False) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(count + k)
    shapes = [(count, 8, 12), (count, 8, 12), (count, 12, 8)]
    w = experts.ExpertWeights(
        *(jnp.asarray(rng.normal(size=shape, scale=0.4), jnp.float32) for shape in shapes)
    )
    x = jnp.asarray(rng.normal(size=(rows, 16, 8)), jnp.float32)
    logits = rng.normal(size=(rows, 16, count)) + (4 * (np.arange(count) < k) if crowd else 0)
    chosen = jnp.asarray(np.argsort(-logits)[..., :k])
    return x, experts.Routing(chosen, jnp.asarray(rng.uniform(size=chosen.shape), jnp.float32)), w


MESHES = [{}, {"fsdp": 8}, {"expert": 8}, {"fsdp": 2, "expert": 4}, {"tensor": 2, "expert": 4}]
MESHES += [{"data": 2, "context": 2, "expert": 2}, {"fsdp": 2, "tensor": 2, "expert": 2}]


@pytest.mark.thin(5)
@pytest.mark.parametrize("crowd", [False, True], ids=["spread", "crowded"])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_experts_over_a_mesh_give_what_each_token_by_hand_does(sizes, crowd):
    x, choice, w = drawn(8, 2, crowd=crowd)  # when crowded, one device has all to do, in several rounds
    d = jnp.asarray(np.random.default_rng(5).normal(size=x.shape), jnp.float32)

    def both(way: Any) -> Any:
        def total(x: Any, weights: Any, w: Any) -> Any:
            return jnp.sum(d * way("swiglu", x, experts.Routing(choice.experts, weights), w))

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(x, choice.weights, w)

    wanted = both(by_hand)
    devices = sharding.make_mesh(sizes, jax.devices()[: math.prod(sizes.values())])
    with jax.set_mesh(devices):
        found = both(experts.mix)
    apart = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(b).max()), found, wanted)
    assert max(jax.tree.leaves(apart)) < 1e-5, apart


def test_gathered_weights_of_all_layers_are_not_kept_for_the_backward_pass():
    layers, shapes = 8, [(8, 32, 128), (8, 32, 128), (8, 128, 32)]
    names = [
        ("layers", "experts", *own) for own in (("embed", "expert_mlp"),) * 2 + (("expert_mlp", "embed"),)
    ]
    devices = sharding.make_mesh({"fsdp": 8}, jax.devices())

    def lay(shape: tuple[int, ...], names: Any, dtype: Any = jnp.float32) -> Any:
        home = jax.sharding.NamedSharding(devices, sharding.partition_spec(names, shape, devices))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=home)

    w = [lay((layers, *shape), own) for shape, own in zip(shapes, names, strict=True)]
    x, chosen = lay((8, 8, 32), ("batch", None, None)), lay((8, 8, 2), (None,) * 3, jnp.int32)
    weights = lay((8, 8, 2), (None,) * 3)

    def needs(again: bool) -> int:
        def loss(w: Any, x: Any, chosen: Any, weights: Any) -> Any:
            choice = experts.Routing(chosen, weights)
            body = lambda x, w: (
                x + experts.mix("swiglu", x, choice, experts.ExpertWeights(*w), gather_again=again)
            )
            return jnp.sum(jax.lax.scan(lambda x, w: (body(x, w), None), x, w)[0] ** 2)

        compiled = jax.jit(jax.grad(loss)).lower(tuple(w), x, chosen, weights).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    with jax.set_mesh(devices):
        whole = 4 * layers * sum(math.prod(shape) for shape in shapes)
        assert needs(False) > whole > 2 * needs(True)


def settled(**settings: Any) -> dict[str, Any]:
    return dict(top_k=2, scores="softmax", normalize=True, scale=1.0, balance=0.0) | settings


def test_the_gradient_of_the_bias_is_how_many_tokens_chose_each_expert():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(3, 8, 6)), jnp.float32)
    bias = jnp.asarray(rng.normal(size=6), jnp.float32)
    real = jnp.asarray(np.arange(8) < [[8], [3], [0]])

    def total(logits: Any, bias: Any) -> Any:
        return jnp.sum(experts.route(logits, bias, real, **settled()).weights ** 2)

    plain, loads = jax.grad(total, argnums=(0, 1))(logits, bias)
    chosen = np.argsort(-np.asarray(jax.nn.softmax(logits) + bias))[..., :2]
    counts = np.bincount(chosen[np.asarray(real)].reshape(-1), minlength=6)
    np.testing.assert_array_equal(loads, counts)
    # Which experts are chosen is all that the bias has a say in.
    taken = jax.nn.one_hot(chosen, 6).sum(-2)

    def alone(logits: Any) -> Any:
        sizes = jax.nn.softmax(logits) * taken
        return jnp.sum((sizes / sizes.sum(-1, keepdims=True)) ** 2)

    np.testing.assert_allclose(plain, jax.grad(alone)(logits), atol=1e-6)
    moved = experts.update_router_bias(0.01, bias, loads)
    np.testing.assert_allclose(moved - bias, 0.01 * np.sign(counts.mean() - counts), atol=1e-7)


@pytest.mark.parametrize("k", [1, 3])
def test_the_balancing_loss_has_the_gradient_of_transformers(k):
    theirs = importlib.import_module("transformers.models.mixtral.modeling_mixtral").load_balancing_loss_func
    logits = np.random.default_rng(k).normal(size=(2, 10, 5)).astype(np.float32)
    there = torch.tensor(logits.reshape(20, 5), requires_grad=True)
    theirs((there,), num_experts=5, top_k=k).backward()
    # Theirs is the mean over tokens, with shares that sum to k.
    wanted = 20 / k * there.grad.numpy().reshape(logits.shape)
    cfg = settled(top_k=k, balance=0.1)
    weightless = lambda logits: 0.0 * jnp.sum(experts.route(logits, None, None, **cfg).weights)
    np.testing.assert_allclose(jax.grad(weightless)(jnp.asarray(logits)), 0.1 * wanted, atol=1e-6)


SMALL = ("model=null", "model.use=moe", "model.layers=2", "model.embed=32", "model.heads=4")
SMALL += ("model.kv_heads=2", "model.mlp=24", "optimizer.use=sgd", "optimizer.learning_rate=0.5")
DEEPSEEK = (
    "model.dense_layers=1",
    "model.shared_experts=1",
    "model.router_activation=sigmoid",
    "model.routed_scale=1.5",
)
DEEPSEEK += ("model.expert_mlp=16",)


ALL_THREE = {"fsdp": 2, "tensor": 2, "expert": 2}
LOSS = ("model.load_balance=loss",)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        pytest.param(DEEPSEEK, ALL_THREE, id="deepseek"),
        pytest.param(DEEPSEEK, {"expert": 8}, id="deepseek, experts alone", marks=pytest.mark.slow),
        pytest.param((), ALL_THREE, id="bias", marks=pytest.mark.slow),
        pytest.param(LOSS, {"expert": 8}, id="loss", marks=pytest.mark.slow),
    ],
)
def test_the_mesh_changes_neither_loss_nor_update(tiny, sizes, kind):
    cfg = tiny(*SMALL, *kind)
    (one, rows), (other, others) = Bench(cfg).run(3), Bench(cfg, sizes).run(3)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose([r[name] for r in others], [r[name] for r in rows], rtol=1e-4, atol=3e-5)
    assert_close(one, other, 1e-5)


def test_parts_of_a_batch_sum_their_loads(tiny):
    (whole, rows), (parts, others) = (Bench(tiny(*SMALL, f"batch.microbatches={n}")).run(2) for n in (1, 4))
    assert_close(whole, parts, 1e-5)
    assert rows[0]["busiest_expert"] == others[0]["busiest_expert"] and 1 < rows[0]["busiest_expert"] < 8
    bias = np.asarray(whole.params.blocks.bias)
    assert np.abs(bias).max() == pytest.approx(0.002) and np.unique(np.abs(bias).round(6)).size <= 3


@pytest.mark.parametrize("balance", ["bias", "loss"])
def test_experts_that_are_crowded_are_relieved(balance):
    """Half of all experts are favoured by all tokens, until the bias or the loss has had its way."""
    logits = np.random.default_rng(0).normal(size=(4, 64, 8)) + 2.0 * (np.arange(8) < 4)
    cfg = settled(balance=0.0 if balance == "bias" else 1.0)

    def total(bias: Any, offset: Any) -> Any:
        return jnp.sum(experts.route(jnp.asarray(logits) + offset, bias, None, **cfg).weights)

    @jax.jit
    def turn(_: Any, now: Any) -> Any:
        bias, offset = now
        loads, slope = jax.grad(total, argnums=(0, 1))(bias, offset)
        if balance == "bias":
            return experts.update_router_bias(0.002, bias, loads), offset
        return bias, offset - 0.01 * slope

    def busiest(bias: Any, offset: Any) -> float:
        loads = jax.grad(total)(bias, offset) if balance == "bias" else None
        if loads is None:
            chosen = experts.route(jnp.asarray(logits) + offset, bias, None, **cfg).experts
            loads = jnp.bincount(chosen.reshape(-1), length=8)
        return float(loads.max() / loads.mean())

    start = jnp.zeros(8), jnp.zeros(8)
    assert busiest(*start) > 1.6
    assert busiest(*jax.lax.fori_loop(0, 300, turn, start)) < 1.2


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"top_k": 9}, "top_k"),
        ({"dense_layers": 2}, "dense_layers"),
        ({"expert_mlp": 8}, "expert_mlp"),
        ({"load_balance": "none", "load_balance_rate": 0.1}, "load_balance_rate"),
        ({"shared_experts": -1}, "shared_experts"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, key):
    moe = reader.part_class("models", "moe")
    with pytest.raises(ValueError, match=f"^{key}: expected"):
        moe(**dict(layers=2, embed=64, heads=4, kv_heads=2, mlp=112) | settings)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("mesh.expert=3", "mesh.expert: .*divisor of the model's experts, 8"),
        ("compute.matmul=fp8", "compute.matmul: .*experts are not multiplied in 8 bits"),
    ],
)
def test_a_recipe_says_what_experts_cannot_do(tiny, override, said):
    with pytest.raises(UserError, match=said):
        tiny(*SMALL, "batch.sequences=24", override)


def test_a_mesh_for_experts_needs_a_model_with_some(tiny):
    with pytest.raises(UserError, match=r"mesh.expert: .*divisor of the model's experts, 1"):
        tiny("mesh.expert=2")


def test_a_plan_counts_the_experts_that_a_token_meets_and_holds_them_all():
    path = Path(__file__).parents[2] / "recipes/moe-671b.yaml"
    found = estimate.estimate_step(recipe.load(path), parse_slice("v5p-512"))
    assert found.mesh == dict(data=1, fsdp=32, tensor=1, context=1, expert=8)
    assert found.parameters == 671_254_178_560
    # 256 experts, of which a token meets 9 in each of 58 layers, attention, three dense layers and the head.
    met = 58 * 9 * 3 * 7168 * 2048 + 61 * 7168 * 208 * 128 + 3 * 3 * 7168 * 18432 + 7168 * 129280
    scores = 6 * 61 * 96 * 128 * 4096
    assert found.flops_per_token == pytest.approx(6 * met + scores, rel=5e-3)
    assert found.weight_bytes == pytest.approx(4 * 671_254_178_560 / 256, rel=0.01)  # nothing twice
    fewer = recipe.load(path, ["mesh.expert=2"])
    assert estimate.estimate_step(fewer, parse_slice("v5p-512")).exposed_seconds > found.exposed_seconds
