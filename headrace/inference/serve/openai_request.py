"""Requests of OpenAI's API: the prompt and the settings in their JSON, and the text generated for them.

A field that the server would have to ignore is refused."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from headrace.checkpoint.open_run import LoadedRun
from headrace.data.chat import encode, template
from headrace.data.tokenizer.tokenizer import Tokenizer
from headrace.errors import UserError
from headrace.inference.generate import decode_stream
from headrace.inference.sampling import MAX_TEMPERATURE, Sampling
from headrace.inference.serve.engine import BatchEngine, EngineStopped, GenerationJob

JsonObject: TypeAlias = dict[str, object]
Default = TypeVar("Default", int, int | None)

DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as at OpenAI; a chat's answer may fill the slot

SUPPORTED = {"prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k"}
SUPPORTED |= {"seed", "stop"}
# Accepted with any value, since they do not change the generated text.
WITHOUT_EFFECT = {"user", "metadata", "store", "stream", "stream_options", "model", "safety_identifier"}
# Unsupported fields, with the values that request nothing; null does so for every field. Some of the fields
# are other servers' extensions of the protocol.
NEUTRAL_VALUES: dict[str, Sequence[object]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),  # 0 requests the log-probability of each sampled token
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
    "tool_choice": ("none", "auto"),  # there are no tools
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
}


class BadRequest(Exception):
    """A request that cannot be answered, as OpenAI's error object: message, field and HTTP status."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


@dataclass(frozen=True)
class CompletionRequest:
    """A request for the continuation of a prompt, or for the next message of a chat."""

    prompt_ids: list[int]
    max_tokens: int | None  # None: as many as there is room for
    sampling: Sampling
    stop_sequences: list[str]
    stop_ids: frozenset[int]
    stream: bool  # send pieces of the text as they are ready
    stream_usage: bool  # end the stream with the numbers of tokens


def parse_request(run: LoadedRun, body: object, *, is_chat: bool) -> CompletionRequest:
    """Read the JSON body of a request. Raises BadRequest, which names the field, if it is not supported."""
    if not isinstance(body, dict):
        raise BadRequest("expected a JSON object")
    for name, value in body.items():
        if name not in SUPPORTED | WITHOUT_EFFECT and not is_default(name, value):
            raise BadRequest(f"{name}: found {abbreviate(value)}, not supported here; leave it out", name)
    prompt_ids, stop_ids = parse_chat(run, body) if is_chat else parse_prompt(run, body)
    limit = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    seed = get_int(body, "seed", None)
    sampling = Sampling(
        temperature=get_number(body, "temperature", 1.0, low=0, high=MAX_TEMPERATURE),
        top_k=min(get_int(body, "top_k", 0, low=0), run.recipe.model.vocab),
        top_p=get_number(body, "top_p", 1.0, low=0, high=1) or 1e-9,  # 0 is in use for the likeliest token
        seed=random.getrandbits(32) if seed is None else seed % 2**32,
    )
    return CompletionRequest(
        prompt_ids=prompt_ids,
        max_tokens=get_int(body, limit, None if is_chat else DEFAULT_MAX_TOKENS, low=1),
        sampling=sampling,
        stop_sequences=get_stop_sequences(body),
        stop_ids=stop_ids,
        stream=get_flag(body, "stream"),
        stream_usage=has_usage_option(body),
    )


def is_default(name: str, value: object) -> bool:
    """Whether a field that is not supported has a value that requests nothing."""
    if value is None:
        return True
    # A number is not a bool: to Python, 1 == True and 0 == False.
    return any(
        isinstance(neutral, bool) == isinstance(value, bool) and neutral == value
        for neutral in NEUTRAL_VALUES.get(name, ())
    )


def parse_prompt(run: LoadedRun, body: JsonObject) -> tuple[list[int], frozenset[int]]:
    """The token ids of the prompt, and the tokens that end its continuation."""
    tokenizer, vocab = _tokenizer(run), run.recipe.model.vocab
    prompt = body.get("prompt", "")
    if isinstance(prompt, list) and len(prompt) == 1 and type(prompt[0]) is not int:
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and all(type(id) is int for id in prompt):
        if not all(0 <= id < vocab for id in prompt):
            raise BadRequest(f"prompt: expected tokens from 0 to {vocab - 1}", "prompt")
        return prompt, _text_end_ids(tokenizer)
    if not isinstance(prompt, str):
        raise BadRequest("prompt: expected a text, or the tokens of one", "prompt")
    bos = tokenizer.special.bos
    prompt_ids = ([] if bos is None else [bos]) + tokenizer.encode(require_unicode(prompt, "prompt"))
    if not prompt_ids:
        raise BadRequest(
            "prompt: expected some text, since this tokenizer has no begin-of-text token", "prompt"
        )
    return prompt_ids, _text_end_ids(tokenizer)


def parse_chat(run: LoadedRun, body: JsonObject) -> tuple[list[int], frozenset[int]]:
    """The token ids of a chat, rendered by the tokenizer's template up to the next answer, and the tokens
    that end the answer."""
    tokenizer, messages = _tokenizer(run), body.get("messages")
    if tokenizer.chat_template is None:
        raise BadRequest(
            "this model's tokenizer has no chat template; use /v1/completions, or put a chat_template.jinja "
            f"into {run.recipe.run_dir}"
        )
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise BadRequest("messages: expected a list of objects with role and content", "messages")
    chat = [{"role": _role(message), "content": _content(message.get("content"))} for message in messages]
    encoder = encode.make_encoder(tokenizer)
    try:
        text = template.extract_marked_spans(encoder.template.render_text(chat, None, True)).text
        end = _answer_end_token(encoder)
    except template.TemplateRefused as error:
        raise BadRequest(f"messages: {error}", "messages") from None
    stop_ids = set(_text_end_ids(tokenizer))
    if end is not None and (end_id := tokenizer.inner.token_to_id(end)) is not None:
        stop_ids.add(end_id)
    prompt_ids = encoder.token_sizes.offset_tokenizer.encode(text, add_special_tokens=False).ids
    return prompt_ids, frozenset(stop_ids)


def _answer_end_token(encoder: encode.ChatEncoder) -> str | None:
    """The special token that the template writes after an answer; None if it writes none."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": template.PLACEHOLDER}]
    text = template.extract_marked_spans(encoder.template.render_text(chat, None, False)).text
    match = encoder.splitter.special.search(text, text.find(template.PLACEHOLDER))
    return None if match is None else match[0]


def _tokenizer(run: LoadedRun) -> Tokenizer:
    assert run.tokenizer is not None  # checked when the server is started
    return run.tokenizer


def _text_end_ids(tokenizer: Tokenizer) -> frozenset[int]:
    special = tokenizer.special
    return frozenset(id for id in (special.eos, special.bos) if id is not None)


def _role(message: Mapping[str, object]) -> str:
    role = message.get("role")
    if not isinstance(role, str):
        raise BadRequest("messages: expected a role for each", "messages")
    return require_unicode(role, "messages")


def _content(content: object) -> str:
    """The text of a message, which may be given as a list of parts."""
    if isinstance(content, list) and all(map(_is_text_part, content)):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise BadRequest("messages: expected text as the content of each message", "messages")
    return require_unicode(content, "messages")


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text"


def require_unicode(text: str, name: str) -> str:
    """Return the text of field `name`. Raises BadRequest if it has a surrogate alone, which JSON can
    express."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRequest(f"{name}: found half a character, expected text", name) from None
    return text


def get_flag(body: JsonObject, name: str) -> bool:
    """A field that is true or false; false if it is missing."""
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise BadRequest(f"{name}: found {abbreviate(value)}, expected true or false", name)
    return bool(value)


def has_usage_option(body: JsonObject) -> bool:
    """Whether a stream is to end with the numbers of tokens."""
    options = body.get("stream_options")
    if not isinstance(options, dict | None):
        raise BadRequest(f"stream_options: found {abbreviate(options)}, expected an object", "stream_options")
    return get_flag(options or {}, "include_usage")


def get_stop_sequences(body: JsonObject) -> list[str]:
    """The texts before which the generated text ends."""
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise BadRequest("stop: expected a text, or a list of texts", "stop")
    return stop


def get_number(body: JsonObject, name: str, default: float, *, low: float, high: float) -> float:
    """A number from `low` to `high`; the default if the field is missing or null."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        bounds = f"from {low:g} to {high:g}"
        raise BadRequest(f"{name}: found {abbreviate(value)}, expected a number {bounds}", name)
    return value


def get_int(body: JsonObject, name: str, default: Default, *, low: int | None = None) -> int | Default:
    """A whole number of at least `low`; the default if the field is missing or null."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or (low is not None and value < low):
        bound = "" if low is None else f" of {low} or more"
        raise BadRequest(f"{name}: found {abbreviate(value)}, expected a whole number{bound}", name)
    return value


def abbreviate(value: object) -> str:
    """A value as Python writes it, cut off after 40 characters, for error messages."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


class StreamedText:
    """The generated text of a request, in pieces, up to the first of its stop sequences."""

    def __init__(
        self, engine: BatchEngine, request: CompletionRequest, is_abandoned: Callable[[], bool]
    ) -> None:
        """Submit the request to the engine. `is_abandoned` says when its text is not needed any more."""
        self.tokenizer, self.request, self.found_stop = _tokenizer(engine.run), request, False
        try:
            self.job: GenerationJob = engine.submit(
                request.prompt_ids, request.max_tokens, request.sampling, request.stop_ids, is_abandoned
            )
        except UserError as error:
            raise BadRequest(str(error)) from None
        except EngineStopped as error:
            raise BadRequest(str(error), status=500) from None

    def __iter__(self) -> Iterator[str]:
        stop_sequences = self.request.stop_sequences
        pending = ""  # not yielded yet, since it may be the start of a stop sequence
        for piece in decode_stream(self.tokenizer, self.request.prompt_ids, iter(self.job)):
            pending += piece
            positions = [position for stop in stop_sequences if (position := pending.find(stop)) >= 0]
            if positions:
                self.found_stop = True
                self.job.cancel()
                yield pending[: min(positions)]
                return
            ready = len(pending) - max(
                (count_stop_prefix(pending, stop) for stop in stop_sequences), default=0
            )
            if ready:
                yield pending[:ready]
                pending = pending[ready:]
        if pending:
            yield pending

    @property
    def finish_reason(self) -> str:
        """OpenAI's reason for the end of a text that is complete: `stop` or `length`."""
        return "stop" if self.found_stop or self.job.finish_reason == "stop" else "length"

    @property
    def usage(self) -> dict[str, int]:
        """The numbers of tokens, as OpenAI's `usage` object."""
        prompt, completion = len(self.request.prompt_ids), self.job.generated
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }


def count_stop_prefix(text: str, stop: str) -> int:
    """The number of characters at the end of a text that are the start of a stop sequence."""
    longest = min(len(stop) - 1, len(text))
    return next((count for count in range(longest, 0, -1) if text.endswith(stop[:count])), 0)
