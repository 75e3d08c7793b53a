import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers

from headrace.data.tokenizer import convert, encoders, unicode_drift
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.data.tokenizer import train as tokenizer_train
from tests.support.corpora import code, hostile, texts_of, trained


@pytest.mark.parametrize("name", encoders.ENCODER_NAMES)
def test_every_encoder_gives_the_ids_of_hugging_face_on_a_hostile_corpus(tmp_path: Path, name: str) -> None:
    tokenizer_io.save(trained(), tmp_path)
    tokenizer = tokenizer_io.load(tmp_path, encoder_name=name)
    reference = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    reference.encode_special_tokens = True
    texts = [*hostile(), *code()]
    expected = [reference.encode(text, add_special_tokens=False).ids for text in texts]
    for batch in (texts, pa.array(texts, pa.large_string())):
        encoded = tokenizer.encode_batch(batch)
        assert encoded.values.dtype == np.uint32 and encoded.offsets.dtype == np.int64
        assert texts_of(encoded) == expected


def cut_by(name: str) -> tokenizers.Tokenizer:
    """A tokenizer whose ids tell where it cuts text."""
    inner = tokenizers.Tokenizer.from_str(trained().inner.to_str())
    if name != "gpt2":
        split = pre_tokenizers.Split(tokenizers.Regex(getattr(convert, name)), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    probe = encoders.make_boundary_probe(inner)
    assert probe is not None
    return probe


@pytest.mark.parametrize("pattern", ["gpt2", "CL100K", "O200K"])
@pytest.mark.parametrize("name", ["gigatoken", "fastokens"])
def test_every_encoder_cuts_words_where_hugging_face_does(name: str, pattern: str) -> None:
    assert encoders.find_mismatch(name, cut_by(pattern), encoders.boundary_texts()) is None


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["gpt2", "CL100K", "O200K"])
@pytest.mark.parametrize("name", ["gigatoken", "fastokens"])
def test_every_encoder_cuts_at_every_character_as_hugging_face_does(name: str, pattern: str) -> None:
    points = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    inner = cut_by(pattern)
    for i in range(0, len(points), 100_000):
        texts = [f"a{c}a1{c}1!{c}! {c}A{c}'s" for c in points[i : i + 100_000]]
        assert encoders.find_mismatch(name, inner, texts) is None


def test_texts_with_characters_new_to_hugging_face_are_encoded_by_it() -> None:
    inner = cut_by("gpt2")
    texts = ["a\U00016ebb!", "plain", "", "größe 🌊", "!\U00016ebb1\u088f", "end"]
    array = pa.array(texts, pa.large_string())
    assert unicode_drift.has_drifting(array).tolist() == [True, False, False, False, True, False]
    expected = [inner.encode(text, add_special_tokens=False).ids for text in texts]
    # The libraries do differ: without this, a tokenizer's ids would depend on which of them encodes.
    assert texts_of(encoders.make_gigatoken_encoder(inner)(array)) != expected
    for batch in (array, array[1:], array[:0], texts):
        start = len(texts) - len(batch) if len(batch) else len(texts)
        encoded = encoders.make_encoder("gigatoken", inner)(batch)
        assert len(encoded) == len(batch) and (not len(batch) or texts_of(encoded) == expected[start:])


def test_only_words_around_a_new_character_are_encoded_by_hugging_face(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inner, new = cut_by("gpt2"), "\U00016ebb"
    many = "word " * 2000
    texts = [
        "",
        f"{many}a {new}b and {new}! {many}",
        "",
        "plain",
        f"{new}水{new}",
        f"{many}{new}",
        f"1{new} {many}",
    ]
    texts += [f"one two {new} three {new} four", "", f"A {new} B {new}", f"a b{new}c d", ""]
    asked: list[str] = []
    with_tokenizers = encoders.make_tokenizers_encoder

    def listening(inner: tokenizers.Tokenizer) -> encoders.EncodeBatch:
        encode = with_tokenizers(inner)
        return lambda texts: asked.extend(encoders.to_list(texts)) or encode(texts)

    monkeypatch.setattr(encoders, "make_tokenizers_encoder", listening)
    encode = encoders.make_encoder("gigatoken", inner)
    asked.clear()
    array = pa.array(["before", *texts], pa.large_string())[1:]
    expected = [inner.encode(text, add_special_tokens=False).ids for text in texts]
    assert texts_of(encode(array)) == expected
    assert [text for text in asked if text] == [
        *(f" a {new}b", f" and {new}! word", f"{new}水{new}", f" word {new}", f"1{new} word"),
        *(f" two {new} three {new} four", f"A {new} B {new}", f" b{new}c"),
    ]


def test_a_token_that_was_added_is_found_next_to_a_new_character() -> None:
    for token in (AddedToken("<unused1>"), AddedToken("new york"), AddedToken("end", rstrip=True)):
        inner = tokenizers.Tokenizer.from_str(trained().inner.to_str())
        inner.add_tokens([token])
        plain = encoders.treat_special_as_text(inner)
        texts = [
            f"some words \u088f {token.content} b",
            f"x \u088f{token.content} 1 \u088f and a {token.content}",
        ]
        expected = [plain.encode(text, add_special_tokens=False).ids for text in texts]
        assert texts_of(encoders.make_encoder("gigatoken", plain)(texts)) == expected


def test_texts_are_not_divided_where_words_are_not() -> None:
    joined = tokenizers.Tokenizer(
        models.BPE(
            vocab={c: i for i, c in enumerate("ab 𖺻")} | {"a ": 4, "a b": 5}, merges=[("a", " "), ("a ", "b")]
        )
    )
    assert not encoders.is_word_boundary_safe(encoders.make_tokenizers_encoder(joined))
    for pattern in ("gpt2", "CL100K", "O200K"):
        assert encoders.is_word_boundary_safe(encoders.make_tokenizers_encoder(cut_by(pattern)))
    array = pa.array(["x", "some a b \U00016ebb a b", "", "y"], pa.large_string())[1:]
    begins, ends = unicode_drift.find_spans(array, unicode_drift.find_drifting(array), at_boundaries=False)
    assert (begins.tolist(), ends.tolist()) == ([0], [len(array[0].as_py().encode())])


@pytest.mark.parametrize("name", encoders.ENCODER_NAMES)
def test_slices_and_empty_batches_of_arrow_text_are_encoded_correctly(name: str) -> None:
    tokenizer = tokenizer_io.Tokenizer(trained().inner, trained().special, encoder_name=name)
    texts = ["one", "", "two é", "🌊 three", ""]
    array = pa.array(texts, pa.large_string())
    for part in (slice(None), slice(1, None), slice(2, 4), slice(4, 5), slice(3, 3)):
        expected = [tokenizer.encode(text) for text in texts[part]]
        for batch in (array[part], texts[part]):
            encoded = tokenizer.encode_batch(batch)
            assert len(encoded) == len(expected) and encoded.offsets[0] == 0
            assert encoded.values.tolist() == [id for ids in expected for id in ids]
            assert encoded.lengths.tolist() == [len(ids) for ids in expected]
    assert tokenizer.encode_batch(array[:0]).offsets.tolist() == [0]
    with pytest.raises(AssertionError):
        tokenizer.encode_batch(pa.array(["a", None], pa.large_string()))


def test_the_fastest_encoder_with_the_right_ids_is_chosen_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer_io.save(trained(), tmp_path)
    assert tokenizer_io.choose_encoder(tokenizer_io.load(tmp_path), list(code()[:2])).name == "gigatoken"
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    choice = tokenizer_io.choose_encoder(tokenizer_io.load(tmp_path), [])
    assert choice.name == "fastokens" and "gigatoken is not usable: import of gigatoken" in choice.reason
    monkeypatch.setitem(sys.modules, "fastokens", None)
    assert tokenizer_io.choose_encoder(tokenizer_io.load(tmp_path), []).name == "tokenizers"
    monkeypatch.undo()
    tokenizer_io.save(trained("unigram"), tmp_path)
    choice = tokenizer_io.choose_encoder(tokenizer_io.load(tmp_path), [])
    assert (
        choice.name == "tokenizers"
        and "gigatoken is not usable: " in choice.reason
        and "Unigram" in choice.reason
    )


def test_an_encoder_with_other_ids_is_detected() -> None:
    plain = trained().text_tokenizer
    other = tokenizer_train.train_tokenizer(code()[:1], kind="bpe", vocab=400).text_tokenizer
    assert encoders.find_mismatch("gigatoken", plain, hostile()) is None
    texts = ["", "the import statement"]
    actual, reference = (encoders.make_encoder("gigatoken", inner)(texts) for inner in (plain, other))
    assert encoders.compare_ids(actual, reference, texts) == "gives other ids for 'the import statement'"
    assert encoders.compare_ids(actual, actual, texts) is None


def test_added_tokens_that_are_not_special_are_tokens_in_every_encoder(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer.from_str(trained().inner.to_str())
    inner.add_special_tokens(["<|tool|>"])
    inner.add_tokens([AddedToken("<think>", special=False, normalized=False), "héllo"])
    inner.add_special_tokens(["<|last|>"])
    tokenizer_io.save(tokenizer_io.Tokenizer(inner, trained().special), tmp_path)
    think = inner.token_to_id("<think>")
    texts = ["a<think>b", "<|tool|><think><|last|>", "héllo <|tool|> héllo"]
    expected = [tokenizer_io.load(tmp_path).encode(text) for text in texts]
    assert think in expected[0] and expected[1].count(think) == 1
    assert not {inner.token_to_id("<|tool|>"), inner.token_to_id("<|last|>")} & {*expected[1], *expected[2]}
    for name in encoders.ENCODER_NAMES:
        assert texts_of(tokenizer_io.load(tmp_path, encoder_name=name).encode_batch(texts)) == expected
