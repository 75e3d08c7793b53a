"""xLSTM against transformers' on random configurations, and its recurrences against their definition."""

import dataclasses
import json
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from hypothesis import strategies as st

from headrace.checkpoint.manager import Checkpoints
from headrace.checkpoint.open_run import open_run
from headrace.config import reader, recipe
from headrace.convert import from_huggingface, to_huggingface
from headrace.errors import UserError
from headrace.inference import generate
from headrace.inference.sampling import Sampling
from headrace.models import xlstm
from headrace.nn import mlstm as nn_mlstm
from headrace.nn import module
from headrace.nn.linear import project
from headrace.nn.mlstm import MatrixState, ScalarState, convolve, mlstm, slstm
from headrace.nn.stack import Execution
from tests.support import parity

# What a head reads from its memory is now and then a small difference of large parts, and the norm behind it
# makes it large again: transformers' own logits differ by 9e-5 from chunks of 8 to chunks of 16. So little of
# it goes on to the logits here that these are good to 2e-5, and an error in it would still be seen.
MIXED = 0.1


@st.composite
def sizes(draw: Any) -> dict[str, Any]:
    heads, layers = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 2))
    embed = heads * draw(st.sampled_from([48 // heads, 64 // heads]))
    return dict(
        vocab_size=draw(st.integers(40, 96)),
        hidden_size=embed,
        embedding_dim=embed,
        num_hidden_layers=layers,
        num_blocks=layers,
        num_heads=heads,
        qk_dim_factor=draw(st.sampled_from([0.5, 1.0])),
        ffn_proj_factor=draw(st.sampled_from([1.3, 2.667])),
        ffn_round_up_to_multiple_of=draw(st.sampled_from([4, 16])),
        gate_soft_cap=draw(st.sampled_from([5.0, 15.0])),
        output_logit_soft_cap=draw(st.sampled_from([5.0, 30.0])),
        norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
        autocast_kernel_dtype="float32",
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


@parity.ANEW
@hypothesis.given(settings=sizes(), chunks=st.integers(1, 3), size=st.sampled_from([8, 16]))
def test_parity_of_xlstm(settings, chunks, size, tmp_path_factory):
    mode = dict(mode="train", chunk_size=size, return_last_states=True)
    theirs = transformers.xLSTMForCausalLM(transformers.xLSTMConfig(**settings, **mode))
    parity.fill(theirs, norm=1.0)
    with torch.no_grad():
        theirs.lm_head.weight.mul_(2.0)
        for block in theirs.backbone.blocks:
            block.mlstm_layer.out_proj.weight.mul_(MIXED)
    # To open all input gates of a head alike changes next to nothing: the gradient of their bias is a small
    # difference of parts that are thousands of times as large.
    folder = tmp_path_factory.mktemp("xlstm")
    parity.check(theirs, folder, length=chunks * size, least=1e-3, export=False)


def given(length: int, rows: int = 2, seed: int = 0, spread: float = 2.0) -> tuple[Any, Any]:
    """Queries, keys, values and gates of 3 heads, keys of 4 features and values of 6."""
    rng = np.random.default_rng(seed)
    shapes = [(rows, length, 3, 4), (rows, length, 3, 4), (rows, length, 3, 6)]
    gates = tuple(jnp.asarray(spread * rng.normal(size=(rows, length, 3)), jnp.float32) for _ in range(2))
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes), gates


def recurrently(qkv: Any, gates: Any, starts: np.ndarray) -> np.ndarray:
    """The definition, in float64 and without a maximum: as one would write it if numbers had no end."""
    q, k, v, write, forget = (np.asarray(x, np.float64) for x in (*qkv, *gates))
    rows, length, heads, keys = q.shape
    out = np.zeros(v.shape)
    for b in range(rows):
        for n in range(heads):
            memory, norm = np.zeros((keys, v.shape[-1])), np.zeros(keys)
            for t in range(length):
                if starts[t]:
                    memory, norm = 0 * memory, 0 * norm
                f, i = 1 / (1 + np.exp(-forget[b, t, n])), np.exp(write[b, t, n])
                memory = f * memory + i * np.outer(k[b, t, n], v[b, t, n])
                norm = f * norm + i * k[b, t, n]
                query = q[b, t, n] / np.sqrt(keys)
                out[b, t, n] = query @ memory / max(abs(query @ norm), 1.0)
    return out


def fresh(rows: int = 2) -> MatrixState:
    return nn_mlstm.empty_matrix_state((rows, 3), 4, 6)


run = jax.jit(mlstm, static_argnames="chunk")


@parity.ANEW
@hypothesis.given(length=st.integers(1, 40), chunk=st.integers(1, 16), seed=st.integers(0, 10**6))
def test_chunks_of_any_size_give_what_the_recurrence_does(length, chunk, seed):
    starts = np.random.default_rng(seed).random(length) < 0.15
    segments = jnp.broadcast_to(jnp.asarray(1 + np.cumsum(starts)), (2, length))
    qkv, gates = given(length, seed=seed)
    out, _ = run(qkv, gates, fresh(), segments, chunk=chunk)
    np.testing.assert_allclose(out, recurrently(qkv, gates, starts), atol=2e-5, rtol=2e-4)


def test_a_state_carried_on_is_as_good_as_one_pass():
    qkv, gates = given(37)
    whole, last = run(qkv, gates, fresh(), None, chunk=8)
    state, parts = fresh(), []
    for first, end in ((0, 5), (5, 6), (6, 29), (29, 37)):
        cut = lambda xs, first=first, end=end: tuple(x[:, first:end] for x in xs)
        out, state = run(cut(qkv), cut(gates), state, None, chunk=8)
        parts.append(out)
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state, last)


def test_gradients_of_chunks_are_those_of_the_recurrence():
    qkv, gates = given(21)
    segments = jnp.asarray(np.repeat([[1, 2, 3]], 2, axis=0).repeat([9, 4, 8], axis=1))
    weights = jnp.asarray(np.random.default_rng(5).normal(size=(2, 21, 3, 6)), jnp.float32)

    def gradients(chunk: int) -> Any:
        loss = lambda given: jnp.sum(mlstm(*given, fresh(), segments, chunk=chunk)[0] * weights)
        return jax.jit(jax.grad(loss))((qkv, gates))

    for ours, wanted in zip(*(jax.tree.leaves(gradients(chunk)) for chunk in (8, 1)), strict=True):
        np.testing.assert_allclose(ours, wanted, atol=1e-4)


@pytest.mark.parametrize("write", [-15.0, 15.0])
def test_no_gate_and_no_length_gives_anything_but_numbers(write):
    forget = [-15.0, 0.0, 15.0]
    length = 4096
    qkv, _ = given(length, rows=1)
    qkv = tuple(x.astype(jnp.bfloat16) for x in qkv)
    gates = tuple(jnp.broadcast_to(jnp.asarray(gate), (1, length, 3)) for gate in (write, forget))

    def loss(qkv: Any, gates: Any) -> jax.Array:
        return mlstm(qkv, gates, fresh(1))[0].astype(jnp.float32).sum()

    value, grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(qkv, gates)
    assert np.isfinite(value) and all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(grads))


def scalars(length: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(3)
    gates = 2 * rng.normal(size=(2, length, 4, 3, 5))
    return jnp.asarray(gates, jnp.float32), jnp.asarray(0.5 * rng.normal(size=(4, 3, 5, 5)), jnp.float32)


def empty(rows: int = 2) -> ScalarState:
    return nn_mlstm.empty_scalar_state((rows, 3, 5))


def test_slstm_is_its_definition_and_forgets_between_documents():
    gates, recurrent = scalars(14)
    segments = jnp.asarray(np.repeat([[1, 2]], 2, axis=0).repeat([6, 8], axis=1))
    out, _ = jax.jit(slstm)(gates, recurrent, empty(), segments)
    exact, r = np.asarray(gates, np.float64), np.asarray(recurrent, np.float64)
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    for t in range(14):
        if t in (0, 6):
            c = n = h = np.zeros((2, 3, 5))
        z, i, f, o = np.moveaxis(exact[:, t] + np.einsum("bnh,gnhi->bgni", h, r), 1, 0)
        c, n = sigmoid(f) * c + np.exp(i) * np.tanh(z), sigmoid(f) * n + np.exp(i)
        h = sigmoid(o) * c / n
        np.testing.assert_allclose(out[:, t], h, atol=1e-5)
    apart = [slstm(gates[:, part], recurrent, empty())[0] for part in (slice(0, 6), slice(6, 14))]
    np.testing.assert_allclose(np.concatenate(apart, 1), out, atol=1e-6)


def test_slstm_goes_on_from_its_state():
    gates, recurrent = scalars(9)
    whole, last = slstm(gates, recurrent, empty())
    first, state = slstm(gates[:, :4], recurrent, empty())
    second, state = slstm(gates[:, 4:], recurrent, state)
    np.testing.assert_allclose(np.concatenate([first, second], 1), whole, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state, last)


def test_a_convolution_sees_the_last_inputs_of_its_own_document():
    rng = np.random.default_rng(4)
    x, kernel = rng.normal(size=(1, 9, 2)), rng.normal(size=(4, 2))
    before, segments = rng.normal(size=(1, 3, 2)), np.asarray([[1] * 5 + [2] * 4])
    out = convolve(*(jnp.asarray(a, jnp.float32) for a in (x, kernel, before)), jnp.asarray(segments))
    for t in range(9):
        wanted = np.zeros(2)
        for back in range(4):
            inside = t - back >= (0 if t < 5 else 5)
            if inside:
                wanted += kernel[back] * x[0, t - back]
            elif t < 5:
                wanted += kernel[back] * before[0, 3 + t - back]
        np.testing.assert_allclose(out[0, t], wanted, atol=1e-5)


SIZES: dict[str, Any] = dict(layers=4, embed=32, heads=4, mlp=48, vocab=64)
HOW = Execution(reader.part_class("attention", "xla")(), "float32")


def model(**settings: Any) -> tuple[Any, Any]:
    """Weights large enough to tell inputs apart, gates half open."""
    cfg = reader.part_class("models", "xlstm")(**SIZES | settings)
    rng = np.random.default_rng(0)

    def leaf(path: Any, wanted: Any) -> jax.Array:
        middle, spread = (1.0, 0.2) if module.path_name(path).endswith("_norm") else (0.0, 0.15)
        return jnp.asarray(rng.normal(middle, spread, wanted.shape), jnp.float32)

    params = jax.tree_util.tree_map_with_path(leaf, module.shapes(xlstm.Model, cfg))
    return cfg, dataclasses.replace(
        params, blocks=dataclasses.replace(params.blocks, w_o=params.blocks.w_o * MIXED)
    )


@pytest.mark.parametrize("every", [0, 2])
def test_decoding_gives_what_the_whole_text_does(every):
    cfg, params = model(slstm_every=every)
    tokens = jnp.asarray(np.random.default_rng(1).integers(4, 64, (2, 12)))
    whole = jax.jit(lambda p, t: p(cfg, t, exec_opts=HOW))(params, tokens)
    step = jax.jit(lambda p, t, cache: p.decode(cfg, t, cache, exec_opts=HOW), donate_argnums=2)
    hidden, cache = step(params, tokens[:, :9], params.init_cache(cfg, 2, 128, jnp.float32))
    parts = [hidden]
    for t in range(9, 12):
        hidden, cache = step(params, tokens[:, t : t + 1], cache)
        parts.append(hidden)
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=2e-5)


def test_documents_are_as_if_alone_and_the_past_alone_is_seen_with_slstm_too():
    cfg, params = model(layers=2, slstm_every=2)
    tokens = jnp.asarray(np.random.default_rng(1).integers(4, 64, (2, 12)))
    segments = jnp.asarray(np.repeat([[1, 2]], 2, axis=0).repeat([5, 7], axis=1))
    hidden = jax.jit(lambda t, s: params(cfg, t, exec_opts=HOW, segments=s))
    packed = hidden(tokens, segments)
    for part in (slice(0, 5), slice(5, 12)):
        alone = hidden(tokens[:, part], jnp.ones_like(tokens[:, part]))
        np.testing.assert_allclose(packed[:, part], alone, atol=1e-5)
    np.testing.assert_array_equal(hidden(tokens.at[:, :5].set(7), segments)[:, 5:], packed[:, 5:])
    np.testing.assert_array_equal(hidden(tokens.at[:, 9].set(7), segments)[:, :9], packed[:, :9])


def test_fresh_weights_are_drawn_as_published():
    cfg = reader.part_class("models", "xlstm")(**SIZES | dict(embed=256, mlp=512, slstm_every=2))
    params = jax.jit(lambda: module.init(xlstm.Model, cfg, jax.random.key(0)))()
    assert params.blocks.w_q.std() == pytest.approx((2 / (5 * 256)) ** 0.5, rel=0.02)
    assert params.blocks.w_o.std() == pytest.approx(2 / (4 * 16), rel=0.02)
    assert not params.blocks.w_input.any() and (params.blocks.b_input == -10).all()
    np.testing.assert_allclose(params.blocks.b_forget[1], [3, 4, 5, 6])
    np.testing.assert_allclose(params.scalars.b_forget[1, :, 7], [3, 4, 5, 6])


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"heads": 5}, "heads"),
        ({"slstm_every": 3}, "slstm_every"),
        ({"slstm_every": 1}, "slstm_every"),
        ({"gate_soft_cap": 0.0}, "gate_soft_cap"),
        ({"embed": 20}, "key_dim"),
        ({"mlp": 0}, "mlp"),
    ],
)
def test_sizes_that_cannot_be_are_refused(settings, key):
    with pytest.raises(ValueError, match=f"^{key}: expected"):
        reader.part_class("models", "xlstm")(**SIZES | settings)


def run_of(folder: Any, cap: float | None = 30.0, **settings: Any) -> Any:
    cfg, params = model(**settings)
    tree = {
        "run_dir": str(folder),
        "model": {"use": "xlstm"} | reader.to_dict(cfg),
        "data": {"path": "data/none", "sequence_length": 64},
        "loss": {"soft_cap": cap},
        "optimizer": {"learning_rate": 1e-3},
        "schedule": {"steps": 10},
        "compute": {"dtype": "float32"},
    }
    folder.mkdir()
    (folder / "recipe.yaml").write_text(reader.dump(tree))
    checkpoints = Checkpoints(str(folder))
    checkpoints.save_params(params, {})
    checkpoints.close()
    return open_run(recipe.load_run(folder))


@pytest.mark.parametrize("sizes", [{}, dict(embed=48, heads=3, key_dim=5, mlp=41)], ids=["usual", "odd"])
def test_transformers_loads_an_export_and_computes_the_same(sizes, tmp_path):
    cap = None if sizes else 30.0
    trained = run_of(tmp_path / "run", cap, **{"layers": 2} | sizes)
    to_huggingface.export(trained, str(tmp_path / "out"), "float32")
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    exact = settings | {"autocast_kernel_dtype": "float32"}  # theirs is bfloat16 unless it is told
    (tmp_path / "out" / "config.json").write_text(json.dumps(exact))
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(info.values()), info
    tokens = np.random.default_rng(1).integers(4, 64, (2, 20))
    with torch.no_grad():
        wanted = theirs.eval()(torch.tensor(tokens)).logits.numpy()
    params = jax.tree.map(jnp.asarray, jax.device_get(trained.params))
    hidden = jax.jit(lambda p, t: p(trained.recipe.model, t, exec_opts=HOW))(params, tokens)
    logits = project(params.unembed, hidden, "bsd,vd->bsv")
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    assert np.abs(wanted).max() > 1
    assert np.abs(logits - wanted).max() <= 2e-5

    from_huggingface.import_model(str(tmp_path / "out"), str(tmp_path / "back"))
    back = open_run(recipe.load_run(tmp_path / "back"))
    assert back.recipe.model == trained.recipe.model
    assert back.recipe.loss.soft_cap == (cap or 1e6)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(back.params), jax.device_get(params))


@pytest.mark.parametrize(
    ("sizes", "cached"),
    [(dict(embed=64), False), (dict(embed=128), True), (dict(embed=96, heads=2, key_dim=32), False)],
    ids=["tiny", "multiples of 64", "values of 96"],
)
def test_an_export_generates_in_transformers_as_users_call_it(sizes, cached, tmp_path):
    """With its cache where transformers has one of the right width, and without where not."""
    trained = run_of(tmp_path / "run", **{"layers": 2} | sizes)
    to_huggingface.export(trained, str(tmp_path / "out"), "float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", autocast_kernel_dtype="float32"
    )
    assert theirs.config.use_cache == cached
    ids = torch.tensor([[5, 40, 9, 60, 33, 12, 7]])
    with torch.no_grad():
        plain = theirs(ids)
        found = theirs.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, 7:]
    assert (plain.cache_params is not None) == cached
    wanted = list(generate.sample_tokens(trained, ids[0].tolist(), 12, Sampling(temperature=0)))
    assert found.tolist() == wanted and len(set(wanted)) > 3


def test_texts_longer_than_a_chunk_go_through_an_export_as_well(tmp_path):
    """transformers takes more than 16,384 positions in chunks, and so with a cache, unless it is told not."""
    to_huggingface.export(run_of(tmp_path / "run", layers=1), str(tmp_path / "out"), "float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert theirs(torch.full((1, 16_448), 5)).logits.isfinite().all()


def test_what_transformers_has_not_is_refused(tmp_path):
    mixed = run_of(tmp_path / "run", slstm_every=2)
    with pytest.raises(UserError, match=r"model.slstm_every: found 2, but transformers has no xLSTM with"):
        to_huggingface.export(mixed, str(tmp_path / "out"), "float32")
    for name, value in {"use_bias": True, "weight_mode": "fused", "v_dim_factor": 2.0}.items():
        with pytest.raises(UserError, match=f"config.json: {name}: found {value}, only"):
            xlstm.from_hf_config({"model_type": "xlstm", name: value})
    with pytest.raises(UserError, match=r"config.json: hidden_size: found nothing"):
        xlstm.from_hf_config({"model_type": "xlstm"})
