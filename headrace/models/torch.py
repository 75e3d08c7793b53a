"""Any torch.nn.Module, those of transformers included, run as a JAX program by torchax: its weights are
sharded, trained and checkpointed like those of the other families, and go back into the module."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from headrace.errors import UserError
from headrace.nn.stack import Execution
from headrace.model_formats.hf_tensors import Table
from headrace.nn.bias import first_of_many
from headrace.nn.module import Array, Axes, module


@dataclass(frozen=True)
class Config:
    module: str  # where the class is: transformers:LlamaForCausalLM, or model.py:Class
    config: dict = field(default_factory=dict)  # what the class is made with, in its own words
    causal: bool = True  # false: it reads both sides, as encoders do
    head: str = "auto"  # its nn.Linear that makes the logits, by name
    vocab: int = 0  # 0: as many as the data's tokenizer has

    loops = False
    layers = 1  # none is stacked

    def __post_init__(self):
        if self.module.count(":") != 1 or not all(self.module.split(":")):
            raise ValueError("module: expected package.module:Class or file.py:Class")
        if "vocab_size" in self.config:
            raise ValueError("config: expected the size of the vocabulary as model.vocab, not as vocab_size")
        if self.vocab < 0:
            raise ValueError("vocab: expected 0 or more")

    @property
    def embed(self):
        from headrace.models.torch import outline

        return outline(self).width


@module
class Cache:
    """The tokens so far, [b t], and how many there are: each step reads all of them again."""

    tokens: Array
    length: Array


@module
class Model:
    weights: dict[str, Array]  # by their names in the module
    head: tuple[str, str | None] = field(metadata=dict(static=True))  # the names of its matrix and its bias

    @classmethod
    def build(cls, cfg: Any, leaf: Callable[[str, Axes, tuple[int, ...], Any], Any]) -> "Model":
        known = outline(cfg)
        weights = {
            name: leaf(f"weights.{name}", axes, known.shapes[name], None) for name, axes in known.axes.items()
        }
        return cls(weights, known.head)

    @classmethod
    def on_host(cls, cfg: Any, key: Array) -> "Model":
        """The first weights as the module's own code draws them, seeded by the key, in numpy's arrays."""
        return cls(torch_module().fresh(cfg, int(jax.random.bits(key))), outline(cfg).head)

    @classmethod
    def init(cls, cfg: Any, key: Array) -> "Model":
        known, draw = outline(cfg), torch_module().fresh
        shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in known.shapes.items()}
        seed = jax.random.bits(key)
        return cls(jax.pure_callback(lambda seed: draw(cfg, int(seed)), shapes, seed), known.head)

    @property
    def unembed(self) -> Array:
        matrix, bias = self.head
        if bias is None:
            return self.weights[matrix]
        return jnp.concatenate([self.weights[matrix], first_of_many(self.weights[bias])], axis=1)

    def __call__(
        self,
        cfg: Any,
        tokens: Array,
        *,
        how: Execution,
        segments: Array | None = None,
        positions: Array | None = None,
    ) -> Array:
        """What the module gives to its head, [b s d]; `unembed` turns it into logits."""
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        hidden = torch_module().forward(
            cfg, self.weights, tokens, how=how, segments=segments, positions=positions
        )
        if self.head[1] is None:
            return hidden
        ones = jnp.ones(hidden.shape[:-1], hidden.dtype)
        return jnp.concatenate([hidden, first_of_many(ones)], axis=-1)

    def cache(self, cfg: Any, batch: int, length: int, dtype: Any) -> Cache:
        return Cache(jnp.zeros((batch, length), jnp.int32), jnp.zeros((), jnp.int32))

    def decode(self, cfg: Any, tokens: Array, cache: Cache, *, how: Execution) -> tuple[Array, Cache]:
        """The hidden states of the next tokens [b s d] after those in the cache, and the cache with them."""
        start, count = cache.length, tokens.shape[1]
        every = jax.lax.dynamic_update_slice_in_dim(cache.tokens, tokens, start, axis=1)
        hidden = self(cfg, every, how=how)  # what is still 0 comes later, and is not seen
        return jax.lax.dynamic_slice_in_dim(hidden, start, count, axis=1), Cache(every, start + count)


def torch_module() -> Any:
    """The file that imports torch: recipes are read, and other families trained, where there is none."""
    if missing := [name for name in ("torch", "torchax") if importlib.util.find_spec(name) is None]:
        raise UserError(
            f"model.use: torch needs {' and '.join(missing)}, not installed; pip install 'headrace[torch]'"
        )
    from headrace.models import _torchax as torch_module

    return torch_module


def outline(cfg: Any) -> Any:
    return torch_module().outline(cfg)


def flops(cfg: Any, sequence: int) -> float:
    """Forward and backward FLOPs a token: 6 a weight that multiplies, and the scores of its attention."""
    return torch_module().flops(cfg, sequence)


def HF(cfg: Any) -> Table:
    """Names and axes are the module's own."""
    letters = lambda shape: " ".join("abcdefgh"[: len(shape)])
    return {
        f"weights.{name}": (name, f"{letters(shape)} -> {letters(shape)}")
        for name, shape in outline(cfg).shapes.items()
    }


HF_TYPES = ()  # other families read these; one of transformers' own is named by the recipe


def to_hf(cfg: Any, sequence: int) -> dict[str, Any]:
    """config.json: that of transformers, or for another class what it is made with."""
    return torch_module().settings(cfg)


def from_hf(settings: dict[str, Any]) -> dict[str, Any]:
    """The recipe's model section for a config.json of transformers."""
    name = next(iter(settings.get("architectures") or ["PreTrainedModel"]))
    outside = ("architectures", "vocab_size", "dtype", "torch_dtype", "transformers_version", "model_type")
    inside = {key: value for key, value in settings.items() if key not in outside}
    vocab = settings.get("vocab_size", 0)
    return {"use": "torch", "module": f"transformers:{name}", "config": inside, "vocab": vocab}
