"""The libraries that encode batches of text: gigatoken, fastokens and tokenizers, fastest first. Hugging
Face's tokenizers is the reference: another library is used only if it gives the same ids on texts chosen to
provoke differences."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, product
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pyarrow as pa
import tokenizers
from tokenizers import models

from headrace.data.documents import Ragged, lengths_to_offsets
from headrace.data.tokenizer import unicode_drift
from headrace.data.tokenizer.convert import CL100K, byte_symbols

if TYPE_CHECKING:
    import awkward

# CL100K as tiktoken spells it, which gigatoken recognizes. Oniguruma, in tokenizers, reads it differently.
CL100K_POSSESSIVE = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)

ENCODER_NAMES = ("gigatoken", "fastokens", "tokenizers")

Texts: TypeAlias = pa.LargeStringArray | Sequence[str]
EncodeBatch: TypeAlias = Callable[[Texts], Ragged]


def make_encoder(name: str, inner: tokenizers.Tokenizer) -> EncodeBatch:
    """A function that encodes batches as `inner` does, with the library `name`. `inner` must come from
    `treat_special_as_text`. Characters on which the libraries differ are encoded by tokenizers: with the
    words around them, or as part of the full text where it cannot be divided."""
    reference = make_tokenizers_encoder(inner)
    if name == "tokenizers":
        return reference
    fast = make_gigatoken_encoder(inner) if name == "gigatoken" else make_fastokens_encoder(inner)
    # Added tokens are searched before a text is split into words, and may contain a word boundary.
    has_added = any(not token.special for token in inner.get_added_tokens_decoder().values())
    at_boundaries = not has_added and is_word_boundary_safe(reference)

    def encode(texts: Texts) -> Ragged:
        array = texts if isinstance(texts, pa.Array) else pa.array(texts, pa.large_string())
        positions = unicode_drift.find_drifting(array)
        if not len(positions):
            return fast(array)
        starts, ends = unicode_drift.find_spans(array, positions, at_boundaries=at_boundaries)
        pieces, first_pieces = unicode_drift.split_at(array, np.concatenate([starts, ends]))
        is_drifting = np.isin(unicode_drift.offsets_and_bytes(pieces)[0][:-1], starts)
        ragged = replace_rows(fast(pieces), is_drifting, reference(pieces.filter(pa.array(is_drifting))))
        return Ragged(ragged.values, ragged.offsets[first_pieces])

    return encode


def is_word_boundary_safe(encode: EncodeBatch) -> bool:
    """Whether texts can be divided at `unicode_drift.WORD_BOUNDARY`: pairs of texts have the same ids encoded
    together and separately, where the first ends and the second starts like such a boundary."""
    context = ("", "word ", "Wo'", "12", "?!", "\n\n", "  ", "é", "水", "\u0301", "\u088f", "don't")
    lefts = [before + "a" for before in context]
    rights = [start + after for start in (" b", "1", "\n") for after in context]
    pairs = list(product(range(len(lefts)), range(len(rights))))
    joined, *separate = (encode(texts) for texts in ([lefts[i] + rights[j] for i, j in pairs], lefts, rights))
    joined_ids, left_ids, right_ids = (
        np.split(ragged.values, ragged.offsets[1:-1]) for ragged in (joined, *separate)
    )
    return all(
        np.array_equal(ids, np.concatenate([left_ids[i], right_ids[j]]))
        for ids, (i, j) in zip(joined_ids, pairs, strict=True)
    )


def replace_rows(ragged: Ragged, is_replaced: np.ndarray, replacements: Ragged) -> Ragged:
    """A copy of `ragged` in which the documents of the mask `is_replaced` are those of `replacements`, in
    order."""
    lengths = ragged.lengths
    kept_values = ragged.values[np.repeat(~is_replaced, lengths)]
    lengths[is_replaced] = replacements.lengths
    is_new = np.repeat(is_replaced, lengths)
    values = np.empty(len(is_new), np.uint32)
    values[is_new], values[~is_new] = replacements.values, kept_values
    return Ragged(values, lengths_to_offsets(lengths))


def make_boundary_probe(inner: tokenizers.Tokenizer) -> tokenizers.Tokenizer | None:
    """A tokenizer that splits text into words like `inner` and whose vocabulary merges across every possible
    boundary, so that the ids show where it splits; those of a real vocabulary seldom do. None if `inner` is
    not byte-level BPE."""
    settings = json.loads(inner.to_str())
    if settings["model"]["type"] != "BPE" or '"ByteLevel"' not in json.dumps(settings["pre_tokenizer"]):
        return None
    symbols, neighbors = byte_symbols(), "a1!'A"
    merges = [(symbols[byte], after) for byte in range(0x80, 0xC0) for after in neighbors]
    merges += [(before, symbols[byte]) for byte in range(0xC2, 0xF5) for before in neighbors]
    entries = [*symbols.values(), *(left + right for left, right in merges)]
    probe = tokenizers.Tokenizer(models.BPE({entry: id for id, entry in enumerate(entries)}, merges))
    probe.normalizer, probe.pre_tokenizer = inner.normalizer, inner.pre_tokenizer
    return probe


def boundary_texts() -> list[str]:
    """Characters of all kinds between letters, digits and signs, for `make_boundary_probe`."""
    points = chain(
        range(0x80, 0x3100, 3),
        range(0xA000, 0xAC00, 7),
        range(0xF900, 0x20000, 17),
        range(0x20000, 0x34000, 97),
    )
    return [f"a{chr(c)}1{chr(c)}!{chr(c)} {chr(c)}A{chr(c)}'s" for c in points]


def find_mismatch(name: str, inner: tokenizers.Tokenizer, texts: Sequence[str]) -> str | None:
    """Why the library `name` cannot replace tokenizers: it is not installed, fails, or gives other ids for
    one of these texts. None if it can."""
    expected = make_tokenizers_encoder(inner)(texts)
    try:
        with suppress_output():
            encoded = make_encoder(name, inner)(texts)
    except BaseException as error:
        if not is_library_failure(error):
            raise
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return compare_ids(encoded, expected, texts)


def compare_ids(encoded: Ragged, expected: Ragged, texts: Sequence[str]) -> str | None:
    """A message about the first text whose ids differ; None if all are equal."""
    if np.array_equal(encoded.values, expected.values) and np.array_equal(encoded.offsets, expected.offsets):
        return None
    for i, text in enumerate(texts):
        ids, expected_ids = (
            ragged.values[ragged.offsets[i] : ragged.offsets[i + 1]] for ragged in (encoded, expected)
        )
        if not np.array_equal(ids, expected_ids):
            return f"gives other ids for {text[:40]!r}"
    return None


def treat_special_as_text(inner: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A tokenizer for which a special token written in a text is ordinary text.

    tokenizers has the setting `encode_special_tokens`, but models other than BPE, and BPE that looks words up
    first, still match any entry of the vocabulary in a text. For these the special entries get names that no
    text contains: noncharacters, which Unicode excludes from interchange. Sets the setting of `inner`
    itself."""
    inner.encode_special_tokens = True
    if isinstance(inner.model, models.BPE) and not inner.model.ignore_merges:
        return inner
    settings = json.loads(inner.to_str())
    model = settings["model"]
    merged = {
        "".join(pair) if isinstance(pair, list) else pair.replace(" ", "") for pair in model.get("merges", [])
    }
    special = {token["content"] for token in settings["added_tokens"] if token["special"]} - merged
    renamed = {content: f"\uffff{i}\ufffe" for i, content in enumerate(sorted(special))}
    for token in settings["added_tokens"]:
        token["content"] = renamed.get(token["content"], token["content"])
    if isinstance(model["vocab"], list):
        model["vocab"] = [[renamed.get(entry, entry), score] for entry, score in model["vocab"]]
    else:
        model["vocab"] = {renamed.get(entry, entry): id for entry, id in model["vocab"].items()}
    if model.get("unk_token") is not None:
        model["unk_token"] = renamed.get(model["unk_token"], model["unk_token"])
    settings["post_processor"] = None  # it names special tokens, which ids come without
    plain = tokenizers.Tokenizer.from_str(json.dumps(settings))
    plain.encode_special_tokens = True
    return plain


def adversarial_texts(inner: tokenizers.Tokenizer) -> list[str]:
    """Texts on which libraries are known to differ, some of them with the tokenizer's own added tokens."""
    added = [token.content for token in inner.get_added_tokens_decoder().values()]
    points = [chr(c) for c in (*range(0x3100), *range(0x3100, 0x110000, 61)) if not 0xD800 <= c < 0xE000]
    # Without drifting characters: tokenizers encodes these, so the texts would not test another library.
    is_drifting = unicode_drift.has_drifting(pa.array(points, pa.large_string()))
    points = [point for point, drifts in zip(points, is_drifting, strict=True) if not drifts]
    return [
        *(
            "",
            " ",
            "  ",
            "\n",
            "\r\n",
            "\t \t",
            "\x00",
            "a\x00b",
            "\ufeff",
            "\ufefftext",
            "\u200b",
            "\u2028x\u2029",
        ),
        *("x" + end for end in ("\n ", " \n", "\r\n \t", "\n\n  ", "  ", " \n \n ", "'", "1")),
        *(" " * n + "x" + " " * n + "\n" * n + "y" for n in (1, 2, 3, 7, 31, 100)),
        "line\r\nline\rline\n\n  indented\r\n\r\n\tend  ",
        *(unit * 100_000 for unit in ("a", " ")),
        *(unit * 10_000 for unit in ("\n", "=-", "é", "水", "🌊", "\u0301", "ab ", "'s")),
        "".join(chr(97 + i * i % 26) for i in range(5_000)),
        "1 12 123 1234 12345 " + "0123456789" * 50 + " 3.14e-10 ٣٤ ④ ½ Ⅷ 1_000",
        "I'm you're he'd WE'LL 'S 'ſ don''t ''' 'tis l’eau can't've",
        "e\u0301 é o\u0308\u0323 ö\u0323 각 각 ﬁ Å Å \u0301start क्षि กำ",
        "👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇫🇷🇩🇪 ☎️ 1️⃣ \U0001f9d1\U0001f3ff\u200d\U0001f680",
        "שלום עולם مرحبا \u202eabc\u202c \u200fאבג 12 ab",
        "English русский 中文字符 日本語テキスト 한국어 ไทย हिन्दी ελληνικά Ünïcödé mixedрусский中文",
        *(
            "\ue000 \uf8ff \ufffd \U000e0001",
            "\ufdd0 \uffff \U0010ffff",
            "a\U00016ebb1 '\U00016ebb\",",
            "\u0295\u180e",
            "some words and \u088f some more words, \U00016ebb\U00016ebb, then the end",
        ),
        "\u00a0nbsp\u3000wide\u2003em\u1680ogham\u0085next\u001cfile",
        "def f(x):\n    return {'a': [1, 2], \"b\": x**2}  # <|eos|> </s> [SEP] <0x0A> ▁ Ġ\n",
        *("".join(points[i : i + 1_000]) for i in range(0, len(points), 1_000)),
        "".join(f"a{point}b {point}{point}1 '{point}  {point}" for point in points[::7]),
        *chain.from_iterable(
            (name, f"x{name}y", f" {name} {name}{name}\n", name[:-1]) for name in added[:500]
        ),
    ]


def make_gigatoken_encoder(inner: tokenizers.Tokenizer) -> Callable[[pa.LargeStringArray], Ragged]:
    """A function that encodes batches with gigatoken."""
    import gigatoken  # with awkward it takes half a second, and may not be installed

    backend = gigatoken.Tokenizer.from_json(to_json_without_special(inner))

    def encode(texts: pa.LargeStringArray) -> Ragged:
        # One thread: documents are distributed among processes.
        encoded = backend.encode_batch(to_awkward(texts), parallel=False)
        layout = encoded.layout.to_ListOffsetArray64(start_at_zero=True)
        offsets = np.asarray(layout.offsets, np.int64)
        return make_ragged(np.asarray(layout.content.data, np.uint32)[: offsets[-1]], offsets, texts)

    return encode


def make_fastokens_encoder(inner: tokenizers.Tokenizer) -> EncodeBatch:
    """A function that encodes batches with fastokens."""
    import fastokens

    backend = fastokens.Tokenizer.from_json_str(to_json_without_special(inner))

    def encode(texts: Texts) -> Ragged:
        values, offsets = backend.encode_batch_flat(to_list(texts))
        offsets = np.frombuffer(offsets, np.uint64).astype(np.int64)
        return make_ragged(np.frombuffer(values, np.uint32), offsets, texts)

    return encode


def make_tokenizers_encoder(inner: tokenizers.Tokenizer) -> EncodeBatch:
    """A function that encodes batches with tokenizers, the reference."""

    def encode(texts: Texts) -> Ragged:
        encodings = inner.encode_batch_fast(to_list(texts), add_special_tokens=False)
        ids = [encoding.ids for encoding in encodings]
        offsets = np.cumsum([0, *map(len, ids)], dtype=np.int64)
        return make_ragged(np.fromiter(chain.from_iterable(ids), np.uint32, offsets[-1]), offsets, texts)

    return encode


def to_json_without_special(inner: tokenizers.Tokenizer) -> str:
    """The tokenizer.json of a tokenizer without its special tokens, for libraries that always recognize
    them."""
    settings = json.loads(inner.to_str())
    special = {token["content"] for token in settings["added_tokens"] if token["special"]}
    settings["added_tokens"] = [
        token for token in settings["added_tokens"] if token["content"] not in special
    ]
    if settings["model"].get("ignore_merges"):
        entries = settings["model"]["vocab"].items()
        settings["model"]["vocab"] = {entry: id for entry, id in entries if entry not in special}
    steps = settings["pre_tokenizer"]
    for step in (steps or {}).get("pretokenizers", []):
        if step.get("pattern") == {"Regex": CL100K}:
            step["pattern"] = {"Regex": CL100K_POSSESSIVE}
    return json.dumps(settings | {"post_processor": None, "truncation": None, "padding": None})


def to_awkward(texts: pa.LargeStringArray) -> "awkward.Array":
    """An awkward array of the same memory. awkward.from_arrow would allow for nulls, on which gigatoken
    panics."""
    import awkward

    _, offsets, data = texts.buffers()
    ends = (
        np.frombuffer(offsets, np.int64, len(texts) + 1, 8 * texts.offset)
        if offsets
        else np.zeros(1, np.int64)
    )
    characters = np.frombuffer(data, np.uint8) if data else np.zeros(0, np.uint8)
    contents, character = awkward.contents, {"__array__": "char"}
    flat = contents.NumpyArray(characters, parameters=character)
    return awkward.Array(
        contents.ListOffsetArray(awkward.index.Index64(ends), flat, parameters={"__array__": "string"})
    )


def to_list(texts: Texts) -> list[str]:
    return texts.to_pylist() if isinstance(texts, pa.Array) else list(texts)


def make_ragged(values: np.ndarray, offsets: np.ndarray, texts: Texts) -> Ragged:
    """Check that a library has encoded every text, and return its result."""
    assert len(offsets) == len(texts) + 1 and offsets[-1] == len(values), "documents were lost in encoding"
    return Ragged(values, offsets)


def is_library_failure(error: BaseException) -> bool:
    """Whether a library has failed. Libraries in Rust panic with an exception that is not a subclass of
    Exception and that cannot be imported."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextmanager
def suppress_output() -> Iterator[None]:
    """Hide what libraries write to the file descriptors of stdout and stderr: progress and panics."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        for descriptor in saved:
            os.dup2(null, descriptor)
        yield
    finally:
        for descriptor, copy in saved.items():
            os.dup2(copy, descriptor)
            os.close(copy)
        os.close(null)
