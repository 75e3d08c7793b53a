"""Recurrent depth (Huginn, arXiv 2502.05171): the layers in the middle of a model (the core) run several
times.

Each round reads a state and the output of the first layers (the prelude); the last layers (the coda) read the
final state. Training draws the number of rounds at each step, so that it can be chosen when the model is
used: more for harder text. Works for any family whose layers run through nn/stack.py."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from headrace.config.wrappers import RecurrenceKeys
from headrace.errors import UserError
from headrace.models import Family, ModelConfig
from headrace.nn.linear import project
from headrace.nn.module import Array, Axes, PyTree, module, ones, weight
from headrace.nn.norm import rms_norm
from headrace.nn.sharding import constrain
from headrace.nn.stack import CachedLayerBody, Execution, LayerBody, run_layers, run_layers_cached

ROUNDS_STD = 0.5  # standard deviation of the logarithm of the mean that training draws
STATE_STD = math.sqrt(2 / 5)  # standard deviation of the initial state
POSITION_AXIS = 2  # of a cache [l b t ...]

Body = TypeVar("Body")


@dataclass(frozen=True)
class RoundSchedule:
    """The number of rounds, i.e. of runs of the core, and how they start and end."""

    count: int | Array
    key: Array | None = None  # of the initial state
    backprop: int = 0  # the last rounds that gradients flow through
    # Decoding ends the rounds when one changes no token's state by more than this share of it; 0: never.
    exit: float = 0.0


def sample_rounds(exec_opts: Execution, cfg: ModelConfig, key: Array) -> Execution:
    """Draw the number of rounds of a training step, the same for all of its rows.

    It is one more than a Poisson variable, whose mean is log-normal with mean `recurrence.rounds`."""
    mean_key, count_key, state_key = jax.random.split(jax.random.fold_in(key, 0xDEE9), 3)
    deviation = ROUNDS_STD * jax.random.normal(mean_key)
    mean = jnp.exp(deviation + math.log(_keys(cfg).rounds) - ROUNDS_STD**2 / 2)
    count = jax.random.poisson(count_key, mean, dtype=jnp.int32) + 1
    return replace(exec_opts, rounds=RoundSchedule(count, state_key, _keys(cfg).backprop))


def is_recurrent(cfg: ModelConfig) -> bool:
    """Whether the config asks for recurrent depth."""
    return cfg.recurrence is not None


@functools.cache
def wrap(family: Family) -> Family:
    """The family with recurrent depth. transformers has no such models, so an export is refused."""
    return replace(
        family,
        Model=make_recurrent_model(family.Model),
        flops_per_token=functools.partial(flops_per_token, family.flops_per_token),
        hf=None if family.hf is None else replace(family.hf, to_config=_refuse_export),
    )


def init_projection(key: Array, axes: Axes, shape: tuple[int, ...], cfg: ModelConfig) -> Array:
    """Initialize with standard deviation sqrt(2 / (5 embed))."""
    return math.sqrt(2 / (5 * cfg.embed)) * jax.random.normal(key, shape, jnp.float32)


def make_recurrent_model(plain: Any) -> type[Any]:
    """Derive a model class with the weights that combine state and text at the start of a round."""

    @module
    class RecurrentModel(plain):
        w_state: Array = weight("embed", "state:embed", init=init_projection)
        w_text: Array = weight("embed", "state:embed", init=init_projection)
        text_norm: Array = weight("embed", init=ones)
        state_norm: Array = weight("embed", init=ones)

        def __call__(
            self,
            cfg: ModelConfig,
            tokens: Array,
            *,
            exec_opts: Execution,
            segments: Array | None = None,
            positions: Array | None = None,
        ) -> Array:
            if positions is None:
                positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
            runner = RecurrentRunner(cfg, self, _rounds(exec_opts, cfg), positions)
            exec_opts = replace(exec_opts, layer_runner=runner)
            return plain.__call__(
                self, cfg, tokens, exec_opts=exec_opts, segments=segments, positions=positions
            )

        def init_cache(self, cfg: ModelConfig, batch_size: int, max_length: int, dtype: DTypeLike) -> PyTree:
            """Make a cache with an entry per layer and round: a round reads earlier tokens' same round."""
            unrolled = replace(cfg, layers=num_executed_layers(cfg, _keys(cfg).rounds))
            return plain.init_cache(self, unrolled, batch_size, max_length, dtype)

        def decode(
            self, cfg: ModelConfig, tokens: Array, cache: PyTree, *, exec_opts: Execution
        ) -> tuple[Array, PyTree]:
            positions = jnp.broadcast_to(cache.length + jnp.arange(tokens.shape[1]), tokens.shape)
            runner = RecurrentRunner(cfg, self, _rounds(exec_opts, cfg), positions, cache.length)
            exec_opts = replace(exec_opts, layer_runner=runner)
            return plain.decode(self, cfg, tokens, cache, exec_opts=exec_opts)

    return RecurrentModel


def _keys(cfg: ModelConfig) -> RecurrenceKeys:
    """The `recurrence` section of a config that has one."""
    assert cfg.recurrence is not None
    return cfg.recurrence


def _rounds(exec_opts: Execution, cfg: ModelConfig) -> RoundSchedule:
    return exec_opts.rounds or RoundSchedule(_keys(cfg).rounds)


@dataclass(frozen=True)
class RecurrentRunner:
    """The `LayerRunner` of recurrent depth."""

    cfg: ModelConfig
    model: Any  # a RecurrentModel
    rounds: RoundSchedule
    positions: Array
    first: int | Array = 0  # the lowest position

    @property
    def core(self) -> int:
        """The number of layers that a round runs."""
        return self.cfg.layers - _keys(self.cfg).prelude - _keys(self.cfg).coda

    def run(self, exec_opts: Execution, bodies: Sequence[LayerBody], x: Array, layers: PyTree) -> Array:
        """Run prelude, rounds and coda. Only the last `rounds.backprop` rounds have gradients."""
        exec_opts = replace(exec_opts, layer_runner=None)
        prelude, core, coda = split_layers(layers, (_keys(self.cfg).prelude, self.core, _keys(self.cfg).coda))
        if _keys(self.cfg).prelude:
            x = run_layers(exec_opts, bodies, x, prelude)
        text, state = self.normalize_text(x), self.initial_state(x)
        core_bodies = rotate_bodies(bodies, _keys(self.cfg).prelude)

        def run_round(model: PyTree, core: PyTree, text: Array, state: Array) -> Array:
            h = enter_round(model, text, state)
            return normalize_state(self.cfg, model, run_layers(exec_opts, core_bodies, h, core))

        backprop = self.rounds.backprop
        without_gradient = jnp.maximum(self.rounds.count - backprop, 0)
        constants = jax.lax.stop_gradient((self.model, core, text))
        state = jax.lax.fori_loop(0, without_gradient, lambda _, state: run_round(*constants, state), state)
        if backprop:
            # A loop of fixed length, which can be differentiated; if fewer rounds were drawn, the rest of it
            # has no effect.
            def step(state: Array, number: Array) -> tuple[Array, None]:
                new = run_round(self.model, core, text, state)
                return jnp.where(number < self.rounds.count, new, state), None

            state, _ = jax.lax.scan(step, state, jnp.arange(backprop))
        if _keys(self.cfg).coda:
            state = run_layers(
                exec_opts, rotate_bodies(bodies, _keys(self.cfg).prelude + self.core), state, coda
            )
        return state

    def run_cached(
        self,
        exec_opts: Execution,
        bodies: Sequence[CachedLayerBody],
        x: Array,
        layers: PyTree,
        cache: PyTree,
    ) -> tuple[Array, PyTree]:
        """Like `run`, for tokens that continue those in a cache. May end the rounds early (`rounds.exit`)."""
        exec_opts = replace(exec_opts, layer_runner=None)
        cfg, max_rounds = self.cfg, _keys(self.cfg).rounds
        prelude, core, coda = split_layers(layers, (_keys(cfg).prelude, self.core, _keys(cfg).coda))
        prelude_cache, core_cache, coda_cache = split_layers(
            cache, (_keys(cfg).prelude, max_rounds * self.core, _keys(cfg).coda)
        )
        if _keys(cfg).prelude:
            x, prelude_cache = run_layers_cached(exec_opts, bodies, x, prelude, prelude_cache)
        text, core_bodies = self.normalize_text(x), rotate_bodies(bodies, _keys(cfg).prelude)

        def needs_round(carry: tuple[Any, ...]) -> Array:
            number, _, _, change = carry
            has_rounds_left = number < max_rounds
            return has_rounds_left & (change > self.rounds.exit) if self.rounds.exit else has_rounds_left

        def run_round(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            number, state, cache, _ = carry
            layer = number * self.core
            round_cache = jax.tree.map(lambda w: jax.lax.dynamic_slice_in_dim(w, layer, self.core), cache)
            h = enter_round(self.model, text, state)
            new, round_cache = run_layers_cached(exec_opts, core_bodies, h, core, round_cache)
            new = normalize_state(cfg, self.model, new)
            cache = jax.tree.map(
                lambda w, part: jax.lax.dynamic_update_slice_in_dim(w, part, layer, 0), cache, round_cache
            )
            return number + 1, new, cache, max_relative_change(state, new)

        start = (0, self.initial_state(x), core_cache, jnp.inf)
        count, state, core_cache, _ = jax.lax.while_loop(needs_round, run_round, start)
        if self.rounds.exit:
            core_cache = jax.tree.map(lambda w: self.fill_skipped_rounds(w, count, x.shape[1]), core_cache)
        if _keys(cfg).coda:
            coda_bodies = rotate_bodies(bodies, _keys(cfg).prelude + self.core)
            state, coda_cache = run_layers_cached(exec_opts, coda_bodies, state, coda, coda_cache)
        joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), prelude_cache, core_cache, coda_cache)
        return state, joined

    def fill_skipped_rounds(self, cache: Array, count: int | Array, tokens: int) -> Array:
        """Copy these tokens' last round to the rounds they skipped, for later tokens that take more
        rounds."""
        rounds = cache.reshape(-1, self.core, *cache.shape[1:])
        new = jax.lax.dynamic_slice_in_dim(rounds, self.first, tokens, axis=POSITION_AXIS + 1)
        last_round = jnp.minimum(jnp.arange(len(new)), count - 1)
        rounds = jax.lax.dynamic_update_slice_in_dim(
            rounds, new[last_round], self.first, axis=POSITION_AXIS + 1
        )
        return rounds.reshape(cache.shape)

    def normalize_text(self, x: Array) -> Array:
        """Normalize the prelude's output, which every round reads."""
        return rms_norm(x, self.model.text_norm, self.cfg.norm_eps)

    def initial_state(self, x: Array) -> Array:
        """Draw the initial state by each token's position: it is the same wherever a document is in a row,
        and in decoding."""
        key = jax.random.key(0) if self.rounds.key is None else self.rounds.key
        keys = jax.vmap(lambda position: jax.random.fold_in(key, position))(
            self.first + jnp.arange(x.shape[1])
        )
        noise = STATE_STD * jax.vmap(lambda key: jax.random.normal(key, x.shape[2:]))(keys)
        return constrain(noise.astype(x.dtype)[self.positions - self.first], "batch", "sequence", None)


def num_executed_layers(cfg: ModelConfig, rounds: int) -> int:
    """The number of layers that a token passes through with this many rounds."""
    return _keys(cfg).prelude + rounds * (cfg.layers - _keys(cfg).prelude - _keys(cfg).coda) + _keys(cfg).coda


def flops_per_token(
    plain: Callable[[ModelConfig, int], float], cfg: ModelConfig, sequence_length: int
) -> float:
    """Forward and backward FLOPs. A round without gradients only runs forward: a third. `plain` counts those
    of the plain family."""
    backprop = min(_keys(cfg).backprop, _keys(cfg).rounds)
    one_round, two_rounds = (
        plain(replace(cfg, layers=num_executed_layers(cfg, rounds)), sequence_length) for rounds in (1, 2)
    )
    per_round = two_rounds - one_round + 6 * 2 * cfg.embed**2
    return one_round - (two_rounds - one_round) + per_round * (backprop + (_keys(cfg).rounds - backprop) / 3)


def _refuse_export(cfg: ModelConfig, sequence_length: int) -> dict[str, Any]:
    raise UserError(
        f"recurrence.rounds: transformers has no {cfg.use} whose layers are run {_keys(cfg).rounds} times"
    )


def split_layers(layers: PyTree, sizes: Sequence[int]) -> list[PyTree]:
    """Split stacked layers into consecutive parts of these sizes.

    By `split`, since the gradient of an index is an addition to zeros of full size."""
    leaves, tree = jax.tree.flatten(layers)
    parts = zip(*(jax.lax.split(leaf, sizes) for leaf in leaves), strict=True)
    return [jax.tree.unflatten(tree, part) for part in parts]


def rotate_bodies(bodies: Sequence[Body], first: int) -> list[Body]:
    """The bodies of layers `first`, `first + 1`, ..., as `run_layers` repeats them."""
    return [*bodies[first % len(bodies) :], *bodies[: first % len(bodies)]]


def enter_round(model: PyTree, text: Array, state: Array) -> Array:
    """Combine state and text to the input of a round."""
    return project(model.w_state, state, "bsd,de->bse") + project(model.w_text, text, "bsd,de->bse")


def normalize_state(cfg: ModelConfig, model: PyTree, state: Array) -> Array:
    """Normalize the state after a round; it would grow with every round otherwise."""
    return rms_norm(state, model.state_norm, cfg.norm_eps)


def max_relative_change(old: Array, new: Array) -> Array:
    """The norm of the change of a token's state as a share of the state's norm, of the token with the
    most."""
    old, new = old.astype(jnp.float32), new.astype(jnp.float32)
    return (jnp.linalg.norm(new - old, axis=-1) / jnp.linalg.norm(new, axis=-1)).max()
