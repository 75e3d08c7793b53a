"""Training speed of Llama on one GPU, rows of 4,096, against transformers + torch.compile in one run, and of
fp8 against bf16: Llama-3.2-1B, and as many layers of Llama-3-8B as both can hold.

    python -m benchmarks.llama_gpu 1b      about 2 minutes; prints tokens/s of all and their ratios
    python -m benchmarks.llama_gpu 8b      about 2 minutes
    python -m benchmarks.llama_gpu         both

Both: float32 master weights, bf16 compute, AdamW, clipping by global norm, random tokens, one document a row.
torch is measured as transformers runs it, and tuned: no mask, and the faster of torch's fused attentions.
Each runs in a process of its own, so that none finds another's memory taken."""

import argparse
import functools
import sys
from typing import Any

from benchmarks import steps

LENGTH = 4096
GOAL, GOAL_FP8 = 1.35, 1.25
Part = tuple[str, dict[str, Any]]  # a recipe, and its settings
PARTS: dict[str, Part] = {
    "1b": ("recipes/llama3.2-1b.yaml", {"batch.sequences": 8}),
    "8b": ("recipes/llama3-8b.yaml", {"batch.sequences": 4, "model.layers": 10, "memory.remat": "none"}),
}
PEERS = ("torch", "tuned")
# Settings of our rows: logits in bf16, as transformers has them; the layers in fp8, and the head as well.
FORMATS: dict[str, dict[str, str]] = {
    "millrace": {},
    "bf16 logits": {"loss.split": "bf16"},
    "and Triton": {"loss.split": "bf16"},
    "fp8": {"memory.products": "fp8"},
    "fp8, head too": {"memory.products": "fp8", "loss.split": "fp8"},
}
ENVIRONMENT = {"and Triton": {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=true"}}
BF16 = ("millrace", "bf16 logits", "and Triton")


def main() -> int:
    args = parse()
    if args.only:
        steps.tell(functools.partial(run, args))
        return 0
    return max(compare(name, args) for name in args.parts or PARTS)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=" or ".join(PARTS))
    parser.add_argument("--only", choices=[*PEERS, *FORMATS], help="run one row of a part, in this process")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="for the recipe of all")
    args = parser.parse_args()
    for part in args.parts:
        if part not in PARTS:
            parser.error(f"{part} is none of {', '.join(PARTS)}")
    return args


def load(name: str, row: str, args: argparse.Namespace) -> Any:
    recipe, settings = PARTS[name]
    common = {"data.sequence_length": LENGTH}
    return steps.load(recipe, common | settings | FORMATS.get(row, {}), args.set)


def compare(name: str, args: argparse.Namespace) -> int:
    """Prints every row of a part; 1 if one failed or a goal is missed."""
    cfg, rows = load(name, "millrace", args), {}
    print(f"{cfg.batch.sequences} rows of {LENGTH:,}, {cfg.model.layers} layers, {cfg.model.embed} wide")
    for row in (*PEERS, *FORMATS):
        command = [name, "--only", row, "--steps", str(args.steps), "--set", *args.set]
        rows[row] = steps.alone("llama_gpu", *command, environment=ENVIRONMENT.get(row))
        print("  " + steps.line(row, rows[row], steps.flops(cfg)), flush=True)
    ours, torch = rows["millrace"], rows["torch"]
    for row in BF16:
        print(f"  {row} / transformers + torch.compile: {steps.spoken(rows[row], torch, GOAL)}")
    print(f"  millrace / the same, tuned: {steps.spoken(ours, rows['tuned'])}")
    for narrow in ("fp8", "fp8, head too"):
        print(f"  {narrow} / bf16: {steps.spoken(rows[narrow], ours, GOAL_FP8)}")
    print()
    best = max(steps.ratio(rows[narrow], ours) or 0 for narrow in ("fp8", "fp8, head too"))
    return int(max(steps.ratio(rows[row], torch) or 0 for row in BF16) < GOAL or best < GOAL_FP8)


def run(args: argparse.Namespace) -> steps.Row:
    cfg = load(args.parts[0], args.only, args)
    if args.only in FORMATS:
        return steps.millrace_steps(cfg, args.steps)
    tuned = args.only == "tuned"
    model = steps.transformers_model(cfg, steps.UNMASKED if tuned else "sdpa")
    attention = steps.fastest_attention(cfg) if tuned else "sdpa"
    return steps.torch_steps(model, steps.random_tokens(cfg), args.steps) | {"attention": attention}


if __name__ == "__main__":
    sys.exit(main())
