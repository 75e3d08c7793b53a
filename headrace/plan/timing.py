"""Seconds that a step takes, simulated from the compiled program.

Every instruction counts with its number of trips, its matmul FLOPs and its bytes against the rates of the
chip, collectives with the links between chips. They overlap as the compiler scheduled them."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.nn.experts import FURTHER_ROUNDS
from headrace.plan import device_rates
from headrace.plan.collectives import Lane, frontend_attribute, transfer_time
from headrace.plan.device_rates import DeviceRates
from headrace.plan.hlo import Computation, Instruction, Program
from headrace.plan.instruction_cost import COLLECTIVES, HBM, InstructionCost, count_cost
from headrace.plan.trip_count import Scope, count_trips, make_call_scope, make_loop_scope

HOST_MEMORY_SPACE = 5
FREE_OPCODES = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency"),
    *("partition-id", "replica-id", "opt-barrier", "recv", "send-done"),
}


@dataclass(frozen=True)
class CollectiveTime:
    """Seconds that a kind of collective takes, and the part of them in which the core waits for it."""

    seconds: float
    exposed: float


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Seconds of a step on one device. `matrix`, `memory`, `pallas`, `other` and the exposed part of the
    collectives add up to `seconds`."""

    seconds: float
    matrix: float
    memory: float
    pallas: float
    other: float
    collectives: dict[str, CollectiveTime]
    matrix_flops: float  # of the program's matmuls, including recomputation
    kernel_flops: float  # of its Pallas kernels
    cycles: float  # seconds by the compiler's own estimate, which omits kernels and collectives
    caveats: tuple[str, ...]  # parts of the program that could not be read or counted


def time_step(program: Program, rates: DeviceRates) -> Breakdown:
    """Simulate one run of a program on each of its devices."""
    assert program.partitions <= len(rates.places), (
        f"{program.partitions} devices, {len(rates.places)} places"
    )
    simulator = _ScheduleSimulator(program, rates)
    simulator.run(program.computations[program.entry], Scope())
    amounts = simulator.amounts
    core_seconds: dict[str, float] = defaultdict(float)
    for (quantity, kind, _), seconds in amounts.items():
        if quantity == "core":
            core_seconds[kind] += seconds
    total, least = sum(core_seconds.values()), amounts["least", "", ""]
    assert total >= least * (1 - 1e-9), f"{total} s for matmuls that take {least} s at the chip's peak"
    unread = program.unread_lines
    return Breakdown(
        seconds=total,
        matrix=core_seconds["matrix"],
        memory=core_seconds["memory"],
        pallas=core_seconds["pallas"],
        other=core_seconds["other"],
        collectives={
            kind: CollectiveTime(seconds, core_seconds[kind])
            for (quantity, kind, _), seconds in sorted(amounts.items())
            if quantity == "moved"
        },
        matrix_flops=amounts["flops", "matrix", ""],
        kernel_flops=amounts["flops", "pallas", ""],
        cycles=amounts["cycles", "", ""],
        caveats=(
            *(f"{len(unread)} lines could not be read: {line[:80]}" for line in unread[:1]),
            *dict.fromkeys(simulator.caveats),
        ),
    )


# The end of an operation: seconds on the simulator's clock, kind and name of what ends then.
_End = tuple[float, str, str]


class _ScheduleSimulator:
    """Simulator of a schedule, with a clock for the core and one for each resource that it shares with
    background operations: HBM, the directions of the torus, the network, the host."""

    def __init__(self, program: Program, rates: DeviceRates) -> None:
        self.program, self.rates = program, rates
        self.now = 0.0
        self.clocks: dict[Lane, float] = defaultdict(float)
        self.last_user: dict[Lane, tuple[str, str]] = {}  # kind and name of the last operation on a lane
        self.pending: dict[str, list[_End]] = {}  # operations in the background, by key
        self.amounts: dict[tuple[str, str, str], float] = defaultdict(float)  # by quantity, kind and name
        self.caveats: list[str] = []
        self.loop_trips = 1  # of the innermost loop

    def run(self, computation: Computation, scope: Scope) -> None:
        """Execute all instructions of a computation."""
        for i in computation.instructions.values():
            if i.opcode == "while":
                self.loop(computation, i, scope)
            elif i.opcode == "call":
                callee = self.program.computations[i.computations("to_apply")[0]]
                self.run(callee, make_call_scope(self.program, computation, i, scope))
            elif i.opcode == "conditional":
                self.branch(i)
            elif i.opcode not in FREE_OPCODES:
                self.execute(computation, i)

    def loop(self, caller: Computation, i: Instruction, scope: Scope) -> None:
        """Execute two trips of a loop: the first, and a second that counts for all others."""
        trips = self.count_loop_trips(caller, i, scope)
        if trips is None:
            return
        body = self.program.computations[i.computations("body")[0]]
        body_scope = make_loop_scope(self.program, caller, i, scope)
        outer_amounts, outer_trips, self.loop_trips = self.amounts, self.loop_trips, trips
        for weight in (1, trips - 1)[: min(trips, 2)]:
            started_at, self.amounts = self.now, defaultdict(float)
            self.run(body, body_scope)
            for key, amount in self.amounts.items():
                outer_amounts[key] += weight * amount
            later = (weight - 1) * (self.now - started_at)
            self.clocks |= {lane: clock + later for lane, clock in self.clocks.items() if clock > started_at}
            self.now += later
        self.amounts, self.loop_trips = outer_amounts, outer_trips

    def count_loop_trips(self, caller: Computation, i: Instruction, scope: Scope) -> int | None:
        """Count the trips of a loop, with a caveat where they are assumed. None: the loop is not counted."""
        trips = count_trips(self.program, caller, i, scope)
        if trips is None and FURTHER_ROUNDS in i.op_name:
            self.caveats.append("experts are assumed to be about equally busy")
            return None
        if trips is None and (limit := re.search(r"at_most_(\d+)_times\)*/while$", i.op_name)):
            trips = int(limit[1])  # a batch that grows, once it has grown
        if trips is None:  # as in tiled attention, where a row of tiles ends at the diagonal
            trips = (self.loop_trips + 1) // 2
            self.caveats.append(
                f"{i.name} is assumed to run {trips} times, half as often as the loop around it"
            )
        return trips

    def branch(self, i: Instruction) -> None:
        """Execute the branches of a conditional and count the longest."""
        names = i.computations("branch_computations") or (
            *i.computations("true_computation"),
            *i.computations("false_computation"),
        )
        branches = []
        for name in names:
            branch = _ScheduleSimulator(self.program, self.rates)
            branch.loop_trips = self.loop_trips
            branch.run(self.program.computations[name], Scope())
            branches.append(branch)
        longest = max(branches, key=lambda branch: branch.now)
        self.now += longest.now
        self.caveats += longest.caveats
        for key, amount in longest.amounts.items():
            self.amounts[key] += amount

    def execute(self, computation: Computation, i: Instruction) -> None:
        """Execute an instruction on the core, or start, update or await an operation in the background."""
        name = i.op_name or i.name
        phase, inner, collective = _classify_phase(self.program, computation, i)
        key = _pending_key(computation, i, collective)
        if phase == "done":
            self.wait(key)
        elif phase == "update":
            self.pending[i.name] = self.pending.pop(i.operands[0], [])
        elif collective is not None:
            kind, seconds, lanes = transfer_time(self.rates, inner, collective)
            self.amounts["moved", kind, ""] += seconds
            self.pending[key] = self.reserve(seconds, lanes, kind, name)
            if phase == "whole":
                self.wait(key)
        elif phase == "start":
            size, uses_host = _copied_bytes(self.program, computation, i)
            if uses_host:
                bandwidth, lane = device_rates.HOST_BANDWIDTH, "host"
            else:
                bandwidth, lane = self.rates.bandwidth * device_rates.HBM_SHARE, "hbm"
            self.pending[key] = self.reserve(size / bandwidth, [lane], "memory", name)
        else:
            self.compute(computation, i, name)

    def compute(self, computation: Computation, i: Instruction, name: str) -> None:
        """Execute an instruction on the core: it takes as long as its matmuls, or its bytes to and from
        HBM."""
        cost = count_cost(self.program, computation, i)
        rates, started_at = self.rates, self.now
        self.amounts["cycles", "", ""] += i.cycles / rates.clock
        if cost.kernel:
            kind, busy = "pallas", _kernel_seconds(rates, cost)
            self.amounts["flops", "pallas", ""] += cost.flops
            self.amounts["least", "", ""] += cost.flops / rates.flops
            if not cost.flops:
                self.caveats.append(f"{name}: a Pallas kernel whose FLOPs are not known")
        else:
            at_peak = _matmul_seconds(rates, cost)
            kind, busy = "matrix", at_peak / device_rates.MATMUL_SHARE
            self.amounts["flops", "matrix", ""] += cost.flops
            self.amounts["least", "", ""] += at_peak
        stream = cost.bytes / (rates.bandwidth * device_rates.HBM_SHARE)
        if not cost.flops and not stream:
            # Everything is in on-chip memory, where only the compiler's estimate is available.
            kind, busy = "other", i.cycles / rates.clock
        elif stream > busy and not cost.kernel:
            kind = "memory"
        stream_end = [self.reserve(stream, ["hbm"], kind, name)[-1][0]] if stream else []
        self.now = max([started_at + busy, *stream_end])
        self.amounts["core", kind, name] += self.now - started_at

    def reserve(self, seconds: float, lanes: Sequence[Lane], kind: str, name: str) -> list[_End]:
        """Queue an operation on `lanes` behind their current users.

        Returns when it ends, preceded by the end of the user that delays it most, if any."""
        latest = max(lanes, key=lambda lane: self.clocks[lane], default=None)
        free_at = self.clocks[latest] if lanes else 0.0
        ends_at = max(self.now, free_at) + seconds
        delayed_by = [(free_at, *self.last_user[latest])] if free_at > self.now else []
        for lane in lanes:
            self.clocks[lane], self.last_user[lane] = ends_at, (kind, name)
        return [*delayed_by, (ends_at, kind, name)]

    def wait(self, key: str) -> None:
        """Let the core wait until a pending operation ends."""
        for ends_at, kind, name in self.pending.pop(key, []):
            if ends_at > self.now:
                self.amounts["core", kind, name] += ends_at - self.now
                self.now = ends_at


def _classify_phase(
    program: Program, computation: Computation, i: Instruction
) -> tuple[str, Computation, Instruction | None]:
    """Return the phase of a background operation that an instruction is: start, update, done, whole, or "".

    Also the collective, if it is one, and the computation that contains that. A matmul may carry along a
    collective that was started before it; it then counts as a matmul only."""
    name, _, phase = i.opcode.rpartition("-")
    if i.opcode in COLLECTIVES:
        return "whole", computation, i
    if i.opcode == "send":  # from slice to slice
        return "start", computation, i
    if phase in ("update", "done") or (phase == "start" and name != "async"):
        return phase, computation, i if name in COLLECTIVES else None
    if i.opcode not in ("async-start", "fusion"):
        return "", computation, None
    inner = program.computations[i.computations("calls")[0]]
    collective = next((part for part in inner.instructions.values() if part.opcode in COLLECTIVES), None)
    if i.opcode == "async-start" or collective is None:
        return "start" if i.opcode == "async-start" else "", inner, collective
    for part in inner.instructions.values():
        for phase in ("Start", "Done"):
            if f"AsyncCollective{phase}" in part.attributes.get("custom_call_target", ""):
                return phase.lower(), inner, collective
    is_carried = "chain_id" in collective.attributes.get("frontend_attributes", "")
    return ("", computation, None) if is_carried else ("whole", inner, collective)


def _pending_key(computation: Computation, i: Instruction, collective: Instruction | None) -> str:
    """Return a key that the start and the end of a background operation have in common.

    This is the name of the start; where fusions pass it on, its channel; between slices the rendezvous."""
    if i.opcode == "fusion" and collective is not None:
        return f"channel {collective.attributes.get('channel_id')}"
    start = computation.instructions[i.operands[0]] if i.opcode.endswith("-done") else i
    if start.opcode in ("send", "recv"):
        return f"rendezvous {frontend_attribute(start, '_xla_host_transfer_rendezvous')}"
    return start.name


def _copied_bytes(program: Program, computation: Computation, i: Instruction) -> tuple[float, bool]:
    """Return the bytes that a background copy moves to or from HBM, and whether the host is involved."""
    result = i.shape[:1]
    if i.opcode == "async-start":
        inner = program.computations[i.computations("calls")[0]]
        result = inner.instructions[inner.root].shape
    source = [array for name in i.operands[:1] for array in computation.instructions[name].shape]
    spaces = [array.space for array in (*source[:1], *result)]
    return sum(array.bytes for array in result) * spaces.count(HBM), HOST_MEMORY_SPACE in spaces


def _matmul_seconds(rates: DeviceRates, cost: InstructionCost) -> float:
    """Return the seconds of matmuls at the peak of the matrix units, which depends on the format."""
    wide = cost.effort - cost.fp8 - cost.int8
    return wide / rates.flops + cost.fp8 / rates.fp8 + cost.int8 / rates.int8


def _kernel_seconds(rates: DeviceRates, cost: InstructionCost) -> float:
    """Return the seconds of a kernel: of matmuls or vector instructions, whichever is more, and of tiles."""
    cores = 1 if cost.is_single_core else rates.cores
    matrix = cost.effort / (rates.flops * device_rates.MATMUL_SHARE * cores / rates.cores)
    cycles = cost.scores / device_rates.SCORES_PER_REGISTER * device_rates.CYCLES_PER_REGISTER
    vector = max(cycles, cost.bundles) / (rates.clock * cores)
    return max(matrix, vector) + cost.tiles * device_rates.CYCLES_PER_TILE / (rates.clock * cores)
