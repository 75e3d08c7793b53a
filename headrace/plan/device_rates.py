"""Rates of a device, and the shares of them that compiled programs reach.

Each constant is stated once, with its evidence. None is fitted to a model."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.hardware.chips import Chip
from headrace.hardware.slices import SliceShape

# Share of the matrix units' peak. libtpu's cycles for single bf16 matmuls of 8,192 and 16,384 rows are 1.02
# to 1.64 times FLOPs / peak at widths of 4,096 and 8,192 (times four), with a median of 1.12 over v5p, v5e
# and v6e; at 1,024 and 2,048 1.02 to 1.08 on v5p and v5e, 1.13 to 2.06 on v6e (libtpu 0.0.51, 2026-11).
MATMUL_SHARE = 0.9
# Share of HBM's bandwidth. libtpu's cycles for streams of f32 are 1.24 times bytes / bandwidth on v5e and
# v6e, 1.39 on v5p. It estimates as much time per element for bf16 as for f32, so that its cycles cannot be
# used for streams.
HBM_SHARE = 0.8
# Share of a link's bandwidth, and seconds before the first byte of a message: ppermute on v5p and v6e takes
# 4.6 and 2.3 us and then transfers 86 GB/s of 100 (github.com/marin-community/marin/issues/6736).
LINK_SHARE, MESSAGE_SECONDS = 0.86, 4e-6
HOP_SECONDS = 1e-6  # from chip to chip (jax-ml.github.io/scaling-book/sharding)
HOST_BANDWIDTH = 16e9  # bytes/s from HBM to the host's memory, one way (jax-ml.github.io/scaling-book/tpus)
# Splash attention on one core, by the bundles that libtpu schedules for heads of 128 and tiles of 512 to
# 2,048: 3.6 to 5.3 cycles per vector register of 1,024 scores on v6e, where the matrix unit waits for them
# (4.6 to 7.5 on v5e and v5p, where matrix work takes 4 to 8), and 120 to 460 cycles per tile, masked or not.
CYCLES_PER_REGISTER, SCORES_PER_REGISTER, CYCLES_PER_TILE = 3.9, 1024, 300
# FLOPs per cycle where the clock is not known: with 2^19, v6e's streams take as many cycles per byte as
# v5e's.
FLOPS_PER_CYCLE = 2**19

Coordinates = tuple[int, ...]  # of a device: slice, core of the chip, position in the torus


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """Peak rates of one device per second, and where the program's devices are."""

    flops: float
    fp8: float  # equal to `flops` where the chip is no faster in 8 bits
    int8: float
    bandwidth: float  # of HBM
    link: float  # bytes/s one way
    network: float
    clock: float
    cores: int  # cores that share the work of a device
    shape: tuple[int, ...]
    wraps: tuple[bool, ...]
    places: tuple[Coordinates, ...]  # of each partition of the program


def make_rates(slice_shape: SliceShape, devices: Sequence[Any] = ()) -> DeviceRates:
    """Return the rates of a slice's devices.

    `devices` are those of the mesh in its order (`mesh.devices.flat`): JAX places them along the torus, not
    by number. Without them, devices are assumed to be in order."""
    chip = slice_shape.chip
    cells = itertools.product(range(slice_shape.slices), *map(range, slice_shape.shape), range(chip.devices))
    places = [(cell[0], cell[-1], *cell[1:-1]) for cell in cells]
    if devices:
        sides = len(slice_shape.shape)
        places = [(_slice_index(d), d.core_on_chip, *d.coords[:sides]) for d in devices]
    return DeviceRates(
        flops=chip.flops / chip.devices,
        fp8=(chip.fp8 or chip.flops) / chip.devices,
        int8=(chip.int8 or chip.flops) / chip.devices,
        bandwidth=chip.hbm_bandwidth / chip.devices,
        link=chip.link_bandwidth,
        network=(chip.network_bandwidth or math.inf) / chip.devices,
        clock=clock_hz(chip),
        cores=max(1, chip.cores // chip.devices),
        shape=slice_shape.shape,
        wraps=slice_shape.wraps,
        places=tuple(places),
    )


def clock_hz(chip: Chip) -> float:
    """Return the clock of one device in Hz, estimated from its FLOP/s where it is not known."""
    return chip.clock_hz or chip.flops / chip.devices / FLOPS_PER_CYCLE


def _slice_index(device: Any) -> int:
    """Return a device's `slice_index`, which JAX sets only where there are several slices."""
    return device.slice_index if hasattr(device, "slice_index") else 0
