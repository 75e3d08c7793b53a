"""Chat templates traced: rendered once for each order of roles, with stand-ins for what is said, and then
filled.

Rendering costs 12 to 20 µs a conversation, as much as encoding 500 tokens. Most templates only pass on what
is said, or trim it. Like a function that JAX traces, a template is run with stand-ins, which know what may be
done to them without changing the outcome: be joined to other text, be trimmed, or be asked whether they
contain something. Then the outcome holds for all contents that are not blank and contain none of what was
asked for. Anything else that is done to one ends the trace, and conversations in that order of roles are
rendered one by one."""

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jinja2
import jinja2.nodes
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from headrace.data.tokenizer.split_special import Cut, Cutter, Edge, find_places
from headrace.data.chat.template import OPEN, Message, Refused, Template

SHAPES = 4096  # orders of roles remembered; data have tens

EDGE = "\U0010fffd\U0010ffff"
SLOT = re.compile(f"{EDGE}([0-9]+)([.-])")  # a message's number; "-" if its content is trimmed

# What leaves contents alone and answers alike for all texts. Of lists of messages, what asks for no content.
HARMLESS_TESTS = {"string", "defined", "undefined", "none", "mapping", "number", "boolean", "false", "true"}
HARMLESS_FILTERS = {"default", "d", "string", "trim"}
LIST_FILTERS = {"length", "count", "first", "last", "list", "reverse"}


class Looked(Exception):
    """The template looks into what is said in a way that a trace cannot hold."""


class Content(str):
    """Stands in for a message's content, alone or amid other text."""

    asked: set[str] = set()  # of the trace under way

    def absent(self, part: Any) -> bool:
        if type(part) is not str or not part or EDGE[0] in part or not is_slot(self):
            raise Looked
        Content.asked.add(part)
        return True

    def __add__(self, other: str) -> "Content":
        return Content(str.__add__(self, other))

    def __radd__(self, other: str) -> "Content":
        return Content(str.__add__(other, self))

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        return True

    def __contains__(self, part: object) -> bool:
        return not self.absent(part)

    def __eq__(self, other: object) -> bool:
        return False if other is None or (type(other) is str and not other) else not self.absent(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def startswith(self, part: Any, *bounds: Any) -> bool:
        return self.looked() if bounds else not self.absent(part)

    def endswith(self, part: Any, *bounds: Any) -> bool:
        return self.looked() if bounds else not self.absent(part)

    def split(self, part: Any = None, limit: int = -1) -> list[str]:  # type: ignore[override]
        self.absent(part)
        return [self]

    def replace(self, old: Any, new: Any, limit: int = -1) -> str:  # type: ignore[override]
        self.absent(old)
        return self

    def strip(self, *characters: Any) -> str:
        if any(given is not None for given in characters) or not is_slot(self):
            raise Looked
        return Content(str.__getitem__(self, slice(None, -1)) + "-")

    def looked(self, *arguments: Any, **named: Any) -> Any:
        raise Looked

    __hash__ = __len__ = __iter__ = __getitem__ = __format__ = __repr__ = looked
    __mod__ = __rmod__ = __mul__ = __rmul__ = __lt__ = __le__ = __gt__ = __ge__ = looked

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") or name in Content.__dict__:
            return str.__getattribute__(self, name)
        raise Looked


class Tracing(ImmutableSandboxedEnvironment):
    """Passes contents to nothing but what is known to leave them alone."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.filters: Any = Watched(self.filters, pass_filter)
        self.tests: Any = Watched(self.tests, pass_test)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        text = "".join(parts)
        return Content(text) if EDGE[0] in text else text

    def call(self, context: Any, function: Any, /, *arguments: Any, **named: Any) -> Any:
        # Jinja adds the loop's variables to every call, for functions that ask for the context.
        given = [value for name, value in named.items() if name not in ("_loop_vars", "_block_vars")]
        known = isinstance(function, Macro) or function in (Namespace, dict)
        if not known and holds_content([*arguments, *given]):
            raise Looked
        return super().call(context, function, *arguments, **named)


class Watched(dict[str, Callable[..., Any]]):
    """Filters or tests by name, each asked before it is given a content, those added later too."""

    def __init__(
        self, inner: dict[str, Callable[..., Any]], passes: Callable[[str, list[Any]], bool]
    ) -> None:
        super().__init__(inner)
        self.passes = passes

    def __getitem__(self, name: str) -> Callable[..., Any]:
        function = super().__getitem__(name)

        @functools.wraps(function)  # with the marks that say what Jinja is to give it
        def watched(*arguments: Any, **named: Any) -> Any:
            given = [*arguments, *named.values()]
            if holds_content(given) and not self.passes(name, given):
                raise Looked
            return function(*arguments, **named)

        return watched


@dataclass(frozen=True)
class Blank:
    """A text with gaps: every other part is one, for the content of a message, trimmed or not."""

    parts: list[str]
    gaps: list[tuple[int, bool]]

    def fill(self, contents: list[str]) -> str:
        if len(self.gaps) == 1:  # most have one, and this takes a third of the time
            before, _, after = self.parts
            number, trim = self.gaps[0]
            return before + (contents[number].strip() if trim else contents[number]) + after
        parts = self.parts.copy()
        parts[1::2] = [contents[number].strip() if trim else contents[number] for number, trim in self.gaps]
        return "".join(parts)


@dataclass(frozen=True)
class Outline:
    """A conversation cut at its special tokens, with gaps for what is said."""

    cut: Cut
    blanks: list[tuple[int, Blank]]  # by the number of the piece
    measured: list[tuple[int, Blank]]  # by the number of an edge between two gaps: the piece up to there
    absent: tuple[str, ...]  # what no content may contain

    def fill(self, contents: list[str]) -> Cut | None:
        """None if the outline does not hold for these contents. It is for the caller to see to it that they
        hold no special token."""
        if not all(map(str.strip, contents)):
            return None
        for part in self.absent:
            for content in contents:
                if part in content:
                    return None
        texts, edges = self.cut.texts.copy(), self.cut.edges
        for number, blank in self.blanks:
            texts[number] = blank.fill(contents)
        if self.measured:
            edges = edges.copy()
            for number, blank in self.measured:
                edges[number] = Edge(edges[number].piece, len(blank.fill(contents).encode()))
        return Cut(texts, self.cut.follow, edges)


class Tracer:
    """The outlines of a template, each made when first asked for."""

    def __init__(self, source: str, variables: dict[str, str], cutter: Cutter) -> None:
        self.template, self.cutter = Template(source, variables, cutter.special, Tracing), cutter
        self.possible = cutter.apart and is_traceable(self.template.tree)
        self.outlines: dict[tuple[str, ...], Outline | None] = {}

    def outline(self, roles: tuple[str, ...]) -> Outline | None:
        """None if conversations with this order of roles are to be rendered."""
        if roles not in self.outlines:
            if len(self.outlines) >= SHAPES:
                return None
            self.outlines[roles] = self.trace(roles) if self.possible else None
        return self.outlines[roles]

    def trace(self, roles: tuple[str, ...]) -> Outline | None:
        Content.asked = set()
        messages: list[Message] = [
            {"role": role, "content": Content(f"{EDGE}{number}.")} for number, role in enumerate(roles)
        ]
        try:
            rendered = self.template.locate(messages, self.show)
        except Refused:  # or looked at; if it is refused, rendering will say why
            return None
        pieces = self.cutter.split(rendered.text)
        blanks = [(n, make_blank(text)) for n, text in enumerate(pieces[::2]) if EDGE in text]
        edges: list[Edge] = []
        measured = []
        for piece, before in find_places(pieces, [edge for span in rendered.spans for edge in span]):
            text = pieces[2 * piece]
            after, beyond = text[len(before) :], before[len(text) :]
            if EDGE[0] in SLOT.sub("", before + "|" + after):
                return None  # it is within what is said
            if EDGE in before and EDGE in after:
                measured.append((len(edges), make_blank(before)))
            from_end = len(after.encode()) - len(beyond.encode())
            edges.append(Edge(piece, from_end, True) if EDGE in before else Edge(piece, len(before.encode())))
        cut = self.cutter.cut(rendered)
        return Outline(
            Cut(cut.texts, cut.follow, edges), blanks, measured, (OPEN[:2], *sorted(Content.asked))
        )

    def show(self, messages: list[Message], prompt: bool) -> str:
        return "".join([self.template.show(messages, None, prompt)])  # a plain string


def make_blank(text: str) -> Blank:
    split = SLOT.split(text)  # text, message, whether trimmed, text...
    parts = [part for place, part in enumerate(split) if place % 3 != 2]
    return Blank(
        parts, [(int(number), how == "-") for number, how in zip(split[1::3], split[2::3], strict=True)]
    )


def is_slot(text: str) -> bool:
    return SLOT.fullmatch("".join([text])) is not None


def holds_content(value: Any) -> bool:
    """Whether it is or may hold a content: what is not known to be plain may."""
    if isinstance(value, str):
        return isinstance(value, Content) or EDGE[0] in value
    if isinstance(value, list | tuple):
        return any(map(holds_content, value))
    if isinstance(value, dict):
        return any(map(holds_content, value.values()))
    plain = (int, float, jinja2.Undefined, jinja2.Environment, Context, jinja2.nodes.EvalContext, Macro)
    return value is not None and not isinstance(value, plain)


def pass_filter(name: str, given: list[Any]) -> bool:
    contents = [value for value in given if holds_content(value)]
    if isinstance(contents[0], str):
        return name in HARMLESS_FILTERS and len(contents) == 1
    return name in LIST_FILTERS or (name in ("selectattr", "rejectattr") and given[2:3] == ["role"])


def pass_test(name: str, given: list[Any]) -> bool:
    return name in HARMLESS_TESTS


def is_traceable(tree: jinja2.nodes.Template) -> bool:
    """Two things pass a stand-in by: `a ~ b`, and `a in b` where b is a text."""
    if tree.find(jinja2.nodes.Concat):
        return False
    for comparison in tree.find_all(jinja2.nodes.Compare):
        left: jinja2.nodes.Expr = comparison.expr
        for operand in comparison.ops:
            listed = isinstance(operand.expr, jinja2.nodes.List | jinja2.nodes.Tuple)
            if operand.op in ("in", "notin") and not (isinstance(left, jinja2.nodes.Const) or listed):
                return False
            left = operand.expr
    return True
