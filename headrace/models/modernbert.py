"""ModernBERT: an encoder whose layers see the whole text and a window by turns, with GeGLU, rotary positions
of two bases and no biases but the head's (arXiv 2412.13663)."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from headrace.model_wrappers.classification_head import Head, Layout, dense
from headrace.errors import UserError
from headrace.nn.stack import Execution, cached_layers, layers_in_turn
from headrace.model_formats import hf_config as config_json
from headrace.attention import Mask, attend
from headrace.nn.bias import first_of_many
from headrace.nn.layer_kinds import Kind, keys_seen
from headrace.nn.mlp import gated
from headrace.nn.norm import layer_norm
from headrace.nn.rope import Rope, rotate
from headrace.nn.sharding import constrain
from headrace.models.llama import Cache
from headrace.nn.module import Array, count, module, ones, residual_truncated, stack, truncated, weight, zeros
from headrace.nn.linear import lookup, prepared, project


@dataclass(frozen=True)
class Config:
    layers: int
    embed: int
    heads: int
    mlp: int
    vocab: int = 0  # 0: as many as the data's tokenizer has
    window: int = 128  # tokens that most layers see, half of them before and half after their own
    global_every: int = 3  # the first layer sees the whole text, and then each so many-th
    norm_eps: float = 1e-5
    rope_theta: float = 160_000.0  # of the layers that see the whole text; 10,000 in the first phase
    local_theta: float = 10_000.0  # of those with a window

    # Fixed by the architecture; the block reads them.
    causal = False
    tied = True
    rope_scaling = "none"
    rope_factor = 1.0
    rope_original = 8192

    def __post_init__(self):
        for name in ("layers", "window"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name}: expected 2 or more")
        for name in ("embed", "heads", "mlp", "global_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more")
        for name in ("vocab", "norm_eps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected 0 or more")
        for name in ("rope_theta", "local_theta"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: expected a number above 0")
        if self.embed % (2 * self.heads):
            raise ValueError(f"heads: expected embed, {self.embed}, to be an even multiple of it")

    @property
    def head_dim(self):
        return self.embed // self.heads

    @property
    def kv_heads(self):
        return self.heads

    @property
    def later_layers(self):
        return self.layers - 1

    @property
    def head_out(self):
        return self.embed


def kinds(cfg: Any) -> list[Kind]:
    """Those of the first layers; the others repeat them. Half of a window lies ahead, and a decoder has none
    of that half."""
    near = Mask(True, cfg.window // 2) if cfg.causal else Mask(False, cfg.window)
    whole = Kind(Mask(cfg.causal), Rope(cfg.rope_theta))
    return [whole] + [Kind(near, Rope(cfg.local_theta))] * (cfg.global_every - 1)


@module
class Norm:
    weight: Array = weight("embed", init=ones)


@module
class Block:
    w_q: Array = weight("embed", "heads", "head_dim", init=truncated(0.02))
    w_k: Array = weight("embed", "kv_heads", "head_dim", init=truncated(0.02))
    w_v: Array = weight("embed", "kv_heads", "head_dim", init=truncated(0.02))
    w_o: Array = weight("heads", "head_dim", "embed", init=residual_truncated(0.02), inputs=2)
    mlp_norm: Array = weight("embed", init=ones)
    w_gate: Array = weight("embed", "mlp", init=truncated(0.02))
    w_up: Array = weight("embed", "mlp", init=truncated(0.02))
    w_down: Array = weight("mlp", "embed", init=residual_truncated(0.02))

    def heads(self, kind: Kind, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        """Queries, keys and values [b s n h] of what is normed already."""
        h = prepared(self.w_q, x)
        q, k, v = (project(w, h, "bsd,dnh->bsnh") for w in (self.w_q, self.w_k, self.w_v))
        return rotate(q, positions, kind.rope), rotate(k, positions, kind.rope), v

    def rest(self, cfg: Any, x: Array, mixed: Array, how: Execution) -> Array:
        """What follows once the values are mixed: output projection and MLP, each added to the stream."""
        x = x + project(self.w_o, mixed, "bsnh,nhd->bsd")
        h = prepared(self.w_gate, layer_norm(x, self.mlp_norm, cfg.norm_eps))
        gate, up = project(self.w_gate, h, "bsd,df->bsf"), project(self.w_up, h, "bsd,df->bsf")
        merges = how.merges(cfg.layers, cfg.global_every)
        out = gated("geglu_erf", gate, up, self.w_down, merges=merges)
        return constrain(x + out, "batch", "sequence", None)


@module
class Model:
    embedding: Array = weight("vocab", "embed", init=truncated(0.02))
    embed_norm: Array = weight("embed", init=ones)
    attn_norms: Norm = stack(Norm, "later_layers")  # the first layer reads what is normed already
    blocks: Block = stack(Block)
    final_norm: Array = weight("embed", init=ones)
    w_head: Array = weight("embed", "head_out", init=residual_truncated(0.02))
    head_norm: Array = weight("embed", init=ones)
    head_bias: Array = weight("vocab", init=zeros, inputs=0)

    @property
    def unembed(self) -> Array:
        """[v d+128]: the embedding, the bias, and zeros."""
        return jnp.concatenate([self.embedding, first_of_many(self.head_bias)], axis=1)

    def __call__(
        self,
        cfg: Any,
        tokens: Array,
        *,
        how: Execution,
        segments: Array | None = None,
        positions: Array | None = None,
    ) -> Array:
        """The last hidden states [b s d+128]; `unembed` turns them into logits."""
        return self.head(cfg, self.states(cfg, tokens, how=how, segments=segments, positions=positions))

    def states(
        self,
        cfg: Any,
        tokens: Array,
        *,
        how: Execution,
        segments: Array | None = None,
        positions: Array | None = None,
    ) -> Array:
        """What the layers make of the text [b s d]."""
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

        def body(kind: Kind, layer: Any, x: Array) -> Array:
            block, *norm = layer
            q, k, v = block.heads(kind, _normed(cfg, x, *norm), positions)
            mixed = attend(how.attention, q, k, v, mask=kind.mask, segments=segments)
            return block.rest(cfg, x, mixed, how)

        bodies = [functools.partial(body, kind) for kind in kinds(cfg)]
        x = layers_in_turn(how, bodies, self.embed(cfg, tokens, how.dtype), (self.blocks, *self.norms(cfg)))
        return layer_norm(x, self.final_norm, cfg.norm_eps)

    def embed(self, cfg: Any, tokens: Array, dtype: Any) -> Array:
        x = layer_norm(lookup(self.embedding, tokens, dtype), self.embed_norm, cfg.norm_eps)
        return constrain(x, "batch", "sequence", None)

    def norms(self, cfg: Any) -> tuple[Array, Array]:
        """Of attention, for every layer, and which of them is the first: it has none."""
        none = jnp.ones_like(self.attn_norms.weight[:1])
        return jnp.concatenate([none, self.attn_norms.weight]), jnp.arange(cfg.layers) == 0

    def head(self, cfg: Any, x: Array) -> Array:
        h = project(self.w_head, x, "bsd,de->bse")
        h = layer_norm(jax.nn.gelu(h, approximate=False), self.head_norm, cfg.norm_eps)
        return jnp.concatenate([h, first_of_many(jnp.ones_like(h[..., 0]))], axis=-1)

    def cache(self, cfg: Any, batch: int, length: int, dtype: Any) -> Cache:
        shape = (cfg.layers, batch, length, cfg.kv_heads, cfg.head_dim)
        return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((), jnp.int32))

    def decode(self, cfg: Any, tokens: Array, cache: Cache, *, how: Execution) -> tuple[Array, Cache]:
        """The hidden states of the next tokens after those in the cache, and the cache with them."""
        start = cache.length
        positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)

        def body(kind: Kind, x: Array, layer: Any) -> tuple[Array, Any]:
            (block, *norm), (keys, values) = layer
            q, k, v = block.heads(kind, _normed(cfg, x, *norm), positions)
            keys = jax.lax.dynamic_update_slice_in_dim(keys, k, start, axis=1)
            values = jax.lax.dynamic_update_slice_in_dim(values, v, start, axis=1)
            mixed = attend(how.attention, q, keys, values, mask=kind.mask, offset=start)
            return block.rest(cfg, x, mixed, how), (keys, values)

        bodies = [functools.partial(body, kind) for kind in kinds(cfg)]
        x, layers = self.embed(cfg, tokens, how.dtype), (self.blocks, *self.norms(cfg))
        x, (keys, values) = cached_layers(how, bodies, x, layers, (cache.k, cache.v))
        hidden = self.head(cfg, layer_norm(x, self.final_norm, cfg.norm_eps))
        return hidden, Cache(keys, values, start + tokens.shape[1])


def _normed(cfg: Any, x: Array, weight: Array, is_first: Array) -> Array:
    return jnp.where(is_first, x, layer_norm(x, weight, cfg.norm_eps))


def flops(cfg: Any, sequence: int) -> float:
    """Forward and backward FLOPs a token: 6 a weight that multiplies, and the scores of what is seen."""
    scores = 12 * cfg.heads * cfg.head_dim * keys_seen(kinds(cfg), cfg.layers, sequence)
    return 6 * count(Model, cfg) + scores


# Our weight -> their tensor ({} is the layer) and their axes in terms of ours.
HF = {
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
# Names of config.json for what begins and ends a text, beside the usual ones. transformers' own ids for them
# are above 50,000, beyond a smaller vocabulary; its decoder takes no null in their place.
HF_SPECIAL = {"cls": "bos", "sep": "eos"}
CLASSES = Layout(
    Head(
        "ModernBertForSequenceClassification",
        dense("classes", "classifier"),
        {"first": "cls", "mean": "mean"},
    ),
    Head("ModernBertForTokenClassification", dense("classes", "classifier"), {"each": ""}),
    drops=("head_bias",),
    keeps_head=True,
    setting="classifier_pooling",
)


def sees_all(layer: int, every: int) -> bool:
    return layer % every == 0


def to_hf(cfg: Any, sequence: int) -> dict[str, Any]:
    names: dict[str, Any] = {"architectures": ["ModernBertForMaskedLM"], "model_type": "modernbert"}
    return names | write(cfg, sequence) | {f"{name}_token_id": None for name in HF_SPECIAL}


def write(cfg: Any, sequence: int) -> dict[str, Any]:
    """What config.json says of either twin, in the words of transformers 5 and 4."""
    return {
        "vocab_size": cfg.vocab,
        "hidden_size": cfg.embed,
        "intermediate_size": cfg.mlp,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "hidden_activation": "gelu",
        "classifier_activation": "gelu",
        "max_position_embeddings": sequence,
        "norm_eps": cfg.norm_eps,
        "local_attention": cfg.window,
        "global_attn_every_n_layers": cfg.global_every,
        "layer_types": config_json.write_kinds(cfg, sees_all)["layer_types"],
        "rope_parameters": config_json.write_two_ropes(cfg)["rope_parameters"],
        "global_rope_theta": cfg.rope_theta,
        "local_rope_theta": cfg.local_theta,
        "tie_word_embeddings": True,
        "decoder_bias": True,
    } | dict.fromkeys(BIASES, False)


def from_hf(settings: dict[str, Any]) -> dict[str, Any]:
    """The recipe's model section for a config.json."""
    return {"use": "modernbert"} | read(settings, Config)


BIASES = ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias")
ONLY: dict[str, Any] = {"hidden_activation": "gelu", "classifier_activation": "gelu"}
ONLY |= {"decoder_bias": True} | dict.fromkeys(BIASES, False)


def read(settings: dict[str, Any], config: type) -> dict[str, Any]:
    for name, only in ONLY.items():
        if settings.get(name, only) != only:
            said = f"found {config_json.shown(settings[name])}, only {config_json.shown(only)}"
            raise UserError(f"config.json: {name}: {said} can be imported")
    whole, number = config_json.whole, config_json.number
    every = whole(settings, "global_attn_every_n_layers", 3)
    plain, local = config_json.read_two_ropes(settings, global_rope_theta=1.6e5, local_rope_theta=1e4)
    found = {
        "vocab": whole(settings, "vocab_size"),
        "layers": whole(settings, "num_hidden_layers"),
        "embed": whole(settings, "hidden_size"),
        "heads": whole(settings, "num_attention_heads"),
        "mlp": whole(settings, "intermediate_size"),
        "window": whole(settings, "local_attention", 128),
        "global_every": config_json.read_kinds(settings, every, sees_all),
        "norm_eps": number(settings, "norm_eps", 1e-5),
        "local_theta": local,
        "tied": settings.get("tie_word_embeddings", True),
    }
    plain.pop("layer_types", None)
    return config_json.section(found | config_json.read_rope(plain), plain, config)
