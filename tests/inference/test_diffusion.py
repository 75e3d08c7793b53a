"""Masked diffusion: the likelihood bound against a sum over all masks, logits without the mask token, and the
samplers on a model whose predictions are fixed."""

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
from headrace.inference import diffusion as diffusion_decoding
from headrace.inference import generate
from headrace.inference.diffusion import UnmaskSchedule, plan_unmask_steps, split_evenly
from headrace.inference.sampling import Sampling
from headrace.kernels.linear_cross_entropy.dispatch import fused_cross_entropy
from headrace.models import eurobert
from headrace.nn import sharding
from headrace.nn.module import axes, module
from headrace.objectives import TrainTask
from headrace.objectives._masking import mask_by_level, maskable
from headrace.training import run as training_run
from headrace.training.step import low_discrepancy, make_eval_step
from tests.objectives.test_masking import LENGTH, MAY, TEXT, VOCABULARY, short, small_model, task, texts
from tests.training.test_step import ENCODER

GREEDY = Sampling(temperature=0)
UNMASK_STEP = diffusion_decoding.unmask_step


def diffusion(**keys: Any) -> TrainTask:
    return task("diffusion", **keys)


def test_evaluation_masks_each_number_of_tokens_and_each_token_equally_often():
    may = maskable(VOCABULARY, texts())
    place = (jnp.arange(len(may)) + 0.5) / len(may)
    chosen, weights = (np.asarray(x) for x in mask_by_level(jax.random.key(0), may, place))
    assert not chosen[:, ~MAY].any()
    counts = chosen.sum(axis=1)
    np.testing.assert_allclose(np.bincount(counts)[1:], len(may) / MAY.sum(), atol=1)
    np.testing.assert_allclose(weights[:, 0], MAY.sum() / counts, rtol=1e-6)
    # Each token is masked equally often: in a little more than half of the draws, since none masks nothing.
    np.testing.assert_allclose(chosen[:, MAY].mean(axis=0), (MAY.sum() + 1) / 2 / MAY.sum(), atol=0.02)
    nothing, _ = mask_by_level(jax.random.key(0), jnp.zeros((3, LENGTH), bool), jnp.array([0.0, 0.5, 0.999]))
    assert not nothing.any()


def test_noise_levels_of_consecutive_rows_are_spread_evenly():
    places = np.asarray(low_discrepancy(jnp.arange(10**6, 10**6 + 100)))
    assert places.min() >= 0 and places.max() < 1
    gaps = np.diff(np.sort(np.concatenate([places, [places.min() + 1]])))
    assert gaps.max() < 2.7 / 100  # of random ones, the largest is about 5/100


def exact_bound(model: Any, *, exclude_mask: bool) -> float:
    """The bound summed over all masks of the three tokens: each number k of them is equally likely, and each
    choice of k."""
    subsets = [subset for k in (1, 2, 3) for subset in itertools.combinations((1, 2, 3), k)]
    masked = np.array([np.isin(np.arange(4), subset) for subset in subsets])
    probabilities = np.array([1 / 3 / math.comb(3, len(subset)) for subset in subsets])
    return probabilities @ ((token_nll(model, masked, exclude_mask) * masked).sum(1) / masked.sum(1))


def token_nll(model: Any, masked: np.ndarray, exclude_mask: bool) -> np.ndarray:
    """The negative log-likelihood of each token of the text under each mask, from all logits."""
    of, rows = diffusion(), short(len(masked))
    tokens = jnp.where(jnp.asarray(masked), VOCABULARY.mask, rows.tokens)
    extra = dict(segments=rows.segments, positions=rows.positions)
    states = jax.jit(lambda model: model(of.model, tokens, exec_opts=of.exec_opts, **extra))(model)
    logits = np.asarray(states, np.float64) @ np.asarray(model.unembed, np.float64).T
    if exclude_mask:
        assert VOCABULARY.mask == 39
        logits = logits[..., :39]
    return np.log(np.exp(logits).sum(-1)) - logits[:, np.arange(4), TEXT]


@pytest.mark.parametrize("exclude_mask", [False, True])
def test_the_estimated_bound_is_the_sum_over_all_masks(exclude_mask):
    of = diffusion(exclude_mask=exclude_mask)
    score = jax.jit(make_eval_step(of, axes(eurobert.Model, of.model), repeats=6))
    for scale in (0.0, 12.0):
        model, found = small_model(scale), []
        for number in range(16):
            sums = score(model, short(16), 16 * number)
            assert float(sums["count"]) == 6 * 16 * 3
            found.append(float(sums["nll"] / sums["count"]))
        exact = exact_bound(model, exclude_mask=exclude_mask)
        if not scale:  # a model with equal logits has the same loss under every mask
            assert exact == pytest.approx(math.log(39 if exclude_mask else 40))
            np.testing.assert_allclose(found, exact, rtol=1e-5)
            continue
        error = np.std(found, ddof=1) / math.sqrt(len(found))
        assert error < 0.02 * exact and abs(np.mean(found) - exact) < 4.5 * error


@pytest.mark.parametrize("way", ["tokens", "vocabulary"])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("sizes", [None, (2, 2, 2, 1)], ids=["one device", "eight"])
def test_an_excluded_token_has_no_probability_and_no_gradient(way, soft_cap, sizes):
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

    def fused(hidden: Any, unembed: Any) -> Any:
        options = dict(backend=way, chunk_size=16, soft_cap=soft_cap, excluded_token=7)
        return fused_cross_entropy(
            lambda stats: stats.lse - stats.target, hidden, unembed, targets, weights, **options
        ).loss

    targets = jnp.where(targets == 7, 8, targets)
    expected, expected_grads = jax.value_and_grad(plain, argnums=(0, 1))(hidden, unembed)
    with jax.set_mesh(
        sharding.make_mesh(
            dict(zip(sharding.AXES, sizes or (1, 1, 1, 1), strict=False)), jax.devices()[: 8 if sizes else 1]
        )
    ):
        loss, grads = jax.jit(jax.value_and_grad(fused, argnums=(0, 1)))(hidden, unembed)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(grad, expected_grad, atol=2e-5)
    assert not np.asarray(grads[1])[7].any()


def test_label_smoothing_with_an_excluded_token_and_repeats_without_masks_are_refused(tiny):
    both = ("objective.use=diffusion", *ENCODER[1:], "objective.exclude_mask=true")
    assert tiny(*both).objective.exclude_mask
    with pytest.raises(UserError, match=r"label_smoothing: found 0.1, expected 0"):
        tiny(*both, "loss.label_smoothing=0.1")
    with pytest.raises(UserError, match=r"eval.repeats: found 4, expected 1, since causal"):
        tiny("eval.repeats=4")


@module
class Oracle:
    """A model that predicts fixed logits at each position, whatever it reads."""

    unembed: jax.Array
    logits: jax.Array

    def __call__(self, cfg: Any, tokens: Any, **kwargs: Any) -> jax.Array:
        return jnp.pad(self.logits, ((0, tokens.shape[1] - len(self.logits)), (0, 0)))[None]


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_train.train_tokenizer(["the mill turns, the water falls"] * 3, kind="bpe", vocab=270)


@pytest.fixture
def oracle(tmp_path, tokenizer, monkeypatch):
    """A run whose model predicts these tokens, each with a confidence, and the rows after each step."""

    def make(predicted: list[int], confidence: list[float]) -> tuple[LoadedRun, list[np.ndarray]]:
        (tmp_path / "recipe.yaml").write_text(
            "run_dir: x\nmodel: {use: eurobert, layers: 1, embed: 32, heads: 2, kv_heads: 2, mlp: 32}\n"
            "data: {path: x, sequence_length: 8}\nobjective: {use: diffusion}\n"
            "optimizer: {learning_rate: 1e-3}\nschedule: {steps: 1}\ncompute: {dtype: float32}\n"
        )
        logits = (
            jnp.zeros((len(predicted), tokenizer.vocab_size))
            .at[jnp.arange(len(predicted)), jnp.array(predicted)]
            .set(jnp.array(confidence))
        )
        logits = logits.at[:, tokenizer.special.mask].set(50.0)  # the likeliest, but excluded
        model, rows = Oracle(jnp.eye(tokenizer.vocab_size), logits), []
        monkeypatch.setattr(diffusion_decoding, "cast_weights", lambda run, exec_opts: model)

        def unmask_step(*args: Any) -> jax.Array:
            row = UNMASK_STEP(*args)
            rows.append(np.asarray(row)[0].copy())  # the row itself is donated to the next step
            return row

        monkeypatch.setattr(diffusion_decoding, "unmask_step", unmask_step)
        devices = sharding.make_mesh(dict.fromkeys(sharding.AXES, 1), jax.devices()[:1])
        return LoadedRun(recipe.load(tmp_path / "recipe.yaml"), None, 0, devices, tokenizer, None), rows

    return make


PREDICTED = list(range(20, 30))
CONFIDENCE = [3.0, 9.0, 4.0, 8.0, 5.0, 1.0, 7.0, 2.0, 6.0, 10.0]


@pytest.mark.parametrize("order", ["confident", "random", "ancestral"])
@pytest.mark.parametrize(
    "options", [dict(), dict(steps=3), dict(block=4, steps=7), dict(block=3, steps=40)], ids=str
)
def test_predicted_tokens_are_unmasked_block_by_block_and_not_changed_again(
    oracle, tokenizer, order, options
):
    run, rows = oracle([20, 21, *PREDICTED], [9.0, 9.0, *CONFIDENCE])
    schedule = UnmaskSchedule(order=order, **options)
    assert list(diffusion_decoding.sample_tokens(run, [1, 30], 10, GREEDY, schedule)) == PREDICTED
    mask = tokenizer.special.mask
    for before, after in itertools.pairwise([np.array([1, 30, *[mask] * 10]), *(row[:12] for row in rows)]):
        np.testing.assert_array_equal(after[before != mask], before[before != mask])
        assert (after != before).any()  # every step unmasks a token
    assert rows[-1][12] == tokenizer.special.eos and len(rows) <= min(schedule.steps or 10, 10)
    block = schedule.block or 10
    for row in rows:  # a block starts when those before it are complete
        is_masked = row[2:12] == mask
        started = [first for first in range(0, 10, block) if not is_masked[first : first + block].all()]
        assert not is_masked[: max(started)].any()


def test_the_most_confident_are_unmasked_first_in_as_many_steps_as_scheduled(oracle, tokenizer):
    run, rows = oracle([20, *PREDICTED], [9.0, *CONFIDENCE])
    list(diffusion_decoding.sample_tokens(run, [1], 10, GREEDY, UnmaskSchedule(steps=4)))
    unmasked = [np.nonzero(row[1:11] != tokenizer.special.mask)[0] for row in rows]
    assert [len(positions) for positions in unmasked] == [3, 6, 8, 10]
    for positions in unmasked:
        assert set(positions) == set(np.argsort(CONFIDENCE)[::-1][: len(positions)])


def test_one_program_serves_all_steps_blocks_and_similar_lengths(oracle):
    run, _ = oracle([20, *PREDICTED], [9.0, *CONFIDENCE])
    before = UNMASK_STEP._cache_size()
    for tokens, ids in ((10, [1]), (9, [1, 30])):
        list(diffusion_decoding.sample_tokens(run, ids, tokens, GREEDY, UnmaskSchedule(block=4, steps=9)))
    assert UNMASK_STEP._cache_size() == before + 1


def test_random_and_ancestral_orders_unmask_each_token_in_any_step_equally_often():
    rng = np.random.default_rng(0)
    for steps in (1, 4, 16):
        for _ in range(200):
            counts = [step.count for step in plan_unmask_steps("random", 10, steps, rng)]
            assert counts == [count for count in split_evenly(10, steps) if count]
        for order in ("random", "ancestral"):
            step_of_token = np.zeros((2000, 10), int)
            for draw in range(2000):
                for number, step in enumerate(plan_unmask_steps(order, 10, steps, rng)):
                    assert step.candidates.sum() == step.count > 0
                    step_of_token[draw, step.candidates] = number
            np.testing.assert_allclose(step_of_token.mean(axis=0), step_of_token.mean(), atol=0.06 * steps)
    # Each of 8 tokens is unmasked in any of 4 steps: a step has none of them with probability (3/4)**8.
    lengths = [len(plan_unmask_steps("ancestral", 8, 4, rng)) for _ in range(4000)]
    assert np.mean(lengths) == pytest.approx(4 * (1 - (3 / 4) ** 8), abs=0.04)


def test_tokens_are_sampled_by_their_probabilities(oracle):
    run, _ = oracle([20] * 121, [4.0] * 121)
    sampled: list[int] = []
    for seed in range(8):
        schedule = UnmaskSchedule(steps=2, order="ancestral")
        sampling = Sampling(temperature=1.0, top_k=0, seed=seed)
        sampled += diffusion_decoding.sample_tokens(run, [1], 120, sampling, schedule)
    # Without pad, bos, eos and mask.
    probability = math.exp(4) / (math.exp(4) + run.tokenizer.vocab_size - 5)
    assert np.mean(np.array(sampled) == 20) == pytest.approx(
        probability, abs=5 * math.sqrt(probability * (1 - probability) / 960)
    )
    special = run.tokenizer.special
    assert not set(sampled) & {special.pad, special.bos, special.eos, special.mask}


def test_invalid_schedules_and_schedules_for_other_models_are_refused(oracle):
    run, _ = oracle([20, *PREDICTED], [9.0, *CONFIDENCE])
    with pytest.raises(UserError, match="steps: found 2, expected 3 or more, one per block"):
        generate.generate(run, "the", 10, GREEDY, unmask=UnmaskSchedule(block=4, steps=2))
    with pytest.raises(UserError, match="block: expected 1 or more"):
        UnmaskSchedule(block=-1)
    with pytest.raises(UserError, match="order: found any, expected one of confident, random, ancestral"):
        UnmaskSchedule(order="any")
    decoder = SimpleNamespace(use="llama", causal=True)
    cfg = SimpleNamespace(model=decoder, objective=SimpleNamespace(use="causal"))
    decoder_run = dataclasses.replace(run, recipe=cfg)
    for schedule, options in (
        (UnmaskSchedule(order="random"), "order"),
        (UnmaskSchedule(), "steps, block, order"),
    ):
        with pytest.raises(
            UserError, match=f"^{options}: expected nothing, since the run is no diffusion model"
        ):
            generate.generate(decoder_run, "the", 10, GREEDY, unmask=schedule)


@pytest.mark.slow
def test_the_commands_evaluate_the_bound_and_generate_with_the_averaged_weights(tiny, capsys):
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
    out = capsys.readouterr().out
    assert "likelihood bound " in out and " bits per byte" in out
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
    out = capsys.readouterr().out
    assert out.startswith("Text 1") and len(out) > 12
    assert main(command) == 0
    assert capsys.readouterr().out == out
