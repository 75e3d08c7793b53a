"""DeBERTa-V3: an encoder whose attention tells content from distance, trained to find the tokens that a
generator, half as deep and trained beside it, has replaced (arXiv 2006.03654, 2111.09543)."""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from headrace.model_wrappers.classification_head import Head, Layout, dense
from headrace.errors import UserError
from headrace.nn.stack import Execution, layers
from headrace.model_formats import hf_config as config_json
from headrace.kernels import disentangled_tpu as disentangled_mosaic
from headrace.nn.activations import PLAIN
from headrace.nn.bias import biased, first_of_many
from headrace.attention._disentangled import attend
from headrace.nn.mlp import plain
from headrace.nn.norm import layer_norm
from headrace.nn.sharding import constrain
from headrace.nn.module import Array, Axes, count, module, nested, normal, ones, stack, weight, zeros
from headrace.nn.linear import lookup, prepared, project


@dataclass(frozen=True)
class Config:
    layers: int
    embed: int
    heads: int
    mlp: int
    # With bits: of use where w_down is frozen.
    activation: Literal["gelu", "gelu_bits", "silu", "silu_bits", "relu", "relu_bits", "relu2"] = "gelu"
    vocab: int = 0  # 0: as many as the data's tokenizer has
    generator: int = 0  # layers of the generator that objective rtd trains beside it; 0: there is none
    sharing: Literal["gdes", "nes"] = "gdes"  # embeddings: the generator's plus a difference, or its own
    mask_decoder: bool = False  # tokens are told with absolute positions, through the last layer twice
    buckets: int = 256  # distances to either side that are told apart
    reach: int = 512  # from here on all distances are one; the mask decoder has as many positions
    norm_eps: float = 1e-7

    # Fixed by the architecture.
    causal = False
    tied = True
    answers = 1

    @property
    def exact(self) -> str:
        """The activation, however its derivative is kept."""
        return self.activation.removesuffix("_bits")

    def __post_init__(self):
        for name in ("layers", "embed", "heads", "mlp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more")
        for name in ("vocab", "generator", "norm_eps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected 0 or more")
        if self.embed % self.heads:
            raise ValueError(f"heads: expected a divisor of embed, {self.embed}")
        if self.buckets < 4 or self.buckets % 2:
            raise ValueError("buckets: expected an even number of 4 or more")
        if self.reach < self.buckets // 2 + 2:
            raise ValueError("reach: expected more than half of buckets, plus one")
        if not self.generator and self.sharing != type(self).sharing:
            raise ValueError("sharing: expected generator to be set as well, or it has no effect")
        if self.mask_decoder and (self.generator or self.layers) < 2:
            name = "generator" if self.generator else "layers"
            raise ValueError(f"{name}: expected 2 or more, since mask_decoder reads the last but one")

    @property
    def head_dim(self):
        return self.embed // self.heads

    @property
    def kv_heads(self):
        return self.heads

    @property
    def head_out(self):
        return self.embed

    @property
    def distances(self):
        return 2 * self.buckets

    @property
    def places(self):
        return self.reach


def of_generator(cfg: Any) -> Any:
    return dataclasses.replace(cfg, layers=cfg.generator, generator=0, sharing=Config.sharing)


def tells(cfg: Any) -> bool:
    """Whether it tells tokens, and not where some were replaced."""
    return not cfg.generator


def finds(cfg: Any) -> bool:
    return bool(cfg.generator)


def has_places(cfg: Any) -> bool:
    return cfg.mask_decoder and tells(cfg)


def differences(cfg: Any) -> dict[str, str]:
    """The weights that are held as the difference to another, and to which."""
    return {"embedding": "generator.embedding"} if finds(cfg) and cfg.sharing == "gdes" else {}


def zeros_if_shared(key: Array, axes: Axes, shape: tuple[int, ...], cfg: Any) -> Array:
    """The difference to the generator's embedding begins at 0."""
    fresh = zeros if differences(cfg) else normal(0.02)
    return fresh(key, axes, shape, cfg)


@module
class Block:
    w_q: Array = weight("embed", "heads", "head_dim")
    b_q: Array = weight("heads", "head_dim", init=zeros, inputs=0)
    w_k: Array = weight("embed", "heads", "head_dim")
    b_k: Array = weight("heads", "head_dim", init=zeros, inputs=0)
    w_v: Array = weight("embed", "heads", "head_dim")
    b_v: Array = weight("heads", "head_dim", init=zeros, inputs=0)
    w_o: Array = weight("heads", "head_dim", "embed", inputs=2)
    b_o: Array = weight("embed", init=zeros, inputs=0)
    attn_norm: Array = weight("embed", init=ones)
    attn_norm_bias: Array = weight("embed", init=zeros, inputs=0)
    w_up: Array = weight("embed", "mlp")
    b_up: Array = weight("mlp", init=zeros, inputs=0)
    w_down: Array = weight("mlp", "embed")
    b_down: Array = weight("embed", init=zeros, inputs=0)
    mlp_norm: Array = weight("embed", init=ones)
    mlp_norm_bias: Array = weight("embed", init=zeros, inputs=0)

    def __call__(
        self,
        cfg: Any,
        x: Array,
        distances: Array,
        *,
        how: Execution,
        segments: Array | None,
        queries: Array | None = None,
    ) -> Array:
        """`queries`, where they are other states than x, are what the layer adds to. The vectors of distances
        [r d] go through the same matrices as queries and keys do."""
        stream = x if queries is None else queries
        table = distances.astype(x.dtype)[None]
        vectors = prepared(self.w_q, table)
        mixed = attend(
            how.attention,
            _heads(self.w_q, self.b_q, prepared(self.w_q, stream)),
            _heads(self.w_k, self.b_k, prepared(self.w_k, x)),
            _heads(self.w_v, self.b_v, prepared(self.w_v, x)),
            q_table=_heads(self.w_q, self.b_q, vectors)[0],
            k_table=_heads(self.w_k, self.b_k, vectors)[0],
            reach=cfg.reach,
            segments=segments,
        )
        out = biased(project(self.w_o, mixed, "bsnh,nhd->bsd"), self.b_o)
        x = _normed(cfg, stream + out, self.attn_norm, self.attn_norm_bias)
        up = biased(project(self.w_up, x, "bsd,df->bsf"), self.b_up)
        out = biased(plain(cfg.activation, up, self.w_down, merges=how.merges(cfg.layers)), self.b_down)
        x = _normed(cfg, x + out, self.mlp_norm, self.mlp_norm_bias)
        return constrain(x, "batch", "sequence", None)


@module
class Model:
    # Where a generator shares its own, the difference to it.
    embedding: Array = weight("vocab", "embed", init=zeros_if_shared)
    embed_norm: Array = weight("embed", init=ones)
    embed_norm_bias: Array = weight("embed", init=zeros, inputs=0)
    distances: Array = weight("distances", "embed")
    distance_norm: Array = weight("embed", init=ones)
    distance_norm_bias: Array = weight("embed", init=zeros, inputs=0)
    blocks: Block = stack(Block)
    places: Array | None = weight("places", "embed", when=has_places)
    w_head: Array | None = weight("embed", "head_out", when=tells)
    b_head: Array | None = weight("embed", init=zeros, inputs=0, when=tells)
    head_norm: Array | None = weight("embed", init=ones, when=tells)
    head_norm_bias: Array | None = weight("embed", init=zeros, inputs=0, when=tells)
    head_bias: Array | None = weight("vocab", init=zeros, inputs=0, when=tells)
    find_norm: Array | None = weight("embed", init=ones, when=finds)
    find_norm_bias: Array | None = weight("embed", init=zeros, inputs=0, when=finds)
    w_find: Array | None = weight("embed", "head_out", when=finds)
    b_find: Array | None = weight("embed", init=zeros, inputs=0, when=finds)
    w_answer: Array | None = weight("embed", "answers", when=finds)
    b_answer: Array | None = weight("answers", init=zeros, inputs=0, when=finds)
    generator: "Model | None" = nested(lambda: Model, of_generator, when=finds)

    @property
    def unembed(self) -> Array:
        """[v d+128]: the embedding, the bias, and zeros."""
        assert self.head_bias is not None
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
        x = self.embed(cfg, self.embedding, tokens, how.dtype)
        if self.places is None:
            return self.head(cfg, self.encode(cfg, x, self.blocks, how=how, segments=segments))
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        if tokens.shape[1] > cfg.reach:
            raise UserError(
                f"model.reach: found {cfg.reach}, expected data.sequence_length, {tokens.shape[1]}, or more, "
                "since mask_decoder has a vector for every position"
            )
        # By splitting: the gradient of an index is an addition to zeros as large as the whole.
        both = jax.tree.map(lambda w: jax.lax.split(w, [len(w) - 1, 1]), self.blocks)
        first, last = jax.tree.transpose(jax.tree.structure(self.blocks), jax.tree.structure([0, 0]), both)
        x = self.encode(cfg, x, first, how=how, segments=segments)
        queries = x + lookup(self.places, positions, how.dtype)
        twice = jax.tree.map(lambda w: jnp.concatenate([w, w]), last)
        return self.head(cfg, self.encode(cfg, queries, twice, how=how, segments=segments, states=x))

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
        x = self.embed(cfg, self.embedding, tokens, how.dtype)
        return self.encode(cfg, x, self.blocks, how=how, segments=segments)

    def embed(self, cfg: Any, embedding: Array, tokens: Array, dtype: Any) -> Array:
        x = lookup(embedding, tokens, dtype)
        return constrain(_normed(cfg, x, self.embed_norm, self.embed_norm_bias), "batch", "sequence", None)

    def encode(
        self,
        cfg: Any,
        x: Array,
        blocks: Block,
        *,
        how: Execution,
        segments: Array | None,
        states: Array | None = None,
    ) -> Array:
        """x through these layers; with `states`, x asks and these answer, in every layer."""
        distances = _normed(cfg, self.distances, self.distance_norm, self.distance_norm_bias)

        def body(block: Block, x: Array) -> Array:
            run = partial(block, cfg, distances=distances, how=how, segments=segments)
            return run(x) if states is None else run(states, queries=x)

        return layers(how, body, x, blocks)

    def head(self, cfg: Any, x: Array) -> Array:
        assert self.b_head is not None and self.head_norm is not None and self.head_norm_bias is not None
        h = PLAIN[cfg.exact](biased(project(self.w_head, x, "bsd,de->bse"), self.b_head))
        h = _normed(cfg, h, self.head_norm, self.head_norm_bias)
        return jnp.concatenate([h, first_of_many(jnp.ones_like(h[..., 0]))], axis=-1)

    def whole_embedding(self, cfg: Any) -> Array:
        """Of what finds replaced tokens. The generator's part of it learns from the generator alone."""
        if cfg.sharing == "nes" or self.generator is None:
            return self.embedding
        return jax.lax.stop_gradient(self.generator.embedding) + self.embedding

    def find(
        self, cfg: Any, tokens: Array, *, how: Execution, segments: Array | None, positions: Array
    ) -> Array:
        """The logits [b s] that tokens were replaced. Beside each stands the first of its document."""
        assert self.find_norm is not None and self.find_norm_bias is not None
        assert self.b_find is not None and self.b_answer is not None
        x = self.embed(cfg, self.whole_embedding(cfg), tokens, how.dtype)
        x = self.encode(cfg, x, self.blocks, how=how, segments=segments)
        is_first = (positions == 0)[:, None, :]
        if segments is not None:
            is_first &= segments[:, :, None] == segments[:, None, :]
        # A product instead of a look-up, whose gradient would be a scatter.
        begun = jnp.einsum("bst,btd->bsd", is_first.astype(x.dtype), x)
        h = _normed(cfg, begun + x, self.find_norm, self.find_norm_bias)
        h = PLAIN[cfg.exact](biased(project(self.w_find, h, "bsd,de->bse"), self.b_find))
        return biased(project(self.w_answer, h, "bsd,da->bsa"), self.b_answer)[..., 0].astype(jnp.float32)


def _heads(w: Any, b: Array, x: Any) -> Array:
    return biased(project(w, x, "bsd,dnh->bsnh"), b)


def _normed(cfg: Any, x: Array, weight: Array, bias: Array) -> Array:
    return biased(layer_norm(x, weight, cfg.norm_eps), bias)


DISTANCES = disentangled_mosaic  # the only kernels for its attention: `headrace plan` asks them


def flops(cfg: Any, sequence: int) -> float:
    """Forward and backward FLOPs a token: 6 a weight that multiplies, the scores, and the products with the
    vectors of distances, of which there are no more than tokens. Of a pair, those of both."""
    near = min(sequence - 1, cfg.distances)
    scores = 12 * cfg.layers * cfg.embed * (sequence + near)
    if not cfg.generator:
        return 6 * count(Model, cfg) + scores + (6 * count(Block, cfg) if cfg.mask_decoder else 0)
    other = of_generator(cfg)
    own = count(Model, cfg) - count(Model, other) - cfg.vocab * cfg.embed
    return flops(other, sequence) + 6 * own + scores


# Our weight -> their tensor ({} is the layer) and their axes in terms of ours.
LAYER, HEAD, FIND = "deberta.encoder.layer.{}.", "lm_predictions.lm_head.", "mask_predictions."
HF = {
    "embedding": ("deberta.embeddings.word_embeddings.weight", "v d -> v d"),
    "embed_norm": ("deberta.embeddings.LayerNorm.weight", "d -> d"),
    "embed_norm_bias": ("deberta.embeddings.LayerNorm.bias", "d -> d"),
    "distances": ("deberta.encoder.rel_embeddings.weight", "r d -> r d"),
    "distance_norm": ("deberta.encoder.LayerNorm.weight", "d -> d"),
    "distance_norm_bias": ("deberta.encoder.LayerNorm.bias", "d -> d"),
    "blocks.w_q": (LAYER + "attention.self.query_proj.weight", "(n h) d -> d n h"),
    "blocks.b_q": (LAYER + "attention.self.query_proj.bias", "(n h) -> n h"),
    "blocks.w_k": (LAYER + "attention.self.key_proj.weight", "(n h) d -> d n h"),
    "blocks.b_k": (LAYER + "attention.self.key_proj.bias", "(n h) -> n h"),
    "blocks.w_v": (LAYER + "attention.self.value_proj.weight", "(n h) d -> d n h"),
    "blocks.b_v": (LAYER + "attention.self.value_proj.bias", "(n h) -> n h"),
    "blocks.w_o": (LAYER + "attention.output.dense.weight", "d (n h) -> n h d"),
    "blocks.b_o": (LAYER + "attention.output.dense.bias", "d -> d"),
    "blocks.attn_norm": (LAYER + "attention.output.LayerNorm.weight", "d -> d"),
    "blocks.attn_norm_bias": (LAYER + "attention.output.LayerNorm.bias", "d -> d"),
    "blocks.w_up": (LAYER + "intermediate.dense.weight", "f d -> d f"),
    "blocks.b_up": (LAYER + "intermediate.dense.bias", "f -> f"),
    "blocks.w_down": (LAYER + "output.dense.weight", "d f -> f d"),
    "blocks.b_down": (LAYER + "output.dense.bias", "d -> d"),
    "blocks.mlp_norm": (LAYER + "output.LayerNorm.weight", "d -> d"),
    "blocks.mlp_norm_bias": (LAYER + "output.LayerNorm.bias", "d -> d"),
    "places": ("deberta.embeddings.position_embeddings.weight", "p d -> p d"),
    "w_head": (HEAD + "dense.weight", "e d -> d e"),
    "b_head": (HEAD + "dense.bias", "e -> e"),
    "head_norm": (HEAD + "LayerNorm.weight", "d -> d"),
    "head_norm_bias": (HEAD + "LayerNorm.bias", "d -> d"),
    "head_bias": (HEAD + "bias", "v -> v"),
    "find_norm": (FIND + "LayerNorm.weight", "d -> d"),
    "find_norm_bias": (FIND + "LayerNorm.bias", "d -> d"),
    "w_find": (FIND + "dense.weight", "e d -> d e"),
    "b_find": (FIND + "dense.bias", "e -> e"),
    "w_answer": (FIND + "classifier.weight", "a d -> d a"),
    "b_answer": (FIND + "classifier.bias", "a -> a"),
}
HF_TYPES = ("deberta-v2",)
# The published V3 files have both heads of the pair beside one encoder, and positions that nothing reads.
PLACES = ("deberta.embeddings.position_embeddings.weight", "deberta.embeddings.position_ids")
HF_ASIDE = (HEAD + "*", FIND + "*", "cls.*", "pooler.*", "classifier.*", "qa_outputs.*", *PLACES)
HF_LOAD = ", legacy=False"  # else transformers draws a head in place of the published one
CLASSES = Layout(
    Head(
        "DebertaV2ForSequenceClassification",
        dense("pool", "pooler.dense") | dense("classes", "classifier"),
        {"first": ""},
    ),
    Head("DebertaV2ForTokenClassification", dense("classes", "classifier"), {"each": ""}),
    drops=("places", "w_head", "b_head", "head_norm", "head_norm_bias", "head_bias"),
)

# What config.json says of every one of them, and the only values there are of it here.
ONLY: dict[str, Any] = {
    "relative_attention": True,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "type_vocab_size": 0,
    "tie_word_embeddings": True,
}
DEFAULTS = {"relative_attention": False, "share_att_key": False, "norm_rel_ebd": "none"}
DEFAULTS |= {"position_biased_input": True}


def exports(cfg: Any, params: Any) -> dict[str, tuple[Any, Any]]:
    """What to export, by its folder: of a pair both, the embedding of the one that finds being whole."""
    if params.generator is None:
        return {"": (cfg, params)}
    own = dataclasses.replace(params, embedding=params.whole_embedding(cfg), generator=None)
    return {"": (cfg, own), "generator": (of_generator(cfg), params.generator)}


def to_hf(cfg: Any, sequence: int) -> dict[str, Any]:
    return ONLY | {
        "architectures": ["DebertaV2ForMaskedLM" if tells(cfg) else "DebertaV2Model"],
        "model_type": "deberta-v2",
        "vocab_size": cfg.vocab,
        "hidden_size": cfg.embed,
        "intermediate_size": cfg.mlp,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "layer_norm_eps": cfg.norm_eps,
        "position_buckets": cfg.buckets,
        "max_relative_positions": cfg.reach,
        "max_position_embeddings": max(sequence, cfg.reach),
        "pos_att_type": ["p2c", "c2p"],
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "pooler_hidden_act": "gelu",
        "pooler_hidden_size": cfg.embed,
        "hidden_act": cfg.exact,
        "mask_decoder": has_places(cfg),  # our own word
        "legacy": False,
    }


def from_hf(settings: dict[str, Any]) -> dict[str, Any]:
    """The recipe's model section for a config.json."""
    shown, whole = config_json.shown, config_json.whole
    for name, only in ONLY.items():
        found = settings.get(name, DEFAULTS.get(name, only))
        if found != only:
            raise UserError(f"config.json: {name}: found {shown(found)}, only {shown(only)} can be imported")
    kinds = settings.get("pos_att_type") or []
    if isinstance(kinds, str):
        kinds = kinds.split("|")
    if kinds not in (["c2p", "p2c"], ["p2c", "c2p"]):
        raise UserError(f"config.json: pos_att_type: found {shown(kinds)}, only c2p with p2c can be imported")
    if settings.get("conv_kernel_size"):
        raise UserError("config.json: conv_kernel_size: a model with a convolution cannot be imported")
    active = settings.get("hidden_act", "gelu")
    if active not in ("gelu", "silu", "relu", "relu2"):
        raise UserError(f"config.json: hidden_act: found {shown(active)}, expected gelu, silu, relu or relu2")
    own = settings.get("max_relative_positions") not in (None, -1)
    found = {
        "vocab": whole(settings, "vocab_size"),
        "layers": whole(settings, "num_hidden_layers"),
        "embed": whole(settings, "hidden_size"),
        "heads": whole(settings, "num_attention_heads"),
        "mlp": whole(settings, "intermediate_size"),
        "activation": active,
        "buckets": whole(settings, "position_buckets"),
        "reach": whole(settings, "max_relative_positions" if own else "max_position_embeddings"),
        "mask_decoder": config_json.truth(settings, "mask_decoder"),
        "norm_eps": config_json.number(settings, "layer_norm_eps", 1e-7),
    }
    return {"use": "deberta"} | config_json.section(found, settings, Config)
