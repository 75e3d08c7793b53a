"""Correctness and speed of attention by cuDNN and by our own kernels. They are compared with the definition
in float32, and masked inputs are changed to check that no output changes. Then they are timed against the
other backends, and with long rows. Needs one Hopper GPU; from the repository's root:

    python -m benchmarks.attention_gpu          everything
    python -m benchmarks.attention_gpu times    only times, for rows of 4,096 tokens
    python -m benchmarks.attention_gpu long     only times, for rows of 4,096 to 131,072 tokens"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.attention import AttentionCall, attend, choose_backend
from headrace.nn.attention_mask import Mask

AUTO, XLA, CUDNN, HOPPER = (SimpleNamespace(use=name) for name in ("auto", "xla", "cudnn", "hopper"))
BLOCKWISE = SimpleNamespace(use="blockwise", block_q=512, block_kv=512)


@dataclass(frozen=True)
class Case:
    name: str
    mask: Mask
    packed: bool = False
    soft_cap: float | None = None


CASES = [
    Case("causal", Mask()),
    Case("bidirectional", Mask(causal=False)),
    Case("causal window", Mask(window=256)),
    Case("bidirectional window", Mask(causal=False, window=256)),
    Case("packed", Mask(), packed=True),
    Case("packed bidirectional", Mask(causal=False), packed=True),
    Case("packed window", Mask(window=256), packed=True),
    Case("packed window, soft cap", Mask(window=256), packed=True, soft_cap=20.0),
]


def main() -> int:
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}")
    if "long" in sys.argv[1:]:
        long_rows()
    if "times" in sys.argv[1:]:
        short_rows()
    if sys.argv[1:]:
        return 0
    failures = 0
    print(
        f"\n{'s 1024, bf16':24} {'':6} head {'out':>8} {'dq':>8} {'dk':>8} {'dv':>8}  {'bf16 xla':>8}  probes"
    )
    for cfg, head_dim in ((CUDNN, 64), (CUDNN, 128), (HOPPER, 64), (HOPPER, 128), (HOPPER, 256)):
        for case in CASES:
            if case.soft_cap is None or cfg is HOPPER:
                failures += check(cfg, case, head_dim)
    print("\nthe choice of auto, and why not cuDNN")
    for case in CASES:
        refusal(case.name, case, length=1024, dtype=jnp.bfloat16)
    refusal("causal, odd length", CASES[0], length=1023, dtype=jnp.bfloat16)
    refusal("packed, odd length", CASES[4], length=1023, dtype=jnp.bfloat16)
    refusal("float32", CASES[0], length=1024, dtype=jnp.float32)
    short_rows()
    print(f"\n{failures} wrong" if failures else "\nall right")
    return 1 if failures else 0


def check(cfg: Any, case: Case, head_dim: int) -> int:
    """Print a line of errors, relative to the largest value. Returns 1 if something is wrong."""
    arrays, segments = inputs(batch=2, length=1024, heads=(8, 2), head_dim=head_dim)
    with jax.default_matmul_precision("highest"):
        exact = run(XLA, case)(*(x.astype(jnp.float32) for x in arrays), segments)
    found, plain = (run(cfg, case)(*arrays, segments) for cfg in (cfg, XLA))
    errors = [error(x, y) for x, y in zip(found, exact, strict=True)]
    yardstick = max(error(x, y) for x, y in zip(plain, exact, strict=True))
    leaks = probe(cfg, case, arrays, segments)
    right = max(errors) < max(3 * yardstick, 2e-2) and not leaks
    columns = " ".join(f"{x:8.1e}" for x in errors)
    verdict = "ok" if right else f"WRONG {leaks}"
    print(f"{case.name:24} {cfg.use:6} {head_dim:4} {columns}  {yardstick:8.1e}  {verdict}")
    return 0 if right else 1


def short_rows() -> None:
    print("\nmilliseconds forward and backward at b 4, s 4096, 32 heads, 8 kv heads, head 64, median of 10")
    print(f"{'':24} {'cudnn':>8} {'hopper':>8} {'blockwise':>10}   hopper to cudnn")
    for case in CASES:
        if case.soft_cap is None:
            times = [measure(cfg, case) for cfg in (CUDNN, HOPPER, BLOCKWISE)]
            cells = f"{times[0] * 1e3:8.2f} {times[1] * 1e3:8.2f} {times[2] * 1e3:10.2f}"
            print(f"{case.name:24} {cells}   {times[1] / times[0]:.2f}")


def long_rows() -> None:
    """Milliseconds and GiB, forward and backward, of one row, 32 heads, 8 kv heads, head 64. Documents have
    4,096 tokens on average, drawn from an exponential distribution, or one fills the row. `-` where it takes
    too much."""
    ways = {
        "cudnn, one document": (CUDNN, False),
        "cudnn, mask": (CUDNN, True),
        "hopper": (HOPPER, True),
        "blockwise": (BLOCKWISE, True),
    }
    print(f"\n{'tokens':>7} {'documents':>9} {'window':>7}  " + " ".join(f"{name:>20}" for name in ways))
    for length in (4096, 32768, 131072):
        arrays, _ = inputs(batch=1, length=length, heads=(32, 8), head_dim=64)
        for mean in (4096, 4 * length):
            ids = drawn(length, mean)
            for window in (None, 4096):
                if window == length:
                    continue
                cells = [
                    timed(cfg, Mask(window=window), arrays, ids if told else None)
                    for cfg, told in ways.values()
                ]
                head = f"{length:7} {int(ids.max()):9} {window or '':>7}"
                print(head, "", " ".join(f"{cell:>20}" for cell in cells), flush=True)


def timed(cfg: Any, mask: Mask, arrays: list[Any], ids: Any) -> str:
    @jax.jit
    def both(q: Any, k: Any, v: Any, d_out: Any, ids: Any) -> Any:
        out, pull = jax.vjp(lambda q, k, v: attend(cfg, q, k, v, mask=mask, segments=ids), q, k, v)
        return out, *pull(d_out)

    try:
        compiled = both.lower(*arrays, ids).compile()
        used = compiled.memory_analysis().temp_size_in_bytes
        if used > 60 * 2**30:
            return f"- {used / 2**30:6.1f}"
        jax.block_until_ready(compiled(*arrays, ids))
        times = []
        for _ in range(5):
            start = time.perf_counter()
            jax.block_until_ready(compiled(*arrays, ids))
            times.append(time.perf_counter() - start)
    except Exception as problem:  # compilers and devices raise errors of any kind
        return type(problem).__name__[:18]
    return f"{statistics.median(times) * 1e3:9.2f} {used / 2**30:6.1f}"


def drawn(length: int, mean: int) -> Any:
    sizes = np.random.default_rng(0).exponential(mean, length).astype(int) + 16
    return jnp.asarray(1 + np.searchsorted(np.cumsum(sizes), np.arange(length), side="right"), jnp.int32)[
        None
    ]


def probe(cfg: Any, case: Case, arrays: list[Any], segments: Any) -> str:
    """Change one key and value, then one document, and name the change if other rows of the output change."""
    q, k, v, _ = arrays
    forward = jax.jit(lambda q, k, v: call(cfg, case, q, k, v, segments))
    before = forward(q, k, v)
    place, length = 600, q.shape[1]
    positions, ids = jnp.arange(length), segments[0]
    after = forward(q, k.at[:, place].set(4.0), v.at[:, place].set(4.0))
    sees = case.mask.allows(positions, positions[place : place + 1])
    if case.packed:
        sees &= ids == ids[place]
    problems = [] if same(moved(before, after), sees) else ["one key"]
    if case.packed:
        for document in (0, 1, 2):
            changed = (segments == document)[..., None, None]
            after = forward(*(jnp.where(changed, -2 * x, x) for x in (q, k, v)))
            problems += [] if same(moved(before, after), ids == document) else [f"document {document}"]
    return ", ".join(problems)


def refusal(name: str, case: Case, *, length: int, dtype: Any) -> None:
    q, k = (jax.ShapeDtypeStruct((2, length, heads, 64), dtype) for heads in (8, 2))
    call = AttentionCall(q, k, case.mask, 64**-0.5, case.soft_cap, case.packed)
    taken = choose_backend(AUTO, call)
    reason = ""
    if taken != "cudnn":
        try:
            choose_backend(CUDNN, call)
        except ValueError as problem:
            reason = str(problem)
    print(f"{name:24} {taken:10} {reason}")


def measure(cfg: Any, case: Case) -> float:
    arrays, segments = inputs(batch=4, length=4096, heads=(32, 8), head_dim=64)
    step = run(cfg, case)
    jax.block_until_ready([step(*arrays, segments) for _ in range(3)])
    times = []
    for _ in range(10):
        start = time.perf_counter()
        jax.block_until_ready(step(*arrays, segments))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def run(cfg: Any, case: Case) -> Callable[..., Any]:
    @jax.jit
    def both(q: Any, k: Any, v: Any, d_out: Any, segments: Any) -> Any:
        out, pull = jax.vjp(lambda q, k, v: call(cfg, case, q, k, v, segments), q, k, v)
        return out, *pull(d_out)

    return both


def call(cfg: Any, case: Case, q: Any, k: Any, v: Any, segments: Any) -> Any:
    ids = segments if case.packed else None
    return attend(cfg, q, k, v, mask=case.mask, segments=ids, soft_cap=case.soft_cap)


def inputs(*, batch: int, length: int, heads: tuple[int, int], head_dim: int) -> tuple[list[Any], Any]:
    """q, k, v and the output's gradient; every row has two documents and padding."""
    counts = (heads[0], heads[1], heads[1], heads[0])
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [
        jax.random.normal(key, (batch, length, count, head_dim), jnp.bfloat16)
        for key, count in zip(keys, counts, strict=True)
    ]
    position = jnp.arange(length)
    row = jnp.where(position < length * 7 // 8, 1 + (position >= length * 3 // 8), 0).astype(jnp.int32)
    return arrays, jnp.broadcast_to(row, (batch, length))


def error(x: Any, y: Any) -> float:
    x, y = (np.asarray(z, np.float32) for z in (x, y))
    return float(abs(x - y).max() / abs(y).max())


def moved(before: Any, after: Any) -> Any:
    return np.any(np.asarray(before != after), axis=(0, 2, 3))


def same(moved: Any, allowed: Any) -> bool:
    return bool((moved == np.asarray(allowed)).all())


if __name__ == "__main__":
    sys.exit(main())
