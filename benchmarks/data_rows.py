"""The parts of benchmarks.data that start with tokens: packing, shuffling, streaming."""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data_measure import Line, Missing, Peer, Rate, compare, demand, measured
from headrace.data import pack, shuffle
from headrace.data.dataset import Dataset
from headrace.data.pipeline.pool import WorkerPool
from headrace.data.prefetch import read_ahead
from headrace.data.shards import (
    Index,
    Rows,
    Shard,
    SpecialTokenIds,
    Split,
    open_atomic,
    pack_bits,
    write_rows,
)

LENGTH = 2048
BATCH = 32
SOURCES = 10
DOCUMENT = 600  # tokens, about
ROUNDS = 7
VOCAB = 32768


@dataclass(frozen=True)
class Interpreters:
    peers: str
    streaming: str


def packing(documents: int, interpreters: Interpreters | None, folder: Path) -> list[Line]:
    """Best-fit-decreasing packing of documents of log-normal lengths; those longer than a row are cut to its
    length, because peers do not accept them. Peers get a slice of them, compared by documents per second."""
    lengths = np.random.default_rng(0).lognormal(np.log(DOCUMENT), 1.2, documents).astype(np.int64)
    lengths = np.clip(lengths, 8, LENGTH)
    lines, ours = [], Rate("M documents/s")
    for _ in range(3):
        plan, cost = measured(partial(pack.plan_rows, lengths, LENGTH, "best_fit", 0))
        ours.add(documents / 1e6, cost)
    fill = float(lengths.sum() / (plan.rows * LENGTH))
    seconds = documents / 1e6 / ours.core
    lines.append(demand("packing", f"{documents:,} documents", seconds, 2.0, unit="s", most=True))
    lines.append(demand("packing", "fill", fill, 0.9998, unit="%"))
    if interpreters is None:
        return lines
    np.save(folder / "lengths.npy", lengths)
    for name, how, slice, python in (
        ("best-fit-decreasing by a tree, in Python", "tree", 200_000, sys.executable),
        ("grain, 64 rows open", "grain", 20_000, interpreters.peers),
    ):
        try:
            with Peer.script("packing", python) as peer:
                ask: dict[str, Any] = {"how": how, "lengths": str(folder / "lengths.npy"), "length": LENGTH}
                peer.ask(documents=100, **ask)
                answer, cost = peer.ask(documents=min(slice, documents), **ask)
        except Missing as error:
            lines.append(Line("packing", name, str(ours), str(error)))
            continue
        rate = Rate(ours.unit)
        rate.add(min(slice, documents) / 1e6, cost)
        note = f"fill {answer['fill']:.2%} with {min(slice, documents):,}"
        lines.append(compare("packing", f"vs {name}", ours, rate, note=note))
    return lines


def shuffling(tokens: int, folder: Path, simulated: int = 4_000_000) -> list[Line]:
    """Rows of ten sources, one source after the other, to shards that are on the disk at the end."""
    inputs = make_packed(folder, tokens)
    total = sum(one.rows for one in inputs) * LENGTH / 1e6
    rates = {name: Rate("M tokens/s") for name in ("copied", "one pass", "two passes")}
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(3):
        for name, rate in rates.items():
            made, cost = measured(partial(copy if name == "copied" else run_shuffle, folder, inputs, name))
            rate.add(total, cost)
            if made is not None:
                found[f"ours, {name}"] = made
    wanted = demand("shuffle", "one pass, by wall time", rates["one pass"].wall, 200, unit="M tokens/s")
    lines = [wanted]
    for name in ("one pass", "two passes"):
        what = f"{name}, 2 processes, vs a copy, both with fsync"
        lines.append(compare("shuffle", what, rates[name], rates["copied"]))
    random = np.random.default_rng(0)
    found["uniform permutation"] = measure(random.permutation(simulated))
    for rounds in (1, 2, 3):
        found[f"recursive, rounds: {rounds}"] = measure(recursive(simulated, rounds, random))
    found["files in random order, buffer of 10,000"] = measure(buffered(simulated, 10_000, random))
    return lines + [describe(name, parts) for name, parts in found.items()]


def make_packed(folder: Path, tokens: int) -> list[shuffle.ShuffleInput]:
    (folder / "packed").mkdir(parents=True)
    random, rows = np.random.default_rng(0), max(1, tokens // LENGTH // SOURCES)
    inputs = []
    for source in range(SOURCES):
        shard = write_rows(folder / "packed", f"{source:05d}-train", make_rows(rows, source, random))
        inputs.append(shuffle.ShuffleInput(f"packed/{shard.name}", rows, source))
    return inputs


def make_rows(rows: int, source: int, random: np.random.Generator) -> Rows:
    starts = random.random((rows, LENGTH), np.float32) < 1 / DOCUMENT
    starts[:, 0] = True
    tokens = random.integers(4, VOCAB, (rows, LENGTH), np.uint16)
    return Rows(tokens, pack_bits(starts), None, np.full(rows, source, np.uint16))


def run_shuffle(folder: Path, inputs: list[shuffle.ShuffleInput], way: str) -> list[dict[str, float]]:
    engine, made = WorkerPool("local", 2), []
    row = 2 * LENGTH
    size = sum(one.rows for one in inputs) * row
    passes = shuffle.plan_shuffle(
        inputs,
        folder=str(folder),
        split="train",
        seed=0,
        row_bytes=row,
        bucket_bytes=min(shuffle.BUCKET, size // 4),
        direct_bytes=0 if way == "two passes" else size,
    )
    for one in passes:
        list(engine.run(shuffle.scatter_input, one.scatter))
        made += [result["quality"] for _, result in engine.run(shuffle.gather_bucket, one.gather)]
    return made


def copy(folder: Path, inputs: list[shuffle.ShuffleInput], way: str) -> None:
    """The same bytes in their original order, by one process."""
    for one in inputs:
        for file in sorted(folder.glob(f"{one.name}*.npy")):
            with open_atomic(folder / "copy.npy") as out:
                out.write(file.read_bytes())


def measure(order: np.ndarray) -> list[dict[str, float]]:
    """Mixing of rows that came from ten sources of equal size, in order."""
    sources = order * SOURCES // len(order)
    return [shuffle.measure_shard(order, sources, 0, np.bincount(sources).tolist())]


def describe(name: str, parts: list[dict[str, float]]) -> Line:
    """Unevenness is the mean distance of a batch's sources from equal shares, relative to that of a uniform
    permutation. It distinguishes orders whose mixing rounds to the same figure."""
    quality, one = shuffle.combine_measures(parts), parts[0]
    uniform = (one["groups"] - 1) * (one["total"] - one["batch"]) / (one["total"] - 1)
    distance = sum(part["distances"] for part in parts) / sum(part["batches"] for part in parts)
    figures = quality.rank_correlation, quality.displacement, quality.mixing, distance / uniform
    shown = "rank {:+.4f}, displacement {:.3f}, mixing {:.4f}, unevenness {:.2f}".format(*figures)
    if not name.startswith("ours"):
        return Line("shuffle", name, shown)
    # The rank correlation of n rows in random order deviates by 1 / sqrt(n).
    good = quality.mixing >= 0.99 and abs(quality.rank_correlation) < 4 / one["total"] ** 0.5
    return Line("shuffle", name, shown, target="0, 1, ≥ 0.99, 1", met=good)


def recursive(rows: int, rounds: int, random: np.random.Generator) -> np.ndarray:
    """Ten randomly drawn files give the next thousand rows each; the ten thousand rows are shuffled and form
    the next file of the following round."""
    files = [list(file.reshape(-1, 1000)) for file in np.arange(rows).reshape(-1, 10_000)]
    for _ in range(rounds):
        made = []
        left = [file[::-1] for file in files]
        while left:
            chosen = random.choice(len(left), min(10, len(left)), replace=False)
            made.append(random.permutation(np.concatenate([left[number].pop() for number in chosen])))
            left = [file for file in left if file]
        files = [list(file.reshape(-1, 1000)) for file in made]
    return np.concatenate([block for file in files for block in file])


def buffered(rows: int, size: int, random: np.random.Generator) -> np.ndarray:
    """Files of ten thousand rows in random order, through a buffer from which rows are drawn."""
    files = np.array_split(np.arange(rows), max(1, rows // 10_000))
    stream = np.concatenate([files[number] for number in random.permutation(len(files))])
    buffer, rest = stream[:size].copy(), stream[size:]
    draws = random.integers(0, len(buffer), len(rest)).tolist()
    held, out = buffer.tolist(), []
    for draw, row in zip(draws, rest.tolist(), strict=True):
        out.append(held[draw])
        held[draw] = row
    return np.array(out + random.permutation(held).tolist())


def streaming(tokens: int, interpreters: Interpreters | None, folder: Path) -> list[Line]:
    """Batches of 32 rows in order, from the page cache. All take turns for a round each; slow peers get a
    slice."""
    files = make_dataset(folder, tokens)
    data = Dataset.open(folder)
    steps = data.rows_per_epoch("train") // BATCH
    out = np.empty((BATCH, LENGTH), np.int32)
    order = data.train_order(BATCH, seed=0)
    ways: dict[str, Callable[[], Any]] = {
        "tokens": lambda: [data.batch_tokens(order, step).shape for step in range(steps)],
        "tokens, into an array": lambda: [data.batch_tokens(order, t, out=out).shape for t in range(steps)],
        "a reader thread": lambda: [
            batch.shape for batch in read_ahead(lambda step: data.batch_tokens(order, step), 0, steps)
        ],
        "batch": lambda: [data.batch(order, step).tokens.shape for step in range(steps)],
    }
    rates = {name: Rate("M tokens/s") for name in ways}
    amount = steps * BATCH * LENGTH / 1e6
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        rivals, missing = open_rivals(interpreters, files, Path(scratch)) if interpreters else ({}, [])
        try:
            for round in range(ROUNDS):
                for name, way in ways.items():
                    _, cost = measured(way)
                    rates[name].add(amount, cost)
                for name, rival in rivals.items():
                    if round < rival.rounds:
                        answer, cost = rival.peer.ask(**rival.options)
                        rates.setdefault(name, Rate("M tokens/s")).add(answer["tokens"] / 1e6, cost)
        finally:
            for rival in rivals.values():
                rival.peer.close()
    return [
        demand(
            "stream", "a reader thread, by CPU time", rates["a reader thread"].core, 500, unit="M tokens/s"
        ),
        Line("stream", "a reader thread", str(rates["a reader thread"])),
        Line("stream", "batch, with segments and positions", str(rates["batch"])),
        *judge(rates),
        *(Line("stream", "skipped", "", message) for message in missing),
    ]


@dataclass(frozen=True)
class Rival:
    peer: Peer
    options: dict[str, Any]
    rounds: int = ROUNDS


def open_rivals(
    interpreters: Interpreters, files: list[str], scratch: Path
) -> tuple[dict[str, Rival], list[str]]:
    """The peers that are installed, and the names of the others."""
    rivals: dict[str, Rival] = {}
    missing: list[str] = []
    rows = {"rows_of": files[0], "rows": 1600}
    record, mds = {"out": str(scratch / "rows.array_record")}, {"out": str(scratch / "mds")}
    common = {"files": files, "batch": BATCH}
    batch, two = {"batch": BATCH}, {"workers": 2}
    ours, peers, streaming = sys.executable, interpreters.peers, interpreters.streaming
    for name, script, python, first, options in (
        ("memmap", "memmap_rows", ours, None, common | {"fresh": True}),
        ("memmap, into an array", "memmap_rows", ours, None, common | {"fresh": False}),
        ("torch, no workers", "torch_loader", peers, None, common | {"workers": 0}),
        ("torch, 2 workers", "torch_loader", peers, None, common | two),
        ("grain + ArrayRecord", "grain_loader", peers, rows | record, record | batch | {"dtype": "uint16"}),
        ("MosaicML streaming, no workers", "mosaicml_loader", streaming, rows | mds, mds | batch),
        ("MosaicML streaming, 2 workers", "mosaicml_loader", streaming, None, mds | batch | two),
    ):
        try:
            peer = Peer.script(script, python)
            if first is not None:
                peer.ask(**first)
            if name != "MosaicML streaming, 2 workers":
                peer.ask(**options)  # once, for work that is only done the first time
            rivals[name] = Rival(peer, options, ROUNDS if "memmap" in name else 3)
        except Missing as error:
            missing.append(str(error))
    return rivals, missing


def judge(rates: dict[str, Rate]) -> list[Line]:
    lines = []
    for ours, rival, least in (
        ("tokens", "memmap", 0.8),
        ("tokens, into an array", "memmap, into an array", 0.8),
        ("batch", "memmap", 0.0),
        ("tokens", "torch, no workers", 5.0),
        ("tokens", "torch, 2 workers", 5.0),
        ("tokens", "grain + ArrayRecord", 30.0),
        ("tokens", "MosaicML streaming, no workers", 30.0),
        ("tokens", "MosaicML streaming, 2 workers", 30.0),
    ):
        if rival in rates:
            lines.append(compare("stream", f"{ours} vs {rival}", rates[ours], rates[rival], least=least))
    return lines


def make_dataset(folder: Path, tokens: int) -> list[str]:
    """Random rows in four shards, with an index. Returns the files of tokens."""
    folder.mkdir(parents=True)
    random, rows = np.random.default_rng(1), max(BATCH, tokens // LENGTH // 4)
    shards: list[Shard] = [
        write_rows(folder, f"train-0-{shard:05d}", make_rows(rows, shard, random)) for shard in range(4)
    ]
    splits = {
        "train": Split(4 * rows, 4 * rows, 4 * rows * LENGTH, 4 * rows * LENGTH, (tuple(shards),)),
        "evaluation": Split(0, 0, 0, 0, ()),
    }
    special = SpecialTokenIds(bos=1, eos=2, pad=0, mask=3)
    Index(LENGTH, "uint16", VOCAB, special, "0" * 64, 10.0, ("random",), splits, {}).write(folder)
    return [str(folder / f"{shard.name}.npy") for shard in shards]
