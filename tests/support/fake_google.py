"""Google's Cloud TPU API, Compute Engine's disks, a bucket's place and the metadata server, over real HTTP in
this process, with machines that are folders and real processes. Faults can be asked for."""

import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from headrace.tpu import clock
from tests.support import xla_flags
from tests.support.fake_machine import SCRIPTS, end_processes, free_port

ZONES = ("us-central2-b", "us-east1-d", "us-west4-a", "europe-west4-b")
STEP = 0.15  # seconds in each state of the queue
ENDING = 0.1  # and in that of being deleted
NUMBER = "projects/123456789"  # by which Google calls a project where it names one thing in another
QUEUE = ("ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE")
TYPE = "type.googleapis.com/google.cloud.tpu.v2."


class Google:
    """The state of everything. One lock: requests come in any order, and each is done alone."""

    def __init__(self, root: Path, *, timers: bool = False) -> None:
        self.root, self.lock, self.timers = root, threading.RLock(), timers
        self.queued: dict[str, dict[str, Any]] = {}
        self.nodes: dict[str, dict[str, Any]] = {}
        self.operations: dict[str, dict[str, Any]] = {}
        self.disks: dict[str, dict[str, Any]] = {}
        self.buckets = {"near": {"location": "US-CENTRAL2"}, "far": {"location": "EUROPE-WEST4"}}
        self.buckets["wide"] = {"location": "US"}
        self.calls: list[tuple[str, str, dict[str, str], Any]] = []
        self.faults: list[tuple[str, str, int, str]] = []  # method, part of the path, status, message
        self.stockout: set[str] = set()  # zones where the queue stands still
        self.born: list[str] = []  # how the next machines are: blocked, denied, or gone at once
        self.taken = ""  # the slice that is preempted when one of its machines asks for that
        self.undone = 0  # operations to delete that are accepted, and come to nothing
        self.unchanged = 0  # and to change a node
        self.unreachable: set[str] = set()  # zones that lists leave out, and name beside
        self.page = 500  # disks of a list at once
        self.allowed = ["tpu.nodes.delete"]  # what the account of the machines may do
        self.made, self.step = 0, STEP
        (root / "machines").mkdir(parents=True)
        for name, text in SCRIPTS.items():
            path = root / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text.format(python=sys.executable, root=root))
            path.chmod(0o755)
        self.python(f'exec "{sys.executable}" "$@"')
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), make_handler(self))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def python(self, script: str) -> None:
        """What the trainers are started by, on all machines."""
        new = self.root / "python.new"
        new.write_text(f"#!/bin/bash\n{script}\n")
        new.chmod(0o755)
        new.replace(self.root / "python")

    def env(self) -> dict[str, str]:
        """By which clients find all of this, Google's own among them."""
        key = self.root / "key"
        key.write_text("")
        key.with_name("key.pub").write_text("ssh-ed25519 AAAA user@here\n")
        return {
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": f"{self.url}/",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": f"{self.url}/compute/v1/",
            "CLOUDSDK_CORE_PROJECT": "project",
            "STORAGE_EMULATOR_HOST": self.url,
            "HEADRACE_SSH": str(self.root / "ssh"),
            "HEADRACE_HOME": str(self.root / "launcher"),
            "HEADRACE_POLL": "0.2",
            "HEADRACE_PATIENCE": "20",
        }

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        for name in list(self.nodes):
            self.switch_off(name)
        for machine in (self.root / "machines").glob("*"):
            end_processes(machine)

    # What a test does to it.

    def fault(self, method: str, part: str, status: int, message: str = "try again", count: int = 1) -> None:
        self.faults += [(method, part, status, message)] * count

    def preempt(self, name: str) -> None:
        with self.lock:
            for path, one in self.queued.items():
                if path.endswith(f"/{name}"):
                    one["fixed"] = {"state": "SUSPENDED", "suspendedData": {}}
            for path, node in self.nodes.items():
                if node.get("queuedResource", "").endswith(f"/{name}"):
                    self.switch_off(path)
                    node["state"] = "PREEMPTED"

    def fail(self, name: str, message: str) -> None:
        with self.lock:
            for path, one in self.queued.items():
                if path.endswith(f"/{name}"):
                    one["fixed"] = {
                        "state": "FAILED",
                        "failedData": {"error": {"code": 8, "message": message}},
                    }

    def block(self, name: str = "blocked") -> None:
        """Nobody reaches the machines any more, which are well: a firewall, or (`denied`) another key."""
        for machine in (self.root / "machines").glob("*"):
            (machine / name).touch()

    def trainers(self) -> list[int]:
        """Process numbers of those that train now, by worker."""
        return [
            int(file.read_text())
            for file in sorted((self.root / "machines").glob("*/home/*/.headrace/jobs/*/pid"))
            if not (file.parent / "exit").exists() and not (file.parents[5] / "off").exists()
        ]

    # What it does by itself.

    def make_node(self, name: str, told: dict[str, Any]) -> None:
        count = workers(told["acceleratorType"])
        self.made += 1
        ends = []
        port = free_port()
        for number in range(count):
            address = f"127.0.{self.made}.{number + 1}"
            home = self.root / "machines" / address / "home" / "user"
            (home / ".local").mkdir(parents=True)
            (home / ".local" / "bin").symlink_to(self.root / "bin")
            env = [f"XLA_FLAGS={xla_flags.flags(2)}"]
            env += [f"GCE_METADATA_HOST={self.url[7:]}/vm/{name}", "HEADRACE_HEARTBEAT=10"]
            if count > 1:
                env += [f"HEADRACE_COORDINATOR=127.0.0.1:{port}", f"HEADRACE_PROCESSES={count}"]
                env += [f"HEADRACE_PROCESS={number}"]
            (home.parents[1] / "env").write_text("\n".join(env) + "\n")
            ends.append({"ipAddress": f"10.0.0.{number}", "accessConfig": {"externalIp": address}})
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.nodes[name] = dict(told, name=name, state="READY", createTime=now, networkEndpoints=ends)
        for why, end in zip(self.born, ends, strict=False):
            (self.root / "machines" / end["accessConfig"]["externalIp"] / why).touch()
        if "gone" in self.born:
            self.switch_off(name)
            del self.nodes[name]
            return
        self.born = []
        for end in ends:
            if self.timers:
                self.start_timer(name, end["accessConfig"]["externalIp"])
            else:  # as one that is well would have written
                place = self.root / "machines" / end["accessConfig"]["externalIp"]
                (place / "may-delete").write_text("yes tpu.nodes.delete")
                (place / "alive").touch()

    def make_queued(self, name: str, node: str) -> None:
        """The request of a node that is there."""
        self.queued[name] = dict(told={}, begun=0.0, fixed={"state": "ACTIVE"}, active=True, ends=None)
        self.nodes[node]["queuedResource"] = numbered(name)

    def start_timer(self, name: str, address: str, **env: str) -> None:
        """As a machine does with its startup script."""
        place = self.root / "machines" / address
        script = place / "startup"
        script.write_text(self.nodes[name]["metadata"]["startup-script"])
        script.chmod(0o755)
        more = {"GCE_METADATA_HOST": f"{self.url[7:]}/vm/{name}", "HEADRACE_TIMER_API": self.url}
        more |= {"HEADRACE_TIMER_PLACE": str(place), "HEADRACE_TIMER_HOMES": str(place / "home")}
        more |= {"HEADRACE_TIMER_ROOT": str(place / "root")}
        more |= {"HEADRACE_TIMER_IAM": self.url, "HEADRACE_TIMER_UNITS": str(place / "systemd/units")}
        more |= {"PATH": f"{self.root}/machine:{os.environ['PATH']}"}
        more |= {"HEADRACE_TIMER_PACE": "0.2", "HEADRACE_TIMER_OFF": f"touch {place}/switched-off"}
        subprocess.run([sys.executable, str(script)], env=os.environ | more | env, check=True)

    def switch_off(self, name: str) -> None:
        """All its processes end at once, and nobody reaches it."""
        for end in self.nodes[name]["networkEndpoints"]:
            place = self.root / "machines" / end["accessConfig"]["externalIp"]
            (place / "off").touch()
            end_processes(place)

    def tick(self, name: str) -> dict[str, Any]:
        one = self.queued[name]
        if one["ends"] is not None:
            state = {"state": "DELETING"}
        elif one["fixed"] is None:
            at = min(int((clock.monotonic() - one["begun"]) / self.step), len(QUEUE) - 1)
            if name.split("/")[3] in self.stockout:
                at = min(at, 1)
            if QUEUE[at] == "ACTIVE" and not one["active"]:
                one["active"] = True
                for spec in one["told"]["tpu"]["nodeSpec"]:
                    several = spec.get("multisliceParams", {})
                    ids = [f"{several.get('nodeIdPrefix')}-{n}" for n in range(several.get("nodeCount", 0))]
                    for node in ids or [spec["nodeId"]]:
                        told = dict(spec["node"], queuedResource=numbered(name))
                        self.make_node(f"{spec['parent']}/nodes/{node}", told)
            state = {"state": QUEUE[at]}
        else:
            state = one["fixed"]
        return dict(one["told"], name=name, state=state)

    def operation(self, parent: str, response: dict[str, Any], kind: str) -> dict[str, Any]:
        name = f"{parent}/operations/{len(self.operations)}"
        told = {"@type": kind, **response}
        self.operations[name] = {"name": name, "done": True, "response": told}
        return self.operations[name]

    def bury(self) -> None:
        """What was asked to be deleted a moment ago is gone."""
        for name in [name for name, one in self.queued.items() if (one["ends"] or 1e99) < clock.monotonic()]:
            for node in self.own(name):
                self.switch_off(node)
                del self.nodes[node]
            del self.queued[name]

    def own(self, name: str) -> list[str]:
        return [node for node, told in self.nodes.items() if told.get("queuedResource") == numbered(name)]

    # The requests.

    def answer(self, method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        with self.lock:
            if path.startswith("/vm/"):
                return self.metadata(path)
            self.calls.append((method, path, query, body))
            self.bury()
            for fault in self.faults:
                if fault[0] == method and fault[1] in path:
                    self.faults.remove(fault)
                    return wrong(fault[2], fault[3])
            for pattern, function in ROUTES:
                if found := re.fullmatch(pattern, path):
                    return function(self, method, found.groups(), query, body)
            return wrong(501, f"{method} {path}")

    def metadata(self, path: str) -> tuple[int, Any]:
        if path == "/vm/take":  # by a machine that knows when
            self.preempt(self.taken)
            return 200, ""
        node, _, what = path.removeprefix("/vm/").partition("/computeMetadata/v1/instance/")
        if node not in self.nodes:
            return wrong(404, node)
        if what == "service-accounts/default/token":
            return 200, {"access_token": "of-the-machine", "expires_in": 3600}
        name = what.removeprefix("attributes/")
        told = self.nodes[node]["metadata"]
        return (200, told[name]) if name in told else wrong(404, name)

    def queued_resources(self, method: str, parts: Any, query: dict[str, str], body: Any) -> tuple[int, Any]:
        parent = parts[0]
        if parent.split("/")[3] not in (*ZONES, "-"):
            return wrong(404, f"Location {parent.split('/')[3]} is not found or access is unauthorized.")
        if method == "GET":
            names = [name for name in self.queued if within(name, parent)]
            return 200, self.reached(parent, "queuedResources", [self.tick(name) for name in names])
        name = f"{parent}/queuedResources/{query.get('queuedResourceId') or query['queued_resource_id']}"
        if name in self.queued:
            return wrong(409, f"{name} already exists")
        self.queued[name] = dict(told=body, begun=clock.monotonic(), fixed=None, active=False, ends=None)
        return 200, self.operation(parent, self.tick(name), TYPE + "QueuedResource")

    def queued_resource(self, method: str, parts: Any, query: dict[str, str], body: Any) -> tuple[int, Any]:
        name = f"{parts[0]}/queuedResources/{parts[1]}"
        if name not in self.queued:
            return wrong(404, f"Resource '{name}' was not found")
        if method == "GET":
            return 200, self.tick(name)
        if self.own(name) and query.get("force", "").lower() != "true":
            return wrong(400, "precondition: it has nodes; use force")
        if self.undone:
            self.undone -= 1
            told = self.operation(parts[0], {}, "type.googleapis.com/google.protobuf.Empty")
            told["error"] = {"code": 13, "message": "an internal error occurred"}
            del told["response"]
            return 200, told | {"done": False}
        if self.queued[name]["ends"] is None:
            self.queued[name]["ends"] = clock.monotonic() + ENDING
        return 200, self.operation(parts[0], {}, "type.googleapis.com/google.protobuf.Empty")

    def permissions(self, method: str, parts: Any, query: dict[str, str], body: Any) -> tuple[int, Any]:
        return 200, {"permissions": [name for name in body["permissions"] if name in self.allowed]}

    def locations(self, method: str, parts: Any, query: dict[str, str], body: Any) -> tuple[int, Any]:
        return 200, {"locations": [{"name": f"{path}", "locationId": path} for path in ZONES]}

    def all_nodes(self, method: str, parts: Any, query: dict[str, str], body: Any) -> tuple[int, Any]:
        for name in list(self.queued):
            self.tick(name)
        found = [dict(node) for name, node in self.nodes.items() if within(name, parts[0])]
        return 200, self.reached(parts[0], "nodes", found)

    def reached(self, parent: str, kind: str, found: list[dict[str, Any]]) -> dict[str, Any]:
        """A list without what is in zones that cannot be reached."""
        found = [one for one in found if one["name"].split("/")[3] not in self.unreachable]
        lost = [zone for zone in sorted(self.unreachable) if parent.split("/")[3] in ("-", zone)]
        return {kind: found} | (
            {"unreachable": [f"{NUMBER}/locations/{zone}" for zone in lost]} if lost else {}
        )

    def one_node(self, method: str, parts: Any, query: dict[str, str], body: Any) -> tuple[int, Any]:
        name = f"{parts[0]}/nodes/{parts[1]}"
        if name not in self.nodes:
            return wrong(404, f"Resource '{name}' was not found")
        if method == "PATCH" and self.unchanged:
            self.unchanged -= 1
            told = self.operation(parts[0], {}, TYPE + "Node")
            told["error"] = {"code": 13, "message": "an internal error occurred"}
            del told["response"]
            return 200, told
        if method == "PATCH":
            for key in ("labels", "metadata", "dataDisks"):
                if (
                    re.sub(r"[A-Z]", lambda m: f"_{m[0].lower()}", key) in query["updateMask"]
                    or key in query["updateMask"]
                ):
                    self.nodes[name][key] = body.get(key, [])
            return 200, self.operation(parts[0], self.nodes[name], TYPE + "Node")
        if method == "DELETE":
            self.switch_off(name)
            del self.nodes[name]
            return 200, self.operation(parts[0], {}, "type.googleapis.com/google.protobuf.Empty")
        return 200, self.nodes[name]

    def one_operation(self, method: str, parts: Any, query: dict[str, str], body: Any) -> tuple[int, Any]:
        return 200, self.operations[parts[0]]

    def all_disks(self, method: str, parts: Any, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if method == "GET":
            label = query["filter"].removeprefix("labels.").removesuffix("=yes")
            found = [one for one in self.disks.values() if label in one.get("labels", {})]
            begin = int(query.get("pageToken", "0"))
            more = {"nextPageToken": str(begin + self.page)} if len(found) > begin + self.page else {}
            return 200, {"items": found[begin : begin + self.page], **more}
        if body["name"] in self.disks:
            return wrong(409, f"The resource '{body['name']}' already exists")
        self.disks[body["name"]] = body | {"zone": f"https://www.googleapis.com/compute/v1/{parts[0]}"}
        return 200, {"name": "one", "status": "RUNNING"}

    def disks_everywhere(self, *asked: Any) -> tuple[int, Any]:
        zones: dict[str, Any] = {}
        told = self.all_disks(*asked)[1]
        for one in told["items"]:
            zones.setdefault("zones/" + one["zone"].rpartition("/")[2], {"disks": []})["disks"].append(one)
        return 200, told | {"items": {"zones/us-west4-a": {"warning": {}}} | zones}

    def one_disk(self, method: str, parts: Any, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if parts[0] not in self.disks:
            return wrong(404, f"The resource '{parts[0]}' was not found")
        if method == "GET":
            return 200, self.disks[parts[0]]
        if any(parts[0] in str(node.get("dataDisks", "")) for node in self.nodes.values()):
            return wrong(400, f"The disk '{parts[0]}' is in use")
        del self.disks[parts[0]]
        return 200, {"name": "one", "status": "RUNNING"}

    def disk_operation(self, method: str, parts: Any, query: dict[str, str], body: Any) -> tuple[int, Any]:
        return 200, {"name": parts[0], "status": "DONE"}

    def bucket(self, method: str, parts: Any, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if parts[0] == "shy":
            return wrong(403, "does not have storage.buckets.get access")
        return (200, self.buckets[parts[0]]) if parts[0] in self.buckets else wrong(404, "no such bucket")


API = r"/v2(?:alpha1)?/"
HERE = r"(projects/[^/]+/locations/[^/]+)"
DISKS = r"/compute/v1/projects/[^/]+/zones/[^/]+"
ZONE = r"/compute/v1/(projects/[^/]+/zones/[^/]+)"
ROUTES: list[tuple[str, Callable[..., tuple[int, Any]]]] = [
    (f"{API}{HERE}/queuedResources", Google.queued_resources),
    (f"{API}{HERE}/queuedResources/([^/:]+)", Google.queued_resource),
    (f"{API}{HERE}/nodes", Google.all_nodes),
    (f"{API}projects/[^/]+/locations", Google.locations),
    (f"{API}{HERE}/nodes/([^/:]+)", Google.one_node),
    (f"{API}({HERE[1:-1]}/operations/[^/]+)", Google.one_operation),
    (r"/v1/projects/[^/]+:testIamPermissions", Google.permissions),
    (r"/compute/v1/projects/[^/]+/aggregated/disks", Google.disks_everywhere),
    (f"{ZONE}/disks", Google.all_disks),
    (f"{DISKS}/disks/([^/]+)", Google.one_disk),
    (f"{DISKS}/operations/([^/]+)", Google.disk_operation),
    (r"/storage/v1/b/([^/]+)", Google.bucket),
]


def make_handler(google: Google) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def go(self) -> None:
            url = urllib.parse.urlsplit(self.path)
            query = {name: values[-1] for name, values in urllib.parse.parse_qs(url.query).items()}
            given = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, told = google.answer(self.command, url.path, query, json.loads(given or b"null"))
            content = told.encode() if isinstance(told, str) else json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = do_PATCH = go

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


def numbered(name: str) -> str:
    return "/".join([NUMBER, *name.split("/")[2:]])


def wrong(status: int, message: str) -> tuple[int, Any]:
    return status, {"error": {"code": status, "message": message, "status": str(status)}}


def within(name: str, parent: str) -> bool:
    return parent.endswith("/-") or name.startswith(f"{parent}/")


def workers(accelerator: str) -> int:
    """Machines of a slice, by Google's names."""
    kind, _, size = accelerator.rpartition("-")
    if kind in ("v5litepod", "v6e"):
        return 1 if int(size) <= 8 else int(size) // 4
    return max(1, int(size) // 8)
