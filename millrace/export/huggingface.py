"""Hugging Face in and out: safetensors, config.json and the tokenizer. Each model file has the table of names
and axes (`HF`); a pattern like "(n h) d -> d n h" is read in either direction."""

import importlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from millrace import config, module, recipe
from millrace.checkpoint import Checkpoints
from millrace.data import tokenise
from millrace.errors import UserError
from millrace.execution import own_products
from millrace.export import config_json, ternary
from millrace.export.tensors import Table, in_place, part_of, rearrange, table_of, to_tensors
from millrace.folder import Opened, keep_tokenizer
from millrace.objective import file

TIED = ("lm_head.weight", "decoder.weight")  # often stored beside the embedding that they equal

SHARD_BYTES = 5 * 10**9  # what the Hub's tools expect of one file


def export(run: Opened, folder: str, dtype: str, *, packed: bool = False) -> list[Path]:
    """Writes the weights so that transformers' AutoModel loads them; `packed`, ternary ones in 2 bits each.
    Returns the files."""
    family, cfg = file("models", run.cfg.model), run.cfg
    cap = soft_cap_name(family)
    if cfg.loss.soft_cap is not None and cap is None:
        raise UserError(
            f"loss.soft_cap: found {cfg.loss.soft_cap}, which transformers has not for this model; take it "
            f"out of {cfg.run}/recipe.yaml to export the weights without it"
        )
    if packed and own_products(cfg.model) != "ternary":
        raise UserError(f"--packed: expected ternary weights, and those of {cfg.model.use} are not")
    with whole_or_nothing(folder) as made:
        for name, (model, params) in exports(family, run).items():
            settings = family.to_hf(model, cfg.data.sequence_length) | {"dtype": dtype, "torch_dtype": dtype}
            if cap is not None and (cfg.loss.soft_cap is not None or cap not in settings):
                settings[cap] = cfg.loss.soft_cap
            table = table_of(family, model)
            tensors = to_tensors(table, params, dtype)
            if packed:
                settings |= {"quantization_config": ternary.PACKED}
                matrices = ternary.matrices(table, module.axes(family.Model, model), model.layers)
                tensors = ternary.packed(to_tensors(table, params, "float32"), matrices, jnp.dtype(dtype))
            write(run, settings, tensors, made / name)
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


def exports(family: Any, run: Opened) -> dict[str, tuple[Any, Any]]:
    """The models of a run, config and weights, by the folders they go to. Where there are several, the family
    tells them apart."""
    apart = getattr(family, "exports", lambda cfg, params: {"": (cfg, params)})
    return apart(run.cfg.model, run.params)


def write(
    run: Opened, settings: dict[str, Any], tensors: Iterator[tuple[str, np.ndarray]], target: Path
) -> None:
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps(settings | special_ids(run), indent=2) + "\n")
    save_shards(tensors, target)
    if run.tokenizer is not None:
        keep_tokenizer(run.cfg.run, target)
        # A folder that was moved is not where its recipe says, and another may be there.
        if not (target / "tokenizer.json").is_file() or tokenise.sha256(target) != run.tokenizer_sha256:
            tokenise.save(run.tokenizer, target)


def soft_cap_name(family: Any) -> str | None:
    """How config.json calls the cap on the logits, `loss.soft_cap`, for the families that have one there."""
    return getattr(family, "HF_SOFT_CAP", None)


def special_ids(run: Opened) -> dict[str, int | None]:
    """Null where there is none: transformers' defaults are ids of other tokenizers, perhaps beyond our
    vocabulary. Only for the mask its encoders take no null."""
    special = run.tokenizer.special if run.tokenizer is not None else None
    ids = {f"{role}_token_id": getattr(special, role, None) for role in ("bos", "eos", "pad", "mask")}
    return {name: id for name, id in ids.items() if id is not None or name != "mask_token_id"}


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


def import_(folder: str, run: str) -> recipe.Run:
    """Makes a run folder of a Hugging Face one: a recipe and a checkpoint at step 0, from which to train."""
    source = Path(folder)
    settings = read_config(source)
    family = family_of(settings)
    tree: dict[str, Any] = {
        "run": run,
        "model": family.from_hf(settings),
        "data": {
            "path": "data/NAME",
            "sequence_length": min(config_json.whole(settings, "max_position_embeddings", 2048), 2048),
        },
        "objective": {"use": "causal" if family.Config.causal else "masked"},
        "optimizer": {"use": "adamw", "learning_rate": 1e-5, "weight_decay": 0.1},
        "schedule": {"use": "cosine", "steps": 1000, "warmup": 100},
    }
    cap = soft_cap_name(family)
    if cap is not None and settings.get(cap) is not None:
        tree["loss"] = {"use": "cross_entropy", "soft_cap": config_json.number(settings, cap)}
    with whole_or_nothing(run) as made:
        (made / "recipe.yaml").write_text(config.dump(tree))
        cfg = recipe.load(made / "recipe.yaml")
        shapes = module.shapes(family.Model, cfg.model)
        params = from_tensors(table_of(family, cfg.model), shapes, source, ternary.stored(settings))
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
    families = [importlib.import_module(f"millrace.models.{name}") for name in config.names("models")]
    for family in families:
        if settings.get("model_type") in family.HF_TYPES:
            return family
    known = ", ".join(sorted(kind for family in families for kind in family.HF_TYPES))
    raise UserError(f"config.json: model_type: found {settings.get('model_type')}, expected one of {known}")


def from_tensors(table: Table, shapes: Any, source: Path, stored: str | None = None) -> Any:
    """Our weights from their files, one tensor at a time, in the host's memory: an import needs no device.
    `stored` is what export/ternary.py says of them."""
    tensors = Tensors(source, stored)

    def leaf(path: Any, wanted: Any) -> np.ndarray:
        theirs, pattern = table[module.dotted(path)]
        name, *part = part_of(theirs)
        lead = name.count("{")
        array = np.empty(wanted.shape, np.float32)
        for place in np.ndindex(wanted.shape[:lead]):
            array[place] = tensors.read(in_place(name, place), pattern, wanted.shape[lead:], *part)
        return array

    params = jax.tree_util.tree_map_with_path(leaf, shapes)
    tensors.check_all_read()
    return params


class Tensors:
    """The tensors of one or several safetensors files by name."""

    def __init__(self, folder: Path, stored: str | None = None):
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise UserError(f"{folder}: no .safetensors file in it")
        self.folder, self.stored = folder, stored
        self.places: dict[str, Any] = {}
        for path in files:
            try:
                opened = safe_open(path, framework="np")
            except SafetensorError as error:
                raise UserError(f"{path}: not a whole safetensors file: {error}") from None
            self.places |= dict.fromkeys(opened.keys(), opened)
        self.unread = set(self.places)

    def read(self, name: str, pattern: str, shape: tuple[int, ...], part: int, parts: int) -> np.ndarray:
        """The tensor in float32, or one of its equal parts, rearranged by `pattern` to `shape`."""
        tensor = self.take(name)
        if tensor.dtype == np.uint8:
            tensor = self.unpack(name, tensor)
        tensor = tensor.astype(np.float32)
        sizes = dict(zip(pattern.split(" -> ")[1].split(), shape, strict=True))
        try:
            return rearrange(np.split(tensor, parts)[part], pattern, sizes)
        except ValueError:
            raise UserError(
                f"{self.folder}: {name} is of shape {tensor.shape}, and by config.json its parts are {shape}"
            ) from None

    def take(self, name: str) -> np.ndarray:
        """As it is stored."""
        if name not in self.places:
            raise UserError(f"{self.folder}: no tensor {name} in its .safetensors files")
        self.unread.discard(name)
        return np.asarray(self.places[name].get_tensor(name))

    def unpack(self, name: str, tensor: np.ndarray) -> np.ndarray:
        if self.stored not in ("multiplies", "divides"):
            raise UserError(f"{self.folder}: {name} is packed, and its config.json does not say how")
        scale = float(self.take(ternary.scale_name(name)).reshape(()))
        return ternary.unpacked(tensor, scale if self.stored == "multiplies" else 1 / scale)

    def check_all_read(self) -> None:
        left = sorted(name for name in self.unread if name not in TIED and "rotary_emb" not in name)
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise UserError(f"{self.folder}: no place in this model for the tensor {left[0]}{more}")


@contextmanager
def whole_or_nothing(target: str) -> Iterator[Path]:
    """A folder that becomes `target` when all went well, and of which nothing is left when not."""
    final = Path(target).absolute()
    if final.exists() and not (final.is_dir() and not any(final.iterdir())):
        raise UserError(f"{target}: there is something already; name a new folder, or remove it")
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{final.name}-", dir=final.parent) as scratch:
        made = Path(scratch) / final.name
        made.mkdir()
        yield made
        made.rename(final)
