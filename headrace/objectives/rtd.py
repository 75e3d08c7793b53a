"""Replaced token detection (ELECTRA, arXiv 2003.10555, as in DeBERTa-V3, arXiv 2111.09543): a generator tells
hidden tokens, what it would say is drawn and put in their places, and a discriminator finds where that is not
what stood there. Two updates a step: of the generator, and then of the discriminator, to which the
generator's embedding, of which its own is the difference, is the new one already. What it reads was drawn
before that, in the generator's one pass. Each has its own moments and its own clipping."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from headrace.nn import sharding as mesh
from headrace.objectives._masking import choosable, choose, most_chosen
from headrace.errors import UserError
from headrace.objectives._select_weighted import put_back
from headrace.nn.module import Array, module
from headrace.objectives import Batch, Examples, Task, Told, Turn, file, head_loss, seen, that_count

LOGITS = 2**27  # at a time on one device, when tokens are drawn


@dataclass(frozen=True)
class Config:
    rate: float = 0.15  # share of the tokens that are hidden from the generator
    weight: float = 50.0  # of the discriminator's loss, before its gradient is clipped

    masked = 1.0  # all of the hidden are shown as the mask token

    def __post_init__(self):
        if not 0 < self.rate <= 1:
            raise ValueError("rate: expected a share above 0, up to 1")
        if self.weight <= 0:
            raise ValueError("weight: expected a number above 0")


@module
class Pairs:
    """The generator's examples, for each position a uniform number to draw a token by, and 1 where there is
    text, all [b s]."""

    examples: Examples
    draws: Array
    text: Array


def most(cfg: Config, length: int) -> int:
    return most_chosen(length, rate=cfg.rate)


def prepare(task: Task, batch: Batch, key: Array) -> Pairs:
    if task.vocabulary.mask is None:
        raise UserError("objective.use: rtd needs a tokenizer with a mask token, and this data's has none")
    choice_key, draw_key = jax.random.split(key)
    chosen = choose(choice_key, choosable(task.vocabulary, batch), rate=task.objective.rate)
    inputs = jnp.where(chosen, task.vocabulary.mask, batch.tokens)
    segments, positions = seen(task, batch)
    examples = Examples(inputs, batch.tokens, chosen.astype(jnp.float32), segments, positions)
    draws = jax.random.uniform(draw_key, batch.tokens.shape)
    return Pairs(examples, draws, (batch.segments > 0).astype(jnp.float32))


def tell(task: Task, model: Any, pairs: Pairs) -> Told:
    """The generator's loss; the discriminator reads what it would have said."""
    pairs = jax.tree.map(mesh.balance, pairs)
    examples, generator = pairs.examples, model.generator
    hidden = generator(
        file("models", task.model).of_generator(task.model),
        examples.inputs,
        how=task.how,
        segments=examples.segments,
        positions=examples.positions,
    )
    totals = head_loss(task, generator, hidden, examples)
    found, draws, _ = that_count(task, jax.lax.stop_gradient(hidden), pairs.draws, examples.weights)
    said = draw(task, found, jax.lax.stop_gradient(generator.unembed), draws)
    if said.shape[1] < examples.inputs.shape[1]:
        said = put_back(said, examples.weights)
    shown = jnp.where(examples.weights > 0, said, examples.inputs)
    sums = {"loss": totals.loss, "nll": totals.nll, "count": examples.weights.sum()}
    following = dataclasses.replace(pairs, examples=dataclasses.replace(examples, inputs=shown))
    return Told(totals.loss, sums, following)


def find(task: Task, model: Any, pairs: Pairs) -> Told:
    examples = pairs.examples
    logits = model.find(
        task.model, examples.inputs, how=task.how, segments=examples.segments, positions=examples.positions
    )
    replaced = examples.inputs != examples.targets
    total = jnp.sum(pairs.text * (jax.nn.softplus(logits) - jnp.where(replaced, logits, 0.0)))
    sums = {
        "loss": total,
        "accuracy": jnp.sum(pairs.text * ((logits > 0) == replaced)),
        "replaced": jnp.sum(pairs.text * replaced),  # what saying no everywhere would miss
        "count": pairs.text.sum(),
    }
    return Told(task.objective.weight * total, sums)


TURNS = (
    Turn(
        tell,
        take=lambda whole: whole.generator,
        put=lambda whole, own: dataclasses.replace(whole, generator=own),
    ),
    Turn(
        find,
        name="discriminator_",
        take=lambda whole: dataclasses.replace(whole, generator=None),
        put=lambda whole, own: dataclasses.replace(own, generator=whole.generator),
    ),
)


def draw(task: Task, hidden: Array, unembed: Array, draws: Array) -> Array:
    """A token for each of the hidden states [b s d], from the softmax of its logits, by one uniform number
    each [b s]: the token at which the sum of probabilities passes it. Some positions at a time."""
    b, s, d = hidden.shape
    vocab = unembed.shape[0]
    current = mesh.current()
    devices = 1 if current is None else math.prod(current.shape[axis] for axis in mesh.RULES["batch"])
    size = min(s, max(1, LOGITS * devices // (b * vocab)))
    count = -(-s // size)

    def split(x: Array) -> Array:
        padded = jnp.pad(x, [(0, 0), (0, count * size - s), *[(0, 0)] * (x.ndim - 2)])
        cut = jnp.moveaxis(padded.reshape(b, count, size, *x.shape[2:]), 1, 0)
        return mesh.constrain(cut, None, "batch", *(None,) * (cut.ndim - 2))

    def some(its: tuple[Array, Array]) -> Array:
        x, draws = its
        logits = jnp.einsum("bsd,vd->bsv", x, unembed.astype(x.dtype), preferred_element_type=jnp.float32)
        cap = task.loss.soft_cap
        return draw_by(logits if cap is None else cap * jnp.tanh(logits / cap), draws)

    said = jax.lax.map(some, (split(hidden), split(draws)))
    return jnp.moveaxis(said, 0, 1).reshape(b, count * size)[:, :s]


def draw_by(logits: Array, draws: Array) -> Array:
    """One of the last axis for each number of `draws`. In two steps, first which of many groups it is in:
    running sums over a whole vocabulary would be long."""
    vocab = logits.shape[-1]
    groups = math.isqrt(vocab - 1) + 1
    size = -(-vocab // groups)
    chances = jnp.exp(logits - logits.max(-1, keepdims=True))
    padded = jnp.pad(chances, [*[(0, 0)] * draws.ndim, (0, groups * size - vocab)])
    grouped = padded.reshape(*draws.shape, groups, size)
    passed = jnp.cumsum(grouped.sum(-1), axis=-1)
    goal = draws * passed[..., -1]
    group = jnp.minimum((passed <= goal[..., None]).sum(-1), groups - 1)
    its = jnp.take_along_axis(grouped, group[..., None, None], axis=-2)[..., 0, :]
    before = jnp.take_along_axis(jnp.pad(passed, [*[(0, 0)] * draws.ndim, (1, 0)]), group[..., None], axis=-1)
    inside = jnp.minimum((before + jnp.cumsum(its, axis=-1) <= goal[..., None]).sum(-1), size - 1)
    return jnp.minimum(group * size + inside, vocab - 1).astype(jnp.int32)
