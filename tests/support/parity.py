"""Compares models with transformers on the same random weights: logits, loss, gradients, exports."""

import copy
import json
from pathlib import Path
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from headrace import objectives
from headrace.checkpoint import open_hf
from headrace.config import reader, sections, source_model
from headrace.convert import to_huggingface
from headrace.model_formats.hf_tensors import to_tensors
from headrace.nn import module
from headrace.nn.linear import project
from headrace.nn.stack import Execution
from headrace.objectives import Batch, SpecialTokens, TrainTask
from headrace.training import step

# A few random configurations per test run, since each is compiled; a failing one is printed. The first is
# always the simplest.
ANEW = hypothesis.settings(
    max_examples=3,
    deadline=None,
    database=None,
    derandomize=False,
    phases=[hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)


def fill(model: Any, norm: float, seed: int = 0) -> Any:
    """Fill a model with random weights, large enough for logits of several units; norms are around `norm`."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            middle = norm if weight.ndim == 1 and not name.endswith("bias") else 0.0
            weight.normal_(middle, weight.shape[-1] ** -0.5 if weight.ndim > 1 else 0.2)
    return model.eval()


def check(
    hf_model: Any,
    folder: Path,
    *,
    length: int,
    rows: int = 2,
    least: float = 1e-6,
    export: bool = True,
    fused: bool = False,
) -> tuple[Any, Any]:
    """Compare a transformers model with its import, and return the imported config and weights. Every row
    is a single document, and the loss is that of the training step. The config is read from `folder`, so the
    import is tested too. Gradient norms below `least` count as `least`."""
    hf_model.save_pretrained(folder)
    settings = source_model.read_hf_config(folder)
    family = open_hf.find_family(settings)
    section = family.hf_naming.from_config(settings)
    cfg = reader.part_class("models", section.pop("use"))(**section)
    read = open_hf.read_params(family.tensor_table(cfg), module.shapes(family.Model, cfg), folder)
    params = jax.tree.map(jnp.asarray, read)
    cap = settings.get(family.hf_naming.soft_cap or "")
    vocab = cfg.vocab
    tokens = np.random.default_rng(length).integers(4, vocab, (rows, length))
    positions = np.broadcast_to(np.arange(length), tokens.shape)
    batch = Batch(jnp.asarray(tokens), jnp.ones_like(tokens), jnp.asarray(positions))
    job = TrainTask(
        model=cfg,
        objective=reader.part_class("objectives", "causal" if cfg.causal else "masked")(),
        loss=reader.part_class("losses", "cross_entropy", sections.LossKeys)(chunk_size=32, soft_cap=cap),
        exec_opts=Execution(reader.part_class("attention", "auto")(), "float32"),
        special_tokens=SpecialTokens(vocab, pad=0, bos=1, eos=2, mask=3),
        family=family,
    )
    axes = module.axes(family.Model, cfg)
    prepare = objectives.load_objective(job.objective).prepare

    @jax.jit
    def run(params: Any, batch: Batch) -> Any:
        examples = prepare(job, batch, jax.random.key(0))
        grads, sums = step.accumulate_gradients(job, axes, params, step.to_microbatches(examples, 1))
        layout = dict(segments=examples.segments, positions=examples.positions)
        logits = project(
            params.unembed, params(cfg, examples.inputs, exec_opts=job.exec_opts, **layout), "bsd,vd->bsv"
        )
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        mean = jax.tree.map(lambda g: g / sums["count"], grads)
        return examples, logits, sums["loss"] / sums["count"], mean

    examples, logits, loss, grads = run(params, batch)
    labels = tokens if cfg.causal else np.where(examples.weights > 0, examples.targets, -100)
    hf_model.zero_grad()
    inputs = torch.tensor(np.asarray(examples.inputs), dtype=torch.long)
    output = hf_model(inputs, labels=torch.tensor(np.asarray(labels), dtype=torch.long))
    output.loss.backward()
    hf_logits = output.logits.detach().numpy()
    assert np.abs(hf_logits).max() > 2  # small logits would agree whatever the model
    assert np.abs(logits - hf_logits).max() <= 2e-5
    assert abs(float(loss) - output.loss.item()) <= 1e-5
    table = family.tensor_table(cfg)
    hf_grads = {path: weight.grad for path, weight in hf_model.named_parameters()}
    if fused:  # fused expert tensors are split when saved, and here as well
        grads_dir = stored_gradients(hf_model, folder.with_name(folder.name + "-grads"))
        hf_grads = dict(to_tensors(table, from_files(table, params, grads_dir), "float32"))
        hf_grads = {path: torch.tensor(gradient) for path, gradient in hf_grads.items()}
    named_grads = dict(to_tensors(table, grads, "float32"))
    if fused:  # weights with an update rule have no gradients in transformers
        hf_grads = {path: gradient for path, gradient in hf_grads.items() if "correction_bias" not in path}
        named_grads = {
            path: gradient for path, gradient in named_grads.items() if "correction_bias" not in path
        }
    assert named_grads.keys() == hf_grads.keys()
    for path, gradient in hf_grads.items():
        error = np.linalg.norm(named_grads[path] - gradient.numpy()) / max(float(gradient.norm()), least)
        assert error <= 1e-3, (path, error)
    if export:
        eager_parts = ("attn", "experts") if fused else ("attn",)
        load_options = {f"{part}_implementation": "eager" for part in eager_parts}
        check_export(
            family, cfg, params, folder.with_name(folder.name + "-back"), cap, inputs, hf_logits, load_options
        )
    return cfg, params


def stored_gradients(hf_model: Any, folder: Path) -> Path:
    """Save the gradients of a transformers model under the names of its weights."""
    other = copy.deepcopy(hf_model)
    with torch.no_grad():
        for weight, source in zip(other.parameters(), hf_model.parameters(), strict=True):
            weight.copy_(source.grad)
    other.save_pretrained(folder)
    return folder


def from_files(table: Any, params: Any, folder: Path) -> Any:
    shapes = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), params)
    return open_hf.read_params(table, shapes, folder)


def check_export(
    family: Any, cfg: Any, params: Any, folder: Path, cap: Any, inputs: Any, hf_logits: Any, load_options: Any
) -> None:
    """Check that transformers finds every weight of an export and computes the original logits."""
    folder.mkdir()
    settings = family.hf_naming.to_config(cfg, 64) | {family.hf_naming.soft_cap or "no_cap": cap}
    (folder / "config.json").write_text(json.dumps(settings | {"dtype": "float32", "pad_token_id": 0}))
    to_huggingface.save_shards(to_tensors(family.tensor_table(cfg), params, "float32"), folder)
    auto = transformers.AutoModelForCausalLM if cfg.causal else transformers.AutoModelForMaskedLM
    loaded, info = auto.from_pretrained(folder, output_loading_info=True, **load_options)
    assert not any(info.values()), info
    with torch.no_grad():
        np.testing.assert_array_equal(loaded.eval()(inputs).logits.numpy(), hf_logits)
    section = family.hf_naming.from_config(json.loads((folder / "config.json").read_text()))
    assert reader.part_class("models", section.pop("use"))(**section) == cfg
