"""Pack jobs: groups of documents become rows with document starts and loss bits, equal for normalized files
and for documents read directly from the source."""

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.config import recipe
from headrace.data import pack_job, token_buffer
from headrace.data.clean import normalize
from headrace.data.clean.normalize import SourcePart
from headrace.data.documents import SCHEMA, FilePart, Ragged, is_held_out
from headrace.data.pack import PackPlan, plan_rows
from headrace.data.shards import read_rows, unpack_bits
from headrace.data.tokenizer import tokenizer as tokenizer_io
from tests.data.test_pack import MODES, pieces_in


@dataclass(frozen=True)
class Section:
    mode: str = "best_fit"
    sequence_length: int = 48
    eval_fraction: float = 0.1
    pause_tokens: int = 0


TEXTS = [f"Text {n}: " + " ".join(f"{n * i % 23} of {i}" for i in range(n % 37)) + "é" for n in range(400)]
CHAT = """{% for message in messages %}{% if message.role == 'assistant' %}
{% generation %}{{ message.content + '\n' }}{% endgeneration %}
{% else %}{{ message.role + ': ' + message.content + '\n' }}{% endif %}{% endfor %}"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from headrace.data.tokenizer import train as tokenizer_train

    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer_io.save(tokenizer_train.train_tokenizer(iter(TEXTS), kind="bpe", vocab=400), folder)
    return folder


def write_documents(folder: Path, number: int, **columns: list) -> SourcePart:
    """Write documents as the normalize stage does."""
    count = len(columns["id"])
    arrays = [pa.array(columns.get(field.name, [None] * count), field.type) for field in SCHEMA]
    (folder / "normalized").mkdir(exist_ok=True)
    file = normalize.part_path(folder / "normalized", number)
    pq.write_table(pa.Table.from_arrays(arrays, schema=SCHEMA), file, row_group_size=64)
    return SourcePart(number, "here", None, FilePart("gone"))


@pytest.fixture
def job(tmp_path: Path, tokenizer: Path) -> pack_job.PackJob:
    parts = tuple(
        write_documents(
            tmp_path,
            start,
            id=[f"text:{n}" for n in range(start, start + 200)],
            text=TEXTS[start : start + 200],
            source=["here"] * 200,
        )
        for start in (0, 200)
    )
    return pack_job.PackJob(
        number=3,
        source_parts=parts,
        is_normalized=True,
        source=1,
        folder=str(tmp_path),
        tokenizer=str(tokenizer),
        encoder="tokenizers",
        normalize=None,
        pack=Section(),
        dtype="uint16",
        seed=0,
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_group_has_every_document_of_its_split_exactly_once(
    job: pack_job.PackJob, mode: str, tmp_path: Path
) -> None:
    summary = pack_job.run_pack_job(replace(job, pack=Section(mode=mode, sequence_length=2048)))
    loaded = tokenizer_io.load(job.tokenizer, "tokenizers")
    for split in ("train", "evaluation"):
        texts = [
            text for n, text in enumerate(TEXTS) if is_held_out(f"text:{n}", 0.1) == (split == "evaluation")
        ]
        rows = read_rows(tmp_path / "packed", f"00003-0-{split}")
        special = loaded.special
        encoded = [special.bos, *loaded.encode("x"), special.eos]
        assert len(encoded) > 2
        documents = [piece for piece in pieces_in(rows, special.filler) if piece[0] == special.bos]
        if mode != "concat":  # may split documents at row ends
            assert sorted(loaded.decode(piece) for piece in documents) == sorted(texts)
        (group,) = summary["groups"]
        split_summary = group[split]
        assert split_summary["documents"] == len(texts) and split_summary["bytes"] == sum(
            len(text.encode()) for text in texts
        )
        assert split_summary["tokens"] == sum(len(loaded.encode(text)) + 2 for text in texts)
        assert split_summary["rows"] == len(rows) == split_summary["shard"]["rows"]
        assert split_summary["fill"] == pytest.approx(split_summary["tokens"] / rows.tokens.size)
        assert sum(split_summary["lengths"]) == len(texts)
        assert set(rows.sources.tolist()) == {1}
    assert json.loads(json.dumps(summary)) == summary


def test_token_counts_are_those_of_the_training_split(job: pack_job.PackJob, tmp_path: Path) -> None:
    pack_job.run_pack_job(job)
    loaded = tokenizer_io.load(job.tokenizer, "tokenizers")
    expected: Counter[int | None] = Counter()
    for n, text in enumerate(TEXTS):
        if not is_held_out(f"text:{n}", 0.1):
            expected.update([loaded.special.bos, *loaded.encode(text), loaded.special.eos])
    counts = np.load(tmp_path / "packed" / "00003.counts.npy").tolist()
    assert counts == [expected[token] for token in range(loaded.vocab_size)]


@pytest.mark.parametrize("copy_each_from", [0, 200])
def test_documents_get_only_bos_and_eos_added(copy_each_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_buffer, "COPY_EACH_FROM", copy_each_from)
    ragged = Ragged(np.array([5, 6, 7], np.uint32), np.array([0, 2, 2, 3]))
    for room in (1000, 0):
        for bos, eos in ((1, 2), (None, 2), (1, None), (None, None)):
            buffer = token_buffer.TokenBuffer("uint16", room)
            buffer.add(ragged, bos, eos)
            buffer.add(ragged)
            result = buffer.to_ragged()
            first, last = ([] if token is None else [token] for token in (bos, eos))
            expected = [[*first, *ids, *last] for ids in ([5, 6], [], [7])] + [[5, 6], [], [7]]
            assert [ids.tolist() for ids in np.split(result.values, result.offsets[1:-1])] == expected
            assert result.values.dtype == np.uint16 and result.loss_mask is None
    buffer.add(replace(ragged, loss_mask=np.array([True, False, True])), 1, None)
    with pytest.raises(AssertionError):
        buffer.add(replace(ragged, values=np.array([5, 6, 1 << 16], np.uint32)))


def test_lengths_are_counted_by_powers_of_two() -> None:
    lengths = np.array([1, 2, 3, 4, 7, 8, 1023, 1024])
    plan = plan_rows(lengths, 4096, "document", 0)
    counts = pack_job.summarize_split(plan, lengths, lengths, length=4096, shard=None)["lengths"]
    assert counts == [1, 2, 2, 1, 0, 0, 0, 0, 0, 1, 1]


def test_rows_can_be_held_out_instead_of_documents(job: pack_job.PackJob, tmp_path: Path) -> None:
    (summary,) = pack_job.run_pack_job(replace(job, held_out="rows"))["groups"]
    without_eval = replace(job, held_out="rows", number=4, pack=Section(eval_fraction=0.0))
    (undivided,) = pack_job.run_pack_job(without_eval)["groups"]
    assert undivided["evaluation"]["shard"] is None
    assert not (tmp_path / "packed" / "00004-0-evaluation.npy").exists()
    for key in ("documents", "tokens"):
        assert summary["train"][key] + summary["evaluation"][key] == undivided["train"][key]
    assert abs(summary["train"]["bytes"] + summary["evaluation"]["bytes"] - undivided["train"]["bytes"]) <= 1
    assert undivided["train"]["documents"] == len(TEXTS)
    rows = summary["train"]["rows"] + summary["evaluation"]["rows"]
    assert abs(summary["evaluation"]["rows"] - 0.1 * rows) < 1


def test_a_document_divided_between_splits_counts_in_each_by_its_tokens() -> None:
    plan = PackPlan(
        document=np.array([0, 0, 1]),
        begin=np.array([0, 30, 0]),
        size=np.array([30, 10, 24]),
        row=np.array([0, 1, 1]),
        column=np.array([0, 0, 10]),
        rows=2,
    )
    doc_lengths, doc_bytes = np.array([40, 24]), np.array([400, 60])
    for row, tokens, expected in ((0, 30, 300), (1, 34, 160)):
        rows = plan.select_rows(np.arange(2) == row)
        summary = pack_job.summarize_split(rows, doc_lengths, doc_bytes, length=34, shard=None)
        assert (summary["tokens"], summary["bytes"]) == (tokens, expected)


def test_a_repeated_pack_job_writes_the_same_bytes(job: pack_job.PackJob, tmp_path: Path) -> None:
    def bytes_after(job: pack_job.PackJob) -> dict[str, bytes]:
        pack_job.run_pack_job(job)
        return {file.name: file.read_bytes() for file in sorted((tmp_path / "packed").iterdir())}

    first = bytes_after(job)
    assert first == bytes_after(job)
    assert first != bytes_after(replace(job, seed=1))


def test_conversations_are_packed_with_loss_bits_among_texts(
    job: pack_job.PackJob, tmp_path: Path, tokenizer: Path
) -> None:
    folder = tmp_path / "chat"
    folder.mkdir()
    tokenizer_io.copy(tokenizer, folder)
    tokenizer_io.write_chat_template(folder, CHAT)
    conversations = [
        json.dumps([{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"{n}!"}])
        for n in range(9)
    ]
    part = write_documents(
        tmp_path,
        7,
        id=[f"chat:{n}" for n in range(10)],
        text=[*[None] * 9, "plain"],
        messages=[*conversations, None],
        source=["here"] * 10,
    )
    cfg = Section(mode="document", eval_fraction=0.0)
    pack_job.run_pack_job(replace(job, source_parts=(part,), tokenizer=str(folder), pack=cfg))
    rows = read_rows(tmp_path / "packed", "00003-0-train")
    loaded = tokenizer_io.load(folder, "tokenizers")
    assert rows.loss_bits is not None and len(rows) == 10
    is_trained = unpack_bits(rows.loss_bits, 48)
    texts = [loaded.decode(tokens[mask]) for tokens, mask in zip(rows.tokens, is_trained, strict=True)]
    assert sorted(texts) == sorted([*(f"{n}!\n" for n in range(9)), "plain"])
    assert not (is_trained & (rows.tokens == loaded.special.filler)).any()


@pytest.fixture
def source(tmp_path: Path, tokenizer: Path) -> Any:
    """A recipe for a file of JSON lines with one invalid line."""
    lines = [json.dumps({"text": text}) for text in TEXTS]
    lines[7] = "{bad"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "data.yaml").write_text(
        f"path: {tmp_path}/data\non_error: skip\nsources: {{a: {{path: {tmp_path}/a.jsonl}}}}\n"
        f"tokenizer: {{use: file, path: {tokenizer}}}\nnormalize: {{min_chars: 12}}\n"
    )
    return recipe.load_data(tmp_path / "data.yaml")


def test_documents_from_the_source_are_packed_like_normalized_files(
    job: pack_job.PackJob, source: Any, tmp_path: Path
) -> None:
    parts = tuple(normalize.list_source_parts(source))
    job = replace(job, source_parts=parts, normalize=source.normalize, on_error="skip")
    (part,) = parts
    part_summary = normalize.normalize_part(part, source.normalize, "skip", tmp_path / "normalized")
    from_files = pack_job.run_pack_job(job)
    names = sorted(file.name for file in (tmp_path / "packed").iterdir())
    written = {name: (tmp_path / "packed" / name).read_bytes() for name in names}
    direct = pack_job.run_pack_job(replace(job, is_normalized=False))
    assert written == {name: (tmp_path / "packed" / name).read_bytes() for name in names}
    assert direct["groups"] == from_files["groups"]
    assert from_files["parts"] == [] and not from_files["problems"]["counts"]
    assert direct["problems"] == part_summary.pop("problems") and direct["problems"]["counts"]
    assert direct["parts"] == [part_summary] and part_summary["dropped"]


def test_documents_above_the_memory_limit_are_packed_in_several_groups(
    job: pack_job.PackJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    single = pack_job.run_pack_job(job)
    counts = np.load(tmp_path / "packed" / "00003.counts.npy")
    monkeypatch.setattr(pack_job, "MAX_GROUP_BYTES", 20_000)
    monkeypatch.setattr(pack_job, "ENCODE_BYTES", 1_000)
    several = pack_job.run_pack_job(job)
    assert 2 < len(several["groups"]) < 10
    assert (counts == np.load(tmp_path / "packed" / "00003.counts.npy")).all()
    for key in ("documents", "tokens", "bytes"):
        sums = [
            sum(group[split][key] for group in summary["groups"] for split in pack_job.SPLITS)
            for summary in (single, several)
        ]
        assert sums[0] == sums[1]
    for number, group in enumerate(several["groups"]):
        shard = group["train"]["shard"]
        assert shard["name"] == f"00003-{number}-train"
        assert len(read_rows(tmp_path / "packed", shard["name"])) == shard["rows"] == group["train"]["rows"]
