"""What a client asks for, read from OpenAI's JSON: a prompt as tokens, and how to continue it. Whatever would
be read and have no effect is refused."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from headrace.checkpoint.open_run import LoadedRun
from headrace.data.chat import encode, template
from headrace.errors import UserError
from headrace.inference import generate
from headrace.inference.sampling import HOTTEST, Sampling
from headrace.inference.serve.engine import BatchEngine, GenerationJob, Stopped

# Names that a client may send, whatever their values: they change nothing about the answer.
IDLE = {"user", "metadata", "store", "stream", "stream_options", "model", "safety_identifier"}
READ = {"prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k"}
READ |= {"seed", "stop"}
# What is not done here, by the values that ask for nothing; beside these, null does so for every name. Some
# are of other servers that speak the protocol.
NOTHING: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),  # 0 asks for the chance of each token itself
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),  # there being no tools
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
}


class BadRequest(Exception):
    """A request that cannot be answered as it was asked: OpenAI's error object with a status of its own."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


@dataclass(frozen=True)
class CompletionRequest:
    ids: list[int]
    tokens: int | None
    sampling: Sampling
    stop: list[str]
    ends: frozenset[int]
    stream: bool
    with_usage: bool


def read(run: LoadedRun, asked: Any, *, is_chat: bool) -> CompletionRequest:
    if not isinstance(asked, dict):
        raise BadRequest("expected a JSON object")
    for name, value in asked.items():
        if name not in READ | IDLE and not is_default(name, value):
            raise BadRequest(f"{name}: found {shown(value)}, not supported here; leave it out", name)
    ids, ends = prompt(run, asked, is_chat)
    limit = "max_completion_tokens" if asked.get("max_completion_tokens") is not None else "max_tokens"
    tokens = number(asked, limit, None if is_chat else 16, whole=True, low=1)
    seed = number(asked, "seed", None, whole=True)
    sampling = Sampling(
        temperature=number(asked, "temperature", 1.0, low=0, high=HOTTEST),
        top_k=min(number(asked, "top_k", 0, whole=True, low=0), run.recipe.model.vocab),
        top_p=number(asked, "top_p", 1.0, low=0, high=1) or 1e-9,  # 0, as some write for the likeliest
        seed=random.getrandbits(32) if seed is None else seed % 2**32,
    )
    return CompletionRequest(
        ids, tokens, sampling, stop_sequences(asked), ends, get_flag(asked, "stream"), with_usage(asked)
    )


def is_default(name: str, value: Any) -> bool:
    """Numbers are no answers to yes or no: in Python, 1 is True and 0 is False."""
    alike = lambda other: isinstance(other, bool) == isinstance(value, bool) and other == value
    return value is None or any(map(alike, NOTHING.get(name, ())))


def prompt(run: LoadedRun, asked: dict[str, Any], is_chat: bool) -> tuple[list[int], frozenset[int]]:
    """The tokens to continue, and those that end the answer."""
    tokenizer = run.tokenizer
    assert tokenizer is not None
    special = tokenizer.special
    ends = {id for id in (special.eos, special.bos) if id is not None}
    if is_chat:
        ids, more = conversation(run, asked.get("messages"))
        return ids, frozenset(ends | more)
    text = asked.get("prompt", "")
    text = text[0] if isinstance(text, list) and len(text) == 1 and type(text[0]) is not int else text
    if isinstance(text, list) and text and all(type(id) is int for id in text):
        if not all(0 <= id < run.recipe.model.vocab for id in text):
            raise BadRequest(f"prompt: expected tokens from 0 to {run.recipe.model.vocab - 1}", "prompt")
        return text, frozenset(ends)
    if not isinstance(text, str):
        raise BadRequest("prompt: expected a text, or the tokens of one", "prompt")
    ids = ([] if special.bos is None else [special.bos]) + tokenizer.encode(clean(text, "prompt"))
    if not ids:
        raise BadRequest(
            "prompt: expected some text, since this tokenizer has no begin-of-text token", "prompt"
        )
    return ids, frozenset(ends)


def conversation(run: LoadedRun, messages: Any) -> tuple[list[int], set[int]]:
    """A conversation as the tokenizer's template writes it, ready for an answer; and what ends one."""
    tokenizer = run.tokenizer
    assert tokenizer is not None
    if tokenizer.chat_template is None:
        raise BadRequest(
            "this model's tokenizer has no chat template; ask /v1/completions, or put a chat_template.jinja "
            f"into {run.recipe.run_dir}"
        )
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise BadRequest("messages: expected a list of objects with role and content", "messages")
    plain = [{"role": said.get("role"), "content": content(said.get("content"))} for said in messages]
    if not all(isinstance(said["role"], str) for said in plain):
        raise BadRequest("messages: expected a role for each", "messages")
    for said in plain:
        clean(said["role"], "messages")
    encoder = encode.make_encoder(tokenizer)
    try:
        text = template.extract_marked_spans(encoder.template.render_text(plain, None, True)).text
        answered = [{"role": "user", "content": "a"}, {"role": "assistant", "content": template.PLACEHOLDER}]
        whole = template.extract_marked_spans(encoder.template.render_text(answered, None, False)).text
    except template.TemplateRefused as error:
        raise BadRequest(f"messages: {error}", "messages") from None
    after = encoder.splitter.special.search(whole, whole.find(template.PLACEHOLDER))
    end = None if after is None else tokenizer.inner.token_to_id(after[0])
    ends = set() if end is None else {end}
    return encoder.token_sizes.offset_tokenizer.encode(text, add_special_tokens=False).ids, ends


def content(said: Any) -> str:
    """A text, or the one that OpenAI's parts make together."""
    if isinstance(said, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in said):
        said = "".join(str(part.get("text", "")) for part in said)
    if not isinstance(said, str):
        raise BadRequest("messages: expected text as the content of each message", "messages")
    return clean(said, "messages")


def clean(text: str, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a pair of surrogates, which JSON can write
        raise BadRequest(f"{name}: found half a character, expected text", name) from None
    return text


def get_flag(asked: dict[str, Any], name: str) -> bool:
    if not isinstance(asked.get(name), bool | None):
        raise BadRequest(f"{name}: found {shown(asked[name])}, expected true or false", name)
    return bool(asked.get(name))


def with_usage(asked: dict[str, Any]) -> bool:
    options = asked.get("stream_options")
    if not isinstance(options, dict | None):
        raise BadRequest(f"stream_options: found {shown(options)}, expected an object", "stream_options")
    return get_flag(options or {}, "include_usage")


def stop_sequences(asked: dict[str, Any]) -> list[str]:
    found = asked.get("stop") or []
    found = [found] if isinstance(found, str) else found
    if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
        raise BadRequest("stop: expected a text, or a list of texts", "stop")
    return found


def number(
    asked: dict[str, Any],
    name: str,
    usual: Any,
    *,
    whole: bool = False,
    low: float | None = None,
    high: float | None = None,
) -> Any:
    value = asked.get(name)
    if value is None:
        return usual
    fits = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not fits or (low is not None and value < low) or (high is not None and value > high) or value != value:
        kind = "a whole number" if whole else "a number"
        bounds = (
            "" if low is None else f" of {low:g} or more" if high is None else f" from {low:g} to {high:g}"
        )
        raise BadRequest(f"{name}: found {shown(value)}, expected {kind}{bounds}", name)
    return value


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


class StreamedText:
    """Pieces of text as they come, up to where one of the stops stands; which it was, once they ended."""

    def __init__(self, engine: BatchEngine, ask: CompletionRequest, left: Callable[[], bool]) -> None:
        self.engine, self.ask = engine, ask
        try:
            self.job: GenerationJob = engine.submit(ask.ids, ask.tokens, ask.sampling, ask.ends, left)
        except UserError as error:
            raise BadRequest(str(error)) from None
        except Stopped as error:
            raise BadRequest(str(error), status=500) from None
        self.stopped = False

    def __iter__(self) -> Iterator[str]:
        held = ""  # what may be the beginning of a stop
        for piece in generate.decode_stream(self.engine.run, self.ask.ids, iter(self.job)):
            held += piece
            places = [place for stop in self.ask.stop if (place := held.find(stop)) >= 0]
            if places:
                self.stopped = True
                self.job.cancel()
                yield held[: min(places)]
                return
            keep = max((overlap(held, stop) for stop in self.ask.stop), default=0)
            if len(held) > keep:
                yield held[: len(held) - keep]
                held = held[len(held) - keep :]
        if held:
            yield held

    @property
    def reason(self) -> str:
        return "stop" if self.stopped or self.job.ending == "stop" else "length"

    @property
    def usage(self) -> dict[str, int]:
        given, made = len(self.ask.ids), self.job.count
        return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}


def overlap(text: str, stop: str) -> int:
    """How many of the last characters of a text begin a stop."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
