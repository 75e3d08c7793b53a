"""What an accelerator can do and what an hour of it costs: one dated table. Sources by their short names:
"Google Cloud: TPU v5p" is docs.cloud.google.com/tpu/docs/v5p, and so on; "scaling book" is
jax-ml.github.io/scaling-book; "JAX" is tpu_info.py of jax 0.10.2; "libtpu" is the answer of libtpu 0.0.51."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from headrace.errors import UserError

# All numbers were checked against their sources on 2026-11-15.
PRICES_DATE = "2026-08-22"  # of the catalogue that the prices are from

MIB, GIB = 2**20, 2**30
Range = tuple[float, float]  # low and high; the same number twice where there is one


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One accelerator. All numbers are of a chip; JAX may see it as two devices that have half each."""

    name: str
    kinds: tuple[str, ...] = ()  # what JAX calls a device of it; GPUs are told by their names
    flops: float  # dense bf16 matrix FLOP/s
    fp8: float | None = None  # and in 8 bits, where that is faster
    int8: float | None = None
    hbm: int  # bytes
    usable: int  # bytes that a program can have
    bandwidth: float  # of HBM, bytes/s
    cores: int = 1  # TensorCores: what the number in a slice's name counts
    devices: int = 1  # that JAX shows, with `config`
    config: str | None = None  # chip_config_name of the topology
    dimensions: int  # of the torus that joins chips; 0 for a switch that joins those of one host
    link: float  # bytes/s one way of one link; behind a switch all that leaves a chip
    network: float | None  # bytes/s one way from a chip to the data centre; None where slices are not joined
    host: int = 4  # chips of a machine
    clock: float | None = None  # Hz

    def rate(self, products: str) -> float | None:
        """FLOP/s of products in a format of products/; None if it gains nothing by it."""
        products = "int8" if products == "ternary" else products
        return self.flops if products == "compute" else getattr(self, products)

    @property
    def is_tpu(self) -> bool:
        return self.dimensions > 0

    @property
    def interconnect(self) -> float:
        """Bytes/s one way over all links of a chip: two for each dimension of the torus."""
        return self.link * max(1, 2 * self.dimensions)


@dataclass(frozen=True)
class Price:
    """Dollars for an hour of a chip; None where it is not known."""

    on_demand: Range | None = None
    spot: Range | None = None


# `usable` is the "available HBM" that libtpu names when a program is too big: GiB of a device, to two places.
# `link` is Google's "bidirectional ICI bandwidth per chip", shared out among both ways and all links.
TPUS = (
    Chip(
        name="v2",
        kinds=("TPU v2",),
        flops=45e12,  # Wikipedia; JAX has 46, which is 2 x 128 x 128 x 2 x 700 MHz
        hbm=16 * GIB,  # Google Cloud: TPU types and zones (64 GiB for the 4 chips of v2-8)
        usable=int(2 * 7.48 * GIB),  # libtpu
        bandwidth=700e9,  # Norrie et al., IEEE Micro 2021; JAX has 716, Wikipedia 600
        cores=2,
        devices=2,  # libtpu; it refuses megacore
        dimensions=2,
        link=62e9,  # Norrie et al., IEEE Micro 2021: 500 Gbit/s each way
        network=None,  # Google Cloud: Multislice is for v4 or later
        clock=0.7e9,  # Wikipedia
    ),
    Chip(
        name="v3",
        kinds=("TPU v3",),
        flops=123e12,  # Google Cloud: TPU v3; scaling book and JAX have 140
        hbm=32 * GIB,  # Google Cloud: TPU v3
        usable=int(2 * 15.48 * GIB),  # libtpu
        bandwidth=900e9,  # Google Cloud: TPU v3; JAX has 825
        cores=2,
        devices=2,  # libtpu; it refuses megacore
        dimensions=2,
        # Google Cloud: TPU v3: 340 TB/s of all-reduce for 1,024 chips of 4 links. The bisection
        # there (6.4 TB/s over 64 links) and the scaling book make it 100.
        link=83e9,
        network=None,  # Google Cloud: Multislice is for v4 or later
        clock=0.94e9,  # Wikipedia
    ),
    Chip(
        name="v4",
        kinds=("TPU v4",),
        flops=275e12,  # Google Cloud: TPU v4
        hbm=32 * GIB,  # Google Cloud: TPU v4
        usable=int(30.75 * GIB),  # libtpu; 15.25 a core without megacore
        bandwidth=1200e9,  # Google Cloud: TPU v4; JAX has 1230
        cores=2,
        config="megacore",  # without it libtpu shows two devices a chip, which real machines do not
        dimensions=3,
        # Scaling book; Google Cloud: TPU v4: 1.1 PB/s of all-reduce for 4,096 chips of 6 links.
        # Jouppi et al., ISCA 2023, have 50.
        link=45e9,
        network=6.25e9,  # scaling book: about 25 GB/s a host, which has 4 chips; no page of Google's for v4
        clock=1.05e9,  # Wikipedia
    ),
    Chip(
        name="v5e",
        kinds=("TPU v5 lite", "TPU v5e"),
        flops=197e12,  # Google Cloud: TPU v5e
        int8=393e12,  # the same; JAX has 394
        hbm=16 * GIB,  # Google Cloud: TPU v5e
        usable=int(15.75 * GIB),  # libtpu
        bandwidth=819e9,  # Google Cloud: TPU v5e; a later edition of it has "800 GiBps", which is 859
        dimensions=2,
        link=50e9,  # Google Cloud: TPU v5e (400 GB/s); scaling book 50, in its first edition 45
        network=3.125e9,  # Google Cloud: TPU v5e: 6.4 Tbit/s for a pod of 256, 2 x 100 Gbit/s for 8 chips
        clock=1.5e9,  # no page has it; 197 TFLOP/s from 4 x 128 x 128 x 2 a cycle (Google Cloud: four MXUs)
    ),
    Chip(
        name="v5p",
        kinds=("TPU v5", "TPU v5p"),
        flops=459e12,  # Google Cloud: TPU v5p
        int8=918e12,  # JAX; by libtpu's cycles 1.98 times bf16. In fp8 459, Google Cloud: TPU7x
        hbm=96 * GIB,  # scaling book; JAX has 95.9, Google Cloud: TPU v5p 95, less than libtpu gives away
        usable=int(95.73 * GIB),  # libtpu
        bandwidth=2765e9,  # Google Cloud: TPU v5p, lately as 2575 GiB/s; JAX has 2460
        cores=2,
        dimensions=3,
        link=100e9,  # Google Cloud: TPU v5p (1200 GB/s); scaling book 100, in its first edition 90
        network=6.25e9,  # Google Cloud: TPU v5p: 50 Gbit/s a chip
        clock=1.75e9,  # Wikipedia; 459 TFLOP/s from 8 x 128 x 128 x 2 a cycle
    ),
    Chip(
        name="v6e",
        kinds=("TPU v6 lite", "TPU v6e"),
        flops=918e12,  # Google Cloud: TPU v6e; JAX and scaling book have 920
        int8=1836e12,  # JAX has 1840; by libtpu's cycles 1.33 times bf16. In fp8 918, Google Cloud: TPU7x
        hbm=32 * GIB,  # Google Cloud: TPU v6e
        usable=int(31.24 * GIB),  # libtpu
        bandwidth=1638e9,  # Google Cloud: TPU7x, which compares it; its own page has 1600, earlier 1640
        dimensions=2,
        link=100e9,  # Google Cloud: TPU v6e (800 GB/s); its first edition: 3584 Gbit/s, 112 GB/s a link
        network=12.5e9,  # Google Cloud: TPU7x: 100 Gbit/s a chip; TPU v6e: 25.6 Tbit/s for a pod of 256
    ),
    Chip(
        name="tpu7x",
        kinds=("TPU7x",),
        flops=2307e12,  # Google Cloud: TPU7x
        fp8=4614e12,  # the same; in int8 no more than in bf16, by libtpu's cycles
        hbm=192 * GIB,  # Google Cloud: TPU7x
        usable=int(2 * 94.74 * GIB),  # libtpu
        bandwidth=7380e9,  # Google Cloud: TPU7x; JAX has 7400
        cores=2,
        devices=2,  # libtpu; it refuses megacore. Google Cloud: TPU7x: two chiplets, two devices
        dimensions=3,
        link=100e9,  # Google Cloud: TPU7x (1200 GB/s)
        network=12.5e9,  # Google Cloud: TPU7x: 100 Gbit/s a chip
    ),
)

# The SXM boards, eight to a machine. `hbm` is in NVIDIA's "GB", which are GiB; `usable` is JAX's share of
# what nvidia-smi shows. `link` is half of NVIDIA's NVLink figure, which adds both ways; `network` is that of
# the one card that each GPU has.
JAX_SHARE = 0.75  # of a GPU's memory, unless XLA_CLIENT_MEM_FRACTION says otherwise
GPUS = (
    Chip(
        name="a100",
        flops=312e12,  # NVIDIA A100 data sheet
        hbm=80 * GIB,  # the same; there is one of 40 GB too
        usable=int(81920 * MIB * JAX_SHARE),
        bandwidth=2039e9,  # the same
        dimensions=0,
        link=300e9,  # the same; scaling book
        network=25e9,  # NVIDIA DGX A100 data sheet: 200 Gbit/s (unchecked)
        host=8,
    ),
    Chip(
        name="h100",
        flops=989e12,  # NVIDIA H100 data sheet, half of its figure with sparsity
        fp8=1979e12,  # the same
        hbm=80 * GIB,  # the same
        usable=int(81559 * MIB * JAX_SHARE),
        bandwidth=3350e9,  # the same
        dimensions=0,
        link=450e9,  # the same; scaling book
        network=50e9,  # NVIDIA DGX BasePOD: ConnectX-7, 400 Gbit/s
        host=8,
    ),
    Chip(
        name="h200",
        flops=989e12,  # NVIDIA H200 data sheet, half of its figure with sparsity; about 790 measured
        fp8=1979e12,  # the same
        hbm=141 * GIB,  # the same
        usable=int(143771 * MIB * JAX_SHARE),
        bandwidth=4800e9,  # the same; about 4,300 measured
        dimensions=0,
        link=450e9,  # the same; scaling book
        network=50e9,  # NVIDIA DGX BasePOD: ConnectX-7, 400 Gbit/s
        host=8,
    ),
    Chip(
        name="b200",
        flops=2250e12,  # NVIDIA Blackwell brief, HGX at 1,000 W; 2,500 in the GB200
        fp8=4500e12,  # the same
        hbm=180 * GIB,  # NVIDIA DGX B200 user guide: 1,440 GB for 8; others have 192
        usable=int(183359 * MIB * JAX_SHARE),
        bandwidth=8000e9,  # scaling book
        dimensions=0,
        link=900e9,  # scaling book; NVIDIA DGX B200 user guide: 14.4 TB/s for 8, both ways
        network=50e9,  # NVIDIA DGX B200 user guide: ConnectX-7, 400 Gbit/s
        host=8,
    ),
)
CHIPS = {chip.name: chip for chip in TPUS + GPUS}

# Dollars a chip-hour in the United States, from Google Cloud's catalogue of PRICES_DATE: the lowest and the
# highest of all regions there (the dearest is us-south1; what is elsewhere may cost more).
PRICES = {
    "v2": Price(on_demand=(1.13, 1.50)),
    "v3": Price(on_demand=(2.00, 2.20), spot=(0.51, 0.66)),
    "v4": Price(on_demand=(3.22, 3.22), spot=(0.92, 0.92)),
    "v5e": Price(on_demand=(1.20, 1.42), spot=(0.18, 0.78)),
    "v5p": Price(on_demand=(4.20, 4.78), spot=(0.64, 1.53)),
    "v6e": Price(on_demand=(2.70, 2.70), spot=(0.27, 1.78)),
}

LESSER = {"Laptop", "MIG", "NVL", "PCIe"}  # in a GPU's name: less than the board that the name speaks of


def of_device(kind: str) -> Chip | None:
    """The chip behind a JAX device of this kind; None if it is not in the table."""
    words = set(kind.replace("-", " ").split())
    if words & LESSER:
        return None
    return next((chip for chip in CHIPS.values() if kind in chip.kinds or chip.name.upper() in words), None)


def prices(file: Path | None = None) -> dict[str, Price]:
    """What an hour of each chip costs. Figures from a YAML file take the place of the catalogue's:
    `v5e: {on_demand: 1.2, spot: [0.2, 0.3]}`."""
    found = {name: PRICES.get(name, Price()) for name in CHIPS}
    for name, node in _read(file).items() if file else ():
        chip = str(name).lower()
        if chip not in CHIPS:
            raise UserError(f"{file}: found {name}, expected one of {', '.join(CHIPS)}")
        if not isinstance(node, dict) or not node:
            raise UserError(f"{file}: {name}: found {node}, expected {{on_demand: 1.2, spot: 0.3}}")
        for key, value in node.items():
            if key not in ("on_demand", "spot"):
                raise UserError(f"{file}: {name}.{key}: found {key}, expected on_demand or spot")
            found[chip] = replace(found[chip], **{key: _range(value, f"{file}: {name}.{key}")})
    return found


def given(file: Path | None) -> set[tuple[str, str]]:
    """Of which chips, and on which terms, a file has prices of its own."""
    tree = _read(file) if file else {}
    return {(str(name).lower(), str(key)) for name, node in tree.items() for key in node}


def _read(file: Path) -> dict[Any, Any]:
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"{file}: found no file, expected a .yaml file of prices") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "a file that is not text"
        raise UserError(f"{file}: found {reason}, expected a .yaml file of prices") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{file}: found no prices, expected lines such as v5e: {{on_demand: 1.2, spot: 0.3}}")
    return tree


def _range(value: Any, where: str) -> Range:
    ends = value if isinstance(value, list) and len(value) == 2 else [value, value]
    numbers = [end for end in ends if isinstance(end, int | float) and not isinstance(end, bool)]
    if len(numbers) < 2 or not 0 <= numbers[0] <= numbers[1] < math.inf:
        raise UserError(f"{where}: found {value}, expected dollars an hour, or [low, high]")
    return float(numbers[0]), float(numbers[1])
