"""A torch.nn.Module as a JAX function, by torchax: the only file that imports torch. The module is made once
without its weights; a step runs its `forward` on arrays. Its attention, where it goes through transformers'
attention interface or torch's scaled_dot_product_attention, is ours: kernels, packed documents and all."""

import functools
import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torchax.tensor import Environment

from headrace.config import reader as config
from headrace.nn import sharding as mesh
from headrace.errors import UserError
from headrace.nn.stack import REMAT, Execution
from headrace.attention import Mask, attend
from headrace.nn.module import Array, Axes

ATTENTION = "headrace"  # how transformers knows it
POSITIONS = ("position_ids", "positions")  # what `forward` may call them
CHANGES = ("s_aux", "position_bias", "head_mask")  # what would change attention, and ours has not


@dataclass
class Call:
    """One run of a module: what its attention is told beside queries, keys and values."""

    name: str
    causal: bool
    how: Execution
    segments: Array | None
    shape: tuple[int, ...]  # of the tokens
    scores: list[float] = field(default_factory=list)  # FLOPs a token of each attention


CALL: ContextVar[Call] = ContextVar("CALL")


@dataclass(frozen=True)
class Outline:
    """All that is known of a module without its weights."""

    module: nn.Module
    axes: dict[str, Axes]
    shapes: dict[str, tuple[int, ...]]
    buffers: dict[str, np.ndarray]  # constants, such as the frequencies of rotary positions
    looked_up: frozenset[str]  # weights of embeddings
    head: tuple[str, str | None]  # the names of its matrix and its bias
    width: int


@functools.cache
def outline(cfg: Any) -> Outline:
    """The module with nothing in the place of its weights, its head giving on what it gets."""
    with Weightless():
        made = make(cfg)
    head = find_head(cfg, made)
    weights = dict(made.named_parameters())
    names = {id(weight): name for name, weight in weights.items()}
    tables = [part for part in made.modules() if isinstance(part, nn.Embedding)]
    looked_up = frozenset(names[id(table.weight)] for table in tables)
    ours = names[id(head.weight)], None if head.bias is None else names[id(head.bias)]
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    axes = {
        name: axes_of(shape, head.weight.shape, alone=name not in looked_up | {ours[0]})
        for name, shape in shapes.items()
    }
    buffers = {name: host(buffer) for name, buffer in made.named_buffers()}
    for table in tables:
        table.register_forward_hook(lambda table, inputs, rows: laid_out(rows.to(compute())))
    for layer in layers(made):
        layer.forward = functools.partial(run_layer, layer.forward)
    head.forward = lambda hidden: hidden  # type: ignore[assignment,method-assign]
    return Outline(made, axes, shapes, buffers, looked_up, ours, head.in_features)


def make(cfg: Any) -> nn.Module:
    """The module that a recipe names, dropout off."""
    cls: Any = find_class(cfg.module)
    settings = config.to_dict(cfg)["config"] | {"vocab_size": cfg.vocab}
    try:
        if is_transformers(cls):
            made = cls(cls.config_class(**settings, attn_implementation=ATTENTION))
            made.config.use_cache = False
        else:
            made = cls(**settings)
    except Exception as error:  # whatever the class has to say of its settings
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"model.config: {cfg.module} cannot be made with {settings}: {said}") from error
    for key in ("final_logit_softcapping", "attention_chunk_size"):
        if getattr(getattr(made, "config", None), key, None) is not None:
            instead = "; loss.soft_cap does the same" if key.startswith("final") else ""
            raise UserError(f"model.config: {key}: expected null, since it is not done here{instead}")
    return made.eval()


def find_class(path: str) -> type[nn.Module]:
    """By `package.module:Class`, or `file.py:Class` as seen from here."""
    place, _, name = path.rpartition(":")
    try:
        if place.endswith(".py"):
            if not Path(place).is_file():
                raise UserError(f"model.module: found {path}, and there is no file {place}")
            spec: Any = importlib.util.spec_from_file_location(Path(place).stem, place)
            found = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(found)
        else:
            found = importlib.import_module(place)
        cls = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"model.module: found {path}, which cannot be imported: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise UserError(f"model.module: found {path}, expected a class of torch.nn.Module")
    return cls


def is_transformers(cls: type) -> bool:
    if not any(base.__module__ == "transformers.modeling_utils" for base in cls.__mro__):
        return False
    from transformers import AttentionInterface

    # Without a mask function of the same name none is made: ours knows the documents.
    AttentionInterface.register(ATTENTION, transformers_attention)
    return True


class Weightless(TorchFunctionMode):
    """Memory that is only reserved is not even that: layers of any size are made at once. What has values
    from the start, such as buffers, is made as ever."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.empty and kwargs.get("device") is None:
            kwargs = kwargs | {"device": "meta"}
        return function(*args, **kwargs)


def find_head(cfg: Any, made: nn.Module) -> nn.Linear:
    parts = dict(made.named_modules())
    if cfg.head != "auto":
        head = parts.get(cfg.head)
        if not isinstance(head, nn.Linear):
            raise UserError(
                f"model.head: found {cfg.head}, expected the name of an nn.Linear in {cfg.module}"
            )
    elif is_transformers(type(made)):
        head = made.get_output_embeddings()  # type: ignore[operator]
        if not isinstance(head, nn.Linear):
            raise UserError(
                f"model.module: found {cfg.module}, expected a class that tells tokens, as ...ForCausalLM or "
                "...ForMaskedLM"
            )
    else:
        fit = [name for name, part in parts.items() if getattr(part, "out_features", 0) == cfg.vocab]
        if len(fit) != 1 or not isinstance(parts[fit[0]], nn.Linear):
            raise UserError(
                f"model.head: expected the name of the nn.Linear that makes the logits, since {len(fit)} "
                f"parts of {cfg.module} give as many numbers as there are tokens, {cfg.vocab}"
            )
        head = parts[fit[0]]
    assert isinstance(head, nn.Linear)
    return head


def axes_of(shape: tuple[int, ...], head: tuple[int, ...], *, alone: bool) -> Axes:
    """Names for the mesh: the width of the model goes over `fsdp`, and so does the largest axis where none is
    as wide; the vocabulary, or else the largest of the others, over `tensor`."""
    vocab, width = head
    names = [""] * len(shape)
    if shape:
        wide = [axis for axis, size in enumerate(shape) if size == width] or [int(np.argmax(shape))]
        names[wide[-1]] = "embed"
        others = [axis for axis in range(len(shape)) if axis != wide[-1]]
        if others:
            largest = max(others, key=lambda axis: shape[axis])
            names[largest] = "vocab" if shape[largest] == vocab and not alone else "mlp"
        elif shape[0] == vocab != width:
            names[0] = "vocab"
    # One matrix for each of the first axis, as experts have them.
    return Axes(tuple(names), stacked=max(len(shape) - 2, 0), alone=alone)


def layers(made: nn.Module) -> list[nn.Module]:
    """The parts of lists whose parts are all alike; of lists within them, the outer one's."""
    found: dict[str, nn.Module] = {}
    for name, part in made.named_modules():
        alike = isinstance(part, nn.ModuleList | nn.Sequential) and len({type(one) for one in part}) == 1
        if alike and len(part) > 1 and not any(name.startswith(f"{outer}.") for outer in found):
            found |= {f"{name}.{number}": one for number, one in enumerate(part)}
    return list(found.values())


def fresh(cfg: Any, seed: int) -> dict[str, np.ndarray]:
    """The first weights, as the module's own code draws them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return {name: host(weight).astype(np.float32) for name, weight in make(cfg).named_parameters()}


def filled(cfg: Any, weights: dict[str, Any]) -> nn.Module:
    """The torch module with these weights, to be used without us."""
    made = make(cfg)
    tensors = {name: torch.tensor(np.asarray(weight, np.float32)) for name, weight in weights.items()}
    made.load_state_dict(tensors, strict=False)  # not strict: tied weights have one name here
    return made


def settings(cfg: Any) -> dict[str, Any]:
    """What config.json says of it."""
    made: Any = outline(cfg).module
    if is_transformers(type(made)):
        theirs = made.config.to_dict() | {"architectures": [type(made).__name__]}
        return theirs | ({"use_cache": True} if "use_cache" in theirs else {})
    return {"module": cfg.module, "config": config.to_dict(cfg)["config"], "vocab_size": cfg.vocab}


def host(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()


def forward(
    cfg: Any,
    weights: dict[str, Array],
    tokens: Array,
    *,
    how: Execution,
    segments: Array | None,
    positions: Array,
) -> Array:
    """What the module gives to its head, [b s d]."""
    return run(cfg, weights, tokens, how=how, segments=segments, positions=positions)[0]


def run(
    cfg: Any,
    weights: dict[str, Array],
    tokens: Array,
    *,
    how: Execution,
    segments: Array | None,
    positions: Array,
) -> tuple[Array, Call]:
    known = outline(cfg)
    if how.products != "compute":
        raise UserError(
            f"memory.products: found {how.products}, expected compute, since torch multiplies here"
        )
    call = Call(cfg.module, cfg.causal, how, segments, tokens.shape)
    takes = inspect.signature(known.module.forward).parameters
    given = {name: positions for name in POSITIONS if name in takes} | (
        {"segments": segments} if "segments" in takes and segments is not None else {}
    )
    if mesh.parts_of_a_row() > 1 and not set(POSITIONS) & set(given):
        raise UserError(f"mesh.context: expected 1, since forward of {cfg.module} takes no position_ids")
    # Embeddings and the head stay as they are: what is looked up is then in the compute dtype.
    kept = known.looked_up | set(known.head)
    arrays = {name: w if name in kept else w.astype(how.dtype) for name, w in weights.items()}
    env, token = environment(), CALL.set(call)
    try:
        with env, torch.no_grad():
            state, (ids, named) = env.j2t_iso((arrays | constants(known), (tokens, given)))
            out = torch.func.functional_call(known.module, state, (ids,), named)
            out = getattr(out, "logits", out[0] if isinstance(out, tuple) else out)
            hidden = env.t2j_iso(out)
    finally:
        CALL.reset(token)
    check(cfg, call, hidden, known, "segments" in given)
    return hidden.astype(how.dtype), call


def constants(known: Outline) -> dict[str, Array]:
    return {name: jnp.asarray(buffer) for name, buffer in known.buffers.items()}


def check(cfg: Any, call: Call, hidden: Any, known: Outline, knows_segments: bool) -> None:
    """That it did what was asked for, as far as can be seen."""
    wanted = (*call.shape, known.width)
    if getattr(hidden, "shape", None) != wanted:
        found = getattr(hidden, "shape", type(hidden).__name__)
        raise UserError(
            f"model.module: {cfg.module} gives {found}, expected {wanted}: forward is to end with its head, "
            "and to give a tensor or something with `logits`"
        )
    if call.scores:
        return
    if is_transformers(type(known.module)):
        raise UserError(f"model.module: the attention of {cfg.module} is not open to others, as ours must be")
    if call.segments is not None and not knows_segments:
        raise UserError(
            f"data.isolate: expected false, since forward of {cfg.module} takes no `segments`, nor calls "
            "torch's scaled_dot_product_attention, and so cannot tell packed documents apart"
        )


@functools.cache
def environment() -> Any:
    """Torch's operations as JAX's, and attention as ours."""
    env = Environment()
    plain = env._ops[F.scaled_dot_product_attention].func
    env.override_op_definition(F.scaled_dot_product_attention, functools.partial(torch_attention, plain, env))
    return env


def compute() -> torch.dtype:
    return getattr(torch, CALL.get().how.compute)


def laid_out(x: Any) -> Any:
    """Activations [b s d] as the mesh splits them."""
    call, env = CALL.get(), environment()
    if not isinstance(x, torch.Tensor) or x.ndim != 3 or tuple(x.shape[:2]) != call.shape:
        return x
    return env.j2t_iso(mesh.constrain(env.t2j_iso(x), "batch", "sequence", None))


def run_layer(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """One layer, of which the backward pass finds in memory what `memory.remat` says."""
    env, remat = environment(), CALL.get().how.remat
    leaves, tree = jax.tree.flatten((args, kwargs))
    told = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    rest: Any = None

    def pure(arrays: list[Array]) -> list[Array]:
        nonlocal rest
        inputs = dict(enumerate(leaves)) | dict(zip(told, env.j2t_iso(arrays), strict=True))
        args, kwargs = jax.tree.unflatten(tree, inputs.values())
        outs, rest = jax.tree.flatten(jax.tree.map(laid_out, forward(*args, **kwargs)))
        return env.t2j_iso(outs)

    arrays = [env.t2j_iso(leaves[number]) for number in told]
    if remat != "none":
        pure = jax.checkpoint(pure, policy=REMAT[remat])
    outs = env.j2t_iso(pure(arrays))
    return jax.tree.unflatten(rest, outs)


def transformers_attention(
    module: nn.Module,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **more: Any,
) -> tuple[Any, None]:
    """What transformers' attention interface calls, with q, k, v [b n s h]."""
    changes = [name for name in CHANGES if more.get(name) is not None]
    if attention_mask is not None or changes:
        raise UserError(
            f"model.module: {type(module).__name__} wants attention with {(*changes, 'a mask')[0]}, which is "
            "not done here"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = sliding_window
    if window is not None and not causal:
        window = 2 * (window - 1)  # it reaches as far to either side as a causal one reaches back
    mask, env = Mask(causal, window), environment()
    q, k, v = (env.t2j_iso(x).swapaxes(1, 2) for x in (query, key, value))
    return env.j2t_iso(attended(type(module).__name__, q, k, v, mask, soft_cap=softcap, scale=scaling)), None


def torch_attention(
    plain: Callable[..., Any],
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
    """torch's scaled_dot_product_attention [b n s h], with a mask of its own as ever."""
    call = CALL.get()
    alike = query.ndim == 4 and query.shape[2] == key.shape[2] and key.shape == value.shape
    if attn_mask is None and alike:
        q, k, v = (env.t2j_iso(x).swapaxes(1, 2) for x in (query, key, value))
        mixed = attended("scaled_dot_product_attention", q, k, v, Mask(is_causal), scale=scale)
        return env.j2t_iso(mixed.swapaxes(1, 2))
    if call.segments is not None or mesh.parts_of_a_row() > 1:
        raise UserError(
            f"model.module: {call.name} calls scaled_dot_product_attention with a mask of its own, which "
            "tells no packed documents apart; expected data.isolate: false and mesh.context: 1, or is_causal"
        )
    return plain(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa, env=env)


def attended(who: str, q: Array, k: Array, v: Array, mask: Mask, **how: Any) -> Array:
    call = CALL.get()
    if mask.causal != call.causal:
        sees = "only what came before" if mask.causal else "both sides"
        raise UserError(f"model.causal: found {call.causal}, and {who} of {call.name} sees {sees}")
    if k.shape != v.shape or q.shape[:2] != call.shape:
        raise UserError(f"model.module: {who} of {call.name} is not attention of a text to itself")
    call.scores.append(12 * q.shape[2] * q.shape[3] * mask.keys(q.shape[1]))
    q, k, v = (x.astype(call.how.dtype) for x in (q, k, v))
    return attend(call.how.attention, q, k, v, mask=mask, segments=call.segments, **how)


@functools.cache
def flops(cfg: Any, sequence: int) -> float:
    """Its attention is counted by running it once on shapes."""
    known = outline(cfg)
    scores: list[float] = []

    def once(weights: Any, tokens: Array) -> Array:
        how = Execution(config.part_class("attention", "xla")())
        hidden, call = run(cfg, weights, tokens, how=how, segments=None, positions=tokens)
        scores.extend(call.scores)
        return hidden

    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in known.shapes.items()}
    jax.eval_shape(once, shapes, jax.ShapeDtypeStruct((1, sequence), jnp.int32))
    free = known.looked_up - {known.head[0]}
    multiplied = [math.prod(shape) for name, shape in known.shapes.items() if name not in free]
    return 6 * sum(multiplied) + sum(scores)
