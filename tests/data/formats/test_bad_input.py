"""Bad input in files of every format: reported with its location, or skipped and counted."""

import gzip
import os
import re
import resource
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from headrace.data.documents import FilePart, Problems
from headrace.data.formats import delimited, jsonl, text
from headrace.data.formats.columns import SourceColumns
from headrace.errors import UserError
from tests.data.formats.test_documents import (
    COMPRESS,
    ROWS,
    TEXTS,
    as_csv,
    as_file,
    as_parquet,
    as_stream,
    documents,
    lines,
    table,
    texts,
)


def skipped(path: Path, **keys: str) -> tuple[list[str], dict[str, int], list[str]]:
    """The remaining texts with `on_error: skip`, the counts, and the samples of the report."""
    problems = Problems("skip")
    return texts(path, problems, **keys), dict(problems.counts), problems.samples


BAD_LINES = {
    b'{"text": "cut': ("bad JSON", "not JSON"),
    b"nonsense": ("bad JSON", "not JSON"),
    b"[" * 100_000: ("bad JSON", "not JSON"),
    b'["text"]': ("not an object", "found a list, expected an object"),
    b"3": ("not an object", "found a number"),
    b'"text"': ("not an object", "found text, expected"),
    b"null": ("not an object", "found null"),
    b'{"txet": "x", "n": 1, "m": "y"}': ("missing column", "found txet, n, m, expected"),
    b'{"text": null}': ("missing column", "column text is null"),
    b'{"text": 3}': ("missing column", "column text is a number"),
    b'{"text": {}}': ("missing column", "column text is an object"),
    b'{"text": "a\xff"}': ("not UTF-8", "not UTF-8 at byte 12 of the line"),
    b'{"text": "\xed\xa0\x80"}': ("not UTF-8", "not UTF-8 at byte 11"),
    b'{"text": "a\\ud800b"}': ("lone surrogate", "half a surrogate pair at its character 1"),
    b'{"messages": [{"role": "user", "content": "\\udc00"}]}': (
        "bad messages",
        "no message of the assistant",
    ),
    b'{"messages": []}': ("bad messages", "no messages"),
}


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:20].decode("latin-1"))
def test_a_bad_line_is_reported_with_its_number_or_skipped(line: bytes, tmp_path: Path) -> None:
    kind, message = BAD_LINES[line]
    good = lines([{"text": "first"}]) + b"\n \r\n"
    for name, content in {
        "x.jsonl": good + line + b"\n" + lines([{"text": "last"}]),
        "x.jsonl.gz": gzip.compress(good + line + b"\n" + lines([{"text": "last"}])),
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"{re.escape(name)}:4: .*{message}.*on_error: skip"):
            documents(tmp_path / name)
        found, counts, samples = skipped(tmp_path / name)
        assert found == ["first", "last"] and counts == {kind: 1}
        assert samples[0].startswith(f"{tmp_path / name}:4: ") and message in samples[0]


def test_lines_are_numbered_from_the_beginning_in_every_range(tmp_path: Path) -> None:
    content = b"".join(b'{"text": "good"}\n' * 3 + b'{"text": 1}\n' for _ in range(9))
    (tmp_path / "x.jsonl").write_bytes(content)
    for size in (5, 40, 100):
        places: list[str] = []
        for start in range(0, len(content), size):
            problems = Problems("skip")
            part = FilePart(str(tmp_path / "x.jsonl"), start, start + size)
            list(jsonl.read(part, "x", columns=SourceColumns(), problems=problems))
            places += [sample.split(": ")[0] for sample in problems.samples]
        assert places == [f"{tmp_path}/x.jsonl:{4 * n}" for n in range(1, 10)]


def test_a_missing_column_is_reported_with_the_closest_name(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(lines([{"contents": "x", "url": "y"}]))
    (tmp_path / "x.csv").write_bytes(as_csv({"contents": ["x"], "url": ["y"]}))
    (tmp_path / "x.parquet").write_bytes(as_parquet(pa.table({"contents": ["x"], "url": ["y"]})))
    (tmp_path / "x.arrow").write_bytes(as_file(pa.table({"contents": ["x"], "url": ["y"]})))
    for name in ("x.jsonl", "x.csv", "x.parquet", "x.arrow"):
        with pytest.raises(
            UserError, match=r"no column content, found contents, url \(did you mean contents\?\)"
        ):
            documents(tmp_path / name, text_column="content")
        with pytest.raises(UserError, match="no column key, found contents, url;"):
            documents(tmp_path / name, text_column="contents", id_column="key")
        assert skipped(tmp_path / name, text_column="content")[:2] == ([], {"missing column": 1})


def test_nan_in_another_column_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "a", "score": NaN}\n{"text": "b", "score": 2}\n')
    assert [d["meta"] for d in documents(tmp_path / "x.jsonl", meta_columns="score")] == [
        '{"score":null}',
        '{"score":2}',
    ]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_cut_compressed_file_gives_what_came_before(suffix: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    values = [random.bytes(500).hex() for _ in range(1500)]
    for name, content in {
        "x.jsonl": lines([{"text": value} for value in values]),
        "x.csv": as_csv({"n": list(range(1500)), "text": values}),
    }.items():
        intact = COMPRESS[suffix](content)
        (tmp_path / f"{name}{suffix}").write_bytes(intact[: len(intact) * 3 // 4])
        with pytest.raises(UserError, match=f"{name}{suffix}.*: ends in the middle of its compressed data"):
            documents(tmp_path / f"{name}{suffix}")
        found, counts, samples = skipped(tmp_path / f"{name}{suffix}")
        assert counts == {"truncated file": 1}
        assert found == values[: len(found)] and len(found) > 750
        location = f":{len(found) + 1}" if name == "x.jsonl" else f", row {len(found) + 1}"
        assert samples[0].startswith(f"{tmp_path}/{name}{suffix}{location}: ")
        (tmp_path / f"{name}{suffix}").write_bytes(intact[:100] + bytes(50) + intact[150:])
        assert skipped(tmp_path / f"{name}{suffix}")[1].keys() & {
            "damaged file",
            "bad JSON",
            "truncated file",
        }
    (tmp_path / f"x.txt{suffix}").write_bytes(COMPRESS[suffix](b"text" * 100)[:-3])
    assert skipped(tmp_path / f"x.txt{suffix}")[:2] == ([], {"truncated file": 1})
    (tmp_path / f"y.jsonl{suffix}").write_bytes(b"this is not compressed at all")
    assert skipped(tmp_path / f"y.jsonl{suffix}")[:2] == ([], {"damaged file": 1})


@pytest.mark.parametrize("name", [*ROWS, "x.jsonl.gz", "x.csv.zst"])
def test_an_empty_file_is_reported(name: str, tmp_path: Path) -> None:
    content = (
        COMPRESS[name[-3:] if name.endswith("gz") else ".zst"](b"") if name.endswith(("gz", "zst")) else b""
    )
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{re.escape(name)}: holds no"):
        documents(tmp_path / name)
    assert skipped(tmp_path / name)[:2] == ([], {"empty file": 1})


def test_tables_without_rows_are_reported(tmp_path: Path) -> None:
    empty = table().slice(0, 0)
    for name, content in {
        "x.parquet": as_parquet(empty),
        "x.arrow": as_stream(empty),
        "y.arrow": as_file(empty),
        "x.csv": b"n,text\n",
        "y.csv": b"n,text",
        "x.jsonl": b"\n \r\n",
        "x.json": b"[ ]",
    }.items():
        (tmp_path / name).write_bytes(content)
        assert skipped(tmp_path / name)[:2] == ([], {"empty file": 1}), name


def test_an_empty_text_is_an_empty_document(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_bytes(b"")
    assert texts(tmp_path) == [""]


def test_text_that_is_not_utf8_is_reported_with_line_and_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("Zeile\nGrüße".encode("latin-1"))
    (tmp_path / "b.txt").write_bytes("\ufeffGrüße".encode())
    with pytest.raises(UserError, match=r"a.txt:2: not UTF-8 at byte 8 of the file"):
        documents(tmp_path)
    assert skipped(tmp_path)[:2] == (["Grüße"], {"not UTF-8": 1})


def test_a_text_file_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "MAX_BYTES", 1000)
    (tmp_path / "a.txt").write_text("x" * 1000)
    (tmp_path / "b.txt").write_text("x" * 1001)
    found, counts, _ = skipped(tmp_path)
    assert found == ["x" * 1000] and counts == {"file too long": 1}


def test_a_line_that_is_too_long_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 5000)
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 512)
    content = lines(
        [{"text": "a"}, {"text": "x" * 20_000}, {"text": "b"}, {"text": "y" * 4_000}, {"text": 1}]
    )
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=r"x.jsonl:2: a line of more than"):
        documents(tmp_path / "x.jsonl")
    found, counts, samples = skipped(tmp_path / "x.jsonl")
    assert found == ["a", "b", "y" * 4000] and counts == {"line too long": 1, "missing column": 1}
    assert ["x.jsonl:5: " in sample for sample in samples] == [False, True]
    for size in (1000, 3000, 7000):  # the part in which it starts reports it
        problems, ids = Problems("skip"), []
        for start in range(0, len(content), size):
            part = FilePart(str(tmp_path / "x.jsonl"), start, start + size)
            for batch in jsonl.read(part, "x.jsonl", columns=SourceColumns(), problems=problems):
                ids += batch["text"].to_pylist()
        assert ids == found and problems.counts == counts


@pytest.mark.slow
def test_a_line_of_a_gigabyte_does_not_fill_the_memory(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "x.jsonl.gz", "wb", compresslevel=1) as file:
        file.write(b'{"text": "a"}\n{"text": "')
        for _ in range(1 << 10):
            file.write(b"x" * (1 << 20))
        file.write(b'"}\n{"text": "b"}\n')
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert skipped(tmp_path / "x.jsonl.gz")[:2] == (["a", "b"], {"line too long": 1})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 700_000  # KB


def test_rows_of_another_width_are_reported_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(
        b'\xef\xbb\xbfn,text\r\n1,"a\r\nb"\r\n2\r\n3,c\r\n4,d,e\r\n5,\xff\r\n6,"say ""f"""\r\n7\r\n'
    )
    with pytest.raises(UserError, match=r"x.csv:4: found 1 columns, expected 2"):
        documents(tmp_path / "x.csv")
    problems = Problems("skip")
    found = documents(tmp_path / "x.csv", problems)
    assert {d["id"]: d["text"] for d in found} == {"x.csv:1": "a\r\nb", "x.csv:3": "c", "x.csv:6": 'say "f"'}
    assert problems.counts == {"wrong columns": 3, "not UTF-8": 1}
    lines = {re.search(r"csv:(\d+)", sample)[1] for sample in problems.samples}  # type: ignore[index]
    assert lines == {"4", "6", "7", "9"}


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_a_quote_that_is_never_closed_is_reported_with_its_line(tmp_path: Path, suffix: str) -> None:
    file, mark = tmp_path / f"x{suffix}", "," if suffix == ".csv" else "\t"
    file.write_text('n,text\n1,5" pipe\n2,b\n'.replace(",", mark))  # amid a value, it is nothing but itself
    assert [d["text"] for d in documents(file)] == ['5" pipe', "b"]
    file.write_text('n,text\n1,a\n2,"b\n3,c\n'.replace(",", mark))
    with pytest.raises(UserError, match=f"x{suffix}:3: a quote that is never closed"):
        documents(file)


def test_columns_with_another_mark_between_them_are_reported(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("id;text\n1;a\n2;b\n")
    with pytest.raises(UserError, match="are separated by ';', expected ','"):
        documents(tmp_path / "x.csv")


def test_an_unreadable_file_is_skipped_and_counted_and_a_pipe_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "b.parquet").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "c.jsonl")
    assert skipped(tmp_path)[:2] == (["a"], {})


def test_lines_are_counted_as_an_editor_counts_them(tmp_path: Path) -> None:
    page = "x" * 200_000
    (tmp_path / "x.tsv").write_text(f'n\ttext\n1\t5" wide\n\n2\t"{page}\n\n{page}"\n3\n')
    with pytest.raises(UserError, match=r"x.tsv:7: found 1 columns, expected 2"):
        documents(tmp_path / "x.tsv")


def test_rows_keep_their_numbers_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [f"{n},text {n}" if n % 10 else f"{n}" for n in range(1, 400)]
    (tmp_path / "x.csv").write_text("n,text\n" + "\n".join(rows) + "\n")
    monkeypatch.setattr(delimited, "MAX_ROW_BYTES", 100)
    problems = Problems("skip")
    found = documents(tmp_path / "x.csv", problems)
    assert {d["id"]: d["text"] for d in found} == {f"x.csv:{n}": f"text {n}" for n in range(1, 400) if n % 10}
    assert problems.counts == {"wrong columns": 39}
    assert [sample.split(":")[1] for sample in problems.samples[:3]] == ["11", "21", "31"]


def test_a_row_that_is_too_long_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delimited, "MAX_ROW_BYTES", 1000)
    (tmp_path / "x.csv").write_text("n,text\n" + "1,a\n" * 10 + f"2,{'x' * 5000}\n3,b\n")
    with pytest.raises(UserError, match=r"a row of more than .*or a quote that is never closed"):
        documents(tmp_path / "x.csv")
    assert skipped(tmp_path / "x.csv")[1] == {"line too long": 1}


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow", "y.arrow", "x.feather"])
def test_a_damaged_table_is_reported(name: str, tmp_path: Path) -> None:
    intact = ROWS[name]()
    for content in (
        intact[: len(intact) // 2],
        intact[: len(intact) - 10],
        b"not a table at all",
        b"ARROW1\0\0oops",
    ):
        (tmp_path / name).write_bytes(content)
        found, counts, samples = skipped(tmp_path / name)
        if counts:  # a stream may end without its mark of the end
            assert counts == {"damaged file": 1} and f"{name}" in samples[0]
            with pytest.raises(UserError, match=f"{name}.*: cannot be read: "):
                documents(tmp_path / name)
        else:
            assert name == "x.arrow" and found == TEXTS
        assert found == TEXTS[: len(found)]


def test_damage_within_a_parquet_file_is_reported(tmp_path: Path) -> None:
    values = [f"{n} " + "x" * 1000 for n in range(1000)]
    intact = bytearray(as_parquet(pa.table({"text": values}), row_group_size=100, use_dictionary=False))
    start = (
        pa.parquet.ParquetFile(pa.BufferReader(bytes(intact)))
        .metadata.row_group(5)
        .column(0)
        .data_page_offset
    )
    intact[start : start + 200] = b"\xff" * 200
    (tmp_path / "x.parquet").write_bytes(intact)
    with pytest.raises(UserError, match=r"x.parquet.*: cannot be read"):
        documents(tmp_path / "x.parquet")
    found, counts, _ = skipped(tmp_path / "x.parquet")
    assert counts == {"damaged file": 1} and found == values[: len(found)]


def test_bad_values_in_tables_are_reported_with_their_row(tmp_path: Path) -> None:
    offsets, content = np.array([0, 1, 2, 3], np.int32), b"a\xffb"
    broken = pa.StringArray.from_buffers(3, pa.py_buffer(offsets), pa.py_buffer(content))
    for kind, column in {"not UTF-8": broken, "missing column": pa.array(["a", None, "b"])}.items():
        for name, make in {"x.parquet": as_parquet, "x.arrow": as_file}.items():
            (tmp_path / name).write_bytes(make(pa.table({"text": column})))
            with pytest.raises(UserError, match=f"{name}, row 2: "):
                documents(tmp_path / name)
            assert skipped(tmp_path / name)[:2] == (["a", "b"], {kind: 1})
    (tmp_path / "x.parquet").write_bytes(as_parquet(pa.table({"text": [1, 2]})))
    with pytest.raises(UserError, match=r"x.parquet: column text holds int64, expected text or messages"):
        documents(tmp_path / "x.parquet", text_column="text")


def test_a_list_of_records_tells_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.json").write_text('[{"text": "a"}, 3, {"text": "b"}]')
    with pytest.raises(UserError, match=r"x.json, row 2: found a number"):
        documents(tmp_path / "x.json")
    assert skipped(tmp_path / "x.json")[:2] == (["a", "b"], {"not an object": 1})
    (tmp_path / "x.json").write_text('[{"text": "a"}, {"text": ')
    assert skipped(tmp_path / "x.json")[:2] == ([], {"bad JSON": 1})
    (tmp_path / "x.json").write_bytes(b"\n".join([b'{"text": "a"}', b'{"text": "b"}']))
    assert texts(tmp_path / "x.json") == ["a", "b"]
    monkeypatch.setattr(jsonl, "MAX_LIST_BYTES", 10)
    (tmp_path / "x.json").write_text('[{"text": "a"}]')
    assert skipped(tmp_path / "x.json")[:2] == ([], {"file too long": 1})
