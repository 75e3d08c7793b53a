"""The first weights of a run from those of another model: a run folder, or one of Hugging Face. All of them,
or those that `init_weights` names; along the vocabulary by token, the others grown to size (grow.py)."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from headrace import model_wrappers
from headrace.checkpoint import open_hf
from headrace.checkpoint.manager import Checkpoints
from headrace.config import reader, recipe
from headrace.config.source_model import read_hf_config
from headrace.data.memory_map import open_folder
from headrace.errors import UserError
from headrace.model_formats import hf_ternary, quantized_folder
from headrace.model_formats.hf_tensors import SafetensorsFolder
from headrace.model_wrappers import classification_head, frozen_reference, load_family
from headrace.nn import module, sharding
from headrace.nn.module import named_leaves
from headrace.storage import files
from headrace.training import grow


@dataclass(frozen=True)
class InitSource:
    """A model to start from, and which of the new model's weights it gives."""

    path: str
    model: Any
    taken: frozenset[str]
    held: Any  # its model as it lies there, where matrices are held otherwise
    whole: bool  # weights that are differences to others there are made whole first
    aside: tuple[str, ...] = ()  # tensors of a folder of Hugging Face that need no place here
    passed: str = ""  # what is to be said of them


def check(path: str, model: Any, init_weights: str | None = None) -> InitSource:
    """What `model` can start from; UserError where it cannot."""
    freezes, model = model_wrappers.has_frozen_base(model), model_wrappers.without_wrapper(model)
    held = model_of(path, model)
    old, family = model_wrappers.without_wrapper(held), load_family(model)
    theirs, ours = (dict(named_leaves(module.axes(load_family(cfg).Model, cfg))) for cfg in (old, model))
    if init_weights is None:
        if old.use != model.use:
            raise UserError(
                f"init_from: {path} holds a {old.use}, expected a {model.use}, or `init_weights` to name "
                "some weights"
            )
        other = sorted(theirs.keys() ^ ours.keys())
        if classification_head.has_labels(
            model
        ):  # it needs no other head, and draws its own where there is none
            other = sorted(ours.keys() - theirs.keys() - set(classification_head.HEAD_WEIGHTS))
        if other:
            raise UserError(f"init_from: {other[0]} is in one alone of {path} and this recipe's model")
    taken = (
        module.select_weights("init_weights", init_weights, ours)
        if init_weights is not None
        else frozenset(ours) & frozenset(theirs)
    )
    if init_weights is None and head_key(old) != head_key(model):
        taken -= set(classification_head.HEAD_WEIGHTS)
    shapes = dict(named_leaves(module.shapes(family.Model, model)))
    before = dict(named_leaves(module.shapes(load_family(old).Model, old)))
    for name in (name for name in ours if name in taken):
        if name not in theirs or theirs[name].names != ours[name].names:
            raise UserError(
                f"init_weights: {path}, a {old.use}, has no weight {name} that is like this model's"
            )
        for axis, small, large in zip(ours[name].names, before[name].shape, shapes[name].shape, strict=True):
            if large < small and axis != "vocab":
                raise UserError(
                    f"init_from: {name} is {small} along {axis} in {path}, expected at most {large}"
                )
    whole = not same_deltas(old, model, taken)
    if whole and freezes and differences(model):  # weights are frozen one by one
        name, base = next(iter(differences(model).items()))
        raise UserError(f"init_from: {name} is the difference to {base} here, and not in {path}")
    if is_run(path):
        return InitSource(path, old, taken, held, whole)
    open_hf.check_head_tensors(old, taken, Path(path))
    if init_weights is not None:  # nothing else matters
        return InitSource(path, old, taken, held, whole, ("*",))
    passed = open_hf.ignored_note(old, taken, Path(path))
    return InitSource(path, old, taken, held, whole, load_family(old).hf_naming.ignored_tensors, passed)


def same_deltas(old: Any, model: Any, taken: frozenset[str]) -> bool:
    """Whether weights that are differences to others can be taken as such: they are so in both models, and
    what they differ from is taken along."""
    ours = differences(model)
    return ours == differences(old) and all(other in taken for name, other in ours.items() if name in taken)


def differences(model: Any) -> dict[str, str]:
    """The weights that a family holds as the difference to another, and to which."""
    return load_family(model).delta_weights(model)


def head_key(model: Any) -> tuple[int, str]:
    """By which heads for labels are alike."""
    return model.labels, "" if model.classifier is None else model.classifier.pooling


def model_of(path: str, wanted: Any = None) -> Any:
    """The model section of a folder. One of Hugging Face is a family of ours, unless the wanted one names its
    classes itself."""
    if files.is_url(path) and not is_run(path):
        raise UserError(
            f"init_from: found no recipe.yaml in {files.redacted(path)}, expected a run folder, or one of "
            "Hugging Face on this machine"
        )
    if not is_run(path) and (Path(path) / "config.json").is_file():
        settings = read_hf_config(Path(path))
        own = None if wanted is None else load_family(wanted)
        if own is not None and own.hf is not None and not own.hf.types:
            section, head = own.hf.from_config(settings), None
        else:
            section, head = open_hf.to_recipe_sections(settings)
        return reader.part_class("models", section.pop("use"))(**section, classifier=head)
    if not files.is_url(path) and quantized_folder.read_quant_config(path) is not None:
        raise UserError(f"init_from: {path} holds a quantised model, expected the run that it was made of")
    return recipe.load_run(path).model


def is_run(path: str) -> bool:
    return files.exists(files.join(path, "recipe.yaml"))


def load_weights(source: InitSource, model: Any, fresh: Any, devices: Mesh, data: str) -> tuple[Any, str]:
    """The fresh weights of `model` with those of the source in their place, laid out as they are, and what is
    to be said of it. `data` is the folder whose tokenizer the model is to know."""
    bare, old = model_wrappers.without_wrapper(model), source.model
    family = load_family(bare).Model
    plain = (
        sharding.abstract_params(family, bare, devices) if model_wrappers.has_frozen_base(model) else fresh
    )
    rows, told = vocab_row_map(source.path, data, old.vocab, model.vocab)
    fit = WeightAdapter(
        source, bare, {name: leaf for name, leaf in named_leaves(plain) if name in source.taken}, rows
    )
    said = summary(fit, [name for name, _ in named_leaves(plain)], told)
    if model_wrappers.has_frozen_base(model) and not frozen_reference.has_reference(model):
        return load_frozen(fit, model, fresh, devices), said
    made = fit({name: w for name, w in _read(source, devices).items() if name in source.taken})
    if source.whole:
        made |= subtract_base(bare, made, dict(named_leaves(plain)))
    whole = jax.tree_util.tree_map_with_path(lambda path, w: made.get(module.path_name(path), w), plain)
    if not model_wrappers.has_frozen_base(model):
        return whole, said
    homes = jax.tree.map(lambda leaf: leaf.sharding, fresh)
    twice = jax.jit(partial(model_wrappers.wrap_params, family, model), out_shardings=homes)
    return twice(whole, jax.random.key(0)), said


def subtract_base(model: Any, made: dict[str, Any], fresh: dict[str, Any]) -> dict[str, Any]:
    """Those of the whole weights that this model holds as differences."""
    return {
        name: jax.jit(jnp.subtract, out_shardings=fresh[name].sharding)(made[name], (fresh | made)[other])
        for name, other in differences(model).items()
        if name in made
    }


@dataclass(frozen=True)
class WeightAdapter:
    """Makes weights of the source those of a model: grown to size, tokens in their rows, laid out as those
    that are `taken`."""

    source: InitSource
    model: Any
    taken: dict[str, Any]
    rows: np.ndarray | None

    def __call__(self, theirs: dict[str, Any]) -> dict[str, Any]:
        """What is as it should be is not copied: this is where a run needs most memory beyond its state."""
        old = self.source.model
        its = dict(named_leaves(module.axes(load_family(old).Model, old)))
        depths = old.layers, self.model.layers

        def grown(some: dict[str, Any]) -> dict[str, Any]:
            return {
                name: grow.grow_weight(w, its[name], self.taken[name].shape, depths, self.rows)
                for name, w in some.items()
            }

        def as_it_is(name: str, w: Any) -> bool:
            other, home = self.rows is not None and "vocab" in its[name].names, self.taken[name]
            return not other and (w.shape, w.sharding) == (home.shape, home.sharding)

        changes = {name: w for name, w in theirs.items() if not as_it_is(name, w)}
        homes = {name: self.taken[name].sharding for name in changes}
        return theirs | jax.jit(grown, out_shardings=homes)(changes) if changes else theirs


def summary(fit: WeightAdapter, names: list[str], told: str) -> str:
    """What is to be said of it."""
    old, taken = fit.source.model, fit.source.taken
    said = f"init_from: {len(fit.taken)} of {len(names)} weights from {fit.source.path}"
    new = sorted(set(names) - taken)
    drawn = f"; {', '.join(new[:3])}{' and others' * (len(new) > 3)} drawn" if new else ""
    axes = dict(named_leaves(module.axes(load_family(old).Model, old)))
    has_rows = any("vocab" in axes[name].names for name in taken)
    more = [told] * bool(told and has_rows) + changed_settings(old, fit.model)
    more += [fit.source.passed] * bool(fit.source.passed)
    return said + drawn + "".join(f"; {line}" for line in more)


def changed_settings(old: Any, model: Any) -> list[str]:
    """The keys by which a model of the same family computes something else with weights that were taken."""
    if old.use != model.use:
        return []
    keys = sorted(set(reader.own_keys(model)) - {"vocab"})
    return [
        f"model.{key} is {getattr(model, key)} here and {getattr(old, key)} there"
        for key in keys
        if getattr(model, key) != getattr(old, key)
    ]


def load_frozen(fit: WeightAdapter, model: Any, fresh: Any, devices: Mesh) -> Any:
    """With nothing learnt yet. One weight after the other is read and frozen: all of them as they were would
    not fit where all of them frozen do. Of `fresh`, what is not drawn is given up first."""
    bare, key, made = model_wrappers.without_wrapper(model), jax.random.key(0), {}
    family = load_family(bare).Model
    plain = sharding.abstract_params(family, bare, devices)
    structure: Any = jax.tree.structure(plain)
    parts = structure.flatten_up_to(jax.tree.map(lambda leaf: leaf.sharding, fresh))
    homes = {name: home for (name, _), home in zip(named_leaves(plain), parts, strict=True)}
    for name, leaf in named_leaves(fresh):
        if not model_wrappers.is_randomly_initialized(name):
            leaf.delete()
    for name, w in _each(fit.source, devices):
        freeze = jax.jit(partial(model_wrappers.wrap_weight, family, model, name), out_shardings=homes[name])
        made[name] = jax.block_until_ready(freeze(fit({name: w})[name], key))
        del w  # before the next is read
    held = structure.unflatten([made[name] for name in homes])
    # What learns is drawn already, by the run's seed.
    drawn = lambda path, made, leaf: (
        leaf if model_wrappers.is_randomly_initialized(module.path_name(path)) else made
    )
    return jax.tree_util.tree_map_with_path(drawn, held, fresh)


def _each(source: InitSource, devices: Mesh) -> Iterator[tuple[str, Any]]:
    """The weights of the source one after the other, spread over the devices."""
    path, family = source.path, load_family(source.model)
    target = sharding.abstract_params(family.Model, source.model, devices)
    if not is_run(path):
        packed, homes = hf_ternary.read_format(read_hf_config(Path(path))), dict(named_leaves(target))
        tensors, table = (
            SafetensorsFolder(Path(path), packed, source.aside),
            family.tensor_table(source.model),
        )
        for name, w in open_hf.iter_weights(table, target, tensors, source.taken):
            yield name, jax.make_array_from_callback(w.shape, homes[name].sharding, w.__getitem__)
    elif model_wrappers.has_frozen_base(source.held) or source.whole:
        left = list(_read(source, devices).items())
        while left:
            yield left.pop(0)
    else:
        with _checkpoint(path) as (checkpoints, step):
            yield from checkpoints.iter_params(step, target)


def _read(source: InitSource, devices: Mesh) -> dict[str, Any]:
    """All weights of the source at once. Whole ones are what an export of it would hold."""
    if not is_run(source.path):
        return dict(_each(source, devices))
    params, family = _restored(source, devices), load_family(source.model)
    found = dict(named_leaves(params))
    if source.whole:  # of what was trained as a pair, the one that is not the generator
        found |= dict(named_leaves(family.split_for_export(source.model, params)[""][1]))
    return found


def _restored(source: InitSource, devices: Mesh) -> Any:
    """The weights of a run."""
    family = load_family(source.model).Model
    target = sharding.abstract_params(family, source.model, devices)
    with _checkpoint(source.path) as (checkpoints, step):
        if not model_wrappers.has_frozen_base(source.held):
            return checkpoints.restore_params(step, target)
        # What was learnt beside its weights is merged into them.
        there = sharding.abstract_params(load_family(source.held).Model, source.held, devices)
        homes = jax.tree.map(lambda leaf: leaf.sharding, target)
        merge = jax.jit(partial(model_wrappers.unwrap_params, family, source.held), out_shardings=homes)
        return merge(checkpoints.restore_params(step, there))


@contextlib.contextmanager
def _checkpoint(run: str) -> Iterator[tuple[Checkpoints, int]]:
    checkpoints = Checkpoints(run)
    try:
        if (step := checkpoints.latest_step()) is None:
            raise UserError(f"init_from: {run}: no checkpoint in it yet")
        yield checkpoints, step
    finally:
        checkpoints.close()


def vocab_row_map(before: str, data: str, old: int, new: int) -> tuple[np.ndarray | None, str]:
    """For each token of the new vocabulary its row in the old, or -1, and what is to be said of it. None
    where all stay in their place. Where a tokenizer is missing, tokens are taken by their numbers."""
    theirs, ours = read_vocab(before), read_vocab(data)
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


def read_vocab(folder: str) -> dict[str, int] | None:
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
