"""Table of accelerators and prices, dated, with the source of each number.

Short names of sources: "Google Cloud: TPU v5p" is docs.cloud.google.com/tpu/docs/v5p, and so on; "scaling
book" is jax-ml.github.io/scaling-book; "JAX" is tpu_info.py of jax 0.10.2; "libtpu" is what libtpu 0.0.51
reports."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from headrace.errors import UserError

# All numbers were checked against their sources on 2026-11-15.
PRICES_DATE = "2026-08-22"  # date of the catalog that the prices are from

MIB, GIB = 2**20, 2**30
Range = tuple[float, float]  # low and high; equal where there is a single number


@dataclass(frozen=True, kw_only=True)
class Chip:
    """An accelerator. All numbers are per chip; JAX may show a chip as two devices with half of each."""

    name: str
    device_kinds: tuple[str, ...] = ()  # `device_kind` in JAX; GPUs are recognized by their names instead
    flops: float  # dense bf16 matrix FLOP/s
    fp8: float | None = None  # FLOP/s in 8 bits; None where that is no faster than bf16
    int8: float | None = None
    hbm_bytes: int
    usable_bytes: int  # HBM that a program can use
    hbm_bandwidth: float  # bytes/s
    cores: int = 1  # TensorCores, which the number in a slice's name counts
    devices: int = 1  # devices that JAX shows, given `chip_config`
    chip_config: str | None = None  # chip_config_name of the topology
    dimensions: int  # of the torus that connects chips; 0: a switch connects those of one host
    link_bandwidth: float  # bytes/s one way of one link; with a switch: of all that leaves a chip
    network_bandwidth: float | None  # bytes/s one way to the data center; None: slices cannot be joined
    chips_per_host: int = 4
    clock_hz: float | None = None

    def matmul_flops(self, matmul: str) -> float | None:
        """Return FLOP/s of matmuls in a precision of low_precision/; None if it is no faster than bf16."""
        rates = {"compute": self.flops, "fp8": self.fp8, "int8": self.int8, "ternary": self.int8}
        return rates[matmul]

    @property
    def is_tpu(self) -> bool:
        return self.dimensions > 0

    @property
    def total_link_bandwidth(self) -> float:
        """Bytes/s one way over all links of a chip. A torus has two links per dimension."""
        return self.link_bandwidth * max(1, 2 * self.dimensions)


@dataclass(frozen=True)
class Price:
    """Dollars per chip-hour. None: not known."""

    on_demand: Range | None = None
    spot: Range | None = None


# `usable_bytes` is the "available HBM" in libtpu's error for programs that are too large: GiB of a device, to
# two places. `link_bandwidth` is Google's "bidirectional ICI bandwidth per chip", divided by both directions
# and all links.
TPUS = (
    Chip(
        name="v2",
        device_kinds=("TPU v2",),
        flops=45e12,  # Wikipedia; JAX has 46, which is 2 x 128 x 128 x 2 x 700 MHz
        hbm_bytes=16 * GIB,  # Google Cloud: TPU types and zones (64 GiB for the 4 chips of v2-8)
        usable_bytes=int(2 * 7.48 * GIB),  # libtpu
        hbm_bandwidth=700e9,  # Norrie et al., IEEE Micro 2021; JAX has 716, Wikipedia 600
        cores=2,
        devices=2,  # libtpu; it rejects megacore
        dimensions=2,
        link_bandwidth=62e9,  # Norrie et al., IEEE Micro 2021: 500 Gbit/s each way
        network_bandwidth=None,  # Google Cloud: Multislice is for v4 or later
        clock_hz=0.7e9,  # Wikipedia
    ),
    Chip(
        name="v3",
        device_kinds=("TPU v3",),
        flops=123e12,  # Google Cloud: TPU v3; scaling book and JAX have 140
        hbm_bytes=32 * GIB,  # Google Cloud: TPU v3
        usable_bytes=int(2 * 15.48 * GIB),  # libtpu
        hbm_bandwidth=900e9,  # Google Cloud: TPU v3; JAX has 825
        cores=2,
        devices=2,  # libtpu; it rejects megacore
        dimensions=2,
        # Google Cloud: TPU v3: 340 TB/s of all-reduce for 1,024 chips of 4 links. Its bisection (6.4 TB/s
        # over 64 links) and the scaling book give 100.
        link_bandwidth=83e9,
        network_bandwidth=None,  # Google Cloud: Multislice is for v4 or later
        clock_hz=0.94e9,  # Wikipedia
    ),
    Chip(
        name="v4",
        device_kinds=("TPU v4",),
        flops=275e12,  # Google Cloud: TPU v4
        hbm_bytes=32 * GIB,  # Google Cloud: TPU v4
        usable_bytes=int(30.75 * GIB),  # libtpu; 15.25 per core without megacore
        hbm_bandwidth=1200e9,  # Google Cloud: TPU v4; JAX has 1230
        cores=2,
        chip_config="megacore",  # without it libtpu shows two devices per chip; real machines do not
        dimensions=3,
        # Scaling book; Google Cloud: TPU v4: 1.1 PB/s of all-reduce for 4,096 chips of 6 links.
        # Jouppi et al., ISCA 2023, have 50.
        link_bandwidth=45e9,
        # scaling book: about 25 GB/s per host, which has 4 chips; Google has no page for v4
        network_bandwidth=6.25e9,
        clock_hz=1.05e9,  # Wikipedia
    ),
    Chip(
        name="v5e",
        device_kinds=("TPU v5 lite", "TPU v5e"),
        flops=197e12,  # Google Cloud: TPU v5e
        int8=393e12,  # the same; JAX has 394
        hbm_bytes=16 * GIB,  # Google Cloud: TPU v5e
        usable_bytes=int(15.75 * GIB),  # libtpu
        hbm_bandwidth=819e9,  # Google Cloud: TPU v5e; a later edition has "800 GiBps", which is 859
        dimensions=2,
        link_bandwidth=50e9,  # Google Cloud: TPU v5e (400 GB/s); scaling book 50, in its first edition 45
        # Google Cloud: TPU v5e: 6.4 Tbit/s for a pod of 256, 2 x 100 Gbit/s for 8 chips
        network_bandwidth=3.125e9,
        # on no page; from 197 TFLOP/s and 4 x 128 x 128 x 2 per cycle (Google Cloud: four MXUs)
        clock_hz=1.5e9,
    ),
    Chip(
        name="v5p",
        device_kinds=("TPU v5", "TPU v5p"),
        flops=459e12,  # Google Cloud: TPU v5p
        int8=918e12,  # JAX; 1.98 times bf16 by libtpu's cycles. In fp8 459, Google Cloud: TPU7x
        hbm_bytes=96 * GIB,  # scaling book; JAX has 95.9, Google Cloud: TPU v5p 95, less than libtpu allows
        usable_bytes=int(95.73 * GIB),  # libtpu
        hbm_bandwidth=2765e9,  # Google Cloud: TPU v5p, now as 2575 GiB/s; JAX has 2460
        cores=2,
        dimensions=3,
        link_bandwidth=100e9,  # Google Cloud: TPU v5p (1200 GB/s); scaling book 100, in its first edition 90
        network_bandwidth=6.25e9,  # Google Cloud: TPU v5p: 50 Gbit/s per chip
        clock_hz=1.75e9,  # Wikipedia; 459 TFLOP/s are 8 x 128 x 128 x 2 per cycle
    ),
    Chip(
        name="v6e",
        device_kinds=("TPU v6 lite", "TPU v6e"),
        flops=918e12,  # Google Cloud: TPU v6e; JAX and scaling book have 920
        int8=1836e12,  # JAX has 1840; 1.33 times bf16 by libtpu's cycles. In fp8 918, Google Cloud: TPU7x
        hbm_bytes=32 * GIB,  # Google Cloud: TPU v6e
        usable_bytes=int(31.24 * GIB),  # libtpu
        hbm_bandwidth=1638e9,  # Google Cloud: TPU7x, in its comparison; its own page has 1600, earlier 1640
        dimensions=2,
        # Google Cloud: TPU v6e (800 GB/s); its first edition: 3584 Gbit/s, 112 GB/s per link
        link_bandwidth=100e9,
        # Google Cloud: TPU7x: 100 Gbit/s per chip; TPU v6e: 25.6 Tbit/s for a pod of 256
        network_bandwidth=12.5e9,
    ),
    Chip(
        name="tpu7x",
        device_kinds=("TPU7x",),
        flops=2307e12,  # Google Cloud: TPU7x
        fp8=4614e12,  # the same; int8 is no faster than bf16, by libtpu's cycles
        hbm_bytes=192 * GIB,  # Google Cloud: TPU7x
        usable_bytes=int(2 * 94.74 * GIB),  # libtpu
        hbm_bandwidth=7380e9,  # Google Cloud: TPU7x; JAX has 7400
        cores=2,
        devices=2,  # libtpu; it rejects megacore. Google Cloud: TPU7x: two chiplets, two devices
        dimensions=3,
        link_bandwidth=100e9,  # Google Cloud: TPU7x (1200 GB/s)
        network_bandwidth=12.5e9,  # Google Cloud: TPU7x: 100 Gbit/s per chip
    ),
)

# SXM boards, eight per machine. `hbm_bytes` is in NVIDIA's "GB", which are GiB; `usable_bytes` is JAX's share
# of the memory that nvidia-smi shows. `link_bandwidth` is half of NVIDIA's NVLink figure, which adds up both
# directions; `network_bandwidth` is that of the network card, of which each GPU has one.
JAX_SHARE = 0.75  # of a GPU's memory; XLA_CLIENT_MEM_FRACTION changes it
GPUS = (
    Chip(
        name="a100",
        flops=312e12,  # NVIDIA A100 data sheet
        hbm_bytes=80 * GIB,  # the same; there is also one with 40 GB
        usable_bytes=int(81920 * MIB * JAX_SHARE),
        hbm_bandwidth=2039e9,  # the same
        dimensions=0,
        link_bandwidth=300e9,  # the same; scaling book
        network_bandwidth=25e9,  # NVIDIA DGX A100 data sheet: 200 Gbit/s (unchecked)
        chips_per_host=8,
    ),
    Chip(
        name="h100",
        flops=989e12,  # NVIDIA H100 data sheet, half of its figure with sparsity
        fp8=1979e12,  # the same
        hbm_bytes=80 * GIB,  # the same
        usable_bytes=int(81559 * MIB * JAX_SHARE),
        hbm_bandwidth=3350e9,  # the same
        dimensions=0,
        link_bandwidth=450e9,  # the same; scaling book
        network_bandwidth=50e9,  # NVIDIA DGX BasePOD: ConnectX-7, 400 Gbit/s
        chips_per_host=8,
    ),
    Chip(
        name="h200",
        flops=989e12,  # NVIDIA H200 data sheet, half of its figure with sparsity; about 790 measured
        fp8=1979e12,  # the same
        hbm_bytes=141 * GIB,  # the same
        usable_bytes=int(143771 * MIB * JAX_SHARE),
        hbm_bandwidth=4800e9,  # the same; about 4,300 measured
        dimensions=0,
        link_bandwidth=450e9,  # the same; scaling book
        network_bandwidth=50e9,  # NVIDIA DGX BasePOD: ConnectX-7, 400 Gbit/s
        chips_per_host=8,
    ),
    Chip(
        name="b200",
        flops=2250e12,  # NVIDIA Blackwell brief, HGX at 1,000 W; 2,500 in the GB200
        fp8=4500e12,  # the same
        hbm_bytes=180 * GIB,  # NVIDIA DGX B200 user guide: 1,440 GB for 8; others have 192
        usable_bytes=int(183359 * MIB * JAX_SHARE),
        hbm_bandwidth=8000e9,  # scaling book
        dimensions=0,
        link_bandwidth=900e9,  # scaling book; NVIDIA DGX B200 user guide: 14.4 TB/s for 8, both ways
        network_bandwidth=50e9,  # NVIDIA DGX B200 user guide: ConnectX-7, 400 Gbit/s
        chips_per_host=8,
    ),
)
CHIPS = {chip.name: chip for chip in TPUS + GPUS}

# Dollars per chip-hour in the United States, from Google Cloud's catalog of PRICES_DATE: the lowest and the
# highest of all regions there. The most expensive is us-south1; other countries may cost more.
PRICES = {
    "v2": Price(on_demand=(1.13, 1.50)),
    "v3": Price(on_demand=(2.00, 2.20), spot=(0.51, 0.66)),
    "v4": Price(on_demand=(3.22, 3.22), spot=(0.92, 0.92)),
    "v5e": Price(on_demand=(1.20, 1.42), spot=(0.18, 0.78)),
    "v5p": Price(on_demand=(4.20, 4.78), spot=(0.64, 1.53)),
    "v6e": Price(on_demand=(2.70, 2.70), spot=(0.27, 1.78)),
}

WEAKER_VARIANTS = {"Laptop", "MIG", "NVL", "PCIe"}  # words in names of GPUs that are slower than the table's


def find_chip(device_kind: str) -> Chip | None:
    """Find the chip of a JAX device by its `device_kind`. None if the table does not have it."""
    words = set(device_kind.replace("-", " ").split())
    if words & WEAKER_VARIANTS:
        return None
    for chip in CHIPS.values():
        if device_kind in chip.device_kinds or chip.name.upper() in words:
            return chip
    return None


def load_prices(path: Path | None = None) -> dict[str, Price]:
    """Return the price of every chip by name: of the catalog, or of a YAML file where that has one.

    The file has lines such as `v5e: {on_demand: 1.2, spot: [0.2, 0.3]}`. Raises UserError if it is
    invalid."""
    prices = {name: PRICES.get(name, Price()) for name in CHIPS}
    for name, node in _read_yaml(path).items() if path else ():
        chip = str(name).lower()
        if chip not in CHIPS:
            raise UserError(f"{path}: found {name}, expected one of {', '.join(CHIPS)}")
        if not isinstance(node, dict) or not node:
            raise UserError(f"{path}: {name}: found {node}, expected {{on_demand: 1.2, spot: 0.3}}")
        for key, value in node.items():
            if key not in ("on_demand", "spot"):
                raise UserError(f"{path}: {name}.{key}: found {key}, expected on_demand or spot")
            prices[chip] = replace(prices[chip], **{key: _parse_range(value, f"{path}: {name}.{key}")})
    return prices


def list_own_prices(path: Path | None) -> set[tuple[str, str]]:
    """List the (chip, terms) that a file of prices sets, such as ("v5e", "spot"). Empty without a file."""
    tree = _read_yaml(path) if path else {}
    return {(str(name).lower(), str(key)) for name, node in tree.items() for key in node}


def _read_yaml(path: Path) -> dict[Any, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"{path}: found no file, expected a .yaml file of prices") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: found a file that is not text, expected a .yaml file of prices") from None
    except OSError as error:
        raise UserError(f"{path}: found {error.strerror}, expected a .yaml file of prices") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: found no prices, expected lines such as v5e: {{on_demand: 1.2, spot: 0.3}}")
    return tree


def _parse_range(value: Any, location: str) -> Range:
    ends = value if isinstance(value, list) and len(value) == 2 else [value, value]
    numbers = [end for end in ends if isinstance(end, int | float) and not isinstance(end, bool)]
    if len(numbers) < 2 or not 0 <= numbers[0] <= numbers[1] < math.inf:
        raise UserError(f"{location}: found {value}, expected dollars per hour, or [low, high]")
    return float(numbers[0]), float(numbers[1])
