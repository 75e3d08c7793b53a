"""Compiled programs, read and timed: small ones written by hand, whose results are known, and two real ones
of a tiny Llama for a v5e-4 (libtpu 0.0.51; kernels' code and the list of source files are cut out)."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.hardware.slices import parse_slice
from headrace.plan import device_rates
from headrace.plan.device_rates import DeviceRates, make_rates
from headrace.plan.hlo import (
    Program,
    parse_program,
    parse_replica_groups,
    parse_shapes,
    read_program,
)
from headrace.plan.timing import Breakdown, time_step
from headrace.plan.trip_count import Scope, count_trips

PROGRAMS = Path(__file__).parent / "programs"
# Where `make test-all` puts the compiler; on a TPU machine it is among the other packages.
LIBTPU = Path(__file__).parents[2] / ".venv" / "libtpu"


@pytest.fixture
def ideal(monkeypatch) -> DeviceRates:
    """Rates of four devices in a ring: round numbers, and programs reach all peaks."""
    for name, value in dict(
        MATMUL_SHARE=1.0, HBM_SHARE=1.0, LINK_SHARE=1.0, MESSAGE_SECONDS=0.0, HOP_SECONDS=0.0
    ).items():
        monkeypatch.setattr(device_rates, name, value)
    return DeviceRates(
        flops=1e12,
        fp8=2e12,
        int8=4e12,
        bandwidth=1e9,
        link=1e6,
        network=1e5,
        clock=1e9,
        cores=1,
        shape=(4,),
        wraps=(True,),
        places=tuple((0, 0, x) for x in range(4)),
    )


def program(lines: str, before: str = "") -> Program:
    hlo = parse_program(
        f"HloModule test, num_partitions=4\n{before}\nENTRY %main () -> f32[] {{\n{lines}\n}}"
    )
    assert not hlo.unread_lines
    return hlo


def loop(name: str, *, lines: str = "", step: int = 1, bound: str = "constant(10)") -> str:
    """A loop over s32 values: element 0 counts, element 1 is constant."""
    return f"""
%{name}_condition (p: (s32[], s32[])) -> pred[] {{
  %p = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] {bound}
  ROOT %more = pred[] compare(%i, %n), direction=LT
}}
%{name}_body (p: (s32[], s32[])) -> (s32[], s32[]) {{
  %p = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  %by = s32[] constant({step})
  %next = s32[] add(%i, %by)
{lines}
  ROOT %out = (s32[], s32[]) tuple(%next, %n)
}}"""


def run(name: str) -> str:
    return f"while(%start), condition=%{name}_condition, body=%{name}_body"


START = """
  %zero = s32[] constant(0)
  %seven = s32[] constant(7)
  %start = (s32[], s32[]) tuple(%zero, %seven)
"""
DOT = """
  %a = f32[100,200]{1,0:S(1)} parameter(0)
  %b = f32[200,50]{1,0:S(1)} parameter(1)
  %ab = f32[100,50]{1,0:S(1)} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
"""
DOT_FLOPS = 2 * 100 * 200 * 50


def test_a_shape_has_its_layout_padding_and_memory():
    (array,) = parse_shapes("f32[1024,64]{1,0:T(8,128)S(1)}")
    assert (array.dims, array.order, array.tile, array.space) == ((1024, 64), (1, 0), (8, 128), 1)
    assert array.bytes == 1024 * 128 * 4
    first, second = parse_shapes("(bf16[2,3]{0,1:T(2,128)(2,1)}, /*index=1*/(pred[], f8e4m3fn[7]))")[:2]
    assert (first.bytes, second.bytes) == (4 * 128 * 2, 1)


def test_unreadable_lines_cause_a_caveat_and_unknown_opcodes_are_accepted(ideal):
    hlo = parse_program(
        "HloModule x\nENTRY %e () -> f32[] {\n what is this\n ROOT %y = f32[8]{0:S(1)} frobnicate()\n}"
    )
    assert hlo.unread_lines == ("what is this",)
    assert hlo.computations["e"].instructions["y"].opcode == "frobnicate"
    assert "1 lines" in time_step(hlo, ideal).caveats[0]


def test_an_instruction_may_take_several_lines():
    noted = 'frontend_attributes={kernel_metadata={\n"blocks":"{\\"block_q\\": 512}"\n}}'
    hlo = program(f'  ROOT %y = f32[8] custom-call(), {noted}, metadata={{op_name="a, {{b"}}')
    (y,) = hlo.computations["main"].instructions.values()
    assert "block_q" in y.attributes["frontend_attributes"]
    assert y.op_name == "a, {b"


@pytest.mark.parametrize(
    "text, groups",
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
    ],
)
def test_replica_groups_are_parsed_in_all_notations(text, groups):
    assert parse_replica_groups(text) == groups


@pytest.mark.parametrize(
    "loop_options, count",
    [(dict(), 10), (dict(step=3), 4), (dict(bound="get-tuple-element(%p), index=1"), 7)],
)
def test_the_trips_of_a_loop_follow_from_its_condition(loop_options, count):
    hlo = program(f"{START}  ROOT %w = (s32[], s32[]) {run('one')}", loop("one", **loop_options))
    main = hlo.computations["main"]
    assert count_trips(hlo, main, main.instructions["w"], Scope()) == count


def test_an_operand_may_be_an_element_of_a_tuple(ideal):
    plain = """
  %p = (f32[1024,512], f32[512,256]) parameter(0)
  %a = f32[1024,512] get-tuple-element(%p), index=0
  %b = f32[512,256] get-tuple-element(%p), index=1
  ROOT %d = f32[1024,256] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"""
    _, first, *_, last = plain.splitlines()
    short = "\n".join(("", first, last.replace("%a", "%p#0").replace("%b", "%p#1")))
    assert time_step(program(short), ideal) == time_step(program(plain), ideal)


def test_matmuls_in_nested_loops_count_once_per_trip(ideal):
    # The inner bound is a constant that the outer loop passes on: the seven of START.
    inner = loop("inner", lines=DOT, bound="get-tuple-element(%p), index=1")
    begin = "  %zero = s32[] constant(0)\n  %start = (s32[], s32[]) tuple(%zero, %n)\n"
    outer = loop("outer", lines=f"{begin}  %w = (s32[], s32[]) {run('inner')}")
    found = time_step(program(f"{START}  ROOT %w = (s32[], s32[]) {run('outer')}", inner + outer), ideal)
    assert found.matrix_flops == 10 * 7 * DOT_FLOPS
    assert found.matrix == pytest.approx(found.matrix_flops / 1e12)
    assert not found.caveats


@pytest.mark.parametrize(
    "left, right, rate",
    [("bf16", "bf16", 1e12), ("f8e4m3fn", "f8e5m2", 2e12), ("s8", "s8", 4e12), ("bf16", "s8", 1e12)],
)
def test_8_bit_matmuls_have_their_own_rate(ideal, left, right, rate):
    lines = f"""
  %a = {left}[1024,512] parameter(0)
  %b = {right}[512,256] parameter(1)
  ROOT %d = f32[1024,256] dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"""
    quick = dataclasses.replace(ideal, bandwidth=1e15)
    found = time_step(program(lines), quick)
    assert found.matrix_flops == 2 * 1024 * 512 * 256
    assert found.matrix == found.seconds == pytest.approx(found.matrix_flops / rate)


def test_a_loop_whose_trips_depend_on_data_causes_a_caveat(ideal):
    bound = (
        "  %zero = s32[] constant(0)\n  %n = s32[] parameter(0)\n  %start = (s32[], s32[]) tuple(%zero, %n)\n"
    )
    hlo = program(
        f"{bound}  ROOT %w = (s32[], s32[]) {run('one')}", loop("one", bound="get-tuple-element(%p), index=1")
    )
    assert "assumed to run 1 times" in time_step(hlo, ideal).caveats[0]


@pytest.mark.parametrize(
    "shapes_, attributes, flops",
    [
        # A product of [64, 32] and [32, 16].
        (("64,32", "32,16", "64,16"), "dim_labels=bf_io->bf", 2 * 64 * 32 * 16),
        # Eight of them, the batch as a window that meets zeros everywhere but once.
        (
            ("8,64,32", "8,32,16", "8,64,16"),
            "window={size=8 stride=7 pad=0_0 lhs_dilate=8}, dim_labels=0bf_0io->0bf",
            8 * 2 * 64 * 32 * 16,
        ),
        # Two halves of a kernel, each in one place of the window.
        (
            ("2,4,8", "2,8,16", "3,4,16"),
            "window={size=2 pad=1_1 rhs_reversal=1}, dim_labels=0bf_0io->0bf",
            4 * 2 * 4 * 8 * 16,
        ),
        # A real convolution: 6 outputs of 3 places, of which the first and the last meet padding.
        (("5,6,7", "3,7,9", "5,6,9"), "window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f", 2 * 5 * 16 * 7 * 9),
    ],
)
def test_a_convolution_does_not_count_positions_that_meet_zeros(ideal, shapes_, attributes, flops):
    left, right, out = (f"bf16[{dims}]{{:S(1)}}" for dims in shapes_)
    text = f"  %a = {left} parameter(0)\n  %b = {right} parameter(1)\n"
    hlo = program(f"{text}  ROOT %c = {out} convolution(%a, %b), {attributes}")
    assert time_step(hlo, ideal).matrix_flops == flops


def test_a_matmul_inside_a_fusion_counts(ideal):
    inner = f"%fused (a: f32[100,200], b: f32[200,50]) -> f32[100,50] {{{DOT.replace('%ab', 'ROOT %ab')}}}"
    lines = "  %x = f32[100,200] parameter(0)\n  %y = f32[200,50] parameter(1)\n"
    hlo = program(f"{lines}  ROOT %f = f32[100,50] fusion(%x, %y), kind=kOutput, calls=%fused", inner)
    found = time_step(hlo, ideal)
    assert found.matrix_flops == DOT_FLOPS
    assert found.memory == pytest.approx(4 * (100 * 200 + 200 * 50 + 100 * 50) / 1e9)


def test_only_the_slices_that_are_read_or_updated_count_as_traffic(ideal):
    inner = """
%fused (all: f32[32,1000], rows: f32[32,1000], at: s32[]) -> f32[32,1000] {
  %all = f32[32,1000] parameter(0)
  %rows = f32[32,1000] parameter(1)
  %at = s32[] parameter(2)
  %row = f32[1,1000] dynamic-slice(%rows, %at), dynamic_slice_sizes={1,1000}
  ROOT %new = f32[32,1000] dynamic-update-slice(%all, %row, %at)
}"""
    lines = """
  %x = f32[32,1000] parameter(0)
  %y = f32[32,1000] parameter(1)
  %at = s32[]{:S(6)} parameter(2)
  ROOT %f = f32[32,1000] fusion(%x, %y, %at), kind=kLoop, calls=%fused"""
    assert time_step(program(lines, inner), ideal).seconds == pytest.approx(2 * 4 * 1000 / 1e9)


GATHER = """
  %x = f32[250,1000]{1,0:S(1)} parameter(2)
  %begin = (f32[250,1000]{1,0:S(1)}, f32[1000,1000]{1,0:S(1)}) all-gather-start(%x), replica_groups=[1,4]<=[4]
"""
GATHERED = "  ROOT %end = f32[1000,1000]{1,0:S(1)} all-gather-done(%begin)"
GATHER_SECONDS = 4e6 * 3 / 4 / 2e6  # three quarters of 4 MB over two links of 1 MB/s


def test_a_collective_without_parallel_work_is_exposed(ideal):
    traffic = time_step(program(GATHER + GATHERED), ideal).collectives["all-gather"]
    assert traffic.seconds == traffic.exposed == pytest.approx(GATHER_SECONDS)


def test_a_collective_hides_behind_what_runs_between_its_start_and_its_end(ideal):
    slow = dataclasses.replace(ideal, flops=DOT_FLOPS)  # one product a second
    found = time_step(program(GATHER + DOT + GATHERED), slow)
    assert found.matrix == pytest.approx(1)
    assert found.collectives["all-gather"].exposed == pytest.approx(GATHER_SECONDS - 1)
    assert found.seconds == pytest.approx(GATHER_SECONDS)


def test_a_matmul_that_carries_a_collective_hides_it(ideal):
    gather = 'all-gather(%p), replica_groups={{0,1,2,3}}, channel_id=9, frontend_attributes={chain_id="0"}'
    types = "f32[250,1000]{1,0:S(1)}", "f32[1000,1000]{1,0:S(1)}"
    before = f"""
%begin (p: f32[250,1000]) -> f32[1000,1000] {{
  %p = {types[0]} parameter(0)
  %g = {types[1]} {gather}
  ROOT %c = {types[1]} custom-call(%g), custom_call_target="AsyncCollectiveStart"
}}
%product (a: f32[100,200], b: f32[200,50], p: f32[250,1000]) -> (f32[100,50], f32[1000,1000]) {{
{DOT}
  %p = {types[0]} parameter(2)
  %g = {types[1]} {gather}
  ROOT %t = (f32[100,50]{{1,0:S(1)}}, {types[1]}) tuple(%ab, %g)
}}
%end (p: f32[250,1000]) -> f32[1000,1000] {{
  %p = {types[0]} parameter(0)
  %g = {types[1]} {gather}
  ROOT %c = {types[1]} custom-call(%g), custom_call_target="AsyncCollectiveDone"
}}"""
    lines = f"""
  %x = {types[0]} parameter(0)
  %a = f32[100,200]{{1,0:S(1)}} parameter(1)
  %b = f32[200,50]{{1,0:S(1)}} parameter(2)
  %s = {types[1]} fusion(%x), kind=kCustom, calls=%begin
  %f = (f32[100,50]{{1,0:S(1)}}, {types[1]}) fusion(%a, %b, %x), kind=kOutput, calls=%product
  ROOT %d = {types[1]} fusion(%x), kind=kCustom, calls=%end"""
    found = time_step(program(lines, before), dataclasses.replace(ideal, flops=DOT_FLOPS))
    assert found.collectives["all-gather"].seconds == pytest.approx(GATHER_SECONDS)
    assert found.collectives["all-gather"].exposed == pytest.approx(GATHER_SECONDS - 1)


@pytest.mark.parametrize(
    "line, seconds",
    [
        ("reduce-scatter(%x), replica_groups={{0,1,2,3}}", 1e6 * 3 / 4 / 2e6),
        ("all-reduce(%x), replica_groups=[1,4]<=[4]", 2 * 1e6 * 3 / 4 / 2e6),
        ("all-reduce(%x), replica_groups={}", 2 * 1e6 * 3 / 4 / 2e6),
        # Two neighbours have one link, and those two apart share it with the other pair.
        ("all-gather(%x), replica_groups={{0,1},{2,3}}", 1e6 / 1e6),
        ("all-gather(%x), replica_groups={{0,2},{1,3}}", 1e6 / (1e6 / 2)),
        # Each link of a ring of four carries half of what a device has.
        ("all-to-all(%x), replica_groups={{0,1,2,3}}", 0.5),
        ("collective-permute(%x), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}", 1.0),
        ("collective-permute(%x), source_target_pairs={{0,2},{1,3},{2,0},{3,1}}", 2.0),
    ],
)
def test_a_collective_takes_the_links_that_its_groups_have(ideal, line, seconds):
    hlo = program(f"  %x = f32[250000]{{0:S(1)}} parameter(0)\n  ROOT %y = f32[250000]{{0:S(1)}} {line}")
    assert time_step(hlo, ideal).seconds == pytest.approx(seconds)


def test_slices_are_joined_by_the_network(ideal):
    two = dataclasses.replace(
        ideal, shape=(2,), wraps=(False,), places=((0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1))
    )
    line = "all-reduce(%x), replica_groups={{0,1,2,3}}"
    hlo = program(f"  %x = f32[250000]{{0:S(1)}} parameter(0)\n  ROOT %y = f32[250000]{{0:S(1)}} {line}")
    near, far = 2 * 1e6 / 2 / 1e6, 2 * 1e6 / 2 / 2 / 1e5
    assert time_step(hlo, two).seconds == pytest.approx(near + far)


def test_a_transfer_between_slices_is_awaited_where_it_is_received(ideal):
    """As compiled: send and recv have the same rendezvous, and the runtime adds up."""
    met = '_xla_host_transfer_rendezvous="here",_xla_megascale_transfer_type="ALL_REDUCE"'
    two = dataclasses.replace(ideal, places=tuple((x // 2, 0, x % 2) for x in range(4)), flops=DOT_FLOPS)
    lines = f"""
  %x = f32[250000]{{0:S(1)}} parameter(2)
  %t = token[] after-all()
  %s = (f32[250000]{{0:S(1)}}, u32[]{{:S(2)}}, token[]) send(%x, %t), frontend_attributes={{{met}}}
  %r = (f32[250000]{{0:S(1)}}, u32[]{{:S(2)}}, token[]) recv(%t), frontend_attributes={{{met}}}
{DOT}
  %sent = token[] send-done(%s)
  ROOT %got = (f32[250000]{{0:S(1)}}, token[]) recv-done(%r)"""
    found = time_step(program(lines), two)
    assert found.collectives["all-reduce between slices"].seconds == pytest.approx(2 * 1e6 / 2 / 1e5)
    assert found.collectives["all-reduce between slices"].exposed == pytest.approx(2 * 1e6 / 2 / 1e5 - 1)


def test_a_background_copy_shares_the_memory_bandwidth(ideal):
    lines = """
  %x = f32[1000] parameter(0)
  %y = f32[2000] parameter(1)
  %begin = (f32[1000]{0:S(1)}, f32[1000], u32[]{:S(2)}) copy-start(%x)
  %z = f32[2000]{0:S(1)} negate(%y)
  ROOT %end = f32[1000]{0:S(1)} copy-done(%begin)"""
    assert time_step(program(lines), ideal).memory == pytest.approx((4000 + 8000) / 1e9)


@pytest.mark.parametrize(
    "kernel, tiled, queries, tiles",
    [
        ("fwd", "s8[1,8,8]", 4096, 36),  # causal: 1 + 2 + ... + 8
        ("dq", "s8[1,8,8]", 4096, 36),
        ("dkv", "s8[1,8,8]", 4096, 36),
        ("fwd", "s8[1,8,2]", 4096, 16),  # a window of two tiles
        ("dkv", "s8[1,2,8]", 4096, 16),
        ("fwd", "s8[1,2,8]", 1024, 9),  # one of four chunks: of an early and a late one a device has both
        ("dkv", "s8[1,2,8]", 1024, 9),
        ("fwd", None, 4096, 64),  # all see all, whatever their positions
    ],
)
def test_attention_counts_tiles_that_are_not_masked(ideal, kernel, tiled, queries, tiles):
    q, k = f"bf16[2,8,{queries},128]{{3,2,1,0:S(1)}}", "bf16[2,2,4096,128]{3,2,1,0:S(1)}"
    positions = ", %p" if tiled else ""
    suffix = "" if kernel == "fwd" else f"_{kernel}"
    noted = f'"block_q{suffix}\\": 512, \\"block_kv{suffix}\\": 512'
    hlo = program(f"""
  %m = {tiled or "s8[1,8,8]"}{{2,1,0:S(1)}} parameter(0)
  %q = {q} parameter(1)
  %k = {k} parameter(2)
  %p = s32[{queries},128]{{1,0:S(1)}} parameter(3)
  ROOT %splash_mha_{kernel}.1 = {q} custom-call(%m, %q, %k, %k{positions}), \
custom_call_target="tpu_custom_call", frontend_attributes={{{noted}}}""")
    products = {"fwd": 2, "dq": 3, "dkv": 4}[kernel]
    assert time_step(hlo, ideal).kernel_flops == products * 2 * (2 * 8) * tiles * 512 * 512 * 128


Q, TURNED = "bf16[2,8,4096,64]{3,2,1,0:S(1)}", "bf16[2,8,64,4096]{3,2,1,0:S(1)}"
PARTS = "bf16[2,4,8,4096,64]{4,3,2,1,0:S(1)}"


@pytest.mark.parametrize(
    "kernel, taken, layout, hlo, products",
    [
        ("fwd", Q, 1, Q, 2),
        ("fwd", TURNED, 2, Q, 2),
        ("dkv", TURNED, 2, f"({Q}, {Q})", 4),
        ("dkv", TURNED, 2, f"({PARTS}, {Q}, {Q})", 5),  # dq, for each of four tiles of keys
    ],
)
def test_a_narrow_head_occupies_a_matrix_unit_like_a_full_one(ideal, kernel, taken, layout, hlo, products):
    suffix = "" if kernel == "fwd" else f"_{kernel}"
    sizes = f'"block_q{suffix}\\": 512, \\"block_kv{suffix}\\": 1024'
    noted = f'{sizes}, \\"q_layout\\": {layout}'
    found = time_step(
        program(f"""
  %m = s8[1,8,4]{{2,1,0:S(1)}} parameter(0)
  %q = {taken} parameter(1)
  ROOT %splash_mha_{kernel}.1 = {hlo} custom-call(%m, %q, %q, %q), \
custom_call_target="tpu_custom_call", frontend_attributes={{{noted}}}"""),
        dataclasses.replace(ideal, clock=1e30),
    )
    assert found.kernel_flops == products * 2 * (2 * 8) * 4096 * 4096 * 64
    assert found.pallas == pytest.approx(2 * found.kernel_flops / ideal.flops / device_rates.MATMUL_SHARE)


KERNEL = """
  %x = bf16[1000,500]{1,0} parameter(0)
  ROOT %k = bf16[500,1000]{1,0} custom-call(%x), custom_call_target="tpu_custom_call"NOTED"""


@pytest.mark.parametrize(
    "flops, read, seconds",
    [
        (3 * 10**12, 5 * 10**8, 3.0),  # products
        (10**9, 5 * 10**8, 0.5),  # blocks that are read many times
        (10**9, 10, 2e6 / 1e9),  # never less than every array once
    ],
)
def test_a_kernel_counts_by_its_cost_estimate(ideal, flops, read, seconds):
    estimate = f'"flops":"{flops}","bytes_accessed":"{read}","transcendentals":"0"'
    found = time_step(
        program(KERNEL.replace("NOTED", f', backend_config={{"cost_estimate":{{{estimate}}}}}')), ideal
    )
    assert found.kernel_flops == flops and found.seconds == found.pallas == pytest.approx(seconds)
    assert not found.caveats


def test_a_kernels_exponentials_and_tiles_count_like_attentions(ideal):
    noted = (
        ', frontend_attributes={kernel_metadata={"tiles":"4"}}'
        ', backend_config={"cost_estimate":{"flops":"1","transcendentals":"1024000000"}}'
    )
    cycles = 1e6 * device_rates.CYCLES_PER_REGISTER + 4 * device_rates.CYCLES_PER_TILE
    assert time_step(program(KERNEL.replace("NOTED", noted)), ideal).pallas == pytest.approx(cycles / 1e9)


def test_a_kernel_takes_at_least_its_bundles(ideal):
    noted = (
        ', frontend_attributes={kernel_metadata={"bundles":"5000000"}}'
        ', backend_config={"cost_estimate":{"flops":"1","transcendentals":"1024"}}'
    )
    assert time_step(program(KERNEL.replace("NOTED", noted)), ideal).pallas == pytest.approx(5e6 / 1e9)


def test_a_kernel_without_an_estimate_causes_a_caveat(ideal):
    (caveat,) = time_step(program(KERNEL.replace("NOTED", "")), ideal).caveats
    assert "a Pallas kernel whose FLOPs are not known" in caveat


def test_matmuls_take_about_the_compilers_cycles():
    """The median over v5p, v5e and v6e is 1.12 times the time at the peak."""
    hlo = program(DOT.replace("%ab", "ROOT %ab"))
    for name in ("v5e-4", "v5p-8", "v6e-4"):
        where = dataclasses.replace(make_rates(parse_slice(name)), places=((0, 0, 0, 0),) * 4)
        assert 1.08 < time_step(hlo, where).matrix * where.flops / DOT_FLOPS < 1.16


def test_attention_takes_the_cycles_of_its_kernels_on_v6e():
    """libtpu schedules 3.6 to 5.3 cycles per 1,024 scores, and some hundreds per tile."""
    q = "bf16[1,8,4096,128]{3,2,1,0:S(1)}"
    noted = '"block_q\\": 1024, \\"block_kv\\": 1024'
    hlo = program(f"""
  %m = s8[1,4,4]{{2,1,0:S(1)}} parameter(0)
  %q = {q} parameter(1)
  ROOT %splash_mha_fwd.1 = {q} custom-call(%m, %q, %q, %q), \
custom_call_target="tpu_custom_call", frontend_attributes={{{noted}}}""")
    where = make_rates(parse_slice("v6e-4"))
    cycles = time_step(hlo, where).pallas * where.clock
    assert 3.6 < (cycles - 8 * 16 * 300) / (8 * 4096 * 4096 / 1024) < 5.3


def test_rates_have_the_places_of_all_devices():
    where = parse_slice("v5p-32")
    assert where.shape == (2, 2, 4)
    assert len(set(make_rates(where).places)) == 16
    with_two = make_rates(parse_slice("v3-8"))
    assert with_two.flops == parse_slice("v3-8").chip.flops / 2
    assert len(with_two.places) == 8


# The tiny Llama: 2 layers of 512, 4 heads and 2 of keys, 1,536 in the MLP, a vocabulary of 4,096 and a head
# of its own; 8 rows of 1,024 tokens on 4 chips.
LAYERS, EMBED, MLP, VOCAB, LENGTH, TOKENS = 2, 512, 1536, 4096, 1024, 2 * 1024
HEADS, HEAD_DIM = 4, 128
ATTENTION_WEIGHTS = 2 * EMBED * EMBED + 2 * EMBED * 256
# Tiles of 512 x 512, of which a causal mask leaves 3 of 4.
SCORES = 0.75 * 2 * HEADS * LENGTH * LENGTH * 2 * HEAD_DIM


@pytest.fixture(scope="module")
def timed() -> dict[str, Breakdown]:
    where = make_rates(parse_slice("v5e-4"))
    names = {"none": "llama-2x512-v5e-4", "full": "llama-2x512-v5e-4-remat"}
    return {
        remat: time_step(read_program(PROGRAMS / f"{name}.txt.gz"), where) for remat, name in names.items()
    }


def test_a_real_program_has_the_flops_of_its_model(timed):
    found = timed["none"]
    weights = LAYERS * (ATTENTION_WEIGHTS + 3 * EMBED * MLP) + VOCAB * EMBED
    assert found.matrix_flops == pytest.approx(6 * weights * TOKENS, rel=0.01)
    assert found.kernel_flops == pytest.approx(LAYERS * SCORES * (2 + 3 + 4), rel=0.01)


def test_recomputation_is_counted(timed):
    """With remat full: all of a layer but its last matmul, whose output is not needed again."""
    found, without = timed["full"], timed["none"]
    again = LAYERS * (ATTENTION_WEIGHTS + 2 * EMBED * MLP)
    assert found.matrix_flops == pytest.approx(without.matrix_flops + 2 * again * TOKENS, rel=0.01)
    assert found.kernel_flops == pytest.approx(without.kernel_flops + LAYERS * SCORES * 2, rel=0.01)


def test_a_real_program_is_read_completely_and_its_parts_add_up(timed):
    for found in timed.values():
        assert not found.caveats
        parts = found.matrix + found.memory + found.pallas + found.other
        exposed = sum(traffic.exposed for traffic in found.collectives.values())
        assert found.seconds == pytest.approx(parts + exposed)
        assert all(0 <= traffic.exposed <= traffic.seconds * 1.001 for traffic in found.collectives.values())
        assert found.seconds > (found.matrix_flops + found.kernel_flops) / parse_slice("v5e-4").chip.flops
        assert found.cycles > 0


SCRIPT = """
import sys
import jax
from jax.experimental import topologies
from headrace.training import setup, step
from headrace.nn import sharding, module
from headrace.config import recipe
from headrace.objectives import SpecialTokens, load_part, make_task
from headrace.hardware.slices import parse_slice

where = parse_slice("v5e-4")
cfg = recipe.load(sys.argv[1], sys.argv[2:])
there = topologies.get_topology_desc(where.topology_name, "tpu", **where.topology_options).devices
devices = sharding.make(dict(data=1, fsdp=4, tensor=1, context=1), there)
task = make_task(cfg, SpecialTokens(cfg.model.vocab, 0, 1, 2, 3))
with jax.set_mesh(devices):
    update = setup.make_update(cfg, task)
    abstract, _ = setup.make_state(cfg, task, update, devices)
    axes = module.axes(load_family(task.model).Model, task.model)
    setup.lower_step(cfg, step.make_train_step(task, update, axes), abstract, devices).compile()
"""
RECIPE = """
run_dir: nowhere
model: {use: llama, layers: 2, embed: 256, heads: 2, kv_heads: 1, mlp: 512, vocab: 512}
data: {path: nowhere, sequence_length: 256}
optimizer: {use: adamw, learning_rate: 1e-3}
schedule: {use: cosine, steps: 10, warmup: 2}
batch: {sequences: 8}
attention: {use: splash}
"""


@pytest.mark.slow
def test_flops_and_time_grow_with_the_number_of_layers(tmp_path):
    """By the compiler: FLOPs grow by the same amount per layer, and so does time, approximately."""
    if not LIBTPU.is_dir():
        pytest.importorskip("libtpu")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    places = os.pathsep.join([str(LIBTPU), os.environ.get("PYTHONPATH", "")])
    found = []
    for layers in (4, 8, 12):
        dump = tmp_path / str(layers)
        flags = f"--xla_dump_to={dump} --xla_dump_hlo_as_text"
        env = os.environ | {"XLA_FLAGS": flags, "TPU_WORKER_HOSTNAMES": "localhost", "PYTHONPATH": places}
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "recipe.yaml"), f"model.layers={layers}"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-2000:]
        (text,) = dump.glob("*jit_step*after_codegen.txt")
        found.append(time_step(read_program(text), make_rates(parse_slice("v5e-4"))))
    few, some, many = found
    assert not few.caveats
    assert many.matrix_flops - some.matrix_flops == some.matrix_flops - few.matrix_flops > 0
    assert many.kernel_flops - some.kernel_flops == some.kernel_flops - few.kernel_flops > 0
    assert many.seconds - some.seconds == pytest.approx(some.seconds - few.seconds, rel=0.2)
