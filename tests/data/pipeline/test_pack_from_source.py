"""Documents that go from their source straight into rows, where the tokenizer is there and no duplicates are
sought: the same data as by way of normalised files, and nothing lost on the way."""

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
def straight(load: Any, tmp_path: Path) -> Any:  # noqa: F811
    (tmp_path / "own").mkdir()
    tokenizer_io.save(
        tokenizer_train.train_tokenizer(iter(sentences(200, 9)), kind="bpe", vocab=350), tmp_path / "own"
    )
    own = f"tokenizer={{use: file, path: {tmp_path}/own}}"
    return lambda *overrides: load(own, *overrides)


def rows(folder: Path) -> dict[str, str]:
    """The data alone, without the normalised files and the index, which holds the path."""
    return {
        name: checksum
        for name, checksum in contents(folder).items()
        if not name.startswith("normalized/") and name != "index.json"
    }


def test_both_ways_make_the_same_data(straight: Any, tmp_path: Path) -> None:
    said: list[str] = []
    prepare(straight("sources.lines.weight=2"), said.append)
    assert not (tmp_path / "data" / "normalized").exists()
    assert "normalize: 3 parts will be read by the pack stage" in said
    other = straight("sources.lines.weight=2", f"path={tmp_path}/other")
    prepare(other, silent, until="normalize")
    prepare(other, said.append)
    assert "normalize: done before" in said
    assert (tmp_path / "other" / "normalized" / "00000.parquet").exists()
    assert rows(tmp_path / "data") == rows(tmp_path / "other")
    verify(tmp_path / "data", silent)


def test_documents_can_be_written_when_some_were_packed_already(straight: Any, tmp_path: Path) -> None:
    prepare(straight(), silent, until="pack")
    prepare(straight(), silent, until="normalize")
    assert not (tmp_path / "data" / "packed").exists()
    prepare(straight(), silent)
    prepare(straight(f"path={tmp_path}/other"), silent)
    assert rows(tmp_path / "data") == rows(tmp_path / "other")


def test_where_documents_are_few_rows_are_held_out(straight: Any, tmp_path: Path) -> None:
    few = "pack.eval_fraction=0.01"  # of 560 documents
    said: list[str] = []
    prepare(straight(few), said.append)
    assert any("rows are held out, since the documents are few" in line for line in said)
    other = straight(few, f"path={tmp_path}/other")
    prepare(other, silent, until="normalize")
    prepare(other, silent)
    assert rows(tmp_path / "data") == rows(tmp_path / "other")
    assert documents(tmp_path / "data", "evaluation")


def test_bad_input_stops_the_work_or_is_counted_and_what_is_packed_stays(
    straight: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_stage, "SAMPLE", 100)  # which comes from a good part
    bad = tmp_path / "lines" / "9.jsonl"
    bad.write_text(json.dumps({"text": "good"}) + "\n{bad\n")
    (tmp_path / "tables.parquet").write_bytes(b"not parquet")
    with pytest.raises(UserError, match=r"9\.jsonl:2: not JSON"):
        prepare(straight(), silent)
    bad.write_text(json.dumps({"text": "good"}) + "\n")
    with pytest.raises(UserError, match=r"tables.parquet"):
        prepare(straight(), silent)
    first = tmp_path / "data" / "packed" / "00000.json"
    made = first.stat().st_mtime_ns
    said: list[str] = []
    prepare(straight("on_error=skip"), said.append, until="pack")
    assert first.stat().st_mtime_ns == made
    assert any("skipped 1" in line for line in said)
    prepare(straight("on_error=skip"), silent)
    told = next(line.strip() for line in said if "tables.parquet" in line)
    assert told in html.unescape((tmp_path / "data" / "report.html").read_text())
    verify(tmp_path / "data", silent)


def test_what_is_left_out_and_not_read_is_told(straight: Any, tmp_path: Path) -> None:
    (tmp_path / "files" / "picture.png").write_bytes(b"png")
    said: list[str] = []
    prepare(straight("normalize.min_chars=60"), said.append)
    (line,) = [line for line in said if "dropped" in line]
    assert line.startswith("pack: ") and "too short" in line
    assert any("1 file is not read, of no known format" in line for line in said)
    number = re.search(r"too short ([0-9]+)", line)
    report = html.unescape((tmp_path / "data" / "report.html").read_text())
    assert number and re.search(rf"too short\W.*?\b{number[1]}\b", report, re.S)


def test_a_wrong_path_can_be_corrected(straight: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        prepare(straight(f"sources.lines.path={tmp_path}/linse"), silent)
    prepare(straight(), silent)
    verify(tmp_path / "data", silent)


def test_packed_data_is_finished_without_its_sources(straight: Any, tmp_path: Path) -> None:
    prepare(straight(), silent, until="pack")
    shutil.move(tmp_path / "lines", tmp_path / "away")
    prepare(straight(), silent)
    verify(tmp_path / "data", silent)


def test_ready_data_is_not_taken_for_a_replacement_that_failed(straight: Any, tmp_path: Path) -> None:
    prepare(straight(), silent)
    good, said = (tmp_path / "files" / "0.txt").read_text(), list[str]()
    bad = tmp_path / "files" / "0.txt"
    bad.write_bytes(b"\xff not UTF-8")
    for settings in ([], [f"sources.files.path={tmp_path}/files/0.txt"]):
        with pytest.raises(UserError, match="not UTF-8"):
            prepare(straight(*settings), silent, replace=True)
        prepare(straight(), said.append)
        assert "the files of its sources have changed" in said[-1]
    bad.write_text(good + " and more")
    prepare(straight(), silent, replace=True)
    prepare(straight(), said.append)
    assert "already made" in said[-1]
    assert any(good in text for text in documents(tmp_path / "data", "train"))


def test_documents_of_ready_data_are_written_on_wish(straight: Any, tmp_path: Path) -> None:
    prepare(straight(), silent)
    before = contents(tmp_path / "data")
    prepare(straight(), silent, until="normalize")
    assert (tmp_path / "data" / "normalized" / "00002.parquet").exists()
    after = contents(tmp_path / "data")
    assert {name: after[name] for name in before} == before
    said: list[str] = []
    prepare(straight(), said.append)
    assert "already made" in said[-1]


def test_texts_and_conversations_in_any_tables_come_in_the_order_of_the_source(
    straight: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(normalize, "ROW_GROUP", 5_000)
    monkeypatch.setattr(pack_job, "MAX_GROUP_BYTES", 17_000)
    said = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]}
        if number % 3
        else {"text": text}
        for number, text in enumerate(sentences(300, 4))
    ]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(one) + "\n" for one in said))
    settings = [
        f"sources={{mixed: {{path: {tmp_path}/mixed.jsonl}}}}",
        "tokenizer.chat_template=plain",
    ]
    prepare(straight(*settings), silent)
    other = straight(*settings, f"path={tmp_path}/other")
    prepare(other, silent, until="normalize")
    prepare(other, silent)
    assert rows(tmp_path / "data") == rows(tmp_path / "other")
    verify(tmp_path / "data", silent)


def test_when_nothing_is_left_the_reasons_are_told(straight: Any) -> None:
    with pytest.raises(UserError, match=r"no documents are left of 560 read; dropped 560 \(too short 560\)"):
        prepare(straight("normalize.min_chars=100000"), silent)


def test_ready_data_outlives_bad_sources_and_lost_ones(straight: Any, tmp_path: Path) -> None:
    prepare(straight(), silent)
    before = contents(tmp_path / "data")
    with pytest.raises(UserError, match="no column nope"):
        prepare(straight("sources.tables.text_column=nope"), silent, replace=True)
    after = contents(tmp_path / "data")
    assert {name: after[name] for name in before} == before
    said: list[str] = []
    shutil.move(tmp_path / "lines", tmp_path / "away")
    prepare(straight(), said.append)
    assert "already made" in said[-1]
    with pytest.raises(UserError, match="no such file or folder"):
        prepare(straight("pack.sequence_length=32"), silent, replace=True)
    verify(tmp_path / "data", silent)
    shutil.move(tmp_path / "away", tmp_path / "lines")
    prepare(straight("pack.sequence_length=32"), silent, replace=True)
    verify(tmp_path / "data", silent)


@pytest.mark.slow  # as the one of tests/data/pipeline/test_prepare.py, through other stages
@pytest.mark.parametrize("kills", [2, 20])
def test_killed_at_random_moments_and_restarted_the_bytes_are_the_same(
    straight: Any, tmp_path: Path, kills: int
) -> None:
    settings = ("workers=2", "shuffle.epochs=2", f"tokenizer={{use: file, path: {tmp_path}/own}}")
    assert kill_and_restart(tmp_path, kills, 5, *settings) > 0
    assert rows(tmp_path / "timed") == rows(tmp_path / "killed")
    verify(tmp_path / "killed", silent)
