"""Bytes of activations by arithmetic: arrays that a layer saves for its backward pass or moves through
memory.

tests/nn/test_activations.py compares the counts with the arrays that `jax.vjp` saves."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeGuard

from headrace.config.sections import TrainRecipe
from headrace.model_wrappers import load_family
from headrace.models import ModelConfig
from headrace.nn import module
from headrace.training import setup
from headrace.training.task import matmul_format

# Bits in which some activations store their derivative (nn/activations.py).
DERIVATIVE_BITS = {"gelu_bits": 2, "silu_bits": 2, "relu_bits": 1}
# Bytes in which an 8-bit matmul saves its input for the gradient of the weight (low_precision/fp8.py and the
# modules next to it). None: in the compute dtype.
SAVED_INPUT_BYTES = {"compute": None, "fp8": 1, "ternary": 1, "int8": None}


class ModelSizes(Protocol):
    """Sizes that plans read from the config of any model family."""

    use: str
    vocab: int
    layers: int
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    causal: bool

    def __hash__(self) -> int: ...


class ExpertSizes(ModelSizes, Protocol):
    """Sizes of models with experts."""

    experts: int
    top_k: int
    expert_mlp: int
    shared_mlp: int  # hidden units of the experts that every token uses
    routed_layers: int


@dataclass(frozen=True)
class ActivationUnits:
    """Numbers per token and layer, as multiples of the layer's sizes: its width, the hidden units of its MLP,
    queries, keys and values together, and the output of attention."""

    width: float = 0.0
    hidden: float = 0.0
    qkv: float = 0.0
    attention_out: float = 0.0

    def __add__(self, other: "ActivationUnits") -> "ActivationUnits":
        return ActivationUnits(
            self.width + other.width,
            self.hidden + other.hidden,
            self.qkv + other.qkv,
            self.attention_out + other.attention_out,
        )

    def __mul__(self, factor: float) -> "ActivationUnits":
        return ActivationUnits(
            self.width * factor, self.hidden * factor, self.qkv * factor, self.attention_out * factor
        )

    def count(self, model: ModelSizes, tensor: int, lanes: int = 1) -> float:
        """Count the numbers on one of `tensor` devices that share a layer.

        Each head of the output of attention is padded to a multiple of `lanes`; narrow queries, keys and
        values are not (attention/splash.py)."""
        padded_head = -(-model.head_dim // lanes) * lanes
        attention = self.qkv * (model.heads + 2 * model.kv_heads) * model.head_dim
        attention += self.attention_out * model.heads * padded_head
        return self.width * model.embed + (self.hidden * count_hidden_units(model) + attention) / tensor


@dataclass(frozen=True)
class WeightNames:
    """Properties of a model that follow from the names of its weights."""

    frozen: frozenset[str]  # weights that are never updated
    has_gate: bool  # two matrices lead to the hidden units
    is_down_frozen: bool  # w_down is not trained

    @classmethod
    @lru_cache(64)
    def of_model(cls, model: ModelConfig, freeze: str | None) -> "WeightNames":
        """Read them from the axes of a model of which the recipe freezes some weights. A search does this for
        thousands of settings of the same model."""
        axes = module.axes(load_family(model).Model, model)
        frozen = setup.frozen_names(freeze, axes)
        fields_of = {name: name.split(".") for name, _ in module.named_leaves(axes)}
        return cls(
            frozen=frozen,
            has_gate=any("w_gate" in fields for fields in fields_of.values()),
            is_down_frozen=all(name in frozen for name, fields in fields_of.items() if "w_down" in fields),
        )


@dataclass(frozen=True)
class LayerSpec:
    """Properties of a recipe's layers, other than sizes, that decide what they save and move."""

    itemsize: int  # bytes per number in the compute dtype
    matmul: str
    activation: str
    up_matrices: int  # matrices that lead to the hidden units: two with a gate
    is_down_frozen: bool  # w_down is not trained

    @classmethod
    def from_recipe(cls, recipe: TrainRecipe) -> "LayerSpec":
        """Read the properties from a recipe and from the axes of its model's weights."""
        weights = WeightNames.of_model(recipe.model, recipe.freeze)
        return cls(
            itemsize=2 if recipe.compute.dtype == "bfloat16" else 4,
            matmul=matmul_format(recipe),
            activation=recipe.model.activation if hasattr(recipe.model, "activation") else "",
            up_matrices=2 if weights.has_gate else 1,
            is_down_frozen=weights.is_down_frozen,
        )

    def saved_units(self, remat: str, *, looped: bool) -> ActivationUnits:
        """Count the numbers saved for the backward pass, in addition to the layer's input.

        `attention` saves the output of its kernel; `dots` the outputs of all matmuls but the last, which is
        the next layer's input; `none` the outputs of norms as well. In a loop the output of attention is
        saved twice: as the kernel has it, and transposed as w_o reads it. XLA does not see that they are
        equal."""
        if remat == "attention":
            return ActivationUnits(attention_out=1)
        if remat == "dots":
            return ActivationUnits(width=1, hidden=self.up_matrices, qkv=1)
        if remat != "none":
            return ActivationUnits()
        # Width: the residual stream in the middle of the layer, and the outputs of two norms.
        hidden = self.saved_mlp_units()
        if (input_bytes := SAVED_INPUT_BYTES[self.matmul]) is None:
            return ActivationUnits(3, hidden, qkv=1, attention_out=2 if looped else 1)
        narrow = input_bytes / self.itemsize  # the output of attention is saved in both dtypes
        return ActivationUnits(1 + 2 * narrow, hidden, qkv=1, attention_out=1 + narrow)

    def saved_mlp_units(self) -> float:
        """Count the numbers saved per hidden unit without remat (nn/mlp.py).

        With a gate: the outputs of both matmuls, from which the hidden unit is recomputed; 8-bit matmuls also
        save the input of w_down. Without: what the activation saves and, if w_down is trained, its input."""
        derivative = DERIVATIVE_BITS.get(self.activation, 0) / (8 * self.itemsize)
        if self.matmul == "compute":
            if self.up_matrices == 2:
                return 2.0
            return derivative + (0 if self.is_down_frozen else 1) if derivative else 1.0
        input_bytes = SAVED_INPUT_BYTES[self.matmul]
        down_input = 1.0 if input_bytes is None else input_bytes / self.itemsize
        if self.up_matrices == 2:
            return 2 + down_input
        if derivative:
            return derivative + down_input
        if self.activation in ("gelu", "silu"):
            return 3 + down_input  # not recomputed there: JAX also saves the intermediate results
        return 1 + (0 if input_bytes is None else down_input)

    def working_units(self) -> ActivationUnits:
        """Count the numbers of the layer that is being computed, at its peak."""
        return ActivationUnits(width=5, hidden=self.up_matrices + 1, qkv=3)

    def traffic_units(self, remat: str) -> ActivationUnits:
        """Count the numbers that elementwise operations read and write.

        Forward: two norms, each with the addition before it, and RoPE read and write; the activation reads
        the outputs of matmuls and writes the input of the next. Backward: each also reads a gradient.
        Recomputation repeats the forward part. 8-bit matmuls read what they round twice (for its maximum, and
        to round it) and write one byte: three inputs and two gradients of the width, the hidden units and the
        gradients of the matrices that lead to them, and the heads."""
        forward = ActivationUnits(width=9, hidden=self.up_matrices + 1, qkv=2)
        backward = ActivationUnits(width=11, hidden=2 * self.up_matrices + 2, qkv=2)
        total = forward + backward + (forward if remat != "none" else ActivationUnits())
        if self.matmul != "compute":
            rounded = ActivationUnits(width=5, hidden=1 + self.up_matrices, qkv=1)
            total += rounded * (2 + 1 / self.itemsize)
        return total


def has_experts(model: ModelSizes) -> TypeGuard[ExpertSizes]:
    return hasattr(model, "experts") and bool(model.experts)


def count_hidden_units(model: ModelSizes) -> int:
    """Count the hidden units of a layer that process one token: with experts only those it is routed to."""
    return model.top_k * model.expert_mlp + model.shared_mlp if has_experts(model) else model.mlp
