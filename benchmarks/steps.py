"""Shared by the benchmarks of complete training steps: Headrace's step from a recipe, torch's from the same
recipe as a model of transformers, each in a process of its own, and their comparison. Only the process that
runs steps touches a device, and only torch's process imports torch."""

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]  # what a process reports about its steps, or `failed`: the reason for having no result
DIFFERENT = 4  # batches that steps alternate between
WARM = 3  # steps that do not count for the median


def run_script(
    script: str, *arguments: str, limit: float = 300, environment: dict[str, str] | None = None
) -> Row:
    """The row that `python -m benchmarks.SCRIPT` prints in a process of its own, so that no other's memory is
    taken. Returns a row also if it fails."""
    command = [sys.executable, "-m", f"benchmarks.{script}", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, env=os.environ | (environment or {})
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not finished after {limit:.0f} s"}
    told = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
    row = json.loads(told[-1].removeprefix("ROW ")) if told else {"failed": f"exit code {done.returncode}"}
    if "failed" in row:
        print("\n".join(done.stderr.splitlines()[-12:]), file=sys.stderr, flush=True)
    return row


def report_row(work: Callable[[], Row]) -> None:
    """Do the work in this process and print its row, or the reason for a failure, for the process that
    waits."""
    try:
        row = work()
    except Exception as error:
        traceback.print_exc()
        row = {"failed": describe_error(error)}
    print("ROW", json.dumps(row), flush=True)


def describe_error(error: Exception) -> str:
    """The error in one line. If memory ran out, both frameworks say how much they requested."""
    text = str(error)
    if re.search("out of memory|RESOURCE_EXHAUSTED", text, re.IGNORECASE):
        asked = re.search(r"(?:allocate|allocating) ([\d.]+ ?\w+)", text)
        return "out of memory" + (f", requested {asked[1]} more" if asked else "")
    return f"{type(error).__name__}: {text.strip().partition(chr(10))[0][:120]}"


def format_row(name: str, row: Row, flops: float) -> str:
    """`flops` are those of a token, forward and backward."""
    if "failed" in row:
        return f"{name:20} {row['failed']}"
    rate = row["tokens_per_second"]
    if "attention" in row:
        name = f"{name}, {row['attention']}"
    return (
        f"{name:20}{rate:10,.0f} tokens/s {rate * flops / 1e12:6.0f} model TFLOP/s   "
        f"first step {row['first_step']:5.1f} s {row['memory'] / 2**30:6.1f} GiB   "
        f"loss {row['first_loss']:.4f} to {row['loss']:.4f}"
    )


def speed_ratio(ours: Row, peer: Row) -> float | None:
    """The ratio of tokens per second; None if one of the two has failed."""
    if "failed" in ours or "failed" in peer:
        return None
    return ours["tokens_per_second"] / peer["tokens_per_second"]


def format_ratio(ours: Row, peer: Row, least: float | None = None) -> str:
    """The ratio, and whether it meets the goal."""
    found = speed_ratio(ours, peer)
    if found is None:
        return "no ratio"
    verdict = "" if least is None else f" (goal {least:g}: {'met' if found >= least else 'MISSED'})"
    return f"{found:.3f}{verdict}"


def measure_steps(seconds: list[float], tokens: int, losses: list[float], **more: Any) -> Row:
    """The row of some steps. If there are few, only the first is left out, which may compile."""
    settled = seconds[WARM:] or seconds[1:] or seconds
    per_step = statistics.median(settled)
    return {
        "tokens_per_second": tokens / per_step,
        "step_seconds": per_step,
        "first_step": seconds[0],
        "first_loss": losses[0],
        "loss": losses[-1],
    } | more


def load(recipe: str, settings: dict[str, Any], overrides: Sequence[str] = ()) -> Any:
    """Load a recipe for benchmarks: one document per row, no microbatches, the full learning rate from the
    first step; everything else from `settings` and the command line."""
    from headrace.config.recipe import load

    common: dict[str, Any] = {"batch.microbatches": 1, "data.isolate_documents": "false"}
    common |= {"batch.ramp": 0, "batch.ramp_from": 0}
    common |= {"schedule.warmup": 0, "schedule.steps": 1000, "optimizer.learning_rate": 1e-4}
    chosen = common | settings | dict(item.split("=", 1) for item in overrides)
    return load(recipe, [f"{key}={value}" for key, value in chosen.items()])


def flops_per_token(cfg: Any) -> float:
    """FLOPs per token, forward and backward, from shapes alone."""
    from headrace.training import task

    return task.recipe_flops_per_token(cfg)


@dataclass(frozen=True)
class CompiledStep:
    """A recipe's compiled step, with its initial weights."""

    cfg: Any
    task: Any
    devices: Any
    step: Callable[..., Any]
    state: Any
    times: dict[str, float]  # seconds of tracing and of compiling: wall time and CPU time
    lines: int  # of the program that the compiler gets


def compile_step(cfg: Any, vocabulary: Any) -> CompiledStep:
    import jax

    from headrace.model_wrappers import load_family
    from headrace.nn import module
    from headrace.training import compiled_step, setup, step
    from headrace.training.task import make_task

    devices, task = setup.make_mesh(cfg), make_task(cfg, vocabulary)
    with jax.set_mesh(devices):
        update = setup.make_update(cfg, task)
        abstract, fresh = setup.make_state(cfg, task, update, devices)
        axes = module.axes(load_family(task.model).Model, task.model)
        begun, cpu = time.perf_counter(), time.process_time()
        lowered = setup.lower_step(cfg, step.make_train_step(task, update, axes), abstract, devices)
        traced = time.perf_counter()
        train_step = compiled_step.load_or_compile(lowered, devices, None, print)
        times = {"tracing": traced - begun, "compiling": time.perf_counter() - traced}
        times["making_cpu"] = time.process_time() - cpu
        state = jax.block_until_ready(fresh())
    return CompiledStep(cfg, task, devices, train_step, state, times, len(lowered.as_text().splitlines()))


def random_batches(made: CompiledStep) -> list[Any]:
    """Rows of random tokens, without the mask token."""
    import jax

    from headrace.nn.sharding import row_sharding
    from headrace.objectives import Batch

    shape = (made.cfg.batch.sequences, made.cfg.data.sequence_length)
    mask = made.task.special_tokens.mask
    put = lambda rows: jax.device_put(rows, row_sharding(made.devices, shape))
    ones = put(jax.numpy.ones(shape, "int32"))
    keys = jax.random.split(jax.random.key(1), DIFFERENT)
    most = made.cfg.model.vocab if mask is None else mask
    return [Batch(put(jax.random.randint(key, shape, 0, most)), ones, ones) for key in keys]


def headrace_steps(cfg: Any, steps: int, *, mask: int | None = None, folder: Path | None = None) -> Row:
    """Run some steps of a recipe on random tokens. If a folder is given, the initial weights and the examples
    are saved there for a peer."""
    import jax

    from headrace.objectives import SpecialTokens
    from headrace.training import metrics

    made = compile_step(cfg, SpecialTokens(cfg.model.vocab, None, None, None, mask))
    batches, state = random_batches(made), made.state
    if folder is not None:
        save_start(made, batches[0], folder)
    seconds, losses = [], []
    for number in range(steps):
        begun = time.perf_counter()
        state, values = made.step(state, batches[number % DIFFERENT])
        jax.block_until_ready((state, values))
        seconds.append(time.perf_counter() - begun)
        losses.append(float(values["nll"]))
    seconds[0] += made.times["tracing"] + made.times["compiling"]
    tokens = cfg.batch.sequences * cfg.data.sequence_length
    more = made.times | {"program_lines": made.lines}
    return measure_steps(seconds, tokens, losses, memory=metrics.peak_memory() or 0, **more)


def save_start(made: CompiledStep, batch: Any, folder: Path) -> None:
    """Save initial weights, and the first step's examples: inputs, targets and which of them count."""
    import jax

    from headrace.model_formats.hf_tensors import to_tensors
    from headrace.model_wrappers import load_family
    from headrace.objectives import load_objective

    state = made.state
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
    examples = load_objective(made.task.objective).prepare(made.task, batch, key)
    table = load_family(made.task.model).tensor_table(made.task.model)
    np.savez(folder / "weights.npz", **dict(to_tensors(table, state.params, "float32")))
    rows = {name: np.asarray(getattr(examples, name)) for name in ("inputs", "targets", "weights")}
    np.savez(folder / "examples.npz", **rows)


UNMASKED = "unmasked"


def transformers_model(cfg: Any, attention: str = "sdpa", **more: Any) -> Any:
    """The recipe's model in transformers, with its own weights and `more` settings. With `UNMASKED`, for rows
    of one document and models without windows, its attention gets no mask: for an encoder, torch.compile
    would make one of the row's length squared."""
    import torch
    import transformers
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from headrace.model_wrappers import load_family

    assert attention != UNMASKED or not cfg.data.isolate_documents
    transformers.AttentionInterface.register(UNMASKED, sdpa_attention_forward)
    transformers.AttentionMaskInterface.register(UNMASKED, lambda *_, **__: None)

    settings = load_family(cfg.model).hf_naming.to_config(cfg.model, cfg.data.sequence_length)
    settings |= dict.fromkeys(
        ("bos_token_id", "eos_token_id", "pad_token_id")
    )  # else those of a published model
    settings |= more
    kind, name = settings.pop("model_type"), settings.pop("architectures")[0]
    theirs = transformers.AutoConfig.for_model(
        kind, **settings, attn_implementation=attention, use_cache=False
    )
    with torch.device(torch_device()):
        return getattr(transformers, name)(theirs)


def load_weights(model: Any, folder: Path) -> None:
    """Load the weights that Headrace has saved into a model of transformers."""
    import torch

    with np.load(folder / "weights.npz") as kept:
        tensors = {name: torch.from_numpy(kept[name]) for name in kept.files}
    found = model.load_state_dict(tensors, strict=False)
    own = {name for name, _ in model.named_parameters()}  # a tied weight has one name
    assert not found.unexpected_keys and not own & set(found.missing_keys), found


def load_examples(folder: Path) -> dict[str, Any]:
    """The arguments of a transformers model for the examples of Headrace's first step."""
    import torch

    kept = np.load(folder / "examples.npz")
    labels = np.where(kept["weights"] > 0, kept["targets"], -100)
    names = {"input_ids": kept["inputs"], "labels": labels}
    return {name: torch.from_numpy(rows.astype(np.int64)).to(torch_device()) for name, rows in names.items()}


def random_tokens(cfg: Any) -> list[dict[str, Any]]:
    """Batches for a causal model of transformers, which shifts the labels by one itself."""
    import torch

    shape = (cfg.batch.sequences, cfg.data.sequence_length)
    drawn = (torch.randint(0, cfg.model.vocab, shape, device=torch_device()) for _ in range(DIFFERENT))
    return [{"input_ids": ids, "labels": ids} for ids in drawn]


def torch_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def torch_steps(model: Any, batches: Sequence[dict[str, Any]], steps: int) -> Row:
    """Run some steps of a model of transformers with torch.compile: bf16 by autocast over float32 weights (on
    a CPU float32), fused AdamW, clipping by global norm."""
    import torch

    device = torch_device()
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    torch.set_float32_matmul_precision("high")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def loss_of(batch: dict[str, Any]) -> Any:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            return model(**batch).loss

    loss_of = torch.compile(loss_of)
    seconds, losses = [], []
    for number in range(steps):
        wait()
        begun = time.perf_counter()
        loss = loss_of(batches[number % len(batches)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        wait()
        seconds.append(time.perf_counter() - begun)
        losses.append(loss.item())
    tokens = batches[0]["input_ids"].numel()
    memory = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return measure_steps(seconds, tokens, losses, memory=memory)


def fastest_attention(cfg: Any) -> str:
    """Restrict torch to the faster of its fused attentions for a recipe's shapes, flash's or cuDNN's; by
    itself it takes the first that works. On a CPU there is no choice."""
    import torch
    from torch.nn.attention import SDPBackend

    if torch_device() == "cpu":
        return "sdpa"
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    times = {}
    for name, backend in backends.items():
        with contextlib.suppress(RuntimeError):  # if it does not support these shapes
            times[name] = attention_seconds(cfg, backend)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    if not times:
        return "sdpa"
    best = min(times, key=lambda name: times[name])
    torch.backends.cuda.enable_flash_sdp(best == "flash")
    torch.backends.cuda.enable_cudnn_sdp(best == "cudnn")
    return best


def attention_seconds(cfg: Any, backend: Any) -> float:
    """Seconds of one layer, forward and backward, with the memory layout of transformers."""
    import torch
    from torch.nn.attention import sdpa_kernel

    model, shape = cfg.model, (cfg.batch.sequences, cfg.data.sequence_length)

    def draw(heads: int) -> Any:
        made = torch.randn(*shape, heads, model.head_dim, device="cuda", dtype=torch.bfloat16)
        return made.transpose(1, 2).requires_grad_()

    q, k, v = (draw(heads) for heads in (model.heads, model.kv_heads, model.kv_heads))
    seconds = []
    for _ in range(3):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=model.causal, enable_gqa=model.heads != model.kv_heads
            )
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)
