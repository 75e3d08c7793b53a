"""What is asked of a cloud: which slice, where, on what terms. No network in here."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.errors import UserError
from headrace.hardware import slices

Terms = Literal["on-demand", "spot", "reserved"]

# What Google calls the system of a TPU VM (cloud.google.com/tpu/docs/runtimes, 2026-11).
RUNTIMES = {
    "v2": "tpu-ubuntu2204-base",
    "v3": "tpu-ubuntu2204-base",
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
SOLD_AS = {"v5e": "v5litepod"}
NAME = re.compile(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?")
THERE = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
ZONE = re.compile(r"[a-z]+-[a-z]+\d+-[a-z]")


@dataclass(frozen=True)
class Request:
    """A slice to rent, or several joined to one (2xv5e-256)."""

    name: str
    slice: slices.Slice
    zones: tuple[str, ...]  # tried in this order, and round again
    terms: Terms = "on-demand"
    runtime: str = ""
    wait: float = 10.0  # minutes in a zone's queue before the next zone is tried
    disks: tuple[str, ...] = ()  # data disks, attached read-only to every worker
    internal: bool = False  # no addresses outside of Google's network
    public_key: str = ""  # USER:KEY, by which the workers are reached

    def __post_init__(self) -> None:
        check_name(self.name)
        if not self.wait > 0:
            raise UserError(f"--wait: found {self.wait:g}, expected minutes above 0")
        for disk in self.disks:
            check_there("--disk", disk)

    @property
    def accelerator(self) -> str:
        """The type by Google's name: v5litepod-16."""
        chip, count = self.slice.chip, self.slice.chips // self.slice.slices
        return f"{SOLD_AS.get(chip.name, chip.name)}-{count * chip.cores}"

    @property
    def image(self) -> str:
        return self.runtime or RUNTIMES[self.slice.chip.name]


def sliced(name: str, runtime: str) -> slices.Slice:
    """The slice of that name, if it can be rented by it."""
    found = slices.parse(name)
    if not found.chip.is_tpu:
        raise UserError(f"--slice: found {name}, expected TPUs, such as v4-32; GPUs are not rented from here")
    if ":" in name:
        raise UserError(f"--slice: found the shape {name}, expected a size, such as v5p-32")
    if not runtime and found.chip.name not in RUNTIMES:
        raise UserError(f"--slice: no TPU VM system is known for {found.chip.name}; name one by --runtime")
    return found


def check_name(name: str) -> None:
    """Of what is to be made: several slices that are joined have numbers after it."""
    if not NAME.fullmatch(name):
        raise UserError(
            f"--name: found {name}, expected small letters, digits and dashes, 50 at most, a letter first"
        )


def check_there(option: str, name: str) -> None:
    """Of what may be there, ours or not."""
    if not THERE.fullmatch(name):
        raise UserError(
            f"{option}: found {name}, expected small letters, digits and dashes, 63 at most, a letter first"
        )


def zones_from(texts: Sequence[str]) -> tuple[str, ...]:
    """One or several, also apart by commas."""
    zones = tuple(zone for text in texts for zone in text.split(","))
    for zone in zones:
        if not ZONE.fullmatch(zone):
            raise UserError(f"--zone: found {zone}, expected a zone such as us-central2-b")
    return zones


def name_from(text: str) -> str:
    """A name that the cloud takes, after a recipe's."""
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return f"headrace-{words}"[:50].strip("-")
