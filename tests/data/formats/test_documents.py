"""Documents from files of every format, whole and hostile, and however they are divided."""

import bz2
import contextlib
import functools
import gzip
import http.server
import io
import json
import lzma
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest
import zstandard

from headrace.data.documents import SCHEMA, FilePart, Problems
from headrace.data.formats import PART_BYTES, arrow, jsonl, parquet
from headrace.data.formats.columns import SourceColumns
from headrace.data.sources import files, python_library
from headrace.errors import UserError

TEXTS = ["one", "zwei\nZeilen", "三 行\r\n文本", "🙂 emoji, \"quoted\", 'and' \\ more", "", "tab\tand, comma"]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    ".bz2": functools.partial(bz2.compress, compresslevel=1),
    ".xz": functools.partial(lzma.compress, preset=0),
}


@dataclass(frozen=True)
class Source:
    """What a recipe's section of a source has."""

    path: str
    text_column: str = "auto"
    id_column: str | None = None
    meta_columns: str | None = None


def documents(path: Any, problems: Problems | None = None, **keys: Any) -> list[dict[str, Any]]:
    """All documents of a source, in order, through its parts."""
    cfg = Source(str(path), **keys)
    found = []
    for part in files.list_parts(cfg):
        for table in files.read(cfg, part, problems if problems is not None else Problems()):
            assert table.schema == pa.schema([field for field in SCHEMA if field.name != "source"])
            table.validate(full=True)
            found += table.to_pylist()
    return found


def texts(path: Any, problems: Problems | None = None, **keys: Any) -> list[str]:
    return [document["text"] for document in documents(path, problems, **keys)]


def lines(records: list[Any]) -> bytes:
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


def as_csv(table: dict[str, list[Any]], delimiter: str = ",") -> bytes:
    out = io.BytesIO()
    pa.csv.write_csv(pa.table(table), out, pa.csv.WriteOptions(delimiter=delimiter))
    return out.getvalue()


def as_parquet(table: pa.Table, **options: Any) -> bytes:
    out = io.BytesIO()
    pa.parquet.write_table(table, out, **options)
    return out.getvalue()


def as_stream(table: pa.Table, rows: int = 2) -> bytes:
    out = io.BytesIO()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return out.getvalue()


def as_file(table: pa.Table, rows: int = 2) -> bytes:
    out = io.BytesIO()
    with pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return out.getvalue()


def as_feather(table: pa.Table) -> bytes:
    out = io.BytesIO()
    pa.feather.write_feather(table, out, compression="lz4")
    return out.getvalue()


def table() -> pa.Table:
    return pa.table({"n": list(range(len(TEXTS))), "text": TEXTS})


ROWS = {
    "x.jsonl": lambda: lines([{"n": n, "text": text} for n, text in enumerate(TEXTS)]),
    "x.ndjson": lambda: lines([{"n": n, "text": text} for n, text in enumerate(TEXTS)]),
    "x.json": lambda: json.dumps([{"n": n, "text": text} for n, text in enumerate(TEXTS)], indent=1).encode(),
    "x.csv": lambda: as_csv({"n": list(range(len(TEXTS))), "text": TEXTS}),
    "x.tsv": lambda: as_csv({"n": list(range(len(TEXTS))), "text": TEXTS}, "\t"),
    "x.parquet": lambda: as_parquet(table(), row_group_size=2),
    "x.arrow": lambda: as_stream(table()),
    "y.arrow": lambda: as_file(table()),
    "x.feather": lambda: as_feather(table()),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_every_format_come_back_as_they_were(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(ROWS[name]())
    found = documents(tmp_path / name, meta_columns="n, gone")
    assert [document["text"] for document in found] == TEXTS
    assert all(document["messages"] is None for document in found)
    number = str if name[-3:] in ("csv", "tsv") else int  # these have no types
    assert [json.loads(document["meta"]) for document in found] == [
        {"n": number(n), "gone": None} for n in range(len(TEXTS))
    ]
    mark = "@" if name in ("x.jsonl", "x.ndjson") else ":"
    assert [document["id"].rpartition(mark)[0] for document in found] == [name] * len(TEXTS)
    assert len({document["id"] for document in found}) == len(TEXTS)
    assert [document["id"] for document in documents(tmp_path / name, id_column="n")] == list("012345")
    assert {document["meta"] for document in documents(tmp_path / name)} == {None}


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv"])
def test_compressed_rows_have_the_texts_of_the_others(name: str, suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}{suffix}").write_bytes(COMPRESS[suffix](ROWS[name]()))
    assert texts(tmp_path / f"{name}{suffix}") == TEXTS


@pytest.mark.parametrize("suffix", COMPRESS)
def test_several_compressed_streams_end_to_end_are_one_file(suffix: str, tmp_path: Path) -> None:
    content = lines([{"text": text} for text in TEXTS * 50])
    pieces = [content[start : start + 777] for start in range(0, len(content), 777)]
    (tmp_path / f"x.jsonl{suffix}").write_bytes(b"".join(map(COMPRESS[suffix], pieces)))
    assert texts(tmp_path / f"x.jsonl{suffix}") == TEXTS * 50


def test_ids_of_lines_are_where_they_begin(tmp_path: Path) -> None:
    content = lines([{"text": text} for text in TEXTS]).replace(b"\n", b"\r\n")
    (tmp_path / "x.jsonl").write_bytes(b"\xef\xbb\xbf" + content)
    starts = [0, *[found.end() + 3 for found in re.finditer(rb"\n", content)][:-1]]
    found = documents(tmp_path / "x.jsonl")
    assert [document["id"] for document in found] == [f"x.jsonl@{start}" for start in starts]
    assert [document["text"] for document in found] == TEXTS


def test_ids_of_rows_are_their_numbers(tmp_path: Path) -> None:
    for name in ("x.json", "x.csv", "x.parquet", "x.arrow"):
        (tmp_path / name).write_bytes(ROWS[name]())
        assert [d["id"] for d in documents(tmp_path / name)] == [f"{name}:{row}" for row in range(1, 7)]


def test_text_files_are_documents_named_after_them(tmp_path: Path) -> None:
    for name in ("a.txt", "sub/b.md", "sub/c.PY", "sub/d.rst.gz", "e.png", ".hidden/f.txt", ".g.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        content = f"Grüße aus {name}\r\n".encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    found = {document["id"]: document["text"] for document in documents(tmp_path)}
    names = ("a.txt", "sub/b.md", "sub/c.PY", "sub/d.rst.gz")
    assert found == {name: f"Grüße aus {name}\r\n" for name in names}


def test_moving_a_folder_does_not_change_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "one" / "corpus"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "x.jsonl").write_bytes(ROWS["x.jsonl"]())
    (folder / "a.txt").write_text("a")
    before = documents(folder)
    assert before[0]["id"] == "a.txt" and before[1]["id"] == "sub/x.jsonl@0"
    moved = folder.rename(tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    for path in (
        moved,
        "other",
        "other/",
        "./other",
        f"file://{moved}",
        "other/**/*.*",
        f"file://{moved}/**/*",
    ):
        assert documents(path) == before, path


def test_a_glob_takes_what_it_matches_as_text_if_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "[odd] name").mkdir()
    (tmp_path / "[odd] name" / "a.tex").write_text("tex")
    (tmp_path / "[odd] name" / "b.jsonl").write_bytes(lines([{"text": "json"}]))
    assert texts(f"{tmp_path}/*/*.*") == ["tex", "json"]
    assert texts(tmp_path / "[odd] name") == ["json"]


def test_missing_paths_are_reported(tmp_path: Path) -> None:
    (tmp_path / "x.docx").write_text("x")
    for path, message in {
        tmp_path / "gone": "gone: no such file or folder",
        tmp_path / "*.txt": r"\*.txt: matches no file",
        tmp_path: r"no files of known formats in it; known are .jsonl .*\.parquet",
        tmp_path / "x.docx": r"x.docx: not of a known format; known are .*\.csv.*glob",
        "nosuch://bucket/x.jsonl": "nosuch://bucket/x.jsonl: .*nosuch",
        "memory://gone/x.jsonl": "memory://gone/x.jsonl: no such file",
    }.items():
        with pytest.raises(UserError, match=message):
            documents(path)


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.txt").write_text("a")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "link").symlink_to(tmp_path / "real")
    (tmp_path / "corpus" / "circle").symlink_to(tmp_path / "corpus")
    assert [document["id"] for document in documents(tmp_path / "corpus")] == ["link/a.txt"]


def test_the_python_library_is_a_source() -> None:
    @dataclass(frozen=True)
    class Library(python_library.Config):
        column: str = "auto"

    (part,) = python_library.list_parts(Library(1))
    found = pa.concat_tables(python_library.read(Library(1), part, Problems())).to_pylist()
    assert 800_000 < sum(len(document["text"].encode()) for document in found) <= 1_000_000
    assert all(document["id"].endswith(".py") for document in found)


def test_ranges_of_any_size_give_the_lines_of_the_file(tmp_path: Path) -> None:
    ends = ["\n", "\r\n", "\n\n", "\r\n \r\n"]
    content = "".join(
        json.dumps({"text": text * (n % 3)}, ensure_ascii=False) + ends[n % 4]
        for n, text in enumerate(TEXTS * 2)
    )
    for variant in (content.encode(), content.rstrip().encode()):
        (tmp_path / "x.jsonl").write_bytes(variant)
        whole = documents(tmp_path / "x.jsonl")
        assert [document["text"] for document in whole] == [
            text * (n % 3) for n, text in enumerate(TEXTS * 2)
        ]
        for size in range(1, 201):
            found = []
            for start in range(0, len(variant), size):
                part = FilePart(str(tmp_path / "x.jsonl"), start, min(start + size, len(variant)))
                for table in jsonl.read(part, "x.jsonl", columns=SourceColumns(), problems=Problems()):
                    found += table.to_pylist()
            assert found == whole, size


def test_blocks_of_any_size_give_the_lines_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [{"text": text * (n % 5)} for n, text in enumerate(TEXTS * 5)]
    (tmp_path / "x.jsonl").write_bytes(lines(records))
    whole = documents(tmp_path / "x.jsonl")
    for size in (16, 17, 31, 64, 1000):
        monkeypatch.setattr(jsonl, "BLOCK_BYTES", size)
        assert documents(tmp_path / "x.jsonl") == whole


def test_large_files_are_divided_and_small_ones_go_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert jsonl.PART_BYTES == PART_BYTES
    monkeypatch.setattr(jsonl, "PART_BYTES", 20_000_000)
    line = lines([{"text": "x" * 1_000_000}])
    (tmp_path / "b.jsonl").write_bytes(line * 45)
    for name in ("a0.txt", "a1.jsonl", "c0.txt", "c1.csv"):
        (tmp_path / name).write_text("text\nx\n" if name.endswith("csv") else '{"text": "x"}\n')
    found = files.list_parts(Source(str(tmp_path)))
    assert [(Path(part.file).name, len(part.more_files)) for part in found] == [
        ("a0.txt", 1), ("b.jsonl", 0), ("b.jsonl", 0), ("c0.txt", 1),
    ]  # fmt: skip
    assert [(part.start, part.stop) for part in found[1:3]] == [(0, 20_000_000), (20_000_000, len(line) * 45)]
    tables = [table for part in found for table in files.read(Source(str(tmp_path)), part, Problems())]
    assert max(table.nbytes for table in tables) < 18e6
    assert sum(len(table) for table in tables) == 49


def test_parts_of_row_groups_and_batches_number_rows_as_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for format in (parquet, arrow):
        monkeypatch.setattr(format, "PART_BYTES", 700_000)
    values = pa.table({"text": [f"row {n} " + "x" * 20_000 for n in range(100)]})
    (tmp_path / "x.parquet").write_bytes(as_parquet(values, row_group_size=7, compression="none"))
    (tmp_path / "x.arrow").write_bytes(as_stream(values, 7))
    (tmp_path / "y.arrow").write_bytes(as_file(values, 7))
    for name in ("x.parquet", "x.arrow", "y.arrow"):
        divided = files.list_parts(Source(str(tmp_path / name)))
        assert len(divided) == 3
        found = {}
        for part in divided:
            for table in files.read(Source(str(tmp_path / name)), part, Problems()):
                found |= {row["id"]: row["text"].partition("x")[0] for row in table.to_pylist()}
        assert found == {f"{name}:{n + 1}": f"row {n} " for n in range(100)}


CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello ☺"}]


def test_the_text_column_is_found(tmp_path: Path) -> None:
    for record, expected in [
        ({"content": "c", "text": "t"}, "t"),
        ({"content": "c", "title": "x"}, "c"),
        ({"question": "q", "answer": "a", "text": "t"}, "t"),
    ]:
        (tmp_path / "x.jsonl").write_bytes(lines([record]))
        (tmp_path / "x.parquet").write_bytes(as_parquet(pa.Table.from_pylist([record])))
        assert texts(tmp_path / "x.jsonl") == texts(tmp_path / "x.parquet") == [expected]
    record = {"body": "b", "key": "k", "title": "t"}
    (tmp_path / "x.jsonl").write_bytes(lines([record]))
    (tmp_path / "x.parquet").write_bytes(as_parquet(pa.Table.from_pylist([record])))
    for name in ("x.jsonl", "x.parquet"):
        with pytest.raises(
            UserError, match=r"found body, key, title, expected .*choose one with `text_column`"
        ):
            documents(tmp_path / name)
        assert texts(tmp_path / name, text_column="title") == ["t"]
        (found,) = documents(tmp_path / name, text_column="body", id_column="key", meta_columns="title")
        assert found == {"id": "k", "text": "b", "messages": None, "meta": '{"title":"t"}'}
    (tmp_path / "x.parquet").write_bytes(as_parquet(pa.table({"body": ["b"], "n": [1]})))
    assert texts(tmp_path / "x.parquet") == ["b"]  # a table's only column of strings


def test_conversations_become_messages_in_every_format(tmp_path: Path) -> None:
    both = [{"role": "user", "content": "Add\n\n1 2"}, {"role": "assistant", "content": "3"}]
    for record, expected in [
        ({"messages": CHAT}, CHAT),
        ({"messages": CHAT, "text": "as one text"}, CHAT),
        ({"instruction": "Add", "input": "1 2", "output": "3", "text": "as one text"}, both),
        ({"text": None, "messages": CHAT}, CHAT),
        ({"instruction": "Add", "input": "1 2", "output": "3"}, both),
        ({"prompt": "Add\n\n1 2", "completion": "3"}, both),
    ]:
        (tmp_path / "x.jsonl").write_bytes(lines([record, record]))
        (tmp_path / "x.json").write_text(json.dumps([record, record]))
        (tmp_path / "x.parquet").write_bytes(as_parquet(pa.Table.from_pylist([record, record])))
        (tmp_path / "x.arrow").write_bytes(as_stream(pa.Table.from_pylist([record, record])))
        names = ["x.jsonl", "x.json", "x.parquet", "x.arrow"]
        if "messages" not in record:
            (tmp_path / "x.csv").write_bytes(as_csv({key: [value] * 2 for key, value in record.items()}))
            names.append("x.csv")
        for name in names:
            found = documents(tmp_path / name)
            assert [document["text"] for document in found] == [None, None]
            assert [json.loads(document["messages"]) for document in found] == [expected] * 2
    (tmp_path / "x.jsonl").write_bytes(lines([{"text": "t", "talk": CHAT}]))
    assert json.loads(documents(tmp_path / "x.jsonl", text_column="talk")[0]["messages"]) == CHAT


def test_texts_and_conversations_may_be_mixed(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(lines([{"text": "a"}, {"messages": CHAT}, {"text": "b"}]))
    records = [
        {"text": "a", "messages": None},
        {"text": None, "messages": CHAT},
        {"text": "b", "messages": None},
    ]
    (tmp_path / "x.parquet").write_bytes(as_parquet(pa.Table.from_pylist(records)))
    for name in ("x.jsonl", "x.parquet"):
        assert texts(tmp_path / name) == ["a", None, "b"]


def test_strings_of_every_arrow_type_are_text(tmp_path: Path) -> None:
    column = pa.array(["ä", "b", "ä"])
    for type in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.string_view()):
        (tmp_path / "x.arrow").write_bytes(as_file(pa.table({"text": column.cast(type)})))
        assert texts(tmp_path / "x.arrow") == ["ä", "b", "ä"]
    (tmp_path / "x.arrow").write_bytes(as_file(pa.table({"text": column.dictionary_encode()}), rows=9))
    assert texts(tmp_path / "x.arrow") == ["ä", "b", "ä"]
    (tmp_path / "x.parquet").write_bytes(as_parquet(pa.table({"text": column.dictionary_encode()})))
    assert texts(tmp_path / "x.parquet") == ["ä", "b", "ä"]


def test_ids_of_every_type_become_strings(tmp_path: Path) -> None:
    values = ["a", 7, 1.5, True, 2**63]
    (tmp_path / "x.jsonl").write_bytes(lines([{"text": "x", "key": value} for value in values]))
    assert [d["id"] for d in documents(tmp_path / "x.jsonl", id_column="key")] == [
        "a",
        "7",
        "1.5",
        "true",
        str(2**63),
    ]
    (tmp_path / "x.jsonl").write_bytes(lines([{"text": "x", "key": 10**30}]))
    with pytest.raises(UserError, match=r"x.jsonl:1: column key is 1e.30, too long a number"):
        documents(tmp_path / "x.jsonl", id_column="key")


class Plain(http.server.SimpleHTTPRequestHandler):
    """Sends whole files only."""

    def log_message(self, *args: Any) -> None:
        pass


class Ranges(Plain):
    """Sends the range that is asked for, and counts the bytes it sends."""

    sent = 0

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not asked or not path.is_file():
            return super().do_GET()
        content = path.read_bytes()
        first, last = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("Content-Length", str(last - first + 1))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(content[first : last + 1])
        Ranges.sent += last - first + 1


@contextlib.contextmanager
def server(folder: Path, handler: type) -> Iterator[str]:
    make = functools.partial(handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), make) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{serving.server_port}"
        finally:
            serving.shutdown()
            thread.join()


@pytest.mark.parametrize("handler", [Plain, Ranges])
def test_files_of_a_web_server_are_like_local_ones(handler: type, tmp_path: Path) -> None:
    for name, make in ROWS.items():
        (tmp_path / name).write_bytes(make())
    (tmp_path / "x.jsonl.zst").write_bytes(COMPRESS[".zst"](ROWS["x.jsonl"]()))
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "a"}\n\nbad\n')
    with server(tmp_path, handler) as url:
        for name in [*ROWS, "x.jsonl.zst"]:
            assert documents(f"{url}/{name}", meta_columns="n") == documents(
                tmp_path / name, meta_columns="n"
            )
        assert documents(f"{url}/x.parquet?download=true") == documents(tmp_path / "x.parquet")
        with pytest.raises(UserError, match=r"bad.jsonl:3: not JSON"):
            documents(f"{url}/bad.jsonl")
        with pytest.raises(UserError, match=r"gone.jsonl: cannot be opened: .*404"):
            documents(f"{url}/gone.jsonl")
    with pytest.raises(UserError, match=r"x.jsonl: cannot be opened"):
        documents(f"{url}/x.jsonl")


@pytest.mark.parametrize("handler", [Plain, Ranges])
def test_a_large_file_of_a_web_server_is_divided_if_it_can_be(
    handler: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "PART_BYTES", 1_000_000)
    (tmp_path / "x.jsonl").write_bytes(lines([{"text": "é" * 10_000}]) * 100 + b'{"text": 1}\n')
    with server(tmp_path, handler) as url:
        found = files.list_parts(Source(f"{url}/x.jsonl"))
        size = (tmp_path / "x.jsonl").stat().st_size
        assert [(part.start, part.stop) for part in found] == (
            [(0, None)] if handler is Plain else [(0, 1_000_000), (1_000_000, size)]
        )
        problems = Problems("skip")
        there = documents(f"{url}/x.jsonl", problems)
        assert problems.samples[0].startswith(f"{url}/x.jsonl:101: ")
        assert there == documents(tmp_path / "x.jsonl", Problems("skip")) and len(there) == 100


def test_folders_and_globs_elsewhere_are_like_local_ones(tmp_path: Path) -> None:
    system = fsspec.filesystem("memory")
    for name in (
        "corpus/a.txt",
        "corpus/sub/x.jsonl",
        "corpus/sub/x.parquet",
        "corpus/sub/.y.txt",
        "corpus/z.bin",
    ):
        content = ROWS[Path(name).name]() if Path(name).name in ROWS else name.encode()
        system.pipe(f"/{name}", content)
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(content)
    try:
        assert documents("memory://corpus") == documents(tmp_path / "corpus")
        assert documents("memory://corpus/") == documents(tmp_path / "corpus")
        assert documents("memory://corpus/a.txt") == documents(tmp_path / "corpus" / "a.txt")
        assert documents("memory://corpus/sub/*.jsonl") == documents(tmp_path / "corpus/sub/*.jsonl")
        assert documents("memory://corpus/**/*.*l*") == documents(tmp_path / "corpus/**/*.*l*")
        with pytest.raises(UserError, match=r"memory://corpus/z.bin: not of a known format"):
            documents("memory://corpus/z.bin")
        with pytest.raises(UserError, match=r"memory://corpus/\*.gone: matches no file"):
            documents("memory://corpus/*.gone")
    finally:
        system.rm("/corpus", recursive=True)


def saved(folder: Path, count: int) -> list[str]:
    """A folder as Hugging Face's Dataset.save_to_disk leaves it, and a file of an earlier map."""
    folder.mkdir(parents=True)
    values = [f"{folder.name} {n}" for n in range(count)]
    names = [f"data-{n:05}-of-00002.arrow" for n in range(2)]
    for name, some in zip(names, np.array_split(np.array(values), 2), strict=True):
        (folder / name).write_bytes(as_stream(pa.table({"text": some})))
    (folder / "cache-0123456789abcdef.arrow").write_bytes(as_stream(pa.table({"text": ["stale"]})))
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names]}, indent=2)
    )
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}, indent=2))
    return values


def test_a_saved_hugging_face_dataset_is_recognised(tmp_path: Path) -> None:
    test, train = saved(tmp_path / "all" / "test", 3), saved(tmp_path / "all" / "train", 5)
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert texts(tmp_path / "all") == test + train
    assert texts(tmp_path / "all" / "train") == train
    assert documents(tmp_path / "all")[3]["id"] == "train/data-00000-of-00002.arrow:1"
    (tmp_path / "all" / "train" / "state.json").write_text("{}")
    with pytest.raises(UserError, match=r"train/state.json: does not list the files"):
        documents(tmp_path / "all")
