"""FANformer: a Llama whose attention reads its input through a Fourier analysis layer, of which some outputs
are cosines and sines, so that periods in the data need not be learnt by heart (arXiv 2502.21309; the layer:
2410.02675)."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from headrace.model_formats import hf_config as config_json
from headrace.nn.norm import rms_norm
from headrace.nn.rope import rotate
from headrace.models import llama
from headrace.nn.module import Array, Axes, count, module, ones, stack, weight, zeros
from headrace.nn.linear import prepared, project


@dataclass(frozen=True)
class Config:
    layers: int
    embed: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int = 0  # 0: as many as the data's tokenizer has
    periodic: float = 0.125  # the share of the layer's outputs that are cosines, and of those that are sines
    # What makes values: a matrix after the layer that queries and keys share, or a layer of their own and no
    # matrix, which the authors advise for deep and narrow models.
    values: Literal["matrix", "layer"] = "matrix"
    tied: bool = True  # the head is the embedding
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0

    # Fixed by the architecture; the block reads them.
    causal = True
    activation = "swiglu"
    rope_scaling = "none"
    rope_factor = 1.0
    rope_original = 8192

    def __post_init__(self):
        for name in ("layers", "embed", "heads", "kv_heads", "mlp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more")
        if self.vocab < 0:
            raise ValueError("vocab: expected 0 or more")
        if not 0 <= self.periodic <= 0.5:
            raise ValueError("periodic: expected a share from 0 to 0.5, since sines are as many as cosines")
        if self.norm_eps < 0:
            raise ValueError("norm_eps: expected 0 or more")
        if self.rope_theta <= 0:
            raise ValueError("rope_theta: expected a number above 0")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: expected a divisor of heads, {self.heads}")
        if self.embed % (2 * self.heads):
            raise ValueError(f"heads: expected embed, {self.embed}, to be an even multiple of it")

    @property
    def head_dim(self):
        return self.embed // self.heads

    @property
    def fan(self):
        """Outputs of the layer's matrix: each angle gives both a cosine and a sine."""
        return self.embed - int(self.embed * self.periodic)

    @property
    def value_fan(self):
        width = self.kv_heads * self.head_dim
        return width - int(width * self.periodic)


def scaled(key: Array, axes: Axes, shape: tuple[int, ...], cfg: Any) -> Array:
    """One over the root of the inputs, and nothing beyond thrice that, as OLMo draws its weights."""
    names = ("embed",) if axes.names[0] == "vocab" else axes.own[: axes.inputs]
    inputs = math.prod(getattr(cfg, name) for name in names)
    return jax.random.truncated_normal(key, -3.0, 3.0, shape, jnp.float32) / math.sqrt(inputs)


def deeper_smaller(key: Array, axes: Axes, shape: tuple[int, ...], cfg: Any) -> Array:
    """For the matrices that write to the residual stream: layer l, counted from 1, by 1/sqrt(2 l) smaller."""
    number = jnp.arange(1, shape[0] + 1).reshape(-1, *(1,) * (len(shape) - 1))
    return scaled(key, axes, shape, cfg) / jnp.sqrt(2.0 * number)


def has_matrix(cfg: Any) -> bool:
    return cfg.values == "matrix"


def has_layer(cfg: Any) -> bool:
    return cfg.values == "layer"


@module
class Block:
    attn_norm: Array = weight("embed", init=ones)
    w_fan: Array = weight("embed", "fan", init=scaled)
    b_fan: Array = weight("fan", init=zeros, inputs=0)
    w_q: Array = weight("embed", "heads", "head_dim", init=scaled)
    w_k: Array = weight("embed", "kv_heads", "head_dim", init=scaled)
    w_v: Array | None = weight("embed", "kv_heads", "head_dim", init=scaled, when=has_matrix)
    w_value_fan: Array | None = weight("embed", "value_fan", init=scaled, when=has_layer)
    b_value_fan: Array | None = weight("value_fan", init=zeros, inputs=0, when=has_layer)
    w_o: Array = weight("heads", "head_dim", "embed", init=deeper_smaller, inputs=2)
    mlp_norm: Array = weight("embed", init=ones)
    w_gate: Array = weight("embed", "mlp", init=scaled)
    w_up: Array = weight("embed", "mlp", init=scaled)
    w_down: Array = weight("mlp", "embed", init=deeper_smaller)

    rest = llama.Block.rest

    def heads(self, cfg: Any, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        """Queries [b s n h], keys and values [b s k h]."""
        h = prepared(self.w_fan, rms_norm(x, self.attn_norm, cfg.norm_eps))
        both = prepared(self.w_q, fourier(h, self.w_fan, self.b_fan, cfg.embed))
        q = project(self.w_q, both, "bsd,dnh->bsnh")
        k = project(self.w_k, both, "bsd,dkh->bskh")
        if self.w_v is not None:
            v = project(self.w_v, both, "bsd,dkh->bskh")
        else:
            v = fourier(h, self.w_value_fan, self.b_value_fan, cfg.kv_heads * cfg.head_dim).reshape(k.shape)
        rope = llama.rope(cfg)
        return rotate(q, positions, rope), rotate(k, positions, rope), v


def fourier(x: Any, w: Any, b: Any, width: int) -> Array:
    """The Fourier analysis layer: cosines, sines, and what is left as it is, `width` in all."""
    y = project(w, x, "bsd,da->bsa")
    y = y + b.astype(y.dtype)
    angles = width - y.shape[-1]
    turned, rest = y[..., :angles], y[..., angles:]
    return jnp.concatenate([jnp.cos(turned), jnp.sin(turned), rest], -1)


@module
class Model:
    embedding: Array = weight("vocab", "embed", init=scaled)
    blocks: Block = stack(Block)
    final_norm: Array = weight("embed", init=ones)
    head: Array | None = weight("vocab", "embed", init=scaled, when=lambda cfg: not cfg.tied)

    unembed = llama.Model.unembed
    __call__ = llama.Model.__call__
    cache = llama.Model.cache
    decode = llama.Model.decode


def flops(cfg: Any, sequence: int) -> float:
    looked_up = 0 if cfg.tied else cfg.vocab * cfg.embed
    return 6 * (count(Model, cfg) - looked_up) + 6 * cfg.layers * cfg.embed * sequence


# transformers has no such class. An export is for whoever has one, and for `headrace import`.
HF = llama.HF | {
    "blocks.w_fan": ("model.layers.{}.self_attn.fan.weight", "a d -> d a"),
    "blocks.b_fan": ("model.layers.{}.self_attn.fan.bias", "a -> a"),
    "blocks.w_value_fan": ("model.layers.{}.self_attn.value_fan.weight", "a d -> d a"),
    "blocks.b_value_fan": ("model.layers.{}.self_attn.value_fan.bias", "a -> a"),
}
HF_TYPES = ("fanformer",)


def to_hf(cfg: Any, sequence: int) -> dict[str, Any]:
    names = {"architectures": ["FANformerForCausalLM"], "model_type": "fanformer"}
    own = {"periodic": cfg.periodic, "values": cfg.values}
    return names | config_json.write(cfg, sequence) | own


def from_hf(settings: dict[str, Any]) -> dict[str, Any]:
    periodic, values = config_json.number(settings, "periodic"), config_json.need(settings, "values")
    return {"use": "fanformer"} | config_json.read(settings, Config, periodic=periodic, values=values)
