"""Attention by arithmetic: how many scores there are, how long they take, and where they lie."""

import math
from typing import Any

import jax

from headrace.training import setup as build
from headrace.config import sections
from headrace.attention import band, splash
from headrace.kernels import band_tpu as band_mosaic
from headrace.objectives import file
from headrace.plan import timing
from headrace.hardware.slices import Slice
from headrace.plan.instruction_cost import SPLASH, filled
from headrace.nn.compile_target import OLD_TPUS

# Attention on a GPU, of the peak of products: cuDNN makes 391 TFLOP/s for one row of 131,072 (heads of 64,
# all of a step that nothing else explains), 368 at 32,768 (heads of 256), 412 at 4,096 (128), 323 there
# (64), 430 where rows of 8,192 look both ways (docs/performance/long-context.md, docs/performance.md; H200).
ATTENTION = 0.4
# Of the keys in a tile at the diagonal, or at either end of a window, half are not seen. Sides are splash's;
# on an H200 the difference between rows of 4,096 and of 131,072, above, is that of such tiles, and a window
# of 128 both ways takes as long as 1,040 keys do (long-context.md).
SIDE = 1024
# Bytes through memory for each score, forward and backward, where no kernel makes them on the chip. What
# DeBERTa takes longer on an H200 than its products and all else is 55 and 59 of them for each of its scores
# at 512 and 1,024 tokens (docs/performance.md); the memory of 1B's step on v3-8 is 65 (libtpu 0.0.51).
SCORE = 58
ATTENDS_AGAIN = ("full", "dots", "offload")  # in the backward pass


def attention_seconds(cfg: sections.Run, where: Slice) -> float:
    """On a TPU kernel by kernel, each by its products or by its scores, whichever takes longer, as timing.py
    has it; on a GPU at its share of the peak."""
    chip, again = where.chip, int(cfg.memory.remat in ATTENDS_AGAIN)
    scores = scores_of(cfg, where) * visited(cfg, where)
    one = 2 * scores / (chip.flops / chip.devices)  # product of all scores, for each number of a head
    if not chip.is_tpu:
        return 2 * one * cfg.model.head_dim * (3 + again) / ATTENTION
    matrix = one * filled(cfg.model.head_dim)
    clock = timing.clock(chip) * max(1, chip.cores // chip.devices)
    if (bundles := bundles_of_distances(cfg, where)) is not None:
        # `scores` has the products by distance as well, which are in the bundles.
        length = cfg.data.sequence_length
        scores *= length / (length + min(length - 1, cfg.model.distances))
        return scores / timing.REGISTER * (bundles[0] * (1 + again) + bundles[1]) / clock
    near = windows(cfg, where)
    seconds = 0.0
    if near is not None:
        layers, keys = near
        forward, backward = band_mosaic.bundles(chip.kinds[0])
        tokens = cfg.batch.sequences * cfg.data.sequence_length / where.devices
        narrow = tokens * cfg.model.heads * layers * keys
        seconds = narrow / timing.REGISTER * (forward * (1 + again) + backward) / clock
        matrix *= (share := 1 - narrow / scores)
        scores *= share
    vector = scores * (timing.VECTOR / timing.REGISTER + timing.TILE / SIDE**2) / clock
    padded = -(-cfg.data.sequence_length // splash.LANES) * splash.LANES
    fused = splash.fuses(padded, cfg.model.head_dim) and (near is not None or not with_window(cfg))
    gradients = [SPLASH["dkv"] + 1] if fused else [SPLASH["dq"], SPLASH["dkv"]]
    kernels = [SPLASH["fwd"]] * (1 + again) + gradients
    return seconds + sum(max(count * matrix / timing.MATRIX, vector) for count in kernels)


def scores_of(cfg: sections.Run, where: Slice) -> float:
    """That are seen by one device in the forward pass of a step: two products of so many with a head's
    width."""
    tokens = cfg.batch.sequences * cfg.data.sequence_length / where.devices
    return tokens * flops_of(cfg)[1] / 3 / (4 * cfg.model.head_dim)


def visited(cfg: sections.Run, where: Slice) -> float:
    """Scores that tiles have for each one that is seen."""
    model, length = cfg.model, cfg.data.sequence_length
    seen = flops_of(cfg)[1] / flops_of_a_key(model)
    near = windows(cfg, where)
    if near is not None:
        layers, keys = near
        each = (length + SIDE) / 2 if model.causal else length
        return ((model.layers - layers) * each + layers * keys) / seen
    if model.causal:
        return 1 + SIDE / length
    tiles = min(seen + SIDE * with_window(cfg), model.layers * length)
    return max(1.0, tiles / seen) if seen else 1.0


def windows(cfg: sections.Run, where: Slice) -> tuple[float, int] | None:
    """How many layers have a window for which a TPU has kernels (attention/band.py), and how many keys a
    query meets there."""
    model, length, layers = cfg.model, cfg.data.sequence_length, with_window(cfg)
    if not layers or not where.chip.is_tpu or cfg.attention.use != "auto":
        return None
    if build.mesh_sizes(cfg, where.devices, where.slices)["context"] > 1:
        return None
    seen = flops_of(cfg)[1] / flops_of_a_key(model) - (model.layers - layers) * length / (1 + model.causal)
    side = seen / layers if model.causal else seen / layers / 2
    # Queries at the end of a row see less: the mean is reach - reach^2 / 2 length (Mask.keys).
    reach = round(length * (1 - math.sqrt(max(0.0, 1 - 2 * side / length))))
    head = jax.ShapeDtypeStruct((1, length, model.heads, model.head_dim), cfg.memory.compute)
    if (1 + (not model.causal)) * reach > band.WIDEST or getattr(model, "attention_cap", None) is not None:
        return None
    if band_mosaic.known_against(where.chip.kinds[0], head) is not None:
        return None
    return layers, band_mosaic.keys(length, reach, 0 if model.causal else reach)


def with_window(cfg: sections.Run) -> float:
    """How many layers have one, as the growth of FLOPs with the row tells: where it is longer than all of
    them, those of such layers do not grow. Loops and generators make it grow more than the layers would."""
    model, family, far = cfg.model, file("models", cfg.model), 2**24
    keys = far / 2 if model.causal else far
    grown = (family.flops(model, 2 * far) - family.flops(model, far)) / (flops_of_a_key(model) * keys)
    return max(0.0, round(model.layers - grown, 3))


def flops_of_a_key(model: Any) -> float:
    """That a token sees in one layer, forward and backward."""
    return 12 * model.heads * model.head_dim


def scores_in_memory(cfg: sections.Run, where: Slice) -> bool:
    """Where no kernel makes them on the chip."""
    return old(where) or cfg.attention.use == "xla" or plain(cfg, where)


def plain(cfg: sections.Run, where: Slice) -> bool:
    """Whether the family's attention has no kernel there."""
    return hasattr(file("models", cfg.model), "DISTANCES") and bundles_of_distances(cfg, where) is None


def bundles_of_distances(cfg: sections.Run, where: Slice) -> tuple[int, int] | None:
    """Bundles of instructions for 1,024 scores, forward and backward, where attention with distances has
    kernels (layers/disentangled.py)."""
    kernels = getattr(file("models", cfg.model), "DISTANCES", None)
    if kernels is None or cfg.attention.use != "auto" or not where.chip.is_tpu:
        return None
    sizes = build.mesh_sizes(cfg, where.devices, where.slices)
    model, length, kind = cfg.model, cfg.data.sequence_length, where.chip.kinds[0]
    split = length // (2 * sizes["context"]) if sizes["context"] > 1 else length
    heads = model.heads // sizes["tensor"], model.head_dim
    q, k = (jax.ShapeDtypeStruct((1, n, *heads), cfg.memory.compute) for n in (split, length))
    return None if kernels.known_against(kind, q, k) else kernels.bundles(kind)


def old(where: Slice) -> bool:
    return any(kind in OLD_TPUS for kind in where.chip.kinds)


def flops_of(cfg: sections.Run) -> tuple[float, float]:
    """Of a token, forward and backward: the products of the layers, and the scores of attention."""
    model, family = cfg.model, file("models", cfg.model)
    whole, none = (family.flops(model, length) for length in (cfg.data.sequence_length, 0))
    return none - 6 * model.vocab * model.embed, whole - none
