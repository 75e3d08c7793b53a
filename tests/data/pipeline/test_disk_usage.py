"""What lies on the disk while data is made: no more than is needed, and what is needed again comes back."""

import errno
import functools
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.config import recipe
from headrace.data import shuffle
from headrace.data.pipeline.prepare import prepare
from headrace.data.shards import open_atomic
from headrace.data.verify import verify


@pytest.fixture
def load(tmp_path: Path) -> Any:
    (tmp_path / "texts").mkdir()
    for number in range(60):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"Text {number}: " + f"{number} words " * number)
    (tmp_path / "data.yaml").write_text(
        f"path: {tmp_path}/data\nworkers: 1\nsources: {{a: {{path: {tmp_path}/texts}}}}\n"
        "tokenizer: {use: bpe, vocab: 300}\npack: {sequence_length: 32, eval_fraction: 0.2}\n"
    )
    return lambda *overrides: recipe.load_data(tmp_path / "data.yaml", overrides)


def small_buckets(monkeypatch: pytest.MonkeyPatch, *, direct: bool) -> None:
    """Shards of 10 rows, by random reads or by way of runs on the disk."""
    plan = functools.partial(
        shuffle.plan_shuffle, bucket_bytes=10 * 64, direct_bytes=1 << 40 if direct else 0
    )
    monkeypatch.setattr(shuffle, "plan_shuffle", plan)


def stop_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """As if the machine went off when a shard of the training data is to be made."""
    gather = shuffle.gather_bucket

    def stopping(job: shuffle.ShuffleJob) -> Any:
        if job.round.split == "train" and job.number == number:
            raise KeyboardInterrupt
        return gather(job)

    monkeypatch.setattr(shuffle, "gather_bucket", stopping)


def shards(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*-?-0*.npy"))}


def silent(line: str) -> None:
    pass


@pytest.mark.thin(3)
@pytest.mark.parametrize("settings", [[], ["shuffle.epochs=2"], ["shuffle.rounds=2"]])
def test_packed_rows_go_when_they_are_scattered_for_the_last_time(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str]
) -> None:
    with monkeypatch.context() as patch:
        small_buckets(patch, direct=True)
        prepare(load(*settings, f"path={tmp_path}/direct"), silent)
    small_buckets(monkeypatch, direct=False)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, 3)
        prepare(load(*settings), silent)
    left = {file.name for file in (tmp_path / "data" / "packed").glob("*-train.npy")}
    # The first epoch of two is at hand then, and the second needs them too.
    assert bool(left) == ("shuffle.epochs=2" in settings)
    prepare(load(*settings), silent)
    verify(tmp_path / "data", silent)
    made = shards(tmp_path / "data")
    assert len(made) > 10 and made == shards(tmp_path / "direct")


def test_rows_that_are_gone_are_packed_again_for_another_shuffle(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_buckets(monkeypatch, direct=False)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, 3)
        prepare(load(), silent)
    said: list[str] = []
    prepare(load("shuffle.epochs=2"), said.append)
    assert any(line.startswith("pack: ") and "rows" in line for line in said), said
    assert "normalize: done before" in said
    verify(tmp_path / "data", silent)
    prepare(load("shuffle.epochs=2", f"path={tmp_path}/again"), silent)
    assert shards(tmp_path / "data") == shards(tmp_path / "again")


def test_a_full_disk_is_reported_with_its_file_though_numpy_drops_the_cause(tmp_path: Path) -> None:
    """`ndarray.tofile` raises an OSError without errno; a worker's error reaches the command by pickle."""
    with pytest.raises(OSError) as caught, open_atomic(tmp_path / "00001.texts.npy"):
        raise OSError("202496 requested and 192496 written")
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.errno == errno.ENOSPC and error.filename == str(tmp_path / "00001.texts.npy")
    assert error.strerror == "No space left on device"
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_recognized_from_a_real_write_of_numpy(tmp_path: Path) -> None:
    """A limit on the size of files stands for the size of a disk."""
    program = (
        "import resource, signal, sys, numpy as np\n"
        "from pathlib import Path\n"
        "from headrace.data.shards import open_atomic\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        "try:\n"
        "    with open_atomic(Path(sys.argv[1])) as file:\n"
        "        np.save(file, np.zeros(1 << 20, np.uint8))\n"
        "except OSError as error:\n"
        "    print(error.errno is not None, error.filename)\n"
    )
    path = tmp_path / "a.npy"
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True)
    assert done.stdout == f"True {path}\n", done.stderr
