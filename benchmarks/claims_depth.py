"""Whether recurrent depth thinks further with more rounds (arXiv 2502.05171), tried small: chains are
followed to their ends, and the rounds when the model is used should decide how far.

    python -m benchmarks.claims_depth                     a CPU, about ten minutes
    python -m benchmarks.claims_depth --plot depth.json docs/models/depth.png

A row lists in any order which symbol follows which, a token for each such pair, then names every symbol; the
model tells at which symbol the chain of each ends. In training chains have up to 4 links, in the test up to
9. Beside the model with recurrent depth stand one with the same layers that runs them once, and a deeper one
with weights of its own in each.

After 1,000 steps on a CPU it does not show yet (2026-11): the answers of 1 round and of 32 are alike, all
right up to 2 links, 76 % at 4; 4 layers run once are right up to 4 links and not beyond."""

import argparse
import functools
import importlib.util
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millrace import build, depth, module, recipe, step
from millrace.depth import Rounds
from millrace.objective import Examples, Task, Vocabulary, file, make_task
from millrace.project import project

SYMBOLS, ROWS, TESTS = 10, 64, 512
LENGTH = 2 * SYMBOLS  # pairs, then questions
LINKS, MORE_LINKS = 4, 9  # of the longest chains, in training and in the test
ROUNDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
SIZES = (
    "embed=64",
    "heads=4",
    "kv_heads=4",
    "mlp=160",
    f"vocab={SYMBOLS + SYMBOLS**2}",
    "rope_theta=10000.0",
)
ONCE = ("recurrence=0", "prelude=1", "coda=1", "backprop=8")
MODELS = {
    "in rounds": ("layers=4", "recurrence=5", "prelude=1", "coda=1", "backprop=6"),
    "4 layers": ("layers=4", *ONCE),
    "8 layers": ("layers=8", *ONCE),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--json", default="depth.json", help="where the shares go")
    parser.add_argument("--picture", default="docs/models/depth.png")
    parser.add_argument("--plot", nargs=2, metavar=("JSON", "PNG"), help="draw what was found before")
    args = parser.parse_args()
    if args.plot:
        plot(json.loads(Path(args.plot[0]).read_text()), Path(args.plot[1]))
        return 0
    found = {name: trained(name, args.steps) for name in args.models}
    Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    show(found)
    if importlib.util.find_spec("matplotlib") is not None:
        plot(found, Path(args.picture))
    return 0


def rows(rng: np.random.Generator, count: int, links: int) -> tuple[Examples, np.ndarray]:
    """Examples with chains of up to so many links, and how many lie between each question and its answer."""
    tokens, targets = np.zeros((2, count, LENGTH), np.int32)
    far = np.zeros((count, SYMBOLS), int)
    for row in range(count):
        symbols = [int(one) for one in rng.permutation(SYMBOLS)]
        facts, left = {}, symbols
        while left:
            size = rng.integers(1, links + 2)
            chain, left = left[:size], left[size:]
            for place, one in enumerate(chain):
                facts[one] = (chain[min(place + 1, len(chain) - 1)], chain[-1], len(chain) - 1 - place)
        listed, asked = rng.permutation(symbols).tolist(), rng.permutation(symbols).tolist()
        tokens[row, :SYMBOLS] = [SYMBOLS + SYMBOLS * one + facts[one][0] for one in listed]
        tokens[row, SYMBOLS:] = asked
        targets[row, SYMBOLS:] = [facts[one][1] for one in asked]
        far[row] = [facts[one][2] for one in asked]
    weights = np.broadcast_to(np.arange(LENGTH) >= SYMBOLS, tokens.shape).astype(np.float32)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
    arrays = (tokens, targets, weights, np.ones_like(tokens), positions)
    return Examples(*map(jnp.asarray, arrays)), far


def trained(name: str, steps: int) -> dict[str, Any]:
    """Trains one model, and tells its share of right answers by rounds and by links."""
    keys = [f"model.{key}" for key in (*SIZES, *MODELS[name])]
    keys += [
        f"schedule.steps={steps}",
        f"schedule.warmup={steps // 20}",
        "optimizer.learning_rate=1e-2",
        "optimizer.use=muon",
        "optimizer.weight_decay=0.01",
    ]
    cfg = recipe.load("recipes/tiny/recurrent.yaml", keys)
    devices = build.make_mesh(cfg, jax.devices()[:1])
    task = make_task(cfg, Vocabulary(cfg.model.vocab, None, None, None, None))
    axes = module.axes(file("models", cfg.model).Model, cfg.model)
    with jax.set_mesh(devices):
        update = build.make_update(cfg, task)
        _, fresh = build.make_state(cfg, task, update, devices)
        one = jax.jit(functools.partial(learn, task, update, axes), donate_argnums=0)
        state, rng, started = fresh(), np.random.default_rng(0), time.perf_counter()
        for number in range(steps):
            state, metrics = one(state, rows(rng, ROWS, LINKS)[0])
            if number % 250 == 0 or number == steps - 1:
                said = f"{float(metrics['loss']):.3f}"
                print(
                    f"{name}: step {number}, loss {said}, {time.perf_counter() - started:.0f} s", flush=True
                )
        count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        return {"parameters": count, "shares": tested(task, state.params)}


def learn(task: Task, update: step.Update, axes: Any, state: Any, examples: Examples) -> Any:
    """As step.train_step, with examples that are made already."""
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
    its = replace(task, how=depth.drawn(task.how, task.model, key))
    grads, sums = step.gradients(its, axes, state.params, step.split(examples, 1))
    grads = jax.tree.map(lambda g: g / sums["count"], grads)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    return step.apply(update, axes, state, grads, {"loss": sums["loss"] / sums["count"], "grad_norm": norm})


def tested(task: Task, params: Any) -> dict[str, list[float]]:
    """For each number of rounds the shares of right answers that are 0, 1, ... links away."""
    examples, far = rows(np.random.default_rng(1), TESTS, MORE_LINKS)

    @jax.jit
    def answers(params: Any, rounds: Any) -> Any:
        how = replace(task.how, rounds=Rounds(rounds))
        hidden = params(task.model, examples.inputs, how=how, positions=examples.positions)
        return project(params.unembed, hidden[:, -SYMBOLS:], "bsd,vd->bsv").argmax(-1)

    shares = {}
    for rounds in ROUNDS if depth.is_recurrent(task.model) else (1,):
        right = np.asarray(answers(params, rounds)) == np.asarray(examples.targets)[:, -SYMBOLS:]
        shares[str(rounds)] = [float(right[far == links].mean()) for links in range(MORE_LINKS + 1)]
    return shares


def show(found: dict[str, Any]) -> None:
    print(
        f"\nshare of right answers by links, trained on up to {LINKS}\n{'':24}"
        + "".join(f"{n:5}" for n in range(MORE_LINKS + 1))
    )
    for name, its in found.items():
        for rounds, shares in its["shares"].items():
            label = f"{name}, {rounds}" if len(its["shares"]) > 1 else name
            print(f"{label:24}" + "".join(f"{share:5.2f}" for share in shares))


def plot(found: dict[str, Any], target: Path) -> None:
    os.environ.setdefault("MPLBACKEND", "Agg")
    import matplotlib.pyplot as pyplot

    figure, panel = pyplot.subplots(figsize=(6, 3.6), constrained_layout=True)
    for name, its in found.items():
        for rounds, shares in its["shares"].items():
            looped = len(its["shares"]) > 1
            label = f"{name}, {rounds}" if looped else name
            panel.plot(shares, "o-" if looped else "s--", label=label, markersize=3)
    panel.axvline(LINKS, color="grey", linewidth=0.8)
    panel.set(
        xlabel=f"links to the answer (trained on up to {LINKS})", ylabel="right answers", ylim=(0, 1.02)
    )
    panel.legend(fontsize=7)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=120)
    print(f"{target} shows it")


if __name__ == "__main__":
    sys.exit(main())
