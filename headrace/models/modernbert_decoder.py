"""A decoder with ModernBERT's layers, as in Ettin (arXiv 2507.11412). Each token sees only earlier ones, and
so only half of a window."""

from dataclasses import dataclass
from typing import Any, cast

from headrace.config.sections import at_least
from headrace.model_formats.hf_config import HFSettings
from headrace.models import modernbert

Model = modernbert.Model
flops_per_token = modernbert.flops_per_token
HF_TYPES = ("modernbert-decoder",)
HF_SPECIAL = modernbert.HF_SPECIAL
HF_TENSORS = modernbert.HF_TENSORS | {
    "blocks.w_q": ("model.layers.{}.attn.q_proj.weight", "(n h) d -> d n h"),
    "blocks.w_k": ("model.layers.{}.attn.k_proj.weight", "(n h) d -> d n h"),
    "blocks.w_v": ("model.layers.{}.attn.v_proj.weight", "(n h) d -> d n h"),
    "w_head": ("lm_head.dense.weight", "e d -> d e"),
    "head_norm": ("lm_head.norm.weight", "d -> d"),
}


@dataclass(frozen=True)
class Config:
    """The `model` section of a recipe with `use: modernbert_decoder`."""

    layers: int  # number of layers
    embed: int  # width of the residual stream
    heads: int  # number of attention heads
    mlp: int  # hidden units of the MLP
    vocab: int = 0  # tokens in the vocabulary; 0: as many as the data's tokenizer has
    window: int = 128  # twice the size of the attention window of most layers [tokens]
    global_every: int = 3  # interval between layers without a window, starting with the first layer
    norm_eps: float = 1e-5  # constant added to the variance in LayerNorm
    rope_theta: float = 160_000.0  # base of the rotary frequencies in layers without a window
    rope_local_theta: float = 10_000.0  # base of the rotary frequencies in layers with a window

    # Fixed by the architecture; no recipe keys.
    causal = True
    tie_embeddings = True
    rope_scaling = "none"
    rope_factor = 1.0
    rope_original_length = 8192

    def __post_init__(self) -> None:
        at_least(2, self, "layers", "window")
        at_least(1, self, "embed", "heads", "mlp", "global_every")
        at_least(0, self, "vocab", "norm_eps")
        for name, theta in (("rope_theta", self.rope_theta), ("rope_local_theta", self.rope_local_theta)):
            if theta <= 0:
                raise ValueError(f"{name}: expected a number above 0")
        if self.embed % (2 * self.heads):
            raise ValueError(f"heads: expected embed, {self.embed}, to be an even multiple of it")

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def later_layers(self) -> int:
        return self.layers - 1

    @property
    def head_out(self) -> int:
        return self.embed


def to_hf_config(cfg: Config, sequence_length: int) -> HFSettings:
    """Translate to the settings of config.json."""
    names = {"architectures": ["ModernBertDecoderForCausalLM"], "model_type": "modernbert-decoder"}
    return names | modernbert.common_hf_settings(cast(modernbert.Config, cfg), sequence_length)


def from_hf_config(settings: HFSettings) -> dict[str, Any]:
    """Translate the settings of config.json to a recipe's `model` section."""
    return {"use": "modernbert_decoder"} | modernbert.common_keys(settings, Config)
