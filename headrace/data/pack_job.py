"""Third stage of data preparation: tokenize and pack some documents of one source.

They are read from normalized files, or directly from the source where no other stage needs such files."""

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.config.sections import NormalizeKeys, PackKeys
from headrace.data import annotations, pause_tokens, shards
from headrace.data.annotations import LABEL, PAIR, TAGS, AnnotationStats
from headrace.data.batch_order import SplitName
from headrace.data.chat import encode as chat_encode
from headrace.data.clean import normalize as clean_normalize
from headrace.data.documents import Problems, Ragged, is_held_out
from headrace.data.formats import PART_BYTES
from headrace.data.labeled import encode_labeled_texts, encode_tagged_words
from headrace.data.pack import PackPlan, fill_rows, plan_rows
from headrace.data.preference import encode_pairs
from headrace.data.shards import Rows, Shard, write_shard
from headrace.data.token_buffer import TokenBuffer
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.data.tokenizer.tokenizer import Tokenizer
from headrace.errors import UserError

SPLITS: tuple[SplitName, SplitName] = ("train", "evaluation")
FILL_BINS = 20  # of the histogram of how full rows are
ENCODE_BYTES = 4 << 20  # bytes of text encoded at once: a tenth faster than 16 MB, which no cache holds
MAX_GROUP_BYTES = 256 << 20  # bytes of text packed together: more takes memory and fills rows no better


@dataclass(frozen=True)
class PackJob:
    """The work of one worker at a time."""

    number: int
    source_parts: tuple[clean_normalize.SourcePart, ...]  # of one source
    is_normalized: bool  # documents are in FOLDER/normalized; otherwise they are read from the source
    source: int  # number of the source
    folder: str  # of the data; packed rows are written to FOLDER/packed
    tokenizer: str  # its folder
    encoder: str
    normalize: NormalizeKeys
    pack: PackKeys
    dtype: str
    seed: int
    held_out: Literal["documents", "rows"] = "documents"
    on_error: Literal["stop", "skip"] = "stop"  # for bad input, and conversations that the template refuses


class SplitSummary(TypedDict):
    """Sizes of one split of a group, as in packed/NUMBER.json.

    `documents` and `lengths` are of the documents that begin in its rows."""

    documents: int
    tokens: int
    bytes: int  # of text
    rows: int
    fill: float  # share of the rows that is not padding
    fills: list[int]  # histogram of this share over the rows, from 0 to 1
    lengths: list[int]  # lengths[i] counts documents of 2**i to 2**(i + 1) - 1 tokens
    shard: dict[str, Any] | None  # the fields of a Shard; None for a split without rows
    labels: list[int]  # texts or tokens with each label of the group


class GroupSummary(TypedDict):
    """Documents that were packed together, as in packed/NUMBER.json."""

    source: int
    labels: list[str]  # names
    train: SplitSummary
    evaluation: SplitSummary


class PackResult(TypedDict):
    """The content of packed/NUMBER.json: the result of a PackJob."""

    bytes: int
    tokens: int
    problems: dict[str, Any]  # Problems.summary()
    notes: dict[str, Any]  # AnnotationStats.summary()
    parts: list[dict[str, Any]]  # PartReader.summary() of each part that was read from the source
    groups: list[GroupSummary]


@dataclass(frozen=True)
class Documents:
    """Tokenized documents that are packed together."""

    ragged: Ragged
    bytes: np.ndarray  # [documents] size of each document's text, or of its messages in JSON
    held_out: np.ndarray  # [documents] bool; in the evaluation split
    keep_whole: bool = False  # none may be cut


def run_pack_job(job: PackJob) -> PackResult:
    """Tokenize, pack and write the documents of a job.

    Writes the shards packed/NUMBER-GROUP-train and -evaluation, if they have rows, and
    packed/NUMBER.counts.npy, how often each token id occurs in the training rows. There is one group unless
    the parts are long."""
    tokenizer = load_tokenizer(job.tokenizer, job.encoder, tokenizer_io.file_sha256(job.tokenizer))
    folder = Path(job.folder) / "packed"
    folder.mkdir(parents=True, exist_ok=True)
    reader = DocumentReader(job, tokenizer)
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    groups = [
        write_group(job, number, documents, tokenizer, reader.stats, counts)
        for number, documents in enumerate(reader.read_groups())
    ]
    with shards.open_atomic(folder / f"{job.number:05d}.counts.npy") as file:
        np.save(file, counts)
    return {
        "bytes": sum(group[split]["bytes"] for group in groups for split in SPLITS),
        "tokens": sum(group[split]["tokens"] for group in groups for split in SPLITS),
        "problems": reader.problems.to_json(),
        "notes": reader.stats.to_json(),
        "parts": reader.part_summaries,
        "groups": groups,
    }


def write_group(
    job: PackJob,
    group: int,
    documents: Documents,
    tokenizer: Tokenizer,
    stats: AnnotationStats,
    counts: np.ndarray,
) -> GroupSummary:
    """Pack and write documents. Adds to `counts` how often each id occurs in the training rows."""
    length, filler = job.pack.sequence_length, tokenizer.special.filler
    names = list(stats.names)
    summaries: dict[SplitName, SplitSummary] = {}
    for split, plan in plan_splits(job, group, documents).items():
        shard, label_counts = None, np.zeros(1 + len(names), np.int64)
        if plan.rows:
            blocks = fill_rows(plan, documents.ragged, length=length, filler=filler, source=job.source)
            if split == "train":
                blocks = count_tokens(blocks, counts)
            blocks = count_labels(blocks, label_counts)
            name = f"{job.number:05d}-{group}-{split}"
            shard = write_shard(Path(job.folder) / "packed", name, blocks, plan.rows)
            if split == "train":
                counts[filler] -= plan.rows * length - int(plan.size.sum())  # padding is not text
        summaries[split] = summarize_split(
            plan, documents.ragged.lengths, documents.bytes, length=length, shard=shard
        )
        summaries[split]["labels"] = label_counts[1:].tolist()
    return {"source": job.source, "labels": names, **summaries}  # type: ignore[typeddict-item]


class DocumentReader:
    """Reads and tokenizes the documents of a job, and counts what is noteworthy about them."""

    def __init__(self, job: PackJob, tokenizer: Tokenizer) -> None:
        self.job, self.tokenizer = job, tokenizer
        self.problems = Problems(job.on_error)
        self.stats = AnnotationStats()
        self.part_summaries: list[dict[str, Any]] = []  # of the parts that were read from the source

    def read_groups(self) -> Iterator[Documents]:
        """Yield documents in groups of about MAX_GROUP_BYTES, in the order of the source.

        The token ids of a group are valid until the next one is requested."""
        pack = self.job.pack
        buffer = TokenBuffer(self.job.dtype, len(self.job.source_parts) * PART_BYTES)
        random = np.random.Generator(np.random.PCG64([self.job.seed, self.job.number]))
        pause_token = (
            pause_tokens.find_pause_id(self.tokenizer, "pack.pause_tokens") if pack.pause_tokens else 0
        )
        sizes, held_out = [np.zeros(0, np.int64)], [np.zeros(0, bool)]
        for table, is_group_end in slice_by_bytes(self._read_tables()):
            for ragged, bos, eos in self._encode_table(table):
                if pack.pause_tokens and self.stats.is_indivisible:
                    raise UserError(
                        "pack.pause_tokens: labelled texts and pairs of answers take no pauses; set it to 0"
                    )
                if pack.pause_tokens:
                    ragged = pause_tokens.insert_pauses(ragged, pause_token, pack.pause_tokens, random)
                buffer.add(ragged, bos, eos)
            sizes.append(clean_normalize.document_bytes(table))
            held_out.append(self._find_held_out(table))
            if is_group_end:
                yield self._to_documents(buffer, sizes, held_out)
                buffer.clear()
                sizes, held_out = sizes[:1], held_out[:1]
        if len(sizes) > 1:
            yield self._to_documents(buffer, sizes, held_out)

    def _to_documents(
        self, buffer: TokenBuffer, sizes: list[np.ndarray], held_out: list[np.ndarray]
    ) -> Documents:
        return Documents(
            buffer.to_ragged(), np.concatenate(sizes), np.concatenate(held_out), self.stats.is_indivisible
        )

    def _find_held_out(self, table: pa.Table) -> np.ndarray:
        """Decide which documents of a table belong to the evaluation split, [documents] bool."""
        share = self.job.pack.eval_fraction if self.job.held_out == "documents" else 0.0
        if share <= 0:
            return np.zeros(len(table), bool)
        return np.array([is_held_out(id, share) for id in table["id"].to_pylist()], bool)

    def _read_tables(self) -> Iterator[pa.Table]:
        for part in self.job.source_parts:
            if self.job.is_normalized:
                path = clean_normalize.part_path(Path(self.job.folder) / "normalized", part.number)
                with pq.ParquetFile(path) as file:
                    for group in range(file.num_row_groups):
                        yield file.read_row_group(group, columns=["id", "text", "messages"])
            else:
                reader = clean_normalize.PartReader(part, self.job.normalize, self.problems)
                yield from reader.iter_tables()
                self.part_summaries.append(reader.to_json())

    def _encode_table(self, table: pa.Table) -> Iterator[tuple[Ragged, int | None, int | None]]:
        """Yield the documents of a table in blocks, with the tokens to put before and after each of them."""
        special = self.tokenizer.special
        if not table["text"].null_count:
            self.stats.kinds.add("text")
            annotations.check_one_task(self.stats.kinds)
            for texts in slice_texts(clean_normalize.combine_chunks(table["text"])):
                yield self.tokenizer.encode_batch(texts), special.bos, special.eos
            return
        kinds = annotations.detect_kinds(table)
        self.stats.kinds |= set(kinds)
        annotations.check_one_task(self.stats.kinds)
        encoded = {
            kind: self._encode_kind(kind, table.filter(pa.array(kinds == kind)))
            for kind in sorted(set(kinds))
        }
        used = dict.fromkeys(encoded, 0)  # documents of each kind that were yielded
        is_change = np.concatenate([[True], kinds[1:] != kinds[:-1]])
        starts = np.flatnonzero(is_change)
        for start, stop in zip(starts, [*starts[1:], len(table)], strict=True):
            kind = kinds[start]
            first, last = used[kind], used[kind] + stop - start
            used[kind] = last
            bos, eos = (special.bos, special.eos) if kind == "text" else (None, None)
            yield encoded[kind].slice(first, last), bos, eos

    def _encode_kind(self, kind: str, table: pa.Table) -> Ragged:
        """Tokenize documents of one kind. All kinds but texts include the tokens before and after them."""
        tokenizer, length, stats = self.tokenizer, self.job.pack.sequence_length, self.stats
        if kind == "text":
            return tokenizer.encode_batch(clean_normalize.combine_chunks(table["text"]))
        messages, ids = table["messages"].to_pylist(), table["id"].to_pylist()
        if kind == LABEL:
            return encode_labeled_texts(tokenizer, messages, length, stats)
        if kind == TAGS:
            return encode_tagged_words(tokenizer, messages, length, stats)
        if kind == PAIR:
            return encode_pairs(tokenizer, messages, length, stats=stats, problems=self.problems, ids=ids)
        return chat_encode.encode_chats(tokenizer, messages, problems=self.problems, ids=ids)


def slice_by_bytes(tables: Iterator[pa.Table]) -> Iterator[tuple[pa.Table, bool]]:
    """Cut tables where MAX_GROUP_BYTES are full. Yields tables, and whether a group ends with each.

    The cuts depend on the documents alone, not on where the input tables end."""
    total = 0
    for table in tables:
        ends = total + np.cumsum(clean_normalize.document_bytes(table))
        while len(ends) and ends[-1] >= MAX_GROUP_BYTES:
            full = int(np.searchsorted(ends, MAX_GROUP_BYTES)) + 1
            yield table.slice(0, full), True
            table, ends = table.slice(full), ends[full:] - ends[full - 1]
        if len(table):
            yield table, False
        total = int(ends[-1]) if len(ends) else 0


def slice_texts(texts: pa.LargeStringArray) -> Iterator[pa.LargeStringArray]:
    """Cut an array of texts into slices of about ENCODE_BYTES."""
    ends = np.cumsum(pc.binary_length(texts).to_numpy(zero_copy_only=False))
    cuts = np.searchsorted(ends, np.arange(ENCODE_BYTES, ends[-1], ENCODE_BYTES))
    for begin, end in zip([0, *cuts], [*cuts, len(texts)], strict=True):
        if end > begin:
            yield texts.slice(begin, end - begin)


def plan_splits(job: PackJob, group: int, documents: Documents) -> dict[SplitName, PackPlan]:
    """Plan the rows of each split.

    The documents of a split are packed together. With `held_out="rows"`, for data of few and long documents,
    all are packed together, and random rows are the evaluation split."""
    length, mode, doc_lengths = job.pack.sequence_length, job.pack.mode, documents.ragged.lengths
    plan = functools.partial(plan_rows, keep_whole=documents.keep_whole)
    seeds = np.random.SeedSequence([job.seed, job.number, group]).generate_state(3, np.uint64).tolist()
    if job.held_out == "rows":
        all_rows = plan(doc_lengths, length, mode, seeds[0])
        random = np.random.Generator(np.random.PCG64(seeds[2]))
        # Rounded up or down at random: otherwise groups of few rows would hold out none at all.
        size = int(job.pack.eval_fraction * all_rows.rows + random.random())
        is_evaluation = np.zeros(all_rows.rows, bool)
        is_evaluation[random.permutation(all_rows.rows)[:size]] = True
        return {
            "train": all_rows.select_rows(~is_evaluation),
            "evaluation": all_rows.select_rows(is_evaluation),
        }
    plans: dict[SplitName, PackPlan] = {}
    members = {"train": ~documents.held_out, "evaluation": documents.held_out}
    for split, seed in zip(SPLITS, seeds, strict=False):
        doc_indices = np.flatnonzero(members[split])
        split_plan = plan(doc_lengths[doc_indices], length, mode, seed)
        plans[split] = dataclasses.replace(split_plan, document=doc_indices[split_plan.document])
    return plans


def summarize_split(
    plan: PackPlan, doc_lengths: np.ndarray, doc_bytes: np.ndarray, *, length: int, shard: Shard | None
) -> SplitSummary:
    """Compute the sizes of a split from its plan. `labels` is left empty."""
    first_pieces = plan.document[plan.begin == 0]
    tokens = int(plan.size.sum())
    # Of a document that is cut between the splits, each has the bytes of its own tokens, about.
    piece_bytes = doc_bytes[plan.document] * (plan.size / np.maximum(doc_lengths[plan.document], 1))
    row_fills = np.bincount(plan.row, plan.size, plan.rows) / length
    return {
        "documents": len(first_pieces),
        "tokens": tokens,
        "bytes": round(float(piece_bytes.sum())),
        "rows": plan.rows,
        "fill": tokens / (plan.rows * length) if plan.rows else 0.0,
        "fills": np.histogram(row_fills, FILL_BINS, (0, 1))[0].tolist(),
        "lengths": np.bincount(np.frexp(doc_lengths[first_pieces])[1] - 1).tolist(),
        "shard": None if shard is None else dataclasses.asdict(shard),
        "labels": [],
    }


def count_tokens(blocks: Iterator[Rows], counts: np.ndarray) -> Iterator[Rows]:
    """Pass blocks on, and add to `counts` how often each token id occurs in them."""
    step = 1 << 18  # bincount widens to 64 bits: 10 times faster while that stays in the cache
    for block in blocks:
        tokens = block.tokens.reshape(-1)
        for i in range(0, len(tokens), step):
            counts += np.bincount(tokens[i : i + step], minlength=len(counts))
        yield block


def count_labels(blocks: Iterator[Rows], counts: np.ndarray) -> Iterator[Rows]:
    """Pass blocks on, and add to `counts` how often each number occurs in their labels."""
    for block in blocks:
        if block.labels is not None:
            counts += np.bincount(block.labels.reshape(-1), minlength=len(counts))
        yield block


@functools.lru_cache(maxsize=1)
def load_tokenizer(folder: str, encoder: str, sha256: str) -> Tokenizer:
    """Load a tokenizer once per process. `sha256` is its checksum: another one loads the folder again."""
    return tokenizer_io.load(folder, encoder)
