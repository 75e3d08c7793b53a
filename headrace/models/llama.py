"""Llama: pre-norm decoder with grouped-query attention, rotary positions and a gated MLP (arXiv 2302.13971,
2407.21783); with `qk_norm`, Qwen 3's variant of it (arXiv 2505.09388)."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from headrace.model_wrappers import classification_head as classifier
from headrace.errors import UserError
from headrace.nn.stack import Execution, cached_layers, layers
from headrace.model_formats import hf_config as config_json
from headrace.model_formats.gguf_architecture import Architecture, refuse
from headrace.attention import Mask, attend
from headrace.nn.mlp import gated
from headrace.nn.norm import rms_norm
from headrace.nn.rope import Rope, rotate
from headrace.nn.sharding import constrain
from headrace.nn.module import Array, count, module, normal, ones, residual_normal, stack, weight
from headrace.nn.linear import lookup, prepared, project


@dataclass(frozen=True)
class Config:
    layers: int
    embed: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int = 0  # 0: as many as the data's tokenizer has
    head_dim: int = 0  # 0: embed / heads
    activation: Literal["swiglu", "geglu", "reglu", "relu2"] = "swiglu"
    tied: bool = True  # the head is the embedding
    qk_norm: bool = False
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling: Literal["none", "linear", "ntk", "yarn", "llama3"] = "none"
    rope_factor: float = 1.0
    rope_original: int = 8192  # context length before scaling

    causal = True

    def __post_init__(self):
        for name in ("layers", "embed", "heads", "kv_heads", "mlp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more")
        for name in ("vocab", "head_dim"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected 0 or more")
        if self.rope_theta <= 0:
            raise ValueError("rope_theta: expected a number above 0")
        if self.norm_eps < 0:
            raise ValueError("norm_eps: expected 0 or more")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: expected a divisor of heads, {self.heads}")
        if not self.head_dim:
            if self.embed % self.heads:
                raise ValueError(f"heads: expected a divisor of embed, {self.embed}, or head_dim to be set")
            object.__setattr__(self, "head_dim", self.embed // self.heads)
        if self.head_dim % 2:
            raise ValueError("head_dim: expected an even number, since positions turn pairs")
        if self.rope_scaling == "none" and self.rope_factor != 1:
            raise ValueError("rope_factor: expected rope_scaling to be set as well, or it has no effect")
        if self.rope_scaling != "none" and self.rope_factor <= 1:
            raise ValueError("rope_factor: expected more than 1, by which rope_scaling stretches the context")
        if self.rope_scaling not in ("yarn", "llama3") and self.rope_original != type(self).rope_original:
            raise ValueError("rope_original: expected rope_scaling to be yarn or llama3, or it has no effect")
        if self.rope_original < 1:
            raise ValueError("rope_original: expected 1 or more")


@module
class Block:
    attn_norm: Array = weight("embed", init=ones)
    w_q: Array = weight("embed", "heads", "head_dim")
    w_k: Array = weight("embed", "kv_heads", "head_dim")
    w_v: Array = weight("embed", "kv_heads", "head_dim")
    w_o: Array = weight("heads", "head_dim", "embed", init=residual_normal(0.02), inputs=2)
    q_norm: Array | None = weight("head_dim", init=ones, when=lambda cfg: cfg.qk_norm)
    k_norm: Array | None = weight("head_dim", init=ones, when=lambda cfg: cfg.qk_norm)
    mlp_norm: Array = weight("embed", init=ones)
    w_gate: Array = weight("embed", "mlp")
    w_up: Array = weight("embed", "mlp")
    w_down: Array = weight("mlp", "embed", init=residual_normal(0.02))

    def heads(self, cfg: Any, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        """Queries [b s n h], keys and values [b s k h]."""
        h = prepared(self.w_q, rms_norm(x, self.attn_norm, cfg.norm_eps))
        q = project(self.w_q, h, "bsd,dnh->bsnh")
        k = project(self.w_k, h, "bsd,dkh->bskh")
        v = project(self.w_v, h, "bsd,dkh->bskh")
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm, cfg.norm_eps), rms_norm(k, self.k_norm, cfg.norm_eps)
        return rotate(q, positions, rope(cfg)), rotate(k, positions, rope(cfg)), v

    def rest(self, cfg: Any, x: Array, mixed: Array, how: Execution) -> Array:
        """What follows once the values are mixed: output projection and MLP, each added to the stream."""
        x = x + project(self.w_o, mixed, "bsnh,nhd->bsd")
        h = prepared(self.w_gate, rms_norm(x, self.mlp_norm, cfg.norm_eps))
        gate, up = project(self.w_gate, h, "bsd,df->bsf"), project(self.w_up, h, "bsd,df->bsf")
        out = gated(cfg.activation, gate, up, self.w_down, merges=how.merges(cfg.layers))
        return constrain(x + out, "batch", "sequence", None)


@module
class Cache:
    """Keys and values of the tokens so far, [l b t k h], and how many there are."""

    k: Array
    v: Array
    length: Array


@module
class Model:
    embedding: Array = weight("vocab", "embed")
    blocks: Block = stack(Block)
    final_norm: Array = weight("embed", init=ones)
    head: Array | None = weight("vocab", "embed", init=normal(0.02), when=lambda cfg: not cfg.tied)

    @property
    def unembed(self) -> Array:
        return self.embedding if self.head is None else self.head

    def __call__(
        self,
        cfg: Any,
        tokens: Array,
        *,
        how: Execution,
        segments: Array | None = None,
        positions: Array | None = None,
    ) -> Array:
        """The last hidden states [b s d]; `unembed` turns them into logits."""
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

        def body(block: Block, x: Array) -> Array:
            q, k, v = block.heads(cfg, x, positions)
            mixed = attend(how.attention, q, k, v, mask=Mask(cfg.causal), segments=segments)
            return block.rest(cfg, x, mixed, how)

        x = constrain(lookup(self.embedding, tokens, how.dtype), "batch", "sequence", None)
        return rms_norm(layers(how, body, x, self.blocks), self.final_norm, cfg.norm_eps)

    def cache(self, cfg: Any, batch: int, length: int, dtype: Any) -> Cache:
        shape = (cfg.layers, batch, length, cfg.kv_heads, cfg.head_dim)
        return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((), jnp.int32))

    def decode(self, cfg: Any, tokens: Array, cache: Cache, *, how: Execution) -> tuple[Array, Cache]:
        """The hidden states of the next tokens [b s d] after those in the cache, and the cache with them."""
        start = cache.length
        positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)

        def body(x: Array, layer: tuple[Block, tuple[Array, Array]]) -> tuple[Array, tuple[Array, Array]]:
            block, (keys, values) = layer
            q, k, v = block.heads(cfg, x, positions)
            keys = jax.lax.dynamic_update_slice_in_dim(keys, k, start, axis=1)
            values = jax.lax.dynamic_update_slice_in_dim(values, v, start, axis=1)
            mixed = attend(how.attention, q, keys, values, mask=Mask(causal=True), offset=start)
            return block.rest(cfg, x, mixed, how), (keys, values)

        x = lookup(self.embedding, tokens, how.dtype)
        x, (keys, values) = cached_layers(how, [body], x, self.blocks, (cache.k, cache.v))
        hidden = rms_norm(x, self.final_norm, cfg.norm_eps)
        return hidden, Cache(keys, values, start + tokens.shape[1])


def rope(cfg: Any) -> Rope:
    return Rope(cfg.rope_theta, cfg.rope_scaling, cfg.rope_factor, cfg.rope_original)


def flops(cfg: Any, sequence: int) -> float:
    """Forward and backward FLOPs a token: 6 a weight that multiplies, and the scores (half when causal)."""
    multiplied = count(Model, cfg) - (0 if cfg.tied else cfg.vocab * cfg.embed)
    scores = 12 * cfg.layers * cfg.heads * cfg.head_dim * sequence
    return 6 * multiplied + (scores / 2 if cfg.causal else scores)


# Our weight -> their tensor ({} is the layer) and their axes in terms of ours.
HF = {
    "embedding": ("model.embed_tokens.weight", "v d -> v d"),
    "blocks.attn_norm": ("model.layers.{}.input_layernorm.weight", "d -> d"),
    "blocks.w_q": ("model.layers.{}.self_attn.q_proj.weight", "(n h) d -> d n h"),
    "blocks.w_k": ("model.layers.{}.self_attn.k_proj.weight", "(k h) d -> d k h"),
    "blocks.w_v": ("model.layers.{}.self_attn.v_proj.weight", "(k h) d -> d k h"),
    "blocks.w_o": ("model.layers.{}.self_attn.o_proj.weight", "d (n h) -> n h d"),
    "blocks.q_norm": ("model.layers.{}.self_attn.q_norm.weight", "h -> h"),
    "blocks.k_norm": ("model.layers.{}.self_attn.k_norm.weight", "h -> h"),
    "blocks.mlp_norm": ("model.layers.{}.post_attention_layernorm.weight", "d -> d"),
    "blocks.w_gate": ("model.layers.{}.mlp.gate_proj.weight", "f d -> d f"),
    "blocks.w_up": ("model.layers.{}.mlp.up_proj.weight", "f d -> d f"),
    "blocks.w_down": ("model.layers.{}.mlp.down_proj.weight", "d f -> f d"),
    "final_norm": ("model.norm.weight", "d -> d"),
    "head": ("lm_head.weight", "v d -> v d"),
}
HF_TYPES = ("llama", "qwen3")
CLASSES = classifier.generic()


def to_hf(cfg: Any, sequence: int) -> dict[str, Any]:
    """config.json. Llama has no QK-norm in transformers; Qwen 3 is the same block with it."""
    name, kind = ("Qwen3ForCausalLM", "qwen3") if cfg.qk_norm else ("LlamaForCausalLM", "llama")
    if kind == "llama" and cfg.embed % cfg.heads:
        raise UserError(
            f"model.heads: transformers loads no Llama whose embed, {cfg.embed}, is not a multiple of its "
            f"heads, {cfg.heads}"
        )
    return {"architectures": [name], "model_type": kind} | config_json.write(cfg, sequence)


def to_gguf(cfg: Any, soft_cap: float | None) -> Architecture:
    """llama.cpp turns neighbours in a Llama, and pairs as here in a Qwen 3."""
    name = "qwen3" if cfg.qk_norm else "llama"
    if cfg.activation != "swiglu":
        refuse("model.activation", cfg.activation, name, "swiglu")
    if soft_cap is not None:
        refuse("loss.soft_cap", soft_cap, name, "logits without one")
    return Architecture(name, interleaved=not cfg.qk_norm)


def from_hf(settings: dict[str, Any]) -> dict[str, Any]:
    """The recipe's model section for a config.json."""
    section = config_json.read(settings, Config, qk_norm=settings["model_type"] == "qwen3")
    return {"use": "llama"} | section
