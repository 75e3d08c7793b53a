"""Plans: arithmetic compared with sums by hand and with the compiler; messages; limits that cannot be met."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.attention import splash
from headrace.cli import main as cli_main
from headrace.config import recipe, sections
from headrace.errors import UserError
from headrace.hardware import chips, slices
from headrace.plan import aot, attention_cost, buffers, estimate, recommend, search
from headrace.plan.device_memory import DeviceShare

ONE_A_CHIP = ["batch.sequences=16", "batch.microbatches=1"]
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
    code = cli_main.main(["plan", *words])
    out, err = capsys.readouterr()
    return code, " ".join((out + err).split())


def test_the_state_is_counted_to_the_byte() -> None:
    cfg = recipe.load("recipes/llama3-8b.yaml", ONE_A_CHIP)
    found = estimate.estimate_step(cfg, slices.parse_slice("v5p-32"))
    parameters = 8_030_261_248
    assert found.parameters == parameters
    # Everything is split by 16 but two counters.
    assert found.weight_bytes == 4 * parameters // 16
    assert 0 <= found.optimizer_bytes - 8 * parameters // 16 <= 8
    assert found.hbm_bytes == found.argument_bytes + found.temp_bytes


def test_a_step_takes_at_least_as_long_as_its_matmuls_at_the_peak() -> None:
    cfg = recipe.load("recipes/llama3-8b.yaml", ["batch.sequences=256", "batch.microbatches=1"])
    for name in ("v4-128", "v5e-256", "v5p-256", "v6e-256", "gpu:h100x64"):
        where = slices.parse_slice(name)
        found = estimate.estimate_step(cfg, where)
        least = 256 * 8192 * found.flops_per_token / (where.chips * where.chip.flops)
        assert found.step_seconds > least


@pytest.mark.parametrize("remat", ["none", "full"])
def test_8_bit_matmuls_count_at_the_rate_that_the_chip_has_for_them(remat: str) -> None:
    """All three matmuls of a layer's matrices are in fp8, two in int8; attention and head are not.

    The last matrix of a layer is not recomputed."""
    last = 32 * 4096 * 14336
    weights = 32 * 4096 * 2 * (32 + 8) * 128 + 3 * last

    def seconds(name: str, products: str) -> float:
        overrides = [*ONE_A_CHIP, f"compute.remat={remat}", f"compute.matmul={products}"]
        cfg = recipe.load("recipes/llama3-8b.yaml", overrides)
        return estimate.estimate_step(cfg, slices.parse_slice(name)).matrix_seconds

    for name, products, count in (("gpu:h200x16", "fp8", 3), ("v5e-16", "int8", 2)):
        where = slices.parse_slice(name)
        efficiency, rate = estimate.efficiency_of(where), where.chip.matmul_flops(products)
        assert rate == pytest.approx(2 * where.chip.flops, rel=0.01)
        narrow_flops_per_token = 2 * (count * weights + (weights - last) * (remat == "full"))
        inverse = 1 / (efficiency.matmul * where.chip.flops) - 1 / (efficiency.narrow_matmul * rate)
        saved = 8192 * narrow_flops_per_token * inverse
        assert seconds(name, "compute") - seconds(name, products) == pytest.approx(saved, rel=0.005)
    for name, products in (("gpu:a100x16", "fp8"), ("v4-32", "int8"), ("v5e-16", "fp8")):
        assert seconds(name, products) == pytest.approx(seconds(name, "compute"))


def test_a_plan_shows_whether_8_bit_matmuls_are_faster(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("recipes/llama3-8b.yaml", "--fast", "--slice", "gpu:h200x8", "--slice", "v5e-64")
    _, output = plan(capsys, *words, "batch.sequences=64", "batch.microbatches=1", "compute.matmul=fp8")
    assert "MFU is relative to the 989 TFLOP/s of bf16, in fp8 as well" in output
    assert "fp8 gains nothing on v5e, whose matmuls in it are no faster; compute.matmul=int8 is" in output


SHORT = "model.layers=4 model.vocab=16384 batch.sequences=32 batch.microbatches=1 compute.remat="
FULL = "batch.sequences=32 batch.microbatches=1 compute.remat=full"
SEVEN = "model.layers=32 model.embed=4096 model.heads=32 model.kv_heads=32 model.head_dim=128 model.mlp=11008"


@pytest.mark.parametrize(
    ("name", "where", "settings", "seconds"),
    [  # by the compiler (libtpu 0.0.51), and as measured on an H200: docs/planning.md, docs/performance.md
        ("llama3-8b", "v5p-32", FULL, 3.15),
        ("llama3-8b", "v6e-16", FULL, 2.41),
        ("llama3-8b", "v4-32", FULL, 5.43),
        ("lunaris-270m", "v4-32", f"{SEVEN} batch.microbatches=4", 4.99),
        ("llama3.2-1b", "v5e-8", f"{SHORT}none", 0.270),
        ("llama3.2-1b", "v5e-8", f"{SHORT}dots", 0.283),
        ("llama3.2-1b", "v5e-8", f"{SHORT}attention", 0.292),
        ("llama3.2-1b", "v5e-8", f"{SHORT}full", 0.308),
        ("llama3.2-1b", "gpu:h200x1", "batch.sequences=8 batch.microbatches=1", 8 * 4096 / 64_850),
        (
            "llama3.2-1b",
            "gpu:h200x1",
            "batch.sequences=8 batch.microbatches=1 compute.matmul=fp8 loss.backend=fp8",
            8 * 4096 / 81_500,
        ),
        (
            "llama3.2-1b",
            "gpu:h200x1",
            "batch.sequences=1 batch.microbatches=1 data.sequence_length=131072 compute.remat=full",
            131_072 / 9_700,
        ),
    ],
)
def test_arithmetic_is_near_the_compiler_and_measurements(
    name: str, where: str, settings: str, seconds: float
) -> None:
    cfg = recipe.load(f"recipes/{name}.yaml", settings.split())
    assert estimate.estimate_step(cfg, slices.parse_slice(where)).step_seconds == pytest.approx(
        seconds, rel=0.05
    )


def test_tiles_at_the_ends_of_a_mask_are_half_empty() -> None:
    """Half a tile more per query in causal rows, one tile with a window in both directions, none without a
    mask; never more than the row."""
    gpu = slices.parse_slice("gpu:h200x1")
    visited = lambda name, *more, where=gpu: attention_cost.tile_overhead(
        recipe.load(f"recipes/{name}.yaml", list(more)), where
    )
    assert visited("llama3.2-1b") == 1 + 1024 / 4096
    assert visited("eurobert-210m") == visited("deberta-v3-base") == 1
    long = ["data.sequence_length=8192", "batch.ramp=0", "batch.ramp_from=0"]
    full, windowed = (
        8,
        14,
    )  # every third of 22 layers attends to the whole row, the others to 64 keys per side
    unmasked = full * 8192 + windowed * 129
    assert visited("modernbert-base", *long) == pytest.approx(
        (unmasked + windowed * 1024) / unmasked, rel=0.01
    )
    computed = full * 8192 + windowed * 384  # by kernels: 128 queries and as many keys per side
    assert visited("modernbert-base", *long, where=slices.parse_slice("v5e-8")) == pytest.approx(
        computed / unmasked, rel=0.01
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
def test_layers_with_a_window_are_counted_by_the_growth_of_flops(name: str, layers: int) -> None:
    """Rounds of recurrent depth and generators do not count, though they make FLOPs grow."""
    cfg = recipe.load(f"recipes/{name}.yaml")
    assert attention_cost.count_window_layers(cfg) == pytest.approx(layers, abs=1e-3)
    where = slices.parse_slice("v5e-8")
    assert attention_cost.tile_overhead(cfg, where) >= 1
    assert (attention_cost.find_band_layers(cfg, where) is not None) == (name == "modernbert-base")


def test_a_plan_has_one_kernel_for_all_gradients_where_splash_fuses_them() -> None:
    """At most four tiles of keys, whose sides divide the row and are shorter for wide heads."""
    found = {
        (length, head): splash.has_fused_gradients(length, head)
        for length in (2048, 2176, 4096)
        for head in (64, 256)
    }
    assert [key for key, fuses in found.items() if fuses] == [(2048, 64), (2048, 256), (4096, 64)]
    cfg = lambda length: recipe.load("recipes/eurobert-210m.yaml", [f"data.sequence_length={length}"])
    where = slices.parse_slice("v5e-8")
    each = [
        attention_cost.estimate_attention(cfg(n), where) / attention_cost.count_scores(cfg(n), where)
        for n in (2048, 2176)
    ]
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
def test_a_plan_counts_the_keys_that_band_kernels_compute(name: str, window: int, keys: int | None) -> None:
    cfg = recipe.load(f"recipes/{name}.yaml", [f"model.window={window}"])
    found = attention_cost.find_band_layers(cfg, slices.parse_slice("v5e-8"))
    assert found == (None if keys is None else (14, keys))


def test_a_plan_counts_the_bytes_that_activations_save() -> None:
    """DeBERTa's MLP, 64 rows of 512 per chip in 4 layers with 3,072 hidden units: 16 bits of each are saved,
    one more for relu_bits, and only that one if w_down is frozen."""
    alone = "model.generator_layers=0 model.mask_decoder=false objective=null objective.use=masked"
    alone += " objective.mask_rate=0.15"
    alone += " model.layers=4 model.vocab=32768 batch.sequences=512 batch.microbatches=1 batch.ramp=0"
    alone += " batch.ramp_from=0 data.sequence_length=512 compute.remat=none"

    def temporaries(activation: str, *more: str) -> int:
        cfg = recipe.load(
            "recipes/deberta-v3-base.yaml", [*alone.split(), f"model.activation={activation}", *more]
        )
        return estimate.estimate_step(cfg, slices.parse_slice("v5e-8")).temp_bytes

    units, frozen = 4 * 64 * 512 * 3072, "freeze=blocks.w_down"
    gradient = temporaries("relu") - temporaries("relu", frozen)
    assert 0 < gradient <= 4 * 4 * 3072 * 768 / 8
    assert temporaries("gelu") == temporaries("relu") == temporaries("relu2")
    assert temporaries("relu_bits") - temporaries("relu") == units // 8
    assert temporaries("gelu_bits") - temporaries("relu") == units // 4
    assert temporaries("relu", frozen) - temporaries("relu_bits", frozen) == 2 * units - units // 8
    assert temporaries("relu", "compute.matmul=fp8") < temporaries("gelu", "compute.matmul=fp8")


def test_traffic_between_chips_follows_from_its_bytes_and_links() -> None:
    """Weights are gathered twice in bf16 and gradients summed in float32. v5p-32 is 2 x 2 x 4 chips and no
    ring, so that a chip has a link in each dimension, of which 86 % can be used. Nothing hides it."""
    where = slices.parse_slice("v5p-32")
    cfg = recipe.load("recipes/llama3-8b.yaml", [*ONE_A_CHIP, "data.sequence_length=512"])
    found = estimate.estimate_step(cfg, where)
    traffic = 8_030_261_248 * (2 + 2 + 4) * 15 / 16 / (0.86 * 300e9)
    assert found.exposed_seconds == pytest.approx(traffic, rel=1e-3)
    assert [
        slices.parse_slice(name).links_per_chip for name in ("v4-128", "v5e-256", "v5e-8", "v5p-8", "v6e-1")
    ] == [
        6,
        4,
        2,
        2,
        0,
    ]
    # Behind a switch it hides behind nine tenths of the other work.
    eight = estimate.estimate_step(cfg, slices.parse_slice("gpu:h200x16"))
    busy = eight.matrix_seconds + eight.attention_seconds + eight.memory_seconds
    traffic = 8_030_261_248 * (2 + 2 + 4) * 15 / 16 / (0.8 * 450e9)
    traffic += 2 * 4 * 8_030_261_248 / 8 / 50e9
    assert eight.exposed_seconds == pytest.approx(max(traffic - 0.9 * busy, 0.1 * traffic), rel=1e-3)
    two = recipe.load(
        "recipes/llama3-8b.yaml", ["mesh.data=2", "batch.sequences=512", "batch.microbatches=1"]
    )
    sizes = dict(data=2, fsdp=256, tensor=1, context=1, expert=1)
    alone, joined = (
        estimate.estimate_traffic(two, where, sizes, DeviceShare.from_recipe(two, where, sizes), 2**33)
        for where in map(slices.parse_slice, ("v5p-1024", "2xv5p-512"))
    )
    assert joined - alone == pytest.approx(2 * 4 * 2**33 / 256 / 6.25e9)


def test_saved_bytes_grow_from_remat_full_to_none() -> None:
    where = slices.parse_slice("v5p-32")
    sizes = [
        estimate.estimate_step(
            recipe.load("recipes/llama3-8b.yaml", [*ONE_A_CHIP, f"compute.remat={name}"]), where
        )
        for name in ("full", "attention", "offload", "dots", "none")
    ]
    full, attention, offload, dots, none = (one.temp_bytes for one in sizes)
    assert full < attention < dots < none
    assert full < offload < dots  # one layer is on its way
    assert sizes[0].step_seconds > sizes[-1].step_seconds and sizes[0].step_seconds > sizes[1].step_seconds
    # For 8,192 tokens in each of 32 layers: a matmul of the width, two of the MLP, queries, keys, values.
    assert sizes[2].host_bytes == 2 * 8192 * 32 * (4096 + 2 * 14336 + 6144)
    assert not any(one.host_bytes for one in sizes if one is not sizes[2])


def test_a_plan_shows_bytes_in_the_hosts_memory(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--slice", "v5p-32", "--fast", "compute.remat=offload", *ONE_A_CHIP]
    code, output = plan(capsys, "recipes/llama3-8b.yaml", *words)
    assert code == 0 and "19.00 GiB in the host's memory, 76.00 GiB for its 4 chips" in output
    assert "to the host and back, not hidden" in output


@pytest.mark.parametrize("parts", [1, 2])
def test_a_plan_shows_no_gradients_for_frozen_weights(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, parts: int
) -> None:
    """w_down is 32 x 14,336 x 4,096 of 8,030,261,248 weights, a sixteenth of each on a chip."""
    words = ["--slice", "v5p-32", "--fast", "--json", str(tmp_path / "plan.json")]
    words += [f"batch.sequences={16 * parts}", f"batch.microbatches={parts}"]
    code, output = plan(capsys, "recipes/llama3-8b.yaml", *words, "freeze=blocks.w_down")
    found = json.loads((tmp_path / "plan.json").read_text())[0]
    frozen_bytes = 4 * 32 * 14336 * 4096 // 16
    assert code == 0 and found["frozen_bytes"] == frozen_bytes
    gradients = (found["weight_bytes"] - frozen_bytes) * parts / 2**30
    sums = ", and their sums over microbatches" if parts > 1 else ""
    assert f"{gradients:.2f} GiB gradients in float32{sums}; 0.44 GiB of the weights are frozen" in output
    _, output = plan(capsys, "recipes/llama3-8b.yaml", *words)
    assert f"{found['weight_bytes'] * parts / 2**30:.2f} GiB gradients" in output and "frozen" not in output


def test_a_plan_is_printed_and_written_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--slice", "v5p-32", "--slice", "gpu:h200x8", "--fast", "--json", str(tmp_path / "plan.json")]
    code, output = plan(capsys, "recipes/llama3-8b.yaml", *words, *ONE_A_CHIP)
    assert code == 0, output
    assert "v5p-32: 16 v5p chips, fsdp 16; 16 rows of 8192 at a time" in output
    assert "on demand or $" in output and "price of this chip not known" in output
    first, second = json.loads((tmp_path / "plan.json").read_text())
    assert (first["slice"], first["chips"], first["fits"]) == ("v5p-32", 16, True)
    assert first["hbm_bytes"] == first["argument_bytes"] + first["temp_bytes"]
    seconds, rate = first["step_seconds"], first["tokens_per_second_per_chip"]
    assert rate == pytest.approx(16 * 8192 / seconds / 16)
    assert first["mfu"] == pytest.approx(rate * 51_471_998_976 / 459e12)
    assert first["days"] == pytest.approx(first["tokens"] / (16 * rate) / 86400)
    assert first["dollars"]["on_demand"][0] == pytest.approx(first["days"] * 24 * 16 * 4.2)
    assert second["dollars"]["spot"] is None


def test_a_recipe_that_does_not_fit_exits_with_3_and_advice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--slice", "v5e-16", "--fast", "batch.sequences=64", "batch.microbatches=1"]
    code, output = plan(capsys, "recipes/llama3-8b.yaml", *words)
    assert code == 3 and "does not fit" in output and "try batch.microbatches=2, then --search" in output


def test_an_impossible_plan_shows_by_how_much_it_misses(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = plan(capsys, "recipes/dense-600b.yaml", "--slice", "v4-32", "--days", "30")
    assert code == 3
    assert "604B parameters of 16 bytes" in output
    assert "take 8,999.61 GiB, 16 chips have 492.00 GiB: 18.3 times too much" in output
    assert "times 30 days" in output and "the smallest slices that hold it: v5p-512" in output
    assert "in 30 days v4-32 can train 6.54B parameters on 131B tokens" in output


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--slice", "v5p-33"], "slice: found v5p-33, expected a size such as v5p-32"),
        ([], "plan: expected --slice NAME"),
        (["--slice", "v5p-32", "model.vocab=0"], "model.vocab: expected the size of the vocabulary"),
        (
            ["--slice", "v5p-32", "batch.sequences=24", "batch.microbatches=1"],
            "24 rows at a time cannot be split",
        ),
        (["--slice", "v5p-64", "batch.sequences=64", "batch.microbatches=4"], "set batch.microbatches=2"),
        (["--slice", "v5p-64", "batch.sequences=24", "batch.microbatches=1"], "to a multiple of 32"),
        (["--slice", "v5p-32", "--prices", "none.yaml"], "none.yaml: found no file"),
    ],
)
def test_mistakes_exit_with_2_and_a_message(
    capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    code, output = plan(capsys, "recipes/llama3-8b.yaml", "--fast", *words)
    assert code == 2 and why in output, output


def test_slices_are_recommended_within_days_and_dollars(capsys: pytest.CaptureFixture[str]) -> None:
    cfg = recipe.load("recipes/llama3.2-1b.yaml")
    found = recommend.find_offers(cfg, chips.load_prices(), days=3, budget=700)
    assert found and all(one.days <= 3 for one in found)
    costs = [one.dollars["on_demand"] for one in found]
    assert [cost[0] for cost in costs if cost] == sorted(cost[0] for cost in costs if cost)
    tighter = recommend.find_offers(cfg, chips.load_prices(), days=1, budget=700)
    assert {one.slice_shape.name for one in tighter} < {one.slice_shape.name for one in found}
    for one in found:  # within the budget at the lowest price on demand, or at the highest spot price
        demand, spot = one.dollars["on_demand"], one.dollars["spot"]
        assert (demand and demand[0] <= 700) or (spot and spot[1] <= 700)
    assert any(demand and demand[0] > 700 for demand in costs)
    words = ["--recommend", "--tokens", "20B", "--days", "30", "--budget", "5000"]
    code, output = plan(capsys, "recipes/llama3-8b.yaml", *words)
    assert code == 0 and output.startswith("20B tokens in 30 days for $5,000") and "v6e-" in output
    code, output = plan(capsys, "recipes/llama3-8b.yaml", "--recommend", "--days", "1", "--budget", "1")
    assert code == 3 and "no slice does it" in output


def test_the_smallest_slice_holds_a_recipe_and_the_next_smaller_does_not() -> None:
    cfg = recipe.load("recipes/gemma2-9b-32k.yaml")
    for chip in chips.TPUS:
        smallest = recommend.find_smallest_slice(cfg, chip)
        all_of_them = slices.standard_slices(chip)
        place = all_of_them.index(smallest) if smallest else len(all_of_them)
        if smallest is not None:
            made = list(search.iter_candidates(cfg, smallest, memory_factor=1.0))
            assert made and all(
                estimate.estimate_step(one, smallest).hbm_bytes * chip.devices <= chip.usable_bytes
                for _, one in made
            )
        assert place == 0 or not list(search.iter_candidates(cfg, all_of_them[place - 1], memory_factor=1.0))


def test_search_finds_the_fastest_settings_that_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--slice", "v5p-32", "--search", "--fast", "--write", str(tmp_path / "best.yaml")]
    code, output = plan(capsys, "recipes/llama3-8b.yaml", *words)
    assert code == 0 and "the best settings: mesh.fsdp=" in output, output
    where, best = slices.parse_slice("v5p-32"), recipe.load(tmp_path / "best.yaml")
    seconds = estimate.estimate_step(best, where).step_seconds
    found = list(search.iter_candidates(recipe.load("recipes/llama3-8b.yaml"), where, memory_factor=1.0))
    assert len(found) > 10 and seconds == min(one[0] for one in found)
    code, output = plan(capsys, "recipes/dense-600b.yaml", "--slice", "v4-32", "--search", "--fast")
    assert code == 3 and "no mesh, remat and batch.microbatches make the recipe fit v4-32" in output
    short = ["--slice", "v5e-4", "--search", "--fast", "model.vocab=4096", "data.sequence_length=64"]
    code, output = plan(capsys, "recipes/demo.yaml", *short)
    assert code == 0, output


def test_search_tries_more_microbatches_where_the_compiler_refuses_and_tiles_for_the_best(
    tmp_path: Path,
) -> None:
    cfg, where = recipe.load("recipes/llama3-8b.yaml"), slices.parse_slice("v5p-32")
    compiled: list[sections.TrainRecipe] = []

    def compile_candidate(tried: sections.TrainRecipe, folder: Path) -> float | None:
        compiled.append(tried)
        if tried.batch.microbatches < 32:
            return None
        tiles = getattr(tried.attention, "block_q", 1024)
        return estimate.estimate_step(tried, where).step_seconds - (0.1 if tiles == 2048 else 0.0)

    best, _seconds = search.search_settings(cfg, where, compile_candidate, tmp_path, exact=False)
    assert best.batch.microbatches >= 32 and best.attention.block_q == 2048
    refused = [one for one in compiled if one.batch.microbatches < 32]
    assert refused
    tiled = [one for one in compiled if one.attention != cfg.attention]
    taken = [one for one in compiled if one not in refused and one not in tiled]
    slowest = max(estimate.estimate_step(one, where).step_seconds for one in taken)
    for (
        one
    ) in refused:  # each was compiled again with the next larger number of microbatches, if that is fast
        again = [two for two in compiled if (two.mesh, two.compute) == (one.mesh, one.compute)]
        ((expected, _),) = search.raise_microbatches(one, where)
        assert max(two.batch.microbatches for two in again) > one.batch.microbatches or expected >= slowest
    assert [one.attention.block_q for one in tiled] == list(search.TILES)
    assert len(compiled) - len(refused) - len(tiled) == search.COMPILED_CANDIDATES
    assert search.list_overrides(cfg, best)[-3:] == [
        "attention.use=splash",
        "attention.block_q=2048",
        "attention.block_kv=2048",
    ]


@pytest.mark.thin(2)
@pytest.mark.parametrize("wish", [[], ["--tokens", "20B"], ["--days", "30"], ["--budget", "50000"]])
def test_recommendations_have_the_settings_they_need(
    capsys: pytest.CaptureFixture[str], wish: list[str]
) -> None:
    code, output = plan(capsys, "recipes/llama3-8b.yaml", "--recommend", *wish)
    assert code == 0 and "with mesh.fsdp=" in output
    assert all(word in output for word in wish[1:] if word != "50000")


@pytest.mark.parametrize(
    "words, message",
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
        ("--slice v5p-32 --fast --search --write README.md", "--write: README.md already exists"),
        ("--recommend --json x.json", "--json has no effect"),
        ("--slice v5p-32 --slice v4-32 --search", "--search takes one --slice"),
        ("--slice 2xv5e-256 --fast batch.microbatches=1", "set mesh.data=2"),
        ("", "expected --slice NAME"),
    ],
)
def test_options_without_effect_are_refused(
    capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    code, output = plan(capsys, "recipes/llama3-8b.yaml", *words.split())
    assert code == 2 and message in output


def test_a_mistake_with_any_slice_is_reported_before_the_first_is_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = str(tmp_path / "x.json")
    code, output = plan(
        capsys, "recipes/llama3.2-1b.yaml", "--slice", "v5p-8", "--slice", "v5p-32", "--fast", "--json", out
    )
    assert code == 2 and "cannot be split over the 16 devices" in output and "fits" not in output


def test_a_plan_shows_when_it_takes_longer_than_the_available_days(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "recipes/llama3-8b.yaml", "--slice", "v5p-32", "--fast"
    assert "times the available 1 days" in plan(capsys, *words, "--days", "1")[1]
    for enough in (["--days", "1000"], []):
        assert "available" not in plan(capsys, *words, *enough)[1]


def test_limits_that_no_slice_meets_are_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = plan(capsys, "recipes/llama3-8b.yaml", "--recommend", "--days", "1", "--budget", "10")
    assert code == 3 and "no slice does it" in output
    assert "the cheapest is v" in output and "the fastest is " in output


def test_the_vocabulary_of_a_plan_comes_from_the_data_if_present(
    capsys: pytest.CaptureFixture[str], tiny: Any
) -> None:
    cfg = tiny()
    words = [f"data.path={cfg.data.path}", f"data.sequence_length={cfg.data.sequence_length}"]
    code, output = plan(capsys, "recipes/demo.yaml", "--slice", "v3-8", "--fast", *words)
    assert code == 0 and "4 v3 chips, two devices each" in output
    code, output = plan(capsys, "recipes/demo.yaml", "--slice", "v3-8", "--fast", "data.path=nowhere")
    assert code == 2 and "since there is no data in nowhere" in output


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
def test_a_reshaped_buffer_keeps_its_meaning(shape: tuple[int, ...], what: str) -> None:
    cfg = recipe.load("recipes/llama3-8b.yaml", ["batch.sequences=32", "batch.microbatches=1"])
    assert (
        what
        in buffers.classify_shape("f32", shape, cfg, dict(data=1, fsdp=16, tensor=1, context=1, expert=1))[0]
    )


def test_buffers_are_described_by_their_shapes(tmp_path: Path) -> None:
    (tmp_path / "module.memory-usage-report.txt").write_text(REPORT)
    cfg = recipe.load("recipes/llama3-8b.yaml", ["batch.sequences=32", "batch.microbatches=1"])
    found = buffers.find_largest_buffers(tmp_path, cfg, dict(data=1, fsdp=16, tensor=1, context=1, expert=1))
    assert [(one.count, one.bytes) for one in found] == [
        (1, 4 * 2**30),
        (2, 4 * 128256 * 4096),
        (1, 4 * 2048 * 128256),
        (2, 2 * 2 * 8192 * 14336),
    ]
    assert [one.what.split()[0] for one in found] == ["saved", "gradient", "logits", "hidden"]
    assert "batch.microbatches" in found[0].key and found[2].key == "loss.chunk_size"


@pytest.mark.slow
def test_the_compiler_decides_what_fits(libtpu: None, tmp_path: Path) -> None:
    small = ["model.layers=2", "model.vocab=4096", "batch.sequences=8", "batch.microbatches=1"]
    cfg = recipe.load("recipes/llama3.2-1b.yaml", [*small, "data.sequence_length=1024", "compute.remat=full"])
    where = slices.parse_slice("v5e-8")
    made, guess = aot.compile_step(cfg, where, tmp_path / "fits"), estimate.estimate_step(cfg, where)
    assert made.fits and made.mesh["fsdp"] == 8
    assert (made.weight_bytes, made.optimizer_bytes) == (guess.weight_bytes, guess.optimizer_bytes)
    assert made.frozen_bytes == 0
    assert 0.5 < made.temp_bytes / guess.temp_bytes < 2
    assert buffers.find_largest_buffers(tmp_path / "fits" / "dump", cfg, made.mesh)
    assert list((tmp_path / "fits").glob("*.program"))
    uneven = recipe.load(
        "recipes/llama3.2-1b.yaml", [*small[:2], "batch.sequences=12", "batch.microbatches=1"]
    )
    with pytest.raises(UserError, match="12 rows at a time cannot be split"):  # not the earlier result
        aot.compile_step(uneven, where, tmp_path / "fits")
    with pytest.raises(UserError, match="cuts paths at spaces"):
        aot.compile_step(uneven, where, tmp_path / "a b")
    large = recipe.load(
        "recipes/llama3-8b.yaml", ["batch.sequences=32", "batch.microbatches=1", "model.layers=64"]
    )
    made = aot.compile_step(large, slices.parse_slice("v5e-16"), tmp_path / "large")
    assert (
        not made.fits
        and made.hbm_bytes > where.chip.usable_bytes
        and "exceeds available HBM" in made.error_text
    )
