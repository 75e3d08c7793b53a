"""Recurrent depth (Huginn, arXiv 2502.05171): the layers in the middle of a model are run round after round,
each time on a state and on what the first layers made of the text. How many rounds there are is drawn at each
step of training, so that it can be chosen when the model is used: more for what is harder. For any family
whose layers go through execution.py; its own file knows nothing of it."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from headrace.errors import UserError
from headrace.nn.stack import Execution, layers_in_turn, scan_in_turn
from headrace.nn.norm import rms_norm
from headrace.nn.sharding import constrain
from headrace.nn.module import Array, Axes, module, ones, weight
from headrace.nn.linear import project

SPREAD = 0.5  # of the logarithm of the rounds that training draws
START = math.sqrt(2 / 5)  # standard deviation of the first state
POSITIONS = 2  # the axis of positions in a cache [l b t ...]

Bodies = Sequence[Callable[..., Any]]


@dataclass(frozen=True)
class Rounds:
    """How often the middle is run. The last `learnt` rounds have gradients. With `exit`, decoding ends them
    where one changes the state of no token by more than this share of it."""

    count: Any
    key: Array | None = None  # of the first state
    learnt: int = 0
    exit: float = 0.0


def drawn(how: Execution, cfg: Any, key: Array) -> Execution:
    """The rounds of one step of training, the same for all of its rows: a Poisson draw whose mean is drawn
    too, with a mean of `cfg.recurrence` on the whole, and one more."""
    if not is_recurrent(cfg):
        return how
    mean_key, count_key, state_key = jax.random.split(jax.random.fold_in(key, 0xDEE9), 3)
    spread = SPREAD * jax.random.normal(mean_key)
    mean = jnp.exp(spread + math.log(cfg.recurrence) - SPREAD**2 / 2)
    count = jax.random.poisson(count_key, mean, dtype=jnp.int32) + 1
    return replace(how, rounds=Rounds(count, state_key, cfg.backprop))


def is_recurrent(cfg: Any) -> bool:
    return getattr(cfg, "recurrence", 0) > 0


@functools.cache
def family(plain: Any) -> Any:
    """A model file whose model has recurrent depth."""
    changed = dict(Model=recurrent(plain.Model), flops=functools.partial(flops, plain.flops), to_hf=to_hf)
    return SimpleNamespace(**vars(plain) | changed)


def small(key: Array, axes: Axes, shape: tuple[int, ...], cfg: Any) -> Array:
    return math.sqrt(2 / (5 * cfg.embed)) * jax.random.normal(key, shape, jnp.float32)


def recurrent(plain: Any) -> Any:
    """A family's model with the weights by which state and text enter a round."""

    @module
    class Recurrent(plain):
        w_state: Array = weight("embed", "state:embed", init=small)
        w_text: Array = weight("embed", "state:embed", init=small)
        text_norm: Array = weight("embed", init=ones)
        state_norm: Array = weight("embed", init=ones)

        def __call__(
            self,
            cfg: Any,
            tokens: Array,
            *,
            how: Execution,
            segments: Array | None = None,
            positions: Array | None = None,
        ) -> Array:
            if positions is None:
                positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
            loop = Loop(cfg, self, how.rounds or Rounds(cfg.recurrence), positions)
            how = replace(how, loop=loop)
            return plain.__call__(self, cfg, tokens, how=how, segments=segments, positions=positions)

        def cache(self, cfg: Any, batch: int, length: int, dtype: Any) -> Any:
            """One for each layer of each round: what a round reads of earlier tokens is of the same round."""
            return plain.cache(self, replace(cfg, layers=executed(cfg, cfg.recurrence)), batch, length, dtype)

        def decode(self, cfg: Any, tokens: Array, cache: Any, *, how: Execution) -> tuple[Array, Any]:
            positions = jnp.broadcast_to(cache.length + jnp.arange(tokens.shape[1]), tokens.shape)
            loop = Loop(cfg, self, how.rounds or Rounds(cfg.recurrence), positions, cache.length)
            return plain.decode(self, cfg, tokens, cache, how=replace(how, loop=loop))

    return Recurrent


@dataclass(frozen=True)
class Loop:
    """What execution.py runs in the place of a plain stack of layers."""

    cfg: Any
    model: Any
    rounds: Rounds
    positions: Array
    first: Any = 0  # the least position there is

    @property
    def core(self) -> int:
        return self.cfg.layers - self.cfg.prelude - self.cfg.coda

    def run(self, how: Execution, bodies: Bodies, x: Array, stack: Any) -> Array:
        how = replace(how, loop=None)
        before, core, after = _cut(stack, (self.cfg.prelude, self.core, self.cfg.coda))
        if self.cfg.prelude:
            x = layers_in_turn(how, bodies, x, before)
        text, state = self.text(x), self.start(x)
        middle = _turned(bodies, self.cfg.prelude)

        def once(model: Any, core: Any, text: Array, state: Array) -> Array:
            entered = _entered(model, text, state)
            return _leaving(self.cfg, model, layers_in_turn(how, middle, entered, core))

        learnt = self.rounds.learnt
        free = jnp.maximum(self.rounds.count - learnt, 0)
        given = jax.lax.stop_gradient((self.model, core, text))
        state = jax.lax.fori_loop(0, free, lambda _, state: once(*given, state), state)
        if learnt:

            def learning(state: Array, number: Array) -> tuple[Array, None]:
                new = once(self.model, core, text, state)
                return jnp.where(number < self.rounds.count, new, state), None

            state, _ = jax.lax.scan(learning, state, jnp.arange(learnt))
        if self.cfg.coda:
            state = layers_in_turn(how, _turned(bodies, self.cfg.prelude + self.core), state, after)
        return state

    def decode(self, bodies: Bodies, x: Array, stack: Any, cache: Any) -> tuple[Array, Any]:
        """As `run`, from a cache and with it."""
        cfg, most = self.cfg, self.cfg.recurrence
        sizes = cfg.prelude, self.core, cfg.coda
        before, core, after = _cut(stack, sizes)
        old_before, old, old_after = _cut(cache, (cfg.prelude, most * self.core, cfg.coda))
        new_before, new_after = old_before, old_after
        if cfg.prelude:
            x, new_before = scan_in_turn(bodies, x, (before, old_before))
        text, middle = self.text(x), _turned(bodies, cfg.prelude)

        def going(carry: tuple[Any, ...]) -> Array:
            number, _, _, change = carry
            return (number < most) & (change > self.rounds.exit) if self.rounds.exit else number < most

        def once(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            number, state, kept, _ = carry
            layer = number * self.core
            own = jax.tree.map(lambda w: jax.lax.dynamic_slice_in_dim(w, layer, self.core), kept)
            new, own = scan_in_turn(middle, _entered(self.model, text, state), (core, own))
            new = _leaving(cfg, self.model, new)
            kept = jax.tree.map(
                lambda w, part: jax.lax.dynamic_update_slice_in_dim(w, part, layer, 0), kept, own
            )
            return number + 1, new, kept, _change(state, new)

        count, state, new, _ = jax.lax.while_loop(going, once, (0, self.start(x), old, jnp.inf))
        if self.rounds.exit:
            new = jax.tree.map(lambda w: self.as_in_the_last(w, count, x.shape[1]), new)
        if cfg.coda:
            state, new_after = scan_in_turn(
                _turned(bodies, cfg.prelude + self.core), state, (after, old_after)
            )
        joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), new_before, new, new_after)
        return state, joined

    def as_in_the_last(self, cache: Array, count: Any, tokens: int) -> Array:
        """Rounds that these tokens had no more need of, for later tokens that have: as their last one."""
        rounds = cache.reshape(-1, self.core, *cache.shape[1:])
        own = jax.lax.dynamic_slice_in_dim(rounds, self.first, tokens, axis=POSITIONS + 1)
        reached = jnp.minimum(jnp.arange(len(own)), count - 1)
        rounds = jax.lax.dynamic_update_slice_in_dim(rounds, own[reached], self.first, axis=POSITIONS + 1)
        return rounds.reshape(cache.shape)

    def text(self, x: Array) -> Array:
        return rms_norm(x, self.model.text_norm, self.cfg.norm_eps)

    def start(self, x: Array) -> Array:
        """Noise by the position of each token: the same wherever its document lies in a row, and in
        decoding."""
        key = jax.random.key(0) if self.rounds.key is None else self.rounds.key
        keys = jax.vmap(lambda position: jax.random.fold_in(key, position))(
            self.first + jnp.arange(x.shape[1])
        )
        noise = START * jax.vmap(lambda key: jax.random.normal(key, x.shape[2:]))(keys)
        return constrain(noise.astype(x.dtype)[self.positions - self.first], "batch", "sequence", None)


def executed(cfg: Any, rounds: int) -> int:
    """How many layers a text goes through."""
    return cfg.prelude + rounds * (cfg.layers - cfg.prelude - cfg.coda) + cfg.coda


def flops(plain: Callable[[Any, int], float], cfg: Any, sequence: int) -> float:
    """Forward and backward FLOPs a token: rounds without gradient are forward alone, a third."""
    learnt = min(cfg.backprop, cfg.recurrence)
    once, twice = (plain(replace(cfg, layers=executed(cfg, rounds)), sequence) for rounds in (1, 2))
    one_round = twice - once + 6 * 2 * cfg.embed**2
    return once - (twice - once) + one_round * (learnt + (cfg.recurrence - learnt) / 3)


def to_hf(cfg: Any, sequence: int) -> dict[str, Any]:
    raise UserError(
        f"model.recurrence: transformers has no {cfg.use} whose layers are run {cfg.recurrence} times"
    )


def _cut(stack: Any, sizes: Sequence[int]) -> list[Any]:
    """The layers of a stack in parts of these sizes. By splitting, since the gradient of an index is an
    addition to zeros as large as the whole."""
    leaves, tree = jax.tree.flatten(stack)
    parts = zip(*(jax.lax.split(leaf, sizes) for leaf in leaves), strict=True)
    return [jax.tree.unflatten(tree, part) for part in parts]


def _turned(bodies: Bodies, first: int) -> Bodies:
    """The bodies of layers in turn, from this layer on."""
    return [*bodies[first % len(bodies) :], *bodies[: first % len(bodies)]]


def _entered(model: Any, text: Array, state: Array) -> Array:
    return project(model.w_state, state, "bsd,de->bse") + project(model.w_text, text, "bsd,de->bse")


def _leaving(cfg: Any, model: Any, state: Array) -> Array:
    """Of one size in every round, or what each adds would pile up."""
    return rms_norm(state, model.state_norm, cfg.norm_eps)


def _change(old: Array, new: Array) -> Array:
    """Of the token whose state changes most, as a share of it."""
    old, new = old.astype(jnp.float32), new.astype(jnp.float32)
    return (jnp.linalg.norm(new - old, axis=-1) / jnp.linalg.norm(new, axis=-1)).max()
