"""A compiled program as text (XLA's optimised and scheduled HLO) read into computations and instructions, and
how often each loop in it runs. Nothing in here knows about time or hardware."""

import gzip
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

BITS = {"pred": 8, "token": 0, "opaque": 0}
MOST_TRIPS = 2**24  # a loop that runs longer has a condition we have not understood
Route = tuple[int, ...]  # of indices into nested tuples


@dataclass(frozen=True)
class Array:
    """One array of a shape. `order` is minor to major; tiles pad what they cover. Of the memory spaces 0 is
    HBM, 1 is VMEM, on the chip, and 5 is the host's; the others hold flags and scalars."""

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
        """Of one element: f32 is 32, f8e4m3fn is 8."""
        if self.dtype in BITS:
            return BITS[self.dtype]
        width = re.search(r"\d+", self.dtype)
        return int(width[0]) * (2 if self.dtype[0] == "c" else 1) if width else 0

    @cached_property
    def bytes(self) -> int:
        """As it lies in memory, padding included: f32[1024,64] in tiles of 8 x 128 takes twice its size."""
        sizes = [self.dims[dim] for dim in self.order] if len(self.order) == len(self.dims) else []
        for place, side in enumerate(reversed(self.tile[-len(sizes) :] if sizes else ())):
            sizes[place] = -(-sizes[place] // side) * side
        return (math.prod(sizes) if sizes else self.elements) * self.bits // 8


@dataclass(frozen=True)
class Instruction:
    """`shape` holds all arrays of the result, in order, whatever tuples they lie in. `literal` is what stands
    in the brackets of a parameter (its number) or a constant."""

    name: str
    opcode: str
    shape: tuple[Array, ...]
    operands: tuple[str, ...] = ()
    attributes: dict[str, str] = field(default_factory=dict)
    literal: str = ""

    def computations(self, key: str) -> tuple[str, ...]:
        """The computations that an attribute names: `calls=%a`, `branch_computations={%a, %b}`."""
        return tuple(re.findall(r"%?([\w.\-]+)", self.attributes.get(key, "")))

    @cached_property
    def op_name(self) -> str:
        found = re.search(r'op_name="([^"]*)"', self.attributes.get("metadata", ""))
        return found[1] if found else ""

    @property
    def cycles(self) -> int:
        """The compiler's estimate; 0 where it made none."""
        found = re.search(r'"estimated_cycles":"?(\d+)', self.attributes.get("backend_config", ""))
        return int(found[1]) if found else 0

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        return replica_groups(self.attributes.get("replica_groups", ""))

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(source, target) of a collective-permute."""
        found = re.findall(r"\{(\d+),(\d+)\}", self.attributes.get("source_target_pairs", ""))
        return tuple((int(source), int(target)) for source, target in found)


@dataclass(frozen=True)
class Computation:
    name: str
    instructions: dict[str, Instruction]  # in the order in which they run
    root: str

    @cached_property
    def parameters(self) -> list[str]:
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return [i.name for i in sorted(found, key=lambda i: int(i.literal))]

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
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
    unread: tuple[str, ...] = ()  # lines that could not be made sense of

    @property
    def partitions(self) -> int:
        found = re.search(r"num_partitions=(\d+)", self.header)
        return int(found[1]) if found else 1


def read(path: Path) -> Program:
    data = path.read_bytes()
    return parse((gzip.decompress(data) if path.suffix == ".gz" else data).decode())


def parse(text: str) -> Program:
    computations: dict[str, Computation] = {}
    unread: list[str] = []
    body: dict[str, Instruction] | None = None
    entry = header = name = root = ""
    for stripped in _lines(text):
        if body is None:
            if stripped.startswith("HloModule"):
                header = stripped
            elif found := re.match(r"(ENTRY\s+)?%?([\w.\-]+)\s.*->.*\{$", stripped):
                name, root, body = found[2], "", {}
                entry = name if found[1] else entry
        elif stripped.startswith("}"):
            computations[name] = Computation(name, body, root or next(reversed(body), ""))
            body = None
        elif stripped:
            instruction = _instruction(stripped)
            if instruction is None:
                unread.append(stripped)
                continue
            body |= {part.name: part for part in _elements(instruction, body)}
            body[instruction.name] = instruction
            root = instruction.name if stripped.startswith("ROOT ") else root
    if body is not None:
        unread.append(f"{name}: the text ends inside of it")
    return Program(computations, entry, header, tuple(unread))


def shapes(text: str) -> tuple[Array, ...]:
    """All arrays of a shape: `f32[8,128]{1,0:T(8,128)S(1)}`, or a tuple of them."""
    return tuple(_array(*found.groups()) for found in _ARRAY.finditer(text))


def replica_groups(text: str) -> tuple[tuple[int, ...], ...]:
    """Three ways to write groups of devices: `{{0,1},{2,3}}`; `[2,2]<=[2,2]T(1,0)`, numbers counted up,
    transposed and cut; `mesh['a'=2,'b'=4] {'b'}`, those that differ in `b` alone. There `'b':(2)2` is a part
    of an axis: of size 2, inside of parts before it that make 2."""
    if found := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        rows, dims = _numbers(found[1]), _numbers(found[2])
        size = rows[-1] if len(rows) > 1 else math.prod(dims) // rows[0]
        return _cut(dims, _numbers(found[3] or "") or tuple(range(len(dims))), size)
    if not (found := re.match(r"mesh\[(.*?)\].*?\{(.*?)\}", text)):
        groups = re.findall(r"\{([\d,\s]+)\}", text)
        return tuple(_numbers(group) for group in groups)
    chosen = {name: (int(before or 1), int(size or 0)) for name, before, size in _PART.findall(found[2])}
    sizes: list[int] = []
    apart, together = [], []
    for name, length in re.findall(r"'([^']*)'=(\d+)", found[1]):
        before, size = chosen.get(name, (int(length), 1))
        parts = (before, size or int(length) // before, int(length) // (before * (size or int(length))))
        apart += [len(sizes), len(sizes) + 2]
        together.append(len(sizes) + 1)
        sizes += [max(1, part) for part in parts]
    return _cut(tuple(sizes), (*apart, *together), math.prod(sizes[place] for place in together))


def _cut(dims: tuple[int, ...], order: tuple[int, ...], size: int) -> tuple[tuple[int, ...], ...]:
    """The numbers of an array of `dims`, its axes put into `order`, in groups of `size`."""
    numbers = [0]
    for axis in order:
        numbers = [n + i * math.prod(dims[axis + 1 :]) for n in numbers for i in range(dims[axis])]
    return tuple(tuple(numbers[i : i + size]) for i in range(0, len(numbers), size))


@dataclass(frozen=True)
class Scope:
    """What is known of a computation's parameters: whole numbers by parameter and path into its tuple."""

    find: Callable[[int, Route], int | None] = lambda number, path: None


def trips(program: Program, caller: Computation, loop: Instruction, scope: Scope) -> int | None:
    """How often a loop's body runs: the condition is followed from the counter's first value on. None where
    that depends on data."""
    noted = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes.get("backend_config", ""))
    if noted:
        return int(noted[1])
    condition, body = (program.computations[loop.computations(key)[0]] for key in ("condition", "body"))
    asked: set[Route] = set()

    def first(path: Route) -> int | None:
        return _value(program, caller, loop.operands[0], path, scope)

    def look(number: int, path: Route) -> int | None:
        asked.add(path)
        return first(path)

    again = _value(program, condition, condition.root, (), Scope(look))
    moving = [path for path in asked if _origin(body, body.root, path) != path]
    if again is None or len(moving) != 1:
        return None
    counter, start = moving[0], first(moving[0])
    after = _value(program, body, body.root, counter, Scope(lambda number, path: first(path)))
    if start is None or after is None or after == start:
        return None

    def runs(count: int) -> bool:
        now = start + count * (after - start)
        state = Scope(lambda number, path: now if path == counter else first(path))
        return bool(_value(program, condition, condition.root, (), state))

    low, high = -1, 0  # runs(low), not runs(high)
    while runs(high):
        low, high = high, 2 * high + 1
        if high > MOST_TRIPS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if runs(middle) else (low, middle)
    return high


def inside(program: Program, caller: Computation, loop: Instruction, scope: Scope) -> Scope:
    """What a loop's body knows of its parameter: all that it hands on as it got it."""
    body = program.computations[loop.computations("body")[0]]

    def find(number: int, path: Route) -> int | None:
        if _origin(body, body.root, path) != path:
            return None
        return _value(program, caller, loop.operands[0], path, scope)

    return Scope(find)


def called(program: Program, caller: Computation, call: Instruction, scope: Scope) -> Scope:
    """What a called computation knows of its parameters."""
    return Scope(lambda number, path: _value(program, caller, call.operands[number], path, scope))


_SAME = {"copy", "bitcast", "reshape", "convert", "opt-barrier", "copy-done", "domain"}
_MATHS: dict[str, Callable[..., int]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: int(a / b) if b else 0,
    "remainder": lambda a, b: int(math.fmod(a, b)) if b else 0,
    "minimum": min,
    "maximum": max,
    "negate": lambda a: -a,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "not": lambda a: not a,
    "select": lambda a, b, c: b if a else c,
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
}


def _value(program: Program, computation: Computation, name: str, path: Route, scope: Scope) -> int | None:
    """The whole number at `path` in the result of an instruction; None where it cannot be told."""
    i = computation.instructions.get(name)
    if i is None:
        return None

    def operand(number: int, path: Route = ()) -> int | None:
        return _value(program, computation, i.operands[number], path, scope)

    if i.opcode == "constant":
        return _literal(i.literal)
    if i.opcode == "parameter":
        return scope.find(int(i.literal), path)
    if i.opcode == "tuple" and path:
        return operand(path[0], path[1:])
    if i.opcode == "get-tuple-element":
        return operand(0, (int(i.attributes["index"]), *path))
    if i.opcode == "copy-start":
        return operand(0)
    if i.opcode in _SAME:
        return operand(0, path)
    if i.opcode in ("fusion", "call"):
        inner = program.computations[i.computations("calls" if i.opcode == "fusion" else "to_apply")[0]]
        return _value(program, inner, inner.root, path, Scope(operand))
    if i.opcode == "while":
        body = program.computations[i.computations("body")[0]]
        return operand(0, path) if _origin(body, body.root, path) == path else None
    rule = _MATHS.get(i.attributes.get("direction", "") if i.opcode == "compare" else i.opcode)
    numbers = [operand(place) for place in range(len(i.operands))] if rule else [None]
    return None if rule is None or None in numbers else int(rule(*numbers))


def _origin(computation: Computation, name: str, path: Route) -> Route | None:
    """Where in the parameter of a loop's body a part of its result comes from, untouched."""
    i = computation.instructions[name]
    while i.opcode != "parameter":
        if i.opcode == "tuple" and path:
            name, path = i.operands[path[0]], path[1:]
        elif i.opcode == "get-tuple-element":
            name, path = i.operands[0], (int(i.attributes["index"]), *path)
        elif i.opcode in _SAME:
            name = i.operands[0]
        else:
            return None
        i = computation.instructions[name]
    return path


def _literal(text: str) -> int | None:
    text = text.strip()
    if text in ("true", "false"):
        return int(text == "true")
    return int(text) if re.fullmatch(r"-?\d+", text) else None


_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_PART = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{},]')
_STEP = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
_HEAD = re.compile(r"(?:ROOT\s+)?%?([\w.\-]+)\s+=\s+")


def _array(dtype: str, dims: str, layout: str | None) -> Array:
    order, _, rest = (layout or "").partition(":")
    tile, space = re.search(r"T\(([\d,]+)\)", rest), re.search(r"S\((\d+)\)", rest)
    return Array(
        dtype=dtype,
        dims=_numbers(dims.replace("<=", "")),
        order=_numbers(order),
        tile=_numbers(tile[1]) if tile else (),
        space=int(space[1]) if space else 0,
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip().isdigit())


def _instruction(line: str) -> Instruction | None:
    """`%name = shape opcode(operands), key=value, ...`; None for a line that is none."""
    line = re.sub(r"/\*.*?\*/", "", line)  # /*index=5*/, to help the eye
    head = _HEAD.match(line)
    if not head:
        return None
    start = head.end()
    end = _closing(line, start) if line[start] == "(" else line.find(" ", start)
    found = re.compile(r"\s*([\w\-]+)\(").match(line, end) if end > 0 else None
    close = _closing(line, found.end() - 1) if found else -1
    if not found or close < 0:
        return None
    inner = line[found.end() : close - 1]
    plain = found[1] in ("parameter", "constant", "iota")
    operands = () if plain else tuple(part.split()[-1].lstrip("%") for part in _split(inner))
    pairs = (part.partition("=") for part in _split(line[close:].lstrip(", ")))
    return Instruction(
        name=head[1],
        opcode=found[1],
        shape=shapes(line[start:end]),
        operands=operands,
        attributes={key.strip(): value for key, _, value in pairs},
        literal=inner if plain else "",
    )


def _elements(i: Instruction, body: dict[str, Instruction]) -> Iterator[Instruction]:
    """The operands that are named as a place in a tuple, `%a#2`, which has no line of its own."""
    for operand in i.operands:
        name, _, index = operand.partition("#")
        if index.isdigit() and name in body and operand not in body:
            shape = body[name].shape[int(index) : int(index) + 1]
            yield Instruction(operand, "get-tuple-element", shape, (name,), {"index": index})


def _lines(text: str) -> Iterator[str]:
    """The lines of a text; what stands in the brackets of an instruction may take several."""
    held = ""
    for line in text.splitlines():
        held = f"{held} {line.strip()}" if held else line.strip()
        whole = held.count("{") == held.count("}") or not _HEAD.match(held) or _depth(held) <= 0
        if whole:
            yield held
            held = ""
    if held:
        yield held


def _depth(text: str) -> int:
    return sum(_STEP.get(token[0], 0) for token in _TOKEN.finditer(text))


def _closing(text: str, start: int) -> int:
    """Just behind the bracket that closes the one at `start`; -1 if none does."""
    depth = 0
    for token in _TOKEN.finditer(text, start):
        depth += _STEP.get(token[0], 0)
        if depth == 0:
            return token.end()
    return -1


def _split(text: str) -> Iterator[str]:
    """The parts between commas that stand in no bracket or quotation."""
    depth = last = 0
    for token in _TOKEN.finditer(text):
        if token[0] == "," and depth == 0:
            yield text[last : token.start()].strip()
            last = token.end()
        depth += _STEP.get(token[0], 0)
    if rest := text[last:].strip():
        yield rest
