"""OLMo 2: Llama with norms after attention and MLP instead of before them, and a norm over all queries and
over all keys (arXiv 2501.00656)."""

from dataclasses import dataclass
from typing import Any

from headrace.config.sections import at_least
from headrace.model_formats import hf_config, hf_heads
from headrace.model_formats.gguf_architecture import Architecture, refuse_export
from headrace.model_formats.hf_config import HFSettings
from headrace.models import llama
from headrace.nn.linear import project, quantize_input
from headrace.nn.mlp import project_gated
from headrace.nn.module import Array, count, module, normal, ones, stack, weight
from headrace.nn.norm import rms_norm
from headrace.nn.rope import Rope, rotate
from headrace.nn.sharding import constrain
from headrace.nn.stack import Execution


@dataclass(frozen=True)
class Config:
    """The `model` section of a recipe with `use: olmo2`."""

    layers: int  # number of layers
    embed: int  # width of the residual stream
    heads: int  # number of query heads
    kv_heads: int  # number of key and value heads, each shared by heads / kv_heads query heads
    mlp: int  # hidden units of the MLP
    vocab: int = 0  # tokens in the vocabulary; 0: as many as the data's tokenizer has
    tie_embeddings: bool = False  # whether the embedding is also the output head
    norm_eps: float = 1e-6  # constant added to the mean square in RMSNorm
    rope_theta: float = 500_000.0  # base of the rotary frequencies

    # Fixed by the architecture; no recipe keys.
    causal = True
    activation = "swiglu"
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


@module
class Block:
    """One layer."""

    w_q: Array = weight("embed", "heads", "head_dim")
    w_k: Array = weight("embed", "kv_heads", "head_dim")
    w_v: Array = weight("embed", "kv_heads", "head_dim")
    w_o: Array = weight("heads", "head_dim", "embed", num_input_axes=2)
    q_norm: Array = weight("heads", "head_dim", init=ones, num_input_axes=0)
    k_norm: Array = weight("kv_heads", "head_dim", init=ones, num_input_axes=0)
    attn_norm: Array = weight("embed", init=ones)
    w_gate: Array = weight("embed", "mlp")
    w_up: Array = weight("embed", "mlp")
    w_down: Array = weight("mlp", "embed")
    mlp_norm: Array = weight("embed", init=ones)

    def project_qkv(self, cfg: Config, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        """Compute queries [b s n h], keys and values [b s k h] from the residual stream x [b s d]."""
        h = quantize_input(self.w_q, x)
        q = norm_all_heads(project(self.w_q, h, "bsd,dnh->bsnh"), self.q_norm, cfg.norm_eps)
        k = norm_all_heads(project(self.w_k, h, "bsd,dkh->bskh"), self.k_norm, cfg.norm_eps)
        v = project(self.w_v, h, "bsd,dkh->bskh")
        rope = Rope(cfg.rope_theta)
        return rotate(q, positions, rope), rotate(k, positions, rope), v

    def add_attention(self, cfg: Config, x: Array, attn_out: Array) -> Array:
        """Project the output of attention [b s n h], normalize it and add it to the residual stream."""
        return x + rms_norm(project(self.w_o, attn_out, "bsnh,nhd->bsd"), self.attn_norm, cfg.norm_eps)

    def add_mlp(self, cfg: Config, x: Array, exec_opts: Execution) -> Array:
        """Compute the gated MLP, normalize its output and add it to the residual stream."""
        h = quantize_input(self.w_gate, x)
        gate, up = project(self.w_gate, h, "bsd,df->bsf"), project(self.w_up, h, "bsd,df->bsf")
        prevent_cse = exec_opts.needs_cse_barrier(cfg.layers)
        mlp_out = project_gated("swiglu", gate, up, self.w_down, prevent_cse=prevent_cse)
        return constrain(x + rms_norm(mlp_out, self.mlp_norm, cfg.norm_eps), "batch", "sequence", None)


def norm_all_heads(x: Array, w: Array, eps: float) -> Array:
    """Apply RMSNorm over heads and features of x [b s n h] together."""
    return rms_norm(x.reshape(*x.shape[:2], -1), w.reshape(-1), eps).reshape(x.shape)


@module
class Model:
    """Llama's model with OLMo 2's layers."""

    embedding: Array = weight("vocab", "embed")
    blocks: Block = stack(Block)
    final_norm: Array = weight("embed", init=ones)
    head: Array | None = weight("vocab", "embed", init=normal(0.02), when=lambda cfg: not cfg.tie_embeddings)

    unembed = llama.Model.unembed
    __call__ = llama.Model.__call__
    init_cache = llama.Model.init_cache
    decode = llama.Model.decode


def flops_per_token(cfg: Config, sequence_length: int) -> float:
    """Count the FLOPs of forward and backward pass, as Llama's."""
    looked_up = 0 if cfg.tie_embeddings else cfg.vocab * cfg.embed
    return 6 * (count(Model, cfg) - looked_up) + 6 * cfg.layers * cfg.embed * sequence_length


HF_TENSORS = llama.HF_TENSORS | {
    "blocks.q_norm": ("model.layers.{}.self_attn.q_norm.weight", "(n h) -> n h"),
    "blocks.k_norm": ("model.layers.{}.self_attn.k_norm.weight", "(k h) -> k h"),
    "blocks.attn_norm": ("model.layers.{}.post_attention_layernorm.weight", "d -> d"),
    "blocks.mlp_norm": ("model.layers.{}.post_feedforward_layernorm.weight", "d -> d"),
}
HF_TYPES = ("olmo2",)
HF_CLASSIFIER = hf_heads.default_layout()


def to_hf_config(cfg: Config, sequence_length: int) -> HFSettings:
    """Translate to the settings of config.json."""
    names = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
    return names | hf_config.decoder_settings(cfg, sequence_length)


def from_hf_config(settings: HFSettings) -> dict[str, Any]:
    """Translate the settings of config.json to a recipe's `model` section."""
    return {"use": "olmo2"} | hf_config.decoder_keys(settings, Config)


def to_gguf(cfg: Config, soft_cap: float | None) -> Architecture:
    """Describe the model for llama.cpp."""
    if soft_cap is not None:
        refuse_export("loss.soft_cap", soft_cap, "olmo2", "logits without one")
    return Architecture("olmo2", head=True)
