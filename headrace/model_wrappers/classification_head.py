"""A head that tells the label of a text, or of each of its words, in the place of the one that tells tokens.
For any family; where transformers has such a head for it, the family's file says how (`CLASSES`)."""

import dataclasses
import fnmatch
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from headrace.nn import sharding as mesh
from headrace.data.memory_map import open_folder
from headrace.errors import UserError
from headrace.nn.stack import Execution
from headrace.model_formats import hf_config as config_json
from headrace.nn.bias import biased
from headrace.nn.module import Array, module, weight, zeros
from headrace.nn.linear import project

FILE = "labels.json"  # the names of labels, in a run folder
OWN = ("w_pool", "b_pool", "w_classes", "b_classes")  # the weights of such a head
WORDS = "each"  # the pooling where every word has a label


@dataclass(frozen=True)
class Head:
    """One of transformers' classes. `table` has its tensors by our names; a head that has `w_pool` takes the
    pooled state through it. `pooled` are the ways to pool it has, by our names, in its words."""

    architecture: str
    table: dict[str, tuple[str, str]]
    pooled: dict[str, str]


@dataclass(frozen=True)
class Layout:
    """How a family is with a head for labels. `drops` are weights that tell tokens and nothing else.
    `keeps_head` says that the states go through the model's own `head` first. `setting` is what config.json
    calls the pooling."""

    texts: Head
    words: Head
    drops: tuple[str, ...] = ()
    keeps_head: bool = False
    setting: str | None = None

    def head(self, cfg: Any) -> Head:
        return self.words if pooling_of(cfg) == WORDS else self.texts


def refuse(cfg: Any, otherwise: str) -> None:
    """For what takes models that continue text: whatever a classifier would say there is nonsense."""
    if cfg.objective.use == "classify":
        raise UserError(
            f"objective.use: {cfg.run} was trained by classify, so that it tells labels and cannot continue "
            f"text; {otherwise}"
        )


def dense(name: str, theirs: str, bias: bool = True) -> dict[str, tuple[str, str]]:
    """The tensors of a linear layer: `classes` or `pool`."""
    pattern = "c d -> d c" if name == "classes" else "e d -> d e"
    found = {f"w_{name}": (f"{theirs}.weight", pattern)}
    return found | ({f"b_{name}": (f"{theirs}.bias", "c -> c")} if bias else {})


def generic(name: str = "*") -> Layout:
    """What most decoders have: a score of the last token, or of each. The star stands for what the class that
    tells tokens is called."""
    texts = Head(f"{name}ForSequenceClassification", dense("classes", "score", bias=False), {"last": ""})
    words = Head(f"{name}ForTokenClassification", dense("classes", "score"), {WORDS: ""})
    return Layout(texts, words, drops=("head", "w_head", "head_norm", "head_bias"))


def has_labels(cfg: Any) -> bool:
    return getattr(cfg, "labels", 0) > 0


def pooling_of(cfg: Any) -> str:
    """An encoder sees the whole text from its first token, a decoder from its last."""
    usual = "last" if cfg.causal else "first"
    return usual if cfg.pooling == "auto" else cfg.pooling


def layout_of(found: Any) -> Layout:
    """A family's, or one of our own for a family that transformers has no such class of."""
    return getattr(found, "CLASSES", None) or generic()


@functools.cache
def family(found: Any) -> Any:
    """A model file whose model tells labels."""
    layout = layout_of(found)

    def table(cfg: Any) -> dict[str, tuple[str, str]]:
        whole = found.HF(cfg) if callable(found.HF) else found.HF
        return {name: its for name, its in whole.items() if name not in layout.drops} | layout.head(cfg).table

    def to_hf(cfg: Any, sequence: int) -> dict[str, Any]:
        head = layout.head(cfg)
        if not getattr(found, "CLASSES", None):
            raise UserError(f"transformers has no class that tells labels with a {cfg.use}")
        said = head.pooled.get(pooling_of(cfg))
        if said is None:
            known = ", ".join(head.pooled)
            raise UserError(
                f"model.pooling: transformers has no {pooling_of(cfg)} for {cfg.use}, but {known}"
            )
        word = {layout.setting: said} if layout.setting and said else {}
        settings = found.to_hf(cfg, sequence)
        kind = settings["architectures"][0].removesuffix("ForCausalLM")
        return settings | {"architectures": [head.architecture.replace("*", kind)]} | word

    changed = dict(Model=labelled(found.Model, layout), HF=table, to_hf=to_hf)
    return SimpleNamespace(**vars(found) | changed)


def labelled(plain: Any, layout: Layout) -> Any:
    """A family's model without what tells tokens, and with what tells labels."""
    fields = {field.name: field.metadata for field in dataclasses.fields(plain) if field.name in layout.drops}
    gone = {
        name: dataclasses.field(metadata={**its, "when": lambda cfg: False}) for name, its in fields.items()
    }
    body: Any = module(type("Body", (plain,), {"__annotations__": dict.fromkeys(gone, Any), **gone}))
    has = lambda name: lambda cfg: name in layout.head(cfg).table

    @module
    class Labelled(body):
        w_pool: Array | None = weight("embed", "pool:embed", when=has("w_pool"))
        b_pool: Array | None = weight("embed", init=zeros, inputs=0, when=has("b_pool"))
        w_classes: Array = weight("embed", "labels")
        b_classes: Array | None = weight("labels", init=zeros, inputs=0, when=has("b_classes"))

        def tell(
            self, cfg: Any, tokens: Array, *, how: Execution, segments: Array, positions: Array
        ) -> Array:
            """The logits of the labels [b s c], of a text at its first token."""
            seen = [mesh.balance(rows) for rows in (tokens, segments, positions)]
            states: Any = getattr(self, "states", self)
            x = mesh.restore(states(cfg, seen[0], how=how, segments=seen[1], positions=seen[2]))
            h = pooled(pooling_of(cfg), x, segments, positions)
            if layout.keeps_head:
                h = self.head(cfg, h)[..., : cfg.embed]
            if self.w_pool is not None:
                h = biased(project(self.w_pool, h, "bsd,de->bse"), self.b_pool)
                h = jax.nn.gelu(h, approximate=False)
            logits = project(self.w_classes, h, "bsd,dc->bsc").astype(jnp.float32)
            return logits if self.b_classes is None else biased(logits, self.b_classes)

    return Labelled


def pooled(pooling: str, x: Array, segments: Array, positions: Array) -> Array:
    """States [b s d] of which those at the first tokens of documents are the documents'."""
    if pooling in ("first", WORDS):
        return x
    length = x.shape[1]
    if pooling == "last":
        begins = jnp.concatenate([positions[:, 1:] == 0, jnp.ones_like(positions[:, :1], bool)], axis=1)
        ends = jnp.where(begins, jnp.arange(length), length)
        last = jax.lax.cummin(ends, axis=1, reverse=True)
        return jnp.take_along_axis(x, last[..., None], axis=1)
    assert pooling == "mean", pooling
    total = jax.vmap(lambda x, own: jax.ops.segment_sum(x, own, length + 1))
    sums = total(x.astype(jnp.float32), segments)
    sizes = total(jnp.ones((*segments.shape, 1), jnp.float32), segments)
    mean = (sums / jnp.maximum(sizes, 1.0)).astype(x.dtype)
    return jnp.take_along_axis(mean, segments[..., None], axis=1)


def resolved(cfg: Any, labels: int, kind: str) -> Any:
    """A model section with what the data says: how many labels there are, and whether words have them."""
    if cfg.labels not in (0, labels):
        raise UserError(f"model.labels: found {cfg.labels}, and the data has {labels}; leave it out")
    pooling = WORDS if cfg.pooling == "auto" and kind == "tokens" else pooling_of(cfg)
    if (pooling == WORDS) != (kind == "tokens"):
        what = "each word" if kind == "tokens" else "a whole text"
        raise UserError(
            f"model.pooling: found {pooling}, and labels of this data are of {what}; leave it out"
        )
    return dataclasses.replace(cfg, labels=labels, pooling=pooling)


def keep_names(folder: Path, names: Sequence[str]) -> None:
    """Beside the weights, by the number of each."""
    (folder / FILE).write_text(json.dumps(list(names), ensure_ascii=False, indent=2) + "\n")


def names_of(run: str, labels: int) -> list[str]:
    """Of the labels of a run, or as transformers calls labels without a name."""
    try:
        names = json.loads(bytes(open_folder(run).read(FILE)))
    except (FileNotFoundError, NotADirectoryError):
        names = []
    return [str(name) for name in names] if len(names) == labels else [f"LABEL_{n}" for n in range(labels)]


def named(names: Sequence[str]) -> dict[str, Any]:
    """What config.json says of them."""
    numbers = {name: number for number, name in enumerate(names)}
    return {"id2label": {str(number): name for name, number in numbers.items()}, "label2id": numbers}


def names_in(settings: dict[str, Any]) -> list[str]:
    """What a config.json calls its labels."""
    found = settings.get("id2label")
    found = found if isinstance(found, dict) else {}
    return [str(found.get(str(number), found.get(number))) for number in range(len(found))]


def section(found: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """The keys of a model section that tell of a head for labels, for a config.json."""
    layout, named = layout_of(found), settings.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    for head in (layout.texts, layout.words):
        if fnmatch.fnmatchcase(name, head.architecture):
            names = settings.get("id2label")
            count = len(names) if isinstance(names, dict) else config_json.whole(settings, "num_labels", 2)
            said = settings.get(layout.setting or "", next(iter(head.pooled.values())))
            ours = [our for our, theirs in head.pooled.items() if theirs in ("", said)]
            if not ours:
                known = ", ".join(head.pooled.values())
                raise UserError(f"config.json: {layout.setting}: found {said!r}, expected one of {known}")
            return {"labels": count, "pooling": ours[0]}
    return {}
