"""Text from a trained decoder: the prompt once through the model, then token by token from the cache."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from millrace.errors import UserError
from millrace.execution import Execution, cast, own_products
from millrace.folder import Opened
from millrace.module import Array, axes
from millrace.objective import file
from millrace.project import project


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 takes the likeliest token; `top_k` and `top_p` leave the unlikely ones out."""

    temperature: float = 0.8
    top_k: int = 50  # 0: all
    top_p: float = 1.0
    seed: int = field(default=0, compare=False)  # no part of what is compiled

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:
            raise UserError(f"--seed: expected a number from 0 to {2**32 - 1}")
        if not self.temperature >= 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise UserError(
                "expected --temperature 0 or more, --top-k 0 or more and --top-p above 0 and at most 1"
            )


def generate(run: Opened, prompt: str, tokens: int, sampling: Sampling) -> Iterator[str]:
    """Pieces of text as they come, the prompt left out. Ends early where the model ends its text. What cannot
    be continued is refused here, before the first piece is asked for."""
    cfg, tokenizer = run.cfg, run.tokenizer
    if not cfg.model.causal:
        raise UserError(f"model.use: {cfg.model.use} reads text in both directions and cannot continue it")
    if tokenizer is None:
        raise UserError("no tokenizer.json in the run folder; copy the one the model was trained with there")
    if tokens < 1:
        raise UserError("--tokens: expected 1 or more")
    try:
        prompt.encode()
    except UnicodeEncodeError:  # bytes of the command line that Python could not decode
        raise UserError("--prompt: found bytes that are not UTF-8, expected text in UTF-8") from None
    special = tokenizer.special
    ids = ([] if special.bos is None else [special.bos]) + tokenizer.encode(prompt)
    if not ids:
        raise UserError("--prompt: expected some text, since this tokenizer has no begin-of-text token")
    return pieces(run, ids, tokens, sampling)


def pieces(run: Opened, ids: list[int], tokens: int, sampling: Sampling) -> Iterator[str]:
    tokenizer, ids = run.tokenizer, list(ids)
    assert tokenizer is not None
    # With the prompt: tokenizers that mark the start of a word drop the space before the first.
    shown = tokenizer.decode(ids)
    for token in sample(run, ids, tokens, sampling):
        if token in (tokenizer.special.eos, tokenizer.special.bos):
            return
        ids.append(token)
        text = tokenizer.decode(ids)
        # Half of a character: the rest comes with the next token.
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(shown) :]
            shown = text


def sample(run: Opened, ids: list[int], tokens: int, sampling: Sampling) -> Iterator[int]:
    """The tokens that follow `ids`, one by one, without end before there are `tokens` of them."""
    cfg = run.cfg.model
    how = Execution(run.cfg.attention, run.cfg.memory.compute, products=own_products(cfg))
    # Once and not in every step, which would read all weights in float32 for each token.
    names = axes(file("models", cfg).Model, cfg)
    model = jax.jit(lambda params: cast(params, names, how))(run.params)
    # A round number, so that texts of about the same length share a program.
    cache = model.cache(cfg, 1, 128 * math.ceil((len(ids) + tokens) / 128), how.dtype)
    given = jnp.asarray([ids], jnp.int32)
    for number in range(tokens):
        # Not around the loop: whoever takes the tokens would find the mesh set between them.
        with jax.set_mesh(run.devices):
            logits, cache = step(model, given, cache, cfg, how)
            if run.cfg.loss.soft_cap is not None:
                logits = run.cfg.loss.soft_cap * jnp.tanh(logits / run.cfg.loss.soft_cap)
            token = draw(logits, jax.random.fold_in(jax.random.key(sampling.seed), number), sampling)
        yield int(token)
        given = token[None, None]


@functools.partial(jax.jit, static_argnames=("cfg", "how"), donate_argnames="cache")
def step(model: Any, given: Array, cache: Any, cfg: Any, how: Execution) -> tuple[Array, Any]:
    """The logits [v] after the given tokens [1 s], and the cache with these."""
    hidden, cache = model.decode(cfg, given, cache, how=how)
    return project(model.unembed, hidden[:, -1], "bd,vd->bv").astype(jnp.float32)[0], cache


@functools.partial(jax.jit, static_argnames="sampling")
def draw(logits: Array, key: Array, sampling: Sampling) -> Array:
    """One token from logits [v]: of the `top_k` likeliest, the fewest whose chances reach `top_p`."""
    if sampling.temperature == 0:
        return logits.argmax().astype(jnp.int32)
    order = jnp.argsort(-logits)
    ordered = logits[order] / sampling.temperature
    if sampling.top_k:
        ordered = jnp.where(jnp.arange(logits.size) < sampling.top_k, ordered, -jnp.inf)
    if sampling.top_p < 1:
        chances = jax.nn.softmax(ordered)
        before = jnp.cumsum(chances) - chances
        ordered = jnp.where(before < sampling.top_p, ordered, -jnp.inf)
    return order[jax.random.categorical(key, ordered)].astype(jnp.int32)
