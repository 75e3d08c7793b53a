import dataclasses
import json
import random
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from millrace.data import tokenise
from millrace.data.pack import choose_dtype, is_held_out, pack
from millrace.data.prepare import prepare
from millrace.data.sources import python_library, text
from millrace.data.stream import Dataset, read_ahead, verify
from millrace.data.tokenise import Document, Encoded
from millrace.recipe import load_data

WORDS = ["river", "mill", "wheel", "grain", "sluice", "größe", "naïve", "水車", "🌊", "if", "x", "==", "1:"]


def write_texts(folder: Path, count: int = 40) -> dict[str, str]:
    """Small documents, each with a word that no other has."""
    folder.mkdir()
    rng = random.Random(0)
    texts = {f"{i}.txt": " ".join([f"only{i}", *rng.choices(WORDS, k=30)]) + "\n" for i in range(count)}
    for name, content in texts.items():
        (folder / name).write_text(content, encoding="utf-8", newline="")
    return texts


def recipe(tmp_path: Path, *overrides: str, tokenizer: str = "{use: bpe, vocab: 300}") -> Any:
    file = tmp_path / "recipe.yaml"
    file.write_text(
        f"path: {tmp_path}/packed\n"
        f"source: {{use: text, path: {tmp_path}/texts}}\n"
        f"tokenizer: {tokenizer}\n"
        "pack: {sequence_length: 32, evaluation: 0.2}\n"
    )
    return load_data(file, overrides)


def silent(line: str) -> None:
    pass


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, str]:
    return write_texts(tmp_path / "texts")


@pytest.fixture
def folder(tmp_path: Path, texts: dict[str, str]) -> Path:
    prepare(recipe(tmp_path), silent)
    return tmp_path / "packed"


@pytest.fixture
def data(folder: Path) -> Dataset:
    return Dataset.open(str(folder))


def epoch(data: Dataset, number: int, seed: int = 0) -> np.ndarray:
    """The rows of one epoch, read one at a time."""
    rows = data.rows("train")
    steps = range(number * rows, (number + 1) * rows)
    return np.concatenate([data.batch(t, split="train", sequences=1, seed=seed) for t in steps])


def ordered(rows: np.ndarray) -> list[list[int]]:
    return sorted(rows.tolist())


def test_text_survives_encoding_and_decoding(folder: Path) -> None:
    tokenizer = tokenise.load(folder)
    for content in ["", "  two  spaces\n\ttabs\r\n", "größe 水車 🌊 \x00 unseen Ω"]:
        assert tokenizer.decode(tokenizer.encode(content)) == content


def test_a_special_token_written_in_a_text_is_text(folder: Path) -> None:
    tokenizer = tokenise.load(folder)
    ids = tokenizer.encode("a <|eos|> b")
    assert 2 not in ids and tokenizer.decode(ids) == "a <|eos|> b"
    (encoded,) = tokenizer.encode_documents([Document("a", "see <|bos|>")], "uint16")
    first, *middle, last = encoded.tokens.tolist()
    assert (first, last) == (1, 2) and not {1, 2} & set(middle)


def test_transformers_loads_the_tokenizer_and_gives_the_same_ids(folder: Path, texts: dict[str, str]) -> None:
    from transformers import AutoTokenizer  # here, because it takes seconds

    theirs, ours = AutoTokenizer.from_pretrained(folder), tokenise.load(folder)
    assert theirs.convert_ids_to_tokens([0, 1, 2, 3]) == ["<|pad|>", "<|bos|>", "<|eos|>", "<|mask|>"]
    roles = ("pad", "bos", "eos", "mask")
    assert [getattr(theirs, f"{role}_token_id") for role in roles] == [0, 1, 2, 3]
    for content in texts.values():
        ids = ours.encode(content)
        assert theirs.encode(content, add_special_tokens=False) == ids
        assert theirs.encode(content) == [1, *ids]
        assert theirs.decode(ids) == content


def test_training_a_tokenizer_twice_gives_the_same_file(tmp_path: Path, texts: dict[str, str]) -> None:
    for name in ("a", "b"):
        prepare(recipe(tmp_path, f"path={tmp_path}/{name}"), silent)
    assert tokenise.sha256(tmp_path / "a") == tokenise.sha256(tmp_path / "b")
    assert (tmp_path / "a/train-00000.npy").read_bytes() == (tmp_path / "b/train-00000.npy").read_bytes()


def test_every_token_of_every_document_comes_exactly_once_in_an_epoch(
    data: Dataset, folder: Path, texts: dict[str, str]
) -> None:
    tokenizer, share = tokenise.load(folder), 0.2
    kept = [t for name, t in texts.items() if not is_held_out(name, share)]
    expected = np.concatenate([[1, *tokenizer.encode(content), 2] for content in kept])
    rows = epoch(data, 0)
    assert data.index.splits["train"].tokens == len(expected) == (rows != data.pad).sum()
    assert sorted(rows[rows != data.pad].tolist()) == sorted(expected.tolist())
    assert data.index.splits["train"].bytes == sum(len(content.encode()) for content in kept)
    shards = np.concatenate([np.load(folder / shard.file) for shard in data.index.splits["train"].shards])
    assert ordered(rows) == ordered(shards)


def test_documents_stay_whole_and_held_out_ones_never_reach_training(
    tmp_path: Path, texts: dict[str, str]
) -> None:
    prepare(recipe(tmp_path, "pack.sequence_length=8192"), silent)
    data, tokenizer = Dataset.open(tmp_path / "packed"), tokenise.load(tmp_path / "packed")
    found: dict[str, list[str]] = {}
    for split in ("train", "evaluation"):
        (row,) = data.batch(0, split=split, sequences=1, seed=0)
        parts = data.segments(row)
        found[split] = [tokenizer.decode(row[parts == i]) for i in range(1, parts.max() + 1)]
    held_out = {name for name in texts if is_held_out(name, 0.2)}
    assert 0 < len(held_out) < len(texts) / 2
    assert sorted(found["evaluation"]) == sorted(texts[name] for name in held_out)
    assert sorted(found["train"]) == sorted(texts[name] for name in texts if name not in held_out)
    assert found["train"] != sorted(found["train"])  # shuffled


def test_the_vocabulary_does_not_learn_from_held_out_documents(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    (name,) = [f"{i}.md" for i in range(99) if is_held_out(f"{i}.md", 0.2)][:1]
    (tmp_path / "texts" / name).write_text("zqzqzq " * 500)
    prepare(recipe(tmp_path), silent)
    assert not any("zq" in entry for entry in tokenise.load(tmp_path / "packed").inner.get_vocab())


def test_who_is_held_out_does_not_depend_on_order_or_seed(tmp_path: Path) -> None:
    documents = [Encoded(f"{i}", np.full(5, i, np.uint16), 5) for i in range(1, 60)]
    cfg = SimpleNamespace(sequence_length=5, evaluation=0.3)
    seen = []
    for seed, order in [(0, documents), (1, documents[::-1])]:
        target = tmp_path / str(seed)
        target.mkdir()
        pack(order, target, cfg=cfg, seed=seed, filler=0)
        seen.append(set(np.load(target / "evaluation-00000.npy")[:, 0].tolist()))
    # The numbers keep a later version from moving documents between the splits.
    assert seen[0] == seen[1] == {4, 8, 9, 10, 13, 17, 29, 39, 41, 43, 46, 47, 49, 50, 51, 52, 53, 54, 55, 59}


def test_rows_of_one_document_are_spread(tmp_path: Path) -> None:
    document = Encoded("book", np.arange(1, 400, dtype=np.uint16), 1)
    pack([document], tmp_path, cfg=SimpleNamespace(sequence_length=4, evaluation=0.0), seed=0, filler=0)
    firsts = np.load(tmp_path / "train-00000.npy")[:, 0].tolist()
    assert sorted(firsts) == list(range(1, 400, 4)) != firsts


@pytest.mark.parametrize("hosts", [1, 2, 4, 8])
def test_the_batch_does_not_depend_on_how_many_hosts_read_it(data: Dataset, hosts: int) -> None:
    size = 16 // hosts
    for split in ("train", "evaluation"):
        for step in range(6):  # crosses epochs, and the end of the evaluation split
            whole = data.batch(step, split=split, sequences=16, seed=3)
            parts = [
                data.batch(step, split=split, sequences=16, seed=3, rows=slice(i * size, (i + 1) * size))
                for i in range(hosts)
            ]
            np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_a_stream_resumed_at_any_step_equals_an_unbroken_one(folder: Path) -> None:
    def stream(start: int) -> Iterator[np.ndarray]:
        data = Dataset.open(folder)
        return read_ahead(lambda t: data.batch(t, split="train", sequences=6, seed=1), start, 30)

    unbroken = list(stream(0))
    assert unbroken[0].dtype == np.int32 and unbroken[0].shape == (6, 32)
    for start in (1, 13, 29):
        np.testing.assert_array_equal(list(stream(start)), unbroken[start:])


def test_batches_of_any_size_go_through_the_same_rows(data: Dataset) -> None:
    rows = data.rows("train")
    singly = np.concatenate([epoch(data, 0), epoch(data, 1), epoch(data, 2)])
    large = data.batch(0, split="train", sequences=2 * rows + 3, seed=0)  # touches three epochs at once
    np.testing.assert_array_equal(large, singly[: len(large)])


def test_each_epoch_and_each_seed_has_its_own_order_of_the_same_rows(data: Dataset) -> None:
    first, second, other = epoch(data, 0), epoch(data, 1), epoch(data, 0, seed=1)
    assert not (first == second).all() and not (first == other).all()
    assert ordered(first) == ordered(second) == ordered(other)


def test_many_shards_read_as_one(tmp_path: Path, folder: Path) -> None:
    whole = Dataset.open(folder)
    rows = np.load(folder / "train-00000.npy")
    documents = [Encoded(f"{i}", row, 1) for i, row in enumerate(rows)]
    cfg = SimpleNamespace(sequence_length=32, evaluation=0.0)
    packed = pack(documents, tmp_path, cfg=cfg, seed=0, filler=0, shard_bytes=5 * rows[0].nbytes)
    shards = packed.splits["train"].shards
    assert [shard.rows for shard in shards] == [5] * (len(rows) // 5) + [len(rows) % 5] * (len(rows) % 5 > 0)
    index = dataclasses.replace(whole.index, splits=packed.splits)
    index.write(tmp_path)
    parts = Dataset.open(tmp_path)
    assert ordered(epoch(parts, 0)) == ordered(rows)
    stored = np.concatenate([np.load(tmp_path / shard.file) for shard in shards])
    picked = np.array([len(rows) - 1, 0, 7, 4, 5])
    np.testing.assert_array_equal(parts.take("train", picked), stored[picked])


def test_evaluation_runs_once_in_plain_order_and_ends_in_padding(data: Dataset, folder: Path) -> None:
    stored = np.load(folder / "evaluation-00000.npy")
    sequences = len(stored) - 1  # so that one row is left for the second batch
    batches = [data.batch(t, split="evaluation", sequences=sequences, seed=t) for t in range(2)]
    rows = np.concatenate(batches)
    assert rows.shape == (2 * sequences, 32)
    np.testing.assert_array_equal(rows[: len(stored)], stored)
    assert (data.segments(rows[len(stored) :]) == 0).all()


def test_segments_count_documents_and_positions_restart_in_each(data: Dataset) -> None:
    rows = np.array(
        [
            [1, 9, 9, 2, 1, 9, 2, 1],  # begins with a document, ends within one
            [9, 9, 2, 1, 9, 9, 9, 9],  # begins within a document
            [9, 2, 1, 9, 2, 0, 0, 0],  # padded
            [0, 0, 0, 0, 0, 0, 0, 0],
        ]
    )
    segments = data.segments(rows)
    assert segments.dtype == np.int32
    assert segments.tolist() == [
        [1, 1, 1, 1, 2, 2, 2, 3],
        [1, 1, 1, 2, 2, 2, 2, 2],
        [1, 1, 2, 2, 2, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert data.positions(segments).tolist() == [
        [0, 1, 2, 3, 0, 1, 2, 0],
        [0, 1, 2, 0, 1, 2, 3, 4],
        [0, 1, 0, 1, 2, 0, 1, 2],
        [0, 1, 2, 3, 4, 5, 6, 7],
    ]
    np.testing.assert_array_equal(data.segments(rows[1]), segments[1])  # any leading axes


def test_unigram_entropy_is_that_of_the_training_tokens(data: Dataset, folder: Path) -> None:
    tokens = np.load(folder / "train-00000.npy")
    _, counts = np.unique(tokens[tokens != 0], return_counts=True)
    share = counts / counts.sum()
    assert data.index.unigram_entropy == pytest.approx(-(share * np.log(share)).sum(), rel=1e-12)


def test_index_says_what_the_files_hold(data: Dataset, folder: Path) -> None:
    stored = json.loads((folder / "index.json").read_text())
    assert stored["version"] == 1 and stored["dtype"] == "uint16" and stored["vocab"] == 300
    assert stored["special"] == {"bos": 1, "eos": 2, "pad": 0, "mask": 3}
    assert stored["recipe"]["source"]["use"] == "text"
    for split in stored["splits"].values():
        for shard in split["shards"]:
            assert zlib.crc32((folder / shard["file"]).read_bytes()) == shard["crc32"]
            assert np.load(folder / shard["file"]).shape == (shard["rows"], 32)


def gpt2_like(path: Path) -> None:
    """One token for beginning and end, no padding, and a setting that would cut texts to 8 tokens."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner.model = models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, [])
    inner.add_special_tokens(["<|endoftext|>"])
    inner.enable_truncation(8)
    inner.save(str(path))


def test_a_tokenizer_with_one_end_token_packs_whole_documents(tmp_path: Path, texts: dict[str, str]) -> None:
    gpt2_like(tmp_path / "tokenizer.json")
    prepare(recipe(tmp_path, tokenizer=f"{{use: file, path: {tmp_path}/tokenizer.json}}"), silent)
    data = Dataset.open(tmp_path / "packed")
    assert (data.bos, data.eos, data.mask, data.index.special.pad) == (None, 256, None, None)
    assert data.vocab == 257
    assert (tmp_path / "packed/tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    kept = [t for name, t in texts.items() if not is_held_out(name, 0.2)]
    assert data.index.splits["train"].tokens == sum(len(content.encode()) + 1 for content in kept)
    rows = np.array([[9, 256, 9, 9, 256, 256, 256], [256, 9, 9, 9, 9, 256, 9]])
    assert data.segments(rows).tolist() == [[1, 1, 2, 2, 2, 0, 0], [1, 2, 2, 2, 2, 2, 3]]
    assert data.segments(np.full(4, data.pad)).tolist() == [1, 0, 0, 0]


def test_special_tokens_are_named_by_the_configuration_beside_a_tokenizer(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "<s>": 1}, unk_token="[UNK]"))
    inner.add_special_tokens(["[CLS]", "[SEP]", "<start>", "<hole>", "<pad>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    assert tokenise.load(tmp_path).special == tokenise.Special(bos=2, eos=3, pad=6, mask=None)
    settings = {"bos_token": {"content": "<start>"}, "sep_token": "[SEP]", "mask_token": "<hole>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert tokenise.load(tmp_path).special == tokenise.Special(bos=4, eos=3, pad=6, mask=5)


def test_a_vocabulary_too_large_for_the_dtype_is_refused() -> None:
    assert choose_dtype("auto", 65536) == "uint16" and choose_dtype("auto", 65537) == "uint32"
    assert choose_dtype("uint32", 10) == "uint32"
    with pytest.raises(ValueError, match=r"pack\.dtype: .*65536"):
        choose_dtype("uint16", 65537)


def test_a_failed_run_leaves_nothing_and_keeps_what_was_there(tmp_path: Path, texts: dict[str, str]) -> None:
    broken = tmp_path / "texts/zzz.txt"
    broken.write_bytes(b"fine \xff not")
    with pytest.raises(ValueError, match=r"zzz\.txt is not UTF-8 text \(byte 5\)"):
        prepare(recipe(tmp_path), silent)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.yaml", "texts"]
    broken.unlink()
    prepare(recipe(tmp_path), silent)
    before = (tmp_path / "packed/index.json").read_bytes()
    broken.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="UTF-8"):
        prepare(recipe(tmp_path, "seed=1"), silent)
    assert (tmp_path / "packed/index.json").read_bytes() == before
    verify(tmp_path / "packed")


def test_what_a_killed_run_left_does_not_disturb_the_next(tmp_path: Path, texts: dict[str, str]) -> None:
    left = tmp_path / ".packed.partial/new"
    left.mkdir(parents=True)
    (left / "train-00000.npy").write_bytes(b"half")
    with pytest.raises(ValueError, match="no packed data"):
        Dataset.open(tmp_path / "packed")
    prepare(recipe(tmp_path), silent)
    verify(tmp_path / "packed")
    assert not left.parent.exists()


def test_preparing_again_does_nothing_but_another_recipe_replaces(tmp_path: Path, folder: Path) -> None:
    before = (folder / "index.json").stat().st_mtime_ns
    index = prepare(recipe(tmp_path), silent)
    assert (folder / "index.json").stat().st_mtime_ns == before
    assert index["splits"]["train"]["rows"] == Dataset.open(folder).rows("train")
    prepare(recipe(tmp_path, "pack.sequence_length=16"), silent)
    assert Dataset.open(folder).sequence_length == 16
    assert not (tmp_path / ".packed.partial").exists()


def test_a_folder_of_something_else_is_not_replaced(tmp_path: Path, texts: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="holds no packed data"):
        prepare(recipe(tmp_path, f"path={tmp_path}/texts"), silent)
    assert len(list((tmp_path / "texts").iterdir())) == len(texts)


@pytest.mark.parametrize("name", ["train-00000.npy", "evaluation-00000.npy", "tokenizer.json"])
def test_a_flipped_byte_is_found_and_named(folder: Path, name: str) -> None:
    verify(folder)
    content = bytearray((folder / name).read_bytes())
    content[-3] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=name):
        verify(folder)


@pytest.mark.parametrize("change", [lambda old: old[:-2], lambda old: old + b"xx", lambda old: b""])
def test_a_shard_of_the_wrong_size_is_refused_by_name(folder: Path, change: Callable[[bytes], bytes]) -> None:
    file = folder / "train-00000.npy"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ValueError, match=r"train-00000\.npy"):
        Dataset.open(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / "evaluation-00000.npy").unlink()
    for read in (Dataset.open, verify):
        with pytest.raises(ValueError, match=r"evaluation-00000\.npy is missing"):
            read(folder)


def test_a_missing_or_foreign_folder_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere.*millrace data prepare"):
        Dataset.open(str(tmp_path / "nowhere"))
    for content in ("[]", "{}", "not json", '{"version": 1}'):
        (tmp_path / "index.json").write_text(content)
        with pytest.raises(ValueError, match=r"index\.json is not an index"):
            Dataset.open(tmp_path)


def test_a_shorter_sequence_length_cuts_rows_evenly(folder: Path) -> None:
    whole, halves = Dataset.open(folder), Dataset.open(folder, sequence_length=16)
    assert halves.sequence_length == 16 and halves.rows("train") == 2 * whole.rows("train")
    assert ordered(epoch(halves, 0)) == ordered(epoch(whole, 0).reshape(-1, 16))


@pytest.mark.parametrize("length", [24, 64])
def test_a_sequence_length_that_does_not_divide_the_packed_one_is_refused(folder: Path, length: int) -> None:
    with pytest.raises(ValueError, match=rf"data\.sequence_length: {length} does not divide 32"):
        Dataset.open(folder, sequence_length=length)


def test_a_share_that_holds_out_nothing_is_an_error_and_zero_is_not(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts", count=2)
    with pytest.raises(ValueError, match=r"pack\.evaluation: .* none of 2 documents"):
        prepare(recipe(tmp_path, "pack.evaluation=0.001"), silent)
    prepare(recipe(tmp_path, "pack.evaluation=0.0"), silent)
    data = Dataset.open(tmp_path / "packed")
    assert data.rows("evaluation") == 0
    with pytest.raises(ValueError, match="evaluation split of this data is empty"):
        data.batch(0, split="evaluation", sequences=1, seed=0)


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


def test_read_ahead_yields_in_order_and_ends() -> None:
    assert list(read_ahead(lambda step: step * step, 3, 9)) == [9, 16, 25, 36, 49, 64]
    assert list(read_ahead(lambda step: step, 5, 5)) == []
    assert reading_threads() == []


def test_read_ahead_raises_what_the_thread_raised_at_its_turn() -> None:
    def make(step: int) -> int:
        if step == 2:
            raise OSError("disk gone")
        return step

    items = read_ahead(make, 0, 10)
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(OSError, match="disk gone"):
        next(items)
    assert reading_threads() == []


def test_read_ahead_makes_two_at_most_and_stops_its_thread_when_closed() -> None:
    made: list[int] = []
    full = threading.Event()

    def make(step: int) -> int:
        made.append(step)
        if step == 2:
            full.set()
        return step

    items = read_ahead(make, 0, 1_000_000)
    assert next(items) == 0
    assert full.wait(10)
    closing = threading.Thread(target=items.close, daemon=True)  # type: ignore[attr-defined]
    closing.start()
    closing.join(10)
    assert not closing.is_alive() and reading_threads() == []
    assert made == [0, 1, 2]


def test_text_source_takes_a_file_a_folder_or_a_glob(tmp_path: Path) -> None:
    (tmp_path / "b/deep").mkdir(parents=True)
    for name in ("b/deep/z.txt", "a.md", "b/c.tex", "b/image.png"):
        (tmp_path / name).write_text(name)

    def ids(path: str) -> list[str]:
        return [row.id for row in text.rows(text.Config(path=f"{tmp_path}/{path}"))]

    assert ids("") == ["a.md", "b/deep/z.txt"]
    assert ids("a.md") == ["a.md"]
    assert ids("**/*.t*") == ["b/c.tex", "b/deep/z.txt"]
    assert ids("b/*.tex") == ["c.tex"]
    with pytest.raises(ValueError, match="path: no such file or folder: .*nothing"):
        ids("nothing")


def test_the_python_library_is_read_in_order_up_to_the_limit() -> None:
    rows = list(python_library.rows(python_library.Config(limit=1)))
    names = [row.id for row in rows]
    assert names == sorted(names) and "argparse.py" in names
    size = sum(len(row.text.encode()) for row in rows)
    assert 800_000 < size <= 1_000_000
    assert not any(part in python_library.SKIPPED for name in names for part in name.split("/"))
    assert rows == list(python_library.rows(python_library.Config(limit=1)))
