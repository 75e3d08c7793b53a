"""Text from a masked diffusion model: its tokens are hidden at first, and told a few at a time from all that
is known on both sides. Block by block and the surest first as LLaDA does (arXiv 2502.09992), in any order, or
each token in a step of its own drawing, which is MDLM's ancestral sampler (arXiv 2406.07524): there a hidden
token goes on to be told with a chance of (t - s)/t in the step from t to s, hence in each step alike. What is
told stays as it is."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from headrace.checkpoint.open_run import LoadedRun
from headrace.errors import UserError
from headrace.inference.sampling import Sampling, sample_token
from headrace.low_precision.cast import cast
from headrace.model_wrappers import load_family
from headrace.models import fixed_matmul
from headrace.nn.linear import project
from headrace.nn.module import Array, axes
from headrace.nn.stack import Execution

Turns = list[tuple[np.ndarray, int]]


@dataclass(frozen=True)
class UnmaskSchedule:
    """How hidden tokens are told. Each step is one pass of the model over the whole text."""

    steps: int = 0  # 0: one for each token
    block: int = 0  # tokens that are done before the next are begun; 0: all at once
    order: Literal["confident", "random", "ancestral"] = "confident"

    def __post_init__(self) -> None:
        for name in ("steps", "block"):
            if getattr(self, name) < 0:
                raise UserError(f"--{name}: expected 1 or more, or 0 for the default")


@dataclass(frozen=True)
class StepConstants:
    """What the compiled step knows."""

    model: Any
    exec_opts: Execution
    sampling: Sampling
    soft_cap: float | None
    mask: int
    never: tuple[int, ...]  # special tokens, which are given and never told


def sample(
    run: LoadedRun, ids: list[int], tokens: int, sampling: Sampling, reveal: UnmaskSchedule
) -> Iterator[int]:
    """The tokens that follow `ids`, a block at a time. The text has exactly so many: where it ends is given
    to the model, in training too. What cannot be done is refused before the first is asked for."""
    assert run.tokenizer is not None
    blocks = math.ceil(tokens / (reveal.block or tokens))
    if run.tokenizer.special.mask is None:
        raise UserError(
            "diffusion needs a tokenizer with a mask token, and the one in the run folder has none"
        )
    if 0 < reveal.steps < blocks:
        raise UserError(f"--steps: found {reveal.steps}, expected {blocks} or more, one for each block")
    return _sample(run, ids, tokens, sampling, reveal)


def _sample(
    run: LoadedRun, ids: list[int], tokens: int, sampling: Sampling, reveal: UnmaskSchedule
) -> Iterator[int]:
    assert run.tokenizer is not None
    special, cfg = run.tokenizer.special, run.recipe.model
    assert special.mask is not None
    exec_opts = Execution(run.recipe.attention, run.recipe.compute.dtype, matmul=fixed_matmul(cfg))
    named = (special.pad, special.bos, special.eos, special.mask)
    never = tuple(sorted({token for token in named if token is not None}))
    fixed = StepConstants(cfg, exec_opts, sampling, run.recipe.loss.soft_cap, special.mask, never)
    names = axes(load_family(cfg).Model, cfg)
    model = jax.jit(lambda params: cast(params, names, exec_opts))(run.params)

    width = min(reveal.block or tokens, tokens)
    blocks = math.ceil(tokens / width)
    text = [*ids, *[special.mask] * tokens, *([] if special.eos is None else [special.eos])]
    # A round number, so that texts of about the same length share a program; the rest belongs to no document.
    length = 128 * math.ceil((len(ids) + blocks * width + 1) / 128)
    home = NamedSharding(run.mesh, PartitionSpec())
    row = jax.device_put(np.array([text + [fixed.mask] * (length - len(text))], np.int32), home)
    segments = jax.device_put(np.array([[1] * len(text) + [0] * (length - len(text))], np.int32), home)
    key, rng, number = jax.random.key(sampling.seed), np.random.default_rng(sampling.seed), 0
    for block, steps in enumerate(even_split(reveal.steps or tokens, blocks)):
        first = len(ids) + block * width
        size = min(width, tokens - block * width)
        for among, count in unmask_plan(reveal.order, size, steps, rng):
            places = np.zeros(width, bool)
            places[:size] = among
            with jax.set_mesh(run.mesh):
                number += 1
                row = step(model, row, segments, first, places, count, jax.random.fold_in(key, number), fixed)
        yield from np.asarray(row)[0, first : first + size].tolist()


def unmask_plan(order: str, tokens: int, steps: int, rng: np.random.Generator) -> Turns:
    """For each step in which some of a block's tokens are told: among which, and how many. Whose turn it is
    does not hang on what the model says, unless it is that of the surest: steps that tell nothing never run
    it."""
    if order == "confident":
        return [(np.ones(tokens, bool), count) for count in even_split(tokens, steps) if count]
    if order == "random":
        turn = rng.permutation(np.repeat(np.arange(steps), even_split(tokens, steps)))
    else:
        turn = rng.integers(steps, size=tokens)
    return [(turn == number, int((turn == number).sum())) for number in np.unique(turn)]


def even_split(whole: int, parts: int) -> list[int]:
    """As equal as can be, the larger ones first."""
    return [whole // parts + (number < whole % parts) for number in range(parts)]


@functools.partial(jax.jit, static_argnames="fixed", donate_argnames="row")
def step(
    model: Any,
    row: Array,
    segments: Array,
    first: Any,
    among: Any,
    count: Any,
    key: Array,
    fixed: StepConstants,
) -> Array:
    """A row [1 s] of which `count` more tokens are told, the surest of those hidden `among` the block's
    places from `first` on. A token is as sure as its probability, whichever is drawn."""
    hidden = model(fixed.model, row, exec_opts=fixed.exec_opts, segments=segments)
    hidden = jax.lax.dynamic_slice_in_dim(hidden[0], first, among.shape[0])
    logits = project(model.unembed, hidden, "sd,vd->sv").astype(jnp.float32)
    if fixed.soft_cap is not None:
        logits = fixed.soft_cap * jnp.tanh(logits / fixed.soft_cap)
    logits = logits.at[:, jnp.asarray(fixed.never)].set(-jnp.inf)
    keys = jax.random.split(key, len(logits))
    drawn = jax.vmap(lambda logits, key: sample_token(logits, key, fixed.sampling))(logits, keys)
    sure = jnp.take_along_axis(jax.nn.log_softmax(logits), drawn[:, None], axis=1)[:, 0]
    before = jax.lax.dynamic_slice_in_dim(row[0], first, among.shape[0])
    sure = jnp.where(among & (before == fixed.mask), sure, -jnp.inf)
    rank = jnp.argsort(jnp.argsort(-sure))
    told = (rank < count) & (sure > -jnp.inf)
    row = jax.lax.dynamic_update_slice(row, jnp.where(told, drawn, before)[None], (0, first))
    return jax.lax.with_sharding_constraint(
        row, PartitionSpec()
    )  # where it was, or the next step is compiled anew
