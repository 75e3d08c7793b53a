"""The models against transformers' on the same random weights, and what must hold of any weights."""

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from headrace import objectives
from headrace.checkpoint import open_hf, state
from headrace.config import reader, sections, source_model
from headrace.model_formats.hf_tensors import to_tensors
from headrace.model_wrappers import load_family
from headrace.nn import module
from headrace.nn.linear import project
from headrace.nn.mlp import glu
from headrace.nn.norm import rms_norm
from headrace.nn.remat import REMAT_POLICIES
from headrace.nn.stack import Execution
from headrace.objectives import Batch, SpecialTokens, TrainTask
from headrace.optim import adamw
from headrace.schedules import Curves
from headrace.training import loss_spikes, step

VOCAB = 96
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=112,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
# A base and lengths at which 40 positions and 8 pairs meet all sides of every kind of scaling.
ROPE = {"rope_theta": 100.0, "factor": 4.0}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}

# Name -> (class, settings beyond SIZES). Every part of the models is in one of them at least.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "tied llama3 geglu": (
        "Llama",
        {
            "rope_parameters": ROPE | LLAMA3 | {"rope_type": "llama3"},
            "hidden_act": "gelu_pytorch_tanh",
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
    ),
    "linear relu2": (
        "Llama",
        {
            "rope_parameters": ROPE | {"rope_type": "linear"},
            "hidden_act": "relu2",
            "num_key_value_heads": 4,
        },
    ),
    "tied yarn qwen3": (
        "Qwen3",
        {
            "rope_parameters": ROPE | {"rope_type": "yarn", "original_max_position_embeddings": 16},
            "head_dim": 32,
            "tie_word_embeddings": True,
        },
    ),
    "eurobert": ("EuroBert", {"mask_token_id": 3}),
}
QWEN3 = "tied yarn qwen3"


def hugging_face(name: str, seed: int = 0) -> Any:
    """One of transformers' models with weights large enough for logits of several units."""
    kind, settings = FAMILIES[name]
    head = "ForMaskedLM" if kind == "EuroBert" else "ForCausalLM"
    cfg = getattr(transformers, f"{kind}Config")(**SIZES | settings)
    model = getattr(transformers, kind + head)(cfg).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, 0.12) if weight.ndim > 1 else weight.normal_(1.0, 0.2)
    return model


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """The same weights there and here."""

    theirs: Any
    cfg: Any
    params: Any
    family: Any


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    @functools.cache
    def make(name: str) -> Pair:
        theirs, folder = hugging_face(name), tmp_path_factory.mktemp(name)
        theirs.save_pretrained(folder)
        settings = source_model.read_hf_config(folder)
        family = open_hf.find_family(settings)
        section = family.hf_naming.from_config(settings)
        cfg = reader.part_class("models", section.pop("use"))(**section)
        params = open_hf.read_params(family.tensor_table(cfg), module.shapes(family.Model, cfg), folder)
        return Pair(theirs, cfg, jax.tree.map(jnp.asarray, params), family)

    return make


def execution(**settings: Any) -> Execution:
    return Execution(reader.part_class("attention", "auto")(), **{"compute_dtype": "float32"} | settings)


def task(cfg: Any, exec_opts: Execution) -> TrainTask:
    return TrainTask(
        model=cfg,
        objective=reader.part_class("objectives", "causal" if cfg.causal else "masked")(),
        loss=reader.part_class("losses", "cross_entropy", sections.LossKeys)(chunk_size=32),
        exec_opts=exec_opts,
        special_tokens=SpecialTokens(VOCAB, pad=0, bos=1, eos=2, mask=3),
        family=load_family(cfg),
    )


def text(rows: int, length: int, seed: int = 0) -> Batch:
    """Random tokens, a document a row."""
    tokens = np.random.default_rng(seed).integers(4, VOCAB, (rows, length))
    positions = np.broadcast_to(np.arange(length), tokens.shape)
    return Batch(jnp.asarray(tokens), jnp.ones_like(tokens), jnp.asarray(positions))


TEXT = text(2, 24)


@functools.cache
def hidden(pair: Pair, compute: str = "float32") -> Callable[[Batch], jax.Array]:
    def run(params: Any, batch: Batch) -> jax.Array:
        seen = dict(segments=batch.segments, positions=batch.positions)
        return params(pair.cfg, batch.tokens, exec_opts=execution(compute_dtype=compute), **seen)

    return functools.partial(jax.jit(run), pair.params)


@functools.cache
def trained(pair: Pair, **how: Any) -> tuple[Any, jax.Array, Any]:
    """The examples made of `TEXT`, the mean loss and its gradients as the training step takes them."""
    job, axes = task(pair.cfg, execution(**how)), module.axes(pair.family.Model, pair.cfg)
    prepare = objectives.load_objective(job.objective).prepare

    @jax.jit
    def run(params: Any, batch: Batch) -> tuple[Any, jax.Array, Any]:
        examples = prepare(job, batch, jax.random.key(0))
        grads, sums = step.accumulate_gradients(job, axes, params, step.to_microbatches(examples, 1))
        return examples, sums["loss"] / sums["count"], jax.tree.map(lambda g: g / sums["count"], grads)

    return run(pair.params, TEXT)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name, pair):
    both, batch = pair(name), text(2, 40)
    with torch.no_grad():
        wanted = both.theirs(torch.tensor(np.asarray(batch.tokens))).logits.numpy()
    assert np.abs(wanted).max() > 3  # small logits would agree whatever the model
    ours = project(both.params.unembed, hidden(both)(batch), "bsd,vd->bsv")
    assert np.abs(ours - wanted).max() <= 2e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_of_the_training_path_are_those_of_transformers(name, pair):
    both = pair(name)
    examples, loss, grads = trained(both)
    if both.cfg.causal:
        labels = np.asarray(TEXT.tokens)  # transformers moves them by one itself
    else:
        labels = np.where(examples.weights > 0, examples.targets, -100)
        assert 10 < examples.weights.sum() < 38
    both.theirs.zero_grad()
    inputs = torch.tensor(np.asarray(examples.inputs))
    answer = both.theirs(inputs, labels=torch.tensor(labels, dtype=torch.long))
    answer.loss.backward()
    assert abs(float(loss) - answer.loss.item()) <= 1e-5

    ours = dict(to_tensors(both.family.tensor_table(both.cfg), grads, "float32"))
    theirs = {path: weight.grad.numpy() for path, weight in both.theirs.named_parameters()}
    assert ours.keys() == theirs.keys()
    for path, wanted in theirs.items():
        apart = np.linalg.norm(ours[path] - wanted) / np.linalg.norm(wanted)
        assert apart <= 1e-3, (path, apart)


@pytest.mark.parametrize("name", ["llama", QWEN3])
def test_a_decoder_does_not_see_the_future(name, pair):
    changed = dataclasses.replace(TEXT, tokens=TEXT.tokens.at[:, 15].set(5).at[:, 20:].set(9))
    before, after = hidden(pair(name))(TEXT), hidden(pair(name))(changed)
    assert (before[:, :15] == after[:, :15]).all()
    assert (jnp.abs(before[:, 15:] - after[:, 15:]).max(axis=-1) > 1e-3).all()


def test_an_encoder_sees_both_sides(pair):
    changed = dataclasses.replace(TEXT, tokens=TEXT.tokens.at[:, 12].set(5))
    run = hidden(pair("eurobert"))
    assert (jnp.abs(run(TEXT) - run(changed)).max(axis=-1) > 1e-4).all()


@pytest.mark.parametrize("name", ["llama", "eurobert"])
def test_packed_documents_are_as_if_alone(name, pair):
    run, tokens = hidden(pair(name)), TEXT.tokens
    documents = np.repeat([1, 2, 0], [10, 10, 4])  # the last of them padding
    places = np.concatenate([np.arange(10), np.arange(10), np.arange(4)])
    segments, positions = (jnp.broadcast_to(x, tokens.shape) for x in (documents, places))
    packed = run(Batch(tokens, segments, positions))

    for document in (slice(0, 10), slice(10, 20)):
        one = tokens[:, document]
        alone = run(Batch(one, jnp.ones_like(one), jnp.broadcast_to(jnp.arange(10), one.shape)))
        assert jnp.abs(packed[:, document] - alone).max() < 1e-5

    changed = run(Batch(tokens.at[:, :10].set(7), segments, positions))
    assert (packed[:, 10:] == changed[:, 10:]).all()


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    "how",
    [{"remat": name} for name in REMAT_POLICIES] + [{"unroll": 2}, {"unroll": 2, "remat": "attention"}],
    ids=str,
)
def test_what_is_kept_or_unrolled_changes_nothing(how, pair):
    _, loss, grads = trained(pair("llama"))
    _, same, others = trained(pair("llama"), **how)
    assert abs(float(loss) - float(same)) <= 1e-6
    for (path, wanted), other in zip(module.named_leaves(grads), jax.tree.leaves(others), strict=True):
        assert jnp.linalg.norm(other - wanted) <= 1e-5 * jnp.linalg.norm(wanted), path


@pytest.mark.parametrize("name", [QWEN3, "eurobert"])
def test_bfloat16_is_close_to_float32(name, pair):
    exact, rounded = hidden(pair(name))(TEXT), hidden(pair(name), "bfloat16")(TEXT)
    assert rounded.dtype == jnp.bfloat16
    apart = jnp.linalg.norm(rounded.astype(jnp.float32) - exact) / jnp.linalg.norm(exact)
    assert 1e-4 < apart < 0.03


@pytest.mark.parametrize("kind", ["swiglu", "geglu", "geglu_erf", "reglu", "relu2"])
def test_the_backward_pass_keeps_no_more_than_the_inputs(kind):
    x, weight = jnp.ones((2, 3, 64), jnp.bfloat16), jnp.ones(64)

    def kept(function: Callable[..., jax.Array], *inputs: jax.Array) -> int:
        pull = jax.vjp(lambda *inputs: function(*(x * 2 for x in inputs)), *inputs)[1]
        return sum(leaf.nbytes for leaf in jax.tree.leaves(pull) if leaf.ndim)

    assert kept(lambda gate, up: glu(kind, gate, up), x, x) == 2 * x.nbytes
    assert kept(lambda x, w: rms_norm(x, w, 1e-5), x, weight) == x.nbytes + weight.nbytes


def test_flops_count_every_product_once():
    llama = open_hf.find_family({"model_type": "llama"})
    cfg = llama.Config(layers=2, embed=64, heads=4, kv_heads=2, mlp=112, vocab=96, tie_embeddings=False)
    matrices = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 112) + 64 * 96
    norms = 5 * 64
    scores = 2 * 2 * 64 * 40 / 2  # two products of width 64 with half of 40 positions, in two layers
    assert llama.flops_per_token(cfg, 40) == 6 * (matrices + norms) + 6 * scores
    tied = dataclasses.replace(cfg, tie_embeddings=True)
    assert llama.flops_per_token(tied, 40) == llama.flops_per_token(
        cfg, 40
    )  # the head multiplies, tied or not


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"kv_heads": 3}, "kv_heads"),
        ({"embed": 66}, "heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"layers": 0}, "layers"),
        ({"vocab": -1}, "vocab"),
        ({"rope_factor": 8.0}, "rope_factor"),
        ({"rope_scaling": "yarn"}, "rope_factor"),
    ],
)
def test_sizes_that_cannot_be_are_refused(settings, key):
    llama = reader.part_class("models", "llama")
    with pytest.raises(ValueError, match=f"^{key}: expected"):
        llama(**dict(layers=2, embed=64, heads=4, kv_heads=2, mlp=112) | settings)


def test_whole_updates_follow_torch(pair):
    """Five steps of clipped AdamW with decay: ours against transformers' model and torch's optimizer."""
    ours = pair("llama")
    theirs = copy.deepcopy(ours.theirs).train()
    matrices = [weight for weight in theirs.parameters() if weight.ndim > 1]
    norms = [weight for weight in theirs.parameters() if weight.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)

    cfg = reader.part_class("optim", "adamw", sections.OptimizerKeys)(
        learning_rate=1e-3, weight_decay=0.1, max_grad_norm=1.0
    )
    axes = module.axes(ours.family.Model, ours.cfg)
    tx = adamw.make(cfg, axes)
    flat = Curves(learning_rate=lambda step: 1.0, weight_decay=lambda step: 1.0)
    update = jax.jit(
        step.make_train_step(task(ours.cfg, execution()), step.OptimizerStep(cfg, tx, flat), axes)
    )
    current = state.init_state(ours.params, tx, seed=0, ema=False, history=loss_spikes.empty_history(2))
    for number in range(5):
        batch = text(2, 24, seed=number)
        tokens = torch.tensor(np.asarray(batch.tokens), dtype=torch.long)
        loss = theirs(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        current, metrics = update(current, batch)
        assert float(metrics["loss"]) == pytest.approx(loss.item(), abs=1e-4)
        assert float(metrics["grad_norm"]) == pytest.approx(norm.item(), rel=1e-3)
    assert float(norm) > 1.0  # so that clipping had something to do
