"""Results of `headrace plan` for several slices, each row from the real command in a process of its own:
Llama 3 8B compared with MaxText, MaxText's published times, the hardware table of Lunaris, the smallest
slices for Gemma 2 9B at 32k, and 600B parameters. From the repository's root:

    python -m benchmarks.plan [--only NAME]

It takes libtpu and no TPU. MaxText runs in an interpreter of its own, MAXTEXT_PYTHON, which `make bench-plan`
sets up. Because MaxText installs an older libtpu, it is compiled with that and with Headrace's. GB are 1e9
bytes, GiB 2**30, of one chip; CPU seconds are of the command and all its processes. If the plan is uncertain
about its time, for example because a loop's trip count depends on another loop, the table says "about"."""

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.data_measure import measured
from headrace.hardware import slices
from headrace.plan import device_rates, hlo, timing
from headrace.plan.aot import ENVIRONMENT

ROOT = Path(__file__).parent.parent
GIB = 2**30
DOES_NOT_FIT = 3  # exit code of `headrace plan`
MAXTEXT = "MaxText 0.2.5"
HEAD = """\
| what | slice | settings | verdict | arguments GB | temps GB | HBM GiB | step s | MFU | CPU s | target |
|---|---|---|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Row:
    """One plan, and the expected answer."""

    what: str
    recipe: str
    slice: str
    settings: str  # overrides of the recipe
    fits: bool = True
    by: str = "compiler"  # or arithmetic
    most: float | None = None  # bytes of temporaries
    model: str = ""  # overrides of its model, not shown in the table


# Sizes of the Llama family, over the vocabulary, sequence length, batch and optimizer of Lunaris.
SHAPES = {
    "1B": "layers=16 embed=2048 heads=32 kv_heads=8 head_dim=64 mlp=8192",  # Llama 3.2 1B
    "3B": "layers=28 embed=3072 heads=24 kv_heads=8 head_dim=128 mlp=8192",  # Llama 3.2 3B
    "7B": "layers=32 embed=4096 heads=32 kv_heads=32 head_dim=128 mlp=11008",  # Llama 2 7B
    "13B": "layers=40 embed=5120 heads=40 kv_heads=40 head_dim=128 mlp=13824",  # Llama 2 13B
    "30B": "layers=60 embed=6656 heads=52 kv_heads=52 head_dim=128 mlp=17920",  # Llama 33B
}


def lunaris(size: str, where: str, settings: str) -> Row:
    shape = " ".join(f"model.{item}" for item in SHAPES[size].split())
    return Row(size, "lunaris-270m", where, settings, model=shape)


def gemma(where: str, mesh: str, more: str = "", *, fits: bool = True, by: str = "compiler") -> Row:
    """One row of 32,768 tokens per microbatch, all at once."""
    sizes = dict(zip(("fsdp", "tensor", "context"), mesh.split("x"), strict=True))
    split = " ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
    batch = f"batch.sequences={sizes['fsdp']} batch.microbatches=1"
    return Row("Gemma 2 9B, 32k", "gemma2-9b-32k", where, f"{split} {batch} {more}".strip(), fits, by)


@dataclass(frozen=True)
class Published:
    """A step time that MaxText publishes for its own program. Ours is planned with as many rows per chip at
    two depths, because not all of it fits with what we save, and extrapolated to all layers."""

    what: str
    slice: str
    layers: int
    seconds: float
    settings: str
    model: str = ""
    near: bool = True  # whether ours has to be within 15 %
    depths: tuple[int, int] = (4, 8)


WIDE = "model.embed=8192 model.heads=64 model.mlp=28672"
# tpu-recipes of AI-Hypercomputer, commit c8cfe2f; Llama 2 70B from its 65 % MFU, with attention in full.
PUBLISHED = [
    Published("Llama 3.1 8B", "v6e-16", 32, 3.393, "batch.sequences=48 compute.remat=full"),
    Published("Mistral 7B", "v6e-8", 32, 6.320, "batch.sequences=48 compute.remat=full", "model.vocab=32000"),
    Published("Llama 3.1 70B", "v6e-256", 80, 42.66, "batch.sequences=1280 compute.remat=full", WIDE),
    Published(
        "Llama 2 70B",
        "v5p-128",
        80,
        24.4,
        "batch.sequences=256 compute.remat=full",
        f"{WIDE} model.vocab=32000 data.sequence_length=4096",
    ),
    *(
        Published(
            "Llama 3.1 405B",
            "v5p-1024",
            126,
            131.474,
            f"mesh.fsdp=64 mesh.tensor=8 batch.sequences=1024 compute.remat={remat}",
            "model.embed=16384 model.heads=128 model.mlp=53248",
            near,
            depths,
        )
        for remat, near, depths in (("dots", True, (2, 4)), ("full", False, (4, 8)))
    ),
]
TABLES: dict[str, list[Any]] = {
    "published": PUBLISHED,
    "maxtext": [  # each with the slice's 16 chips
        Row(
            "Llama 3 8B",
            "llama3-8b",
            where,
            "batch.sequences=32 batch.microbatches=1 compute.remat=full",
            most=most,
        )
        for where, most in (("v5p-32", 12e9), ("v6e-16", None), ("v4-32", None))
    ],
    "lunaris": [
        lunaris("1B", "v3-8", "batch.microbatches=8"),
        lunaris("3B", "v3-8", "batch.microbatches=8"),
        lunaris("1B", "v4-8", "batch.microbatches=8"),
        lunaris("3B", "v4-8", "batch.microbatches=8"),
        lunaris("7B", "v4-32", "batch.microbatches=4"),
        lunaris("13B", "v4-64", "batch.microbatches=2"),
        lunaris("30B", "v4-128", "batch.microbatches=2"),
    ],
    # The smallest slice of each generation, and the next smaller one with the settings closest to fitting.
    "gemma": [
        gemma("v2-128", "4x8x4", "loss.chunk_size=512"),
        gemma("v2-32", "2x8x2", "loss.chunk_size=512", fits=False),
        gemma("v3-32", "2x8x2"),
        gemma("v3-8", "1x8x1", fits=False, by="arithmetic"),
        gemma("v4-16", "2x4x1"),
        gemma("v4-8", "1x4x1", fits=False, by="arithmetic"),
        gemma("v5e-32", "2x8x2"),
        gemma("v5e-16", "2x8x1", "loss.chunk_size=512", fits=False),
        gemma("v5p-8", "1x4x1"),
        gemma("v6e-8", "1x8x1"),
        gemma("v6e-4", "1x4x1", fits=False, by="arithmetic"),
        gemma("tpu7x-2", "1x2x1"),
    ],
    "large": [
        Row("600B dense", "dense-600b", "v5p-512", "mesh.fsdp=64 mesh.tensor=4 batch.microbatches=32"),
        Row(
            "600B dense",
            "dense-600b",
            "v5p-256",
            "mesh.fsdp=16 mesh.tensor=8 batch.microbatches=128",
            fits=False,
        ),
        Row("600B dense", "dense-600b", "v4-32", "", fits=False, by="arithmetic"),
        Row("Llama 3 8B", "llama3-8b", "2xv5e-256", "mesh.data=2 batch.microbatches=1"),
    ],
}


@dataclass(frozen=True)
class Found:
    """The result of a plan, or of MaxText. Bytes are per chip."""

    fits: bool
    by: str
    arguments: int
    temporaries: int
    hbm: int
    limit: int | None = None
    step: float | None = None
    mfu: float | None = None
    doubts: tuple[str, ...] = ()  # what the time does not include


@dataclass(frozen=True)
class Line:
    """A measured row. `missed` says what was missed, and is None if nothing was expected."""

    what: str
    slice: str
    settings: str
    found: Found | None
    cpu: float
    missed: str | None = None
    note: str = ""


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--only", choices=list(TABLES), help="one of the tables")
    options.add_argument("--json", type=Path, help="a file for the results")
    args = options.parse_args()
    lines: list[Line] = []
    for name, rows in TABLES.items():
        if args.only in (None, name):
            print(f"\n{name}\n{HEAD}", flush=True)
            for line in measure(name, rows):
                print(shown(line), flush=True)
                lines.append(line)
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(line) for line in lines], indent=2) + "\n")
    missed = [line for line in lines if line.missed]
    print(f"\n{sum(line.missed == '' for line in lines)} targets met, {len(missed)} missed")
    return 1 if missed else 0


def measure(name: str, rows: list[Any]) -> Iterator[Line]:
    for row in rows:
        yield extended(row) if name == "published" else plan(row)
        if name == "maxtext":
            for compiler, library in (("its own libtpu", None), ("the libtpu of Headrace", libtpu())):
                for tiling in ("", "num_vocab_tiling=8"):
                    yield maxtext(row.slice, compiler, library, tiling)


def plan(row: Row) -> Line:
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        out = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "headrace", "plan", f"recipes/{row.recipe}.yaml"]
        command += ["--slice", row.slice, "--json", str(out), *row.model.split(), *row.settings.split()]
        done, cost = measured(lambda: run(command, library=libtpu()))
        told = json.loads(out.read_text())[0] if out.exists() else None
    if told is None:
        return Line(row.what, row.slice, row.settings, None, cost.cpu, last(done))
    found = Found(
        fits=told["fits"],
        by=told["by"],
        arguments=told["argument_bytes"],
        temporaries=told["temp_bytes"],
        hbm=told["hbm_bytes"],
        limit=told["hbm_limit_bytes"],
        step=told["step_seconds"],
        mfu=told["mfu"],
        doubts=tuple(told["doubts"]),
    )
    return Line(row.what, row.slice, row.settings, found, cost.cpu, faults(row, found, done.returncode))


def extended(row: Published) -> Line:
    """A line with only the time."""
    settings = f"{row.settings} batch.microbatches=1"
    lines = [
        plan(Row(row.what, "llama3-8b", row.slice, settings, model=f"{row.model} model.layers={depth}"))
        for depth in row.depths
    ]
    cpu, line = sum(one.cpu for one in lines), partial(Line, row.what, row.slice, settings)
    seconds = [one.found.step for one in lines if one.found and one.found.step]
    if len(seconds) < 2:
        return line(None, cpu, "; ".join(one.missed or "" for one in lines))
    few, more = row.depths
    layer = (seconds[1] - seconds[0]) / (more - few)
    step = seconds[0] + layer * (row.layers - few)
    off = step / row.seconds - 1
    told = f"{step:.4g} s, MaxText {row.seconds} s: {off:+.1%}"
    return line(None, cpu, ("" if abs(off) <= 0.15 else told) if row.near else None, told)


def faults(row: Row, found: Found, code: int) -> str:
    """How an answer differs from the expected one; empty if it does not."""
    wrong = []
    if (found.fits, code) != ((True, 0) if row.fits else (False, DOES_NOT_FIT)):
        wrong.append(f"expected: it {'fits' if row.fits else 'does not fit'}, exit code {code}")
    if found.by != row.by:
        wrong.append(f"expected the answer of {row.by}")
    if row.most is not None and found.temporaries > row.most:
        wrong.append(f"expected at most {row.most / 1e9:g} GB of temporaries")
    return "; ".join(wrong)


def maxtext(where: str, compiler: str, library: str | None, tiling: str) -> Line:
    """The same model, slice, batch, dtypes and remat, with MaxText's defaults for everything else, and its
    program timed as ours is."""
    python = os.environ.get("MAXTEXT_PYTHON", str(ROOT / ".venv/maxtext/bin/python"))
    settings = f"per_device_batch_size=2 max_target_length=8192 {tiling}".strip()
    line = partial(Line, f"{MAXTEXT}, {compiler}", where, settings)
    if not Path(python).exists():
        return line(None, 0.0, note=f"not found: {python}; make .venv/maxtext/ready, or set MAXTEXT_PYTHON")
    command = [python, "-m", "maxtext.trainers.pre_train.train_compile", "model_name=llama3-8b"]
    command += [f"compile_topology={where}", "compile_topology_num_slices=1", *settings.split()]
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        done, cost = measured(lambda: run(command, library=library, folder=folder, dump=f"{folder}/dump"))
        programs = sorted(Path(folder, "dump").glob("*jit_train_step*after_codegen.txt"))
        time = counted(programs[-1], where) if programs else None
    size = dict(re.findall(r"\b(\w+)_size_in_bytes=(\d+)", done.stdout.rpartition("Memory analysis:")[2]))
    if not size:
        return line(None, cost.cpu, note=last(done))
    code, given, back, shared, temp = (
        int(size[part]) for part in ("generated_code", "argument", "output", "alias", "temp")
    )
    hbm = given + back - shared + temp + code
    seconds, doubts = (time.seconds, time.caveats) if time else (None, ())
    return line(Found(True, "compiler", given, temp, hbm, step=seconds, doubts=doubts), cost.cpu)


def counted(program: Path, where: str) -> timing.Breakdown:
    """The time of a program whose weights are sharded over all chips, along the torus."""
    os.environ.update(ENVIRONMENT)  # before JAX reads it
    os.environ.setdefault("TPU_LIBRARY_PATH", libtpu() or "")
    from jax.experimental import mesh_utils, topologies

    one = slices.parse_slice(where)
    chips = topologies.get_topology_desc(one.topology_name, "tpu", **one.topology_options).devices
    ring = mesh_utils.create_device_mesh((len(chips),), chips)
    return timing.time_step(hlo.read_program(program), device_rates.make_rates(one, list(ring)))


def run(
    command: list[str], *, library: str | None, folder: str | Path = ROOT, dump: str = ""
) -> subprocess.CompletedProcess[str]:
    """With `library` for TPUs, else the one of the interpreter; programs go to `dump`."""
    environment = {key: value for key, value in os.environ.items() if key != "TPU_LIBRARY_PATH"}
    environment |= ENVIRONMENT
    if dump:
        environment["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_dump_hlo_as_text"
    if library is not None:
        environment["TPU_LIBRARY_PATH"] = library
    return subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def libtpu() -> str | None:
    """The compiler that Headrace's plans use: one that was named, the one of `make .venv/libtpu`, or an
    installed package."""
    alone = ROOT / ".venv/libtpu/libtpu/libtpu.so"
    if named := os.environ.get("TPU_LIBRARY_PATH") or (alone.is_file() and str(alone)):
        return named
    package = importlib.util.find_spec("libtpu")
    return package and str(Path(package.submodule_search_locations[0]) / "libtpu.so")


def last(done: subprocess.CompletedProcess[str]) -> str:
    return f"exit code {done.returncode}: {(done.stdout.strip().splitlines() or ['no output'])[-1][:200]}"


def shown(line: Line) -> str:
    """A row in Markdown."""
    cells = [line.what, line.slice, line.settings, *["-"] * 6]
    if found := line.found:
        verdict = "fits" if found.fits else "does not fit"
        cells[3] = verdict + (", by arithmetic" if found.by == "arithmetic" else "")
        cells[4:6] = [f"{size / 1e9:.2f}" for size in (found.arguments, found.temporaries)]
        cells[6] = f"{found.hbm / GIB:.2f}" + (f" of {found.limit / GIB:.2f}" if found.limit else "")
        about = "about " if found.doubts else ""
        if found.step is not None:
            cells[7] = f"{about}{found.step:.3g}"
        if found.mfu is not None:
            cells[8] = f"{about}{found.mfu:.1%}"
    end = {None: "", "": "met"}.get(line.missed, f"MISSED: {line.missed}")
    last = ", ".join(part for part in (line.note, end) if part)
    return "| " + " | ".join([*cells, f"{line.cpu:.0f}", last]) + " |"


if __name__ == "__main__":
    sys.exit(main())
