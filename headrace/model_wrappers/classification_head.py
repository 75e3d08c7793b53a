"""A head that predicts the label of a text, or of each of its tokens, in place of the one for tokens.

It works for any family. `HF_CLASSIFIER` in a family's file says which classes of transformers have such a
head for it (model_formats/hf_heads.py)."""

import dataclasses
import fnmatch
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp

from headrace.config.sections import TrainRecipe
from headrace.config.wrappers import ClassifierKeys, Pooling
from headrace.data.memory_map import open_folder
from headrace.errors import UserError
from headrace.model_formats import hf_config
from headrace.model_formats.hf_config import HFSettings
from headrace.model_formats.hf_heads import EACH_TOKEN, HeadLayout, default_layout
from headrace.model_formats.hf_tensors import TensorTable
from headrace.models import Family, HFNaming, ModelConfig
from headrace.nn import sharding
from headrace.nn.bias import add_bias
from headrace.nn.linear import project
from headrace.nn.module import Array, module, weight, zeros
from headrace.nn.stack import Execution

LABELS_FILE = "labels.json"  # the names of labels, in a run folder
HEAD_WEIGHTS = ("w_pool", "b_pool", "w_classes", "b_classes")


def has_labels(cfg: ModelConfig) -> bool:
    """Whether the model predicts labels."""
    return cfg.labels > 0


def refuse_classifier(recipe: TrainRecipe, hint: str) -> None:
    """Raise UserError with a hint if the recipe's model predicts labels, since it cannot continue text."""
    if recipe.objective.use == "classify":
        raise UserError(
            f"objective.use: {recipe.run_dir} was trained by classify: it predicts labels and cannot "
            f"continue text; {hint}"
        )


def pooling_of(cfg: ModelConfig) -> str:
    """The pooling with `auto` resolved: a decoder sees the whole text from its last token, an encoder from
    its first."""
    default = "last" if cfg.causal else "first"
    pooling = "auto" if cfg.classifier is None else cfg.classifier.pooling
    return default if pooling == "auto" else pooling


def layout_of(family: Family) -> HeadLayout:
    """The layout of the family's head, or the default for a family that transformers has none for."""
    return family.classifier or default_layout()


@functools.cache
def wrap(family: Family) -> Family:
    """The family with a head for labels."""
    layout = layout_of(family)
    hf = None if family.hf is None else _hf_naming(family, family.hf, layout)
    return dataclasses.replace(family, Model=make_classifier(family.Model, layout), hf=hf)


def _hf_naming(family: Family, plain: HFNaming, layout: HeadLayout) -> HFNaming:
    def tensors(cfg: ModelConfig) -> TensorTable:
        table = {name: entry for name, entry in plain.tensors(cfg).items() if name not in layout.drops}
        return table | layout.head(pooling_of(cfg)).table

    def to_config(cfg: ModelConfig, sequence_length: int) -> HFSettings:
        if family.classifier is None:
            raise UserError(f"transformers has no class that predicts labels with a {cfg.use}")
        head = layout.head(pooling_of(cfg))
        hf_pooling = head.pooling.get(pooling_of(cfg))
        if hf_pooling is None:
            valid = ", ".join(head.pooling)
            raise UserError(
                f"classifier.pooling: found {pooling_of(cfg)}, which transformers does not have for "
                f"{cfg.use}; expected {valid}"
            )
        settings = plain.to_config(cfg, sequence_length)
        prefix = settings["architectures"][0].removesuffix("ForCausalLM")
        settings |= {"architectures": [head.architecture.replace("*", prefix)]}
        if layout.pooling_key and hf_pooling:
            settings[layout.pooling_key] = hf_pooling
        return settings

    return dataclasses.replace(plain, tensors=tensors, to_config=to_config)


def make_classifier(plain: Any, layout: HeadLayout) -> type[Any]:
    """Derive a model class without the weights that predict tokens, and with a head for labels."""
    headless: Any = _without_fields(plain, layout.drops)
    in_table = lambda name: lambda cfg: name in layout.head(pooling_of(cfg)).table

    @module
    class Classifier(headless):
        w_pool: Array | None = weight("embed", "pool:embed", when=in_table("w_pool"))
        b_pool: Array | None = weight("embed", init=zeros, num_input_axes=0, when=in_table("b_pool"))
        w_classes: Array = weight("embed", "labels")
        b_classes: Array | None = weight("labels", init=zeros, num_input_axes=0, when=in_table("b_classes"))

        def predict_labels(
            self, cfg: ModelConfig, tokens: Array, *, exec_opts: Execution, segments: Array, positions: Array
        ) -> Array:
            """Compute the logits of the labels [b s c]. A text's are those at its first token."""
            x = _hidden_states(self, cfg, tokens, exec_opts, segments, positions)
            h = pool(pooling_of(cfg), x, segments, positions)
            if layout.applies_lm_head:
                h = self.head(cfg, h)[..., : cfg.embed]
            if self.w_pool is not None:
                h = add_bias(project(self.w_pool, h, "bsd,de->bse"), self.b_pool)
                h = jax.nn.gelu(h, approximate=False)
            logits = project(self.w_classes, h, "bsd,dc->bsc").astype(jnp.float32)
            return logits if self.b_classes is None else add_bias(logits, self.b_classes)

    return Classifier


def _without_fields(plain: type[Any], names: Sequence[str]) -> type[Any]:
    """Derive a module class in which these weights are None."""
    fields = {field.name: field.metadata for field in dataclasses.fields(plain) if field.name in names}
    absent = {
        name: dataclasses.field(metadata={**metadata, "when": lambda cfg: False})
        for name, metadata in fields.items()
    }
    return module(type("Body", (plain,), {"__annotations__": dict.fromkeys(absent, Any), **absent}))


def _hidden_states(
    model: Any, cfg: ModelConfig, tokens: Array, exec_opts: Execution, segments: Array, positions: Array
) -> Array:
    """The output of the last layer [b s d], with positions in the order of the text."""
    tokens, segments, positions = (sharding.to_balanced_order(rows) for rows in (tokens, segments, positions))
    return sharding.from_balanced_order(
        body(model)(cfg, tokens, exec_opts=exec_opts, segments=segments, positions=positions)
    )


def body(model: Any) -> Callable[..., Array]:
    """The function that runs a model without the head that some families apply to its output."""
    return model.states if hasattr(model, "states") else model


def pool(pooling: str, x: Array, segments: Array, positions: Array) -> Array:
    """Pool states [b s d]: of the result, the state at each document's first token is the document's."""
    if pooling in ("first", EACH_TOKEN):
        return x
    length = x.shape[1]
    if pooling == "last":
        is_last = jnp.concatenate([positions[:, 1:] == 0, jnp.ones_like(positions[:, :1], bool)], axis=1)
        last_positions = jnp.where(is_last, jnp.arange(length), length)
        last = jax.lax.cummin(last_positions, axis=1, reverse=True)
        return jnp.take_along_axis(x, last[..., None], axis=1)
    assert pooling == "mean", pooling
    sum_by_document = jax.vmap(lambda x, ids: jax.ops.segment_sum(x, ids, length + 1))
    sums = sum_by_document(x.astype(jnp.float32), segments)
    sizes = sum_by_document(jnp.ones((*segments.shape, 1), jnp.float32), segments)
    mean = (sums / jnp.maximum(sizes, 1.0)).astype(x.dtype)
    return jnp.take_along_axis(mean, segments[..., None], axis=1)


def with_label_count(cfg: ModelConfig, labels: int, kind: str) -> ModelConfig:
    """Set the number of labels and the pooling from the data; `kind` says whether it labels texts or tokens.

    Raises UserError if the config has other ones."""
    if cfg.labels not in (0, labels):
        raise UserError(f"classifier.labels: found {cfg.labels}, and the data has {labels}; omit the key")
    is_auto = cfg.classifier is None or cfg.classifier.pooling == "auto"
    pooling = EACH_TOKEN if is_auto and kind == "tokens" else pooling_of(cfg)
    if (pooling == EACH_TOKEN) != (kind == "tokens"):
        labeled = "each token" if kind == "tokens" else "a text"
        raise UserError(
            f"classifier.pooling: found {pooling}, and this data has labels for {labeled}; omit the key"
        )
    return dataclasses.replace(cfg, classifier=ClassifierKeys(labels, cast(Pooling, pooling)))


def write_label_names(folder: Path, names: Sequence[str]) -> None:
    """Write the names of labels, in the order of their numbers, to a run folder."""
    (folder / LABELS_FILE).write_text(json.dumps(list(names), ensure_ascii=False, indent=2) + "\n")


def read_label_names(run_dir: str, labels: int) -> list[str]:
    """Read the names of a run's labels. Labels without names are called LABEL_0 etc., as in transformers."""
    try:
        names = json.loads(bytes(open_folder(run_dir).read(LABELS_FILE)))
    except (FileNotFoundError, NotADirectoryError):
        names = []
    return [str(name) for name in names] if len(names) == labels else [f"LABEL_{n}" for n in range(labels)]


def to_hf_labels(names: Sequence[str]) -> HFSettings:
    """The settings of config.json for labels of these names."""
    numbers = {name: number for number, name in enumerate(names)}
    return {"id2label": {str(number): name for name, number in numbers.items()}, "label2id": numbers}


def from_hf_labels(settings: HFSettings) -> list[str]:
    """The names of labels in a config.json."""
    names = settings.get("id2label")
    names = names if isinstance(names, dict) else {}
    return [str(names.get(str(number), names.get(number))) for number in range(len(names))]


def section_from_hf_config(family: Family, settings: HFSettings) -> ClassifierKeys | None:
    """The `classifier` section for the head of a config.json; None if it predicts tokens."""
    layout, architectures = layout_of(family), settings.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    for head in (layout.texts, layout.tokens):
        if fnmatch.fnmatchcase(name, head.architecture):
            names = settings.get("id2label")
            count = len(names) if isinstance(names, dict) else hf_config.get_int(settings, "num_labels", 2)
            hf_pooling = settings.get(layout.pooling_key or "", next(iter(head.pooling.values())))
            matching = [pooling for pooling, hf_name in head.pooling.items() if hf_name in ("", hf_pooling)]
            if not matching:
                valid = ", ".join(head.pooling.values())
                raise UserError(
                    f"config.json: {layout.pooling_key}: found {hf_pooling!r}, expected one of {valid}"
                )
            return ClassifierKeys(count, cast(Pooling, matching[0]))
    return None
