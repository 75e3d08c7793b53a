"""Attention masks that are fixed at compile time: causal or not, and an optional window."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

Array = jax.Array

# The score of a key that a query does not see. Finite, so that the difference of two is a number.
HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)


@dataclass(frozen=True)
class Mask:
    """The keys that a query sees. A window of w reaches w - 1 keys back, or, if the mask is not causal, w //
    2 keys to either side."""

    causal: bool = True
    window: int | None = None

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """The number of keys before and after its own that a query sees; None is no limit."""
        if self.causal:
            return (None if self.window is None else self.window - 1), 0
        half = None if self.window is None else self.window // 2
        return half, half

    def keys(self, length: int) -> float:
        """The mean number of other keys that a query of a row of `length` sees, the row's ends included."""

        def side(reach: int | None) -> float:
            return length / 2 if reach is None or reach >= length else reach - reach**2 / (2 * length)

        return sum(map(side, self.reach))

    def allows(self, queries: Array, keys: Array) -> Array:
        """Whether each query position sees each key position; booleans in the shape that both broadcast
        to."""
        before, after = self.reach
        is_visible = jnp.ones(jnp.broadcast_shapes(queries.shape, keys.shape), bool)
        if before is not None:
            is_visible &= queries - keys <= before
        if after is not None:
            is_visible &= keys - queries <= after
        return is_visible
