"""Export of LoRA adapters: merged into a model for transformers, and alone for peft on top of the base."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from headrace import model_wrappers
from headrace.checkpoint.open_run import LoadedRun
from headrace.config import reader, recipe
from headrace.convert import peft as convert_peft
from headrace.convert import to_huggingface
from headrace.errors import UserError
from headrace.low_precision.cast import cast
from headrace.model_wrappers import load_family, lora
from headrace.nn import module
from headrace.nn.sharding import make_mesh
from headrace.nn.stack import Execution

SIZES = dict(layers=2, embed=32, heads=4, kv_heads=4, mlp=64, vocab=64, window=8, global_every=2)


def make_run(name, tmp_path, **keys):
    """A run of a family whose adapters are not zero, as after training."""
    cls = reader.part_class("models", name)
    sizes = {key: value for key, value in SIZES.items() if key in cls.__dataclass_fields__}
    lora = dict(rank=4, alpha=6.0, **keys)
    causal = cls(**sizes).causal
    path = tmp_path / "recipe.yaml"
    path.write_text(f"""
run_dir: {tmp_path}/run
init_from: {tmp_path}/base
model: {json.dumps({"use": name} | sizes)}
lora: {json.dumps(lora)}
data: {{path: nowhere, sequence_length: 16}}
objective: {{use: {"causal" if causal else "masked"}}}
optimizer: {{use: adamw, learning_rate: 1e-3}}
schedule: {{use: constant, steps: 1}}
""")
    cfg = recipe.load(path)
    model = cfg.model
    family = load_family(model).Model
    params = jax.jit(lambda key: module.init(family, model, key))(jax.random.key(0))
    rng = np.random.default_rng(0)

    def perturb(path, w):
        if module.path_name(path).endswith(".up"):
            return jnp.asarray(0.1 * rng.standard_normal(w.shape), jnp.float32)
        if module.path_name(path).endswith(".magnitude"):
            return w * jnp.asarray(rng.uniform(0.8, 1.2, w.shape), jnp.float32)
        return w

    params = jax.tree_util.tree_map_with_path(perturb, params)
    return LoadedRun(cfg, params, 0, make_mesh({}, jax.devices()[:1]), None, None)


def logits(run):
    cfg = run.recipe.model
    exec_opts = Execution(reader.part_class("attention", "xla")(), "float32")
    model = cast(run.params, module.axes(load_family(cfg).Model, cfg), exec_opts)
    score = lambda model: model(cfg, jnp.asarray(TOKENS), exec_opts=exec_opts) @ model.unembed.T
    return np.asarray(jax.jit(score)(model))


TOKENS = np.random.default_rng(0).integers(4, 64, (2, 16))


def hf_logits(model):
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


def load_hf(folder, causal):
    auto_class = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForMaskedLM
    return auto_class.from_pretrained(folder, attn_implementation="eager").eval()


def base_of(run):
    """The same run without its adapters."""
    bare = dataclasses.replace(run.recipe, model=model_wrappers.without_wrapper(run.recipe.model))
    return dataclasses.replace(run, recipe=bare, params=lora.frozen_base(run.params))


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    "name, keys",
    [
        ("llama", {}),
        ("llama", {"dora": True, "targets": "blocks.w_q,blocks.w_down"}),
        ("modernbert", {"dora": True}),  # three of our matrices are one layer there, and two another
        ("modernbert", {"dora": True, "targets": "blocks.w_k,blocks.w_o"}),
        ("gemma3", {}),
    ],
)
def test_merged_adapters_in_transformers_and_adapters_in_peft_give_our_logits(tmp_path, name, keys):
    import peft  # takes seconds

    run = make_run(name, tmp_path, **keys)
    causal, expected = run.recipe.model.causal, logits(run)
    to_huggingface.export(run, f"{tmp_path}/merged", "float32")
    to_huggingface.export(base_of(run), f"{tmp_path}/base", "float32")
    convert_peft.export(run, f"{tmp_path}/adapter")
    assert np.abs(expected - logits(base_of(run))).max() > 4e-4
    np.testing.assert_allclose(hf_logits(load_hf(tmp_path / "merged", causal)), expected, atol=2e-5)
    base = load_hf(tmp_path / "base", causal)
    both = peft.PeftModel.from_pretrained(base, f"{tmp_path}/adapter").eval()
    np.testing.assert_allclose(hf_logits(both), expected, atol=2e-5)
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == f"{tmp_path}/base"
    np.testing.assert_allclose(hf_logits(both.merge_and_unload()), expected, atol=2e-5)


def test_models_without_adapters_or_without_a_counterpart_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"adapter: .* has no adapters"):
        convert_peft.export(base_of(make_run("llama", tmp_path)), f"{tmp_path}/adapter")
    with pytest.raises(UserError, match=r"sLSTM|slstm"):
        convert_peft.export(make_run("xlstm", tmp_path, slstm_every=2), f"{tmp_path}/adapter")


def test_adapters_are_refused_if_the_base_model_has_changed(tmp_path):
    run = make_run("llama", tmp_path)
    larger = dataclasses.replace(run.recipe.model, rope_theta=77.0)
    to_huggingface.export(base_of(run), f"{tmp_path}/base", "float32")
    other = dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, model=larger))
    with pytest.raises(
        UserError, match=r"is not the model that they were .* model.rope_theta is 77.0 here and"
    ):
        convert_peft.export(other, f"{tmp_path}/adapter")
    (tmp_path / "base").rename(tmp_path / "elsewhere")  # then it cannot be checked
    convert_peft.export(other, f"{tmp_path}/adapter")
