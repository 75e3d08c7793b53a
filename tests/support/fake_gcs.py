"""A bucket of Google Cloud Storage in memory, behind real HTTP: as much of the JSON API as gcsfs and
tensorstore use, with generations and preconditions, and faults on request. What it cannot show: quotas,
permissions of single objects, TLS, and how long real answers take."""

import base64
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import google_crc32c

ENVIRONMENT = {  # of the processes that are to talk to it, beside its address
    "FSSPEC_GS_TOKEN": "anon",
    "FSSPEC_GCS_TOKEN": "anon",
    "GOOGLE_AUTH_TOKEN_FOR_TESTING": "nobody",
    "NO_GCE_CHECK": "true",
}


@dataclass
class Object:
    data: bytes
    generation: int
    updated: float
    kind: str = "application/octet-stream"
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass
class Fault:
    """What befalls requests whose `METHOD /path?query` matches: after `delay` seconds a status, or a
    connection that is closed before ("drop") or in the middle of the answer ("cut"), or after the work was
    done, with the answer lost ("lost"). `times` of them, after letting `skip` pass."""

    match: str
    status: int = 0
    said: str = "injected"
    how: str = ""
    times: int = 1
    skip: int = 0
    delay: float = 0.0
    met: int = 0


class Store:
    """Runs until closed. Objects by bucket and name; `requests` counts what was asked by method."""

    def __init__(self, *buckets: str, location: str = "US-CENTRAL1") -> None:
        self.buckets: dict[str, dict[str, Object]] = {name: {} for name in buckets}
        self.locations = dict.fromkeys(buckets, location)
        self.soft_delete = 0  # seconds for which what is removed is kept
        self.uploads: dict[str, dict[str, Any]] = {}
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.clock = 0.0  # seconds that this server's clock is ahead
        self.generation = 1_700_000_000_000_000
        self.lock = threading.RLock()
        handler = type("Bound", (Handler,), {"store": self})
        self.http = Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    @property
    def environment(self) -> dict[str, str]:
        return ENVIRONMENT | {"STORAGE_EMULATOR_HOST": self.url, "TENSORSTORE_GCS_HTTP_URL": self.url}

    def fail(self, match: str, **how: Any) -> Fault:
        self.faults.append(Fault(match, **how))
        return self.faults[-1]

    def put(self, bucket: str, name: str, data: bytes, **more: Any) -> Object:
        with self.lock:
            self.generation += 1
            made = Object(data, self.generation, time.time() + self.clock, **more)
            self.buckets[bucket][name] = made
            return made

    def names(self, bucket: str, prefix: str = "") -> list[str]:
        with self.lock:
            return sorted(name for name in self.buckets[bucket] if name.startswith(prefix))

    def counts(self) -> Counter[str]:
        return Counter(line.split()[0] for line in self.requests)

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@contextmanager
def running(*buckets: str, **how: Any) -> Iterator[Store]:
    store = Store(*buckets, **how)
    try:
        yield store
    finally:
        store.close()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *args: Any) -> None:  # clients that were killed
        pass


class Refused(Exception):
    """An answer other than the one asked for."""

    def __init__(self, status: int, message: str = "") -> None:
        super().__init__(message)
        self.status = status


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    store: Store

    def log_message(self, *args: Any) -> None:
        pass

    def handle_one(self) -> None:
        store, url = self.store, urlsplit(self.path)
        self.query = {key: values[-1] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
        self.sent = self.body()
        self.limit: int | None = None  # bytes of the answer that come through
        with store.lock:
            named = re.search(rb'"name": *"([^"]*)"', self.sent[:500])  # not all say it in the URL
            line = f"{self.command} {unquote(self.path)} {named[1].decode() if named else ''}"
            store.requests.append(line)
            fault = next((one for one in store.faults if re.search(one.match, line) and due(one)), None)
        if fault is not None:
            time.sleep(fault.delay)
            if fault.how == "drop":
                return self.hang_up()
            if fault.status:
                return self.refuse(fault.status, fault.said)
            self.limit = {"lost": -1, "cut": 1}.get(fault.how)
        try:
            self.route(url.path)
        except Refused as refusal:
            self.refuse(refusal.status, str(refusal))

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = handle_one

    def route(self, path: str) -> None:
        if found := re.fullmatch(r"/upload/storage/v1/b/([^/]+)/o", path):
            return self.upload(found[1])
        if found := re.fullmatch(r"/(?:download/)?storage/v1/b/([^/]+)/o/([^/]+)", path):
            return self.object(found[1], unquote(found[2]))
        moves = r"/storage/v1/b/([^/]+)/o/([^/]+)/(rewriteTo|copyTo|moveTo)(?:/b/([^/]+))?/o/([^/]+)"
        if found := re.fullmatch(moves, path):
            return self.move(found[1], unquote(found[2]), found[3], found[4] or found[1], unquote(found[5]))
        if found := re.fullmatch(r"/storage/v1/b/([^/]+)/o", path):
            return self.list(found[1])
        if found := re.fullmatch(r"/storage/v1/b/([^/]+)", path):
            self.bucket(found[1])
            where = self.store.locations[found[1]]
            told = {"kind": "storage#bucket", "name": found[1], "location": where}
            policy = {"retentionDurationSeconds": str(self.store.soft_delete)}  # numbers of 64 bits are texts
            return self.json(told | {"softDeletePolicy": policy})
        raise Refused(501, f"not known here: {self.command} {path}")

    def upload(self, bucket: str) -> None:
        kind = self.query.get("uploadType")
        if kind == "media":
            return self.put(bucket, self.query["name"], self.sent, self.query)
        if kind == "multipart":
            boundary = re.search(r"boundary=['\"]?([^'\";]+)", self.headers["Content-Type"])
            assert boundary is not None
            parts = self.sent.split(b"--" + boundary[1].encode())[1:-1]
            end = b"\r\n" if parts[0].startswith(b"\r\n") else b"\n"  # gcsfs ends lines with \n alone
            about, content = (part.removesuffix(end).partition(end + end)[2] for part in parts)
            told = json.loads(about)
            return self.put(bucket, told.get("name") or self.query["name"], content, self.query)
        if kind == "resumable" and "upload_id" not in self.query:
            told = json.loads(self.sent or b"{}")
            self.bucket(bucket)
            with self.store.lock:
                key = f"upload-{len(self.store.uploads)}"
                name = told.get("name") or self.query["name"]
                self.store.uploads[key] = dict(name=name, query=self.query, data=bytearray())
            where = f"{self.store.url}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={key}"
            return self.answer(200, b"", {"Location": where})
        return self.piece(bucket, self.store.uploads[self.query["upload_id"]])

    def piece(self, bucket: str, upload: dict[str, Any]) -> None:
        span = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", self.headers.get("Content-Range", ""))
        data = upload["data"]
        if span and span[1] is not None:
            del data[int(span[1]) :]
        data += self.sent
        if span and (span[3] == "*" or len(data) < int(span[3])):
            return self.answer(308, b"", {"Range": f"bytes=0-{len(data) - 1}"} if data else {})
        self.put(bucket, upload["name"], bytes(data), upload["query"])

    def put(self, bucket: str, name: str, data: bytes, query: dict[str, str]) -> None:
        with self.store.lock:
            self.bucket(bucket)
            self.check(bucket, name, query)
            made = self.store.put(bucket, name, data)
        self.json(described(bucket, name, made))

    def check(self, bucket: str, name: str, query: dict[str, str]) -> None:
        """Preconditions."""
        found = self.store.buckets[bucket].get(name)
        now = found.generation if found else 0
        if int(query.get("ifGenerationMatch", now)) != now:
            raise Refused(412, "conditionNotMet")
        if "ifGenerationNotMatch" in query and int(query["ifGenerationNotMatch"]) == now:
            raise Refused(304 if self.command == "GET" else 412, "conditionNotMet")

    def bucket(self, name: str) -> dict[str, Object]:
        if name not in self.store.buckets:
            raise Refused(404, "The specified bucket does not exist.")
        return self.store.buckets[name]

    def object(self, bucket: str, name: str) -> None:
        with self.store.lock:
            objects = self.bucket(bucket)
            if name not in objects:
                raise Refused(404, f"No such object: {bucket}/{name}")
            self.check(bucket, name, self.query)
            found = objects[name]
            if self.command == "DELETE":
                del objects[name]
                return self.answer(204)
        if self.query.get("alt") != "media":
            return self.json(described(bucket, name, found))
        about = {"x-goog-generation": str(found.generation), "x-goog-hash": f"crc32c={crc(found.data)}"}
        about |= {"ETag": f'"{found.generation}"', "x-goog-stored-content-length": str(len(found.data))}
        span = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not span or not found.data:
            return self.answer(200, found.data, about)
        size = len(found.data)
        first = int(span[1]) if span[1] else max(size - int(span[2]), 0)
        last = min(int(span[2]), size - 1) if span[1] and span[2] else size - 1
        if first >= size:
            raise Refused(416, "range")
        about["Content-Range"] = f"bytes {first}-{last}/{size}"
        self.answer(206, found.data[first : last + 1], about)

    def move(self, bucket: str, name: str, verb: str, to: str, target: str) -> None:
        with self.store.lock:
            source, goal = self.bucket(bucket), self.bucket(to)
            if name not in source:
                raise Refused(404, f"No such object: {bucket}/{name}")
            made = self.store.put(to, target, source[name].data)
            assert goal[target] is made
            if verb == "moveTo":
                del source[name]
        told = described(to, target, made)
        self.json({"done": True, "resource": told} if verb == "rewriteTo" else told)

    def list(self, bucket: str) -> None:
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        start, end = self.query.get("startOffset", ""), self.query.get("endOffset", "")
        with self.store.lock:
            objects, items, folders = dict(self.bucket(bucket)), [], []
        for name in sorted(objects):
            if not name.startswith(prefix) or name < start or (end and name >= end):
                continue
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                folder = prefix + rest.split(delimiter)[0] + delimiter
                folders += [folder] if folder not in folders else []
            else:
                items.append(name)
        after, most = self.query.get("pageToken", ""), int(self.query.get("maxResults", 1000))
        left = sorted(name for name in [*items, *folders] if name > after)
        page = left[:most]
        told: dict[str, Any] = {
            "items": [described(bucket, name, objects[name]) for name in page if name in items],
            "prefixes": [name for name in page if name in folders],
        }
        if len(left) > most:
            told["nextPageToken"] = page[-1]
        self.json(told)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def json(self, told: Any) -> None:
        self.answer(200, json.dumps(told).encode())

    def refuse(self, status: int, message: str) -> None:
        if status == 304:
            return self.answer(304)
        told = {"code": status, "message": message, "errors": [{"message": message, "reason": "fake"}]}
        self.answer(status, json.dumps({"error": told}).encode())

    def date_time_string(self, timestamp: float | None = None) -> str:
        return formatdate((timestamp or time.time()) + self.store.clock, usegmt=True)

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        if self.limit == -1:
            return self.hang_up()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD" and status not in (204, 304):
            self.wfile.write(body[: len(body) // 2] if self.limit == 1 else body)
        if self.limit == 1:
            self.wfile.flush()
            self.hang_up()

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.close()


def due(fault: Fault) -> bool:
    """Whether it is this request's turn."""
    fault.met += 1
    return fault.skip < fault.met <= fault.skip + fault.times


def crc(data: bytes) -> str:
    return base64.b64encode(google_crc32c.Checksum(data).digest()).decode()


def described(bucket: str, name: str, found: Object) -> dict[str, Any]:
    stamp = datetime.fromtimestamp(found.updated, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"
    return {
        "kind": "storage#object",
        "bucket": bucket,
        "name": name,
        "generation": str(found.generation),
        "metageneration": "1",
        "size": str(len(found.data)),
        "crc32c": crc(found.data),
        "etag": str(found.generation),
        "contentType": found.kind,
        "timeCreated": stamp,
        "updated": stamp,
        "storageClass": "STANDARD",
        "metadata": found.metadata,
    }
