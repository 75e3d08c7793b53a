"""What is handed over after training with adapters: merged, in transformers, and alone, in peft over the
model that they were trained beside."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers

from headrace.model_wrappers import lora as adapters, split_weights as matrices
from headrace.config import reader as config, recipe, sections
from headrace.nn import module
from headrace.errors import UserError
from headrace.nn.stack import Execution, cast
from headrace.convert import peft as adapter, to_huggingface as huggingface
from headrace.checkpoint.open_run import Opened
from headrace.nn.sharding import make
from headrace.objectives import file

SIZES = dict(layers=2, embed=32, heads=4, kv_heads=4, mlp=64, vocab=64, window=8, global_every=2)


def drawn(name, tmp_path, **keys):
    """A run of a family whose adapters have learnt something, as if."""
    cls = config.part_class("models", name, sections.Every)
    sizes = {key: value for key, value in SIZES.items() if key in cls.__dataclass_fields__}
    sizes |= dict(lora_rank=4, lora_alpha=6.0, **keys)
    causal = cls(**sizes).causal
    path = tmp_path / "recipe.yaml"
    path.write_text(f"""
run: {tmp_path}/run
start: {tmp_path}/base
model: {json.dumps({"use": name} | sizes)}
data: {{path: nowhere, sequence_length: 16}}
objective: {{use: {"causal" if causal else "masked"}}}
optimizer: {{use: adamw, learning_rate: 1e-3}}
schedule: {{use: constant, steps: 1}}
""")
    cfg = recipe.load(path)
    model = cfg.model
    family = file("models", model).Model
    params = jax.jit(lambda key: module.init(family, model, key))(jax.random.key(0))
    draw = np.random.default_rng(0)

    def stirred(path, w):
        if module.dotted(path).endswith(".up"):
            return jnp.asarray(0.1 * draw.standard_normal(w.shape), jnp.float32)
        if module.dotted(path).endswith(".magnitude"):
            return w * jnp.asarray(draw.uniform(0.8, 1.2, w.shape), jnp.float32)
        return w

    params = jax.tree_util.tree_map_with_path(stirred, params)
    return Opened(cfg, params, 0, make({}, jax.devices()[:1]), None, None)


def logits(run):
    cfg = run.cfg.model
    how = Execution(config.part_class("attention", "xla")(), "float32")
    model = cast(run.params, module.axes(file("models", cfg).Model, cfg), how)
    score = lambda model: model(cfg, jnp.asarray(TOKENS), how=how) @ model.unembed.T
    return np.asarray(jax.jit(score)(model))


TOKENS = np.random.default_rng(0).integers(4, 64, (2, 16))


def theirs(model):
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


def loaded(folder, causal):
    kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForMaskedLM
    return kind.from_pretrained(folder, attn_implementation="eager").eval()


def base_of(run):
    """The run before it had adapters."""
    bare = dataclasses.replace(run.cfg, model=matrices.plain(run.cfg.model))
    return dataclasses.replace(run, cfg=bare, params=adapters.without(run.params))


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    "name, keys",
    [
        ("llama", {}),
        ("llama", {"lora_dora": True, "lora_on": "blocks.w_q,blocks.w_down"}),
        ("modernbert", {"lora_dora": True}),  # three matrices of ours are one there, and two another
        ("modernbert", {"lora_dora": True, "lora_on": "blocks.w_k,blocks.w_o"}),
        ("gemma3", {}),
    ],
)
def test_merged_in_transformers_and_alone_in_peft_compute_what_we_do(tmp_path, name, keys):
    run = drawn(name, tmp_path, **keys)
    causal, wanted = run.cfg.model.causal, logits(run)
    huggingface.export(run, f"{tmp_path}/merged", "float32")
    huggingface.export(base_of(run), f"{tmp_path}/base", "float32")
    adapter.export(run, f"{tmp_path}/adapter")
    assert np.abs(wanted - logits(base_of(run))).max() > 4e-4
    np.testing.assert_allclose(theirs(loaded(tmp_path / "merged", causal)), wanted, atol=2e-5)
    over = loaded(tmp_path / "base", causal)
    both = peft.PeftModel.from_pretrained(over, f"{tmp_path}/adapter").eval()
    np.testing.assert_allclose(theirs(both), wanted, atol=2e-5)
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == f"{tmp_path}/base"
    np.testing.assert_allclose(theirs(both.merge_and_unload()), wanted, atol=2e-5)


def test_what_has_no_place_in_peft_is_told(tmp_path):
    with pytest.raises(UserError, match="--adapter: .* has no adapters"):
        adapter.export(base_of(drawn("llama", tmp_path)), f"{tmp_path}/adapter")
    with pytest.raises(UserError, match="sLSTM|slstm"):
        adapter.export(drawn("xlstm", tmp_path, slstm_every=2), f"{tmp_path}/adapter")


def test_adapters_are_not_handed_over_for_another_model_than_theirs(tmp_path):
    run = drawn("llama", tmp_path)
    larger = dataclasses.replace(run.cfg.model, rope_theta=77.0)
    huggingface.export(base_of(run), f"{tmp_path}/base", "float32")
    other = dataclasses.replace(run, cfg=dataclasses.replace(run.cfg, model=larger))
    with pytest.raises(UserError, match=r"is not the model they were .* model.rope_theta is 77.0 here and"):
        adapter.export(other, f"{tmp_path}/adapter")
    (tmp_path / "base").rename(tmp_path / "elsewhere")  # where nobody can look
    adapter.export(other, f"{tmp_path}/adapter")
