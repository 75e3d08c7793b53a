"""A fake of Google Cloud over real HTTP in this process: the Cloud TPU API, Compute Engine disks, bucket
locations and the metadata server. Machines are folders with real processes. Tests can inject faults."""

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
STATE_SECONDS = 0.15  # seconds a request spends in each state of the queue
DELETE_SECONDS = 0.1  # seconds a deletion takes
PROJECT_NUMBER = "projects/123456789"  # Google refers to projects by number in references between resources
QUEUE = ("ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE")
TYPE = "type.googleapis.com/google.cloud.tpu.v2."


class Google:
    """All resources. One lock serializes the requests, which arrive in any order."""

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
        self.stockout: set[str] = set()  # zones where requests stay in the queue
        self.next_machine_states: list[str] = []  # of the next machines: blocked, denied or gone
        self.slice_to_preempt = ""  # preempted when a machine requests /vm/take
        self.failing_deletions = 0  # number of deletions that are accepted and then fail
        self.failing_updates = 0  # number of node updates that are accepted and then fail
        self.unreachable: set[str] = set()  # zones that lists omit and name as unreachable
        self.page_size = 500  # disks per page of a list
        self.allowed_permissions = ["tpu.nodes.delete"]  # permissions of the machines' service account
        self.num_created_nodes, self.seconds_per_state = 0, STATE_SECONDS
        (root / "machines").mkdir(parents=True)
        for name, text in SCRIPTS.items():
            path = root / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text.format(python=sys.executable, root=root))
            path.chmod(0o755)
        self.set_trainer_script(f'exec "{sys.executable}" "$@"')
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), make_handler(self))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def set_trainer_script(self, script: str) -> None:
        """Replace the Python that starts trainers on all machines by a script."""
        new = self.root / "python.new"
        new.write_text(f"#!/bin/bash\n{script}\n")
        new.chmod(0o755)
        new.replace(self.root / "python")

    def env(self) -> dict[str, str]:
        """Environment variables that point all clients, Google's included, to this fake."""
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

    # Called by tests.

    def fault(self, method: str, part: str, status: int, message: str = "try again", count: int = 1) -> None:
        self.faults += [(method, part, status, message)] * count

    def preempt(self, name: str) -> None:
        with self.lock:
            for path, request in self.queued.items():
                if path.endswith(f"/{name}"):
                    request["forced"] = {"state": "SUSPENDED", "suspendedData": {}}
            for path, node in self.nodes.items():
                if node.get("queuedResource", "").endswith(f"/{name}"):
                    self.switch_off(path)
                    node["state"] = "PREEMPTED"

    def fail(self, name: str, message: str) -> None:
        with self.lock:
            for path, request in self.queued.items():
                if path.endswith(f"/{name}"):
                    request["forced"] = {
                        "state": "FAILED",
                        "failedData": {"error": {"code": 8, "message": message}},
                    }

    def block(self, name: str = "blocked") -> None:
        """Make healthy machines unreachable: by a firewall or, with `denied`, by another key."""
        for machine in (self.root / "machines").glob("*"):
            (machine / name).touch()

    def trainers(self) -> list[int]:
        """Process ids of the running trainers, by worker."""
        return [
            int(file.read_text())
            for file in sorted((self.root / "machines").glob("*/home/*/.headrace/jobs/*/pid"))
            if not (file.parent / "exit").exists() and not (file.parents[5] / "off").exists()
        ]

    # State changes.

    def make_node(self, name: str, config: dict[str, Any]) -> None:
        count = num_workers(config["acceleratorType"])
        self.num_created_nodes += 1
        endpoints = []
        port = free_port()
        for worker in range(count):
            address = f"127.0.{self.num_created_nodes}.{worker + 1}"
            home = self.root / "machines" / address / "home" / "user"
            (home / ".local").mkdir(parents=True)
            (home / ".local" / "bin").symlink_to(self.root / "bin")
            env = [f"XLA_FLAGS={xla_flags.flags(2)}"]
            env += [f"GCE_METADATA_HOST={self.url[7:]}/vm/{name}", "HEADRACE_HEARTBEAT=10"]
            if count > 1:
                env += [f"HEADRACE_COORDINATOR=127.0.0.1:{port}", f"HEADRACE_PROCESSES={count}"]
                env += [f"HEADRACE_PROCESS={worker}"]
            (home.parents[1] / "env").write_text("\n".join(env) + "\n")
            endpoints.append({"ipAddress": f"10.0.0.{worker}", "accessConfig": {"externalIp": address}})
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.nodes[name] = dict(config, name=name, state="READY", createTime=now, networkEndpoints=endpoints)
        for machine_state, endpoint in zip(self.next_machine_states, endpoints, strict=False):
            (self.root / "machines" / endpoint["accessConfig"]["externalIp"] / machine_state).touch()
        if "gone" in self.next_machine_states:
            self.switch_off(name)
            del self.nodes[name]
            return
        self.next_machine_states = []
        for endpoint in endpoints:
            if self.timers:
                self.start_timer(name, endpoint["accessConfig"]["externalIp"])
            else:  # what the timer of a healthy machine would have written
                machine = self.root / "machines" / endpoint["accessConfig"]["externalIp"]
                (machine / "may-delete").write_text("yes tpu.nodes.delete")
                (machine / "alive").touch()

    def make_queued(self, name: str, node: str) -> None:
        """Add the request of an existing node."""
        self.queued[name] = dict(
            body={}, created_at=0.0, forced={"state": "ACTIVE"}, active=True, deleted_at=None
        )
        self.nodes[node]["queuedResource"] = with_project_number(name)

    def start_timer(self, name: str, address: str, **env: str) -> None:
        """Run the startup script of a machine."""
        machine = self.root / "machines" / address
        script = machine / "startup"
        script.write_text(self.nodes[name]["metadata"]["startup-script"])
        script.chmod(0o755)
        overrides = {"GCE_METADATA_HOST": f"{self.url[7:]}/vm/{name}", "HEADRACE_TIMER_API": self.url}
        overrides |= {"HEADRACE_TIMER_PLACE": str(machine), "HEADRACE_TIMER_HOMES": str(machine / "home")}
        overrides |= {"HEADRACE_TIMER_ROOT": str(machine / "root")}
        overrides |= {"HEADRACE_TIMER_IAM": self.url, "HEADRACE_TIMER_UNITS": str(machine / "systemd/units")}
        overrides |= {"PATH": f"{self.root}/machine:{os.environ['PATH']}"}
        overrides |= {"HEADRACE_TIMER_PACE": "0.2", "HEADRACE_TIMER_OFF": f"touch {machine}/switched-off"}
        subprocess.run([sys.executable, str(script)], env=os.environ | overrides | env, check=True)

    def switch_off(self, name: str) -> None:
        """Kill all processes of the machines and make them unreachable."""
        for endpoint in self.nodes[name]["networkEndpoints"]:
            machine = self.root / "machines" / endpoint["accessConfig"]["externalIp"]
            (machine / "off").touch()
            end_processes(machine)

    def advance(self, name: str) -> dict[str, Any]:
        request = self.queued[name]
        if request["deleted_at"] is not None:
            state = {"state": "DELETING"}
        elif request["forced"] is None:
            position = min(
                int((clock.monotonic() - request["created_at"]) / self.seconds_per_state), len(QUEUE) - 1
            )
            if name.split("/")[3] in self.stockout:
                position = min(position, 1)
            if QUEUE[position] == "ACTIVE" and not request["active"]:
                request["active"] = True
                for spec in request["body"]["tpu"]["nodeSpec"]:
                    multislice = spec.get("multisliceParams", {})
                    ids = [
                        f"{multislice.get('nodeIdPrefix')}-{n}" for n in range(multislice.get("nodeCount", 0))
                    ]
                    for node in ids or [spec["nodeId"]]:
                        config = dict(spec["node"], queuedResource=with_project_number(name))
                        self.make_node(f"{spec['parent']}/nodes/{node}", config)
            state = {"state": QUEUE[position]}
        else:
            state = request["forced"]
        return dict(request["body"], name=name, state=state)

    def operation(self, parent: str, response: dict[str, Any], kind: str) -> dict[str, Any]:
        name = f"{parent}/operations/{len(self.operations)}"
        typed_response = {"@type": kind, **response}
        self.operations[name] = {"name": name, "done": True, "response": typed_response}
        return self.operations[name]

    def remove_deleted(self) -> None:
        """Remove the resources whose deletion has completed."""
        now = clock.monotonic()
        for name in [name for name, request in self.queued.items() if (request["deleted_at"] or 1e99) < now]:
            for node in self.nodes_of(name):
                self.switch_off(node)
                del self.nodes[node]
            del self.queued[name]

    def nodes_of(self, name: str) -> list[str]:
        resource = with_project_number(name)
        return [node for node, config in self.nodes.items() if config.get("queuedResource") == resource]

    # Handlers of requests.

    def handle_request(self, method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        with self.lock:
            if path.startswith("/vm/"):
                return self.metadata(path)
            self.calls.append((method, path, query, body))
            self.remove_deleted()
            for fault in self.faults:
                if fault[0] == method and fault[1] in path:
                    self.faults.remove(fault)
                    return make_error(fault[2], fault[3])
            for pattern, function in ROUTES:
                if match := re.fullmatch(pattern, path):
                    return function(self, method, match.groups(), query, body)
            return make_error(501, f"{method} {path}")

    def metadata(self, path: str) -> tuple[int, Any]:
        if path == "/vm/take":  # requested by a machine at the right moment
            self.preempt(self.slice_to_preempt)
            return 200, ""
        node, _, key = path.removeprefix("/vm/").partition("/computeMetadata/v1/instance/")
        if node not in self.nodes:
            return make_error(404, node)
        if key == "service-accounts/default/token":
            return 200, {"access_token": "of-the-machine", "expires_in": 3600}
        name = key.removeprefix("attributes/")
        metadata = self.nodes[node]["metadata"]
        return (200, metadata[name]) if name in metadata else make_error(404, name)

    def queued_resources(self, method: str, parts: Any, query: dict[str, str], body: Any) -> tuple[int, Any]:
        parent = parts[0]
        if parent.split("/")[3] not in (*ZONES, "-"):
            return make_error(404, f"Location {parent.split('/')[3]} is not found or access is unauthorized.")
        if method == "GET":
            names = [name for name in self.queued if is_within(name, parent)]
            return 200, self.list_reachable(parent, "queuedResources", [self.advance(name) for name in names])
        name = f"{parent}/queuedResources/{query.get('queuedResourceId') or query['queued_resource_id']}"
        if name in self.queued:
            return make_error(409, f"{name} already exists")
        self.queued[name] = dict(
            body=body, created_at=clock.monotonic(), forced=None, active=False, deleted_at=None
        )
        return 200, self.operation(parent, self.advance(name), TYPE + "QueuedResource")

    def queued_resource(self, method: str, parts: Any, query: dict[str, str], body: Any) -> tuple[int, Any]:
        name = f"{parts[0]}/queuedResources/{parts[1]}"
        if name not in self.queued:
            return make_error(404, f"Resource '{name}' was not found")
        if method == "GET":
            return 200, self.advance(name)
        if self.nodes_of(name) and query.get("force", "").lower() != "true":
            return make_error(400, "precondition: it has nodes; use force")
        if self.failing_deletions:
            self.failing_deletions -= 1
            operation = self.operation(parts[0], {}, "type.googleapis.com/google.protobuf.Empty")
            operation["error"] = {"code": 13, "message": "an internal error occurred"}
            del operation["response"]
            return 200, operation | {"done": False}
        if self.queued[name]["deleted_at"] is None:
            self.queued[name]["deleted_at"] = clock.monotonic() + DELETE_SECONDS
        return 200, self.operation(parts[0], {}, "type.googleapis.com/google.protobuf.Empty")

    def permissions(self, method: str, parts: Any, query: dict[str, str], body: Any) -> tuple[int, Any]:
        return 200, {
            "permissions": [name for name in body["permissions"] if name in self.allowed_permissions]
        }

    def locations(self, method: str, parts: Any, query: dict[str, str], body: Any) -> tuple[int, Any]:
        return 200, {"locations": [{"name": f"{path}", "locationId": path} for path in ZONES]}

    def list_nodes(self, method: str, parts: Any, query: dict[str, str], body: Any) -> tuple[int, Any]:
        for name in list(self.queued):
            self.advance(name)
        nodes = [dict(node) for name, node in self.nodes.items() if is_within(name, parts[0])]
        return 200, self.list_reachable(parts[0], "nodes", nodes)

    def list_reachable(self, parent: str, kind: str, resources: list[dict[str, Any]]) -> dict[str, Any]:
        """A list response without the resources of unreachable zones, which it names."""
        resources = [
            resource for resource in resources if resource["name"].split("/")[3] not in self.unreachable
        ]
        missing_zones = [zone for zone in sorted(self.unreachable) if parent.split("/")[3] in ("-", zone)]
        return {kind: resources} | (
            {"unreachable": [f"{PROJECT_NUMBER}/locations/{zone}" for zone in missing_zones]}
            if missing_zones
            else {}
        )

    def node(self, method: str, parts: Any, query: dict[str, str], body: Any) -> tuple[int, Any]:
        name = f"{parts[0]}/nodes/{parts[1]}"
        if name not in self.nodes:
            return make_error(404, f"Resource '{name}' was not found")
        if method == "PATCH" and self.failing_updates:
            self.failing_updates -= 1
            operation = self.operation(parts[0], {}, TYPE + "Node")
            operation["error"] = {"code": 13, "message": "an internal error occurred"}
            del operation["response"]
            return 200, operation
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

    def get_operation(self, method: str, parts: Any, query: dict[str, str], body: Any) -> tuple[int, Any]:
        return 200, self.operations[parts[0]]

    def disks_of_zone(self, method: str, parts: Any, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if method == "GET":
            label = query["filter"].removeprefix("labels.").removesuffix("=yes")
            matching = [disk for disk in self.disks.values() if label in disk.get("labels", {})]
            start = int(query.get("pageToken", "0"))
            next_page = (
                {"nextPageToken": str(start + self.page_size)}
                if len(matching) > start + self.page_size
                else {}
            )
            return 200, {"items": matching[start : start + self.page_size], **next_page}
        if body["name"] in self.disks:
            return make_error(409, f"The resource '{body['name']}' already exists")
        self.disks[body["name"]] = body | {"zone": f"https://www.googleapis.com/compute/v1/{parts[0]}"}
        return 200, {"name": "one", "status": "RUNNING"}

    def list_all_disks(self, *request: Any) -> tuple[int, Any]:
        zones: dict[str, Any] = {}
        listing = self.disks_of_zone(*request)[1]
        for disk in listing["items"]:
            zones.setdefault("zones/" + disk["zone"].rpartition("/")[2], {"disks": []})["disks"].append(disk)
        return 200, listing | {"items": {"zones/us-west4-a": {"warning": {}}} | zones}

    def disk(self, method: str, parts: Any, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if parts[0] not in self.disks:
            return make_error(404, f"The resource '{parts[0]}' was not found")
        if method == "GET":
            return 200, self.disks[parts[0]]
        if any(parts[0] in str(node.get("dataDisks", "")) for node in self.nodes.values()):
            return make_error(400, f"The disk '{parts[0]}' is in use")
        del self.disks[parts[0]]
        return 200, {"name": "one", "status": "RUNNING"}

    def disk_operation(self, method: str, parts: Any, query: dict[str, str], body: Any) -> tuple[int, Any]:
        return 200, {"name": parts[0], "status": "DONE"}

    def bucket(self, method: str, parts: Any, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if parts[0] == "shy":
            return make_error(403, "does not have storage.buckets.get access")
        return (
            (200, self.buckets[parts[0]]) if parts[0] in self.buckets else make_error(404, "no such bucket")
        )


API = r"/v2(?:alpha1)?/"
LOCATION = r"(projects/[^/]+/locations/[^/]+)"
DISKS = r"/compute/v1/projects/[^/]+/zones/[^/]+"
ZONE = r"/compute/v1/(projects/[^/]+/zones/[^/]+)"
ROUTES: list[tuple[str, Callable[..., tuple[int, Any]]]] = [
    (f"{API}{LOCATION}/queuedResources", Google.queued_resources),
    (f"{API}{LOCATION}/queuedResources/([^/:]+)", Google.queued_resource),
    (f"{API}{LOCATION}/nodes", Google.list_nodes),
    (f"{API}projects/[^/]+/locations", Google.locations),
    (f"{API}{LOCATION}/nodes/([^/:]+)", Google.node),
    (f"{API}({LOCATION[1:-1]}/operations/[^/]+)", Google.get_operation),
    (r"/v1/projects/[^/]+:testIamPermissions", Google.permissions),
    (r"/compute/v1/projects/[^/]+/aggregated/disks", Google.list_all_disks),
    (f"{ZONE}/disks", Google.disks_of_zone),
    (f"{DISKS}/disks/([^/]+)", Google.disk),
    (f"{DISKS}/operations/([^/]+)", Google.disk_operation),
    (r"/storage/v1/b/([^/]+)", Google.bucket),
]


def make_handler(google: Google) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_http(self) -> None:
            url = urllib.parse.urlsplit(self.path)
            query = {name: values[-1] for name, values in urllib.parse.parse_qs(url.query).items()}
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, response = google.handle_request(
                self.command, url.path, query, json.loads(body or b"null")
            )
            content = response.encode() if isinstance(response, str) else json.dumps(response).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = do_PATCH = handle_http

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


def with_project_number(name: str) -> str:
    return "/".join([PROJECT_NUMBER, *name.split("/")[2:]])


def make_error(status: int, message: str) -> tuple[int, Any]:
    return status, {"error": {"code": status, "message": message, "status": str(status)}}


def is_within(name: str, parent: str) -> bool:
    return parent.endswith("/-") or name.startswith(f"{parent}/")


def num_workers(accelerator: str) -> int:
    """Number of machines of a slice, from Google's accelerator type."""
    kind, _, size = accelerator.rpartition("-")
    if kind in ("v5litepod", "v6e"):
        return 1 if int(size) <= 8 else int(size) // 4
    return max(1, int(size) // 8)
