"""Gemma 3, for text: Gemma 2's block with normalised queries and keys instead of soft caps, five layers with
a window to one that sees the whole text, and other positions for each (arXiv 2503.19786)."""

from dataclasses import dataclass
from typing import Any

from headrace.model_wrappers import classification_head as classifier
from headrace.model_formats import hf_config as config_json
from headrace.model_formats.gguf_architecture import Architecture
from headrace.models import gemma2

Model = gemma2.Model
flops = gemma2.flops
HF = gemma2.HF
HF_TYPES = ("gemma3_text",)
CLASSES = classifier.generic("Gemma3Text")
HF_SOFT_CAP = gemma2.HF_SOFT_CAP


@dataclass(frozen=True)
class Config:
    layers: int
    embed: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int = 0  # 0: as many as the data's tokenizer has
    head_dim: int = 256
    window: int = 512  # tokens that most layers see, the last of them their own; 1024 from 4B on
    global_every: int = 6  # each so many-th layer sees the whole text
    query_scale: int = 0  # scores are divided by its root; 0: head_dim
    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0  # of the layers that see the whole text
    rope_factor: float = 1.0  # stretches their positions; 8 from 4B on
    local_theta: float = 10_000.0  # of those with a window

    # Fixed by the architecture; the block reads them.
    causal = True
    tied = True
    qk_norm = True
    attention_cap = None
    activation = "geglu"
    rope_original = 8192

    def __post_init__(self):
        for name in ("layers", "embed", "heads", "kv_heads", "mlp", "head_dim", "window", "global_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more")
        for name in ("vocab", "query_scale", "norm_eps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected 0 or more")
        for name in ("rope_theta", "local_theta"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: expected a number above 0")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: expected a divisor of heads, {self.heads}")
        if self.head_dim % 2:
            raise ValueError("head_dim: expected an even number, since positions turn pairs")
        if not self.query_scale:
            object.__setattr__(self, "query_scale", self.head_dim)
        if self.rope_factor < 1:
            raise ValueError("rope_factor: expected 1 or more")

    @property
    def rope_scaling(self):
        return "none" if self.rope_factor == 1 else "linear"


def to_hf(cfg: Any, sequence: int) -> dict[str, Any]:
    names = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    positions = config_json.write_two_ropes(cfg) | {"rope_local_base_freq": cfg.local_theta}
    return names | gemma2.write(cfg, sequence) | positions


def to_gguf(cfg: Any, soft_cap: float | None) -> Architecture:
    cap = {} if soft_cap is None else {"final_logit_softcapping": float(soft_cap)}
    return gemma2.architecture("gemma3", cfg, largest=62, keys=cap)


def from_hf(settings: dict[str, Any]) -> dict[str, Any]:
    """The recipe's model section for a config.json."""
    usual = config_json.whole(settings, "sliding_window_pattern", 6)  # as transformers 4 says it
    plain, local = config_json.read_two_ropes(settings, rope_theta=1e6, rope_local_base_freq=1e4)
    return {"use": "gemma3"} | gemma2.read(plain, Config, global_every=usual, local_theta=local)
