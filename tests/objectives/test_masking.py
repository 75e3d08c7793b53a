"""What objectives hide: as much as they should, where they may, the same on any mesh and in any split of the
batch, another at each step, and never on disk."""

import dataclasses
import functools
import hashlib
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.checkpoint.state import State
from headrace.config import reader, sections
from headrace.errors import UserError
from headrace.kernels.linear_cross_entropy.dispatch import fused_cross_entropy
from headrace.model_wrappers import load_family
from headrace.nn import sharding
from headrace.nn.module import init
from headrace.nn.sharding import row_sharding
from headrace.nn.stack import Execution
from headrace.objectives import Batch, Examples, SpecialTokens, TrainTask, load_objective
from headrace.objectives._masking import (
    corrupt_tokens,
    maskable,
    max_selected,
    sample_diffusion_mask,
    sample_positions,
    sample_spans,
)
from headrace.training.step import make_eval_step
from tests.training.test_step import ENCODER, Bench, assert_close

VOCABULARY = SpecialTokens(size=40, pad=0, bos=7, eos=8, mask=39)
SPANS = (
    "objective.max_span=3",
    "objective.mask_rate=0.3",
    "objective.mask_token_share=0.8",
    "objective.random_token_share=0.1",
)
KINDS = {
    "masked": ENCODER,
    "spans": (*ENCODER, *SPANS),
    "replaced": (*ENCODER, "objective.mask_token_share=0.0", "objective.random_token_share=1.0"),
    "diffusion": ("objective.use=diffusion", *ENCODER[1:]),
}
BERT = dict(max_span=3, mask_token_share=0.8, random_token_share=0.1)
ROWS, LENGTH = 20_000, 24


def texts(rows: int = ROWS) -> Batch:
    """Equal rows of 24: documents of 9 and 11 tokens, each begun by bos and ended by eos, and padding. In the
    second, the token at 14 is not to be learnt."""
    row = np.random.default_rng(0).integers(9, 39, LENGTH)
    row[[0, 9]], row[[8, 19]], row[20:] = VOCABULARY.bos, VOCABULARY.eos, VOCABULARY.pad
    segments = np.repeat([1, 2, 0], [9, 11, 4])
    learnt = np.arange(LENGTH) != 14
    arrays = [np.tile(one, (rows, 1)) for one in (row, segments, np.arange(LENGTH), learnt)]
    return Batch(*(jnp.asarray(one, jnp.int32) for one in arrays[:3]), loss_mask=jnp.asarray(arrays[3]))


RUNS = [range(1, 8), range(10, 14), range(15, 19)]  # of tokens that may be chosen, in each row of `texts`
MAY = np.isin(np.arange(LENGTH), [place for run in RUNS for place in run])


def assert_share(found: np.ndarray, share: float, sigmas: float = 5.0) -> None:
    """Of independent draws along the first axis."""
    bound = sigmas * math.sqrt(share * (1 - share) / len(found)) + 1e-6
    np.testing.assert_allclose(found.mean(axis=0), share, atol=bound, rtol=0)


def spans(key: int, rate: float, longest: int, batch: Batch | None = None) -> np.ndarray:
    batch = batch or texts()
    may = maskable(VOCABULARY, batch)
    args = dict(segments=batch.segments, rate=rate, max_span=longest)
    return np.asarray(sample_spans(jax.random.key(key), may, **args))


def test_every_token_that_may_be_chosen_is_chosen_at_the_rate_and_no_other():
    batch = texts()
    may = maskable(VOCABULARY, batch)
    np.testing.assert_array_equal(may, np.tile(MAY, (ROWS, 1)))
    chosen = np.asarray(sample_positions(jax.random.key(0), may, rate=0.3))
    assert_share(chosen[:, MAY], 0.3)
    assert not chosen[:, ~MAY].any()


@pytest.mark.parametrize("rate, longest", [(0.15, 3), (0.5, 3), (0.3, 10), (0.9, 2), (1.0, 4)])
def test_spans_choose_every_token_at_the_rate_wherever_it_stands_in_its_document(rate, longest):
    chosen = spans(1, rate, longest)
    assert_share(chosen[:, MAY], rate)
    assert not chosen[:, ~MAY].any()


def test_spans_stay_within_a_document_and_between_tokens_that_may_be_chosen():
    """What one stretch draws says nothing of another; within one, neighbours go together."""
    batch = texts()
    marks = (batch.tokens == VOCABULARY.bos) | (batch.tokens == VOCABULARY.eos)
    batch = dataclasses.replace(batch, tokens=jnp.where(marks, 20, batch.tokens))  # nothing between documents
    chosen = spans(2, 0.3, 3, batch).astype(float)

    def together(one: int, other: int) -> float:
        return float(np.corrcoef(chosen[:, one], chosen[:, other])[0, 1])

    for one, other in [(8, 9), (13, 15)]:  # two documents; across 14, which is not to be learnt
        assert abs(together(one, other)) < 5 / math.sqrt(ROWS)
    for one, other in [(0, 1), (4, 5), (7, 8), (9, 10), (15, 16), (18, 19)]:
        assert together(one, other) > 0.3
    assert not chosen[:, 14].any() and not chosen[:, 20:].any()


def stretches(chosen: np.ndarray) -> np.ndarray:
    """The lengths of all unbroken stretches within rows; those at the ends of a row are left out."""
    padded = np.pad(chosen.astype(int), ((0, 0), (1, 1)))
    change = np.diff(padded, axis=1)
    _rows, begins = np.nonzero(change == 1)
    ends = np.nonzero(change == -1)[1]
    inner = (begins > 0) & (ends < chosen.shape[1])
    return (ends - begins)[inner]


def long_texts(rows: int, length: int) -> Batch:
    tokens = jnp.full((rows, length), 20, jnp.int32)
    return Batch(tokens, jnp.ones_like(tokens), tokens)


def test_lengths_of_rare_spans_go_as_one_over_n():
    lengths = stretches(spans(3, 0.01, 4, long_texts(1000, 2000)))
    share = np.bincount(lengths, minlength=5)[1:5] / len(lengths)
    expected = np.array([1, 1 / 2, 1 / 3, 1 / 4]) / (25 / 12)
    np.testing.assert_allclose(share, expected, atol=0.012)  # one in a hundred touches another


def test_lengths_of_dense_spans_are_those_of_spans_that_overlap_by_chance():
    """The reference walks along a text: at each token a span may begin, and a stretch ends with its spans."""
    rate, longest = 0.4, 3
    shares = np.array([6, 3, 2]) / 11
    grid = np.linspace(0, rate, 1_000_001)
    tails = [shares[n:].sum() for n in range(longest)]
    begins = grid[np.abs(1 - np.prod([1 - grid * tail for tail in tails], axis=0) - rate).argmin()]
    fresh = np.concatenate(
        [[1 - begins], begins * shares]
    )  # of the length that begins at a token, 0 for none
    left = np.concatenate([[0], shares])  # of what is left of the stretch, given that it has begun
    expected = []
    for _ in range(12):
        after = np.zeros(longest + 1)
        for old in range(1, longest + 1):
            for new in range(longest + 1):
                after[max(old - 1, new)] += left[old] * fresh[new]
        expected.append(after[0])
        left = after * (np.arange(longest + 1) > 0)
    lengths = stretches(spans(4, rate, longest, long_texts(1000, 1000)))
    found = np.bincount(lengths, minlength=13)[1:13] / len(lengths)
    bound = (
        5 * np.sqrt(np.array(expected) / len(lengths)) + 2e-3
    )  # rows end, and cut long stretches more often
    assert (np.abs(found - expected) < bound).all()


@pytest.mark.parametrize("rate", [0.15, 0.3, 0.5, 1.0])
def test_rows_have_as_many_chosen_tokens_as_the_rate_says_give_or_take_one(rate):
    may = jax.random.uniform(jax.random.key(0), (2000, 50)) < 0.7
    found, wanted = (
        np.asarray(sample_positions(jax.random.key(1), may, rate=rate).sum(1)),
        rate * np.asarray(may.sum(1)),
    )
    assert (np.abs(found - wanted) < 1).all()
    assert (found - wanted).mean() == pytest.approx(0, abs=0.05)  # neither up nor down on the whole
    assert found.max() <= max_selected(50, rate=rate) == math.ceil(rate * 50)


def test_no_row_has_more_spans_than_were_reckoned_with(monkeypatch):
    batch, most = long_texts(500, 400), max_selected(400, rate=0.15, max_span=3)
    assert 60 < most < 160
    found = spans(7, 0.15, 3, batch)
    assert found.sum(1).max() <= most
    monkeypatch.setattr("headrace.objectives._masking.max_selected", lambda length, **_: 60)
    fewer = spans(7, 0.15, 3, batch)
    np.testing.assert_array_equal(fewer, found & (np.cumsum(found, axis=1) <= 60))
    assert fewer.sum(1).max() == 60


@pytest.mark.thin(2)
@pytest.mark.parametrize("kind", [dict(mask_rate=0.3), BERT | dict(mask_rate=0.15)], ids=["tokens", "spans"])
def test_the_head_sees_only_what_is_to_be_told_and_the_loss_is_the_same(tiny, kind, monkeypatch):
    """The other way: every position goes through the head, and those without weight count for nothing."""
    settings = [f"objective.{key}={value}" for key, value in kind.items()]
    its = Bench(tiny(*ENCODER, *settings, "data.sequence_length=64"))
    examples = prepare(its.task, its.batch(), 0)

    def both():
        def total(params):
            return load_objective(its.task.objective).phases[0].loss(its.task, params, examples).loss

        return jax.jit(jax.value_and_grad(total))(its.state().params)

    seen = []
    monkeypatch.setattr(
        "headrace.objectives.fused_cross_entropy",
        lambda *args, **how: seen.append(args[1]) or fused_cross_entropy(*args, **how),
    )
    few = both()
    whole = dataclasses.replace(load_objective(its.task.objective), max_targets=lambda cfg, length: length)
    monkeypatch.setattr("headrace.objectives.load_objective", lambda cfg: whole)
    every = both()
    assert seen[0].shape[1] == max_selected(64, rate=kind["mask_rate"], max_span=kind.get("max_span", 1)) < 64
    assert seen[1].shape[1] == 64
    for one, other in zip(jax.tree.leaves(few), jax.tree.leaves(every), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-5 * np.abs(other).max())


def test_chosen_tokens_are_shown_in_the_shares_asked_for():
    tokens = np.full((40_000, 2), 20)
    chosen = jnp.tile(jnp.array([True, False]), (40_000, 1))
    args = dict(selected=chosen, special_tokens=VOCABULARY, masked=0.8, random=0.1)
    shown = np.asarray(corrupt_tokens(jax.random.key(0), jnp.asarray(tokens), **args))
    assert_share(shown[:, 0] == VOCABULARY.mask, 0.8)
    assert_share(shown[:, 0] == 20, 0.1)
    assert (shown[:, 1] == 20).all()


@pytest.mark.parametrize(
    "vocabulary", [VOCABULARY, SpecialTokens(40, 3, 0, 0, None), SpecialTokens(40, 8, 7, 9, 39)]
)
def test_a_replaced_token_is_any_other_ordinary_one_and_never_the_same(vocabulary):
    special = {vocabulary.pad, vocabulary.bos, vocabulary.eos, vocabulary.mask}
    ordinary = np.array([token for token in range(40) if token not in special])
    tokens = np.tile(ordinary, (8000, 1))
    args = dict(selected=jnp.ones(tokens.shape, bool), special_tokens=vocabulary, masked=0.0, random=1.0)
    shown = np.asarray(corrupt_tokens(jax.random.key(1), jnp.asarray(tokens), **args))
    for column, token in enumerate(ordinary):
        counts = np.bincount(shown[:, column], minlength=40)
        others = np.isin(np.arange(40), ordinary) & (np.arange(40) != token)
        assert counts[~others].sum() == 0
        mean = 8000 / others.sum()
        assert np.abs(counts[others] - mean).max() < 6 * math.sqrt(mean)


def task(objective: str, vocabulary: SpecialTokens = VOCABULARY, **keys: float) -> TrainTask:
    model = reader.part_class("models", "eurobert")(
        vocab=40, layers=1, embed=16, heads=2, kv_heads=2, mlp=32, rope_theta=10000.0
    )
    loss = reader.part_class("losses", "cross_entropy", sections.LossKeys)()
    exec_opts = Execution(reader.part_class("attention", "xla")(), "float32")
    cfg = reader.part_class("objectives", objective)(**keys)
    return TrainTask(model, cfg, loss, exec_opts, vocabulary, family=None)


@functools.cache
def compiled(of: TrainTask):
    return jax.jit(lambda batch, key: load_objective(of.objective).prepare(of, batch, key))


def prepare(of: TrainTask, batch: Batch, key: int) -> Examples:
    return compiled(of)(batch, jax.random.key(key))


@pytest.mark.parametrize(
    "kind", [("masked", dict(max_span=3)), ("diffusion", {})], ids=["spans", "diffusion"]
)
def test_only_tokens_whose_loss_bit_is_set_are_hidden(kind):
    examples = prepare(task(kind[0], **kind[1]), texts(200), 0)
    hidden = np.asarray(examples.inputs) == VOCABULARY.mask
    np.testing.assert_array_equal(hidden, np.asarray(examples.weights) > 0)
    assert hidden[:, MAY].any(axis=0).all() and not hidden[:, ~MAY].any()
    np.testing.assert_array_equal(examples.inputs, np.where(hidden, VOCABULARY.mask, texts(200).tokens))


def test_replaced_tokens_need_no_mask_token_and_are_all_other_than_they_were(tiny, tmp_path):
    examples = prepare(
        task(
            "masked",
            SpecialTokens(40, 0, 7, 8, None),
            mask_token_share=0.0,
            random_token_share=1.0,
            mask_rate=0.3,
        ),
        texts(2000),
        0,
    )
    chosen = np.asarray(examples.weights) > 0
    np.testing.assert_array_equal(np.asarray(examples.inputs) != np.asarray(examples.targets), chosen)
    assert_share(chosen[:, MAY], 0.3)
    index = json.loads((Path(tiny().data.path) / "index.json").read_text())
    index["special"]["mask"] = None
    (tmp_path / "data").mkdir()
    (tmp_path / "data/index.json").write_text(json.dumps(index))
    there = f"data.path={tmp_path}/data"
    assert tiny(there, *KINDS["replaced"]).objective.random_token_share == 1
    for kind in ("masked", "spans", "diffusion"):
        with pytest.raises(UserError, match="tokenizer has no mask token"):
            tiny(there, *KINDS[kind])
    for kind in ("masked", "diffusion"):
        with pytest.raises(UserError, match=f"{kind} needs a tokenizer with a mask token"):
            prepare(task(kind, SpecialTokens(40, 0, 7, 8, None)), texts(1), 0)


def test_objectives_that_read_both_sides_refuse_a_decoder_and_spans_a_length_of_none(tiny):
    for use in ("masked", "diffusion"):
        message = f'found "{use}", expected causal, since tokens of llama see only'
        with pytest.raises(UserError, match=message):
            tiny(f"objective.use={use}")
    for span in (0, 33):
        with pytest.raises(
            UserError, match=f"objective.max_span: found {span}, expected a number of tokens from 1"
        ):
            tiny(*ENCODER, f"objective.max_span={span}")


def test_the_times_of_a_batch_lie_evenly_and_each_is_uniform():
    may = jnp.ones((16, 1), bool)
    keys = jax.random.split(jax.random.key(0), 4000)
    weights = jax.vmap(lambda key: sample_diffusion_mask(key, may)[1])(keys)
    times = (1 / np.asarray(weights, np.float64)[..., 0] - 1e-3) / (1 - 1e-3)
    np.testing.assert_allclose(np.diff(np.sort(times, axis=1), axis=1), 1 / 16, atol=1e-5)
    assert times.min() > -1e-6 and times.max() < 1 + 1e-6
    for share in (0.1, 0.5, 0.9):
        assert_share(times < share, share)


def test_diffusion_hides_a_row_at_its_own_chance():
    chosen, weights = sample_diffusion_mask(jax.random.key(3), jnp.ones((8, 50_000), bool))
    for row, weight in zip(np.asarray(chosen), np.asarray(weights)[:, 0], strict=True):
        assert_share(row, 1 / weight)


TEXT = np.array([VOCABULARY.bos, 12, 30, 12])


def short(rows: int, learnt: tuple[int, ...] = (1, 2, 3)) -> Batch:
    tokens, loss = np.tile(TEXT, (rows, 1)), np.tile(np.isin(np.arange(4), learnt), (rows, 1))
    arrays = (tokens, np.ones_like(tokens), np.tile(np.arange(4), (rows, 1)))
    return Batch(*(jnp.asarray(one, jnp.int32) for one in arrays), loss_mask=jnp.asarray(loss))


def small_model(scale: float):
    cfg = task("diffusion").model
    fresh = init(load_family(cfg).Model, cfg, jax.random.key(0))
    return jax.tree.map(lambda w: scale * w if w.ndim > 1 else w, fresh)


@jax.jit
def total(model, examples: Examples) -> jax.Array:
    [phase] = load_objective(task("diffusion").objective).phases
    return phase.loss(task("diffusion"), model, examples).loss


def told(model, hidden: np.ndarray) -> np.ndarray:
    """The negative log likelihood of each token of the text where these are hidden, from the logits."""
    of, rows = task("diffusion"), short(len(hidden))
    tokens = jnp.where(jnp.asarray(hidden), VOCABULARY.mask, rows.tokens)
    seen = dict(segments=rows.segments, positions=rows.positions)
    states = jax.jit(lambda model: model(of.model, tokens, exec_opts=of.exec_opts, **seen))(model)
    logits = np.asarray(states, np.float64) @ np.asarray(model.unembed, np.float64).T
    return np.log(np.exp(logits).sum(-1)) - logits[:, np.arange(4), TEXT]


def test_the_mean_of_the_diffusion_loss_is_the_bound_summed_over_all_that_can_be_hidden():
    """The chance of each of the 7 subsets is integrated over p as a polynomial: exact, no draws. The model
    that knows nothing, its weights being 0, needs log 40 whatever is hidden."""
    hidden = np.array([[False, *(number >> bit & 1 == 1 for bit in range(3))] for number in range(1, 8)])
    chances = []
    for size in hidden.sum(axis=1):
        chance = np.polynomial.Polynomial([0, 1]) ** (size - 1) * np.polynomial.Polynomial([1, -1]) ** (
            3 - size
        )
        chances.append((chance.integ()(1.0) - chance.integ()(1e-3)) / (1 - 1e-3))
    for scale in (0.0, 12.0):
        model = small_model(scale)
        exact = (np.array(chances) @ (told(model, hidden) * hidden).sum(axis=1)) / 3
        assert scale or exact == pytest.approx(math.log(40))
        found = []
        for key in range(40):
            examples = prepare(task("diffusion"), short(512), key)
            assert examples.counts is not None
            found.append(float(total(model, examples) / examples.counts.sum()))
        error = np.std(found, ddof=1) / math.sqrt(len(found))
        assert error < 0.02 * exact
        assert abs(np.mean(found) - exact) < 4.5 * error


def test_with_one_token_hidden_diffusion_tells_it_like_a_masked_model():
    model, batch = small_model(12.0), short(512, learnt=(2,))
    examples, masked = prepare(task("diffusion"), batch, 0), prepare(task("masked", mask_rate=1.0), batch, 0)
    hidden = np.asarray(examples.weights)[:, 2] > 0
    assert 0 < hidden.sum() < 512 and float(examples.counts.sum()) == 512
    np.testing.assert_array_equal(examples.inputs[hidden], masked.inputs[hidden])
    expected = told(model, np.array([[False, False, True, False]]))[0, 2]
    masked = dataclasses.replace(masked, counts=examples.counts)
    assert float(total(model, masked)) / 512 == pytest.approx(expected, rel=1e-5)
    assert float(total(model, examples) / examples.weights.sum()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "kind, sizes",
    [(("masked", BERT), (2, 2, 1, 2)), (("masked", BERT), (1, 1, 1, 8)), (("diffusion", {}), (2, 2, 1, 2))],
    ids=["spans", "spans over positions", "diffusion"],
)
def test_eight_devices_hide_what_one_hides(kind, sizes, capfd, no_compilation_cache):
    of, batch = task(kind[0], **kind[1]), texts(8)
    devices = sharding.make_mesh(dict(zip(sharding.AXES, sizes, strict=False)), jax.devices())
    home = row_sharding(devices, (8, LENGTH))
    with jax.set_mesh(devices):
        spread = prepare(of, jax.device_put(batch, home), 3)
    assert len(spread.inputs.sharding.device_set) == 8
    for one, other in zip(jax.tree.leaves(prepare(of, batch, 3)), jax.tree.leaves(spread), strict=True):
        np.testing.assert_array_equal(one, other)
    assert "Involuntary full rematerialization" not in capfd.readouterr().err


SGD = ("optimizer.use=sgd", "optimizer.learning_rate=0.5", "schedule.steps=20")


@pytest.fixture(scope="module")
def benches() -> dict[str, Bench]:
    return {}


@pytest.fixture
def bench(tiny, benches):
    """The bench of a kind of corruption, compiled once for all tests."""

    def find(kind: str) -> Bench:
        if kind not in benches:
            benches[kind] = Bench(tiny(*SGD, *KINDS[kind]))
        return benches[kind]

    return find


@functools.cache
def scores(bench: Bench):
    return jax.jit(make_eval_step(bench.task, bench.axes))


@pytest.mark.parametrize(
    "sizes", [{}, pytest.param({"data": 2, "fsdp": 2, "context": 2}, marks=pytest.mark.slow)], ids=str
)
def test_neither_parts_of_the_batch_nor_the_mesh_change_the_update_of_diffusion(
    tiny, bench, sizes, capfd, no_compilation_cache
):
    whole, rows = bench("diffusion").run(2)
    parts, part_rows = Bench(tiny(*SGD, *KINDS["diffusion"], "batch.microbatches=2"), sizes).run(2)
    assert_close(whole, parts, 5e-6)
    assert [row["loss"] for row in part_rows] == pytest.approx([row["loss"] for row in rows], abs=3e-5)
    assert "Involuntary full rematerialization" not in capfd.readouterr().err


@pytest.mark.parametrize("kind", [pytest.param("spans", marks=pytest.mark.slow), "diffusion"])
def test_seed_and_step_alone_decide_what_is_hidden(bench, kind):
    """With the same weights and the same batch, the loss tells what was hidden."""
    its = bench(kind)
    batch = its.batch()

    def loss(seed: int, number: int) -> float:
        key = jnp.asarray(jax.random.key_data(jax.random.key(seed)))
        state = dataclasses.replace(its.state(), key=key, step=jnp.asarray(number, jnp.int32))
        with jax.set_mesh(its.devices):
            return float(its.step(state, batch)[1]["loss"])

    places = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    losses = [loss(*place) for place in places]
    assert [loss(*place) for place in places] == losses
    assert len(set(losses)) == len(places)


def test_the_evaluation_of_diffusion_is_the_same_for_any_size_of_batch(bench):
    its = bench("diffusion")
    params, batch = its.state().params, its.batch()
    whole = scores(its)(params, batch, 8)
    halves = [scores(its)(params, jax.tree.map(lambda x, n=n: x[n : n + 4], batch), 8 + n) for n in (0, 4)]
    for name, value in whole.items():
        assert float(value) == pytest.approx(sum(float(half[name]) for half in halves), rel=1e-5)
    assert float(whole["count"]) == maskable(its.task.special_tokens, batch).sum()


def test_what_is_hidden_is_never_stored(bench):
    its = bench("diffusion")

    def stored() -> dict[str, tuple[int, str]]:
        files = [path for path in sorted(Path(its.cfg.data.path).rglob("*")) if path.is_file()]
        sums = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
        return {str(f): (f.stat().st_mtime_ns, one) for f, one in zip(files, sums, strict=True)}

    before, tokens = stored(), np.asarray(its.batch(1).tokens)
    its.run(3)
    assert stored() == before
    np.testing.assert_array_equal(its.batch(1).tokens, tokens)
    assert not (tokens == its.dataset.index.special.mask).any()


def test_every_objective_trains(bench):
    """Measured on a batch that is hidden in the same way before and after: diffusion weighs its tokens by
    chance. Causal and masked modelling are trained with every model already, pairs in
    tests/parity/test_deberta.py, heads for labels in tests/model_wrappers/test_classification_head.py, and
    preferences in tests/objectives/test_dpo.py."""
    for use in set(reader.part_names("objectives")) - {"causal", "masked", "rtd", "classify", "dpo"}:
        its = bench(use)

        def loss(state: State, its: Bench = its) -> float:
            sums = scores(its)(state.params, its.batch(30), 0)
            return float(sums["nll"] / sums["count"])

        assert loss(its.run(20)[0]) < loss(its.state()) - 0.5
