"""Chat templates: renders a conversation to text and finds the answers of the assistant in it.

Renders the same text as transformers. The answers are the content of {% generation %} blocks. In a template
without such blocks, an answer is what a turn adds to the text of the earlier turns and the header that
prompts for it, up to the last special token. The current date is always `TEMPLATE_DATE`, so that data can be
reproduced."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from os.path import commonprefix

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.data.chat.records import Message
from headrace.errors import UserError

TEMPLATE_DATE = datetime(2024, 7, 26)  # the default date of Llama 3's templates

# Noncharacters, which Unicode reserves for internal use, and two of them, so that they do not occur in text.
OPEN_MARK, CLOSE_MARK, PLACEHOLDER = "\U0010fffe\U0010ffff(", "\U0010fffe\U0010ffff)", "\U0010fffe\U0010ffff."

RenderText = Callable[
    [list[Message], bool], str
]  # (messages, whether to add the header of an answer) -> text


class TemplateRefused(ValueError):
    """The template cannot render a conversation; the message gives the reason."""


@dataclass(frozen=True)
class RenderedChat:
    """A rendered text and the (start, stop) of each answer of the assistant in it, in characters."""

    text: str
    spans: list[tuple[int, int]]


class ChatTemplate:
    def __init__(
        self,
        source: str,
        variables: dict[str, str],
        special: re.Pattern[str],
        environment: type[jinja2.Environment] = ImmutableSandboxedEnvironment,
    ) -> None:
        """`variables` are bos_token and the like; `special` matches special tokens in a text."""
        self.variables, self.special = variables, special
        self.environment = make_environment(environment)
        try:
            self.compiled = self.environment.from_string(source)
            self.tree = self.environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"the chat template is not a Jinja template, line {error.lineno}: {error.message}"
            ) from None
        self.has_generation_blocks = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None
        self.uses_generation_prompt = "add_generation_prompt" in jinja2.meta.find_undeclared_variables(
            self.tree
        )

    def render(self, messages: list[Message], tools: list[object] | None = None) -> RenderedChat:
        """Render a conversation and locate the answers. Raises TemplateRefused."""
        messages = [alias_reasoning(message) for message in messages]
        return self.locate_answers(messages, lambda turns, prompt: self.render_text(turns, tools, prompt))

    def locate_answers(self, messages: list[Message], render: RenderText) -> RenderedChat:
        """Render messages with `render`, several times if needed, to find the span of each answer."""
        full = render(messages, False)
        if self.has_generation_blocks:
            return extract_marked_spans(full)
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        spans = [self.find_answer(full, messages, index, render) for index in turns]
        return RenderedChat(full, [span for span in spans if span[0] < span[1]])

    def render_text(self, messages: list[Message], tools: list[object] | None, prompt: bool) -> str:
        """Render messages as they are; with `prompt`, add the header of an answer. Raises TemplateRefused."""
        try:
            return self.compiled.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **self.variables
            )
        except Exception as error:  # a template is a program and can fail in any way
            raise TemplateRefused(f"the chat template refuses it: {error}") from None

    def find_answer(
        self, full: str, messages: list[Message], index: int, render: RenderText
    ) -> tuple[int, int]:
        """The (start, stop) of message `index` of the assistant in `full`, the text of all messages."""
        prompt = render(messages[:index], True)
        through_turn = full if index == len(messages) - 1 else render(messages[: index + 1], False)
        start = len(prompt)
        if not full.startswith(prompt):
            start = self.find_turn_start(full, prompt, render(messages[:index], False))
        elif not self.uses_generation_prompt and messages[index].get("content"):
            # A template without a generation prompt writes the header in the turn itself, before the content.
            replaced = render([*messages[:index], messages[index] | {"content": PLACEHOLDER}], False)
            position = replaced.find(PLACEHOLDER)
            start = position if position > start and full.startswith(replaced[:position]) else start
        end = len(through_turn)
        if not full.startswith(through_turn):
            end = start + self.count_shared(full[start:], through_turn[start:])
        return start, start + self.find_last_special_end(full[start:end])

    def find_turn_start(self, full: str, prompt: str, earlier: str) -> int:
        """The start of a turn whose text does not continue `prompt`. Some prompts open the answer with
        `<think>`, which the finished turn omits: the turn then starts at the last line or special token that
        both share, after `earlier`, the text of the earlier turns."""
        shared = commonprefix([full, prompt])  # noqa: RUF071 (of characters)
        ends = [match.end() for match in self.special.finditer(shared)] + [shared.rfind("\n") + 1]
        if not full.startswith(earlier) or max(ends) < len(earlier):
            raise _changed_turn()
        return max(ends)

    def count_shared(self, remainder: str, turn: str) -> int:
        """The length of a turn in the full text when later turns change it: Qwen 3 omits its thinking. It is
        the longest text with a special token that `turn` ends and `remainder` starts with."""
        position = turn.find(remainder[:1], 1)
        while position > 0 and remainder:
            if remainder.startswith(turn[position:]) and self.special.search(turn, position):
                return len(turn) - position
            position = turn.find(remainder[0], position + 1)
        raise _changed_turn()

    def find_last_special_end(self, turn: str) -> int:
        """The end of a turn without white space after its last special token: the model stops at that token,
        and the template adds the white space."""
        end = max((match.end() for match in self.special.finditer(turn)), default=len(turn))
        return len(turn) if turn[end:].strip() else end


def _changed_turn() -> TemplateRefused:
    return TemplateRefused(
        "the chat template renders a turn differently when other turns follow; use {% generation %} blocks"
    )


class GenerationTag(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: encloses the answer of the assistant in marks."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Callable[[], str]) -> str:
        return OPEN_MARK + caller() + CLOSE_MARK


def make_environment(cls: type[jinja2.Environment] = ImmutableSandboxedEnvironment) -> jinja2.Environment:
    """A Jinja environment with the filters and functions that transformers gives to chat templates."""
    environment = cls(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = TEMPLATE_DATE.strftime
    return environment


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` of chat templates. Jinja's own would write < as \\u003c."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def alias_reasoning(message: Message) -> Message:
    """A message with its reasoning under both names that templates read; datasets use one of three."""
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if message.get(name) is not None), None)
    return (
        message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
    )


def extract_marked_spans(marked: str) -> RenderedChat:
    """Remove the marks of GenerationTag from a text and return the spans they enclosed. Raises
    TemplateRefused if the conversation itself contains marks."""
    pieces = re.split(f"({re.escape(OPEN_MARK)}|{re.escape(CLOSE_MARK)})", marked)
    if pieces[1::2] != [OPEN_MARK, CLOSE_MARK] * (len(pieces) // 4):
        raise TemplateRefused("it contains the noncharacters U+10FFFE U+10FFFF")
    spans, position = [], 0
    for index, piece in enumerate(pieces[::2]):
        if index % 2 and piece:
            spans.append((position, position + len(piece)))
        position += len(piece)
    return RenderedChat("".join(pieces[::2]), spans)
