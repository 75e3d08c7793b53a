"""A tokenizer's chat template: from a conversation to the text a model sees, and which of it the assistant
says.

Templates are rendered as transformers renders them, to the same text. What stands in {% generation %} blocks
is what the assistant says. In a template without them it is what a turn adds to the text before it and the
header that prompts it, up to the last special token. The date is always that of `TODAY`: data made again is
the same."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from os.path import commonprefix
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.errors import UserError

TODAY = datetime(2024, 7, 26)  # the date that Llama 3's templates have when they are told none

# Noncharacters, which Unicode reserves for use within a program, and two of them, so that no text has them.
OPEN, CLOSE, STAND_IN = "\U0010fffe\U0010ffff(", "\U0010fffe\U0010ffff)", "\U0010fffe\U0010ffff."

Message = dict[str, Any]
Render = Callable[[list[Message], bool], str]  # messages, and whether to prompt for an answer


class Refused(ValueError):
    """A conversation that the template cannot show, and why."""


@dataclass(frozen=True)
class Rendered:
    """A text, and where in it the assistant speaks, in characters."""

    text: str
    spans: list[tuple[int, int]]


class Template:
    def __init__(
        self,
        source: str,
        variables: dict[str, str],
        special: re.Pattern[str],
        environment: type[jinja2.Environment] = ImmutableSandboxedEnvironment,
    ) -> None:
        """`variables` are bos_token and the like; `special` finds special tokens in a text."""
        self.variables, self.special = variables, special
        self.environment = make_environment(environment)
        try:
            self.compiled = self.environment.from_string(source)
            self.tree = self.environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"the chat template is no Jinja template, line {error.lineno}: {error.message}"
            ) from None
        self.marks = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None
        self.prompts = "add_generation_prompt" in jinja2.meta.find_undeclared_variables(self.tree)

    def render(self, messages: list[Message], tools: list[Any] | None = None) -> Rendered:
        messages = [name_reasoning(message) for message in messages]
        return self.locate(messages, lambda shown, prompt: self.show(shown, tools, prompt))

    def locate(self, messages: list[Message], render: Render) -> Rendered:
        whole = render(messages, False)
        if self.marks:
            return remove_marks(whole)
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        spans = [self.find_turn(whole, messages, number, render) for number in turns]
        return Rendered(whole, [span for span in spans if span[0] < span[1]])

    def show(self, messages: list[Message], tools: list[Any] | None, prompt: bool) -> str:
        try:
            return self.compiled.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **self.variables
            )
        except Exception as error:  # a template is a program: it may fail in any way
            raise Refused(f"the chat template refuses it: {error}") from None

    def find_turn(self, whole: str, messages: list[Message], number: int, render: Render) -> tuple[int, int]:
        """Where in the text of all messages the assistant says the one with this number."""
        before = render(messages[:number], True)
        turn = whole if number == len(messages) - 1 else render(messages[: number + 1], False)
        start = len(before)
        if not whole.startswith(before):
            start = self.leave_prompt(whole, before, render(messages[:number], False))
        elif not self.prompts and messages[number].get("content"):
            # A template that never prompts has the header in the turn itself, before the content.
            other = render([*messages[:number], messages[number] | {"content": STAND_IN}], False)
            place = other.find(STAND_IN)
            start = place if place > start and whole.startswith(other[:place]) else start
        end = len(turn)
        if not whole.startswith(turn):
            end = start + self.count_shared(whole[start:], turn[start:])
        return start, start + self.last_special_end(whole[start:end])

    def leave_prompt(self, whole: str, before: str, earlier: str) -> int:
        """Some prompts begin the answer (`<think>`), which the finished turn may be shown without: then a
        turn begins where the two part, back to the end of a line or a special token."""
        shared = commonprefix([whole, before])
        ends = [match.end() for match in self.special.finditer(shared)] + [shared.rfind("\n") + 1]
        if not whole.startswith(earlier) or max(ends) < len(earlier):
            raise Refused(
                "the chat template shows a turn differently once others follow; use {% generation %} blocks"
            )
        return max(ends)

    def count_shared(self, rest: str, turn: str) -> int:
        """Some templates (Qwen 3) leave the thinking out of a turn once others follow: then the turn is what
        `rest` begins and `turn` ends with, if a special token is in it."""
        place = turn.find(rest[:1], 1)
        while place > 0 and rest:
            if rest.startswith(turn[place:]) and self.special.search(turn, place):
                return len(turn) - place
            place = turn.find(rest[0], place + 1)
        raise Refused(
            "the chat template shows a turn differently once others follow; use {% generation %} blocks"
        )

    def last_special_end(self, said: str) -> int:
        """A model stops at the token that ends its turn: blank space after that is the template's."""
        end = max((match.end() for match in self.special.finditer(said)), default=len(said))
        return len(said) if said[end:].strip() else end


class Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: puts marks around what the assistant says."""

    tags = {"generation"}

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Callable[[], str]) -> str:
        return OPEN + caller() + CLOSE


def make_environment(kind: type[jinja2.Environment] = ImmutableSandboxedEnvironment) -> jinja2.Environment:
    """What templates may use, which is what transformers gives them."""
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = TODAY.strftime
    return environment


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own would write < as \\u003c."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def name_reasoning(message: Message) -> Message:
    """Templates look for reasoning under either of two names, data have it under one of three."""
    names = ("reasoning_content", "thinking", "reasoning")
    said = next((message[name] for name in names if message.get(name) is not None), None)
    return message if said is None else {"thinking": said, **message, "reasoning_content": said}


def remove_marks(marked: str) -> Rendered:
    """Marks come in pairs; a conversation that has them in its own text is refused rather than misread."""
    pieces = re.split(f"({re.escape(OPEN)}|{re.escape(CLOSE)})", marked)
    if pieces[1::2] != [OPEN, CLOSE] * (len(pieces) // 4):
        raise Refused("it contains the noncharacters U+10FFFE U+10FFFF")
    spans, place = [], 0
    for number, piece in enumerate(pieces[::2]):
        if number % 2 and piece:
            spans.append((place, place + len(piece)))
        place += len(piece)
    return Rendered("".join(pieces[::2]), spans)
