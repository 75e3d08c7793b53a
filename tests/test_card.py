"""The model card says what the run folder knows, and nothing that it does not."""

import xml.etree.ElementTree as ElementTree

import transformers
import yaml

from millrace import recipe, train
from millrace.export import huggingface
from millrace.folder import open_run


def card(folder):
    text = (folder / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), body


def test_a_run_is_described_with_its_data_its_losses_its_recipe_and_a_curve(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a secret that must not be told")
    cfg = tiny(f"run={tmp_path}/named", "log.every=1", "eval.batches=1")
    assert train.run(cfg) == 0
    run = open_run(recipe.load_run(cfg.run))
    (tmp_path / "named" / "recipe.yaml").write_text("# a secret that must not be told\n")
    huggingface.export(run, str(tmp_path / "out"), "float32")
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
    found: dict = {}
    exec(snippet, found)
    assert found["model"].num_parameters() == model.num_parameters()


def test_a_model_without_a_history_has_a_card_without_one(tiny, tmp_path):
    cfg = tiny(f"run={tmp_path}/first", "schedule.steps=2")
    assert train.run(cfg) == 0
    huggingface.export(open_run(recipe.load_run(cfg.run)), str(tmp_path / "out"), "float32")
    huggingface.import_(str(tmp_path / "out"), str(tmp_path / "imported"))
    huggingface.export(open_run(recipe.load_run(f"{tmp_path}/imported")), str(tmp_path / "again"), "float32")
    _, body = card(tmp_path / "again")
    assert (
        "trained for" not in body
        and "loss.svg" not in body
        and not (tmp_path / "again" / "loss.svg").exists()
    )
