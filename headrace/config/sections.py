"""The sections of recipes: which keys there are, and what each can check by itself. No JAX in here."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal


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
    # How logits are made in parts; bf16 and fp8: by tokens, kept in bf16, multiplied in fp8.
    split: Literal["auto", "tokens", "vocabulary", "kernel", "bf16", "fp8"] = "auto"
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
    every: int = 1000  # steps, the most that a kill loses (docs/decisions/0007)
    keep: int = 3  # the newest of them; older ones go
    permanent: int = 0  # every so many steps one that is never removed; 0: none

    def __post_init__(self) -> None:
        at_least(1, self, "every", "keep")
        at_least(0, self, "permanent")


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
    """What `headrace quantize` is told on the command line."""

    method: Any = part("quantize/methods")
