"""BitNet b1.58 against transformers' on random configurations, and its weights in two bits."""

import json
from collections.abc import Iterator
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
from safetensors.numpy import load_file, save_file

from headrace.checkpoint.manager import Checkpoints
from headrace.checkpoint.open_run import LoadedRun, open_run
from headrace.config import reader, recipe
from headrace.convert import from_huggingface, to_huggingface
from headrace.errors import UserError
from headrace.hardware import slices
from headrace.low_precision.cast import cast
from headrace.low_precision.dot import MatmulSpec
from headrace.low_precision.ternary import multiply, round_input, round_weight
from headrace.model_formats import hf_ternary
from headrace.models import bitnet
from headrace.nn import module
from headrace.nn.linear import project
from headrace.nn.module import Axes
from headrace.nn.stack import Execution
from headrace.objectives import SpecialTokens
from headrace.plan import estimate
from headrace.training.task import make_task
from tests.support import parity

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch of itself

ONLINE = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """transformers compiles its roundings, for which it takes a C++ compiler and half a minute."""
    with torch._dynamo.config.patch(disable=True):
        yield


@st.composite
def sizes(draw: Any) -> dict[str, Any]:
    heads = draw(st.sampled_from([1, 2, 4]))
    return dict(
        vocab_size=draw(st.integers(40, 96)),
        hidden_size=heads * draw(st.sampled_from([48 // heads, 64 // heads])),
        intermediate_size=draw(st.integers(5, 14)) * 4,
        num_hidden_layers=draw(st.integers(1, 2)),
        num_attention_heads=heads,
        num_key_value_heads=draw(st.sampled_from([n for n in (1, 2, 4) if heads % n == 0])),
        max_position_embeddings=64,
        rms_norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
        rope_parameters={"rope_type": "default", "rope_theta": draw(st.sampled_from([100.0, 500_000.0]))},
        tie_word_embeddings=draw(st.booleans()),
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def made(settings: dict[str, Any], seed: int = 0) -> Any:
    theirs = transformers.BitNetForCausalLM(transformers.BitNetConfig(**settings))
    theirs = parity.fill(theirs, norm=1.0, seed=seed)
    with torch.no_grad():
        theirs.get_output_embeddings().weight.mul_(2.0)
    return theirs


def rounding(plain: Any, folder: Path) -> Any:
    """transformers' model of the same weights with linear layers that round."""
    plain.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": ONLINE}))
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def closest(model: Any, tokens: np.ndarray) -> float:
    """How far from the middle between two steps of 8 bits, or of three values, the nearest of all numbers
    lies that this model rounds. What is nearer than errors of float32 falls here on one side, there on the
    other, and the models then differ by a whole step."""
    nearest = [0.5]

    def see(layer: Any, inputs: Any) -> None:
        x = inputs[0].detach().double()
        steps = x * 127 / x.abs().amax(-1, keepdim=True)
        w = layer.weight.detach().double()
        ternary = (w / w.abs().mean()).clamp(-1.4, 1.4)
        for numbers, exact in ((steps, 1), (ternary, 100)):  # the same weights there and here, but for a mean
            nearest.append(exact * float((numbers - numbers.floor() - 0.5).abs().min()))

    hooks = [
        layer.register_forward_pre_hook(see)
        for layer in model.modules()
        if type(layer).__name__ == "AutoBitLinear"
    ]
    assert hooks
    with torch.no_grad():
        model(torch.tensor(tokens))
    for hook in hooks:
        hook.remove()
    return min(nearest)


def read_by(vocab: int, length: int, rows: int) -> np.ndarray:
    """The tokens of `parity.check`."""
    return np.random.default_rng(length).integers(4, vocab, (rows, length))


@parity.ANEW
@hypothesis.given(settings=sizes())
def test_parity_of_bitnet_without_rounding(settings, tmp_path_factory):
    cfg, _ = parity.check(made(settings), tmp_path_factory.mktemp("plain"), length=20, export=False)
    assert not cfg.ternary


@parity.ANEW
@hypothesis.given(settings=sizes(), seed=st.integers(0, 10**6), length=st.integers(3, 6))
def test_parity_of_bitnet_that_rounds_as_it_goes(settings, seed, length, tmp_path_factory):
    theirs = rounding(made(settings, seed), tmp_path_factory.mktemp("plain"))
    tokens = read_by(settings["vocab_size"], length, 1)
    hypothesis.assume(closest(theirs, tokens) > 5e-5)
    cfg, _ = parity.check(theirs, tmp_path_factory.mktemp("online"), length=length, rows=1, export=False)
    assert cfg.ternary


def run_of(folder: Path, seed: int = 0, **sizes: Any) -> LoadedRun:
    """A run folder as training leaves it, with weights large enough for logits of several units."""
    section = dict(layers=2, embed=32, heads=4, kv_heads=2, mlp=48, vocab=64) | sizes
    tree = {
        "run_dir": str(folder),
        "model": {"use": "bitnet"} | section,
        "data": {"path": "data/none", "sequence_length": 64},
        "optimizer": {"learning_rate": 1e-3},
        "schedule": {"steps": 10},
        "compute": {"dtype": "float32"},
    }
    folder.mkdir()
    (folder / "recipe.yaml").write_text(reader.dump(tree))
    rng = np.random.default_rng(seed)

    def leaf(path: Any, wanted: Any) -> np.ndarray:
        middle, spread = (1.0, 0.2) if module.path_name(path).endswith("_norm") else (0.0, 0.3)
        return rng.normal(middle, spread, wanted.shape).astype(np.float32)

    cfg = recipe.load_run(folder)
    checkpoints = Checkpoints(str(folder))
    checkpoints.save_params(
        jax.tree_util.tree_map_with_path(leaf, module.shapes(bitnet.Model, cfg.model)), {}
    )
    checkpoints.close()
    return open_run(cfg)


def logits(run: LoadedRun, tokens: np.ndarray) -> np.ndarray:
    params = jax.tree.map(jnp.asarray, jax.device_get(run.params))
    exec_opts = Execution(run.recipe.attention, "float32")
    hidden = jax.jit(lambda params, tokens: params(run.recipe.model, tokens, exec_opts=exec_opts))(
        params, tokens
    )
    return np.asarray(project(params.unembed, hidden, "bsd,vd->bsv"))


def load(folder: Path) -> Any:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[LoadedRun, np.ndarray]:
    """A run, and tokens of which no number lies where it could be rounded either way."""
    root = tmp_path_factory.mktemp("run")
    run = run_of(root / "run")
    to_huggingface.export(run, str(root / "online"), "float32")
    with torch._dynamo.config.patch(disable=True):
        theirs = load(root / "online")
        drawn = (np.random.default_rng(seed).integers(4, 64, (1, 5)) for seed in range(100))
        return run, next(tokens for tokens in drawn if closest(theirs, tokens) > 5e-5)


@pytest.mark.parametrize("kind", ["online", "packed", "packed, divided by"])
def test_transformers_loads_an_export_and_computes_the_same(kind, trained, tmp_path):
    run, tokens = trained
    target = tmp_path / "out"
    to_huggingface.export(run, str(target), "float32", packed=kind != "online")
    settings = json.loads((target / "config.json").read_text())
    if kind == "packed, divided by":  # the other class of theirs, whose scale is the inverse
        tensors = load_file(target / "model.safetensors")
        other = {name: 1 / t if name.endswith("_scale") else t for name, t in tensors.items()}
        save_file(other, target / "model.safetensors", metadata={"format": "pt"})
        settings["quantization_config"] = {"quant_method": "bitnet", "linear_class": "bitlinear"}
        (target / "config.json").write_text(json.dumps(settings))
    theirs = load(target)
    with torch.no_grad():
        found = theirs(torch.tensor(tokens)).logits.numpy()
    wanted = logits(run, tokens)
    assert np.abs(wanted).max() > 3
    assert np.abs(found - wanted).max() <= 2e-5

    from_huggingface.import_model(str(target), str(tmp_path / "back"))
    back = open_run(recipe.load_run(tmp_path / "back"))
    assert back.recipe.model == run.recipe.model
    assert np.abs(logits(back, tokens) - wanted).max() <= 2e-5


def test_a_packed_export_holds_four_weights_in_a_byte(trained, tmp_path):
    run, _ = trained
    to_huggingface.export(run, str(tmp_path / "out"), "bfloat16", packed=True)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    packed = {name: tensor for name, tensor in tensors.items() if tensor.dtype == np.uint8}
    assert len(packed) == 2 * 7
    assert packed["model.layers.1.mlp.down_proj.weight"].shape == (32 // 4, 48)
    assert {str(tensor.dtype) for name, tensor in tensors.items() if name not in packed} == {"bfloat16"}


def test_weights_are_packed_as_transformers_packs_them():
    w = np.random.default_rng(0).normal(0, 1, (8, 6)).astype(np.float32)
    (_, ours), (name, scale) = hf_ternary.pack_matrix("a.weight", w, np.float32)
    values, same = hf_ternary.round_weight(w)
    assert (name, scale.tolist()) == ("a.weight_scale", [same])
    integration = transformers.integrations.bitnet
    np.testing.assert_array_equal(ours, integration.pack_weights(torch.tensor(values)).numpy())
    again = hf_ternary.unpack_matrix(ours, float(same))
    np.testing.assert_array_equal(hf_ternary.round_weight(again)[0], values)
    assert hf_ternary.round_weight(again)[1] == pytest.approx(same, rel=1e-6)


def test_what_cannot_be_packed_is_refused(tmp_path):
    odd = run_of(tmp_path / "odd", mlp=46)
    with pytest.raises(UserError, match=r"packed: \S+gate_proj.weight has 46 outputs, and"):
        to_huggingface.export(odd, str(tmp_path / "out"), "float32", packed=True)
    plain = run_of(tmp_path / "plain", ternary=False)
    with pytest.raises(
        UserError, match="packed: expected ternary weights, but those of this bitnet model are not"
    ):
        to_huggingface.export(plain, str(tmp_path / "out"), "float32", packed=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method: found gptq, only bitnet can be imported"),
        (ONLINE | {"use_rms_norm": True}, "use_rms_norm: found True"),
        (ONLINE | {"linear_class": "other"}, "linear_class: found other, expected bitlinear or"),
        ("bitnet", "expected names and values in braces"),
    ],
)
def test_other_kinds_of_rounding_are_refused(found, message):
    with pytest.raises(UserError, match=message):
        hf_ternary.read_format({"quantization_config": found})


AXES = Axes(("layers", "embed", "mlp"), stacked=1)


def test_weights_are_three_values_times_the_mean_size_of_their_matrix():
    w = jax.random.normal(jax.random.key(0), (3, 16, 24)) * jnp.asarray([1.0, 0.01, 30.0])[:, None, None]
    values, scale = round_weight(w, AXES)
    assert set(np.unique(values)) == {-1, 0, 1}
    exact = np.asarray(w, np.float64)
    means = np.abs(exact).mean((1, 2))
    np.testing.assert_allclose(scale, means, rtol=1e-6)
    np.testing.assert_array_equal(values, np.clip(np.round(exact / means[:, None, None]), -1, 1))
    zeros, least = round_weight(jnp.zeros((1, 4, 4)), AXES)
    assert not zeros.any() and least[0] == pytest.approx(1e-5)


@pytest.mark.parametrize("native", [False, True])
def test_the_product_and_its_gradients_are_those_of_the_rounded_numbers(native):
    """Straight through: as a plain product at the rounded point, rounded once more by nothing."""
    keys = jax.random.split(jax.random.key(1), 3)
    x, w = jax.random.normal(keys[0], (2, 5, 16)), jax.random.normal(keys[1], (16, 24))
    d = jax.random.normal(keys[2], (2, 5, 24))
    values, scale = round_weight(w[None], AXES)
    x8, w8 = round_input(x, 1), (values[0], scale[0])
    found, pull = jax.vjp(lambda x, w: multiply(MatmulSpec("ternary", native, 1), x, w, x8, w8), x, w)
    size = np.abs(np.asarray(x, np.float64)).max(-1, keepdims=True)
    near = np.round(np.asarray(x, np.float64) / size * 127) * size / 127
    flat = np.asarray(w8[0], np.float64) * float(w8[1])
    np.testing.assert_allclose(found, near @ flat, atol=1e-5)
    d_x, d_w = pull(d)
    np.testing.assert_allclose(d_x, np.asarray(d, np.float64) @ flat.T, atol=1e-5)
    np.testing.assert_allclose(d_w, np.einsum("bsd,bsf->df", near, np.asarray(d, np.float64)), atol=1e-5)


def test_weights_are_rounded_from_full_precision_whoever_asks():
    """In bfloat16 some would fall on the other side."""
    cfg = reader.part_class("models", "bitnet")(layers=1, embed=32, heads=2, kv_heads=1, mlp=48, vocab=64)
    params = module.init(bitnet.Model, cfg, jax.random.key(0))
    backend = reader.part_class("attention", "xla")()
    exec_opts = Execution(backend, "bfloat16", matmul="ternary")
    model = cast(params, module.axes(bitnet.Model, cfg), exec_opts)
    wanted = round_weight(params.blocks.w_gate, AXES)[0]
    np.testing.assert_array_equal(model.blocks.w_gate.values, wanted)
    tokens = jnp.arange(12).reshape(1, 12)
    run = lambda how: jax.jit(lambda model: model(cfg, tokens, exec_opts=how))
    by_itself = run(Execution(backend, "bfloat16"))(params)
    np.testing.assert_array_equal(run(exec_opts)(model), by_itself)


def test_8_bits_on_top_of_three_values_are_refused(tiny):
    with pytest.raises(UserError, match=r"compute.matmul: .*expected compute, since matrices of bitnet are"):
        tiny("model.use=bitnet", "compute.matmul=int8")
    task = make_task(tiny("model.use=bitnet"), SpecialTokens(300, 0, 1, 2, 3))
    assert (task.exec_opts.matmul, task.exec_opts.native_matmul) == ("ternary", False)
    plain = make_task(tiny("model.use=bitnet", "model.ternary=false"), task.special_tokens)
    assert plain.exec_opts.matmul == "compute"


def test_a_plan_counts_forward_products_at_the_rate_of_8_bits():
    def seconds(slice: str, *overrides: str) -> float:
        cfg = recipe.load("recipes/bitnet-2b4t.yaml", list(overrides))
        return estimate.estimate_step(cfg, slices.parse_slice(slice)).matrix_seconds

    assert 0.75 < seconds("v5e-16") / seconds("v5e-16", "model.ternary=false") < 0.95
    assert seconds("v4-32") == seconds("v4-32", "model.ternary=false")  # which has no units for them
