"""OLMo 2: Llama with its norms behind attention and MLP instead of before them, and a norm of all queries and
of all keys (arXiv 2501.00656)."""

from dataclasses import dataclass
from typing import Any

from headrace.model_wrappers import classification_head as classifier
from headrace.nn.stack import Execution
from headrace.model_formats import hf_config as config_json
from headrace.model_formats.gguf_architecture import Architecture, refuse
from headrace.nn.mlp import gated
from headrace.nn.norm import rms_norm
from headrace.nn.rope import rotate
from headrace.nn.sharding import constrain
from headrace.models import llama
from headrace.nn.module import Array, count, module, normal, ones, stack, weight
from headrace.nn.linear import prepared, project


@dataclass(frozen=True)
class Config:
    layers: int
    embed: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int = 0  # 0: as many as the data's tokenizer has
    tied: bool = False  # the head is the embedding
    norm_eps: float = 1e-6
    rope_theta: float = 500_000.0

    # Fixed by the architecture.
    causal = True
    activation = "swiglu"
    rope_scaling = "none"
    rope_factor = 1.0
    rope_original = 8192

    def __post_init__(self):
        for name in ("layers", "embed", "heads", "kv_heads", "mlp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more")
        if self.vocab < 0:
            raise ValueError("vocab: expected 0 or more")
        if self.norm_eps < 0:
            raise ValueError("norm_eps: expected 0 or more")
        if self.rope_theta <= 0:
            raise ValueError("rope_theta: expected a number above 0")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: expected a divisor of heads, {self.heads}")
        if self.embed % (2 * self.heads):
            raise ValueError(f"heads: expected embed, {self.embed}, to be an even multiple of it")

    @property
    def head_dim(self):
        return self.embed // self.heads


@module
class Block:
    w_q: Array = weight("embed", "heads", "head_dim")
    w_k: Array = weight("embed", "kv_heads", "head_dim")
    w_v: Array = weight("embed", "kv_heads", "head_dim")
    w_o: Array = weight("heads", "head_dim", "embed", inputs=2)
    q_norm: Array = weight("heads", "head_dim", init=ones, inputs=0)
    k_norm: Array = weight("kv_heads", "head_dim", init=ones, inputs=0)
    attn_norm: Array = weight("embed", init=ones)
    w_gate: Array = weight("embed", "mlp")
    w_up: Array = weight("embed", "mlp")
    w_down: Array = weight("mlp", "embed")
    mlp_norm: Array = weight("embed", init=ones)

    def heads(self, cfg: Any, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        """Queries [b s n h], keys and values [b s k h]."""
        h = prepared(self.w_q, x)
        q = together(project(self.w_q, h, "bsd,dnh->bsnh"), self.q_norm, cfg)
        k = together(project(self.w_k, h, "bsd,dkh->bskh"), self.k_norm, cfg)
        v = project(self.w_v, h, "bsd,dkh->bskh")
        return rotate(q, positions, llama.rope(cfg)), rotate(k, positions, llama.rope(cfg)), v

    def rest(self, cfg: Any, x: Array, mixed: Array, how: Execution) -> Array:
        """What follows once the values are mixed: output projection and MLP, each added to the stream."""
        x = x + rms_norm(project(self.w_o, mixed, "bsnh,nhd->bsd"), self.attn_norm, cfg.norm_eps)
        h = prepared(self.w_gate, x)
        gate, up = project(self.w_gate, h, "bsd,df->bsf"), project(self.w_up, h, "bsd,df->bsf")
        out = gated(cfg.activation, gate, up, self.w_down, merges=how.merges(cfg.layers))
        return constrain(x + rms_norm(out, self.mlp_norm, cfg.norm_eps), "batch", "sequence", None)


def together(x: Array, w: Array, cfg: Any) -> Array:
    """A norm over all heads [b s n h] at once."""
    return rms_norm(x.reshape(*x.shape[:2], -1), w.reshape(-1), cfg.norm_eps).reshape(x.shape)


@module
class Model:
    embedding: Array = weight("vocab", "embed")
    blocks: Block = stack(Block)
    final_norm: Array = weight("embed", init=ones)
    head: Array | None = weight("vocab", "embed", init=normal(0.02), when=lambda cfg: not cfg.tied)

    unembed = llama.Model.unembed
    __call__ = llama.Model.__call__
    cache = llama.Model.cache
    decode = llama.Model.decode


def flops(cfg: Any, sequence: int) -> float:
    """As Llama's."""
    looked_up = 0 if cfg.tied else cfg.vocab * cfg.embed
    return 6 * (count(Model, cfg) - looked_up) + 6 * cfg.layers * cfg.embed * sequence


HF = llama.HF | {
    "blocks.q_norm": ("model.layers.{}.self_attn.q_norm.weight", "(n h) -> n h"),
    "blocks.k_norm": ("model.layers.{}.self_attn.k_norm.weight", "(k h) -> k h"),
    "blocks.attn_norm": ("model.layers.{}.post_attention_layernorm.weight", "d -> d"),
    "blocks.mlp_norm": ("model.layers.{}.post_feedforward_layernorm.weight", "d -> d"),
}
HF_TYPES = ("olmo2",)
CLASSES = classifier.generic()


def to_hf(cfg: Any, sequence: int) -> dict[str, Any]:
    names = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
    return names | config_json.write(cfg, sequence)


def to_gguf(cfg: Any, soft_cap: float | None) -> Architecture:
    if soft_cap is not None:
        refuse("loss.soft_cap", soft_cap, "olmo2", "logits without one")
    return Architecture("olmo2", head=True)


def from_hf(settings: dict[str, Any]) -> dict[str, Any]:
    return {"use": "olmo2"} | config_json.read(settings, Config)
