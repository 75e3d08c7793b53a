"""Memory of one device by arithmetic: the state to the byte, activations and gradients from shapes."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from headrace.checkpoint import state
from headrace.config import sections
from headrace.config.sections import TrainRecipe
from headrace.hardware.slices import SliceShape
from headrace.model_wrappers import load_family
from headrace.models import ModelConfig
from headrace.nn import module, sharding
from headrace.nn.experts import SLACK
from headrace.objectives import load_objective
from headrace.optim import OptimizerConfig
from headrace.plan.activations import (
    ActivationUnits,
    LayerSpec,
    ModelSizes,
    WeightNames,
    count_hidden_units,
    has_experts,
)
from headrace.plan.attention_cost import lacks_distance_kernel
from headrace.training import loss_spikes, memory_check, setup

# Bytes through memory per logit, in addition to its matmuls: of the 88 ms of Llama 3.2 1B's head on an H200
# 71 are matmuls, and the rest is that of 17 bytes at the speed of memory: float32 written, read twice, and a
# gradient.
BYTES_PER_LOGIT = 16
# Arrays of a layer's scores at the peak of the layer that is being computed, where no kernel computes them on
# the chip, and saved per layer without remat where layers are unrolled (one in a loop): by 34 and 53 GiB of
# DeBERTa's step on an H200, and 4.8 of four layers on v5e-8 with remat dots (libtpu 0.0.51).
SCORE_ARRAYS = 5
# Longest rows whose scores attention with distances computes at once (attention/_disentangled.py).
MAX_WHOLE_ROW = 1024
# Layers whose activations are on their way to or from the host, by libtpu (docs/performance/activations.md).
LAYERS_IN_FLIGHT = 1
# Lanes of a TPU's registers, to which the last axis of an array is padded: saved heads of 64 take twice their
# bytes (Llama 3.2 1B on v5e-8, libtpu 0.0.51: all arrays of the stack by its buffers, 4,864 MiB).
LANES = 128


@dataclass(frozen=True)
class StateBytes:
    """Bytes of the train state on one device."""

    weights: int
    optimizer: int  # including averaged weights
    frozen: int  # part of the weights that has no gradient
    parameters: int  # number of parameters of the whole model


def count_state_bytes(recipe: TrainRecipe, sizes: dict[str, int]) -> StateBytes:
    """Count the bytes of the train state on each device of a mesh of these sizes."""
    frozen = WeightNames.of_model(recipe.model, recipe.freeze).frozen
    return _count_state_bytes(
        recipe.model, recipe.optimizer, tuple(sizes[axis] for axis in sharding.AXES), frozen
    )


@lru_cache(4096)
def _count_state_bytes(
    model: ModelConfig, optimizer: OptimizerConfig, sizes: tuple[int, ...], frozen: frozenset[str]
) -> StateBytes:
    """Count from shapes and shardings, on an abstract mesh without devices."""
    axes = module.axes(load_family(model).Model, model)
    mesh: Any = AbstractMesh(sizes, sharding.AXES, axis_types=(AxisType.Auto,) * len(sharding.AXES))
    abstract = _make_abstract_state(model, optimizer, frozen)
    sharded = jax.tree.map(
        lambda leaf, leaf_sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf_sharding),
        abstract,
        state.state_shardings(abstract, axes, mesh),
    )
    frozen_leaves = {name: leaf for name, leaf in module.named_leaves(sharded.params) if name in frozen}
    return StateBytes(
        weights=memory_check.bytes_per_device(sharded.params),
        optimizer=memory_check.bytes_per_device((sharded.optimizer, sharded.ema)),
        frozen=memory_check.bytes_per_device(frozen_leaves),
        parameters=sum(leaf.size for leaf in jax.tree.leaves(abstract.params)),
    )


@lru_cache(64)
def _make_abstract_state(
    model: ModelConfig, optimizer: OptimizerConfig, frozen: frozenset[str]
) -> state.State:
    """Make a train state of shapes without arrays."""
    family = load_family(model)
    tx = setup.make_optimizer(optimizer, module.axes(family.Model, model), frozen)

    def init_state() -> state.State:
        params = module.init(family.Model, model, jax.random.key(0))
        history = loss_spikes.empty_history(2)
        return state.init_state(params, tx, seed=0, ema=optimizer.ema_decay > 0, history=history)

    return jax.eval_shape(init_state)


def min_state_bytes(recipe: TrainRecipe, slice_shape: SliceShape) -> int:
    """Count the bytes per device of state and gradients, split over all devices.

    No setting but another optimizer or slice can reduce them."""
    total = count_state_bytes(recipe, dict.fromkeys(sharding.AXES, 1))
    return math.ceil((2 * total.weights - total.frozen + total.optimizer) / slice_shape.devices)


@dataclass(frozen=True)
class DeviceShare:
    """The share of a batch and of the model that one device has."""

    tokens: int  # of a microbatch
    tensor: int
    fsdp: int
    expert: int
    looped: bool  # layers are iterations of a loop, not unrolled
    lanes: int  # heads of the output of attention are padded to a multiple of this
    stores_scores: bool  # all scores of a row are in memory at once
    layer: LayerSpec

    @classmethod
    def from_recipe(
        cls, recipe: TrainRecipe, slice_shape: SliceShape, sizes: dict[str, int]
    ) -> "DeviceShare":
        """Divide a recipe's microbatch and model over a mesh of these sizes."""
        rows = recipe.batch.sequences // recipe.batch.microbatches
        rows //= math.prod(sizes[axis] for axis in sections.SPLIT_ROWS)
        is_tpu, unroll = slice_shape.chip.is_tpu, recipe.compute.unroll
        if not isinstance(unroll, int):
            unroll = 1 if is_tpu else 32
        return cls(
            tokens=rows * recipe.data.sequence_length // sizes["context"],
            tensor=sizes["tensor"],
            fsdp=sizes["fsdp"],
            expert=sizes["expert"],
            looped=unroll < recipe.model.layers,
            lanes=LANES if is_tpu else 1,
            stores_scores=recipe.attention.use == "xla"
            or (lacks_distance_kernel(recipe, slice_shape) and recipe.data.sequence_length <= MAX_WHOLE_ROW),
            layer=LayerSpec.from_recipe(recipe),
        )

    def temp_bytes(self, recipe: TrainRecipe, state_bytes: StateBytes) -> int:
        """Count all bytes but the state at the peak: either at the head, or in the layers with all gradients.

        With several microbatches, sums of gradients are added."""
        cast_weights = state_bytes.weights // 2 if recipe.compute.dtype == "bfloat16" else 0
        gradients = state_bytes.weights - state_bytes.frozen
        sums = gradients if recipe.batch.microbatches > 1 else 0
        layers = gradients + self.working_bytes(recipe) + self.gathered_bytes(recipe)
        return self.saved_bytes(recipe) + cast_weights + sums + max(self.head_bytes(recipe), layers)

    def saved_bytes(self, recipe: TrainRecipe) -> int:
        """Count what all layers save for the backward pass: their inputs and whatever `compute.remat`
        allows."""
        layers = recipe.model.layers
        in_flight = self.offloaded_bytes(recipe) * min(LAYERS_IN_FLIGHT, layers) // layers
        scores = 0
        if recipe.compute.remat == "none":
            scores = (1 if self.looped else SCORE_ARRAYS) * self.score_bytes(recipe)
        return (self.layer_saved_bytes(recipe) + scores) * layers + in_flight

    def layer_saved_bytes(self, recipe: TrainRecipe) -> int:
        units = ActivationUnits(width=1) + self.layer.saved_units(recipe.compute.remat, looped=self.looped)
        return self.unit_bytes(recipe, units, self.lanes)

    def offloaded_bytes(self, recipe: TrainRecipe) -> int:
        """Count what is saved for the backward pass in the host's memory."""
        if recipe.compute.remat != "offload":
            return 0
        units = self.layer.saved_units("dots", looped=self.looped)
        return self.unit_bytes(recipe, units) * recipe.model.layers

    def traffic_bytes(self, recipe: TrainRecipe, elementwise: float) -> float:
        """Count the bytes that elementwise operations move through memory for one microbatch.

        A share `elementwise` of their inputs and outputs does. A loop also writes what it saves to a stack
        and reads it from there."""
        layer = self.unit_bytes(recipe, self.layer.traffic_units(recipe.compute.remat))
        layer += 2 * self.layer_saved_bytes(recipe) if self.looped else 0
        logits = predicted_share(recipe) * self.tokens * recipe.model.vocab
        return elementwise * layer * recipe.model.layers + BYTES_PER_LOGIT * logits

    def working_bytes(self, recipe: TrainRecipe) -> int:
        """Count the temporaries of the layer that is being computed.

        With experts also the rows of each, and the tokens of all devices that share them, with their sums in
        float32."""
        model, itemsize = recipe.model, self.layer.itemsize
        rows = SLACK * (model.top_k if has_experts(model) else 0) * (2 * itemsize + 4)
        shared = 2 * (itemsize + 4) * self.expert if self.expert > 1 else 0
        routed = int(self.tokens * model.embed * (rows + shared))
        working = self.unit_bytes(recipe, self.layer.working_units())
        return working + SCORE_ARRAYS * self.score_bytes(recipe) + routed

    def score_bytes(self, recipe: TrainRecipe) -> int:
        """Count the bytes of one layer's scores, where those of a row are computed at once."""
        scores_per_token = recipe.model.heads * recipe.data.sequence_length // self.tensor
        return self.layer.itemsize * self.tokens * scores_per_token if self.stores_scores else 0

    def unit_bytes(self, recipe: TrainRecipe, units: ActivationUnits, lanes: int = 1) -> int:
        """Convert units per token to bytes of all tokens."""
        return int(self.layer.itemsize * self.tokens * units.count(recipe.model, self.tensor, lanes))

    def head_bytes(self, recipe: TrainRecipe) -> int:
        """Count the temporaries of the head and the loss.

        By tokens: logits of a chunk, and twice the gradient of the vocabulary's matrix. By vocabulary, where
        that matrix is split: logits, their gradient, and that of the hidden states in float32."""
        vocab = recipe.model.vocab // self.tensor
        if self.fsdp * self.expert > 1:
            return 2 * 2**26 + 4 * self.tokens * recipe.model.embed
        return min(2**30, 4 * vocab * self.tokens) + 2 * 4 * vocab * recipe.model.embed

    def gathered_bytes(self, recipe: TrainRecipe) -> int:
        """Count the bytes of two layers' gathered weights; of experts only those of one device."""
        experts = count_expert_weights(recipe.model) // recipe.model.layers
        return 2 * 2 * (count_layer_weights(recipe.model) + experts // self.expert) // self.tensor


def count_expert_weights(model: ModelSizes) -> int:
    """Count the weights of all experts, without those that every token uses."""
    if not has_experts(model):
        return 0
    return model.routed_layers * model.experts * 3 * model.embed * model.expert_mlp


def count_layer_weights(model: ModelSizes, up_matrices: int = 2) -> int:
    """Count the weights of a layer's matrices that process one token."""
    attention = 2 * (model.heads + model.kv_heads) * model.head_dim
    return model.embed * (attention + (up_matrices + 1) * count_hidden_units(model))


def predicted_share(recipe: TrainRecipe) -> float:
    """Return the share of tokens that the head predicts."""
    length = recipe.data.sequence_length
    return load_objective(recipe.objective).max_targets(recipe.objective, length) / length
