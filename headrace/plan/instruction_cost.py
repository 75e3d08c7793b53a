"""Cost of an instruction of a compiled program: matmul FLOPs, tiles of kernels, and bytes to and from HBM."""

import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache

from headrace.plan.hlo import Array, Computation, Instruction, Program

HBM = 0  # memory space
KERNEL_TARGET = "tpu_custom_call"
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
SLICES = ("dynamic-slice", "slice", "gather")
PASSES = {"high": 3, "highest": 6}  # f32 is split into bf16 parts, each multiplied with several others
SPLASH_MATMULS = {"fwd": 2, "dq": 3, "dkv": 4}  # matmuls over all scores in each kernel of splash attention
SEQ_MINOR = 2  # value of splash's layout metadata for queries, keys and values whose positions come last
# Side of a matrix unit. Heads of 64 fill half of one: on v4, v5e and v5p libtpu 0.0.51 schedules as many of
# its instructions for them as for heads of 128, and 6.2 to 10.4 bundles per register of scores. (v6e's unit
# is twice as wide, and other work takes longer there.)
SIDE = 128


@dataclass(frozen=True)
class InstructionCost:
    """Work of one instruction on one device."""

    flops: float = 0
    effort: float = (
        0  # FLOPs of the matrix unit: more than `flops` with several passes, or if it is not filled
    )
    fp8: float = 0  # part of `effort` whose factors are both fp8
    int8: float = 0
    bytes: float = 0  # to and from HBM
    kernel: str = ""  # name of the instruction if it is a Pallas kernel
    scores: float = 0  # exponentials that a kernel computes
    tiles: float = 0  # of a kernel's grid
    bundles: float = 0  # VLIW bundles of a kernel, where its metadata has them
    is_single_core: bool = False  # one core of a device does all of it


def count_cost(program: Program, computation: Computation, i: Instruction) -> InstructionCost:
    """Count the FLOPs and bytes of an instruction, including the computations that it calls."""
    if i.attributes.get("custom_call_target", "").strip('"') == KERNEL_TARGET:
        return _kernel_cost(computation, i)
    if i.opcode == "custom-call":  # the compiler's own, such as AllocateBuffer, which move nothing
        return InstructionCost()
    return replace(_matmul_cost(program, computation, i), bytes=_traffic_bytes(program, computation, i))


def _kernel_cost(computation: Computation, i: Instruction) -> InstructionCost:
    """Count the cost of a Pallas kernel.

    Splash attention takes a map of its tiles, then q [b n s h] and k [b k t h], or these with the last two
    axes transposed, and, if the mask depends on positions, those of the queries [s]. Masked tiles are
    skipped; the mask is assumed to be causal. Queries that are a part of the sequence are one of two chunks
    on each device, an early and a late one (`sharding.context_chunk_order`): their average is that of the
    whole sequence. If one kernel computes all gradients, those of the queries have a part per tile of keys:
    [b p n s h]."""
    inputs = [computation.instructions[name].shape[0] for name in i.operands]
    moved = sum(array.bytes for array in (*inputs, *i.shape) if array.space == HBM)
    match = re.search(r"splash_m[hq]a_(fwd|dq|dkv)", i.name + i.op_name)
    if not match:
        return _annotated_cost(i, moved)
    kind = match[1]
    queries, keys = [array.dims for array in inputs if array.dtype[0] in "bf" and len(array.dims) >= 3][:2]
    if _metadata_number(i, "q_layout") == SEQ_MINOR:
        queries, keys = ((*dims[:-2], dims[-1], dims[-2]) for dims in (queries, keys))
    (*batch, heads, rows, width), columns = queries, keys[-2]
    suffix = "" if kind == "fwd" else f"_{kind}"
    block_q, block_kv = (_metadata_number(i, f"block_{side}{suffix}") or 512 for side in ("q", "kv"))
    tiles, unmasked = _count_tiles(kind, inputs, rows, columns, block_q, block_kv)
    total_heads = math.prod(batch) * heads
    scores = total_heads * unmasked * block_q * block_kv
    parts = (*batch, columns // block_kv, heads, rows, width)
    is_fused = kind == "dkv" and any(array.dims == parts for array in i.shape)
    flops = 2.0 * scores * width * (SPLASH_MATMULS[kind] + is_fused)
    return InstructionCost(
        flops,
        effort=flops * pad_to_matrix_unit(width) / width,
        bytes=moved,
        kernel=i.name,
        scores=scores,
        tiles=total_heads * tiles,
        # The cores of a device share heads in `fwd`, rows of the batch in all kernels.
        is_single_core=kind != "fwd" and math.prod(batch) == 1,
    )


def _count_tiles(
    kind: str, inputs: list[Array], rows: int, columns: int, block_q: int, block_kv: int
) -> tuple[int, float]:
    """Count the tiles of a splash kernel's grid, per head, and those that are not masked."""
    tiles = (rows // block_q) * (columns // block_kv)
    by_position = any(array.dtype == "s32" and len(array.dims) == 2 for array in inputs)
    if not by_position:
        return tiles, tiles
    # The map is as wide as the largest number of unmasked tiles in a row; for `dkv` as high as in a column.
    tile_map = inputs[0].dims
    tiles = (columns // block_kv) * tile_map[1] if kind == "dkv" else (rows // block_q) * tile_map[2]
    row_ends = range(block_q, columns + 1, block_q)
    return tiles, min(tiles, sum(-(-end // block_kv) for end in row_ends) * rows / columns)


def pad_to_matrix_unit(width: int) -> int:
    """Round a head's width up to what the matrix unit processes in the same time."""
    return -(-width // SIDE) * SIDE


def _annotated_cost(i: Instruction, moved: float) -> InstructionCost:
    """Read the cost of a kernel from the pl.CostEstimate attached to it.

    Blocks may be read more than once, so that its bytes may exceed those of the arrays. Whatever goes through
    the exponential unit counts as scores. Its metadata may have the number of tiles in its grid and of VLIW
    bundles."""
    estimate, metadata = i.attributes.get("backend_config", ""), i.attributes.get("frontend_attributes", "")
    flops = _find_number("flops", estimate)
    return InstructionCost(
        flops,
        flops,
        bytes=max(moved, _find_number("bytes_accessed", estimate)),
        kernel=i.name,
        scores=_find_number("transcendentals", estimate),
        tiles=_find_number("tiles", metadata),
        bundles=_find_number("bundles", metadata),
    )


def _find_number(key: str, text: str) -> float:
    match = re.search(rf"{key}\W+(\d+)", text)
    return float(match[1]) if match else 0.0


def _metadata_number(i: Instruction, key: str) -> int:
    """Return a number in a kernel's metadata; 0 if it is missing."""
    return int(_find_number(key, i.attributes.get("frontend_attributes", "")))


def _matmul_cost(program: Program, computation: Computation, i: Instruction) -> InstructionCost:
    """Count the matmul FLOPs of an instruction and its callees, and the effort with several passes."""
    if i.opcode in ("dot", "convolution"):
        left, right = (computation.instructions[name].shape[0] for name in i.operands[:2])
        flops = _dot_flops(i, left) if i.opcode == "dot" else _convolution_flops(i, left, right)
        precisions = re.findall(r"high(?:est)?", i.attributes.get("operand_precision", ""))
        is_wide = left.bits > 16 or right.bits > 16
        effort = flops * max([PASSES[word] for word in precisions] if is_wide else [], default=1)
        formats = {array.dtype[:2] for array in (left, right)}
        return InstructionCost(
            flops, effort, fp8=effort * (formats == {"f8"}), int8=effort * (formats == {"s8"})
        )
    if i.opcode != "fusion":
        return InstructionCost()
    inner = program.computations[i.computations("calls")[0]]
    parts = [_matmul_cost(program, inner, part) for part in inner.instructions.values()]
    return InstructionCost(
        flops=sum(part.flops for part in parts),
        effort=sum(part.effort for part in parts),
        fp8=sum(part.fp8 for part in parts),
        int8=sum(part.int8 for part in parts),
    )


def _dot_flops(i: Instruction, left: Array) -> float:
    contracted = re.findall(r"\d+", i.attributes.get("lhs_contracting_dims", ""))
    return 2.0 * i.shape[0].elements * math.prod(left.dims[int(dim)] for dim in contracted)


def _convolution_flops(i: Instruction, left: Array, right: Array) -> float:
    """Count the FLOPs of a convolution.

    TPU programs have matmuls as convolutions; those with batch dimensions as windows padded and dilated in
    such a way that all but one position of each meets zeros. Positions that meet zeros do not count."""
    inputs, kernel, output = re.split("_|->", i.attributes["dim_labels"])
    window = dict(re.findall(r"(\w+)=([\d_x\-]+)", i.attributes.get("window", "")))
    pairs = 1
    for axis in range(len(inputs) - 2):
        pairs *= _count_window_pairs(
            left.dims[inputs.index(str(axis))],
            i.shape[0].dims[output.index(str(axis))],
            size=_window_number(window, "size", axis, default=1),
            stride=_window_number(window, "stride", axis, default=1),
            low=_window_number(window, "pad", axis, default=0),
            spread=_window_number(window, "lhs_dilate", axis, default=1),
            step=_window_number(window, "rhs_dilate", axis, default=1),
        )
    batch = left.dims[inputs.index("b")] // int(i.attributes.get("batch_group_count", 1))
    return 2.0 * batch * right.dims[kernel.index("i")] * right.dims[kernel.index("o")] * pairs


def _window_number(window: dict[str, str], key: str, axis: int, *, default: int) -> int:
    """Return a window's setting for an axis; of `pad`, which has two ends, the lower."""
    return int(window[key].split("x")[axis].split("_")[0]) if key in window else default


@lru_cache(maxsize=4096)
def _count_window_pairs(
    length: int, outputs: int, *, size: int, stride: int, low: int, spread: int, step: int
) -> int:
    """Count the pairs of an output and a position in its window that meet an input, not padding or a gap."""
    count, end, divisor = 0, (length - 1) * spread, math.gcd(stride, spread)
    period = spread // divisor
    for position in range(size):
        # Output o reads input o * stride + offset, which must be a multiple of `spread` from 0 to `end`.
        offset = position * step - low
        first, last = max(0, -(offset // stride)), min(outputs - 1, (end - offset) // stride)
        if first > last or offset % divisor:
            continue
        solution = -offset // divisor * pow(stride // divisor, -1, period) % period
        count += (last - solution) // period - (first - 1 - solution) // period
    return count


def _traffic_bytes(program: Program, computation: Computation, i: Instruction) -> float:
    """Count the bytes read from and written to HBM.

    For a fusion those of its operands and results, less the parts that its slices do not touch."""
    operands = [computation.instructions[name] for name in i.operands if name in computation.instructions]
    if i.opcode == "dynamic-update-slice":
        return (_hbm_bytes(operands[0]) > 0) * _total_bytes(operands[1]) + _hbm_bytes(operands[1])
    if i.opcode in SLICES:
        return (_hbm_bytes(operands[0]) > 0) * _total_bytes(i) + _hbm_bytes(i)
    if i.opcode == "scatter":
        return (_hbm_bytes(operands[0]) > 0) * 2 * _total_bytes(operands[-1]) + _hbm_bytes(operands[-1])
    if i.opcode != "fusion":
        return _hbm_bytes(i) + sum(map(_hbm_bytes, operands))
    inner = program.computations[i.computations("calls")[0]]
    read = [
        min(_hbm_bytes(operand), _count_read_bytes(program, inner, name))
        for operand, name in zip(operands, inner.parameters, strict=True)
    ]
    written = [
        min(array.bytes, size) * (array.space == HBM)
        for array, size in zip(i.shape, _count_written_bytes(program, inner, inner.root), strict=True)
    ]
    return sum(read) + sum(written)


def _hbm_bytes(i: Instruction) -> int:
    return sum(array.bytes for array in i.shape if array.space == HBM)


def _total_bytes(i: Instruction) -> int:
    return sum(array.bytes for array in i.shape)


def _count_read_bytes(program: Program, computation: Computation, name: str) -> float:
    """Count the bytes that a computation reads of a value; infinity if it may read all of them.

    Slices count as their size. A value that is updated in place, or only passed on, is not read."""
    total = 0.0
    for user in computation.users[name]:
        if user.opcode in ("bitcast", "reshape"):
            total += _count_read_bytes(program, computation, user.name)
        elif user.opcode in SLICES and user.operands[0] == name:
            total += _total_bytes(user)
        elif user.opcode == "fusion":
            inner = program.computations[user.computations("calls")[0]]
            positions = [position for position, operand in enumerate(user.operands) if operand == name]
            total += sum(_count_read_bytes(program, inner, inner.parameters[n]) for n in positions)
        elif user.opcode in COLLECTIVES or user.opcode == "tuple":
            continue
        elif user.opcode != "dynamic-update-slice" or name in user.operands[1:]:
            return math.inf
    return total


def _count_written_bytes(program: Program, computation: Computation, name: str) -> list[float]:
    """Count the bytes written of each array of a computation's result; infinity if it may write all of them.

    Of an array that is updated in place only the update counts, of one that is passed on nothing."""
    i = computation.instructions[name]
    if i.opcode == "tuple":
        return [
            size for operand in i.operands for size in _count_written_bytes(program, computation, operand)
        ]
    if i.opcode == "bitcast":
        return _count_written_bytes(program, computation, i.operands[0])
    if i.opcode == "dynamic-update-slice":
        return [_total_bytes(computation.instructions[i.operands[1]])]
    if i.opcode == "fusion":
        inner = program.computations[i.computations("calls")[0]]
        return _count_written_bytes(program, inner, inner.root)
    if i.opcode == "parameter" or i.opcode in COLLECTIVES:
        return [0.0] * len(i.shape)
    return [math.inf] * len(i.shape)
