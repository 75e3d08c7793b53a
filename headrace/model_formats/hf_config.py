"""Translation between Hugging Face's config.json and the `model` section of a recipe.

Here are the sizes and rotary positions that families share. What only one family has stands in its file."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from headrace.errors import UserError

HFSettings = dict[str, Any]  # the settings of a config.json
KeyDefault = tuple[str, float]  # a key of config.json, and its default
IsGlobal = Callable[[int, int], bool]  # (layer, global_every) -> whether the layer has no window

ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh", "reglu": "relu", "relu2": "relu2"}

# The kinds of rope scaling, with further settings that config.json may have, and their only supported values.
ROPE_SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"beta_fast": 32, "beta_slow": 1, "truncate": True},
}

LAYER_TYPES = {True: "full_attention", False: "sliding_attention"}  # of layers without and with a window


class RopeConfig(Protocol):
    """The keys of a model's config about rotary positions."""

    @property
    def head_dim(self) -> int: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def rope_scaling(self) -> str: ...
    @property
    def rope_factor(self) -> float: ...
    @property
    def rope_original_length(self) -> int: ...


class LocalRopeConfig(RopeConfig, Protocol):
    """The same for models whose layers with a window have a base of their own."""

    @property
    def rope_local_theta(self) -> float: ...


class WindowConfig(Protocol):
    """The keys of a model's config about the order of layers with and without a window."""

    @property
    def layers(self) -> int: ...
    @property
    def global_every(self) -> int: ...


class DecoderKeys(RopeConfig, Protocol):
    """The keys of a model's config that decoders share."""

    @property
    def vocab(self) -> int: ...
    @property
    def embed(self) -> int: ...
    @property
    def mlp(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def activation(self) -> str: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def tie_embeddings(self) -> bool: ...


def decoder_settings(cfg: DecoderKeys, sequence_length: int) -> HFSettings:
    """The settings of config.json that decoders share, for a model trained on rows of `sequence_length`."""
    is_scaled = cfg.rope_scaling in ("yarn", "llama3")
    scaled_length = round(cfg.rope_factor * cfg.rope_original_length) if is_scaled else 0
    return {
        "vocab_size": cfg.vocab,
        "hidden_size": cfg.embed,
        "intermediate_size": cfg.mlp,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": ACTIVATIONS[cfg.activation],
        "max_position_embeddings": max(sequence_length, scaled_length),
        "rms_norm_eps": cfg.norm_eps,
        "tie_word_embeddings": cfg.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
    } | rope_settings(cfg)


def rope_settings(cfg: RopeConfig) -> HFSettings:
    """The settings of config.json about rotary positions, in two spellings.

    transformers 5 reads `rope_parameters`. What was made for transformers 4 reads the other two, and would
    otherwise assume unscaled positions with base 10,000."""
    kind, theta = cfg.rope_scaling, cfg.rope_theta
    if kind == "ntk":  # no more than a larger base
        kind, theta = "none", theta * cfg.rope_factor ** (cfg.head_dim / (cfg.head_dim - 2))
    if kind == "none":
        default = {"rope_type": "default", "rope_theta": theta}
        return {"rope_theta": theta, "rope_scaling": None, "rope_parameters": default}
    scaling: HFSettings = {"rope_type": kind, "factor": cfg.rope_factor}
    if kind != "linear":
        scaling["original_max_position_embeddings"] = cfg.rope_original_length
    if kind == "llama3":
        scaling |= ROPE_SCALINGS[kind]
    return {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_parameters": scaling | {"rope_theta": theta},
    }


def decoder_keys(settings: HFSettings, config_class: type, **family_keys: object) -> dict[str, Any]:
    """Translate config.json to the keys of a recipe's `model` section that decoders share.

    `family_keys` are added. Raises UserError if the family's `config_class` cannot represent the model."""
    heads, embed = get_int(settings, "num_attention_heads"), get_int(settings, "hidden_size")
    keys = {
        "vocab": get_int(settings, "vocab_size"),
        "layers": get_int(settings, "num_hidden_layers"),
        "embed": embed,
        "heads": heads,
        "kv_heads": get_int(settings, "num_key_value_heads", heads),
        "head_dim": get_int(settings, "head_dim", embed // heads),
        "mlp": get_int(settings, "intermediate_size"),
        "norm_eps": get_float(settings, "rms_norm_eps", 1e-6),
        "activation": read_activation(settings),
        "tie_embeddings": get_bool(settings, "tie_word_embeddings"),
    }
    return select_config_keys(keys | rope_keys(settings) | family_keys, settings, config_class)


def select_config_keys(
    keys: Mapping[str, object], settings: HFSettings, config_class: type[Any]
) -> dict[str, Any]:
    """Select the keys that are fields of a family's config. The others must have the values that it fixes.

    Raises UserError if they have not, or if config.json has settings that no family supports."""
    refuse_unsupported(settings)
    fields = {field.name for field in dataclasses.fields(config_class)}
    selected = {key: value for key, value in keys.items() if key in fields}
    try:
        cfg = config_class(**selected)
    except ValueError as error:
        raise UserError(f"config.json: these sizes cannot be imported: {error}") from None
    for key, value in keys.items():
        fixed = getattr(cfg, key)
        if fixed != value:
            raise UserError(
                f"config.json: {settings['model_type']} with {key} {value}: only {fixed} can be imported"
            )
    return selected


def read_activation(settings: HFSettings) -> str:
    """Translate `hidden_act` to `model.activation`. Raises UserError for an unknown one."""
    by_hf_name = {hf_name: name for name, hf_name in ACTIVATIONS.items()}
    hf_name = require(settings, "hidden_act")
    if not isinstance(hf_name, str) or hf_name not in by_hf_name:
        raise UserError(
            f"config.json: hidden_act: found {short_value(hf_name)}, expected one of {', '.join(by_hf_name)}"
        )
    return by_hf_name[hf_name]


def rope_keys(settings: HFSettings) -> dict[str, Any]:
    """Translate rotary positions to keys of the `model` section.

    Reads `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4). Raises UserError for
    kinds of scaling that cannot be imported."""
    rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise UserError(f"config.json: rope_scaling: found {short_value(rope)}, expected values in braces")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = get_float(rope, "rope_theta", get_float(settings, "rope_theta", 10_000.0))
    keys: dict[str, Any] = {"rope_theta": theta}
    if not isinstance(kind, str) or kind not in ROPE_SCALINGS:
        raise UserError(
            f"config.json: rope_type: found {short_value(kind)}, expected one of {', '.join(ROPE_SCALINGS)}"
        )
    # The only supported value of each setting; ... for any.
    supported = {"rope_type": ..., "type": ..., "rope_theta": ..., "partial_rotary_factor": 1.0}
    supported |= ROPE_SCALINGS[kind]
    if kind != "default":
        factor = get_float(rope, "factor")
        keys |= {"rope_scaling": kind, "rope_factor": factor}
        supported |= {"factor": ..., "original_max_position_embeddings": ...}
        if kind != "linear":  # which does not depend on the original length
            name = "original_max_position_embeddings"
            length = rope.get(name) or require(settings, "max_position_embeddings")
            keys["rope_original_length"] = get_int({name: length}, name)
        if kind == "yarn":
            supported["attention_factor"] = 0.1 * math.log(max(factor, 1.0)) + 1.0
    _check_rope(rope, kind, supported)
    return keys


def _check_rope(rope: HFSettings, kind: str, supported: Mapping[str, object]) -> None:
    for name, value in rope.items():
        expected = supported.get(name)
        if expected is not ... and value is not None and value != expected:
            limit = f"only {expected}" if name in supported else f"no {kind} scaling with it"
            raise UserError(f"config.json: rope: {name}: found {short_value(value)}, {limit} can be imported")


def layer_type_settings(cfg: WindowConfig, is_global: IsGlobal) -> HFSettings:
    """The setting of config.json that lists which layers have a window."""
    return {"layer_types": [LAYER_TYPES[is_global(layer, cfg.global_every)] for layer in range(cfg.layers)]}


def read_global_every(settings: HFSettings, default: int, is_global: IsGlobal) -> int:
    """Translate `layer_types` to `model.global_every`; `default` if config.json does not list them.

    Raises UserError for an order of layers that no value of `global_every` describes."""
    layer_types, layers = settings.get("layer_types"), get_int(settings, "num_hidden_layers")
    if layer_types is None:
        return default
    is_complete = isinstance(layer_types, list) and len(layer_types) == layers
    for every in (default, *range(1, layers + 2)) if is_complete else ():
        if layer_types == [LAYER_TYPES[is_global(layer, every)] for layer in range(layers)]:
            return every
    raise UserError(
        f"config.json: layer_types: found {short_value(layer_types)}, expected {LAYER_TYPES[True]} at every "
        "n-th layer"
    )


def two_rope_settings(cfg: LocalRopeConfig) -> HFSettings:
    """The settings about rotary positions of a model whose layers with a window have a base of their own."""
    settings, local = rope_settings(cfg), {"rope_type": "default", "rope_theta": cfg.rope_local_theta}
    by_layer_type = {LAYER_TYPES[True]: settings["rope_parameters"], LAYER_TYPES[False]: local}
    return settings | {"rope_parameters": by_layer_type}


def split_local_rope(
    settings: HFSettings, global_theta: KeyDefault, local_theta: KeyDefault
) -> tuple[HFSettings, float]:
    """Split off the rotary positions of layers with a window.

    Returns the settings with only the positions of the other layers, and the base of those with a window.
    `global_theta` and `local_theta` are transformers 4's names of both bases, and their defaults."""
    bases = [{"rope_theta": get_float(settings, name, value)} for name, value in (global_theta, local_theta)]
    parameters = settings.get("rope_parameters")
    is_nested = isinstance(parameters, dict) and bool({*LAYER_TYPES.values()} & parameters.keys())
    if is_nested:
        by_layer_type = parameters
    else:
        by_layer_type = {LAYER_TYPES[True]: settings.get("rope_scaling") or parameters}
    ropes = [(by_layer_type or {}).get(LAYER_TYPES[is_global]) or {} for is_global in (True, False)]
    if not all(isinstance(rope, dict) for rope in ropes):
        raise UserError(
            f"config.json: rope_parameters: found {short_value(parameters)}, expected values in braces"
        )
    global_rope, local_rope = (base | rope for base, rope in zip(bases, ropes, strict=True))
    local_keys = rope_keys({"rope_parameters": local_rope})
    if "rope_scaling" in local_keys:
        raise UserError("config.json: rope_parameters: scaled positions in windows cannot be imported")
    remaining = {name: value for name, value in settings.items() if name != "rope_scaling"}
    return remaining | {"rope_parameters": global_rope}, local_keys["rope_theta"]


def refuse_unsupported(settings: HFSettings) -> None:
    """Raise UserError for settings that change what a model computes, and that no family supports."""
    for name in ("attention_bias", "mlp_bias"):
        if get_bool(settings, name):
            raise UserError(f"config.json: {name}: found true, but weights with biases cannot be imported")
    has_windows = LAYER_TYPES[False] in str(settings.get("layer_types"))
    if has_windows or settings.get("use_sliding_window"):
        raise UserError("config.json: layers with a sliding window, which cannot be imported")
    if settings.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UserError("config.json: partial_rotary_factor: only 1.0 can be imported")
    if settings.get("quantization_config"):
        raise UserError("config.json: quantization_config: quantized weights cannot be imported")


def require(settings: HFSettings, name: str) -> Any:
    """Get a setting. Raises UserError if it is absent or null."""
    if settings.get(name) is None:
        raise UserError(f"config.json: {name}: found nothing, and there is no model without it")
    return settings[name]


def get_int(settings: HFSettings, name: str, default: int | None = None) -> int:
    """Get a size of 1 or more. `default`, unless None, replaces null, and 0, which some write for null.

    Raises UserError for other values."""
    if default is not None and settings.get(name) in (None, 0):
        return default
    value = require(settings, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(
            f"config.json: {name}: found {short_value(value)}, expected a whole number of 1 or more"
        )
    return value


def get_float(settings: HFSettings, name: str, default: float | None = None) -> float:
    """Get a finite number. `default`, unless None, replaces null. Raises UserError for other values."""
    if default is not None and settings.get(name) is None:
        return default
    value = require(settings, name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise UserError(f"config.json: {name}: found {short_value(value)}, expected a number")
    return float(value)


def get_bool(settings: HFSettings, name: str) -> bool:
    """Get a boolean; false for null. Raises UserError for other values."""
    value = settings.get(name)
    if not isinstance(value, bool | None):
        raise UserError(f"config.json: {name}: found {short_value(value)}, expected true or false")
    return bool(value)


def short_value(value: object) -> str:
    """Format a value as in the file, in at most 60 characters."""
    return json.dumps(value)[:60]
