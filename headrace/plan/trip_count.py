"""Trip counts of loops in compiled programs, evaluated from the loop's condition and the counter's steps."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from headrace.plan.hlo import Computation, Instruction, Program

MAX_TRIPS = 2**24  # a loop with more trips has a condition that was misread
Route = tuple[int, ...]  # indices into nested tuples


def _unknown(number: int, route: Route) -> int | None:
    return None


@dataclass(frozen=True)
class Scope:
    """Known parameters of a computation.

    `find(number, route)` returns the integer at `route` in the tuple that is parameter `number`, or None."""

    find: Callable[[int, Route], int | None] = _unknown


class _LoopState:
    """The values of a loop's variables at the start, and which of them its condition reads."""

    def __init__(self, program: Program, caller: Computation, loop: Instruction, scope: Scope) -> None:
        self.program, self.caller, self.loop, self.scope = program, caller, loop, scope
        condition, body = (loop.computations(key)[0] for key in ("condition", "body"))
        self.condition, self.body = program.computations[condition], program.computations[body]
        self.read_routes: set[Route] = set()

    def initial(self, number: int, route: Route) -> int | None:
        return _evaluate(self.program, self.caller, self.loop.operands[0], route, self.scope)

    def record_initial(self, number: int, route: Route) -> int | None:
        self.read_routes.add(route)
        return self.initial(number, route)

    def evaluate_condition(self, find: Callable[[int, Route], int | None]) -> int | None:
        return _evaluate(self.program, self.condition, self.condition.root, (), Scope(find))

    def is_invariant(self, route: Route) -> bool:
        return _origin(self.body, self.body.root, route) == route

    def holds_at(self, counter: Route, value: int) -> bool:
        """Whether the condition is true when the counter has this value."""
        return bool(
            self.evaluate_condition(
                lambda number, route: value if route == counter else self.initial(number, route)
            )
        )


def count_trips(program: Program, caller: Computation, loop: Instruction, scope: Scope) -> int | None:
    """Count how often a loop's body runs, by evaluating its condition from the first value of its counter.

    None if that depends on data."""
    annotation = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes.get("backend_config", ""))
    if annotation:
        return int(annotation[1])
    state = _LoopState(program, caller, loop, scope)
    result = state.evaluate_condition(state.record_initial)
    counters = [route for route in state.read_routes if not state.is_invariant(route)]
    if result is None or len(counters) != 1:
        return None
    (counter,) = counters
    first = state.initial(0, counter)
    second = _evaluate(program, state.body, state.body.root, counter, Scope(state.initial))
    if first is None or second is None or second == first:
        return None
    step = second - first
    low, high = -1, 0  # the condition holds after `low` trips, and not after `high`
    while state.holds_at(counter, first + high * step):
        low, high = high, 2 * high + 1
        if high > MAX_TRIPS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if state.holds_at(counter, first + middle * step) else (low, middle)
    return high


def make_loop_scope(program: Program, caller: Computation, loop: Instruction, scope: Scope) -> Scope:
    """Return the known parameters of a loop's body: the elements of its tuple that it does not change."""
    state = _LoopState(program, caller, loop, scope)

    def find(number: int, route: Route) -> int | None:
        return state.initial(number, route) if state.is_invariant(route) else None

    return Scope(find)


def make_call_scope(program: Program, caller: Computation, call: Instruction, scope: Scope) -> Scope:
    """Return the known parameters of a computation that is called."""
    return Scope(lambda number, route: _evaluate(program, caller, call.operands[number], route, scope))


_IDENTITY = {"copy", "bitcast", "reshape", "convert", "opt-barrier", "copy-done", "domain"}
_ARITHMETIC: dict[str, Callable[..., int]] = {
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


def _evaluate(
    program: Program, computation: Computation, name: str, route: Route, scope: Scope
) -> int | None:
    """Evaluate the integer at `route` in the result of an instruction. None if it is not known."""
    i = computation.instructions.get(name)
    if i is None:
        return None

    def operand(number: int, route: Route = ()) -> int | None:
        return _evaluate(program, computation, i.operands[number], route, scope)

    if i.opcode == "constant":
        return _parse_literal(i.literal)
    if i.opcode == "parameter":
        return scope.find(int(i.literal), route)
    if i.opcode == "tuple" and route:
        return operand(route[0], route[1:])
    if i.opcode == "get-tuple-element":
        return operand(0, (int(i.attributes["index"]), *route))
    if i.opcode == "copy-start":
        return operand(0)
    if i.opcode in _IDENTITY:
        return operand(0, route)
    if i.opcode in ("fusion", "call"):
        callee = program.computations[i.computations("calls" if i.opcode == "fusion" else "to_apply")[0]]
        return _evaluate(program, callee, callee.root, route, Scope(operand))
    if i.opcode == "while":
        body = program.computations[i.computations("body")[0]]
        return operand(0, route) if _origin(body, body.root, route) == route else None
    function = _ARITHMETIC.get(i.attributes.get("direction", "") if i.opcode == "compare" else i.opcode)
    numbers = [operand(position) for position in range(len(i.operands))] if function else [None]
    return None if function is None or None in numbers else int(function(*numbers))


def _origin(computation: Computation, name: str, route: Route) -> Route | None:
    """Return the route in a loop body's parameter from which a part of its result is copied unchanged."""
    i = computation.instructions[name]
    while i.opcode != "parameter":
        if i.opcode == "tuple" and route:
            name, route = i.operands[route[0]], route[1:]
        elif i.opcode == "get-tuple-element":
            name, route = i.operands[0], (int(i.attributes["index"]), *route)
        elif i.opcode in _IDENTITY:
            name = i.operands[0]
        else:
            return None
        i = computation.instructions[name]
    return route


def _parse_literal(text: str) -> int | None:
    text = text.strip()
    if text in ("true", "false"):
        return int(text == "true")
    return int(text) if re.fullmatch(r"-?\d+", text) else None
