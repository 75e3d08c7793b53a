"""Documents from files: a file, a folder (all files of known formats, at any depth), a glob such as
`books/**/*.tex`, or the URL of any of these (gs://, s3://, https://...). A glob takes what it matches, and
what is of no known format as plain text. Of a folder, hidden files are left out; a dataset that Hugging
Face's `save_to_disk` wrote is recognised, and `path: FOLDER/train` takes one split of it."""

import dataclasses
import glob
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from headrace.data.documents import Part, Problems
from headrace.data.formats import PART, TABLE, arrow, delimited, jsonl, parquet, open as storage, text
from headrace.data.formats.columns import Wanted
from headrace.errors import UserError


@dataclass(frozen=True)
class Config:
    path: str
    column: str = "auto"  # what holds the text or the messages
    id: str | None = None  # the column of ids; without, they are made of file and row
    meta: str | None = None  # columns to keep beside the text, with commas between


FORMATS: tuple[Any, ...] = (jsonl, parquet, delimited, text, arrow)
SUFFIXES = {suffix for format in FORMATS for suffix in format.SUFFIXES}
NOTES = {"dataset_dict.json", "dataset_info.json", "state.json"}  # beside the data of a saved dataset
EXPANSION = 4  # times that text is about as long as when compressed


def parts(cfg: Any) -> list[Part]:
    """In the order of the files' names. Small files go together, lest each becomes a unit of work."""
    found: list[Part] = []
    together: list[str] = []
    room = 0
    for file, size in sorted(find(cfg.path).items()):
        pieces = format_of(cfg.path, file).parts(file, size)
        size *= EXPANSION if storage.compression(file) else 1
        if size > room or len(pieces) > 1:
            found += joined(together)
            together, room = [], PART
        if len(pieces) > 1:
            found += pieces
        else:
            together.append(file)
            room -= size
    return found + joined(together)


def read(cfg: Any, part: Part, problems: Problems) -> Iterator[pa.Table]:
    meta = tuple(name.strip() for name in (cfg.meta or "").split(",") if name.strip())
    wanted = Wanted(cfg.column, cfg.id, meta)

    def tables() -> Iterator[pa.Table]:
        for piece in (dataclasses.replace(part, more=()), *map(Part, part.more)):
            name = relative(cfg.path, piece.file)
            try:
                yield from format_of(cfg.path, piece.file).read(piece, name, wanted=wanted, problems=problems)
            except UserError as error:
                if problems.policy == "stop":
                    raise
                problems.bad("unreadable file", piece.file, str(error).removeprefix(f"{piece.file}: "))

    return gathered(tables())


def gathered(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Small tables put together until they hold about 16 MB."""
    held: list[pa.Table] = []
    size = 0
    for table in tables:
        if held and size + table.nbytes > TABLE:
            yield pa.concat_tables(held)
            held, size = [], 0
        held.append(table)
        size += table.nbytes
    if held:
        yield pa.concat_tables(held)


def left_out(cfg: Any) -> list[str]:
    """Files of a folder that are not read, since their format is not known."""
    is_folder = storage.is_url(cfg.path) or os.path.isdir(storage.local_path(cfg.path))
    if not is_folder or has_wildcard(cfg.path):
        return []
    files = _find_url(cfg.path, every=True) if storage.is_url(cfg.path) else _find_local(cfg.path, every=True)
    return sorted(file for file in files if storage.suffix(file) not in SUFFIXES)


def find(path: str) -> dict[str, int]:
    """The files that a path means, each by a path that begins like the one given, and their sizes."""
    if storage.is_url(path):
        found = _find_url(path)
    else:
        found = {file: _size(file) for file in _find_local(path)}
    if not found:
        what = "matches no file" if has_wildcard(path) else f"no files of known formats in it; {known()}"
        raise UserError(f"{path}: {what}")
    return found


def relative(path: str, file: str) -> str:
    """The name of a file in ids: seen from the folder, so that moving the texts does not change who is held
    out."""
    if file == path:
        return os.path.basename(storage.bare(file))
    root = path.rstrip("/")
    if not file.startswith(f"{root}/"):
        root = fixed_part(path)
    return file[len(root) :].lstrip("/")


def format_of(path: str, file: str) -> Any:
    """The format that a file's name tells. What a glob matches is plain text if nothing else."""
    suffix = storage.suffix(file)
    for format in FORMATS:
        # Tables compress themselves.
        if suffix in format.SUFFIXES and not (format in (parquet, arrow) and storage.compression(file)):
            return format
    if file == path and not has_wildcard(path):
        raise UserError(f"{file}: not of a known format; {known()}")
    return text


def known() -> str:
    names = " ".join(suffix for format in FORMATS for suffix in format.SUFFIXES)
    return f"known are {names}, and any other as plain text by a glob such as `FOLDER/*.tex`"


def has_wildcard(path: str) -> bool:
    return bool(set(path) & set("*" if storage.is_web(path) else "*?["))  # ? begins the query of a URL


def fixed_part(pattern: str) -> str:
    """The folder that a glob starts from: everything before the first part with a wildcard."""
    return "/".join(itertools.takewhile(lambda part: not has_wildcard(part), pattern.split("/")))


def joined(files: list[str]) -> list[Part]:
    return [Part(files[0], more=tuple(files[1:]))] if files else []


def _find_local(path: str, every: bool = False) -> list[str]:
    """Of a folder those that hold data or, on wish, every one."""
    place = storage.local_path(path)
    scheme = path.removesuffix(place)
    if os.path.isfile(place):
        format_of(path, path)  # tells if it is unknown
        return [path]
    if os.path.isdir(place):
        files = _walk(place.rstrip("/") or "/")
        return [scheme + file for file in (files if every else _data(files))]
    if not has_wildcard(place):
        raise UserError(f"{path}: no such file or folder")
    return [scheme + file for file in glob.glob(place, recursive=True) if os.path.isfile(file)]


def _walk(root: str) -> Iterator[str]:
    """All files in a folder that are not hidden, by links too, though in no circles."""
    seen = {os.path.realpath(root)}
    for folder, folders, names in os.walk(root, followlinks=True):
        inner = {name: os.path.realpath(os.path.join(folder, name)) for name in folders if name[0] != "."}
        folders[:] = [name for name, place in inner.items() if place not in seen]
        seen.update(inner.values())
        places = (os.path.join(folder, name) for name in names if name[0] != ".")
        yield from (place for place in places if os.path.isfile(place))  # no pipes, no links to nowhere


def _find_url(path: str, every: bool = False) -> dict[str, int]:
    system, place = storage.filesystem(path)
    try:
        if has_wildcard(path):
            root, found = fixed_part(path), system.glob(place, detail=True)
        else:
            info = system.info(place)
            # A web server does not tell a page that lists files from a file.
            if info["type"] == "file" and (storage.suffix(path) or not storage.is_web(path)):
                format_of(path, path)
                return {path: info["size"] or 0}
            root, found = path.rstrip("/"), system.find(place, detail=True)
        start = len(system._strip_protocol(root).rstrip("/"))
        names = {
            f"{root}/{name[start:].lstrip('/')}": name for name in found if found[name]["type"] == "file"
        }
        kept: Iterable[str] = names
        if not has_wildcard(path):
            kept = [file for file in names if "/." not in file[len(root) :]]
            kept = kept if every else _data(kept)
        return {file: found[names[file]]["size"] or system.size(names[file]) or 0 for file in kept}
    except Exception as error:
        raise storage.unreadable(path, error) from error


def _data(files: Iterable[str]) -> list[str]:
    """Those of a known format. Of a dataset saved by Hugging Face those that hold its rows: files that an
    earlier `map` left there, and notes, do not."""
    files = {file for file in files if storage.suffix(file) in SUFFIXES}
    folders = {os.path.dirname(file) for file in files if os.path.basename(file) == "state.json"}
    rows = {folder: _saved(folder) for folder in folders if f"{folder}/dataset_info.json" in files}
    tables = {os.path.dirname(file) for file in files if storage.suffix(file) == ".arrow"}

    def is_data(file: str) -> bool:
        folder, name = os.path.split(file)
        if folder in rows:
            return name in rows[folder]
        return name != "dataset_dict.json" and not (folder in tables and name in NOTES)

    return [file for file in files if is_data(file)]


def _saved(folder: str) -> set[str]:
    file = f"{folder}/state.json"
    try:
        with storage.Stream(file) as stream:
            return {entry["filename"] for entry in json.loads(stream.read_all(1 << 26))["_data_files"]}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{file}: does not list the files of a saved dataset; save it again") from None


def _size(file: str) -> int:
    try:
        return os.path.getsize(storage.local_path(file))
    except OSError as error:
        raise storage.unreadable(file, error) from error
