"""Slices by the names they are sold under: v5p-32, v5litepod-16, 2xv5e-256, v4:4x4x8, gpu:h200x8."""

import bisect
import itertools
import math
import re
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

from headrace.errors import UserError
from headrace.hardware.chips import GPUS, TPUS, Chip

Shape = tuple[int, ...]

# Google Cloud: TPU v2, TPU types and zones (v3), TPU v5e, TPU v5p, TPU v6e; v4 and tpu7x as in Google's xpk.
# The pages give no shapes for v2 and v3, taken here as near to a square as can be, and leave v5p-32 out.
SMALL = "2x2x1 2x2x2 2x2x4 2x4x4"  # less than a cube, in three dimensions
STANDARD = {
    "v2": "2x2 4x4 8x8 8x16 16x16",
    "v3": "2x2 4x4 4x8 8x8 8x16 16x16 16x32 32x32",
    "v4": f"{SMALL} 4x4x4 4x4x8 4x8x8 8x8x8 8x8x12 8x8x16 8x16x16",
    "v5e": "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16",
    "v5p": f"{SMALL} 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16 16x16x24",
    "v6e": "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16",
    "tpu7x": f"1x1x1 {SMALL} 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16 16x16x24 16x24x24",
} | {chip.name: "1 2 4 8" for chip in GPUS}
CUBE = 4  # chips along an edge of the cubes that optical switches join
LONGEST = 256  # chips along an edge of a slice, as far as Google's xpk goes
EIGHT = (2, 4)  # v5litepod-8 and v6e-8 are one machine: ct5lp-hightpu-8t and ct6e-standard-8t
ALIASES = {"v5litepod": "v5e"}


@dataclass(frozen=True)
class Slice:
    """Chips to rent. The network joins several slices of one shape; the GPUs of a machine are one slice."""

    name: str  # as given
    chip: Chip
    chips: int  # of all slices, as are devices and hosts
    devices: int  # as JAX counts them
    shape: Shape  # of one slice
    slices: int
    hosts: int  # machines, each with a process of its own

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Which dimensions are rings: all in whole cubes, and those as long as the pod in two dimensions."""
        if self.chip.dimensions == 3:
            return (all(side % CUBE == 0 for side in self.shape),) * 3
        return tuple(self.chip.is_tpu and side == max(_shapes(self.chip)[-1]) for side in self.shape)

    @property
    def links(self) -> int:
        """That a chip can receive over at once: in each dimension two on a ring, one on a line, where its
        ends have no other. The switch between GPUs is one."""
        if not self.chip.is_tpu:
            return 1
        sides = zip(self.shape, self.wraps, strict=True)
        return sum(min(side - 1, 2 if wraps else 1) for side, wraps in sides)

    @property
    def topology(self) -> str:
        """The name that jax.experimental.topologies.get_topology_desc takes, along with `options`."""
        assert self.chip.is_tpu, f"{self.name}: there is no compiler for GPUs that are not there"
        return f"{self.chip.name}:{_written(self.shape)}"

    @property
    def options(self) -> dict[str, Any]:
        """What get_topology_desc must know besides. Untold, libtpu takes no dimension for a ring, and chips
        for machines of four."""
        options: dict[str, Any] = {"wrap": (*self.wraps, False)[:3]}
        if self.chip.config:
            options["chip_config_name"] = self.chip.config
        if self.shape == EIGHT:
            options["chips_per_host_bounds"] = (*EIGHT, 1)
        if self.slices > 1:
            options["num_slices"] = self.slices
        return options


def parse(name: str) -> Slice:
    """The slice of that name, in large or small letters. A size means the most cubic of the shapes it has."""
    text = name.strip().lower()
    if gpu := re.fullmatch(r"gpu:([a-z]\w*?)x(\d{1,9})", text, re.ASCII):
        return _gpus(name, gpu[1], int(gpu[2]))
    pattern = r"(?:(\d{1,9})x)?([a-z]\w*)(?:-(\d{1,9})|[-:](\d{1,9}(?:x\d{1,9})+))?"
    parts = re.fullmatch(pattern, text, re.ASCII)
    chip = next((chip for chip in TPUS if parts and chip.name == ALIASES.get(parts[2], parts[2])), None)
    if not parts or not chip:
        tpus, gpus = (", ".join(chip.name for chip in chips) for chips in (TPUS, GPUS))
        _fail(name, f"one of {tpus} and a size, as in v5p-32, or gpu: and one of {gpus}, as in gpu:h200x8")
    count, generation, size, sides = parts.groups()
    slices = int(count or 1)
    if slices == 0 or slices > 1 and not chip.network:
        _fail(name, "1 slice or more" if chip.network else f"one slice: those of {chip.name} are not joined")
    if sides:
        return _make(name, chip, _shape_of(name, chip, sides=sides, generation=generation), slices)
    return _make(name, chip, _shape_for(name, chip, size=int(size or 0), generation=generation), slices)


def sizes(chip: Chip) -> list[Slice]:
    """All standard slices of a chip, smallest first: one slice each, or GPUs of one machine."""
    named = f"{chip.name}-" if chip.is_tpu else f"gpu:{chip.name}x"
    return [
        _make(f"{named}{math.prod(shape) * chip.cores}", chip, shape, 1) for shape in _standard(chip.name)
    ]


def _make(name: str, chip: Chip, shape: Shape, slices: int) -> Slice:
    count = math.prod(shape)
    hosts = 1 if shape == EIGHT else math.ceil(count / chip.host)
    return Slice(
        name=name,
        chip=chip,
        chips=count * slices,
        devices=count * slices * chip.devices,
        shape=shape,
        slices=slices,
        hosts=hosts * slices,
    )


def _gpus(name: str, kind: str, count: int) -> Slice:
    chip = next((chip for chip in GPUS if chip.name == kind), None)
    if not chip:
        _fail(name, f"one of {', '.join(chip.name for chip in GPUS)}, such as gpu:h200x8")
    shape, slices = (min(count, chip.host),), max(1, count // chip.host)
    if shape not in _shapes(chip) or shape[0] * slices != count:
        _fail(name, f"1, 2, 4, 8 or a multiple of 8, such as gpu:{kind}x8")
    return _make(name, chip, shape, slices)


def _shape_of(name: str, chip: Chip, *, sides: str, generation: str) -> Shape:
    shape = tuple(int(side) for side in sides.split("x"))
    if shape not in _shapes(chip):
        near = _nearest([math.prod(other) for other in _shapes(chip)], math.prod(shape))
        shapes = [_written(_most_cubic(chip, count)) for count in near]
        _fail(name, "a shape such as " + " or ".join(f"{generation}:{shape}" for shape in shapes))
    return shape


def _shape_for(name: str, chip: Chip, *, size: int, generation: str) -> Shape:
    counts = [math.prod(shape) * chip.cores for shape in _shapes(chip)]
    if size not in counts:
        near = _nearest(counts, size)
        _fail(name, "a size such as " + " or ".join(f"{generation}-{count}" for count in near))
    return _most_cubic(chip, size // chip.cores)


def _most_cubic(chip: Chip, count: int) -> Shape:
    """Of the shapes with so many chips, the one with the least surface."""
    shapes = [shape for shape in _shapes(chip) if math.prod(shape) == count]
    return min(shapes, key=lambda shape: sum(a * b for a, b in itertools.combinations(shape, 2)))


def _nearest(counts: list[int], wanted: int) -> list[int]:
    """That count, or the ones on either side of it."""
    counts = sorted(set(counts))
    if wanted in counts:
        return [wanted]
    after = min(max(bisect.bisect(counts, wanted), 1), len(counts) - 1)
    return counts[after - 1 : after + 1]


@cache
def _shapes(chip: Chip) -> tuple[Shape, ...]:
    """All that are offered, smallest first: the standard ones, and in three dimensions any of whole cubes."""
    shapes = set(_standard(chip.name))
    if chip.dimensions == 3:
        largest = math.prod(_standard(chip.name)[-1])
        for a in range(CUBE, LONGEST + 1, CUBE):
            for b in range(a, min(LONGEST, largest // a**2) + 1, CUBE):
                shapes |= {(a, b, c) for c in range(b, min(LONGEST, largest // (a * b)) + 1, CUBE)}
    return tuple(sorted(shapes, key=lambda shape: (math.prod(shape), shape)))


def _standard(name: str) -> list[Shape]:
    return [tuple(int(side) for side in shape.split("x")) for shape in STANDARD[name].split()]


def _written(shape: Shape) -> str:
    return "x".join(map(str, shape))


def _fail(name: str, expected: str) -> NoReturn:
    found = name if len(name) <= 60 else name[:57] + "..."
    raise UserError(f"slice: found {found}, expected {expected}")
