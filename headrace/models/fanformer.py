"""FANformer: a Llama whose attention reads its input through a Fourier analysis layer. Some of that layer's
outputs are cosines and sines, so that the model need not learn periods in the data (arXiv 2502.21309; the
layer: 2410.02675)."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from headrace.config.sections import at_least
from headrace.model_formats import hf_config
from headrace.model_formats.hf_config import HFSettings
from headrace.models import llama
from headrace.nn.linear import project, quantize_input
from headrace.nn.module import Array, Axes, PyTree, count, module, ones, stack, weight, zeros
from headrace.nn.norm import rms_norm
from headrace.nn.rope import Rope, rotate


@dataclass(frozen=True)
class Config:
    """The `model` section of a recipe with `use: fanformer`."""

    layers: int  # number of layers
    embed: int  # width of the residual stream
    heads: int  # number of query heads
    kv_heads: int  # number of key and value heads, each shared by heads / kv_heads query heads
    mlp: int  # hidden units of the MLP
    vocab: int = 0  # tokens in the vocabulary; 0: as many as the data's tokenizer has
    periodic_share: float = 0.125  # share of a layer's outputs that are cosines; as many are sines
    # source of the values: a matrix after the layer that queries and keys share, or a layer of their own (for
    # deep, narrow models)
    value_projection: Literal["matrix", "layer"] = "matrix"
    tie_embeddings: bool = True  # whether the embedding is also the output head
    norm_eps: float = 1e-6  # constant added to the mean square in RMSNorm
    rope_theta: float = 10_000.0  # base of the rotary frequencies

    # Fixed by the architecture; no recipe keys.
    causal = True
    activation = "swiglu"
    rope_scaling = "none"
    rope_factor = 1.0
    rope_original_length = 8192

    def __post_init__(self) -> None:
        at_least(1, self, "layers", "embed", "heads", "kv_heads", "mlp")
        at_least(0, self, "vocab", "norm_eps")
        if not 0 <= self.periodic_share <= 0.5:
            raise ValueError(
                "periodic_share: expected a share from 0 to 0.5, since sines are as many as cosines"
            )
        if self.rope_theta <= 0:
            raise ValueError("rope_theta: expected a number above 0")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: expected a divisor of heads, {self.heads}")
        if self.embed % (2 * self.heads):
            raise ValueError(f"heads: expected embed, {self.embed}, to be an even multiple of it")

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads

    @property
    def fan(self) -> int:
        """Outputs of the Fourier layer's matrix: each angle gives both a cosine and a sine."""
        return self.embed - int(self.embed * self.periodic_share)

    @property
    def value_fan(self) -> int:
        """Outputs of the matrix of the Fourier layer for values."""
        width = self.kv_heads * self.head_dim
        return width - int(width * self.periodic_share)


def init_scaled(key: Array, axes: Axes, shape: tuple[int, ...], cfg: Config) -> Array:
    """Initialize like OLMo: normal with 1 / sqrt(inputs), truncated at three standard deviations."""
    names = ("embed",) if axes.names[0] == "vocab" else axes.weight_axes[: axes.num_input_axes]
    inputs = math.prod(getattr(cfg, name) for name in names)
    return jax.random.truncated_normal(key, -3.0, 3.0, shape, jnp.float32) / math.sqrt(inputs)


def init_residual(key: Array, axes: Axes, shape: tuple[int, ...], cfg: Config) -> Array:
    """Initialize the matrices that write to the residual stream: layer l, from 1, is scaled by 1/sqrt(2
    l)."""
    number = jnp.arange(1, shape[0] + 1).reshape(-1, *(1,) * (len(shape) - 1))
    return init_scaled(key, axes, shape, cfg) / jnp.sqrt(2.0 * number)


def has_value_matrix(cfg: Config) -> bool:
    """Whether a matrix computes values."""
    return cfg.value_projection == "matrix"


def has_value_layer(cfg: Config) -> bool:
    """Whether a Fourier layer of their own computes values."""
    return cfg.value_projection == "layer"


@module
class Block:
    """One layer."""

    attn_norm: Array = weight("embed", init=ones)
    w_fan: Array = weight("embed", "fan", init=init_scaled)
    b_fan: Array = weight("fan", init=zeros, num_input_axes=0)
    w_q: Array = weight("embed", "heads", "head_dim", init=init_scaled)
    w_k: Array = weight("embed", "kv_heads", "head_dim", init=init_scaled)
    w_v: Array | None = weight("embed", "kv_heads", "head_dim", init=init_scaled, when=has_value_matrix)
    w_value_fan: Array | None = weight("embed", "value_fan", init=init_scaled, when=has_value_layer)
    b_value_fan: Array | None = weight("value_fan", init=zeros, num_input_axes=0, when=has_value_layer)
    w_o: Array = weight("heads", "head_dim", "embed", init=init_residual, num_input_axes=2)
    mlp_norm: Array = weight("embed", init=ones)
    w_gate: Array = weight("embed", "mlp", init=init_scaled)
    w_up: Array = weight("embed", "mlp", init=init_scaled)
    w_down: Array = weight("mlp", "embed", init=init_residual)

    add_attention = llama.Block.add_attention
    add_mlp = llama.Block.add_mlp

    def project_qkv(self, cfg: Config, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        """Compute queries [b s n h], keys and values [b s k h] from the residual stream x [b s d]."""
        h = quantize_input(self.w_fan, rms_norm(x, self.attn_norm, cfg.norm_eps))
        features = quantize_input(self.w_q, fourier_layer(h, self.w_fan, self.b_fan, cfg.embed))
        q = project(self.w_q, features, "bsd,dnh->bsnh")
        k = project(self.w_k, features, "bsd,dkh->bskh")
        if self.w_v is not None:
            v = project(self.w_v, features, "bsd,dkh->bskh")
        else:
            width = cfg.kv_heads * cfg.head_dim
            v = fourier_layer(h, self.w_value_fan, self.b_value_fan, width).reshape(k.shape)
        rope = Rope(cfg.rope_theta)
        return rotate(q, positions, rope), rotate(k, positions, rope), v


def fourier_layer(x: Array, w: PyTree, b: PyTree, width: int) -> Array:
    """Compute cosines and sines of some of the outputs of a linear layer, and keep the others as they are:
    `width` features in all."""
    y = project(w, x, "bsd,da->bsa")
    y = y + b.astype(y.dtype)
    num_angles = width - y.shape[-1]
    angles, linear = y[..., :num_angles], y[..., num_angles:]
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles), linear], -1)


@module
class Model:
    """Llama's model with FANformer's layers."""

    embedding: Array = weight("vocab", "embed", init=init_scaled)
    blocks: Block = stack(Block)
    final_norm: Array = weight("embed", init=ones)
    head: Array | None = weight("vocab", "embed", init=init_scaled, when=lambda cfg: not cfg.tie_embeddings)

    unembed = llama.Model.unembed
    __call__ = llama.Model.__call__
    init_cache = llama.Model.init_cache
    decode = llama.Model.decode


def flops_per_token(cfg: Config, sequence_length: int) -> float:
    """Count the FLOPs of forward and backward pass, as Llama's."""
    looked_up = 0 if cfg.tie_embeddings else cfg.vocab * cfg.embed
    return 6 * (count(Model, cfg) - looked_up) + 6 * cfg.layers * cfg.embed * sequence_length


# transformers has no such class. Exports are for users with one of their own, and for `headrace import`.
HF_TENSORS = llama.HF_TENSORS | {
    "blocks.w_fan": ("model.layers.{}.self_attn.fan.weight", "a d -> d a"),
    "blocks.b_fan": ("model.layers.{}.self_attn.fan.bias", "a -> a"),
    "blocks.w_value_fan": ("model.layers.{}.self_attn.value_fan.weight", "a d -> d a"),
    "blocks.b_value_fan": ("model.layers.{}.self_attn.value_fan.bias", "a -> a"),
}
HF_TYPES = ("fanformer",)


def to_hf_config(cfg: Config, sequence_length: int) -> HFSettings:
    """Translate to the settings of config.json."""
    names = {"architectures": ["FANformerForCausalLM"], "model_type": "fanformer"}
    fourier = {"periodic": cfg.periodic_share, "values": cfg.value_projection}
    return names | hf_config.decoder_settings(cfg, sequence_length) | fourier


def from_hf_config(settings: HFSettings) -> dict[str, Any]:
    """Translate the settings of config.json to a recipe's `model` section."""
    periodic, values = hf_config.get_float(settings, "periodic"), hf_config.require(settings, "values")
    return {"use": "fanformer"} | hf_config.decoder_keys(
        settings, Config, periodic_share=periodic, value_projection=values
    )
