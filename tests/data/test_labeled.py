"""Labels stay with their texts and words through all stages, and labeled texts are not split."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from headrace.config import recipe
from headrace.data import labeled
from headrace.data.annotations import AnnotationStats, sort_labels
from headrace.data.dataset import Dataset
from headrace.data.inspect import inspect
from headrace.data.pack import plan_rows
from headrace.data.pipeline.prepare import prepare
from headrace.data.shards import Index, read_rows
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.data.tokenizer import train as tokenizer_train
from headrace.data.verify import verify
from headrace.errors import UserError

WORDS = ["mill", "water", "wheel", "stone", "river", "grain", "of", "the", "über", "水車", "grinds", "slowly"]


def silent(line: str) -> None:
    pass


def lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def texts(count: int, seed: int, longest: int = 30) -> list[str]:
    rng = random.Random(seed)
    return [f"{seed}.{n} " + " ".join(rng.choices(WORDS, k=rng.randint(1, longest))) for n in range(count)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tokenizer_io.Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer_io.save(tokenizer_train.train_tokenizer(iter(texts(200, 0)), kind="bpe", vocab=380), folder)
    return tokenizer_io.load(folder)


def prepared(tmp_path: Path, sources: str, *overrides: str, say: Any = silent) -> Path:
    (tmp_path / "data.yaml").write_text(
        f"path: {tmp_path}/data\nworkers: 1\nsources:\n{sources}\n"
        "tokenizer: {use: bpe, vocab: 380}\npack: {sequence_length: 48, eval_fraction: 0.2}\n"
    )
    prepare(recipe.load_data(tmp_path / "data.yaml", overrides), say)
    return tmp_path / "data"


def count_labeled_texts(folder: Path) -> Counter[tuple[str, str | None]]:
    """Count (text, label) pairs in the batches of a dataset."""
    dataset, inner = Dataset.open(folder), tokenizer_io.load(folder)
    counts: Counter[tuple[str, str | None]] = Counter()
    for split in ("train", "evaluation"):
        order = dataset.train_order(4, seed=0) if split == "train" else dataset.eval_order(4)
        for step in range(-(-dataset.rows_per_epoch(split) // 4)):
            batch = dataset.batch(order, step)
            num_rows = min(4, dataset.rows_per_epoch(split) - 4 * step)
            for tokens, segments, labels in zip(
                batch.tokens[:num_rows], batch.segments[:num_rows], batch.labels[:num_rows], strict=True
            ):
                for segment in range(1, segments.max() + 1):
                    columns = np.flatnonzero(segments == segment)
                    assert not labels[columns[1:]].any(), "only the first token of a text has a label"
                    label = dataset.index.labels[labels[columns[0]] - 1] if labels[columns[0]] else None
                    counts[inner.decode(tokens[columns]), label] += 1
                assert not labels[segments == 0].any()
    return counts


@pytest.mark.parametrize("mode", ["best_fit", "document", "concat"])
def test_every_text_keeps_its_label_through_packing_and_shuffling(tmp_path: Path, mode: str) -> None:
    """Two files have labels in different orders, a third has none, and all are packed together."""
    first, second, unlabeled = texts(60, 1, 9), texts(50, 2, 9), texts(20, 3, 9)
    (tmp_path / "a").mkdir()
    names = ["zebra", "ape", "cat"]
    lines(tmp_path / "a" / "1.jsonl", [{"text": t, "label": names[n % 3]} for n, t in enumerate(first)])
    rows = {
        "sentence": second,
        "label": [names[::-1][n % 2] for n in range(len(second))],
        "idx": range(len(second)),
    }
    pq.write_table(pa.table(rows), tmp_path / "two.parquet", row_group_size=20)
    lines(tmp_path / "plain.jsonl", [{"text": t} for t in unlabeled])
    folder = prepared(
        tmp_path,
        f"  a: {{path: {tmp_path}/a}}\n  b: {{path: {tmp_path}/two.parquet}}\n"
        f"  c: {{path: {tmp_path}/plain.jsonl}}",
        f"pack.mode={mode}",
        "shuffle.rounds=2",
    )
    index = Index.parse((folder / "index.json").read_bytes(), "")
    assert index.labels == ("ape", "cat", "zebra") and index.labelled == "text" and not index.pairs
    expected = Counter({(text, names[n % 3]): 1 for n, text in enumerate(first)})
    expected += Counter({(text, names[::-1][n % 2]): 1 for n, text in enumerate(second)})
    if mode != "concat":  # splits texts without a label at row ends
        expected += Counter({(text, None): 1 for text in unlabeled})
    actual = count_labeled_texts(folder)
    assert Counter({key: n for key, n in actual.items() if mode != "concat" or key[1]}) == expected
    verify(folder, silent)


def test_integer_labels_are_ordered_by_value_and_missing_labels_are_none() -> None:
    assert sort_labels(["10", "9", "0"]) == ("0", "9", "10")
    assert sort_labels(["b", "10", "a"]) == ("10", "a", "b")
    labels = [
        labeled.to_document_parts({"text": "x", "label": label})[0]["label"]
        for label in (3, -1, None, True, "no")
    ]
    assert labels == ["3", None, None, "true", "no"]
    assert not labeled.has_label({"text": "x", "label": 0.7})  # a score


def reference(tokenizer: tokenizer_io.Tokenizer) -> PreTrainedTokenizerFast:
    """The same tokenizer in transformers, with special tokens as in BERT."""
    inner = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())
    bos, eos = (inner.id_to_token(id) for id in (tokenizer.special.bos, tokenizer.special.eos))
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{bos} $A {eos}",
        pair=f"{bos} $A {eos} $B {eos}",
        special_tokens=[(bos, tokenizer.special.bos), (eos, tokenizer.special.eos)],
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.parametrize("length", [16, 17, 40, 400])
def test_text_pairs_are_joined_and_truncated_as_in_transformers(
    tokenizer: tokenizer_io.Tokenizer, length: int
) -> None:
    first, second = texts(40, 4, 25), texts(40, 5, 12)
    records = [{"premise": a, "hypothesis": b, "label": "x"} for a, b in zip(first, second, strict=True)]
    notes = AnnotationStats()
    documents = [json.dumps(labeled.to_document_parts(record)) for record in records]
    ragged = labeled.encode_labeled_texts(tokenizer, documents, length, notes)
    hf_tokenizer = reference(tokenizer)
    untruncated = hf_tokenizer(first, second)["input_ids"]
    expected = hf_tokenizer(first, second, truncation="longest_first", max_length=length)["input_ids"]
    actual = [ragged.slice(n, n + 1).values.tolist() for n in range(len(ragged))]
    assert actual == expected
    assert notes.counts["cut"] == sum(len(ids) > length for ids in untruncated)
    assert [document_labels[0] for document_labels in np.split(ragged.labels, ragged.offsets[1:-1])] == [
        1
    ] * 40
    assert ragged.labels.sum() == 40


@pytest.mark.parametrize("length", [12, 400])
def test_tags_are_at_the_first_token_of_each_word_as_in_transformers(
    tokenizer: tokenizer_io.Tokenizer, length: int
) -> None:
    rng = random.Random(6)
    records = []
    for _ in range(40):
        words = rng.choices([*WORDS, "unheard-of", "ﬁrst", "🌾", "a"], k=rng.randint(1, 20))
        records.append({"tokens": words, "ner_tags": [rng.choice(["O", "B", "I", -100]) for _ in words]})
    notes = AnnotationStats()
    documents = [json.dumps(labeled.to_document_parts(record)) for record in records]
    ragged = labeled.encode_tagged_words(tokenizer, documents, length, notes)
    hf_tokenizer = reference(tokenizer)
    names = {1 + number: name for name, number in notes.names.items()}
    for n, record in enumerate(records):
        encoding = hf_tokenizer(" ".join(record["tokens"]), truncation=True, max_length=length)
        document = ragged.slice(n, n + 1)
        assert document.values.tolist() == encoding["input_ids"]
        expected, char = [None] * len(encoding["input_ids"]), 0
        for word, tag in zip(record["tokens"], record["ner_tags"], strict=True):
            token = encoding.char_to_token(char)
            if token is not None and tag != -100:
                expected[token] = tag
            char += len(word) + 1
        assert [names.get(int(number)) for number in document.labels] == expected


def test_tags_are_packed_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [{"tokens": text.split(), "tags": ["W"] * len(text.split())} for text in texts(60, 7, 9)]
    records[0]["tags"][0] = "N"
    folder = prepared(tmp_path, f"  a: {{path: {lines(tmp_path / 'a.jsonl', records)}}}")
    index = Index.parse((folder / "index.json").read_bytes(), "")
    assert index.labels == ("N", "W") and index.labelled == "tokens"
    shards = [shard for split in index.splits.values() for shard in split.epochs[0]]
    labels = np.concatenate([read_rows(folder, shard.name).labels.ravel() for shard in shards])
    assert np.bincount(labels)[1:].tolist() == [1, sum(len(r["tokens"]) for r in records) - 1]
    verify(folder, silent)
    inspect(folder, rows=1)
    assert "wheel/W" in capsys.readouterr().out
    assert "<td>W</td>" in (folder / "report.html").read_text()


def test_long_texts_are_truncated_and_reported_and_inspect_shows_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{"text": text, "label": n % 2} for n, text in enumerate(texts(60, 8, 60))]
    log_lines: list[str] = []
    folder = prepared(
        tmp_path, f"  a: {{path: {lines(tmp_path / 'a.jsonl', records)}}}", say=log_lines.append
    )
    inner, dataset = tokenizer_io.load(folder), Dataset.open(folder)
    long = sum(len(inner.encode(record["text"])) > 46 for record in records)
    assert long > 5
    assert f"pack: {long} labeled texts are cut at the end, to rows of 48 tokens" in log_lines
    assert "pack: texts have 2 labels: 0, 1" in log_lines
    assert (
        sum(count_labeled_texts(folder).values())
        == 60
        == sum(s.documents for s in dataset.index.splits.values())
    )
    inspect(folder, rows=1)
    assert "label: 0" in (out := capsys.readouterr().out) or "label: 1" in out
    with pytest.raises(UserError, match=r"24 would cut the labelled texts"):
        Dataset.open(folder, sequence_length=24)


def test_a_dataset_with_documents_of_several_tasks_is_refused(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", [{"text": text, "label": 1} for text in texts(20, 9)])
    lines(tmp_path / "b.jsonl", [{"words": ["a", "b"], "tags": [0, n]} for n in range(20)])
    with pytest.raises(UserError, match="texts with a label and words with tags in one dataset"):
        prepared(tmp_path, f"  a: {{path: {tmp_path}/a.jsonl}}\n  b: {{path: {tmp_path}/b.jsonl}}")


def test_a_bad_tag_list_is_reported_with_its_location(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", [{"words": ["a", "b"], "tags": [0]}])
    with pytest.raises(UserError, match=r"a\.jsonl:1: `tags` has 1 for 2 words"):
        prepared(tmp_path, f"  a: {{path: {tmp_path}/a.jsonl}}")


def test_verify_finds_labels_without_a_name_and_labels_inside_a_text(tmp_path: Path) -> None:
    records = [{"text": text, "label": n % 2} for n, text in enumerate(texts(60, 10, 9))]
    folder = prepared(tmp_path, f"  a: {{path: {lines(tmp_path / 'a.jsonl', records)}}}")
    file = folder / "train-0-00000.labels.npy"
    labels = np.load(file)
    labels[2, 0], labels[3, 1] = 3, 1
    np.save(file, labels)
    with pytest.raises(UserError) as error:
        verify(folder, silent)
    assert "row 2: found label 3, expected less than 3" in str(error.value)
    assert "row 3: found a label at 1, expected the first token of a text" in str(error.value)


@pytest.mark.parametrize("seed", range(5))
def test_indivisible_documents_are_not_split_and_fill_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths, length = rng.integers(0, 60, rng.integers(0, 80)), 40
    plan = plan_rows(lengths, length, "concat", seed, keep_whole=True)
    assert np.bincount(plan.document, plan.size, len(lengths)).tolist() == lengths.tolist()
    short = np.flatnonzero((lengths > 0) & (lengths < length))
    assert np.bincount(plan.document, minlength=len(lengths))[short].tolist() == [1] * len(short)
    used = np.bincount(plan.row, plan.size, plan.rows)
    assert (used <= length).all() and (used > 0).all()
    ends = np.zeros(plan.rows, int)
    for row, column, size in zip(plan.row, plan.column, plan.size, strict=True):
        assert column == ends[row]
        ends[row] += size
