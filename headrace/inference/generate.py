"""Text generation. A decoder reads the prompt once and then generates token by token from its cache;
diffusion models fill in tokens in another order (diffusion.py)."""

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp

from headrace.checkpoint.open_run import LoadedRun
from headrace.data.pause_tokens import find_pause_id
from headrace.data.tokenizer.tokenizer import Tokenizer
from headrace.errors import InvalidArgument, UserError
from headrace.inference import diffusion
from headrace.inference.cast_weights import cast_weights, make_execution
from headrace.inference.diffusion import UnmaskSchedule
from headrace.inference.sampling import Sampling, sample_token
from headrace.model_wrappers import classification_head
from headrace.model_wrappers.recurrent_depth import RoundSchedule
from headrace.models import Model, ModelConfig
from headrace.nn.linear import project
from headrace.nn.module import Array, PyTree
from headrace.nn.soft_cap import apply_soft_cap
from headrace.nn.stack import Execution

# Caches and rows have a multiple of this many tokens, so that texts of similar length share a program.
LENGTH_MULTIPLE = 128


def generate(
    run: LoadedRun,
    prompt: str,
    max_tokens: int,
    sampling: Sampling,
    *,
    unmask: UnmaskSchedule | None = None,
    exit_share: float = 0.0,
    pause_tokens: int = 0,
) -> Iterator[str]:
    """Generate the text that follows a prompt, in pieces, as they are ready. The prompt is not repeated.

    Ends before `max_tokens` where the model ends its text. Raises UserError at once, not at the first piece,
    if the run cannot generate text. `unmask` is for diffusion models only, `exit_share` ends the rounds of
    recurrent depth early (`RoundSchedule.exit`), and `pause_tokens` pause tokens follow the prompt."""
    is_diffusion = run.recipe.objective.use == "diffusion"
    tokenizer = check_can_generate(run, allow_diffusion=True)
    if unmask is not None and not is_diffusion:
        options = ", ".join(unmask.changed_options())
        raise InvalidArgument(options, "expected nothing, since the run is no diffusion model")
    if not 0 <= exit_share < math.inf:
        raise InvalidArgument("exit_share", f"found {exit_share:g}, expected a share such as 0.03")
    if exit_share and run.recipe.recurrence is None:
        raise InvalidArgument("exit_share", "expected nothing: the run has no recurrent depth")
    if max_tokens < 1:
        raise InvalidArgument("tokens", "expected 1 or more")
    prompt_ids = _encode_prompt(tokenizer, prompt, pause_tokens)
    if is_diffusion:
        ids = diffusion.sample_tokens(run, prompt_ids, max_tokens, sampling, unmask or UnmaskSchedule())
    else:
        ids = sample_tokens(run, prompt_ids, max_tokens, sampling, exit_share=exit_share)
    return decode_stream(tokenizer, prompt_ids, ids)


def check_can_generate(run: LoadedRun, *, allow_diffusion: bool = False) -> Tokenizer:
    """Check that a run's model can continue a text, and return its tokenizer. Raises UserError if it cannot,
    or if it is a diffusion model and these are not allowed."""
    recipe = run.recipe
    classification_head.refuse_classifier(
        recipe, "`headrace eval` reports its accuracy, `headrace export` converts it for transformers"
    )
    is_diffusion = recipe.objective.use == "diffusion"
    if is_diffusion and not allow_diffusion:
        raise UserError(
            "objective.use: found diffusion, which does not generate tokens in the order of the text; use "
            "`headrace generate`"
        )
    if not recipe.model.causal and not is_diffusion:
        hint = ", unless it is trained with objective.use: diffusion" if allow_diffusion else ""
        raise UserError(
            f"model.use: {recipe.model.use} reads text in both directions and cannot continue it{hint}"
        )
    if run.tokenizer is None:
        raise UserError("no tokenizer.json in the run folder; copy the model's tokenizer there")
    return run.tokenizer


def _encode_prompt(tokenizer: Tokenizer, prompt: str, pause_tokens: int) -> list[int]:
    try:
        prompt.encode()
    except UnicodeEncodeError:  # bytes of the command line that Python could not decode
        raise InvalidArgument("prompt", "found bytes that are not UTF-8, expected text in UTF-8") from None
    bos = tokenizer.special.bos
    prompt_ids = ([] if bos is None else [bos]) + tokenizer.encode(prompt)
    if pause_tokens:
        prompt_ids += [find_pause_id(tokenizer, "pause_tokens")] * pause_tokens
    if not prompt_ids:
        raise InvalidArgument("prompt", "expected some text, since this tokenizer has no begin-of-text token")
    return prompt_ids


def decode_stream(tokenizer: Tokenizer, prompt_ids: list[int], ids: Iterator[int]) -> Iterator[str]:
    """Decode token ids that follow a prompt to pieces of text, up to a begin- or end-of-text token."""
    # Decoded with the prompt: tokenizers that mark the start of a word drop the space before the first.
    all_ids = list(prompt_ids)
    decoded = tokenizer.decode(all_ids)
    for token in ids:
        if token in (tokenizer.special.eos, tokenizer.special.bos):
            return
        all_ids.append(token)
        text = tokenizer.decode(all_ids)
        # Only a part of a character so far: the next token has the remainder.
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(decoded) :]
            decoded = text


def sample_tokens(
    run: LoadedRun,
    prompt_ids: list[int],
    count: int,
    sampling: Sampling,
    *,
    exit_share: float = 0.0,
) -> Iterator[int]:
    """Sample the `count` tokens that follow a prompt, one by one. An end-of-text token does not end it."""
    cfg: ModelConfig = run.recipe.model
    exec_opts = make_execution(run)
    if exit_share:
        assert cfg.recurrence is not None
        exec_opts = replace(exec_opts, rounds=RoundSchedule(cfg.recurrence.rounds, exit=exit_share))
    model = cast_weights(run, exec_opts)
    length = LENGTH_MULTIPLE * math.ceil((len(prompt_ids) + count) / LENGTH_MULTIPLE)
    cache = model.init_cache(cfg, 1, length, exec_opts.dtype)
    new_tokens = jnp.asarray([prompt_ids], jnp.int32)
    for index in range(count):
        # Not around the loop: the mesh would be set in the caller's code between two tokens.
        with jax.set_mesh(run.mesh):
            logits, cache = decode_step(model, new_tokens, cache, cfg, exec_opts)
            logits = apply_soft_cap(logits, run.recipe.loss.soft_cap)
            key = jax.random.fold_in(jax.random.key(sampling.seed), index)
            token = sample_token(logits, key, sampling)
        yield int(token)
        new_tokens = token[None, None]


@functools.partial(jax.jit, static_argnames=("cfg", "exec_opts"), donate_argnames="cache")
def decode_step(
    model: Model, tokens: Array, cache: PyTree, cfg: ModelConfig, exec_opts: Execution
) -> tuple[Array, PyTree]:
    """Compute the logits [v] of the token that follows tokens [1 s]. Returns the updated cache too."""
    hidden, cache = model.decode(cfg, tokens, cache, exec_opts=exec_opts)
    return project(model.unembed, hidden[:, -1], "bd,vd->bv").astype(jnp.float32)[0], cache
