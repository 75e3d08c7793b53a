"""The training steps whose compiled programs are guarded: every tiny recipe, every way to change one, and the
meshes they are compiled for."""

from pathlib import Path
from typing import NamedTuple

RECIPES = Path(__file__).parent.parent.parent / "recipes"
TINY = sorted((RECIPES / "tiny").glob("*.yaml"))
VOCAB, LABELS = 320, 3

MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "1 device": (1, dict(data=1, fsdp=1)),
    "fsdp 4 x tensor 2": (8, dict(fsdp=4, tensor=2)),
    "fsdp 4 x context 2": (8, dict(fsdp=4, context=2)),
}


class Case(NamedTuple):
    """A recipe with overrides, and what its batches hold beside tokens."""

    recipe: Path
    overrides: tuple[str, ...] = ()
    has_loss_mask: bool = False
    has_labels: bool = False


LLAMA, MODERNBERT, DEBERTA = (RECIPES / f"tiny/{name}.yaml" for name in ("llama", "modernbert", "deberta"))
MOE = RECIPES / "tiny/moe.yaml"
LORA = ("init_from=base", "lora.rank=4")
MICROBATCHES = "batch.microbatches=2"

CASES = {f"tiny/{path.stem}": Case(path) for path in TINY} | {
    "lora": Case(LLAMA, LORA),
    "lora on two matrices": Case(LLAMA, (*LORA, "lora.targets='blocks.w_q,blocks.w_v'")),
    "dora": Case(LLAMA, (*LORA, "lora.dora=true")),
    "qlora": Case(LLAMA, (*LORA, "lora.base_bits=4")),
    "qlora with dora": Case(LLAMA, (*LORA, "lora.base_bits=4", "lora.dora=true")),
    "lora on 8 bits": Case(LLAMA, (*LORA, "lora.base_bits=8")),
    "lora of a mixture of experts": Case(MOE, LORA),
    "qat": Case(LLAMA, ("qat.bits=4", "qat.group_size=16")),
    "lr-qat": Case(LLAMA, ("init_from=base", "qat.bits=4", "qat.rank=4")),
    "dpo with a frozen copy": Case(
        LLAMA, ("init_from=base", "objective.use=dpo", "objective.reference=copy"), True
    ),
    "dpo with lora": Case(LLAMA, (*LORA, "objective.use=dpo"), True),
    "loss mask": Case(LLAMA, (), True),
    "classify texts": Case(
        MODERNBERT, ("objective=null", "objective.use=classify", f"classifier.labels={LABELS}"), False, True
    ),
    "classify tokens": Case(
        LLAMA,
        ("objective.use=classify", f"classifier.labels={LABELS}", "classifier.pooling=each"),
        False,
        True,
    ),
    "rtd with microbatches": Case(DEBERTA, (MICROBATCHES,)),
    "microbatches": Case(LLAMA, (MICROBATCHES,)),
    "batch ramp": Case(LLAMA, ("batch.microbatches=2", "batch.ramp=10", "batch.ramp_from=8")),
    "averaged weights": Case(LLAMA, ("optimizer.ema_decay=0.99",)),
    "frozen weights": Case(LLAMA, ("freeze=embedding",)),
    "one text a row": Case(LLAMA, ("data.isolate_documents=false",)),
    "label smoothing": Case(LLAMA, ("loss.label_smoothing=0.1", "loss.z_loss=1e-4")),
    "focal": Case(LLAMA, ("loss=null", "loss.use=focal")),
    "loss by vocabulary": Case(LLAMA, ("loss.backend=vocabulary", "loss.chunk_size=64")),
    "loss by tokens": Case(LLAMA, ("loss.backend=tokens", "loss.chunk_size=128")),
    "bfloat16": Case(LLAMA, ("compute.dtype=bfloat16",)),
    "fp8": Case(LLAMA, ("compute.matmul=fp8",)),
    "int8": Case(LLAMA, ("compute.matmul=int8",)),
    "blockwise": Case(LLAMA, ("attention.use=blockwise", "attention.block_q=16", "attention.block_kv=16")),
    "evaluation with draws": Case(MODERNBERT, ("eval.repeats=3",)),
    **{
        f"remat {policy}": Case(LLAMA, (f"compute.remat={policy}", "model.layers=4"))
        for policy in ("none", "dots", "offload", "attention", "full")
    },
    "remat full of a mixture": Case(MOE, ("compute.remat=full",)),
    "layers in a loop": Case(LLAMA, ("compute.unroll=1", "model.layers=4")),
    "layers in a loop, two kinds": Case(MODERNBERT, ("compute.unroll=1", "model.layers=6")),
    **{
        f"optimizer {name}": Case(
            LLAMA, ("optimizer=null", f"optimizer.use={name}", "optimizer.learning_rate=1e-3")
        )
        for name in ("adafactor", "lion", "muon", "sgd", "stable_adamw")
    },
}
