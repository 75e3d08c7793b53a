"""The libraries that encode batches of text: gigatoken, fastokens and tokenizers, fastest first. The last,
Hugging Face's, is the measure: another is used only where it gives the same ids on texts made to trip it."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, product
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import tokenizers
from tokenizers import models

from headrace.data.tokenizer import unicode_drift as unsettled
from headrace.data.tokenizer.convert import CL100K, byte_symbols
from headrace.data.documents import Ragged

# As tiktoken spells CL100K, and gigatoken knows it. Oniguruma, in tokenizers, takes this for something else.
CL100K_POSSESSIVE = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)

NAMES = ("gigatoken", "fastokens", "tokenizers")

Texts: TypeAlias = pa.LargeStringArray | Sequence[str]
Encode: TypeAlias = Callable[[Texts], Ragged]


def make(name: str, inner: tokenizers.Tokenizer) -> Encode:
    """Encodes as `inner` does, which must come from `without_special`. What libraries disagree on is left to
    tokenizers: the words around the character, or the whole text if that cannot be cut."""
    exact = with_tokenizers(inner)
    if name == "tokenizers":
        return exact
    fast = with_gigatoken(inner) if name == "gigatoken" else with_fastokens(inner)
    # Tokens that were added to it are found in a text before it is cut into words, and may hold a cut.
    added = any(not token.special for token in inner.get_added_tokens_decoder().values())
    cut = not added and cuts_words(exact)

    def encode(texts: Texts) -> Ragged:
        array = texts if isinstance(texts, pa.Array) else pa.array(texts, pa.large_string())
        places = unsettled.find(array)
        if not len(places):
            return fast(array)
        begins, ends = unsettled.stretches(array, places, cut=cut)
        pieces, firsts = unsettled.divide(array, np.concatenate([begins, ends]))
        left = np.isin(unsettled.memory(pieces)[0][:-1], begins)
        ragged = replaced(fast(pieces), left, exact(pieces.filter(pa.array(left))))
        return Ragged(ragged.values, ragged.offsets[firsts])

    return encode


def cuts_words(encode: Encode) -> bool:
    """Whether two texts, the first of which ends in a letter and the second begins with what unsettled.CUT
    wants after it, have the same ids together and apart."""
    around = ("", "word ", "Wo'", "12", "?!", "\n\n", "  ", "é", "水", "\u0301", "\u088f", "don't")
    lefts = [before + "a" for before in around]
    rights = [begin + after for begin in (" b", "1", "\n") for after in around]
    pairs = list(product(range(len(lefts)), range(len(rights))))
    together, *apart = (encode(texts) for texts in ([lefts[i] + rights[j] for i, j in pairs], lefts, rights))
    whole, left, right = (np.split(one.values, one.offsets[1:-1]) for one in (together, *apart))
    return all(
        np.array_equal(ids, np.concatenate([left[i], right[j]]))
        for ids, (i, j) in zip(whole, pairs, strict=True)
    )


def replaced(ragged: Ragged, rows: np.ndarray, others: Ragged) -> Ragged:
    """The ids of `others` in place of those of some rows."""
    lengths = ragged.lengths
    kept = ragged.values[np.repeat(~rows, lengths)]
    lengths[rows] = others.lengths
    is_other = np.repeat(rows, lengths)
    values = np.empty(len(is_other), np.uint32)
    values[is_other], values[~is_other] = others.values, kept
    return Ragged(values, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))


def splitting(inner: tokenizers.Tokenizer) -> tokenizers.Tokenizer | None:
    """The same tokenizer with entries that join what stands on either side of any cut between words, so that
    ids tell where it cuts, which those of a real vocabulary seldom do. None where no bytes are cut."""
    settings = json.loads(inner.to_str())
    if settings["model"]["type"] != "BPE" or '"ByteLevel"' not in json.dumps(settings["pre_tokenizer"]):
        return None
    symbols, around = byte_symbols(), "a1!'A"
    merges = [(symbols[byte], after) for byte in range(0x80, 0xC0) for after in around]
    merges += [(before, symbols[byte]) for byte in range(0xC2, 0xF5) for before in around]
    entries = [*symbols.values(), *(left + right for left, right in merges)]
    made = tokenizers.Tokenizer(models.BPE({entry: id for id, entry in enumerate(entries)}, merges))
    made.normalizer, made.pre_tokenizer = inner.normalizer, inner.pre_tokenizer
    return made


def cuts() -> list[str]:
    """Some characters of all kinds between letters, digits and signs."""
    points = chain(
        range(0x80, 0x3100, 3),
        range(0xA000, 0xAC00, 7),
        range(0xF900, 0x20000, 17),
        range(0x20000, 0x34000, 97),
    )
    return [f"a{chr(c)}1{chr(c)}!{chr(c)} {chr(c)}A{chr(c)}'s" for c in points]


def difference(name: str, inner: tokenizers.Tokenizer, texts: Sequence[str]) -> str | None:
    """Why a library cannot stand in for tokenizers: it is not there, refuses, fails or gives other ids."""
    wanted = with_tokenizers(inner)(texts)
    try:
        with silenced():
            found = make(name, inner)(texts)
    except BaseException as error:
        if not is_failure(error):
            raise
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return first_difference(found, wanted, texts)


def first_difference(found: Ragged, wanted: Ragged, texts: Sequence[str]) -> str | None:
    if np.array_equal(found.values, wanted.values) and np.array_equal(found.offsets, wanted.offsets):
        return None
    for i, text in enumerate(texts):
        ours, theirs = (
            ragged.values[ragged.offsets[i] : ragged.offsets[i + 1]] for ragged in (found, wanted)
        )
        if not np.array_equal(ours, theirs):
            return f"gives other ids for {text[:40]!r}"
    return None


def without_special(inner: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer, for which a special token written in a text is text.

    tokenizers leaves special tokens alone if told so, but models other than BPE, and BPE that looks words up
    first, find any entry of the vocabulary in a text. There those entries are renamed to what no text has:
    noncharacters, which Unicode keeps out of interchange."""
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
    settings["post_processor"] = None  # it names special tokens, and ids come without them
    made = tokenizers.Tokenizer.from_str(json.dumps(settings))
    made.encode_special_tokens = True
    return made


def hostile(inner: tokenizers.Tokenizer) -> list[str]:
    """Texts on which libraries are known to part ways, with those of the tokenizer's own added tokens."""
    added = [token.content for token in inner.get_added_tokens_decoder().values()]
    points = [chr(c) for c in (*range(0x3100), *range(0x3100, 0x110000, 61)) if not 0xD800 <= c < 0xE000]
    # Without those that are left to tokenizers, or none of these texts would test another library.
    points = [
        point
        for point, left in zip(points, unsettled.are_in(pa.array(points, pa.large_string())), strict=True)
        if not left
    ]
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


def with_gigatoken(inner: tokenizers.Tokenizer) -> Callable[[pa.LargeStringArray], Ragged]:
    import gigatoken  # here: with awkward it takes half a second, and may be missing

    backend = gigatoken.Tokenizer.from_json(without_added(inner))

    def encode(texts: pa.LargeStringArray) -> Ragged:
        # One thread: the documents are divided among processes.
        found = backend.encode_batch(as_awkward(texts), parallel=False).layout.to_ListOffsetArray64(
            start_at_zero=True
        )
        offsets = np.asarray(found.offsets, np.int64)
        return checked(np.asarray(found.content.data, np.uint32)[: offsets[-1]], offsets, texts)

    return encode


def with_fastokens(inner: tokenizers.Tokenizer) -> Encode:
    import fastokens

    backend = fastokens.Tokenizer.from_json_str(without_added(inner))

    def encode(texts: Texts) -> Ragged:
        values, offsets = backend.encode_batch_flat(as_list(texts))
        return checked(
            np.frombuffer(values, np.uint32), np.frombuffer(offsets, np.uint64).astype(np.int64), texts
        )

    return encode


def with_tokenizers(inner: tokenizers.Tokenizer) -> Encode:
    def encode(texts: Texts) -> Ragged:
        found = [
            encoding.ids for encoding in inner.encode_batch_fast(as_list(texts), add_special_tokens=False)
        ]
        offsets = np.cumsum([0, *map(len, found)], dtype=np.int64)
        return checked(np.fromiter(chain.from_iterable(found), np.uint32, offsets[-1]), offsets, texts)

    return encode


def without_added(inner: tokenizers.Tokenizer) -> str:
    """A tokenizer.json without special tokens, for libraries that know no way to leave them alone."""
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


def as_awkward(texts: pa.LargeStringArray) -> Any:
    """The same memory. Not by awkward.from_arrow: it allows for nulls, on which gigatoken panics."""
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


def as_list(texts: Texts) -> list[str]:
    return texts.to_pylist() if isinstance(texts, pa.Array) else list(texts)


def checked(values: np.ndarray, offsets: np.ndarray, texts: Texts) -> Ragged:
    assert len(offsets) == len(texts) + 1 and offsets[-1] == len(values), "documents were lost in encoding"
    return Ragged(values, offsets)


def is_failure(error: BaseException) -> bool:
    """Rust libraries panic with an exception that is no Exception and that cannot be imported."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextmanager
def silenced() -> Iterator[None]:
    """Keeps what libraries print past Python, progress and panics, off the terminal."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = {number: os.dup(number) for number in (1, 2)}
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in saved:
            os.dup2(nowhere, number)
        yield
    finally:
        for number, copy in saved.items():
            os.dup2(copy, number)
            os.close(copy)
        os.close(nowhere)
