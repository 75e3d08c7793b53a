"""Layers of one model that differ: who sees whom, and by which positions. Both are known when compiling,
since kernels need it; `execution.layers_in_turn` runs them."""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.attention import Mask
from headrace.nn.rope import Rope


@dataclass(frozen=True)
class Kind:
    mask: Mask
    rope: Rope


def keys_seen(kinds: Sequence[Kind], layers: int, length: int) -> float:
    """By one query on average, in all layers together, which take the kinds in turn."""
    return sum(kinds[layer % len(kinds)].mask.keys(length) for layer in range(layers))
