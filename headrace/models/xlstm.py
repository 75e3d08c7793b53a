"""xLSTM: a decoder without attention, whose state has the same size for any length of text (arXiv 2405.04517;
the blocks of the 7B model: 2503.13427). A layer is an mLSTM and a gated MLP; every so many layers one has an
sLSTM instead."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from headrace.config.sections import at_least
from headrace.errors import UserError
from headrace.model_formats import hf_config
from headrace.model_formats.hf_config import HFSettings
from headrace.models import _xlstm_hf
from headrace.nn import mlstm as nn_mlstm
from headrace.nn.linear import embed, project, quantize_input
from headrace.nn.mlp import project_gated
from headrace.nn.mlstm import MatrixState, ScalarState, convolve, mlstm, slstm
from headrace.nn.module import Array, Axes, PyTree, count, module, ones, stack, weight, zeros
from headrace.nn.norm import rms_norm
from headrace.nn.sharding import constrain, from_balanced_order, to_balanced_order
from headrace.nn.soft_cap import apply_soft_cap
from headrace.nn.stack import Execution, run_layers


@dataclass(frozen=True)
class Config:
    """The `model` section of a recipe with `use: xlstm`."""

    layers: int  # number of layers
    embed: int  # width of the residual stream
    heads: int  # number of heads
    mlp: int  # hidden units of the MLP
    vocab: int = 0  # tokens in the vocabulary; 0: as many as the data's tokenizer has
    key_dim: int = 0  # width of a head's queries and keys; 0: half of embed / heads, the width of values
    slstm_every: int = 0  # interval between sLSTM layers, the others being mLSTM; 0: no sLSTM layers
    gate_soft_cap: float = 15.0  # bound that a tanh keeps input and forget gates within
    norm_eps: float = 1e-6  # constant added to the mean square in RMSNorm

    # Fixed by the architecture; no recipe keys.
    causal = True
    tie_embeddings = False
    loops = False
    activation = "swiglu"
    gates = 4
    window = 4  # positions that the convolution before an sLSTM sees

    def __post_init__(self) -> None:
        at_least(1, self, "layers", "embed", "heads", "mlp")
        at_least(0, self, "vocab", "key_dim", "slstm_every", "norm_eps")
        if self.embed % self.heads:
            raise ValueError(f"heads: expected a divisor of embed, {self.embed}")
        if self.slstm_every == 1 or (self.slstm_every and self.layers % self.slstm_every):
            raise ValueError(f"slstm_every: expected 0, or 2 or more and a divisor of layers, {self.layers}")
        if self.gate_soft_cap <= 0:
            raise ValueError("gate_soft_cap: expected a number above 0")
        if not self.key_dim:
            if self.embed % (2 * self.heads):
                raise ValueError(
                    f"key_dim: expected a number, since the width of a head, {self.head_dim}, is odd"
                )
            object.__setattr__(self, "key_dim", self.head_dim // 2)

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads

    @property
    def head_out(self) -> int:
        return self.head_dim

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def slstm_layers(self) -> int:
        return self.layers // self.slstm_every if self.slstm_every else 0

    @property
    def mlstm_layers(self) -> int:
        return self.layers - self.slstm_layers


def init_input(key: Array, axes: Axes, shape: tuple[int, ...], cfg: Config) -> Array:
    """Initialize with standard deviation sqrt(2 / (5 embed))."""
    return (2 / (5 * cfg.embed)) ** 0.5 * jax.random.normal(key, shape, jnp.float32)


def init_residual(key: Array, axes: Axes, shape: tuple[int, ...], cfg: Config) -> Array:
    """Initialize the matrices that write to the residual stream."""
    return 2 / (cfg.layers * cfg.embed**0.5) * jax.random.normal(key, shape, jnp.float32)


def init_input_gate(key: Array, axes: Axes, shape: tuple[int, ...], cfg: Config) -> Array:
    """Initialize input gates almost closed: with open ones, gradients spike early in training (arXiv
    2503.13427)."""
    return jnp.full(shape, -10.0)


def init_forget_gate(key: Array, axes: Axes, shape: tuple[int, ...], cfg: Config) -> Array:
    """Initialize forget gates open, each head with a memory of another length: 20 to 400 positions."""
    heads = jnp.linspace(3.0, 6.0, cfg.heads)
    return jnp.broadcast_to(heads if len(axes.weight_axes) == 1 else heads[:, None], shape)


@module
class Block:
    """An mLSTM layer. Its outputs are normalized per head."""

    mixer_norm: Array = weight("embed", init=ones)
    w_q: Array = weight("embed", "heads", "key_dim", init=init_input)
    w_k: Array = weight("embed", "heads", "key_dim", init=init_input)
    w_v: Array = weight("embed", "heads", "head_dim", init=init_input)
    w_out_gate: Array = weight("embed", "heads", "head_dim", init=init_input)
    w_input: Array = weight("embed", "heads", init=zeros)
    b_input: Array = weight("heads", init=init_input_gate, num_input_axes=0)
    w_forget: Array = weight("embed", "heads", init=zeros)
    b_forget: Array = weight("heads", init=init_forget_gate, num_input_axes=0)
    head_norm: Array = weight("heads", "head_dim", init=ones, num_input_axes=0)
    w_o: Array = weight("heads", "head_dim", "embed", init=init_residual, num_input_axes=2)
    mlp_norm: Array = weight("embed", init=ones)
    w_gate: Array = weight("embed", "mlp", init=init_input)
    w_up: Array = weight("embed", "mlp", init=init_input)
    w_down: Array = weight("mlp", "embed", init=init_residual)

    def __call__(
        self, cfg: Config, x: Array, state: MatrixState, segments: Array | None, exec_opts: Execution
    ) -> tuple[Array, MatrixState]:
        """Run the layer on x [b s d]. Returns its output and the state after the last position."""
        h = quantize_input(self.w_q, rms_norm(x, self.mixer_norm, cfg.norm_eps))
        q = project(self.w_q, h, "bsd,dna->bsna")
        k = project(self.w_k, h, "bsd,dna->bsna")
        v = project(self.w_v, h, "bsd,dnh->bsnh")
        input_gate = cap_gate(project(self.w_input, h, "bsd,dn->bsn"), self.b_input, cfg.gate_soft_cap)
        forget_gate = cap_gate(project(self.w_forget, h, "bsd,dn->bsn"), self.b_forget, cfg.gate_soft_cap)
        prevent_cse = exec_opts.needs_cse_barrier(cfg.layers)
        out, state = mlstm((q, k, v), (input_gate, forget_gate), state, segments, prevent_cse=prevent_cse)
        out_gate = jax.nn.sigmoid(project(self.w_out_gate, h, "bsd,dnh->bsnh"))
        out = out_gate * norm_heads(out, self.head_norm, cfg.norm_eps)
        return add_mlp(self, cfg, x + project(self.w_o, out, "bsnh,nhd->bsd"), exec_opts), state


@module
class ScalarBlock:
    """An sLSTM layer. Optimizers and 8-bit formats do not treat its weights per head or feature as
    matrices."""

    mixer_norm: Array = weight("embed", init=ones)
    kernel: Array = weight("window", "embed", init=init_input, num_input_axes=0)
    w_z: Array = weight("heads", "head_dim", "head_out", init=init_input, num_input_axes=0)
    w_input: Array = weight("heads", "head_dim", "head_out", init=init_input, num_input_axes=0)
    w_forget: Array = weight("heads", "head_dim", "head_out", init=init_input, num_input_axes=0)
    w_out: Array = weight("heads", "head_dim", "head_out", init=init_input, num_input_axes=0)
    recurrent: Array = weight("gates", "heads", "head_dim", "head_out", init=zeros, num_input_axes=0)
    b_z: Array = weight("heads", "head_dim", init=zeros, num_input_axes=0)
    b_input: Array = weight("heads", "head_dim", init=init_input_gate, num_input_axes=0)
    b_forget: Array = weight("heads", "head_dim", init=init_forget_gate, num_input_axes=0)
    b_out: Array = weight("heads", "head_dim", init=zeros, num_input_axes=0)
    head_norm: Array = weight("heads", "head_dim", init=ones, num_input_axes=0)
    mlp_norm: Array = weight("embed", init=ones)
    w_gate: Array = weight("embed", "mlp", init=init_input)
    w_up: Array = weight("embed", "mlp", init=init_input)
    w_down: Array = weight("mlp", "embed", init=init_residual)

    def __call__(
        self, cfg: Config, x: Array, state: "ScalarLayerState", segments: Array | None, exec_opts: Execution
    ) -> tuple[Array, "ScalarLayerState"]:
        """Run the layer on x [b s d]. Returns its output and the state after the last position.

        Input and forget gates read the convolution, the other two the input itself."""
        h = rms_norm(x, self.mixer_norm, cfg.norm_eps)
        convolved = jax.nn.silu(convolve(h, self.kernel, state.inputs, segments))
        convolved_heads, input_heads = (
            y.reshape(*y.shape[:2], cfg.heads, cfg.head_dim) for y in (convolved, h)
        )
        gate_inputs = (
            (self.w_z, self.b_z, input_heads),
            (self.w_input, self.b_input, convolved_heads),
            (self.w_forget, self.b_forget, convolved_heads),
            (self.w_out, self.b_out, input_heads),
        )
        gates = [project(w, y, "bsnh,nhi->bsni").astype(jnp.float32) + b for w, b, y in gate_inputs]
        out, cell = slstm(jnp.stack(gates, axis=2), self.recurrent, state.cell, segments)
        out = norm_heads(out.astype(x.dtype), self.head_norm, cfg.norm_eps).reshape(x.shape)
        inputs = jnp.concatenate([state.inputs, h.astype(jnp.float32)], axis=1)[:, -(cfg.window - 1) :]
        return add_mlp(self, cfg, x + out, exec_opts), ScalarLayerState(cell, inputs)


@module
class ScalarLayerState:
    """The state of an sLSTM layer: its cell, and the last inputs of its convolution."""

    cell: ScalarState
    inputs: Array


def cap_gate(x: Array, b: Array, cap: float) -> Array:
    """Add a bias and bound the sum to (-cap, cap) by tanh, in float32, since it becomes an exponent."""
    return apply_soft_cap(x.astype(jnp.float32) + b, cap)


def norm_heads(x: Array, w: Array, eps: float) -> Array:
    """Apply LayerNorm to each head of x [b s n h]."""
    wide = x.astype(jnp.float32)
    centered = wide - wide.mean(axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centered * centered, axis=-1, keepdims=True) + eps)
    return (centered * scale).astype(x.dtype) * w.astype(x.dtype)


def add_mlp(block: Block | ScalarBlock, cfg: Config, x: Array, exec_opts: Execution) -> Array:
    """Compute the gated MLP and add its output to the residual stream."""
    h = quantize_input(block.w_gate, rms_norm(x, block.mlp_norm, cfg.norm_eps))
    gate, up = project(block.w_gate, h, "bsd,df->bsf"), project(block.w_up, h, "bsd,df->bsf")
    prevent_cse = exec_opts.needs_cse_barrier(cfg.layers)
    mlp_out = project_gated("swiglu", gate, up, block.w_down, prevent_cse=prevent_cse)
    return constrain(x + mlp_out, "batch", "sequence", None)


@module
class Cache:
    """The states of all layers, [l b ...]."""

    matrices: MatrixState
    tails: ScalarLayerState | None


@module
class Model:
    """Embedding, mLSTM and sLSTM layers, final norm and output head."""

    embedding: Array = weight("vocab", "embed", init=init_input)
    blocks: Block = stack(Block, "mlstm_layers")
    scalars: ScalarBlock | None = stack(ScalarBlock, "slstm_layers", when=lambda cfg: cfg.slstm_every > 0)
    final_norm: Array = weight("embed", init=ones)
    head: Array = weight("vocab", "embed", init=init_input)

    @property
    def unembed(self) -> Array:
        """The matrix [v d] that maps hidden states to logits."""
        return self.head

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

        `positions` are not used: the recurrence itself depends on the order, so it undoes the reordering for
        context parallelism."""
        tokens = from_balanced_order(tokens)
        segments = None if segments is None else from_balanced_order(segments)
        rows = tokens.shape[0]

        def matrix_layer(block: Block, x: Array) -> Array:
            return block(cfg, x, empty_matrix_state(cfg, (rows,)), segments, exec_opts)[0]

        def scalar_layer(block: ScalarBlock, x: Array) -> Array:
            return block(cfg, x, empty_scalar_state(cfg, (rows,)), segments, exec_opts)[0]

        def group(x: Array, layers: tuple[Block, ScalarBlock]) -> tuple[Array, None]:
            blocks, scalar = layers
            x = run_layers(exec_opts, [matrix_layer], x, blocks)
            return run_layers(exec_opts, [scalar_layer], x, jax.tree.map(lambda w: w[None], scalar)), None

        x = constrain(embed(self.embedding, tokens, exec_opts.dtype), "batch", "sequence", None)
        if self.scalars is None:
            x = run_layers(exec_opts, [matrix_layer], x, self.blocks)
        else:
            x, _ = jax.lax.scan(group, x, (group_layers(self.blocks, cfg), self.scalars))
        return to_balanced_order(rms_norm(x, self.final_norm, cfg.norm_eps))

    def init_cache(self, cfg: Config, batch_size: int, max_length: int, dtype: DTypeLike) -> Cache:
        """Make the states before the first token. They do not depend on the length, and are in float32, since
        they are sums of many small numbers."""
        matrices = empty_matrix_state(cfg, (cfg.mlstm_layers, batch_size))
        tails = empty_scalar_state(cfg, (cfg.slstm_layers, batch_size)) if cfg.slstm_every else None
        return Cache(matrices, tails)

    def decode(
        self, cfg: Config, tokens: Array, cache: Cache, *, exec_opts: Execution
    ) -> tuple[Array, Cache]:
        """Compute the hidden states [b s d] of tokens [b s] that continue the cached ones.

        Returns the states after them too."""

        def matrix_layer(x: Array, layer: tuple[Block, MatrixState]) -> tuple[Array, MatrixState]:
            block, state = layer
            return block(cfg, x, state, None, exec_opts)

        def group(x: Array, layers: PyTree) -> tuple[Array, PyTree]:
            blocks, states, scalar, scalar_state = layers
            x, states = jax.lax.scan(matrix_layer, x, (blocks, states))
            x, scalar_state = scalar(cfg, x, scalar_state, None, exec_opts)
            return x, (states, scalar_state)

        x, tails = embed(self.embedding, tokens, exec_opts.dtype), None
        if self.scalars is None:
            x, matrices = jax.lax.scan(matrix_layer, x, (self.blocks, cache.matrices))
        else:
            groups = (
                group_layers(self.blocks, cfg),
                group_layers(cache.matrices, cfg),
                self.scalars,
                cache.tails,
            )
            x, (matrices, tails) = jax.lax.scan(group, x, groups)
            matrices = jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), matrices)
        return rms_norm(x, self.final_norm, cfg.norm_eps), Cache(matrices, tails)


def group_layers(layers: PyTree, cfg: Config) -> PyTree:
    """Reshape stacked mLSTM layers [l ...] to [sLSTM layers, mLSTM layers before each, ...]."""
    return jax.tree.map(lambda w: w.reshape(cfg.slstm_layers, -1, *w.shape[1:]), layers)


def empty_matrix_state(cfg: Config, lead: tuple[int, ...]) -> MatrixState:
    """The state of mLSTM layers before the first token, with leading axes such as (layers, rows)."""
    return nn_mlstm.empty_matrix_state((*lead, cfg.heads), cfg.key_dim, cfg.head_dim)


def empty_scalar_state(cfg: Config, lead: tuple[int, ...]) -> ScalarLayerState:
    """The state of sLSTM layers before the first token, with leading axes such as (layers, rows)."""
    cell = nn_mlstm.empty_scalar_state((*lead, cfg.heads, cfg.head_dim))
    return ScalarLayerState(cell, jnp.zeros((*lead, cfg.window - 1, cfg.embed)))


def flops_per_token(cfg: Config, sequence_length: int) -> float:
    """Count the FLOPs of forward and backward pass: 6 per weight, and for each mLSTM head reads and writes of
    its memory, and the scores within a chunk, of which half are visible."""
    chunk_scores = min(nn_mlstm.CHUNK, sequence_length) * (cfg.key_dim + cfg.head_dim)
    memory = 4 * cfg.key_dim * cfg.head_dim
    recurrence = 3 * cfg.mlstm_layers * cfg.heads * (memory + chunk_scores)
    return 6 * (count(Model, cfg) - cfg.vocab * cfg.embed) + recurrence


HF_TENSORS = _xlstm_hf.HF_TENSORS
HF_TYPES = ("xlstm",)
HF_SOFT_CAP = "output_logit_soft_cap"


def to_hf_config(cfg: Config, sequence_length: int) -> HFSettings:
    """Translate to the settings of config.json."""
    if cfg.slstm_every:
        raise UserError(
            f"model.slstm_every: found {cfg.slstm_every}, but transformers has no xLSTM with sLSTM layers"
        )
    return _xlstm_hf.REQUIRED | {
        "architectures": ["xLSTMForCausalLM"],
        "model_type": "xlstm",
        "vocab_size": cfg.vocab,
        "hidden_size": cfg.embed,
        "embedding_dim": cfg.embed,
        "num_hidden_layers": cfg.layers,
        "num_blocks": cfg.layers,
        "num_heads": cfg.heads,
        # transformers truncates the product with this factor.
        "qk_dim_factor": math.nextafter(cfg.heads * cfg.key_dim / cfg.embed, math.inf),
        # transformers rounds the product up to a multiple: of itself, so that a rounding error has no effect.
        "ffn_proj_factor": cfg.mlp / cfg.embed,
        "ffn_round_up_to_multiple_of": cfg.mlp,
        "gate_soft_cap": cfg.gate_soft_cap,
        "norm_eps": cfg.norm_eps,
        **_xlstm_hf.cache_settings(cfg.embed, cfg.heads * cfg.key_dim),
        HF_SOFT_CAP: 1e6,  # has no effect; null is not allowed
        "max_position_embeddings": sequence_length,
    }


def from_hf_config(settings: HFSettings) -> dict[str, Any]:
    """Translate the settings of config.json to a recipe's `model` section."""
    _xlstm_hf.check_settings(settings)
    aliases = {"hidden_size": "embedding_dim", "num_hidden_layers": "num_blocks"}
    settings = settings | {name: settings.get(name) or settings.get(alias) for name, alias in aliases.items()}
    embed, heads = hf_config.get_int(settings, "hidden_size"), hf_config.get_int(settings, "num_heads")
    multiple = hf_config.get_int(settings, "ffn_round_up_to_multiple_of", 64)
    width = embed * hf_config.get_float(settings, "ffn_proj_factor", 2.667)
    section: dict[str, Any] = {
        "layers": hf_config.get_int(settings, "num_hidden_layers"),
        "embed": embed,
        "heads": heads,
        "mlp": int((width + multiple - 1) // multiple) * multiple,
        "vocab": hf_config.get_int(settings, "vocab_size"),
        "key_dim": int(embed * hf_config.get_float(settings, "qk_dim_factor", 0.5)) // heads,
        "gate_soft_cap": hf_config.get_float(settings, "gate_soft_cap", 15.0),
        "norm_eps": hf_config.get_float(settings, "norm_eps", 1e-6),
    }
    try:
        Config(**section)
    except ValueError as error:
        raise UserError(f"config.json: these sizes cannot be imported: {error}") from None
    return {"use": "xlstm"} | section
