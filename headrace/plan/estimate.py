"""Memory and time of a step by arithmetic, within a second and for any chip.

State is exact to the byte; activations and seconds follow from shapes. This rules out what cannot work and
selects the settings that are worth compiling. For TPUs the compiler then decides."""

import math
from dataclasses import dataclass

from headrace.config.sections import TrainRecipe
from headrace.hardware.slices import SliceShape
from headrace.plan import device_rates
from headrace.plan.activations import LayerSpec, count_hidden_units
from headrace.plan.attention_cost import (
    BYTES_PER_SCORE,
    count_scores,
    estimate_attention,
    split_flops,
    stores_scores,
)
from headrace.plan.device_memory import (
    DeviceShare,
    count_expert_weights,
    count_layer_weights,
    count_state_bytes,
    predicted_share,
)
from headrace.training import setup
from headrace.training.task import matmul_format, recipe_flops_per_token


@dataclass(frozen=True)
class Efficiency:
    """Shares of the data sheet's rates that programs reach, equal for all models and chips of a kind.

    docs/planning.md shows how far estimates are off."""

    matmul: float
    narrow_matmul: float  # in 8 bits
    memory: float
    links: float
    max_hidden: float  # largest share of the busy time behind which traffic between chips can hide
    elementwise: float  # share of what elementwise operations read and write that goes through memory


# As in device_rates.py, with its evidence, for programs of the TPU compiler. By their schedules gradients are
# summed and weights gathered without overlap: all of it for 7B on v4-32, 8B on v5p-32 and v6e-16 and 30B on
# v4-128, two thirds of it for four layers of 1B on v5e-8. Part of the elementwise work is fused into matmuls:
# the memory time of 8B's step on v5p-32 and v6e-16 is 0.106 and 0.196 s where counting arrays gives 0.18 and
# 0.31, of four layers of 1B on v5e-8 with remat full 0.035 and 0.045 (libtpu 0.0.51, 2026-11).
TPU = Efficiency(
    matmul=device_rates.MATMUL_SHARE,
    narrow_matmul=device_rates.MATMUL_SHARE,
    memory=device_rates.HBM_SHARE,
    links=device_rates.LINK_SHARE,
    max_hidden=0.0,
    elementwise=0.65,
)
# Of one H200 (docs/performance.md): Llama 3.2 1B's matmuls reach 730 of 989 TFLOP/s, xLSTM's 672; by what fp8
# saves of the steps of 1B and 8B, its matmuls reach 1,070 and 1,200 of 1,979; copies reach about 4,300 of
# 4,800 GB/s, less between them; everything but matmuls and attention takes 62 ms of 1B's step and 46 of
# xLSTM's, 1.0 and 2.2 times what counting arrays gives. How well several GPUs hide their traffic was not
# measured.
GPU = Efficiency(0.70, 0.58, 0.85, 0.8, max_hidden=0.9, elementwise=1.5)

MAX_HIDDEN_HOST_TRAFFIC = 0.9  # largest share of the busy time behind which traffic with the host can hide

RECOMPUTES_MATMULS = ("full", "attention")  # values of remat
# How many of the three matmuls of a weight are in 8 bits (low_precision/fp8.py, int8.py, ternary.py).
NARROW_MATMULS = {"compute": 0, "fp8": 3, "int8": 2, "ternary": 1}


@dataclass(frozen=True)
class Estimate:
    """Bytes on one device, and seconds of a step."""

    parameters: int
    flops_per_token: float
    mesh: dict[str, int]
    weight_bytes: int
    frozen_bytes: int  # part of the weights that has no gradient
    optimizer_bytes: int
    temp_bytes: int
    host_bytes: int  # in the host's memory
    matrix_seconds: float
    attention_seconds: float
    memory_seconds: float
    exposed_seconds: float  # of traffic between chips, as far as it is not hidden
    host_seconds: float  # of traffic with the host, as far as it is not hidden

    @property
    def step_seconds(self) -> float:
        on_device = self.matrix_seconds + self.attention_seconds + self.memory_seconds
        return on_device + self.exposed_seconds + self.host_seconds

    @property
    def argument_bytes(self) -> int:
        return self.weight_bytes + self.optimizer_bytes

    @property
    def hbm_bytes(self) -> int:
        return self.argument_bytes + self.temp_bytes


def estimate_step(recipe: TrainRecipe, slice_shape: SliceShape) -> Estimate:
    """Estimate memory and time of a step on a slice.

    Raises UserError if the batch does not suit the mesh."""
    chip = slice_shape.chip
    sizes = setup.mesh_sizes(recipe, slice_shape.devices, slice_shape.slices if chip.is_tpu else 1)
    state_bytes, efficiency = count_state_bytes(recipe, sizes), efficiency_of(slice_shape)
    share = DeviceShare.from_recipe(recipe, slice_shape, sizes)
    matmul = estimate_matmul(recipe, slice_shape, is_vocab_split=share.fsdp * share.expert > 1)
    attention = estimate_attention(recipe, slice_shape)
    traffic = estimate_traffic(recipe, slice_shape, sizes, share, state_bytes.parameters)
    per_microbatch = 2 * state_bytes.weights + share.traffic_bytes(recipe, efficiency.elementwise)
    scores = 0.0
    if stores_scores(recipe, slice_shape):
        scores = BYTES_PER_SCORE * count_scores(recipe, slice_shape)
    moved: float = 3 * state_bytes.weights + 2 * state_bytes.optimizer
    moved += per_microbatch * recipe.batch.microbatches
    moved += scores
    memory = moved / (efficiency.memory * chip.hbm_bandwidth / chip.devices)
    busy, offloaded = matmul + attention + memory, share.offloaded_bytes(recipe)
    # To the host in the forward pass and back in the backward pass, in parallel with everything else.
    host = 2 * offloaded * recipe.batch.microbatches / (device_rates.HOST_BANDWIDTH / chip.devices)
    return Estimate(
        parameters=state_bytes.parameters,
        flops_per_token=recipe_flops_per_token(recipe),
        mesh=sizes,
        weight_bytes=state_bytes.weights,
        frozen_bytes=state_bytes.frozen,
        optimizer_bytes=state_bytes.optimizer,
        temp_bytes=share.temp_bytes(recipe, state_bytes),
        host_bytes=offloaded,
        matrix_seconds=matmul,
        attention_seconds=attention,
        memory_seconds=memory,
        exposed_seconds=compute_exposed(traffic, busy, efficiency.max_hidden),
        host_seconds=compute_exposed(host, busy, MAX_HIDDEN_HOST_TRAFFIC),
    )


def efficiency_of(slice_shape: SliceShape) -> Efficiency:
    return TPU if slice_shape.chip.is_tpu else GPU


def compute_exposed(seconds: float, busy: float, max_hidden: float) -> float:
    """Return the seconds of background traffic that remain to be waited for.

    At most a share `max_hidden` of it hides, behind at most that share of the `busy` seconds."""
    return max(seconds - max_hidden * busy, (1 - max_hidden) * seconds)


def estimate_matmul(recipe: TrainRecipe, slice_shape: SliceShape, *, is_vocab_split: bool) -> float:
    """Estimate the seconds of matmuls: forward, backward and recomputed, each at the rate of its precision.

    The last matmul of a layer is never recomputed, since the backward pass does not need its output. If the
    matrix of the vocabulary is split, its logits are computed twice."""
    model, chip, efficiency = recipe.model, slice_shape.chip, efficiency_of(slice_shape)
    tokens = recipe.batch.sequences * recipe.data.sequence_length
    recomputes = recipe.compute.remat in RECOMPUTES_MATMULS
    last = model.layers * model.embed * count_hidden_units(model)
    in_layers, _ = split_flops(recipe)
    layers = in_layers + recomputes * (in_layers / 3 - 2 * last)
    head = (8 if is_vocab_split else 6) * predicted_share(recipe) * model.vocab * model.embed
    matmul = matmul_format(recipe)
    seconds_per_flop, narrow_rate = 1 / (efficiency.matmul * chip.flops), chip.matmul_flops(matmul)
    seconds = (layers + head) * seconds_per_flop
    if narrow_rate and (count := NARROW_MATMULS[matmul]):
        matrices = model.layers * count_layer_weights(model, LayerSpec.from_recipe(recipe).up_matrices)
        narrow_flops = 2 * (count * matrices + recomputes * (matrices - last))
        seconds -= narrow_flops * (seconds_per_flop - 1 / (efficiency.narrow_matmul * narrow_rate))
    if chip.fp8 and recipe.loss.backend == "fp8":
        seconds -= head * (seconds_per_flop - 1 / (efficiency.narrow_matmul * chip.fp8))
    return tokens * seconds / slice_shape.chips


def estimate_traffic(
    recipe: TrainRecipe, slice_shape: SliceShape, sizes: dict[str, int], share: DeviceShare, parameters: int
) -> float:
    """Estimate the seconds of traffic between chips, hidden or not, for a mesh of these sizes.

    Weights are gathered for the forward and the backward pass in the compute dtype, gradients summed in
    float32; tokens go to experts, activations between tensor-parallel devices, keys and values between
    context-parallel."""
    model, chip = recipe.model, slice_shape.chip
    itemsize, microbatches = (2 if recipe.compute.dtype == "bfloat16" else 4), recipe.batch.microbatches
    weights, shards = parameters / sizes["tensor"], sizes["fsdp"] * sizes["expert"]
    experts = count_expert_weights(model) / sizes["tensor"]
    # Tokens go to the experts and back in both passes, and once more to the experts in the backward pass.
    routed_layers = model.routed_layers if hasattr(model, "routed_layers") else 0
    exchanges = 5 * (sizes["expert"] - 1) * routed_layers
    keys = 2 * model.kv_heads * model.head_dim / sizes["tensor"]
    per_weight = 2 * itemsize + 4
    gathered = _remote_share(shards) * (weights - experts) * per_weight
    gathered_experts = _remote_share(sizes["fsdp"]) * experts / sizes["expert"] * per_weight
    tensor = 8 * _remote_share(sizes["tensor"]) * itemsize * share.tokens * model.embed * model.layers
    context = 3 * (sizes["context"] - 1) * itemsize * share.tokens * keys * model.layers
    transfers = [  # size of the group, and bytes into each member
        (shards, gathered * microbatches),
        (sizes["fsdp"], gathered_experts * microbatches),
        (sizes["data"], 2 * _remote_share(sizes["data"]) * weights / shards * 4),
        (sizes["expert"], exchanges * itemsize * share.tokens * model.embed * microbatches),
        (sizes["tensor"], tensor * microbatches),
        (sizes["context"], context * microbatches),
    ]
    seconds = sum(size / group_bandwidth(slice_shape, members) for members, size in transfers if members > 1)
    if slice_shape.slices > 1 and chip.network_bandwidth:
        network_bandwidth = chip.network_bandwidth / chip.devices
        seconds += 2 * 4 * parameters / (slice_shape.devices / slice_shape.slices) / network_bandwidth
    return seconds


def _remote_share(members: int) -> float:
    """Return the share of a collective's bytes that each of its members receives from others."""
    return (members - 1) / members


def group_bandwidth(slice_shape: SliceShape, members: int) -> float:
    """Return bytes/s into each device of a group.

    On a torus the group spans some of the dimensions and has their links; behind a switch it has all."""
    chip = slice_shape.chip
    if not slice_shape.links_per_chip:  # the devices of one chip exchange data in its memory
        return TPU.memory * chip.hbm_bandwidth / chip.devices
    dimensions = math.log(members) / math.log(slice_shape.devices) if chip.is_tpu else 1.0
    share = efficiency_of(slice_shape).links
    return share * slice_shape.links_per_chip * chip.link_bandwidth * dimensions
