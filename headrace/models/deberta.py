"""DeBERTa-V3: an encoder whose attention separates content from distance (arXiv 2006.03654, 2111.09543).

It is trained to detect the tokens that a generator, half as deep and trained together with it, has replaced.
`generator_layers` makes the pair; without it the model is an encoder that predicts masked tokens."""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from headrace.attention._disentangled import attend
from headrace.config.sections import at_least
from headrace.errors import UserError
from headrace.kernels import disentangled_tpu
from headrace.model_formats import hf_config
from headrace.model_formats.hf_config import HFSettings
from headrace.models import _deberta_hf
from headrace.nn.activations import PLAIN
from headrace.nn.bias import add_bias, pad_columns
from headrace.nn.linear import embed, project, quantize_input
from headrace.nn.mlp import project_plain
from headrace.nn.module import Array, Axes, PyTree, count, module, nested, normal, ones, stack, weight, zeros
from headrace.nn.norm import layer_norm
from headrace.nn.sharding import constrain
from headrace.nn.stack import Execution, run_layers


@dataclass(frozen=True)
class Config:
    """The `model` section of a recipe with `use: deberta`."""

    layers: int  # number of layers
    embed: int  # width of the residual stream
    heads: int  # number of attention heads
    mlp: int  # hidden units of the MLP
    # activation of the MLP; with _bits its derivative is stored in one or two bits, which saves memory if
    # w_down is frozen
    activation: Literal["gelu", "gelu_bits", "silu", "silu_bits", "relu", "relu_bits", "relu2"] = "gelu"
    vocab: int = 0  # tokens in the vocabulary; 0: as many as the data's tokenizer has
    # number of layers of the generator that objective rtd trains as well; 0: no generator
    generator_layers: int = 0
    # embeddings: those of the generator plus a trained difference (gdes), or separate ones (nes)
    embedding_sharing: Literal["gdes", "nes"] = "gdes"
    # enhanced mask decoder: predicts tokens from absolute positions, with the last layer run twice
    mask_decoder: bool = False
    position_buckets: int = 256  # number of distances to either side that have a vector of their own
    # distance from which all distances are one; also the longest sequence with mask_decoder [tokens]
    max_relative_positions: int = 512
    norm_eps: float = 1e-7  # constant added to the variance in LayerNorm

    # Fixed by the architecture; no recipe keys.
    causal = False
    tie_embeddings = True
    answers = 1

    def __post_init__(self) -> None:
        at_least(1, self, "layers", "embed", "heads", "mlp")
        at_least(0, self, "vocab", "generator_layers", "norm_eps")
        if self.embed % self.heads:
            raise ValueError(f"heads: expected a divisor of embed, {self.embed}")
        if self.position_buckets < 4 or self.position_buckets % 2:
            raise ValueError("position_buckets: expected an even number of 4 or more")
        if self.max_relative_positions < self.position_buckets // 2 + 2:
            raise ValueError("max_relative_positions: expected more than half of position_buckets, plus one")
        if not self.generator_layers and self.embedding_sharing != type(self).embedding_sharing:
            raise ValueError("embedding_sharing: expected generator_layers, without which it has no effect")
        if self.mask_decoder and (self.generator_layers or self.layers) < 2:
            name = "generator_layers" if self.generator_layers else "layers"
            raise ValueError(f"{name}: expected 2 or more, since mask_decoder reads the last but one")

    @property
    def plain_activation(self) -> Literal["gelu", "silu", "relu", "relu2"]:
        """The activation, without the way its derivative is saved."""
        return self.activation.removesuffix("_bits")  # type: ignore[return-value]

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def head_out(self) -> int:
        return self.embed

    @property
    def distances(self) -> int:
        """Number of vectors for distances."""
        return 2 * self.position_buckets

    @property
    def places(self) -> int:
        """Number of vectors for absolute positions."""
        return self.max_relative_positions


def generator_config(cfg: Config) -> Config:
    """The config of the generator of a pair."""
    return dataclasses.replace(
        cfg, layers=cfg.generator_layers, generator_layers=0, embedding_sharing=Config.embedding_sharing
    )


def predicts_tokens(cfg: Config) -> bool:
    """Whether the model predicts masked tokens."""
    return not cfg.generator_layers


def detects_replaced(cfg: Config) -> bool:
    """Whether the model detects replaced tokens, and has a generator."""
    return bool(cfg.generator_layers)


def has_positions(cfg: Config) -> bool:
    """Whether the model has vectors for absolute positions."""
    return cfg.mask_decoder and predicts_tokens(cfg)


def delta_weights(cfg: Config) -> dict[str, str]:
    """The weights that are stored as the difference to another, and to which."""
    is_shared = detects_replaced(cfg) and cfg.embedding_sharing == "gdes"
    return {"embedding": "generator.embedding"} if is_shared else {}


def init_embedding(key: Array, axes: Axes, shape: tuple[int, ...], cfg: Config) -> Array:
    """Initialize the embedding: with zeros if it is the difference to the generator's."""
    init = zeros if delta_weights(cfg) else normal(0.02)
    return init(key, axes, shape, cfg)


@module
class Block:
    """One layer."""

    w_q: Array = weight("embed", "heads", "head_dim")
    b_q: Array = weight("heads", "head_dim", init=zeros, num_input_axes=0)
    w_k: Array = weight("embed", "heads", "head_dim")
    b_k: Array = weight("heads", "head_dim", init=zeros, num_input_axes=0)
    w_v: Array = weight("embed", "heads", "head_dim")
    b_v: Array = weight("heads", "head_dim", init=zeros, num_input_axes=0)
    w_o: Array = weight("heads", "head_dim", "embed", num_input_axes=2)
    b_o: Array = weight("embed", init=zeros, num_input_axes=0)
    attn_norm: Array = weight("embed", init=ones)
    attn_norm_bias: Array = weight("embed", init=zeros, num_input_axes=0)
    w_up: Array = weight("embed", "mlp")
    b_up: Array = weight("mlp", init=zeros, num_input_axes=0)
    w_down: Array = weight("mlp", "embed")
    b_down: Array = weight("embed", init=zeros, num_input_axes=0)
    mlp_norm: Array = weight("embed", init=ones)
    mlp_norm_bias: Array = weight("embed", init=zeros, num_input_axes=0)

    def __call__(
        self,
        cfg: Config,
        x: Array,
        distances: Array,
        *,
        exec_opts: Execution,
        segments: Array | None,
        queries: Array | None = None,
    ) -> Array:
        """Run the layer on x [b s d]. Vectors of distances [r d] pass through the same matrices as queries
        and keys. `queries`, if not None, replace x as the input of queries and as the residual stream."""
        stream = x if queries is None else queries
        table = distances.astype(x.dtype)[None]
        vectors = quantize_input(self.w_q, table)
        attn_out = attend(
            exec_opts.attention,
            _project_heads(self.w_q, self.b_q, quantize_input(self.w_q, stream)),
            _project_heads(self.w_k, self.b_k, quantize_input(self.w_k, x)),
            _project_heads(self.w_v, self.b_v, quantize_input(self.w_v, x)),
            q_table=_project_heads(self.w_q, self.b_q, vectors)[0],
            k_table=_project_heads(self.w_k, self.b_k, vectors)[0],
            max_distance=cfg.max_relative_positions,
            segments=segments,
        )
        out = add_bias(project(self.w_o, attn_out, "bsnh,nhd->bsd"), self.b_o)
        x = _norm(cfg, stream + out, self.attn_norm, self.attn_norm_bias)
        up = add_bias(project(self.w_up, x, "bsd,df->bsf"), self.b_up)
        prevent_cse = exec_opts.needs_cse_barrier(cfg.layers)
        mlp_out = project_plain(cfg.activation, up, self.w_down, prevent_cse=prevent_cse)
        x = _norm(cfg, x + add_bias(mlp_out, self.b_down), self.mlp_norm, self.mlp_norm_bias)
        return constrain(x, "batch", "sequence", None)


@module
class Model:
    """Embeddings, vectors of distances, layers and heads, and the generator of a pair."""

    # If the generator shares its embedding, the difference to it.
    embedding: Array = weight("vocab", "embed", init=init_embedding)
    embed_norm: Array = weight("embed", init=ones)
    embed_norm_bias: Array = weight("embed", init=zeros, num_input_axes=0)
    distances: Array = weight("distances", "embed")
    distance_norm: Array = weight("embed", init=ones)
    distance_norm_bias: Array = weight("embed", init=zeros, num_input_axes=0)
    blocks: Block = stack(Block)
    places: Array | None = weight("places", "embed", when=has_positions)
    w_head: Array | None = weight("embed", "head_out", when=predicts_tokens)
    b_head: Array | None = weight("embed", init=zeros, num_input_axes=0, when=predicts_tokens)
    head_norm: Array | None = weight("embed", init=ones, when=predicts_tokens)
    head_norm_bias: Array | None = weight("embed", init=zeros, num_input_axes=0, when=predicts_tokens)
    head_bias: Array | None = weight("vocab", init=zeros, num_input_axes=0, when=predicts_tokens)
    find_norm: Array | None = weight("embed", init=ones, when=detects_replaced)
    find_norm_bias: Array | None = weight("embed", init=zeros, num_input_axes=0, when=detects_replaced)
    w_find: Array | None = weight("embed", "head_out", when=detects_replaced)
    b_find: Array | None = weight("embed", init=zeros, num_input_axes=0, when=detects_replaced)
    w_answer: Array | None = weight("embed", "answers", when=detects_replaced)
    b_answer: Array | None = weight("answers", init=zeros, num_input_axes=0, when=detects_replaced)
    generator: "Model | None" = nested(lambda: Model, generator_config, when=detects_replaced)

    @property
    def unembed(self) -> Array:
        """The matrix [v d+128] that maps hidden states to logits: embedding, bias and zeros."""
        assert self.head_bias is not None
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
        x = self.embed(cfg, self.embedding, tokens, exec_opts.dtype)
        if self.places is None:
            return self.head(cfg, self.encode(cfg, x, self.blocks, exec_opts=exec_opts, segments=segments))
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        if tokens.shape[1] > cfg.max_relative_positions:
            raise UserError(
                f"model.max_relative_positions: found {cfg.max_relative_positions}, expected "
                f"data.sequence_length, {tokens.shape[1]}, or more, "
                "since mask_decoder has a vector for every position"
            )
        # By `split`: the gradient of an index is an addition to zeros of full size.
        split = jax.tree.map(lambda w: jax.lax.split(w, [len(w) - 1, 1]), self.blocks)
        first, last = jax.tree.transpose(jax.tree.structure(self.blocks), jax.tree.structure([0, 0]), split)
        x = self.encode(cfg, x, first, exec_opts=exec_opts, segments=segments)
        queries = x + embed(self.places, positions, exec_opts.dtype)
        last_repeated = jax.tree.map(lambda w: jnp.concatenate([w, w]), last)
        decoded = self.encode(cfg, queries, last_repeated, exec_opts=exec_opts, segments=segments, states=x)
        return self.head(cfg, decoded)

    def states(
        self,
        cfg: Config,
        tokens: Array,
        *,
        exec_opts: Execution,
        segments: Array | None = None,
        positions: Array | None = None,
    ) -> Array:
        """Compute the output of the layers [b s d], without the head and its mask decoder."""
        x = self.embed(cfg, self.embedding, tokens, exec_opts.dtype)
        return self.encode(cfg, x, self.blocks, exec_opts=exec_opts, segments=segments)

    def embed(self, cfg: Config, embedding: Array, tokens: Array, dtype: jnp.dtype) -> Array:
        """Look up and normalize the embeddings of tokens [b s]."""
        x = embed(embedding, tokens, dtype)
        return constrain(_norm(cfg, x, self.embed_norm, self.embed_norm_bias), "batch", "sequence", None)

    def encode(
        self,
        cfg: Config,
        x: Array,
        blocks: Block,
        *,
        exec_opts: Execution,
        segments: Array | None,
        states: Array | None = None,
    ) -> Array:
        """Run x through these layers. With `states`, every layer attends to them, and x are the queries."""
        distances = _norm(cfg, self.distances, self.distance_norm, self.distance_norm_bias)

        def layer(block: Block, x: Array) -> Array:
            run = partial(block, cfg, distances=distances, exec_opts=exec_opts, segments=segments)
            return run(x) if states is None else run(states, queries=x)

        return run_layers(exec_opts, [layer], x, blocks)

    def head(self, cfg: Config, x: Array) -> Array:
        """Compute the head's hidden states [b s d+128] of the layers' output x [b s d]; `unembed` follows."""
        assert self.b_head is not None and self.head_norm is not None and self.head_norm_bias is not None
        h = PLAIN[cfg.plain_activation](add_bias(project(self.w_head, x, "bsd,de->bse"), self.b_head))
        h = _norm(cfg, h, self.head_norm, self.head_norm_bias)
        return jnp.concatenate([h, pad_columns(jnp.ones_like(h[..., 0]))], axis=-1)

    def full_embedding(self, cfg: Config) -> Array:
        """The embedding of the model that detects replaced tokens, with the generator's added if it is stored
        as a difference. No gradient flows to the generator's."""
        if cfg.embedding_sharing == "nes" or self.generator is None:
            return self.embedding
        return jax.lax.stop_gradient(self.generator.embedding) + self.embedding

    def detect_replaced(
        self, cfg: Config, tokens: Array, *, exec_opts: Execution, segments: Array | None, positions: Array
    ) -> Array:
        """Compute the logits [b s] that tokens were replaced. The head reads each token's state and that of
        the first token of its document."""
        assert self.find_norm is not None and self.find_norm_bias is not None
        assert self.b_find is not None and self.b_answer is not None
        x = self.embed(cfg, self.full_embedding(cfg), tokens, exec_opts.dtype)
        x = self.encode(cfg, x, self.blocks, exec_opts=exec_opts, segments=segments)
        is_first = (positions == 0)[:, None, :]
        if segments is not None:
            is_first &= segments[:, :, None] == segments[:, None, :]
        # A product instead of a lookup, whose gradient would be a scatter.
        first_states = jnp.einsum("bst,btd->bsd", is_first.astype(x.dtype), x)
        h = _norm(cfg, first_states + x, self.find_norm, self.find_norm_bias)
        h = PLAIN[cfg.plain_activation](add_bias(project(self.w_find, h, "bsd,de->bse"), self.b_find))
        return add_bias(project(self.w_answer, h, "bsd,da->bsa"), self.b_answer)[..., 0].astype(jnp.float32)


def _project_heads(w: PyTree, b: Array, x: PyTree) -> Array:
    return add_bias(project(w, x, "bsd,dnh->bsnh"), b)


def _norm(cfg: Config, x: Array, weight: Array, bias: Array) -> Array:
    return add_bias(layer_norm(x, weight, cfg.norm_eps), bias)


DISTANCE_KERNELS = disentangled_tpu


def flops_per_token(cfg: Config, sequence_length: int) -> float:
    """Count the FLOPs of forward and backward pass, of a pair those of both models: 6 per weight, attention,
    and products with vectors of distances, of which a token meets fewer than there are tokens."""
    num_distances = min(sequence_length - 1, cfg.distances)
    attention = 12 * cfg.layers * cfg.embed * (sequence_length + num_distances)
    if not cfg.generator_layers:
        decoder = 6 * count(Block, cfg) if cfg.mask_decoder else 0  # the last layer runs once more
        return 6 * count(Model, cfg) + attention + decoder
    generator = generator_config(cfg)
    params = count(Model, cfg) - count(Model, generator) - cfg.vocab * cfg.embed
    return flops_per_token(generator, sequence_length) + 6 * params + attention


HF_TENSORS, HF_IGNORED = _deberta_hf.HF_TENSORS, _deberta_hf.HF_IGNORED
HF_TYPES = ("deberta-v2",)
HF_LOAD, HF_CLASSIFIER = _deberta_hf.HF_LOAD, _deberta_hf.HF_CLASSIFIER


def split_for_export(cfg: Config, params: Model) -> dict[str, tuple[Config, Model]]:
    """The models of an export by subfolder. A pair has two; the embedding of the first is stored in full."""
    if params.generator is None:
        return {"": (cfg, params)}
    discriminator = dataclasses.replace(params, embedding=params.full_embedding(cfg), generator=None)
    return {"": (cfg, discriminator), "generator": (generator_config(cfg), params.generator)}


def to_hf_config(cfg: Config, sequence_length: int) -> HFSettings:
    """Translate to the settings of config.json."""
    return (
        _deberta_hf.REQUIRED
        | _deberta_hf.CONSTANT
        | {
            "architectures": ["DebertaV2ForMaskedLM" if predicts_tokens(cfg) else "DebertaV2Model"],
            "vocab_size": cfg.vocab,
            "hidden_size": cfg.embed,
            "intermediate_size": cfg.mlp,
            "num_hidden_layers": cfg.layers,
            "num_attention_heads": cfg.heads,
            "layer_norm_eps": cfg.norm_eps,
            "position_buckets": cfg.position_buckets,
            "max_relative_positions": cfg.max_relative_positions,
            "max_position_embeddings": max(sequence_length, cfg.max_relative_positions),
            "pooler_hidden_size": cfg.embed,
            "hidden_act": cfg.plain_activation,
            "mask_decoder": has_positions(cfg),  # not a setting of transformers
        }
    )


def from_hf_config(settings: HFSettings) -> dict[str, Any]:
    """Translate the settings of config.json to a recipe's `model` section."""
    _deberta_hf.check_settings(settings)
    has_maximum = settings.get("max_relative_positions") not in (None, -1)
    distance_key = "max_relative_positions" if has_maximum else "max_position_embeddings"
    keys = {
        "vocab": hf_config.get_int(settings, "vocab_size"),
        "layers": hf_config.get_int(settings, "num_hidden_layers"),
        "embed": hf_config.get_int(settings, "hidden_size"),
        "heads": hf_config.get_int(settings, "num_attention_heads"),
        "mlp": hf_config.get_int(settings, "intermediate_size"),
        "activation": settings.get("hidden_act", "gelu"),
        "position_buckets": hf_config.get_int(settings, "position_buckets"),
        "max_relative_positions": hf_config.get_int(settings, distance_key),
        "mask_decoder": hf_config.get_bool(settings, "mask_decoder"),
        "norm_eps": hf_config.get_float(settings, "layer_norm_eps", 1e-7),
    }
    return {"use": "deberta"} | hf_config.select_config_keys(keys, settings, Config)
