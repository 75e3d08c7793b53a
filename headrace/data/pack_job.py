"""The third stage: documents of some parts of a source, tokenised and packed together. They come from
normalised files, or straight from the source where nobody else needs them."""

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.data import annotations, pause_tokens as pauses, shards
from headrace.data.chat import encode as chat
from headrace.data.clean import normalize as normalise
from headrace.data.tokenizer import tokenizer as tokenise
from headrace.data.annotations import LABEL, PAIR, TAGS, Notes
from headrace.data.documents import Problems, Ragged, is_held_out
from headrace.data.formats import PART
from headrace.data.labelled import encode_labelled, encode_tagged
from headrace.data.pack import Plan, fill, plan
from headrace.data.preference import encode_pairs
from headrace.data.shards import LIMITS, Rows, Shard, write_blocks
from headrace.errors import UserError

SPLITS = ("train", "evaluation")
FILLS = 20  # steps in which the fill of rows is counted
LONG = 200  # tokens a document, in the mean, from which copying one by one is faster than all by a mask
BATCH = 4 << 20  # bytes of text encoded at once: a tenth faster than 16 MB, which no cache holds
LARGEST = 256 << 20  # bytes of text packed together: more takes memory and fills rows no better


@dataclass(frozen=True)
class Job:
    """What one worker packs at a time."""

    number: int
    units: tuple[normalise.Unit, ...]  # of one source
    written: bool  # whether their documents lie in normalized/
    source: int
    folder: str  # of the data; packed/ lies in it
    tokenizer: str
    encoder: str
    normalize: Any  # the section of the recipe
    pack: Any  # the section of the recipe: mode, sequence_length, evaluation
    dtype: str
    seed: int
    held_out: Literal["documents", "rows"] = "documents"
    errors: Literal["stop", "skip"] = "stop"  # what bad input does, and conversations the template refuses


@dataclass(frozen=True)
class Documents:
    """Tokenised documents; `bytes` of the text or of the JSON of the messages of each."""

    ragged: Ragged
    bytes: np.ndarray
    held_out: np.ndarray
    whole: bool = False  # whether none is to be divided


def pack_group(job: Job) -> dict[str, Any]:
    """Tokenises, packs and writes packed/NUMBER-GROUP-train and -evaluation, those that have rows, and how
    often each id stands in the first, packed/NUMBER.counts.npy. There is one group unless the parts are long.
    What it returns can be kept as JSON."""
    tokenizer = load(job.tokenizer, job.encoder, tokenise.sha256(job.tokenizer))
    folder = Path(job.folder) / "packed"
    folder.mkdir(parents=True, exist_ok=True)
    problems, parts, notes = Problems(job.errors), list[dict[str, Any]](), Notes()
    counts = np.zeros(tokenizer.vocab, np.int64)
    groups = [
        write_group(job, number, documents=documents, tokenizer=tokenizer, counts=counts, notes=notes)
        for number, documents in enumerate(
            encode(job, tokenizer, problems=problems, parts=parts, notes=notes)
        )
    ]
    with shards.atomic(folder / f"{job.number:05d}.counts.npy") as file:
        np.save(file, counts)
    totals = {
        key: sum(group[split][key] for group in groups for split in SPLITS) for key in ("bytes", "tokens")
    }
    told = {"problems": problems.summary(), "notes": notes.summary()}
    return totals | told | {"parts": parts, "groups": groups}


def write_group(
    job: Job,
    number: int,
    *,
    documents: Documents,
    tokenizer: tokenise.Tokenizer,
    counts: np.ndarray,
    notes: Notes,
) -> dict[str, Any]:
    """Adds to `counts` how often each id stands in the training rows."""
    length, filler = job.pack.sequence_length, tokenizer.special.filler
    lengths, summary = documents.ragged.lengths, dict[str, Any](source=job.source, labels=list(notes.names))
    for name, part in plan_splits(job, number, documents).items():
        shard, labels = None, np.zeros(1 + len(notes.names), np.int64)
        if part.rows:
            blocks = fill(part, documents.ragged, length=length, filler=filler, source=job.source)
            if name == "train":
                blocks = counted(blocks, counts)
            blocks = labels_counted(blocks, labels)
            where = f"{job.number:05d}-{number}-{name}"
            shard = write_blocks(Path(job.folder) / "packed", where, blocks, part.rows)
            if name == "train":
                counts[filler] -= part.rows * length - int(part.size.sum())
        summary[name] = summarise(part, lengths, documents.bytes, length=length, shard=shard)
        summary[name]["labels"] = labels[1:].tolist()
    return summary


def encode(
    job: Job, tokenizer: tokenise.Tokenizer, *, problems: Problems, parts: list[dict[str, Any]], notes: Notes
) -> Iterator[Documents]:
    """Documents of LARGEST bytes at a time, in the order of the source. Adds to `parts` what there is to tell
    of those that were read from it."""
    share = job.pack.evaluation if job.held_out == "documents" else 0.0
    growing = Growing(job.dtype, len(job.units) * PART)
    random = np.random.Generator(np.random.PCG64([job.seed, job.number]))
    pause = pauses.token_of(tokenizer, "pack.pause") if job.pack.pause else 0
    sizes, held_out = [np.zeros(0, np.int64)], [np.zeros(0, bool)]
    for table, last in portions(tables(job, problems, parts)):
        for ragged, bos, eos in encoded(table, tokenizer, problems, notes, job.pack.sequence_length):
            if job.pack.pause and notes.whole:
                raise UserError("pack.pause: labelled texts and pairs of answers take no pauses; set it to 0")
            if job.pack.pause:
                ragged = pauses.with_pauses(ragged, pause, job.pack.pause, random)
            growing.add(ragged, bos, eos)
        sizes.append(normalise.sizes(table))
        ids = table["id"].to_pylist() if share > 0 else [""] * len(table)
        held_out.append(np.array([share > 0 and is_held_out(id, share) for id in ids], bool))
        if last:
            yield Documents(growing.ragged(), np.concatenate(sizes), np.concatenate(held_out), notes.whole)
            growing.clear()
            sizes, held_out = sizes[:1], held_out[:1]
    if len(sizes) > 1:
        yield Documents(growing.ragged(), np.concatenate(sizes), np.concatenate(held_out), notes.whole)


def encoded(
    table: pa.Table, tokenizer: tokenise.Tokenizer, problems: Problems, notes: Notes, length: int
) -> Iterator[tuple[Ragged, int | None, int | None]]:
    """The documents of a table, some at a time, with what each begins and ends with."""
    ends = tokenizer.special.bos, tokenizer.special.eos
    if not table["text"].null_count:
        notes.kinds.add("text")
        annotations.check(notes.kinds)
        for some in batches(normalise.in_one(table["text"])):
            yield tokenizer.encode_batch(some), *ends
        return
    kinds = annotations.kinds_of(table)
    notes.kinds |= set(kinds)
    annotations.check(notes.kinds)
    done = {
        kind: encode_kind(kind, table.filter(pa.array(kinds == kind)), tokenizer, problems, notes, length)
        for kind in sorted(set(kinds))
    }
    taken = dict.fromkeys(done, 0)
    starts = np.flatnonzero(
        np.concatenate([[True], kinds[1:] != kinds[:-1]])
    )  # where one kind follows another
    for start, stop in zip(starts, [*starts[1:], len(table)], strict=True):
        kind = kinds[start]
        first, last = taken[kind], taken[kind] + stop - start
        taken[kind] = last
        yield done[kind].take(first, last), *(ends if kind == "text" else (None, None))


def encode_kind(
    kind: str, table: pa.Table, tokenizer: tokenise.Tokenizer, problems: Problems, notes: Notes, length: int
) -> Ragged:
    """Documents of one kind; all but texts have what they begin and end with."""
    if kind == "text":
        return tokenizer.encode_batch(normalise.in_one(table["text"]))
    said, ids = table["messages"].to_pylist(), table["id"].to_pylist()
    if kind == LABEL:
        return encode_labelled(tokenizer, said, length, notes)
    if kind == TAGS:
        return encode_tagged(tokenizer, said, length, notes)
    if kind == PAIR:
        return encode_pairs(tokenizer, said, length, notes=notes, problems=problems, ids=ids)
    return chat.encode_chats(tokenizer, said, problems=problems, ids=ids)


def portions(tables: Iterator[pa.Table]) -> Iterator[tuple[pa.Table, bool]]:
    """The same documents, cut where LARGEST bytes are full, wherever tables end; and whether they are."""
    total = 0
    for table in tables:
        ends = total + np.cumsum(normalise.sizes(table))
        while len(ends) and ends[-1] >= LARGEST:
            full = int(np.searchsorted(ends, LARGEST)) + 1
            yield table.slice(0, full), True
            table, ends = table.slice(full), ends[full:] - ends[full - 1]
        if len(table):
            yield table, False
        total = int(ends[-1]) if len(ends) else 0


def tables(job: Job, problems: Problems, parts: list[dict[str, Any]]) -> Iterator[pa.Table]:
    for unit in job.units:
        if job.written:
            with pq.ParquetFile(normalise.place(Path(job.folder) / "normalized", unit.number)) as file:
                for group in range(file.num_row_groups):
                    yield file.read_row_group(group, columns=["id", "text", "messages"])
        else:
            reading = normalise.Reading(unit, job.normalize, problems)
            yield from reading.tables()
            parts.append(reading.summary())


def batches(texts: pa.LargeStringArray) -> Iterator[pa.LargeStringArray]:
    """Stretches of about BATCH bytes."""
    ends = np.cumsum(pc.binary_length(texts).to_numpy(zero_copy_only=False))
    cuts = np.searchsorted(ends, np.arange(BATCH, ends[-1], BATCH))
    for begin, end in zip([0, *cuts], [*cuts, len(texts)], strict=True):
        if end > begin:
            yield texts.slice(begin, end - begin)


class Growing:
    """Documents one after the other in one stretch of memory, in the type they are stored in. Memory that is
    not used is not taken."""

    def __init__(self, dtype: str, room: int) -> None:
        self.values = np.empty(room, dtype)
        self.clear()

    def clear(self) -> None:
        self.used = 0
        self.losses: list[np.ndarray] = []
        self.masked = False  # whether anything is not to be learnt
        self.labels: list[np.ndarray] = []
        self.seconds: list[np.ndarray] = []
        self.lengths = [np.zeros(1, np.int64)]

    def add(self, ragged: Ragged, bos: int | None = None, eos: int | None = None) -> None:
        """Each between `bos` and `eos`, or as many of the two as there are."""
        extra = (bos is not None) + (eos is not None)
        offsets = ragged.offsets + extra * np.arange(len(ragged.offsets))
        begin, end = self.used, self.used + int(offsets[-1])
        if end > len(self.values):
            self.values = np.concatenate([self.values[:begin], np.empty(end, self.values.dtype)])
        assert not len(ragged.values) or int(ragged.values.max()) < LIMITS[str(self.values.dtype)]
        values, is_text = self.values[begin:end], np.ones(end - begin, bool)
        for token, places in ((bos, offsets[:-1]), (eos, offsets[1:] - 1)):
            if token is not None:
                values[places] = token
                is_text[places] = False
        if len(ragged.values) < LONG * len(ragged):
            values[is_text] = ragged.values
        else:
            places = (offsets[:-1] + (bos is not None)).tolist()
            ends = ragged.offsets.tolist()
            for place, first, last in zip(places, ends[:-1], ends[1:], strict=True):
                values[place : place + last - first] = ragged.values[first:last]
        whole = np.broadcast_to(True, end - begin)
        self.losses.append(whole if ragged.loss is None else learnt(ragged.loss, is_text))
        self.masked = self.masked or ragged.loss is not None
        self.lengths.append(np.diff(offsets))
        self.note(ragged, is_text)
        self.used = end

    def note(self, ragged: Ragged, is_text: np.ndarray) -> None:
        """Labels and second texts of documents, and zeros for those before them that have none."""
        if ragged.labels is not None or self.labels:
            labels = np.zeros(len(is_text), np.uint16)
            labels[is_text] = 0 if ragged.labels is None else ragged.labels
            self.labels += [labels] if self.labels else [np.zeros(self.used, np.uint16), labels]
        if ragged.seconds is not None:  # a set of pairs has no other documents
            self.seconds.append(ragged.seconds)

    def ragged(self) -> Ragged:
        loss = np.concatenate(self.losses) if self.masked else None
        labels = np.concatenate(self.labels) if self.labels else None
        seconds = np.concatenate(self.seconds) if self.seconds else None
        offsets = np.cumsum(np.concatenate(self.lengths))
        return Ragged(self.values[: self.used], offsets, loss, labels, seconds)


def learnt(loss: np.ndarray, is_text: np.ndarray) -> np.ndarray:
    """Which tokens are to be learnt, those among them that begin and end a document."""
    out = np.ones(len(is_text), bool)
    out[is_text] = loss
    return out


def plan_splits(job: Job, number: int, documents: Documents) -> dict[str, Plan]:
    """A plan for each split: of the documents that are in it or, with held_out="rows", of rows drawn from
    all, for data of few and long documents."""
    length, mode, lengths = job.pack.sequence_length, job.pack.mode, documents.ragged.lengths
    held_out, how = documents.held_out, dict(whole=documents.whole)
    seeds = np.random.SeedSequence([job.seed, job.number, number]).generate_state(3, np.uint64).tolist()
    if job.held_out == "rows":
        whole = plan(lengths, length, mode, seeds[0], **how)
        random = np.random.Generator(np.random.PCG64(seeds[2]))
        # Rounded up or down at random: groups of few rows must not all come to none.
        size = int(job.pack.evaluation * whole.rows + random.random())
        chosen = np.zeros(whole.rows, bool)
        chosen[random.permutation(whole.rows)[:size]] = True
        return {"train": whole.take(~chosen), "evaluation": whole.take(chosen)}
    plans = {}
    for name, seed, members in zip(SPLITS, seeds, (~held_out, held_out), strict=False):
        chosen = np.flatnonzero(members)
        part = plan(lengths[chosen], length, mode, seed, **how)
        plans[name] = dataclasses.replace(part, document=chosen[part.document])
    return plans


def summarise(
    plan: Plan, lengths: np.ndarray, sizes: np.ndarray, *, length: int, shard: Shard | None
) -> dict[str, Any]:
    """`documents`, their `bytes` and `lengths` are of those that begin in the rows of the plan. lengths[i]
    counts documents of 2**i tokens and more, up to twice that."""
    begun = plan.document[plan.begin == 0]
    tokens = int(plan.size.sum())
    return {
        "documents": len(begun),
        "tokens": tokens,
        "bytes": int(sizes[begun].sum()),
        "rows": plan.rows,
        "fill": tokens / (plan.rows * length) if plan.rows else 0.0,
        "fills": np.histogram(np.bincount(plan.row, plan.size, plan.rows) / length, FILLS, (0, 1))[
            0
        ].tolist(),
        "lengths": np.bincount(np.frexp(lengths[begun])[1] - 1).tolist(),
        "shard": None if shard is None else dataclasses.asdict(shard),
    }


def counted(blocks: Iterator[Rows], counts: np.ndarray) -> Iterator[Rows]:
    """The same blocks; adds to `counts` how often each id occurs in them."""
    step = 1 << 18  # bincount widens to 64 bits: 10 times faster while that stays in the cache
    for block in blocks:
        flat = block.tokens.reshape(-1)
        for i in range(0, len(flat), step):
            counts += np.bincount(flat[i : i + step], minlength=len(counts))
        yield block


def labels_counted(blocks: Iterator[Rows], counts: np.ndarray) -> Iterator[Rows]:
    """The same blocks; adds to `counts` how often each number stands in their labels."""
    for block in blocks:
        if block.labels is not None:
            counts += np.bincount(block.labels.reshape(-1), minlength=len(counts))
        yield block


@functools.lru_cache(maxsize=1)
def load(folder: str, encoder: str, sha256: str) -> tokenise.Tokenizer:
    """Once for each process; the checksum makes it anew where the same folder holds another tokenizer."""
    return tokenise.load(folder, encoder)
