"""Conversations against transformers: the same ids on hostile conversations, and masks that say what they
should."""

import functools
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from headrace.data.chat import records
from headrace.data.chat.encode import PLAIN_TEMPLATE, encode_chats, find_slow_reason, make_encoder
from headrace.data.chat.template import TEMPLATE_DATE
from headrace.data.documents import Problems
from headrace.data.shards import SpecialTokenIds
from headrace.data.tokenizer.tokenizer import Tokenizer
from headrace.errors import UserError

WORDS = [
    "river",
    "mill",
    "wheel",
    "größe",
    "naïve",
    "水車",
    "🌊",
    "👩‍👩‍👧‍👦",
    "if",
    "==",
    "1234567",
    "don't",
    "{{",
    "%}",
    "▁",
    "\x00",
    "\n",
    "\n\n",
    " ",
    "   ",
    "\t",
    "\r\n",
    "e\u0301",
    "ﬁ",
    "\ufdd0",
    "<|",
    "assistant\n",
    "<think>",
    "</think>",
    "[INST]",
    "<|im_start|>",
    "<|im_end|>",
    "<|eot|>",
    "</s>",
]

TURNS = "{% for message in messages %}"
CHATML = (
    TURNS + "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}" + TURNS + "{% set text = message['content'] | trim %}"
    "{{ '<|header|>' + message['role'] + '<|/header|>\n\n' + text + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}" + TURNS + "{% if message.role == 'assistant' %}{{ ' ' + message.content + eos_token }}"
    "{% else %}{{ '[INST] ' + message.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    TURNS + "\n{% if message.role == 'user' %}\n{{ '<|user|>\n' + message.content + eos_token }}\n"
    "{% elif message.role == 'system' %}\n{{ '<|system|>\n' + message.content + eos_token }}\n"
    "{% else %}\n{{ '<|assistant|>\n' + message.content + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
# As Qwen 3: thinking is shown in the last turn only.
THINKING = (
    TURNS + "{% if message.role == 'assistant' %}{% set text = message.content %}"
    "{% if '</think>' in text %}{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\n' }}{% if loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ text + '<|im_end|>\n' }}{% else %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SILENT = TURNS + "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
GENERATION = (
    "{%- for message in messages %}{%- if message['role'] == 'assistant' %}{{- '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{%- else %}{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# The mask's edges are in the midst of words and blank space here, with no special token near.
BARE = TURNS + (
    "{% if message.role == 'assistant' %}{{ 'A: ' }}{% generation %}{{ message.content }}"
    "{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ 'Q: ' + message.content + '\n' }}{% endif %}{% endfor %}"
)
# Content goes through a macro, is trimmed there and looked into.
MACRO = (
    "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}"
    "{{ '?' }}{% endif %}{% endmacro %}"
    + TURNS + "{% set text = show(message.content) | trim %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if text.startswith('river') %}{{ '!' }}{% endif %}"
    "{{ text.replace('mill', 'MILL') + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)  # fmt: skip
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}" + TURNS
    + "{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content or '' }}{% for call in message.tool_calls %}"
    "{{ '<call>' + (call.function | tojson) }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ message.content + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}"
)  # fmt: skip

TEMPLATES = {
    "chatml": CHATML,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "zephyr": ZEPHYR,
    "thinking": THINKING,
    "silent": SILENT,
    "generation": GENERATION,
    "bare": BARE,
    "macro": MACRO,
    "plain": PLAIN_TEMPLATE.read_text(),
}
SPECIAL = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|header|>",
    "<|/header|>",
    "<|eot|>",
    "[INST]",
    "[/INST]",
]


def byte_level(normalizer: Any = None, words: str = "gpt4", **options: Any) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.normalizer = normalizer
    split = Regex(
        r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if words == "gpt2":
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(WORDS * 5 + ["assistant user system ### Assistant: A: Q:"] * 20, trainer)
    inner.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    for content, flags in options.items():
        inner.add_special_tokens([AddedToken(f"<|{content}|>", special=True, **flags)])
    return inner


def spaced(*, prepend: bool) -> tokenizers.Tokenizer:
    """As Gemma's, or with a space put before each text, as Llama 2's: no pre-tokenizer, bytes for what is
    unknown."""
    replace = normalizers.Replace(" ", "▁")
    inner = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prepend else replace
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", *SPECIAL, *bytes_], show_progress=False
    )
    inner.train_from_iterator([" ".join(WORDS[:8])] * 5 + ["assistant user system the mill\n"] * 5, trainer)
    saved = json.loads(inner.to_str())
    saved["added_tokens"] = [token for token in saved["added_tokens"] if token["content"] not in bytes_]
    return tokenizers.Tokenizer.from_str(json.dumps(saved))


def metaspace() -> tokenizers.Tokenizer:
    inner = spaced(prepend=False)
    inner.normalizer = None
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return inner


TOKENIZERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte level": byte_level,
    "gpt2": lambda: byte_level(words="gpt2"),
    "composed": lambda: byte_level(normalizers.NFC()),
    "normalized tokens": lambda: byte_level(user={"normalized": True}, im={"normalized": True}),
    "stripping": lambda: byte_level(user={"rstrip": True}, assistant={"lstrip": True}),
    "spaced": lambda: spaced(prepend=False),
    "prepended": lambda: spaced(prepend=True),
    "metaspace": metaspace,
}


@functools.cache
def saved(kind: str) -> str:
    return TOKENIZERS[kind]().to_str()


def pair(
    kind: str, template: str | None, encoder: str = "tokenizers"
) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    """The same tokenizer for us and for transformers."""
    inner = tokenizers.Tokenizer.from_str(saved(kind))
    special = SpecialTokenIds(inner.token_to_id("<s>"), inner.token_to_id("</s>"), None, None)
    actual = Tokenizer(inner, special, chat_template=template, encoder_name=encoder)
    reference = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(saved(kind)), bos_token="<s>", eos_token="</s>"
    )
    reference.chat_template = template
    return actual, reference


def say(rng: random.Random) -> str:
    return "".join(rng.choice(WORDS) + rng.choice(["", " ", " "]) for _ in range(rng.randint(1, 20)))


def make_conversation(rng: random.Random) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": say(rng)}] if rng.random() < 0.3 else []
    for _ in range(rng.randint(1, 3)):
        messages += [{"role": "user", "content": say(rng)}, {"role": "assistant", "content": say(rng)}]
    return messages


def conversations(count: int, seed: int = 0) -> list[list[dict[str, str]]]:
    rng = random.Random(seed)
    return [make_conversation(rng) for _ in range(count)]


def encode(tokenizer: Any, talks: list[Any]) -> list[tuple[list[int], list[int]]]:
    encoded = encode_chats(tokenizer, [json.dumps(talk) for talk in talks])
    assert encoded.loss_mask is not None
    assert len(encoded) == len(talks)
    bounds = list(zip(encoded.offsets, encoded.offsets[1:], strict=False))
    return [(encoded.values[a:b].tolist(), encoded.loss_mask[a:b].astype(int).tolist()) for a, b in bounds]


def spans_to_mask(tokenizer: tokenizers.Tokenizer, text: str, spans: list[tuple[int, int]]) -> list[int]:
    """Character by character: a token is trained on if any of its characters is in a span."""
    inside = {position for start, stop in spans for position in range(start, stop)}
    plain = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    plain.post_processor = None  # type: ignore[assignment]
    offsets = plain.encode(text, add_special_tokens=False).offsets
    return [int(not inside.isdisjoint(range(*offset))) for offset in offsets]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_those_of_transformers(kind: str, name: str) -> None:
    actual, reference = pair(kind, TEMPLATES[name])
    talks = conversations(25)
    expected = reference.apply_chat_template(talks, tokenize=True, return_dict=True)["input_ids"]
    assert [ids for ids, _ in encode(actual, talks)] == expected


Parts = list[tuple[str, bool]]  # text, and whether the assistant says it


def chatml_parts(messages: list[dict[str, str]], change: Callable[[str], str] = str) -> Parts:
    return [
        part
        for message in messages
        for part in (
            (f"<|im_start|>{message['role']}\n", False),
            (change(message["content"]) + "<|im_end|>", message["role"] == "assistant"),
            ("\n", False),
        )
    ]


def llama_parts(messages: list[dict[str, str]]) -> Parts:
    return [("<s>", False)] + [
        part
        for message in messages
        for part in (
            (f"<|header|>{message['role']}<|/header|>\n\n", False),
            (message["content"].strip() + "<|eot|>", message["role"] == "assistant"),
        )
    ]


def mistral_parts(messages: list[dict[str, str]]) -> Parts:
    """Without a generation prompt, the answer starts with the content; the space shares its token."""
    parts: Parts = [("<s>", False)]
    for message in messages:
        if message["role"] == "assistant":
            parts += [(" ", False), (message["content"] + "</s>", True)]
        else:
            parts += [("[INST] " + message["content"] + " [/INST]", False)]
    return parts


def zephyr_parts(messages: list[dict[str, str]]) -> Parts:
    """A prompt is `<|assistant|>` and a line end here, which templates keep after an expression."""
    return [
        part
        for message in messages
        for part in (
            (f"<|{message['role']}|>\n", False),
            (message["content"] + "</s>", message["role"] == "assistant"),
            ("\n", False),
        )
    ]


def thinking_parts(messages: list[dict[str, str]]) -> Parts:
    parts: Parts = []
    for message in messages:
        text, is_assistant = message["content"], message["role"] == "assistant"
        if is_assistant and "</think>" in text:
            text = text.split("</think>")[-1].lstrip("\n")
        thought = "<think>\n\n</think>\n\n" if is_assistant and message is messages[-1] else ""
        parts += [
            (f"<|im_start|>{message['role']}\n", False),
            (f"{thought}{text}<|im_end|>", is_assistant),
            ("\n", False),
        ]
    return parts


def macro_parts(messages: list[dict[str, str]]) -> Parts:
    parts: Parts = []
    for message in messages:
        text = message["content"].strip()
        text = ("!" if text.startswith("river") else "") + text.replace("mill", "MILL")
        parts += [
            (f"<|im_start|>{message['role']}\n", False),
            (f"{text}<|im_end|>", message["role"] == "assistant"),
        ]
    return parts


def bare_parts(messages: list[dict[str, str]]) -> Parts:
    parts: Parts = []
    for message in messages:
        is_assistant = message["role"] == "assistant"
        parts += [
            ("A: " if is_assistant else "Q: ", False),
            (message["content"], is_assistant),
            ("\n", False),
        ]
    return parts


REFERENCES: dict[str, Callable[[list[dict[str, str]]], Parts]] = {
    "chatml": chatml_parts, "generation": chatml_parts, "silent": chatml_parts, "llama": llama_parts,
    "mistral": mistral_parts, "zephyr": zephyr_parts, "thinking": thinking_parts, "macro": macro_parts,
    "bare": bare_parts,
}  # fmt: skip


def unwrap(parts: Parts) -> tuple[str, list[tuple[int, int]]]:
    text, spans = "", []
    for part, is_trained in parts:
        if is_trained:
            spans.append((len(text), len(text) + len(part)))
        text += part
    return text, spans


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", REFERENCES)
def test_only_the_answers_of_the_assistant_are_trained_on(kind: str, name: str) -> None:
    actual, _ = pair(kind, TEMPLATES[name])
    talks = conversations(25)
    for talk, (_, mask) in zip(talks, encode(actual, talks), strict=True):
        text, spans = unwrap(REFERENCES[name](talk))
        assert mask == spans_to_mask(actual.inner, text, spans), text


@pytest.mark.parametrize("kind", ["byte level", "composed", "spaced"])
def test_masks_of_generation_blocks_are_those_of_transformers(kind: str) -> None:
    for template in (GENERATION, TOOLS, PLAIN_TEMPLATE.read_text()):
        actual, reference = pair(kind, template)
        talks = conversations(60, seed=1)
        expected = reference.apply_chat_template(
            talks, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert encode(actual, talks) == list(
            zip(expected["input_ids"], expected["assistant_masks"], strict=True)
        )


def test_a_last_character_of_several_tokens_is_trained_on_in_full() -> None:
    """transformers takes only the first of them."""
    actual, reference = pair("byte level", BARE)
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "well 🦆"}]
    expected = reference.apply_chat_template(
        [talk], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ((ids, mask),) = encode(actual, [talk])
    trained = [token for token, is_trained in zip(ids, mask, strict=True) if is_trained]
    assert actual.inner.decode(trained).strip() == "well 🦆"
    assert sum(mask) > sum(expected["assistant_masks"][0])


@pytest.mark.parametrize("kind", ["byte level", "stripping"])
def test_tools_and_calls_reach_the_template_and_calls_are_trained_on(kind: str) -> None:
    actual, reference = pair(kind, TOOLS)
    tools = [{"type": "function", "function": {"name": "mill", "parameters": {"größe": "<int>"}}}]
    call = {"type": "function", "function": {"name": "mill", "arguments": '{"größe": 3}'}}
    record = {
        "messages": [
            {"role": "user", "content": "grind", "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "done", "tool_call_id": "1"},
            {"role": "assistant", "content": "It is ground."},
        ],
        "tools": json.dumps(tools),
    }
    talk = records.to_messages("messages", record)
    assert talk[0] == {"role": "tools", "tools": tools}
    assert talk[2]["tool_calls"][0]["function"]["arguments"] == {"größe": 3}
    expected = reference.apply_chat_template(
        [talk[1:]], tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert encode(actual, [talk]) == [(expected["input_ids"][0], expected["assistant_masks"][0])]
    ((ids, mask),) = encode(actual, [talk])
    trained = actual.inner.decode(
        [token for token, is_trained in zip(ids, mask, strict=True) if is_trained], skip_special_tokens=False
    )
    assert (
        trained.replace(" ", "")
        == '<call>{"name":"mill","arguments":{"größe":3}}<|im_end|>Itisground.<|im_end|>'
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_traced_template_equals_rendering(name: str) -> None:
    actual, _ = pair("byte level", TEMPLATES[name])
    encoder = make_encoder(actual)
    traced = 0
    for talk in conversations(200, seed=2):
        outline = encoder.tracer.get_outline(tuple(message["role"] for message in talk))
        filled = outline and outline.fill([message["content"] for message in talk])
        if filled is None:
            continue
        rendered = encoder.template.render(talk)  # type: ignore[arg-type]
        # Special tokens that somebody says are left in pieces here: the encoder looks for them.
        names = {id: content for content, id in encoder.splitter.token_ids.items()} | {-1: ""}
        pieces = [text + names[id] for text, id in zip(filled.texts, filled.next_ids, strict=True)]
        assert "".join(pieces) == rendered.text
        places = []
        for piece, size, from_end in filled.edges:
            start = len("".join(pieces[:piece]).encode())
            places.append(start + (len(filled.texts[piece].encode()) - size if from_end else size))
        assert places == [len(rendered.text[:edge].encode()) for span in rendered.spans for edge in span]
        traced += 1
    assert traced > 20


@pytest.mark.parametrize(
    "expression",
    [
        "content[:3]",
        "content | length",
        "content | upper",
        "content.title()",
        "content | tojson",
        "'%s' % content",
        "content ~ '!'",
        "(content + '!') | trim",
        "content | replace('a', 'b')",
        "'{}'.format(content)",
        "content * 2",
        "'yes' if content in 'some hello text' else 'no'",
        "'yes' if content > 'b' else 'no'",
        "content.strip('h')",
        "'yes' if (content ~ '') == 'hello' else 'no'",
        "[content, 'x'] | join('-')",
        "content.split()[0]",
        "messages | map(attribute='content') | join(' ')",
        "{'hello': 'known'}.get(content, 'unknown')",
        "'hello world'.replace(content, '')",
        "content | first",
        "messages | groupby('content') | length",
        "messages | selectattr('content', 'equalto', 'hello') | list | length",
        "content is lower",
        "content | string | length",
        "content is in ['hello']",
        "'yes' if content == 'hello' else 'no'",
        "'yes' if 'ell' in content else 'no'",
        "content | trim | capitalize",
        "content.endswith('o')",
        "(content if content.startswith('h') else 'x')",
        "content.replace('l', 'L')",
        "content | default('none') | trim",
        "messages | last | string",
        "namespace(a=content).a",
        "content.split('l') | last",
        "dict(a=content).a | length",
        "content.__class__",
        "loop.changed(content)",
        "message",
        "[content]",
        "messages | selectattr('content', 'equalto', 'role') | list | length",
        "messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list | last | upper",
        "(messages | selectattr('role', 'equalto', 'user') | list | last).content",
    ],
)
def test_a_template_that_looks_into_contents_is_not_misled_by_the_trace(expression: str) -> None:
    """Whatever a template does with contents, what comes out is what transformers gives."""
    template = (
        TURNS + "{% set content = message.content %}{{ message.role + ':' }}{% generation %}{{ " + expression
    )
    template += " }}{{ eos_token }}{% endgeneration %}{% endfor %}"
    actual, reference = pair("byte level", template)
    words = ["hello", " hello ", "b", "HELLO", "some", "all well", "role", "ll"]
    talks = [
        [{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a in words for b in words
    ]
    try:
        expected = reference.apply_chat_template(talks, tokenize=True, return_dict=True)["input_ids"]
    except Exception:
        with pytest.raises(UserError, match="refuses"):
            encode(actual, talks)
    else:
        assert [ids for ids, _ in encode(actual, talks)] == expected


def test_the_fast_encoder_gives_the_same_result() -> None:
    talks = conversations(100, seed=3)
    assert encode(pair("gpt2", CHATML, "gigatoken")[0], talks) == encode(pair("gpt2", CHATML)[0], talks)


def test_only_supported_tokenizers_are_encoded_the_fast_way() -> None:
    slow = {kind: find_slow_reason(pair(kind, CHATML)[0]) for kind in TOKENIZERS}
    assert {kind for kind, why in slow.items() if why} == {"stripping", "metaspace"}


def test_batches_of_conversations_are_encoded_like_single_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    actual, _ = pair("composed", CHATML)
    talks = conversations(60, seed=4)
    whole = encode(actual, talks)
    assert [encode(actual, [talk])[0] for talk in talks] == whole
    monkeypatch.setattr("headrace.data.chat.encode.BATCH_CHARACTERS", 500)
    assert encode(actual, talks) == whole
    assert encode(actual, []) == []


def test_a_conversation_that_the_template_refuses_is_a_problem_of_its_document() -> None:
    strict = CHATML.replace(
        TURNS, TURNS + "{% if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    )
    good = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    bad = [*good, {"role": "tool", "content": "c"}]
    given = [json.dumps(talk) for talk in (good, bad, good)] + ["{not JSON", '["text"]', '[{"content": "x"}]']
    for kind in ("byte level", "stripping"):
        actual, _ = pair(kind, strict)
        with pytest.raises(UserError, match=r"talks.jsonl:2: the chat template refuses it: no tools"):
            encode_chats(actual, given, ids=[f"talks.jsonl:{line}" for line in range(1, 7)])
        problems = Problems("skip")
        encoded = encode_chats(actual, given, problems=problems)
        assert problems.counts == {"refused by the chat template": 4}
        assert (encoded.lengths > 0).tolist() == [True, False, True, False, False, False]


def test_a_template_that_rewrites_earlier_turns_is_refused_not_guessed_at() -> None:
    template = TURNS + "{{ (messages | length | string) + message.content + eos_token }}{% endfor %}"
    with pytest.raises(UserError, match="differently when other turns follow"):
        encode(pair("byte level", template)[0], conversations(1))


def test_a_prompt_that_starts_the_answer_is_separated_from_it() -> None:
    """As DeepSeek's and Qwen's for thinking: the prompt ends in <think>, finished turns are shown without."""
    template = CHATML.replace(
        "'<|im_start|>assistant\n' }}{% endif", "'<|im_start|>assistant\n<think>\n' }}{% endif"
    )
    assert template != CHATML
    talks = conversations(30, seed=5)
    assert encode(pair("byte level", template)[0], talks) == encode(pair("byte level", CHATML)[0], talks)


def test_a_tokenizer_without_a_template_is_refused_with_the_name_of_a_template() -> None:
    with pytest.raises(UserError, match=r"name one with tokenizer.chat_template.*plain.jinja"):
        encode_chats(pair("byte level", None)[0], [])
    with pytest.raises(UserError, match="not a Jinja template, line 1"):
        encode_chats(pair("byte level", "{% if %}")[0], [])


def test_templates_get_a_fixed_date_so_that_data_is_reproducible() -> None:
    template = "{{ strftime_now('%d %b %Y') }}" + CHATML
    actual, _ = pair("byte level", template)
    ((ids, _),) = encode(actual, [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]])
    assert actual.inner.decode(ids).startswith(TEMPLATE_DATE.strftime("%d %b %Y"))


def test_the_plain_template_suits_a_tokenizer_without_chat_tokens() -> None:
    actual, _ = pair("byte level", PLAIN_TEMPLATE.read_text())
    talk = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes"},
    ]
    ((ids, mask),) = encode(actual, [talk])
    assert actual.inner.decode(ids, skip_special_tokens=False) == (
        "<s>### System:\nBe kind.\n\n### User:\nHi\n\n### Assistant:\nYes</s>\n\n"
    )
    trained = [token for token, is_trained in zip(ids, mask, strict=True) if is_trained]
    assert actual.inner.decode(trained, skip_special_tokens=False) == "Yes</s>"


ASKED = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]


@pytest.mark.parametrize(
    ("shape", "record", "expected"),
    [
        ("messages", {"messages": ASKED}, ASKED),
        ("messages", {"chat": json.dumps(ASKED)}, ASKED),
        ("messages", {"dialog": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}, ASKED),
        (
            "messages",
            {"messages": [{"role": "User", "content": [{"type": "text", "text": "Q"}]}, ASKED[1]]},
            ASKED,
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
            ASKED,
        ),
        (
            "sharegpt",
            {
                "conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}],
                "system": "S",
            },
            [{"role": "system", "content": "S"}, *ASKED],
        ),
        ("alpaca", {"instruction": "Q", "input": "", "output": "A"}, ASKED),
        (
            "alpaca",
            {"instruction": "Add", "input": "1 2", "output": "3"},
            [{"role": "user", "content": "Add\n\n1 2"}, {"role": "assistant", "content": "3"}],
        ),
        ("alpaca", {"instruction": "Q", "context": None, "response": "A"}, ASKED),
        ("alpaca", {"instruction": "Q", "output": "A", "history": [["Q", "A"]]}, ASKED + ASKED),
        ("prompt_completion", {"prompt": "Q", "completion": "A"}, ASKED),
        ("prompt_completion", {"prompt": ASKED[:1], "completion": ASKED[1:]}, ASKED),
        ("prompt_completion", {"prompt": "Q", "chosen": ASKED}, ASKED),
        ("question_answer", {"question": "Q", "answer": "A", "system_prompt": ""}, ASKED),
    ],
)
def test_published_shapes_are_recognized_and_converted(
    shape: str, record: dict[str, Any], expected: list[Any]
) -> None:
    assert records.detect_shape(list(record)) == shape
    assert records.to_messages(shape, record) == expected


def test_other_records_are_not_mistaken_for_conversations() -> None:
    for columns in (
        ["text"],
        ["prompt"],
        ["instruction"],
        ["question", "text"],
        ["id", "url", "content"],
        [],
    ):
        assert records.detect_shape(columns) is None
    assert records.to_messages("messages", {"a column that the user named": ASKED}) == ASKED


def test_function_calls_of_sharegpt_become_tool_calls() -> None:
    turns = [
        ("human", "Q"),
        ("function_call", '{"name": "f", "arguments": {"a": 1}}'),
        ("observation", "3"),
        ("gpt", "A"),
    ]
    found = records.to_messages(
        "sharegpt", {"conversations": [{"from": who, "value": what} for who, what in turns]}
    )
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "assistant"]
    assert found[1]["content"] is None
    assert found[1]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]


@pytest.mark.parametrize(
    ("shape", "record", "why"),
    [
        ("messages", {"messages": []}, "no messages"),
        ("messages", {"messages": None}, "no messages"),
        ("messages", {"messages": "hello"}, "not a list of messages"),
        ("messages", {"messages": ["hello"]}, "message 1 is not an object"),
        ("messages", {"messages": ASKED[:1]}, "no message of the assistant"),
        (
            "messages",
            {"messages": [ASKED[0], {"role": "wizard", "content": "x"}]},
            "message 2 has the role 'wizard'",
        ),
        ("messages", {"messages": [{"content": "x"}]}, "message 1 has the role None"),
        (
            "messages",
            {"messages": [{"role": "user", "content": 3}, ASKED[1]]},
            "content of message 1 is not text",
        ),
        ("messages", {"messages": [{"role": "user"}, ASKED[1]]}, "message 1 has no content"),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}, ASKED[1]]},
            "content of message 1 is not text",
        ),
        ("messages", {"messages": ASKED, "tools": "hammer"}, "`tools` is not a list"),
        ("alpaca", {"instruction": "Q", "output": None}, "the answer is missing"),
        ("prompt_completion", {"prompt": 1, "completion": "A"}, "the question is not text"),
        (
            "sharegpt",
            {"conversations": [{"from": "function_call", "value": "mill()"}]},
            "not a function call",
        ),
    ],
)
def test_errors_in_a_record_are_described(shape: str, record: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        records.to_messages(shape, record)
