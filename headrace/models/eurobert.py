"""EuroBERT: an encoder that is Llama's block without the causal mask, with an untied head for masked language
modelling (arXiv 2503.05500)."""

from dataclasses import dataclass
from typing import Any

from headrace.model_wrappers.classification_head import Head, Layout, dense
from headrace.model_formats import hf_config as config_json
from headrace.models import llama

Model = llama.Model
flops = llama.flops
HF = llama.HF
HF_TYPES = ("eurobert",)
CLASSES = Layout(
    Head(
        "EuroBertForSequenceClassification",
        dense("pool", "dense") | dense("classes", "classifier"),
        {"first": "bos", "mean": "mean"},
    ),
    Head("EuroBertForTokenClassification", dense("classes", "classifier"), {"each": ""}),
    drops=("head",),
    setting="classifier_pooling",
)


@dataclass(frozen=True)
class Config:
    layers: int
    embed: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int = 0  # 0: as many as the data's tokenizer has
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0  # 250,000 in the second phase

    # Fixed by the architecture; the block reads them.
    causal = False
    tied = False
    qk_norm = False
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
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: expected a divisor of heads, {self.heads}")
        if self.embed % (2 * self.heads):
            raise ValueError(f"heads: expected embed, {self.embed}, to be an even multiple of it")

    @property
    def head_dim(self):
        return self.embed // self.heads


def to_hf(cfg: Any, sequence: int) -> dict[str, Any]:
    names = {"architectures": ["EuroBertForMaskedLM"], "model_type": "eurobert"}
    return names | config_json.write(cfg, sequence)


def from_hf(settings: dict[str, Any]) -> dict[str, Any]:
    return {"use": "eurobert"} | config_json.read(settings, Config)
