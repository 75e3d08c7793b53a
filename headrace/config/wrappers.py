"""Sections that change how a model of any family is built: `lora`, `qat`, `recurrence`, `classifier`.

Each is absent (None) unless the recipe has it. In code they are attributes of the model's config, so that
whoever is given `cfg` has `cfg.layers` and `cfg.lora.rank` alike (docs/decisions/0008)."""

from dataclasses import dataclass, field
from typing import Any, Literal

Pooling = Literal["auto", "first", "last", "mean", "each"]


def at_least(bound: float, cfg: Any, *names: str) -> None:
    """Raise ValueError if one of these numbers is below `bound`. Values that are not numbers are ignored."""
    for name in names:
        value = getattr(cfg, name)
        if isinstance(value, int | float) and value < bound:
            raise ValueError(f"{name}: expected {bound} or more")


@dataclass(frozen=True)
class LoRAKeys:
    """Frozen weights with trainable low-rank adapters (model_wrappers/lora.py)."""

    rank: int = 16  # rank of the adapters
    alpha: float | None = None  # adapters are multiplied by alpha / rank; null: twice the rank
    # weights that get an adapter, e.g. "blocks.w_q,blocks.w_v"; null: all matrices of the layers
    targets: str | None = None
    dora: bool = False  # also trains the norm of each output's weights (DoRA)
    # size of a frozen weight: 4 is QLoRA's NF4; 0: 32 bits, as trained [bits]
    base_bits: Literal[0, 4, 8, 16] = 0

    def __post_init__(self) -> None:
        at_least(1, self, "rank")
        if self.alpha is not None and not self.alpha > 0:
            raise ValueError("alpha: expected a number above 0")


@dataclass(frozen=True)
class QATKeys:
    """Quantization-aware training: the forward pass sees rounded matrices (model_wrappers/qat.py)."""

    bits: Literal[2, 3, 4, 8]  # size that a weight of the layers' matrices is rounded to [bits]
    group_size: int = 0  # inputs of an output that share a scale; 0: all of them
    # rank of trainable matrices that are added to frozen weights (LR-QAT); 0: all weights are trained
    rank: int = 0

    def __post_init__(self) -> None:
        at_least(0, self, "group_size", "rank")
        if self.rank and self.bits == 8:
            raise ValueError("rank: expected 0 with 8 bits, the size in which frozen weights are stored")


@dataclass(frozen=True)
class RecurrenceKeys:
    """Recurrent depth: the layers in the middle run several times (model_wrappers/recurrent_depth.py)."""

    rounds: int  # mean number of times that the layers in the middle run
    prelude: int = 1  # number of layers before those that repeat
    coda: int = 1  # number of layers after those that repeat
    backprop: int = 8  # number of last rounds that gradients flow through

    def __post_init__(self) -> None:
        at_least(1, self, "rounds", "backprop")
        at_least(0, self, "prelude", "coda")


@dataclass(frozen=True)
class ClassifierKeys:
    """A head that predicts labels instead of tokens, for objective `classify`
    (model_wrappers/classification_head.py)."""

    labels: int = 0  # number of labels; 0: as many as the data has
    # states that predict the label: those of the first or last token, their mean, or each token its own
    pooling: Pooling = "auto"

    def __post_init__(self) -> None:
        at_least(0, self, "labels")


def wrapper(cls: type) -> Any:
    """A field that is a section of the recipe by itself, and None if the recipe does not have it."""
    return field(default=None, metadata=dict(section=cls, wrapper=True))


@dataclass(frozen=True, kw_only=True)
class ModelWrappers:
    """Attributes that every model's config has besides the keys of its family; no keys of `model`."""

    lora: LoRAKeys | None = wrapper(LoRAKeys)
    qat: QATKeys | None = wrapper(QATKeys)
    recurrence: RecurrenceKeys | None = wrapper(RecurrenceKeys)
    classifier: ClassifierKeys | None = wrapper(ClassifierKeys)
    # Keep a frozen copy of the initial weights for objective `dpo`: `objective.reference: copy`.
    frozen_copy: bool = field(default=False, metadata=dict(wrapper=True))

    @property
    def labels(self) -> int:
        """Size of the axis `labels`; 0 if the model predicts tokens."""
        return 0 if self.classifier is None else self.classifier.labels
