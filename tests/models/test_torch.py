"""Torch modules in our trainer: what torch and transformers compute, on one device and on eight."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from hypothesis import strategies as st

from headrace.checkpoint.manager import Checkpoints
from headrace.checkpoint.open_run import open_run
from headrace.config import reader, recipe, sections
from headrace.convert import from_huggingface, to_huggingface
from headrace.data.dataset import Dataset
from headrace.errors import UserError
from headrace.model_wrappers import load_family
from headrace.nn import module
from headrace.nn.linear import project
from headrace.nn.stack import Execution
from headrace.plan import planner
from headrace.training import run as training_run
from headrace.training import setup, step
from headrace.training.batch import device_batch, fill_model_sizes, special_tokens
from headrace.training.task import make_task
from tests.support.parity import ANEW

pytest.importorskip("torchax", reason="needs torchax: pip install 'headrace[torch]'")

SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
LLAMA = dict(module="transformers:LlamaForCausalLM", config=SIZES | dict(num_key_value_heads=2))
BERT_ONLY = dict(num_hidden_layers=3, local_attention=8, global_attn_every_n_layers=3, pad_token_id=0)
MODERNBERT = dict(module="transformers:ModernBertForMaskedLM", config=SIZES | BERT_ONLY, causal=False)
PLAIN = """
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 80), nn.GELU(), nn.Linear(80, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)

class Plain(nn.Module):
    def __init__(self, vocab_size, width, heads, layers):
        super().__init__()
        self.table, self.places = nn.Embedding(vocab_size, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.gain = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, tokens, positions):
        x = self.gain * self.table(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

class Averaging(nn.Module):
    def __init__(self, vocab_size, width):
        super().__init__()
        self.table, self.head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)

    def forward(self, tokens):
        x = self.table(tokens)
        return self.head(x.cumsum(1))
"""


def section(vocab: int = 64, **more: Any) -> Any:
    return reader.part_class("models", "torch")(vocab=vocab, **more)


@pytest.fixture
def plain(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "mine.py").write_text(PLAIN)
    return dict(module=f"{tmp_path}/mine.py:Plain", config=dict(width=32, heads=4, layers=2))


def how(**more: Any) -> Execution:
    return Execution(reader.part_class("attention", "xla")(), **dict(compute_dtype="float32") | more)


def weights_of(cfg: Any) -> Any:
    """Large enough to tell inputs apart."""
    fresh = module.init(load_family(cfg).Model, cfg, jax.random.key(0))
    return jax.tree.map(lambda w: w * 4 if w.ndim > 1 and w.std() > 0 else w + 0.1, fresh)


def logits_of(cfg: Any, params: Any, tokens: np.ndarray, **seen: Any) -> np.ndarray:
    run = jax.jit(lambda p, t: project(p.unembed, p(cfg, t, exec_opts=how(), **seen), "bsd,vd->bsv"))
    return np.asarray(run(params, jnp.asarray(tokens, jnp.int32)))


def theirs(cfg: Any, params: Any) -> Any:
    """The torch module with our weights, and attention of its own."""
    from headrace.models import _torch_module

    made: Any = _torch_module.module_with_weights(cfg, params.weights)
    if hasattr(made, "set_attn_implementation"):
        made.set_attn_implementation("eager")
    return made


@pytest.mark.parametrize("name", ["llama", "modernbert", "plain"])
def test_parity_of_logits_with_torch_itself(name: str, plain) -> None:
    cfg = section(**{"llama": LLAMA, "modernbert": MODERNBERT, "plain": plain}[name])
    params, tokens = weights_of(cfg), np.random.default_rng(0).integers(4, 64, (2, 24))
    positions = np.broadcast_to(np.arange(24), (2, 24)).copy()
    more = {"positions": torch.tensor(positions)} if name == "plain" else {}
    with torch.no_grad():
        out = theirs(cfg, params)(torch.tensor(tokens), **more)
    wanted = getattr(out, "logits", out).numpy()
    np.testing.assert_allclose(logits_of(cfg, params, tokens), wanted, atol=2e-5 * np.abs(wanted).max())


@ANEW
@hypothesis.given(
    name=st.sampled_from(["Llama", "Qwen3", "Mistral", "Gemma2"]),
    layers=st.integers(1, 3),
    heads=st.sampled_from([(2, 1), (4, 2), (8, 2)]),
    head_dim=st.sampled_from([8, 16]),
    window=st.integers(2, 9),
    tied=st.booleans(),
)
def test_parity_of_random_configurations(name, layers, heads, head_dim, window, tied) -> None:
    """Causal windows, soft caps of scores, QK-norms, heads of another width."""
    cfg = section(
        module=f"transformers:{name}ForCausalLM",
        config=SIZES
        | dict(num_hidden_layers=layers, num_attention_heads=heads[0], num_key_value_heads=heads[1])
        | dict(head_dim=head_dim, tie_word_embeddings=tied, pad_token_id=0)
        | (dict(sliding_window=window) if name in ("Mistral", "Gemma2") else {})
        | (dict(attn_logit_softcapping=2.0, final_logit_softcapping=None) if name == "Gemma2" else {}),
    )
    params, tokens = weights_of(cfg), np.random.default_rng(0).integers(4, 64, (2, 24))
    with torch.no_grad():
        wanted = theirs(cfg, params)(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(logits_of(cfg, params, tokens), wanted, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("name", ["modernbert", "plain"])
def test_packed_documents_do_not_see_each_other(name: str, plain) -> None:
    cfg = section(**{"modernbert": MODERNBERT, "plain": plain}[name])
    params, tokens = weights_of(cfg), np.random.default_rng(0).integers(4, 64, (2, 24))
    at = np.arange(24)
    seen = dict(
        segments=jnp.broadcast_to(jnp.where(at < 10, 1, 2), (2, 24)),
        positions=jnp.broadcast_to(jnp.where(at < 10, at, at - 10), (2, 24)),
    )
    whole, changed = logits_of(cfg, params, tokens, **seen), tokens.copy()
    changed[:, 9] = 5
    other = logits_of(cfg, params, changed, **seen)
    np.testing.assert_array_equal(other[:, 10:], whole[:, 10:])
    assert np.abs(other[:, 9] - whole[:, 9]).max() > 1e-3
    alone = logits_of(cfg, params, tokens[:, 10:])
    np.testing.assert_allclose(whole[:, 10:], alone, atol=2e-5 * np.abs(alone).max())


def test_parity_with_our_own_llama(tmp_path) -> None:
    cfg = section(**LLAMA)
    params, tokens = weights_of(cfg), np.random.default_rng(0).integers(4, 64, (2, 24))
    theirs(cfg, params).save_pretrained(tmp_path / "hf")
    from_huggingface.import_model(str(tmp_path / "hf"), str(tmp_path / "run"))
    run = open_run(recipe.load_run(str(tmp_path / "run")))
    ours = jax.device_get(run.params)
    wanted = logits_of(run.recipe.model, ours, tokens)
    np.testing.assert_allclose(logits_of(cfg, params, tokens), wanted, atol=2e-5 * np.abs(wanted).max())
    flops = [load_family(one).flops_per_token(one, 24) for one in (cfg, run.recipe.model)]
    assert flops[0] == flops[1]


def load(tmp_path: Path, packed: str, model: dict[str, Any], *overrides: str) -> sections.TrainRecipe:
    tree = {
        "run_dir": f"{tmp_path}/run",
        "model": {"use": "torch"} | model,
        "data": {"path": packed, "sequence_length": 64},
        "objective": {"use": "causal" if model.get("causal", True) else "masked"},
        "optimizer": {"use": "adamw", "learning_rate": 1e-2, "weight_decay": 0.1},
        "schedule": {"use": "constant", "steps": 4},
        "batch": {"sequences": 8},
        "compute": {"dtype": "float32"},
        "checkpoint": {"every": 2},
        "eval": {"every": 0, "batches": 1},
        "log": {"every": 1, "tensorboard": False},
    }
    (tmp_path / "recipe.yaml").write_text(reader.dump(tree))
    return recipe.load(tmp_path / "recipe.yaml", list(overrides))


class Trained:
    """A few steps of a recipe on so many devices: losses, first and last weights, the batches."""

    def __init__(self, cfg: sections.TrainRecipe, devices: int = 8):
        data = Dataset.open(cfg.data.path, sequence_length=64)
        self.cfg = fill_model_sizes(cfg, data)
        task, laid = make_task(self.cfg, special_tokens(data)), setup.make_mesh(cfg, jax.devices()[:devices])
        with jax.set_mesh(laid):
            update = setup.make_update(self.cfg, task)
            abstract, fresh = setup.make_state(self.cfg, task, update, laid)
            axes = module.axes(load_family(task.model).Model, task.model)
            one = setup.lower_step(
                self.cfg, step.make_train_step(task, update, axes), abstract, laid
            ).compile()
            state, self.losses, self.batches = fresh(), [], []
            self.first = jax.device_get(state.params)
            self.shards = {
                name: w.addressable_shards[0].data.size / w.size
                for name, w in module.named_leaves(state.params)
            }
            for number in range(4):
                batch = device_batch(data, data.train_order(8, seed=0), laid, number)
                self.batches.append(jax.device_get(batch))
                state, metrics = one(state, batch)
                self.losses.append(float(metrics["loss"]))
            self.last = jax.device_get(state.params)


def by_torch(run: Trained) -> list[float]:
    """The same steps by torch alone, documents told apart by a mask."""
    made, cfg = theirs(run.cfg.model, run.first).train(), run.cfg.optimizer
    kinds = [[w for w in made.parameters() if (w.ndim > 1) == is_matrix] for is_matrix in (True, False)]
    groups = [dict(params=kinds[0], weight_decay=0.1), dict(params=kinds[1], weight_decay=0.0)]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(cfg.b1, cfg.b2), eps=cfg.eps)
    losses = []
    for batch in run.batches:
        tokens, ids, positions = (
            torch.tensor(np.asarray(x, np.int64)) for x in (batch.tokens, batch.segments, batch.positions)
        )
        seen = (ids[:, :, None] == ids[:, None]) & torch.ones(64, 64, dtype=torch.bool).tril()
        mask = torch.where(seen, 0.0, -1e30)[:, None]
        logits = made(tokens, attention_mask=mask, position_ids=positions).logits[:, :-1]
        counts = (ids[:, 1:] == ids[:, :-1]) & (ids[:, :-1] > 0)
        loss = torch.nn.functional.cross_entropy(logits[counts], tokens[:, 1:][counts])
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        adamw.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_parity_of_training_with_torch_and_of_eight_devices_with_one(tmp_path, packed) -> None:
    cfg = load(tmp_path, packed, LLAMA, "mesh.fsdp=4", "mesh.tensor=2")
    eight = Trained(cfg)
    np.testing.assert_allclose(eight.losses, by_torch(eight), rtol=1e-5)
    assert max(eight.shards.values()) <= 1 / 4 and min(eight.shards.values()) == 1 / 8
    single = Trained(dataclasses.replace(cfg, mesh=sections.MeshKeys()), devices=1)
    np.testing.assert_allclose(single.losses, eight.losses, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["modernbert", "plain"])
def test_eight_devices_compute_what_one_does(name: str, tmp_path, packed, plain) -> None:
    cfg = load(tmp_path, packed, {"modernbert": MODERNBERT, "plain": plain}[name])
    eight, single = Trained(cfg), Trained(cfg, devices=1)
    np.testing.assert_allclose(single.losses, eight.losses, rtol=1e-5)
    sharded = [share for name, share in eight.shards.items() if eight.first.weights[name[8:]].ndim > 1]
    assert max(sharded) == 1 / 8


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit_and_goes_back_into_torch(tmp_path, packed, plain) -> None:
    cfg = load(tmp_path, packed, plain, "compute.remat=full", "optimizer.use=muon")
    again = dataclasses.replace(cfg, run_dir=f"{tmp_path}/again")
    assert training_run.run(cfg) == 0
    shutil.copytree(cfg.run_dir, again.run_dir)
    shutil.rmtree(f"{again.run_dir}/checkpoints/4")
    assert Checkpoints(again.run_dir).latest_step() == 2 and training_run.run(again) == 0
    whole, other = (open_run(recipe.load_run(one.run_dir)) for one in (cfg, again))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(whole.params), jax.device_get(other.params))

    to_huggingface.export(whole, f"{tmp_path}/out", "float32")
    settings = json.loads((tmp_path / "out/config.json").read_text())
    from safetensors.torch import load_file

    from headrace.models._torch_module import find_class

    made = find_class(settings["module"])(**settings["config"], vocab_size=settings["vocab_size"])
    made.load_state_dict(load_file(tmp_path / "out/model.safetensors"))
    tokens = np.random.default_rng(0).integers(4, 64, (1, 24))
    with torch.no_grad():
        wanted = made(torch.tensor(tokens), torch.arange(24)[None]).numpy()
    found = logits_of(whole.recipe.model, jax.device_get(whole.params), tokens)
    np.testing.assert_allclose(found, wanted, atol=2e-5 * np.abs(wanted).max())


def test_a_run_starts_from_a_folder_of_transformers_and_is_exported_to_one(tmp_path, packed) -> None:
    settings = transformers.LlamaConfig(**LLAMA["config"], vocab_size=300)
    transformers.LlamaForCausalLM(settings).save_pretrained(tmp_path / "hf")
    cfg = load(
        tmp_path, packed, LLAMA, f"init_from={tmp_path}/hf", "schedule.steps=1", "optimizer.learning_rate=0"
    )
    assert training_run.run(cfg) == 0
    to_huggingface.export(open_run(recipe.load_run(cfg.run_dir)), f"{tmp_path}/out", "float32")
    before, after = (
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        for name in ("hf", "out")
    )
    assert not any(after[1].values())
    for name, tensor in before[0].state_dict().items():
        assert torch.equal(tensor, after[0].state_dict()[name]), name


def test_layers_are_computed_in_bfloat16_over_weights_in_float32() -> None:
    cfg = section(**MODERNBERT)
    params, tokens = weights_of(cfg), jnp.ones((1, 8), jnp.int32)
    traced = jax.make_jaxpr(lambda p: p(cfg, tokens, exec_opts=how(compute_dtype="bfloat16")))(params)
    products = [str(eqn.invars[0].aval.dtype) for eqn in _equations(traced.jaxpr)]
    wide = [kind for kind in products if kind != "bfloat16"]
    assert len(products) > 12 and len(wide) <= 4 and traced.out_avals[0].dtype == jnp.bfloat16


def _equations(jaxpr: Any) -> Any:
    for eqn in jaxpr.eqns:
        inner = [value for value in eqn.params.values() if hasattr(value, "eqns") or hasattr(value, "jaxpr")]
        if not inner and eqn.primitive.name == "dot_general":
            yield eqn
        for value in inner:
            yield from _equations(getattr(value, "jaxpr", value))


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(module="transformers:NoSuchModel"), "model.module: found transformers:NoSuchModel"),
        (dict(module="nowhere.py:Model"), "there is no file nowhere.py"),
        (dict(module="json:JSONDecoder"), "expected a class of torch.nn.Module"),
        (dict(module="transformers:LlamaModel"), "expected a class that predicts tokens"),
        (dict(config=dict(num_attention_heads="four")), "model.config: transformers:LlamaForCausalLM cannot"),
        (dict(causal=False), "model.causal: found false, and LlamaAttention"),
        (dict(head_module="lm_tail"), "model.head_module: found lm_tail"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], said: str) -> None:
    cfg = section(**LLAMA | change)
    with pytest.raises(UserError, match=said):
        logits_of(cfg, weights_of(cfg), np.ones((1, 8)))


def test_a_module_that_cannot_tell_documents_apart_is_refused(plain) -> None:
    cfg = section(module=plain["module"].replace("Plain", "Averaging"), config=dict(width=8))
    params, tokens = weights_of(cfg), np.ones((1, 8))
    assert logits_of(cfg, params, tokens).shape == (1, 8, 64)
    with pytest.raises(UserError, match=r"data.isolate_documents: expected false"):
        logits_of(cfg, params, tokens, segments=jnp.ones((1, 8), jnp.int32))


def test_plan_is_refused(tmp_path, packed) -> None:
    with pytest.raises(UserError, match=r"model.use: found torch, but plan needs a family whose sizes"):
        planner.fill_data_sizes(load(tmp_path, packed, LLAMA))


def test_recipes_keep_the_settings_of_a_class_as_they_are(tmp_path, packed) -> None:
    deep = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "layer_types": ["a", "b"]}
    cfg = load(tmp_path, packed, LLAMA | {"config": deep}, "model.config.hidden_size=48")
    assert reader.to_dict(cfg)["model"]["config"] == deep | {"hidden_size": 48}
    again = load(tmp_path, packed, LLAMA | {"config": deep | {"hidden_size": 48}})
    assert cfg.model == again.model and hash(cfg.model) == hash(again.model)
    with pytest.raises(UserError, match=r"model.config: found 3, expected `key: value` pairs"):
        load(tmp_path, packed, LLAMA | {"config": 3})
    with pytest.raises(UserError, match="not as vocab_size"):
        load(tmp_path, packed, LLAMA, "model.config.vocab_size=64")
