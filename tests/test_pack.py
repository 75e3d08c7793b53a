"""Packing: every token has one place, rows are as full as a plain best-fit-decreasing makes them, and a group
of normalised files comes out as rows that say where documents begin and what is to be learnt."""

import bisect
import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.data import pack, tokenise
from millrace.data.documents import SCHEMA, Ragged, is_held_out
from millrace.data.shards import Rows, read_rows, unpack_bits

MODES = ("concat", "document", "best_fit")
FILLER = 0
BEGIN, END = 1, 2  # of documents made here, whose other tokens are larger


def lengths_of(kind: str, count: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return {
        "log-normal": lambda: np.maximum(2, random.lognormal(3.0, 1.0, count)).astype(np.int64),
        "short": lambda: random.integers(1, 5, count),
        "with empty ones": lambda: random.integers(0, 40, count),
        "long": lambda: random.integers(1, 500, count),
        "full rows": lambda: np.full(count, 32),
        "none": lambda: np.zeros(0, np.int64),
        "one": lambda: np.array([70]),
    }[kind]()


KINDS = ("log-normal", "short", "with empty ones", "long", "full rows", "none", "one")


def documents_of(lengths: np.ndarray) -> Ragged:
    """Documents whose tokens are all different, so that one in the wrong place is seen."""
    return Ragged(
        np.arange(1, 1 + lengths.sum(), dtype=np.uint32),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
    )


def pieces_in(rows: Rows, filler: int) -> list[list[int]]:
    """Pieces as a plain loop reads them: from mark to mark, without a last one that is filler alone."""
    found = []
    for row, marks in zip(
        rows.tokens.tolist(), unpack_bits(rows.starts, rows.tokens.shape[1]).tolist(), strict=True
    ):
        places = [place for place, mark in enumerate(marks) if mark]
        assert places[0] == 0
        pieces = [row[a:b] for a, b in zip(places, [*places[1:], len(row)], strict=True)]
        if all(token == filler for token in pieces[-1]):
            pieces.pop()
        found.extend(pieces)
    return found


def best_fit_decreasing(lengths: np.ndarray, length: int) -> int:
    """The number of rows, by the textbook: one document after the other to the row with least room for it."""
    rows, rooms = int((lengths // length).sum()), list[int]()
    for size in sorted((lengths[lengths % length > 0] % length).tolist(), reverse=True):
        place = bisect.bisect_left(rooms, size)
        if place == len(rooms):
            rows += 1
            room = length
        else:
            room = rooms.pop(place)
        if room > size:
            bisect.insort(rooms, room - size)
    return rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_every_token_has_one_place_and_no_two_share_one(mode: str, kind: str) -> None:
    lengths = lengths_of(kind, 300)
    made = pack.plan(lengths, 32, mode, 1)
    tokens = [
        (document, begin + i)
        for document, begin, size in zip(
            made.document.tolist(), made.begin.tolist(), made.size.tolist(), strict=True
        )
        for i in range(size)
    ]
    assert sorted(tokens) == [
        (document, i) for document, size in enumerate(lengths.tolist()) for i in range(size)
    ]
    places = (made.row * 32 + made.column).tolist()
    assert places == sorted(places)
    followers = [*places, made.rows * 32][1:]
    for place, size, following in zip(places, made.size.tolist(), followers, strict=True):
        assert place + size == following or (place + size < following and following % 32 == 0)
        assert place % 32 + size <= 32
    assert made.rows == len(set(made.row.tolist()))


@pytest.mark.parametrize("kind", KINDS)
def test_joined_documents_leave_room_in_the_last_row_alone(kind: str) -> None:
    lengths = lengths_of(kind, 300)
    assert pack.plan(lengths, 32, "concat", 1).rows == -(-int(lengths.sum()) // 32)


def test_documents_by_themselves_share_no_row() -> None:
    made = pack.plan(np.array([5, 32, 33, 100]), 32, "document", 1)
    assert made.row.tolist() == list(range(8)) and not made.column.any()
    assert made.size.tolist() == [5, 32, 32, 1, 32, 32, 32, 4]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [8, 32, 100, 257])
def test_best_fit_takes_as_many_rows_as_the_textbook(length: int, kind: str) -> None:
    for seed in range(5):
        lengths = lengths_of(kind, 700, seed)
        assert pack.plan(lengths, length, "best_fit", seed).rows == best_fit_decreasing(lengths, length)


def test_best_fit_cuts_only_what_is_longer_than_a_row() -> None:
    lengths = lengths_of("long", 1000)
    made = pack.plan(lengths, 128, "best_fit", 3)
    pieces = np.bincount(made.document, minlength=len(lengths))
    assert (pieces == -(-lengths // 128)).all()


def test_best_fit_puts_long_documents_first_no_more_often_than_last() -> None:
    made = pack.plan(lengths_of("log-normal", 20_000), 128, "best_fit", 3)
    last = np.append(made.row[1:] != made.row[:-1], True)
    several = (made.column == 0) & ~last  # the first of several in a row
    ends = last & (made.column > 0)
    assert made.size[several].mean() == pytest.approx(made.size[ends].mean(), rel=0.05)


@pytest.mark.parametrize("length", [2048, 8192])
def test_best_fit_of_many_documents_is_full(length: int) -> None:
    lengths = np.maximum(2, np.random.default_rng(0).lognormal(5.9, 1.0, 300_000)).astype(np.int64)
    made = pack.plan(lengths, length, "best_fit", 0)
    assert lengths.sum() / (made.rows * length) > 0.9998


@pytest.mark.parametrize("mode", ["concat", "best_fit"])
def test_a_seed_gives_one_plan_and_another_seed_another(mode: str) -> None:
    lengths = lengths_of("log-normal", 500)
    first, again, other = (pack.plan(lengths, 64, mode, seed) for seed in (1, 1, 2))
    assert np.array_equal(first.document, again.document) and np.array_equal(first.column, again.column)
    assert not np.array_equal(first.document, other.document)


def filled(made: pack.Plan, ragged: Ragged, source: int = 0) -> Rows:
    blocks = list(pack.fill(made, ragged, length=33, filler=FILLER, source=source))
    if not blocks:
        return Rows(np.empty((0, 33), np.uint32), np.empty((0, 5), np.uint8), None, np.empty(0, np.uint16))
    arrays = {name: np.concatenate([block.arrays()[name] for block in blocks]) for name in blocks[0].arrays()}
    return Rows(arrays[""], arrays[".starts"], arrays.get(".loss"), arrays[".sources"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_rows_hold_the_pieces_of_the_plan_and_marks_where_they_begin(mode: str, kind: str) -> None:
    ragged = documents_of(lengths_of(kind, 300))
    made = pack.plan(ragged.lengths, 33, mode, 1)  # 33: the bits of a row do not end with a byte
    rows = filled(made, ragged, source=7)
    assert rows.tokens.shape == (made.rows, 33) and rows.starts.shape == (made.rows, 5) and rows.loss is None
    wanted = [
        ragged.values[ragged.offsets[document] + begin :][:size].tolist()
        for document, begin, size in zip(made.document, made.begin, made.size, strict=True)
    ]
    assert pieces_in(rows, FILLER) == wanted
    assert rows.sources.tolist() == [7] * made.rows


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_moves_with_its_tokens_and_padding_has_none(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "BLOCK", 100)  # several blocks, some of them full
    ragged = documents_of(lengths_of("with empty ones", 300))
    ragged = replace(ragged, loss=ragged.values % 3 == 0)
    rows = filled(pack.plan(ragged.lengths, 33, mode, 1), ragged)
    assert rows.loss is not None
    loss = unpack_bits(rows.loss, 33)
    assert np.array_equal(loss, (rows.tokens % 3 == 0) & (rows.tokens != FILLER))


@dataclass(frozen=True)
class Section:
    mode: str = "best_fit"
    sequence_length: int = 48
    evaluation: float = 0.1


TEXTS = [f"Text {n}: " + " ".join(f"{n * i % 23} of {i}" for i in range(n % 37)) + "é" for n in range(400)]
CHAT = """{% for message in messages %}{% if message.role == 'assistant' %}
{% generation %}{{ message.content + '\n' }}{% endgeneration %}
{% else %}{{ message.role + ': ' + message.content + '\n' }}{% endif %}{% endfor %}"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from millrace.data import learn

    folder = tmp_path_factory.mktemp("tokenizer")
    tokenise.save(learn.train(iter(TEXTS), kind="bpe", vocab=400), folder)
    return folder


def write_documents(file: Path, **columns: list) -> str:
    count = len(columns["id"])
    arrays = [pa.array(columns.get(field.name, [None] * count), field.type) for field in SCHEMA]
    pq.write_table(pa.Table.from_arrays(arrays, schema=SCHEMA), file, row_group_size=64)
    return str(file)


@pytest.fixture
def job(tmp_path: Path, tokenizer: Path) -> pack.Job:
    files = tuple(
        write_documents(
            tmp_path / f"{start}.parquet",
            id=[f"text:{n}" for n in range(start, start + 200)],
            text=TEXTS[start : start + 200],
            source=["here"] * 200,
        )
        for start in (0, 200)
    )
    return pack.Job(
        number=3,
        files=files,
        source=1,
        folder=str(tmp_path),
        tokenizer=str(tokenizer),
        encoder="tokenizers",
        pack=Section(),
        dtype="uint16",
        seed=0,
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_group_comes_out_with_every_document_once_in_its_split(
    job: pack.Job, mode: str, tmp_path: Path
) -> None:
    summary = pack.pack_group(replace(job, pack=Section(mode=mode, sequence_length=2048)))
    loaded = tokenise.load(job.tokenizer, "tokenizers")
    for split in ("train", "evaluation"):
        texts = [
            text for n, text in enumerate(TEXTS) if is_held_out(f"text:{n}", 0.1) == (split == "evaluation")
        ]
        rows = read_rows(tmp_path / "packed", f"00003-{split}")
        special = loaded.special
        whole = [special.bos, *loaded.encode("x"), special.eos]
        assert len(whole) > 2
        found = [piece for piece in pieces_in(rows, special.filler) if piece[0] == special.bos]
        if mode != "concat":  # which may cut one at the end of a row
            assert sorted(loaded.decode(piece) for piece in found) == sorted(texts)
        made = summary[split]
        assert made["documents"] == len(texts) and made["bytes"] == sum(len(text.encode()) for text in texts)
        assert made["tokens"] == sum(len(loaded.encode(text)) + 2 for text in texts)
        assert made["rows"] == len(rows) == made["shard"]["rows"]
        assert made["fill"] == pytest.approx(made["tokens"] / rows.tokens.size)
        assert sum(made["lengths"]) == len(texts)
        assert set(rows.sources.tolist()) == {1}
    assert json.loads(json.dumps(summary)) == summary


def test_the_counts_are_those_of_the_training_tokens(job: pack.Job, tmp_path: Path) -> None:
    pack.pack_group(job)
    loaded = tokenise.load(job.tokenizer, "tokenizers")
    seen: Counter[int | None] = Counter()
    for n, text in enumerate(TEXTS):
        if not is_held_out(f"text:{n}", 0.1):
            seen.update([loaded.special.bos, *loaded.encode(text), loaded.special.eos])
    counts = np.load(tmp_path / "packed" / "00003.counts.npy").tolist()
    assert counts == [seen[token] for token in range(loaded.vocab)]


@pytest.mark.parametrize("long", [0, 200])
def test_documents_get_their_beginning_and_end_and_nothing_else(
    job: pack.Job, long: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "LONG", long)
    given = Ragged(np.array([5, 6, 7], np.uint32), np.array([0, 2, 2, 3]))
    for files in (job.files, ()):  # with room, and without
        for bos, eos in ((1, 2), (None, 2), (1, None), (None, None)):
            growing = pack.Growing(replace(job, files=files))
            growing.add(given, bos, eos)
            growing.add(given)
            found = growing.ragged()
            first, last = ([] if token is None else [token] for token in (bos, eos))
            wanted = [[*first, *ids, *last] for ids in ([5, 6], [], [7])] + [[5, 6], [], [7]]
            assert [ids.tolist() for ids in np.split(found.values, found.offsets[1:-1])] == wanted
            assert found.values.dtype == np.uint16 and found.loss is None
    growing.add(replace(given, loss=np.array([True, False, True])), 1, None)
    with pytest.raises(AssertionError):
        growing.add(replace(given, values=np.array([5, 6, 1 << 16], np.uint32)))


def test_lengths_are_counted_by_powers_of_two() -> None:
    lengths = np.array([1, 2, 3, 4, 7, 8, 1023, 1024])
    made = pack.plan(lengths, 4096, "document", 0)
    found = pack.summarise(made, lengths, lengths, length=4096, shard=None)["lengths"]
    assert found == [1, 2, 2, 1, 0, 0, 0, 0, 0, 1, 1]


def test_rows_can_be_held_out_instead_of_documents(job: pack.Job, tmp_path: Path) -> None:
    summary = pack.pack_group(replace(job, held_out="rows"))
    whole = pack.pack_group(replace(job, held_out="rows", number=4, pack=Section(evaluation=0.0)))
    assert (
        whole["evaluation"]["shard"] is None and not (tmp_path / "packed" / "00004-evaluation.npy").exists()
    )
    for key in ("documents", "tokens", "bytes"):
        assert summary["train"][key] + summary["evaluation"][key] == whole["train"][key]
    assert whole["train"]["documents"] == len(TEXTS)
    rows = summary["train"]["rows"] + summary["evaluation"]["rows"]
    assert abs(summary["evaluation"]["rows"] - 0.1 * rows) < 1


def test_a_group_done_twice_has_the_same_bytes(job: pack.Job, tmp_path: Path) -> None:
    def bytes_after(job: pack.Job) -> dict[str, bytes]:
        pack.pack_group(job)
        return {file.name: file.read_bytes() for file in sorted((tmp_path / "packed").iterdir())}

    first = bytes_after(job)
    assert first == bytes_after(job)
    assert first != bytes_after(replace(job, seed=1))


def test_conversations_are_packed_with_their_loss_beside_texts(
    job: pack.Job, tmp_path: Path, tokenizer: Path
) -> None:
    folder = tmp_path / "chat"
    folder.mkdir()
    tokenise.copy(tokenizer, folder)
    tokenise.write_template(folder, CHAT)
    said = [
        json.dumps([{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"{n}!"}])
        for n in range(9)
    ]
    file = write_documents(
        tmp_path / "mixed.parquet",
        id=[f"chat:{n}" for n in range(10)],
        text=[*[None] * 9, "plain"],
        messages=[*said, None],
        source=["here"] * 10,
    )
    cfg = Section(mode="document", evaluation=0.0)
    pack.pack_group(replace(job, files=(file,), tokenizer=str(folder), pack=cfg))
    rows = read_rows(tmp_path / "packed", "00003-train")
    loaded = tokenise.load(folder, "tokenizers")
    assert rows.loss is not None and len(rows) == 10
    learnt = unpack_bits(rows.loss, 48)
    texts = [loaded.decode(tokens[mask]) for tokens, mask in zip(rows.tokens, learnt, strict=True)]
    assert sorted(texts) == sorted([*(f"{n}!\n" for n in range(9)), "plain"])
    assert not (learnt & (rows.tokens == loaded.special.filler)).any()
