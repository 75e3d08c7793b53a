"""ModernBERT's causal twin, as Ettin's decoders are (arXiv 2507.11412): the same layers, each of which sees
only what came before, and so half of a window."""

from dataclasses import dataclass
from typing import Any

from headrace.models import modernbert

Model = modernbert.Model
flops = modernbert.flops
HF_TYPES = ("modernbert-decoder",)
HF_SPECIAL = modernbert.HF_SPECIAL
HF = modernbert.HF | {
    "blocks.w_q": ("model.layers.{}.attn.q_proj.weight", "(n h) d -> d n h"),
    "blocks.w_k": ("model.layers.{}.attn.k_proj.weight", "(n h) d -> d n h"),
    "blocks.w_v": ("model.layers.{}.attn.v_proj.weight", "(n h) d -> d n h"),
    "w_head": ("lm_head.dense.weight", "e d -> d e"),
    "head_norm": ("lm_head.norm.weight", "d -> d"),
}


@dataclass(frozen=True)
class Config:
    layers: int
    embed: int
    heads: int
    mlp: int
    vocab: int = 0  # 0: as many as the data's tokenizer has
    window: int = 128  # most layers see half of it, their own token the last
    global_every: int = 3  # the first layer sees the whole text, and then each so many-th
    norm_eps: float = 1e-5
    rope_theta: float = 160_000.0  # of the layers that see the whole text
    local_theta: float = 10_000.0  # of those with a window

    # Fixed by the architecture; the block reads them.
    causal = True
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


def to_hf(cfg: Any, sequence: int) -> dict[str, Any]:
    names = {"architectures": ["ModernBertDecoderForCausalLM"], "model_type": "modernbert-decoder"}
    return names | modernbert.write(cfg, sequence)


def from_hf(settings: dict[str, Any]) -> dict[str, Any]:
    """The recipe's model section for a config.json."""
    return {"use": "modernbert_decoder"} | modernbert.read(settings, Config)
