"""A run written down for schedulers other than ours: `--to NAME` means the file of that name."""

from dataclasses import dataclass

from headrace.hardware.slices import Slice


@dataclass(frozen=True)
class Exported:
    """What all of them are told."""

    name: str
    command: tuple[str, ...]  # headrace train RECIPE ..., in the tree
    slice: Slice
    spot: bool
    hours: float
    image: str  # of a container, for those who need one
    accelerator: str  # a TPU's name at Google; nothing for GPUs
    runtime: str
    extras: tuple[str, ...] = ()  # of pyproject.toml, that not every job needs
    outside: str = ""  # where the recipe is, if it is not in the tree
