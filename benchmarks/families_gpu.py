"""Loss and gradients of every family on this machine's accelerator, as training computes them (bfloat16, the
attention that is chosen there), compared with float32 and plain attention on the same device. Packed rows,
windows, soft caps.

    python -m benchmarks.families_gpu [--length 4096]      a minute or two; fails if they differ"""

import argparse
import dataclasses
import sys
import time
from typing import Any

from headrace.model_wrappers import load_family

SIZES = dict(layers=5, embed=512, heads=8, kv_heads=4, head_dim=64, mlp=1024, vocab=4096)
SIZES |= dict(window=256, global_every=2)
APART = 0.05  # difference of gradients; bfloat16 alone causes 0.01 to 0.03


def main() -> int:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from headrace import objectives
    from headrace.config import reader, sections
    from headrace.nn import module
    from headrace.nn.stack import Execution
    from headrace.training import step

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("families", nargs="*", help="default: all")
    parser.add_argument("--length", type=int, default=2048)
    args = parser.parse_args()
    length = args.length
    rng, worst = np.random.default_rng(0), 0.0
    tokens = jnp.asarray(rng.integers(4, SIZES["vocab"], (2, length)))
    first = length // 3
    segments = jnp.broadcast_to(jnp.where(jnp.arange(length) < first, 1, 2), tokens.shape)
    places = jnp.where(jnp.arange(length) < first, jnp.arange(length), jnp.arange(length) - first)
    batch = objectives.Batch(tokens, segments, jnp.broadcast_to(places, tokens.shape))
    for use in args.families or reader.part_names("models"):
        begun = time.perf_counter()
        cls = reader.part_class("models", use)
        known = {field.name for field in dataclasses.fields(cls)}
        cfg = cls(**{key: value for key, value in SIZES.items() if key in known})
        family = load_family(cfg)
        params = module.init(family.Model, cfg, jax.random.key(0))
        axes = module.axes(family.Model, cfg)
        made: dict[str, Any] = {}
        for name, attention, compute in (("ours", "auto", "bfloat16"), ("plain", "xla", "float32")):
            job = objectives.TrainTask(
                model=cfg,
                objective=reader.part_class("objectives", "causal" if cls.causal else "masked")(),
                loss=reader.part_class("losses", "cross_entropy", sections.LossKeys)(soft_cap=30.0),
                exec_opts=Execution(reader.part_class("attention", attention)(), compute, unroll=32),
                special_tokens=objectives.SpecialTokens(SIZES["vocab"], pad=0, bos=1, eos=2, mask=3),
                family=family,
            )
            prepare = objectives.load_objective(job.objective).prepare

            def run(params: Any, job: Any = job, prepare: Any = prepare, axes: Any = axes) -> Any:
                examples = prepare(job, batch, jax.random.key(0))
                grads, sums = step.accumulate_gradients(job, axes, params, step.to_microbatches(examples, 1))
                return grads, sums["loss"] / sums["count"]

            with jax.default_matmul_precision("highest" if compute == "float32" else "default"):
                made[name] = jax.jit(run)(params)
        (ours, loss), (plain, exact) = made["ours"], made["plain"]
        rows = [
            (float(jnp.linalg.norm(a - b) / (jnp.linalg.norm(b) + 1e-9)), path)
            for (path, a), b in zip(module.named_leaves(ours), jax.tree.leaves(plain), strict=True)
        ]
        apart, path = max(rows)
        worst = max(worst, apart)
        print(
            f"{use:20} loss {float(loss):.4f} and {float(exact):.4f}; gradients {apart:.4f} apart at {path} "
            f"({time.perf_counter() - begun:.0f} s)",
            flush=True,
        )
    return int(worst > APART)


if __name__ == "__main__":
    sys.exit(main())
