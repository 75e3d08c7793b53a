"""Training speed of Llama on one GPU, rows of 4,096, against transformers + torch.compile in one run, and of
fp8 against bf16: Llama-3.2-1B, and as many layers of Llama-3-8B as both can hold.

    python -m benchmarks.llama_gpu 1b      about 2 minutes; prints tokens/s of all and their ratios
    python -m benchmarks.llama_gpu 8b      about 2 minutes
    python -m benchmarks.llama_gpu         both

Both: float32 master weights, bf16 compute, AdamW, clipping by global norm, random tokens, one document per
row, and the same weights and tokens in the first step, whose losses must be equal. torch is measured as
transformers runs it, and tuned: no mask, and the faster of torch's fused attentions. Each runs in a process
of its own, so that none finds memory taken by another. The weights pass from one to the next through a file
of up to 11 GB in a temporary folder."""

import argparse
import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import steps

LENGTH = 4096
GOAL, GOAL_FP8 = 1.35, 1.25
APART = 0.02  # nats that first losses on the same weights may differ by in bf16 or 8 bits
Part = tuple[str, dict[str, Any]]  # a recipe, and its settings
PARTS: dict[str, Part] = {
    "1b": ("recipes/llama3.2-1b.yaml", {"batch.sequences": 8}),
    "8b": ("recipes/llama3-8b.yaml", {"batch.sequences": 4, "model.layers": 10, "compute.remat": "none"}),
}
PEERS = ("torch", "tuned")
# Settings of Headrace's rows: logits in bf16, as in transformers; layers in fp8, and the head as well.
FORMATS: dict[str, dict[str, str]] = {
    "headrace": {},
    "bf16 logits": {"loss.backend": "bf16"},
    "and Triton": {"loss.backend": "bf16"},
    "fp8": {"compute.matmul": "fp8"},
    "fp8, head too": {"compute.matmul": "fp8", "loss.backend": "fp8"},
}
ENVIRONMENT = {"and Triton": {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=true"}}
BF16 = ("headrace", "bf16 logits", "and Triton")


def main() -> int:
    args = parse()
    if args.only:
        steps.report_row(functools.partial(run, args))
        return 0
    return max(compare(name, args) for name in args.parts or PARTS)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=" or ".join(PARTS))
    parser.add_argument(
        "--only", choices=[*PEERS, *FORMATS], help="run only one row of a part, in this process"
    )
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--folder", type=Path, help="folder through which weights and tokens pass")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="key=value", help="changes to the recipe of all"
    )
    args = parser.parse_args()
    for part in args.parts:
        if part not in PARTS:
            parser.error(f"{part} is not one of {', '.join(PARTS)}")
    return args


def load(name: str, row: str, args: argparse.Namespace) -> Any:
    recipe, settings = PARTS[name]
    common = {"data.sequence_length": LENGTH}
    return steps.load(recipe, common | settings | FORMATS.get(row, {}), args.set)


def compare(name: str, args: argparse.Namespace) -> int:
    """Print every row of a part, Headrace first, because it saves its weights for torch. Returns 1 if one
    failed, a goal is missed, or they do not compute the same."""
    cfg, rows = load(name, "headrace", args), {}
    shape = f"{cfg.batch.sequences} rows of {cfg.data.sequence_length:,}"
    print(f"{shape}, {cfg.model.layers} layers, {cfg.model.embed} wide")
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        for row in (*FORMATS, *PEERS):
            command = [name, "--only", row, "--steps", str(args.steps), "--folder", folder]
            command += ["--set", *args.set]
            rows[row] = steps.run_script("llama_gpu", *command, environment=ENVIRONMENT.get(row))
            print("  " + steps.format_row(row, rows[row], steps.flops_per_token(cfg)), flush=True)
    ours, torch = rows["headrace"], rows["torch"]
    for row in BF16:
        print(f"  {row} / transformers + torch.compile: {steps.format_ratio(rows[row], torch, GOAL)}")
    print(f"  headrace / the same, tuned: {steps.format_ratio(ours, rows['tuned'])}")
    for narrow in ("fp8", "fp8, head too"):
        print(f"  {narrow} / bf16: {steps.format_ratio(rows[narrow], ours, GOAL_FP8)}")
    equal = at_equal_loss(rows)
    print()
    best = max(steps.speed_ratio(rows[narrow], ours) or 0 for narrow in ("fp8", "fp8, head too"))
    missed = max(steps.speed_ratio(rows[row], torch) or 0 for row in BF16) < GOAL or best < GOAL_FP8
    return int(missed or not equal)


def at_equal_loss(rows: dict[str, steps.Row]) -> bool:
    """Print how far first losses are from transformers'. False if they are too far, or there is none."""
    peers = [rows[peer] for peer in PEERS if "failed" not in rows[peer]]
    found = {row: its["first_loss"] for row, its in rows.items() if "failed" not in its}
    if not peers or not any(row in found for row in FORMATS):
        print("  no first losses to compare")
        return False
    apart = {row: abs(loss - peers[0]["first_loss"]) for row, loss in found.items()}
    far = ", ".join(row for row, by in apart.items() if by >= APART)
    verdict = f"DIFFER ({far})" if far else "agree"
    print(f"  first losses on the same weights {verdict}, at most {max(apart.values()):.1e} apart")
    return not far


def run(args: argparse.Namespace) -> steps.Row:
    cfg = load(args.parts[0], args.only, args)
    if args.only in FORMATS:
        folder = None if FORMATS[args.only] else args.folder  # all use the weights of the first
        return steps.headrace_steps(cfg, args.steps, folder=folder)
    tuned = args.only == "tuned"
    model = steps.transformers_model(cfg, steps.UNMASKED if tuned else "sdpa")
    attention = steps.fastest_attention(cfg) if tuned else "sdpa"
    batches = steps.random_tokens(cfg)
    if args.folder is not None and (args.folder / "examples.npz").is_file():
        steps.load_weights(model, args.folder)
        ids = steps.load_examples(args.folder)["input_ids"]
        batches = [{"input_ids": ids, "labels": ids}]  # which it shifts by one itself
    return steps.torch_steps(model, batches, args.steps) | {"attention": attention}


if __name__ == "__main__":
    sys.exit(main())
