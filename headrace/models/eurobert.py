"""EuroBERT: an encoder with Llama's layers, but without the causal mask, and with an untied head for masked
language modeling (arXiv 2503.05500)."""

from dataclasses import dataclass
from typing import Any

from headrace.config.sections import at_least
from headrace.model_formats import hf_config
from headrace.model_formats.hf_config import HFSettings
from headrace.model_formats.hf_heads import Head, HeadLayout, linear_tensors
from headrace.models import llama

Model = llama.Model
flops_per_token = llama.flops_per_token
HF_TENSORS = llama.HF_TENSORS
HF_TYPES = ("eurobert",)
HF_CLASSIFIER = HeadLayout(
    Head(
        "EuroBertForSequenceClassification",
        linear_tensors("pool", "dense") | linear_tensors("classes", "classifier"),
        {"first": "bos", "mean": "mean"},
    ),
    Head("EuroBertForTokenClassification", linear_tensors("classes", "classifier"), {"each": ""}),
    drops=("head",),
    pooling_key="classifier_pooling",
)


@dataclass(frozen=True)
class Config:
    """The `model` section of a recipe with `use: eurobert`."""

    layers: int  # number of layers
    embed: int  # width of the residual stream
    heads: int  # number of query heads
    kv_heads: int  # number of key and value heads, each shared by heads / kv_heads query heads
    mlp: int  # hidden units of the MLP
    vocab: int = 0  # tokens in the vocabulary; 0: as many as the data's tokenizer has
    norm_eps: float = 1e-5  # constant added to the mean square in RMSNorm
    rope_theta: float = 10_000.0  # base of the rotary frequencies

    # Fixed by the architecture; no recipe keys.
    causal = False
    tie_embeddings = False
    qk_norm = False
    activation = "swiglu"
    rope_scaling = "none"
    rope_factor = 1.0
    rope_original_length = 8192

    def __post_init__(self) -> None:
        at_least(1, self, "layers", "embed", "heads", "kv_heads", "mlp")
        at_least(0, self, "vocab")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: expected a divisor of heads, {self.heads}")
        if self.embed % (2 * self.heads):
            raise ValueError(f"heads: expected embed, {self.embed}, to be an even multiple of it")

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads


def to_hf_config(cfg: Config, sequence_length: int) -> HFSettings:
    """Translate to the settings of config.json."""
    names = {"architectures": ["EuroBertForMaskedLM"], "model_type": "eurobert"}
    return names | hf_config.decoder_settings(cfg, sequence_length)


def from_hf_config(settings: HFSettings) -> dict[str, Any]:
    """Translate the settings of config.json to a recipe's `model` section."""
    return {"use": "eurobert"} | hf_config.decoder_keys(settings, Config)
