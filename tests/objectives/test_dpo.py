"""Preference tuning: its loss and gradients against the formula over transformers' logits, where it begins,
and that no mesh changes it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from headrace import model_wrappers
from headrace.config import recipe
from headrace.errors import UserError
from headrace.model_formats.hf_tensors import to_tensors
from headrace.model_wrappers import load_family
from headrace.model_wrappers.frozen_reference import PolicyAndReference
from headrace.nn import module, sharding
from headrace.objectives import Batch, SpecialTokens, load_objective
from headrace.training import setup, step
from headrace.training.task import make_task

LENGTH, VOCAB = 48, 64
COPY, LORA = ("objective.reference=copy",), ("lora.rank=4", "lora.alpha=16")


@pytest.fixture
def load(tmp_path):
    (tmp_path / "recipe.yaml").write_text(f"""
run_dir: {tmp_path}/run
init_from: {tmp_path}/base
model: {{use: llama, layers: 2, embed: 32, heads: 4, kv_heads: 2, mlp: 64, vocab: {VOCAB}, rope_theta: 1e4}}
data: {{path: nowhere, sequence_length: {LENGTH}}}
objective: {{use: dpo, beta: 0.5}}
loss: {{use: cross_entropy, chunk_size: 24}}
optimizer: {{use: adamw, learning_rate: 1e-2, weight_decay: 0.0}}
schedule: {{use: constant, steps: 100}}
batch: {{sequences: 8}}
mesh: {{fsdp: 1, data: auto}}
compute: {{dtype: float32}}
""")
    return lambda *overrides: recipe.load(tmp_path / "recipe.yaml", overrides)


def documents():
    """Eight rows of pairs: lists of tokens, and after how many of them the answer begins. The last row has
    one pair alone, and padding."""
    draw = np.random.default_rng(0)
    rows = []
    for number in range(8):
        row = []
        for _ in range(1 if number == 7 else 2):
            prompt = draw.integers(4, VOCAB, draw.integers(2, 5)).tolist()
            # The chosen ends in one token, the rejected in another: something to be learnt.
            for last, size in ((5, draw.integers(1, 6)), (6, draw.integers(1, 6))):
                row.append((prompt + draw.integers(8, VOCAB, size).tolist() + [last], len(prompt)))
        rows.append(row)
    return rows


def packed(rows):
    tokens, segments, positions, loss = np.zeros((4, len(rows), LENGTH), np.int32)
    for place, row in enumerate(rows):
        first = 0
        for number, (text, answer) in enumerate(row, 1):
            here = slice(first, first + len(text))
            tokens[place, here], segments[place, here] = text, number
            positions[place, here] = np.arange(len(text))
            loss[place, first + answer : first + len(text)] = 1
            first += len(text)
    return Batch(*map(jnp.asarray, (tokens, segments, positions, loss.astype(bool))))


def task_of(cfg):
    return make_task(cfg, SpecialTokens(VOCAB, 0, 1, 2, None))


def llama(cfg, params):
    """The same model of transformers, in float64."""
    family = load_family(cfg)
    settings = family.hf_naming.to_config(cfg, LENGTH)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings, attn_implementation="eager"))
    tensors = {name: torch.tensor(w) for name, w in to_tensors(family.tensor_table(cfg), params, "float32")}
    missing = model.load_state_dict(tensors, strict=False)
    assert missing.missing_keys == ["lm_head.weight"] and not missing.unexpected_keys  # it is tied
    model.tie_weights()
    return model.double()


def answered(model, text, answer):
    logits = model(torch.tensor([text])).logits[0, answer - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(text[answer:])[:, None]).sum()


def test_loss_and_gradients_are_those_of_the_formula_over_transformers_logits(load):
    cfg = load(*COPY)
    task, rows = task_of(cfg), documents()
    bare = model_wrappers.without_wrapper(cfg.model)
    draw = lambda seed: jax.tree.map(
        lambda w: 3.0 * w, module.init(load_family(bare).Model, bare, jax.random.key(seed))
    )
    params = PolicyAndReference(draw(0), draw(1))
    axes = module.axes(load_family(cfg.model).Model, cfg.model)
    examples = load_objective(cfg.objective).prepare(task, packed(rows), jax.random.key(0))
    found, sums = step.accumulate_gradients(task, axes, params, step.to_microbatches(examples, 1))
    policy, reference = llama(bare, params.policy), llama(bare, params.reference)
    margins = []
    for row in rows:
        gains = [answered(policy, *one) - answered(reference, *one).detach() for one in row]
        pairs = zip(gains[::2], gains[1::2], strict=True)
        margins += [0.5 * (chosen - rejected) for chosen, rejected in pairs]
    margins = torch.stack(margins)
    loss = -torch.nn.functional.logsigmoid(margins).sum()
    loss.backward()
    assert margins.std() > 0.1 and sums["count"] == len(margins) == 15
    np.testing.assert_allclose(sums["loss"], loss.item(), rtol=1e-5)
    np.testing.assert_allclose(sums["margin"], margins.sum().item(), rtol=1e-4, atol=1e-4)
    assert int(sums["accuracy"]) == int((margins > 0).sum())
    theirs = dict(policy.named_parameters())
    for name, ours in to_tensors(load_family(bare).tensor_table(bare), found.policy, "float32"):
        wanted = theirs[name].grad.numpy()
        np.testing.assert_allclose(ours, wanted, atol=1e-4 * np.abs(wanted).max(), err_msg=name)
    assert all(not np.any(w) for w in jax.tree.leaves(found.reference))


def trained(cfg, steps, devices):
    """Metrics of some steps from fresh weights, each over the same pairs."""
    task = task_of(cfg)
    update = setup.make_update(cfg, task)
    axes = module.axes(load_family(task.model).Model, task.model)
    laid = setup.make_mesh(cfg, devices)
    with jax.set_mesh(laid):
        _, fresh = setup.make_state(cfg, task, update, laid)
        state, take, told = fresh(), jax.jit(step.make_train_step(task, update, axes)), []
        home = sharding.row_sharding(laid, (8, LENGTH))
        batch = jax.tree.map(lambda x: jax.device_put(x, home), packed(documents()))
        for _ in range(steps):
            state, metrics = take(state, batch)
            told.append({name: float(metrics[name]) for name in ("loss", "accuracy", "margin")})
    return told, state


@pytest.mark.thin(2)
@pytest.mark.parametrize("kind", [COPY, LORA])
def test_it_begins_at_the_logarithm_of_2_and_learns_to_prefer(load, kind):
    told, state = trained(load(*kind), 20, jax.devices()[:1])
    assert told[0]["margin"] == 0  # of each pair, so that its loss is the logarithm of 2 exactly
    assert abs(told[0]["loss"] - math.log(2)) < 2e-7  # a sum of 15, divided by 15
    assert told[-1]["loss"] < 0.35 and told[-1]["accuracy"] > 0.9 and told[-1]["margin"] > 0.7
    still = state.params.reference if kind == COPY else None
    if still is not None:
        fresh = module.init(load_family(load(*kind).model).Model, load(*kind).model, jax.random.key(0))
        for (name, w), (_, first) in zip(
            module.named_leaves(still), module.named_leaves(fresh.reference), strict=True
        ):
            np.testing.assert_allclose(w, first, atol=1e-7, err_msg=name)


def test_eight_devices_learn_what_one_does(load):
    one, _ = trained(load(*LORA, "mesh.data=1"), 4, jax.devices()[:1])
    many, _ = trained(load(*LORA, "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"), 4, jax.devices())
    for alone, shared in zip(one, many, strict=True):
        np.testing.assert_allclose(list(alone.values()), list(shared.values()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "overrides, said",
    [
        ([], 'objective.reference: found "base", the default, expected copy, .* or a lora section'),
        ([*LORA, *COPY], "objective.reference: found .copy., expected base with lora, whose frozen weights"),
        (["qat.bits=4", *COPY], "objective.reference: found .copy., expected base with qat"),
        (
            ["objective.reference=frozen", *LORA],
            "objective.reference: found .frozen., expected one of base, copy",
        ),
        (
            ["objective.use=causal", *COPY],
            "objective.reference: unknown key|it belongs to objective.use: dpo",
        ),
        ([*LORA, "loss.z_loss=1e-4"], "loss.z_loss: found 1e-4, expected plain cross entropy"),
        ([*LORA, "data.isolate_documents=false"], "data.isolate_documents: found false, expected true"),
        ([*LORA, "objective.beta=0"], "objective.beta: found 0, expected a number above 0"),
    ],
)
def test_what_cannot_be_is_told(load, overrides, said):
    with pytest.raises(UserError, match=said):
        load(*overrides)
