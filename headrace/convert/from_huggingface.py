"""Import of Hugging Face model folders: safetensors, config.json and tokenizer become a run folder.

Each model family has the table of names and axes (`HF_TENSORS`); a pattern such as "(n h) d -> d n h" is read
in either direction."""

from pathlib import Path
from typing import Any

from headrace.checkpoint import open_hf
from headrace.checkpoint.manager import Checkpoints
from headrace.checkpoint.open_run import copy_tokenizer
from headrace.config import reader, recipe
from headrace.config.sections import TrainRecipe
from headrace.config.source_model import read_hf_config
from headrace.convert.output import new_folder
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.model_formats import hf_config, hf_ternary
from headrace.model_formats.hf_config import HFSettings
from headrace.model_wrappers import classification_head, load_family
from headrace.nn import module

MAX_SEQUENCE_LENGTH = 2048  # in the recipe; models may allow far more than a device has memory for


def import_model(folder: str, run_dir: str) -> TrainRecipe:
    """Convert a Hugging Face model folder to a new run folder. Returns the recipe that is written to it.

    The run folder has the weights as a checkpoint at step 0, from which training can start."""
    source = Path(folder)
    settings = read_hf_config(source)
    with new_folder(run_dir) as target:
        (target / "recipe.yaml").write_text(reader.dump(make_recipe_tree(settings, run_dir)))
        cfg = recipe.load(target / "recipe.yaml")
        family = load_family(cfg.model)
        if classification_head.has_labels(cfg.model):
            classification_head.write_label_names(target, classification_head.from_hf_labels(settings))
        shapes = module.shapes(family.Model, cfg.model)
        open_hf.check_head_tensors(cfg.model, open_hf.weight_paths(cfg.model), source)
        table, ignored = family.tensor_table(cfg.model), family.hf_naming.ignored_tensors
        params = open_hf.read_params(table, shapes, source, hf_ternary.read_format(settings), ignored)
        copy_tokenizer(source, target)
        has_tokenizer = (target / "tokenizer.json").is_file()
        meta = {
            "step": 0,
            "recipe": reader.to_dict(cfg),
            "tokenizer_sha256": tokenizer_io.file_sha256(target) if has_tokenizer else None,
        }
        checkpoints = Checkpoints(str(target))
        checkpoints.save_params(params, meta)
        checkpoints.close()
    return cfg


def make_recipe_tree(settings: HFSettings, run_dir: str) -> dict[str, Any]:
    """Make the recipe that trains the model of a config.json further.

    The model's sections are those of config.json. The others are a start: `data.path` must be replaced."""
    family = open_hf.find_family(settings)
    model, classifier = open_hf.to_recipe_sections(settings)
    objective = "causal" if family.Config.causal else "masked"
    max_length = hf_config.get_int(settings, "max_position_embeddings", MAX_SEQUENCE_LENGTH)
    tree: dict[str, Any] = {
        "run_dir": run_dir,
        "model": model,
        "data": {"path": "data/NAME", "sequence_length": min(max_length, MAX_SEQUENCE_LENGTH)},
        "objective": {"use": objective if classifier is None else "classify"},
        "optimizer": {"use": "adamw", "learning_rate": 1e-5, "weight_decay": 0.1},
        "schedule": {"use": "cosine", "steps": 1000, "warmup": 100},
    }
    if classifier is not None:
        tree["classifier"] = reader.to_dict(classifier)
        return tree
    soft_cap = family.hf_naming.soft_cap
    if soft_cap is not None and settings.get(soft_cap) is not None:
        tree["loss"] = {"use": "cross_entropy", "soft_cap": hf_config.get_float(settings, soft_cap)}
    return tree
