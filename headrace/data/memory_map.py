"""Files of a packed dataset as memory-mapped arrays, from a local disk or a URL.

Each file is compared with its shape and checksum in the index."""

import io
from pathlib import Path
from typing import Protocol

import numpy as np

from headrace.data.remote_cache import RemoteFolder
from headrace.data.shards import Index, Shard, crc32_hex
from headrace.errors import UserError
from headrace.storage import files

HEADER_BYTES = 128  # before the array in a .npy file of one or two axes, as numpy writes it
REMAKE_HINT = "make the data again with `headrace data prepare RECIPE`"


def open_folder(path: str | Path) -> "Folder":
    """Open the folder of a dataset at a path or URL. Nothing is read yet."""
    text = str(path)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    return RemoteFolder(text) if "://" in text else LocalFolder(text)


def read_index(folder: "Folder") -> Index:
    """Read and check index.json. UserError if the folder has none."""
    try:
        return Index.parse(folder.read("index.json"), folder.location("index.json"))
    except (FileNotFoundError, NotADirectoryError):
        files.check_bucket(folder.location(""))
        raise UserError(
            f"data.path: no packed data in {folder.location('')}; make it with `headrace data prepare RECIPE`"
        ) from None


def check_files(index: Index, folder: "Folder") -> None:
    """Check that every file exists and has the size that follows from the index. UserError otherwise.

    The headers of local files are checked as well. Those of remote ones are checked at their first use, since
    reading them takes a download."""
    for split_name, split in index.splits.items():
        shard_rows = sum(shard.rows for shard in split.epochs[0]) if split.epochs else 0
        if shard_rows != split.rows:
            raise UserError(
                f"{folder.location('index.json')}: the {split_name} split has {split.rows} rows, but its "
                f"shards have {shard_rows}; {REMAKE_HINT}"
            )
    columns = [
        (shard, suffix)
        for split_name in index.splits
        for shard in stored_shards(index, split_name)
        for suffix in shard.checksums
    ]
    sizes = folder.file_sizes([f"{shard.name}{suffix}.npy" for shard, suffix in columns])
    for shard, suffix in columns:
        name, (shape, dtype) = f"{shard.name}{suffix}.npy", column_layout(index, shard, suffix)
        expected_size = HEADER_BYTES + int(np.prod(shape)) * dtype.itemsize
        if name not in sizes:
            raise UserError(f"{folder.location(name)} is missing; {REMAKE_HINT}")
        if sizes[name] not in (None, expected_size):
            raise UserError(
                f"{folder.location(name)} has {sizes[name]} bytes, and the index says {dtype} of shape "
                f"{shape}, which takes {expected_size}; {REMAKE_HINT}"
            )
        if not folder.prefetch_bytes:
            Column(folder, index, shard, suffix).check_header()


class Column:
    """One array of a shard: its tokens (suffix ""), starts, loss bits, sources or labels."""

    def __init__(self, folder: "Folder", index: Index, shard: Shard, suffix: str) -> None:
        name = f"{shard.name}{suffix}.npy"
        self.location = folder.location(name)
        self.shape, self.dtype = column_layout(index, shard, suffix)
        self.row_bytes = int(np.prod(self.shape[1:])) * self.dtype.itemsize
        size = HEADER_BYTES + shard.rows * self.row_bytes
        self.file = folder.open(name, size=size, header=HEADER_BYTES, checksum=shard.checksums[suffix])
        self.is_checked = False

    def prefetch(self, rows: slice) -> None:
        """Start to fetch these rows if they are remote."""
        self.file.prefetch(0, HEADER_BYTES)
        self.file.prefetch(
            HEADER_BYTES + rows.start * self.row_bytes, HEADER_BYTES + rows.stop * self.row_bytes
        )

    def read(self, rows: slice) -> np.ndarray:
        """Return a view of these rows. Waits for remote ones."""
        if not self.is_checked:
            self.check_header()
        self.file.ensure(
            HEADER_BYTES + rows.start * self.row_bytes, HEADER_BYTES + rows.stop * self.row_bytes
        )
        return self.array[rows]

    def check_header(self) -> None:
        """Map the array. UserError if the file's header does not have the shape and type of the index."""
        self.file.ensure(0, HEADER_BYTES)
        try:
            header = io.BytesIO(self.file.content[:HEADER_BYTES].tobytes())
            np.lib.format.read_magic(header)
            shape, columns_first, dtype = np.lib.format.read_array_header_1_0(header)
        except Exception as error:  # any: numpy parses a damaged header as Python
            message = " ".join(str(error).split())
            raise UserError(f"{self.location} is damaged: {message}; {REMAKE_HINT}") from None
        if shape != self.shape or dtype != self.dtype or columns_first or header.tell() != HEADER_BYTES:
            raise UserError(
                f"{self.location} holds {dtype} of shape {shape}, and the index says {self.dtype} of shape "
                f"{self.shape}; {REMAKE_HINT}"
            )
        self.array = self.file.content[HEADER_BYTES:].view(self.dtype).reshape(self.shape)
        self.is_checked = True


def column_layout(index: Index, shard: Shard, suffix: str) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type of one array of a shard, from the suffix of its file."""
    bits = (shard.rows, -(-index.sequence_length // 8))
    layouts: dict[str, tuple[tuple[int, ...], str]] = {
        "": ((shard.rows, index.sequence_length), index.dtype),
        ".starts": (bits, "uint8"),
        ".loss": (bits, "uint8"),
        ".sources": ((shard.rows,), "uint16"),
        ".labels": ((shard.rows, index.sequence_length), "uint16"),
    }
    shape, dtype = layouts[suffix]
    return shape, np.dtype(dtype)


def stored_shards(index: Index, split: str) -> list[Shard]:
    """Shards of a split that are read, in order: those of all training epochs, or of one for evaluation."""
    epochs = index.splits[split].epochs[: None if split == "train" else 1]
    return [shard for epoch in epochs for shard in epoch if shard.rows]


class FileReader(Protocol):
    """The bytes of a file, which must be requested by `ensure` before they are read from `content`."""

    content: np.ndarray

    def prefetch(self, start: int, stop: int) -> object: ...

    def ensure(self, start: int, stop: int) -> None: ...


class Folder(Protocol):
    """The folder of a dataset.

    `prefetch_bytes` is how many bytes to request ahead of their use: 0 if that gains nothing."""

    prefetch_bytes: int

    def location(self, name: str) -> str: ...

    def read(self, name: str) -> bytes: ...

    def file_sizes(self, names: list[str]) -> dict[str, int | None]: ...

    def open(self, name: str, *, size: int, header: int, checksum: str) -> FileReader: ...


class LocalFolder:
    """A folder on a disk of this machine, or mounted on it."""

    prefetch_bytes = 0

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def location(self, name: str) -> str:
        return str(self.path / name)

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def file_sizes(self, names: list[str]) -> dict[str, int | None]:
        """Sizes of those files that exist."""
        return {name: (self.path / name).stat().st_size for name in names if (self.path / name).is_file()}

    def open(self, name: str, *, size: int, header: int, checksum: str) -> "MappedFile":
        return MappedFile(self.path / name, header, checksum)


class MappedFile:
    """A memory-mapped file on a disk.

    The first use of its array compares the whole file with its checksum. That costs little: all of it will be
    read anyway, and the checksum takes 2 GB/s."""

    def __init__(self, path: Path, header: int, checksum: str) -> None:
        self.path, self.header, self.checksum, self.is_verified = path, header, checksum, False
        self.content = np.asarray(np.memmap(path, np.uint8, "r"))

    def prefetch(self, start: int, stop: int) -> None:
        pass

    def ensure(self, start: int, stop: int) -> None:
        """Verify the checksum of the file, once. UserError if it is wrong."""
        if self.is_verified or stop <= self.header:
            return
        checksum = crc32_hex(self.content[self.header :].data)
        if checksum != self.checksum:
            raise UserError(
                f"{self.path} has checksum {checksum}, and the index says {self.checksum}; {REMAKE_HINT}"
            )
        self.is_verified = True
