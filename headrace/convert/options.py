"""Options of `export`, checked without JAX: mistakes are reported before it is imported."""

from headrace.errors import InvalidArgument


def check_export(target: str, dtype: str, *, packed: bool, adapter: bool) -> None:
    """Raise InvalidArgument for options of an export that do not go together."""
    is_file = target.endswith(".gguf")
    if dtype.startswith("q") and not is_file:
        raise InvalidArgument("dtype", f"found {dtype}, which only .gguf files have; see `headrace quantize`")
    if packed and is_file:
        raise InvalidArgument("packed", "expected a folder as target: .gguf files have no packed weights")
    if adapter and (packed or is_file or dtype != "float32"):
        raise InvalidArgument("adapter", "expected a folder as target, and the weights in float32")
