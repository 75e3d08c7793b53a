"""Parser of compiled programs: XLA's optimized and scheduled HLO text, read into computations and
instructions.

Times and hardware are not known here."""

import gzip
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

BITS = {"pred": 8, "token": 0, "opaque": 0}


@dataclass(frozen=True)
class Array:
    """An array of a shape. `order` is minor to major, and tiles pad the array.

    Memory space 0 is HBM, 1 is VMEM (on the chip), and 5 the host's memory; the others hold flags and
    scalars."""

    dtype: str
    dims: tuple[int, ...]
    order: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()
    space: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bits(self) -> int:
        """Bits per element: 32 for f32, 8 for f8e4m3fn."""
        if self.dtype in BITS:
            return BITS[self.dtype]
        width = re.search(r"\d+", self.dtype)
        return int(width[0]) * (2 if self.dtype[0] == "c" else 1) if width else 0

    @cached_property
    def bytes(self) -> int:
        """Bytes in memory, including padding: f32[1024,64] in tiles of 8 x 128 takes twice its size."""
        sizes = [self.dims[dim] for dim in self.order] if len(self.order) == len(self.dims) else []
        for axis, side in enumerate(reversed(self.tile[-len(sizes) :] if sizes else ())):
            sizes[axis] = -(-sizes[axis] // side) * side
        return (math.prod(sizes) if sizes else self.elements) * self.bits // 8


@dataclass(frozen=True)
class Instruction:
    """An instruction of a computation.

    `shape` has all arrays of the result in order, with nested tuples flattened. `literal` is the text in the
    brackets of a parameter (its number) or a constant."""

    name: str
    opcode: str
    shape: tuple[Array, ...]
    operands: tuple[str, ...] = ()
    attributes: dict[str, str] = field(default_factory=dict)
    literal: str = ""

    def computations(self, key: str) -> tuple[str, ...]:
        """Return the names of computations in an attribute: `calls=%a`, `branch_computations={%a, %b}`."""
        return tuple(re.findall(r"%?([\w.\-]+)", self.attributes.get(key, "")))

    @cached_property
    def op_name(self) -> str:
        """Name of the operation in the source, such as `jit(step)/while/body/dot_general`."""
        match = re.search(r'op_name="([^"]*)"', self.attributes.get("metadata", ""))
        return match[1] if match else ""

    @property
    def cycles(self) -> int:
        """Cycles by the compiler's estimate; 0 where it made none."""
        match = re.search(r'"estimated_cycles":"?(\d+)', self.attributes.get("backend_config", ""))
        return int(match[1]) if match else 0

    @cached_property
    def replica_groups(self) -> tuple[tuple[int, ...], ...]:
        return parse_replica_groups(self.attributes.get("replica_groups", ""))

    @cached_property
    def source_target_pairs(self) -> tuple[tuple[int, int], ...]:
        """(source, target) of each message of a collective-permute."""
        pairs = re.findall(r"\{(\d+),(\d+)\}", self.attributes.get("source_target_pairs", ""))
        return tuple((int(source), int(target)) for source, target in pairs)


@dataclass(frozen=True)
class Computation:
    name: str
    instructions: dict[str, Instruction]  # in the order in which they run
    root: str

    @cached_property
    def parameters(self) -> list[str]:
        """Names of the parameters in the order of their numbers."""
        parameters = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return [i.name for i in sorted(parameters, key=lambda i: int(i.literal))]

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Instructions that take each value as an operand, by the value's name."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                users.setdefault(operand, []).append(instruction)
        return users


@dataclass(frozen=True)
class Program:
    computations: dict[str, Computation]
    entry: str
    header: str
    unread_lines: tuple[str, ...] = ()  # lines that could not be parsed

    @property
    def partitions(self) -> int:
        """Number of devices that the program is partitioned for."""
        match = re.search(r"num_partitions=(\d+)", self.header)
        return int(match[1]) if match else 1


def read_program(path: Path) -> Program:
    """Read a program from a file that XLA dumped, which may be gzipped."""
    data = path.read_bytes()
    return parse_program((gzip.decompress(data) if path.suffix == ".gz" else data).decode())


def parse_program(text: str) -> Program:
    """Parse HLO text. Lines that cannot be parsed are listed in `unread_lines`."""
    computations: dict[str, Computation] = {}
    unread: list[str] = []
    body: dict[str, Instruction] | None = None
    entry = header = name = root = ""
    for line in _join_lines(text):
        if body is None:
            if line.startswith("HloModule"):
                header = line
            elif match := re.match(r"(ENTRY\s+)?%?([\w.\-]+)\s.*->.*\{$", line):
                name, root, body = match[2], "", {}
                entry = name if match[1] else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, body, root or next(reversed(body), ""))
            body = None
        elif line:
            instruction = _parse_instruction(line)
            if instruction is None:
                unread.append(line)
                continue
            body |= {element.name: element for element in _tuple_elements(instruction, body)}
            body[instruction.name] = instruction
            root = instruction.name if line.startswith("ROOT ") else root
    if body is not None:
        unread.append(f"{name}: the text ends inside this computation")
    return Program(computations, entry, header, tuple(unread))


def parse_shapes(text: str) -> tuple[Array, ...]:
    """Parse all arrays of a shape: `f32[8,128]{1,0:T(8,128)S(1)}`, or a tuple of them."""
    return tuple(_make_array(*match.groups()) for match in _ARRAY.finditer(text))


def parse_replica_groups(text: str) -> tuple[tuple[int, ...], ...]:
    """Parse groups of devices, which HLO writes in three ways.

    `{{0,1},{2,3}}`; `[2,2]<=[2,2]T(1,0)`: consecutive numbers, reshaped, transposed and split;
    `mesh['a'=2,'b'=4] {'b'}`: devices that differ in `b` only, where `'b':(2)2` is a part of the axis: of
    size 2, inside of parts of total size 2."""
    if match := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        rows, dims = _parse_numbers(match[1]), _parse_numbers(match[2])
        size = rows[-1] if len(rows) > 1 else math.prod(dims) // rows[0]
        return _split_transposed(dims, _parse_numbers(match[3] or "") or tuple(range(len(dims))), size)
    if not (match := re.match(r"mesh\[(.*?)\].*?\{(.*?)\}", text)):
        groups = re.findall(r"\{([\d,\s]+)\}", text)
        return tuple(_parse_numbers(group) for group in groups)
    chosen = {name: (int(outer or 1), int(size or 0)) for name, outer, size in _AXIS_PART.findall(match[2])}
    dims_of_parts: list[int] = []
    outer_axes, inner_axes = [], []
    for name, length in re.findall(r"'([^']*)'=(\d+)", match[1]):
        outer, size = chosen.get(name, (int(length), 1))
        parts = (outer, size or int(length) // outer, int(length) // (outer * (size or int(length))))
        outer_axes += [len(dims_of_parts), len(dims_of_parts) + 2]
        inner_axes.append(len(dims_of_parts) + 1)
        dims_of_parts += [max(1, part) for part in parts]
    group_size = math.prod(dims_of_parts[axis] for axis in inner_axes)
    return _split_transposed(tuple(dims_of_parts), (*outer_axes, *inner_axes), group_size)


def _split_transposed(
    dims: tuple[int, ...], order: tuple[int, ...], size: int
) -> tuple[tuple[int, ...], ...]:
    """Number an array's elements, transpose it to the axes `order`, and split it into groups of `size`."""
    numbers = [0]
    for axis in order:
        numbers = [n + i * math.prod(dims[axis + 1 :]) for n in numbers for i in range(dims[axis])]
    return tuple(tuple(numbers[i : i + size]) for i in range(0, len(numbers), size))


_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_AXIS_PART = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{},]')
_NESTING = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
_HEAD = re.compile(r"(?:ROOT\s+)?%?([\w.\-]+)\s+=\s+")


def _make_array(dtype: str, dims: str, layout: str | None) -> Array:
    order, _, attributes = (layout or "").partition(":")
    tile, space = re.search(r"T\(([\d,]+)\)", attributes), re.search(r"S\((\d+)\)", attributes)
    return Array(
        dtype=dtype,
        dims=_parse_numbers(dims.replace("<=", "")),
        order=_parse_numbers(order),
        tile=_parse_numbers(tile[1]) if tile else (),
        space=int(space[1]) if space else 0,
    )


def _parse_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip().isdigit())


def _parse_instruction(line: str) -> Instruction | None:
    """Parse `%name = shape opcode(operands), key=value, ...`; None if the line has another form."""
    line = re.sub(r"/\*.*?\*/", "", line)  # comments such as /*index=5*/
    head = _HEAD.match(line)
    if not head:
        return None
    start = head.end()
    end = _closing_bracket(line, start) if line[start] == "(" else line.find(" ", start)
    opcode = re.compile(r"\s*([\w\-]+)\(").match(line, end) if end > 0 else None
    close = _closing_bracket(line, opcode.end() - 1) if opcode else -1
    if not opcode or close < 0:
        return None
    inner = line[opcode.end() : close - 1]
    has_literal = opcode[1] in ("parameter", "constant", "iota")
    operands = () if has_literal else tuple(part.split()[-1].lstrip("%") for part in _split_at_commas(inner))
    pairs = (part.partition("=") for part in _split_at_commas(line[close:].lstrip(", ")))
    return Instruction(
        name=head[1],
        opcode=opcode[1],
        shape=parse_shapes(line[start:end]),
        operands=operands,
        attributes={key.strip(): value for key, _, value in pairs},
        literal=inner if has_literal else "",
    )


def _tuple_elements(i: Instruction, body: dict[str, Instruction]) -> Iterator[Instruction]:
    """Make an instruction for each operand written as `%a#2`, an element of a tuple without its own line."""
    for operand in i.operands:
        name, _, index = operand.partition("#")
        if index.isdigit() and name in body and operand not in body:
            shape = body[name].shape[int(index) : int(index) + 1]
            yield Instruction(operand, "get-tuple-element", shape, (name,), {"index": index})


def _join_lines(text: str) -> Iterator[str]:
    """Iterate over stripped lines, joining those of an instruction whose brackets span several."""
    joined = ""
    for line in text.splitlines():
        joined = f"{joined} {line.strip()}" if joined else line.strip()
        is_complete = joined.count("{") == joined.count("}") or not _HEAD.match(joined) or _depth(joined) <= 0
        if is_complete:
            yield joined
            joined = ""
    if joined:
        yield joined


def _depth(text: str) -> int:
    """Return the number of brackets that are open at the end of a text."""
    return sum(_NESTING.get(token[0], 0) for token in _TOKEN.finditer(text))


def _closing_bracket(text: str, start: int) -> int:
    """Return the index after the bracket that closes the one at `start`; -1 if none does."""
    depth = 0
    for token in _TOKEN.finditer(text, start):
        depth += _NESTING.get(token[0], 0)
        if depth == 0:
            return token.end()
    return -1


def _split_at_commas(text: str) -> Iterator[str]:
    """Split a text at its commas, except in brackets and quotes."""
    depth = start = 0
    for token in _TOKEN.finditer(text):
        if token[0] == "," and depth == 0:
            yield text[start : token.start()].strip()
            start = token.end()
        depth += _NESTING.get(token[0], 0)
    if remainder := text[start:].strip():
        yield remainder
