"""Training of some layers of xLSTM 7B, rows of 2,048, against that of transformers + torch.compile.

    python -m benchmarks.xlstm_gpu         one GPU, about 7 minutes; prints tokens/s of both and their ratio

Headrace in bf16, with the layers' matmuls in fp8, and with the head's as well. Both: float32 master weights,
bf16 compute, AdamW, clipping by global norm, random tokens, and the same weights and tokens in the first
step, whose losses must be equal. transformers has mLSTM without kernels of its own, in chunks of 64
positions, each with its own text in the program; it is also measured with larger chunks."""

import argparse
import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import steps

GOAL = 1.2
APART = 0.02  # nats that the two first losses may differ by in bf16
CHUNKS = (64, 256)  # of transformers' mLSTM
# Settings of Headrace's rows.
OURS: dict[str, dict[str, str]] = {
    "headrace": {},
    "fp8": {"compute.matmul": "fp8"},
    "fp8, head too": {"compute.matmul": "fp8", "loss.backend": "fp8"},
}


def main() -> int:
    args = parse()
    if args.only is not None:
        steps.report_row(functools.partial(headrace_steps if args.only in OURS else torch_steps, args))
        return 0
    return compare(args)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="ROW", help=f"{', '.join(OURS)}, or chunks for transformers'")
    parser.add_argument("--chunks", type=int, nargs="+", default=CHUNKS, help="chunk sizes for transformers")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--limit", type=int, default=240, help="time limit of each in seconds")
    parser.add_argument("--folder", type=Path, help="folder through which weights and tokens pass")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="key=value", help="changes to the recipe of both"
    )
    return parser.parse_args()


def load(args: argparse.Namespace) -> Any:
    settings = {"batch.sequences": args.sequences, "data.sequence_length": args.length}
    settings |= {"model.layers": args.layers, "compute.remat": "none", "optimizer.max_grad_norm": 1.0}
    return steps.load("recipes/xlstm-7b.yaml", settings | OURS.get(args.only, {}), args.set)


def compare(args: argparse.Namespace) -> int:
    """Print all, Headrace first, because it saves its weights for the others. Returns 1 if one failed, the
    goal is missed, or the two do not compute the same."""
    cfg = load(args)
    print(f"{args.sequences} rows of {args.length:,}, {args.layers} layers, {cfg.model.embed} wide")
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        same = ["--layers", str(args.layers), "--length", str(args.length), "--folder", folder]
        same += ["--sequences", str(args.sequences), "--steps", str(args.steps), "--set", *args.set]
        rows = {}
        for row in (*OURS, *map(str, args.chunks)):
            rows[row] = steps.run_script("xlstm_gpu", "--only", row, *same, limit=args.limit)
            name = row if row in OURS else f"torch, chunks of {row}"
            print("  " + steps.format_row(f"{name:22}", rows[row], steps.flops_per_token(cfg)), flush=True)
    theirs = max((rows[str(chunk)] for chunk in args.chunks), key=lambda row: row.get("tokens_per_second", 0))
    for name in OURS:
        print(f"  {name} / transformers + torch.compile: {steps.format_ratio(rows[name], theirs, GOAL)}")
    found = [steps.speed_ratio(rows[name], theirs) for name in OURS]
    if None in found:
        return 1
    apart = max(abs(rows[name]["first_loss"] - theirs["first_loss"]) for name in OURS)
    verdict = "agree" if apart < APART else "DIFFER"
    print(f"  first losses on the same weights {verdict}, {apart:.1e} apart")
    return int(apart >= APART or max(ratio or 0 for ratio in found) < GOAL)


def headrace_steps(args: argparse.Namespace) -> steps.Row:
    folder = None if OURS[args.only] else args.folder  # all use the weights of the first
    return steps.headrace_steps(load(args), args.steps, folder=folder)


def torch_steps(args: argparse.Namespace) -> steps.Row:
    """Repeat the same batch: which tokens it contains does not change the time."""
    cfg = load(args)
    # Training fails without its last states.
    settings = dict(mode="train", chunk_size=int(args.only), return_last_states=True)
    model = steps.transformers_model(cfg, "eager", **settings)
    batches = steps.random_tokens(cfg)[:1]
    if args.folder is not None and (args.folder / "examples.npz").is_file():
        steps.load_weights(model, args.folder)
        ids = steps.load_examples(args.folder)["input_ids"]
        batches = [{"input_ids": ids, "labels": ids}]  # which it shifts by one itself
    return steps.torch_steps(model.train(), batches, args.steps)


if __name__ == "__main__":
    sys.exit(main())
