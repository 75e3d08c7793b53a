"""A torch.nn.Module as a JAX function, by torchax. With _torch_attention.py the only file that imports torch.

The module is made once, without memory for its weights; a step runs its `forward` on arrays."""

import functools
import importlib
import importlib.util
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.typing import ArrayLike
from torch import nn
from torch.overrides import TorchFunctionMode

from headrace.config import reader
from headrace.errors import UserError
from headrace.models._torch_attention import (
    ATTENTION,
    CALL,
    AttentionContext,
    compute_dtype,
    constrain_activations,
    environment,
    run_layer,
    transformers_attention,
)
from headrace.nn import sharding
from headrace.nn.module import Array, Axes
from headrace.nn.stack import Execution

if TYPE_CHECKING:
    from headrace.models.torch import Config

POSITION_ARGUMENTS = ("position_ids", "positions")  # names that `forward` may have for positions


@dataclass(frozen=True)
class ModuleSpec:
    """A module without its weights, whose head returns its input."""

    module: nn.Module
    axes: dict[str, Axes]
    shapes: dict[str, tuple[int, ...]]
    buffers: dict[str, np.ndarray]  # constants, such as the frequencies of rotary positions
    embeddings: frozenset[str]  # names of the weights of embeddings
    head: tuple[str, str | None]  # names of the head's matrix and bias
    width: int  # of the head's input


@functools.cache
def module_spec(cfg: "Config") -> ModuleSpec:
    """Make the recipe's module without memory for its weights, with hooks that shard and rematerialize."""
    with MetaTensorMode():
        module = make_module(cfg)
    head = find_head(cfg, module)
    weights = dict(module.named_parameters())
    names = {id(weight): name for name, weight in weights.items()}
    tables = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    embeddings = frozenset(names[id(table.weight)] for table in tables)
    head_names = names[id(head.weight)], None if head.bias is None else names[id(head.bias)]
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    axes = {
        name: guess_axes(shape, head.weight.shape, unstacked=name not in embeddings | {head_names[0]})
        for name, shape in shapes.items()
    }
    buffers = {name: to_numpy(buffer) for name, buffer in module.named_buffers()}
    for table in tables:
        table.register_forward_hook(
            lambda table, inputs, rows: constrain_activations(rows.to(compute_dtype()))
        )
    for layer in find_layers(module):
        layer.forward = functools.partial(run_layer, layer.forward)
    head.forward = lambda hidden: hidden  # type: ignore[assignment,method-assign]
    return ModuleSpec(module, axes, shapes, buffers, embeddings, head_names, head.in_features)


def make_module(cfg: "Config") -> nn.Module:
    """Make the module that a recipe names, with dropout off. Raises UserError if its class refuses the
    settings."""
    cls: Any = find_class(cfg.module)
    settings = reader.to_dict(cfg)["config"] | {"vocab_size": cfg.vocab}
    try:
        if is_transformers(cls):
            module = cls(cls.config_class(**settings, attn_implementation=ATTENTION))
            module.config.use_cache = False
        else:
            module = cls(**settings)
    except Exception as error:  # classes raise errors of every kind for their settings
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"model.config: {cfg.module} cannot be made with {settings}: {reason}") from error
    for key in ("final_logit_softcapping", "attention_chunk_size"):
        if getattr(getattr(module, "config", None), key, None) is not None:
            hint = "; loss.soft_cap does the same" if key.startswith("final") else ""
            raise UserError(f"model.config: {key}: expected null, since it is not supported{hint}")
    return module.eval()


def find_class(path: str) -> type[nn.Module]:
    """Import a class given as `package.module:Class`, or as `file.py:Class` relative to the working
    directory."""
    location, _, name = path.rpartition(":")
    try:
        if location.endswith(".py"):
            if not Path(location).is_file():
                raise UserError(f"model.module: found {path}, and there is no file {location}")
            spec: Any = importlib.util.spec_from_file_location(Path(location).stem, location)
            python_module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(python_module)
        else:
            python_module = importlib.import_module(location)
        cls = getattr(python_module, name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"model.module: found {path}, which cannot be imported: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise UserError(f"model.module: found {path}, expected a class of torch.nn.Module")
    return cls


def is_transformers(cls: type) -> bool:
    """Whether it is a model class of transformers. If so, our attention is registered there."""
    if not any(base.__module__ == "transformers.modeling_utils" for base in cls.__mro__):
        return False
    from transformers import AttentionInterface

    # transformers makes no masks for an attention without a mask function of the same name: ours separates
    # documents itself.
    AttentionInterface.register(ATTENTION, transformers_attention)
    return True


class MetaTensorMode(TorchFunctionMode):
    """Allocates uninitialized tensors on torch's meta device, so that layers of any size can be made.

    Tensors that are made with values, such as buffers, are made as usual."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.empty and kwargs.get("device") is None:
            kwargs = kwargs | {"device": "meta"}
        return function(*args, **kwargs)


def find_head(cfg: "Config", module: nn.Module) -> nn.Linear:
    """Find the layer that computes logits: the one that `model.head_module` names, transformers' output
    embeddings, or the only layer with as many outputs as tokens. Raises UserError if there is none."""
    parts = dict(module.named_modules())
    if cfg.head_module != "auto":
        head = parts.get(cfg.head_module)
        if not isinstance(head, nn.Linear):
            raise UserError(
                f"model.head_module: found {cfg.head_module}, expected the name of an nn.Linear in "
                f"{cfg.module}"
            )
    elif is_transformers(type(module)):
        head = module.get_output_embeddings()  # type: ignore[operator]
        if not isinstance(head, nn.Linear):
            raise UserError(
                f"model.module: found {cfg.module}, expected a class that predicts tokens, as ...ForCausalLM "
                "or ...ForMaskedLM"
            )
    else:
        fitting = [
            name
            for name, part in parts.items()
            if isinstance(part, nn.Linear) and part.out_features == cfg.vocab
        ]
        if len(fitting) != 1:
            raise UserError(
                "model.head_module: expected the name of the nn.Linear that computes logits, since "
                f"{len(fitting)} parts of {cfg.module} have as many outputs as there are tokens, {cfg.vocab}"
            )
        head = parts[fitting[0]]
    assert isinstance(head, nn.Linear)
    return head


def guess_axes(shape: tuple[int, ...], head_shape: tuple[int, ...], *, unstacked: bool) -> Axes:
    """Name a weight's axes for the mesh by their sizes.

    `fsdp` splits the axis of the model's width, or else the largest; `tensor` splits the vocabulary, or else
    the largest of the others."""
    vocab, width = head_shape
    names = [""] * len(shape)
    if shape:
        wide = [axis for axis, size in enumerate(shape) if size == width] or [int(np.argmax(shape))]
        names[wide[-1]] = "embed"
        narrow = [axis for axis in range(len(shape)) if axis != wide[-1]]
        if narrow:
            largest = max(narrow, key=lambda axis: shape[axis])
            names[largest] = "vocab" if shape[largest] == vocab and not unstacked else "mlp"
        elif shape[0] == vocab != width:
            names[0] = "vocab"
    # With three axes, the first counts matrices, such as those of experts.
    return Axes(tuple(names), stacked=max(len(shape) - 2, 0), unstacked=unstacked)


def find_layers(module: nn.Module) -> list[nn.Module]:
    """Find the layers: the members of lists whose members have the same class. Lists inside such lists do not
    count."""
    layers: dict[str, nn.Module] = {}
    for name, part in module.named_modules():
        is_list = isinstance(part, nn.ModuleList | nn.Sequential) and len(part) > 1
        if not is_list or len({type(member) for member in part}) > 1:
            continue
        if not any(name.startswith(f"{outer}.") for outer in layers):
            layers |= {f"{name}.{number}": member for number, member in enumerate(part)}
    return list(layers.values())


def init_weights(cfg: "Config", seed: int) -> dict[str, np.ndarray]:
    """Initialize the weights by the module's own code, in float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parameters = make_module(cfg).named_parameters()
        return {name: to_numpy(weight).astype(np.float32) for name, weight in parameters}


def module_with_weights(cfg: "Config", weights: Mapping[str, ArrayLike]) -> nn.Module:
    """Make the torch module with these weights, to be used without Headrace."""
    module = make_module(cfg)
    tensors = {name: torch.tensor(np.asarray(weight, np.float32)) for name, weight in weights.items()}
    module.load_state_dict(tensors, strict=False)  # not strict: tied weights have one name here
    return module


def hf_settings(cfg: "Config") -> dict[str, Any]:
    """The settings of config.json: those of transformers, or the arguments of another class."""
    module: Any = module_spec(cfg).module
    if is_transformers(type(module)):
        settings = module.config.to_dict() | {"architectures": [type(module).__name__]}
        return settings | ({"use_cache": True} if "use_cache" in settings else {})
    return {"module": cfg.module, "config": reader.to_dict(cfg)["config"], "vocab_size": cfg.vocab}


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Convert a tensor to an array; floating-point numbers of any format become float32."""
    tensor = tensor.detach()
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()


def run_module(
    cfg: "Config",
    weights: dict[str, Array],
    tokens: Array,
    *,
    exec_opts: Execution,
    segments: Array | None,
    positions: Array,
) -> tuple[Array, AttentionContext]:
    """Run the module on tokens [b s]. Returns the input of its head [b s d] and the run's description.

    Raises UserError if the module cannot do what the recipe asks for."""
    spec = module_spec(cfg)
    if exec_opts.matmul != "compute":
        raise UserError(
            f"compute.matmul: found {exec_opts.matmul}, expected compute, since torch computes the products"
        )
    call = AttentionContext(cfg.module, cfg.causal, exec_opts, segments, tokens.shape)
    parameters = inspect.signature(spec.module.forward).parameters
    arguments = {name: positions for name in POSITION_ARGUMENTS if name in parameters}
    if "segments" in parameters and segments is not None:
        arguments["segments"] = segments
    if sharding.context_size() > 1 and not set(POSITION_ARGUMENTS) & set(arguments):
        raise UserError(f"mesh.context: expected 1, since forward of {cfg.module} takes no position_ids")
    # Embeddings and the head stay in float32; a hook casts the rows that are looked up.
    uncast = spec.embeddings | set(spec.head)
    arrays = {name: w if name in uncast else w.astype(exec_opts.dtype) for name, w in weights.items()}
    env, token = environment(), CALL.set(call)
    try:
        with env, torch.no_grad():
            state, (ids, keywords) = env.j2t_iso((arrays | buffer_arrays(spec), (tokens, arguments)))
            out = torch.func.functional_call(spec.module, state, (ids,), keywords)
            out = getattr(out, "logits", out[0] if isinstance(out, tuple) else out)
            hidden = env.t2j_iso(out)
    finally:
        CALL.reset(token)
    check_completed_run(cfg, call, hidden, spec, "segments" in arguments)
    return hidden.astype(exec_opts.dtype), call


def buffer_arrays(spec: ModuleSpec) -> dict[str, Array]:
    """The module's constants as JAX arrays."""
    return {name: jnp.asarray(buffer) for name, buffer in spec.buffers.items()}


def check_completed_run(
    cfg: "Config", call: AttentionContext, hidden: Any, spec: ModuleSpec, reads_segments: bool
) -> None:
    """Check, as far as can be seen, that a run did what the recipe asks for. Raises UserError otherwise."""
    expected = (*call.shape, spec.width)
    if getattr(hidden, "shape", None) != expected:
        found = getattr(hidden, "shape", type(hidden).__name__)
        raise UserError(
            f"model.module: {cfg.module} returns {found}, expected {expected}: forward must end with the "
            "head, and return a tensor or something with `logits`"
        )
    if call.scores:
        return
    if is_transformers(type(spec.module)):
        raise UserError(
            f"model.module: {cfg.module} does not use transformers' attention interface, which our attention "
            "needs"
        )
    if call.segments is not None and not reads_segments:
        raise UserError(
            f"data.isolate_documents: expected false, since forward of {cfg.module} neither takes `segments` "
            "nor calls torch's scaled_dot_product_attention, and so does not separate packed documents"
        )


@functools.cache
def flops_per_token(cfg: "Config", sequence_length: int) -> float:
    """Count the FLOPs of forward and backward pass: 6 per weight, and those of attention, which are counted
    while the module runs on shapes."""
    spec = module_spec(cfg)
    scores: list[float] = []

    def run(weights: dict[str, Array], tokens: Array) -> Array:
        exec_opts = Execution(reader.part_class("attention", "xla")())
        hidden, call = run_module(cfg, weights, tokens, exec_opts=exec_opts, segments=None, positions=tokens)
        scores.extend(call.scores)
        return hidden

    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in spec.shapes.items()}
    jax.eval_shape(run, shapes, jax.ShapeDtypeStruct((1, sequence_length), jnp.int32))
    looked_up = spec.embeddings - {spec.head[0]}
    params = sum(math.prod(shape) for name, shape in spec.shapes.items() if name not in looked_up)
    return 6 * params + sum(scores)
