"""Documents from files: a file, a folder (all files of known formats, at any depth), a glob such as
`books/**/*.tex`, or the URL of any of these (gs://, s3://, https://...).

A glob reads every file that it matches, as plain text if the format is not known. Hidden files in a folder
are skipped. A dataset written by Hugging Face's `save_to_disk` is recognized; `path: FOLDER/train` reads one
of its splits."""

import dataclasses
import glob
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import pyarrow as pa

from headrace.data.documents import FilePart, Problems
from headrace.data.formats import PART_BYTES, TABLE_BYTES, Format, arrow, delimited, jsonl, parquet, text
from headrace.data.formats import open as formats_open
from headrace.data.formats.columns import SourceColumns
from headrace.errors import UserError


@dataclass(frozen=True)
class Config:
    path: str  # file, folder, glob pattern or URL of the documents
    text_column: str = "auto"  # column of the text or of the messages; auto: found by its name
    id_column: str | None = None  # column of document ids; null: ids are made of file and row
    meta_columns: str | None = None  # columns to keep with the text, separated by commas; null: none


FORMATS = tuple(cast(Format, format) for format in (jsonl, parquet, delimited, text, arrow))
SUFFIXES = {suffix for format in FORMATS for suffix in format.SUFFIXES}
METADATA_FILES = {"dataset_dict.json", "dataset_info.json", "state.json"}  # of a saved Hugging Face dataset
COMPRESSION_RATIO = 4  # of text, about


def list_parts(cfg: Config) -> list[FilePart]:
    """The parts of all files, in the order of their names. Small files are combined, so that each part is
    worth the overhead of a job."""
    parts: list[FilePart] = []
    small_files: list[str] = []
    room = 0
    for file, size in sorted(find_files(cfg.path).items()):
        file_parts = get_format(cfg.path, file).list_parts(file, size)
        size *= COMPRESSION_RATIO if formats_open.compression_suffix(file) else 1
        if size > room or len(file_parts) > 1:
            parts += join_files(small_files)
            small_files, room = [], PART_BYTES
        if len(file_parts) > 1:
            parts += file_parts
        else:
            small_files.append(file)
            room -= size
    return parts + join_files(small_files)


def read(cfg: Config, part: FilePart, problems: Problems) -> Iterator[pa.Table]:
    """The documents of a part, as tables of about TABLE_BYTES or more."""
    meta = tuple(name.strip() for name in (cfg.meta_columns or "").split(",") if name.strip())
    columns = SourceColumns(cfg.text_column, cfg.id_column, meta)

    def iter_tables() -> Iterator[pa.Table]:
        for piece in (dataclasses.replace(part, more_files=()), *map(FilePart, part.more_files)):
            name = relative_name(cfg.path, piece.file)
            format = get_format(cfg.path, piece.file)
            try:
                yield from format.read(piece, name, columns=columns, problems=problems)
            except UserError as error:
                if problems.policy == "stop":
                    raise
                problems.report("unreadable file", piece.file, str(error).removeprefix(f"{piece.file}: "))

    return merge_small_tables(iter_tables())


def merge_small_tables(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Concatenate consecutive tables up to TABLE_BYTES."""
    pending: list[pa.Table] = []
    size = 0
    for table in tables:
        if pending and size + table.nbytes > TABLE_BYTES:
            yield pa.concat_tables(pending)
            pending, size = [], 0
        pending.append(table)
        size += table.nbytes
    if pending:
        yield pa.concat_tables(pending)


def list_unread(cfg: Config) -> list[str]:
    """Files of a folder that are not read because their format is not known; empty for other paths."""
    is_folder = formats_open.is_url(cfg.path) or os.path.isdir(formats_open.local_path(cfg.path))
    if not is_folder or has_wildcard(cfg.path):
        return []
    files = (
        _find_remote(cfg.path, all_files=True)
        if formats_open.is_url(cfg.path)
        else _find_local(cfg.path, all_files=True)
    )
    return sorted(file for file in files if formats_open.format_suffix(file) not in SUFFIXES)


def find_files(path: str) -> dict[str, int]:
    """The files of a path and their sizes. Each file is given by a path that starts like `path`. Raises
    UserError if there are none."""
    if formats_open.is_url(path):
        sizes = _find_remote(path)
    else:
        sizes = {file: _get_size(file) for file in _find_local(path)}
    if not sizes:
        reason = (
            "matches no file"
            if has_wildcard(path)
            else f"no files of known formats in it; {describe_formats()}"
        )
        raise UserError(f"{path}: {reason}")
    return sizes


def relative_name(path: str, file: str) -> str:
    """The name of a file in ids: relative to the folder, so that moving the texts does not change which of
    them are held out."""
    if file == path:
        return os.path.basename(formats_open.strip_query(file))
    root = path.rstrip("/")
    if not file.startswith(f"{root}/"):
        root = glob_root(path)
    return file[len(root) :].lstrip("/")


def get_format(path: str, file: str) -> Format:
    """The format of a file, by its name; plain text for other files that a glob matches. Raises UserError if
    `path` is this file and its format is not known."""
    suffix = formats_open.format_suffix(file)
    for format in FORMATS:
        # Parquet and Arrow files are compressed inside.
        has_inner_compression = format in (parquet, arrow)
        if suffix in format.SUFFIXES and not (
            has_inner_compression and formats_open.compression_suffix(file)
        ):
            return format
    if file == path and not has_wildcard(path):
        raise UserError(f"{file}: not of a known format; {describe_formats()}")
    return cast(Format, text)


def describe_formats() -> str:
    names = " ".join(suffix for format in FORMATS for suffix in format.SUFFIXES)
    return f"known are {names}, and any other as plain text by a glob such as `FOLDER/*.tex`"


def has_wildcard(path: str) -> bool:
    return bool(
        set(path) & set("*" if formats_open.is_web(path) else "*?[")
    )  # ? starts the query of a web URL


def glob_root(pattern: str) -> str:
    """The folder in which a glob starts: everything before the first component with a wildcard."""
    return "/".join(itertools.takewhile(lambda part: not has_wildcard(part), pattern.split("/")))


def join_files(files: list[str]) -> list[FilePart]:
    """One part for all these files; none if there are no files."""
    return [FilePart(files[0], more_files=tuple(files[1:]))] if files else []


def _find_local(path: str, all_files: bool = False) -> list[str]:
    """The files of a local path; of a folder those that hold data, or all."""
    local = formats_open.local_path(path)
    scheme = path.removesuffix(local)
    if os.path.isfile(local):
        get_format(path, path)  # raises if it is not known
        return [path]
    if os.path.isdir(local):
        files = _walk(local.rstrip("/") or "/")
        return [scheme + file for file in (files if all_files else _select_data(files))]
    if not has_wildcard(local):
        raise UserError(f"{path}: no such file or folder")
    return [scheme + file for file in glob.glob(local, recursive=True) if os.path.isfile(file)]


def _walk(root: str) -> Iterator[str]:
    """Files in a folder that are not hidden, at any depth. Follows links, to each folder once."""
    visited = {os.path.realpath(root)}
    for folder, folders, names in os.walk(root, followlinks=True):
        targets = {name: os.path.realpath(os.path.join(folder, name)) for name in folders if name[0] != "."}
        folders[:] = [name for name, target in targets.items() if target not in visited]
        visited.update(targets.values())
        files = (os.path.join(folder, name) for name in names if name[0] != ".")
        yield from (file for file in files if os.path.isfile(file))  # no pipes, no dangling links


def _find_remote(url: str, all_files: bool = False) -> dict[str, int]:
    """The files of a URL and their sizes; of a folder those that hold data, or all."""
    system, path = formats_open.open_filesystem(url)
    try:
        if has_wildcard(url):
            root, infos = glob_root(url), system.glob(path, detail=True)
        else:
            info = system.info(path)
            # For a web server, a page that lists files looks like a file.
            if info["type"] == "file" and (formats_open.format_suffix(url) or not formats_open.is_web(url)):
                get_format(url, url)
                return {url: info["size"] or 0}
            root, infos = url.rstrip("/"), system.find(path, detail=True)
        start = len(system._strip_protocol(root).rstrip("/"))
        names = {
            f"{root}/{name[start:].lstrip('/')}": name for name in infos if infos[name]["type"] == "file"
        }
        files: Iterable[str] = names
        if not has_wildcard(url):
            files = [file for file in names if "/." not in file[len(root) :]]
            files = files if all_files else _select_data(files)
        return {file: infos[names[file]]["size"] or system.size(names[file]) or 0 for file in files}
    except Exception as error:
        raise formats_open.to_open_error(url, error) from error


def _select_data(files: Iterable[str]) -> list[str]:
    """The files of a known format. Of a dataset saved by Hugging Face only those that hold its rows: the
    folder may also contain metadata, and files of an earlier `map`."""
    files = {file for file in files if formats_open.format_suffix(file) in SUFFIXES}
    folders = {os.path.dirname(file) for file in files if os.path.basename(file) == "state.json"}
    row_files = {
        folder: _list_row_files(folder) for folder in folders if f"{folder}/dataset_info.json" in files
    }
    arrow_folders = {os.path.dirname(file) for file in files if formats_open.format_suffix(file) == ".arrow"}

    def is_data(file: str) -> bool:
        folder, name = os.path.split(file)
        if folder in row_files:
            return name in row_files[folder]
        return name != "dataset_dict.json" and not (folder in arrow_folders and name in METADATA_FILES)

    return [file for file in files if is_data(file)]


def _list_row_files(folder: str) -> set[str]:
    """The names of the files that hold the rows of a saved Hugging Face dataset."""
    file = f"{folder}/state.json"
    try:
        with formats_open.InputStream(file) as stream:
            return {entry["filename"] for entry in json.loads(stream.read_all(1 << 26))["_data_files"]}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{file}: does not list the files of a saved dataset; save it again") from None


def _get_size(file: str) -> int:
    try:
        return os.path.getsize(formats_open.local_path(file))
    except OSError as error:
        raise formats_open.to_open_error(file, error) from error
