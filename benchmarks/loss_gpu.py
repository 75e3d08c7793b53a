"""Time and extra memory of the head and its loss, forward and backward, on one GPU, and the error of its
gradients: cut cross entropy by tokens, by vocabulary and in kernels, full logits in JAX, torch eager,
torch.compile and Apple's cut cross entropy, in one run. The default shape is Gemma 2 2B's. From the
repository's root:

    python -m benchmarks.loss_gpu              one GPU; the kernels are for Hopper
    python -m benchmarks.loss_gpu --small      a CPU, a small shape; its times mean nothing

All have the same inputs in bf16, and are compared with float32 logits of these, multiplied in full precision.
Each framework computes that reference for itself, some tokens at a time. If something cannot run, because
memory, the right chip or a package is missing, its row says so. Apple's is not a dependency of Headrace:

    pip install --no-deps "cut-cross-entropy @ git+https://github.com/apple/ml-cross-entropy.git"

PyPI has an older version by that name (25.1.1), which has only the first two of its rows."""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.steps import describe_error, torch_device

REPEATS = 20
SMALL = dict(tokens=256, embed=64, vocab=1000)
PART = 512  # tokens per part of the float32 reference: 0.5 GB of logits with a vocabulary of 256,000
APPLE: dict[str, dict[str, Any]] = {
    "Apple's cut": {},
    "Apple's, no filter": {"filter_eps": None},
    "Apple's, exact": {"impl": "cce_exact"},
    "Apple's, for pre-training": {"impl": "cce_kahan_full_c"},
}
Row = dict[str, Any]  # of one implementation, or `failed`: the reason for having no result


def main() -> None:
    options = parse()
    if options.torch:
        for row in torch_rows(options.tokens, options.embed, options.vocab):
            print("ROW", json.dumps(row), flush=True)
        return
    # torch first and in its own process, so that its memory is free before JAX takes any.
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
    parser.add_argument("--torch", action="store_true", help="run only torch; internal")
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


def drawn(tokens: int, embed: int, vocab: int) -> tuple[Any, Any, Any]:
    """Hidden states and the vocabulary matrix in bf16, and targets; the same for every caller."""
    import ml_dtypes

    random = np.random.default_rng(0)

    def normal(rows: int, scale: float) -> Any:
        made = np.empty((rows, embed), ml_dtypes.bfloat16)
        for part in np.array_split(made, -(-rows // 4096)):  # twice as large in float32, so not all at once
            part[:] = scale * random.standard_normal(part.shape, np.float32)
        return made

    return normal(tokens, 0.5), normal(vocab, 0.02), random.integers(0, vocab, tokens)


def torch_rows(tokens: int, embed: int, vocab: int) -> list[Row]:
    import torch

    device = torch_device()
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    *matrices, numbers = drawn(tokens, embed, vocab)
    hidden, unembed = (
        torch.from_numpy(matrix.view(np.int16)).view(torch.bfloat16).to(device).requires_grad_()
        for matrix in matrices
    )
    targets = torch.from_numpy(numbers).to(device)
    truth = torch_truth(hidden, unembed, targets)

    def loss() -> Any:
        return torch.nn.functional.cross_entropy((hidden @ unembed.T).float(), targets)

    def apple(how: dict[str, Any]) -> Callable[[], Any]:
        theirs = importlib.import_module("cut_cross_entropy").linear_cross_entropy
        return lambda: theirs(hidden, unembed, targets, **how)

    def row(name: str, loss: Callable[[], Any]) -> Row:
        def step() -> Any:
            hidden.grad = unembed.grad = None
            value = loss()
            value.backward()
            wait()
            return value

        made = dict(name=name, loss=step().item())
        made["off"] = [
            (torch.linalg.vector_norm(x.grad.float() - right) / torch.linalg.vector_norm(right)).item()
            for x, right in zip((hidden, unembed), truth, strict=True)
        ]
        hidden.grad = unembed.grad = None
        gradients = 2 * (hidden.numel() + unembed.numel())
        if device == "cpu":  # which does not report its memory
            return made | dict(ms=median_ms(step))
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated() + gradients
        torch.cuda.reset_peak_memory_stats()
        step()
        extra = torch.cuda.max_memory_allocated() - before
        return made | dict(ms=median_ms(step), extra_mib=extra / 2**20)

    ways = {"torch eager": lambda: loss, "torch.compile": lambda: torch.compile(loss)}
    ways |= {name: lambda how=how: apple(how) for name, how in APPLE.items()}
    return [attempt(name, lambda name=name: row(name, ways[name]())) for name in ways]


def torch_truth(hidden: Any, unembed: Any, targets: Any) -> tuple[Any, Any]:
    """The gradients of both in float32."""
    import torch

    torch.set_float32_matmul_precision("highest")  # no TF32
    matrix = unembed.detach().float()
    d_hidden, d_unembed = [], torch.zeros_like(matrix)
    for x, y in zip(hidden.detach().float().split(PART), targets.split(PART), strict=True):
        d = torch.softmax(x @ matrix.T, dim=1)
        d[torch.arange(len(y), device=y.device), y] -= 1
        d /= len(targets)
        d_hidden.append(d @ matrix)
        d_unembed += d.T @ x
    return torch.cat(d_hidden), d_unembed


def attempt(name: str, work: Callable[[], Row]) -> Row:
    """A row, also if it fails."""
    try:
        return work()
    except Exception as error:  # frameworks and kernels raise errors of any kind
        return dict(name=name, failed=describe_error(error))


def jax_rows(tokens: int, embed: int, vocab: int, unembed_dtype: str) -> list[Row]:
    import jax
    import jax.numpy as jnp

    from headrace.kernels.linear_cross_entropy.dispatch import fused_cross_entropy
    from headrace.kernels.linear_cross_entropy.stats import negative_log_likelihood

    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}: {tokens} tokens, {embed} wide, vocabulary {vocab}")
    hidden, unembed, targets = (jnp.asarray(array) for array in drawn(tokens, embed, vocab))
    truth = jax_truth(hidden, unembed, targets)
    hidden, unembed, targets = hidden[None], unembed.astype(unembed_dtype), targets[None]
    weights = jnp.full((1, tokens), 1 / tokens)

    def full(hidden: Any, unembed: Any, targets: Any, weights: Any) -> Any:
        matrix = unembed.astype(hidden.dtype)
        logits = jnp.einsum("bsd,vd->bsv", hidden, matrix, preferred_element_type=jnp.float32)
        target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return (weights * (jax.nn.logsumexp(logits, axis=-1) - target)).sum()

    def by(backend: str, chunk_size: int | str = "auto", filter_eps: float = 0.0) -> Row:
        options = dict(backend=backend, chunk_size=chunk_size, filter_eps=filter_eps)
        name = f"by {backend}, " + (f"filter {filter_eps:.1e}" if filter_eps else str(chunk_size))
        loss = lambda *arrays: fused_cross_entropy(negative_log_likelihood, *arrays, **options).loss
        return attempt(name, lambda: row(name, loss))

    arrays = hidden, unembed, targets, weights

    def row(name: str, loss: Callable[..., Any]) -> Row:
        compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arrays).compile()
        memory: Any = compiled.memory_analysis()
        value, gradients = compiled(*arrays)
        off = [relative(one.reshape(right.shape), right) for one, right in zip(gradients, truth, strict=True)]
        del gradients
        ms = median_ms(lambda: jax.block_until_ready(compiled(*arrays)))
        extra = memory.temp_size_in_bytes / 2**20
        return dict(name=name, ms=ms, extra_mib=extra, loss=float(value), off=off)

    rows = [attempt("JAX full logits", lambda: row("JAX full logits", full))]
    rows += [by("tokens", size) for size in ("auto", 512, 2048, 4096)]
    rows += [by("vocabulary", size) for size in ("auto", 4096, 8192)]
    return [*rows, by("kernel"), by("kernel", filter_eps=2.0**-12)]


def jax_truth(hidden: Any, unembed: Any, targets: Any) -> tuple[Any, Any]:
    """The gradients of both in float32."""
    import jax
    import jax.numpy as jnp

    @partial(jax.jit, donate_argnums=0)
    def part(d_unembed: Any, matrix: Any, x: Any, y: Any) -> tuple[Any, Any]:
        with jax.default_matmul_precision("highest"):  # no TF32
            d = jax.nn.softmax(x @ matrix.T) - jax.nn.one_hot(y, len(matrix))
            d /= len(targets)
            return d_unembed + d.T @ x, d @ matrix

    x, matrix = hidden.astype(jnp.float32), unembed.astype(jnp.float32)
    d_hidden, d_unembed = [], jnp.zeros_like(matrix)
    for first in range(0, len(x), PART):
        here = slice(first, first + PART)
        d_unembed, d_x = part(d_unembed, matrix, x[here], targets[here])
        d_hidden.append(d_x)
    return jnp.concatenate(d_hidden), d_unembed


def relative(one: Any, other: Any) -> float:
    """The distance between two arrays, relative to the norm of the second."""
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
    """Print the table. Extra memory is memory beyond the inputs and the two gradients. The error of a
    gradient is its distance from the reference, relative to the reference's norm."""
    ours = next(row for row in rows if row["name"] == "by tokens, auto")
    names = f"{'ms':>9}{'extra MiB':>11}{'loss':>9}{'time/ours':>11}{'memory/ours':>13}"
    print(f"{'':26}{names}  d hidden err  d unembed err")
    for row in rows:
        if "failed" in row:
            print(f"{row['name']:26}  {row['failed']}")
            continue
        extra = f"{row['extra_mib']:.0f}" if "extra_mib" in row else ""
        print(
            f"{row['name']:26}{row['ms']:9.1f}{extra:>11}{row['loss']:9.4f}"
            f"{ratio(row, ours, 'ms'):>11}{ratio(row, ours, 'extra_mib'):>13}"
            f"{row['off'][0]:14.1e}{row['off'][1]:15.1e}"
        )


def ratio(row: Row, ours: Row, key: str) -> str:
    """The ratio to ours; empty if either is not known, or ours is 0."""
    return f"{row[key] / ours[key]:.2f}" if key in row and ours.get(key) else ""


if __name__ == "__main__":
    main()
