"""Chat and instruction records in the shapes that people publish them in, brought into one. No tokenizer
here.

The one shape is a list of messages as most chat templates take them: {"role": "system" | "user" | "assistant"
| "tool", "content": text or None} with whatever else a message has (tool_calls, name, tool_call_id...). Tools
that the assistant may call come first, as {"role": "tools", "tools": [...]}, and reach the template as
`tools`. Of a pair of answers, the prompt and both answers are such lists (`pair`)."""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

# Columns by what they hold, the usual name first.
CHATS = ("messages", "conversation", "chat", "dialog", "dialogue")
INPUTS = ("input", "context")
OUTPUTS = ("output", "response")
COMPLETIONS = ("completion", "response", "chosen")
QUESTIONS = ("question", "query")
ANSWERS = ("answer", "response")
SYSTEMS = ("system", "system_prompt")

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "chatbot", "model", "ai", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "tool_response", "ipython"), "tool"),
}


def detect(columns: Iterable[str]) -> str | None:
    """The shape of records that have these columns; None if it is no chat or instruction."""
    names = set(columns)
    if {"chosen", "rejected"} <= names:
        return "preference"
    if names & set(CHATS):
        return "messages"
    if "conversations" in names:
        return "sharegpt"
    if "instruction" in names and names & set(OUTPUTS):
        return "alpaca"
    if "prompt" in names and names & set(COMPLETIONS):
        return "prompt_completion"
    if names & set(QUESTIONS) and names & set(ANSWERS):
        return "question_answer"
    return None


def messages(shape: str, record: dict[str, Any]) -> list[dict[str, Any]]:
    """A record's messages in the one shape; ValueError says what is wrong with it."""
    found = _READERS[shape](record)
    if not found:
        raise ValueError("it has no messages")
    if not any(message["role"] == "assistant" for message in found):
        raise ValueError("the assistant says nothing in it")
    return _introduced(found, record)


def pair(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The prompt, the preferred answer and the other, a list of messages each; ValueError says what is wrong.
    Where an answer repeats the prompt, as whole conversations do, the prompt is what both begin with."""
    prompt, chosen, rejected = record.get("prompt"), record.get("chosen"), record.get("rejected")
    both = [_answer(chosen, "chosen"), _answer(rejected, "rejected")]
    asked: list[dict[str, Any]] = []
    if prompt is not None:
        is_talk = isinstance(prompt, list)
        asked = (
            _turns(prompt, "prompt") if is_talk else [{"role": "user", "content": _text(prompt, "`prompt`")}]
        )
        both = [answer[len(asked) :] if answer[: len(asked)] == asked else answer for answer in both]
    shared = 0
    while shared < min(map(len, both)) and both[0][shared] == both[1][shared]:
        shared += 1
    asked, both = asked + both[0][:shared], [answer[shared:] for answer in both]
    if not asked:
        raise ValueError("`chosen` and `rejected` begin with no common message, and there is no `prompt`")
    for name, answer in zip(("chosen", "rejected"), both, strict=True):
        if not any(message["role"] == "assistant" for message in answer):
            raise ValueError(f"the assistant says nothing in `{name}` that the other has not")
    parts = {"prompt": _introduced(asked, record), "chosen": both[0], "rejected": both[1]}
    return [{"role": role, "messages": messages} for role, messages in parts.items()]


def _answer(value: Any, column: str) -> list[dict[str, Any]]:
    """A list of messages, a text, or a dialogue in one text, as hh-rlhf has it."""
    if isinstance(value, list):
        return _turns(value, column)
    text = _text(value, f"`{column}`")
    turns = re.split(r"(?:\A|\n\n)(Human|Assistant):", text)
    if len(turns) > 2 and not turns[0].strip():
        said = zip(turns[1::2], turns[2::2], strict=True)
        return [{"role": ROLES.get(who.lower(), "assistant"), "content": what.strip()} for who, what in said]
    return [{"role": "assistant", "content": text}]


def _introduced(found: list[dict[str, Any]], record: dict[str, Any]) -> list[dict[str, Any]]:
    """Messages with the system prompt and the tools that the record has beside them."""
    system = _first(record, SYSTEMS)
    if system and found[0]["role"] != "system":
        found.insert(0, {"role": "system", "content": _text(system, "the system prompt")})
    tools = _parsed(record.get("tools"))
    if tools:
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise ValueError("`tools` is not a list of objects")
        found.insert(0, {"role": "tools", "tools": tools})
    return found


def _chat(record: dict[str, Any]) -> list[dict[str, Any]]:
    names = [name for name in (*CHATS, "conversations") if record.get(name) is not None]
    # A column that the user named may be called anything; it comes alone.
    column = names[0] if names else next(iter(record), None)
    if column is None or record[column] is None:
        raise ValueError("it has no messages")
    return _turns(record[column], column)


def _instruction(record: dict[str, Any]) -> list[dict[str, Any]]:
    task = _text(record.get("instruction"), "`instruction`")
    more = _first(record, INPUTS)
    if more:
        task = f"{task}\n\n{_text(more, '`input`')}" if task else _text(more, "`input`")
    earlier = record.get("history") or []
    if not isinstance(earlier, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in earlier
    ):
        raise ValueError("`history` is not a list of [question, answer] pairs")
    turns = [*earlier, [task, _first(record, OUTPUTS)]]
    return [message for question, answer in turns for message in _exchange(question, answer)]


def _prompt_completion(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Both may be texts or lists of messages; a chosen answer may be a list that repeats the prompt."""
    prompt, completion = record.get("prompt"), _first(record, COMPLETIONS)
    if not isinstance(completion, list):
        if not isinstance(prompt, list):
            return _exchange(prompt, completion)
        answer = {"role": "assistant", "content": _text(completion, "the completion")}
        return [*_turns(prompt, "prompt"), answer]
    if isinstance(prompt, list):
        asked = _turns(prompt, "prompt")
    else:
        asked = [{"role": "user", "content": _text(prompt, "`prompt`")}]
    answered = _turns(completion, "completion")
    return answered if answered[: len(asked)] == asked else asked + answered


def _question_answer(record: dict[str, Any]) -> list[dict[str, Any]]:
    return _exchange(_first(record, QUESTIONS), _first(record, ANSWERS))


_READERS = {
    "messages": _chat,
    "sharegpt": _chat,
    "alpaca": _instruction,
    "prompt_completion": _prompt_completion,
    "question_answer": _question_answer,
}


def _exchange(question: Any, answer: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": _text(question, "the question")},
        {"role": "assistant", "content": _text(answer, "the answer")},
    ]


def _turns(turns: Any, column: str) -> list[dict[str, Any]]:
    turns = _parsed(turns)
    if not isinstance(turns, list):
        raise ValueError(f"`{column}` is not a list of messages")
    return [_message(turn, number) for number, turn in enumerate(turns, 1)]


def _message(turn: Any, number: int) -> dict[str, Any]:
    """One message. Keys without a value are left out, as tables give every message the keys of all."""
    if not isinstance(turn, dict):
        raise ValueError(f"message {number} is not an object with a role and content")
    rest = {key: value for key, value in turn.items() if value is not None}
    said = _first(turn, ("role", "from"))
    role = ROLES.get(said.lower()) if isinstance(said, str) else None
    if role is None:
        raise ValueError(f"message {number} has the role {said!r}, known are {', '.join(ROLES)}")
    content = _first(turn, ("content", "value"))
    for key in ("role", "from", "content", "value"):
        rest.pop(key, None)
    if said.lower() == "function_call":
        content, rest["tool_calls"] = None, _calls(content, number)
    if "tool_calls" in rest:
        rest["tool_calls"] = [_call(call, number) for call in _listed(rest["tool_calls"], number)]
        if not rest["tool_calls"]:
            del rest["tool_calls"]
    if content is None and "tool_calls" not in rest:
        raise ValueError(f"message {number} has no content")
    text = None if content is None else _text(content, f"the content of message {number}")
    return {"role": role, "content": text, **rest}


def _text(value: Any, what: str) -> str:
    """Text, or the texts of a list of {"type": "text", "text": ...} end to end: the templates of text models
    expect a string."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        parts = [part.get("text") if isinstance(part, dict) else part for part in value]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return "".join(texts)
    raise ValueError(f"{what} is missing" if value is None else f"{what} is not text")


def _calls(value: Any, number: int) -> list[Any]:
    """ShareGPT's function_call turns hold a call, or a list of them, as JSON."""
    calls = _parsed(value)
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise ValueError(f"message {number} is no call of a function: it wants a JSON object with a name")
    return [{"type": "function", "function": call} for call in calls]


def _listed(calls: Any, number: int) -> list[Any]:
    calls = _parsed(calls)
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"`tool_calls` of message {number} is not a list of objects")
    return calls


def _call(call: dict[str, Any], number: int) -> dict[str, Any]:
    """OpenAI writes the arguments of a call as JSON in a string; templates write them out themselves, and
    would quote a string once more."""
    function = call.get("function", call)
    if not isinstance(function, dict):
        raise ValueError(f"`tool_calls` of message {number} has a function that is not an object")
    arguments = _parsed(function.get("arguments"))
    if not isinstance(arguments, dict):
        return call
    function = function | {"arguments": arguments}
    return call | {"function": function} if "function" in call else function


def _parsed(value: Any) -> Any:
    """JSON in a string, as tables often hold what is nested; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _first(record: dict[str, Any], names: Sequence[str]) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)
