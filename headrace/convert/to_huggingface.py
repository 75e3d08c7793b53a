"""Hugging Face in and out: safetensors, config.json and the tokenizer. Each model file has the table of names
and axes (`HF`); a pattern like "(n h) d -> d n h" is read in either direction."""

import importlib
import json
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from headrace.model_wrappers import classification_head as classifier, split_weights as matrices
from headrace.config import reader as config, recipe, sections
from headrace.nn import module
from headrace.storage import files as store
from headrace.checkpoint.manager import Checkpoints
from headrace.model_formats import quantized_folder as stored
from headrace.data.tokenizer import tokenizer as tokenise
from headrace.errors import UserError
from headrace.nn.stack import own_products
from headrace.convert import model_card as card, head_warnings as heads
from headrace.model_formats import hf_config as config_json, hf_ternary as ternary
from headrace.model_formats.hf_tensors import Table, Tensors, table_of, to_tensors
from headrace.checkpoint.open_run import Opened, keep_tokenizer
from headrace.objectives import file

SHARD_BYTES = 5 * 10**9  # what the Hub's tools expect of one file


def export(run: Opened, folder: str, dtype: str, *, packed: bool = False) -> list[Path]:
    """Writes the weights so that transformers' AutoModel loads them; `packed`, ternary ones in 2 bits each.
    Returns the files."""
    run = plain_run(run)
    family, cfg = file("models", run.cfg.model), run.cfg
    if (rounded := stored.settings_of(cfg.run)) is not None:
        reads = {
            "gptq": "transformers reads as it is, with GPTQModel",
            "vptq": "the package vptq reads, and transformers does not; export the run it was made of",
        }
        raise UserError(f"{cfg.run}: a quantised model, whose folder {reads[rounded['quant_method']]}")
    if packed and own_products(cfg.model) != "ternary":
        raise UserError(f"--packed: expected ternary weights, and those of {cfg.model.use} are not")
    with whole_or_nothing(folder) as made:
        for name, (model, params) in exports(family, run).items():
            settings = settings_of(run, model, dtype)
            table = table_of(family, model)
            tensors = to_tensors(table, params, dtype)
            if packed:
                settings |= {"quantization_config": ternary.PACKED}
                matrices = ternary.matrices(table, module.axes(family.Model, model), model.layers)
                tensors = ternary.packed(to_tensors(table, params, "float32"), matrices, jnp.dtype(dtype))
            write(run, settings, tensors, made / name)
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


def plain_run(run: Opened) -> Opened:
    """The run with its matrices as they are used, where they are held otherwise (matrices.py)."""
    return matrices.merged(run, file("models", matrices.plain(run.cfg.model)).Model)


def exports(family: Any, run: Opened) -> dict[str, tuple[Any, Any]]:
    """The models of a run, config and weights, by the folders they go to. Where there are several, the family
    tells them apart."""
    return exports_of(family, run.cfg.model, run.params)


def exports_of(family: Any, cfg: Any, params: Any) -> dict[str, tuple[Any, Any]]:
    apart = getattr(family, "exports", lambda cfg, params: {"": (cfg, params)})
    return apart(cfg, params)


def write(
    run: Opened,
    settings: dict[str, Any],
    tensors: Iterator[tuple[str, np.ndarray]],
    target: Path,
    *,
    method: str | None = None,
) -> None:
    """`method` is what rounded its matrices, if anything did."""
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps(settings | special_ids(run), indent=2) + "\n")
    save_shards(tensors, target)
    if run.tokenizer is not None:
        keep_tokenizer(run.cfg.run, target)
        # A folder that was moved is not where its recipe says, and another may be there.
        if not (target / "tokenizer.json").is_file() or tokenise.sha256(target) != run.tokenizer_sha256:
            tokenise.save(run.tokenizer, target)
    card.write(run, settings, target, method)


def settings_of(run: Opened, model: Any, dtype: str) -> dict[str, Any]:
    """config.json of a model of the run, but for what is the tokenizer's."""
    family, cap = file("models", run.cfg.model), run.cfg.loss.soft_cap
    name = soft_cap_name(family)
    if cap is not None and name is None:
        raise UserError(
            f"loss.soft_cap: found {cap}, which transformers has not for this model; take it out of "
            f"{run.cfg.run}/recipe.yaml to export the weights without it"
        )
    settings = family.to_hf(model, run.cfg.data.sequence_length) | {"dtype": dtype, "torch_dtype": dtype}
    if name is not None and (cap is not None or name not in settings):
        settings[name] = cap
    if classifier.has_labels(model):
        settings |= classifier.named(classifier.names_of(str(run.cfg.run), model.labels))
    return settings


def soft_cap_name(family: Any) -> str | None:
    """How config.json calls the cap on the logits, `loss.soft_cap`, for the families that have one there."""
    return getattr(family, "HF_SOFT_CAP", None)


def special_ids(run: Opened) -> dict[str, int | None]:
    """Null where there is none: transformers' defaults are ids of other tokenizers, perhaps beyond our
    vocabulary. Only for the mask, and for what a family has beside (`HF_SPECIAL`), it takes none."""
    special = run.tokenizer.special if run.tokenizer is not None else None
    usual = {role: getattr(special, role, None) for role in ("bos", "eos", "pad", "mask")}
    more = getattr(file("models", run.cfg.model), "HF_SPECIAL", {})
    ids = usual | {name: usual[role] for name, role in more.items()}
    nullable = ("bos", "eos", "pad")
    return {f"{name}_token_id": id for name, id in ids.items() if id is not None or name in nullable}


def save_shards(tensors: Iterator[tuple[str, np.ndarray]], target: Path) -> None:
    places: dict[str, int] = {}
    total = 0
    for number, shard in enumerate(shards(tensors)):
        save_file(shard, target / f"{number}.safetensors", metadata={"format": "pt"})
        places |= dict.fromkeys(shard, number)
        total += sum(tensor.nbytes for tensor in shard.values())
    count = max(places.values()) + 1
    names = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    if count == 1:
        names = ["model.safetensors"]
    else:
        weight_map = {name: names[number] for name, number in places.items()}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    for number, name in enumerate(names):
        (target / f"{number}.safetensors").rename(target / name)


def shards(tensors: Iterator[tuple[str, np.ndarray]]) -> Iterator[dict[str, np.ndarray]]:
    shard: dict[str, np.ndarray] = {}
    held = 0
    for name, tensor in tensors:
        if shard and held + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, held = {}, 0
        shard[name] = tensor
        held += tensor.nbytes
    yield shard


def import_(folder: str, run: str) -> sections.Run:
    """Makes a run folder of a Hugging Face one: a recipe and a checkpoint at step 0, from which to train."""
    source = Path(folder)
    settings = read_config(source)
    family, section = family_of(settings), section_of(settings)
    tells = "causal" if family.Config.causal else "masked"
    tree: dict[str, Any] = {
        "run": run,
        "model": section,
        "data": {
            "path": "data/NAME",
            "sequence_length": min(config_json.whole(settings, "max_position_embeddings", 2048), 2048),
        },
        "objective": {"use": "classify" if "labels" in section else tells},
        "optimizer": {"use": "adamw", "learning_rate": 1e-5, "weight_decay": 0.1},
        "schedule": {"use": "cosine", "steps": 1000, "warmup": 100},
    }
    cap = soft_cap_name(family)
    if cap is not None and settings.get(cap) is not None and "labels" not in section:
        tree["loss"] = {"use": "cross_entropy", "soft_cap": config_json.number(settings, cap)}
    with whole_or_nothing(run) as made:
        (made / "recipe.yaml").write_text(config.dump(tree))
        cfg = recipe.load(made / "recipe.yaml")
        family = file("models", cfg.model)
        if classifier.has_labels(cfg.model):
            classifier.keep_names(made, classifier.names_in(settings))
        shapes = module.shapes(family.Model, cfg.model)
        heads.check(cfg.model, heads.names(cfg.model), source)
        table, aside = table_of(family, cfg.model), heads.aside(family)
        params = from_tensors(table, shapes, source, ternary.stored(settings), aside)
        keep_tokenizer(source, made)
        sha256 = tokenise.sha256(made) if (made / "tokenizer.json").is_file() else None
        checkpoints = Checkpoints(str(made))
        meta = {"step": 0, "recipe": config.to_dict(cfg), "tokenizer_sha256": sha256}
        checkpoints.save_params(params, meta)
        checkpoints.close()
    return cfg


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder}: not a Hugging Face model folder: no config.json in it")
    try:
        settings = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(settings, dict):
        raise UserError(f"{path}: expected names and values in braces")
    return settings


def family_of(settings: dict[str, Any]) -> Any:
    """The model file that reads this `model_type`."""
    families = [importlib.import_module(f"headrace.models.{name}") for name in config.names("models")]
    for family in families:
        if settings.get("model_type") in family.HF_TYPES:
            return family
    shown = config_json.shown(settings.get("model_type"))
    known = ", ".join(sorted(kind for family in families for kind in family.HF_TYPES))
    raise UserError(f"config.json: model_type: found {shown}, expected one of {known}")


def section_of(settings: dict[str, Any]) -> dict[str, Any]:
    """The recipe's model section for a config.json, whatever the model tells."""
    family = family_of(settings)
    return family.from_hf(settings) | classifier.section(family, settings)


def from_tensors(
    table: Table, shapes: Any, source: Path, stored: str | None = None, aside: tuple[str, ...] = ()
) -> Any:
    """Our weights from their files, in the host's memory: an import needs no device. `stored` is what
    export/ternary.py says of them, `aside` what export/heads.py does."""
    names = [name for name, _ in module.named(shapes)]
    found = [weight for _, weight in each_weight(table, shapes, Tensors(source, stored, aside), names)]
    return jax.tree.unflatten(jax.tree.structure(shapes), found)


def each_weight(
    table: Table, shapes: Any, tensors: Tensors, taken: Collection[str]
) -> Iterator[tuple[str, np.ndarray]]:
    """Those that are taken, one after the other, by our names."""
    for name, wanted in module.named(shapes):
        if name in taken:
            yield name, tensors.weight(*table[name], wanted.shape)
        else:
            tensors.pass_over(table[name][0])
    tensors.check_all_read()


@contextmanager
def whole_or_nothing(target: str) -> Iterator[Path]:
    """A folder that becomes `target` when all went well, and of which nothing is left when not."""
    if store.is_url(target):
        raise UserError(
            f"found {store.shown(target)}, expected a folder on this machine; copy it there after"
        )
    final = Path(target).absolute()
    if final.exists() and not (final.is_dir() and not any(final.iterdir())):
        raise UserError(f"{target}: there is something already; name a new folder, or remove it")
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{final.name}-", dir=final.parent) as scratch:
        made = Path(scratch) / final.name
        made.mkdir()
        yield made
        usual = Path(scratch) / "usual"
        usual.touch()
        for path in made.rglob("*.safetensors"):  # that library hides its files from all others
            path.chmod(usual.stat().st_mode)
        made.rename(final)
