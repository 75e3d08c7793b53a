"""Codebooks of a layer fitted to what the layer gave before it was rounded, indices as they are (VPTQ's
layer-wise fine-tuning)."""

from collections.abc import Callable
from dataclasses import replace
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
    tx = optax.adam(optax.linear_schedule(method.tune_rate, 0.0, method.tune))
    books = {name: _books(stored) for name, stored in made.items()}

    def loss(books: Any, text: Text, x: Array, wanted: Array) -> Array:
        fitted = {name: replace(stored, **books[name]) for name, stored in made.items()}
        model = with_layer(layer.params, found, fitted)
        missed = (layer.out(model, text, x) - wanted).astype(jnp.float32) * text.counts[..., None]
        return jnp.sum(missed**2) / jnp.maximum(text.counts.sum(), 1.0)

    @jax.jit
    def step(books: Any, state: Any, text: Text, x: Array, wanted: Array) -> Any:
        moves, state = tx.update(jax.grad(loss)(books, text, x, wanted), state)
        return optax.apply_updates(books, moves), state

    check, state, begun = jax.jit(loss), tx.init(books), books
    wanted = [np.asarray(layer.out(layer.params, text, put(x))) for text, x in rows]
    batch = lambda at: (rows[at][0], put(rows[at][1]), put(wanted[at]))
    total = lambda books: sum(float(check(books, *batch(at))) for at in range(len(rows)))
    for number in range(method.tune):
        # Waited for, or the batches of many steps would be on the devices at once.
        books, state = jax.block_until_ready(step(books, state, *batch(number % len(rows))))
    books = jax.tree.map(lambda book: book.astype(jnp.float16).astype(jnp.float32), books)
    best = books if total(books) < total(begun) else begun
    return {name: replace(stored, **_halves(best[name])) for name, stored in made.items()}


def _books(stored: Vectors) -> dict[str, Array]:
    found = {name: getattr(stored, name) for name in BOOKS}
    return {name: jnp.asarray(book, jnp.float32) for name, book in found.items() if book is not None}


def _halves(books: dict[str, Array]) -> dict[str, Any]:
    return {name: book.astype(jnp.float16) for name, book in books.items()}
