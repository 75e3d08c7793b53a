"""Documents that go from their source straight into rows, where the tokenizer is there and no duplicates are
sought: the same data as by way of normalised files, and nothing lost on the way."""

import html
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_prepare import contents, corpus, documents, kill_and_restart, load, sentences, silent  # noqa: F401

from millrace.data import learn, stages, tokenise
from millrace.data.prepare import prepare
from millrace.data.verify import verify
from millrace.errors import UserError


@pytest.fixture
def straight(load: Any, tmp_path: Path) -> Any:  # noqa: F811
    (tmp_path / "own").mkdir()
    tokenise.save(learn.train(iter(sentences(200, 9)), kind="bpe", vocab=350), tmp_path / "own")
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
    assert any("read when they are packed" in line for line in said)
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
    few = "pack.evaluation=0.01"  # of 560 documents
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
    monkeypatch.setattr(stages, "SAMPLE", 100)  # which comes from a good part
    bad = tmp_path / "lines" / "9.jsonl"
    bad.write_text(json.dumps({"text": "good"}) + "\n{bad\n")
    (tmp_path / "tables.parquet").write_bytes(b"not parquet")
    with pytest.raises(UserError, match=r"9\.jsonl:2: not JSON"):
        prepare(straight(), silent)
    bad.write_text(json.dumps({"text": "good"}) + "\n")
    with pytest.raises(UserError, match="tables.parquet"):
        prepare(straight(), silent)
    first = tmp_path / "data" / "packed" / "00000.json"
    made = first.stat().st_mtime_ns
    said: list[str] = []
    prepare(straight("errors=skip"), said.append, until="pack")
    assert first.stat().st_mtime_ns == made
    assert any("skipped 1" in line for line in said)
    prepare(straight("errors=skip"), silent)
    told = next(line.strip() for line in said if "tables.parquet" in line)
    assert told in html.unescape((tmp_path / "data" / "report.html").read_text())
    verify(tmp_path / "data", silent)


def test_when_nothing_is_left_the_reasons_are_told(straight: Any) -> None:
    with pytest.raises(UserError, match=r"no documents are left of 560 read; left out 560 \(too short 560\)"):
        prepare(straight("normalize.shortest=100000"), silent)


def test_ready_data_outlives_bad_sources_and_lost_ones(straight: Any, tmp_path: Path) -> None:
    prepare(straight(), silent)
    before = contents(tmp_path / "data")
    with pytest.raises(UserError, match="no column nope"):
        prepare(straight("sources.tables.column=nope"), silent, replace=True)
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


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments_and_restarted_the_bytes_are_the_same(
    straight: Any, tmp_path: Path, kills: int
) -> None:
    settings = ("workers=2", "shuffle.epochs=2", f"tokenizer={{use: file, path: {tmp_path}/own}}")
    assert kill_and_restart(tmp_path, kills, 5, *settings) > 0
    assert rows(tmp_path / "timed") == rows(tmp_path / "killed")
    verify(tmp_path / "killed", silent)
