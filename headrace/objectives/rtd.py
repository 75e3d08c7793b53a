"""Replaced token detection (ELECTRA, arXiv 2003.10555, as in DeBERTa-V3, arXiv 2111.09543).

A generator predicts masked tokens, tokens are drawn from its predictions and put in their places, and a
discriminator detects which differ from the original text. A step has two updates, each with its own optimizer
moments and clipping: first the generator's, then the discriminator's. The discriminator reads tokens that
were drawn before the first update, but adds its embedding to the generator's updated one."""

import dataclasses
import math
from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp

from headrace.errors import UserError
from headrace.nn import sharding
from headrace.nn.module import Array, PyTree, module
from headrace.nn.soft_cap import apply_soft_cap
from headrace.objectives import (
    Batch,
    Examples,
    LossOutput,
    TrainTask,
    UpdatePhase,
    head_loss,
    segments_and_positions,
    select_weighted,
)
from headrace.objectives._masking import maskable, max_selected, sample_positions
from headrace.objectives._select_weighted import scatter_back

MAX_LOGITS = 2**27  # in memory at a time on one device, when tokens are drawn


@dataclass(frozen=True)
class Config:
    """The `objective` section of a recipe with `use: rtd`."""

    mask_rate: float = 0.15  # share of the tokens that are masked for the generator
    discriminator_weight: float = 50.0  # weight of the discriminator's loss

    mask_token_share = 1.0  # not a recipe key: the generator reads all of them as the mask token

    def __post_init__(self) -> None:
        if not 0 < self.mask_rate <= 1:
            raise ValueError("mask_rate: expected a share above 0, up to 1")
        if self.discriminator_weight <= 0:
            raise ValueError("discriminator_weight: expected a number above 0")


@module
class Pairs:
    """The generator's examples, and for each position [b s] a uniform number to draw a token by, and 1 where
    there is text."""

    examples: Examples
    draws: Array
    text: Array


def max_targets(cfg: Config, length: int) -> int:
    """The most positions of a row that have a target of the generator."""
    return max_selected(length, rate=cfg.mask_rate)


def prepare(task: TrainTask, batch: Batch, key: Array) -> Pairs:
    """Make the examples of a batch, with tokens masked for the generator."""
    if task.special_tokens.mask is None:
        raise UserError("objective.use: rtd needs a tokenizer with a mask token, and this data's has none")
    selection_key, draw_key = jax.random.split(key)
    rate = cast(Config, task.objective).mask_rate
    selected = sample_positions(selection_key, maskable(task.special_tokens, batch), rate=rate)
    inputs = jnp.where(selected, task.special_tokens.mask, batch.tokens)
    segments, positions = segments_and_positions(task, batch)
    examples = Examples(inputs, batch.tokens, selected.astype(jnp.float32), segments, positions)
    draws = jax.random.uniform(draw_key, batch.tokens.shape)
    return Pairs(examples, draws, (batch.segments > 0).astype(jnp.float32))


def generator_loss(task: TrainTask, model: PyTree, pairs: Pairs) -> LossOutput:
    """Compute the generator's loss, and draw the tokens that the discriminator reads."""
    pairs = jax.tree.map(sharding.to_balanced_order, pairs)
    examples, generator = pairs.examples, model.generator
    assert task.family.generator_config is not None
    hidden = generator(
        task.family.generator_config(task.model),
        examples.inputs,
        exec_opts=task.exec_opts,
        segments=examples.segments,
        positions=examples.positions,
    )
    totals = head_loss(task, generator, hidden, examples)
    selected, draws, _ = select_weighted(task, jax.lax.stop_gradient(hidden), pairs.draws, examples.weights)
    sampled = draw_tokens(task, selected, jax.lax.stop_gradient(generator.unembed), draws)
    if sampled.shape[1] < examples.inputs.shape[1]:
        sampled = scatter_back(sampled, examples.weights)
    inputs = jnp.where(examples.weights > 0, sampled, examples.inputs)
    sums = {"loss": totals.loss, "nll": totals.nll, "count": examples.weights.sum()}
    carry = dataclasses.replace(pairs, examples=dataclasses.replace(examples, inputs=inputs))
    return LossOutput(totals.loss, sums, carry)


def discriminator_loss(task: TrainTask, model: PyTree, pairs: Pairs) -> LossOutput:
    """Compute the loss of detecting replaced tokens."""
    examples = pairs.examples
    logits = model.detect_replaced(
        task.model,
        examples.inputs,
        exec_opts=task.exec_opts,
        segments=examples.segments,
        positions=examples.positions,
    )
    is_replaced = examples.inputs != examples.targets
    total = jnp.sum(pairs.text * (jax.nn.softplus(logits) - jnp.where(is_replaced, logits, 0.0)))
    sums = {
        "loss": total,
        "accuracy": jnp.sum(pairs.text * ((logits > 0) == is_replaced)),
        "replaced": jnp.sum(pairs.text * is_replaced),  # the error rate of always answering no
        "count": pairs.text.sum(),
    }
    return LossOutput(cast(Config, task.objective).discriminator_weight * total, sums)


UPDATE_PHASES = (
    UpdatePhase(
        generator_loss,
        select=lambda params: params.generator,
        merge=lambda params, trained: dataclasses.replace(params, generator=trained),
    ),
    UpdatePhase(
        discriminator_loss,
        name="discriminator_",
        select=lambda params: dataclasses.replace(params, generator=None),
        merge=lambda params, trained: dataclasses.replace(trained, generator=params.generator),
    ),
)


def draw_tokens(task: TrainTask, hidden: Array, unembed: Array, draws: Array) -> Array:
    """Draw a token for each hidden state [b s d] from the softmax of its logits, by one uniform number each
    [b s]. Logits are computed for some positions at a time."""
    b, s, _d = hidden.shape
    vocab = unembed.shape[0]
    mesh = sharding.current_mesh()
    devices = 1 if mesh is None else math.prod(mesh.shape[axis] for axis in sharding.RULES["batch"])
    chunk = min(s, max(1, MAX_LOGITS * devices // (b * vocab)))
    count = -(-s // chunk)

    def split(x: Array) -> Array:
        padded = jnp.pad(x, [(0, 0), (0, count * chunk - s), *[(0, 0)] * (x.ndim - 2)])
        chunks = jnp.moveaxis(padded.reshape(b, count, chunk, *x.shape[2:]), 1, 0)
        return sharding.constrain(chunks, None, "batch", *(None,) * (chunks.ndim - 2))

    def draw_chunk(inputs: tuple[Array, Array]) -> Array:
        x, draws = inputs
        logits = jnp.einsum("bsd,vd->bsv", x, unembed.astype(x.dtype), preferred_element_type=jnp.float32)
        return draw_from_logits(apply_soft_cap(logits, task.loss.soft_cap), draws)

    tokens = jax.lax.map(draw_chunk, (split(hidden), split(draws)))
    return jnp.moveaxis(tokens, 0, 1).reshape(b, count * chunk)[:, :s]


def draw_from_logits(logits: Array, draws: Array) -> Array:
    """Draw an index of the last axis for each number of `draws`: the first at which the cumulative
    probability exceeds the number. In two steps, first a group of indices and then the index, since a
    cumulative sum over a whole vocabulary would be long."""
    vocab = logits.shape[-1]
    groups = math.isqrt(vocab - 1) + 1
    size = -(-vocab // groups)
    probabilities = jnp.exp(logits - logits.max(-1, keepdims=True))  # not normalized
    padded = jnp.pad(probabilities, [*[(0, 0)] * draws.ndim, (0, groups * size - vocab)])
    grouped = padded.reshape(*draws.shape, groups, size)
    cumulative = jnp.cumsum(grouped.sum(-1), axis=-1)
    threshold = draws * cumulative[..., -1]
    group = jnp.minimum((cumulative <= threshold[..., None]).sum(-1), groups - 1)
    members = jnp.take_along_axis(grouped, group[..., None, None], axis=-2)[..., 0, :]
    before = jnp.pad(cumulative, [*[(0, 0)] * draws.ndim, (1, 0)])
    before = jnp.take_along_axis(before, group[..., None], axis=-1)
    is_below = before + jnp.cumsum(members, axis=-1) <= threshold[..., None]
    inside = jnp.minimum(is_below.sum(-1), size - 1)
    return jnp.minimum(group * size + inside, vocab - 1).astype(jnp.int32)
