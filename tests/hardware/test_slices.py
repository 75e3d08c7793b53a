"""Slices by name, against Google's tables and the TPU compiler itself; the table of chips; prices."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jax.experimental.pallas import tpu as pallas

from headrace.errors import UserError
from headrace.hardware import chips
from headrace.hardware.chips import CHIPS, GIB, GPUS, TPUS, Price, load_prices
from headrace.hardware.slices import parse_slice, standard_slices

# Where `make test-all` puts the compiler; on a TPU machine it is among the other packages.
LIBTPU = Path(__file__).parents[2] / ".venv" / "libtpu"
COUNT = """
import sys
from jax.experimental import topologies
from headrace.hardware.slices import parse_slice

for name in sys.argv[1:]:
    slice_ = parse_slice(name)
    found = topologies.get_topology_desc(slice_.topology_name, "tpu", **slice_.topology_options).devices
    groups = [{getattr(device, key, 0) for device in found} for key in ("process_index", "slice_index")]
    print(name, len(found), *map(len, groups))
"""


FILL = """
import re
import sys
import jax
from jax.experimental import topologies
from headrace.hardware.slices import parse_slice

for name in sys.argv[1:]:
    slice_ = parse_slice(name)
    device = topologies.get_topology_desc(slice_.topology_name, "tpu", **slice_.topology_options).devices[0]
    place = jax.sharding.SingleDeviceSharding(device)
    much = jax.ShapeDtypeStruct((2**20, 2**20), "float32", sharding=place)
    try:
        jax.jit(lambda x: x + 1).lower(much).compile()
    except jax.errors.JaxRuntimeError as error:
        print(name, *re.findall(r"exceeds available HBM \\((\\S+)G\\)", str(error)))
"""


def run_script(script: str, names: list[str]) -> dict[str, list[str]]:
    """Run a script that asks libtpu about slices, in a subprocess: once loaded, libtpu handles signals."""
    if not LIBTPU.is_dir():
        pytest.importorskip("libtpu")
    places = os.pathsep.join([str(LIBTPU), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"TPU_WORKER_HOSTNAMES": "localhost", "PYTHONPATH": places}
    command = [sys.executable, "-c", script, *names]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    rows = [line.split() for line in result.stdout.splitlines()]
    return {row[0]: row[1:] for row in rows if row[0] in names}


@pytest.mark.parametrize(
    "name, shape, chip_count, devices, hosts",
    [
        ("v2-8", (2, 2), 4, 8, 1),
        ("v2-512", (16, 16), 256, 512, 64),
        ("v3-32", (4, 4), 16, 32, 4),
        ("v3-2048", (32, 32), 1024, 2048, 256),
        ("v4-8", (2, 2, 1), 4, 4, 1),
        ("v4-32", (2, 2, 4), 16, 16, 4),
        ("v4-128", (4, 4, 4), 64, 64, 16),
        ("v4-1536", (8, 8, 12), 768, 768, 192),
        ("v4-4096", (8, 16, 16), 2048, 2048, 512),
        ("v5litepod-1", (1, 1), 1, 1, 1),
        ("v5e-8", (2, 4), 8, 8, 1),
        ("v5e-16", (4, 4), 16, 16, 4),
        ("v5e-256", (16, 16), 256, 256, 64),
        ("v5p-8", (2, 2, 1), 4, 4, 1),
        ("v5p-32", (2, 2, 4), 16, 16, 4),
        ("v5p-64", (2, 4, 4), 32, 32, 8),
        ("v5p-128", (4, 4, 4), 64, 64, 16),
        ("v5p-512", (4, 8, 8), 256, 256, 64),
        ("v5p-4096", (8, 16, 16), 2048, 2048, 512),
        ("v5p-12288", (16, 16, 24), 6144, 6144, 1536),
        ("v6e-4", (2, 2), 4, 4, 1),
        ("v6e-8", (2, 4), 8, 8, 1),
        ("v6e-128", (8, 16), 128, 128, 32),
        ("tpu7x-2", (1, 1, 1), 1, 2, 1),
        ("tpu7x-8", (2, 2, 1), 4, 8, 1),
        ("tpu7x-128", (4, 4, 4), 64, 128, 16),
        ("tpu7x-18432", (16, 24, 24), 9216, 18432, 2304),
    ],
)
def test_names_mean_the_slices_that_google_sells(name, shape, chip_count, devices, hosts):
    parsed = parse_slice(name)
    assert (parsed.shape, parsed.chips, parsed.devices, parsed.hosts) == (shape, chip_count, devices, hosts)
    assert (parsed.name, parsed.slices) == (name, 1)


@pytest.mark.parametrize(
    "name, shape",
    [
        ("v4-384", (4, 4, 12)),
        ("v5p-640", (4, 4, 20)),
        ("v5p-2304", (8, 12, 12)),
        ("v5p-3840", (8, 12, 20)),
        ("v5p-8192", (16, 16, 16)),
        ("tpu7x-9216", (12, 16, 24)),
    ],
)
def test_other_sizes_of_full_cubes_have_the_most_cubic_shape(name, shape):
    assert parse_slice(name).shape == shape


def test_names_are_case_insensitive_and_shown_as_written():
    assert parse_slice(" V5LitePod-16 ").name == " V5LitePod-16 "
    assert parse_slice("V5LitePod-16").chip == parse_slice("v5e-16").chip == CHIPS["v5e"]
    assert parse_slice("GPU:H200x8").chip == CHIPS["h200"]


@pytest.mark.parametrize("name", ["v5p:2x2x4", "v4:4x4x16", "v3:4x8", "v5litepod:4x4", "v5p-2x2x4"])
def test_a_shape_is_accepted_in_place_of_a_size(name):
    parsed = parse_slice(name)
    generation, _, sides = name.replace("-", ":").partition(":")
    assert parsed.topology_name == f"{parsed.chip.name}:{sides}"
    assert parsed.chips == math.prod(int(side) for side in sides.split("x"))
    assert parsed.chip.name == {"v5litepod": "v5e"}.get(generation, generation)


def test_several_slices_add_up():
    parsed, single = parse_slice("2xv5e-256"), parse_slice("v5e-256")
    assert (parsed.chips, parsed.devices, parsed.hosts, parsed.slices) == (512, 512, 128, 2)
    assert (parsed.shape, parsed.topology_name) == (single.shape, single.topology_name)
    assert parsed.topology_options == single.topology_options | {"num_slices": 2}
    assert parse_slice("3xv5p:4x4x4").chips == 192
    assert parse_slice("1xv3-32").chips == 16


@pytest.mark.parametrize("name, shape, slices", [("gpu:h200x1", (1,), 1), ("gpu:h100x16", (8,), 2)])
def test_gpus_of_one_machine_are_a_slice(name, shape, slices):
    parsed = parse_slice(name)
    assert (parsed.shape, parsed.slices, parsed.hosts) == (shape, slices, slices)
    assert parsed.chips == parsed.devices == shape[0] * slices


def test_only_v4_needs_a_chip_config():
    configs = {chip.name: standard_slices(chip)[1].topology_options.get("chip_config_name") for chip in TPUS}
    assert configs == dict.fromkeys(configs) | {"v4": "megacore"}


@pytest.mark.parametrize(
    "name, wrap",
    [
        ("v5p-64", (False, False, False)),
        ("v5p-128", (True, True, True)),
        ("v4:4x4x12", (True, True, True)),
        ("v5e-64", (False, False, False)),
        ("v6e-128", (False, True, False)),
        ("v5e-256", (True, True, False)),
        ("v2-512", (True, True, False)),
        ("v3-512", (False, False, False)),
    ],
)
def test_full_cubes_and_full_sides_of_a_pod_are_rings(name, wrap):
    assert parse_slice(name).topology_options["wrap"] == wrap


@pytest.mark.parametrize(
    "name, expected",
    [
        ("v5p-33", "a size such as v5p-32 or v5p-64"),
        ("v5p", "a size such as v5p-8 or v5p-16"),
        ("v5p-99999", "a size such as v5p-12160 or v5p-12288"),
        ("v5litepod-2", "a size such as v5litepod-1 or v5litepod-4"),
        ("v3-16", "a size such as v3-8 or v3-32"),
        ("4xtpu7x-4", "a size such as tpu7x-2 or tpu7x-8"),
        ("v5p:4x2x2", "a shape such as v5p:2x2x4"),
        ("v5p:2x2x0", "a shape such as v5p:2x2x1 or v5p:2x2x2"),
        ("v4:3x3x3", "a shape such as v4:2x2x4 or v4:2x4x4"),
        ("v5e:16x32", "a shape such as v5e:8x16 or v5e:16x16"),
        ("2xv3-32", "one slice: those of v3 cannot be joined"),
        ("0xv5e-256", "1 slice or more"),
        ("gpu:h100x12", "1, 2, 4, 8 or a multiple of 8, such as gpu:h100x8"),
        ("gpu:h300x8", "one of a100, h100, h200, b200, such as gpu:h200x8"),
    ],
)
def test_a_wrong_size_is_refused_with_the_nearest_sizes(name, expected):
    with pytest.raises(UserError) as error:
        parse_slice(name)
    assert str(error.value) == f"slice: found {name}, expected {expected}"


@pytest.mark.parametrize("name", ["v9-8", "h200x8", "", "v5p-", "v5p:32", "2x2xv5e-4", "gpu:h200", "v5p-٣٢"])
def test_an_unknown_generation_is_refused_with_a_list_of_all(name):
    with pytest.raises(UserError, match=f"slice: found {name}, expected one of v2, v3, v4") as error:
        parse_slice(name)
    assert all(chip in str(error.value) for chip in CHIPS)


def test_a_very_long_name_is_shortened_in_the_message():
    with pytest.raises(UserError) as error:
        parse_slice("v5p-" + "9" * 5000)
    assert len(str(error.value)) < 250


@pytest.mark.parametrize("chip", [*TPUS, *GPUS], ids=lambda chip: chip.name)
def test_the_sizes_of_a_chip_ascend_and_are_found_by_their_names(chip):
    parsed = standard_slices(chip)
    counts = [single.chips for single in parsed]
    assert counts == sorted(set(counts)) and len(counts) >= 4
    assert [parse_slice(single.name) for single in parsed] == parsed


def test_the_compiler_agrees_with_the_table_on_small_slices():
    parsed = run_script(COUNT, ["v4-8", "v5e-8", "2xv5p-16"])
    assert parsed == {"v4-8": ["4", "1", "1"], "v5e-8": ["8", "1", "1"], "2xv5p-16": ["16", "4", "2"]}


@pytest.mark.slow
def test_the_compiler_agrees_with_the_table_on_every_standard_slice():
    slices = [single for chip in TPUS for single in standard_slices(chip)]
    slices += [
        parse_slice(f"2x{single.name}")
        for single in slices
        if single.chip.network_bandwidth and single.chips <= 256
    ]
    slices += [
        parse_slice(f"{name}-{128 * cubes}") for name in ("v4", "v5p", "tpu7x") for cubes in range(1, 17)
    ]
    parsed = run_script(COUNT, sorted({single.name for single in slices}))
    assert parsed == {
        single.name: [str(single.devices), str(single.hosts), str(single.slices)] for single in slices
    }


@pytest.mark.slow
def test_the_compiler_allows_the_memory_of_the_table():
    names = {standard_slices(chip)[0].name: chip for chip in TPUS}
    allowed = {name: float(parsed[0]) for name, parsed in run_script(FILL, list(names)).items()}
    usable = {name: chip.usable_bytes / chip.devices / GIB for name, chip in names.items()}
    assert allowed == pytest.approx(usable, abs=0.005)


@pytest.mark.parametrize("chip", TPUS, ids=lambda chip: chip.name)
def test_tpu_figures_are_near_those_of_jax(chip):
    jax_has = pallas.get_tpu_info_for_chip(pallas.ChipVersion(chip.name.removeprefix("tpu")), 1)
    assert chip.flops == pytest.approx(chip.cores * jax_has.bf16_ops_per_second, rel=0.15)
    assert chip.hbm_bandwidth == pytest.approx(chip.cores * jax_has.mem_bw_bytes_per_second, rel=0.15)
    assert chip.hbm_bytes == pytest.approx(chip.cores * jax_has.hbm_capacity_bytes, rel=0.08)


@pytest.mark.parametrize("chip", [*TPUS, *GPUS], ids=lambda chip: chip.name)
def test_memory_is_faster_than_links_and_links_than_the_network(chip):
    assert 0.7 * chip.hbm_bytes < chip.usable_bytes < chip.hbm_bytes
    assert (
        chip.hbm_bandwidth > chip.total_link_bandwidth >= chip.link_bandwidth > (chip.network_bandwidth or 0)
    )


def test_all_links_of_a_chip_add_up_to_googles_figures():
    both_ways = {"v5e": 400e9, "v5p": 1200e9, "v6e": 800e9, "tpu7x": 1200e9}
    assert {name: 2 * CHIPS[name].total_link_bandwidth for name in both_ways} == both_ways
    assert CHIPS["h100"].total_link_bandwidth == 450e9


@pytest.mark.parametrize(
    "kind, name",
    [
        ("TPU v2", "v2"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "tpu7x"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 PCIe", None),
        ("TPU v9", None),
        ("cpu", None),
    ],
)
def test_a_chip_is_found_by_the_device_kind(kind, name):
    assert chips.find_chip(kind) == (CHIPS[name] if name else None)


def test_prices_are_those_of_the_catalog_without_a_file():
    parsed = load_prices()
    assert parsed["v5p"] == Price(on_demand=(4.2, 4.78), spot=(0.64, 1.53))
    assert parsed["v2"] == Price(on_demand=(1.13, 1.5), spot=None)
    assert parsed["h200"] == parsed["tpu7x"] == Price()
    assert list(parsed) == list(CHIPS)


def test_a_file_replaces_some_prices(tmp_path):
    file = tmp_path / "prices.yaml"
    file.write_text("V5E: {spot: 0.3}\nh200: {on_demand: 3, spot: [1.5, 2]}\n")
    expected = load_prices() | {
        "v5e": Price(on_demand=(1.2, 1.42), spot=(0.3, 0.3)),
        "h200": Price(on_demand=(3.0, 3.0), spot=(1.5, 2.0)),
    }
    assert load_prices(file) == expected
    assert load_prices() != expected


@pytest.mark.parametrize(
    "text, message",
    [
        ("v9: {spot: 1}", "found v9, expected one of v2, v3"),
        ("v5e: 1.2", "v5e: found 1.2, expected {on_demand: 1.2, spot: 0.3}"),
        ("v5e: {}", "v5e: found {}, expected {on_demand"),
        ("v5e: {sport: 1}", "v5e.sport: found sport, expected on_demand or spot"),
        ("v5e: {spot: cheap}", "v5e.spot: found cheap, expected dollars per hour"),
        ("v5e: {spot: true}", "v5e.spot: found True, expected dollars"),
        ("v5e: {spot: -1}", "v5e.spot: found -1, expected dollars"),
        ("v5e: {spot: .nan}", "v5e.spot: found nan, expected dollars"),
        ("v5e: {spot: [2, 1]}", r"v5e.spot: found \[2, 1\], expected dollars per hour, or \[low, high\]"),
        ("v5e: {spot: [1, 2, 3]}", r"v5e.spot: found \[1, 2, 3\], expected dollars"),
        ("v5e: {spot: null}", "v5e.spot: found None, expected dollars"),
        ("- v5e", "found no prices, expected lines such as v5e"),
        ("", "found no prices, expected lines such as v5e"),
        ("v5e: {spot", "not YAML"),
    ],
)
def test_wrong_prices_are_refused(tmp_path, text, message):
    file = tmp_path / "prices.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=f"^{file}: {message}"):
        load_prices(file)


def test_a_missing_file_of_prices_and_a_folder_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.yaml: found no file, expected a .yaml file of prices"):
        load_prices(tmp_path / "nowhere.yaml")
    with pytest.raises(UserError, match=r"found Is a directory, expected a .yaml file of prices"):
        load_prices(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(UserError, match="found a file that is not text"):
        load_prices(tmp_path / "binary.yaml")
