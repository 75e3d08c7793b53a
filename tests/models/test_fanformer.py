"""FANformer against the formulas of its paper in float64, on random configurations: transformers has none."""

import math
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from headrace.checkpoint.manager import Checkpoints
from headrace.checkpoint.open_run import open_run
from headrace.config import reader, recipe, sections
from headrace.convert import from_huggingface, to_huggingface
from headrace.models import fanformer, load_base_family
from headrace.nn import module
from headrace.nn.linear import project
from headrace.nn.stack import Execution
from headrace.objectives import Batch, SpecialTokens, TrainTask, load_objective
from headrace.training import step
from tests.support import parity


def layer(x: Any, w: Any, b: Any, width: int) -> Any:
    """FANLayer(x) = [cos(W_p x) | sin(W_p x) | W_g x + b], as one matrix with a bias throughout."""
    y = x @ w + b
    angles = width - w.shape[1]
    assert 2 * angles + (w.shape[1] - angles) == width
    return torch.cat([torch.cos(y[..., :angles]), torch.sin(y[..., :angles]), y[..., angles:]], -1)


def norm(x: Any, w: Any, eps: float) -> Any:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * w


def turn(x: Any, theta: float) -> Any:
    """Rotary positions: pair (i, i + h/2) as a complex number, times e^(i position frequency)."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequencies
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angles)[None, :, None]
    return torch.cat([turned.real, turned.imag], -1)


def reference(cfg: Any, w: dict[str, Any], tokens: Any) -> Any:
    """Logits."""
    x = w["embedding"][tokens]
    _rows, length = tokens.shape
    hidden = torch.triu(torch.full((length, length), -math.inf, dtype=torch.float64), 1)
    for n in range(cfg.layers):
        own = {name: value for name, value in w.items() if name.startswith("blocks.")}
        one = {name.removeprefix("blocks."): value[n] for name, value in own.items()}
        h = norm(x, one["attn_norm"], cfg.norm_eps)
        f = layer(h, one["w_fan"], one["b_fan"], cfg.embed)
        q = turn(torch.einsum("bsd,dnh->bsnh", f, one["w_q"]), cfg.rope_theta)
        k = turn(torch.einsum("bsd,dnh->bsnh", f, one["w_k"]), cfg.rope_theta)
        if cfg.value_projection == "matrix":
            v = torch.einsum("bsd,dnh->bsnh", f, one["w_v"])
        else:
            width = cfg.kv_heads * cfg.head_dim
            v = layer(h, one["w_value_fan"], one["b_value_fan"], width).reshape(k.shape)
        k, v = (t.repeat_interleave(cfg.heads // cfg.kv_heads, 2) for t in (k, v))
        scores = torch.einsum("bsnh,btnh->bnst", q, k) / math.sqrt(cfg.head_dim) + hidden
        x = x + torch.einsum("bnst,btnh,nhd->bsd", scores.softmax(-1), v, one["w_o"])
        h = norm(x, one["mlp_norm"], cfg.norm_eps)
        gate = h @ one["w_gate"]
        x = x + (gate * torch.sigmoid(gate) * (h @ one["w_up"])) @ one["w_down"]
    return norm(x, w["final_norm"], cfg.norm_eps) @ w["embedding" if cfg.tie_embeddings else "head"].T


@st.composite
def configs(draw: Any) -> Any:
    heads = draw(st.sampled_from([1, 2, 4]))
    return reader.part_class("models", "fanformer")(
        layers=draw(st.integers(1, 3)),
        embed=heads * draw(st.sampled_from([48 // heads, 64 // heads])),
        heads=heads,
        kv_heads=draw(st.sampled_from([n for n in (1, 2, 4) if heads % n == 0])),
        mlp=draw(st.integers(20, 60)),
        vocab=draw(st.integers(40, 96)),
        periodic_share=draw(st.sampled_from([0.0, 0.125, 0.2, 0.5])),
        value_projection=draw(st.sampled_from(["matrix", "layer"])),
        tie_embeddings=draw(st.booleans()),
        norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
        rope_theta=draw(st.sampled_from([100.0, 10_000.0])),
    )


def random_weights(cfg: Any, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)

    def leaf(path: Any, wanted: Any) -> jax.Array:
        middle, spread = (1.0, 0.2) if module.path_name(path).endswith("_norm") else (0.0, 0.15)
        return jnp.asarray(rng.normal(middle, spread, wanted.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, module.shapes(fanformer.Model, cfg))


@parity.ANEW
@hypothesis.given(cfg=configs(), length=st.integers(2, 20), seed=st.integers(0, 10**6))
def test_parity_of_fanformer_with_its_formulas(cfg, length, seed):
    params = random_weights(cfg, seed)
    tokens = np.random.default_rng(seed).integers(4, cfg.vocab, (2, length))
    positions = np.broadcast_to(np.arange(length), tokens.shape)
    batch = Batch(jnp.asarray(tokens), jnp.ones_like(tokens), jnp.asarray(positions))
    exec_opts = Execution(reader.part_class("attention", "auto")(), "float32")
    job = TrainTask(
        model=cfg,
        objective=reader.part_class("objectives", "causal")(),
        loss=reader.part_class("losses", "cross_entropy", sections.LossKeys)(chunk_size=32),
        exec_opts=exec_opts,
        special_tokens=SpecialTokens(cfg.vocab, pad=0, bos=1, eos=2, mask=3),
        family=load_base_family("fanformer"),
    )

    @jax.jit
    def run(params: Any) -> Any:
        examples = load_objective(job.objective).prepare(job, batch, jax.random.key(0))
        axes = module.axes(fanformer.Model, cfg)
        grads, sums = step.accumulate_gradients(job, axes, params, step.to_microbatches(examples, 1))
        logits = project(params.unembed, params(cfg, examples.inputs, exec_opts=exec_opts), "bsd,vd->bsv")
        return logits, sums["loss"] / sums["count"], jax.tree.map(lambda g: g / sums["count"], grads)

    logits, loss, grads = run(params)
    exact = {
        path: torch.tensor(np.asarray(w), dtype=torch.float64, requires_grad=True)
        for path, w in module.named_leaves(params)
    }
    given = torch.tensor(tokens)
    wanted = reference(cfg, exact, given)
    answer = torch.nn.functional.cross_entropy(wanted[:, :-1].flatten(0, 1), given[:, 1:].flatten())
    answer.backward()
    wanted = wanted.detach().numpy()
    assert np.abs(wanted).max() > 1
    assert np.abs(logits - wanted).max() <= 2e-5
    assert abs(float(loss) - answer.item()) <= 1e-5
    for path, gradient in module.named_leaves(grads):
        exactly = exact[path].grad.numpy()
        apart = np.linalg.norm(gradient - exactly) / max(np.linalg.norm(exactly), 1e-6)
        assert apart <= 1e-3, (path, apart)


def config_of(**settings: Any) -> Any:
    sizes: dict[str, Any] = dict(layers=2, embed=64, heads=4, kv_heads=2, mlp=48, vocab=64)
    return reader.part_class("models", "fanformer")(**sizes | settings)


def test_the_layer_is_as_wide_as_its_input_whatever_the_share_of_periods():
    for periodic in (0.0, 0.125, 0.3, 0.5):
        cfg = config_of(periodic_share=periodic)
        shapes = module.shapes(fanformer.Model, cfg).blocks
        x = jnp.ones((1, 3, 64))
        out = fanformer.fourier_layer(
            x, jnp.ones(shapes.w_fan.shape[1:]), jnp.ones(shapes.b_fan.shape[1:]), 64
        )
        assert out.shape == (1, 3, 64)
    with pytest.raises(ValueError, match=r"^periodic_share: expected a share from 0 to 0.5"):
        config_of(periodic_share=0.6)


def test_fresh_weights_are_drawn_as_published():
    cfg = config_of(layers=4, embed=256, mlp=512, vocab=512)
    params = jax.jit(lambda: module.init(fanformer.Model, cfg, jax.random.key(0)))()
    share = 0.9866  # of the deviation that is left when nothing lies beyond three
    assert params.embedding.std() == pytest.approx(share / 16, rel=0.02)
    assert params.blocks.w_fan.std() == pytest.approx(share / 16, rel=0.02)
    for number in range(4):
        smaller = share / math.sqrt(2 * (number + 1))
        assert params.blocks.w_o[number].std() == pytest.approx(smaller / 16, rel=0.02)
        assert params.blocks.w_down[number].std() == pytest.approx(smaller / math.sqrt(512), rel=0.02)
    assert not params.blocks.b_fan.any()


def test_the_published_size_is_that_of_its_parts():
    """OLMo 1B with norms that have weights, and in each layer a matrix with a bias more."""
    cfg = recipe.load("recipes/fanformer-1b.yaml").model
    d = 2048
    olmo = 50304 * d + 16 * (4 * d * d + 3 * d * 8192 + 2 * d) + d
    assert module.count(fanformer.Model, cfg) == olmo + 16 * (d + 1) * (d - d // 8)


@pytest.mark.parametrize("values", ["matrix", "layer"])
def test_what_is_exported_can_be_imported_again(values, tmp_path):
    section = dict(
        use="fanformer", layers=2, embed=32, heads=4, kv_heads=2, mlp=48, vocab=64, value_projection=values
    )
    tree = {
        "run_dir": str(tmp_path / "run"),
        "model": section,
        "data": {"path": "data/none", "sequence_length": 64},
        "optimizer": {"learning_rate": 1e-3},
        "schedule": {"steps": 10},
    }
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(reader.dump(tree))
    cfg = recipe.load_run(tmp_path / "run")
    checkpoints = Checkpoints(str(tmp_path / "run"))
    checkpoints.save_params(random_weights(cfg.model), {})
    checkpoints.close()
    first = open_run(cfg)
    to_huggingface.export(first, str(tmp_path / "out"), "float32")
    from_huggingface.import_model(str(tmp_path / "out"), str(tmp_path / "back"))
    second = open_run(recipe.load_run(tmp_path / "back"))
    assert second.recipe.model == first.recipe.model
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(first.params), jax.device_get(second.params))
