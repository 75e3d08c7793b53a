"""Whether Muon reaches AdamW's loss in fewer tokens (arXiv 2502.16982), at a small scale: the same Llama on
the demo's corpus, each optimizer with the best of several learning rates.

    python -m benchmarks.claims_optimizer       a CPU, about five minutes, once data/demo is prepared
    python -m benchmarks.claims_optimizer --plot optimizer.json docs/performance/optimizer.png

Both train on the same batches in the same order, and the loss is that of held-out text. Curves are compared
while the learning rate is still high, so the tokens to reach the other's final loss are an overestimate
rather than an underestimate."""

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path

from benchmarks import steps

RECIPE = "recipes/tiny/llama.yaml"
RATES = {"adamw": (3e-4, 1e-3, 3e-3, 1e-2), "muon": (3e-3, 1e-2, 3e-2, 1e-1)}
ROWS, EVERY, HELD_OUT = 32, 20, 8  # rows per batch, steps between evaluations, batches of each
Curve = list[tuple[int, float]]  # tokens, loss


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--data", default="data/demo")
    parser.add_argument("--json", default="optimizer.json", help="file for the curves")
    parser.add_argument("--picture", default="docs/performance/optimizer.png")
    parser.add_argument("--plot", nargs=2, metavar=("JSON", "PNG"), help="plot earlier results")
    args = parser.parse_args()
    if args.plot:
        plot(json.loads(Path(args.plot[0]).read_text()), Path(args.plot[1]))
        return 0
    found: dict[str, dict[str, Curve]] = {}
    for use, rates in RATES.items():
        found[use] = {}
        for rate in rates:
            curve = found[use][f"{rate:g}"] = trained(use, rate, args.steps, args.data)
            print(f"{use:6} {rate:8g}   loss {curve[-1][1]:.4f} after {curve[-1][0]:,} tokens", flush=True)
    Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    print(verdict(found))
    if importlib.util.find_spec("matplotlib") is not None:
        plot(found, Path(args.picture))
    return 0


def trained(use: str, rate: float, number: int, data: str) -> Curve:
    import functools

    import jax

    from headrace.data.dataset import Dataset
    from headrace.model_wrappers import load_family
    from headrace.nn import module
    from headrace.training import batch as batches
    from headrace.training import evaluate, step

    settings = {"optimizer.use": use, "optimizer.learning_rate": rate, "schedule.steps": number}
    settings |= {"schedule.warmup": number // 20, "batch.sequences": ROWS, "data.path": data}
    dataset = Dataset.open(data, sequence_length=64)
    cfg = steps.load(RECIPE, settings | {"model.vocab": dataset.vocab}, [])
    made = steps.compile_step(cfg, batches.special_tokens(dataset))
    axes = module.axes(load_family(cfg.model).Model, cfg.model)
    state, curve, order = made.state, [], dataset.train_order(ROWS, seed=0)
    with jax.set_mesh(made.devices):
        score = jax.jit(step.make_eval_step(made.task, axes))
        for done in range(1, number + 1):
            batch = batches.device_batch(dataset, order, made.devices, done - 1)
            state, _ = made.step(state, batch)
            if done % EVERY == 0 or done == number:
                told = functools.partial(score, state.params)
                size = dict(batch_size=ROWS, max_batches=HELD_OUT)
                result = evaluate.evaluate(told, dataset, made.devices, cfg.objective, **size)
                assert result is not None
                curve.append((done * ROWS * 64, result["loss"]))
    return curve


def best(curves: dict[str, Curve]) -> tuple[str, Curve]:
    rate = min(curves, key=lambda rate: curves[rate][-1][1])
    return rate, curves[rate]


def verdict(found: dict[str, dict[str, Curve]]) -> str:
    (its, adamw), (other, muon) = (best(found[use]) for use in ("adamw", "muon"))
    tokens, goal = adamw[-1]
    reached = next((tokens for tokens, loss in muon if loss <= goal), None)
    said = f"adamw at {its} reaches {goal:.4f} in {tokens:,} tokens, muon at {other} to {muon[-1][1]:.4f}"
    if reached is None:
        return f"{said}; it does not reach adamw's"
    return f"{said}; it reaches adamw's after {reached:,} tokens, {reached / tokens:.0%} of them"


def plot(found: dict[str, dict[str, Curve]], target: Path) -> None:
    os.environ.setdefault("MPLBACKEND", "Agg")
    import matplotlib.pyplot as pyplot

    figure, panel = pyplot.subplots(figsize=(6, 3.6), constrained_layout=True)
    for use, curves in found.items():
        rate, curve = best(curves)
        panel.plot(*zip(*curve, strict=True), "o-", markersize=3, label=f"{use}, {rate}")
    panel.set(xlabel="tokens", ylabel="loss of held-out text, nats")
    panel.grid(alpha=0.3)
    panel.legend()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=120)
    print(f"wrote {target}")


if __name__ == "__main__":
    sys.exit(main())
