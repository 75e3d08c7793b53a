"""Quantization: the cost of training with few bits per weight, and the time to quantize a layer of a large
model.

    python -m benchmarks.quantize              one GPU, about 5 minutes: Llama 2 7B, a layer of Llama 3 8B
    python -m benchmarks.quantize --small      a CPU, small shapes; its times mean nothing

Training in 4 bits with all weights (QAT) and LR-QAT, each in a process of its own, on random tokens: tokens/s
and peak memory. For the same model with one row of 1,024 tokens per step, LR-QAT's paper reports 98 GB for
QAT, 62 GB if activations are recomputed, and 20.5 GB for itself. Quantized are random matrices of a layer's
shapes, with Hessians of random inputs; the seconds do not include compilation."""

import argparse
import sys
import time
from typing import Any

from benchmarks import steps

RECIPE = "recipes/llama3-8b.yaml"
COMMON: dict[str, Any] = {
    "model.vocab": 32000,
    "model.kv_heads": 32,
    "model.mlp": 11008,
    "batch.sequences": 1,
    "qat.bits": 4,
    "compute.remat": "full",
    "data.sequence_length": 1024,
    "init_from": "unread",
}
SMALL: dict[str, Any] = {"model.embed": 128, "model.layers": 2, "model.heads": 4, "model.kv_heads": 2}
SMALL |= {"model.mlp": 256, "model.vocab": 512, "model.head_dim": 32, "data.sequence_length": 64}
KINDS: dict[str, dict[str, Any]] = {"all weights": {}, "low rank": {"qat.rank": 32}}
METHODS = {"rtn": ["bits=4"], "gptq": ["bits=4"], "vptq": ["bits=2"]}
LAYER = {"4096 x 4096": (4096, 4096), "4096 x 14336": (4096, 14336), "14336 x 4096": (14336, 4096)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", choices=[*KINDS, *METHODS])
    args = parser.parse_args()
    if args.only in KINDS:
        steps.report_row(lambda: train(args.only, args.small))
        return
    if args.only:
        steps.report_row(lambda: rounded(args.only, args.small))
        return
    small = ["--small"] if args.small else []
    all_of_it = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.97"}  # of the device; allocations are counted, not this
    rows = {
        kind: steps.run_script("quantize", "--only", kind, *small, environment=all_of_it) for kind in KINDS
    }
    for kind, row in rows.items():
        print(steps.format_row(kind, row, steps.flops_per_token(recipe(kind, args.small))), flush=True)
    if not any("failed" in row for row in rows.values()) and rows["low rank"]["memory"]:
        share = rows["all weights"]["memory"] / rows["low rank"]["memory"]
        print(f"memory: training all weights takes {share:.2f} times as much")
    for method in METHODS:
        row = steps.run_script("quantize", "--only", method, *small, limit=600)
        print(f"{method:8}", ", ".join(f"{shape} {value}" for shape, value in row.items()), flush=True)


def recipe(kind: str, small: bool) -> Any:
    return steps.load(RECIPE, COMMON | (SMALL if small else {}) | KINDS[kind])


def train(kind: str, small: bool) -> steps.Row:
    return steps.headrace_steps(recipe(kind, small), 4 if small else 12)


def rounded(method: str, small: bool) -> steps.Row:
    import jax

    from headrace.config import recipe
    from headrace.quantize import run as quantize_run

    cfg = recipe.load_method(method, METHODS[method])
    told = {}
    for name, (inputs, outputs) in LAYER.items():
        inputs, outputs = (inputs // 32, outputs // 32) if small else (inputs, outputs)
        keys = jax.random.split(jax.random.key(0), 3)
        w = jax.random.normal(keys[0], (inputs, outputs)) / 50
        x = jax.random.normal(keys[1], (4 * inputs, inputs))
        hessian = x.T @ x / len(x) if method != "rtn" else None
        for _ in range(2):  # compiled by the first call
            begun = time.perf_counter()
            jax.block_until_ready(quantize_run.run_method(cfg, w, hessian, keys[2]))
        told[name] = f"{time.perf_counter() - begun:.2f} s"
    return told


if __name__ == "__main__":
    sys.exit(main())
