"""Datasets at a URL: a file server and a bucket with injected faults, and the local cache."""

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

# Before gcsfs is imported: it would query Google for the kind of the bucket, which takes a minute.
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


def write_dataset(folder: Path, *, shards: int = 3, rows: int = 300, length: int = 128) -> None:
    """Write a dataset of two epochs of random rows and a small evaluation split."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)

    def write_shard(name: str, count: int) -> Any:
        tokens = random.integers(4, 60_000, (count, length)).astype(np.uint16)
        flags = random.random((count, length)) < 0.05
        flags[:, 0] = True
        loss = pack_bits(random.random((count, length)) < 0.5)
        return write_rows(folder, name, Rows(tokens, pack_bits(flags), loss, np.zeros(count, np.uint16)))

    epochs = tuple(tuple(write_shard(f"train-{e}-{n:05}", rows) for n in range(shards)) for e in range(2))
    held_out = ((write_shard("evaluation-0-00000", 20),),)
    splits = {"train": Split(shards * rows, 9, 9, 9, epochs), "evaluation": Split(20, 9, 9, 9, held_out)}
    Index(length, "uint16", 60_000, SPECIAL, "f00d", 5.0, ("a",), splits, {}).write(folder)


class Server:
    """A server of a folder: at /, with ranges, and as bucket `data` of Google's JSON storage API.
    `fault` is called for every request for file contents: None serves it, a number is the status of the
    response, "cut" sends half of the content, "drop" closes the connection without a response, "hang" does so
    after 2 s."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.delay = folder, 0.0
        self.requests: Counter[tuple[str, str]] = Counter()  # requests for contents, by file and range
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
                    return self.respond(
                        200, json.dumps({"items": server.list_objects(query.get("prefix", ""))}).encode()
                    )
                api = re.fullmatch(r"/(download/)?storage/v1/b/data/o/([^/]+)", url.path)
                name = unquote(api[2] if api else url.path[1:])
                file = server.folder / name
                if not file.is_file():
                    return self.respond(404, b"{}")
                if api and query.get("alt") != "media":
                    return self.respond(200, json.dumps(server.describe_object(file)).encode())
                self.send_contents(file)

            def send_contents(self, file: Path) -> None:
                span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
                if self.command == "HEAD":
                    return self.respond(200, file.read_bytes())
                with server.lock:
                    server.requests[file.name, span[0] if span else ""] += 1
                    fault = server.fault(file.name, span and span[0])
                time.sleep(server.delay)
                if fault in ("drop", "hang"):
                    time.sleep(2.0 if fault == "hang" else 0.0)
                    self.close_connection = True
                    return self.connection.close()
                if isinstance(fault, int):
                    return self.respond(fault, b'{"error": {"message": "injected"}}')
                with file.open("rb") as opened:
                    opened.seek(int(span[1]) if span else 0)
                    data = opened.read(int(span[2]) + 1 - int(span[1]) if span else -1)
                self.respond(206 if span else 200, data, len(data) // 2 if fault == "cut" else len(data))

            def respond(self, status: int, body: bytes, content_length: int | None = None) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Accept-Ranges", "bytes")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body[:content_length])
                if content_length not in (None, len(body)):
                    self.close_connection = True

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.http.handle_error = lambda *args: None  # type: ignore[method-assign]
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(
            target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self.thread.start()

    def describe_object(self, file: Path) -> dict[str, str]:
        name = str(file.relative_to(self.folder))
        return {"kind": "storage#object", "name": name, "bucket": "data", "size": str(file.stat().st_size)}

    def list_objects(self, prefix: str) -> list[dict[str, str]]:
        files = sorted(file for file in self.folder.rglob("*") if file.is_file())
        return [
            description
            for description in map(self.describe_object, files)
            if description["name"].startswith(prefix)
        ]

    def block_requests(self) -> Counter[tuple[str, str]]:
        """Requests for contents of shards."""
        return Counter({key: count for key, count in self.requests.items() if key[0].endswith(".npy")})

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server with a dataset at /set, small blocks, and a temporary cache."""
    pytest.importorskip("aiohttp")
    write_dataset(tmp_path / "served/set")
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
    """Checksum of all arrays of some batches."""
    sha256 = hashlib.sha256()
    for order in (data.train_order(40, seed=3), data.eval_order(40)):
        for step in steps:
            packed = data.batch(order, step)
            for array in (packed.tokens, packed.segments, packed.positions, packed.loss_mask):
                sha256.update(np.ascontiguousarray(array))
    return sha256.hexdigest()


def test_batches_from_a_server_equal_local_batches_and_no_block_is_fetched_again(server: Server) -> None:
    local = digest(Dataset.open(server.folder / "set"))
    assert digest(Dataset.open(f"{server.url}/set/")) == local
    fetched = server.block_requests()
    assert set(fetched.values()) == {1}
    sizes = [os.path.getsize(server.folder / "set" / name) for name, _ in fetched]
    assert max(sizes) > 4 * BLOCK
    assert digest(Dataset.open(f"{server.url}/set")) == local
    assert server.block_requests() == fetched


def test_shorter_sequences_are_read_from_a_server(server: Server) -> None:
    remote, local = (
        Dataset.open(path, sequence_length=32) for path in (f"{server.url}/set", server.folder / "set")
    )
    assert digest(remote, range(3)) == digest(local, range(3))


def test_only_blocks_near_the_requested_rows_are_fetched(server: Server) -> None:
    data = Dataset.open(f"{server.url}/set")
    data.batch_tokens(data.train_order(4, seed=0), 0)
    time.sleep(0.2)
    names = {name for name, _ in server.block_requests()}
    assert names <= {f"train-0-00000{suffix}.npy" for suffix in ("", ".starts", ".loss")}
    assert 4 <= len([1 for name, _ in server.block_requests() if name == "train-0-00000.npy"]) < 7


def test_errors_of_the_server_and_broken_connections_are_retried(server: Server) -> None:
    local = digest(Dataset.open(server.folder / "set"))
    faults = [503, "drop", 429, "cut", 500]
    attempts: Counter[tuple[str, str]] = Counter()

    def fault(name: str, span: str) -> Any:
        attempts[name, span] += 1
        return faults[(len(attempts) + attempts[name, span]) % 5] if attempts[name, span] <= 2 else None

    server.fault = fault
    assert digest(Dataset.open(f"{server.url}/set")) == local
    assert max(attempts.values()) == 3


def test_a_connection_that_hangs_is_abandoned(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_server_that_remains_down_is_reported_with_the_reason(server: Server) -> None:
    data = Dataset.open(f"{server.url}/set")
    server.fault = lambda name, span: 503
    with pytest.raises(ValueError, match=r"train-0-00000\.npy could not be read in 6 tries; .*503"):
        data.batch(data.train_order(4, seed=0), 0)
    server.fault = lambda name, span: None
    data.batch(data.train_order(4, seed=0), 0)


def test_blocks_are_fetched_in_parallel_and_ahead_of_use(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Dataset.open(f"{server.url}/set")
    server.delay = 0.1
    started = time.perf_counter()
    for step in range(10):  # 75 KB of tokens a batch: 46 blocks and those of starts and loss
        data.batch(data.train_order(300, seed=0), step, slice(0, 300))
    assert len(server.block_requests()) > 40
    assert time.perf_counter() - started < len(server.block_requests()) * 0.1 / 3


def test_missing_or_forbidden_files_are_reported_without_retries(server: Server) -> None:
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
    content = file.read_bytes()
    file.write_bytes(content[:-2])
    with pytest.raises(
        ValueError, match=rf"train-1-00002\.npy has {len(content) - 2} bytes, .* {len(content)}"
    ):
        Dataset.open(f"{server.url}/set")
    np.save(file, np.zeros((600, 64), np.uint16))
    data = Dataset.open(f"{server.url}/set")
    with pytest.raises(
        ValueError, match=r"shape \(600, 64\), and the index says uint16 of shape \(300, 128\)"
    ):
        data.batch(data.train_order(300, seed=0), 5)


def test_a_shard_with_a_wrong_checksum_is_refused_and_not_cached(server: Server, tmp_path: Path) -> None:
    file = server.folder / "set/train-0-00000.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    data = Dataset.open(f"{server.url}/set")
    with pytest.raises(ValueError, match=r"train-0-00000\.npy has checksum \w{8}, and the index says \w{8}"):
        data.batch(data.train_order(300, seed=0), 0)
    assert not list((tmp_path / "cache/shards").glob("*-train-0-00000.npy*"))


def test_data_replaced_at_the_same_url_is_fetched_again(server: Server) -> None:
    before = digest(Dataset.open(f"{server.url}/set"), range(2))
    for file in (server.folder / "set").iterdir():
        file.unlink()
    (server.folder / "set").rmdir()
    write_dataset(server.folder / "set", rows=310)
    after = digest(Dataset.open(f"{server.url}/set"), range(2))
    assert after != before and after == digest(Dataset.open(server.folder / "set"), range(2))


def test_the_cache_respects_the_size_limit_and_evicts_the_least_recently_used(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 300_000  # a shard's tokens, starts and loss take 86 KB
    monkeypatch.setenv("HEADRACE_CACHE_GB", str(limit / 1e9))
    data, local = Dataset.open(f"{server.url}/set"), Dataset.open(server.folder / "set")
    for step in range(6):
        order = data.train_order(300, seed=0)
        np.testing.assert_array_equal(data.batch_tokens(order, step), local.batch_tokens(order, step))
        names = [file.name[33:] for file in (tmp_path / "cache/shards").glob("*.npy")]
        assert sum(file.stat().st_size for file in (tmp_path / "cache/shards").iterdir()) < limit
    # Prefetching may evict a shard in use, which remains readable, but the least recently used goes first.
    assert "train-0-00000.npy" not in names and len(names) > 3
    monkeypatch.setenv("HEADRACE_CACHE_GB", "much")
    with pytest.raises(ValueError, match="HEADRACE_CACHE_GB: found 'much', expected a number"):
        data = Dataset.open(f"{server.url}/set")
        data.batch_tokens(data.train_order(300, seed=0), 0)


def test_the_error_for_an_unwritable_cache_names_the_variable_for_another(
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


def start_reader(url: str) -> subprocess.Popen[str]:
    """Start a process that opens the dataset, and reads it after a line on stdin."""
    path = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
    program = READER.format(path=path, block=BLOCK, url=url)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "open\n"
    return process


def test_two_processes_share_the_cache_and_the_work(server: Server) -> None:
    server.delay = 0.02  # so that the readers overlap
    readers = [start_reader(f"{server.url}/set") for _ in range(2)]
    for process in readers:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    digests = [process.communicate(timeout=60)[0].strip() for process in readers]
    assert digests == [digest(Dataset.open(server.folder / "set"))] * 2
    assert set(server.block_requests().values()) == {1}


def test_a_killed_reader_leaves_a_valid_cache(server: Server) -> None:
    server.delay = 0.02
    local = digest(Dataset.open(server.folder / "set"))
    process = start_reader(f"{server.url}/set")
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    while len(server.block_requests()) < 20:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = sum(server.block_requests().values())
    assert digest(Dataset.open(f"{server.url}/set")) == local
    after = server.block_requests()
    # At most the blocks in flight at the kill are fetched again.
    assert (
        before < sum(after.values()) and sum(count - 1 for count in after.values()) <= remote_cache.IN_FLIGHT
    )


def test_batches_from_a_bucket_equal_local_batches(bucket: Server) -> None:
    local = digest(Dataset.open(bucket.folder / "set"))
    assert digest(Dataset.open(f"{bucket.url}/set")) == local
    fetched = bucket.block_requests()
    assert set(fetched.values()) == {1}
    assert digest(Dataset.open(f"{bucket.url}/set")) == local
    assert bucket.block_requests() == fetched


def test_errors_of_a_bucket_are_retried(bucket: Server) -> None:
    attempts: Counter[tuple[str, str]] = Counter()

    def fault(name: str, span: str) -> Any:
        attempts[name, span] += 1
        return (
            [503, "drop", "cut"][len(attempts) % 3]
            if attempts[name, span] == 1 and len(attempts) % 7 == 0
            else None
        )

    bucket.fault = fault
    local = digest(Dataset.open(bucket.folder / "set"), range(5))
    assert digest(Dataset.open(f"{bucket.url}/set"), range(5)) == local
    assert max(attempts.values()) == 2


def test_missing_or_forbidden_files_of_a_bucket_are_reported(bucket: Server) -> None:
    with pytest.raises(ValueError, match=r"no packed data in gs://data/nowhere"):
        Dataset.open(f"{bucket.url}/nowhere")
    (bucket.folder / "set/train-0-00001.starts.npy").unlink()
    with pytest.raises(ValueError, match=r"gs://data/set/train-0-00001\.starts\.npy is missing"):
        Dataset.open(f"{bucket.url}/set")
    bucket.fault = lambda name, span: 403
    with pytest.raises(ValueError, match=r"gs://data/set/index\.json may not be read .*Forbidden"):
        Dataset.open(f"{bucket.url}/set")


def test_any_filesystem_of_fsspec_is_supported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    write_dataset(tmp_path / "set")
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "set"), "/stream-test/set", recursive=True)
    try:
        remote = digest(Dataset.open("memory://stream-test/set"), range(8))
    finally:
        memory.rm("/stream-test", recursive=True)
    assert remote == digest(Dataset.open(tmp_path / "set"), range(8))


def test_a_url_of_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(ValueError, match="nonsense://x cannot be read: Protocol not known"):
        Dataset.open("nonsense://x")


@pytest.mark.skipif(find_spec("gcsfs") is not None, reason="gcsfs is installed")
def test_a_bucket_without_its_library_says_what_to_install() -> None:
    with pytest.raises(
        ValueError, match=r"gs://bucket/set cannot be read: .*gcsfs.*pip install 'headrace\[gcs\]'"
    ):
        Dataset.open("gs://bucket/set")
