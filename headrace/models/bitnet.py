"""BitNet b1.58: a Llama whose matrices are -1, 0 and 1 in every forward pass, and whose activations are
rounded to 8 bits before each of them. It has two more norms per layer, and ReLU squared as the gate (arXiv
2402.17764, 2504.12285). The trained weights have full precision; gradients pass straight through the
rounding."""

from dataclasses import dataclass, replace
from typing import Any

from headrace.config.sections import at_least
from headrace.low_precision.cast import cast
from headrace.model_formats import hf_config, hf_ternary
from headrace.model_formats.hf_config import HFSettings
from headrace.models import llama
from headrace.nn.linear import project, quantize_input
from headrace.nn.mlp import glu
from headrace.nn.module import (
    Array,
    PyTree,
    axes,
    count,
    module,
    normal,
    ones,
    residual_normal,
    stack,
    weight,
)
from headrace.nn.norm import rms_norm
from headrace.nn.sharding import constrain
from headrace.nn.stack import Execution


@dataclass(frozen=True)
class Config:
    """The `model` section of a recipe with `use: bitnet`."""

    layers: int  # number of layers
    embed: int  # width of the residual stream
    heads: int  # number of query heads
    kv_heads: int  # number of key and value heads, each shared by heads / kv_heads query heads
    mlp: int  # hidden units of the MLP
    vocab: int = 0  # tokens in the vocabulary; 0: as many as the data's tokenizer has
    tie_embeddings: bool = True  # whether the embedding is also the output head
    ternary: bool = True  # ternary matrices and 8-bit activations; false: full precision, for comparison
    norm_eps: float = 1e-5  # constant added to the mean square in RMSNorm
    rope_theta: float = 500_000.0  # base of the rotary frequencies

    # Fixed by the architecture; no recipe keys.
    causal = True
    qk_norm = False
    activation = "relu2"
    rope_scaling = "none"
    rope_factor = 1.0
    rope_original_length = 8192

    def __post_init__(self) -> None:
        at_least(1, self, "layers", "embed", "heads", "kv_heads", "mlp")
        at_least(0, self, "vocab", "norm_eps")
        if self.rope_theta <= 0:
            raise ValueError("rope_theta: expected a number above 0")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: expected a divisor of heads, {self.heads}")
        if self.embed % (2 * self.heads):
            raise ValueError(f"heads: expected embed, {self.embed}, to be an even multiple of it")

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads

    @property
    def products(self) -> str:
        """The format in which matrices are multiplied."""
        return "ternary" if self.ternary else "compute"


@module
class Block:
    """One layer."""

    attn_norm: Array = weight("embed", init=ones)
    w_q: Array = weight("embed", "heads", "head_dim")
    w_k: Array = weight("embed", "kv_heads", "head_dim")
    w_v: Array = weight("embed", "kv_heads", "head_dim")
    mixed_norm: Array = weight("heads", "head_dim", init=ones, num_input_axes=0)
    w_o: Array = weight("heads", "head_dim", "embed", init=residual_normal(0.02), num_input_axes=2)
    mlp_norm: Array = weight("embed", init=ones)
    w_gate: Array = weight("embed", "mlp")
    w_up: Array = weight("embed", "mlp")
    hidden_norm: Array = weight("mlp", init=ones)
    w_down: Array = weight("mlp", "embed", init=residual_normal(0.02))

    q_norm = k_norm = None
    project_qkv = llama.Block.project_qkv

    def add_attention(self, cfg: Config, x: Array, attn_out: Array) -> Array:
        """Normalize the output of attention [b s n h], project it and add it to the residual stream.

        The norm removes outliers, which 8 bits cannot represent together with small numbers."""
        flat = attn_out.reshape(*attn_out.shape[:2], -1)
        h = rms_norm(flat, self.mixed_norm.reshape(-1), cfg.norm_eps).reshape(attn_out.shape)
        return x + project(self.w_o, h, "bsnh,nhd->bsd")

    def add_mlp(self, cfg: Config, x: Array, exec_opts: Execution) -> Array:
        """Compute the gated MLP, with a norm before its last matrix, and add its output to the residual
        stream."""
        h = quantize_input(self.w_gate, rms_norm(x, self.mlp_norm, cfg.norm_eps))
        gate, up = project(self.w_gate, h, "bsd,df->bsf"), project(self.w_up, h, "bsd,df->bsf")
        hidden = rms_norm(glu("relu2", gate, up), self.hidden_norm, cfg.norm_eps)
        x = x + project(self.w_down, hidden, "bsf,fd->bsd")
        return constrain(x, "batch", "sequence", None)


@module
class Model:
    """Llama's model with BitNet's layers."""

    embedding: Array = weight("vocab", "embed")
    blocks: Block = stack(Block)
    final_norm: Array = weight("embed", init=ones)
    head: Array | None = weight("vocab", "embed", init=normal(0.02), when=lambda cfg: not cfg.tie_embeddings)

    unembed = llama.Model.unembed
    init_cache = llama.Model.init_cache

    def __call__(
        self,
        cfg: Any,
        tokens: Array,
        *,
        exec_opts: Execution,
        segments: Array | None = None,
        positions: Array | None = None,
    ) -> Array:
        """Compute the last hidden states [b s d] of tokens [b s]."""
        model = round_weights(self, cfg, exec_opts)
        return llama.Model.__call__(
            model, cfg, tokens, exec_opts=exec_opts, segments=segments, positions=positions
        )

    def decode(
        self, cfg: Any, tokens: Array, cache: llama.Cache, *, exec_opts: Execution
    ) -> tuple[Array, llama.Cache]:
        """Compute the hidden states [b s d] of tokens [b s] that continue the cached ones."""
        return llama.Model.decode(
            round_weights(self, cfg, exec_opts), cfg, tokens, cache, exec_opts=exec_opts
        )


def round_weights(model: PyTree, cfg: Config, exec_opts: Execution) -> PyTree:
    """Round the matrices to -1, 0 and 1, unless the step's `cast` has done so."""
    if not cfg.ternary:
        return model
    return cast(model, axes(type(model), cfg), replace(exec_opts, matmul="ternary"))


def flops_per_token(cfg: Config, sequence_length: int) -> float:
    """Count the FLOPs of forward and backward pass, as Llama's: a product counts the same in any format."""
    looked_up = 0 if cfg.tie_embeddings else cfg.vocab * cfg.embed
    return 6 * (count(Model, cfg) - looked_up) + 6 * cfg.layers * cfg.embed * sequence_length


HF_TENSORS = llama.HF_TENSORS | {
    "blocks.mixed_norm": ("model.layers.{}.self_attn.attn_sub_norm.weight", "(n h) -> n h"),
    "blocks.hidden_norm": ("model.layers.{}.mlp.ffn_sub_norm.weight", "f -> f"),
}
HF_TYPES = ("bitnet",)


def to_hf_config(cfg: Config, sequence_length: int) -> HFSettings:
    """Translate to the settings of config.json."""
    names = {"architectures": ["BitNetForCausalLM"], "model_type": "bitnet"}
    rounding = {"quantization_config": hf_ternary.ONLINE} if cfg.ternary else {}
    return names | hf_config.decoder_settings(cfg, sequence_length) | rounding


def from_hf_config(settings: HFSettings) -> dict[str, Any]:
    """Translate the settings of config.json to a recipe's `model` section. Without a `quantization_config`
    transformers does not round the matrices."""
    is_ternary = hf_ternary.read_format(settings) is not None
    plain = {key: value for key, value in settings.items() if key != "quantization_config"}
    return {"use": "bitnet"} | hf_config.decoder_keys(plain, Config, ternary=is_ternary)
