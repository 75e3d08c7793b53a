"""Gemma 2: a decoder whose layers see a window and the whole text by turns, with a norm before and after each
part, and soft caps on the scores and on the logits (arXiv 2408.00118). The cap on the logits is the recipe's
`loss.soft_cap`."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from headrace.model_wrappers import classification_head as classifier
from headrace.errors import UserError
from headrace.nn.stack import Execution, cached_layers, layers_in_turn
from headrace.model_formats import hf_config as config_json
from headrace.model_formats.gguf_architecture import Architecture
from headrace.attention import Mask, attend
from headrace.nn.layer_kinds import Kind, keys_seen
from headrace.nn.mlp import gated
from headrace.nn.norm import rms_norm_around_one as norm
from headrace.nn.rope import Rope, rotate
from headrace.nn.sharding import constrain
from headrace.models.llama import Cache
from headrace.nn.module import Array, count, module, stack, weight, zeros
from headrace.nn.linear import lookup, prepared, project


@dataclass(frozen=True)
class Config:
    layers: int
    embed: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int = 0  # 0: as many as the data's tokenizer has
    head_dim: int = 256
    window: int = 4096  # tokens that most layers see, the last of them their own
    global_every: int = 2  # each so many-th layer sees the whole text
    query_scale: int = 0  # scores are divided by its root; 0: head_dim
    attention_cap: float | None = 50.0  # scores stay below, by a tanh
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0

    # Fixed by the architecture; the block reads them.
    causal = True
    tied = True
    qk_norm = False
    activation = "geglu"
    rope_scaling = "none"
    rope_factor = 1.0
    rope_original = 8192

    def __post_init__(self):
        for name in ("layers", "embed", "heads", "kv_heads", "mlp", "head_dim", "window", "global_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more")
        for name in ("vocab", "query_scale", "norm_eps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected 0 or more")
        if self.rope_theta <= 0:
            raise ValueError("rope_theta: expected a number above 0")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: expected a divisor of heads, {self.heads}")
        if self.head_dim % 2:
            raise ValueError("head_dim: expected an even number, since positions turn pairs")
        if not self.query_scale:
            object.__setattr__(self, "query_scale", self.head_dim)
        if self.attention_cap is not None and self.attention_cap <= 0:
            raise ValueError("attention_cap: expected a number above 0, or null for none")

    @property
    def local_theta(self):
        return self.rope_theta


def kinds(cfg: Any) -> list[Kind]:
    """Those of the first layers; the others repeat them."""
    local = Kind(Mask(window=cfg.window), Rope(cfg.local_theta))
    whole = Kind(Mask(), Rope(cfg.rope_theta, cfg.rope_scaling, cfg.rope_factor))
    return [local] * (cfg.global_every - 1) + [whole]


@module
class Block:
    attn_norm: Array = weight("embed", init=zeros)
    w_q: Array = weight("embed", "heads", "head_dim")
    w_k: Array = weight("embed", "kv_heads", "head_dim")
    w_v: Array = weight("embed", "kv_heads", "head_dim")
    w_o: Array = weight("heads", "head_dim", "embed", inputs=2)
    q_norm: Array | None = weight("head_dim", init=zeros, when=lambda cfg: cfg.qk_norm)
    k_norm: Array | None = weight("head_dim", init=zeros, when=lambda cfg: cfg.qk_norm)
    attn_out_norm: Array = weight("embed", init=zeros)
    mlp_norm: Array = weight("embed", init=zeros)
    w_gate: Array = weight("embed", "mlp")
    w_up: Array = weight("embed", "mlp")
    w_down: Array = weight("mlp", "embed")
    mlp_out_norm: Array = weight("embed", init=zeros)

    def heads(self, cfg: Any, kind: Kind, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        """Queries [b s n h], keys and values [b s k h]."""
        h = prepared(self.w_q, norm(x, self.attn_norm, cfg.norm_eps))
        q = project(self.w_q, h, "bsd,dnh->bsnh")
        k = project(self.w_k, h, "bsd,dkh->bskh")
        v = project(self.w_v, h, "bsd,dkh->bskh")
        if self.q_norm is not None and self.k_norm is not None:
            q, k = norm(q, self.q_norm, cfg.norm_eps), norm(k, self.k_norm, cfg.norm_eps)
        return rotate(q, positions, kind.rope), rotate(k, positions, kind.rope), v

    def rest(self, cfg: Any, x: Array, mixed: Array, how: Execution) -> Array:
        """What follows once the values are mixed: output projection and MLP, each added to the stream."""
        x = x + norm(project(self.w_o, mixed, "bsnh,nhd->bsd"), self.attn_out_norm, cfg.norm_eps)
        h = prepared(self.w_gate, norm(x, self.mlp_norm, cfg.norm_eps))
        gate, up = project(self.w_gate, h, "bsd,df->bsf"), project(self.w_up, h, "bsd,df->bsf")
        merges = how.merges(cfg.layers, cfg.global_every)
        out = norm(
            gated(cfg.activation, gate, up, self.w_down, merges=merges), self.mlp_out_norm, cfg.norm_eps
        )
        return constrain(x + out, "batch", "sequence", None)


@module
class Model:
    embedding: Array = weight("vocab", "embed")
    blocks: Block = stack(Block)
    final_norm: Array = weight("embed", init=zeros)

    @property
    def unembed(self) -> Array:
        return self.embedding

    def embed(self, cfg: Any, tokens: Array, dtype: Any) -> Array:
        found = lookup(self.embedding, tokens, dtype)
        return constrain(found * jnp.asarray(math.sqrt(cfg.embed), dtype), "batch", "sequence", None)

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

        def body(kind: Kind, block: Block, x: Array) -> Array:
            q, k, v = block.heads(cfg, kind, x, positions)
            mixed = attend(how.attention, q, k, v, mask=kind.mask, segments=segments, **scores(cfg))
            return block.rest(cfg, x, mixed, how)

        bodies = [functools.partial(body, kind) for kind in kinds(cfg)]
        x = layers_in_turn(how, bodies, self.embed(cfg, tokens, how.dtype), self.blocks)
        return norm(x, self.final_norm, cfg.norm_eps)

    def cache(self, cfg: Any, batch: int, length: int, dtype: Any) -> Cache:
        shape = (cfg.layers, batch, length, cfg.kv_heads, cfg.head_dim)
        return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((), jnp.int32))

    def decode(self, cfg: Any, tokens: Array, cache: Cache, *, how: Execution) -> tuple[Array, Cache]:
        """The hidden states of the next tokens [b s d] after those in the cache, and the cache with them."""
        start = cache.length
        positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)

        def body(kind: Kind, x: Array, layer: tuple[Block, tuple[Array, Array]]) -> tuple[Array, Any]:
            block, (keys, values) = layer
            q, k, v = block.heads(cfg, kind, x, positions)
            keys = jax.lax.dynamic_update_slice_in_dim(keys, k, start, axis=1)
            values = jax.lax.dynamic_update_slice_in_dim(values, v, start, axis=1)
            mixed = attend(how.attention, q, keys, values, mask=kind.mask, offset=start, **scores(cfg))
            return block.rest(cfg, x, mixed, how), (keys, values)

        bodies = [functools.partial(body, kind) for kind in kinds(cfg)]
        x = self.embed(cfg, tokens, how.dtype)
        x, (keys, values) = cached_layers(how, bodies, x, self.blocks, (cache.k, cache.v))
        return norm(x, self.final_norm, cfg.norm_eps), Cache(keys, values, start + tokens.shape[1])


def scores(cfg: Any) -> dict[str, Any]:
    return dict(soft_cap=cfg.attention_cap, scale=cfg.query_scale**-0.5)


def flops(cfg: Any, sequence: int) -> float:
    """Forward and backward FLOPs a token: 6 a weight that multiplies, and the scores of what is seen."""
    scores = 12 * cfg.heads * cfg.head_dim * keys_seen(kinds(cfg), cfg.layers, sequence)
    return 6 * count(Model, cfg) + scores


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
    "blocks.attn_out_norm": ("model.layers.{}.post_attention_layernorm.weight", "d -> d"),
    "blocks.mlp_norm": ("model.layers.{}.pre_feedforward_layernorm.weight", "d -> d"),
    "blocks.w_gate": ("model.layers.{}.mlp.gate_proj.weight", "f d -> d f"),
    "blocks.w_up": ("model.layers.{}.mlp.up_proj.weight", "f d -> d f"),
    "blocks.w_down": ("model.layers.{}.mlp.down_proj.weight", "d f -> f d"),
    "blocks.mlp_out_norm": ("model.layers.{}.post_feedforward_layernorm.weight", "d -> d"),
    "final_norm": ("model.norm.weight", "d -> d"),
}
HF_TYPES = ("gemma2",)
CLASSES = classifier.generic()
HF_SOFT_CAP = "final_logit_softcapping"


def sees_all(layer: int, every: int) -> bool:
    return (layer + 1) % every == 0


def to_hf(cfg: Any, sequence: int) -> dict[str, Any]:
    return {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"} | write(cfg, sequence)


def write(cfg: Any, sequence: int) -> dict[str, Any]:
    """What config.json says of either generation."""
    if cfg.embed % cfg.heads:
        raise UserError(
            f"model.heads: transformers loads no Gemma whose embed, {cfg.embed}, is not a multiple of its "
            f"heads, {cfg.heads}"
        )
    settings = config_json.write(cfg, sequence) | config_json.write_kinds(cfg, sees_all)
    return settings | {
        "hidden_activation": settings["hidden_act"],
        "query_pre_attn_scalar": cfg.query_scale,
        "sliding_window": cfg.window,
        "attn_logit_softcapping": cfg.attention_cap,
    }


NO_CAP = 1e6  # llama.cpp always caps; a score of 100 is changed by a 300-millionth of itself


def to_gguf(cfg: Any, soft_cap: float | None) -> Architecture:
    caps = {
        "attn_logit_softcapping": float(cfg.attention_cap or NO_CAP),
        "final_logit_softcapping": float(soft_cap or NO_CAP),
    }
    return architecture("gemma2", cfg, largest=46, keys=caps)


def architecture(name: str, cfg: Any, *, largest: int, keys: dict[str, Any]) -> Architecture:
    """Of either generation. llama.cpp knows the one of 27B, whose scores have another scale, by how many
    layers it has."""
    scale = cfg.embed // cfg.heads if cfg.layers == largest else cfg.head_dim
    windows = {
        "attention.sliding_window": cfg.window,
        "attention.sliding_window_pattern": cfg.global_every,
        "rope.freq_base_swa": float(cfg.local_theta),
    }
    factor = math.sqrt(scale / cfg.query_scale)
    return Architecture(name, norm_offset=1.0, query_factor=factor, keys=windows | keys)


def from_hf(settings: dict[str, Any]) -> dict[str, Any]:
    """The recipe's model section for a config.json."""
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if name not in settings:
            raise UserError(f"config.json: {name}: found nothing, expected a number or null")
    return {"use": "gemma2"} | read(settings, Config, global_every=2)


def read(settings: dict[str, Any], config: type, *, global_every: int, **own: Any) -> dict[str, Any]:
    if config_json.truth(settings, "use_bidirectional_attention"):
        raise UserError("config.json: use_bidirectional_attention: found true, only false can be imported")
    cap = settings.get("attn_logit_softcapping")
    own |= {
        "attention_cap": None if cap is None else config_json.number(settings, "attn_logit_softcapping"),
        "global_every": config_json.read_kinds(settings, global_every, sees_all),
        "window": config_json.whole(settings, "sliding_window"),
        "query_scale": config_json.whole(settings, "query_pre_attn_scalar", 256),
    }
    plain = {name: value for name, value in settings.items() if name != "layer_types"}
    plain["hidden_act"] = settings.get("hidden_activation") or settings.get("hidden_act")
    # The head is tied whether config.json says so or not.
    plain["tie_word_embeddings"] = settings.get("tie_word_embeddings", True)
    return config_json.read(plain, config, **own)
