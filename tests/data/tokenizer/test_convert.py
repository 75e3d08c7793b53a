import base64
import itertools
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex

from headrace.data.tokenizer import convert, encoders
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.errors import UserError
from tests.support.corpora import WORDS, code, hostile, texts_of, trained

# As tiktoken has them; the regex library reads them as it does.
TIKTOKEN = {
    "r50k_base": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    "p50k_base": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    "cl100k_base": encoders.CL100K_POSSESSIVE.replace("$", r"\Z"),
    "o200k_base": convert.O200K,
}
ENDS = ["line\n ", "word \n\t", "1234567 12", "it's IT'S we'LL\r\n\r\n  x", "  \n  \n", "a/b//\n/"]


def rank_file(path: Path) -> dict[bytes, int]:
    """Tokens of a BPE trained here, in the order of merges, with a gap at 300 as in p50k_base."""
    bytes_of = {symbol: byte for byte, symbol in convert.byte_symbols().items()}
    merges = json.loads(trained().inner.to_str())["model"]["merges"]
    tokens = [bytes([byte]) for byte in range(255, -1, -1)]
    tokens += [bytes(bytes_of[symbol] for symbol in left + right) for left, right in merges]
    ranks = {token: i + (i >= 300) for i, token in enumerate(dict.fromkeys(tokens))}
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    path.write_bytes(b"".join(lines))
    return ranks


def merged_by_rank(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    """tiktoken's rule at its plainest: the neighbours whose union has the lowest rank, leftmost first."""
    if word in ranks:
        return [ranks[word]]
    parts = [bytes([byte]) for byte in word]
    while True:
        pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
        if not pairs:
            return [ranks[part] for part in parts]
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@pytest.mark.parametrize("name", TIKTOKEN)
def test_a_tiktoken_file_becomes_a_tokenizer_with_the_same_ids(tmp_path: Path, name: str) -> None:
    ranks, target = rank_file(tmp_path / f"{name}.tiktoken"), tmp_path / "target"
    target.mkdir()
    tokenizer_io.copy(tmp_path / f"{name}.tiktoken", target)
    tokenizer = tokenizer_io.load(target, encoder_name="gigatoken")
    _, special = convert.ENCODINGS[name]
    assert tokenizer.special.eos == special["<|endoftext|>"] and tokenizer.vocab_size == 1 + max(
        special.values()
    )
    texts = [*(text for text in hostile() if len(text) < 1_500), *code()[:1], *ENDS]
    # Python's \s takes the separators U+001C to U+001F for spaces; Rust's and Oniguruma's do not.
    texts = [text.translate(dict.fromkeys(range(0x1C, 0x20))) for text in texts]
    for text, ids in zip(texts, texts_of(tokenizer.encode_batch(texts)), strict=True):
        words = [word.group().encode() for word in regex.finditer(TIKTOKEN[name], text)]
        assert b"".join(words) == text.encode()
        assert ids == [id for word in words for id in merged_by_rank(word, ranks)], text[:50]
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", TIKTOKEN)
def test_tiktoken_gives_the_ids_of_the_converted_tokenizer(tmp_path: Path, name: str) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    ranks = rank_file(tmp_path / f"{name}.tiktoken")
    tokenizer = tokenizer_io.load(tmp_path / f"{name}.tiktoken")
    pattern = TIKTOKEN[name].replace(r"\Z", "$")
    reference = tiktoken.Encoding(
        name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=convert.ENCODINGS[name][1]
    )
    for text in [*hostile(), *code(), *ENDS]:
        assert tokenizer.encode(text) == reference.encode_ordinary(text)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("mine.tiktoken", b"IQ== 0\n", r"mine\.tiktoken does not define .* cl100k_base.*tokenizer\.json"),
        ("o200k_base.tiktoken", b"IQ== 0\nIg==\n", r"o200k_base\.tiktoken:2: expected a token"),
        ("o200k_base.tiktoken", b"!! 0\n", r"o200k_base\.tiktoken:1: expected a token"),
        ("o200k_base.tiktoken", b"IQ== 0\n", r"lacks some of the 256 bytes"),
        ("spm.model", b"no model", r"spm\.model is not a sentencepiece model"),
        ("spm.model", b"", r"spm\.model is not a sentencepiece model"),
    ],
)
def test_a_file_of_another_library_that_cannot_be_read_is_explained(
    tmp_path: Path, name: str, content: bytes, match: str
) -> None:
    (tmp_path / name).write_bytes(content)
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(UserError, match=match):
            tokenizer_io.load(path)


def message(*entries: tuple[int, Any]) -> bytes:
    """A protocol buffer."""

    def varint(value: int) -> bytes:
        return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)

    def field(number: int, value: Any) -> bytes:
        match value:
            case int():
                return varint(number << 3) + varint(value % 2**64)
            case float():
                return varint(number << 3 | 5) + struct.pack("<f", value)
        content = value.encode() if isinstance(value, str) else value
        return varint(number << 3 | 2) + varint(len(content)) + content

    return b"".join(field(number, value) for number, value in entries)


Piece = tuple[str, float, int]


def sentencepiece_model(pieces: list[Piece], *, kind: int, prefix: int, tidy: int) -> bytes:
    entries = [(1, message((1, piece), (2, score), (3, type))) for piece, score, type in pieces]
    return message(*entries, (2, message((3, kind), (35, 1), (43, -1))), (3, message((3, prefix), (4, tidy))))


def pieces_of(texts: list[str]) -> list[Piece]:
    """Control pieces, bytes, and every substring of the words that comes often, scored by rank."""
    counts: dict[str, int] = {}
    for word in "▁".join(texts).replace(" ", "▁").split("▁"):
        for start in range(len(word)):
            for end in range(start + 1, min(start + 5, len(word)) + 1):
                counts[word[start:end]] = counts.get(word[start:end], 0) + 1
    frequent = sorted(counts, key=lambda piece: (-counts[piece] * len(piece), piece))[:300]
    spaced = ["▁▁", "▁▁▁▁", *("▁" + piece for piece in frequent[:50])]
    singles = sorted({c for piece in frequent for c in piece} | {"▁", "<", "s", ">", "/"})
    normal = dict.fromkeys([*(p for p in frequent if len(p) > 1), *spaced, *singles])
    return [
        *[("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("<own>", 0.0, 4)],
        *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
        *((piece, -float(i) - 1, 1) for i, piece in enumerate(normal)),
    ]


def normalize(text: str, prefix: int, tidy: int) -> str:
    if tidy:
        text = " ".join(word for word in text.split(" ") if word)
    return ("▁" * prefix + text).replace(" ", "▁") if text else ""


def merged_by_score(text: str, pieces: list[Piece]) -> list[int]:
    """Sentencepiece's BPE in its plainest form, the user's piece first."""
    scores = {piece: (score, id) for id, (piece, score, type) in enumerate(pieces) if type == 1}
    ids = {piece: id for id, (piece, _, _) in enumerate(pieces)}
    found: list[int] = []
    for part in regex.split("(<own>)", text):
        parts = [part] if part == "<own>" else list(part)
        while part != "<own>":
            pairs = [
                (-scores[a + b][0], i)
                for i, (a, b) in enumerate(itertools.pairwise(parts))
                if a + b in scores
            ]
            if not pairs:
                break
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        for token in parts:
            known = token in scores or token == "<own>"
            found += [ids[token]] if known else [ids[f"<0x{byte:02X}>"] for byte in token.encode()]
    return found


def best_path_score(text: str, pieces: list[Piece], unknown: float) -> float:
    """The score of the best way through a unigram model."""
    scores = {piece: score for piece, score, type in pieces if type == 1}
    best = [0.0] + [-np.inf] * len(text)
    for start in range(len(text)):
        for end in range(start + 1, min(start + 7, len(text)) + 1):
            score = scores.get(text[start:end], unknown if end == start + 1 else -np.inf)
            best[end] = max(best[end], best[start] + score)
    return best[-1]


SENTENCES = [
    "",
    "the mill",
    " leads",
    "ends  ",
    "a  b    c",
    "<s>x</s><unk>",
    "größe 水 \n\ttab",
    "<0x0A>",
    "▁x",
    "x" * 999,
]


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("tidy", [0, 1])
def test_a_sentencepiece_bpe_model_becomes_a_tokenizer_with_the_same_ids(
    tmp_path: Path, prefix: int, tidy: int
) -> None:
    pieces = pieces_of(list(code()[:2]))
    content = sentencepiece_model(pieces, kind=2, prefix=prefix, tidy=tidy)
    (tmp_path / "tokenizer.model").write_bytes(content)
    tokenizer = tokenizer_io.load(tmp_path, encoder_name="tokenizers")
    assert tokenizer.special == tokenizer_io.SpecialTokenIds(bos=1, eos=2, pad=None, mask=None)
    texts = [
        *SENTENCES,
        "<own>",
        "a<own> b<own><own>c",
        " <own>",
        *code()[0].split("\n\n")[:60],
        WORDS[5] * 30,
    ]
    for text, ids in zip(texts, texts_of(tokenizer.encode_batch(texts)), strict=True):
        assert ids == merged_by_score(normalize(text, prefix, tidy), pieces), text
        assert tidy or tokenizer.decode(ids) == text.replace("▁", " ")


@pytest.mark.parametrize("spaces", [False, True])
def test_a_sentencepiece_unigram_model_becomes_a_tokenizer_with_the_best_pieces(
    tmp_path: Path, spaces: bool
) -> None:
    pieces = [piece for piece in pieces_of(list(code()[:2])) if piece[2] != 4]
    pieces = [piece for piece in pieces if spaces or piece[0].rfind("▁") <= 0]
    pieces = [
        (piece, -5 - 0.0137 * i if type == 1 else score, type)
        for i, (piece, score, type) in enumerate(pieces)
    ]
    file = tmp_path / "tokenizer.model"
    file.write_bytes(sentencepiece_model(pieces, kind=1, prefix=1, tidy=0))
    tokenizer = tokenizer_io.load(file)
    lowest = min(score for _, score, type in pieces if type == 1)
    for text in [*SENTENCES, *code()[0].split("\n\n")[:40]]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text.replace("▁", " ")
        assert not {0, 1, 2} & set(ids)
        # Unknown characters become bytes: three bytes count as a single step.
        known = [pieces[id][1] for id in ids if pieces[id][2] == 1]
        written = bytes(int(pieces[id][0][3:5], 16) for id in ids if pieces[id][2] == 6).decode()
        score = sum(known) + len(written) * (lowest - 10)
        assert score == pytest.approx(best_path_score(normalize(text, 1, 0), pieces, lowest - 10), rel=1e-4)


def test_transformers_loads_converted_tokenizers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    rank_file(tmp_path / "cl100k_base.tiktoken")
    (tmp_path / "a.model").write_bytes(sentencepiece_model(pieces_of([WORDS[0]]), kind=2, prefix=1, tidy=0))
    for name in ("cl100k_base.tiktoken", "a.model"):
        target = tmp_path / name.partition(".")[0]
        target.mkdir()
        tokenizer_io.copy(tmp_path / name, target)
        actual, reference = tokenizer_io.load(target), AutoTokenizer.from_pretrained(target)
        assert reference.eos_token_id == actual.special.eos
        for text in ("river x", "größe\n", " two  spaces "):
            assert reference.encode(text, add_special_tokens=False) == actual.encode(text)


SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "bpe", "split_digits": True, "allow_whitespace_only_pieces": True},
    "gemma": {
        "model_type": "bpe",
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<turn>", "\t", "▁▁"],
        "pad_id": 3,
    },
    "own": {"model_type": "bpe", "user_defined_symbols": ["<sep>", "[x.*]"]},
    "unigram": {"model_type": "unigram", "user_defined_symbols": ["<sep>", "<b>"]},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_sentencepiece_gives_the_ids_of_the_converted_tokenizer(tmp_path: Path, name: str) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    lines = [line for text in code() for line in text.splitlines() if line.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=1000,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
        **SETTINGS[name],
    )
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    tokenizer = tokenizer_io.load(tmp_path)
    assert (tokenizer.special.bos, tokenizer.special.eos) == (reference.bos_id(), reference.eos_id())
    own = ["a<sep>b <sep><sep>c", "<sep>", "<b>x</b><b>", "[x.*]", "<turn>user\n\thi  there     x"]
    for text in [*(text for text in hostile() if len(text) < 50_000), *SENTENCES, *own, *lines[:300]]:
        found, expected = tokenizer.encode(text), reference.encode(text)
        if name == "unigram":  # a long run of one sign can be cut in many ways that are equally likely
            found, expected = sorted(found), sorted(expected)
        assert found == expected, text[:50]
