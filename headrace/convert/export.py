"""Export of a run: to a folder for transformers or peft, or to a .gguf file for llama.cpp.

Importing this module does not import JAX, so that mistakes in options are reported at once."""

from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import InvalidArgument

if TYPE_CHECKING:
    from headrace.checkpoint.open_run import LoadedRun


DTYPES = ("float32", "bfloat16", "float16", "q8_0", "q4_0")


def check_export(target: str, dtype: str, *, packed: bool, adapter: bool) -> None:
    """Raise InvalidArgument for options of an export that do not exist or do not go together."""
    if dtype not in DTYPES:
        raise InvalidArgument("dtype", f"found {dtype}, expected one of {', '.join(DTYPES)}")
    is_file = target.endswith(".gguf")
    if dtype.startswith("q") and not is_file:
        raise InvalidArgument("dtype", f"found {dtype}, which only .gguf files have; see `headrace quantize`")
    if packed and is_file:
        raise InvalidArgument("packed", "expected a folder as target: .gguf files have no packed weights")
    if adapter and (packed or is_file or dtype != "float32"):
        raise InvalidArgument("adapter", "expected a folder as target, and the weights in float32")


def export_run(run: "LoadedRun", target: str, dtype: str, *, packed: bool, adapter: bool) -> list[Path]:
    """Write a run in the format of `target`, which is a .gguf file or a folder. Returns the files."""
    check_export(target, dtype, packed=packed, adapter=adapter)
    from headrace.convert import gguf, peft, to_huggingface

    if target.endswith(".gguf"):
        return [gguf.export(run, target, dtype)]
    if adapter:
        return peft.export(run, target)
    return to_huggingface.export(run, target, dtype, packed=packed)
