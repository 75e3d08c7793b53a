"""The stream from a URL: real servers of files and of a bucket, with faults, and the cache in between."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

# Before gcsfs is imported: it would ask Google what kind of bucket this is, for a minute.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")

import fsspec
import numpy as np
import pytest

from headrace.data import remote_cache
from headrace.data.dataset import Dataset
from headrace.data.remote_cache import RemoteFolder
from headrace.data.shards import Index, Rows, SpecialTokenIds, Split, pack_bits, write_rows
from headrace.storage import files

SPECIAL = SpecialTokenIds(bos=1, eos=2, pad=0, mask=3)
BLOCK = 1 << 14


def write(folder: Path, *, shards: int = 3, rows: int = 300, length: int = 128) -> None:
    """Two epochs of random rows and a small evaluation split."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)

    def one(name: str, count: int) -> Any:
        tokens = random.integers(4, 60_000, (count, length)).astype(np.uint16)
        flags = random.random((count, length)) < 0.05
        flags[:, 0] = True
        loss = pack_bits(random.random((count, length)) < 0.5)
        return write_rows(folder, name, Rows(tokens, pack_bits(flags), loss, np.zeros(count, np.uint16)))

    epochs = tuple(tuple(one(f"train-{e}-{n:05}", rows) for n in range(shards)) for e in range(2))
    held_out = ((one("evaluation-0-00000", 20),),)
    splits = {"train": Split(shards * rows, 9, 9, 9, epochs), "evaluation": Split(20, 9, 9, 9, held_out)}
    Index(length, "uint16", 60_000, SPECIAL, "f00d", 5.0, ("a",), splits, {}).write(folder)


class Server:
    """Serves a folder at /, with ranges, and as the bucket `data` by the JSON API of Google's storage.
    `fault` is asked about every request for file contents: None lets it pass, a number is the status to
    answer, "cut" ends the answer half-way, "drop" closes the connection without one, "hang" after a while."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.delay = folder, 0.0
        self.requests: Counter[tuple[str, str]] = Counter()  # by file and range, of contents alone
        self.fault: Any = lambda name, span: None
        self.lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *args: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                url = urlsplit(self.path)
                query = {key: values[-1] for key, values in parse_qs(url.query).items()}
                if url.path == "/storage/v1/b/data/o":
                    return self.answer(
                        200, json.dumps({"items": server.listed(query.get("prefix", ""))}).encode()
                    )
                api = re.fullmatch(r"/(download/)?storage/v1/b/data/o/([^/]+)", url.path)
                name = unquote(api[2] if api else url.path[1:])
                file = server.folder / name
                if not file.is_file():
                    return self.answer(404, b"{}")
                if api and query.get("alt") != "media":
                    return self.answer(200, json.dumps(server.described(file)).encode())
                self.contents(file)

            def contents(self, file: Path) -> None:
                span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
                if self.command == "HEAD":
                    return self.answer(200, file.read_bytes())
                with server.lock:
                    server.requests[file.name, span[0] if span else ""] += 1
                    fault = server.fault(file.name, span and span[0])
                time.sleep(server.delay)
                if fault in ("drop", "hang"):
                    time.sleep(2.0 if fault == "hang" else 0.0)
                    self.close_connection = True
                    return self.connection.close()
                if isinstance(fault, int):
                    return self.answer(fault, b'{"error": {"message": "injected"}}')
                with file.open("rb") as opened:
                    opened.seek(int(span[1]) if span else 0)
                    data = opened.read(int(span[2]) + 1 - int(span[1]) if span else -1)
                self.answer(206 if span else 200, data, len(data) // 2 if fault == "cut" else len(data))

            def answer(self, status: int, body: bytes, told: int | None = None) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Accept-Ranges", "bytes")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body[:told])
                if told not in (None, len(body)):
                    self.close_connection = True

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.http.handle_error = lambda *args: None  # type: ignore[method-assign]
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(
            target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self.thread.start()

    def described(self, file: Path) -> dict[str, str]:
        name = str(file.relative_to(self.folder))
        return {"kind": "storage#object", "name": name, "bucket": "data", "size": str(file.stat().st_size)}

    def listed(self, prefix: str) -> list[dict[str, str]]:
        files = sorted(file for file in self.folder.rglob("*") if file.is_file())
        return [one for one in map(self.described, files) if one["name"].startswith(prefix)]

    def blocks(self) -> Counter[tuple[str, str]]:
        """What was asked for of the shards."""
        return Counter({key: count for key, count in self.requests.items() if key[0].endswith(".npy")})

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A dataset at SERVER/set, small blocks, and a cache of the test's own."""
    pytest.importorskip("aiohttp")
    write(tmp_path / "served/set")
    monkeypatch.setattr(remote_cache, "BLOCK", BLOCK)
    monkeypatch.setattr(files, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(RemoteFolder, "prefetch_bytes", 4 * BLOCK)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    server = Server(tmp_path / "served")
    yield server
    server.close()


@pytest.fixture
def bucket(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    pytest.importorskip("gcsfs")
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon", "endpoint_url": server.url})
    server.url = "gs://data"
    yield server


def digest(data: Dataset, steps: range = range(50)) -> str:
    """Of everything that some batches hold."""
    found = hashlib.sha256()
    for order in (data.train_order(40, seed=3), data.eval_order(40)):
        for step in steps:
            packed = data.batch(order, step)
            for array in (packed.tokens, packed.segments, packed.positions, packed.loss_mask):
                found.update(np.ascontiguousarray(array))
    return found.hexdigest()


def test_batches_from_a_server_are_those_from_the_disk_and_nothing_is_fetched_twice(server: Server) -> None:
    near = digest(Dataset.open(server.folder / "set"))
    assert digest(Dataset.open(f"{server.url}/set/")) == near
    fetched = server.blocks()
    assert set(fetched.values()) == {1}
    sizes = [os.path.getsize(server.folder / "set" / name) for name, _ in fetched]
    assert max(sizes) > 4 * BLOCK
    assert digest(Dataset.open(f"{server.url}/set")) == near
    assert server.blocks() == fetched


def test_rows_cut_shorter_come_from_a_server_too(server: Server) -> None:
    far, near = (
        Dataset.open(place, sequence_length=32) for place in (f"{server.url}/set", server.folder / "set")
    )
    assert digest(far, range(3)) == digest(near, range(3))


def test_only_what_is_near_the_rows_asked_for_is_fetched(server: Server) -> None:
    data = Dataset.open(f"{server.url}/set")
    data.batch_tokens(data.train_order(4, seed=0), 0)
    time.sleep(0.2)
    names = {name for name, _ in server.blocks()}
    assert names <= {f"train-0-00000{suffix}.npy" for suffix in ("", ".starts", ".loss")}
    assert 4 <= len([1 for name, _ in server.blocks() if name == "train-0-00000.npy"]) < 7


def test_busy_servers_and_broken_connections_are_outlived(server: Server) -> None:
    near = digest(Dataset.open(server.folder / "set"))
    kinds = [503, "drop", 429, "cut", 500]
    asked: Counter[tuple[str, str]] = Counter()

    def fault(name: str, span: str) -> Any:
        asked[name, span] += 1
        return kinds[(len(asked) + asked[name, span]) % 5] if asked[name, span] <= 2 else None

    server.fault = fault
    assert digest(Dataset.open(f"{server.url}/set")) == near
    assert max(asked.values()) == 3


def test_a_connection_that_hangs_is_not_waited_for(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "RESPONSE_TIMEOUT", 0.3)
    data = Dataset.open(f"{server.url}/set")
    hung: set[tuple[str, str]] = set()

    def fault(name: str, span: str) -> Any:
        first = (name, span) not in hung
        hung.add((name, span))
        return "hang" if first else None

    server.fault = fault
    started = time.perf_counter()
    data.batch(data.train_order(4, seed=0), 0)
    assert hung and time.perf_counter() - started < 1.9


def test_a_server_that_stays_down_is_given_up_on_with_the_reason(server: Server) -> None:
    data = Dataset.open(f"{server.url}/set")
    server.fault = lambda name, span: 503
    with pytest.raises(ValueError, match=r"train-0-00000\.npy could not be read in 6 tries; .*503"):
        data.batch(data.train_order(4, seed=0), 0)
    server.fault = lambda name, span: None
    data.batch(data.train_order(4, seed=0), 0)


def test_blocks_come_several_at_once_and_ahead_of_their_use(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Dataset.open(f"{server.url}/set")
    server.delay = 0.1
    started = time.perf_counter()
    for step in range(10):  # 75 KB of tokens a batch: 46 blocks and those of starts and loss
        data.batch(data.train_order(300, seed=0), step, slice(0, 300))
    assert len(server.blocks()) > 40
    assert time.perf_counter() - started < len(server.blocks()) * 0.1 / 3


def test_what_is_missing_or_forbidden_is_said_at_once(server: Server) -> None:
    with pytest.raises(ValueError, match=r"no packed data in http://.*/nowhere.*headrace data prepare"):
        Dataset.open(f"{server.url}/nowhere")
    server.fault = lambda name, span: 403
    with pytest.raises(ValueError, match=r"set/index\.json may not be read .*403.*credentials"):
        Dataset.open(f"{server.url}/set")
    server.fault = lambda name, span: None
    data = Dataset.open(f"{server.url}/set")
    (server.folder / "set/train-0-00000.npy").rename(server.folder / "elsewhere")
    with pytest.raises(ValueError, match=r"set/train-0-00000\.npy is missing"):
        data.batch(data.train_order(4, seed=0), 0)
    with pytest.raises(ValueError, match=r"set/train-0-00000\.npy is missing"):
        Dataset.open(f"{server.url}/set")


def test_shards_of_another_size_or_shape_are_refused(server: Server) -> None:
    file = server.folder / "set/train-1-00002.npy"
    whole = file.read_bytes()
    file.write_bytes(whole[:-2])
    with pytest.raises(ValueError, match=rf"train-1-00002\.npy has {len(whole) - 2} bytes, .* {len(whole)}"):
        Dataset.open(f"{server.url}/set")
    np.save(file, np.zeros((600, 64), np.uint16))
    data = Dataset.open(f"{server.url}/set")
    with pytest.raises(
        ValueError, match=r"shape \(600, 64\), and the index says uint16 of shape \(300, 128\)"
    ):
        data.batch(data.train_order(300, seed=0), 5)


def test_a_shard_that_changed_behind_the_index_is_refused_and_not_kept(
    server: Server, tmp_path: Path
) -> None:
    file = server.folder / "set/train-0-00000.npy"
    whole = bytearray(file.read_bytes())
    whole[-1] ^= 1
    file.write_bytes(whole)
    data = Dataset.open(f"{server.url}/set")
    with pytest.raises(ValueError, match=r"train-0-00000\.npy has checksum \w{8}, and the index says \w{8}"):
        data.batch(data.train_order(300, seed=0), 0)
    assert not list((tmp_path / "cache/shards").glob("*-train-0-00000.npy*"))


def test_data_made_again_at_the_same_url_is_fetched_again(server: Server) -> None:
    before = digest(Dataset.open(f"{server.url}/set"), range(2))
    for file in (server.folder / "set").iterdir():
        file.unlink()
    (server.folder / "set").rmdir()
    write(server.folder / "set", rows=310)
    after = digest(Dataset.open(f"{server.url}/set"), range(2))
    assert after != before and after == digest(Dataset.open(server.folder / "set"), range(2))


def test_the_cache_stays_within_its_size_and_drops_what_was_not_used_for_longest(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 300_000  # a shard's tokens, starts and loss take 86 KB
    monkeypatch.setenv("HEADRACE_CACHE_GB", str(limit / 1e9))
    data, near = Dataset.open(f"{server.url}/set"), Dataset.open(server.folder / "set")
    for step in range(6):
        order = data.train_order(300, seed=0)
        np.testing.assert_array_equal(data.batch_tokens(order, step), near.batch_tokens(order, step))
        names = [file.name[33:] for file in (tmp_path / "cache/shards").glob("*.npy")]
        assert sum(file.stat().st_size for file in (tmp_path / "cache/shards").iterdir()) < limit
    # What is read ahead may push out a shard in use, which stays readable, but the first goes before others.
    assert "train-0-00000.npy" not in names and len(names) > 3
    monkeypatch.setenv("HEADRACE_CACHE_GB", "much")
    with pytest.raises(ValueError, match="HEADRACE_CACHE_GB: found 'much', expected a number"):
        data = Dataset.open(f"{server.url}/set")
        data.batch_tokens(data.train_order(300, seed=0), 0)


def test_a_cache_that_cannot_be_written_says_how_to_name_another(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file"))
    data = Dataset.open(f"{server.url}/set")
    with pytest.raises(ValueError, match=r"cannot be used: Not a directory.*HEADRACE_CACHE"):
        data.batch(data.train_order(4, seed=0), 0)


READER = """
import sys
sys.path[:0] = {path!r}
from headrace.storage import files
from headrace.data import remote_cache
remote_cache.BLOCK, remote_cache.RemoteFolder.prefetch_bytes = {block}, 4 * {block}
from tests.data.test_remote_cache import digest
from headrace.data.dataset import Dataset
data = Dataset.open({url!r})
print("open", flush=True)
sys.stdin.readline()
print(digest(data), flush=True)
"""


def reader(url: str) -> subprocess.Popen[str]:
    """Another process that reads the dataset when it is told to."""
    path = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
    program = READER.format(path=path, block=BLOCK, url=url)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "open\n"
    return process


def test_two_processes_share_the_cache_and_the_work(server: Server) -> None:
    server.delay = 0.02  # so that they meet
    readers = [reader(f"{server.url}/set") for _ in range(2)]
    for one in readers:
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
    found = [one.communicate(timeout=60)[0].strip() for one in readers]
    assert found == [digest(Dataset.open(server.folder / "set"))] * 2
    assert set(server.blocks().values()) == {1}


def test_a_reader_killed_half_way_leaves_a_cache_that_is_right(server: Server) -> None:
    server.delay = 0.02
    near = digest(Dataset.open(server.folder / "set"))
    one = reader(f"{server.url}/set")
    assert one.stdin is not None
    one.stdin.write("\n")
    one.stdin.flush()
    while len(server.blocks()) < 20:
        time.sleep(0.005)
    one.send_signal(signal.SIGKILL)
    one.communicate()
    before = sum(server.blocks().values())
    assert digest(Dataset.open(f"{server.url}/set")) == near
    after = server.blocks()
    # At most what was under way when it was killed is fetched again.
    assert (
        before < sum(after.values()) and sum(count - 1 for count in after.values()) <= remote_cache.IN_FLIGHT
    )


def test_batches_from_a_bucket_are_those_from_the_disk(bucket: Server) -> None:
    near = digest(Dataset.open(bucket.folder / "set"))
    assert digest(Dataset.open(f"{bucket.url}/set")) == near
    fetched = bucket.blocks()
    assert set(fetched.values()) == {1}
    assert digest(Dataset.open(f"{bucket.url}/set")) == near
    assert bucket.blocks() == fetched


def test_a_busy_bucket_is_outlived(bucket: Server) -> None:
    asked: Counter[tuple[str, str]] = Counter()

    def fault(name: str, span: str) -> Any:
        asked[name, span] += 1
        return (
            [503, "drop", "cut"][len(asked) % 3] if asked[name, span] == 1 and len(asked) % 7 == 0 else None
        )

    bucket.fault = fault
    near = digest(Dataset.open(bucket.folder / "set"), range(5))
    assert digest(Dataset.open(f"{bucket.url}/set"), range(5)) == near
    assert max(asked.values()) == 2


def test_what_is_missing_in_a_bucket_or_forbidden_is_said(bucket: Server) -> None:
    with pytest.raises(ValueError, match=r"no packed data in gs://data/nowhere"):
        Dataset.open(f"{bucket.url}/nowhere")
    (bucket.folder / "set/train-0-00001.starts.npy").unlink()
    with pytest.raises(ValueError, match=r"gs://data/set/train-0-00001\.starts\.npy is missing"):
        Dataset.open(f"{bucket.url}/set")
    bucket.fault = lambda name, span: 403
    with pytest.raises(ValueError, match=r"gs://data/set/index\.json may not be read .*Forbidden"):
        Dataset.open(f"{bucket.url}/set")


def test_any_filesystem_that_fsspec_knows_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "set")
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "set"), "/stream-test/set", recursive=True)
    try:
        far = digest(Dataset.open("memory://stream-test/set"), range(8))
    finally:
        memory.rm("/stream-test", recursive=True)
    assert far == digest(Dataset.open(tmp_path / "set"), range(8))


def test_a_url_that_nothing_here_can_read_is_explained() -> None:
    with pytest.raises(ValueError, match="nonsense://x cannot be read: Protocol not known"):
        Dataset.open("nonsense://x")


@pytest.mark.skipif(find_spec("gcsfs") is not None, reason="gcsfs is here")
def test_a_bucket_without_its_library_says_what_to_install() -> None:
    with pytest.raises(
        ValueError, match=r"gs://bucket/set cannot be read: .*gcsfs.*pip install 'headrace\[gcs\]'"
    ):
        Dataset.open("gs://bucket/set")
