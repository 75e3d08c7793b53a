"""`headrace data prepare` from end to end: no document is lost, for any number of workers and kills."""

import contextlib
import gzip
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.config import recipe
from headrace.data.dataset import Dataset, PackedRows
from headrace.data.pipeline.prepare import prepare
from headrace.data.shards import Index, read_rows, unpack_bits
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.data.verify import verify
from headrace.errors import UserError


def read_batch(data: Dataset, step: int, batch_size: int, *, seed: int = 0) -> PackedRows:
    return data.batch(data.train_order(batch_size, seed=seed), step)


def silent(line: str) -> None:
    pass


def sentences(count: int, seed: int = 0) -> list[str]:
    """Distinct texts of many lengths."""
    rng = random.Random(seed)
    words = ["mill", "water", "wheel", "stone", "the", "of", "über", "river\n", "grain,", "水車", "🌾"]
    return [f"{seed}.{n}: " + " ".join(rng.choices(words, k=rng.randint(1, 90))) for n in range(count)]


@pytest.fixture
def corpus(tmp_path: Path) -> dict[str, list[str]]:
    """Three sources in three formats: the texts of each."""
    texts = {"lines": sentences(300, 1), "tables": sentences(200, 2), "files": sentences(60, 3)}
    (tmp_path / "lines").mkdir()
    for index in range(4):
        file_texts = texts["lines"][index::4]
        lines = "".join(
            json.dumps({"text": text, "n": n}, ensure_ascii=False) + "\n" for n, text in enumerate(file_texts)
        )
        (tmp_path / "lines" / f"{index}.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    pq.write_table(pa.table({"body": texts["tables"]}), tmp_path / "tables.parquet", row_group_size=50)
    (tmp_path / "files").mkdir()
    for index, text in enumerate(texts["files"]):
        (tmp_path / "files" / f"{index}.txt").write_text(text)
    return texts


@pytest.fixture
def load(tmp_path: Path, corpus: dict[str, list[str]]) -> Any:
    (tmp_path / "data.yaml").write_text(
        f"""
path: {tmp_path}/data
workers: 1
sources:
  lines: {{path: {tmp_path}/lines}}
  tables: {{path: {tmp_path}/tables.parquet, text_column: body}}
  files: {{path: {tmp_path}/files}}
tokenizer: {{use: bpe, vocab: 400}}
pack: {{sequence_length: 64, eval_fraction: 0.1}}
"""
    )
    return lambda *overrides: recipe.load_data(tmp_path / "data.yaml", overrides)


def read_index(folder: Path) -> Index:
    return Index.parse((folder / "index.json").read_bytes(), str(folder))


def documents(folder: Path, split: str, epoch: int = 0) -> Counter[str]:
    """Count the decoded texts of all documents in the rows of a split."""
    index, tokenizer = read_index(folder), tokenizer_io.load(folder)
    decoded: Counter[str] = Counter()
    for shard in index.splits[split].epochs[epoch]:
        rows = read_rows(folder, shard.name)
        starts = unpack_bits(rows.starts, index.sequence_length)
        for tokens, row_starts in zip(rows.tokens, starts, strict=True):
            decoded.update(tokenizer.decode(piece) for piece in np.split(tokens, np.flatnonzero(row_starts)))
    decoded.pop("", None)
    return decoded


def contents(folder: Path) -> dict[str, str]:
    """Checksums of all data files. Without stages.json, which contains times."""
    files = [
        p
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name not in ("stages.json", "report.html", ".lock")
    ]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_every_document_is_packed_exactly_once(
    load: Any, corpus: dict[str, list[str]], tmp_path: Path
) -> None:
    prepare(load("pack.sequence_length=512"), silent)
    folder = tmp_path / "data"
    train, held_out = documents(folder, "train"), documents(folder, "evaluation")
    assert train + held_out == Counter(text for texts in corpus.values() for text in texts)
    assert 20 < held_out.total() < 110 and not train & held_out
    index = read_index(folder)
    assert index.splits["train"].documents == train.total()
    assert index.sources == ("lines", "tables", "files")
    verify(folder, silent)


def test_long_documents_are_split_without_loss(
    load: Any, corpus: dict[str, list[str]], tmp_path: Path
) -> None:
    for mode in ("concat", "document", "best_fit"):
        folder = tmp_path / mode
        prepare(load("pack.sequence_length=32", f"pack.mode={mode}", f"path={folder}"), silent)
        texts = "".join(sorted("".join(text for texts in corpus.values() for text in texts)))
        pieces = documents(folder, "train") + documents(folder, "evaluation")
        decoded = "".join(sorted("".join(pieces.elements())))
        # A character may be split between rows; each half decodes to a replacement character.
        assert Counter(decoded.replace("�", "")) <= Counter(texts)
        assert len(decoded.replace("�", "")) > 0.97 * len(texts)
        verify(folder, silent)


def test_stages_run_separately_write_the_same_data(load: Any, tmp_path: Path) -> None:
    prepare(load(), silent)
    for stage in ("normalize", "tokenizer", "pack", "shuffle"):
        lines: list[str] = []
        prepare(load(f"path={tmp_path}/staged"), lines.append, until=stage)
        assert not (tmp_path / "staged" / "index.json").exists() or stage == "shuffle"
    assert sum("done before" in line for line in lines) == 3
    at_once, by_stage = contents(tmp_path / "data"), contents(tmp_path / "staged")
    assert {k: v for k, v in at_once.items() if k != "index.json"} == {
        k: v for k, v in by_stage.items() if k != "index.json"
    }


def test_the_number_of_workers_changes_nothing(load: Any, tmp_path: Path) -> None:
    for workers in (1, 3):
        prepare(
            load(f"workers={workers}", "normalize.dedup_exact=true", f"path={tmp_path}/{workers}"), silent
        )
    single, parallel = contents(tmp_path / "1"), contents(tmp_path / "3")
    del single["index.json"], parallel["index.json"]  # contains the path
    assert single == parallel


def test_finished_data_is_not_changed_and_another_recipe_is_refused(load: Any, tmp_path: Path) -> None:
    prepare(load(), silent)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*")}
    lines: list[str] = []
    prepare(load("workers=2"), lines.append)
    assert "already made by this recipe" in lines[0]
    with pytest.raises(UserError, match=r"pack.sequence_length = 64, and this recipe has 128; .*--replace"):
        prepare(load("pack.sequence_length=128"), silent)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*")} == before

    lines.clear()
    prepare(load("pack.sequence_length=128"), lines.append, replace=True)
    assert lines[:2] == ["normalize: done before", "tokenizer: done before"]
    assert read_index(tmp_path / "data").sequence_length == 128
    verify(tmp_path / "data", silent)


def test_a_folder_with_other_files_is_not_touched(load: Any, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.txt").write_text("do not lose me")
    with pytest.raises(UserError, match="holds no data of Headrace; choose another, or remove it"):
        prepare(load(), silent)
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["thesis.txt"]


def test_a_second_process_on_the_same_folder_is_refused(load: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headrace", "data", "prepare", str(tmp_path / "data.yaml")]
    processes = [subprocess.Popen(command, stdout=-1, stderr=-1, text=True) for _ in range(2)]
    outputs = [process.communicate() for process in processes]
    codes = sorted(process.returncode for process in processes)
    assert codes in ([0, 2], [0, 0]), outputs  # the second may start after the first has finished
    if codes == [0, 2]:
        assert any("is being made by process" in err for _, err in outputs)
    verify(tmp_path / "data", silent)


def test_the_evaluation_split_depends_only_on_document_ids(load: Any, tmp_path: Path) -> None:
    long = "pack.sequence_length=512"
    prepare(load(long), silent)
    prepare(load(long, f"path={tmp_path}/other", "seed=5", "pack.mode=document", "shuffle.epochs=2"), silent)
    assert documents(tmp_path / "data", "evaluation") == documents(tmp_path / "other", "evaluation")


def test_rows_of_a_single_document_are_held_out_for_evaluation(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("\n".join(sentences(400)))
    (tmp_path / "data.yaml").write_text(
        f"path: {tmp_path}/data\nsources: {{book: {{path: {tmp_path}/book.txt}}}}\n"
        "tokenizer: {use: bpe, vocab: 300}\npack: {sequence_length: 32, eval_fraction: 0.1}\n"
    )
    lines: list[str] = []
    prepare(recipe.load_data(tmp_path / "data.yaml"), lines.append)
    splits = read_index(tmp_path / "data").splits
    assert 0.05 < splits["evaluation"].rows / splits["train"].rows < 0.2
    assert any("rows are held out, because there are few documents" in line for line in lines)


def test_a_weight_sets_how_often_a_source_is_repeated(
    load: Any, corpus: dict[str, list[str]], tmp_path: Path
) -> None:
    prepare(
        load("sources.lines.weight=2", "sources.files.weight=0.5", "shuffle.epochs=2", "pack.mode=document",
             "pack.sequence_length=512", "pack.eval_fraction=0"),
        silent,
    )  # fmt: skip
    folder = tmp_path / "data"
    epochs = [documents(folder, "train", epoch) for epoch in (0, 1)]
    for counts in epochs:
        assert all(counts[text] == 2 for text in corpus["lines"])
        assert all(counts[text] == 1 for text in corpus["tables"])
        assert sum(counts[text] for text in corpus["files"]) == 30
    assert all(epochs[0][text] or epochs[1][text] for text in corpus["files"])
    verify(folder, silent)


def test_duplicates_and_short_texts_are_dropped_and_counted(tmp_path: Path) -> None:
    texts = sentences(100)
    rows = [*texts, *texts[:20], "tiny", texts[3].replace("mill", "mills", 1)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    (tmp_path / "data.yaml").write_text(
        f"path: {tmp_path}/data\nsources: {{a: {{path: {tmp_path}/a.jsonl}}}}\n"
        "tokenizer: {use: bpe, vocab: 300}\n"
        "normalize: {dedup_exact: true, min_chars: 6}\npack: {sequence_length: 512, eval_fraction: 0}\n"
    )
    lines: list[str] = []
    prepare(recipe.load_data(tmp_path / "data.yaml"), lines.append)
    assert documents(tmp_path / "data", "train").total() == 101
    assert "exact duplicate 20" in lines[0]
    page = (tmp_path / "data" / "report.html").read_text()
    assert "exact duplicate" in page


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"how much is {n} and {n}?"},
                {"role": "assistant", "content": f"it is {2 * n}"},
            ]
        }
        for n in range(120)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "data.yaml").write_text(
        f"path: {tmp_path}/data\nsources: {{chats: {{path: {tmp_path}/chats.jsonl}}}}\n"
        f"tokenizer: {{use: bpe, vocab: 300, chat_template: plain}}\n"
        "pack: {sequence_length: 128, eval_fraction: 0.1}\n"
    )
    return tmp_path / "data.yaml"


def test_only_assistant_messages_of_conversations_are_trained_on(chats: Path, tmp_path: Path) -> None:
    prepare(recipe.load_data(chats), silent)
    folder = tmp_path / "data"
    index, tokenizer = read_index(folder), tokenizer_io.load(folder)
    trained_texts: list[str] = []
    for shard in index.splits["train"].epochs[0]:
        rows = read_rows(folder, shard.name)
        assert rows.loss_bits is not None
        flags = unpack_bits(rows.loss_bits, index.sequence_length)
        trained_texts += [tokenizer.decode(row[flag]) for row, flag in zip(rows.tokens, flags, strict=True)]
    trained_text = " ".join(trained_texts)
    assert trained_text.count("it is") > 90 and "how much" not in trained_text
    verify(folder, silent)
    batch = read_batch(Dataset.open(folder), 0, 2)
    assert batch.loss_mask is not None and 0 < batch.loss_mask.sum() < batch.loss_mask.size


def test_bad_lines_stop_the_run_or_are_skipped_and_reported(tmp_path: Path) -> None:
    rows = [json.dumps({"text": text}) for text in sentences(50)]
    rows[7] = rows[7][:-4]
    rows[9] = '{"txt": "no text"}'
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    (tmp_path / "data.yaml").write_text(
        f"path: {tmp_path}/data\nsources: {{a: {{path: {tmp_path}/a.jsonl}}}}\n"
        "tokenizer: {use: bpe, vocab: 300}\n"
        "pack: {sequence_length: 64, eval_fraction: 0}\n"
    )
    with pytest.raises(UserError, match=r"a.jsonl:8: .*on_error: skip"):
        prepare(recipe.load_data(tmp_path / "data.yaml"), silent)
    lines: list[str] = []
    prepare(recipe.load_data(tmp_path / "data.yaml", ["on_error=skip"]), lines.append)
    assert any("skipped 2" in line for line in lines) and any("a.jsonl:10" in line for line in lines), lines
    assert read_index(tmp_path / "data").splits["train"].documents == 48


def test_a_stage_restarts_if_source_files_were_added_after_a_stop(load: Any, tmp_path: Path) -> None:
    prepare(load(), silent, until="normalize")
    stages = tmp_path / "data" / "stages.json"
    values = json.loads(stages.read_text())
    del values["normalize"]["seconds"]  # as if stopped before the end of the stage
    stages.write_text(json.dumps(values))
    (tmp_path / "lines" / "0.a.jsonl").write_text(json.dumps({"text": "one more"}) + "\n")
    lines: list[str] = []
    prepare(load("pack.sequence_length=512"), lines.append)
    assert "normalize: the files of the sources have changed, so it starts again" in lines
    both = documents(tmp_path / "data", "train") + documents(tmp_path / "data", "evaluation")
    assert both.total() == 561 and both["one more"] == 1


def test_workers_die_with_the_process_that_started_them(load: Any, tmp_path: Path) -> None:
    import psutil

    for index in range(30):  # enough work for several seconds
        text = "\n".join(json.dumps({"text": text}) for text in sentences(3000, index + 10))
        (tmp_path / "lines" / f"more{index}.jsonl").write_text(text)
    process = start(tmp_path, "workers=2", "normalize.dedup_jaccard=0.8")
    children: list[psutil.Process] = []
    while len(children) < 3 and process.poll() is None:  # the fork server and two workers
        children = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.02)
    process.kill()
    process.wait()
    process.stdout.close()  # type: ignore[union-attr]
    process.stderr.close()  # type: ignore[union-attr]
    _, alive = psutil.wait_procs(children, timeout=10)
    assert len(children) >= 3 and not alive


def test_a_stop_during_the_removal_of_intermediate_files_loses_nothing(load: Any, tmp_path: Path) -> None:
    """As if killed while removing intermediate files."""
    prepare(load("normalize.dedup_exact=true"), silent)
    folder = tmp_path / "data"
    (folder / "packed").mkdir()
    (folder / "packed" / "00000.json").write_text("{}")
    prepare(load("normalize.dedup_exact=true", "shuffle.epochs=2"), silent, replace=True)
    both = documents(folder, "train") + documents(folder, "evaluation")
    prepare(load("normalize.dedup_exact=true", "shuffle.epochs=2", f"path={tmp_path}/fresh"), silent)
    assert both == documents(tmp_path / "fresh", "train") + documents(tmp_path / "fresh", "evaluation")


def test_conversations_mixed_with_plain_text_pass_verification(chats: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(sentences(50)))
    text = chats.read_text().replace("sources: {", f"sources: {{plain: {{path: {tmp_path}/texts.txt}}, ")
    chats.write_text(text)
    prepare(recipe.load_data(chats), silent)
    verify(tmp_path / "data", silent)


def test_a_damaged_shard_is_refused_when_it_is_read(load: Any, tmp_path: Path) -> None:
    prepare(load(), silent)
    shard = tmp_path / "data" / "train-0-00000.npy"
    content = bytearray(shard.read_bytes())
    content[-9] ^= 255
    shard.write_bytes(content)
    with pytest.raises(UserError, match=r"has checksum \w{8}, and the index says \w{8}; make the data again"):
        read_batch(Dataset.open(tmp_path / "data"), 0, 2)


def test_changed_sources_are_reported_and_the_data_is_replaced_on_request(load: Any, tmp_path: Path) -> None:
    prepare(load("pack.sequence_length=512"), silent)
    (tmp_path / "files" / "new.txt").write_text("a new text")
    lines: list[str] = []
    prepare(load("pack.sequence_length=512"), lines.append)
    assert "the files of its sources have changed since; --replace makes it again" in lines[0]
    prepare(load("pack.sequence_length=512"), silent, replace=True)
    both = documents(tmp_path / "data", "train") + documents(tmp_path / "data", "evaluation")
    assert both.total() == 561 and both["a new text"] == 1


def test_reasons_are_reported_if_no_document_is_left(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"txt": "one"}\n' * 5)
    (tmp_path / "data.yaml").write_text(
        f"path: {tmp_path}/data\non_error: skip\nsources: {{a: {{path: {tmp_path}/a.jsonl}}}}\n"
    )
    with pytest.raises(
        UserError, match=r"skipped 5 \(missing column 5\); first .*a.jsonl:1: found txt, expected"
    ):
        prepare(recipe.load_data(tmp_path / "data.yaml"), silent)


def test_on_error_skip_reuses_finished_parts_and_on_error_stop_redoes_skipped_parts(
    tmp_path: Path,
) -> None:
    (tmp_path / "in").mkdir()
    good = "".join(json.dumps({"text": text}) + "\n" for text in sentences(40))
    (tmp_path / "in" / "a.jsonl").write_text(good)
    (tmp_path / "in" / "b.parquet").write_bytes(b"not parquet")
    (tmp_path / "data.yaml").write_text(
        f"path: {tmp_path}/data\nworkers: 1\n"
        f"sources: {{a: {{path: {tmp_path}/in/a.jsonl}}, b: {{path: {tmp_path}/in/b.parquet}}}}\n"
        "tokenizer: {use: bpe, vocab: 300}\npack: {eval_fraction: 0}\n"
    )
    load = lambda errors: recipe.load_data(tmp_path / "data.yaml", [f"on_error={errors}"])
    with pytest.raises(UserError, match=r"b.parquet"):
        prepare(load("stop"), silent)
    first = tmp_path / "data" / "normalized" / "00000.parquet"
    written_at = first.stat().st_mtime_ns
    prepare(load("skip"), silent, until="normalize")
    assert first.stat().st_mtime_ns == written_at
    stages = tmp_path / "data" / "stages.json"
    values = json.loads(stages.read_text())
    del values["normalize"]["seconds"]  # as if stopped before the end of the stage
    stages.write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"b.parquet"):
        prepare(load("stop"), silent)


def test_finished_data_survives_a_failed_replacement(load: Any, tmp_path: Path) -> None:
    prepare(load(), silent)
    before = contents(tmp_path / "data")
    with pytest.raises(UserError, match="no column nope"):
        prepare(load("sources.tables.text_column=nope"), silent, replace=True)
    after = contents(tmp_path / "data")
    assert after["index.json"] == before["index.json"] and after["tokenizer.json"] == before["tokenizer.json"]
    verify(tmp_path / "data", silent)
    prepare(load("sources.tables.weight=2"), silent, replace=True)
    verify(tmp_path / "data", silent)


def test_a_changed_tokenizer_or_source_is_detected(load: Any, tmp_path: Path) -> None:
    prepare(load(), silent)
    (tmp_path / "tokenizer").mkdir()
    for name in tokenizer_io.TOKENIZER_FILES[:3]:
        (tmp_path / "tokenizer" / name).write_bytes((tmp_path / "data" / name).read_bytes())
    overrides = [f"path={tmp_path}/from-file", f"tokenizer={{use: file, path: {tmp_path}/tokenizer}}"]
    lines: list[str] = []
    prepare(load(*overrides), silent)
    prepare(load(*overrides), lines.append)
    assert "already made" in lines[-1]
    settings = tmp_path / "tokenizer" / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace('"<|eos|>"', '"<|bos|>"'))
    prepare(load(*overrides), lines.append)
    assert "the files of its tokenizer have changed" in lines[-1]
    prepare(load(*overrides), silent, replace=True)
    prepare(load(*overrides), lines.append)
    assert "already made" in lines[-1]
    first = tmp_path / "files" / "0.txt"
    first.write_text(first.read_text()[:-1] + "?")  # the same length as before
    prepare(load(*overrides), lines.append)
    assert "the files of its sources have changed" in lines[-1]


def test_weights_that_leave_no_rows_are_refused(load: Any) -> None:
    tiny_weights = [f"sources.{name}.weight=0.0001" for name in ("lines", "tables", "files")]
    with pytest.raises(UserError, match="weights leave no row"):
        prepare(load(*tiny_weights), silent)
    with pytest.raises(UserError, match="at most 1000"):
        load("sources.files.weight=1e9")


def test_missing_normalized_documents_are_reported(load: Any, tmp_path: Path) -> None:
    prepare(load(), silent, until="tokenizer")
    shutil.rmtree(tmp_path / "data" / "normalized")
    with pytest.raises(UserError, match="normalized is missing"):
        prepare(load(), silent)


def start(tmp_path: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "headrace", "data", "prepare", str(tmp_path / "data.yaml"), *overrides]
    return subprocess.Popen(command, stdout=-1, stderr=-1, text=True, start_new_session=True)


def kill_and_restart(tmp_path: Path, kills: int, seed: int, *overrides: str) -> int:
    """Kill `prepare` and its workers at random moments up to `kills` times, then run it to the end.
    Returns the number of kills that interrupted the work."""
    rng = random.Random(seed)
    started_at = time.monotonic()
    start(tmp_path, *overrides, f"path={tmp_path}/uninterrupted").communicate()
    duration = time.monotonic() - started_at
    num_kills = 0
    for _ in range(4 * kills):
        if num_kills == kills:
            break
        started_at = time.monotonic()
        process = start(tmp_path, *overrides, f"path={tmp_path}/killed")
        try:
            process.wait(rng.uniform(0.15, 1.0) * duration)
            duration = min(duration, time.monotonic() - started_at)  # a resumed run has less to do
        except subprocess.TimeoutExpired:
            num_kills += 1
        with contextlib.suppress(ProcessLookupError):  # already ended
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if (tmp_path / "killed" / "index.json").exists():
            subprocess.run(["rm", "-rf", str(tmp_path / "killed")], check=True)
    process = start(tmp_path, *overrides, f"path={tmp_path}/killed")
    output = process.communicate()
    assert process.returncode == 0, output
    return num_kills


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_data_is_identical_after_kills_at_random_moments(load: Any, tmp_path: Path, kills: int) -> None:
    settings = ("workers=2", "normalize.dedup_exact=true", "shuffle.epochs=2")
    assert kill_and_restart(tmp_path, kills, 7, *settings) > 0
    uninterrupted, killed = contents(tmp_path / "uninterrupted"), contents(tmp_path / "killed")
    for files in (uninterrupted, killed):
        del files["index.json"]  # contains the path
    assert uninterrupted == killed
    verify(tmp_path / "killed", silent)


def test_a_full_disk_is_reported_and_loses_nothing(load: Any, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(small)], capture_output=True
    ).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        process = start(tmp_path, f"path={small}/data")
        _, err = process.communicate()
        assert "No space left on device" in err and "Traceback" not in err, err
        assert process.returncode == 2
        subprocess.run(["mount", "-o", "remount,size=50m", str(small)], check=True)
        output = start(tmp_path, f"path={small}/data").communicate()
        assert (small / "data" / "index.json").exists(), output
        verify(small / "data", silent)
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.fixture
def ray_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A local cluster of two nodes with two workers each."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    cluster.add_node(num_cpus=2)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.filterwarnings("ignore")
def test_ray_workers_write_the_same_bytes_even_if_a_worker_is_killed(
    load: Any, tmp_path: Path, ray_cluster: Any
) -> None:
    import psutil

    prepare(load("normalize.dedup_exact=true"), silent)
    process = start(tmp_path, "engine=ray", "normalize.dedup_exact=true", f"path={tmp_path}/ray")
    killed = False
    while process.poll() is None:
        if not killed:
            for worker in psutil.process_iter(["cmdline"]):
                if (worker.info["cmdline"] or [""])[0].startswith("ray::task"):
                    worker.kill()
                    killed = True
                    break
        time.sleep(0.005)
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    assert killed, "no worker was found running"
    local, distributed = contents(tmp_path / "data"), contents(tmp_path / "ray")
    del local["index.json"], distributed["index.json"]
    assert local == distributed
