"""Packing: every token has one place, and rows are as full as a plain best-fit-decreasing makes them."""

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
    made = pack.plan_rows(lengths, 32, mode, 1)
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
    assert pack.plan_rows(lengths, 32, "concat", 1).rows == -(-int(lengths.sum()) // 32)


def test_documents_by_themselves_share_no_row() -> None:
    made = pack.plan_rows(np.array([5, 32, 33, 100]), 32, "document", 1)
    assert made.row.tolist() == list(range(8)) and not made.column.any()
    assert made.size.tolist() == [5, 32, 32, 1, 32, 32, 32, 4]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [8, 32, 100, 257])
def test_best_fit_takes_as_many_rows_as_the_textbook(length: int, kind: str) -> None:
    for seed in range(5):
        lengths = lengths_of(kind, 700, seed)
        assert pack.plan_rows(lengths, length, "best_fit", seed).rows == best_fit_decreasing(lengths, length)


def test_best_fit_cuts_only_what_is_longer_than_a_row() -> None:
    lengths = lengths_of("long", 1000)
    made = pack.plan_rows(lengths, 128, "best_fit", 3)
    pieces = np.bincount(made.document, minlength=len(lengths))
    assert (pieces == -(-lengths // 128)).all()


def test_best_fit_puts_long_documents_first_no_more_often_than_last() -> None:
    made = pack.plan_rows(lengths_of("log-normal", 20_000), 128, "best_fit", 3)
    last = np.append(made.row[1:] != made.row[:-1], True)
    several = (made.column == 0) & ~last  # the first of several in a row
    ends = last & (made.column > 0)
    assert made.size[several].mean() == pytest.approx(made.size[ends].mean(), rel=0.05)


@pytest.mark.parametrize("length", [2048, 8192])
def test_best_fit_of_many_documents_is_full(length: int) -> None:
    lengths = np.maximum(2, np.random.default_rng(0).lognormal(5.9, 1.0, 300_000)).astype(np.int64)
    made = pack.plan_rows(lengths, length, "best_fit", 0)
    assert lengths.sum() / (made.rows * length) > 0.9998


@pytest.mark.parametrize("mode", ["concat", "best_fit"])
def test_a_seed_gives_one_plan_and_another_seed_another(mode: str) -> None:
    lengths = lengths_of("log-normal", 500)
    first, again, other = (pack.plan_rows(lengths, 64, mode, seed) for seed in (1, 1, 2))
    assert np.array_equal(first.document, again.document) and np.array_equal(first.column, again.column)
    assert not np.array_equal(first.document, other.document)


def filled(made: pack.PackPlan, ragged: Ragged, source: int = 0) -> Rows:
    blocks = list(pack.fill_rows(made, ragged, length=33, filler=FILLER, source=source))
    if not blocks:
        return Rows(np.empty((0, 33), np.uint32), np.empty((0, 5), np.uint8), None, np.empty(0, np.uint16))
    arrays = {name: np.concatenate([block.arrays()[name] for block in blocks]) for name in blocks[0].arrays()}
    return Rows(arrays[""], arrays[".starts"], arrays.get(".loss"), arrays[".sources"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_rows_hold_the_pieces_of_the_plan_and_marks_where_they_begin(mode: str, kind: str) -> None:
    ragged = documents_of(lengths_of(kind, 300))
    made = pack.plan_rows(ragged.lengths, 33, mode, 1)  # 33: the bits of a row do not end with a byte
    rows = filled(made, ragged, source=7)
    assert (
        rows.tokens.shape == (made.rows, 33)
        and rows.starts.shape == (made.rows, 5)
        and rows.loss_bits is None
    )
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
    ragged = replace(ragged, loss_mask=ragged.values % 3 == 0)
    rows = filled(pack.plan_rows(ragged.lengths, 33, mode, 1), ragged)
    assert rows.loss_bits is not None
    loss = unpack_bits(rows.loss_bits, 33)
    assert np.array_equal(loss, (rows.tokens % 3 == 0) & (rows.tokens != FILLER))
