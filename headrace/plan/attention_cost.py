"""Attention by arithmetic: number of scores, seconds they take, and whether they are stored in memory."""

import math

import jax

from headrace.attention import band, splash
from headrace.config.sections import TrainRecipe
from headrace.hardware.slices import SliceShape
from headrace.kernels import band_tpu
from headrace.model_wrappers import load_family
from headrace.nn.compile_target import OLD_TPUS
from headrace.plan import device_rates
from headrace.plan.activations import ModelSizes
from headrace.plan.instruction_cost import SPLASH_MATMULS, pad_to_matrix_unit
from headrace.training import setup

# Share of the peak of matmuls that attention reaches on a GPU: cuDNN does 391 TFLOP/s for one row of 131,072
# (heads of 64, all of a step that nothing else explains), 368 at 32,768 (heads of 256), 412 at 4,096 (128),
# 323 at 4,096 (64), 430 where rows of 8,192 attend in both directions (docs/performance/long-context.md,
# docs/performance.md; H200).
GPU_EFFICIENCY = 0.4
# Tiles at the diagonal and at either end of a window are half masked. This is the side of splash's tiles. On
# an H200 the difference between rows of 4,096 and of 131,072, above, is that of such tiles, and a window of
# 128 in both directions takes as long as 1,040 keys (long-context.md).
TILE_SIDE = 1024
# Bytes through memory per score, forward and backward, where no kernel computes them on the chip. The time
# that DeBERTa takes on an H200 beyond its matmuls and everything else is 55 and 59 bytes for each of its
# scores at 512 and 1,024 tokens (docs/performance.md); the memory time of 1B's step on v3-8 is 65 (libtpu
# 0.0.51).
BYTES_PER_SCORE = 58
RECOMPUTES_ATTENTION = ("full", "dots", "offload")  # values of remat


def estimate_attention(recipe: TrainRecipe, slice_shape: SliceShape) -> float:
    """Estimate the seconds of a step that a device spends on attention, forward and backward.

    On a TPU the sum over kernels, each limited by its matmuls or by its scores, as in timing.py. On a GPU a
    share of the peak."""
    chip = slice_shape.chip
    forward_passes = 1 + int(recipe.compute.remat in RECOMPUTES_ATTENTION)
    scores = count_scores(recipe, slice_shape) * tile_overhead(recipe, slice_shape)
    # Seconds for one matmul over all scores, per number of a head.
    matmul = 2 * scores / (chip.flops / chip.devices)
    if not chip.is_tpu:
        return 2 * matmul * recipe.model.head_dim * (2 + forward_passes) / GPU_EFFICIENCY
    clock = device_rates.clock_hz(chip) * max(1, chip.cores // chip.devices)
    if (bundles := distance_bundles(recipe, slice_shape)) is not None:
        # `scores` also has the matmuls with distances, which the bundles contain.
        length = recipe.data.sequence_length
        scores *= length / (length + min(length - 1, recipe.model.distances))
        return scores / device_rates.SCORES_PER_REGISTER * (bundles[0] * forward_passes + bundles[1]) / clock
    matmul *= pad_to_matrix_unit(recipe.model.head_dim)
    band_layers = find_band_layers(recipe, slice_shape)
    seconds = 0.0
    if band_layers is not None:
        layers, keys = band_layers
        forward, backward = band_tpu.vliw_bundles(chip.device_kinds[0])
        tokens = recipe.batch.sequences * recipe.data.sequence_length / slice_shape.devices
        in_bands = tokens * recipe.model.heads * layers * keys
        seconds = in_bands / device_rates.SCORES_PER_REGISTER * (forward * forward_passes + backward) / clock
        matmul *= (share := 1 - in_bands / scores)
        scores *= share
    vector = (
        scores
        * (
            device_rates.CYCLES_PER_REGISTER / device_rates.SCORES_PER_REGISTER
            + device_rates.CYCLES_PER_TILE / TILE_SIDE**2
        )
        / clock
    )
    padded = -(-recipe.data.sequence_length // splash.LANES) * splash.LANES
    can_fuse = band_layers is not None or not count_window_layers(recipe)
    if can_fuse and splash.has_fused_gradients(padded, recipe.model.head_dim):
        gradients = [SPLASH_MATMULS["dkv"] + 1]
    else:
        gradients = [SPLASH_MATMULS["dq"], SPLASH_MATMULS["dkv"]]
    kernels = [SPLASH_MATMULS["fwd"]] * forward_passes + gradients
    return seconds + sum(max(count * matmul / device_rates.MATMUL_SHARE, vector) for count in kernels)


def count_scores(recipe: TrainRecipe, slice_shape: SliceShape) -> float:
    """Count the unmasked scores that one device computes in the forward pass of a step."""
    tokens = recipe.batch.sequences * recipe.data.sequence_length / slice_shape.devices
    return tokens * split_flops(recipe)[1] / 3 / (4 * recipe.model.head_dim)


def tile_overhead(recipe: TrainRecipe, slice_shape: SliceShape) -> float:
    """Return computed scores per unmasked score: kernels compute tiles that are partly masked."""
    model, length = recipe.model, recipe.data.sequence_length
    unmasked = split_flops(recipe)[1] / flops_per_key(model)  # keys per query, summed over layers
    band_layers = find_band_layers(recipe, slice_shape)
    if band_layers is not None:
        layers, keys = band_layers
        full = (length + TILE_SIDE) / 2 if model.causal else length
        return ((model.layers - layers) * full + layers * keys) / unmasked
    if model.causal:
        return 1 + TILE_SIDE / length
    computed = min(unmasked + TILE_SIDE * count_window_layers(recipe), model.layers * length)
    return max(1.0, computed / unmasked) if unmasked else 1.0


def find_band_layers(recipe: TrainRecipe, slice_shape: SliceShape) -> tuple[float, int] | None:
    """Return the number of layers with a window that have kernels on TPUs, and keys per query there.

    The kernels are those of attention/band.py. None if the recipe has no such layers, or the slice no
    kernels."""
    model, length, layers = recipe.model, recipe.data.sequence_length, count_window_layers(recipe)
    if not layers or not slice_shape.chip.is_tpu or recipe.attention.use != "auto":
        return None
    if setup.mesh_sizes(recipe, slice_shape.devices, slice_shape.slices)["context"] > 1:
        return None
    full_keys = (model.layers - layers) * length / (1 + model.causal)
    window_keys = split_flops(recipe)[1] / flops_per_key(model) - full_keys
    side = window_keys / layers if model.causal else window_keys / layers / 2
    # Queries at the end of a row see less: the mean is reach - reach^2 / 2 length (Mask.keys).
    reach = round(length * (1 - math.sqrt(max(0.0, 1 - 2 * side / length))))
    head = jax.ShapeDtypeStruct((1, length, model.heads, model.head_dim), recipe.compute.dtype)
    has_cap = hasattr(model, "attention_soft_cap") and model.attention_soft_cap is not None
    if (1 + (not model.causal)) * reach > band.WIDEST or has_cap:
        return None
    if band_tpu.shape_unsupported_reason(slice_shape.chip.device_kinds[0], head) is not None:
        return None
    return layers, band_tpu.keys_per_block(length, reach, 0 if model.causal else reach)


def count_window_layers(recipe: TrainRecipe) -> float:
    """Count the layers with a sliding window, from how FLOPs grow with the length of rows.

    Beyond the longest window, FLOPs of layers with a window do not grow. Recurrent depth and generators make
    FLOPs grow by more than the layers do, so that the count is then 0."""
    model, family, length = recipe.model, load_family(recipe.model), 2**24
    keys = length / 2 if model.causal else length
    growth = family.flops_per_token(model, 2 * length) - family.flops_per_token(model, length)
    return max(0.0, round(model.layers - growth / (flops_per_key(model) * keys), 3))


def flops_per_key(model: ModelSizes) -> float:
    """Return FLOPs per key that a token attends to in one layer, forward and backward."""
    return 12 * model.heads * model.head_dim


def stores_scores(recipe: TrainRecipe, slice_shape: SliceShape) -> bool:
    """Whether scores go through memory, since no kernel computes them on the chip."""
    return (
        lacks_splash(slice_shape)
        or recipe.attention.use == "xla"
        or lacks_distance_kernel(recipe, slice_shape)
    )


def lacks_distance_kernel(recipe: TrainRecipe, slice_shape: SliceShape) -> bool:
    """Whether the model attends by distances (DeBERTa), for which this slice has no kernel."""
    uses_distances = load_family(recipe.model).distance_kernels is not None
    return uses_distances and distance_bundles(recipe, slice_shape) is None


def distance_bundles(recipe: TrainRecipe, slice_shape: SliceShape) -> tuple[int, int] | None:
    """Return VLIW bundles per 1,024 scores, forward and backward, of kernels for attention with distances.

    The kernels are those of attention/_disentangled.py. None if the recipe or the slice does not use them."""
    family = load_family(recipe.model)
    if family.distance_kernels is None or recipe.attention.use != "auto" or not slice_shape.chip.is_tpu:
        return None
    sizes = setup.mesh_sizes(recipe, slice_shape.devices, slice_shape.slices)
    model, length, kind = recipe.model, recipe.data.sequence_length, slice_shape.chip.device_kinds[0]
    chunk = length // (2 * sizes["context"]) if sizes["context"] > 1 else length
    heads = model.heads // sizes["tensor"], model.head_dim
    q, k = (jax.ShapeDtypeStruct((1, n, *heads), recipe.compute.dtype) for n in (chunk, length))
    kernels = family.distance_kernels
    return None if kernels.shape_unsupported_reason(kind, q, k) else kernels.vliw_bundles(kind)


def lacks_splash(slice_shape: SliceShape) -> bool:
    """Whether these are TPUs that are too old for splash attention."""
    return any(kind in OLD_TPUS for kind in slice_shape.chip.device_kinds)


def split_flops(recipe: TrainRecipe) -> tuple[float, float]:
    """Return FLOPs per token, forward and backward: of the layers' matmuls, and of attention scores."""
    model, family = recipe.model, load_family(recipe.model)
    full, without_scores = (
        family.flops_per_token(model, length) for length in (recipe.data.sequence_length, 0)
    )
    return without_scores - 6 * model.vocab * model.embed, full - without_scores
