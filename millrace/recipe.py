"""The recipes: which sections and keys there are, and what must hold between them. No JAX in here."""

import dataclasses
import json
import math
import re
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from millrace import secret, store
from millrace.config import Reader, names
from millrace.errors import UserError
from millrace.schedule import Ramp, duration


def part(folder: str, common: type | None = None, use: str | None = None, many: bool = False) -> Any:
    """A section whose `use` names a file in `folder`. Its keys are that file's Config and the common ones.
    With `many` the section holds several such parts, each under a name of its own."""
    return field(default=None, metadata=dict(folder=folder, common=common, use=use, many=many))


def section(cls: type) -> Any:
    return field(default_factory=cls)


def at_least(bound: float, cfg: Any, *names: str) -> None:
    for name in names:
        value = getattr(cfg, name)
        if isinstance(value, int | float) and value < bound:
            raise ValueError(f"{name}: expected {bound} or more")


@dataclass(frozen=True)
class Data:
    path: str
    sequence_length: int
    isolate: bool = True  # packed documents do not see each other

    def __post_init__(self) -> None:
        at_least(2, self, "sequence_length")


@dataclass(frozen=True)
class Depth:
    """What every model can have: layers in its middle that are run round after round (depth.py)."""

    recurrence: int = 0  # rounds on average; 0: all layers are run once
    prelude: int = 1  # layers before those
    coda: int = 1  # layers after them
    backprop: int = 8  # rounds that have gradients, the last ones

    def __post_init__(self) -> None:
        at_least(0, self, "recurrence", "prelude", "coda")
        at_least(1, self, "backprop")
        layers, loops = (getattr(self, name, 1) for name in ("layers", "loops"))
        if not self.recurrence:
            for name in ("prelude", "coda", "backprop"):
                if getattr(self, name) != getattr(Depth, name):
                    raise ValueError(f"{name}: expected recurrence to be set as well, or it has no effect")
        elif not loops:
            raise ValueError("recurrence: expected 0, since the layers of this model cannot be run in rounds")
        elif self.prelude + self.coda >= layers:
            raise ValueError(f"prelude: expected prelude + coda to be less than layers, {layers}")


@dataclass(frozen=True)
class Labels(Depth):
    """And a head that tells labels, with objective classify (classifier.py)."""

    labels: int = 0  # 0: as many as the data has
    pooling: Literal["auto", "first", "last", "mean", "each"] = "auto"  # which states tell that of a text

    def __post_init__(self) -> None:
        Depth.__post_init__(self)
        at_least(0, self, "labels")


@dataclass(frozen=True)
class Bits(Labels):
    """And matrices of few bits, which training sees as they will be stored (rounding.py)."""

    bits: int = 0  # of a weight of the layers' matrices: 8, 4, 3 or 2; 0: they are not rounded
    bits_group: int = 0  # inputs of an output that share a scale; 0: all of them
    bits_rank: int = (
        0  # weights are frozen, and matrices of this rank learn what is added (LR-QAT, 32); 0: all learn
    )

    def __post_init__(self) -> None:
        Labels.__post_init__(self)
        at_least(0, self, "bits_group", "bits_rank")
        if self.bits not in (0, 2, 3, 4, 8):
            raise ValueError("bits: expected 2, 3, 4 or 8, or 0")
        for name in ("bits_group", "bits_rank"):
            if getattr(self, name) and not self.bits:
                raise ValueError(f"{name}: expected bits to be set as well, or it has no effect")
        if self.bits and self.recurrence:
            raise ValueError("bits: expected 0 with recurrence")
        if self.bits_rank and self.bits == 8:
            raise ValueError("bits_rank: expected 0 with 8 bits, in which weights would be frozen")


@dataclass(frozen=True)
class Every(Bits):
    """And frozen matrices with adapters that learn beside them (adapters.py), or a frozen copy."""

    lora_rank: int = 0  # of the adapters (LoRA, 16); 0: there are none, and all weights learn
    lora_alpha: float | None = None  # what they add is multiplied by alpha / rank; null: twice the rank
    lora_on: str | None = None  # the matrices that have one, as in "blocks.w_q,blocks.w_v"; null: all
    lora_dora: bool = False  # the length of each output's weights learns as well (DoRA)
    lora_bits: int = 0  # of a frozen weight: 4 (QLoRA), 8 or 16; 0: as they are, 32
    reference: bool = False  # all weights learn, and a frozen copy is what objective dpo measures against

    def __post_init__(self) -> None:
        Bits.__post_init__(self)
        at_least(0, self, "lora_rank")
        if self.lora_bits not in (0, 4, 8, 16):
            raise ValueError("lora_bits: expected 4, 8 or 16, or 0")
        if self.lora_alpha is not None and not self.lora_alpha > 0:
            raise ValueError("lora_alpha: expected a number above 0")
        for name in ("lora_alpha", "lora_on", "lora_dora", "lora_bits"):
            if getattr(self, name) and not self.lora_rank:
                raise ValueError(f"{name}: expected lora_rank to be set as well, or it has no effect")
        if self.lora_rank and (self.bits or self.recurrence):
            name = "bits" if self.bits else "recurrence"
            raise ValueError(f"lora_rank: expected 0 with {name}")
        if self.reference and (self.bits or self.lora_rank or self.recurrence):
            name = "lora_rank, whose model is frozen" if self.lora_rank else "bits or recurrence"
            raise ValueError(f"reference: expected false with {name}")


@dataclass(frozen=True)
class Loss:
    z_loss: float = 0.0
    soft_cap: float | None = None
    split: Literal["auto", "tokens", "vocabulary", "kernel", "fp8"] = "auto"  # how logits are made in parts
    chunk: int | str = "auto"  # tokens, or rows of the vocabulary, whose logits are held at a time
    filter: float = 0.0  # gradients of probabilities below may be skipped, where a kernel can: 2.4e-4

    def __post_init__(self) -> None:
        at_least(0, self, "z_loss")
        if not 0 <= self.filter < 1:
            raise ValueError("filter: expected a probability from 0 up to, but not including, 1")
        if self.chunk != "auto" and not (isinstance(self.chunk, int) and self.chunk > 0):
            raise ValueError("chunk: expected auto, or a number of tokens or rows")
        if self.soft_cap is not None and self.soft_cap <= 0:
            raise ValueError("soft_cap: expected a number above 0, or null for none")


@dataclass(frozen=True)
class Optimizer:
    learning_rate: float
    weight_decay: float = 0.0
    clip: float | None = 1.0  # of the global gradient norm
    ema: float = 0.0  # decay of the averaged weights; 0 keeps none
    spike: float = 10.0  # an update is left out so many deviations above the usual loss or gradient; 0: none
    patience: int = 5  # updates left out, of 128, before the run goes back to a checkpoint

    def __post_init__(self) -> None:
        at_least(0, self, "learning_rate", "weight_decay", "spike")
        at_least(1, self, "patience")
        if not 0 <= self.ema < 1:
            raise ValueError("ema: expected a number from 0 up to, but not including, 1")
        if self.clip is not None and self.clip <= 0:
            raise ValueError("clip: expected a number above 0, or null for none")


@dataclass(frozen=True)
class Schedule:
    steps: int | str
    warmup: int | str = 0
    floor: float = 0.1  # where decay ends, as a share of the peak

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1:
            raise ValueError("floor: expected a share from 0 to 1")


@dataclass(frozen=True)
class Batch:
    sequences: int = 32
    accumulate: int = 1
    ramp: int | str = 0  # steps or tokens over which it grows to that, a part of `accumulate` at a time
    ramp_from: int = 0  # rows of the first steps

    def __post_init__(self) -> None:
        at_least(1, self, "sequences", "accumulate")
        at_least(0, self, "ramp_from")
        if self.sequences % self.accumulate:
            raise ValueError(f"accumulate: expected a divisor of batch.sequences, which is {self.sequences}")
        if (self.ramp == 0) != (self.ramp_from == 0):
            missing = "ramp" if self.ramp == 0 else "ramp_from"
            raise ValueError(f"{missing}: expected it to be set, since a ramp has both a length and a start")
        part = self.sequences // self.accumulate
        if self.ramp_from % part or self.ramp_from >= self.sequences:
            raise ValueError(
                f"ramp_from: expected less than {self.sequences} rows, and a multiple of the {part} that "
                "sequences / accumulate makes"
            )


SPLIT_ROWS = ("data", "fsdp", "expert")  # axes of the mesh over which the rows of a batch are split
FORWARD = ("causal", "dpo")  # objectives of models that see only what came before


@dataclass(frozen=True)
class Mesh:
    data: int | str = 1
    fsdp: int | str = "auto"
    tensor: int | str = 1
    context: int | str = 1
    expert: int | str = 1  # splits the experts of a mixture, and the batch as fsdp does

    def __post_init__(self) -> None:
        at_least(1, self, "data", "fsdp", "tensor", "context", "expert")
        sizes = dataclasses.asdict(self)
        for name, size in sizes.items():
            if isinstance(size, str) and size != "auto":
                raise ValueError(f"{name}: expected a number of devices or auto")
        free = [name for name, size in sizes.items() if size == "auto"]
        if len(free) > 1:
            raise ValueError(f"{free[-1]}: expected a number, since only one axis can be auto ({free[0]} is)")


@dataclass(frozen=True)
class Memory:
    compute: Literal["bfloat16", "float32"] = "bfloat16"
    products: Literal["compute", "fp8", "int8"] = "compute"  # of the layers: in that dtype, or in 8 bits
    # What the backward pass finds in memory: all it takes; what matrices give, on the device (dots) or in the
    # host's memory (offload); what attention gives; or the input of each layer alone (full).
    remat: Literal["none", "dots", "offload", "attention", "full"] = "none"
    unroll: int | str = "auto"  # layers compiled side by side, not as one loop body

    def __post_init__(self) -> None:
        at_least(1, self, "unroll")
        if isinstance(self.unroll, str) and self.unroll != "auto":
            raise ValueError("unroll: expected a number of layers or auto")


@dataclass(frozen=True)
class Checkpoint:
    every: int = 1000  # steps
    keep: int = 3  # the newest of them; older ones go
    permanent: int = 0  # every so many steps one that is never removed; 0: none

    def __post_init__(self) -> None:
        at_least(1, self, "every", "keep")
        at_least(0, self, "permanent")


def saves(checkpoint: Checkpoint, step: int) -> bool:
    """Whether either kind of checkpoint is due at a step."""
    return any(every and step % every == 0 for every in (checkpoint.every, checkpoint.permanent))


@dataclass(frozen=True)
class Eval:
    every: int = 1000  # 0: only at the end
    batches: int = 0  # 0: the whole evaluation split
    draws: int = 1  # of what is hidden, in each row: more tell the loss more exactly

    def __post_init__(self) -> None:
        at_least(0, self, "every", "batches")
        at_least(1, self, "draws")


@dataclass(frozen=True)
class Log:
    every: int = 10
    tensorboard: bool = True
    wandb: bool = False

    def __post_init__(self) -> None:
        at_least(1, self, "every")


@dataclass(frozen=True)
class Run:
    """A training recipe."""

    run: str
    seed: int = 0
    start: str | None = None  # a run folder, or one of Hugging Face, to take the first weights from
    take: str | None = None  # which of them, by name: embedding,head or blocks.w_*; all by default
    freeze: str | None = None  # weights that stay as they are, by name as above
    model: Any = part("models", Every)
    data: Data = section(Data)
    objective: Any = part("objectives", use="causal")
    loss: Any = part("losses", Loss, use="cross_entropy")
    optimizer: Any = part("optim", Optimizer, use="adamw")
    schedule: Any = part("schedules", Schedule, use="cosine")
    batch: Batch = section(Batch)
    mesh: Mesh = section(Mesh)
    memory: Memory = section(Memory)
    attention: Any = part("attention", use="auto")
    checkpoint: Checkpoint = section(Checkpoint)
    eval: Eval = section(Eval)
    log: Log = section(Log)
    profile: str | None = None  # steps of which a trace is written to RUN/profile, 10:15
    hang: int = 300  # seconds after which a step is taken to hang, or 20 usual steps if longer; 0: never


@dataclass(frozen=True)
class Source:
    """What every source of documents can say."""

    weight: float = 1.0  # how often its documents come in an epoch: 2 is twice, 0.5 a random half

    def __post_init__(self) -> None:
        if not 0 < self.weight <= 1000:
            raise ValueError("weight: expected a number above 0, and at most 1000")


@dataclass(frozen=True)
class Normalize:
    unicode: Literal["none", "nfc", "nfkc"] = "none"
    shortest: int = 1  # characters; what is shorter is left out
    longest: int | None = None
    quality: bool = False  # leave out what repeats itself or is hardly text (data/filters.py)
    exact: bool = False  # leave out all but the first of equal texts
    near: float | None = None  # and of texts that share this much (Jaccard), 0.8 is usual

    def __post_init__(self) -> None:
        at_least(1, self, "shortest")
        if self.longest is not None and self.longest < self.shortest:
            raise ValueError(f"longest: expected at least normalize.shortest, {self.shortest}, or null")
        if self.near is not None and not 0.3 <= self.near <= 1:
            raise ValueError("near: expected a share from 0.3 to 1, or null")


@dataclass(frozen=True)
class Tokenizer:
    use: Literal["bpe", "unigram", "file"] = "bpe"
    vocab: int = 32768
    sample: int = 256  # megabytes of text to train on, drawn from all sources
    path: str | None = None  # with `use: file`: tokenizer.json, its folder, a .tiktoken or a .model
    template: str | None = None  # a chat template, where the tokenizer has none: a file, or plain

    def __post_init__(self) -> None:
        if self.use != "file":
            at_least(260, self, "vocab")  # 256 bytes and 4 special tokens
            at_least(1, self, "sample")
            if self.path:
                raise ValueError(f"path: expected nothing, since `use: {self.use}` trains a tokenizer")
        elif not self.path:
            raise ValueError("path: expected the path of a tokenizer.json")
        for name in ("vocab", "sample"):
            if self.use == "file" and getattr(self, name) != getattr(Tokenizer, name):
                raise ValueError(f"{name}: expected nothing, since `use: file` takes what is there")


@dataclass(frozen=True)
class Pack:
    mode: Literal["concat", "document", "best_fit"] = "best_fit"
    sequence_length: int = 2048
    evaluation: float = 0.01  # share of the documents held out
    pause: int = 0  # pause tokens for 100 of a text, anywhere, and before each answer of a conversation

    def __post_init__(self) -> None:
        at_least(2, self, "sequence_length")
        at_least(0, self, "pause")
        if not 0 <= self.evaluation < 1:
            raise ValueError("evaluation: expected a share from 0 up to, but not including, 1")


@dataclass(frozen=True)
class Shuffle:
    epochs: int = 1  # sets of the same rows in different orders; training goes through them in turn
    rounds: int = 1  # one is uniform already

    def __post_init__(self) -> None:
        at_least(1, self, "epochs", "rounds")


@dataclass(frozen=True)
class DataRun:
    """A data recipe."""

    path: str
    seed: int = 0
    engine: Literal["local", "ray"] = "local"
    workers: int | str = "auto"
    errors: Literal["stop", "skip"] = "stop"  # what bad input does: end the work, or be left out and counted
    sources: Any = part("data/sources", Source, use="files", many=True)
    normalize: Normalize = section(Normalize)
    tokenizer: Tokenizer = section(Tokenizer)
    pack: Pack = section(Pack)
    shuffle: Shuffle = section(Shuffle)


@dataclass(frozen=True)
class Quantize:
    """What `millrace quantize` is told on the command line."""

    method: Any = part("quantize")


def load_method(name: str, overrides: typing.Sequence[str]) -> Any:
    """The Config of a method of quantisation, with these of its keys set."""
    reader = Reader(None, [f"method.use={name}", *(f"method.{item}" for item in overrides)])
    return reader.read(Quantize, lambda read, reader: None).method


def load(path: str | Path, overrides: typing.Sequence[str] = ()) -> Run:
    """The training recipe at `path` with `key=value` overrides applied. Raises UserError."""
    return _read(Reader(path, overrides), Run)


def load_data(path: str | Path, overrides: typing.Sequence[str] = ()) -> DataRun:
    return _read(Reader(path, overrides), DataRun)


def load_run(folder: str | Path, overrides: typing.Sequence[str] = ()) -> Run:
    """The recipe of a run folder, which may have been moved since."""
    if not store.exists(store.join(folder, "recipe.yaml")):
        store.check_bucket(folder)
        raise UserError(
            f"{store.shown(folder)}: not a run folder: no recipe.yaml in it; "
            "`millrace train RECIPE` makes one"
        )
    found = load_from(str(folder).rstrip("/"), "recipe.yaml", overrides)
    return dataclasses.replace(found, run=str(folder).rstrip("/"))


def load_train(path: str | Path, overrides: typing.Sequence[str] = ()) -> Run:
    """The recipe to train by. One that lies in a run folder means that folder, wherever it was moved to."""
    folder, _, name = str(path).rpartition("/")
    named = any(item.startswith("run=") for item in overrides)
    if name == "recipe.yaml" and not named and store.names(f"{folder or '.'}/checkpoints"):
        return load_run(folder or ".", overrides)
    return load_from(folder, name, overrides) if store.is_url(folder) else load(path, overrides)


def load_from(folder: str, name: str, overrides: typing.Sequence[str]) -> Run:
    """A recipe that may lie at a URL."""
    with store.near(folder, [name]) as near:
        try:
            return load(near / name, overrides)
        except UserError as error:
            raise UserError(str(error).replace(str(near), folder)) from None


def load_any(path: str | Path, overrides: typing.Sequence[str] = ()) -> Run | DataRun:
    """A recipe of either kind: data recipes have `sources`."""
    reader = Reader(path, overrides)
    return _read(reader, DataRun if "sources" in reader.tree else Run)


def check_run(run: Run, reader: Reader) -> None:
    """What no section can check alone. Everything here is arithmetic; devices are counted later."""
    if run.profile is not None:
        first, _, last = run.profile.partition(":")
        if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)):
            reader.fail("profile", "expected the first and the last step, as in 10:15")
    if run.hang < 0:
        reader.fail("hang", "expected a number of seconds, or 0")
    if run.take is not None and run.start is None:
        reader.fail("take", "expected start to be set as well, or it has no effect")
    for key, path in (("run", run.run), ("data.path", run.data.path), ("start", run.start)):
        _check_url(key, path, reader)
    _check_seed(run, reader)
    _check_schedule(run, reader)
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


def ramp(run: Run, reader: Reader | None = None) -> Ramp:
    """How the batch grows, in parts of `batch.accumulate`; without a ramp it has them all from the start."""
    batch = run.batch
    if not batch.ramp_from:
        return Ramp(batch.accumulate, batch.accumulate)
    part = batch.sequences // batch.accumulate
    first, last = batch.ramp_from // part, batch.accumulate
    sizes = sum(range(first, last)) if isinstance(batch.ramp, str) else last - first
    try:
        each = duration(batch.ramp, sizes * part * run.data.sequence_length)
    except ValueError as error:
        if reader is None:
            raise UserError(f"batch.ramp: {error}") from None
        reader.fail("batch.ramp", "expected a whole number of steps or '3B tokens'")
    return Ramp(first, last, each if isinstance(batch.ramp, str) else math.ceil(each / sizes))


def tokens_until(run: Run, step: int) -> int:
    """Those that are read before a step."""
    part = run.batch.sequences // run.batch.accumulate
    return ramp(run).before(step) * part * run.data.sequence_length


def durations(run: Run, reader: Reader | None = None) -> dict[str, int]:
    """Every length of the schedule in whole steps: `steps`, `warmup`, and the durations of its file."""
    grows = ramp(run, reader)
    tokens = run.batch.sequences * run.data.sequence_length
    fields = [f.name for f in dataclasses.fields(run.schedule) if set(typing.get_args(f.type)) == {int, str}]
    lengths: dict[str, int] = {}
    for name in sorted(fields, key=lambda name: name != "steps"):
        try:
            value, whole = getattr(run.schedule, name), lengths.get("steps")
            # A decay is at the end, where the batch has grown.
            lengths[name] = duration(value, tokens, whole, None if name == "decay" else grows)
        except ValueError as error:
            if reader is None:
                raise UserError(f"schedule.{name}: {error}") from None
            ways = "steps or '3B tokens'" if name == "steps" else "steps, '3B tokens' or '20 %'"
            reader.fail(f"schedule.{name}", f"expected a whole number of {ways}")
    return lengths


def _read(reader: Reader, cls: type[Any]) -> Any:
    tree, path = reader.tree, reader.path
    parts = {f.name: f.metadata["folder"] for f in dataclasses.fields(cls) if "folder" in f.metadata}
    if "use" in tree:
        name = next((name for name, folder in parts.items() if tree["use"] in names(folder)), "SECTION")
        # Recipes stand beside the folder that has a section's name, or beside the file itself.
        folder, last = Path(path).absolute().parts[-2:]
        seen = f"{name}/{last}" if folder == name else last
        hint = f"a recipe takes it with `{name}: {seen}`, the path seen from the recipe"
        raise UserError(f"{path}:1: found a section alone, expected a whole recipe; {hint}")
    if cls is Run and "sources" in tree and "model" not in tree:
        hint = f"`millrace data prepare {path}` makes its data"
        raise UserError(f"{path}:1: found a data recipe, expected a training recipe; {hint}")
    if cls is DataRun and "model" in tree and "sources" not in tree:
        hint = f"`millrace train {path}` trains with it"
        raise UserError(f"{path}:1: found a training recipe, expected a data recipe; {hint}")
    return reader.read(cls, check_run if cls is Run else check_data)


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
