"""Plans: arithmetic against sums by hand and against the compiler, what is said of wishes that cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main as cli
from headrace.config import recipe, sections
from headrace.attention import splash
from headrace.errors import UserError
from headrace.plan import (
    recommend as advise,
    estimate as arithmetic,
    aot as compiler,
    buffers as memory,
    attention_cost as scores,
    search,
)
from headrace.hardware import chips, slices

ONE_A_CHIP = ["batch.sequences=16", "batch.accumulate=1"]
REPORT = """Memory Space: default (color=0)
Total bytes: 18365874976 (17.10GiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
    4.00GiB( 18%);    4.00GiB;   1010073600;                5; 5×bf16[32,2,8192,4096]
    5.96GiB( 27%);    1.96GiB;    268992512;                1; f32[128256,4096]
    7.91GiB( 36%);    1.96GiB;   5439488000;                5; 5×f32[128256,4096]
    8.89GiB( 41%); 1002.00MiB;   8791392256;                1; f32[2048,128256]
   10.31GiB( 47%);  448.00MiB;   6557138944;                1; bf16[2,8192,14336,1]
   10.75GiB( 49%);  448.00MiB;   6542458880;                4; bf16[1,256,14336], bf16[2,8192,14336,1], pred[]

    4.00GiB(100%);    4.00GiB;            0;                1; f32[32,256,14336]

Memory Space: vmem (color=1)
    4.00GiB(100%);    4.00GiB;            0;                1; bf16[1,4096,14336]
"""


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = cli.main(["plan", *words])
    out, err = capsys.readouterr()
    return code, " ".join((out + err).split())


def test_the_state_is_counted_to_the_byte() -> None:
    cfg = recipe.load("recipes/llama3-8b.yaml", ONE_A_CHIP)
    found = arithmetic.estimate(cfg, slices.parse("v5p-32"))
    parameters = 8_030_261_248
    assert found.parameters == parameters
    # All is split by 16 but 65 norms of 4,096, which are split too, and two counters.
    assert found.weight_bytes == 4 * parameters // 16
    assert 0 <= found.optimizer_bytes - 8 * parameters // 16 <= 8
    assert found.hbm_bytes == found.argument_bytes + found.temp_bytes


def test_the_time_is_never_less_than_the_products_take_at_the_peak() -> None:
    cfg = recipe.load("recipes/llama3-8b.yaml", ["batch.sequences=256", "batch.accumulate=1"])
    for name in ("v4-128", "v5e-256", "v5p-256", "v6e-256", "gpu:h100x64"):
        where = slices.parse(name)
        found = arithmetic.estimate(cfg, where)
        least = 256 * 8192 * found.flops_per_token / (where.chips * where.chip.flops)
        assert found.step_seconds > least


@pytest.mark.parametrize("remat", ["none", "full"])
def test_products_in_8_bits_are_counted_at_their_own_rate_where_the_chip_has_them(remat: str) -> None:
    """All three products of a layer's matrices in fp8, two in int8; attention and head as they are. Of what
    is computed again the last matrix of a layer is no part."""
    last = 32 * 4096 * 14336
    weights = 32 * 4096 * 2 * (32 + 8) * 128 + 3 * last

    def seconds(name: str, products: str) -> float:
        overrides = [*ONE_A_CHIP, f"memory.remat={remat}", f"memory.products={products}"]
        cfg = recipe.load("recipes/llama3-8b.yaml", overrides)
        return arithmetic.estimate(cfg, slices.parse(name)).matrix_seconds

    for name, products, count in (("gpu:h200x16", "fp8", 3), ("v5e-16", "int8", 2)):
        where = slices.parse(name)
        shares, rate = arithmetic.shares_of(where), where.chip.rate(products)
        assert rate == pytest.approx(2 * where.chip.flops, rel=0.01)
        products_of_a_token = 2 * (count * weights + (weights - last) * (remat == "full"))
        inverse = 1 / (shares.matrix * where.chip.flops) - 1 / (shares.narrow * rate)
        saved = 8192 * products_of_a_token * inverse
        assert seconds(name, "compute") - seconds(name, products) == pytest.approx(saved, rel=0.005)
    for name, products in (("gpu:a100x16", "fp8"), ("v4-32", "int8"), ("v5e-16", "fp8")):
        assert seconds(name, products) == pytest.approx(seconds(name, "compute"))


def test_a_plan_says_what_8_bits_bring(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("recipes/llama3-8b.yaml", "--fast", "--slice", "gpu:h200x8", "--slice", "v5e-64")
    _, told = plan(capsys, *words, "batch.sequences=64", "batch.accumulate=1", "memory.products=fp8")
    assert "MFU is relative to the 989 TFLOP/s of bf16, in fp8 as well" in told
    assert "fp8 brings nothing on v5e, which does not multiply it faster; memory.products=int8 is" in told


SHORT = "model.layers=4 model.vocab=16384 batch.sequences=32 batch.accumulate=1 memory.remat="
FULL = "batch.sequences=32 batch.accumulate=1 memory.remat=full"
SEVEN = "model.layers=32 model.embed=4096 model.heads=32 model.kv_heads=32 model.head_dim=128 model.mlp=11008"


@pytest.mark.parametrize(
    ("name", "where", "settings", "seconds"),
    [  # by the compiler (libtpu 0.0.51), and as measured on an H200: docs/planning.md, docs/performance.md
        ("llama3-8b", "v5p-32", FULL, 3.15),
        ("llama3-8b", "v6e-16", FULL, 2.41),
        ("llama3-8b", "v4-32", FULL, 5.43),
        ("lunaris-270m", "v4-32", f"{SEVEN} batch.accumulate=4", 4.99),
        ("llama3.2-1b", "v5e-8", f"{SHORT}none", 0.270),
        ("llama3.2-1b", "v5e-8", f"{SHORT}dots", 0.283),
        ("llama3.2-1b", "v5e-8", f"{SHORT}attention", 0.292),
        ("llama3.2-1b", "v5e-8", f"{SHORT}full", 0.308),
        ("llama3.2-1b", "gpu:h200x1", "batch.sequences=8 batch.accumulate=1", 8 * 4096 / 64_850),
        (
            "llama3.2-1b",
            "gpu:h200x1",
            "batch.sequences=8 batch.accumulate=1 memory.products=fp8 loss.split=fp8",
            8 * 4096 / 81_500,
        ),
        (
            "llama3.2-1b",
            "gpu:h200x1",
            "batch.sequences=1 batch.accumulate=1 data.sequence_length=131072 memory.remat=full",
            131_072 / 9_700,
        ),
    ],
)
def test_arithmetic_is_near_the_compiler_and_what_was_measured(
    name: str, where: str, settings: str, seconds: float
) -> None:
    cfg = recipe.load(f"recipes/{name}.yaml", settings.split())
    assert arithmetic.estimate(cfg, slices.parse(where)).step_seconds == pytest.approx(seconds, rel=0.05)


def test_tiles_at_the_ends_of_what_is_seen_are_half_empty() -> None:
    """Of causal rows half a tile more for each query, of a window both ways one tile, and nothing where all
    is seen; never more than the row."""
    gpu = slices.parse("gpu:h200x1")
    visited = lambda name, *more, where=gpu: scores.visited(
        recipe.load(f"recipes/{name}.yaml", list(more)), where
    )
    assert visited("llama3.2-1b") == 1 + 1024 / 4096
    assert visited("eurobert-210m") == visited("deberta-v3-base") == 1
    long = ["data.sequence_length=8192", "batch.ramp=0", "batch.ramp_from=0"]
    whole, narrow = 8, 14  # of 22 layers every third sees the whole row, and the others 64 keys to each side
    seen = whole * 8192 + narrow * 129
    assert visited("modernbert-base", *long) == pytest.approx((seen + narrow * 1024) / seen, rel=0.01)
    met = whole * 8192 + narrow * 384  # by kernels: 128 queries and as many keys to each side of them
    assert visited("modernbert-base", *long, where=slices.parse("v5e-8")) == pytest.approx(
        met / seen, rel=0.01
    )
    short = ["data.sequence_length=128", "batch.ramp=0", "batch.ramp_from=0"]
    assert 1 <= visited("modernbert-base", *short) < 1.5


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("modernbert-base", 14),
        ("gemma2-9b-32k", 21),
        ("gemma3-1b", 22),
        ("huginn-3.5b", 0),
        ("deberta-v3-base", 0),
    ],
)
def test_layers_with_a_window_are_told_by_how_flops_grow(name: str, layers: int) -> None:
    """Rounds of recurrent depth, or a generator beside the model, are none, though FLOPs grow by them."""
    cfg = recipe.load(f"recipes/{name}.yaml")
    assert scores.with_window(cfg) == pytest.approx(layers, abs=1e-3)
    where = slices.parse("v5e-8")
    assert scores.visited(cfg, where) >= 1
    assert (scores.windows(cfg, where) is not None) == (name == "modernbert-base")


def test_one_kernel_makes_all_gradients_in_a_plan_where_splash_has_it_so() -> None:
    """Four tiles of keys at most, whose sides divide the row and are shorter for wide heads."""
    found = {
        (length, head): splash.fuses(length, head) for length in (2048, 2176, 4096) for head in (64, 256)
    }
    assert [key for key, fuses in found.items() if fuses] == [(2048, 64), (2048, 256), (4096, 64)]
    cfg = lambda length: recipe.load("recipes/eurobert-210m.yaml", [f"data.sequence_length={length}"])
    where = slices.parse("v5e-8")
    each = [scores.attention_seconds(cfg(n), where) / scores.scores_of(cfg(n), where) for n in (2048, 2176)]
    assert each[1] / each[0] == pytest.approx((2 + 2 + 3 + 4) / (2 + 2 + 5), rel=0.01)


@pytest.mark.parametrize(
    ("name", "window", "keys"),
    [
        ("modernbert-base", 128, 384),
        ("modernbert-base", 260, 640),  # 130 to each side, in blocks of 128
        ("modernbert-base", 600, None),  # more than attention/band.py takes
        ("ettin-decoder-150m", 260, 384),
        ("ettin-decoder-150m", 1100, None),
    ],
)
def test_windows_meet_as_many_keys_in_a_plan_as_their_kernels_take(
    name: str, window: int, keys: int | None
) -> None:
    cfg = recipe.load(f"recipes/{name}.yaml", [f"model.window={window}"])
    found = scores.windows(cfg, slices.parse("v5e-8"))
    assert found == (None if keys is None else (14, keys))


def test_what_activations_keep_is_in_the_bytes_of_a_plan() -> None:
    """DeBERTa's MLP, 64 rows of 512 a chip in 4 layers with 3,072 hidden units: of each 16 bits, with one
    bit more, or where w_down is frozen that bit alone."""
    alone = (
        "model.generator=0 model.mask_decoder=false objective=null objective.use=masked objective.rate=0.15"
    )
    alone += " model.layers=4 model.vocab=32768 batch.sequences=512 batch.accumulate=1 batch.ramp=0"
    alone += " batch.ramp_from=0 data.sequence_length=512 memory.remat=none"

    def temporaries(activation: str, *more: str) -> int:
        cfg = recipe.load(
            "recipes/deberta-v3-base.yaml", [*alone.split(), f"model.activation={activation}", *more]
        )
        return arithmetic.estimate(cfg, slices.parse("v5e-8")).temp_bytes

    units, still = 4 * 64 * 512 * 3072, "freeze=blocks.w_down"
    gradient = temporaries("relu") - temporaries("relu", still)
    assert 0 < gradient <= 4 * 4 * 3072 * 768 / 8
    assert temporaries("gelu") == temporaries("relu") == temporaries("relu2")
    assert temporaries("relu_bits") - temporaries("relu") == units // 8
    assert temporaries("gelu_bits") - temporaries("relu") == units // 4
    assert temporaries("relu", still) - temporaries("relu_bits", still) == 2 * units - units // 8
    assert temporaries("relu", "memory.products=fp8") < temporaries("gelu", "memory.products=fp8")


def test_traffic_between_chips_takes_the_time_that_its_bytes_do() -> None:
    """Weights are gathered twice in bf16 and gradients summed in float32. v5p-32 is 2 x 2 x 4 chips and no
    ring, so that a chip has a link in each dimension, of which 86 % can be used. Nothing hides it."""
    where = slices.parse("v5p-32")
    cfg = recipe.load("recipes/llama3-8b.yaml", [*ONE_A_CHIP, "data.sequence_length=512"])
    found = arithmetic.estimate(cfg, where)
    traffic = 8_030_261_248 * (2 + 2 + 4) * 15 / 16 / (0.86 * 300e9)
    assert found.exposed_seconds == pytest.approx(traffic, rel=1e-3)
    assert [slices.parse(name).links for name in ("v4-128", "v5e-256", "v5e-8", "v5p-8", "v6e-1")] == [
        6,
        4,
        2,
        2,
        0,
    ]
    # Behind a switch nine tenths of what else there is to do go on beside it.
    eight = arithmetic.estimate(cfg, slices.parse("gpu:h200x16"))
    busy = eight.matrix_seconds + eight.attention_seconds + eight.memory_seconds
    traffic = 8_030_261_248 * (2 + 2 + 4) * 15 / 16 / (0.8 * 450e9)
    traffic += 2 * 4 * 8_030_261_248 / 8 / 50e9
    assert eight.exposed_seconds == pytest.approx(max(traffic - 0.9 * busy, 0.1 * traffic), rel=1e-3)
    two = recipe.load("recipes/llama3-8b.yaml", ["mesh.data=2", "batch.sequences=512", "batch.accumulate=1"])
    alone, joined = (
        arithmetic.traffic_seconds(
            two, slices.parse(name), dict(data=2, fsdp=256, tensor=1, context=1, expert=1), 2**33
        )
        for name in ("v5p-1024", "2xv5p-512")
    )
    assert joined - alone == pytest.approx(2 * 4 * 2**33 / 256 / 6.25e9)


def test_what_is_kept_of_layers_grows_from_full_to_none() -> None:
    where = slices.parse("v5p-32")
    sizes = [
        arithmetic.estimate(
            recipe.load("recipes/llama3-8b.yaml", [*ONE_A_CHIP, f"memory.remat={name}"]), where
        )
        for name in ("full", "attention", "offload", "dots", "none")
    ]
    full, attention, offload, dots, none = (one.temp_bytes for one in sizes)
    assert full < attention < dots < none
    assert full < offload < dots  # one layer is on its way
    assert sizes[0].step_seconds > sizes[-1].step_seconds and sizes[0].step_seconds > sizes[1].step_seconds
    # Of 8,192 tokens in each of 32 layers: a product of the width, two of the MLP, queries, keys, values.
    assert sizes[2].host_bytes == 2 * 8192 * 32 * (4096 + 2 * 14336 + 6144)
    assert not any(one.host_bytes for one in sizes if one is not sizes[2])


def test_bytes_in_the_hosts_memory_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--slice", "v5p-32", "--fast", "memory.remat=offload", *ONE_A_CHIP]
    code, said = plan(capsys, "recipes/llama3-8b.yaml", *words)
    assert code == 0 and "19.00 GiB in the host's memory, 76.00 GiB for its 4 chips" in said
    assert "to the host and back, not hidden" in said


@pytest.mark.parametrize("parts", [1, 2])
def test_frozen_weights_have_no_gradients_in_what_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, parts: int
) -> None:
    """w_down is 32 x 14,336 x 4,096 of 8,030,261,248 weights, a sixteenth of each on a chip."""
    words = ["--slice", "v5p-32", "--fast", "--json", str(tmp_path / "plan.json")]
    words += [f"batch.sequences={16 * parts}", f"batch.accumulate={parts}"]
    code, said = plan(capsys, "recipes/llama3-8b.yaml", *words, "freeze=blocks.w_down")
    found = json.loads((tmp_path / "plan.json").read_text())[0]
    still = 4 * 32 * 14336 * 4096 // 16
    assert code == 0 and found["frozen_bytes"] == still
    gradients = (found["weight_bytes"] - still) * parts / 2**30
    sums = ", and their sums over parts" if parts > 1 else ""
    assert f"{gradients:.2f} GiB gradients in float32{sums}; 0.44 GiB of the weights are frozen" in said
    _, said = plan(capsys, "recipes/llama3-8b.yaml", *words)
    assert f"{found['weight_bytes'] * parts / 2**30:.2f} GiB gradients" in said and "frozen" not in said


def test_a_plan_is_told_and_written_for_machines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--slice", "v5p-32", "--slice", "gpu:h200x8", "--fast", "--json", str(tmp_path / "plan.json")]
    code, said = plan(capsys, "recipes/llama3-8b.yaml", *words, *ONE_A_CHIP)
    assert code == 0, said
    assert "v5p-32: 16 chips of v5p, fsdp 16; 16 rows of 8192 at a time" in said
    assert "on demand or $" in said and "prices of this chip are not known" in said
    first, second = json.loads((tmp_path / "plan.json").read_text())
    assert (first["slice"], first["chips"], first["fits"]) == ("v5p-32", 16, True)
    assert first["hbm_bytes"] == first["argument_bytes"] + first["temp_bytes"]
    seconds, rate = first["step_seconds"], first["tokens_per_second_per_chip"]
    assert rate == pytest.approx(16 * 8192 / seconds / 16)
    assert first["mfu"] == pytest.approx(rate * 51_471_998_976 / 459e12)
    assert first["days"] == pytest.approx(first["tokens"] / (16 * rate) / 86400)
    assert first["dollars"]["on_demand"][0] == pytest.approx(first["days"] * 24 * 16 * 4.2)
    assert second["dollars"]["spot"] is None


def test_what_does_not_fit_has_exit_code_3_and_is_told_what_to_try(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--slice", "v5e-16", "--fast", "batch.sequences=64", "batch.accumulate=1"]
    code, said = plan(capsys, "recipes/llama3-8b.yaml", *words)
    assert code == 3 and "does not fit" in said and "try batch.accumulate=2, then --search" in said


def test_an_impossible_wish_is_answered_by_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = plan(capsys, "recipes/dense-600b.yaml", "--slice", "v4-32", "--days", "30")
    assert code == 3
    assert "604B parameters of 16 bytes" in said
    assert "are 8,999.61 GiB by themselves, 16 chips have 492.00 GiB: 18.3 times too much" in said
    assert "times 30 days" in said and "the smallest slices that hold it: v5p-512" in said
    assert "in 30 days v4-32 can train 6.54B parameters on 131B tokens" in said


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--slice", "v5p-33"], "slice: found v5p-33, expected a size such as v5p-32"),
        ([], "plan: expected --slice NAME"),
        (["--slice", "v5p-32", "model.vocab=0"], "model.vocab: expected the size of the vocabulary"),
        (
            ["--slice", "v5p-32", "batch.sequences=24", "batch.accumulate=1"],
            "24 rows at a time cannot be shared",
        ),
        (["--slice", "v5p-64", "batch.sequences=64", "batch.accumulate=4"], "set batch.accumulate=2"),
        (["--slice", "v5p-64", "batch.sequences=24", "batch.accumulate=1"], "to a multiple of 32"),
        (["--slice", "v5p-32", "--prices", "none.yaml"], "none.yaml: found no file"),
    ],
)
def test_mistakes_are_told(capsys: pytest.CaptureFixture[str], words: list[str], why: str) -> None:
    code, said = plan(capsys, "recipes/llama3-8b.yaml", "--fast", *words)
    assert code == 2 and why in said, said


def test_slices_are_recommended_within_days_and_dollars(capsys: pytest.CaptureFixture[str]) -> None:
    cfg = recipe.load("recipes/llama3.2-1b.yaml")
    found = advise.offers(cfg, chips.prices(), days=3, budget=700)
    assert found and all(one.days <= 3 for one in found)
    costs = [one.dollars["on_demand"] for one in found]
    assert [cost[0] for cost in costs if cost] == sorted(cost[0] for cost in costs if cost)
    tighter = advise.offers(cfg, chips.prices(), days=1, budget=700)
    assert {one.where.name for one in tighter} < {one.where.name for one in found}
    for one in found:  # for the money at the lowest price on demand, or at the highest of spot
        demand, spot = one.dollars["on_demand"], one.dollars["spot"]
        assert demand and demand[0] <= 700 or spot and spot[1] <= 700
    assert any(demand and demand[0] > 700 for demand in costs)
    words = ["--recommend", "--tokens", "20B", "--days", "30", "--budget", "5000"]
    code, said = plan(capsys, "recipes/llama3-8b.yaml", *words)
    assert code == 0 and said.startswith("20B tokens in 30 days for $5,000") and "v6e-" in said
    code, said = plan(capsys, "recipes/llama3-8b.yaml", "--recommend", "--days", "1", "--budget", "1")
    assert code == 3 and "no slice does it" in said


def test_the_smallest_slice_holds_a_recipe_and_the_one_before_does_not() -> None:
    cfg = recipe.load("recipes/gemma2-9b-32k.yaml")
    for chip in chips.TPUS:
        smallest = advise.smallest(cfg, chip)
        all_of_them = slices.sizes(chip)
        place = all_of_them.index(smallest) if smallest else len(all_of_them)
        if smallest is not None:
            made = list(search.candidates(cfg, smallest, room=1.0))
            assert made and all(
                arithmetic.estimate(one, smallest).hbm_bytes * chip.devices <= chip.usable for _, one in made
            )
        assert place == 0 or not list(search.candidates(cfg, all_of_them[place - 1], room=1.0))


def test_the_settings_that_are_found_are_the_best_of_all_that_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--slice", "v5p-32", "--search", "--fast", "--write", str(tmp_path / "best.yaml")]
    code, said = plan(capsys, "recipes/llama3-8b.yaml", *words)
    assert code == 0 and "the best settings: mesh.fsdp=" in said, said
    where, best = slices.parse("v5p-32"), recipe.load(tmp_path / "best.yaml")
    seconds = arithmetic.estimate(best, where).step_seconds
    found = list(search.candidates(recipe.load("recipes/llama3-8b.yaml"), where, room=1.0))
    assert len(found) > 10 and seconds == min(one[0] for one in found)
    code, said = plan(capsys, "recipes/dense-600b.yaml", "--slice", "v4-32", "--search", "--fast")
    assert code == 3 and "no mesh, remat and batch.accumulate make the recipe fit v4-32" in said
    short = ["--slice", "v5e-4", "--search", "--fast", "model.vocab=4096", "data.sequence_length=64"]
    code, said = plan(capsys, "recipes/demo.yaml", *short)
    assert code == 0, said


def test_settings_that_the_compiler_refuses_are_tried_in_more_parts_and_the_best_with_other_tiles(
    tmp_path: Path,
) -> None:
    cfg, where = recipe.load("recipes/llama3-8b.yaml"), slices.parse("v5p-32")
    asked: list[sections.Run] = []

    def judge(tried: sections.Run, folder: Path) -> float | None:
        asked.append(tried)
        if tried.batch.accumulate < 32:
            return None
        tiles = getattr(tried.attention, "block_q", 1024)
        return arithmetic.estimate(tried, where).step_seconds - (0.1 if tiles == 2048 else 0.0)

    best, seconds = search.search(cfg, where, judge, tmp_path, exact=False)
    assert best.batch.accumulate >= 32 and best.attention.block_q == 2048
    refused = [one for one in asked if one.batch.accumulate < 32]
    assert refused
    tiled = [one for one in asked if one.attention != cfg.attention]
    taken = [one for one in asked if one not in refused and one not in tiled]
    slowest = max(arithmetic.estimate(one, where).step_seconds for one in taken)
    for one in refused:  # each was asked about again, in the next larger number of parts, if these are fast
        again = [two for two in asked if (two.mesh, two.memory) == (one.mesh, one.memory)]
        ((expected, _),) = search.finer(one, where)
        assert max(two.batch.accumulate for two in again) > one.batch.accumulate or expected >= slowest
    assert [one.attention.block_q for one in tiled] == list(search.TILES)
    assert len(asked) - len(refused) - len(tiled) == search.ASKED
    assert search.overrides(cfg, best)[-3:] == [
        "attention.use=splash",
        "attention.block_q=2048",
        "attention.block_kv=2048",
    ]


@pytest.mark.thin(2)
@pytest.mark.parametrize("wish", [[], ["--tokens", "20B"], ["--days", "30"], ["--budget", "50000"]])
def test_any_part_of_a_wish_is_answered_with_the_settings_it_takes(
    capsys: pytest.CaptureFixture[str], wish: list[str]
) -> None:
    code, said = plan(capsys, "recipes/llama3-8b.yaml", "--recommend", *wish)
    assert code == 0 and "with mesh.fsdp=" in said
    assert all(word in said for word in wish[1:] if word != "50000")


@pytest.mark.parametrize(
    "words, says",
    [
        ("--slice v5p-32 --days 0", "--days: found 0, expected a number above 0"),
        ("--recommend --budget -5", "--budget: found -5"),
        ("--recommend --tokens many", "--tokens: found many, expected a number, as in 20B"),
        ("--slice v5p-32 --fast --save x", "--save has no effect"),
        ("--slice v5p-32 --fast --write x.yaml", "--write has no effect"),
        ("--slice v5p-32 --days inf", "--days: found inf"),
        ("--recommend --tokens 0", "--tokens: found 0"),
        ("--recommend --tokens 1.2.3B", "--tokens: found 1.2.3B"),
        ("--slice v5p-32 --fast --json nowhere/x.json", "--json: no such folder: nowhere"),
        ("--slice v5p-32 --fast --json docs", "--json: found the folder docs, expected a file"),
        ("--slice v5p-32 --fast --search --write README.md", "--write: README.md is there already"),
        ("--recommend --json x.json", "--json has no effect"),
        ("--slice v5p-32 --slice v4-32 --search", "--search takes one --slice"),
        ("--slice 2xv5e-256 --fast batch.accumulate=1", "set mesh.data=2"),
        ("", "expected --slice NAME"),
    ],
)
def test_options_that_mean_nothing_are_told(
    capsys: pytest.CaptureFixture[str], words: str, says: str
) -> None:
    code, said = plan(capsys, "recipes/llama3-8b.yaml", *words.split())
    assert code == 2 and says in said


def test_a_mistake_with_one_slice_is_told_before_the_first_is_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = str(tmp_path / "x.json")
    code, said = plan(
        capsys, "recipes/llama3.2-1b.yaml", "--slice", "v5p-8", "--slice", "v5p-32", "--fast", "--json", out
    )
    assert code == 2 and "cannot be shared by the 16 devices" in said and "fits" not in said


def test_a_plan_says_when_it_takes_longer_than_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    words = "recipes/llama3-8b.yaml", "--slice", "v5p-32", "--fast"
    assert "times the 1 days there are" in plan(capsys, *words, "--days", "1")[1]
    for enough in (["--days", "1000"], []):
        assert "there are" not in plan(capsys, *words, *enough)[1]


def test_a_wish_that_no_slice_fulfils_is_told_what_comes_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = plan(capsys, "recipes/llama3-8b.yaml", "--recommend", "--days", "1", "--budget", "10")
    assert code == 3 and "no slice does it" in said
    assert "the cheapest is v" in said and "the fastest is " in said


def test_the_vocabulary_of_a_plan_comes_from_the_data_where_it_is_there(
    capsys: pytest.CaptureFixture[str], tiny: Any
) -> None:
    cfg = tiny()
    words = [f"data.path={cfg.data.path}", f"data.sequence_length={cfg.data.sequence_length}"]
    code, said = plan(capsys, "recipes/demo.yaml", "--slice", "v3-8", "--fast", *words)
    assert code == 0 and "4 chips of v3, each two devices" in said
    code, said = plan(capsys, "recipes/demo.yaml", "--slice", "v3-8", "--fast", "data.path=nowhere")
    assert code == 2 and "since the data, nowhere, is not there" in said


@pytest.mark.parametrize(
    "shape, what",
    [
        ((128256, 4096), "vocabulary's matrix"),
        ((167, 768, 4096), "vocabulary's matrix"),  # 167 x 768 is 128,256
        ((2, 8192, 4096), "states of one layer"),
        ((2, 32, 8192, 128), "states of one layer"),
        ((4096, 14336), "gathered weights"),
    ],
)
def test_a_shape_that_is_folded_keeps_its_meaning(shape: tuple[int, ...], what: str) -> None:
    cfg = recipe.load("recipes/llama3-8b.yaml", ["batch.sequences=32", "batch.accumulate=1"])
    assert what in memory.meaning("f32", shape, cfg, dict(data=1, fsdp=16, tensor=1, context=1, expert=1))[0]


def test_buffers_are_named_by_what_their_shapes_mean(tmp_path: Path) -> None:
    (tmp_path / "module.memory-usage-report.txt").write_text(REPORT)
    cfg = recipe.load("recipes/llama3-8b.yaml", ["batch.sequences=32", "batch.accumulate=1"])
    found = memory.largest(tmp_path, cfg, dict(data=1, fsdp=16, tensor=1, context=1, expert=1))
    assert [(one.count, one.bytes) for one in found] == [
        (1, 4 * 2**30),
        (2, 4 * 128256 * 4096),
        (1, 4 * 2048 * 128256),
        (2, 2 * 2 * 8192 * 14336),
    ]
    assert [one.what.split()[0] for one in found] == ["kept", "gradient", "logits", "hidden"]
    assert "batch.accumulate" in found[0].key and found[2].key == "loss.chunk"


@pytest.mark.slow
def test_the_compiler_has_the_last_word(libtpu: None, tmp_path: Path) -> None:
    small = ["model.layers=2", "model.vocab=4096", "batch.sequences=8", "batch.accumulate=1"]
    cfg = recipe.load("recipes/llama3.2-1b.yaml", [*small, "data.sequence_length=1024", "memory.remat=full"])
    where = slices.parse("v5e-8")
    made, guess = compiler.compile(cfg, where, tmp_path / "fits"), arithmetic.estimate(cfg, where)
    assert made.fits and made.mesh["fsdp"] == 8
    assert (made.weight_bytes, made.optimizer_bytes) == (guess.weight_bytes, guess.optimizer_bytes)
    assert made.frozen_bytes == 0
    assert 0.5 < made.temp_bytes / guess.temp_bytes < 2
    assert memory.largest(tmp_path / "fits" / "dump", cfg, made.mesh)
    assert list((tmp_path / "fits").glob("*.program"))
    uneven = recipe.load("recipes/llama3.2-1b.yaml", [*small[:2], "batch.sequences=12", "batch.accumulate=1"])
    with pytest.raises(UserError, match="12 rows at a time cannot be shared"):  # not what was found before
        compiler.compile(uneven, where, tmp_path / "fits")
    with pytest.raises(UserError, match="cuts paths at spaces"):
        compiler.compile(uneven, where, tmp_path / "a b")
    large = recipe.load(
        "recipes/llama3-8b.yaml", ["batch.sequences=32", "batch.accumulate=1", "model.layers=64"]
    )
    made = compiler.compile(large, slices.parse("v5e-16"), tmp_path / "large")
    assert not made.fits and made.hbm_bytes > where.chip.usable and "exceeds available HBM" in made.complaint
