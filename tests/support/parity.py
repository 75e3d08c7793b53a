"""Models of transformers and ours on the same random weights: logits, loss, gradients, exports are equal."""

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

# New configurations with every run, few of them, since each is compiled; a failing one is printed as it is.
# The first of them is not new, but the simplest there is.
ANEW = hypothesis.settings(
    max_examples=3,
    deadline=None,
    database=None,
    derandomize=False,
    phases=[hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)


def fill(model: Any, norm: float, seed: int = 0) -> Any:
    """Weights large enough for logits of several units; those of norms lie around `norm`."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            middle = norm if weight.ndim == 1 and not name.endswith("bias") else 0.0
            weight.normal_(middle, weight.shape[-1] ** -0.5 if weight.ndim > 1 else 0.2)
    return model.eval()


def check(
    theirs: Any,
    folder: Path,
    *,
    length: int,
    rows: int = 2,
    least: float = 1e-6,
    export: bool = True,
    fused: bool = False,
) -> tuple[Any, Any]:
    """Returns our config and weights. What is read by both is one document a row; the loss is that of the
    training step. The config is read from `folder`, so an import is tested on the way. Gradients smaller than
    `least` are compared as if they were that large."""
    theirs.save_pretrained(folder)
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
        seen = dict(segments=examples.segments, positions=examples.positions)
        logits = project(
            params.unembed, params(cfg, examples.inputs, exec_opts=job.exec_opts, **seen), "bsd,vd->bsv"
        )
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        mean = jax.tree.map(lambda g: g / sums["count"], grads)
        return examples, logits, sums["loss"] / sums["count"], mean

    examples, logits, loss, grads = run(params, batch)
    labels = tokens if cfg.causal else np.where(examples.weights > 0, examples.targets, -100)
    theirs.zero_grad()
    inputs = torch.tensor(np.asarray(examples.inputs), dtype=torch.long)
    answer = theirs(inputs, labels=torch.tensor(np.asarray(labels), dtype=torch.long))
    answer.loss.backward()
    wanted = answer.logits.detach().numpy()
    assert np.abs(wanted).max() > 2  # small logits would agree whatever the model
    assert np.abs(logits - wanted).max() <= 2e-5
    assert abs(float(loss) - answer.loss.item()) <= 1e-5
    table = family.tensor_table(cfg)
    named = {path: weight.grad for path, weight in theirs.named_parameters()}
    if fused:  # their tensors of all experts in one are taken apart on the way to a file, and here as well
        there = stored_gradients(theirs, folder.with_name(folder.name + "-grads"))
        named = dict(to_tensors(table, from_files(table, params, there), "float32"))
        named = {path: torch.tensor(gradient) for path, gradient in named.items()}
    ours = dict(to_tensors(table, grads, "float32"))
    if fused:  # what is moved by a rule has none there
        named = {path: gradient for path, gradient in named.items() if "correction_bias" not in path}
        ours = {path: gradient for path, gradient in ours.items() if "correction_bias" not in path}
    assert ours.keys() == named.keys()
    for path, gradient in named.items():
        apart = np.linalg.norm(ours[path] - gradient.numpy()) / max(float(gradient.norm()), least)
        assert apart <= 1e-3, (path, apart)
    if export:
        plain = ("attn", "experts") if fused else ("attn",)
        how = {f"{part}_implementation": "eager" for part in plain}
        check_export(family, cfg, params, folder.with_name(folder.name + "-back"), cap, inputs, wanted, how)
    return cfg, params


def stored_gradients(theirs: Any, folder: Path) -> Path:
    """Their gradients in a folder, under the names that their weights have there."""
    other = copy.deepcopy(theirs)
    with torch.no_grad():
        for weight, one in zip(other.parameters(), theirs.parameters(), strict=True):
            weight.copy_(one.grad)
    other.save_pretrained(folder)
    return folder


def from_files(table: Any, params: Any, folder: Path) -> Any:
    shapes = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), params)
    return open_hf.read_params(table, shapes, folder)


def check_export(
    family: Any, cfg: Any, params: Any, folder: Path, cap: Any, inputs: Any, wanted: Any, how: Any
) -> None:
    """transformers finds every weight of an export, and computes what the model it was made of did."""
    folder.mkdir()
    settings = family.hf_naming.to_config(cfg, 64) | {family.hf_naming.soft_cap or "no_cap": cap}
    (folder / "config.json").write_text(json.dumps(settings | {"dtype": "float32", "pad_token_id": 0}))
    to_huggingface.save_shards(to_tensors(family.tensor_table(cfg), params, "float32"), folder)
    auto = transformers.AutoModelForCausalLM if cfg.causal else transformers.AutoModelForMaskedLM
    loaded, info = auto.from_pretrained(folder, output_loading_info=True, **how)
    assert not any(info.values()), info
    with torch.no_grad():
        np.testing.assert_array_equal(loaded.eval()(inputs).logits.numpy(), wanted)
    section = family.hf_naming.from_config(json.loads((folder / "config.json").read_text()))
    assert reader.part_class("models", section.pop("use"))(**section) == cfg
