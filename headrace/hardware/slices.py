"""Shapes of slices from the names that clouds sell them under: v5p-32, 2xv5e-256, v4:4x4x8, gpu:h200x8."""

import bisect
import itertools
import math
import re
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

from headrace.errors import UserError
from headrace.hardware.chips import GPUS, TPUS, Chip

Shape = tuple[int, ...]  # chips along each dimension

# Google Cloud: TPU v2, TPU types and zones (v3), TPU v5e, TPU v5p, TPU v6e; v4 and tpu7x as in Google's xpk.
# The pages have no shapes for v2 and v3: the most square ones are assumed. They lack v5p-32.
SMALL = "2x2x1 2x2x2 2x2x4 2x4x4"  # smaller than a cube, in three dimensions
STANDARD = {
    "v2": "2x2 4x4 8x8 8x16 16x16",
    "v3": "2x2 4x4 4x8 8x8 8x16 16x16 16x32 32x32",
    "v4": f"{SMALL} 4x4x4 4x4x8 4x8x8 8x8x8 8x8x12 8x8x16 8x16x16",
    "v5e": "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16",
    "v5p": f"{SMALL} 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16 16x16x24",
    "v6e": "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16",
    "tpu7x": f"1x1x1 {SMALL} 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16 16x16x24 16x24x24",
} | {chip.name: "1 2 4 8" for chip in GPUS}
CUBE = 4  # chips along an edge of the cubes that optical switches connect
MAX_SIDE = 256  # chips along an edge of a slice: the limit of Google's xpk
SINGLE_HOST_EIGHT = (2, 4)  # v5litepod-8 and v6e-8 are one machine: ct5lp-hightpu-8t and ct6e-standard-8t
ALIASES = {"v5litepod": "v5e"}


@dataclass(frozen=True)
class SliceShape:
    """Chips that are rented together: one or more slices of equal shape, joined by the network.

    The GPUs of a machine count as one slice. `chips`, `devices` and `hosts` are totals of all slices."""

    name: str  # as the user wrote it
    chip: Chip
    chips: int
    devices: int  # as JAX counts them
    shape: Shape  # of one slice
    slices: int
    hosts: int  # machines, each with its own process

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Whether each dimension is a ring.

        In three dimensions all are, if the slice consists of whole cubes; in two, those as long as the
        pod."""
        if self.chip.dimensions == 3:
            return (all(side % CUBE == 0 for side in self.shape),) * 3
        return tuple(self.chip.is_tpu and side == max(_list_shapes(self.chip)[-1]) for side in self.shape)

    @property
    def links_per_chip(self) -> int:
        """Number of links over which a chip can receive at the same time.

        Per dimension two on a ring and one on a line, whose ends have no other. A GPU's switch counts as
        one."""
        if not self.chip.is_tpu:
            return 1
        sides = zip(self.shape, self.wraps, strict=True)
        return sum(min(side - 1, 2 if wraps else 1) for side, wraps in sides)

    @property
    def topology_name(self) -> str:
        """Argument of jax.experimental.topologies.get_topology_desc, together with `topology_options`."""
        assert self.chip.is_tpu, f"{self.name}: cannot compile for GPUs that are not present"
        return f"{self.chip.name}:{_format_shape(self.shape)}"

    @property
    def topology_options(self) -> dict[str, Any]:
        """Keyword arguments of get_topology_desc.

        By default libtpu assumes that no dimension is a ring and that machines have four chips."""
        options: dict[str, Any] = {"wrap": (*self.wraps, False)[:3]}
        if self.chip.chip_config:
            options["chip_config_name"] = self.chip.chip_config
        if self.shape == SINGLE_HOST_EIGHT:
            options["chips_per_host_bounds"] = (*SINGLE_HOST_EIGHT, 1)
        if self.slices > 1:
            options["num_slices"] = self.slices
        return options


def parse_slice(name: str) -> SliceShape:
    """Return the slice that a name such as v5p-32, 2xv5e-256, v4:4x4x8 or gpu:h200x8 stands for.

    Upper and lower case are equal. A size stands for the most cubic shape with that many cores. Raises
    UserError with the nearest valid names."""
    text = name.strip().lower()
    if gpu := re.fullmatch(r"gpu:([a-z]\w*?)x(\d{1,9})", text, re.ASCII):
        return _make_gpus(name, gpu[1], int(gpu[2]))
    pattern = r"(?:(\d{1,9})x)?([a-z]\w*)(?:-(\d{1,9})|[-:](\d{1,9}(?:x\d{1,9})+))?"
    match = re.fullmatch(pattern, text, re.ASCII)
    chip = next((chip for chip in TPUS if match and chip.name == ALIASES.get(match[2], match[2])), None)
    if not match or not chip:
        tpus, gpus = (", ".join(chip.name for chip in chips) for chips in (TPUS, GPUS))
        _fail(name, f"one of {tpus} and a size, as in v5p-32, or gpu: and one of {gpus}, as in gpu:h200x8")
    count, generation, size, sides = match.groups()
    slices = int(count or 1)
    if slices == 0 or (slices > 1 and not chip.network_bandwidth):
        can_join = chip.network_bandwidth is not None
        _fail(name, "1 slice or more" if can_join else f"one slice: those of {chip.name} cannot be joined")
    if sides:
        return _make_slice(name, chip, _parse_shape(name, chip, sides=sides, generation=generation), slices)
    shape = _shape_of_size(name, chip, size=int(size or 0), generation=generation)
    return _make_slice(name, chip, shape, slices)


def standard_slices(chip: Chip) -> list[SliceShape]:
    """List all standard slices of a chip, smallest first: single slices, or the GPUs of one machine."""
    prefix = f"{chip.name}-" if chip.is_tpu else f"gpu:{chip.name}x"
    return [
        _make_slice(f"{prefix}{math.prod(shape) * chip.cores}", chip, shape, 1)
        for shape in _standard_shapes(chip.name)
    ]


def _make_slice(name: str, chip: Chip, shape: Shape, slices: int) -> SliceShape:
    chips = math.prod(shape)
    hosts = 1 if shape == SINGLE_HOST_EIGHT else math.ceil(chips / chip.chips_per_host)
    return SliceShape(
        name=name,
        chip=chip,
        chips=chips * slices,
        devices=chips * slices * chip.devices,
        shape=shape,
        slices=slices,
        hosts=hosts * slices,
    )


def _make_gpus(name: str, gpu: str, count: int) -> SliceShape:
    chip = next((chip for chip in GPUS if chip.name == gpu), None)
    if not chip:
        _fail(name, f"one of {', '.join(chip.name for chip in GPUS)}, such as gpu:h200x8")
    shape, slices = (min(count, chip.chips_per_host),), max(1, count // chip.chips_per_host)
    if shape not in _list_shapes(chip) or shape[0] * slices != count:
        _fail(name, f"1, 2, 4, 8 or a multiple of 8, such as gpu:{gpu}x8")
    return _make_slice(name, chip, shape, slices)


def _parse_shape(name: str, chip: Chip, *, sides: str, generation: str) -> Shape:
    shape = tuple(int(side) for side in sides.split("x"))
    if shape not in _list_shapes(chip):
        near = _nearest([math.prod(other) for other in _list_shapes(chip)], math.prod(shape))
        shapes = [_format_shape(_most_cubic(chip, count)) for count in near]
        _fail(name, "a shape such as " + " or ".join(f"{generation}:{shape}" for shape in shapes))
    return shape


def _shape_of_size(name: str, chip: Chip, *, size: int, generation: str) -> Shape:
    counts = [math.prod(shape) * chip.cores for shape in _list_shapes(chip)]
    if size not in counts:
        near = _nearest(counts, size)
        _fail(name, "a size such as " + " or ".join(f"{generation}-{count}" for count in near))
    return _most_cubic(chip, size // chip.cores)


def _most_cubic(chip: Chip, chips: int) -> Shape:
    """Return the shape with the smallest surface, of those with this number of chips."""
    shapes = [shape for shape in _list_shapes(chip) if math.prod(shape) == chips]
    return min(shapes, key=lambda shape: sum(a * b for a, b in itertools.combinations(shape, 2)))


def _nearest(counts: list[int], target: int) -> list[int]:
    """Return `target` if it is in `counts`, else its two neighbors there."""
    counts = sorted(set(counts))
    if target in counts:
        return [target]
    after = min(max(bisect.bisect(counts, target), 1), len(counts) - 1)
    return counts[after - 1 : after + 1]


@cache
def _list_shapes(chip: Chip) -> tuple[Shape, ...]:
    """List all shapes on offer, smallest first: the standard ones and, in 3D, all of whole cubes."""
    shapes = set(_standard_shapes(chip.name))
    if chip.dimensions == 3:
        largest = math.prod(_standard_shapes(chip.name)[-1])
        for a in range(CUBE, MAX_SIDE + 1, CUBE):
            for b in range(a, min(MAX_SIDE, largest // a**2) + 1, CUBE):
                shapes |= {(a, b, c) for c in range(b, min(MAX_SIDE, largest // (a * b)) + 1, CUBE)}
    return tuple(sorted(shapes, key=lambda shape: (math.prod(shape), shape)))


def _standard_shapes(chip_name: str) -> list[Shape]:
    return [tuple(int(side) for side in shape.split("x")) for shape in STANDARD[chip_name].split()]


def _format_shape(shape: Shape) -> str:
    return "x".join(map(str, shape))


def _fail(name: str, expected: str) -> NoReturn:
    shown = name if len(name) <= 60 else name[:57] + "..."
    raise UserError(f"slice: found {shown}, expected {expected}")
