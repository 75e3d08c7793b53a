"""Mixture of experts: Llama's decoder in which each token passes through a few of many MLPs, as in Mixtral
(arXiv 2401.04088) and Qwen 3 (arXiv 2505.09388).

With sigmoid scores, a bias that balances the experts without a loss, shared experts and dense first layers it
is DeepSeek-V3's mixture (arXiv 2412.19437), but without latent attention."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from headrace.attention import attend
from headrace.config.sections import at_least
from headrace.errors import UserError
from headrace.model_formats import hf_config
from headrace.model_formats.hf_config import HFSettings
from headrace.model_formats.hf_tensors import TensorTable
from headrace.models import _moe_hf, llama
from headrace.nn.attention_mask import Mask
from headrace.nn.experts import ExpertWeights, max_load, mix, route, update_router_bias
from headrace.nn.linear import embed, project, quantize_input
from headrace.nn.mlp import project_gated
from headrace.nn.module import (
    Array,
    PyTree,
    UpdateRule,
    count,
    module,
    normal,
    ones,
    residual_normal,
    stack,
    weight,
    zeros,
)
from headrace.nn.norm import rms_norm
from headrace.nn.sharding import constrain
from headrace.nn.stack import Execution, run_layers, run_layers_cached


@dataclass(frozen=True)
class Config:
    """The `model` section of a recipe with `use: moe`."""

    layers: int  # number of layers
    embed: int  # width of the residual stream
    heads: int  # number of query heads
    kv_heads: int  # number of key and value heads, each shared by heads / kv_heads query heads
    mlp: int  # hidden units of an expert, or of the MLP of the dense layers if expert_mlp is set
    experts: int = 8  # number of experts in a layer
    top_k: int = 2  # number of experts that a token is routed to
    expert_mlp: int = 0  # hidden units of an expert; 0: those of mlp
    shared_experts: int = 0  # number of experts that every token goes through, besides the routed ones
    dense_layers: int = 0  # number of first layers that have a plain MLP instead of experts
    # function that turns router logits into the scores of experts
    router_activation: Literal["softmax", "sigmoid"] = "softmax"
    # whether the weights of a token's experts are scaled to sum to 1, before routed_scale
    normalize_top_k: bool = True
    routed_scale: float = 1.0  # factor on the output of the routed experts
    # method that keeps experts equally busy: a bias on the router, or a loss
    load_balance: Literal["bias", "loss", "none"] = "bias"
    load_balance_rate: float = 0.001  # step size of the bias, or weight of the loss
    vocab: int = 0  # tokens in the vocabulary; 0: as many as the data's tokenizer has
    head_dim: int = 0  # width of a head; 0: embed / heads
    qk_norm: bool = False  # RMSNorm on each head's queries and keys
    norm_eps: float = 1e-6  # constant added to the mean square in RMSNorm
    rope_theta: float = 1_000_000.0  # base of the rotary frequencies

    # Fixed by the architecture; no recipe keys.
    causal = True
    tie_embeddings = False
    activation = "swiglu"
    rope_scaling = "none"
    rope_factor = 1.0
    rope_original_length = 8192

    def __post_init__(self) -> None:
        at_least(1, self, "layers", "embed", "heads", "kv_heads", "mlp", "experts", "top_k")
        at_least(
            0,
            self,
            "expert_mlp",
            "shared_experts",
            "dense_layers",
            "routed_scale",
            "load_balance_rate",
            "vocab",
            "head_dim",
        )
        at_least(0, self, "norm_eps")
        if self.rope_theta <= 0:
            raise ValueError("rope_theta: expected a number above 0")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: expected a divisor of heads, {self.heads}")
        if not self.head_dim:
            if self.embed % self.heads:
                raise ValueError(f"heads: expected a divisor of embed, {self.embed}, or head_dim to be set")
            object.__setattr__(self, "head_dim", self.embed // self.heads)
        if self.head_dim % 2:
            raise ValueError("head_dim: expected an even number, since rotary positions rotate pairs")
        self._check_experts()
        if not self.expert_mlp:
            object.__setattr__(self, "expert_mlp", self.mlp)

    def _check_experts(self) -> None:
        if self.top_k > self.experts:
            raise ValueError(f"top_k: expected at most the number of experts, {self.experts}")
        if self.dense_layers >= self.layers:
            raise ValueError(f"dense_layers: expected less than layers, {self.layers}")
        if not self.dense_layers and self.expert_mlp not in (0, self.mlp):
            raise ValueError("expert_mlp: expected nothing, since no layer is dense: mlp is the experts'")
        if self.load_balance == "none" and self.load_balance_rate != type(self).load_balance_rate:
            raise ValueError(
                "load_balance_rate: expected load_balance to be bias or loss, or it has no effect"
            )

    @property
    def routed_layers(self) -> int:
        return self.layers - self.dense_layers

    @property
    def shared_mlp(self) -> int:
        """Hidden units of all shared experts."""
        return self.shared_experts * self.expert_mlp


@module
class Expert:
    """One of a layer's MLPs."""

    w_gate: Array = weight("embed", "expert_mlp")
    w_up: Array = weight("embed", "expert_mlp")
    w_down: Array = weight("expert_mlp", "embed", init=residual_normal(0.02))


BALANCE = UpdateRule(
    name="busiest_expert",
    move=lambda cfg, bias, loads: update_router_bias(cfg.load_balance_rate, bias, loads),
    measure=max_load,
)


@module
class Block:
    """One layer with experts."""

    attn_norm: Array = weight("embed", init=ones)
    w_q: Array = weight("embed", "heads", "head_dim")
    w_k: Array = weight("embed", "kv_heads", "head_dim")
    w_v: Array = weight("embed", "kv_heads", "head_dim")
    w_o: Array = weight("heads", "head_dim", "embed", init=residual_normal(0.02), num_input_axes=2)
    q_norm: Array | None = weight("head_dim", init=ones, when=lambda cfg: cfg.qk_norm)
    k_norm: Array | None = weight("head_dim", init=ones, when=lambda cfg: cfg.qk_norm)
    mlp_norm: Array = weight("embed", init=ones)
    # In float32, since small differences decide the choice between experts.
    router: Array = weight("embed", "experts", keep_float32=True)
    bias: Array | None = weight(
        "experts",
        init=zeros,
        num_input_axes=0,
        update_rule=BALANCE,
        when=lambda cfg: cfg.load_balance == "bias",
    )
    experts: Expert = stack(Expert, "experts")
    shared_gate: Array | None = weight("embed", "shared_mlp", when=lambda cfg: cfg.shared_experts > 0)
    shared_up: Array | None = weight("embed", "shared_mlp", when=lambda cfg: cfg.shared_experts > 0)
    shared_down: Array | None = weight(
        "shared_mlp", "embed", init=residual_normal(0.02), when=lambda cfg: cfg.shared_experts > 0
    )

    project_qkv = llama.Block.project_qkv
    add_attention = llama.Block.add_attention

    def add_experts(
        self, cfg: Config, x: Array, exec_opts: Execution, segments: Array | None = None
    ) -> Array:
        """Compute the experts of each token and add their output to the residual stream. Padding, where
        `segments` is 0, does not count towards the experts' loads."""
        h = rms_norm(x, self.mlp_norm, cfg.norm_eps)
        routing = route(
            project(self.router, h.astype(jnp.float32), "bsd,de->bse"),
            self.bias,
            None if segments is None else segments > 0,
            top_k=cfg.top_k,
            scores=cfg.router_activation,
            normalize=cfg.normalize_top_k,
            scale=cfg.routed_scale,
            balance=cfg.load_balance_rate if cfg.load_balance == "loss" else 0.0,
        )
        experts = ExpertWeights(self.experts.w_gate, self.experts.w_up, self.experts.w_down)
        out = mix("swiglu", h, routing, experts, gather_again=exec_opts.remat == "none")
        if self.shared_gate is not None:
            h = quantize_input(self.shared_gate, h)
            gate, up = (project(w, h, "bsd,df->bsf") for w in (self.shared_gate, self.shared_up))
            prevent_cse = exec_opts.needs_cse_barrier(cfg.routed_layers)
            out = out + project_gated("swiglu", gate, up, self.shared_down, prevent_cse=prevent_cse)
        return constrain(x + out, "batch", "sequence", None)


@module
class Model:
    """Embedding, dense layers, layers with experts, final norm and output head."""

    embedding: Array = weight("vocab", "embed")
    dense: llama.Block | None = stack(llama.Block, "dense_layers", when=lambda cfg: cfg.dense_layers > 0)
    blocks: Block = stack(Block, "routed_layers")
    final_norm: Array = weight("embed", init=ones)
    head: Array = weight("vocab", "embed", init=normal(0.02))

    unembed = llama.Model.unembed
    init_cache = llama.Model.init_cache

    def __call__(
        self,
        cfg: Config,
        tokens: Array,
        *,
        exec_opts: Execution,
        segments: Array | None = None,
        positions: Array | None = None,
    ) -> Array:
        """Compute the last hidden states [b s d] of tokens [b s]."""
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

        def add_attention(block: PyTree, x: Array) -> Array:
            q, k, v = block.project_qkv(cfg, x, positions)
            attn_out = attend(exec_opts.attention, q, k, v, mask=Mask(causal=True), segments=segments)
            return block.add_attention(cfg, x, attn_out)

        def dense_layer(block: PyTree, x: Array) -> Array:
            return block.add_mlp(cfg, add_attention(block, x), exec_opts)

        def routed_layer(block: Block, x: Array) -> Array:
            return block.add_experts(cfg, add_attention(block, x), exec_opts, segments)

        x = constrain(embed(self.embedding, tokens, exec_opts.dtype), "batch", "sequence", None)
        if self.dense is not None:
            x = run_layers(exec_opts, [dense_layer], x, self.dense)
        x = run_layers(exec_opts, [routed_layer], x, self.blocks)
        return rms_norm(x, self.final_norm, cfg.norm_eps)

    def decode(
        self, cfg: Config, tokens: Array, cache: llama.Cache, *, exec_opts: Execution
    ) -> tuple[Array, llama.Cache]:
        """Compute the hidden states [b s d] of tokens [b s] that continue the cached ones.

        Returns the cache with the new tokens added."""
        start = cache.length
        positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)

        def layer(block: PyTree, kv: tuple[Array, Array], x: Array) -> tuple[Array, tuple[Array, Array]]:
            cached_k, cached_v = kv
            q, k, v = block.project_qkv(cfg, x, positions)
            k = jax.lax.dynamic_update_slice_in_dim(cached_k, k, start, axis=1)
            v = jax.lax.dynamic_update_slice_in_dim(cached_v, v, start, axis=1)
            attn_out = attend(exec_opts.attention, q, k, v, mask=Mask(causal=True), offset=start)
            x = block.add_attention(cfg, x, attn_out)
            add_mlp = block.add_experts if isinstance(block, Block) else block.add_mlp
            return add_mlp(cfg, x, exec_opts), (k, v)

        x, updated = embed(self.embedding, tokens, exec_opts.dtype), []
        for blocks, part in (
            (self.dense, slice(cfg.dense_layers)),
            (self.blocks, slice(cfg.dense_layers, None)),
        ):
            if blocks is not None:
                x, kv = run_layers_cached(exec_opts, [layer], x, blocks, (cache.k[part], cache.v[part]))
                updated.append(kv)
        k, v = (jnp.concatenate(parts) for parts in zip(*updated, strict=True))
        hidden = rms_norm(x, self.final_norm, cfg.norm_eps)
        return hidden, llama.Cache(k, v, length=start + tokens.shape[1])


def flops_per_token(cfg: Config, sequence_length: int) -> float:
    """Count the FLOPs of forward and backward pass: 6 per active weight, and those of causal attention."""
    params = count(Model, cfg) - cfg.vocab * cfg.embed
    unused = cfg.routed_layers * (cfg.experts - cfg.top_k) * 3 * cfg.embed * cfg.expert_mlp
    return 6 * (params - unused) + 6 * cfg.layers * cfg.heads * cfg.head_dim * sequence_length


HF_TYPES = ("mixtral", "qwen3_moe", "glm4_moe")
ATTENTION = ("attn_norm", "w_q", "w_k", "w_v", "w_o", "q_norm", "k_norm", "mlp_norm")


def HF_TENSORS(cfg: Config) -> TensorTable:
    """Weight -> (Hugging Face tensor, its axes -> ours).

    The first {} of a name is the layer, counted from the first with experts; the second is the expert."""
    is_mixtral = hf_type(cfg) == "mixtral"
    layer = f"model.layers.{{+{cfg.dense_layers}}}."
    mlp = layer + ("block_sparse_moe." if is_mixtral else "mlp.")
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    table = {name: entry for name, entry in llama.HF_TENSORS.items() if not name.startswith("blocks.")}
    table |= {
        name.replace("blocks", "dense"): entry
        for name, entry in llama.HF_TENSORS.items()
        if name.startswith("blocks.")
    }
    for name in ATTENTION:
        tensor, axes = llama.HF_TENSORS[f"blocks.{name}"]
        table[f"blocks.{name}"] = (tensor.replace("model.layers.{}.", layer), axes)
    return table | {
        "blocks.router": (f"{mlp}gate.weight", "e d -> d e"),
        "blocks.bias": (f"{mlp}gate.e_score_correction_bias", "e -> e"),
        "blocks.experts.w_gate": (f"{mlp}experts.{{}}.{gate}.weight", "f d -> d f"),
        "blocks.experts.w_up": (f"{mlp}experts.{{}}.{up}.weight", "f d -> d f"),
        "blocks.experts.w_down": (f"{mlp}experts.{{}}.{down}.weight", "d f -> f d"),
        "blocks.shared_gate": (f"{mlp}shared_experts.gate_proj.weight", "f d -> d f"),
        "blocks.shared_up": (f"{mlp}shared_experts.up_proj.weight", "f d -> d f"),
        "blocks.shared_down": (f"{mlp}shared_experts.down_proj.weight", "d f -> f d"),
    }


def hf_type(cfg: Config) -> str:
    """The `model_type` in transformers that is closest to the model."""
    if cfg.router_activation == "sigmoid":
        return "glm4_moe"
    return "qwen3_moe" if cfg.qk_norm else "mixtral"


def to_hf_config(cfg: Config, sequence_length: int) -> HFSettings:
    """Translate to the settings of config.json. GLM-4 MoE is transformers' model with DeepSeek-V3's experts
    and plain attention."""
    kind = hf_type(cfg)
    name = {"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe", "glm4_moe": "Glm4Moe"}[kind]
    _check_exportable(cfg, kind, name)
    settings = hf_config.decoder_settings(cfg, sequence_length) | {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": kind,
        "num_experts_per_tok": cfg.top_k,
    }
    if kind == "mixtral":
        settings |= {"num_local_experts": cfg.experts}
    else:
        settings |= {"moe_intermediate_size": cfg.expert_mlp, "norm_topk_prob": cfg.normalize_top_k}
    if kind == "qwen3_moe":
        settings |= {
            "num_experts": cfg.experts,
            "mlp_only_layers": [*range(cfg.dense_layers)],
            "decoder_sparse_step": 1,
        }
    if kind == "glm4_moe":
        settings["rope_parameters"] |= {"partial_rotary_factor": 1.0}
        settings |= {
            "n_routed_experts": cfg.experts,
            "n_shared_experts": cfg.shared_experts,
            "routed_scaling_factor": cfg.routed_scale,
            "first_k_dense_replace": cfg.dense_layers,
            "use_qk_norm": cfg.qk_norm,
            "n_group": 1,
            "topk_group": 1,
            "partial_rotary_factor": 1.0,
            "num_nextn_predict_layers": 0,
        }
    elif cfg.load_balance == "loss":
        settings |= {"router_aux_loss_coef": cfg.load_balance_rate}
    return settings


def _check_exportable(cfg: Config, kind: str, name: str) -> None:
    required: dict[str, object] = {"shared_experts": 0, "routed_scale": 1.0} if kind != "glm4_moe" else {}
    if kind == "glm4_moe" and not cfg.shared_experts:
        raise UserError(
            "model.shared_experts: transformers loads no model of sigmoid scores without a shared expert"
        )
    if kind == "mixtral":
        required |= {"normalize_top_k": True, "dense_layers": 0}
    for key, value in required.items():
        if getattr(cfg, key) != value:
            raise UserError(
                f"model.{key}: found {getattr(cfg, key)}, and transformers' {name} has only {value}; sigmoid "
                "scores, or qk_norm, make it another model there"
            )
    if (cfg.load_balance == "bias") != (kind == "glm4_moe"):
        expected = "bias" if kind == "glm4_moe" else "loss or none"
        raise UserError(f"model.load_balance: expected {expected}, since transformers' {name} has no other")


def from_hf_config(settings: HFSettings) -> dict[str, Any]:
    """Translate the settings of config.json to a recipe's `model` section."""
    kind = settings["model_type"]
    keys: dict[str, Any] = {
        "top_k": hf_config.get_int(settings, "num_experts_per_tok"),
        "load_balance": "none",
    }
    rate = hf_config.get_float(settings, "router_aux_loss_coef", 0.0)
    if kind != "glm4_moe" and rate > 0:
        keys |= {"load_balance": "loss", "load_balance_rate": rate}
    if kind == "mixtral":
        keys |= {"experts": hf_config.get_int(settings, "num_local_experts")}
        if settings.get("sliding_window"):
            raise UserError("config.json: sliding_window: layers with a window cannot be imported")
        return {"use": "moe"} | hf_config.decoder_keys(settings, Config, **keys)
    keys |= {"normalize_top_k": hf_config.get_bool(settings, "norm_topk_prob")}
    keys |= _moe_hf.qwen_keys(settings) if kind == "qwen3_moe" else _moe_hf.glm_keys(settings)
    width = hf_config.get_int(settings, "moe_intermediate_size")
    keys |= {"expert_mlp": width} if keys["dense_layers"] else {"mlp": width}
    return {"use": "moe"} | hf_config.decoder_keys(settings, Config, **keys)
