"""Datasets on a local disk: contents of batches for any number of hosts, and refused data."""

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.config.reader import part_class
from headrace.data.batch_order import BatchOrder
from headrace.data.dataset import Dataset, PackedRows
from headrace.data.prefetch import read_ahead
from headrace.data.shards import Index, Rows, SpecialTokenIds, Split, pack_bits, write_rows
from headrace.nn import sharding
from headrace.objectives import Batch, SpecialTokens, TrainTask, causal, masked
from headrace.objectives._masking import maskable
from headrace.training.batch import device_batch

PAD = SpecialTokenIds(bos=1, eos=2, pad=0, mask=3)
NO_PAD = SpecialTokenIds(bos=None, eos=2, pad=None, mask=None)


def random_rows(
    count: int,
    length: int,
    *,
    seed: int,
    special: SpecialTokenIds = PAD,
    dtype: str = "uint16",
    loss: bool = False,
) -> tuple[Rows, list[list[list[int]]]]:
    """Rows of short documents, some of them padded, and the same as nested lists (row, document, tokens)
    without the padding."""
    random = np.random.default_rng(seed)
    tokens = np.full((count, length), special.filler, dtype)
    flags = np.zeros((count, length), bool)
    pieces: list[list[list[int]]] = []
    for row in range(count):
        filled = length if random.random() < 0.6 else int(random.integers(1, length + 1))
        position, row_pieces = 0, []
        while position < filled:
            size = int(min(random.integers(2, 20), filled - position))
            # An end token, the filler if there is no padding token, may also be a document by itself.
            ids = [*random.integers(4, 60_000, size - 1).tolist(), 2]
            tokens[row, position : position + size] = ids
            flags[row, position] = True
            row_pieces.append(ids)
            position += size
        if filled < length:
            flags[row, filled] = True
        elif len(row_pieces[-1]) == 1 and special.filler == 2:  # counts as padding by definition
            row_pieces.pop()
        pieces.append(row_pieces)
    bits = pack_bits(random.random((count, length)) < 0.5) if loss else None
    return Rows(tokens, pack_bits(flags), bits, np.zeros(count, np.uint16)), pieces


def write_dataset(
    folder: Path,
    *,
    epochs: int = 2,
    sizes: tuple[int, ...] = (7, 5, 11),
    evaluation: int = 5,
    length: int = 32,
    special: SpecialTokenIds = PAD,
    dtype: str = "uint16",
    loss: bool = False,
) -> dict[str, Rows]:
    """Write a dataset of random rows, and return the rows of each split in stored order."""
    folder.mkdir(exist_ok=True, parents=True)
    stored: dict[str, list[Rows]] = {"train": [], "evaluation": []}
    splits = {}
    for split, epoch_sizes in (
        ("train", [sizes] * epochs),
        ("evaluation", [(evaluation,)] if evaluation else []),
    ):
        shards = []
        for epoch, counts in enumerate(epoch_sizes):
            for shard_index, count in enumerate(counts):
                seed = 1000 * epoch + shard_index + (split == "train") * 77
                rows, _ = random_rows(count, length, seed=seed, special=special, dtype=dtype, loss=loss)
                stored[split].append(rows)
                shards.append(write_rows(folder, f"{split}-{epoch}-{shard_index:05}", rows))
        shards_per_epoch = len(epoch_sizes[0]) if epoch_sizes else 1
        grouped = tuple(
            tuple(shards[i : i + shards_per_epoch]) for i in range(0, len(shards), shards_per_epoch)
        )
        splits[split] = Split(sum(epoch_sizes[0]) if epoch_sizes else 0, 9, 9, 9, grouped)
    Index(length, dtype, 60_000, special, "f00d", 5.0, ("a",), splits, {}).write(folder)
    return {name: concatenate_rows(parts) for name, parts in stored.items() if parts}


def concatenate_rows(parts: list[Rows]) -> Rows:
    columns = [part.arrays() for part in parts]
    arrays = {suffix: np.concatenate([column[suffix] for column in columns]) for suffix in columns[0]}
    return Rows(arrays[""], arrays[".starts"], arrays.get(".loss"), arrays[".sources"])


def read_batch(data: Dataset, step: int, batch_size: int, *, seed: int = 0) -> PackedRows:
    return data.batch(data.train_order(batch_size, seed=seed), step)


def order_of(data: Dataset, split: str, batch_size: int, seed: int) -> BatchOrder:
    return data.train_order(batch_size, seed=seed) if split == "train" else data.eval_order(batch_size)


def batch_arrays(data: Dataset, order: BatchOrder, step: int, *slots: slice) -> list[np.ndarray]:
    return list(data.batch(order, step, *slots).arrays().values())


def assert_same(left: list[np.ndarray], right: list[np.ndarray]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_epochs_are_read_in_stored_order_and_then_repeat(tmp_path: Path, dtype: str) -> None:
    stored = write_dataset(tmp_path, dtype=dtype)["train"].tokens.astype(np.int32)
    data = Dataset.open(tmp_path)
    assert data.rows_per_epoch("train") == 23 and len(stored) == 46
    for sequences in (1, 5, 23, 60):
        steps = -(-100 // sequences)
        read = np.concatenate(
            [data.batch_tokens(data.train_order(sequences, seed=0), t) for t in range(steps)]
        )
        np.testing.assert_array_equal(read, stored[np.arange(len(read)) % 46])


@pytest.mark.parametrize("hosts", [1, 2, 4])
@pytest.mark.parametrize("cut", [32, 8])
def test_batches_do_not_depend_on_the_number_of_hosts(tmp_path: Path, hosts: int, cut: int) -> None:
    write_dataset(tmp_path, loss=True)
    single_host = Dataset.open(tmp_path, sequence_length=cut)
    hosts_data = [Dataset.open(tmp_path, sequence_length=cut) for _ in range(hosts)]
    for split, seed in (("train", 0), ("train", 3), ("evaluation", 0)):
        for step in range(12):
            order = order_of(single_host, split, 8, seed)
            host_slots = [slice(8 // hosts * n, 8 // hosts * (n + 1)) for n in range(hosts)]
            parts = [
                batch_arrays(data, order, step, slots)
                for data, slots in zip(hosts_data, host_slots, strict=True)
            ]
            assert_same(
                [np.concatenate(column) for column in zip(*parts, strict=True)],
                batch_arrays(single_host, order, step),
            )


@pytest.mark.fault(18)
def test_a_resumed_run_reads_the_same_batches_as_an_uninterrupted_run(tmp_path: Path) -> None:
    write_dataset(tmp_path)

    def stream(start: int) -> Iterator[list[np.ndarray]]:
        data = Dataset.open(tmp_path)
        order = data.train_order(6, seed=5)
        return read_ahead(lambda step: batch_arrays(data, order, step), start, 30)

    uninterrupted = list(stream(0))
    for start in (1, 7, 8, 29):
        for batch, expected in zip(stream(start), uninterrupted[start:], strict=True):
            assert_same(batch, expected)


def test_each_seed_starts_at_a_different_row_of_the_same_order(tmp_path: Path) -> None:
    stored = write_dataset(tmp_path)["train"].tokens.astype(np.int32)
    data = Dataset.open(tmp_path)
    firsts = []
    for seed in range(400):
        rows = data.batch_tokens(data.train_order(46, seed=seed), 0)
        first = next(i for i in range(46) if np.array_equal(rows[0], stored[i]))
        np.testing.assert_array_equal(rows, np.roll(stored, -first, axis=0))
        firsts.append(first)
    assert firsts[0] == 0
    counts = np.bincount(firsts[1:], minlength=46)
    expected = 399 / 46
    assert (
        (counts - expected) ** 2 / expected
    ).sum() < 80  # chi-square of 45 degrees of freedom: 99.9 % are below


def test_a_seed_starts_at_the_same_text_for_every_sequence_length(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    full = read_batch(Dataset.open(tmp_path), 2, 4, seed=9).tokens
    split_rows = read_batch(Dataset.open(tmp_path, sequence_length=8), 2, 16, seed=9).tokens
    np.testing.assert_array_equal(split_rows, full.reshape(-1, 8))


def test_evaluation_reads_every_row_in_order_and_ends_in_padding(tmp_path: Path) -> None:
    stored = write_dataset(tmp_path, loss=True)["evaluation"].tokens
    data = Dataset.open(tmp_path)
    assert data.rows_per_epoch("evaluation") == 5
    first, second, third = (data.batch(data.eval_order(4), t) for t in range(3))
    np.testing.assert_array_equal(np.concatenate([first.tokens, second.tokens[:1]]), stored)
    for packed in (second, third):
        padding = slice(1, None) if packed is second else slice(None)
        assert packed.tokens.shape == (4, 32)
        assert (packed.tokens[padding] == data.pad_id).all() and not packed.segments[padding].any()
        assert packed.loss_mask is not None and not packed.loss_mask[padding].any()
        assert (packed.positions[padding] == np.arange(32)).all()


@pytest.mark.parametrize("special", [PAD, NO_PAD], ids=["pad", "eos-pads"])
@pytest.mark.parametrize("length", [64, 60])
def test_segments_and_positions_follow_the_documents(
    tmp_path: Path, special: SpecialTokenIds, length: int
) -> None:
    """Compared with the documents that the rows were built from, for full and split rows."""
    rows, pieces = random_rows(200, length, seed=4, special=special)
    shard = write_rows(tmp_path, "train-0-00000", rows)
    splits = {"train": Split(200, 1, 1, 1, ((shard,),)), "evaluation": Split(0, 0, 0, 0, ())}
    Index(length, "uint16", 60_000, special, "f00d", 5.0, ("a",), splits, {}).write(tmp_path)
    for cut in (length, length // 2, length // 4, 4, 1):
        packed = read_batch(Dataset.open(tmp_path, sequence_length=cut), 0, 200 * length // cut)
        segments, positions = reference_marks(pieces, length, cut)
        np.testing.assert_array_equal(packed.segments, segments)
        np.testing.assert_array_equal(packed.positions[segments > 0], positions[segments > 0])
        assert packed.segments.dtype == packed.positions.dtype == packed.tokens.dtype == np.int32
        assert packed.loss_mask is None


def reference_marks(pieces: list[list[list[int]]], length: int, cut: int) -> tuple[np.ndarray, np.ndarray]:
    segments, positions = [], []
    for row in pieces:
        owners = [piece_index for piece_index, piece in enumerate(row) for _ in piece]
        owners += [-1] * (length - len(owners))
        for start in range(0, length, cut):
            cut_owners = owners[start : start + cut]
            order = list(dict.fromkeys(cut_owners))
            segments.append([0 if owner < 0 else order.index(owner) + 1 for owner in cut_owners])
            positions.append(
                [position - cut_owners.index(owner) for position, owner in enumerate(cut_owners)]
            )
    return np.array(segments), np.array(positions)


def test_rows_of_only_padding_and_documents_that_end_in_filler_are_segmented(tmp_path: Path) -> None:
    tokens = np.array([[2, 2, 2, 2], [9, 2, 2, 2], [9, 9, 2, 2], [9, 2, 9, 2]], np.uint16)
    flags = np.array([[1, 0, 0, 0], [1, 0, 1, 0], [1, 0, 0, 0], [1, 0, 1, 0]], bool)
    shard = write_rows(
        tmp_path, "train-0-00000", Rows(tokens, pack_bits(flags), None, np.zeros(4, np.uint16))
    )
    splits = {"train": Split(4, 1, 1, 1, ((shard,),)), "evaluation": Split(0, 0, 0, 0, ())}
    Index(4, "uint16", 10, NO_PAD, "f00d", 5.0, ("a",), splits, {}).write(tmp_path)
    packed = read_batch(Dataset.open(tmp_path), 0, 4)
    assert packed.segments.tolist() == [[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 2, 2]]
    assert packed.positions[1:].tolist() == [[0, 1, 0, 1], [0, 1, 2, 3], [0, 1, 0, 1]]


@pytest.mark.parametrize("cut", [60, 12])
def test_loss_bits_match_their_tokens(tmp_path: Path, cut: int) -> None:
    stored = write_dataset(tmp_path, length=60, loss=True)["train"]
    assert stored.loss_bits is not None
    bits = np.unpackbits(stored.loss_bits, axis=1, count=60, bitorder="little").astype(bool).reshape(-1, cut)
    data = Dataset.open(tmp_path, sequence_length=cut)
    assert data.has_loss_mask
    packed = data.batch(data.train_order(9, seed=0), 3)
    np.testing.assert_array_equal(packed.loss_mask, bits[27:36])


def test_rows_without_loss_bits_among_others_are_fully_trained_on(tmp_path: Path) -> None:
    rows, _ = random_rows(3, 32, seed=1)
    shards = (
        write_rows(tmp_path, "train-0-00000", rows),
        write_rows(tmp_path, "train-0-00001", random_rows(3, 32, seed=2, loss=True)[0]),
    )
    splits = {"train": Split(6, 1, 1, 1, (shards,)), "evaluation": Split(0, 0, 0, 0, ())}
    Index(32, "uint16", 60_000, PAD, "f00d", 5.0, ("a",), splits, {}).write(tmp_path)
    loss = read_batch(Dataset.open(tmp_path), 0, 6).loss_mask
    assert loss is not None and loss[:3].all() and not loss[3:].all()


def test_batch_tokens_equal_the_batch_and_can_be_written_to_a_buffer(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    data = Dataset.open(tmp_path, sequence_length=16)
    out = np.empty((10, 16), np.int32)
    for order in (data.train_order(10, seed=2), data.eval_order(10)):
        for step in range(12):
            assert data.batch_tokens(order, step, out=out) is out
            np.testing.assert_array_equal(out, data.batch(order, step).tokens)


@pytest.mark.parametrize("suffix", ["", ".starts", ".loss", ".sources"])
@pytest.mark.fault(17)
def test_a_missing_shard_is_named(tmp_path: Path, suffix: str) -> None:
    write_dataset(tmp_path, loss=True)
    (tmp_path / f"train-1-00002{suffix}.npy").unlink()
    with pytest.raises(ValueError, match=rf"train-1-00002{suffix}\.npy is missing"):
        Dataset.open(tmp_path)


@pytest.mark.parametrize("change", [lambda old: old[:-2], lambda old: old + b"xx", lambda old: b""])
@pytest.mark.fault(17)
def test_a_shard_of_the_wrong_size_is_refused_with_both_sizes(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    write_dataset(tmp_path)
    file = tmp_path / "train-0-00001.npy"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ValueError, match=rf"{file} has {file.stat().st_size} bytes, .* which takes 448"):
        Dataset.open(tmp_path)


@pytest.mark.fault(17)
def test_a_shard_of_another_type_or_shape_is_refused_with_both(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    np.save(tmp_path / "train-0-00000.npy", np.zeros((7, 32), np.int16))
    with pytest.raises(
        ValueError, match=r"holds int16 of shape \(7, 32\), and the index says uint16 of shape"
    ):
        Dataset.open(tmp_path)
    np.save(tmp_path / "train-0-00000.npy", np.zeros((14, 16), np.uint16))
    with pytest.raises(ValueError, match=r"shape \(14, 16\), and the index says uint16 of shape \(7, 32\)"):
        Dataset.open(tmp_path)
    (tmp_path / "train-0-00000.npy").write_bytes(b"x" * (128 + 7 * 64))
    with pytest.raises(ValueError, match=r"train-0-00000\.npy is damaged"):
        Dataset.open(tmp_path)


@pytest.mark.fault(17)
def test_a_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps(index | {"vocab": 100}))
    with pytest.raises(ValueError, match=r"train-0-\d+.npy holds token \d+, expected less than 100"):
        read_batch(Dataset.open(tmp_path), 0, 4)


def test_an_index_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    index["splits"]["train"]["rows"] = 24
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="the train split has 24 rows, but its shards have 23"):
        Dataset.open(tmp_path)


def test_a_missing_or_foreign_folder_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere.*headrace data prepare"):
        Dataset.open(tmp_path / "nowhere")
    for content in ("[]", "{}", "not json"):
        (tmp_path / "index.json").write_text(content)
        with pytest.raises(ValueError, match=r"index\.json is not an index"):
            Dataset.open(tmp_path)


@pytest.mark.parametrize("length", [24, 64])
def test_a_sequence_length_that_does_not_divide_the_packed_one_is_refused(
    tmp_path: Path, length: int
) -> None:
    write_dataset(tmp_path)
    with pytest.raises(ValueError, match=rf"data\.sequence_length: {length} does not divide 32"):
        Dataset.open(tmp_path, sequence_length=length)


@pytest.mark.fault(16)
def test_data_of_another_tokenizer_is_refused_with_both(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    assert Dataset.open(tmp_path, tokenizer_sha256="f00d").tokenizer_sha256 == "f00d"
    with pytest.raises(ValueError, match="made with tokenizer f00d, and beef is expected"):
        Dataset.open(tmp_path, tokenizer_sha256="beef")


def test_reading_an_empty_split_is_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path, evaluation=0)
    data = Dataset.open(f"file://{tmp_path}")
    assert data.rows_per_epoch("evaluation") == 0
    with pytest.raises(ValueError, match="evaluation split of this data is empty"):
        data.batch(data.eval_order(1), 0)


def test_the_number_of_open_shards_is_limited(tmp_path: Path) -> None:
    stored = write_dataset(tmp_path, sizes=(1,) * 80, epochs=1)["train"].tokens
    data = Dataset.open(tmp_path)
    for _ in range(2):
        read = np.concatenate([data.batch(data.train_order(8, seed=0), t).tokens for t in range(10)])
        np.testing.assert_array_equal(read, stored)
    maps = Path("/proc/self/maps").read_text() if Path("/proc/self/maps").exists() else ""
    assert maps.count(str(tmp_path)) <= 128


def test_the_loss_counts_only_targets_whose_bit_is_set() -> None:
    batch = random_batch()
    assert batch.loss_mask is not None
    examples = causal.prepare(task("causal"), batch, jax.random.key(0))
    plain = causal.prepare(task("causal"), dataclasses.replace(batch, loss_mask=None), jax.random.key(0))
    for row, column in np.ndindex(4, 16):
        is_trained_on = (
            column < 15 and bool(batch.loss_mask[row, column + 1]) and bool(plain.weights[row, column])
        )
        assert bool(examples.weights[row, column]) == is_trained_on
    all_bits = dataclasses.replace(batch, loss_mask=jnp.ones_like(batch.loss_mask))
    unmasked = causal.prepare(task("causal"), all_bits, jax.random.key(0))
    np.testing.assert_array_equal(unmasked.weights, plain.weights)


def test_only_tokens_whose_bit_is_set_are_masked() -> None:
    batch, key = random_batch(), jax.random.key(1)
    assert batch.loss_mask is not None
    examples = masked.prepare(task("masked"), batch, key)
    plain = masked.prepare(task("masked"), dataclasses.replace(batch, loss_mask=None), key)
    selected = np.asarray(examples.weights) > 0
    assert selected.any() and not selected[~np.asarray(batch.loss_mask)].any()
    assert (np.asarray(plain.weights) > 0)[~np.asarray(batch.loss_mask)].any()
    np.testing.assert_array_equal(np.asarray(examples.inputs)[~selected], np.asarray(batch.tokens)[~selected])
    # The mask rate applies to the tokens that are trained on.
    maskable_counts = np.asarray(maskable(task("masked").special_tokens, batch)).sum(1)
    assert (np.abs(selected.sum(1) - task("masked").objective.mask_rate * maskable_counts) < 1).all()


def random_batch() -> Batch:
    random = np.random.default_rng(3)
    segments = np.sort(random.integers(1, 4, (4, 16)), axis=1)
    segments[1, 10:] = 0
    arrays = (random.integers(4, 90, (4, 16)), segments, np.tile(np.arange(16), (4, 1)))
    return Batch(
        *(jnp.asarray(array, jnp.int32) for array in arrays), jnp.asarray(random.random((4, 16)) < 0.5)
    )


def task(objective: str) -> TrainTask:
    cfg = part_class("objectives", objective)()
    return TrainTask(
        model=None,
        objective=cfg,
        loss=None,
        exec_opts=None,
        special_tokens=SpecialTokens(100, 0, 1, 2, 3),
        family=None,
    )  # type: ignore[arg-type]


def test_device_batches_equal_the_rows_that_were_read(tmp_path: Path) -> None:
    write_dataset(tmp_path, loss=True)
    data = Dataset.open(tmp_path)
    devices = sharding.make_mesh({"data": 2, "fsdp": 2, "tensor": 1, "context": 2}, jax.devices())
    batch = device_batch(data, data.train_order(8, seed=1), devices, 2)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(batch)]
    assert_same(leaves, batch_arrays(data, data.train_order(8, seed=1), 2))
    assert batch.loss_mask is not None and batch.loss_mask.sharding == batch.tokens.sharding


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


def test_read_ahead_yields_in_order_and_ends() -> None:
    assert list(read_ahead(lambda step: step * step, 3, 9)) == [9, 16, 25, 36, 49, 64]
    assert list(read_ahead(lambda step: step, 5, 5)) == []
    assert reading_threads() == []


def test_read_ahead_raises_errors_of_the_thread_at_the_failing_step() -> None:
    def make(step: int) -> int:
        if step == 2:
            raise OSError("disk gone")
        return step

    items = read_ahead(make, 0, 10)
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(OSError, match="disk gone"):
        next(items)
    assert reading_threads() == []


def test_read_ahead_reads_at_most_two_batches_ahead_and_stops_the_thread_when_closed() -> None:
    read_steps: list[int] = []
    has_read_ahead = threading.Event()

    def make(step: int) -> int:
        read_steps.append(step)
        if step == 2:
            has_read_ahead.set()
        return step

    items = read_ahead(make, 0, 1_000_000)
    assert next(items) == 0
    assert has_read_ahead.wait(10)
    closing = threading.Thread(target=items.close, daemon=True)  # type: ignore[attr-defined]
    closing.start()
    closing.join(10)
    assert not closing.is_alive() and reading_threads() == []
    assert read_steps == [0, 1, 2]
