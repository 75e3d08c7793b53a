"""The files of a packed dataset as arrays in memory maps, whether they lie on a disk here or at a URL, each
compared with what the index says of it."""

import io
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from headrace.storage import files as store
from headrace.data.remote_cache import Remote
from headrace.data.shards import Index, Shard, checksum
from headrace.errors import UserError

HEADER = 128  # bytes before the array in a .npy file of one or two axes, as numpy writes it
AGAIN = "make the data again with `headrace data prepare RECIPE`"


def open_folder(path: str | Path) -> "Folder":
    text = str(path)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    return Remote(text) if "://" in text else Local(text)


def read_index(folder: "Folder") -> Index:
    try:
        return Index.parse(folder.read("index.json"), folder.where("index.json"))
    except (FileNotFoundError, NotADirectoryError):
        store.check_bucket(folder.where(""))
        raise UserError(
            f"data.path: no packed data in {folder.where('')}; make it with `headrace data prepare RECIPE`"
        ) from None


def check(index: Index, folder: "Folder") -> None:
    """Whether every file is there and as large as the index says. What it holds is looked at here too if it
    is near, and when it is first read if looking means to fetch it."""
    for name, split in index.splits.items():
        found = sum(shard.rows for shard in split.epochs[0]) if split.epochs else 0
        if found != split.rows:
            raise UserError(
                f"{folder.where('index.json')} says that the {name} split has {split.rows} rows, and its "
                f"shards {found}; {AGAIN}"
            )
    files = [
        (shard, suffix)
        for name in index.splits
        for shard in stored(index, name)
        for suffix in shard.checksums
    ]
    sizes = folder.sizes([f"{shard.name}{suffix}.npy" for shard, suffix in files])
    for shard, suffix in files:
        name, (shape, dtype) = f"{shard.name}{suffix}.npy", layout(index, shard, suffix)
        size = HEADER + int(np.prod(shape)) * dtype.itemsize
        if name not in sizes:
            raise UserError(f"{folder.where(name)} is missing; {AGAIN}")
        if sizes[name] not in (None, size):
            raise UserError(
                f"{folder.where(name)} has {sizes[name]} bytes, and the index says {dtype} of shape {shape}, "
                f"which takes {size}; {AGAIN}"
            )
        if not folder.ahead:
            Column(folder, index, shard, suffix).check()


class Column:
    """One array of a shard: its tokens (suffix ""), starts, loss, sources or labels."""

    def __init__(self, folder: "Folder", index: Index, shard: Shard, suffix: str) -> None:
        self.where = folder.where(f"{shard.name}{suffix}.npy")
        self.shape, self.dtype = layout(index, shard, suffix)
        self.width = int(np.prod(self.shape[1:])) * self.dtype.itemsize  # bytes of a row
        size = HEADER + shard.rows * self.width
        self.file = folder.open(
            f"{shard.name}{suffix}.npy", size=size, header=HEADER, checksum=shard.checksums[suffix]
        )
        self.checked = False

    def want(self, rows: slice) -> None:
        self.file.want(0, HEADER)
        self.file.want(HEADER + rows.start * self.width, HEADER + rows.stop * self.width)

    def rows(self, rows: slice) -> np.ndarray:
        if not self.checked:
            self.check()
        self.file.need(HEADER + rows.start * self.width, HEADER + rows.stop * self.width)
        return self.array[rows]

    def check(self) -> None:
        """Whether the file's header says what the index does."""
        self.file.need(0, HEADER)
        try:
            start = io.BytesIO(self.file.content[:HEADER].tobytes())
            np.lib.format.read_magic(start)
            shape, columns_first, dtype = np.lib.format.read_array_header_1_0(start)
        except Exception as error:  # numpy lets through what Python's parser makes of a damaged header
            said = " ".join(str(error).split())
            raise UserError(f"{self.where} is damaged: {said}; {AGAIN}") from None
        if shape != self.shape or dtype != self.dtype or columns_first or start.tell() != HEADER:
            raise UserError(
                f"{self.where} holds {dtype} of shape {shape}, and the index says {self.dtype} of shape "
                f"{self.shape}; {AGAIN}"
            )
        self.array = self.file.content[HEADER:].view(self.dtype).reshape(self.shape)
        self.checked = True


def layout(index: Index, shard: Shard, suffix: str) -> tuple[tuple[int, ...], np.dtype]:
    bits = (shard.rows, -(-index.sequence_length // 8))
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "": ((shard.rows, index.sequence_length), index.dtype),
        ".starts": (bits, "uint8"),
        ".loss": (bits, "uint8"),
        ".sources": ((shard.rows,), "uint16"),
        ".labels": ((shard.rows, index.sequence_length), "uint16"),
    }
    shape, dtype = shapes[suffix]
    return shape, np.dtype(dtype)


def stored(index: Index, split: str) -> list[Shard]:
    """The shards of all epochs; evaluation has use for one."""
    epochs = index.splits[split].epochs[: None if split == "train" else 1]
    return [shard for epoch in epochs for shard in epoch if shard.rows]


class File(Protocol):
    """Bytes, which are asked for before they are touched if they may not be here yet."""

    content: np.ndarray

    def want(self, start: int, stop: int) -> Any: ...

    def need(self, start: int, stop: int) -> None: ...


class Folder(Protocol):
    """Where the files of a dataset are. `ahead` bytes are worth asking for before they are needed."""

    ahead: int

    def where(self, name: str) -> str: ...

    def read(self, name: str) -> bytes: ...

    def sizes(self, names: list[str]) -> dict[str, int | None]: ...

    def open(self, name: str, *, size: int, header: int, checksum: str) -> File: ...


class Local:
    """A folder on a disk of this machine, or mounted on it."""

    ahead = 0

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def where(self, name: str) -> str:
        return str(self.path / name)

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def sizes(self, names: list[str]) -> dict[str, int | None]:
        return {name: (self.path / name).stat().st_size for name in names if (self.path / name).is_file()}

    def open(self, name: str, *, size: int, header: int, checksum: str) -> "Mapped":
        return Mapped(self.path / name, header, checksum)


class Mapped:
    """A file on a disk. When the first row is asked for, all of it is compared with its checksum: that reads
    what will be read anyway, at 2 GB/s."""

    def __init__(self, path: Path, header: int, checksum: str) -> None:
        self.path, self.header, self.checksum, self.compared = path, header, checksum, False
        self.content = np.asarray(np.memmap(path, np.uint8, "r"))

    def want(self, start: int, stop: int) -> None:
        pass

    def need(self, start: int, stop: int) -> None:
        if self.compared or stop <= self.header:
            return
        found = checksum(self.content[self.header :].data)
        if found != self.checksum:
            raise UserError(f"{self.path} has checksum {found}, and the index says {self.checksum}; {AGAIN}")
        self.compared = True
