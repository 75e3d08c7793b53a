"""Files that nobody meant: real ones with bytes, lines, keys and values changed at random, and a clock that
finds what never ends. The same seed gives the same change."""

import contextlib
import copy
import json
import signal
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**30, 10**400, 1e308),
    *(0.5, -0.5, 1e-300, float("nan"), float("inf"), -float("inf"), "", " ", "nan", "1e3", "1_000", "0x10"),
    *("auto", "null", "~", "yes", "é", "\u202e", "\0", "\ud800", "🙂" * 50, "x" * 5000, "a\nb", "../..", "/"),
    *("${seed}", "${nowhere}", "${oc.env:HOME}", "${", "???", "*", "{}", "[]", "%", "3B tokens", "-3 %"),
    *(
        [],
        {},
        [1],
        [[]],
        {"use": "nothing"},
        {"use": None},
        {"": 1},
        {"x": {"y": {"z": 1}}},
        [{"use": "adamw"}],
    ),
]
PIECES = [
    "\t",
    "\0",
    "\ufeff",
    "\u2028",
    "é",
    "🙂",
    "---\n",
    "...\n",
    "- ",
    ": ",
    "{",
    "}",
    "[",
    "]",
    '"',
    "'",
]
PIECES += [
    "&a ",
    "*a",
    "!!int ",
    "!!python/object:x ",
    "<<: ",
    "|",
    ">",
    "#",
    "%",
    "@",
    "`",
    "${",
    "\r",
    "\n",
    "  ",
]


class Hangs(BaseException):
    """No `except Exception` of what is tested may keep it."""


@contextlib.contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Hangs(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def odd(random: Random) -> Any:
    """A value where another was meant."""
    if random.random() < 0.1:
        return deep(random.choice([3, 30, 300]), random.random() < 0.5)
    if random.random() < 0.2:
        return random.choice([random.randint(-10, 100), 10 ** random.uniform(-9, 9), random.getrandbits(70)])
    return copy.deepcopy(random.choice(ODD))


def deep(levels: int, in_lists: bool) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value] if in_lists else {"a": value}
    return value


def tree(random: Random, value: Any) -> Any:
    """A copy of nested values with one to three of them changed, dropped, renamed, exchanged or added."""
    value = copy.deepcopy(value)
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        nodes = list(containers(value))
        if not nodes:
            return odd(random)
        node = random.choice(nodes)
        places = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not places:
            continue
        place, kind = (
            random.choice(places),
            random.choice(["odd"] * 4 + ["drop", "rename", "swap", "add", "wrap"]),
        )
        if kind == "odd":
            node[place] = odd(random)
        elif kind == "drop":
            del node[place]
        elif kind == "wrap":
            node[place] = random.choice([[node[place]], {"use": node[place]}, str(node[place])])
        elif kind == "swap":
            other = random.choice(nodes)
            there = random.choice(
                (list(other) if isinstance(other, dict) else list(range(len(other)))) or [None]
            )
            if there is not None:  # by copies: what holds itself is no file
                node[place], other[there] = copy.deepcopy(other[there]), copy.deepcopy(node[place])
        elif isinstance(node, dict):
            name = random.choice([f"{place}s", "", "x.y", "é", "use", str(place).upper(), "\0", "0"])
            node[name] = node.pop(place) if kind == "rename" else odd(random)
        else:
            node.append(odd(random))
    return value


def containers(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from containers(inner)


def text(random: Random, value: str) -> str:
    """Letters and lines changed, doubled, dropped or exchanged."""
    for _ in range(random.choice([1, 1, 2, 4])):
        value = _one_in_text(random, value)
    return value


def _one_in_text(random: Random, value: str) -> str:
    lines = value.splitlines(keepends=True) or [""]
    here, there = random.randrange(len(lines)), random.randrange(len(lines))
    at = random.randrange(len(value) + 1)
    return random.choice(
        [
            lambda: value[:at] + random.choice(PIECES) + value[at:],
            lambda: value[:at] + random.choice(PIECES) + value[at + 1 :],
            lambda: value[:at],
            lambda: value[:at] + value[at + random.randint(1, 8) :],
            lambda: "".join(lines[:here] + lines[here + 1 :]),
            lambda: "".join(lines[: here + 1] + lines[there:]),
            lambda: "".join([*lines[:here], lines[there], *lines[here:]]),
            lambda: "".join([*lines[:here], random.choice(["  ", "\t"]) + lines[here], *lines[here + 1 :]]),
            lambda: value[:at] + random.choice("[{(") * 2000 + value[at:],
        ]
    )()


def content(random: Random, value: bytes) -> bytes:
    """Bytes cut, flipped, dropped, doubled, zeroed or put in."""
    for _ in range(random.choice([1, 1, 2, 5])):
        value = _one_in_content(random, value)
    return value


def _one_in_content(random: Random, value: bytes) -> bytes:
    at, length = random.randrange(len(value) + 1), random.choice([1, 1, 4, 30])
    flipped = bytes(byte ^ 1 << random.randrange(8) for byte in value[at : at + length])
    return random.choice(
        [
            lambda: value[:at],
            lambda: value[at:],
            lambda: value[:at] + flipped + value[at + length :],
            lambda: value[:at] + flipped + value[at + length :],
            lambda: value[:at] + value[at + length :],
            lambda: value[:at] + value[at : at + length] * 2 + value[at + length :],
            lambda: value[:at] + bytes(length) + value[at + length :],
            lambda: value[:at] + random.randbytes(length) + value[at:],
            lambda: value + random.randbytes(length),
        ]
    )()


def json_file(random: Random, value: bytes) -> bytes:
    """A file of JSON with its values changed, or its bytes."""
    if random.random() < 0.3:
        return content(random, value)
    return as_json(tree(random, json.loads(value)))


def as_json(value: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except RecursionError:
        return b'{"a":' * 100_000


Change = Callable[[Random, bytes], bytes]
