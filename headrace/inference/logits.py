"""Logits of a run's model at every position of given tokens."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from headrace.checkpoint.open_run import LoadedRun
from headrace.errors import UserError
from headrace.inference.cast_weights import make_execution
from headrace.low_precision.cast import cast
from headrace.model_wrappers import classification_head, load_family
from headrace.models import ModelConfig
from headrace.nn.linear import project
from headrace.nn.module import Array, PyTree, axes
from headrace.nn.soft_cap import apply_soft_cap
from headrace.nn.stack import Execution


def logits(run: LoadedRun, tokens: Sequence[int] | np.ndarray | Array) -> Array:
    """Compute the logits of a model, float32 [s v] for token ids [s], or [b s v] for [b s].

    A classifier has those of the labels, [s c] or [b s c]. Each new shape is compiled. Raises UserError if
    ids are not in the vocabulary, or the model predicts neither tokens nor labels."""
    recipe = run.recipe
    if recipe.objective.use == "rtd":
        raise UserError(
            f"objective.use: {recipe.run_dir} was trained by rtd: it detects replaced tokens "
            "and predicts none"
        )
    rows = check_tokens(np.asarray(tokens), recipe.model.vocab)
    exec_opts = make_execution(run)
    with jax.set_mesh(run.mesh):
        result = compute_logits(
            run.params, jnp.atleast_2d(rows), recipe.model, exec_opts, recipe.loss.soft_cap
        )
    return result if rows.ndim == 2 else result[0]


def check_tokens(tokens: np.ndarray, vocab: int) -> np.ndarray:
    """Return token ids as int32. Raises UserError if they are not ids [s] or [b s] of the vocabulary."""
    if tokens.ndim not in (1, 2) or tokens.size == 0 or tokens.dtype.kind not in "iu":
        found = f"{tokens.dtype} {list(tokens.shape)}"
        raise UserError(f"tokens: found an array {found}, expected token ids [s] or [b s]")
    if tokens.min() < 0 or tokens.max() >= vocab:
        raise UserError(f"tokens: found ids from {tokens.min()} to {tokens.max()}, expected 0 to {vocab - 1}")
    return tokens.astype(np.int32)


@functools.partial(jax.jit, static_argnames=("cfg", "exec_opts", "soft_cap"))
def compute_logits(
    params: PyTree, tokens: Array, cfg: ModelConfig, exec_opts: Execution, soft_cap: float | None
) -> Array:
    """Compute the logits [b s v], or [b s c] of labels, of tokens [b s]."""
    model = cast(params, axes(load_family(cfg).Model, cfg), exec_opts)
    if classification_head.has_labels(cfg):
        segments = jnp.ones_like(tokens)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        return model.predict_labels(cfg, tokens, exec_opts=exec_opts, segments=segments, positions=positions)
    hidden = model(cfg, tokens, exec_opts=exec_opts)
    return apply_soft_cap(project(model.unembed, hidden, "bsd,vd->bsv").astype(jnp.float32), soft_cap)
