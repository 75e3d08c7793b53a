"""Training of some layers of xLSTM 7B, rows of 2,048, against that of transformers + torch.compile.

    python -m benchmarks.xlstm_gpu         one GPU, about 7 minutes; prints tokens/s of both and their ratio

Headrace in bf16, with the layers' products in fp8, and with the head's as well. Both: float32 master weights,
bf16 compute, AdamW, clipping by global norm, random tokens, and the same weights and tokens in the first
step, whose losses must be equal. transformers has mLSTM without kernels of its own, in chunks of 64
positions, each with its own text in the program, and is measured with larger ones too."""

import argparse
import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import steps

GOAL = 1.2
APART = 0.02  # nats that bf16 may put between the two first losses
CHUNKS = (64, 256)  # of transformers' mLSTM
# Settings of our rows.
OURS: dict[str, dict[str, str]] = {
    "headrace": {},
    "fp8": {"compute.matmul": "fp8"},
    "fp8, head too": {"compute.matmul": "fp8", "loss.backend": "fp8"},
}


def main() -> int:
    args = parse()
    if args.only is not None:
        steps.tell(functools.partial(headrace_steps if args.only in OURS else torch_steps, args))
        return 0
    return compare(args)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="ROW", help=f"{', '.join(OURS)}, or chunks for transformers'")
    parser.add_argument("--chunks", type=int, nargs="+", default=CHUNKS, help="that transformers is run with")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--limit", type=int, default=240, help="seconds that one of them may take")
    parser.add_argument("--folder", type=Path, help="where weights and tokens go from one to the other")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="for the recipe of both")
    return parser.parse_args()


def load(args: argparse.Namespace) -> Any:
    settings = {"batch.sequences": args.sequences, "data.sequence_length": args.length}
    settings |= {"model.layers": args.layers, "compute.remat": "none", "optimizer.max_grad_norm": 1.0}
    return steps.load("recipes/xlstm-7b.yaml", settings | OURS.get(args.only, {}), args.set)


def compare(args: argparse.Namespace) -> int:
    """Prints all, Headrace first: it leaves its weights for the others. 1 if one failed, the goal is missed,
    or the two do not compute the same."""
    cfg = load(args)
    print(f"{args.sequences} rows of {args.length:,}, {args.layers} layers, {cfg.model.embed} wide")
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        same = ["--layers", str(args.layers), "--length", str(args.length), "--folder", folder]
        same += ["--sequences", str(args.sequences), "--steps", str(args.steps), "--set", *args.set]
        rows = {}
        for row in (*OURS, *map(str, args.chunks)):
            rows[row] = steps.alone("xlstm_gpu", "--only", row, *same, limit=args.limit)
            name = row if row in OURS else f"torch, chunks of {row}"
            print("  " + steps.line(f"{name:22}", rows[row], steps.flops(cfg)), flush=True)
    theirs = max((rows[str(chunk)] for chunk in args.chunks), key=lambda row: row.get("tokens_per_second", 0))
    for name in OURS:
        print(f"  {name} / transformers + torch.compile: {steps.spoken(rows[name], theirs, GOAL)}")
    found = [steps.ratio(rows[name], theirs) for name in OURS]
    if None in found:
        return 1
    apart = max(abs(rows[name]["first_loss"] - theirs["first_loss"]) for name in OURS)
    verdict = "agree" if apart < APART else "DIFFER"
    print(f"  first losses on the same weights {verdict}, {apart:.1e} apart")
    return int(apart >= APART or max(ratio or 0 for ratio in found) < GOAL)


def headrace_steps(args: argparse.Namespace) -> steps.Row:
    folder = None if OURS[args.only] else args.folder  # the weights of all are those of the first
    return steps.headrace_steps(load(args), args.steps, folder=folder)


def torch_steps(args: argparse.Namespace) -> steps.Row:
    """The same batch again and again: which tokens it holds changes nothing about the time."""
    cfg = load(args)
    # It cannot train without its last states.
    settings = dict(mode="train", chunk_size=int(args.only), return_last_states=True)
    model = steps.transformers_model(cfg, "eager", **settings)
    batches = steps.random_tokens(cfg)[:1]
    if args.folder is not None and (args.folder / "examples.npz").is_file():
        steps.take_weights(model, args.folder)
        ids = steps.take_examples(args.folder)["input_ids"]
        batches = [{"input_ids": ids, "labels": ids}]  # which it moves by one itself
    return steps.torch_steps(model.train(), batches, args.steps)


if __name__ == "__main__":
    sys.exit(main())
