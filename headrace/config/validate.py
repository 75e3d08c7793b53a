"""Checks of a recipe that involve several sections. All of it is arithmetic: devices are checked later."""

import dataclasses
import json
import math
import re
from pathlib import Path

from headrace.config.reader import RecipeReader, optional_key, own_keys
from headrace.config.run_length import durations
from headrace.config.sections import CAUSAL_OBJECTIVES, SPLIT_ROWS, DataRecipe, ScheduleKeys, TrainRecipe
from headrace.storage import redact


def check_train_recipe(recipe: TrainRecipe, reader: RecipeReader) -> None:
    """Raise UserError if sections of a training recipe contradict each other."""
    if recipe.step_timeout < 0:
        reader.error("step_timeout", "expected a number of seconds, or 0")
    if recipe.init_weights is not None and recipe.init_from is None:
        reader.error("init_weights", "expected init_from to be set too, or it has no effect")
    paths = {"run_dir": recipe.run_dir, "data.path": recipe.data.path, "init_from": recipe.init_from}
    for key, path in paths.items():
        _check_url(key, path, reader)
    _check_seed(recipe, reader)
    _check_schedule(recipe, reader)
    _check_profile(recipe, reader)
    _check_mesh(recipe, reader)
    _check_objective(recipe, reader)
    _check_compute(recipe, reader)
    _check_filter(recipe, reader)
    _check_recurrence(recipe, reader)
    _check_qat(recipe, reader)
    _check_lora(recipe, reader)
    _check_preference(recipe, reader)
    _check_classifier(recipe, reader)
    _check_packed_data(recipe, reader)


def check_data_recipe(recipe: DataRecipe, reader: RecipeReader) -> None:
    """Raise UserError if sections of a data recipe contradict each other."""
    for name, source in recipe.sources.items():
        _check_url(f"sources.{name}.path", optional_key(source, "path", None), reader)
    _check_url("tokenizer.path", recipe.tokenizer.path, reader)
    _check_seed(recipe, reader)
    if "://" in recipe.path:
        hint = "copy the finished folder there; training reads it from a URL"
        reader.error("path", "expected a local folder", hint=hint)
    if recipe.workers != "auto" and not (isinstance(recipe.workers, int) and recipe.workers > 0):
        reader.error("workers", "expected auto or a number of processes")
    for name in recipe.sources:
        if not re.fullmatch(r"[\w.-]+", name):
            reader.error("sources", f"expected names of letters, digits, _, . and -, not {name!r}")


def _check_url(key: str, path: str | None, reader: RecipeReader) -> None:
    """Refuse credentials in URLs: a recipe is stored in checkpoints, logs and reports."""
    if path is not None and (kind := redact.find_url_secret(path)) is not None:
        reader.error(
            key,
            f"expected a URL without {kind}, which would be stored with the run; credentials come from the "
            "environment",
            found=redact.redact_url(path),
        )


def _check_seed(recipe: TrainRecipe | DataRecipe, reader: RecipeReader) -> None:
    if not 0 <= recipe.seed < 2**32:
        reader.error("seed", f"expected a number from 0 to {2**32 - 1}")


def _check_schedule(recipe: TrainRecipe, reader: RecipeReader) -> None:
    lengths = durations(recipe, reader)
    steps, warmup = lengths["steps"], lengths["warmup"]
    if not 1 <= steps < 2**31:
        reader.error("schedule.steps", "expected 1 step or more, and fewer than 2**31, as 32 bits count")
    for name, value in lengths.items():
        if value > steps:
            reader.error(f"schedule.{name}", f"expected at most schedule.steps, which is {steps}")
    if warmup + lengths.get("decay", 0) > steps:
        reader.error("schedule.decay", f"expected at most the {steps - warmup} steps after the warmup")
    if "stage2_start" in lengths and not warmup < lengths["stage2_start"] < steps:
        reader.error(
            "schedule.stage2_start", f"expected a step after the warmup, {warmup}, and before {steps}"
        )
    never_decays = recipe.schedule.use in ("constant", "inverse_sqrt")
    if never_decays and recipe.schedule.min_lr_ratio != ScheduleKeys.min_lr_ratio:
        reader.error(
            "schedule.min_lr_ratio", f"expected nothing, since {recipe.schedule.use} does not decay to it"
        )


def _check_profile(recipe: TrainRecipe, reader: RecipeReader) -> None:
    if recipe.profile_steps is None:
        return
    first, _, last = recipe.profile_steps.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)):
        reader.error("profile_steps", "expected the first and the last step, as in 10:15")
    steps = durations(recipe, reader)["steps"]
    if int(first) > steps:
        reader.error("profile_steps", f"expected a first step of at most schedule.steps, which is {steps}")


def _check_mesh(recipe: TrainRecipe, reader: RecipeReader) -> None:
    fixed = {axis: size for axis, size in dataclasses.asdict(recipe.mesh).items() if isinstance(size, int)}
    factors = {"microbatches": recipe.batch.microbatches} | {axis: fixed.get(axis, 1) for axis in SPLIT_ROWS}
    if recipe.batch.sequences % math.prod(factors.values()):
        names, product = " x ".join(factors), " x ".join(map(str, factors.values()))
        reader.error("batch.sequences", f"expected a multiple of {names}, here {product}")
    length = recipe.data.sequence_length
    if length % fixed.get("context", 1):
        reader.error("mesh.context", f"expected a divisor of data.sequence_length, {length}")
    heads = optional_key(recipe.model, "heads", 0)
    if heads % fixed.get("tensor", 1):
        reader.error("mesh.tensor", f"expected a divisor of model.heads, {heads}")
    experts = optional_key(recipe.model, "experts", 1)
    if experts % fixed.get("expert", 1):
        reader.error("mesh.expert", f"expected a divisor of the model's experts, {experts}")


def _check_objective(recipe: TrainRecipe, reader: RecipeReader) -> None:
    model, objective = recipe.model, recipe.objective
    if objective.use in CAUSAL_OBJECTIVES and not model.causal:
        reader.error(
            "objective.use", f"expected masked, since {model.use} reads both sides and sees the next token"
        )
    if objective.use not in (*CAUSAL_OBJECTIVES, "classify") and model.causal:
        reader.error("objective.use", f"expected causal, since tokens of {model.use} see only earlier ones")
    has_generator = bool(optional_key(model, "generator_layers", 0))
    if has_generator and objective.use != "rtd":
        reader.error("objective.use", "expected rtd, which trains the generator of model.generator_layers")
    if objective.use == "rtd" and not has_generator:
        reader.error(
            "objective.use", "expected another, or a model with model.generator_layers, which rtd trains"
        )
    if objective.use in (*CAUSAL_OBJECTIVES, "classify") and recipe.eval.repeats != 1:
        reader.error("eval.repeats", f"expected 1, since {objective.use} masks nothing")
    if optional_key(objective, "exclude_mask", False) and optional_key(recipe.loss, "label_smoothing", 0):
        reader.error(
            "loss.label_smoothing",
            "expected 0, since objective.exclude_mask excludes a token from the targets",
        )


def _check_compute(recipe: TrainRecipe, reader: RecipeReader) -> None:
    model, compute = recipe.model, recipe.compute
    if compute.matmul != "compute" and _own_matmul(recipe) != "compute":
        reader.error(
            "compute.matmul",
            f"expected compute, since matrices of {model.use} are {_own_matmul(recipe)} anyway",
        )
    if compute.matmul != "compute" and optional_key(model, "experts", 1) > 1:
        reader.error("compute.matmul", "expected compute, since experts are not multiplied in 8 bits")
    if recipe.loss.backend == "bf16" and compute.dtype != "bfloat16":
        reader.error("loss.backend", f"expected auto, since compute.dtype is {compute.dtype}")


def _check_filter(recipe: TrainRecipe, reader: RecipeReader) -> None:
    """Only kernels skip gradients. Whether they can be used here is known when the step is traced."""
    if not recipe.loss.filter_eps:
        return
    if recipe.objective.use in ("classify", "dpo"):
        reader.error("loss.filter_eps", f"expected 0, since the loss of {recipe.objective.use} skips nothing")
    if recipe.loss.backend not in ("auto", "kernel"):
        reader.error(
            "loss.filter_eps", f"expected 0 with loss.backend {recipe.loss.backend}, since only kernels skip"
        )


def _own_matmul(recipe: TrainRecipe) -> str:
    """The number format that the family itself demands of matrix products, or "compute"."""
    return optional_key(recipe.model, "products", "compute")


def _has_stacked_layers(recipe: TrainRecipe) -> bool:
    """Whether the model's layers are made of our matrices, and not those of a PyTorch class."""
    return "layers" in own_keys(recipe.model)


def _check_recurrence(recipe: TrainRecipe, reader: RecipeReader) -> None:
    recurrence, model = recipe.recurrence, recipe.model
    if recurrence is None:
        return
    if not optional_key(model, "loops", True):
        reader.error(
            "recurrence.rounds", f"expected no recurrence, since layers of {model.use} cannot repeat"
        )
    if recurrence.prelude + recurrence.coda >= model.layers:
        reader.error("recurrence.prelude", f"expected prelude + coda to be less than layers, {model.layers}")
    if optional_key(model, "dense_layers", 0):
        reader.error("model.dense_layers", "expected 0 with recurrence, which repeats layers of one kind")


def _check_qat(recipe: TrainRecipe, reader: RecipeReader) -> None:
    qat, model = recipe.qat, recipe.model
    if qat is None:
        return
    if recipe.recurrence is not None:
        reader.error("qat.bits", "expected no qat with recurrence")
    if recipe.compute.matmul != "compute" or _own_matmul(recipe) != "compute":
        reader.error("qat.bits", "expected no qat, since these matrices are already rounded in another way")
    if optional_key(model, "experts", 1) > 1 or not _has_stacked_layers(recipe):
        reader.error("qat.bits", f"expected no qat, since the matrices of {model.use} cannot be rounded")
    if qat.rank:
        _check_frozen("qat.rank", recipe, reader)


def _check_lora(recipe: TrainRecipe, reader: RecipeReader) -> None:
    if recipe.lora is None:
        return
    if recipe.qat is not None or recipe.recurrence is not None:
        other = "qat" if recipe.qat is not None else "recurrence"
        reader.error("lora.rank", f"expected no lora with {other}")
    if recipe.compute.matmul != "compute" or _own_matmul(recipe) != "compute":
        reader.error("lora.rank", "expected no lora, since these matrices are multiplied in few bits")
    if not _has_stacked_layers(recipe):
        reader.error("lora.rank", f"expected no lora, since {recipe.model.use} has its own kind of matrices")
    _check_frozen("lora.rank", recipe, reader)


def _check_preference(recipe: TrainRecipe, reader: RecipeReader) -> None:
    """DPO needs a reference model, documents that are kept apart, and the plain loss."""
    if recipe.objective.use != "dpo":
        return
    has_copy = recipe.objective.reference == "copy"
    if has_copy:
        wrappers = {"lora": recipe.lora, "qat": recipe.qat, "recurrence": recipe.recurrence}
        for name, wrapper in wrappers.items():
            if wrapper is not None:
                reason = ", whose frozen weights are the reference" if name == "lora" else ""
                reader.error("objective.reference", f"expected base with {name}{reason}")
        _check_frozen("objective.reference", recipe, reader)
    elif recipe.lora is None:
        reader.error(
            "objective.reference",
            "expected copy, a frozen copy of the initial weights, or a lora section, whose frozen weights "
            "are the reference",
        )
    if not recipe.data.isolate_documents:
        reader.error("data.isolate_documents", "expected true, since dpo compares documents")
    if recipe.loss.use != "cross_entropy" or recipe.loss.z_loss or recipe.loss.label_smoothing:
        key = "loss.use" if recipe.loss.use != "cross_entropy" else "loss.z_loss"
        key = "loss.label_smoothing" if optional_key(recipe.loss, "label_smoothing", 0) else key
        reader.error(key, "expected plain cross entropy, since dpo has a loss of its own")


def _check_frozen(key: str, recipe: TrainRecipe, reader: RecipeReader) -> None:
    """Frozen weights must be those of a trained model, all of them."""
    if recipe.init_from is None:
        reader.error(key, "expected init_from to be set, since the model's own weights are frozen")
    if recipe.init_weights is not None:
        reader.error("init_weights", f"expected nothing with {key}, which freezes all weights")
    if recipe.optimizer.ema_decay:
        reader.error("optimizer.ema_decay", f"expected 0 with {key}, whose frozen weights have no average")


def _check_classifier(recipe: TrainRecipe, reader: RecipeReader) -> None:
    if recipe.objective.use != "classify":
        if recipe.classifier is not None:
            key = next((f"classifier.{key}" for key in reader.tree.get("classifier") or {}), "classifier")
            reader.error(key, "expected objective.use to be classify, or it has no effect")
        return
    if not _has_stacked_layers(recipe):
        reader.error("objective.use", f"expected another, since {recipe.model.use} has no head for labels")
    if not recipe.data.isolate_documents:
        reader.error("data.isolate_documents", "expected true, since a label belongs to one document")
    if recipe.loss.soft_cap is not None:
        reader.error("loss.soft_cap", "expected nothing, since labels are predicted without it")
    for key, rank in (
        ("qat.rank", recipe.qat and recipe.qat.rank),
        ("lora.rank", recipe.lora and recipe.lora.rank),
    ):
        if rank:
            reader.error(key, "expected 0 with objective classify, whose new head has to be trained")


def _check_packed_data(recipe: TrainRecipe, reader: RecipeReader) -> None:
    """Compare the recipe with packed data, if there is some. Errors in the data itself are found later."""
    path = recipe.data.path
    try:
        packed = json.loads((Path(path) / "index.json").read_text())
        length, dtype, vocab = packed["sequence_length"], packed["dtype"], packed["vocab"]
        mask, limit = packed["special"]["mask"], {"uint16": 2**16, "uint32": 2**32}[dtype]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if length % recipe.data.sequence_length:
        reader.error(
            "data.sequence_length", f"expected a divisor of {length}, the length of {path}'s sequences"
        )
    if recipe.model.vocab > limit:
        reader.error("model.vocab", f"expected at most {limit}, all that {path}'s {dtype} tokens can name")
    if recipe.model.vocab and recipe.model.vocab < vocab:
        reader.error("model.vocab", f"expected {vocab} or more, the vocabulary of {path}")
    masks = recipe.objective.use == "diffusion" or optional_key(recipe.objective, "mask_token_share", 0) > 0
    if mask is None and masks:
        reader.error("objective.use", f"expected another, since {path}'s tokenizer has no mask token")
