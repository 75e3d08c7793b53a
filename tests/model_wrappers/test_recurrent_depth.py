"""Recurrent depth: every family's rounds against layers that are written out, gradients through the last of
them, the cache, early exit, and the draw of how many there are."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.cli.main import main
from headrace.config import reader
from headrace.config.wrappers import RecurrenceKeys
from headrace.errors import UserError
from headrace.model_wrappers import load_family, recurrent_depth
from headrace.model_wrappers.recurrent_depth import RoundSchedule
from headrace.models import fixed_matmul
from headrace.nn import module
from headrace.nn.norm import rms_norm
from headrace.nn.stack import Execution
from headrace.training import run as training_run
from tests.contracts.test_models import LENGTH, SIZES
from tests.training.test_step import Bench, assert_close

HOW = Execution(reader.part_class("attention", "xla")(), "float32")
FAMILIES = [
    name for name in reader.part_names("models") if getattr(reader.part_class("models", name), "loops", True)
]
LOOPED = ("model.layers=3", "recurrence.rounds=4", "recurrence.backprop=2")


class Case:
    """A small model of one family: one layer before the rounds, two in them, one after."""

    def __init__(self, name: str, rounds: int = 3):
        cls = reader.part_class("models", name)
        known = {f.name for f in dataclasses.fields(cls)}
        sizes = {key: value for key, value in SIZES.items() if key in known}
        self.cfg = cls(**sizes, recurrence=RecurrenceKeys(rounds, backprop=2))
        self.family = load_family(self.cfg)
        self.plain = load_family(dataclasses.replace(self.cfg, recurrence=None))
        fresh = module.init(self.family.Model, self.cfg, jax.random.key(0))
        # Large enough to tell inputs apart, and not so large that rounds blow up what is rounded.
        self.params = jax.tree.map(lambda w: w * 4 if w.ndim > 1 and 0 < w.std() < 0.05 else w, fresh)
        self.tokens = jnp.asarray(np.random.default_rng(0).integers(4, 64, (2, LENGTH)))

    def hidden(self, tokens: Any, rounds: RoundSchedule | None = None, **seen: Any) -> np.ndarray:
        exec_opts = dataclasses.replace(HOW, rounds=rounds)
        return np.asarray(
            jax.jit(lambda p, t: p(self.cfg, t, exec_opts=exec_opts, **seen))(self.params, tokens)
        )


@functools.cache
def case_of(name: str) -> Case:
    return Case(name)


@pytest.fixture(params=FAMILIES)
def case(request) -> Case:
    return case_of(request.param)


class Seen:
    """Takes the place of a loop, and runs the layers as a reader would write it: one by one, in Python."""

    def __init__(self, case: Case, rounds: int, learnt: int, start: Any):
        self.case, self.rounds, self.learnt, self.start = case, rounds, learnt, start

    def run(self, exec_opts: Execution, bodies: Any, x: Any, stack: Any) -> Any:
        cfg, model = self.case.cfg, self.model

        def layer(number: int, x: Any) -> Any:
            return bodies[number % len(bodies)](jax.tree.map(lambda w: w[number], stack), x)

        text = rms_norm(layer(0, x), model.text_norm, cfg.norm_eps)
        state = self.start
        for number in range(self.rounds):
            both = jnp.concatenate([state, text], -1) @ jnp.concatenate([model.w_state, model.w_text])
            state = rms_norm(layer(2, layer(1, both)), model.state_norm, cfg.norm_eps)
            if number < self.rounds - self.learnt:
                state = jax.lax.stop_gradient(state)
        return layer(3, state)


def written_out(case: Case, params: Any, rounds: int, learnt: int = 100) -> Any:
    positions = jnp.broadcast_to(jnp.arange(LENGTH), case.tokens.shape)
    x = jnp.zeros((*case.tokens.shape, case.cfg.embed))
    start = recurrent_depth.RecurrentRunner(case.cfg, params, RoundSchedule(rounds), positions).initial_state(
        x
    )
    loop = Seen(case, rounds, learnt, start)
    loop.model = params
    plain = case.plain.Model
    return plain.__call__(
        params, case.cfg, case.tokens, exec_opts=dataclasses.replace(HOW, layer_runner=loop)
    )


@pytest.mark.thin(5)
@pytest.mark.parametrize("rounds", [0, 3])
def test_rounds_are_the_layers_written_out(case, rounds):
    wanted = jax.jit(lambda params: written_out(case, params, rounds))(case.params)
    found = case.hidden(case.tokens, RoundSchedule(rounds))
    rounding = 2e-5 if fixed_matmul(case.cfg) == "compute" else 3e-2  # to 8 bits, which may tip either way
    np.testing.assert_allclose(found, wanted, atol=rounding * np.abs(wanted).max())
    if rounds == case.cfg.recurrence:  # as many as the model says, unless it is told otherwise
        np.testing.assert_array_equal(found, case.hidden(case.tokens))


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_gradients_go_through_the_last_rounds_and_one_program_serves_any_number_of_them(name):
    case = case_of(name)

    @jax.jit
    def ours(params: Any, count: Any) -> Any:
        exec_opts = dataclasses.replace(HOW, rounds=RoundSchedule(count, backprop=2))
        return jax.grad(lambda params: (params(case.cfg, case.tokens, exec_opts=exec_opts) ** 2).mean())(
            params
        )

    for rounds in (1, 4):
        wanted = jax.jit(
            jax.grad(lambda params, rounds=rounds: (written_out(case, params, rounds, 2) ** 2).mean())
        )(case.params)
        found = ours(case.params, rounds)
        for (path, one), (_, other) in zip(
            module.named_leaves(found), module.named_leaves(wanted), strict=True
        ):
            np.testing.assert_allclose(one, other, atol=1e-4 * np.abs(other).max() + 1e-7, err_msg=path)
        assert np.abs(found.w_state).max() > 0
    assert ours._cache_size() == 1


def decoded(case: Case, exec_opts: Execution, size: int = 8) -> np.ndarray:
    step = jax.jit(lambda p, tokens, cache: p.decode(case.cfg, tokens, cache, exec_opts=exec_opts))
    cache, out = case.params.init_cache(case.cfg, 2, 32, jnp.float32), []
    for first in range(0, LENGTH, size):
        hidden, cache = step(case.params, case.tokens[:, first : first + size], cache)
        out.append(hidden)
    return np.concatenate(out, 1)


@pytest.mark.thin(3)
def test_decoding_from_a_cache_gives_what_the_whole_text_does(case):
    if not case.cfg.causal:
        pytest.skip("an encoder continues nothing")
    wanted = case.hidden(case.tokens)
    rounding = 1e-4 if fixed_matmul(case.cfg) == "compute" else 3e-2
    np.testing.assert_allclose(decoded(case, HOW), wanted, atol=rounding * np.abs(wanted).max())


def test_rounds_end_where_they_change_little():
    case = case_of("llama")
    never = dataclasses.replace(HOW, rounds=RoundSchedule(3, exit=1e-9))
    np.testing.assert_allclose(decoded(case, never), decoded(case, HOW), atol=1e-5)
    at_once = dataclasses.replace(HOW, rounds=RoundSchedule(3, exit=1e9))
    wanted = case.hidden(case.tokens, RoundSchedule(1))
    np.testing.assert_allclose(decoded(case, at_once), wanted, atol=1e-4 * np.abs(wanted).max())
    assert np.abs(wanted - case.hidden(case.tokens)).max() > 1e-3


def test_rounds_that_a_token_did_not_take_are_filled_with_its_last():
    case = case_of("llama")
    loop = recurrent_depth.RecurrentRunner(
        case.cfg, case.params, RoundSchedule(3), jnp.zeros((1, 2), int), first=4
    )
    cache = jnp.arange(3 * 2 * 8, dtype=jnp.float32).reshape(
        6, 1, 8
    )  # three rounds of two layers, 8 positions
    filled = np.asarray(loop.fill_skipped_rounds(cache, jnp.asarray(2), 2)).reshape(3, 2, 8)
    before = np.asarray(cache).reshape(3, 2, 8)
    np.testing.assert_array_equal(filled[:2], before[:2])
    np.testing.assert_array_equal(filled[2, :, 4:6], before[1, :, 4:6])
    np.testing.assert_array_equal(np.delete(filled[2], [4, 5], 1), np.delete(before[2], [4, 5], 1))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_future_and_other_documents_stay_unseen(name):
    case = case_of(name)
    changed = case.tokens.at[:, 15].set((case.tokens[:, 15] + 7) % 60 + 4)
    np.testing.assert_array_equal(case.hidden(case.tokens)[:, :15], case.hidden(changed)[:, :15])
    segments = jnp.where(jnp.arange(LENGTH) < 10, 1, 2) * jnp.ones((2, 1), jnp.int32)
    positions = jnp.where(jnp.arange(LENGTH) < 10, jnp.arange(LENGTH), jnp.arange(LENGTH) - 10)
    seen = dict(segments=segments, positions=jnp.broadcast_to(positions, segments.shape))
    alone = case.hidden(case.tokens[:, 10:])
    np.testing.assert_allclose(case.hidden(case.tokens, **seen)[:, 10:], alone, atol=1e-4)


def test_the_rounds_that_training_draws_are_the_papers():
    cfg = dataclasses.replace(case_of("llama").cfg, recurrence=RecurrenceKeys(32))
    keys = jax.random.split(jax.random.key(0), 20_000)
    counts = np.asarray(
        jax.jit(jax.vmap(lambda key: recurrent_depth.sample_rounds(HOW, cfg, key).rounds.count))(keys)
    )
    assert counts.min() >= 1
    assert counts.mean() == pytest.approx(33.02, abs=0.5)
    assert np.percentile(counts, [5, 50, 95]) == pytest.approx([12, 29, 67], abs=1.1)


LLAMA = dict(layers=2, embed=32, heads=4, kv_heads=2, mlp=48)
SGD = ("optimizer.use=sgd", "optimizer.learning_rate=0.5", *LOOPED)


@pytest.mark.parametrize(
    "sizes",
    [{}, pytest.param({"fsdp": 2, "tensor": 2, "context": 2}, marks=pytest.mark.slow)],
    ids=["parts", "mesh"],
)
def test_neither_parts_of_the_batch_nor_the_mesh_change_the_update(tiny, sizes, capfd, no_compilation_cache):
    whole, rows = Bench(tiny(*SGD)).run(2)
    parts, part_rows = Bench(tiny(*SGD, "batch.microbatches=2"), sizes).run(2)
    assert_close(whole, parts, 2e-5)
    assert [row["loss"] for row in part_rows] == pytest.approx([row["loss"] for row in rows], abs=3e-5)
    assert "Involuntary full rematerialization" not in capfd.readouterr().err


@pytest.mark.parametrize("remat", [pytest.param("dots", marks=pytest.mark.slow), "full"])
def test_what_the_backward_pass_keeps_changes_nothing(tiny, remat):
    whole, _ = Bench(tiny(*SGD)).run(1)
    again, _ = Bench(tiny(*SGD, f"compute.remat={remat}")).run(1)
    assert_close(whole, again, 2e-5)


def test_flops_count_every_round_and_backward_those_with_gradients():
    cfg = reader.part_class("models", "llama")(
        **LLAMA | dict(layers=4), recurrence=RecurrenceKeys(8, backprop=2)
    )
    plain = load_family(dataclasses.replace(cfg, recurrence=None)).flops_per_token

    def layers(number: int) -> float:
        return plain(dataclasses.replace(cfg, layers=number), 64)

    one = layers(6) - layers(4)
    wanted = layers(2 + 4) + 6 * one / 3 + (2 + 6 / 3) * 12 * 32**2
    assert load_family(cfg).flops_per_token(cfg, 64) == pytest.approx(wanted)


def test_what_cannot_be_run_in_rounds_is_refused(tiny):
    with pytest.raises(UserError, match=r"recurrence.rounds: found nothing, expected a whole number"):
        tiny("recurrence.prelude=2")
    with pytest.raises(
        UserError, match=r"prelude: found 1, the default, expected prelude \+ coda to be less"
    ):
        tiny("recurrence.rounds=4")
    with pytest.raises(
        UserError, match=r"recurrence.rounds: found 4, expected no recurrence, since layers of xlstm"
    ):
        tiny(
            "model=null",
            "model.use=xlstm",
            "model.layers=4",
            "model.embed=32",
            "model.heads=2",
            "model.mlp=64",
            "recurrence.rounds=4",
        )


@pytest.mark.slow
def test_a_run_learns_is_evaluated_and_continues_at_any_depth(tiny, capsys, tmp_path):
    cfg = tiny(*LOOPED, "schedule.steps=30")
    assert training_run.run(cfg) == 0
    capsys.readouterr()
    said = []
    for rounds in (1, 4, 6):
        assert main(["eval", cfg.run_dir, f"recurrence.rounds={rounds}"]) == 0
        said.append(float(capsys.readouterr().out.split()[2]))
    assert said[1] < said[0] - 0.05 and said[2] == pytest.approx(said[1], abs=0.05)
    texts = []
    for options in (
        [],
        ["--recurrence", "4"],
        ["--recurrence", "1"],
        ["--recurrence", "6", "--exit-share", "0.1"],
    ):
        assert main(["generate", cfg.run_dir, "--prompt", "Text", "--tokens", "12", *options]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert main(["generate", cfg.run_dir, "--recurrence", "0"]) == 2
    assert "--recurrence: found 0, expected 1 or more" in capsys.readouterr().err
    assert main(["export", cfg.run_dir, f"{tmp_path}/exported"]) == 2
    assert "transformers has no llama whose layers are run 4 times" in capsys.readouterr().err
