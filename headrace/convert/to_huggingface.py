"""Hugging Face in and out: safetensors, config.json and the tokenizer. Each model file has the table of names
and axes (`HF`); a pattern like "(n h) d -> d n h" is read in either direction."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from headrace.checkpoint import open_hf
from headrace.checkpoint.manager import Checkpoints
from headrace.checkpoint.open_run import LoadedRun, copy_tokenizer
from headrace.config import reader, recipe, sections
from headrace.config.source_model import read_hf_config
from headrace.convert import model_card
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.errors import UserError
from headrace.model_formats import hf_config, hf_ternary, quantized_folder
from headrace.model_formats.hf_tensors import to_tensors
from headrace.model_wrappers import classification_head, load_family
from headrace.models import fixed_matmul
from headrace.nn import module
from headrace.storage import files

SHARD_BYTES = 5 * 10**9  # what the Hub's tools expect of one file


def export(run: LoadedRun, folder: str, dtype: str, *, packed: bool = False) -> list[Path]:
    """Writes the weights so that transformers' AutoModel loads them; `packed`, ternary ones in 2 bits each.
    Returns the files."""
    run = run.merged()
    family, cfg = load_family(run.recipe.model), run.recipe
    if (rounded := quantized_folder.read_quant_config(cfg.run_dir)) is not None:
        reads = {
            "gptq": "transformers reads as it is, with GPTQModel",
            "vptq": "the package vptq reads, and transformers does not; export the run it was made of",
        }
        raise UserError(f"{cfg.run_dir}: a quantised model, whose folder {reads[rounded['quant_method']]}")
    if packed and fixed_matmul(cfg.model) != "ternary":
        raise UserError(f"--packed: expected ternary weights, and those of {cfg.model.use} are not")
    with whole_or_nothing(folder) as made:
        for name, (model, params) in family.split_for_export(cfg.model, run.params).items():
            settings = settings_of(run, model, dtype)
            table = family.tensor_table(model)
            tensors = to_tensors(table, params, dtype)
            if packed:
                settings |= {"quantization_config": hf_ternary.PACKED}
                matrices = hf_ternary.matrices(table, module.axes(family.Model, model), model.layers)
                tensors = hf_ternary.packed(to_tensors(table, params, "float32"), matrices, jnp.dtype(dtype))
            write(run, settings, tensors, made / name)
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


def write(
    run: LoadedRun,
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
        copy_tokenizer(run.recipe.run_dir, target)
        # A folder that was moved is not where its recipe says, and another may be there.
        if (
            not (target / "tokenizer.json").is_file()
            or tokenizer_io.file_sha256(target) != run.tokenizer_sha256
        ):
            tokenizer_io.save(run.tokenizer, target)
    model_card.write(run, settings, target, method)


def settings_of(run: LoadedRun, model: Any, dtype: str) -> dict[str, Any]:
    """config.json of a model of the run, but for what is the tokenizer's."""
    family, cap = load_family(run.recipe.model), run.recipe.loss.soft_cap
    name = family.hf_naming.soft_cap
    if cap is not None and name is None:
        raise UserError(
            f"loss.soft_cap: found {cap}, which transformers has not for this model; take it out of "
            f"{run.recipe.run_dir}/recipe.yaml to export the weights without it"
        )
    settings = family.hf_naming.to_config(model, run.recipe.data.sequence_length) | {
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if name is not None and (cap is not None or name not in settings):
        settings[name] = cap
    if classification_head.has_labels(model):
        settings |= classification_head.to_hf_labels(
            classification_head.read_label_names(str(run.recipe.run_dir), model.labels)
        )
    return settings


def special_ids(run: LoadedRun) -> dict[str, int | None]:
    """Null where there is none: transformers' defaults are ids of other tokenizers, perhaps beyond our
    vocabulary. Only for the mask, and for what a family has beside (`HF_SPECIAL`), it takes none."""
    special = run.tokenizer.special if run.tokenizer is not None else None
    usual = {role: getattr(special, role, None) for role in ("bos", "eos", "pad", "mask")}
    more = load_family(run.recipe.model).hf_naming.special_tokens
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


def import_(folder: str, run: str) -> sections.TrainRecipe:
    """Makes a run folder of a Hugging Face one: a recipe and a checkpoint at step 0, from which to train."""
    source = Path(folder)
    settings = read_hf_config(source)
    family = open_hf.find_family(settings)
    section, head = open_hf.model_sections(settings)
    tells = "causal" if family.Config.causal else "masked"
    tree: dict[str, Any] = {
        "run_dir": run,
        "model": section,
        "data": {
            "path": "data/NAME",
            "sequence_length": min(hf_config.get_int(settings, "max_position_embeddings", 2048), 2048),
        },
        "objective": {"use": tells if head is None else "classify"},
        "optimizer": {"use": "adamw", "learning_rate": 1e-5, "weight_decay": 0.1},
        "schedule": {"use": "cosine", "steps": 1000, "warmup": 100},
    }
    if head is not None:
        tree["classifier"] = reader.to_dict(head)
    cap = family.hf_naming.soft_cap
    if cap is not None and settings.get(cap) is not None and head is None:
        tree["loss"] = {"use": "cross_entropy", "soft_cap": hf_config.number(settings, cap)}
    with whole_or_nothing(run) as made:
        (made / "recipe.yaml").write_text(reader.dump(tree))
        cfg = recipe.load(made / "recipe.yaml")
        family = load_family(cfg.model)
        if classification_head.has_labels(cfg.model):
            classification_head.write_label_names(made, classification_head.from_hf_labels(settings))
        shapes = module.shapes(family.Model, cfg.model)
        open_hf.check_tensors(cfg.model, open_hf.weight_paths(cfg.model), source)
        table, aside = family.tensor_table(cfg.model), family.hf_naming.ignored_tensors
        params = open_hf.read_params(table, shapes, source, hf_ternary.stored(settings), aside)
        copy_tokenizer(source, made)
        sha256 = tokenizer_io.file_sha256(made) if (made / "tokenizer.json").is_file() else None
        checkpoints = Checkpoints(str(made))
        meta = {"step": 0, "recipe": reader.to_dict(cfg), "tokenizer_sha256": sha256}
        checkpoints.save_params(params, meta)
        checkpoints.close()
    return cfg


@contextmanager
def whole_or_nothing(target: str) -> Iterator[Path]:
    """A folder that becomes `target` when all went well, and of which nothing is left when not."""
    if files.is_url(target):
        raise UserError(
            f"found {files.redacted(target)}, expected a folder on this machine; copy it there after"
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
