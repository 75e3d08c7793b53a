import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from headrace.data.tokenizer import encoders
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.errors import UserError
from tests.support.corpora import SPECIAL, code, hostile, texts_of, trained


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_hostile_texts_survive_encoding_and_decoding(kind: str) -> None:
    tokenizer = trained(kind)
    for text in hostile():
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_special_token_written_in_a_text_is_text(kind: str) -> None:
    tokenizer = trained(kind)
    for text in ("a <|eos|> b", "<|eos|>", "<|pad|><|bos|>x", " <|mask|>"):
        ids = tokenizer.encode(text)
        assert not {0, 1, 2, 3} & set(ids) and tokenizer.decode(ids) == text
        assert tokenizer.encode_batch([text]).values.tolist() == ids


@pytest.mark.parametrize("model", ["Unigram", "WordLevel", "WordPiece", "BPE"])
def test_models_that_look_words_up_do_not_find_special_tokens_in_a_text(model: str) -> None:
    entries = ["<unk>", "</s>", *"</s>ab", "##s", "##/", "##>"]
    vocab = {entry: id for id, entry in enumerate(dict.fromkeys(entries))}
    make_model = {
        "Unigram": lambda: models.Unigram([(entry, -1.0) for entry in vocab], 0, False),
        "WordLevel": lambda: models.WordLevel(vocab, unk_token="<unk>"),
        "WordPiece": lambda: models.WordPiece(vocab, unk_token="<unk>"),
        "BPE": lambda: models.BPE(vocab, [], ignore_merges=True),
    }
    inner = tokenizers.Tokenizer(make_model[model]())
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["<unk>", "</s>"])
    tokenizer = tokenizer_io.Tokenizer(
        inner, tokenizer_io.find_special_tokens(inner, {}), encoder_name="tokenizers"
    )
    assert tokenizer.special.eos == 1
    assert 1 not in tokenizer.encode("a </s> b") and tokenizer.encode("a")[0] == vocab["a"]
    assert texts_of(tokenizer.encode_batch(["a </s> b", "b"])) == [
        tokenizer.encode(t) for t in ("a </s> b", "b")
    ]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_transformers_loads_the_tokenizer_and_gives_the_same_ids(tmp_path: Path, kind: str) -> None:
    from transformers import AutoTokenizer  # here, because it takes seconds

    actual = trained(kind)
    tokenizer_io.save(actual, tmp_path)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    assert reference.convert_ids_to_tokens([0, 1, 2, 3]) == SPECIAL
    roles = ("pad", "bos", "eos", "mask")
    assert [getattr(reference, f"{role}_token_id") for role in roles] == [0, 1, 2, 3]
    for text in code():
        ids = actual.encode(text)
        assert reference.encode(text, add_special_tokens=False) == ids
        assert reference.encode(text) == [1, *ids]
        assert reference.decode(ids) == text


def gpt2_like(path: Path) -> None:
    """One token for beginning and end, no padding, and a setting that would cut texts to 8 tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.add_special_tokens(["<|endoftext|>"])
    inner.enable_truncation(8)
    inner.enable_padding(length=12)
    inner.save(str(path))


def test_a_tokenizer_with_a_single_end_token_encodes_documents_with_it(tmp_path: Path) -> None:
    gpt2_like(tmp_path / "tokenizer.json")
    for name in encoders.ENCODER_NAMES:
        tokenizer = tokenizer_io.load(tmp_path / "tokenizer.json", encoder_name=name)
        assert tokenizer.special == tokenizer_io.SpecialTokenIds(bos=None, eos=256, pad=None, mask=None)
        assert tokenizer.vocab_size == 257 and tokenizer.special.filler == 256
        assert tokenizer.encode_batch(["x" * 40, "y"]).lengths.tolist() == [40, 1]


def test_a_tokenizer_is_copied_byte_for_byte_with_its_configuration(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    gpt2_like(source / "tokenizer.json")
    tokenizer_io.copy(source, target)
    assert json.loads((target / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"
    (source / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "model_max_length": 9}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    tokenizer_io.copy(source / "tokenizer.json", target)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert tokenizer_io.file_sha256(target) == tokenizer_io.file_sha256(source)
    assert not [file for file in target.iterdir() if "partial" in file.name]


def test_special_tokens_are_named_by_the_configuration_next_to_a_tokenizer(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "<s>": 1}, unk_token="[UNK]"))
    inner.add_special_tokens(["[CLS]", "[SEP]", "<start>", "<hole>", "<pad>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_io.load(tmp_path).special == tokenizer_io.SpecialTokenIds(bos=2, eos=3, pad=6, mask=None)
    settings = {"bos_token": {"content": "<start>"}, "sep_token": "[SEP]", "mask_token": "<hole>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert tokenizer_io.load(tmp_path).special == tokenizer_io.SpecialTokenIds(bos=4, eos=3, pad=6, mask=5)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b'{"bos_token": 3, "chat_template": 4}', b""])
def test_a_broken_file_is_reported_with_the_path_of_the_user(
    tmp_path: Path, name: str, content: bytes
) -> None:
    (tmp_path / "target").mkdir()
    tokenizer_io.save(trained(), tmp_path)
    (tmp_path / name).write_bytes(content)
    for use in (tokenizer_io.load, lambda path: tokenizer_io.copy(path, tmp_path / "target")):
        with pytest.raises(UserError) as error:
            use(tmp_path)
        assert str(tmp_path / name) in str(error.value) and "\n" not in str(error.value)
    assert not list((tmp_path / "target").iterdir())


def test_a_missing_tokenizer_or_one_without_an_end_is_explained(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.path: no such file: .*nowhere"):
        tokenizer_io.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no such file: .*tokenizer\.json"):
        tokenizer_io.load(tmp_path)
    tokenizers.Tokenizer(models.WordLevel({"a": 0})).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"tokenizer\.json has no token that starts or ends .* eos_token"):
        tokenizer_io.load(tmp_path)


def test_a_template_for_conversations_is_found_saved_and_replaced(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer_io.save(trained(), tmp_path)
    assert tokenizer_io.load(tmp_path).chat_template is None
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d{{ messages }}"}]
    for value, expected in (("{{ 1 }}", "{{ 1 }}"), (named, "d{{ messages }}"), (named[:1], None)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": value}))
        assert tokenizer_io.load(tmp_path).chat_template == expected
    tokenizer_io.write_chat_template(tmp_path, "{{ 'größe' }}")
    again = tmp_path / "again"
    again.mkdir()
    tokenizer_io.save(tokenizer_io.load(tmp_path), again)
    assert tokenizer_io.load(again).chat_template == "{{ 'größe' }}"
    assert (
        AutoTokenizer.from_pretrained(again).apply_chat_template([{"role": "user"}], tokenize=False)
        == "größe"
    )
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"chat_template\.jinja is not UTF-8"):
        tokenizer_io.load(tmp_path)
