"""Any torch.nn.Module, those of transformers included, run as a JAX program by torchax.

Its weights are sharded, trained and checkpointed like those of other families, and can be loaded back into
the module."""

import importlib.util
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from headrace.errors import UserError
from headrace.model_formats.hf_config import HFSettings
from headrace.model_formats.hf_tensors import TensorTable
from headrace.nn.bias import pad_columns
from headrace.nn.module import Array, MakeLeaf, module
from headrace.nn.stack import Execution

if TYPE_CHECKING:
    from headrace.models._torch_module import ModuleSpec


@dataclass(frozen=True)
class Config:
    """The `model` section of a recipe with `use: torch`."""

    module: str  # PyTorch class of the model: package.module:Class, or file.py:Class
    config: dict = field(default_factory=dict)  # settings that the class is made with, in its own words
    causal: bool = True  # whether tokens see only earlier ones; false for encoders
    head_module: str = "auto"  # name of the nn.Linear that computes the logits
    vocab: int = 0  # tokens in the vocabulary; 0: as many as the data's tokenizer has

    loops = False
    layers = 1  # the weights of layers are not stacked

    def __post_init__(self) -> None:
        if self.module.count(":") != 1 or not all(self.module.split(":")):
            raise ValueError("module: expected package.module:Class or file.py:Class")
        if "vocab_size" in self.config:
            raise ValueError("config: expected the size of the vocabulary as model.vocab, not as vocab_size")
        if self.vocab < 0:
            raise ValueError("vocab: expected 0 or more")

    @property
    def embed(self) -> int:
        """Width of the head's input."""
        from headrace.models.torch import module_spec

        return module_spec(self).width


@module
class Cache:
    """The tokens so far [b t], and how many they are: each step runs the module on all of them."""

    tokens: Array
    length: Array


@module
class Model:
    """The weights of a torch module."""

    weights: dict[str, Array]  # by their names in the module
    head_module: tuple[str, str | None] = field(
        metadata=dict(static=True)
    )  # names of its matrix and its bias

    @classmethod
    def build(cls, cfg: Config, leaf: MakeLeaf) -> "Model":
        """Make the model with `leaf(...)` in place of every weight (`nn.module.build`)."""
        spec = module_spec(cfg)
        weights = {
            name: leaf(f"weights.{name}", axes, spec.shapes[name], _no_initializer)
            for name, axes in spec.axes.items()
        }
        return cls(weights, spec.head)

    @classmethod
    def init(cls, cfg: Config, key: Array) -> "Model":
        """Initialize the weights by the module's own code, which runs on the host (`nn.module.init`)."""
        spec, init_weights = module_spec(cfg), torch_module().init_weights
        shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in spec.shapes.items()}
        seed = jax.random.bits(key)
        return cls(jax.pure_callback(lambda seed: init_weights(cfg, int(seed)), shapes, seed), spec.head)

    @property
    def unembed(self) -> Array:
        """The matrix that maps hidden states to logits: [v d], or [v d+128] with bias and zeros."""
        matrix, bias = self.head_module
        if bias is None:
            return self.weights[matrix]
        return jnp.concatenate([self.weights[matrix], pad_columns(self.weights[bias])], axis=1)

    def __call__(
        self,
        cfg: Config,
        tokens: Array,
        *,
        exec_opts: Execution,
        segments: Array | None = None,
        positions: Array | None = None,
    ) -> Array:
        """Compute the input of the module's head [b s d] for tokens [b s], with a column of ones for a
        bias."""
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        hidden, _ = torch_module().run_module(
            cfg, self.weights, tokens, exec_opts=exec_opts, segments=segments, positions=positions
        )
        if self.head_module[1] is None:
            return hidden
        ones = jnp.ones(hidden.shape[:-1], hidden.dtype)
        return jnp.concatenate([hidden, pad_columns(ones)], axis=-1)

    def init_cache(self, cfg: Config, batch_size: int, max_length: int, dtype: DTypeLike) -> Cache:
        """Make an empty cache with room for `max_length` tokens per row."""
        return Cache(jnp.zeros((batch_size, max_length), jnp.int32), jnp.zeros((), jnp.int32))

    def decode(
        self, cfg: Config, tokens: Array, cache: Cache, *, exec_opts: Execution
    ) -> tuple[Array, Cache]:
        """Compute the hidden states [b s d] of tokens [b s] that continue the cached ones.

        Returns the cache with the new tokens added."""
        start, count = cache.length, tokens.shape[1]
        text = jax.lax.dynamic_update_slice_in_dim(cache.tokens, tokens, start, axis=1)
        hidden = self(cfg, text, exec_opts=exec_opts)  # zeros after the text are not visible to it
        return jax.lax.dynamic_slice_in_dim(hidden, start, count, axis=1), Cache(text, start + count)


def _no_initializer(key: Array) -> Array:
    raise AssertionError("weights of a torch module are initialized together, by Model.init")


def torch_module() -> ModuleType:
    """Import _torch_module.py: without torch, recipes can still be read and other families trained.

    Raises UserError if torch or torchax is not installed."""
    if missing := [name for name in ("torch", "torchax") if importlib.util.find_spec(name) is None]:
        raise UserError(
            f"model.use: torch needs {' and '.join(missing)}, not installed; pip install 'headrace[torch]'"
        )
    from headrace.models import _torch_module

    return _torch_module


def init_on_host(cfg: Config, key: Array) -> Model:
    """Initialize the weights by the module's own code, seeded by the key, as numpy arrays."""
    return Model(torch_module().init_weights(cfg, int(jax.random.bits(key))), module_spec(cfg).head)


def module_spec(cfg: Config) -> "ModuleSpec":
    """The recipe's module without its weights."""
    return torch_module().module_spec(cfg)


def flops_per_token(cfg: Config, sequence_length: int) -> float:
    """Count the FLOPs of forward and backward pass: 6 per weight, and those of attention."""
    return torch_module().flops_per_token(cfg, sequence_length)


def HF_TENSORS(cfg: Config) -> TensorTable:
    """Weight -> (tensor, its axes -> ours): names and axes are the module's own."""
    letters = lambda shape: " ".join("abcdefgh"[: len(shape)])
    return {
        f"weights.{name}": (name, f"{letters(shape)} -> {letters(shape)}")
        for name, shape in module_spec(cfg).shapes.items()
    }


HF_TYPES = ()  # config.json is imported by other families; a recipe names a class of transformers itself


def to_hf_config(cfg: Config, sequence_length: int) -> HFSettings:
    """Translate to the settings of config.json: those of transformers, or the arguments of another class."""
    return torch_module().hf_settings(cfg)


def from_hf_config(settings: HFSettings) -> dict[str, Any]:
    """Translate the settings of transformers' config.json to a recipe's `model` section."""
    name = next(iter(settings.get("architectures") or ["PreTrainedModel"]))
    no_arguments = (
        "architectures",
        "vocab_size",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "model_type",
    )
    arguments = {key: value for key, value in settings.items() if key not in no_arguments}
    vocab = settings.get("vocab_size", 0)
    return {"use": "torch", "module": f"transformers:{name}", "config": arguments, "vocab": vocab}
