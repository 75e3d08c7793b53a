"""The first weights of a run from those of another model: a run folder, or one of Hugging Face. All of them,
or those that `take` names; along the vocabulary by token, the others grown to size (enlarge.py)."""

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from millrace import classifier, config, enlarge, matrices, mesh, module, recipe, reference, sections, store
from millrace.checkpoint import Checkpoints
from millrace.compress import stored
from millrace.data.mapped import open_folder
from millrace.errors import UserError
from millrace.export import huggingface, ternary
from millrace.export.tensors import table_of
from millrace.module import named
from millrace.objective import file


@dataclass(frozen=True)
class Source:
    """A model to start from, and which of the new model's weights it gives."""

    path: str
    model: Any
    taken: frozenset[str]
    held: Any  # its model as it lies there, where matrices are held otherwise


def check(path: str, model: Any, take: str | None = None) -> Source:
    """What `model` can start from; UserError where it cannot."""
    model = matrices.plain(model)
    held = model_of(path, model)
    old, family = matrices.plain(held), file("models", model)
    theirs, ours = (dict(named(module.axes(file("models", cfg).Model, cfg))) for cfg in (old, model))
    if take is None:
        if old.use != model.use:
            raise UserError(
                f"start: {path} holds a {old.use}, expected a {model.use}, or `take` to name some weights"
            )
        other = sorted(theirs.keys() ^ ours.keys())
        if classifier.has_labels(model):  # it needs no other head, and draws its own where there is none
            other = sorted(ours.keys() - theirs.keys() - set(classifier.OWN))
        if other:
            raise UserError(f"start: {other[0]} is in one alone of {path} and this recipe's model")
    taken = module.matching("take", take, ours) if take is not None else frozenset(ours) & frozenset(theirs)
    if take is None and head_of(old) != head_of(model):
        taken -= set(classifier.OWN)
    shapes = dict(named(module.shapes(family.Model, model)))
    before = dict(named(module.shapes(file("models", old).Model, old)))
    for name in (name for name in ours if name in taken):
        if name not in theirs or theirs[name].names != ours[name].names:
            raise UserError(f"take: {path}, a {old.use}, has no weight {name} that is like this model's")
        for axis, small, large in zip(ours[name].names, before[name].shape, shapes[name].shape, strict=True):
            if large < small and axis != "vocab":
                raise UserError(f"start: {name} is {small} along {axis} in {path}, expected at most {large}")
    return Source(path, old, taken, held)


def head_of(model: Any) -> tuple[int, str]:
    """By which heads for labels are alike."""
    return getattr(model, "labels", 0), getattr(model, "pooling", "")


def model_of(path: str, wanted: Any = None) -> Any:
    """The model section of a folder. One of Hugging Face is a family of ours, unless the wanted one names its
    classes itself."""
    if store.is_url(path) and not is_run(path):
        raise UserError(
            f"start: found no recipe.yaml in {store.shown(path)}, expected a run folder, or one of Hugging "
            "Face on this machine"
        )
    if not is_run(path) and (Path(path) / "config.json").is_file():
        settings = huggingface.read_config(Path(path))
        own = None if wanted is None else file("models", wanted)
        if own is not None and not own.HF_TYPES:
            section = own.from_hf(settings)
        else:
            section = huggingface.section_of(settings)
        return config.part_class("models", section.pop("use"), sections.Every)(**section)
    if not store.is_url(path) and stored.settings_of(path) is not None:
        raise UserError(f"start: {path} holds a quantised model, expected the run that it was made of")
    return recipe.load_run(path).model


def is_run(path: str) -> bool:
    return store.exists(store.join(path, "recipe.yaml"))


def weights(source: Source, model: Any, fresh: Any, devices: Mesh, data: str) -> tuple[Any, str]:
    """The fresh weights of `model` with those of the source in their place, laid out as they are, and what is
    to be said of it. `data` is the folder whose tokenizer the model is to know."""
    if matrices.is_frozen(model):
        return frozen(source, model, fresh, devices, data)
    old = source.model
    rows, said = rows_of(source.path, data, old.vocab, model.vocab)
    axes = module.axes(file("models", old).Model, old)
    params = _read(source, devices)
    if classifier.has_labels(model):  # of what was trained as a pair, the one that is not the generator
        params = huggingface.exports_of(file("models", old), old, params)[""][1]
    theirs, its = dict(named(params)), dict(named(axes))
    depths = old.layers, model.layers
    taken = {name: leaf for name, leaf in named(fresh) if name in source.taken}

    def as_it_is(name: str, leaf: Any) -> bool:
        other = rows is not None and "vocab" in its[name].names
        return not other and (leaf.shape, leaf.sharding) == (theirs[name].shape, theirs[name].sharding)

    def grown(theirs: dict[str, Any]) -> dict[str, Any]:
        return {
            name: enlarge.tiled(w, its[name], taken[name].shape, depths, rows) for name, w in theirs.items()
        }

    # A second copy is made of what changes alone: this is where a run needs most memory beyond its state.
    changes = [name for name, leaf in taken.items() if not as_it_is(name, leaf)]
    homes = {name: taken[name].sharding for name in changes}
    made = {name: theirs[name] for name in taken.keys() - set(changes)}
    made |= jax.jit(grown, out_shardings=homes)({name: theirs[name] for name in changes})
    whole = jax.tree_util.tree_map_with_path(lambda path, w: made.get(module.dotted(path), w), fresh)
    count = len(taken), len(dict(named(fresh)))
    begun = f"start: {count[0]} of {count[1]} weights from {source.path}"
    new = sorted(dict(named(fresh)).keys() - source.taken)
    drawn = f"; {', '.join(new[:3])}{' and others' * (len(new) > 3)} drawn" if new else ""
    has_rows = any("vocab" in its[name].names for name in source.taken)
    more = [said] * bool(said and has_rows) + changed(old, model)
    return whole, begun + drawn + "".join(f"; {line}" for line in more)


def changed(old: Any, model: Any) -> list[str]:
    """The keys by which a model of the same family computes something else with weights that were taken."""
    if old.use != model.use:
        return []
    own = {f.name for f in dataclasses.fields(model)} - {f.name for f in dataclasses.fields(sections.Every)}
    keys = sorted(own - {"vocab"})
    return [
        f"model.{key} is {getattr(model, key)} here and {getattr(old, key)} there"
        for key in keys
        if getattr(model, key) != getattr(old, key)
    ]


def frozen(source: Source, model: Any, fresh: Any, devices: Mesh, data: str) -> tuple[Any, str]:
    """As `weights`, frozen and with nothing learnt yet."""
    bare = matrices.plain(model)
    family = file("models", bare).Model
    whole, said = weights(source, bare, mesh.placed(family, bare, devices), devices, data)
    homes, key = jax.tree.map(lambda leaf: leaf.sharding, fresh), jax.random.key(0)
    if reference.has_reference(model):
        held = jax.jit(partial(matrices.of_plain, family, model), out_shardings=homes)(whole, key)
    else:
        # One after the other, each gone when it is frozen: all in one program, they would be there twice.
        structure: Any = jax.tree.structure(whole)
        names, each, parts = [name for name, _ in named(whole)], jax.tree.leaves(whole), []
        del whole
        for number, (name, home) in enumerate(zip(names, structure.flatten_up_to(homes), strict=True)):
            w, each[number] = each[number], None
            freeze = jax.jit(partial(matrices.held, family, model, name), out_shardings=home)
            parts.append(jax.block_until_ready(freeze(w, key)))
        held = structure.unflatten(parts)
    # What learns is drawn already, by the run's seed.
    drawn = lambda path, made, leaf: leaf if module.dotted(path).endswith(".down") else made
    return jax.tree_util.tree_map_with_path(drawn, held, fresh), said


def _read(source: Source, devices: Mesh) -> Any:
    """All weights of the source, spread over the devices."""
    path, old, family = source.path, source.model, file("models", source.model)
    target = mesh.placed(family.Model, old, devices)
    if not is_run(path):
        packed = ternary.stored(huggingface.read_config(Path(path)))
        read = huggingface.from_tensors(table_of(family, old), target, Path(path), packed)
        put = lambda w, to: jax.make_array_from_callback(w.shape, to.sharding, lambda index: w[index])
        return jax.tree.map(put, read, target)
    checkpoints = Checkpoints(path)
    try:
        step = checkpoints.latest()
        if step is None:
            raise UserError(f"start: {path}: no checkpoint in it yet")
        if not matrices.is_frozen(source.held):
            return checkpoints.restore_params(step, target)
        # What was learnt beside its weights is merged into them.
        there = mesh.placed(file("models", source.held).Model, source.held, devices)
        homes = jax.tree.map(lambda leaf: leaf.sharding, target)
        merge = jax.jit(partial(matrices.to_plain, family.Model, source.held), out_shardings=homes)
        return merge(checkpoints.restore_params(step, there))
    finally:
        checkpoints.close()


def rows_of(before: str, data: str, old: int, new: int) -> tuple[np.ndarray | None, str]:
    """For each token of the new vocabulary its row in the old, or -1, and what is to be said of it. None
    where all stay in their place. Where a tokenizer is missing, tokens are taken by their numbers."""
    theirs, ours = tokens_of(before), tokens_of(data)
    if theirs is None or ours is None or theirs == ours:
        if old == new:
            return None, ""
        rows = np.where(np.arange(new) < old, np.arange(new), -1)
        how = "by their numbers"
    else:
        rows, how = np.full(new, -1), "by their text"
        for token, number in ours.items():
            if number < new and theirs.get(token, old) < old:
                rows[number] = theirs[token]
    found = int((rows >= 0).sum())
    rest = f", {new - found:,} new ones as the mean of the old" if found < new else ""
    return rows, f"{found:,} tokens {how}{rest}"


def tokens_of(folder: str) -> dict[str, int] | None:
    """Of the tokenizer.json in a folder; None where there is none."""
    import tokenizers

    try:
        text = open_folder(folder).read("tokenizer.json")
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return tokenizers.Tokenizer.from_str(bytes(text).decode()).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises a plain Exception
        raise UserError(f"{folder}/tokenizer.json: not a tokenizer: {error}") from None
