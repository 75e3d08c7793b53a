"""xLSTM in transformers: names of tensors, and settings that have only one value here."""

from typing import Any

from headrace.errors import UserError
from headrace.model_formats.hf_config import HFSettings
from headrace.nn.mlstm import EPS

# Weight -> (Hugging Face tensor, with {} for the layer; its axes -> ours, as in einops).
LAYER = "backbone.blocks.{}."
HF_TENSORS = {
    "embedding": ("backbone.embeddings.weight", "v d -> v d"),
    "blocks.mixer_norm": (LAYER + "norm_mlstm.weight", "d -> d"),
    "blocks.w_q": (LAYER + "mlstm_layer.q.weight", "(n a) d -> d n a"),
    "blocks.w_k": (LAYER + "mlstm_layer.k.weight", "(n a) d -> d n a"),
    "blocks.w_v": (LAYER + "mlstm_layer.v.weight", "(n h) d -> d n h"),
    "blocks.w_out_gate": (LAYER + "mlstm_layer.ogate_preact.weight", "(n h) d -> d n h"),
    "blocks.w_input": (LAYER + "mlstm_layer.igate_preact.weight", "n d -> d n"),
    "blocks.b_input": (LAYER + "mlstm_layer.igate_preact.bias", "n -> n"),
    "blocks.w_forget": (LAYER + "mlstm_layer.fgate_preact.weight", "n d -> d n"),
    "blocks.b_forget": (LAYER + "mlstm_layer.fgate_preact.bias", "n -> n"),
    "blocks.head_norm": (LAYER + "mlstm_layer.multihead_norm.weight", "(n h) -> n h"),
    "blocks.w_o": (LAYER + "mlstm_layer.out_proj.weight", "d (n h) -> n h d"),
    "blocks.mlp_norm": (LAYER + "norm_ffn.weight", "d -> d"),
    "blocks.w_gate": (LAYER + "ffn.proj_up_gate.weight", "f d -> d f"),
    "blocks.w_up": (LAYER + "ffn.proj_up.weight", "f d -> d f"),
    "blocks.w_down": (LAYER + "ffn.proj_down.weight", "d f -> f d"),
    "final_norm": ("backbone.out_norm.weight", "d -> d"),
    "head": ("lm_head.weight", "v d -> v d"),
}

# The only values of these settings that can be imported.
REQUIRED: dict[str, Any] = {
    "use_bias": False,
    "add_out_norm": True,
    "tie_word_embeddings": False,
    "v_dim_factor": 1.0,
    "weight_mode": "single",
    "eps": EPS,
}


def check_settings(settings: HFSettings) -> None:
    """Check that a config.json is of the kind of xLSTM that can be imported. Raises UserError otherwise."""
    for name, value in REQUIRED.items():
        if settings.get(name, value) != value:
            raise UserError(f"config.json: {name}: found {settings[name]}, only {value} can be imported")


def cache_settings(embed: int, key_width: int) -> HFSettings:
    """Settings that avoid the cache of transformers (5.22) where it is broken.

    It rounds widths up to a multiple of 64 and the layers do not, so with other widths every call with a
    cache fails: all calls by default, and those of more than 16,384 tokens."""
    if embed % 64 == 0 and key_width % 64 == 0:
        return {"use_cache": True}
    return {"use_cache": False, "max_inference_chunksize": 2**31 - 1}
