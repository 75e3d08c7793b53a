"""Chat and instruction records: converts the layouts in which datasets are published to lists of messages.
Does not use a tokenizer.

A message is what most chat templates expect: {"role": "system" | "user" | "assistant" | "tool", "content":
text or None} and any other keys it has (tool_calls, name, tool_call_id...). Tools that the assistant may call
come first, as {"role": "tools", "tools": [...]}, and reach the template as `tools`. A preference pair
consists of three such lists: the prompt and two answers (`to_preference_parts`)."""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from headrace.data.documents import JsonObject

Message: TypeAlias = dict[str, Any]
Record: TypeAlias = dict[str, Any]

# Columns by content, the most common name first.
CHAT_COLUMNS = ("messages", "conversation", "chat", "dialog", "dialogue")
INPUT_COLUMNS = ("input", "context")
OUTPUT_COLUMNS = ("output", "response")
COMPLETION_COLUMNS = ("completion", "response", "chosen")
QUESTION_COLUMNS = ("question", "query")
ANSWER_COLUMNS = ("answer", "response")
SYSTEM_COLUMNS = ("system", "system_prompt")

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "chatbot", "model", "ai", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "tool_response", "ipython"), "tool"),
}


def detect_shape(columns: Iterable[str]) -> str | None:
    """The layout of records with these columns, such as "sharegpt"; None if they are neither chats nor
    instructions."""
    names = set(columns)
    if {"chosen", "rejected"} <= names:
        return "preference"
    if names & set(CHAT_COLUMNS):
        return "messages"
    if "conversations" in names:
        return "sharegpt"
    if "instruction" in names and names & set(OUTPUT_COLUMNS):
        return "alpaca"
    if "prompt" in names and names & set(COMPLETION_COLUMNS):
        return "prompt_completion"
    if names & set(QUESTION_COLUMNS) and names & set(ANSWER_COLUMNS):
        return "question_answer"
    return None


def to_messages(shape: str, record: Record) -> list[Message]:
    """Convert a record with the layout `shape` to messages. Raises ValueError that describes what is wrong
    with the record."""
    messages = _READERS[shape](record)
    if not messages:
        raise ValueError("it has no messages")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("it has no message of the assistant")
    return _add_system_and_tools(messages, record)


def to_preference_parts(record: Record) -> list[JsonObject]:
    """Convert a record with `chosen` and `rejected` to three parts: prompt, chosen, rejected; each holds a
    list of messages. The prompt includes the messages with which both answers start: some datasets repeat the
    whole conversation in both. Raises ValueError that describes what is wrong with the record."""
    prompt, chosen, rejected = record.get("prompt"), record.get("chosen"), record.get("rejected")
    answers = [_answer_to_messages(chosen, "chosen"), _answer_to_messages(rejected, "rejected")]
    prompt_messages: list[Message] = []
    if prompt is not None:
        prompt_messages = _prompt_to_messages(prompt)
        answers = [_remove_prefix(answer, prompt_messages) for answer in answers]
    num_shared = 0
    while num_shared < min(map(len, answers)) and answers[0][num_shared] == answers[1][num_shared]:
        num_shared += 1
    prompt_messages = prompt_messages + answers[0][:num_shared]
    answers = [answer[num_shared:] for answer in answers]
    if not prompt_messages:
        raise ValueError("`chosen` and `rejected` start with no common message, and there is no `prompt`")
    for name, answer in zip(("chosen", "rejected"), answers, strict=True):
        if not any(message["role"] == "assistant" for message in answer):
            raise ValueError(f"`{name}` has no message of the assistant that the other answer does not have")
    prompt_messages = _add_system_and_tools(prompt_messages, record)
    parts = {"prompt": prompt_messages, "chosen": answers[0], "rejected": answers[1]}
    return [{"role": role, "messages": messages} for role, messages in parts.items()]


def _prompt_to_messages(prompt: object) -> list[Message]:
    if isinstance(prompt, list):
        return _to_turns(prompt, "prompt")
    return [{"role": "user", "content": _to_text(prompt, "`prompt`")}]


def _remove_prefix(messages: list[Message], prefix: list[Message]) -> list[Message]:
    return messages[len(prefix) :] if messages[: len(prefix)] == prefix else messages


def _answer_to_messages(value: object, column: str) -> list[Message]:
    """Messages of an answer: a list of messages, a text, or a whole dialogue in one text as in hh-rlhf."""
    if isinstance(value, list):
        return _to_turns(value, column)
    text = _to_text(value, f"`{column}`")
    pieces = re.split(r"(?:\A|\n\n)(Human|Assistant):", text)
    if len(pieces) > 2 and not pieces[0].strip():
        turns = zip(pieces[1::2], pieces[2::2], strict=True)
        return [
            {"role": ROLES.get(role.lower(), "assistant"), "content": content.strip()}
            for role, content in turns
        ]
    return [{"role": "assistant", "content": text}]


def _add_system_and_tools(messages: list[Message], record: Record) -> list[Message]:
    """Prepend the system prompt and the tools that a record stores in columns of their own. In place."""
    system = _first_value(record, SYSTEM_COLUMNS)
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _to_text(system, "the system prompt")})
    tools = _parse_json(record.get("tools"))
    if tools:
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise ValueError("`tools` is not a list of objects")
        messages.insert(0, {"role": "tools", "tools": tools})
    return messages


def _read_chat(record: Record) -> list[Message]:
    names = [name for name in (*CHAT_COLUMNS, "conversations") if record.get(name) is not None]
    # The column that the recipe chooses may have any name; it is then the only one.
    column = names[0] if names else next(iter(record), None)
    if column is None or record[column] is None:
        raise ValueError("it has no messages")
    return _to_turns(record[column], column)


def _read_instruction(record: Record) -> list[Message]:
    task = _to_text(record.get("instruction"), "`instruction`")
    input = _first_value(record, INPUT_COLUMNS)
    if input:
        task = f"{task}\n\n{_to_text(input, '`input`')}" if task else _to_text(input, "`input`")
    history = record.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in history
    ):
        raise ValueError("`history` is not a list of [question, answer] pairs")
    turns = [*history, [task, _first_value(record, OUTPUT_COLUMNS)]]
    return [message for question, answer in turns for message in _make_exchange(question, answer)]


def _read_prompt_completion(record: Record) -> list[Message]:
    """Messages of a prompt and a completion. Each is a text or a list of messages; a list of the completion
    may repeat the prompt."""
    prompt, completion = record.get("prompt"), _first_value(record, COMPLETION_COLUMNS)
    if not isinstance(completion, list):
        if not isinstance(prompt, list):
            return _make_exchange(prompt, completion)
        answer = {"role": "assistant", "content": _to_text(completion, "the completion")}
        return [*_to_turns(prompt, "prompt"), answer]
    prompt_messages = _prompt_to_messages(prompt)
    return prompt_messages + _remove_prefix(_to_turns(completion, "completion"), prompt_messages)


def _read_question_answer(record: Record) -> list[Message]:
    return _make_exchange(_first_value(record, QUESTION_COLUMNS), _first_value(record, ANSWER_COLUMNS))


_READERS = {
    "messages": _read_chat,
    "sharegpt": _read_chat,
    "alpaca": _read_instruction,
    "prompt_completion": _read_prompt_completion,
    "question_answer": _read_question_answer,
}


def _make_exchange(question: object, answer: object) -> list[Message]:
    return [
        {"role": "user", "content": _to_text(question, "the question")},
        {"role": "assistant", "content": _to_text(answer, "the answer")},
    ]


def _to_turns(turns: object, column: str) -> list[Message]:
    turns = _parse_json(turns)
    if not isinstance(turns, list):
        raise ValueError(f"`{column}` is not a list of messages")
    return [_to_message(turn, number) for number, turn in enumerate(turns, 1)]


def _to_message(turn: object, number: int) -> Message:
    """Convert one turn to a message. Drops keys without a value: tables give every message the keys of
    all."""
    if not isinstance(turn, dict):
        raise ValueError(f"message {number} is not an object with a role and content")
    extra = {key: value for key, value in turn.items() if value is not None}
    source_role = _first_value(turn, ("role", "from"))
    role = ROLES.get(source_role.lower()) if isinstance(source_role, str) else None
    if role is None:
        raise ValueError(f"message {number} has the role {source_role!r}, expected one of {', '.join(ROLES)}")
    content = _first_value(turn, ("content", "value"))
    for key in ("role", "from", "content", "value"):
        extra.pop(key, None)
    if source_role.lower() == "function_call":
        content, extra["tool_calls"] = None, _parse_function_calls(content, number)
    if "tool_calls" in extra:
        extra["tool_calls"] = [
            _parse_arguments(call, number) for call in _require_calls(extra["tool_calls"], number)
        ]
        if not extra["tool_calls"]:
            del extra["tool_calls"]
    if content is None and "tool_calls" not in extra:
        raise ValueError(f"message {number} has no content")
    text = None if content is None else _to_text(content, f"the content of message {number}")
    return {"role": role, "content": text, **extra}


def _to_text(value: object, subject: str) -> str:
    """A text, or the concatenated texts of a list of {"type": "text", "text": ...}: templates of text models
    expect a string. `subject` names the value in the error."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        parts = [part.get("text") if isinstance(part, dict) else part for part in value]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return "".join(texts)
    raise ValueError(f"{subject} is missing" if value is None else f"{subject} is not text")


def _parse_function_calls(value: object, number: int) -> list[JsonObject]:
    """Tool calls from the content of a `function_call` turn of ShareGPT: JSON of one call or of a list."""
    calls = _parse_json(value)
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise ValueError(f"message {number} is not a function call, expected a JSON object with a name")
    return [{"type": "function", "function": call} for call in calls]


def _require_calls(calls: object, number: int) -> list[JsonObject]:
    calls = _parse_json(calls)
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"`tool_calls` of message {number} is not a list of objects")
    return calls


def _parse_arguments(call: JsonObject, number: int) -> JsonObject:
    """A tool call with its arguments as an object. OpenAI stores them as JSON in a string, which templates,
    writing JSON themselves, would quote a second time."""
    function = call.get("function", call)
    if not isinstance(function, dict):
        raise ValueError(f"`tool_calls` of message {number} has a function that is not an object")
    arguments = _parse_json(function.get("arguments"))
    if not isinstance(arguments, dict):
        return call
    function = function | {"arguments": arguments}
    return call | {"function": function} if "function" in call else function


def _parse_json(value: object) -> Any:
    """The content of a string of JSON, in which tables often store nested values; any other value
    unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _first_value(record: Record, names: Sequence[str]) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)
