"""Masked diffusion beyond its loss: the likelihood bound against one summed over all that can be hidden, the
mask token ruled out, and the samplers on a model whose answers are known."""

import dataclasses
import itertools
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.checkpoint.open_run import LoadedRun, open_run
from headrace.cli.main import main
from headrace.config import recipe
from headrace.data.tokenizer import train as tokenizer_train
from headrace.errors import UserError
from headrace.inference import diffusion as inference_diffusion
from headrace.inference import generate
from headrace.inference.diffusion import UnmaskSchedule, even_split, unmask_plan
from headrace.inference.sampling import Sampling
from headrace.kernels.linear_cross_entropy.dispatch import fused_cross_entropy
from headrace.models import eurobert
from headrace.nn import sharding
from headrace.nn.module import axes, module
from headrace.objectives import TrainTask
from headrace.objectives._masking import mask_by_level, maskable
from headrace.training import run as training_run
from headrace.training.step import eval_step, low_discrepancy
from tests.objectives.test_masking import LENGTH, MAY, TEXT, VOCABULARY, short, small_model, task, texts
from tests.training.test_step import ENCODER

GREEDY = Sampling(temperature=0)
STEP = inference_diffusion.step


def diffusion(**keys: Any) -> TrainTask:
    return task("diffusion", **keys)


def test_evaluation_hides_every_number_of_tokens_alike_and_any_of_them():
    may = maskable(VOCABULARY, texts())
    place = (jnp.arange(len(may)) + 0.5) / len(may)
    chosen, weights = (np.asarray(x) for x in mask_by_level(jax.random.key(0), may, place))
    assert not chosen[:, ~MAY].any()
    counts = chosen.sum(axis=1)
    np.testing.assert_allclose(np.bincount(counts)[1:], len(may) / MAY.sum(), atol=1)
    np.testing.assert_allclose(weights[:, 0], MAY.sum() / counts, rtol=1e-6)
    # Each token is hidden equally often: in half of the draws, and a little more, as none hides nothing.
    np.testing.assert_allclose(chosen[:, MAY].mean(axis=0), (MAY.sum() + 1) / 2 / MAY.sum(), atol=0.02)
    nothing, _ = mask_by_level(jax.random.key(0), jnp.zeros((3, LENGTH), bool), jnp.array([0.0, 0.5, 0.999]))
    assert not nothing.any()


def test_places_of_rows_in_a_row_lie_evenly():
    places = np.asarray(low_discrepancy(jnp.arange(10**6, 10**6 + 100)))
    assert places.min() >= 0 and places.max() < 1
    gaps = np.diff(np.sort(np.concatenate([places, [places.min() + 1]])))
    assert gaps.max() < 2.7 / 100  # of drawn ones, the largest is about 5/100


def exact_bound(model: Any, *, exclude_mask: bool) -> float:
    """Over all that can be hidden of the three tokens: k of them, k alike, and any k of them."""
    places = [one for k in (1, 2, 3) for one in itertools.combinations((1, 2, 3), k)]
    hidden = np.array([np.isin(np.arange(4), one) for one in places])
    chances = np.array([1 / 3 / math.comb(3, len(one)) for one in places])
    return chances @ ((told(model, hidden, exclude_mask) * hidden).sum(1) / hidden.sum(1))


def told(model: Any, hidden: np.ndarray, exclude_mask: bool) -> np.ndarray:
    """The negative log likelihood of each token of the text where these are hidden, from all logits."""
    of, rows = diffusion(), short(len(hidden))
    tokens = jnp.where(jnp.asarray(hidden), VOCABULARY.mask, rows.tokens)
    seen = dict(segments=rows.segments, positions=rows.positions)
    states = jax.jit(lambda model: model(of.model, tokens, exec_opts=of.exec_opts, **seen))(model)
    logits = np.asarray(states, np.float64) @ np.asarray(model.unembed, np.float64).T
    if exclude_mask:
        assert VOCABULARY.mask == 39
        logits = logits[..., :39]
    return np.log(np.exp(logits).sum(-1)) - logits[:, np.arange(4), TEXT]


@pytest.mark.parametrize("exclude_mask", [False, True])
def test_the_bound_is_that_summed_over_all_that_can_be_hidden(exclude_mask):
    of = diffusion(exclude_mask=exclude_mask)
    score = jax.jit(eval_step(of, axes(eurobert.Model, of.model), repeats=6))
    for scale in (0.0, 12.0):
        model, found = small_model(scale), []
        for number in range(16):
            sums = score(model, short(16), 16 * number)
            assert float(sums["count"]) == 6 * 16 * 3
            found.append(float(sums["nll"] / sums["count"]))
        exact = exact_bound(model, exclude_mask=exclude_mask)
        if not scale:  # whatever is hidden, a model that knows nothing needs the same
            assert exact == pytest.approx(math.log(39 if exclude_mask else 40))
            np.testing.assert_allclose(found, exact, rtol=1e-5)
            continue
        error = np.std(found, ddof=1) / math.sqrt(len(found))
        assert error < 0.02 * exact and abs(np.mean(found) - exact) < 4.5 * error


@pytest.mark.parametrize("way", ["tokens", "vocabulary"])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("sizes", [None, (2, 2, 2, 1)], ids=["one device", "eight"])
def test_a_token_that_is_ruled_out_has_no_probability_and_no_gradient(way, soft_cap, sizes):
    rng = np.random.default_rng(1)
    hidden, unembed = (jnp.asarray(rng.normal(size=n), jnp.float32) for n in ((4, 8, 16), (40, 16)))
    targets = jnp.asarray(rng.integers(0, 39, (4, 8)), jnp.int32)
    weights = jnp.asarray(rng.uniform(0.5, 2, (4, 8)), jnp.float32)

    def plain(hidden: Any, unembed: Any) -> Any:
        logits = hidden @ unembed.T
        logits = logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
        logs = jax.nn.log_softmax(jnp.delete(logits, 7, axis=-1))
        places = targets - (targets > 7)
        return -(weights * jnp.take_along_axis(logs, places[..., None], -1)[..., 0]).sum()

    def ours(hidden: Any, unembed: Any) -> Any:
        how = dict(split=way, chunk=16, soft_cap=soft_cap, without=7)
        return fused_cross_entropy(
            lambda stats: stats.lse - stats.target, hidden, unembed, targets, weights, **how
        ).loss

    targets = jnp.where(targets == 7, 8, targets)
    wanted, d_wanted = jax.value_and_grad(plain, argnums=(0, 1))(hidden, unembed)
    with jax.set_mesh(
        sharding.make_mesh(
            dict(zip(sharding.AXES, sizes or (1, 1, 1, 1), strict=False)), jax.devices()[: 8 if sizes else 1]
        )
    ):
        found, d_found = jax.jit(jax.value_and_grad(ours, argnums=(0, 1)))(hidden, unembed)
    assert float(found) == pytest.approx(float(wanted), rel=1e-5)
    for one, other in zip(d_found, d_wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    assert not np.asarray(d_found[1])[7].any()


def test_label_smoothing_is_refused_where_a_token_is_ruled_out_and_draws_where_nothing_is_hidden(tiny):
    both = ("objective.use=diffusion", *ENCODER[1:], "objective.exclude_mask=true")
    assert tiny(*both).objective.exclude_mask
    with pytest.raises(UserError, match=r"label_smoothing: found 0.1, expected 0"):
        tiny(*both, "loss.label_smoothing=0.1")
    with pytest.raises(UserError, match=r"eval.repeats: found 4, expected 1, since causal"):
        tiny("eval.repeats=4")


@module
class Oracle:
    """Says the same whatever it reads: at each position these logits."""

    unembed: jax.Array
    logits: jax.Array

    def __call__(self, cfg: Any, tokens: Any, **how: Any) -> jax.Array:
        return jnp.pad(self.logits, ((0, tokens.shape[1] - len(self.logits)), (0, 0)))[None]


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_train.train_tokenizer(["the mill turns, the water falls"] * 3, kind="bpe", vocab=270)


@pytest.fixture
def oracle(tmp_path, tokenizer, monkeypatch):
    """A run whose model wants these tokens at these places, the surer the greater the number; and the rows
    after each step."""

    def make(wanted: list[int], sure: list[float]) -> tuple[LoadedRun, list[np.ndarray]]:
        (tmp_path / "recipe.yaml").write_text(
            "run_dir: x\nmodel: {use: eurobert, layers: 1, embed: 32, heads: 2, kv_heads: 2, mlp: 32}\n"
            "data: {path: x, sequence_length: 8}\nobjective: {use: diffusion}\n"
            "optimizer: {learning_rate: 1e-3}\nschedule: {steps: 1}\ncompute: {dtype: float32}\n"
        )
        logits = (
            jnp.zeros((len(wanted), tokenizer.vocab_size))
            .at[jnp.arange(len(wanted)), jnp.array(wanted)]
            .set(jnp.array(sure))
        )
        logits = logits.at[:, tokenizer.special.mask].set(50.0)  # likeliest of all, and never to be said
        model, rows = Oracle(jnp.eye(tokenizer.vocab_size), logits), []
        monkeypatch.setattr(inference_diffusion, "cast", lambda params, names, how: model)

        def step(*args: Any) -> jax.Array:
            row = STEP(*args)
            rows.append(np.asarray(row)[0].copy())  # the row itself is donated to the next step
            return row

        monkeypatch.setattr(inference_diffusion, "step", step)
        devices = sharding.make_mesh(dict.fromkeys(sharding.AXES, 1), jax.devices()[:1])
        return LoadedRun(recipe.load(tmp_path / "recipe.yaml"), None, 0, devices, tokenizer, None), rows

    return make


WANTED = list(range(20, 30))
SURE = [3.0, 9.0, 4.0, 8.0, 5.0, 1.0, 7.0, 2.0, 6.0, 10.0]


@pytest.mark.parametrize("order", ["confident", "random", "ancestral"])
@pytest.mark.parametrize(
    "reveal", [dict(), dict(steps=3), dict(block=4, steps=7), dict(block=3, steps=40)], ids=str
)
def test_a_model_that_knows_the_answer_says_it(oracle, tokenizer, order, reveal):
    run, rows = oracle([20, 21, *WANTED], [9.0, 9.0, *SURE])
    found = list(inference_diffusion.sample(run, [1, 30], 10, GREEDY, UnmaskSchedule(order=order, **reveal)))
    assert found == WANTED
    mask = tokenizer.special.mask
    for before, after in itertools.pairwise([np.array([1, 30, *[mask] * 10]), *(row[:12] for row in rows)]):
        np.testing.assert_array_equal(after[before != mask], before[before != mask])  # told once for all
        assert (after != before).any()  # no step for nothing
    assert rows[-1][12] == tokenizer.special.eos and len(rows) <= min(reveal.get("steps", 10), 10)
    block = reveal.get("block", 10)
    for row in rows:  # a block is begun when those before it are done
        hidden = row[2:12] == mask
        begun = [first for first in range(0, 10, block) if not hidden[first : first + block].all()]
        assert not hidden[: max(begun)].any()


def test_the_surest_are_told_first_as_many_as_the_steps_ask_for(oracle, tokenizer):
    run, rows = oracle([20, *WANTED], [9.0, *SURE])
    list(inference_diffusion.sample(run, [1], 10, GREEDY, UnmaskSchedule(steps=4)))
    told = [np.nonzero(row[1:11] != tokenizer.special.mask)[0] for row in rows]
    assert [len(places) for places in told] == [3, 6, 8, 10]
    for places in told:
        assert set(places) == set(np.argsort(SURE)[::-1][: len(places)])


def test_one_program_serves_all_steps_blocks_and_lengths_alike(oracle):
    run, _ = oracle([20, *WANTED], [9.0, *SURE])
    before = STEP._cache_size()
    for tokens, ids in ((10, [1]), (9, [1, 30])):
        list(inference_diffusion.sample(run, ids, tokens, GREEDY, UnmaskSchedule(block=4, steps=9)))
    assert STEP._cache_size() == before + 1


def test_random_and_ancestral_turns_hang_on_no_answer_and_come_alike():
    rng = np.random.default_rng(0)
    for steps in (1, 4, 16):
        drawn = [unmask_plan("random", 10, steps, rng) for _ in range(200)]
        assert all([count for _, count in one] == [n for n in even_split(10, steps) if n] for one in drawn)
        for order in ("random", "ancestral"):
            when = np.zeros((2000, 10), int)
            for number in range(2000):
                for turn, (among, count) in enumerate(unmask_plan(order, 10, steps, rng)):
                    assert among.sum() == count > 0
                    when[number, among] = turn
            np.testing.assert_allclose(when.mean(axis=0), when.mean(), atol=0.06 * steps)
    # Of 8 tokens in 4 steps, each is told in any step alike: a step tells none of them by (3/4)**8.
    taken = [len(unmask_plan("ancestral", 8, 4, rng)) for _ in range(4000)]
    assert np.mean(taken) == pytest.approx(4 * (1 - (3 / 4) ** 8), abs=0.04)


def test_tokens_are_drawn_by_their_chances(oracle):
    run, _ = oracle([20] * 121, [4.0] * 121)
    drawn: list[int] = []
    for seed in range(8):
        how = Sampling(temperature=1.0, top_k=0, seed=seed)
        drawn += inference_diffusion.sample(run, [1], 120, how, UnmaskSchedule(steps=2, order="ancestral"))
    likely = math.exp(4) / (math.exp(4) + run.tokenizer.vocab_size - 5)  # pad, bos, eos and mask cannot come
    assert np.mean(np.array(drawn) == 20) == pytest.approx(
        likely, abs=5 * math.sqrt(likely * (1 - likely) / 960)
    )
    special = run.tokenizer.special
    assert not set(drawn) & {special.pad, special.bos, special.eos, special.mask}


def test_what_a_diffusion_model_cannot_do_is_refused_in_words(oracle):
    run, _ = oracle([20, *WANTED], [9.0, *SURE])
    with pytest.raises(UserError, match="--steps: found 2, expected 3 or more, one for each block"):
        generate.generate(run, "the", 10, GREEDY, dict(block=4, steps=2))
    with pytest.raises(UserError, match="--block: expected 1 or more"):
        generate.generate(run, "the", 10, GREEDY, dict(block=-1))
    decoder = SimpleNamespace(use="llama", causal=True)
    cfg = SimpleNamespace(model=decoder, objective=SimpleNamespace(use="causal"))
    with pytest.raises(UserError, match="--order: expected nothing, since the run is no diffusion model"):
        generate.generate(dataclasses.replace(run, recipe=cfg), "the", 10, GREEDY, dict(order="random"))


@pytest.mark.slow
def test_a_run_is_evaluated_by_its_bound_and_continues_a_text_with_its_averaged_weights(tiny, capsys):
    cfg = tiny(
        "objective.use=diffusion",
        *ENCODER[1:],
        "optimizer.ema_decay=0.5",
        "schedule.steps=4",
        "eval.batches=1",
    )
    assert training_run.run(cfg) == 0
    capsys.readouterr()
    assert main(["eval", cfg.run_dir, "eval.repeats=3"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("likelihood bound ") and " bits a byte" in said
    average = open_run(recipe.load_run(cfg.run_dir), item="ema").params
    jax.tree.map(np.testing.assert_array_equal, open_run(recipe.load_run(cfg.run_dir)).params, average)
    command = [
        "generate",
        cfg.run_dir,
        "--prompt",
        "Text 1",
        "--tokens",
        "12",
        "--block",
        "8",
        "--steps",
        "4",
    ]
    assert main(command) == 0
    once = capsys.readouterr().out
    assert once.startswith("Text 1") and len(once) > 12
    assert main(command) == 0
    assert capsys.readouterr().out == once
