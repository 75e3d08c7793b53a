"""The slice that the user requests: hardware, zones, terms. No network access in this module."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.errors import UserError
from headrace.hardware import slices

Terms = Literal["on-demand", "spot", "reserved"]

# Google's names of the system images of TPU VMs (cloud.google.com/tpu/docs/runtimes, 2026-11).
RUNTIMES = {
    "v2": "tpu-ubuntu2204-base",
    "v3": "tpu-ubuntu2204-base",
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
ACCELERATOR_PREFIXES = {"v5e": "v5litepod"}  # where Google's name differs from the chip's
NEW_NAME = re.compile(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?")  # leaves room for the number of a joined slice
RESOURCE_NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
ZONE = re.compile(r"[a-z]+-[a-z]+\d+-[a-z]")


@dataclass(frozen=True)
class Request:
    """A slice to rent, or several joined to one (2xv5e-256)."""

    name: str
    slice: slices.SliceShape
    zones: tuple[str, ...]  # tried in this order, then again from the first
    terms: Terms = "on-demand"
    runtime: str = ""
    wait: float = 10.0  # minutes in the queue of a zone before the next zone is tried
    disks: tuple[str, ...] = ()  # data disks, attached read-only to every worker
    internal_ips: bool = False  # no addresses outside Google's network
    public_key: str = ""  # USER:KEY for ssh to the workers

    def __post_init__(self) -> None:
        check_new_name(self.name)
        if not self.wait > 0:
            raise UserError(f"--wait: found {self.wait:g}, expected minutes above 0")
        for disk in self.disks:
            check_resource_name("--disk", disk)

    @property
    def accelerator(self) -> str:
        """Google's name of the accelerator type, such as v5litepod-16."""
        chip, chips = self.slice.chip, self.slice.chips // self.slice.slices
        return f"{ACCELERATOR_PREFIXES.get(chip.name, chip.name)}-{chips * chip.cores}"

    @property
    def image(self) -> str:
        """Name of the system image of the machines."""
        return self.runtime or RUNTIMES[self.slice.chip.name]


def parse_tpu_slice(name: str, runtime: str) -> slices.SliceShape:
    """Parse the name of a slice that can be rented. Raises UserError for GPUs, for shapes, and for a chip
    whose system image is neither known nor given as `runtime`."""
    shape = slices.parse_slice(name)
    if not shape.chip.is_tpu:
        raise UserError(f"--slice: found {name}, expected TPUs, such as v4-32; Headrace does not rent GPUs")
    if ":" in name:
        raise UserError(f"--slice: found the shape {name}, expected a size, such as v5p-32")
    if not runtime and shape.chip.name not in RUNTIMES:
        raise UserError(
            f"--slice: no system image of a TPU VM is known for {shape.chip.name}; name one with --runtime"
        )
    return shape


def check_new_name(name: str) -> None:
    """Raise UserError unless a slice may be created with this name. Joined slices get a number after it."""
    if not NEW_NAME.fullmatch(name):
        raise UserError(
            f"--name: found {name}, expected lowercase letters, digits and dashes, at most 50, a letter first"
        )


def check_resource_name(option: str, name: str) -> None:
    """Raise UserError unless a slice or disk of this name may exist, whoever made it."""
    if not RESOURCE_NAME.fullmatch(name):
        raise UserError(
            f"{option}: found {name}, expected lowercase letters, digits and dashes, at most 63, a letter "
            "first"
        )


def parse_zones(texts: Sequence[str]) -> tuple[str, ...]:
    """The zones of one or several --zone options; each may list several, separated by commas."""
    zones = tuple(zone for text in texts for zone in text.split(","))
    for zone in zones:
        if not ZONE.fullmatch(zone):
            raise UserError(f"--zone: found {zone}, expected a zone such as us-central2-b")
    return zones


def make_slice_name(text: str) -> str:
    """A valid slice name made from any text, such as the file name of a recipe."""
    slug = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return f"headrace-{slug}"[:50].strip("-")
