"""Mixtures of experts in transformers: recipe keys from the settings of config.json."""

from typing import Any

from headrace.errors import UserError
from headrace.model_formats import hf_config
from headrace.model_formats.hf_config import HFSettings


def qwen_keys(settings: HFSettings) -> dict[str, Any]:
    """The keys of the experts of a Qwen 3 MoE."""
    experts = "num_experts" if "num_experts" in settings else "num_local_experts"
    dense_layers = settings.get("mlp_only_layers") or []
    is_regular = hf_config.get_int(settings, "decoder_sparse_step", 1) == 1
    if dense_layers != [*range(len(dense_layers))] or not is_regular:
        raise UserError("config.json: mlp_only_layers: only the first layers can be without experts")
    return {
        "experts": hf_config.get_int(settings, experts),
        "dense_layers": len(dense_layers),
        "qk_norm": True,
    }


def glm_keys(settings: HFSettings) -> dict[str, Any]:
    """The keys of the experts of a GLM-4 MoE."""
    if (settings.get("n_group") or 1) != 1:
        raise UserError("config.json: n_group: only experts in one group can be imported")
    experts = "n_routed_experts" if "n_routed_experts" in settings else "num_local_experts"
    return {
        "router_activation": "sigmoid",
        "load_balance": "bias",
        "experts": hf_config.get_int(settings, experts),
        "shared_experts": hf_config.get_int(settings, "n_shared_experts"),
        "routed_scale": hf_config.get_float(settings, "routed_scaling_factor", 1.0),
        "dense_layers": settings.get("first_k_dense_replace") or 0,
        "qk_norm": hf_config.get_bool(settings, "use_qk_norm"),
    }
