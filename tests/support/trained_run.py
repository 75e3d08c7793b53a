"""A small run that has learnt something, for tests of what comes after training."""

from pathlib import Path

from headrace.config import recipe
from headrace.training import run as training_run


def learnt(folder: Path, packed: str, weight_decay: float) -> Path:
    """Trains it in the folder. Returns its recipe."""
    path = folder / "recipe.yaml"
    path.write_text(f"""
run_dir: {folder}/run
model: {{use: llama, layers: 2, embed: 64, heads: 4, kv_heads: 2, mlp: 128, rope_theta: 10000.0}}
data: {{path: {packed}, sequence_length: 64}}
optimizer: {{use: adamw, learning_rate: 1e-2, weight_decay: {weight_decay}}}
schedule: {{use: cosine, steps: 60, warmup: 6}}
batch: {{sequences: 16}}
mesh: {{fsdp: 1, data: auto}}
compute: {{dtype: float32}}
eval: {{every: 0}}
log: {{every: 60, tensorboard: false}}
""")
    assert training_run.run(recipe.load(path)) == 0
    return path
