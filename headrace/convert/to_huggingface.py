"""Export to Hugging Face model folders: safetensors, config.json, tokenizer and model card.

Each model family has the table of names and axes (`HF_TENSORS`); a pattern such as "(n h) d -> d n h" is read
in either direction."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from headrace.checkpoint.open_run import LoadedRun, copy_tokenizer
from headrace.convert import model_card
from headrace.convert.output import new_folder
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.errors import InvalidArgument, UserError
from headrace.model_formats import hf_ternary, quantized_folder
from headrace.model_formats.hf_config import HFSettings
from headrace.model_formats.hf_tensors import to_tensors
from headrace.model_wrappers import classification_head, load_family
from headrace.models import ModelConfig, fixed_matmul
from headrace.nn import module

SHARD_BYTES = 5 * 10**9  # the largest file that the tools of the Hugging Face Hub expect
# Readers of the folders that `headrace quantize` writes, by `quant_method`.
QUANTIZED_READERS = {
    "gptq": "transformers reads as it is, with GPTQModel",
    "vptq": "only the vptq package reads; export the run that it was quantized from",
}


def export(run: LoadedRun, folder: str, dtype: str, *, packed: bool = False) -> list[Path]:
    """Write a run's model to a new folder, for the AutoModel classes of transformers. Returns the files.

    With `packed`, ternary matrices are stored in 2 bits per weight."""
    recipe = run.recipe
    if (quantization := quantized_folder.read_quant_config(recipe.run_dir)) is not None:
        reader = QUANTIZED_READERS[quantization["quant_method"]]
        raise UserError(f"{recipe.run_dir}: a quantized model, whose folder {reader}")
    if packed and fixed_matmul(recipe.model) != "ternary":
        raise InvalidArgument(
            "packed", f"expected ternary weights, but those of this {recipe.model.use} model are not"
        )
    run = run.merged()
    family = load_family(run.recipe.model)
    with new_folder(folder) as target:
        for subfolder, (model, params) in family.split_for_export(run.recipe.model, run.params).items():
            settings = make_hf_config(run, model, dtype)
            table = family.tensor_table(model)
            tensors = to_tensors(table, params, dtype)
            if packed:
                settings |= {"quantization_config": hf_ternary.PACKED}
                matrices = hf_ternary.ternary_tensors(table, module.axes(family.Model, model), model.layers)
                tensors = hf_ternary.pack_tensors(
                    to_tensors(table, params, "float32"), matrices, jnp.dtype(dtype)
                )
            write_model_folder(run, settings, tensors, target / subfolder)
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


def write_model_folder(
    run: LoadedRun,
    settings: HFSettings,
    tensors: Iterator[tuple[str, np.ndarray]],
    folder: Path,
    *,
    quantized_by: str | None = None,
) -> None:
    """Write config.json, tensors, tokenizer and model card. `settings` lack the ids of special tokens.

    `quantized_by` is the method that quantized the tensors after training, for the model card."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings | special_token_ids(run), indent=2) + "\n")
    save_shards(tensors, folder)
    if run.tokenizer is not None:
        copy_tokenizer(run.recipe.run_dir, folder)
        # A run folder that was moved is not where its recipe says, and another one may be there.
        has_tokenizer = (folder / "tokenizer.json").is_file()
        if not has_tokenizer or tokenizer_io.file_sha256(folder) != run.tokenizer_sha256:
            tokenizer_io.save(run.tokenizer, folder)
    model_card.write_card(run, settings, folder, quantized_by)


def make_hf_config(run: LoadedRun, model: ModelConfig, dtype: str) -> HFSettings:
    """Make the config.json of one of the run's models, without the ids of special tokens."""
    naming, soft_cap = load_family(run.recipe.model).hf_naming, run.recipe.loss.soft_cap
    if soft_cap is not None and naming.soft_cap is None:
        raise UserError(
            f"loss.soft_cap: found {soft_cap}, which transformers does not support for this model; remove it "
            f"from {run.recipe.run_dir}/recipe.yaml to export the weights without it"
        )
    settings = naming.to_config(model, run.recipe.data.sequence_length) | {
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if naming.soft_cap is not None and (soft_cap is not None or naming.soft_cap not in settings):
        settings[naming.soft_cap] = soft_cap
    if classification_head.has_labels(model):
        names = classification_head.read_label_names(str(run.recipe.run_dir), model.labels)
        settings |= classification_head.to_hf_labels(names)
    return settings


def special_token_ids(run: LoadedRun) -> dict[str, int | None]:
    """Map config.json's names of special tokens, such as `bos_token_id`, to ids.

    Tokens that the tokenizer lacks are null: transformers' defaults are ids of other tokenizers, which may be
    beyond this vocabulary. Only the mask token and those in `HF_SPECIAL` may not be null, and are omitted."""
    special = {} if run.tokenizer is None else dataclasses.asdict(run.tokenizer.special)
    by_role: dict[str, int | None] = {role: special.get(role) for role in ("bos", "eos", "pad", "mask")}
    family_roles = load_family(run.recipe.model).hf_naming.special_tokens
    ids = by_role | {name: by_role[role] for name, role in family_roles.items()}
    nullable = ("bos", "eos", "pad")
    return {f"{name}_token_id": token for name, token in ids.items() if token is not None or name in nullable}


def save_shards(tensors: Iterator[tuple[str, np.ndarray]], folder: Path) -> None:
    """Write tensors to model.safetensors, or to several files and an index if one shard cannot hold them."""
    shard_of: dict[str, int] = {}
    total_size = 0
    for index, shard in enumerate(group_into_shards(tensors)):
        save_file(shard, folder / f"{index}.safetensors", metadata={"format": "pt"})
        shard_of |= dict.fromkeys(shard, index)
        total_size += sum(tensor.nbytes for tensor in shard.values())
    count = max(shard_of.values()) + 1
    names = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    if count == 1:
        names = ["model.safetensors"]
    else:
        weight_map = {name: names[index] for name, index in shard_of.items()}
        weight_index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(weight_index, indent=2) + "\n")
    for index, name in enumerate(names):
        (folder / f"{index}.safetensors").rename(folder / name)


def group_into_shards(tensors: Iterator[tuple[str, np.ndarray]]) -> Iterator[dict[str, np.ndarray]]:
    """Group tensors, in their order, such that no group exceeds SHARD_BYTES unless a single tensor does."""
    shard: dict[str, np.ndarray] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard
