"""Text from a trained decoder: the prompt once through the model, then token by token from the cache.
Diffusion models tell theirs in another order (diffusion.py)."""

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from headrace.checkpoint.open_run import LoadedRun
from headrace.data import pause_tokens
from headrace.errors import UserError
from headrace.inference import diffusion
from headrace.inference.sampling import Sampling, sample_token
from headrace.low_precision.cast import cast
from headrace.model_wrappers import classification_head, load_family
from headrace.model_wrappers.recurrent_depth import RoundSchedule
from headrace.models import fixed_matmul
from headrace.nn.linear import project
from headrace.nn.module import Array, axes
from headrace.nn.stack import Execution


def generate(
    run: LoadedRun,
    prompt: str,
    tokens: int,
    sampling: Sampling,
    reveal: dict[str, Any] | None = None,
    exit: float = 0.0,
    pause: int = 0,
) -> Iterator[str]:
    """Pieces of text as they come, the prompt left out. Ends early where the model ends its text. What cannot
    be continued is refused here, before the first piece is asked for. `reveal` says how a diffusion model
    tells its tokens, `exit` when recurrent depth goes no deeper; `pause` tokens follow the prompt."""
    cfg, tokenizer = run.recipe, run.tokenizer
    classification_head.refuse_classifier(
        cfg, "`headrace eval` says how often it is right, `headrace export` hands it to transformers"
    )
    diffuses = cfg.objective.use == "diffusion"
    if not cfg.model.causal and not diffuses:
        raise UserError(
            f"model.use: {cfg.model.use} reads text in both directions and cannot continue it, unless it is "
            "trained by objective.use: diffusion"
        )
    if reveal and not diffuses:
        raise UserError(f"--{next(iter(reveal))}: expected nothing, since the run is no diffusion model")
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
    if pause:
        ids += [pause_tokens.find_pause_id(tokenizer, "--pause")] * pause
    if not ids:
        raise UserError("--prompt: expected some text, since this tokenizer has no begin-of-text token")
    if diffuses:
        return decode_stream(
            run, ids, diffusion.sample(run, ids, tokens, sampling, diffusion.UnmaskSchedule(**reveal or {}))
        )
    return decode_stream(run, ids, sample(run, ids, tokens, sampling, exit))


def decode_stream(run: LoadedRun, ids: list[int], following: Iterator[int]) -> Iterator[str]:
    tokenizer, ids = run.tokenizer, list(ids)
    assert tokenizer is not None
    # With the prompt: tokenizers that mark the start of a word drop the space before the first.
    shown = tokenizer.decode(ids)
    for token in following:
        if token in (tokenizer.special.eos, tokenizer.special.bos):
            return
        ids.append(token)
        text = tokenizer.decode(ids)
        # Half of a character: the rest comes with the next token.
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(shown) :]
            shown = text


def sample(
    run: LoadedRun, ids: list[int], tokens: int, sampling: Sampling, exit: float = 0.0
) -> Iterator[int]:
    """The tokens that follow `ids`, one by one, without end before there are `tokens` of them. With recurrent
    depth, rounds end where they change less than the share `exit`."""
    cfg = run.recipe.model
    exec_opts = Execution(run.recipe.attention, run.recipe.compute.dtype, matmul=fixed_matmul(cfg))
    if exit:
        exec_opts = replace(exec_opts, rounds=RoundSchedule(cfg.recurrence, exit=exit))
    # Once and not in every step, which would read all weights in float32 for each token.
    names = axes(load_family(cfg).Model, cfg)
    model = jax.jit(lambda params: cast(params, names, exec_opts))(run.params)
    # A round number, so that texts of about the same length share a program.
    cache = model.init_cache(cfg, 1, 128 * math.ceil((len(ids) + tokens) / 128), exec_opts.dtype)
    given = jnp.asarray([ids], jnp.int32)
    for number in range(tokens):
        # Not around the loop: whoever takes the tokens would find the mesh set between them.
        with jax.set_mesh(run.mesh):
            logits, cache = step(model, given, cache, cfg, exec_opts)
            logits = soft_cap_logits(logits, run.recipe.loss.soft_cap)
            token = sample_token(logits, jax.random.fold_in(jax.random.key(sampling.seed), number), sampling)
        yield int(token)
        given = token[None, None]


@functools.partial(jax.jit, static_argnames=("cfg", "exec_opts"), donate_argnames="cache")
def step(model: Any, given: Array, cache: Any, cfg: Any, exec_opts: Execution) -> tuple[Array, Any]:
    """The logits [v] after the given tokens [1 s], and the cache with these."""
    hidden, cache = model.decode(cfg, given, cache, exec_opts=exec_opts)
    return project(model.unembed, hidden[:, -1], "bd,vd->bv").astype(jnp.float32)[0], cache


def soft_cap_logits(logits: Array, cap: float | None) -> Array:
    """Logits as the recipe's `loss.soft_cap` has them."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)
