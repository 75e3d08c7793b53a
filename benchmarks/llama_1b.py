"""Training speed at the Llama-3.2-1B shape, sequence 4096, against transformers + torch.compile in one run.

    python -m benchmarks.llama_1b          one GPU, about 4 minutes; prints tokens/s of both and their ratio

Both: float32 master weights, bf16 compute, AdamW, clipping by global norm, random tokens, one document a row.
Each runs in a process of its own, so that neither finds the other's memory taken."""

import argparse
import json
import statistics
import subprocess
import sys
import time

LENGTH = 4096
VOCAB = 128_256


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--only", choices=["torch", "millrace"], help="run one of the two, in this process")
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--steps", type=int, default=15)
    options.add_argument("overrides", nargs="*", metavar="key=value", help="for Millrace's recipe")
    args = options.parse_args()
    if args.only:
        work = torch_steps if args.only == "torch" else millrace_steps
        print(json.dumps(work(args)), flush=True)
        return
    rows = {}
    for name in ("torch", "millrace"):
        command = [sys.executable, "-m", "benchmarks.llama_1b", "--only", name]
        command += ["--batch", str(args.batch), "--steps", str(args.steps), *args.overrides]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows[name] = json.loads(done.stdout.splitlines()[-1])
        print(f"{name:9} {summary(rows[name])}", flush=True)
    ratio = rows["millrace"]["tokens_per_second"] / rows["torch"]["tokens_per_second"]
    print(f"millrace / transformers + torch.compile: {ratio:.3f}")


def summary(row: dict) -> str:
    return (
        f"{row['tokens_per_second']:10,.0f} tokens/s   {row['teraflops']:6.0f} model TFLOP/s   "
        f"first step {row['first_step']:5.1f} s   {row['memory'] / 2**30:6.1f} GiB   loss {row['loss']:.3f}"
    )


def result(seconds: list[float], tokens: int, params: int, memory: int, loss: float) -> dict:
    per_step = statistics.median(seconds[3:])
    flops = 6 * params + 6 * 16 * 2048 * LENGTH  # causal scores counted half
    rate = tokens / per_step
    return {
        "tokens_per_second": rate,
        "teraflops": rate * flops / 1e12,
        "first_step": seconds[0],
        "memory": memory,
        "loss": loss,
    }


def torch_steps(args: argparse.Namespace) -> dict:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_float32_matmul_precision("high")
    cfg = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(cfg)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def loss_of(ids):
        with torch.autocast("cuda", torch.bfloat16):
            return model(input_ids=ids, labels=ids).loss

    loss_of = torch.compile(loss_of)
    batches = [torch.randint(0, VOCAB, (args.batch, LENGTH), device="cuda") for _ in range(4)]
    seconds = []
    for number in range(args.steps):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        loss = loss_of(batches[number % 4])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    params = sum(weight.numel() for weight in model.parameters())
    memory = torch.cuda.max_memory_allocated()
    return result(seconds, args.batch * LENGTH, params, memory, loss.item())


def millrace_steps(args: argparse.Namespace) -> dict:
    import jax

    from millrace import build, metrics, module, programs, recipe, step
    from millrace.evaluate import row_sharding
    from millrace.objective import Batch, Vocabulary, file, make_task

    settings = {"batch.accumulate": 1, "batch.sequences": args.batch, "data.sequence_length": LENGTH}
    settings |= {"data.isolate": "false", "optimizer.learning_rate": 1e-4}
    settings |= {"schedule.use": "constant", "schedule.warmup": 0}
    settings |= dict(item.split("=", 1) for item in args.overrides)
    cfg = recipe.load("recipes/llama3.2-1b.yaml", [f"{key}={value}" for key, value in settings.items()])
    devices = build.make_mesh(cfg)
    task = make_task(cfg, Vocabulary(VOCAB, None, None, None, None))
    with jax.set_mesh(devices):
        update = build.make_update(cfg, task)
        abstract, fresh = build.make_state(cfg, task, update, devices)
        axes = module.axes(file("models", task.model).Model, task.model)
        begun = time.perf_counter()
        traced = build.lowered(cfg, step.train_step(task, update, axes), abstract, devices)
        train_step = programs.compiled(traced, devices, None, print)
        compiling = time.perf_counter() - begun
        shape = (args.batch, LENGTH)
        put = lambda rows: jax.device_put(rows, row_sharding(devices, shape))
        ones = put(jax.numpy.ones(shape, "int32"))
        keys = jax.random.split(jax.random.key(1), 4)
        batches = [Batch(put(jax.random.randint(key, shape, 0, VOCAB)), ones, ones) for key in keys]
        state = jax.block_until_ready(fresh())
        seconds = []
        for number in range(args.steps):
            begun = time.perf_counter()
            state, values = train_step(state, batches[number % 4])
            jax.block_until_ready((state, values))
            seconds.append(time.perf_counter() - begun)
    seconds[0] += compiling
    params = sum(leaf.size for leaf in jax.tree.leaves(abstract.params))
    return result(seconds, args.batch * LENGTH, params, metrics.memory() or 0, float(values["loss"]))


if __name__ == "__main__":
    main()
