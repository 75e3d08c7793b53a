"""What must hold between the sections of a recipe. All of it is arithmetic; devices are counted later."""

import dataclasses
import json
import math
import re
from pathlib import Path

from headrace.storage import redact as secret
from headrace.config.reader import Reader
from headrace.config.run_length import durations
from headrace.config.sections import FORWARD, SPLIT_ROWS, DataRun, Labels, Run, Schedule


def check_run(run: Run, reader: Reader) -> None:
    """What no section can check alone. Everything here is arithmetic; devices are counted later."""
    if run.hang < 0:
        reader.fail("hang", "expected a number of seconds, or 0")
    if run.take is not None and run.start is None:
        reader.fail("take", "expected start to be set as well, or it has no effect")
    for key, path in (("run", run.run), ("data.path", run.data.path), ("start", run.start)):
        _check_url(key, path, reader)
    _check_seed(run, reader)
    _check_schedule(run, reader)
    _check_profile(run, reader)
    _check_mesh(run, reader)
    if run.objective.use in FORWARD and not run.model.causal:
        reader.fail(
            "objective.use",
            f"expected masked, since {run.model.use} reads both sides and sees the next token",
        )
    if run.objective.use not in (*FORWARD, "classify") and run.model.causal:
        reader.fail("objective.use", f"expected causal, since {run.model.use} sees only what came before")
    pair = bool(getattr(run.model, "generator", 0))
    if pair and run.objective.use != "rtd":
        reader.fail("objective.use", "expected rtd, which trains the generator that model.generator names")
    if run.objective.use == "rtd" and not pair:
        reader.fail("objective.use", "expected another, or a model with model.generator, which rtd trains")
    if run.model.recurrence and getattr(run.model, "dense", 0):
        reader.fail("model.dense", "expected 0 with model.recurrence, whose rounds are of layers of one kind")
    if run.objective.use in FORWARD and run.eval.draws != 1:
        reader.fail("eval.draws", f"expected 1, since {run.objective.use} hides nothing")
    if getattr(run.objective, "exclude_mask", False) and getattr(run.loss, "label_smoothing", 0):
        reader.fail(
            "loss.label_smoothing", "expected 0, since with objective.exclude_mask a token is ruled out"
        )
    own = getattr(run.model, "products", "compute")
    if own != "compute" and run.memory.products != "compute":
        reader.fail("memory.products", f"expected nothing, since those of {run.model.use} are {own} anyway")
    if getattr(run.model, "experts", 1) > 1 and run.memory.products != "compute":
        reader.fail("memory.products", "expected compute, since experts are not multiplied in 8 bits")
    if run.loss.split == "bf16" and run.memory.compute != "bfloat16":
        reader.fail("loss.split", f"expected auto, since memory.compute is {run.memory.compute}")
    _check_filter(run, reader)
    _check_bits(run, reader)
    _check_lora(run, reader)
    _check_preference(run, reader)
    _check_labels(run, reader)
    _check_packed(run, reader)


def _check_url(key: str, path: str | None, reader: Reader) -> None:
    """What a recipe says is kept in checkpoints, logs and reports."""
    if path is not None and (kind := secret.in_url(path)) is not None:
        reader.fail(
            key,
            f"expected a URL without {kind}, which would be kept with the run; credentials come from the "
            "environment",
            found=secret.shown(path),
        )


def check_data(run: DataRun, reader: Reader) -> None:
    for name, source in run.sources.items():
        _check_url(f"sources.{name}.path", getattr(source, "path", None), reader)
    _check_url("tokenizer.path", run.tokenizer.path, reader)
    _check_seed(run, reader)
    if "://" in run.path:
        hint = "copy the finished folder there; training reads it from a URL"
        reader.fail("path", "expected a local folder", hint=hint)
    if run.workers != "auto" and not (isinstance(run.workers, int) and run.workers > 0):
        reader.fail("workers", "expected auto or a number of processes")
    for name in run.sources:
        if not re.fullmatch(r"[\w.-]+", name):
            reader.fail("sources", f"expected names of letters, digits, _, . and -, not {name!r}")


def _check_seed(run: Run | DataRun, reader: Reader) -> None:
    if not 0 <= run.seed < 2**32:
        reader.fail("seed", f"expected a number from 0 to {2**32 - 1}")


def _check_schedule(run: Run, reader: Reader) -> None:
    lengths = durations(run, reader)
    steps, warmup = lengths["steps"], lengths["warmup"]
    if not 1 <= steps < 2**31:
        reader.fail("schedule.steps", "expected 1 step or more, and fewer than 2**31, as 32 bits count")
    for name, value in lengths.items():
        if value > steps:
            reader.fail(f"schedule.{name}", f"expected at most schedule.steps, which is {steps}")
    if warmup + lengths.get("decay", 0) > steps:
        reader.fail("schedule.decay", f"expected at most the {steps - warmup} steps after the warmup")
    if "switch" in lengths and not warmup < lengths["switch"] < steps:
        reader.fail("schedule.switch", f"expected a step after the warmup, {warmup}, and before {steps}")
    if run.schedule.use in ("constant", "inverse_sqrt") and run.schedule.floor != Schedule.floor:
        reader.fail("schedule.floor", f"expected nothing, since {run.schedule.use} does not go down to it")


def _check_profile(run: Run, reader: Reader) -> None:
    if run.profile is None:
        return
    first, _, last = run.profile.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)):
        reader.fail("profile", "expected the first and the last step, as in 10:15")
    steps = durations(run, reader)["steps"]
    if int(first) > steps:
        reader.fail("profile", f"expected a first step of at most schedule.steps, which is {steps}")


def _check_mesh(run: Run, reader: Reader) -> None:
    fixed = {axis: size for axis, size in dataclasses.asdict(run.mesh).items() if isinstance(size, int)}
    factors = {"accumulate": run.batch.accumulate} | {axis: fixed.get(axis, 1) for axis in SPLIT_ROWS}
    if run.batch.sequences % math.prod(factors.values()):
        names, product = " x ".join(factors), " x ".join(map(str, factors.values()))
        reader.fail("batch.sequences", f"expected a multiple of {names}, here {product}")
    if run.data.sequence_length % fixed.get("context", 1):
        reader.fail("mesh.context", f"expected a divisor of data.sequence_length, {run.data.sequence_length}")
    heads = getattr(run.model, "heads", 0)
    if heads % fixed.get("tensor", 1):
        reader.fail("mesh.tensor", f"expected a divisor of model.heads, {heads}")
    experts = getattr(run.model, "experts", 1)
    if experts % fixed.get("expert", 1):
        reader.fail("mesh.expert", f"expected a divisor of the model's experts, {experts}")


def _check_filter(run: Run, reader: Reader) -> None:
    """Gradients of tokens are skipped by kernels alone. Whether there are some here is known when the step is
    traced."""
    if not run.loss.filter:
        return
    if run.objective.use in ("classify", "dpo"):
        reader.fail("loss.filter", f"expected 0, since {run.objective.use} has a loss that skips nothing")
    if run.loss.split not in ("auto", "kernel"):
        reader.fail("loss.filter", f"expected 0 with loss.split {run.loss.split}, since only kernels skip")


def _check_bits(run: Run, reader: Reader) -> None:
    """Matrices that training sees in few bits."""
    if not run.model.bits:
        return
    if run.memory.products != "compute" or getattr(run.model, "products", "compute") != "compute":
        reader.fail("model.bits", "expected 0, since these matrices are rounded in another way already")
    stacked = "layers" in {field.name for field in dataclasses.fields(run.model)}
    if getattr(run.model, "experts", 1) > 1 or not stacked:
        reader.fail("model.bits", f"expected 0, since the matrices of {run.model.use} are not rounded")
    if run.model.bits_rank:
        _check_frozen("model.bits_rank", run, reader)


def _check_lora(run: Run, reader: Reader) -> None:
    """Adapters beside frozen matrices."""
    if not run.model.lora_rank:
        return
    if run.memory.products != "compute" or getattr(run.model, "products", "compute") != "compute":
        reader.fail("model.lora_rank", "expected 0, since these matrices are multiplied in few bits")
    if "layers" not in {field.name for field in dataclasses.fields(run.model)}:
        reader.fail("model.lora_rank", f"expected 0, since the matrices of {run.model.use} are not ours")
    _check_frozen("model.lora_rank", run, reader)


def _check_preference(run: Run, reader: Reader) -> None:
    """What DPO learns against, and what it tells apart."""
    if run.model.reference:
        if run.objective.use != "dpo":
            reader.fail("model.reference", "expected false, since only dpo measures against it")
        _check_frozen("model.reference", run, reader)
    if run.objective.use != "dpo":
        return
    if not (run.model.lora_rank or run.model.reference):
        hint = "model.lora_rank, whose frozen model it is, or model.reference=true, a frozen copy"
        reader.fail("objective.use", "expected another, or a model to measure against", hint=hint)
    if not run.data.isolate:
        reader.fail("data.isolate", "expected true, since dpo tells documents apart")
    if run.loss.use != "cross_entropy" or run.loss.z_loss or run.loss.label_smoothing:
        key = "loss.use" if run.loss.use != "cross_entropy" else "loss.z_loss"
        key = "loss.label_smoothing" if getattr(run.loss, "label_smoothing", 0) else key
        reader.fail(key, "expected plain cross entropy, since dpo has a loss of its own")


def _check_frozen(key: str, run: Run, reader: Reader) -> None:
    """What learns stands beside the weights of another model."""
    if run.start is None:
        reader.fail(key, "expected start to be set, since the weights of the layers are frozen")
    if run.take is not None:
        reader.fail("take", f"expected nothing with {key}, which freezes all weights")
    if run.optimizer.ema:
        reader.fail("optimizer.ema", f"expected 0 with {key}, whose frozen weights have no average")


def _check_labels(run: Run, reader: Reader) -> None:
    """A head that tells labels, and what has no meaning beside it."""
    if run.objective.use != "classify":
        for key in ("labels", "pooling"):
            if getattr(run.model, key) != getattr(Labels, key):
                reader.fail(f"model.{key}", "expected objective.use to be classify, or it has no effect")
        return
    if "layers" not in {field.name for field in dataclasses.fields(run.model)}:
        reader.fail("objective.use", f"expected another, since {run.model.use} takes no head for labels")
    if not run.data.isolate:
        reader.fail("data.isolate", "expected true, since a label is of one text alone")
    if run.loss.soft_cap is not None:
        reader.fail("loss.soft_cap", "expected nothing, since labels are told without it")
    for key in ("bits_rank", "lora_rank"):
        if getattr(run.model, key):
            reader.fail(f"model.{key}", "expected 0 with objective classify, whose head is to learn")
    if run.eval.draws != 1:
        reader.fail("eval.draws", "expected 1, since classification hides nothing")


def _check_packed(run: Run, reader: Reader) -> None:
    """What the data says, where it is packed already. Opening it tells what may be wrong with itself."""
    path = run.data.path
    try:
        packed = json.loads((Path(path) / "index.json").read_text())
        length, dtype, vocab = packed["sequence_length"], packed["dtype"], packed["vocab"]
        mask, limit = packed["special"]["mask"], {"uint16": 2**16, "uint32": 2**32}[dtype]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if length % run.data.sequence_length:
        reader.fail("data.sequence_length", f"expected a divisor of {length}, the length of {path}'s rows")
    if run.model.vocab > limit:
        reader.fail("model.vocab", f"expected at most {limit}, all that {path}'s {dtype} tokens can name")
    if run.model.vocab and run.model.vocab < vocab:
        reader.fail("model.vocab", f"expected {vocab} or more, the vocabulary of {path}")
    hides = run.objective.use == "diffusion" or getattr(run.objective, "masked", 0) > 0
    if mask is None and hides:
        reader.fail("objective.use", f"expected another, since {path}'s tokenizer has no mask token")
