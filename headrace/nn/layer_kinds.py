"""Kinds of layers in one model, which differ in attention mask and rotary positions. Both are fixed at
compile time, since kernels need them; `stack.run_layers` has one body per kind."""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.nn.attention_mask import Mask
from headrace.nn.rope import Rope


@dataclass(frozen=True)
class LayerKind:
    """The mask and the rotary positions of a layer."""

    mask: Mask
    rope: Rope


def keys_seen(kinds: Sequence[LayerKind], layers: int, length: int) -> float:
    """The number of keys that a query of a row of `length` sees on average, summed over all layers, of which
    layer i has kind i % len(kinds)."""
    return sum(kinds[layer % len(kinds)].mask.keys(length) for layer in range(layers))
