"""How step time and compile time grow with the layers, the length of rows and the vocabulary.

    python -m benchmarks.scaling           one GPU, about 2 minutes; on a CPU add --small
    python -m benchmarks.scaling --plot scaling.json docs/performance/scaling.png

Random tokens, the same number in every batch of a sweep. Layers are compiled one after the other (unrolled)
and as the body of one loop (scanned, compute.unroll=1): the program of a loop has the same size whatever its
depth. The curves are lists of points in the JSON file, and a picture if matplotlib is installed, here or on
another machine."""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import steps

RECIPE = "recipes/llama3.2-1b.yaml"
Point = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """The fixed sizes of the sweeps, and their ranges."""

    settings: dict[str, Any]
    tokens: int
    length: int
    depth: int  # of the sweeps over lengths and vocabularies
    layers: tuple[int, ...]
    lengths: tuple[int, ...]
    vocabularies: tuple[int, ...]


LARGE = Shape(
    {"model.embed": 1024, "model.heads": 16, "model.kv_heads": 8, "model.mlp": 4096, "model.vocab": 32_768},
    tokens=32_768,
    length=2048,
    depth=4,
    layers=(2, 4, 8, 16, 32),
    lengths=(1024, 2048, 4096, 8192, 16_384, 32_768),
    vocabularies=(16_384, 32_768, 65_536, 131_072, 262_144),
)
SMALL = Shape(
    {"model.embed": 64, "model.heads": 4, "model.kv_heads": 2, "model.mlp": 192, "model.vocab": 1024}
    | {"model.head_dim": 16, "compute.dtype": "float32"},
    tokens=1024,
    length=128,
    depth=2,
    layers=(2, 4, 8, 16, 32),
    lengths=(64, 128, 256, 512, 1024),
    vocabularies=(1024, 2048, 4096, 8192, 16_384),
)


def main() -> int:
    args = parse()
    if args.plot:
        source, target = map(Path, args.plot)
        plot(json.loads(source.read_text()), target)
        return 0
    points = []
    for point in measured(SMALL if args.small else LARGE, args):
        points.append(point)
        print(line(point), flush=True)
    import jax

    found = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "points": points}
    Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    print(f"\n{verdict(points)}\nall points are in {args.json}")
    if importlib.util.find_spec("matplotlib") is None:
        print(
            f"matplotlib is not installed; elsewhere run: "
            f"python -m benchmarks.scaling --plot {args.json} {args.picture}"
        )
    else:
        plot(found, Path(args.picture))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="shapes for a CPU")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--sweeps", nargs="+", default=list(SWEEPS), choices=SWEEPS)
    parser.add_argument("--json", default="scaling.json", help="file for the points")
    parser.add_argument("--picture", default="docs/performance/scaling.png")
    parser.add_argument("--plot", nargs=2, metavar=("JSON", "PNG"), help="plot earlier results")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="changes to the recipe")
    return parser.parse_args()


SWEEPS = ("layers", "lengths", "vocabularies")


def measured(shape: Shape, args: argparse.Namespace) -> Iterator[Point]:
    """The points, one after the other. The first is measured twice and reported once, because the compiler
    caches what it finds out about this chip."""
    tasks = list(sweeps(shape, args.sweeps))
    for warming, (curve, x, settings) in [(True, tasks[0]), *((False, task) for task in tasks)]:
        length = settings["data.sequence_length"]
        rows = {"batch.sequences": shape.tokens // length, "model.head_dim": 64}
        try:
            cfg = steps.load(RECIPE, rows | shape.settings | settings, args.set)
            row = steps.headrace_steps(cfg, args.steps)
            del row["memory"]  # the maximum over all points so far, because one process measures them all
        except Exception as error:  # out of memory, for example: the others are still useful
            row = {"failed": steps.describe_error(error)}
        if not warming:
            yield {"curve": curve, "x": x} | row


def sweeps(shape: Shape, wanted: list[str]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Curve, position on it, and the settings that it changes."""
    usual = {"data.sequence_length": shape.length, "model.layers": shape.depth}
    if "layers" in wanted:
        for layers in shape.layers:
            yield "scanned", layers, usual | {"model.layers": layers, "compute.unroll": 1}
        for layers in shape.layers:
            yield "unrolled", layers, usual | {"model.layers": layers, "compute.unroll": layers}
    if "lengths" in wanted:
        for length in shape.lengths:
            yield "length", length, usual | {"data.sequence_length": length}
    if "vocabularies" in wanted:
        for vocabulary in shape.vocabularies:
            yield "vocabulary", vocabulary, usual | {"model.vocab": vocabulary}


def line(point: Point) -> str:
    where = f"{point['curve']:12}{point['x']:9,}"
    if "failed" in point:
        return f"{where}   {point['failed']}"
    return (
        f"{where}{point['step_seconds'] * 1e3:10.2f} ms per step "
        f"{point['tokens_per_second']:10,.0f} tokens/s   {making(point):6.2f} s to trace and compile "
        f"({point['making_cpu']:6.2f} of CPU) {point['program_lines']:7,} lines"
    )


def making(point: Point) -> float:
    return point["tracing"] + point["compiling"]


def verdict(points: list[Point]) -> str:
    """The result of the sweep over layers for compiling: wall time, CPU time and size of the program."""
    said = []
    for curve in ("scanned", "unrolled"):
        found = [point for point in points if point["curve"] == curve and "failed" not in point]
        if len(found) > 1:
            first, last = found[0], found[-1]
            clock = making(last) / making(first)
            cpu, lines = (last[key] / first[key] for key in ("making_cpu", "program_lines"))
            said.append(
                f"{curve}, {last['x']} layers instead of {first['x']}: {clock:.2f} times as long to trace "
                f"and compile, {cpu:.2f} times the CPU time, {lines:.2f} times the lines of program"
            )
    return "\n".join(said)


def plot(found: dict[str, Any], target: Path) -> None:
    """Panels of step times over layers, lengths and vocabularies, and one of compile times."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    import matplotlib.pyplot as pyplot
    from matplotlib.ticker import FuncFormatter

    figure, axes = pyplot.subplots(1, 4, figsize=(15, 3.6), constrained_layout=True)
    panels = (
        ("layers", ("scanned", "unrolled"), "step_seconds", "ms per step"),
        ("layers", ("scanned", "unrolled"), "compiling", "s to trace and compile"),
        ("tokens per row, as many in a batch", ("length",), "step_seconds", "ms per step"),
        ("vocabulary", ("vocabulary",), "step_seconds", "ms per step"),
    )
    for panel, (x_label, curves, key, y_label) in zip(axes, panels, strict=True):
        for curve in curves:
            points = [point for point in found["points"] if point["curve"] == curve and "failed" not in point]
            if key == "compiling":
                heights = [making(point) for point in points]
            else:
                heights = [1e3 * point[key] for point in points]
            panel.plot([point["x"] for point in points], heights, "o-", label=curve)
            panel.set_xticks([point["x"] for point in points][-3:])
        panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short(x)))
        panel.set(xlabel=x_label, ylabel=y_label)
        panel.set_xlim(left=0)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        if len(curves) > 1:
            panel.legend()
    figure.suptitle(f"{found['device']}, jax {found['jax']}")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=120)
    print(f"wrote {target}")


def short(x: float) -> str:
    return f"{x / 1024:g}k" if x >= 1024 else f"{x:g}"


if __name__ == "__main__":
    sys.exit(main())
