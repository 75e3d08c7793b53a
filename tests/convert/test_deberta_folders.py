"""A DeBERTa trained as generator and discriminator: as the start of other runs, exported and imported."""

import dataclasses
import json
import re
import shlex
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from headrace.checkpoint.manager import Checkpoints
from headrace.checkpoint.open_run import open_run
from headrace.cli.main import main
from headrace.config import reader, recipe
from headrace.config.wrappers import ClassifierKeys, LoRAKeys
from headrace.convert import from_huggingface, to_huggingface
from headrace.errors import UserError
from headrace.model_formats import hf_tensors
from headrace.model_wrappers import load_family
from headrace.models import deberta
from headrace.nn import module, sharding
from headrace.training.init_from.check import check_source
from headrace.training.init_from.load import load_weights

SIZES: dict[str, Any] = dict(
    layers=2, embed=32, heads=4, mlp=48, position_buckets=8, max_relative_positions=64, vocab=96
)
PAIR: dict[str, Any] = SIZES | dict(generator_layers=2, mask_decoder=True)


def model(**settings: Any) -> Any:
    return reader.part_class("models", "deberta")(**settings)


def random_params(cfg: Any, seed: int) -> Any:
    """Random weights, including the difference between the embeddings of generator and discriminator."""
    rng = np.random.default_rng(seed)
    shapes = module.shapes(load_family(cfg).Model, cfg)
    return jax.tree.map(lambda leaf: jax.numpy.asarray(rng.normal(size=leaf.shape), "float32"), shapes)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, Any, Any]:
    """A run folder, its model and its weights."""
    return save_pair(tmp_path / "pair", model(**PAIR))


def save_pair(folder: Path, cfg: Any) -> tuple[str, Any, Any]:
    """Write a run folder. Returns it with its model and its weights."""
    folder.mkdir()
    section = {"use": "deberta"} | {key: getattr(cfg, key) for key in (*PAIR, "embedding_sharing")}
    tree = {"run_dir": str(folder), "model": section, "data": {"path": "data/none", "sequence_length": 64}}
    tree |= {"objective": {"use": "rtd"}, "schedule": {"steps": 10}, "optimizer": {"learning_rate": 1e-3}}
    (folder / "recipe.yaml").write_text(reader.dump(tree))
    params = random_params(cfg, 1)
    checkpoints = Checkpoints(str(folder))
    checkpoints.save_params(params, {"step": 0})
    checkpoints.close()
    return str(folder), cfg, params


def initialize_from(path: str, cfg: Any, init_weights: str | None = None) -> tuple[Any, Any, str]:
    """Returns random weights of a model, the same after `init_from`, and the summary."""
    devices = sharding.make_mesh({"fsdp": 2}, jax.devices()[:2])
    family = load_family(cfg).Model
    with jax.set_mesh(devices):
        shardings = sharding.shardings(module.axes(family, cfg), module.shapes(family, cfg), devices)
        fresh = jax.device_put(random_params(cfg, 2), shardings)
        before = jax.device_get(fresh)
        params, summary = load_weights(check_source(path, cfg, init_weights), cfg, fresh, devices, path)
    return before, jax.device_get(params), summary


def test_init_weights_takes_the_full_embedding_of_a_pair(pair):
    """Not its difference to the generator's, which is what the run stores."""
    path, _cfg, old = pair
    _, params, _ = initialize_from(path, model(**SIZES), "embedding,blocks.*")
    np.testing.assert_array_equal(params.embedding, old.embedding + old.generator.embedding)
    np.testing.assert_array_equal(params.blocks.w_q, old.blocks.w_q)


def test_a_pair_that_starts_from_a_pair_has_its_weights(pair):
    path, cfg, old = pair
    jax.tree.map(np.testing.assert_array_equal, initialize_from(path, cfg)[1], jax.device_get(old))


@pytest.mark.parametrize("source_sharing", ["gdes", "nes"])
@pytest.mark.parametrize("sharing", ["gdes", "nes"])
@pytest.mark.parametrize("init_weights", [None, "embedding,blocks.*"], ids=["all", "some"])
def test_the_full_embedding_is_the_same_with_either_kind_of_sharing(
    source_sharing, sharing, init_weights, tmp_path
):
    """Also with a generator that is initialized randomly."""
    path, cfg, old = save_pair(tmp_path / "pair", model(**PAIR, embedding_sharing=source_sharing))
    other = model(**PAIR, embedding_sharing=sharing)
    fresh, params, _ = initialize_from(path, other, init_weights)
    np.testing.assert_allclose(params.full_embedding(other), old.full_embedding(cfg), atol=1e-6)
    expected = fresh if init_weights else old
    np.testing.assert_array_equal(params.generator.embedding, expected.generator.embedding)


def test_adapters_for_a_pair_with_another_sharing_are_refused(tmp_path):
    path, *_ = save_pair(tmp_path / "pair", model(**PAIR, embedding_sharing="nes"))
    with pytest.raises(
        UserError, match=r"init_from: embedding is the difference to generator.embedding here"
    ):
        check_source(path, model(**PAIR, lora=LoRAKeys(4)))


FIND, HEAD = "mask_predictions.", "lm_predictions.lm_head."


def write_published(folder: Path, **extra: np.ndarray) -> tuple[Path, dict[str, np.ndarray]]:
    """Write a folder like Microsoft's of V3: an encoder, the heads of generator and discriminator, unused
    positions, and a config.json without a class. Returns it with its tensors."""
    cfg = model(**SIZES | {"mask_decoder": True})
    encoder = dict(hf_tensors.to_tensors(deberta.HF_TENSORS, random_params(cfg, 3), "float32"))
    other = random_params(model(**PAIR), 4)
    discriminator = dict(
        hf_tensors.to_tensors(deberta.HF_TENSORS, dataclasses.replace(other, generator=None), "float32")
    )
    named = encoder | {name: w for name, w in discriminator.items() if name.startswith(FIND)} | extra
    assert "deberta.embeddings.position_embeddings.weight" in named
    folder.mkdir()
    settings = deberta.to_hf_config(cfg, 64) | {"max_relative_positions": -1, "pos_att_type": "p2c|c2p"}
    for name in ("architectures", "legacy", "mask_decoder", "tie_word_embeddings"):
        del settings[name]
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(named, folder / "model.safetensors")
    return folder, named


def export(path: str, folder: Path) -> Path:
    to_huggingface.export(open_run(recipe.load_run(path)), str(folder), "float32")
    return folder


def test_the_published_layout_is_imported_without_its_other_head(tmp_path, capsys):
    folder, tensors = write_published(tmp_path / "v3")
    assert main(["import", str(folder), str(tmp_path / "run")]) == 0
    note = f"ignored {FIND}*, deberta.embeddings.position_embeddings.weight in {folder}, which this model"
    assert note in capsys.readouterr().out
    run = open_run(recipe.load_run(tmp_path / "run"))
    imported = dict(hf_tensors.to_tensors(deberta.HF_TENSORS, run.params, "float32"))
    assert imported.keys() == {name for name in tensors if "position" not in name and FIND not in name}
    for name, w in imported.items():
        np.testing.assert_array_equal(w, tensors[name])


def test_only_known_heads_are_ignored(tmp_path):
    folder, _ = write_published(
        tmp_path / "v3", **{"deberta.encoder.conv.conv.weight": np.zeros(3, np.float32)}
    )
    with pytest.raises(UserError, match=r"no place in this model for the tensor deberta.encoder.conv.conv"):
        from_huggingface.import_model(str(folder), str(tmp_path / "run"))
    with pytest.raises(UserError, match=r"no place in this model for the tensor deberta.encoder.conv.conv"):
        initialize_from(str(folder), model(**SIZES))
    initialize_from(str(folder), model(**SIZES), "embedding")  # other tensors are not read


def test_a_run_starts_from_the_published_layout(tmp_path):
    folder, tensors = write_published(tmp_path / "v3")
    table = tensors["deberta.embeddings.word_embeddings.weight"]
    _, params, summary = initialize_from(str(folder), model(**SIZES))
    np.testing.assert_array_equal(params.embedding, table)
    np.testing.assert_array_equal(params.head_bias, tensors[HEAD + "bias"])
    assert f"ignored {FIND}*" in summary
    fresh, params, summary = initialize_from(str(folder), model(**SIZES), "embedding")
    np.testing.assert_array_equal(params.embedding, table)
    np.testing.assert_array_equal(params.blocks.w_q, fresh.blocks.w_q)
    assert summary.startswith(f"init_from: 1 of {len(jax.tree.leaves(fresh))} weights from {folder}; ")
    assert "ignored" not in summary


@pytest.mark.parametrize("kind", ["published", "exported"])
def test_a_classifier_starts_from_either_layout_with_a_random_head(kind, pair, tmp_path):
    folder = write_published(tmp_path / "x")[0] if kind == "published" else export(pair[0], tmp_path / "x")
    tensors = load_file(folder / "model.safetensors")
    fresh, params, summary = initialize_from(
        str(folder), model(**SIZES, classifier=ClassifierKeys(3, "first"))
    )
    np.testing.assert_array_equal(params.embedding, tensors["deberta.embeddings.word_embeddings.weight"])
    np.testing.assert_array_equal(params.w_classes, fresh.w_classes)
    assert "w_classes" in summary and FIND in summary and (HEAD in summary) == (kind == "published")


def test_importing_an_exported_pair_says_which_head_is_missing_and_what_can_be_used(pair, tmp_path):
    """Its discriminator has no head that predicts tokens; its generator has."""
    path, cfg, old = pair
    folder = export(path, tmp_path / "out")
    with pytest.raises(UserError, match=f"no tensor {HEAD}dense.weight .*, a part of the head") as refused:
        from_huggingface.import_model(str(folder), str(tmp_path / "run"))
    assert f"; {folder}/generator is a separate model" in str(refused.value)
    with pytest.raises(UserError) as again:  # and before any weight is read
        check_source(str(folder), model(**SIZES))
    assert str(again.value) == str(refused.value)
    init_weights = re.search("init_weights: ([^`]*)`", str(refused.value))
    assert init_weights is not None
    fresh, params, _ = initialize_from(str(folder), model(**SIZES), init_weights[1])
    np.testing.assert_array_equal(params.embedding, old.full_embedding(cfg))
    np.testing.assert_array_equal(params.distances, old.distances)
    jax.tree.map(np.testing.assert_array_equal, params.blocks, jax.device_get(old.blocks))
    np.testing.assert_array_equal(params.w_head, fresh.w_head)
    from_huggingface.import_model(str(folder / "generator"), str(tmp_path / "generator"))
    back = open_run(recipe.load_run(tmp_path / "generator"))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(back.params), jax.device_get(old.generator))


# transformers.DebertaV2 compiles a function by torch.jit.script when it is imported.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_folder_with_pickles_only_is_refused_with_a_command_that_converts_them(tmp_path):
    folder, tensors = write_published(tmp_path / "it's v3")
    torch.save({name: torch.tensor(w) for name, w in tensors.items()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"pytorch_model.bin is a pickle, which is not read") as refused:
        from_huggingface.import_model(str(folder), str(tmp_path / "run"))
    with pytest.raises(UserError, match=r"pytorch_model.bin is a pickle, which is not read"):
        check_source(str(folder), model(**SIZES), "embedding")
    command = shlex.split(str(refused.value).partition("instead: ")[2])
    assert command[:2] == ["python", "-c"] and "AutoTokenizer" not in command[2]
    exec(command[2])
    from_huggingface.import_model(f"{folder}-safetensors", str(tmp_path / "run"))
    params = open_run(recipe.load_run(tmp_path / "run")).params
    np.testing.assert_array_equal(params.head_bias, tensors[HEAD + "bias"])
    np.testing.assert_array_equal(params.embedding, tensors["deberta.embeddings.word_embeddings.weight"])
    (folder / "spm.model").touch()
    with pytest.raises(UserError, match=r"t.AutoTokenizer.from_pretrained\(.*\).save_pretrained\("):
        check_source(str(folder), model(**SIZES), "embedding")
