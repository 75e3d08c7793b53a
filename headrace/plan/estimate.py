"""What a step takes by arithmetic alone, in a second and for any chip: the state to the byte, activations and
time from shapes. It says what cannot work and which settings are worth the compiler's time; for TPUs the
compiler then has the last word."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from headrace.training import setup as build, memory_check as fit
from headrace.nn import sharding as mesh, module
from headrace import objectives as objective
from headrace.config import sections
from headrace.checkpoint import state
from headrace.nn.stack import products_of
from headrace.nn.experts import SLACK
from headrace.objectives import file
from headrace.plan import timing
from headrace.plan.activations import Layer, Units, hidden_units
from headrace.plan.attention_cost import (
    SCORE,
    attention_seconds,
    flops_of,
    plain,
    scores_in_memory,
    scores_of,
)
from headrace.hardware.slices import Slice


@dataclass(frozen=True)
class Shares:
    """Of the data sheets' rates, what programs reach, the same for every model and chip of a kind:
    docs/planning.md shows what it leaves to wish for."""

    matrix: float
    narrow: float  # of products in 8 bits
    memory: float
    links: float
    hidden: float  # of the traffic between chips, at most, goes on beside the products
    elementwise: float  # of what elementwise work reads and writes, goes through memory


# As timing.py has it of programs that the compiler made, with its evidence. By their schedules gradients are
# summed and weights gathered in the open: all of it for 7B on v4-32, 8B on v5p-32 and v6e-16 and 30B on
# v4-128, two thirds of it for four layers of 1B on v5e-8. Part of the elementwise work is within products:
# the memory of 8B's step on v5p-32 and v6e-16 is 0.106 and 0.196 s where counting arrays gives 0.18 and 0.31,
# of four layers of 1B on v5e-8 with remat full 0.035 and 0.045 (libtpu 0.0.51, 2026-11).
TPU = Shares(timing.MATRIX, timing.MATRIX, timing.STREAM, timing.LINK, hidden=0.0, elementwise=0.65)
# Of one H200 (docs/performance.md): Llama 3.2 1B's products make 730 of 989 TFLOP/s, xLSTM's 672; what fp8
# takes off the steps of 1B and 8B leaves its products 1,070 and 1,200 of 1,979; copies make about 4,300 of
# 4,800 GB/s, less between them; all but products and attention takes 62 ms of 1B's step and 46 of xLSTM's,
# 1.0 and 2.2 times what counting arrays gives. How several of them hide their traffic was not measured.
GPU = Shares(0.70, 0.58, 0.85, 0.8, hidden=0.9, elementwise=1.5)

# Bytes for each logit beside its products: of the 88 ms of Llama 3.2 1B's head on an H200 71 are products,
# and the rest is that of 17 bytes at the speed of memory: float32 written, read twice, and a gradient.
LOGIT = 16
# Where no kernel makes a layer's scores on the chip, arrays of them at the worst moment of the layer at work,
# and kept of each without remat where layers are side by side (in a loop one): by 34 and 53 GiB of DeBERTa's
# step on an H200, and 4.8 of four layers on v5e-8 with remat dots (libtpu 0.0.51). WHOLE:
# layers/disentangled.py.
SCORES, WHOLE = 5, 1024
HIDDEN_FROM_HOST = 0.9  # of the traffic with the host, at most, goes on beside the rest
# Layers whose share is on its way to or from the host, by libtpu (docs/performance/activations.md).
IN_FLIGHT = 1
# Of a TPU's registers, to which the last axis of an array is filled up: what is kept of heads of 64 takes
# twice their bytes (Llama 3.2 1B on v5e-8, libtpu 0.0.51: all arrays of the stack by its buffers, 4,864 MiB).
LANES = 128

MULTIPLIES_AGAIN = ("full", "attention")  # the products of the layers, in the backward pass
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
    attention_seconds: float
    memory_seconds: float
    exposed_seconds: float  # of traffic between chips that nothing hides
    host_seconds: float  # of traffic with the host that nothing hides

    @property
    def step_seconds(self) -> float:
        inside = self.matrix_seconds + self.attention_seconds + self.memory_seconds
        return inside + self.exposed_seconds + self.host_seconds

    @property
    def argument_bytes(self) -> int:
        return self.weight_bytes + self.optimizer_bytes

    @property
    def hbm_bytes(self) -> int:
        return self.argument_bytes + self.temp_bytes


def estimate(cfg: sections.Run, where: Slice) -> Estimate:
    sizes = build.mesh_sizes(cfg, where.devices, where.slices if where.chip.is_tpu else 1)
    there, shares = held(cfg, sizes), shares_of(where)
    local = Local.of(cfg, where, sizes)
    matrix = matrix_seconds(cfg, where, split=local.fsdp * local.expert > 1)
    attention = attention_seconds(cfg, where)
    traffic = traffic_seconds(cfg, where, sizes, there.parameters)
    passed = 2 * there.weights + local.passed(cfg, shares.elementwise)
    scores = SCORE * scores_of(cfg, where) if scores_in_memory(cfg, where) else 0.0
    moved = 3 * there.weights + 2 * there.optimizer + passed * cfg.batch.accumulate + scores
    memory = moved / (shares.memory * where.chip.bandwidth / where.chip.devices)
    busy, offloaded = matrix + attention + memory, local.offloaded(cfg)
    # There in the forward pass and back in the backward pass, beside all else.
    host = 2 * offloaded * cfg.batch.accumulate / (timing.HOST / where.chip.devices)
    return Estimate(
        parameters=there.parameters,
        flops_per_token=objective.flops(cfg),
        mesh=sizes,
        weight_bytes=there.weights,
        frozen_bytes=there.frozen,
        optimizer_bytes=there.optimizer,
        temp_bytes=local.temporaries(cfg, there),
        host_bytes=offloaded,
        matrix_seconds=matrix,
        attention_seconds=attention,
        memory_seconds=memory,
        exposed_seconds=open_seconds(traffic, busy, shares.hidden),
        host_seconds=open_seconds(host, busy, HIDDEN_FROM_HOST),
    )


def shares_of(where: Slice) -> Shares:
    return TPU if where.chip.is_tpu else GPU


def open_seconds(seconds: float, busy: float, hidden: float) -> float:
    """What is left to wait for of something that goes on beside the rest, as far as it can be hidden."""
    return max(seconds - hidden * busy, (1 - hidden) * seconds)


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
    looped: bool  # layers are one body of a loop, not side by side
    lanes: int  # a head of what attention gives takes a multiple of so many numbers
    in_memory: bool  # scores of a row are there at once
    layer: Layer

    @classmethod
    def of(cls, cfg: sections.Run, where: Slice, sizes: dict[str, int]) -> "Local":
        over = math.prod(sizes[axis] for axis in sections.SPLIT_ROWS)
        rows = cfg.batch.sequences // cfg.batch.accumulate // over
        tokens = rows * cfg.data.sequence_length // sizes["context"]
        unroll = cfg.memory.unroll if isinstance(cfg.memory.unroll, int) else 1 if where.chip.is_tpu else 32
        looped = unroll < cfg.model.layers
        return cls(
            tokens=tokens,
            tensor=sizes["tensor"],
            fsdp=sizes["fsdp"],
            expert=sizes["expert"],
            looped=looped,
            lanes=LANES if where.chip.is_tpu else 1,
            in_memory=cfg.attention.use == "xla" or plain(cfg, where) and cfg.data.sequence_length <= WHOLE,
            layer=Layer.of(cfg),
        )

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
        scores = (1 if self.looped else SCORES) * self.scores(cfg) if cfg.memory.remat == "none" else 0
        return (self.stays(cfg) + scores) * cfg.model.layers + moving

    def stays(self, cfg: sections.Run) -> int:
        """Of one layer."""
        units = Units(width=1) + self.layer.kept(cfg.memory.remat, looped=self.looped)
        return self.numbers(cfg, units, self.lanes)

    def offloaded(self, cfg: sections.Run) -> int:
        """For the backward pass, in the host's memory."""
        if cfg.memory.remat != "offload":
            return 0
        return self.numbers(cfg, self.layer.kept("dots", looped=self.looped)) * cfg.model.layers

    def passed(self, cfg: sections.Run, elementwise: float) -> float:
        """Through memory, by all elementwise work on one part of the batch. What a loop keeps is written to a
        stack and read from it."""
        layer = self.numbers(cfg, self.layer.passes(cfg.memory.remat))
        layer += 2 * self.stays(cfg) if self.looped else 0
        return elementwise * layer * cfg.model.layers + LOGIT * told(cfg) * self.tokens * cfg.model.vocab

    def work(self, cfg: sections.Run) -> int:
        """On one layer. Of experts also rows for each, and the tokens of all devices that share them, with
        what becomes of these in float32."""
        model, item = cfg.model, self.layer.item
        rows = SLACK * getattr(model, "top_k", 0) * (2 * item + 4)
        shared = 2 * (item + 4) * self.expert if self.expert > 1 else 0
        routed = int(self.tokens * model.embed * (rows + shared))
        return self.numbers(cfg, self.layer.worked_on()) + SCORES * self.scores(cfg) + routed

    def scores(self, cfg: sections.Run) -> int:
        """Bytes of one layer's, where those of a row are made at once."""
        each = cfg.model.heads * cfg.data.sequence_length // self.tensor
        return self.layer.item * self.tokens * each if self.in_memory else 0

    def numbers(self, cfg: sections.Run, units: Units, lanes: int = 1) -> int:
        """Bytes of so many numbers of each token."""
        return int(self.layer.item * self.tokens * units.count(cfg.model, self.tensor, lanes))

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


def expert_weights(model: Any) -> int:
    """In the matrices of all experts but those that all tokens share."""
    if not getattr(model, "experts", 0):
        return 0
    return model.routed_layers * model.experts * 3 * model.embed * model.expert_mlp


def layer_weights(model: Any, gates: int = 2) -> int:
    """In the matrices of a layer that a token meets."""
    heads = 2 * (model.heads + model.kv_heads) * model.head_dim
    return model.embed * (heads + (gates + 1) * hidden_units(model))


def told(cfg: sections.Run) -> float:
    """The share of tokens that the head tells."""
    length = cfg.data.sequence_length
    return file("objectives", cfg.objective).most(cfg.objective, length) / length


def matrix_seconds(cfg: sections.Run, where: Slice, *, split: bool) -> float:
    """Forward, backward and what is computed again, at the share of the peak that products reach; those that
    are in 8 bits at theirs. The last product of a layer is never computed again: the backward pass does not
    take what it gives. Where the vocabulary is `split`, its logits are made twice."""
    model, chip, shares = cfg.model, where.chip, shares_of(where)
    tokens = cfg.batch.sequences * cfg.data.sequence_length
    again = cfg.memory.remat in MULTIPLIES_AGAIN
    last = model.layers * model.embed * hidden_units(model)
    products, _ = flops_of(cfg)
    layers = products + again * (products / 3 - 2 * last)
    head = (8 if split else 6) * told(cfg) * model.vocab * model.embed
    wide, rate = 1 / (shares.matrix * chip.flops), chip.rate(products_of(cfg))
    seconds = (layers + head) * wide
    if rate and (count := NARROW[products_of(cfg)]):
        matrices = model.layers * layer_weights(model, Layer.of(cfg).gates)
        narrow = 2 * (count * matrices + again * (matrices - last))
        seconds -= narrow * (wide - 1 / (shares.narrow * rate))
    if chip.fp8 and cfg.loss.split == "fp8":
        seconds -= head * (wide - 1 / (shares.narrow * chip.fp8))
    return tokens * seconds / where.chips


def traffic_seconds(cfg: sections.Run, where: Slice, sizes: dict[str, int], parameters: int) -> float:
    """Weights gathered for the forward and the backward pass in the compute dtype, gradients summed in
    float32, tokens on their way to experts, activations of tensor parallelism, keys and values of context
    parallelism."""
    model, chip = cfg.model, where.chip
    item, parts = (2 if cfg.memory.compute == "bfloat16" else 4), cfg.batch.accumulate
    local = Local.of(cfg, where, sizes)
    share, split = parameters / sizes["tensor"], sizes["fsdp"] * sizes["expert"]
    ring = lambda size: (size - 1) / size
    experts = expert_weights(model) / sizes["tensor"]
    # Tokens go to the experts and come back, in both passes, and go there once more for the backward pass.
    met = 5 * (sizes["expert"] - 1) * getattr(model, "routed_layers", 0)
    keys = 2 * model.kv_heads * model.head_dim / sizes["tensor"]
    moved = [  # among how many devices, and bytes
        (split, ring(split) * (share - experts) * (2 * item + 4) * parts),
        (sizes["fsdp"], ring(sizes["fsdp"]) * experts / sizes["expert"] * (2 * item + 4) * parts),
        (sizes["data"], 2 * ring(sizes["data"]) * share / split * 4),
        (sizes["expert"], met * item * local.tokens * model.embed * parts),
        (
            sizes["tensor"],
            8 * ring(sizes["tensor"]) * item * local.tokens * model.embed * model.layers * parts,
        ),
        (sizes["context"], 3 * (sizes["context"] - 1) * item * local.tokens * keys * model.layers * parts),
    ]
    seconds = sum(size / link_rate(where, among) for among, size in moved if among > 1)
    if where.slices > 1 and chip.network:
        seconds += 2 * 4 * parameters / (where.devices / where.slices) / (chip.network / chip.devices)
    return seconds


def link_rate(where: Slice, among: int) -> float:
    """Bytes/s into a device from so many of them. On a torus they lie along some of its dimensions and have
    the links of these; behind a switch all there is."""
    chip = where.chip
    if not where.links:  # the devices of one chip meet in its memory
        return TPU.memory * chip.bandwidth / chip.devices
    dimensions = math.log(among) / math.log(where.devices) if chip.is_tpu else 1.0
    return shares_of(where).links * where.links * chip.link * dimensions


def state_needs(cfg: sections.Run, where: Slice) -> int:
    """Bytes a device that no setting but another optimizer or slice can do without: the state and gradients
    shared out over all devices."""
    whole = held(cfg, dict.fromkeys(mesh.AXES, 1))
    return math.ceil((2 * whole.weights - whole.frozen + whole.optimizer) / where.devices)
