"""Documents packed directly from their source, which happens if the tokenizer exists and duplicates are not
searched: the data equals that packed from normalized files."""

import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from headrace.data import pack_job
from headrace.data.clean import normalize
from headrace.data.pipeline import tokenizer_stage
from headrace.data.pipeline.prepare import prepare
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.data.tokenizer import train as tokenizer_train
from headrace.data.verify import verify
from headrace.errors import UserError
from tests.data.pipeline.test_prepare import (  # noqa: F401
    contents,
    corpus,
    documents,
    kill_and_restart,
    load,
    sentences,
    silent,
)


@pytest.fixture
def load_direct(load: Any, tmp_path: Path) -> Any:  # noqa: F811
    (tmp_path / "tokenizer").mkdir()
    tokenizer_io.save(
        tokenizer_train.train_tokenizer(iter(sentences(200, 9)), kind="bpe", vocab=350),
        tmp_path / "tokenizer",
    )
    from_file = f"tokenizer={{use: file, path: {tmp_path}/tokenizer}}"
    return lambda *overrides: load(from_file, *overrides)


def row_checksums(folder: Path) -> dict[str, str]:
    """Checksums of the data without normalized files, and without the index, which contains the path."""
    return {
        name: checksum
        for name, checksum in contents(folder).items()
        if not name.startswith("normalized/") and name != "index.json"
    }


def test_direct_packing_and_normalized_files_give_the_same_data(load_direct: Any, tmp_path: Path) -> None:
    lines: list[str] = []
    prepare(load_direct("sources.lines.weight=2"), lines.append)
    assert not (tmp_path / "data" / "normalized").exists()
    assert "normalize: 3 parts will be read by the pack stage" in lines
    other = load_direct("sources.lines.weight=2", f"path={tmp_path}/other")
    prepare(other, silent, until="normalize")
    prepare(other, lines.append)
    assert "normalize: done before" in lines
    assert (tmp_path / "other" / "normalized" / "00000.parquet").exists()
    assert row_checksums(tmp_path / "data") == row_checksums(tmp_path / "other")
    verify(tmp_path / "data", silent)


def test_documents_can_be_written_after_packing_has_started(load_direct: Any, tmp_path: Path) -> None:
    prepare(load_direct(), silent, until="pack")
    prepare(load_direct(), silent, until="normalize")
    assert not (tmp_path / "data" / "packed").exists()
    prepare(load_direct(), silent)
    prepare(load_direct(f"path={tmp_path}/other"), silent)
    assert row_checksums(tmp_path / "data") == row_checksums(tmp_path / "other")


def test_rows_are_held_out_if_documents_are_few(load_direct: Any, tmp_path: Path) -> None:
    small_fraction = "pack.eval_fraction=0.01"  # of 560 documents
    lines: list[str] = []
    prepare(load_direct(small_fraction), lines.append)
    assert any("rows are held out, because there are few documents" in line for line in lines)
    other = load_direct(small_fraction, f"path={tmp_path}/other")
    prepare(other, silent, until="normalize")
    prepare(other, silent)
    assert row_checksums(tmp_path / "data") == row_checksums(tmp_path / "other")
    assert documents(tmp_path / "data", "evaluation")


def test_bad_input_stops_the_run_or_is_counted_and_packed_parts_are_reused(
    load_direct: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_stage, "SAMPLE", 100)  # taken from a valid part
    bad = tmp_path / "lines" / "9.jsonl"
    bad.write_text(json.dumps({"text": "good"}) + "\n{bad\n")
    (tmp_path / "tables.parquet").write_bytes(b"not parquet")
    with pytest.raises(UserError, match=r"9\.jsonl:2: not JSON"):
        prepare(load_direct(), silent)
    bad.write_text(json.dumps({"text": "good"}) + "\n")
    with pytest.raises(UserError, match=r"tables.parquet"):
        prepare(load_direct(), silent)
    first = tmp_path / "data" / "packed" / "00000.json"
    written_at = first.stat().st_mtime_ns
    lines: list[str] = []
    prepare(load_direct("on_error=skip"), lines.append, until="pack")
    assert first.stat().st_mtime_ns == written_at
    assert any("skipped 1" in line for line in lines)
    prepare(load_direct("on_error=skip"), silent)
    problem = next(line.strip() for line in lines if "tables.parquet" in line)
    assert problem in html.unescape((tmp_path / "data" / "report.html").read_text())
    verify(tmp_path / "data", silent)


def test_dropped_documents_and_unread_files_are_reported(load_direct: Any, tmp_path: Path) -> None:
    (tmp_path / "files" / "picture.png").write_bytes(b"png")
    lines: list[str] = []
    prepare(load_direct("normalize.min_chars=60"), lines.append)
    (line,) = [line for line in lines if "too short" in line]
    assert line.startswith("pack: ") and "dropped" in line
    assert any("1 file is not read, of no known format" in line for line in lines)
    number = re.search(r"too short ([0-9]+)", line)
    report = html.unescape((tmp_path / "data" / "report.html").read_text())
    assert number and re.search(rf"too short\W.*?\b{number[1]}\b", report, re.S)


def test_a_wrong_path_can_be_corrected(load_direct: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        prepare(load_direct(f"sources.lines.path={tmp_path}/linse"), silent)
    prepare(load_direct(), silent)
    verify(tmp_path / "data", silent)


def test_packed_data_is_finished_without_its_sources(load_direct: Any, tmp_path: Path) -> None:
    prepare(load_direct(), silent, until="pack")
    shutil.move(tmp_path / "lines", tmp_path / "away")
    prepare(load_direct(), silent)
    verify(tmp_path / "data", silent)


def test_finished_data_is_not_mistaken_for_a_failed_replacement(load_direct: Any, tmp_path: Path) -> None:
    prepare(load_direct(), silent)
    good, lines = (tmp_path / "files" / "0.txt").read_text(), list[str]()
    bad = tmp_path / "files" / "0.txt"
    bad.write_bytes(b"\xff not UTF-8")
    for settings in ([], [f"sources.files.path={tmp_path}/files/0.txt"]):
        with pytest.raises(UserError, match="not UTF-8"):
            prepare(load_direct(*settings), silent, replace=True)
        prepare(load_direct(), lines.append)
        assert "the files of its sources have changed" in lines[-1]
    bad.write_text(good + " and more")
    prepare(load_direct(), silent, replace=True)
    prepare(load_direct(), lines.append)
    assert "already made" in lines[-1]
    assert any(good in text for text in documents(tmp_path / "data", "train"))


def test_documents_of_finished_data_are_written_on_request(load_direct: Any, tmp_path: Path) -> None:
    prepare(load_direct(), silent)
    before = contents(tmp_path / "data")
    prepare(load_direct(), silent, until="normalize")
    assert (tmp_path / "data" / "normalized" / "00002.parquet").exists()
    after = contents(tmp_path / "data")
    assert {name: after[name] for name in before} == before
    lines: list[str] = []
    prepare(load_direct(), lines.append)
    assert "already made" in lines[-1]


def test_texts_and_conversations_in_several_tables_stay_in_the_order_of_the_source(
    load_direct: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(normalize, "ROW_GROUP", 5_000)
    monkeypatch.setattr(pack_job, "MAX_GROUP_BYTES", 17_000)
    source_rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]}
        if number % 3
        else {"text": text}
        for number, text in enumerate(sentences(300, 4))
    ]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in source_rows))
    settings = [
        f"sources={{mixed: {{path: {tmp_path}/mixed.jsonl}}}}",
        "tokenizer.chat_template=plain",
    ]
    prepare(load_direct(*settings), silent)
    other = load_direct(*settings, f"path={tmp_path}/other")
    prepare(other, silent, until="normalize")
    prepare(other, silent)
    assert row_checksums(tmp_path / "data") == row_checksums(tmp_path / "other")
    verify(tmp_path / "data", silent)


def test_reasons_are_reported_if_no_document_is_left(load_direct: Any) -> None:
    with pytest.raises(UserError, match=r"no documents are left of 560 read; dropped 560 \(too short 560\)"):
        prepare(load_direct("normalize.min_chars=100000"), silent)


def test_finished_data_survives_bad_and_missing_sources(load_direct: Any, tmp_path: Path) -> None:
    prepare(load_direct(), silent)
    before = contents(tmp_path / "data")
    with pytest.raises(UserError, match="no column nope"):
        prepare(load_direct("sources.tables.text_column=nope"), silent, replace=True)
    after = contents(tmp_path / "data")
    assert {name: after[name] for name in before} == before
    lines: list[str] = []
    shutil.move(tmp_path / "lines", tmp_path / "away")
    prepare(load_direct(), lines.append)
    assert "already made" in lines[-1]
    with pytest.raises(UserError, match="no such file or folder"):
        prepare(load_direct("pack.sequence_length=32"), silent, replace=True)
    verify(tmp_path / "data", silent)
    shutil.move(tmp_path / "away", tmp_path / "lines")
    prepare(load_direct("pack.sequence_length=32"), silent, replace=True)
    verify(tmp_path / "data", silent)


@pytest.mark.slow  # as in test_prepare.py, with other stages
@pytest.mark.parametrize("kills", [2, 20])
def test_data_is_identical_after_kills_at_random_moments(
    load_direct: Any, tmp_path: Path, kills: int
) -> None:
    settings = ("workers=2", "shuffle.epochs=2", f"tokenizer={{use: file, path: {tmp_path}/tokenizer}}")
    assert kill_and_restart(tmp_path, kills, 5, *settings) > 0
    assert row_checksums(tmp_path / "uninterrupted") == row_checksums(tmp_path / "killed")
    verify(tmp_path / "killed", silent)
