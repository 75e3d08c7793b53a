"""Data and a trained run that many tests use."""

from pathlib import Path

from headrace.config import recipe
from headrace.data.pipeline.prepare import prepare
from headrace.training import run as training_run


def prepare_texts(folder: Path) -> None:
    """Pack a few hundred short texts into `folder`/data: a vocabulary of 300, rows of 64 tokens."""
    (folder / "texts").mkdir()
    for number in range(240):
        words = " ".join(
            f"{['the', 'a', 'one'][n % 3]} {number * n % 17} of {n}" for n in range(number % 13 + 3)
        )
        (folder / "texts" / f"{number:03}.txt").write_text(f"Text {number}: {words}.\n")
    (folder / "data.yaml").write_text(
        f"path: {folder}/data\nsources: {{test: {{path: {folder}/texts}}}}\n"
        "tokenizer: {use: bpe, vocab: 300}\npack: {sequence_length: 64, eval_fraction: 0.1}\n"
    )
    prepare(recipe.load_data(folder / "data.yaml"), lambda line: None)


def train_small_run(folder: Path, data: str) -> None:
    """Train a small model on the data until it has learned something. `folder` gets recipe.yaml and run/."""
    (folder / "recipe.yaml").write_text(f"""
run_dir: {folder}/run
model: {{use: llama, layers: 2, embed: 64, heads: 4, kv_heads: 2, mlp: 128, rope_theta: 10000.0}}
data: {{path: {data}, sequence_length: 64}}
optimizer: {{use: adamw, learning_rate: 1e-2, weight_decay: 0.0}}
schedule: {{use: cosine, steps: 60, warmup: 6}}
batch: {{sequences: 16}}
mesh: {{fsdp: 1, data: auto}}
compute: {{dtype: float32}}
eval: {{every: 0}}
log: {{every: 60, tensorboard: false}}
""")
    assert training_run.run(recipe.load(folder / "recipe.yaml")) == 0
