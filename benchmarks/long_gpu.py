"""Long rows on one GPU against transformers + torch.compile in one run: 32,768 tokens through some layers of
Gemma 2 9B, and of a Llama of its shape, and 131,072 tokens through Llama-3.2-1B.

    python -m benchmarks.long_gpu gemma    about 3 minutes
    python -m benchmarks.long_gpu 32k      about 3 minutes
    python -m benchmarks.long_gpu 131k     about 2 minutes; the table says what does not fit in memory
    python -m benchmarks.long_gpu          all of them

Both sides: float32 master weights, bf16 compute, AdamW, clipping by global norm, random tokens, one row with
one document. torch gets the faster of its fused attentions. For Gemma 2, whose soft caps these do not
support, it gets the one of transformers that supports them and skips what is outside a window
(flex_attention). Rows are named by what is recomputed in the backward pass: none, or every layer (full)."""

import argparse
import functools
import sys
from dataclasses import dataclass
from typing import Any

from benchmarks import steps

# Torch's memory does not fragment, and JAX may take nearly all of it as well.
ENVIRONMENT = {
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
}


@dataclass(frozen=True)
class Part:
    recipe: str
    settings: dict[str, Any]
    remats: tuple[str, ...]  # of Headrace, one row each
    steps: int
    attention: str = steps.UNMASKED  # of torch


GEMMA = {"model.layers": 8, "data.sequence_length": 32_768}
# Gemma 2's sizes as a Llama, for which torch's fused attentions can be used.
AS_LLAMA = {"model.use": "llama", "model.activation": "geglu", "model.rope_theta": 10_000.0}
AS_LLAMA |= {"model.norm_eps": 1e-6}

PARTS = {
    "gemma": Part("recipes/gemma2-9b-32k.yaml", GEMMA, ("full", "none"), 6, "flex_attention"),
    "32k": Part(
        "recipes/gemma2-9b-32k.yaml",
        GEMMA | AS_LLAMA | {"loss.soft_cap": "null"},
        ("full", "none"),
        steps=6,
    ),
    "131k": Part("recipes/llama3.2-1b.yaml", {"data.sequence_length": 131_072}, ("full",), steps=3),
}


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
        "--only", metavar="ROW", help="run only one row of a part, in this process, e.g. torch full"
    )
    parser.add_argument("--steps", type=int, help="default: 6 and 3")
    parser.add_argument("--limit", type=float, default=150, help="time limit of a row in seconds")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="key=value", help="changes to the recipe of both"
    )
    args = parser.parse_args()
    for part in args.parts:
        if part not in PARTS:
            parser.error(f"{part} is not one of {', '.join(PARTS)}")
    return args


def load(name: str, remat: str, args: argparse.Namespace) -> Any:
    part = PARTS[name]
    return steps.load(part.recipe, {"batch.sequences": 1, "compute.remat": remat} | part.settings, args.set)


def compare(name: str, args: argparse.Namespace) -> int:
    """Print every row of a part. Returns 1 if Headrace has none."""
    part, cfg = PARTS[name], load(name, "full", args)
    model, length = cfg.model, cfg.data.sequence_length
    print(f"{length:,} tokens, {model.layers} layers, {model.embed} wide, vocabulary {model.vocab:,}")
    rows: dict[str, steps.Row] = {}
    wanted = ["torch none", "torch full", *(f"headrace {remat}" for remat in part.remats)]
    for row in wanted:
        more = [] if args.steps is None else ["--steps", str(args.steps)]
        command = [name, "--only", row, *more, "--set", *args.set]
        rows[row] = steps.run_script("long_gpu", *command, limit=args.limit, environment=ENVIRONMENT)
        print("  " + steps.format_row(row, rows[row], steps.flops_per_token(cfg)), flush=True)
    peers, ours = ([row for row in wanted if row.startswith(who)] for who in ("torch", "headrace"))
    alike = steps.format_ratio(rows["headrace full"], rows["torch full"])
    best = [max((rows[row] for row in names), key=speed) for names in (ours, peers)]
    print(f"  headrace / torch: {alike} with full checkpointing, {steps.format_ratio(*best)} best to best\n")
    return int(speed(best[0]) == 0)


def speed(row: steps.Row) -> float:
    return row.get("tokens_per_second", 0.0)


def run(args: argparse.Namespace) -> steps.Row:
    who, remat = args.only.split()
    name = args.parts[0]
    cfg, count = load(name, remat, args), args.steps or PARTS[name].steps
    if who == "headrace":
        return steps.headrace_steps(cfg, count)
    attention = PARTS[name].attention
    model = steps.transformers_model(cfg, attention)
    if attention == steps.UNMASKED:
        attention = steps.fastest_attention(cfg)
    if remat == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return steps.torch_steps(model, steps.random_tokens(cfg), count) | {"attention": attention}


if __name__ == "__main__":
    sys.exit(main())
