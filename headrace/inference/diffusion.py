"""Generation by masked diffusion models: the text starts as mask tokens, of which a few at a time are
unmasked, each predicted from the visible text on both sides.

Block by block and the most confident first, as in LLaDA (arXiv 2502.09992); in random order; or each token in
a step drawn for it, which is the ancestral sampler of MDLM (arXiv 2406.07524): there a masked token is
unmasked with probability (t - s) / t in the step from time t to s, hence in any step equally likely. A token
is not changed again once it is unmasked."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from headrace.checkpoint.open_run import LoadedRun
from headrace.errors import InvalidArgument, UserError
from headrace.inference.cast_weights import cast_weights, make_execution
from headrace.inference.sampling import Sampling, sample_token
from headrace.models import Model, ModelConfig
from headrace.nn.linear import project
from headrace.nn.module import Array
from headrace.nn.soft_cap import apply_soft_cap
from headrace.nn.stack import Execution

LENGTH_MULTIPLE = 128  # of the row's length, so that texts of similar length share a program

Order = Literal["confident", "random", "ancestral"]
ORDERS = get_args(Order)


@dataclass(frozen=True)
class UnmaskSchedule:
    """The order in which masked tokens are unmasked. A step is one pass of the model over the whole text."""

    steps: int = 0  # number of steps; 0: one per token
    block: int = 0  # number of tokens to unmask before the next block is started; 0: all
    order: Order = "confident"

    def __post_init__(self) -> None:
        for name, value in (("steps", self.steps), ("block", self.block)):
            if value < 0:
                raise InvalidArgument(name, "expected 1 or more, or 0 for the default")
        if self.order not in ORDERS:
            raise InvalidArgument("order", f"found {self.order}, expected one of {', '.join(ORDERS)}")

    def changed_options(self) -> list[str]:
        """The names of the options that are not at their defaults; all names if none is."""
        names = [field.name for field in dataclasses.fields(self)]
        return [name for name in names if getattr(self, name) != getattr(UnmaskSchedule, name)] or names


@dataclass(frozen=True, eq=False)
class UnmaskStep:
    """A step that unmasks `count` tokens of a block."""

    candidates: np.ndarray  # bool [block]: tokens to choose from, by confidence
    count: int


@dataclass(frozen=True)
class StepConstants:
    """Constants of the compiled step."""

    cfg: ModelConfig
    exec_opts: Execution
    sampling: Sampling
    soft_cap: float | None
    mask_id: int
    unpredicted_ids: tuple[int, ...]  # special tokens, which have probability 0


def sample_tokens(
    run: LoadedRun, prompt_ids: list[int], count: int, sampling: Sampling, schedule: UnmaskSchedule
) -> Iterator[int]:
    """Sample the `count` tokens that follow a prompt. They are yielded in the order of the text, when their
    block is complete.

    The text has exactly this length: as in training, the model reads where it ends. Raises UserError at once,
    not at the first token, if the schedule or the tokenizer does not allow it."""
    assert run.tokenizer is not None
    if run.tokenizer.special.mask is None:
        raise UserError("diffusion needs a tokenizer with a mask token; the one in the run folder has none")
    blocks = math.ceil(count / (schedule.block or count))
    if 0 < schedule.steps < blocks:
        raise InvalidArgument("steps", f"found {schedule.steps}, expected {blocks} or more, one per block")
    return _sample_tokens(run, prompt_ids, count, sampling, schedule)


def _sample_tokens(
    run: LoadedRun, prompt_ids: list[int], count: int, sampling: Sampling, schedule: UnmaskSchedule
) -> Iterator[int]:
    constants = _step_constants(run, sampling)
    model = cast_weights(run, constants.exec_opts)
    width = min(schedule.block or count, count)
    blocks = math.ceil(count / width)
    row, segments = _masked_row(run, prompt_ids, count, min_length=len(prompt_ids) + blocks * width + 1)
    key, rng = jax.random.key(sampling.seed), np.random.default_rng(sampling.seed)
    number = 0
    for block, steps in enumerate(split_evenly(schedule.steps or count, blocks)):
        first = len(prompt_ids) + block * width
        size = min(width, count - block * width)
        for step in plan_unmask_steps(schedule.order, size, steps, rng):
            is_candidate = np.zeros(width, bool)
            is_candidate[:size] = step.candidates
            number += 1
            with jax.set_mesh(run.mesh):
                step_key = jax.random.fold_in(key, number)
                row = unmask_step(model, row, segments, first, is_candidate, step.count, step_key, constants)
        yield from np.asarray(row)[0, first : first + size].tolist()


def _step_constants(run: LoadedRun, sampling: Sampling) -> StepConstants:
    assert run.tokenizer is not None
    special = run.tokenizer.special
    assert special.mask is not None
    special_ids = {id for id in (special.pad, special.bos, special.eos, special.mask) if id is not None}
    return StepConstants(
        cfg=run.recipe.model,
        exec_opts=make_execution(run),
        sampling=sampling,
        soft_cap=run.recipe.loss.soft_cap,
        mask_id=special.mask,
        unpredicted_ids=tuple(sorted(special_ids)),
    )


def _masked_row(run: LoadedRun, prompt_ids: list[int], count: int, *, min_length: int) -> tuple[Array, Array]:
    """Tokens and segments [1 s] of the prompt, `count` mask tokens and the end of the text, on all devices.
    What follows is padding, which belongs to no document."""
    assert run.tokenizer is not None
    special = run.tokenizer.special
    assert special.mask is not None
    text = [*prompt_ids, *[special.mask] * count, *([] if special.eos is None else [special.eos])]
    padding = LENGTH_MULTIPLE * math.ceil(min_length / LENGTH_MULTIPLE) - len(text)
    replicated = NamedSharding(run.mesh, PartitionSpec())
    row = np.array([text + [special.mask] * padding], np.int32)
    segments = np.array([[1] * len(text) + [0] * padding], np.int32)
    return jax.device_put(row, replicated), jax.device_put(segments, replicated)


def plan_unmask_steps(order: Order, tokens: int, steps: int, rng: np.random.Generator) -> list[UnmaskStep]:
    """Plan the steps that unmask a block of tokens: which tokens each chooses from, and how many.

    Only `confident` depends on what the model predicts. In the other orders the step of each token is drawn
    beforehand; steps without a token are left out, so that the model does not run for them."""
    if order == "confident":
        all_tokens = np.ones(tokens, bool)
        return [UnmaskStep(all_tokens, count) for count in split_evenly(tokens, steps) if count]
    if order == "random":
        step_of_token = rng.permutation(np.repeat(np.arange(steps), split_evenly(tokens, steps)))
    else:
        step_of_token = rng.integers(steps, size=tokens)
    in_step = [step_of_token == step for step in np.unique(step_of_token)]
    return [UnmaskStep(candidates, int(candidates.sum())) for candidates in in_step]


def split_evenly(total: int, parts: int) -> list[int]:
    """Split a number into parts that differ by at most one, the larger ones first."""
    return [total // parts + (part < total % parts) for part in range(parts)]


@functools.partial(jax.jit, static_argnames="constants", donate_argnames="row")
def unmask_step(
    model: Model,
    row: Array,
    segments: Array,
    first: ArrayLike,
    is_candidate: Array | np.ndarray,
    count: ArrayLike,
    key: Array,
    constants: StepConstants,
) -> Array:
    """Unmask `count` more tokens of a row [1 s]. Returns the updated row.

    Chosen are the candidates, in the block that begins at position `first`, whose sampled tokens have the
    highest probabilities."""
    width = is_candidate.shape[0]
    hidden = model(constants.cfg, row, exec_opts=constants.exec_opts, segments=segments)
    hidden = jax.lax.dynamic_slice_in_dim(hidden[0], first, width)
    logits = project(model.unembed, hidden, "sd,vd->sv").astype(jnp.float32)
    logits = apply_soft_cap(logits, constants.soft_cap)
    logits = logits.at[:, jnp.asarray(constants.unpredicted_ids)].set(-jnp.inf)
    keys = jax.random.split(key, len(logits))
    sampled = jax.vmap(lambda logits, key: sample_token(logits, key, constants.sampling))(logits, keys)
    confidence = jnp.take_along_axis(jax.nn.log_softmax(logits), sampled[:, None], axis=1)[:, 0]
    tokens = jax.lax.dynamic_slice_in_dim(row[0], first, width)
    confidence = jnp.where(is_candidate & (tokens == constants.mask_id), confidence, -jnp.inf)
    rank = jnp.argsort(jnp.argsort(-confidence))
    is_unmasked = (rank < count) & (confidence > -jnp.inf)
    tokens = jnp.where(is_unmasked, sampled, tokens)
    row = jax.lax.dynamic_update_slice(row, tokens[None], (0, first))
    # As in the argument: with another sharding, the next step would be compiled again.
    return jax.lax.with_sharding_constraint(row, PartitionSpec())
