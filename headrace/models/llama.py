"""Llama: a pre-norm decoder with grouped-query attention, rotary positions and a gated MLP (arXiv 2302.13971,
2407.21783). With `qk_norm` it is the Qwen 3 variant (arXiv 2505.09388).

Shapes and einsums use one alphabet: b batch, s sequence, t key position, d embed, n heads, k kv_heads,
h head_dim, f mlp, v vocab, l layers."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from headrace.attention import attend
from headrace.config.sections import at_least
from headrace.errors import UserError
from headrace.model_formats import hf_config, hf_heads
from headrace.model_formats.gguf_architecture import Architecture, refuse_export
from headrace.model_formats.hf_config import HFSettings
from headrace.nn.attention_mask import Mask
from headrace.nn.linear import embed, project, quantize_input
from headrace.nn.mlp import project_gated
from headrace.nn.module import Array, count, module, normal, ones, residual_normal, stack, weight
from headrace.nn.norm import rms_norm
from headrace.nn.rope import Rope, rotate
from headrace.nn.sharding import constrain
from headrace.nn.stack import Execution, run_layers, run_layers_cached


@dataclass(frozen=True)
class Config:
    """The `model` section of a recipe with `use: llama`. Weights name their axes after these sizes.

    Reading a recipe must not import JAX, so `config.reader` runs this class statement alone: it may use only
    dataclass, field, Literal, math and at_least."""

    layers: int  # number of layers
    embed: int  # width of the residual stream
    heads: int  # number of query heads
    kv_heads: int  # number of key and value heads, each shared by heads / kv_heads query heads
    mlp: int  # hidden units of the MLP
    vocab: int = 0  # tokens in the vocabulary; 0: as many as the data's tokenizer has
    head_dim: int = 0  # width of a head; 0: embed / heads
    activation: Literal["swiglu", "geglu", "reglu", "relu2"] = "swiglu"  # activation of the MLP's gate
    tie_embeddings: bool = True  # whether the embedding is also the output head
    qk_norm: bool = False  # RMSNorm on each head's queries and keys
    norm_eps: float = 1e-5  # constant added to the mean square in RMSNorm
    rope_theta: float = 500_000.0  # base of the rotary frequencies
    # method that stretches rotary positions to a longer context
    rope_scaling: Literal["none", "linear", "ntk", "yarn", "llama3"] = "none"
    rope_factor: float = 1.0  # factor by which rope_scaling stretches the context
    rope_original_length: int = 8192  # context length before stretching, for yarn and llama3 [tokens]

    causal = True  # not a recipe key: EuroBERT runs the same layers with False

    def __post_init__(self) -> None:
        at_least(1, self, "layers", "embed", "heads", "kv_heads", "mlp")
        at_least(0, self, "vocab", "head_dim", "norm_eps")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: expected a divisor of heads, {self.heads}")
        if not self.head_dim:
            if self.embed % self.heads:
                raise ValueError(f"heads: expected a divisor of embed, {self.embed}, or head_dim to be set")
            object.__setattr__(self, "head_dim", self.embed // self.heads)
        if self.head_dim % 2:
            raise ValueError("head_dim: expected an even number, since rotary positions rotate pairs")
        self._check_rope()

    def _check_rope(self) -> None:
        if self.rope_theta <= 0:
            raise ValueError("rope_theta: expected a number above 0")
        if self.rope_scaling == "none" and self.rope_factor != 1:
            raise ValueError("rope_factor: expected rope_scaling to be set too, or it has no effect")
        if self.rope_scaling != "none" and self.rope_factor <= 1:
            raise ValueError("rope_factor: expected more than 1, since rope_scaling stretches the context")
        is_default = self.rope_original_length == Config.rope_original_length
        if self.rope_scaling not in ("yarn", "llama3") and not is_default:
            raise ValueError(
                "rope_original_length: expected rope_scaling to be yarn or llama3, or it has no effect"
            )
        at_least(1, self, "rope_original_length")


@module
class Block:
    """One layer. In `Model.blocks` the weights of all layers are stacked along a leading axis.

    A weight is declared by its axes: `Config` has their sizes, nn/sharding.py splits them over devices. It
    starts from a normal distribution with standard deviation 0.02 unless `init` is given; `residual_normal`
    divides by sqrt(2 * layers). OLMo 2, MoE and other families replace some methods and reuse the others."""

    attn_norm: Array = weight("embed", init=ones)
    w_q: Array = weight("embed", "heads", "head_dim")
    w_k: Array = weight("embed", "kv_heads", "head_dim")
    w_v: Array = weight("embed", "kv_heads", "head_dim")
    w_o: Array = weight("heads", "head_dim", "embed", init=residual_normal(0.02), num_input_axes=2)
    q_norm: Array | None = weight("head_dim", init=ones, when=lambda cfg: cfg.qk_norm)
    k_norm: Array | None = weight("head_dim", init=ones, when=lambda cfg: cfg.qk_norm)
    mlp_norm: Array = weight("embed", init=ones)
    w_gate: Array = weight("embed", "mlp")
    w_up: Array = weight("embed", "mlp")
    w_down: Array = weight("mlp", "embed", init=residual_normal(0.02))

    def project_qkv(self, cfg: Config, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        """Compute queries [b s n h], keys and values [b s k h] from the residual stream x [b s d]."""
        h = rms_norm(x, self.attn_norm, cfg.norm_eps)
        h = quantize_input(self.w_q, h)  # once for all three; no change unless weights are in 8 bits
        q = project(self.w_q, h, "bsd,dnh->bsnh")
        k = project(self.w_k, h, "bsd,dkh->bskh")
        v = project(self.w_v, h, "bsd,dkh->bskh")
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm, cfg.norm_eps), rms_norm(k, self.k_norm, cfg.norm_eps)
        rope = make_rope(cfg)
        return rotate(q, positions, rope), rotate(k, positions, rope), v

    def add_attention(self, cfg: Config, x: Array, attn_out: Array) -> Array:
        """Project the output of attention [b s n h] and add it to the residual stream."""
        return x + project(self.w_o, attn_out, "bsnh,nhd->bsd")

    def add_mlp(self, cfg: Config, x: Array, exec_opts: Execution) -> Array:
        """Compute the gated MLP and add its output to the residual stream."""
        h = rms_norm(x, self.mlp_norm, cfg.norm_eps)
        h = quantize_input(self.w_gate, h)
        gate, up = project(self.w_gate, h, "bsd,df->bsf"), project(self.w_up, h, "bsd,df->bsf")
        # The MLP computes its hidden units again in the backward pass; XLA must not merge the two.
        prevent_cse = exec_opts.needs_cse_barrier(cfg.layers)
        mlp_out = project_gated(cfg.activation, gate, up, self.w_down, prevent_cse=prevent_cse)
        return constrain(x + mlp_out, "batch", "sequence", None)


@module
class Cache:
    """Keys and values of the tokens so far [l b t k h], and how many tokens that is."""

    k: Array
    v: Array
    length: Array


@module
class Model:
    """Embedding, layers, final norm and output head."""

    embedding: Array = weight("vocab", "embed")
    blocks: Block = stack(Block)
    final_norm: Array = weight("embed", init=ones)
    head: Array | None = weight("vocab", "embed", init=normal(0.02), when=lambda cfg: not cfg.tie_embeddings)

    @property
    def unembed(self) -> Array:
        """The matrix [v d] that maps hidden states to logits."""
        return self.embedding if self.head is None else self.head

    def __call__(
        self,
        cfg: Config,
        tokens: Array,
        *,
        exec_opts: Execution,
        segments: Array | None = None,
        positions: Array | None = None,
    ) -> Array:
        """Compute the last hidden states [b s d] of tokens [b s].

        The loss multiplies them by `unembed`, usually in chunks, so that the logits of all tokens never
        need to be in memory. `segments` [b s] numbers the documents in a row; tokens attend within theirs."""
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

        def layer(block: Block, x: Array) -> Array:
            q, k, v = block.project_qkv(cfg, x, positions)
            attn_out = attend(exec_opts.attention, q, k, v, mask=Mask(cfg.causal), segments=segments)
            x = block.add_attention(cfg, x, attn_out)
            return block.add_mlp(cfg, x, exec_opts)

        x = embed(self.embedding, tokens, exec_opts.dtype)
        x = constrain(x, "batch", "sequence", None)  # sharding over the mesh
        x = run_layers(exec_opts, [layer], x, self.blocks)
        return rms_norm(x, self.final_norm, cfg.norm_eps)

    def init_cache(self, cfg: Config, batch_size: int, max_length: int, dtype: DTypeLike) -> Cache:
        """Make an empty cache with room for `max_length` tokens per row."""
        shape = (cfg.layers, batch_size, max_length, cfg.kv_heads, cfg.head_dim)
        return Cache(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype), length=jnp.zeros((), jnp.int32))

    def decode(
        self, cfg: Config, tokens: Array, cache: Cache, *, exec_opts: Execution
    ) -> tuple[Array, Cache]:
        """Compute the hidden states [b s d] of tokens [b s] that continue the cached ones.

        Returns the cache with the new tokens added. Works for a whole prompt as for a single token."""
        start = cache.length
        positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)

        def layer(block: Block, kv: tuple[Array, Array], x: Array) -> tuple[Array, tuple[Array, Array]]:
            cached_k, cached_v = kv
            q, k, v = block.project_qkv(cfg, x, positions)
            k = jax.lax.dynamic_update_slice_in_dim(cached_k, k, start, axis=1)
            v = jax.lax.dynamic_update_slice_in_dim(cached_v, v, start, axis=1)
            # The causal mask also hides the part of the cache that is still empty.
            attn_out = attend(exec_opts.attention, q, k, v, mask=Mask(causal=True), offset=start)
            x = block.add_attention(cfg, x, attn_out)
            return block.add_mlp(cfg, x, exec_opts), (k, v)

        x = embed(self.embedding, tokens, exec_opts.dtype)
        x, (k, v) = run_layers_cached(exec_opts, [layer], x, self.blocks, (cache.k, cache.v))
        hidden = rms_norm(x, self.final_norm, cfg.norm_eps)
        return hidden, Cache(k, v, length=start + tokens.shape[1])


def make_rope(cfg: Config) -> Rope:
    return Rope(cfg.rope_theta, cfg.rope_scaling, cfg.rope_factor, cfg.rope_original_length)


def flops_per_token(cfg: Config, sequence_length: int) -> float:
    """Count the FLOPs of forward and backward pass: 6 per weight, and those of attention, half if causal.

    The head is a matrix product whether it is tied or not; an embedding of its own is only looked up."""
    params = count(Model, cfg) - (0 if cfg.tie_embeddings else cfg.vocab * cfg.embed)
    attention = 12 * cfg.layers * cfg.heads * cfg.head_dim * sequence_length
    return 6 * params + (attention / 2 if cfg.causal else attention)


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
    "blocks.mlp_norm": ("model.layers.{}.post_attention_layernorm.weight", "d -> d"),
    "blocks.w_gate": ("model.layers.{}.mlp.gate_proj.weight", "f d -> d f"),
    "blocks.w_up": ("model.layers.{}.mlp.up_proj.weight", "f d -> d f"),
    "blocks.w_down": ("model.layers.{}.mlp.down_proj.weight", "d f -> f d"),
    "final_norm": ("model.norm.weight", "d -> d"),
    "head": ("lm_head.weight", "v d -> v d"),
}
HF_TYPES = ("llama", "qwen3")  # values of `model_type` in config.json that this family imports
HF_CLASSIFIER = hf_heads.default_layout()  # LlamaForSequenceClassification, LlamaForTokenClassification


def to_hf_config(cfg: Config, sequence_length: int) -> HFSettings:
    """Translate to the settings of config.json. In transformers, Llama with QK-norm is called Qwen 3."""
    if cfg.qk_norm:
        names = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    elif cfg.embed % cfg.heads == 0:
        names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    else:
        raise UserError(
            f"model.heads: found {cfg.heads}, expected a divisor of model.embed, {cfg.embed}: transformers "
            "loads no other Llama"
        )
    return names | hf_config.decoder_settings(cfg, sequence_length)


def from_hf_config(settings: HFSettings) -> dict[str, Any]:
    """Translate the settings of config.json to a recipe's `model` section."""
    section = hf_config.decoder_keys(settings, Config, qk_norm=settings["model_type"] == "qwen3")
    return {"use": "llama"} | section


def to_gguf(cfg: Config, soft_cap: float | None) -> Architecture:
    """Describe the model for llama.cpp.

    Its rotary positions rotate dimensions (2i, 2i + 1) in Llama, but (i, i + h/2), as here, in Qwen 3."""
    name = "qwen3" if cfg.qk_norm else "llama"
    if cfg.activation != "swiglu":
        refuse_export("model.activation", cfg.activation, name, "swiglu")
    if soft_cap is not None:
        refuse_export("loss.soft_cap", soft_cap, name, "logits without one")
    return Architecture(name, interleaved=not cfg.qk_norm)
