"""Whether recurrent depth solves longer inputs with more rounds (arXiv 2502.05171). At every position of a
row of zeros and ones, the model predicts the parity of the ones so far. Its layers see only the previous
token and the current one, so information moves one position per layer, and the rounds decide how far.

    python -m benchmarks.claims_depth                     a CPU, a quarter of an hour
    python -m benchmarks.claims_depth --plot depth.json docs/models/depth.png

Trained on rows of 10 positions with about 6 rounds, tested on 40 with 1 to 32. For comparison: the same
layers run once, and as many layers as 6 rounds run, with weights of their own."""

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

from headrace.config import recipe
from headrace.model_wrappers import load_family, recurrent_depth
from headrace.model_wrappers.recurrent_depth import RoundSchedule
from headrace.nn import module
from headrace.nn.linear import project
from headrace.objectives import Examples, SpecialTokens, TrainTask
from headrace.training import setup, step
from headrace.training.task import make_task

ROWS, TESTS = 64, 256
LENGTH, TRAINED, PART = 40, 10, 4  # positions of a row, those trained on, and those reported together
ROUNDS = (1, 2, 4, 6, 8, 12, 16, 24, 32)
SIZES = ("use=gemma2", "embed=32", "heads=2", "kv_heads=2", "head_dim=16", "mlp=64", "vocab=2", "window=2")
SIZES += ("global_every=64", "attention_soft_cap=null")
MODELS = {
    "in rounds": ("model.layers=4", "recurrence.rounds=6"),
    "4 layers": ("model.layers=4",),
    "14 layers": ("model.layers=14",),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--json", default="depth.json", help="file for the shares")
    parser.add_argument("--picture", default="docs/models/depth.png")
    parser.add_argument("--plot", nargs=2, metavar=("JSON", "PNG"), help="plot earlier results")
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


def rows(rng: np.random.Generator, count: int, length: int) -> Examples:
    tokens = rng.integers(0, 2, (count, length)).astype(np.int32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    targets, weights = np.cumsum(tokens, axis=1) % 2, np.ones(tokens.shape, np.float32)
    return Examples(*map(jnp.asarray, (tokens, targets, weights, np.ones_like(tokens), positions)))


def trained(name: str, steps: int) -> dict[str, Any]:
    """Train one model. Returns its share of correct answers by rounds and by links."""
    keys = [*(f"model.{key}" for key in SIZES), *MODELS[name]]
    keys += [
        "data.path=made-on-the-spot",
        f"schedule.steps={steps}",
        f"schedule.warmup={steps // 20}",
        "optimizer.learning_rate=3e-3",
        "optimizer.weight_decay=0.01",
    ]
    cfg = recipe.load("recipes/tiny/recurrent.yaml", keys)
    devices = setup.make_mesh(cfg, jax.devices()[:1])
    task = make_task(cfg, SpecialTokens(cfg.model.vocab, None, None, None, None))
    axes = module.axes(load_family(cfg.model).Model, cfg.model)
    with jax.set_mesh(devices):
        update = setup.make_update(cfg, task)
        _, fresh = setup.make_state(cfg, task, update, devices)
        one = jax.jit(functools.partial(learn, task, update, axes), donate_argnums=0)
        state, rng, started = fresh(), np.random.default_rng(0), time.perf_counter()
        for number in range(steps):
            state, metrics = one(state, rows(rng, ROWS, TRAINED))
            if number % 1000 == 0 or number == steps - 1:
                said = f"{float(metrics['loss']):.3f}"
                print(
                    f"{name}: step {number}, loss {said}, {time.perf_counter() - started:.0f} s", flush=True
                )
        count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        return {"parameters": count, "shares": tested(task, state.params)}


def learn(task: TrainTask, update: step.OptimizerStep, axes: Any, state: Any, examples: Examples) -> Any:
    """Like step.make_train_step, with given examples."""
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
    if recurrent_depth.is_recurrent(task.model):
        task = replace(task, exec_opts=recurrent_depth.sample_rounds(task.exec_opts, task.model, key))
    grads, sums = step.accumulate_gradients(task, axes, state.params, step.to_microbatches(examples, 1))
    grads = jax.tree.map(lambda g: g / sums["count"], grads)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    metrics = {"loss": sums["loss"] / sums["count"], "grad_norm": norm}
    return step.apply_update(update, axes, state, grads, metrics, model=task.model)


def tested(task: TrainTask, params: Any) -> dict[str, list[float]]:
    """The shares of correct answers by parts of the row, for each number of rounds."""
    examples = rows(np.random.default_rng(1), TESTS, LENGTH)

    @jax.jit
    def answers(params: Any, rounds: Any) -> Any:
        exec_opts = replace(task.exec_opts, rounds=RoundSchedule(rounds))
        hidden = params(task.model, examples.inputs, exec_opts=exec_opts, positions=examples.positions)
        return project(params.unembed, hidden, "bsd,vd->bsv").argmax(-1)

    shares = {}
    for rounds in ROUNDS if recurrent_depth.is_recurrent(task.model) else (1,):
        right = np.asarray(answers(params, rounds)) == np.asarray(examples.targets)
        shares[str(rounds)] = right.reshape(TESTS, -1, PART).mean((0, 2)).tolist()
    return shares


def show(found: dict[str, Any]) -> None:
    places = range(PART, LENGTH + 1, PART)
    print(
        f"\nshare of correct answers up to each position, trained on {TRAINED}\n{'':24}"
        + "".join(f"{n:6}" for n in places)
    )
    for name, its in found.items():
        for rounds, shares in its["shares"].items():
            label = f"{name}, {rounds}" if len(its["shares"]) > 1 else name
            print(f"{label:24}" + "".join(f"{share:6.2f}" for share in shares))


def plot(found: dict[str, Any], target: Path) -> None:
    os.environ.setdefault("MPLBACKEND", "Agg")
    import matplotlib.pyplot as pyplot

    figure, panel = pyplot.subplots(figsize=(7.5, 3.6), constrained_layout=True)
    places, greys = range(PART, LENGTH + 1, PART), iter(("0.6", "0.3"))
    for name, its in found.items():
        looped = len(its["shares"]) > 1
        for number, (rounds, shares) in enumerate(its["shares"].items()):
            label = f"{rounds} round{'s' * (rounds != '1')}" if looped else f"{name}, run once"
            colour = pyplot.cm.viridis(number / len(its["shares"])) if looped else next(greys)
            panel.plot(
                places, shares, "o-" if looped else "s--", label=label, color=colour, markersize=3, alpha=0.8
            )
    panel.axvline(TRAINED, color="grey", linewidth=0.8)
    panel.set_xlabel(f"position in the row (trained on {TRAINED})")
    panel.set(ylabel="correct answers", ylim=(0.4, 1.02))
    panel.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=120)
    print(f"wrote {target}")


if __name__ == "__main__":
    sys.exit(main())
