"""A mixture of experts: Llama's decoder in which each token goes through a few of many MLPs, as in Mixtral
(arXiv 2401.04088) and Qwen 3 (arXiv 2505.09388); with sigmoid scores, a bias that keeps the experts busy
without a loss, experts that all tokens share and first layers without any, as in DeepSeek-V3 (arXiv
2412.19437), whose latent attention it has not."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from headrace.errors import UserError
from headrace.nn.stack import Execution, cached_layers, layers
from headrace.model_formats import hf_config as config_json
from headrace.attention import Mask, attend
from headrace.nn.experts import Matrices, busiest, even_out, mix, route
from headrace.nn.mlp import gated
from headrace.nn.norm import rms_norm
from headrace.nn.sharding import constrain
from headrace.models import llama
from headrace.nn.module import Array, Rule, count, module, normal, ones, residual_normal, stack, weight, zeros
from headrace.nn.linear import lookup, prepared, project


@dataclass(frozen=True)
class Config:
    layers: int
    embed: int
    heads: int
    kv_heads: int
    mlp: int  # hidden units of an expert, or of the first dense layers where expert_mlp is set
    experts: int = 8
    top_k: int = 2  # experts that a token goes through
    expert_mlp: int = 0  # hidden units of an expert; 0: as mlp
    shared: int = 0  # experts that every token goes through, beside those
    dense: int = 0  # first layers with a plain MLP
    scores: Literal["softmax", "sigmoid"] = "softmax"  # of the experts for a token
    normalise: bool = True  # the weights of a token's experts sum to 1, before `scale`
    scale: float = 1.0  # of what the chosen experts give
    balance: Literal["bias", "loss", "none"] = "bias"  # how experts are kept busy
    balance_rate: float = 0.001  # what the bias moves by in a step, or the weight of the loss
    vocab: int = 0  # 0: as many as the data's tokenizer has
    head_dim: int = 0  # 0: embed / heads
    qk_norm: bool = False
    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0

    # Fixed by the architecture; the blocks read them.
    causal = True
    tied = False
    activation = "swiglu"
    rope_scaling = "none"
    rope_factor = 1.0
    rope_original = 8192

    def __post_init__(self):
        for name in ("layers", "embed", "heads", "kv_heads", "mlp", "experts", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more")
        for name in ("expert_mlp", "shared", "dense", "scale", "balance_rate", "vocab", "head_dim"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected 0 or more")
        if self.rope_theta <= 0:
            raise ValueError("rope_theta: expected a number above 0")
        if self.norm_eps < 0:
            raise ValueError("norm_eps: expected 0 or more")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: expected a divisor of heads, {self.heads}")
        if not self.head_dim:
            if self.embed % self.heads:
                raise ValueError(f"heads: expected a divisor of embed, {self.embed}, or head_dim to be set")
            object.__setattr__(self, "head_dim", self.embed // self.heads)
        if self.head_dim % 2:
            raise ValueError("head_dim: expected an even number, since positions turn pairs")
        if self.top_k > self.experts:
            raise ValueError(f"top_k: expected at most the number of experts, {self.experts}")
        if self.dense >= self.layers:
            raise ValueError(f"dense: expected less than layers, {self.layers}")
        if not self.dense and self.expert_mlp not in (0, self.mlp):
            raise ValueError("expert_mlp: expected nothing, since no layer is dense: mlp is the experts'")
        if self.balance == "none" and self.balance_rate != type(self).balance_rate:
            raise ValueError("balance_rate: expected balance to be bias or loss, or it has no effect")
        if not self.expert_mlp:
            object.__setattr__(self, "expert_mlp", self.mlp)

    @property
    def routed_layers(self):
        return self.layers - self.dense

    @property
    def shared_mlp(self):
        return self.shared * self.expert_mlp


@module
class Expert:
    w_gate: Array = weight("embed", "expert_mlp")
    w_up: Array = weight("embed", "expert_mlp")
    w_down: Array = weight("expert_mlp", "embed", init=residual_normal(0.02))


BALANCE = Rule(
    name="busiest_expert",
    move=lambda cfg, bias, loads: even_out(cfg.balance_rate, bias, loads),
    measure=busiest,
)


@module
class Block:
    attn_norm: Array = weight("embed", init=ones)
    w_q: Array = weight("embed", "heads", "head_dim")
    w_k: Array = weight("embed", "kv_heads", "head_dim")
    w_v: Array = weight("embed", "kv_heads", "head_dim")
    w_o: Array = weight("heads", "head_dim", "embed", init=residual_normal(0.02), inputs=2)
    q_norm: Array | None = weight("head_dim", init=ones, when=lambda cfg: cfg.qk_norm)
    k_norm: Array | None = weight("head_dim", init=ones, when=lambda cfg: cfg.qk_norm)
    mlp_norm: Array = weight("embed", init=ones)
    # In float32: a choice between experts hangs on small differences.
    router: Array = weight("embed", "experts", exact=True)
    bias: Array | None = weight(
        "experts", init=zeros, inputs=0, rule=BALANCE, when=lambda cfg: cfg.balance == "bias"
    )
    experts: Expert = stack(Expert, "experts")
    shared_gate: Array | None = weight("embed", "shared_mlp", when=lambda cfg: cfg.shared > 0)
    shared_up: Array | None = weight("embed", "shared_mlp", when=lambda cfg: cfg.shared > 0)
    shared_down: Array | None = weight(
        "shared_mlp", "embed", init=residual_normal(0.02), when=lambda cfg: cfg.shared > 0
    )

    heads = llama.Block.heads

    def rest(self, cfg: Any, x: Array, mixed: Array, how: Execution, segments: Array | None = None) -> Array:
        """What follows once the values are mixed: output projection and experts, each added to the stream."""
        x = x + project(self.w_o, mixed, "bsnh,nhd->bsd")
        h = rms_norm(x, self.mlp_norm, cfg.norm_eps)
        choice = route(
            project(self.router, h.astype(jnp.float32), "bsd,de->bse"),
            self.bias,
            None if segments is None else segments > 0,
            top_k=cfg.top_k,
            scores=cfg.scores,
            normalise=cfg.normalise,
            scale=cfg.scale,
            balance=cfg.balance_rate if cfg.balance == "loss" else 0.0,
        )
        own = self.experts
        matrices = Matrices(own.w_gate, own.w_up, own.w_down)
        out = mix(cfg.activation, h, choice, matrices, gather_again=how.remat == "none")
        if self.shared_gate is not None:
            once = prepared(self.shared_gate, h)
            gate, up = (project(w, once, "bsd,df->bsf") for w in (self.shared_gate, self.shared_up))
            merges = how.merges(cfg.routed_layers)
            out = out + gated(cfg.activation, gate, up, self.shared_down, merges=merges)
        return constrain(x + out, "batch", "sequence", None)


@module
class Model:
    embedding: Array = weight("vocab", "embed")
    dense: llama.Block | None = stack(llama.Block, "dense", when=lambda cfg: cfg.dense > 0)
    blocks: Block = stack(Block, "routed_layers")
    final_norm: Array = weight("embed", init=ones)
    head: Array = weight("vocab", "embed", init=normal(0.02))

    unembed = llama.Model.unembed
    cache = llama.Model.cache

    def __call__(
        self,
        cfg: Any,
        tokens: Array,
        *,
        how: Execution,
        segments: Array | None = None,
        positions: Array | None = None,
    ) -> Array:
        """The last hidden states [b s d]; `unembed` turns them into logits."""
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

        def mixed(block: Any, x: Array) -> Array:
            q, k, v = block.heads(cfg, x, positions)
            return attend(how.attention, q, k, v, mask=Mask(causal=True), segments=segments)

        x = constrain(lookup(self.embedding, tokens, how.dtype), "batch", "sequence", None)
        if self.dense is not None:
            x = layers(how, lambda block, x: block.rest(cfg, x, mixed(block, x), how), x, self.dense)
        routed = lambda block, x: block.rest(cfg, x, mixed(block, x), how, segments)
        return rms_norm(layers(how, routed, x, self.blocks), self.final_norm, cfg.norm_eps)

    def decode(
        self, cfg: Any, tokens: Array, cache: llama.Cache, *, how: Execution
    ) -> tuple[Array, llama.Cache]:
        """The hidden states of the next tokens [b s d] after those in the cache, and the cache with them."""
        start = cache.length
        positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)

        def body(x: Array, layer: tuple[Any, tuple[Array, Array]]) -> tuple[Array, tuple[Array, Array]]:
            block, (keys, values) = layer
            q, k, v = block.heads(cfg, x, positions)
            keys = jax.lax.dynamic_update_slice_in_dim(keys, k, start, axis=1)
            values = jax.lax.dynamic_update_slice_in_dim(values, v, start, axis=1)
            mixed = attend(how.attention, q, keys, values, mask=Mask(causal=True), offset=start)
            return block.rest(cfg, x, mixed, how), (keys, values)

        x, kept = lookup(self.embedding, tokens, how.dtype), []
        for blocks, part in ((self.dense, slice(cfg.dense)), (self.blocks, slice(cfg.dense, None))):
            if blocks is not None:
                x, pair = cached_layers(how, [body], x, blocks, (cache.k[part], cache.v[part]))
                kept.append(pair)
        keys, values = (jnp.concatenate(parts) for parts in zip(*kept, strict=True))
        hidden = rms_norm(x, self.final_norm, cfg.norm_eps)
        return hidden, llama.Cache(keys, values, start + tokens.shape[1])


def flops(cfg: Any, sequence: int) -> float:
    """Forward and backward FLOPs a token: 6 a weight that multiplies it, those of other experts not."""
    multiplied = count(Model, cfg) - cfg.vocab * cfg.embed
    idle = cfg.routed_layers * (cfg.experts - cfg.top_k) * 3 * cfg.embed * cfg.expert_mlp
    return 6 * (multiplied - idle) + 6 * cfg.layers * cfg.heads * cfg.head_dim * sequence


HF_TYPES = ("mixtral", "qwen3_moe", "glm4_moe")
ATTENTION = ("attn_norm", "w_q", "w_k", "w_v", "w_o", "q_norm", "k_norm", "mlp_norm")


def HF(cfg: Any) -> dict[str, tuple[str, str]]:
    """Our weight -> their tensor and axes. Layers count from the first with experts; {} after the layer's is
    the expert."""
    mixtral = kind_of(cfg) == "mixtral"
    layer = f"model.layers.{{+{cfg.dense}}}."
    inside = layer + ("block_sparse_moe." if mixtral else "mlp.")
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    moved = {f"blocks.{name}": llama.HF[f"blocks.{name}"] for name in ATTENTION}
    dense = {
        name.replace("blocks", "dense"): its for name, its in llama.HF.items() if name.startswith("blocks.")
    }
    return (
        {name: its for name, its in llama.HF.items() if not name.startswith("blocks.")}
        | dense
        | {name: (theirs.replace("model.layers.{}.", layer), axes) for name, (theirs, axes) in moved.items()}
        | {
            "blocks.router": (f"{inside}gate.weight", "e d -> d e"),
            "blocks.bias": (f"{inside}gate.e_score_correction_bias", "e -> e"),
            "blocks.experts.w_gate": (f"{inside}experts.{{}}.{gate}.weight", "f d -> d f"),
            "blocks.experts.w_up": (f"{inside}experts.{{}}.{up}.weight", "f d -> d f"),
            "blocks.experts.w_down": (f"{inside}experts.{{}}.{down}.weight", "d f -> f d"),
            "blocks.shared_gate": (f"{inside}shared_experts.gate_proj.weight", "f d -> d f"),
            "blocks.shared_up": (f"{inside}shared_experts.up_proj.weight", "f d -> d f"),
            "blocks.shared_down": (f"{inside}shared_experts.down_proj.weight", "d f -> f d"),
        }
    )


def kind_of(cfg: Any) -> str:
    """Which of transformers' models it is, as far as there is one."""
    if cfg.scores == "sigmoid":
        return "glm4_moe"
    return "qwen3_moe" if cfg.qk_norm else "mixtral"


def to_hf(cfg: Any, sequence: int) -> dict[str, Any]:
    """config.json. GLM-4 MoE is the model of transformers that has DeepSeek-V3's experts with plain
    attention."""
    kind = kind_of(cfg)
    name = {"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe", "glm4_moe": "Glm4Moe"}[kind]
    wanted = {"shared": 0, "scale": 1.0} if kind != "glm4_moe" else {}
    if kind == "glm4_moe" and not cfg.shared:
        raise UserError("model.shared: transformers loads no model of sigmoid scores without a shared expert")
    if kind == "mixtral":
        wanted |= {"normalise": True, "dense": 0}
    for key, only in wanted.items():
        if getattr(cfg, key) != only:
            raise UserError(
                f"model.{key}: found {getattr(cfg, key)}, and transformers' {name} has only {only}; sigmoid "
                "scores, or qk_norm, make it another model there"
            )
    has_bias = cfg.balance == "bias"
    if has_bias != (kind == "glm4_moe"):
        expected = "bias" if kind == "glm4_moe" else "loss or none"
        raise UserError(f"model.balance: expected {expected}, since transformers' {name} has no other")
    settings = config_json.write(cfg, sequence) | {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": kind,
        "num_experts_per_tok": cfg.top_k,
    }
    if kind == "mixtral":
        own: dict[str, Any] = {"num_local_experts": cfg.experts}
    else:
        own = {"moe_intermediate_size": cfg.expert_mlp, "norm_topk_prob": cfg.normalise}
    if kind == "qwen3_moe":
        own |= {"num_experts": cfg.experts, "mlp_only_layers": [*range(cfg.dense)], "decoder_sparse_step": 1}
    if kind == "glm4_moe":
        own |= {
            "n_routed_experts": cfg.experts,
            "n_shared_experts": cfg.shared,
            "routed_scaling_factor": cfg.scale,
            "first_k_dense_replace": cfg.dense,
            "use_qk_norm": cfg.qk_norm,
            "n_group": 1,
            "topk_group": 1,
            "partial_rotary_factor": 1.0,
            "num_nextn_predict_layers": 0,
        }
        settings["rope_parameters"] |= {"partial_rotary_factor": 1.0}
    elif cfg.balance == "loss":
        own |= {"router_aux_loss_coef": cfg.balance_rate}
    return settings | own


def from_hf(settings: dict[str, Any]) -> dict[str, Any]:
    """The recipe's model section for a config.json."""
    kind, whole, number = settings["model_type"], config_json.whole, config_json.number
    own: dict[str, Any] = {"top_k": whole(settings, "num_experts_per_tok"), "balance": "none"}
    rate = number(settings, "router_aux_loss_coef", 0.0)
    if kind != "glm4_moe" and rate > 0:
        own |= {"balance": "loss", "balance_rate": rate}
    if kind == "mixtral":
        own |= {"experts": whole(settings, "num_local_experts")}
        if settings.get("sliding_window"):
            raise UserError("config.json: sliding_window: layers with a window cannot be imported")
        return {"use": "moe"} | config_json.read(settings, Config, **own)
    own |= {"normalise": config_json.truth(settings, "norm_topk_prob")}
    if kind == "qwen3_moe":
        named = "num_experts" if "num_experts" in settings else "num_local_experts"
        plain = settings.get("mlp_only_layers") or []
        if plain != [*range(len(plain))] or whole(settings, "decoder_sparse_step", 1) != 1:
            raise UserError("config.json: mlp_only_layers: only the first layers can be without experts")
        own |= {"experts": whole(settings, named), "dense": len(plain), "qk_norm": True}
    else:
        if (settings.get("n_group") or 1) != 1:
            raise UserError("config.json: n_group: only experts in one group can be imported")
        named = "n_routed_experts" if "n_routed_experts" in settings else "num_local_experts"
        own |= {
            "scores": "sigmoid",
            "balance": "bias",
            "experts": whole(settings, named),
            "shared": whole(settings, "n_shared_experts"),
            "scale": number(settings, "routed_scaling_factor", 1.0),
            "dense": settings.get("first_k_dense_replace") or 0,
            "qk_norm": config_json.truth(settings, "use_qk_norm"),
        }
    width = whole(settings, "moe_intermediate_size")
    own |= {"expert_mlp": width} if own["dense"] else {"mlp": width}
    return {"use": "moe"} | config_json.read(settings, Config, **own)
