"""Sections of training and data recipes: their keys, and checks that need only one section. No JAX in here.

The comment beside or above a key is what users read about it in `headrace recipe explain`, in the JSON schema
and in docs/reference/recipe-keys.md (config/descriptions.py). A unit stands at its end, in brackets."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.config.wrappers import (
    ClassifierKeys,
    LoRAKeys,
    ModelWrappers,
    QATKeys,
    RecurrenceKeys,
    at_least,
)

SPLIT_ROWS = ("data", "fsdp", "expert")  # axes of the mesh over which the rows of a batch are split

CAUSAL_OBJECTIVES = ("causal", "dpo")  # objectives of models whose tokens see only earlier ones


def part(folder: str, common: type | None = None, use: str | None = None, many: bool = False) -> Any:
    """A section whose `use` names a file in `folder`; without `use` in the recipe it is the file `use`.

    Its keys are those of that file's `Config` and of `common`. With `many` the section holds several such
    parts, each under a name of its own."""
    return field(default=None, metadata=dict(folder=folder, common=common, use=use, many=many))


def section(cls: type) -> Any:
    """A section with the keys of `cls`."""
    return field(default_factory=cls, metadata=dict(section=cls))


@dataclass(frozen=True)
class DataKeys:
    """The packed data of a run, written by `headrace data prepare`."""

    path: str  # folder or bucket URL of the packed data
    # length of a training sequence; a divisor of the length that the data was packed to [tokens]
    sequence_length: int
    isolate_documents: bool = True  # tokens attend only within their own document

    def __post_init__(self) -> None:
        at_least(2, self, "sequence_length")


@dataclass(frozen=True)
class LossKeys:
    """The loss, and how it is computed without storing all logits."""

    # weight of the squared log-partition, which keeps logits from drifting; 1e-4 is usual
    z_loss: float = 0.0
    soft_cap: float | None = None  # bound that a tanh keeps logits below; null: none
    # way of computing logits in parts: over tokens, over the vocabulary or in a kernel; bf16 and fp8 go over
    # tokens with logits or products in that format
    backend: Literal["auto", "tokens", "vocabulary", "kernel", "bf16", "fp8"] = "auto"
    chunk_size: int | str = "auto"  # tokens, or rows of the vocabulary, whose logits are in memory at a time
    filter_eps: float = 0.0  # probability below which a kernel may skip a token's gradient; 2.4e-4 is usual

    def __post_init__(self) -> None:
        at_least(0, self, "z_loss")
        if not 0 <= self.filter_eps < 1:
            raise ValueError("filter_eps: expected a probability from 0 up to, but not including, 1")
        if self.chunk_size != "auto" and not (isinstance(self.chunk_size, int) and self.chunk_size > 0):
            raise ValueError("chunk_size: expected auto, or a number of tokens or rows")
        if self.soft_cap is not None and self.soft_cap <= 0:
            raise ValueError("soft_cap: expected a number above 0, or null for none")


@dataclass(frozen=True)
class OptimizerKeys:
    """Keys that every optimizer has."""

    learning_rate: float  # peak learning rate
    weight_decay: float = 0.0  # decoupled weight decay of matrices, multiplied by the learning rate
    # global gradient norm above which gradients are scaled down; null: no limit
    max_grad_norm: float | None = 1.0
    ema_decay: float = 0.0  # decay per step of the averaged weights; 0: no average
    # deviations above the usual loss or gradient norm at which an update is skipped; 0: never
    spike_threshold: float = 10.0
    max_skipped: int = 5  # skipped updates, of the last 128, after which the run rolls back to a checkpoint

    def __post_init__(self) -> None:
        at_least(0, self, "learning_rate", "weight_decay", "spike_threshold")
        at_least(1, self, "max_skipped")
        if not 0 <= self.ema_decay < 1:
            raise ValueError("ema_decay: expected a number from 0 up to, but not including, 1")
        if self.max_grad_norm is not None and self.max_grad_norm <= 0:
            raise ValueError("max_grad_norm: expected a number above 0, or null for none")


@dataclass(frozen=True)
class ScheduleKeys:
    """Keys that every schedule of the learning rate has."""

    steps: int | str  # length of the run [steps, or "3B tokens"]
    warmup: int | str = 0  # length of the linear warmup [steps, "3B tokens" or "20 %"]
    min_lr_ratio: float = 0.1  # learning rate at the end, as a share of the peak

    def __post_init__(self) -> None:
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError("min_lr_ratio: expected a share from 0 to 1")


@dataclass(frozen=True)
class BatchKeys:
    """The batch of a step, over all devices."""

    sequences: int = 32  # global batch size, over all devices and microbatches [sequences]
    microbatches: int = 1  # parts that the batch is divided into to save memory; the result is the same
    # time over which the batch grows to its full size, a microbatch at a time; 0: none [steps, or "3B
    # tokens"]
    ramp: int | str = 0
    ramp_from: int = 0  # batch size of the first steps; 0: no ramp [sequences]

    def __post_init__(self) -> None:
        at_least(1, self, "sequences", "microbatches")
        at_least(0, self, "ramp_from")
        if self.sequences % self.microbatches:
            raise ValueError(f"microbatches: expected a divisor of batch.sequences, {self.sequences}")
        if (self.ramp == 0) != (self.ramp_from == 0):
            missing = "ramp" if self.ramp == 0 else "ramp_from"
            raise ValueError(f"{missing}: expected it to be set, since a ramp has both a length and a start")
        rows = self.sequences // self.microbatches
        if self.ramp_from % rows or self.ramp_from >= self.sequences:
            raise ValueError(
                f"ramp_from: expected less than {self.sequences} sequences, and a multiple of the {rows} "
                "that sequences / microbatches makes"
            )


@dataclass(frozen=True)
class MeshKeys:
    """Axes of the device mesh: ways to split data and weights. Their product is the number of devices."""

    data: int | str = 1  # ways to split the batch, with a copy of the weights each; one per slice [devices]
    fsdp: int | str = "auto"  # ways to split the batch and the weights [devices]
    tensor: int | str = 1  # ways to split heads and hidden units [devices]
    context: int | str = 1  # ways to split each sequence [devices]
    expert: int | str = 1  # ways to split the experts of a mixture, and the batch like fsdp [devices]

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
class ComputeKeys:
    """Number formats, and what the backward pass stores or computes again."""

    # format of activations and of the weights that a step uses
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    # format of the layers' matrix products; compute: that of dtype
    matmul: Literal["compute", "fp8", "int8"] = "compute"
    # activations stored for the backward pass: all (none), results of matrix products in device memory (dots)
    # or host memory (offload), results of attention, or only each layer's input (full)
    remat: Literal["none", "dots", "offload", "attention", "full"] = "none"
    unroll: int | str = "auto"  # layers compiled one after the other instead of as a loop [layers]

    def __post_init__(self) -> None:
        at_least(1, self, "unroll")
        if isinstance(self.unroll, str) and self.unroll != "auto":
            raise ValueError("unroll: expected a number of layers or auto")


@dataclass(frozen=True)
class CheckpointKeys:
    """Checkpoints in the run folder."""

    every: int = 1000  # interval between checkpoints, the most that a crash can lose [steps]
    keep: int = 3  # number of newest checkpoints to keep; older ones are removed
    keep_every: int = 0  # interval between checkpoints that are never removed; 0: none [steps]

    def __post_init__(self) -> None:
        at_least(1, self, "every", "keep")
        at_least(0, self, "keep_every")


@dataclass(frozen=True)
class EvalKeys:
    """Evaluation during and after training, on the held-out part of the data."""

    every: int = 1000  # interval between evaluations; 0: only at the end [steps]
    batches: int = 0  # number of batches to evaluate on; 0: all that are held out
    repeats: int = 1  # times that each row is evaluated, each with other masked tokens

    def __post_init__(self) -> None:
        at_least(0, self, "every", "batches")
        at_least(1, self, "repeats")


@dataclass(frozen=True)
class LogKeys:
    """Metrics and where they are written, besides metrics.jsonl and the terminal."""

    every: int = 10  # interval between rows of metrics [steps]
    tensorboard: bool = True  # TensorBoard files in the run folder
    wandb: bool = False  # Weights & Biases

    def __post_init__(self) -> None:
        at_least(1, self, "every")


@dataclass(frozen=True)
class TrainRecipe:
    """A training recipe."""

    run_dir: str  # run folder or bucket URL: checkpoints, metrics and logs are written here
    seed: int = 0  # seed of initial weights, data order and masking
    # run folder or Hugging Face folder to take initial weights and the model's shape from
    init_from: str | None = None
    # names of the weights to take, e.g. "embedding,head" or "blocks.w_*"; null: all
    init_weights: str | None = None
    freeze: str | None = None  # names of the weights that are not trained, e.g. "embedding"; null: none
    model: Any = part("models", ModelWrappers)  # model family; may be omitted with init_from
    data: DataKeys = section(DataKeys)
    objective: Any = part("objectives", use="causal")  # training objective
    loss: Any = part("losses", LossKeys, use="cross_entropy")  # loss of a predicted token
    optimizer: Any = part("optim", OptimizerKeys, use="adamw")  # optimizer
    schedule: Any = part("schedules", ScheduleKeys, use="cosine")  # course of the learning rate
    batch: BatchKeys = section(BatchKeys)
    mesh: MeshKeys = section(MeshKeys)
    compute: ComputeKeys = section(ComputeKeys)
    attention: Any = part("attention", use="auto")  # implementation of attention
    checkpoint: CheckpointKeys = section(CheckpointKeys)
    eval: EvalKeys = section(EvalKeys)
    log: LogKeys = section(LogKeys)
    # first and last step to trace to RUN/profile, e.g. "10:15"; null: none [steps]
    profile_steps: str | None = None
    # time after which a step counts as hung, if 20 usual steps are not longer; 0: never [seconds]
    step_timeout: int = 300

    @property
    def lora(self) -> LoRAKeys | None:
        return self.model.lora

    @property
    def qat(self) -> QATKeys | None:
        return self.model.qat

    @property
    def recurrence(self) -> RecurrenceKeys | None:
        return self.model.recurrence

    @property
    def classifier(self) -> ClassifierKeys | None:
        return self.model.classifier


@dataclass(frozen=True)
class SourceKeys:
    """Keys that every source of documents has."""

    weight: float = 1.0  # copies of the source's documents per epoch: 2 is twice, 0.5 a random half

    def __post_init__(self) -> None:
        if not 0 < self.weight <= 1000:
            raise ValueError("weight: expected a number above 0, and at most 1000")


@dataclass(frozen=True)
class NormalizeKeys:
    """Cleaning, filtering and deduplication of documents."""

    unicode: Literal["none", "nfc", "nfkc"] = "none"  # Unicode normalization form
    min_chars: int = 1  # length below which a document is dropped [characters]
    max_chars: int | None = None  # length above which a document is dropped; null: no limit [characters]
    # drops documents that repeat themselves or are hardly text (data/clean/filters.py)
    quality_filter: bool = False
    dedup_exact: bool = False  # keeps only the first of equal documents
    # similarity (Jaccard) from which a document counts as a copy; null: off; 0.8 is usual
    dedup_jaccard: float | None = None

    def __post_init__(self) -> None:
        at_least(1, self, "min_chars")
        if self.max_chars is not None and self.max_chars < self.min_chars:
            raise ValueError(f"max_chars: expected at least normalize.min_chars, {self.min_chars}, or null")
        if self.dedup_jaccard is not None and not 0.3 <= self.dedup_jaccard <= 1:
            raise ValueError("dedup_jaccard: expected a share from 0.3 to 1, or null")


@dataclass(frozen=True)
class TokenizerKeys:
    """The tokenizer: trained on the data, or read from a file."""

    use: Literal["bpe", "unigram", "file"] = "bpe"  # kind of tokenizer to train, or file to read one
    vocab: int = 32768  # size of the vocabulary, special tokens included [tokens]
    sample_mb: int = 256  # amount of text to train on, sampled from all sources [megabytes]
    path: str | None = None  # tokenizer to read: tokenizer.json, its folder, a .tiktoken or a .model file
    chat_template: str | None = None  # chat template to add to the tokenizer: a Jinja file, or "plain"

    def __post_init__(self) -> None:
        if self.use != "file":
            at_least(260, self, "vocab")  # 256 bytes and 4 special tokens
            at_least(1, self, "sample_mb")
            if self.path:
                raise ValueError(f"path: expected nothing, since `use: {self.use}` trains a tokenizer")
        elif not self.path:
            raise ValueError("path: expected the path of a tokenizer.json")
        for name in ("vocab", "sample_mb"):
            if self.use == "file" and getattr(self, name) != getattr(TokenizerKeys, name):
                raise ValueError(f"{name}: expected nothing, since `use: file` reads a finished tokenizer")


@dataclass(frozen=True)
class PackKeys:
    """Packing of documents into sequences of one length."""

    # joins all documents, one per sequence, or several per sequence with few cuts
    mode: Literal["concat", "document", "best_fit"] = "best_fit"
    sequence_length: int = 2048  # length of a packed sequence [tokens]
    eval_fraction: float = 0.01  # share of the documents held out for evaluation
    pause_tokens: int = 0  # pause tokens inserted per 100 tokens of text, and before each answer of a chat

    def __post_init__(self) -> None:
        at_least(2, self, "sequence_length")
        at_least(0, self, "pause_tokens")
        if not 0 <= self.eval_fraction < 1:
            raise ValueError("eval_fraction: expected a share from 0 up to, but not including, 1")


@dataclass(frozen=True)
class ShuffleKeys:
    """The stored order of the packed sequences."""

    epochs: int = 1  # stored copies of the data, each in another order; training reads one after the other
    rounds: int = 1  # passes of the shuffle; one is already uniform

    def __post_init__(self) -> None:
        at_least(1, self, "epochs", "rounds")


@dataclass(frozen=True)
class DataRecipe:
    """A data recipe."""

    path: str  # folder to write the packed data to
    seed: int = 0  # seed of the shuffle, the held-out documents and the samples
    engine: Literal["local", "ray"] = "local"  # workers on this machine, or on a Ray cluster
    workers: int | str = "auto"  # number of worker processes
    on_error: Literal["stop", "skip"] = "stop"  # reaction to bad input: stop the job, or skip it and count it
    sources: Any = part("data/sources", SourceKeys, use="files", many=True)  # kind of source
    normalize: NormalizeKeys = section(NormalizeKeys)
    tokenizer: TokenizerKeys = section(TokenizerKeys)
    pack: PackKeys = section(PackKeys)
    shuffle: ShuffleKeys = section(ShuffleKeys)


@dataclass(frozen=True)
class QuantizeRecipe:
    """Settings of `headrace quantize`, given on the command line."""

    method: Any = part("quantize/methods")  # method of quantization
