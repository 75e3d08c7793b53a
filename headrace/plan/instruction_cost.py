"""What one instruction of a compiled program has to do: products for the matrix units, tiles of kernels,
and bytes that go to and from HBM."""

import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache

from headrace.plan.hlo import Array, Computation, Instruction, Program

HBM = 0  # the memory space of that number
KERNEL = "tpu_custom_call"
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
SLICES = ("dynamic-slice", "slice", "gather")
PASSES = {"high": 3, "highest": 6}  # f32 is multiplied in bf16 parts, each with several others
SPLASH = {"fwd": 2, "dq": 3, "dkv": 4}  # products of the size of the scores that each of its kernels makes
SEQ_MINOR = 2  # how its metadata calls queries, keys and values whose positions come last
# Of a matrix unit. Heads of 64 fill half of one: on v4, v5e and v5p libtpu 0.0.51 schedules as many of its
# instructions for them as for heads of 128, and 6.2 to 10.4 bundles for each register of scores. (v6e's is
# twice as wide, and other work takes longer there.)
SIDE = 128


@dataclass(frozen=True)
class Work:
    flops: float = 0
    effort: float = 0  # FLOPs of the matrix unit: more than `flops` by passes, or where it is not filled
    fp8: float = 0  # of `effort`, those whose factors both have 8 bits
    int8: float = 0
    bytes: float = 0  # to and from HBM
    kernel: str = ""  # the Pallas kernel that it is
    scores: float = 0  # that a kernel takes exponentials of
    tiles: float = 0  # of its grid
    bundles: float = 0  # of instructions, where a kernel says what its compiler made of it
    alone: bool = False  # one core of a device does it all


def work_of(program: Program, computation: Computation, i: Instruction) -> Work:
    if i.attributes.get("custom_call_target", "").strip('"') == KERNEL:
        return _kernel(computation, i)
    if i.opcode == "custom-call":  # of the compiler's own, such as AllocateBuffer: nothing moves
        return Work()
    return replace(_products(program, computation, i), bytes=_traffic(program, computation, i))


def _kernel(computation: Computation, i: Instruction) -> Work:
    """A Pallas kernel. Splash attention takes a map of its tiles, then q [b n s h] and k [b k t h], or with
    the last two turned round, and, if the mask is one of positions, those of the queries [s]. Tiles that the
    mask hides are skipped; it is taken to be causal. Queries that are a part of the sequence are one of two
    chunks that a device has, an early and a late one (`mesh.chunks`): on average they see as much as the
    whole sequence does. Where one kernel makes all gradients, those of the queries are parts [b p n s h], one
    for each tile of keys."""
    given = [computation.instructions[name].shape[0] for name in i.operands]
    moved = sum(array.bytes for array in (*given, *i.shape) if array.space == HBM)
    found = re.search(r"splash_m[hq]a_(fwd|dq|dkv)", i.name + i.op_name)
    if not found:
        return _estimated(i, moved)
    kind = found[1]
    queries, keys = [array.dims for array in given if array.dtype[0] in "bf" and len(array.dims) >= 3][:2]
    if _noted(i, "q_layout") == SEQ_MINOR:
        queries, keys = ((*dims[:-2], dims[-1], dims[-2]) for dims in (queries, keys))
    (*batch, heads, rows, width), columns = queries, keys[-2]
    by_position = any(array.dtype == "s32" and len(array.dims) == 2 for array in given)
    suffix = "" if kind == "fwd" else f"_{kind}"
    down, across = (_noted(i, f"block_{side}{suffix}") or 512 for side in ("q", "kv"))
    tiles = (rows // down) * (columns // across)
    seen: float = tiles
    if by_position:
        # The map is as wide as the most tiles that a row of them has to see; of `dkv` as high, a column.
        plan = given[0].dims
        tiles = (columns // across) * plan[1] if kind == "dkv" else (rows // down) * plan[2]
        ends = range(down, columns + 1, down)
        seen = min(tiles, sum(-(-end // across) for end in ends) * rows / columns)
    every = math.prod(batch) * heads
    scores = every * seen * down * across
    parts = (*batch, columns // across, heads, rows, width)
    fused = kind == "dkv" and any(array.dims == parts for array in i.shape)
    flops = 2.0 * scores * width * (SPLASH[kind] + fused)
    effort = flops * filled(width) / width
    # The cores of a device share heads in `fwd`, rows of the batch in all.
    alone = kind != "fwd" and math.prod(batch) == 1
    return Work(flops, effort, bytes=moved, kernel=i.name, scores=scores, tiles=every * tiles, alone=alone)


def filled(width: int) -> int:
    """The width of the head that takes a matrix unit as long as one of this width."""
    return -(-width // SIDE) * SIDE


def _estimated(i: Instruction, moved: float) -> Work:
    """Any other kernel, by the pl.CostEstimate that it carries: products, bytes (blocks may be read more than
    once), and what goes through the exponential unit, counted as the scores of attention are. Its metadata
    may say how many tiles its grid has, and how many bundles of instructions it takes."""
    noted = i.attributes.get("backend_config", "")

    def number(key: str, text: str = noted) -> float:
        found = re.search(rf"{key}\W+(\d+)", text)
        return float(found[1]) if found else 0.0

    notes, flops = i.attributes.get("frontend_attributes", ""), number("flops")
    return Work(
        flops,
        flops,
        bytes=max(moved, number("bytes_accessed")),
        kernel=i.name,
        scores=number("transcendentals"),
        tiles=number("tiles", notes),
        bundles=number("bundles", notes),
    )


def _noted(i: Instruction, name: str) -> int:
    """A number of a kernel's metadata; 0 where it is not there."""
    found = re.search(rf"{name}\W+(\d+)", i.attributes.get("frontend_attributes", ""))
    return int(found[1]) if found else 0


def _products(program: Program, computation: Computation, i: Instruction) -> Work:
    """The matrix FLOPs of an instruction and of all it calls, and those times the passes they take."""
    if i.opcode in ("dot", "convolution"):
        left, right = (computation.instructions[name].shape[0] for name in i.operands[:2])
        count = _dot(i, left) if i.opcode == "dot" else _convolution(i, left, right)
        precise = re.findall(r"high(?:est)?", i.attributes.get("operand_precision", ""))
        wide = left.bits > 16 or right.bits > 16
        effort = count * max([PASSES[word] for word in precise] if wide else [], default=1)
        kinds = {array.dtype[:2] for array in (left, right)}
        return Work(count, effort, fp8=effort * (kinds == {"f8"}), int8=effort * (kinds == {"s8"}))
    if i.opcode != "fusion":
        return Work()
    inner = program.computations[i.computations("calls")[0]]
    parts = [_products(program, inner, part) for part in inner.instructions.values()]
    return Work(*(sum(getattr(part, name) for part in parts) for name in ("flops", "effort", "fp8", "int8")))


def _dot(i: Instruction, left: Array) -> float:
    contracted = re.findall(r"\d+", i.attributes.get("lhs_contracting_dims", ""))
    return 2.0 * i.shape[0].elements * math.prod(left.dims[int(dim)] for dim in contracted)


def _convolution(i: Instruction, left: Array, right: Array) -> float:
    """TPU programs have their products as convolutions; those with batch dimensions as windows so padded and
    dilated that all but one place of each meets zeros. Places that meet zeros do not count."""
    inputs, kernel, output = re.split("_|->", i.attributes["dim_labels"])
    window = dict(re.findall(r"(\w+)=([\d_x\-]+)", i.attributes.get("window", "")))
    pairs = 1
    for place in range(len(inputs) - 2):

        def of(key: str, default: str, place: int = place) -> int:
            return int(window[key].split("x")[place].split("_")[0] if key in window else default)

        pairs *= _pairs(
            left.dims[inputs.index(str(place))],
            i.shape[0].dims[output.index(str(place))],
            size=of("size", "1"),
            stride=of("stride", "1"),
            low=of("pad", "0"),
            spread=of("lhs_dilate", "1"),
            step=of("rhs_dilate", "1"),
        )
    batch = left.dims[inputs.index("b")] // int(i.attributes.get("batch_group_count", 1))
    return 2.0 * batch * right.dims[kernel.index("i")] * right.dims[kernel.index("o")] * pairs


@lru_cache(maxsize=4096)
def _pairs(length: int, outputs: int, *, size: int, stride: int, low: int, spread: int, step: int) -> int:
    """Pairs of an output and a place in its window that meet a real input: neither padding nor a gap."""
    count, end, shared = 0, (length - 1) * spread, math.gcd(stride, spread)
    period = spread // shared
    for place in range(size):
        # Output o looks at o * stride + offset, which must be a multiple of `spread` from 0 to `end`.
        offset = place * step - low
        first, last = max(0, -(offset // stride)), min(outputs - 1, (end - offset) // stride)
        if first > last or offset % shared:
            continue
        answer = -offset // shared * pow(stride // shared, -1, period) % period
        count += (last - answer) // period - (first - 1 - answer) // period
    return count


def _traffic(program: Program, computation: Computation, i: Instruction) -> float:
    """Bytes read from and written to HBM: of a fusion those that cross its boundary, less what its slices
    leave untouched."""
    given = [computation.instructions[name] for name in i.operands if name in computation.instructions]
    if i.opcode == "dynamic-update-slice":
        return (_bytes(given[0]) > 0) * _size(given[1]) + _bytes(given[1])
    if i.opcode in SLICES:
        return (_bytes(given[0]) > 0) * _size(i) + _bytes(i)
    if i.opcode == "scatter":
        return (_bytes(given[0]) > 0) * 2 * _size(given[-1]) + _bytes(given[-1])
    if i.opcode != "fusion":
        return _bytes(i) + sum(map(_bytes, given))
    inner = program.computations[i.computations("calls")[0]]
    read = [
        min(_bytes(argument), _read(program, inner, name))
        for argument, name in zip(given, inner.parameters, strict=True)
    ]
    written = [
        min(array.bytes, size) * (array.space == HBM)
        for array, size in zip(i.shape, _written(program, inner, inner.root), strict=True)
    ]
    return sum(read) + sum(written)


def _bytes(i: Instruction) -> int:
    return sum(array.bytes for array in i.shape if array.space == HBM)


def _size(i: Instruction) -> int:
    return sum(array.bytes for array in i.shape)


def _read(program: Program, computation: Computation, name: str) -> float:
    """Bytes that a computation reads of one of its values: slices of it alone, or none where it is written
    to in place or only handed on."""
    total = 0.0
    for user in computation.users[name]:
        if user.opcode in ("bitcast", "reshape"):
            total += _read(program, computation, user.name)
        elif user.opcode in SLICES and user.operands[0] == name:
            total += _size(user)
        elif user.opcode == "fusion":
            inner = program.computations[user.computations("calls")[0]]
            places = [place for place, operand in enumerate(user.operands) if operand == name]
            total += sum(_read(program, inner, inner.parameters[place]) for place in places)
        elif user.opcode in COLLECTIVES or user.opcode == "tuple":
            continue
        elif user.opcode != "dynamic-update-slice" or name in user.operands[1:]:
            return math.inf
    return total


def _written(program: Program, computation: Computation, name: str) -> list[float]:
    """Bytes written of each array of a computation's result: of one updated in place only the update, none
    of one that is handed on."""
    i = computation.instructions[name]
    if i.opcode == "tuple":
        return [part for operand in i.operands for part in _written(program, computation, operand)]
    if i.opcode == "bitcast":
        return _written(program, computation, i.operands[0])
    if i.opcode == "dynamic-update-slice":
        return [_size(computation.instructions[i.operands[1]])]
    if i.opcode == "fusion":
        inner = program.computations[i.computations("calls")[0]]
        return _written(program, inner, inner.root)
    if i.opcode == "parameter" or i.opcode in COLLECTIVES:
        return [0.0] * len(i.shape)
    return [math.inf] * len(i.shape)
