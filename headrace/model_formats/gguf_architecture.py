"""What llama.cpp calls a model of ours, and what it wants of its weights: the part of a GGUF file that is a
family's own, so that it stands in the family's file (`to_gguf`)."""

from dataclasses import dataclass, field
from typing import Any

from headrace.errors import UserError


@dataclass(frozen=True)
class Architecture:
    name: str
    interleaved: bool = False  # positions turn neighbours (2i, 2i + 1), and not the pairs (i, i + h/2)
    norm_offset: float = 0.0  # added to the weights of norms, which are around zero here and around one there
    query_factor: float = 1.0  # by which queries are too small there, since its scale of scores is fixed
    head: bool = False  # wants the head as a tensor of its own, even where it is the embedding
    keys: dict[str, Any] = field(default_factory=dict)  # what only this family has, after "NAME."


def refuse_export(key: str, found: Any, name: str, wanted: str) -> None:
    """For what a recipe can say and an architecture of llama.cpp cannot compute."""
    raise UserError(
        f"{key}: found {found}, and llama.cpp's {name} has only {wanted}; export a folder instead"
    )
