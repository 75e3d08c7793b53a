"""Model cards: what the run folder knows is in them, and nothing else."""

import dataclasses
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import jax
import numpy as np
import pytest
import transformers
import yaml
from safetensors.numpy import load_file

from headrace.checkpoint.manager import Checkpoints
from headrace.checkpoint.open_run import open_run
from headrace.config import reader, recipe
from headrace.convert import from_huggingface, to_huggingface
from headrace.errors import UserError
from headrace.model_formats import quantized_folder
from headrace.model_wrappers import load_family
from headrace.nn import module, sharding
from headrace.quantize import run as quantize_run
from headrace.training import run as training_run

# Matrices of one size, so that what quantizes them is compiled once.
SMALL = ("model.vocab=300", "model.layers=1", "model.kv_heads=4", "model.mlp=32")


def card(folder):
    text = (folder / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), body


def test_a_card_describes_data_losses_and_recipe_with_a_chart(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a secret that must not appear")
    cfg = tiny(f"run_dir={tmp_path}/named", "log.every=1", "eval.batches=1")
    assert training_run.run(cfg) == 0
    run = open_run(recipe.load_run(cfg.run_dir))
    (tmp_path / "named" / "recipe.yaml").write_text("# a secret that must not appear\n")
    to_huggingface.export(run, str(tmp_path / "out"), "float32")
    front, body = card(tmp_path / "out")
    assert front["library_name"] == "transformers" and front["pipeline_tag"] == "text-generation"
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert f"{model.num_parameters():,} parameters" in body and body.lstrip().startswith("# named")
    assert f"12 steps, {12 * cfg.batch.sequences * cfg.data.sequence_length:,} tokens" in body
    assert "## Data" in body and "| train |" in body and "| perplexity |" in body
    shown = yaml.safe_load(body.split("```yaml\n")[1].split("```")[0])
    assert shown["optimizer"]["learning_rate"] == cfg.optimizer.learning_rate
    assert "secret" not in body
    drawing = ElementTree.parse(tmp_path / "out" / "loss.svg").getroot()
    assert len(drawing.findall("{*}polyline")) == 2
    snippet = body.split("```python\n")[1].split("```")[0].replace("FOLDER", str(tmp_path / "out"))
    namespace: dict = {}
    exec(snippet, namespace)
    assert namespace["model"].num_parameters() == model.num_parameters()


def test_the_card_of_an_imported_model_has_no_history(tiny, tmp_path):
    cfg = tiny(f"run_dir={tmp_path}/first", "schedule.steps=2")
    assert training_run.run(cfg) == 0
    to_huggingface.export(open_run(recipe.load_run(cfg.run_dir)), str(tmp_path / "out"), "float32")
    from_huggingface.import_model(str(tmp_path / "out"), str(tmp_path / "imported"))
    to_huggingface.export(
        open_run(recipe.load_run(f"{tmp_path}/imported")), str(tmp_path / "again"), "float32"
    )
    _, body = card(tmp_path / "again")
    assert (
        "trained for" not in body
        and "loss.svg" not in body
        and not (tmp_path / "again" / "loss.svg").exists()
    )


def write_run(cfg) -> None:
    """Write a run folder like that of a run, without the time that training takes."""
    rng = np.random.default_rng(0)
    shapes = module.shapes(load_family(cfg.model).Model, cfg.model)
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.1, leaf.shape).astype(leaf.dtype), shapes)
    Path(cfg.run_dir).mkdir()
    Path(cfg.run_dir, "recipe.yaml").write_text(reader.to_yaml(cfg))
    row = {"step": 2, "loss": 5.5, "evaluate/loss": 5.25, "evaluate/perplexity": 190.5}
    Path(cfg.run_dir, "metrics.jsonl").write_text(json.dumps(row) + "\n")
    checkpoints = Checkpoints(cfg.run_dir)
    checkpoints.save_params(params, {"step": 0, "recipe": reader.to_dict(cfg), "tokenizer_sha256": None})
    checkpoints.close()


def quantize(cfg, method: str, *options: str):
    target = Path(f"{cfg.run_dir}-{method}")
    request = quantize_run.QuantizeRequest(
        str(target), recipe.load_method(method, options), 2, "float16", cfg.data.path
    )
    run = open_run(recipe.load_run(cfg.run_dir))
    # Compiling for eight devices takes three times as long as for one.
    mesh = sharding.make_mesh(dict.fromkeys(sharding.AXES, 1), jax.devices()[:1])
    run = dataclasses.replace(run, params=jax.device_get(run.params), mesh=mesh)
    quantize_run.quantize(run, request, lambda line: None)
    return target, dataclasses.replace(run, recipe=recipe.load_run(target))


def test_the_card_of_a_quantized_model_says_how_it_is_stored_and_what_reads_it(tiny, tmp_path):
    cfg = tiny(f"run_dir={tmp_path}/named", *SMALL)
    write_run(cfg)
    target, run = quantize(cfg, "rtn", "bits=4", "group_size=32")
    front, body = card(target)
    assert front["library_name"] == "transformers" and body.lstrip().startswith("# named-rtn")
    assert "for `named` at step 2, before quantization." in body and "| perplexity | 190.5000 |" in body
    assert "in GPTQ's format, 4 bits per weight and a scale per group of 32 inputs of an output." in body
    assert "quantized after training, by rtn. The other weights are stored in float16." in body
    assert "optimum gptqmodel" in body and "from_pretrained" in body
    with pytest.raises(UserError, match="transformers reads as it is, with GPTQModel"):
        to_huggingface.export(run, str(target / "again"), "float32")

    target, run = quantize(cfg, "vptq", "bits=2", "tune_steps=0", "vector_length=4")
    front, body = card(target)
    assert front["library_name"] == "headrace" and "from_pretrained" not in body
    assert "```\nheadrace generate FOLDER\n```" in body and "before quantization" in body
    assert "quantized after training, by vptq." in body
    linears = quantized_folder.find_linears(load_family(run.recipe.model), run.recipe.model)
    names = {linear.name.format(layer) for linear in linears for layer in range(run.recipe.model.layers)}
    tensors = load_file(target / "model.safetensors")
    size = sum(tensor.nbytes for name, tensor in tensors.items() if any(map(name.startswith, names)))
    weights = run.recipe.model.layers * sum(linear.inputs * linear.outputs for linear in linears)
    assert f"vectors of 4 weights, {8 * size / weights:.2f} bits per weight with codebooks" in body
    with pytest.raises(UserError, match="only the vptq package reads"):
        to_huggingface.export(run, str(target / "again"), "float32")


def test_the_card_of_a_quantization_aware_run_has_its_metrics(tiny, tmp_path):
    cfg = tiny(f"run_dir={tmp_path}/aware", *SMALL, "qat.bits=4")
    write_run(cfg)
    _, body = card(quantize(cfg, "rtn", "bits=4", "group_size=0")[0])
    assert "for `aware` at step 2, with its matrices quantized as they are stored here." in body
    assert "a scale per output. Those of `aware` were quantized during training" in body
    assert "before quantization" not in body
