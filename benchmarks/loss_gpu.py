"""Time and extra memory of the head and its loss, forward and backward, on one GPU: cut cross entropy by
tokens, by the vocabulary and by kernels, full logits in JAX, torch eager and torch.compile, in one run. The
default shape is Gemma 2 2B's. From the repository's root:

    python -m benchmarks.loss_gpu              one GPU; the kernels are for Hopper
    python -m benchmarks.loss_gpu --small      a CPU, a small shape; its times say nothing

What cannot be run, for want of memory or of the right chip, is told in its row."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.steps import reason, torch_device

REPEATS = 20
SMALL = dict(tokens=256, embed=64, vocab=1000)
Row = dict[str, Any]  # of one way, or `failed`: why it has nothing to tell


def main() -> None:
    options = parse()
    if options.torch:
        for row in torch_rows(options.tokens, options.embed, options.vocab):
            print("ROW", json.dumps(row), flush=True)
        return
    # torch first and in its own process: its memory is back with the driver before JAX takes any.
    rows = in_a_process_of_its_own(options)
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    rows += jax_rows(options.tokens, options.embed, options.vocab, options.unembed)
    report(rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help=f"a shape for CPUs: {SMALL}")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--embed", type=int, default=2304)
    parser.add_argument("--vocab", type=int, default=256_000)
    parser.add_argument("--unembed", choices=["bfloat16", "float32"], default="bfloat16", help="in JAX")
    parser.add_argument("--torch", action="store_true", help="only torch, for the process of its own")
    options = parser.parse_args()
    return argparse.Namespace(**vars(options) | (SMALL if options.small else {}))


def in_a_process_of_its_own(options: argparse.Namespace) -> list[Row]:
    command = [sys.executable, "-m", "benchmarks.loss_gpu", "--torch"]
    command += [f"--{name}={getattr(options, name)}" for name in SMALL]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if result.returncode:
        print(f"torch failed with exit code {result.returncode}", file=sys.stderr)
    lines = result.stdout.splitlines()
    return [json.loads(line.removeprefix("ROW ")) for line in lines if line.startswith("ROW ")]


def torch_rows(tokens: int, embed: int, vocab: int) -> list[Row]:
    import torch

    device = torch_device()
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    torch.manual_seed(0)
    hidden = (torch.randn(tokens, embed, device=device) * 0.5).bfloat16().requires_grad_()
    unembed = (torch.randn(vocab, embed, device=device) * 0.02).bfloat16().requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device=device)

    def loss() -> Any:
        return torch.nn.functional.cross_entropy((hidden @ unembed.T).float(), targets)

    def row(name: str, loss: Callable[[], Any]) -> Row:
        def step() -> Any:
            hidden.grad = unembed.grad = None
            value = loss()
            value.backward()
            wait()
            return value

        step()
        hidden.grad = unembed.grad = None
        gradients = 2 * (hidden.numel() + unembed.numel())
        if device == "cpu":  # which does not count its memory
            return dict(name=name, ms=median_ms(step), loss=step().item())
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated() + gradients
        torch.cuda.reset_peak_memory_stats()
        value = step().item()
        extra = torch.cuda.max_memory_allocated() - before
        return dict(name=name, ms=median_ms(step), extra_mib=extra / 2**20, loss=value)

    ways = {"torch eager": loss, "torch.compile": torch.compile(loss)}
    return [attempt(name, lambda name=name: row(name, ways[name])) for name in ways]


def attempt(name: str, work: Callable[[], Row]) -> Row:
    """A row whatever becomes of it."""
    try:
        return work()
    except Exception as error:  # frameworks and kernels raise errors of every kind
        return dict(name=name, failed=reason(error))


def jax_rows(tokens: int, embed: int, vocab: int, unembed_dtype: str) -> list[Row]:
    import jax
    import jax.numpy as jnp

    from millrace.kernels.cut_cross_entropy import cut
    from millrace.kernels.head import Stats

    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}: {tokens} tokens, {embed} wide, vocabulary {vocab}")
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = (0.5 * jax.random.normal(keys[0], (1, tokens, embed))).astype(jnp.bfloat16)
    unembed = (0.02 * jax.random.normal(keys[1], (vocab, embed))).astype(unembed_dtype)
    targets = jax.random.randint(keys[2], (1, tokens), 0, vocab)
    weights = jnp.full((1, tokens), 1 / tokens)

    def cross_entropy(stats: Stats) -> Any:
        return stats.lse - stats.target

    def full(hidden: Any, unembed: Any, targets: Any, weights: Any) -> Any:
        matrix = unembed.astype(hidden.dtype)
        logits = jnp.einsum("bsd,vd->bsv", hidden, matrix, preferred_element_type=jnp.float32)
        target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return (weights * (jax.nn.logsumexp(logits, axis=-1) - target)).sum()

    def by(split: str, chunk: int | str = "auto", filter: float = 0.0) -> Row:
        how = dict(split=split, chunk=chunk, filter=filter)
        name = f"by {split}, " + (f"filter {filter:.1e}" if filter else str(chunk))
        return attempt(name, lambda: row(name, lambda *arrays: cut(cross_entropy, *arrays, **how).loss))

    arrays = hidden, unembed, targets, weights
    truth: Any = None

    def row(name: str, loss: Callable[..., Any]) -> Row:
        nonlocal truth
        compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arrays).compile()
        memory: Any = compiled.memory_analysis()
        value, gradients = compiled(*arrays)
        truth = gradients if truth is None else truth
        apart = max(relative(one, other) for one, other in zip(gradients, truth, strict=True))
        del gradients
        ms = median_ms(lambda: jax.block_until_ready(compiled(*arrays)))
        extra = memory.temp_size_in_bytes / 2**20
        return dict(name=name, ms=ms, extra_mib=extra, loss=float(value), apart=apart)

    rows = [attempt("JAX full logits", lambda: row("JAX full logits", full))]
    rows += [by("tokens", size) for size in ("auto", 512, 2048, 4096)]
    rows += [by("vocabulary", size) for size in ("auto", 4096, 8192)]
    return [*rows, by("kernel"), by("kernel", filter=2.0**-12)]


def relative(one: Any, other: Any) -> float:
    """The distance between two arrays over the length of the second."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def distance(one: Any, other: Any) -> Any:
        one, other = one.astype(jnp.float32), other.astype(jnp.float32)
        return jnp.linalg.norm(one - other) / jnp.linalg.norm(other)

    return float(distance(one, other))


def median_ms(step: Callable[[], Any]) -> float:
    for _ in range(3):
        step()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def report(rows: list[Row]) -> None:
    """Extra memory is what is needed beyond the inputs and the two gradients."""
    ours = next(row for row in rows if row["name"] == "by tokens, auto")
    print(f"{'':26}{'ms':>9}{'extra MiB':>11}{'loss':>9}{'time/ours':>11}{'memory/ours':>13}  gradients off")
    for row in rows:
        if "failed" in row:
            print(f"{row['name']:26}  {row['failed']}")
            continue
        extra = f"{row['extra_mib']:.0f}" if "extra_mib" in row else ""
        apart = f"{row['apart']:.1e}" if "apart" in row else ""
        print(
            f"{row['name']:26}{row['ms']:9.1f}{extra:>11}{row['loss']:9.4f}"
            f"{ratio(row, ours, 'ms'):>11}{ratio(row, ours, 'extra_mib'):>13}  {apart}"
        )


def ratio(row: Row, ours: Row, key: str) -> str:
    """Nothing where one of the two is not known, or ours is none."""
    return f"{row[key] / ours[key]:.2f}" if key in row and ours.get(key) else ""


if __name__ == "__main__":
    main()
