"""A fake Google Cloud Storage in memory, over real HTTP: the part of the JSON API that gcsfs and tensorstore
use, with generations, preconditions and injected faults. Not simulated: quotas, object permissions,
TLS and realistic latency."""

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

ENVIRONMENT = {  # for client processes, in addition to the address
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
    """A fault of requests whose `METHOD /path?query` matches: after `delay` seconds an error status, or a
    connection closed before the request is handled ("drop"), within the response ("cut"), or after
    the request was handled without a response ("lost"). Affects `times` requests after the first `skip`."""

    match: str
    status: int = 0
    said: str = "injected"
    how: str = ""
    times: int = 1
    skip: int = 0
    delay: float = 0.0
    met: int = 0


class Store:
    """A running server with objects by bucket and name, and a record of all requests."""

    def __init__(self, *buckets: str, location: str = "US-CENTRAL1") -> None:
        self.buckets: dict[str, dict[str, Object]] = {name: {} for name in buckets}
        self.locations = dict.fromkeys(buckets, location)
        self.soft_delete = 0  # seconds that deleted objects are retained
        self.uploads: dict[str, dict[str, Any]] = {}
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.clock = 0.0  # seconds by which the clock of the server is ahead
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
            stored = Object(data, self.generation, time.time() + self.clock, **more)
            self.buckets[bucket][name] = stored
            return stored

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
    """An error response."""

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

    def handle_request(self) -> None:
        store, url = self.store, urlsplit(self.path)
        self.query = {key: values[-1] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
        self.sent = self.body()
        self.limit: int | None = None  # 1: half of the response is sent; -1: nothing
        with store.lock:
            body_name = re.search(
                rb'"name": *"([^"]*)"', self.sent[:500]
            )  # some requests have the name in the body
            line = f"{self.command} {unquote(self.path)} {body_name[1].decode() if body_name else ''}"
            store.requests.append(line)
            fault = next(
                (fault_ for fault_ in store.faults if re.search(fault_.match, line) and is_due(fault_)), None
            )
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

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = handle_request

    def route(self, path: str) -> None:
        if match := re.fullmatch(r"/upload/storage/v1/b/([^/]+)/o", path):
            return self.upload(match[1])
        if match := re.fullmatch(r"/(?:download/)?storage/v1/b/([^/]+)/o/([^/]+)", path):
            return self.object(match[1], unquote(match[2]))
        moves = r"/storage/v1/b/([^/]+)/o/([^/]+)/(rewriteTo|copyTo|moveTo)(?:/b/([^/]+))?/o/([^/]+)"
        if match := re.fullmatch(moves, path):
            return self.move(match[1], unquote(match[2]), match[3], match[4] or match[1], unquote(match[5]))
        if match := re.fullmatch(r"/storage/v1/b/([^/]+)/o", path):
            return self.list(match[1])
        if match := re.fullmatch(r"/storage/v1/b/([^/]+)", path):
            self.bucket(match[1])
            location = self.store.locations[match[1]]
            resource = {"kind": "storage#bucket", "name": match[1], "location": location}
            policy = {"retentionDurationSeconds": str(self.store.soft_delete)}  # 64-bit numbers are strings
            return self.json(resource | {"softDeletePolicy": policy})
        raise Refused(501, f"not known here: {self.command} {path}")

    def upload(self, bucket: str) -> None:
        kind = self.query.get("uploadType")
        if kind == "media":
            return self.put(bucket, self.query["name"], self.sent, self.query)
        if kind == "multipart":
            boundary = re.search(r"boundary=['\"]?([^'\";]+)", self.headers["Content-Type"])
            assert boundary is not None
            parts = self.sent.split(b"--" + boundary[1].encode())[1:-1]
            end = b"\r\n" if parts[0].startswith(b"\r\n") else b"\n"  # gcsfs ends lines with only \n
            about, content = (part.removesuffix(end).partition(end + end)[2] for part in parts)
            metadata = json.loads(about)
            return self.put(bucket, metadata.get("name") or self.query["name"], content, self.query)
        if kind == "resumable" and "upload_id" not in self.query:
            metadata = json.loads(self.sent or b"{}")
            self.bucket(bucket)
            with self.store.lock:
                key = f"upload-{len(self.store.uploads)}"
                name = metadata.get("name") or self.query["name"]
                self.store.uploads[key] = dict(name=name, query=self.query, data=bytearray())
            location = f"{self.store.url}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={key}"
            return self.respond(200, b"", {"Location": location})
        return self.piece(bucket, self.store.uploads[self.query["upload_id"]])

    def piece(self, bucket: str, upload: dict[str, Any]) -> None:
        span = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", self.headers.get("Content-Range", ""))
        data = upload["data"]
        if span and span[1] is not None:
            del data[int(span[1]) :]
        data += self.sent
        if span and (span[3] == "*" or len(data) < int(span[3])):
            return self.respond(308, b"", {"Range": f"bytes=0-{len(data) - 1}"} if data else {})
        self.put(bucket, upload["name"], bytes(data), upload["query"])

    def put(self, bucket: str, name: str, data: bytes, query: dict[str, str]) -> None:
        with self.store.lock:
            self.bucket(bucket)
            self.check(bucket, name, query)
            stored = self.store.put(bucket, name, data)
        self.json(describe(bucket, name, stored))

    def check(self, bucket: str, name: str, query: dict[str, str]) -> None:
        """Refuse a request whose preconditions fail."""
        stored = self.store.buckets[bucket].get(name)
        generation = stored.generation if stored else 0
        if int(query.get("ifGenerationMatch", generation)) != generation:
            raise Refused(412, "conditionNotMet")
        if "ifGenerationNotMatch" in query and int(query["ifGenerationNotMatch"]) == generation:
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
            stored = objects[name]
            if self.command == "DELETE":
                del objects[name]
                return self.respond(204)
        if self.query.get("alt") != "media":
            return self.json(describe(bucket, name, stored))
        headers = {"x-goog-generation": str(stored.generation), "x-goog-hash": f"crc32c={crc(stored.data)}"}
        headers |= {"ETag": f'"{stored.generation}"', "x-goog-stored-content-length": str(len(stored.data))}
        range_ = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not range_ or not stored.data:
            return self.respond(200, stored.data, headers)
        size = len(stored.data)
        first = int(range_[1]) if range_[1] else max(size - int(range_[2]), 0)
        last = min(int(range_[2]), size - 1) if range_[1] and range_[2] else size - 1
        if first >= size:
            raise Refused(416, "range")
        headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        self.respond(206, stored.data[first : last + 1], headers)

    def move(self, bucket: str, name: str, verb: str, to: str, target: str) -> None:
        with self.store.lock:
            source, destination = self.bucket(bucket), self.bucket(to)
            if name not in source:
                raise Refused(404, f"No such object: {bucket}/{name}")
            copied = self.store.put(to, target, source[name].data)
            assert destination[target] is copied
            if verb == "moveTo":
                del source[name]
        resource = describe(to, target, copied)
        self.json({"done": True, "resource": resource} if verb == "rewriteTo" else resource)

    def list(self, bucket: str) -> None:
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        start, end = self.query.get("startOffset", ""), self.query.get("endOffset", "")
        with self.store.lock:
            objects, items, folders = dict(self.bucket(bucket)), [], []
        for name in sorted(objects):
            if not name.startswith(prefix) or name < start or (end and name >= end):
                continue
            remainder = name[len(prefix) :]
            if delimiter and delimiter in remainder:
                folder = prefix + remainder.split(delimiter)[0] + delimiter
                folders += [folder] if folder not in folders else []
            else:
                items.append(name)
        page_token, max_results = self.query.get("pageToken", ""), int(self.query.get("maxResults", 1000))
        remaining = sorted(name for name in [*items, *folders] if name > page_token)
        page = remaining[:max_results]
        listing: dict[str, Any] = {
            "items": [describe(bucket, name, objects[name]) for name in page if name in items],
            "prefixes": [name for name in page if name in folders],
        }
        if len(remaining) > max_results:
            listing["nextPageToken"] = page[-1]
        self.json(listing)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def json(self, content: Any) -> None:
        self.respond(200, json.dumps(content).encode())

    def refuse(self, status: int, message: str) -> None:
        if status == 304:
            return self.respond(304)
        error = {"code": status, "message": message, "errors": [{"message": message, "reason": "fake"}]}
        self.respond(status, json.dumps({"error": error}).encode())

    def date_time_string(self, timestamp: float | None = None) -> str:
        return formatdate((timestamp or time.time()) + self.store.clock, usegmt=True)

    def respond(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
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


def is_due(fault: Fault) -> bool:
    """Count a matching request; whether the fault applies to it."""
    fault.met += 1
    return fault.skip < fault.met <= fault.skip + fault.times


def crc(data: bytes) -> str:
    return base64.b64encode(google_crc32c.Checksum(data).digest()).decode()


def describe(bucket: str, name: str, stored: Object) -> dict[str, Any]:
    stamp = datetime.fromtimestamp(stored.updated, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"
    return {
        "kind": "storage#object",
        "bucket": bucket,
        "name": name,
        "generation": str(stored.generation),
        "metageneration": "1",
        "size": str(len(stored.data)),
        "crc32c": crc(stored.data),
        "etag": str(stored.generation),
        "contentType": stored.kind,
        "timeCreated": stamp,
        "updated": stamp,
        "storageClass": "STANDARD",
        "metadata": stored.metadata,
    }
