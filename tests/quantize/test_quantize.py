"""Quantisation after training: the methods against plain references, their files against an independent
reading, and models that are quantised, evaluated and continued."""

import dataclasses
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from headrace.checkpoint.open_run import open_run
from headrace.config import reader, recipe
from headrace.errors import UserError
from headrace.low_precision import bitpack, grid
from headrace.model_formats import gptq as model_formats_gptq
from headrace.model_formats import quantized_folder
from headrace.model_formats import vptq as model_formats_vptq
from headrace.model_wrappers import load_family
from headrace.nn import module
from headrace.nn.stack import Execution
from headrace.quantize import hessian as quantize_hessian
from headrace.quantize import kmeans
from headrace.quantize import run as quantize_run
from headrace.quantize.methods import gptq, rtn, vptq
from headrace.training import run as training_run
from headrace.training.evaluate import evaluate_run
from tests.support.trained_run import learnt

KEY = jax.random.key(0)


def a_matrix(inputs=64, outputs=32, seed=0):
    """Weights [inputs outputs] and a Hessian with correlated inputs of unequal size."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((512, inputs)) @ draw.standard_normal((inputs, inputs))
    x *= np.exp(draw.standard_normal(inputs) / 2)
    hessian = x.T @ x / 512
    w = draw.standard_normal((inputs, outputs))
    return jnp.asarray(w, jnp.float32), jnp.asarray(hessian / np.mean(np.diag(hessian)), jnp.float32)


@pytest.mark.parametrize("width", [2, 3, 4, 8, 12, 16, 18, 24, 32])
def test_packed_numbers_come_back_and_lie_end_to_end(width):
    values = np.random.default_rng(width).integers(0, 2**width, (3, 37), dtype=np.uint64).astype(np.uint32)
    packed = bitpack.pack(values, width)
    assert packed.shape == (3, bitpack.num_words(37, width))
    text = "".join(format(int(word), "032b")[::-1] for word in packed[1])  # lowest bit first
    assert [int(text[n * width : (n + 1) * width][::-1], 2) for n in range(37)] == values[1].tolist()
    np.testing.assert_array_equal(bitpack.unpack(packed, width, 37), values)
    np.testing.assert_array_equal(bitpack.unpack(bitpack.pack(jnp.asarray(values), width), width, 37), values)


def test_the_factor_is_of_the_inverse_of_the_damped_hessian():
    hessian = a_matrix()[1]
    upper = np.asarray(quantize_hessian.cholesky_inverse(hessian), np.float64)
    damped = np.asarray(hessian, np.float64) + 0.01 * np.mean(np.diag(hessian)) * np.eye(64)
    np.testing.assert_allclose(np.tril(upper, -1), 0, atol=1e-6)
    np.testing.assert_allclose(upper.T @ upper @ damped, np.eye(64), atol=2e-3)


def test_a_sweep_is_the_plain_loop_of_the_paper():
    """Over more inputs than a block has, with a step of 0.5 as the grid, in float64."""
    w, hessian = a_matrix(inputs=150, outputs=8)
    upper = quantize_hessian.cholesky_inverse(hessian)
    nearest = lambda given, row, w: (jnp.round(2 * w) / 2, w)
    _, rounded, now = quantize_hessian.gptq_sweep(w, upper, nearest, None)
    left, factor = np.asarray(w, np.float64), np.asarray(upper, np.float64)
    for place in range(150):
        np.testing.assert_allclose(now[place], left[place], atol=1e-3)
        error = (left[place] - np.asarray(rounded[place])) / factor[place, place]
        left[place + 1 :] -= np.outer(factor[place, place + 1 :], error)


def test_gptq_beats_rounding_and_equals_it_where_inputs_are_independent():
    w, hessian = a_matrix()
    cfg = reader.part_class("quantize/methods", "gptq")(bits=3, group_size=32)
    plain, second = (one.quantize(cfg, w, hessian, KEY).to_dense().T for one in (rtn, gptq))
    worse, better = (quantize_hessian.proxy_error(w, q, hessian) for q in (plain, second))
    assert better < 0.5 * worse
    alone = gptq.quantize(cfg, w, jnp.eye(64), KEY).to_dense().T
    np.testing.assert_array_equal(alone, plain)


def test_scales_are_the_best_of_the_shares_that_are_tried():
    w = a_matrix(outputs=5)[0]
    found = np.asarray(grid.search_scales(w, 4, 32))
    for group in range(2):
        own = np.asarray(w)[32 * group : 32 * (group + 1)]
        for column in range(5):
            tried = np.float16(np.abs(own[:, column]).max() / 7 * np.arange(1, 101) / 100).astype(np.float32)
            errors = [
                np.sum(np.abs(own[:, column] - s * np.clip(np.round(own[:, column] / s), -8, 7)) ** 4)
                for s in tried
            ]
            best = tried[int(np.argmin(errors))]
            assert found[group, column] == pytest.approx(best, rel=0.03)


def by_hand(tensors, width, inputs, outputs):
    """GPTQ's files as AutoGPTQ first read them: one number after the other."""
    qweight, qzeros, scales, g_idx = (tensors[name] for name in ("qweight", "qzeros", "scales", "g_idx"))
    assert (qweight.dtype, qzeros.dtype, scales.dtype, g_idx.dtype) == (
        np.int32,
        np.int32,
        np.float16,
        np.int32,
    )
    assert qweight.shape == (inputs * width // 32, outputs) and g_idx.shape == (inputs,)
    assert qzeros.shape == (scales.shape[0], outputs * width // 32) and scales.shape[1] == outputs
    number = lambda words, n: sum(
        ((int(words[b // 32]) & 0xFFFFFFFF) >> b % 32 & 1) << b - n * width
        for b in range(n * width, (n + 1) * width)
    )
    made = np.empty((outputs, inputs), np.float32)
    for o in range(outputs):
        for i in range(inputs):
            zero = number(qzeros[g_idx[i]], o) + 1
            made[o, i] = np.float32(number(qweight[:, o], i) - zero) * np.float32(scales[g_idx[i], o])
    return made


@pytest.mark.parametrize("width, group", [(2, 0), (3, 32), (4, 24), (8, 64)])
def test_the_files_of_gptq_read_by_hand_are_the_matrix(width, group):
    w, hessian = a_matrix()
    made = gptq.quantize(
        reader.part_class("quantize/methods", "gptq")(bits=width, group_size=group), w, hessian, KEY
    )
    tensors = {name: np.asarray(getattr(made, name)) for name in model_formats_gptq.TENSORS}
    np.testing.assert_array_equal(by_hand(tensors, width, 64, 32), made.to_dense())
    size = sum(8 * tensor.nbytes for tensor in tensors.values())
    assert size == model_formats_gptq.size(64, 32, bits=width, group=group)


def ladder():
    """Rows of unequal size, inputs in 160 directions and of unequal size: searched for among such W and H so
    that the values tested below come out, since those were told without their matrix. What is shown is their
    order, and that they can be reached."""
    draw = np.random.default_rng(5)
    w = draw.standard_normal((512, 256)) * np.exp(0.45 * draw.standard_normal(512))[:, None]
    directions, size = draw.standard_normal((160, 256)), np.exp(1.05 * draw.standard_normal(256))
    hessian = (np.eye(256) + 10 * directions.T @ directions / 160) * np.outer(size, size)
    return jnp.asarray(w.T, jnp.float32), jnp.asarray(hessian / np.mean(np.diag(hessian)), jnp.float32)


@pytest.mark.slow
def test_each_part_of_vptq_makes_the_error_smaller():
    w, hessian = ladder()
    error = lambda rounded: float(quantize_hessian.proxy_error(w, rounded, hessian))
    each = lambda w: w.reshape(w.shape[0], -1, 4)
    nearest = lambda book: book[kmeans.nearest(book, each(w))].reshape(w.shape)
    scale = jnp.max(jnp.abs(w), axis=0)
    plain, weighted = (kmeans.cluster(KEY, each(w), by, 256) for by in (jnp.ones(256), jnp.diag(hessian)))
    upper = quantize_hessian.cholesky_inverse(hessian)
    sweep = lambda *books: quantize_hessian.gptq_sweep(w, upper, vptq.nearest, books)
    _, rounded, now = sweep(weighted)
    residual = kmeans.cluster(KEY, each(now - rounded), jnp.diag(hessian), 256)
    cfg = reader.part_class("quantize/methods", "vptq")(bits=2, vector_length=4)
    found = {
        "rounding": error(scale * jnp.clip(jnp.round(w / scale), -2, 1)),
        "k-means": error(nearest(plain)),
        "weighted k-means": error(nearest(weighted)),
        "vptq from k-means": error(sweep(plain)[1]),
        "vptq from weighted k-means": error(rounded),
        "in descending order": error(vptq.quantize(cfg, w, hessian, KEY).to_dense().T),
        "with a residual codebook": error(sweep(weighted, residual)[1]),
    }
    assert list(found.values()) == sorted(found.values(), reverse=True)
    wanted = [0.624, 0.1004, 0.0808, 0.0636, 0.0530, 0.0340, 0.0056]
    np.testing.assert_allclose(list(found.values()), wanted, rtol=0.05)


def test_with_a_centroid_for_every_vector_nothing_is_lost():
    draw = np.random.default_rng(0)
    some = draw.standard_normal((12, 4)).astype(np.float16).astype(np.float32)
    w = jnp.asarray(some[draw.integers(0, 12, (24, 8))].reshape(24, 32))
    made = vptq.quantize(
        reader.part_class("quantize/methods", "vptq")(vector_length=4), w, a_matrix(24)[1], KEY
    )
    np.testing.assert_allclose(made.to_dense().T, w, atol=1e-6)


def test_with_independent_inputs_vptq_takes_the_nearest_centroid():
    w = a_matrix(24, 30)[0]  # of which no whole vectors of 4
    cfg = reader.part_class("quantize/methods", "vptq")(vector_length=4)
    made = vptq.quantize(cfg, w, jnp.diag(jnp.linspace(2, 1, 24)), KEY)
    book = jnp.asarray(made.centroids, jnp.float32).reshape(-1, 4)
    each = jnp.pad(w, [(0, 0), (0, 2)]).reshape(24, -1, 4)
    np.testing.assert_array_equal(made.to_dense().T, book[kmeans.nearest(book, each)].reshape(24, -1)[:, :30])


def test_the_order_of_the_inputs_changes_nothing():
    w, hessian = a_matrix()
    other = jnp.asarray(np.random.default_rng(3).permutation(64))
    cfg = reader.part_class("quantize/methods", "vptq")(vector_length=4)
    made = vptq.quantize(cfg, w, hessian, KEY).to_dense().T
    again = vptq.quantize(cfg, w[other], hessian[other][:, other], KEY).to_dense().T
    np.testing.assert_allclose(again, made[other], atol=2e-3)


@pytest.mark.parametrize(
    "options", [dict(bits=2), dict(bits=3), dict(bits=4, outlier_share=0.1), dict(bits=2, vector_length=6)]
)
def test_the_files_of_vptq_read_by_hand_are_the_matrix(options):
    """As the package vptq reads them: indices and those of the residual in one number, lowest bits first."""
    w, hessian = a_matrix()
    made = vptq.quantize(reader.part_class("quantize/methods", "vptq")(**options), w, hessian, KEY)
    layer = model_formats_vptq.settings({"x": made.sizes})["config_for_layers"]["x"]
    assert model_formats_vptq.read_sizes(json.loads(json.dumps(layer))) == made.sizes
    tensors = {name.split(".")[1]: value for name, value in quantized_folder.tensors_of("x", made).items()}
    v, (k0, k), res = layer["vector_lens"][1], layer["num_centroids"], layer["num_res_centroids"][1]
    index, more = int(np.log2(k)), int(np.log2(res)) if res > 0 else 0
    assert tensors["indices"].dtype == np.int32 and tensors["perm"].dtype == np.int16
    columns = []
    if layer["outlier_size"]:
        v0, book = layer["vector_lens"][0], tensors["outlier_centroids"].reshape(k0, -1)
        places = tensors["outlier_indices"][0].view(np.uint16)
        columns += [
            np.concatenate([book[n] for n in places[:, c]])[:32] for c in range(layer["outlier_size"])
        ]
        assert book.shape[1] == v0
    first = tensors["centroids"].reshape(k, v).astype(np.float32)
    second = tensors["res_centroids"].reshape(res, v).astype(np.float32) if more else None
    for c in range(layer["group_size"]):
        column = []
        for words in tensors["indices"][0].view(np.uint32):
            stream = sum(int(word) << 32 * n for n, word in enumerate(words))
            number = stream >> c * (index + more) & 2 ** (index + more) - 1
            column.append(first[number % k] + (second[number >> index] if second is not None else 0))
        columns.append(np.concatenate(column)[:32])
    whole = np.stack(columns, axis=1)[:, np.argsort(tensors["perm"].view(np.uint16))]
    np.testing.assert_allclose(whole, made.to_dense(), atol=1e-6)
    assert sum(8 * tensor.nbytes for tensor in tensors.values()) == vptq.size(
        reader.part_class("quantize/methods", "vptq")(**options), 64, 32
    )


@pytest.fixture(scope="module")
def trained(packed, tmp_path_factory):
    """A run that has learnt something."""
    return recipe.load(learnt(tmp_path_factory.mktemp("trained"), packed, weight_decay=0.1))


def quantized(cfg, target, name, *options, samples=32, dtype="float32"):
    run = open_run(recipe.load_run(cfg.run_dir))
    method = recipe.load_method(name, options)
    quantize_run.quantize(
        run,
        quantize_run.QuantizeRequest(str(target), method, samples, dtype, cfg.data.path),
        lambda line: None,
    )
    return open_run(recipe.load_run(target))


def perplexity(run):
    return evaluate_run(run)["perplexity"]


def test_a_quantised_folder_is_evaluated_and_is_as_large_as_the_formula_says(trained, tmp_path):
    run = quantized(trained, tmp_path / "out", "rtn", "bits=4", "group_size=32", dtype="float16")
    assert perplexity(run) == pytest.approx(perplexity(open_run(recipe.load_run(trained.run_dir))), rel=0.2)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    found = quantized_folder.linears(load_family(run.recipe.model), run.recipe.model)
    assert {one.name.rsplit(".", 1)[1] for one in found} >= {"q_proj", "o_proj", "gate_proj", "down_proj"}
    cfg = recipe.load_method("rtn", ["bits=4", "group_size=32"])
    size = 2 * sum(rtn.size(cfg, one.inputs, one.outputs) for one in found)
    rest = sum(
        leaf.size
        for path, leaf in module.named_leaves(run.params)
        if not isinstance(leaf, quantized_folder.QuantizedWeight) and "stored" not in path
    )
    assert 8 * sum(tensor.nbytes for tensor in tensors.values()) == size + 16 * rest


def test_a_quantised_model_is_continued_as_its_whole_matrices_would_be(trained, tmp_path):
    from headrace.inference.generate import sample
    from headrace.inference.sampling import Sampling

    run = quantized(trained, tmp_path / "out", "rtn", "bits=2", "group_size=32")
    whole = jax.tree.map(
        lambda w: (
            jax.vmap(lambda one: quantized_folder.QuantizedWeight(one, w.place).to_dense())(w.stored)
            if isinstance(w, quantized_folder.QuantizedWeight)
            else w
        ),
        run.params,
        is_leaf=lambda w: isinstance(w, quantized_folder.QuantizedWeight),
    )
    told = [
        list(sample(one, [5, 9, 40], 12, Sampling(0.0)))
        for one in (run, dataclasses.replace(run, params=whole))
    ]
    assert told[0] == told[1]


def test_quantising_goes_on_where_it_was_stopped(trained, tmp_path, monkeypatch):
    once = quantized(trained, tmp_path / "once", "gptq", "bits=4", "group_size=32")
    keep = quantize_run.LayerCache.keep

    def stop(self, number, made):
        if number == 1:
            raise KeyboardInterrupt
        keep(self, number, made)

    monkeypatch.setattr(quantize_run.LayerCache, "keep", stop)
    with pytest.raises(KeyboardInterrupt):
        quantized(trained, tmp_path / "twice", "gptq", "bits=4", "group_size=32")
    monkeypatch.setattr(quantize_run.LayerCache, "keep", keep)
    assert os.listdir(tmp_path / "twice.unfinished")
    with pytest.raises(UserError, match="found work with method"):
        quantized(trained, tmp_path / "twice", "gptq", "bits=3", "group_size=32")
    quantized(trained, tmp_path / "twice", "gptq", "bits=4", "group_size=32")
    one, two = (Path(tmp_path / name / "model.safetensors").read_bytes() for name in ("once", "twice"))
    assert one == two
    assert not (tmp_path / "twice.unfinished").exists() and once.step == 0


def test_layers_of_other_weights_or_other_rows_are_not_taken_up(trained, tmp_path, monkeypatch):
    run, keep = open_run(recipe.load_run(trained.run_dir)), quantize_run.LayerCache.keep

    def stop(self, number, made):
        keep(self, number, made)
        raise KeyboardInterrupt

    def quantize(run, method, data=trained.data.path):
        method = recipe.load_method(method, ["bits=4", "group_size=32"])
        request = quantize_run.QuantizeRequest(str(tmp_path / "out"), method, 32, "float32", data)
        quantize_run.quantize(run, request, lambda line: None)

    monkeypatch.setattr(quantize_run.LayerCache, "keep", stop)
    with pytest.raises(KeyboardInterrupt):
        quantize(run, "rtn")
    monkeypatch.setattr(quantize_run.LayerCache, "keep", keep)
    # As if the same folder held another run by now, of as many steps.
    moved = jax.tree.map(lambda w: w.at[(0,) * w.ndim].add(1e-3), run.params)
    with pytest.raises(UserError, match="found work with weights"):
        quantize(dataclasses.replace(run, params=moved), "rtn")
    quantize(run, "rtn")


def test_a_mistake_leaves_no_work_behind(trained, tmp_path):
    run, method = open_run(recipe.load_run(trained.run_dir)), recipe.load_method("gptq", ["group_size=32"])
    for target, data, said in (
        ("gs://bucket/out", trained.data.path, "--to: found gs://bucket/out, expected a folder on this"),
        (str(tmp_path / "out"), str(tmp_path / "nowhere"), "nowhere"),
    ):
        with pytest.raises(UserError, match=said):
            quantize_run.quantize(
                run, quantize_run.QuantizeRequest(target, method, 32, "float32", data), lambda line: None
            )
    assert not list(tmp_path.iterdir())


def test_what_dpo_has_trained_is_stored_as_a_model_that_goes_on(trained, tmp_path):
    """Neither adapters nor a frozen copy are left of it, so its recipe is one of plain training."""
    run = open_run(recipe.load_run(trained.run_dir))
    dpo = reader.part_class("objectives", "dpo")()
    learnt_from = dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, objective=dpo))
    method = recipe.load_method("rtn", ["bits=4", "group_size=32"])
    request = quantize_run.QuantizeRequest(str(tmp_path / "out"), method, 32, "float32", trained.data.path)
    quantize_run.quantize(learnt_from, request, lambda line: None)
    stored_run = open_run(recipe.load_run(tmp_path / "out"))
    assert stored_run.recipe.objective.use == "causal" and perplexity(stored_run) > 1


def test_two_models_trained_together_are_refused(trained, tmp_path):
    deberta = reader.part_class("models", "deberta")
    cfg = deberta(layers=1, embed=32, heads=2, mlp=32, vocab=64, generator_layers=1)
    run, objective = open_run(recipe.load_run(trained.run_dir)), reader.part_class("objectives", "rtd")()
    params = module.init(load_family(cfg).Model, cfg, jax.random.key(0))
    pair = dataclasses.replace(
        run, recipe=dataclasses.replace(run.recipe, model=cfg, objective=objective), params=params
    )
    for name in ("rtn", "gptq"):
        method = recipe.load_method(name, ["bits=4", "group_size=32"])
        request = quantize_run.QuantizeRequest(
            str(tmp_path / "out"), method, 32, "float32", trained.data.path
        )
        with pytest.raises(UserError, match="found two models, trained together by rtd"):
            quantize_run.quantize(pair, request, lambda line: None)
    assert os.listdir(tmp_path) == []


def test_work_whose_request_cannot_be_read_is_told(trained, tmp_path):
    (tmp_path / "out.unfinished").mkdir()
    (tmp_path / "out.unfinished" / "request.json").touch()
    with pytest.raises(UserError, match=r"request.json: not valid JSON; remove that folder"):
        quantized(trained, tmp_path / "out", "rtn", "bits=4", "group_size=32")


def test_a_quantised_folder_is_not_trained_in(trained, tmp_path):
    quantized(trained, tmp_path / "out", "rtn", "bits=4", "group_size=32")
    with pytest.raises(UserError, match="out holds a quantised model, which is not trained further"):
        training_run.run(recipe.load_run(tmp_path / "out"))


@pytest.mark.slow
def test_codebooks_of_all_layers_learn_together_and_go_on_where_they_were_stopped(
    trained, tmp_path, monkeypatch
):
    options = "bits=2", "vector_length=2", "tune_steps=0"
    rough = quantized(trained, tmp_path / "rough", "vptq", *options)
    together = quantize_run.finetune.finetune_all

    def stop(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(quantize_run.finetune, "finetune_all", stop)
    with pytest.raises(KeyboardInterrupt):
        quantized(trained, tmp_path / "out", "vptq", *options, "finetune_steps=20")
    monkeypatch.setattr(quantize_run.finetune, "finetune_all", together)
    monkeypatch.setattr(quantize_run, "quantize_matrix", stop)  # no layer is rounded a second time
    finished = quantized(trained, tmp_path / "out", "vptq", *options, "finetune_steps=20")
    assert perplexity(finished) < perplexity(rough)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("rough", "out"))
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    assert moved == {name for name in before if name.endswith("centroids.weight")}


@pytest.mark.slow
def test_more_bits_are_never_worse_and_vectors_of_2_bits_beat_rounding_to_3(library, tmp_path):
    cfg = library()
    told = {"whole": perplexity(open_run(recipe.load_run(cfg.run_dir)))}
    for width in (4, 3, 2):
        told[width] = perplexity(quantized(cfg, tmp_path / f"{width}", "vptq", f"bits={width}", samples=64))
    told["unfitted"] = perplexity(
        quantized(cfg, tmp_path / "unfitted", "vptq", "bits=2", "tune_steps=0", samples=64)
    )
    told["finished"] = perplexity(
        quantized(cfg, tmp_path / "finished", "vptq", "bits=2", "finetune_steps=100", samples=64)
    )
    for group in (0, 128):
        made = quantized(cfg, tmp_path / f"rounded-{group}", "rtn", "bits=3", f"group_size={group}")
        told[f"rounded {group}"] = perplexity(made)
    print(told)
    assert told["whole"] <= told[4] <= told[3] <= told[2]
    assert told["finished"] < told[2] < min(told["unfitted"], told["rounded 0"], told["rounded 128"])


CONTRACT = dict(layers=2, embed=64, heads=2, kv_heads=2, mlp=64, vocab=64, window=8, global_every=2)


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", [name for name in reader.part_names("models") if name != "torch"])
def test_every_family_computes_the_same_from_stored_matrices_as_from_whole_ones(name):
    cls = reader.part_class("models", name)
    known = cls.__dataclass_fields__
    cfg = cls(**{key: value for key, value in CONTRACT.items() if key in known})
    family = load_family(cfg)
    params = jax.jit(lambda key: module.init(family.Model, cfg, key))(KEY)
    method = recipe.load_method("rtn", ["bits=8", "group_size=0"])
    parts, whole = {}, dict(module.named_leaves(params))
    for one in quantized_folder.linears(family, cfg):
        ours = [np.asarray(whole[path]) for path in one.paths]
        layers = []
        for number in range(len(ours[0])):
            theirs = [
                quantize_run.to_hf_layout(w[number], place.pattern)
                for w, place in zip(ours, one.places, strict=True)
            ]
            if np.concatenate(theirs).shape[0] % 4 or np.concatenate(theirs).shape[1] % 4:
                break
            layers.append(rtn.quantize(method, jnp.asarray(np.concatenate(theirs).T), None, KEY))
        else:
            parts |= one.parts(jax.tree.map(lambda *each: jnp.stack(each), *layers))
    assert parts
    put = lambda path, w: parts.get(module.path_name(path), w)
    packed = jax.tree_util.tree_map_with_path(put, params)
    unpacked = lambda part: jax.vmap(
        lambda one: quantized_folder.QuantizedWeight(one, part.place).to_dense()
    )(part.stored)
    plain = jax.tree_util.tree_map_with_path(
        lambda path, w: unpacked(parts[module.path_name(path)]) if module.path_name(path) in parts else w,
        params,
    )
    for path, w in module.named_leaves(plain):
        np.testing.assert_allclose(w, whole[path], atol=0.02, err_msg=path)
    exec_opts = Execution(
        reader.part_class("attention", "xla")(), "float32", matmul=getattr(cfg, "products", "compute")
    )
    tokens = jnp.asarray(np.random.default_rng(0).integers(4, 64, (2, 16)))
    if exec_opts.matmul != "compute":
        pytest.skip("is rounded in another way already")
    run = jax.jit(lambda model, tokens: model(cfg, tokens, exec_opts=exec_opts))
    np.testing.assert_allclose(run(packed, tokens), run(plain, tokens), atol=1e-5)


def test_what_cannot_be_quantised_is_told(trained, tmp_path):
    with pytest.raises(UserError, match=r"method.bits: found 5, expected 2, 3, 4 or 8"):
        recipe.load_method("gptq", ["bits=5"])
    with pytest.raises(UserError, match=r"expected one of gptq, rtn, vptq; did you mean gptq?"):
        recipe.load_method("gtpq", [])
    with pytest.raises(UserError, match=r"method.grup: unknown key; did you mean method.group_size\?$"):
        recipe.load_method("rtn", ["grup=3"])
    with pytest.raises(UserError, match=r"method.x: unknown key, expected one of use, bits, group_size"):
        recipe.load_method("rtn", ["x=3"])
    with pytest.raises(UserError, match="already exists"):
        quantized(trained, tmp_path, "rtn")
    with pytest.raises(UserError, match="--samples: found 0"):
        quantized(trained, tmp_path / "out", "rtn", samples=0)
