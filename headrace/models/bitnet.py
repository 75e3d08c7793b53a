"""BitNet b1.58: a Llama whose matrices are -1, 0 and 1 in every forward pass, and whose activations are
rounded to 8 bits before each of them; two more norms a layer, and ReLU squared as the gate (arXiv 2402.17764,
2504.12285). What is trained are weights in full precision; gradients pass straight through the rounding."""

from dataclasses import dataclass, replace
from typing import Any

from headrace.nn.stack import Execution, cast
from headrace.model_formats import hf_config as config_json, hf_ternary as ternary
from headrace.nn.mlp import glu
from headrace.nn.norm import rms_norm
from headrace.nn.sharding import constrain
from headrace.models import llama
from headrace.nn.module import Array, axes, count, module, normal, ones, residual_normal, stack, weight
from headrace.nn.linear import prepared, project


@dataclass(frozen=True)
class Config:
    layers: int
    embed: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int = 0  # 0: as many as the data's tokenizer has
    tied: bool = True  # the head is the embedding
    ternary: bool = True  # false: the same model with matrices as they are, to compare with
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0

    # Fixed by the architecture; the block reads them.
    causal = True
    qk_norm = False
    activation = "relu2"
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

    @property
    def products(self):
        return "ternary" if self.ternary else "compute"


@module
class Block:
    attn_norm: Array = weight("embed", init=ones)
    w_q: Array = weight("embed", "heads", "head_dim")
    w_k: Array = weight("embed", "kv_heads", "head_dim")
    w_v: Array = weight("embed", "kv_heads", "head_dim")
    mixed_norm: Array = weight("heads", "head_dim", init=ones, inputs=0)
    w_o: Array = weight("heads", "head_dim", "embed", init=residual_normal(0.02), inputs=2)
    mlp_norm: Array = weight("embed", init=ones)
    w_gate: Array = weight("embed", "mlp")
    w_up: Array = weight("embed", "mlp")
    hidden_norm: Array = weight("mlp", init=ones)
    w_down: Array = weight("mlp", "embed", init=residual_normal(0.02))

    q_norm = k_norm = None
    heads = llama.Block.heads

    def rest(self, cfg: Any, x: Array, mixed: Array, how: Execution) -> Array:
        """What follows once the values are mixed: output projection and MLP, each added to the stream, and
        each with a norm before its last matrix: what is rounded to 8 bits should have no outliers."""
        flat = mixed.reshape(*mixed.shape[:2], -1)
        normed = rms_norm(flat, self.mixed_norm.reshape(-1), cfg.norm_eps).reshape(mixed.shape)
        x = x + project(self.w_o, normed, "bsnh,nhd->bsd")
        h = prepared(self.w_gate, rms_norm(x, self.mlp_norm, cfg.norm_eps))
        gate, up = project(self.w_gate, h, "bsd,df->bsf"), project(self.w_up, h, "bsd,df->bsf")
        hidden = rms_norm(glu(cfg.activation, gate, up), self.hidden_norm, cfg.norm_eps)
        x = x + project(self.w_down, hidden, "bsf,fd->bsd")
        return constrain(x, "batch", "sequence", None)


@module
class Model:
    embedding: Array = weight("vocab", "embed")
    blocks: Block = stack(Block)
    final_norm: Array = weight("embed", init=ones)
    head: Array | None = weight("vocab", "embed", init=normal(0.02), when=lambda cfg: not cfg.tied)

    unembed = llama.Model.unembed
    cache = llama.Model.cache

    def __call__(self, cfg: Any, tokens: Array, *, how: Execution, **seen: Any) -> Array:
        return llama.Model.__call__(rounded(self, cfg, how), cfg, tokens, how=how, **seen)

    def decode(
        self, cfg: Any, tokens: Array, cache: llama.Cache, *, how: Execution
    ) -> tuple[Array, llama.Cache]:
        return llama.Model.decode(rounded(self, cfg, how), cfg, tokens, cache, how=how)


def rounded(model: Any, cfg: Any, how: Execution) -> Any:
    """The model with its matrices in -1, 0 and 1, if the caller has not made them so (`execution.cast`)."""
    return cast(model, axes(type(model), cfg), replace(how, products="ternary")) if cfg.ternary else model


def flops(cfg: Any, sequence: int) -> float:
    """As Llama's: 8 bits or not, a product is a product."""
    looked_up = 0 if cfg.tied else cfg.vocab * cfg.embed
    return 6 * (count(Model, cfg) - looked_up) + 6 * cfg.layers * cfg.embed * sequence


HF = llama.HF | {
    "blocks.mixed_norm": ("model.layers.{}.self_attn.attn_sub_norm.weight", "(n h) -> n h"),
    "blocks.hidden_norm": ("model.layers.{}.mlp.ffn_sub_norm.weight", "f -> f"),
}
HF_TYPES = ("bitnet",)


def to_hf(cfg: Any, sequence: int) -> dict[str, Any]:
    names = {"architectures": ["BitNetForCausalLM"], "model_type": "bitnet"}
    rounds = {"quantization_config": ternary.ONLINE} if cfg.ternary else {}
    return names | config_json.write(cfg, sequence) | rounds


def from_hf(settings: dict[str, Any]) -> dict[str, Any]:
    """Without a `quantization_config` transformers takes the matrices as they are."""
    rounds = ternary.stored(settings) is not None
    plain = {key: value for key, value in settings.items() if key != "quantization_config"}
    return {"use": "bitnet"} | config_json.read(plain, Config, ternary=rounds)
