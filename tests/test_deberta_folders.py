"""A DeBERTa that was trained as a pair, handed on: to other runs, and to and from folders of Hugging Face."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from millrace import config, mesh, module, objective, sections, start
from millrace.checkpoint import Checkpoints
from millrace.errors import UserError

SIZES: dict[str, Any] = dict(layers=2, embed=32, heads=4, mlp=48, buckets=8, reach=64, vocab=96)
PAIR: dict[str, Any] = SIZES | dict(generator=2, mask_decoder=True)


def model(**settings: Any) -> Any:
    return config.part_class("models", "deberta", sections.Every)(**settings)


def filled(cfg: Any, seed: int) -> Any:
    """Weights of which none is like another, the difference between embeddings included."""
    rng = np.random.default_rng(seed)
    shapes = module.shapes(objective.file("models", cfg).Model, cfg)
    return jax.tree.map(lambda leaf: jax.numpy.asarray(rng.normal(size=leaf.shape), "float32"), shapes)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, Any, Any]:
    """A run folder, its model and its weights."""
    return saved(tmp_path / "pair", model(**PAIR))


def saved(folder: Path, cfg: Any) -> tuple[str, Any, Any]:
    folder.mkdir()
    section = {"use": "deberta"} | {key: getattr(cfg, key) for key in (*PAIR, "sharing")}
    tree = {"run": str(folder), "model": section, "data": {"path": "data/none", "sequence_length": 64}}
    tree |= {"objective": {"use": "rtd"}, "schedule": {"steps": 10}, "optimizer": {"learning_rate": 1e-3}}
    (folder / "recipe.yaml").write_text(config.dump(tree))
    params = filled(cfg, 1)
    checkpoints = Checkpoints(str(folder))
    checkpoints.save_params(params, {"step": 0})
    checkpoints.close()
    return str(folder), cfg, params


def begun(path: str, cfg: Any, take: str | None = None) -> tuple[Any, Any, str]:
    """Fresh weights of a model, what became of them, and what was said."""
    devices = mesh.make({"fsdp": 2}, jax.devices()[:2])
    family = objective.file("models", cfg).Model
    with jax.set_mesh(devices):
        homes = mesh.shardings(module.axes(family, cfg), module.shapes(family, cfg), devices)
        fresh = jax.device_put(filled(cfg, 2), homes)
        before = jax.device_get(fresh)
        made, said = start.weights(start.check(path, cfg, take), cfg, fresh, devices, path)
    return before, jax.device_get(made), said


def test_the_embedding_that_is_taken_of_a_pair_is_the_whole_one(pair):
    """And not its difference to the generator's, which is what the run holds."""
    path, cfg, old = pair
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
    path, cfg, old = saved(tmp_path / "pair", model(**PAIR, sharing=there))
    other = model(**PAIR, sharing=here)
    fresh, made, _ = begun(path, other, take)
    np.testing.assert_allclose(made.whole_embedding(other), old.whole_embedding(cfg), atol=1e-6)
    drawn = fresh if take else old
    np.testing.assert_array_equal(made.generator.embedding, drawn.generator.embedding)


def test_adapters_beside_a_pair_that_shares_otherwise_are_refused(tmp_path):
    path, *_ = saved(tmp_path / "pair", model(**PAIR, sharing="nes"))
    with pytest.raises(UserError, match="start: embedding is the difference to generator.embedding here"):
        start.check(path, model(**PAIR, lora_rank=4))
