"""Gemma 2: a decoder in which layers with a window alternate with layers that see the whole text, with a norm
before and after each part, and soft caps on attention scores and logits (arXiv 2408.00118). The cap on logits
is the recipe's `loss.soft_cap`."""

import functools
import math
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from headrace.attention import attend
from headrace.config.sections import at_least
from headrace.errors import UserError
from headrace.model_formats import hf_config, hf_heads
from headrace.model_formats.gguf_architecture import Architecture
from headrace.model_formats.hf_config import HFSettings
from headrace.models.llama import Cache
from headrace.nn.attention_mask import Mask
from headrace.nn.layer_kinds import LayerKind, keys_seen
from headrace.nn.linear import embed, project, quantize_input
from headrace.nn.mlp import project_gated
from headrace.nn.module import Array, count, module, stack, weight, zeros
from headrace.nn.norm import rms_norm_around_one as norm
from headrace.nn.rope import Rope, Scaling, rotate
from headrace.nn.sharding import constrain
from headrace.nn.stack import Execution, run_layers, run_layers_cached


@dataclass(frozen=True)
class Config:
    """The `model` section of a recipe with `use: gemma2`."""

    layers: int  # number of layers
    embed: int  # width of the residual stream
    heads: int  # number of query heads
    kv_heads: int  # number of key and value heads, each shared by heads / kv_heads query heads
    mlp: int  # hidden units of the MLP
    vocab: int = 0  # tokens in the vocabulary; 0: as many as the data's tokenizer has
    head_dim: int = 256  # width of a head
    window: int = 4096  # size of the attention window of most layers, the token itself included [tokens]
    global_every: int = 2  # interval between layers without a window
    query_scale: int = 0  # number whose square root attention scores are divided by; 0: head_dim
    attention_soft_cap: float | None = 50.0  # bound that a tanh keeps attention scores below; null: none
    norm_eps: float = 1e-6  # constant added to the mean square in RMSNorm
    rope_theta: float = 10_000.0  # base of the rotary frequencies

    # Fixed by the architecture; no recipe keys.
    causal = True
    tie_embeddings = True
    qk_norm = False
    activation = "geglu"
    rope_scaling = "none"
    rope_factor = 1.0
    rope_original_length = 8192

    def __post_init__(self) -> None:
        at_least(1, self, "layers", "embed", "heads", "kv_heads", "mlp", "head_dim", "window", "global_every")
        at_least(0, self, "vocab", "query_scale", "norm_eps")
        if self.rope_theta <= 0:
            raise ValueError("rope_theta: expected a number above 0")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: expected a divisor of heads, {self.heads}")
        if self.head_dim % 2:
            raise ValueError("head_dim: expected an even number, since rotary positions rotate pairs")
        if not self.query_scale:
            object.__setattr__(self, "query_scale", self.head_dim)
        if self.attention_soft_cap is not None and self.attention_soft_cap <= 0:
            raise ValueError("attention_soft_cap: expected a number above 0, or null for none")

    @property
    def rope_local_theta(self) -> float:
        """Base of the rotary frequencies in layers with a window."""
        return self.rope_theta


# These functions also take Gemma 3's Config, which has the same attributes.
def layer_kinds(cfg: Config) -> list[LayerKind]:
    """The kinds of the first layers, which repeat: windows, then one layer that sees the whole text."""
    local = LayerKind(Mask(window=cfg.window), Rope(cfg.rope_local_theta))
    full = LayerKind(Mask(), Rope(cfg.rope_theta, cast(Scaling, cfg.rope_scaling), cfg.rope_factor))
    return [local] * (cfg.global_every - 1) + [full]


@module
class Block:
    """One layer."""

    attn_norm: Array = weight("embed", init=zeros)
    w_q: Array = weight("embed", "heads", "head_dim")
    w_k: Array = weight("embed", "kv_heads", "head_dim")
    w_v: Array = weight("embed", "kv_heads", "head_dim")
    w_o: Array = weight("heads", "head_dim", "embed", num_input_axes=2)
    q_norm: Array | None = weight("head_dim", init=zeros, when=lambda cfg: cfg.qk_norm)
    k_norm: Array | None = weight("head_dim", init=zeros, when=lambda cfg: cfg.qk_norm)
    attn_out_norm: Array = weight("embed", init=zeros)
    mlp_norm: Array = weight("embed", init=zeros)
    w_gate: Array = weight("embed", "mlp")
    w_up: Array = weight("embed", "mlp")
    w_down: Array = weight("mlp", "embed")
    mlp_out_norm: Array = weight("embed", init=zeros)

    def project_qkv(
        self, cfg: Config, kind: LayerKind, x: Array, positions: Array
    ) -> tuple[Array, Array, Array]:
        """Compute queries [b s n h], keys and values [b s k h] from the residual stream x [b s d]."""
        h = quantize_input(self.w_q, norm(x, self.attn_norm, cfg.norm_eps))
        q = project(self.w_q, h, "bsd,dnh->bsnh")
        k = project(self.w_k, h, "bsd,dkh->bskh")
        v = project(self.w_v, h, "bsd,dkh->bskh")
        if self.q_norm is not None and self.k_norm is not None:
            q, k = norm(q, self.q_norm, cfg.norm_eps), norm(k, self.k_norm, cfg.norm_eps)
        return rotate(q, positions, kind.rope), rotate(k, positions, kind.rope), v

    def add_attention(self, cfg: Config, x: Array, attn_out: Array) -> Array:
        """Project the output of attention [b s n h], normalize it and add it to the residual stream."""
        return x + norm(project(self.w_o, attn_out, "bsnh,nhd->bsd"), self.attn_out_norm, cfg.norm_eps)

    def add_mlp(self, cfg: Config, x: Array, exec_opts: Execution) -> Array:
        """Compute the gated MLP, normalize its output and add it to the residual stream."""
        h = quantize_input(self.w_gate, norm(x, self.mlp_norm, cfg.norm_eps))
        gate, up = project(self.w_gate, h, "bsd,df->bsf"), project(self.w_up, h, "bsd,df->bsf")
        prevent_cse = exec_opts.needs_cse_barrier(cfg.layers, cfg.global_every)
        mlp_out = project_gated("geglu", gate, up, self.w_down, prevent_cse=prevent_cse)
        return constrain(x + norm(mlp_out, self.mlp_out_norm, cfg.norm_eps), "batch", "sequence", None)


@module
class Model:
    """Embedding, layers and final norm."""

    embedding: Array = weight("vocab", "embed")
    blocks: Block = stack(Block)
    final_norm: Array = weight("embed", init=zeros)

    @property
    def unembed(self) -> Array:
        """The matrix [v d] that maps hidden states to logits."""
        return self.embedding

    def embed(self, cfg: Config, tokens: Array, dtype: jnp.dtype) -> Array:
        """Look up tokens [b s] and scale them by sqrt(embed)."""
        x = embed(self.embedding, tokens, dtype)
        return constrain(x * jnp.asarray(math.sqrt(cfg.embed), dtype), "batch", "sequence", None)

    def __call__(
        self,
        cfg: Config,
        tokens: Array,
        *,
        exec_opts: Execution,
        segments: Array | None = None,
        positions: Array | None = None,
    ) -> Array:
        """Compute the last hidden states [b s d] of tokens [b s]."""
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

        def layer(kind: LayerKind, block: Block, x: Array) -> Array:
            q, k, v = block.project_qkv(cfg, kind, x, positions)
            attn_out = attend(
                exec_opts.attention, q, k, v, mask=kind.mask, segments=segments, **score_options(cfg)
            )
            x = block.add_attention(cfg, x, attn_out)
            return block.add_mlp(cfg, x, exec_opts)

        bodies = [functools.partial(layer, kind) for kind in layer_kinds(cfg)]
        x = run_layers(exec_opts, bodies, self.embed(cfg, tokens, exec_opts.dtype), self.blocks)
        return norm(x, self.final_norm, cfg.norm_eps)

    def init_cache(self, cfg: Config, batch_size: int, max_length: int, dtype: DTypeLike) -> Cache:
        """Make an empty cache with room for `max_length` tokens per row."""
        shape = (cfg.layers, batch_size, max_length, cfg.kv_heads, cfg.head_dim)
        return Cache(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype), length=jnp.zeros((), jnp.int32))

    def decode(
        self, cfg: Config, tokens: Array, cache: Cache, *, exec_opts: Execution
    ) -> tuple[Array, Cache]:
        """Compute the hidden states [b s d] of tokens [b s] that continue the cached ones.

        Returns the cache with the new tokens added."""
        start = cache.length
        positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)

        def layer(
            kind: LayerKind, block: Block, kv: tuple[Array, Array], x: Array
        ) -> tuple[Array, tuple[Array, Array]]:
            cached_k, cached_v = kv
            q, k, v = block.project_qkv(cfg, kind, x, positions)
            k = jax.lax.dynamic_update_slice_in_dim(cached_k, k, start, axis=1)
            v = jax.lax.dynamic_update_slice_in_dim(cached_v, v, start, axis=1)
            attn_out = attend(
                exec_opts.attention, q, k, v, mask=kind.mask, offset=start, **score_options(cfg)
            )
            x = block.add_attention(cfg, x, attn_out)
            return block.add_mlp(cfg, x, exec_opts), (k, v)

        bodies = [functools.partial(layer, kind) for kind in layer_kinds(cfg)]
        x = self.embed(cfg, tokens, exec_opts.dtype)
        x, (k, v) = run_layers_cached(exec_opts, bodies, x, self.blocks, (cache.k, cache.v))
        return norm(x, self.final_norm, cfg.norm_eps), Cache(k, v, length=start + tokens.shape[1])


def score_options(cfg: Config) -> dict[str, Any]:
    """Arguments of `attend` for soft cap and scale of attention scores."""
    return dict(soft_cap=cfg.attention_soft_cap, scale=cfg.query_scale**-0.5)


def flops_per_token(cfg: Config, sequence_length: int) -> float:
    """Count the FLOPs of forward and backward pass: 6 per weight, and those of attention to visible keys."""
    keys = keys_seen(layer_kinds(cfg), cfg.layers, sequence_length)
    return 6 * count(Model, cfg) + 12 * cfg.heads * cfg.head_dim * keys


# Weight -> (Hugging Face tensor, with {} for the layer; its axes -> ours, as in einops).
HF_TENSORS = {
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
HF_CLASSIFIER = hf_heads.default_layout()
HF_SOFT_CAP = "final_logit_softcapping"


def is_global(layer: int, every: int) -> bool:
    """Whether a layer sees the whole text."""
    return (layer + 1) % every == 0


def to_hf_config(cfg: Config, sequence_length: int) -> HFSettings:
    """Translate to the settings of config.json."""
    names = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
    return names | common_hf_settings(cfg, sequence_length)


def common_hf_settings(cfg: Config, sequence_length: int) -> HFSettings:
    """The settings of config.json that Gemma 2 and 3 share."""
    if cfg.embed % cfg.heads:
        raise UserError(
            f"model.heads: found {cfg.heads}, expected a divisor of model.embed, {cfg.embed}: transformers "
            "loads no other Gemma"
        )
    settings = hf_config.decoder_settings(cfg, sequence_length) | hf_config.layer_type_settings(
        cfg, is_global
    )
    return settings | {
        "hidden_activation": settings["hidden_act"],
        "query_pre_attn_scalar": cfg.query_scale,
        "sliding_window": cfg.window,
        "attn_logit_softcapping": cfg.attention_soft_cap,
    }


NO_CAP = 1e6  # llama.cpp always applies a cap; this one changes a score of 100 by a 300-millionth of itself


def to_gguf(cfg: Config, soft_cap: float | None) -> Architecture:
    """Describe the model for llama.cpp."""
    caps = {
        "attn_logit_softcapping": float(cfg.attention_soft_cap or NO_CAP),
        "final_logit_softcapping": float(soft_cap or NO_CAP),
    }
    return gguf_architecture("gemma2", cfg, layers_of_27b=46, keys=caps)


def gguf_architecture(name: str, cfg: Config, *, layers_of_27b: int, keys: dict[str, Any]) -> Architecture:
    """Describe a Gemma 2 or 3 for llama.cpp, which recognizes the 27B model, with its other scale of scores,
    by the number of layers."""
    scale = cfg.embed // cfg.heads if cfg.layers == layers_of_27b else cfg.head_dim
    windows = {
        "attention.sliding_window": cfg.window,
        "attention.sliding_window_pattern": cfg.global_every,
        "rope.freq_base_swa": float(cfg.rope_local_theta),
    }
    factor = math.sqrt(scale / cfg.query_scale)
    return Architecture(name, norm_offset=1.0, query_factor=factor, keys=windows | keys)


def from_hf_config(settings: HFSettings) -> dict[str, Any]:
    """Translate the settings of config.json to a recipe's `model` section."""
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if name not in settings:
            raise UserError(f"config.json: {name}: found nothing, expected a number or null")
    return {"use": "gemma2"} | common_keys(settings, Config, global_every=2)


def common_keys(settings: HFSettings, config: type, *, global_every: int, **keys: object) -> dict[str, Any]:
    """The keys of Gemma 2 or 3 from config.json. `global_every` is the default; `keys` are added."""
    if hf_config.get_bool(settings, "use_bidirectional_attention"):
        raise UserError("config.json: use_bidirectional_attention: found true, only false can be imported")
    cap = settings.get("attn_logit_softcapping")
    keys |= {
        "attention_soft_cap": None
        if cap is None
        else hf_config.get_float(settings, "attn_logit_softcapping"),
        "global_every": hf_config.read_global_every(settings, global_every, is_global),
        "window": hf_config.get_int(settings, "sliding_window"),
        "query_scale": hf_config.get_int(settings, "query_pre_attn_scalar", 256),
    }
    plain = {name: value for name, value in settings.items() if name != "layer_types"}
    plain["hidden_act"] = settings.get("hidden_activation") or settings.get("hidden_act")
    # The head is tied whether config.json has the key or not.
    plain["tie_word_embeddings"] = settings.get("tie_word_embeddings", True)
    return hf_config.decoder_keys(plain, config, **keys)
