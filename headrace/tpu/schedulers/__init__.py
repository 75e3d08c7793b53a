"""Files that run a recipe under another scheduler. The values of `export --to` are the modules in this
folder; each has `render(job: ExportedJob) -> str`, which returns the content of the file."""

from dataclasses import dataclass

from headrace.hardware.slices import SliceShape


@dataclass(frozen=True)
class ExportedJob:
    """A run as every scheduler needs to know it."""

    name: str
    command: tuple[str, ...]  # headrace train RECIPE ..., in the working tree
    slice: SliceShape
    spot: bool
    hours: float
    image: str  # of a container, for schedulers that need one
    accelerator: str  # Google's name of a TPU type; empty for GPUs
    runtime: str  # system image of TPU VMs
    extras: tuple[str, ...] = ()  # of pyproject.toml, on top of the default ones
    outside_recipe: str = ""  # path of the recipe if it is not in the working tree
