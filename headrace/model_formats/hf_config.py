"""config.json, Hugging Face's account of a model, in terms of our own settings: the sizes and rotary
positions that families share. What is a family's own (its names, its extras) stands in its model file."""

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

from headrace.errors import UserError

HFSettings = dict[str, Any]  # the settings of a config.json

ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh", "reglu": "relu", "relu2": "relu2"}

# What else config.json may say about a kind of scaling, and the only values we have of it.
BOUNDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"beta_fast": 32, "beta_slow": 1, "truncate": True},
}


def write(cfg: Any, sequence: int) -> dict[str, Any]:
    """Their settings for a model section of ours that was trained on `sequence` tokens at a time."""
    scaled = cfg.rope_scaling in ("yarn", "llama3")
    length = max(sequence, round(cfg.rope_factor * cfg.rope_original_length)) if scaled else sequence
    return {
        "vocab_size": cfg.vocab,
        "hidden_size": cfg.embed,
        "intermediate_size": cfg.mlp,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": ACTIVATIONS[cfg.activation],
        "max_position_embeddings": length,
        "rms_norm_eps": cfg.norm_eps,
        "tie_word_embeddings": cfg.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
    } | write_rope(cfg)


def write_rope(cfg: Any) -> dict[str, Any]:
    """In both spellings: transformers 5 wants `rope_parameters`; what was made for 4 reads the other two, and
    would otherwise take the positions for unscaled ones of base 10,000."""
    kind, theta = cfg.rope_scaling, cfg.rope_theta
    if kind == "ntk":  # a larger base, which is all that it is
        kind, theta = "none", theta * cfg.rope_factor ** (cfg.head_dim / (cfg.head_dim - 2))
    if kind == "none":
        default = {"rope_type": "default", "rope_theta": theta}
        return {"rope_theta": theta, "rope_scaling": None, "rope_parameters": default}
    scaling = {"rope_type": kind, "factor": cfg.rope_factor}
    if kind != "linear":
        scaling["original_max_position_embeddings"] = cfg.rope_original_length
    if kind == "llama3":
        scaling |= BOUNDS[kind]
    both = {"rope_scaling": scaling, "rope_parameters": scaling | {"rope_theta": theta}}
    return {"rope_theta": theta} | both


def read(settings: dict[str, Any], config: type, **own: Any) -> dict[str, Any]:
    """The recipe's model section for their settings and the family's `own` keys. `config` is the family's
    Config; UserError where the settings say what it cannot be."""
    heads, embed = get_int(settings, "num_attention_heads"), get_int(settings, "hidden_size")
    found = {
        "vocab": get_int(settings, "vocab_size"),
        "layers": get_int(settings, "num_hidden_layers"),
        "embed": embed,
        "heads": heads,
        "kv_heads": get_int(settings, "num_key_value_heads", heads),
        "head_dim": get_int(settings, "head_dim", embed // heads),
        "mlp": get_int(settings, "intermediate_size"),
        "norm_eps": number(settings, "rms_norm_eps", 1e-6),
        "activation": read_activation(settings),
        "tie_embeddings": get_bool(settings, "tie_word_embeddings"),
    }
    return section(found | read_rope(settings) | own, settings, config)


def section(found: dict[str, Any], settings: dict[str, Any], config: type) -> dict[str, Any]:
    """Of all that was found, what the family's Config takes; the rest must be as it has it."""
    refuse_extras(settings)
    keys = {field.name for field in dataclasses.fields(config)}
    taken = {key: value for key, value in found.items() if key in keys}
    try:
        cfg = config(**taken)
    except ValueError as error:
        raise UserError(f"config.json: these sizes cannot be imported: {error}") from None
    for key, value in found.items():
        fixed = getattr(cfg, key)
        if fixed != value:
            raise UserError(
                f"config.json: {settings['model_type']} with {key} {value}: only {fixed} can be imported"
            )
    return taken


def read_activation(settings: dict[str, Any]) -> str:
    by_name = {theirs: ours for ours, theirs in ACTIVATIONS.items()}
    name = require(settings, "hidden_act")
    if not isinstance(name, str) or name not in by_name:
        raise UserError(
            f"config.json: hidden_act: found {short_value(name)}, expected one of {', '.join(by_name)}"
        )
    return by_name[name]


def read_rope(settings: dict[str, Any]) -> dict[str, Any]:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (4)."""
    rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise UserError(f"config.json: rope_scaling: found {short_value(rope)}, expected values in braces")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = number(rope, "rope_theta", number(settings, "rope_theta", 10_000.0))
    out: dict[str, Any] = {"rope_theta": theta}
    if not isinstance(kind, str) or kind not in BOUNDS:
        raise UserError(
            f"config.json: rope_type: found {short_value(kind)}, expected one of {', '.join(BOUNDS)}"
        )
    known = {"rope_type": ..., "type": ..., "rope_theta": ..., "partial_rotary_factor": 1.0} | BOUNDS[kind]
    if kind != "default":
        factor = number(rope, "factor")
        out |= {"rope_scaling": kind, "rope_factor": factor}
        known |= {"factor": ..., "original_max_position_embeddings": ...}
        if kind != "linear":  # which is the same whatever the context was
            name = "original_max_position_embeddings"
            length = rope.get(name) or require(settings, "max_position_embeddings")
            out["rope_original_length"] = get_int({name: length}, name)
        if kind == "yarn":
            known["attention_factor"] = 0.1 * math.log(max(factor, 1.0)) + 1.0
    for name, value in rope.items():
        usual = known.get(name)
        if usual is not ... and value is not None and value != usual:
            said = f"only {usual}" if name in known else f"no {kind} scaling with it"
            raise UserError(f"config.json: rope: {name}: found {short_value(value)}, {said} can be imported")
    return out


KINDS = {True: "full_attention", False: "sliding_attention"}  # of layers: those that see the whole text?


def write_kinds(cfg: Any, sees_all: Callable[[int, int], bool]) -> dict[str, Any]:
    """Which layers see the whole text, and which a window: `sees_all(layer, every)` is the family's order."""
    return {"layer_types": [KINDS[sees_all(layer, cfg.global_every)] for layer in range(cfg.layers)]}


def read_kinds(settings: dict[str, Any], usual: int, sees_all: Callable[[int, int], bool]) -> int:
    """Our `global_every`. `usual` is what it is where nothing is said."""
    kinds, layers = settings.get("layer_types"), get_int(settings, "num_hidden_layers")
    if kinds is None:
        return usual
    is_complete = isinstance(kinds, list) and len(kinds) == layers
    for every in (usual, *range(1, layers + 2)) if is_complete else ():
        if kinds == [KINDS[sees_all(layer, every)] for layer in range(layers)]:
            return every
    raise UserError(
        f"config.json: layer_types: found {short_value(kinds)}, expected {KINDS[True]} at every n-th layer"
    )


def write_two_ropes(cfg: Any) -> dict[str, Any]:
    """Positions where the layers with a window have a base of their own."""
    whole_text, local = write_rope(cfg), {"rope_type": "default", "rope_theta": cfg.rope_local_theta}
    both = {KINDS[True]: whole_text["rope_parameters"], KINDS[False]: local}
    return whole_text | {"rope_parameters": both}


def read_two_ropes(settings: dict[str, Any], **usual: float) -> tuple[dict[str, Any], float]:
    """The settings with the positions of layers that see the whole text alone, and the base of the others.
    `usual` has the names that transformers 4 gives to both bases, and what they are where nothing is said."""
    bases = [{"rope_theta": number(settings, name, value)} for name, value in usual.items()]
    both = settings.get("rope_parameters")
    nested = isinstance(both, dict) and bool({*KINDS.values()} & both.keys())
    found = both if nested else {KINDS[True]: settings.get("rope_scaling") or both}
    ropes = [(found or {}).get(KINDS[sees_all]) or {} for sees_all in (True, False)]
    if not all(isinstance(rope, dict) for rope in ropes):
        raise UserError(f"config.json: rope_parameters: found {short_value(both)}, expected values in braces")
    far, near = (base | rope for base, rope in zip(bases, ropes, strict=True))
    local = read_rope({"rope_parameters": near})
    if "rope_scaling" in local:
        raise UserError("config.json: rope_parameters: stretched positions in windows cannot be imported")
    rest = {name: value for name, value in settings.items() if name != "rope_scaling"}
    return rest | {"rope_parameters": far}, local["rope_theta"]


def refuse_extras(settings: dict[str, Any]) -> None:
    """Settings that change what a model computes, and of which our models have only the usual value."""
    for name in ("attention_bias", "mlp_bias"):
        if get_bool(settings, name):
            raise UserError(f"config.json: {name}: found true, but weights with biases cannot be imported")
    windows = "sliding_attention" in str(settings.get("layer_types"))
    if windows or settings.get("use_sliding_window"):
        raise UserError("config.json: layers with a sliding window, which cannot be imported")
    if settings.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UserError("config.json: partial_rotary_factor: only 1.0 can be imported")
    if settings.get("quantization_config"):
        raise UserError("config.json: quantization_config: quantised weights cannot be imported")


def require(settings: dict[str, Any], name: str) -> Any:
    if settings.get(name) is None:
        raise UserError(f"config.json: {name}: found nothing, and there is no model without it")
    return settings[name]


def get_int(settings: dict[str, Any], name: str, usual: int | None = None) -> int:
    """A size. Null, and the 0 that some write for it, mean the usual where there is one."""
    if usual is not None and settings.get(name) in (None, 0):
        return usual
    value = require(settings, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(
            f"config.json: {name}: found {short_value(value)}, expected a whole number of 1 or more"
        )
    return value


def number(settings: dict[str, Any], name: str, usual: float | None = None) -> float:
    if usual is not None and settings.get(name) is None:
        return usual
    value = require(settings, name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise UserError(f"config.json: {name}: found {short_value(value)}, expected a number")
    return float(value)


def get_bool(settings: dict[str, Any], name: str) -> bool:
    value = settings.get(name)
    if not isinstance(value, bool | None):
        raise UserError(f"config.json: {name}: found {short_value(value)}, expected true or false")
    return bool(value)


def short_value(value: Any) -> str:
    """As it stands in the file, in few characters."""
    return json.dumps(value)[:60]
