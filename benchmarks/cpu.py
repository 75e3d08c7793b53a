"""The demo recipe on a CPU, in tokens per second, against the same model in transformers, eager and compiled.

    python -m benchmarks.cpu               any machine, about 4 minutes

All use float32 with the same number of threads, the same packed rows and the same weights in the first step,
whose losses must be equal. Each runs in a process of its own that waits while another has its turn. They take
turns for several rounds, and the best median of each counts, by wall time and by CPU time, because other work
on the machine takes time from whichever is running. On a busy machine use --threads 1: torch's threads wait
for each other by spinning, which counts as CPU time, so two threads on a busy machine flatter Headrace."""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import steps
from benchmarks.data_measure import Missing, Peer
from benchmarks.data_peers.serve import serve

PEERS = ("torch", "torch.compile")
GOAL = 1.0
APART = 1e-4  # nats, the largest difference between two first losses in float32
Step = Callable[[int], float]  # takes the step with this number, and returns its loss
Round = dict[str, float]


def main() -> int:
    args = parse()
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    os.sched_setaffinity(0, cores)  # XLA uses as many threads as there are cores
    if args.only:
        serve(lambda: rounds_of(args))
        return 0
    if not Path(load(args).data.path, "index.json").is_file():
        subprocess.run([sys.executable, "-m", "headrace", "data", "prepare", args.data], check=True)
    print(f"{len(cores)} threads, {args.rounds} rounds of {args.steps} steps, load {os.getloadavg()[0]:.1f}")
    return show(load(args), take_turns(args))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["headrace", *PEERS], help="run one of them; internal")
    parser.add_argument(
        "--folder", type=Path, help="folder through which weights and rows pass from Headrace to the others"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--recipe", default="recipes/demo.yaml")
    parser.add_argument("--data", default="recipes/data/demo.yaml", help="the data recipe")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="key=value", help="changes to the recipe of all"
    )
    return parser.parse_args()


def load(args: argparse.Namespace) -> Any:
    from headrace.config import recipe

    return recipe.load(args.recipe, args.set)


def take_turns(args: argparse.Namespace) -> dict[str, list[Round]]:
    """Run the rounds of each in turn. After a failure, its error is printed and it has no more turns."""
    rounds: dict[str, list[Round]] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder, contextlib.ExitStack() as stack:
        workers: dict[str, Peer] = {}
        for turn in range(args.rounds):
            for name in ("headrace", *PEERS):
                try:
                    if turn == 0:  # Headrace first, because it saves its weights for the others
                        workers[name] = stack.enter_context(worker(name, args, folder))
                    if name in workers:
                        rounds.setdefault(name, []).append(workers[name].ask(steps=args.steps)[0])
                except Missing as error:
                    print(f"  {error}")
                    workers.pop(name, None)
    return rounds


def worker(name: str, args: argparse.Namespace, folder: str) -> Peer:
    command = [sys.executable, "-m", "benchmarks.cpu", "--only", name, "--folder", folder]
    command += ["--recipe", args.recipe, "--threads", str(args.threads), "--set", *args.set]
    no_gpu = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    return Peer(name, command, no_gpu | {"OMP_NUM_THREADS": str(args.threads)})


def show(cfg: Any, rounds: dict[str, list[Round]]) -> int:
    """Print the table. Returns 1 if the goal is missed, first losses differ or there is nothing to compare
    with."""
    tokens = cfg.batch.sequences * cfg.data.sequence_length
    best = {
        name: {key: min(one[key] for one in found) for key in ("wall", "cpu")}
        for name, found in rounds.items()
    }
    firsts = {name: found[0]["first_loss"] for name, found in rounds.items()}
    ours = best.get("headrace")
    print(f"{'':14}{'tokens/s':>10}{'ms':>8}{'CPU ms':>8}{'first loss':>12}   Headrace / it, by CPU time")
    for name, its in best.items():
        ratios = f"{its['wall'] / ours['wall']:9.3f}{its['cpu'] / ours['cpu']:14.3f}" if ours else ""
        times = f"{tokens / its['wall']:10,.0f}{its['wall'] * 1e3:8.1f}{its['cpu'] * 1e3:8.1f}"
        print(f"{name:14}{times}{firsts[name]:12.6f}   {ratios}")
    peers = [its for name, its in best.items() if name != "headrace"]
    if ours is None or not peers:
        return 1
    found = min(its["wall"] for its in peers) / ours["wall"]
    print(f"against the faster: {found:.3f} (goal {GOAL:g}: {'met' if found >= GOAL else 'MISSED'})")
    apart = max(abs(loss - firsts["headrace"]) for loss in firsts.values())
    print(f"first losses on the same weights {'agree' if apart < APART else 'DIFFER'}, {apart:.1e} apart")
    return int(apart >= APART or found < GOAL)


def rounds_of(args: argparse.Namespace) -> Callable[[dict[str, Any]], Round]:
    """The work of a process when it has its turn: some steps, their median wall time, CPU time per step."""
    if args.only == "headrace":
        take, first = headrace_step(load(args), args.folder)
    else:
        take, first = torch_step(load(args), args.folder, compiled=args.only == "torch.compile")
    for number in range(1, steps.WARM + 1):
        take(number)
    number = steps.WARM

    def work(options: dict[str, Any]) -> Round:
        nonlocal number
        seconds, cpu = [], time.process_time()
        for _ in range(options["steps"]):
            number += 1
            begun = time.perf_counter()
            take(number)
            seconds.append(time.perf_counter() - begun)
        spent = (time.process_time() - cpu) / len(seconds)
        return {"wall": statistics.median(seconds), "cpu": spent, "first_loss": first}

    return work


def headrace_step(cfg: Any, folder: Path) -> tuple[Step, float]:
    """The step by its number, after the first is taken, and the first loss. Saves its weights and rows."""
    from headrace.runtime import malloc

    malloc.use_one_arena()  # as `headrace train` does, the first before JAX starts a thread
    malloc.keep_freed(1 << 30)
    import jax

    from headrace.data.dataset import Dataset
    from headrace.training.batch import device_batch, fill_model_sizes, special_tokens

    dataset = Dataset.open(cfg.data.path, sequence_length=cfg.data.sequence_length)
    cfg = fill_model_sizes(cfg, dataset)
    made = steps.compile_step(cfg, special_tokens(dataset))
    order = dataset.train_order(cfg.batch.sequences, seed=cfg.seed)
    batches = [device_batch(dataset, order, made.devices, number) for number in range(steps.DIFFERENT)]
    steps.save_start(made, batches[0], folder)
    rows = {name: [np.asarray(getattr(batch, name)) for batch in batches] for name in ("tokens", "segments")}
    np.savez(folder / "rows.npz", **{name: np.stack(one) for name, one in rows.items()})
    state = made.state

    def take(number: int) -> float:
        nonlocal state
        state, values = made.step(state, batches[number % len(batches)])
        jax.block_until_ready((state, values))
        return float(values["nll"])

    return take, take(0)


def torch_step(cfg: Any, folder: Path, *, compiled: bool) -> tuple[Step, float]:
    """The same step in transformers, from the weights and rows that Headrace has saved: fused AdamW,
    clipping."""
    import torch

    from headrace.data.dataset import Dataset
    from headrace.training.batch import fill_model_sizes

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = steps.transformers_model(fill_model_sizes(cfg, Dataset.open(cfg.data.path)))
    steps.load_weights(model, folder)
    kept = np.load(folder / "rows.npz")
    rows = zip(kept["tokens"], kept["segments"], strict=True)
    batches = [torch_batch(tokens, segments, isolate=cfg.data.isolate_documents) for tokens, segments in rows]
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim == 1]
    decay = cfg.optimizer.weight_decay
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    betas = cfg.optimizer.b1, cfg.optimizer.b2
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=betas, eps=cfg.optimizer.eps, fused=True)

    def loss_of(batch: dict[str, Any]) -> Any:
        return model(**batch).loss

    if compiled:
        loss_of = torch.compile(loss_of)

    def take(number: int) -> float:
        loss = loss_of(batches[number % len(batches)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return take, take(0)


def torch_batch(tokens: np.ndarray, segments: np.ndarray, *, isolate: bool) -> dict[str, Any]:
    """The arguments of transformers with which each token is predicted from those before it, and documents of
    a row do not see each other unless the recipe lets them. Made beforehand, at no cost to the step."""
    import torch

    segments = segments if isolate else np.minimum(segments, 1)
    length = tokens.shape[1]
    begins = np.diff(segments, axis=1, prepend=-1) != 0
    starts = np.maximum.accumulate(np.where(begins, np.arange(length), 0), axis=1)
    labels = np.where(begins | (segments == 0), -100, tokens)
    batch = {"input_ids": tokens, "labels": labels, "position_ids": np.arange(length) - starts}
    made = {name: torch.from_numpy(rows.astype(np.int64)) for name, rows in batch.items()}
    if isolate:
        same = segments[:, :, None] == segments[:, None, :]
        made["attention_mask"] = torch.from_numpy((same & np.tril(np.ones((length, length), bool)))[:, None])
    return made


if __name__ == "__main__":
    sys.exit(main())
