"""Attention of a torch.nn.Module, intercepted: what goes through transformers' attention interface or torch's
scaled_dot_product_attention runs on our kernels, with packed documents and context parallelism.

A run of a module is described by `CALL`, since torch's functions take no further arguments."""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import torch
from torch import nn
from torch.nn import functional as F
from torchax.tensor import Environment

from headrace.attention import attend
from headrace.errors import UserError
from headrace.nn import sharding
from headrace.nn.attention_mask import Mask
from headrace.nn.module import Array
from headrace.nn.remat import REMAT_POLICIES
from headrace.nn.stack import Execution

ATTENTION = "headrace"  # transformers' name for our attention
UNSUPPORTED_ARGUMENTS = ("s_aux", "position_bias", "head_mask")  # would change what attention computes


@dataclass
class AttentionContext:
    """One run of a module: what its attention needs besides queries, keys and values."""

    name: str  # of the module's class
    causal: bool
    exec_opts: Execution
    segments: Array | None
    shape: tuple[int, ...]  # of the tokens
    scores: list[float] = field(default_factory=list)  # FLOPs per token of each attention that ran


CALL: ContextVar[AttentionContext] = ContextVar("CALL")


@functools.cache
def environment() -> Any:
    """torchax' environment, which runs torch's operations in JAX, with our attention."""
    env = Environment()
    original = env._ops[F.scaled_dot_product_attention].func
    env.override_op_definition(
        F.scaled_dot_product_attention, functools.partial(torch_attention, original, env)
    )
    return env


def compute_dtype() -> torch.dtype:
    """The dtype in which the current run computes."""
    return getattr(torch, CALL.get().exec_opts.compute_dtype)


def constrain_activations(x: object) -> object:
    """Shard activations [b s d] over the mesh. Anything else is returned as it is."""
    call, env = CALL.get(), environment()
    if not isinstance(x, torch.Tensor) or x.ndim != 3 or tuple(x.shape[:2]) != call.shape:
        return x
    return env.j2t_iso(sharding.constrain(env.t2j_iso(x), "batch", "sequence", None))


def run_layer(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run one layer; its backward pass computes again what `compute.remat` does not save."""
    env, remat = environment(), CALL.get().exec_opts.remat
    leaves, tree = jax.tree.flatten((args, kwargs))
    tensor_numbers = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    output_tree: Any = None

    def run_on_arrays(arrays: list[Array]) -> list[Array]:
        nonlocal output_tree
        tensors = dict(zip(tensor_numbers, env.j2t_iso(arrays), strict=True))
        inputs = dict(enumerate(leaves)) | tensors
        args, kwargs = jax.tree.unflatten(tree, inputs.values())
        outputs, output_tree = jax.tree.flatten(jax.tree.map(constrain_activations, forward(*args, **kwargs)))
        return env.t2j_iso(outputs)

    run = run_on_arrays
    if remat != "none":
        run = jax.checkpoint(run_on_arrays, policy=REMAT_POLICIES[remat])
    outputs = env.j2t_iso(run([env.t2j_iso(leaves[number]) for number in tensor_numbers]))
    return jax.tree.unflatten(output_tree, outputs)


def transformers_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Our attention with the signature of transformers' attention interface, for q, k, v [b n s h]."""
    unsupported = [name for name in UNSUPPORTED_ARGUMENTS if options.get(name) is not None]
    if attention_mask is not None or unsupported:
        raise UserError(
            f"model.module: {type(module).__name__} calls attention with {(*unsupported, 'a mask')[0]}, "
            "which is not supported"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = sliding_window
    if window is not None and not causal:
        window = 2 * (window - 1)  # transformers counts to one side, as if the window were causal
    mask, env = Mask(causal, window), environment()
    q, k, v = (env.t2j_iso(x).swapaxes(1, 2) for x in (query, key, value))
    out = run_attention(type(module).__name__, q, k, v, mask, soft_cap=softcap, scale=scaling)
    return env.j2t_iso(out), None


def torch_attention(
    original: Callable[..., Any],
    env: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Our attention with the signature of torch's scaled_dot_product_attention [b n s h]. With a mask of the
    module's own it is the `original`."""
    call = CALL.get()
    is_self_attention = query.ndim == 4 and query.shape[2] == key.shape[2] and key.shape == value.shape
    if attn_mask is None and is_self_attention:
        q, k, v = (env.t2j_iso(x).swapaxes(1, 2) for x in (query, key, value))
        out = run_attention("scaled_dot_product_attention", q, k, v, Mask(is_causal), scale=scale)
        return env.j2t_iso(out.swapaxes(1, 2))
    if call.segments is not None or sharding.context_size() > 1:
        raise UserError(
            f"model.module: {call.name} calls scaled_dot_product_attention with its own mask, which does not "
            "separate packed documents; expected data.isolate_documents: false and mesh.context: 1, or "
            "is_causal"
        )
    return original(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa, env=env)


def run_attention(
    caller: str,
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Array:
    """Run our attention on q, k, v [b s n h]. Raises UserError if the module's attention is not the kind that
    the recipe declares."""
    call = CALL.get()
    if mask.causal != call.causal:
        direction = "is causal" if mask.causal else "is not causal"
        raise UserError(
            f"model.causal: found {str(call.causal).lower()}, and {caller} of {call.name} {direction}"
        )
    if k.shape != v.shape or q.shape[:2] != call.shape:
        raise UserError(f"model.module: {caller} of {call.name} is not self-attention over the text")
    call.scores.append(12 * q.shape[2] * q.shape[3] * mask.keys(q.shape[1]))
    q, k, v = (x.astype(call.exec_opts.dtype) for x in (q, k, v))
    return attend(
        call.exec_opts.attention, q, k, v, mask=mask, segments=call.segments, soft_cap=soft_cap, scale=scale
    )
