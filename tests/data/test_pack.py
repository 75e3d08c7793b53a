"""Packing: every token has exactly one position, and rows are as full as with plain best-fit-decreasing."""

import bisect
from dataclasses import replace

import numpy as np
import pytest

from headrace.data import pack
from headrace.data.documents import Ragged
from headrace.data.shards import Rows, unpack_bits

MODES = ("concat", "document", "best_fit")
FILLER = 0


def lengths_of(kind: str, count: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return {
        "log-normal": lambda: np.maximum(2, random.lognormal(3.0, 1.0, count)).astype(np.int64),
        "short": lambda: random.integers(1, 5, count),
        "with empty documents": lambda: random.integers(0, 40, count),
        "long": lambda: random.integers(1, 500, count),
        "full rows": lambda: np.full(count, 32),
        "none": lambda: np.zeros(0, np.int64),
        "one": lambda: np.array([70]),
    }[kind]()


KINDS = ("log-normal", "short", "with empty documents", "long", "full rows", "none", "one")


def documents_of(lengths: np.ndarray) -> Ragged:
    """Documents of distinct tokens, so that a misplaced token is detected."""
    return Ragged(
        np.arange(1, 1 + lengths.sum(), dtype=np.uint32),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
    )


def pieces_in(rows: Rows, filler: int) -> list[list[int]]:
    """Documents as a plain loop reads them: from start to start, without a last piece of only filler."""
    documents = []
    for row, start_flags in zip(
        rows.tokens.tolist(), unpack_bits(rows.starts, rows.tokens.shape[1]).tolist(), strict=True
    ):
        starts = [column for column, is_start in enumerate(start_flags) if is_start]
        assert starts[0] == 0
        pieces = [row[a:b] for a, b in zip(starts, [*starts[1:], len(row)], strict=True)]
        if all(token == filler for token in pieces[-1]):
            pieces.pop()
        documents.extend(pieces)
    return documents


def best_fit_decreasing(lengths: np.ndarray, length: int) -> int:
    """Number of rows of textbook best-fit-decreasing: each document goes to the fullest row with room."""
    rows, rooms = int((lengths // length).sum()), list[int]()
    for size in sorted((lengths[lengths % length > 0] % length).tolist(), reverse=True):
        position = bisect.bisect_left(rooms, size)
        if position == len(rooms):
            rows += 1
            room = length
        else:
            room = rooms.pop(position)
        if room > size:
            bisect.insort(rooms, room - size)
    return rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_every_token_has_exactly_one_position(mode: str, kind: str) -> None:
    lengths = lengths_of(kind, 300)
    plan = pack.plan_rows(lengths, 32, mode, 1)
    tokens = [
        (document, begin + i)
        for document, begin, size in zip(
            plan.document.tolist(), plan.begin.tolist(), plan.size.tolist(), strict=True
        )
        for i in range(size)
    ]
    assert sorted(tokens) == [
        (document, i) for document, size in enumerate(lengths.tolist()) for i in range(size)
    ]
    positions = (plan.row * 32 + plan.column).tolist()
    assert positions == sorted(positions)
    next_positions = [*positions, plan.rows * 32][1:]
    for position, size, next_position in zip(positions, plan.size.tolist(), next_positions, strict=True):
        assert position + size == next_position or (
            position + size < next_position and next_position % 32 == 0
        )
        assert position % 32 + size <= 32
    assert plan.rows == len(set(plan.row.tolist()))


@pytest.mark.parametrize("kind", KINDS)
def test_concatenated_documents_leave_room_only_in_the_last_row(kind: str) -> None:
    lengths = lengths_of(kind, 300)
    assert pack.plan_rows(lengths, 32, "concat", 1).rows == -(-int(lengths.sum()) // 32)


def test_mode_document_puts_no_two_documents_in_a_row() -> None:
    plan = pack.plan_rows(np.array([5, 32, 33, 100]), 32, "document", 1)
    assert plan.row.tolist() == list(range(8)) and not plan.column.any()
    assert plan.size.tolist() == [5, 32, 32, 1, 32, 32, 32, 4]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [8, 32, 100, 257])
def test_best_fit_takes_as_many_rows_as_the_textbook(length: int, kind: str) -> None:
    for seed in range(5):
        lengths = lengths_of(kind, 700, seed)
        assert pack.plan_rows(lengths, length, "best_fit", seed).rows == best_fit_decreasing(lengths, length)


def test_best_fit_cuts_only_what_is_longer_than_a_row() -> None:
    lengths = lengths_of("long", 1000)
    plan = pack.plan_rows(lengths, 128, "best_fit", 3)
    pieces = np.bincount(plan.document, minlength=len(lengths))
    assert (pieces == -(-lengths // 128)).all()


def test_best_fit_puts_long_documents_first_no_more_often_than_last() -> None:
    plan = pack.plan_rows(lengths_of("log-normal", 20_000), 128, "best_fit", 3)
    last = np.append(plan.row[1:] != plan.row[:-1], True)
    shared_firsts = (plan.column == 0) & ~last  # first of several documents in a row
    shared_lasts = last & (plan.column > 0)
    assert plan.size[shared_firsts].mean() == pytest.approx(plan.size[shared_lasts].mean(), rel=0.05)


@pytest.mark.parametrize("length", [2048, 8192])
def test_best_fit_of_many_documents_fills_rows(length: int) -> None:
    lengths = np.maximum(2, np.random.default_rng(0).lognormal(5.9, 1.0, 300_000)).astype(np.int64)
    plan = pack.plan_rows(lengths, length, "best_fit", 0)
    assert lengths.sum() / (plan.rows * length) > 0.9998


@pytest.mark.parametrize("mode", ["concat", "best_fit"])
def test_plans_depend_on_the_seed(mode: str) -> None:
    lengths = lengths_of("log-normal", 500)
    first, repeated, other = (pack.plan_rows(lengths, 64, mode, seed) for seed in (1, 1, 2))
    assert np.array_equal(first.document, repeated.document) and np.array_equal(first.column, repeated.column)
    assert not np.array_equal(first.document, other.document)


def fill_all_rows(plan: pack.PackPlan, ragged: Ragged, source: int = 0) -> Rows:
    blocks = list(pack.fill_rows(plan, ragged, length=33, filler=FILLER, source=source))
    if not blocks:
        return Rows(np.empty((0, 33), np.uint32), np.empty((0, 5), np.uint8), None, np.empty(0, np.uint16))
    arrays = {name: np.concatenate([block.arrays()[name] for block in blocks]) for name in blocks[0].arrays()}
    return Rows(arrays[""], arrays[".starts"], arrays.get(".loss"), arrays[".sources"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_rows_contain_the_documents_of_the_plan_and_their_starts(mode: str, kind: str) -> None:
    ragged = documents_of(lengths_of(kind, 300))
    plan = pack.plan_rows(ragged.lengths, 33, mode, 1)  # 33: not a multiple of 8 bits
    rows = fill_all_rows(plan, ragged, source=7)
    assert (
        rows.tokens.shape == (plan.rows, 33)
        and rows.starts.shape == (plan.rows, 5)
        and rows.loss_bits is None
    )
    expected = [
        ragged.values[ragged.offsets[document] + begin :][:size].tolist()
        for document, begin, size in zip(plan.document, plan.begin, plan.size, strict=True)
    ]
    assert pieces_in(rows, FILLER) == expected
    assert rows.sources.tolist() == [7] * plan.rows


@pytest.mark.parametrize("mode", MODES)
def test_loss_bits_move_with_their_tokens_and_padding_has_no_loss(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "BLOCK", 100)  # several blocks, some of them full
    ragged = documents_of(lengths_of("with empty documents", 300))
    ragged = replace(ragged, loss_mask=ragged.values % 3 == 0)
    rows = fill_all_rows(pack.plan_rows(ragged.lengths, 33, mode, 1), ragged)
    assert rows.loss_bits is not None
    loss = unpack_bits(rows.loss_bits, 33)
    assert np.array_equal(loss, (rows.tokens % 3 == 0) & (rows.tokens != FILLER))
