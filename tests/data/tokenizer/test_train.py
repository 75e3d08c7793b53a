import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from headrace.data.tokenizer import train as tokenizer_train
from headrace.errors import UserError
from tests.support.corpora import SPECIAL, WORDS, code

TIES = {
    "code": code()[:5],
    "ties": ("abcd dcba abdc " * 3, "xyz zyx xyz"),
    "random": tuple("".join(random.Random(i).choices("abc é水🌊 \n1'\u0301", k=200)) for i in range(50)),
    "spaces": ("   \n\n\t  a   b\r\n" * 5, "", "   "),
    "scripts": (" ".join("".join(map(chr, range(i, i + 20))) for i in range(33, 0xD700, 499)),) * 2,
    "special": ("<|pad|> <|bos|> hi \xff\x00",),
    "nothing": ("",),
    "none": (),
}


@pytest.mark.parametrize("vocab", [260, 600, 2000])
@pytest.mark.parametrize("name", TIES)
def test_bpe_training_gives_the_merges_and_ids_of_hugging_face(name: str, vocab: int) -> None:
    reference = tokenizers.Tokenizer(models.BPE())
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    reference.train_from_iterator(TIES[name], trainer)
    actual = tokenizer_train.train_tokenizer(iter(TIES[name]), kind="bpe", vocab=vocab).inner
    expected, found = (json.loads(inner.to_str())["model"] for inner in (reference, actual))
    assert found["merges"] == expected["merges"] and found["vocab"] == expected["vocab"]


PLENTIFUL = {
    "code": code(),
    "used up": ("abcd dcba abdc xyz zyx xyz\n" * 9_000, "", "the end"),
    "ties": tuple(" ".join(random.Random(i).choices(WORDS + list("abcdefgh"), k=9_000)) for i in range(6)),
    "equal": ("".join(f" {a}{b}{c}" for a in "abcdef" for b in "ghijkl" for c in "mnopqr") * 300,),
}


@pytest.mark.parametrize("name", PLENTIFUL)
def test_gigatoken_trains_the_same_tokenizer_as_hugging_face(name: str) -> None:
    texts, vocab = PLENTIFUL[name], sum(map(len, PLENTIFUL[name])) // tokenizer_train.MIN_CHARACTERS_PER_ENTRY
    models_made = (
        tokenizer_train.train_bpe_with_gigatoken(texts, vocab),
        tokenizer_train.train_bpe_with_tokenizers(texts, vocab),
    )
    actual, reference = (json.loads(tokenizers.Tokenizer(model).to_str())["model"] for model in models_made)
    assert len(reference["merges"]) >= 20
    assert actual["merges"] == reference["merges"] and actual["vocab"] == reference["vocab"]


def test_without_gigatoken_tokenizers_trains_the_same_and_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    log_lines: list[str] = []
    expected = tokenizer_train.train_tokenizer(
        code(), kind="bpe", vocab=500, report=log_lines.append
    ).inner.to_str()
    assert log_lines == []
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    assert (
        tokenizer_train.train_tokenizer(code(), kind="bpe", vocab=500, report=log_lines.append).inner.to_str()
        == expected
    )
    assert len(log_lines) == 1 and "gigatoken" in log_lines[0]


def test_texts_with_new_characters_are_trained_on_by_tokenizers_with_a_message() -> None:
    texts, log_lines = (*code(), " '\U00016ebb\"," * 50), list[str]()
    actual = tokenizer_train.train_tokenizer(texts, kind="bpe", vocab=500, report=log_lines.append).inner
    reference = tokenizers.Tokenizer(tokenizer_train.train_bpe_with_tokenizers(texts, 500))
    assert json.loads(actual.to_str())["model"] == json.loads(reference.to_str())["model"]
    assert (
        len(log_lines) == 1 and "1 of 14 texts have characters that tokenizers does not know" in log_lines[0]
    )


def test_a_few_texts_with_new_characters_are_skipped_in_training_with_a_message() -> None:
    texts = list(code())[:12] * 20
    expected = tokenizer_train.train_tokenizer(texts, kind="bpe", vocab=500).inner.to_str()
    log_lines: list[str] = []
    found = tokenizer_train.train_tokenizer(
        [*texts, "\U00016ebb new"], kind="bpe", vocab=500, report=log_lines.append
    )
    assert log_lines == ["tokenizer: 1 of 241 texts with very new characters are skipped in training"]
    assert found.inner.to_str() == expected


def test_training_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    print("before")
    tokenizer_train.train_tokenizer(code(), kind="bpe", vocab=300)
    print("after")
    assert capfd.readouterr() == ("before\nafter\n", "")


def test_training_a_unigram_tokenizer_again_gives_the_same_file(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from headrace.data.tokenizer import train as tokenizer_train, tokenizer as tokenizer_io\n"
        "texts = [Path(sys.argv[1]).read_text(encoding='utf-8')]\n"
        "print(tokenizer_train.train_tokenizer(texts, kind='unigram', vocab=400).inner.to_str())"
    )
    (tmp_path / "text").write_text(code()[-2], encoding="utf-8")
    command = [sys.executable, "-c", program, str(tmp_path / "text")]
    first, second = (subprocess.run(command, capture_output=True, check=True).stdout for _ in range(2))
    assert first == second and len(json.loads(first)["model"]["vocab"]) == 400


def test_a_vocabulary_without_room_for_all_bytes_is_refused() -> None:
    with pytest.raises(UserError, match=r"tokenizer\.vocab: expected at least 260 .* found 259"):
        tokenizer_train.train_tokenizer(code(), kind="bpe", vocab=259)
