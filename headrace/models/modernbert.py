"""ModernBERT: an encoder in which layers that see the whole text alternate with layers that see a window,
with GeGLU, rotary positions of two bases and no biases except the head's (arXiv 2412.13663)."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from headrace.attention import attend
from headrace.config.sections import at_least
from headrace.errors import UserError
from headrace.model_formats import hf_config
from headrace.model_formats.hf_config import HFSettings
from headrace.model_formats.hf_heads import Head, HeadLayout, linear_tensors
from headrace.models.llama import Cache
from headrace.nn.attention_mask import Mask
from headrace.nn.bias import pad_columns
from headrace.nn.layer_kinds import LayerKind, keys_seen
from headrace.nn.linear import embed, project, quantize_input
from headrace.nn.mlp import project_gated
from headrace.nn.module import Array, count, module, ones, residual_truncated, stack, truncated, weight, zeros
from headrace.nn.norm import layer_norm
from headrace.nn.rope import Rope, rotate
from headrace.nn.sharding import constrain
from headrace.nn.stack import Execution, run_layers, run_layers_cached


@dataclass(frozen=True)
class Config:
    """The `model` section of a recipe with `use: modernbert`."""

    layers: int  # number of layers
    embed: int  # width of the residual stream
    heads: int  # number of attention heads
    mlp: int  # hidden units of the MLP
    vocab: int = 0  # tokens in the vocabulary; 0: as many as the data's tokenizer has
    window: int = 128  # size of the attention window of most layers, half of it to either side [tokens]
    global_every: int = 3  # interval between layers without a window, starting with the first layer
    norm_eps: float = 1e-5  # constant added to the variance in LayerNorm
    rope_theta: float = 160_000.0  # base of the rotary frequencies in layers without a window
    rope_local_theta: float = 10_000.0  # base of the rotary frequencies in layers with a window

    # Fixed by the architecture; no recipe keys.
    causal = False
    tie_embeddings = True
    rope_scaling = "none"
    rope_factor = 1.0
    rope_original_length = 8192

    def __post_init__(self) -> None:
        at_least(2, self, "layers", "window")
        at_least(1, self, "embed", "heads", "mlp", "global_every")
        at_least(0, self, "vocab", "norm_eps")
        for name, theta in (("rope_theta", self.rope_theta), ("rope_local_theta", self.rope_local_theta)):
            if theta <= 0:
                raise ValueError(f"{name}: expected a number above 0")
        if self.embed % (2 * self.heads):
            raise ValueError(f"heads: expected embed, {self.embed}, to be an even multiple of it")

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def later_layers(self) -> int:
        return self.layers - 1

    @property
    def head_out(self) -> int:
        return self.embed


# These functions also take the Config of modernbert_decoder.py, which has the same attributes.
def layer_kinds(cfg: Config) -> list[LayerKind]:
    """The kinds of the first layers, which repeat. A decoder sees only the half of a window behind a
    token."""
    window = Mask(True, cfg.window // 2) if cfg.causal else Mask(False, cfg.window)
    full = LayerKind(Mask(cfg.causal), Rope(cfg.rope_theta))
    return [full] + [LayerKind(window, Rope(cfg.rope_local_theta))] * (cfg.global_every - 1)


@module
class Norm:
    """The weight of a LayerNorm, as a module that can be stacked."""

    weight: Array = weight("embed", init=ones)


@module
class Block:
    """One layer, without the norm before attention, which the first layer does not have."""

    w_q: Array = weight("embed", "heads", "head_dim", init=truncated(0.02))
    w_k: Array = weight("embed", "kv_heads", "head_dim", init=truncated(0.02))
    w_v: Array = weight("embed", "kv_heads", "head_dim", init=truncated(0.02))
    w_o: Array = weight("heads", "head_dim", "embed", init=residual_truncated(0.02), num_input_axes=2)
    mlp_norm: Array = weight("embed", init=ones)
    w_gate: Array = weight("embed", "mlp", init=truncated(0.02))
    w_up: Array = weight("embed", "mlp", init=truncated(0.02))
    w_down: Array = weight("mlp", "embed", init=residual_truncated(0.02))

    def project_qkv(self, kind: LayerKind, h: Array, positions: Array) -> tuple[Array, Array, Array]:
        """Compute queries, keys and values [b s n h] from normalized states h [b s d]."""
        h = quantize_input(self.w_q, h)
        q, k, v = (project(w, h, "bsd,dnh->bsnh") for w in (self.w_q, self.w_k, self.w_v))
        return rotate(q, positions, kind.rope), rotate(k, positions, kind.rope), v

    def add_attention(self, x: Array, attn_out: Array) -> Array:
        """Project the output of attention [b s n h] and add it to the residual stream."""
        return x + project(self.w_o, attn_out, "bsnh,nhd->bsd")

    def add_mlp(self, cfg: Config, x: Array, exec_opts: Execution) -> Array:
        """Compute the gated MLP and add its output to the residual stream."""
        h = quantize_input(self.w_gate, layer_norm(x, self.mlp_norm, cfg.norm_eps))
        gate, up = project(self.w_gate, h, "bsd,df->bsf"), project(self.w_up, h, "bsd,df->bsf")
        prevent_cse = exec_opts.needs_cse_barrier(cfg.layers, cfg.global_every)
        mlp_out = project_gated("geglu_erf", gate, up, self.w_down, prevent_cse=prevent_cse)
        return constrain(x + mlp_out, "batch", "sequence", None)


# What the loop over layers passes to one of them: block, weight of the norm, and whether it is the first
# layer.
Layer = tuple[Block, Array, Array]


@module
class Model:
    """Embedding, layers, final norm and head."""

    embedding: Array = weight("vocab", "embed", init=truncated(0.02))
    embed_norm: Array = weight("embed", init=ones)
    attn_norms: Norm = stack(Norm, "later_layers")  # the first layer reads normalized embeddings
    blocks: Block = stack(Block)
    final_norm: Array = weight("embed", init=ones)
    w_head: Array = weight("embed", "head_out", init=residual_truncated(0.02))
    head_norm: Array = weight("embed", init=ones)
    head_bias: Array = weight("vocab", init=zeros, num_input_axes=0)

    @property
    def unembed(self) -> Array:
        """The matrix [v d+128] that maps hidden states to logits: embedding, bias and zeros."""
        return jnp.concatenate([self.embedding, pad_columns(self.head_bias)], axis=1)

    def __call__(
        self,
        cfg: Config,
        tokens: Array,
        *,
        exec_opts: Execution,
        segments: Array | None = None,
        positions: Array | None = None,
    ) -> Array:
        """Compute the last hidden states [b s d+128] of tokens [b s], head included."""
        x = self.states(cfg, tokens, exec_opts=exec_opts, segments=segments, positions=positions)
        return self.head(cfg, x)

    def states(
        self,
        cfg: Config,
        tokens: Array,
        *,
        exec_opts: Execution,
        segments: Array | None = None,
        positions: Array | None = None,
    ) -> Array:
        """Compute the output of the layers [b s d], without the head."""
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

        def layer(kind: LayerKind, weights: Layer, x: Array) -> Array:
            block, norm, is_first = weights
            q, k, v = block.project_qkv(kind, _norm_unless_first(cfg, x, norm, is_first), positions)
            attn_out = attend(exec_opts.attention, q, k, v, mask=kind.mask, segments=segments)
            return block.add_mlp(cfg, block.add_attention(x, attn_out), exec_opts)

        bodies = [functools.partial(layer, kind) for kind in layer_kinds(cfg)]
        x = run_layers(exec_opts, bodies, self.embed(cfg, tokens, exec_opts.dtype), self.layers(cfg))
        return layer_norm(x, self.final_norm, cfg.norm_eps)

    def embed(self, cfg: Config, tokens: Array, dtype: jnp.dtype) -> Array:
        """Look up and normalize the embeddings of tokens [b s]."""
        x = layer_norm(embed(self.embedding, tokens, dtype), self.embed_norm, cfg.norm_eps)
        return constrain(x, "batch", "sequence", None)

    def layers(self, cfg: Config) -> Layer:
        """Blocks and norms of all layers, with a norm for the first layer that is not used."""
        unused = jnp.ones_like(self.attn_norms.weight[:1])
        norms = jnp.concatenate([unused, self.attn_norms.weight])
        return self.blocks, norms, jnp.arange(cfg.layers) == 0

    def head(self, cfg: Config, x: Array) -> Array:
        """Compute the head's hidden states [b s d+128] of the layers' output x [b s d]; `unembed` follows."""
        h = project(self.w_head, x, "bsd,de->bse")
        h = layer_norm(jax.nn.gelu(h, approximate=False), self.head_norm, cfg.norm_eps)
        return jnp.concatenate([h, pad_columns(jnp.ones_like(h[..., 0]))], axis=-1)

    def init_cache(self, cfg: Config, batch_size: int, max_length: int, dtype: DTypeLike) -> Cache:
        """Make an empty cache with room for `max_length` tokens per row."""
        shape = (cfg.layers, batch_size, max_length, cfg.kv_heads, cfg.head_dim)
        return Cache(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype), length=jnp.zeros((), jnp.int32))

    def decode(
        self, cfg: Config, tokens: Array, cache: Cache, *, exec_opts: Execution
    ) -> tuple[Array, Cache]:
        """Compute the hidden states [b s d+128] of tokens [b s] that continue the cached ones.

        Returns the cache with the new tokens added."""
        start = cache.length
        positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)

        def layer(
            kind: LayerKind, weights: Layer, kv: tuple[Array, Array], x: Array
        ) -> tuple[Array, tuple[Array, Array]]:
            (block, norm, is_first), (cached_k, cached_v) = weights, kv
            q, k, v = block.project_qkv(kind, _norm_unless_first(cfg, x, norm, is_first), positions)
            k = jax.lax.dynamic_update_slice_in_dim(cached_k, k, start, axis=1)
            v = jax.lax.dynamic_update_slice_in_dim(cached_v, v, start, axis=1)
            attn_out = attend(exec_opts.attention, q, k, v, mask=kind.mask, offset=start)
            return block.add_mlp(cfg, block.add_attention(x, attn_out), exec_opts), (k, v)

        bodies = [functools.partial(layer, kind) for kind in layer_kinds(cfg)]
        x = self.embed(cfg, tokens, exec_opts.dtype)
        x, (k, v) = run_layers_cached(exec_opts, bodies, x, self.layers(cfg), (cache.k, cache.v))
        hidden = self.head(cfg, layer_norm(x, self.final_norm, cfg.norm_eps))
        return hidden, Cache(k, v, length=start + tokens.shape[1])


def _norm_unless_first(cfg: Config, x: Array, weight: Array, is_first: Array) -> Array:
    return jnp.where(is_first, x, layer_norm(x, weight, cfg.norm_eps))


def flops_per_token(cfg: Config, sequence_length: int) -> float:
    """Count the FLOPs of forward and backward pass: 6 per weight, and those of attention to visible keys."""
    keys = keys_seen(layer_kinds(cfg), cfg.layers, sequence_length)
    return 6 * count(Model, cfg) + 12 * cfg.heads * cfg.head_dim * keys


# Weight -> (Hugging Face tensor, its axes -> ours). {+1} is the layer after; [0/3] the first of three parts.
HF_TENSORS = {
    "embedding": ("model.embeddings.tok_embeddings.weight", "v d -> v d"),
    "embed_norm": ("model.embeddings.norm.weight", "d -> d"),
    "attn_norms.weight": ("model.layers.{+1}.attn_norm.weight", "d -> d"),
    "blocks.w_q": ("model.layers.{}.attn.Wqkv.weight[0/3]", "(n h) d -> d n h"),
    "blocks.w_k": ("model.layers.{}.attn.Wqkv.weight[1/3]", "(n h) d -> d n h"),
    "blocks.w_v": ("model.layers.{}.attn.Wqkv.weight[2/3]", "(n h) d -> d n h"),
    "blocks.w_o": ("model.layers.{}.attn.Wo.weight", "d (n h) -> n h d"),
    "blocks.mlp_norm": ("model.layers.{}.mlp_norm.weight", "d -> d"),
    "blocks.w_gate": ("model.layers.{}.mlp.Wi.weight[0/2]", "f d -> d f"),
    "blocks.w_up": ("model.layers.{}.mlp.Wi.weight[1/2]", "f d -> d f"),
    "blocks.w_down": ("model.layers.{}.mlp.Wo.weight", "d f -> f d"),
    "final_norm": ("model.final_norm.weight", "d -> d"),
    "w_head": ("head.dense.weight", "e d -> d e"),
    "head_norm": ("head.norm.weight", "d -> d"),
    "head_bias": ("decoder.bias", "v -> v"),
}
HF_TYPES = ("modernbert",)
# Further names of config.json for the tokens that begin and end a text. transformers' defaults are ids above
# 50,000, which a smaller vocabulary does not have; its decoder does not accept null for them.
HF_SPECIAL = {"cls": "bos", "sep": "eos"}
HF_CLASSIFIER = HeadLayout(
    Head(
        "ModernBertForSequenceClassification",
        linear_tensors("classes", "classifier"),
        {"first": "cls", "mean": "mean"},
    ),
    Head("ModernBertForTokenClassification", linear_tensors("classes", "classifier"), {"each": ""}),
    drops=("head_bias",),
    applies_lm_head=True,
    pooling_key="classifier_pooling",
)


def is_global(layer: int, every: int) -> bool:
    """Whether a layer sees the whole text."""
    return layer % every == 0


def to_hf_config(cfg: Config, sequence_length: int) -> HFSettings:
    """Translate to the settings of config.json."""
    names: dict[str, Any] = {"architectures": ["ModernBertForMaskedLM"], "model_type": "modernbert"}
    no_ids = {f"{name}_token_id": None for name in HF_SPECIAL}
    return names | common_hf_settings(cfg, sequence_length) | no_ids


def common_hf_settings(cfg: Config, sequence_length: int) -> HFSettings:
    """The settings of config.json that encoder and decoder share, under the names of transformers 5 and 4."""
    return {
        "vocab_size": cfg.vocab,
        "hidden_size": cfg.embed,
        "intermediate_size": cfg.mlp,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "hidden_activation": "gelu",
        "classifier_activation": "gelu",
        "max_position_embeddings": sequence_length,
        "norm_eps": cfg.norm_eps,
        "local_attention": cfg.window,
        "global_attn_every_n_layers": cfg.global_every,
        "layer_types": hf_config.layer_type_settings(cfg, is_global)["layer_types"],
        "rope_parameters": hf_config.two_rope_settings(cfg)["rope_parameters"],
        "global_rope_theta": cfg.rope_theta,
        "local_rope_theta": cfg.rope_local_theta,
        "tie_word_embeddings": True,
        "decoder_bias": True,
    } | dict.fromkeys(BIASES, False)


def from_hf_config(settings: HFSettings) -> dict[str, Any]:
    """Translate the settings of config.json to a recipe's `model` section."""
    return {"use": "modernbert"} | common_keys(settings, Config)


BIASES = ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias")
# The only values of these settings that can be imported.
REQUIRED: dict[str, Any] = {"hidden_activation": "gelu", "classifier_activation": "gelu"}
REQUIRED |= {"decoder_bias": True} | dict.fromkeys(BIASES, False)


def common_keys(settings: HFSettings, config: type) -> dict[str, Any]:
    """The keys of encoder or decoder from config.json."""
    for name, value in REQUIRED.items():
        if settings.get(name, value) != value:
            shown = f"found {hf_config.short_value(settings[name])}, only {hf_config.short_value(value)}"
            raise UserError(f"config.json: {name}: {shown} can be imported")
    every = hf_config.get_int(settings, "global_attn_every_n_layers", 3)
    plain, local = hf_config.split_local_rope(
        settings, ("global_rope_theta", 1.6e5), ("local_rope_theta", 1e4)
    )
    keys = {
        "vocab": hf_config.get_int(settings, "vocab_size"),
        "layers": hf_config.get_int(settings, "num_hidden_layers"),
        "embed": hf_config.get_int(settings, "hidden_size"),
        "heads": hf_config.get_int(settings, "num_attention_heads"),
        "mlp": hf_config.get_int(settings, "intermediate_size"),
        "window": hf_config.get_int(settings, "local_attention", 128),
        "global_every": hf_config.read_global_every(settings, every, is_global),
        "norm_eps": hf_config.get_float(settings, "norm_eps", 1e-5),
        "rope_local_theta": local,
        "tie_embeddings": settings.get("tie_word_embeddings", True),
    }
    plain.pop("layer_types", None)
    return hf_config.select_config_keys(keys | hf_config.rope_keys(plain), plain, config)
