"""Parameter counts of published models, from the shapes their recipes give: nothing is allocated."""

import re
from pathlib import Path

import pytest

from headrace.config import recipe, sections
from headrace.model_wrappers import load_family
from headrace.nn import module

ROOT = Path(__file__).parents[2]
PUBLISHED = {
    "llama3-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "mini-llama-114m": 114_150_144,
    "lunaris-270m": 276_997_120,
    "eurobert-210m": 310_266_624,
    "eurobert-610m": 755_625_600,
    "eurobert-2.1b": 2_403_092_736,
    "olmo2-1b": 1_484_916_736,
    "gemma2-9b-32k": 9_241_705_984,
    "gemma3-1b": 999_885_952,
    "gemma3-270m": 268_098_176,
    "modernbert-base": 149_655_232,
    "modernbert-large": 395_881_664,
    "bitnet-2b4t": 2_412_820_480,
    "xlstm-7b": 6_865_424_896,
    "llada-8b": 8_015_581_184,
}
BODIES = {
    "eurobert-210m": 211_766_016,
    "eurobert-610m": 607_874_688,
    "eurobert-2.1b": 2_107_590_912,
}


def size(run: sections.TrainRecipe) -> int:
    return module.count(load_family(run.model).Model, run.model)


@pytest.mark.parametrize("name, parameters", PUBLISHED.items())
def test_a_published_model_has_its_published_size(name: str, parameters: int) -> None:
    assert size(recipe.load(ROOT / f"recipes/{name}.yaml")) == parameters


@pytest.mark.parametrize("name, parameters", BODIES.items())
def test_an_encoder_without_its_head_has_its_published_size(name: str, parameters: int) -> None:
    run = recipe.load(ROOT / f"recipes/{name}.yaml")
    assert size(run) - run.model.vocab * run.model.embed == parameters


def heads() -> dict[str, int]:
    """The sizes that recipes state in their first line."""
    out = {}
    for path in sorted((ROOT / "recipes").rglob("*.yaml")):
        stated = re.search(r"([\d,]+) parameters", path.read_text().partition("\n")[0])
        if stated:
            out[str(path.relative_to(ROOT))] = int(stated[1].replace(",", ""))
    return out


@pytest.mark.parametrize("path, stated", heads().items())
def test_the_size_in_a_recipes_head_is_the_models(path: str, stated: int) -> None:
    run = recipe.load(ROOT / path)
    if not run.model.vocab:  # as many as the demo's tokenizer has
        vocab = recipe.load_data(ROOT / "recipes/data/demo.yaml").tokenizer.vocab
        run = recipe.load(ROOT / path, [f"model.vocab={vocab}"])
    assert size(run) == stated
