"""What a step takes by arithmetic alone, in a second and for any chip: the state to the byte, activations and
time from shapes. It says what cannot work and which settings are worth the compiler's time; for TPUs the
compiler then has the last word."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from millrace import build, fit, mesh, module, objective, sections, state
from millrace.execution import products_of
from millrace.layers.experts import SLACK
from millrace.objective import file
from millrace.plan.slices import Slice
from millrace.plan.timing import HOST

# Shares of the data sheets' rates that large products and copies reach, the same for every model and chip:
# docs/planning.md shows what it leaves to wish for.
MATRIX, MEMORY, LINKS = 0.75, 0.85, 0.8
HIDDEN = 0.9  # of the traffic between chips, at most, goes on beside the products

# Numbers kept of each token and layer, in units of the width d, the MLP's m and the heads' q and k: beside
# the layer's input, `attention` keeps what its kernel gives, `dots` what matrices give, `none` also what
# norms and activations make of it. What `offload` keeps is in the host's memory.
KEPT = {
    "full": (0.0, 0.0, 0.0),
    "attention": (1.0, 0.0, 0.0),
    "offload": (0.0, 0.0, 0.0),
    "dots": (2.0, 2.0, 1.0),
    "none": (5.0, 3.0, 3.0),
}
OFFLOADED = {"offload": KEPT["dots"]}
# Layers whose share is on its way to or from the host, by libtpu (docs/performance/activations.md).
IN_FLIGHT = 4


# How many of the three products of a matrix are in 8 bits (products/fp8.py, int8.py, ternary.py).
NARROW = {"compute": 0, "fp8": 3, "int8": 2, "ternary": 1}


@dataclass(frozen=True)
class Estimate:
    """Of one device, bytes, and of a step, seconds."""

    parameters: int
    flops_per_token: float
    mesh: dict[str, int]
    weight_bytes: int
    frozen_bytes: int  # of the weights, those without a gradient
    optimizer_bytes: int
    temp_bytes: int
    host_bytes: int  # in the host's memory
    matrix_seconds: float
    memory_seconds: float
    exposed_seconds: float  # of traffic between chips that nothing hides
    host_seconds: float  # of traffic with the host that nothing hides

    @property
    def step_seconds(self) -> float:
        return self.matrix_seconds + self.memory_seconds + self.exposed_seconds + self.host_seconds

    @property
    def argument_bytes(self) -> int:
        return self.weight_bytes + self.optimizer_bytes

    @property
    def hbm_bytes(self) -> int:
        return self.argument_bytes + self.temp_bytes


def estimate(cfg: sections.Run, where: Slice) -> Estimate:
    sizes = build.mesh_sizes(cfg, where.devices, where.slices if where.chip.is_tpu else 1)
    there = held(cfg, sizes)
    flops = objective.flops(cfg)
    local = Local.of(cfg, sizes)
    matrix = matrix_seconds(cfg, where, flops)
    traffic = traffic_seconds(cfg, where, sizes, there.parameters)
    passed = 2 * there.weights + 12 * (local.kept(cfg) + local.work(cfg))
    moved = 3 * there.weights + 2 * there.optimizer + passed * cfg.batch.accumulate
    memory = moved / (MEMORY * where.chip.bandwidth / where.chip.devices)
    busy, offloaded = matrix + memory, local.offloaded(cfg)
    # There in the forward pass and back in the backward pass, beside all else.
    host = 2 * offloaded * cfg.batch.accumulate / (HOST / where.chip.devices)
    return Estimate(
        parameters=there.parameters,
        flops_per_token=flops,
        mesh=sizes,
        weight_bytes=there.weights,
        frozen_bytes=there.frozen,
        optimizer_bytes=there.optimizer,
        temp_bytes=local.temporaries(cfg, there),
        host_bytes=offloaded,
        matrix_seconds=matrix,
        memory_seconds=memory,
        exposed_seconds=max(traffic - HIDDEN * busy, (1 - HIDDEN) * traffic),
        host_seconds=max(host - HIDDEN * busy, (1 - HIDDEN) * host),
    )


@dataclass(frozen=True)
class Held:
    """Bytes on one device."""

    weights: int
    optimizer: int  # and averaged weights
    frozen: int  # of the weights, those without a gradient
    parameters: int  # in all


def held(cfg: sections.Run, sizes: dict[str, int]) -> Held:
    still = build.frozen(cfg, module.axes(file("models", cfg.model).Model, cfg.model))
    return _held(cfg.model, cfg.optimizer, tuple(sizes[axis] for axis in mesh.AXES), still)


@lru_cache(4096)
def _held(model: Any, optimizer: Any, sizes: tuple[int, ...], frozen: frozenset[str]) -> Held:
    """From shapes with shardings, over a mesh of which nothing is there."""
    axes = module.axes(file("models", model).Model, model)
    devices: Any = AbstractMesh(sizes, mesh.AXES, axis_types=(AxisType.Auto,) * len(mesh.AXES))
    abstract = _shapes(model, optimizer, frozen)
    homes = state.shardings(abstract, axes, devices)
    placed = jax.tree.map(
        lambda leaf, home: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=home), abstract, homes
    )
    count = sum(leaf.size for leaf in jax.tree.leaves(abstract.params))
    still = fit.held({name: leaf for name, leaf in module.named(placed.params) if name in frozen})
    return Held(fit.held(placed.params), fit.held((placed.optimizer, placed.ema)), still, count)


@lru_cache(64)
def _shapes(model: Any, optimizer: Any, frozen: frozenset[str]) -> state.State:
    family = file("models", model)
    tx = build.make_optimizer(optimizer, module.axes(family.Model, model), frozen)

    def fresh() -> state.State:
        params = module.init(family.Model, model, jax.random.key(0))
        return state.fresh(params, tx, seed=0, ema=optimizer.ema > 0)

    return jax.eval_shape(fresh)


@dataclass(frozen=True)
class Local:
    """What one device has of a batch and of the model."""

    tokens: int  # at a time
    tensor: int
    fsdp: int
    expert: int

    @classmethod
    def of(cls, cfg: sections.Run, sizes: dict[str, int]) -> "Local":
        over = math.prod(sizes[axis] for axis in sections.SPLIT_ROWS)
        rows = cfg.batch.sequences // cfg.batch.accumulate // over
        tokens = rows * cfg.data.sequence_length // sizes["context"]
        return cls(tokens, sizes["tensor"], sizes["fsdp"], sizes["expert"])

    def temporaries(self, cfg: sections.Run, there: Held) -> int:
        """All but the state at the worst moment, which is either at the head, or amid the layers with all
        gradients made. Sums of gradients over parts of the batch come on top."""
        cast = there.weights // 2 if cfg.memory.compute == "bfloat16" else 0
        gradients = there.weights - there.frozen
        sums = gradients if cfg.batch.accumulate > 1 else 0
        layers = gradients + self.work(cfg) + self.gathered(cfg)
        return self.kept(cfg) + cast + sums + max(self.head(cfg), layers)

    def kept(self, cfg: sections.Run) -> int:
        """For the backward pass: the inputs of all layers, and what else `memory.remat` lets stay."""
        moving = self.offloaded(cfg) * min(IN_FLIGHT, cfg.model.layers) // cfg.model.layers
        return self.numbers(cfg, KEPT[cfg.memory.remat], inputs=1) * cfg.model.layers + moving

    def offloaded(self, cfg: sections.Run) -> int:
        """For the backward pass, in the host's memory."""
        return self.numbers(cfg, OFFLOADED.get(cfg.memory.remat, KEPT["full"])) * cfg.model.layers

    def work(self, cfg: sections.Run) -> int:
        """On one layer. Of experts also rows for each, and the tokens of all devices that share them, with
        what becomes of these in float32."""
        model, item = cfg.model, 2 if cfg.memory.compute == "bfloat16" else 4
        rows = SLACK * getattr(model, "top_k", 0) * (2 * item + 4)
        shared = 2 * (item + 4) * self.expert if self.expert > 1 else 0
        return self.numbers(cfg, KEPT["none"]) + int(self.tokens * model.embed * (rows + shared))

    def numbers(self, cfg: sections.Run, units: tuple[float, float, float], inputs: int = 0) -> int:
        model, item = cfg.model, 2 if cfg.memory.compute == "bfloat16" else 4
        heads = (model.heads + 2 * model.kv_heads) * model.head_dim
        d, m, q = units
        each = (inputs + d) * model.embed + (m * hidden_units(model) + q * heads) / self.tensor
        return int(item * self.tokens * each)

    def head(self, cfg: sections.Run) -> int:
        """By tokens logits of a chunk and, twice, the gradient of the vocabulary's matrix; by the vocabulary,
        where the matrix is split, logits and their gradient, and the hidden states' in float32."""
        vocab = cfg.model.vocab // self.tensor
        if self.fsdp * self.expert > 1:
            return 2 * 2**26 + 4 * self.tokens * cfg.model.embed
        return min(2**30, 4 * vocab * self.tokens) + 2 * 4 * vocab * cfg.model.embed

    def gathered(self, cfg: sections.Run) -> int:
        """The weights of two layers, whole, and of the experts one device's."""
        idle = expert_weights(cfg.model) // cfg.model.layers
        return 2 * 2 * (layer_weights(cfg.model) + idle // self.expert) // self.tensor


def hidden_units(model: Any) -> int:
    """That a token meets in a layer."""
    if not getattr(model, "experts", 0):
        return model.mlp
    return model.top_k * model.expert_mlp + model.shared_mlp


def expert_weights(model: Any) -> int:
    """In the matrices of all experts but those that all tokens share."""
    if not getattr(model, "experts", 0):
        return 0
    return model.routed_layers * model.experts * 3 * model.embed * model.expert_mlp


def layer_weights(model: Any) -> int:
    """In the matrices of a layer that a token meets."""
    return model.embed * (2 * (model.heads + model.kv_heads) * model.head_dim + 3 * hidden_units(model))


def matrix_seconds(cfg: sections.Run, where: Slice, flops_per_token: float) -> float:
    """Forward, backward and what is computed again, at the share of the peak that products reach; those that
    are in 8 bits at theirs. What matrices give is kept by some policies, what attention gives by others."""
    model, chip, remat = cfg.model, where.chip, cfg.memory.remat
    tokens = cfg.batch.sequences * cfg.data.sequence_length
    whole, none = (file("models", model).flops(model, length) for length in (cfg.data.sequence_length, 0))
    scores, products = whole - none, none - 6 * model.vocab * model.embed
    again = products / 3 if remat in ("full", "attention") else 0.0
    count = NARROW[products_of(cfg)]
    narrow = (count + bool(count and again)) * 2 * model.layers * layer_weights(model)
    again += scores / 3 if remat in ("full", "dots", "offload") else 0.0
    rate = chip.rate(products_of(cfg)) or chip.flops
    seconds = (flops_per_token + again - narrow) / chip.flops + narrow / rate
    return tokens * seconds / (where.chips * MATRIX)


def traffic_seconds(cfg: sections.Run, where: Slice, sizes: dict[str, int], parameters: int) -> float:
    """Weights gathered for the forward and the backward pass in the compute dtype, gradients summed in
    float32, tokens on their way to experts, activations of tensor parallelism, keys and values of context
    parallelism."""
    model, chip = cfg.model, where.chip
    item, parts = (2 if cfg.memory.compute == "bfloat16" else 4), cfg.batch.accumulate
    local = Local.of(cfg, sizes)
    rate = LINKS * chip.interconnect / chip.devices
    share, split = parameters / sizes["tensor"], sizes["fsdp"] * sizes["expert"]
    ring = lambda size: (size - 1) / size
    experts = expert_weights(model) / sizes["tensor"]
    moved = ring(split) * (share - experts) * (2 * item + 4) * parts
    moved += ring(sizes["fsdp"]) * experts / sizes["expert"] * (2 * item + 4) * parts
    moved += 2 * ring(sizes["data"]) * share / split * 4
    # Tokens go to the experts and come back, in both passes, and go there once more for the backward pass.
    met = 5 * (sizes["expert"] - 1) * getattr(model, "routed_layers", 0)
    moved += met * item * local.tokens * model.embed * parts
    moved += 8 * ring(sizes["tensor"]) * item * local.tokens * model.embed * model.layers * parts
    keys = 2 * model.kv_heads * model.head_dim / sizes["tensor"]
    moved += 3 * (sizes["context"] - 1) * item * local.tokens * keys * model.layers * parts
    seconds = moved / rate
    if where.slices > 1 and chip.network:
        seconds += 2 * 4 * parameters / (where.devices / where.slices) / (chip.network / chip.devices)
    return seconds


def state_needs(cfg: sections.Run, where: Slice) -> int:
    """Bytes a device that no setting but another optimizer or slice can do without: the state and gradients
    shared out over all devices."""
    whole = held(cfg, dict.fromkeys(mesh.AXES, 1))
    return math.ceil((2 * whole.weights - whole.frozen + whole.optimizer) / where.devices)
