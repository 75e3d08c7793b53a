"""Gemma 3, for text: Gemma 2's layers with normalized queries and keys instead of soft caps. Five layers with
a window are followed by one that sees the whole text, and both have rotary positions of their own (arXiv
2503.19786)."""

from dataclasses import dataclass
from typing import Any, cast

from headrace.config.sections import at_least
from headrace.model_formats import hf_config, hf_heads
from headrace.model_formats.gguf_architecture import Architecture
from headrace.model_formats.hf_config import HFSettings
from headrace.models import gemma2

Model = gemma2.Model
flops_per_token = gemma2.flops_per_token
HF_TENSORS = gemma2.HF_TENSORS
HF_TYPES = ("gemma3_text",)
HF_CLASSIFIER = hf_heads.default_layout("Gemma3Text")
HF_SOFT_CAP = gemma2.HF_SOFT_CAP


@dataclass(frozen=True)
class Config:
    """The `model` section of a recipe with `use: gemma3`."""

    layers: int  # number of layers
    embed: int  # width of the residual stream
    heads: int  # number of query heads
    kv_heads: int  # number of key and value heads, each shared by heads / kv_heads query heads
    mlp: int  # hidden units of the MLP
    vocab: int = 0  # tokens in the vocabulary; 0: as many as the data's tokenizer has
    head_dim: int = 256  # width of a head
    window: int = 512  # size of the attention window of most layers, the token itself included [tokens]
    global_every: int = 6  # interval between layers without a window
    query_scale: int = 0  # number whose square root attention scores are divided by; 0: head_dim
    norm_eps: float = 1e-6  # constant added to the mean square in RMSNorm
    rope_theta: float = 1_000_000.0  # base of the rotary frequencies in layers without a window
    rope_factor: float = 1.0  # factor by which positions are stretched in layers without a window
    rope_local_theta: float = 10_000.0  # base of the rotary frequencies in layers with a window

    # Fixed by the architecture; no recipe keys.
    causal = True
    tie_embeddings = True
    qk_norm = True
    attention_soft_cap = None
    activation = "geglu"
    rope_original_length = 8192

    def __post_init__(self) -> None:
        at_least(1, self, "layers", "embed", "heads", "kv_heads", "mlp", "head_dim", "window", "global_every")
        at_least(0, self, "vocab", "query_scale", "norm_eps")
        for name, theta in (("rope_theta", self.rope_theta), ("rope_local_theta", self.rope_local_theta)):
            if theta <= 0:
                raise ValueError(f"{name}: expected a number above 0")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: expected a divisor of heads, {self.heads}")
        if self.head_dim % 2:
            raise ValueError("head_dim: expected an even number, since rotary positions rotate pairs")
        if not self.query_scale:
            object.__setattr__(self, "query_scale", self.head_dim)
        if self.rope_factor < 1:
            raise ValueError("rope_factor: expected 1 or more")

    @property
    def rope_scaling(self) -> str:
        return "none" if self.rope_factor == 1 else "linear"


def to_hf_config(cfg: Config, sequence_length: int) -> HFSettings:
    """Translate to the settings of config.json."""
    names = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    positions = hf_config.two_rope_settings(cfg) | {"rope_local_base_freq": cfg.rope_local_theta}
    return names | gemma2.common_hf_settings(cast(gemma2.Config, cfg), sequence_length) | positions


def from_hf_config(settings: HFSettings) -> dict[str, Any]:
    """Translate the settings of config.json to a recipe's `model` section."""
    every = hf_config.get_int(settings, "sliding_window_pattern", 6)  # transformers 4's name
    plain, local = hf_config.split_local_rope(settings, ("rope_theta", 1e6), ("rope_local_base_freq", 1e4))
    return {"use": "gemma3"} | gemma2.common_keys(plain, Config, global_every=every, rope_local_theta=local)


def to_gguf(cfg: Config, soft_cap: float | None) -> Architecture:
    """Describe the model for llama.cpp."""
    cap = {} if soft_cap is None else {"final_logit_softcapping": float(soft_cap)}
    return gemma2.gguf_architecture("gemma3", cast(gemma2.Config, cfg), layers_of_27b=62, keys=cap)
