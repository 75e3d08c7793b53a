"""DeBERTa-V3 in transformers: names of tensors and heads, and settings that have only one value here."""

from typing import Any

from headrace.errors import UserError
from headrace.model_formats import hf_config
from headrace.model_formats.hf_config import HFSettings
from headrace.model_formats.hf_heads import Head, HeadLayout, linear_tensors

# Weight -> (Hugging Face tensor, with {} for the layer; its axes -> ours, as in einops).
LAYER, HEAD, FIND = "deberta.encoder.layer.{}.", "lm_predictions.lm_head.", "mask_predictions."
HF_TENSORS = {
    "embedding": ("deberta.embeddings.word_embeddings.weight", "v d -> v d"),
    "embed_norm": ("deberta.embeddings.LayerNorm.weight", "d -> d"),
    "embed_norm_bias": ("deberta.embeddings.LayerNorm.bias", "d -> d"),
    "distances": ("deberta.encoder.rel_embeddings.weight", "r d -> r d"),
    "distance_norm": ("deberta.encoder.LayerNorm.weight", "d -> d"),
    "distance_norm_bias": ("deberta.encoder.LayerNorm.bias", "d -> d"),
    "blocks.w_q": (LAYER + "attention.self.query_proj.weight", "(n h) d -> d n h"),
    "blocks.b_q": (LAYER + "attention.self.query_proj.bias", "(n h) -> n h"),
    "blocks.w_k": (LAYER + "attention.self.key_proj.weight", "(n h) d -> d n h"),
    "blocks.b_k": (LAYER + "attention.self.key_proj.bias", "(n h) -> n h"),
    "blocks.w_v": (LAYER + "attention.self.value_proj.weight", "(n h) d -> d n h"),
    "blocks.b_v": (LAYER + "attention.self.value_proj.bias", "(n h) -> n h"),
    "blocks.w_o": (LAYER + "attention.output.dense.weight", "d (n h) -> n h d"),
    "blocks.b_o": (LAYER + "attention.output.dense.bias", "d -> d"),
    "blocks.attn_norm": (LAYER + "attention.output.LayerNorm.weight", "d -> d"),
    "blocks.attn_norm_bias": (LAYER + "attention.output.LayerNorm.bias", "d -> d"),
    "blocks.w_up": (LAYER + "intermediate.dense.weight", "f d -> d f"),
    "blocks.b_up": (LAYER + "intermediate.dense.bias", "f -> f"),
    "blocks.w_down": (LAYER + "output.dense.weight", "d f -> f d"),
    "blocks.b_down": (LAYER + "output.dense.bias", "d -> d"),
    "blocks.mlp_norm": (LAYER + "output.LayerNorm.weight", "d -> d"),
    "blocks.mlp_norm_bias": (LAYER + "output.LayerNorm.bias", "d -> d"),
    "places": ("deberta.embeddings.position_embeddings.weight", "p d -> p d"),
    "w_head": (HEAD + "dense.weight", "e d -> d e"),
    "b_head": (HEAD + "dense.bias", "e -> e"),
    "head_norm": (HEAD + "LayerNorm.weight", "d -> d"),
    "head_norm_bias": (HEAD + "LayerNorm.bias", "d -> d"),
    "head_bias": (HEAD + "bias", "v -> v"),
    "find_norm": (FIND + "LayerNorm.weight", "d -> d"),
    "find_norm_bias": (FIND + "LayerNorm.bias", "d -> d"),
    "w_find": (FIND + "dense.weight", "e d -> d e"),
    "b_find": (FIND + "dense.bias", "e -> e"),
    "w_answer": (FIND + "classifier.weight", "a d -> d a"),
    "b_answer": (FIND + "classifier.bias", "a -> a"),
}
# Published files of V3 have the heads of both models with one encoder, and positions that are not used.
UNUSED_POSITIONS = ("deberta.embeddings.position_embeddings.weight", "deberta.embeddings.position_ids")
HF_IGNORED = (HEAD + "*", FIND + "*", "cls.*", "pooler.*", "classifier.*", "qa_outputs.*", *UNUSED_POSITIONS)
HF_LOAD = ", legacy=False"  # or transformers initializes a head instead of loading it
HF_CLASSIFIER = HeadLayout(
    Head(
        "DebertaV2ForSequenceClassification",
        linear_tensors("pool", "pooler.dense") | linear_tensors("classes", "classifier"),
        {"first": ""},
    ),
    Head("DebertaV2ForTokenClassification", linear_tensors("classes", "classifier"), {"each": ""}),
    drops=("places", "w_head", "b_head", "head_norm", "head_norm_bias", "head_bias"),
)

# The only values of these settings that can be imported; DEFAULTS are those of transformers.
REQUIRED: dict[str, Any] = {
    "relative_attention": True,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "type_vocab_size": 0,
    "tie_word_embeddings": True,
}
# Settings of an export that do not depend on the model.
CONSTANT: dict[str, Any] = {
    "model_type": "deberta-v2",
    "pos_att_type": ["p2c", "c2p"],
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pooler_hidden_act": "gelu",
    "legacy": False,
}
DEFAULTS = {"relative_attention": False, "share_att_key": False, "norm_rel_ebd": "none"}
DEFAULTS |= {"position_biased_input": True}


def check_settings(settings: HFSettings) -> None:
    """Check that a config.json is of the kind of DeBERTa that can be imported. Raises UserError otherwise."""
    shown = hf_config.short_value
    for name, value in REQUIRED.items():
        found = settings.get(name, DEFAULTS.get(name, value))
        if found != value:
            raise UserError(f"config.json: {name}: found {shown(found)}, only {shown(value)} can be imported")
    kinds = settings.get("pos_att_type") or []
    if isinstance(kinds, str):
        kinds = kinds.split("|")
    if kinds not in (["c2p", "p2c"], ["p2c", "c2p"]):
        raise UserError(f"config.json: pos_att_type: found {shown(kinds)}, only c2p with p2c can be imported")
    if settings.get("conv_kernel_size"):
        raise UserError("config.json: conv_kernel_size: a model with a convolution cannot be imported")
    activation = settings.get("hidden_act", "gelu")
    if activation not in ("gelu", "silu", "relu", "relu2"):
        raise UserError(
            f"config.json: hidden_act: found {shown(activation)}, expected gelu, silu, relu or relu2"
        )
