"""Traced chat templates: renders a template once for each sequence of roles, with placeholders for the
contents, then fills in the contents of each conversation.

Rendering costs 12 to 20 µs a conversation, as much as encoding 500 tokens. Most templates insert contents
unchanged or trimmed. Like a function that JAX traces, a template runs with placeholders instead of contents.
They allow only operations that cannot change the outcome: concatenation, trimming, and tests whether they
contain some text, which are answered with no. The outline is then valid for all contents that are not blank
and contain none of the tested texts. Any other operation ends the trace, and conversations with that sequence
of roles are rendered one by one."""

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import jinja2
import jinja2.nodes
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from headrace.data.chat.records import Message
from headrace.data.chat.template import OPEN_MARK, ChatTemplate, TemplateRefused
from headrace.data.tokenizer.split_special import SpecialSplitter, SplitText, TextPosition, locate_edges

MAX_OUTLINES = 4096  # sequences of roles that are cached; datasets have tens

SLOT_MARK = "\U0010fffd\U0010ffff"
SLOT_PATTERN = re.compile(f"{SLOT_MARK}([0-9]+)([.-])")  # index of a message; "-" if its content is trimmed

# Filters and tests that do not change a content and give the same result for all texts; for lists of
# messages, those that do not read contents.
SAFE_TESTS = {"string", "defined", "undefined", "none", "mapping", "number", "boolean", "false", "true"}
SAFE_FILTERS = {"default", "d", "string", "trim"}
SAFE_LIST_FILTERS = {"length", "count", "first", "last", "list", "reverse"}


JinjaFunction: TypeAlias = Callable[..., Any]


class TemplateInspectsContent(Exception):
    """The template uses a content in a way that a trace cannot represent."""


class TracedContent(str):
    """A placeholder for the content of a message, alone or within other text."""

    required_absent: ClassVar[set[str]] = set()  # by the current trace: texts that no content may contain

    def assume_absent(self, part: object) -> bool:
        """Record that contents do not contain `part`; always True."""
        if type(part) is not str or not part or SLOT_MARK[0] in part or not is_slot(self):
            raise TemplateInspectsContent
        TracedContent.required_absent.add(part)
        return True

    def __add__(self, other: str) -> "TracedContent":
        return TracedContent(str.__add__(self, other))

    def __radd__(self, other: str) -> "TracedContent":
        return TracedContent(str.__add__(other, self))

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        return True

    def __contains__(self, part: object) -> bool:
        return not self.assume_absent(part)

    def __eq__(self, other: object) -> bool:
        if other is None or (type(other) is str and not other):
            return False
        return not self.assume_absent(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def startswith(self, part: object, *bounds: object) -> bool:
        return self.refuse_inspection() if bounds else not self.assume_absent(part)

    def endswith(self, part: object, *bounds: object) -> bool:
        return self.refuse_inspection() if bounds else not self.assume_absent(part)

    def split(self, part: object = None, limit: int = -1) -> list[str]:  # type: ignore[override]
        self.assume_absent(part)
        return [self]

    def replace(self, old: object, new: object, limit: int = -1) -> str:  # type: ignore[override]
        self.assume_absent(old)
        return self

    def strip(self, *characters: object) -> str:
        if any(argument is not None for argument in characters) or not is_slot(self):
            raise TemplateInspectsContent
        return TracedContent(str.__getitem__(self, slice(None, -1)) + "-")

    def refuse_inspection(self, *args: object, **kwargs: object) -> Any:
        raise TemplateInspectsContent

    __hash__ = __len__ = __iter__ = __getitem__ = __format__ = __repr__ = refuse_inspection
    __mod__ = __rmod__ = __mul__ = __rmul__ = __lt__ = __le__ = __gt__ = __ge__ = refuse_inspection

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") or name in TracedContent.__dict__:
            return str.__getattribute__(self, name)
        raise TemplateInspectsContent


class TracingEnvironment(ImmutableSandboxedEnvironment):
    """A Jinja environment that refuses to pass traced contents to functions that may inspect them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.filters: Any = GuardedFunctions(self.filters, is_filter_safe)
        self.tests: Any = GuardedFunctions(self.tests, is_test_safe)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        text = "".join(parts)
        return TracedContent(text) if SLOT_MARK[0] in text else text

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function of the template, unless it may inspect a traced content."""
        # Jinja adds the variables of the loop to every call, for functions that take the context.
        values = [value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")]
        is_known = isinstance(function, Macro) or function in (Namespace, dict)
        if not is_known and may_hold_content([*args, *values]):
            raise TemplateInspectsContent
        return super().call(context, function, *args, **kwargs)


class GuardedFunctions(dict[str, JinjaFunction]):
    """Filters or tests by name. Each checks its arguments with `is_safe` before it receives a traced content;
    those that are added later do too."""

    def __init__(
        self, functions: dict[str, JinjaFunction], is_safe: Callable[[str, list[object]], bool]
    ) -> None:
        super().__init__(functions)
        self.is_safe = is_safe

    def __getitem__(self, name: str) -> JinjaFunction:
        function = super().__getitem__(name)

        @functools.wraps(function)  # with the attributes from which Jinja knows which arguments to pass
        def guarded(*args: Any, **kwargs: Any) -> Any:
            values = [*args, *kwargs.values()]
            if may_hold_content(values) and not self.is_safe(name, values):
                raise TemplateInspectsContent
            return function(*args, **kwargs)

        return guarded


@dataclass(frozen=True)
class TextWithSlots:
    """A text with slots for contents. Every second part is a slot; `slots` has the index of its message and
    whether the content is trimmed."""

    parts: list[str]
    slots: list[tuple[int, bool]]

    def fill(self, contents: list[str]) -> str:
        """The text with these contents of the messages."""
        if len(self.slots) == 1:  # the usual case, in a third of the time
            before, _, after = self.parts
            index, trim = self.slots[0]
            return before + (contents[index].strip() if trim else contents[index]) + after
        parts = self.parts.copy()
        parts[1::2] = [contents[index].strip() if trim else contents[index] for index, trim in self.slots]
        return "".join(parts)


@dataclass(frozen=True)
class ChatOutline:
    """A rendered conversation, split at its special tokens, with slots for the contents."""

    split: SplitText
    filled_texts: list[tuple[int, TextWithSlots]]  # by the index of the piece
    filled_edges: list[
        tuple[int, TextWithSlots]
    ]  # by the index of an edge between two slots: the piece up to it
    forbidden: tuple[str, ...]  # texts that no content may contain

    def fill(self, contents: list[str]) -> SplitText | None:
        """The split conversation with these contents; None if the outline is not valid for them. The caller
        checks that they contain no special token."""
        if not all(map(str.strip, contents)):
            return None
        for part in self.forbidden:
            for content in contents:
                if part in content:
                    return None
        texts, edges = self.split.texts.copy(), self.split.edges
        for index, text in self.filled_texts:
            texts[index] = text.fill(contents)
        if self.filled_edges:
            edges = edges.copy()
            for index, text in self.filled_edges:
                edges[index] = TextPosition(edges[index].piece, len(text.fill(contents).encode()))
        return SplitText(texts, self.split.next_ids, edges)


class TemplateTracer:
    """The outlines of a template, each traced when it is first needed."""

    def __init__(self, source: str, variables: dict[str, str], splitter: SpecialSplitter) -> None:
        self.template = ChatTemplate(source, variables, splitter.special, TracingEnvironment)
        self.splitter = splitter
        self.is_traceable = splitter.is_unambiguous and is_traceable(self.template.tree)
        self.outlines: dict[tuple[str, ...], ChatOutline | None] = {}

    def get_outline(self, roles: tuple[str, ...]) -> ChatOutline | None:
        """The outline of conversations with these roles; None if they must be rendered."""
        if roles not in self.outlines:
            if len(self.outlines) >= MAX_OUTLINES:
                return None
            self.outlines[roles] = self.trace(roles) if self.is_traceable else None
        return self.outlines[roles]

    def trace(self, roles: tuple[str, ...]) -> ChatOutline | None:
        """Trace the template with placeholders; None if it inspects contents or refuses the roles."""
        TracedContent.required_absent = set()
        messages: list[Message] = [
            {"role": role, "content": TracedContent(f"{SLOT_MARK}{index}.")}
            for index, role in enumerate(roles)
        ]
        try:
            rendered = self.template.locate_answers(messages, self.render_text)
        except TemplateRefused:  # also raised for TemplateInspectsContent; rendering will give the reason
            return None
        pieces = self.splitter.split(rendered.text)
        filled_texts = [(n, parse_slots(text)) for n, text in enumerate(pieces[::2]) if SLOT_MARK in text]
        edges: list[TextPosition] = []
        filled_edges = []
        for piece, before in locate_edges(pieces, [edge for span in rendered.spans for edge in span]):
            text = pieces[2 * piece]
            after, in_token = text[len(before) :], before[len(text) :]
            if SLOT_MARK[0] in SLOT_PATTERN.sub("", before + "|" + after):
                return None  # the edge is within a content
            if SLOT_MARK in before and SLOT_MARK in after:
                filled_edges.append((len(edges), parse_slots(before)))
            from_end = len(after.encode()) - len(in_token.encode())
            edges.append(
                TextPosition(piece, from_end, True)
                if SLOT_MARK in before
                else TextPosition(piece, len(before.encode()))
            )
        split = self.splitter.split_rendered(rendered)
        return ChatOutline(
            SplitText(split.texts, split.next_ids, edges),
            filled_texts,
            filled_edges,
            (OPEN_MARK[:2], *sorted(TracedContent.required_absent)),
        )

    def render_text(self, messages: list[Message], prompt: bool) -> str:
        return "".join([self.template.render_text(messages, None, prompt)])  # a plain str, not TracedContent


def parse_slots(text: str) -> TextWithSlots:
    """Split a traced text at the placeholders in it."""
    pieces = SLOT_PATTERN.split(text)  # text, index, "." or "-", text...
    parts = [part for position, part in enumerate(pieces) if position % 3 != 2]
    return TextWithSlots(
        parts, [(int(index), mode == "-") for index, mode in zip(pieces[1::3], pieces[2::3], strict=True)]
    )


def is_slot(text: str) -> bool:
    return SLOT_PATTERN.fullmatch("".join([text])) is not None


def may_hold_content(value: object) -> bool:
    """Whether a value holds or may hold a traced content: values of unknown types may."""
    if isinstance(value, str):
        return isinstance(value, TracedContent) or SLOT_MARK[0] in value
    if isinstance(value, list | tuple):
        return any(map(may_hold_content, value))
    if isinstance(value, dict):
        return any(map(may_hold_content, value.values()))
    plain = (int, float, jinja2.Undefined, jinja2.Environment, Context, jinja2.nodes.EvalContext, Macro)
    return value is not None and not isinstance(value, plain)


def is_filter_safe(name: str, args: list[object]) -> bool:
    """Whether a filter gives the same result for all contents, with these arguments."""
    contents = [value for value in args if may_hold_content(value)]
    if isinstance(contents[0], str):
        return name in SAFE_FILTERS and len(contents) == 1
    return name in SAFE_LIST_FILTERS or (name in ("selectattr", "rejectattr") and args[2:3] == ["role"])


def is_test_safe(name: str, args: list[object]) -> bool:
    """Whether a Jinja test gives the same result for all contents."""
    return name in SAFE_TESTS


def is_traceable(tree: jinja2.nodes.Template) -> bool:
    """Whether every use of a content in a template reaches the placeholder. Two operations bypass it: `a ~
    b`, and `a in b` where b is a text."""
    if tree.find(jinja2.nodes.Concat):
        return False
    for comparison in tree.find_all(jinja2.nodes.Compare):
        left: jinja2.nodes.Expr = comparison.expr
        for operand in comparison.ops:
            is_list = isinstance(operand.expr, jinja2.nodes.List | jinja2.nodes.Tuple)
            if operand.op in ("in", "notin") and not (isinstance(left, jinja2.nodes.Const) or is_list):
                return False
            left = operand.expr
    return True
