"""The data pipeline against its peers, in one run: tokenizing, training of tokenizers, all stages end to end,
packing, shuffling, streaming, conversations, memory. From the repository's root: python -m benchmarks.data

Rates are by CPU time, which other work on the machine changes little, and by wall time. Peers run in
interpreters of their own, PEERS_PYTHON and STREAMING_PYTHON, which `make bench-data` sets up. Slow peers get
a part of the text."""

import argparse
import dataclasses
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import data_rows, data_text
from benchmarks.data_measure import Line, adopt_orphans

ROOT = Path(__file__).parent.parent
DOCUMENTS = 2_000_000
TOKENS = 300_000_000


def main() -> int:
    options = parse()
    adopt_orphans()
    peers = os.environ.get("PEERS_PYTHON", str(ROOT / ".venv/peers/bin/python"))
    streaming = os.environ.get("STREAMING_PYTHON", str(ROOT / ".venv/streaming/bin/python"))
    peers, streaming = (path if Path(path).exists() else sys.executable for path in (peers, streaming))
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"{cores} cores, Python {platform.python_version()}, {options.mb:g} MB of text, load {load:.1f}")
    lines: list[Line] = []
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=options.folder) as folder:
        for name, part in parts(Path(folder), options, peers, streaming).items():
            if options.only in (None, name):
                found = part()
                show(name, found)
                lines += found
    if options.json:
        Path(options.json).write_text(json.dumps([dataclasses.asdict(line) for line in lines], indent=2))
    missed = [line for line in lines if line.met is False]
    print(f"\n{sum(line.met is True for line in lines)} targets met, {len(missed)} missed")
    return 1 if missed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=2000, help="megabytes of text")
    parser.add_argument("--only", help="run only one part: " + ", ".join(NAMES))
    parser.add_argument("--memory-gb", type=float, default=0, help="size of the corpus for the memory part")
    parser.add_argument("--json", help="a file for the results")
    parser.add_argument("--folder", help="folder for intermediate files (default: the system's)")
    options = parser.parse_args()
    if options.only not in (None, *NAMES):
        parser.error(f"--only: {options.only} is not one of {', '.join(NAMES)}")
    return options


NAMES = ("tokenizing", "training", "end-to-end", "packing", "shuffle", "stream", "chat", "memory")


def parts(
    folder: Path, options: argparse.Namespace, peers: str, streaming: str
) -> dict[str, Callable[[], list[Line]]]:
    bench = data_text.Bench(folder, options.mb, peers, streaming)
    interpreters = data_rows.Interpreters(peers, streaming)
    tokens = min(int(options.mb * 1e6), TOKENS)
    made: dict[str, Callable[[], list[Line]]] = {
        "training": lambda: data_text.training(bench),
        "tokenizing": lambda: data_text.tokenizing(bench),
        "end-to-end": lambda: data_text.end_to_end(bench),
        "packing": lambda: data_rows.packing(DOCUMENTS, interpreters, folder),
        "shuffle": lambda: data_rows.shuffling(tokens, folder / "shuffle"),
        "stream": lambda: data_rows.streaming(tokens, interpreters, folder / "stream"),
        "chat": lambda: data_text.chats(bench),
    }
    if options.memory_gb:
        made["memory"] = lambda: data_text.memory(bench, options.memory_gb)
    assert set(made) <= set(NAMES)
    return made


def show(name: str, lines: list[Line]) -> None:
    """Print the lines. Ratios are ours over the peer's, by CPU time and by wall time."""
    print(f"\n{name}")
    head = ("", "ours", "peer", "ratio", "clock", "target", "")
    rows = [head, *map(cells, lines)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def cells(line: Line) -> tuple[str, ...]:
    ratios = ["" if ratio is None else f"{ratio:.3g}x" for ratio in (line.ratio, line.ratio_wall)]
    verdict = {True: "met", False: "MISSED", None: ""}[line.met]
    end = " ".join(part for part in (verdict, f"({line.note})" if line.note else "") if part)
    return (line.what, line.ours, line.peer, *ratios, line.target, end)


if __name__ == "__main__":
    sys.exit(main())
