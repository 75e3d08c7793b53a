"""The method by which a run is quantized, chosen without JAX: mistakes are reported before it is imported."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.config.recipe import load_method
from headrace.config.sections import TrainRecipe
from headrace.errors import UserError

if TYPE_CHECKING:
    from headrace.quantize.methods import MethodConfig

DEFAULT_METHOD = "gptq"


def choose_method(
    recipe: TrainRecipe, method: str | None, bits: int | None, settings: Sequence[str]
) -> "MethodConfig":
    """Read the settings of the method that quantizes a run: `method`, GPTQ by default, with further settings
    as `key=value`. A run that was trained with `qat` allows no choice."""
    qat = recipe.qat
    if qat is None:
        bits_setting = [] if bits is None else [f"bits={bits}"]
        return load_method(method or DEFAULT_METHOD, [*bits_setting, *settings])
    if method or bits or settings:
        raise UserError(
            f"quantize: found a method, bits or settings, expected none: {recipe.run_dir} was trained for "
            f"{qat.bits} bits (qat.bits)"
        )
    # Training has rounded the weights to the numbers that are stored: no method can improve on that.
    return load_method("rtn", [f"bits={qat.bits}", f"group_size={qat.group_size}"])


def default_target(recipe: TrainRecipe, method: "MethodConfig") -> str:
    """The folder for a quantized run if none is named: RUN-METHOD-BITS, next to the run."""
    name = method.use if recipe.qat is None else "qat"
    return f"{recipe.run_dir.rstrip('/')}-{name}-{method.bits}"
