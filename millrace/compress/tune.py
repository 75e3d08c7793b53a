"""Codebooks of a layer fitted to what the layer gave before it was rounded, indices as they are (VPTQ's
layer-wise fine-tuning)."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from millrace.compress.calibrate import Layer, Text
from millrace.compress.stored import Linear, with_layer
from millrace.compress.vectors import Vectors
from millrace.module import Array

BOOKS = ("centroids", "residual", "outlier_centroids")


def tuned(
    layer: Layer,
    method: Any,
    found: list[Linear],
    made: dict[str, Vectors],
    rows: list[tuple[Text, np.ndarray]],
    put: Callable[[np.ndarray], Array],
) -> dict[str, Any]:
    """The matrices with codebooks that make the layer's output, on the texts and inputs of `rows`, more like
    that of the matrices they stand for. The result is taken only if it does, over all rows. Inputs and
    outputs lie in the host's memory, and come to the devices by `put`, a batch at a time."""
    books, matrices = {name: _books(stored) for name, stored in made.items()}, tuple(found)
    state, begun = _rule(method).init(books), books
    wanted = [np.asarray(layer.out(layer.params, text, put(x))) for text, x in rows]
    batch = lambda at: (rows[at][0], put(rows[at][1]), put(wanted[at]))
    total = lambda books: sum(
        float(missed(matrices, layer, made, books, *batch(at))) for at in range(len(rows))
    )
    for number in range(method.tune):
        moved = step(method, matrices, layer, made, books, state, *batch(number % len(rows)))
        # Waited for, or the batches of many steps would be on the devices at once.
        books, state = jax.block_until_ready(moved)
    books = jax.tree.map(lambda book: book.astype(jnp.float16).astype(jnp.float32), books)
    best = books if total(books) < total(begun) else begun
    return {name: replace(stored, **_halves(best[name])) for name, stored in made.items()}


# Of a layer's matrices and of the model nothing is closed over: one program does for every layer of a kind.
@partial(jax.jit, static_argnames="found")
def missed(
    found: tuple[Linear, ...], layer: Layer, made: Any, books: Any, text: Text, x: Array, wanted: Array
) -> Array:
    """How far the layer's output is from the wanted one, squared, for a token."""
    fitted = {name: replace(stored, **books[name]) for name, stored in made.items()}
    model = with_layer(layer.params, found, fitted)
    apart = (layer.out(model, text, x) - wanted).astype(jnp.float32) * text.counts[..., None]
    return jnp.sum(apart**2) / jnp.maximum(text.counts.sum(), 1.0)


@partial(jax.jit, static_argnames=("method", "found"))
def step(
    method: Any,
    found: tuple[Linear, ...],
    layer: Layer,
    made: Any,
    books: Any,
    state: Any,
    text: Text,
    x: Array,
    wanted: Array,
) -> Any:
    slopes = jax.grad(missed, argnums=3)(found, layer, made, books, text, x, wanted)
    moves, state = _rule(method).update(slopes, state)
    return optax.apply_updates(books, moves), state


def _rule(method: Any) -> optax.GradientTransformation:
    return optax.adam(optax.linear_schedule(method.tune_rate, 0.0, method.tune))


def _books(stored: Vectors) -> dict[str, Array]:
    found = {name: getattr(stored, name) for name in BOOKS}
    return {name: jnp.asarray(book, jnp.float32) for name, book in found.items() if book is not None}


def _halves(books: dict[str, Array]) -> dict[str, Any]:
    return {name: book.astype(jnp.float16) for name, book in books.items()}
