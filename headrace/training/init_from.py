"""The first weights of a run from those of another model: a run folder, or one of Hugging Face. All of them,
or those that `take` names; along the vocabulary by token, the others grown to size (enlarge.py)."""

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from headrace.model_wrappers import (
    classification_head as classifier,
    split_weights as matrices,
    frozen_reference as reference,
)
from headrace.config import reader as config, recipe, sections
from headrace.training import grow as enlarge
from headrace.nn import sharding as mesh, module
from headrace.storage import files as store
from headrace.checkpoint.manager import Checkpoints
from headrace.model_formats import quantized_folder as stored
from headrace.data.memory_map import open_folder
from headrace.errors import UserError
from headrace.convert import head_warnings as heads, to_huggingface as huggingface
from headrace.model_formats import hf_ternary as ternary
from headrace.model_formats.hf_tensors import Tensors, table_of
from headrace.nn.module import named
from headrace.objectives import file


@dataclass(frozen=True)
class Source:
    """A model to start from, and which of the new model's weights it gives."""

    path: str
    model: Any
    taken: frozenset[str]
    held: Any  # its model as it lies there, where matrices are held otherwise
    whole: bool  # weights that are differences to others there are made whole first
    aside: tuple[str, ...] = ()  # tensors of a folder of Hugging Face that need no place here
    passed: str = ""  # what is to be said of them


def check(path: str, model: Any, take: str | None = None) -> Source:
    """What `model` can start from; UserError where it cannot."""
    freezes, model = matrices.is_frozen(model), matrices.plain(model)
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
    whole = not alike(old, model, taken)
    if whole and freezes and differences(model):  # weights are frozen one by one
        name, base = next(iter(differences(model).items()))
        raise UserError(f"start: {name} is the difference to {base} here, and not in {path}")
    if is_run(path):
        return Source(path, old, taken, held, whole)
    heads.check(old, taken, Path(path))
    if take is not None:  # nothing else matters
        return Source(path, old, taken, held, whole, ("*",))
    passed = heads.passed_over(old, taken, Path(path))
    return Source(path, old, taken, held, whole, heads.aside(file("models", old)), passed)


def alike(old: Any, model: Any, taken: frozenset[str]) -> bool:
    """Whether weights that are differences to others can be taken as such: they are so in both models, and
    what they differ from is taken along."""
    ours = differences(model)
    return ours == differences(old) and all(other in taken for name, other in ours.items() if name in taken)


def differences(model: Any) -> dict[str, str]:
    """The weights that a family holds as the difference to another, and to which."""
    return getattr(file("models", model), "differences", lambda cfg: {})(model)


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
    bare, old = matrices.plain(model), source.model
    family = file("models", bare).Model
    plain = mesh.placed(family, bare, devices) if matrices.is_frozen(model) else fresh
    rows, told = rows_of(source.path, data, old.vocab, model.vocab)
    fit = Fit(source, bare, {name: leaf for name, leaf in named(plain) if name in source.taken}, rows)
    said = begun(fit, [name for name, _ in named(plain)], told)
    if matrices.is_frozen(model) and not reference.has_reference(model):
        return frozen(fit, model, fresh, devices), said
    made = fit({name: w for name, w in _read(source, devices).items() if name in source.taken})
    if source.whole:
        made |= apart(bare, made, dict(named(plain)))
    whole = jax.tree_util.tree_map_with_path(lambda path, w: made.get(module.dotted(path), w), plain)
    if not matrices.is_frozen(model):
        return whole, said
    homes = jax.tree.map(lambda leaf: leaf.sharding, fresh)
    twice = jax.jit(partial(matrices.of_plain, family, model), out_shardings=homes)
    return twice(whole, jax.random.key(0)), said


def apart(model: Any, made: dict[str, Any], fresh: dict[str, Any]) -> dict[str, Any]:
    """Those of the whole weights that this model holds as differences."""
    return {
        name: jax.jit(jnp.subtract, out_shardings=fresh[name].sharding)(made[name], (fresh | made)[other])
        for name, other in differences(model).items()
        if name in made
    }


@dataclass(frozen=True)
class Fit:
    """Makes weights of the source those of a model: grown to size, tokens in their rows, laid out as those
    that are `taken`."""

    source: Source
    model: Any
    taken: dict[str, Any]
    rows: np.ndarray | None

    def __call__(self, theirs: dict[str, Any]) -> dict[str, Any]:
        """What is as it should be is not copied: this is where a run needs most memory beyond its state."""
        old = self.source.model
        its = dict(named(module.axes(file("models", old).Model, old)))
        depths = old.layers, self.model.layers

        def grown(some: dict[str, Any]) -> dict[str, Any]:
            return {
                name: enlarge.tiled(w, its[name], self.taken[name].shape, depths, self.rows)
                for name, w in some.items()
            }

        def as_it_is(name: str, w: Any) -> bool:
            other, home = self.rows is not None and "vocab" in its[name].names, self.taken[name]
            return not other and (w.shape, w.sharding) == (home.shape, home.sharding)

        changes = {name: w for name, w in theirs.items() if not as_it_is(name, w)}
        homes = {name: self.taken[name].sharding for name in changes}
        return theirs | jax.jit(grown, out_shardings=homes)(changes) if changes else theirs


def begun(fit: Fit, names: list[str], told: str) -> str:
    """What is to be said of it."""
    old, taken = fit.source.model, fit.source.taken
    said = f"start: {len(fit.taken)} of {len(names)} weights from {fit.source.path}"
    new = sorted(set(names) - taken)
    drawn = f"; {', '.join(new[:3])}{' and others' * (len(new) > 3)} drawn" if new else ""
    axes = dict(named(module.axes(file("models", old).Model, old)))
    has_rows = any("vocab" in axes[name].names for name in taken)
    more = [told] * bool(told and has_rows) + changed(old, fit.model)
    more += [fit.source.passed] * bool(fit.source.passed)
    return said + drawn + "".join(f"; {line}" for line in more)


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


def frozen(fit: Fit, model: Any, fresh: Any, devices: Mesh) -> Any:
    """With nothing learnt yet. One weight after the other is read and frozen: all of them as they were would
    not fit where all of them frozen do. Of `fresh`, what is not drawn is given up first."""
    bare, key, made = matrices.plain(model), jax.random.key(0), {}
    family = file("models", bare).Model
    plain = mesh.placed(family, bare, devices)
    structure: Any = jax.tree.structure(plain)
    parts = structure.flatten_up_to(jax.tree.map(lambda leaf: leaf.sharding, fresh))
    homes = {name: home for (name, _), home in zip(named(plain), parts, strict=True)}
    for name, leaf in named(fresh):
        if not matrices.is_drawn(name):
            leaf.delete()
    for name, w in _each(fit.source, devices):
        freeze = jax.jit(partial(matrices.held, family, model, name), out_shardings=homes[name])
        made[name] = jax.block_until_ready(freeze(fit({name: w})[name], key))
        del w  # before the next is read
    held = structure.unflatten([made[name] for name in homes])
    # What learns is drawn already, by the run's seed.
    drawn = lambda path, made, leaf: leaf if matrices.is_drawn(module.dotted(path)) else made
    return jax.tree_util.tree_map_with_path(drawn, held, fresh)


def _each(source: Source, devices: Mesh) -> Iterator[tuple[str, Any]]:
    """The weights of the source one after the other, spread over the devices."""
    path, family = source.path, file("models", source.model)
    target = mesh.placed(family.Model, source.model, devices)
    if not is_run(path):
        packed, homes = ternary.stored(huggingface.read_config(Path(path))), dict(named(target))
        tensors, table = Tensors(Path(path), packed, source.aside), table_of(family, source.model)
        for name, w in huggingface.each_weight(table, target, tensors, source.taken):
            yield name, jax.make_array_from_callback(w.shape, homes[name].sharding, w.__getitem__)
    elif matrices.is_frozen(source.held) or source.whole:
        left = list(_read(source, devices).items())
        while left:
            yield left.pop(0)
    else:
        with _checkpoint(path) as (checkpoints, step):
            yield from checkpoints.each_param(step, target)


def _read(source: Source, devices: Mesh) -> dict[str, Any]:
    """All weights of the source at once. Whole ones are what an export of it would hold."""
    if not is_run(source.path):
        return dict(_each(source, devices))
    params, family = _restored(source, devices), file("models", source.model)
    found = dict(named(params))
    if source.whole:  # of what was trained as a pair, the one that is not the generator
        found |= dict(named(huggingface.exports_of(family, source.model, params)[""][1]))
    return found


def _restored(source: Source, devices: Mesh) -> Any:
    """The weights of a run."""
    family = file("models", source.model).Model
    target = mesh.placed(family, source.model, devices)
    with _checkpoint(source.path) as (checkpoints, step):
        if not matrices.is_frozen(source.held):
            return checkpoints.restore_params(step, target)
        # What was learnt beside its weights is merged into them.
        there = mesh.placed(file("models", source.held).Model, source.held, devices)
        homes = jax.tree.map(lambda leaf: leaf.sharding, target)
        merge = jax.jit(partial(matrices.to_plain, family, source.held), out_shardings=homes)
        return merge(checkpoints.restore_params(step, there))


@contextlib.contextmanager
def _checkpoint(run: str) -> Iterator[tuple[Checkpoints, int]]:
    checkpoints = Checkpoints(run)
    try:
        if (step := checkpoints.latest()) is None:
            raise UserError(f"start: {run}: no checkpoint in it yet")
        yield checkpoints, step
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
