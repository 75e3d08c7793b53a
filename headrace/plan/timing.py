"""How long a step takes, from the compiled program: every instruction with its real number of trips, its
matrix FLOPs and its bytes against the rates of the chip, collectives over the links between chips, overlapped
as the compiler has scheduled them. Its constants are stated once, with their evidence, and fit no model."""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from headrace.nn.experts import FURTHER
from headrace.hardware.chips import Chip
from headrace.plan.hlo import Computation, Instruction, Program, Scope, called, inside, trips
from headrace.hardware.slices import Slice
from headrace.plan.instruction_cost import COLLECTIVES, HBM, Work, work_of

# Of the matrix units' peak. libtpu's cycles for single bf16 products of 8,192 and 16,384 rows are 1.02 to
# 1.64 times FLOPs / peak at widths of 4,096 and 8,192 (times four), with v5p, v5e and v6e taken together 1.12
# in the middle; at 1,024 and 2,048 1.02 to 1.08 on v5p and v5e, 1.13 to 2.06 on v6e (libtpu 0.0.51, 2026-11).
MATRIX = 0.9
# Of HBM's bandwidth. libtpu's cycles for streams of f32 are 1.24 times bytes / bandwidth on v5e and v6e, 1.39
# on v5p. For bf16 it reckons as much time an element as for f32: its cycles are no clock for what streams.
STREAM = 0.8
# Of a link's bandwidth, and what a message takes before its first byte: ppermute on v5p and v6e takes 4.6 and
# 2.3 us and then goes at 86 GB/s of 100 (github.com/marin-community/marin/issues/6736).
LINK, START = 0.86, 4e-6
HOP = 1e-6  # from chip to chip (jax-ml.github.io/scaling-book/sharding)
HOST = 16e9  # bytes/s from HBM to the host's memory, one way (jax-ml.github.io/scaling-book/tpus)
# Splash attention on one core, by the bundles that libtpu schedules for heads of 128 and tiles of 512 to
# 2,048: 3.6 to 5.3 cycles for each vector register of 1,024 scores on v6e, whose matrix unit waits for it (on
# v5e and v5p 4.6 to 7.5, where matrix work takes 4 to 8); 120 to 460 for each tile, be it hidden or not.
VECTOR, REGISTER, TILE = 3.9, 1024, 300
# FLOPs a cycle where the clock is not known: with 2^19, v6e's streams take as many cycles a byte as v5e's.
CYCLE = 2**19

HOST_SPACE = 5
FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency"),
    *("partition-id", "replica-id", "opt-barrier", "recv", "send-done"),
}


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one device does in a second, and where the program's devices are."""

    flops: float
    fp8: float  # as many as of `flops` where the chip gains nothing by it
    int8: float
    bandwidth: float
    link: float  # one way
    network: float
    clock: float
    cores: int  # that share the work of a device
    shape: tuple[int, ...]
    wraps: tuple[bool, ...]
    places: tuple[tuple[int, ...], ...]  # of each partition: slice, core of the chip, coordinates


def rates(where: Slice, devices: Sequence[Any] = ()) -> Rates:
    """`devices` are those of the mesh in its order (`mesh.devices.flat`): JAX lays them along the torus, not
    by number. Without them they are taken to lie in order."""
    chip = where.chip
    cells = itertools.product(range(where.slices), *map(range, where.shape), range(chip.devices))
    places = [(cell[0], cell[-1], *cell[1:-1]) for cell in cells]
    if devices:
        sides = len(where.shape)
        places = [(getattr(d, "slice_index", 0), d.core_on_chip, *d.coords[:sides]) for d in devices]
    return Rates(
        flops=chip.flops / chip.devices,
        fp8=(chip.fp8 or chip.flops) / chip.devices,
        int8=(chip.int8 or chip.flops) / chip.devices,
        bandwidth=chip.bandwidth / chip.devices,
        link=chip.link,
        network=(chip.network or math.inf) / chip.devices,
        clock=clock(chip),
        cores=max(1, chip.cores // chip.devices),
        shape=where.shape,
        wraps=where.wraps,
        places=tuple(places),
    )


def clock(chip: Chip) -> float:
    """Of one device, Hz."""
    return chip.clock or chip.flops / chip.devices / CYCLE


@dataclass(frozen=True)
class Traffic:
    """Seconds that a kind of collective takes, and those of them in which the core waits for it."""

    seconds: float
    exposed: float


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """A step of one device. The seconds of `matrix`, `memory`, `pallas` and `other` and what is exposed of
    the collectives make up all of `seconds`."""

    seconds: float
    matrix: float
    memory: float
    pallas: float
    other: float
    collectives: dict[str, Traffic]
    matrix_flops: float  # products of the program, recomputation included
    kernel_flops: float  # and of its Pallas kernels
    cycles: float  # seconds by the compiler's own estimate, which leaves out kernels and collectives
    doubts: tuple[str, ...]  # what could not be read or counted


def step(program: Program, rates: Rates) -> Breakdown:
    """The time of one run of the program on each of its devices."""
    assert program.partitions <= len(rates.places), (
        f"{program.partitions} devices, {len(rates.places)} places"
    )
    walk = _Walk(program, rates)
    walk.run(program.computations[program.entry], Scope())
    spent, flops = walk.amounts, walk.amounts["flops", "matrix", ""]
    kinds: dict[str, float] = defaultdict(float)
    for (what, kind, _), seconds in spent.items():
        if what == "core":
            kinds[kind] += seconds
    total, least = sum(kinds.values()), spent["least", "", ""]
    assert total >= least * (1 - 1e-9), f"{total} s for products that take {least} s at the chip's peak"
    unread = [f"{len(program.unread)} lines could not be read: {line[:80]}" for line in program.unread[:1]]
    return Breakdown(
        seconds=total,
        matrix=kinds["matrix"],
        memory=kinds["memory"],
        pallas=kinds["pallas"],
        other=kinds["other"],
        collectives={
            kind: Traffic(seconds, kinds[kind])
            for (what, kind, _), seconds in sorted(spent.items())
            if what == "moved"
        },
        matrix_flops=flops,
        kernel_flops=spent["flops", "pallas", ""],
        cycles=spent["cycles", "", ""],
        doubts=(*unread, *dict.fromkeys(walk.doubts)),
    )


class _Walk:
    """Goes through the schedule with a clock for the core and one for each thing it shares with what runs in
    the background: HBM, the directions of the torus, the network, the host."""

    def __init__(self, program: Program, rates: Rates) -> None:
        self.program, self.rates = program, rates
        self.now = 0.0
        self.clocks: dict[Any, float] = defaultdict(float)
        self.last: dict[Any, tuple[str, str]] = {}  # kind and name of what used a clock last
        self.pending: dict[str, list[tuple[float, str, str]]] = {}  # until when it is held up, by what
        self.amounts: dict[tuple[str, str, str], float] = defaultdict(float)
        self.doubts: list[str] = []
        self.around = 1  # trips of the loop that is walked

    def run(self, computation: Computation, scope: Scope) -> None:
        for i in computation.instructions.values():
            if i.opcode == "while":
                self.loop(computation, i, scope)
            elif i.opcode == "call":
                inner = self.program.computations[i.computations("to_apply")[0]]
                self.run(inner, called(self.program, computation, i, scope))
            elif i.opcode == "conditional":
                self.branch(i)
            elif i.opcode not in FREE:
                self.instruction(computation, i)

    def loop(self, caller: Computation, i: Instruction, scope: Scope) -> None:
        """Two trips are walked, the first and one like all that follow it."""
        count = trips(self.program, caller, i, scope)
        if count is None and FURTHER in i.op_name:
            self.doubts.append("experts are taken to be about equally busy")
            return
        if count is None and (most := re.search(r"at_most_(\d+)_times\)*/while$", i.op_name)):
            count = int(most[1])  # a batch that grows, once it has grown
        if count is None:  # as in tiled attention, where a row of tiles ends at the diagonal
            count = (self.around + 1) // 2
            self.doubts.append(f"{i.name} is taken to run {count} times, half as often as the loop around it")
        body = self.program.computations[i.computations("body")[0]]
        outer, within = self.amounts, inside(self.program, caller, i, scope)
        around, self.around = self.around, count
        for weight in (1, count - 1)[: min(count, 2)]:
            began, self.amounts = self.now, defaultdict(float)
            self.run(body, within)
            for key, amount in self.amounts.items():
                outer[key] += weight * amount
            later = (weight - 1) * (self.now - began)
            self.clocks |= {key: clock + later for key, clock in self.clocks.items() if clock > began}
            self.now += later
        self.amounts, self.around = outer, around

    def branch(self, i: Instruction) -> None:
        """The longest of the branches counts."""
        names = i.computations("branch_computations") or (
            *i.computations("true_computation"),
            *i.computations("false_computation"),
        )
        tried = []
        for name in names:
            walk = _Walk(self.program, self.rates)
            walk.around = self.around
            walk.run(self.program.computations[name], Scope())
            tried.append(walk)
        longest = max(tried, key=lambda walk: walk.now)
        self.now += longest.now
        self.doubts += longest.doubts
        for key, amount in longest.amounts.items():
            self.amounts[key] += amount

    def instruction(self, computation: Computation, i: Instruction) -> None:
        name = i.op_name or i.name
        phase, inner, one = _role(self.program, computation, i)
        key = _key(computation, i, one)
        if phase == "done":
            self.wait(key)
        elif phase == "update":
            self.pending[i.name] = self.pending.pop(i.operands[0], [])
        elif one is not None:
            kind, seconds, lanes = _transfer(self.rates, inner, one)
            self.amounts["moved", kind, ""] += seconds
            self.pending[key] = self.book(seconds, lanes, kind, name)
            if phase == "whole":
                self.wait(key)
        elif phase == "start":
            moved, host = _copied(self.program, computation, i)
            rate = HOST if host else self.rates.bandwidth * STREAM
            self.pending[key] = self.book(moved / rate, ["host" if host else "hbm"], "memory", name)
        else:
            self.compute(computation, i, name)

    def compute(self, computation: Computation, i: Instruction, name: str) -> None:
        work = work_of(self.program, computation, i)
        rates, began = self.rates, self.now
        self.amounts["cycles", "", ""] += i.cycles / rates.clock
        if work.kernel:
            kind, busy = "pallas", _kernel_seconds(rates, work)
            self.amounts["flops", "pallas", ""] += work.flops
            self.amounts["least", "", ""] += work.flops / rates.flops
            if not work.flops:
                self.doubts.append(f"{name}: a Pallas kernel whose products are not known")
        else:
            peak = _matrix_seconds(rates, work)
            kind, busy = "matrix", peak / MATRIX
            self.amounts["flops", "matrix", ""] += work.flops
            self.amounts["least", "", ""] += peak
        stream = work.bytes / (rates.bandwidth * STREAM)
        if not work.flops and not stream:
            # All of it lies on the chip, where the compiler's estimate is all there is.
            kind, busy = "other", i.cycles / rates.clock
        elif stream > busy and not work.kernel:
            kind = "memory"
        ends = [self.book(stream, ["hbm"], kind, name)[-1][0]] if stream else []
        self.now = max([began + busy, *ends])
        self.amounts["core", kind, name] += self.now - began

    def book(
        self, seconds: float, lanes: Sequence[Any], kind: str, name: str
    ) -> list[tuple[float, str, str]]:
        """Puts something that takes all of `lanes` behind what is in them. When that ends, and when it."""
        latest = max(lanes, key=lambda lane: self.clocks[lane], default=None)
        free = self.clocks[latest] if lanes else 0.0
        finish = max(self.now, free) + seconds
        before = [(free, *self.last[latest])] if free > self.now else []
        for lane in lanes:
            self.clocks[lane], self.last[lane] = finish, (kind, name)
        return [*before, (finish, kind, name)]

    def wait(self, key: str) -> None:
        for until, kind, name in self.pending.pop(key, []):
            if until > self.now:
                self.amounts["core", kind, name] += until - self.now
                self.now = until


def _role(
    program: Program, computation: Computation, i: Instruction
) -> tuple[str, Computation, Instruction | None]:
    """Which part an instruction plays in what may run in the background (start, update, done, or the whole of
    it); and the collective, if it is one, with the computation that this stands in. A product may carry along
    a collective that was started before it, and is a product like others."""
    name, _, phase = i.opcode.rpartition("-")
    if i.opcode in COLLECTIVES:
        return "whole", computation, i
    if i.opcode == "send":  # from slice to slice
        return "start", computation, i
    if phase in ("update", "done") or phase == "start" and name != "async":
        return phase, computation, i if name in COLLECTIVES else None
    if i.opcode not in ("async-start", "fusion"):
        return "", computation, None
    inner = program.computations[i.computations("calls")[0]]
    found = next((part for part in inner.instructions.values() if part.opcode in COLLECTIVES), None)
    if i.opcode == "async-start" or found is None:
        return "start" if i.opcode == "async-start" else "", inner, found
    for part in inner.instructions.values():
        for phase in ("Start", "Done"):
            if f"AsyncCollective{phase}" in part.attributes.get("custom_call_target", ""):
                return phase.lower(), inner, found
    carried = "chain_id" in found.attributes.get("frontend_attributes", "")
    return ("", computation, None) if carried else ("whole", inner, found)


def _key(computation: Computation, i: Instruction, one: Instruction | None) -> str:
    """What a start and its end have in common: its name; where fusions pass it on, its channel; between
    slices the meeting point."""
    if i.opcode == "fusion" and one is not None:
        return f"channel {one.attributes.get('channel_id')}"
    begun = computation.instructions[i.operands[0]] if i.opcode.endswith("-done") else i
    if begun.opcode in ("send", "recv"):
        return f"meeting {_noted(begun, '_xla_host_transfer_rendezvous')}"
    return begun.name


def _noted(i: Instruction, key: str) -> str:
    found = re.search(rf'{key}="([^"]*)"', i.attributes.get("frontend_attributes", ""))
    return found[1] if found else ""


@dataclass(frozen=True)
class _Way:
    """What joins the members of a group: for each axis of the torus they differ in, how many they are along
    it and the bytes/s into each; the number of slices they are in; how many there are in one."""

    axes: tuple[tuple[int, int, float], ...]
    slices: int
    near: int


def _way(rates: Rates, group: Sequence[int]) -> _Way:
    places = [rates.places[member] for member in group]
    near = [place for place in places if place[0] == places[0][0]]
    # Devices of a chip that are in different groups share its links.
    chip = sum(place[0] == places[0][0] and place[2:] == places[0][2:] for place in rates.places)
    share = len({place[1] for place in near}) / chip
    axes = []
    for axis, (side, wraps) in enumerate(zip(rates.shape, rates.wraps, strict=True)):
        at = sorted({place[2 + axis] for place in near})
        if len(at) > 1:
            # Members that are not neighbours share the links between them with other groups. A line has one
            # way into its ends, a ring two.
            apart = max(b - a for a, b in zip(at, at[1:], strict=False))
            ring = wraps and len(at) * apart == side and len(at) > 2
            axes.append((axis, len(at), rates.link * LINK * (2 if ring else 1) * share / apart))
    return _Way(tuple(axes), len({place[0] for place in places}), len(near))


def _transfer(rates: Rates, computation: Computation, i: Instruction) -> tuple[str, float, list[Any]]:
    """What kind a collective is of, the seconds it takes and the lanes it takes up. On a torus all links of
    all axes of a group work at once, and each device receives all but its own part: bytes x (n - 1) / n over
    what comes in. To sum for all is to scatter sums and to gather them."""
    own = sum(array.bytes for name in i.operands for array in computation.instructions[name].shape)
    kind = i.opcode.removesuffix("-start")
    if kind == "send":
        kind = _noted(i, "_xla_megascale_transfer_type").lower().replace("_", "-") or "send"
        seconds = _between(kind, own, len({place[0] for place in rates.places})) / rates.network
        return f"{kind} between slices", START + seconds, ["network"]
    if kind == "collective-permute":
        most, hops, used = _loads(rates, i.pairs)
        rate = rates.network if "network" in used else rates.link * LINK
        return kind, START + HOP * hops + most * own / rate, list(used)
    group = (i.groups or (tuple(range(len(rates.places))),))[0]
    way = _way(rates, group)
    speed = sum(rate for _, _, rate in way.axes) or rates.bandwidth  # between the cores of a chip
    latency = START + HOP * sum(count // 2 for _, count, _ in way.axes)
    whole = own * way.near if kind == "all-gather" else own
    seconds = _between(kind, whole, way.near) / speed
    if kind == "all-to-all":  # half of all bytes cross the middle of each axis, one axis after the other
        seconds = max((own * count / (4 * rate) for _, count, rate in way.axes), default=0.0)
    lanes: list[Any] = [(axis, sign) for axis, _, _ in way.axes for sign in (1, -1)]
    if way.slices > 1:
        seconds += _between(kind, whole / way.near, way.slices) / rates.network
        lanes.append("network")
    return kind, latency + seconds, lanes


def _between(kind: str, whole: float, members: int) -> float:
    """Bytes that each of the members of a group receives."""
    return whole * (members - 1) / members * (2 if kind == "all-reduce" else 1)


@lru_cache(maxsize=1024)
def _loads(rates: Rates, pairs: tuple[tuple[int, int], ...]) -> tuple[int, int, tuple[Any, ...]]:
    """The most messages on one link, the most hops, and the lanes, when each goes along one axis after the
    other, the shorter way round where there is one."""
    loads: dict[Any, int] = defaultdict(int)
    farthest = 0
    for source, target in pairs:
        at, goal = list(rates.places[source]), rates.places[target]
        if at[0] != goal[0]:
            loads["network", at[0], tuple(at)] += 1
            continue
        hops = 0
        for axis, (side, wraps) in enumerate(zip(rates.shape, rates.wraps, strict=True)):
            away = goal[2 + axis] - at[2 + axis]
            if wraps and abs(away) > side - abs(away):
                away -= side if away > 0 else -side
            sign = 1 if away > 0 else -1
            for _ in range(abs(away)):
                loads[axis, sign, at[0], *at[2:]] += 1
                at[2 + axis] = (at[2 + axis] + sign) % side
            hops += abs(away)
        farthest = max(farthest, hops)
    lanes = {"network" if link[0] == "network" else link[:2] for link in loads}
    return max(loads.values(), default=0), farthest, tuple(sorted(lanes, key=str))


def _copied(program: Program, computation: Computation, i: Instruction) -> tuple[float, bool]:
    """Bytes that a copy or slice in the background reads from and writes to HBM, and whether its other end is
    in the host's memory."""
    result = i.shape[:1]
    if i.opcode == "async-start":
        inner = program.computations[i.computations("calls")[0]]
        result = inner.instructions[inner.root].shape
    source = [array for name in i.operands[:1] for array in computation.instructions[name].shape]
    spaces = [array.space for array in (*source[:1], *result)]
    return sum(array.bytes for array in result) * spaces.count(HBM), HOST_SPACE in spaces


def _matrix_seconds(rates: Rates, work: Work) -> float:
    """At the peak of the matrix units, which is another for each format."""
    wide = work.effort - work.fp8 - work.int8
    return wide / rates.flops + work.fp8 / rates.fp8 + work.int8 / rates.int8


def _kernel_seconds(rates: Rates, work: Work) -> float:
    cores = 1 if work.alone else rates.cores
    matrix = work.effort / (rates.flops * MATRIX * cores / rates.cores)
    vector = max(work.scores / REGISTER * VECTOR, work.bundles) / (rates.clock * cores)
    return max(matrix, vector) + work.tiles * TILE / (rates.clock * cores)
