"""Check which weights of another model a run can start with."""

from dataclasses import dataclass, replace
from pathlib import Path

from headrace import model_wrappers
from headrace.checkpoint import open_hf
from headrace.config import reader, recipe
from headrace.config.source_model import read_hf_config
from headrace.errors import UserError
from headrace.model_formats import quantized_folder
from headrace.model_wrappers import classification_head, load_family
from headrace.models import ModelConfig
from headrace.nn import module
from headrace.nn.module import Axes, named_leaves
from headrace.storage import files


@dataclass(frozen=True)
class InitSource:
    """A model to start from, and which of the new model's weights it provides."""

    path: str  # a run folder or a Hugging Face folder
    model: ModelConfig  # with plain weights
    selected: frozenset[str]  # paths of the weights to read
    stored_model: ModelConfig  # as stored, perhaps with wrapped weights
    sums_deltas: bool  # add weights that are stored as differences to those that they differ from
    ignored_tensors: tuple[str, ...] = ()  # patterns of a Hugging Face folder's tensors that are not read
    ignored_note: str = ""  # about those tensors, for the log


def check_source(path: str, model: ModelConfig, init_weights: str | None = None) -> InitSource:
    """Select the weights that `model` starts with: those that match the patterns `init_weights`, or all.

    Raises UserError if they do not fit the model."""
    has_frozen_base = model_wrappers.has_frozen_base(model)
    model = model_wrappers.without_wrapper(model)
    stored_model = read_model_config(path, model)
    source = model_wrappers.without_wrapper(stored_model)
    if init_weights is None:
        selected = select_all_weights(path, source, model)
    else:
        selected = module.select_weights("init_weights", init_weights, axes_by_path(model))
    check_shapes(path, source, model, selected)

    sums_deltas = not has_same_deltas(source, model, selected)
    if sums_deltas and has_frozen_base and delta_weights(model):  # weights are frozen one by one
        name, base = next(iter(delta_weights(model).items()))
        raise UserError(f"init_from: {name} is the difference to {base} here, and not in {path}")
    checked = InitSource(path, source, selected, stored_model, sums_deltas)
    if is_run(path):
        return checked
    open_hf.check_head_tensors(source, selected, Path(path))
    if init_weights is not None:  # the other tensors do not matter
        return replace(checked, ignored_tensors=("*",))
    return replace(
        checked,
        ignored_tensors=load_family(source).hf_naming.ignored_tensors,
        ignored_note=open_hf.ignored_note(source, selected, Path(path)),
    )


def axes_by_path(model: ModelConfig) -> dict[str, Axes]:
    """The axes of every weight of a model, by path."""
    return dict(named_leaves(module.axes(load_family(model).Model, model)))


def select_all_weights(path: str, source: ModelConfig, model: ModelConfig) -> frozenset[str]:
    """Select all weights of a source that has the same ones, except perhaps a head for labels."""
    if source.use != model.use:
        raise UserError(
            f"init_from: {path} holds a {source.use}, expected a {model.use}, or `init_weights` to select "
            "some weights"
        )
    axes, source_axes = axes_by_path(model), axes_by_path(source)
    unmatched = sorted(source_axes.keys() ^ axes.keys())
    if classification_head.has_labels(model):  # it needs no head of the source, and can draw its own
        unmatched = sorted(axes.keys() - source_axes.keys() - set(classification_head.HEAD_WEIGHTS))
    if unmatched:
        raise UserError(
            f"init_from: {unmatched[0]} is a weight of only one of {path} and this recipe's model"
        )
    selected = frozenset(axes) & frozenset(source_axes)
    has_same_head = head_key(source) == head_key(model)
    return selected if has_same_head else selected - set(classification_head.HEAD_WEIGHTS)


def check_shapes(path: str, source: ModelConfig, model: ModelConfig, selected: frozenset[str]) -> None:
    """Check that the selected weights have the axes of the source's, and are not smaller along any but the
    vocabulary. Raises UserError if not."""
    axes, source_axes = axes_by_path(model), axes_by_path(source)
    shapes, source_shapes = (
        dict(named_leaves(module.shapes(load_family(cfg).Model, cfg))) for cfg in (model, source)
    )
    for name in (name for name in axes if name in selected):
        names = axes[name].names
        if name not in source_axes or source_axes[name].names != names:
            raise UserError(
                f"init_weights: {path}, a {source.use}, has no weight {name} with the axes of this model's"
            )
        for axis, source_size, size in zip(names, source_shapes[name].shape, shapes[name].shape, strict=True):
            if size < source_size and axis != "vocab":
                raise UserError(
                    f"init_from: {name} is {source_size} along {axis} in {path}, expected at most {size}"
                )


def has_same_deltas(source: ModelConfig, model: ModelConfig, selected: frozenset[str]) -> bool:
    """Whether weights that are stored as differences can be read as such: both models store them so, and the
    weights that they differ from are selected too."""
    deltas = delta_weights(model)
    return deltas == delta_weights(source) and all(
        base in selected for name, base in deltas.items() if name in selected
    )


def delta_weights(model: ModelConfig) -> dict[str, str]:
    """The weights that a family stores as differences, each with the weight that it differs from."""
    return load_family(model).delta_weights(model)


def head_key(model: ModelConfig) -> tuple[int, str]:
    """Number of labels and pooling. Two models with the same can have the same head for labels."""
    return model.labels, "" if model.classifier is None else model.classifier.pooling


def changed_settings(source: ModelConfig, model: ModelConfig) -> list[str]:
    """Describe the model keys whose values differ: with them the same weights compute something else.

    Two families have no keys to compare."""
    if source.use != model.use:
        return []
    keys = sorted(set(reader.own_keys(model)) - {"vocab"})
    return [
        f"model.{key} is {getattr(model, key)} here and {getattr(source, key)} there"
        for key in keys
        if getattr(model, key) != getattr(source, key)
    ]


def read_model_config(path: str, model: ModelConfig | None = None) -> ModelConfig:
    """Read the model of a run folder or a Hugging Face folder.

    The latter is read by the family of its `model_type`, or by that of `model` if it wraps transformers'
    classes itself (models/torch.py)."""
    if files.is_url(path) and not is_run(path):
        raise UserError(
            f"init_from: found no recipe.yaml in {files.redacted(path)}, expected a run folder, or a Hugging "
            "Face folder on this machine"
        )
    if not is_run(path) and (Path(path) / "config.json").is_file():
        settings = read_hf_config(Path(path))
        family = None if model is None else load_family(model)
        if family is not None and family.hf is not None and not family.hf.types:
            section, head = family.hf.from_config(settings), None
        else:
            section, head = open_hf.to_recipe_sections(settings)
        return reader.part_class("models", section.pop("use"))(**section, classifier=head)
    if not files.is_url(path) and quantized_folder.read_quant_config(path) is not None:
        raise UserError(f"init_from: {path} holds a quantized model, expected the run that it was made from")
    return recipe.load_run(path).model


def is_run(path: str) -> bool:
    """Whether a folder or URL is a run folder."""
    return files.exists(files.join(path, "recipe.yaml"))
