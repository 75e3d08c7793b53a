"""The part of a GGUF file that depends on the model's family: llama.cpp's architecture, and the form that it
needs weights in. Families declare it in their files (`to_gguf`)."""

from dataclasses import dataclass, field
from typing import NoReturn

from headrace.errors import UserError


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp, and how its weights differ from a family's."""

    name: str  # the value of `general.architecture`
    interleaved: bool = False  # positions rotate neighbors (2i, 2i + 1) instead of the pairs (i, i + h/2)
    norm_offset: float = 0.0  # to add to the weights of norms that are stored around 0
    query_factor: float = 1.0  # to multiply queries by, since llama.cpp's scale of scores is fixed
    head: bool = False  # needs the head as a tensor of its own, even if it equals the embedding
    keys: dict[str, int | float] = field(default_factory=dict)  # further keys of the file, after "NAME."


def refuse_export(key: str, value: object, architecture: str, supported: str) -> NoReturn:
    """Raise UserError for a value of the recipe's `key` that an architecture cannot compute."""
    raise UserError(
        f"{key}: found {value}, and llama.cpp's {architecture} has only {supported}; export a folder instead"
    )
