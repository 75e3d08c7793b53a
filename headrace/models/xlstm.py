"""xLSTM: a decoder without attention, whose state does not grow with the text (arXiv 2405.04517, and for the
blocks of the 7B model 2503.13427). A layer is mLSTM and a gated MLP; every so many can be sLSTM instead."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from headrace.errors import UserError
from headrace.nn.stack import Execution, layers
from headrace.model_formats import hf_config as config_json
from headrace.nn import mlstm as recurrence
from headrace.nn.mlp import gated
from headrace.nn.norm import rms_norm
from headrace.nn.mlstm import Matrix, Scalar, convolve, mlstm, slstm
from headrace.nn.sharding import balance, constrain, restore
from headrace.nn.module import Array, Axes, count, module, ones, stack, weight, zeros
from headrace.nn.linear import lookup, prepared, project


@dataclass(frozen=True)
class Config:
    layers: int
    embed: int
    heads: int
    mlp: int
    vocab: int = 0  # 0: as many as the data's tokenizer has
    key_dim: int = 0  # of a head's queries and keys; 0: half of embed / heads, which values have
    slstm_every: int = 0  # every so many layers one is sLSTM; 0: none
    gate_cap: float = 15.0  # input and forget gates stay within this, softly
    norm_eps: float = 1e-6

    # Fixed by the architecture.
    causal = True
    tied = False
    loops = False
    activation = "swiglu"
    gates = 4
    window = 4  # positions that the convolution before sLSTM sees

    def __post_init__(self):
        for name in ("layers", "embed", "heads", "mlp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more")
        for name in ("vocab", "key_dim", "slstm_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected 0 or more")
        if self.embed % self.heads:
            raise ValueError(f"heads: expected a divisor of embed, {self.embed}")
        if self.slstm_every == 1 or (self.slstm_every and self.layers % self.slstm_every):
            raise ValueError(f"slstm_every: expected 0, or 2 or more and a divisor of layers, {self.layers}")
        if self.gate_cap <= 0:
            raise ValueError("gate_cap: expected a number above 0")
        if self.norm_eps < 0:
            raise ValueError("norm_eps: expected 0 or more")
        if not self.key_dim:
            if self.embed % (2 * self.heads):
                raise ValueError(f"key_dim: expected a number, since heads of {self.head_dim} have no half")
            object.__setattr__(self, "key_dim", self.head_dim // 2)

    @property
    def head_dim(self):
        return self.embed // self.heads

    @property
    def head_out(self):
        return self.head_dim

    @property
    def kv_heads(self):
        """Every head has keys and values of its own."""
        return self.heads

    @property
    def slstm_layers(self):
        return self.layers // self.slstm_every if self.slstm_every else 0

    @property
    def mlstm_layers(self):
        return self.layers - self.slstm_layers


def small(key: Array, axes: Axes, shape: tuple[int, ...], cfg: Any) -> Array:
    return (2 / (5 * cfg.embed)) ** 0.5 * jax.random.normal(key, shape, jnp.float32)


def smaller(key: Array, axes: Axes, shape: tuple[int, ...], cfg: Any) -> Array:
    """For the matrices that write to the residual stream."""
    return 2 / (cfg.layers * cfg.embed**0.5) * jax.random.normal(key, shape, jnp.float32)


def closed(key: Array, axes: Axes, shape: tuple[int, ...], cfg: Any) -> Array:
    """Input gates begin nearly shut: with open ones gradients jump early in training (arXiv 2503.13427)."""
    return jnp.full(shape, -10.0)


def remembering(key: Array, axes: Axes, shape: tuple[int, ...], cfg: Any) -> Array:
    """Forget gates begin open, each head with a span of its own: from 20 to 400 positions."""
    heads = jnp.linspace(3.0, 6.0, cfg.heads)
    return jnp.broadcast_to(heads if len(axes.own) == 1 else heads[:, None], shape)


@module
class Block:
    """mLSTM. The norm of its outputs is one for each head."""

    mixer_norm: Array = weight("embed", init=ones)
    w_q: Array = weight("embed", "heads", "key_dim", init=small)
    w_k: Array = weight("embed", "heads", "key_dim", init=small)
    w_v: Array = weight("embed", "heads", "head_dim", init=small)
    w_out_gate: Array = weight("embed", "heads", "head_dim", init=small)
    w_input: Array = weight("embed", "heads", init=zeros)
    b_input: Array = weight("heads", init=closed, inputs=0)
    w_forget: Array = weight("embed", "heads", init=zeros)
    b_forget: Array = weight("heads", init=remembering, inputs=0)
    head_norm: Array = weight("heads", "head_dim", init=ones, inputs=0)
    w_o: Array = weight("heads", "head_dim", "embed", init=smaller, inputs=2)
    mlp_norm: Array = weight("embed", init=ones)
    w_gate: Array = weight("embed", "mlp", init=small)
    w_up: Array = weight("embed", "mlp", init=small)
    w_down: Array = weight("mlp", "embed", init=smaller)

    def __call__(
        self, cfg: Any, x: Array, state: Matrix, segments: Array | None, how: Execution
    ) -> tuple[Array, Matrix]:
        h = prepared(self.w_q, rms_norm(x, self.mixer_norm, cfg.norm_eps))
        q = project(self.w_q, h, "bsd,dna->bsna")
        k = project(self.w_k, h, "bsd,dna->bsna")
        v = project(self.w_v, h, "bsd,dnh->bsnh")
        write = capped(project(self.w_input, h, "bsd,dn->bsn"), self.b_input, cfg.gate_cap)
        forget = capped(project(self.w_forget, h, "bsd,dn->bsn"), self.b_forget, cfg.gate_cap)
        out, state = mlstm((q, k, v), (write, forget), state, segments, merges=how.merges(cfg.layers))
        out = jax.nn.sigmoid(project(self.w_out_gate, h, "bsd,dnh->bsnh")) * normed(out, self.head_norm, cfg)
        return mlp(self, cfg, x + project(self.w_o, out, "bsnh,nhd->bsd"), how), state


@module
class ScalarBlock:
    """sLSTM. What it has for each head or each feature is no matrix to optimizers, nor in 8 bits."""

    mixer_norm: Array = weight("embed", init=ones)
    kernel: Array = weight("window", "embed", init=small, inputs=0)
    w_z: Array = weight("heads", "head_dim", "head_out", init=small, inputs=0)
    w_input: Array = weight("heads", "head_dim", "head_out", init=small, inputs=0)
    w_forget: Array = weight("heads", "head_dim", "head_out", init=small, inputs=0)
    w_out: Array = weight("heads", "head_dim", "head_out", init=small, inputs=0)
    recurrent: Array = weight("gates", "heads", "head_dim", "head_out", init=zeros, inputs=0)
    b_z: Array = weight("heads", "head_dim", init=zeros, inputs=0)
    b_input: Array = weight("heads", "head_dim", init=closed, inputs=0)
    b_forget: Array = weight("heads", "head_dim", init=remembering, inputs=0)
    b_out: Array = weight("heads", "head_dim", init=zeros, inputs=0)
    head_norm: Array = weight("heads", "head_dim", init=ones, inputs=0)
    mlp_norm: Array = weight("embed", init=ones)
    w_gate: Array = weight("embed", "mlp", init=small)
    w_up: Array = weight("embed", "mlp", init=small)
    w_down: Array = weight("mlp", "embed", init=smaller)

    def __call__(
        self, cfg: Any, x: Array, state: "Tail", segments: Array | None, how: Execution
    ) -> tuple[Array, "Tail"]:
        """Input and forget gates read the convolution, the others the input itself."""
        h = rms_norm(x, self.mixer_norm, cfg.norm_eps)
        near = jax.nn.silu(convolve(h, self.kernel, state.inputs, segments))
        seen = {True: near, False: h}
        split = {key: y.reshape(*y.shape[:2], cfg.heads, cfg.head_dim) for key, y in seen.items()}
        ways = (
            (self.w_z, self.b_z, False),
            (self.w_input, self.b_input, True),
            (self.w_forget, self.b_forget, True),
            (self.w_out, self.b_out, False),
        )
        gates = [project(w, split[conv], "bsnh,nhi->bsni").astype(jnp.float32) + b for w, b, conv in ways]
        out, cell = slstm(jnp.stack(gates, axis=2), self.recurrent, state.cell, segments)
        mixed = normed(out.astype(x.dtype), self.head_norm, cfg).reshape(x.shape)
        tail = jnp.concatenate([state.inputs, h.astype(jnp.float32)], axis=1)[:, -(cfg.window - 1) :]
        return mlp(self, cfg, x + mixed, how), Tail(cell, tail)


@module
class Tail:
    """What an sLSTM layer carries on: its cell, and the inputs that its convolution will see again."""

    cell: Scalar
    inputs: Array


def capped(x: Array, b: Array, cap: float) -> Array:
    """In float32: it becomes an exponent."""
    return cap * jnp.tanh((x.astype(jnp.float32) + b) / cap)


def normed(x: Array, w: Array, cfg: Any) -> Array:
    """A layer norm of each head [b s n h]."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + cfg.norm_eps)
    return (centred * scale).astype(x.dtype) * w.astype(x.dtype)


def mlp(block: Any, cfg: Any, x: Array, how: Execution) -> Array:
    h = prepared(block.w_gate, rms_norm(x, block.mlp_norm, cfg.norm_eps))
    gate, up = project(block.w_gate, h, "bsd,df->bsf"), project(block.w_up, h, "bsd,df->bsf")
    out = gated(cfg.activation, gate, up, block.w_down, merges=how.merges(cfg.layers))
    return constrain(x + out, "batch", "sequence", None)


@module
class Cache:
    """The states of all layers, [l b ...]."""

    matrices: Matrix
    tails: Tail | None


@module
class Model:
    embedding: Array = weight("vocab", "embed", init=small)
    blocks: Block = stack(Block, "mlstm_layers")
    scalars: ScalarBlock | None = stack(ScalarBlock, "slstm_layers", when=lambda cfg: cfg.slstm_every > 0)
    final_norm: Array = weight("embed", init=ones)
    head: Array = weight("vocab", "embed", init=small)

    @property
    def unembed(self) -> Array:
        return self.head

    def __call__(
        self,
        cfg: Any,
        tokens: Array,
        *,
        how: Execution,
        segments: Array | None = None,
        positions: Array | None = None,
    ) -> Array:
        """The last hidden states [b s d]; `unembed` turns them into logits. It takes no positions: what came
        when is told by what has been forgotten, so a row must be in its own order."""
        tokens = restore(tokens)
        segments = None if segments is None else restore(segments)
        rows = tokens.shape[0]

        def matrix(block: Block, x: Array) -> Array:
            return block(cfg, x, empty_matrix(cfg, (rows,)), segments, how)[0]

        def scalar(block: ScalarBlock, x: Array) -> Array:
            return block(cfg, x, empty_tail(cfg, (rows,)), segments, how)[0]

        def group(x: Array, parts: Any) -> tuple[Array, None]:
            blocks, one = parts
            x = layers(how, matrix, x, blocks)
            return layers(how, scalar, x, jax.tree.map(lambda w: w[None], one)), None

        x = constrain(lookup(self.embedding, tokens, how.dtype), "batch", "sequence", None)
        if self.scalars is None:
            x = layers(how, matrix, x, self.blocks)
        else:
            x, _ = jax.lax.scan(group, x, (grouped(self.blocks, cfg), self.scalars))
        return balance(rms_norm(x, self.final_norm, cfg.norm_eps))

    def cache(self, cfg: Any, batch: int, length: int, dtype: Any) -> Cache:
        """Of any length, and in float32: sums of many small parts."""
        matrices = empty_matrix(cfg, (cfg.mlstm_layers, batch))
        return Cache(matrices, empty_tail(cfg, (cfg.slstm_layers, batch)) if cfg.slstm_every else None)

    def decode(self, cfg: Any, tokens: Array, cache: Cache, *, how: Execution) -> tuple[Array, Cache]:
        """The hidden states of the next tokens [b s d] after those in the cache, and the cache with them."""

        def matrix(x: Array, layer: tuple[Block, Matrix]) -> tuple[Array, Matrix]:
            block, state = layer
            return block(cfg, x, state, None, how)

        def group(x: Array, parts: Any) -> tuple[Array, Any]:
            blocks, states, one, tail = parts
            x, states = jax.lax.scan(matrix, x, (blocks, states))
            x, tail = one(cfg, x, tail, None, how)
            return x, (states, tail)

        x, tails = lookup(self.embedding, tokens, how.dtype), None
        if self.scalars is None:
            x, matrices = jax.lax.scan(matrix, x, (self.blocks, cache.matrices))
        else:
            parts = (grouped(self.blocks, cfg), grouped(cache.matrices, cfg), self.scalars, cache.tails)
            x, (matrices, tails) = jax.lax.scan(group, x, parts)
            matrices = jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), matrices)
        return rms_norm(x, self.final_norm, cfg.norm_eps), Cache(matrices, tails)


def grouped(stack: Any, cfg: Any) -> Any:
    """The mLSTM layers that stand before each sLSTM one, together."""
    return jax.tree.map(lambda w: w.reshape(cfg.slstm_layers, -1, *w.shape[1:]), stack)


def empty_matrix(cfg: Any, lead: tuple[int, ...]) -> Matrix:
    return recurrence.empty_matrix((*lead, cfg.heads), cfg.key_dim, cfg.head_dim)


def empty_tail(cfg: Any, lead: tuple[int, ...]) -> Tail:
    cell = recurrence.empty_scalar((*lead, cfg.heads, cfg.head_dim))
    return Tail(cell, jnp.zeros((*lead, cfg.window - 1, cfg.embed)))


def flops(cfg: Any, sequence: int) -> float:
    """Forward and backward FLOPs a token: 6 a weight that multiplies, and for each mLSTM head what is read
    from its memory and written to it, and the scores within a chunk, of which half are seen."""
    within = min(recurrence.CHUNK, sequence) * (cfg.key_dim + cfg.head_dim)
    memory = 4 * cfg.key_dim * cfg.head_dim
    cells = 3 * cfg.mlstm_layers * cfg.heads * (memory + within)
    return 6 * (count(Model, cfg) - cfg.vocab * cfg.embed) + cells


LAYER = "backbone.blocks.{}."
HF = {
    "embedding": ("backbone.embeddings.weight", "v d -> v d"),
    "blocks.mixer_norm": (LAYER + "norm_mlstm.weight", "d -> d"),
    "blocks.w_q": (LAYER + "mlstm_layer.q.weight", "(n a) d -> d n a"),
    "blocks.w_k": (LAYER + "mlstm_layer.k.weight", "(n a) d -> d n a"),
    "blocks.w_v": (LAYER + "mlstm_layer.v.weight", "(n h) d -> d n h"),
    "blocks.w_out_gate": (LAYER + "mlstm_layer.ogate_preact.weight", "(n h) d -> d n h"),
    "blocks.w_input": (LAYER + "mlstm_layer.igate_preact.weight", "n d -> d n"),
    "blocks.b_input": (LAYER + "mlstm_layer.igate_preact.bias", "n -> n"),
    "blocks.w_forget": (LAYER + "mlstm_layer.fgate_preact.weight", "n d -> d n"),
    "blocks.b_forget": (LAYER + "mlstm_layer.fgate_preact.bias", "n -> n"),
    "blocks.head_norm": (LAYER + "mlstm_layer.multihead_norm.weight", "(n h) -> n h"),
    "blocks.w_o": (LAYER + "mlstm_layer.out_proj.weight", "d (n h) -> n h d"),
    "blocks.mlp_norm": (LAYER + "norm_ffn.weight", "d -> d"),
    "blocks.w_gate": (LAYER + "ffn.proj_up_gate.weight", "f d -> d f"),
    "blocks.w_up": (LAYER + "ffn.proj_up.weight", "f d -> d f"),
    "blocks.w_down": (LAYER + "ffn.proj_down.weight", "d f -> f d"),
    "final_norm": ("backbone.out_norm.weight", "d -> d"),
    "head": ("lm_head.weight", "v d -> v d"),
}
HF_TYPES = ("xlstm",)
HF_SOFT_CAP = "output_logit_soft_cap"

# Of what else their config.json says we have only these.
FIXED: dict[str, Any] = {
    "use_bias": False,
    "add_out_norm": True,
    "tie_word_embeddings": False,
    "v_dim_factor": 1.0,
    "weight_mode": "single",
    "eps": recurrence.EPS,
}


def to_hf(cfg: Any, sequence: int) -> dict[str, Any]:
    if cfg.slstm_every:
        raise UserError(
            f"model.slstm_every: found {cfg.slstm_every}, but transformers has no xLSTM with sLSTM layers"
        )
    return FIXED | {
        "architectures": ["xLSTMForCausalLM"],
        "model_type": "xlstm",
        "vocab_size": cfg.vocab,
        "hidden_size": cfg.embed,
        "embedding_dim": cfg.embed,
        "num_hidden_layers": cfg.layers,
        "num_blocks": cfg.layers,
        "num_heads": cfg.heads,
        # They cut off what is behind the point.
        "qk_dim_factor": math.nextafter(cfg.heads * cfg.key_dim / cfg.embed, math.inf),
        # They round it up to a multiple: of itself, so that no rounding of the factor can change it.
        "ffn_proj_factor": cfg.mlp / cfg.embed,
        "ffn_round_up_to_multiple_of": cfg.mlp,
        "gate_soft_cap": cfg.gate_cap,
        "norm_eps": cfg.norm_eps,
        **cache_settings(cfg),
        HF_SOFT_CAP: 1e6,  # which caps nothing, if a recipe has none: they have no null
        "max_position_embeddings": sequence,
    }


def cache_settings(cfg: Any) -> dict[str, Any]:
    """Their cache rounds widths up to a multiple of 64 and their layers do not (5.22), so with other widths
    every call that has one fails: unless told not to, all of them, and those of more than 16,384 tokens."""
    if cfg.embed % 64 == 0 and cfg.heads * cfg.key_dim % 64 == 0:
        return {"use_cache": True}
    return {"use_cache": False, "max_inference_chunksize": 2**31 - 1}


def from_hf(settings: dict[str, Any]) -> dict[str, Any]:
    for name, value in FIXED.items():
        if settings.get(name, value) != value:
            raise UserError(f"config.json: {name}: found {settings[name]}, only {value} can be imported")
    both = {"hidden_size": "embedding_dim", "num_hidden_layers": "num_blocks"}
    given = settings | {name: settings.get(name) or settings.get(other) for name, other in both.items()}
    embed, heads = config_json.whole(given, "hidden_size"), config_json.whole(given, "num_heads")
    multiple = config_json.whole(given, "ffn_round_up_to_multiple_of", 64)
    wide = embed * config_json.number(given, "ffn_proj_factor", 2.667)
    section: dict[str, Any] = {
        "layers": config_json.whole(given, "num_hidden_layers"),
        "embed": embed,
        "heads": heads,
        "mlp": int((wide + multiple - 1) // multiple) * multiple,
        "vocab": config_json.whole(given, "vocab_size"),
        "key_dim": int(embed * config_json.number(given, "qk_dim_factor", 0.5)) // heads,
        "gate_cap": config_json.number(given, "gate_soft_cap", 15.0),
        "norm_eps": config_json.number(given, "norm_eps", 1e-6),
    }
    try:
        Config(**section)
    except ValueError as error:
        raise UserError(f"config.json: these sizes cannot be imported: {error}") from None
    return {"use": "xlstm"} | section
