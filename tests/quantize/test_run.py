"""Quantization of whole models: what is written, evaluated and generated, and how an interrupted one
resumes."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from headrace.checkpoint.open_run import LoadedRun, open_run
from headrace.config import reader, recipe
from headrace.config.sections import TrainRecipe
from headrace.errors import UserError
from headrace.inference.generate import sample_tokens
from headrace.inference.sampling import Sampling
from headrace.model_formats.hf_tensors import to_hf_layout
from headrace.model_formats.quantized_folder import QuantizedWeight, find_linears
from headrace.model_wrappers import load_family
from headrace.nn import module
from headrace.nn.stack import Execution
from headrace.quantize import finetune, run
from headrace.quantize.layer_cache import LayerCache
from headrace.quantize.methods import rtn
from headrace.quantize.run import QuantizeRequest
from headrace.training import run as training_run
from headrace.training.evaluate import evaluate_run
from tests.quantize.matrices import KEY, gptq_bits

is_quantized = lambda w: isinstance(w, QuantizedWeight)


@pytest.fixture(scope="module")
def trained(trained_recipe) -> TrainRecipe:
    """The recipe of a trained run."""
    return recipe.load(trained_recipe)


def open_newest(cfg: TrainRecipe) -> LoadedRun:
    return open_run(recipe.load_run(cfg.run_dir))


def quantize(
    cfg: TrainRecipe,
    target: Path,
    name: str,
    *settings: str,
    samples: int = 32,
    dtype: str = "float32",
    data: str | None = None,
    source: LoadedRun | None = None,
) -> LoadedRun:
    method = recipe.load_method(name, settings)
    request = QuantizeRequest(str(target), method, samples, dtype, data or cfg.data.path)
    run.quantize(source or open_newest(cfg), request, lambda line: None)
    return open_run(recipe.load_run(target))


def perplexity(run: LoadedRun) -> float:
    return evaluate_run(run)["perplexity"]


def test_a_quantized_folder_has_the_expected_size_and_perplexity(trained, tmp_path):
    quantized = quantize(trained, tmp_path / "out", "rtn", "bits=4", "group_size=32", dtype="float16")
    assert perplexity(quantized) == pytest.approx(perplexity(open_newest(trained)), rel=0.2)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    cfg = quantized.recipe.model
    matrices = find_linears(load_family(cfg), cfg)
    assert {m.name.rsplit(".", 1)[1] for m in matrices} >= {"q_proj", "o_proj", "gate_proj", "down_proj"}
    layers_bits = 2 * sum(gptq_bits(m.inputs, m.outputs, bits=4, group_size=32) for m in matrices)
    others = sum(
        leaf.size
        for path, leaf in module.named_leaves(quantized.params)
        if not is_quantized(leaf) and "stored" not in path
    )
    assert 8 * sum(tensor.nbytes for tensor in tensors.values()) == layers_bits + 16 * others


def test_a_quantized_model_generates_what_its_dense_matrices_would(trained, tmp_path):
    quantized = quantize(trained, tmp_path / "out", "rtn", "bits=2", "group_size=32")
    params = jax.tree.map(to_dense, quantized.params, is_leaf=is_quantized)
    dense = dataclasses.replace(quantized, params=params)
    texts = [list(sample_tokens(model, [5, 9, 40], 12, Sampling(0.0))) for model in (quantized, dense)]
    assert texts[0] == texts[1]


def to_dense(w: Any) -> Any:
    """A stack of quantized matrices as a dense weight; other weights as they are."""
    if not is_quantized(w):
        return w
    return jax.vmap(lambda stored: QuantizedWeight(stored, w.sub_matrix).to_dense())(w.stored)


def interrupt_save(monkeypatch: pytest.MonkeyPatch, index: int, *, after: bool) -> None:
    """Raise KeyboardInterrupt when layer `index` is saved, before or after it is written."""
    save = LayerCache.save

    def interrupted(self: LayerCache, i: int, matrices: Any) -> None:
        if i != index or after:
            save(self, i, matrices)
        if i == index:
            raise KeyboardInterrupt

    monkeypatch.setattr(LayerCache, "save", interrupted)


def test_an_interrupted_quantization_resumes(trained, tmp_path, monkeypatch):
    settings = "gptq", "bits=4", "group_size=32"
    quantize(trained, tmp_path / "uninterrupted", *settings)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_save(patch, 1, after=False)
        quantize(trained, tmp_path / "out", *settings)
    assert os.listdir(tmp_path / "out.unfinished")
    with pytest.raises(UserError, match="found an interrupted quantization with method"):
        quantize(trained, tmp_path / "out", "gptq", "bits=3", "group_size=32")
    resumed = quantize(trained, tmp_path / "out", *settings)
    files = [Path(tmp_path / name / "model.safetensors") for name in ("uninterrupted", "out")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert not (tmp_path / "out.unfinished").exists() and resumed.step == 0


def test_a_quantization_of_other_weights_is_not_resumed(trained, tmp_path, monkeypatch):
    source, settings = open_newest(trained), ("rtn", "bits=4", "group_size=32")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_save(patch, 0, after=True)
        quantize(trained, tmp_path / "out", *settings, source=source)
    # As if the same folder had another run by now, of as many steps.
    moved = jax.tree.map(lambda w: w.at[(0,) * w.ndim].add(1e-3), source.params)
    with pytest.raises(UserError, match="found an interrupted quantization with weights"):
        other = dataclasses.replace(source, params=moved)
        quantize(trained, tmp_path / "out", *settings, source=other)
    quantize(trained, tmp_path / "out", *settings, source=source)


def test_a_refused_request_leaves_no_folder(trained, tmp_path):
    for target, data, message in (
        ("gs://bucket/out", None, "found target gs://bucket/out, expected a folder on this"),
        (tmp_path / "out", str(tmp_path / "nowhere"), "nowhere"),
    ):
        with pytest.raises(UserError, match=message):
            quantize(trained, target, "gptq", "group_size=32", data=data)
    assert not list(tmp_path.iterdir())


def test_a_model_trained_with_dpo_is_stored_with_a_recipe_of_plain_training(trained, tmp_path):
    """Neither adapters nor a frozen copy are left of it."""
    source = open_newest(trained)
    objective = reader.part_class("objectives", "dpo")()
    source = dataclasses.replace(source, recipe=dataclasses.replace(source.recipe, objective=objective))
    quantized = quantize(trained, tmp_path / "out", "rtn", "bits=4", "group_size=32", source=source)
    assert quantized.recipe.objective.use == "causal" and perplexity(quantized) > 1


def test_two_models_trained_together_are_refused(trained, tmp_path):
    deberta = reader.part_class("models", "deberta")
    cfg = deberta(layers=1, embed=32, heads=2, mlp=32, vocab=64, generator_layers=1)
    source, objective = open_newest(trained), reader.part_class("objectives", "rtd")()
    params = module.init(load_family(cfg).Model, cfg, KEY)
    pair_recipe = dataclasses.replace(source.recipe, model=cfg, objective=objective)
    pair = dataclasses.replace(source, recipe=pair_recipe, params=params)
    for name in ("rtn", "gptq"):
        with pytest.raises(UserError, match="found two models, trained together by rtd"):
            quantize(trained, tmp_path / "out", name, "bits=4", "group_size=32", source=pair)
    assert os.listdir(tmp_path) == []


def test_invalid_targets_and_samples_are_refused(trained, tmp_path):
    with pytest.raises(UserError, match="already exists"):
        quantize(trained, tmp_path, "rtn")
    with pytest.raises(UserError, match="samples: found 0, expected 1 or more"):
        quantize(trained, tmp_path / "out", "rtn", samples=0)


def test_an_unreadable_record_of_an_interrupted_quantization_is_reported(trained, tmp_path):
    (tmp_path / "out.unfinished").mkdir()
    (tmp_path / "out.unfinished" / "request.json").touch()
    with pytest.raises(UserError, match=r"request\.json: not valid JSON; remove the folder"):
        quantize(trained, tmp_path / "out", "rtn", "bits=4", "group_size=32")


def test_a_quantized_folder_is_not_trained_further(trained, tmp_path):
    quantize(trained, tmp_path / "out", "rtn", "bits=4", "group_size=32")
    with pytest.raises(UserError, match="out holds a quantized model, which cannot be trained further"):
        training_run.run(recipe.load_run(tmp_path / "out"))


def raise_interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_end_to_end_finetuning_lowers_perplexity_and_resumes(trained, tmp_path, monkeypatch):
    settings = "vptq", "bits=2", "vector_length=2", "tune_steps=0"
    rough = quantize(trained, tmp_path / "rough", *settings)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(finetune, "finetune_all", raise_interrupt)
        quantize(trained, tmp_path / "out", *settings, "finetune_steps=20")
    monkeypatch.setattr(run, "quantize_matrix", raise_interrupt)  # no layer is quantized a second time
    finetuned = quantize(trained, tmp_path / "out", *settings, "finetune_steps=20")
    assert perplexity(finetuned) < perplexity(rough)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("rough", "out"))
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {name for name in before if name.endswith("centroids.weight")}


@pytest.mark.slow
def test_more_bits_are_not_worse_and_vptq_with_2_bits_beats_rounding_to_3(library, tmp_path):
    cfg = library()
    measure = lambda name, method, *settings: perplexity(
        quantize(cfg, tmp_path / name, method, *settings, samples=64)
    )
    plain = perplexity(open_newest(cfg))
    vptq = {bits: measure(f"vptq-{bits}", "vptq", f"bits={bits}") for bits in (4, 3, 2)}
    untuned = measure("untuned", "vptq", "bits=2", "tune_steps=0")
    finetuned = measure("finetuned", "vptq", "bits=2", "finetune_steps=100")
    rounded = [measure(f"rtn-{group}", "rtn", "bits=3", f"group_size={group}") for group in (0, 128)]
    print(plain, vptq, untuned, finetuned, rounded)
    assert plain <= vptq[4] <= vptq[3] <= vptq[2]
    assert finetuned < vptq[2] < min(untuned, *rounded)


SIZES = dict(layers=2, embed=64, heads=2, kv_heads=2, mlp=64, vocab=64, window=8, global_every=2)


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", [name for name in reader.part_names("models") if name != "torch"])
def test_every_family_computes_the_same_from_quantized_matrices_as_from_dense_ones(name):
    cls = reader.part_class("models", name)
    cfg = cls(**{key: size for key, size in SIZES.items() if key in cls.__dataclass_fields__})
    family = load_family(cfg)
    params = jax.jit(lambda key: module.init(family.Model, cfg, key))(KEY)
    weights = quantize_weights(cfg, dict(module.named_leaves(params)))
    assert weights
    replace = lambda path, w: weights.get(module.path_name(path), w)
    quantized = jax.tree_util.tree_map_with_path(replace, params)
    dense = jax.tree.map(to_dense, quantized, is_leaf=is_quantized)
    for (path, w), (_, original) in zip(module.named_leaves(dense), module.named_leaves(params), strict=True):
        np.testing.assert_allclose(w, original, atol=0.02, err_msg=path)
    matmul = getattr(cfg, "products", "compute")
    if matmul != "compute":
        pytest.skip("the family rounds its weights in its own way")
    exec_opts = Execution(reader.part_class("attention", "xla")(), "float32")
    tokens = jnp.asarray(np.random.default_rng(0).integers(4, 64, (2, 16)))
    call = jax.jit(lambda model, tokens: model(cfg, tokens, exec_opts=exec_opts))
    np.testing.assert_allclose(call(quantized, tokens), call(dense, tokens), atol=1e-5)


def quantize_weights(cfg: Any, params: dict[str, jax.Array]) -> dict[str, QuantizedWeight]:
    """Round the matrices whose sizes GPTQ's files can store to 8 bits. Returns weights by path."""
    method = recipe.load_method("rtn", ["bits=8", "group_size=0"])
    weights: dict[str, QuantizedWeight] = {}
    for linear in find_linears(load_family(cfg), cfg):
        if linear.inputs % 4 or linear.outputs % 4:
            continue
        layers = []
        for index in range(len(params[linear.paths[0]])):
            parts = [
                to_hf_layout(np.asarray(params[path][index]), place.pattern)
                for path, place in zip(linear.paths, linear.sub_matrices, strict=True)
            ]
            layers.append(rtn.quantize(method, jnp.asarray(np.concatenate(parts).T), None, KEY))
        weights |= linear.to_weights(jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers))
    return weights
