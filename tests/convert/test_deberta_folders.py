"""A DeBERTa that was trained as a pair, handed on: to other runs, and to and from folders of Hugging Face."""

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
from headrace.training import init_from

SIZES: dict[str, Any] = dict(
    layers=2, embed=32, heads=4, mlp=48, position_buckets=8, max_relative_positions=64, vocab=96
)
PAIR: dict[str, Any] = SIZES | dict(generator_layers=2, mask_decoder=True)


def model(**settings: Any) -> Any:
    return reader.part_class("models", "deberta")(**settings)


def filled(cfg: Any, seed: int) -> Any:
    """Weights of which none is like another, the difference between embeddings included."""
    rng = np.random.default_rng(seed)
    shapes = module.shapes(load_family(cfg).Model, cfg)
    return jax.tree.map(lambda leaf: jax.numpy.asarray(rng.normal(size=leaf.shape), "float32"), shapes)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, Any, Any]:
    """A run folder, its model and its weights."""
    return saved(tmp_path / "pair", model(**PAIR))


def saved(folder: Path, cfg: Any) -> tuple[str, Any, Any]:
    folder.mkdir()
    section = {"use": "deberta"} | {key: getattr(cfg, key) for key in (*PAIR, "embedding_sharing")}
    tree = {"run_dir": str(folder), "model": section, "data": {"path": "data/none", "sequence_length": 64}}
    tree |= {"objective": {"use": "rtd"}, "schedule": {"steps": 10}, "optimizer": {"learning_rate": 1e-3}}
    (folder / "recipe.yaml").write_text(reader.dump(tree))
    params = filled(cfg, 1)
    checkpoints = Checkpoints(str(folder))
    checkpoints.save_params(params, {"step": 0})
    checkpoints.close()
    return str(folder), cfg, params


def begun(path: str, cfg: Any, take: str | None = None) -> tuple[Any, Any, str]:
    """Fresh weights of a model, what became of them, and what was said."""
    devices = sharding.make_mesh({"fsdp": 2}, jax.devices()[:2])
    family = load_family(cfg).Model
    with jax.set_mesh(devices):
        homes = sharding.shardings(module.axes(family, cfg), module.shapes(family, cfg), devices)
        fresh = jax.device_put(filled(cfg, 2), homes)
        before = jax.device_get(fresh)
        made, said = init_from.load_weights(init_from.check(path, cfg, take), cfg, fresh, devices, path)
    return before, jax.device_get(made), said


def test_the_embedding_that_is_taken_of_a_pair_is_the_whole_one(pair):
    """And not its difference to the generator's, which is what the run holds."""
    path, _cfg, old = pair
    _, made, _ = begun(path, model(**SIZES), "embedding,blocks.*")
    np.testing.assert_array_equal(made.embedding, old.embedding + old.generator.embedding)
    np.testing.assert_array_equal(made.blocks.w_q, old.blocks.w_q)


def test_a_pair_that_starts_from_a_pair_holds_the_very_weights(pair):
    path, cfg, old = pair
    jax.tree.map(np.testing.assert_array_equal, begun(path, cfg)[1], jax.device_get(old))


@pytest.mark.parametrize("there", ["gdes", "nes"])
@pytest.mark.parametrize("here", ["gdes", "nes"])
@pytest.mark.parametrize("take", [None, "embedding,blocks.*"], ids=["all", "some"])
def test_the_embedding_stays_what_it_was_however_pairs_share_theirs(there, here, take, tmp_path):
    """Also beside a generator that is drawn anew."""
    path, cfg, old = saved(tmp_path / "pair", model(**PAIR, embedding_sharing=there))
    other = model(**PAIR, embedding_sharing=here)
    fresh, made, _ = begun(path, other, take)
    np.testing.assert_allclose(made.full_embedding(other), old.full_embedding(cfg), atol=1e-6)
    drawn = fresh if take else old
    np.testing.assert_array_equal(made.generator.embedding, drawn.generator.embedding)


def test_adapters_beside_a_pair_that_shares_otherwise_are_refused(tmp_path):
    path, *_ = saved(tmp_path / "pair", model(**PAIR, embedding_sharing="nes"))
    with pytest.raises(
        UserError, match=r"init_from: embedding is the difference to generator.embedding here"
    ):
        init_from.check(path, model(**PAIR, lora=LoRAKeys(4)))


FIND, HEAD = "mask_predictions.", "lm_predictions.lm_head."


def published(folder: Path, **more: np.ndarray) -> tuple[Path, dict[str, np.ndarray]]:
    """A folder as Microsoft's of V3 is: an encoder, the heads of both of the pair, positions that nothing
    reads, and a config.json that names no class."""
    cfg = model(**SIZES | {"mask_decoder": True})
    own = dict(hf_tensors.to_tensors(deberta.HF_TENSORS, filled(cfg, 3), "float32"))
    other = filled(model(**PAIR), 4)
    finds = dict(
        hf_tensors.to_tensors(deberta.HF_TENSORS, dataclasses.replace(other, generator=None), "float32")
    )
    named = own | {name: w for name, w in finds.items() if name.startswith(FIND)} | more
    assert "deberta.embeddings.position_embeddings.weight" in named
    folder.mkdir()
    settings = deberta.to_hf_config(cfg, 64) | {"max_relative_positions": -1, "pos_att_type": "p2c|c2p"}
    for name in ("architectures", "legacy", "mask_decoder", "tie_word_embeddings"):
        del settings[name]
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(named, folder / "model.safetensors")
    return folder, named


def exported(path: str, folder: Path) -> Path:
    to_huggingface.export(open_run(recipe.load_run(path)), str(folder), "float32")
    return folder


def test_the_published_layout_is_imported_and_its_other_head_passed_over(tmp_path, capsys):
    folder, theirs = published(tmp_path / "v3")
    assert main(["import", str(folder), str(tmp_path / "run")]) == 0
    told = f"ignored {FIND}*, deberta.embeddings.position_embeddings.weight in {folder}, which this model"
    assert told in capsys.readouterr().out
    ours = open_run(recipe.load_run(tmp_path / "run"))
    found = dict(hf_tensors.to_tensors(deberta.HF_TENSORS, ours.params, "float32"))
    assert found.keys() == {name for name in theirs if "position" not in name and FIND not in name}
    for name, w in found.items():
        np.testing.assert_array_equal(w, theirs[name])


def test_only_heads_that_are_known_are_passed_over(tmp_path):
    folder, _ = published(tmp_path / "v3", **{"deberta.encoder.conv.conv.weight": np.zeros(3, np.float32)})
    with pytest.raises(UserError, match=r"no place in this model for the tensor deberta.encoder.conv.conv"):
        from_huggingface.import_model(str(folder), str(tmp_path / "run"))
    with pytest.raises(UserError, match=r"no place in this model for the tensor deberta.encoder.conv.conv"):
        begun(str(folder), model(**SIZES))
    begun(str(folder), model(**SIZES), "embedding")  # nothing else is looked at


def test_a_run_starts_from_the_published_layout(tmp_path):
    folder, theirs = published(tmp_path / "v3")
    table = theirs["deberta.embeddings.word_embeddings.weight"]
    _, made, said = begun(str(folder), model(**SIZES))
    np.testing.assert_array_equal(made.embedding, table)
    np.testing.assert_array_equal(made.head_bias, theirs[HEAD + "bias"])
    assert f"ignored {FIND}*" in said
    fresh, made, said = begun(str(folder), model(**SIZES), "embedding")
    np.testing.assert_array_equal(made.embedding, table)
    np.testing.assert_array_equal(made.blocks.w_q, fresh.blocks.w_q)
    assert said.startswith(f"init_from: 1 of {len(jax.tree.leaves(fresh))} weights from {folder}; ")
    assert "ignored" not in said


@pytest.mark.parametrize("kind", ["published", "exported"])
def test_a_classifier_starts_from_either_layout_with_a_head_that_is_drawn(kind, pair, tmp_path):
    folder = published(tmp_path / "x")[0] if kind == "published" else exported(pair[0], tmp_path / "x")
    theirs = load_file(folder / "model.safetensors")
    fresh, made, said = begun(str(folder), model(**SIZES, classifier=ClassifierKeys(3, "first")))
    np.testing.assert_array_equal(made.embedding, theirs["deberta.embeddings.word_embeddings.weight"])
    np.testing.assert_array_equal(made.w_classes, fresh.w_classes)
    assert "w_classes" in said and FIND in said and (HEAD in said) == (kind == "published")


def test_an_exported_pair_gives_what_it_has_and_says_what_it_has_not(pair, tmp_path):
    """Its discriminator has no head that tells tokens; its generator has."""
    path, cfg, old = pair
    folder = exported(path, tmp_path / "out")
    with pytest.raises(UserError, match=f"no tensor {HEAD}dense.weight .*, a part of the head") as refused:
        from_huggingface.import_model(str(folder), str(tmp_path / "run"))
    assert f"; {folder}/generator is a separate model" in str(refused.value)
    with pytest.raises(UserError) as again:  # and before any weight is read
        init_from.check(str(folder), model(**SIZES))
    assert str(again.value) == str(refused.value)
    take = re.search("init_weights: ([^`]*)`", str(refused.value))
    assert take is not None
    fresh, made, _said = begun(str(folder), model(**SIZES), take[1])
    np.testing.assert_array_equal(made.embedding, old.full_embedding(cfg))
    np.testing.assert_array_equal(made.distances, old.distances)
    jax.tree.map(np.testing.assert_array_equal, made.blocks, jax.device_get(old.blocks))
    np.testing.assert_array_equal(made.w_head, fresh.w_head)
    from_huggingface.import_model(str(folder / "generator"), str(tmp_path / "generator"))
    back = open_run(recipe.load_run(tmp_path / "generator"))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(back.params), jax.device_get(old.generator))


# transformers.DebertaV2 compiles a function by torch.jit.script when it is imported.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_weights_in_a_pickle_alone_are_refused_with_a_command_that_converts_them(tmp_path):
    folder, theirs = published(tmp_path / "it's v3")
    torch.save({name: torch.tensor(w) for name, w in theirs.items()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"pytorch_model.bin is a pickle, which is not read") as refused:
        from_huggingface.import_model(str(folder), str(tmp_path / "run"))
    with pytest.raises(UserError, match=r"pytorch_model.bin is a pickle, which is not read"):
        init_from.check(str(folder), model(**SIZES), "embedding")
    command = shlex.split(str(refused.value).partition("instead: ")[2])
    assert command[:2] == ["python", "-c"] and "AutoTokenizer" not in command[2]
    exec(command[2])
    from_huggingface.import_model(f"{folder}-safetensors", str(tmp_path / "run"))
    ours = open_run(recipe.load_run(tmp_path / "run")).params
    np.testing.assert_array_equal(ours.head_bias, theirs[HEAD + "bias"])
    np.testing.assert_array_equal(ours.embedding, theirs["deberta.embeddings.word_embeddings.weight"])
    (folder / "spm.model").touch()
    with pytest.raises(UserError, match=r"t.AutoTokenizer.from_pretrained\(.*\).save_pretrained\("):
        init_from.check(str(folder), model(**SIZES), "embedding")
